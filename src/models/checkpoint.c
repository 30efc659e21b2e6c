/* ---- checkpoints of a GPT and of a BERT: descs and formats ------------------------------------------------------- */

#pragma once
#include "checkpoint.h"
#include "bert.h"
#include "model.c"
#include "../files/fields.h"

#define MTI_LENGTH(list) (int)(sizeof(list) / sizeof *(list))

/* A GPT or a BERT, as the files of a checkpoint describe it. */
typedef struct mti_described {
    int is_bert;
    mt_gpt_desc d;       /* of a BERT: what mt_bert_desc has in common with it */
    int64_t token_types; /* of a BERT */
    int no_binary_head;  /* of a BERT; does not change what the encoder computes, and is not compared */
} mti_described;

/* The fields in the metadata of a file, in the order of the file: what determines the logits of a GPT and what a BERT's
   encoder computes, max_seq and no_binary_head. The limits are those of mt_gpt_create. */
#define MTI_BOTH(name) "gpt." name, "bert." name
#define MTI_AT(member) offsetof(mti_described, member)
static const struct {
    const char *gpt, *bert; /* the name in the metadata of a GPT and of a BERT; NULL: it does not have the field */
    mt_field_kind kind;
    size_t at;         /* the place in mti_described */
    int64_t low, high; /* as in mt_field; a float must be at least 0 (low 0) or above 0 (low 1); low -1: any */
    int optional;      /* 1: a file has the field only when it is not 0 */
    const char *words; /* as in mt_check_enum, for messages; NULL: numbers */
} mti_fields[] = {
    {MTI_BOTH("vocab"), MT_FIELD_I64, MTI_AT(d.vocab), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("layers"), MT_FIELD_I64, MTI_AT(d.layers), 1, MTI_LAYERS_MAX, 0, NULL},
    {MTI_BOTH("max_seq"), MT_FIELD_I64, MTI_AT(d.max_seq), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("hidden"), MT_FIELD_I64, MTI_AT(d.layer.hidden), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("heads"), MT_FIELD_I64, MTI_AT(d.layer.heads), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("kv_heads"), MT_FIELD_I64, MTI_AT(d.layer.kv_heads), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("ffn"), MT_FIELD_I64, MTI_AT(d.layer.ffn), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("placement"), MT_FIELD_INT, MTI_AT(d.layer.norm.placement), 0, MT_RESIDUAL_POST_LN, 0,
     MT_LN_PLACEMENT_WORDS},
    {MTI_BOTH("norm"), MT_FIELD_INT, MTI_AT(d.layer.norm.kind), 0, MT_RMS_NORM, 0, MT_NORM_WORDS},
    {MTI_BOTH("norm_eps"), MT_FIELD_F32, MTI_AT(d.layer.norm.eps), 1, 0, 0, NULL},
    {MTI_BOTH("activation"), MT_FIELD_INT, MTI_AT(d.layer.activation), 0, MT_ACTIVATION_COUNT - 1, 0,
     MT_ACTIVATION_WORDS},
    {"gpt.mask", NULL, MT_FIELD_INT, MTI_AT(d.layer.scores.mask), 0, MT_MASK_BIDIRECTIONAL, 0, MT_MASK_WORDS},
    {MTI_BOTH("rotary_base"), MT_FIELD_F32, MTI_AT(d.layer.scores.rotary_base), 0, 0, 0, NULL},
    {MTI_BOTH("no_bias"), MT_FIELD_INT, MTI_AT(d.layer.no_bias), 0, 1, 0, NULL},
    {"gpt.untied_head", NULL, MT_FIELD_INT, MTI_AT(d.untied_head), 0, 1, 0, NULL},
    {NULL, "bert.token_types", MT_FIELD_I64, MTI_AT(token_types), 1, INT32_MAX, 0, NULL},
    {NULL, "bert.no_binary_head", MT_FIELD_INT, MTI_AT(no_binary_head), 0, 1, 0, NULL},
    {MTI_BOTH("qkv_layout"), MT_FIELD_INT, MTI_AT(d.layer.qkv_layout), 0, MT_QKV_SEPARATE, 1, MT_QKV_LAYOUT_WORDS},
    {MTI_BOTH("rotary_form"), MT_FIELD_INT, MTI_AT(d.layer.scores.rotary_form), 0, MT_ROTARY_PAIRS, 1,
     MT_ROTARY_FORM_WORDS},
    {MTI_BOTH("rotary_dim"), MT_FIELD_I64, MTI_AT(d.layer.scores.rotary_dim), 0, INT32_MAX, 1, NULL},
    {MTI_BOTH("window"), MT_FIELD_I64, MTI_AT(d.layer.scores.window), 0, INT64_MAX, 1, NULL},
    {MTI_BOTH("softcap"), MT_FIELD_F32, MTI_AT(d.layer.scores.softcap), 0, 0, 1, NULL},
    {MTI_BOTH("alibi"), MT_FIELD_INT, MTI_AT(d.layer.scores.alibi), 0, 1, 1, NULL},
    {MTI_BOTH("scale"), MT_FIELD_F32, MTI_AT(d.layer.scores.scale), -1, 0, 1, NULL}};

/* Makes *out field i of the model. Returns 0 when the model does not have the field. */
static int mti_described_field(mti_described *m, int i, mt_field *out) {
    memset(out, 0, sizeof *out);
    out->name = m->is_bert ? mti_fields[i].bert : mti_fields[i].gpt;
    out->kind = mti_fields[i].kind;
    out->value = (char *)m + mti_fields[i].at;
    out->low = mti_fields[i].low;
    out->high = mti_fields[i].high;
    return out->name != NULL;
}

/* Fills in the defaults, so that equal models have equal fields. */
static void mti_described_plain(mti_described *m) {
    mt_transformer_layer_desc *l = &m->d.layer;
    if (!l->kv_heads) l->kv_heads = l->heads;
    if (!l->ffn) l->ffn = 4 * l->hidden;
    if (l->norm.eps == 0.0f) l->norm.eps = 1e-5f;
    if (l->heads > 0 && l->scores.rotary_dim == l->hidden / l->heads) l->scores.rotary_dim = 0;
    l->no_bias = l->no_bias != 0;
    m->d.untied_head = m->d.untied_head != 0;
    if (m->is_bert && !m->token_types) m->token_types = 2;
    m->no_binary_head = m->no_binary_head != 0;
}

static mti_described mti_describe_gpt(const mt_gpt_desc *desc) {
    mti_described m;
    memset(&m, 0, sizeof m);
    m.d = *desc;
    mti_described_plain(&m);
    return m;
}

static mti_described mti_describe_bert(const mt_bert_desc *desc) {
    mti_described m;
    memset(&m, 0, sizeof m);
    m.is_bert = 1;
    m.d.vocab = desc->vocab;
    m.d.layers = desc->layers;
    m.d.max_seq = desc->max_seq;
    m.d.layer = desc->layer;
    m.token_types = desc->token_types;
    m.no_binary_head = desc->no_binary_head;
    mti_described_plain(&m);
    return m;
}

/* Returns the index of the first field in which two models of a kind differ, or -1. With rotary or ALiBi max_seq may
   differ, as no weight depends on it. */
static int mti_described_differ(mti_described *theirs, mti_described *ours) {
    char their_text[MT_FIELD_TEXT_MAX], our_text[MT_FIELD_TEXT_MAX];
    int any_seq = ours->d.layer.scores.rotary_base > 0.0f || ours->d.layer.scores.alibi, i;
    mt_field x, y;
    for (i = 0; i < MTI_LENGTH(mti_fields); i++) {
        if (!mti_described_field(theirs, i, &x) || !mti_described_field(ours, i, &y)) continue;
        if (y.value == &ours->no_binary_head || (any_seq && y.value == &ours->d.max_seq)) continue;
        mt_field_text(&x, their_text);
        mt_field_text(&y, our_text);
        if (strcmp(their_text, our_text) != 0) return i;
    }
    return -1;
}
