// blaslt.cpp - stand-in for cuBLASLt: the library's own prototypes, executed on the CPU through runtime.h. Test-only.
//
// It computes what cuBLASLt computes (fp32 accumulation, host alpha and beta, the epilogues below) and refuses what
// cuBLASLt refuses. Where it is not known whether cuBLASLt accepts a combination, the stand-in refuses it.
//
//   Types       A and B: f32, bf16 or f16, both the same. C and D: the type of A, or f32; both the same.
//   Compute     CUBLAS_COMPUTE_32F, _32F_PEDANTIC, and for f32 matrices _32F_FAST_TF32 (inputs rounded to 10 bits).
//   Epilogues   DEFAULT, RELU, BIAS, RELU_BIAS, GELU, GELU_BIAS, GELU_AUX, GELU_AUX_BIAS, DGELU, DGELU_BGRAD, BGRADA,
//               BGRADB. All except DEFAULT need four column-major matrices.
//   Algorithms  Four, with different orders of summation, alignments and workspaces. Some have two tiles with equal
//               rounding. The order of the heuristic's results depends on the problem, so a program whose result must
//               not depend on the shape cannot take the first one. Tests set how long each algorithm takes and
//               whether it fails (gemm_time, gemm_fail).
//   Workspace   The first MiB is overwritten with NaN, also when the algorithm needs no workspace.
//
// MTE_BLASLT_LOG=1 in the environment prints why a call was refused. Features that are not modelled are reported.
#include "runtime.h"

#include <cublasLt.h>
#include <cublas_api.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// The header's handle types name these incomplete types.
struct cublasLtContext {
    uint32_t magic;
};

namespace mte {
namespace {

constexpr uint32_t kHandleMagic = 0x6c744831, kLayoutMagic = 0x6c744c31, kDescMagic = 0x6c744431;
constexpr uint32_t kPreferenceMagic = 0x6c745031, kAlgorithmMagic = 0x6c744131;
constexpr size_t kVectorAlignment = 16;     // required alignment of the auxiliary matrix, in bytes
constexpr size_t kWorkspaceAlignment = 256; // required alignment of the workspace, in bytes
constexpr int kBatchLimit = 65535;

cublasStatus_t refuse(cublasStatus_t status, const char *why) {
    static const bool log = getenv("MTE_BLASLT_LOG") != nullptr;
    if (log) fprintf(stderr, "cublasLt stand-in: %s: %s\n", cublasLtGetStatusName(status), why);
    return status;
}

cublasStatus_t invalid(const char *why) { return refuse(CUBLAS_STATUS_INVALID_VALUE, why); }
cublasStatus_t unsupported(const char *why) { return refuse(CUBLAS_STATUS_NOT_SUPPORTED, why); }

// ---- elements -------------------------------------------------------------------------------------------------------

bool known_type(cudaDataType_t type) { return type == CUDA_R_32F || type == CUDA_R_16BF || type == CUDA_R_16F; }

size_t element_size(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

float load(const void *base, cudaDataType_t type, int64_t at) {
    if (type == CUDA_R_32F) return static_cast<const float *>(base)[at];
    if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16 *>(base)[at]);
    return __half2float(static_cast<const __half *>(base)[at]);
}

void store(void *base, cudaDataType_t type, int64_t at, float value) {
    if (type == CUDA_R_32F) static_cast<float *>(base)[at] = value;
    else if (type == CUDA_R_16BF) static_cast<__nv_bfloat16 *>(base)[at] = __float2bfloat16(value);
    else static_cast<__half *>(base)[at] = __float2half(value);
}

// TF32 keeps 10 bits of the mantissa; the conversion rounds to nearest, ties away from zero.
float to_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7f800000u) == 0x7f800000u) return value;
    bits = (bits + 0x1000u) & ~0x1fffu;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

// ---- descriptors and their attributes -------------------------------------------------------------------------------
// They are stored in the library's own opaque structs, which a caller may also allocate (cublasLtMatmulDescInit).

struct Layout {
    uint32_t magic;
    cudaDataType_t type;
    int32_t order;
    int32_t batch;
    uint64_t rows, cols;
    int64_t ld, stride;
};
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "");

struct Desc {
    uint32_t magic;
    int32_t compute, scale, pointer_mode, trans_a, trans_b, trans_c, fill;
    uint32_t epilogue;
    int32_t sm_count, aux_type, bias_type;
    void *bias, *aux;
    int64_t bias_stride, aux_ld, aux_stride;
};
static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t), "");

struct Preference {
    uint32_t magic, search, reductions, align_a, align_b, align_c, align_d;
    float waves;
    uint64_t workspace, implementations;
};
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "");

constexpr size_t kNotModelled = SIZE_MAX;

struct Field {
    int attribute;
    size_t offset, size;
};

#define FIELD(attribute, type, member)                                                                                 \
    { attribute, offsetof(type, member), sizeof(type::member) }

const Field layout_fields[] = {
    FIELD(CUBLASLT_MATRIX_LAYOUT_TYPE, Layout, type),
    FIELD(CUBLASLT_MATRIX_LAYOUT_ORDER, Layout, order),
    FIELD(CUBLASLT_MATRIX_LAYOUT_ROWS, Layout, rows),
    FIELD(CUBLASLT_MATRIX_LAYOUT_COLS, Layout, cols),
    FIELD(CUBLASLT_MATRIX_LAYOUT_LD, Layout, ld),
    FIELD(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, Layout, batch),
    FIELD(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, Layout, stride),
    {CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, kNotModelled, 8},
    {CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, kNotModelled, 4},
};

const Field desc_fields[] = {
    FIELD(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, Desc, compute),
    FIELD(CUBLASLT_MATMUL_DESC_SCALE_TYPE, Desc, scale),
    FIELD(CUBLASLT_MATMUL_DESC_POINTER_MODE, Desc, pointer_mode),
    FIELD(CUBLASLT_MATMUL_DESC_TRANSA, Desc, trans_a),
    FIELD(CUBLASLT_MATMUL_DESC_TRANSB, Desc, trans_b),
    FIELD(CUBLASLT_MATMUL_DESC_TRANSC, Desc, trans_c),
    FIELD(CUBLASLT_MATMUL_DESC_FILL_MODE, Desc, fill),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE, Desc, epilogue),
    FIELD(CUBLASLT_MATMUL_DESC_BIAS_POINTER, Desc, bias),
    FIELD(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, Desc, bias_stride),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, Desc, aux),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, Desc, aux_ld),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, Desc, aux_stride),
    FIELD(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, Desc, sm_count),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, Desc, aux_type),
    FIELD(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, Desc, bias_type),
    {CUBLASLT_MATMUL_DESC_ALPHA_VECTOR_BATCH_STRIDE, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_AMAX_POINTER, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_FAST_ACCUM, kNotModelled, 1},
    {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, kNotModelled, 4},
    {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, kNotModelled, 4},
    {CUBLASLT_MATMUL_DESC_C_SCALE_MODE, kNotModelled, 4},
    {CUBLASLT_MATMUL_DESC_D_SCALE_MODE, kNotModelled, 4},
    {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_MODE, kNotModelled, 4},
    {CUBLASLT_MATMUL_DESC_D_OUT_SCALE_POINTER, kNotModelled, 8},
    {CUBLASLT_MATMUL_DESC_D_OUT_SCALE_MODE, kNotModelled, 4},
    {CUBLASLT_MATMUL_DESC_EMULATION_DESCRIPTOR, kNotModelled, 8},
};

const Field preference_fields[] = {
    FIELD(CUBLASLT_MATMUL_PREF_SEARCH_MODE, Preference, search),
    FIELD(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Preference, workspace),
    FIELD(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, Preference, reductions),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Preference, align_a),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Preference, align_b),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Preference, align_c),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Preference, align_d),
    FIELD(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, Preference, waves),
    FIELD(CUBLASLT_MATMUL_PREF_IMPL_MASK, Preference, implementations),
};

template <size_t N> const Field *find(const Field (&fields)[N], int attribute) {
    for (const Field &field : fields)
        if (field.attribute == attribute) return &field;
    return nullptr;
}

// Attributes that are not modelled accept only 0, their default value.
cublasStatus_t set_unmodelled(const Field &field, const void *value, const char *object) {
    const unsigned char *bytes = static_cast<const unsigned char *>(value);
    if (std::all_of(bytes, bytes + field.size, [](unsigned char b) { return b == 0; })) return CUBLAS_STATUS_SUCCESS;
    report("cublasLt: %s attribute %d is not modelled", object, field.attribute);
    return unsupported("attribute not modelled");
}

// As in the library, setting an attribute checks only its name and size. Values are checked when they are used.
cublasStatus_t set_field(void *object, const Field *field, const void *value, size_t size, const char *name) {
    if (!object) return invalid("null descriptor");
    if (!field) return invalid("unknown attribute");
    if (!value || size != field->size) return invalid("null value or wrong size of an attribute");
    if (field->offset == kNotModelled) return set_unmodelled(*field, value, name);
    memcpy(static_cast<char *>(object) + field->offset, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t get_field(const void *object, const Field *field, void *value, size_t size, size_t *written) {
    if (!object || !field) return invalid("null descriptor or unknown attribute");
    if (size == 0 && !written) return invalid("neither a buffer nor a place for the size");
    if (size != 0 && (!value || size != field->size)) return invalid("null value or wrong size of an attribute");
    if (written) *written = field->size;
    if (size == 0) return CUBLAS_STATUS_SUCCESS;
    if (field->offset == kNotModelled) memset(value, 0, size);
    else memcpy(value, static_cast<const char *>(object) + field->offset, size);
    return CUBLAS_STATUS_SUCCESS;
}

template <class T> T *view(void *opaque, uint32_t magic) {
    T *object = static_cast<T *>(opaque);
    return object && object->magic == magic ? object : nullptr;
}

template <class Opaque, class T> cublasStatus_t place(Opaque *where, size_t size, const T &value) {
    if (!where) return invalid("null descriptor");
    if (size < sizeof(Opaque)) return refuse(CUBLAS_STATUS_ALLOC_FAILED, "too little space for a descriptor");
    memset(static_cast<void *>(where), 0, sizeof *where);
    memcpy(static_cast<void *>(where), &value, sizeof value);
    return CUBLAS_STATUS_SUCCESS;
}

template <class Opaque, class T> cublasStatus_t create(const char *function, Opaque **out, const T &value) {
    if (!out) return invalid("null place for a descriptor");
    if (call_fails(function)) return CUBLAS_STATUS_ALLOC_FAILED;
    *out = new Opaque();
    return place(*out, sizeof **out, value);
}

// Destroying NULL succeeds, as in the library. Destroying twice, or something that is no descriptor, is reported.
template <class T, class Opaque> cublasStatus_t destroy(Opaque *object, uint32_t magic, const char *what) {
    if (!object) return CUBLAS_STATUS_SUCCESS;
    T *real = view<T>(object, magic);
    if (!real) {
        report("cublasLt: destroying %p, which is no %s", static_cast<void *>(object), what);
        return invalid("not a descriptor");
    }
    real->magic = 0;
    delete object;
    return CUBLAS_STATUS_SUCCESS;
}

Layout new_layout(cudaDataType_t type, uint64_t rows, uint64_t cols, int64_t ld) {
    return Layout{kLayoutMagic, type, CUBLASLT_ORDER_COL, 1, rows, cols, ld, 0};
}

Desc new_desc(cublasComputeType_t compute, cudaDataType_t scale) {
    Desc desc = {};
    desc.magic = kDescMagic;
    desc.compute = compute;
    desc.scale = scale;
    desc.fill = CUBLAS_FILL_MODE_FULL;
    desc.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    desc.aux_type = -1;
    desc.bias_type = -1;
    return desc;
}

Preference new_preference() {
    Preference preference = {};
    preference.magic = kPreferenceMagic;
    preference.reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    preference.align_a = preference.align_b = preference.align_c = preference.align_d = 256;
    preference.implementations = UINT64_MAX;
    return preference;
}

// ---- the problem, and whether it is supported -----------------------------------------------------------------------

struct Epilogue {
    bool known = true, bias = false, relu = false, gelu = false, write_aux = false, dgelu = false;
    bool sum_d = false, sum_a = false, sum_b = false;

    bool plain() const { return !bias && !relu && !gelu && !dgelu && !sums(); }
    bool sums() const { return sum_d || sum_a || sum_b; }
    bool uses_bias() const { return bias || sums(); }
    bool uses_aux() const { return write_aux || dgelu; }
};

// Translates the value of the epilogue attribute.
Epilogue decode(uint32_t value) {
    Epilogue e;
    switch (value) {
    case CUBLASLT_EPILOGUE_DEFAULT: break;
    case CUBLASLT_EPILOGUE_RELU: e.relu = true; break;
    case CUBLASLT_EPILOGUE_BIAS: e.bias = true; break;
    case CUBLASLT_EPILOGUE_RELU_BIAS: e.bias = e.relu = true; break;
    case CUBLASLT_EPILOGUE_GELU: e.gelu = true; break;
    case CUBLASLT_EPILOGUE_GELU_BIAS: e.gelu = e.bias = true; break;
    case CUBLASLT_EPILOGUE_GELU_AUX: e.gelu = e.write_aux = true; break;
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS: e.gelu = e.write_aux = e.bias = true; break;
    case CUBLASLT_EPILOGUE_DGELU: e.dgelu = true; break;
    case CUBLASLT_EPILOGUE_DGELU_BGRAD: e.dgelu = e.sum_d = true; break;
    case CUBLASLT_EPILOGUE_BGRADA: e.sum_a = true; break;
    case CUBLASLT_EPILOGUE_BGRADB: e.sum_b = true; break;
    default: e.known = false;
    }
    return e;
}

struct Problem {
    Desc desc;
    Layout a, b, c, d;
    Epilogue epilogue;
    uint64_t m, n, k;

    cudaDataType_t bias_type() const {
        return desc.bias_type == -1 ? d.type : static_cast<cudaDataType_t>(desc.bias_type);
    }
    cudaDataType_t aux_type() const {
        return desc.aux_type == -1 ? d.type : static_cast<cudaDataType_t>(desc.aux_type);
    }
    int64_t bias_length() const { return static_cast<int64_t>(epilogue.sum_b ? n : m); }
};

int64_t vector_length(const Layout &l) { return static_cast<int64_t>(l.order == CUBLASLT_ORDER_COL ? l.rows : l.cols); }
int64_t vector_count(const Layout &l) { return static_cast<int64_t>(l.order == CUBLASLT_ORDER_COL ? l.cols : l.rows); }
int64_t span(const Layout &l) { return (vector_count(l) - 1) * l.ld + vector_length(l); }

int64_t index_of(const Layout &l, uint64_t row, uint64_t col) {
    const uint64_t vector = l.order == CUBLASLT_ORDER_COL ? col : row,
                   inside = l.order == CUBLASLT_ORDER_COL ? row : col;
    return static_cast<int64_t>(vector) * l.ld + static_cast<int64_t>(inside);
}

cublasStatus_t check_layout(const Layout &l) {
    if (!known_type(l.type)) return unsupported("matrix type not modelled");
    if (l.order != CUBLASLT_ORDER_COL && l.order != CUBLASLT_ORDER_ROW) return unsupported("matrix order not modelled");
    if (l.rows == 0 || l.cols == 0) return invalid("an empty matrix");
    if (l.rows > INT_MAX || l.cols > INT_MAX) return unsupported("more than INT_MAX rows or columns");
    if (l.ld < vector_length(l)) return invalid("leading dimension shorter than a column (or row)");
    if (l.batch < 1 || l.batch > kBatchLimit) return invalid("batch count out of range");
    if (l.stride < 0) return invalid("negative batch stride");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_shapes(const Problem &p) {
    const bool ta = p.desc.trans_a == CUBLAS_OP_T, tb = p.desc.trans_b == CUBLAS_OP_T;
    const uint64_t rows_b = tb ? p.b.cols : p.b.rows, cols_b = tb ? p.b.rows : p.b.cols;
    if ((ta ? p.a.cols : p.a.rows) != p.d.rows) return invalid("rows of op(A) are not the rows of D");
    if (cols_b != p.d.cols) return invalid("columns of op(B) are not the columns of D");
    if (p.k != rows_b) return invalid("columns of op(A) are not the rows of op(B)");
    if (p.c.rows != p.d.rows || p.c.cols != p.d.cols) return invalid("C is not of the shape of D");
    if (p.a.batch != p.d.batch || p.b.batch != p.d.batch || p.c.batch != p.d.batch)
        return invalid("batch counts differ");
    if (p.d.batch > 1 && p.d.stride < span(p.d)) return invalid("matrices of the batch overlap in D");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_types(const Problem &p) {
    if (p.a.type != p.b.type) return unsupported("A and B of different types");
    if (p.c.type != p.d.type) return unsupported("C and D of different types");
    if (p.d.type != p.a.type && p.d.type != CUDA_R_32F) return unsupported("this type of D for this type of A");
    if (p.c.order != p.d.order) return unsupported("C and D in different orders");
    if (p.desc.scale != CUDA_R_32F) return unsupported("scale type not CUDA_R_32F");
    switch (p.desc.compute) {
    case CUBLAS_COMPUTE_32F:
    case CUBLAS_COMPUTE_32F_PEDANTIC: return CUBLAS_STATUS_SUCCESS;
    case CUBLAS_COMPUTE_32F_FAST_TF32:
        return p.a.type == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : unsupported("TF32 of 16-bit matrices");
    default: return unsupported("compute type not modelled");
    }
}

bool any_row_order(const Problem &p) {
    return p.a.order == CUBLASLT_ORDER_ROW || p.b.order == CUBLASLT_ORDER_ROW || p.d.order == CUBLASLT_ORDER_ROW;
}

cublasStatus_t check_aux(const Problem &p) {
    if (p.aux_type() != p.d.type) return unsupported("auxiliary type is not the type of D");
    if (p.desc.aux_ld < static_cast<int64_t>(p.m)) return invalid("auxiliary leading dimension shorter than a column");
    if (p.desc.aux_ld % 8 != 0) return unsupported("auxiliary leading dimension not a multiple of 8");
    if (reinterpret_cast<uintptr_t>(p.desc.aux) % kVectorAlignment != 0)
        return unsupported("auxiliary pointer misaligned");
    if (p.d.batch == 1) return CUBLAS_STATUS_SUCCESS;
    if (p.desc.aux_stride % 8 != 0) return unsupported("auxiliary batch stride not a multiple of 8");
    if (p.desc.aux_stride < p.desc.aux_ld * static_cast<int64_t>(p.n)) return invalid("auxiliary matrices overlap");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_epilogue(const Problem &p) {
    const Epilogue &e = p.epilogue;
    if (!e.known) return unsupported("epilogue not modelled");
    if (e.plain()) return CUBLAS_STATUS_SUCCESS;
    // cuBLASLt is known to refuse BIAS and RELU_BIAS here; the stand-in refuses every epilogue.
    if (any_row_order(p)) return unsupported("an epilogue on a row-major matrix");
    if (e.uses_bias() && p.bias_type() != p.d.type) return unsupported("bias type is not the type of D");
    if (e.uses_bias() && reinterpret_cast<uintptr_t>(p.desc.bias) % element_size(p.d.type) != 0)
        return invalid("bias pointer not a multiple of its element size");
    if (e.bias && p.d.batch > 1 && p.desc.bias_stride != 0 && p.desc.bias_stride < p.bias_length())
        return invalid("bias vectors of the batch overlap");
    if (e.sums() && p.d.batch > 1) return unsupported("bias gradient of a batch");
    // BGRADA and BGRADB sum along k. Only forms in which k is the slow dimension in memory are known to be in use.
    if (e.sum_a && p.desc.trans_a != CUBLAS_OP_N) return unsupported("BGRADA with a transposed A");
    if (e.sum_b && p.desc.trans_b != CUBLAS_OP_T) return unsupported("BGRADB without a transposed B");
    return e.uses_aux() ? check_aux(p) : CUBLAS_STATUS_SUCCESS;
}

bool known_operation(int32_t operation) { return operation == CUBLAS_OP_N || operation == CUBLAS_OP_T; }

cublasStatus_t check_desc(const Desc &desc) {
    if (!known_operation(desc.trans_a) || !known_operation(desc.trans_b)) return unsupported("operation not N or T");
    if (desc.trans_c != CUBLAS_OP_N) return unsupported("a transposed C");
    if (desc.fill != CUBLAS_FILL_MODE_FULL) return unsupported("fill mode not FULL");
    if (desc.pointer_mode != CUBLASLT_POINTER_MODE_HOST) return unsupported("pointer mode not HOST");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_problem(const Problem &p) {
    const Layout *layouts[] = {&p.a, &p.b, &p.c, &p.d};
    cublasStatus_t status = check_desc(p.desc);
    for (const Layout *layout : layouts)
        if (status == CUBLAS_STATUS_SUCCESS) status = check_layout(*layout);
    if (status == CUBLAS_STATUS_SUCCESS) status = check_shapes(p);
    if (status == CUBLAS_STATUS_SUCCESS) status = check_types(p);
    return status == CUBLAS_STATUS_SUCCESS ? check_epilogue(p) : status;
}

cublasStatus_t describe(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                        cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, Problem *out) {
    if (!handle || handle->magic != kHandleMagic) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle");
    const Desc *description = view<Desc>(desc, kDescMagic);
    const Layout *la = view<Layout>(a, kLayoutMagic), *lb = view<Layout>(b, kLayoutMagic);
    const Layout *lc = view<Layout>(c, kLayoutMagic), *ld = view<Layout>(d, kLayoutMagic);
    if (!description || !la || !lb || !lc || !ld) return invalid("a null or destroyed descriptor");
    *out = Problem{*description, *la, *lb, *lc, *ld, decode(description->epilogue), ld->rows, ld->cols, 0};
    out->k = description->trans_a == CUBLAS_OP_T ? la->rows : la->cols;
    return check_problem(*out);
}

// ---- algorithms -----------------------------------------------------------------------------------------------------

enum { kForward, kInterleaved, kSplit, kBackward, kAlgorithms };

constexpr uint64_t kFma = CUBLASLT_NUMERICAL_IMPL_FLAGS_FMA, kHmma = CUBLASLT_NUMERICAL_IMPL_FLAGS_HMMA;

struct Traits {
    size_t alignment; // of pointers, leading dimensions and batch strides, in bytes; at least the size of an element
    uint64_t implementation;
};

const Traits traits[kAlgorithms] = {{1, kFma}, {16, kHmma}, {16, kHmma}, {8, kFma}};

// The content of a cublasLtMatmulAlgo_t: plain data, valid for every problem of the same types.
struct Algorithm {
    uint32_t magic;
    int32_t id, splits;
    uint32_t reduction, tile, stages, swizzle, custom;
    uint64_t types;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t), "");

uint64_t types_of(int compute, int scale, int a, int b, int c, int d) {
    uint64_t key = 0;
    for (int value : {compute, scale, a, b, c, d}) key = key * 1021 + static_cast<uint64_t>(value);
    return key;
}

uint64_t types_of(const Problem &p) {
    return types_of(p.desc.compute, p.desc.scale, p.a.type, p.b.type, p.c.type, p.d.type);
}

Algorithm new_algorithm(int id, int splits, uint32_t tile, uint64_t types) {
    const uint32_t reduction = splits > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    return Algorithm{kAlgorithmMagic, id, splits, reduction, tile, 0, 0, 0, types};
}

cublasLtMatmulAlgo_t pack(const Algorithm &algorithm) {
    cublasLtMatmulAlgo_t plain;
    memset(&plain, 0, sizeof plain);
    memcpy(&plain, &algorithm, sizeof algorithm);
    return plain;
}

bool unpack(const cublasLtMatmulAlgo_t *plain, Algorithm *out) {
    if (!plain) return false;
    memcpy(out, plain, sizeof *out);
    return out->magic == kAlgorithmMagic && out->id >= 0 && out->id < kAlgorithms;
}

size_t workspace_of(const Problem &p, const Algorithm &algorithm) {
    if (algorithm.id == kBackward) return 4096;
    if (algorithm.id != kSplit) return 0;
    const size_t partial = p.m * p.n * sizeof(float) * static_cast<size_t>(p.d.batch);
    return (static_cast<size_t>(algorithm.splits) * partial + 255) / 256 * 256;
}

cublasStatus_t check_algorithm(const Problem &p, const Algorithm &algorithm) {
    if (algorithm.types != types_of(p)) return invalid("the algorithm was chosen for other types");
    if (algorithm.id == kSplit) {
        if (algorithm.splits < 2 || static_cast<uint64_t>(algorithm.splits) > p.k)
            return unsupported("number of splits of k");
        if (algorithm.reduction != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) return unsupported("reduction scheme");
        return CUBLAS_STATUS_SUCCESS;
    }
    if (algorithm.splits != 1 || algorithm.reduction != CUBLASLT_REDUCTION_SCHEME_NONE)
        return unsupported("an algorithm that does not split k");
    return CUBLAS_STATUS_SUCCESS;
}

struct Alignments {
    size_t a, b, c, d, bias;
};

size_t alignment_of(const void *p) {
    return p ? reinterpret_cast<uintptr_t>(p) & -reinterpret_cast<uintptr_t>(p) : 256;
}

bool fits(const Layout &l, size_t pointer_alignment, size_t need) {
    const size_t size = element_size(l.type);
    if (need < size) need = size;
    if (pointer_alignment % need != 0) return false;
    if (vector_count(l) > 1 && static_cast<size_t>(l.ld) * size % need != 0) return false;
    return l.batch == 1 || static_cast<size_t>(l.stride) * size % need == 0;
}

bool aligned_for(const Problem &p, const Algorithm &algorithm, const Alignments &have) {
    const size_t need = traits[algorithm.id].alignment;
    if (!fits(p.a, have.a, need) || !fits(p.b, have.b, need)) return false;
    if (!fits(p.c, have.c, need) || !fits(p.d, have.d, need)) return false;
    return !p.epilogue.uses_bias() || have.bias % std::max(need, element_size(p.d.type)) == 0;
}

uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

// Stands for the estimated time. It depends on all properties of the problem.
uint64_t cost(const Problem &p, const Algorithm &algorithm) {
    uint64_t hash = mix(types_of(p), p.desc.epilogue);
    for (uint64_t fact : {p.m, p.n, p.k, static_cast<uint64_t>(p.d.batch), static_cast<uint64_t>(p.desc.trans_a)})
        hash = mix(hash, fact);
    hash = mix(hash, static_cast<uint64_t>(p.desc.trans_b));
    if (p.desc.sm_count) hash = mix(hash, static_cast<uint64_t>(p.desc.sm_count));
    return mix(hash, static_cast<uint64_t>(algorithm.id * 64 + algorithm.splits) * 8 + algorithm.tile);
}

// Returns the algorithms that a problem and a preference allow, in the order of their cost.
std::vector<Algorithm> candidates(const Problem &p, const Preference &preference) {
    const uint64_t types = types_of(p);
    const Alignments have = {preference.align_a, preference.align_b, preference.align_c, preference.align_d,
                             alignment_of(p.desc.bias)};
    std::vector<Algorithm> found;
    const int forms[][3] = {{kForward, 1, 0}, {kForward, 1, 1}, {kInterleaved, 1, 0}, {kInterleaved, 1, 1},
                            {kSplit, 2, 0},   {kSplit, 2, 1},   {kSplit, 4, 0},       {kBackward, 1, 0}};
    for (const int *form : forms) {
        const Algorithm algorithm = new_algorithm(form[0], form[1], static_cast<uint32_t>(form[2]), types);
        if (static_cast<uint64_t>(algorithm.splits) > p.k || !aligned_for(p, algorithm, have)) continue;
        if (workspace_of(p, algorithm) > preference.workspace) continue;
        if ((algorithm.reduction & ~preference.reductions) != 0) continue;
        if ((traits[algorithm.id].implementation & preference.implementations) == 0) continue;
        found.push_back(algorithm);
    }
    std::sort(found.begin(), found.end(),
              [&](const Algorithm &x, const Algorithm &y) { return cost(p, x) < cost(p, y); });
    return found;
}

cublasLtMatmulHeuristicResult_t result_of(const Problem &p, const Algorithm &algorithm) {
    cublasLtMatmulHeuristicResult_t result;
    memset(&result, 0, sizeof result);
    result.algo = pack(algorithm);
    result.workspaceSize = workspace_of(p, algorithm);
    result.state = CUBLAS_STATUS_SUCCESS;
    result.wavesCount = 1.0f;
    return result;
}

// The inner product of length k: one function for each order of summation. dot() selects by algorithm.
float dot_range(const float *x, const float *y, size_t begin, size_t end) {
    float sum = 0.0f;
    for (size_t i = begin; i < end; i++) sum += x[i] * y[i];
    return sum;
}

float dot_interleaved(const float *x, const float *y, size_t k) {
    float lanes[8] = {0.0f};
    size_t i = 0;
    for (; i + 8 <= k; i += 8)
        for (int lane = 0; lane < 8; lane++) lanes[lane] += x[i + lane] * y[i + lane];
    for (int lane = 0; i < k; i++, lane++) lanes[lane] += x[i] * y[i];
    const float low = (lanes[0] + lanes[4]) + (lanes[2] + lanes[6]);
    return low + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

float dot_split(const float *x, const float *y, size_t k, size_t splits) {
    const size_t part = (k + splits - 1) / splits;
    float sum = 0.0f;
    for (size_t s = splits; s-- > 0;) sum += dot_range(x, y, std::min(k, s * part), std::min(k, (s + 1) * part));
    return sum;
}

float dot_backward(const float *x, const float *y, size_t k) {
    float sum = 0.0f;
    for (size_t block = (k + 31) / 32; block-- > 0;) sum += dot_range(x, y, block * 32, std::min(k, (block + 1) * 32));
    return sum;
}

float dot(const Algorithm &algorithm, const float *x, const float *y, size_t k) {
    switch (algorithm.id) {
    case kInterleaved: return dot_interleaved(x, y, k);
    case kSplit: return dot_split(x, y, k, static_cast<size_t>(algorithm.splits));
    case kBackward: return dot_backward(x, y, k);
    default: return dot_range(x, y, 0, k);
    }
}

// ---- execution ------------------------------------------------------------------------------------------------------

struct Run {
    Problem p;
    Algorithm algorithm;
    float alpha, beta;
    const void *a, *b, *c;
    void *d, *workspace;
    size_t workspace_bytes;
};

// The part of the workspace that is written. The library may write all of it; the first MiB is enough for the checker
// to find two products that share a workspace.
size_t touched(const Run &r) { return std::min(r.workspace_bytes, static_cast<size_t>(1) << 20); }

Layout aux_layout(const Problem &p) {
    Layout layout = new_layout(p.aux_type(), p.m, p.n, p.desc.aux_ld);
    layout.batch = p.d.batch;
    layout.stride = p.desc.aux_stride;
    return layout;
}

Layout bias_layout(const Problem &p) {
    Layout layout = new_layout(p.bias_type(), static_cast<uint64_t>(p.bias_length()), 1, p.bias_length());
    layout.batch = p.desc.bias_stride == 0 ? 1 : p.d.batch;
    layout.stride = p.desc.bias_stride;
    return layout;
}

// Tells the checker which elements are accessed. The gaps between columns (ld > rows) are left out: other data may lie
// there.
bool announce(const Layout &l, const void *base, bool write, const char *what) {
    const size_t size = element_size(l.type);
    const size_t total = static_cast<size_t>((l.batch - 1) * l.stride + span(l)) * size;
    const int before = errors();
    check_global(base, total, static_cast<int>(size), what);
    if (!device_valid(base, total)) {
        if (errors() == before) report("%s: %p is not device memory", what, base);
        return false;
    }
    const bool dense = l.ld == vector_length(l);
    const int64_t pieces = dense ? 1 : vector_count(l);
    const size_t bytes = static_cast<size_t>(dense ? span(l) : vector_length(l)) * size;
    for (int64_t z = 0; z < (l.stride == 0 ? 1 : l.batch); z++)
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t offset = z * l.stride + piece * l.ld;
            access_range(static_cast<const char *>(base) + static_cast<size_t>(offset) * size, bytes, write);
        }
    return true;
}

// Tells the checker which memory a product reads and writes. Returns false if part of it is invalid.
bool announce_all(const Run &r) {
    const Epilogue &e = r.p.epilogue;
    bool good = announce(r.p.a, r.a, false, "cublasLtMatmul A");
    good = announce(r.p.b, r.b, false, "cublasLtMatmul B") && good;
    if (r.beta != 0.0f) good = announce(r.p.c, r.c, false, "cublasLtMatmul C") && good;
    if (e.bias) good = announce(bias_layout(r.p), r.p.desc.bias, false, "cublasLtMatmul bias") && good;
    if (e.dgelu) good = announce(aux_layout(r.p), r.p.desc.aux, false, "cublasLtMatmul auxiliary input") && good;
    if (e.write_aux) good = announce(aux_layout(r.p), r.p.desc.aux, true, "cublasLtMatmul auxiliary output") && good;
    if (e.sums()) good = announce(bias_layout(r.p), r.p.desc.bias, true, "cublasLtMatmul bias gradient") && good;
    good = announce(r.p.d, r.d, true, "cublasLtMatmul D") && good;
    if (r.workspace_bytes == 0) return good;
    check_global(r.workspace, r.workspace_bytes, kWorkspaceAlignment, "cublasLtMatmul workspace");
    if (!device_valid(r.workspace, r.workspace_bytes)) return false;
    access_range(r.workspace, touched(r), true);
    return good;
}

// Packs op(A) as rows of k floats, or op(B) as columns of k floats. k_is_row: k counts the rows of the stored matrix.
std::vector<float> gather(const Problem &p, const Layout &l, const void *base, int batch, bool k_is_row) {
    const uint64_t outer = k_is_row ? l.cols : l.rows;
    std::vector<float> packed(outer * p.k);
    for (uint64_t i = 0; i < outer; i++)
        for (uint64_t q = 0; q < p.k; q++) {
            const int64_t at = batch * l.stride + (k_is_row ? index_of(l, q, i) : index_of(l, i, q));
            const float value = load(base, l.type, at);
            packed[i * p.k + q] = p.desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? to_tf32(value) : value;
        }
    return packed;
}

constexpr float kGeluScale = 0.7978845608028654f, kGeluCubic = 0.044715f;

float gelu(float x) { return 0.5f * x * (1.0f + tanhf(kGeluScale * (x + kGeluCubic * x * x * x))); }

float gelu_slope(float x) {
    const float t = tanhf(kGeluScale * (x + kGeluCubic * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kGeluScale * (1.0f + 3.0f * kGeluCubic * x * x);
}

// Computes one element of D from its inner product. Returns the value before it is rounded to the type of D.
float finish(const Run &r, int batch, uint64_t row, uint64_t col, float product) {
    const Problem &p = r.p;
    const Epilogue &e = p.epilogue;
    float x = r.alpha * product;
    if (r.beta != 0.0f) x += r.beta * load(r.c, p.c.type, batch * p.c.stride + index_of(p.c, row, col));
    if (e.bias) x += load(p.desc.bias, p.bias_type(), batch * p.desc.bias_stride + static_cast<int64_t>(row));
    const int64_t aux_at =
        batch * p.desc.aux_stride + static_cast<int64_t>(col) * p.desc.aux_ld + static_cast<int64_t>(row);
    if (e.write_aux) store(p.desc.aux, p.aux_type(), aux_at, x);
    if (e.relu) x = x > 0.0f ? x : 0.0f;
    if (e.gelu) x = gelu(x);
    if (e.dgelu) x *= gelu_slope(load(p.desc.aux, p.aux_type(), aux_at));
    store(r.d, p.d.type, batch * p.d.stride + index_of(p.d, row, col), x);
    return x;
}

// Stores a bias gradient: the sum of an operand over k.
void store_sums(const Run &r, const std::vector<float> &operand) {
    const std::vector<float> ones(r.p.k, 1.0f);
    for (int64_t i = 0; i < r.p.bias_length(); i++) {
        const float sum = dot(r.algorithm, &operand[static_cast<size_t>(i) * r.p.k], ones.data(), r.p.k);
        store(r.p.desc.bias, r.p.bias_type(), i, sum);
    }
}

// Computes one product of the batch, including its epilogue.
void multiply(const Run &r, int batch) {
    const Problem &p = r.p;
    const std::vector<float> a = gather(p, p.a, r.a, batch, p.desc.trans_a == CUBLAS_OP_T);
    const std::vector<float> b = gather(p, p.b, r.b, batch, p.desc.trans_b == CUBLAS_OP_N);
    std::vector<float> row_sums(p.epilogue.sum_d ? p.m : 0);
    for (uint64_t col = 0; col < p.n; col++)
        for (uint64_t row = 0; row < p.m; row++) {
            const float x = finish(r, batch, row, col, dot(r.algorithm, &a[row * p.k], &b[col * p.k], p.k));
            if (p.epilogue.sum_d) row_sums[row] += x;
        }
    for (size_t row = 0; row < row_sums.size(); row++)
        store(p.desc.bias, p.bias_type(), static_cast<int64_t>(row), row_sums[row]);
    if (p.epilogue.sum_a) store_sums(r, a);
    if (p.epilogue.sum_b) store_sums(r, b);
}

// What tests can query about the products that ran, and the functions that they set.
std::function<double(const GemmCall &)> time_of_gemm;
std::function<bool(const GemmCall &)> gemm_fails;
struct Refusal {
    int status;
    bool by_heuristic;
} refusal = {CUBLAS_STATUS_SUCCESS, false};
GemmCall last_gemm = {-1, 0, 0, 0};
long gemms = 0, choices = 0;

bool refused(const Problem &p, bool by_heuristic) {
    return refusal.status != CUBLAS_STATUS_SUCCESS && refusal.by_heuristic == by_heuristic &&
           p.desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT;
}

GemmCall call_of(const Run &r) {
    return GemmCall{r.algorithm.id, r.algorithm.splits, static_cast<int>(r.algorithm.tile), r.p.desc.epilogue,
                    r.p.desc.sm_count};
}

void execute(const Run &r) {
    if (!announce_all(r)) return;
    last_gemm = call_of(r);
    gemms++;
    if (time_of_gemm) spend(time_of_gemm(last_gemm));
    if (r.workspace_bytes > 0) memset(r.workspace, 0xff, touched(r));
    for (int batch = 0; batch < r.p.d.batch; batch++) multiply(r, batch);
}

bool overlap(const Layout &l, const void *base, const Layout &other, const void *other_base) {
    const uintptr_t p = reinterpret_cast<uintptr_t>(base), q = reinterpret_cast<uintptr_t>(other_base);
    const size_t bytes = static_cast<size_t>((l.batch - 1) * l.stride + span(l)) * element_size(l.type);
    const size_t other_bytes =
        static_cast<size_t>((other.batch - 1) * other.stride + span(other)) * element_size(other.type);
    return p < q + other_bytes && q < p + bytes;
}

// C may be the same matrix as D, with the same layout. Any other overlap with D is an error.
cublasStatus_t check_aliases(const Run &r) {
    if (overlap(r.p.d, r.d, r.p.a, r.a) || overlap(r.p.d, r.d, r.p.b, r.b)) {
        report("cublasLtMatmul: D overlaps A or B");
        return invalid("D overlaps A or B");
    }
    if (r.beta == 0.0f || !overlap(r.p.d, r.d, r.p.c, r.c)) return CUBLAS_STATUS_SUCCESS;
    if (r.c == r.d && r.p.c.ld == r.p.d.ld && (r.p.d.batch == 1 || r.p.c.stride == r.p.d.stride))
        return CUBLAS_STATUS_SUCCESS;
    report("cublasLtMatmul: C overlaps D without being D");
    return invalid("C overlaps D without being D");
}

// Checks what is known only at the call: pointers, their alignment, the workspace and overlaps.
cublasStatus_t check_pointers(const Run &r) {
    const Epilogue &e = r.p.epilogue;
    if (!r.a || !r.b || !r.d) return invalid("a null matrix");
    if (!r.c && r.beta != 0.0f) return invalid("a null C with beta not 0");
    if (e.uses_bias() && !r.p.desc.bias) return invalid("the epilogue has no bias pointer");
    if (e.uses_aux() && !r.p.desc.aux) return invalid("the epilogue has no auxiliary pointer");
    if (e.dgelu && r.beta != 0.0f) return unsupported("DGELU with beta not 0");
    if ((e.sum_a || e.sum_b) && r.alpha != 1.0f) return unsupported("BGRADA or BGRADB with alpha not 1");
    const Alignments have = {alignment_of(r.a), alignment_of(r.b), r.beta != 0.0f ? alignment_of(r.c) : 256,
                             alignment_of(r.d), alignment_of(r.p.desc.bias)};
    if (!aligned_for(r.p, r.algorithm, have)) return unsupported("pointers or strides misaligned for the algorithm");
    if (r.workspace_bytes > 0 && !r.workspace) return invalid("a null workspace of more than 0 bytes");
    if (reinterpret_cast<uintptr_t>(r.workspace) % kWorkspaceAlignment != 0) return invalid("workspace misaligned");
    if (r.workspace_bytes < workspace_of(r.p, r.algorithm)) return invalid("workspace too small for the algorithm");
    return check_aliases(r);
}

// algo == NULL: takes the heuristic's first algorithm that needs no workspace, as the library does.
cublasStatus_t choose(const cublasLtMatmulAlgo_t *algo, Run *r) {
    if (algo) return unpack(algo, &r->algorithm) ? check_algorithm(r->p, r->algorithm) : invalid("not an algorithm");
    Preference preference = new_preference();
    preference.align_a = static_cast<uint32_t>(std::min<size_t>(256, alignment_of(r->a)));
    preference.align_b = static_cast<uint32_t>(std::min<size_t>(256, alignment_of(r->b)));
    preference.align_c = static_cast<uint32_t>(std::min<size_t>(256, r->beta != 0.0f ? alignment_of(r->c) : 256));
    preference.align_d = static_cast<uint32_t>(std::min<size_t>(256, alignment_of(r->d)));
    const std::vector<Algorithm> found = candidates(r->p, preference);
    if (found.empty()) return unsupported("no algorithm");
    r->algorithm = found[0];
    return CUBLAS_STATUS_SUCCESS;
}

const char *status_name(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
    default: return "unrecognized status";
    }
}

const char *status_string(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED: return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "the function requires an architectural feature absent from the device";
    case CUBLAS_STATUS_MAPPING_ERROR: return "an access to GPU memory space failed";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "an internal operation failed";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the requested functionality is not supported";
    case CUBLAS_STATUS_LICENSE_ERROR: return "the license check failed";
    default: return "unrecognized status";
    }
}

// The configuration of an algorithm as attributes.
const Field config_fields[] = {
    FIELD(CUBLASLT_ALGO_CONFIG_ID, Algorithm, id),
    FIELD(CUBLASLT_ALGO_CONFIG_TILE_ID, Algorithm, tile),
    FIELD(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, Algorithm, splits),
    FIELD(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, Algorithm, reduction),
    FIELD(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, Algorithm, swizzle),
    FIELD(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, Algorithm, custom),
    FIELD(CUBLASLT_ALGO_CONFIG_STAGES_ID, Algorithm, stages),
    {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, kNotModelled, 2},
    {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, kNotModelled, 2},
};

// Computes a capability of an algorithm and the size of the answer.
bool capability(const Algorithm &algorithm, int attribute, uint64_t *value, size_t *size) {
    *size = 4;
    switch (attribute) {
    case CUBLASLT_ALGO_CAP_SPLITK_SUPPORT: *value = algorithm.id == kSplit; return true;
    case CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK: *value = algorithm.reduction; return true;
    case CUBLASLT_ALGO_CAP_STRIDED_BATCH_SUPPORT:
    case CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT:
    case CUBLASLT_ALGO_CAP_POINTER_MODE_MASK: *value = 1; return true;
    case CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT:
    case CUBLASLT_ALGO_CAP_UPLO_SUPPORT:
    case CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX:
    case CUBLASLT_ALGO_CAP_CUSTOM_MEMORY_ORDER:
    case CUBLASLT_ALGO_CAP_LD_NEGATIVE: *value = 0; return true;
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES: *value = traits[algorithm.id].alignment; return true;
    case CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS:
        *size = 8;
        *value = traits[algorithm.id].implementation | CUBLASLT_NUMERICAL_IMPL_FLAGS_ACCUMULATOR_32F;
        return true;
    default: return false;
    }
}

cublasStatus_t check_type_set(int compute, int scale, int a, int b, int c, int d) {
    Problem p = {};
    p.desc.compute = compute;
    p.desc.scale = scale;
    p.a.type = static_cast<cudaDataType_t>(a);
    p.b.type = static_cast<cudaDataType_t>(b);
    p.c.type = static_cast<cudaDataType_t>(c);
    p.d.type = static_cast<cudaDataType_t>(d);
    if (!known_type(p.a.type) || !known_type(p.d.type)) return unsupported("matrix type not modelled");
    return check_types(p);
}

} // namespace

void gemm_time(std::function<double(const GemmCall &)> seconds) {
    Guard guard;
    time_of_gemm = std::move(seconds);
}

GemmCall gemm_last() {
    Guard guard;
    return last_gemm;
}

long gemm_count() {
    Guard guard;
    return gemms;
}

void gemm_fail(std::function<bool(const GemmCall &)> which) {
    Guard guard;
    gemm_fails = std::move(which);
}

void gemm_refuse(int status, bool by_heuristic) {
    Guard guard;
    refusal = {status, by_heuristic};
}

long gemm_choices() {
    Guard guard;
    return choices;
}

} // namespace mte

using namespace mte;

// ---- the library's functions ----------------------------------------------------------------------------------------

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    if (!handle) return invalid("null place for a handle");
    if (call_fails("cublasLtCreate")) return CUBLAS_STATUS_ALLOC_FAILED;
    *handle = new cublasLtContext{kHandleMagic};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (!handle || handle->magic != kHandleMagic) return invalid("not a handle");
    handle->magic = 0;
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusName(cublasStatus_t status) { return status_name(status); }
const char *cublasLtGetStatusString(cublasStatus_t status) { return status_string(status); }
const char *cublasGetStatusName(cublasStatus_t status) { return status_name(status); }
const char *cublasGetStatusString(cublasStatus_t status) { return status_string(status); }

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }

cublasStatus_t cublasLtGetProperty(libraryPropertyType type, int *value) {
    if (!value) return invalid("null value");
    switch (type) {
    case MAJOR_VERSION: *value = CUBLAS_VER_MAJOR; return CUBLAS_STATUS_SUCCESS;
    case MINOR_VERSION: *value = CUBLAS_VER_MINOR; return CUBLAS_STATUS_SUCCESS;
    case PATCH_LEVEL: *value = CUBLAS_VER_PATCH; return CUBLAS_STATUS_SUCCESS;
    default: return invalid("unknown property");
    }
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size, cudaDataType type,
                                                 uint64_t rows, uint64_t cols, int64_t ld) {
    return place(layout, size, new_layout(type, rows, cols, ld));
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    return create("cublasLtMatrixLayoutCreate", layout, new_layout(type, rows, cols, ld));
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return destroy<Layout>(layout, kLayoutMagic, "matrix layout");
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                size_t size) {
    return set_field(view<Layout>(layout, kLayoutMagic), find(layout_fields, attribute), value, size, "matrix layout");
}

cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, void *value, size_t size,
                                                size_t *written) {
    return get_field(view<Layout>(layout, kLayoutMagic), find(layout_fields, attribute), value, size, written);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
    return place(desc, size, new_desc(compute, scale));
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale) {
    return create("cublasLtMatmulDescCreate", desc, new_desc(compute, scale));
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    return destroy<Desc>(desc, kDescMagic, "matmul descriptor");
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size) {
    return set_field(view<Desc>(desc, kDescMagic), find(desc_fields, attribute), value, size, "matmul descriptor");
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              void *value, size_t size, size_t *written) {
    return get_field(view<Desc>(desc, kDescMagic), find(desc_fields, attribute), value, size, written);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t size) {
    return place(preference, size, new_preference());
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    return create("cublasLtMatmulPreferenceCreate", preference, new_preference());
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return destroy<Preference>(preference, kPreferenceMagic, "matmul preference");
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t size) {
    const Field *field = find(preference_fields, attribute);
    return set_field(view<Preference>(preference, kPreferenceMagic), field, value, size, "matmul preference");
}

cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, void *value,
                                                    size_t size, size_t *written) {
    const Field *field = find(preference_fields, attribute);
    return get_field(view<Preference>(preference, kPreferenceMagic), field, value, size, written);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int *returned) {
    Problem p;
    if (returned) *returned = 0;
    const cublasStatus_t status = describe(handle, desc, a, b, c, d, &p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const Preference *wishes = view<Preference>(preference, kPreferenceMagic);
    if (!wishes || !results || !returned || requested <= 0) return invalid("null argument or no result requested");
    if (wishes->search != CUBLASLT_SEARCH_BEST_FIT) return unsupported("search mode not modelled");
    const std::vector<Algorithm> found = candidates(p, *wishes);
    {
        Guard guard;
        choices++;
        if (refused(p, true)) return refuse((cublasStatus_t)refusal.status, "the test wants it");
    }
    if (found.empty()) return unsupported("no algorithm within the preference");
    *returned = std::min(requested, static_cast<int>(found.size()));
    for (int i = 0; i < *returned; i++) results[i] = result_of(p, found[static_cast<size_t>(i)]);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetIds(cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale,
                                        cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, cudaDataType_t d,
                                        int requested, int ids[], int *returned) {
    if (!handle || handle->magic != kHandleMagic) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle");
    if (requested <= 0 || !ids || !returned) return invalid("null argument or nothing requested");
    *returned = 0;
    const cublasStatus_t status = check_type_set(compute, scale, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    *returned = std::min<int>(requested, kAlgorithms);
    for (int i = 0; i < *returned; i++) ids[i] = i;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale,
                                      cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, cudaDataType_t d, int id,
                                      cublasLtMatmulAlgo_t *algo) {
    if (!handle || handle->magic != kHandleMagic) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle");
    if (!algo || id < 0 || id >= kAlgorithms) return invalid("null algorithm or unknown id");
    const cublasStatus_t status = check_type_set(compute, scale, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    *algo = pack(new_algorithm(id, id == kSplit ? 2 : 1, 0, types_of(compute, scale, a, b, c, d)));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result) {
    Problem p;
    Algorithm algorithm;
    cublasStatus_t status = describe(handle, desc, a, b, c, d, &p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!result || !unpack(algo, &algorithm)) return invalid("null result or not an algorithm");
    status = check_algorithm(p, algorithm);
    const Alignments best = {256, 256, 256, 256, alignment_of(p.desc.bias)};
    if (status == CUBLAS_STATUS_SUCCESS && !aligned_for(p, algorithm, best)) status = unsupported("strides misaligned");
    const cublasLtMatmulAlgo_t kept = result->algo; // result->algo belongs to the caller and is not changed
    *result = result_of(p, algorithm);
    result->algo = kept;
    result->state = status;
    return status;
}

cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                 cublasLtMatmulAlgoCapAttributes_t attribute, void *value, size_t size,
                                                 size_t *written) {
    Algorithm algorithm;
    uint64_t answer = 0;
    size_t answer_size = 0;
    if (!unpack(algo, &algorithm)) return invalid("not an algorithm");
    if (!capability(algorithm, attribute, &answer, &answer_size)) return invalid("capability unknown or not modelled");
    if (size == 0 && !written) return invalid("neither a buffer nor a place for the size");
    if (size != 0 && (!value || size != answer_size)) return invalid("null value or wrong size of an attribute");
    if (written) *written = answer_size;
    if (size != 0) memcpy(value, &answer, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, const void *value,
                                                    size_t size) {
    Algorithm algorithm;
    if (!unpack(algo, &algorithm)) return invalid("not an algorithm");
    if (attribute == CUBLASLT_ALGO_CONFIG_ID) return invalid("the id is read-only");
    const cublasStatus_t status = set_field(&algorithm, find(config_fields, attribute), value, size, "algorithm");
    if (status == CUBLAS_STATUS_SUCCESS) *algo = pack(algorithm);
    return status;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void *value,
                                                    size_t size, size_t *written) {
    Algorithm algorithm;
    if (!unpack(algo, &algorithm)) return invalid("not an algorithm");
    return get_field(&algorithm, find(config_fields, attribute), value, size, written);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    Run run = {};
    cublasStatus_t status = describe(handle, desc, a, b, c, d, &run.p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!alpha || !beta) return invalid("null alpha or beta");
    run.alpha = *static_cast<const float *>(alpha);
    run.beta = *static_cast<const float *>(beta);
    run.a = A;
    run.b = B;
    run.c = C;
    run.d = D;
    run.workspace = workspace;
    run.workspace_bytes = workspace_bytes;
    status = choose(algo, &run);
    if (status == CUBLAS_STATUS_SUCCESS) status = check_pointers(run);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    Guard guard;
    if (refused(run.p, false)) return refuse((cublasStatus_t)refusal.status, "the test wants it");
    if (gemm_fails && gemm_fails(call_of(run))) return refuse(CUBLAS_STATUS_EXECUTION_FAILED, "the test wants it");
    if (enqueue(stream, "cublasLtMatmul", [run] { execute(run); }) != cudaSuccess)
        return refuse(CUBLAS_STATUS_EXECUTION_FAILED, "no operation can be enqueued in the stream");
    return CUBLAS_STATUS_SUCCESS;
}

} // extern "C"
