// test_cudnn_plans.cu - makes plans for attention with cuDNN itself, on a machine without a GPU: for a description of
// one, and with a stand-in for libcuda.so.1 (driver.c), which loads no code. build and run: tests/cudnn.sh
//
// It shows that cuDNN recognises the graphs of src/ops/attention_cudnn.cuh, and finds engines for them. It runs none.
// The last line is "N passed, N failed, N skipped".
#define MEGATRON_IMPLEMENTATION
#define MT_USE_CUDNN
#include "../../src/ops/attention_cudnn.cuh"

#include <stdio.h>

static int passed, failed;

static void conclude(int ok, const char *name, const char *what) {
    if (ok) passed++;
    else failed++;
    printf("  %-4s  %s%s\n", ok ? "ok" : "FAIL", name, what);
    fflush(stdout);
}

// *device = the description of a GPU with this compute capability, with the numbers of an H200.
static cudnnStatus_t describe(int capability, cudnnBackendDescriptor_t *device) {
    char text[1500];
    snprintf(text, sizeof text,
             "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,"
             "\"multiProcessorCount\":132,\"warpSize\":32,\"maxSharedMemoryPerBlock\":49152,"
             "\"maxSharedMemoryPerBlockOptin\":232448,\"reservedSharedMemoryPerBlock\":1024,"
             "\"maxSharedMemoryPerSM\":233472,\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,"
             "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,\"pciDeviceId\":0,\"isTccDriver\":0,"
             "\"supportCoopLaunch\":1,\"totalGlobalMem\":150000000000,\"smClockRateKHz\":1980000,"
             "\"memClockRateKHz\":3201000,\"l2CacheSize\":62914560,\"cudaDeviceId\":0,\"deviceVer\":%d,"
             "\"driverVer\":13000,\"deviceName\":\"stand-in\"}",
             capability * 10);
    MTI_CUDNN_TRY(cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, device));
    MTI_CUDNN_TRY(cudnnBackendSetAttribute(*device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                                           (int64_t)strlen(text), text));
    return cudnnBackendFinalize(*device);
}

// The key of a call whose queries, keys and values lie side by side in one tensor.
static mti_cudnn_key key_of(int64_t batch, int64_t seq, int64_t groups, int64_t per_group, int64_t dim) {
    mti_cudnn_key key;
    memset(&key, 0, sizeof key);
    key.batch = batch, key.seq = seq, key.heads = groups * per_group, key.groups = groups, key.head_dim = dim;
    key.q_ld = key.k_ld = key.v_ld = (key.heads + 2 * groups) * dim;
    key.out_ld = key.heads * dim;
    key.q_step = key.kv_step = dim;
    key.dtype = (int)MT_BF16;
    key.causal = key.stats = 1;
    return key;
}

// A key for which cuDNN has an engine.
static void expect(mti_cudnn *dnn, const char *name, mti_cudnn_key key) {
    static mti_cudnn_plan p;
    char what[60] = "";
    memset(&p, 0, sizeof p);
    p.key = key;
    cudnnStatus_t status = mti_cudnn_operations(&p);
    if (status == CUDNN_STATUS_SUCCESS) status = mti_cudnn_find(dnn, &p);
    if (status != CUDNN_STATUS_SUCCESS) snprintf(what, sizeof what, ": status %d, expected an engine", (int)status);
    conclude(status == CUDNN_STATUS_SUCCESS && p.plan, name, what);
    mti_cudnn_forget(&p);
}

// The plans of several shapes.
static void test_shapes(mti_cudnn *dnn) {
    mti_cudnn_key key = key_of(4, 2048, 32, 1, 128);
    expect(dnn, "head size 128, causal", key);
    key.causal = 0;
    expect(dnn, "head size 128", key);
    key.dtype = (int)MT_F16;
    expect(dnn, "head size 128, f16", key);
    key = key_of(4, 2048, 8, 4, 128);
    expect(dnn, "head size 128, causal, 4 heads per group", key);
    key.stats = 0;
    expect(dnn, "the same without lse", key);
    key = key_of(2, 1024, 12, 1, 64);
    key.q_step = key.kv_step = 3 * 64;
    expect(dnn, "head size 64, causal, each head beside its key and value", key);
    key = key_of(1, 1000, 6, 1, 96);
    key.q_ld = 6 * 96, key.k_ld = 6 * 96 + 8, key.v_ld = 6 * 96 + 16;
    expect(dnn, "head size 96, causal, three tensors, 1000 tokens", key);
    expect(dnn, "head size 72, 37 tokens, causal", key_of(3, 37, 5, 1, 72));
    expect(dnn, "head size 40, 2 tokens, causal", key_of(1, 2, 2, 1, 40));
    expect(dnn, "head size 256, causal", key_of(1, 512, 8, 1, 256));
}

// Graphs that cuDNN does not recognise: without the operations [first, first + count) of the key's graph.
static void expect_none(mti_cudnn *dnn, const char *name, mti_cudnn_key key, int first, int count) {
    static mti_cudnn_plan p;
    char what[100] = "";
    cudnnStatus_t status;
    memset(&p, 0, sizeof p);
    p.key = key;
    status = mti_cudnn_operations(&p);
    for (int i = first; count > 0 && i + count < p.operation_count; i++) p.operations[i] = p.operations[i + count];
    p.operation_count -= count;
    if (status == CUDNN_STATUS_SUCCESS) status = mti_cudnn_find(dnn, &p);
    if (!mti_cudnn_lacks(status)) snprintf(what, sizeof what, ": status %d, expected that it is refused", (int)status);
    conclude(!what[0], name, what);
    mti_cudnn_forget(&p);
}

static void test_malformed(mti_cudnn *dnn) {
    mti_cudnn_key key = key_of(2, 256, 4, 1, 64);
    expect_none(dnn, "none: without the product of queries and keys", key, 0, 1);
    expect_none(dnn, "none: without lse and its logarithm", key, 10, 2);
    expect_none(dnn, "none: without the weights", key, 12, 1);
    expect_none(dnn, "none: without out", key, 13, 1);
    expect_none(dnn, "none: without weights and out", key, 12, 2);
    expect_none(dnn, "none: without the maximum", key, 6, 1);
    expect_none(dnn, "none: without the sum", key, 9, 1);
    key.groups = 3;
    expect_none(dnn, "none: 4 heads in 3 groups", key, 0, 0);
    expect_none(dnn, "none: head size 100", key_of(1, 512, 8, 1, 100), 0, 0);
}

int main(void) {
    static mti_cudnn dnn;
    cudnnStatus_t status = describe(90, &dnn.device);
    printf("cuDNN %zu, plans for sm_90\n", cudnnGetVersion());
    conclude(status == CUDNN_STATUS_SUCCESS, "a description of a GPU", "");
    test_shapes(&dnn);
    test_malformed(&dnn);
    cudnnBackendDestroyDescriptor(dnn.device);
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed > 0;
}
