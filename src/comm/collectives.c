/* ---- collectives on a CPU ---------------------------------------------------------------------------------------- */

#pragma once
#include "collectives.h"
#include "context.c"
#include "hash.c"
#include "trace.c"

MT_API const char *mt_collective_name(mt_collective kind) {
    switch (kind) {
    case MT_ALL_REDUCE: return "all_reduce";
    case MT_ALL_GATHER: return "all_gather";
    case MT_REDUCE_SCATTER: return "reduce_scatter";
    case MT_BROADCAST: return "broadcast";
    case MT_SEND: return "send";
    case MT_RECV: return "recv";
    case MT_BARRIER: return "barrier";
    case MT_ALL_TO_ALL: return "all_to_all";
    case MT_ALL_TO_ALL_V: return "all_to_all_v";
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

/* Returns 1 when the block of a rank is one of those that an all_gather or a reduce_scatter moves. */
static int mti_has_block(const mti_call *call, int rank) {
    return !call->ranks || (rank >= call->first && rank < call->first + call->ranks);
}

/* Returns how many blocks a call moves: one, or one for each rank of a call that gathers or scatters. */
static size_t mti_blocks(const mt_comm *comm, const mti_call *call) {
    if (call->kind != MT_ALL_GATHER && call->kind != MT_REDUCE_SCATTER && call->kind != MT_ALL_TO_ALL) return 1;
    return (size_t)(call->ranks ? call->ranks : comm->size);
}

/* Count number r, and the sum of the first n counts. NULL: each is `count`. */
static size_t mti_count_at(const size_t *counts, size_t count, int r) { return counts ? counts[r] : count; }

static size_t mti_counts_sum(const size_t *counts, size_t count, int n) {
    size_t sum = 0;
    int r;
    if (!counts) return count * (size_t)n;
    for (r = 0; r < n; r++) sum += counts[r];
    return sum;
}

static int mti_is_all_to_all(const mti_call *call) {
    return call->kind == MT_ALL_TO_ALL || call->kind == MT_ALL_TO_ALL_V;
}

/* mti_send_elements and mti_recv_elements return the number of elements of this rank's send and receive buffers. */
static size_t mti_send_elements(const mt_comm *comm, const mti_call *call) {
    if (call->kind == MT_BARRIER || call->kind == MT_RECV) return 0;
    if (call->kind == MT_BROADCAST && call->root != comm->rank) return 0;
    if (mti_is_p2p(call) && call->root < 0) return 0;
    if (call->kind == MT_REDUCE_SCATTER) return call->count * (size_t)comm->size;
    if (mti_is_all_to_all(call)) return mti_counts_sum(call->sends, call->count, comm->size);
    return mti_has_block(call, comm->rank) ? call->count : 0;
}

static size_t mti_recv_elements(const mt_comm *comm, const mti_call *call) {
    if (call->kind == MT_BARRIER || call->kind == MT_SEND) return 0;
    if (mti_is_p2p(call)) return call->source < 0 ? 0 : call->recvcount;
    if (call->kind == MT_ALL_GATHER) return call->count * (size_t)comm->size;
    if (mti_is_all_to_all(call)) return mti_counts_sum(call->recvs, call->count, comm->size);
    return mti_has_block(call, comm->rank) ? call->count : 0;
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

/* Refuses counts that no memory has, and an all_to_all_v whose counts for this rank itself differ. */
static mt_status mti_check_counts(mt_context *ctx, mt_comm *comm, const mti_call *call, size_t limit) {
    const char *name = mti_call_name(call->kind);
    int r;
    if (call->kind != MT_ALL_TO_ALL_V) return MT_SUCCESS;
    if (!call->sends || !call->recvs)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: %s is NULL", name,
                          call->sends ? "recvcounts" : "sendcounts");
    for (r = 0; r < comm->size; r++) {
        const size_t *counts = call->sends[r] > call->recvs[r] ? call->sends : call->recvs;
        if (counts[r] <= limit) continue;
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: %s[%d] is %zu, more than %d ranks can hold (%zu)", name,
                          counts == call->sends ? "sendcounts" : "recvcounts", r, counts[r], comm->size, limit);
    }
    if (call->sends[comm->rank] == call->recvs[comm->rank]) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_ARGUMENT,
                      "mt_%s: rank %d sends %zu elements to itself, and receives %zu from itself", name, comm->rank,
                      call->sends[comm->rank], call->recvs[comm->rank]);
}

static mt_status mti_check_count(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t limit = SIZE_MAX / 2 / sizeof(double) / (size_t)comm->size;
    size_t count = call->count > call->recvcount ? call->count : call->recvcount;
    if (count <= limit) return mti_check_counts(ctx, comm, call, limit);
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

/* Refuses buffers that overlap in another way than NCCL's in-place rule (see "collectives" in the API). A chunk of a
   call has the buffers of the whole call, also on a rank whose block is not in it. */
static mt_status mti_check_overlap(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype), block = call->count * element * (size_t)comm->rank, sent, received;
    uintptr_t send = (uintptr_t)call->send, recv = (uintptr_t)call->recv;
    mti_call whole = *call;
    int self = call->kind == MTI_SEND_RECV && call->root == comm->rank;
    whole.ranks = 0;
    sent = mti_send_elements(comm, &whole) * element;
    received = mti_recv_elements(comm, &whole) * element;
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

static mt_status mti_peers_check(mt_context *ctx, mt_comm *comm, const char *name) {
    if (ctx->device != MT_DEVICE_META) return MT_SUCCESS;
    return mti_refuse(
        ctx, comm, MT_ERR_ARGUMENT,
        "mt_%s: the context is on MT_DEVICE_META, which \"%s\" (%d ranks) does not work with: use threads "
        "(mt_launch) or mt_comm_create_meta",
        name, comm->name, comm->size);
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

/* The root of the tree: reduces the tile over all ranks, and writes the result to out0 and out1.
   Inlined: a reduce-scatter of 3 MB is then 1.06 times as fast. */
MT_INLINE void mti_tree_root(mti_tree *t, int ranks, void *out0, void *out1) {
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
    if (!mti_has_block(call, comm->rank)) return MT_SUCCESS;
    return mti_reduce_on(ctx, comm, call, call->count * (size_t)comm->rank, call->count, 0);
}

/* Rank r starts with block r, so that not all ranks read the same buffer at once. In place, rank r writes all blocks of
   its buffer that the call moves, except block r, the only one that its peers read. */
static mt_status mti_move_all_gather(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    size_t bytes = call->count * mt_dtype_size(call->dtype);
    int i;
    for (i = 0; i < comm->size; i++) {
        int from = (comm->rank + i) % comm->size;
        char *to = (char *)call->recv + bytes * (size_t)from;
        if (mti_has_block(call, from)) MT_TRY(mti_bytes_copy(ctx, to, mti_slot_of(comm->group, from)->send, bytes));
    }
    return MT_SUCCESS;
}

/* Copies the block for this rank from each send buffer. */
static mt_status mti_move_all_to_all(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype);
    int i;
    for (i = 0; i < comm->size; i++) {
        int from = (comm->rank + i) % comm->size;
        const mti_slot *slot = mti_slot_of(comm->group, from);
        const char *block = (const char *)slot->send + element * mti_counts_sum(slot->sends, call->count, comm->rank);
        char *to = (char *)call->recv + element * mti_counts_sum(call->recvs, call->count, from);
        MT_TRY(mti_bytes_copy(ctx, to, block, element * mti_count_at(call->recvs, call->count, from)));
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
    case MT_ALL_TO_ALL:
    case MT_ALL_TO_ALL_V: return mti_move_all_to_all(ctx, comm, call);
    case MTI_GRAPH_LAUNCH: return comm->rank == 0 ? mti_cuda_graph_launch(ctx, call) : MT_SUCCESS;
    default: return MT_SUCCESS;
    }
}

/* A buffer of `whole` elements, divided into one piece per rank. Piece r begins at element stride * r and has n
   elements, fewer at the end of the buffer, or none when the call does not move the block of rank r. */
typedef struct mti_pieces {
    const char *from; /* the elements to reduce */
    char *to;         /* all results, at the same offsets; NULL: only this rank's result is needed */
    char *own;        /* this rank's result */
    size_t element, stride, n, whole;
    const mti_call *call;
} mti_pieces;

static size_t mti_piece_size(const mti_pieces *p, int rank) {
    size_t first = p->stride * (size_t)rank;
    if (first >= p->whole || !mti_has_block(p->call, rank)) return 0;
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
    p->stride = scatter ? call->count : p->n;
    p->whole = scatter ? call->count * ranks : chunk;
    p->call = call;
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

/* -- one call -- */

static mt_status mti_alone_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    return mti_bytes_copy(ctx, call->recv, call->send, mti_send_elements(comm, call) * mt_dtype_size(call->dtype));
}

static mti_call mti_call_make(int kind, const void *send, void *recv, size_t count, mt_dtype dtype) {
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = kind;
    call.dtype = dtype;
    call.send = send;
    call.recv = recv;
    call.count = count;
    return call;
}

/* -- the collectives -- */

/* Tells the layers which memory a collective has written. */
static void mti_forget_received(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype), block = call->count * element;
    if (!call->recv) return; /* there is no data, or there are no elements */
    if (call->kind == MT_ALL_GATHER)
        mti_notify_forgotten(ctx, (char *)call->recv + (size_t)call->first * block, mti_blocks(comm, call) * block, 0);
    else if (mti_has_block(call, comm->rank))
        mti_notify_forgotten(ctx, call->recv, mti_recv_elements(comm, call) * element, 0);
}

/* Checks, runs and records a collective. Further chunks of a call add to its bytes, but not to the number of calls. */
static mt_status mti_do_collective(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t elements;
    MT_TRY(mti_check_call(ctx, comm, call));
    MT_TRY(MTI_HOOK(ctx, collective(ctx, comm, call)));
    MT_TRY(MTI_HOOK(ctx, passed(ctx, comm, mti_call_name(call->kind))));
    if (call->kind == MT_BARRIER) MT_TRY(mti_check_recording(ctx)); /* waits on GPUs */
    MT_TRY((comm->transport->collective)(ctx, comm, call));
    if (call->kind != MT_ALL_REDUCE || call->recv != call->send) mti_forget_received(ctx, comm, call);
    if (comm->size == 1) return MT_SUCCESS;
    elements = call->sends ? mti_send_elements(comm, call) : call->count * mti_blocks(comm, call);
    mti_record(comm, (mt_collective)call->kind, elements * mt_dtype_size(call->dtype));
    mti_trace_call(ctx, comm, call, (mt_collective)call->kind, elements * mt_dtype_size(call->dtype));
    comm->ledger.calls[call->kind] -= (uint64_t)call->goes_on;
    return MT_SUCCESS;
}

static mt_status mti_do_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype);
    MT_TRY(mti_check_call(ctx, comm, call));
    MT_TRY(MTI_HOOK(ctx, p2p(ctx, call)));
    if (call->root == comm->rank) MT_TRY(mti_alone_call(ctx, comm, call)); /* send to itself */
    else MT_TRY((comm->transport->p2p)(ctx, comm, call));
    mti_notify_forgotten(ctx, call->recv, call->recvcount * element, 0);
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

MT_API mt_status mt_all_to_all(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t count,
                               mt_dtype dtype) {
    mti_call call = mti_call_make(MT_ALL_TO_ALL, sendbuf, recvbuf, count, dtype);
    return MT_RANGE("all_to_all", mti_run_collective(ctx, comm, &call));
}

MT_API mt_status mt_all_to_all_v(mt_context *ctx, mt_comm *comm, const void *sendbuf, const size_t *sendcounts,
                                 void *recvbuf, const size_t *recvcounts, mt_dtype dtype) {
    mti_call call = mti_call_make(MT_ALL_TO_ALL_V, sendbuf, recvbuf, 0, dtype);
    call.root = call.source = -1; /* over NCCL, ranks here are those of one pair of counts */
    call.sends = sendcounts;
    call.recvs = recvcounts;
    return MT_RANGE("all_to_all_v", mti_run_collective(ctx, comm, &call));
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
