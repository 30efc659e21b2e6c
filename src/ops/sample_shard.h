/* ---- sampling from a vocabulary shard, for authors of samplers --------------------------------------------------- */

#pragma once
#include "sample.h"
#include "../comm/context.h"

/* Returns the number of candidates of a shard with `cols` columns: 1 at temperature 0, with a top_p of MT_ZERO or
   without top_k and top_p; the smaller of top_k and cols with top_k; cols with top_p alone. */
MT_API int64_t mt_sample_count(const mt_sample_desc *desc, int64_t cols);

/* Call mt_sample_candidates on each shard, gather all candidates with mt_all_gather, then call mt_sample_ids. logits
   [rows, cols] has the columns of the vocabulary from first_col on. Columns whose index in the vocabulary is `vocab`
   or more are padding, and are never drawn.
   candidates: candidates [rows, 2 k] is MT_F32, with k = mt_sample_count(desc, cols). The first k columns are logits,
               and the others have the bits of their ids, which are int32_t: gather them as MT_I32. With k = 1 the
               candidate is the token that is drawn from this shard alone. With k > 1 the candidates are the first k
               tokens in the order of mt_sample_desc, by increasing id. When the shard has fewer than k tokens, they are
               followed by logits of -infinity with the id -1.
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
