/* ---- the router of a mixture of experts -------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* How the logits of a token become the scores of experts. */
typedef enum mt_router_score {
    MT_ROUTER_SOFTMAX = 0,     /* softmax over all experts: OLMoE; with normalize: Mixtral, Qwen3-MoE */
    MT_ROUTER_SIGMOID = 1,     /* sigmoid of each logit: DeepSeek-V3 */
    MT_ROUTER_TOPK_SOFTMAX = 2 /* softmax over the experts that are chosen: Megatron-LM's default */
} mt_router_score;

#define MT_ROUTER_SCORE_WORDS "MT_ROUTER_SOFTMAX MT_ROUTER_SIGMOID MT_ROUTER_TOPK_SOFTMAX"

/* How each token chooses its experts, and which weights these have (arXiv 1701.06538, section 2.1; bias and groups:
   arXiv 2412.19437, section 2.1.2).
     choice   the topk experts with the largest score + bias. Among equal ones the lowest number is first. Logits are
              compared in place of scores with MT_ROUTER_TOPK_SOFTMAX, and where there is neither a bias nor groups.
              -infinity comes last
     groups   group g has the experts from g * experts / groups on. A token chooses only experts of the group_topk
              groups in which the group_best largest score + bias have the largest sum
     weights  scale times the score, without the bias. With normalize, the scores of the chosen experts are first
              divided by (their sum + 1e-20)
   With topk 1, a softmax that is normalized or over the chosen experts gives the constant weight `scale`. */
typedef struct mt_router_desc {
    int topk; /* experts of a token: 1 or more */
    mt_router_score score;
    int normalize;  /* 1: divides by the sum */
    float scale;    /* 0: 1 */
    int groups;     /* 0: one group of all experts */
    int group_topk; /* 1 to groups. Without groups: 0 */
    int group_best; /* 0: topk / group_topk, rounded down, but 1 to the experts of a group. Without groups: 0 */
} mt_router_desc;

/* Chooses experts, in f32. logits [tokens, experts] has a float type, and up to 4096 columns. bias [1, experts] is
   MT_F32, or mt_none(). weights [tokens, topk], MT_F32, and ids [tokens, topk] become the weights and the numbers of
   each token's experts, the first choice first. valid [tokens]: token i is padding where valid[i] is 0. Its logits are
   not read; it gets weights 0 and ids -1. valid NULL: no token is padding. ids and valid are in memory of the context's
   device.
   backward: dlogits [tokens, experts] = the gradient of the logits, from dweights [tokens, topk], MT_F32, and from
   dscores and dlse of mt_router_losses, which may be mt_none(). desc, logits and ids are those of forward. A token
   whose ids are not all in [0, experts), such as padding, has the gradient 0. dlogits may be logits, and may have
   another float type. The bias has no gradient: mt_router_bias_update changes it.
   Errors: MT_ERR_ARGUMENT (a field of desc is out of range), MT_ERR_SHAPE (too many experts; topk is more than a token
   can choose; groups does not divide experts), MT_ERR_DATA (a logit, or a logit or score with its bias, is NaN or
   infinity; or -infinity for all experts; or for all that MT_ROUTER_TOPK_SOFTMAX chooses). In this case the token gets
   weights 0 and ids -2. On a GPU, which returns no such error, call
   mt_ids_check(ctx, "expert", ids, tokens * topk, experts, -1). */
MT_API mt_status mt_router_forward(mt_context *ctx, const mt_router_desc *desc, mt_tensor logits, mt_tensor bias,
                                   const int32_t *valid, mt_tensor weights, int32_t *ids);
MT_API mt_status mt_router_backward(mt_context *ctx, const mt_router_desc *desc, mt_tensor logits, const int32_t *ids,
                                    mt_tensor dweights, mt_tensor dscores, mt_tensor dlse, mt_tensor dlogits);

/* Adds to counts and sums what the losses need. The caller zeroes both first. counts [experts], in memory of the
   context's device: how many of ids [tokens, topk] name each expert. sums [1, experts + 1], MT_F32: for each expert the
   sum of its scores over the tokens, and in the last column the sum of lse^2, where lse = log(sum of exp(logit)). Here
   the score is the softmax over all experts, also with MT_ROUTER_TOPK_SOFTMAX. With MT_ROUTER_SIGMOID it is the sigmoid
   divided by (the sum of the token's sigmoids + 1e-20), as in arXiv 2412.19437, equation 19. A token whose ids are not
   all in [0, experts) counts in nothing. The order of additions does not depend on the number of threads.
   Where ranks have different tokens, add up counts and sums with mt_all_reduce. Counts are exact, so the gradients of
   the losses then have the same bits on any split. */
MT_API mt_status mt_router_sums(mt_context *ctx, const mt_router_desc *desc, mt_tensor logits, const int32_t *ids,
                                int32_t *counts, mt_tensor sums);

/* The losses that keep a router balanced, from counts and sums of T = (sum of counts) / topk tokens, where topk is that
   of the router:
     auxiliary loss   aux * experts / (topk T^2) * sum over experts of counts * sums
                      arXiv 2101.03961, equation 4, divided by topk as in Megatron-LM
     z-loss           z / T * (sum of lse^2)     arXiv 2202.08906, equation 5
   losses [1, 2] becomes both, or is mt_none(). For mt_router_backward, dscores [1, experts] becomes aux * experts /
   (topk T^2) * counts, the gradient of each token's scores, and dlse [1, 1] becomes z / T, that of each lse^2. All
   tensors are MT_F32. With T = 0 all are 0. aux and z are at least 0, and have the scale that the main loss has in the
   gradients. */
MT_API mt_status mt_router_losses(mt_context *ctx, int topk, float aux, float z, const int32_t *counts, mt_tensor sums,
                                  mt_tensor losses, mt_tensor dscores, mt_tensor dlse);

/* Balances the experts without a loss (arXiv 2408.15664): for each expert, bias += rate * sign(mean of counts -
   counts). bias [1, experts] is MT_F32, and rate is finite. Call it once a step, with the counts of all ranks and
   micro-batches of this step. */
MT_API mt_status mt_router_bias_update(mt_context *ctx, float rate, const int32_t *counts, mt_tensor bias);
