/* ---- embedding, on a GPU ----------------------------------------------------------------------------------------- */

#pragma once
#include "embedding.h"
#include "rows.cuh"
#include "map.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* y = the table rows of the ids + beta y. Ids that are not in this shard give zeros. On sm_90: 22 instructions for an
   f32 element, which moves 12 bytes, or 8 with beta 0 (budget: 82 or 54). */
struct mti_embedding_op {
    mti_view table, y;
    const int32_t *ids;
    int64_t first_row, table_rows;
    float beta;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        float x[MTI_VECTOR] = {}, old[MTI_VECTOR];
        int64_t at = ids[row] - first_row;
        if (at >= 0 && at < table_rows) mti_load<WIDE>(table, at, col, n, x);
        if (beta != 0.0f) {
            mti_load<WIDE>(y, row, col, n, old);
            for (int j = 0; j < MTI_VECTOR; j++) x[j] += beta * old[j];
        }
        mti_store<WIDE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_embedding_forward(mt_context *ctx, mt_tensor table, int64_t first_row, const int32_t *ids,
                                            float beta, mt_tensor y) {
    mti_embedding_op op = {mti_view_of(table), mti_view_of(y), ids, first_row, table.rows, beta};
    return mti_map(ctx, "mt_embedding_forward", op, mti_is_wide(table) && mti_is_wide(y), y.rows, y.cols);
}

/* The backward is a stable counting sort of the tokens by their row of the table, and then a sum of each run, which
   is all tokens of a row. The rows are divided into 2^bits parts: row k is row k / 2^bits of part k % 2^bits.
   Frequent tokens often have neighbouring ids, which are then in different parts. One block sorts the tokens of a
   part in shared memory. Each block reads all ids, so that there is only one launch. */
#define MTI_GROUP_THREADS 512 /* one thread for each row of a part */
#define MTI_GROUP_WARPS (MTI_GROUP_THREADS / 32)
#define MTI_GROUP_ROUNDS 16                             /* ids that a thread loads before it looks at the first one */
#define MTI_GROUP_STEP (32 * MTI_GROUP_ROUNDS)          /* ids that a warp reads in a step */
#define MTI_GROUP_PARTS 128                             /* for many tokens: about one for each multiprocessor */
#define MTI_GROUP_MOST (INT32_MAX - 2 * MTI_GROUP_STEP) /* tokens, so that 32 bits number them */
#define MTI_RUN_CHUNK 32                                /* a run with more tokens is cut into chunks */

struct __align__(16) mti_run {
    uint32_t row;     /* of the table */
    int first, count; /* range of grouped tokens: the whole run */
    int chunk;        /* the number of one chunk of it */
};

/* Chunk k > 0 of a run writes its sum to row p / MTI_RUN_CHUNK of `partials`, where p is the place of its first
   token. A long run counts its added chunks in added[first / MTI_RUN_CHUNK]. No two chunks and no two long runs have
   the same number, because their first places are at least MTI_RUN_CHUNK apart. */
struct mti_runs {
    const int32_t *ids;
    int64_t first_row;
    uint32_t rows;
    int count, bits;   /* the number of tokens; there are 2^bits parts */
    int range;         /* how many ids a warp of mti_group_kernel reads */
    int32_t *tokens;   /* [count]: the grouped tokens */
    mti_run *items;    /* [count]: from the front on all chunks of long runs, from the back on the other runs */
    int *sizes;        /* [3]: grouped tokens, chunks of long runs, other runs */
    int *added;        /* [slots]: how many chunks of a long run are added */
    mti_view partials; /* [slots, cols]: the sums of chunks */
    mti_view dtable, dy;
    int64_t cols;
};

/* Returns the length of the chunks of a run: 32 up to 4096 tokens, then 64, 128, and so on, the first that is at
   least sqrt(count) / 2. So longer runs have at most 2 sqrt(count) chunks. One block adds each chunk, and one block
   then adds the sums of the chunks. */
static __device__ __forceinline__ int mti_run_chunk(int count) {
    int size = MTI_RUN_CHUNK;
    while (4 * (int64_t)size * size < count) size *= 2;
    return size;
}

/* The rows of one part. A key is the distance of a row of the table from the first one of the part. */
struct mti_group_part {
    uint32_t first, rows, mask; /* the first row; how many rows the table has from there on; 2^bits - 1 */
    __device__ int has(uint32_t key) const { return (key & mask) == 0 && key < rows; }
};

/* Loads the ids i, i + 32, ... and computes their keys. An id at `end` or behind it counts as -1; with WHOLE there is
   none. The key of a negative id is in no part. */
template <bool WHOLE>
static __device__ __forceinline__ void mti_group_load(const mti_runs &r, const mti_group_part &p, int i, int end,
                                                      uint32_t *key) {
    int32_t id[MTI_GROUP_ROUNDS];
    MT_DEVICE_UNROLL
    for (int k = 0; k < MTI_GROUP_ROUNDS; k++) id[k] = WHOLE || i + k * 32 < end ? r.ids[i + k * 32] : -1;
    MT_DEVICE_UNROLL
    for (int k = 0; k < MTI_GROUP_ROUNDS; k++) key[k] = (uint32_t)id[k] - ((uint32_t)r.first_row + p.first);
}

/* Calls f(i, key) for all ids of [begin, end), in steps of a warp. The last step also calls f for places behind the
   end, whose keys are in no part. */
template <typename F>
static __device__ __forceinline__ void mti_group_each(const mti_runs &r, const mti_group_part &p, int begin, int end,
                                                      const F &f) {
    int lane = (int)threadIdx.x & 31;
    uint32_t key[MTI_GROUP_ROUNDS];
    for (; begin < end; begin += MTI_GROUP_STEP) {
        if (begin + MTI_GROUP_STEP <= end) mti_group_load<true>(r, p, begin + lane, end, key);
        else mti_group_load<false>(r, p, begin + lane, end, key);
        MT_DEVICE_UNROLL
        for (int k = 0; k < MTI_GROUP_ROUNDS; k++) f(begin + k * 32 + lane, key[k]);
    }
}

/* Exclusive prefix sums: x[j] of a thread becomes the sum of x[j] of the threads before it, plus sizes[j]. sizes[j]
   then grows by the sum of the whole block. The barriers separate writing the sums of warps to shared memory from
   reading them, and writing the old sizes from reading them. */
static __device__ __forceinline__ void mti_group_scan(int *x, int *sizes) {
    MT_SHARED(int, sums, 3 * MTI_GROUP_WARPS);
    MT_SHARED(int, base, 3);
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    for (int j = 0; j < 3; j++) {
        int own = x[j];
        for (int o = 1; o < 32; o *= 2) {
            int left = __shfl_up_sync(0xffffffffu, x[j], (unsigned)o);
            x[j] += lane >= o ? left : 0;
        }
        if (lane == 31) sums[j * MTI_GROUP_WARPS + warp] = x[j];
        x[j] -= own;
    }
    __syncthreads();
    if (threadIdx.x < 3) {
        int all = 0;
        for (int w = 0; w < MTI_GROUP_WARPS; w++) all += sums[(int)threadIdx.x * MTI_GROUP_WARPS + w];
        base[threadIdx.x] = atomicAdd(&sizes[threadIdx.x], all);
    }
    for (int j = 0; j < 3; j++)
        for (int w = 0; w < warp; w++) x[j] += sums[j * MTI_GROUP_WARPS + w];
    __syncthreads();
    for (int j = 0; j < 3; j++) x[j] += base[j];
}

/* Lists the run of row threadIdx.x of the part, which has n tokens, and returns its first place. */
static __device__ __forceinline__ int mti_group_list(const mti_runs &r, uint32_t part, int n) {
    int size = mti_run_chunk(n), chunks = n > MTI_RUN_CHUNK ? (n - 1) / size + 1 : 0;
    int x[3] = {n, chunks, n > 0 && n <= MTI_RUN_CHUNK};
    mti_run run = {threadIdx.x << r.bits | part, 0, n, 0};
    mti_group_scan(x, r.sizes);
    run.first = x[0];
    if (n > 0 && n <= MTI_RUN_CHUNK) r.items[r.count - 1 - x[2]] = run;
    if (n > MTI_RUN_CHUNK) r.added[run.first / MTI_RUN_CHUNK] = 0;
    for (; run.chunk < chunks; run.chunk++) r.items[x[1] + run.chunk] = run;
    return run.first;
}

/* Puts a token of each lane to its place, if the part has its key. at[row of the part] is the next place for this warp.
   A step of the loop serves all lanes that have the key of the last lane left. The first __syncwarp separates reading a
   place from increasing it, the second one separates the steps. */
static __device__ __forceinline__ void mti_group_place(const mti_runs &r, const mti_group_part &p, int token,
                                                       uint32_t key, int *at) {
    int lane = (int)threadIdx.x & 31;
    unsigned left = __ballot_sync(0xffffffffu, p.has(key));
    while (left) {
        int last = 31 - __clz((int)left);
        uint32_t which = __shfl_sync(0xffffffffu, key, last);
        unsigned same = __ballot_sync(0xffffffffu, key == which);
        int place = at[which >> r.bits] + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (key == which) r.tokens[place] = token;
        if (lane == last) at[which >> r.bits] = place + 1;
        __syncwarp();
        left &= ~same;
    }
}

/* Groups the tokens of part first + blockIdx.x. A warp owns a range of the ids.

   1. After a barrier, behind which all counters are 0, each warp counts the tokens of each row.
   2. After a barrier, thread t lists the run of row t of the part (mti_group_scan has barriers), and turns the counts
      of the warps into places.
   3. After a barrier, each warp reads its ids again and puts the tokens to their places.

   On sm_90 the first step takes 7 instructions for 32 ids, and 5 more if the part has one of them. The third step
   takes 9, and 25 more for each row of the part that is among them. An H200 was predicted to take 5 us for 16384
   different ids and 9 us for 49152. If one row has 6 % of them, as in a text, its part takes 8 us and 15 us. */
static __global__ void __launch_bounds__(MTI_GROUP_THREADS) mti_group_kernel(int64_t first, mti_runs r) {
    MT_SHARED(int, at, MTI_GROUP_WARPS *MTI_GROUP_THREADS);
    int warp = (int)threadIdx.x >> 5, *mine = at + warp * MTI_GROUP_THREADS, n = 0;
    uint32_t number = (uint32_t)(first + blockIdx.x);
    mti_group_part part = {number, number < r.rows ? r.rows - number : 0, (1u << r.bits) - 1};
    int64_t next = (int64_t)(warp + 1) * r.range;
    int begin = next - r.range < r.count ? (int)(next - r.range) : r.count, end = next < r.count ? (int)next : r.count;
    for (int w = 0; w < MTI_GROUP_WARPS; w++) at[w * MTI_GROUP_THREADS + (int)threadIdx.x] = 0;
    __syncthreads();
    mti_group_each(r, part, begin, end, [&](int, uint32_t key) {
        if (part.has(key)) atomicAdd(&mine[key >> r.bits], 1);
    });
    __syncthreads();
    for (int w = 0; w < MTI_GROUP_WARPS; w++) n += at[w * MTI_GROUP_THREADS + (int)threadIdx.x];
    int place = mti_group_list(r, number, n);
    for (int w = 0; w < MTI_GROUP_WARPS; w++) {
        int *to = &at[w * MTI_GROUP_THREADS + (int)threadIdx.x], found = *to;
        *to = place;
        place += found;
    }
    __syncthreads();
    mti_group_each(r, part, begin, end, [&](int i, uint32_t key) { mti_group_place(r, part, i, key, mine); });
}

/* Adds `count` rows of v to sum, one after the other: rows tokens[0], tokens[1], ..., or rows 0, step, 2 step, ... of v
   if tokens is NULL. Of whole vectors it loads AHEAD rows before it adds them. */
template <bool WIDE, int TYPE, int AHEAD>
static __device__ __forceinline__ void mti_add_rows(const mti_view &v, const int32_t *tokens, int step, int count,
                                                    int64_t col, int n, float *sum) {
    mti_fetched<TYPE> x[AHEAD];
    MT_DEVICE_NO_UNROLL
    for (int i = 0; n < MTI_VECTOR && i < count; i++) {
        mti_fetch<false>(v, tokens ? tokens[i] : (int64_t)i * step, col, n, x[0]);
        mti_add_values(x[0], sum);
    }
    MT_DEVICE_NO_UNROLL
    for (int i = 0; n == MTI_VECTOR && i < count; i += AHEAD) {
        int row[AHEAD];
        MT_DEVICE_UNROLL
        for (int k = 0; k < AHEAD; k++) row[k] = i + k >= count ? -1 : tokens ? tokens[i + k] : (i + k) * step;
        MT_DEVICE_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (row[k] >= 0) mti_fetch<WIDE>(v, row[k], col, MTI_VECTOR, x[k]);
        MT_DEVICE_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (row[k] >= 0) mti_add_values(x[k], sum);
    }
}

/* The row that gets the sum of a chunk: the first chunk of a run is added to the table, the others to `partials`. */
static __device__ __forceinline__ mti_view mti_run_target(const mti_runs &r, const mti_run &run, int begin) {
    mti_view to = run.chunk == 0 ? r.dtable : r.partials;
    to.data += (run.chunk == 0 ? (int64_t)run.row : begin / MTI_RUN_CHUNK) * to.ld * (int64_t)sizeof(float);
    return to;
}

/* The last block that comes here with a chunk of a run adds the sums of all chunks but the first to the table. The
   first barrier is behind the block's sum, which the fence before the atomic makes visible to the last block. The
   second one separates writing `last` from reading it. */
template <bool WIDE> static __device__ __forceinline__ void mti_run_finish(const mti_runs &r, mti_run run) {
    MT_SHARED(int, last, 1);
    int size = mti_run_chunk(run.count), others = (run.count - 1) / size;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *last = atomicAdd(&r.added[run.first / MTI_RUN_CHUNK], 1) == others;
        __threadfence();
    }
    __syncthreads();
    if (!*last) return;
    run.chunk = 0;
    mti_view to = mti_run_target(r, run, run.first), sums = r.partials;
    sums.data += (run.first + size) / MTI_RUN_CHUNK * sums.ld * (int64_t)sizeof(float);
    for (int64_t col = (int64_t)threadIdx.x * MTI_VECTOR; col < r.cols; col += (int64_t)blockDim.x * MTI_VECTOR) {
        int n = mti_vector_size(r.cols, col);
        float sum[MTI_VECTOR];
        mti_load<WIDE, MT_F32>(to, 0, col, n, sum);
        mti_add_rows<WIDE, MT_F32, 2>(sums, NULL, size / MTI_RUN_CHUNK, others, col, n, sum);
        mti_store<WIDE, MT_F32>(to, 0, col, n, sum);
    }
}

/* Adds the runs. A block owns every (grid size)-th item, and a thread every blockDim-th vector of the columns.
   mti_run_finish has barriers. The order of additions depends on the length of the run only.

   In bf16 on sm_90, four tokens take 150 instructions for eight columns, 2.3 for each byte that is read (budget: 6.8).
   64 registers, so an SM has 4 blocks with 64 KiB of loads in flight. */
template <bool WIDE, int TYPE>
static __global__ void __launch_bounds__(MTI_ROW_THREADS, 4) mti_runs_kernel(mti_runs r) {
    unsigned chunks = (unsigned)r.sizes[1], items = chunks + (unsigned)r.sizes[2];
    for (unsigned c = blockIdx.x; c < items; c += gridDim.x) {
        const mti_run *item = &r.items[c < chunks ? c : (unsigned)r.count - 1 - (c - chunks)];
        mti_run run = *item;
        int size = mti_run_chunk(run.count), begin = run.first + run.chunk * size;
        int left = run.first + run.count - begin, count = left < size ? left : size;
        mti_view to = mti_run_target(r, run, begin);
        for (int64_t col = (int64_t)threadIdx.x * MTI_VECTOR; col < r.cols; col += (int64_t)blockDim.x * MTI_VECTOR) {
            int n = mti_vector_size(r.cols, col);
            float sum[MTI_VECTOR] = {};
            if (run.chunk == 0) mti_load<WIDE, MT_F32>(to, 0, col, n, sum);
            mti_add_rows<WIDE, TYPE, 2 * mti_ahead<TYPE>::value>(r.dy, r.tokens + begin, 0, count, col, n, sum);
            mti_store<WIDE, MT_F32>(to, 0, col, n, sum);
        }
        if (c < chunks) mti_run_finish<WIDE>(r, *item);
    }
}

/* Takes the scratch memory of the backward. An mti_run has the size of four int32_t. */
static mt_status mti_embedding_scratch(mt_context *ctx, mti_runs *r) {
    mt_tensor tokens, items, added, partials;
    int64_t slots = r->count / MTI_RUN_CHUNK + 1;
    void *sizes = NULL;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, r->count, &tokens));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, r->count, 4, &items));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, slots, &added));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, slots, mt_round_up(r->cols, MTI_VECTOR), &partials));
    MT_TRY(mt_arena_alloc(ctx, 3 * sizeof *r->sizes, &sizes));
    r->tokens = (int32_t *)tokens.data;
    r->items = (mti_run *)items.data;
    r->added = (int *)added.data;
    r->partials = mti_view_of(partials);
    r->sizes = (int *)sizes;
    return MT_SUCCESS;
}

/* The most blocks of mti_runs_kernel. Only the GPU knows the number of items: blocks without one end at once. */
#ifndef MTI_RUN_BLOCKS
#define MTI_RUN_BLOCKS 8192
#endif

/* 2^bits parts: a part has at most MTI_GROUP_THREADS rows, and for few tokens there are few parts. */
static int mti_group_bits(int64_t rows, int64_t count) {
    int64_t parts = mt_max((rows + MTI_GROUP_THREADS - 1) / MTI_GROUP_THREADS, mt_min(count / 128, MTI_GROUP_PARTS));
    int bits = 0;
    while ((int64_t)1 << bits < parts) bits++;
    return bits;
}

template <int TYPE> static mt_status mti_cuda_add_runs(mt_context *ctx, const mti_runs &r) {
    unsigned blocks = (unsigned)mt_min(r.count, MTI_RUN_BLOCKS), threads = mti_row_threads(r.cols);
    MT_LAUNCH_KERNEL((mti_runs_kernel<TYPE != MTI_ANY_TYPE, TYPE>), blocks, threads, 0, mt_context_stream(ctx), r);
    return mt_cuda_launched(ctx, "mt_embedding_backward");
}

static mt_status mti_cuda_embedding_backward(mt_context *ctx, mt_tensor dy, int64_t first_row, const int32_t *ids,
                                             mt_tensor dtable) {
    mti_runs r;
    int wide = mti_is_wide(dy) && mti_is_wide(dtable);
    if (dy.rows > MTI_GROUP_MOST)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "mt_embedding_backward: %lld tokens are more than %d on a GPU",
                       (long long)dy.rows, MTI_GROUP_MOST);
    if (dtable.rows == 0 || first_row > INT32_MAX) return MT_SUCCESS;
    memset(&r, 0, sizeof r);
    r.ids = ids;
    r.first_row = first_row;
    r.rows = (uint32_t)mt_min(dtable.rows, ((int64_t)1 << 31) - first_row); /* ids have 31 bits */
    r.count = (int)dy.rows;
    r.bits = mti_group_bits(r.rows, r.count);
    r.range = (int)mt_round_up((dy.rows + MTI_GROUP_WARPS - 1) / MTI_GROUP_WARPS, 32);
    r.cols = dy.cols;
    r.dy = mti_view_of(dy);
    r.dtable = mti_view_of(dtable);
    MT_TRY(mti_embedding_scratch(ctx, &r));
    MT_TRY(mt_cuda_zero(ctx, r.sizes, 3 * sizeof *r.sizes));
    MTI_LAUNCH_BLOCKS(mti_group_kernel, (int64_t)1 << r.bits, MTI_GROUP_THREADS, 0, mt_context_stream(ctx), r);
    return mti_by_type(wide ? (int)dy.dtype : MTI_ANY_TYPE,
                       [&](auto type) { return mti_cuda_add_runs<type.value>(ctx, r); });
}

} /* extern "C++" */
#endif
