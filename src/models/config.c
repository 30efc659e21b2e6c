/* ---- config.json ------------------------------------------------------------------------------------------------- */

#pragma once
#include "checkpoint.c"
#include "../comm/context.c"

#define MTI_CONFIG_BYTES ((size_t)1 << 20) /* as many as a checkpoint copies */

/* A config.json. */
typedef struct mti_config {
    mt_context *ctx;        /* NULL: without messages */
    const char *text;       /* a JSON object */
    char path[MT_PATH_MAX]; /* for messages */
} mti_config;

/* A whole number above 0 in config.json, which may also be there under another name. */
typedef struct mti_number {
    const char *name, *alias; /* alias NULL: there is no other name */
    int64_t most, missing;    /* missing: the number without this member; 0: the member may also be null */
    int64_t *out;
    int64_t given, also; /* what the file has under the two names; -1: nothing */
} mti_number;

static mt_status mti_config_fields(const mti_config *c, const mt_field *fields, int count) {
    return mt_json_parse(c->ctx, c->path, c->text, fields, count);
}

/* Finds a member of an object. */
static int mti_config_member(mt_json_part object, const char *name, mt_json_part *out) {
    char key[128];
    while (mt_json_next(&object, key, sizeof key, out))
        if (strcmp(key, name) == 0) return 1;
    return 0;
}

/* The places of a config.json: transformers nests the values of a language model that is a part of a larger one. */
static const char *const mti_config_objects[] = {"", "text_config."};
enum { MTI_PLACES = MTI_LENGTH(mti_config_objects) };

/* Finds a member of a place, which may be null. */
static int mti_config_find(const char *text, int place, const char *name, mt_json_part *out) {
    mt_json_part object;
    object.text = text;
    object.bytes = strlen(text);
    if (place == 1 && !mti_config_member(object, "text_config", &object)) return 0;
    return mti_config_member(object, name, out);
}

/* The same for a member that is not null. */
static int mti_config_at(const mti_config *c, int place, const char *name, mt_json_part *out) {
    return mti_config_find(c->text, place, name, out) && out->text[0] != 'n';
}

static mt_status mti_config_refuse(const mti_config *c, const char *name, const char *value, const char *wanted) {
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %s, must be %s", c->path, name, value, wanted);
}

static mt_status mti_config_refuse_text(const mti_config *c, const char *name, const char *value, const char *wanted) {
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is '%s', must be %s", c->path, name, value, wanted);
}

/* Takes the number that the file has. Of two different numbers transformers takes that of the alias; here they are
   refused. */
static mt_status mti_number_take(const mti_config *c, const mti_number *n) {
    int64_t x = n->given >= 0 ? n->given : n->also >= 0 ? n->also : n->missing;
    if (n->given >= 0 && n->also >= 0 && n->given != n->also)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %lld, but %s, another name of it, is %lld", c->path, n->name,
                       (long long)n->given, n->alias, (long long)n->also);
    *n->out = x;
    if (x <= n->most && (x > 0 || (n->given < 0 && n->also < 0))) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %lld, must be from 1 to %lld", c->path,
                   n->given >= 0 ? n->name : n->alias, (long long)x, (long long)n->most);
}

enum { MTI_CONFIG_FIELDS = 40 };

/* Reads numbers and fields, together at most MTI_CONFIG_FIELDS with the aliases. */
static mt_status mti_config_numbers(const mti_config *c, mti_number *numbers, int number_count, const mt_field *fields,
                                    int count) {
    mt_field all[MTI_CONFIG_FIELDS];
    int i, n = 0;
    memset(all, 0, sizeof all);
    for (i = 0; i < 2 * number_count; i++) {
        mti_number *number = &numbers[i / 2];
        if (i % 2 && !number->alias) continue;
        all[n].name = i % 2 ? number->alias : number->name;
        all[n].value = i % 2 ? &number->also : &number->given;
        all[n++].nullable = number->missing == 0;
    }
    for (i = 0; i < number_count; i++) numbers[i].given = numbers[i].also = -1;
    memcpy(all + n, fields, (size_t)count * sizeof *fields);
    MT_TRY(mti_config_fields(c, all, n + count));
    for (i = 0; i < number_count; i++) MT_TRY(mti_number_take(c, &numbers[i]));
    return MT_SUCCESS;
}

/* Refuses quantised weights: their files need other code than rounding. */
static mt_status mti_config_plain(const mti_config *c) {
    char method[2][64] = {"", ""};
    const mt_field fields[] = {
        {"quantization_config.quant_method", MT_FIELD_TEXT, method[0], 0, 0, 64, 0, 1},
        {"text_config.quantization_config.quant_method", MT_FIELD_TEXT, method[1], 0, 0, 64, 0, 1}};
    mt_json_part value;
    int i;
    MT_TRY(mti_config_fields(c, fields, MTI_PLACES));
    for (i = 0; i < MTI_PLACES; i++) {
        if (method[i][0])
            return mti_config_refuse_text(c, fields[i].name, method[i], "missing: weights are not quantised");
        if (mti_config_at(c, i, "quantization_config", &value))
            return mt_fail(c->ctx, MT_ERR_DATA,
                           "%s: has %squantization_config, must not have it: weights are not "
                           "quantised",
                           c->path, mti_config_objects[i]);
    }
    return MT_SUCCESS;
}

/* A member of config.json that must have one value, because another one changes what the model computes. */
typedef struct mti_fixed {
    const char *name;
    int value, must_be;
} mti_fixed;

static mt_status mti_config_fixed(const mti_config *c, const mti_fixed *list, int count) {
    int i;
    for (i = 0; i < count; i++)
        if (list[i].value != list[i].must_be)
            return mti_config_refuse(c, list[i].name, list[i].value ? "true" : "false",
                                     list[i].must_be ? "true" : "false");
    return MT_SUCCESS;
}

/* Checks the epsilon of the norms. */
static mt_status mti_config_eps(const mti_config *c, const char *name, double eps) {
    if ((float)eps > 0 && eps < 1) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %g, must be above 0 and below 1", c->path, name, eps);
}

/* The names of activations in config.json. The first of each activation is written. */
static const struct {
    const char *name;
    mt_activation activation;
} mti_activations[] = {{"gelu_new", MT_GELU_TANH}, {"gelu_fast", MT_GELU_TANH}, {"gelu_pytorch_tanh", MT_GELU_TANH},
                       {"gelu", MT_GELU_ERF},      {"relu2", MT_SQUARED_RELU},  {"relu", MT_RELU},
                       {"tanh", MT_TANH},          {"silu", MT_SWIGLU},         {"swish", MT_SWIGLU}};

/* Returns the activation of this name, or -1. */
static int mti_activation_named(const char *name) {
    int i;
    for (i = 0; i < MTI_LENGTH(mti_activations); i++)
        if (strcmp(name, mti_activations[i].name) == 0) return (int)mti_activations[i].activation;
    return -1;
}

/* Finds the activation of a GPT-2 or a BERT, which have no gates. */
static mt_status mti_config_activation(const mti_config *c, const char *name, const char *value, mt_activation *out) {
    int found = mti_activation_named(value);
    if (found < 0 || found == MT_SWIGLU)
        return mti_config_refuse_text(c, name, value,
                                      "gelu_new, gelu_fast, gelu_pytorch_tanh, gelu, relu, relu2 or tanh");
    *out = (mt_activation)found;
    return MT_SUCCESS;
}

static const char *mti_activation_text(mt_activation activation) {
    int i = 0;
    while (mti_activations[i].activation != activation) i++;
    return mti_activations[i].name;
}

/* Reads the config.json of a GPT-2. Defaults and second names are those of transformers' GPT2Config.
   reorder_and_upcast_attn only changes how f16 is rounded. *out is zero. */
static mt_status mti_gpt2_read(const mti_config *c, mt_gpt_desc *out) {
    mt_transformer_layer_desc *l = &out->layer;
    double eps = 1e-5;
    char activation[64] = "gelu_new"; /* truncated when longer; every accepted value fits */
    int tied = 1;
    mti_fixed fixed[] = {
        {"scale_attn_weights", 1, 1}, {"scale_attn_by_inverse_layer_idx", 0, 0}, {"add_cross_attention", 0, 0}};
    mti_number numbers[] = {{"vocab_size", NULL, INT32_MAX, 50257, &out->vocab, 0, 0},
                            {"n_positions", "max_position_embeddings", INT32_MAX, 1024, &out->max_seq, 0, 0},
                            {"n_embd", "hidden_size", INT32_MAX, 768, &l->hidden, 0, 0},
                            {"n_layer", "num_hidden_layers", MTI_LAYERS_MAX, 12, &out->layers, 0, 0},
                            {"n_head", "num_attention_heads", INT32_MAX, 12, &l->heads, 0, 0},
                            {"n_inner", NULL, INT32_MAX, 0, &l->ffn, 0, 0}};
    const mt_field fields[] = {{"layer_norm_epsilon", MT_FIELD_F64, &eps, 0, 0, 0, 0, 0},
                               {"activation_function", MT_FIELD_TEXT, activation, 0, 0, sizeof activation, 0, 0},
                               {"tie_word_embeddings", MT_FIELD_BOOL, &tied, 0, 0, 0, 0, 0},
                               {fixed[0].name, MT_FIELD_BOOL, &fixed[0].value, 0, 0, 0, 0, 0},
                               {fixed[1].name, MT_FIELD_BOOL, &fixed[1].value, 0, 0, 0, 0, 0},
                               {fixed[2].name, MT_FIELD_BOOL, &fixed[2].value, 0, 0, 0, 0, 0}};
    MT_TRY(mti_config_numbers(c, numbers, MTI_LENGTH(numbers), fields, MTI_LENGTH(fields)));
    MT_TRY(mti_config_activation(c, "activation_function", activation, &l->activation));
    MT_TRY(mti_config_fixed(c, fixed, MTI_LENGTH(fixed)));
    MT_TRY(mti_config_eps(c, "layer_norm_epsilon", eps));
    if (!l->ffn && l->hidden > INT32_MAX / 4)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: n_embd is %lld, must be from 1 to %d without n_inner", c->path,
                       (long long)l->hidden, INT32_MAX / 4);
    if (l->hidden % l->heads != 0)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: n_embd is %lld, must be a multiple of n_head %lld", c->path,
                       (long long)l->hidden, (long long)l->heads);
    l->norm.eps = (float)eps;
    out->untied_head = !tied;
    return MT_SUCCESS;
}
