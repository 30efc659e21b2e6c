/* ---- 16-bit tiles in shared memory, and their products, on a GPU ------------------------------------------------- */

#pragma once
#include "vector_loads.cuh"
#include "ptx.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* Returns the offset in elements of a vector in a tile. A tile is [rows, HeadDim], row-major, in vectors of 16 bytes.
   Vector c of row r is stored at the place of vector c ^ swizzle(r), so that the eight rows that ldmatrix reads at a
   time lie in eight different groups of four banks. Rows of 64 or 128 elements all begin in the same bank, so the
   swizzle is the row modulo 8. Rows of 96 elements begin alternately in two banks, so the swizzle is the number of the
   pair of rows, modulo 4. */
template <int HeadDim> static __device__ __forceinline__ int mti_tile_at(int row, int vector) {
    return row * HeadDim + (vector ^ (HeadDim % 64 == 0 ? row & 7 : row >> 1 & 3)) * 8;
}

/* Returns the offset of the vector that is `vector` vectors after the one at `at`. `vector` is even, and at =
   mti_tile_at(row, 0 or 1). Most of this is computed at compile time. */
template <int HeadDim> static __device__ __forceinline__ int mti_tile_on(int at, int vector) {
    if ((HeadDim & (HeadDim - 1)) == 0) return at ^ (vector * 8);
    return HeadDim % 64 == 0 ? (at ^ (vector % 8 * 8)) + vector / 8 * 64 : (at ^ (vector % 4 * 8)) + vector / 4 * 32;
}

/* The number of neighbouring threads that move a row together, one vector each. When a row is divided into groups of
   this many vectors, the swizzle permutes vectors only within a group. */
template <int HeadDim> static __device__ __forceinline__ constexpr int mti_tile_across() {
    return HeadDim % 64 == 0 ? 8 : 4;
}

/* The THREADS threads of a block together start copying rows [first, first + ROWS) of a matrix with `dim` columns to a
   tile. dim is a multiple of 8. Columns from dim on and rows from `end` on become 0, and are not read. Of the vectors
   that a thread copies of a row, only the last one can be behind dim. The caller commits, waits and synchronises. */
template <int ROWS, int HeadDim, int THREADS>
static __device__ __forceinline__ void mti_tile_fetch(uint16_t *tile, const uint16_t *from, int64_t ld, int dim,
                                                      int first, int end) {
    constexpr int least = mti_tile_across<HeadDim>(), across = THREADS / least > ROWS ? THREADS / ROWS : least;
    constexpr int down = THREADS / across, last = HeadDim / 8 - across;
    static_assert(ROWS % down == 0 && down % 8 == 0, "every thread copies as much, at the same swizzle");
    int row = (int)threadIdx.x / across, vector = (int)threadIdx.x % across;
    int last_end = (last + vector) * 8 < dim ? end : 0;
    tile += mti_tile_at<HeadDim>(row, vector);
    row += first;
    from += row * ld + vector * 8;
    MT_DEVICE_UNROLL
    for (int c = 0; c < HeadDim / 8; c += across) {
        MT_DEVICE_UNROLL
        for (int r = 0; r < ROWS; r += down)
            mti_cp_async16(tile + r * HeadDim + c * 8, from + r * ld + c * 8,
                           row + r < (c < last ? end : last_end) ? 16 : 0);
    }
}

template <bool BF16> static __device__ __forceinline__ void mti_mma(float *d, const uint32_t *a, const uint32_t *b) {
    if (BF16) mti_mma_16816_bf16(d, a, b);
    else mti_mma_16816_f16(d, a, b);
}

/* Returns two f32 values, each rounded to 16 bits, in one word. */
template <bool BF16> static __device__ __forceinline__ uint32_t mti_round_pair(float low, float high) {
    uint32_t pair;
    if (BF16) {
        __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
        memcpy(&pair, &v, sizeof pair);
    } else {
        __half2 v = __floats2half2_rn(low, high);
        memcpy(&pair, &v, sizeof pair);
    }
    return pair;
}

/* The accumulator of a warp is a matrix [RowTiles * 16, N8 * 8], distributed over the lanes as float
   acc[RowTiles][N8][4]. In lane l, elements 0 and 1 of acc[m][n] belong to row m * 16 + l / 4, and elements 2 and 3 to
   the row 8 below it. Their columns are n * 8 + l % 4 * 2 and the next one. */
template <int RowTiles, int N8> static __device__ __forceinline__ void mti_tile_zero(float (&acc)[RowTiles][N8][4]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) acc[i / 4 / N8][i / 4 % N8][i % 4] = 0.0f;
}

template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_tile_scale(float (&acc)[RowTiles][N8][4], float factor) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) acc[i / 4 / N8][i / 4 % N8][i % 4] *= factor;
}

/* The first operand of a product, [RowTiles * 16, K16 * 16], is in registers in fragments uint32_t x[K16][RowTiles][4].
   mti_tile_load loads fragment k of a tile [RowTiles * 16, HeadDim], mti_tile_hold loads the first Held ones, and
   mti_tile_round rounds an accumulator to 16 bits, which is then the first operand of the next product. */
template <int HeadDim, int RowTiles>
static __device__ __forceinline__ void mti_tile_load(uint32_t (&x)[RowTiles][4], const uint16_t *a, int k) {
    int lane = (int)threadIdx.x & 31, at = mti_tile_at<HeadDim>(lane & 15, lane >> 4);
    MT_DEVICE_UNROLL
    for (int m = 0; m < RowTiles; m++) mti_ldmatrix_x4(x[m], a + m * 16 * HeadDim + mti_tile_on<HeadDim>(at, k * 2));
}

template <int HeadDim, int Held, int RowTiles>
static __device__ __forceinline__ void mti_tile_hold(uint32_t (&x)[HeadDim / 16][RowTiles][4], const uint16_t *a) {
    MT_DEVICE_UNROLL
    for (int k = 0; k < Held; k++) mti_tile_load<HeadDim>(x[k], a, k);
}

template <bool BF16, int RowTiles, int N8>
static __device__ __forceinline__ void mti_tile_round(uint32_t (&x)[N8 / 2][RowTiles][4],
                                                      const float (&acc)[RowTiles][N8][4]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < N8 / 2 * RowTiles * 4; i++) {
        int k = i / 4 / RowTiles, m = i / 4 % RowTiles, e = i % 4;
        const float *pair = acc[m][k * 2 + e / 2] + e % 2 * 2;
        x[k][m][e] = mti_round_pair<BF16>(pair[0], pair[1]);
    }
}

/* acc = a b^T. The tile a [RowTiles * 16, HeadDim] belongs to this warp, all warps share the tile b [N8 * 8, HeadDim].
   The caller holds the first Held fragments of a in x, and this function loads the others. Each fragment of a or b is
   loaded while the tensor cores work on the one before it. */
template <int HeadDim, bool BF16, int Held, int RowTiles, int N8>
static __device__ __forceinline__ void mti_tile_scores(float (&acc)[RowTiles][N8][4],
                                                       const uint32_t (&x)[HeadDim / 16][RowTiles][4],
                                                       const uint16_t *a, const uint16_t *b) {
    constexpr int K16 = HeadDim / 16, across = N8 / 2, steps = K16 * across;
    int lane = (int)threadIdx.x & 31, at = mti_tile_at<HeadDim>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    uint32_t y[2][4], z[2][RowTiles][4];
    mti_tile_zero(acc);
    if (Held == 0) mti_tile_load<HeadDim>(z[0], a, 0);
    mti_ldmatrix_x4(y[0], b + at);
    MT_DEVICE_UNROLL
    for (int k = 0; k < K16; k++) {
        if (k + 1 >= Held && k + 1 < K16) mti_tile_load<HeadDim>(z[(k + 1) % 2], a, k + 1);
        MT_DEVICE_UNROLL
        for (int j = 0; j < across; j++) {
            int i = k * across + j, n = j * 2, next = i + 1;
            if (next < steps)
                mti_ldmatrix_x4(y[next % 2],
                                b + next % across * 16 * HeadDim + mti_tile_on<HeadDim>(at, next / across * 2));
            MT_DEVICE_UNROLL
            for (int m = 0; m < RowTiles; m++) {
                const uint32_t *first = k < Held ? x[k][m] : z[k % 2][m];
                mti_mma<BF16>(acc[m][n], first, y[i % 2]);
                mti_mma<BF16>(acc[m][n + 1], first, y[i % 2] + 2);
            }
        }
    }
}

/* acc += x b. x are fragments, and all warps share the tile b [K16 * 16, HeadDim]. A fragment of b is loaded while the
   tensor cores work on the one before it. */
template <int HeadDim, bool BF16, int RowTiles, int K16>
static __device__ __forceinline__ void mti_tile_add_product(float (&acc)[RowTiles][HeadDim / 8][4],
                                                            const uint32_t (&x)[K16][RowTiles][4], const uint16_t *b) {
    constexpr int across = HeadDim / 16, steps = K16 * across;
    int lane = (int)threadIdx.x & 31, at = mti_tile_at<HeadDim>(lane & 15, lane >> 4);
    uint32_t y[2][4];
    mti_ldmatrix_x4_trans(y[0], b + at);
    MT_DEVICE_UNROLL
    for (int i = 0; i < steps; i++) {
        int k = i / across, n = i % across * 2, next = i + 1;
        if (next < steps)
            mti_ldmatrix_x4_trans(y[next % 2],
                                  b + next / across * 16 * HeadDim + mti_tile_on<HeadDim>(at, next % across * 2));
        MT_DEVICE_UNROLL
        for (int m = 0; m < RowTiles; m++) {
            mti_mma<BF16>(acc[m][n], x[k][m], y[i % 2]);
            mti_mma<BF16>(acc[m][n + 1], x[k][m], y[i % 2] + 2);
        }
    }
}

/* Stores the first `rows` rows and `dim` columns of acc in global memory, 16 bytes at a time. The values go through a
   tile [RowTiles * 16, HeadDim] that only this warp uses. The barrier of the warp separates writing the tile from
   reading it. */
template <int HeadDim, bool BF16, int RowTiles>
static __device__ __forceinline__ void mti_tile_store(const float (&acc)[RowTiles][HeadDim / 8][4], uint16_t *tile,
                                                      uint16_t *to, int64_t ld, int dim, int rows) {
    constexpr int across = mti_tile_across<HeadDim>();
    int lane = (int)threadIdx.x & 31;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * HeadDim / 4; i++) { /* half 2 m is rows m * 16 + lane / 4, half 2 m + 1 is 8 below */
        int n = i % (HeadDim / 8), half = i / (HeadDim / 8);
        const float *pair = acc[half / 2][n] + half % 2 * 2;
        *(uint32_t *)(tile + mti_tile_at<HeadDim>(half * 8 + lane / 4, n) + lane % 4 * 2) =
            mti_round_pair<BF16>(pair[0], pair[1]);
    }
    __syncwarp();
    for (int row = lane / across; row < RowTiles * 16 && row < rows; row += 32 / across) {
        MT_DEVICE_UNROLL
        for (int i = 0; i < HeadDim / 8; i += across) {
            int c = i + lane % across;
            if (c < dim / 8)
                *(mti_words *)(to + row * ld + c * 8) = *(const mti_words *)(tile + mti_tile_at<HeadDim>(row, c));
        }
    }
}

} /* extern "C++" */
#endif
