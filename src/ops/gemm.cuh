/* ---- GEMM by cuBLASLt, on a GPU ---------------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* The key of a plan: what distinguishes products for cuBLASLt. cuBLASLt is column-major: C [m, n] is its n x m matrix,
   b is its first operand, and the leading dimensions are the same. */
typedef struct mti_lt_key {
    int64_t m, n, k, lda, ldb, ldc, ld_aux;
    int trans_a, trans_b, a_type, b_type, c_type, epilogue;
    int target, unused; /* target: multiprocessors that collectives leave to the product; 0: all */
} mti_lt_key;

/* A cuBLASLt product with a chosen algorithm, in the hash table of mti_lt. */
typedef struct mti_lt_plan {
    mti_lt_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;         /* bytes that the algorithm needs */
    int undecided;            /* 1: whether the fused product is used has not been decided yet */
    int fused;                /* for a key with an epilogue: 1 if the fused product is used */
    int stays;                /* 1: never evicted, because a second measurement could choose other bits */
    uint64_t used;            /* the value of mti_lt.clock at the last use */
    struct mti_lt_plan *next; /* the next plan in the same bucket */
} mti_lt_plan;

#define MTI_LT_PLANS 512 /* maximum number of plans of a context; at most half of them have `stays` */
#define MTI_LT_BUCKETS 1024
#define MTI_LT_WORKSPACE ((size_t)32 << 20)
#define MTI_LT_CANDIDATES 8 /* maximum number of algorithms that are measured */
#define MTI_LT_STREAMS 3    /* the streams of a context */
#define MTI_LT_RUNS 5       /* runs of one measurement */
#define MTI_LT_LEAST 65536  /* elements of C that it takes to see reliably whether two algorithms round alike */

/* The cuBLASLt state of a context, created by its first product. */
typedef struct mti_lt {
    cublasLtHandle_t handle;
    void *workspaces[MTI_LT_STREAMS]; /* one for each stream, because products in two streams may run together */
    struct CUstream_st *streams[MTI_LT_STREAMS];
    int stream_count;
    void *workspace; /* that of the context's current stream */
    int multiprocessors;
    cudaEvent_t begin, end;
    uint64_t clock; /* counts the uses of plans */
    int count, stay;
    mti_lt_plan plans[MTI_LT_PLANS], *buckets[MTI_LT_BUCKETS];
} mti_lt;

/* One product. bias and aux are operands of its epilogue, or NULL. */
typedef struct mti_lt_call {
    mti_lt_key key;
    float alpha, beta;
    mt_tensor a, b, c;
    void *bias, *aux;
    const mti_lt_plan *alone; /* with key.target: the plan of the same product with all multiprocessors */
} mti_lt_call;

static mt_status mti_lt_check(mt_context *ctx, cublasStatus_t status, const char *call) {
    if (status == CUBLAS_STATUS_SUCCESS) return MT_SUCCESS;
    return mt_fail(ctx, status == CUBLAS_STATUS_ALLOC_FAILED ? MT_ERR_MEMORY : MT_ERR_SYSTEM,
                   "%.200s: cuBLASLt status %d (%s)", call, (int)status, cublasLtGetStatusString(status));
}
#define MTI_LT_TRY(ctx, call) MT_TRY(mti_lt_check(ctx, (call), #call))

static void mti_lt_forget(mti_lt_plan *p) {
    cublasLtMatrixLayoutDestroy(p->c);
    cublasLtMatrixLayoutDestroy(p->b);
    cublasLtMatrixLayoutDestroy(p->a);
    cublasLtMatmulDescDestroy(p->desc);
}

static void mti_lt_destroy(mt_context *ctx, void *gemm) {
    mti_lt *lt = (mti_lt *)gemm;
    for (int i = 0; i < lt->count; i++) mti_lt_forget(&lt->plans[i]);
    if (lt->begin) cudaEventDestroy(lt->begin);
    if (lt->end) cudaEventDestroy(lt->end);
    if (lt->handle) cublasLtDestroy(lt->handle);
    for (int i = 0; i < lt->stream_count; i++) mt_context_free(ctx, lt->workspaces[i], MTI_LT_WORKSPACE);
    mt_host_free(lt);
}

/* Sets the workspace to that of the context's current stream. The first product in a stream allocates it. */
static mt_status mti_lt_workspace(mt_context *ctx, mti_lt *lt) {
    struct CUstream_st *stream = mt_context_stream(ctx);
    int i = 0;
    while (i < lt->stream_count && lt->streams[i] != stream) i++;
    if (i == lt->stream_count) {
        MT_TRY(mt_context_alloc(ctx, MTI_LT_WORKSPACE, &lt->workspaces[i]));
        lt->streams[i] = stream;
        lt->stream_count++;
    }
    lt->workspace = lt->workspaces[i];
    return MT_SUCCESS;
}

static mt_status mti_lt_fill(mt_context *ctx, mti_lt *lt) {
    MT_TRY(mti_lt_workspace(ctx, lt));
    MT_CUDA_TRY(ctx,
                cudaDeviceGetAttribute(&lt->multiprocessors, cudaDevAttrMultiProcessorCount, mt_context_ordinal(ctx)));
    MTI_LT_TRY(ctx, cublasLtCreate(&lt->handle));
    MT_CUDA_TRY(ctx, cudaEventCreate(&lt->begin));
    MT_CUDA_TRY(ctx, cudaEventCreate(&lt->end));
    return MT_SUCCESS;
}

/* *out = the cuBLASLt state of the context, with the workspace of the current stream. Creates it on the first call,
   completely or not at all. */
static mt_status mti_lt_open(mt_context *ctx, mti_lt **out) {
    mti_kernels *k;
    mti_lt *lt;
    mt_status status;
    MT_TRY(mti_kernels_open(ctx, &k));
    *out = (mti_lt *)k->gemm;
    if (*out) return mti_lt_workspace(ctx, *out);
    lt = (mti_lt *)mt_host_alloc(sizeof *lt);
    if (!lt) return mt_fail(ctx, MT_ERR_MEMORY, "mt_gemm: no memory for %zu bytes", sizeof *lt);
    status = mti_lt_fill(ctx, lt);
    if (status != MT_SUCCESS) {
        mti_lt_destroy(ctx, lt);
        return status;
    }
    k->gemm = *out = lt;
    k->gemm_destroy = mti_lt_destroy;
    return MT_SUCCESS;
}

static cudaDataType_t mti_lt_type(int dtype) {
    return dtype == MT_F32 ? CUDA_R_32F : dtype == MT_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

static mt_status mti_lt_layout(mt_context *ctx, cublasLtMatrixLayout_t *out, int dtype, int64_t rows, int64_t cols,
                               int64_t ld) {
    MTI_LT_TRY(ctx, cublasLtMatrixLayoutCreate(out, mti_lt_type(dtype), (uint64_t)rows, (uint64_t)cols, ld));
    return MT_SUCCESS;
}

/* Whether a status means that cuBLASLt does not have a product. For some epilogues it is INVALID_VALUE. */
static int mti_lt_lacks(const mti_lt_key *key, cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED ||
           (status == CUBLAS_STATUS_INVALID_VALUE && key->epilogue != CUBLASLT_EPILOGUE_DEFAULT);
}

/* results = the algorithms that the heuristic proposes for a plan, the best first. *found = their number. It is 0 if
   cuBLASLt does not support the product. */
static mt_status mti_lt_propose(mt_context *ctx, mti_lt *lt, const mti_lt_plan *p,
                                cublasLtMatmulHeuristicResult_t *results, int *found) {
    cublasLtMatmulPreference_t preference;
    size_t workspace = MTI_LT_WORKSPACE;
    uint32_t alignment = 16;                                      /* mti_lt_operand ensures this alignment */
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* a split k adds in f32, not in 16 bits */
    cublasStatus_t status;
    int proposed = 0;
    *found = 0;
    MTI_LT_TRY(ctx, cublasLtMatmulPreferenceCreate(&preference));
    status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                  sizeof workspace);
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < 4; i++) {
        static const cublasLtMatmulPreferenceAttributes_t which[] = {
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
        status = cublasLtMatmulPreferenceSetAttribute(preference, which[i], &alignment, sizeof alignment);
    }
    if (status == CUBLAS_STATUS_SUCCESS && p->key.c_type != MT_F32)
        status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                      &reductions, sizeof reductions);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulAlgoGetHeuristic(lt->handle, p->desc, p->a, p->b, p->c, p->c, preference,
                                                MTI_LT_CANDIDATES, results, &proposed);
    for (int i = 0; i < proposed; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS) results[(*found)++] = results[i];
    cublasLtMatmulPreferenceDestroy(preference);
    return mti_lt_lacks(&p->key, status) ? MT_SUCCESS : mti_lt_check(ctx, status, "cublasLtMatmulAlgoGetHeuristic");
}

static cublasStatus_t mti_lt_enqueue(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g) {
    return cublasLtMatmul(lt->handle, p->desc, &g->alpha, g->b.data, p->a, g->a.data, p->b, &g->beta, g->c.data, p->c,
                          g->c.data, p->c, &p->algo, lt->workspace, p->workspace, mt_context_stream(ctx));
}

/* Tells cuBLASLt where the operands of the epilogue are. */
static mt_status mti_lt_point(mt_context *ctx, mti_lt_plan *p, const mti_lt_call *g) {
    if (g->bias)
        MTI_LT_TRY(
            ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias));
    if (g->aux)
        MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->aux,
                                                       sizeof g->aux));
    return MT_SUCCESS;
}

static mt_status mti_lt_matmul(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g) {
    return mti_lt_check(ctx, mti_lt_enqueue(ctx, lt, p, g), "cublasLtMatmul");
}

/* *ms = the milliseconds that run() takes on the GPU: the median of MTI_LT_RUNS runs, after one warm-up run. */
template <typename Run> static mt_status mti_lt_time(mt_context *ctx, mti_lt *lt, const Run &run, float *ms) {
    float all[MTI_LT_RUNS];
    MT_TRY(run());
    for (int i = 0; i < MTI_LT_RUNS; i++) {
        float x = 0.0f;
        int at = i;
        MT_CUDA_TRY(ctx, cudaEventRecord(lt->begin, mt_context_stream(ctx)));
        MT_TRY(run());
        MT_CUDA_TRY(ctx, cudaEventRecord(lt->end, mt_context_stream(ctx)));
        MT_TRY(mt_context_synchronize(ctx)); /* waits for peers first, with their timeout */
        MT_CUDA_TRY(ctx, cudaEventElapsedTime(&x, lt->begin, lt->end));
        for (; at > 0 && all[at - 1] > x; at--) all[at] = all[at - 1];
        all[at] = x;
    }
    *ms = all[MTI_LT_RUNS / 2];
    return MT_SUCCESS;
}

/* *yes = whether the host may wait for the stream, which a measurement does. It may not during stream capture. */
static mt_status mti_lt_may_wait(mt_context *ctx, int *yes) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    MT_CUDA_TRY(ctx, cudaStreamIsCapturing(mt_context_stream(ctx), &capture));
    *yes = capture == cudaStreamCaptureStatusNone;
    return MT_SUCCESS;
}

struct mti_noise_op { /* values in (-1, 1) whose exponents differ widely, so that the bits of a sum show its order */
    mti_view y;
    uint64_t seed;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        float x[MTI_VECTOR];
        for (int j = 0; j < MTI_VECTOR; j++) {
            float v = (float)(mt_hash_word(seed + (uint64_t)row, (uint32_t)(col + j)) >> 40) * 1.1920929e-7f - 1.0f;
            x[j] = v * v * v;
        }
        mti_store<WIDE>(y, row, col, n, x);
    }
};

/* Replaces *t by a view of the same layout in the arena, filled with noise. */
static mt_status mti_lt_noise(mt_context *ctx, uint64_t seed, mt_tensor *t) {
    mt_tensor whole;
    MT_TRY(mt_arena_tensor(ctx, t->dtype, t->rows, mt_tensor_ld(*t), &whole));
    mti_noise_op op = {mti_view_of(whole), seed};
    *t = mt_tensor_cols(whole, 0, t->cols);
    return mti_map(ctx, "mt_gemm", op, mti_is_wide(whole), whole.rows, whole.cols);
}

static size_t mti_lt_bytes(mt_tensor t) {
    return mt_align_up((size_t)(t.rows * mt_tensor_ld(t)) * mt_dtype_size(t.dtype));
}

/* Makes g a product of noise in the arena that adds to noise, with which algorithms are compared. */
static mt_status mti_lt_trial(mt_context *ctx, mti_lt_call *g) {
    MT_TRY(mti_lt_noise(ctx, 1, &g->a));
    MT_TRY(mti_lt_noise(ctx, 2, &g->b));
    MT_TRY(mti_lt_noise(ctx, 3, &g->c));
    g->alpha = g->beta = 1.0f;
    return MT_SUCCESS;
}

/* Runs g with the algorithm of the plan. *runs = whether cuBLASLt accepts the call. *bits = the hash of the result. */
static mt_status mti_lt_try(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g, int *runs,
                            uint64_t *bits) {
    mti_noise_op op = {mti_view_of(g->c), 3};
    *bits = 0;
    MT_TRY(mti_map(ctx, "mt_gemm", op, 0, g->c.rows, g->c.cols));
    *runs = mti_lt_enqueue(ctx, lt, p, g) == CUBLAS_STATUS_SUCCESS;
    return *runs ? mti_cuda_hash(ctx, g->c, 0, 0, g->c.cols, bits) : MT_SUCCESS;
}

/* Sets the algorithm of the plan to the fastest candidate that gives the same bits as the first candidate that runs.
   All candidates multiply the same noise, because data such as zeros would not show how they round. If no candidate
   runs, the plan gets the first one, and the product then reports its error. */
static mt_status mti_lt_fastest(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, mti_lt_call g,
                                const cublasLtMatmulHeuristicResult_t *results, int found) {
    uint64_t first = 0, bits = 0;
    float best = 0.0f, ms = 0.0f;
    int chosen = -1, runs = 0;
    MT_TRY(mti_lt_trial(ctx, &g));
    for (int i = 0; i < found; i++) {
        p->algo = results[i].algo;
        p->workspace = results[i].workspaceSize;
        MT_TRY(mti_lt_try(ctx, lt, p, &g, &runs, &bits));
        if (chosen < 0) first = bits;
        if (!runs || bits != first) continue;
        MT_TRY(mti_lt_time(
            ctx, lt, [&]() { return mti_lt_matmul(ctx, lt, p, &g); }, &ms));
        if (chosen >= 0 && ms >= best) continue;
        best = ms;
        chosen = i;
    }
    p->algo = results[chosen < 0 ? 0 : chosen].algo;
    p->workspace = results[chosen < 0 ? 0 : chosen].workspaceSize;
    return MT_SUCCESS;
}

static mt_status mti_lt_set_target(mt_context *ctx, mti_lt_plan *p, int target) {
    int32_t count = target;
    MTI_LT_TRY(ctx,
               cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &count, sizeof count));
    return MT_SUCCESS;
}

/* The product that has all multiprocessors chooses the bits: sets the algorithm of the plan to that of g.alone, and
   then to the first candidate with the same bits, if there is one. */
static mt_status mti_lt_beside(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, mti_lt_call g,
                               const cublasLtMatmulHeuristicResult_t *results, int found) {
    uint64_t alone = 0, bits = 0;
    int runs = 0;
    MT_TRY(mti_lt_trial(ctx, &g));
    MT_TRY(mti_lt_set_target(ctx, p, 0));
    MT_TRY(mti_lt_try(ctx, lt, p, &g, &runs, &alone));
    MT_TRY(mti_lt_set_target(ctx, p, p->key.target));
    for (int i = 0; runs && i < found; i++) {
        p->algo = results[i].algo;
        p->workspace = results[i].workspaceSize;
        MT_TRY(mti_lt_try(ctx, lt, p, &g, &runs, &bits));
        if (runs && bits == alone) return MT_SUCCESS;
        runs = 1;
    }
    p->algo = g.alone->algo;
    p->workspace = g.alone->workspace;
    return mti_lt_set_target(ctx, p, 0);
}

/* Whether algorithms can be compared: the host may wait, and free memory of the arena holds other operands. */
static mt_status mti_lt_may_measure(mt_context *ctx, const mti_lt_plan *p, const mti_lt_call *g, int *yes) {
    size_t bytes =
        mti_lt_bytes(g->a) + mti_lt_bytes(g->b) + mti_lt_bytes(g->c) + MT_ALIGNMENT; /* MT_ALIGNMENT for the hash */
    *yes = mt_gemm_get_options(ctx).choice == MT_GEMM_MEASURED && !mt_context_invariant(ctx) &&
           p->key.epilogue == CUBLASLT_EPILOGUE_DEFAULT && p->key.m * p->key.n >= MTI_LT_LEAST &&
           bytes <= mt_arena_available(ctx);
    return *yes ? mti_lt_may_wait(ctx, yes) : MT_SUCCESS;
}

/* Sets the algorithm of the plan: the first one of the heuristic, which depends on the key only, or the fastest one
   with the same bits. Either way the same product always has the same bits, also when collectives run beside it. The
   measurement uses free arena memory and restores the peak of the arena. */
static mt_status mti_lt_choose(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g,
                               const cublasLtMatmulHeuristicResult_t *results, int found) {
    size_t mark = mt_arena_mark(ctx), peak = mt_arena_peak(ctx);
    int measures = 0;
    mt_status status;
    p->algo = g->alone ? g->alone->algo : results[0].algo;
    p->workspace = g->alone ? g->alone->workspace : results[0].workspaceSize;
    MT_TRY(mti_lt_may_measure(ctx, p, g, &measures));
    if (!measures || (!g->alone && found < 2)) return g->alone ? mti_lt_set_target(ctx, p, 0) : MT_SUCCESS;
    status = g->alone ? mti_lt_beside(ctx, lt, p, *g, results, found) : mti_lt_fastest(ctx, lt, p, *g, results, found);
    mt_arena_release(ctx, mark);
    mt_arena_set_peak(ctx, peak);
    return status;
}

/* Sets the epilogue of a plan and its operands in the cuBLASLt descriptor. */
static mt_status mti_lt_epilogue(mt_context *ctx, mti_lt_plan *p, const mti_lt_call *g) {
    const mti_lt_key *q = &p->key;
    uint32_t epilogue = (uint32_t)q->epilogue;
    if (epilogue == CUBLASLT_EPILOGUE_DEFAULT) return MT_SUCCESS;
    MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (g->aux)
        MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &q->ld_aux,
                                                       sizeof q->ld_aux));
    if (g->aux)
        MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->aux,
                                                       sizeof g->aux));
    if (g->bias) /* the heuristic considers the alignment of bias */
        MTI_LT_TRY(
            ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias));
    return MT_SUCCESS;
}

/* Fills the plan, whose key is set. *found = the number of algorithms. It is 0 if cuBLASLt does not support the
   product. */
static mt_status mti_lt_plan_make(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g, int *found) {
    const mti_lt_key *q = &p->key;
    cublasOperation_t first = q->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = q->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulHeuristicResult_t results[MTI_LT_CANDIDATES];
    MTI_LT_TRY(ctx, cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    if (q->target) MT_TRY(mti_lt_set_target(ctx, p, q->target));
    MT_TRY(mti_lt_epilogue(ctx, p, g));
    MT_TRY(mti_lt_layout(ctx, &p->a, q->b_type, q->trans_b ? q->k : q->n, q->trans_b ? q->n : q->k, q->ldb));
    MT_TRY(mti_lt_layout(ctx, &p->b, q->a_type, q->trans_a ? q->m : q->k, q->trans_a ? q->k : q->m, q->lda));
    MT_TRY(mti_lt_layout(ctx, &p->c, q->c_type, q->n, q->m, q->ldc));
    MT_TRY(mti_lt_propose(ctx, lt, p, results, found));
    return *found || g->alone ? mti_lt_choose(ctx, lt, p, g, results, *found) : MT_SUCCESS;
}

static mti_lt_plan **mti_lt_bucket(mti_lt *lt, const mti_lt_key *key) {
    uint32_t words[sizeof *key / sizeof(uint32_t)];
    uint64_t hash = 0;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = mt_hash_word(hash, words[i]);
    return &lt->buckets[hash % MTI_LT_BUCKETS];
}

/* Returns a place for one more plan. If all places are taken, evicts the least recently used plan without `stays`. */
static mti_lt_plan *mti_lt_slot(mti_lt *lt) {
    mti_lt_plan *oldest = NULL, **link;
    if (lt->count < MTI_LT_PLANS) return &lt->plans[lt->count++];
    for (int i = 0; i < MTI_LT_PLANS; i++)
        if (!lt->plans[i].stays && (!oldest || lt->plans[i].used < oldest->used)) oldest = &lt->plans[i];
    for (link = mti_lt_bucket(lt, &oldest->key); *link != oldest; link = &(*link)->next) continue;
    *link = oldest->next;
    mti_lt_forget(oldest);
    return oldest;
}

/* *out = the plan of a product, which is created if it does not exist yet. A product with an epilogue may have no
   algorithm; without one its plan is not fused. */
static mt_status mti_lt_plan_of(mt_context *ctx, mti_lt *lt, const mti_lt_call *g, mti_lt_plan **out) {
    mti_lt_plan fresh, **bucket = mti_lt_bucket(lt, &g->key);
    int plain = g->key.epilogue == CUBLASLT_EPILOGUE_DEFAULT, found = 0;
    for (*out = *bucket; *out; *out = (*out)->next)
        if (memcmp(&(*out)->key, &g->key, sizeof g->key) == 0) {
            (*out)->used = ++lt->clock;
            return MT_SUCCESS;
        }
    memset(&fresh, 0, sizeof fresh);
    fresh.key = g->key;
    mt_status status = mti_lt_plan_make(ctx, lt, &fresh, g, &found);
    if (status != MT_SUCCESS || (found == 0 && plain && !g->alone)) {
        mti_lt_forget(&fresh);
        if (status != MT_SUCCESS) return status;
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "mt_gemm: cuBLASLt has no algorithm to multiply %lld x %lld x %lld",
                       (long long)g->key.m, (long long)g->key.n, (long long)g->key.k);
    }
    *out = mti_lt_slot(lt);
    fresh.undecided = found > 0 && !plain;
    fresh.used = ++lt->clock;
    fresh.next = *bucket;
    **out = fresh;
    *bucket = *out;
    return MT_SUCCESS;
}

/* The multiprocessors that collectives beside a product leave to it; 0: all, or not known. */
static int mti_lt_target(mt_context *ctx, const mti_lt *lt) {
    int busy = mt_overlap_multiprocessors(ctx);
    return busy > 0 && busy < lt->multiprocessors ? lt->multiprocessors - busy : 0;
}

/* Runs a product without an epilogue. */
static mt_status mti_lt_run(mt_context *ctx, mti_lt_call *g) {
    mti_lt *lt;
    mti_lt_plan *p = NULL;
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mti_lt_open(ctx, &lt));
    MT_TRY(mti_lt_plan_of(ctx, lt, g, &p));
    g->key.target = mti_lt_target(ctx, lt);
    g->alone = p;
    if (g->key.target) MT_TRY(mti_lt_plan_of(ctx, lt, g, &p));
    return mti_lt_matmul(ctx, lt, p, g);
}

/* Fills a call and its key. The caller sets bias, aux and ld_aux. */
static void mti_lt_call_make(const mti_matmul *m, mt_tensor a, mt_tensor b, mt_tensor c, int epilogue, mti_lt_call *g) {
    mti_lt_key *key = &g->key;
    memset(g, 0, sizeof *g);
    key->m = m->m, key->n = m->n, key->k = m->k;
    key->trans_a = m->trans_a, key->trans_b = m->trans_b;
    key->lda = mt_tensor_ld(a), key->ldb = mt_tensor_ld(b), key->ldc = mt_tensor_ld(c);
    key->a_type = (int)a.dtype, key->b_type = (int)b.dtype, key->c_type = (int)c.dtype;
    key->epilogue = epilogue;
    g->alpha = m->alpha, g->beta = m->beta;
    g->a = a, g->b = b, g->c = c;
}

/* *out = t if t has this type and is aligned. Otherwise *out = a new view in the arena, which mti_lt_fill fills. */
static mt_status mti_lt_operand(mt_context *ctx, mt_tensor t, mt_dtype dtype, mt_tensor *out) {
    *out = t;
    if (t.dtype == dtype && mti_is_wide(t)) return MT_SUCCESS;
    int64_t pitch = mt_round_up(t.cols, 8);
    MT_TRY(mt_arena_tensor(ctx, dtype, t.rows, pitch, out));
    *out = mt_tensor_cols(*out, 0, t.cols);
    return MT_SUCCESS;
}

/* to = from, converted to the type of `to`. Does nothing if they are the same memory. */
static mt_status mti_lt_fill(mt_context *ctx, mt_tensor from, mt_tensor to) {
    return from.data == to.data ? MT_SUCCESS : mti_cuda_convert(ctx, from, to);
}

/* y *= factor. With factor 0, y is not read. On sm_90: 18 instructions for an f32 element, which moves 8 bytes (budget:
   54). */
struct mti_scale_op {
    mti_view y;
    float factor;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        float x[MTI_VECTOR] = {};
        if (factor != 0.0f) mti_load<WIDE>(y, row, col, n, x);
        for (int j = 0; j < MTI_VECTOR; j++) x[j] *= factor;
        mti_store<WIDE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_scale(mt_context *ctx, mt_tensor y, float factor) {
    mti_scale_op op = {mti_view_of(y), factor};
    return mti_map(ctx, "mt_gemm", op, mti_is_wide(y), y.rows, y.cols);
}

/* A product by one call of cuBLASLt, which takes operands of one type, and is fast with 16-byte alignment. Other
   operands are converted in the arena. */
static mt_status mti_cuda_gemm_whole(mt_context *ctx, const mti_matmul *g, mt_tensor a, mt_tensor b, mt_tensor c) {
    size_t mark = mt_arena_mark(ctx);
    mt_dtype type = a.dtype == b.dtype ? a.dtype : MT_F32;
    mt_dtype c_type = c.dtype == MT_F32 || c.dtype == type ? c.dtype : MT_F32;
    mti_lt_call call;
    mt_tensor own_a, own_b, own_c;
    if (g->m == 0 || g->n == 0) return MT_SUCCESS;
    if (g->k == 0 || g->alpha == 0.0f) return g->beta == 1.0f ? MT_SUCCESS : mti_cuda_scale(ctx, c, g->beta);
    MT_TRY(mti_lt_operand(ctx, a, type, &own_a));
    MT_TRY(mti_lt_operand(ctx, b, type, &own_b));
    MT_TRY(mti_lt_operand(ctx, c, c_type, &own_c));
    MT_TRY(mti_lt_fill(ctx, a, own_a));
    MT_TRY(mti_lt_fill(ctx, b, own_b));
    if (g->beta != 0.0f) MT_TRY(mti_lt_fill(ctx, c, own_c));
    mti_lt_call_make(g, own_a, own_b, own_c, CUBLASLT_EPILOGUE_DEFAULT, &call);
    MT_TRY(mti_lt_run(ctx, &call));
    MT_TRY(mti_lt_fill(ctx, own_c, c));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

#define MTI_LT_SPLIT 1024 /* a dimension is divided only above this size, */
#define MTI_LT_THIN 64    /* and only where all dimensions have at least this size */

/* Which dimension of a 16-bit product is divided: 'm', 'n', 'k' or 0 for none. In 16 bits, the fast kernels of cuBLASLt
   need rows of A, B and C whose number of elements is a multiple of 8, not only a leading dimension that is one. */
static int mti_lt_divided(mt_context *ctx, const mti_matmul *g, mt_tensor a, mt_tensor b) {
    if (a.dtype == MT_F32 || a.dtype != b.dtype || mt_context_invariant(ctx)) return 0;
    if (mt_min(g->m, mt_min(g->n, g->k)) < MTI_LT_THIN) return 0;
    if ((!g->trans_a || g->trans_b) && g->k % 8 && g->k > MTI_LT_SPLIT) return 'k';
    if (g->n % 8 && g->n > MTI_LT_SPLIT) return 'n';
    return g->trans_a && g->m % 8 && g->m > MTI_LT_SPLIT ? 'm' : 0;
}

static mt_tensor mti_lt_part(mt_tensor t, int rows, int64_t first, int64_t count) {
    return rows ? mt_tensor_rows(t, first, count) : mt_tensor_cols(t, first, count);
}

/* The product on a GPU. A product with 50257 columns becomes one with 50240 and one with 17. Of a divided k the rest
   comes first, because a C of 16 bits is rounded after it. */
static mt_status mti_cuda_gemm(mt_context *ctx, const mti_matmul *g, mt_tensor a, mt_tensor b, mt_tensor c) {
    int which = mti_lt_divided(ctx, g, a, b);
    int64_t size = which == 'm' ? g->m : which == 'n' ? g->n : g->k, most = size / 64 * 64;
    if (!which) return mti_cuda_gemm_whole(ctx, g, a, b, c);
    for (int rest = 1; rest >= 0; rest--) {
        int64_t first = rest ? most : 0, count = rest ? size - most : most;
        mti_matmul part = *g;
        mt_tensor own_a = a, own_b = b, own_c = c;
        (which == 'm' ? part.m : which == 'n' ? part.n : part.k) = count;
        if (which == 'k' && !rest) part.beta = 1.0f;
        if (which != 'n') own_a = mti_lt_part(a, (which == 'm') != g->trans_a, first, count);
        if (which != 'm') own_b = mti_lt_part(b, (which == 'k') != g->trans_b, first, count);
        if (which != 'k') own_c = mti_lt_part(c, which == 'm', first, count);
        MT_TRY(mti_cuda_gemm(ctx, &part, own_a, own_b, own_c));
    }
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif
