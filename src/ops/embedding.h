/* ---- embedding --------------------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* Checks that each of the `count` ids is in [0, limit) or equal to ignore. For token ids pass ignore = 0, which is in
   that range anyway; for targets pass mt_ignore_index(desc.ignore_index). `what` is the word for an id in the error
   message ("token id", "target"; NULL: "id"; at most 23 characters). On MT_DEVICE_META no id is checked. Error:
   MT_ERR_DATA, with the first wrong id and its index in the message.
   On MT_DEVICE_CUDA the check is in the stream, and this call does not wait for it. The next call of the program that
   waits for the stream returns the error of the first failed check: mt_context_synchronize, mt_download, mt_hash,
   mt_grad_norm, or another function whose comment says that it waits. The calls in between compute with the wrong ids.
   Their results are of no use, but they access no memory outside of the tensors. */
MT_API mt_status mt_ids_check(mt_context *ctx, const char *what, const int32_t *ids, int64_t count, int64_t limit,
                              int32_t ignore);

/* ids[i] = (first_token + i) % seq for i < count: the positions of consecutive tokens in sequences of length seq.
   With cu_seqlens, the tokens are `documents` documents, one after the other, and a position is the number of tokens
   before the token in its document and its sequence, as in mt_rotary_forward. cu_seqlens and first_token count from the
   same token: the first one of document 0. Document d has the tokens [cu_seqlens[d], cu_seqlens[d + 1]). The array has
   documents + 1 ascending numbers, from 0 to at least first_token + count, on the context's device. A CPU checks the
   numbers (MT_ERR_DATA), a GPU does not. NULL and 0: no documents. */
MT_API mt_status mt_position_ids(mt_context *ctx, int64_t first_token, int64_t seq, const int32_t *cu_seqlens,
                                 int64_t documents, int32_t *ids, int64_t count);

/* Looks up the rows of `ids`, one id per token, in a shard of a table. table and dtable [rows, h] hold the rows
   [first_row, first_row + rows) of the whole table; first_row is 0 for a whole table.
   forward:  y [tokens, h] = beta * y + table[ids - first_row]. An id outside of the shard adds 0. With beta == 0, y is
             not read.
   backward: dtable[ids - first_row] += dy [tokens, h]. An id outside of the shard adds nothing. A CPU adds the
             tokens of a row in their order. A GPU adds them in groups, each in the order of its tokens, and then
             adds the sums of the groups. A group has 32 tokens, or more if the row has more than 4096. With at most
             32 tokens of a row, the bits are those of a CPU. The order depends only on how many tokens the row has.
             Error: MT_ERR_UNSUPPORTED (on a GPU: about 2^31 tokens or more). */
MT_API mt_status mt_embedding_forward(mt_context *ctx, mt_tensor table, int64_t first_row, const int32_t *ids,
                                      float beta, mt_tensor y);
MT_API mt_status mt_embedding_backward(mt_context *ctx, mt_tensor dy, int64_t first_row, const int32_t *ids,
                                       mt_tensor dtable);
