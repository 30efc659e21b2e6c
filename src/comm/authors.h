/* ---- for authors of operators and layers ------------------------------------------------------------------------- */

#pragma once
#include "defaults.h"
#include "trace.h"

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

/* Sets the function that is called before a recording begins, before it ends, and before a graph is launched. What it
   puts into the stream comes before what follows: at the end of a recording it is recorded, too. So whoever leaves work
   for a later call can do it before the border: the work is then not done in one launch and missing in another. A
   status other than MT_SUCCESS is that of the call. border NULL: none. ctx NULL: does nothing. A context has one such
   function, and one mt_forget_function. mt_parallel.h sets both for its contexts, so a program with a registry must
   not. */
typedef mt_status (*mt_graph_border)(mt_context *ctx);
MT_API void mt_context_set_graph_border(mt_context *ctx, mt_graph_border border);

/* Six values of the context's desc, with the defaults filled in, two properties of its device, and whether it records
   a CUDA graph. When ctx is NULL, the values are those of a CPU context with an empty desc, and the compute capability
   is 0. */
MT_API int mt_context_threads(const mt_context *ctx);
MT_API int mt_context_invariant(const mt_context *ctx);      /* V, or 0 */
MT_API int mt_context_invariant_data(const mt_context *ctx); /* V_d, or 0 */
MT_API mt_device mt_context_planned(const mt_context *ctx);  /* `device`, except on MT_DEVICE_META */
MT_API int mt_context_ordinal(const mt_context *ctx);
MT_API int mt_context_arena_symmetric(const mt_context *ctx);
MT_API int mt_context_compute_capability(const mt_context *ctx); /* 80 for sm_80; other devices: 90 */
MT_API int mt_context_has_data(const mt_context *ctx);           /* 0 on MT_DEVICE_META, else 1 */
/* Returns 0 for memory of the caller on MT_DEVICE_META, whose addresses mean nothing, else 1. */
MT_API int mt_context_has_address(const mt_context *ctx, const void *data);
MT_API int mt_context_records(const mt_context *ctx); /* 1 between mt_graph_begin and mt_graph_end, else 0 */

/* Returns the number that a field of a desc means where MT_ZERO means zero and 0 selects `otherwise`. */
static inline float mt_or_default(float value, float otherwise) {
    return value == (float)MT_ZERO ? 0.0f : value == 0.0f ? otherwise : value;
}

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

MT_API int mt_comm_is_meta(const mt_comm *comm); /* 1: comm is from mt_comm_create_meta; 0: it is not, or it is NULL */

/* Gathers `bytes` bytes of host memory of each rank into all [ranks, bytes], also in host memory, on every rank.
   Collective over comm: an all_gather, which the ledger does not count, through memory on the device. On a meta
   communicator, the parts of other ranks become 0. Errors: MT_ERR_ARGUMENT (NULL, bytes is 0 or too large),
   MT_ERR_MEMORY, and those of a collective. */
MT_API mt_status mt_comm_gather_host(mt_context *ctx, mt_comm *comm, const void *mine, size_t bytes, void *all);

/* Exchange blocks between all ranks: a rank sends one block to each rank, also to itself, and receives one from each
   rank. Both buffers hold the blocks one after the other, in the order of the ranks they go to or come from. They must
   not overlap. mt_all_to_all: each block has `count` elements. mt_all_to_all_v: the block for rank r has sendcounts[r]
   elements, and that from rank r has recvcounts[r]; a count may be 0. The counts [ranks] are in memory of the host, and
   are not used after the call. sendcounts[b] of rank a must be recvcounts[a] of rank b: MT_ERR_MISMATCH otherwise, with
   both numbers. Errors: those of a collective; MT_ERR_ARGUMENT also when a rank's counts for itself differ. */
MT_API mt_status mt_all_to_all(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t count,
                               mt_dtype dtype);
MT_API mt_status mt_all_to_all_v(mt_context *ctx, mt_comm *comm, const void *sendbuf, const size_t *sendcounts,
                                 void *recvbuf, const size_t *recvcounts, mt_dtype dtype);

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

/* The stream into which calls with ctx put their work: a cudaStream_t; NULL on other devices than MT_DEVICE_CUDA. */
MT_API struct CUstream_st *mt_context_stream(const mt_context *ctx);

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

/* Entries of the trace. They do nothing on other devices than MT_DEVICE_META.
   mt_trace_add        appends a copy of *entry, in which it sets `recomputed`.
   mt_trace_recompute  (ctx, 1) marks the entries that follow as recomputed, until (ctx, 0). Pairs may be nested. */
MT_API void mt_trace_add(mt_context *ctx, const mt_trace_entry *entry);
MT_API void mt_trace_recompute(mt_context *ctx, int recomputes);

/* Says how far the last rank of a meta communicator is from its first one, counted in ranks of the whole program.
   mt_grid_create sets this span for its groups. A prediction of time needs it, because ranks that are far apart are in
   different nodes. At first it is size - 1: all ranks are neighbours. A smaller span is ignored. */
MT_API void mt_comm_set_span(mt_comm *comm, int span);

/* Says that the ranks of comm are a plane, whose rows are groups like `first`, and whose columns are groups like
   `second`. Check mode then keeps placements over these two, and not over comm: what is split over comm is split over
   both. Both must live as long as comm. mt_grid_create calls it for dp_cp. */
MT_API void mt_comm_set_factors(mt_comm *comm, mt_comm *first, mt_comm *second);

/* These three do the work of mt_gather_from_sequence_region, mt_reduce_scatter_to_sequence_region and
   mt_reduce_from_tensor_region_forward in several calls, one for each chunk, so that a product of one chunk can run
   while the next one is sent. Every call gets the whole views x and y, as those functions do, also in place. All ranks
   make each call with the same chunk. The first chunk has first == 0, each further one begins where the previous one
   ends, and together they have all ranks or rows. The ledger counts all chunks together as one call.
     gather, reduce_scatter  handle the parts of ranks [first, first + ranks), which are neighbouring rows of the larger
                             view. gather writes these parts to y on every rank, reduce_scatter writes y on these ranks
                             only. Over NCCL a chunk is a group of broadcasts or reduces, one for each of its ranks.
     reduce                  handles rows [first, first + rows) of y.
   MT_ERR_ARGUMENT: there are no such ranks. MT_ERR_SHAPE: there are no such rows. */
MT_API mt_status mt_gather_ranks_from_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y,
                                                      int first, int ranks);
MT_API mt_status mt_reduce_scatter_ranks_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y,
                                                            int first, int ranks);
MT_API mt_status mt_reduce_rows_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor y, int64_t first,
                                                   int64_t rows);
