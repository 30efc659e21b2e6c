/* ---- FLOPs of a model -------------------------------------------------------------------------------------------- */

#pragma once
#include "flops.h"
#include "../ops/system.h"

/* The scores of a head that mask and window allow, in a sequence. */
static double mti_visible_scores(const mt_transformer_layer_desc *l, int64_t seq) {
    double n = (double)seq, w = l->scores.window > 0 ? (double)mt_min(l->scores.window, seq) : n;
    double causal = w * (w + 1) / 2 + (n - w) * w; /* of each query the keys at its position and before */
    return l->scores.mask == MT_MASK_CAUSAL ? causal : 2 * causal - n;
}

/* The forward of a layer: QKV, projection and MLP, and two products for each score. */
static double mti_layer_flops(const mt_transformer_layer_desc *l, double sequences, int64_t seq) {
    double h = (double)l->hidden, ffn = l->ffn ? (double)l->ffn : 4 * h;
    double kv = h / (double)l->heads * (double)(l->kv_heads ? l->kv_heads : l->heads);
    double weights = h * (h + 2 * kv) + h * h + h * ffn * (l->activation == MT_SWIGLU ? 3 : 2);
    return 2 * sequences * ((double)seq * weights + 2 * mti_visible_scores(l, seq) * h);
}

MT_API double mt_gpt_flops(const mt_gpt_desc *desc, int64_t sequences, int64_t seq) {
    double n = (double)sequences, head;
    if (!desc || sequences < 1 || seq < 1 || desc->layer.heads < 1) return 0;
    head = 2 * n * (double)seq * (double)desc->layer.hidden * (double)desc->vocab;
    /* the gradients of both factors of a product cost as much as two forwards */
    return 3 * ((double)desc->layers * mti_layer_flops(&desc->layer, n, seq) + head);
}

MT_API double mt_bert_flops(const mt_bert_desc *desc, int64_t sequences, int64_t seq) {
    mt_transformer_layer_desc l;
    double n = (double)sequences, h, heads;
    if (!desc || sequences < 1 || seq < 1 || desc->layer.heads < 1) return 0;
    l = desc->layer;
    l.scores.mask = MT_MASK_BIDIRECTIONAL;
    h = (double)l.hidden;
    heads = 2 * n * (double)seq * h * (h + (double)desc->vocab);
    if (!desc->no_binary_head) heads += 2 * n * h * (h + 2); /* the pooler and the two classes, of a sequence */
    return 3 * ((double)desc->layers * mti_layer_flops(&l, n, seq) + heads);
}
