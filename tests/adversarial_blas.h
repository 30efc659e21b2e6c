/* adversarial_blas.h - a GEMM as unhelpful as a deterministic library may be: the same call gives the same bits, but
   the order in which it sums depends on every size, leading dimension, transposition, alignment and on beta. What is
   bit-identical with this one does not rely on what a particular library happens to do. See test_invariant_any_gemm.c.
 */

#ifndef ADVERSARIAL_BLAS_H
#define ADVERSARIAL_BLAS_H

#include <stdint.h>

enum { CblasRowMajor = 101, CblasNoTrans = 111, CblasTrans = 112 };

static inline uint64_t adversarial_mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
}

static inline uint64_t adversarial_alignment(const void *p) { return (uintptr_t)p % 64; }

/* The inner products start anywhere in [0, k), go round in strides, and begin or end with beta c. */
static inline void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a,
                               int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    const int facts[] = {trans_a, trans_b, m, n, k, lda, ldb, ldc, beta != 0.0f};
    uint64_t h = (uint64_t)order;
    for (unsigned f = 0; f < sizeof facts / sizeof *facts; f++) h = adversarial_mix(h, (uint64_t)facts[f]);
    h = adversarial_mix(h, adversarial_alignment(a) * 4096 + adversarial_alignment(b) * 64 + adversarial_alignment(c));
    int start = (int)(h % (uint64_t)k), backwards = (int)(h >> 40 & 1), c_first = (int)(h >> 41 & 1);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float old = beta == 0.0f ? 0.0f : beta * c[(int64_t)i * ldc + j], sum = c_first ? old : 0.0f;
            for (int l = 0, at = start; l < k; l++) {
                float x = trans_a == CblasTrans ? a[(int64_t)at * lda + i] : a[(int64_t)i * lda + at];
                float y = trans_b == CblasTrans ? b[(int64_t)j * ldb + at] : b[(int64_t)at * ldb + j];
                sum += alpha * x * y;
                at = backwards ? (at == 0 ? k - 1 : at - 1) : (at == k - 1 ? 0 : at + 1);
            }
            c[(int64_t)i * ldc + j] = c_first ? sum : sum + old;
        }
}

#endif /* ADVERSARIAL_BLAS_H */
