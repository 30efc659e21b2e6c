/* ---- streams, events and memory of a GPU ------------------------------------------------------------------------- */

#pragma once
#include "types.h"

#if defined(__CUDACC__)
/* Kernels use only these extensions, so that tests/engine can run them on a CPU. */
#define MT_LAUNCH_KERNEL(kernel, grid, block, shared_bytes, stream, ...)                                               \
    (kernel)<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define MT_SHARED(type, name, count) __shared__ type name[count]
#define MT_DEVICE_UNROLL _Pragma("unroll")
#define MT_DEVICE_UNROLL_2 _Pragma("unroll 2")  /* for loops whose full unrolling needs too many registers */
#define MT_DEVICE_NO_UNROLL _Pragma("unroll 1") /* for loops that need too many registers by 2, too */
#define MT_HOST_DEVICE __host__ __device__
#define MT_DYN_SHARED(type, name)                                                                                      \
    extern __shared__ __align__(128) unsigned char mti_dynamic_shared[];                                               \
    type *name = reinterpret_cast<type *>(mti_dynamic_shared)
#else
#define MT_DEVICE_UNROLL
#define MT_DEVICE_UNROLL_2
#define MT_DEVICE_NO_UNROLL
#define MT_HOST_DEVICE
#endif

/* Whether this process was forked from the one that has created a context on a GPU: CUDA does not work here. */
static int mti_has_no_gpu(const mt_context *ctx) {
    return ctx->device == MT_DEVICE_CUDA && mti_is_forked(ctx->process);
}

static mt_status mti_check_gpu(mt_context *ctx) {
    if (!mti_has_no_gpu(ctx)) return MT_SUCCESS;
    return mt_fail(
        ctx, MT_ERR_UNSUPPORTED,
        "the context on GPU %d belongs to process %ld, from which this process %ld was forked: CUDA does not "
        "work here; create the context after fork()",
        ctx->ordinal, (long)ctx->process, (long)getpid());
}

/* Refuses a call that waits for the GPU, or that only the host can do, while a graph is recorded. */
static mt_status mti_check_recording(mt_context *ctx) {
    if (!ctx->recording) return MT_SUCCESS;
    return mt_fail(
        ctx, MT_ERR_UNSUPPORTED,
        "between mt_graph_begin and mt_graph_end no call can wait for the GPU, upload, download or allocate: "
        "do this before mt_graph_launch");
}

#if MT_HAS_CUDA
/* Turns a CUDA error into a status and a message that names the call. */
static mt_status mti_cuda_check(mt_context *ctx, cudaError_t error, const char *call) {
    mt_status status = error == cudaErrorMemoryAllocation ? MT_ERR_MEMORY : MT_ERR_SYSTEM;
    if (error == cudaSuccess) return MT_SUCCESS;
    cudaGetLastError(); /* clears the error, which mt_cuda_launched would report for the next launch */
    return mt_fail(ctx, status, "CUDA, device %d: %s in %.200s", ctx->ordinal, cudaGetErrorString(error), call);
}
#define MT_CUDA_TRY(ctx, call) MT_TRY(mti_cuda_check(ctx, (call), #call))

MT_API mt_status mt_cuda_launched(mt_context *ctx, const char *kernel) {
    if (!ctx) return MT_ERR_ARGUMENT;
    return mti_cuda_check(ctx, cudaGetLastError(), kernel);
}

#if MTI_NCCL
#define MTI_NCCL_MEMORY ((size_t)2 << 20) /* granularity of ncclMemAlloc: smaller blocks would waste most of it */
#endif

static void *mti_cuda_alloc(void *user, size_t bytes, size_t alignment) {
    void *ptr = NULL;
    (void)user;
    (void)alignment; /* cudaMalloc aligns to 256 bytes */
#if MTI_NCCL
    if (bytes >= MTI_NCCL_MEMORY)
        return ncclMemAlloc(&ptr, bytes) == ncclSuccess ? ptr : (cudaGetLastError(), (void *)NULL);
#endif
    return cudaMalloc(&ptr, bytes) == cudaSuccess ? ptr : (cudaGetLastError(), (void *)NULL);
}

static void mti_cuda_free(void *user, void *ptr, size_t bytes) {
    (void)user;
#if MTI_NCCL
    if (bytes >= MTI_NCCL_MEMORY) {
        cudaDeviceSynchronize(); /* cudaFree does this by itself */
        ncclMemFree(ptr);
        return;
    }
#endif
    (void)bytes;
    cudaFree(ptr);
}

/* -- memory of ranks that share a GPU -- */

/* Does NCCL let several ranks use one GPU? From 2.30 on it does where the environment asks for it. */
static int mti_nccl_may_share(void) {
#if MTI_NCCL
    const char *asked = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    int version = 0;
    return asked && atoi(asked) && ncclGetVersion(&version) == ncclSuccess && version >= NCCL_VERSION(2, 30, 0);
#else
    return 0;
#endif
}

typedef struct mti_parked {
    struct mti_parked *next;
    void *memory;
    size_t bytes;
} mti_parked;

/* cudaFree waits until the GPU is idle: also for a collective of another thread on this GPU, which waits for this rank.
   So a context with communicators over NCCL then keeps what is freed, until it is destroyed. */
static void mti_cuda_give(mt_context *ctx, void *memory, size_t bytes) {
    int keeps = ctx->nccl && mti_nccl_may_share();
    mti_parked *parked = keeps ? (mti_parked *)mt_host_alloc(sizeof *parked) : NULL;
    if (!parked) {
        (ctx->allocator.free)(ctx->allocator.user, memory, bytes);
        return;
    }
    parked->memory = memory;
    parked->bytes = bytes;
    parked->next = ctx->parked;
    ctx->parked = parked;
}

/* Returns memory: parked memory of the same size, or new memory. NULL: there is none */
static void *mti_cuda_take(mt_context *ctx, size_t bytes) {
    mti_parked **at = &ctx->parked, *parked;
    void *memory;
    while (*at && (*at)->bytes != bytes) at = &(*at)->next;
    parked = *at;
    if (!parked) return (ctx->allocator.alloc)(ctx->allocator.user, bytes, MT_ALIGNMENT);
    memory = parked->memory;
    *at = parked->next;
    mt_host_free(parked);
    return memory;
}

/* Frees the parked memory, or only forgets it when a stream may still use it. */
static void mti_cuda_free_parked(mt_context *ctx) {
    mti_parked *parked;
    while ((parked = ctx->parked) != NULL) {
        ctx->parked = parked->next;
        if (!ctx->stuck) (ctx->allocator.free)(ctx->allocator.user, parked->memory, parked->bytes);
        mt_host_free(parked);
    }
}

MT_API mt_status mt_cuda_enter(mt_context *ctx) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (ctx->device == MT_DEVICE_META) return MT_PLANNED;
    MT_TRY(mti_check_gpu(ctx));
    cudaGetLastError(); /* clears an error of the program, which mt_cuda_launched would report */
    MT_CUDA_TRY(ctx, cudaSetDevice(ctx->ordinal));
    mti_graph_await_end(ctx);
    return MT_SUCCESS;
}

#if MTI_NCCL
#define MTI_NVLS "NCCL_NVLS_ENABLE" /* 0: off. 2: NCCL decides, as where it is not set */
#endif

/* Sets the environment for ranks that are threads, before the first of them uses CUDA. By default CUDA loads a kernel
   in its first launch, and may then wait for all kernels that run, on any GPU of the process: for a collective that
   waits for this rank. A new variable moves the environment while other threads may read it, so mti_nccl_fix_order,
   which runs in the threads, must find its variable. */
static void mti_cuda_before_ranks(void) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
#if MTI_NCCL
    setenv(MTI_NVLS, "2", 0);
#endif
}

static int mti_cuda_count(void) {
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : (cudaGetLastError(), 0);
}

static mt_status mti_staging_open(mt_context *ctx) {
    size_t sections = MTI_SECTIONS * MT_UPLOAD_BYTES, bytes = sections + sizeof(mt_range_error);
    void *memory = NULL;
    int i;
    MT_CUDA_TRY(ctx, cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    ctx->staging.memory = (unsigned char *)memory;
    memset(ctx->staging.memory + sections, 0, sizeof(mt_range_error));
    for (i = 0; i < MTI_SECTIONS; i++)
        MT_CUDA_TRY(ctx, cudaEventCreateWithFlags(&ctx->staging.copied[i], cudaEventDisableTiming));
    return MT_SUCCESS;
}

/* Creates the streams and events of a context, after a check of the GPU's number. */
static mt_status mti_cuda_open(mt_context *ctx, const mt_context_desc *desc) {
    int devices = 0, major = 0, minor = 0, lowest, highest, normal = 0, second, third, i;
    ctx->ordinal = desc->ordinal;
    ctx->stream = desc->stream;
    MT_CUDA_TRY(ctx, cudaGetDeviceCount(&devices));
    if (desc->ordinal < 0 || desc->ordinal >= devices)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_context_create: ordinal is %d, this machine has %d GPUs",
                       desc->ordinal, devices);
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ctx->ordinal));
    MT_CUDA_TRY(ctx, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ctx->ordinal));
    ctx->capability = 10 * major + minor;
    if (!ctx->stream) {
        MT_CUDA_TRY(ctx, cudaStreamCreateWithFlags(&ctx->stream, cudaStreamNonBlocking));
        ctx->owns_stream = 1;
    }
    ctx->compute_stream = ctx->stream;
    MT_CUDA_TRY(ctx, cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    MT_CUDA_TRY(ctx, cudaStreamGetPriority(ctx->compute_stream, &normal));
    second = desc->nccl.second_is_normal ? normal : highest;
    third = desc->nccl.third_is_high ? highest : normal;
    MT_CUDA_TRY(ctx, cudaStreamCreateWithPriority(&ctx->second_stream, cudaStreamNonBlocking, second));
    MT_CUDA_TRY(ctx, cudaStreamCreateWithPriority(&ctx->third_stream, cudaStreamNonBlocking, third));
    for (i = 0; i < MTI_EVENTS; i++)
        MT_CUDA_TRY(ctx, cudaEventCreateWithFlags(&ctx->events[i], cudaEventDisableTiming));
    return mti_staging_open(ctx);
}

MT_API mt_status mt_cuda_wait_peers(mt_context *ctx) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_check_recording(ctx));
    return mti_nccl_wait(ctx);
}

static mt_status mti_cuda_synchronize(mt_context *ctx) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mt_cuda_wait_peers(ctx));
    MT_CUDA_TRY(ctx, cudaStreamSynchronize(ctx->stream));
    return MT_SUCCESS;
}

/* As mt_cuda_enter, for calls that a graph cannot record: they call the allocator, or copy through staging memory
   that later uploads overwrite. */
static mt_status mti_cuda_enter_host(mt_context *ctx) {
    MT_TRY(mt_cuda_enter(ctx));
    return mti_check_recording(ctx);
}

MT_API mt_range_error *mt_cuda_range_error(const mt_context *ctx) {
    if (!ctx || !ctx->staging.memory) return NULL;
    return (mt_range_error *)(ctx->staging.memory + MTI_SECTIONS * MT_UPLOAD_BYTES);
}

/* Returns the error that a kernel has stored, and removes it. The caller has waited for the stream. */
static mt_status mti_cuda_report(mt_context *ctx) {
    mt_range_error error = *mt_cuda_range_error(ctx);
    if (!error.found) return MT_SUCCESS;
    memset(mt_cuda_range_error(ctx), 0, sizeof error);
    return mt_range_fail(ctx, &error);
}

/* A stream that is still recorded belongs to a graph of rank 0, which does not answer: it is left to the process. */
static void mti_stream_destroy(cudaStream_t stream) {
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    if (!stream) return;
    if (cudaStreamIsCapturing(stream, &captured) != cudaSuccess) cudaGetLastError();
    if (captured == cudaStreamCaptureStatusNone) cudaStreamDestroy(stream);
}

static void mti_cuda_close(mt_context *ctx) {
    int i;
    for (i = 0; i < MTI_EVENTS; i++)
        if (ctx->events[i]) cudaEventDestroy(ctx->events[i]);
    for (i = 0; i < MTI_SECTIONS; i++)
        if (ctx->staging.copied[i]) cudaEventDestroy(ctx->staging.copied[i]);
    if (ctx->staging.memory && !ctx->stuck) cudaFreeHost(ctx->staging.memory);
    mti_stream_destroy(ctx->third_stream);
    mti_stream_destroy(ctx->second_stream);
    if (ctx->owns_stream) mti_stream_destroy(ctx->stream);
}

static void mti_event_free(mti_event *e) {
    if (e->handle) cudaEventDestroy(e->handle);
    e->handle = NULL;
}

/* Records the event in the context's stream. Creates it first where it does not exist or belongs to another GPU,
   because CUDA records an event only on its own GPU. */
static mt_status mti_cuda_record(mt_context *ctx, mti_event *e) {
    MT_TRY(mt_cuda_enter(ctx));
    if (e->ordinal != ctx->ordinal) mti_event_free(e);
    e->ordinal = ctx->ordinal;
    if (!e->handle) MT_CUDA_TRY(ctx, cudaEventCreateWithFlags(&e->handle, cudaEventDisableTiming));
    MT_CUDA_TRY(ctx, cudaEventRecord(e->handle, ctx->stream));
    return MT_SUCCESS;
}

/* Later work in the context's stream runs after what the event was last recorded behind. */
static mt_status mti_cuda_await(mt_context *ctx, const mti_event *e) {
    MT_TRY(mt_cuda_enter(ctx));
    if (!e->handle) return mt_fail(ctx, MT_ERR_ARGUMENT, "the context of a peer is not on a GPU");
    MT_CUDA_TRY(ctx, cudaStreamWaitEvent(ctx->stream, e->handle, 0));
    return MT_SUCCESS;
}

/* Waits for the stream after an error of a call. Does not change the message of that error. */
static void mti_cuda_drain(mt_context *ctx) {
    if (cudaStreamSynchronize(ctx->stream) != cudaSuccess) cudaGetLastError();
}

MT_API mt_status mt_cuda_zero(mt_context *ctx, void *ptr, size_t bytes) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaMemsetAsync(ptr, 0, bytes, ctx->stream));
    return MT_SUCCESS;
}

static mt_status mti_cuda_copy(mt_context *ctx, void *to, const void *from, size_t bytes) {
    if (bytes == 0 || to == from) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, ctx->stream));
    return MT_SUCCESS;
}

MT_API mt_status mt_cuda_copy_rows(mt_context *ctx, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                   size_t row_bytes, int64_t rows) {
    const size_t most = 0x7fffffff; /* the largest pitch that cudaMemcpy2DAsync takes */
    int64_t i;
    if (rows == 0 || row_bytes == 0) return MT_SUCCESS;
    if (to_pitch == row_bytes && from_pitch == row_bytes) return mti_cuda_copy(ctx, to, from, (size_t)rows * row_bytes);
    MT_TRY(mt_cuda_enter(ctx));
    if (to_pitch <= most && from_pitch <= most)
        MT_CUDA_TRY(ctx, cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, row_bytes, (size_t)rows, cudaMemcpyDefault,
                                           ctx->stream));
    else
        for (i = 0; i < rows; i++)
            MT_TRY(mti_cuda_copy(ctx, (char *)to + (size_t)i * to_pitch, (const char *)from + (size_t)i * from_pitch,
                                 row_bytes));
    return MT_SUCCESS;
}

/* *memory = `bytes` of the staging memory, until it has been used up once more. Waits, when the copies of the oldest
   section are not done: first for peers, because CUDA waits for the event without a timeout. */
static mt_status mti_staging_take(mt_context *ctx, size_t bytes, void **memory) {
    mti_staging *s = &ctx->staging;
    int next = (s->section + 1) % MTI_SECTIONS;
    if (bytes > MT_UPLOAD_BYTES - s->used) {
        cudaError_t error = cudaEventQuery(s->copied[next]);
        if (error == cudaErrorNotReady) {
            cudaGetLastError(); /* clears cudaErrorNotReady */
            MT_TRY(mt_cuda_wait_peers(ctx));
            error = cudaEventSynchronize(s->copied[next]);
        }
        MT_TRY(mti_cuda_check(ctx, error, "cudaEventSynchronize"));
        MT_CUDA_TRY(ctx, cudaEventRecord(s->copied[s->section], ctx->stream));
        s->section = next;
        s->used = 0;
    }
    *memory = s->memory + (size_t)s->section * MT_UPLOAD_BYTES + s->used;
    s->used += mt_align_up(bytes);
    return MT_SUCCESS;
}

/* A side stream of mti_cuda_fork does not use the staging memory, whose events are for the compute stream. */
MT_API mt_status mt_cuda_upload(mt_context *ctx, void *to, size_t to_pitch, const void *from, size_t row_bytes,
                                int64_t rows) {
    void *memory = NULL;
    MT_TRY(mti_cuda_enter_host(ctx));
    if (rows <= 0 || row_bytes == 0) return MT_SUCCESS;
    if (row_bytes > MT_UPLOAD_BYTES / (size_t)rows || ctx->stream != ctx->compute_stream) {
        MT_TRY(mt_cuda_wait_peers(ctx)); /* a copy of pageable memory would wait for them without a timeout */
        MT_TRY(mt_cuda_copy_rows(ctx, to, to_pitch, from, row_bytes, row_bytes, rows));
        return mt_context_synchronize(ctx);
    }
    MT_TRY(mti_staging_take(ctx, row_bytes * (size_t)rows, &memory));
    memcpy(memory, from, row_bytes * (size_t)rows);
    return mt_cuda_copy_rows(ctx, to, to_pitch, memory, row_bytes, row_bytes, rows);
}

/* Checks one address. A GPU that shares the page tables of the host can use all memory of the host. */
static mt_status mti_cuda_check_address(mt_context *ctx, const char *function, const char *name, const char *ptr) {
    cudaPointerAttributes where;
    int pageable = 0;
    memset(&where, 0, sizeof where);
    MT_CUDA_TRY(ctx, cudaPointerGetAttributes(&where, ptr));
    if (where.type == cudaMemoryTypeDevice && where.device == ctx->ordinal) return MT_SUCCESS;
    if (where.type == cudaMemoryTypeDevice)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is memory of GPU %d, but the context is on GPU %d", function, name,
                       where.device, ctx->ordinal);
    if (where.type != cudaMemoryTypeUnregistered && where.devicePointer == ptr) return MT_SUCCESS;
    MT_CUDA_TRY(ctx, cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, ctx->ordinal));
    if (where.type == cudaMemoryTypeUnregistered && pageable) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is memory of the host, which GPU %d cannot use: %p", function, name,
                   ctx->ordinal, (const void *)ptr);
}

MT_API mt_status mt_cuda_check_memory(mt_context *ctx, const char *function, const char *name, const void *ptr,
                                      size_t bytes) {
    MT_TRY(mt_cuda_enter(ctx));
    if (bytes == 0) return MT_SUCCESS;
    MT_TRY(mti_cuda_check_address(ctx, function, name, (const char *)ptr));
    return mti_cuda_check_address(ctx, function, name, (const char *)ptr + bytes - 1);
}

/* Calls mt_cuda_wait_peers first, because a copy to pageable memory waits for the stream without a timeout. */
static mt_status mti_cuda_fetch(mt_context *ctx, void *to, const void *from, size_t bytes) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mt_cuda_wait_peers(ctx));
    MT_CUDA_TRY(ctx, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, ctx->stream));
    return mti_cuda_synchronize(ctx);
}

MT_API mt_status mt_cuda_fetch(mt_context *ctx, void *to, const void *from, size_t bytes) {
    MT_TRY(mti_cuda_fetch(ctx, to, from, bytes));
    return mti_cuda_report(ctx);
}

/* The first overlap of a context looks at an environment variable that Megatron-LM's launch scripts set. */
static void mti_cuda_warn_of_one_queue(mt_context *ctx) {
    const char *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (!ctx->overlapped && queues && strcmp(queues, "1") == 0)
        mt_log(ctx, MT_LOG_WARNING,
               "CUDA_DEVICE_MAX_CONNECTIONS is 1: all streams share one queue of the GPU, so a collective can hold up "
               "the computation that it should overlap with; unset the variable");
    ctx->overlapped = 1;
}

/* Calls until mti_cuda_fork_end put their work into stream `side`, which first waits for the work that the compute
   stream has now. */
static mt_status mti_cuda_fork(mt_context *ctx, struct CUstream_st *side) {
    struct CUevent_st *now = ctx->events[MTI_EVENTS - 1];
    mti_cuda_warn_of_one_queue(ctx);
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaEventRecord(now, ctx->compute_stream));
    MT_CUDA_TRY(ctx, cudaStreamWaitEvent(side, now, 0));
    ctx->stream = side;
    return MT_SUCCESS;
}

static mt_status mti_cuda_fork_end(mt_context *ctx, int ticket) {
    struct CUstream_st *side = ctx->stream;
    ctx->stream = ctx->compute_stream;
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaEventRecord(ctx->events[ticket], side));
    ctx->pending |= 1u << ticket;
    ctx->ticket_ctas[ticket] = ctx->forked_ctas;
    return MT_SUCCESS;
}

static mt_status mti_cuda_join(mt_context *ctx, int ticket) {
    ctx->pending &= ~(1u << ticket);
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaStreamWaitEvent(ctx->compute_stream, ctx->events[ticket], 0));
    return MT_SUCCESS;
}
#else /* without CUDA there is no context on MT_DEVICE_CUDA, and the static functions are never called */
static void mti_event_free(mti_event *e) { (void)e; }
static mt_status mti_cuda_record(mt_context *ctx, mti_event *e) { return (void)ctx, (void)e, MT_ERR_UNSUPPORTED; }
static mt_status mti_cuda_await(mt_context *ctx, const mti_event *e) { return (void)ctx, (void)e, MT_ERR_UNSUPPORTED; }
static void mti_cuda_drain(mt_context *ctx) { (void)ctx; }
static mt_status mti_no_cuda(mt_context *ctx, const char *function) {
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: this program was built without CUDA", function);
}
MT_API mt_status mt_cuda_enter(mt_context *ctx) { return mti_no_cuda(ctx, "mt_cuda_enter"); }
MT_API mt_status mt_cuda_wait_peers(mt_context *ctx) { return mti_no_cuda(ctx, "mt_cuda_wait_peers"); }
MT_API mt_status mt_cuda_launched(mt_context *ctx, const char *kernel) {
    return (void)kernel, mti_no_cuda(ctx, "mt_cuda_launched");
}
MT_API mt_status mt_cuda_fetch(mt_context *ctx, void *to, const void *from, size_t bytes) {
    return (void)to, (void)from, (void)bytes, mti_no_cuda(ctx, "mt_cuda_fetch");
}
static void *mti_cuda_alloc(void *user, size_t bytes, size_t alignment) {
    return (void)user, (void)bytes, (void)alignment, (void *)NULL;
}
static void mti_cuda_free(void *user, void *ptr, size_t bytes) { (void)user, (void)ptr, (void)bytes; }
static void *mti_cuda_take(mt_context *ctx, size_t bytes) { return (void)ctx, (void)bytes, (void *)NULL; }
static void mti_cuda_give(mt_context *ctx, void *memory, size_t bytes) { (void)ctx, (void)memory, (void)bytes; }
static void mti_cuda_free_parked(mt_context *ctx) { (void)ctx; }
static int mti_nccl_may_share(void) { return 0; }
static int mti_cuda_count(void) { return 0; }
static void mti_cuda_before_ranks(void) {}
static mt_status mti_cuda_open(mt_context *ctx, const mt_context_desc *desc) {
    return (void)ctx, (void)desc, MT_ERR_UNSUPPORTED;
}
static void mti_cuda_close(mt_context *ctx) { (void)ctx; }
MT_API mt_status mt_cuda_zero(mt_context *ctx, void *ptr, size_t bytes) {
    return (void)ptr, (void)bytes, mti_no_cuda(ctx, "mt_cuda_zero");
}
static mt_status mti_cuda_copy(mt_context *ctx, void *to, const void *from, size_t bytes) {
    return (void)ctx, (void)to, (void)from, (void)bytes, MT_ERR_UNSUPPORTED;
}
MT_API mt_status mt_cuda_copy_rows(mt_context *ctx, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                   size_t row_bytes, int64_t rows) {
    return (void)to, (void)to_pitch, (void)from, (void)from_pitch, (void)row_bytes, (void)rows,
           mti_no_cuda(ctx, "mt_cuda_copy_rows");
}
MT_API mt_status mt_cuda_upload(mt_context *ctx, void *to, size_t to_pitch, const void *from, size_t row_bytes,
                                int64_t rows) {
    return (void)to, (void)to_pitch, (void)from, (void)row_bytes, (void)rows, mti_no_cuda(ctx, "mt_cuda_upload");
}
MT_API mt_range_error *mt_cuda_range_error(const mt_context *ctx) { return (void)ctx, (mt_range_error *)NULL; }
MT_API mt_status mt_cuda_check_memory(mt_context *ctx, const char *function, const char *name, const void *ptr,
                                      size_t bytes) {
    return (void)function, (void)name, (void)ptr, (void)bytes, mti_no_cuda(ctx, "mt_cuda_check_memory");
}
static mt_status mti_cuda_synchronize(mt_context *ctx) { return (void)ctx, MT_ERR_UNSUPPORTED; }
static mt_status mti_cuda_report(mt_context *ctx) { return (void)ctx, MT_ERR_UNSUPPORTED; }
static mt_status mti_cuda_enter_host(mt_context *ctx) { return (void)ctx, MT_ERR_UNSUPPORTED; }
static mt_status mti_cuda_fork(mt_context *ctx, struct CUstream_st *side) {
    return (void)ctx, (void)side, MT_ERR_UNSUPPORTED;
}
static mt_status mti_cuda_fork_end(mt_context *ctx, int ticket) { return (void)ctx, (void)ticket, MT_ERR_UNSUPPORTED; }
static mt_status mti_cuda_join(mt_context *ctx, int ticket) { return (void)ctx, (void)ticket, MT_ERR_UNSUPPORTED; }
#endif

/* Whether calls move no bytes. */
static int mti_has_no_data(const mt_context *ctx) { return ctx->device == MT_DEVICE_META && !ctx->compares; }

/* Copies bytes within the context's device. On a CPU, the two ranges may overlap. */
static mt_status mti_bytes_copy(mt_context *ctx, void *to, const void *from, size_t bytes) {
    if (bytes == 0 || to == from || mti_has_no_data(ctx)) return MT_SUCCESS;
    if (ctx->device == MT_DEVICE_CUDA) return mti_cuda_copy(ctx, to, from, bytes);
    memmove(to, from, bytes);
    return MT_SUCCESS;
}
