/* batch.h - the data of the programs, and what they share that is not parallel. Every number depends on the place of a
   token in the global batch, not on the split. */

#ifndef MUTANTS_BATCH_H
#define MUTANTS_BATCH_H

#include "megatron.h"

#include <stdlib.h>

/* The micro-batch of this data rank: `sequences` sequences of the global batch of a step, from first_sequence on. */
typedef struct mutants_batch {
    int64_t step, sequences, tokens, first_sequence, first_token;
    mt_tensor ids, targets; /* [tokens, 1]; the target of a token is the token after it */
} mutants_batch;

static inline int32_t mutants_token(int64_t step, int64_t sequence, int64_t position, int vocab) {
    int64_t x = 31 * sequence + 7 * position + position * position / 3 + 11 * step;
    return (int32_t)((x + x * x / 5) % vocab);
}

/* Makes micro-batch number `micro` of a step. It has `sequences` sequences of `seq` tokens on all data ranks together.
   The two tensors are in the arena. */
static inline mt_status mutants_batch_create(mt_context *ctx, const mt_grid *grid, int64_t step, int64_t micro,
                                             int64_t sequences, int64_t seq, int vocab, mutants_batch *b) {
    mt_status status;
    int32_t *host;
    b->step = step;
    b->sequences = sequences / grid->dp_size;
    b->tokens = b->sequences * seq;
    b->first_sequence = micro * sequences + grid->dp_rank * b->sequences;
    b->first_token = b->first_sequence * seq;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, b->tokens, 1, &b->ids));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, b->tokens, 1, &b->targets));
    host = (int32_t *)malloc((size_t)b->tokens * 2 * sizeof *host);
    if (!host) return MT_ERR_MEMORY;
    for (int64_t i = 0; i < b->tokens; i++) {
        host[i] = mutants_token(step, b->first_sequence + i / seq, i % seq, vocab);
        host[b->tokens + i] = mutants_token(step, b->first_sequence + i / seq, i % seq + 1, vocab);
    }
    status = mt_upload(ctx, host, b->ids);
    if (status == MT_SUCCESS) status = mt_upload(ctx, host + b->tokens, b->targets);
    free(host);
    return status;
}

/* Adds the parameter PREFIX.SUFFIX. */
static inline mt_status mutants_param(mt_context *ctx, mt_params *params, const char *prefix, const char *suffix,
                                      mt_param_desc desc, mt_param **out) {
    char name[MT_NAME_MAX];
    MT_TRY(mt_param_name(ctx, name, prefix, suffix));
    desc.name = name;
    return mt_params_add(ctx, params, &desc, out);
}

#endif
