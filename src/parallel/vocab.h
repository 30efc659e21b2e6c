/* ---- vocabulary-parallel embedding and cross-entropy ------------------------------------------------------------- */

#pragma once
#include "params.h"
#include "../ops/sample.h"

typedef struct mt_embedding_desc {
    int64_t vocab, features;
    float init_std;        /* standard deviation of the initial table; MT_ZERO: 0; 0: 0.02 */
    int sequence_parallel; /* 1: y is [tokens / t, features] */
    /* 1: the output head uses the same weight. On one pipeline stage, set mt_linear_desc.weight of the head to it. With
       several stages, create the embedding with the same name and desc on the first and on the last stage: both copies
       get the same initial values, and mt_sync_gradients sums their gradients */
    int shared;
    /* advanced */
    /* rows of the table with padding of your own, such as 50304 for a vocab of 50257. Each of t tensor ranks has
       padded_vocab / t of them, rounded up. Set it also in the output head (mt_split_desc.padded_out_features) and
       in mt_cross_entropy_desc. Ids must still be below vocab. The rows from vocab on may hold any finite numbers: they
       do not enter the loss or a gradient, and their own gradient is 0. Checkpoints have the rows of vocab only; they
       load with any padding. 0: no padding of your own */
    int64_t padded_vocab;
} mt_embedding_desc;

typedef struct mt_vocab_parallel_embedding {
    mt_embedding_desc desc;
    mt_param *weight; /* NAME.weight [vocab, features], split over its rows */
    mt_comm *tp;
    int64_t first_row; /* token id of the first row of this rank's shard */
} mt_vocab_parallel_embedding;

/* forward: row i of y [tokens, features] is row ids[i] of the whole table. backward: adds row i of dy to row ids[i] of
   the gradient. ids [tokens] are in memory of the context's device, and must be the same in both calls.
   Communication: forward all-reduces y (g). With sequence_parallel y and dy are [tokens / t, features]: forward
   reduce-scatters y, and backward all-gathers dy.
   Errors: MT_ERR_ARGUMENT of create (a field of desc is out of range), MT_ERR_DATA (an id is not in [0, vocab); on a
   GPU a later call returns it, see mt_ids_check). */
MT_API mt_status mt_vocab_parallel_embedding_create(mt_context *ctx, mt_params *params, const char *name,
                                                    const mt_embedding_desc *desc, mt_vocab_parallel_embedding *out);
MT_API mt_status mt_vocab_parallel_embedding_forward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                     const int32_t *ids, int64_t tokens, mt_tensor y);
MT_API mt_status mt_vocab_parallel_embedding_backward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                      const int32_t *ids, int64_t tokens, mt_tensor dy);

typedef struct mt_cross_entropy_desc {
    int64_t vocab;         /* global, without padding */
    float label_smoothing; /* a in (1 - a) * nll + a * mean of -log p over vocab, as in PyTorch; 0 <= a < 1 */
    /* a target of this value has loss 0 and gradient 0; MT_ZERO: targets of 0; 0: -100, as in PyTorch */
    int32_t ignore_index;
    /* total columns of the logits over all ranks, with padding of your own: each rank has padded_vocab / t, rounded up
       (see mt_embedding_desc). Logits with another number of columns are MT_ERR_SHAPE. The columns from vocab on do not
       enter the loss, whatever they hold, and their gradient is 0; 0: none */
    int64_t padded_vocab;
} mt_cross_entropy_desc;

typedef struct mt_cross_entropy_saved {
    mt_tensor logits; /* the view that was passed; backward overwrites it with its gradient */
    /* [2, tokens], the same on every rank: for each token the maximum m of its logits over the whole vocabulary, and
       log(sum of exp(x - m)). The sum of the two is the token's log-sum-exp */
    mt_tensor lse;
    const int32_t *targets;
} mt_cross_entropy_saved;

/* Logits of your own: the vocabulary is split in order. Each of t ranks has n = vocab / t columns, rounded up, and rank
   r has the logits of the ids [r n, (r + 1) n). Those of ids from vocab on are padding. They are at the end of the last
   ranks, and a rank may have only padding: with vocab 5 and t = 4, n is 2, rank 2 has one column of padding, and rank 3
   has two. With padded_vocab, n is padded_vocab / t, rounded up. In invariant mode with V virtual shards, a rank has
   V / t shards of vocab / V columns each, rounded up. mt_shard_size returns this number in every mode, as the rows of a
   matrix [vocab, 1] with MT_SPLIT_ROWS. */

/* forward computes loss [1, tokens] from logits [tokens, local vocabulary] and targets [tokens]. The logits are the
   output of a column-parallel head without gather_output. targets are in memory of the context's device. saved keeps
   views of logits and targets, and the tensor lse, which lies in the arena. logits and targets must not change before
   backward. backward overwrites the saved logits with the gradient of the sum of scale * dloss[i] * loss[i] over the
   tokens. dloss is [1, tokens], or [1, 1] for all tokens alike; mt_none() means all ones. logits may be of any float
   type; loss, dloss and lse are MT_F32.
   Communication: forward all-gathers four floats for each token over tp, in invariant mode for each token and virtual
   shard.
   MT_ERR_DATA: a target is neither in [0, vocab) nor ignore_index; on a GPU a later call returns it, see mt_ids_check.
   MT_ERR_ARGUMENT: a field of desc is out of range. */
MT_API mt_status mt_vocab_parallel_cross_entropy_forward(mt_context *ctx, mt_comm *tp,
                                                         const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                         const int32_t *targets, mt_tensor loss,
                                                         mt_cross_entropy_saved *saved);
MT_API mt_status mt_vocab_parallel_cross_entropy_backward(mt_context *ctx, mt_comm *tp,
                                                          const mt_cross_entropy_desc *desc, mt_tensor dloss,
                                                          float scale, const mt_cross_entropy_saved *saved);

/* Runs forward and backward in one call, for a loop that knows dloss and scale before the forward. Writes loss and
   overwrites the logits with their gradient. With one tensor rank, outside invariant mode, it reads the logits only
   once. */
MT_API mt_status mt_vocab_parallel_cross_entropy_forward_backward(mt_context *ctx, mt_comm *tp,
                                                                  const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                                  const int32_t *targets, mt_tensor dloss, float scale,
                                                                  mt_tensor loss);

/* Draws a token for each row of logits [rows, local vocabulary], of any float type: the output of a column-parallel
   head without gather_output, split as described above. desc says how to draw: see mt_sample_desc in mt_kernels.cuh.
   vocab is the size of the whole vocabulary without padding, and padded_vocab is that of mt_cross_entropy_desc. Padding
   is never drawn. logits do not change. Every rank passes the same desc, and gets the same ids [rows], in memory of the
   context's device. When the logits have the same bits on every split, as in invariant mode, so do the ids. A CUDA
   graph can record the call: pass the positions in desc->positions, because desc->position is fixed in the graph.
   Communication: one all-gather over tp. Each rank sends 8 bytes, a logit and an id, for each row and candidate. A row
   has 1 candidate at temperature 0, with top_k 1, and without top_k and top_p. With top_k it has the smaller of top_k
   and the local vocabulary. With top_p alone all logits of the row are candidates. The arena holds the candidates of
   all ranks.
   Errors: MT_ERR_ARGUMENT (a field of desc, vocab or padded_vocab is out of range), MT_ERR_DATA on every rank (a logit
   is NaN; the id is then -1, and on a GPU a later call returns the error: see mt_ids_check). */
MT_API mt_status mt_vocab_parallel_sample(mt_context *ctx, mt_comm *tp, int64_t vocab, int64_t padded_vocab,
                                          const mt_sample_desc *desc, mt_tensor logits, int32_t *ids);
