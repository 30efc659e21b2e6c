/* ---- sampling of the next token ---------------------------------------------------------------------------------- */

#pragma once
#include "../comm/api.h"

/* How the token of a row of logits x is drawn. As in Hugging Face's transformers, the logits are divided by the
   temperature, then top_k is applied, then top_p, with probabilities over the tokens that top_k has kept. Tokens are
   ordered by logit, the largest first. Among equal logits the lowest id is first.
     top_k  keeps the first top_k tokens
     top_p  keeps a token when the tokens before it together have less than the probability top_p. The first token is
            always kept. Probabilities are rounded down to multiples of 2^-32 of the largest one
   The token is drawn by the Gumbel-max trick (arXiv 1611.00712, section 2): it is the kept token with the largest
   x / temperature - log(-log(1 - v)), computed in double, which has the probability softmax(x / temperature). Here
   v = (word + 1/2) / 2^32, and `word` is the random word (see mt_random) of the element at row `position` and column
   `id` of a tensor with vocab columns, with the subsequence `sequence`. So a token depends on its own logits, the seed,
   the sequence and the position. It does not depend on the split, or on the other sequences of a batch. */
typedef struct mt_sample_desc {
    float temperature; /* at least 0. 0: the first token in the order above, without random numbers */
    int64_t top_k;     /* 0: all tokens */
    float top_p;       /* 0 to 1. MT_ZERO: 0, only the first token; 0 or 1: all tokens */
    uint64_t seed;
    uint64_t first_sequence;   /* with sequences == NULL, row i has the sequence first_sequence + i */
    const uint64_t *sequences; /* [rows], in memory of the context's device: row i has the sequence sequences[i] */
    int64_t position;          /* row i has the position `position` + positions[i]. 0 to 2^31 - 1 */
    const int32_t *positions;  /* [rows], in memory of the context's device; NULL: all 0 */
} mt_sample_desc;
