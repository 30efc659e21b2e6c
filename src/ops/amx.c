/* ---- products of pairs in the tiles of AMX ----------------------------------------------------------------------- */

#pragma once
#include "options.c"
#include "panels.c"

/* A tile is a register of 16 rows of 64 bytes: 16 x 16 floats or pairs of bf16 numbers. An instruction adds the product
   of two tiles of pairs, a and b, to a tile of floats. A packed panel of pairs has the layout of b. Sums over k go in
   steps of MTI_TILE_SIDE pairs, which begin at multiples of it. So an element of c has the same bits in any place, and
   also if a step is left out whose products are all 0. */
#define MTI_TILE_SIDE 16
#define MTI_TILES (2 * MTI_TILE_SIDE) /* rows and columns of c that are computed at once, in four tiles */

#if MT_HAS_AMX_BF16
/* Asks Linux to let this process use tiles. Returns 0 if it does not, or if the processor has none. */
static int mti_tiles_permitted(void) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* A thread calls mti_tiles_begin before its products, and mti_tiles_end after them. */
static void mti_tiles_begin(void) {
    /* The palette, and for each tile the bytes of a row (16 bits, from byte 16 on) and the rows (from byte 48 on). The
       memory is constant, because gcc 12 does not know that the instruction reads all of it. */
    static const unsigned char config[64] = {1, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  0,  0,  0,  0,  0,  64, 0, 64,
                                             0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  64, 0,  0,  0,  0,  0,  0, 0,
                                             0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  16, 16, 16, 16, 16, 16, 16, 16};
    _tile_loadconfig(config);
}

static void mti_tiles_end(void) { _tile_release(); }

/* c [MTI_TILES, MTI_TILES] = a b, a sum over k pairs. k is a multiple of MTI_TILE_SIDE. b is a packed panel. */
static void mti_tiles_sums(int64_t k, const float *a, int64_t lda, const float *b, float *c, int64_t ldc) {
    size_t a_bytes = (size_t)lda * sizeof *a, b_bytes = MTI_NR * sizeof *b, c_bytes = (size_t)ldc * sizeof *c;
    float *c1 = c + MTI_TILE_SIDE * ldc;
    int64_t p;
    __asm__ volatile("" ::: "memory"); /* gcc does not know that a load reads memory */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (p = 0; p < k; p += MTI_TILE_SIDE, a += MTI_TILE_SIDE, b += MTI_TILE_SIDE * MTI_NR) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(5, a + MTI_TILE_SIDE * lda, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(7, b + MTI_TILE_SIDE, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + MTI_TILE_SIDE, c_bytes);
    _tile_stored(2, c1, c_bytes);
    _tile_stored(3, c1 + MTI_TILE_SIDE, c_bytes);
}

/* Writes the transpose of x [k, MTI_TILES], whose rows are ldx apart, to out, whose rows are k apart. k is a multiple
   of MTI_TILE_SIDE. */
static void mti_tiles_transpose(const float *x, int64_t ldx, int64_t k, float *out) {
    mti_simd t[MTI_TILE_SIDE];
    int64_t i, p;
    int r;
    for (i = 0; i < MTI_TILES; i += MTI_TILE_SIDE)
        for (p = 0; p < k; p += MTI_TILE_SIDE) {
            for (r = 0; r < MTI_TILE_SIDE; r++) memcpy(&t[r], x + (p + r) * ldx + i, sizeof t[r]);
            mti_transpose_simd(t);
            for (r = 0; r < MTI_TILE_SIDE; r++) memcpy(out + (i + r) * k + p, &t[r], sizeof t[r]);
        }
}

/* Writes alpha s [m, n] to c, or adds it. The rows of s are MTI_TILES apart. */
static void mti_tiles_write(const float *s, float alpha, int add, float *c, int64_t ldc, int64_t m, int64_t n) {
    int64_t i, j;
    for (i = 0; i < m; i++, s += MTI_TILES, c += ldc) {
        if (add)
            for (j = 0; j < n; j++) c[j] += alpha * s[j];
        else
            for (j = 0; j < n; j++) c[j] = alpha * s[j];
    }
}

/* Computes the part of a product in MTI_TILES rows from row i on and MTI_TILES columns from column j on, where beta is
   0 or 1. `a` has the pairs [first, end) of these rows, which are lda apart. All MTI_TILES rows of `a` are read, also
   those that x does not have. */
static void mti_tiles_product(const mti_gemm_piece *x, int64_t i, int64_t j, int64_t first, int64_t end, const float *a,
                              int64_t lda) {
    float room[MTI_TILES * MTI_TILES], *c = x->c + i * x->ldc + j;
    mti_tiles_sums(end - first, a, lda, x->packed_b + j * x->k + first * MTI_NR, room, MTI_TILES);
    mti_tiles_write(room, x->alpha, x->beta != 0.0f, c, x->ldc, mt_min(MTI_TILES, x->m - i),
                    mt_min(MTI_TILES, x->n - j));
}
#else
static int mti_tiles_permitted(void) { return 0; }
static void mti_tiles_begin(void) {}
static void mti_tiles_end(void) {}
static void mti_tiles_transpose(const float *x, int64_t ldx, int64_t k, float *out) {
    (void)x, (void)ldx, (void)k, (void)out;
}
static void mti_tiles_product(const mti_gemm_piece *x, int64_t i, int64_t j, int64_t first, int64_t end, const float *a,
                              int64_t lda) {
    (void)x, (void)i, (void)j, (void)first, (void)end, (void)a, (void)lda;
}
#endif

/* *tiles = 1 if products of pairs go to tiles, otherwise 0. A context asks once, so that its answer does not change. */
static mt_status mti_tiles_open(mt_context *ctx, int *tiles) {
    mti_kernels *k;
    MT_TRY(mti_kernels_open(ctx, &k));
    if (!k->tiles) k->tiles = mti_tiles_permitted() ? 1 : -1;
    *tiles = k->tiles > 0;
    return MT_SUCCESS;
}
