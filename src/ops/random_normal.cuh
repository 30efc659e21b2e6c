/* ---- normal random numbers, on a GPU ----------------------------------------------------------------------------- */

#pragma once
#include "map.cuh"
#include "random_words.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* The same as mti_normal_row, one element at a time. The formula is the same, in double, so that a CPU and a GPU
   agree. */
struct mti_normal_op {
    mti_view y;
    mt_random at;
    double std;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        uint64_t first = mti_element_of(at, row, col);
        float x[MTI_VECTOR];
        for (int j = 0; j < n; j++) {
            uint64_t e = first + (uint64_t)j;
            uint32_t words[4];
            mti_philox(e >> 2, mti_subsequence(&at), at.seed, words);
            uint32_t even = e & 2 ? words[2] : words[0], odd = e & 2 ? words[3] : words[1];
            const double unit = 2.3283064365386963e-10, two_pi = 6.283185307179586;
            double radius = std * sqrt(-2.0 * log(((double)even + 0.5) * unit)),
                   angle = two_pi * ((double)odd + 0.5) * unit;
            x[j] = (float)(radius * (e & 1 ? sin(angle) : cos(angle)));
        }
        mti_store<WIDE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_random_normal(mt_context *ctx, mt_tensor y, float std, mt_random at) {
    mti_normal_op op = {mti_view_of(y), at, (double)std};
    return mti_map(ctx, "mt_random_normal", op, mti_is_wide(y), y.rows, y.cols);
}

} /* extern "C++" */
#endif
