/* ---- attention on a GPU: the forward kernels of cuDNN ------------------------------------------------------------ */

#pragma once
#include "attention_desc.c"
#include "gemm.c"
#include "map.cuh"
#include "options.c"

#if MT_HAS_CUDA && defined(MT_USE_CUDNN)
extern "C++" {

/* cuDNN computes attention from a graph of operations, which it recognises as a whole and runs as one kernel:
     scores  = q k^T              product            shifted = masked - highest      pointwise
     scaled  = scores * scale     pointwise          powers  = exp(shifted)          pointwise
     row     = the query number   pointwise, causal  sum     = sum of powers         reduction over keys
     col     = the key number     pointwise, causal  log     = log(sum)              pointwise
     seen    = row >= col         pointwise, causal  lse     = highest + log         pointwise
     masked  = scaled where seen, pointwise, causal  weights = powers / sum          pointwise
               otherwise -infinity                   out     = weights v             product
     highest = maximum of masked  reduction over keys
   Source: "Graph API" in NVIDIA's documentation of cuDNN. Tensors of the graph are [batch, heads, rows, columns]. All
   between q, k, v and out are virtual: they are not in memory. lse is virtual, too, if the call does not want it. */
enum {
    MTI_CUDNN_Q = 1, /* these numbers are the unique ids of the tensors */
    MTI_CUDNN_K,
    MTI_CUDNN_V,
    MTI_CUDNN_SCALE,
    MTI_CUDNN_INFINITY, /* -infinity */
    MTI_CUDNN_OUT,
    MTI_CUDNN_LSE,
    MTI_CUDNN_SCORES,
    MTI_CUDNN_SCALED,
    MTI_CUDNN_ROW,
    MTI_CUDNN_COL,
    MTI_CUDNN_SEEN,
    MTI_CUDNN_MASKED,
    MTI_CUDNN_HIGHEST,
    MTI_CUDNN_SHIFTED,
    MTI_CUDNN_POWERS,
    MTI_CUDNN_SUM,
    MTI_CUDNN_LOG,
    MTI_CUDNN_WEIGHTS,
    MTI_CUDNN_TENSORS
};
typedef enum mti_cudnn_kind { MTI_CUDNN_MEMORY, MTI_CUDNN_VIRTUAL, MTI_CUDNN_VALUE } mti_cudnn_kind;

#define MTI_CUDNN_DIM 256 /* largest head size; cuDNN may refuse smaller ones, too */
#define MTI_CUDNN_OPERATIONS 16
#define MTI_CUDNN_CANDIDATES 8 /* maximum number of engines that are tried for a plan */
#define MTI_CUDNN_DESCRIPTORS (MTI_CUDNN_TENSORS + 2 * MTI_CUDNN_OPERATIONS + 3 * MTI_CUDNN_CANDIDATES + 2)
#define MTI_CUDNN_PLANS 64                      /* maximum number of plans of a context */
#define MTI_CUDNN_WORKSPACE ((size_t)256 << 10) /* of a call; engines that need more are not used */

/* What distinguishes calls for cuDNN. Distances are in elements: *_ld between rows, *_step between heads. */
typedef struct mti_cudnn_key {
    int64_t batch, seq, heads, groups, head_dim;
    int64_t q_ld, k_ld, v_ld, out_ld, q_step, kv_step;
    int dtype, causal, stats, unused; /* stats: the call wants lse */
} mti_cudnn_key;

/* The execution plan of a key. */
typedef struct mti_cudnn_plan {
    mti_cudnn_key key;
    cudnnBackendDescriptor_t plan; /* NULL: cuDNN has no engine for the key */
    cudnnBackendDescriptor_t tensors[MTI_CUDNN_TENSORS], operations[MTI_CUDNN_OPERATIONS];
    cudnnBackendDescriptor_t made[MTI_CUDNN_DESCRIPTORS]; /* all descriptors, in the order of their creation */
    int operation_count, made_count;
    int recorded;  /* 1: a CUDA graph may use the plan, which must then live as long as the context */
    uint64_t used; /* the value of mti_cudnn.clock at the last use */
} mti_cudnn_plan;

/* The cuDNN state of a context, created by the first call that cuDNN may compute. */
typedef struct mti_cudnn {
    cudnnHandle_t handle;
    cudnnBackendDescriptor_t
        device;                 /* a description of a GPU to plan for, without a handle; NULL: that of the handle */
    struct CUstream_st *stream; /* that of the handle */
    uint64_t clock;             /* counts the uses of plans */
    int count;
    mti_cudnn_plan plans[MTI_CUDNN_PLANS];
} mti_cudnn;

/* what: during which a call of cuDNN has failed */
static mt_status mti_cudnn_check(mt_context *ctx, cudnnStatus_t status, const char *what) {
    int memory = status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
                 status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
    if (status == CUDNN_STATUS_SUCCESS) return MT_SUCCESS;
    return mt_fail(ctx, memory ? MT_ERR_MEMORY : MT_ERR_SYSTEM, "mt_attention_forward: %s: cuDNN status %d (%s)", what,
                   (int)status, cudnnGetErrorString(status));
}

/* Whether a status means that cuDNN cannot compute a graph. It depends on the key, on cuDNN's version and on the GPU.
   Others, such as missing memory, are errors of the call: ranks must not differ in the kernels that they choose. */
static int mti_cudnn_lacks(cudnnStatus_t status) {
    return CUDNN_STATUS_CATEGORY((int)status) == CUDNN_STATUS_NOT_SUPPORTED ||
           CUDNN_STATUS_CATEGORY((int)status) == CUDNN_STATUS_BAD_PARAM ||
           status == CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED;
}

/* In a function that returns a status of cuDNN. */
#define MTI_CUDNN_TRY(call)                                                                                            \
    do {                                                                                                               \
        cudnnStatus_t mti_cudnn_status = (call);                                                                       \
        if (mti_cudnn_status != CUDNN_STATUS_SUCCESS) return mti_cudnn_status;                                         \
    } while (0)

/* ---- descriptors ------------------------------------------------------------------------------------------------- */

/* Creates a descriptor that lives as long as the plan. */
static cudnnStatus_t mti_cudnn_new(mti_cudnn_plan *p, cudnnBackendDescriptorType_t type,
                                   cudnnBackendDescriptor_t *out) {
    if (p->made_count == MTI_CUDNN_DESCRIPTORS) return CUDNN_STATUS_INTERNAL_ERROR;
    MTI_CUDNN_TRY(cudnnBackendCreateDescriptor(type, out));
    p->made[p->made_count++] = *out;
    return CUDNN_STATUS_SUCCESS;
}

static void mti_cudnn_forget(mti_cudnn_plan *p) {
    while (p->made_count > 0) cudnnBackendDestroyDescriptor(p->made[--p->made_count]);
    p->plan = NULL;
}

static cudnnStatus_t mti_cudnn_set_int(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, int64_t value) {
    return cudnnBackendSetAttribute(d, name, CUDNN_TYPE_INT64, 1, &value);
}

static cudnnStatus_t mti_cudnn_set_flag(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, bool value) {
    return cudnnBackendSetAttribute(d, name, CUDNN_TYPE_BOOLEAN, 1, &value);
}

static cudnnStatus_t mti_cudnn_set_type(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                        cudnnDataType_t value) {
    return cudnnBackendSetAttribute(d, name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}

static cudnnStatus_t mti_cudnn_set(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                   cudnnBackendDescriptor_t value) {
    return cudnnBackendSetAttribute(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

/* Adds tensor number id to the graph. */
static cudnnStatus_t mti_cudnn_tensor(mti_cudnn_plan *p, int id, cudnnDataType_t type, mti_cudnn_kind kind,
                                      const int64_t (&dims)[4], const int64_t (&strides)[4]) {
    cudnnBackendDescriptor_t d;
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_TENSOR_DESCRIPTOR, &d));
    MTI_CUDNN_TRY(mti_cudnn_set_type(d, CUDNN_ATTR_TENSOR_DATA_TYPE, type));
    MTI_CUDNN_TRY(cudnnBackendSetAttribute(d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims));
    MTI_CUDNN_TRY(cudnnBackendSetAttribute(d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides));
    MTI_CUDNN_TRY(mti_cudnn_set_int(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, id));
    MTI_CUDNN_TRY(mti_cudnn_set_int(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 16));
    MTI_CUDNN_TRY(mti_cudnn_set_flag(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, kind == MTI_CUDNN_VIRTUAL));
    MTI_CUDNN_TRY(mti_cudnn_set_flag(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, kind == MTI_CUDNN_VALUE));
    p->tensors[id] = d;
    return cudnnBackendFinalize(d);
}

/* Adds all tensors. k is transposed by its strides. Those of lse are [batch, heads, seq], without gaps: before cuDNN
   9.26 not all kernels regard other strides of it (pull request 304 of NVIDIA/cudnn-frontend). */
static cudnnStatus_t mti_cudnn_tensors(mti_cudnn_plan *p) {
    const mti_cudnn_key *k = &p->key;
    const int64_t b = k->batch, h = k->heads, g = k->groups, s = k->seq, d = k->head_dim;
    const cudnnDataType_t type = k->dtype == MT_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
    MTI_CUDNN_TRY(
        mti_cudnn_tensor(p, MTI_CUDNN_Q, type, MTI_CUDNN_MEMORY, {b, h, s, d}, {s * k->q_ld, k->q_step, k->q_ld, 1}));
    MTI_CUDNN_TRY(
        mti_cudnn_tensor(p, MTI_CUDNN_K, type, MTI_CUDNN_MEMORY, {b, g, d, s}, {s * k->k_ld, k->kv_step, 1, k->k_ld}));
    MTI_CUDNN_TRY(
        mti_cudnn_tensor(p, MTI_CUDNN_V, type, MTI_CUDNN_MEMORY, {b, g, s, d}, {s * k->v_ld, k->kv_step, k->v_ld, 1}));
    MTI_CUDNN_TRY(
        mti_cudnn_tensor(p, MTI_CUDNN_OUT, type, MTI_CUDNN_MEMORY, {b, h, s, d}, {s * k->out_ld, d, k->out_ld, 1}));
    MTI_CUDNN_TRY(mti_cudnn_tensor(p, MTI_CUDNN_LSE, CUDNN_DATA_FLOAT, k->stats ? MTI_CUDNN_MEMORY : MTI_CUDNN_VIRTUAL,
                                   {b, h, s, 1}, {h * s, s, 1, 1}));
    for (int id = MTI_CUDNN_SCALE; id <= MTI_CUDNN_INFINITY; id++)
        MTI_CUDNN_TRY(mti_cudnn_tensor(p, id, CUDNN_DATA_FLOAT, MTI_CUDNN_VALUE, {1, 1, 1, 1}, {1, 1, 1, 1}));
    for (int id = MTI_CUDNN_SCORES; id < MTI_CUDNN_TENSORS; id++) {
        int number = id == MTI_CUDNN_ROW || id == MTI_CUDNN_COL;
        int of_rows = id == MTI_CUDNN_HIGHEST || id == MTI_CUDNN_SUM || id == MTI_CUDNN_LOG;
        int64_t columns = of_rows ? 1 : s;
        cudnnDataType_t its = number                    ? CUDNN_DATA_INT32
                              : id == MTI_CUDNN_SEEN    ? CUDNN_DATA_BOOLEAN
                              : id == MTI_CUDNN_WEIGHTS ? type
                                                        : CUDNN_DATA_FLOAT;
        MTI_CUDNN_TRY(mti_cudnn_tensor(p, id, its, MTI_CUDNN_VIRTUAL, {b, h, s, columns},
                                       {h * s * columns, s * columns, columns, 1}));
    }
    return CUDNN_STATUS_SUCCESS;
}

/* Finalizes an operation and adds it to the graph. */
static cudnnStatus_t mti_cudnn_operation(mti_cudnn_plan *p, cudnnBackendDescriptor_t d) {
    if (p->operation_count == MTI_CUDNN_OPERATIONS) return CUDNN_STATUS_INTERNAL_ERROR;
    p->operations[p->operation_count++] = d;
    return cudnnBackendFinalize(d);
}

/* c = a b, numbers of tensors. Sums are in f32. */
static cudnnStatus_t mti_cudnn_product(mti_cudnn_plan *p, int a, int b, int c) {
    cudnnBackendDescriptor_t how, d;
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_MATMUL_DESCRIPTOR, &how));
    MTI_CUDNN_TRY(mti_cudnn_set_type(how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT));
    MTI_CUDNN_TRY(cudnnBackendFinalize(how));
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, &d));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_MATMUL_DESC, how));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_MATMUL_ADESC, p->tensors[a]));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_MATMUL_BDESC, p->tensors[b]));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_MATMUL_CDESC, p->tensors[c]));
    return mti_cudnn_operation(p, d);
}

/* y = the maximum or the sum of x over its columns. */
static cudnnStatus_t mti_cudnn_reduction(mti_cudnn_plan *p, cudnnReduceTensorOp_t mode, int x, int y) {
    cudnnBackendDescriptor_t how, d;
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, &how));
    MTI_CUDNN_TRY(
        cudnnBackendSetAttribute(how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode));
    MTI_CUDNN_TRY(mti_cudnn_set_type(how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT));
    MTI_CUDNN_TRY(cudnnBackendFinalize(how));
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, &d));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, p->tensors[x]));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, p->tensors[y]));
    return mti_cudnn_operation(p, d);
}

/* A pointwise operation: y = x, or of x and b; t selects. b and t may be 0. axis: of CUDNN_POINTWISE_GEN_INDEX. */
static cudnnStatus_t mti_cudnn_pointwise(mti_cudnn_plan *p, cudnnPointwiseMode_t mode, cudnnDataType_t type, int x,
                                         int b, int t, int y, int axis) {
    cudnnBackendDescriptor_t how, d;
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, &how));
    MTI_CUDNN_TRY(cudnnBackendSetAttribute(how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode));
    MTI_CUDNN_TRY(mti_cudnn_set_type(how, CUDNN_ATTR_POINTWISE_MATH_PREC, type));
    if (mode == CUDNN_POINTWISE_GEN_INDEX) MTI_CUDNN_TRY(mti_cudnn_set_int(how, CUDNN_ATTR_POINTWISE_AXIS, axis));
    MTI_CUDNN_TRY(cudnnBackendFinalize(how));
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, &d));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, p->tensors[x]));
    if (b) MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, p->tensors[b]));
    if (t) MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, p->tensors[t]));
    MTI_CUDNN_TRY(mti_cudnn_set(d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, p->tensors[y]));
    return mti_cudnn_operation(p, d);
}

/* The same in f32, of x, or of x and b. */
static cudnnStatus_t mti_cudnn_floats(mti_cudnn_plan *p, cudnnPointwiseMode_t mode, int x, int b, int y) {
    return mti_cudnn_pointwise(p, mode, CUDNN_DATA_FLOAT, x, b, 0, y, 0);
}

/* masked = scaled where the query's number is at least the key's, otherwise -infinity */
static cudnnStatus_t mti_cudnn_mask(mti_cudnn_plan *p) {
    MTI_CUDNN_TRY(
        mti_cudnn_pointwise(p, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, MTI_CUDNN_SCALED, 0, 0, MTI_CUDNN_ROW, 2));
    MTI_CUDNN_TRY(
        mti_cudnn_pointwise(p, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, MTI_CUDNN_SCALED, 0, 0, MTI_CUDNN_COL, 3));
    MTI_CUDNN_TRY(mti_cudnn_pointwise(p, CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, MTI_CUDNN_ROW, MTI_CUDNN_COL, 0,
                                      MTI_CUDNN_SEEN, 0));
    return mti_cudnn_pointwise(p, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, MTI_CUDNN_SCALED, MTI_CUDNN_INFINITY,
                               MTI_CUDNN_SEEN, MTI_CUDNN_MASKED, 0);
}

/* Makes the tensors and the operations of a plan, whose key is set. */
static cudnnStatus_t mti_cudnn_operations(mti_cudnn_plan *p) {
    const int scores = p->key.causal ? MTI_CUDNN_MASKED : MTI_CUDNN_SCALED;
    MTI_CUDNN_TRY(mti_cudnn_tensors(p));
    MTI_CUDNN_TRY(mti_cudnn_product(p, MTI_CUDNN_Q, MTI_CUDNN_K, MTI_CUDNN_SCORES));
    MTI_CUDNN_TRY(mti_cudnn_floats(p, CUDNN_POINTWISE_MUL, MTI_CUDNN_SCORES, MTI_CUDNN_SCALE, MTI_CUDNN_SCALED));
    if (p->key.causal) MTI_CUDNN_TRY(mti_cudnn_mask(p));
    MTI_CUDNN_TRY(mti_cudnn_reduction(p, CUDNN_REDUCE_TENSOR_MAX, scores, MTI_CUDNN_HIGHEST));
    MTI_CUDNN_TRY(mti_cudnn_floats(p, CUDNN_POINTWISE_SUB, scores, MTI_CUDNN_HIGHEST, MTI_CUDNN_SHIFTED));
    MTI_CUDNN_TRY(mti_cudnn_floats(p, CUDNN_POINTWISE_EXP, MTI_CUDNN_SHIFTED, 0, MTI_CUDNN_POWERS));
    MTI_CUDNN_TRY(mti_cudnn_reduction(p, CUDNN_REDUCE_TENSOR_ADD, MTI_CUDNN_POWERS, MTI_CUDNN_SUM));
    MTI_CUDNN_TRY(mti_cudnn_floats(p, CUDNN_POINTWISE_LOG, MTI_CUDNN_SUM, 0, MTI_CUDNN_LOG));
    MTI_CUDNN_TRY(mti_cudnn_floats(p, CUDNN_POINTWISE_ADD, MTI_CUDNN_HIGHEST, MTI_CUDNN_LOG, MTI_CUDNN_LSE));
    MTI_CUDNN_TRY(mti_cudnn_floats(p, CUDNN_POINTWISE_DIV, MTI_CUDNN_POWERS, MTI_CUDNN_SUM, MTI_CUDNN_WEIGHTS));
    return mti_cudnn_product(p, MTI_CUDNN_WEIGHTS, MTI_CUDNN_V, MTI_CUDNN_OUT);
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* *out = a graph of the operations of a plan. */
static cudnnStatus_t mti_cudnn_graph(const mti_cudnn *dnn, mti_cudnn_plan *p, cudnnBackendDescriptor_t *out) {
    cudnnHandle_t handle = dnn->handle;
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, out));
    MTI_CUDNN_TRY(cudnnBackendSetAttribute(*out, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                           p->operation_count, p->operations));
    if (!dnn->device)
        MTI_CUDNN_TRY(cudnnBackendSetAttribute(*out, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle));
    return cudnnBackendFinalize(*out);
}

/* Sets the plan to the engine of a configuration. CUDNN_STATUS_NOT_SUPPORTED: cuDNN says of the engine that it is not
   deterministic, or the engine needs too much workspace. */
static cudnnStatus_t mti_cudnn_try(const mti_cudnn *dnn, mti_cudnn_plan *p, cudnnBackendDescriptor_t configuration) {
    cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    cudnnBackendDescriptor_t engine, plan;
    cudnnHandle_t handle = dnn->handle;
    int64_t count = 0, bytes = 0;
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine));
    MTI_CUDNN_TRY(cudnnBackendGetAttribute(configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                           &count, &engine));
    MTI_CUDNN_TRY(cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                           CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes));
    for (int64_t i = 0; i < mt_min(count, CUDNN_NUMERICAL_NOTE_TYPE_COUNT); i++)
        if (notes[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return CUDNN_STATUS_NOT_SUPPORTED;
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan));
    MTI_CUDNN_TRY(mti_cudnn_set(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration));
    if (dnn->device) MTI_CUDNN_TRY(mti_cudnn_set(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, dnn->device));
    else MTI_CUDNN_TRY(cudnnBackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle));
    MTI_CUDNN_TRY(cudnnBackendFinalize(plan));
    MTI_CUDNN_TRY(
        cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count, &bytes));
    if (bytes > (int64_t)MTI_CUDNN_WORKSPACE) return CUDNN_STATUS_NOT_SUPPORTED;
    p->plan = plan;
    return CUDNN_STATUS_SUCCESS;
}

/* Sets the plan to the first engine that cuDNN's heuristic proposes for its operations and that can be used. The
   proposals depend on the graph, the GPU and cuDNN's version, not on a measurement. */
static cudnnStatus_t mti_cudnn_find(const mti_cudnn *dnn, mti_cudnn_plan *p) {
    cudnnBackendDescriptor_t graph, heuristic, all[MTI_CUDNN_CANDIDATES];
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    cudnnStatus_t status = CUDNN_STATUS_NOT_SUPPORTED;
    int64_t count = 0;
    MTI_CUDNN_TRY(mti_cudnn_graph(dnn, p, &graph));
    MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &heuristic));
    MTI_CUDNN_TRY(mti_cudnn_set(heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph));
    MTI_CUDNN_TRY(cudnnBackendSetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode));
    if (dnn->device) MTI_CUDNN_TRY(mti_cudnn_set(heuristic, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, dnn->device));
    MTI_CUDNN_TRY(cudnnBackendFinalize(heuristic));
    for (int i = 0; i < MTI_CUDNN_CANDIDATES; i++)
        MTI_CUDNN_TRY(mti_cudnn_new(p, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &all[i]));
    MTI_CUDNN_TRY(cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                           MTI_CUDNN_CANDIDATES, &count, all));
    for (int64_t i = 0; i < mt_min(count, MTI_CUDNN_CANDIDATES) && mti_cudnn_lacks(status); i++)
        status = mti_cudnn_try(dnn, p, all[i]);
    return status;
}

/* Makes the plan of p->key. Without an engine for it, p->plan is NULL. */
static mt_status mti_cudnn_make(mt_context *ctx, const mti_cudnn *dnn, mti_cudnn_plan *p) {
    cudnnStatus_t status = mti_cudnn_operations(p);
    if (status == CUDNN_STATUS_SUCCESS) status = mti_cudnn_find(dnn, p);
    if (status == CUDNN_STATUS_SUCCESS) return MT_SUCCESS;
    mti_cudnn_forget(p);
    return mti_cudnn_lacks(status) ? MT_SUCCESS : mti_cudnn_check(ctx, status, "the creation of a plan");
}

static void mti_cudnn_destroy(mt_context *ctx, void *attention) {
    mti_cudnn *dnn = (mti_cudnn *)attention;
    (void)ctx;
    for (int i = 0; i < dnn->count; i++) mti_cudnn_forget(&dnn->plans[i]);
    if (dnn->handle) cudnnDestroy(dnn->handle);
    mt_host_free(dnn);
}

/* *out = the cuDNN state of the context. Creates it on the first call, completely or not at all. */
static mt_status mti_cudnn_open(mt_context *ctx, mti_cudnn **out) {
    mti_kernels *k;
    mti_cudnn *dnn;
    mt_status status;
    MT_TRY(mti_kernels_open(ctx, &k));
    *out = (mti_cudnn *)k->attention;
    if (*out) return MT_SUCCESS;
    dnn = (mti_cudnn *)mt_host_alloc(sizeof *dnn);
    if (!dnn) return mt_fail(ctx, MT_ERR_MEMORY, "mt_attention_forward: no memory for %zu bytes", sizeof *dnn);
    status = mti_cudnn_check(ctx, cudnnCreate(&dnn->handle), "cudnnCreate");
    if (status != MT_SUCCESS) {
        dnn->handle = NULL;
        mti_cudnn_destroy(ctx, dnn);
        return status;
    }
    k->attention = *out = dnn;
    k->attention_destroy = mti_cudnn_destroy;
    return MT_SUCCESS;
}

/* Returns the plan of a key, or NULL if the context has none. */
static mti_cudnn_plan *mti_cudnn_known(mt_context *ctx, const mti_cudnn_key *key) {
    const mti_kernels *k = (const mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    mti_cudnn *dnn = k ? (mti_cudnn *)k->attention : NULL;
    for (int i = 0; dnn && i < dnn->count; i++)
        if (memcmp(&dnn->plans[i].key, key, sizeof *key) == 0) {
            dnn->plans[i].used = ++dnn->clock;
            return &dnn->plans[i];
        }
    return NULL;
}

/* *out = a place for one more plan. If all places are taken, this is the place of the least recently used plan that no
   CUDA graph uses. Its kernels may still run, so the host waits. It cannot wait during stream capture. */
static mt_status mti_cudnn_slot(mt_context *ctx, mti_cudnn *dnn, mti_cudnn_plan **out) {
    mti_cudnn_plan *oldest = NULL;
    int waits = 0;
    *out = &dnn->plans[dnn->count];
    if (dnn->count < MTI_CUDNN_PLANS) return dnn->count++, MT_SUCCESS;
    for (int i = 0; i < MTI_CUDNN_PLANS; i++)
        if (!dnn->plans[i].recorded && (!oldest || dnn->plans[i].used < oldest->used)) oldest = &dnn->plans[i];
    MT_TRY(mti_lt_may_wait(ctx, &waits));
    if (!oldest || !waits)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                       "mt_attention_forward: cuDNN's plans for %d shapes are in use: a recorded step can have %d, and "
                       "must have run once before with all of them",
                       MTI_CUDNN_PLANS, MTI_CUDNN_PLANS);
    MT_TRY(mt_context_synchronize(ctx));
    mti_cudnn_forget(oldest);
    *out = oldest;
    return MT_SUCCESS;
}

/* Adds the plan of a key to those of the context. */
static mt_status mti_cudnn_add(mt_context *ctx, const mti_cudnn_key *key) {
    mti_cudnn_plan fresh, *place = NULL;
    mti_cudnn *dnn;
    mt_status status;
    MT_TRY(mti_cudnn_open(ctx, &dnn));
    memset(&fresh, 0, sizeof fresh);
    fresh.key = *key;
    MT_TRY(mti_cudnn_make(ctx, dnn, &fresh));
    status = mti_cudnn_slot(ctx, dnn, &place);
    if (status != MT_SUCCESS) {
        mti_cudnn_forget(&fresh);
        return status;
    }
    fresh.used = ++dnn->clock;
    *place = fresh;
    return MT_SUCCESS;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

/* Whether a view has the type of q, rows at multiples of 16 bytes, and fewer than 2^31 elements from its first to its
   last one. */
static int mti_cudnn_takes_view(const mti_attention *a, mt_tensor t) {
    return t.dtype == a->q.dtype && mti_is_wide(t) && mt_tensor_ld(t) % MTI_VECTOR == 0 &&
           t.rows <= INT32_MAX / mt_tensor_ld(t);
}

/* Whether all heads of q are the same distance apart. In MT_QKV_PER_GROUP those of GQA are not. */
static int mti_cudnn_takes_heads(const mti_attention *a) {
    const mt_attention_desc *s = &a->desc;
    return s->heads_per_group == 1 || s->groups == 1 || a->q_step == s->heads_per_group * s->head_dim;
}

/* Whether cuDNN may compute a call: a forward of queries and keys of the same sequences with a causal mask or none, and
   nothing else that changes a probability. */
static int mti_cudnn_takes(const mti_attention *a, int capability) {
    const mt_attention_desc *s = &a->desc;
    return capability >= 80 && !a->dout.data && (a->q.dtype == MT_BF16 || a->q.dtype == MT_F16) &&
           s->head_dim % MTI_VECTOR == 0 && s->head_dim <= MTI_CUDNN_DIM && s->seq > 1 && s->kv_seq == s->seq &&
           s->scores.scale > 0.0f && s->scores.softcap == 0.0f && s->scores.window == 0 &&
           (s->scores.mask != MT_MASK_CAUSAL || mti_key_of_query(s) == 0) && s->dropout.p == 0.0f && !s->lengths &&
           !s->cu_seqlens && !s->scores.alibi_slopes && !s->bias.value.data && !mt_context_invariant(a->ctx) &&
           mti_cudnn_takes_heads(a) && mti_cudnn_takes_view(a, a->q) && mti_cudnn_takes_view(a, a->k) &&
           mti_cudnn_takes_view(a, a->v) && mti_cudnn_takes_view(a, a->out);
}

static mti_cudnn_key mti_cudnn_key_of(const mti_attention *a) {
    const mt_attention_desc *s = &a->desc;
    mti_cudnn_key key;
    memset(&key, 0, sizeof key);
    key.batch = s->batch, key.seq = s->seq, key.head_dim = s->head_dim;
    key.heads = mti_attention_heads(s), key.groups = s->groups;
    key.q_ld = mt_tensor_ld(a->q), key.k_ld = mt_tensor_ld(a->k), key.v_ld = mt_tensor_ld(a->v);
    key.out_ld = mt_tensor_ld(a->out);
    key.q_step = s->heads_per_group == 1 ? a->q_step : s->head_dim;
    key.kv_step = a->kv_step;
    key.dtype = (int)a->q.dtype;
    key.causal = s->scores.mask == MT_MASK_CAUSAL;
    key.stats = a->lse.data != NULL;
    return key;
}

/* Makes the plan of a call that cuDNN may compute. This loads code on the GPU, which CUDA permits during stream capture
   only in relaxed mode. It takes cuDNN about a second. */
static mt_status mti_cudnn_prepare(const mti_attention *a) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    mti_cudnn_key key = mti_cudnn_key_of(a);
    mt_status status;
    if (mt_context_device(a->ctx) == MT_DEVICE_META || !mti_cudnn_takes(a, mt_context_compute_capability(a->ctx)) ||
        mti_cudnn_known(a->ctx, &key))
        return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(a->ctx));
    MT_CUDA_TRY(a->ctx, cudaThreadExchangeStreamCaptureMode(&mode));
    status = mti_cudnn_add(a->ctx, &key);
    MT_CUDA_TRY(a->ctx, cudaThreadExchangeStreamCaptureMode(&mode));
    return status;
}

/* The row of the table of kernels. A meta context cannot ask cuDNN: it plans the memory of cuDNN's kernels, and the
   other kernels need none in forward. */
static int mti_cudnn_fits(const mti_attention *a, int capability, int built_for, int hopper) {
    (void)built_for, (void)hopper;
    if (!mti_cudnn_takes(a, capability)) return 0;
    if (mt_context_device(a->ctx) == MT_DEVICE_META) return 1;
    mti_cudnn_key key = mti_cudnn_key_of(a);
    const mti_cudnn_plan *p = mti_cudnn_known(a->ctx, &key);
    return p && p->plan;
}

static cudnnStatus_t mti_cudnn_execute(mti_cudnn *dnn, const mti_cudnn_plan *p, const mti_attention *a, void *lse,
                                       void *workspace, cudnnBackendDescriptor_t pack) {
    float scale = a->desc.scores.scale, infinity = -INFINITY;
    int64_t ids[MTI_CUDNN_LSE], count = 0;
    void *data[MTI_CUDNN_LSE], *const all[] = {a->q.data, a->k.data, a->v.data, &scale, &infinity, a->out.data, lse};
    for (int id = MTI_CUDNN_Q; id <= MTI_CUDNN_LSE; id++) {
        if ((id == MTI_CUDNN_INFINITY && !p->key.causal) || (id == MTI_CUDNN_LSE && !p->key.stats)) continue;
        ids[count] = id;
        data[count++] = all[id - MTI_CUDNN_Q];
    }
    MTI_CUDNN_TRY(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids));
    MTI_CUDNN_TRY(
        cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, data));
    MTI_CUDNN_TRY(
        cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace));
    MTI_CUDNN_TRY(cudnnBackendFinalize(pack));
    return cudnnBackendExecute(dnn->handle, p->plan, pack);
}

/* Runs the plan of a call in the context's stream. */
static mt_status mti_cudnn_run(const mti_attention *a, void *lse, void *workspace) {
    mti_cudnn_key key = mti_cudnn_key_of(a);
    mti_cudnn_plan *p = mti_cudnn_known(a->ctx, &key);
    cudnnBackendDescriptor_t pack;
    cudnnStatus_t status;
    mti_cudnn *dnn;
    int waits = 1;
    MT_TRY(mti_cudnn_open(a->ctx, &dnn));
    MT_TRY(mti_lt_may_wait(a->ctx, &waits));
    if (!waits) p->recorded = 1;
    if (dnn->stream != mt_context_stream(a->ctx)) {
        MT_TRY(mti_cudnn_check(a->ctx, cudnnSetStream(dnn->handle, mt_context_stream(a->ctx)), "cudnnSetStream"));
        dnn->stream = mt_context_stream(a->ctx);
    }
    status = cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    MT_TRY(mti_cudnn_check(a->ctx, status, "cudnnBackendCreateDescriptor"));
    status = mti_cudnn_execute(dnn, p, a, lse, workspace, pack);
    cudnnBackendDestroyDescriptor(pack);
    return mti_cudnn_check(a->ctx, status, "cudnnBackendExecute");
}

/* lse [heads, batch * seq] = from, which is [batch, heads, seq]. */
struct mti_cudnn_lse_op {
    mti_view lse, from;
    int64_t heads, seq;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        for (int j = 0; j < n; j++) {
            int64_t b = mt_divide(col + j, seq), i = col + j - b * seq;
            mti_put(lse, row, col + j, mti_get(from, b * heads + row, i));
        }
    }
};

static mt_status mti_cudnn_run_forward(const mti_attention *a) {
    const mt_attention_desc *s = &a->desc;
    int64_t heads = mti_attention_heads(s);
    /* whether lse is something else than [batch, heads, seq] at a multiple of 16 bytes */
    int apart = a->lse.data && (s->batch > 1 || mt_tensor_ld(a->lse) != s->seq || (uintptr_t)a->lse.data % 16 != 0);
    mt_tensor lse = a->lse;
    void *workspace = NULL;
    MT_TRY(mt_arena_alloc(a->ctx, MTI_CUDNN_WORKSPACE, &workspace));
    if (apart) MT_TRY(mt_arena_tensor(a->ctx, MT_F32, s->batch * heads, s->seq, &lse));
    MT_TRY(mt_cuda_enter(a->ctx));
    MT_TRY(mti_cudnn_run(a, lse.data, workspace));
    if (!apart) return MT_SUCCESS;
    mti_cudnn_lse_op op = {mti_view_of(a->lse), mti_view_of(lse), heads, s->seq};
    return mti_map(a->ctx, "mt_attention_forward", op, 0, heads, s->batch * s->seq);
}

} /* extern "C++" */
#endif
