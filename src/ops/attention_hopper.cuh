/* ---- attention on a GPU: kernels for the tensor cores of compute capability 9.0 ---------------------------------- */

#pragma once
#include "attention_flash.cuh"
#include "ptx_hopper.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* wgmma multiplies tiles in shared memory, for four warps together (a warpgroup), and the warps go on while it does. A
   block has three warpgroups. The first one, the producer, copies tiles with cp.async into a ring of slots. The other
   two are consumers, and each of them owns 64 rows of the block. The producer gives most of its registers to them.

   Two mbarriers belong to a slot. `full` completes a phase when all warps of the producer have seen their copies
   arrive, and have made them visible to wgmma (fence.proxy.async). `empty` completes a phase when all warps of the
   consumers have read the slot. Copy m of the block goes to slot m % Slots. It is number m / Slots there, from 0 on,
   and its phases have the parity of this number.

   A row of a tile in shared memory has 64 columns (128 bytes). Heads of more features have several such blocks of
   columns, one behind the other. Vector c of a row is at the place of vector c ^ row % 8: the 128-byte swizzle of
   wgmma. A tile begins at a multiple of 1024 bytes. As in attention_flash.cuh, columns behind a head and rows behind
   the end are zeros. */
#define MTI_HOPPER_THREADS 384

/* The sizes of a forward kernel. Width: of a row in shared memory. Step: keys of a tile. */
template <int HeadDim> struct mti_hopper_shape {
    static constexpr int Width = (HeadDim + 63) / 64 * 64, Step = HeadDim > 128 ? 64 : 128,
                         Slots = HeadDim > 192 ? 5 : 6;
    static constexpr int Own = 64 * Width, Tile = Step * Width; /* elements of the rows of a warpgroup, and of a slot */
    static constexpr bool Turns = HeadDim <= 128;
    static constexpr int bytes(bool spans) {
        return MTI_ALIGN_1024_BYTES + 2 * (2 * Own + Slots * Tile) + 2 * Slots * (int)sizeof(uint64_t) +
               (spans ? MTI_FLASH_ROWS * (int)sizeof(mti_flash_span) : 0);
    }
};

/* The slots of a block and their barriers. */
template <int Slots> struct mti_hopper_ring {
    uint16_t *slots;
    uint64_t *full; /* [Slots], and behind them `empty` [Slots] */

    __device__ uint64_t *full_of(int m) const { return full + m % Slots; }
    __device__ uint64_t *empty_of(int m) const { return full + Slots + m % Slots; }
    /* One thread calls this, and a barrier of the block follows. */
    __device__ void begin() const {
        for (int i = 0; i < Slots; i++) mti_mbarrier_init(full + i, 4), mti_mbarrier_init(full + Slots + i, 8);
    }
    /* The producer: waits until the slot of copy m is free; says that copy m has arrived. Call `arrived` behind the
       wait for the copies. */
    __device__ __forceinline__ void acquire(int m) const {
        if (m >= Slots) mti_mbarrier_wait(empty_of(m), (unsigned)(m / Slots - 1) & 1);
    }
    __device__ __forceinline__ void arrived(int m) const {
        mti_fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mti_mbarrier_arrive(full_of(m));
    }
    /* A consumer: waits for copy m; says that the warp has read it. */
    __device__ __forceinline__ void wait(int m) const { mti_mbarrier_wait(full_of(m), (unsigned)(m / Slots) & 1); }
    __device__ __forceinline__ void release(int m) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mti_mbarrier_arrive(empty_of(m));
    }
};

/* What a thread of the producer copies of each tile: vector threadIdx.x % 8 of each block of columns, in row
   threadIdx.x / 8 and every 16th one below it. tile and from are the addresses of the first one, and `step` is the
   distance of the next one. `left` is the number of rows that are left from the first one on, and `last`
   (mti_hopper_last) the bytes of the vector in the last block of columns. The thread goes down by addition, because the
   producer has 24 registers. Returns the address behind its last row. With Down = 8, 64 threads copy a tile. See
   mti_tile_fetch. */
static __device__ __forceinline__ int mti_hopper_row() { return (int)threadIdx.x / 8; }
static __device__ __forceinline__ int mti_hopper_vector() { return (int)threadIdx.x % 8; }
static __device__ __forceinline__ int mti_hopper_place() {
    return mti_hopper_row() * 64 + (mti_hopper_vector() ^ (mti_hopper_row() & 7)) * 8;
}
template <int HeadDim> static __device__ __forceinline__ int mti_hopper_last(int dim) {
    return mti_hopper_shape<HeadDim>::Width - 64 + mti_hopper_vector() * 8 < dim ? 16 : 0;
}

template <int Rows, int HeadDim, int Down = 16>
static __device__ __forceinline__ const uint16_t *mti_hopper_fetch(uint16_t *tile, const uint16_t *from, int64_t step,
                                                                   int left, int last) {
    constexpr int Blocks = (HeadDim + 63) / 64;
    MT_DEVICE_NO_UNROLL
    for (int r = 0; r < Rows; r += Down) {
        MT_DEVICE_UNROLL
        for (int c = 0; c < Blocks; c++)
            mti_cp_async16(tile + c * Rows * 64, from + c * 64, left <= 0 ? 0 : c == Blocks - 1 ? last : 16);
        tile += Down * 64, from += step, left -= Down;
    }
    return from;
}

/* s = q k^T: starts the products, as one group. q are the 64 rows of a warpgroup. */
template <int HeadDim, bool BF16, int N8>
static __device__ __forceinline__ void mti_hopper_scores(float (&s)[1][N8][4], const uint16_t *q, const uint16_t *k) {
    uint64_t a = mti_wgmma_tile(q, 16, 1024), b = mti_wgmma_tile(k, 16, 1024);
    MT_DEVICE_UNROLL
    for (int x = 0; x < HeadDim / 16; x++)
        mti_wgmma_ss<N8 * 8, BF16, 0>(s[0], a + (uint64_t)(x / 4 * 64 * 8 + x % 4 * 2),
                                      b + (uint64_t)(x / 4 * N8 * 64 + x % 4 * 2), x > 0);
    mti_wgmma_commit();
}

/* acc += p v: starts the products, as one group. */
template <int HeadDim, bool BF16, int K16>
static __device__ __forceinline__ void mti_hopper_add_product(float (&acc)[1][HeadDim / 8][4],
                                                              const uint32_t (&p)[K16][1][4], const uint16_t *v) {
    uint64_t b = mti_wgmma_tile(v, K16 * 16 * 128, 1024);
    MT_DEVICE_UNROLL
    for (int x = 0; x < K16; x++) mti_wgmma_rs<HeadDim, BF16, 1>(acc[0], p[x][0], b + (uint64_t)(x * 16 * 8), 1);
    mti_wgmma_commit();
}

/* What a consumer of the forward kernel has in registers. */
template <int HeadDim> struct mti_hopper_rows {
    static constexpr int Step = mti_hopper_shape<HeadDim>::Step;
    float s[1][Step / 8][4], acc[1][HeadDim / 8][4], top[1][2], sum[1][2];
    uint32_t p[Step / 16][1][4];
};

/* From the scores s of the keys from `key` on: p, and the new top, sum and acc. */
template <int HeadDim, bool BF16, bool SPANS>
static __device__ __forceinline__ void mti_hopper_weigh(const mti_flash &f, mti_hopper_rows<HeadDim> &own,
                                                        const mti_flash_span *spans, int head, int row, int key,
                                                        int keys) {
    constexpr int Step = mti_hopper_shape<HeadDim>::Step;
    if (SPANS && f.alibi != 0.0f) mti_flash_add_alibi(f, own.s, head, f.position(0) + row - key);
    if (SPANS) mti_flash_cap_and_mask(f, own.s, spans, key);
    else if (!f.sees(row, key + Step - 1, keys)) mti_flash_mask_rows(f, own.s, keys, row, key);
    mti_flash_softmax<SPANS>(f.scale, own.s, own.acc, own.top, own.sum);
    mti_tile_round<BF16>(own.p, own.s);
    if (!f.p.drop.on) return;
    MT_DEVICE_UNROLL
    for (int h = 0; h < Step / 64; h++) {
        uint32_t kept[1];
        mti_flash_kept_rows<8>(f, head, row, key + h * 64, kept);
        mti_flash_drop((uint32_t(&)[4][1][4])own.p[h * 4], kept);
    }
}

/* The producer of the forward kernel: q, k0, v0, k1, v1, ... Copy 2 n is the nth tile of keys, copy 2 n + 1 that of
   values, and q arrives with copy 0. While the last copy is in flight, the one before it is announced. */
template <int HeadDim>
static __device__ __forceinline__ void mti_hopper_forward_copies(
    const mti_flash &f, const mti_hopper_ring<mti_hopper_shape<HeadDim>::Slots> &ring, uint16_t *q, int first,
    int begin, int keys) {
    typedef mti_hopper_shape<HeadDim> Shape;
    mti_flash_place place = f.place();
    int64_t b = place.sequence, head = place.head, ld = f.p.k.ld;
    int last = mti_hopper_last<HeadDim>(f.dim()), m = 0;
    const uint16_t *from =
        f.in(f.p.q, b, f.p.q_col(head)) + (int64_t)(first + mti_hopper_row()) * f.p.q.ld + mti_hopper_vector() * 8;
    q += mti_hopper_place();
    for (int w = 0; w < 2 && begin < keys; w++)
        mti_hopper_fetch<64, HeadDim>(q + w * Shape::Own, from + w * 64 * f.p.q.ld, 16 * f.p.q.ld,
                                      (int)f.p.s.seq - first - w * 64 - mti_hopper_row(), last);
    from = f.keys_in(b, f.p.k_col(head)) + (int64_t)(begin + mti_hopper_row()) * ld + mti_hopper_vector() * 8;
    keys -= begin;
    mti_setmaxnreg_dec<24>();
    for (; keys > 0; m++) {
        ring.acquire(m);
        mti_hopper_fetch<Shape::Step, HeadDim>(ring.slots + m % Shape::Slots * Shape::Tile + mti_hopper_place(), from,
                                               16 * ld, keys - mti_hopper_row(), last);
        mti_cp_async_commit();
        if (m > 0) {
            mti_cp_async_wait<1>();
            ring.arrived(m - 1);
        }
        from += m % 2 ? Shape::Step * ld - f.p.value : f.p.value;
        if (m % 2) keys -= Shape::Step;
    }
    mti_cp_async_wait<0>();
    if (m > 0) ring.arrived(m - 1);
}

/* The consumers take turns, so that the products of one run while the other computes exponentials: warpgroup w waits at
   named barrier 1 + w, until the other one has started its products and arrives there. The first turn is that of
   warpgroup 0. The last one of warpgroup 1 is not announced, because nobody waits for it. */
template <int HeadDim> static __device__ __forceinline__ void mti_hopper_turn(int w) {
    if (mti_hopper_shape<HeadDim>::Turns) mti_named_sync(1 + w, 256);
}
template <int HeadDim> static __device__ __forceinline__ void mti_hopper_pass(int w, bool last) {
    if (mti_hopper_shape<HeadDim>::Turns && !(w == 1 && last)) mti_named_arrive(2 - w, 256);
}

/* The steps of a consumer on tiles that none of its rows sees: it takes its turns, and frees the slots. */
template <int HeadDim>
static __device__ __forceinline__ void mti_hopper_skip(const mti_hopper_ring<mti_hopper_shape<HeadDim>::Slots> &ring,
                                                       int w, int *key, int *n, int to, int keys) {
    for (; *key < to; *key += mti_hopper_shape<HeadDim>::Step, *n += 1) {
        mti_hopper_turn<HeadDim>(w);
        mti_hopper_pass<HeadDim>(w, *key + mti_hopper_shape<HeadDim>::Step >= keys);
        for (int m = *n * 2; m < *n * 2 + 2; m++) {
            ring.wait(m);
            ring.release(m);
        }
    }
}

/* A consumer of the forward kernel. The products of a step are q k^T of its tile, and p v of the tile before. */
template <int HeadDim, bool BF16, bool SPANS>
static __device__ __forceinline__ void mti_hopper_forward_rows(
    const mti_flash &f, const mti_hopper_ring<mti_hopper_shape<HeadDim>::Slots> &ring, uint16_t *q,
    const mti_flash_span *spans, int first, int begin, int keys) {
    typedef mti_hopper_shape<HeadDim> Shape;
    constexpr int Step = Shape::Step;
    int w = (int)threadIdx.x / 128 - 1, warp = (int)threadIdx.x / 32 % 4 * 16, row = first + w * 64 + warp, n = 0,
        head = (int)f.place().head, key = begin;
    mti_flash_span seen = {begin, keys}; /* by any row of the warpgroup */
    mti_hopper_rows<HeadDim> own;
    if (SPANS) seen = mti_flash_block_span<Step, 64>(spans + w * 64);
    else if (f.causal()) seen.end = min(keys, first + w * 64 + 64);
    for (int r = 0; r < 2; r++) own.top[0][r] = -INFINITY, own.sum[0][r] = 0.0f;
    mti_tile_zero(own.acc);
    spans += w * 64 + warp;
    q += w * Shape::Own;
    if (Shape::Turns && w == 1 && begin < keys) mti_named_arrive(1, 256);
    mti_hopper_skip<HeadDim>(ring, w, &key, &n, min(seen.first, keys), keys);
    if (key < seen.end) {
        ring.wait(n * 2);
        mti_hopper_turn<HeadDim>(w);
        mti_wgmma_fence();
        mti_hopper_scores<HeadDim, BF16>(own.s, q, ring.slots + n * 2 % Shape::Slots * Shape::Tile);
        mti_hopper_pass<HeadDim>(w, key + Step >= keys);
        mti_wgmma_wait<0>();
        ring.release(n * 2);
        for (;;) {
            mti_hopper_weigh<HeadDim, BF16, SPANS>(f, own, spans, head, row, key, keys);
            key += Step, n++;
            if (key >= seen.end) break;
            ring.wait(n * 2);
            ring.wait(n * 2 - 1);
            mti_hopper_turn<HeadDim>(w);
            mti_wgmma_fence();
            mti_hopper_scores<HeadDim, BF16>(own.s, q, ring.slots + n * 2 % Shape::Slots * Shape::Tile);
            mti_hopper_add_product<HeadDim, BF16>(own.acc, own.p,
                                                  ring.slots + (n * 2 - 1) % Shape::Slots * Shape::Tile);
            mti_hopper_pass<HeadDim>(w, key + Step >= keys);
            mti_wgmma_wait<1>();
            ring.release(n * 2);
            mti_wgmma_wait<0>();
            ring.release(n * 2 - 1);
        }
        ring.wait(n * 2 - 1);
        mti_wgmma_fence();
        mti_hopper_add_product<HeadDim, BF16>(own.acc, own.p, ring.slots + (n * 2 - 1) % Shape::Slots * Shape::Tile);
        mti_wgmma_wait<0>();
        ring.release(n * 2 - 1);
    }
    mti_hopper_skip<HeadDim>(ring, w, &key, &n, keys, keys);
    mti_named_sync(3 + w, 128); /* all warps of the warpgroup have read q */
    mti_flash_finish<HeadDim, BF16>(f, own.acc, own.top, own.sum, row, q + warp * HeadDim);
}

/* A block owns 128 queries of a head, as in mti_flash_forward_kernel, and each consumer owns 64 of them. Shared memory
   has q of both consumers, and the slots for tiles of keys and values in turn: k0 v0 k1 v1 ... In the steady state:

     producer      copies k and v into the slots that are free, up to three tiles ahead of the consumers
     consumer 0    s = q k1^T, acc += p v0 | softmax of tile 1 |  s = q k2^T, acc += p v1 | softmax of tile 2 | ...
     consumer 1    softmax of tile 0       | s = q k1^T, acc += p v0 | softmax of tile 1  | ...

   The products of a step are two groups, which the tensor cores compute one behind the other. p of a tile waits in
   registers until the scores of the next tile have been started. While one consumer computes exponentials, the tensor
   cores work for the other one: up to 128 features the consumers take turns (see mti_hopper_turn). With more features,
   the registers for acc leave room for tiles of 64 keys only, and a step has as many products for half of the
   exponentials.

   head size                          64    96    128   192   256
   keys of a tile                     128   128   128   64    64
   slots                              6     6     6     6     5
   shared memory in KiB               113   225   225   193   225   (with SPANS: 1 more)
   HGMMA of a warp in a step: scores  4     6     8     12    16    (64 queries, the keys of a tile, 16 features each)
   and output                         8     8     8     4     4     (64 queries, all features, 16 keys each)
   other instructions in a step       490   500   520                (without dropout; 66 of them are exponentials)

   A thread of a consumer has 240 registers, one of the producer 24, and nothing is spilled. A multiprocessor runs one
   block. A warp skips no tile that another warp of its consumer sees, since a product is of all four of them. */
template <int HeadDim, bool BF16, bool SPANS>
static __global__ void __launch_bounds__(MTI_HOPPER_THREADS, 1) mti_hopper_forward_kernel(mti_flash f) {
#if MTI_SM90A
    typedef mti_hopper_shape<HeadDim> Shape;
    MT_DYN_SHARED(uint16_t, memory);
    int first = ((int)gridDim.y - 1 - (int)blockIdx.y) * MTI_FLASH_ROWS; /* blocks with the most keys start first */
    int begin = 0, keys = SPANS ? 0 : f.keys(f.place().sequence, first);
    uint16_t *q = mti_align_1024(memory);
    mti_hopper_ring<Shape::Slots> ring = {q + 2 * Shape::Own,
                                          (uint64_t *)(q + 2 * Shape::Own + Shape::Slots * Shape::Tile)};
    mti_flash_span *spans = (mti_flash_span *)(ring.full + 2 * Shape::Slots);
    if (threadIdx.x == 0) ring.begin();
    if (SPANS) mti_flash_begin_spans<true, Shape::Step, MTI_FLASH_ROWS>(f, spans, first, &begin, &keys);
    else __syncthreads();
    if (threadIdx.x < 128) {
        mti_hopper_forward_copies<HeadDim>(f, ring, q, first, begin, keys);
    } else {
        mti_setmaxnreg_inc<240>();
        mti_hopper_forward_rows<HeadDim, BF16, SPANS>(f, ring, q, spans, first, begin, keys);
    }
#else
    (void)f; /* not launched: see mti_hopper_built */
#endif
}

static_assert(mti_hopper_shape<64>::bytes(true) <= 227 << 10 && mti_hopper_shape<96>::bytes(true) <= 227 << 10 &&
                  mti_hopper_shape<128>::bytes(true) <= 227 << 10 && mti_hopper_shape<192>::bytes(true) <= 227 << 10 &&
                  mti_hopper_shape<256>::bytes(true) <= 227 << 10,
              "shared memory");

template <int HeadDim, bool SPANS> static mt_status mti_hopper_run_forward(const mti_attention *a) {
    mti_flash f = mti_flash_of(a);
    void (*kernels[2])(mti_flash) = {mti_hopper_forward_kernel<HeadDim, false, SPANS>,
                                     mti_hopper_forward_kernel<HeadDim, true, SPANS>};
    MT_TRY(mt_cuda_enter(a->ctx));
    return mti_flash_launch(a, "mt_attention_forward", kernels[a->q.dtype == MT_BF16], MTI_FLASH_ROWS, a->desc.seq,
                            mti_attention_heads(&a->desc), 2 * a->desc.kv_seq / a->desc.heads_per_group,
                            MTI_HOPPER_THREADS, mti_hopper_shape<HeadDim>::bytes(SPANS), f);
}

} /* extern "C++" */
#endif
