/* The tile instructions of AMX in C, for processors that lack them, and for sanitizers, which do not see what the
   instructions read and write:

       cc -march=native -include tests/amx_emulated.h ...

   The processor and the compiler need AVX512-BF16. A tile that is used before its configuration, or another
   configuration than that of mti_tiles_begin, ends the program. */
#ifndef MT_AMX_EMULATED_H
#define MT_AMX_EMULATED_H

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#ifndef __AMX_TILE__
#define __AMX_TILE__ 1
#endif
#ifndef __AMX_BF16__
#define __AMX_BF16__ 1
#endif

/* The question whether tiles may be used becomes a system call that ignores its arguments and succeeds. */
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield

static __thread struct {
    int configured;
    uint32_t words[8][16][16]; /* floats, or pairs of bf16 numbers with the first one in the low half */
} mt_tiles;

static void mt_tile_demand(int right, const char *what) {
    if (right) return;
    fprintf(stderr, "amx_emulated.h: %s\n", what);
    abort();
}

static void mt_tile_config(const unsigned char *config) {
    int t;
    mt_tile_demand(config[0] == 1 && !mt_tiles.configured, "another palette, or a second configuration");
    for (t = 0; t < 8; t++)
        mt_tile_demand(config[16 + 2 * t] == 64 && config[17 + 2 * t] == 0 && config[48 + t] == 16, "a smaller tile");
    memset(&mt_tiles, 0, sizeof mt_tiles);
    mt_tiles.configured = 1;
}

static void mt_tile_clear(void) {
    mt_tile_demand(mt_tiles.configured, "a release without a configuration");
    mt_tiles.configured = 0;
}

static void mt_tile_move(int t, const void *memory, size_t stride, int store) {
    unsigned char *at = (unsigned char *)(uintptr_t)memory;
    int row;
    mt_tile_demand(mt_tiles.configured, "a tile without a configuration");
    for (row = 0; row < 16; row++, at += stride) {
        if (store) memcpy(at, mt_tiles.words[t][row], 64);
        else memcpy(mt_tiles.words[t][row], at, 64);
    }
}

/* Half of a pair as a float, where a denormal number counts as 0. */
static float mt_tile_half(uint32_t pair, int high) {
    uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
    float x;
    if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Tile c += tile a times tile b. The products of low and of high halves are summed apart. */
static void mt_tile_product(int c, int a, int b) {
    int i, j, k;
    mt_tile_demand(mt_tiles.configured, "a product without a configuration");
    for (i = 0; i < 16; i++)
        for (j = 0; j < 16; j++) {
            float low = 0.0f, high = 0.0f, sum;
            for (k = 0; k < 16; k++) {
                uint32_t x = mt_tiles.words[a][i][k], y = mt_tiles.words[b][k][j];
                low += mt_tile_half(x, 0) * mt_tile_half(y, 0);
                high += mt_tile_half(x, 1) * mt_tile_half(y, 1);
            }
            memcpy(&sum, &mt_tiles.words[c][i][j], sizeof sum);
            sum += low + high;
            memcpy(&mt_tiles.words[c][i][j], &sum, sizeof sum);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) mt_tile_config(config)
#define _tile_release() mt_tile_clear()
#define _tile_zero(t) memset(mt_tiles.words[t], 0, sizeof mt_tiles.words[t])
#define _tile_loadd(t, from, stride) mt_tile_move(t, from, stride, 0)
#define _tile_stored(t, to, stride) mt_tile_move(t, to, stride, 1)
#define _tile_dpbf16ps(c, a, b) mt_tile_product(c, a, b)

#endif
