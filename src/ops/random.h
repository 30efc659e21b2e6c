/* ---- random numbers by global element ---------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* Philox4x32-10 (Salmon et al., SC 2011), on the host: out = the four random 32-bit words of a counter and a key. */
MT_API void mt_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Says which random words a view uses. The view is a part of a global tensor that has global_cols columns, and begins
   at row first_row and column first_col of that tensor. Element (i, j) of the view is the global element
   e = (first_row + i) * global_cols + first_col + j. Its random word is out[e & 3] of mt_philox4x32 with the counter
   {e >> 2, subsequence} and the key {seed}, all 64-bit numbers with the low word first. So random numbers do not depend
   on how a tensor is split over ranks. */
typedef struct mt_random {
    uint64_t seed, subsequence; /* subsequence: any number; a different one for each parameter, dropout and step */
    int64_t first_row, first_col, global_cols;
    /* Optional: a number in memory of the context's device. An operator adds it to subsequence when it runs, so a
       recorded step (a CUDA graph) draws new random words in each launch. NULL counts as 0. */
    const uint64_t *offset;
} mt_random;

/* y = std * N(0, 1), with the random words of `at`. Box-Muller makes two values from the words of elements 2 k and
   2 k + 1: the cosine for the even element, the sine for the odd one. It computes in double and rounds once, so that
   the CPU and the GPU agree. */
MT_API mt_status mt_random_normal(mt_context *ctx, mt_tensor y, float std, mt_random at);

/* Dropout sets an element to 0 when its random word (see mt_random) is less than p * 2^32. It multiplies the other
   elements by 1 / (1 - p). The backward pass computes the same mask from the same mt_dropout. */
typedef struct mt_dropout {
    mt_random at;
    float p; /* 0 <= p < 1; 0: no dropout, and `at` is not read */
} mt_dropout;

/* All views are [tokens, n], except bias and dbias [1, n].
   forward:  y = residual + dropout(x + bias). bias and residual are optional. y may be x or residual.
   backward: dx = dropout(dy) with the mask of forward, dbias += column sums of dx (optional). dx may be dy. The
             gradient of residual is dy itself. */
MT_API mt_status mt_bias_dropout_add_forward(mt_context *ctx, mt_tensor x, mt_tensor bias, mt_tensor residual,
                                             mt_dropout dropout, mt_tensor y);
MT_API mt_status mt_bias_dropout_add_backward(mt_context *ctx, mt_tensor dy, mt_dropout dropout, mt_tensor dx,
                                              mt_tensor dbias);
