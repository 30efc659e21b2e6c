/* ---- context: device, allocator, logger, arena ------------------------------------------------------------------- */

#pragma once
#include "version.h"
#include "status.h"
#include "tensor.h"

/* MT_DEVICE_META is like PyTorch's "meta" device: the same calls check their arguments and count memory and
   communication, but there is no data. Do not dereference pointers from such a context. To learn how much memory a
   training step needs, set mt_context_desc.planned to the device that you plan for, and run one step on MT_DEVICE_META
   with a communicator from mt_comm_create_meta, in one thread. mt_arena_peak is then the arena_bytes that the step
   needs, and the device needs arena_bytes + mt_context_allocated in all. The context also keeps a trace of the step,
   from which mt_plan_step in mt_parallel.h predicts its time. To check all ranks of a program, run them as threads
   (mt_launch), each with a context on MT_DEVICE_META: they meet in every call, and the calls of the ranks are compared,
   but no data moves. Communicators over MPI, NCCL and transports of the program have no contexts on MT_DEVICE_META. */
typedef enum mt_device { MT_DEVICE_CPU = 0, MT_DEVICE_CUDA = 1, MT_DEVICE_META = 2 } mt_device;

/* Allocates memory on the context's device. Set both functions or neither. alloc returns memory aligned to `alignment`
   bytes (a power of two), or NULL when out of memory. free gets the same `bytes` as the alloc of ptr. The library
   allocates its own small structs in host memory with calloc, not with this allocator. */
typedef struct mt_allocator {
    void *(*alloc)(void *user, size_t bytes, size_t alignment);
    void (*free)(void *user, void *ptr, size_t bytes);
    void *user;
} mt_allocator;

typedef enum mt_log_level { MT_LOG_ERROR = 0, MT_LOG_WARNING = 1, MT_LOG_INFO = 2 } mt_log_level;

/* message is one sentence without a newline, and valid only during the call. A context calls log on the thread of its
   rank. mt_launch calls log on the thread that called mt_launch. */
typedef struct mt_logger {
    void (*log)(void *user, mt_log_level level, const char *message);
    void *user;
} mt_logger;

typedef struct mt_context mt_context; /* opaque */
typedef struct mt_comm mt_comm;       /* opaque */

#define MT_ARENA_DEFAULT ((size_t)256 << 20)

/* How NCCL adds, and which streams go first. A zero-initialised one means the defaults. Without effect on other
   devices than MT_DEVICE_CUDA. */
typedef struct mt_nccl_options {
    /* 1: NCCL adds in the same order in every run on the same machines: it does not use NVLS, the sums of NVSwitch, and
       gradients are no symmetric windows. The library sets NCCL_NVLS_ENABLE=0 in the environment, which NCCL reads once
       in a process: create such a context before anything in the process uses NCCL. See docs/gpus.md, "Order of sums".
       0: only in invariant mode */
    int deterministic;
    /* The most thread blocks of a collective of NCCL that overlaps in the second stream (tensor parallelism) or in the
       third (data parallelism). Each takes a multiprocessor of the GPU from the products beside it, which are chosen
       for the others. All ranks have the same. -1: as many as NCCL likes, and products are chosen for all. 0:
       MT_SECOND_CTAS and MT_THIRD_CTAS */
    int second_ctas, third_ctas;
    /* A kernel in a stream of high priority gets free multiprocessors first. The second stream, with the collectives of
       tensor parallelism, has the highest priority, and the third, with those of data parallelism, that of the compute
       stream. */
    int second_is_normal; /* 1: the second stream has the priority of the compute stream, too */
    int third_is_high;    /* 1: the third stream has the highest priority, too */
} mt_nccl_options;

#define MT_SECOND_CTAS 16
#define MT_THIRD_CTAS 8

/* A zero-initialised desc means: CPU, an arena of 256 MiB, the default allocator, no log. The library never writes to
   arena memory that is not allocated, so on a CPU the unused part of a large arena usually takes no physical memory.
   Options of operators and layers are set after the context is created: mt_gemm_set_options (mt_kernels.cuh),
   mt_parallel_set_options (mt_parallel.h). */
typedef struct mt_context_desc {
    size_t arena_bytes; /* for activations and scratch memory; ignored on MT_DEVICE_META; 0: MT_ARENA_DEFAULT */
    mt_device device;   /* 0: CPU */
    /* number of threads that compute on a CPU, 1 to 1024, see mt_parallel_for. Set mt_launch_desc.cores_per_rank to the
       same number. 0: 1 */
    int threads;
    /* Invariant mode: runs on 1, 2, 4, ..., or V tensor ranks and 1, 2, 4, ..., or V_d data ranks give the same bits. V
       and V_d are powers of two up to 1024. For context ranks see mt_context_parallel_desc.invariant. See
       docs/invariance.md. */
    int invariant;      /* V; 0: off */
    int invariant_data; /* V_d; only with `invariant`; 0: V */
    /* 1: check mode, see mt_placement. 2: also compares the values of what is replicated, see mt_check_replicas; set it
       on all ranks. 0: off; on MT_DEVICE_META as 1, but calls may read memory that nothing has written. On
       MT_DEVICE_META, 2 compares what there is without data: which rows and columns a call reads, and its random words.
       With a communicator of mt_comm_create_meta, 2 is 1 */
    int check;
    int ordinal; /* GPU number, as in cudaSetDevice; the library leaves this GPU current; ignored on other devices */
    /* advanced */
    struct CUstream_st *
        stream; /* MT_DEVICE_CUDA: the caller's cudaStream_t; must outlive the context; NULL: a new one. Must be NULL on
                   other devices */
    /* MT_DEVICE_META: the device whose memory is planned, which must be built into the program (MT_ERR_UNSUPPORTED).
       Ignored on other devices. 0: CPU */
    mt_device planned;
    /* 1: you promise that all ranks have arenas of the same size and allocate from them in the same order. The library
       then registers the arena with NCCL, see mt_arena_register. A broken promise corrupts data without an error.
       Ignored on other devices than MT_DEVICE_CUDA. 0: no promise */
    int arena_symmetric;
    /* 1: the calls of ranks over NCCL are not compared, see "communicators over NCCL". Set it on all ranks or on none.
       Ignored on other devices than MT_DEVICE_CUDA. 0: they are compared */
    int no_nccl_checks;
    mt_nccl_options nccl;
    /* for the arena and mt_context_alloc; {NULL}: posix_memalign on a CPU and cudaMalloc on a GPU, but ncclMemAlloc for
       2 MiB or more on a GPU when NCCL is built */
    mt_allocator allocator;
    /* {NULL}: silent, except that ranks over NCCL whose calls are not compared say so on stderr */
    mt_logger logger;
} mt_context_desc;

/* Creates a context. world is the communicator that rank_main was called with, another communicator of this rank, or
   NULL. world also keeps the context's error messages, so that mt_launch can print them: it must outlive the context.
   desc may be NULL (all defaults).
   Errors: MT_ERR_ARGUMENT, MT_ERR_UNSUPPORTED (device not built; headers and implementation have different versions),
   MT_ERR_MEMORY, MT_ERR_SYSTEM (CUDA failed). mt_comm_last_error(world) has the message.
   mt_context_create_version is for callers that do not compile this header, for instance in another language: version
   is the MT_VERSION_NUMBER of the structs that they use. */
MT_API mt_status mt_context_create_version(int version, mt_comm *world, const mt_context_desc *desc, mt_context **out);
static inline mt_status mt_context_create(mt_comm *world, const mt_context_desc *desc, mt_context **out) {
    return mt_context_create_version(MT_VERSION_NUMBER, world, desc, out);
}
MT_API void mt_context_destroy(mt_context *ctx); /* waits for the GPU; NULL is allowed */
MT_API mt_device mt_context_device(const mt_context *ctx);
MT_API int mt_device_count(mt_device device); /* number of GPUs (0: CUDA is not built); other devices: 1 */

/* On MT_DEVICE_CUDA, calls put their work into the context's stream, in the order of the calls.
   mt_context_synchronize waits until all work in the stream is done. On other devices it returns at once. Errors:
   MT_ERR_TIMEOUT or MT_ERR_PEER (a collective over NCCL does not end), MT_ERR_SYSTEM (CUDA failed), MT_ERR_DATA (a
   kernel has found data out of range: see mt_ids_check; this is reported once). */
MT_API mt_status mt_context_synchronize(mt_context *ctx);

/* The message of the last error of a call with ctx, or "" when no call has failed. The string belongs to ctx. When ctx
   is NULL, the message is "the context is NULL". */
MT_API const char *mt_last_error(const mt_context *ctx);

/* Allocates zero-filled, 64-byte aligned memory outside the arena, from the context's allocator. The caller frees it
   with mt_context_free and the same `bytes`. mt_context_free waits for the GPU; ptr may be NULL. On MT_DEVICE_META the
   bytes are only counted. These calls are for set-up: once a model is created, a training step does not use the
   allocator. Errors: MT_ERR_ARGUMENT, MT_ERR_MEMORY, MT_ERR_SYSTEM (CUDA failed). */
MT_API mt_status mt_context_alloc(mt_context *ctx, size_t bytes, void **out);
MT_API void mt_context_free(mt_context *ctx, void *ptr, size_t bytes);
MT_API size_t mt_context_allocated(const mt_context *ctx); /* bytes now held through mt_context_alloc */

/* The arena is a stack of memory: take a mark, allocate, work, and release the mark, which frees all allocations since
   then. Allocations are 64-byte aligned and not initialised. When the arena is too small, the allocating call returns
   MT_ERR_MEMORY, and the message says which arena_bytes would be enough for this call.
   What a forward keeps for its backward stays in the arena until a mark from before it is released. A loop in which
   some forwards have no backward releases the mark before the next forward:
       size_t mark = mt_arena_mark(ctx);            // once, before the loop
       for (...) {
           mt_arena_release(ctx, mark);             // frees what the forward before has kept
           ... forward(..., &saved) ...
           if (...) ... backward(..., &saved) ...   // a backward is optional
       }
   Then the loop never needs more of the arena than one forward with its backward. */
MT_API size_t mt_arena_mark(const mt_context *ctx);
MT_API void mt_arena_release(mt_context *ctx, size_t mark);
MT_API mt_status mt_arena_alloc(mt_context *ctx, size_t bytes, void **out);
MT_API mt_status mt_arena_tensor(mt_context *ctx, mt_dtype dtype, int64_t rows, int64_t cols, mt_tensor *out);
MT_API size_t mt_arena_peak(const mt_context *ctx); /* largest number of bytes ever in use */
MT_API void mt_arena_reset_peak(mt_context *ctx);   /* peak = bytes in use now */
