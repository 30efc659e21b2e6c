/* ---- 16-bit types on a CPU --------------------------------------------------------------------------------------- */

#pragma once
#include "math.c"
#include "views.c"

/* One of the two neighbours of x in a 16-bit type, as a float. `word` chooses which one: see stochastic rounding in
   docs/gpus.md. Infinity and NaN do not change. For a number that is denormal in f16, 2^-14 is added before rounding
   and subtracted afterwards, so that the bits to drop are at the same place as in a normal number. A caller passes 1
   for is_finite when it does not need the result for infinity and NaN. */
MT_INLINE MT_HOST_DEVICE float mti_round_by(int dtype, float x, uint32_t word, int is_finite) {
    int drop = dtype == MT_BF16 ? 16 : 13;
    uint32_t u = mt_f32_bits(x), size = u & 0x7fffffffu;
    float shift = dtype == MT_F16 && size < 0x38800000u ? 6.103515625e-5f : 0.0f;
    if (!is_finite && size >= 0x7f800000u) return x;
    size = mt_f32_bits(mt_f32_from_bits(size) + shift) + (word >> (32 - drop));
    return mt_f32_from_bits(mt_f32_bits(mt_f32_from_bits(size >> drop << drop) - shift) | (u & 0x80000000u));
}

MT_INLINE MT_HOST_DEVICE float mti_round_stochastic(int dtype, float x, uint32_t word) {
    return mti_round_by(dtype, x, word, 0);
}

/* mti_round_stochastic of n elements. A mask selects what is not finite, because a branch would not vectorise. */
static void mti_round_row(int dtype, float *x, const uint32_t *words, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        int finite = (mt_f32_bits(x[j]) & 0x7fffffffu) < 0x7f800000u;
        x[j] = mti_select(finite, mti_round_by(dtype, x[j], words[j], 1), x[j]);
    }
}

/* y = x: the arguments of the loops that convert and copy. */
typedef struct mti_conversion {
    mt_tensor x, y;
} mti_conversion;

/* y = x for n numbers of two different float types. A conversion between bf16 and f16 goes through f32, which is
   exact. */
static void mti_convert_row(mt_dtype from, const void *x, mt_dtype to, void *y, int64_t n) {
    float room[MTI_BLOCK];
    int64_t j, count;
    if (from == MT_F32) mt_f32_to_16bit(to, (const float *)x, (uint16_t *)y, n);
    else if (to == MT_F32) mt_f32_from_16bit(from, (const uint16_t *)x, (float *)y, n);
    else
        for (j = 0; j < n; j += count) {
            count = mt_min(MTI_BLOCK, n - j);
            mt_f32_from_16bit(from, (const uint16_t *)x + j, room, count);
            mt_f32_to_16bit(to, room, (uint16_t *)y + j, count);
        }
}

/* The address of an element of any type. */
static void *mti_bytes_at(mt_tensor t, int64_t row, int64_t col) {
    return (char *)t.data + (size_t)(row * mt_tensor_ld(t) + col) * mt_dtype_size(t.dtype);
}

static void mti_convert_stripes(void *data, int thread, int64_t first, int64_t last) {
    const mti_conversion *c = (const mti_conversion *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_stripe p = mti_stripe_of(c->x.cols, i);
        mti_convert_row(c->x.dtype, mti_bytes_at(c->x, p.row, p.col), c->y.dtype, mti_bytes_at(c->y, p.row, p.col),
                        p.cols);
    }
}

static void mti_cpu_convert(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mti_conversion c = {x, y};
    mti_cpu_stripes(ctx, x.rows, x.cols, mti_convert_stripes, &c);
}

/* Loops compute in f32. They read and write a view block by block: `rows` rows from `row` on, `cols` columns from `col`
   on. A block of an f32 view is a part of the view. A block of a 16-bit view is a copy in `room`, which has place for
   rows * cols floats. mti_f32_place returns a block without reading it, and an empty view for an empty view. */
MT_INLINE mt_tensor mti_f32_place(mt_tensor t, int64_t row, int64_t rows, int64_t col, int64_t cols, float *room) {
    if (!t.data) return t;
    t.ld = t.dtype == MT_F32 ? mt_tensor_ld(t) : cols;
    t.data = t.dtype == MT_F32 ? mti_row(t, row) + col : room;
    t.dtype = MT_F32;
    t.rows = rows;
    t.cols = cols;
    return t;
}

MT_INLINE mt_tensor mti_f32_read(mt_tensor t, int64_t row, int64_t rows, int64_t col, int64_t cols, float *room) {
    mt_tensor block = mti_f32_place(t, row, rows, col, cols, room);
    int64_t i;
    if (t.data && t.dtype != MT_F32)
        for (i = 0; i < rows; i++) mt_f32_from_16bit(t.dtype, mti_row16(t, row + i) + col, mti_row(block, i), cols);
    return block;
}

/* Rounds a block to the 16-bit view that it was placed for. Blocks of f32 views are already written. */
MT_INLINE void mti_f32_write(mt_tensor block, mt_tensor t, int64_t row, int64_t col) {
    int64_t i;
    if (!t.data || t.dtype == MT_F32) return;
    for (i = 0; i < block.rows; i++)
        mt_f32_to_16bit(t.dtype, mti_row(block, i), mti_row16(t, row + i) + col, block.cols);
}

/* out = n numbers of t in f32, from `col` of `row` on. */
static void mti_cpu_load(mt_tensor t, int64_t row, int64_t col, int64_t n, float *out) {
    if (t.dtype == MT_F32) memcpy(out, mti_row(t, row) + col, (size_t)n * sizeof *out);
    else mt_f32_from_16bit(t.dtype, mti_row16(t, row) + col, out, n);
}
