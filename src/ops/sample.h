/* ---- sampling of the next token from a vocabulary shard ---------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

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

/* Returns the number of candidates of a shard with `cols` columns: 1 at temperature 0, with a top_p of MT_ZERO or
   without top_k and top_p; the smaller of top_k and cols with top_k; cols with top_p alone. */
MT_API int64_t mt_sample_count(const mt_sample_desc *desc, int64_t cols);

/* Call mt_sample_candidates on each shard, gather all candidates with mt_all_gather, then call mt_sample_ids. logits
   [rows, cols] has the columns of the vocabulary from first_col on. Columns whose index in the vocabulary is `vocab`
   or more are padding, and are never drawn.
   candidates: candidates [rows, 2 k] is MT_F32, with k = mt_sample_count(desc, cols). The first k columns are logits,
               and the others have the bits of their ids, which are int32_t: gather them as MT_I32. With k = 1 the
               candidate is the token that is drawn from this shard alone. With k > 1 the candidates are the first k
               tokens in the order above, by increasing id. When the shard has fewer than k tokens, they are followed by
               logits of -infinity with the id -1.
   ids:        ids[i] = the token that is drawn for row i, from gathered [shards * rows, 2 k], the candidates of shard
               0, 1, ... in this order. All shards have the same number of columns. ids [rows] is in memory of the
               context's device.
   MT_ERR_DATA: a logit is NaN. mt_sample_ids returns it, so all ranks do, and ids[i] is -1. A GPU only writes the -1:
   call mt_ids_check. A logit may be infinite. A token with -infinity is drawn only if all tokens of the row have it.
   MT_ERR_ARGUMENT: a field of desc is out of range. */
MT_API mt_status mt_sample_candidates(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, int64_t first_col,
                                      mt_tensor logits, mt_tensor candidates);
MT_API mt_status mt_sample_ids(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, mt_tensor gathered,
                               int shards, int32_t *ids);
