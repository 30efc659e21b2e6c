/* ---- contexts, arenas and communicators -------------------------------------------------------------------------- */

#pragma once
#include "context.h"
#include "cuda_ends.c"
#include "workers.c"

MT_API void mt_log(mt_context *ctx, mt_log_level level, const char *text) {
    if (ctx && ctx->logger.log) (ctx->logger.log)(ctx->logger.user, level, text ? text : "");
}

MT_API mt_status mt_fail(mt_context *ctx, mt_status status, const char *format, ...) {
    va_list args;
    if (!ctx) return status;
    va_start(args, format);
    vsnprintf(ctx->error, sizeof ctx->error, format ? format : " ", args);
    va_end(args);
    mti_one_line(ctx->error);
    if (ctx->world) mt_comm_fail(ctx->world, status, ctx->error);
    mt_log(ctx, MT_LOG_ERROR, ctx->error);
    return status;
}

MT_API mt_status mt_range_fail(mt_context *ctx, const mt_range_error *error) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!error) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_range_fail: error is NULL");
    return mt_fail(ctx, MT_ERR_DATA, "%.23s: %.23s %ld at index %lld is not in [0, %lld)", error->function, error->name,
                   (long)error->value, (long long)error->index, (long long)error->limit);
}

MT_API void *mt_host_alloc(size_t bytes) { return calloc(1, bytes); }
MT_API void mt_host_free(void *ptr) { free(ptr); }

/* The address of memory that does not exist, for a meta context. Blocks of memory have different addresses. */
static unsigned char *mti_meta_address(size_t offset) { return (unsigned char *)(uintptr_t)(MT_ALIGNMENT + offset); }

/* The address of a byte of the blocks of mt_context_alloc in a meta context. */
static unsigned char *mti_meta_block(size_t offset) { return mti_meta_address(SIZE_MAX / 16 + 1 + offset); }

/* Stores an error of mt_context_create in world and logs it, because there is no context yet. */
static mt_status mti_context_refuse(mt_comm *world, const mt_context_desc *desc, mt_status status, const char *text) {
    if (world) mt_comm_fail(world, status, text);
    if (desc && desc->logger.log) (desc->logger.log)(desc->logger.user, MT_LOG_ERROR, text);
    return status;
}

static int mti_is_built(mt_device device) {
    return device == MT_DEVICE_CPU || (MT_HAS_CUDA && device == MT_DEVICE_CUDA);
}

static int mti_is_shard_count(int n) { return n >= 0 && n <= 1024 && (n & (n - 1)) == 0; }

/* Checks device and planned. */
static mt_status mti_device_check(mt_comm *world, const mt_context_desc *desc) {
    int plans = desc->device == MT_DEVICE_META;
    mt_device device = plans ? desc->planned : desc->device;
    char text[192];
    if (mti_is_built(device)) return MT_SUCCESS;
    if (device == MT_DEVICE_CUDA)
        snprintf(text, sizeof text,
                 "mt_context_create: %s is MT_DEVICE_CUDA, which is not built into this program: compile the "
                 "implementation with nvcc, as a .cu file",
                 plans ? "planned" : "device");
    else if (device == MT_DEVICE_META)
        snprintf(text, sizeof text,
                 "mt_context_create: planned is MT_DEVICE_META, must be MT_DEVICE_CPU or MT_DEVICE_CUDA");
    else
        snprintf(text, sizeof text, "mt_context_create: %s is %d, must be MT_DEVICE_CPU%s",
                 plans ? "planned" : "device", (int)device,
                 plans ? " or MT_DEVICE_CUDA" : ", MT_DEVICE_CUDA or MT_DEVICE_META");
    return mti_context_refuse(world, desc, MT_ERR_UNSUPPORTED, text);
}

static mt_status mti_context_check(mt_comm *world, const mt_context_desc *desc) {
    char text[192];
    MT_TRY(mti_device_check(world, desc));
    if ((desc->allocator.alloc == NULL) != (desc->allocator.free == NULL))
        return mti_context_refuse(world, desc, MT_ERR_ARGUMENT,
                                  "mt_context_create: the allocator needs both alloc and free, or neither");
    if (desc->threads < 0 || desc->threads > MTI_MAX_THREADS) {
        snprintf(text, sizeof text, "mt_context_create: threads is %d, must be from 0 to %d", desc->threads,
                 MTI_MAX_THREADS);
        return mti_context_refuse(world, desc, MT_ERR_ARGUMENT, text);
    }
    if (desc->check < 0 || desc->check > 2) {
        snprintf(text, sizeof text, "mt_context_create: check is %d, must be 0, 1 or 2", desc->check);
        return mti_context_refuse(world, desc, MT_ERR_ARGUMENT, text);
    }
    if (!mti_is_shard_count(desc->invariant) || !mti_is_shard_count(desc->invariant_data)) {
        int first = !mti_is_shard_count(desc->invariant);
        snprintf(text, sizeof text, "mt_context_create: %s is %d, must be 0 or a power of two up to 1024",
                 first ? "invariant" : "invariant_data", first ? desc->invariant : desc->invariant_data);
        return mti_context_refuse(world, desc, MT_ERR_ARGUMENT, text);
    }
    if (desc->invariant_data && !desc->invariant) {
        snprintf(text, sizeof text, "mt_context_create: invariant_data is %d, must be 0 without invariant",
                 desc->invariant_data);
        return mti_context_refuse(world, desc, MT_ERR_ARGUMENT, text);
    }
    if (desc->nccl.second_ctas < -1 || desc->nccl.third_ctas < -1) {
        snprintf(text, sizeof text, "mt_context_create: nccl.%s is %d, must be at least -1",
                 desc->nccl.second_ctas < -1 ? "second_ctas" : "third_ctas",
                 desc->nccl.second_ctas < -1 ? desc->nccl.second_ctas : desc->nccl.third_ctas);
        return mti_context_refuse(world, desc, MT_ERR_ARGUMENT, text);
    }
    if (desc->stream && desc->device != MT_DEVICE_CUDA) {
        snprintf(text, sizeof text, "mt_context_create: stream is set, but device is %s",
                 desc->device == MT_DEVICE_META ? "MT_DEVICE_META" : "MT_DEVICE_CPU");
        return mti_context_refuse(world, desc, MT_ERR_ARGUMENT, text);
    }
    return MT_SUCCESS;
}

static void mti_context_fill(mt_context *ctx, mt_comm *world, const mt_context_desc *d) {
    ctx->process = getpid();
    ctx->device = d->device;
    ctx->threads = d->threads ? d->threads : 1;
    ctx->invariant = d->invariant;
    ctx->invariant_data = d->invariant_data ? d->invariant_data : d->invariant;
    ctx->planned = d->device == MT_DEVICE_META ? d->planned : d->device;
    ctx->capability = 90; /* MT_DEVICE_META plans for sm_90: on older GPUs attention needs less scratch memory */
    ctx->world = world;
    ctx->allocator = d->allocator;
    ctx->logger = d->logger;
    ctx->arena_bytes = d->arena_bytes ? d->arena_bytes : MT_ARENA_DEFAULT;
    ctx->arena_symmetric = d->arena_symmetric;
    ctx->no_nccl_checks = d->no_nccl_checks;
    ctx->nccl_options = d->nccl;
    if (d->allocator.alloc) return;
    ctx->allocator.alloc = d->device == MT_DEVICE_CUDA ? mti_cuda_alloc : mti_default_alloc;
    ctx->allocator.free = d->device == MT_DEVICE_CUDA ? mti_cuda_free : mti_default_free;
}

static mt_status mti_context_arena(mt_context *ctx) {
    if (ctx->device == MT_DEVICE_META) {
        ctx->arena_bytes = SIZE_MAX / 2;
        ctx->arena = mti_meta_address(SIZE_MAX / 8 + 1);
        return MT_SUCCESS;
    }
    ctx->arena = (unsigned char *)(ctx->allocator.alloc)(ctx->allocator.user, ctx->arena_bytes, MT_ALIGNMENT);
    if (ctx->arena) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_create: no memory for an arena of %zu bytes", ctx->arena_bytes);
}

MT_API int mt_version(void) { return MT_VERSION_NUMBER; }

/* Does not read the desc: the mt_context_desc of another version may have other fields. */
static mt_status mti_version_refuse(mt_comm *world, int version) {
    char text[192];
    snprintf(
        text, sizeof text,
        "mt_context_create: was called with the headers of megatron.h %d.%d.%d, the implementation in this program "
        "is " MT_VERSION ": compile both with the same headers",
        version / 1000000, version / 1000 % 1000, version % 1000);
    return mti_context_refuse(world, NULL, MT_ERR_UNSUPPORTED, text);
}

MT_API mt_status mt_context_create_version(int version, mt_comm *world, const mt_context_desc *desc, mt_context **out) {
    mt_context_desc d;
    mt_context *ctx;
    mt_status status = MT_SUCCESS;
    if (out) *out = NULL;
    if (version != MT_VERSION_NUMBER) return mti_version_refuse(world, version);
    if (!out) return mti_context_refuse(world, desc, MT_ERR_ARGUMENT, "mt_context_create: out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    MT_TRY(mti_context_check(world, &d));
    ctx = (mt_context *)mt_host_alloc(sizeof *ctx);
    if (!ctx) return mti_context_refuse(world, &d, MT_ERR_MEMORY, "mt_context_create: no memory for the context");
    mti_context_fill(ctx, world, &d);
    if (d.device == MT_DEVICE_CUDA) status = mti_cuda_open(ctx, &d);
    if (status == MT_SUCCESS) status = mti_context_arena(ctx);
    if (status == MT_SUCCESS && (d.check || d.device == MT_DEVICE_META)) status = mti_checker_create(ctx, d.check);
    if (status == MT_SUCCESS) *out = ctx;
    else mt_context_destroy(ctx);
    return status;
}

static void mti_slot_destroy(mt_context *ctx, mti_slot_memory *slot) {
    if (ctx->stuck) return; /* libraries wait for the GPU when their handles are destroyed */
    if (slot->destroy) (slot->destroy)(ctx, slot->memory);
    mt_host_free(slot->memory);
    slot->memory = NULL; /* mt_context_slot returns NULL while the lower slots are destroyed */
}

/* Ends what uses the device, and frees its memory. */
static void mti_context_close(mt_context *ctx) {
    int i;
    if (ctx->device == MT_DEVICE_CUDA) mti_cuda_idle(ctx);
    if (ctx->stuck)
        mt_log(ctx, MT_LOG_WARNING, "what the context has on the GPU is not freed: one of its streams does not end");
    for (i = MT_SLOT_COUNT; i-- > 0;) mti_slot_destroy(ctx, &ctx->slots[i]);
    if (ctx->hooks) ctx->hooks->close_device(ctx);
    if (ctx->device == MT_DEVICE_CUDA) mti_cuda_close(ctx);
    mti_team_destroy(ctx->team);
    if (ctx->device != MT_DEVICE_META && ctx->arena && !ctx->stuck)
        (ctx->allocator.free)(ctx->allocator.user, ctx->arena, ctx->arena_bytes);
    mti_cuda_free_parked(ctx);
}

MT_API void mt_context_destroy(mt_context *ctx) {
    if (!ctx) return;
    if (!mti_has_no_gpu(ctx)) mti_context_close(ctx);
    mt_trace_free(&ctx->trace);
    if (ctx->hooks) ctx->hooks->destroy(ctx);
    mt_host_free(ctx);
}

/* Between the two, the calls of a call are not checked: its own check has said what it does. */
static void mti_checks_pause(mt_context *ctx) { ctx->checks_paused++; }

static mt_status mti_checks_resume(mt_context *ctx, mt_status status) {
    if (ctx->checks_paused > 0) ctx->checks_paused--;
    return status;
}

MT_API mt_status mt_context_slot_create(mt_context *ctx, mt_slot slot, size_t bytes,
                                        void (*destroy)(mt_context *ctx, void *memory), void **out) {
    int there = slot >= MT_SLOT_KERNELS && slot < MT_SLOT_COUNT;
    if (out) *out = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out || !there || ctx->slots[slot].memory)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_context_slot_create: slot %d %s", (int)slot,
                       !out    ? "is wanted, but out is NULL"
                       : there ? "has been created already"
                               : "does not exist");
    *out = ctx->slots[slot].memory = mt_host_alloc(bytes ? bytes : 1);
    if (!*out) return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_slot_create: no memory for %zu bytes", bytes);
    ctx->slots[slot].destroy = destroy;
    return MT_SUCCESS;
}

MT_API void *mt_context_slot(const mt_context *ctx, mt_slot slot) {
    return ctx && slot >= MT_SLOT_KERNELS && slot < MT_SLOT_COUNT ? ctx->slots[slot].memory : NULL;
}

MT_API void mt_context_set_forget(mt_context *ctx, mt_forget_function forget) {
    if (ctx) ctx->forget = forget;
}

MT_API void mt_context_set_graph_border(mt_context *ctx, mt_graph_border border) {
    if (ctx) ctx->border = border;
}

static void mti_notify_forgotten(mt_context *ctx, const void *data, size_t bytes, int gone) {
    if (ctx && ctx->forget && data && bytes) (ctx->forget)(ctx, data, bytes, gone);
}

/* Waits for the stream. The library's own waits, such as that of a barrier, do not report the errors of kernels: an
   error in one call is no reason to fail another one, and would break the communicator. */
static mt_status mti_synchronize(mt_context *ctx) {
    return ctx->device == MT_DEVICE_CUDA ? mti_cuda_synchronize(ctx) : MT_SUCCESS;
}

MT_API mt_status mt_context_synchronize(mt_context *ctx) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_synchronize(ctx));
    return ctx->device == MT_DEVICE_CUDA ? mti_cuda_report(ctx) : MT_SUCCESS;
}

MT_API struct CUstream_st *mt_context_stream(const mt_context *ctx) { return ctx ? ctx->stream : NULL; }

MT_API mt_device mt_context_device(const mt_context *ctx) { return ctx ? ctx->device : MT_DEVICE_CPU; }
MT_API int mt_context_has_data(const mt_context *ctx) { return mt_context_device(ctx) != MT_DEVICE_META; }

MT_API int mt_context_has_address(const mt_context *ctx, const void *data) {
    uintptr_t at = (uintptr_t)data, arena, blocks = (uintptr_t)mti_meta_block(0);
    if (mt_context_has_data(ctx)) return 1;
    arena = (uintptr_t)ctx->arena;
    return (at >= arena && at - arena < ctx->arena_bytes) || (at >= blocks && at - blocks < ctx->meta_end);
}
MT_API int mt_context_records(const mt_context *ctx) { return ctx ? ctx->recording : 0; }
MT_API int mt_device_count(mt_device device) { return device == MT_DEVICE_CUDA ? mti_cuda_count() : 1; }
MT_API int mt_context_invariant(const mt_context *ctx) { return ctx ? ctx->invariant : 0; }
MT_API int mt_context_threads(const mt_context *ctx) { return ctx ? ctx->threads : 1; }
MT_API mt_device mt_context_planned(const mt_context *ctx) { return ctx ? ctx->planned : MT_DEVICE_CPU; }
MT_API int mt_context_ordinal(const mt_context *ctx) { return ctx ? ctx->ordinal : 0; }
MT_API int mt_context_arena_symmetric(const mt_context *ctx) { return ctx ? ctx->arena_symmetric : 0; }
MT_API int mt_context_compute_capability(const mt_context *ctx) { return ctx ? ctx->capability : 0; }
MT_API int mt_context_invariant_data(const mt_context *ctx) { return ctx ? ctx->invariant_data : 0; }
MT_API const char *mt_last_error(const mt_context *ctx) { return ctx ? ctx->error : "the context is NULL"; }

MT_API mt_status mt_context_alloc(mt_context *ctx, size_t bytes, void **out) {
    size_t size = mt_align_up(bytes ? bytes : 1);
    mt_status status = MT_SUCCESS;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_context_alloc: out is NULL");
    *out = NULL;
    if (bytes > SIZE_MAX / 2) return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_alloc: %zu bytes are too many", bytes);
    if (ctx->device == MT_DEVICE_META) {
        *out = mti_meta_block(ctx->meta_end);
        ctx->meta_end += size;
    } else {
        void *ptr;
        if (ctx->device == MT_DEVICE_CUDA) MT_TRY(mti_cuda_enter_host(ctx));
        ptr = ctx->device == MT_DEVICE_CUDA ? mti_cuda_take(ctx, size)
                                            : (ctx->allocator.alloc)(ctx->allocator.user, size, MT_ALIGNMENT);
        if (!ptr) return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_alloc: no memory for %zu bytes", bytes);
        if (ctx->device == MT_DEVICE_CUDA) status = mt_cuda_zero(ctx, ptr, size);
        else memset(ptr, 0, size);
        if (status != MT_SUCCESS) (ctx->allocator.free)(ctx->allocator.user, ptr, size);
        MT_TRY(status);
        *out = ptr;
    }
    ctx->allocated += size;
    status = MTI_HOOK(ctx, allocated(ctx, *out, size));
    if (status == MT_SUCCESS) return MT_SUCCESS;
    mt_context_free(ctx, *out, size);
    *out = NULL;
    return status;
}

MT_API void mt_context_free(mt_context *ctx, void *ptr, size_t bytes) {
    size_t size = mt_align_up(bytes ? bytes : 1);
    if (!ctx || !ptr || mti_has_no_gpu(ctx)) return;
    /* waits for kernels that use ptr: the caller's allocator may not wait */
    if (ctx->device == MT_DEVICE_CPU) (ctx->allocator.free)(ctx->allocator.user, ptr, size);
    else if (ctx->device == MT_DEVICE_CUDA && mti_cuda_forget(ctx, ptr)) mti_cuda_give(ctx, ptr, size);
    if (ctx->hooks) ctx->hooks->freed(ctx, ptr, size);
    mti_notify_forgotten(ctx, ptr, size, 1);
    ctx->allocated -= size;
}

MT_API size_t mt_context_allocated(const mt_context *ctx) { return ctx ? ctx->allocated : 0; }

MT_API size_t mt_arena_mark(const mt_context *ctx) { return ctx ? ctx->arena_used : 0; }

MT_API void mt_arena_release(mt_context *ctx, size_t mark) {
    if (!ctx || ctx->stream != ctx->compute_stream) return; /* work overlaps */
    if (ctx->planned_stream != MT_STREAM_NONE && ctx->planned == MT_DEVICE_CUDA) return;
    if (mark < ctx->arena_used) ctx->arena_used = mark;
}

MT_API void mt_arena_region(mt_context *ctx, size_t first, size_t end, size_t top) {
    if (!ctx) return;
    ctx->arena_used = first;
    ctx->region_end = end;
    ctx->region_top = end ? top : 0; /* with neither region nor allocation, the next one goes to 0 */
}

MT_API int mt_arena_has(const mt_context *ctx, const void *data) {
    uintptr_t at = (uintptr_t)data;
    return ctx && at >= (uintptr_t)ctx->arena && at - (uintptr_t)ctx->arena < ctx->arena_bytes;
}

MT_API size_t mt_arena_available(const mt_context *ctx) {
    size_t at;
    if (!ctx) return 0;
    at = ctx->arena_used <= ctx->region_end ? ctx->region_top : ctx->arena_used;
    return at < ctx->arena_bytes ? ctx->arena_bytes - at : 0;
}

MT_API mt_status mt_arena_alloc(mt_context *ctx, size_t bytes, void **out) {
    size_t size = mt_align_up(bytes), at;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_arena_alloc: out is NULL");
    *out = NULL;
    at = ctx->arena_used <= ctx->region_end && size > ctx->region_end - ctx->arena_used ? ctx->region_top
                                                                                        : ctx->arena_used;
    if (size < bytes || at > ctx->arena_bytes || size > ctx->arena_bytes - at)
        return mt_fail(ctx, MT_ERR_MEMORY,
                       "mt_arena_alloc: %zu bytes do not fit: %zu of %zu in use; set mt_context_desc.arena_bytes to at "
                       "least %zu, or release a mark",
                       bytes, at, ctx->arena_bytes, at + size);
    *out = ctx->arena + at;
    if (ctx->hooks) ctx->hooks->reused(ctx, *out, size);
    mti_notify_forgotten(ctx, *out, size, 1);
    ctx->arena_used = at + size;
    if (ctx->arena_used > ctx->arena_peak) ctx->arena_peak = ctx->arena_used;
    return MT_SUCCESS;
}

MT_API mt_status mt_arena_tensor(mt_context *ctx, mt_dtype dtype, int64_t rows, int64_t cols, mt_tensor *out) {
    void *data = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out || rows < 0 || cols < 0 || (cols > 0 && rows > INT64_MAX / 8 / cols))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_arena_tensor: out %s, shape [%lld, %lld]", out ? "given" : "NULL",
                       (long long)rows, (long long)cols);
    MT_TRY(mt_arena_alloc(ctx, (size_t)rows * (size_t)cols * mt_dtype_size(dtype), &data));
    *out = mt_tensor_make(data, dtype, rows, cols);
    return MT_SUCCESS;
}

MT_API size_t mt_arena_peak(const mt_context *ctx) { return ctx ? ctx->arena_peak : 0; }

MT_API void mt_arena_reset_peak(mt_context *ctx) {
    if (ctx) ctx->arena_peak = ctx->arena_used;
}

MT_API void mt_arena_set_peak(mt_context *ctx, size_t peak) {
    if (ctx) ctx->arena_peak = peak;
}

MT_API mt_tensor mt_tensor_make(const void *data, mt_dtype dtype, int64_t rows, int64_t cols) {
    mt_tensor t;
    memcpy(&t.data, &data, sizeof data); /* casts const away: one view type serves for reading and writing */
    t.rows = rows;
    t.cols = cols;
    t.ld = cols;
    t.dtype = dtype;
    return t;
}

MT_API mt_tensor mt_tensor_f32(const float *data, int64_t rows, int64_t cols) {
    return mt_tensor_make(data, MT_F32, rows, cols);
}

MT_API int mt_tensor_is_aligned(const mt_context *ctx, mt_tensor t) {
    if (mt_context_device(ctx) == MT_DEVICE_META) return 0;
    return (t.rows <= 1 || mt_tensor_ld(t) == t.cols) && (uintptr_t)t.data % MT_ALIGNMENT == 0;
}

/* Returns a view with rows == -1, which every call refuses, when an argument is negative or the offset in bytes would
   overflow int64_t. */
static mt_tensor mti_tensor_at(mt_tensor t, int64_t row, int64_t col, int64_t rows, int64_t cols) {
    const int64_t most = INT64_MAX / 32;
    int sizes = row >= 0 && rows >= 0 && col >= 0 && cols >= 0 && col <= most;
    t.ld = mt_tensor_ld(t);
    if (!sizes || (row > 0 && (t.ld < 0 || t.ld > most / row))) row = col = 0, rows = -1;
    if (t.data) t.data = (char *)t.data + (row * t.ld + col) * (int64_t)mt_dtype_size(t.dtype);
    t.rows = rows;
    t.cols = cols;
    return t;
}

MT_API mt_tensor mt_tensor_rows(mt_tensor t, int64_t first, int64_t count) {
    return mti_tensor_at(t, first, 0, count, t.cols);
}

MT_API mt_tensor mt_tensor_cols(mt_tensor t, int64_t first, int64_t count) {
    return mti_tensor_at(t, 0, first, t.rows, count);
}
