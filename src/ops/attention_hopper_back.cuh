/* ---- attention on a GPU: backward kernels with wgmma ------------------------------------------------------------- */

#pragma once
#include "attention_hopper.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* The dq and dkv kernels have the form of the forward kernel in attention_hopper.cuh, and compute what those in
   attention_flash.cuh compute, in the same order of tiles. Each of the two consumers owns 64 of the 128 rows of a
   block. A slot of the ring has the two tiles that a step needs, and in dkv also lse and delta of its queries. All
   warps of a warpgroup multiply together, so a warpgroup skips the tiles that the mask hides from all of its 64 rows.

     kernel   rows      slot              products of a step
     dq       queries   k, v of 128 keys  s = q k^T, dp = dout v^T, dq += ds k
     dkv      keys      q, dout of 64     s^T = k q^T, dp^T = v dout^T, dv += p^T dout, dk += ds^T q
                        queries

   In the products that add, the first operand is in registers (the 16-bit p or ds), and the second one is the tile in
   the slot with its rows as the dimension that is summed over. While the tensor cores compute s and dp, the warps
   compute the mask of the dropout. One consumer computes exponentials while the other one multiplies.

   head size                       64         96         128
   shared memory (KiB), dq, dkv    163, 100   195, 196   195, 196
   slots, dq, dkv                  4, 4       2, 4       2, 4
   wgmma of a step, dq, dkv        16, 16     20, 20     24, 24

   All kernels have SPANS. The soft cap and the dropout are branches, which cost no registers. The producer has 24
   registers, and the consumers have 240: dkv would spill with 232. A multiprocessor runs one block.

   Heads of 192 and 256 features have the backward kernels of attention_flash.cuh: their dk and dv alone would need 192
   and 256 registers of each thread. */

/* The shared memory of a block of the dq kernel: the queries of its two warpgroups, and a ring of slots. A slot has the
   k and v of Step keys. */
template <int HeadDim> struct mti_hopper_dq_memory {
    static constexpr int Width = mti_hopper_shape<HeadDim>::Width, Step = 128, Slots = HeadDim > 64 ? 2 : 4;
    uint16_t rows[2][2][64 * Width];            /* q, dout of the warpgroups */
    uint16_t slots[Slots][2][Step * Width];     /* k, v */
    float stats[2][MTI_FLASH_ROWS];             /* lse, delta */
    mti_flash_span spans[MTI_FLASH_ROWS], seen; /* by any row of the block */
    uint64_t barriers[2 * Slots];

    __device__ mti_hopper_ring<Slots> ring() { return {slots[0][0], barriers}; }
};

/* That of the dkv kernel. A slot has the q and dout of Step queries, and their lse and delta. */
template <int HeadDim> struct mti_hopper_dkv_memory {
    static constexpr int Width = mti_hopper_shape<HeadDim>::Width, Step = 64, Slots = 4;
    uint16_t rows[2][2][64 * Width];            /* k, v of the warpgroups */
    uint16_t slots[Slots][2][Step * Width];     /* q, dout */
    float stats[Slots][2][Step];                /* lse, delta */
    mti_flash_span spans[MTI_FLASH_ROWS], seen; /* by any row of the block */
    uint64_t barriers[2 * Slots];

    __device__ mti_hopper_ring<Slots> ring() { return {slots[0][0], barriers}; }
};

/* Finds the spans of the rows of a block, and the columns of all of them from the beginning of a tile on. They stay in
   shared memory, to be read in each step: the producer has few registers, and dkv has none to spare. */
template <bool KEYS, int Step>
static __device__ __forceinline__ void mti_hopper_begin_spans(const mti_flash &f, mti_flash_span *spans,
                                                              mti_flash_span *seen, int first) {
    int begin, end;
    mti_flash_begin_spans<KEYS, Step, MTI_FLASH_ROWS>(f, spans, first, &begin, &end);
    if (threadIdx.x == 0) seen->first = begin, seen->end = end;
    __syncthreads();
}

/* The producer's warps 0 and 1 copy one of two matrices that are needed together, and warps 2 and 3 the other one: so a
   thread has only one address. It copies vector threadIdx.x % 8 of each block of columns, in row threadIdx.x % 64 / 8
   and every eighth one below it. See mti_hopper_fetch. */
static __device__ __forceinline__ bool mti_hopper_second() { return threadIdx.x >= 64; }
static __device__ __forceinline__ int mti_hopper_half_row() { return (int)threadIdx.x % 64 / 8; }
static __device__ __forceinline__ int mti_hopper_half_place() {
    return mti_hopper_half_row() * 64 + (mti_hopper_vector() ^ mti_hopper_half_row()) * 8;
}
static __device__ __forceinline__ const uint16_t *mti_hopper_half_from(const uint16_t *matrix, int64_t ld, int row) {
    return matrix + (row + mti_hopper_half_row()) * ld + mti_hopper_vector() * 8;
}

/* Fetches one of two matrices [128, HeadDim], the rows of both warpgroups, from row `first` on. */
template <int HeadDim>
static __device__ __forceinline__ void mti_hopper_fetch_rows(uint16_t *tile, const uint16_t *matrix, int64_t ld,
                                                             int first, int end, int last) {
    matrix = mti_hopper_half_from(matrix, ld, first);
    end -= first + mti_hopper_half_row();
    tile += mti_hopper_half_place();
    for (int w = 0; w < 2; w++)
        matrix = mti_hopper_fetch<64, HeadDim, 8>(tile + w * 64 * mti_hopper_shape<HeadDim>::Width, matrix, 8 * ld,
                                                  end - w * 64, last);
}

/* Fetches Count numbers of lse or of delta: a thread 16 bytes, which it has the address of. */
template <int Count> static __device__ __forceinline__ void mti_hopper_fetch_stats(float *stats, const float *from) {
    if (threadIdx.x % 64 < Count / 4) mti_cp_async16(stats + threadIdx.x % 64 * 4, from, 16);
}

/* The producer has started copy n. It announces copy n - 1, so that two copies are in flight; of two slots, one is in
   use, and the other one is announced as soon as it is full. */
template <int Slots>
static __device__ __forceinline__ void mti_hopper_copied(const mti_hopper_ring<Slots> &ring, int n) {
    constexpr int Pending = Slots > 2;
    mti_cp_async_commit();
    mti_cp_async_wait<Pending>();
    if (n >= Pending) ring.arrived(n - Pending);
}

/* The same behind the last of n copies. */
template <int Slots>
static __device__ __forceinline__ void mti_hopper_copied_all(const mti_hopper_ring<Slots> &ring, int n) {
    mti_cp_async_wait<0>();
    if (Slots > 2 && n > 0) ring.arrived(n - 1);
}

template <int HeadDim>
static __device__ __forceinline__ void mti_hopper_dq_copies(const mti_flash &f, mti_hopper_dq_memory<HeadDim> *m,
                                                            int first) {
    typedef mti_hopper_dq_memory<HeadDim> Memory;
    mti_hopper_ring<Memory::Slots> ring = m->ring();
    bool second = mti_hopper_second();
    int64_t b = f.place().sequence, head = f.place().head, step = 8 * f.p.k.ld;
    int last = mti_hopper_last<HeadDim>(f.dim()), left = m->seen.end - m->seen.first - mti_hopper_half_row(), n = 0;
    const uint16_t *q = f.in(f.p.q, b, f.p.q_col(head)), *dout = f.in(f.p.dout, b, head * f.p.s.head_dim);
    const uint16_t *from = f.keys_in(b, f.p.k_col(head) + (second ? f.p.value : 0));
    if (m->seen.first < m->seen.end) { /* otherwise no copy would be committed and waited for */
        mti_hopper_fetch_rows<HeadDim>(m->rows[second][0], second ? dout : q, second ? f.p.dout.ld : f.p.q.ld, first,
                                       (int)f.p.s.seq, last);
        mti_hopper_fetch_stats<MTI_FLASH_ROWS>(m->stats[second], (second ? f.delta : f.lse) + f.stat(b, head) + first +
                                                                     threadIdx.x % 64 * 4);
    }
    from = mti_hopper_half_from(from, f.p.k.ld, m->seen.first);
    mti_setmaxnreg_dec<24>();
    for (; left > -mti_hopper_half_row(); left -= Memory::Step, n++) {
        ring.acquire(n);
        from = mti_hopper_fetch<Memory::Step, HeadDim, 8>(m->slots[n % Memory::Slots][second] + mti_hopper_half_place(),
                                                          from, step, left, last);
        mti_hopper_copied(ring, n);
    }
    mti_hopper_copied_all(ring, n);
}

/* Adds what the keys of a slot give to dq of a warpgroup. row is the first one of the warp. */
template <int HeadDim, bool BF16>
static __device__ __forceinline__ void mti_hopper_dq_add(const mti_flash &f, float (&dq)[1][HeadDim / 8][4],
                                                         mti_hopper_dq_memory<HeadDim> *m, int slot, int head, int row,
                                                         int key) {
    constexpr int Halves = mti_hopper_dq_memory<HeadDim>::Step / 64;
    int w = (int)threadIdx.x / 128 - 1, own = (int)threadIdx.x / 32 * 16 - 64;
    float s[1][Halves * 8][4], dp[1][Halves * 8][4];
    uint32_t ds[Halves * 4][1][4], kept[Halves][1];
    mti_wgmma_fence();
    mti_hopper_scores<HeadDim, BF16>(s, m->rows[0][w], m->slots[slot][0]);
    mti_hopper_scores<HeadDim, BF16>(dp, m->rows[1][w], m->slots[slot][1]);
    MT_DEVICE_UNROLL
    for (int h = 0; h < Halves; h++)
        if (f.p.drop.on) mti_flash_kept_rows<8>(f, head, row, key + h * 64, kept[h]);
    mti_wgmma_wait<0>();
    MT_DEVICE_UNROLL
    for (int h = 0; h < Halves; h++) {
        float(&half)[1][8][4] = (float(&)[1][8][4])s[0][h * 8], (&grad)[1][8][4] = (float(&)[1][8][4])dp[0][h * 8];
        if (f.p.drop.on) mti_flash_drop(grad, kept[h]);
        if (f.alibi != 0.0f) mti_flash_add_alibi(f, half, head, f.position(0) + row - key - h * 64);
        mti_flash_cap_and_mask(f, half, m->spans + own, key + h * 64);
        if (f.cap != 0.0f) mti_flash_score_grads<true>(f, half, grad, m->stats[0] + own, m->stats[1] + own);
        else mti_flash_score_grads<false>(f, half, grad, m->stats[0] + own, m->stats[1] + own);
    }
    mti_tile_round<BF16>(ds, s);
    mti_wgmma_fence();
    mti_hopper_add_product<HeadDim, BF16>(dq, ds, m->slots[slot][0]);
    mti_wgmma_wait<0>();
}

template <int HeadDim, bool BF16>
static __device__ __forceinline__ void mti_hopper_dq_rows(const mti_flash &f, mti_hopper_dq_memory<HeadDim> *m,
                                                          int first) {
    typedef mti_hopper_dq_memory<HeadDim> Memory;
    mti_hopper_ring<Memory::Slots> ring = m->ring();
    int64_t b = f.place().sequence, head = f.place().head;
    int w = (int)threadIdx.x / 128 - 1, warp = (int)threadIdx.x / 32 % 4 * 16, row = first + w * 64 + warp, n = 0;
    float dq[1][HeadDim / 8][4];
    mti_tile_zero(dq);
    for (int key = m->seen.first; key < m->seen.end; key += Memory::Step, n++) {
        ring.wait(n);
        if (mti_flash_meets<64>(m->spans + w * 64, key, Memory::Step))
            mti_hopper_dq_add<HeadDim, BF16>(f, dq, m, n % Memory::Slots, (int)head, row, key);
        ring.release(n);
    }
    mti_named_sync(1 + w, 128); /* all warps of the warpgroup have read q */
    mti_tile_scale(dq, f.p.scale);
    mti_tile_store<HeadDim, BF16>(dq, m->rows[0][w] + warp * HeadDim, f.out(f.p.dq, b, row, f.p.q_col(head)), f.p.dq.ld,
                                  f.dim(), (int)f.p.s.seq - row);
}

/* The query heads of a group, and their lse and delta, follow one another. */
template <int HeadDim>
static __device__ __forceinline__ void mti_hopper_dkv_copies(const mti_flash &f, mti_hopper_dkv_memory<HeadDim> *m,
                                                             int first) {
    typedef mti_hopper_dkv_memory<HeadDim> Memory;
    mti_hopper_ring<Memory::Slots> ring = m->ring();
    bool second = mti_hopper_second();
    int64_t b = f.place().sequence, col = f.place().head * f.p.kv_step + (second ? f.p.value : 0);
    int64_t head = f.place().head * f.p.s.heads_per_group, ld = second ? f.p.dout.ld : f.p.q.ld, step = 8 * ld;
    const uint16_t *from = second ? f.in(f.p.dout, b, head * f.p.s.head_dim) : f.in(f.p.q, b, f.p.q_col(head));
    const float *stats = (second ? f.delta : f.lse) + f.stat(b, head) + m->seen.first + threadIdx.x % 64 * 4;
    int last = mti_hopper_last<HeadDim>(f.dim()), over = (int)f.p.s.seq - mti_hopper_half_row(), n = 0, query;
    if (m->seen.first < m->seen.end)
        mti_hopper_fetch_rows<HeadDim>(m->rows[second][0], f.keys_in(b, col), f.p.k.ld, first, (int)f.p.s.kv_seq, last);
    from = mti_hopper_half_from(from, ld, m->seen.first);
    mti_setmaxnreg_dec<24>();
    for (int h = 0; h < (int)f.p.s.heads_per_group; h++) {
        MT_DEVICE_NO_UNROLL
        for (query = m->seen.first; query < m->seen.end; query += Memory::Step, n++) {
            ring.acquire(n);
            from = mti_hopper_fetch<Memory::Step, HeadDim, 8>(
                m->slots[n % Memory::Slots][second] + mti_hopper_half_place(), from, step, over - query, last);
            mti_hopper_fetch_stats<Memory::Step>(m->stats[n % Memory::Slots][second], stats);
            mti_hopper_copied(ring, n);
            stats += Memory::Step;
        }
        from += f.p.s.head_dim - (query - m->seen.first) / 8 * step, stats += f.pitch - (query - m->seen.first);
    }
    mti_hopper_copied_all(ring, n);
}

/* Sets the dropped elements of a tile [16 keys, 64 queries] to 0, see mti_flash_kept_columns. */
static __device__ __forceinline__ void mti_hopper_drop(float (&p)[1][8][4], uint32_t kept) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < 32; i++)
        if (!(kept >> i & 1)) p[0][i / 4][i % 4] = 0.0f;
}

/* Adds what the queries of a slot give to dk and dv of a warpgroup. row is the first one of the warp. */
template <int HeadDim, bool BF16>
static __device__ __forceinline__ void mti_hopper_dkv_add(const mti_flash &f, float (&dk)[1][HeadDim / 8][4],
                                                          float (&dv)[1][HeadDim / 8][4],
                                                          mti_hopper_dkv_memory<HeadDim> *m, int slot, int head,
                                                          int row, int query) {
    int w = (int)threadIdx.x / 128 - 1, own = (int)threadIdx.x / 32 * 16 - 64, lane = (int)threadIdx.x & 31;
    const float *lse = m->stats[slot][0] + lane % 4 * 2, *delta = m->stats[slot][1] + lane % 4 * 2;
    float s[1][8][4], dp[1][8][4];
    uint32_t p[4][1][4], ds[4][1][4], kept = ~0u;
    mti_wgmma_fence();
    mti_hopper_scores<HeadDim, BF16>(s, m->rows[0][w], m->slots[slot][0]);
    mti_hopper_scores<HeadDim, BF16>(dp, m->rows[1][w], m->slots[slot][1]);
    if (f.p.drop.on) kept = mti_flash_kept_columns<1, 8>(f, mti_flash_again(head), row, query);
    mti_wgmma_wait<1>(); /* s is there */
    if (f.alibi != 0.0f) mti_flash_add_alibi(f, s, mti_flash_again(head), row - query - f.position(0));
    mti_flash_cap_and_mask(f, s, m->spans + own, query);
    mti_wgmma_wait<0>();
    if (f.p.drop.on) mti_hopper_drop(dp, kept);
    if (f.cap != 0.0f) mti_flash_pairs<false, true>(f, s, dp, lse, delta, kept);
    else mti_flash_pairs<false, false>(f, s, dp, lse, delta, kept);
    if (f.p.drop.on) mti_hopper_drop(s, kept);
    mti_tile_round<BF16>(p, s);
    mti_tile_round<BF16>(ds, dp);
    mti_wgmma_fence();
    mti_hopper_add_product<HeadDim, BF16>(dv, p, m->slots[slot][1]);
    mti_hopper_add_product<HeadDim, BF16>(dk, ds, m->slots[slot][0]);
    mti_wgmma_wait<0>();
}

template <int HeadDim, bool BF16>
static __device__ __forceinline__ void mti_hopper_dkv_rows(const mti_flash &f, mti_hopper_dkv_memory<HeadDim> *m,
                                                           int first) {
    typedef mti_hopper_dkv_memory<HeadDim> Memory;
    mti_hopper_ring<Memory::Slots> ring = m->ring();
    int w = (int)threadIdx.x / 128 - 1, warp = (int)threadIdx.x / 32 % 4 * 16, row = first + w * 64 + warp, n = 0;
    int head = (int)(f.place().head * f.p.s.heads_per_group), heads = head + (int)f.p.s.heads_per_group;
    float dk[1][HeadDim / 8][4], dv[1][HeadDim / 8][4];
    mti_tile_zero(dk);
    mti_tile_zero(dv);
    for (; head < heads; head++)
        for (int query = m->seen.first; query < m->seen.end; query += Memory::Step, n++) {
            ring.wait(n);
            if (mti_flash_meets<64>(m->spans + w * 64, query, Memory::Step))
                mti_hopper_dkv_add<HeadDim, BF16>(f, dk, dv, m, n % Memory::Slots, head, row, query);
            ring.release(n);
        }
    mti_named_sync(1 + w, 128); /* all warps of the warpgroup have read k and v */
    mti_flash_place place = f.place_again();
    mti_tile_scale(dk, f.p.scale);
    mti_tile_scale(dv, f.p.drop.scale);
    mti_tile_store<HeadDim, BF16>(dk, m->rows[0][w] + warp * HeadDim,
                                  f.keys_out(place.sequence, row, place.head * f.p.kv_step), f.p.dk.ld, f.dim(),
                                  (int)f.p.s.kv_seq - row);
    mti_tile_store<HeadDim, BF16>(dv, m->rows[1][w] + warp * HeadDim,
                                  f.keys_out(place.sequence, row, place.head * f.p.kv_step + f.p.dvalue), f.p.dk.ld,
                                  f.dim(), (int)f.p.s.kv_seq - row);
}

template <int HeadDim, bool BF16>
static __global__ void __launch_bounds__(MTI_HOPPER_THREADS, 1) mti_hopper_dq_kernel(mti_flash f) {
#if MTI_SM90A
    MT_DYN_SHARED(mti_hopper_dq_memory<HeadDim>, memory);
    mti_hopper_dq_memory<HeadDim> *m = mti_align_1024(memory);
    int first = ((int)gridDim.y - 1 - (int)blockIdx.y) * MTI_FLASH_ROWS;
    if (threadIdx.x == 0) m->ring().begin();
    mti_hopper_begin_spans<true, 128>(f, m->spans, &m->seen, first);
    if (threadIdx.x < 128) {
        mti_hopper_dq_copies<HeadDim>(f, m, first);
    } else {
        mti_setmaxnreg_inc<240>();
        mti_hopper_dq_rows<HeadDim, BF16>(f, m, first);
    }
#endif
}

template <int HeadDim, bool BF16>
static __global__ void __launch_bounds__(MTI_HOPPER_THREADS, 1) mti_hopper_dkv_kernel(mti_flash f) {
#if MTI_SM90A
    MT_DYN_SHARED(mti_hopper_dkv_memory<HeadDim>, memory);
    mti_hopper_dkv_memory<HeadDim> *m = mti_align_1024(memory);
    int first = (int)blockIdx.y * MTI_FLASH_ROWS;
    if (threadIdx.x == 0) m->ring().begin();
    mti_hopper_begin_spans<false, 64>(f, m->spans, &m->seen, first);
    if (threadIdx.x < 128) {
        mti_hopper_dkv_copies<HeadDim>(f, m, first);
    } else {
        mti_setmaxnreg_inc<240>();
        mti_hopper_dkv_rows<HeadDim, BF16>(f, m, first);
    }
#endif
}

template <int HeadDim> static constexpr bool mti_hopper_back_fits() {
    return sizeof(mti_hopper_dq_memory<HeadDim>) + MTI_ALIGN_1024_BYTES <= 227 << 10 &&
           sizeof(mti_hopper_dkv_memory<HeadDim>) + MTI_ALIGN_1024_BYTES <= 227 << 10;
}
static_assert(mti_hopper_back_fits<64>() && mti_hopper_back_fits<96>() && mti_hopper_back_fits<128>(), "shared memory");

template <int HeadDim> static mt_status mti_hopper_run_backward(const mti_attention *a) {
    if constexpr (HeadDim > 128) return mti_flash_run_backward<HeadDim, true>(a);
    else {
        mti_flash_back back = {mti_hopper_dq_kernel<HeadDim, false>,
                               mti_hopper_dkv_kernel<HeadDim, false>,
                               MTI_FLASH_ROWS,
                               MTI_HOPPER_THREADS,
                               MTI_HOPPER_THREADS,
                               (int)sizeof(mti_hopper_dq_memory<HeadDim>) + MTI_ALIGN_1024_BYTES,
                               (int)sizeof(mti_hopper_dkv_memory<HeadDim>) + MTI_ALIGN_1024_BYTES};
        if (a->q.dtype == MT_BF16)
            back.dq = mti_hopper_dq_kernel<HeadDim, true>, back.dkv = mti_hopper_dkv_kernel<HeadDim, true>;
        return mti_flash_backward(a, back);
    }
}

} /* extern "C++" */
#endif
