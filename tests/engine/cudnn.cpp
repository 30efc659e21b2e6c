// cudnn.cpp - stand-in for cuDNN's backend API: the library's own prototypes, executed on the CPU through runtime.h.
// Test-only.
//
//   Descriptors  Each has a table of its attributes, with type, count and whether it is required. Wrong ones are
//                refused with CUDNN_STATUS_BAD_PARAM, as in the library.
//   Graphs       Products, reductions and pointwise operations on tensors of four dimensions. The tensors are computed
//                one after the other, in double precision. Virtual tensors of 16 bits are rounded.
//   Engines      Proposed are, in this order: one that is not deterministic, one that needs 1 GiB of workspace, one
//                whose plan cannot be finalized, and one that runs. None is proposed for graphs for which cuDNN 9.19
//                proposes none on sm_90: without lse, or with heads whose size 8 does not divide.
//   Plans        Making or destroying one allocates or frees memory of the device, which stream capture forbids. A
//                kernel that runs after its plan has been destroyed is reported.
//
// MTE_CUDNN_LOG=1 in the environment prints why a call was refused.
#include "runtime.h"

#include <cudnn.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace mte {
// For tests, which declare these extern. cudnn_refuse: what the next graphs return when they are finalized; 0: they are
// not refused. The counts are of handles and descriptors alive now, and of plans made and calls executed so far.
struct CudnnCounts {
    int handles, descriptors, plans, calls;
};
CudnnCounts cudnn_counts();
void cudnn_refuse(int status);
} // namespace mte

// The header's handle type names this incomplete type.
struct cudnnContext {
    uint32_t magic = 0x646e6e31;
    cudaStream_t stream = nullptr;
};

namespace mte {
namespace {

constexpr uint32_t kDescriptorMagic = 0x646e6e44;
constexpr size_t kWorkspace = 256;
CudnnCounts counts;
int refusal;

cudnnStatus_t refuse(cudnnStatus_t status, const char *why) {
    static const bool log = getenv("MTE_CUDNN_LOG") != nullptr;
    if (log) fprintf(stderr, "cuDNN stand-in: status %d: %s\n", (int)status, why);
    return status;
}

cudnnStatus_t invalid(const char *why) { return refuse(CUDNN_STATUS_BAD_PARAM, why); }

// ---- graphs ---------------------------------------------------------------------------------------------------------

struct Tensor {
    int64_t id = 0, dims[4], strides[4], alignment = 0;
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    bool is_virtual = false, is_value = false;

    int64_t elements() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
};

enum class Kind { product, reduction, pointwise };

struct Operation {
    Kind kind = Kind::product;
    int mode = 0;
    int64_t axis = -1;
    std::vector<Tensor> in;
    Tensor out;
};

struct Graph {
    std::vector<Operation> operations;
    std::map<int64_t, Tensor> memory; // tensors that are not virtual
};

typedef std::map<int64_t, std::vector<double>> Values;

int64_t at(const Tensor &t, const int64_t *index) { // of an element in a packed array; dimensions of 1 are repeated
    int64_t place = 0;
    for (int i = 0; i < 4; i++) place = place * t.dims[i] + (t.dims[i] == 1 ? 0 : index[i]);
    return place;
}

int64_t offset(const Tensor &t, const int64_t *index) { // of an element in memory
    int64_t place = 0;
    for (int i = 0; i < 4; i++) place += t.strides[i] * index[i];
    return place;
}

template <class F> void each(const Tensor &t, const F &body) {
    int64_t i[4];
    for (i[0] = 0; i[0] < t.dims[0]; i[0]++)
        for (i[1] = 0; i[1] < t.dims[1]; i[1]++)
            for (i[2] = 0; i[2] < t.dims[2]; i[2]++)
                for (i[3] = 0; i[3] < t.dims[3]; i[3]++) body(i);
}

double rounded(cudnnDataType_t type, double x) {
    if (type == CUDNN_DATA_BFLOAT16) return (double)__bfloat162float(__float2bfloat16((float)x));
    if (type == CUDNN_DATA_HALF) return (double)__half2float(__float2half((float)x));
    return x;
}

// A group of query heads shares the head of its keys or values.
double product(const Operation &o, const Values &v, const int64_t *i) {
    const Tensor &a = o.in[0], &b = o.in[1];
    double sum = 0;
    for (int64_t k = 0; k < a.dims[3]; k++) {
        const int64_t left[] = {i[0], i[1] * a.dims[1] / o.out.dims[1], i[2], k};
        const int64_t right[] = {i[0], i[1] * b.dims[1] / o.out.dims[1], k, i[3]};
        sum += v.at(a.id)[(size_t)at(a, left)] * v.at(b.id)[(size_t)at(b, right)];
    }
    return sum;
}

double reduction(const Operation &o, const Values &v, const int64_t *i) {
    double result = o.mode == CUDNN_REDUCE_TENSOR_MAX ? -std::numeric_limits<double>::infinity() : 0;
    for (int64_t k = 0; k < o.in[0].dims[3]; k++) {
        const int64_t from[] = {i[0], i[1], i[2], k};
        const double x = v.at(o.in[0].id)[(size_t)at(o.in[0], from)];
        result = o.mode == CUDNN_REDUCE_TENSOR_MAX ? std::max(result, x) : result + x;
    }
    return result;
}

double pointwise(const Operation &o, const Values &v, const int64_t *i) {
    double x[3] = {};
    if (o.mode == CUDNN_POINTWISE_GEN_INDEX) return (double)i[o.axis];
    for (size_t k = 0; k < o.in.size(); k++) x[k] = v.at(o.in[k].id)[(size_t)at(o.in[k], i)];
    switch (o.mode) {
    case CUDNN_POINTWISE_ADD: return x[0] + x[1];
    case CUDNN_POINTWISE_SUB: return x[0] - x[1];
    case CUDNN_POINTWISE_MUL: return x[0] * x[1];
    case CUDNN_POINTWISE_DIV: return x[0] / x[1];
    case CUDNN_POINTWISE_EXP: return exp(x[0]);
    case CUDNN_POINTWISE_LOG: return log(x[0]);
    case CUDNN_POINTWISE_CMP_GE: return x[0] >= x[1];
    default: return x[2] != 0 ? x[0] : x[1]; // CUDNN_POINTWISE_BINARY_SELECT
    }
}

void compute(const Operation &o, Values &v) {
    std::vector<double> y((size_t)o.out.elements());
    each(o.out, [&](const int64_t *i) {
        double x = o.kind == Kind::product     ? product(o, v, i)
                   : o.kind == Kind::reduction ? reduction(o, v, i)
                                               : pointwise(o, v, i);
        y[(size_t)at(o.out, i)] = rounded(o.out.type, x);
    });
    v[o.out.id] = std::move(y);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

size_t element_size(cudnnDataType_t type) { return type == CUDNN_DATA_FLOAT ? 4 : 2; }

// Checks a tensor in memory of the device, and tells the checker what is read or written: the rows of the dimension
// whose stride is 1.
void touch(const Tensor &t, const void *data, bool write) {
    const size_t size = element_size(t.type);
    int64_t last[4], inner = 3;
    for (int i = 0; i < 4; i++) {
        last[i] = t.dims[i] - 1;
        if (t.strides[i] == 1 && t.dims[i] > 1) inner = i;
    }
    check_global(data, (size_t)(offset(t, last) + 1) * size, (int)t.alignment, "cudnnBackendExecute");
    Tensor rows = t;
    rows.dims[inner] = 1;
    each(rows, [&](const int64_t *i) {
        access_range((const char *)data + (size_t)offset(t, i) * size, (size_t)t.dims[inner] * size, write);
    });
}

double load(const Tensor &t, const void *data, int64_t i) {
    if (t.type == CUDNN_DATA_FLOAT) return (double)((const float *)data)[i];
    if (t.type == CUDNN_DATA_BFLOAT16) return (double)__bfloat162float(((const __nv_bfloat16 *)data)[i]);
    return (double)__half2float(((const __half *)data)[i]);
}

void store(const Tensor &t, void *data, int64_t i, double x) {
    if (t.type == CUDNN_DATA_FLOAT) ((float *)data)[i] = (float)x;
    else if (t.type == CUDNN_DATA_BFLOAT16) ((__nv_bfloat16 *)data)[i] = __float2bfloat16((float)x);
    else ((__half *)data)[i] = __float2half((float)x);
}

struct Run {
    std::shared_ptr<const Graph> graph;
    std::map<int64_t, void *> data;
    Values values; // of the tensors that are passed by value
    void *workspace;
    std::shared_ptr<const bool> alive;
};

void execute(Run run) {
    Values &v = run.values;
    std::set<int64_t> written;
    if (!*run.alive) report("cuDNN: a kernel runs whose plan has been destroyed");
    check_global(run.workspace, kWorkspace, 16, "cudnnBackendExecute, workspace");
    access_range(run.workspace, kWorkspace, true);
    memset(run.workspace, 0xff, kWorkspace);
    for (const Operation &o : run.graph->operations) {
        for (const Tensor &t : o.in) {
            if (v.count(t.id)) continue;
            touch(t, run.data.at(t.id), false);
            v[t.id].resize((size_t)t.elements());
            each(t, [&](const int64_t *i) { v[t.id][(size_t)at(t, i)] = load(t, run.data.at(t.id), offset(t, i)); });
        }
        compute(o, v);
        if (o.out.is_virtual) continue;
        touch(o.out, run.data.at(o.out.id), true);
        each(o.out, [&](const int64_t *i) {
            store(o.out, run.data.at(o.out.id), offset(o.out, i), v[o.out.id][(size_t)at(o.out, i)]);
        });
    }
}

// ---- descriptors ----------------------------------------------------------------------------------------------------

struct Rule {
    cudnnBackendDescriptorType_t of;
    int name;
    cudnnBackendAttributeType_t type;
    int64_t count; // 0: any
    bool required;
};

#define TENSOR(name, type, count)                                                                                      \
    { CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_##name, type, count, true }
#define PART(of, name, required)                                                                                       \
    {                                                                                                                  \
        CUDNN_BACKEND_OPERATION_##of##_DESCRIPTOR, CUDNN_ATTR_OPERATION_##of##_##name, CUDNN_TYPE_BACKEND_DESCRIPTOR,  \
            1, required                                                                                                \
    }

const Rule rules[] = {
    TENSOR(DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1),
    TENSOR(DIMENSIONS, CUDNN_TYPE_INT64, 4),
    TENSOR(STRIDES, CUDNN_TYPE_INT64, 4),
    TENSOR(UNIQUE_ID, CUDNN_TYPE_INT64, 1),
    TENSOR(BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1),
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, false},
    {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, false},
    {CUDNN_BACKEND_MATMUL_DESCRIPTOR, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, true},
    PART(MATMUL, DESC, true),
    PART(MATMUL, ADESC, true),
    PART(MATMUL, BDESC, true),
    PART(MATMUL, CDESC, true),
    {CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, true},
    {CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, true},
    PART(REDUCTION, DESC, true),
    PART(REDUCTION, XDESC, true),
    PART(REDUCTION, YDESC, true),
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, true},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, true},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, false},
    PART(POINTWISE, PW_DESCRIPTOR, true),
    PART(POINTWISE, XDESC, true),
    PART(POINTWISE, BDESC, false),
    PART(POINTWISE, TDESC, false),
    PART(POINTWISE, YDESC, true),
    {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, true},
    {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, true},
    {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
     true},
    {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, true},
    {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
     true},
    {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, true},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 0, true},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 0, true},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, true},
};

enum Engine { varies, needs_much, fails, runs, engine_count };

struct Descriptor {
    uint32_t magic = kDescriptorMagic;
    cudnnBackendDescriptorType_t type;
    bool finalized = false;
    std::map<int, std::vector<char>> values;
    Tensor tensor;
    Operation operation;
    std::shared_ptr<Graph> graph; // of a graph, a heuristic, a configuration, an engine or a plan
    int engine = 0;
    void *code = nullptr; // of a plan
    std::shared_ptr<bool> alive = std::make_shared<bool>(true);

    template <class T> T value(int name, T otherwise = T()) const {
        auto found = values.find(name);
        if (found != values.end()) memcpy(&otherwise, found->second.data(), sizeof otherwise);
        return otherwise;
    }
    template <class T> std::vector<T> array(int name) const {
        const std::vector<char> &bytes = values.at(name);
        std::vector<T> all(bytes.size() / sizeof(T));
        memcpy(all.data(), bytes.data(), bytes.size());
        return all;
    }
    Descriptor *part(int name) const { return value<Descriptor *>(name); }
};

Descriptor *descriptor(void *p) {
    Descriptor *d = static_cast<Descriptor *>(p);
    return d && d->magic == kDescriptorMagic ? d : nullptr;
}

size_t size_of(cudnnBackendAttributeType_t type) {
    switch (type) {
    case CUDNN_TYPE_BOOLEAN: return sizeof(bool);
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    default: return sizeof(int); // enums
    }
}

bool is_value_of(const Tensor &t, cudnnDataType_t type) { return t.type == type; }

bool is_float(const Tensor &t) {
    return t.type == CUDNN_DATA_FLOAT || t.type == CUDNN_DATA_HALF || t.type == CUDNN_DATA_BFLOAT16;
}

cudnnStatus_t finish_tensor(Descriptor &d) {
    Tensor &t = d.tensor;
    const std::vector<int64_t> dims = d.array<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS);
    const std::vector<int64_t> strides = d.array<int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
    for (int i = 0; i < 4; i++) {
        if (dims[(size_t)i] < 1 || strides[(size_t)i] < 1) return invalid("a dimension or a stride is not positive");
        t.dims[i] = dims[(size_t)i];
        t.strides[i] = strides[(size_t)i];
    }
    t.id = d.value<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
    t.alignment = d.value<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
    t.type = d.value<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE);
    t.is_virtual = d.value<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    t.is_value = d.value<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE);
    if (t.is_virtual && t.is_value) return invalid("a virtual tensor is passed by value");
    if (t.alignment < 1 || (t.alignment & (t.alignment - 1))) return invalid("an alignment is no power of 2");
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finish_product(Descriptor &d) {
    Operation &o = d.operation;
    o.in = {d.part(CUDNN_ATTR_OPERATION_MATMUL_ADESC)->tensor, d.part(CUDNN_ATTR_OPERATION_MATMUL_BDESC)->tensor};
    o.out = d.part(CUDNN_ATTR_OPERATION_MATMUL_CDESC)->tensor;
    const Tensor &a = o.in[0], &b = o.in[1], &c = o.out;
    if (a.dims[3] != b.dims[2] || a.dims[2] != c.dims[2] || b.dims[3] != c.dims[3])
        return invalid("sizes of a product");
    if (a.dims[0] != c.dims[0] || b.dims[0] != c.dims[0]) return invalid("batches of a product");
    if (c.dims[1] % a.dims[1] || c.dims[1] % b.dims[1]) return invalid("heads of a product");
    if (!is_float(a) || a.type != b.type || !is_float(c)) return invalid("types of a product");
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finish_reduction(Descriptor &d) {
    Operation &o = d.operation;
    o.kind = Kind::reduction;
    o.mode = d.part(CUDNN_ATTR_OPERATION_REDUCTION_DESC)->value<int>(CUDNN_ATTR_REDUCTION_OPERATOR);
    o.in = {d.part(CUDNN_ATTR_OPERATION_REDUCTION_XDESC)->tensor};
    o.out = d.part(CUDNN_ATTR_OPERATION_REDUCTION_YDESC)->tensor;
    if (o.mode != CUDNN_REDUCE_TENSOR_MAX && o.mode != CUDNN_REDUCE_TENSOR_ADD) return invalid("mode of a reduction");
    for (int i = 0; i < 4; i++)
        if (o.out.dims[i] != (i == 3 ? 1 : o.in[0].dims[i])) return invalid("sizes of a reduction");
    if (!is_float(o.in[0]) || !is_float(o.out)) return invalid("types of a reduction");
    return CUDNN_STATUS_SUCCESS;
}

// The number of operands of a mode; 0: not modelled.
size_t operands(int mode) {
    switch (mode) {
    case CUDNN_POINTWISE_EXP:
    case CUDNN_POINTWISE_LOG:
    case CUDNN_POINTWISE_GEN_INDEX: return 1;
    case CUDNN_POINTWISE_ADD:
    case CUDNN_POINTWISE_SUB:
    case CUDNN_POINTWISE_MUL:
    case CUDNN_POINTWISE_DIV:
    case CUDNN_POINTWISE_CMP_GE: return 2;
    case CUDNN_POINTWISE_BINARY_SELECT: return 3;
    default: return 0;
    }
}

cudnnStatus_t check_types(const Operation &o) {
    if (o.mode == CUDNN_POINTWISE_GEN_INDEX && (!is_value_of(o.out, CUDNN_DATA_INT32) || o.axis < 0 || o.axis > 3))
        return invalid("type or axis of an index");
    if (o.mode == CUDNN_POINTWISE_CMP_GE && !is_value_of(o.out, CUDNN_DATA_BOOLEAN))
        return invalid("type of a comparison");
    if (o.mode == CUDNN_POINTWISE_BINARY_SELECT && !is_value_of(o.in[2], CUDNN_DATA_BOOLEAN))
        return invalid("type of a selection");
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finish_pointwise(Descriptor &d) {
    static const int names[] = {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                                CUDNN_ATTR_OPERATION_POINTWISE_TDESC};
    const Descriptor *how = d.part(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    Operation &o = d.operation;
    o.kind = Kind::pointwise;
    o.mode = how->value<int>(CUDNN_ATTR_POINTWISE_MODE);
    o.axis = how->value<int64_t>(CUDNN_ATTR_POINTWISE_AXIS, -1);
    o.out = d.part(CUDNN_ATTR_OPERATION_POINTWISE_YDESC)->tensor;
    for (size_t i = 0; i < 3; i++)
        if (d.part(names[i])) o.in.push_back(d.part(names[i])->tensor);
    if (o.in.size() != operands(o.mode)) return invalid("mode or number of operands of a pointwise operation");
    for (const Tensor &t : o.in)
        for (int i = 0; i < 4; i++)
            if (t.dims[i] != 1 && t.dims[i] != o.out.dims[i]) return invalid("sizes of a pointwise operation");
    return check_types(o);
}

// Each tensor is written once, before it is read, and an id belongs to one tensor.
cudnnStatus_t finish_graph(Descriptor &d) {
    std::map<int64_t, Tensor> known;
    std::set<int64_t> written;
    d.graph = std::make_shared<Graph>();
    for (const Descriptor *each : d.array<Descriptor *>(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
        const Operation &o = each->operation;
        for (const Tensor &t : o.in)
            if (t.is_virtual && !written.count(t.id)) return invalid("a virtual tensor is read before it is written");
        if (!written.insert(o.out.id).second) return invalid("a tensor is written twice");
        std::vector<Tensor> all = o.in;
        all.push_back(o.out);
        for (const Tensor &t : all) {
            auto other = known.insert({t.id, t}).first;
            if (memcmp(other->second.dims, t.dims, sizeof t.dims)) return invalid("an id has two tensors");
            if (!t.is_virtual) d.graph->memory[t.id] = t;
        }
        d.graph->operations.push_back(o);
    }
    return refusal ? refuse((cudnnStatus_t)refusal, "the test wants it") : CUDNN_STATUS_SUCCESS;
}

// What cuDNN 9.19 recognises: a product first and last, heads whose size 8 divides, and the logarithm of the sum.
bool is_attention(const Graph &g) {
    const std::vector<Operation> &all = g.operations;
    const int64_t dim = all.empty() || all[0].kind != Kind::product ? 0 : all[0].in[0].dims[3];
    const bool has_log = std::any_of(all.begin(), all.end(), [](const Operation &o) {
        return o.kind == Kind::pointwise && o.mode == CUDNN_POINTWISE_LOG;
    });
    return dim > 0 && dim % 8 == 0 && has_log && all.back().kind == Kind::product;
}

cudnnStatus_t finish_plan(Descriptor &d) {
    const Descriptor *configuration = d.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    d.graph = configuration->graph;
    d.engine = configuration->engine;
    if (d.engine == fails) return refuse(CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT, "this engine fails");
    if (cudaMalloc(&d.code, 64) != cudaSuccess)
        return refuse(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, "no memory for the code");
    counts.plans++;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finish(Descriptor &d) {
    switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR: return finish_tensor(d);
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR: return finish_product(d);
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: return finish_reduction(d);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: return finish_pointwise(d);
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: return finish_graph(d);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
        d.graph = d.part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)->graph;
        return CUDNN_STATUS_SUCCESS;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: return finish_plan(d);
    default: return CUDNN_STATUS_SUCCESS;
    }
}

// Fills an array of configurations, which the caller has created, or of one engine.
cudnnStatus_t give(const Descriptor &d, int64_t wanted, int64_t *count, void *out) {
    void **all = static_cast<void **>(out);
    const bool heuristic = d.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR;
    const int64_t there = !heuristic ? 1 : is_attention(*d.graph) ? engine_count : 0;
    for (int64_t i = 0; i < there && i < wanted; i++) {
        Descriptor *to = descriptor(all[i]);
        if (!to || to->type != (heuristic ? CUDNN_BACKEND_ENGINECFG_DESCRIPTOR : CUDNN_BACKEND_ENGINE_DESCRIPTOR))
            return invalid("no descriptor for the result");
        to->graph = d.graph;
        to->engine = heuristic ? (int)i : d.engine;
        to->finalized = true;
    }
    *count = there < wanted || wanted == 0 ? there : wanted;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t prepare(const Descriptor &plan, const Descriptor &pack, Run *run) {
    const std::vector<int64_t> ids = pack.array<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const std::vector<void *> data = pack.array<void *>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    if (ids.size() != data.size() || ids.size() != plan.graph->memory.size()) return invalid("ids of a variant pack");
    for (size_t i = 0; i < ids.size(); i++) {
        auto found = plan.graph->memory.find(ids[i]);
        if (found == plan.graph->memory.end()) return invalid("an id that the graph does not have");
        const Tensor &t = found->second;
        if (!data[i] || (uintptr_t)data[i] % (t.is_value ? 1 : (size_t)t.alignment)) return invalid("a pointer");
        if (t.is_value) run->values[t.id] = {(double)*static_cast<const float *>(data[i])};
        else run->data[t.id] = data[i];
    }
    run->graph = plan.graph;
    run->workspace = pack.value<void *>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    run->alive = plan.alive;
    return CUDNN_STATUS_SUCCESS;
}

} // namespace

CudnnCounts cudnn_counts() { return counts; }
void cudnn_refuse(int status) { refusal = status; }

} // namespace mte

using namespace mte;

extern "C" {

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t) { return "of the stand-in"; }

cudnnStatus_t cudnnCreate(cudnnHandle_t *out) {
    if (call_fails("cudnnCreate")) return CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED;
    counts.handles++;
    *out = new cudnnContext;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    counts.handles--;
    delete handle;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *out) {
    if (call_fails("cudnnBackendCreateDescriptor")) return CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED;
    Descriptor *d = new Descriptor;
    d->type = type;
    counts.descriptors++;
    *out = d;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t p) {
    Descriptor *d = descriptor(p);
    if (!d) return invalid("no descriptor");
    *d->alive = false;
    if (d->code && cudaFree(d->code) != cudaSuccess) report("cuDNN: a plan was destroyed during stream capture");
    d->magic = 0;
    counts.descriptors--;
    delete d;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t p, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void *array) {
    Descriptor *d = descriptor(p);
    if (!d || !array || count < 1) return invalid("no descriptor, or no array");
    if (d->finalized) return invalid("the descriptor is finalized");
    for (const Rule &rule : rules) {
        if (rule.of != d->type || rule.name != name) continue;
        if (rule.type != type || (rule.count && rule.count != count)) return invalid("type or count of an attribute");
        const char *bytes = static_cast<const char *>(array);
        d->values[name].assign(bytes, bytes + (size_t)count * size_of(type));
        for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < count; i++) {
            const Descriptor *part = descriptor(static_cast<void *const *>(array)[i]);
            if (!part || !part->finalized) return refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "a part of it");
        }
        return CUDNN_STATUS_SUCCESS;
    }
    return invalid("the descriptor has no such attribute, or it is not modelled");
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t p) {
    Descriptor *d = descriptor(p);
    if (!d || d->finalized) return invalid("no descriptor, or a finalized one");
    if (call_fails("cudnnBackendFinalize")) return CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED;
    for (const Rule &rule : rules)
        if (rule.of == d->type && rule.required && !d->values.count(rule.name))
            return invalid("an attribute is missing");
    const cudnnStatus_t status = finish(*d);
    d->finalized = status == CUDNN_STATUS_SUCCESS;
    return status;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const p, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count, void *out) {
    const Descriptor *d = descriptor(p);
    const int64_t bytes = d && d->engine == needs_much ? (int64_t)1 << 30 : (int64_t)kWorkspace;
    const cudnnBackendNumericalNote_t note = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    if (!d || !d->finalized) return invalid("not finalized");
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE)
        return type == CUDNN_TYPE_BACKEND_DESCRIPTOR ? give(*d, wanted, count, out) : invalid("type of a result");
    *count = 1;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && type == CUDNN_TYPE_INT64 && wanted == 1)
        memcpy(out, &bytes, sizeof bytes);
    else if (name != CUDNN_ATTR_ENGINE_NUMERICAL_NOTE || type != CUDNN_TYPE_NUMERICAL_NOTE || wanted < 1)
        return invalid("an attribute that cannot be read");
    else if (d->engine == varies) memcpy(out, &note, sizeof note);
    else *count = 0;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
    const Descriptor *p = descriptor(plan), *v = descriptor(pack);
    Run run = {};
    if (!p || !v || !p->finalized || !v->finalized || p->type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)
        return invalid("no plan, or no variant pack");
    const cudnnStatus_t status = prepare(*p, *v, &run);
    if (status != CUDNN_STATUS_SUCCESS) return status;
    if (call_fails("cudnnBackendExecute")) return CUDNN_STATUS_EXECUTION_FAILED;
    Guard guard;
    if (enqueue(handle->stream, "cudnnBackendExecute", [run] { execute(run); }) != cudaSuccess)
        return refuse(CUDNN_STATUS_EXECUTION_FAILED, "no operation can be enqueued in the stream");
    counts.calls++;
    return CUDNN_STATUS_SUCCESS;
}

} // extern "C"
