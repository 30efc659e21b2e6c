/* ---- options of operators ---------------------------------------------------------------------------------------- */

#pragma once
#include "gemm.h"
#include "authors.h"
#include "system.h"

/* A packed copy of a weight, see mt_gemm_pack. */
typedef struct mti_packed {
    mt_tensor weight;
    void *data; /* of mt_context_alloc */
    size_t bytes;
    void *layout; /* oneDNN: the primitive descriptor that has chosen the layout */
    struct mti_packed *next;
} mti_packed;

/* The state that this header keeps in a context. */
typedef struct mti_kernels {
    mt_gemm_options options;
    /* The mti_lt of a GPU, or the mti_dnnl of a CPU; gemm_destroy frees it. NULL before the first product that needs it
       and with another GEMM library. */
    void *gemm;
    void (*gemm_destroy)(mt_context *ctx, void *gemm);
    /* The mti_cudnn of a GPU, which attention_destroy frees. NULL before the first call that needs it. */
    void *attention;
    void (*attention_destroy)(mt_context *ctx, void *attention);
    mti_packed *packed;               /* the packed copies of weights */
    uintptr_t packed_from, packed_to; /* all their weights are between these addresses */
    int built_for;                    /* see mti_built_for; 0 before its first call */
    int tiles;                        /* see mti_tiles_open; 0 before its first call, otherwise 1 or -1 */
    int hopper;                       /* see mti_hopper_built; 0 before its first call, otherwise 1 or -1 */
    mt_sum_check sum_check;           /* see mt_set_sum_check; NULL: none */
} mti_kernels;

static void mti_packed_free(mt_context *ctx, mti_packed *p); /* gemm.c */

static void mti_kernels_destroy(mt_context *ctx, void *memory) {
    mti_kernels *k = (mti_kernels *)memory;
    while (k->packed) {
        mti_packed *next = k->packed->next;
        mti_packed_free(ctx, k->packed);
        k->packed = next;
    }
    if (k->gemm) (k->gemm_destroy)(ctx, k->gemm);
    if (k->attention) (k->attention_destroy)(ctx, k->attention);
}

/* Returns the mti_kernels of the context. Creates it on the first call. */
static mt_status mti_kernels_open(mt_context *ctx, mti_kernels **out) {
    void *memory = mt_context_slot(ctx, MT_SLOT_KERNELS);
    if (!memory) MT_TRY(mt_context_slot_create(ctx, MT_SLOT_KERNELS, sizeof **out, mti_kernels_destroy, &memory));
    *out = (mti_kernels *)memory;
    return MT_SUCCESS;
}

/* The bytes from the first element of a view to behind the last one. The view has elements. */
static size_t mti_view_span(mt_tensor t) {
    int64_t elements = mt_size_mul(t.rows - 1, mt_tensor_ld(t)) + t.cols;
    return (size_t)elements * mt_dtype_size(t.dtype);
}

/* The address behind the last element of a view. */
static uintptr_t mti_view_end(mt_tensor t) { return (uintptr_t)t.data + mti_view_span(t); }

/* Drops the packed copies of the weights that share memory with t, which is written or freed. */
static void mti_packed_drop(mt_context *ctx, mt_tensor t) {
    mti_kernels *k = (mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    uintptr_t from = (uintptr_t)t.data, to;
    mti_packed **link;
    if (!k || !k->packed || !t.data || t.rows < 1 || t.cols < 1) return;
    to = mti_view_end(t);
    if (from >= k->packed_to || to <= k->packed_from) return;
    for (link = &k->packed; *link;) {
        mti_packed *p = *link;
        if (from >= mti_view_end(p->weight) || to <= (uintptr_t)p->weight.data) {
            link = &p->next;
            continue;
        }
        *link = p->next;
        mti_packed_free(ctx, p);
    }
}

#define MTI_GEMM_CHOICE_WORDS "MT_GEMM_MEASURED MT_GEMM_HEURISTIC"
#define MTI_EPILOGUE_WORDS "MT_EPILOGUE_SEPARATE MT_EPILOGUE_FUSED MT_EPILOGUE_MEASURED"

MT_API mt_status mt_gemm_set_options(mt_context *ctx, const mt_gemm_options *options) {
    static const char *const function = "mt_gemm_set_options";
    mt_gemm_options o;
    mti_kernels *k;
    if (!ctx) return MT_ERR_ARGUMENT;
    memset(&o, 0, sizeof o);
    if (options) o = *options;
    MT_TRY(mt_check_enum(ctx, function, NULL, "choice", (int)o.choice, MTI_GEMM_CHOICE_WORDS));
    MT_TRY(mt_check_enum(ctx, function, NULL, "epilogue", (int)o.epilogue, MTI_EPILOGUE_WORDS));
    MT_TRY(mti_kernels_open(ctx, &k));
    k->options = o;
    if (mt_context_invariant(ctx)) k->options.epilogue = MT_EPILOGUE_SEPARATE;
    return MT_SUCCESS;
}

MT_API mt_gemm_options mt_gemm_get_options(const mt_context *ctx) {
    const mti_kernels *k = (const mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    mt_gemm_options defaults;
    memset(&defaults, 0, sizeof defaults);
    return k ? k->options : defaults;
}
