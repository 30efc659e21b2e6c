/* ---- GEMM -------------------------------------------------------------------------------------------------------- */

#pragma once
#include "gemm.h"
#include "gemm_packed.h"
#include "rows.c"
#include "panels.c"
#include "operator.c"
#include "add.cuh"
#include "hash.cuh"

/* c [m, n] = alpha op(a) op(b) + beta c. All three matrices are row-major with leading dimensions. */
typedef struct mti_matmul {
    int trans_a, trans_b;
    mt_dtype a_type, b_type, c_type;
    int64_t m, n, k;
    float alpha, beta;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    int few; /* see mti_gemm_is_few */
    /* The threads of a context share a product: each computes `each` rows of c, or columns with by_cols. The last one
       may have fewer. See mti_gemm_split. */
    int by_cols;
    int64_t each;
    void *plan, *last_plan; /* of a part with `each` rows or columns, and of a smaller last part; see mti_native_plan */
    const mti_packed *packed; /* of b; NULL: b is read */
    int64_t first_col;        /* of a part: its first column in the packed copy */
    size_t packed_step;       /* oneDNN: the bytes from a column of the copy to that which is `each` columns on */
} mti_matmul;

#define MTI_TRANSPOSE_WORDS "MT_NO_TRANS MT_TRANS"

#define MTI_FEW_MOST 8        /* up to here mti_few_rows is faster than CBLAS, the built-in loop and dnnl_sgemm */
#define MTI_FEW_MOST_NATIVE 4 /* up to here it is faster than oneDNN with 16-bit operands as they are */

/* Whether mti_few_rows computes a product. The answer depends on sizes and options, but not on types, so that widened
   operands give the same bits. */
static int mti_gemm_is_few(const mti_matmul *g, int64_t most) {
    return MTI_HAS_FEW && !g->trans_a && g->trans_b && g->m > 0 && g->m <= most && g->n > 0 && g->k >= MTI_FEW_LEAST &&
           g->alpha != 0.0f;
}

#define MTI_GEMM_COLS 64    /* threads that share columns get multiples of so many */
#define MTI_PACKED_ROWS 128 /* oneDNN chooses the layout of a packed copy for products with so many rows */
#define MTI_PACKED_MOST 256 /* up to here an f32 product with a packed copy is faster than dnnl_sgemm */

/* Checks what the argument table of mt_gemm cannot express. */
static mt_status mti_expect_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, mt_tensor a, mt_tensor b,
                                 mt_tensor c, const mti_matmul *g) {
    int64_t inner_b = trans_b ? b.cols : b.rows;
    MT_TRY(mt_check_enum(ctx, "mt_gemm", NULL, "trans_a", (int)trans_a, MTI_TRANSPOSE_WORDS));
    MT_TRY(mt_check_enum(ctx, "mt_gemm", NULL, "trans_b", (int)trans_b, MTI_TRANSPOSE_WORDS));
    if (g->k != inner_b)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "mt_gemm: a is [%lld, %lld]%s, b is [%lld, %lld]%s: inner sizes %lld and %lld "
                       "differ",
                       (long long)a.rows, (long long)a.cols, trans_a ? " transposed" : "", (long long)b.rows,
                       (long long)b.cols, trans_b ? " transposed" : "", (long long)g->k, (long long)inner_b);
    return mt_tensor_check(ctx, "mt_gemm", "c", c, MT_ARG_FLOAT, g->m, g->n);
}

/* CBLAS takes sizes as int. The same limit holds for every library, so that a program works with each of them. */
static mt_status mti_expect_gemm_sizes(mt_context *ctx, const mti_matmul *g, mt_tensor a, mt_tensor b, mt_tensor c) {
    int64_t size = mt_max(mt_max(g->m, g->n), g->k),
            ld = mt_max(mt_max(mt_tensor_ld(a), mt_tensor_ld(b)), mt_tensor_ld(c));
    if (mt_max(size, ld) > INT_MAX)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                       "mt_gemm: m %lld, n %lld, k %lld, largest ld %lld: more than %d is not "
                       "supported",
                       (long long)g->m, (long long)g->n, (long long)g->k, (long long)ld, INT_MAX);
    return MT_SUCCESS;
}

/* The address of an element of x. A matrix without elements may have no address. */
static const void *mti_element(const void *x, int64_t element, mt_dtype type) {
    return x ? (const unsigned char *)x + (size_t)element * mt_dtype_size(type) : NULL;
}

/* The size that threads share: rows of c, or columns with by_cols. */
static int64_t mti_gemm_shared_size(const mti_matmul *g) { return g->by_cols ? g->n : g->m; }

/* Rows [first, last) of c as a product of their own, or columns with by_cols. */
static mti_matmul mti_gemm_part(const mti_matmul *g, int64_t first, int64_t last) {
    mti_matmul p = *g;
    int64_t a = g->by_cols ? 0 : first * (g->trans_a ? 1 : g->lda);
    int64_t b = g->by_cols ? first * (g->trans_b ? g->ldb : 1) : 0, c = first * (g->by_cols ? 1 : g->ldc);
    *(g->by_cols ? &p.n : &p.m) = last - first;
    p.a = mti_element(g->a, a, g->a_type);
    p.b = mti_element(g->b, b, g->b_type);
    p.c = (void *)(uintptr_t)mti_element(g->c, c, g->c_type);
    p.first_col = g->by_cols ? first : 0;
    if (last - first != g->each) p.plan = g->last_plan;
    return p;
}

#if !defined(MT_USE_CBLAS)
/* Returns the packed copy that a product can use, or NULL. */
static const mti_packed *mti_packed_find(mt_context *ctx, const mti_matmul *g) {
    const mti_kernels *k = (const mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    const mti_packed *p = k ? k->packed : NULL;
    if (g->trans_a || !g->trans_b || g->alpha != 1.0f || g->beta != 0.0f) return NULL;
    while (p && (p->weight.data != g->b || p->weight.dtype != g->b_type || p->weight.rows != g->n ||
                 p->weight.cols != g->k || mt_tensor_ld(p->weight) != g->ldb))
        p = p->next;
    return p;
}
#endif

/* c = beta c, in f32. This is the result if k or alpha is 0. */
static void mti_gemm_scale(const mti_matmul *g) {
    float *c = (float *)g->c;
    int64_t i;
    for (i = 0; i < g->m; i++, c += g->ldc) {
        if (g->beta == 0.0f) mti_row_fill(c, 0.0f, g->n);
        else mti_row_scale(c, g->beta, g->n);
    }
}

#if defined(MT_USE_ONEDNN) || defined(MT_USE_CBLAS)
/* The threads of a context share a product, so the library computes each part on one thread. A library that runs on
   OpenMP has one thread count per calling thread. mti_omp_begin sets it to 1 and returns the thread count to restore,
   or 0. The references to OpenMP are weak and have private names, so that this code compiles and links without it. */
#if defined(__GNUC__)
static void mti_omp_set_num_threads(int) __attribute__((weakref("omp_set_num_threads")));
static int mti_omp_get_max_threads(void) __attribute__((weakref("omp_get_max_threads")));

static int mti_omp_begin(void) {
    int before;
    if (!mti_omp_set_num_threads || !mti_omp_get_max_threads) return 0;
    before = mti_omp_get_max_threads();
    if (before == 1) return 0;
    mti_omp_set_num_threads(1);
    return before;
}
static void mti_omp_end(int before) {
    if (before > 0) mti_omp_set_num_threads(before);
}
#else
static int mti_omp_begin(void) { return 0; }
static void mti_omp_end(int before) { (void)before; }
#endif
#endif

#if defined(MT_USE_ONEDNN)
#define MTI_TEXT(x) #x
#define MTI_VERSION(major, minor, patch) "oneDNN " MTI_TEXT(major) "." MTI_TEXT(minor) "." MTI_TEXT(patch)

MT_API const char *mt_gemm_library(void) {
    return MTI_VERSION(DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH);
}

static mt_status mti_dnnl_check(mt_context *ctx, const mti_matmul *g, const char *call, dnnl_status_t status) {
    if (status == dnnl_success) return MT_SUCCESS;
    return mt_fail(ctx, status == dnnl_out_of_memory ? MT_ERR_MEMORY : MT_ERR_SYSTEM,
                   "mt_gemm: %s of m %lld, n %lld, k %lld failed with status %d", call, (long long)g->m,
                   (long long)g->n, (long long)g->k, (int)status);
}

/* The key of a plan: what distinguishes products for oneDNN. */
typedef struct mti_dnnl_key {
    int64_t m, n, k, lda, ldb, ldc;
    int64_t packed; /* the columns of the whole packed copy, of which the product reads n; 0: b is read */
    int trans_a, trans_b, type, c_type;
    float beta;
} mti_dnnl_key;

/* A product of 16-bit operands or with a packed copy in oneDNN. */
typedef struct mti_dnnl_plan {
    mti_dnnl_key key;
    uint64_t used;              /* the value of mti_dnnl.clock at the last use */
    dnnl_primitive_desc_t desc; /* NULL: oneDNN is not fast in this type, so the operands are widened */
    dnnl_primitive_t primitive; /* NULL on a meta context, which does not need it */
    size_t bytes;               /* of scratch memory */
} mti_dnnl_plan;

#define MTI_DNNL_PLANS 64 /* maximum number of plans of a context */

/* The oneDNN state of a context, created by its first product with a plan. */
typedef struct mti_dnnl {
    dnnl_engine_t engine;
    uint64_t clock; /* counts the uses of plans */
    int count;
    mti_dnnl_plan plans[MTI_DNNL_PLANS];
} mti_dnnl;

static void mti_dnnl_forget(mti_dnnl_plan *p) {
    if (p->primitive) dnnl_primitive_destroy(p->primitive);
    if (p->desc) dnnl_primitive_desc_destroy(p->desc);
    memset(p, 0, sizeof *p);
}

static void mti_dnnl_destroy(mt_context *ctx, void *gemm) {
    mti_dnnl *d = (mti_dnnl *)gemm;
    int i;
    (void)ctx;
    for (i = 0; i < d->count; i++) mti_dnnl_forget(&d->plans[i]);
    if (d->engine) dnnl_engine_destroy(d->engine);
    mt_host_free(d);
}

/* Returns the oneDNN state of the context. Creates it on the first call. */
static mt_status mti_dnnl_open(mt_context *ctx, const mti_matmul *g, mti_dnnl **out) {
    mti_kernels *k;
    mti_dnnl *d;
    MT_TRY(mti_kernels_open(ctx, &k));
    if (!k->gemm) {
        k->gemm = mt_host_alloc(sizeof *d);
        if (!k->gemm) return mt_fail(ctx, MT_ERR_MEMORY, "mt_gemm: no memory for %zu bytes", sizeof *d);
        k->gemm_destroy = mti_dnnl_destroy;
    }
    *out = d = (mti_dnnl *)k->gemm;
    if (d->engine) return MT_SUCCESS;
    return mti_dnnl_check(ctx, g, "dnnl_engine_create", dnnl_engine_create(&d->engine, dnnl_cpu, 0));
}

static dnnl_data_type_t mti_dnnl_type(int dtype) {
    return dtype == MT_F32 ? dnnl_f32 : dtype == MT_BF16 ? dnnl_bf16 : dnnl_f16;
}

#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t mti_dnnl_memory; /* the layout of a matrix */
#else
typedef const dnnl_memory_desc_t *mti_dnnl_memory;
#endif

/* A matrix of a product. */
typedef struct mti_dnnl_view {
    dnnl_dims_t dims, strides;
    dnnl_data_type_t type;
    int any;               /* 1: oneDNN chooses the layout; strides is not used */
    mti_dnnl_memory whole; /* NULL, or the matrix is some columns of another one, which has this layout */
    dnnl_dims_t at;        /* with `whole`: the first element */
} mti_dnnl_view;

/* op(x) [rows, cols] in the memory of a row-major x */
static mti_dnnl_view mti_dnnl_view_of(int dtype, int64_t rows, int64_t cols, int trans, int64_t ld) {
    mti_dnnl_view v;
    memset(&v, 0, sizeof v);
    v.dims[0] = rows, v.dims[1] = cols;
    v.strides[0] = trans ? 1 : ld, v.strides[1] = trans ? ld : 1;
    v.type = mti_dnnl_type(dtype);
    return v;
}

/* The C API of oneDNN changed in version 3.
   mti_dnnl_open_memory:  *out = the layout of a view. The address of its first element is not in it.
   mti_dnnl_is_blocked:   whether a layout consists of blocks, other than that of a row-major or column-major matrix
   mti_dnnl_offset:       the elements from the beginning of a layout to the view v of it; -1: it has no such view
   mti_dnnl_describe:     *out = the primitive descriptor of the product of three views: a, b and c
   mti_dnnl_describe_reorder: *out = that of a copy of a view into a layout */
#if DNNL_VERSION_MAJOR >= 3
static dnnl_status_t mti_dnnl_add_sum(dnnl_post_ops_t ops, float beta) {
    return dnnl_post_ops_append_sum(ops, beta, 0, dnnl_data_type_undef);
}

static int mti_dnnl_is_blocked(mti_dnnl_memory m) {
    int blocks = 0;
    return dnnl_memory_desc_query(m, dnnl_query_inner_nblks_s32, &blocks) == dnnl_success && blocks > 0;
}

static int64_t mti_dnnl_offset(const mti_dnnl_view *v) {
    dnnl_memory_desc_t m = NULL;
    int64_t at = -1;
    if (dnnl_memory_desc_create_submemory(&m, v->whole, v->dims, v->at) != dnnl_success) return -1;
    if (dnnl_memory_desc_query(m, dnnl_query_submemory_offset_s64, &at) != dnnl_success) at = -1;
    dnnl_memory_desc_destroy(m);
    return at;
}

static dnnl_status_t mti_dnnl_open_memory(const mti_dnnl_view *v, dnnl_memory_desc_t *out) {
    if (v->any) return dnnl_memory_desc_create_with_tag(out, 2, v->dims, v->type, dnnl_format_tag_any);
    if (!v->whole) return dnnl_memory_desc_create_with_strides(out, 2, v->dims, v->type, v->strides);
    if (mti_dnnl_offset(v) != 0) return dnnl_unimplemented; /* the layout would have the address in it */
    return dnnl_memory_desc_create_submemory(out, v->whole, v->dims, v->at);
}

static dnnl_status_t mti_dnnl_describe(mti_dnnl *d, const mti_dnnl_view *v, dnnl_primitive_attr_t attr,
                                       dnnl_primitive_desc_t *out) {
    dnnl_memory_desc_t memory[3] = {NULL, NULL, NULL};
    dnnl_status_t status = dnnl_success;
    int i;
    for (i = 0; i < 3 && status == dnnl_success; i++) status = mti_dnnl_open_memory(&v[i], &memory[i]);
    if (status == dnnl_success)
        status = dnnl_matmul_primitive_desc_create(out, d->engine, memory[0], memory[1], NULL, memory[2], attr);
    for (i = 0; i < 3; i++)
        if (memory[i]) dnnl_memory_desc_destroy(memory[i]);
    return status;
}

static dnnl_status_t mti_dnnl_describe_reorder(mti_dnnl *d, const mti_dnnl_view *from, mti_dnnl_memory to,
                                               dnnl_primitive_desc_t *out) {
    dnnl_memory_desc_t memory = NULL;
    dnnl_status_t status = mti_dnnl_open_memory(from, &memory);
    if (status == dnnl_success)
        status = dnnl_reorder_primitive_desc_create(out, memory, d->engine, to, d->engine, NULL);
    if (memory) dnnl_memory_desc_destroy(memory);
    return status;
}
#else
static dnnl_status_t mti_dnnl_add_sum(dnnl_post_ops_t ops, float beta) { return dnnl_post_ops_append_sum(ops, beta); }

static int mti_dnnl_is_blocked(mti_dnnl_memory m) { return m->format_desc.blocking.inner_nblks > 0; }

static int64_t mti_dnnl_offset(const mti_dnnl_view *v) {
    dnnl_memory_desc_t m;
    return dnnl_memory_desc_init_submemory(&m, v->whole, v->dims, v->at) == dnnl_success ? m.offset0 : -1;
}

static dnnl_status_t mti_dnnl_open_memory(const mti_dnnl_view *v, dnnl_memory_desc_t *out) {
    dnnl_status_t status;
    if (v->any) return dnnl_memory_desc_init_by_tag(out, 2, v->dims, v->type, dnnl_format_tag_any);
    if (!v->whole) return dnnl_memory_desc_init_by_strides(out, 2, v->dims, v->type, v->strides);
    status = dnnl_memory_desc_init_submemory(out, v->whole, v->dims, v->at);
    if (status == dnnl_success) out->offset0 = 0;
    return status;
}

static dnnl_status_t mti_dnnl_describe(mti_dnnl *d, const mti_dnnl_view *v, dnnl_primitive_attr_t attr,
                                       dnnl_primitive_desc_t *out) {
    dnnl_memory_desc_t memory[3];
    dnnl_matmul_desc_t matmul;
    dnnl_status_t status = dnnl_success;
    int i;
    for (i = 0; i < 3 && status == dnnl_success; i++) status = mti_dnnl_open_memory(&v[i], &memory[i]);
    if (status == dnnl_success) status = dnnl_matmul_desc_init(&matmul, &memory[0], &memory[1], NULL, &memory[2]);
    return status == dnnl_success ? dnnl_primitive_desc_create(out, &matmul, attr, d->engine, NULL) : status;
}

static dnnl_status_t mti_dnnl_describe_reorder(mti_dnnl *d, const mti_dnnl_view *from, mti_dnnl_memory to,
                                               dnnl_primitive_desc_t *out) {
    dnnl_memory_desc_t memory;
    dnnl_status_t status = mti_dnnl_open_memory(from, &memory);
    if (status != dnnl_success) return status;
    return dnnl_reorder_primitive_desc_create(out, &memory, d->engine, to, d->engine, NULL);
}
#endif

/* The attributes of a plan: the caller provides the scratch memory, and c = a b + beta c. */
static dnnl_status_t mti_dnnl_attributes(float beta, dnnl_primitive_attr_t *out) {
    dnnl_post_ops_t ops = NULL;
    dnnl_status_t status = dnnl_primitive_attr_create(out);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_scratchpad_mode(*out, dnnl_scratchpad_mode_user);
    if (beta == 0.0f || status != dnnl_success) return status;
    status = dnnl_post_ops_create(&ops);
    if (status == dnnl_success) status = mti_dnnl_add_sum(ops, beta);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_post_ops(*out, ops);
    if (ops) dnnl_post_ops_destroy(ops);
    return status;
}

/* The n columns of a packed copy that a part of a product reads. The layout of a part whose columns are whole blocks
   does not depend on where it begins. The last part may end within a block. */
static mti_dnnl_view mti_dnnl_packed_view(const mti_packed *p, int64_t n) {
    mti_dnnl_view v = mti_dnnl_view_of((int)p->weight.dtype, p->weight.cols, n, 0, 0);
    v.whole = dnnl_primitive_desc_query_md((dnnl_primitive_desc_t)p->layout, dnnl_query_weights_md, 0);
    v.at[1] = n % MTI_GEMM_COLS == 0 ? 0 : p->weight.rows - n;
    return v;
}

/* Whether a descriptor multiplies 16-bit operands with instructions for their type. Where the processor has none,
   oneDNN has reference loops ("ref") and a GEMM that emulates them ("gemm:jit"), which are slower than f32. With the
   instructions, that GEMM is fast: oneDNN 2 chooses it for a leading dimension that exceeds the number of columns. */
static int mti_dnnl_is_fast(dnnl_primitive_desc_t desc) {
    int bf16 = (int)dnnl_cpu_isa_avx512_core_bf16, has = (int)dnnl_get_effective_cpu_isa();
    const char *name = NULL;
    return dnnl_primitive_desc_query(desc, dnnl_query_impl_info_str, 0, (void *)&name) == dnnl_success && name &&
           !strstr(name, "ref") && ((has & bf16) == bf16 || !strstr(name, "gemm:jit"));
}

/* Fills the plan, whose key is set. */
static mt_status mti_dnnl_plan_make(mt_context *ctx, mti_dnnl *d, const mti_matmul *g, mti_dnnl_plan *p) {
    const mti_dnnl_key *q = &p->key;
    dnnl_primitive_attr_t attr = NULL;
    mti_dnnl_view v[3];
    dnnl_status_t status = mti_dnnl_attributes(q->beta, &attr);
    v[0] = mti_dnnl_view_of(q->type, q->m, q->k, q->trans_a, q->lda);
    v[1] =
        g->packed ? mti_dnnl_packed_view(g->packed, q->n) : mti_dnnl_view_of(q->type, q->k, q->n, q->trans_b, q->ldb);
    v[2] = mti_dnnl_view_of(q->c_type, q->m, q->n, 0, q->ldc);
    if (status == dnnl_success) status = mti_dnnl_describe(d, v, attr, &p->desc);
    if (attr) dnnl_primitive_attr_destroy(attr);
    if (status == dnnl_out_of_memory) return mti_dnnl_check(ctx, g, "dnnl_primitive_desc_create", status);
    if (status != dnnl_success || !mti_dnnl_is_fast(p->desc)) {
        if (p->desc) dnnl_primitive_desc_destroy(p->desc);
        p->desc = NULL;
        return MT_SUCCESS;
    }
    p->bytes = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(p->desc, dnnl_query_scratchpad_md, 0));
    if (!mt_context_has_data(ctx)) return MT_SUCCESS;
    return mti_dnnl_check(ctx, g, "dnnl_primitive_create", dnnl_primitive_create(&p->primitive, p->desc));
}

/* Returns a place for one more plan. If all places are taken, evicts the least recently used plan. */
static mti_dnnl_plan *mti_dnnl_slot(mti_dnnl *d) {
    mti_dnnl_plan *oldest = &d->plans[0];
    int i;
    if (d->count < MTI_DNNL_PLANS) return &d->plans[d->count++];
    for (i = 1; i < MTI_DNNL_PLANS; i++)
        if (d->plans[i].used < oldest->used) oldest = &d->plans[i];
    mti_dnnl_forget(oldest);
    return oldest;
}

static void mti_dnnl_key_of(const mti_matmul *g, mti_dnnl_key *key) {
    memset(key, 0, sizeof *key);
    key->m = g->m, key->n = g->n, key->k = g->k;
    key->lda = g->lda, key->ldb = g->ldb, key->ldc = g->ldc;
    key->trans_a = g->trans_a, key->trans_b = g->trans_b;
    key->type = (int)g->a_type, key->c_type = (int)g->c_type;
    key->beta = g->beta;
    if (!g->packed) return;
    key->packed = g->packed->weight.rows;
    key->ldc = g->n; /* mti_dnnl_run_packed */
}

/* *out = the plan of a product, which is created if it does not exist yet. */
static mt_status mti_dnnl_plan_of(mt_context *ctx, mti_dnnl *d, const mti_matmul *g, mti_dnnl_plan **out) {
    mti_dnnl_plan fresh;
    mt_status status;
    int i;
    memset(&fresh, 0, sizeof fresh);
    mti_dnnl_key_of(g, &fresh.key);
    fresh.used = ++d->clock;
    for (i = 0; i < d->count; i++)
        if (memcmp(&d->plans[i].key, &fresh.key, sizeof fresh.key) == 0) {
            *out = &d->plans[i];
            (*out)->used = fresh.used;
            return MT_SUCCESS;
        }
    status = mti_dnnl_plan_make(ctx, d, g, &fresh);
    if (status != MT_SUCCESS) {
        mti_dnnl_forget(&fresh);
        return status;
    }
    *out = mti_dnnl_slot(d);
    **out = fresh;
    return MT_SUCCESS;
}

/* *out = the plan of the part of g with rows or columns [0, last), or NULL if there is none. */
static mt_status mti_native_part(mt_context *ctx, mti_dnnl *d, const mti_matmul *g, int64_t last, void **out) {
    mti_matmul part = mti_gemm_part(g, 0, last);
    mti_dnnl_plan *p = NULL;
    MT_TRY(mti_dnnl_plan_of(ctx, d, &part, &p));
    *out = p->desc ? p : NULL;
    return MT_SUCCESS;
}

/* Sets the plans of oneDNN for the parts of a product. They are NULL if one of the parts has none. */
static mt_status mti_native_parts(mt_context *ctx, mti_matmul *g) {
    int64_t rest = mti_gemm_shared_size(g) % g->each;
    mti_dnnl *d = NULL;
    mt_status status;
    int before;
    MT_TRY(mti_dnnl_open(ctx, g, &d));
    before = mti_omp_begin();
    status = mti_native_part(ctx, d, g, g->each, &g->plan);
    g->last_plan = g->plan;
    if (status == MT_SUCCESS && rest) status = mti_native_part(ctx, d, g, rest, &g->last_plan);
    mti_omp_end(before);
    if (!g->plan || !g->last_plan) g->plan = g->last_plan = NULL;
    return status;
}

/* Sets the plans for a product with a packed copy, if there is one. Threads that share the columns read columns of the
   whole copy. */
static mt_status mti_packed_plan(mt_context *ctx, mti_matmul *g) {
    int64_t step = 0;
    if (g->b_type == MT_F32 && (g->m > MTI_PACKED_MOST || mti_gemm_is_few(g, MTI_FEW_MOST))) return MT_SUCCESS;
    g->packed = mti_packed_find(ctx, g);
    if (!g->packed) return MT_SUCCESS;
    if (g->by_cols && g->each < g->n) {
        mti_dnnl_view v = mti_dnnl_packed_view(g->packed, g->n - g->each);
        v.at[1] = g->each;
        step = mti_dnnl_offset(&v);
        g->packed_step = (size_t)mt_max(step, 0) * mt_dtype_size(g->b_type);
    }
    if (step >= 0) MT_TRY(mti_native_parts(ctx, g));
    if (!g->plan) g->packed = NULL;
    return MT_SUCCESS;
}

/* Sets the plans of oneDNN for a product with a packed copy, or of 16-bit operands as they are. Without plans, the
   operands are widened. */
static mt_status mti_native_plan(mt_context *ctx, mti_matmul *g) {
    if (g->a_type != g->b_type || (g->c_type != g->a_type && g->c_type != MT_F32) || g->alpha != 1.0f || g->m == 0 ||
        g->n == 0 || g->k == 0)
        return MT_SUCCESS;
    MT_TRY(mti_packed_plan(ctx, g));
    return g->plan || g->a_type == MT_F32 ? MT_SUCCESS : mti_native_parts(ctx, g);
}

/* Copies the elements of a weight into its layout. */
static dnnl_status_t mti_dnnl_reorder(mti_dnnl *d, const mti_dnnl_view *from, const mti_packed *p) {
    mti_dnnl_memory layout = dnnl_primitive_desc_query_md((dnnl_primitive_desc_t)p->layout, dnnl_query_weights_md, 0);
    dnnl_primitive_desc_t desc = NULL;
    dnnl_primitive_t reorder = NULL;
    dnnl_stream_t stream = NULL;
    dnnl_exec_arg_t args[2];
    dnnl_status_t status;
    int i;
    args[0].arg = DNNL_ARG_FROM, args[1].arg = DNNL_ARG_TO;
    args[0].memory = args[1].memory = NULL;
    status = mti_dnnl_describe_reorder(d, from, layout, &desc);
    if (status == dnnl_success) status = dnnl_primitive_create(&reorder, desc);
    if (status == dnnl_success) status = dnnl_stream_create(&stream, d->engine, dnnl_stream_default_flags);
    if (status == dnnl_success)
        status = dnnl_memory_create(&args[0].memory, dnnl_primitive_desc_query_md(desc, dnnl_query_src_md, 0),
                                    d->engine, p->weight.data);
    if (status == dnnl_success) status = dnnl_memory_create(&args[1].memory, layout, d->engine, p->data);
    if (status == dnnl_success) status = dnnl_primitive_execute(reorder, stream, 2, args);
    if (status == dnnl_success) status = dnnl_stream_wait(stream);
    for (i = 0; i < 2; i++)
        if (args[i].memory) dnnl_memory_destroy(args[i].memory);
    if (stream) dnnl_stream_destroy(stream);
    if (reorder) dnnl_primitive_destroy(reorder);
    if (desc) dnnl_primitive_desc_destroy(desc);
    return status;
}

/* Sets the layout of a packed copy, and its size: 0 if oneDNN has no fast product with a layout of its own. */
static mt_status mti_packed_layout(mt_context *ctx, mti_dnnl *d, const mti_matmul *g, mti_packed *p) {
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t desc = NULL;
    mti_dnnl_view v[3];
    mti_dnnl_memory layout;
    dnnl_status_t status = mti_dnnl_attributes(0.0f, &attr);
    v[0] = mti_dnnl_view_of((int)g->b_type, g->m, g->k, 0, g->k);
    v[1] = mti_dnnl_view_of((int)g->b_type, g->k, g->n, 0, g->n);
    v[2] = mti_dnnl_view_of((int)g->b_type, g->m, g->n, 0, g->n);
    v[1].any = 1;
    if (status == dnnl_success) status = mti_dnnl_describe(d, v, attr, &desc);
    if (attr) dnnl_primitive_attr_destroy(attr);
    p->layout = desc;
    if (status == dnnl_out_of_memory) return mti_dnnl_check(ctx, g, "dnnl_primitive_desc_create", status);
    if (status != dnnl_success || !mti_dnnl_is_fast(desc)) return MT_SUCCESS;
    layout = dnnl_primitive_desc_query_md(desc, dnnl_query_weights_md, 0);
    p->bytes = mti_dnnl_is_blocked(layout) ? dnnl_memory_desc_get_size(layout) : 0;
    return MT_SUCCESS;
}

/* Makes the packed copy of p->weight. p->bytes is 0 afterwards if it needs none. The layout is that for a product with
   MTI_PACKED_ROWS rows; products with another number of rows use it, too. */
static mt_status mti_packed_make(mt_context *ctx, mti_packed *p) {
    mt_tensor w = p->weight;
    mti_dnnl_view from = mti_dnnl_view_of((int)w.dtype, w.cols, w.rows, 1, mt_tensor_ld(w));
    mti_dnnl *d = NULL;
    mti_matmul g;
    mt_status status;
    int before;
    memset(&g, 0, sizeof g);
    g.m = MTI_PACKED_ROWS, g.n = w.rows, g.k = w.cols;
    g.b_type = w.dtype;
    MT_TRY(mti_dnnl_open(ctx, &g, &d));
    before = mti_omp_begin();
    status = mti_packed_layout(ctx, d, &g, p);
    if (status == MT_SUCCESS && p->bytes > 0) status = mt_context_alloc(ctx, p->bytes, &p->data);
    if (status == MT_SUCCESS && p->bytes > 0 && mt_context_has_data(ctx))
        status = mti_dnnl_check(ctx, &g, "dnnl_reorder", mti_dnnl_reorder(d, &from, p));
    mti_omp_end(before);
    return status;
}

static void mti_packed_close(mti_packed *p) {
    if (p->layout) dnnl_primitive_desc_destroy((dnnl_primitive_desc_t)p->layout);
}

/* Runs a plan. Several threads may run the same one, so the objects with the addresses are their own. */
static dnnl_status_t mti_dnnl_run(const mti_dnnl_plan *p, const mti_matmul *g, void *scratch) {
    static const int names[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};
    static const dnnl_query_t views[] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md,
                                         dnnl_query_scratchpad_md};
    dnnl_exec_arg_t args[4];
    dnnl_engine_t engine = NULL;
    dnnl_stream_t stream = NULL;
    dnnl_status_t status = dnnl_primitive_desc_query(p->desc, dnnl_query_engine, 0, (void *)&engine);
    void *data[4];
    int i;
    data[0] = (void *)(uintptr_t)g->a, data[1] = (void *)(uintptr_t)g->b, data[2] = g->c, data[3] = scratch;
    if (g->packed) data[1] = (char *)g->packed->data + (size_t)(g->first_col / g->each) * g->packed_step;
    if (status == dnnl_success) status = dnnl_stream_create(&stream, engine, dnnl_stream_default_flags);
    for (i = 0; i < 4; i++) {
        args[i].arg = names[i];
        args[i].memory = NULL;
        if (status == dnnl_success)
            status = dnnl_memory_create(&args[i].memory, dnnl_primitive_desc_query_md(p->desc, views[i], 0), engine,
                                        data[i]);
    }
    if (status == dnnl_success) status = dnnl_primitive_execute(p->primitive, stream, 4, args);
    if (status == dnnl_success) status = dnnl_stream_wait(stream);
    for (i = 0; i < 4; i++)
        if (args[i].memory) dnnl_memory_destroy(args[i].memory);
    if (stream) dnnl_stream_destroy(stream);
    return status;
}

/* The bytes of c without gaps between its rows, if it has gaps and a packed copy is used. */
static size_t mti_packed_room(const mti_matmul *part) {
    int gaps = part->packed && part->ldc != part->n;
    return gaps ? mt_align_up((size_t)(part->m * part->n) * mt_dtype_size(part->c_type)) : 0;
}

/* Runs a plan. oneDNN 2 reads a packed copy only if the rows of c have no gaps. Threads that share columns have gaps:
   they compute c in scratch memory. */
static dnnl_status_t mti_dnnl_run_packed(const mti_dnnl_plan *p, const mti_matmul *g, char *scratch) {
    size_t room = mti_packed_room(g), size = mt_dtype_size(g->c_type), row = (size_t)g->n * size;
    mti_matmul dense = *g;
    dnnl_status_t status;
    int64_t i;
    if (room > 0) dense.c = scratch, dense.ldc = g->n;
    status = mti_dnnl_run(p, &dense, scratch + room);
    for (i = 0; status == dnnl_success && room > 0 && i < g->m; i++)
        memcpy((char *)g->c + (size_t)(i * g->ldc) * size, scratch + (size_t)i * row, row);
    return status;
}

/* oneDNN allocates the scratch memory of dnnl_sgemm itself. */
static size_t mti_library_bytes(const mti_matmul *part) {
    return part->plan ? ((mti_dnnl_plan *)part->plan)->bytes + mti_packed_room(part) : 0;
}

static int mti_library_gemm(const mti_matmul *g, void *scratch) {
    int before = mti_omp_begin();
    dnnl_status_t status;
    if (g->plan) status = mti_dnnl_run_packed((const mti_dnnl_plan *)g->plan, g, (char *)scratch);
    else
        status = dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->m, g->n, g->k, g->alpha,
                            (const float *)g->a, g->lda, (const float *)g->b, g->ldb, g->beta, (float *)g->c, g->ldc);
    mti_omp_end(before);
    return (int)status;
}

static mt_status mti_library_check(mt_context *ctx, const mti_matmul *g, int status) {
    return mti_dnnl_check(ctx, g, g->plan ? "dnnl_primitive_execute" : "dnnl_sgemm", (dnnl_status_t)status);
}

static void mti_library_begin(void) {}

#elif defined(MT_USE_CBLAS)
MT_API const char *mt_gemm_library(void) { return "CBLAS"; }

#if defined(__GNUC__)
static void mti_openblas_set_num_threads(int) __attribute__((weakref("openblas_set_num_threads")));
static int mti_openblas_get_num_threads(void) __attribute__((weakref("openblas_get_num_threads")));

/* OpenBLAS has one thread count per process. */
static void mti_library_begin(void) {
    if (!mti_openblas_set_num_threads || !mti_openblas_get_num_threads) return;
    if (mti_openblas_get_num_threads() != 1) mti_openblas_set_num_threads(1);
}
#else
static void mti_library_begin(void) {}
#endif

static int mti_library_gemm(const mti_matmul *g, void *scratch) {
    int before = mti_omp_begin();
    (void)scratch;
    cblas_sgemm(CblasRowMajor, g->trans_a ? CblasTrans : CblasNoTrans, g->trans_b ? CblasTrans : CblasNoTrans,
                (int)g->m, (int)g->n, (int)g->k, g->alpha, (const float *)g->a, (int)g->lda, (const float *)g->b,
                (int)g->ldb, g->beta, (float *)g->c, (int)g->ldc);
    mti_omp_end(before);
    return 0;
}

/* CBLAS has no products with packed matrices. */
static mt_status mti_packed_make(mt_context *ctx, mti_packed *p) { return (void)ctx, (void)p, MT_SUCCESS; }
static mt_status mti_native_plan(mt_context *ctx, mti_matmul *g) { return (void)ctx, (void)g, MT_SUCCESS; }

/* A CBLAS library allocates its scratch memory itself. */
static size_t mti_library_bytes(const mti_matmul *part) { return (void)part, (size_t)0; }

#else
#define MTI_GEMM_WIDENS 1 /* the built-in GEMM widens 16-bit operands when it packs them */
MT_API const char *mt_gemm_library(void) { return "built-in"; }

/* A block of a, MTI_MC x MTI_KC, stays in L2; MTI_MC is a multiple of every MTI_MR. A block of b, MTI_KC x MTI_NC,
   stays in L3. */
#define MTI_MC 192
#define MTI_NC 2048

/* The bytes of scratch memory that the built-in GEMM needs for packing. They never decrease when m, n or k grows. */
static size_t mti_builtin_gemm_bytes(int64_t m, int64_t n, int64_t k) {
    int64_t kc = mt_min(k, MTI_KC);
    int64_t a = mt_round_up(mt_min(m, MTI_MC), MTI_MR) * kc, b = mt_round_up(mt_min(n, MTI_NC), MTI_NR) * kc;
    return mt_align_up((size_t)a * sizeof(float)) + mt_align_up((size_t)b * sizeof(float));
}

/* Computes one block of a product, tile by tile. The inner loop goes over the rows of a, so that a panel of b stays in
   L1. */
static void mti_gemm_block(const mti_gemm_piece *x) {
    int64_t i, j;
    for (j = 0; j < x->n; j += MTI_NR)
        for (i = 0; i < x->m; i += MTI_MR) mti_gemm_tile(x, i, j, 0, x->k);
}

#define MTI_PACK_COLS 64 /* columns of 16-bit rows that are widened at once */

/* mti_pack_panel for elements of a 16-bit type, which it widens. row or col is 1. */
static void mti_pack_panel16(mt_dtype type, const uint16_t *x, int64_t row, int64_t col, int64_t rows, int64_t k,
                             int width, float *out) {
    float room[MTI_NR * MTI_PACK_COLS];
    int64_t i, p, n;
    if (row == 1 && rows == width) {
        for (p = 0; p < k; p++) mt_f32_from_16bit(type, x + p * col, out + p * width, width);
        return;
    }
    for (p = 0; p < k; p += n) {
        n = mt_min(MTI_PACK_COLS, k - p);
        if (col == 1) {
            for (i = 0; i < rows; i++) mt_f32_from_16bit(type, x + i * row + p, room + i * MTI_PACK_COLS, n);
            mti_pack_panel(room, MTI_PACK_COLS, 1, rows, n, width, out + p * width);
        } else {
            for (i = 0; i < n; i++) mt_f32_from_16bit(type, x + (p + i) * col, room + i * width, rows);
            mti_pack_panel(room, 1, width, rows, n, width, out + p * width);
        }
    }
}

/* mti_pack for a matrix of any float type that begins at element `at` of x. row or col is 1. */
static void mti_pack_typed(mt_dtype type, const void *x, int64_t at, int64_t row, int64_t col, int64_t rows, int64_t k,
                           int width, float *out) {
    const uint16_t *from = (const uint16_t *)x + at;
    int64_t i;
    if (type == MT_F32) {
        mti_pack((const float *)x + at, row, col, rows, k, width, out);
        return;
    }
    for (i = 0; i < rows; i += width)
        mti_pack_panel16(type, from + i * row, row, col, mt_min(width, rows - i), k, width, out + i * k);
}

/* Returns the panels of a packed copy from column j on, for k rows from row p on. The copy has all panels of the first
   MTI_KC rows, then those of the next ones. j is a multiple of MTI_NR. */
static float *mti_packed_panels(const mti_packed *packed, int64_t j, int64_t p, int64_t k) {
    return (float *)packed->data + p * mt_round_up(packed->weight.rows, MTI_NR) + j * k;
}

/* Makes the packed copy of p->weight: the panels that mti_builtin_gemm otherwise packs in each product. */
static mt_status mti_packed_make(mt_context *ctx, mti_packed *p) {
    mt_tensor w = p->weight;
    int64_t i, n;
    p->bytes = (size_t)(mt_round_up(w.rows, MTI_NR) * w.cols) * sizeof(float);
    MT_TRY(mt_context_alloc(ctx, p->bytes, &p->data));
    for (i = 0; mt_context_has_data(ctx) && i < w.cols; i += n) {
        n = mt_min(MTI_KC, w.cols - i);
        mti_pack_typed(w.dtype, w.data, i, mt_tensor_ld(w), 1, w.rows, n, MTI_NR, mti_packed_panels(p, 0, i, n));
    }
    return MT_SUCCESS;
}

static mt_status mti_native_plan(mt_context *ctx, mti_matmul *g) {
    g->packed = mti_packed_find(ctx, g);
    return MT_SUCCESS;
}

/* The blocking is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008). a is
   packed only if more than four panels of b read it, because otherwise packing costs more than it saves, or if it must
   be widened. */
static void mti_builtin_gemm(const mti_matmul *g, void *scratch) {
    int64_t a_row = g->trans_a ? 1 : g->lda, a_col = g->trans_a ? g->lda : 1;
    int64_t b_row = g->trans_b ? 1 : g->ldb, b_col = g->trans_b ? g->ldb : 1;
    int64_t kc = mt_min(g->k, MTI_KC), i, j, p;
    int pack_a = g->n > 4 * MTI_NR || g->a_type != MT_F32;
    float *room_b = (float *)scratch;
    float *room_a = room_b + mt_round_up(mt_round_up(mt_min(g->n, MTI_NC), MTI_NR) * kc, 16);
    mti_gemm_piece x;
    x.ldc = g->ldc;
    x.alpha = g->alpha;
    x.a_row = a_row;
    x.a_col = a_col;
    x.packed_a = pack_a ? room_a : NULL;
    x.pairs = x.tiles = 0;
    for (j = 0; j < g->n; j += MTI_NC)
        for (p = 0; p < g->k; p += MTI_KC) {
            x.n = mt_min(MTI_NC, g->n - j);
            x.k = mt_min(MTI_KC, g->k - p);
            x.beta = p == 0 ? g->beta : 1.0f;
            x.packed_b = g->packed ? mti_packed_panels(g->packed, g->first_col + j, p, x.k) : room_b;
            if (!g->packed)
                mti_pack_typed(g->b_type, g->b, j * b_col + p * b_row, b_col, b_row, x.n, x.k, MTI_NR, room_b);
            for (i = 0; i < g->m; i += MTI_MC) {
                x.m = mt_min(MTI_MC, g->m - i);
                x.a = pack_a ? NULL : (const float *)g->a + i * a_row + p * a_col;
                x.c = (float *)g->c + i * g->ldc + j;
                if (pack_a)
                    mti_pack_typed(g->a_type, g->a, i * a_row + p * a_col, a_row, a_col, x.m, x.k, MTI_MR, room_a);
                mti_gemm_block(&x);
            }
        }
}

static size_t mti_library_bytes(const mti_matmul *part) { return mti_builtin_gemm_bytes(part->m, part->n, part->k); }

static void mti_library_begin(void) {}

static int mti_library_gemm(const mti_matmul *g, void *scratch) {
    mti_builtin_gemm(g, scratch);
    return 0;
}
#endif

#if !defined(MTI_GEMM_WIDENS)
#define MTI_GEMM_WIDENS 0
#endif
#if !defined(MT_USE_ONEDNN)
static void mti_packed_close(mti_packed *p) { (void)p; }
static mt_status mti_library_check(mt_context *ctx, const mti_matmul *g, int status) {
    return (void)ctx, (void)g, (void)status, MT_SUCCESS;
}
#endif

#define MTI_GEMM_GRAIN 131072 /* each thread gets at least so many multiplications */

/* Divides a product among the threads of the context, along the larger of m and n. Columns begin at multiples of a
   panel of the built-in GEMM and of a cache line. */
static void mti_gemm_split(mt_context *ctx, mti_matmul *g) {
    double work = (double)g->m * (double)g->n * (double)g->k;
    int64_t size = mt_max(g->m, g->n), unit = g->n > g->m ? MTI_GEMM_COLS : 16, threads = mt_context_threads(ctx);
    if (work < MTI_GEMM_GRAIN * (double)threads) threads = mt_max(1, (int64_t)(work / MTI_GEMM_GRAIN));
    g->by_cols = g->n > g->m;
    g->each = mt_max(1, mt_min(size, mt_round_up((size + threads - 1) / threads, unit)));
}

/* Chooses how a product runs: with few rows, with a plan, or by the library in f32. */
static mt_status mti_gemm_choose(mt_context *ctx, mti_matmul *g) {
    if (mt_context_planned(ctx) == MT_DEVICE_CUDA) return MT_SUCCESS;
    mti_gemm_split(ctx, g);
    g->few = mti_gemm_is_few(g, MTI_FEW_MOST_NATIVE);
    if (!g->few) MT_TRY(mti_native_plan(ctx, g));
    if (!g->plan) g->few = mti_gemm_is_few(g, MTI_FEW_MOST);
    return MT_SUCCESS;
}

/* Computes a product with few rows. a and c are f32. */
static void mti_gemm_few(const mti_matmul *g) {
    mti_few_product f;
    f.a = (const float *)g->a, f.b = (const unsigned char *)g->b, f.c = (float *)g->c;
    f.lda = g->lda, f.ldb = g->ldb, f.ldc = g->ldc;
    f.m = g->m, f.n = g->n, f.k = g->k;
    f.alpha = g->alpha, f.beta = g->beta;
    mti_few_rows(&f, g->b_type);
}

static int64_t mti_gemm_parts(const mti_matmul *g) { return (mti_gemm_shared_size(g) + g->each - 1) / g->each; }

/* The bytes of scratch memory of one part. */
static size_t mti_gemm_bytes(const mti_matmul *g) {
    int64_t rest = mti_gemm_shared_size(g) % g->each;
    mti_matmul part = mti_gemm_part(g, 0, g->each), last = mti_gemm_part(g, 0, rest ? rest : g->each);
    size_t bytes = mti_library_bytes(&part), last_bytes = mti_library_bytes(&last);
    return g->few ? 0 : mt_align_up(bytes > last_bytes ? bytes : last_bytes);
}

/* A product that the threads of a context compute. */
typedef struct mti_gemm_run {
    const mti_matmul *g;
    unsigned char *scratch;
    size_t bytes; /* of scratch memory of a part */
    int status;   /* atomic: the library's status of a part that failed, or 0 */
} mti_gemm_run;

static void mti_gemm_run_parts(void *data, int thread, int64_t first, int64_t last) {
    mti_gemm_run *run = (mti_gemm_run *)data;
    const mti_matmul *g = run->g;
    int64_t i, size = mti_gemm_shared_size(g);
    (void)thread;
    for (i = first; i < last; i++) {
        mti_matmul part = mti_gemm_part(g, i * g->each, mt_min((i + 1) * g->each, size));
        int status = 0;
        if (g->few) mti_gemm_few(&part);
        else if (g->k == 0 || g->alpha == 0.0f) mti_gemm_scale(&part);
        else status = mti_library_gemm(&part, run->scratch + (size_t)i * run->bytes);
        if (status) __atomic_store_n(&run->status, status, __ATOMIC_RELAXED);
    }
}

/* Computes the product g on a CPU. scratch has at least mti_gemm_bytes(g) bytes for each part. */
static mt_status mti_cpu_gemm(mt_context *ctx, const mti_matmul *g, void *scratch) {
    mti_gemm_run run;
    if (g->m == 0 || g->n == 0) return MT_SUCCESS;
    run.g = g;
    run.scratch = (unsigned char *)scratch;
    run.bytes = mti_gemm_bytes(g);
    run.status = 0;
    mti_library_begin();
    mt_parallel_for(ctx, mti_gemm_parts(g), 1, mti_gemm_run_parts, &run);
    return run.status ? mti_library_check(ctx, g, run.status) : MT_SUCCESS;
}

#include "gemm.cuh"

MT_API mt_status mt_gemm_prepare(mt_context *ctx) {
    if (!ctx) return MT_ERR_ARGUMENT;
#if MT_HAS_CUDA
    if (mt_context_device(ctx) == MT_DEVICE_CUDA) {
        mti_lt *lt;
        MT_TRY(mt_cuda_enter(ctx));
        return mti_lt_open(ctx, &lt);
    }
#endif
    return MT_SUCCESS;
}

static void mti_packed_free(mt_context *ctx, mti_packed *p) {
    mti_packed_close(p);
    mt_context_free(ctx, p->data, p->bytes);
    mt_host_free(p);
}

MT_API mt_status mt_gemm_pack(mt_context *ctx, mt_tensor weight) {
    mti_kernels *k;
    mti_packed *p;
    mt_status status;
    MT_TRY(mt_tensor_check(ctx, "mt_gemm_pack", "weight", weight, MT_ARG_FLOAT, weight.rows, weight.cols));
    if (mt_max(weight.rows, mt_tensor_ld(weight)) > INT_MAX)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                       "mt_gemm_pack: weight is [%lld, %lld] with ld %lld: more than %d is not supported",
                       (long long)weight.rows, (long long)weight.cols, (long long)mt_tensor_ld(weight), INT_MAX);
    mt_gemm_unpack(ctx, weight);
    if (mti_is_empty(weight) || mt_context_planned(ctx) != MT_DEVICE_CPU || mt_context_invariant(ctx))
        return MT_SUCCESS;
    MT_TRY(mti_kernels_open(ctx, &k));
    p = (mti_packed *)mt_host_alloc(sizeof *p);
    if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "mt_gemm_pack: no memory for %zu bytes", sizeof *p);
    p->weight = weight;
    status = mti_packed_make(ctx, p);
    if (status != MT_SUCCESS || p->bytes == 0) {
        mti_packed_free(ctx, p);
        return status;
    }
    if (!k->packed) k->packed_from = UINTPTR_MAX, k->packed_to = 0;
    if (k->packed_from > (uintptr_t)weight.data) k->packed_from = (uintptr_t)weight.data;
    if (k->packed_to < mti_view_end(weight)) k->packed_to = mti_view_end(weight);
    p->next = k->packed;
    k->packed = p;
    return MT_SUCCESS;
}

MT_API void mt_gemm_unpack(mt_context *ctx, mt_tensor weight) {
    if (ctx) mti_packed_drop(ctx, weight);
}

/* Sets the operands of a product: the given views, or their f32 copies. */
static void mti_gemm_operands(mti_matmul *g, mt_tensor a, mt_tensor b, mt_tensor c) {
    g->a = a.data, g->b = b.data, g->c = c.data;
    g->a_type = a.dtype, g->b_type = b.dtype, g->c_type = c.dtype;
    g->lda = mt_max(1, mt_tensor_ld(a));
    g->ldb = mt_max(1, mt_tensor_ld(b));
    g->ldc = mt_max(1, mt_tensor_ld(c));
}

static mti_matmul mti_gemm_sizes(mt_transpose trans_a, mt_transpose trans_b, mt_tensor a, mt_tensor b) {
    mti_matmul g;
    memset(&g, 0, sizeof g);
    g.trans_a = trans_a == MT_TRANS;
    g.trans_b = trans_b == MT_TRANS;
    g.m = trans_a ? a.cols : a.rows;
    g.n = trans_b ? b.rows : b.cols;
    g.k = trans_a ? a.rows : a.cols;
    return g;
}

/* The product on a CPU. A meta context allocates the scratch memory as well. */
static mt_status mti_gemm_loop(mti_operator *op, const mti_matmul *g) {
    void *scratch = NULL;
    MT_TRY(mt_arena_alloc(op->ctx, mti_gemm_bytes(g) * (size_t)mti_gemm_parts(g), &scratch));
    return op->on_cpu ? mti_cpu_gemm(op->ctx, g, scratch) : MT_SUCCESS;
}

/* C = op(A) op(B), by transpose of A and B. */
static const mt_rule mti_gemm_rules[2][2] = {
    {{"a b c", "RRR rRr Rcc crP PRP RPP", "rrr"}, {"a b c", "RRR rRr Rrc ccP PRP RPP", "rrr"}},
    {{"a b c", "RRR cRr Rcc rrP PRP RPP", "rrr"}, {"a b c", "RRR cRr Rrc rcP PRP RPP", "rrr"}}};

/* clang-format off */
/* The rule of this table is that without transposes. */
static const mti_table mti_gemm_table = {"mt_gemm", {"a b c", "RRR rRr Rcc crP PRP RPP", "rrr"}, {
    {"c", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_PRODUCT, "a b"},
    {"a", "ij", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"b", "kl", MT_ARG_FLOAT, MT_ARG_IN, NULL}}};
/* clang-format on */

MT_API mt_status mt_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, float alpha, mt_tensor a,
                         mt_tensor b, float beta, mt_tensor c) {
    mti_matmul g = mti_gemm_sizes(trans_a, trans_b, a, b);
    const mt_dtype dtype = a.dtype;
    mt_tensor *views[] = {&c, &a, &b};
    mti_operator op;
    int i;
    mti_operands(&op, ctx, &mti_gemm_table, views, NULL);
    op.rule = &mti_gemm_rules[trans_a == MT_TRANS][trans_b == MT_TRANS];
    if (trans_a == MT_TRANS && trans_b == MT_NO_TRANS) op.args[0].use |= MT_ARG_SUM; /* over the rows of a and b */
    if (beta != 0.0f) op.args[0].use |= MT_ARG_IN;
    MT_TRY(mt_args_check(ctx, op.name, op.args, op.views));
    MT_TRY(mti_expect_gemm(ctx, trans_a, trans_b, a, b, c, &g));
    MT_TRY(mti_expect_gemm_sizes(ctx, &g, a, b, c));
    MT_TRY(mti_expect_all_apart(&op));
    mti_packed_drop(ctx, c); /* before the copy of b is chosen: c may be other columns of its memory */
    g.alpha = alpha;
    g.beta = beta;
    mti_gemm_operands(&g, a, b, c);
    MT_TRY(mti_gemm_choose(ctx, &g));
    for (i = 0; i < op.views; i++)
        if (g.plan || (views[i] == &b && (g.few || MTI_GEMM_WIDENS)) || (views[i] == &a && !g.few && MTI_GEMM_WIDENS))
            op.args[i].use |= MTI_AS_IS;
    if (trans_a == MT_NO_TRANS && trans_b == MT_TRANS) MT_TRY(mt_parts_agree(ctx, op.name, b, a));
    MT_TRY(mti_apply_rule(&op));
    MT_TRY(mti_start(&op));
    mti_gemm_operands(&g, a, b, c);
    op.work.work = MT_WORK_GEMM;
    op.work.dtype = dtype;
    op.work.flops = 2.0 * (double)g.m * (double)g.n * (double)g.k;
    op.work.m = g.m, op.work.n = g.n, op.work.k = g.k;
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_gemm(ctx, &g, a, b, c), mti_gemm_loop(&op, &g)));
}
