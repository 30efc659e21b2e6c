/* mt_comm.h - contexts, communicators, collectives, and Megatron's conjugate functions f and g. This is the lowest of
   the four headers of megatron.h: it includes none of the others.

   Do this:
       #define MEGATRON_IMPLEMENTATION      // in exactly one file of your program
       #include "megatron.h"                // or only "mt_comm.h"
   Every other file has only the #include. The code is C99 and C++11. It needs POSIX threads: link with -lpthread -lm.

   Two ranks, which are threads of this process, sum a vector:
       static mt_status rank_main(mt_comm *world, void *user) {
           float x[4] = {1, 2, 3, 4};
           mt_context *ctx; MT_TRY(mt_context_create(world, NULL, &ctx));
           mt_status s = mt_all_reduce(ctx, world, x, x, 4, MT_F32, MT_SUM);
           mt_context_destroy(ctx); return s; }
       int main(void) { mt_launch_desc d = {.ranks = 2}; return mt_launch(&d, rank_main, NULL); }

   To run ranks as processes, on one machine or many, call mt_world_from_env instead of mt_launch and start the program
   with torchrun, srun or mpirun. Without a launcher the same program runs its ranks as threads.

   The library starts no processes, keeps no global state, and never calls exit or abort. A rank that waits for another
   rank spins briefly and then sleeps.

   CUDA: put #define MEGATRON_IMPLEMENTATION and the #include into one .cu file and compile this file with nvcc. Your
         other C and C++ files need no CUDA Toolkit to compile. Link with -lcudart.
   NCCL: compile the .cu file with nvcc -DMT_USE_NCCL, or write #define MT_USE_NCCL before its #include.
   MPI:  compile the file with MEGATRON_IMPLEMENTATION with mpicc -DMT_USE_MPI, or write #define MT_USE_MPI before its
         #include. Your other files need no mpi.h.

   Config macros, all optional. None of them changes a public struct. MT_API has an effect in every file, the others
   only in the file with MEGATRON_IMPLEMENTATION:
       MT_API              linkage of the public functions (default: extern)
       MT_USE_ONEDNN       GEMM through oneDNN            link with -ldnnl       (see mt_kernels.cuh)
       MT_USE_CBLAS        GEMM through CBLAS             link with -lopenblas or another BLAS (see mt_kernels.cuh)
       MT_USE_NVTX         NVTX ranges for each block and collective, for Nsight; needs only CUDA Toolkit headers
       MT_USE_NCCL         collectives between GPUs       link with -lnccl       (2.19 or later; with nvcc only)
       MT_USE_MPI          collectives between processes  compile with mpicc     (MPI 3.0 or later)

   Errors. Every call that can fail returns an mt_status: MT_SUCCESS is 0, errors are negative. The context keeps a
   message with the offending values (mt_last_error). When a call has no context argument, its communicator keeps the
   message (mt_comm_last_error). A call that has neither returns only the status. A call that refuses its arguments
   changes nothing, except that it may set *out to NULL or fill it with zeros.

   Threads. A rank uses its context and its communicators from one thread at a time. All ranks of a communicator call
   the same collectives in the same order. Contexts in one process are independent of each other.
   Cancelled threads and C++ exceptions: see mt_launch.

   fork(). The new process is no rank of the old one's groups: calls on a communicator with other ranks, and all calls
   with a context on a GPU, return MT_ERR_UNSUPPORTED there. So do writes to a safetensors file, or to a directory of
   checkpoints, that the old process has begun or locked. Other work with a context on a CPU succeeds, in a group of
   one. The new process may create contexts and communicators of its own, for example with mt_launch. Destroying what it
   has inherited frees memory and does nothing else, so the old process does not notice.

   Sections of the implementation: >>types >>status >>context >>cuda >>local >>meetings >>threads >>16bit >>hash
   >>placements >>declarations >>rules >>places >>moves >>collectives >>calls >>listeners >>nccl >>mpi >>compare
   >>replicas >>conjugates >>graph >>launch */

#ifndef MT_COMM_H
#define MT_COMM_H

#include <stddef.h>
#include <stdint.h>

#ifndef MT_API
#define MT_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version ----------------------------------------------------------------------------------------------------- */

/* The version of the four headers. */
#define MT_VERSION_MAJOR 0
#define MT_VERSION_MINOR 5
#define MT_VERSION_PATCH 0
#define MT_VERSION "0.5.0"
#define MT_VERSION_NUMBER (MT_VERSION_MAJOR * 1000000 + MT_VERSION_MINOR * 1000 + MT_VERSION_PATCH)

/* Returns the MT_VERSION_NUMBER of the linked implementation. When a caller was compiled with headers of another
   version, mt_context_create returns MT_ERR_UNSUPPORTED. */
MT_API int mt_version(void);

/* ---- status ------------------------------------------------------------------------------------------------------ */

#define MT_STATUS_LIST(X)                                                                                              \
    X(MT_SUCCESS, 0, "success")                                                                                        \
    X(MT_ERR_ARGUMENT, -1, "invalid argument")                                                                         \
    X(MT_ERR_SHAPE, -2, "shapes do not fit together")                                                                  \
    X(MT_ERR_DTYPE, -3, "data type not accepted here")                                                                 \
    X(MT_ERR_UNSUPPORTED, -4, "not built or not supported")                                                            \
    X(MT_ERR_MEMORY, -5, "out of memory")                                                                              \
    X(MT_ERR_DATA, -6, "data out of range")                                                                            \
    X(MT_ERR_MISMATCH, -7, "ranks made different calls, or have different settings")                                   \
    X(MT_ERR_TIMEOUT, -8, "a rank did not arrive in time")                                                             \
    X(MT_ERR_PEER, -9, "a peer rank is gone or failed")                                                                \
    X(MT_ERR_IO, -10, "input/output error")                                                                            \
    X(MT_ERR_SYSTEM, -11, "an operating system call failed")

#define MTI_STATUS_ENUM(name, value, text) name = value,
typedef enum mt_status { MT_STATUS_LIST(MTI_STATUS_ENUM) } mt_status;
#undef MTI_STATUS_ENUM

/* Name ("MT_ERR_SHAPE") and meaning ("shapes do not fit together") of a status. Static strings, never NULL. */
MT_API const char *mt_status_name(mt_status status);
MT_API const char *mt_status_string(mt_status status);

/* MT_TRY makes the enclosing function return the status of `call`, unless this status is MT_SUCCESS. MT_KEEP is for
   clean-up, where every call must run: it stores the status of `call` in the variable `first` if `first` is still
   MT_SUCCESS. Set `first` to MT_SUCCESS before the first MT_KEEP. */
#define MT_TRY(call)                                                                                                   \
    do {                                                                                                               \
        mt_status mt_try_status_ = (call);                                                                             \
        if (mt_try_status_ != MT_SUCCESS) return mt_try_status_;                                                       \
    } while (0)
#define MT_KEEP(first, call)                                                                                           \
    do {                                                                                                               \
        mt_status mt_keep_status_ = (call);                                                                            \
        if ((first) == MT_SUCCESS) (first) = mt_keep_status_;                                                          \
    } while (0)

/* ---- defaults ---------------------------------------------------------------------------------------------------- */

/* Structs named mt_..._desc may be zero-initialised. "0: x" in the comment of a field means that 0 selects x. In
   the following fields, MT_ZERO means the number zero:
       beta1, beta2, eps                mt_optimizer_desc. Without beta1, AdamW is RMSProp with weight decay
       init_std, output_init_std        of layers, blocks and models: the first weights are 0
       scale                            mt_attention_desc: each query sees the mean of its values
       top_p                            mt_sample_desc: only the first token is kept
       ignore_index                     of the cross-entropy and of models: targets of 0 have no loss
   In the other fields zero is no useful value, and MT_ZERO is refused as out of range; in a norm, for instance, an eps
   of 0 divides by zero when all features are equal. Fields without "0: x", such as weight_decay, temperature, dropout
   and seed, take 0 as it is.
   mt_or_default is for authors of blocks: it returns the number that a field means, where 0 selects `otherwise`. */
#define MT_ZERO INT32_MIN
static inline float mt_or_default(float value, float otherwise) {
    return value == (float)MT_ZERO ? 0.0f : value == 0.0f ? otherwise : value;
}

/* ---- data types and tensor views --------------------------------------------------------------------------------- */

/* Collectives can move all five types and reduce all except MT_U8. A reduction of MT_BF16 or MT_F16 adds in float and
   rounds the sum once; over NCCL, NCCL rounds at each rank. The operators of mt_kernels.cuh take matrices of the three
   float types. */
typedef enum mt_dtype { MT_F32 = 0, MT_BF16 = 1, MT_F16 = 2, MT_I32 = 3, MT_U8 = 4 } mt_dtype;
#define MT_DTYPE_WORDS "MT_F32 MT_BF16 MT_F16 MT_I32 MT_U8" /* see mt_check_enum in mt_kernels.cuh */

MT_API size_t mt_dtype_size(mt_dtype dtype);      /* bytes per element; 0 for an unknown type */
MT_API const char *mt_dtype_name(mt_dtype dtype); /* "f32", "bf16", ... */

/* A view of a row-major matrix. It does not own the memory. Element (i, j) is data[i * ld + j]. Activations are
   [tokens, features]. Weights are [out_features, in_features], as in PyTorch. A vector is one row. */
typedef struct mt_tensor {
    void *data;
    int64_t rows, cols;
    int64_t ld; /* leading dimension in elements, >= cols; 0: cols */
    mt_dtype dtype;
} mt_tensor;

/* Views of contiguous memory (ld == cols). */
MT_API mt_tensor mt_tensor_make(const void *data, mt_dtype dtype, int64_t rows, int64_t cols);
MT_API mt_tensor mt_tensor_f32(const float *data, int64_t rows, int64_t cols);

/* Returns a view of rows or columns [first, first + count) of t, without a copy. The caller must keep the range inside
   t: these functions do not check it. A negative first or count, or an offset beyond int64_t, gives a view with
   rows == -1. Every call that gets such a view returns MT_ERR_SHAPE. */
MT_API mt_tensor mt_tensor_rows(mt_tensor t, int64_t first, int64_t count);
MT_API mt_tensor mt_tensor_cols(mt_tensor t, int64_t first, int64_t count);

/* ---- context: device, allocator, logger, arena ------------------------------------------------------------------- */

/* MT_DEVICE_META is like PyTorch's "meta" device: the same calls check their arguments and count memory and
   communication, but there is no data. Do not dereference pointers from such a context. To learn how much memory a
   training step needs, set mt_context_desc.planned to the device that you plan for, and run one step on MT_DEVICE_META
   with a communicator from mt_comm_create_meta, in one thread. mt_arena_peak is then the arena_bytes that the step
   needs, and the device needs arena_bytes + mt_context_allocated in all. The context also keeps a trace of the step,
   from which mt_plan_step in mt_parallel.h predicts its time. To check all ranks of a program, run them as threads
   (mt_launch), each with a context on MT_DEVICE_META: they meet in every call, and the calls of the ranks are compared,
   but no data moves. Communicators over MPI and NCCL have no contexts on MT_DEVICE_META. */
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
       and V_d are powers of two up to 1024. See docs/invariance.md. */
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
MT_API int mt_device_count(mt_device device);           /* number of GPUs (0: CUDA is not built); other devices: 1 */
MT_API int mt_context_invariant(const mt_context *ctx); /* V, or 0 */
MT_API int mt_context_invariant_data(const mt_context *ctx); /* V_d, or 0 */

/* On MT_DEVICE_CUDA, calls put their work into the context's stream, in the order of the calls.
   mt_context_synchronize waits until all work in the stream is done. On other devices it returns at once. Errors:
   MT_ERR_TIMEOUT or MT_ERR_PEER (a collective over NCCL does not end), MT_ERR_SYSTEM (CUDA failed), MT_ERR_DATA (a
   kernel has found data out of range: see mt_ids_check; this is reported once). */
MT_API mt_status mt_context_synchronize(mt_context *ctx);
MT_API struct CUstream_st *mt_context_stream(const mt_context *ctx); /* a cudaStream_t; NULL on other devices */

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

/* ---- communicators ----------------------------------------------------------------------------------------------- */

/* Timeouts are in seconds. A rank that waits counts only the time in which its own process runs. If its process is
   stopped (Ctrl-Z, SIGSTOP, a suspended job), the whole stop counts as at most an eighth of the timeout and at most
   2 s. See docs/many-ranks.md, "When a rank dies". */
#define MT_TIMEOUT_DEFAULT 600.0

/* Creates `ranks` (1 to 1024) communicators that form one group of threads of this process, as ncclCommInitAll does.
   comms is an array of `ranks` pointers: the thread of rank r uses and destroys comms[r]. A group of one does not
   communicate. timeout_s <= 0: MT_TIMEOUT_DEFAULT.
   Errors: MT_ERR_ARGUMENT, MT_ERR_MEMORY. */
MT_API mt_status mt_comm_create_local(int ranks, double timeout_s, mt_comm **comms);

/* Creates a communicator for contexts on MT_DEVICE_META: rank `rank` of a group of `size`, whose other ranks do not
   exist. Its collectives check their arguments and count calls and bytes (mt_comm_ledger) but move nothing.
   Errors: MT_ERR_ARGUMENT, MT_ERR_MEMORY. */
MT_API mt_status mt_comm_create_meta(int size, int rank, mt_comm **out);

/* Says how far the last rank of a meta communicator is from its first one, counted in ranks of the whole program.
   mt_grid_create sets this span for its groups. A prediction of time needs it, because ranks that are far apart are in
   different nodes. At first it is size - 1: all ranks are neighbours. A smaller span is ignored. */
MT_API void mt_comm_set_span(mt_comm *comm, int span);

/* Splits comm into groups, as MPI_Comm_split does. Ranks with the same color form a group, ordered by key, then by rank
   in comm. color < 0 gives *out = NULL. The new group has the timeout of comm. Collective over comm. A meta
   communicator cannot be split: use mt_comm_create_meta. Errors: MT_ERR_MEMORY, and those of a collective. */
MT_API mt_status mt_comm_split(mt_comm *comm, int color, int key, mt_comm **out);

/* Destroys a communicator: this rank leaves the group. Peers that still wait for this rank get MT_ERR_PEER. NULL is
   allowed. When ranks are threads, the call does not wait. Over NCCL it waits for the communicator's work in the
   stream, at most for the timeout. Over MPI, the communicator from mt_comm_create_mpi and the groups split from it
   belong together: only the call that destroys the last of them waits. It waits until every other rank has also
   destroyed its last one, at most for the timeout, or for 2 s after an error. */
MT_API void mt_comm_destroy(mt_comm *comm);

/* Properties of a communicator. mt_comm_last_error returns the message of the last error, or "" when no call has
   failed. The strings belong to comm. When comm is NULL, the rank is 0, the size 1, the name "" and the message "the
   communicator is NULL". */
MT_API int mt_comm_rank(const mt_comm *comm);
MT_API int mt_comm_size(const mt_comm *comm);
MT_API int mt_comm_is_meta(const mt_comm *comm);
MT_API void mt_comm_set_name(mt_comm *comm, const char *name); /* used in messages; keeps 15 characters */
MT_API const char *mt_comm_name(const mt_comm *comm);
MT_API const char *mt_comm_last_error(const mt_comm *comm);

/* Returns the number of this rank among the ranks of its machine, from 0, for choosing a GPU. For threads it is the
   rank in the world. Over MPI it counts the ranks with the same processor name. For other processes of
   mt_world_from_env it is the launcher's local rank, or the rank when the launcher sets none. mt_comm_split and
   mt_comm_create_for pass the number on. After mt_comm_create_nccl and mt_comm_create_nccl_id it is the rank. */
MT_API int mt_comm_local_rank(const mt_comm *comm);

/* ---- communicators over NCCL: ranks with a GPU each -------------------------------------------------------------- */

/* A communicator over NCCL belongs to one context on MT_DEVICE_CUDA. Groups split from it belong to the same context.
   Destroy these communicators before the context, and in the same order on every rank. See docs/gpus.md, "Communicators
   over NCCL".

   A collective returns as soon as its work is in the context's stream. Only mt_barrier waits until the work is done.
   When a rank is late or gone, the other ranks get MT_ERR_TIMEOUT or MT_ERR_PEER from a collective or from the call
   that waits for the stream (such as mt_context_synchronize), at most timeout_s after this call has begun to wait.

   NCCL does not compare the calls of ranks, so the library does, unless mt_context_desc.no_nccl_checks is set. The
   ranks tell rank 0 of the communicator their calls over TCP, behind the calls, which do not wait for it. When calls
   differ, or a rank has left whose call is missing, every rank gets MT_ERR_MISMATCH or MT_ERR_PEER, usually a few
   milliseconds later: from its next call on the communicator, or from the call that waits for the stream. Until then
   results may be wrong, and calls that differ just before mt_comm_destroy may pass without an error. The calls that a
   graph records are compared while they are recorded. When the ranks cannot connect, or have no memory
   for the calls, there is a warning, and calls that differ time out or give undefined results. See docs/gpus.md.

   The library's own NCCL communicators are blocking, so NCCL starts no thread for a collective. A call may wait for
   peers inside NCCL, for example while NCCL connects the ranks in the first calls. A context with such communicators
   has one thread, the watchdog, which aborts a call that lasts longer than timeout_s. Otherwise it sleeps. Another
   thread, the comparer, sends and compares the calls.

   After MT_ERR_MISMATCH, MT_ERR_TIMEOUT or MT_ERR_PEER, destroy the communicator and all other communicators of the
   context that had work in the stream: every other call on them fails. The library aborts the NCCL communicators that
   it made. It never aborts or destroys the caller's ncclComm_t: call ncclCommAbort after mt_comm_destroy and before
   mt_context_destroy.

   NCCL adds in its own order and rounds bf16 and f16 at each rank. For floats in invariant mode, and for MT_MAX of
   floats in any mode, the library uses NCCL only to move the data. It then reduces the data itself, in the tree that
   communicators without NCCL use (see "collectives"). Such a reduction works for up to 64 ranks and takes up to 4 MiB
   of the arena during the call. */
struct ncclComm; /* ncclComm_t is struct ncclComm * */
typedef struct mt_nccl_id {
    char bytes[128];
} mt_nccl_id; /* an ncclUniqueId: one rank makes it, all ranks use it */

/* Creates a communicator with the same ranks as `world`, over NCCL where possible. ctx is this rank's context. *out has
   the name and the timeout of world; the caller destroys it, and world stays usable. Collective over world, which comes
   from mt_world_from_env, mt_launch, mt_comm_create_local or mt_comm_create_mpi, or was split from such a communicator.
   Ranks that are threads: *out is over NCCL when NCCL is built and each rank has its own GPU. Otherwise *out is a new
   group of threads, like world.
   Processes over MPI: *out is over NCCL when NCCL is built and all contexts are on GPUs. Each process then needs its
   own GPU, or NCCL fails. Otherwise *out is over MPI, like world.
   Processes without MPI: *out is over NCCL. The ranks connect through NCCL_COMM_ID=host:port, an environment variable
   that mt_world_from_env sets when it can (see docs/many-ranks.md, "Launchers").
   Errors: MT_ERR_ARGUMENT (world is over NCCL or meta; processes without MPI: NCCL_COMM_ID is not set),
   MT_ERR_UNSUPPORTED (processes without MPI: the context is not on a GPU, or NCCL is not built), and those of
   mt_comm_split and mt_comm_create_nccl_id. */
MT_API mt_status mt_comm_create_for(mt_context *ctx, mt_comm *world, mt_comm **out);

/* Creates a communicator from the caller's ncclComm_t, which must be for the GPU of ctx. Collective, because the ranks
   exchange their versions and addresses; with mt_context_desc.no_nccl_checks the call does not communicate, and the
   first mt_comm_split compares the versions. The ncclComm_t stays the caller's and must outlive *out. It may be
   blocking or non-blocking. With a blocking ncclComm_t, this call, the first collectives and mt_comm_split wait without
   a timeout while NCCL connects to the peers. With a non-blocking one NCCL starts a thread for each collective. Groups
   that are split from *out are the library's own. timeout_s <= 0: MT_TIMEOUT_DEFAULT.
   Errors: as mt_comm_create_nccl_id. */
MT_API mt_status mt_comm_create_nccl(mt_context *ctx, struct ncclComm *nccl, double timeout_s, mt_comm **out);

/* Creates a communicator of `ranks` threads or processes from an id, as ncclCommInitRank does. Collective: each rank
   waits for all others. Call mt_nccl_unique_id on one rank and send the id to the others. Or set NCCL_COMM_ID=host:port
   in the environment and call mt_nccl_unique_id on every rank: all get the same id. A group of one makes no NCCL
   communicator; a larger one makes two, of which the first only serves to create the second and its splits.
   timeout_s <= 0: MT_TIMEOUT_DEFAULT.
   Errors: MT_ERR_ARGUMENT, MT_ERR_UNSUPPORTED (NCCL is not built), MT_ERR_MISMATCH (a rank is of another version of
   megatron.h), MT_ERR_MEMORY, MT_ERR_TIMEOUT, MT_ERR_PEER, MT_ERR_SYSTEM (CUDA or NCCL failed). */
MT_API mt_status mt_nccl_unique_id(mt_context *ctx, mt_nccl_id *out);
MT_API mt_status mt_comm_create_nccl_id(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                        mt_comm **out);

/* ---- communicators over MPI: ranks that are processes, on CPUs --------------------------------------------------- */

/* Creates a communicator over MPI for contexts on CPUs, in a program that calls MPI itself. mt_world_from_env does this
   for all other programs. mpi_comm is the address of the caller's MPI_Comm. The library duplicates the MPI_Comm; the
   original stays the caller's. timeout_s <= 0: MT_TIMEOUT_DEFAULT. Collective over the MPI_Comm. Call it after
   MPI_Init_thread with MPI_THREAD_FUNNELED or more. Make this call and all calls on *out from the thread that may call
   MPI.

   When a rank has left or failed, or MPI returns an error, the others get MT_ERR_PEER at once. When a rank is killed,
   stopped or stuck, they get MT_ERR_TIMEOUT after timeout_s. After an error in the middle of a transfer, MPI may still
   hold the buffers of the call: do not free them, do not call MPI_Finalize, and end the process (MPI_Abort is allowed).
   See docs/many-ranks.md, "Communicators over MPI".

   Errors (there is no communicator yet that could have a message): MT_ERR_UNSUPPORTED (not built: compile with mpicc
   -DMT_USE_MPI; more than 1024 ranks; or this process was forked from a rank without exec, which is found on Linux as
   long as it has one thread), MT_ERR_ARGUMENT (NULL, MPI_COMM_NULL, MPI not initialized or already finalized),
   MT_ERR_MISMATCH (a rank is of another version of megatron.h), MT_ERR_TIMEOUT (a rank did not call in time),
   MT_ERR_MEMORY, MT_ERR_SYSTEM (MPI failed). A sentence about versions or a fork goes to stderr. */
MT_API mt_status mt_comm_create_mpi(const void *mpi_comm, double timeout_s, mt_comm **out);

/* ---- the ledger: calls and bytes of a communicator --------------------------------------------------------------- */

typedef enum mt_collective {
    MT_ALL_REDUCE = 0,
    MT_ALL_GATHER = 1,
    MT_REDUCE_SCATTER = 2,
    MT_BROADCAST = 3,
    MT_SEND = 4,
    MT_RECV = 5,
    MT_BARRIER = 6,
    MT_COLLECTIVE_COUNT = 7
} mt_collective;

MT_API const char *mt_collective_name(mt_collective kind); /* "all_reduce", ... */

/* The ledger counts this rank's successful calls and their bytes, per kind, since the communicator was created or the
   ledger was reset. The bytes of a call are those of the whole logical tensor: count * element size for all_reduce,
   broadcast, send and recv; size * sendcount * element size for all_gather; size * recvcount * element size for
   reduce_scatter. mt_send_recv counts as a send and a recv. The ledger of a group of one stays zero. */
typedef struct mt_ledger {
    uint64_t calls[MT_COLLECTIVE_COUNT];
    uint64_t bytes[MT_COLLECTIVE_COUNT];
} mt_ledger;

MT_API mt_ledger mt_comm_ledger(const mt_comm *comm);
MT_API void mt_comm_ledger_reset(mt_comm *comm);

/* ---- collectives ------------------------------------------------------------------------------------------------- */

/* The collectives compute what NCCL's do. Buffers are in the memory of the context's device. Counts are in elements.
   Reductions add in a fixed binary tree over the ranks, ((0+1)+(2+3))+..., so the same inputs always give the same
   bits, on every rank. Over NCCL, NCCL chooses the order; see "communicators over NCCL".
   On a CPU a collective returns when its result is in recvbuf. On a GPU it returns when its work is in the context's
   stream; only mt_barrier waits until this work is done. Without NCCL, the threads wait on the host for each other.
   Buffers may overlap only in place, by NCCL's rule: all_reduce and broadcast when sendbuf == recvbuf; all_gather when
   sendbuf == recvbuf + rank * sendcount; reduce_scatter when recvbuf == sendbuf + rank * recvcount.
   Errors:
   MT_ERR_ARGUMENT, MT_ERR_DTYPE (reduction of MT_U8)
   MT_ERR_MISMATCH     ranks made different calls
   MT_ERR_TIMEOUT      a rank did not call in time
   MT_ERR_PEER         a rank left the group or failed
   MT_ERR_UNSUPPORTED  the ranks are not connected (see mt_world_from_env), or are over MPI with contexts on GPUs;
                       this process was forked after comm was created;
                       on GPUs also: a reduction in the tree over more than 64 ranks, or between GPUs of this process
                       that cannot access each other's memory
   MT_ERR_MEMORY       over NCCL: the arena is too small for the scratch memory of the call
   MT_ERR_SYSTEM       CUDA or NCCL failed; an error of work in the stream is returned by a later call of this rank,
                       at the latest by one that waits for the stream
   When one rank gets MT_ERR_MISMATCH, MT_ERR_TIMEOUT or MT_ERR_PEER, every rank of the group gets one of these three
   in its current or next call. The message names the calls and, where they are known, the ranks. The communicator can
   then only be destroyed. A rank that gets MT_ERR_ARGUMENT or MT_ERR_DTYPE has not joined the call, and may call again.
   The others wait for it, and get one of the three errors when it makes another call, leaves or is late. */
typedef enum mt_op { MT_SUM = 0, MT_MAX = 1 } mt_op;

MT_API mt_status mt_all_reduce(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t count,
                               mt_dtype dtype, mt_op op);
MT_API mt_status mt_all_gather(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t sendcount,
                               mt_dtype dtype);
MT_API mt_status mt_reduce_scatter(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t recvcount,
                                   mt_dtype dtype, mt_op op);
MT_API mt_status mt_broadcast(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t count,
                              mt_dtype dtype, int root);
MT_API mt_status mt_barrier(mt_context *ctx, mt_comm *comm);

/* Point to point. A send and its receive have the same count and dtype, else both return MT_ERR_MISMATCH. On a CPU a
   call returns when its buffers may be reused. On a GPU it returns as soon as its work is in the stream: only later
   work in the stream may reuse the buffers. mt_send_recv sends to dst and receives from src at the same time, so rings
   and pipelines do not deadlock. Its buffers must not overlap. When dst and src are this rank itself, the call copies,
   and the buffers may be the same. dst == -1 sends nothing and ignores sendcount; src == -1 receives nothing and
   ignores recvcount. When the other rank is in a collective of the same communicator, both get an error: between
   threads MT_ERR_MISMATCH at once, over MPI MT_ERR_TIMEOUT. */
MT_API mt_status mt_send(mt_context *ctx, mt_comm *comm, const void *sendbuf, size_t count, mt_dtype dtype, int dst);
MT_API mt_status mt_recv(mt_context *ctx, mt_comm *comm, void *recvbuf, size_t count, mt_dtype dtype, int src);
MT_API mt_status mt_send_recv(mt_context *ctx, mt_comm *comm, const void *sendbuf, size_t sendcount, int dst,
                              void *recvbuf, size_t recvcount, int src, mt_dtype dtype);

/* ---- comparing settings between ranks ---------------------------------------------------------------------------- */

/* A setting that should have the same value on all ranks, for instance a command-line flag, or a file name with a hash
   of the file's content as value. The strings belong to the caller and are needed only during mt_comm_compare. */
typedef struct mt_setting {
    const char *name, *value;
} mt_setting;

/* Compares settings between ranks, so that processes started with different flags or data do not train together.
   mt_params_init and mt_optimizer_create compare their own arguments this way. A program compares its flags:
       char lr[32]; snprintf(lr, sizeof lr, "%.9g", flags.lr);
       mt_setting told[] = {{"--lr", lr}, {"--data", hash_of_data}};
       MT_TRY(mt_comm_compare(ctx, world, "my_program", 0, told, 2));
   All ranks with the same number `group` must pass the same settings, in the same order. Pass 0 on every rank when all
   ranks must agree. When settings differ, every rank of comm gets MT_ERR_MISMATCH, also the ranks of other groups. The
   message starts with `what` and names the first setting that differs, two of its values and their ranks. comm stays
   usable. Collective over comm: an all_gather of 16 bytes per rank, which the ledger counts. The settings themselves
   are sent only when their hashes differ. In a group of one and on a meta communicator nothing is sent.
   Errors: MT_ERR_ARGUMENT (NULL, negative count), MT_ERR_MEMORY, and those of a collective. */
MT_API mt_status mt_comm_compare(mt_context *ctx, mt_comm *comm, const char *what, int group,
                                 const mt_setting *settings, int count);

/* Gathers `bytes` bytes of host memory of each rank into all [ranks, bytes], also in host memory, on every rank.
   Collective over comm: an all_gather, which the ledger does not count, through memory on the device. On a meta
   communicator, the parts of other ranks become 0. Errors: MT_ERR_ARGUMENT (NULL, bytes is 0 or too large),
   MT_ERR_MEMORY, and those of a collective. */
MT_API mt_status mt_comm_gather_host(mt_context *ctx, mt_comm *comm, const void *mine, size_t bytes, void *all);

/* ---- placements: what the ranks of a group hold ------------------------------------------------------------------ */

/* How a tensor is distributed over the ranks of a group. The names are those of PyTorch's DTensor: Replicate, Shard(0),
   Shard(1), Partial. A parameter of a registry has one of the first three (mt_param_desc.placement). */
typedef enum mt_placement {
    MT_REPLICATED = 0, /* every rank has the same values */
    MT_SPLIT_ROWS = 1, /* every rank has its own rows, or rows of its own tokens */
    MT_SPLIT_COLS = 2, /* every rank has its own columns */
    MT_PARTIAL = 3,    /* every rank has a term of a sum over the ranks; the sum has not been computed yet */
    MT_UNDECLARED = 4  /* nothing is known */
} mt_placement;

/* "replicated", "split by rows", "split by columns", "partial" or "not known", as messages say it. */
MT_API const char *mt_placement_name(mt_placement placement);

/* Check mode (mt_context_desc.check) finds wrong parallel programs before they compute anything. The context keeps the
   placement of every tensor that the library writes, for each group of more than one rank (at most 6 groups). A call
   whose inputs do not fit together returns MT_ERR_ARGUMENT and computes nothing. The message names the call and its
   layer, the operand, what it is and where it became so, what it must be, and the call that makes it so. See
   docs/checking.md for the rules.
   Most mistakes need only a context on MT_DEVICE_META, one rank of mt_comm_create_meta, and one step.

   mt_declare says what a tensor is that the library has not written, such as inputs, or memory that a kernel of the
   caller has filled. It replaces what was known about t. Calls accept a tensor that is MT_UNDECLARED, but not memory of
   the arena that nothing has written and that was not declared. mt_placement_of returns what is known about t, for the
   group `comm`; it is MT_UNDECLARED when check mode is off, when nothing is known, and when the parts of t differ.
   With comm NULL and MT_UNDECLARED, mt_declare forgets what is known about t in all groups. In a group of one it only
   says that the program has written t, and when check mode is off, it does nothing. Errors: MT_ERR_ARGUMENT (placement
   is out of range, or comm is NULL with another placement, or t is a parameter of another placement), MT_ERR_MEMORY. */
MT_API mt_status mt_declare(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement);
MT_API mt_placement mt_placement_of(const mt_context *ctx, const mt_comm *comm, mt_tensor t);

/* ---- the conjugates (arXiv 1909.08053, figure 3; sequence parallelism: arXiv 2205.05198, figure 4) --------------- */

/* The functions have Megatron's names. Views must be contiguous (ld == cols). dx and dy are gradients. x and y have the
   same type: any type, except MT_U8 where values are summed. In a group of one, the functions with one view do nothing,
   and those with x and y copy x to y, unless y is x. Errors: MT_ERR_SHAPE (also when the split dimension is not a
   multiple of the number of ranks; there is no padding), MT_ERR_DTYPE, and those of a collective.

   f, copy_to_tensor_region:       forward: identity;             backward: all-reduce, in place.
   g, reduce_from_tensor_region:   forward: all-reduce, in place; backward: identity.
   The views have any shape. The identities only check their arguments; they exist so that code can follow the paper. */
MT_API mt_status mt_copy_to_tensor_region_forward(mt_context *ctx, mt_comm *comm, mt_tensor x);
MT_API mt_status mt_copy_to_tensor_region_backward(mt_context *ctx, mt_comm *comm, mt_tensor dx);
MT_API mt_status mt_reduce_from_tensor_region_forward(mt_context *ctx, mt_comm *comm, mt_tensor y);
MT_API mt_status mt_reduce_from_tensor_region_backward(mt_context *ctx, mt_comm *comm, mt_tensor dy);

/* These two split and join the last dimension (features). size is the number of ranks of comm. x and y must not
   overlap, except in a group of one. The backward of scatter is gather, and the backward of gather is scatter.
   scatter:  x [tokens, features] -> y [tokens, features / size], this rank's columns of x; no communication.
   gather:   x [tokens, features / size] -> y [tokens, features], an all-gather. It takes scratch memory of the size of
             y from the arena during the call. */
MT_API mt_status mt_scatter_to_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);
MT_API mt_status mt_gather_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);

/* These three split and join the first dimension (tokens), for sequence parallelism. One view has all tokens, the other
   tokens / size rows. The smaller view may be this rank's rows of the larger one: the call then works in place. Other
   overlaps are not allowed.
   scatter:         x [tokens, h] -> y [tokens / size, h], this rank's rows of x; no communication. Its backward is
                    gather.
   gather:          x [tokens / size, h] -> y [tokens, h], an all-gather. Its backward is reduce_scatter when the ranks
                    use y for different shards of a layer (tensor parallelism), or scatter when all ranks compute the
                    same from y.
   reduce_scatter:  x [tokens, h], each rank's partial sum -> y [tokens / size, h], this rank's rows of the sum. Its
                    backward is gather. */
MT_API mt_status mt_scatter_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);
MT_API mt_status mt_gather_from_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);
MT_API mt_status mt_reduce_scatter_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);

/* These three do the work of mt_gather_from_sequence_region, mt_reduce_scatter_to_sequence_region and
   mt_reduce_from_tensor_region_forward in several calls, one for each chunk of rows. Every call gets the whole views x
   and y, as those functions do. When the smaller view of gather and reduce_scatter has n rows, a call handles its rows
   [first, first + rows), which are rows r * n + first to r * n + first + rows - 1 of the larger view for each rank r.
   reduce handles rows [first, first + rows) of y. All ranks use the same chunks. The first one has first == 0, each
   further one begins where the previous one ends, and together they have all rows. The ledger counts all chunks
   together as one call. */
MT_API mt_status mt_gather_rows_from_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y,
                                                     int64_t first, int64_t rows);
MT_API mt_status mt_reduce_scatter_rows_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y,
                                                           int64_t first, int64_t rows);
MT_API mt_status mt_reduce_rows_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor y, int64_t first,
                                                   int64_t rows);

/* Overlaps communication with computation on a GPU:
       MT_TRY(mt_overlap_begin(ctx, comm, MT_STREAM_SECOND));
       MT_TRY(mt_overlap_end(ctx, 0, mt_all_reduce(ctx, comm, x, x, n, MT_F32, MT_SUM)));      // ticket 0
       ...                                       // calls here run at the same time; they must not use x
       MT_TRY(mt_overlap_wait(ctx, 0));          // later calls see the sum in x
   Between mt_overlap_begin and mt_overlap_end, all work of ctx goes into another stream of the context, and
   mt_context_stream returns that stream. The work runs after what is already in the context's own stream.
   mt_overlap_end gives the work a number of your choice, the ticket; mt_overlap_wait makes later calls wait for the
   work with this ticket. mt_overlap_end returns `status` when this is an error; the overlap ends in any case. For
   buffers in the arena, take the mark before begin and release it after the wait. When work overlaps, mt_arena_release
   between begin and end is ignored: what was taken there is released with the mark from before begin.
   On other devices, in invariant mode and when comm is a group of one, the same calls are allowed, but nothing
   overlaps. A wait for a ticket without work does nothing.
   Errors: MT_ERR_ARGUMENT (no such stream; begin was called twice without end; while work overlaps, the ticket of
   mt_overlap_end is not one of its stream), MT_ERR_SYSTEM (CUDA failed).

   The second stream has the tickets 0 to MT_OVERLAP_TICKETS - 1, and mt_overlap_wait_all waits for all of them. The
   third stream is for longer transfers, for which the second stream should not wait. Its only ticket is
   MT_OVERLAP_TICKET_THIRD, and only mt_overlap_wait waits for it. */
typedef enum mt_stream {
    MT_STREAM_NONE = 0, /* no overlap: the context's own stream */
    MT_STREAM_SECOND = 1,
    MT_STREAM_THIRD = 2
} mt_stream;

#define MT_OVERLAP_TICKETS 8
#define MT_OVERLAP_TICKET_THIRD MT_OVERLAP_TICKETS

MT_API mt_status mt_overlap_begin(mt_context *ctx, const mt_comm *comm, mt_stream stream);
MT_API mt_status mt_overlap_end(mt_context *ctx, int ticket, mt_status status);
MT_API mt_status mt_overlap_wait(mt_context *ctx, int ticket);
MT_API mt_status mt_overlap_wait_all(mt_context *ctx);
MT_API int mt_overlap_is_planned(const mt_context *ctx); /* 1: on a GPU, or planned for a GPU on MT_DEVICE_META */

/* ---- the trace: what a step would do, on MT_DEVICE_META ---------------------------------------------------------- */

/* The kinds of work in a trace. They differ in what their time depends on. */
typedef enum mt_work {
    MT_WORK_MEMORY = 0,        /* an operator that mainly reads and writes memory: its bytes */
    MT_WORK_GEMM = 1,          /* a matrix product: its FLOPs and shape */
    MT_WORK_ATTENTION = 2,     /* scaled dot-product attention: its FLOPs */
    MT_WORK_OPTIMIZER = 3,     /* norm of the gradients and AdamW: its bytes */
    MT_WORK_COMMUNICATION = 4, /* a collective, a send or a receive: its bytes and group */
    MT_WORK_OVERLAP_BEGIN = 5, /* mt_overlap_begin, _end and _wait where they would overlap on a GPU */
    MT_WORK_OVERLAP_END = 6,
    MT_WORK_OVERLAP_WAIT = 7,
    MT_WORK_COUNT = 8
} mt_work;

/* One operator or communication. Fields that a kind of work does not have are 0. */
typedef struct mt_trace_entry {
    mt_work work;
    const char *name; /* of the function ("mt_gemm") or of the collective ("all_reduce"); must outlive the trace */
    mt_dtype dtype;   /* of the operands or of the buffer */
    /* Floating-point operations: two for each multiply-add of a product. Attention counts the scores that the mask and
       the window allow, for two products in forward and four in backward. That backward computes the scores again does
       not count. Key lengths and packed documents are data, so all keys count. */
    double flops;
    double bytes;    /* read plus written by an operator, without scratch memory; for communication as in mt_ledger */
    int64_t m, n, k; /* MT_WORK_GEMM: the product of an [m, k] and a [k, n] matrix */
    int recomputed;  /* 1: forward work that a backward does again, see mt_trace_recompute */
    int ranks, span; /* MT_WORK_COMMUNICATION: size of the group, and its span as in mt_comm_set_span */
    mt_collective collective;
    int to, from;     /* MT_SEND, MT_RECV: ranks of the group, -1: none. An mt_send_recv that sends is an MT_SEND */
    mt_stream stream; /* MT_WORK_OVERLAP_BEGIN: the stream of the entries until MT_WORK_OVERLAP_END */
    int ticket;       /* MT_WORK_OVERLAP_END, MT_WORK_OVERLAP_WAIT */
} mt_trace_entry;

typedef struct mt_trace {
    mt_trace_entry *entries; /* in the order of the calls */
    size_t count;
} mt_trace;

/* A context on MT_DEVICE_META appends an entry to its trace for each operator, and for each collective, send and
   receive in a group of more than one rank. Each chunk of a collective has an entry of its own. mt_context_take_trace
   moves the trace to *out, which the caller frees with mt_trace_free. The trace of the context is then empty. Before a
   step, take the trace and free it; after the step, take it again. On other devices *out is empty.
   Errors: MT_ERR_ARGUMENT; MT_ERR_MEMORY (there was no memory for an entry: *out is empty). */
MT_API mt_status mt_context_take_trace(mt_context *ctx, mt_trace *out);
MT_API void mt_trace_free(mt_trace *trace); /* NULL is allowed */

/* For authors of operators and blocks. They do nothing on other devices than MT_DEVICE_META.
   mt_trace_add        appends a copy of *entry, in which it sets `recomputed`.
   mt_trace_recompute  (ctx, 1) marks the entries that follow as recomputed, until (ctx, 0). Pairs may be nested. */
MT_API void mt_trace_add(mt_context *ctx, const mt_trace_entry *entry);
MT_API void mt_trace_recompute(mt_context *ctx, int recomputes);

/* ---- CUDA graphs: a step that is recorded once ------------------------------------------------------------------- */

/* A training step starts hundreds of kernels, and each start costs the host a few microseconds. A CUDA graph records
   the step once, and then starts all of it with one call:
       mt_graph *graph = NULL;
       for (n = 0; n < steps; n++) {
           ... mt_upload the token ids; mt_step_begin (mt_parallel.h) ...
           if (n == 0) MT_TRY(run_step(...));                        // forward, backward, mt_step_update; see below
           if (n == 1) {
               MT_TRY(mt_graph_begin(ctx, comm));
               status = run_step(...);                               // only recorded: the GPU does nothing
               MT_KEEP(status, mt_graph_end(ctx, status == MT_SUCCESS ? &graph : NULL));
               MT_TRY(status);
           }
           if (n > 0) MT_TRY(mt_graph_launch(ctx, graph));           // runs what was recorded
       }
       mt_graph_destroy(ctx, graph);
   A launch computes the same bits as the calls would. It uses the addresses and the numbers that the recorded calls
   got. So a number that changes from step to step must be in memory of the device: upload it before the launch. A
   launch overwrites the arena memory that the recorded calls took, also when its mark has been released since. Do not
   keep other data there across a launch. Run the step once before you record it, because the first run chooses the
   algorithms of products by measurement, allocates their workspace, and connects the ranks of NCCL.

   comm contains all ranks that the step communicates with. It may be NULL for one rank, and over NCCL, where each rank
   records and launches a graph of its own. Ranks that are threads without NCCL, for instance on one GPU, record one
   graph together: there mt_graph_begin, mt_graph_end and mt_graph_launch are collectives of comm. Only one of these
   ranks records at a time; the library switches between them when a rank waits in a collective, a send or a receive.
   An error of a collective that they record breaks comm, too.

   Between mt_graph_begin and mt_graph_end the host cannot wait for the GPU, upload or allocate. MT_ERR_UNSUPPORTED is
   returned by mt_context_synchronize, mt_upload, mt_download, mt_context_alloc, mt_barrier, and every call that needs
   one of them, such as mt_grad_norm (use mt_step_update) and mt_hash. The recording goes on; work that such a call has
   put into the stream before it fails is a part of it. Do not free memory, and do not create or destroy communicators
   there. The ledgers count the recorded calls, not the launches. mt_graph_begin, mt_graph_end and mt_graph_launch wait
   for all overlaps, as mt_overlap_wait does.

   Only MT_DEVICE_CUDA records graphs; MT_ERR_UNSUPPORTED on a CPU. On MT_DEVICE_META recorded calls are planned like
   others, and a launch does nothing. */
typedef struct mt_graph mt_graph; /* opaque */

/* mt_graph_begin: MT_ERR_ARGUMENT (this context already records; an overlap has not ended).
   mt_graph_end: out NULL discards what was recorded, as after an error. The caller owns *out, and destroys it before
     ctx and before the communicators and the memory that the recorded calls used.
     When one rank of a common graph discards it, the others get MT_ERR_PEER, and comm stays usable. MT_ERR_ARGUMENT
     (this context does not record; an overlap has not ended: then the recording goes on).
   mt_graph_launch: puts the work into the context's stream and does not wait. A launch runs after earlier work in the
     stream, also after an earlier launch. MT_ERR_PEER: a communicator over NCCL of ctx has failed or has been destroyed
     since the recording; destroy the graph. MT_ERR_ARGUMENT (this context records; graph is NULL).
   mt_graph_destroy: waits for this rank's stream; graph may be NULL. Ranks of a common graph destroy it after
     their last launch, in any order.
   All: MT_ERR_SYSTEM (CUDA failed), MT_ERR_MEMORY, and the errors of a collective where they are one. */
MT_API mt_status mt_graph_begin(mt_context *ctx, mt_comm *comm);
MT_API mt_status mt_graph_end(mt_context *ctx, mt_graph **out);
MT_API mt_status mt_graph_launch(mt_context *ctx, mt_graph *graph);
MT_API void mt_graph_destroy(mt_context *ctx, mt_graph *graph);

/* ---- launch: ranks as threads of this process -------------------------------------------------------------------- */

/* A zero-initialised desc means: one rank, MT_TIMEOUT_DEFAULT, errors to stderr. */
typedef struct mt_launch_desc {
    int ranks; /* 1 to 1024; 0: 1, or in mt_world_from_env as many as the launcher has started */
    /* advanced */
    /* 1: threads are not pinned; 0: on Linux, with two or more ranks and enough cores, the thread of each rank is
       pinned to cores of its own */
    int no_pinning;
    /* cores for each pinned rank; set it to mt_context_desc.threads. Ignored with no_pinning. 0: 1 */
    int cores_per_rank;
    double timeout_s; /* timeout of world and of all groups split from it, in seconds; 0: MT_TIMEOUT_DEFAULT */
    mt_logger logger; /* gets one message per failed rank, "rank 1 of 4: MT_ERR_SHAPE: ..."; {NULL}: to stderr */
    /* called with the `user` of mt_launch when a rank's thread does not return, see mt_launch; NULL: never */
    void (*stuck)(void *user);
} mt_launch_desc;

/* The function that each rank runs. The library destroys world after the function has returned. */
typedef mt_status (*mt_rank_function)(mt_comm *world, void *user);

/* Runs rank_main once per rank, each on its own thread, and waits for all of them. A single rank runs on the caller's
   thread. desc may be NULL (all defaults). When a rank returns while others wait for it, they get MT_ERR_PEER. Returns
   MT_SUCCESS when no rank failed. Otherwise returns the status of the lowest rank that failed with an error other than
   MT_ERR_PEER, or MT_ERR_PEER when no rank failed with another error. The logger gets the message of each rank that
   failed; an error that several ranks have is reported once, with their number. Errors of mt_launch itself:
   MT_ERR_ARGUMENT (rank_main is NULL, a value of desc is out of range), MT_ERR_MEMORY, MT_ERR_SYSTEM (no thread for a
   rank).
   mt_launch cannot end a thread that does not return. When one rank has failed, and another rank has not returned
   timeout_s later (at least 5 s), mt_launch calls desc->stuck, which should end the process with _exit. If stuck
   returns, mt_launch goes on waiting.
   A C++ exception that leaves rank_main ends the program by std::terminate. With a single rank it reaches the caller of
   mt_launch instead. Callbacks (logger, allocator, stuck and those of the other headers) must not throw or longjmp. A
   rank whose thread is cancelled counts as failed with MT_ERR_SYSTEM. See docs/many-ranks.md, "When a thread ends
   early". */
MT_API mt_status mt_launch(const mt_launch_desc *desc, mt_rank_function rank_main, void *user);

/* ---- launch: ranks as processes that a launcher has started ------------------------------------------------------ */

/* Runs rank_main once, on the calling thread, as one rank of a program that torchrun, Open MPI, MPICH or Slurm has
   started once per rank. The rank and the number of ranks come from the launcher's environment variables; when there
   are none, this function calls mt_launch. See docs/many-ranks.md, "Launchers". desc->ranks is 0 or the number of ranks
   that the launcher must have started.

   On GPUs, each rank passes world to mt_comm_create_for and uses the communicator that it gets. On CPUs, build with
   MT_USE_MPI and start with mpirun or srun: world then has all collectives. Without MPI, a world of several processes
   only has a rank and a size: its collectives and mt_comm_split return MT_ERR_UNSUPPORTED.

   With MT_USE_MPI the ranks are those of MPI_COMM_WORLD. When the program has called MPI_Init_thread, it also calls
   MPI_Finalize. Otherwise this function calls both, unless a rank is lost, and the program can call it only once.

   With MT_USE_NCCL this function may set the environment variable NCCL_COMM_ID: call it before other threads read the
   environment. Returns the rank's status; over MPI, the status of the whole job, chosen as in mt_launch.
   Errors: MT_ERR_ARGUMENT (a variable of the launcher is missing, is no number, or contradicts another variable or
   desc->ranks; the message to desc->logger names the variables and their values), and those of mt_launch and
   mt_comm_create_mpi. */
MT_API mt_status mt_world_from_env(const mt_launch_desc *desc, mt_rank_function rank_main, void *user);

/* ---- for authors of operators and layers ------------------------------------------------------------------------- */

/* A slot is memory that belongs to a context and holds options and state of one owner. Each of the other three headers
   owns one slot, and the program owns MT_SLOT_USER. */
typedef enum mt_slot {
    MT_SLOT_KERNELS = 0,
    MT_SLOT_PARALLEL = 1,
    MT_SLOT_MODEL = 2,
    MT_SLOT_USER = 3,
    MT_SLOT_COUNT = 4
} mt_slot;

/* Creates a slot: *out becomes `bytes` of zero-filled host memory. mt_context_destroy goes through the slots from the
   highest to the lowest, calls destroy(ctx, memory) if destroy is not NULL, and frees the memory. destroy may use the
   arena and mt_context_free. On a GPU, all work is done before destroy is called, and the streams still exist.
   Errors: MT_ERR_ARGUMENT (out is NULL, no such slot, already created), MT_ERR_MEMORY. */
MT_API mt_status mt_context_slot_create(mt_context *ctx, mt_slot slot, size_t bytes,
                                        void (*destroy)(mt_context *ctx, void *memory), void **out);
MT_API void *mt_context_slot(const mt_context *ctx, mt_slot slot); /* NULL before the slot is created */

/* Sets the function that is told of memory whose content is no longer what operators have written. gone 1: the memory
   itself was given back or out again: what mt_arena_alloc returns, what mt_context_free frees, and what
   mt_declare_forget names. gone 0: a collective or a receive has written it; mt_all_reduce in place does not count.
   forget NULL: none. ctx NULL: does nothing. */
typedef void (*mt_forget_function)(mt_context *ctx, const void *data, size_t bytes, int gone);
MT_API void mt_context_set_forget(mt_context *ctx, mt_forget_function forget);

/* Four values of the context's desc, with the defaults filled in, two properties of its device, and whether it records
   a CUDA graph. When ctx is NULL, the values are those of a CPU context with an empty desc, and the compute capability
   is 0. */
MT_API int mt_context_threads(const mt_context *ctx);
MT_API mt_device mt_context_planned(const mt_context *ctx); /* `device`, except on MT_DEVICE_META */
MT_API int mt_context_ordinal(const mt_context *ctx);
MT_API int mt_context_arena_symmetric(const mt_context *ctx);
MT_API int mt_context_compute_capability(const mt_context *ctx); /* 80 for sm_80; other devices: 90 */
MT_API int mt_context_has_data(const mt_context *ctx);           /* 0 on MT_DEVICE_META, else 1 */
/* Returns 0 for memory of the caller on MT_DEVICE_META, whose addresses mean nothing, else 1. */
MT_API int mt_context_has_address(const mt_context *ctx, const void *data);
MT_API int mt_context_records(const mt_context *ctx); /* 1 between mt_graph_begin and mt_graph_end, else 0 */

/* Computes items [0, count) on the mt_context_desc.threads threads of a context, and returns when all are done. Each
   thread gets at most one range of neighbouring items, [first, last), and its number, `thread`, from 0 to
   mt_context_threads(ctx) - 1. A range begins at a multiple of grain (at least 1), so it has at least grain items,
   unless it is the last one. The calling thread is one of the threads. The others start in the first call that needs
   them, wait between calls, and end in mt_context_destroy. If the system refuses them, the calling thread computes all
   ranges. `work` must not use the context, and must not throw. When ctx is NULL, there is one thread.
   It is the parallel_for of PyTorch, for operators of your own on a CPU. Results have the same bits with any number of
   threads if an item is computed by the same operations wherever its range begins. */
typedef void (*mt_range_function)(void *data, int thread, int64_t first, int64_t last);
MT_API void mt_parallel_for(mt_context *ctx, int64_t count, int64_t grain, mt_range_function work, void *data);

/* Adds the hash of x to *sum, as mt_hash in mt_kernels.cuh, on a context with data. x has elements of 2 or 4 bytes. On
   MT_DEVICE_CUDA sum is in memory of the GPU, and the call does not wait. Errors: MT_ERR_ARGUMENT, MT_ERR_SHAPE,
   MT_ERR_DTYPE, MT_ERR_SYSTEM (CUDA failed). */
MT_API mt_status mt_hash_add(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                             uint64_t *sum);

/* mt_fail stores a message as the last error of the context and of its world, logs it as MT_LOG_ERROR, and returns
   status. mt_comm_fail stores text as the last error of comm and of the world that rank_main got, and returns status;
   it does not log. mt_log only logs. Stored messages are cut after MT_ERROR_BYTES - 1 characters. When ctx or comm is
   NULL, the message is dropped. */
#define MT_ERROR_BYTES 1024
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
MT_API mt_status
mt_fail(mt_context *ctx, mt_status status, const char *format, ...);
MT_API mt_status mt_comm_fail(mt_comm *comm, mt_status status, const char *text);
MT_API void mt_log(mt_context *ctx, mt_log_level level, const char *text);

/* The rule of an operator for check mode: which placements of its operands fit together. operands has the names of its
   operands with spaces between them. cases has words with spaces between them: one word for each combination that the
   operator allows, with one letter for each operand. R is MT_REPLICATED, r MT_SPLIT_ROWS, c MT_SPLIT_COLS,
   P MT_PARTIAL, * anything, and - an operand that the call leaves out. Four more letters mean MT_REPLICATED for what
   the call reads, with a condition on its rows or columns:
     o  the operand has this rank's share of the columns of what all ranks have. What a call writes there is a term of
        the whole, or MT_SPLIT_COLS when the rank has no other columns
     w  the operand has all columns
     k  the operand has the first rows, until those of this rank's share of the first operand; not over "data"
     a  any rows; not over "data"
   data_cases has further cases for the group "data", where the rows of different ranks are other sequences; NULL: none.
   For example,
       static const mt_rule rule = {"y bias", "RR rR cc", NULL};       // y += bias; P would add it on every rank
   mt_rule_check applies a rule to the operands of a call, in any order; one that the call leaves out has data NULL. In
   each group at least one case must fit what is known about the operands. The operands that the call writes then get
   the placements of these cases. Call it after the other checks, before the operator writes. It does nothing when check
   mode is off. `where` and the rule are kept for messages: they must live as long as the context. Errors:
   MT_ERR_ARGUMENT (no case fits, a case has not one letter for each operand, an operand has a name that the rule does
   not have, a pointer other than data_cases is NULL, count is negative), MT_ERR_MEMORY. */
typedef struct mt_rule {
    const char *operands, *cases, *data_cases;
} mt_rule;

typedef struct mt_operand {
    const char *name;
    mt_tensor t;
    int use; /* 1: the call reads t, 2: it writes t, 3: both, 7: it replaces t by the gradient of t */
} mt_operand;

MT_API mt_status mt_rule_check(mt_context *ctx, const char *where, const mt_rule *rule, const mt_operand *operands,
                               int count);

/* The place of a rank's elements in the whole tensor, by which a call takes its random words, or its part of a
   vocabulary. */
typedef struct mt_place {
    int64_t rows, cols;                        /* of this rank */
    int64_t first_row, first_col, global_cols; /* see mt_random. INT64_MAX: the call does not number rows or columns */
    int padded;                                /* 1: ranks may have fewer columns than those before them */
    const char *what;                          /* what depends on the place, as in "random words" */
    uint64_t seed, subsequence;                /* see mt_random; 0: the call takes no random words */
    int64_t vocab;                             /* columns of all ranks that are no padding; 0: not known */
} mt_place;

/* Checks that a place fits the placements of t, operand `name` of a call. Where ranks have rows or columns of their
   own, their places must differ: rank n of a group has at least n times its rows or columns before it. Where no group
   splits the columns of t, they are those of the whole tensor, unless t is a view of some columns of a tensor, or was
   computed from such a view. When mt_context_desc.check is 2, all ranks must have the same seed and subsequence, and
   those that have the same t the same place, which the next mt_check_replicas compares. `field` names the place, as in
   "dropout.at"; it may be "". Does nothing when check mode is off. Errors: MT_ERR_ARGUMENT, MT_ERR_MEMORY. */
MT_API mt_status mt_place_check(mt_context *ctx, const char *where, const char *field, const char *name, mt_tensor t,
                                const mt_place *place);

/* Checks that a tensor whose columns a call takes as `parts` equal parts, such as gate and up, has these parts on each
   rank. If a group splits the columns of t, operand `name` of the call, and t is a parameter of a registry or was
   computed with one, the `parts` of the parameter must be a multiple.
   mt_parts_agree checks that a weight and `other` have equal `parts`. `other` is the bias of the weight (or both are
   gradients), if both are whole parameters. Or it is the x that a weight split by columns multiplies, if the features
   of x are those of a parameter, also after elementwise calls. Both functions do nothing when check mode is off.
   Errors: MT_ERR_ARGUMENT (also: parts is less than 1). */
MT_API mt_status mt_parts_agree(mt_context *ctx, const char *where, mt_tensor weight, mt_tensor other);
MT_API mt_status mt_parts_check(mt_context *ctx, const char *where, const char *name, mt_tensor t, int64_t parts);

/* A listener is told of each call that check mode has accepted, in the order of the calls: operators, rules of the
   caller's own, region functions, and collectives of tensors that are known. operands[count] are the views of the call,
   which may be of any shape; data is NULL for one that the call leaves out. mt_placement_of returns what the views are
   after the call. `with` is the name of a parameter among them, or NULL. It lives as long as the parameter, the other
   strings as long as the context, and the operands until the listener returns. What a call writes is not computed yet.
   The listener may print or keep what it is told; it must not write tensors with the library.
   mt_check_listen sets the listener of a context. NULL: none. It does nothing when check mode is off. */
typedef void (*mt_check_listener)(mt_context *ctx, void *user, const char *where, const char *with,
                                  const mt_operand *operands, int count);

MT_API void mt_check_listen(mt_context *ctx, mt_check_listener listener, void *user);

/* mt_check_mode returns mt_context_desc.check (on MT_DEVICE_META at least 1, and at most 1 with a meta communicator),
   and 0 in a pause. Between mt_check_pause and mt_check_resume, no rule is applied, and no placement is noted: a layer
   whose sums no rule describes declares its results. Pairs may be nested. mt_check_resume returns `status`, as in
       mt_check_pause(ctx);
       return mt_check_resume(ctx, work(ctx));
   mt_check_view says what a view is in the calls until mt_check_view_end: this rank's columns of a replicated tensor,
   for instance, are a tensor that is split. The memory keeps its placement, and MT_UNDECLARED leaves the view as it is.
   Pairs may be nested; the last mt_check_view of a view and a group counts. mt_check_view_end returns `status`.
   MT_PARTIAL says that a tensor that all ranks have is this rank's term of a sum, such as a bias that one rank adds.
   If mt_context_desc.check is 2, two ranks that add it are refused.
   mt_check_group makes check mode know a group for whose ranks nothing is declared, such as the pipeline group:
   collectives then give their results a placement over it. mt_check_unknown does not count it.
   mt_declare_complete says that t is replicated or split by rows over comm.
   mt_declare_meant says that the program means t as it is, if mt_context_desc.check is 2. Where t is split, ranks may
   have the same, such as the tokens of data ranks. Numbers of calls that read t may be off by the number of ranks, such
   as the scale of attention with the queries t, also when t is a view in the qkv that the call reads. Ranks may write
   the same view of t, see docs/checking.md. That holds until a call writes a part of t or declares it; for the value of
   a parameter, it holds from then on. It says nothing about what t does not cover.
   mt_declare_zero says that t is zero, which fits every placement; it works in a pause, too. mt_declare_parameter notes
   a parameter and its gradient, which may be mt_none(), under a name. parts: see mt_param_desc. partial: 1 if its
   gradient may be partial over `tensor`. Over `data` the value is replicated, and the gradient may be partial.
   After mt_check_track, check mode also notes what calls write to undeclared memory of the caller, if it knows one of
   their operands. Call mt_declare_forget before such memory is freed or used for something else.
   mt_declare_forget drops what is known about [data, data + bytes). Call it before memory of the caller that was
   declared is freed. It also drops what invariant mode knows about the memory, whether check mode is on or off.
   mt_check_slots says that micro-batches keep tensors in `count` slots of `bytes` bytes each, one after the other from
   `first` on. There may be two such areas, 0 and 1. Until the next mt_check_slots for the area, rules and region
   functions refuse an operand in another slot than number `own`. count 0: the area has no slots. mt_pipeline_run calls
   it for the inputs and for what forward keeps. */
MT_API int mt_check_mode(const mt_context *ctx);
MT_API void mt_check_pause(mt_context *ctx);
MT_API mt_status mt_check_resume(mt_context *ctx, mt_status status);
MT_API mt_status mt_check_view(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement);
MT_API mt_status mt_check_view_end(mt_context *ctx, mt_status status);
MT_API void mt_check_group(mt_context *ctx, const mt_comm *comm);
MT_API mt_status mt_declare_complete(mt_context *ctx, const mt_comm *comm, mt_tensor t);
MT_API mt_status mt_declare_meant(mt_context *ctx, mt_tensor t);
MT_API mt_status mt_declare_zero(mt_context *ctx, mt_tensor t);
MT_API mt_status mt_declare_parameter(mt_context *ctx, const char *name, const mt_comm *tensor, const mt_comm *data,
                                      mt_tensor value, mt_tensor grad, mt_placement placement, int64_t parts,
                                      int partial);
MT_API void mt_declare_forget(mt_context *ctx, const void *data, size_t bytes);
MT_API void mt_check_track(mt_context *ctx);
MT_API void mt_check_slots(mt_context *ctx, int area, const void *first, size_t bytes, int count, int own);

/* With mt_context_desc.check == 2, the context also compares values. Each call hashes, bit for bit, each operand that
   it reads and that is replicated over a group. mt_check_replicas is collective over comm, and the ledger does not
   count it. The ranks compare their hashes (16 bytes of each rank), and then what they must not have alike (16 bytes,
   and 8 bytes for each entry). When hashes differ, ranks send the list of what they have read. If values differ, every
   rank gets MT_ERR_MISMATCH, and the message names the first call that has read other values than on the lowest rank,
   beginning with `where`. So it finds what rules cannot see: other seeds, inputs or learning rates, and memory that was
   written behind the library's back.
   mt_params_zero_grad hashes the parameters. mt_sync_gradients adds the gradients, and compares. mt_optimizer_step and
   mt_step_begin add the learning rate, and the step compares it. The next step compares the new parameters, so those of
   the last step are not compared. A loop without these calls calls mt_check_replicas itself. In any case a comparison
   comes with every 256th collective of a group.
   mt_check_replica hashes t, which must be the same on the ranks of comm, for the next comparison. The message calls it
   "the `what` of '`name`'", or only `what` when name is NULL; name is kept until then. t has elements of 2 or 4 bytes.
   Both do nothing when check is not 2, in a group of one, in a pause, between mt_overlap_begin and mt_overlap_end, and
   while a graph is recorded. Errors: MT_ERR_MISMATCH, MT_ERR_ARGUMENT (ctx, what or where is NULL, or t has
   another type), MT_ERR_MEMORY, and those of a collective. */
MT_API mt_status mt_check_replica(mt_context *ctx, const mt_comm *comm, const char *what, const char *name,
                                  mt_tensor t);
MT_API mt_status mt_check_replicas(mt_context *ctx, mt_comm *comm, const char *where);
/* As mt_check_replica, for a number of the host. mt_optimizer_step and mt_step_begin call it with the learning rate. */
MT_API mt_status mt_check_number(mt_context *ctx, const mt_comm *comm, const char *what, float number);

/* For authors of operators, with mt_context_desc.check == 2; they do nothing otherwise.
   mt_check_numbers notes `count` numbers of a call, such as those of its desc, which must be the same on all ranks of a
   group. The message calls them "`what` of `where`". Ranks with rows of t of their own may have others, such as the
   mask of their queries; t is mt_none() if they may not. data 1: those of "data" may not in any case. data 2: ranks
   with a term of the sum t may have others, and data ranks with rows of their own, and no other ranks.
   mt_check_side notes an operand that is no matrix of a rule: an element for each row (along MT_SPLIT_ROWS) or column
   (MT_SPLIT_COLS) of t, such as targets or lengths. If a group splits t in this way, each rank must have its own
   elements, otherwise all ranks must have the same ones. alike 1: ranks may have the same elements in any case.
   mt_check_share notes that each rank of comm must have a part of its own of what the name says. It is compared on a
   CPU with data, unless all elements of t are equal.
   mt_check_content says what an operator has written to t without data: a hash of the numbers from which it is made, or
   MT_CONTENT_ANY if ranks may have the same where t is split.
   mt_check_content_of returns the hash of `count` numbers, for mt_check_content. Both do so with any `check`.
   mt_check_sequences notes that a call needs whole sequences of `seq` rows of t; seq 0: of several lengths. Ids that
   are split by rows are compared over groups that split the columns of t. They are not compared when each rank has
   whole sequences, because these may have the same positions.
   mt_check_factor refuses a number of a call, `factor` times what it usually is, when a group of `factor` ranks, or of
   1 / factor ranks, splits t, operand `name`, along its rows or columns: the number was computed with the sizes of a
   rank. It accepts all numbers after mt_declare_meant of t or of a view in t.
   mt_check_mean notes that the gradients of the rows of t are multiplied by `scale`; NAN: by other numbers, so that
   nothing is said about this step. mt_check_mean_end, which mt_optimizer_step calls, multiplies `scale` by grad_scale
   and by the rows of all ranks. For a mean, the product is 1. It refuses n or 1 / n, where n is the number of ranks of
   a group or of all groups, and forgets the scale. If the loss is meant so, call mt_check_mean(ctx, logits, NAN)
   before. `where` and `name` are kept for messages. Errors: MT_ERR_MEMORY; MT_ERR_ARGUMENT for what is refused. */
#define MT_CONTENT_ANY ((uint64_t)1)
MT_API mt_status mt_check_numbers(mt_context *ctx, const char *where, const char *what, mt_tensor t, int data,
                                  const double *numbers, int count);
MT_API mt_status mt_check_side(mt_context *ctx, const char *where, const char *name, mt_tensor side, mt_tensor t,
                               mt_placement along, int alike);
MT_API mt_status mt_check_share(mt_context *ctx, const mt_comm *comm, const char *what, const char *name, mt_tensor t);
MT_API void mt_check_sequences(mt_context *ctx, mt_tensor t, int64_t seq);
MT_API void mt_check_content(mt_context *ctx, mt_tensor t, uint64_t content);
MT_API uint64_t mt_check_content_of(const double *numbers, int count);
MT_API mt_status mt_check_factor(mt_context *ctx, const char *where, const char *number, const char *name, mt_tensor t,
                                 mt_placement along, double factor);
MT_API void mt_check_mean(mt_context *ctx, mt_tensor t, double scale);
MT_API mt_status mt_check_mean_end(mt_context *ctx, const char *where, double grad_scale);

/* Returns how many operands that calls have read were not known in a group, since the context was created or since the
   last call of this function. 0 means that check mode has seen all of a step. text, which may be NULL, becomes the
   first of them, as in  mt_gemm "mlp.linear_fc1": a over "tensor"  or "". */
MT_API int64_t mt_check_unknown(mt_context *ctx, char *text, size_t bytes);

/* Allocate and free zero-filled host memory, for small structs. NULL: out of memory. */
MT_API void *mt_host_alloc(size_t bytes);
MT_API void mt_host_free(void *ptr);

/* Alignment in bytes of all memory from the arena and from mt_context_alloc. */
#define MT_ALIGNMENT ((size_t)64)
static inline size_t mt_align_up(size_t bytes) { return (bytes + MT_ALIGNMENT - 1) / MT_ALIGNMENT * MT_ALIGNMENT; }

/* mt_arena_available returns the bytes that can still be allocated. mt_arena_set_peak sets what mt_arena_peak returns:
   a function whose own scratch memory should not count sets the peak back to its earlier value. */
MT_API size_t mt_arena_available(const mt_context *ctx);
MT_API int mt_arena_has(const mt_context *ctx, const void *data); /* 1: data points into the arena */
MT_API void mt_arena_set_peak(mt_context *ctx, size_t peak);

/* Sets where the next arena allocations go: into [first, end) while they fit, else to `top` and above. All three are
   offsets in bytes from the start of the arena. end == 0: there is no region, so all allocations go to `first` and
   above, and `top` has no effect. With regions, several workspaces can be in use at once and be released in any order:
   each has its own [first, end), and all share the scratch memory from `top` on. Memory that would end behind the arena
   is not allocated: mt_arena_alloc returns MT_ERR_MEMORY. */
MT_API void mt_arena_region(mt_context *ctx, size_t first, size_t end, size_t top);

/* Registers memory from mt_context_alloc with NCCL; memory is the pointer that mt_context_alloc gave. mt_context_free
   and mt_comm_destroy end the registration. Collective over comm. Afterwards, collectives on comm must use the
   same offsets of this memory on all ranks. Does nothing when comm is not over NCCL, when the context has an allocator
   of the caller, when `bytes` is less than 2 MiB, or when a part of the memory is registered already, with any
   communicator of the context: NCCL allows only one. See docs/gpus.md, "Communicators over NCCL". Errors:
   MT_ERR_ARGUMENT, MT_ERR_MEMORY, MT_ERR_TIMEOUT, MT_ERR_PEER, MT_ERR_SYSTEM (NCCL failed). */
MT_API mt_status mt_comm_register(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes);

/* Registers the arena as mt_comm_register does; collective over comm. Does nothing unless
   mt_context_desc.arena_symmetric is set. The registry calls it for the tensor group when it places the parameters
   (mt_params_init or mt_params_bind), because activations are in the arena. A program without a registry calls it with
   its tensor group. Errors: as mt_comm_register. */
MT_API mt_status mt_arena_register(mt_context *ctx, mt_comm *comm);

/* Returns 1 when t is contiguous (ld == cols, or one row) and its data is aligned to MT_ALIGNMENT, else 0. Returns 0 on
   MT_DEVICE_META, which has no real addresses: operators that copy unaligned views then plan memory for the copy. */
MT_API int mt_tensor_is_aligned(const mt_context *ctx, mt_tensor t);

static inline int64_t mt_tensor_ld(mt_tensor t) { return t.ld ? t.ld : t.cols; }
static inline int mt_dtype_is_16bit(mt_dtype dtype) { return dtype == MT_BF16 || dtype == MT_F16; }
static inline int mt_dtype_is_float(mt_dtype dtype) { return dtype == MT_F32 || mt_dtype_is_16bit(dtype); }

/* Convert n values between f32 and a 16-bit type, rounding to nearest even. NaN stays NaN. x and y do not overlap. */
MT_API void mt_f32_from_16bit(mt_dtype dtype, const uint16_t *x, float *y, int64_t n);
MT_API void mt_f32_to_16bit(mt_dtype dtype, const float *x, uint16_t *y, int64_t n);

/* Arithmetic on sizes. mt_round_up returns the multiple of unit that is x or the next one, or INT64_MAX when it does
   not fit; unit is at least 1, and x at least 0. mt_size_mul returns a * b, or -1 when a factor is negative or the
   product does not fit into int64_t. */
static inline int64_t mt_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t mt_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t mt_round_up(int64_t x, int64_t unit) {
    int64_t more = x % unit ? unit - x % unit : 0;
    return x > INT64_MAX - more ? INT64_MAX : x + more;
}
static inline int64_t mt_size_mul(int64_t a, int64_t b) {
    if (a < 0 || b < 0) return -1;
    return b > 0 && a > INT64_MAX / b ? -1 : a * b;
}

/* Numbers as text, the same in every locale. mt_f32_digits writes x to text with 9 significant digits, enough to read
   the same float back, and returns text. mt_decimal_point takes a number that printf wrote, and replaces the locale's
   decimal separator by a point. mt_parse_whole returns 1 and sets *out when text is a whole number in decimal digits
   and not larger than `most`, else 0. */
MT_API const char *mt_f32_digits(float x, char text[32]);
MT_API void mt_decimal_point(char *text);
MT_API int mt_parse_whole(const char *text, uint64_t most, uint64_t *out);

/* Describes a value of an array that is not in [0, limit). mt_range_fail stores the message "FUNCTION: NAME VALUE at
   index INDEX is not in [0, LIMIT)" and returns MT_ERR_DATA. A function or a name has at most 23 characters. */
typedef struct mt_range_error {
    int32_t found; /* 0: no error */
    int32_t value;
    int64_t index, limit;
    char function[24], name[24];
} mt_range_error;
MT_API mt_status mt_range_fail(mt_context *ctx, const mt_range_error *error);

/* For operators on MT_DEVICE_CUDA. When CUDA is not built, all of these functions return MT_ERR_UNSUPPORTED.
   mt_cuda_enter: makes the context's GPU current and clears errors that the program has left in the CUDA runtime. Call
     MT_TRY(mt_cuda_enter(ctx)) before any work for the GPU, but after the operator has allocated its scratch memory:
     on MT_DEVICE_META the call returns MT_PLANNED, so the operator ends there, with its memory counted. The public
     function around the operator turns MT_PLANNED into MT_SUCCESS.
   mt_cuda_launched: call it after each launch. It returns the error of the launch; the message names `kernel`.
   mt_cuda_zero, mt_cuda_copy_rows: as cudaMemsetAsync and cudaMemcpy2DAsync, in the context's stream. Pitches are in
     bytes, also above the 2^31 - 1 of cudaMemcpy2DAsync. Either side of a copy may be on the host or on a GPU.
   mt_cuda_upload: copies contiguous rows from the host to the GPU, in the context's stream. When it returns, it has
     read all of `from`. A copy of up to MT_UPLOAD_BYTES goes through 2 MiB of page-locked memory of the context. The
     call then waits for the GPU only when this memory is full of copies that are not done. It waits for each larger
     copy, and for each copy in another stream than that of the context (mt_overlap_begin), as mt_context_synchronize
     does.
   mt_cuda_range_error: the page-locked memory in which a kernel stores an error that mt_context_synchronize and
     mt_cuda_fetch then return. A kernel stores it only if `found` is 0. NULL on other devices.
   mt_cuda_check_memory: returns MT_ERR_ARGUMENT when the context's GPU cannot access the first or the last byte of
     [ptr, ptr + bytes). Memory of this GPU, managed memory and page-locked host memory are allowed. The message names
     `function` and `name`.
   mt_cuda_wait_peers: waits for the collectives in the stream, at most for their timeout. Call it before every CUDA
     call that waits for the stream, because CUDA itself waits without a timeout. MT_ERR_UNSUPPORTED between
     mt_graph_begin and mt_graph_end.
   mt_cuda_fetch: calls mt_cuda_wait_peers, copies from the GPU to the host, and waits until the copy is done. */
#define MT_PLANNED ((mt_status)1)
#define MT_UPLOAD_BYTES ((size_t)256 << 10)
MT_API mt_status mt_cuda_enter(mt_context *ctx);
MT_API mt_status mt_cuda_launched(mt_context *ctx, const char *kernel);
MT_API mt_status mt_cuda_zero(mt_context *ctx, void *ptr, size_t bytes);
MT_API mt_status mt_cuda_copy_rows(mt_context *ctx, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                   size_t row_bytes, int64_t rows);
MT_API mt_status mt_cuda_upload(mt_context *ctx, void *to, size_t to_pitch, const void *from, size_t row_bytes,
                                int64_t rows);
MT_API mt_range_error *mt_cuda_range_error(const mt_context *ctx);
MT_API mt_status mt_cuda_check_memory(mt_context *ctx, const char *function, const char *name, const void *ptr,
                                      size_t bytes);
MT_API mt_status mt_cuda_wait_peers(mt_context *ctx);
MT_API mt_status mt_cuda_fetch(mt_context *ctx, void *to, const void *from, size_t bytes);

/* These names exist only in the file with MEGATRON_IMPLEMENTATION:
   MT_HAS_CUDA                   1 when nvcc compiles this file, or when it is built for tests/engine; else 0
   MT_CUDA_TRY(ctx, call)        MT_TRY for a call of the CUDA runtime; the message names the call
   MT_LAUNCH_KERNEL(kernel, grid, block, shared_bytes, stream, ...)    kernel<<<...>>>(...)
   MT_SHARED(type, name, count)  an array in shared memory
   MT_DYN_SHARED(type, name)     the array in dynamic shared memory (shared_bytes of the launch)
   MT_HOST_DEVICE                __host__ __device__ for nvcc, else nothing
   MT_DEVICE_UNROLL, MT_DEVICE_UNROLL_2, MT_DEVICE_NO_UNROLL    in a kernel, before a loop: unroll it fully, by 2, or
                                 not at all
   MT_INDEPENDENT                on a CPU, before a loop: its iterations are independent and may be vectorized
   MT_INLINE                     static inline, and always inlined where the compiler can be told
   MT_RANGE(name, call)          the status of call, inside an NVTX range (MT_USE_NVTX)
   mt_f32_bits(x), mt_f32_from_bits(u)     the bits of a float, and back; inline, for host and device
   mt_hash_word(element, bits)             as mt_hash_element in mt_kernels.cuh; inline, for host and device
   mt_divide(i, n)               i / n in a kernel
   tests/engine runs CUDA kernels on a CPU. There a kernel must be launched with MT_LAUNCH_KERNEL, and its shared memory
   declared with MT_SHARED or MT_DYN_SHARED; tests/engine/engine.h has the other rules. */

#ifdef __cplusplus
}
#endif

#endif /* MT_COMM_H */

/* ================================================== the API ends here ============================================= */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MT_COMM_IMPLEMENTED)
#define MT_COMM_IMPLEMENTED

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#if (defined(__F16C__) || defined(__AVX512BF16__)) && defined(__GNUC__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#if defined(MT_USE_NVTX)
#include <nvtx3/nvToolsExt.h>
#endif

/* nvcc compiles .cu files; MT_CUDA_ENGINE is defined by the tests, which run CUDA code on a CPU. */
#if defined(__CUDACC__) || defined(MT_CUDA_ENGINE)
#define MT_HAS_CUDA 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#define MT_HAS_CUDA 0
#endif

#if defined(MT_USE_NCCL)
#if !MT_HAS_CUDA
#error "MT_USE_NCCL: NCCL works between GPUs; compile the implementation of megatron.h with nvcc, as a .cu file"
#endif
#include <nccl.h>
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)
#error "MT_USE_NCCL needs NCCL 2.19 or later"
#endif
#define MTI_NCCL 1
#else
#define MTI_NCCL 0
#endif

/* Whether the comparison of calls over TCP is built. Tests of it define this macro: it needs neither NCCL nor a GPU. */
#if !defined(MTI_COMPARES)
#define MTI_COMPARES MTI_NCCL
#endif
#if MTI_COMPARES
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#endif

#if defined(MT_USE_MPI)
/* Leaves out MPI's old C++ bindings, which need a library of their own. */
#if !defined(OMPI_SKIP_MPICXX) && !defined(MPICH_SKIP_MPICXX)
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#undef OMPI_SKIP_MPICXX
#undef MPICH_SKIP_MPICXX
#else
#include <mpi.h>
#endif
#if MPI_VERSION < 3
#error "MT_USE_MPI needs MPI 3.0 or later"
#endif
#define MTI_MPI 1
#else
#define MTI_MPI 0
#endif

/* A strict -std=c99 hides these functions of POSIX and Linux; C++ does not. */
#if !defined(__cplusplus) && !defined(_DEFAULT_SOURCE) && !defined(_GNU_SOURCE)
int posix_memalign(void **ptr, size_t alignment, size_t bytes);
int nanosleep(const struct timespec *time, struct timespec *left);
#if defined(__linux__)
long syscall(long number, ...);
#endif
#endif

/* On macOS and with a strict -std=c99, pthread_cond_timedwait cannot use the monotonic clock. */
#if defined(_POSIX_C_SOURCE) && _POSIX_C_SOURCE >= 200112L && defined(CLOCK_MONOTONIC) && !defined(__APPLE__)
#define MTI_MONOTONIC 1
#else
#define MTI_MONOTONIC 0
#endif

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "megatron.h needs infinities, NaN and the order of additions: compile its implementation without -ffast-math, \
in a file of its own: cc -O3 -march=native -fno-fast-math -c megatron.c; link without -ffast-math, too"
#endif

/* MT_RANGE returns the status of `call`. The NVTX range ends after the call, also when the call fails. */
#if defined(MT_USE_NVTX)
static mt_status mti_range_end(mt_status status) {
    nvtxRangePop();
    return status;
}
#define MT_RANGE(name, call) (nvtxRangePushA(name), mti_range_end(call))
#else
#define MT_RANGE(name, call) (call)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>types: contexts, communicators, calls and transports ------------------------------------------------------ */

#define MTI_EVENTS (MT_OVERLAP_TICKET_THIRD + 2)

typedef struct mti_slot_memory {
    void *memory;
    void (*destroy)(mt_context *ctx, void *memory);
} mti_slot_memory;

#define MTI_SECTIONS 8

/* Page-locked memory for small uploads: sections of MT_UPLOAD_BYTES, used in turn. An upload takes the next bytes of
   the current section. `copied` is recorded when a section is full, so it is reached when all its copies are done. */
typedef struct mti_staging {
    unsigned char *memory; /* the sections, and an mt_range_error behind them */
    struct CUevent_st *copied[MTI_SECTIONS];
    int section;
    size_t used;
} mti_staging;

#define MTI_MAX_THREADS 1024

struct mt_context {
    pid_t process; /* that has created the context, see mti_is_forked */
    mt_device device;
    int threads;
    struct mti_team *team; /* the other threads; NULL before the first call that needs them */
    int invariant, invariant_data;
    mt_comm *world;
    mt_allocator allocator;
    mt_logger logger;
    unsigned char *arena;
    size_t arena_bytes, arena_used, arena_peak, allocated;
    size_t region_end, region_top; /* see mt_arena_region */
    size_t meta_end;               /* MT_DEVICE_META: bytes that mt_context_alloc has given out so far */
    mti_slot_memory slots[MT_SLOT_COUNT];
    mt_forget_function forget;          /* see mt_context_set_forget; NULL: none */
    struct mti_checker *checker;        /* check mode; NULL: off */
    mt_device planned;                  /* MT_DEVICE_META: the device whose memory is planned */
    int ordinal, owns_stream;           /* MT_DEVICE_CUDA */
    int capability;                     /* compute capability of the GPU: 90 for sm_90 */
    struct CUstream_st *compute_stream; /* mt_context_desc.stream, or a stream that the context has created */
    struct CUstream_st *second_stream, *third_stream;
    struct CUevent_st *events[MTI_EVENTS]; /* one per ticket; the last one is for mti_cuda_fork */
    mti_staging staging;
    int recording;              /* 1: between mt_graph_begin and mt_graph_end */
    mt_graph *graphs;           /* list of the graphs of this context that can run */
    int captures;               /* 1: this context has begun a capture, which has not ended */
    mt_comm *recorders;         /* the ranks that record together; NULL: this rank alone */
    struct mti_group *turns;    /* the group of the recorders, kept alive */
    int has_turn;               /* 1: of the recorders, this rank records now */
    unsigned pending;           /* bit mask of tickets that the compute stream has not waited for */
    int overlapped;             /* 1: mti_cuda_fork has been called */
    uint64_t reached;           /* bit mask of other GPUs whose memory this GPU can read */
    struct CUstream_st *stream; /* where calls put their work: compute_stream, or another one after mti_cuda_fork */
    int arena_symmetric, no_nccl_checks;
    mt_comm *nccl;              /* list of the communicators over NCCL that belong to this context */
    uint64_t nccl_calls;        /* number of calls on these communicators so far */
    struct mti_window *windows; /* list of the memory registered with these communicators */
    mt_trace trace;             /* MT_DEVICE_META */
    size_t trace_capacity;
    int trace_lost;           /* 1: there was no memory for an entry */
    int recomputes;           /* number of open pairs of mt_trace_recompute */
    mt_stream planned_stream; /* MT_DEVICE_META: the stream between mt_overlap_begin and mt_overlap_end */
    int compares;             /* MT_DEVICE_META: number of open mti_space_begin, whose calls move bytes */
    char error[MT_ERROR_BYTES];
};

/* Codes for calls that have no mt_collective, for slots and messages. The ledger does not count these calls. */
typedef enum mti_call_kind {
    MTI_SPLIT = 64,
    MTI_SEND_RECV = 65,
    MTI_CREATE = 66,
    MTI_GRAPH_BEGIN = 67,
    MTI_GRAPH_END = 68,
    MTI_GRAPH_LAUNCH = 69
} mti_call_kind;

typedef struct mti_call {
    int kind; /* mt_collective or mti_call_kind */
    mt_dtype dtype;
    mt_op op;
    int root;   /* root of a broadcast, or destination of a send; -1: none */
    int source; /* source of a receive; -1: none */
    size_t count, recvcount;
    /* elements between the blocks of two ranks in the receive buffer of an all_gather and in the send buffer of a
       reduce_scatter: count, or more when the call moves a chunk of each block */
    size_t stride;
    int goes_on; /* 1: this is not the first chunk of a call */
    const void *send;
    void *recv;
    struct CUgraphExec_st *run; /* MTI_GRAPH_LAUNCH */
    int color, key;
} mti_call;

/* An event of CUDA, see mti_cuda_record. */
typedef struct mti_event {
    struct CUevent_st *handle; /* NULL: not recorded yet */
    int ordinal;               /* the GPU that the event belongs to */
} mti_event;

typedef struct mti_slot {
    uint64_t what, count, recvcount; /* the call, packed; atomic: other ranks read them at any time, for messages */
    uint64_t outbox;                 /* destination + 1 and state of a posted message, see MTI_POSTED; atomic */
    const char *left;                /* why this rank has left the group; NULL: it has not left */
    int inside;                      /* MTI_OUTSIDE, MTI_IN_COLLECTIVE or MTI_IN_P2P; atomic */
    int awaited;                     /* 1 + the rank from which a message is awaited; 0: none; atomic */
    /* The fields below are valid between the two meetings of a call, or while the outbox is posted. */
    int failed;
    const void *send;
    void *recv;
    size_t send_count;
    mt_dtype send_dtype;
    int ordinal; /* the GPU that holds send and recv */
    int color, key;
    mt_comm **family; /* mt_comm_split: the communicators of the new group, created by its leader */
    /* On GPUs. A rank records `ready` before a call and `done` behind its part of a collective; the receiver of its
       message records `taken` behind the copy. */
    mti_event ready, done, taken;
} mti_slot;

typedef struct mti_group {
    uint64_t state;          /* atomic, see MTI_BROKEN */
    unsigned char apart[56]; /* padding: `state` has its own cache line, because all ranks spin on it */
    int sleepers, left_count, references;
    int size;
    int spin;               /* 1: each rank on this machine has a core */
    struct mti_group *root; /* the first group of the chain of splits, kept alive by this one; NULL: this group */
    int late_turns;         /* used in the root, atomic: number of late polls in a row, see mti_note_turn */
    int64_t crowded_until;  /* used in the root, atomic: microseconds by mti_now; until then waits do not poll */
    double timeout;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    unsigned char *slots;
    pid_t process; /* that has created the group */
    int turn;      /* atomic; 1: a rank of this group records a graph */
    int captured;  /* atomic; 1: the capture that rank 0 has begun has not ended */
    mt_status why_broken;
    char text[MT_ERROR_BYTES];
} mti_group;

struct mti_rank;

struct mti_watchdog;
struct mti_board;

typedef struct mti_nccl {
    struct ncclComm *handle; /* carries the collectives; blocking if owned. NULL: aborted */
    struct ncclComm *opener; /* the same ranks, non-blocking, only for splits; NULL: splits are made from handle */
    struct mti_watchdog *watchdog; /* bounds the calls on handle; NULL: the handle is the caller's */
    struct mti_board *board;       /* compares the calls of the ranks; NULL: they are not compared */
    mt_context *home;              /* the context that the communicator belongs to; NULL: the context is destroyed */
    mt_comm *next;                 /* in the list mt_context.nccl */
    struct CUstream_st *stream;    /* the stream of the last call */
    int recorded;                  /* 1: a graph has recorded a call */
    mti_call last;                 /* the last call, for messages */
    uint64_t number;               /* mt_context.nccl_calls at the last call */
    double timeout;
    int ordinal, owned;
    int busy;         /* 1: the communicator may have work in the stream */
    mt_status broken; /* MT_SUCCESS: not broken */
} mti_nccl;

struct mt_comm {
    const struct mti_transport *transport;
    pid_t process;       /* that has created the communicator */
    mti_group *group;    /* threads: the shared group; over MPI, and over NCCL with a board: a copy that only this
                            process uses, for messages; else NULL */
    struct mti_mpi *mpi; /* only over MPI */
    int rank, size;
    int span;               /* see mt_comm_set_span */
    mti_nccl nccl;          /* only over NCCL */
    struct mti_rank *owner; /* the launched rank that the communicator belongs to, or NULL */
    mt_comm *next;          /* in the list mti_rank.children of the owner */
    uint64_t graphs;        /* number of graphs whose recording has begun with this communicator */
    int local_rank;         /* see mt_comm_local_rank */
    const char *launcher;   /* only mti_apart: name of the launcher */
    double timeout;         /* only mti_apart: timeout of the communicators made from this one */
    mt_ledger ledger;
    char name[16];
    int is_named;           /* 1: mt_comm_set_name has given the name */
    mt_status error_status; /* the status that `error` belongs to */
    char error[MT_ERROR_BYTES];
};

/* A rank that mt_launch or mt_world_from_env runs. */
typedef struct mti_rank {
    mt_comm *world, *children;
    mt_rank_function run;
    void *user;
    int rank, started;
    int leaving;     /* 1: the rank is destroying a communicator; mt_comm_fail then stores no message */
    int ended, told; /* ended: the rank's function has returned; told: the logger has got the rank's error */
    struct mti_watch *watch;
    const int *core; /* the cores that the rank is pinned to */
    int cores;       /* number of these cores; 0: not pinned */
    mt_status status;
    pthread_t thread;
    char reason[MT_ERROR_BYTES + 64]; /* why the rank left, for the messages of ranks that wait for it */
} mti_rank;

typedef struct mti_text {
    size_t used;
    char data[MT_ERROR_BYTES];
} mti_text;

/* A transport connects the ranks of a communicator: a table of functions. The tables are below.
   has_peers     0: a call moves no data to other ranks
   are_threads   1: the ranks are threads of this process
   check         returns an error when the context cannot be used with the communicator
   collective    runs a collective
   p2p           runs a send, a receive or both, with other ranks
   enter, exit   the two meetings of a call: all ranks compare their calls, and leave the call; NULL: never called
   split         as mt_comm_split; color -1 leaves *out NULL
   over_nccl     creates a communicator with the same ranks over NCCL; leaves *out NULL where NCCL is not used
   enlist        see mt_comm_register
   leave         tells the other ranks that this rank leaves; `reason` completes "rank 1 ...", must outlive the group */
typedef struct mti_transport {
    int has_peers, are_threads;
    mt_status (*check)(mt_context *ctx, mt_comm *comm, const char *name);
    mt_status (*collective)(mt_context *ctx, mt_comm *comm, const mti_call *call);
    mt_status (*p2p)(mt_context *ctx, mt_comm *comm, const mti_call *call);
    mt_status (*enter)(mt_context *ctx, mt_comm *comm, const mti_call *call);
    void (*exit)(mt_comm *comm);
    mt_status (*split)(mt_comm *comm, int color, int key, mt_comm **out);
    mt_status (*over_nccl)(mt_context *ctx, mt_comm *comm, mt_comm **out);
    mt_status (*enlist)(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes);
    void (*leave)(mt_comm *comm, const char *reason);
    void (*destroy)(mt_comm *comm);
} mti_transport;

/* -- declarations of functions that are called before their section -- */

static void *mti_cuda_alloc(void *user, size_t bytes, size_t alignment); /* >>cuda */
static void mti_cuda_free(void *user, void *ptr, size_t bytes);
static int mti_cuda_count(void);
static mt_status mti_cuda_open(mt_context *ctx, const mt_context_desc *desc);
static void mti_cuda_idle(mt_context *ctx);
static void mti_cuda_close(mt_context *ctx);
static mt_status mti_cuda_synchronize(mt_context *ctx);
static mt_status mti_cuda_report(mt_context *ctx);
static mt_status mti_cuda_enter_host(mt_context *ctx);
static void mti_cuda_forget(mt_context *ctx, const void *ptr);

static mt_status mti_enter(mt_context *ctx, mt_comm *comm, const mti_call *call); /* >>local */
static void mti_exit(mt_comm *comm);
static mt_status mti_local_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call);
static mt_status mti_local_split(mt_comm *comm, int color, int key, mt_comm **out);
static mt_status mti_alone_split(mt_comm *comm, int color, int key, mt_comm **out);
static mt_status mti_meta_split(mt_comm *comm, int color, int key, mt_comm **out);
static mt_status mti_apart_split(mt_comm *comm, int color, int key, mt_comm **out);
static void mti_local_leave(mt_comm *comm, const char *reason);
static void mti_no_leave(mt_comm *comm, const char *reason);
static void mti_no_destroy(mt_comm *comm);

static void mti_team_destroy(struct mti_team *t); /* >>threads */

static void mti_checker_destroy(struct mti_checker *c); /* >>placements */
static mt_status mti_checker_create(mt_context *ctx, int check);
static void mti_forget(mt_context *ctx, const void *data, size_t bytes);
static void mti_allocate_again(mt_context *ctx, const void *data, size_t bytes);
static void mti_forget_block(mt_context *ctx, const void *data, size_t bytes);
static mt_status mti_watch_block(mt_context *ctx, const void *data, size_t bytes);

static void mti_replicas_destroy(mt_context *ctx); /* >>replicas */
static mt_status mti_replicas_create(mt_context *ctx);
static mt_status mti_replicas_due(mt_context *ctx, mt_comm *comm, const char *name);

static mt_status mti_no_check(mt_context *ctx, mt_comm *comm, const char *name); /* >>collectives */
static mt_status mti_meta_check(mt_context *ctx, mt_comm *comm, const char *name);
static mt_status mti_apart_check(mt_context *ctx, mt_comm *comm, const char *name);
static mt_status mti_peers_check(mt_context *ctx, mt_comm *comm, const char *name);
static mt_status mti_alone_call(mt_context *ctx, mt_comm *comm, const mti_call *call);
static mt_status mti_no_call(mt_context *ctx, mt_comm *comm, const mti_call *call);
static mt_status mti_local_collective(mt_context *ctx, mt_comm *comm, const mti_call *call);

static mt_status mti_no_enlist(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes); /* >>nccl */
static mt_status mti_stays(mt_context *ctx, mt_comm *comm, mt_comm **out);
static mt_status mti_group_over_nccl(mt_context *ctx, mt_comm *world, mt_comm **out);
static mt_status mti_processes_over_nccl(mt_context *ctx, mt_comm *world, mt_comm **out);
static mt_status mti_refuse_over_nccl(mt_context *ctx, mt_comm *world, mt_comm **out);
static mt_status mti_cuda_graph_launch(mt_context *ctx, const mti_call *call); /* >>graph */
static void mti_graph_forget(mt_context *ctx);
#if MT_HAS_CUDA
static void mti_cuda_drop(mt_context *ctx);
static void mti_graph_await_end(mt_context *ctx);
static mt_status mti_nccl_wait(mt_context *ctx);
static void mti_nccl_close(mt_context *ctx);
static void mti_nccl_forget(mt_context *ctx, const mt_comm *comm, const void *memory);
#endif
#if MTI_NCCL
static void mti_graphs_lose(mt_context *ctx); /* >>graph */
static mt_status mti_nccl_call(mt_context *ctx, mt_comm *comm, const mti_call *call);
static mt_status mti_nccl_split(mt_comm *comm, int color, int key, mt_comm **out);
static mt_status mti_nccl_enlist(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes);
static void mti_nccl_leave(mt_comm *comm, const char *reason);
static void mti_nccl_destroy(mt_comm *comm);
#endif

#if MTI_MPI
static mt_status mti_mpi_call(mt_context *ctx, mt_comm *comm, const mti_call *call); /* >>mpi */
static mt_status mti_mpi_enter(mt_context *ctx, mt_comm *comm, const mti_call *call);
static void mti_mpi_exit(mt_comm *comm);
static mt_status mti_mpi_split(mt_comm *comm, int color, int key, mt_comm **out);
static void mti_mpi_leave(mt_comm *comm, const char *reason);
static void mti_mpi_destroy(mt_comm *comm);
#endif

/* -- the transports -- */

/* clang-format off */
/* A group of one. */
static const mti_transport mti_alone = {0, 0,
    mti_no_check,     mti_alone_call,        mti_no_call,    NULL,           NULL,         mti_alone_split,
    mti_stays,               mti_no_enlist,    mti_no_leave,     mti_no_destroy};

/* mt_comm_create_meta: no data and no peers. */
static const mti_transport mti_meta = {0, 0,
    mti_meta_check,   mti_no_call,           mti_no_call,    NULL,           NULL,         mti_meta_split,
    mti_refuse_over_nccl,    mti_no_enlist,    mti_no_leave,     mti_no_destroy};

/* Processes of mt_world_from_env without MPI, which are not connected. */
static const mti_transport mti_apart = {1, 0,
    mti_apart_check,  mti_no_call,           mti_no_call,    NULL,           NULL,         mti_apart_split,
    mti_processes_over_nccl, mti_no_enlist,    mti_no_leave,     mti_no_destroy};

static const mti_transport mti_threads = {1, 1,
    mti_no_check,     mti_local_collective,  mti_local_p2p,  mti_enter,      mti_exit,     mti_local_split,
    mti_group_over_nccl,     mti_no_enlist,    mti_local_leave,  mti_no_destroy};

#if MTI_NCCL
static const mti_transport mti_over_nccl = {1, 0,
    mti_peers_check,  mti_nccl_call,         mti_nccl_call,  NULL,           NULL,         mti_nccl_split,
    mti_refuse_over_nccl,    mti_nccl_enlist,  mti_nccl_leave,   mti_nccl_destroy};
#endif

#if MTI_MPI
static const mti_transport mti_over_mpi = {1, 0,
    mti_peers_check,  mti_mpi_call,          mti_mpi_call,   mti_mpi_enter,  mti_mpi_exit, mti_mpi_split,
    mti_group_over_nccl,     mti_no_enlist,    mti_mpi_leave,    mti_mpi_destroy};
#endif
/* clang-format on */

/* ---- >>status ---------------------------------------------------------------------------------------------------- */

/* clang-format off */
#define MTI_STATUS_NAME(name, value, text) case name: return #name;
#define MTI_STATUS_TEXT(name, value, text) case name: return text;
/* clang-format on */

MT_API const char *mt_status_name(mt_status status) {
    switch (status) { MT_STATUS_LIST(MTI_STATUS_NAME) }
    return "MT_ERR_?";
}

MT_API const char *mt_status_string(mt_status status) {
    switch (status) { MT_STATUS_LIST(MTI_STATUS_TEXT) }
    return "no such status";
}

#undef MTI_STATUS_NAME
#undef MTI_STATUS_TEXT

MT_API size_t mt_dtype_size(mt_dtype dtype) {
    switch (dtype) {
    case MT_F32: return 4;
    case MT_BF16: return 2;
    case MT_F16: return 2;
    case MT_I32: return 4;
    case MT_U8: return 1;
    }
    return 0;
}

MT_API const char *mt_dtype_name(mt_dtype dtype) {
    switch (dtype) {
    case MT_F32: return "f32";
    case MT_BF16: return "bf16";
    case MT_F16: return "f16";
    case MT_I32: return "i32";
    case MT_U8: return "u8";
    }
    return "no such dtype";
}

/* ---- >>context --------------------------------------------------------------------------------------------------- */

MT_API void mt_log(mt_context *ctx, mt_log_level level, const char *text) {
    if (ctx && ctx->logger.log) (ctx->logger.log)(ctx->logger.user, level, text ? text : "");
}

/* A message is one line, also when a name in it, such as one from a file, has a newline. */
static void mti_one_line(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || *text == 127) *text = '?';
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

static void *mti_default_alloc(void *user, size_t bytes, size_t alignment) {
    void *ptr = NULL;
    (void)user;
    return posix_memalign(&ptr, alignment, bytes) == 0 ? ptr : NULL;
}

static void mti_default_free(void *user, void *ptr, size_t bytes) {
    (void)user;
    (void)bytes;
    free(ptr);
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
    if (desc->stream && desc->device != MT_DEVICE_CUDA) {
        snprintf(text, sizeof text, "mt_context_create: stream is set, but device is %s",
                 desc->device == MT_DEVICE_META ? "MT_DEVICE_META" : "MT_DEVICE_CPU");
        return mti_context_refuse(world, desc, MT_ERR_ARGUMENT, text);
    }
    return MT_SUCCESS;
}

/* Whether this process was forked from the one that has created something. It has copies of that process's memory, but
   not its threads, whose locks stay as they were, and it shares the files and connections. */
static int mti_is_forked(pid_t process) { return process != getpid(); }

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
    if (slot->destroy) (slot->destroy)(ctx, slot->memory);
    mt_host_free(slot->memory);
    slot->memory = NULL; /* mt_context_slot returns NULL while the lower slots are destroyed */
}

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

/* Ends what uses the device, and frees its memory. */
static void mti_context_close(mt_context *ctx) {
    int i;
    if (ctx->device == MT_DEVICE_CUDA) mti_cuda_idle(ctx);
    for (i = MT_SLOT_COUNT; i-- > 0;) mti_slot_destroy(ctx, &ctx->slots[i]);
    mti_replicas_destroy(ctx);
    if (ctx->device == MT_DEVICE_CUDA) mti_cuda_close(ctx);
    mti_team_destroy(ctx->team);
    if (ctx->device != MT_DEVICE_META && ctx->arena)
        (ctx->allocator.free)(ctx->allocator.user, ctx->arena, ctx->arena_bytes);
}

MT_API void mt_context_destroy(mt_context *ctx) {
    if (!ctx) return;
    if (!mti_has_no_gpu(ctx)) mti_context_close(ctx);
    mt_trace_free(&ctx->trace);
    mti_checker_destroy(ctx->checker);
    mt_host_free(ctx);
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

static void mti_tell_forgotten(mt_context *ctx, const void *data, size_t bytes, int gone) {
    if (ctx && ctx->forget && data && bytes) (ctx->forget)(ctx, data, bytes, gone);
}

/* Refuses a call that waits for the GPU, or that only the host can do, while a graph is recorded. */
static mt_status mti_check_recording(mt_context *ctx) {
    if (!ctx->recording) return MT_SUCCESS;
    return mt_fail(
        ctx, MT_ERR_UNSUPPORTED,
        "between mt_graph_begin and mt_graph_end no call can wait for the GPU, upload, download or allocate: "
        "do this before mt_graph_launch");
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
        ptr = (ctx->allocator.alloc)(ctx->allocator.user, size, MT_ALIGNMENT);
        if (!ptr) return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_alloc: no memory for %zu bytes", bytes);
        if (ctx->device == MT_DEVICE_CUDA) status = mt_cuda_zero(ctx, ptr, size);
        else memset(ptr, 0, size);
        if (status != MT_SUCCESS) (ctx->allocator.free)(ctx->allocator.user, ptr, size);
        MT_TRY(status);
        *out = ptr;
    }
    ctx->allocated += size;
    status = mti_watch_block(ctx, *out, size);
    if (status == MT_SUCCESS) return MT_SUCCESS;
    mt_context_free(ctx, *out, size);
    *out = NULL;
    return status;
}

MT_API void mt_context_free(mt_context *ctx, void *ptr, size_t bytes) {
    size_t size = mt_align_up(bytes ? bytes : 1);
    if (!ctx || !ptr || mti_has_no_gpu(ctx)) return;
    if (ctx->device == MT_DEVICE_CUDA)
        mti_cuda_forget(ctx, ptr); /* waits for kernels that use ptr: the caller's allocator may not wait */
    if (ctx->device != MT_DEVICE_META) (ctx->allocator.free)(ctx->allocator.user, ptr, size);
    mti_forget_block(ctx, ptr, size);
    mti_tell_forgotten(ctx, ptr, size, 1);
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
    mti_allocate_again(ctx, *out, size);
    mti_tell_forgotten(ctx, *out, size, 1);
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

/* ---- >>cuda ------------------------------------------------------------------------------------------------------ */

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

MT_API mt_status mt_cuda_enter(mt_context *ctx) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (ctx->device == MT_DEVICE_META) return MT_PLANNED;
    MT_TRY(mti_check_gpu(ctx));
    cudaGetLastError(); /* clears an error of the program, which mt_cuda_launched would report */
    MT_CUDA_TRY(ctx, cudaSetDevice(ctx->ordinal));
    mti_graph_await_end(ctx);
    return MT_SUCCESS;
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
    int devices = 0, major = 0, minor = 0, lowest, highest, i;
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
    MT_CUDA_TRY(ctx, cudaStreamCreateWithPriority(&ctx->second_stream, cudaStreamNonBlocking, highest));
    MT_CUDA_TRY(ctx, cudaStreamCreateWithPriority(&ctx->third_stream, cudaStreamNonBlocking, highest));
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

/* Waits for all streams, and detaches the communicators over NCCL from the context. */
static void mti_cuda_idle(mt_context *ctx) {
    if (cudaSetDevice(ctx->ordinal) != cudaSuccess) { /* no such GPU: mti_cuda_open has failed with a message */
        cudaGetLastError();
        return;
    }
    mti_cuda_drop(ctx); /* the program has failed before mt_graph_end */
    mti_graph_forget(ctx);
    if (ctx->second_stream) { /* before the compute stream, which may wait for it */
        ctx->stream = ctx->second_stream;
        mti_cuda_synchronize(ctx);
    }
    if (ctx->third_stream) {
        ctx->stream = ctx->third_stream;
        mti_cuda_synchronize(ctx);
    }
    ctx->stream = ctx->compute_stream;
    if (ctx->stream) mti_cuda_synchronize(ctx);
    mti_nccl_close(ctx);
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
    if (ctx->staging.memory) cudaFreeHost(ctx->staging.memory);
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

/* Prepares to free ptr: waits for the stream, and deregisters the memory from NCCL. */
static void mti_cuda_forget(mt_context *ctx, const void *ptr) {
    mti_cuda_synchronize(ctx); /* an error does not keep the memory from being freed */
    mti_nccl_forget(ctx, NULL, ptr);
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
    return MT_SUCCESS;
}

static mt_status mti_cuda_join(mt_context *ctx, int ticket) {
    ctx->pending &= ~(1u << ticket);
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaStreamWaitEvent(ctx->compute_stream, ctx->events[ticket], 0));
    return MT_SUCCESS;
}
#else /* without CUDA there is no context on MT_DEVICE_CUDA, and the static functions are never called */
static void mti_cuda_forget(mt_context *ctx, const void *ptr) { (void)ctx, (void)ptr; }
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
static int mti_cuda_count(void) { return 0; }
static mt_status mti_cuda_open(mt_context *ctx, const mt_context_desc *desc) {
    return (void)ctx, (void)desc, MT_ERR_UNSUPPORTED;
}
static void mti_cuda_idle(mt_context *ctx) { (void)ctx; }
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

/* ---- >>local ----------------------------------------------------------------------------------------------------- */

/* Ranks are threads. They share a group: one word (`state`) that counts arrivals, one slot per rank with the rank's
   current call and the addresses of its buffers, and one mutex and condition variable for long waits.

   A collective: write the call to the slot, arrive, wait for the others, compare all slots, move the data directly
   between the callers' buffers, arrive again. No rank passes the second meeting before all ranks have finished reading,
   so no data is staged. Only the first meeting can fail. Once it has succeeded, every rank is inside the library and
   will finish, so the second meeting needs no timeout. A call that fails in the first meeting has changed no buffer.

   Point to point: the sender posts its buffer in its outbox and waits. The receiver copies from this buffer and then
   changes the state of the outbox to MTI_DONE.

   On GPUs the threads meet in the same way, but the work of a call goes into the streams, and the call returns before
   it is done. Streams wait for each other by events: each rank's part of a call runs after what the other ranks had in
   their streams before the call (`ready`), and what a rank enqueues after the call runs after the parts of the others
   (`done`, and `taken` for a message). An event is recorded again only after all waits for it are enqueued: the
   meetings of a collective and the outbox of a message ensure this. Only mt_barrier and a call that fails wait for a
   GPU. The events belong to the group, because peers may need those of a rank that has left. */

/* mti_group.state: bit 0: the group is broken; bits 1 to 15: number of arrivals at the current meeting; bits 16 to 63:
   its generation, the number of meetings before it. */
#define MTI_BROKEN ((uint64_t)1)
#define MTI_ARRIVAL ((uint64_t)2)
#define MTI_GENERATION 16

/* mti_slot.outbox: the low three bits hold one of these states, the bits above hold the destination + 1. 0: empty. */
#define MTI_POSTED 1u
#define MTI_TAKEN 2u /* the receiver is copying: the sender must wait */
#define MTI_DONE 3u
#define MTI_REFUSED 4u

#define MTI_OUTSIDE 0
#define MTI_IN_COLLECTIVE 1
#define MTI_IN_P2P 2

#define MTI_SPIN_SECONDS 20e-6 /* a wait polls for this time before it sleeps */
#define MTI_LATE_TURN 500e-6   /* seconds; for this and the next two, see mti_note_turn */
#define MTI_LATE_TURNS 2       /* per rank, in a row */
#define MTI_CROWDED 32

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void
mti_say(mti_text *text, const char *format, ...) {
    size_t left = sizeof text->data - text->used;
    va_list args;
    int n;
    va_start(args, format);
    n = vsnprintf(text->data + text->used, left, format, args);
    va_end(args);
    if (n > 0) text->used += (size_t)n < left ? (size_t)n : left - 1;
}

#if MTI_NCCL || defined(MT_USE_MPI)
/* Writes that rank 0 and rank r are of different versions (MT_VERSION_NUMBER). */
static void mti_say_versions(mti_text *text, int first, int r, int other) {
    mti_say(text, "rank 0 is of megatron.h %d.%d.%d, but rank %d of %d.%d.%d: build all ranks with the same headers",
            first / 1000000, first / 1000 % 1000, first % 1000, r, other / 1000000, other / 1000 % 1000, other % 1000);
}
#endif

MT_API mt_status mt_comm_fail(mt_comm *comm, mt_status status, const char *text) {
    size_t n;
    if (!comm || (comm->owner && comm->owner->leaving)) return status;
    if (!text) text = "";
    n = strlen(text);
    if (n >= sizeof comm->error) n = sizeof comm->error - 1;
    memmove(comm->error, text, n); /* text may be comm->error itself */
    comm->error[n] = '\0';
    mti_one_line(comm->error);
    comm->error_status = status;
    if (comm->owner && comm->owner->world != comm) mt_comm_fail(comm->owner->world, status, text);
    return status;
}

/* As mt_fail, but stores the message in comm, too. ctx and comm may be NULL. */
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static mt_status
mti_refuse(mt_context *ctx, mt_comm *comm, mt_status status, const char *format, ...) {
    char text[MT_ERROR_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (comm) mt_comm_fail(comm, status, text);
    return ctx ? mt_fail(ctx, status, "%s", text) : status;
}

/* -- clocks and cores -- */

static double mti_now(void) {
#if MTI_MONOTONIC
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#else
    struct timeval t;
    gettimeofday(&t, NULL);
    return (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
#endif
}

static struct timespec mti_timespec(double seconds) {
    struct timespec t;
    double whole = seconds < 2e9 ? seconds : 2e9; /* fits a 32-bit time_t */
    t.tv_sec = (time_t)whole;
    t.tv_nsec = (long)(1e9 * (whole - (double)t.tv_sec));
    return t;
}

/* As pthread_cond_init, with the clock of mti_now. */
static int mti_cond_init(pthread_cond_t *cond) {
#if MTI_MONOTONIC
    pthread_condattr_t attr;
    int failed = pthread_condattr_init(&attr);
    if (failed) return failed;
    failed = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (!failed) failed = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return failed;
#else
    return pthread_cond_init(cond, NULL);
#endif
}

/* Measures a wait without the time in which this process was stopped. Otherwise the first thread that runs again would
   blame ranks that had no chance to arrive. A waiting thread reads the clock every `tick` seconds. An interval
   counts as at most two ticks: a longer one usually means that the process was stopped. */
typedef struct mti_stopwatch {
    double waited, looked, tick;
} mti_stopwatch;

#define MTI_TICKS 16         /* ticks per timeout, at least */
#define MTI_TICK_SECONDS 1.0 /* the longest tick */

static mti_stopwatch mti_stopwatch_start(double timeout) {
    mti_stopwatch w;
    w.waited = 0;
    w.looked = mti_now();
    w.tick = timeout / MTI_TICKS < MTI_TICK_SECONDS ? timeout / MTI_TICKS : MTI_TICK_SECONDS;
    return w;
}

/* Reads the clock, and returns the seconds counted since the start of the stopwatch. */
static double mti_waited(mti_stopwatch *w) {
    double now = mti_now(), step = now - w->looked;
    w->looked = now;
    if (step > 0) w->waited += step < 2 * w->tick ? step : 2 * w->tick;
    return w->waited;
}

/* Sleeps until cond is signalled, until the next tick, or until `timeout` is over. The caller holds the mutex. */
static void mti_stopwatch_sleep(const mti_stopwatch *w, double timeout, pthread_cond_t *cond, pthread_mutex_t *mutex) {
    double left = timeout - w->waited;
    struct timespec wake = mti_timespec(w->looked + (left < w->tick ? left : w->tick));
    pthread_cond_timedwait(cond, mutex, &wake);
}

/* A call on a communicator begins with mti_hold and ends with mti_release, which gets the result of mti_hold. Between
   the two the thread cannot be cancelled, because it may hold a lock and peers may read its buffers. mti_release
   executes a pending cancellation. Android cannot cancel threads. */
static int mti_hold(void) {
    int before = 0;
#if defined(PTHREAD_CANCEL_DISABLE)
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
#endif
    return before;
}

static void mti_release(int before) {
#if defined(PTHREAD_CANCEL_DISABLE)
    pthread_setcancelstate(before, NULL);
    pthread_testcancel();
#else
    (void)before;
#endif
}

static void mti_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#define MTI_MAX_RANKS 1024
#define MTI_CORE_BYTES 1024 /* 8192 cores */
#if defined(__linux__)
#define MTI_CAN_PIN 1
#else
#define MTI_CAN_PIN 0
#endif

/* Returns the number of cores that this thread may run on, and stores the first `limit` core numbers in core. */
static int mti_allowed_cores(int *core, int limit) {
    int found = 0;
#if defined(__linux__)
    unsigned char mask[MTI_CORE_BYTES];
    int i;
    long bytes;
    memset(mask, 0, sizeof mask); /* for MemorySanitizer, which does not see what a system call writes */
    bytes = syscall(SYS_sched_getaffinity, 0L, (long)sizeof mask, mask);
    for (i = 0; i < 8 * (int)bytes; i++) {
        if (!(mask[i / 8] >> (i % 8) & 1)) continue; /* assumes a little-endian machine */
        if (found < limit) core[found] = i;
        found++;
    }
#else
    (void)core;
    (void)limit;
    found = (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return found > 0 ? found : 1;
}

/* Pins this thread, and the threads that it starts later, to these cores. */
static void mti_pin(const int *core, int count) {
#if defined(__linux__)
    unsigned char mask[MTI_CORE_BYTES];
    int i;
    if (count < 1) return;
    memset(mask, 0, sizeof mask);
    for (i = 0; i < count; i++)
        if (core[i] < 8 * MTI_CORE_BYTES) mask[core[i] / 8] |= (unsigned char)(1u << (core[i] % 8));
    (void)syscall(SYS_sched_setaffinity, 0L, (long)sizeof mask, mask); /* an error only costs speed */
#else
    (void)core;
    (void)count;
#endif
}

#if MT_HAS_CUDA || MTI_MPI || MTI_COMPARES
/* Called between two polls of a wait: yields the core, or sleeps for 50 us when the wait has lasted `soon` seconds. */
static void mti_rest(double waited, double soon) {
    struct timespec nap = mti_timespec(50e-6);
    int before = mti_hold();
    if (waited < soon) sched_yield();
    else nanosleep(&nap, NULL);
    mti_release(before);
}
#endif

/* -- groups -- */

static mti_slot *mti_slot_of(const mti_group *g, int rank) {
    return (mti_slot *)(void *)(g->slots + (size_t)rank * mt_align_up(sizeof(mti_slot)));
}

static mt_comm *mti_comm_new(const mti_transport *transport, int rank, int size, const char *name) {
    mt_comm *comm = (mt_comm *)calloc(1, sizeof *comm);
    if (!comm) return NULL;
    comm->transport = transport;
    comm->process = getpid();
    comm->rank = comm->local_rank = rank;
    comm->size = size;
    mt_comm_set_name(comm, name);
    comm->is_named = 0;
    return comm;
}

static void mti_group_release(mti_group *g) {
    mti_group *root;
    int r;
    if (!g || mti_is_forked(g->process)) return; /* there, threads of the other process wait for ever */
    if (__atomic_sub_fetch(&g->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    root = g->root;
    for (r = 0; r < g->size; r++) {
        mti_event_free(&mti_slot_of(g, r)->ready);
        mti_event_free(&mti_slot_of(g, r)->done);
        mti_event_free(&mti_slot_of(g, r)->taken);
    }
    pthread_cond_destroy(&g->cond);
    pthread_mutex_destroy(&g->mutex);
    free(g->slots);
    free(g);
    mti_group_release(root);
}

/* Creates a group with one reference per rank; NULL: out of memory. */
static mti_group *mti_group_new(int size, double timeout, int spin) {
    size_t bytes = (size_t)size * mt_align_up(sizeof(mti_slot));
    mti_group *g = (mti_group *)mti_default_alloc(NULL, sizeof *g, MT_ALIGNMENT);
    unsigned char *slots = (unsigned char *)mti_default_alloc(NULL, bytes, MT_ALIGNMENT);
    int mutex = -1, cond = -1;
    if (g && slots) {
        memset(g, 0, sizeof *g);
        memset(slots, 0, bytes);
        mutex = pthread_mutex_init(&g->mutex, NULL);
        cond = mutex ? -1 : mti_cond_init(&g->cond);
    }
    if (cond) {
        if (!mutex) pthread_mutex_destroy(&g->mutex);
        free(slots);
        free(g);
        return NULL;
    }
    g->process = getpid();
    g->size = size;
    g->timeout = timeout;
    g->spin = spin;
    g->slots = slots;
    g->references = size;
    return g;
}

static mti_group *mti_root_of(mti_group *g) { return g && g->root ? g->root : g; }

/* Creates all communicators of a new group, or none. parent: the group that is split; NULL: none */
static mt_status mti_family_new(int size, double timeout, int spin, mti_group *parent, const char *name,
                                mt_comm **comms) {
    mti_group *g = size > 1 ? mti_group_new(size, timeout, spin) : NULL;
    int r, made = 0;
    if (size > 1 && !g) return MT_ERR_MEMORY;
    while (made < size && (comms[made] = mti_comm_new(g ? &mti_threads : &mti_alone, made, size, name)) != NULL) made++;
    if (made < size) {
        for (r = 0; r < made; r++) free(comms[r]);
        if (g) g->references = 1;
        mti_group_release(g);
        return MT_ERR_MEMORY;
    }
    for (r = 0; r < size; r++) comms[r]->group = g;
    if (g && parent) {
        g->root = mti_root_of(parent);
        __atomic_add_fetch(&g->root->references, 1, __ATOMIC_RELAXED);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_comm_create_local(int ranks, double timeout_s, mt_comm **comms) {
    int r, spin;
    mt_status status;
    if (!comms || ranks < 1 || ranks > MTI_MAX_RANKS || timeout_s != timeout_s) return MT_ERR_ARGUMENT;
    spin = ranks <= mti_allowed_cores(NULL, 0);
    status = mti_family_new(ranks, timeout_s > 0 ? timeout_s : MT_TIMEOUT_DEFAULT, spin, NULL, "world", comms);
    for (r = 0; status != MT_SUCCESS && r < ranks; r++) comms[r] = NULL;
    return status;
}

MT_API mt_status mt_comm_create_meta(int size, int rank, mt_comm **out) {
    if (!out) return MT_ERR_ARGUMENT;
    *out = NULL;
    if (size < 1 || rank < 0 || rank >= size) return MT_ERR_ARGUMENT;
    *out = mti_comm_new(&mti_meta, rank, size, "meta");
    mt_comm_set_span(*out, size - 1);
    return *out ? MT_SUCCESS : MT_ERR_MEMORY;
}

MT_API void mt_comm_set_span(mt_comm *comm, int span) {
    if (comm && span >= comm->size - 1) comm->span = span;
}

MT_API int mt_comm_rank(const mt_comm *comm) { return comm ? comm->rank : 0; }
MT_API int mt_comm_size(const mt_comm *comm) { return comm ? comm->size : 1; }
MT_API int mt_comm_local_rank(const mt_comm *comm) { return comm ? comm->local_rank : 0; }
MT_API int mt_comm_is_meta(const mt_comm *comm) { return comm && comm->transport == &mti_meta; }
MT_API const char *mt_comm_name(const mt_comm *comm) { return comm ? comm->name : ""; }
MT_API const char *mt_comm_last_error(const mt_comm *comm) { return comm ? comm->error : "the communicator is NULL"; }

MT_API void mt_comm_set_name(mt_comm *comm, const char *name) {
    size_t n = name ? strlen(name) : 0;
    if (!comm) return;
    if (n >= sizeof comm->name) n = sizeof comm->name - 1;
    if (n) memmove(comm->name, name, n);
    comm->name[n] = '\0';
    comm->is_named = n > 0;
}

/* -- messages -- */

static void mti_slot_write(mti_slot *slot, const mti_call *call) {
    uint64_t what = (uint64_t)(call->kind + 1) | (uint64_t)call->dtype << 8 | (uint64_t)call->op << 16 |
                    (uint64_t)(call->root + 1) << 24 | (uint64_t)(call->source + 1) << 40;
    __atomic_store_n(&slot->what, what, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->count, (uint64_t)call->count, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->recvcount, (uint64_t)call->recvcount, __ATOMIC_RELAXED);
}

#define MTI_ON_META ((uint64_t)1 << 56) /* of `what`: the context is on MT_DEVICE_META */

static int mti_is_on_meta(const mti_slot *slot) {
    return (__atomic_load_n(&slot->what, __ATOMIC_RELAXED) & MTI_ON_META) != 0;
}

/* ctx: NULL for a call without a context */
static void mti_publish(const mt_context *ctx, mt_comm *comm, const mti_call *call, int inside) {
    mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    mti_slot_write(slot, call);
    if (ctx && ctx->device == MT_DEVICE_META) __atomic_or_fetch(&slot->what, MTI_ON_META, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->inside, inside, __ATOMIC_RELEASE); /* mti_wait_status reads it, then the outbox */
    slot->send = call->send;
    slot->recv = call->recv;
    slot->color = call->color;
    slot->key = call->key;
}

static const char *mti_call_name(int kind) {
    if (kind < 0) return "nothing yet"; /* an empty slot */
    if (kind == MTI_SPLIT) return "split";
    if (kind == MTI_SEND_RECV) return "send_recv";
    if (kind == MTI_CREATE) return "create";
    if (kind == MTI_GRAPH_BEGIN) return "graph_begin";
    if (kind == MTI_GRAPH_END) return "graph_end";
    if (kind == MTI_GRAPH_LAUNCH) return "graph_launch";
    return mt_collective_name((mt_collective)kind);
}

static const char *mti_op_name(uint64_t op) { return op == (uint64_t)MT_SUM ? "sum" : "max"; }

static void mti_say_send_recv(mti_text *text, const mti_slot *slot, int to, int from, const char *dtype) {
    unsigned long long count = __atomic_load_n(&slot->count, __ATOMIC_RELAXED);
    unsigned long long recvcount = __atomic_load_n(&slot->recvcount, __ATOMIC_RELAXED);
    mti_say(text, "send_recv(");
    if (to >= 0) mti_say(text, "count %llu to rank %d, ", count, to);
    if (from >= 0) mti_say(text, "count %llu from rank %d, ", recvcount, from);
    mti_say(text, "%s)", dtype);
}

/* Writes the call in a slot: "all_reduce(count 4, f32, sum)". */
static void mti_say_call(mti_text *text, const mti_slot *slot) {
    uint64_t what = __atomic_load_n(&slot->what, __ATOMIC_RELAXED);
    unsigned long long count = __atomic_load_n(&slot->count, __ATOMIC_RELAXED);
    int kind = (int)(what & 255) - 1, root = (int)(what >> 24 & 0xffff) - 1, source = (int)(what >> 40 & 0xffff) - 1;
    const char *dtype = mt_dtype_name((mt_dtype)(what >> 8 & 255)), *name = mti_call_name(kind);
    switch (kind) {
    case MT_ALL_REDUCE:
    case MT_REDUCE_SCATTER:
        mti_say(text, "%s(count %llu, %s, %s)", name, count, dtype, mti_op_name(what >> 16 & 255));
        break;
    case MT_ALL_GATHER: mti_say(text, "%s(count %llu, %s)", name, count, dtype); break;
    case MT_BROADCAST: mti_say(text, "%s(count %llu, %s, root %d)", name, count, dtype, root); break;
    case MT_SEND: mti_say(text, "%s(count %llu, %s, to rank %d)", name, count, dtype, root); break;
    case MT_RECV: mti_say(text, "%s(count %llu, %s, from rank %d)", name, count, dtype, source); break;
    case MTI_SEND_RECV: mti_say_send_recv(text, slot, root, source, dtype); break;
    default: mti_say(text, "%s", name); break;
    }
}

static void mti_say_where(mti_text *text, const mt_comm *comm) {
    mti_say(text, " on \"%s\" (%d ranks): ", comm->name, comm->size);
}

/* Writes this rank's call: "all_reduce(count 4, f32, sum) on "world" (3 ranks): ". */
static void mti_say_mine(mti_text *text, const mt_comm *comm) {
    mti_say_call(text, mti_slot_of(comm->group, comm->rank));
    mti_say_where(text, comm);
}

static int mti_same_call(const mti_slot *a, const mti_slot *b) {
    return __atomic_load_n(&a->what, __ATOMIC_RELAXED) == __atomic_load_n(&b->what, __ATOMIC_RELAXED) &&
           __atomic_load_n(&a->count, __ATOMIC_RELAXED) == __atomic_load_n(&b->count, __ATOMIC_RELAXED);
}

/* Writes all ranks with the same call as rank `first`: "ranks 0, 2, 3 called all_reduce(...)". */
static void mti_say_alike(mti_text *text, const mti_group *g, int first) {
    int r, alike = 0, said = 0;
    for (r = first; r < g->size; r++) alike += mti_same_call(mti_slot_of(g, first), mti_slot_of(g, r));
    mti_say(text, alike > 1 ? "ranks " : "rank ");
    for (r = first; r < g->size && said < 8; r++) {
        if (!mti_same_call(mti_slot_of(g, first), mti_slot_of(g, r))) continue;
        mti_say(text, said++ ? ", %d" : "%d", r);
    }
    if (alike > said) mti_say(text, " and %d more", alike - said);
    mti_say(text, " called ");
    mti_say_call(text, mti_slot_of(g, first));
}

/* Says that of two ranks one has no data. */
static void mti_say_device(mti_text *text, const mti_group *g, int a, int b) {
    int on_meta = mti_is_on_meta(mti_slot_of(g, a));
    if (on_meta == mti_is_on_meta(mti_slot_of(g, b))) return;
    mti_say(text, "; rank %d is on MT_DEVICE_META, rank %d is not", on_meta ? a : b, on_meta ? b : a);
}

static void mti_say_two(mti_text *text, const mti_group *g, int a, int b) {
    mti_say(text, "rank %d called ", a);
    mti_say_call(text, mti_slot_of(g, a));
    mti_say(text, ", rank %d called ", b);
    mti_say_call(text, mti_slot_of(g, b));
    mti_say_device(text, g, a, b);
}

/* Writes which ranks called what. The message is the same on every rank, because all ranks read the same slots. */
static void mti_say_mismatch(mti_text *text, const mt_comm *comm) {
    const mti_group *g = comm->group;
    int r, before, said = 0;
    mti_say(text, "%s", mti_call_name((int)(__atomic_load_n(&mti_slot_of(g, 0)->what, __ATOMIC_RELAXED) & 255) - 1));
    mti_say_where(text, comm);
    for (r = 0; r < g->size; r++) {
        for (before = 0; before < r && !mti_same_call(mti_slot_of(g, before), mti_slot_of(g, r)); before++) continue;
        if (before < r) continue;
        if (said == 4) {
            mti_say(text, ", and other ranks made other calls");
            return;
        }
        if (said++) mti_say(text, ", ");
        mti_say_alike(text, g, r);
    }
    for (r = 1; r < g->size && mti_is_on_meta(mti_slot_of(g, r)) == mti_is_on_meta(mti_slot_of(g, 0)); r++) continue;
    if (r < g->size) mti_say_device(text, g, 0, r);
}

static void mti_say_absent(mti_text *text, const mti_group *g, int rank) {
    const mti_slot *slot = mti_slot_of(g, rank);
    mti_say(text, "rank %d, ", rank);
    if (!__atomic_load_n(&slot->what, __ATOMIC_RELAXED)) {
        mti_say(text, "which has not called anything here yet");
        return;
    }
    mti_say(text, __atomic_load_n(&slot->inside, __ATOMIC_RELAXED) ? "which waits in " : "whose last call here was ");
    mti_say_call(text, slot);
}

/* Writes which ranks a collective (peer < 0) or a message (to or from `peer`) waits for. For a collective it also names
   the first rank that waits in a different call. */
static void mti_say_timeout(mti_text *text, const mt_comm *comm, int peer) {
    const mti_group *g = comm->group;
    const mti_slot *mine = mti_slot_of(g, comm->rank);
    int r, absent = 0;
    mti_say_mine(text, comm);
    mti_say(text, "waited %.2f s for ", g->timeout);
    if (peer >= 0) {
        mti_say_absent(text, g, peer);
        return;
    }
    for (r = 0; r < g->size; r++) {
        if (__atomic_load_n(&mti_slot_of(g, r)->inside, __ATOMIC_RELAXED) == MTI_IN_COLLECTIVE) continue;
        if (absent && absent < 4) mti_say(text, "; ");
        if (absent++ < 4) mti_say_absent(text, g, r);
    }
    if (absent > 4) mti_say(text, "; and %d more", absent - 4);
    if (!absent) mti_say(text, "a rank that arrived only now");
    for (r = 0; r < g->size; r++) {
        const mti_slot *slot = mti_slot_of(g, r);
        int waits = __atomic_load_n(&slot->inside, __ATOMIC_RELAXED) == MTI_IN_COLLECTIVE;
        if (!waits || mti_same_call(slot, mine)) continue;
        mti_say(text, "; rank %d waits in ", r);
        mti_say_call(text, slot);
        return;
    }
}

static void mti_say_left(mti_text *text, const mt_comm *comm, int peer) {
    const mti_group *g = comm->group;
    int r;
    mti_say_mine(text, comm);
    for (r = 0; r < g->size; r++) {
        const char *left = __atomic_load_n(&mti_slot_of(g, r)->left, __ATOMIC_SEQ_CST);
        if (!left || (peer >= 0 && r != peer)) continue;
        mti_say(text, "rank %d %s", r, left);
        return;
    }
}

/* -- waiting -- */

/* A wait ends when (*word & mask) == value, or, with until_not, when (*word & mask) != value. */
typedef struct mti_wait {
    const uint64_t *word;
    uint64_t mask, value;
    int until_not;
    int peer;    /* the rank waited for; -1: all ranks */
    int rank;    /* if peer is -1: the rank that waits */
    int forever; /* 1: all ranks needed are inside the call and will finish: the wait cannot fail */
} mti_wait;

typedef enum mti_outcome { MTI_MET, MTI_SEES_BROKEN, MTI_SEES_LEFT, MTI_SEES_UNLIKE, MTI_SEES_LATE } mti_outcome;

static int mti_wait_over(const mti_wait *w) {
    return ((__atomic_load_n(w->word, __ATOMIC_SEQ_CST) & w->mask) == w->value) != (w->until_not != 0);
}

/* Detects cores that other threads use, perhaps those of another program: polling with sched_yield then took longer
   than MTI_LATE_TURN, because another thread computed for a time slice. After MTI_LATE_TURNS such polls per rank in a
   row, the ranks sleep without polling for MTI_CROWDED times as long as this poll took, because the scheduler runs a
   woken thread before threads that compute. */
static void mti_note_turn(mti_group *root, double start, double now) {
    if (now - start <= MTI_LATE_TURN) {
        if (__atomic_load_n(&root->late_turns, __ATOMIC_RELAXED) != 0)
            __atomic_store_n(&root->late_turns, 0, __ATOMIC_RELAXED);
    } else if (__atomic_add_fetch(&root->late_turns, 1, __ATOMIC_RELAXED) >= MTI_LATE_TURNS * root->size) {
        __atomic_store_n(&root->crowded_until, (int64_t)(1e6 * (now + MTI_CROWDED * (now - start))), __ATOMIC_RELAXED);
    }
}

/* Polls for about MTI_SPIN_SECONDS, and returns whether the wait is over. With a core for every rank it spins. With
   fewer cores it calls sched_yield, so that the ranks waited for can run: this costs an eighth of sleeping and waking
   up (8 ranks on 2 cores). */
static int mti_spin(mti_group *g, const mti_wait *w) {
    mti_group *root = mti_root_of(g);
    int rounds = g->spin ? 32 : 1, over = mti_wait_over(w), i;
    double start, now;
    if (over) return 1;
    start = mti_now();
    if (1e6 * start < (double)__atomic_load_n(&root->crowded_until, __ATOMIC_RELAXED)) return 0;
    do {
        for (i = 0; i < rounds && !over; i++) {
            if (g->spin) mti_pause();
            else sched_yield();
            over = mti_wait_over(w);
        }
        now = mti_now();
    } while (!over && now - start < MTI_SPIN_SECONDS);
    if (!g->spin) mti_note_turn(root, start, now);
    return over;
}

static int mti_is_broken(const mti_group *g) {
    return (__atomic_load_n(&g->state, __ATOMIC_SEQ_CST) & MTI_BROKEN) != 0;
}

static int mti_has_left(const mti_group *g, int peer) {
    if (peer < 0) return __atomic_load_n(&g->left_count, __ATOMIC_SEQ_CST) > 0;
    return __atomic_load_n(&mti_slot_of(g, peer)->left, __ATOMIC_SEQ_CST) != NULL;
}

static uint64_t mti_outbox(int destination, unsigned state) { return (uint64_t)(destination + 1) << 3 | state; }

/* Returns a rank that waits for `rank` in another kind of call, so that neither can go on, or -1. With a peer, `rank`
   waits for a message to or from it, and the peer may be in a collective. With peer -1, `rank` is in a collective, and
   others may send to it, or await a message of it. */
static int mti_waits_apart(const mti_group *g, int rank, int peer) {
    int r;
    if (peer >= 0)
        return __atomic_load_n(&mti_slot_of(g, peer)->inside, __ATOMIC_SEQ_CST) == MTI_IN_COLLECTIVE ? peer : -1;
    for (r = 0; r < g->size; r++) {
        const mti_slot *slot = mti_slot_of(g, r);
        if (__atomic_load_n(&slot->outbox, __ATOMIC_SEQ_CST) == mti_outbox(rank, MTI_POSTED)) return r;
        if (__atomic_load_n(&slot->awaited, __ATOMIC_SEQ_CST) == rank + 1) return r;
    }
    return -1;
}

/* A peer that is in a collective may have taken the message before, so the word is read again. */
static mti_outcome mti_wait_status(const mti_group *g, const mti_wait *w, int late) {
    if (mti_is_broken(g)) return MTI_SEES_BROKEN;
    if (mti_has_left(g, w->peer)) return MTI_SEES_LEFT;
    if (mti_waits_apart(g, w->rank, w->peer) >= 0 && !mti_wait_over(w)) return MTI_SEES_UNLIKE;
    return late ? MTI_SEES_LATE : MTI_MET;
}

/* Waits until w is over, the group breaks, a rank leaves, or the timeout expires.
   A thread that changes the word does this before it reads `sleepers`. A thread that sleeps increments `sleepers`
   before it reads the word. All four accesses are SEQ_CST: either the second thread sees the new word, or the first one
   sees that a thread sleeps. */
static mti_outcome mti_wait_for(mti_group *g, const mti_wait *w) {
    mti_stopwatch watch;
    mti_outcome outcome = MTI_MET;
    int late = 0;
    if (mti_spin(g, w)) return MTI_MET;
    watch = mti_stopwatch_start(g->timeout);
    pthread_mutex_lock(&g->mutex);
    __atomic_add_fetch(&g->sleepers, 1, __ATOMIC_SEQ_CST);
    while (!mti_wait_over(w)) {
        if (w->forever) {
            pthread_cond_wait(&g->cond, &g->mutex);
            continue;
        }
        outcome = mti_wait_status(g, w, late);
        if (outcome != MTI_MET) break;
        mti_stopwatch_sleep(&watch, g->timeout, &g->cond, &g->mutex);
        late = mti_waited(&watch) >= g->timeout;
    }
    __atomic_sub_fetch(&g->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&g->mutex);
    return outcome;
}

static void mti_wake(mti_group *g) {
    if (__atomic_load_n(&g->sleepers, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&g->mutex); /* a thread counted in `sleepers` now sleeps, or will read the word again */
    pthread_mutex_unlock(&g->mutex);
    pthread_cond_broadcast(&g->cond);
}

/* Breaks the group: every current and future wait fails with this message. Only the first break of a group counts. The
   group breaks only if the meeting `generation` has not taken place; if it has, mti_break does nothing and returns
   nonzero. MTI_ANY: the break does not depend on a meeting. */
#define MTI_ANY UINT64_MAX
static int mti_break(mti_group *g, mt_status status, const mti_text *text, uint64_t generation) {
    uint64_t state;
    int moved = 0;
    pthread_mutex_lock(&g->mutex);
    state = __atomic_load_n(&g->state, __ATOMIC_SEQ_CST);
    if (!(state & MTI_BROKEN)) {
        g->why_broken = status;
        memcpy(g->text, text->data, text->used);
        g->text[text->used] = '\0';
        do moved = generation != MTI_ANY && state >> MTI_GENERATION != generation;
        while (!moved && !__atomic_compare_exchange_n(&g->state, &state, state | MTI_BROKEN, 0, __ATOMIC_SEQ_CST,
                                                      __ATOMIC_SEQ_CST));
    }
    pthread_mutex_unlock(&g->mutex);
    if (!moved) pthread_cond_broadcast(&g->cond);
    return moved;
}

/* After an error of any group while ranks record together: breaks their group, too, because ranks outside of the other
   group would wait there for this rank, which only comes to mt_graph_end. */
static void mti_break_recorders(mt_context *ctx) {
    mti_text text;
    if (!ctx || !ctx->recorders) return;
    text.used = 0;
    mti_say(&text, "graph");
    mti_say_where(&text, ctx->recorders);
    mti_say(&text, "rank %d failed while it recorded (%s)", ctx->recorders->rank, mt_last_error(ctx));
    mti_break(ctx->turns, MT_ERR_PEER, &text, MTI_ANY);
}

/* mti_broken_now is for ranks that were waiting when the group broke, mti_broken_before for ranks that call later. */
static mt_status mti_broken_now(mt_context *ctx, mt_comm *comm) {
    mt_status status = mti_refuse(ctx, comm, comm->group->why_broken, "%s", comm->group->text);
    mti_break_recorders(ctx);
    return status;
}

static mt_status mti_broken_before(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    return mti_refuse(ctx, comm, MT_ERR_PEER,
                      "%s on \"%s\" (%d ranks): rank %d calls after this communicator failed (%s)",
                      mti_call_name(call->kind), comm->name, comm->size, comm->rank, comm->group->text);
}

/* Writes the call of this rank and that of the other one in mti_waits_apart. Returns 0 when there is none any more: it
   has given up, and is about to break the group, or has done so. */
static int mti_say_apart(mti_text *text, const mt_comm *comm, int peer) {
    int other = mti_waits_apart(comm->group, comm->rank, peer);
    mti_say_mine(text, comm);
    if (other >= 0) mti_say_two(text, comm->group, comm->rank, other);
    return other >= 0;
}

/* Waits until another rank has broken the group. */
static mti_outcome mti_wait_broken(mti_group *g) {
    mti_wait w;
    memset(&w, 0, sizeof w);
    w.word = &g->state;
    w.mask = w.value = MTI_BROKEN;
    w.peer = -1;
    w.forever = 1;
    mti_wait_for(g, &w);
    return MTI_SEES_BROKEN;
}

/* Ends a wait that failed: breaks the group with a message and returns the error. Returns MT_SUCCESS when the meeting
   `generation` took place at the last moment. */
static mt_status mti_give_up(mt_context *ctx, mt_comm *comm, mti_outcome outcome, int peer, uint64_t generation) {
    mti_text text;
    mt_status why = MT_ERR_TIMEOUT;
    text.used = 0;
    text.data[0] = '\0';
    if (outcome == MTI_SEES_LEFT) why = MT_ERR_PEER, mti_say_left(&text, comm, peer);
    if (outcome == MTI_SEES_UNLIKE) why = MT_ERR_MISMATCH;
    if (outcome == MTI_SEES_UNLIKE && !mti_say_apart(&text, comm, peer)) outcome = mti_wait_broken(comm->group);
    if (outcome == MTI_SEES_LATE) mti_say_timeout(&text, comm, peer);
    if (outcome != MTI_SEES_BROKEN && mti_break(comm->group, why, &text, generation)) return MT_SUCCESS;
    return mti_broken_now(ctx, comm);
}

/* Breaks the group because this rank has failed inside the call. The message has the rank's error. Returns status. */
static mt_status mti_break_failed(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    mti_text text;
    text.used = 0;
    mti_say(&text, "%s", mti_call_name(call->kind));
    mti_say_where(&text, comm);
    mti_say(&text, "rank %d failed with %s (%s)", comm->rank, mt_status_name(status), mt_last_error(ctx));
    mti_break(comm->group, MT_ERR_PEER, &text, MTI_ANY);
    mti_break_recorders(ctx);
    return status;
}

/* Breaks the group because the calls of its ranks differ. */
static mt_status mti_break_mismatch(mt_context *ctx, mt_comm *comm, const mti_text *text) {
    mti_break(comm->group, MT_ERR_MISMATCH, text, MTI_ANY);
    mti_refuse(ctx, comm, MT_ERR_MISMATCH, "%s", text->data);
    mti_break_recorders(ctx);
    return MT_ERR_MISMATCH;
}

/* As mti_break_failed, after the rank may have put a part of its work into the stream: peers get no event behind it. */
static void mti_fail_inside(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    mti_break_failed(ctx, comm, call, status);
    if (ctx->device == MT_DEVICE_CUDA) mti_cuda_drain(ctx);
}

/* -- turns: of the ranks that record a graph together, one calls CUDA at a time -- */

/* CUDA allows only one thread at a time to work on a graph ("Graph object thread safety", CUDA Runtime API). So a rank
   gives its turn away before it waits for other ranks, and takes it again before its next call of CUDA. */
static void mti_turn_give(mt_context *ctx) {
    if (!ctx || !ctx->has_turn) return;
    ctx->has_turn = 0;
    __atomic_store_n(&ctx->turns->turn, 0, __ATOMIC_RELEASE);
}

#if MT_HAS_CUDA
/* Waits until *flag is 0, and returns 1; after the timeout returns 0. take: sets it to 1 */
static int mti_flag_wait(const mti_group *g, int *flag, int take) {
    mti_stopwatch watch = mti_stopwatch_start(g->timeout);
    while (take ? __atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE) : __atomic_load_n(flag, __ATOMIC_ACQUIRE)) {
        double waited = mti_waited(&watch);
        if (waited > g->timeout) return 0;
        mti_rest(waited, 1e-3);
    }
    return 1;
}

static mt_status mti_turn_take(mt_context *ctx) {
    if (!ctx || !ctx->recorders || ctx->has_turn) return MT_SUCCESS;
    ctx->has_turn = mti_flag_wait(ctx->turns, &ctx->turns->turn, 1);
    if (ctx->has_turn) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_TIMEOUT, "rank %d of \"%s\" (%d ranks) waited %.2f s for another rank to record",
                   ctx->recorders->rank, ctx->recorders->name, ctx->recorders->size, ctx->turns->timeout);
}
#else
static mt_status mti_turn_take(mt_context *ctx) { return (void)ctx, MT_SUCCESS; }
#endif

/* Returns 1 when this rank has waited for its turn until the timeout. */
static int mti_turn_is_lost(const mt_context *ctx) { return ctx && ctx->recorders && !ctx->has_turn; }

/* As mti_wait_for, without a turn. */
static mti_outcome mti_wait_aside(mt_context *ctx, mti_group *g, const mti_wait *w) {
    mti_outcome outcome;
    mti_turn_give(ctx);
    outcome = mti_wait_for(g, w);
    if (outcome != MTI_MET) return outcome; /* the recording is lost */
    return mti_turn_take(ctx) == MT_SUCCESS ? MTI_MET : MTI_SEES_LATE;
}

/* ---- >>meetings: calls of ranks that are threads ----------------------------------------------------------------- */

typedef enum mti_arrival { MTI_WAITS, MTI_IS_LAST, MTI_TOO_LATE } mti_arrival;

/* Counts this rank as arrived at the current meeting, whose generation goes to *generation. The last rank starts the
   next generation. whatever: 1: also in a broken group */
static mti_arrival mti_arrive(mti_group *g, uint64_t *generation, int whatever) {
    uint64_t state = __atomic_load_n(&g->state, __ATOMIC_SEQ_CST), next;
    int last;
    do {
        if ((state & MTI_BROKEN) && !whatever) return MTI_TOO_LATE;
        *generation = state >> MTI_GENERATION;
        last = (int)(state >> 1 & 0x7fff) + 1 == g->size;
        next = last ? (*generation + 1) << MTI_GENERATION | (state & MTI_BROKEN) : state + MTI_ARRIVAL;
    } while (!__atomic_compare_exchange_n(&g->state, &state, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    if (last) mti_wake(g);
    return last ? MTI_IS_LAST : MTI_WAITS;
}

static mti_outcome mti_wait_meeting(mt_context *ctx, mt_comm *comm, uint64_t generation, int forever) {
    mti_group *g = comm->group;
    mti_wait w;
    w.word = &g->state;
    w.mask = ~(uint64_t)0 << MTI_GENERATION;
    w.value = generation << MTI_GENERATION;
    w.until_not = 1;
    w.rank = comm->rank;
    w.peer = -1;
    w.forever = forever;
    return mti_wait_aside(ctx, g, &w);
}

/* A meeting that cannot fail, because all ranks have passed mti_enter and are inside the same call. */
static void mti_meet(mt_comm *comm) {
    uint64_t generation;
    if (mti_arrive(comm->group, &generation, 1) == MTI_WAITS) mti_wait_meeting(NULL, comm, generation, 1);
}

static void mti_set_inside(mt_comm *comm, int inside) {
    __atomic_store_n(&mti_slot_of(comm->group, comm->rank)->inside, inside, __ATOMIC_RELEASE);
}

/* Compares the calls of all ranks. When they differ, every rank gets the same message. */
static mt_status mti_compare(mt_context *ctx, mt_comm *comm) {
    const mti_group *g = comm->group;
    mti_text text;
    int r = 1;
    while (r < g->size && mti_same_call(mti_slot_of(g, 0), mti_slot_of(g, r))) r++;
    if (r == g->size) return MT_SUCCESS;
    text.used = 0;
    mti_say_mismatch(&text, comm);
    return mti_break_mismatch(ctx, comm, &text);
}

/* The first meeting. After MT_SUCCESS every rank is in the same call and must call mti_exit. After an error this rank
   is not in the call, and no peer reads its buffers. */
static mt_status mti_enter(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_group *g = comm->group;
    uint64_t generation = 0;
    mt_status status = MT_SUCCESS;
    mti_arrival arrival;
    if (mti_is_broken(g)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_COLLECTIVE);
    arrival = mti_arrive(g, &generation, 0);
    if (arrival == MTI_TOO_LATE) status = mti_broken_before(ctx, comm, call);
    if (arrival == MTI_WAITS) {
        mti_outcome outcome = mti_wait_meeting(ctx, comm, generation, 0);
        if (outcome != MTI_MET) status = mti_give_up(ctx, comm, outcome, -1, generation);
    }
    if (status == MT_SUCCESS) status = mti_compare(ctx, comm);
    if (status == MT_SUCCESS && arrival == MTI_WAITS && mti_turn_is_lost(ctx))
        status = mti_break_failed(ctx, comm, call, MT_ERR_TIMEOUT);
    if (status != MT_SUCCESS) mti_set_inside(comm, MTI_OUTSIDE);
    return status;
}

static void mti_exit(mt_comm *comm) {
    mti_set_inside(comm, MTI_OUTSIDE);
    mti_meet(comm);
}

/* Before a call on a GPU: what is in the stream now comes before the parts of the peers. A collective over NCCL in the
   stream might never end. A peer would wait for it without a timeout, so this rank first waits with one. */
static mt_status mti_local_begin(mt_context *ctx, mt_comm *comm) {
    if (ctx->device != MT_DEVICE_CUDA) return MT_SUCCESS;
    if (!ctx->recording) MT_TRY(mt_cuda_wait_peers(ctx));
    return mti_cuda_record(ctx, &mti_slot_of(comm->group, comm->rank)->ready);
}

/* -- point to point -- */

static mti_wait mti_wait_outbox(const mti_slot *slot, uint64_t value, int until_not, int peer, int forever) {
    mti_wait w;
    w.word = &slot->outbox;
    w.mask = ~(uint64_t)0;
    w.value = value;
    w.until_not = until_not;
    w.peer = peer;
    w.rank = -1;
    w.forever = forever;
    return w;
}

static void mti_outbox_set(mti_group *g, mti_slot *slot, uint64_t value) {
    __atomic_store_n(&slot->outbox, value, __ATOMIC_SEQ_CST);
    mti_wake(g);
}

static void mti_post(mt_comm *comm, const mti_call *call) {
    mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    slot->send_count = call->count;
    slot->send_dtype = call->dtype;
    mti_outbox_set(comm->group, slot, mti_outbox(call->root, MTI_POSTED));
}

static void mti_say_unlike(mti_text *text, const mt_comm *comm, int from, int to) {
    text->used = 0;
    mti_say(text, "recv");
    mti_say_where(text, comm);
    mti_say_two(text, comm->group, from, to);
}

static mt_status mti_take_mismatch(mt_context *ctx, mt_comm *comm, int source) {
    mti_group *g = comm->group;
    mti_text text;
    mti_say_unlike(&text, comm, source, comm->rank);
    mti_break_mismatch(ctx, comm, &text);
    mti_outbox_set(g, mti_slot_of(g, source), mti_outbox(comm->rank, MTI_REFUSED));
    return MT_ERR_MISMATCH;
}

/* Copies the message that is posted in a slot. On a GPU the copy is in the stream. */
static mt_status mti_copy_message(mt_context *ctx, const mti_call *call, mti_slot *slot) {
    size_t bytes = call->recvcount * mt_dtype_size(call->dtype);
    if (ctx->device == MT_DEVICE_CUDA) MT_TRY(mti_cuda_await(ctx, &slot->ready));
    MT_TRY(mti_bytes_copy(ctx, call->recv, slot->send, bytes));
    return ctx->device == MT_DEVICE_CUDA ? mti_cuda_record(ctx, &slot->taken) : MT_SUCCESS;
}

/* Says from which rank this one awaits a message. -1: none */
static void mti_await(mt_comm *comm, int source) {
    __atomic_store_n(&mti_slot_of(comm->group, comm->rank)->awaited, source + 1, __ATOMIC_SEQ_CST);
}

/* Receives: waits until the source has posted a message for this rank, copies it, and updates the source's outbox. */
static mt_status mti_take(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_group *g = comm->group;
    mti_slot *slot = mti_slot_of(g, call->source);
    uint64_t posted;
    mt_status status;
    mti_await(comm, call->source);
    do { /* the exchange fails when the sender has given up: it then breaks the group, which ends the next wait */
        mti_wait w = mti_wait_outbox(slot, mti_outbox(comm->rank, MTI_POSTED), 0, call->source, 0);
        mti_outcome outcome = mti_wait_aside(ctx, g, &w);
        mti_await(comm, -1); /* before the sender can go on */
        if (outcome != MTI_MET) return mti_give_up(ctx, comm, outcome, call->source, MTI_ANY);
        posted = w.value;
    } while (!__atomic_compare_exchange_n(&slot->outbox, &posted, mti_outbox(comm->rank, MTI_TAKEN), 0,
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    if (slot->send_count != call->recvcount || slot->send_dtype != call->dtype ||
        mti_is_on_meta(slot) != (ctx->device == MT_DEVICE_META))
        return mti_take_mismatch(ctx, comm, call->source);
    status = mti_copy_message(ctx, call, slot);
    if (status != MT_SUCCESS) mti_fail_inside(ctx, comm, call, status);
    mti_outbox_set(g, slot, mti_outbox(comm->rank, status == MT_SUCCESS ? MTI_DONE : MTI_REFUSED));
    return status;
}

/* Waits until the receiver has copied the posted message, or on a GPU has put the copy into its stream. After an error
   of this wait, or of the receive of the same call (`status`), withdraws the message; when the receiver is already
   copying, waits until the copy is done. */
static mt_status mti_finish_send(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    mti_group *g = comm->group;
    mti_slot *slot = mti_slot_of(g, comm->rank);
    uint64_t posted = mti_outbox(call->root, MTI_POSTED), end;
    mt_status sent = MT_SUCCESS;
    mti_wait w = mti_wait_outbox(slot, posted, 1, call->root, 0);
    mti_outcome outcome = status == MT_SUCCESS ? mti_wait_aside(ctx, g, &w) : MTI_SEES_BROKEN;
    if (outcome != MTI_MET &&
        __atomic_compare_exchange_n(&slot->outbox, &posted, (uint64_t)0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return status != MT_SUCCESS ? status : mti_give_up(ctx, comm, outcome, call->root, MTI_ANY);
    w = mti_wait_outbox(slot, mti_outbox(call->root, MTI_TAKEN), 1, call->root, 1);
    mti_wait_aside(ctx, g, &w);
    end = __atomic_load_n(&slot->outbox, __ATOMIC_SEQ_CST) & 7;
    __atomic_store_n(&slot->outbox, (uint64_t)0, __ATOMIC_SEQ_CST);
    if (mti_turn_is_lost(ctx)) sent = MT_ERR_TIMEOUT;
    else if (end == MTI_DONE && ctx->device == MT_DEVICE_CUDA) sent = mti_cuda_await(ctx, &slot->taken);
    if (sent != MT_SUCCESS) mti_break_failed(ctx, comm, call, sent);
    MT_KEEP(status, sent);
    if (status != MT_SUCCESS || end == MTI_DONE) return status;
    return mti_broken_now(ctx, comm);
}

static mt_status mti_local_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mt_status status = mti_local_begin(ctx, comm);
    if (status != MT_SUCCESS) return mti_break_failed(ctx, comm, call, status);
    if (mti_is_broken(comm->group)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_P2P);
    if (call->root >= 0) mti_post(comm, call);
    if (call->source >= 0) status = mti_take(ctx, comm, call);
    if (call->root >= 0) status = mti_finish_send(ctx, comm, call, status);
    mti_set_inside(comm, MTI_OUTSIDE);
    return status;
}

/* -- leaving and splitting -- */

static void mti_leave(mt_comm *comm, const char *reason) {
    if (!mti_is_forked(comm->process)) (comm->transport->leave)(comm, reason);
}

/* Refuses a call that would wait for ranks of the process from which this one was forked. name: without mt_ */
static mt_status mti_check_process(mt_context *ctx, mt_comm *comm, const char *name) {
    if (!comm->transport->has_peers || !mti_is_forked(comm->process)) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_UNSUPPORTED,
                      "mt_%s: \"%s\" (%d ranks) belongs to process %ld, from which this process %ld was forked and "
                      "which is no rank of it: create a communicator here, for example with mt_launch",
                      name, comm->name, comm->size, (long)comm->process, (long)getpid());
}

/* Returns 0 when this rank has left before, else 1. */
static int mti_mark_left(mt_comm *comm, const char *reason) {
    mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    if (__atomic_load_n(&slot->left, __ATOMIC_SEQ_CST)) return 0;
    __atomic_store_n(&slot->left, reason, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&comm->group->left_count, 1, __ATOMIC_SEQ_CST);
    return 1;
}

static void mti_local_leave(mt_comm *comm, const char *reason) {
    if (mti_mark_left(comm, reason)) mti_wake(comm->group);
}

static void mti_no_leave(mt_comm *comm, const char *reason) { (void)comm, (void)reason; }
static void mti_no_destroy(mt_comm *comm) { (void)comm; }

static void mti_comm_free(mt_comm *comm) {
    mti_group_release(comm->group);
    free(comm);
}

/* Leaves the group, and destroys comm unless comm is the world of a launched rank. */
static void mti_comm_end(mt_comm *comm) {
    struct mti_rank *owner;
    mt_comm **at;
    mti_leave(comm, "has left the group");
    owner = comm->owner;
    if (owner) {
        if (comm == owner->world) return; /* mt_launch or mt_world_from_env destroys it */
        for (at = &owner->children; *at != comm; at = &(*at)->next) continue;
        *at = comm->next;
        owner->leaving = 1;
    }
    (comm->transport->destroy)(comm);
    if (owner) owner->leaving = 0;
    mti_comm_free(comm);
}

MT_API void mt_comm_destroy(mt_comm *comm) {
    int before = mti_hold();
    if (comm) mti_comm_end(comm);
    mti_release(before);
}

/* Makes child belong to the same launched rank as parent, which it was created from. */
static void mti_adopt(mt_comm *parent, mt_comm *child) {
    child->local_rank = parent->local_rank;
    child->owner = parent->owner;
    if (!parent->owner) return;
    child->next = parent->owner->children;
    parent->owner->children = child;
}

/* Refuses a call on processes that are not connected, and says how to connect them. device: the context's device; -1:
   no context */
static mt_status mti_refuse_apart(mt_context *ctx, mt_comm *comm, const char *function, int device) {
    const char *how = "call mt_comm_create_for with a context on MT_DEVICE_CUDA, or, for ranks on CPUs, compile the "
                      "implementation with -DMT_USE_MPI and start them with mpirun or srun";
    if (device == (int)MT_DEVICE_CUDA)
        how = MTI_NCCL ? "call mt_comm_create_for, and use what it gives"
                       : "compile the implementation with -DMT_USE_NCCL, link with -lnccl, and call mt_comm_create_for";
    else if (device >= 0)
        how = "compile the implementation with -DMT_USE_MPI and start them with mpirun or srun, or use MT_DEVICE_CUDA";
    return mti_refuse(ctx, comm, MT_ERR_UNSUPPORTED,
                      "mt_%s: the %d ranks of \"%s\" are processes of %s, and nothing connects them yet: %s", function,
                      comm->size, comm->name, comm->launcher, how);
}

/* Computes the place of rank `of` in its new group: its rank there, the group's size, and the leader, which is the
   lowest rank in comm with the same color. */
static void mti_split_place(const mt_comm *comm, int of, int *rank, int *size, int *leader) {
    const mti_slot *mine = mti_slot_of(comm->group, of);
    int r;
    *rank = *size = 0;
    *leader = -1;
    for (r = 0; r < comm->size; r++) {
        const mti_slot *slot = mti_slot_of(comm->group, r);
        if (slot->color != mine->color) continue;
        if (*leader < 0) *leader = r;
        *rank += slot->key < mine->key || (slot->key == mine->key && r < of);
        ++*size;
    }
}

/* Creates all communicators of one color's group; NULL: out of memory. The caller frees the array. */
static mt_comm **mti_split_family(const mt_comm *comm, int size, int color) {
    mt_comm **family = (mt_comm **)calloc((size_t)size, sizeof *family);
    double timeout = comm->group ? comm->group->timeout : MT_TIMEOUT_DEFAULT;
    char name[32];
    if (snprintf(name, sizeof name, "%s/%d", comm->name, color) < 0) name[0] = '\0';
    if (!family) return NULL;
    if (mti_family_new(size, timeout, comm->group ? comm->group->spin : 0, comm->group, name, family) == MT_SUCCESS)
        return family;
    free(family);
    return NULL;
}

/* Splits between mti_enter and mti_exit: the leader of each color creates the group's communicators, and after a
   meeting each rank takes its own. */
static mt_comm *mti_split(mt_comm *comm, int color) {
    mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    mt_comm **family = NULL, *out = NULL;
    int rank, size, leader;
    mti_split_place(comm, comm->rank, &rank, &size, &leader);
    if (leader == comm->rank) slot->family = color < 0 ? NULL : mti_split_family(comm, size, color);
    mti_meet(comm);
    if (color >= 0) family = mti_slot_of(comm->group, leader)->family;
    if (family) out = family[rank];
    mti_exit(comm);
    if (leader == comm->rank) free(family);
    return out;
}

static mt_status mti_local_split(mt_comm *comm, int color, int key, mt_comm **out) {
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = MTI_SPLIT;
    call.color = color;
    call.key = key;
    MT_TRY(mti_enter(NULL, comm, &call));
    *out = mti_split(comm, color);
    return MT_SUCCESS;
}

static mt_status mti_alone_split(mt_comm *comm, int color, int key, mt_comm **out) {
    mt_comm **family = color >= 0 ? mti_split_family(comm, 1, color) : NULL;
    (void)key;
    if (family) *out = family[0];
    free(family);
    return MT_SUCCESS;
}

static mt_status mti_meta_split(mt_comm *comm, int color, int key, mt_comm **out) {
    (void)color, (void)key, (void)out;
    return mti_refuse(NULL, comm, MT_ERR_ARGUMENT,
                      "mt_comm_split: \"%s\" is a meta communicator, which has no peers; use mt_comm_create_meta",
                      comm->name);
}

static mt_status mti_apart_split(mt_comm *comm, int color, int key, mt_comm **out) {
    (void)color, (void)key, (void)out;
    return mti_refuse_apart(NULL, comm, "comm_split", -1);
}

static mt_status mti_comm_split(mt_comm *comm, int color, int key, mt_comm **out) {
    if (!out) return mti_refuse(NULL, comm, MT_ERR_ARGUMENT, "mt_comm_split: out is NULL");
    MT_TRY(mti_check_process(NULL, comm, "comm_split"));
    MT_TRY((comm->transport->split)(comm, color < 0 ? -1 : color, key, out));
    if (color < 0) return MT_SUCCESS;
    if (!*out)
        return mti_refuse(NULL, comm, MT_ERR_MEMORY, "mt_comm_split: no memory for the group of color %d", color);
    mti_adopt(comm, *out);
    return MT_SUCCESS;
}

MT_API mt_status mt_comm_split(mt_comm *comm, int color, int key, mt_comm **out) {
    int before = mti_hold();
    mt_status status = MT_ERR_ARGUMENT;
    if (out) *out = NULL;
    if (comm) status = mti_comm_split(comm, color, key, out);
    mti_release(before);
    return status;
}

/* ---- >>threads: the threads of a context ------------------------------------------------------------------------- */

/* The items of one mt_parallel_for. Thread i computes [i * each, (i + 1) * each). */
typedef struct mti_ranges {
    mt_range_function work;
    void *data;
    int64_t count, each;
} mti_ranges;

static void mti_range_run(const mti_ranges *r, int thread) {
    int64_t first = mt_size_mul(thread, r->each);
    if (first < 0 || first >= r->count) return; /* below 0: thread * each does not fit */
    (r->work)(r->data, thread, first, first + mt_min(r->each, r->count - first));
}

/* One of a context's threads, except the one that calls. */
typedef struct mti_helper {
    struct mti_team *team;
    pthread_t thread;
    int number; /* from 1 */
} mti_helper;

/* The helpers of a context. They and their caller wait for each other like ranks, by means of a group. */
typedef struct mti_team {
    mti_group *group;
    uint64_t calls;     /* number of calls so far; a helper waits for the next one */
    uint64_t busy;      /* number of helpers that have not finished the call; the caller waits for 0 */
    int ends;           /* 1: the helpers return */
    int count;          /* number of helpers */
    mti_ranges ranges;  /* of the call */
    mti_helper *helper; /* [count] */
} mti_team;

/* Waits until *word == value, or, with until_not, until *word != value. */
static void mti_team_wait(mti_team *t, const uint64_t *word, uint64_t value, int until_not) {
    mti_wait w;
    w.word = word;
    w.mask = UINT64_MAX;
    w.value = value;
    w.until_not = until_not;
    w.peer = w.rank = -1;
    w.forever = 1;
    mti_wait_for(t->group, &w);
}

static void *mti_helper_run(void *argument) {
    const mti_helper *h = (const mti_helper *)argument;
    mti_team *t = h->team;
    uint64_t seen;
    for (seen = 0;; seen++) {
        mti_team_wait(t, &t->calls, seen, 1);
        if (t->ends) return NULL;
        mti_range_run(&t->ranges, h->number);
        if (__atomic_sub_fetch(&t->busy, 1, __ATOMIC_SEQ_CST) == 0) mti_wake(t->group);
    }
}

/* Begins a call: the helpers see all that was written before. */
static void mti_team_call(mti_team *t) {
    __atomic_store_n(&t->busy, (uint64_t)t->count, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&t->calls, 1, __ATOMIC_SEQ_CST);
    mti_wake(t->group);
}

/* A process that was forked has no helpers. */
static int mti_team_is_forked(const mti_team *t) { return t->group && mti_is_forked(t->group->process); }

static void mti_team_destroy(mti_team *t) {
    int i, here;
    if (!t) return;
    here = !mti_team_is_forked(t);
    t->ends = 1;
    if (t->group && here) mti_team_call(t);
    for (i = 0; i < t->count && here; i++) pthread_join(t->helper[i].thread, NULL);
    mti_group_release(t->group);
    free(t->helper);
    free(t);
}

/* Starts up to `count` helpers; NULL: out of memory. */
static mti_team *mti_team_new(int count) {
    mti_team *t = (mti_team *)calloc(1, sizeof *t);
    int i, error = 0;
    if (!t) return NULL;
    t->helper = (mti_helper *)calloc((size_t)count, sizeof *t->helper);
    t->group = mti_group_new(1, 0, 0);
    if (!t->helper || !t->group) {
        mti_team_destroy(t);
        return NULL;
    }
    for (i = 0; i < count && !error; i++) {
        t->helper[i].team = t;
        t->helper[i].number = i + 1;
        error = pthread_create(&t->helper[i].thread, NULL, mti_helper_run, &t->helper[i]);
        t->count += !error;
    }
    return t;
}

/* Computes the ranges of a call on the helpers and on this thread, which takes the first one, and those of helpers that
   could not be started. A thread that is cancelled waits for the helpers, because they use its data. */
static void mti_team_run(mti_team *t, const mti_ranges *ranges, int threads) {
    int before = mti_hold(), i;
    t->ranges = *ranges;
    mti_team_call(t);
    mti_range_run(ranges, 0);
    for (i = t->count + 1; i < threads; i++) mti_range_run(ranges, i);
    mti_team_wait(t, &t->busy, 0, 0);
    mti_release(before);
}

MT_API void mt_parallel_for(mt_context *ctx, int64_t count, int64_t grain, mt_range_function work, void *data) {
    int threads = mt_context_threads(ctx), i;
    mti_ranges r;
    if (count <= 0 || !work) return;
    r.work = work;
    r.data = data;
    r.count = count;
    r.each = mt_round_up(count / threads + (count % threads != 0), mt_max(grain, 1));
    if (r.each < count && ctx->team && mti_team_is_forked(ctx->team)) {
        mti_team_destroy(ctx->team);
        ctx->team = NULL;
    }
    if (r.each < count && !ctx->team) ctx->team = mti_team_new(threads - 1);
    if (r.each < count && ctx->team) {
        mti_team_run(ctx->team, &r, threads);
        return;
    }
    for (i = 0; i < threads; i++) mti_range_run(&r, i);
}

/* ---- >>16bit: bf16 and f16 --------------------------------------------------------------------------------------- */

/* Says that the iterations of the next loop are independent. Without it, compilers do not vectorize a loop whose input
   and output may be the same memory. */
#if defined(__CUDACC__)
#define MT_INDEPENDENT
#elif defined(__clang__)
#define MT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define MT_INDEPENDENT _Pragma("GCC ivdep")
#else
#define MT_INDEPENDENT
#endif

#if defined(__clang__) /* clang warns about each loop that it does not vectorize, even with -O0 */
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

/* For Intel's processors with AVX-512, gcc takes vectors of 256 bits unless it is told to take longer ones. */
#if defined(__AVX512F__) && defined(__GNUC__) && __GNUC__ >= 11 && !defined(__clang__) &&                              \
    !defined(__INTEL_COMPILER) && !defined(__CUDACC__)
#define MT_PREFER_512 1
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#else
#define MT_PREFER_512 0
#endif

#if defined(__GNUC__)
#define MT_INLINE static inline __attribute__((always_inline))
#else
#define MT_INLINE static inline
#endif

MT_INLINE MT_HOST_DEVICE uint32_t mt_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

MT_INLINE MT_HOST_DEVICE float mt_f32_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

MT_INLINE float mti_bf16_to_f32(uint16_t h) { return mt_f32_from_bits((uint32_t)h << 16); }

/* Rounds to nearest even: adds half of the last place of bf16, less one bit when this place is even, and drops the low
   16 bits. Beyond the largest bf16 the carry gives infinity. NaN keeps its top 16 bits and becomes quiet. */
MT_INLINE uint16_t mti_f32_to_bf16(float x) {
    uint32_t u = mt_f32_bits(x), rounded = u + 0x7fffu + ((u >> 16) & 1u);
    return (uint16_t)(((u & 0x7fffffffu) > 0x7f800000u ? u | 0x00400000u : rounded) >> 16);
}

/* The exponent biases of f32 and f16 differ by 112; infinity and NaN need another 112. For a denormal m * 2^-24 the
   code builds the normal float 2^-14 + m * 2^-24 and subtracts 2^-14. This function and mti_f32_to_f16 do the same
   float operations for every input, and their results do not depend on denormals of f32: compilers can vectorize them,
   and a CPU that flushes denormals to zero computes the same result. */
MT_INLINE float mti_f16_to_f32(uint16_t h) {
    uint32_t size = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = size < 0x7c00u ? 112u : 224u, less = size < 0x0400u ? 0x38800000u : 0u; /* 2^-14 */
    exponent = size < 0x0400u ? 113u : exponent;
    return mt_f32_from_bits(mt_f32_bits(mt_f32_from_bits((size << 13) + (exponent << 23)) - mt_f32_from_bits(less)) |
                            sign);
}

/* `power` is the largest power of two that is not above |x|, or 2^-14, the smallest normal f16, if that is larger.
   Adding 2^13 * power rounds |x| to f16's last place, power * 2^-10. The low bits of the sum then hold |x| in units of
   this place: 1024 to 2048, or less for a denormal. 2^16 replaces every larger |x| and becomes infinity. So does 65520,
   which lies halfway between the largest f16 and 2^16. */
MT_INLINE uint16_t mti_f32_to_f16(float x) {
    uint32_t u = mt_f32_bits(x), size = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
    uint32_t nan = size > 0x7f800000u ? 0x0200u | ((size >> 13) & 0x3ffu) : 0u;
    uint32_t finite = size < 0x47800000u ? size : 0x47800000u, below = finite & 0x7f800000u;
    uint32_t power = below > 0x38800000u ? below : 0x38800000u, shifted = power + (13u << 23);
    uint32_t count = mt_f32_bits(mt_f32_from_bits(finite) + mt_f32_from_bits(shifted)) - shifted;
    return (uint16_t)((((power - 0x38800000u) >> 13) + count) | nan | sign);
}

/* The same conversions by vector instructions, where the program is compiled for them. They give the same bits,
   also for NaN. These functions convert the first numbers, and return how many. */
#if defined(__F16C__) && defined(__GNUC__) && !defined(__CUDACC__)
#define MTI_HAS_F16C 1
#else
#define MTI_HAS_F16C 0
#endif
#if defined(__AVX512BF16__) && defined(__GNUC__) && !defined(__CUDACC__)
#define MT_HAS_AVX512_BF16 1
#else
#define MT_HAS_AVX512_BF16 0
#endif
#if MT_HAS_AVX512_BF16 && defined(__x86_64__) && defined(__linux__) &&                                                 \
    ((defined(__AMX_TILE__) && defined(__AMX_BF16__)) || (defined(__AMXTILE__) && defined(__AMXBF16__)))
#define MT_HAS_AMX_BF16 1
#else
#define MT_HAS_AMX_BF16 0
#endif

static int64_t mti_f16_to_f32_by_8(const uint16_t *x, float *y, int64_t n) {
    int64_t j = 0;
#if MTI_HAS_F16C
    for (; j + 8 <= n; j += 8)
        _mm256_storeu_ps(y + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + j))));
#endif
    (void)x, (void)y, (void)n;
    return j;
}

static int64_t mti_f32_to_f16_by_8(const float *x, uint16_t *y, int64_t n) {
    int64_t j = 0;
#if MTI_HAS_F16C
    for (; j + 8 <= n; j += 8)
        _mm_storeu_si128((__m128i *)(void *)(y + j),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + j), _MM_FROUND_TO_NEAREST_INT));
#endif
    (void)x, (void)y, (void)n;
    return j;
}

/* The instruction would round denormal numbers to 0, so the function ends before the first one. */
static int64_t mti_f32_to_bf16_by_16(const float *x, uint16_t *y, int64_t n) {
    int64_t j = 0;
#if MT_HAS_AVX512_BF16
    const __m512i exponent = _mm512_set1_epi32(0x7f800000), fraction = _mm512_set1_epi32(0x007fffff);
    for (; j + 16 <= n; j += 16) {
        __m512 v = _mm512_loadu_ps(x + j);
        __m512i u = _mm512_castps_si512(v);
        if (_mm512_mask_test_epi32_mask(_mm512_testn_epi32_mask(u, exponent), u, fraction)) break;
        _mm256_storeu_si256((__m256i *)(void *)(y + j), (__m256i)_mm512_cvtneps_pbh(v));
    }
#endif
    (void)x, (void)y, (void)n;
    return j;
}

MT_API void mt_f32_from_16bit(mt_dtype dtype, const uint16_t *x, float *y, int64_t n) {
    int64_t j, done;
    if (!x || !y) return;
    if (dtype == MT_BF16) {
        MT_INDEPENDENT
        for (j = 0; j < n; j++) y[j] = mti_bf16_to_f32(x[j]);
    } else {
        done = mti_f16_to_f32_by_8(x, y, n);
        MT_INDEPENDENT
        for (j = 0; j < n - done; j++) y[done + j] = mti_f16_to_f32(x[done + j]);
    }
}

MT_API void mt_f32_to_16bit(mt_dtype dtype, const float *x, uint16_t *y, int64_t n) {
    int64_t j, done;
    if (!x || !y) return;
    if (dtype == MT_BF16) {
        done = mti_f32_to_bf16_by_16(x, y, n);
        MT_INDEPENDENT
        for (j = 0; j < n - done; j++) y[done + j] = mti_f32_to_bf16(x[done + j]);
    } else {
        done = mti_f32_to_f16_by_8(x, y, n);
        MT_INDEPENDENT
        for (j = 0; j < n - done; j++) y[done + j] = mti_f32_to_f16(x[done + j]);
    }
}

/* ---- >>hash ------------------------------------------------------------------------------------------------------ */

/* The hash of one element: the finalizer of splitmix64 (Steele et al., OOPSLA 2014). */
MT_INLINE MT_HOST_DEVICE uint64_t mt_hash_word(uint64_t element, uint32_t bits) {
    uint64_t z = element * 0x9e3779b97f4a7c15u + (uint64_t)bits * 0xd1b54a32d192ed03u + 1;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

typedef struct mti_hash {
    mt_tensor x;
    int64_t first_row, first_col, global_cols;
    uint64_t sum;
} mti_hash;

/* Adds the hash of a range of rows to sum. The total is a sum of integers, so the order is free. */
static void mti_cpu_hash(void *data, int thread, int64_t first, int64_t last) {
    mti_hash *h = (mti_hash *)data;
    mt_tensor x = h->x;
    uint64_t sum = 0;
    int64_t i, j;
    (void)thread;
    for (i = first; i < last; i++) {
        uint64_t e = ((uint64_t)h->first_row + (uint64_t)i) * (uint64_t)h->global_cols + (uint64_t)h->first_col;
        const void *row = mt_tensor_rows(x, i, 1).data;
        if (mt_dtype_size(x.dtype) == 4)
            for (j = 0; j < x.cols; j++) sum += mt_hash_word(e + (uint64_t)j, ((const uint32_t *)row)[j]);
        else
            for (j = 0; j < x.cols; j++) sum += mt_hash_word(e + (uint64_t)j, ((const uint16_t *)row)[j]);
    }
    __atomic_add_fetch(&h->sum, sum, __ATOMIC_RELAXED);
}

#if MT_HAS_CUDA
extern "C++" {

/* i / n, computed in 32 bits if both fit. GPUs have no instruction for integer division, and a 64-bit division takes
   several times as many instructions as a 32-bit one. */
static __device__ __forceinline__ int64_t mt_divide(int64_t i, int64_t n) {
    return (uint64_t)(i | n) >> 32 ? i / n : (int64_t)((uint32_t)i / (uint32_t)n);
}

/* *sum += the hashes of all elements. A thread owns every (grid size)-th element. A warp adds its 32 sums and then adds
   the total with one atomicAdd. Integer sums do not depend on the order. The kernel uses no shared memory and no
   barrier. Instructions limit it, not memory: on sm_90 68 for an f32 element, which moves 4 bytes (budget: 27), or 82
   when it divides in 64 bits. Most of them are 64-bit multiplications, and compute the row of the element. */
static __global__ void __launch_bounds__(256)
    mti_hash_kernel(const void *data, int64_t ld, int is_32_bit, int64_t rows, int64_t cols, int64_t first_row,
                    int64_t first_col, int64_t global_cols, unsigned long long *sum) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    unsigned long long mine = 0;
    for (; i < rows * cols; i += step) {
        int64_t row = mt_divide(i, cols), col = i - row * cols, at = row * ld + col;
        uint32_t bits = is_32_bit ? ((const uint32_t *)data)[at] : ((const uint16_t *)data)[at];
        mine += mt_hash_word((uint64_t)((first_row + row) * global_cols + first_col + col), bits);
    }
    for (int o = 16; o > 0; o >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, o);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}

static mt_status mti_cuda_hash_add(mt_context *ctx, const mti_hash *h, uint64_t *sum) {
    const int64_t most = 65535, blocks = (h->x.rows * h->x.cols + 1023) / 1024;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_hash_kernel, (unsigned)(blocks < most ? blocks : most), 256, 0, ctx->stream, h->x.data,
                     mt_tensor_ld(h->x), mt_dtype_size(h->x.dtype) == 4, h->x.rows, h->x.cols, h->first_row,
                     h->first_col, h->global_cols, (unsigned long long *)sum);
    return mt_cuda_launched(ctx, "mti_hash_kernel");
}

} /* extern "C++" */
#else
static mt_status mti_cuda_hash_add(mt_context *ctx, const mti_hash *h, uint64_t *sum) {
    return (void)ctx, (void)h, (void)sum, MT_ERR_UNSUPPORTED;
}
#endif

static mt_status mti_hash_check(mt_context *ctx, mt_tensor x, const uint64_t *sum) {
    size_t size = mt_dtype_size(x.dtype);
    if (size < 2) return mt_fail(ctx, MT_ERR_DTYPE, "mt_hash_add: x is %s", mt_dtype_name(x.dtype));
    if (!sum || !mt_context_has_data(ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_add: %s", sum ? "the context has no data" : "sum is NULL");
    if (x.rows < 0 || x.cols < 0 || mt_tensor_ld(x) < x.cols ||
        mt_size_mul(mt_size_mul(x.rows, mt_tensor_ld(x)), 8) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_hash_add: x is [%lld, %lld] with ld %lld, which is not a valid shape",
                       (long long)x.rows, (long long)x.cols, (long long)x.ld);
    if (!x.data || (uintptr_t)x.data % size)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_add: the data of x is NULL, or not aligned to its elements");
    return MT_SUCCESS;
}

MT_API mt_status mt_hash_add(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                             uint64_t *sum) {
    mti_hash h;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (x.rows == 0 || x.cols == 0) return MT_SUCCESS;
    MT_TRY(mti_hash_check(ctx, x, sum));
    h.x = x;
    h.first_row = first_row;
    h.first_col = first_col;
    h.global_cols = global_cols;
    h.sum = 0;
    if (ctx->device == MT_DEVICE_CUDA) return mti_cuda_hash_add(ctx, &h, sum);
    mt_parallel_for(ctx, x.rows, 16384 / x.cols + 1, mti_cpu_hash, &h);
    *sum += h.sum;
    return MT_SUCCESS;
}

/* ---- >>placements: check mode ------------------------------------------------------------------------------------ */

/* The checker keeps, for each piece of memory and each group, the set of placements that it may have: a bit for each
   mt_placement. An operator's rule is a list of cases. The cases that fit what is known about its operands give the
   sets of its results. Unknown memory may have all placements. Memory that is zero has all of them at once.

   There are two lists of pieces. `parameters` has the values and gradients of registries; they stay until they are
   forgotten. `written` has what operators have written. A new piece removes the older ones that it covers. A view finds
   the newest pieces that it meets, until one of them covers it. Memory that is allocated again is unknown:
   mt_arena_alloc and mt_context_free forget it. Pieces that overlap and say the same become one. Where too many
   overlap, one piece takes their place, too, and what they do not agree on is not known any more.

   Lists are in the order of addresses. A search begins at the last piece that begins before the end of a view, goes
   back, and ends where no piece before reaches the view. */

#define MTI_ALL_PLACEMENTS 15 /* a set */
#define MTI_LEFT_OUT 16       /* in a set that an operand must have a placement of: the call must leave it out */
#define MTI_SPLIT_PLACEMENTS (1 << MT_SPLIT_ROWS | 1 << MT_SPLIT_COLS)
#define MTI_AXES 6
#define MTI_OVERLAPS_MOST 64 /* pieces that a new one may meet without covering them */
#define MTI_RULE_OPERANDS 16
#define MTI_RELEASED 256

/* A view in memory, for comparisons. */
typedef struct mti_extent {
    uintptr_t begin, end;   /* of all rows, with the gaps between them */
    uintptr_t width, pitch; /* bytes of a row, and from one row to the next */
} mti_extent;

typedef struct mti_placed {
    mti_extent at;
    unsigned char may[MTI_AXES];     /* one set of placements for each group */
    unsigned char allowed[MTI_AXES]; /* of a parameter or gradient: the sets that it may get */
    unsigned char adds[MTI_AXES];    /* of a gradient: the sets that it may get before it is synchronised */
    int zero;                        /* 1: all elements are 0 */
    const char *by, *with;           /* the operator that has written it, and the parameter that it used, or NULL */
    const char *name;                /* of a parameter; in mti_checker.names */
    int64_t parts;                   /* of a parameter, see mt_param_desc */
    int is_gradient;
    const char *features; /* the parameter whose features these columns are, after elementwise calls, too; or NULL */
    char summed_over[16]; /* of a gradient: the program has summed it over this group, which is not in axes; or "" */
    int some_columns;     /* 1: it was computed from some columns of a tensor, and has as many */
    uint64_t content;     /* see mt_check_content; 0: not known */
    uint64_t used;        /* of a gradient: a hash of the activations that a call has added to it last, or 0 */
    uint64_t used_all;    /* a hash of all that the call has read, or 0 */
    const char *used_by;  /* the call */
    uint64_t zeroed;      /* of a gradient: the age of the newest piece when it became zero */
    int is_used;          /* of activations: 1: a backward has read them */
    int is_replaced;      /* 1: the gradient of what was here, which the call had read here */
    uint64_t lost;        /* the age of what the same call has written here before, and no backward has read; or 0 */
    int stays;            /* 1: a block of mt_context_alloc; of what is meant: in a parameter */
    int is_gone;          /* 1: mti_placed_compact removes it */
    uint64_t age;         /* number of the piece; the newest has the largest */
    uintptr_t reach;      /* the largest at.end of this piece and those before it in the list */
} mti_placed;

typedef struct mti_placed_list {
    mti_placed *list;
    size_t count, capacity;
    uint64_t newest; /* the age of the newest piece */
} mti_placed_list;

typedef struct mti_kept_name {
    char *text;
    int is_used;
} mti_kept_name;

/* The names of parameters, also of those that were destroyed: messages may name the parameter with which a tensor was
   computed. When the list is full, mti_names_sweep frees the names to which nothing points any more. */
typedef struct mti_names {
    mti_kept_name *list;
    size_t count, capacity;
} mti_names;

/* A group of ranks over which tensors have placements. */
typedef struct mti_axis {
    const mt_comm *comm;
    char name[16];
    int is_named;
    int rank, size;
    int only_group; /* 1: mt_check_group has added it, and no tensor was declared over it */
} mti_axis;

/* What was in memory of the arena that was released and allocated again. */
typedef struct mti_released {
    mti_extent at;
    const char *by, *with;
} mti_released;

/* Where micro-batches keep their tensors, see mt_check_slots. */
typedef struct mti_slots {
    uintptr_t first, bytes;
    int count, own;
} mti_slots;

typedef struct mti_checker {
    mti_axis axes[MTI_AXES];
    int count; /* of the groups */
    int paused;
    int strict; /* mt_context_desc.check */
    int tracks; /* 1: mt_check_track was called */
    mti_placed_list parameters, written;
    mti_placed_list memory; /* what is not in the arena: blocks of mt_context_alloc, and memory that was declared */
    mti_placed_list meant;  /* of mt_declare_meant, until it is written or declared; only `at` and `stays` count */
    mti_placed_list views;  /* of mt_check_view, the last one last; `may` is for one group, and all for the others */
    mti_names names;        /* what points to one of them is known to mti_names_mark */
    mti_slots slots[2];
    mti_released released[MTI_RELEASED]; /* for messages: the newest is number releases - 1, modulo MTI_RELEASED */
    size_t releases;
    const char *latest; /* name of the parameter that an operator has used last, or NULL */
    mt_check_listener listener;
    void *user;                    /* of the listener */
    struct mti_replicas *replicas; /* what mt_check_replicas compares; NULL: check is 1 */
    double mean_rows, mean_scale;  /* see mt_check_mean; mean_rows 0: none, below 0: with several scales */
    int64_t unknown;               /* see mt_check_unknown */
    char unknown_text[240];
} mti_checker;

static void mti_replicas_use_names(mti_checker *c); /* >>replicas */

static int mti_name_by_address(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)((const mti_kept_name *)a)->text, y = (uintptr_t)((const mti_kept_name *)b)->text;
    return x < y ? -1 : x > y;
}

/* Notes that something points to `text`, which may also be NULL or a string of the caller. The list is sorted. */
static void mti_name_use(mti_names *n, const char *text) {
    size_t low = 0, high = n->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uintptr_t)n->list[middle].text < (uintptr_t)text) low = middle + 1;
        else high = middle;
    }
    if (low < n->count && n->list[low].text == text) n->list[low].is_used = 1;
}

static void mti_names_mark(mti_checker *c) {
    size_t i;
    for (i = 0; i < c->parameters.count; i++) {
        mti_name_use(&c->names, c->parameters.list[i].name);
        mti_name_use(&c->names, c->parameters.list[i].with);
    }
    for (i = 0; i < c->written.count; i++) mti_name_use(&c->names, c->written.list[i].with);
    mti_name_use(&c->names, c->latest);
    mti_replicas_use_names(c);
}

/* Frees the names to which nothing points. */
static void mti_names_sweep(mti_checker *c) {
    mti_names *n = &c->names;
    size_t i, kept = 0;
    if (n->count > 0) qsort(n->list, n->count, sizeof *n->list, mti_name_by_address);
    for (i = 0; i < n->count; i++) n->list[i].is_used = 0;
    mti_names_mark(c);
    for (i = 0; i < n->count; i++) {
        if (n->list[i].is_used) n->list[kept++] = n->list[i];
        else mt_host_free(n->list[i].text);
    }
    n->count = kept;
}

/* Makes the list twice as long as the names that are used, but never shorter. Returns 0 when there is no memory. */
static int mti_names_grow(mti_checker *c) {
    mti_names *n = &c->names;
    mti_kept_name *list;
    mti_names_sweep(c);
    if (n->capacity && n->count <= n->capacity / 2) return 1;
    list = (mti_kept_name *)mt_host_alloc((2 * n->count + 64) * sizeof *list);
    if (!list) return 0;
    if (n->count) memcpy(list, n->list, n->count * sizeof *list);
    mt_host_free(n->list);
    n->list = list;
    n->capacity = 2 * n->count + 64;
    return 1;
}

/* Returns the checker's copy of a name, or NULL when there is no memory. */
static const char *mti_names_add(mti_checker *c, const char *text) {
    mti_names *n = &c->names;
    size_t bytes = strlen(text) + 1;
    char *copy;
    if (n->count == n->capacity && !mti_names_grow(c)) return NULL;
    copy = (char *)mt_host_alloc(bytes);
    if (!copy) return NULL;
    memcpy(copy, text, bytes);
    n->list[n->count++].text = copy;
    return copy;
}

static mt_status mti_checker_create(mt_context *ctx, int check) {
    ctx->checker = (mti_checker *)mt_host_alloc(sizeof *ctx->checker);
    if (!ctx->checker) return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_create: no memory for the checker");
    ctx->checker->strict = check != 0;
    return check == 2 && !mt_comm_is_meta(ctx->world) ? mti_replicas_create(ctx) : MT_SUCCESS;
}

static void mti_checker_destroy(mti_checker *c) {
    size_t i;
    if (!c) return;
    for (i = 0; i < c->names.count; i++) mt_host_free(c->names.list[i].text);
    mt_host_free(c->names.list);
    mt_host_free(c->parameters.list);
    mt_host_free(c->written.list);
    mt_host_free(c->memory.list);
    mt_host_free(c->meant.list);
    mt_host_free(c->views.list);
    mt_host_free(c);
}

/* Returns a new, empty piece at the end of the list, or NULL when there is no memory. */
static mti_placed *mti_placed_add(mti_placed_list *p) {
    if (p->count == p->capacity) {
        size_t capacity = p->capacity ? 2 * p->capacity : 64;
        mti_placed *list = (mti_placed *)mt_host_alloc(capacity * sizeof *list);
        if (!list) return NULL;
        if (p->count) memcpy(list, p->list, p->count * sizeof *list);
        mt_host_free(p->list);
        p->list = list;
        p->capacity = capacity;
    }
    memset(&p->list[p->count], 0, sizeof *p->list);
    return &p->list[p->count++];
}

static mti_extent mti_extent_of(mt_tensor t) {
    uintptr_t size = (uintptr_t)mt_dtype_size(t.dtype);
    mti_extent e;
    e.begin = (uintptr_t)t.data;
    e.width = (uintptr_t)t.cols * size;
    e.pitch = t.rows > 1 ? (uintptr_t)mt_tensor_ld(t) * size : e.width;
    e.end = e.begin + ((uintptr_t)t.rows - 1) * e.pitch + e.width;
    return e;
}

static int mti_extent_is_dense(mti_extent e) { return e.pitch == e.width; }

/* Whether the rows of one extent are parts of the rows of the other one. A single row has no pitch of its own. */
static int mti_extents_share_rows(mti_extent a, mti_extent b) {
    mti_extent narrow = a.width < b.width ? a : b, wide = a.width < b.width ? b : a;
    if (a.pitch == b.pitch) return 1;
    if (narrow.end - narrow.begin != narrow.width || narrow.begin < wide.begin || narrow.end > wide.end) return 0;
    return (narrow.begin - wide.begin) % wide.pitch + narrow.width <= wide.width;
}

/* Whether a view has whole rows of a piece, or a part of a single one, in one row or in rows of another width. */
static int mti_is_reshaped(mti_extent view, mti_extent piece) {
    if (!mti_extent_is_dense(view) || !mti_extent_is_dense(piece) || view.begin < piece.begin) return 0;
    if (piece.end - piece.begin == piece.width) return 1;
    return (view.begin - piece.begin) % piece.width == 0 && (view.end - piece.begin) % piece.width == 0;
}

/* Returns what a piece says about a view of it. Some columns of a tensor that is split by columns, such as one head,
   are a matrix of their own: nothing is known about it. Some columns of a tensor that is split by rows are split by
   rows. The rows of a rank lie one after the other: they are columns of one row, and rows of another width. Other views
   of a split tensor are split in some way. */
static unsigned char mti_seen_through(mti_extent view, mti_extent piece, unsigned char may) {
    int is_row = view.end - view.begin == view.width, in_rows = piece.end - piece.begin > piece.width;
    if (!(may & MTI_SPLIT_PLACEMENTS) || view.width == piece.width) return may;
    if (!mti_extents_share_rows(view, piece)) {
        if (!mti_is_reshaped(view, piece) || (in_rows && may >> MT_SPLIT_COLS & 1))
            return (unsigned char)(may | MTI_SPLIT_PLACEMENTS);
        return (unsigned char)((may & ~MTI_SPLIT_PLACEMENTS) | 1 << (is_row ? MT_SPLIT_COLS : MT_SPLIT_ROWS));
    }
    if (may == 1 << MT_SPLIT_ROWS) return may;
    if (view.width < piece.width) return may >> MT_SPLIT_COLS & 1 ? MTI_ALL_PLACEMENTS : may;
    return (unsigned char)(may | MTI_SPLIT_PLACEMENTS);
}

/* Whether two extents share memory. Columns of the same rows do not. */
static int mti_extents_meet(mti_extent a, mti_extent b) {
    mti_extent first = a.begin <= b.begin ? a : b, second = a.begin <= b.begin ? b : a;
    uintptr_t from;
    if (second.begin >= first.end) return 0;
    if (mti_extent_is_dense(first) || (!mti_extent_is_dense(second) && second.pitch != first.pitch)) return 1;
    if (mti_extent_is_dense(second)) second.width = second.end - second.begin;
    if (second.width > first.pitch) return 1;
    from = (second.begin - first.begin) % first.pitch;
    return from < first.width || from + second.width > first.pitch;
}

/* Whether all memory of `part` is in `whole`. Returns 0 when this is not certain. */
static int mti_extent_covers(mti_extent whole, mti_extent part) {
    if (part.begin < whole.begin || part.end > whole.end) return 0;
    if (mti_extent_is_dense(whole)) return 1;
    if (part.end - part.begin != part.width && part.pitch != whole.pitch) return 0;
    return (part.begin - whole.begin) % whole.pitch + part.width <= whole.width;
}

static uintptr_t mti_extent_bytes(mti_extent e) {
    return ((e.end - e.begin - e.width) / (e.pitch ? e.pitch : 1) + 1) * e.width;
}

/* Returns how many bytes of e a piece has that meets it. It may return more, but not less. */
static uintptr_t mti_extent_shared(mti_extent e, mti_extent piece) {
    uintptr_t begin = e.begin > piece.begin ? e.begin : piece.begin, end = e.end < piece.end ? e.end : piece.end;
    if (mti_extent_covers(e, piece)) return mti_extent_bytes(piece);
    return mti_extent_is_dense(e) && mti_extent_is_dense(piece) ? end - begin : mti_extent_bytes(e);
}

/* Returns all memory from the begin of one extent to the end of the other, as one row. */
static mti_extent mti_extents_together(mti_extent a, mti_extent b) {
    if (b.begin < a.begin) a.begin = b.begin;
    if (b.end > a.end) a.end = b.end;
    a.width = a.pitch = a.end - a.begin;
    return a;
}

static mti_extent mti_extent_of_bytes(const void *data, size_t bytes) {
    return mti_extent_of(mt_tensor_make(data, MT_U8, 1, (int64_t)bytes));
}

/* Returns the number of pieces that begin before `end`. */
static size_t mti_placed_before(const mti_placed_list *p, uintptr_t end) {
    size_t low = 0, high = p->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (p->list[middle].at.begin < end) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Goes from piece *i, or from the end of the list, back to the next one that meets e, and returns it, or NULL. Begin
   with *i = mti_placed_before(p, e.end). */
static mti_placed *mti_placed_meets(const mti_placed_list *p, mti_extent e, size_t *i) {
    while (*i > 0 && p->list[*i - 1].reach > e.begin) {
        --*i;
        if (mti_extents_meet(p->list[*i].at, e)) return &p->list[*i];
    }
    return NULL;
}

/* Returns the newest piece that meets e and is older than `age`, or NULL. */
static mti_placed *mti_placed_older(const mti_placed_list *p, mti_extent e, uint64_t age) {
    size_t i = mti_placed_before(p, e.end);
    mti_placed *found = NULL, *piece;
    while ((piece = mti_placed_meets(p, e, &i)) != NULL)
        if (piece->age < age && (!found || piece->age > found->age)) found = piece;
    return found;
}

static void mti_placed_reach(mti_placed_list *p, size_t from) {
    size_t i;
    for (i = from; i < p->count; i++) {
        uintptr_t before = i > 0 ? p->list[i - 1].reach : 0;
        p->list[i].reach = p->list[i].at.end > before ? p->list[i].at.end : before;
    }
}

/* Returns a new piece for e in its place of the list, or NULL when there is no memory. */
static mti_placed *mti_placed_insert(mti_placed_list *p, mti_extent e) {
    size_t at = mti_placed_before(p, e.begin);
    if (!mti_placed_add(p)) return NULL;
    memmove(&p->list[at + 1], &p->list[at], (p->count - 1 - at) * sizeof *p->list);
    memset(&p->list[at], 0, sizeof *p->list);
    p->list[at].at = e;
    p->list[at].age = ++p->newest;
    mti_placed_reach(p, at);
    return &p->list[at];
}

/* Removes pieces that are gone. The first of them is number `from`. */
static void mti_placed_compact(mti_placed_list *p, size_t from) {
    size_t i, kept = from;
    for (i = from; i < p->count; i++)
        if (!p->list[i].is_gone) p->list[kept++] = p->list[i];
    p->count = kept;
    mti_placed_reach(p, from);
}

/* Removes the pieces that meet e, with keeps 1 not those that stay. */
static void mti_placed_forget(mti_placed_list *p, mti_extent e, int keeps) {
    size_t i = mti_placed_before(p, e.end), from = p->count;
    mti_placed *piece;
    while ((piece = mti_placed_meets(p, e, &i)) != NULL) {
        if (keeps && piece->stays) continue;
        piece->is_gone = 1;
        from = i;
    }
    if (from < p->count) mti_placed_compact(p, from);
}

static void mti_forget(mt_context *ctx, const void *data, size_t bytes) {
    mti_checker *c = ctx->checker;
    if (!c || !bytes) return;
    mti_placed_forget(&c->written, mti_extent_of_bytes(data, bytes), 0);
    mti_placed_forget(&c->meant, mti_extent_of_bytes(data, bytes), 0);
    mti_placed_forget(&c->parameters, mti_extent_of_bytes(data, bytes), 0);
}

/* Forgets memory of the arena that is allocated, and remembers what was there before it was released. */
static void mti_allocate_again(mt_context *ctx, const void *data, size_t bytes) {
    mti_checker *c = ctx->checker;
    mti_extent e = mti_extent_of_bytes(data, bytes);
    const mti_placed *p;
    size_t i;
    if (!c || !bytes) return;
    i = mti_placed_before(&c->written, e.end);
    while ((p = mti_placed_meets(&c->written, e, &i)) != NULL) {
        mti_released *r = &c->released[c->releases++ % MTI_RELEASED];
        r->at = p->at;
        r->by = p->by;
        r->with = p->with;
    }
    mti_forget(ctx, data, bytes);
}

/* Returns what was in the memory of a view before it was released, or NULL. */
static const mti_released *mti_released_at(const mti_checker *c, mti_extent e) {
    size_t i;
    for (i = 0; i < MTI_RELEASED && i < c->releases; i++) {
        const mti_released *r = &c->released[(c->releases - 1 - i) % MTI_RELEASED];
        if (r->by && memcmp(&r->at, &e, sizeof e) == 0) return r;
    }
    return NULL;
}

static int mti_is_in_arena(const mt_context *ctx, mti_extent e) {
    uintptr_t arena = (uintptr_t)ctx->arena;
    return e.begin >= arena && e.end <= arena + ctx->arena_bytes;
}

/* Whether placements of this memory are kept: the arena, blocks of the context, parameters, and what the caller has
   declared. Other memory may be written, freed and allocated again behind the library's back. */
static int mti_is_watched(const mt_context *ctx, mti_extent e) {
    const mti_placed_list *memory = &ctx->checker->memory;
    size_t i = mti_placed_before(memory, e.end);
    const mti_placed *p;
    if (mti_is_in_arena(ctx, e)) return 1;
    while ((p = mti_placed_meets(memory, e, &i)) != NULL)
        if (mti_extent_covers(p->at, e)) return 1;
    return 0;
}

/* Takes the memory that was declared and that meets e out of the list, and returns e with it. Rows with gaps stay: what
   is between them may belong to others. */
static mti_extent mti_watched_with(mti_placed_list *memory, mti_extent e) {
    size_t i = mti_placed_before(memory, e.end), from = memory->count;
    mti_placed *p;
    while ((p = mti_placed_meets(memory, e, &i)) != NULL) {
        int are_dense = mti_extent_is_dense(e) && mti_extent_is_dense(p->at);
        if (p->stays || (!are_dense && !mti_extent_covers(e, p->at))) continue;
        if (are_dense) e = mti_extents_together(e, p->at);
        p->is_gone = 1;
        from = i;
    }
    if (from < memory->count) mti_placed_compact(memory, from);
    return e;
}

static mt_status mti_watch_extent(mt_context *ctx, mti_extent e, int is_block) {
    mti_placed *p;
    if (!is_block && mti_is_watched(ctx, e)) return MT_SUCCESS;
    if (!is_block) e = mti_watched_with(&ctx->checker->memory, e);
    p = mti_placed_insert(&ctx->checker->memory, e);
    if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the checks of placements");
    p->stays = is_block;
    return MT_SUCCESS;
}

/* Forgets a block of the context that is freed. */
static void mti_forget_block(mt_context *ctx, const void *data, size_t bytes) {
    mti_checker *c = ctx->checker;
    mti_forget(ctx, data, bytes);
    if (c) mti_placed_forget(&c->memory, mti_extent_of_bytes(data, bytes), 0);
}

static mt_status mti_watch_block(mt_context *ctx, const void *data, size_t bytes) {
    return ctx->checker ? mti_watch_extent(ctx, mti_extent_of_bytes(data, bytes), 1) : MT_SUCCESS;
}

/* ---- >>declarations: what is known about memory ------------------------------------------------------------------ */

MT_API int mt_check_mode(const mt_context *ctx) {
    if (!ctx || !ctx->checker || ctx->checker->paused) return 0;
    return ctx->checker->replicas ? 2 : 1;
}

MT_API void mt_check_pause(mt_context *ctx) {
    if (ctx && ctx->checker) ctx->checker->paused++;
}

MT_API mt_status mt_check_resume(mt_context *ctx, mt_status status) {
    if (ctx && ctx->checker && ctx->checker->paused > 0) ctx->checker->paused--;
    return status;
}

static void mti_axis_set(mti_axis *axis, const mt_comm *comm) {
    axis->comm = comm;
    axis->rank = comm->rank;
    axis->size = comm->size;
}

MT_API void mt_check_listen(mt_context *ctx, mt_check_listener listener, void *user) {
    if (!ctx || !ctx->checker) return;
    ctx->checker->listener = listener;
    ctx->checker->user = user;
}

static void mti_tell(mt_context *ctx, const char *where, const char *with, const mt_operand *operands, int count) {
    const mti_checker *c = ctx->checker;
    if (c->listener) c->listener(ctx, c->user, where, with, operands, count);
}

MT_API mt_status mt_check_view_end(mt_context *ctx, mt_status status) {
    if (ctx && ctx->checker && ctx->checker->views.count > 0) ctx->checker->views.count--;
    return status;
}

/* Whether an axis is that of a communicator. Groups that were given the same name are the same: a grid may be created
   again. Other communicators, which have a name of their parent, are themselves only. */
static int mti_axis_is(const mti_axis *axis, const mt_comm *comm) {
    if (strcmp(axis->name, comm->name) != 0 || axis->is_named != comm->is_named) return 0;
    return axis->is_named || axis->comm == comm;
}

/* Returns the number of a group, or -1 for a group of one and where there is none. add: 1 adds a new group. */
static int mti_axis_of(mti_checker *c, const mt_comm *comm, int add) {
    int i;
    if (!comm || comm->size == 1) return -1;
    for (i = 0; i < c->count; i++)
        if (mti_axis_is(&c->axes[i], comm)) break;
    if (i < c->count) {
        mti_axis_set(&c->axes[i], comm);
        return i;
    }
    if (!add || c->count == MTI_AXES) return -1;
    mti_axis_set(&c->axes[i], comm);
    memcpy(c->axes[i].name, comm->name, sizeof c->axes[i].name);
    c->axes[i].is_named = comm->is_named;
    return c->count++;
}

/* Returns the parameter or gradient that has all memory of e, or NULL. */
static mti_placed *mti_parameter_at(const mti_checker *c, mti_extent e) {
    size_t i = mti_placed_before(&c->parameters, e.end);
    mti_placed *p;
    while ((p = mti_placed_meets(&c->parameters, e, &i)) != NULL)
        if (mti_extent_covers(p->at, e)) return p;
    return NULL;
}

#define MTI_KNOWN_PARTS 8

/* What is known about a view: the set for each group, and where it comes from. */
typedef struct mti_known {
    unsigned char may[MTI_AXES];                    /* of all parts together */
    unsigned char parts[MTI_KNOWN_PARTS][MTI_AXES]; /* of the pieces that it meets and that are not zero, each once */
    int count;
    int zero;
    int unwritten;               /* 1: nothing has written it, or a part of it, since it was allocated */
    int some_columns;            /* 1: it has, or was computed from, some columns of a tensor */
    mti_extent in;               /* of the newest piece that has all of the view; width 0: there is none */
    unsigned apart;              /* a bit for each group whose ranks may read other rows or columns */
    unsigned terms;              /* a bit for each group in which mt_check_view makes a term of what all ranks have */
    const char *by, *with;       /* of the newest piece, or NULL */
    const mti_placed *parameter; /* NULL: the view is no part of one */
} mti_known;

/* Whether a view has some columns of the tensor of which a piece has all, or some, columns. */
static int mti_has_some_columns(mti_extent e, const mti_placed *p) {
    if (e.width == p->at.width) return p->some_columns;
    return e.width < p->at.width && mti_extents_share_rows(e, p->at);
}

/* Adds what a piece says about a view. covers: 1 if the piece has all of the view */
static void mti_known_add(mti_known *k, mti_extent e, const mti_placed *p, int covers) {
    unsigned char part[MTI_AXES];
    int g, i;
    if (p->zero) return;
    if (mti_has_some_columns(e, p)) k->some_columns = 1;
    if (k->count == 0) k->by = p->by, k->with = p->with;
    for (g = 0; g < MTI_AXES; g++) {
        unsigned char may = mti_seen_through(e, p->at, p->may[g]);
        int more = !covers && (may & MTI_SPLIT_PLACEMENTS) ? MTI_SPLIT_PLACEMENTS : 0; /* split in some way */
        k->may[g] = (unsigned char)(k->may[g] | may);
        part[g] = (unsigned char)(may | more);
    }
    for (i = 0; i < k->count; i++)
        if (memcmp(k->parts[i], part, sizeof part) == 0) return;
    if (k->count == MTI_KNOWN_PARTS) i--;
    else k->count++;
    for (g = 0; g < MTI_AXES; g++) k->parts[i][g] = (unsigned char)(k->parts[i][g] | part[g]);
}

static mti_known mti_known_of_parameter(mti_extent e, const mti_placed *p) {
    mti_known k;
    int g;
    memset(&k, 0, sizeof k);
    k.parameter = p;
    k.in = p->at;
    k.zero = p->zero;
    k.by = p->by;
    k.with = p->with;
    k.some_columns = mti_has_some_columns(e, p);
    for (g = 0; g < MTI_AXES; g++) k.may[g] = mti_seen_through(e, p->at, p->zero ? p->adds[g] : p->may[g]);
    return k;
}

/* What is known about the memory of a view. */
static mti_known mti_memory_known(const mti_checker *c, mt_tensor t) {
    mti_extent e = mti_extent_of(t);
    const mti_placed *p = mti_parameter_at(c, e);
    uintptr_t written = 0, inside = 0, bytes = mti_extent_bytes(e); /* inside: in pieces that are parts of the view */
    mti_known k;
    if (p) return mti_known_of_parameter(e, p);
    memset(&k, 0, sizeof k);
    for (p = mti_placed_older(&c->written, e, UINT64_MAX); p && inside < bytes;
         p = mti_placed_older(&c->written, e, p->age)) {
        int covers = mti_extent_covers(p->at, e);
        if (covers && !k.in.width) k.in = p->at;
        mti_known_add(&k, e, p, covers);
        if (covers || mti_extent_covers(e, p->at)) inside += covers ? bytes : mti_extent_bytes(p->at);
        written += covers ? bytes : mti_extent_shared(e, p->at);
    }
    k.unwritten = written < bytes;
    if (!k.unwritten && k.count > 0) return k;
    k.zero = !k.unwritten;
    k.count = 0;
    memset(k.may, MTI_ALL_PLACEMENTS, sizeof k.may);
    return k;
}

MT_API const char *mt_placement_name(mt_placement placement) {
    switch (placement) {
    case MT_REPLICATED: return "replicated";
    case MT_SPLIT_ROWS: return "split by rows";
    case MT_SPLIT_COLS: return "split by columns";
    case MT_PARTIAL: return "partial";
    case MT_UNDECLARED: return "not known";
    }
    return "no such placement";
}

/* Writes a set of placements, as in "replicated or partial". */
static void mti_set_text(int set, char *text, size_t size) {
    int i;
    size_t n = 0;
    text[0] = 0;
    if (set & MTI_LEFT_OUT) n = (size_t)snprintf(text, size, "left out");
    for (i = 0; i < 4; i++)
        if (set >> i & 1)
            n += (size_t)snprintf(text + n, size - n, "%s%s", n ? " or " : "", mt_placement_name((mt_placement)i));
}

/* Whether the sum of a gradient over a group was computed, so that nothing may be added to it. */
static int mti_is_synchronised(const mti_placed *p, int g) {
    return p->is_gradient && !p->zero && p->may[g] == 1 << MT_REPLICATED && (p->adds[g] >> MT_PARTIAL & 1);
}

/* Refuses a call that would make a parameter or its gradient what the placement of the parameter does not allow.
   operand: " (NAME)" of the call, or "" */
static mt_status mti_write_refuse(mt_context *ctx, const char *where, const mti_placed *p, const char *operand, int g,
                                  int becomes, int wanted) {
    const mti_axis *axis = &ctx->checker->axes[g];
    char is[80], must[80];
    const char *cure = "";
    mti_set_text(becomes, is, sizeof is);
    mti_set_text(wanted, must, sizeof must);
    if (becomes == 1 << MT_PARTIAL && p->is_gradient && !(p->adds[g] >> MT_PARTIAL & 1))
        cure = ": set sequence_partial in its mt_param_desc (sequence_parallel in the desc of a layer), and "
               "mt_sync_gradients sums it";
    if (mti_is_synchronised(p, g))
        cure = ": it is synchronised already; call mt_params_zero_grad before the first backward of a step";
    else if (becomes == 1 << MT_REPLICATED && wanted == 1 << MT_PARTIAL)
        cure = ": its mt_param_desc has sequence_partial (sequence_parallel in the desc of a layer), and "
               "mt_sync_gradients would add up equal values";
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the %s of '%.100s'%.40s would be %s over \"%s\" (%d ranks), must be %s%s",
                   where, p->is_gradient ? "gradient" : "value", p->name, operand, is, axis->name, axis->size, must,
                   cure);
}

static mti_known mti_known_of(const mti_checker *c, mt_tensor t) {
    mti_extent e = mti_extent_of(t);
    mti_known k = mti_memory_known(c, t);
    size_t i;
    int g, part;
    for (i = 0; i < c->views.count && !k.zero; i++) {
        const mti_placed *view = &c->views.list[i];
        for (g = 0; mti_extent_covers(view->at, e) && g < c->count; g++) {
            if (view->may[g] == MTI_ALL_PLACEMENTS) continue;
            if (view->may[g] == 1 << MT_PARTIAL && k.may[g] == 1 << MT_REPLICATED) k.terms |= 1u << g;
            k.may[g] = mti_seen_through(e, view->at, view->may[g]);
            for (part = 0; part < k.count; part++) k.parts[part][g] = k.may[g];
        }
    }
    return k;
}

/* Notes what was written to a parameter or gradient, or to a part of it. */
static void mti_parameter_note(mti_placed *p, const unsigned char *may, int zero, int whole) {
    int g;
    if (zero && !whole) return;
    for (g = 0; g < MTI_AXES; g++) {
        int set = may[g] & p->allowed[g];
        p->may[g] = (unsigned char)(whole || p->zero ? set : set | p->may[g]);
    }
    p->zero = zero;
    if (whole) p->summed_over[0] = 0;
}

/* Whether two extents that meet are rows of one matrix with as many columns, so that both together are one, too. */
static int mti_extents_are_rows(mti_extent a, mti_extent b) {
    uintptr_t apart = a.begin < b.begin ? b.begin - a.begin : a.begin - b.begin;
    return a.width == b.width && a.pitch == b.pitch && a.pitch && apart % a.pitch == 0;
}

/* Makes *p a piece for its own memory and that of q, which it meets. If they are not rows of one matrix, nothing is
   known about it, except that it was written. */
static void mti_placed_join(mti_placed *p, const mti_placed *q) {
    int are_rows = mti_extents_are_rows(p->at, q->at), g;
    mti_extent all;
    for (g = 0; g < MTI_AXES; g++) {
        int both = q->zero ? p->may[g] : p->zero ? q->may[g] : p->may[g] | q->may[g];
        p->may[g] = (unsigned char)(are_rows ? both : MTI_ALL_PLACEMENTS);
    }
    p->zero = p->zero && q->zero;
    p->some_columns = p->some_columns || q->some_columns;
    p->is_replaced = p->is_replaced && q->is_replaced;
    if (p->by != q->by) p->by = NULL;
    if (p->with != q->with) p->with = NULL;
    if (p->age < q->age) p->age = q->age;
    all = mti_extents_together(p->at, q->at);
    if (are_rows) all.width = p->at.width, all.pitch = p->at.pitch;
    p->at = all;
}

/* Makes one piece of those that meet `at`, of those that meet these, and so on. */
static void mti_written_squash(mti_checker *c, mti_extent at) {
    mti_placed_list *w = &c->written;
    mti_placed all, *p;
    size_t i = mti_placed_before(w, at.end), from, count;
    p = mti_placed_meets(w, at, &i);
    if (!p) return;
    all = *p;
    do {
        count = w->count;
        i = mti_placed_before(w, all.at.end);
        from = count;
        while ((p = mti_placed_meets(w, all.at, &i)) != NULL) {
            mti_placed_join(&all, p);
            p->is_gone = 1;
            from = i;
        }
        if (from < count) mti_placed_compact(w, from);
    } while (w->count < count);
    p = mti_placed_insert(w, all.at); /* has memory: a piece was removed */
    all.reach = p->reach;
    *p = all;
}

/* Makes one piece of number i and the next one if they meet and say the same, and no other piece lies between them. */
static void mti_written_unite(mti_checker *c, size_t i) {
    mti_placed_list *w = &c->written;
    mti_placed *p, *q, *other;
    uint64_t older;
    size_t at;
    if (i + 1 >= w->count) return;
    p = &w->list[i];
    q = p + 1;
    if (!mti_extents_meet(p->at, q->at) || !mti_extents_are_rows(p->at, q->at)) return;
    if (p->zero != q->zero || p->some_columns != q->some_columns || memcmp(p->may, q->may, sizeof p->may) != 0) return;
    older = p->age < q->age ? p->age : q->age;
    at = mti_placed_before(w, q->at.end > p->at.end ? q->at.end : p->at.end);
    while ((other = mti_placed_meets(w, p->age == older ? p->at : q->at, &at)) != NULL)
        if (other != p && other != q && other->age > older) return;
    mti_placed_join(p, q);
    q->is_gone = 1;
    mti_placed_compact(w, i);
}

/* Returns a new piece for e, without the older ones that it covers, or NULL when there is no memory. */
static mti_placed *mti_written_add(mti_checker *c, mti_extent e) {
    size_t i = mti_placed_before(&c->written, e.end), from = c->written.count;
    int others = 0;
    mti_placed *p;
    while ((p = mti_placed_meets(&c->written, e, &i)) != NULL) {
        if (mti_extent_covers(e, p->at)) p->is_gone = 1, from = i;
        else others++;
    }
    if (from < c->written.count) mti_placed_compact(&c->written, from);
    if (others >= MTI_OVERLAPS_MOST) mti_written_squash(c, e);
    i = mti_placed_before(&c->written, e.begin);
    mti_written_unite(c, i); /* not with the new piece: more is noted about it */
    if (i > 1) mti_written_unite(c, i - 2);
    return mti_placed_insert(&c->written, e);
}

/* Whether the sets of a view say something about it. */
static int mti_sets_tell(const mti_checker *c, const unsigned char *may) {
    int g;
    for (g = 0; g < c->count; g++)
        if (may[g] != MTI_ALL_PLACEMENTS) return 1;
    return 0;
}

MT_API void mt_check_track(mt_context *ctx) {
    if (ctx && ctx->checker) ctx->checker->tracks = 1;
}

/* Returns the age of what a call overwrites before a backward has read it, or 0. */
static uint64_t mti_lost_before(const mti_placed *p, mti_extent e, const char *by, const char *with) {
    if (!p->by || p->by != by || p->with != with || p->at.begin != e.begin) return 0;
    return p->is_used ? p->lost : p->age;
}

/* Notes the sets of a view. by: NULL when they are not known */
static mt_status mti_placement_note(mt_context *ctx, mt_tensor t, const unsigned char *may, int zero, const char *by,
                                    const char *with) {
    mti_checker *c = ctx->checker;
    mti_extent e = mti_extent_of(t);
    mti_placed *p = mti_parameter_at(c, e);
    uint64_t lost;
    int g;
    if (p) {
        for (g = 0; g < c->count; g++)
            if (!(may[g] & p->allowed[g])) return mti_write_refuse(ctx, by, p, "", g, may[g], p->allowed[g]);
        mti_parameter_note(p, may, zero, mti_extent_covers(e, p->at));
        if (zero) p->used = 0, p->zeroed = c->written.newest;
    } else {
        mti_placed_forget(&c->meant, e, 1);
        if (!mti_is_watched(ctx, e) && !(c->tracks && mti_sets_tell(c, may))) return MT_SUCCESS;
        MT_TRY(mti_watch_extent(ctx, e, 0));
        p = mti_placed_older(&c->written, e, UINT64_MAX);
        lost = p ? mti_lost_before(p, e, by, with) : 0;
        p = mti_written_add(c, e);
        if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the checks of placements");
        p->lost = lost;
        memcpy(p->may, may, sizeof p->may);
        p->zero = zero;
    }
    p->by = by;
    p->with = with;
    p->content = 0;
    return MT_SUCCESS;
}

/* Notes that t has only some columns of a tensor. */
static void mti_columns_note(mti_checker *c, mt_tensor t) {
    mti_extent e = mti_extent_of(t);
    mti_placed *p = mti_placed_older(&c->written, e, UINT64_MAX);
    if (p && mti_extent_covers(p->at, e) && mti_extent_covers(e, p->at)) p->some_columns = 1;
}

MT_API void mt_declare_forget(mt_context *ctx, const void *data, size_t bytes) {
    mti_tell_forgotten(ctx, data, bytes, 1);
    if (!ctx || !ctx->checker || !bytes) return;
    mti_forget(ctx, data, bytes);
    mti_placed_forget(&ctx->checker->memory, mti_extent_of_bytes(data, bytes), 1);
}

static int mti_has_elements(mt_tensor t) { return t.data && t.rows > 0 && t.cols > 0; }

/* Notes that nothing is known about what was written to the parameters and gradients in a view. */
static void mti_forget_parameters(mti_checker *c, mti_extent e) {
    size_t i = mti_placed_before(&c->parameters, e.end);
    unsigned char all[MTI_AXES];
    mti_placed *p;
    memset(all, MTI_ALL_PLACEMENTS, sizeof all);
    while ((p = mti_placed_meets(&c->parameters, e, &i)) != NULL)
        if (mti_extent_covers(e, p->at)) mti_parameter_note(p, all, 0, 1);
}

/* Notes that nothing is known about what was written to a view, nor about the parameters in it. */
static mt_status mti_forget_view(mt_context *ctx, mt_tensor t) {
    unsigned char all[MTI_AXES];
    if (!mti_has_elements(t)) return MT_SUCCESS;
    memset(all, MTI_ALL_PLACEMENTS, sizeof all);
    mti_forget_parameters(ctx->checker, mti_extent_of(t));
    return mti_placement_note(ctx, t, all, 0, NULL, NULL);
}

static mt_status mti_terms_share(mt_context *ctx, int g, mt_tensor t); /* >>replicas */

/* Notes that t is what `set` says over a group. */
static mt_status mti_declare_set(mt_context *ctx, const mt_comm *comm, mt_tensor t, int set) {
    mti_known k;
    int g;
    MT_TRY(mti_watch_extent(ctx, mti_extent_of(t), 0));
    g = mti_axis_of(ctx->checker, comm, 1);
    k = mti_known_of(ctx->checker, t);
    if (g >= 0 && set == 1 << MT_PARTIAL) MT_TRY(mti_terms_share(ctx, g, t));
    if (g >= 0) ctx->checker->axes[g].only_group = 0;
    if (g < 0) return k.unwritten ? mti_forget_view(ctx, t) : MT_SUCCESS; /* in a group of one, too, it was written */
    if (k.zero && !k.parameter) memset(k.may, MTI_ALL_PLACEMENTS, sizeof k.may);
    k.may[g] = (unsigned char)set;
    MT_TRY(mti_placement_note(ctx, t, k.may, 0, "mt_declare", NULL));
    if (k.some_columns) mti_columns_note(ctx->checker, t);
    return MT_SUCCESS;
}

/* Returns the parameter or gradient of a view, or else the newest piece that meets it, or NULL. */
static mti_placed *mti_newest_at(const mti_checker *c, mti_extent at) {
    mti_placed *p = mti_parameter_at(c, at);
    return p ? p : mti_placed_older(&c->written, at, UINT64_MAX);
}

/* Whether ranks may have any content in all of e, by mt_declare_meant. */
static int mti_is_meant(const mti_checker *c, mti_extent e) {
    uintptr_t inside = 0;
    size_t i = mti_placed_before(&c->meant, e.end);
    const mti_placed *p;
    while ((p = mti_placed_meets(&c->meant, e, &i)) != NULL) {
        if (mti_extent_covers(p->at, e)) return 1;
        if (mti_extent_covers(e, p->at)) inside += mti_extent_bytes(p->at);
    }
    return inside >= mti_extent_bytes(e);
}

MT_API mt_status mt_declare_meant(mt_context *ctx, mt_tensor t) {
    mti_placed_list *meant;
    mti_placed *p;
    mti_extent e;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (mt_check_mode(ctx) != 2 || !mti_has_elements(t)) return MT_SUCCESS;
    meant = &ctx->checker->meant;
    e = mti_extent_of(t);
    if (mti_is_meant(ctx->checker, e)) return MT_SUCCESS;
    p = mti_placed_insert(meant, e);
    if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "mt_declare_meant: no memory for the checks of placements");
    p->stays = mti_parameter_at(ctx->checker, e) != NULL;
    return MT_SUCCESS;
}

static mt_status mti_expect_placement(mt_context *ctx, const char *function, mt_placement placement) {
    if ((int)placement >= 0 && placement <= MT_UNDECLARED) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: placement is %d, must be from MT_REPLICATED to MT_UNDECLARED", function,
                   (int)placement);
}

MT_API mt_status mt_declare(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_placement(ctx, "mt_declare", placement));
    if (!comm && placement != MT_UNDECLARED)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare: comm is NULL, and placement is not MT_UNDECLARED");
    if (!mt_check_mode(ctx) || !mti_has_elements(t)) return MT_SUCCESS;
    if (!comm) return mti_forget_view(ctx, t);
    return mti_declare_set(ctx, comm, t, placement == MT_UNDECLARED ? MTI_ALL_PLACEMENTS : 1 << placement);
}

MT_API mt_status mt_declare_complete(mt_context *ctx, const mt_comm *comm, mt_tensor t) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mt_check_mode(ctx) || !mti_has_elements(t)) return MT_SUCCESS;
    return mti_declare_set(ctx, comm, t, 1 << MT_REPLICATED | 1 << MT_SPLIT_ROWS);
}

static mt_status mti_view_share(mt_context *ctx, int g, mt_tensor t, mt_placement placement); /* >>replicas */

MT_API mt_status mt_check_view(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement) {
    mti_placed *view;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_placement(ctx, "mt_check_view", placement));
    if (!ctx->checker) return MT_SUCCESS;
    g = mti_axis_of(ctx->checker, comm, 1);
    view = mti_placed_add(&ctx->checker->views);
    if (!view) return mt_fail(ctx, MT_ERR_MEMORY, "mt_check_view: no memory for the checks of placements");
    if (mti_has_elements(t)) view->at = mti_extent_of(t);
    memset(view->may, MTI_ALL_PLACEMENTS, sizeof view->may);
    if (g >= 0 && placement != MT_UNDECLARED) view->may[g] = (unsigned char)(1 << placement);
    return g < 0 ? MT_SUCCESS : mti_view_share(ctx, g, t, placement);
}

MT_API void mt_check_group(mt_context *ctx, const mt_comm *comm) {
    int count = ctx && ctx->checker ? ctx->checker->count : 0, g;
    if (!ctx || !ctx->checker) return;
    g = mti_axis_of(ctx->checker, comm, 1);
    if (g >= count) ctx->checker->axes[g].only_group = 1;
}

static mt_status mti_slot_check(mt_context *ctx, const char *where, const char *with, const char *name, mt_tensor t);

MT_API mt_status mt_declare_zero(mt_context *ctx, mt_tensor t) {
    unsigned char all[MTI_AXES];
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!ctx->checker || !mti_has_elements(t)) return MT_SUCCESS;
    memset(all, MTI_ALL_PLACEMENTS, sizeof all);
    if (mt_check_mode(ctx)) MT_TRY(mti_slot_check(ctx, "mt_fill", NULL, "y", t));
    return mti_placement_note(ctx, t, all, 1, "mt_fill", NULL);
}

MT_API mt_placement mt_placement_of(const mt_context *ctx, const mt_comm *comm, mt_tensor t) {
    const mti_placed *p;
    mti_known k;
    int g, placement;
    if (!mt_check_mode(ctx) || !mti_has_elements(t)) return MT_UNDECLARED;
    g = mti_axis_of(ctx->checker, comm, 0);
    p = g < 0 && comm ? mti_parameter_at(ctx->checker, mti_extent_of(t)) : NULL;
    if (g < 0) return p && strcmp(p->summed_over, comm->name) == 0 ? MT_REPLICATED : MT_UNDECLARED;
    k = mti_known_of(ctx->checker, t);
    for (placement = MT_REPLICATED; placement <= MT_PARTIAL; placement++)
        if ((!k.zero || k.parameter) && k.may[g] == 1 << placement) return (mt_placement)placement;
    return MT_UNDECLARED;
}

/* Notes a parameter's value or gradient. */
static mt_status mti_declare_part(mt_context *ctx, const char *name, int tensor, int data, mt_tensor t, int may,
                                  int64_t parts, int is_gradient, int partial) {
    mti_checker *c = ctx->checker;
    const char *copy;
    mti_placed *p;
    if (!mti_has_elements(t)) return MT_SUCCESS;
    mti_forget(ctx, t.data, (size_t)t.rows * (size_t)t.cols * mt_dtype_size(t.dtype));
    copy = mti_names_add(c, name);
    p = copy ? mti_placed_insert(&c->parameters, mti_extent_of(t)) : NULL;
    if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the checks of '%s'", name);
    p->name = copy;
    p->parts = parts;
    p->is_gradient = is_gradient;
    p->zero = is_gradient;
    memset(p->may, MTI_ALL_PLACEMENTS, sizeof p->may);
    memset(p->allowed, MTI_ALL_PLACEMENTS, sizeof p->allowed);
    if (tensor >= 0) p->may[tensor] = p->allowed[tensor] = (unsigned char)(may | (partial ? 1 << MT_PARTIAL : 0));
    if (data >= 0)
        p->may[data] = p->allowed[data] =
            (unsigned char)(is_gradient ? 1 << MT_REPLICATED | 1 << MT_PARTIAL : 1 << MT_REPLICATED);
    memcpy(p->adds, p->allowed, sizeof p->adds);
    if (tensor >= 0 && partial && may == 1 << MT_REPLICATED) p->adds[tensor] = 1 << MT_PARTIAL;
    return MT_SUCCESS;
}

MT_API mt_status mt_declare_parameter(mt_context *ctx, const char *name, const mt_comm *tensor, const mt_comm *data,
                                      mt_tensor value, mt_tensor grad, mt_placement placement, int64_t parts,
                                      int partial) {
    int t, d;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!name) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_parameter: name is NULL");
    MT_TRY(mti_expect_placement(ctx, "mt_declare_parameter", placement));
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    t = mti_axis_of(ctx->checker, tensor, 1);
    d = mti_axis_of(ctx->checker, data, 1);
    MT_TRY(mti_declare_part(ctx, name, t, d, value, 1 << placement, parts, 0, 0));
    return mti_declare_part(ctx, name, t, d, grad, 1 << placement, parts, 1, partial);
}

/* ---- >>rules: the rules of operators ----------------------------------------------------------------------------- */

struct mti_ruling;
static mt_status mti_replica_read(mt_context *ctx, const char *where, const char *with, const mt_operand *operand,
                                  const mti_known *known); /* >>replicas */
static mt_status mti_range_note(mt_context *ctx, int g, const struct mti_ruling *r, const mt_operand *o,
                                mti_known *known); /* >>replicas */

/* An operand of a rule in a call. */
typedef struct mti_ruled {
    const mt_operand *operand; /* NULL: the call leaves it out */
    mti_known known;
} mti_ruled;

typedef struct mti_ruling {
    const mti_checker *checker;
    const char *where;
    const mt_rule *rule;
    mti_ruled operands[MTI_RULE_OPERANDS]; /* in the order of the rule */
    int count;
    int over_all;     /* 1: the call is a sum over all groups together */
    const char *with; /* name of a parameter among the operands, or NULL */
} mti_ruling;

/* Returns the set that a letter of a case stands for. */
static int mti_letter_set(char letter) {
    static const char letters[] = "RrcP", whole[] = "owka";
    const char *at = strchr(letters, letter);
    if (letter == '-') return 0;
    if (letter && strchr(whole, letter)) return 1 << MT_REPLICATED;
    return at && *at ? 1 << (at - letters) : MTI_ALL_PLACEMENTS;
}

static int mti_is_data(const mti_axis *axis) { return strcmp(axis->name, "data") == 0; }

/* Whether operands i and k of a call are views of one tensor, with as many columns. */
static int mti_is_sibling(const mti_ruling *r, int i, int k) {
    const mti_ruled *a = &r->operands[i], *b = &r->operands[k];
    return b->operand && a->known.in.begin == b->known.in.begin && a->known.in.width == b->known.in.width &&
           a->operand->t.cols == b->operand->t.cols;
}

/* Returns how many views of one tensor the call has of which operand i is one. */
static int mti_siblings(const mti_ruling *r, int i) {
    int k, n, count = 0;
    for (k = 0; k < r->count; k++) {
        for (n = 0; n < k; n++)
            if (mti_is_sibling(r, i, n) && mti_is_sibling(r, i, k) &&
                r->operands[n].operand->t.data == r->operands[k].operand->t.data)
                break;
        if (n == k && mti_is_sibling(r, i, k)) count++;
    }
    return count;
}

/* Returns the number of shares into which views like operand i divide the columns of the tensor that has it. Returns 1
   when the operand, or it and its siblings together, are all columns, and when there is no such number. */
static int64_t mti_shares(const mti_ruling *r, int i) {
    const mti_known *k = &r->operands[i].known;
    mti_extent at = mti_extent_of(r->operands[i].operand->t);
    uintptr_t each = at.width * (uintptr_t)mti_siblings(r, i);
    if (!k->in.width || !mti_extents_share_rows(at, k->in) || k->in.width % each) return 1;
    return (int64_t)(k->in.width / each);
}

/* Whether operand i has columns of the share of this rank: of tensors side by side, [K | V], or in turn, [k v k v]. */
static int mti_has_own_columns(const mti_ruling *r, int i, int g) {
    const mti_axis *axis = &r->checker->axes[g];
    mti_extent at = mti_extent_of(r->operands[i].operand->t), in = r->operands[i].known.in;
    int64_t shares = mti_shares(r, i), siblings = mti_siblings(r, i), n;
    int64_t from = axis->rank * shares / axis->size, to = ((axis->rank + 1) * shares - 1) / axis->size;
    uintptr_t offset = (at.begin - in.begin) % (in.pitch ? in.pitch : 1);
    if (shares == 1 || offset % at.width) return 0;
    offset /= at.width;
    for (n = from; n <= to; n++)
        if (n == (int64_t)offset % shares || n == (int64_t)offset / siblings) return 1;
    return 0;
}

/* Returns the set of the placement that operand i has as exactly this rank's share of a larger tensor, or 0. */
static int mti_share_of(const mti_ruling *r, int i, int g) {
    const mti_ruled *o = &r->operands[i];
    const mti_axis *axis = &r->checker->axes[g];
    mti_extent at, in = o->known.in;
    uintptr_t size = (uintptr_t)axis->size, rank = (uintptr_t)axis->rank, rows;
    if (!o->operand || !in.width) return 0;
    at = mti_extent_of(o->operand->t);
    rows = (uintptr_t)o->operand->t.rows;
    if (at.width * size == in.width && mti_extents_share_rows(at, in) && at.begin - in.begin == rank * at.width)
        return 1 << MT_SPLIT_COLS;
    if (at.width != in.width || mti_extent_bytes(in) != rows * size * in.width) return 0;
    return at.begin - in.begin == rank * rows * in.pitch ? 1 << MT_SPLIT_ROWS : 0;
}

/* The same of what all ranks have and a call only reads. */
static int mti_own_share(const mti_ruling *r, int i, int g) {
    const mti_ruled *o = &r->operands[i];
    if (!o->operand || o->operand->use != 1 || o->known.may[g] != 1 << MT_REPLICATED) return 0;
    return mti_share_of(r, i, g);
}

/* Whether a call writes this rank's share of a gradient of which each rank has a term. */
static int mti_is_term(const mti_ruling *r, int i, int g, char letter) {
    const mti_ruled *o = &r->operands[i];
    const mti_placed *p = o->known.parameter;
    if ((letter != 'r' && letter != 'c') || !o->operand || !(o->operand->use & 2) || !p || !p->is_gradient) return 0;
    return p->adds[g] == 1 << MT_PARTIAL && mti_share_of(r, i, g) == mti_letter_set(letter);
}

/* Whether operand i has the first rows of a tensor, until those of this rank's share of operand 0. */
static int mti_has_first_rows(const mti_ruling *r, int i, int g) {
    const mti_ruled *o = &r->operands[i];
    int64_t rows = r->operands[0].operand ? r->operands[0].operand->t.rows : 0;
    if (o->known.in.width && mti_extent_of(o->operand->t).begin - o->known.in.begin >= o->known.in.pitch) return 0;
    return o->operand->t.rows == (r->checker->axes[g].rank + 1) * rows;
}

/* What a letter says of operand i, apart from its placement, see mt_rule. */
static int mti_extent_fits(const mti_ruling *r, int i, int g, char letter) {
    int reads = r->operands[i].operand->use & 1;
    switch (letter) {
    case 'o': return !reads || mti_has_own_columns(r, i, g);
    case 'w': return !reads || mti_shares(r, i) == 1;
    case 'k': return !mti_is_data(&r->checker->axes[g]) && mti_has_first_rows(r, i, g);
    case 'a': return !mti_is_data(&r->checker->axes[g]);
    default: return 1;
    }
}

/* Returns the set that a letter gives operand i, which a call writes. This rank's columns of a tensor of zeros are a
   term of it. */
static int mti_result_set(const mti_ruling *r, int i, int g, char letter) {
    if (mti_is_term(r, i, g, letter)) return 1 << MT_PARTIAL;
    if (letter != 'o' || !r->operands[i].operand || (r->operands[i].operand->use & 1)) return mti_letter_set(letter);
    return 1 << (mti_shares(r, i) > 1 ? MT_PARTIAL : MT_SPLIT_COLS);
}

/* Returns the set that an operand must have a letter of: what it is when the call reads it, and what a parameter or
   gradient may become when the call only writes it. */
static int mti_ruled_set(const mti_ruled *o, int g) {
    const mti_placed *p = o->known.parameter;
    if (o->operand->use & 1) return o->known.zero && !p ? MTI_ALL_PLACEMENTS : o->known.may[g];
    return p ? p->adds[g] : MTI_ALL_PLACEMENTS;
}

/* Whether an operand may be what a letter says: all parts of it, when they have other sets. */
static int mti_letter_fits(const mti_ruling *r, int i, int g, char letter) {
    const mti_ruled *o = &r->operands[i];
    int set = mti_result_set(r, i, g, letter), part;
    if (!(mti_ruled_set(o, g) & set)) return 0;
    for (part = 0; (o->operand->use & 1) && part < o->known.count; part++)
        if (!(o->known.parts[part][g] & set)) return 0;
    return mti_extent_fits(r, i, g, letter);
}

/* Returns the number of operands whose sets do not fit a case. *first becomes the first of them, or one that is no
   parameter. */
static int mti_case_misfits(const mti_ruling *r, const char *letters, int g, int *first) {
    int i, misfits = 0;
    *first = -1;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        if (!o->operand || (letters[i] != '-' && mti_letter_fits(r, i, g, letters[i]))) continue;
        if (*first < 0 || r->operands[*first].known.parameter) *first = i;
        misfits++;
    }
    return misfits;
}

/* Goes to the next case: words of `cases`, then those of `more`. Returns NULL behind the last one. */
static const char *mti_next_case(const char *at, const char *cases, const char **more) {
    at = at ? at + strcspn(at, " ") : cases;
    at += strspn(at, " ");
    if (*at) return at;
    cases = *more;
    *more = NULL;
    return cases ? mti_next_case(NULL, cases, more) : NULL;
}

/* Returns the length of the layer's part of a parameter's name: without the last of several words, at most 120. */
static int mti_layer_length(const char *name) {
    const char *last = strrchr(name, '.');
    size_t n = last && last > name ? (size_t)(last - name) : strlen(name);
    return n < 120 ? (int)n : 120;
}

/* Writes which call has written a tensor, as in " since mt_gemm at mlp.linear_fc1". by and with may be NULL. */
static void mti_since_text(const char *by, const char *with, char *text, size_t size) {
    text[0] = 0;
    if (by)
        snprintf(text, size, " since %.60s%s%.*s", by, with ? " at " : "", with ? mti_layer_length(with) : 0,
                 with ? with : "");
}

/* Writes the layer whose parameter a call has, as in ' "mlp.linear_fc1"', or that of a call before it. */
static void mti_with_text(const mti_checker *c, const char *with, char *text, size_t size) {
    const char *name = with ? with : c->latest;
    text[0] = 0;
    if (name) snprintf(text, size, "%s\"%.*s\"", with ? " " : " after ", mti_layer_length(name), name);
}

/* Whether a case would fit if gradients of parameters might be terms of a sum. */
static int mti_fits_terms(const mti_ruling *r, int g) {
    const char *more = NULL, *at = NULL;
    int k, first, terms;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        for (k = terms = 0; k < r->count; k++) {
            const mti_ruled *o = &r->operands[k];
            if (!o->operand || !o->known.parameter || !o->known.parameter->is_gradient || at[k] != 'P') continue;
            if (!mti_letter_fits(r, k, g, 'P')) terms++;
        }
        if (terms && terms == mti_case_misfits(r, at, g, &first)) return 1;
    }
    return 0;
}

/* Writes what a parameter or its gradient has to do with a misfit of operand i. Returns 1 if this is the mistake. A sum
   over rows that are split is a part of a sum, a sum over replicated rows is not. */
static int mti_parameter_hint(const mti_ruling *r, int g, int i, char *text, size_t size) {
    int is = r->operands[i].known.may[g], k;
    text[0] = 0;
    for (k = 0; k < r->count; k++) {
        const mti_placed *p = r->operands[k].operand ? r->operands[k].known.parameter : NULL;
        if (p && !p->is_gradient && is == 1 << MT_SPLIT_ROWS && p->may[g] == 1 << MT_REPLICATED &&
            !mti_extent_covers(mti_extent_of(r->operands[k].operand->t), p->at))
            snprintf(text, size, ", or say with mt_check_view that the view of '%.100s' is of this rank's rows",
                     p->name);
        if (!p || !p->is_gradient || !(r->operands[k].operand->use & 2)) continue;
        if (mti_is_synchronised(p, g)) {
            snprintf(text, size,
                     ": the gradient of '%.100s' is synchronised already; call mt_params_zero_grad before the first "
                     "backward of a step",
                     p->name);
            return 1;
        }
        if ((is == 1 << MT_SPLIT_ROWS || (is == 1 << MT_PARTIAL && mti_fits_terms(r, g))) &&
            p->adds[g] == 1 << MT_REPLICATED)
            snprintf(text, size, ", or set sequence_partial for '%.100s' (sequence_parallel in the desc of a layer)",
                     p->name);
        if (is == 1 << MT_REPLICATED && p->adds[g] == 1 << MT_PARTIAL)
            snprintf(text, size,
                     ", or leave out sequence_partial of '%.100s' (sequence_parallel in the desc of a layer)", p->name);
    }
    return 0;
}

/* Whether an operand is the gradient of a tensor: by its name in the rule, or because it is the product of a gradient
   and a weight that is split by rows. (A weight that is split by columns makes a term of an output, and so does an
   embedding, whose table is split by rows.) */
static int mti_is_gradient(const mti_checker *c, const mti_ruled *o, int g) {
    size_t i;
    if (o->operand->name[0] == 'd' || (o->known.by && strstr(o->known.by, "_backward"))) return 1;
    if (o->known.by && strcmp(o->known.by, "mt_gemm") != 0 && strcmp(o->known.by, "mt_linear_activation_backward") != 0)
        return 0;
    for (i = 0; o->known.with && i < c->parameters.count; i++) {
        const mti_placed *p = &c->parameters.list[i];
        if (!p->is_gradient && strcmp(p->name, o->known.with) == 0) return p->may[g] == 1 << MT_SPLIT_ROWS;
    }
    return 0;
}

/* Returns the region call that turns a placement into another one, or NULL. */
static const char *mti_region_remedy(int is, int must, int is_gradient) {
    int from = 0, to = 0;
    static const char *const calls[4][4] = {
        {NULL, "mt_scatter_to_sequence_region", "mt_scatter_to_tensor_region", NULL},
        {"mt_gather_from_sequence_region", NULL, NULL, NULL},
        {"mt_gather_from_tensor_region", NULL, NULL, NULL},
        {"mt_reduce_from_tensor_region_forward", "mt_reduce_scatter_to_sequence_region", NULL, NULL}};
    if (is == 1 << MT_REPLICATED && must >> MT_PARTIAL & 1) return NULL; /* it was summed already */
    while (from < 3 && !(is >> from & 1)) from++;
    while (to < 3 && !(must >> to & 1)) to++;
    if (from == 3 && to == 0 && is_gradient) return "mt_copy_to_tensor_region_backward";
    return calls[from][to];
}

/* Returns the call that makes an operand what it must be, or NULL. Over the data group there are no regions: the ranks
   add up terms of a sum, and a number that each has of its own tokens. */
static const char *mti_remedy(const mti_checker *c, const mti_ruled *o, int g, int must) {
    int is = o->known.may[g], sums = is >> MT_PARTIAL & 1, whole = must >> MT_REPLICATED & 1;
    int number = o->operand->t.rows == 1 && o->operand->t.cols == 1;
    if (whole && sums && o->known.parameter && o->known.parameter->is_gradient) return "mt_sync_gradients";
    if (whole && strcmp(o->operand->name, "gathered") == 0) return "mt_all_gather"; /* one shard below the other */
    if (!mti_is_data(&c->axes[g])) return mti_region_remedy(is, must, mti_is_gradient(c, o, g));
    return whole && (sums || number) ? "mt_all_reduce" : NULL;
}

/* Writes which operand, that all ranks have, could be this rank's term of a sum, so that a case would fit. */
static void mti_term_hint(const mti_ruling *r, int g, int ranks, char *text, size_t size) {
    const char *more = NULL, *at = NULL, *name;
    int first;
    text[0] = 0;
    while (r->count > 1 && (at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        if (mti_case_misfits(r, at, g, &first) != 1 || at[first] != 'P') continue;
        if (r->operands[first].operand->use != 1 || r->operands[first].known.may[g] != 1 << MT_REPLICATED) continue;
        name = r->operands[first].operand->name;
        snprintf(
            text, size,
            ", or add %.20s on one rank only, and say so with mt_check_view (MT_PARTIAL), or a copy divided by %d on "
            "each rank, with mt_declare (MT_PARTIAL)",
            name, ranks);
        return;
    }
}

/* Writes over which other group the tensor of a call that communicates is a sum, if it must be one. */
static void mti_group_hint(const mti_ruling *r, int g, int must, char *text, size_t size) {
    const mti_ruled *o = &r->operands[0];
    char since[208];
    int other;
    text[0] = 0;
    if (r->count > 1 || r->over_all || !(must >> MT_PARTIAL & 1)) return;
    for (other = 0; other < r->checker->count; other++) {
        if (other == g || o->known.may[other] != 1 << MT_PARTIAL) continue;
        mti_since_text(o->known.by, o->known.with, since, sizeof since);
        snprintf(text, size, ": this is a sum over \"%s\"%s, so call it with the communicator of \"%s\", not of \"%s\"",
                 r->checker->axes[other].name, since, r->checker->axes[other].name, r->checker->axes[g].name);
        return;
    }
}

/* Refuses operand i of a call: no case allows what it is. */
static mt_status mti_rule_refuse(mt_context *ctx, const mti_ruling *r, int g, int i, int must) {
    const mti_axis *axis = &ctx->checker->axes[g];
    const mti_ruled *o = &r->operands[i];
    const char *help = mti_remedy(ctx->checker, o, g, must);
    int adds_whole =
        r->count > 1 && o->known.may[g] == 1 << MT_REPLICATED && !(must & ~(MTI_LEFT_OUT | 1 << MT_PARTIAL));
    char is[80], wanted[80], at[192], since[208], cure[400] = "", more[400], term[240];
    mti_set_text(o->known.may[g], is, sizeof is);
    mti_set_text(must, wanted, sizeof wanted);
    snprintf(at, sizeof at, " (%.30s)", o->operand->name);
    if (o->known.parameter && (o->operand->use & 2))
        return mti_write_refuse(ctx, r->where, o->known.parameter, at, g, must, mti_ruled_set(o, g));
    mti_with_text(ctx->checker, r->with, at, sizeof at);
    mti_since_text(o->known.parameter ? NULL : o->known.by, o->known.with, since, sizeof since);
    if (help) snprintf(cure, sizeof cure, ": call %s before", help);
    else if (adds_whole && strchr(r->rule->cases, 'P'))
        snprintf(cure, sizeof cure, ": each rank would add it to its term of a sum; add it after the sum");
    else if (o->known.may[g] == 1 << MT_REPLICATED && must == 1 << MT_PARTIAL)
        snprintf(cure, sizeof cure, ": this call would add up equal values");
    mti_group_hint(r, g, must, more, sizeof more);
    if (more[0]) snprintf(cure, sizeof cure, "%s", more);
    mti_term_hint(r, g, axis->size, term, sizeof term);
    if (mti_parameter_hint(r, g, i, more, sizeof more)) cure[0] = term[0] = 0;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s%s: %s%s%.100s%s is %s over \"%s\" (%d ranks)%s, must be %s%s%s%s",
                   r->where, at, o->operand->name, o->known.parameter ? ", '" : "",
                   o->known.parameter ? o->known.parameter->name : "", o->known.parameter ? "'," : "", is, axis->name,
                   axis->size, since, wanted, cure, more, term);
}

/* Whether a message had better name operand a than b: a mistake is seldom in a parameter. */
static int mti_is_better(const mti_ruling *r, int a, int b) {
    return r->operands[b].known.parameter && !r->operands[a].known.parameter;
}

/* Refuses a rule without cases, and a case that has not a letter for each operand. */
static mt_status mti_rule_valid(mt_context *ctx, const mti_ruling *r) {
    const char *more = r->rule->data_cases, *at = NULL;
    int cases = 0;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        if ((int)strcspn(at, " ") != r->count)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: a case of its rule has %d letters, but there are %d operands",
                           r->where, (int)strcspn(at, " "), r->count);
        cases++;
    }
    return cases > 0 ? MT_SUCCESS : mt_fail(ctx, MT_ERR_ARGUMENT, "%s: its rule has no case", r->where);
}

/* Whether a call reads, apart from zeros, only what all ranks of group g have. */
static int mti_reads_replicas(const mti_ruling *r, int g) {
    int i, any = 0;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        if (!o->operand || !(o->operand->use & 1) || (o->known.zero && !o->known.parameter)) continue;
        if (o->known.may[g] != 1 << MT_REPLICATED) return 0;
        any = 1;
    }
    return any;
}

/* Whether a rule says of a call that it computes the same on all ranks, from nothing. */
static int mti_is_constant(const mti_ruling *r) {
    return r->count == 1 && r->operands[0].operand && r->operands[0].operand->use == 2 &&
           strcmp(r->rule->cases, "R") == 0;
}

/* Whether operand i, which all ranks have, does not fit a letter only because of its extent. */
static int mti_is_other_extent(const mti_ruling *r, int i, int g, char letter) {
    const mti_ruled *o = &r->operands[i];
    if (!o->operand || !(o->operand->use & 1) || o->known.may[g] != 1 << MT_REPLICATED) return 0;
    if (letter == 'o') return mti_shares(r, i) > 1 && !mti_has_own_columns(r, i, g);
    return letter == 'k' && !mti_has_first_rows(r, i, g);
}

/* Returns the first operand that has other rows or columns than a case wants, which does not fit for this alone, or -1.
   *letter becomes its letter. */
static int mti_other_extent(const mti_ruling *r, int g, char *letter) {
    const char *more = NULL, *at = NULL;
    int i, misfits, first, others, found = -1;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        misfits = mti_case_misfits(r, at, g, &first);
        for (i = r->count - 1, others = 0; i >= 0; i--)
            if (mti_is_other_extent(r, i, g, at[i])) others++, found = i;
        if (!others || others != misfits) continue;
        *letter = at[found];
        return found;
    }
    return -1;
}

/* Refuses operand i of a call, see mti_other_extent. */
static mt_status mti_extent_refuse(mt_context *ctx, const mti_ruling *r, int g, int i, char letter) {
    const mti_ruled *o = &r->operands[i], *by = &r->operands[0];
    const mti_axis *axis = &ctx->checker->axes[g];
    uintptr_t size = (uintptr_t)mt_dtype_size(o->operand->t.dtype), pitch = o->known.in.pitch ? o->known.in.pitch : 1;
    long long from = (long long)((mti_extent_of(o->operand->t).begin - o->known.in.begin) % pitch / size);
    char at[192];
    mti_with_text(ctx->checker, r->with, at, sizeof at);
    if (letter == 'k')
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s%s: %s has %lld rows that all %d ranks of \"%s\" have, but %s has the rows of rank %d: the "
                       "last rows of both are at one position, so %s must have the first %lld rows",
                       r->where, at, o->operand->name, (long long)o->operand->t.rows, axis->size, axis->name,
                       by->operand->name, axis->rank, o->operand->name,
                       (long long)by->operand->t.rows * (axis->rank + 1));
    return mt_fail(
        ctx, MT_ERR_ARGUMENT,
        "%s%s: %s has columns %lld to %lld of the %lld that all %d ranks of \"%s\" have, which are not those "
        "of rank %d, as in %s: take the columns of this rank, or, if the ranks share them in another order, "
        "say with mt_check_view that they are MT_SPLIT_COLS",
        r->where, at, o->operand->name, from, from + (long long)o->operand->t.cols - 1,
        (long long)(o->known.in.width / size), axis->size, axis->name, axis->rank, by->operand->name);
}

/* Whether a case fits when views of exactly this rank's share of what all ranks have are this share, with the results
   of these cases. */
static int mti_fits_shares(const mti_ruling *r, int g, unsigned char *results) {
    const char *more = mti_is_data(&r->checker->axes[g]) ? r->rule->data_cases : NULL, *at = NULL;
    mti_ruling shares = *r;
    int i, first, any = 0, fits = 0;
    for (i = 0; i < r->count; i++) {
        int part, set = mti_own_share(r, i, g);
        if (!set) continue;
        any = 1;
        shares.operands[i].known.may[g] = (unsigned char)set;
        for (part = 0; part < r->operands[i].known.count; part++)
            shares.operands[i].known.parts[part][g] = (unsigned char)set;
    }
    while (any && (at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        if (mti_case_misfits(&shares, at, g, &first) > 0) continue;
        for (i = 0; i < r->count; i++) results[i] |= (unsigned char)mti_result_set(r, i, g, at[i]);
        fits = 1;
    }
    return fits;
}

/* Finds the sets that the cases allow in a group: results[i] for operand i. */
static mt_status mti_rule_axis(mt_context *ctx, const mti_ruling *r, int g, unsigned char *results) {
    const char *more = mti_is_data(&ctx->checker->axes[g]) ? r->rule->data_cases : NULL, *at = NULL;
    int i, first, misfits, fits = 0, best = MTI_RULE_OPERANDS + 1, culprit = -1, must = 0;
    char letter;
    memset(results, 0, MTI_RULE_OPERANDS);
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        misfits = mti_case_misfits(r, at, g, &first);
        for (i = 0; misfits == 0 && i < r->count; i++) results[i] |= (unsigned char)mti_result_set(r, i, g, at[i]);
        if (misfits == 0) fits = 1;
        else if (misfits < best || (misfits == best && (first == culprit || mti_is_better(r, first, culprit)))) {
            if (misfits < best || first != culprit) must = 0;
            best = misfits;
            culprit = first;
            must |= at[first] == '-' ? MTI_LEFT_OUT : mti_letter_set(at[first]);
        }
    }
    if (ctx->checker->axes[g].only_group && !mti_reads_replicas(r, g) && !mti_is_constant(r))
        memset(results, MTI_ALL_PLACEMENTS, MTI_RULE_OPERANDS);
    if (!fits) fits = mti_fits_shares(r, g, results);
    if (!fits && (i = mti_other_extent(r, g, &letter)) >= 0) return mti_extent_refuse(ctx, r, g, i, letter);
    return fits ? MT_SUCCESS : mti_rule_refuse(ctx, r, g, culprit, must);
}

/* Sets *word to the next name in a rule's list of operands, and moves *next behind it. Returns its length; 0: the list
   ends. */
static size_t mti_rule_word(const char **next, const char **word) {
    size_t length;
    *word = *next + strspn(*next, " ");
    length = strcspn(*word, " ");
    *next = *word + length;
    return length;
}

static int mti_word_is(const char *word, size_t length, const char *name) {
    return strlen(name) == length && strncmp(word, name, length) == 0;
}

/* Looks up the operands of a call, in the order of the rule. */
static void mti_ruling_fill(mti_checker *c, mti_ruling *r, const mt_operand *operands, int count) {
    const char *next = r->rule->operands, *word;
    size_t length;
    int i;
    for (r->count = 0; r->count < MTI_RULE_OPERANDS && (length = mti_rule_word(&next, &word)) > 0; r->count++) {
        mti_ruled *o = &r->operands[r->count];
        o->operand = NULL;
        for (i = 0; i < count; i++)
            if (mti_word_is(word, length, operands[i].name) && mti_has_elements(operands[i].t))
                o->operand = &operands[i];
        if (o->operand) o->known = mti_known_of(c, o->operand->t);
        if (o->operand && o->known.parameter && !r->with) r->with = o->known.parameter->name;
    }
}

/* Decides what numbers that were not declared are, such as ids: others on data ranks, as in the models, and what the
   only case that fits wants. */
static void mti_numbers_assume(mti_ruling *r, int i, int g) {
    mti_ruled *o = &r->operands[i];
    const char *more = r->rule->data_cases, *at = NULL;
    int is_data = mti_is_data(&r->checker->axes[g]), set = 0, first, misfits;
    if (!o->operand || o->operand->use != 1 || o->operand->t.dtype != MT_I32 || o->known.zero) return;
    if (o->known.may[g] != MTI_ALL_PLACEMENTS || o->known.count > 1) return;
    if (!is_data) more = NULL;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        misfits = mti_case_misfits(r, at, g, &first);
        if (misfits == 0 && (!is_data || at[i] == 'r')) set |= mti_letter_set(at[i]);
    }
    if (!set || set & (set - 1)) return;
    o->known.may[g] = (unsigned char)set;
    if (o->known.count) o->known.parts[0][g] = (unsigned char)set;
}

/* Whether a rule has an operand of this name. */
static int mti_rule_names(const mt_rule *rule, const char *name) {
    const char *next = rule->operands, *word;
    size_t length;
    while ((length = mti_rule_word(&next, &word)) > 0)
        if (mti_word_is(word, length, name)) return 1;
    return 0;
}

/* Refuses arguments of mt_rule_check that are NULL, and operands that the rule does not have. */
static mt_status mti_rule_arguments(mt_context *ctx, const char *where, const mt_rule *rule, const mt_operand *operands,
                                    int count) {
    const char *missing = !where                                  ? "where is NULL"
                          : !rule                                 ? "rule is NULL"
                          : !rule->operands                       ? "rule.operands is NULL"
                          : !rule->cases                          ? "rule.cases is NULL"
                          : count < 0 || (count > 0 && !operands) ? "operands is NULL, or count is negative"
                                                                  : NULL;
    int i;
    if (missing)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_rule_check%s%.60s: %s", where ? " of " : "", where ? where : "",
                       missing);
    for (i = 0; i < count; i++) {
        if (!operands[i].name)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_rule_check of %.60s: operands[%d].name is NULL", where, i);
        if (!mti_rule_names(rule, operands[i].name))
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_rule_check of %.60s: its rule has no operand '%.60s', only: %.200s", where,
                           operands[i].name, rule->operands);
    }
    return MT_SUCCESS;
}

/* Returns the region call that would make t of a piece over a group, or NULL. */
static const char *mti_region_call(const mti_placed *p, int g, int64_t ranks, mti_extent t, int64_t rows) {
    int64_t has = p->at.pitch ? (int64_t)((p->at.end - p->at.begin - p->at.width) / p->at.pitch) + 1 : 1;
    uintptr_t n = (uintptr_t)ranks;
    int is = p->may[g];
    if (p->at.width == t.width && has * ranks == rows && is == 1 << MT_SPLIT_ROWS)
        return "mt_gather_from_sequence_region";
    if (p->at.width == t.width && has == rows * ranks && is == 1 << MT_PARTIAL)
        return "mt_reduce_scatter_to_sequence_region";
    if (p->at.width == t.width && has == rows * ranks && is == 1 << MT_REPLICATED)
        return "mt_scatter_to_sequence_region";
    if (p->at.width * n == t.width && has == rows && is == 1 << MT_SPLIT_COLS) return "mt_gather_from_tensor_region";
    if (p->at.width == t.width * n && has == rows && is == 1 << MT_REPLICATED) return "mt_scatter_to_tensor_region";
    return NULL;
}

/* Writes which call would make t of the newest tensor that fits, and which calls may be missing otherwise. */
static void mti_missing_text(const mti_checker *c, mt_tensor t, char *text, size_t bytes) {
    const mti_placed *newest = NULL;
    const char *call = NULL;
    char since[208];
    size_t i;
    int g;
    for (i = 0; i < c->written.count; i++)
        for (g = 0; g < c->count; g++) {
            const mti_placed *p = &c->written.list[i];
            const char *may = mti_region_call(p, g, c->axes[g].size, mti_extent_of(t), t.rows);
            if (!may || c->axes[g].only_group || (newest && p->age < newest->age)) continue;
            newest = p;
            call = may;
        }
    if (newest) mti_since_text(newest->by, newest->with, since, sizeof since);
    if (newest) snprintf(text, bytes, "%s of what is in another tensor%.200s, or ", call, since);
    else text[0] = 0;
}

/* Writes what was in the memory of t before it was released and allocated again. */
static void mti_released_text(const mti_checker *c, mt_tensor t, char *text, size_t bytes) {
    const mti_released *r = mti_released_at(c, mti_extent_of(t));
    char since[208];
    text[0] = 0;
    if (!r) return;
    mti_since_text(r->by, r->with, since, sizeof since);
    snprintf(text, bytes, ", or mt_arena_release came too early: what was there%s was released and overwritten", since);
}

/* Whether something was declared over a group. mt_check_group alone declares nothing. */
static int mti_declares(const mti_checker *c) {
    int g;
    for (g = 0; g < c->count; g++)
        if (!c->axes[g].only_group) return 1;
    return 0;
}

/* Refuses a call that reads memory of the arena which nothing has written. Ids and lengths are the caller's. */
static mt_status mti_written_check(mt_context *ctx, const mti_ruling *r) {
    char at[192], missing[320], before[320];
    int i;
    if (!ctx->checker->strict || !mti_declares(ctx->checker)) return MT_SUCCESS;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        if (!o->operand || !(o->operand->use & 1) || !o->known.unwritten) continue;
        if (!mt_dtype_is_float(o->operand->t.dtype) || !mti_is_in_arena(ctx, mti_extent_of(o->operand->t))) continue;
        mti_with_text(ctx->checker, r->with, at, sizeof at);
        mti_missing_text(ctx->checker, o->operand->t, missing, sizeof missing);
        mti_released_text(ctx->checker, o->operand->t, before, sizeof before);
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s%s: nothing has written %s [%lld, %lld], or a part of it, since it was allocated: a call is "
                       "missing, such as %smt_gather_from_sequence_region, mt_reduce_scatter_to_sequence_region, "
                       "mt_all_gather or mt_recv, or, for what the program writes itself, mt_declare (MT_UNDECLARED "
                       "with comm NULL, if its placement does not matter)%s",
                       r->where, at, o->operand->name, (long long)o->operand->t.rows, (long long)o->operand->t.cols,
                       missing, before);
    }
    return MT_SUCCESS;
}

MT_API void mt_check_slots(mt_context *ctx, int area, const void *first, size_t bytes, int count, int own) {
    mti_slots *s;
    if (!ctx || !ctx->checker || area < 0 || area > 1) return;
    s = &ctx->checker->slots[area];
    s->first = (uintptr_t)first;
    s->bytes = bytes;
    s->count = bytes ? count : 0;
    s->own = own;
}

/* Returns the first slot of an area that a view meets and that is not the own one, or -1. */
static int mti_slot_of_another(const mti_slots *s, mti_extent e) {
    int i;
    for (i = 0; i < s->count; i++) {
        uintptr_t begin = s->first + (uintptr_t)i * s->bytes;
        if (i != s->own && e.begin < begin + s->bytes && begin < e.end) return i;
    }
    return -1;
}

/* Refuses a call on memory of a slot that is not that of the action. */
static mt_status mti_slot_check(mt_context *ctx, const char *where, const char *with, const char *name, mt_tensor t) {
    char at[192];
    int area, slot;
    for (area = 0; area < 2 && mti_has_elements(t); area++) {
        const mti_slots *s = &ctx->checker->slots[area];
        slot = mti_slot_of_another(s, mti_extent_of(t));
        if (slot < 0) continue;
        mti_with_text(ctx->checker, with, at, sizeof at);
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "%s%s: %s is in slot %d, but the slot of this action is %d (mt_action.slot): it has what another "
            "micro-batch keeps",
            where, at, name, slot, s->own);
    }
    return MT_SUCCESS;
}

/* The same for the operands of a call. */
static mt_status mti_slots_check(mt_context *ctx, const mti_ruling *r) {
    int i;
    for (i = 0; i < r->count; i++)
        if (r->operands[i].operand)
            MT_TRY(mti_slot_check(ctx, r->where, r->with, r->operands[i].operand->name, r->operands[i].operand->t));
    return MT_SUCCESS;
}

/* Counts the operands that a call reads and that may have several placements in a group. */
static void mti_unknown_count(mti_checker *c, const mti_ruling *r) {
    char at[192];
    int i, g;
    for (i = 0; i < r->count; i++)
        for (g = 0; r->operands[i].operand && (r->operands[i].operand->use & 1) && g < c->count; g++) {
            const mti_known *k = &r->operands[i].known;
            if (k->zero || c->axes[g].only_group || !(k->may[g] & (k->may[g] - 1))) continue;
            if (c->unknown++ > 0) continue;
            mti_with_text(c, r->with, at, sizeof at);
            snprintf(c->unknown_text, sizeof c->unknown_text, "%.40s%.140s: %.20s over \"%.16s\"", r->where, at,
                     r->operands[i].operand->name, c->axes[g].name);
        }
}

/* Whether a call reads some columns of a tensor, as many as t has. */
static int mti_reads_some_columns(const mti_ruling *r, mt_tensor t) {
    int i;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        if (o->operand && (o->operand->use & 1) && o->known.some_columns && o->operand->t.cols == t.cols) return 1;
    }
    return 0;
}

/* Whether a parameter is split by a group along a dimension of this size of an operand. */
static int mti_is_split_along(const mti_ruling *r, const mti_ruled *o, int64_t size) {
    int g, rows = 0, cols = 0;
    for (g = 0; g < r->checker->count; g++) {
        rows |= o->known.parameter->allowed[g] == 1 << MT_SPLIT_ROWS;
        cols |= o->known.parameter->allowed[g] == 1 << MT_SPLIT_COLS;
    }
    return (rows && o->operand->t.rows == size) || (cols && o->operand->t.cols == size);
}

/* Returns the parameter whose features are the columns of t, which a call writes: one that the call has, or that of an
   operand with as many columns. */
static const char *mti_features_of(const mti_ruling *r, mt_tensor t) {
    const char *features = NULL;
    int i;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        const mti_placed *p;
        mti_extent e;
        if (!o->operand || !(o->operand->use & 1)) continue;
        if (o->known.parameter && mti_is_split_along(r, o, t.cols)) return o->known.parameter->name;
        if (o->known.parameter || o->operand->t.cols != t.cols) continue;
        e = mti_extent_of(o->operand->t);
        p = mti_placed_older(&r->checker->written, e, UINT64_MAX);
        if (p && p->features && mti_extent_covers(p->at, e) && p->at.width == e.width) features = p->features;
    }
    return features;
}

static void mti_features_note(mti_checker *c, mt_tensor t, const char *features) {
    mti_extent e = mti_extent_of(t);
    mti_placed *p = mti_placed_older(&c->written, e, UINT64_MAX);
    if (p && mti_extent_covers(p->at, e) && mti_extent_covers(e, p->at)) p->features = features;
}

/* Notes what a call writes to operand i. results: the sets that the cases allow, for each group and operand. A constant
   is replicated over the groups that become known later, too. */
static mt_status mti_result_note(mt_context *ctx, const mti_ruling *r, int i,
                                 unsigned char (*results)[MTI_RULE_OPERANDS]) {
    const mti_ruled *o = &r->operands[i];
    unsigned char may[MTI_AXES];
    const char *features;
    int g;
    if (!o->operand || !(o->operand->use & 2)) return MT_SUCCESS;
    memset(may, mti_is_constant(r) ? 1 << MT_REPLICATED : MTI_ALL_PLACEMENTS, sizeof may);
    for (g = 0; g < ctx->checker->count; g++) may[g] = (unsigned char)(results[g][i] & mti_ruled_set(o, g));
    features = mti_features_of(r, o->operand->t);
    MT_TRY(mti_placement_note(ctx, o->operand->t, may, 0, r->where, r->with));
    mti_features_note(ctx->checker, o->operand->t, features);
    if (mti_reads_some_columns(r, o->operand->t)) mti_columns_note(ctx->checker, o->operand->t);
    return MT_SUCCESS;
}

static uint64_t mti_hash_number(uint64_t hash, uint64_t number) {
    return mt_hash_word(mt_hash_word(hash, (uint32_t)number), (uint32_t)(number >> 32));
}

/* Returns the piece of an operand that a call reads and an operator has written, or NULL. */
static mti_placed *mti_computed_at(const mti_checker *c, const mti_ruled *o) {
    mti_placed *p;
    if (!o->operand || !(o->operand->use & 1) || o->known.parameter) return NULL;
    p = mti_placed_older(&c->written, mti_extent_of(o->operand->t), UINT64_MAX);
    if (!p || !p->by || strcmp(p->by, "mt_declare") == 0) return NULL;
    return mti_extent_covers(p->at, mti_extent_of(o->operand->t)) ? p : NULL;
}

/* The activations that a backward reads: the first operand that is neither a parameter nor a gradient. */
typedef struct mti_reading {
    mti_placed *piece; /* NULL: none that is known */
    uint64_t which,
        which_all; /* hashes of what is read of it, and of all that the call reads; which_all 0: not known */
} mti_reading;

static mti_reading mti_activations_of(const mti_checker *c, const mti_ruling *r) {
    mti_reading a = {NULL, 0, 1};
    int i, known = 1;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        mti_placed *p = mti_computed_at(c, o);
        mti_extent e;
        uint64_t which;
        if (!o->operand || !(o->operand->use & 1) || o->known.parameter) continue;
        e = mti_extent_of(o->operand->t);
        which = mti_hash_number(mti_hash_number(p ? p->age : 0, (uint64_t)e.begin), (uint64_t)e.end);
        if (!a.piece && p && o->operand->name[0] != 'd') a.piece = p, a.which = which;
        a.which_all = mti_hash_number(a.which_all, which);
        known &= p != NULL;
    }
    if (!known) a.which_all = 0;
    return a;
}

/* Whether a gradient gets twice what a call reads: the very same, or activations that a second forward has written over
   those of a first one since the gradient was zero. */
static int mti_is_used_twice(const mti_placed *gradient, const mti_reading *a, const char *where) {
    if (gradient->zero || gradient->used != a->which || gradient->used_by != where) return 0;
    return (a->which_all && a->which_all == gradient->used_all) || a->piece->lost > gradient->zeroed;
}

/* Refuses a backward that adds to the gradient of a parameter what it has added already. */
static mt_status mti_used_check(mt_context *ctx, const mti_ruling *r) {
    mti_reading a = mti_activations_of(ctx->checker, r);
    char at[192];
    int i;
    for (i = 0; a.piece && i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        mti_placed *p = o->operand && (o->operand->use & 2) && o->known.parameter
                            ? mti_parameter_at(ctx->checker, mti_extent_of(o->operand->t))
                            : NULL;
        if (!p || !p->is_gradient || !mti_extent_covers(mti_extent_of(o->operand->t), p->at)) continue;
        if (mti_is_used_twice(p, &a, r->where)) {
            mti_with_text(ctx->checker, r->with, at, sizeof at);
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s%s: the gradient of '%.100s' would get the same activations twice: a backward has read "
                           "them already, but each forward needs its own saved, and one backward; if both are "
                           "meant, mt_declare the activations before",
                           r->where, at, p->name);
        }
        p->used = a.which;
        p->used_all = a.which_all;
        p->used_by = r->where;
        a.piece->is_used = 1;
    }
    return MT_SUCCESS;
}

/* Returns what a call writes the gradient of operand i to, which it reads: to "dx" for "x", or to x itself. NULL: the
   call computes no gradient of it. */
static const mt_operand *mti_gradient_of(const mti_ruling *r, int i) {
    const mt_operand *o = r->operands[i].operand, *d;
    int k;
    if (!o || !(o->use & 1) || r->operands[i].known.parameter) return NULL;
    if (o->use & 4) return o;
    for (k = 0; k < r->count; k++) {
        d = r->operands[k].operand;
        if (d && (d->use & 2) && d->name[0] == 'd' && strcmp(d->name + 1, o->name) == 0) return d;
    }
    return NULL;
}

/* Refuses to compute gradients of activations that are no longer there: a backward has written their gradient over
   them. */
static mt_status mti_replaced_check(mt_context *ctx, const mti_ruling *r) {
    char at[192], since[208];
    int i;
    for (i = 0; i < r->count; i++) {
        const mti_placed *p = NULL;
        if (mti_gradient_of(r, i))
            p = mti_placed_older(&ctx->checker->written, mti_extent_of(r->operands[i].operand->t), UINT64_MAX);
        if (!p || !p->is_replaced) continue;
        mti_with_text(ctx->checker, r->with, at, sizeof at);
        mti_since_text(p->by, p->with, since, sizeof since);
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "%s%s: %s is its own gradient%s, which has replaced it: each forward needs its own saved, and one "
            "backward; if your code has written it again, mt_declare it",
            r->where, at, r->operands[i].operand->name, since);
    }
    return MT_SUCCESS;
}

/* Notes where a call has written the gradient of an operand over the operand. */
static void mti_replaced_note(mti_checker *c, const mti_ruling *r) {
    int i;
    for (i = 0; i < r->count; i++) {
        const mt_operand *d = mti_gradient_of(r, i);
        mti_extent e, of;
        mti_placed *p;
        if (!d) continue;
        e = mti_extent_of(d->t);
        of = mti_extent_of(r->operands[i].operand->t);
        p = mti_placed_older(&c->written, e, UINT64_MAX);
        if (p && mti_extent_covers(e, of) && mti_extent_covers(of, e)) p->is_replaced = 1;
    }
}

/* Whether ranks may read other rows or columns of operand i: of a case with a letter for that, or, in a call of tensors
   that the group splits, this rank's share. */
static int mti_reads_apart(const mti_ruling *r, int i, int g) {
    const char *more = NULL, *at = NULL;
    int k, first, own;
    if (r->operands[i].known.may[g] != 1 << MT_REPLICATED) return 0;
    own = mti_own_share(r, i, g) || (r->operands[i].operand->use == 1 && mti_has_own_columns(r, i, g));
    for (k = 0; own && k < r->count; k++)
        if (r->operands[k].operand && !(r->operands[k].known.may[g] & ~MTI_SPLIT_PLACEMENTS)) return 1;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL)
        if ((at[i] == 'o' || at[i] == 'k') && mti_case_misfits(r, at, g, &first) == 0) return 1;
    return 0;
}

/* Whether operand k of a call, other than i, is read and split by columns over group g. */
static int mti_meets_columns(const mti_ruling *r, int i, int g) {
    int k;
    for (k = 0; k < r->count; k++)
        if (k != i && r->operands[k].operand && (r->operands[k].operand->use & 1) &&
            r->operands[k].known.may[g] == 1 << MT_SPLIT_COLS)
            return 1;
    return 0;
}

/* Notes operand i, which a call reads, to be compared: not over a group whose ranks may read other rows or columns of
   it. Of integers the rule says what they must be. */
static mt_status mti_operand_note(mt_context *ctx, const mti_ruling *r, int i,
                                  unsigned char (*results)[MTI_RULE_OPERANDS]) {
    const mt_operand *o = r->operands[i].operand;
    mti_known known;
    int g;
    if (!o || !(o->use & 1)) return MT_SUCCESS;
    known = r->operands[i].known;
    for (g = 0; g < ctx->checker->count; g++) {
        if (o->t.dtype == MT_I32) known.may[g] &= results[g][i];
        if (mti_reads_apart(r, i, g)) known.apart |= 1u << g;
        else if (mti_share_of(r, i, g)) known.terms &= ~(1u << g); /* ranks add other rows or columns */
        if (mti_meets_columns(r, i, g)) MT_TRY(mti_range_note(ctx, g, r, o, &known));
    }
    return mti_replica_read(ctx, r->where, r->with, o, &known);
}

MT_API int64_t mt_check_unknown(mt_context *ctx, char *text, size_t bytes) {
    int64_t count = ctx && ctx->checker ? ctx->checker->unknown : 0;
    if (text && bytes) snprintf(text, bytes, "%s", count ? ctx->checker->unknown_text : "");
    if (count) ctx->checker->unknown = 0;
    return count;
}

MT_API mt_status mt_rule_check(mt_context *ctx, const char *where, const mt_rule *rule, const mt_operand *operands,
                               int count) {
    unsigned char results[MTI_AXES][MTI_RULE_OPERANDS];
    mti_checker *c;
    mti_ruling r;
    int g, i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    MT_TRY(mti_rule_arguments(ctx, where, rule, operands, count));
    c = ctx->checker;
    r.checker = c;
    r.where = where;
    r.rule = rule;
    r.over_all = 0;
    r.with = NULL;
    mti_ruling_fill(c, &r, operands, count);
    MT_TRY(mti_rule_valid(ctx, &r));
    MT_TRY(mti_slots_check(ctx, &r));
    MT_TRY(mti_written_check(ctx, &r));
    for (g = 0; g < c->count; g++) {
        for (i = 0; i < r.count; i++) mti_numbers_assume(&r, i, g);
        MT_TRY(mti_rule_axis(ctx, &r, g, results[g]));
    }
    mti_unknown_count(c, &r);
    if (r.with) c->latest = r.with;
    if (mt_check_mode(ctx) == 2) MT_TRY(mti_replaced_check(ctx, &r));
    if (mt_check_mode(ctx) == 2) MT_TRY(mti_used_check(ctx, &r));
    for (i = 0; mt_check_mode(ctx) == 2 && i < r.count; i++) MT_TRY(mti_operand_note(ctx, &r, i, results));
    for (i = 0; i < r.count; i++) MT_TRY(mti_result_note(ctx, &r, i, results));
    if (mt_check_mode(ctx) == 2) mti_replaced_note(c, &r);
    mti_tell(ctx, where, r.with, operands, count);
    return MT_SUCCESS;
}

/* ---- >>places: numbers, scales and parts ------------------------------------------------------------------------- */

static mt_status mti_place_note(mt_context *ctx, const char *where, const char *field, const mti_known *known,
                                const mt_place *place); /* >>replicas */

/* Refuses a number of a place. `is` says what t is, and `must` what the number must be. */
static mt_status mti_place_refuse(mt_context *ctx, const char *where, const char *field, const char *number,
                                  int64_t value, const mti_known *k, const char *is, const char *must) {
    char at[192];
    mti_with_text(ctx->checker, k->with, at, sizeof at);
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s%s: %s%s%s is %lld, but %s: it must be %s", where, at, field,
                   field[0] ? "." : "", number, (long long)value, is, must);
}

/* The check for a group that splits t. */
static mt_status mti_place_split(mt_context *ctx, const char *where, const char *field, const char *name,
                                 const mti_known *k, int g, const mt_place *place) {
    const mti_axis *axis = &ctx->checker->axes[g];
    int by_rows = k->may[g] == 1 << MT_SPLIT_ROWS;
    int64_t each = by_rows ? place->rows : place->cols, first = by_rows ? place->first_row : place->first_col;
    int64_t before = mt_size_mul(each, axis->rank), all = mt_size_mul(each, axis->size); /* -1: too large */
    char is[160], must[160];
    snprintf(is, sizeof is, "%.60s is split by %s over \"%s\" and this is rank %d of %d", name,
             by_rows ? "rows" : "columns", axis->name, axis->rank, axis->size);
    if (before < 0 || first < before) {
        snprintf(must, sizeof must,
                 "at least %lld, the rank's first %s of the whole tensor, so that ranks do not use the same %s",
                 (long long)before, by_rows ? "row" : "column", place->what);
        return mti_place_refuse(ctx, where, field, by_rows ? "first_row" : "first_col", first, k, is, must);
    }
    if (!by_rows && place->vocab > 1 && place->vocab == each) {
        snprintf(must, sizeof must, "that of all ranks, of which only the first would have tokens");
        return mti_place_refuse(ctx, where, field, "vocab", place->vocab, k, is, must);
    }
    if (by_rows || place->padded || (all >= 0 && place->global_cols >= all)) return MT_SUCCESS;
    snprintf(must, sizeof must, "at least %lld, the columns of all ranks", (long long)all);
    return mti_place_refuse(ctx, where, field, "global_cols", place->global_cols, k, is, must);
}

MT_API mt_status mt_place_check(mt_context *ctx, const char *where, const char *field, const char *name, mt_tensor t,
                                const mt_place *place) {
    mti_known k;
    char is[160], must[160];
    int g, whole = t.rows > 1 && mt_tensor_ld(t) == t.cols; /* 0: t may be a part of the columns */
    int alike = 0;                                          /* 1: ranks of a group have the same columns */
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!where || !field || !name || !place)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_place_check: where, field, name or place is NULL");
    if (!mt_check_mode(ctx) || ctx->checker->count == 0 || !mti_has_elements(t)) return MT_SUCCESS;
    k = mti_known_of(ctx->checker, t);
    MT_TRY(mti_place_note(ctx, where, field[0] ? field : name, &k, place));
    if (k.some_columns) whole = 0;
    for (g = 0; g < ctx->checker->count && !(k.zero && !k.parameter); g++) {
        int by_rows = k.may[g] == 1 << MT_SPLIT_ROWS, by_cols = k.may[g] == 1 << MT_SPLIT_COLS;
        if (by_rows || by_cols) MT_TRY(mti_place_split(ctx, where, field, name, &k, g, place));
        if (!by_rows && (k.may[g] & MTI_SPLIT_PLACEMENTS)) whole = 0;
        if (!(k.may[g] & MTI_SPLIT_PLACEMENTS)) alike = 1;
    }
    if (k.zero || !whole || !alike || place->global_cols == place->cols) return MT_SUCCESS;
    snprintf(is, sizeof is, "no group splits the columns of %.60s", name);
    snprintf(must, sizeof must, "%lld, the number of its columns, so that ranks use the same %s",
             (long long)place->cols, place->what);
    return mti_place_refuse(ctx, where, field, "global_cols", place->global_cols, &k, is, must);
}

/* Whether a factor is n or 1 / n, up to rounding. */
static int mti_is_ratio(double factor, int n) {
    double over = factor / n - 1.0, under = factor * n - 1.0;
    return (over < 1e-6 && over > -1e-6) || (under < 1e-6 && under > -1e-6);
}

MT_API mt_status mt_check_factor(mt_context *ctx, const char *where, const char *number, const char *name, mt_tensor t,
                                 mt_placement along, double factor) {
    mti_known k;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (mt_check_mode(ctx) != 2 || !mti_has_elements(t)) return MT_SUCCESS;
    if (mti_placed_older(&ctx->checker->meant, mti_extent_of(t), UINT64_MAX)) return MT_SUCCESS; /* such as q of qkv */
    k = mti_known_of(ctx->checker, t);
    for (g = 0; g < ctx->checker->count && !k.zero; g++) {
        const mti_axis *axis = &ctx->checker->axes[g];
        if (k.may[g] != 1 << along || !mti_is_ratio(factor, axis->size)) continue;
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %s is %.4g times what it usually is, and \"%s\" has %d ranks: compute it with the sizes of "
                       "the whole model, not with those of a rank, or call mt_declare_meant(ctx, %s) before, if it is "
                       "meant so",
                       where, number, factor, axis->name, axis->size, name);
    }
    return MT_SUCCESS;
}

MT_API void mt_check_mean(mt_context *ctx, mt_tensor t, double scale) {
    mti_checker *c = ctx ? ctx->checker : NULL;
    double rows = (double)t.rows;
    mti_known k;
    int g;
    if (mt_check_mode(ctx) != 2 || !mti_has_elements(t)) return;
    k = mti_known_of(c, t);
    for (g = 0; g < c->count; g++) {
        rows *= k.may[g] == 1 << MT_SPLIT_ROWS ? c->axes[g].size : 1;
        if (!c->axes[g].only_group && (k.may[g] & (k.may[g] - 1))) c->mean_rows = -1.0; /* not known */
    }
    if (mt_tensor_ld(t) != t.cols) c->mean_rows = -1.0; /* some columns: the rows would count again */
    if (scale != scale || k.zero || (c->mean_rows != 0.0 && c->mean_scale != scale)) c->mean_rows = -1.0;
    if (c->mean_rows >= 0.0) c->mean_rows += rows;
    c->mean_scale = scale;
}

static mt_status mti_mean_refuse(mt_context *ctx, const char *where, double factor, const char *group, int ranks) {
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: the scale of the loss makes the gradients %.4g times those of the mean over the rows of all "
                   "ranks, and \"%s\" has %d ranks: divide by the rows of all ranks once, or call "
                   "mt_check_mean(ctx, logits, NAN) before, if it is meant so",
                   where, factor, group, ranks);
}

MT_API mt_status mt_check_mean_end(mt_context *ctx, const char *where, double grad_scale) {
    double factor;
    int g, all = 1, groups = 0;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (mt_check_mode(ctx) != 2) return MT_SUCCESS;
    factor = ctx->checker->mean_rows * ctx->checker->mean_scale * grad_scale;
    ctx->checker->mean_rows = 0.0;
    for (g = 0; g < ctx->checker->count; g++) {
        const mti_axis *axis = &ctx->checker->axes[g];
        if (axis->only_group) continue;
        if (mti_is_ratio(factor, axis->size)) return mti_mean_refuse(ctx, where, factor, axis->name, axis->size);
        all *= axis->size;
        groups++;
    }
    return groups > 1 && mti_is_ratio(factor, all) ? mti_mean_refuse(ctx, where, factor, "the world", all) : MT_SUCCESS;
}

/* Returns the number of parts of a parameter, or of the one with which a view was computed last, or 0. *of becomes the
   name of the parameter. */
static int64_t mti_parts_of(const mti_checker *c, mti_extent e, const char **of) {
    const mti_placed *p = mti_parameter_at(c, e);
    size_t i;
    *of = p ? p->name : NULL;
    if (p) return p->parts;
    p = mti_placed_older(&c->written, e, UINT64_MAX);
    if (p && !mti_extent_covers(p->at, e)) return 0;
    *of = p ? p->features : NULL;
    if (!p || !p->features) return 0;
    for (i = 0; i < c->parameters.count; i++)
        if (c->parameters.list[i].name == p->features) return c->parameters.list[i].parts;
    return 0;
}

MT_API mt_status mt_parts_check(mt_context *ctx, const char *where, const char *name, mt_tensor t, int64_t parts) {
    mti_known k;
    const char *of;
    char since[208];
    int64_t has;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (parts < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_parts_check: parts is %lld, must be at least 1", (long long)parts);
    if (!mt_check_mode(ctx) || ctx->checker->count == 0 || !mti_has_elements(t)) return MT_SUCCESS;
    has = mti_parts_of(ctx->checker, mti_extent_of(t), &of);
    if (has == 0 || has % parts == 0) return MT_SUCCESS;
    k = mti_known_of(ctx->checker, t);
    mti_since_text(k.by, k.with, since, sizeof since);
    for (g = 0; g < ctx->checker->count; g++)
        if (k.may[g] == 1 << MT_SPLIT_COLS)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: %s is split by columns over \"%s\" (%d ranks)%s, and its columns are %lld parts, but "
                           "'%s' has parts %lld, so a rank has other columns than its share of each part: set "
                           "mt_param_desc.parts to %lld",
                           where, name, ctx->checker->axes[g].name, ctx->checker->axes[g].size, since, (long long)parts,
                           of, (long long)has, (long long)parts);
    return MT_SUCCESS;
}

/* Returns the parameter or gradient that is a view, not only a part of it, and that group g splits, or NULL. */
static const mti_placed *mti_whole_split(const mti_checker *c, mt_tensor t, int g) {
    mti_extent e = mti_extent_of(t);
    const mti_placed *p = mti_has_elements(t) ? mti_parameter_at(c, e) : NULL;
    if (!p || !mti_extent_covers(e, p->at) || (p->allowed[g] >> MT_REPLICATED & 1)) return NULL;
    return p->allowed[g] & MTI_SPLIT_PLACEMENTS ? p : NULL;
}

/* Returns the parts of the columns of t over group g and the parameter that has them: t itself, or the one whose
   features t has. 0: not known, or the group does not split them. */
static int64_t mti_parts_over(const mti_checker *c, mt_tensor t, int g, const char **of) {
    const mti_placed *p = mti_whole_split(c, t, g);
    mti_extent e = mti_extent_of(t);
    *of = p ? p->name : NULL;
    if (p) return p->parts;
    p = mti_has_elements(t) && !mti_parameter_at(c, e) ? mti_placed_older(&c->written, e, UINT64_MAX) : NULL;
    if (!p || p->at.width != e.width || p->may[g] != 1 << MT_SPLIT_COLS) return 0;
    return mti_parts_of(c, e, of);
}

MT_API mt_status mt_parts_agree(mt_context *ctx, const char *where, mt_tensor weight, mt_tensor other) {
    const mti_placed *w;
    const char *of;
    int64_t parts;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!where) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_parts_agree: where is NULL");
    for (g = 0; mt_check_mode(ctx) && g < ctx->checker->count; g++) {
        w = mti_whole_split(ctx->checker, weight, g);
        parts = w ? mti_parts_over(ctx->checker, other, g, &of) : 0;
        if (parts && w->parts != parts)
            return mt_fail(
                ctx, MT_ERR_ARGUMENT,
                "%s: '%.100s' has parts %lld, but '%.100s' has parts %lld, so a rank of \"%s\" (%d ranks) has "
                "other features of the one than of the other: set mt_param_desc.parts of both to the same",
                where, w->name, (long long)w->parts, of, (long long)parts, ctx->checker->axes[g].name,
                ctx->checker->axes[g].size);
    }
    return MT_SUCCESS;
}

/* ---- >>moves: the rules of communication ------------------------------------------------------------------------- */

/* Sets *r to a rule that one operand must fit. */
static void mti_ruling_of(mti_ruling *r, const mti_checker *c, const char *where, const mt_rule *rule,
                          const mt_operand *operand) {
    r->checker = c;
    r->where = where;
    r->rule = rule;
    r->with = NULL;
    r->over_all = 0;
    r->count = 1;
    r->operands[0].operand = operand;
    r->operands[0].known = mti_known_of(c, operand->t);
}

/* Notes what y is after communication from x. */
static mt_status mti_move_note(mt_context *ctx, const mti_known *x_known, mt_tensor x, mt_tensor y,
                               const unsigned char *may, int zero, const char *where) {
    MT_TRY(mti_placement_note(ctx, y, may, zero, where, x_known->with));
    if (x_known->some_columns && x.cols == y.cols) mti_columns_note(ctx->checker, y);
    return MT_SUCCESS;
}

/* In a group of one, y is a copy of x. */
static mt_status mti_moved(mt_context *ctx, const char *where, mt_tensor x, mt_tensor y) {
    mti_known k = mti_known_of(ctx->checker, x);
    if (!mti_has_elements(y) || y.data == x.data) return MT_SUCCESS;
    return k.unwritten ? mti_forget_view(ctx, y) : mti_move_note(ctx, &k, x, y, k.may, k.zero, where);
}

/* Tells the listener of communication from x, the operand of the ruling, to y, which may be x or have no elements. */
static void mti_tell_move(mt_context *ctx, const mti_ruling *r, mt_tensor y) {
    const mti_placed *p = r->operands[0].known.parameter;
    mt_operand told[2];
    int in_place;
    told[0] = *r->operands[0].operand;
    told[1].name = strcmp(told[0].name, "sendbuf") == 0 ? "recvbuf" : "y";
    told[1].t = y;
    told[1].use = 2;
    in_place = y.data == told[0].t.data && y.rows == told[0].t.rows && y.cols == told[0].t.cols;
    if (in_place) told[0].use = 3;
    mti_tell(ctx, r->where, p ? p->name : NULL, told, in_place || !mti_has_elements(y) ? 1 : 2);
}

/* Refuses a sum over a group over which nothing is known about x, when x is a sum over groups of other ranks. */
static mt_status mti_sum_check(mt_context *ctx, const mti_ruling *r, int g) {
    const mti_known *k = &r->operands[0].known;
    char hint[400];
    int64_t ranks = 1;
    int other;
    if (k->zero || k->may[g] != MTI_ALL_PLACEMENTS) return MT_SUCCESS;
    for (other = 0; other < ctx->checker->count; other++)
        if (k->may[other] == 1 << MT_PARTIAL) ranks *= ctx->checker->axes[other].size;
    mti_group_hint(r, g, 1 << MT_PARTIAL, hint, sizeof hint);
    if (!hint[0] || (!ctx->checker->axes[g].is_named && ranks == ctx->checker->axes[g].size)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s over \"%s\" of %s%s", r->where, ctx->checker->axes[g].name,
                   r->operands[0].operand->name, hint);
}

/* Checks that one of the cases fits x on a group. y then becomes `becomes` there, and what x is on the other groups. */
static mt_status mti_move_check(mt_context *ctx, const mt_comm *comm, const char *where, const char *cases,
                                char becomes, const char *x_name, mt_tensor x, mt_tensor y) {
    mt_rule rule = {"x", cases, NULL};
    unsigned char results[MTI_RULE_OPERANDS], may[MTI_AXES];
    mt_operand operand;
    mti_known read;
    mti_ruling r;
    int g;
    if (!mt_check_mode(ctx) || !mti_has_elements(x)) return MT_SUCCESS;
    g = mti_axis_of(ctx->checker, comm, 1);
    if (g < 0) return mti_moved(ctx, where, x, y);
    operand.name = x_name;
    operand.t = x;
    operand.use = 1;
    mti_ruling_of(&r, ctx->checker, where, &rule, &operand);
    MT_TRY(mti_slots_check(ctx, &r));
    MT_TRY(mti_slot_check(ctx, where, NULL, "y", y));
    MT_TRY(mti_written_check(ctx, &r));
    if (strcmp(cases, "P") == 0) MT_TRY(mti_sum_check(ctx, &r, g));
    MT_TRY(mti_rule_axis(ctx, &r, g, results));
    read = r.operands[0].known;
    if (mti_has_elements(y) && y.rows > x.rows && mti_extents_meet(mti_extent_of(x), mti_extent_of(y)))
        read.may[g] = MTI_ALL_PLACEMENTS; /* a gather in place: each rank reads its own part of what is replicated */
    MT_TRY(mti_replica_read(ctx, where, NULL, &operand, &read));
    memcpy(may, r.operands[0].known.may, sizeof may);
    may[g] = (unsigned char)mti_letter_set(becomes);
    if (mti_has_elements(y)) MT_TRY(mti_move_note(ctx, &r.operands[0].known, x, y, may, 0, where));
    mti_tell_move(ctx, &r, y);
    return MT_SUCCESS;
}

/* The rules of the conjugates: what x is on the group, and what y, or x in place, becomes. */
static mt_status mti_region_check(mt_context *ctx, const mt_comm *comm, const char *where, char is, char becomes,
                                  const char *x_name, mt_tensor x, mt_tensor y) {
    char cases[2];
    cases[0] = is;
    cases[1] = 0;
    return mti_move_check(ctx, comm, where, cases, becomes, x_name, x, y);
}

/* Whether something is known about x on a group. */
static int mti_is_known(mt_context *ctx, const mt_comm *comm, mt_tensor x) {
    int g = mti_axis_of(ctx->checker, comm, 0);
    mti_known k;
    if (g < 0 || ctx->checker->axes[g].only_group) return 0;
    k = mti_known_of(ctx->checker, x);
    return !k.zero && k.may[g] != MTI_ALL_PLACEMENTS;
}

/* Whether x is split over a group. */
static int mti_is_split(mt_context *ctx, const mt_comm *comm, mt_tensor x) {
    int g = mti_axis_of(ctx->checker, comm, 0);
    return g >= 0 && !(mti_known_of(ctx->checker, x).may[g] & ~MTI_SPLIT_PLACEMENTS);
}

/* Returns the memory of a collective as a tensor with the columns of what was written there, or with one row. */
static mt_tensor mti_shaped(const mti_checker *c, const void *data, mt_dtype dtype, int64_t count) {
    mt_tensor t = mt_tensor_make(data, dtype, 1, count);
    mti_extent e = mti_extent_of(t);
    uintptr_t size = (uintptr_t)mt_dtype_size(dtype);
    const mti_placed *p = mti_parameter_at(c, e);
    if (!p) p = mti_placed_older(&c->written, e, UINT64_MAX);
    if (!p || !mti_extent_is_dense(p->at) || !mti_extent_covers(p->at, e)) return t;
    if (e.width % p->at.width || (e.begin - p->at.begin) % p->at.width || p->at.width % size) return t;
    return mt_tensor_make(data, dtype, (int64_t)(e.width / p->at.width), (int64_t)(p->at.width / size));
}

/* What a rank sends over a group that is not followed. A partial sum must not travel: the receiver would take it for
   the sum. Gradients that the data ranks have not summed yet may. */
static const mt_rule mti_sent_rule = {"sendbuf", "R r c", "P"};

static mt_status mti_sent_check(mt_context *ctx, const mti_ruling *r) {
    unsigned char results[MTI_RULE_OPERANDS];
    int g;
    MT_TRY(mti_written_check(ctx, r));
    for (g = 0; g < ctx->checker->count; g++) MT_TRY(mti_rule_axis(ctx, r, g, results));
    return MT_SUCCESS;
}

/* Notes what y, or x in place, is at the root of a broadcast over a group that is not followed: what x is, or
   replicated if the ranks that receive it are ranks of a followed group, too. */
static mt_status mti_root_note(mt_context *ctx, const mti_known *known, mt_tensor x, mt_tensor y) {
    unsigned char may[MTI_AXES];
    int g;
    for (g = 0; g < MTI_AXES; g++) may[g] = (unsigned char)(known->may[g] | 1 << MT_REPLICATED);
    return mti_move_note(ctx, known, x, y, may, known->zero, "mt_broadcast");
}

/* A broadcast in a group of several ranks. All of them then have the values of the root, which must not be a part of a
   sum. Over a group that check mode has not met before, such as the pipeline group, only the root knows what they
   are. */
static mt_status mti_broadcast_check(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    static const mt_rule rule = {"sendbuf", "R r c", NULL};
    unsigned char results[MTI_RULE_OPERANDS], may[MTI_AXES];
    int g = mti_axis_of(ctx->checker, comm, 0), is_root = comm->rank == call->root;
    mt_operand operand;
    mt_tensor x;
    mti_ruling r;
    operand.name = is_root ? "sendbuf" : "recvbuf";
    operand.t = x = mti_shaped(ctx->checker, is_root ? call->send : call->recv, call->dtype, (int64_t)call->count);
    operand.use = is_root ? 1 : 2;
    mti_ruling_of(&r, ctx->checker, "mt_broadcast", &mti_sent_rule, &operand);
    MT_TRY(mti_slots_check(ctx, &r));
    if (is_root) MT_TRY(mti_sent_check(ctx, &r));
    r.rule = &rule;
    if (is_root && g >= 0) MT_TRY(mti_rule_axis(ctx, &r, g, results));
    operand.t.data = call->recv;
    if (g < 0 && !is_root) return mti_forget_view(ctx, operand.t);
    if (!mti_parameter_at(ctx->checker, mti_extent_of(operand.t)))
        mti_forget_parameters(ctx->checker, mti_extent_of(operand.t));
    if (g < 0) return mti_root_note(ctx, &r.operands[0].known, x, operand.t);
    if (is_root) memcpy(may, r.operands[0].known.may, sizeof may);
    else memset(may, MTI_ALL_PLACEMENTS, sizeof may); /* the root alone knows about the other groups */
    may[g] = 1 << MT_REPLICATED;
    MT_TRY(mti_placement_note(ctx, operand.t, may, 0, "mt_broadcast", is_root ? r.operands[0].known.with : NULL));
    operand.name = "recvbuf";
    operand.use = 2;
    mti_tell(ctx, "mt_broadcast", NULL, &operand, 1);
    return MT_SUCCESS;
}

/* Refuses a collective from memory of the arena that nothing has written, also over a group that check mode does not
   know. */
static mt_status mti_sendbuf_written(mt_context *ctx, const char *where, mt_tensor x) {
    static const mt_rule rule = {"sendbuf", "*", NULL};
    mt_operand operand;
    mti_ruling r;
    operand.name = "sendbuf";
    operand.t = x;
    operand.use = 1;
    mti_ruling_of(&r, ctx->checker, where, &rule, &operand);
    MT_TRY(mti_slots_check(ctx, &r));
    return mti_written_check(ctx, &r);
}

/* Notes what a collective of memory that is not known makes of y. Over a group of mt_check_group, all ranks have the
   same then, if each gets the whole. Over others, the program may write y and pass it to the collective again. */
static mt_status mti_collective_unknown(mt_context *ctx, const mt_comm *comm, int kind, const char *where,
                                        mt_tensor y) {
    int g = mti_axis_of(ctx->checker, comm, 0);
    unsigned char may[MTI_AXES];
    MT_TRY(mti_forget_view(ctx, y));
    if (g < 0 || !ctx->checker->axes[g].only_group || kind == MT_REDUCE_SCATTER) return MT_SUCCESS;
    memset(may, MTI_ALL_PLACEMENTS, sizeof may);
    may[g] = 1 << MT_REPLICATED;
    return mti_placement_note(ctx, y, may, 0, where, NULL);
}

/* The sum over the world of a term of a sum: it must be one over each group, because all of them are added up. */
static mt_status mti_world_sum(mt_context *ctx, const mti_ruling *r, mt_tensor y) {
    unsigned char results[MTI_RULE_OPERANDS], may[MTI_AXES];
    int g;
    for (g = 0; g < ctx->checker->count; g++)
        if (!ctx->checker->axes[g].only_group) MT_TRY(mti_rule_axis(ctx, r, g, results));
    memset(may, 1 << MT_REPLICATED, sizeof may);
    MT_TRY(mti_move_note(ctx, &r->operands[0].known, r->operands[0].operand->t, y, may, 0, r->where));
    mti_tell_move(ctx, r, y);
    return MT_SUCCESS;
}

/* Whether a communicator is the world, and x is a term of a sum over one of the groups that the world consists of. Of
   numbers, such as losses, programs also sum what some ranks have, and divide by their number. */
static int mti_is_term_of_world(const mt_context *ctx, const mt_comm *comm, mt_tensor x, const mti_known *k) {
    const mti_checker *c = ctx->checker;
    int64_t ranks = 1;
    int g, term = 0;
    if (comm != ctx->world || x.rows == 1 || k->zero) return 0;
    for (g = 0; g < c->count; g++) {
        if (mti_axis_is(&c->axes[g], comm)) return 0;
        if (!c->axes[g].only_group) ranks *= c->axes[g].size;
        term |= k->may[g] == 1 << MT_PARTIAL;
    }
    return term && ranks == comm->size;
}

/* An all-reduce over a communicator that is none of the known groups. */
static mt_status mti_sum_of_others(mt_context *ctx, const mt_comm *comm, const mti_call *call, mt_tensor x,
                                   mt_tensor y) {
    static const mt_rule terms = {"sendbuf", "P", NULL};
    mti_placed *p;
    mt_operand operand;
    mti_ruling r;
    operand.name = "sendbuf";
    operand.t = x;
    operand.use = 1;
    mti_ruling_of(&r, ctx->checker, "mt_all_reduce", &terms, &operand);
    r.over_all = 1;
    if (mti_is_term_of_world(ctx, comm, x, &r.operands[0].known)) return mti_world_sum(ctx, &r, y);
    MT_TRY(mti_collective_unknown(ctx, comm, call->kind, "mt_all_reduce", y));
    p = mti_parameter_at(ctx->checker, mti_extent_of(y));
    if (p && p->is_gradient) snprintf(p->summed_over, sizeof p->summed_over, "%s", comm->name);
    return MT_SUCCESS;
}

/* A collective of the caller's own. What it makes of memory that is not declared is not known. Data ranks may sum
   losses of other tokens, one by one. */
static mt_status mti_collective_check(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    static const char *const names[] = {"mt_all_reduce", "mt_all_gather", "mt_reduce_scatter", "mt_broadcast"};
    const char *parts = strcmp(comm->name, "data") == 0 ? "P r c" : "P";
    int is_float = mt_dtype_is_float(call->dtype), sums = call->op == MT_SUM && is_float;
    mt_tensor x, y;
    if (!mt_check_mode(ctx) || call->count == 0 || call->kind == MT_BARRIER) return MT_SUCCESS;
    if (call->kind == MT_BROADCAST && comm->size > 1) return mti_broadcast_check(ctx, comm, call);
    x = mti_shaped(ctx->checker, call->send, call->dtype,
                   (int64_t)call->count * (call->kind == MT_REDUCE_SCATTER ? comm->size : 1));
    y = mt_tensor_make(call->recv, call->dtype, x.rows, x.cols);
    MT_TRY(mti_sendbuf_written(ctx, names[call->kind], x));
    if (comm->size == 1) return mti_moved(ctx, names[call->kind], x, y);
    if (call->kind == MT_ALL_GATHER) y.rows *= comm->size;
    if (call->kind == MT_REDUCE_SCATTER && x.rows % comm->size == 0) y.rows /= comm->size;
    else if (call->kind == MT_REDUCE_SCATTER) y = mt_tensor_make(call->recv, call->dtype, 1, (int64_t)call->count);
    if (mti_is_known(ctx, comm, x)) {
        if (call->kind == MT_ALL_REDUCE && sums)
            return mti_move_check(ctx, comm, "mt_all_reduce", parts, 'R', "sendbuf", x, y);
        if (call->kind == MT_ALL_REDUCE && is_float) /* a maximum of terms is not the maximum of their sums */
            return mti_move_check(ctx, comm, "mt_all_reduce", "R r c", 'R', "sendbuf", x, y);
        if (call->kind == MT_REDUCE_SCATTER && sums)
            return mti_move_check(ctx, comm, "mt_reduce_scatter", parts, 'r', "sendbuf", x, y);
        /* A gather in place leaves what is replicated as it is: the parameters of a sharded optimizer, for instance.
           Candidates of a vocabulary are floats and ids, gathered as MT_I32. */
        if (call->kind == MT_ALL_GATHER && (is_float || mti_is_split(ctx, comm, x)))
            return mti_move_check(ctx, comm, "mt_all_gather",
                                  mti_extents_meet(mti_extent_of(x), mti_extent_of(y)) ? "r c R" : "r c", 'R',
                                  "sendbuf", x, y);
    }
    if (call->kind == MT_ALL_REDUCE && sums) return mti_sum_of_others(ctx, comm, call, x, y);
    return mti_collective_unknown(ctx, comm, call->kind, names[call->kind], y);
}

static mt_status mti_send_check(mt_context *ctx, const mti_call *call) {
    mt_operand operand;
    mti_ruling r;
    operand.name = "sendbuf";
    operand.t = mt_tensor_make(call->send, call->dtype, 1, (int64_t)call->count);
    operand.use = 1;
    if (!mti_has_elements(operand.t)) return MT_SUCCESS;
    mti_ruling_of(&r, ctx->checker, "mt_send", &mti_sent_rule, &operand);
    MT_TRY(mti_sent_check(ctx, &r));
    return mti_replica_read(ctx, "mt_send", NULL, &operand, &r.operands[0].known);
}

/* A send, a receive, or both. */
static mt_status mti_p2p_check(mt_context *ctx, const mti_call *call) {
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    MT_TRY(mti_send_check(ctx, call));
    return mti_forget_view(ctx, mt_tensor_make(call->recv, call->dtype, 1, (int64_t)call->recvcount));
}

/* ---- >>collectives ----------------------------------------------------------------------------------------------- */

MT_API const char *mt_collective_name(mt_collective kind) {
    switch (kind) {
    case MT_ALL_REDUCE: return "all_reduce";
    case MT_ALL_GATHER: return "all_gather";
    case MT_REDUCE_SCATTER: return "reduce_scatter";
    case MT_BROADCAST: return "broadcast";
    case MT_SEND: return "send";
    case MT_RECV: return "recv";
    case MT_BARRIER: return "barrier";
    case MT_COLLECTIVE_COUNT: break;
    }
    return "no such collective";
}

MT_API mt_ledger mt_comm_ledger(const mt_comm *comm) {
    mt_ledger none;
    memset(&none, 0, sizeof none);
    return comm ? comm->ledger : none;
}

MT_API void mt_comm_ledger_reset(mt_comm *comm) {
    if (comm) memset(&comm->ledger, 0, sizeof comm->ledger);
}

static void mti_record(mt_comm *comm, mt_collective kind, size_t bytes) {
    comm->ledger.calls[kind]++;
    comm->ledger.bytes[kind] += bytes;
}

/* -- argument checks -- */

static int mti_reduces(const mti_call *call) { return call->kind == MT_ALL_REDUCE || call->kind == MT_REDUCE_SCATTER; }

static int mti_is_p2p(const mti_call *call) {
    return call->kind == MT_SEND || call->kind == MT_RECV || call->kind == MTI_SEND_RECV;
}

/* Number of elements from the start of the first rank's block to the end of the last rank's block. */
static size_t mti_all_blocks(const mt_comm *comm, const mti_call *call) {
    return call->stride * (size_t)(comm->size - 1) + call->count;
}

/* mti_send_elements and mti_recv_elements return the number of elements of this rank's send and receive buffers. */
static size_t mti_send_elements(const mt_comm *comm, const mti_call *call) {
    if (call->kind == MT_BARRIER || call->kind == MT_RECV) return 0;
    if (call->kind == MT_BROADCAST && call->root != comm->rank) return 0;
    if (mti_is_p2p(call) && call->root < 0) return 0;
    return call->kind == MT_REDUCE_SCATTER ? mti_all_blocks(comm, call) : call->count;
}

static size_t mti_recv_elements(const mt_comm *comm, const mti_call *call) {
    if (call->kind == MT_BARRIER || call->kind == MT_SEND) return 0;
    if (mti_is_p2p(call)) return call->source < 0 ? 0 : call->recvcount;
    return call->kind == MT_ALL_GATHER ? mti_all_blocks(comm, call) : call->count;
}

#define MTI_DTYPES "MT_F32, MT_BF16, MT_F16, MT_I32 or MT_U8"

static mt_status mti_check_dtype(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    const char *name = mti_call_name(call->kind);
    if (call->kind == MT_BARRIER) return MT_SUCCESS;
    if (mt_dtype_size(call->dtype) == 0)
        return mti_refuse(ctx, comm, MT_ERR_DTYPE, "mt_%s: dtype is %d, must be " MTI_DTYPES, name, (int)call->dtype);
    if (!mti_reduces(call)) return MT_SUCCESS;
    if (call->dtype == MT_U8)
        return mti_refuse(ctx, comm, MT_ERR_DTYPE, "mt_%s: u8 moves but does not reduce; use f32 or i32", name);
    if (call->op != MT_SUM && call->op != MT_MAX)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: op is %d, must be MT_SUM or MT_MAX", name, (int)call->op);
    return MT_SUCCESS;
}

/* Refuses a peer outside the group. In point to point, this rank itself is a valid peer only when dst == src and the
   counts are equal. what: the name of the argument, for the message */
static mt_status mti_check_peer(mt_context *ctx, mt_comm *comm, const mti_call *call, const char *what, int peer) {
    const char *name = mti_call_name(call->kind);
    int lowest = call->kind == MTI_SEND_RECV ? -1 : 0;
    if (peer < lowest || peer >= comm->size)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: %s is %d, must be from %d to %d on \"%s\"", name, what,
                          peer, lowest, comm->size - 1, comm->name);
    if (peer == comm->rank && mti_is_p2p(call) && (call->root != call->source || call->count != call->recvcount))
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT,
                          "mt_%s: %s is %d, this rank itself; only mt_send_recv with dst == src and equal counts "
                          "(here %zu and %zu) may do that",
                          name, what, peer, call->count, call->recvcount);
    return MT_SUCCESS;
}

static mt_status mti_check_peers(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (call->kind == MT_BROADCAST) return mti_check_peer(ctx, comm, call, "root", call->root);
    if (call->kind == MT_SEND || call->kind == MTI_SEND_RECV)
        MT_TRY(mti_check_peer(ctx, comm, call, "dst", call->root));
    if (call->kind == MT_RECV || call->kind == MTI_SEND_RECV)
        MT_TRY(mti_check_peer(ctx, comm, call, "src", call->source));
    return MT_SUCCESS;
}

static mt_status mti_check_count(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t limit = SIZE_MAX / 2 / sizeof(double) / (size_t)comm->size;
    size_t count = call->count > call->recvcount ? call->count : call->recvcount;
    if (count <= limit) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: count is %zu, more than %d ranks can hold (%zu)",
                      mti_call_name(call->kind), count, comm->size, limit);
}

static mt_status mti_check_buffer(mt_context *ctx, mt_comm *comm, const mti_call *call, const char *what,
                                  const void *ptr, size_t elements) {
    const char *name = mti_call_name(call->kind);
    if (elements == 0) return MT_SUCCESS;
    if (!ptr && ctx->device != MT_DEVICE_META)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: %s is NULL, count is %zu", name, what, elements);
    if (mt_context_has_address(ctx, ptr) && (uintptr_t)ptr % mt_dtype_size(call->dtype))
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: %s %p is not aligned to its %zu-byte elements", name,
                          what, ptr, mt_dtype_size(call->dtype));
    return MT_SUCCESS;
}

/* Refuses buffers that overlap in another way than NCCL's in-place rule (see "collectives" in the API). */
static mt_status mti_check_overlap(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype), block = call->stride * element * (size_t)comm->rank;
    uintptr_t send = (uintptr_t)call->send, recv = (uintptr_t)call->recv;
    size_t sent = mti_send_elements(comm, call) * element, received = mti_recv_elements(comm, call) * element;
    int self = call->kind == MTI_SEND_RECV && call->root == comm->rank;
    if (sent == 0 || received == 0 || send >= recv + received || recv >= send + sent) return MT_SUCCESS;
    if (send == recv && (call->kind == MT_ALL_REDUCE || call->kind == MT_BROADCAST || self)) return MT_SUCCESS;
    if (call->kind == MT_ALL_GATHER && send == recv + block) return MT_SUCCESS;
    if (call->kind == MT_REDUCE_SCATTER && recv == send + block) return MT_SUCCESS;
    return mti_refuse(
        ctx, comm, MT_ERR_ARGUMENT,
        "mt_%s: sendbuf %p (%zu bytes) and recvbuf %p (%zu bytes) overlap, but not as in an in-place call",
        mti_call_name(call->kind), call->send, sent, call->recv, received);
}

static mt_status mti_no_check(mt_context *ctx, mt_comm *comm, const char *name) {
    return (void)ctx, (void)comm, (void)name, MT_SUCCESS;
}

static mt_status mti_meta_check(mt_context *ctx, mt_comm *comm, const char *name) {
    if (ctx->device == MT_DEVICE_META) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_ARGUMENT,
                      "mt_%s: \"%s\" (%d ranks) is a meta communicator, the context is on device %d, not on "
                      "MT_DEVICE_META",
                      name, comm->name, comm->size, (int)ctx->device);
}

static mt_status mti_peers_check(mt_context *ctx, mt_comm *comm, const char *name) {
    if (ctx->device != MT_DEVICE_META) return MT_SUCCESS;
    return mti_refuse(
        ctx, comm, MT_ERR_ARGUMENT,
        "mt_%s: the context is on MT_DEVICE_META, which \"%s\" (%d ranks) does not work with: use threads "
        "(mt_launch) or mt_comm_create_meta",
        name, comm->name, comm->size);
}

static mt_status mti_apart_check(mt_context *ctx, mt_comm *comm, const char *name) {
    MT_TRY(mti_peers_check(ctx, comm, name));
    return mti_refuse_apart(ctx, comm, name, (int)ctx->device);
}

static mt_status mti_check_home(mt_context *ctx, mt_comm *comm, const char *name) {
    if (!comm) return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: comm is NULL", name);
    if (!ctx) return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: ctx is NULL", name);
    MT_TRY(mti_check_process(ctx, comm, name));
    return (comm->transport->check)(ctx, comm, name);
}

static mt_status mti_check_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    MT_TRY(mti_check_home(ctx, comm, mti_call_name(call->kind)));
    MT_TRY(mti_check_dtype(ctx, comm, call));
    MT_TRY(mti_check_peers(ctx, comm, call));
    MT_TRY(mti_check_count(ctx, comm, call));
    MT_TRY(mti_check_buffer(ctx, comm, call, "sendbuf", call->send, mti_send_elements(comm, call)));
    MT_TRY(mti_check_buffer(ctx, comm, call, "recvbuf", call->recv, mti_recv_elements(comm, call)));
    if (ctx->device == MT_DEVICE_META) return MT_SUCCESS; /* addresses of the caller mean nothing */
    return mti_check_overlap(ctx, comm, call);
}

/* -- reductions -- */

/* out0 = out1 = left (op) right, element by element. Any of the four pointers may be equal. The inner loop has a
   constant number of rounds, because gcc vectorizes only such loops without -O3. */
#define MTI_ROUNDS 256

#define MTI_DEFINE_COMBINE(name, type, result)                                                                         \
    static void name(void *out0, void *out1, const void *left, const void *right, size_t n) {                          \
        type *o0 = (type *)out0, *o1 = (type *)out1;                                                                   \
        const type *l = (const type *)left, *r = (const type *)right;                                                  \
        size_t i, j;                                                                                                   \
        for (i = 0; i + MTI_ROUNDS <= n; i += MTI_ROUNDS) {                                                            \
            MT_INDEPENDENT                                                                                             \
            for (j = 0; j < MTI_ROUNDS; j++) {                                                                         \
                type a = l[i + j], b = r[i + j];                                                                       \
                o0[i + j] = o1[i + j] = (result);                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (; i < n; i++) {                                                                                           \
            type a = l[i], b = r[i];                                                                                   \
            o0[i] = o1[i] = (result);                                                                                  \
        }                                                                                                              \
    }

MTI_DEFINE_COMBINE(mti_sum_f32, float, a + b)
MTI_DEFINE_COMBINE(mti_max_f32, float, a > b || a != a ? a : b) /* NaN when any rank has a NaN */
MTI_DEFINE_COMBINE(mti_sum_i32, uint32_t, a + b)                /* wraps around */
MTI_DEFINE_COMBINE(mti_max_i32, int32_t, a > b ? a : b)
#if defined(__clang__)
#pragma clang diagnostic pop
#endif
#if MT_PREFER_512
#pragma GCC pop_options
#endif

typedef void (*mti_combine)(void *out0, void *out1, const void *left, const void *right, size_t n);

static mti_combine mti_combine_for(mt_dtype dtype, mt_op op) {
    if (dtype == MT_I32) return op == MT_SUM ? mti_sum_i32 : mti_max_i32;
    return op == MT_SUM ? mti_sum_f32 : mti_max_f32;
}

#define MTI_LINE ((size_t)64)  /* bytes of a cache line */
#define MTI_TILE ((size_t)512) /* elements; the scratch memory of a tree (22 KiB) fits into the L1 cache */
#define MTI_TREE_DEPTH 11      /* for 1024 ranks */

/* The reduction of one tile over all ranks. bf16 and f16 are reduced as floats, and rounded once, at the end. */
typedef struct mti_tree {
    const mti_group *group;
    mti_combine combine;
    mt_dtype dtype;
    size_t first, n; /* the tile, in elements from the start of the send buffers */
    float scratch[MTI_TREE_DEPTH][MTI_TILE];
} mti_tree;

/* Returns the largest power of two below `ranks`, or 1: the number of ranks in the left subtree. */
static int mti_left_half(int ranks) {
    int half = 1;
    while (half * 2 < ranks) half *= 2;
    return half;
}

/* Returns a rank's tile: a pointer into the rank's send buffer, or, for a 16-bit type, the tile as floats in `out`. */
static const void *mti_tree_leaf(const mti_tree *t, int rank, void *out) {
    const char *tile = (const char *)mti_slot_of(t->group, rank)->send + t->first * mt_dtype_size(t->dtype);
    if (!mt_dtype_is_16bit(t->dtype)) return tile;
    mt_f32_from_16bit(t->dtype, (const uint16_t *)(const void *)tile, (float *)out, (int64_t)t->n);
    return out;
}

/* Reduces the tile over ranks [rank, rank + ranks), and returns the result: `out`, or for one rank mti_tree_leaf. */
static const void *mti_tree_reduce(mti_tree *t, int rank, int ranks, void *out, int depth) {
    int half = mti_left_half(ranks);
    const void *left, *right;
    if (ranks == 1) return mti_tree_leaf(t, rank, out);
    left = mti_tree_reduce(t, rank, half, out, depth + 1);
    right = mti_tree_reduce(t, rank + half, ranks - half, t->scratch[depth], depth + 1);
    t->combine(out, out, left, right, t->n);
    return out;
}

static void mti_copy(void *to, const void *from, size_t bytes) {
    if (bytes && to != from) memcpy(to, from, bytes);
}

/* The root of the tree: reduces the tile over all ranks, and writes the result to out0 and out1. */
static void mti_tree_root(mti_tree *t, int ranks, void *out0, void *out1) {
    int half = mti_left_half(ranks);
    const void *left = mti_tree_reduce(t, 0, half, t->scratch[0], 2);
    const void *right = mti_tree_reduce(t, half, ranks - half, t->scratch[1], 2);
    if (!mt_dtype_is_16bit(t->dtype)) {
        t->combine(out0, out1, left, right, t->n);
        return;
    }
    t->combine(t->scratch[0], t->scratch[0], left, right, t->n);
    mt_f32_to_16bit(t->dtype, t->scratch[0], (uint16_t *)out0, (int64_t)t->n);
    mti_copy(out1, out0, t->n * sizeof(uint16_t));
}

/* Reduces elements [first, first + n) of all ranks' send buffers. With to_all, the result goes to the same elements of
   all ranks' receive buffers, else to the start of this rank's receive buffer. */
static void mti_reduce_range(const mt_comm *comm, const mti_call *call, size_t first, size_t n, int to_all) {
    size_t element = mt_dtype_size(call->dtype), done;
    int writers = to_all ? comm->size : 1, d;
    mti_tree t;
    char *out0 = to_all ? (char *)mti_slot_of(comm->group, 0)->recv + first * element : (char *)call->recv;
    char *out1 = to_all ? (char *)mti_slot_of(comm->group, 1)->recv + first * element : out0;
    t.group = comm->group;
    t.combine = mti_combine_for(call->dtype, call->op);
    t.dtype = call->dtype;
    for (done = 0; done < n; done += t.n) {
        t.first = first + done;
        t.n = n - done < MTI_TILE ? n - done : MTI_TILE;
        mti_tree_root(&t, comm->size, out0 + done * element, out1 + done * element);
        for (d = 2; d < writers; d++)
            mti_copy((char *)mti_slot_of(comm->group, d)->recv + t.first * element, out0 + done * element,
                     t.n * element);
    }
}

#if MT_HAS_CUDA
#define MTI_CUDA_RANKS 64 /* the pointers of this many ranks fit into the arguments of a kernel */
#define MTI_CUDA_LEVELS 6 /* depth of a tree over MTI_CUDA_RANKS ranks */

typedef struct mti_cuda_buffers {
    const void *send[MTI_CUDA_RANKS];
    void *recv[MTI_CUDA_RANKS];
    int ranks, writers;
} mti_cuda_buffers;

extern "C++" {
static __device__ __forceinline__ float mti_from_element(float x) { return x; }
static __device__ __forceinline__ float mti_from_element(__nv_bfloat16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ float mti_from_element(__half x) { return __half2float(x); }
static __device__ __forceinline__ int32_t mti_from_element(int32_t x) { return x; }
static __device__ __forceinline__ uint32_t mti_from_element(uint32_t x) { return x; }
static __device__ __forceinline__ void mti_to_element(float *y, float x) { *y = x; }
static __device__ __forceinline__ void mti_to_element(__nv_bfloat16 *y, float x) { *y = __float2bfloat16_rn(x); }
static __device__ __forceinline__ void mti_to_element(__half *y, float x) { *y = __float2half_rn(x); }
static __device__ __forceinline__ void mti_to_element(int32_t *y, int32_t x) { *y = x; }
static __device__ __forceinline__ void mti_to_element(uint32_t *y, uint32_t x) { *y = x; }

/* N consecutive elements, loaded and stored at once. */
template <typename T, int N> struct __align__(N * sizeof(T)) mti_few { T x[N]; };

/* Reduces N elements over all ranks, in the tree of mti_tree_reduce. The levels work like a binary counter: level d
   holds the sum of 2^d ranks while bit d of r, the number of ranks added so far, is set. The loop over the levels is
   unrolled, so that they stay in registers. */
template <typename T, int N, typename Op>
static __device__ __forceinline__ mti_few<T, N> mti_cuda_tree(const mti_cuda_buffers &b, int64_t i, Op op) {
    typedef decltype(mti_from_element(T())) wide;
    wide level[MTI_CUDA_LEVELS][N], x[N] = {};
    mti_few<T, N> y;
    for (int r = 0; r < b.ranks; r++) {
        int last = r + 1 == b.ranks, carry = 1;
        y = *(const mti_few<T, N> *)((const T *)b.send[r] + i);
        for (int j = 0; j < N; j++) x[j] = mti_from_element(y.x[j]);
        MT_DEVICE_UNROLL
        for (int d = 0; d < MTI_CUDA_LEVELS; d++) {
            int full = r >> d & 1;
            MT_DEVICE_UNROLL
            for (int j = 0; j < N; j++) {
                if (full && (carry || last)) x[j] = op(level[d][j], x[j]);
                else if (carry && !last) level[d][j] = x[j];
            }
            carry = carry && full;
        }
    }
    for (int j = 0; j < N; j++) mti_to_element(&y.x[j], x[j]);
    return y;
}

struct mti_plus {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};

struct mti_larger { /* NaN when any rank has a NaN */
    template <typename T> __device__ T operator()(T a, T b) const { return a > b || a != a ? a : b; }
};

/* Reduces elements [0, n) of all send buffers in b, and writes them to elements [0, n) of the receive buffers in b.
   Instructions limit it, not memory. With 16-byte vectors on sm_90, a sum needs 27 for an element of a rank in bf16 and
   33 in f32. While memory moves the element, an H200 has time for 14 or 27 (6.8 for each byte). */
template <typename T, int N, typename Op>
static __global__ void __launch_bounds__(256) mti_cuda_reduce_kernel(mti_cuda_buffers b, int64_t n, Op op) {
    int64_t step = (int64_t)gridDim.x * blockDim.x * N;
    for (int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N; first < n; first += step) {
        if (first + N <= n) {
            mti_few<T, N> y = mti_cuda_tree<T, N>(b, first, op);
            for (int r = 0; r < b.writers; r++) *(mti_few<T, N> *)((T *)b.recv[r] + first) = y;
        } else {
            for (int64_t e = first; e < n; e++) {
                mti_few<T, 1> y = mti_cuda_tree<T, 1>(b, e, op);
                for (int r = 0; r < b.writers; r++) ((T *)b.recv[r])[e] = y.x[0];
            }
        }
    }
}

template <typename T, int N, typename Op>
static void mti_cuda_reduce_run(mt_context *ctx, const mti_cuda_buffers &b, int64_t n, Op op) {
    int64_t blocks = ((n + N - 1) / N + 255) / 256;
    unsigned grid = (unsigned)(blocks < 1024 ? blocks : 1024);
    MT_LAUNCH_KERNEL((mti_cuda_reduce_kernel<T, N, Op>), grid, 256, 0, ctx->stream, b, n, op);
}

/* Moves 16 bytes at a time when all buffers are aligned to 16 bytes, else single elements. */
template <typename T>
static void mti_cuda_reduce_launch(mt_context *ctx, const mti_cuda_buffers &b, int64_t n, mt_op op) {
    uintptr_t bits = 0;
    for (int r = 0; r < b.ranks; r++) bits |= (uintptr_t)b.send[r];
    for (int r = 0; r < b.writers; r++) bits |= (uintptr_t)b.recv[r];
    const int n16 = 16 / (int)sizeof(T);
    if (op == MT_SUM) {
        if (bits % 16) mti_cuda_reduce_run<T, 1>(ctx, b, n, mti_plus());
        else mti_cuda_reduce_run<T, n16>(ctx, b, n, mti_plus());
    } else {
        if (bits % 16) mti_cuda_reduce_run<T, 1>(ctx, b, n, mti_larger());
        else mti_cuda_reduce_run<T, n16>(ctx, b, n, mti_larger());
    }
}
} /* extern "C++" */

static mt_status mti_cuda_check_ranks(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    if (comm->size <= MTI_CUDA_RANKS) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                   "mt_%s: %d ranks on GPUs, at most %d are built to be added in a fixed order",
                   mti_call_name(call->kind), comm->size, MTI_CUDA_RANKS);
}

/* Reduces the first n elements of all send buffers in b. */
static mt_status mti_cuda_reduce_buffers(mt_context *ctx, const mti_cuda_buffers *b, size_t n, const mti_call *call) {
    if (n == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    if (call->dtype == MT_F32) mti_cuda_reduce_launch<float>(ctx, *b, (int64_t)n, call->op);
    else if (call->dtype == MT_BF16) mti_cuda_reduce_launch<__nv_bfloat16>(ctx, *b, (int64_t)n, call->op);
    else if (call->dtype == MT_F16) mti_cuda_reduce_launch<__half>(ctx, *b, (int64_t)n, call->op);
    else if (call->op == MT_SUM) mti_cuda_reduce_launch<uint32_t>(ctx, *b, (int64_t)n, call->op); /* wraps around */
    else mti_cuda_reduce_launch<int32_t>(ctx, *b, (int64_t)n, call->op);
    return mt_cuda_launched(ctx, "mti_cuda_reduce_kernel");
}

/* Enables kernels on this context's GPU to read and write the memory of GPU `ordinal`. */
static mt_status mti_cuda_reach(mt_context *ctx, int ordinal) {
    cudaError_t error;
    int can = 0;
    if (ordinal == ctx->ordinal || (ordinal < 64 && ctx->reached >> ordinal & 1)) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaDeviceCanAccessPeer(&can, ctx->ordinal, ordinal));
    if (!can)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                       "GPU %d does not reach the memory of GPU %d: ranks on them need NCCL "
                       "(MT_USE_NCCL and mt_comm_create_for)",
                       ctx->ordinal, ordinal);
    error = cudaDeviceEnablePeerAccess(ordinal, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) error = (cudaGetLastError(), cudaSuccess);
    MT_TRY(mti_cuda_check(ctx, error, "cudaDeviceEnablePeerAccess"));
    if (ordinal < 64) ctx->reached |= (uint64_t)1 << ordinal;
    return MT_SUCCESS;
}

/* As mti_reduce_range, on the GPU. */
static mt_status mti_cuda_reduce(mt_context *ctx, const mt_comm *comm, const mti_call *call, size_t first, size_t n,
                                 int to_all) {
    size_t at = first * mt_dtype_size(call->dtype);
    mti_cuda_buffers b;
    int r;
    MT_TRY(mti_cuda_check_ranks(ctx, comm, call));
    for (r = 0; r < comm->size; r++) MT_TRY(mti_cuda_reach(ctx, mti_slot_of(comm->group, r)->ordinal));
    b.ranks = comm->size;
    b.writers = to_all ? comm->size : 1;
    for (r = 0; r < comm->size; r++) b.send[r] = (const char *)mti_slot_of(comm->group, r)->send + at;
    for (r = 0; r < b.writers; r++)
        b.recv[r] = to_all ? (char *)mti_slot_of(comm->group, r)->recv + at : (char *)call->recv;
    return mti_cuda_reduce_buffers(ctx, &b, n, call);
}
#else
static mt_status mti_cuda_reduce(mt_context *ctx, const mt_comm *comm, const mti_call *call, size_t first, size_t n,
                                 int to_all) {
    return (void)ctx, (void)comm, (void)call, (void)first, (void)n, (void)to_all, MT_ERR_UNSUPPORTED;
}
#endif

/* -- moving the data between the two meetings -- */

static mt_status mti_reduce_on(mt_context *ctx, const mt_comm *comm, const mti_call *call, size_t first, size_t n,
                               int to_all) {
    if (ctx->device == MT_DEVICE_CUDA) return mti_cuda_reduce(ctx, comm, call, first, n, to_all);
    mti_reduce_range(comm, call, first, n, to_all);
    return MT_SUCCESS;
}

/* Rank r reduces segment r and writes the result to all ranks. No other rank reads or writes this segment, so the call
   also works in place. */
static mt_status mti_move_all_reduce(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    size_t ranks = (size_t)comm->size, rank = (size_t)comm->rank, line = MTI_LINE / mt_dtype_size(call->dtype), segment,
           first;
    segment = (call->count + ranks - 1) / ranks;
    segment = (segment + line - 1) / line * line; /* two ranks do not write to the same cache line */
    first = segment * rank;
    if (first >= call->count) return MT_SUCCESS;
    return mti_reduce_on(ctx, comm, call, first, call->count - first < segment ? call->count - first : segment, 1);
}

/* In place, rank r writes block r of its own send buffer, which no other rank reads. */
static mt_status mti_move_reduce_scatter(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    return mti_reduce_on(ctx, comm, call, call->stride * (size_t)comm->rank, call->count, 0);
}

/* Rank r starts with block r, so that not all ranks read the same buffer at once. In place, rank r writes all blocks of
   its buffer except block r, the only one that its peers read. */
static mt_status mti_move_all_gather(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    size_t bytes = call->count * mt_dtype_size(call->dtype);
    int i;
    for (i = 0; i < comm->size; i++) {
        int from = (comm->rank + i) % comm->size;
        char *to = (char *)call->recv + call->stride * mt_dtype_size(call->dtype) * (size_t)from;
        MT_TRY(mti_bytes_copy(ctx, to, mti_slot_of(comm->group, from)->send, bytes));
    }
    return MT_SUCCESS;
}

static mt_status mti_move_broadcast(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    return mti_bytes_copy(ctx, call->recv, mti_slot_of(comm->group, call->root)->send,
                          call->count * mt_dtype_size(call->dtype));
}

static mt_status mti_move(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    if (mti_has_no_data(ctx)) return MT_SUCCESS;
    switch (call->kind) {
    case MT_ALL_REDUCE: return mti_move_all_reduce(ctx, comm, call);
    case MT_ALL_GATHER: return mti_move_all_gather(ctx, comm, call);
    case MT_REDUCE_SCATTER: return mti_move_reduce_scatter(ctx, comm, call);
    case MT_BROADCAST: return mti_move_broadcast(ctx, comm, call);
    case MTI_GRAPH_LAUNCH: return comm->rank == 0 ? mti_cuda_graph_launch(ctx, call) : MT_SUCCESS;
    default: return MT_SUCCESS;
    }
}

/* A rank's part of a collective on a GPU. */
static mt_status mti_cuda_move(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    int r;
    for (r = 0; r < comm->size; r++)
        if (r != comm->rank) MT_TRY(mti_cuda_await(ctx, &mti_slot_of(comm->group, r)->ready));
    MT_TRY(mti_move(ctx, comm, call));
    return mti_cuda_record(ctx, &mti_slot_of(comm->group, comm->rank)->done);
}

/* After the second meeting of a collective on a GPU: later work comes after the parts of the peers. A rank that has
   failed (`status`) has set `failed` before this meeting, and has no event behind its part. The others return an
   error. */
static mt_status mti_cuda_moved(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    mt_status waits = MT_SUCCESS;
    int failed = 0, r;
    for (r = 0; r < comm->size; r++) {
        const mti_slot *slot = mti_slot_of(comm->group, r);
        failed |= slot->failed;
        if (r != comm->rank && !slot->failed) MT_KEEP(waits, mti_cuda_await(ctx, &slot->done));
    }
    if (status != MT_SUCCESS) return status;
    if (waits != MT_SUCCESS) return mti_break_failed(ctx, comm, call, waits);
    return failed ? mti_broken_now(ctx, comm) : MT_SUCCESS;
}

/* Each rank waits for its stream before the meeting. After it, the work of all ranks before the barrier is done. */
static mt_status mti_cuda_barrier(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mt_status status = mti_cuda_synchronize(ctx);
    if (status != MT_SUCCESS) return mti_break_failed(ctx, comm, call, status);
    MT_TRY(mti_enter(ctx, comm, call));
    mti_exit(comm);
    return MT_SUCCESS;
}

/* Between the two meetings a rank can fail only on a GPU. */
static mt_status mti_local_collective(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_slot *mine = mti_slot_of(comm->group, comm->rank);
    int on_gpu = ctx->device == MT_DEVICE_CUDA;
    mt_status status, turn;
    if (on_gpu && call->kind == MT_BARRIER) return mti_cuda_barrier(ctx, comm, call);
    status = mti_local_begin(ctx, comm);
    if (status != MT_SUCCESS) return mti_break_failed(ctx, comm, call, status);
    mine->ordinal = ctx->ordinal;
    MT_TRY(mti_enter(ctx, comm, call));
    status = on_gpu ? mti_cuda_move(ctx, comm, call) : mti_move(ctx, comm, call);
    mine->failed = status != MT_SUCCESS;
    if (status != MT_SUCCESS) mti_fail_inside(ctx, comm, call, status);
    mti_turn_give(ctx);
    mti_exit(comm);
    turn = mti_turn_take(ctx);
    if (turn != MT_SUCCESS) return mti_break_failed(ctx, comm, call, turn);
    return on_gpu ? mti_cuda_moved(ctx, comm, call, status) : status;
}

#if MTI_NCCL || MTI_MPI
/* A buffer of `whole` elements, divided into one piece per rank. Piece r begins at element stride * r and has n
   elements, or fewer at the end of the buffer. */
typedef struct mti_pieces {
    const char *from; /* the elements to reduce */
    char *to;         /* all results, at the same offsets; NULL: only this rank's result is needed */
    char *own;        /* this rank's result */
    size_t element, stride, n, whole;
} mti_pieces;

static size_t mti_piece_size(const mti_pieces *p, int rank) {
    size_t first = p->stride * (size_t)rank;
    if (first >= p->whole) return 0;
    return p->whole - first < p->n ? p->whole - first : p->n;
}

/* Describes the next chunk of a call, after `done` elements, in *p: every rank gets a piece of at most `most` elements.
   Returns how many of the call's `count` elements the chunk has. */
static size_t mti_pieces_next(const mt_comm *comm, const mti_call *call, size_t most, size_t done, mti_pieces *p) {
    size_t ranks = (size_t)comm->size, line = MTI_LINE / mt_dtype_size(call->dtype);
    int scatter = call->kind == MT_REDUCE_SCATTER;
    size_t chunk = scatter ? most : most * ranks;
    if (chunk > call->count - done) chunk = call->count - done;
    p->element = mt_dtype_size(call->dtype);
    p->n = scatter ? chunk : ((chunk + ranks - 1) / ranks + line - 1) / line * line;
    p->stride = scatter ? call->stride : p->n;
    p->whole = scatter ? call->stride * ranks : chunk;
    p->from = (const char *)call->send + done * p->element;
    p->to = scatter ? NULL : (char *)call->recv + done * p->element;
    p->own = scatter ? (char *)call->recv + done * p->element : p->to + p->stride * p->element * (size_t)comm->rank;
    return chunk;
}

/* Returns the size, in elements, of the largest pieces in whole cache lines of which one per rank fits into `bytes`. */
static size_t mti_pieces_most(const mt_comm *comm, const mti_call *call, size_t bytes) {
    size_t element = mt_dtype_size(call->dtype), line = MTI_LINE / element;
    return bytes / element / (size_t)comm->size / line * line;
}
#endif

/* -- one call -- */

static mt_status mti_alone_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    (void)comm;
    return mti_bytes_copy(ctx, call->recv, call->send, call->count * mt_dtype_size(call->dtype));
}

static mt_status mti_no_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    return (void)ctx, (void)comm, (void)call, MT_SUCCESS;
}

static mti_call mti_call_make(int kind, const void *send, void *recv, size_t count, mt_dtype dtype) {
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = kind;
    call.dtype = dtype;
    call.send = send;
    call.recv = recv;
    call.count = call.stride = count;
    return call;
}

/* -- the trace -- */

MT_API void mt_trace_free(mt_trace *trace) {
    if (!trace) return;
    mt_host_free(trace->entries);
    memset(trace, 0, sizeof *trace);
}

MT_API mt_status mt_context_take_trace(mt_context *ctx, mt_trace *out) {
    int lost;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_context_take_trace: out is NULL");
    lost = ctx->trace_lost;
    *out = ctx->trace;
    memset(&ctx->trace, 0, sizeof ctx->trace);
    ctx->trace_capacity = 0;
    ctx->trace_lost = 0;
    if (!lost) return MT_SUCCESS;
    mt_trace_free(out);
    return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_take_trace: there was no memory for an entry");
}

/* Doubles the capacity of the trace. Returns 0 when there is no memory. */
static int mti_trace_grow(mt_context *ctx) {
    size_t capacity = ctx->trace_capacity ? 2 * ctx->trace_capacity : 256;
    mt_trace_entry *entries = (mt_trace_entry *)mt_host_alloc(capacity * sizeof *entries);
    if (!entries) return 0;
    if (ctx->trace.count) memcpy(entries, ctx->trace.entries, ctx->trace.count * sizeof *entries);
    mt_host_free(ctx->trace.entries);
    ctx->trace.entries = entries;
    ctx->trace_capacity = capacity;
    return 1;
}

MT_API void mt_trace_add(mt_context *ctx, const mt_trace_entry *entry) {
    mt_trace_entry *added;
    if (!ctx || !entry || ctx->device != MT_DEVICE_META || ctx->trace_lost) return;
    if (ctx->trace.count == ctx->trace_capacity && !mti_trace_grow(ctx)) {
        ctx->trace_lost = 1;
        return;
    }
    added = &ctx->trace.entries[ctx->trace.count++];
    *added = *entry;
    added->recomputed = ctx->recomputes > 0;
}

MT_API void mt_trace_recompute(mt_context *ctx, int recomputes) {
    if (ctx) ctx->recomputes += recomputes ? 1 : -1;
}

static void mti_trace_call(mt_context *ctx, const mt_comm *comm, const mti_call *call, mt_collective kind,
                           size_t bytes) {
    mt_trace_entry e;
    if (!mti_has_no_data(ctx)) return;
    memset(&e, 0, sizeof e);
    e.work = MT_WORK_COMMUNICATION;
    e.name = mti_call_name(call->kind);
    e.dtype = call->dtype;
    e.bytes = (double)bytes;
    e.ranks = comm->size;
    e.span = comm->span;
    e.collective = kind;
    e.to = kind == MT_SEND || kind == MT_RECV ? call->root : -1;
    e.from = kind == MT_SEND || kind == MT_RECV ? call->source : -1;
    mt_trace_add(ctx, &e);
}

static void mti_trace_overlap(mt_context *ctx, mt_work work, const char *name, mt_stream stream, int ticket) {
    mt_trace_entry e;
    memset(&e, 0, sizeof e);
    e.work = work;
    e.name = name;
    e.stream = stream;
    e.ticket = ticket;
    mt_trace_add(ctx, &e);
}

/* -- the collectives -- */

/* Checks, runs and records a collective. Further chunks of a call add to its bytes, but not to the number of calls. */
static mt_status mti_do_collective(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t elements = call->count;
    MT_TRY(mti_check_call(ctx, comm, call));
    MT_TRY(mti_collective_check(ctx, comm, call));
    MT_TRY(mti_replicas_due(ctx, comm, mti_call_name(call->kind)));
    if (call->kind == MT_BARRIER) MT_TRY(mti_check_recording(ctx)); /* waits on GPUs */
    MT_TRY((comm->transport->collective)(ctx, comm, call));
    if (call->kind != MT_ALL_REDUCE || call->recv != call->send) {
        size_t blocks = call->kind == MT_ALL_GATHER ? (size_t)comm->size : 1;
        mti_tell_forgotten(ctx, call->recv, blocks * elements * mt_dtype_size(call->dtype), 0);
    }
    if (comm->size == 1) return MT_SUCCESS;
    if (call->kind == MT_ALL_GATHER || call->kind == MT_REDUCE_SCATTER) elements *= (size_t)comm->size;
    mti_record(comm, (mt_collective)call->kind, elements * mt_dtype_size(call->dtype));
    mti_trace_call(ctx, comm, call, (mt_collective)call->kind, elements * mt_dtype_size(call->dtype));
    comm->ledger.calls[call->kind] -= (uint64_t)call->goes_on;
    return MT_SUCCESS;
}

static mt_status mti_do_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype);
    MT_TRY(mti_check_call(ctx, comm, call));
    MT_TRY(mti_p2p_check(ctx, call));
    if (call->root == comm->rank) MT_TRY(mti_alone_call(ctx, comm, call)); /* send to itself */
    else MT_TRY((comm->transport->p2p)(ctx, comm, call));
    mti_tell_forgotten(ctx, call->recv, call->recvcount * element, 0);
    if (comm->size == 1) return MT_SUCCESS;
    if (call->root >= 0) mti_record(comm, MT_SEND, call->count * element);
    if (call->source >= 0) mti_record(comm, MT_RECV, call->recvcount * element);
    mti_trace_call(ctx, comm, call, call->root >= 0 ? MT_SEND : MT_RECV,
                   element * (call->count > call->recvcount ? call->count : call->recvcount));
    return MT_SUCCESS;
}

static mt_status mti_run_collective(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    int before = mti_hold();
    mt_status status = mti_do_collective(ctx, comm, call);
    mti_release(before);
    return status;
}

static mt_status mti_run_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    int before = mti_hold();
    mt_status status = mti_do_p2p(ctx, comm, call);
    mti_release(before);
    return status;
}

MT_API mt_status mt_all_reduce(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t count,
                               mt_dtype dtype, mt_op op) {
    mti_call call = mti_call_make(MT_ALL_REDUCE, sendbuf, recvbuf, count, dtype);
    call.op = op;
    return MT_RANGE("all_reduce", mti_run_collective(ctx, comm, &call));
}

MT_API mt_status mt_all_gather(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t sendcount,
                               mt_dtype dtype) {
    mti_call call = mti_call_make(MT_ALL_GATHER, sendbuf, recvbuf, sendcount, dtype);
    return MT_RANGE("all_gather", mti_run_collective(ctx, comm, &call));
}

MT_API mt_status mt_reduce_scatter(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t recvcount,
                                   mt_dtype dtype, mt_op op) {
    mti_call call = mti_call_make(MT_REDUCE_SCATTER, sendbuf, recvbuf, recvcount, dtype);
    call.op = op;
    return MT_RANGE("reduce_scatter", mti_run_collective(ctx, comm, &call));
}

MT_API mt_status mt_broadcast(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t count,
                              mt_dtype dtype, int root) {
    mti_call call = mti_call_make(MT_BROADCAST, sendbuf, recvbuf, count, dtype);
    call.root = root;
    return MT_RANGE("broadcast", mti_run_collective(ctx, comm, &call));
}

MT_API mt_status mt_barrier(mt_context *ctx, mt_comm *comm) {
    mti_call call = mti_call_make(MT_BARRIER, NULL, NULL, 0, MT_U8);
    return MT_RANGE("barrier", mti_run_collective(ctx, comm, &call));
}

MT_API mt_status mt_send(mt_context *ctx, mt_comm *comm, const void *sendbuf, size_t count, mt_dtype dtype, int dst) {
    mti_call call = mti_call_make(MT_SEND, sendbuf, NULL, count, dtype);
    call.root = dst;
    call.source = -1;
    return MT_RANGE("send", mti_run_p2p(ctx, comm, &call));
}

MT_API mt_status mt_recv(mt_context *ctx, mt_comm *comm, void *recvbuf, size_t count, mt_dtype dtype, int src) {
    mti_call call = mti_call_make(MT_RECV, NULL, recvbuf, count, dtype);
    call.recvcount = count;
    call.root = -1;
    call.source = src;
    return MT_RANGE("recv", mti_run_p2p(ctx, comm, &call));
}

MT_API mt_status mt_send_recv(mt_context *ctx, mt_comm *comm, const void *sendbuf, size_t sendcount, int dst,
                              void *recvbuf, size_t recvcount, int src, mt_dtype dtype) {
    mti_call call = mti_call_make(MTI_SEND_RECV, sendbuf, recvbuf, dst == -1 ? 0 : sendcount, dtype);
    call.recvcount = src == -1 ? 0 : recvcount;
    call.root = dst;
    call.source = src;
    return MT_RANGE("send_recv", mti_run_p2p(ctx, comm, &call));
}

/* ---- >>calls: ranks compare their calls over TCP ----------------------------------------------------------------- */

#if MTI_COMPARES
/* Starts a thread with all signals blocked: those of the program are for its own threads. */
static int mti_thread_start(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    int error;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* NCCL does not compare calls, so each communicator has a board. Every rank has a TCP connection to rank 0. A call
   appends a message to the queue of its rank and goes on. A thread of the context, the comparer, sends the messages to
   rank 0, whose comparer compares the n-th collectives of all ranks, and the n-th send from a rank to another one with
   the n-th receive. When calls differ, or when a rank has left before a call of the others, it sends the result to all
   ranks, with the calls of all. A rank finds the result in its next call and while it waits for the stream, and writes
   the sentence that threads write (>>local). A rank whose wait has lasted for the timeout asks who is missing.

   During the creation of a communicator every rank opens a listener, a listening socket, and an all_gather over NCCL
   tells the ranks its addresses. All fields of a board are guarded by the mutex of the comparer, except those of a
   result, which do not change after `decided` is set, and those of the end, which do not change after `ended` is set.

   What arrives over a connection is checked before it is used: a message that no rank sends ends the connection. All
   buffers have a limit. When there is no memory, or a rank is too far ahead, the comparison ends on all ranks, with a
   warning: calls that differ then time out or have undefined results, as with no_nccl_checks. */

#define MTI_BOARD_TICK 2       /* milliseconds: the comparer sends the messages of this time together */
#define MTI_BOARD_GRACE 1.0    /* seconds for messages that are on their way: of other ranks, or of one that is gone */
#define MTI_BOARD_ANSWER 0.5   /* seconds that a rank waits for the answer who is missing */
#define MTI_BOARD_OPENING 10.0 /* seconds in which all ranks must connect to rank 0 */
#define MTI_BOARD_AHEAD 262144 /* calls by which a rank may be ahead of another one, or of the network */
#define MTI_BOARD_PART 16384   /* bytes that are read from a connection before they are looked at */

typedef enum mti_message_kind {
    MTI_MESSAGE_HELLO, /* `what`: the listener's token */
    MTI_MESSAGE_OPEN,  /* all ranks are connected; `what`: the token */
    MTI_MESSAGE_CALL,
    MTI_MESSAGE_LATE,   /* the rank has waited for the timeout */
    MTI_MESSAGE_FAILED, /* text: a sentence */
    MTI_MESSAGE_LEFT,   /* text: why; of rank 0: `count` is the number of its collectives */
    MTI_MESSAGE_RESULT, /* `what`: mti_why; rank, and recvcount - 1: the ranks that it is about, or -1; text: the calls
                           of all ranks, and a sentence */
    MTI_MESSAGE_END /* the calls are no longer compared; rank: that has ended the comparison; `what`: mti_end_reason */
} mti_message_kind;

typedef struct mti_message {
    int32_t kind, rank;
    uint64_t what, count, recvcount; /* the call, as in mti_slot */
    uint64_t bytes;                  /* of the text behind the message */
} mti_message;

#define MTI_MESSAGE_TEXT ((size_t)MT_ERROR_BYTES + 128) /* most bytes of a sentence, with its NUL */

typedef enum mti_why { MTI_WHY_DIFFERS, MTI_WHY_UNLIKE, MTI_WHY_LATE, MTI_WHY_LEFT, MTI_WHY_FAILED } mti_why;

typedef enum mti_end_reason { MTI_END_MEMORY, MTI_END_AHEAD } mti_end_reason;

typedef struct mti_said {
    uint64_t what, count, recvcount, inside; /* as in mti_slot */
} mti_said;

/* The n-th collective as the first rank has called it. */
typedef struct mti_round {
    mti_said said;
    int ranks; /* number of ranks that have called their n-th collective */
} mti_round;

/* Bytes that leave in the order in which they came: those from `first` to `end` of data. */
typedef struct mti_bytes {
    char *data;
    size_t first, end, room;
} mti_bytes;

/* Between two ranks: the sends that have no receive yet, or the receives that have no send. Rank `from` keeps them. */
typedef struct mti_pair {
    struct mti_pair *next; /* the next one with the same `from` */
    int from, to, sends;
    mti_bytes waiting; /* mti_said */
} mti_pair;

typedef struct mti_line {
    int fd;   /* -1: closed */
    int lost; /* 1: the comparer closes it */
    mti_bytes in, out;
} mti_line;

typedef struct mti_board {
    struct mti_board *next; /* in the list of the comparer */
    struct mti_comparer *comparer;
    int rank, size;
    mti_bytes queue; /* messages of this rank that the comparer has not taken yet */
    mti_line *lines; /* rank 0: one to each rank, the first one unused; other ranks: only the first one, to rank 0 */
    int line_count;
    int decided; /* atomic; 1: there is a result */
    mti_message result;
    mti_bytes shown;              /* the text of the result */
    int ended;                    /* atomic; 1: the calls are no longer compared */
    mti_message end;              /* why */
    int end_is_sent, end_is_told; /* to the other ranks; to the program */
    /* per rank; only rank 0 knows those of the others */
    mti_said *last;     /* the last call */
    uint64_t *number;   /* number of collectives */
    mti_bytes *reasons; /* why the rank has left; empty: it has not left */
    double gone_at;     /* a rank is gone without a farewell since then; 0: none is */
    int gone, left_count;
    /* only at rank 0 */
    mti_round *rounds; /* a ring of `room` rounds, which has those from `first` on */
    size_t room;
    uint64_t first, last_round; /* last_round: behind the last one */
    mti_pair **pairs;           /* per rank: the list of those that it sends to */
    size_t waiting;             /* sends and receives in all pairs */
    uint64_t odd;               /* number of the collective that differs + 1; 0: none does */
    mti_said *odd_calls;        /* that call of each rank */
    double odd_at;
} mti_board;

/* Belongs to the boards of one context. */
typedef struct mti_comparer {
    pthread_mutex_t mutex;
    pthread_t thread;
    int users, ends;
    mti_board *boards;
    int changed; /* 1: a board has been added or removed while the thread was in poll */
    int sleeps;  /* 1: the thread is in poll until something happens */
    int bell[2]; /* a pipe that wakes the thread */
    struct pollfd *polled;
    int polled_room;
} mti_comparer;

static size_t mti_bytes_size(const mti_bytes *b) { return b->end - b->first; }
static const char *mti_bytes_front(const mti_bytes *b) { return b->data + b->first; }

/* Makes room for n bytes, and for the one message that mti_board_send_end appends. Returns 0 when there is no memory.
   Bytes move to the front only when at least as many have left, so that each of them moves a few times at most. */
static int mti_bytes_reserve(mti_bytes *b, size_t n) {
    size_t size = mti_bytes_size(b), room = 2 * (size + n) + 1024;
    char *data;
    if (b->room - b->end >= n + sizeof(mti_message)) return 1;
    if (b->first >= size && b->room - size >= n + sizeof(mti_message)) {
        if (size) memmove(b->data, b->data + b->first, size);
    } else {
        data = (char *)malloc(room);
        if (!data) return 0;
        if (size) memcpy(data, b->data + b->first, size);
        free(b->data);
        b->data = data;
        b->room = room;
    }
    b->first = 0;
    b->end = size;
    return 1;
}

static void mti_bytes_put(mti_bytes *b, const void *from, size_t n) {
    if (n) memcpy(b->data + b->end, from, n);
    b->end += n;
}

static int mti_bytes_add(mti_bytes *b, const void *from, size_t n) {
    if (!mti_bytes_reserve(b, n)) return 0;
    mti_bytes_put(b, from, n);
    return 1;
}

static void mti_bytes_drop(mti_bytes *b, size_t n) {
    b->first += n;
    if (b->first == b->end) b->first = b->end = 0;
}

static void mti_bytes_free(mti_bytes *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

/* Adds a message with a text, both or nothing. */
static int mti_message_add(mti_bytes *b, const mti_message *message, const char *text) {
    if (!mti_bytes_reserve(b, sizeof *message + (size_t)message->bytes)) return 0;
    mti_bytes_put(b, message, sizeof *message);
    mti_bytes_put(b, text, (size_t)message->bytes);
    return 1;
}

/* Whether a rank can have made this call, or (0) none. */
static int mti_said_is_valid(const mti_said *said) {
    int kind = (int)(said->what & 255) - 1, known = kind >= 0 && kind < (int)MT_COLLECTIVE_COUNT;
    return said->inside <= 255 && (said->what >> 8 & 255) <= MT_U8 && (said->what >> 16 & 255) <= MT_MAX &&
           (kind == -1 || known || (kind >= (int)MTI_SPLIT && kind <= (int)MTI_GRAPH_LAUNCH));
}

static mti_said mti_said_of(const mti_message *message) {
    mti_said said;
    said.what = message->what;
    said.count = message->count;
    said.recvcount = message->recvcount;
    said.inside = 0;
    return said;
}

/* Whether a message of this head can come from a rank of a group of `size`. */
static int mti_message_is_valid(const mti_message *m, int size) {
    size_t calls = (size_t)size * sizeof(mti_said);
    mti_said said = mti_said_of(m);
    if (m->rank < -1 || m->rank >= size) return 0;
    switch (m->kind) {
    case MTI_MESSAGE_HELLO:
    case MTI_MESSAGE_OPEN:
    case MTI_MESSAGE_LATE: return m->bytes == 0;
    case MTI_MESSAGE_CALL: return m->bytes == 0 && mti_said_is_valid(&said);
    case MTI_MESSAGE_END: return m->bytes == 0 && m->rank >= 0 && m->what <= MTI_END_AHEAD;
    case MTI_MESSAGE_FAILED:
    case MTI_MESSAGE_LEFT: return m->bytes >= 2 && m->bytes <= MTI_MESSAGE_TEXT;
    case MTI_MESSAGE_RESULT:
        if (m->bytes < calls + 1 || m->bytes > calls + MTI_MESSAGE_TEXT || m->recvcount > (uint64_t)size) return 0;
        if (m->what == MTI_WHY_UNLIKE) return m->rank >= 0 && m->recvcount >= 1;
        return m->what <= MTI_WHY_FAILED && (m->what != MTI_WHY_LEFT || m->rank >= 0);
    default: return 0;
    }
}

/* Whether the text behind a valid head is valid: it ends, and the calls in it are calls. */
static int mti_message_text_is_valid(const mti_message *m, int size, const char *text) {
    size_t calls = m->kind == MTI_MESSAGE_RESULT ? (size_t)size * sizeof(mti_said) : 0, at;
    mti_said said;
    if (m->bytes == 0) return 1;
    for (at = 0; at < calls; at += sizeof said) {
        memcpy(&said, text + at, sizeof said);
        if (!mti_said_is_valid(&said)) return 0;
    }
    return strlen(text + calls) == (size_t)m->bytes - calls - 1;
}

typedef enum mti_parsed { MTI_PARSED, MTI_INCOMPLETE, MTI_MALFORMED } mti_parsed;

/* Reads the first message of b, and the address of its text. size: of the group */
static mti_parsed mti_message_parse(const mti_bytes *b, int size, mti_message *message, const char **text) {
    if (mti_bytes_size(b) < sizeof *message) return MTI_INCOMPLETE;
    memcpy(message, mti_bytes_front(b), sizeof *message);
    if (!mti_message_is_valid(message, size)) return MTI_MALFORMED;
    *text = mti_bytes_front(b) + sizeof *message;
    if (mti_bytes_size(b) - sizeof *message < message->bytes) return MTI_INCOMPLETE;
    /* strlen stops at the NUL, or at the last byte */
    if (message->bytes && (*text)[message->bytes - 1] != '\0') return MTI_MALFORMED;
    return mti_message_text_is_valid(message, size, *text) ? MTI_PARSED : MTI_MALFORMED;
}

static void mti_line_flush(mti_line *line) {
    while (line->fd >= 0 && !line->lost && mti_bytes_size(&line->out)) {
        ssize_t n =
            send(line->fd, mti_bytes_front(&line->out), mti_bytes_size(&line->out), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) mti_bytes_drop(&line->out, (size_t)n);
        else if (n < 0 && errno == EINTR) continue;
        else {
            line->lost = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
            return;
        }
    }
}

/* Reads what has arrived, up to MTI_BOARD_PART bytes. Returns their number; -1: there is no memory for them. */
static int mti_line_read(mti_line *line) {
    ssize_t n;
    if (line->fd < 0 || line->lost) return 0;
    if (!mti_bytes_reserve(&line->in, MTI_BOARD_PART)) return -1;
    do n = recv(line->fd, line->in.data + line->in.end, MTI_BOARD_PART, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n <= 0) {
        line->lost = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
        return 0;
    }
    line->in.end += (size_t)n;
    return (int)n;
}

static void mti_line_close(mti_line *line) {
    if (line->fd >= 0) close(line->fd);
    line->fd = -1;
    mti_bytes_free(&line->in);
    mti_bytes_free(&line->out);
}

/* -- the end of a comparison -- */

/* Ends the comparison because of rank `rank`. The memory of what has not been compared is freed. A message that has
   been sent in part is completed, and mti_board_send_end follows. */
static void mti_board_end(mti_board *b, int rank, mti_end_reason why) {
    if (b->ended) return;
    memset(&b->end, 0, sizeof b->end);
    b->end.kind = MTI_MESSAGE_END;
    b->end.rank = rank;
    b->end.what = (uint64_t)why;
    mti_bytes_free(&b->queue);
    free(b->rounds);
    b->rounds = NULL;
    b->room = 0;
    b->first = b->last_round = 0;
    __atomic_store_n(&b->ended, 1, __ATOMIC_RELEASE);
}

static int mti_board_is_ended(const mti_board *b) { return __atomic_load_n(&b->ended, __ATOMIC_ACQUIRE); }

/* Appends the last message to every line. mti_bytes_reserve has left room for it. */
static void mti_board_send_end(mti_board *b) {
    int i;
    if (!b->ended || b->end_is_sent) return;
    b->end_is_sent = 1;
    for (i = 0; i < b->line_count; i++)
        if (b->lines[i].fd >= 0) mti_bytes_put(&b->lines[i].out, &b->end, sizeof b->end);
}

static void mti_board_send(mti_board *b, mti_line *line, const mti_message *message, const char *text) {
    if (line->fd < 0 || b->ended) return;
    if (mti_bytes_size(&line->out) > MTI_BOARD_AHEAD * sizeof *message) mti_board_end(b, b->rank, MTI_END_AHEAD);
    else if (!mti_message_add(&line->out, message, text)) mti_board_end(b, b->rank, MTI_END_MEMORY);
}

/* -- results -- */

/* Stores the result, and at rank 0 sends it to all ranks. Only the first one counts. calls: the calls of all ranks;
   rank, peer: the ranks that it is about, or -1. b->shown has the room since the creation of the board. */
static void mti_board_decide(mti_board *b, mti_why why, int rank, int peer, const mti_said *calls, const char *text) {
    size_t bytes = (size_t)b->size * sizeof *calls, length = strlen(text);
    int i;
    if (b->decided || b->ended) return;
    if (length >= MTI_MESSAGE_TEXT) length = MTI_MESSAGE_TEXT - 1;
    memset(&b->result, 0, sizeof b->result);
    b->result.kind = MTI_MESSAGE_RESULT;
    b->result.rank = rank;
    b->result.what = (uint64_t)why;
    b->result.recvcount = (uint64_t)(peer + 1);
    mti_bytes_put(&b->shown, calls, bytes);
    mti_bytes_put(&b->shown, text, length);
    mti_bytes_put(&b->shown, "", 1);
    b->result.bytes = mti_bytes_size(&b->shown);
    for (i = 0; i < b->line_count && b->rank == 0; i++) mti_board_send(b, &b->lines[i], &b->result, b->shown.data);
    __atomic_store_n(&b->decided, 1, __ATOMIC_RELEASE);
}

static int mti_board_is_decided(const mti_board *b) { return b && __atomic_load_n(&b->decided, __ATOMIC_ACQUIRE); }

static int mti_said_alike(const mti_said *a, const mti_said *b) { return a->what == b->what && a->count == b->count; }

/* The sentence of a result: "rank `rank` has left the group", in all calls. */
static void mti_board_decide_left(mti_board *b, int rank) {
    mti_board_decide(b, MTI_WHY_LEFT, rank, -1, b->last, b->reasons[rank].data);
}

static int mti_board_has_left(const mti_board *b, int rank) { return mti_bytes_size(&b->reasons[rank]) > 0; }

/* Writes the error of a result, and returns its status; MT_SUCCESS: there is no result. */
static mt_status mti_board_error(const mt_comm *comm, mti_text *text) {
    const mti_board *b = comm->nccl.board;
    const mti_said *calls;
    int r, rank, peer;
    if (!mti_board_is_decided(b)) return MT_SUCCESS;
    calls = (const mti_said *)(const void *)b->shown.data;
    rank = b->result.rank;
    peer = (int)b->result.recvcount - 1;
    for (r = 0; r < comm->size; r++) {
        mti_slot *slot = mti_slot_of(comm->group, r);
        slot->what = calls[r].what;
        slot->count = calls[r].count;
        slot->recvcount = calls[r].recvcount;
        slot->inside = (int)calls[r].inside;
        slot->left = r == rank ? (const char *)(calls + comm->size) : NULL;
    }
    if (b->result.what == MTI_WHY_LATE || b->result.what == MTI_WHY_LEFT) /* rank 0 may not know it yet */
        mti_slot_write(mti_slot_of(comm->group, comm->rank), &comm->nccl.last);
    text->used = 0;
    switch ((mti_why)b->result.what) {
    case MTI_WHY_DIFFERS: mti_say_mismatch(text, comm); return MT_ERR_MISMATCH;
    case MTI_WHY_UNLIKE: mti_say_unlike(text, comm, rank, peer); return MT_ERR_MISMATCH;
    case MTI_WHY_LATE: mti_say_timeout(text, comm, peer); return MT_ERR_TIMEOUT;
    case MTI_WHY_LEFT: mti_say_left(text, comm, rank); return MT_ERR_PEER;
    default: mti_say(text, "%s", (const char *)(calls + comm->size)); return MT_ERR_PEER;
    }
}

/* -- the comparison, at rank 0 -- */

/* Makes room for one more round. Returns 0 when the comparison has ended. */
static int mti_board_grow(mti_board *b) {
    size_t room = b->room ? 2 * b->room : 64, i;
    mti_round *rounds;
    if (b->last_round - b->first < b->room) return 1;
    rounds = b->room < MTI_BOARD_AHEAD ? (mti_round *)calloc(room, sizeof *rounds) : NULL;
    if (!rounds) {
        mti_board_end(b, b->rank, b->room < MTI_BOARD_AHEAD ? MTI_END_MEMORY : MTI_END_AHEAD);
        return 0;
    }
    for (i = 0; b->first + i < b->last_round; i++)
        rounds[(b->first + i) & (room - 1)] = b->rounds[(b->first + i) & (b->room - 1)];
    free(b->rounds);
    b->rounds = rounds;
    b->room = room;
    return 1;
}

/* Stores the calls of the first round in which they differ. The result waits for the calls of the other ranks. */
static void mti_board_differs(mti_board *b, uint64_t n, int rank, const mti_said *said) {
    int r;
    if (!b->odd) {
        b->odd = n + 1;
        b->odd_at = mti_now();
        for (r = 0; r < b->size; r++)
            if (r != rank && b->number[r] > n) b->odd_calls[r] = b->rounds[n & (b->room - 1)].said;
    }
    b->odd_calls[rank] = *said;
}

static void mti_board_collective(mti_board *b, int rank, const mti_said *said) {
    uint64_t n = b->number[rank];
    mti_round *round;
    int r;
    if (n == b->last_round) {
        if (!mti_board_grow(b)) return;
        b->last_round++;
        round = &b->rounds[n & (b->room - 1)];
        round->said = *said;
        round->ranks = 0;
    }
    b->number[rank]++;
    round = &b->rounds[n & (b->room - 1)];
    if (b->odd == n + 1 || (!b->odd && !mti_said_alike(&round->said, said))) mti_board_differs(b, n, rank, said);
    round->ranks++;
    while (b->first < b->last_round && b->rounds[b->first & (b->room - 1)].ranks == b->size) b->first++;
    if (b->odd && b->first >= b->odd) mti_board_decide(b, MTI_WHY_DIFFERS, -1, -1, b->odd_calls, "");
    for (r = 0; r < b->size && b->left_count && !b->odd; r++)
        if (mti_board_has_left(b, r) && b->number[r] <= n) mti_board_decide_left(b, r);
}

/* The messages from one rank to another one; NULL: no memory. */
static mti_pair *mti_board_pair(mti_board *b, int from, int to) {
    mti_pair *p = b->pairs[from];
    while (p && p->to != to) p = p->next;
    if (p) return p;
    p = (mti_pair *)calloc(1, sizeof *p);
    if (!p) return NULL;
    p->from = from;
    p->to = to;
    p->next = b->pairs[from];
    b->pairs[from] = p;
    return p;
}

/* Takes the first send or receive that waits, and compares it with its other half. */
static void mti_pair_match(mti_board *b, mti_pair *p, const mti_said *said, int sends) {
    const mti_said *send = said, *recv = said;
    mti_said first;
    memcpy(&first, mti_bytes_front(&p->waiting), sizeof first);
    mti_bytes_drop(&p->waiting, sizeof first);
    b->waiting--;
    if (sends) recv = &first;
    else send = &first;
    if (send->count == recv->recvcount && (send->what >> 8 & 255) == (recv->what >> 8 & 255)) return;
    b->odd_calls[p->from] = *send;
    b->odd_calls[p->to] = *recv;
    mti_board_decide(b, MTI_WHY_UNLIKE, p->from, p->to, b->odd_calls, "");
}

/* Compares a send or a receive with its other half, or keeps it until the other half comes. */
static void mti_board_half(mti_board *b, int from, int to, int sends, const mti_said *said) {
    mti_pair *p = mti_board_pair(b, from, to);
    int peer = sends ? to : from;
    if (p && mti_bytes_size(&p->waiting) && p->sends != sends) {
        mti_pair_match(b, p, said, sends);
        return;
    }
    if (mti_board_has_left(b, peer)) mti_board_decide_left(b, peer);
    if (b->waiting >= MTI_BOARD_AHEAD) mti_board_end(b, b->rank, MTI_END_AHEAD);
    else if (!p || !mti_bytes_add(&p->waiting, said, sizeof *said)) mti_board_end(b, b->rank, MTI_END_MEMORY);
    else {
        p->sends = sends;
        b->waiting++;
    }
}

static void mti_board_call(mti_board *b, int rank, const mti_said *said) {
    int kind = (int)(said->what & 255) - 1, to = (int)(said->what >> 24 & 0xffff) - 1,
        from = (int)(said->what >> 40 & 0xffff) - 1;
    b->last[rank] = *said;
    if (kind != MT_SEND && kind != MT_RECV && kind != MTI_SEND_RECV) {
        mti_board_collective(b, rank, said);
        return;
    }
    if (to >= 0 && to < b->size) mti_board_half(b, rank, to, 1, said);
    if (from >= 0 && from < b->size && !b->ended) mti_board_half(b, from, rank, 0, said);
}

/* Returns a rank whose send or receive `rank` waits for, or -1. With sender or receiver -1: any of them. */
static int mti_board_waits_for(const mti_board *b, int rank, int peer) {
    const mti_pair *p;
    int r;
    for (r = 0; r < b->size; r++)
        for (p = b->pairs[r]; p; p = p->next) {
            int waits = p->sends ? p->from : p->to, other = p->sends ? p->to : p->from;
            if (mti_bytes_size(&p->waiting) && (rank < 0 || waits == rank) && (peer < 0 || other == peer)) return other;
        }
    return -1;
}

/* Stores why a rank has left. It is an error when another rank has made a call that needs it. */
static void mti_board_leave(mti_board *b, int rank, const char *reason, size_t bytes) {
    if (mti_board_has_left(b, rank)) return;
    if (!mti_bytes_add(&b->reasons[rank], reason, bytes)) {
        mti_board_end(b, b->rank, MTI_END_MEMORY);
        return;
    }
    b->left_count++;
    if (b->last_round > b->number[rank] && !b->odd) mti_board_decide_left(b, rank);
    if (mti_board_waits_for(b, -1, rank) >= 0) mti_board_decide_left(b, rank);
}

/* Answers a rank that has waited for the timeout: which ranks are missing. When none is, there is no result. */
static void mti_board_late(mti_board *b, int rank) {
    int r, missing = 0, peer = mti_board_waits_for(b, rank, -1);
    for (r = 0; r < b->size; r++) {
        b->last[r].inside = b->number[r] >= b->number[rank] ? MTI_IN_COLLECTIVE : MTI_OUTSIDE;
        missing += !b->last[r].inside;
    }
    if (peer >= 0 || missing) mti_board_decide(b, MTI_WHY_LATE, rank, peer, b->last, "");
}

/* A connection has ended without a farewell: the process of the rank has probably ended. */
static void mti_board_gone(mti_board *b, int rank) {
    static const char reason[] = "is gone: its process has ended, or its connection is lost";
    if (mti_board_has_left(b, rank) || b->ended) return;
    mti_board_leave(b, rank, reason, sizeof reason);
    b->gone = rank;
    b->gone_at = mti_now();
}

/* Takes a valid message of a rank at rank 0. Returns 0 when no rank sends it to rank 0. */
static int mti_board_take(mti_board *b, int rank, const mti_message *message, const char *text) {
    mti_said said = mti_said_of(message);
    switch (message->kind) {
    case MTI_MESSAGE_CALL: mti_board_call(b, rank, &said); return 1;
    case MTI_MESSAGE_LATE: mti_board_late(b, rank); return 1;
    case MTI_MESSAGE_LEFT: mti_board_leave(b, rank, text, (size_t)message->bytes); return 1;
    case MTI_MESSAGE_FAILED: mti_board_decide(b, MTI_WHY_FAILED, -1, -1, b->last, text); return 1;
    case MTI_MESSAGE_END: mti_board_end(b, rank, (mti_end_reason)message->what); return 1;
    default: return 0;
    }
}

/* -- the comparison, at the other ranks -- */

/* Takes a valid message of rank 0. Returns 0 when rank 0 does not send it. */
static int mti_board_hear(mti_board *b, const mti_message *message, const char *text) {
    switch (message->kind) {
    case MTI_MESSAGE_RESULT:
        if (b->decided) return 1;
        b->result = *message;
        mti_bytes_put(&b->shown, text, (size_t)message->bytes); /* its largest size, since the creation of the board */
        __atomic_store_n(&b->decided, 1, __ATOMIC_RELEASE);
        return 1;
    case MTI_MESSAGE_LEFT:
        b->number[0] = message->count;
        mti_board_leave(b, 0, text, (size_t)message->bytes);
        if (b->number[b->rank] > b->number[0]) mti_board_decide_left(b, 0);
        return 1;
    case MTI_MESSAGE_END: mti_board_end(b, message->rank, (mti_end_reason)message->what); return 1;
    default: return 0;
    }
}

/* Sends a message of this rank to rank 0. Behind the farewell of rank 0 a collective is an error. */
static void mti_board_pass(mti_board *b, const mti_message *message, const char *text) {
    int kind = (int)(message->what & 255) - 1;
    mti_board_send(b, b->lines, message, text);
    if (message->kind != MTI_MESSAGE_CALL) return;
    b->last[b->rank] = mti_said_of(message);
    if (kind == MT_SEND || kind == MT_RECV || kind == MTI_SEND_RECV) return;
    b->number[b->rank]++;
    if (mti_board_has_left(b, 0) && !b->gone_at && b->number[b->rank] > b->number[0]) mti_board_decide_left(b, 0);
}

/* -- the comparer -- */

/* Takes the messages that have arrived in a line. rank: the rank at its other end */
static void mti_board_take_all(mti_board *b, mti_line *line, int rank) {
    mti_message message;
    const char *text = NULL;
    mti_parsed parsed = MTI_PARSED;
    while (!b->ended && (parsed = mti_message_parse(&line->in, b->size, &message, &text)) == MTI_PARSED) {
        int known = b->rank == 0 ? mti_board_take(b, rank, &message, text) : mti_board_hear(b, &message, text);
        mti_bytes_drop(&line->in, sizeof message + (size_t)message.bytes);
        if (!known) parsed = MTI_MALFORMED;
        if (!known) break;
    }
    if (parsed == MTI_MALFORMED) line->lost = 1;
    if (b->ended) mti_bytes_drop(&line->in, mti_bytes_size(&line->in));
}

/* Reads from a line, and takes the messages. After the end of a comparison it only waits for the connection's end.
   Returns 1 when there may be more to read. */
static int mti_board_listen(mti_board *b, mti_line *line, int rank) {
    int bytes = mti_line_read(line);
    if (bytes < 0) mti_board_end(b, b->rank, MTI_END_MEMORY);
    mti_board_take_all(b, line, rank);
    return bytes > 0 && !line->lost;
}

/* Takes the messages of this rank. */
static void mti_board_empty(mti_board *b) {
    mti_message message;
    const char *text = NULL;
    while (!b->ended && mti_message_parse(&b->queue, b->size, &message, &text) == MTI_PARSED) {
        if (b->rank == 0) mti_board_take(b, 0, &message, text);
        else mti_board_pass(b, &message, text);
        if (!b->ended) mti_bytes_drop(&b->queue, sizeof message + (size_t)message.bytes); /* the end has freed it */
    }
}

/* Takes the messages of this rank, sends what there is to send, and ends lost lines. Returns 1 when the comparer must
   look again soon. */
static int mti_board_work(mti_board *b) {
    int i, soon = mti_bytes_size(&b->queue) > 0;
    mti_board_empty(b);
    if (b->odd && !b->decided && mti_now() > b->odd_at + MTI_BOARD_GRACE)
        mti_board_decide(b, MTI_WHY_DIFFERS, -1, -1, b->odd_calls, "");
    if (b->gone_at > 0 && !b->decided && mti_now() > b->gone_at + MTI_BOARD_GRACE) mti_board_decide_left(b, b->gone);
    mti_board_send_end(b);
    for (i = 0; i < b->line_count; i++) {
        mti_line_flush(&b->lines[i]);
        if (!b->lines[i].lost) continue;
        b->lines[i].lost = 0;
        mti_line_close(&b->lines[i]);
        mti_board_gone(b, b->rank == 0 ? i : 0);
        soon = 1;
    }
    if (b->ended) return !b->end_is_sent;
    return soon || ((b->odd || b->gone_at > 0) && !b->decided);
}

static void mti_board_free(mti_board *b) {
    int i;
    if (!b) return;
    for (i = 0; b->lines && i < b->line_count; i++) mti_line_close(&b->lines[i]);
    for (i = 0; b->reasons && i < b->size; i++) mti_bytes_free(&b->reasons[i]);
    for (i = 0; b->pairs && i < b->size; i++)
        while (b->pairs[i]) {
            mti_pair *next = b->pairs[i]->next;
            mti_bytes_free(&b->pairs[i]->waiting);
            free(b->pairs[i]);
            b->pairs[i] = next;
        }
    mti_bytes_free(&b->queue);
    mti_bytes_free(&b->shown);
    free(b->lines);
    free(b->last);
    free(b->number);
    free(b->reasons);
    free(b->rounds);
    free(b->pairs);
    free(b->odd_calls);
    free(b);
}

/* Allocates the arrays of a board, and the memory that must not be missing later. Returns 0 when there is none. */
static int mti_board_fill(mti_board *b) {
    size_t n = (size_t)b->size;
    int i;
    b->lines = (mti_line *)calloc((size_t)b->line_count, sizeof *b->lines);
    for (i = 0; b->lines && i < b->line_count; i++) b->lines[i].fd = -1;
    for (i = 0; b->lines && i < b->line_count; i++)
        if (!mti_bytes_reserve(&b->lines[i].out, 0)) return 0;
    b->last = (mti_said *)calloc(n, sizeof *b->last);
    b->odd_calls = (mti_said *)calloc(n, sizeof *b->odd_calls);
    b->number = (uint64_t *)calloc(n, sizeof *b->number);
    b->reasons = (mti_bytes *)calloc(n, sizeof *b->reasons);
    b->pairs = (mti_pair **)calloc(n, sizeof *b->pairs);
    return b->lines && b->last && b->odd_calls && b->number && b->reasons && b->pairs &&
           mti_bytes_reserve(&b->shown, n * sizeof(mti_said) + MTI_MESSAGE_TEXT);
}

/* NULL: out of memory. */
static mti_board *mti_board_new(int rank, int size) {
    mti_board *b = (mti_board *)calloc(1, sizeof *b);
    if (!b) return NULL;
    b->rank = rank;
    b->size = size;
    b->line_count = rank == 0 ? size : 1;
    if (mti_board_fill(b)) return b;
    mti_board_free(b);
    return NULL;
}

/* Lists the sockets to poll, the bell first. Returns their number; 0: no memory */
static int mti_comparer_list(mti_comparer *c) {
    int count = 1, n = 0, i;
    mti_board *b;
    for (b = c->boards; b; b = b->next) count += b->line_count;
    if (count > c->polled_room) {
        struct pollfd *polled = (struct pollfd *)realloc(c->polled, (size_t)count * sizeof *polled);
        if (!polled) return 0;
        c->polled = polled;
        c->polled_room = count;
    }
    memset(c->polled, 0, (size_t)count * sizeof *c->polled);
    c->polled[n].fd = c->bell[0];
    c->polled[n++].events = POLLIN;
    for (b = c->boards; b; b = b->next)
        for (i = 0; i < b->line_count; i++, n++) { /* poll ignores a negative fd */
            c->polled[n].fd = b->lines[i].fd;
            c->polled[n].events = (short)(POLLIN | (mti_bytes_size(&b->lines[i].out) ? POLLOUT : 0));
        }
    return n;
}

static void *mti_comparer_run(void *argument) {
    mti_comparer *c = (mti_comparer *)argument;
    mti_board *b;
    char rung[64];
    pthread_mutex_lock(&c->mutex);
    while (!c->ends) {
        int soon = 0, n, i;
        for (b = c->boards; b; b = b->next) soon |= mti_board_work(b);
        n = mti_comparer_list(c);
        c->changed = 0;
        c->sleeps = !soon;
        pthread_mutex_unlock(&c->mutex);
        poll(c->polled, (nfds_t)n, soon || !n ? MTI_BOARD_TICK : -1);
        pthread_mutex_lock(&c->mutex);
        c->sleeps = 0;
        if (n && c->polled[0].revents && read(c->bell[0], rung, sizeof rung) < 0) continue;
        if (c->changed || !n) continue;
        for (b = c->boards, n = 1; b; b = b->next)
            for (i = 0; i < b->line_count; i++, n++)
                if (c->polled[n].revents) mti_board_listen(b, &b->lines[i], i);
    }
    pthread_mutex_unlock(&c->mutex);
    return NULL;
}

/* Wakes the thread. The caller holds the mutex. */
static void mti_comparer_ring(mti_comparer *c) {
    if (write(c->bell[1], "", 1) == 1) c->sleeps = 0;
}

static void mti_socket_set(int fd) {
    int on = 1;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* fails on a pipe, which needs none */
}

static mti_comparer *mti_comparer_new(void) {
    mti_comparer *c = (mti_comparer *)calloc(1, sizeof *c);
    if (!c) return NULL;
    if (pipe(c->bell) == 0) {
        mti_socket_set(c->bell[0]);
        mti_socket_set(c->bell[1]);
        if (pthread_mutex_init(&c->mutex, NULL) == 0) {
            if (mti_thread_start(&c->thread, mti_comparer_run, c) == 0) return c;
            pthread_mutex_destroy(&c->mutex);
        }
        close(c->bell[0]);
        close(c->bell[1]);
    }
    free(c);
    return NULL;
}

/* The last board ends the thread. */
static void mti_comparer_leave(mti_comparer *c) {
    if (--c->users > 0) return;
    pthread_mutex_lock(&c->mutex);
    c->ends = 1;
    mti_comparer_ring(c);
    pthread_mutex_unlock(&c->mutex);
    pthread_join(c->thread, NULL);
    pthread_mutex_destroy(&c->mutex);
    close(c->bell[0]);
    close(c->bell[1]);
    free(c->polled);
    free(c);
}

/* Hands the board to the comparer of the context, which the first one starts. Returns 0 on failure. */
static int mti_comparer_join(mt_context *ctx, mti_board *b) {
    mt_comm *other = ctx->nccl;
    mti_comparer *c;
    while (other && !other->nccl.board) other = other->nccl.next;
    c = other ? other->nccl.board->comparer : mti_comparer_new();
    if (!c) return 0;
    b->comparer = c;
    pthread_mutex_lock(&c->mutex);
    c->users++;
    b->next = c->boards;
    c->boards = b;
    c->changed = 1;
    mti_comparer_ring(c);
    pthread_mutex_unlock(&c->mutex);
    return 1;
}

/* -- what the thread of the rank does -- */

/* Warns also a program without a logger, which would not learn otherwise that an error may not be found. */
static void mti_warn(mt_context *ctx, const char *text) {
    if (ctx && !ctx->logger.log) fprintf(stderr, "%s\n", text);
    mt_log(ctx, MT_LOG_WARNING, text);
}

/* Says once that the comparison has ended. */
static void mti_board_warn(mt_comm *comm) {
    mti_board *b = comm->nccl.board;
    char text[192];
    if (!mti_board_is_ended(b) || b->end_is_told) return;
    b->end_is_told = 1;
    snprintf(text, sizeof text, "the calls of the ranks of \"%s\" are no longer compared: rank %d %s", comm->name,
             (int)b->end.rank,
             b->end.what == MTI_END_MEMORY ? "has no memory for them" : "has seen calls that are too far ahead");
    mti_warn(comm->nccl.home, text);
}

/* Appends a message to the queue, or ends the comparison. call: NULL for other messages than MTI_MESSAGE_CALL */
static void mti_board_tell(mt_comm *comm, mti_message_kind kind, const mti_call *call, const char *text) {
    mti_board *b = comm->nccl.board;
    mti_slot slot;
    mti_message message;
    if (!b) return;
    mti_board_warn(comm);
    memset(&message, 0, sizeof message);
    message.kind = (int32_t)kind;
    message.rank = comm->rank;
    message.bytes = text ? strlen(text) + 1 : 0;
    if (call) {
        mti_slot_write(&slot, call);
        message.what = slot.what;
        message.count = slot.count;
        message.recvcount = slot.recvcount;
    }
    pthread_mutex_lock(&b->comparer->mutex);
    if (mti_bytes_size(&b->queue) > MTI_BOARD_AHEAD * sizeof message) mti_board_end(b, b->rank, MTI_END_AHEAD);
    else if (!b->ended && !mti_message_add(&b->queue, &message, text)) mti_board_end(b, b->rank, MTI_END_MEMORY);
    if (b->comparer->sleeps) mti_comparer_ring(b->comparer);
    pthread_mutex_unlock(&b->comparer->mutex);
}

/* Asks which ranks are missing, and waits for the answer. */
static void mti_board_ask(mt_comm *comm) {
    double start = mti_now();
    mti_board *b = comm->nccl.board;
    if (!b || mti_board_is_decided(b)) return;
    mti_board_tell(comm, MTI_MESSAGE_LATE, NULL, NULL);
    while (!mti_board_is_decided(b) && !mti_board_is_ended(b) && mti_now() < start + MTI_BOARD_ANSWER) mti_rest(1, 0);
}

/* Tells the other ranks that comm has failed here. Where a result is the cause, they know. */
static void mti_board_fail(mt_comm *comm, mt_status status, const char *why) {
    mti_text text;
    if (!comm->nccl.board || mti_board_is_decided(comm->nccl.board)) return;
    text.used = 0;
    mti_say(&text, "%s", mti_call_name(comm->nccl.last.kind));
    mti_say_where(&text, comm);
    mti_say(&text, "rank %d failed with %s (%s)", comm->rank, mt_status_name(status), why);
    mti_board_tell(comm, MTI_MESSAGE_FAILED, NULL, text.data);
}

static int mti_board_has_more(const mti_board *b) {
    int i;
    for (i = 0; i < b->line_count; i++)
        if (b->lines[i].fd >= 0 && mti_bytes_size(&b->lines[i].out)) return 1;
    return 0;
}

/* Sends what is left, and ends the connections. Rank 0 first compares what has arrived, and says farewell. */
static void mti_board_close(mt_comm *comm) {
    static const char reason[] = "has left the group";
    mti_board *b = comm->nccl.board, **at;
    mti_comparer *c;
    mti_message message;
    double start = mti_now();
    int i;
    comm->nccl.board = NULL;
    if (!b) return;
    c = b->comparer;
    memset(&message, 0, sizeof message);
    message.kind = MTI_MESSAGE_LEFT;
    message.bytes = sizeof reason;
    pthread_mutex_lock(&c->mutex);
    mti_board_work(b);
    for (i = 0; i < b->line_count && b->rank == 0; i++)
        while (mti_board_listen(b, &b->lines[i], i) && mti_now() < start + MTI_BOARD_GRACE) continue;
    message.count = b->number[0];
    for (i = 0; i < b->line_count && b->rank == 0; i++) mti_board_send(b, &b->lines[i], &message, reason);
    while (mti_board_work(b), mti_board_has_more(b) && mti_now() < start + MTI_BOARD_GRACE) {
        pthread_mutex_unlock(&c->mutex);
        mti_rest(1, 0);
        pthread_mutex_lock(&c->mutex);
    }
    for (at = &c->boards; *at != b; at = &(*at)->next) continue;
    *at = b->next;
    c->changed = 1;
    mti_comparer_ring(c);
    mti_board_free(b);
    pthread_mutex_unlock(&c->mutex);
    mti_comparer_leave(c);
}

/* Closes the connections of a process that was forked, so that the other one's end as if this one did not exist. */
static void mti_board_abandon(mt_comm *comm) {
    mti_board *b = comm->nccl.board;
    int i;
    if (!b) return;
    for (i = 0; i < b->line_count; i++)
        if (b->lines[i].fd >= 0) close(b->lines[i].fd);
    comm->nccl.board = NULL; /* the memory stays: another thread of the other process may have held the mutex */
}

#endif

/* ---- >>listeners: how the ranks connect -------------------------------------------------------------------------- */

#if MTI_COMPARES

/* Rank 0 serves all connections at the same time, so one on which nothing comes costs nothing. A rank tries all
   addresses of rank 0 at the same time, for the same reason. Both sides compare the listener's token. A rank has
   connected when rank 0 has opened one of its connections; rank 0 closes the others. */

#define MTI_LISTENER_HOSTS 6
#define MTI_LISTENER_STRANGERS 64 /* connections that may come from others than the ranks */

/* Where a rank listens. Sent as it is. */
typedef struct mti_listener {
    uint64_t token; /* a connection without this number is not from a rank of the communicator */
    uint32_t port;  /* 0: there is no listener */
    uint32_t hosts, host[MTI_LISTENER_HOSTS];
} mti_listener;

/* The random number is not a secret: it protects from mistakes. */
static uint64_t mti_listener_token(const void *salt) {
    struct timespec t;
    uint64_t token = 0;
    int fd = open("/dev/urandom", O_RDONLY);
    if (fd < 0 || read(fd, &token, sizeof token) != (ssize_t)sizeof token) {
        clock_gettime(CLOCK_REALTIME, &t);
        token = (uint64_t)t.tv_nsec * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid() << 32 ^ (uint64_t)(uintptr_t)salt;
    }
    if (fd >= 0) close(fd);
    return token;
}

/* Lists the IPv4 addresses of this machine; the loopback address only when there is no other. */
static void mti_listener_hosts(mti_listener *listener) {
    struct ifaddrs *all = NULL, *a;
    if (getifaddrs(&all) != 0) all = NULL;
    for (a = all; a && listener->hosts < MTI_LISTENER_HOSTS; a = a->ifa_next) {
        struct sockaddr_in in;
        if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET || !(a->ifa_flags & IFF_UP) ||
            (a->ifa_flags & IFF_LOOPBACK))
            continue;
        memcpy(&in, a->ifa_addr, sizeof in);
        listener->host[listener->hosts++] = in.sin_addr.s_addr;
    }
    if (!listener->hosts) listener->host[listener->hosts++] = htonl(INADDR_LOOPBACK);
    if (all) freeifaddrs(all);
}

/* Opens a socket that listens, and describes it. Returns -1, and a listener without a port, when there is none. */
static int mti_listener_open(mti_listener *listener) {
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(listener, 0, sizeof *listener);
    if (fd < 0) return -1;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_ANY);
    mti_socket_set(fd);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) != 0 || listen(fd, MTI_MAX_RANKS) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &bytes) != 0) {
        close(fd);
        return -1;
    }
    listener->port = ntohs(at.sin_port);
    listener->token = mti_listener_token(listener);
    mti_listener_hosts(listener);
    return fd;
}

/* A connection, or an attempt to make one, over which a message without a text must come: MTI_MESSAGE_HELLO at rank 0,
   MTI_MESSAGE_OPEN at the other ranks. */
typedef struct mti_caller {
    int fd;       /* -1: closed */
    int connects; /* 1: connect has not ended yet */
    size_t got;   /* bytes of the message that have come */
    mti_message message;
} mti_caller;

static void mti_caller_close(mti_caller *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

/* Reads the message of a caller. size: of the group. Does not read beyond the message, and does not wait. */
static mti_parsed mti_caller_read(mti_caller *c, int size) {
    ssize_t n;
    while (c->got < sizeof c->message) {
        n = recv(c->fd, (char *)&c->message + c->got, sizeof c->message - c->got, MSG_DONTWAIT);
        if (n > 0) c->got += (size_t)n;
        else if (n == 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) return MTI_MALFORMED;
        else if (errno != EINTR) return MTI_INCOMPLETE;
    }
    return mti_message_is_valid(&c->message, size) ? MTI_PARSED : MTI_MALFORMED;
}

static int mti_listener_say(int fd, int kind, int rank, uint64_t token) {
    mti_message message;
    memset(&message, 0, sizeof message);
    message.kind = kind;
    message.rank = rank;
    message.what = token;
    return send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof message;
}

/* Waits until one of the sockets has an event, or until `end` by mti_now. Returns 0 when the time is over. */
static int mti_listener_wait(struct pollfd *polled, int count, double end) {
    double left = end - mti_now();
    int i;
    for (i = 0; i < count; i++) polled[i].revents = 0;
    if (left <= 0) return 0;
    if (poll(polled, (nfds_t)count, left < 1e3 ? (int)(1e3 * left) + 1 : 1000000) < 0)
        for (i = 0; i < count; i++) polled[i].revents = 0;
    return 1;
}

/* Begins to connect to one address of rank 0. */
static void mti_listener_call(const mti_listener *listener, uint32_t host, mti_caller *c) {
    struct sockaddr_in at;
    memset(c, 0, sizeof *c);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    c->connects = 1;
    if (c->fd < 0) return;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_port = htons((uint16_t)listener->port);
    at.sin_addr.s_addr = host;
    mti_socket_set(c->fd);
    if (connect(c->fd, (struct sockaddr *)&at, sizeof at) != 0 && errno != EINPROGRESS) mti_caller_close(c);
}

/* After an event of an attempt: says hello when it is connected, or reads what rank 0 says. Returns 1 when rank 0 has
   opened the connection. */
static int mti_listener_called(const mti_listener *listener, int rank, int size, mti_caller *c) {
    int error = -1;
    socklen_t bytes = sizeof error;
    mti_parsed parsed;
    if (c->connects) {
        c->connects = 0;
        if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0 || error != 0 ||
            !mti_listener_say(c->fd, MTI_MESSAGE_HELLO, rank, listener->token))
            mti_caller_close(c);
        return 0;
    }
    parsed = mti_caller_read(c, size);
    if (parsed == MTI_INCOMPLETE) return 0;
    if (parsed == MTI_PARSED && c->message.kind == MTI_MESSAGE_OPEN && c->message.what == listener->token) return 1;
    mti_caller_close(c);
    return 0;
}

/* Connects to rank 0, and waits until all ranks are connected. Returns the socket; -1: it fails. */
static int mti_listener_connect(const mti_listener *listener, int rank, int size, double end) {
    mti_caller callers[MTI_LISTENER_HOSTS];
    struct pollfd polled[MTI_LISTENER_HOSTS];
    int count = listener->hosts < MTI_LISTENER_HOSTS ? (int)listener->hosts : MTI_LISTENER_HOSTS, open, fd = -1, i;
    for (i = 0; i < count; i++) mti_listener_call(listener, listener->host[i], &callers[i]);
    do {
        for (i = open = 0; i < count; i++) {
            polled[i].fd = callers[i].fd;
            polled[i].events = callers[i].connects ? POLLOUT : POLLIN;
            open += callers[i].fd >= 0;
        }
        if (!open || !mti_listener_wait(polled, count, end)) break;
        for (i = 0; i < count && fd < 0; i++)
            if (polled[i].revents && mti_listener_called(listener, rank, size, &callers[i])) fd = callers[i].fd;
    } while (fd < 0);
    for (i = 0; i < count; i++)
        if (callers[i].fd != fd) mti_caller_close(&callers[i]);
    return fd;
}

/* What rank 0 has while the ranks connect. */
typedef struct mti_server {
    int fd; /* of the listener */
    const mti_listener *listener;
    mti_board *board;
    int come; /* ranks that are connected, with rank 0 */
    mti_caller *callers;
    int count, room; /* of the callers */
    struct pollfd *polled;
} mti_server;

/* Takes what a caller has sent. A caller that is no rank of the group, or has come before, is closed. */
static void mti_server_hear(mti_server *s, mti_caller *c) {
    mti_parsed parsed = mti_caller_read(c, s->board->size);
    const mti_message *m = &c->message;
    if (parsed == MTI_INCOMPLETE) return;
    if (parsed == MTI_PARSED && m->kind == MTI_MESSAGE_HELLO && m->what == s->listener->token && m->rank >= 1 &&
        s->board->lines[m->rank].fd < 0) {
        s->board->lines[m->rank].fd = c->fd;
        c->fd = -1;
        s->come++;
    }
    mti_caller_close(c);
}

/* Accepts who has called. When there are too many, the one that has been silent for longest is closed. */
static void mti_server_accept(mti_server *s) {
    mti_caller *c;
    int fd = 0, most = s->room;
    while (most-- > 0 && (fd = accept(s->fd, NULL, NULL)) >= 0) {
        if (s->count == s->room) {
            mti_caller_close(s->callers);
            memmove(s->callers, s->callers + 1, (size_t)--s->count * sizeof *s->callers);
        }
        c = &s->callers[s->count++];
        memset(c, 0, sizeof *c);
        c->fd = fd;
        mti_socket_set(fd);
        mti_server_hear(s, c);
    }
    if (fd < 0 && errno != EAGAIN && errno != EWOULDBLOCK) mti_rest(1, 0); /* there may be no descriptor for it */
}

/* A rank says nothing before its connection is open: it has given up. */
static void mti_server_drop(mti_server *s, mti_line *line) {
    mti_line_close(line);
    if (!mti_bytes_reserve(&line->out, 0)) s->room = 0;
    s->come--;
}

/* One round of mti_listener_serve. Returns 0 when the time is over. */
static int mti_server_poll(mti_server *s, double end) {
    mti_board *b = s->board;
    int n = 1, before = s->count, i, kept = 0;
    s->polled[0].fd = s->fd;
    for (i = 0; i < before; i++) s->polled[n++].fd = s->callers[i].fd;
    for (i = 1; i < b->size; i++) s->polled[n++].fd = b->lines[i].fd;
    for (i = 0; i < n; i++) s->polled[i].events = POLLIN;
    if (!mti_listener_wait(s->polled, n, end)) return 0;
    for (i = 1; i < b->size; i++)
        if (s->polled[before + i].revents) mti_server_drop(s, &b->lines[i]);
    for (i = 0; i < before; i++)
        if (s->polled[1 + i].revents) mti_server_hear(s, &s->callers[i]);
    for (i = 0; i < before; i++)
        if (s->callers[i].fd >= 0) s->callers[kept++] = s->callers[i];
    s->count = kept;
    if (s->polled[0].revents) mti_server_accept(s);
    return s->room > 0;
}

/* Accepts the other ranks, at most until `end`, and opens their connections. Returns 1 when all of them have come. */
static int mti_listener_serve(int listener, const mti_listener *mine, mti_board *b, double end) {
    mti_server s;
    int i, opened;
    memset(&s, 0, sizeof s);
    s.fd = listener;
    s.listener = mine;
    s.board = b;
    s.come = 1;
    s.room = MTI_LISTENER_HOSTS * b->size + MTI_LISTENER_STRANGERS;
    s.callers = (mti_caller *)calloc((size_t)s.room, sizeof *s.callers);
    s.polled = (struct pollfd *)calloc((size_t)(s.room + b->size + 1), sizeof *s.polled);
    while (s.callers && s.polled && s.come < b->size && mti_server_poll(&s, end)) continue;
    opened = s.come == b->size && s.room > 0;
    for (i = 1; i < b->size && opened; i++) mti_listener_say(b->lines[i].fd, MTI_MESSAGE_OPEN, 0, mine->token);
    for (i = 0; s.callers && i < s.count; i++) mti_caller_close(&s.callers[i]);
    free(s.callers);
    free(s.polled);
    return opened;
}

/* Connects the ranks of b. listener: this rank's socket, or -1; theirs: the listener of rank 0. Returns 1 when all are
   connected. The other ranks wait longer than rank 0, so that they learn what it has decided. */
static int mti_board_connect(mti_board *b, int listener, const mti_listener *theirs, double timeout) {
    double end = mti_now() + (timeout < MTI_BOARD_OPENING ? timeout : MTI_BOARD_OPENING);
    if (b->rank == 0) return listener >= 0 && mti_listener_serve(listener, theirs, b, end);
    if (!theirs->port) return 0;
    b->lines[0].fd = mti_listener_connect(theirs, b->rank, b->size, end + MTI_BOARD_GRACE);
    return b->lines[0].fd >= 0;
}

/* Connects the ranks of comm, see mti_board_connect. Where a rank cannot connect, the calls are not compared on any
   rank, with a warning. */
static mt_status mti_board_open(mt_context *ctx, mt_comm *comm, int listener, const mti_listener *theirs) {
    mti_board *b = mti_board_new(comm->rank, comm->size);
    char text[160];
    int opened;
    if (!comm->group) comm->group = mti_group_new(comm->size, comm->nccl.timeout, 0);
    if (comm->group) comm->group->references = 1;
    opened = b && comm->group && mti_board_connect(b, listener, theirs, comm->nccl.timeout);
    if (opened && mti_comparer_join(ctx, b)) {
        comm->nccl.board = b;
        return MT_SUCCESS;
    }
    mti_board_free(b);
    if (opened) return mti_refuse(ctx, comm, MT_ERR_SYSTEM, "no thread that compares the calls on \"%s\"", comm->name);
    snprintf(text, sizeof text,
             "the calls of the ranks of \"%s\" are not compared: not all of them could connect to rank 0 over TCP",
             comm->name);
    mti_warn(ctx, text);
    return MT_SUCCESS;
}
#endif

/* ---- >>nccl ------------------------------------------------------------------------------------------------------ */

/* A call puts its work into the context's current stream. The communicator is then busy until mt_cuda_wait_peers has
   seen this stream empty. Before the host waits for a stream, it calls mt_cuda_wait_peers, which polls the stream and
   the busy communicators until the timeout. So the host never waits for other ranks without a timeout, except inside a
   blocking ncclComm_t of the caller. Calls take their scratch memory from the arena.

   NCCL starts a thread for each group of calls on a non-blocking communicator, and none on a blocking one. So the
   communicators that carry collectives are blocking. NCCL documents an abort during the creation of a communicator only
   where the call is non-blocking. A split is non-blocking when its parent is, and its child may still be blocking. So
   mt_comm_create_nccl_id creates a non-blocking communicator, the opener, which carries no collective, and splits the
   blocking one from it. Later splits also use the opener. A blocking call may wait for peers inside NCCL: while NCCL
   connects the ranks in the first calls, when the queue of NCCL's work is full, when memory is registered, and when a
   group without an opener is split. A thread, the watchdog, aborts the communicator when such a call lasts longer than
   the timeout. The call then returns with an error.

   ncclConfig_t.splitShare stays 0. Communicators that share resources would run their collectives one after another,
   and the abort of one may make all of them unusable. */

#if MTI_NCCL
#define MTI_NCCL_SCRATCH ((size_t)4 << 20) /* most bytes of the arena that a reduction in the tree takes */

static mt_status mti_nccl_status(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return MT_SUCCESS;
    case ncclInvalidArgument:
    case ncclInvalidUsage: return MT_ERR_ARGUMENT;
    case ncclSystemError: /* usually a connection that the peer has closed */
    case ncclRemoteError: return MT_ERR_PEER;
    default: return MT_ERR_SYSTEM;
    }
}

static ncclDataType_t mti_nccl_type(mt_dtype dtype) {
    switch (dtype) {
    case MT_F32: return ncclFloat32;
    case MT_BF16: return ncclBfloat16;
    case MT_F16: return ncclFloat16;
    case MT_I32: return ncclInt32;
    case MT_U8: break;
    }
    return ncclUint8;
}

/* -- the watchdog -- */

/* Owned by the communicators of one context, all of which belong to one thread: at most one call is inside NCCL. The
   watchdog looks at it once per tick. It sleeps without a tick when it has seen no call for the time of one, so that
   most calls do not wake it. */
typedef struct mti_watchdog {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    pthread_t thread;
    int ordinal, users; /* users: communicators that have this watchdog */
    int ends;
    mt_comm *inside;    /* the communicator of the call that is inside NCCL; NULL: none */
    mti_stopwatch call; /* the time of the last call */
    uint64_t calls;     /* number of calls so far */
    double wakes;       /* when the thread looks next, by mti_now */
    double late;        /* seconds after which the thread has aborted the last call; 0: it has not */
} mti_watchdog;

#define MTI_WATCHDOG_SLEEP 3600.0 /* seconds; a call wakes the watchdog earlier */

static void *mti_watchdog_run(void *argument) {
    mti_watchdog *w = (mti_watchdog *)argument;
    uint64_t seen = 0;
    struct timespec wake;
    cudaSetDevice(w->ordinal);
    pthread_mutex_lock(&w->mutex);
    while (!w->ends) {
        double rest = w->calls != seen ? w->call.tick : MTI_WATCHDOG_SLEEP;
        double waited = w->inside ? mti_waited(&w->call) : 0,
               left = w->inside ? w->inside->nccl.timeout - waited : rest;
        if (left < 0 || (w->inside && mti_board_is_decided(w->inside->nccl.board))) {
            ncclComm_t handle = w->inside->nccl.handle;
            w->inside = NULL;
            w->late = waited + 1e-9; /* more than 0 */
            /* An abort may wait for kernels of other communicators. The caller of the aborted call aborts those
               meanwhile, for which it needs the mutex. */
            pthread_mutex_unlock(&w->mutex);
            ncclCommAbort(handle);
            pthread_mutex_lock(&w->mutex);
            continue;
        }
        if (w->inside) rest = left < w->call.tick ? left : w->call.tick;
        seen = w->calls;
        w->wakes = mti_now() + rest;
        wake = mti_timespec(w->wakes);
        pthread_cond_timedwait(&w->cond, &w->mutex, &wake);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

static mti_watchdog *mti_watchdog_new(int ordinal) {
    mti_watchdog *w = (mti_watchdog *)calloc(1, sizeof *w);
    if (!w) return NULL;
    w->ordinal = ordinal;
    if (pthread_mutex_init(&w->mutex, NULL) == 0) {
        if (mti_cond_init(&w->cond) == 0) {
            if (mti_thread_start(&w->thread, mti_watchdog_run, w) == 0) return w;
            pthread_cond_destroy(&w->cond);
        }
        pthread_mutex_destroy(&w->mutex);
    }
    free(w);
    return NULL;
}

/* Gives comm the watchdog of the context, which the first communicator starts. */
static mt_status mti_watchdog_join(mt_context *ctx, mt_comm *comm) {
    mt_comm *other = ctx->nccl;
    while (other && !other->nccl.watchdog) other = other->nccl.next;
    comm->nccl.watchdog = other ? other->nccl.watchdog : mti_watchdog_new(ctx->ordinal);
    if (!comm->nccl.watchdog)
        return mt_fail(ctx, MT_ERR_SYSTEM, "no thread that watches the calls on \"%s\"", comm->name);
    comm->nccl.watchdog->users++;
    return MT_SUCCESS;
}

/* The last communicator ends the thread. */
static void mti_watchdog_leave(mt_comm *comm) {
    mti_watchdog *w = comm->nccl.watchdog;
    comm->nccl.watchdog = NULL;
    if (!w || --w->users > 0) return;
    pthread_mutex_lock(&w->mutex);
    w->ends = 1;
    pthread_mutex_unlock(&w->mutex);
    pthread_cond_signal(&w->cond);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->cond);
    pthread_mutex_destroy(&w->mutex);
    free(w);
}

/* Begins one call, or one group of calls, of NCCL on the handle of comm. mti_nccl_settle ends it. */
static void mti_nccl_enter(mt_comm *comm) {
    mti_watchdog *w = comm->nccl.watchdog;
    int sleeps;
    if (!w) return;
    pthread_mutex_lock(&w->mutex);
    w->inside = comm;
    w->late = 0;
    w->calls++;
    w->call = mti_stopwatch_start(comm->nccl.timeout);
    sleeps = w->wakes > w->call.looked + w->call.tick;
    pthread_mutex_unlock(&w->mutex);
    if (sleeps) pthread_cond_signal(&w->cond);
}

/* Ends what mti_nccl_enter has begun. Returns the seconds after which the watchdog aborted the call; 0: it did not. The
   handle of an aborted call is gone. */
static double mti_nccl_exit(mt_comm *comm) {
    mti_watchdog *w = comm->nccl.watchdog;
    double late;
    if (!w) return 0;
    pthread_mutex_lock(&w->mutex);
    w->inside = NULL;
    late = w->late;
    w->late = 0;
    if (late > 0) comm->nccl.handle = NULL;
    pthread_mutex_unlock(&w->mutex);
    return late;
}

/* -- errors -- */

/* Writes the last call: all_reduce(count 4, f32, sum) on "tensor" (2 ranks). */
static void mti_nccl_say(mti_text *text, const mt_comm *comm) {
    mti_slot slot;
    memset(&slot, 0, sizeof slot);
    mti_slot_write(&slot, &comm->nccl.last);
    mti_say_call(text, &slot);
    mti_say(text, " on \"%s\" (%d ranks)", comm->name, comm->size);
}

/* Marks comm as broken: then only mt_comm_destroy works. Aborts the NCCL communicators if the library has created them,
   which ends their kernels in the stream. */
static mt_status mti_nccl_break(mt_context *ctx, mt_comm *comm, mt_status status, const mti_text *text) {
    comm->nccl.broken = status;
    mti_board_fail(comm, status, text->data);
    if (comm->nccl.home) mti_graphs_lose(comm->nccl.home); /* an abort waits for the graphs that use comm to end */
    if (comm->nccl.owned) {
        if (comm->nccl.handle) ncclCommAbort(comm->nccl.handle);
        if (comm->nccl.opener) ncclCommAbort(comm->nccl.opener);
        comm->nccl.handle = comm->nccl.opener = NULL;
    }
    return mti_refuse(ctx, comm, status, "%s", text->data);
}

/* Breaks all busy communicators, the one with the latest call first. After an abort the stream goes on: in another
   order, later calls in the stream would send the unfinished results of the aborted call to other ranks. */
static void mti_nccl_break_busy(mt_context *ctx, mt_status status, const mti_text *text) {
    mt_comm *comm, *latest;
    do {
        latest = NULL;
        for (comm = ctx->nccl; comm; comm = comm->nccl.next)
            if (comm->nccl.busy && !comm->nccl.broken && (!latest || comm->nccl.number > latest->nccl.number))
                latest = comm;
        if (latest) mti_nccl_break(ctx, latest, status, text);
    } while (latest);
}

/* Breaks comm, and with ctx all busy communicators. ctx: NULL while comm is being destroyed */
static mt_status mti_nccl_give_up(mt_context *ctx, mt_comm *comm, mt_status status, const mti_text *text) {
    if (ctx) mti_nccl_break_busy(ctx, status, text);
    return comm->nccl.broken ? comm->nccl.broken : mti_nccl_break(ctx, comm, status, text);
}

#define MTI_NCCL_REASON 512 /* bytes of the text of mti_nccl_reason */

/* Writes what a result means, and what NCCL says of it, if anything. nccl may be NULL. */
static const char *mti_nccl_reason(ncclResult_t result, ncclComm_t nccl, char text[MTI_NCCL_REASON]) {
    const char *said = ncclGetLastError(nccl);
    const int n = said ? (int)strcspn(said, "\n") : 0;
    if (n > 0) snprintf(text, MTI_NCCL_REASON, "%.100s, \"%.*s\"", ncclGetErrorString(result), n < 400 ? n : 400, said);
    else snprintf(text, MTI_NCCL_REASON, "%.100s", ncclGetErrorString(result));
    return text;
}

static mt_status mti_nccl_fail(mt_context *ctx, mt_comm *comm, ncclResult_t result) {
    char reason[MTI_NCCL_REASON];
    mti_text text;
    text.used = 0;
    mti_nccl_say(&text, comm);
    mti_say(&text, ": rank %d: NCCL: %s", comm->rank, mti_nccl_reason(result, comm->nccl.handle, reason));
    return mti_nccl_give_up(ctx, comm, mti_nccl_status(result), &text);
}

/* Returns MT_ERR_TIMEOUT, or the error of a result about a busy communicator, and writes its message. */
static mt_status mti_nccl_ask_boards(mt_context *ctx, mti_text *text) {
    mt_status status = MT_SUCCESS;
    mt_comm *comm;
    for (comm = ctx->nccl; comm && status == MT_SUCCESS; comm = comm->nccl.next) {
        if (!comm->nccl.busy || comm->nccl.broken) continue;
        mti_board_ask(comm);
        status = mti_board_error(comm, text);
    }
    return status == MT_SUCCESS ? MT_ERR_TIMEOUT : status;
}

/* Reports a timeout of the stream. Where no board knows who is missing, the message has the last call of every busy
   communicator, because NCCL does not say which call hangs. */
static mt_status mti_nccl_late(mt_context *ctx, double waited) {
    mti_text text;
    mt_comm *comm;
    mt_status status;
    int said = 0;
    text.used = 0;
    status = mti_nccl_ask_boards(ctx, &text);
    for (comm = ctx->nccl; comm && (said || !text.used); comm = comm->nccl.next) {
        if (!comm->nccl.busy) continue;
        if (said++) mti_say(&text, ", or ");
        mti_nccl_say(&text, comm);
    }
    if (said) mti_say(&text, ": waited %.2f s for peers", waited);
    mti_nccl_break_busy(ctx, status, &text);
    return status;
}

/* Reports a timeout of a call, or the result for which the watchdog has aborted it. */
static mt_status mti_nccl_call_late(mt_context *ctx, mt_comm *comm, double waited) {
    mti_text text;
    mt_status status;
    mti_board_ask(comm);
    status = mti_board_error(comm, &text);
    if (status != MT_SUCCESS) return mti_nccl_give_up(ctx, comm, status, &text);
    text.used = 0;
    mti_nccl_say(&text, comm);
    mti_say(&text, ": rank %d waited %.2f s for peers", comm->rank, waited);
    return mti_nccl_give_up(ctx, comm, MT_ERR_TIMEOUT, &text);
}

/* Returns the error of a result about comm, and breaks all busy communicators; MT_SUCCESS: there is none. */
static mt_status mti_nccl_obey(mt_context *ctx, mt_comm *comm) {
    mti_text text;
    mt_status status = mti_board_error(comm, &text);
    return status == MT_SUCCESS ? MT_SUCCESS : mti_nccl_give_up(ctx, comm, status, &text);
}

/* -- waiting -- */

/* Waits, at most for the timeout, until a call on `handle` is complete. handle is one of the two of comm, and result is
   what the call has returned. ncclSuccess does not say that it is complete: NCCL 2.28.3 returns it from a split or a
   registration that is still in progress on a non-blocking communicator. So the handle is asked in any case. */
static mt_status mti_nccl_poll(mt_context *ctx, mt_comm *comm, struct ncclComm *handle, ncclResult_t result) {
    mti_stopwatch watch = mti_stopwatch_start(comm->nccl.timeout);
    double waited;
    while (result == ncclSuccess || result == ncclInProgress) {
        ncclResult_t asked = ncclCommGetAsyncError(handle, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclInProgress) break;
        waited = mti_waited(&watch);
        if (waited > comm->nccl.timeout || mti_board_is_decided(comm->nccl.board))
            return mti_nccl_call_late(ctx, comm, waited);
        mti_rest(waited, 1e-3);
    }
    return result == ncclSuccess ? MT_SUCCESS : mti_nccl_fail(ctx, comm, result);
}

/* Ends a call that mti_nccl_enter has begun. Waits for it when the handle is non-blocking, as a caller's ncclComm_t may
   be, and as all are with NCCL_COMM_BLOCKING=0 in the environment. */
static mt_status mti_nccl_settle(mt_context *ctx, mt_comm *comm, ncclResult_t result) {
    double late = mti_nccl_exit(comm);
    return late > 0 ? mti_nccl_call_late(ctx, comm, late) : mti_nccl_poll(ctx, comm, comm->nccl.handle, result);
}

/* Runs an expression that calls NCCL on the handle of comm. */
#define MTI_NCCL_RUN(ctx, comm, call) (mti_nccl_enter(comm), mti_nccl_settle(ctx, comm, call))

/* Returns an error that NCCL, or the board, has found in a busy communicator after the call. */
static mt_status mti_nccl_ask(mt_context *ctx) {
    mt_comm *comm;
    for (comm = ctx->nccl; comm; comm = comm->nccl.next) {
        ncclResult_t state = ncclSuccess, asked;
        if (!comm->nccl.busy || comm->nccl.broken) continue;
        MT_TRY(mti_nccl_obey(ctx, comm));
        asked = ncclCommGetAsyncError(comm->nccl.handle, &state);
        if (asked != ncclSuccess) state = asked;
        if (state != ncclSuccess && state != ncclInProgress) return mti_nccl_fail(ctx, comm, state);
    }
    return MT_SUCCESS;
}

/* Returns 1 when comm has no work left. The caller has seen ctx->stream empty. */
static int mti_nccl_is_idle(const mt_context *ctx, const mt_comm *comm) {
    if (comm->nccl.stream == ctx->stream || cudaStreamQuery(comm->nccl.stream) == cudaSuccess) return 1;
    cudaGetLastError();
    return 0;
}

/* Waits for the context's stream if a communicator is busy, at most for the shortest timeout of the busy ones. */
static mt_status mti_nccl_wait(mt_context *ctx) {
    double timeout = -1, waited;
    mti_stopwatch watch;
    cudaError_t error;
    mt_comm *comm;
    for (comm = ctx->nccl; comm; comm = comm->nccl.next)
        if (comm->nccl.busy && (timeout < 0 || comm->nccl.timeout < timeout)) timeout = comm->nccl.timeout;
    if (timeout < 0) return MT_SUCCESS;
    watch = mti_stopwatch_start(timeout);
    for (;;) {
        error = cudaStreamQuery(ctx->stream);
        if (error == cudaErrorNotReady) cudaGetLastError(); /* clears cudaErrorNotReady */
        MT_TRY(mti_nccl_ask(ctx));
        if (error != cudaErrorNotReady) break;
        waited = mti_waited(&watch);
        if (waited > timeout) return mti_nccl_late(ctx, waited);
        mti_rest(waited, 1e-3);
    }
    MT_TRY(mti_cuda_check(ctx, error, "cudaStreamQuery"));
    for (comm = ctx->nccl; comm; comm = comm->nccl.next)
        if (comm->nccl.busy) comm->nccl.busy = !mti_nccl_is_idle(ctx, comm);
    return MT_SUCCESS;
}

/* After the launch of a graph, which may have work of every communicator. Its work is in the context's stream. */
static void mti_nccl_launched(mt_context *ctx) {
    mt_comm *comm;
    for (comm = ctx->nccl; comm; comm = comm->nccl.next) {
        if (comm->nccl.broken) continue;
        comm->nccl.busy = 1;
        comm->nccl.stream = ctx->stream;
        comm->nccl.last = mti_call_make(MTI_GRAPH_LAUNCH, NULL, NULL, 0, MT_U8);
    }
}

/* -- registration -- */

typedef struct mti_window {
    struct mti_window *next;
    mt_comm *comm;
    const char *memory;
    size_t bytes;
    void *buffer; /* the handle of ncclCommRegister; the other one is NULL */
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    ncclWindow_t window; /* the handle of ncclCommWindowRegister; the other one is NULL */
#endif
} mti_window;

/* Implements mt_comm_register. NCCL 2.27 or later registers the memory as a symmetric window. Its results are undefined
   when a buffer is in symmetric windows of several communicators. */
static mt_status mti_nccl_enlist(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes) {
    const char *begin = (const char *)memory;
    int version = 0;
    mti_window *w;
    if (ctx->allocator.alloc != mti_cuda_alloc || bytes < MTI_NCCL_MEMORY) return MT_SUCCESS;
    for (w = ctx->windows; w; w = w->next)
        if (begin < w->memory + w->bytes && w->memory < begin + bytes) return MT_SUCCESS;
    w = (mti_window *)mt_host_alloc(sizeof *w);
    if (!w) return mt_fail(ctx, MT_ERR_MEMORY, "no memory to register %zu bytes with \"%s\"", bytes, comm->name);
    w->comm = comm;
    w->memory = begin;
    w->bytes = bytes;
    w->next = ctx->windows;
    ctx->windows = w;
    ncclGetVersion(&version);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (version >= NCCL_VERSION(2, 27, 0)) {
        return MTI_NCCL_RUN(
            ctx, comm, ncclCommWindowRegister(comm->nccl.handle, memory, bytes, &w->window, NCCL_WIN_COLL_SYMMETRIC));
    }
#endif
    return MTI_NCCL_RUN(ctx, comm, ncclCommRegister(comm->nccl.handle, memory, bytes, &w->buffer));
}

/* Deregisters memory, and waits until this is done. After an error the communicator is broken. Both handles are NULL
   when the GPU or the system does not support registration. */
static void mti_window_end(mt_context *ctx, mti_window *w) {
    struct ncclComm *handle = w->comm->nccl.broken ? NULL : w->comm->nccl.handle; /* an abort deregisters */
    ncclResult_t result = ncclSuccess;
    mti_nccl_enter(w->comm);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (handle && w->window) result = ncclCommWindowDeregister(handle, w->window);
#endif
    if (handle && w->buffer) result = ncclCommDeregister(handle, w->buffer);
    mti_nccl_settle(ctx, w->comm, result);
    mt_host_free(w);
}

/* Deregisters the windows of comm (NULL: of all communicators) that start at `memory` (NULL: at any address). */
static void mti_nccl_forget(mt_context *ctx, const mt_comm *comm, const void *memory) {
    mti_window **at = &ctx->windows, *w;
    while ((w = *at) != NULL) {
        if ((comm && w->comm != comm) || (memory && w->memory != memory)) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        mti_window_end(ctx, w);
    }
}

/* -- beginning and end -- */

/* Creates a communicator without a handle. call: MTI_CREATE or MTI_SPLIT, for messages */
static mt_comm *mti_nccl_new(mt_context *ctx, int rank, int size, const char *name, double timeout_s, int call) {
    mt_comm *comm = mti_comm_new(&mti_over_nccl, rank, size, name);
    if (!comm) return NULL;
    comm->nccl.owned = 1;
    comm->nccl.timeout = timeout_s > 0 ? timeout_s : MT_TIMEOUT_DEFAULT;
    comm->nccl.ordinal = ctx->ordinal;
    comm->nccl.last.kind = call;
    return comm;
}

/* Finishes the creation of a communicator: adds comm to the context's list. Destroys comm if status is an error. */
static mt_status mti_nccl_begin(mt_context *ctx, mt_comm *comm, mt_status status, mt_comm **out) {
    comm->nccl.home = ctx;
    comm->nccl.next = ctx->nccl;
    ctx->nccl = comm;
    if (status == MT_SUCCESS) *out = comm;
    else mt_comm_destroy(comm);
    return status;
}

static void mti_nccl_unlink(mt_context *ctx, mt_comm *comm) {
    mt_comm **at;
    for (at = &ctx->nccl; *at != comm; at = &(*at)->nccl.next) continue;
    *at = comm->nccl.next;
}

static void mti_nccl_leave(mt_comm *comm, const char *reason) {
    mti_board_tell(comm, MTI_MESSAGE_LEFT, NULL, reason); /* without memory, the others see that the connection ends */
}

static void mti_nccl_destroy(mt_comm *comm) {
    mti_nccl *n = &comm->nccl;
    if (mti_is_forked(comm->process)) {
        mti_board_abandon(comm);
        return;
    }
    if (cudaSetDevice(n->ordinal) != cudaSuccess) cudaGetLastError();
    if (n->home) {
        if (n->busy && !n->broken) mti_cuda_synchronize(n->home); /* an error is ignored: comm is destroyed */
        if (n->recorded) mti_graphs_lose(n->home);                /* NCCL waits for the graphs that use comm to end */
        mti_nccl_forget(n->home, comm, NULL);
        mti_nccl_unlink(n->home, comm);
    }
    mti_board_close(comm);
    if (n->owned && n->handle && MTI_NCCL_RUN(NULL, comm, ncclCommFinalize(n->handle)) == MT_SUCCESS) {
        ncclCommDestroy(n->handle);
        n->handle = NULL; /* an error below must not abort it */
    }
    if (n->owned && n->opener && mti_nccl_poll(NULL, comm, n->opener, ncclCommFinalize(n->opener)) == MT_SUCCESS)
        ncclCommDestroy(n->opener);
    mti_watchdog_leave(comm);
}

/* Detaches all communicators from a context that is being destroyed. They can still be destroyed afterwards. */
static void mti_nccl_close(mt_context *ctx) {
    mti_nccl_forget(ctx, NULL, NULL);
    while (ctx->nccl) {
        ctx->nccl->nccl.home = NULL;
        ctx->nccl = ctx->nccl->nccl.next;
    }
}

/* -- collectives -- */

/* Returns 1 when a call inside an NCCL group has not failed. On a non-blocking communicator of the caller the call
   returns ncclInProgress, and so does ncclGroupEnd. */
static int mti_nccl_goes_on(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

static ncclResult_t mti_nccl_pair(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    struct ncclComm *handle = comm->nccl.handle;
    ncclResult_t result = ncclSuccess, end;
    ncclGroupStart(); /* ncclGroupEnd also returns the error of a call in the group */
    if (call->root >= 0) result = ncclSend(call->send, call->count, type, call->root, handle, ctx->stream);
    if (call->source >= 0 && mti_nccl_goes_on(result))
        result = ncclRecv(call->recv, call->recvcount, type, call->source, handle, ctx->stream);
    end = ncclGroupEnd();
    return mti_nccl_goes_on(result) ? end : result;
}

/* An all_gather or reduce_scatter whose blocks are not contiguous: one call per block, in one NCCL group. Rank r is the
   root of block r. */
static ncclResult_t mti_nccl_blocks(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    ncclRedOp_t op = call->op == MT_MAX ? ncclMax : ncclSum;
    size_t apart = call->stride * mt_dtype_size(call->dtype);
    struct ncclComm *handle = comm->nccl.handle;
    ncclResult_t result = ncclSuccess, end;
    int r;
    ncclGroupStart();
    for (r = 0; r < comm->size && mti_nccl_goes_on(result); r++) {
        if (call->kind == MT_ALL_GATHER)
            result = ncclBroadcast(call->send, (char *)call->recv + apart * (size_t)r, call->count, type, r, handle,
                                   ctx->stream);
        else
            result = ncclReduce((const char *)call->send + apart * (size_t)r, call->recv, call->count, type, op, r,
                                handle, ctx->stream);
    }
    end = ncclGroupEnd();
    return mti_nccl_goes_on(result) ? end : result;
}

/* Puts a call into the stream: calls the NCCL function for it. */
static ncclResult_t mti_nccl_issue(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    ncclRedOp_t op = call->op == MT_MAX ? ncclMax : ncclSum;
    struct ncclComm *handle = comm->nccl.handle;
    if ((call->kind == MT_ALL_GATHER || call->kind == MT_REDUCE_SCATTER) && call->stride != call->count)
        return mti_nccl_blocks(ctx, comm, call);
    switch (call->kind) {
    case MT_ALL_REDUCE: return ncclAllReduce(call->send, call->recv, call->count, type, op, handle, ctx->stream);
    case MT_REDUCE_SCATTER:
        return ncclReduceScatter(call->send, call->recv, call->count, type, op, handle, ctx->stream);
    case MT_ALL_GATHER: return ncclAllGather(call->send, call->recv, call->count, type, handle, ctx->stream);
    case MT_BROADCAST: return ncclBroadcast(call->send, call->recv, call->count, type, call->root, handle, ctx->stream);
    default: return mti_nccl_pair(ctx, comm, call);
    }
}

/* Returns 1 for reductions that the library does itself: of floats in invariant mode, where the order of additions is
   fixed, and MT_MAX of floats, which must keep a NaN. */
static int mti_nccl_is_ordered(const mt_context *ctx, const mti_call *call) {
    return mti_reduces(call) && call->dtype != MT_I32 && (ctx->invariant || call->op == MT_MAX);
}

/* Exchanges pieces between all ranks. With `out`: sends piece r to rank r, and stores every rank's copy of this rank's
   piece in `out`, n elements apart. Without `out`: sends this rank's result to all ranks, and stores their results in
   p->to. */
static ncclResult_t mti_nccl_exchange(mt_context *ctx, mt_comm *comm, const mti_call *call, const mti_pieces *p,
                                      char *out) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    struct ncclComm *handle = comm->nccl.handle;
    size_t mine = mti_piece_size(p, comm->rank), apart = (out ? p->n : p->stride) * p->element;
    ncclResult_t result = ncclSuccess, end;
    int r;
    ncclGroupStart();
    for (r = 0; r < comm->size && mti_nccl_goes_on(result); r++) {
        size_t theirs = mti_piece_size(p, r), send = out ? theirs : mine, recv = out ? mine : theirs;
        const char *from = out ? p->from + p->stride * p->element * (size_t)r : p->own;
        char *to = (out ? out : p->to) + apart * (size_t)r;
        if (r == comm->rank) continue;
        if (send > 0) result = ncclSend(from, send, type, r, handle, ctx->stream);
        if (recv > 0 && mti_nccl_goes_on(result)) result = ncclRecv(to, recv, type, r, handle, ctx->stream);
    }
    end = ncclGroupEnd();
    return mti_nccl_goes_on(result) ? end : result;
}

/* Reduces one chunk: gathers every rank's copy of this rank's piece in `scratch`, reduces the copies in the tree that
   the other transports use, and sends the result to all ranks if p->to is set. */
static mt_status mti_nccl_join(mt_context *ctx, mt_comm *comm, const mti_call *call, const mti_pieces *p,
                               char *scratch) {
    mti_cuda_buffers b;
    int r;
    MT_TRY(MTI_NCCL_RUN(ctx, comm, mti_nccl_exchange(ctx, comm, call, p, scratch)));
    b.ranks = comm->size;
    b.writers = 1;
    for (r = 0; r < comm->size; r++) b.send[r] = scratch + p->n * p->element * (size_t)r;
    b.send[comm->rank] = p->from + p->stride * p->element * (size_t)comm->rank;
    b.recv[0] = p->own;
    MT_TRY(mti_cuda_reduce_buffers(ctx, &b, mti_piece_size(p, comm->rank), call));
    return p->to ? MTI_NCCL_RUN(ctx, comm, mti_nccl_exchange(ctx, comm, call, p, NULL)) : MT_SUCCESS;
}

/* Runs the call in chunks. In each chunk, every rank gets a piece of at most `most` elements. */
static mt_status mti_nccl_chunks(mt_context *ctx, mt_comm *comm, const mti_call *call, size_t most, char *scratch) {
    size_t done = 0;
    mti_pieces p;
    while (done < call->count) {
        done += mti_pieces_next(comm, call, most, done, &p);
        MT_TRY(mti_nccl_join(ctx, comm, call, &p, scratch));
    }
    return MT_SUCCESS;
}

/* A reduction in the library's tree: NCCL only moves the data. */
static mt_status mti_nccl_reduce(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t ranks = (size_t)comm->size, element = mt_dtype_size(call->dtype), line = MTI_LINE / element, most;
    size_t needed = call->kind == MT_REDUCE_SCATTER ? call->count : (call->count + ranks - 1) / ranks;
    size_t mark = mt_arena_mark(ctx);
    void *scratch = NULL;
    mt_status status;
    MT_TRY(mti_cuda_check_ranks(ctx, comm, call));
    most = mti_pieces_most(comm, call, MTI_NCCL_SCRATCH);
    needed = (needed + line - 1) / line * line;
    if (needed < most) most = needed;
    MT_TRY(mt_arena_alloc(ctx, most * ranks * element, &scratch));
    status = mti_nccl_chunks(ctx, comm, call, most, (char *)scratch);
    mt_arena_release(
        ctx, mark); /* the stream may still use the scratch memory: later work in the same stream comes after that */
    return status;
}

/* Waits until all ranks have arrived: an all-reduce of one element, and a wait for the stream. */
static mt_status mti_nccl_barrier(mt_context *ctx, mt_comm *comm) {
    size_t mark = mt_arena_mark(ctx);
    void *one = NULL;
    mt_status status;
    MT_TRY(mt_arena_alloc(ctx, sizeof(int32_t), &one));
    status = mt_cuda_zero(ctx, one, sizeof(int32_t));
    if (status == MT_SUCCESS)
        status =
            MTI_NCCL_RUN(ctx, comm, ncclAllReduce(one, one, 1, ncclInt32, ncclSum, comm->nccl.handle, ctx->stream));
    if (status == MT_SUCCESS) status = mti_cuda_synchronize(ctx);
    mt_arena_release(ctx, mark);
    return status;
}

/* Begins a call, and tells the board about it. */
static mt_status mti_nccl_call_begin(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (comm->nccl.home != ctx)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: \"%s\" (%d ranks, over NCCL) belongs to another context",
                          mti_call_name(call->kind), comm->name, comm->size);
    if (comm->nccl.broken)
        return mti_refuse(
            ctx, comm, MT_ERR_PEER, "%s on \"%s\" (%d ranks): rank %d calls after this communicator failed with %s",
            mti_call_name(call->kind), comm->name, comm->size, comm->rank, mt_status_name(comm->nccl.broken));
    MT_TRY(mt_cuda_enter(ctx));
    mti_board_tell(comm, MTI_MESSAGE_CALL, call, NULL);
    comm->nccl.last = *call;
    MT_TRY(mti_nccl_obey(ctx, comm));
    comm->nccl.number = ++ctx->nccl_calls;
    comm->nccl.stream = ctx->stream;
    comm->nccl.busy = 1;
    comm->nccl.recorded |= ctx->recording;
    return MT_SUCCESS;
}

/* Runs a call: as a barrier, as a reduction in the library's tree, or as one call of NCCL. */
static mt_status mti_nccl_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    MT_TRY(mti_nccl_call_begin(ctx, comm, call));
    if (call->kind == MT_BARRIER) return mti_nccl_barrier(ctx, comm);
    if (mti_nccl_is_ordered(ctx, call)) return mti_nccl_reduce(ctx, comm, call);
    return MTI_NCCL_RUN(ctx, comm, mti_nccl_issue(ctx, comm, call));
}

/* -- splitting -- */

/* What the ranks tell each other before they create a communicator. Its size, and the place of the version, stay the
   same in all versions: NCCL gathers it, and other sizes would hang before the versions are compared. */
typedef struct mti_member {
    int32_t version; /* MT_VERSION_NUMBER */
    int32_t color, key;
    mti_listener listener;
} mti_member;

static mt_status mti_nccl_same_version(mt_context *ctx, const mt_comm *comm, const mti_member *all) {
    mti_text text;
    int r = 1;
    while (r < comm->size && all[r].version == all[0].version) r++;
    if (r >= comm->size) return MT_SUCCESS;
    text.used = 0;
    mti_say_versions(&text, all[0].version, r, all[r].version);
    return mt_fail(ctx, MT_ERR_MISMATCH, "\"%s\": %s", comm->name, text.data);
}

/* Gathers the members of all ranks in all [size], which holds this rank's member at the start. kind: MTI_SPLIT or
   MTI_CREATE, for the board and for messages */
static mt_status mti_nccl_members(mt_context *ctx, mt_comm *comm, int kind, mti_member *all) {
    size_t mark = mt_arena_mark(ctx), bytes = sizeof *all, at = bytes * (size_t)comm->rank;
    mti_call call, named = mti_call_make(kind, NULL, NULL, 0, MT_U8);
    void *gathered = NULL;
    mt_status status;
    all[comm->rank].version = MT_VERSION_NUMBER;
    MT_TRY(mt_arena_alloc(ctx, bytes * (size_t)comm->size, &gathered));
    call = mti_call_make(MT_ALL_GATHER, (char *)gathered + at, gathered, bytes, MT_U8);
    status = mti_cuda_copy(ctx, (char *)gathered + at, (char *)all + at, bytes);
    if (status == MT_SUCCESS) status = mti_nccl_call_begin(ctx, comm, &named);
    if (status == MT_SUCCESS) status = MTI_NCCL_RUN(ctx, comm, mti_nccl_issue(ctx, comm, &call));
    if (status == MT_SUCCESS) status = mti_cuda_fetch(ctx, all, gathered, bytes * (size_t)comm->size);
    mt_arena_release(ctx, mark);
    return status == MT_SUCCESS ? mti_nccl_same_version(ctx, comm, all) : status;
}

/* Returns the size of rank r's new group, and rank r's rank in it. Size 0: rank r has a negative color. */
static int mti_nccl_place(const mti_member *all, int ranks, int r, int *rank) {
    int32_t color = all[r].color, key = all[r].key;
    int size = 0, other;
    *rank = 0;
    for (other = 0; other < ranks && color >= 0; other++) {
        if (all[other].color != color) continue;
        *rank += all[other].key < key || (all[other].key == key && other < r);
        size++;
    }
    return size;
}

/* Connects the ranks of comm, a group of the ranks that `all` describes with this color. listener: of this rank */
static mt_status mti_nccl_connect(mt_context *ctx, mt_comm *comm, int color, const mti_member *all, int ranks,
                                  int listener) {
    int r = 0, rank;
    if (ctx->no_nccl_checks) return MT_SUCCESS;
    while (r < ranks && (all[r].color != color || (mti_nccl_place(all, ranks, r, &rank), rank) != 0)) r++;
    return mti_board_open(ctx, comm, listener, &all[r].listener);
}

/* Splits the blocking handle of child, or nothing if child is NULL, from comm. Waits until both are ready. The handle
   of the child is valid only when the call on the parent has completed. */
static mt_status mti_nccl_carve(mt_context *ctx, mt_comm *comm, int color, int rank, mt_comm *child) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    struct ncclComm *opener = comm->nccl.opener, *none = NULL, **handle = child ? &child->nccl.handle : &none;
    int taken = child ? color : NCCL_SPLIT_NOCOLOR;
    config.blocking = 1;
    if (opener) MT_TRY(mti_nccl_poll(ctx, comm, opener, ncclCommSplit(opener, taken, rank, handle, &config)));
    else MT_TRY(MTI_NCCL_RUN(ctx, comm, ncclCommSplit(comm->nccl.handle, taken, rank, handle, &config)));
    return child ? mti_nccl_poll(ctx, child, *handle, ncclInProgress) : MT_SUCCESS;
}

/* mti_nccl_carve creates the groups of two or more ranks. If there is such a group, all ranks of comm must call it. */
static mt_status mti_nccl_divide(mt_context *ctx, mt_comm *comm, int color, const mti_member *all, const char *name,
                                 mt_comm **out) {
    mt_comm *child = NULL;
    mt_status status = MT_SUCCESS;
    int rank, ignored, r = 0, size = mti_nccl_place(all, comm->size, comm->rank, &rank);
    while (r < comm->size && mti_nccl_place(all, comm->size, r, &ignored) < 2) r++;
    if (size == 1) *out = mti_comm_new(&mti_alone, 0, 1, name);
    if (r == comm->size) return MT_SUCCESS;
    if (size > 1) child = mti_nccl_new(ctx, rank, size, name, comm->nccl.timeout, MTI_SPLIT);
    if (size > 1 && !child) return MT_SUCCESS; /* *out is NULL: mt_comm_split returns MT_ERR_MEMORY */
    if (child) status = mti_watchdog_join(ctx, child);
    comm->nccl.last.kind = MTI_SPLIT;
    if (status == MT_SUCCESS) status = mti_nccl_carve(ctx, comm, color, rank, child);
    return child ? mti_nccl_begin(ctx, child, status, out) : status;
}

/* Ends a creation that has failed after `status`, or connects the ranks of the new communicator. */
static mt_status mti_nccl_finish(mt_context *ctx, mt_status status, int color, const mti_member *all, int ranks,
                                 int listener, mt_comm **out) {
    if (status == MT_SUCCESS && *out && (*out)->transport == &mti_over_nccl)
        status = mti_nccl_connect(ctx, *out, color, all, ranks, listener);
    if (listener >= 0) close(listener);
    if (status == MT_SUCCESS) return status;
    mt_comm_destroy(*out);
    *out = NULL;
    return status;
}

/* Gathers the colors and keys of all ranks, and then creates the groups. */
static mt_status mti_nccl_split(mt_comm *comm, int color, int key, mt_comm **out) {
    mt_context *ctx = comm->nccl.home;
    mti_member *all;
    char name[32];
    mt_status status;
    int listener = -1;
    if (!ctx)
        return mti_refuse(NULL, comm, MT_ERR_ARGUMENT, "mt_comm_split: the context of \"%s\" has been destroyed",
                          comm->name);
    all = (mti_member *)calloc((size_t)comm->size, sizeof *all);
    if (!all) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "mt_comm_split: no memory for %d colors", comm->size);
    if (color >= 0 && !ctx->no_nccl_checks) listener = mti_listener_open(&all[comm->rank].listener);
    all[comm->rank].color = color;
    all[comm->rank].key = key;
    if (snprintf(name, sizeof name, "%s/%d", comm->name, color) < 0) name[0] = '\0';
    status = mti_nccl_members(ctx, comm, MTI_SPLIT, all);
    if (status == MT_SUCCESS) status = mti_nccl_divide(ctx, comm, color, all, name, out);
    status = mti_nccl_finish(ctx, status, color, all, comm->size, listener, out);
    free(all);
    return status == MT_SUCCESS ? status : mt_comm_fail(comm, status, mt_last_error(ctx));
}

/* -- creating -- */

static mt_status mti_nccl_check_context(mt_context *ctx, const char *function, const void *argument, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!argument || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, out ? "its argument" : "out");
    if (ctx->device != MT_DEVICE_CUDA)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the context is on device %d; NCCL needs MT_DEVICE_CUDA", function,
                       (int)ctx->device);
    return mt_cuda_enter(ctx);
}

MT_API mt_status mt_nccl_unique_id(mt_context *ctx, mt_nccl_id *out) {
    ncclUniqueId id;
    ncclResult_t result;
    char reason[MTI_NCCL_REASON];
    MT_TRY(mti_nccl_check_context(ctx, "mt_nccl_unique_id", out, out));
    result = ncclGetUniqueId(&id);
    if (result != ncclSuccess)
        return mt_fail(ctx, mti_nccl_status(result), "mt_nccl_unique_id: %s", mti_nccl_reason(result, NULL, reason));
    memcpy(out->bytes, id.internal, sizeof out->bytes);
    return MT_SUCCESS;
}

/* Tells the ranks of a new communicator the listener of rank 0, and connects them. Destroys *out on failure. */
static mt_status mti_nccl_meet(mt_context *ctx, mt_comm **out) {
    mt_comm *comm = *out;
    mti_member *all;
    mt_status status;
    int listener;
    if (ctx->no_nccl_checks || comm->size == 1) return MT_SUCCESS;
    all = (mti_member *)calloc((size_t)comm->size, sizeof *all);
    listener = all ? mti_listener_open(&all[comm->rank].listener) : -1;
    status = all ? mti_nccl_members(ctx, comm, MTI_CREATE, all)
                 : mt_fail(ctx, MT_ERR_MEMORY, "no memory for the addresses of %d ranks", comm->size);
    status = mti_nccl_finish(ctx, status, 0, all, comm->size, listener, out);
    free(all);
    return status;
}

/* Creates a communicator from an id, over NCCL also for one rank, as the tests need it. *out is NULL. */
static mt_status mti_nccl_create(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                 mt_comm **out) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId unique;
    mt_comm *comm;
    mt_status status;
    comm = mti_nccl_new(ctx, rank, ranks, "world", timeout_s, MTI_CREATE);
    if (!comm) return mt_fail(ctx, MT_ERR_MEMORY, "mt_comm_create_nccl_id: no memory for the communicator");
    memcpy(unique.internal, id->bytes, sizeof id->bytes);
    config.blocking = 0;
    status = mti_watchdog_join(ctx, comm);
    if (status == MT_SUCCESS) {
        ncclResult_t result = ncclCommInitRankConfig(&comm->nccl.opener, ranks, unique, rank, &config);
        status = mti_nccl_poll(ctx, comm, comm->nccl.opener, result);
    }
    if (status == MT_SUCCESS) status = mti_nccl_carve(ctx, comm, 0, rank, comm);
    MT_TRY(mti_nccl_begin(ctx, comm, status, out));
    return mti_nccl_meet(ctx, out);
}

MT_API mt_status mt_comm_create_nccl_id(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                        mt_comm **out) {
    if (out) *out = NULL;
    MT_TRY(mti_nccl_check_context(ctx, "mt_comm_create_nccl_id", id, out));
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_comm_create_nccl_id: rank %d of %d ranks", rank, ranks);
    if (ranks == 1) return (*out = mti_comm_new(&mti_alone, 0, 1, "world")) != NULL ? MT_SUCCESS : MT_ERR_MEMORY;
    return mti_nccl_create(ctx, id, ranks, rank, timeout_s, out);
}

/* Creates a communicator over the caller's ncclComm_t, also for one rank, as above. *out is NULL. */
static mt_status mti_nccl_wrap(mt_context *ctx, struct ncclComm *nccl, int size, int rank, double timeout_s,
                               mt_comm **out) {
    mt_comm *comm = mti_nccl_new(ctx, rank, size, "world", timeout_s, MTI_CREATE);
    if (!comm) return mt_fail(ctx, MT_ERR_MEMORY, "mt_comm_create_nccl: no memory for the communicator");
    comm->nccl.handle = nccl;
    comm->nccl.owned = 0;
    MT_TRY(mti_nccl_begin(ctx, comm, MT_SUCCESS, out));
    return mti_nccl_meet(ctx, out);
}

MT_API mt_status mt_comm_create_nccl(mt_context *ctx, struct ncclComm *nccl, double timeout_s, mt_comm **out) {
    int size = 0, rank = 0, device = -1;
    ncclResult_t result;
    char reason[MTI_NCCL_REASON];
    if (out) *out = NULL;
    MT_TRY(mti_nccl_check_context(ctx, "mt_comm_create_nccl", nccl, out));
    result = ncclCommCount(nccl, &size);
    if (result == ncclSuccess) result = ncclCommUserRank(nccl, &rank);
    if (result == ncclSuccess) result = ncclCommCuDevice(nccl, &device);
    if (result != ncclSuccess)
        return mt_fail(ctx, mti_nccl_status(result), "mt_comm_create_nccl: %s", mti_nccl_reason(result, nccl, reason));
    if (device != ctx->ordinal)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_comm_create_nccl: the communicator is on GPU %d, the context on GPU %d", device,
                       ctx->ordinal);
    if (size == 1) return (*out = mti_comm_new(&mti_alone, 0, 1, "world")) != NULL ? MT_SUCCESS : MT_ERR_MEMORY;
    return mti_nccl_wrap(ctx, nccl, size, rank, timeout_s, out);
}
#else /* not built */
#if MT_HAS_CUDA
static void mti_nccl_launched(mt_context *ctx) { (void)ctx; }
static mt_status mti_nccl_wait(mt_context *ctx) { return (void)ctx, MT_SUCCESS; }
static void mti_nccl_close(mt_context *ctx) { (void)ctx; }
static void mti_nccl_forget(mt_context *ctx, const mt_comm *comm, const void *memory) {
    (void)ctx, (void)comm, (void)memory;
}
#endif
static mt_status mti_nccl_unbuilt(mt_context *ctx, const char *function, mt_comm **out) {
    if (out) *out = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                   "%s: NCCL is not built into this program: compile the implementation with nvcc, as a .cu file, with "
                   "-DMT_USE_NCCL, and link with -lnccl",
                   function);
}
MT_API mt_status mt_nccl_unique_id(mt_context *ctx, mt_nccl_id *out) {
    return (void)out, mti_nccl_unbuilt(ctx, "mt_nccl_unique_id", NULL);
}
MT_API mt_status mt_comm_create_nccl_id(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                        mt_comm **out) {
    return (void)id, (void)ranks, (void)rank, (void)timeout_s, mti_nccl_unbuilt(ctx, "mt_comm_create_nccl_id", out);
}
MT_API mt_status mt_comm_create_nccl(mt_context *ctx, struct ncclComm *nccl, double timeout_s, mt_comm **out) {
    return (void)nccl, (void)timeout_s, mti_nccl_unbuilt(ctx, "mt_comm_create_nccl", out);
}
#endif

/* -- from threads, or processes, to NCCL -- */

/* What each rank tells the others when threads, or processes over MPI, create a communicator over NCCL. `status` and
   `id` are those of mt_nccl_unique_id; only rank 0 calls it. */
typedef struct mti_place {
    int device, ordinal;
    mt_status status;
    mt_nccl_id id;
} mti_place;

/* Exchanges the places of all ranks. *first: the place of rank 0; *own_gpus: 1 when all contexts are on GPUs, and no
   two threads use the same GPU. Processes are not compared, because each may number the GPUs in its own way; NCCL
   detects a GPU that two of them use. */
static mt_status mti_meet_places(mt_context *ctx, mt_comm *local, const mti_place *mine, mti_place *first,
                                 int *own_gpus) {
    mti_call call;
    int r, other;
    memset(&call, 0, sizeof call);
    call.kind = MTI_CREATE;
    call.dtype = MT_U8;
    call.count = sizeof *mine;
    call.send = mine;
    MT_TRY((local->transport->enter)(ctx, local, &call));
    *own_gpus = 1;
    for (r = 0; r < local->size; r++) {
        const mti_place *p = (const mti_place *)mti_slot_of(local->group, r)->send;
        if (r == 0) *first = *p;
        if (p->device != (int)MT_DEVICE_CUDA) *own_gpus = 0;
        for (other = 0; other < r && local->transport->are_threads; other++)
            if (((const mti_place *)mti_slot_of(local->group, other)->send)->ordinal == p->ordinal) *own_gpus = 0;
    }
    (local->transport->exit)(local);
    return MT_SUCCESS;
}

/* For threads, and for processes over MPI. Leaves *out NULL when NCCL is not built, or own_gpus is 0. */
static mt_status mti_group_over_nccl(mt_context *ctx, mt_comm *world, mt_comm **out) {
    mti_place mine, first;
    int own_gpus = 0;
    if (!MTI_NCCL) return MT_SUCCESS;
    memset(&mine, 0, sizeof mine);
    mine.device = (int)ctx->device;
    mine.ordinal = ctx->ordinal;
    if (world->rank == 0 && ctx->device == MT_DEVICE_CUDA) mine.status = mt_nccl_unique_id(ctx, &mine.id);
    MT_TRY(mti_meet_places(ctx, world, &mine, &first, &own_gpus));
    if (!own_gpus) return MT_SUCCESS;
    if (first.status != MT_SUCCESS)
        return world->rank == 0 ? first.status
                                : mti_refuse(ctx, world, MT_ERR_PEER, "mt_comm_create_for: rank 0 has no id from NCCL");
    return mt_comm_create_nccl_id(ctx, &first.id, world->size, world->rank, world->group->timeout, out);
}

/* For processes without MPI. Each rank makes the same id, from NCCL_COMM_ID in the environment. */
static mt_status mti_processes_over_nccl(mt_context *ctx, mt_comm *world, mt_comm **out) {
    mt_nccl_id id;
    if (!MTI_NCCL || ctx->device != MT_DEVICE_CUDA)
        return mti_refuse_apart(ctx, world, "comm_create_for", (int)ctx->device);
    if (!getenv("NCCL_COMM_ID"))
        return mti_refuse(
            ctx, world, MT_ERR_ARGUMENT,
            "mt_comm_create_for: the %d ranks of \"%s\" do not know where to meet: set NCCL_COMM_ID to "
            "host:port, or MASTER_ADDR and MASTER_PORT, the same on all of them, on the machine of rank 0",
            world->size, world->name);
    MT_TRY(mt_nccl_unique_id(ctx, &id));
    return mt_comm_create_nccl_id(ctx, &id, world->size, world->rank, world->timeout, out);
}

static mt_status mti_refuse_over_nccl(mt_context *ctx, mt_comm *world, mt_comm **out) {
    (void)out;
    return mti_refuse(ctx, world, MT_ERR_ARGUMENT,
                      "mt_comm_create_for: \"%s\" is not a communicator of a launcher or of threads", world->name);
}

static mt_status mti_stays(mt_context *ctx, mt_comm *comm, mt_comm **out) {
    return (void)ctx, (void)comm, (void)out, MT_SUCCESS;
}

/* Where over_nccl leaves *out NULL, *out is split from world with the same ranks. */
static mt_status mti_comm_create_for(mt_context *ctx, mt_comm *world, mt_comm **out) {
    if (!ctx || !world || !out)
        return mti_refuse(ctx, world, MT_ERR_ARGUMENT, "mt_comm_create_for: %s is NULL",
                          !ctx     ? "ctx"
                          : !world ? "world"
                                   : "out");
    MT_TRY(mti_check_process(ctx, world, "comm_create_for"));
    MT_TRY((world->transport->over_nccl)(ctx, world, out));
    if (*out) mti_adopt(world, *out);
    else MT_TRY(mt_comm_split(world, 0, world->rank, out));
    mt_comm_set_name(*out, world->name);
    (*out)->is_named = world->is_named;
    return MT_SUCCESS;
}

MT_API mt_status mt_comm_create_for(mt_context *ctx, mt_comm *world, mt_comm **out) {
    int before = mti_hold();
    mt_status status;
    if (out) *out = NULL;
    status = mti_comm_create_for(ctx, world, out);
    mti_release(before);
    return status;
}

MT_API mt_status mt_comm_register(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!comm) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_comm_register: comm is NULL");
    MT_TRY(mti_check_process(ctx, comm, "comm_register"));
    return (comm->transport->enlist)(ctx, comm, memory, bytes);
}

MT_API mt_status mt_arena_register(mt_context *ctx, mt_comm *comm) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!comm) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_arena_register: comm is NULL");
    return ctx->arena_symmetric ? mt_comm_register(ctx, comm, ctx->arena, ctx->arena_bytes) : MT_SUCCESS;
}

static mt_status mti_no_enlist(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes) {
    return (void)ctx, (void)comm, (void)memory, (void)bytes, MT_SUCCESS;
}

/* ---- >>mpi ------------------------------------------------------------------------------------------------------- */

/* Ranks are processes. A port is a duplicate of the caller's MPI_Comm. A world and all groups split from it share one
   port: a group is a list of ranks, and a number that is part of its tags. So creating, splitting and leaving a group
   needs only messages, and no collective call of MPI, which would wait for dead ranks.

   A collective: each rank sends every other rank a header that describes its call in the form of a slot, followed by up
   to MTI_MPI_SMALL bytes of data. Then it waits for the headers of all other ranks, and compares the calls. So each
   process fills its own copy of the slots that threads share (>>local), and writes the same error messages. Larger data
   follow when all headers have arrived. A large reduction divides the buffer into one piece per rank: each rank
   receives its piece from all other ranks, reduces it in the tree of >>local, and for an all_reduce sends the result to
   all ranks. Point to point: both ranks send a header, then the data follow.

   Notes are messages between ports that say at any time that a group has broken or a rank has left. No wait for a rank
   blocks inside MPI: requests are tested until they are done, the timeout has expired, or a note says that they will
   never be done. */

#if MTI_MPI
/* Bytes of data behind a header: the message is smaller than 4 KiB, which MPI libraries send eagerly. */
#define MTI_MPI_SMALL ((size_t)3968)
#define MTI_MPI_SCRATCH ((size_t)4 << 20)  /* bytes per group for received pieces; only used pages take memory */
#define MTI_MPI_MESSAGE ((size_t)16 << 20) /* most bytes of one message: MPI counts bytes in an int */
#define MTI_MPI_SOON 1e-3    /* seconds for which a wait polls without sleeping; it yields where ranks share cores */
#define MTI_MPI_LISTEN 50e-6 /* seconds for which a wait polls only the requests of its call, and no notes */
#define MTI_MPI_GRACE 2.0    /* seconds to wait for other ranks to close their ports when a group has broken */

/* The kinds of messages: the low two bits of a tag. The bits above are the number of the group. Tag 0 is for notes. */
#define MTI_MPI_MEET 0  /* header of a collective */
#define MTI_MPI_OFFER 1 /* header from a sender to its receiver */
#define MTI_MPI_ASK 2   /* header from a receiver to its sender */
#define MTI_MPI_DATA 3

#define MTI_MPI_OPEN 1 /* mti_mpi_port.status of a rank that has not closed its port; errors are negative */

typedef struct mti_mpi_message {
    uint64_t what, count, recvcount; /* as in a slot */
    int color, key;
    int next; /* the lowest group number that the sender has not used yet */
    unsigned char apart[28];
    unsigned char data[MTI_MPI_SMALL];
} mti_mpi_message;

#define MTI_MPI_HEADER offsetof(mti_mpi_message, data)

/* The news of a note: a group has broken; a rank has left a group, or, with mti_mpi_note.everywhere, all its groups; a
   rank closes its port. */
typedef enum mti_mpi_news { MTI_MPI_BROKEN, MTI_MPI_LEFT, MTI_MPI_CLOSES } mti_mpi_news;

typedef struct mti_mpi_note {
    int news, group, rank, status; /* rank: in the group; in the port for `everywhere` and MTI_MPI_CLOSES */
    int everywhere;
    int keeps, broken; /* MTI_MPI_CLOSES: these fields of the sender's port */
    char text[MT_ERROR_BYTES + 64];
} mti_mpi_note;

typedef struct mti_mpi_port {
    MPI_Comm comm;
    int rank, size, last_tag, next, spin, local_rank;
    int references;         /* number of groups */
    int keeps;              /* 1: on some rank, MPI still holds requests of a call that was given up */
    int broken;             /* 1: on some rank, a group has broken: there may be messages that no rank has received */
    int closed;             /* number of ranks that have closed their ports, this rank included */
    int *status;            /* [size] the status with which each rank has closed its port, or MTI_MPI_OPEN */
    double timeout, waited; /* waited: seconds that mti_mpi_close has waited for the other ranks */
    /* groups: list of the groups in use; ended: list of destroyed groups whose memory MPI may still use, for instance
       for their last notes */
    struct mti_mpi *groups, *ended;
    const char **left;     /* [size] why a rank has left all its groups; NULL: it has not left */
    mti_mpi_note *reasons; /* [size] the notes whose text `left` points to */
    mti_mpi_note *early;   /* notes on a new group whose split this rank has not finished */
    int early_count;
    mti_mpi_note inbox, closing;
    MPI_Request inbox_request, *closing_requests;
    int32_t version, *versions; /* MT_VERSION_NUMBER of this rank, and of all [size] */
} mti_mpi_port;

/* What a request is for. */
typedef struct mti_mpi_about {
    int peer, receives;
    mti_mpi_message *header; /* the header to receive; NULL: the request receives data, or sends */
    int inside;              /* the peer's mti_slot.inside after the header has arrived */
} mti_mpi_about;

typedef struct mti_mpi {
    mti_mpi_port *port;
    mt_comm *comm;
    struct mti_mpi *next;
    int size, number;
    int count, active, error; /* requests of the current call: their number, how many are not done, an MPI error */
    mti_stopwatch watch;      /* measures the time without progress */
    int *world;               /* [size] the rank of each rank in the port */
    int *indices;
    MPI_Status *statuses;
    MPI_Request *requests;
    mti_mpi_about *about;
    mti_mpi_message *in, *out; /* in: [size] the header received from each rank; out: this rank's header */
    /* asked: the header of the receiver of this rank's message; other: a header of another kind than this rank waits
       for, see mti_mpi_look_around */
    mti_mpi_message *asked, *other;
    char *scratch;
    mti_mpi_note *reasons, notes[2]; /* reasons: [size] why each rank has left; notes: this rank's, by mti_mpi_news */
    MPI_Request *note_requests;
} mti_mpi;

/* -- requests -- */

/* Adds request `at`, which an MPI call has started with the result `error`, to the requests of the current call. */
static void mti_mpi_post(mt_comm *comm, int at, int peer, int receives, mti_mpi_message *header, int inside,
                         int error) {
    mti_mpi *m = comm->mpi;
    m->about[at].peer = peer;
    m->about[at].receives = receives;
    m->about[at].header = header;
    m->about[at].inside = inside;
    if (m->count <= at) m->count = at + 1;
    m->active++;
    if (error != MPI_SUCCESS && !m->error) m->error = error;
}

static int mti_mpi_tag(const mti_mpi *m, int kind) { return 4 * m->number + kind; }

static void mti_mpi_send(mt_comm *comm, int at, const void *data, size_t bytes, int peer, int kind) {
    mti_mpi *m = comm->mpi;
    mti_mpi_post(
        comm, at, peer, 0, NULL, 0,
        MPI_Isend(data, (int)bytes, MPI_BYTE, m->world[peer], mti_mpi_tag(m, kind), m->port->comm, &m->requests[at]));
}

static void mti_mpi_receive(mt_comm *comm, int at, void *data, size_t bytes, int peer) {
    mti_mpi *m = comm->mpi;
    mti_mpi_post(comm, at, peer, 1, NULL, 0,
                 MPI_Irecv(data, (int)bytes, MPI_BYTE, m->world[peer], mti_mpi_tag(m, MTI_MPI_DATA), m->port->comm,
                           &m->requests[at]));
}

/* Starts to receive a peer's header. */
static void mti_mpi_expect(mt_comm *comm, int at, mti_mpi_message *header, int peer, int kind) {
    mti_mpi *m = comm->mpi;
    mti_mpi_post(comm, at, peer, 1, header, kind == MTI_MPI_MEET ? MTI_IN_COLLECTIVE : MTI_IN_P2P,
                 MPI_Irecv(header, (int)sizeof *header, MPI_BYTE, m->world[peer], mti_mpi_tag(m, kind), m->port->comm,
                           &m->requests[at]));
}

static int mti_mpi_is_done(const mt_comm *comm, int at) { return comm->mpi->requests[at] == MPI_REQUEST_NULL; }

/* Writes a received header to the slot of its sender. */
static void mti_mpi_arrived(mt_comm *comm, const mti_mpi_message *header, int peer, int inside) {
    mti_slot *slot = mti_slot_of(comm->group, peer);
    slot->what = header->what;
    slot->count = header->count;
    slot->recvcount = header->recvcount;
    slot->color = header->color;
    slot->key = header->key;
    slot->send = header->data;
    slot->inside = inside;
}

/* Returns 1 when a request has completed since the last test, or when no request is active. */
static int mti_mpi_test(mt_comm *comm) {
    mti_mpi *m = comm->mpi;
    int done = 0, i, error;
    if (m->active == 0) return 1;
    error = MPI_Testsome(m->count, m->requests, &done, m->indices, m->statuses);
    if (error != MPI_SUCCESS && error != MPI_ERR_IN_STATUS) m->error = error;
    if (done == MPI_UNDEFINED) return m->active = 0, 1;
    for (i = 0; i < done; i++) {
        const mti_mpi_about *about = &m->about[m->indices[i]];
        if (error == MPI_ERR_IN_STATUS && m->statuses[i].MPI_ERROR != MPI_SUCCESS) m->error = m->statuses[i].MPI_ERROR;
        else if (about->header) mti_mpi_arrived(comm, about->header, about->peer, about->inside);
    }
    m->active -= done;
    return done > 0;
}

/* -- notes -- */

/* Marks a rank of a group as left. */
static void mti_mpi_take_left(mti_mpi *m, int rank, const char *reason) {
    mti_slot *slot = mti_slot_of(m->comm->group, rank);
    if (slot->left) return;
    slot->left = reason;
    m->comm->group->left_count++;
}

/* Returns the rank in the group of rank `world` of the port; -1: not a member. */
static int mti_mpi_member(const mti_mpi *m, int world) {
    int r = 0;
    while (r < m->comm->size && m->world[r] != world) r++;
    return r < m->comm->size ? r : -1;
}

/* Marks a rank of the port as left in all its groups. */
static void mti_mpi_take_everywhere(mti_mpi_port *port, const mti_mpi_note *note) {
    mti_mpi *m;
    if (port->left[note->rank]) return;
    port->reasons[note->rank] = *note;
    port->left[note->rank] = port->reasons[note->rank].text;
    for (m = port->groups; m; m = m->next)
        if (mti_mpi_member(m, note->rank) >= 0)
            mti_mpi_take_left(m, mti_mpi_member(m, note->rank), port->left[note->rank]);
}

static void mti_mpi_take_broken(mti_mpi *m, const mti_mpi_note *note) {
    mti_text text;
    text.used = 0;
    mti_say(&text, "%s", note->text);
    mti_break(m->comm->group, (mt_status)note->status, &text, MTI_ANY);
    m->port->broken = 1;
}

/* Keeps a note on a new group whose split this rank has not finished. Drops a note on a group that this rank has
   destroyed. */
static void mti_mpi_take_early(mti_mpi_port *port, const mti_mpi_note *note) {
    if (note->group >= port->next && port->early_count < 2 * port->size) port->early[port->early_count++] = *note;
}

/* Handles one note. */
static void mti_mpi_take_note(mti_mpi_port *port, const mti_mpi_note *note) {
    mti_mpi *m = port->groups;
    while (m && m->number != note->group) m = m->next;
    if (note->news == MTI_MPI_CLOSES) {
        port->status[note->rank] = note->status;
        port->keeps |= note->keeps;
        port->broken |= note->broken;
        port->closed++;
    } else if (note->everywhere) {
        mti_mpi_take_everywhere(port, note);
    } else if (!m) {
        mti_mpi_take_early(port, note);
    } else if (note->news == MTI_MPI_BROKEN) {
        mti_mpi_take_broken(m, note);
    } else if (!mti_slot_of(m->comm->group, note->rank)->left) {
        m->reasons[note->rank] = *note;
        mti_mpi_take_left(m, note->rank, m->reasons[note->rank].text);
    }
}

static int mti_mpi_open_inbox(mti_mpi_port *port) {
    return MPI_Irecv(&port->inbox, (int)sizeof port->inbox, MPI_BYTE, MPI_ANY_SOURCE, 0, port->comm,
                     &port->inbox_request);
}

/* Receives and handles all notes that have arrived. */
static void mti_mpi_listen(mti_mpi_port *port) {
    int came = 1;
    while (port->inbox_request != MPI_REQUEST_NULL) {
        if (MPI_Test(&port->inbox_request, &came, MPI_STATUS_IGNORE) != MPI_SUCCESS || !came) return;
        mti_mpi_take_note(port, &port->inbox);
        if (mti_mpi_open_inbox(port) != MPI_SUCCESS) port->inbox_request = MPI_REQUEST_NULL;
    }
}

/* Sends a note to all other ranks of the group. Each kind of news is sent at most once, because MPI keeps using the
   note's memory. */
static void mti_mpi_tell(mt_comm *comm, mti_mpi_news news, mt_status status, const char *text, int everywhere) {
    mti_mpi *m = comm->mpi;
    mti_mpi_note *note = &m->notes[news];
    int r;
    note->news = (int)news;
    note->group = m->number;
    note->rank = everywhere ? m->port->rank : comm->rank;
    note->status = (int)status;
    note->everywhere = everywhere;
    snprintf(note->text, sizeof note->text, "%s", text);
    for (r = 0; r < comm->size; r++)
        if (r != comm->rank)
            MPI_Isend(note, (int)sizeof *note, MPI_BYTE, m->world[r], 0, m->port->comm,
                      &m->note_requests[(int)news * comm->size + r]);
}

static void mti_mpi_leave(mt_comm *comm, const char *reason) {
    if (!mti_mark_left(comm, reason)) return;
    mti_mpi_tell(comm, MTI_MPI_LEFT, MT_SUCCESS, reason, comm->owner && comm->owner->world == comm);
}

/* -- failing -- */

/* Cancels the receives that have not begun. Requests that have begun stay with MPI, with their memory: port->keeps. */
static void mti_mpi_abandon(mt_comm *comm) {
    mti_mpi *m = comm->mpi;
    int i;
    for (i = 0; i < m->count; i++) {
        m->about[i].header = NULL; /* mti_mpi_test must not read a header that was cancelled */
        if (m->requests[i] != MPI_REQUEST_NULL && m->about[i].receives) MPI_Cancel(&m->requests[i]);
    }
    while (m->active > 0 && mti_mpi_test(comm)) continue;
    if (m->active > 0) m->port->keeps = 1;
}

/* Ends a call with an error, and breaks the group with this message. If the group has broken before, the earlier status
   and message stay. */
static mt_status mti_mpi_fail(mt_context *ctx, mt_comm *comm, mt_status status, const mti_text *text) {
    if (!mti_is_broken(comm->group)) {
        mti_break(comm->group, status, text, MTI_ANY);
        mti_mpi_tell(comm, MTI_MPI_BROKEN, status, comm->group->text, 0);
    }
    comm->mpi->port->broken = 1;
    mti_mpi_abandon(comm);
    mti_set_inside(comm, MTI_OUTSIDE);
    return mti_broken_now(ctx, comm);
}

static mt_status mti_mpi_error(mt_context *ctx, mt_comm *comm) {
    char why[MPI_MAX_ERROR_STRING];
    int length = 0;
    mti_text text;
    text.used = 0;
    mti_say_mine(&text, comm);
    if (MPI_Error_string(comm->mpi->error, why, &length) != MPI_SUCCESS) length = 0;
    mti_say(&text, "rank %d: MPI: %.*s", comm->rank, length, why);
    return mti_mpi_fail(ctx, comm, MT_ERR_PEER, &text);
}

/* Returns the next request after `after` that waits for a header; -1: none. */
static int mti_mpi_missing(const mt_comm *comm, int after) {
    int i;
    for (i = after + 1; i < comm->mpi->count; i++)
        if (!mti_mpi_is_done(comm, i) && comm->mpi->about[i].header) return i;
    return -1;
}

/* Returns a rank that has left and whose header is still missing; -1: none. */
static int mti_mpi_gone(const mt_comm *comm) {
    int i = -1;
    if (comm->group->left_count == 0) return -1;
    while ((i = mti_mpi_missing(comm, i)) >= 0)
        if (mti_slot_of(comm->group, comm->mpi->about[i].peer)->left) return comm->mpi->about[i].peer;
    return -1;
}

/* Finds out what the missing ranks have called instead: receives headers of another kind than this rank waits for. */
static void mti_mpi_look_around(mt_comm *comm) {
    mti_mpi *m = comm->mpi;
    MPI_Message message;
    int r, kind, there;
    for (r = 0; r < comm->size; r++) {
        for (kind = MTI_MPI_MEET; kind < MTI_MPI_DATA && r != comm->rank; kind++) {
            there = 0;
            if (mti_slot_of(comm->group, r)->inside) continue;
            if (MPI_Improbe(m->world[r], mti_mpi_tag(m, kind), m->port->comm, &there, &message, m->statuses) !=
                    MPI_SUCCESS ||
                !there)
                continue;
            MPI_Mrecv(m->other, (int)sizeof *m->other, MPI_BYTE, &message, m->statuses);
            mti_mpi_arrived(comm, m->other, r, kind == MTI_MPI_MEET ? MTI_IN_COLLECTIVE : MTI_IN_P2P);
        }
    }
}

/* Writes the ranks whose data have not arrived, or that have not received this rank's data. */
static void mti_mpi_say_stuck(mti_text *text, const mt_comm *comm) {
    const mti_group *g = comm->group;
    int i, r, said = 0;
    mti_say_mine(text, comm);
    mti_say(text, "waited %.2f s in the middle of it for", g->timeout);
    for (r = 0; r < comm->size && said < 8; r++) {
        for (i = 0; i < comm->mpi->count && (mti_mpi_is_done(comm, i) || comm->mpi->about[i].peer != r); i++) continue;
        if (i < comm->mpi->count) mti_say(text, said++ ? ", %d" : " rank %d", r);
    }
}

/* Ends a call that cannot complete: the group has broken, rank `gone` has left (-1: none), or the timeout is over. */
static mt_status mti_mpi_give_up(mt_context *ctx, mt_comm *comm, int gone) {
    int collective = mti_slot_of(comm->group, comm->rank)->inside == MTI_IN_COLLECTIVE, header;
    mti_text text;
    text.used = 0;
    text.data[0] = '\0';
    if (mti_is_broken(comm->group)) return mti_mpi_fail(ctx, comm, comm->group->why_broken, &text);
    if (gone >= 0) {
        mti_say_left(&text, comm, gone);
        return mti_mpi_fail(ctx, comm, MT_ERR_PEER, &text);
    }
    header = mti_mpi_missing(comm, -1);
    if (header >= 0) mti_mpi_look_around(comm);
    if (header >= 0) mti_say_timeout(&text, comm, collective ? -1 : comm->mpi->about[header].peer);
    else mti_mpi_say_stuck(&text, comm);
    return mti_mpi_fail(ctx, comm, MT_ERR_TIMEOUT, &text);
}

/* -- waiting -- */

static void mti_mpi_begin(mt_comm *comm) {
    comm->mpi->count = 0;
    comm->mpi->watch = mti_stopwatch_start(comm->group->timeout);
}

/* Returns MT_SUCCESS when a request has completed, or after a short pause, and an error when the call cannot complete.
   A note that a rank has left or broken the group may overtake earlier messages of that rank. So the requests are
   tested once more before the call is given up. */
static mt_status mti_mpi_step(mt_context *ctx, mt_comm *comm) {
    mti_mpi *m = comm->mpi;
    int came = mti_mpi_test(comm), gone, late;
    double waited;
    if (m->error) return mti_mpi_error(ctx, comm);
    if (came) return MT_SUCCESS;
    waited = mti_waited(&m->watch);
    if (waited > MTI_MPI_LISTEN) mti_mpi_listen(m->port);
    gone = mti_mpi_gone(comm);
    late = waited > comm->group->timeout;
    if (late || gone >= 0 || mti_is_broken(comm->group)) {
        if (mti_mpi_test(comm)) return MT_SUCCESS;
        return mti_mpi_give_up(ctx, comm, gone);
    }
    if (!m->port->spin || waited > MTI_MPI_SOON) mti_rest(waited, MTI_MPI_SOON);
    return MT_SUCCESS;
}

static mt_status mti_mpi_wait(mt_context *ctx, mt_comm *comm) {
    while (comm->mpi->active > 0) MT_TRY(mti_mpi_step(ctx, comm));
    return comm->mpi->error ? mti_mpi_error(ctx, comm) : MT_SUCCESS;
}

/* -- collectives -- */

/* Returns how many bytes one rank contributes to the call; the same on all ranks. At most MTI_MPI_SMALL bytes travel
   with the header. */
static size_t mti_mpi_bytes(const mt_comm *comm, const mti_call *call) {
    size_t elements = call->kind == MT_BROADCAST ? call->count : mti_send_elements(comm, call);
    return elements * mt_dtype_size(call->dtype);
}

/* Writes this rank's header, and up to MTI_MPI_SMALL bytes of data behind it. Returns the size of the message. */
static size_t mti_mpi_write(mt_comm *comm, const mti_call *call, size_t bytes) {
    mti_mpi_message *out = comm->mpi->out;
    const mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    out->what = slot->what;
    out->count = slot->count;
    out->recvcount = slot->recvcount;
    out->color = slot->color;
    out->key = slot->key;
    out->next = comm->mpi->port->next;
    if (bytes > MTI_MPI_SMALL) bytes = 0;
    mti_copy(out->data, call->send, bytes);
    return MTI_MPI_HEADER + bytes;
}

/* The first meeting, as mti_enter. Afterwards mti_slot.send of each other rank points to the data that came with the
   rank's header. */
static mt_status mti_mpi_enter(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_mpi *m = comm->mpi;
    int i, has_data = call->kind != MT_BROADCAST || call->root == comm->rank;
    size_t bytes;
    mt_status status;
    mti_mpi_listen(m->port);
    if (mti_is_broken(comm->group)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_COLLECTIVE);
    bytes = mti_mpi_write(comm, call, has_data ? mti_mpi_bytes(comm, call) : 0);
    mti_mpi_begin(comm);
    for (i = 1; i < comm->size; i++) {
        int peer = (comm->rank + i) % comm->size;
        mti_mpi_expect(comm, 2 * i - 2, &m->in[peer], peer, MTI_MPI_MEET);
        mti_mpi_send(comm, 2 * i - 1, m->out, bytes, peer, MTI_MPI_MEET);
    }
    MT_TRY(mti_mpi_wait(ctx, comm));
    mti_mpi_listen(m->port); /* a rank may have sent its header and then given up */
    status = mti_is_broken(comm->group) ? mti_broken_before(ctx, comm, call) : mti_compare(ctx, comm);
    if (status != MT_SUCCESS) mti_set_inside(comm, MTI_OUTSIDE);
    return status;
}

static void mti_mpi_exit(mt_comm *comm) {
    int r;
    for (r = 0; r < comm->size; r++) mti_slot_of(comm->group, r)->inside = MTI_OUTSIDE;
}

/* Exchanges pieces between all ranks. With `out`: sends piece r to rank r, and stores every rank's copy of this rank's
   piece in `out`, n elements apart. Without `out`: sends this rank's result to all ranks, and stores their results in
   p->to. */
static mt_status mti_mpi_exchange(mt_context *ctx, mt_comm *comm, const mti_pieces *p, char *out) {
    size_t mine = mti_piece_size(p, comm->rank), apart = (out ? p->n : p->stride) * p->element;
    int i;
    mti_mpi_begin(comm);
    for (i = 1; i < comm->size; i++) {
        int peer = (comm->rank + i) % comm->size, from = (comm->rank + comm->size - i) % comm->size;
        size_t send = out ? mti_piece_size(p, peer) : mine, recv = out ? mine : mti_piece_size(p, from);
        const char *data = out ? p->from + p->stride * p->element * (size_t)peer : p->own;
        mti_mpi_receive(comm, 2 * i - 2, (out ? out : p->to) + apart * (size_t)from, recv * p->element, from);
        mti_mpi_send(comm, 2 * i - 1, data, send * p->element, peer, MTI_MPI_DATA);
    }
    return mti_mpi_wait(ctx, comm);
}

/* Reduces in chunks: gathers every rank's copy of this rank's piece in `scratch`, reduces the copies in the tree of
   >>local, and sends the result to all ranks if p.to is set. */
static mt_status mti_mpi_reduce(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t most = mti_pieces_most(comm, call, MTI_MPI_SCRATCH), done = 0;
    mti_call own = *call;
    mti_pieces p;
    int r;
    while (done < call->count) {
        done += mti_pieces_next(comm, call, most, done, &p);
        MT_TRY(mti_mpi_exchange(ctx, comm, &p, comm->mpi->scratch));
        for (r = 0; r < comm->size; r++)
            mti_slot_of(comm->group, r)->send = comm->mpi->scratch + p.n * p.element * (size_t)r;
        mti_slot_of(comm->group, comm->rank)->send = p.from + p.stride * p.element * (size_t)comm->rank;
        own.recv = p.own;
        mti_reduce_range(comm, &own, 0, mti_piece_size(&p, comm->rank), 0);
        if (p.to) MT_TRY(mti_mpi_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* In chunks of at most MTI_MPI_MESSAGE bytes of each rank. */
static mt_status mti_mpi_all_gather(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype), most = MTI_MPI_MESSAGE / element, done, mine;
    mti_pieces p;
    memset(&p, 0, sizeof p);
    p.element = element;
    p.stride = call->stride;
    p.whole = call->stride * (size_t)comm->size;
    mine = p.stride * element * (size_t)comm->rank;
    mti_copy((char *)call->recv + mine, call->send, call->count * element);
    for (done = 0; done < call->count; done += p.n) {
        p.n = call->count - done < most ? call->count - done : most;
        p.to = (char *)call->recv + done * element;
        p.own = p.to + mine;
        MT_TRY(mti_mpi_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* The root sends each rank a piece, then each rank sends its piece to all others. With pieces of many cache lines, the
   root sends about twice the bytes of the buffer, and each other rank about once. */
static mt_status mti_mpi_broadcast(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t done = 0;
    mti_call whole = *call;
    mti_pieces p;
    int r;
    if (comm->rank == call->root) mti_copy(call->recv, call->send, call->count * mt_dtype_size(call->dtype));
    whole.send = call->recv;
    while (done < call->count) {
        done += mti_pieces_next(comm, &whole, mti_pieces_most(comm, call, MTI_MPI_MESSAGE), done, &p);
        mti_mpi_begin(comm);
        for (r = 0; r < comm->size && comm->rank == call->root; r++) {
            const char *piece = p.from + p.stride * p.element * (size_t)r;
            if (r != call->root) mti_mpi_send(comm, r, piece, mti_piece_size(&p, r) * p.element, r, MTI_MPI_DATA);
        }
        if (comm->rank != call->root)
            mti_mpi_receive(comm, 0, p.own, mti_piece_size(&p, comm->rank) * p.element, call->root);
        MT_TRY(mti_mpi_wait(ctx, comm));
        MT_TRY(mti_mpi_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* Moves the data after the first meeting. Small data have arrived with the headers. */
static mt_status mti_mpi_move(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (mti_mpi_bytes(comm, call) <= MTI_MPI_SMALL) {
        if (call->kind != MT_ALL_REDUCE) return mti_move(ctx, comm, call);
        mti_reduce_range(comm, call, 0, call->count, 0);
        return MT_SUCCESS;
    }
    if (call->kind == MT_ALL_GATHER) return mti_mpi_all_gather(ctx, comm, call);
    if (call->kind == MT_BROADCAST) return mti_mpi_broadcast(ctx, comm, call);
    return mti_mpi_reduce(ctx, comm, call);
}

static mt_status mti_mpi_collective(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mt_status status;
    MT_TRY(mti_mpi_enter(ctx, comm, call));
    status = mti_mpi_move(ctx, comm, call);
    mti_mpi_exit(comm);
    return status;
}

/* -- point to point -- */

/* One direction of a send_recv: first the headers, then the data, one message after the other. Request `at` receives
   the peer's header. Request at + 1 sends this rank's header, and then moves the data. */
typedef struct mti_mpi_lane {
    int sends, peer, at, matched; /* peer: -1: nothing to do; matched: 1: mti_mpi_match has compared the headers */
    const mti_mpi_message *header;
    char *data;
    size_t bytes, done;
} mti_mpi_lane;

static int mti_mpi_is_over(const mt_comm *comm, const mti_mpi_lane *lane) {
    return lane->peer < 0 || (lane->matched && lane->done == lane->bytes && mti_mpi_is_done(comm, lane->at + 1));
}

/* Fails when the peer's call has another count or data type. */
static mt_status mti_mpi_match(mt_context *ctx, mt_comm *comm, const mti_call *call, mti_mpi_lane *lane) {
    const mti_mpi_message *h = lane->header;
    size_t mine = lane->sends ? call->count : call->recvcount, theirs = (size_t)(lane->sends ? h->recvcount : h->count);
    mti_text text;
    lane->matched = 1;
    if (mine == theirs && (mt_dtype)(h->what >> 8 & 255) == call->dtype) return MT_SUCCESS;
    mti_mpi_arrived(comm, h, lane->peer, MTI_IN_P2P);
    mti_say_unlike(&text, comm, lane->sends ? comm->rank : lane->peer, lane->sends ? lane->peer : comm->rank);
    return mti_mpi_fail(ctx, comm, MT_ERR_MISMATCH, &text);
}

/* Starts the next request of a lane when the last one is done. */
static mt_status mti_mpi_advance(mt_context *ctx, mt_comm *comm, const mti_call *call, mti_mpi_lane *lane) {
    size_t bytes;
    if (lane->peer < 0 || !mti_mpi_is_done(comm, lane->at)) return MT_SUCCESS;
    if (!lane->matched) {
        MT_TRY(mti_mpi_match(ctx, comm, call, lane));
        if (lane->bytes <= MTI_MPI_SMALL) { /* the data travel with the header */
            if (!lane->sends) mti_copy(lane->data, lane->header->data, lane->bytes);
            lane->done = lane->bytes;
        }
    }
    if (lane->done == lane->bytes || !mti_mpi_is_done(comm, lane->at + 1)) return MT_SUCCESS;
    bytes = lane->bytes - lane->done < MTI_MPI_MESSAGE ? lane->bytes - lane->done : MTI_MPI_MESSAGE;
    if (lane->sends) mti_mpi_send(comm, lane->at + 1, lane->data + lane->done, bytes, lane->peer, MTI_MPI_DATA);
    else mti_mpi_receive(comm, lane->at + 1, lane->data + lane->done, bytes, lane->peer);
    lane->done += bytes;
    comm->mpi->watch = mti_stopwatch_start(comm->group->timeout);
    return MT_SUCCESS;
}

/* Starts to receive the peer's header, and sends this rank's header to the peer. */
static mti_mpi_lane mti_mpi_lane_open(mt_comm *comm, const mti_call *call, int sends, int at) {
    mti_mpi *m = comm->mpi;
    mti_mpi_lane lane;
    memset(&lane, 0, sizeof lane);
    lane.sends = sends;
    lane.at = at;
    lane.peer = sends ? call->root : call->source;
    if (lane.peer < 0) return lane;
    lane.bytes = (sends ? call->count : call->recvcount) * mt_dtype_size(call->dtype);
    lane.data = sends ? (char *)mt_tensor_make(call->send, call->dtype, 0, 0).data : (char *)call->recv;
    lane.header = sends ? m->asked : &m->in[lane.peer];
    mti_mpi_expect(comm, at, sends ? m->asked : &m->in[lane.peer], lane.peer, sends ? MTI_MPI_ASK : MTI_MPI_OFFER);
    mti_mpi_send(comm, at + 1, m->out, sends ? mti_mpi_write(comm, call, lane.bytes) : MTI_MPI_HEADER, lane.peer,
                 sends ? MTI_MPI_OFFER : MTI_MPI_ASK);
    return lane;
}

/* Runs the send and the receive of a call at the same time, each in its own lane. */
static mt_status mti_mpi_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_mpi_lane out, in;
    mti_mpi_listen(comm->mpi->port);
    if (mti_is_broken(comm->group)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_P2P);
    mti_mpi_write(comm, call, 0);
    mti_mpi_begin(comm);
    out = mti_mpi_lane_open(comm, call, 1, 0);
    in = mti_mpi_lane_open(comm, call, 0, 2);
    while (!mti_mpi_is_over(comm, &out) || !mti_mpi_is_over(comm, &in)) {
        MT_TRY(mti_mpi_step(ctx, comm));
        MT_TRY(mti_mpi_advance(ctx, comm, call, &out));
        MT_TRY(mti_mpi_advance(ctx, comm, call, &in));
    }
    mti_mpi_exit(comm);
    return comm->mpi->error ? mti_mpi_error(ctx, comm) : MT_SUCCESS;
}

static mt_status mti_mpi_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (ctx->device != MT_DEVICE_CPU)
        return mti_refuse(
            ctx, comm, MT_ERR_UNSUPPORTED,
            "mt_%s: \"%s\" (%d ranks) is over MPI, which moves memory of the host, and the context is on device "
            "%d: use mt_comm_create_for, and an implementation built with -DMT_USE_NCCL",
            mti_call_name(call->kind), comm->name, comm->size, (int)ctx->device);
    return mti_is_p2p(call) ? mti_mpi_p2p(ctx, comm, call) : mti_mpi_collective(ctx, comm, call);
}

/* -- beginning -- */

static void mti_mpi_free(mti_mpi *m) {
    if (!m) return;
    free(m->world);
    free(m->indices);
    free(m->statuses);
    free(m->requests);
    free(m->about);
    free(m->reasons);
    free(m->note_requests);
    free(m->in);
    free(m->scratch);
    free(m);
}

/* Allocates the arrays for a group of `size` ranks; NULL: out of memory. A collective needs two requests per peer, and
   a send_recv needs four. */
static mti_mpi *mti_mpi_new(int size) {
    size_t n = (size_t)size, requests = 2 * n > 4 ? 2 * n : 4, i;
    mti_mpi *m = (mti_mpi *)calloc(1, sizeof *m);
    if (!m) return NULL;
    m->world = (int *)calloc(n, sizeof *m->world);
    m->indices = (int *)calloc(requests, sizeof *m->indices);
    m->statuses = (MPI_Status *)calloc(requests, sizeof *m->statuses);
    m->requests = (MPI_Request *)calloc(requests, sizeof *m->requests);
    m->about = (mti_mpi_about *)calloc(requests, sizeof *m->about);
    m->reasons = (mti_mpi_note *)calloc(n, sizeof *m->reasons);
    m->note_requests = (MPI_Request *)calloc(2 * n, sizeof *m->note_requests);
    m->in = (mti_mpi_message *)mti_default_alloc(NULL, (n + 3) * sizeof *m->in, MT_ALIGNMENT);
    m->scratch = (char *)mti_default_alloc(NULL, MTI_MPI_SCRATCH, MT_ALIGNMENT);
    if (!m->world || !m->indices || !m->statuses || !m->requests || !m->about || !m->reasons || !m->note_requests ||
        !m->in || !m->scratch) {
        mti_mpi_free(m);
        return NULL;
    }
    m->out = m->in + n;
    m->asked = m->out + 1;
    m->other = m->asked + 1;
    memset(m->out, 0, sizeof *m->out);
    for (i = 0; i < requests; i++) m->requests[i] = MPI_REQUEST_NULL;
    for (i = 0; i < 2 * n; i++) m->note_requests[i] = MPI_REQUEST_NULL;
    m->size = size;
    return m;
}

/* Creates a communicator and its group. The caller fills mti_mpi.world. */
static mt_comm *mti_mpi_comm_new(mti_mpi_port *port, int rank, int size, const char *name, int number) {
    mt_comm *comm = mti_comm_new(&mti_over_mpi, rank, size, name);
    mti_group *g = mti_group_new(size, port->timeout, port->spin);
    mti_mpi *m = mti_mpi_new(size);
    if (!comm || !g || !m) {
        if (g) g->references = 1;
        mti_group_release(g);
        mti_mpi_free(m);
        free(comm);
        return NULL;
    }
    g->references = 1;
    comm->group = g;
    comm->mpi = m;
    m->port = port;
    m->comm = comm;
    m->number = number;
    m->next = port->groups;
    port->groups = m;
    port->references++;
    return comm;
}

static void mti_mpi_port_free(mti_mpi_port *port) {
    free(port->status);
    free(port->versions);
    free(port->left);
    free(port->reasons);
    free(port->early);
    free(port->closing_requests);
    free(port);
}

static mti_mpi_port *mti_mpi_port_new(int rank, int size, double timeout_s) {
    size_t n = (size_t)size, i;
    mti_mpi_port *port = (mti_mpi_port *)calloc(1, sizeof *port);
    if (!port) return NULL;
    port->rank = rank;
    port->size = size;
    port->timeout = timeout_s > 0 ? timeout_s : MT_TIMEOUT_DEFAULT;
    port->next = 1;
    port->inbox_request = MPI_REQUEST_NULL;
    port->status = (int *)calloc(n, sizeof *port->status);
    port->versions = (int32_t *)calloc(n, sizeof *port->versions);
    port->left = (const char **)calloc(n, sizeof *port->left);
    port->reasons = (mti_mpi_note *)calloc(n, sizeof *port->reasons);
    port->early = (mti_mpi_note *)calloc(2 * n, sizeof *port->early);
    port->closing_requests = (MPI_Request *)calloc(n, sizeof *port->closing_requests);
    if (!port->status || !port->versions || !port->left || !port->reasons || !port->early || !port->closing_requests) {
        mti_mpi_port_free(port);
        return NULL;
    }
    for (i = 0; i < n; i++) {
        port->status[i] = MTI_MPI_OPEN;
        port->closing_requests[i] = MPI_REQUEST_NULL;
    }
    return port;
}

/* Waits for the end of a request of the opening. */
static mt_status mti_mpi_opened(const mti_mpi_port *port, MPI_Request *request) {
    mti_stopwatch watch = mti_stopwatch_start(port->timeout);
    int done = 0;
    while (!done) {
        if (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return MT_ERR_SYSTEM;
        if (!done && mti_waited(&watch) > port->timeout) return MT_ERR_TIMEOUT;
        if (!done) mti_rest(watch.waited, 1e-3);
    }
    return MT_SUCCESS;
}

/* Compares the versions of all ranks before any other message, as other versions may have other messages. After an
   error MPI may use the memory, which is therefore that of the port. */
static mt_status mti_mpi_versions(mti_mpi_port *port, mti_text *text) {
    MPI_Request request = MPI_REQUEST_NULL;
    int r;
    port->version = MT_VERSION_NUMBER;
    if (MPI_Iallgather(&port->version, (int)sizeof port->version, MPI_BYTE, port->versions, (int)sizeof port->version,
                       MPI_BYTE, port->comm, &request) != MPI_SUCCESS)
        return MT_ERR_SYSTEM;
    MT_TRY(mti_mpi_opened(port, &request));
    for (r = 1; r < port->size && port->versions[r] == port->versions[0]; r++) continue;
    if (r == port->size) return MT_SUCCESS;
    mti_say_versions(text, port->versions[0], r, port->versions[r]);
    return MT_ERR_MISMATCH;
}

/* Duplicates the caller's MPI_Comm. MPI returns errors on the duplicate, they are not fatal. text: what is wrong with
   MT_ERR_MISMATCH */
static mt_status mti_mpi_open(mti_mpi_port *port, MPI_Comm theirs, mti_text *text) {
    MPI_Request request = MPI_REQUEST_NULL;
    int found = 0, *last = NULL;
    if (MPI_Comm_idup(theirs, &port->comm, &request) != MPI_SUCCESS) return MT_ERR_SYSTEM;
    MT_TRY(mti_mpi_opened(port, &request));
    if (MPI_Comm_set_errhandler(port->comm, MPI_ERRORS_RETURN) != MPI_SUCCESS ||
        MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &last, &found) != MPI_SUCCESS || !found)
        return MT_ERR_SYSTEM;
    port->last_tag = *last;
    MT_TRY(mti_mpi_versions(port, text));
    return mti_mpi_open_inbox(port) == MPI_SUCCESS ? MT_SUCCESS : MT_ERR_SYSTEM;
}

/* Finds out which ranks run on this machine, and sets local_rank and port->spin: all ranks exchange a hash of their
   processor name. */
static mt_status mti_mpi_neighbours(mt_comm *world) {
    char name[MPI_MAX_PROCESSOR_NAME];
    mti_mpi_port *port = world->mpi->port;
    uint32_t hash = 2166136261u; /* FNV-1a */
    int length = 0, i, here = 0, mine;
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = MTI_CREATE;
    if (MPI_Get_processor_name(name, &length) != MPI_SUCCESS) length = 0;
    for (i = 0; i < length; i++) hash = (hash ^ (unsigned char)name[i]) * 16777619u;
    call.color = mine = (int)(hash >> 1);
    MT_TRY(mti_mpi_enter(NULL, world, &call));
    mti_mpi_exit(world);
    for (i = 0; i < world->size; i++) {
        if (mti_slot_of(world->group, i)->color != mine) continue;
        if (i == world->rank) port->local_rank = here;
        here++;
    }
    for (i = 0; i < world->size; i++) mti_slot_of(world->group, i)->what = 0; /* no message names this call */
    port->spin = here <= (int)sysconf(_SC_NPROCESSORS_ONLN);
    world->local_rank = port->local_rank;
    return MT_SUCCESS;
}

/* Whether this process was forked, and has neither called exec nor started a thread since. MPI knows no such process,
   and has none of its threads there. (A process that calls MPI_Init itself after the fork has them.) Only Linux tells;
   elsewhere the answer is 0. The numbers are the 9th and the 20th of proc_pid_stat(5). */
static int mti_is_bare_fork(void) {
    const unsigned forked_no_exec = 0x40; /* PF_FORKNOEXEC */
    char text[1024], *at;
    unsigned flags = 0;
    long threads = 0;
    FILE *file = fopen("/proc/self/stat", "r");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = '\0';
    if (file) fclose(file);
    at = strrchr(text, ')'); /* the name of the program may have blanks */
    return at &&
           sscanf(at + 1, " %*c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld", &flags,
                  &threads) == 2 &&
           (flags & forked_no_exec) && threads == 1;
}

/* Refuses to connect a process that was forked from a rank. */
static mt_status mti_mpi_not_forked(mti_text *text) {
    if (!mti_is_bare_fork()) return MT_SUCCESS;
    mti_say(text,
            "process %ld was forked from process %ld, so it is no rank of MPI, and MPI does not work in it; start its "
            "ranks with mpirun or MPI_Comm_spawn",
            (long)getpid(), (long)getppid());
    return MT_ERR_UNSUPPORTED;
}

/* mt_comm_create_mpi. text is empty, or says what is wrong. */
static mt_status mti_mpi_create(const void *mpi_comm, double timeout_s, mt_comm **out, mti_text *text) {
    int begun = 0, ended = 0, rank = 0, size = 0, r;
    mti_mpi_port *port;
    MPI_Comm theirs;
    mt_comm *world;
    mt_status status;
    if (out) *out = NULL;
    if (!out || !mpi_comm || timeout_s != timeout_s) return MT_ERR_ARGUMENT;
    if (MPI_Initialized(&begun) != MPI_SUCCESS || MPI_Finalized(&ended) != MPI_SUCCESS || !begun || ended)
        return MT_ERR_ARGUMENT;
    memcpy(&theirs, mpi_comm, sizeof theirs);
    if (theirs == MPI_COMM_NULL) return MT_ERR_ARGUMENT;
    if (MPI_Comm_rank(theirs, &rank) != MPI_SUCCESS || MPI_Comm_size(theirs, &size) != MPI_SUCCESS)
        return MT_ERR_SYSTEM;
    if (size > MTI_MAX_RANKS) return MT_ERR_UNSUPPORTED;
    if (size == 1) return (*out = mti_comm_new(&mti_alone, 0, 1, "world")) != NULL ? MT_SUCCESS : MT_ERR_MEMORY;
    port = mti_mpi_port_new(rank, size, timeout_s);
    if (!port) return MT_ERR_MEMORY;
    status = mti_mpi_open(port, theirs, text);
    world = status == MT_SUCCESS ? mti_mpi_comm_new(port, rank, size, "world", port->next++) : NULL;
    if (!world) return status == MT_SUCCESS ? MT_ERR_MEMORY : status; /* not freed: MPI may use the port */
    for (r = 0; r < size; r++) world->mpi->world[r] = r;
    status = mti_mpi_neighbours(world);
    if (status == MT_SUCCESS) *out = world;
    else mt_comm_destroy(world);
    return status;
}

MT_API mt_status mt_comm_create_mpi(const void *mpi_comm, double timeout_s, mt_comm **out) {
    mti_text text;
    mt_status status;
    text.used = 0;
    status = out && mpi_comm ? mti_mpi_not_forked(&text) : MT_SUCCESS;
    if (status == MT_SUCCESS) status = mti_mpi_create(mpi_comm, timeout_s, out, &text);
    else *out = NULL;
    if (text.used) fprintf(stderr, "mt_comm_create_mpi: %s\n", text.data);
    return status;
}

/* The number of the new groups is one that no rank of comm has used. All groups of a split have the same number, also
   on ranks that are in none of these groups. */
static mt_status mti_mpi_split(mt_comm *comm, int color, int key, mt_comm **out) {
    mti_mpi *m = comm->mpi;
    int rank, size, leader, r, at, number = m->port->next;
    char name[32];
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = MTI_SPLIT;
    call.color = color;
    call.key = key;
    m->port->early_count = 0;
    MT_TRY(mti_mpi_enter(NULL, comm, &call));
    mti_mpi_exit(comm);
    for (r = 0; r < comm->size; r++)
        if (r != comm->rank && m->in[r].next > number) number = m->in[r].next;
    if (number >= m->port->last_tag / 4)
        return mti_refuse(NULL, comm, MT_ERR_UNSUPPORTED,
                          "mt_comm_split: %d groups so far, more than the tags of this MPI can tell apart", number);
    m->port->next = number + 1;
    if (color < 0) return MT_SUCCESS;
    mti_split_place(comm, comm->rank, &rank, &size, &leader);
    if (snprintf(name, sizeof name, "%s/%d", comm->name, color) < 0) name[0] = '\0';
    *out = size == 1 ? mti_comm_new(&mti_alone, 0, 1, name) : mti_mpi_comm_new(m->port, rank, size, name, number);
    if (!*out || size == 1) return MT_SUCCESS; /* *out is NULL: mt_comm_split returns MT_ERR_MEMORY */
    for (r = 0; r < comm->size; r++) {
        if (mti_slot_of(comm->group, r)->color != color) continue;
        mti_split_place(comm, r, &at, &size, &leader);
        (*out)->mpi->world[at] = m->world[r];
        if (m->port->left[m->world[r]]) mti_mpi_take_left((*out)->mpi, at, m->port->left[m->world[r]]);
    }
    for (r = 0; r < m->port->early_count; r++) mti_mpi_take_note(m->port, &m->port->early[r]);
    return MT_SUCCESS;
}

/* -- ending -- */

/* Returns 1 when all requests are complete. */
static int mti_mpi_all_done(MPI_Request *requests, int count) {
    int done = 1, i;
    for (i = 0; i < count && done; i++) MPI_Test(&requests[i], &done, MPI_STATUS_IGNORE);
    return done;
}

/* Frees the destroyed groups whose requests are complete: before that, MPI may use their memory. */
static void mti_mpi_reap(mti_mpi_port *port) {
    struct mti_mpi **at = &port->ended, *m;
    while ((m = *at) != NULL) {
        if (!mti_mpi_all_done(m->requests, m->count) || !mti_mpi_all_done(m->note_requests, 2 * m->size)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        mti_mpi_free(m);
    }
}

/* Tells all ranks of the port that this rank closes its port, and waits until they have closed theirs. Returns 1 when
   all have done so, and MPI holds no memory of any rank. */
static int mti_mpi_close(mti_mpi_port *port, mt_status status) {
    double limit = port->broken ? MTI_MPI_GRACE : port->timeout;
    mti_stopwatch watch = mti_stopwatch_start(limit);
    mti_mpi_note *note = &port->closing;
    int r;
    note->news = MTI_MPI_CLOSES;
    note->rank = port->rank;
    note->status = port->status[port->rank] = (int)status;
    note->keeps = port->keeps;
    note->broken = port->broken;
    port->closed++;
    for (r = 0; r < port->size; r++)
        if (r != port->rank) MPI_Isend(note, (int)sizeof *note, MPI_BYTE, r, 0, port->comm, &port->closing_requests[r]);
    while (port->waited < limit) {
        mti_mpi_listen(port);
        mti_mpi_reap(port);
        if (mti_mpi_all_done(port->closing_requests, port->size) && !port->ended && port->closed == port->size)
            return !port->keeps;
        port->waited = mti_waited(&watch);
        mti_rest(port->waited, MTI_MPI_SOON);
    }
    return 0;
}

/* Frees the port if all ranks have closed. Otherwise the port stays until the process ends, because MPI may still write
   to it. The duplicate is not freed when it may have messages that no rank has received: the next duplicate might
   receive them. */
static void mti_mpi_port_end(mti_mpi_port *port, int closed) {
    if (!closed) return;
    if (port->inbox_request != MPI_REQUEST_NULL) {
        MPI_Cancel(&port->inbox_request);
        MPI_Wait(&port->inbox_request, MPI_STATUS_IGNORE);
    }
    if (!port->broken) MPI_Comm_free(&port->comm);
    mti_mpi_port_free(port);
}

/* Destroys a group, and with the last group the port. */
static void mti_mpi_destroy(mt_comm *comm) {
    mti_mpi *m = comm->mpi, **at;
    mti_mpi_port *port = m->port;
    if (mti_is_forked(comm->process)) return;
    for (at = &port->groups; *at != m; at = &(*at)->next) continue;
    *at = m->next;
    m->next = port->ended;
    port->ended = m;
    m->comm = NULL;
    mti_mpi_reap(port);
    if (--port->references == 0) mti_mpi_port_end(port, mti_mpi_close(port, MT_SUCCESS));
}
#else /* not built */
MT_API mt_status mt_comm_create_mpi(const void *mpi_comm, double timeout_s, mt_comm **out) {
    if (out) *out = NULL;
    return (void)mpi_comm, (void)timeout_s, MT_ERR_UNSUPPORTED;
}
#endif

/* ---- >>compare: settings of the ranks ---------------------------------------------------------------------------- */

#define MTI_TOLD_CHUNK ((size_t)1024)

/* What each rank sends to all others: a hash of its settings, and its group. */
typedef struct mti_told {
    uint64_t hash;
    int64_t group;
} mti_told;

/* The settings of a rank in one block of memory: name, NUL, value, NUL, ... */
typedef struct mti_told_text {
    char *data;
    uint64_t bytes;
} mti_told_text;

/* Returns data == NULL when out of memory. */
static mti_told_text mti_told_write(const mt_setting *settings, int count) {
    mti_told_text t;
    size_t n;
    int i, value;
    t.bytes = 0;
    for (i = 0; i < count; i++) t.bytes += strlen(settings[i].name) + strlen(settings[i].value) + 2;
    t.data = (char *)mt_host_alloc((size_t)t.bytes + 1);
    t.bytes = 0;
    for (i = 0; t.data && i < 2 * count; i++) {
        value = i % 2;
        n = strlen(value ? settings[i / 2].value : settings[i / 2].name) + 1;
        memcpy(t.data + t.bytes, value ? settings[i / 2].value : settings[i / 2].name, n);
        t.bytes += n;
    }
    return t;
}

/* FNV-1a. */
static uint64_t mti_told_hash(const mti_told_text *t) {
    uint64_t h = 14695981039346656037u, i;
    for (i = 0; i < t->bytes; i++) h = (h ^ (uint64_t)(unsigned char)t->data[i]) * 1099511628211u;
    return h;
}

/* Returns the string at offset *at, and advances *at to the next one; NULL at the end. */
static const char *mti_told_next(const mti_told_text *t, uint64_t *at) {
    const char *s = t->data + *at;
    if (*at >= t->bytes) return NULL;
    *at += strlen(s) + 1;
    return s;
}

/* Begins calls that move bytes of the host, through *space on the device. On MT_DEVICE_META *space is in the host. */
static mt_status mti_space_begin(mt_context *ctx, size_t bytes, void **space) {
    if (ctx->device != MT_DEVICE_META) return mt_context_alloc(ctx, bytes, space);
    *space = mt_host_alloc(bytes);
    if (!*space) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for what %zu bytes of ranks are compared in", bytes);
    ctx->compares++;
    return MT_SUCCESS;
}

/* space: of mti_space_begin; NULL if that has failed */
static void mti_space_end(mt_context *ctx, void *space, size_t bytes) {
    if (ctx->device != MT_DEVICE_META) {
        mt_context_free(ctx, space, bytes); /* waits for copies that still run */
        return;
    }
    if (space) ctx->compares--;
    mt_host_free(space);
}

/* Copies from the device to the host, after the earlier collectives are done. */
static mt_status mti_told_fetch(mt_context *ctx, void *to, const void *from, size_t bytes) {
    MT_TRY(mti_synchronize(ctx)); /* a copy to pageable memory would wait without a timeout */
    MT_TRY(mti_bytes_copy(ctx, to, from, bytes));
    return mti_synchronize(ctx);
}

/* Broadcasts `bytes` of host memory from rank `root`, through `space` [MTI_TOLD_CHUNK] on the device. */
static mt_status mti_told_broadcast(mt_context *ctx, mt_comm *comm, int root, void *data, uint64_t bytes, void *space) {
    uint64_t at, n;
    for (at = 0; at < bytes; at += n) {
        n = bytes - at < MTI_TOLD_CHUNK ? bytes - at : MTI_TOLD_CHUNK;
        if (comm->rank == root) MT_TRY(mti_bytes_copy(ctx, space, (char *)data + at, (size_t)n));
        MT_TRY(mt_broadcast(ctx, comm, space, space, (size_t)n, MT_U8, root));
        MT_TRY(mti_told_fetch(ctx, (char *)data + at, space, (size_t)n));
    }
    return MT_SUCCESS;
}

/* Broadcasts the settings of rank `root` to *out, which is empty before. The caller frees out->data. */
static mt_status mti_told_share(mt_context *ctx, mt_comm *comm, int root, const mti_told_text *mine, void *space,
                                mti_told_text *out) {
    out->bytes = mine->bytes;
    MT_TRY(mti_told_broadcast(ctx, comm, root, &out->bytes, sizeof out->bytes, space));
    out->data = (char *)mt_host_alloc((size_t)out->bytes + 1); /* + 1: a NUL at the end */
    if (!out->data) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "no memory for what rank %d has told", root);
    if (comm->rank == root) memcpy(out->data, mine->data, (size_t)mine->bytes);
    return mti_told_broadcast(ctx, comm, root, out->data, out->bytes, space);
}

/* Finds two ranks of one group with different settings: *a is the lowest rank of the group, and *b the next rank after
   *b that differs from it, and from all ranks that were found before. Returns 0 when there is none. */
static int mti_told_differ(const mti_told *all, int size, int *a, int *b) {
    int same;
    while (++*b < size) {
        for (*a = 0; all[*a].group != all[*b].group; ++*a) continue;
        for (same = *a; all[same].group != all[*b].group || all[same].hash != all[*b].hash; same++) continue;
        if (same == *b && *a != *b) return 1;
    }
    return 0;
}

/* Writes " on ranks 0, 2 and 3 more": the ranks of the group with the same settings as rank `like`. */
static void mti_say_alike_told(mti_text *text, const mti_told *all, int size, int like) {
    int r, alike = 0, said = 0;
    for (r = 0; r < size; r++) alike += all[r].group == all[like].group && all[r].hash == all[like].hash;
    mti_say(text, alike > 1 ? " on ranks " : " on rank ");
    for (r = 0; r < size && said < 8; r++)
        if (all[r].group == all[like].group && all[r].hash == all[like].hash) mti_say(text, said++ ? ", %d" : "%d", r);
    if (alike > said) mti_say(text, " and %d more", alike - said);
}

/* Writes a setting. same: number of characters at the start that are equal in both values; when there are more than
   100, the text begins 20 characters before the difference. 340 characters of two values fit into a message */
static void mti_say_setting(mti_text *text, const char *name, const char *value, size_t same) {
    int cut = same > 100;
    if (!name) mti_say(text, "nothing more");
    else mti_say(text, "%.100s%s%s%.340s", name, *name ? " " : "", cut ? "..." : "", value + (cut ? same - 20 : 0));
}

/* Writes the first difference between the settings x of rank a and y of rank b. */
static int mti_say_told(mti_text *text, const mti_told *all, const mt_comm *comm, int a, int b, const mti_told_text *x,
                        const mti_told_text *y) {
    const char *name, *other, *value = "", *second = "";
    uint64_t i = 0, j = 0;
    size_t same = 0;
    do {
        name = mti_told_next(x, &i);
        other = mti_told_next(y, &j);
        if (name) value = mti_told_next(x, &i);
        if (other) second = mti_told_next(y, &j);
    } while (name && other && strcmp(name, other) == 0 && strcmp(value, second) == 0);
    if (name && other && strcmp(name, other) == 0) {
        mti_say(text, "%.100s is ", name);
        name = other = "";
        while (value[same] && value[same] == second[same]) same++;
    }
    mti_say_setting(text, name, value, same);
    mti_say_alike_told(text, all, comm->size, a);
    mti_say(text, ", but ");
    mti_say_setting(text, other, second, same);
    mti_say_alike_told(text, all, comm->size, b);
    mti_say(text, " of \"%s\" (%d ranks)", comm->name, comm->size);
    return 1;
}

/* What a comparison is about. `write` makes the text that describes this rank; it is called when the hashes of two
   ranks differ. `say` writes the first difference of two texts, and returns 0 when there is none. */
typedef struct mti_telling {
    const void *user;
    mti_told_text (*write)(const void *user);
    int (*say)(mti_text *text, const mti_told *all, const mt_comm *comm, int a, int b, const mti_told_text *x,
               const mti_told_text *y);
} mti_telling;

/* Gathers `bytes` bytes of each rank into all [ranks, bytes], through `space` of the same size. */
static mt_status mti_space_gather(mt_context *ctx, mt_comm *comm, const void *mine, size_t bytes, void *all,
                                  void *space) {
    char *place = (char *)space + (size_t)comm->rank * bytes;
    MT_TRY(mti_synchronize(ctx)); /* a copy from pageable memory would wait without a timeout */
    MT_TRY(mti_bytes_copy(ctx, place, mine, bytes));
    MT_TRY(mt_all_gather(ctx, comm, place, space, bytes, MT_U8));
    return mti_told_fetch(ctx, all, space, (size_t)comm->size * bytes);
}

MT_API mt_status mt_comm_gather_host(mt_context *ctx, mt_comm *comm, const void *mine, size_t bytes, void *all) {
    mt_ledger ledger;
    void *space = NULL;
    size_t size;
    mt_status status;
    if (!ctx || !comm || !mine || !all || bytes == 0 || bytes > SIZE_MAX / 2 / MTI_MAX_RANKS)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_comm_gather_host: %zu bytes, or something is NULL", bytes);
    size = (size_t)comm->size * bytes;
    ledger = comm->ledger;
    mt_check_pause(ctx);
    status = mti_space_begin(ctx, size, &space);
    if (status == MT_SUCCESS) status = mti_space_gather(ctx, comm, mine, bytes, all, space);
    mti_space_end(ctx, space, size);
    comm->ledger = ledger; /* that of the program alone */
    return mt_check_resume(ctx, status);
}

/* Compares all ranks. all: [size], this rank's entry is filled in; space: of mti_space_begin */
static mt_status mti_compare_told(mt_context *ctx, mt_comm *comm, const char *what, const mti_telling *telling,
                                  mti_told *all, void *space) {
    mti_told own = all[comm->rank];
    mti_told_text mine, x, y;
    mti_text text;
    mt_status status;
    int a, b = 0;
    MT_TRY(mti_space_gather(ctx, comm, &own, sizeof own, all, space));
    if (!mti_told_differ(all, comm->size, &a, &b)) return MT_SUCCESS;
    mine = (telling->write)(telling->user);
    if (!mine.data) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "%s: no memory for a comparison of ranks", what);
    do {
        text.used = 0;
        mti_say(&text, "%.100s: ", what);
        x.data = y.data = NULL;
        status = mti_told_share(ctx, comm, a, &mine, space, &x);
        if (status == MT_SUCCESS) status = mti_told_share(ctx, comm, b, &mine, space, &y);
        if (status == MT_SUCCESS && (telling->say)(&text, all, comm, a, b, &x, &y))
            status = mti_refuse(ctx, comm, MT_ERR_MISMATCH, "%s", text.data);
        mt_host_free(x.data);
        mt_host_free(y.data);
    } while (status == MT_SUCCESS && mti_told_differ(all, comm->size, &a, &b));
    mt_host_free(mine.data);
    return status;
}

/* Compares all ranks by a hash, and says what differs. */
static mt_status mti_compare_ranks(mt_context *ctx, mt_comm *comm, const char *what, mti_told told,
                                   const mti_telling *telling) {
    size_t bytes =
        (size_t)comm->size * sizeof told > MTI_TOLD_CHUNK ? (size_t)comm->size * sizeof told : MTI_TOLD_CHUNK;
    mti_told *all = (mti_told *)mt_host_alloc((size_t)comm->size * sizeof *all);
    void *space = NULL;
    mt_status status =
        all ? mti_space_begin(ctx, bytes, &space)
            : mti_refuse(ctx, comm, MT_ERR_MEMORY, "%s: no memory for a comparison of %d ranks", what, comm->size);
    if (status == MT_SUCCESS) {
        all[comm->rank] = told;
        status = mti_compare_told(ctx, comm, what, telling, all, space);
    }
    mti_space_end(ctx, space, bytes);
    mt_host_free(all);
    return status;
}

/* The settings that a rank passes to mt_comm_compare. */
typedef struct mti_settings {
    const mt_setting *list;
    int count;
} mti_settings;

static mti_told_text mti_settings_write(const void *user) {
    const mti_settings *s = (const mti_settings *)user;
    return mti_told_write(s->list, s->count);
}

MT_API mt_status mt_comm_compare(mt_context *ctx, mt_comm *comm, const char *what, int group,
                                 const mt_setting *settings, int count) {
    mti_settings mine;
    mti_telling telling;
    mti_told_text text;
    mti_told told;
    int i, bad = !what || count < 0 || (count > 0 && !settings);
    if (!ctx || !comm)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_comm_compare: %s is NULL", ctx ? "comm" : "ctx");
    for (i = 0; !bad && i < count; i++) bad = !settings[i].name || !settings[i].value;
    if (bad) return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_comm_compare: count is %d, or something is NULL", count);
    if (!comm->transport->has_peers) return MT_SUCCESS;
    text = mti_told_write(settings, count);
    if (!text.data) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "mt_comm_compare: no memory for %d settings", count);
    told.hash = mti_told_hash(&text);
    told.group = group;
    mt_host_free(text.data);
    mine.list = settings;
    mine.count = count;
    telling.user = &mine;
    telling.write = mti_settings_write;
    telling.say = mti_say_told;
    return mti_compare_ranks(ctx, comm, what, told, &telling);
}

MT_API void mt_decimal_point(char *text) {
    static const char *const others = "+-0123456789abcdefghijklmnopqrstuvwxyz()_"; /* letters: inf, nan, exponents */
    char *point;
    size_t n;
    if (!text) return;
    point = text + strspn(text, others);
    n = strcspn(point, others);
    if (n == 0) return;
    *point = '.';
    memmove(point + 1, point + n, strlen(point + n) + 1);
}

MT_API const char *mt_f32_digits(float x, char text[32]) {
    if (!text) return "";
    snprintf(text, 32, "%.9g", (double)x);
    mt_decimal_point(text);
    return text;
}

/* ---- >>replicas: check mode compares values ---------------------------------------------------------------------- */

/* When check is 2, each call hashes what it reads and what is replicated over a group. That is when the values exist,
   and it finds them changed after they were written, too. Each group has a list of these hashes. mt_check_replicas
   compares one hash of the whole list, and then forgets the list. If the hashes differ, two ranks exchange the lists. A
   rank may read more than others, such as a loss that rank 0 prints. So two entries are compared when the same calls
   lie between the last collective of the group and them. Notes, such as the gradients in mt_sync_gradients, are
   compared apart from what calls read. */

#define MTI_REPLICAS_MOST 1048576 /* entries of a list; further ones are dropped */
#define MTI_REPLICAS_EVERY 256    /* a list is compared at the latest after so many collectives of its group */
#define MTI_REPLICA_SUMS 4096     /* hashes that a GPU keeps until the host fetches them */
#define MTI_REPLICA_TEXT 512      /* bytes that describe an entry, at most */
#define MTI_REPLICA_DIGITS 16

typedef struct mti_replica {
    const char *where, *with; /* the call that read it, and a parameter of the call, or NULL */
    const char *by, *by_with; /* the call that wrote it, or NULL */
    char operand[24];
    /* what the hash is of: v values, p a place, n numbers, c the shape of a view, z of one that is zero, t the rank
       that adds what all ranks have to a sum; u any */
    char differs;
    uint64_t moves; /* number of collectives of the group before */
    uint64_t hash;
    int sum; /* on a GPU: 1 + its place in `sums`, until the host has fetched it */
} mti_replica;

typedef struct mti_replica_list {
    mti_replica *list;
    size_t count, capacity;
    uint64_t moves;
} mti_replica_list;

/* What ranks of a group have each for itself. Kinds:
   s  not all ranks may have the same
   S  no two ranks may have the same
   d  of the data group: two ranks may have the same, but not in all entries of the same name, in MTI_DATA_ALIKE
      comparisons from the first one on
   i  ids of rows: not all ranks may have the same, unless they have whole sequences
   p  the same ids: if they count up on each rank, the ranks together must have each position as often as any other
   g  a range of the columns of what all ranks have: all columns must be read by some rank */
typedef struct mti_share {
    const char *where, *with;
    char what[24], kind;
    int is_view;    /* 1: of mti_view_add */
    int64_t rows;   /* of kinds i and p */
    uint64_t piece; /* of kind g: the age of the whole */
    uint64_t mark;  /* a hash; of kind g the first column, the columns, and those of the whole, in 1024ths of it */
} mti_share;

typedef struct mti_share_list {
    mti_share *list;
    size_t count, capacity;
    int64_t seq;    /* of mt_check_sequences; 0: none was noted, -1: several, or not known */
    int data_alike; /* comparisons, from the first one on, in which data ranks had the same; -1: they had not */
} mti_share_list;

#define MTI_DATA_ALIKE 3 /* so many are no chance */

typedef struct mti_replicas {
    mti_replica_list groups[MTI_AXES];
    mti_share_list shares[MTI_AXES];
    uint64_t *sums; /* [MTI_REPLICA_SUMS] on a GPU; NULL: none yet */
    int used;       /* of the sums */
} mti_replicas;

static mt_status mti_replicas_create(mt_context *ctx) {
    ctx->checker->replicas = (mti_replicas *)mt_host_alloc(sizeof *ctx->checker->replicas);
    if (ctx->checker->replicas) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_create: no memory for the checker");
}

static void mti_replicas_destroy(mt_context *ctx) {
    mti_replicas *r = ctx->checker ? ctx->checker->replicas : NULL;
    int g;
    if (!r) return;
    for (g = 0; g < MTI_AXES; g++) mt_host_free(r->groups[g].list);
    for (g = 0; g < MTI_AXES; g++) mt_host_free(r->shares[g].list);
    mt_context_free(ctx, r->sums, MTI_REPLICA_SUMS * sizeof *r->sums);
    mt_host_free(r);
    ctx->checker->replicas = NULL;
}

static void mti_replicas_use_names(mti_checker *c) {
    size_t i;
    int g;
    for (g = 0; c->replicas && g < MTI_AXES; g++)
        for (i = 0; i < c->replicas->groups[g].count; i++) {
            mti_name_use(&c->names, c->replicas->groups[g].list[i].with);
            mti_name_use(&c->names, c->replicas->groups[g].list[i].by_with);
        }
}

/* Whether values are hashed now. A recorded graph cannot be compared, and work that overlaps is not waited for. */
static int mti_replicas_on(const mt_context *ctx) {
    return mt_check_mode(ctx) == 2 && !ctx->recording && ctx->stream == ctx->compute_stream;
}

/* Fetches the hashes that a GPU has computed. */
static mt_status mti_replicas_fetch(mt_context *ctx) {
    mti_replicas *r = ctx->checker->replicas;
    size_t i, bytes = (size_t)r->used * sizeof *r->sums;
    uint64_t *sums;
    mt_status status;
    int g;
    if (r->used == 0) return MT_SUCCESS;
    sums = (uint64_t *)mt_host_alloc(bytes);
    if (!sums) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the hashes of %d tensors", r->used);
    status = mt_cuda_fetch(ctx, sums, r->sums, bytes);
    if (status == MT_SUCCESS) status = mt_cuda_zero(ctx, r->sums, bytes);
    for (g = 0; status == MT_SUCCESS && g < ctx->checker->count; g++)
        for (i = 0; i < r->groups[g].count; i++) {
            mti_replica *e = &r->groups[g].list[i];
            if (e->sum) e->hash = sums[e->sum - 1];
            e->sum = 0;
        }
    r->used = 0;
    mt_host_free(sums);
    return status;
}

/* Without data, the hash of a view is its shape, whether it is zero and, if it is a part of a piece, its place there.
   So it is found when ranks multiply different columns of what all have, or when only some ranks have computed it. */
static void mti_replica_shape(const mti_checker *c, mt_tensor t, mti_replica *e) {
    mti_extent at = mti_extent_of(t);
    const mti_placed *p = mti_newest_at(c, at);
    if (p && p->content > MT_CONTENT_ANY && mti_extent_covers(at, p->at)) {
        e->differs = 'v';
        e->hash = p->content;
        return;
    }
    e->differs = mti_known_of(c, t).zero ? 'z' : 'c';
    e->hash = mti_hash_number(mti_hash_number((uint64_t)e->differs, (uint64_t)t.rows), (uint64_t)t.cols);
    if (p && mti_extent_covers(p->at, at))
        e->hash = mti_hash_number(e->hash, (uint64_t)at.begin - (uint64_t)p->at.begin);
}

static mt_status mti_replica_hash(mt_context *ctx, mt_tensor t, mti_replica *e) {
    mti_replicas *r = ctx->checker->replicas;
    void *memory = NULL;
    e->differs = 'v';
    if (ctx->device == MT_DEVICE_META) return mti_replica_shape(ctx->checker, t, e), MT_SUCCESS;
    if (ctx->device != MT_DEVICE_CUDA) return mt_hash_add(ctx, t, 0, 0, t.cols, &e->hash);
    if (!r->sums) {
        MT_TRY(mt_context_alloc(ctx, MTI_REPLICA_SUMS * sizeof *r->sums, &memory));
        r->sums = (uint64_t *)memory;
    }
    if (r->used == MTI_REPLICA_SUMS) MT_TRY(mti_replicas_fetch(ctx));
    e->sum = ++r->used;
    return mt_hash_add(ctx, t, 0, 0, t.cols, &r->sums[e->sum - 1]);
}

/* Adds a copy of *e to the list of group g. */
static mt_status mti_replica_add(mt_context *ctx, int g, const mti_replica *e) {
    mti_replica_list *l = &ctx->checker->replicas->groups[g];
    if (l->count == MTI_REPLICAS_MOST) return MT_SUCCESS;
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 256;
        mti_replica *list = (mti_replica *)mt_host_alloc(capacity * sizeof *list);
        if (!list) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the hashes of %zu tensors", capacity);
        if (l->count) memcpy(list, l->list, l->count * sizeof *list);
        mt_host_free(l->list);
        l->list = list;
        l->capacity = capacity;
    }
    l->list[l->count] = *e;
    l->list[l->count++].moves = l->moves;
    return MT_SUCCESS;
}

/* Notes that a call takes an operand that all ranks have for this rank's term of a sum. Only one of them may. */
static mt_status mti_term_note(mt_context *ctx, mti_replica e, unsigned terms) {
    int g;
    e.differs = 't';
    for (g = 0; g < ctx->checker->count; g++) {
        if (!(terms >> g & 1)) continue;
        e.hash = mti_hash_number('t', (uint64_t)ctx->checker->axes[g].rank);
        MT_TRY(mti_replica_add(ctx, g, &e));
    }
    return MT_SUCCESS;
}

/* Notes that ranks may have read other rows or columns, so that their lists have the same entries. */
static mt_status mti_apart_note(mt_context *ctx, int g, mti_replica e) {
    e.differs = 'u';
    e.hash = 0;
    e.sum = 0;
    return mti_replica_add(ctx, g, &e);
}

/* -- shares: what ranks must not have alike -- */

static mt_status mti_share_add(mt_context *ctx, int g, const mti_share *e) {
    mti_share_list *l = &ctx->checker->replicas->shares[g];
    if (l->count == MTI_REPLICAS_MOST) return MT_SUCCESS;
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 64;
        mti_share *list = (mti_share *)mt_host_alloc(capacity * sizeof *list);
        if (!list) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the shares of %zu tensors", capacity);
        if (l->count) memcpy(list, l->list, l->count * sizeof *list);
        mt_host_free(l->list);
        l->list = list;
        l->capacity = capacity;
    }
    l->list[l->count++] = *e;
    return MT_SUCCESS;
}

static const char *mti_element_at(mt_tensor t, int64_t row, int64_t col) {
    return (const char *)t.data + (size_t)(row * mt_tensor_ld(t) + col) * mt_dtype_size(t.dtype);
}

/* Whether t tells ranks apart: neither all of its rows nor all of its columns are equal. */
static int mti_varies(mt_tensor t) {
    size_t size = mt_dtype_size(t.dtype);
    int64_t i, j;
    int rows = t.rows == 1, cols = t.cols == 1;
    for (i = 0; i < t.rows && !(rows && cols); i++)
        for (j = 0; j < t.cols; j++) {
            rows |= memcmp(mti_element_at(t, i, j), mti_element_at(t, 0, j), size) != 0;
            cols |= memcmp(mti_element_at(t, i, j), mti_element_at(t, i, 0), size) != 0;
        }
    return rows && cols && t.rows * t.cols > 1;
}

/* Whether ids tell ranks apart: there are more than two different ones, which may be the same in each sequence. tokens:
   1 also wants that they are not positions, which count up from the first one. */
static int mti_ids_tell(mt_tensor t, int tokens) {
    int32_t low = 0, high = 0, first = 0, id;
    int64_t i, last = 0, others = 0, steps = !tokens, n = t.rows * t.cols;
    for (i = 0; i < n; i++) {
        memcpy(&id, mti_element_at(t, i / t.cols, i % t.cols), sizeof id);
        if (i == 0) low = high = first = id;
        low = id < low ? id : low;
        high = id > high ? id : high;
        steps += i > 0 && id != last + 1 && id != first;
        last = id;
    }
    for (i = 0; i < n; i++) {
        memcpy(&id, mti_element_at(t, i / t.cols, i % t.cols), sizeof id);
        others += id != low && id != high;
    }
    return others > 0 && steps > 0;
}

/* Positions that count up, and begin at 0 again at the end of each sequence. */
typedef struct mti_counting {
    int64_t first, wrap, rows; /* wrap: the length of a sequence, if one ends before the last row; 0: none does */
} mti_counting;

#define MTI_COUNTING_BITS 21 /* of each number in a mark */
#define MTI_NOT_COUNTING UINT64_MAX

/* Returns the mark of kind p: that of ids that count up, or MTI_NOT_COUNTING. */
static uint64_t mti_counting_mark(mt_tensor ids) {
    const int64_t most = 1 << MTI_COUNTING_BITS, rows = ids.rows * ids.cols;
    mti_counting c = {0, 0, rows};
    int32_t id;
    int64_t i, last = 0; /* ids may be as large as INT32_MAX */
    for (i = 0; i < rows; i++) {
        memcpy(&id, mti_element_at(ids, i / ids.cols, i % ids.cols), sizeof id);
        if (i == 0) c.first = id;
        else if (id == 0 && (c.wrap == 0 || c.wrap == last + 1)) c.wrap = last + 1;
        else if (id != last + 1) return MTI_NOT_COUNTING;
        last = id;
    }
    if (c.first < 0 || c.first >= most || c.wrap < 0 || c.wrap >= most || rows >= most) return MTI_NOT_COUNTING;
    return (uint64_t)c.first | (uint64_t)c.wrap << MTI_COUNTING_BITS | (uint64_t)rows << 2 * MTI_COUNTING_BITS;
}

static mti_counting mti_counting_of(uint64_t mark) {
    const uint64_t mask = ((uint64_t)1 << MTI_COUNTING_BITS) - 1;
    mti_counting c;
    c.first = (int64_t)(mark & mask);
    c.wrap = (int64_t)(mark >> MTI_COUNTING_BITS & mask);
    c.rows = (int64_t)(mark >> 2 * MTI_COUNTING_BITS);
    return c;
}

/* Whether ids of `rows` rows are positions in sequences of `seq` tokens. */
static int mti_is_counting(uint64_t mark, int64_t rows, int64_t seq) {
    mti_counting c = mti_counting_of(mark);
    if (mark == MTI_NOT_COUNTING || c.rows != rows) return 0;
    return c.wrap ? c.wrap == seq && c.first < seq : c.first + c.rows <= seq;
}

/* Whether two ranks have positions that do not fit together: if each rank has the next `rows` rows of sequences, their
   first positions are multiples of a step apart, and each of these is that of equally many ranks. Without the last
   position on any rank they may be tokens that count up. mark(rank) is all[rank * count]. */
static int mti_positions_misfit(const uint64_t *all, size_t count, int ranks, int64_t rows, int64_t seq, int *a,
                                int *b) {
    int64_t step = seq, rest = rows, next, apart;
    int i, alike, ends = 0;
    if (seq <= 0 || rows < 3 || rows % seq == 0 || rows * ranks % seq != 0) return 0;
    for (i = 0; i < ranks; i++) {
        if (!mti_is_counting(all[(size_t)i * count], rows, seq)) return 0;
        ends |= mti_counting_of(all[(size_t)i * count]).first + rows >= seq;
    }
    if (!ends) return 0;
    while (rest) next = step % rest, step = rest, rest = next; /* the greatest common divisor */
    for (*b = 1; *b < ranks; ++*b)
        for (*a = 0, alike = 1; *a < *b; ++*a) {
            apart = mti_counting_of(all[(size_t)*a * count]).first - mti_counting_of(all[(size_t)*b * count]).first;
            alike += apart == 0;
            if (apart % step != 0 || alike > ranks * step / seq) return 1;
        }
    return 0;
}

/* Sets *mark to a hash of what a rank has in t. Returns 0 when nothing can be said: values that are all equal, those of
   a GPU, and on MT_DEVICE_META what no operator has made of numbers. */
static int mti_share_mark(mt_context *ctx, mt_tensor t, uint64_t *mark) {
    const mti_extent at = mti_extent_of(t);
    const mti_placed *p = mti_newest_at(ctx->checker, at);
    *mark = p ? p->content : 0;
    if (*mark == MT_CONTENT_ANY || mti_is_meant(ctx->checker, at) || (*mark && !mti_extent_covers(at, p->at))) return 0;
    if (ctx->device == MT_DEVICE_META) return *mark != 0;
    if (ctx->device != MT_DEVICE_CPU || t.dtype == MT_U8 || !mti_varies(t)) return 0;
    *mark = 0;
    return mt_hash_add(ctx, t, 0, 0, t.cols, mark) == MT_SUCCESS;
}

/* Notes an operand that a call reads and that group g splits: what the program has declared, and integers. */
static mt_status mti_share_read(mt_context *ctx, int g, const char *where, const char *with, const mt_operand *o,
                                const mti_known *known) {
    int is_ids = o->t.dtype == MT_I32, is_data = mti_is_data(&ctx->checker->axes[g]);
    mti_share e;
    if (known->may[g] != 1 << MT_SPLIT_ROWS && known->may[g] != 1 << MT_SPLIT_COLS) return MT_SUCCESS;
    if (ctx->checker->axes[g].only_group) return MT_SUCCESS;
    if (!is_ids && !(known->by && strcmp(known->by, "mt_declare") == 0)) return MT_SUCCESS;
    if (is_ids && ctx->device == MT_DEVICE_CPU && !mti_ids_tell(o->t, is_data)) return MT_SUCCESS;
    if (is_ids && is_data && ctx->device != MT_DEVICE_CPU) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.with = with;
    e.kind = is_data ? 'd' : is_ids ? 'i' : 's';
    e.rows = o->t.rows * o->t.cols;
    snprintf(e.what, sizeof e.what, "%s", o->name);
    if (!mti_share_mark(ctx, o->t, &e.mark)) return MT_SUCCESS;
    MT_TRY(mti_share_add(ctx, g, &e));
    if (e.kind != 'i' || ctx->device != MT_DEVICE_CPU) return MT_SUCCESS;
    e.kind = 'p';
    e.mark = mti_counting_mark(o->t);
    return mti_share_add(ctx, g, &e);
}

/* The newest piece that has all of a view and is replicated over group g, or NULL. */
static const mti_placed *mti_replicated_at(const mti_checker *c, int g, mti_extent at) {
    const mti_placed *p = mti_newest_at(c, at);
    return p && mti_extent_covers(p->at, at) && p->may[g] == 1 << MT_REPLICATED ? p : NULL;
}

/* Notes a view of a call in memory that is at `whole`: it must not be that of all ranks. */
static mt_status mti_view_add(mt_context *ctx, int g, const char *where, const char *with, mti_extent view,
                              mti_extent whole) {
    mti_share e;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.with = with;
    e.kind = 's';
    e.is_view = 1;
    e.mark = (uint64_t)(view.end - view.begin) << 32 ^ (uint64_t)(view.begin - whole.begin);
    snprintf(e.what, sizeof e.what, "the view");
    return mti_share_add(ctx, g, &e);
}

/* Notes the view that mt_check_view takes for this rank's part of what all ranks have. */
static mt_status mti_view_share(mt_context *ctx, int g, mt_tensor t, mt_placement placement) {
    const mti_placed *p;
    if (!mti_replicas_on(ctx) || !mti_has_elements(t)) return MT_SUCCESS;
    if (placement != MT_SPLIT_ROWS && placement != MT_SPLIT_COLS) return MT_SUCCESS;
    p = mti_replicated_at(ctx->checker, g, mti_extent_of(t));
    if (!p || mti_extent_covers(mti_extent_of(t), p->at)) return MT_SUCCESS;
    if (mti_is_meant(ctx->checker, mti_extent_of(t))) return MT_SUCCESS;
    return mti_view_add(ctx, g, "mt_check_view", p->name ? p->name : p->with, mti_extent_of(t), p->at);
}

/* Whether a piece inside e is this rank's part of what a call has written, and what group g splits. */
static int mti_is_own_part(const mti_placed *p, int g, mti_extent e) {
    if (!p->by || p->zero || strcmp(p->by, "mt_declare") == 0 || !mti_extent_covers(e, p->at)) return 0;
    return p->may[g] == 1 << MT_SPLIT_ROWS || p->may[g] == 1 << MT_SPLIT_COLS;
}

/* Whether t has zeros, with parts or terms of this rank written in. If it has something else, the program has written
   it since, and what calls have written before is no longer there. */
static int mti_is_of_parts(const mti_checker *c, int g, mt_tensor t) {
    const mti_extent e = mti_extent_of(t);
    const mti_placed *p = NULL;
    if (mti_known_of(c, t).unwritten) return 0;
    while ((p = mti_placed_older(&c->written, e, p ? p->age : UINT64_MAX)) != NULL) {
        if (mti_extent_covers(p->at, e)) return p->zero;
        if (!p->zero && p->may[g] != 1 << MT_PARTIAL && !mti_is_own_part(p, g, e)) return 0;
    }
    return 1;
}

/* Notes the views of t, a term of a sum, to which calls have written this rank's part of what is split: if it is the
   same view on all ranks, the sum adds up other parts. */
static mt_status mti_terms_share(mt_context *ctx, int g, mt_tensor t) {
    const mti_extent e = mti_extent_of(t);
    const mti_placed *p = NULL;
    if (!mti_replicas_on(ctx) || mti_is_data(&ctx->checker->axes[g])) return MT_SUCCESS;
    if (!mti_is_of_parts(ctx->checker, g, t)) return MT_SUCCESS;
    while ((p = mti_placed_older(&ctx->checker->written, e, p ? p->age : UINT64_MAX)) != NULL) {
        if (mti_extent_covers(p->at, e)) return MT_SUCCESS; /* what is older is no longer there */
        if (mti_is_own_part(p, g, e) && !mti_is_meant(ctx->checker, p->at))
            MT_TRY(mti_view_add(ctx, g, p->by, p->with, p->at, e));
    }
    return MT_SUCCESS;
}

#define MTI_RANGE_PARTS 1024 /* a range is counted in these parts of the columns */

/* Notes which columns of what all ranks have a call reads together with an operand that is split by columns. Each rank
   may read its own, so the values are not compared then. */
static mt_status mti_range_note(mt_context *ctx, int g, const mti_ruling *r, const mt_operand *o, mti_known *known) {
    const mti_extent at = mti_extent_of(o->t);
    const mti_placed *p;
    uintptr_t first;
    mti_share e;
    if (!mti_replicas_on(ctx) || known->may[g] != 1 << MT_REPLICATED || known->parameter) return MT_SUCCESS;
    p = mti_replicated_at(ctx->checker, g, at);
    if (!p || at.width >= p->at.width || !mti_extents_share_rows(at, p->at)) return MT_SUCCESS;
    known->apart |= 1u << g;
    first = (at.begin - p->at.begin) % p->at.pitch;
    memset(&e, 0, sizeof e);
    e.where = r->where;
    e.with = p->with;
    e.kind = 'g';
    e.piece = p->age;
    e.mark = (uint64_t)(first * MTI_RANGE_PARTS / p->at.width) << 16;
    e.mark |= (uint64_t)((first + at.width) * MTI_RANGE_PARTS / p->at.width);
    snprintf(e.what, sizeof e.what, "%s", o->name);
    return mti_share_add(ctx, g, &e);
}

/* Whether the ranges that ranks have read of the piece of entry i leave columns that none has read. */
static int mti_range_misses(const mti_share_list *l, size_t i, const uint64_t *all, int ranks) {
    unsigned char read[MTI_RANGE_PARTS];
    size_t k;
    uint64_t part;
    int rank;
    memset(read, 0, sizeof read);
    for (k = 0; k < l->count; k++)
        for (rank = 0; rank < ranks && l->list[k].kind == 'g' && l->list[k].piece == l->list[i].piece; rank++) {
            uint64_t mark = all[(size_t)rank * l->count + k];
            for (part = mark >> 16; part < (mark & 0xffff) && part < MTI_RANGE_PARTS; part++) read[part] = 1;
        }
    return memchr(read, 0, sizeof read) != NULL;
}

/* Whether ranks a and b have alike what they must not, where entry i is. Of data, in all entries of the name. */
static int mti_pair_alike(const mti_share_list *l, size_t i, const uint64_t *all, int a, int b) {
    size_t k;
    for (k = 0; k < l->count; k++) {
        if (k != i && (l->list[i].kind != 'd' || l->list[k].kind != 'd')) continue;
        if (strcmp(l->list[k].what, l->list[i].what) != 0) continue;
        if (all[(size_t)a * l->count + k] != all[(size_t)b * l->count + k]) return 0;
    }
    return 1;
}

/* Counts the comparisons, from the first one on, in which two data ranks have had the same everywhere. One in which all
   differ ends it: ranks may draw the same of a small text by chance. */
static void mti_data_count(mti_share_list *l, const uint64_t *all, int ranks) {
    size_t i;
    int a, b, found = 0, has = 0;
    for (i = 0; i < l->count && !found; i++) {
        if (l->list[i].kind != 'd') continue;
        has = 1;
        for (b = 1; b < ranks; b++)
            for (a = 0; a < b; a++) found |= mti_pair_alike(l, i, all, a, b);
    }
    if (has && l->data_alike >= 0) l->data_alike = found ? l->data_alike + 1 : -1;
}

/* Whether entry i is alike on two ranks that must not have it alike. *a and *b become the ranks. */
static int mti_share_alike(const mti_share_list *l, size_t i, const uint64_t *all, int ranks, int *a, int *b) {
    const char kind = l->list[i].kind;
    int pairs = 0;
    *a = 0, *b = 1;
    if (kind == 'g') return mti_range_misses(l, i, all, ranks);
    if (kind == 'p') return mti_positions_misfit(all + i, l->count, ranks, l->list[i].rows, l->seq, a, b);
    if (kind == 'd' && l->data_alike < MTI_DATA_ALIKE) return 0;
    if (kind == 'i' && (l->seq <= 0 || l->list[i].rows % l->seq == 0)) return 0;
    for (*b = 1; *b < ranks; ++*b)
        for (*a = 0; *a < *b; ++*a) {
            int alike = mti_pair_alike(l, i, all, *a, *b);
            if (alike && kind != 's' && kind != 'i') return 1;
            pairs += alike;
        }
    *a = 0, *b = 1;
    return (kind == 's' || kind == 'i') && pairs == ranks * (ranks - 1) / 2;
}

/* of_a and of_b: the marks of the two ranks */
static mt_status mti_share_refuse(mt_context *ctx, const mt_comm *comm, const char *where, const mti_share *e, int a,
                                  int b, uint64_t of_a, uint64_t of_b) {
    char what[256];
    if (e->where)
        snprintf(what, sizeof what, "%s of %.60s%s%.*s%s", e->what, e->where, e->with ? " \"" : "",
                 e->with ? mti_layer_length(e->with) : 0, e->with ? e->with : "", e->with ? "\"" : "");
    else snprintf(what, sizeof what, "the %s of '%.100s'", e->what, e->with ? e->with : "");
    if (e->kind == 'g')
        return mt_fail(ctx, MT_ERR_MISMATCH,
                       "%s: %s is a part of the columns of what all ranks of \"%s\" (%d ranks) have, and no rank reads "
                       "the others: each rank needs its own part, such as its own group of keys and values",
                       where, what, comm->name, comm->size);
    if (e->kind == 'p')
        return mt_fail(ctx, MT_ERR_MISMATCH,
                       "%s: %s is split over \"%s\" (%d ranks), but rank %d has the positions from %lld on and rank %d "
                       "those from %lld on, and each has %lld rows: check offsets by the rank, or call "
                       "mt_declare_meant for it before, if they are meant so",
                       where, what, comm->name, comm->size, a, (long long)mti_counting_of(of_a).first, b,
                       (long long)mti_counting_of(of_b).first, (long long)e->rows);
    return mt_fail(ctx, MT_ERR_MISMATCH,
                   "%s: %s is split over \"%s\" (%d ranks), but rank %d has the same as rank %d: each rank needs its "
                   "own part; check offsets by the rank, and what each rank reads and loads, or call mt_declare_meant "
                   "for it before, if equal parts are meant%s",
                   where, what, comm->name, comm->size, b, a, e->is_view ? " or it was written over" : "");
}

/* Gathers the marks of all ranks, if all have the same entries. *all [ranks, count], which the caller frees, stays NULL
   otherwise. */
static mt_status mti_shares_gather(mt_context *ctx, mt_comm *comm, const mti_share_list *l, uint64_t **all) {
    uint64_t mine[2], *told, *marks;
    size_t i, k, ranks = (size_t)comm->size;
    mt_status status;
    int alike = 1;
    mine[0] = l->count;
    mine[1] = 0;
    for (i = 0; i < l->count; i++)
        for (k = 0; l->list[i].what[k]; k++)
            mine[1] = mti_hash_number(mine[1], (uint64_t)(unsigned char)l->list[i].what[k] + (uint64_t)l->list[i].kind);
    told = (uint64_t *)mt_host_alloc((ranks * (l->count + 2) + l->count) * sizeof *told);
    if (!told) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "no memory for the shares of %d ranks", comm->size);
    marks = told + ranks * (l->count + 2);
    status = mt_comm_gather_host(ctx, comm, mine, sizeof mine, told);
    for (i = 0; i < ranks; i++) alike &= told[2 * i] == mine[0] && told[2 * i + 1] == mine[1];
    for (i = 0; i < l->count; i++) marks[i] = l->list[i].mark;
    if (status == MT_SUCCESS && alike && l->count)
        status = mt_comm_gather_host(ctx, comm, marks, l->count * sizeof *marks, told);
    *all = status == MT_SUCCESS && alike ? told : NULL;
    if (!*all) mt_host_free(told);
    return status;
}

/* Compares what ranks have each for itself, and forgets it. */
static mt_status mti_shares_compare(mt_context *ctx, mt_comm *comm, const char *where, int g) {
    mti_share_list *l = &ctx->checker->replicas->shares[g];
    uint64_t *all = NULL;
    mt_status status = mti_shares_gather(ctx, comm, l, &all);
    size_t i;
    int a = 0, b = 0;
    if (status == MT_SUCCESS && all) mti_data_count(l, all, comm->size);
    for (i = 0; status == MT_SUCCESS && all && i < l->count; i++)
        if (mti_share_alike(l, i, all, comm->size, &a, &b))
            status = mti_share_refuse(ctx, comm, where, &l->list[i], a, b, all[(size_t)a * l->count + i],
                                      all[(size_t)b * l->count + i]);
    mt_host_free(all);
    l->count = 0;
    l->seq = 0;
    return status;
}

/* Hashes an operand that a call reads, once, for all groups over which it is replicated. Parameters and gradients are
   compared once in a step instead (mt_parallel.h). What the program says to be split must differ between ranks. */
static mt_status mti_replica_read(mt_context *ctx, const char *where, const char *with, const mt_operand *operand,
                                  const mti_known *known) {
    mti_replica e;
    int g, hashed = 0;
    if (!mti_replicas_on(ctx) || !(operand->use & 1)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.with = with;
    e.by = known->by;
    e.by_with = known->with;
    snprintf(e.operand, sizeof e.operand, "%s", operand->name);
    MT_TRY(mti_term_note(ctx, e, known->terms));
    for (g = 0; g < ctx->checker->count && !known->parameter && operand->t.dtype != MT_U8; g++) {
        MT_TRY(mti_share_read(ctx, g, where, with, operand, known));
        if (known->may[g] != 1 << MT_REPLICATED) continue;
        if (!hashed) MT_TRY(mti_replica_hash(ctx, operand->t, &e));
        hashed = 1;
        if (known->apart >> g & 1) MT_TRY(mti_apart_note(ctx, g, e));
        else MT_TRY(mti_replica_add(ctx, g, &e));
    }
    return MT_SUCCESS;
}

/* Notes a number of a place for group g. known is 0 if ranks may have other numbers. */
static mt_status mti_place_number_note(mt_context *ctx, int g, mti_replica *e, const char *field, const char *number,
                                       uint64_t hash, int known) {
    e->differs = known ? 'p' : 'u';
    e->hash = hash;
    snprintf(e->operand, sizeof e->operand, "%.12s%s", field, number);
    return mti_replica_add(ctx, g, e);
}

/* Notes from what seed a call takes random words, which must be the same on all ranks, and by what place for the rows
   or columns that ranks have alike. What a rank does not know is noted, too, so that its list has the entries of other
   ranks. */
static mt_status mti_place_note(mt_context *ctx, const char *where, const char *field, const mti_known *known,
                                const mt_place *place) {
    mti_replica e;
    uint64_t words;
    int g;
    if (!mti_replicas_on(ctx)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.with = known->with;
    words = mti_hash_number(mti_hash_number(0, place->seed), place->subsequence);
    for (g = 0; g < ctx->checker->count; g++) {
        int rows = known->may[g] == 1 << MT_REPLICATED || known->may[g] == 1 << MT_SPLIT_COLS;
        int cols = known->may[g] == 1 << MT_REPLICATED || known->may[g] == 1 << MT_SPLIT_ROWS;
        int some = known->may[g] != MTI_ALL_PLACEMENTS;
        MT_TRY(mti_place_number_note(ctx, g, &e, field, "", words, some));
        MT_TRY(mti_place_number_note(ctx, g, &e, field, ".first_row", (uint64_t)place->first_row, rows));
        MT_TRY(mti_place_number_note(ctx, g, &e, field, ".first_col", (uint64_t)place->first_col, cols));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_check_replica(mt_context *ctx, const mt_comm *comm, const char *what, const char *name,
                                  mt_tensor t) {
    const mti_placed *p;
    mti_replica e;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!what || mt_dtype_size(t.dtype) < 2)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_check_replica: what is NULL, or t is %s", mt_dtype_name(t.dtype));
    if (!mti_replicas_on(ctx) || !mti_has_elements(t)) return MT_SUCCESS;
    g = mti_axis_of(ctx->checker, comm, 1);
    if (g < 0) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    p = mti_parameter_at(ctx->checker, mti_extent_of(t));
    e.with = p ? p->name : name; /* the checker's name outlives the parameter */
    snprintf(e.operand, sizeof e.operand, "%s", what);
    MT_TRY(mti_replica_hash(ctx, t, &e));
    return mti_replica_add(ctx, g, &e);
}

MT_API uint64_t mt_check_content_of(const double *numbers, int count) {
    uint64_t hash = 2, bits;
    int i;
    for (i = 0; numbers && i < count; i++) {
        memcpy(&bits, &numbers[i], sizeof bits);
        hash = mti_hash_number(hash, bits);
    }
    return hash > MT_CONTENT_ANY ? hash : hash + 2;
}

MT_API void mt_check_content(mt_context *ctx, mt_tensor t, uint64_t content) {
    mti_extent e;
    mti_placed *p;
    if (!mt_check_mode(ctx) || !mti_has_elements(t)) return;
    e = mti_extent_of(t);
    p = mti_newest_at(ctx->checker, e);
    if (p && mti_extent_covers(e, p->at)) p->content = content;
}

/* Whether numbers of a call with t must be the same on the ranks of a group. */
static int mti_numbers_bind(const mti_checker *c, int g, mt_tensor t, int data) {
    const int is_data = mti_is_data(&c->axes[g]);
    int others = 1 << (data == 2 ? MT_PARTIAL : MT_SPLIT_ROWS); /* what ranks with other numbers have */
    if (c->axes[g].only_group) return 0;
    if (!mti_has_elements(t) || (data == 1 && is_data)) return 1;
    if (is_data) others |= 1 << MT_SPLIT_ROWS;
    return !(mti_known_of(c, t).may[g] & others);
}

MT_API mt_status mt_check_numbers(mt_context *ctx, const char *where, const char *what, mt_tensor t, int data,
                                  const double *numbers, int count) {
    mti_replica e;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mti_replicas_on(ctx)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.differs = 'n';
    e.hash = mt_check_content_of(numbers, count);
    snprintf(e.operand, sizeof e.operand, "%s", what);
    for (g = 0; g < ctx->checker->count; g++)
        if (mti_numbers_bind(ctx->checker, g, t, data)) MT_TRY(mti_replica_add(ctx, g, &e));
    return MT_SUCCESS;
}

/* Returns the set of an operand that has an element for each row or column of t, by what t is. */
static int mti_side_set(int set, mt_placement along) {
    if (set == 1 << along) return set;
    if (set & (set - 1)) return MTI_ALL_PLACEMENTS;
    return 1 << MT_REPLICATED;
}

MT_API mt_status mt_check_side(mt_context *ctx, const char *where, const char *name, mt_tensor side, mt_tensor t,
                               mt_placement along, int alike) {
    mti_known known, of;
    mt_operand o;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mti_replicas_on(ctx) || !mti_has_elements(side) || !mti_has_elements(t)) return MT_SUCCESS;
    of = mti_known_of(ctx->checker, t);
    memset(&known, 0, sizeof known);
    memset(known.may, MTI_ALL_PLACEMENTS, sizeof known.may);
    for (g = 0; g < ctx->checker->count && !of.zero; g++)
        if (!ctx->checker->axes[g].only_group) known.may[g] = (unsigned char)mti_side_set(of.may[g], along);
    for (g = 0; alike && g < ctx->checker->count; g++)
        if (known.may[g] == 1 << along) known.may[g] = MTI_ALL_PLACEMENTS;
    known.by = "mt_declare";
    o.name = name;
    o.t = side;
    o.use = 1;
    return mti_replica_read(ctx, where, NULL, &o, &known);
}

MT_API mt_status mt_check_share(mt_context *ctx, const mt_comm *comm, const char *what, const char *name, mt_tensor t) {
    const mti_placed *p;
    mti_share e;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    g = mti_replicas_on(ctx) && mti_has_elements(t) ? mti_axis_of(ctx->checker, comm, 1) : -1;
    if (g < 0) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    p = mti_parameter_at(ctx->checker, mti_extent_of(t));
    e.with = p ? p->name : name;
    e.kind = 'S';
    snprintf(e.what, sizeof e.what, "%s", what);
    if (!mti_share_mark(ctx, t, &e.mark)) return MT_SUCCESS;
    return mti_share_add(ctx, g, &e);
}

MT_API void mt_check_sequences(mt_context *ctx, mt_tensor t, int64_t seq) {
    mti_known k;
    int g;
    if (!ctx || !mti_replicas_on(ctx) || !mti_has_elements(t)) return;
    k = mti_known_of(ctx->checker, t);
    for (g = 0; g < ctx->checker->count; g++) {
        mti_share_list *l = &ctx->checker->replicas->shares[g];
        int parts = k.may[g] == 1 << MT_SPLIT_COLS && seq > 0 && (l->seq == 0 || l->seq == seq);
        if (!k.zero) l->seq = parts ? seq : -1;
    }
}

MT_API mt_status mt_check_number(mt_context *ctx, const mt_comm *comm, const char *what, float number) {
    mti_replica e;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!what) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_check_number: what is NULL");
    g = mti_replicas_on(ctx) ? mti_axis_of(ctx->checker, comm, 1) : -1;
    if (g < 0) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.differs = 'v';
    e.hash = mt_hash_word(0, mt_f32_bits(number));
    snprintf(e.operand, sizeof e.operand, "%s", what);
    return mti_replica_add(ctx, g, &e);
}

/* What rank b has, and rank a has not. */
static const char *mti_say_differs(char a, char b) {
    if (a != b) return b == 'z' ? "only zeros, unlike" : "not only zeros, unlike";
    if (b == 'n') return "other numbers than";
    return b == 'p' ? "another seed or place than" : b == 'c' ? "other rows or columns than" : "other values than";
}

/* Returns the text of a list: for each entry its name, NUL, the collectives before, the hash, what the hash is of, n
   for a note and r for what a call reads, who wrote it, NUL. */
static mti_told_text mti_replicas_write(const void *user) {
    const mti_replica_list *l = (const mti_replica_list *)user;
    mti_told_text t;
    size_t i;
    t.bytes = 0;
    t.data = (char *)mt_host_alloc(l->count * MTI_REPLICA_TEXT + 1);
    for (i = 0; t.data && i < l->count; i++) {
        const mti_replica *e = &l->list[i];
        char *at = t.data + t.bytes, since[208];
        if (e->where)
            snprintf(at, MTI_REPLICA_TEXT / 2, "%s of %.60s%s%.*s%s", e->operand, e->where, e->with ? " \"" : "",
                     e->with ? mti_layer_length(e->with) : 0, e->with ? e->with : "", e->with ? "\"" : "");
        else if (e->with) snprintf(at, MTI_REPLICA_TEXT / 2, "the %s of '%.100s'", e->operand, e->with);
        else snprintf(at, MTI_REPLICA_TEXT / 2, "%s", e->operand);
        t.bytes += strlen(at) + 1;
        at = t.data + t.bytes;
        mti_since_text(e->by, e->by_with, since, sizeof since);
        snprintf(at, MTI_REPLICA_TEXT / 2, "%016llx%016llx%c%c%s", (unsigned long long)e->moves,
                 (unsigned long long)e->hash, e->differs, e->where ? 'r' : 'n', since);
        t.bytes += strlen(at) + 1;
    }
    return t;
}

/* An entry in the text of a list. */
typedef struct mti_replica_text {
    const char *name, *value; /* NULL: there is none */
    uint64_t end;             /* where the next entry begins */
} mti_replica_text;

/* Returns the next entry that is a note, or that is none. */
static mti_replica_text mti_replica_next(const mti_told_text *t, uint64_t from, int is_note) {
    mti_replica_text e;
    e.end = from;
    do {
        e.name = mti_told_next(t, &e.end);
        e.value = mti_told_next(t, &e.end);
    } while (e.value && (e.value[2 * MTI_REPLICA_DIGITS + 1] == 'n') != is_note);
    return e;
}

/* Finds the first note, or the first entry that is none, that has another hash in list y than in list x. Entries are
   compared when the same calls lie between the last collective and them. */
static int mti_replica_differs(const mti_told_text *x, const mti_told_text *y, int is_note, mti_replica_text *in_x,
                               mti_replica_text *in_y) {
    mti_replica_text a = mti_replica_next(x, 0, is_note), b = mti_replica_next(y, 0, is_note);
    char skip[MTI_REPLICA_DIGITS + 1] = ""; /* the collectives after which the ranks have made different calls */
    while (a.value && b.value) {
        int order = strncmp(a.value, b.value, MTI_REPLICA_DIGITS);
        int alike = order == 0 && strcmp(a.name, b.name) == 0 && strncmp(a.value, skip, MTI_REPLICA_DIGITS) != 0;
        int known = a.value[2 * MTI_REPLICA_DIGITS] != 'u' && b.value[2 * MTI_REPLICA_DIGITS] != 'u';
        if (alike && known && strncmp(a.value, b.value, 2 * MTI_REPLICA_DIGITS) != 0) break;
        if (order == 0 && !alike) memcpy(skip, a.value, MTI_REPLICA_DIGITS);
        if (order <= 0) a = mti_replica_next(x, a.end, is_note);
        if (order >= 0) b = mti_replica_next(y, b.end, is_note);
    }
    *in_x = a;
    *in_y = b;
    return a.value && b.value;
}

/* Writes the first entry that has other values on rank b than on rank a. */
static int mti_say_replica(mti_text *text, const mti_told *all, const mt_comm *comm, int a, int b,
                           const mti_told_text *x, const mti_told_text *y) {
    mti_replica_text in_x, in_y, note, other;
    int found = mti_replica_differs(x, y, 0, &in_x, &in_y), noted = mti_replica_differs(x, y, 1, &note, &other);
    (void)all;
    if (!found && !noted) return 0;
    if (!found || (noted && note.end < in_x.end)) in_x = note, in_y = other;
    if (in_x.value[2 * MTI_REPLICA_DIGITS] == 't') {
        mti_say(text,
                "ranks %d and %d both add %s to the sum over \"%s\" (%d ranks), but each has the whole: add it on one "
                "rank only, or declare what is 1/%d of it as MT_PARTIAL",
                a, b, in_x.name, comm->name, comm->size, comm->size);
        return 1;
    }
    mti_say(text,
            "%s %s over \"%s\" (%d ranks)%s, but rank %d has %s rank %d: check seeds, dropout, inputs, and memory that "
            "is written behind the library's back",
            in_x.name, strchr("pn", in_x.value[2 * MTI_REPLICA_DIGITS]) ? "must agree" : "is replicated", comm->name,
            comm->size, in_x.value + 2 * MTI_REPLICA_DIGITS + 2, b,
            mti_say_differs(in_x.value[2 * MTI_REPLICA_DIGITS], in_y.value[2 * MTI_REPLICA_DIGITS]), a);
    return 1;
}

/* Compares the list of a group, and forgets it. */
static mt_status mti_replicas_compare(mt_context *ctx, mt_comm *comm, const char *where, mti_replica_list *l) {
    mt_ledger ledger = comm->ledger;
    mti_telling telling;
    mti_told told;
    mt_status status;
    size_t i;
    MT_TRY(mti_replicas_fetch(ctx));
    told.hash = 0;
    told.group = 0;
    for (i = 0; i < l->count; i++) told.hash = mt_hash_word(told.hash + l->list[i].hash, (uint32_t)l->list[i].moves);
    telling.user = l;
    telling.write = mti_replicas_write;
    telling.say = mti_say_replica;
    mt_check_pause(ctx);
    status = comm->transport->has_peers ? mti_compare_ranks(ctx, comm, where, told, &telling) : MT_SUCCESS;
    comm->ledger = ledger; /* that of the program alone */
    l->count = 0;
    l->moves = 0;
    return mt_check_resume(ctx, status);
}

MT_API mt_status mt_check_replicas(mt_context *ctx, mt_comm *comm, const char *where) {
    int g;
    if (!ctx || !comm || !where)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_check_replicas: %s is NULL",
                          !ctx   ? "ctx"
                          : comm ? "where"
                                 : "comm");
    g = mti_replicas_on(ctx) ? mti_axis_of(ctx->checker, comm, 0) : -1;
    if (g < 0) return MT_SUCCESS;
    MT_TRY(mti_replicas_compare(ctx, comm, where, &ctx->checker->replicas->groups[g]));
    return comm->transport->has_peers ? mti_shares_compare(ctx, comm, where, g) : MT_SUCCESS;
}

/* Counts a collective of a group, and compares the list of the group when it is due. */
static mt_status mti_replicas_due(mt_context *ctx, mt_comm *comm, const char *name) {
    mti_replica_list *l;
    char where[64];
    int g = mti_replicas_on(ctx) ? mti_axis_of(ctx->checker, comm, 0) : -1;
    if (g < 0) return MT_SUCCESS;
    l = &ctx->checker->replicas->groups[g];
    if (++l->moves < MTI_REPLICAS_EVERY) return MT_SUCCESS;
    snprintf(where, sizeof where, "mt_%s", name);
    return mti_replicas_compare(ctx, comm, where, l);
}

/* ---- >>conjugates ------------------------------------------------------------------------------------------------ */

/* Refuses a tensor that has an unknown dtype or a negative size, is not contiguous, or has no data. */
static mt_status mti_check_view(mt_context *ctx, mt_comm *comm, const char *name, const char *what, mt_tensor t) {
    MT_TRY(mti_check_home(ctx, comm, name));
    if (mt_dtype_size(t.dtype) == 0)
        return mti_refuse(ctx, comm, MT_ERR_DTYPE, "mt_%s: %s.dtype is %d, must be " MTI_DTYPES, name, what,
                          (int)t.dtype);
    if (t.rows < 0 || t.cols < 0 || (t.cols > 0 && t.rows > INT64_MAX / 8 / t.cols))
        return mti_refuse(ctx, comm, MT_ERR_SHAPE, "mt_%s: %s is [%lld, %lld], which is not a valid shape", name, what,
                          (long long)t.rows, (long long)t.cols);
    if (mt_tensor_ld(t) != t.cols && t.rows > 1)
        return mti_refuse(ctx, comm, MT_ERR_SHAPE, "mt_%s: %s [%lld, %lld] must be contiguous, but its ld is %lld",
                          name, what, (long long)t.rows, (long long)t.cols, (long long)t.ld);
    if (!t.data && t.rows > 0 && t.cols > 0 && ctx->device != MT_DEVICE_META)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: the data of %s [%lld, %lld] is NULL", name, what,
                          (long long)t.rows, (long long)t.cols);
    if (mti_has_elements(t) && mt_context_has_address(ctx, t.data) && (uintptr_t)t.data % mt_dtype_size(t.dtype))
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT,
                          "mt_%s: the data of %s, %p, is not aligned to its %zu-byte elements", name, what, t.data,
                          mt_dtype_size(t.dtype));
    return MT_SUCCESS;
}

/* Checks x and y: one is the whole tensor, the other this rank's part of its rows or columns. */
static mt_status mti_check_views(mt_context *ctx, mt_comm *comm, const char *name, mt_tensor x, mt_tensor y,
                                 int x_is_whole, int by_rows) {
    mt_tensor whole = x_is_whole ? x : y, part = x_is_whole ? y : x;
    int64_t row_parts, col_parts;
    MT_TRY(mti_check_view(ctx, comm, name, "x", x));
    MT_TRY(mti_check_view(ctx, comm, name, "y", y));
    if (x.dtype != y.dtype)
        return mti_refuse(ctx, comm, MT_ERR_DTYPE, "mt_%s: x is %s, y is %s", name, mt_dtype_name(x.dtype),
                          mt_dtype_name(y.dtype));
    row_parts = by_rows ? comm->size : 1;
    col_parts = by_rows ? 1 : comm->size;
    if (whole.rows % row_parts || whole.cols % col_parts || whole.rows / row_parts != part.rows ||
        whole.cols / col_parts != part.cols)
        return mti_refuse(ctx, comm, MT_ERR_SHAPE,
                          "mt_%s: x [%lld, %lld] and y [%lld, %lld] do not fit: %s must be one of %d equal parts of "
                          "the %s of %s",
                          name, (long long)x.rows, (long long)x.cols, (long long)y.rows, (long long)y.cols,
                          x_is_whole ? "y" : "x", comm->size, by_rows ? "rows" : "columns", x_is_whole ? "x" : "y");
    return MT_SUCCESS;
}

static size_t mti_elements(mt_tensor t) { return (size_t)t.rows * (size_t)t.cols; }

/* Copies a matrix between two tensors with different leading dimensions: a view of columns and a contiguous part. */
static mt_status mti_copy_columns(mt_context *ctx, mt_tensor to, mt_tensor from) {
    size_t size = mt_dtype_size(to.dtype), bytes = (size_t)to.cols * size;
    int64_t r;
    if (ctx->device == MT_DEVICE_CUDA)
        return mt_cuda_copy_rows(ctx, to.data, (size_t)mt_tensor_ld(to) * size, from.data,
                                 (size_t)mt_tensor_ld(from) * size, bytes, to.rows);
    if (ctx->device == MT_DEVICE_META) return MT_SUCCESS;
    for (r = 0; bytes && r < to.rows; r++)
        MT_TRY(mti_bytes_copy(ctx, mt_tensor_rows(to, r, 1).data, mt_tensor_rows(from, r, 1).data, bytes));
    return MT_SUCCESS;
}

static mt_tensor mti_dense(mt_tensor t) {
    t.ld = t.cols; /* a tensor of one row may have any ld */
    return t;
}

/* Evaluates `call` without further rules, and returns its status. name: of the call, without mt_ */
#define MTI_WITHOUT_CHECKS(ctx, comm, name, call)                                                                      \
    do {                                                                                                               \
        MT_TRY(mti_replicas_due(ctx, comm, name));                                                                     \
        mt_check_pause(ctx);                                                                                           \
        return mt_check_resume(ctx, call);                                                                             \
    } while (0)

/* Applies the rule of a region and, if it fits, evaluates `call`. */
#define MTI_REGION(ctx, comm, where, is, becomes, x_name, x, y, call)                                                  \
    do {                                                                                                               \
        MT_TRY(mti_region_check(ctx, comm, where, is, becomes, x_name, x, y));                                         \
        MTI_WITHOUT_CHECKS(ctx, comm, &(where)[3], call);                                                              \
    } while (0)

static mt_status mti_region_reduce(mt_context *ctx, mt_comm *comm, const char *where, const char *x_name, mt_tensor t) {
    MT_TRY(mti_check_view(ctx, comm, where + 3, "the tensor", t));
    MTI_REGION(ctx, comm, where, 'P', 'R', x_name, t, t,
               mt_all_reduce(ctx, comm, t.data, t.data, mti_elements(t), t.dtype, MT_SUM));
}

MT_API mt_status mt_copy_to_tensor_region_forward(mt_context *ctx, mt_comm *comm, mt_tensor x) {
    MT_TRY(mti_check_view(ctx, comm, "copy_to_tensor_region_forward", "x", x));
    return mti_region_check(ctx, comm, "mt_copy_to_tensor_region_forward", 'R', 'R', "x", x, mt_tensor_rows(x, 0, 0));
}

MT_API mt_status mt_copy_to_tensor_region_backward(mt_context *ctx, mt_comm *comm, mt_tensor dx) {
    return mti_region_reduce(ctx, comm, "mt_copy_to_tensor_region_backward", "dx", dx);
}

MT_API mt_status mt_reduce_from_tensor_region_forward(mt_context *ctx, mt_comm *comm, mt_tensor y) {
    return mti_region_reduce(ctx, comm, "mt_reduce_from_tensor_region_forward", "y", y);
}

MT_API mt_status mt_reduce_from_tensor_region_backward(mt_context *ctx, mt_comm *comm, mt_tensor dy) {
    MT_TRY(mti_check_view(ctx, comm, "reduce_from_tensor_region_backward", "dy", dy));
    return mti_region_check(ctx, comm, "mt_reduce_from_tensor_region_backward", 'R', 'R', "dy", dy,
                            mt_tensor_rows(dy, 0, 0));
}

MT_API mt_status mt_scatter_to_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    MT_TRY(mti_check_views(ctx, comm, "scatter_to_tensor_region", x, y, 1, 0));
    MTI_REGION(ctx, comm, "mt_scatter_to_tensor_region", 'R', 'c', "x", x, y,
               mti_copy_columns(ctx, mti_dense(y), mt_tensor_cols(mti_dense(x), y.cols * comm->rank, y.cols)));
}

/* Gathers the parts of all ranks in the arena, one after the other, and copies each part to its columns of y. */
static mt_status mti_gather_columns(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    mt_tensor parts;
    int r;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.cols ? x.rows * comm->size : 0, x.cols, &parts));
    MT_TRY(mt_all_gather(ctx, comm, x.data, parts.data, mti_elements(x), x.dtype));
    for (r = 0; x.cols && r < comm->size; r++)
        MT_TRY(mti_copy_columns(ctx, mt_tensor_cols(y, x.cols * r, x.cols), mt_tensor_rows(parts, x.rows * r, x.rows)));
    return MT_SUCCESS;
}

static mt_status mti_gather_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    size_t mark;
    mt_status status;
    if (comm->size == 1) return mt_all_gather(ctx, comm, x.data, y.data, mti_elements(x), x.dtype);
    mark = mt_arena_mark(ctx);
    status = mti_gather_columns(ctx, comm, mti_dense(x), mti_dense(y));
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_gather_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    MT_TRY(mti_check_views(ctx, comm, "gather_from_tensor_region", x, y, 0, 0));
    MTI_REGION(ctx, comm, "mt_gather_from_tensor_region", 'c', 'R', "x", x, y,
               mti_gather_from_tensor_region(ctx, comm, x, y));
}

MT_API mt_status mt_scatter_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    mt_tensor mine;
    MT_TRY(mti_check_views(ctx, comm, "scatter_to_sequence_region", x, y, 1, 1));
    mine = mt_tensor_rows(mti_dense(x), y.rows * comm->rank, y.rows);
    MTI_REGION(ctx, comm, "mt_scatter_to_sequence_region", 'R', 'r', "x", x, y,
               mti_bytes_copy(ctx, y.data, mine.data, mti_elements(y) * mt_dtype_size(y.dtype)));
}

MT_API mt_status mt_gather_from_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    MT_TRY(mti_check_views(ctx, comm, "gather_from_sequence_region", x, y, 0, 1));
    MTI_REGION(ctx, comm, "mt_gather_from_sequence_region", 'r', 'R', "x", x, y,
               mt_all_gather(ctx, comm, x.data, y.data, mti_elements(x), x.dtype));
}

MT_API mt_status mt_reduce_scatter_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    MT_TRY(mti_check_views(ctx, comm, "reduce_scatter_to_sequence_region", x, y, 1, 1));
    MTI_REGION(ctx, comm, "mt_reduce_scatter_to_sequence_region", 'P', 'r', "x", x, y,
               mt_reduce_scatter(ctx, comm, x.data, y.data, mti_elements(y), x.dtype, MT_SUM));
}

/* -- in chunks -- */

static mt_status mti_check_rows(mt_context *ctx, mt_comm *comm, const char *name, mt_tensor part, int64_t first,
                                int64_t rows) {
    if (first >= 0 && rows >= 0 && first <= part.rows && rows <= part.rows - first) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_SHAPE, "mt_%s: rows [%lld, %lld + %lld) of %lld", name, (long long)first,
                      (long long)first, (long long)rows, (long long)part.rows);
}

/* The rule of mt_gather_rows_from_sequence_region, or of mt_reduce_scatter_rows_to_sequence_region, for the same rows
   of each block of the whole view. A block has as many rows as this rank's part. This rank's block is the last one,
   because it may be the memory of the part. The listener is told of it alone, and the part that a gather reads is
   hashed with it alone. */
static mt_status mti_rows_check(mt_context *ctx, const mt_comm *comm, int gathers, const char *where, mt_tensor x,
                                mt_tensor y, int64_t first, int64_t rows) {
    mt_check_listener listener;
    struct mti_replicas *replicas;
    mt_status status = MT_SUCCESS;
    int i;
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    listener = ctx->checker->listener;
    replicas = ctx->checker->replicas;
    for (i = 1; i <= comm->size && status == MT_SUCCESS; i++) {
        int block = (comm->rank + i) % comm->size;
        mt_tensor part = mt_tensor_rows(gathers ? x : y, first, rows);
        mt_tensor piece = mt_tensor_rows(gathers ? y : x, block * (gathers ? x : y).rows + first, rows);
        ctx->checker->listener = i == comm->size ? listener : NULL;
        ctx->checker->replicas = !gathers || i == comm->size ? replicas : NULL;
        if (gathers) status = mti_region_check(ctx, comm, where, 'r', 'R', "x", part, piece);
        else
            status = mti_region_check(ctx, comm, where, 'P', 'r', "x", piece,
                                      i == comm->size ? part : mt_tensor_rows(part, 0, 0));
    }
    ctx->checker->listener = listener;
    ctx->checker->replicas = replicas;
    return status;
}

/* A call on rows [first, first + rows) of this rank's part, and on the same rows of each block of the whole tensor. A
   block has as many elements as `part`. */
static mti_call mti_rows_call(int kind, mt_tensor send, mt_tensor recv, mt_tensor part, int64_t first, int64_t rows) {
    mti_call call =
        mti_call_make(kind, mt_tensor_rows(mti_dense(send), first, rows).data,
                      mt_tensor_rows(mti_dense(recv), first, rows).data, (size_t)(rows * part.cols), part.dtype);
    call.stride = mti_elements(part);
    call.goes_on = first > 0;
    return call;
}

MT_API mt_status mt_gather_rows_from_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y,
                                                     int64_t first, int64_t rows) {
    mti_call call;
    MT_TRY(mti_check_views(ctx, comm, "gather_rows_from_sequence_region", x, y, 0, 1));
    MT_TRY(mti_check_rows(ctx, comm, "gather_rows_from_sequence_region", x, first, rows));
    call = mti_rows_call(MT_ALL_GATHER, x, y, x, first, rows);
    MT_TRY(mti_rows_check(ctx, comm, 1, "mt_gather_rows_from_sequence_region", x, y, first, rows));
    MTI_WITHOUT_CHECKS(ctx, comm, "gather_rows_from_sequence_region",
                       MT_RANGE("all_gather", mti_run_collective(ctx, comm, &call)));
}

MT_API mt_status mt_reduce_scatter_rows_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y,
                                                           int64_t first, int64_t rows) {
    mti_call call;
    MT_TRY(mti_check_views(ctx, comm, "reduce_scatter_rows_to_sequence_region", x, y, 1, 1));
    MT_TRY(mti_check_rows(ctx, comm, "reduce_scatter_rows_to_sequence_region", y, first, rows));
    call = mti_rows_call(MT_REDUCE_SCATTER, x, y, y, first, rows);
    MT_TRY(mti_rows_check(ctx, comm, 0, "mt_reduce_scatter_rows_to_sequence_region", x, y, first, rows));
    MTI_WITHOUT_CHECKS(ctx, comm, "reduce_scatter_rows_to_sequence_region",
                       MT_RANGE("reduce_scatter", mti_run_collective(ctx, comm, &call)));
}

MT_API mt_status mt_reduce_rows_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor y, int64_t first,
                                                   int64_t rows) {
    mti_call call;
    MT_TRY(mti_check_view(ctx, comm, "reduce_rows_from_tensor_region", "y", y));
    MT_TRY(mti_check_rows(ctx, comm, "reduce_rows_from_tensor_region", y, first, rows));
    call = mti_rows_call(MT_ALL_REDUCE, y, y, y, first, rows);
    MTI_REGION(ctx, comm, "mt_reduce_rows_from_tensor_region", 'P', 'R', "y", mt_tensor_rows(y, first, rows),
               mt_tensor_rows(y, first, rows), MT_RANGE("all_reduce", mti_run_collective(ctx, comm, &call)));
}

/* -- overlap with the computation -- */

MT_API mt_status mt_overlap_begin(mt_context *ctx, const mt_comm *comm, mt_stream stream) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!comm || ctx->stream != ctx->compute_stream || ctx->planned_stream != MT_STREAM_NONE)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_overlap_begin: %s",
                       comm ? "the last one has not ended" : "comm is NULL");
    if (stream < MT_STREAM_NONE || stream > MT_STREAM_THIRD)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_overlap_begin: stream is %d, must be MT_STREAM_NONE, MT_STREAM_SECOND or MT_STREAM_THIRD",
                       (int)stream);
    if (ctx->device == MT_DEVICE_CPU || comm->size == 1 || ctx->invariant || stream == MT_STREAM_NONE)
        return MT_SUCCESS;
    if (ctx->device == MT_DEVICE_META) {
        ctx->planned_stream = stream;
        mti_trace_overlap(ctx, MT_WORK_OVERLAP_BEGIN, "overlap_begin", stream, 0);
        return MT_SUCCESS;
    }
    return mti_cuda_fork(ctx, stream == MT_STREAM_THIRD ? ctx->third_stream : ctx->second_stream);
}

MT_API mt_status mt_overlap_end(mt_context *ctx, int ticket, mt_status status) {
    int third, low, high;
    if (!ctx || (ctx->stream == ctx->compute_stream && ctx->planned_stream == MT_STREAM_NONE))
        return status; /* nothing overlaps */
    third = ctx->planned_stream ? ctx->planned_stream == MT_STREAM_THIRD : ctx->stream == ctx->third_stream;
    low = third ? MT_OVERLAP_TICKET_THIRD : 0;
    high = third ? MT_OVERLAP_TICKET_THIRD : MT_OVERLAP_TICKETS - 1;
    if (ticket < low || ticket > high) {
        MT_KEEP(status,
                mt_fail(ctx, MT_ERR_ARGUMENT, "mt_overlap_end: ticket is %d, must be %d to %d", ticket, low, high));
        ticket = low; /* the overlap ends in any case */
    }
    if (ctx->planned_stream) {
        mti_trace_overlap(ctx, MT_WORK_OVERLAP_END, "overlap_end", ctx->planned_stream, ticket);
        ctx->planned_stream = MT_STREAM_NONE;
        ctx->pending |= 1u << ticket;
        return status;
    }
    MT_KEEP(status, mti_cuda_fork_end(ctx, ticket));
    return status;
}

MT_API mt_status mt_overlap_wait(mt_context *ctx, int ticket) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (ticket < 0 || ticket > MT_OVERLAP_TICKET_THIRD || !(ctx->pending >> ticket & 1u)) return MT_SUCCESS;
    if (ctx->device != MT_DEVICE_META) return mti_cuda_join(ctx, ticket);
    mti_trace_overlap(ctx, MT_WORK_OVERLAP_WAIT, "overlap_wait", MT_STREAM_NONE, ticket);
    ctx->pending &= ~(1u << ticket);
    return MT_SUCCESS;
}

MT_API mt_status mt_overlap_wait_all(mt_context *ctx) {
    mt_status status = MT_SUCCESS;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    for (i = 0; i < MT_OVERLAP_TICKETS; i++) MT_KEEP(status, mt_overlap_wait(ctx, i));
    return status;
}

MT_API int mt_overlap_is_planned(const mt_context *ctx) { return ctx && ctx->planned == MT_DEVICE_CUDA; }

/* ---- >>graph: CUDA graphs ---------------------------------------------------------------------------------------- */

struct mt_graph {
    mt_graph *next;             /* in the list mt_context.graphs */
    mt_comm *comm;              /* the ranks that launch together; NULL: this rank alone */
    uint64_t number;            /* of the graph, among those that comm has recorded */
    struct CUgraphExec_st *run; /* NULL: rank 0 of comm has it, the device is MT_DEVICE_META, or the graph is lost */
    int lost;                   /* 1: a communicator that the graph may use has failed or has been destroyed */
};

/* Returns the communicator whose ranks record one graph together; NULL: this rank records alone. */
static mt_comm *mti_graph_recorders(const mt_context *ctx, mt_comm *comm) {
    int together = ctx->device == MT_DEVICE_CUDA && comm && comm->size > 1 && comm->transport->are_threads;
    return together ? comm : NULL;
}

#if MT_HAS_CUDA
static mt_status mti_cuda_capture(mt_context *ctx) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaStreamBeginCapture(ctx->stream, cudaStreamCaptureModeThreadLocal));
    ctx->captures = 1;
    if (ctx->turns) __atomic_store_n(&ctx->turns->captured, 1, __ATOMIC_RELEASE);
    return MT_SUCCESS;
}

static void mti_cuda_captured(mt_context *ctx) {
    ctx->captures = 0;
    if (ctx->turns) __atomic_store_n(&ctx->turns->captured, 0, __ATOMIC_RELEASE);
}

/* Ends a capture that has not ended, and discards it. Of the ranks that record together only rank 0 can do this; CUDA
   then reports that streams have not been joined. */
static void mti_cuda_drop(mt_context *ctx) {
    mti_group *g = ctx->turns;
    cudaGraph_t graph = NULL;
    if (!ctx->captures) return;
    if (g && !ctx->has_turn) ctx->has_turn = mti_flag_wait(g, &g->turn, 1);
    if (cudaStreamEndCapture(ctx->compute_stream, &graph) != cudaSuccess) cudaGetLastError();
    if (graph) cudaGraphDestroy(graph);
    mti_cuda_captured(ctx);
}

/* After a recording of several ranks that has failed: waits until rank 0 has ended the capture, because this rank's
   stream is captured until then. The rank does not wait before it needs its stream, so that it can first leave groups
   in which rank 0 may wait for it. */
static void mti_graph_await_end(mt_context *ctx) {
    if (!ctx->turns || ctx->recording) return;
    mti_flag_wait(ctx->turns, &ctx->turns->captured, 0);
    mti_group_release(ctx->turns);
    ctx->turns = NULL;
}

/* Ends the capture of this rank's stream, and makes a graph that can run. */
static mt_status mti_cuda_capture_end(mt_context *ctx, struct CUgraphExec_st **run) {
    cudaGraph_t graph = NULL;
    mt_status status;
    MT_TRY(mt_cuda_enter(ctx));
    status = mti_cuda_check(ctx, cudaStreamEndCapture(ctx->stream, &graph), "cudaStreamEndCapture");
    mti_cuda_captured(ctx);
    if (status == MT_SUCCESS)
        status = mti_cuda_check(ctx, cudaGraphInstantiateWithFlags(run, graph, 0), "cudaGraphInstantiateWithFlags");
    if (graph) cudaGraphDestroy(graph);
    return status;
}

#if MTI_NCCL
/* Makes all graphs of a context unusable, because a communicator is about to end. A graph that runs is freed when it
   has ended ("cudaGraphExecDestroy", CUDA Runtime API). */
static void mti_graphs_lose(mt_context *ctx) {
    mt_graph *graph;
    mti_cuda_drop(ctx);
    for (graph = ctx->graphs; graph; graph = graph->next) {
        if (graph->run && cudaGraphExecDestroy(graph->run) != cudaSuccess) cudaGetLastError();
        graph->run = NULL;
        graph->lost = 1;
    }
}
#endif

static mt_status mti_cuda_graph_launch(mt_context *ctx, const mti_call *call) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaGraphLaunch(call->run, ctx->stream));
    mti_nccl_launched(ctx);
    return MT_SUCCESS;
}

static void mti_cuda_graph_destroy(mt_context *ctx, mt_graph *graph) {
    if (mti_has_no_gpu(ctx)) return;
    mti_cuda_synchronize(ctx);
    if (graph->run && cudaGraphExecDestroy(graph->run) != cudaSuccess) cudaGetLastError();
}
#else
static mt_status mti_cuda_capture(mt_context *ctx) { return (void)ctx, MT_ERR_UNSUPPORTED; }
static void mti_cuda_drop(mt_context *ctx) { (void)ctx; }
static void mti_graph_await_end(mt_context *ctx) { (void)ctx; }
static mt_status mti_cuda_capture_end(mt_context *ctx, struct CUgraphExec_st **run) {
    return (void)ctx, (void)run, MT_ERR_UNSUPPORTED;
}
static mt_status mti_cuda_graph_launch(mt_context *ctx, const mti_call *call) {
    return (void)ctx, (void)call, MT_ERR_UNSUPPORTED;
}
static void mti_cuda_graph_destroy(mt_context *ctx, mt_graph *graph) { (void)ctx, (void)graph; }
#endif

/* After a recording has ended or failed. */
static void mti_graph_forget(mt_context *ctx) {
    mti_turn_give(ctx);
    ctx->recorders = NULL;
    ctx->recording = 0;
    if (ctx->turns && !__atomic_load_n(&ctx->turns->captured, __ATOMIC_ACQUIRE)) mti_graph_await_end(ctx);
}

/* Rank 0's part of mt_graph_begin of several ranks: begins the capture of its stream. */
static mt_status mti_graph_first(mt_context *ctx, mt_comm *comm) {
    MT_TRY(mti_turn_take(ctx));
    MT_TRY(mti_cuda_capture(ctx));
    return mti_cuda_record(ctx, &mti_slot_of(comm->group, 0)->done);
}

/* The part of the other ranks: their streams join the capture by the event of rank 0. */
static mt_status mti_graph_join(mt_context *ctx, mt_comm *comm) {
    const mti_slot *first = mti_slot_of(comm->group, 0);
    if (comm->rank == 0 || first->failed) return MT_SUCCESS;
    MT_TRY(mti_turn_take(ctx));
    return mti_cuda_await(ctx, &first->done);
}

/* Rank 0's part of mt_graph_end of several ranks: its stream comes after the streams of all ranks. */
static mt_status mti_graph_close(mt_context *ctx, mt_comm *comm, int discards, struct CUgraphExec_st **run) {
    mt_status status = MT_SUCCESS;
    int r;
    for (r = 1; r < comm->size; r++) {
        const mti_slot *slot = mti_slot_of(comm->group, r);
        discards |= slot->failed;
        if (!slot->failed) MT_KEEP(status, mti_cuda_await(ctx, &slot->done));
    }
    if (!discards && status == MT_SUCCESS) return mti_cuda_capture_end(ctx, run);
    mti_cuda_drop(ctx);
    return status;
}

/* After the second meeting: all ranks fail when one has. status: of this rank */
static mt_status mti_graph_all(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    int r;
    for (r = 0; r < comm->size && status == MT_SUCCESS; r++)
        if (mti_slot_of(comm->group, r)->failed)
            status =
                mti_refuse(ctx, comm, MT_ERR_PEER, "%s on \"%s\" (%d ranks): rank %d has failed, or discards the graph",
                           mti_call_name(call->kind), comm->name, comm->size, r);
    mti_meet(comm); /* `failed` may change now */
    return status;
}

/* A capture begins only after the first meeting: before, a rank may still put events of the last collective into its
   stream. */
static mt_status mti_graph_begin_all(mt_context *ctx, mt_comm *comm) {
    mti_call call = mti_call_make(MTI_GRAPH_BEGIN, NULL, NULL, 0, MT_U8);
    mti_slot *mine = mti_slot_of(comm->group, comm->rank);
    mt_status status = MT_SUCCESS;
    MT_TRY(mti_enter(ctx, comm, &call));
    if (comm->rank == 0) status = mti_graph_first(ctx, comm);
    mine->failed = status != MT_SUCCESS;
    mti_turn_give(ctx);
    mti_meet(comm);
    if (status == MT_SUCCESS) status = mti_graph_join(ctx, comm);
    if (comm->rank != 0) mine->failed = status != MT_SUCCESS; /* the others read that of rank 0 now */
    mti_turn_give(ctx);
    mti_exit(comm);
    MT_TRY(mti_graph_all(ctx, comm, &call, status));
    status = mti_turn_take(ctx);
    return status != MT_SUCCESS ? mti_break_failed(ctx, comm, &call, status) : MT_SUCCESS;
}

/* run NULL: this rank discards the graph. */
static mt_status mti_graph_end_all(mt_context *ctx, mt_comm *comm, struct CUgraphExec_st **run) {
    mti_call call = mti_call_make(MTI_GRAPH_END, NULL, NULL, 0, MT_U8);
    mti_slot *mine = mti_slot_of(comm->group, comm->rank);
    mt_status status;
    MT_TRY(mti_enter(ctx, comm, &call));
    status = mti_turn_take(ctx);
    if (status == MT_SUCCESS) status = mti_cuda_record(ctx, &mine->done);
    mine->failed = !run || status != MT_SUCCESS;
    mti_turn_give(ctx);
    mti_meet(comm);
    if (comm->rank == 0) {
        MT_KEEP(status, mti_graph_close(ctx, comm, mine->failed, run));
        mine->failed |= status != MT_SUCCESS;
    }
    mti_exit(comm);
    if (!run && status == MT_SUCCESS) return mti_meet(comm), MT_SUCCESS;
    return mti_graph_all(ctx, comm, &call, status);
}

static mt_status mti_graph_check(mt_context *ctx, const char *function, int recording) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (ctx->device == MT_DEVICE_CPU)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: the context is on MT_DEVICE_CPU; only MT_DEVICE_CUDA has graphs",
                       function);
    MT_TRY(mti_check_gpu(ctx));
    if (ctx->recording != recording)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the context %s", function,
                       recording ? "does not record: call mt_graph_begin before" : "records already");
    if (ctx->stream != ctx->compute_stream || ctx->planned_stream != MT_STREAM_NONE)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the last mt_overlap_begin has no mt_overlap_end", function);
    return MT_SUCCESS;
}

/* Later work in the compute stream comes after all overlaps. */
static mt_status mti_graph_wait_overlaps(mt_context *ctx) {
    mt_status status = mt_overlap_wait_all(ctx);
    MT_KEEP(status, mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    return status;
}

static mt_status mti_graph_begin(mt_context *ctx, mt_comm *comm) {
    mt_comm *recorders = mti_graph_recorders(ctx, comm);
    mt_status status = MT_SUCCESS;
    if (recorders && ctx->nccl)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_graph_begin: \"%s\" is not over NCCL, but the context has communicators over NCCL: pass one "
                       "of them, or NULL",
                       comm->name);
    MT_TRY(mti_graph_wait_overlaps(ctx));
    mti_graph_await_end(ctx);
    ctx->recorders = recorders;
    if (recorders) recorders->graphs++;
    ctx->turns = ctx->recorders ? comm->group : NULL;
    if (ctx->turns) __atomic_add_fetch(&ctx->turns->references, 1, __ATOMIC_RELAXED);
    ctx->recording = 1;
    if (ctx->recorders) status = mti_graph_begin_all(ctx, comm);
    else if (ctx->device == MT_DEVICE_CUDA) status = mti_cuda_capture(ctx);
    if (status == MT_SUCCESS) return MT_SUCCESS;
    mti_cuda_drop(ctx);
    mti_graph_forget(ctx);
    return status;
}

MT_API mt_status mt_graph_begin(mt_context *ctx, mt_comm *comm) {
    int before = mti_hold();
    mt_status status = mti_graph_check(ctx, "mt_graph_begin", 0);
    if (status == MT_SUCCESS) status = mti_graph_begin(ctx, comm);
    mti_release(before);
    return status;
}

static mt_status mti_graph_is_lost(mt_context *ctx, const char *function) {
    return mt_fail(ctx, MT_ERR_PEER, "%s: a communicator has failed or has been destroyed since the graph was recorded",
                   function);
}

static mt_status mti_graph_end(mt_context *ctx, mt_graph **out) {
    mt_graph *graph = out ? (mt_graph *)mt_host_alloc(sizeof *graph) : NULL;
    mt_status status = MT_SUCCESS, overlaps = mti_graph_wait_overlaps(ctx);
    int wanted = graph && overlaps == MT_SUCCESS;
    if (graph) graph->comm = ctx->recorders;
    if (graph && graph->comm) graph->number = graph->comm->graphs;
    if (ctx->recorders) status = mti_graph_end_all(ctx, ctx->recorders, wanted ? &graph->run : NULL);
    else if (ctx->device == MT_DEVICE_CUDA && wanted)
        status = ctx->captures ? mti_cuda_capture_end(ctx, &graph->run) : mti_graph_is_lost(ctx, "mt_graph_end");
    mti_cuda_drop(ctx); /* does nothing when the capture has ended */
    mti_graph_forget(ctx);
    if (out && !graph) status = mt_fail(ctx, MT_ERR_MEMORY, "mt_graph_end: no memory for the graph");
    MT_KEEP(status, overlaps);
    if (status != MT_SUCCESS || !graph) {
        mt_host_free(graph);
        return status;
    }
    graph->next = ctx->graphs;
    ctx->graphs = *out = graph;
    return MT_SUCCESS;
}

MT_API mt_status mt_graph_end(mt_context *ctx, mt_graph **out) {
    int before = mti_hold();
    mt_status status = mti_graph_check(ctx, "mt_graph_end", 1);
    if (out) *out = NULL;
    if (status == MT_SUCCESS) status = mti_graph_end(ctx, out);
    mti_release(before);
    return status;
}

static mt_status mti_graph_launch(mt_context *ctx, const mt_graph *graph) {
    mti_call call = mti_call_make(MTI_GRAPH_LAUNCH, NULL, NULL, graph->number, MT_U8);
    call.run = graph->run;
    if (graph->lost) return mti_graph_is_lost(ctx, "mt_graph_launch");
    MT_TRY(mti_graph_wait_overlaps(ctx));
    if (graph->comm) return mti_local_collective(ctx, graph->comm, &call);
    if (!graph->run) return MT_SUCCESS; /* MT_DEVICE_META */
    return mti_cuda_graph_launch(ctx, &call);
}

MT_API mt_status mt_graph_launch(mt_context *ctx, mt_graph *graph) {
    int before = mti_hold();
    mt_status status = mti_graph_check(ctx, "mt_graph_launch", 0);
    if (status == MT_SUCCESS && !graph) status = mt_fail(ctx, MT_ERR_ARGUMENT, "mt_graph_launch: graph is NULL");
    if (status == MT_SUCCESS) status = MT_RANGE("graph", mti_graph_launch(ctx, graph));
    mti_release(before);
    return status;
}

MT_API void mt_graph_destroy(mt_context *ctx, mt_graph *graph) {
    mt_graph **at;
    if (!ctx || !graph) return;
    if (ctx->device == MT_DEVICE_CUDA) mti_cuda_graph_destroy(ctx, graph);
    for (at = &ctx->graphs; *at && *at != graph;) at = &(*at)->next;
    if (*at) *at = graph->next;
    mt_host_free(graph);
}

/* ---- >>launch ---------------------------------------------------------------------------------------------------- */

/* Returns the message of the rank's status. When the last message is that of another error, which the rank has handled,
   returns the general text of the status. */
static const char *mti_rank_sentence(const mti_rank *rank) {
    const mt_comm *world = rank->world;
    return world->error[0] && world->error_status == rank->status ? world->error : mt_status_string(rank->status);
}

/* Tells the other ranks of all its groups that this rank leaves, and destroys the communicators that its function has
   not destroyed. */
static void mti_rank_over(mti_rank *rank) {
    mt_comm *comm;
    if (rank->status == MT_SUCCESS) snprintf(rank->reason, sizeof rank->reason, "returned from its function");
    else
        snprintf(rank->reason, sizeof rank->reason, "failed with %s (%s)", mt_status_name(rank->status),
                 mti_rank_sentence(rank));
    mti_leave(rank->world, rank->reason);
    for (comm = rank->children; comm; comm = comm->next) mti_leave(comm, rank->reason);
    while (rank->children) mt_comm_destroy(rank->children);
}

#define MTI_GRACE_SECONDS 5.0 /* after a failure, the other ranks have at least this time to return */

/* Through this struct, ranks that end inform the thread that waits for all ranks. */
typedef struct mti_watch {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    int ended, failed;
    mti_stopwatch since; /* time since the first rank failed */
} mti_watch;

static void mti_rank_ended(mti_rank *rank) {
    mti_watch *w = mti_is_forked(rank->world->process) ? NULL : rank->watch; /* the thread that watches is not here */
    if (w) pthread_mutex_lock(&w->mutex);
    rank->ended = 1;
    if (!w) return;
    w->ended++;
    if (rank->status != MT_SUCCESS && !w->failed++) w->since = mti_stopwatch_start(MTI_GRACE_SECONDS);
    pthread_cond_signal(&w->cond);
    pthread_mutex_unlock(&w->mutex);
}

static void mti_rank_run(mti_rank *rank) {
    int before;
    mti_pin(rank->core, rank->cores);
    rank->status = rank->run(rank->world, rank->user);
    before = mti_hold();
    mti_rank_over(rank);
    mti_rank_ended(rank);
    mti_release(before);
}

/* Ends a rank whose function has not returned, because its thread was cancelled or an exception has left it. */
static void mti_rank_cut_short(void *argument) {
    mti_rank *rank = (mti_rank *)argument;
    if (rank->ended) return;
    rank->status = mt_comm_fail(rank->world, MT_ERR_SYSTEM,
                                "pthread_cancel, pthread_exit or a C++ exception has ended its function");
    mti_rank_over(rank);
    mti_rank_ended(rank);
}

static void *mti_rank_thread(void *argument) {
    pthread_cleanup_push(mti_rank_cut_short, argument);
    mti_rank_run((mti_rank *)argument);
    pthread_cleanup_pop(0);
    return NULL;
}

static void mti_launch_say(const mt_launch_desc *desc, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
static void mti_launch_say(const mt_launch_desc *desc, const char *format, ...) {
    char text[MT_ERROR_BYTES + 64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (desc->logger.log) (desc->logger.log)(desc->logger.user, MT_LOG_ERROR, text);
    else fprintf(stderr, "%s\n", text);
}

/* Counts the ranks behind `first` that have failed with its message and were not reported, and notes that they are.
   Ranks that have lost another one are reported one by one. */
static int mti_ranks_say_the_same(mti_rank *first, mti_rank *end) {
    int same = 0;
    mti_rank *rank;
    if (first->status == MT_ERR_PEER || first->status == MT_ERR_TIMEOUT) return 0;
    for (rank = first + 1; rank < end; rank++) {
        if (!rank->ended || rank->told || rank->status != first->status) continue;
        if (strcmp(mti_rank_sentence(rank), mti_rank_sentence(first)) != 0) continue;
        rank->told++;
        same++;
    }
    return same;
}

/* Reports the ranks that have failed, and returns the status of the first one. Ranks with MT_ERR_PEER come last,
   because another rank's failure has usually caused theirs. A refusal that several ranks have is reported once. */
static mt_status mti_launch_report(const mt_launch_desc *desc, mti_rank *ranks, int count) {
    mt_status first = MT_SUCCESS;
    int secondary, r, same;
    char more[64];
    for (secondary = 0; secondary < 2; secondary++) {
        for (r = 0; r < count; r++) {
            mti_rank *rank = &ranks[r];
            if (!rank->ended || rank->status == MT_SUCCESS || (rank->status == MT_ERR_PEER) != secondary) continue;
            MT_KEEP(first, rank->status);
            if (rank->told++) continue;
            same = mti_ranks_say_the_same(rank, ranks + count);
            snprintf(more, sizeof more, " (%d more rank%s with the same error)", same, same == 1 ? "" : "s");
            mti_launch_say(desc, "rank %d of %d: %s: %s%s", rank->rank, rank->world->size, mt_status_name(rank->status),
                           mti_rank_sentence(rank), same > 0 ? more : "");
        }
    }
    return first;
}

static void mti_rank_not_started(mti_rank *rank, int error) {
    char text[128];
    snprintf(text, sizeof text, "mt_launch: the system gave no thread for rank %d (error %d)", rank->rank, error);
    rank->status = mt_comm_fail(rank->world, MT_ERR_SYSTEM, text);
    mti_rank_over(rank);
    mti_rank_ended(rank);
}

/* Waits until all ranks have ended, but at most until `seconds` after the first failure. Returns 1 when all ranks have
   ended. */
static int mti_watch_wait(const mt_launch_desc *desc, mti_watch *w, double seconds) {
    while (w->ended < desc->ranks && !(w->failed && mti_waited(&w->since) >= seconds)) {
        if (w->failed) mti_stopwatch_sleep(&w->since, seconds, &w->cond, &w->mutex);
        else pthread_cond_wait(&w->cond, &w->mutex);
    }
    return w->ended == desc->ranks;
}

/* Waits for the ranks. After a failure, it reports ranks that do not return, and in the end calls desc->stuck. Ranks
   that wait for a stuck rank return at their own timeout, so desc->stuck is not called before timeout_s. */
static void mti_watch_ranks(const mt_launch_desc *desc, mti_watch *w, mti_rank *ranks) {
    double patience = desc->timeout_s > 0 ? desc->timeout_s : MT_TIMEOUT_DEFAULT;
    int stuck = 0, r;
    if (patience < MTI_GRACE_SECONDS) patience = MTI_GRACE_SECONDS;
    pthread_mutex_lock(&w->mutex);
    if (!mti_watch_wait(desc, w, MTI_GRACE_SECONDS)) {
        mti_launch_report(desc, ranks, desc->ranks);
        for (r = 0; r < desc->ranks; r++)
            if (!ranks[r].ended)
                mti_launch_say(desc, "rank %d of %d: has not returned from its function, mt_launch waits for it", r,
                               desc->ranks);
        stuck = desc->stuck && !mti_watch_wait(desc, w, patience);
        if (stuck) mti_launch_report(desc, ranks, desc->ranks);
    }
    pthread_mutex_unlock(&w->mutex);
    if (stuck) desc->stuck(ranks->user);
}

/* The ranks of a launch, for mti_launch_end. worlds: NULL when `ranks` is not on the heap */
typedef struct mti_launch {
    mti_rank *ranks;
    mt_comm **worlds;
    int count;
} mti_launch;

/* Calls `function` with the variable's address at the end of its scope, also when an exception leaves the scope (in
   C++, or in C with -fexceptions). */
#define MTI_AT_END(function) __attribute__((unused, cleanup(function)))

/* Ends the ranks whose functions an exception has left, and frees everything. */
__attribute__((unused)) static void mti_launch_end(mti_launch *l) {
    int r;
    for (r = 0; l->ranks && r < l->count; r++) {
        if (!l->ranks[r].world) continue;
        mti_rank_cut_short(&l->ranks[r]);
        mti_comm_free(l->ranks[r].world);
    }
    if (!l->worlds) return;
    free(l->worlds);
    free(l->ranks);
}

/* Runs each rank on a thread. When the system refuses a thread, this rank and the ranks after it count as failed, and
   the started ranks see failed peers. */
static void mti_launch_threads(const mt_launch_desc *desc, mti_rank *ranks) {
    mti_watch watch;
    int r, error = 0, watched = pthread_mutex_init(&watch.mutex, NULL) == 0;
    if (watched && mti_cond_init(&watch.cond) != 0) {
        pthread_mutex_destroy(&watch.mutex);
        watched = 0;
    }
    watch.ended = watch.failed = 0;
    for (r = 0; r < desc->ranks; r++) {
        ranks[r].watch = watched ? &watch : NULL;
        if (!error) error = pthread_create(&ranks[r].thread, NULL, mti_rank_thread, &ranks[r]);
        ranks[r].started = !error;
        if (error) mti_rank_not_started(&ranks[r], error);
    }
    if (watched) mti_watch_ranks(desc, &watch, ranks);
    for (r = 0; r < desc->ranks; r++)
        if (ranks[r].started) pthread_join(ranks[r].thread, NULL);
    if (watched) pthread_cond_destroy(&watch.cond);
    if (watched) pthread_mutex_destroy(&watch.mutex);
}

/* Returns desc with the default of cores_per_rank. desc may be NULL. The caller sets the default of `ranks`. */
static mt_launch_desc mti_launch_defaults(const mt_launch_desc *desc) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.cores_per_rank == 0) d.cores_per_rank = 1;
    return d;
}

static mt_status mti_launch_check(const mt_launch_desc *desc, mt_rank_function rank_main) {
    if (!rank_main) {
        mti_launch_say(desc, "mt_launch: rank_main is NULL");
        return MT_ERR_ARGUMENT;
    }
    if (desc->ranks < 1 || desc->ranks > MTI_MAX_RANKS) {
        mti_launch_say(desc, "mt_launch: ranks is %d, must be from 1 to %d", desc->ranks, MTI_MAX_RANKS);
        return MT_ERR_ARGUMENT;
    }
    if (desc->cores_per_rank < 1) {
        mti_launch_say(desc, "mt_launch: cores_per_rank is %d, must be at least 0", desc->cores_per_rank);
        return MT_ERR_ARGUMENT;
    }
    if (!(desc->timeout_s >= 0)) {
        mti_launch_say(desc, "mt_launch: timeout_s is %g, must be at least 0", desc->timeout_s);
        return MT_ERR_ARGUMENT;
    }
    return MT_SUCCESS;
}

/* Creates the world, runs all ranks, and reports the failed ones. */
static mt_status mti_launch_ranks(const mt_launch_desc *desc, mti_rank *ranks, mt_comm **worlds, mt_rank_function run,
                                  void *user) {
    int core[8 * MTI_CORE_BYTES], cores = mti_allowed_cores(core, 8 * MTI_CORE_BYTES), each = desc->cores_per_rank, r;
    int pinned = !desc->no_pinning && desc->ranks > 1 && cores / each >= desc->ranks && MTI_CAN_PIN;
    mt_status status = mt_comm_create_local(desc->ranks, desc->timeout_s, worlds);
    if (status != MT_SUCCESS) {
        mti_launch_say(desc, "mt_launch: no memory for the communicators of %d ranks", desc->ranks);
        return status;
    }
    for (r = 0; r < desc->ranks; r++) {
        ranks[r].world = worlds[r];
        worlds[r]->owner = &ranks[r];
        ranks[r].run = run;
        ranks[r].user = user;
        ranks[r].rank = r;
        ranks[r].core = core + (pinned ? r * each : 0);
        ranks[r].cores = pinned ? each : 0;
    }
    if (desc->ranks == 1) mti_rank_run(ranks);
    else mti_launch_threads(desc, ranks);
    return mti_launch_report(desc, ranks, desc->ranks);
}

static mt_status mti_launch_all(const mt_launch_desc *desc, mt_rank_function run, void *user) {
    mti_launch all MTI_AT_END(mti_launch_end);
    all.count = desc->ranks;
    all.ranks = NULL;
    all.worlds = (mt_comm **)calloc((size_t)desc->ranks, sizeof *all.worlds);
    if (all.worlds) all.ranks = (mti_rank *)calloc((size_t)desc->ranks, sizeof *all.ranks);
    if (all.ranks) return mti_launch_ranks(desc, all.ranks, all.worlds, run, user);
    mti_launch_say(desc, "mt_launch: no memory for %d ranks", desc->ranks);
    return MT_ERR_MEMORY;
}

MT_API mt_status mt_launch(const mt_launch_desc *desc, mt_rank_function rank_main, void *user) {
    mt_launch_desc d = mti_launch_defaults(desc);
    int before = 0;
    mt_status status;
    if (d.ranks == 0) d.ranks = 1;
    MT_TRY(mti_launch_check(&d, rank_main));
    if (d.ranks > 1) before = mti_hold(); /* the ranks' threads use the stack of this one */
    status = mti_launch_all(&d, rank_main, user);
    if (d.ranks > 1) mti_release(before);
    return status;
}

/* -- ranks over MPI -- */

#if MTI_MPI
/* Reports the ranks that have not closed their ports in time, after this rank has closed its own. */
static mt_status mti_mpi_say_open(const mt_launch_desc *desc, const mti_mpi_port *port) {
    mti_text text;
    int r, said = 0;
    text.used = 0;
    for (r = 0; r < port->size && said < 8; r++)
        if (port->status[r] == MTI_MPI_OPEN) mti_say(&text, said++ ? ", %d" : "rank %d", r);
    mti_launch_say(desc, "rank %d of %d: %s: waited %.2f s at the end for %s", port->rank, port->size,
                   mt_status_name(MT_ERR_TIMEOUT), port->waited, text.data);
    return MT_ERR_TIMEOUT;
}

/* Returns the status of the whole job, chosen as in mti_launch_report, when all ranks have closed their ports. Else
   returns this rank's error, or MT_ERR_TIMEOUT. */
static mt_status mti_mpi_verdict(const mt_launch_desc *desc, const mti_mpi_port *port) {
    mt_status own = (mt_status)port->status[port->rank], first = MT_SUCCESS;
    int secondary, r;
    if (port->closed < port->size) return own == MT_SUCCESS ? mti_mpi_say_open(desc, port) : own;
    for (secondary = 0; secondary < 2; secondary++)
        for (r = 0; r < port->size; r++)
            if ((port->status[r] == (int)MT_ERR_PEER) == secondary) MT_KEEP(first, (mt_status)port->status[r]);
    return first;
}

/* Runs this process as one rank of an MPI communicator. *closed: the result of mti_mpi_close */
static mt_status mti_mpi_run(const mt_launch_desc *desc, MPI_Comm comm, mt_rank_function run, void *user, int *closed) {
    mti_mpi_port *port;
    mti_rank rank;
    mti_text text;
    mt_status status;
    memset(&rank, 0, sizeof rank);
    *closed = 0;
    text.used = 0;
    status = mti_mpi_create(&comm, desc->timeout_s, &rank.world, &text);
    if (status != MT_SUCCESS) {
        mti_launch_say(desc, "mt_world_from_env: %s: %s", mt_status_name(status),
                       text.used ? text.data : "the ranks of MPI do not connect");
        return status;
    }
    port = rank.world->mpi ? rank.world->mpi->port : NULL;
    if (port) port->references++;
    rank.world->owner = &rank;
    rank.rank = rank.world->rank;
    rank.run = run;
    rank.user = user;
    mti_rank_run(&rank);
    if (mti_is_forked(rank.world->process)) return rank.status;
    status = mti_launch_report(desc, &rank, 1);
    *closed = 1;
    if (port) {
        mti_mpi_destroy(rank.world);
        *closed = mti_mpi_close(port, rank.status);
        status = mti_mpi_verdict(desc, port);
        mti_mpi_port_end(port, *closed);
    }
    mti_comm_free(rank.world);
    return status;
}

/* Runs this process as one rank of MPI_COMM_WORLD. If the program has not initialized MPI, this function initializes
   and finalizes MPI. It calls MPI_Finalize only when all ranks have closed their ports, because MPI_Finalize waits for
   dead ranks. When a process ends without MPI_Finalize, mpirun ends the other processes. */
static mt_status mti_mpi_world(const mt_launch_desc *desc, mt_rank_function run, void *user) {
    int begun = 0, ended = 0, provided = MPI_THREAD_FUNNELED, size = 0, closed = 1;
    mt_status status;
    mti_text text;
    text.used = 0;
    MPI_Initialized(&begun); /* this and MPI_Finalized work in every process */
    MPI_Finalized(&ended);
    if (begun && mti_mpi_not_forked(&text) != MT_SUCCESS) {
        mti_launch_say(desc, "mt_world_from_env: %s", text.data);
        return MT_ERR_UNSUPPORTED;
    }
    if (ended || (!begun && MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)) {
        mti_launch_say(desc, "mt_world_from_env: MPI %s", ended ? "has been finalized" : "does not start");
        return MT_ERR_SYSTEM;
    }
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (provided < MPI_THREAD_FUNNELED) { /* a GEMM library may start threads */
        mti_launch_say(desc,
                       "mt_world_from_env: this MPI allows no threads: MPI_Init_thread provides %d, not "
                       "MPI_THREAD_FUNNELED (%d)",
                       provided, MPI_THREAD_FUNNELED);
        status = MT_ERR_UNSUPPORTED;
    } else if (desc->ranks && desc->ranks != size) {
        mti_launch_say(desc,
                       "mt_world_from_env: MPI_COMM_WORLD has %d ranks, not %d: was this program started by the mpirun "
                       "of another MPI than it was built with?",
                       size, desc->ranks);
        status = MT_ERR_ARGUMENT;
    } else {
        status = mti_mpi_run(desc, MPI_COMM_WORLD, run, user, &closed);
    }
    if (!begun && closed) MPI_Finalize();
    return status;
}
#endif

/* -- ranks that are processes -- */

/* The environment variables that a launcher sets for each process. The fields are arrays because pointers would need
   relocations.
   marker    this variable is set if and only if the launcher is used; "": rank, size or local_rank is set
   imitator  another launcher that sets this variable also sets rank and size: then only local_rank counts
   job_size  replaces `size` when that is not set
   mpi       1: the launcher starts MPI programs: when MPI is built, it connects the ranks */
typedef struct mti_launcher {
    char name[12], marker[16], imitator[16], rank[24], size[24], job_size[16], local_rank[28];
    int mpi;
} mti_launcher;

static const mti_launcher mti_launchers[] = {
    {"torchrun", "", "", "RANK", "WORLD_SIZE", "", "LOCAL_RANK", 0},
    {"Open MPI", "", "", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "", "OMPI_COMM_WORLD_LOCAL_RANK", 1},
    {"MPICH", "", "SLURM_STEP_ID", "PMI_RANK", "PMI_SIZE", "", "MPI_LOCALRANKID", 1},
    {"Slurm", "SLURM_STEP_ID", "", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", 1},
};

typedef struct mti_process {
    const mti_launcher *launcher; /* NULL: no launcher */
    int rank, size, local_rank;
    char rendezvous[320]; /* host:port for NCCL; "": not known */
} mti_process;

static int mti_in_env(const char *name) { return name[0] && getenv(name); }

static int mti_is_launcher(const mti_launcher *l) {
    if (l->marker[0]) return mti_in_env(l->marker);
    return mti_in_env(l->local_rank) || (!mti_in_env(l->imitator) && (mti_in_env(l->rank) || mti_in_env(l->size)));
}

static const mti_launcher *mti_find_launcher(void) {
    const mti_launcher *l = mti_launchers, *end = l + sizeof mti_launchers / sizeof *mti_launchers;
    while (l < end && !mti_is_launcher(l)) l++;
    return l < end ? l : NULL;
}

MT_API int mt_parse_whole(const char *text, uint64_t most, uint64_t *out) {
    uint64_t value = 0;
    if (!text || !*text || !out) return 0;
    for (; *text; text++) {
        uint64_t digit = (uint64_t)(unsigned char)*text - '0';
        if (digit > 9 || digit > most || value > (most - digit) / 10) return 0;
        value = 10 * value + digit;
    }
    *out = value;
    return 1;
}

/* Writes the variables of a launcher that are set: "RANK=3 LOCAL_RANK=1". */
static void mti_say_env(mti_text *text, const mti_launcher *l) {
    const char *names[5];
    int i, said = 0;
    names[0] = l->marker;
    names[1] = l->rank;
    names[2] = l->size;
    names[3] = l->job_size;
    names[4] = l->local_rank;
    text->used = 0;
    for (i = 0; i < 5; i++)
        if (mti_in_env(names[i])) mti_say(text, "%s%s=%.64s", said++ ? " " : "", names[i], getenv(names[i]));
}

/* Reads the number in a variable, which must be set and lie in [low, high]. */
static mt_status mti_env_number(const mt_launch_desc *desc, const mti_launcher *l, const char *name, int64_t low,
                                int64_t high, int64_t *out) {
    const char *text = getenv(name);
    uint64_t value = 0;
    mti_text there;
    int whole = text && mt_parse_whole(text, (uint64_t)high, &value);
    *out = whole ? (int64_t)value : -1;
    if (whole && *out >= low) return MT_SUCCESS;
    mti_say_env(&there, l);
    if (!text)
        mti_launch_say(desc, "mt_world_from_env: %s is not set, but there is %s (%s)", name, there.data, l->name);
    else
        mti_launch_say(desc,
                       "mt_world_from_env: %s is \"%.64s\", must be a whole number from %lld to %lld; there is %s (%s)",
                       name, text, (long long)low, (long long)high, there.data, l->name);
    return MT_ERR_ARGUMENT;
}

/* Writes the first host of a Slurm list: node01 for "node[01-04,7],login". Returns 0 when the list is malformed, or the
   name too long for `host`. */
static int mti_first_host(const char *list, char *host, size_t bytes) {
    size_t n = 0;
    int bracket = 0, skip = 0; /* bracket: inside [ ]; skip: behind the first number there */
    for (; *list && (bracket || *list != ','); list++) {
        if (*list == '[' || *list == ']') {
            if (bracket != (*list == ']') || (bracket && list[-1] == '[')) return 0;
            bracket = !bracket;
            skip = 0;
        } else if (bracket && (*list == ',' || *list == '-')) {
            if (list[-1] == '[') return 0;
            skip = 1;
        } else if (!skip) {
            if (n + 1 >= bytes) return 0;
            host[n++] = *list;
        }
    }
    host[n] = '\0';
    return n > 0 && !bracket;
}

static mt_status mti_find_host(const mt_launch_desc *desc, const mti_launcher *launcher, char *host, size_t bytes) {
    const char *name = "MASTER_ADDR", *list = getenv(name);
    host[0] = '\0';
    if (!list && launcher->marker[0]) {
        name = getenv("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
        list = getenv(name);
    }
    if (!list || mti_first_host(list, host, bytes)) return MT_SUCCESS;
    mti_launch_say(desc, "mt_world_from_env: %s is \"%.200s\", which names no host", name, list);
    return MT_ERR_ARGUMENT;
}

/* *port: 0: not known */
static mt_status mti_find_port(const mt_launch_desc *desc, const mti_launcher *launcher, int64_t *port) {
    int64_t job = 0, step = 0;
    *port = 0;
    if (getenv("MASTER_PORT")) {
        MT_TRY(mti_env_number(desc, launcher, "MASTER_PORT", 1, 65534, port));
        ++*port; /* torchrun listens on MASTER_PORT itself */
    } else if (launcher->marker[0] && getenv("SLURM_JOB_ID")) {
        MT_TRY(mti_env_number(desc, launcher, "SLURM_JOB_ID", 0, UINT32_MAX, &job));
        MT_TRY(mti_env_number(desc, launcher, "SLURM_STEP_ID", 0, UINT32_MAX, &step));
        *port = 61440 + (job + step) % 4096; /* above Linux' default range of automatic ports; differs between jobs */
    }
    return MT_SUCCESS;
}

/* Sets p->rendezvous when host and port are known. An IPv6 address is put in brackets, because it contains colons. */
static mt_status mti_find_rendezvous(const mt_launch_desc *desc, mti_process *p) {
    char host[256];
    int64_t port;
    MT_TRY(mti_find_host(desc, p->launcher, host, sizeof host));
    MT_TRY(mti_find_port(desc, p->launcher, &port));
    if (host[0] && port)
        snprintf(p->rendezvous, sizeof p->rendezvous, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, (int)port);
    return MT_SUCCESS;
}

/* Fills *p from the launcher's environment variables. Without a launcher, all fields of *p are 0. */
static mt_status mti_find_process(const mt_launch_desc *desc, mti_process *p) {
    const mti_launcher *l = mti_find_launcher();
    const char *size;
    mti_text there;
    int64_t value;
    memset(p, 0, sizeof *p);
    p->launcher = l;
    if (!l) return MT_SUCCESS;
    size = mti_in_env(l->job_size) && !getenv(l->size) ? l->job_size : l->size;
    MT_TRY(mti_env_number(desc, l, size, 1, INT32_MAX, &value));
    p->size = (int)value;
    MT_TRY(mti_env_number(desc, l, l->rank, 0, p->size - 1, &value));
    p->rank = (int)value;
    if (getenv(l->local_rank)) MT_TRY(mti_env_number(desc, l, l->local_rank, 0, p->size - 1, &value));
    p->local_rank = (int)value;
    if (desc->ranks != 0 && desc->ranks != p->size) {
        mti_say_env(&there, l);
        mti_launch_say(desc, "mt_world_from_env: the program wants %d ranks, but %s has started %d: %s", desc->ranks,
                       l->name, p->size, there.data);
        return MT_ERR_ARGUMENT;
    }
    return getenv("NCCL_COMM_ID") ? MT_SUCCESS : mti_find_rendezvous(desc, p);
}

/* Runs this process as one rank. Its world does not connect it to the other processes. */
static mt_status mti_run_process(const mt_launch_desc *desc, const mti_process *p, mt_rank_function run, void *user) {
    mti_rank rank;
    mti_launch all MTI_AT_END(mti_launch_end);
    all.ranks = &rank;
    all.worlds = NULL;
    all.count = 1;
    memset(&rank, 0, sizeof rank);
    rank.world = mti_comm_new(p->size > 1 ? &mti_apart : &mti_alone, p->rank, p->size, "world");
    if (!rank.world) {
        mti_launch_say(desc, "mt_world_from_env: no memory for the communicator of rank %d", p->rank);
        return MT_ERR_MEMORY;
    }
    rank.world->owner = &rank;
    rank.world->local_rank = p->local_rank;
    rank.world->launcher = p->launcher->name;
    rank.world->timeout = desc->timeout_s;
    rank.run = run;
    rank.user = user;
    rank.rank = p->rank;
#if MTI_NCCL
    if (p->size > 1 && p->rendezvous[0]) setenv("NCCL_COMM_ID", p->rendezvous, 0);
#endif
    mti_rank_run(&rank);
    return mti_launch_report(desc, &rank, 1);
}

MT_API mt_status mt_world_from_env(const mt_launch_desc *desc, mt_rank_function rank_main, void *user) {
    mt_launch_desc d = mti_launch_defaults(desc);
    mti_process process;
    MT_TRY(mti_find_process(&d, &process));
    if (!process.launcher) return mt_launch(desc, rank_main, user);
    d.ranks = 1; /* for the check: this process is one rank */
    MT_TRY(mti_launch_check(&d, rank_main));
#if MTI_MPI
    d.ranks = process.size;
    if (process.launcher->mpi) return mti_mpi_world(&d, rank_main, user);
#endif
    return mti_run_process(&d, &process, rank_main, user);
}

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_IMPLEMENTATION */
