/* ---- Philox, on a GPU -------------------------------------------------------------------------------------------- */

#pragma once
#include "views.cuh"
#include "random_words.c"

#if MT_HAS_CUDA
extern "C++" {

/* out = the four random words of one Philox block. */
static __device__ __forceinline__ void mti_philox(uint64_t block, uint64_t stream, uint64_t seed, uint32_t *out) {
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    MT_DEVICE_UNROLL
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* out = the random words of the global elements [e, e + MTI_VECTOR). They lie in two Philox blocks, or in three if e is
   not the first element of a block. Comparisons shift the words by e % 4 instead of a variable index, so that the words
   stay in registers. The third block is computed last, to need fewer of them. */
static __device__ __forceinline__ void mti_words_of(mt_random at, uint64_t e, uint32_t *out) {
    uint64_t subsequence = mti_subsequence(&at);
    uint32_t last[4], skip = (uint32_t)e & 3;
    mti_philox(e >> 2, subsequence, at.seed, out);
    mti_philox((e >> 2) + 1, subsequence, at.seed, out + 4);
    if (!skip) return;
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR - 1; j++) out[j] = skip & 1 ? out[j + 1] : out[j];
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR - 2; j++) out[j] = skip & 2 ? out[j + 2] : out[j];
    mti_philox((e >> 2) + 2, subsequence, at.seed, last);
    out[5] = skip == 3 ? last[0] : out[5];
    out[6] = skip == 3 ? last[1] : skip == 2 ? last[0] : out[6];
    out[7] = skip == 3 ? last[2] : skip == 2 ? last[1] : last[0];
}

static __device__ __forceinline__ uint64_t mti_element_of(mt_random at, int64_t row, int64_t col) {
    return (uint64_t)((at.first_row + row) * at.global_cols + at.first_col + col);
}

} /* extern "C++" */
#endif
