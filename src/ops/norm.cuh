/* ---- LayerNorm and RMSNorm, on a GPU ----------------------------------------------------------------------------- */

#pragma once
#include "norm.h"
#include "rows.cuh"
#include "map.cuh"
#include "columns.cuh"
#include "ptx.cuh"

#if MT_HAS_CUDA
extern "C++" {

struct mti_norm_op {
    mti_view x, gain, bias, y, stats;
    float eps;
    int centered; /* 1 for LayerNorm: subtract the mean */
};

#define MTI_NORM_THREADS 512 /* maximum threads per block */
#define MTI_NORM_ROWS 4      /* rows of a block whose warps have a row each */

/* x becomes x - mean, and the sum of its squares is returned. The last elements, from n on, do not count. */
static __device__ __forceinline__ float mti_norm_center(float *x, float mean, int n) {
    float sum = 0.0f;
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) {
        x[j] -= mean;
        if (j < n) sum += x[j] * x[j];
    }
    return sum;
}

/* y of one vector, from x - mean. y may be x. */
template <int TYPE>
static __device__ __forceinline__ void mti_norm_vector(const float *x, float rstd, const mti_fetched<TYPE> &gain,
                                                       const mti_fetched<TYPE> &bias, float *y) {
    float g[MTI_VECTOR], b[MTI_VECTOR];
    mti_values(gain, g);
    mti_values(bias, b);
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) y[j] = x[j] * rstd * g[j] + b[j];
}

/* The vectors of a row that its threads do not keep, KEPT * blockDim.x and on. */
template <int TYPE, int KEPT> struct mti_norm_rest {
    const mti_norm_op &op;
    int64_t row, cols;
    int vectors;
    float x[MTI_VECTOR];
    __device__ __forceinline__ int load(int i) {
        mti_fetched<TYPE> held;
        mti_row_fetch(op.x, row, i, cols, held);
        mti_values(held, x);
        return mti_row_vector_size<TYPE>(cols, i);
    }
    __device__ __forceinline__ int first() const { return (int)(threadIdx.x + KEPT * blockDim.x); }
    __device__ __forceinline__ float sum() {
        float sum = 0.0f;
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            load(i);
            for (int j = 0; j < MTI_VECTOR; j++) sum += x[j];
        }
        return sum;
    }
    __device__ __forceinline__ float squares(float mean) {
        float sum = 0.0f;
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            int n = load(i);
            sum += mti_norm_center(x, mean, n);
        }
        return sum;
    }
    __device__ __forceinline__ void write(float mean, float rstd) {
        mti_fetched<TYPE> gain, bias = {};
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            int n = load(i);
            mti_row_fetch(op.gain, 0, i, cols, gain);
            if (op.bias.data) mti_row_fetch(op.bias, 0, i, cols, bias);
            mti_norm_center(x, mean, n);
            mti_norm_vector(x, rstd, gain, bias, x);
            mti_row_store<TYPE>(op.y, row, i, cols, x);
        }
    }
};

/* One row of mti_norm_kernel. Thread threadIdx.x owns every blockDim.x-th vector of it. It keeps its first KEPT vectors
   in registers, and reads the others (`rest`) again in each step. A kept vector behind the end of the row is 0.

   1. The loads of x begin.
   2. LayerNorm only: the sum of x, and from it the mean.
   3. The sum of (x - mean)^2, and from it rstd.
   4. y, vector by vector. Gain and bias come from a cache: loaded before, they would take registers from other blocks.

   `shared` [64] holds the sums of the warps, each sum in its own half; the barriers are in mti_row_total. A thread
   reads a vector of x before it writes the same vector of y, so y may be x. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_row(const mti_norm_op &op, int64_t row, int64_t cols, float *shared) {
    int vectors = (int)((cols + MTI_VECTOR - 1) / MTI_VECTOR), at[KEPT];
    mti_norm_rest<TYPE, KEPT> rest = {op, row, cols, vectors, {}};
    mti_fetched<TYPE> held[KEPT] = {}, gain = {}, bias = {};
    float x[KEPT][MTI_VECTOR], sum = 0.0f, squares = 0.0f, mean = 0.0f;
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        at[q] = (int)(threadIdx.x + q * blockDim.x);
        if (at[q] < vectors) mti_row_fetch(op.x, row, at[q], cols, held[q]);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        float own = 0.0f;
        mti_values(held[q], x[q]);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) own += x[q][j];
        sum += own;
    }
    if (op.centered) mean = mti_row_total(sum + rest.sum(), shared) / (float)cols;
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        float own = mti_norm_center(x[q], mean, mti_row_vector_size<TYPE>(cols, at[q]));
        squares += at[q] < vectors ? own : 0.0f;
    }
    squares += rest.squares(mean);
    float rstd = 1.0f / sqrtf(mti_row_total(squares, shared + 32) / (float)cols + op.eps);
    if (threadIdx.x == 0 && op.stats.data) {
        mti_put<MT_F32>(op.stats, row, 0, mean);
        mti_put<MT_F32>(op.stats, row, 1, rstd);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        if (at[q] < vectors) mti_row_fetch(op.gain, 0, at[q], cols, gain);
        if (at[q] < vectors && op.bias.data) mti_row_fetch(op.bias, 0, at[q], cols, bias);
        mti_norm_vector(x[q], rstd, gain, bias, x[q]);
        if (at[q] < vectors) mti_row_store<TYPE>(op.y, row, at[q], cols, x[q]);
    }
    rest.write(mean, rstd);
}

/* A block owns blockDim.y rows, from row (first + blockIdx.x) * blockDim.y on. If it has several rows, each of them
   belongs to one warp. All loads of a row are in flight at once, and other blocks hide the time until they arrive.
   LayerNorm in bf16 with KEPT 4 on sm_90: 21 instructions for an element, which moves 4 bytes (budget: 27); 71
   registers; with 4096 columns, 7 blocks of 128 threads on a multiprocessor, whose loads are 56 KiB. */
template <int TYPE, int KEPT>
static __global__ void __launch_bounds__(MTI_NORM_THREADS, 1)
    mti_norm_kernel(int64_t first, mti_norm_op op, int64_t rows, int64_t cols) {
    MT_SHARED(float, shared, 64);
    int64_t row = (first + blockIdx.x) * blockDim.y + threadIdx.y;
    if (row < rows) mti_norm_row<TYPE, KEPT>(op, row, cols, shared);
}

/* Launches mti_norm_kernel. Rows of at most 32 * KEPT vectors belong to a warp, wider ones to a block. */
template <int TYPE>
static mt_status mti_norm_launch(mt_context *ctx, const mti_norm_op &op, int64_t rows, int64_t cols) {
    static const int kept = TYPE == MT_BF16 || TYPE == MT_F16 ? 4 : 2;
    int64_t vectors = (cols + MTI_VECTOR - 1) / MTI_VECTOR;
    unsigned threads = (unsigned)mt_min(MTI_NORM_THREADS, mt_round_up((vectors + kept - 1) / kept, 32));
    dim3 block(threads, threads == 32 ? MTI_NORM_ROWS : 1);
    int64_t blocks = (rows + block.y - 1) / block.y;
    if (vectors <= 32)
        MTI_LAUNCH_BLOCKS((mti_norm_kernel<TYPE, 1>), blocks, block, 0, mt_context_stream(ctx), op, rows, cols);
    else MTI_LAUNCH_BLOCKS((mti_norm_kernel<TYPE, kept>), blocks, block, 0, mt_context_stream(ctx), op, rows, cols);
    return mt_cuda_launched(ctx, "mt_norm_forward");
}

static mt_status mti_cuda_norm_forward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor bias,
                                       float eps, mt_tensor y, mt_tensor stats) {
    mti_norm_op op = {mti_view_of(x),       mti_view_of(gain),  mti_view_of(bias),
                      mti_view_of(y),       mti_view_of(stats), eps,
                      kind == MT_LAYER_NORM};
    if (x.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    return mti_by_type(mti_row_type(x.cols, x, gain, bias, y),
                       [&](auto type) { return mti_norm_launch<decltype(type)::value>(ctx, op, x.rows, x.cols); });
}

struct mti_norm_backward_op {
    mti_view x, gain, stats, dy, dresidual, dx;
    int centered;
};

/* The sums of a block for dgain and dbias, as float4 data[4][vectors]. Part 0 has elements 0 to 3 of the vectors of
   dgain, and part 1 has elements 4 to 7. Parts 2 and 3 are the same for dbias. In this layout, neighbouring threads
   access neighbouring memory. Each vector belongs to one thread. */
struct mti_norm_sums {
    float4 *data;
    int vectors;
    __device__ __forceinline__ void load(int i, float *dgain, float *dbias) const {
        MT_DEVICE_UNROLL
        for (int part = 0; part < 4; part++) {
            float *x = (part < 2 ? dgain : dbias) + part % 2 * 4;
            float4 v = data[part * vectors + i];
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        }
    }
    __device__ __forceinline__ void store(int i, const float *dgain, const float *dbias) const {
        MT_DEVICE_UNROLL
        for (int part = 0; part < 4; part++) {
            const float *x = (part < 2 ? dgain : dbias) + part % 2 * 4;
            data[part * vectors + i] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
};

/* What the gradient of a row needs: dx = dy * gain * rstd + (x - mean) * slope + shift. With g = dy * gain and
   xhat = (x - mean) * rstd, slope is -rstd^2 mean(g xhat) and shift is -rstd mean(g), or 0 for RMSNorm. */
struct mti_norm_means {
    float mean, rstd, slope, shift;
};

/* Copies mean and rstd of `count` rows to stats [count, 2] in shared memory, with mean 0 for RMSNorm. */
static __device__ __forceinline__ void mti_norm_stats(const mti_norm_backward_op &op, int64_t row, int count,
                                                      float *stats) {
    for (int i = (int)threadIdx.x; i < 2 * count; i += (int)blockDim.x)
        stats[i] = i % 2 || op.centered ? mti_get<MT_F32>(op.stats, row + i / 2, i % 2) : 0.0f;
    __syncthreads();
}

/* Computes slope and shift from the sums of g and of g * (x - mean) over a row. Each thread passes its part of the
   sums; shared [64]. share is 1 / cols. */
static __device__ __forceinline__ void mti_norm_total(const mti_norm_backward_op &op, float sum_g, float sum_gx,
                                                      float share, float *shared, mti_norm_means &m) {
    float2 total = mti_block_sums_once(sum_g, sum_gx, shared);
    m.slope = -(total.y * share * m.rstd) * m.rstd * m.rstd;
    m.shift = op.centered ? -(total.x * share) * m.rstd : 0.0f;
}

/* The first KEPT vectors of a row that a thread has loaded. Vectors behind the end of the row stay 0. */
template <int TYPE, int KEPT> struct mti_norm_input {
    mti_fetched<TYPE> x[KEPT], dy[KEPT], residual[KEPT];
    __device__ __forceinline__ void load(const mti_norm_backward_op &op, int64_t row, int64_t cols, int q) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i >= (int)((cols + MTI_VECTOR - 1) / MTI_VECTOR)) return;
        mti_row_fetch(op.x, row, i, cols, x[q]);
        mti_row_fetch(op.dy, row, i, cols, dy[q]);
        if (op.dresidual.data) mti_row_fetch(op.dresidual, row, i, cols, residual[q]);
    }
};

/* Adds g and g * (x - mean) of one vector to the two sums. Elements past the end of the row are 0. */
template <int TYPE>
static __device__ __forceinline__ void mti_norm_mean(const mti_norm_means &m, const mti_fetched<TYPE> &x,
                                                     const mti_fetched<TYPE> &dy, const mti_fetched<TYPE> &gain,
                                                     float *sum_g, float *sum_gx) {
    float v[MTI_VECTOR], d[MTI_VECTOR], g[MTI_VECTOR];
    mti_values(x, v);
    mti_values(dy, d);
    mti_values(gain, g);
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) {
        *sum_g += d[j] * g[j];
        *sum_gx += d[j] * g[j] * (v[j] - m.mean);
    }
}

/* v = dx of one vector, without dresidual. Adds dy * xhat to dgain, and dy to dbias. */
template <int TYPE>
static __device__ __forceinline__ void mti_norm_gradient(const mti_norm_means &m, const mti_fetched<TYPE> &x,
                                                         const mti_fetched<TYPE> &dy, const mti_fetched<TYPE> &gain,
                                                         float *v, float *dgain, float *dbias) {
    float d[MTI_VECTOR], g[MTI_VECTOR];
    mti_values(x, v);
    mti_values(dy, d);
    mti_values(gain, g);
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) {
        float centered = v[j] - m.mean, scaled = d[j] * m.rstd;
        dgain[j] += scaled * centered;
        dbias[j] += d[j];
        v[j] = scaled * g[j] + (centered * m.slope + m.shift);
    }
}

#define MTI_NORM_SUM_THREADS 256  /* maximum threads per block if the sums are in registers */
#define MTI_NORM_ROOM_THREADS 384 /* the same if they do not fit into registers */

#define MTI_NORM_STRIP 16  /* rows of a short strip */
#define MTI_NORM_TALLEST 4 /* a tall strip has at most this many times the rows of a short one */
/* A tall strip has MTI_NORM_STRIP rows for each MTI_NORM_TALL elements of the matrix. */
#ifndef MTI_NORM_TALL
#define MTI_NORM_TALL (32 << 20)
#endif

/* The strips of rows whose sums a block adds. The first `tall` strips have `height` rows each, the others
   MTI_NORM_STRIP. Each strip costs 16 bytes of traffic for a column, so large matrices have tall strips: with 4096
   columns and 32768 rows, 384 of 64 rows and then 512 of 16. The short ones, a quarter of the rows, come last and fill
   the GPU while other blocks end. The strips depend on the shape only, so every GPU computes the same bits. */
struct mti_norm_strips {
    int64_t count, tall, height;
    __device__ __forceinline__ int64_t row(int64_t strip) const {
        return strip < tall ? strip * height : tall * height + (strip - tall) * MTI_NORM_STRIP;
    }
};

static mti_norm_strips mti_norm_strips_of(int64_t rows, int64_t cols) {
    mti_norm_strips s;
    s.height = MTI_NORM_STRIP * mt_max(1, mt_min(MTI_NORM_TALLEST, rows * cols / MTI_NORM_TALL));
    s.tall = s.height == MTI_NORM_STRIP ? 0 : (rows - rows / 4) / s.height;
    s.count = s.tall + (rows - s.tall * s.height + MTI_NORM_STRIP - 1) / MTI_NORM_STRIP;
    return s;
}

/* The vectors of a row that its threads do not keep, KEPT * blockDim.x and on. They are loaded twice. */
template <int TYPE, int KEPT> struct mti_norm_backward_rest {
    const mti_norm_backward_op &op;
    int64_t row, cols;
    int vectors;
    mti_fetched<TYPE> x, dy, gain;
    __device__ __forceinline__ void load(int i) {
        mti_row_fetch(op.x, row, i, cols, x);
        mti_row_fetch(op.dy, row, i, cols, dy);
        mti_row_fetch(op.gain, 0, i, cols, gain);
    }
    __device__ __forceinline__ int first() const { return (int)(threadIdx.x + KEPT * blockDim.x); }
    __device__ __forceinline__ void means(const mti_norm_means &m, float *sum_g, float *sum_gx) {
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            load(i);
            mti_norm_mean(m, x, dy, gain, sum_g, sum_gx);
        }
    }
    __device__ __forceinline__ void write(const mti_norm_means &m, const mti_norm_sums &sums) {
        mti_fetched<TYPE> residual = {};
        float v[MTI_VECTOR], dg[MTI_VECTOR], d[MTI_VECTOR];
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            load(i);
            if (op.dresidual.data) mti_row_fetch(op.dresidual, row, i, cols, residual);
            sums.load(i, dg, d);
            mti_norm_gradient(m, x, dy, gain, v, dg, d);
            if (op.dresidual.data) mti_add_values(residual, v);
            mti_row_store<TYPE>(op.dx, row, i, cols, v);
            sums.store(i, dg, d);
        }
    }
};

/* One row of mti_norm_backward_kernel with ROOM. `in` has this row when the function is called, and the next row
   afterwards, unless this is the last row of the strip. m has the statistics of this row. The thread reads a vector
   of dy and dresidual before it writes the same vector of dx. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_backward_wide_row(const mti_norm_backward_op &op, int64_t row,
                                                                  int64_t end, int64_t cols,
                                                                  mti_norm_input<TYPE, KEPT> &in,
                                                                  const mti_norm_sums &sums, mti_norm_means m,
                                                                  float share, float *shared) {
    mti_norm_backward_rest<TYPE, KEPT> rest = {op, row, cols, sums.vectors, {}, {}, {}};
    mti_fetched<TYPE> gain[KEPT] = {};
    float v[MTI_VECTOR], dg[MTI_VECTOR] = {}, d[MTI_VECTOR] = {}, sum_g = 0.0f, sum_gx = 0.0f;

    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i < sums.vectors) mti_row_fetch(op.gain, 0, i, cols, gain[q]);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) mti_norm_mean(m, in.x[q], in.dy[q], gain[q], &sum_g, &sum_gx);
    rest.means(m, &sum_g, &sum_gx);
    mti_norm_total(op, sum_g, sum_gx, share, shared, m);
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i < sums.vectors) mti_row_fetch(op.gain, 0, i, cols, gain[q]); /* again: registers are scarce */
        if (i < sums.vectors) sums.load(i, dg, d);
        mti_norm_gradient(m, in.x[q], in.dy[q], gain[q], v, dg, d);
        if (op.dresidual.data) mti_add_values(in.residual[q], v);
        if (i < sums.vectors) mti_row_store<TYPE>(op.dx, row, i, cols, v);
        if (row + 1 < end) in.load(op, row + 1, cols, q);
        if (i < sums.vectors) sums.store(i, dg, d);
    }
    rest.write(m, sums);
}

/* Moves the beginning of a view down by some rows. */
template <int TYPE> static __device__ __forceinline__ void mti_norm_move(mti_view &v, int64_t rows = 1) {
    v.data += rows * v.ld * mti_fetched<TYPE>::size;
}

/* The vectors of rows that a thread copies ahead into shared memory, and reads itself: x, dy and dresidual, KEPT
   vectors of each. A vector behind the end of the row is 0. `own` [rows, views, KEPT, words, blockDim.x] begins at
   this thread. So the 16-bit vectors of a warp are contiguous in shared memory. This makes the kernel 1.4 times as
   fast on an H200: when they were not, L2 was 87 % busy, as it probably delivered each sector of 32 bytes once for
   each half. In f32 it still does. */
template <int TYPE, int KEPT> struct mti_norm_ahead {
    static const int words = mti_fetched<TYPE>::size / 2; /* of a vector, as mti_words */
    mti_norm_backward_op next;                            /* its views begin at the row that is copied next */
    mti_words *own;
    int rows;          /* rows copied ahead: 1 or 2 */
    int size, at;      /* of this thread: mti_words of a row, and the place of the row that is read next */
    int left, vectors; /* rows that are not copied yet; vectors of a row */
    __device__ __forceinline__ mti_words *place(int view, int q, int w) const {
        return own + (uint32_t)(at + (view * KEPT + q) * words + w) * blockDim.x;
    }
    __device__ __forceinline__ void copy_view(const mti_view &v, int view, int q, int i, int bytes) const {
        MT_DEVICE_UNROLL
        for (int w = 0; w < words; w++)
            mti_cp_async16(place(view, q, w), v.data + (uint32_t)(i * words + w) * sizeof(mti_words), bytes);
    }
    /* Starts copying vector q of the next row to the place of the row that is read next. */
    __device__ __forceinline__ void copy(int q) const {
        int i = (int)(threadIdx.x + q * blockDim.x), bytes = i < vectors && left > 0 ? 16 : 0;
        copy_view(next.x, 0, q, i, bytes);
        copy_view(next.dy, 1, q, i, bytes);
        if (next.dresidual.data) copy_view(next.dresidual, 2, q, i, bytes);
    }
    /* Ends the copies of a row. Another row is read next. The views stay at the last row: copies of 0 bytes need
       addresses that are multiples of 16, too, and the `ld` of a matrix of one row may be any number. */
    __device__ __forceinline__ void advance() {
        mti_cp_async_commit();
        if (left > 1) {
            mti_norm_move<TYPE>(next.x);
            mti_norm_move<TYPE>(next.dy);
            if (next.dresidual.data) mti_norm_move<TYPE>(next.dresidual);
        }
        left--;
        at = (rows - 1) * size - at;
    }
    __device__ __forceinline__ void wait() const {
        if (rows == 2) mti_cp_async_wait<1>();
        else mti_cp_async_wait<0>();
    }
    __device__ __forceinline__ void fetch(int view, int q, mti_fetched<TYPE> &out) const {
        MT_DEVICE_UNROLL
        for (int w = 0; w < words; w++) out.words[w] = mti_load_words(place(view, q, w));
    }
};

/* One row of mti_norm_backward_kernel without ROOM. m has its statistics. `dx` begins at this row. The thread adds its
   gradients of gain and bias to `own`. The copies of vector q of a later row begin after the thread has read vector q
   of this row, whose place they take. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_backward_row(const mti_norm_backward_op &op, const mti_view &dx,
                                                             int64_t cols, mti_norm_ahead<TYPE, KEPT> &ahead,
                                                             float (&own)[KEPT][2][MTI_VECTOR], mti_norm_means m,
                                                             float share, float *shared) {
    mti_fetched<TYPE> x, dy, residual, gain[KEPT] = {};
    float v[MTI_VECTOR], sum_g = 0.0f, sum_gx = 0.0f;
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i < ahead.vectors) mti_row_fetch(op.gain, 0, i, cols, gain[q]);
    }
    ahead.wait();
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        ahead.fetch(0, q, x);
        ahead.fetch(1, q, dy);
        mti_norm_mean(m, x, dy, gain[q], &sum_g, &sum_gx);
    }
    mti_norm_total(op, sum_g, sum_gx, share, shared, m);
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i < ahead.vectors) mti_row_fetch(op.gain, 0, i, cols, gain[q]); /* again: registers are scarce */
        ahead.fetch(0, q, x);
        ahead.fetch(1, q, dy);
        mti_norm_gradient(m, x, dy, gain[q], v, own[q][0], own[q][1]);
        if (op.dresidual.data) {
            ahead.fetch(2, q, residual);
            mti_add_values(residual, v);
        }
        if (i < ahead.vectors) mti_row_store<TYPE>(dx, 0, i, cols, v);
        ahead.copy(q);
    }
    ahead.advance();
}

/* Computes the rows of a strip whose sums do not fit into registers, and writes the sums to `to` [2, cols]. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_backward_wide_strip(const mti_norm_backward_op &op, int64_t row,
                                                                    int64_t end, int64_t cols,
                                                                    const mti_norm_sums &sums, float *shared,
                                                                    float *to) {
    mti_norm_input<TYPE, KEPT> in = {};
    int count = (int)(end - row);
    for (int i = (int)threadIdx.x; i < sums.vectors; i += (int)blockDim.x)
        for (int part = 0; part < 4; part++) sums.data[part * sums.vectors + i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) in.load(op, row, cols, q);
    mti_norm_stats(op, row, count, shared + 128);
    for (int r = 0; r < count; r++) {
        mti_norm_means m = {shared[128 + 2 * r], shared[129 + 2 * r], 0.0f, 0.0f};
        mti_norm_backward_wide_row<TYPE, KEPT>(op, row + r, end, cols, in, sums, m, 1.0f / (float)cols,
                                               shared + r % 2 * 64);
    }
    for (int i = (int)threadIdx.x; i < sums.vectors; i += (int)blockDim.x)
        for (int part = 0; part < 4; part++) {
            float4 v = sums.data[part * sums.vectors + i];
            float x[4] = {v.x, v.y, v.z, v.w};
            int64_t col = (int64_t)i * MTI_VECTOR + part % 2 * 4;
            MT_DEVICE_UNROLL
            for (int j = 0; j < 4; j++)
                if (col + j < cols) to[part / 2 * cols + col + j] = x[j];
        }
}

/* As mti_norm_backward_wide_strip, with the sums in registers. `rows`, 1 or 2, is the number of rows that are copied
   ahead to `room`. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_backward_narrow_strip(const mti_norm_backward_op &op, int64_t row,
                                                                      int64_t end, int64_t cols, int rows, float4 *room,
                                                                      float *shared, float *to) {
    int vectors = (int)(cols / MTI_VECTOR), count = (int)(end - row), size = mti_norm_ahead<TYPE, KEPT>::words * KEPT;
    float own[KEPT][2][MTI_VECTOR] = {}, share = 1.0f / (float)cols;
    mti_norm_backward_op at = op;
    mti_norm_move<TYPE>(at.x, row);
    mti_norm_move<TYPE>(at.dy, row);
    if (op.dresidual.data) mti_norm_move<TYPE>(at.dresidual, row);
    mti_norm_move<TYPE>(at.dx, row);
    size *= op.dresidual.data ? 3 : 2;
    mti_norm_ahead<TYPE, KEPT> ahead = {at, (mti_words *)room + threadIdx.x, rows, size, 0, count, vectors};
    for (int r = 0; r < rows; r++) {
        MT_DEVICE_UNROLL
        for (int q = 0; q < KEPT; q++) ahead.copy(q);
        ahead.advance();
    }
    mti_norm_stats(op, row, count, shared + 128);
    for (int r = 0; r < count; r++) {
        mti_norm_means m = {shared[128 + 2 * r], shared[129 + 2 * r], 0.0f, 0.0f};
        mti_norm_backward_row(op, at.dx, cols, ahead, own, m, share, shared + r % 2 * 64);
        mti_norm_move<TYPE>(at.dx);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        MT_DEVICE_UNROLL
        for (int part = 0; part < 4 && i < vectors; part++) {
            const float *x = own[q][part / 2] + part % 2 * 4;
            *(float4 *)(to + part / 2 * cols + i * MTI_VECTOR + part % 2 * 4) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

/* The least number of blocks per multiprocessor, for __launch_bounds__. In f16, 3 blocks would spill registers on
   sm_75. */
template <int TYPE, int KEPT, bool ROOM> constexpr int mti_norm_backward_blocks() {
    return ROOM ? 1 : KEPT == mti_ahead<TYPE>::value && TYPE != MT_F16 ? 3 : 2;
}

/* A block owns strip first_strip + blockIdx.x. Each thread owns every blockDim-th vector of its rows. The block sums
   dgain and dbias over the rows. Without ROOM, the sums are in registers, and `ahead` rows are copied into shared
   memory before they are needed. With ROOM, the sums are in shared memory, or in `spare`, in global memory, if the rows
   are too wide for that, and registers hold the next row. The result is partial [strips, 2, cols].

   1. Each thread clears the sums of its vectors, and begins to load its vectors of the first row, or of the first two.
      All threads copy the statistics of the strip to `shared`. The barrier in mti_norm_stats separates these writes
      from the reads.
   2. For each row: the sums over the block, through one half of the first 128 floats of `shared`; then dx, dgain and
      dbias of each vector, after which the loads of the same vector of a later row begin.
   3. Each thread writes the sums of its vectors to partial. mti_strips adds the strips.

   Without ROOM on sm_90: an element takes 29 instructions in bf16, where it moves 6 bytes (budget: 41), and 29 in f32,
   where it moves 12 (budget: 82). Up to 4096 columns in bf16, 80 registers: a multiprocessor has 3 blocks of 256
   threads, and with 4096 columns 48 to 96 KiB of loads under way. Up to 8192 columns, 26 instructions and 128
   registers: 2 blocks, and with 8192 columns 64 to 128 KiB. With ROOM: one block of 384 threads.

   The barriers for the sums are in mti_block_sums_once. Two successive rows use different halves: when a thread writes
   to a half again, all threads have passed the barrier of the row between, and so have read what was there. The sums of
   gradients and the rows copied ahead need no barrier, because a vector belongs to one thread. */
template <int TYPE, int KEPT, bool ROOM>
static __global__ void __launch_bounds__(ROOM ? MTI_NORM_ROOM_THREADS : MTI_NORM_SUM_THREADS,
                                         mti_norm_backward_blocks<TYPE, KEPT, ROOM>())
    mti_norm_backward_kernel(int64_t first_strip, mti_norm_backward_op op, int64_t rows, int64_t cols,
                             mti_norm_strips strips, int ahead, float *partial, float4 *spare) {
    MT_SHARED(float, shared, 128 + 2 * MTI_NORM_STRIP * MTI_NORM_TALLEST);
    MT_DYN_SHARED(float4, room);
    int vectors = (int)((cols + MTI_VECTOR - 1) / MTI_VECTOR);
    int64_t strip = first_strip + blockIdx.x, row = strips.row(strip), end = strips.row(strip + 1);
    float *to = partial + strip * 2 * cols;
    if (end > rows) end = rows;
    if (ROOM) {
        mti_norm_sums sums = {spare ? spare + (int64_t)blockIdx.x * 4 * vectors : room, vectors};
        mti_norm_backward_wide_strip<TYPE, KEPT>(op, row, end, cols, sums, shared, to);
    } else {
        mti_norm_backward_narrow_strip<TYPE, KEPT>(op, row, end, cols, ahead, room, shared, to);
    }
}

/* Launches mti_norm_backward_kernel for rows of at most KEPT * MTI_NORM_SUM_THREADS vectors. A GPU with little shared
   memory copies one row ahead instead of two, which computes the same bits. */
template <int TYPE, int KEPT>
static mt_status mti_norm_backward_narrow(mt_context *ctx, const mti_norm_backward_op &op, int64_t rows, int64_t cols,
                                          const mti_norm_strips &strips, void *partial) {
    unsigned threads = (unsigned)mt_round_up((cols / MTI_VECTOR + KEPT - 1) / KEPT, 32);
    size_t most = 0, row = (op.dresidual.data ? 3 : 2) * KEPT * (mti_fetched<TYPE>::size / 2), bytes;
    int ahead = 2;
    MT_TRY(mti_shared_most(ctx, &most));
    if (threads * ahead * row * sizeof(mti_words) > most) ahead = 1;
    bytes = threads * ahead * row * sizeof(mti_words);
    MT_TRY(mti_shared_allow(ctx, mti_norm_backward_kernel<TYPE, KEPT, false>, bytes));
    MTI_LAUNCH_BLOCKS((mti_norm_backward_kernel<TYPE, KEPT, false>), strips.count, threads, bytes,
                      mt_context_stream(ctx), op, rows, cols, strips, ahead, (float *)partial, (float4 *)NULL);
    return mt_cuda_launched(ctx, "mt_norm_backward");
}

/* The same for wider rows, and for rows of any type. `bytes` is the size of a block's sums. */
template <int TYPE, int KEPT>
static mt_status mti_norm_backward_wide(mt_context *ctx, const mti_norm_backward_op &op, int64_t rows, int64_t cols,
                                        const mti_norm_strips &strips, size_t bytes, void *partial, void *spare) {
    int64_t vectors = (cols + MTI_VECTOR - 1) / MTI_VECTOR;
    unsigned threads = (unsigned)mt_min(MTI_NORM_ROOM_THREADS, mt_round_up((vectors + KEPT - 1) / KEPT, 32));
    size_t most = 0;
    MT_TRY(mti_shared_most(ctx, &most));
    if (bytes <= most) spare = NULL;
    if (spare) bytes = 0;
    MT_TRY(mti_shared_allow(ctx, mti_norm_backward_kernel<TYPE, KEPT, true>, bytes));
    MTI_LAUNCH_BLOCKS((mti_norm_backward_kernel<TYPE, KEPT, true>), strips.count, threads, bytes,
                      mt_context_stream(ctx), op, rows, cols, strips, 0, (float *)partial, (float4 *)spare);
    return mt_cuda_launched(ctx, "mt_norm_backward");
}

template <int TYPE>
static mt_status mti_norm_backward_launch(mt_context *ctx, const mti_norm_backward_op &op, int64_t rows, int64_t cols,
                                          const mti_norm_strips &strips, size_t bytes, void *partial, void *spare) {
    static const bool any = TYPE == MTI_ANY_TYPE; /* these keep their sums in shared memory */
    static const int few = mti_ahead<TYPE>::value, type = any ? MT_F32 : TYPE;
    if (!any && cols <= few * MTI_NORM_SUM_THREADS * MTI_VECTOR)
        return mti_norm_backward_narrow<type, few>(ctx, op, rows, cols, strips, partial);
    if (!any && cols <= 2 * few * MTI_NORM_SUM_THREADS * MTI_VECTOR)
        return mti_norm_backward_narrow<type, 2 * few>(ctx, op, rows, cols, strips, partial);
    return mti_norm_backward_wide < TYPE, any ? 1 : 2 * few > (ctx, op, rows, cols, strips, bytes, partial, spare);
}

static mt_status mti_cuda_norm_backward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain,
                                        mt_tensor stats, mt_tensor dy, mt_tensor dresidual, mt_tensor dx,
                                        mt_tensor dgain, mt_tensor dbias) {
    size_t mark = mt_arena_mark(ctx), bytes = (size_t)mt_round_up(x.cols, MTI_VECTOR) * 2 * sizeof(float);
    mti_norm_strips strips = mti_norm_strips_of(x.rows, x.cols);
    mti_norm_backward_op op = {mti_view_of(x),         mti_view_of(gain), mti_view_of(stats),   mti_view_of(dy),
                               mti_view_of(dresidual), mti_view_of(dx),   kind == MT_LAYER_NORM};
    mt_tensor outs[2];
    void *partial = NULL, *spare = NULL;
    outs[0] = dgain, outs[1] = dbias;
    if (x.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_arena_alloc(ctx, (size_t)(strips.count * 2 * x.cols) * sizeof(float), &partial));
    if (bytes > MTI_SHARED_LEAST)
        MT_TRY(mt_arena_alloc(ctx, mti_grid(strips.count, 1) * bytes, &spare)); /* for a launch */
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mti_by_type(mti_row_type(x.cols, x, gain, dy, dresidual, dx), [&](auto type) {
        return mti_norm_backward_launch<decltype(type)::value>(ctx, op, x.rows, x.cols, strips, bytes, partial, spare);
    }));
    MT_TRY(mti_strips(ctx, "mt_norm_backward", partial, strips.count, 2, x.cols, outs));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif
