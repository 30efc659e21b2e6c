/* ---- the names of tensors in files ------------------------------------------------------------------------------- */

#pragma once
#include "checkpoint.c"
#include "../files/formats.h"
#include "../blocks/weights.h"

/* The rows of queries (which 0), keys (1) or values (2). The other form of rotary positions than the model's is
   converted. */
static void mti_part_qkv(const mt_transformer_layer_desc *l, const mt_param *p, int which, int pairs,
                         mt_tensor_part *out) {
    int64_t heads = l->heads, groups = l->kv_heads ? l->kv_heads : heads, head = l->hidden / heads;
    int64_t queries = (l->qkv_layout == MT_QKV_PER_GROUP ? heads / groups : heads) * head;
    int64_t others = (l->qkv_layout == MT_QKV_PER_GROUP ? 1 : groups) * head;
    out->rows = which == 0 ? queries : others;
    out->first = which == 0 ? 0 : queries + (which - 1) * others;
    out->unit = queries + 2 * others;
    if (l->qkv_layout == MT_QKV_SEPARATE) {
        out->first = 0;
        out->unit = out->rows = p->desc.rows == 1 ? p->desc.cols : p->desc.rows;
    }
    out->zip_unit = head;
    if (which == 2 || l->scores.rotary_base == 0.0f || pairs == (l->scores.rotary_form == MT_ROTARY_PAIRS)) return;
    out->zip = l->scores.rotary_dim ? l->scores.rotary_dim : head;
    if (!pairs) out->zip = -out->zip;
}

/* Explains an mt_layer_part. */
static void mti_layer_part(const mt_transformer_layer_desc *l, const mt_param *p, int part, mt_tensor_part *out) {
    int64_t rows = p->desc.rows == 1 ? p->desc.cols : p->desc.rows;
    if (part == MT_PART_GATE || part == MT_PART_UP) {
        out->unit = rows;
        out->rows = rows / 2;
        out->first = part == MT_PART_GATE ? 0 : rows / 2;
    } else if (part == MT_PART_QUERY_PAIRS || part == MT_PART_KEY_PAIRS) {
        mti_part_qkv(l, p, part - MT_PART_QUERY_PAIRS, 1, out);
    } else if (part >= MT_PART_QUERY && part <= MT_PART_VALUE) {
        mti_part_qkv(l, p, part - MT_PART_QUERY, 0, out);
    }
}

static void mti_bert_part(const void *model, const mt_param *p, int part, mt_tensor_part *out) {
    mti_layer_part(&((const mt_bert *)model)->desc.layer, p, part, out);
}

static void mti_gpt_part(const void *model, const mt_param *p, int part, mt_tensor_part *out) {
    mti_layer_part(&((const mt_gpt *)model)->desc.layer, p, part, out);
}

/* The last row of each table is only for a tied head. */
#define MTI_LAYER "decoder.layers.#."
static const mt_tensor_name mti_gpt2_names[] = {
    {"transformer.wte.weight", "embedding.word_embeddings.weight", 0, 0},
    {"transformer.wpe.weight", "embedding.position_embeddings.weight", 0, 0},
    {"transformer.ln_f.weight", "decoder.final_layernorm.weight", 0, 0},
    {"transformer.ln_f.bias", "decoder.final_layernorm.bias", 0, 0},
    {"transformer.h.#.ln_1.weight", MTI_LAYER "input_layernorm.weight", 0, 0},
    {"transformer.h.#.ln_1.bias", MTI_LAYER "input_layernorm.bias", 0, 0},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_QUERY,
     MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_KEY,
     MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_VALUE,
     MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_QUERY, 0},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_KEY, 0},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_VALUE, 0},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.query.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.key.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.value.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.query.bias", 0, 0},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.key.bias", 0, 0},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.value.bias", 0, 0},
    {"transformer.h.#.attn.c_proj.weight", MTI_LAYER "self_attention.linear_proj.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_proj.bias", MTI_LAYER "self_attention.linear_proj.bias", 0, 0},
    {"transformer.h.#.ln_2.weight", MTI_LAYER "pre_mlp_layernorm.weight", 0, 0},
    {"transformer.h.#.ln_2.bias", MTI_LAYER "pre_mlp_layernorm.bias", 0, 0},
    {"transformer.h.#.mlp.c_fc.weight", MTI_LAYER "mlp.linear_fc1.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.mlp.c_fc.bias", MTI_LAYER "mlp.linear_fc1.bias", 0, 0},
    {"transformer.h.#.mlp.c_proj.weight", MTI_LAYER "mlp.linear_fc2.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.mlp.c_proj.bias", MTI_LAYER "mlp.linear_fc2.bias", 0, 0},
    {"transformer.h.#.attn.bias", NULL, 0, 0}, /* the causal mask, in files of older versions */
    {"transformer.h.#.attn.masked_bias", NULL, 0, 0},
    {"lm_head.weight", "output_layer.weight", 0, 0},
    {"lm_head.weight", "embedding.word_embeddings.weight", 0, MT_TENSOR_COPY}};

static const mt_tensor_name mti_llama_names[] = {
    {"model.embed_tokens.weight", "embedding.word_embeddings.weight", 0, 0},
    {"model.norm.weight", "decoder.final_layernorm.weight", 0, 0},
    {"model.layers.#.input_layernorm.weight", MTI_LAYER "input_layernorm.weight", 0, 0},
    {"model.layers.#.self_attn.q_proj.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_QUERY, 0},
    {"model.layers.#.self_attn.k_proj.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_KEY, 0},
    {"model.layers.#.self_attn.v_proj.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_VALUE, 0},
    {"model.layers.#.self_attn.q_proj.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_QUERY, 0},
    {"model.layers.#.self_attn.k_proj.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_KEY, 0},
    {"model.layers.#.self_attn.v_proj.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_VALUE, 0},
    {"model.layers.#.self_attn.q_proj.weight", MTI_LAYER "self_attention.query.weight", MT_PART_QUERY, 0},
    {"model.layers.#.self_attn.k_proj.weight", MTI_LAYER "self_attention.key.weight", MT_PART_KEY, 0},
    {"model.layers.#.self_attn.v_proj.weight", MTI_LAYER "self_attention.value.weight", MT_PART_VALUE, 0},
    {"model.layers.#.self_attn.q_proj.bias", MTI_LAYER "self_attention.query.bias", MT_PART_QUERY, 0},
    {"model.layers.#.self_attn.k_proj.bias", MTI_LAYER "self_attention.key.bias", MT_PART_KEY, 0},
    {"model.layers.#.self_attn.v_proj.bias", MTI_LAYER "self_attention.value.bias", MT_PART_VALUE, 0},
    {"model.layers.#.self_attn.o_proj.weight", MTI_LAYER "self_attention.linear_proj.weight", 0, 0},
    {"model.layers.#.self_attn.o_proj.bias", MTI_LAYER "self_attention.linear_proj.bias", 0, 0},
    {"model.layers.#.post_attention_layernorm.weight", MTI_LAYER "pre_mlp_layernorm.weight", 0, 0},
    {"model.layers.#.mlp.gate_proj.weight", MTI_LAYER "mlp.linear_fc1.weight", MT_PART_GATE, 0},
    {"model.layers.#.mlp.up_proj.weight", MTI_LAYER "mlp.linear_fc1.weight", MT_PART_UP, 0},
    {"model.layers.#.mlp.gate_proj.bias", MTI_LAYER "mlp.linear_fc1.bias", MT_PART_GATE, 0},
    {"model.layers.#.mlp.up_proj.bias", MTI_LAYER "mlp.linear_fc1.bias", MT_PART_UP, 0},
    {"model.layers.#.mlp.down_proj.weight", MTI_LAYER "mlp.linear_fc2.weight", 0, 0},
    {"model.layers.#.mlp.down_proj.bias", MTI_LAYER "mlp.linear_fc2.bias", 0, 0},
    {"model.layers.#.self_attn.rotary_emb.inv_freq", NULL, 0, 0}, /* in files of older versions */
    {"lm_head.weight", "output_layer.weight", 0, 0},
    {"lm_head.weight", "embedding.word_embeddings.weight", 0, MT_TENSOR_COPY}};

#define MTI_BERT "bert.encoder.layer.#."
#define MTI_ENCODER "encoder.layers.#."
#define MTI_ATTENTION MTI_ENCODER "self_attention."

/* The last four rows are only for a BERT without a binary head. With MT_POST_LN the norms follow their blocks. */
static const mt_tensor_name mti_bert_names[] = {
    {"bert.embeddings.word_embeddings.weight", "embedding.word_embeddings.weight", 0, 0},
    {"bert.embeddings.position_embeddings.weight", "embedding.position_embeddings.weight", 0, 0},
    {"bert.embeddings.token_type_embeddings.weight", "embedding.tokentype_embeddings.weight", 0, 0},
    {"bert.embeddings.LayerNorm.weight", "embedding.layernorm.weight", 0, 0},
    {"bert.embeddings.LayerNorm.bias", "embedding.layernorm.bias", 0, 0},
    {MTI_BERT "attention.self.query.weight", MTI_ATTENTION "linear_qkv.weight", MT_PART_QUERY, 0},
    {MTI_BERT "attention.self.key.weight", MTI_ATTENTION "linear_qkv.weight", MT_PART_KEY, 0},
    {MTI_BERT "attention.self.value.weight", MTI_ATTENTION "linear_qkv.weight", MT_PART_VALUE, 0},
    {MTI_BERT "attention.self.query.bias", MTI_ATTENTION "linear_qkv.bias", MT_PART_QUERY, 0},
    {MTI_BERT "attention.self.key.bias", MTI_ATTENTION "linear_qkv.bias", MT_PART_KEY, 0},
    {MTI_BERT "attention.self.value.bias", MTI_ATTENTION "linear_qkv.bias", MT_PART_VALUE, 0},
    {MTI_BERT "attention.self.query.weight", MTI_ATTENTION "query.weight", 0, 0},
    {MTI_BERT "attention.self.key.weight", MTI_ATTENTION "key.weight", 0, 0},
    {MTI_BERT "attention.self.value.weight", MTI_ATTENTION "value.weight", 0, 0},
    {MTI_BERT "attention.self.query.bias", MTI_ATTENTION "query.bias", 0, 0},
    {MTI_BERT "attention.self.key.bias", MTI_ATTENTION "key.bias", 0, 0},
    {MTI_BERT "attention.self.value.bias", MTI_ATTENTION "value.bias", 0, 0},
    {MTI_BERT "attention.output.dense.weight", MTI_ATTENTION "linear_proj.weight", 0, 0},
    {MTI_BERT "attention.output.dense.bias", MTI_ATTENTION "linear_proj.bias", 0, 0},
    {MTI_BERT "attention.output.LayerNorm.weight", MTI_ENCODER "input_layernorm.weight", 0, 0},
    {MTI_BERT "attention.output.LayerNorm.bias", MTI_ENCODER "input_layernorm.bias", 0, 0},
    {MTI_BERT "intermediate.dense.weight", MTI_ENCODER "mlp.linear_fc1.weight", 0, 0},
    {MTI_BERT "intermediate.dense.bias", MTI_ENCODER "mlp.linear_fc1.bias", 0, 0},
    {MTI_BERT "output.dense.weight", MTI_ENCODER "mlp.linear_fc2.weight", 0, 0},
    {MTI_BERT "output.dense.bias", MTI_ENCODER "mlp.linear_fc2.bias", 0, 0},
    {MTI_BERT "output.LayerNorm.weight", MTI_ENCODER "pre_mlp_layernorm.weight", 0, 0},
    {MTI_BERT "output.LayerNorm.bias", MTI_ENCODER "pre_mlp_layernorm.bias", 0, 0},
    {"cls.predictions.transform.dense.weight", "lm_head.dense.weight", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.transform.dense.bias", "lm_head.dense.bias", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.transform.LayerNorm.weight", "lm_head.layer_norm.weight", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.transform.LayerNorm.bias", "lm_head.layer_norm.bias", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.bias", "output_layer.bias", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.decoder.weight", "embedding.word_embeddings.weight", 0, MT_TENSOR_COPY},
    {"cls.predictions.decoder.bias", "output_layer.bias", 0, MT_TENSOR_COPY},
    {"bert.embeddings.position_ids", NULL, 0, 0}, /* in files of older versions */
    {"bert.pooler.dense.weight", "pooler.dense.weight", 0, MT_TENSOR_OPTIONAL},
    {"bert.pooler.dense.bias", "pooler.dense.bias", 0, MT_TENSOR_OPTIONAL},
    {"cls.seq_relationship.weight", "binary_head.weight", 0, MT_TENSOR_OPTIONAL},
    {"cls.seq_relationship.bias", "binary_head.bias", 0, MT_TENSOR_OPTIONAL},
    {"bert.pooler.dense.weight", NULL, 0, 0},
    {"bert.pooler.dense.bias", NULL, 0, 0},
    {"cls.seq_relationship.weight", NULL, 0, 0},
    {"cls.seq_relationship.bias", NULL, 0, 0}};

/* The tables with an untied head, and with a tied one. */
static const mt_tensor_table mti_gpt2_tables[] = {
    {mti_gpt2_names, MTI_LENGTH(mti_gpt2_names) - 1, "transformer.", NULL, 0},
    {mti_gpt2_names, MTI_LENGTH(mti_gpt2_names), "transformer.", NULL, 0}};
static const mt_tensor_table mti_llama_tables[] = {
    {mti_llama_names, MTI_LENGTH(mti_llama_names) - 1, "model.", NULL, 0},
    {mti_llama_names, MTI_LENGTH(mti_llama_names), "model.", NULL, 0}};

/* The tables with the binary head, and without it. */
static const mt_tensor_alias mti_bert_aliases[] = {{"LayerNorm.gamma", "LayerNorm.weight"},
                                                   {"LayerNorm.beta", "LayerNorm.bias"}};
static const mt_tensor_table mti_bert_tables[] = {
    {mti_bert_names, MTI_LENGTH(mti_bert_names) - 4, "bert.", mti_bert_aliases, 2},
    {mti_bert_names, MTI_LENGTH(mti_bert_names), "bert.", mti_bert_aliases, 2}};

/* Return 1 when the model is one of these, as the comments of mt_gpt_checkpoint_create and mt_bert_checkpoint_create
   define them. */
static int mti_is_gpt2(const mti_described *m) {
    const mt_transformer_layer_desc *l = &m->d.layer;
    return !m->is_bert && l->norm.placement == MT_PRE_LN && l->norm.kind == MT_LAYER_NORM &&
           l->activation != MT_SWIGLU && l->scores.mask == MT_MASK_CAUSAL && l->scores.rotary_base == 0.0f &&
           l->kv_heads == l->heads && !l->no_bias;
}

static int mti_is_llama(const mti_described *m) {
    const mt_transformer_layer_desc *l = &m->d.layer;
    return !m->is_bert && l->norm.placement == MT_PRE_LN && l->norm.kind == MT_RMS_NORM && l->activation == MT_SWIGLU &&
           l->scores.mask == MT_MASK_CAUSAL && l->scores.rotary_base > 0.0f && l->scores.rotary_dim == 0;
}

static int mti_is_bert(const mti_described *m) {
    const mt_transformer_layer_desc *l = &m->d.layer;
    return m->is_bert && l->norm.placement == MT_POST_LN && l->norm.kind == MT_LAYER_NORM &&
           l->scores.rotary_base == 0.0f && l->kv_heads == l->heads && !l->no_bias;
}

/* Returns the table of a model of Hugging Face, or NULL for any other model. */
static const mt_tensor_table *mti_described_table(const mti_described *m) {
    const mt_scores_desc *s = &m->d.layer.scores;
    if (s->window > 0 || s->softcap > 0.0f || s->alibi || s->scale != 0.0f) return NULL;
    if (mti_is_gpt2(m)) return &mti_gpt2_tables[!m->d.untied_head];
    if (mti_is_llama(m)) return &mti_llama_tables[!m->d.untied_head];
    return mti_is_bert(m) ? &mti_bert_tables[m->no_binary_head] : NULL;
}
