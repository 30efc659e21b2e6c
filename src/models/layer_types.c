/* ---- the types of layers in a config.json, and their rotary positions -------------------------------------------- */

#pragma once
#include "config.c"

enum { MTI_TYPE_MAX = 64, MTI_TYPES_MAX = 16 }; /* bytes of the name of a type of layers; types in one object or list */

/* The types in layer_types of a place, each once. Layers and members may be many: a loop over both would take hours. */
typedef struct mti_types {
    char names[MTI_TYPES_MAX][MTI_TYPE_MAX]; /* truncated when longer; every accepted name fits */
    int count;
} mti_types;

/* Returns the list layer_types of a place, or nothing. */
static mt_json_part mti_layer_types(const mti_config *c, int place) {
    mt_json_part list;
    if (!mti_config_at(c, place, "layer_types", &list) || list.text[0] != '[') memset(&list, 0, sizeof list);
    return list;
}

static int mti_types_have(const mti_types *t, const char *type) {
    int i = 0;
    while (i < t->count && strcmp(t->names[i], type) != 0) i++;
    return i < t->count;
}

/* Lists the types of a place. */
static mt_status mti_types_read(const mti_config *c, int place, mti_types *out) {
    char name[MTI_TYPE_MAX];
    mt_json_part list = mti_layer_types(c, place), value;
    out->count = 0;
    while (mt_json_next(&list, name, sizeof name, &value)) {
        if (mti_types_have(out, name)) continue;
        if (out->count == MTI_TYPES_MAX)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %slayer_types has more than %d types of layers", c->path,
                           mti_config_objects[place], MTI_TYPES_MAX);
        snprintf(out->names[out->count++], sizeof name, "%s", name);
    }
    return MT_SUCCESS;
}

/* Refuses layers of a type that the library does not have, and a window that is shorter than a text and that layers
   use: without layer_types all do. */
static mt_status mti_config_types(const mti_config *c, int place, const mti_described *m) {
    const char *at = mti_config_objects[place];
    char name[MTI_TYPE_MAX], windowed[MTI_TYPE_MAX];
    mt_json_part list = mti_layer_types(c, place), value;
    int64_t window = -1, n = 0;
    mt_field field;
    memset(&field, 0, sizeof field);
    snprintf(windowed, sizeof windowed, "%ssliding_window", at);
    field.name = windowed;
    field.value = &window;
    field.nullable = 1;
    MT_TRY(mti_config_fields(c, &field, 1));
    if (!list.text && mti_config_at(c, place, "layer_types", &value))
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %slayer_types is no list", c->path, at);
    for (; mt_json_next(&list, name, sizeof name, &value); n++) {
        if (strcmp(name, "full_attention") == 0) continue;
        if (strcmp(name, "sliding_attention") != 0)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %slayer_types.%lld is '%s', must be full_attention", c->path, at,
                           (long long)n, name);
        if (window < m->d.max_seq)
            return mt_fail(c->ctx, MT_ERR_DATA,
                           "%s: %slayer_types.%lld is 'sliding_attention', must be full_attention, or %s at least the "
                           "number of positions %lld",
                           c->path, at, (long long)n, windowed, (long long)m->d.max_seq);
    }
    if (n > 0 && n != m->d.layers)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %slayer_types has %lld layers, the model has %lld", c->path, at,
                       (long long)n, (long long)m->d.layers);
    if (n > 0 || window < 0 || window >= m->d.max_seq) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA,
                   "%s: %s is %lld, must be null, missing or at least the number of positions %lld", c->path, windowed,
                   (long long)window, (long long)m->d.max_seq);
}

/* The base of the rotary positions, and the member of config.json that has it. "": none so far. */
typedef struct mti_rope {
    double theta;
    char name[192];
    mti_types types[MTI_PLACES]; /* of the layers */
} mti_rope;

/* Returns 1 when a layer may be of this type: no place has layer_types, or one of them has the type. */
static int mti_rope_has_type(const mti_rope *r, const char *type) {
    int i, any = 0;
    for (i = 0; i < MTI_PLACES; i++) {
        if (mti_types_have(&r->types[i], type)) return 1;
        if (r->types[i].count > 0) any = 1;
    }
    return !any;
}

/* The names of the base, and the type of layers that each is for. NULL: all. Gemma 3 and ModernBERT have the others. */
static const char *const mti_theta_names[][2] = {{"rope_theta", NULL},
                                                 {"global_rope_theta", "full_attention"},
                                                 {"local_rope_theta", "sliding_attention"},
                                                 {"rope_local_base_freq", "sliding_attention"}};
enum { MTI_THETAS = MTI_LENGTH(mti_theta_names), MTI_ROPE_FIELDS = MTI_THETAS + 4 };

/* Takes a base. All bases that layers of the model use must be equal. */
static mt_status mti_rope_theta(const mti_config *c, const char *name, double theta, mti_rope *r) {
    if (!((float)theta > 0 && theta <= FLT_MAX))
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %g, must be above 0, and a float", c->path, name, theta);
    if (r->name[0] && r->theta != theta)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %g, but %s is %g", c->path, name, theta, r->name, r->theta);
    r->theta = theta;
    snprintf(r->name, sizeof r->name, "%.191s", name);
    return MT_SUCCESS;
}

/* Reads the rotary positions that one object of the file has. `object` is its name and a dot, or "" for the file. A
   file or text_config itself (is_rope 0) has no type of positions. */
static mt_status mti_rope_read(const mti_config *c, const char *object, int is_rope, mti_rope *r) {
    static const char *const others[] = {"partial_rotary_factor", "factor", "rope_type", "type"};
    char names[MTI_ROPE_FIELDS][192], type[2][64] = {"default", "default"};
    double number[MTI_THETAS + 2];
    mt_field fields[MTI_ROPE_FIELDS];
    int i, count = is_rope ? MTI_ROPE_FIELDS : MTI_THETAS + 1;
    memset(fields, 0, sizeof fields);
    for (i = 0; i < MTI_ROPE_FIELDS; i++) {
        int is_text = i >= MTI_THETAS + 2;
        snprintf(names[i], sizeof names[i], "%s%s", object,
                 i < MTI_THETAS ? mti_theta_names[i][0] : others[i - MTI_THETAS]);
        fields[i].name = names[i];
        fields[i].kind = is_text ? MT_FIELD_TEXT : MT_FIELD_F64;
        fields[i].value = is_text ? (void *)type[i - MTI_THETAS - 2] : (void *)&number[i];
        fields[i].bytes = is_text ? sizeof type[0] : 0;
        fields[i].nullable = !is_text;
        if (!is_text) number[i] = i < MTI_THETAS ? -HUGE_VAL : 1; /* no number of JSON is infinite */
    }
    MT_TRY(mti_config_fields(c, fields, count));
    for (i = 0; i < 2; i++)
        if (strcmp(type[i], "default") != 0)
            return mti_config_refuse_text(c, names[MTI_THETAS + 2 + i], type[i],
                                          "'default' or missing: positions are not scaled");
    for (i = MTI_THETAS; i < MTI_THETAS + 2; i++)
        if (number[i] != 1)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %g, must be 1 or missing", c->path, names[i], number[i]);
    for (i = 0; i < MTI_THETAS; i++)
        if (number[i] != -HUGE_VAL && (!mti_theta_names[i][1] || mti_rope_has_type(r, mti_theta_names[i][1])))
            MT_TRY(mti_rope_theta(c, names[i], number[i], r));
    return MT_SUCCESS;
}

/* Reads rope_parameters or rope_scaling of a place. They may have an object for each type of layers; that of a type
   which no layer has does not count. */
static mt_status mti_rope_object(const mti_config *c, int place, const char *name, mti_rope *r) {
    char object[64], inner[160], type[MTI_TYPE_MAX];
    mt_json_part rope, rest, value;
    int types = 0, i;
    if (!mti_config_at(c, place, name, &rope)) return MT_SUCCESS;
    snprintf(object, sizeof object, "%s%s.", mti_config_objects[place], name);
    MT_TRY(mti_rope_read(c, object, 1, r));
    for (rest = rope; mt_json_next(&rest, type, sizeof type, &value);) {
        if (value.text[0] != '{') continue;
        if (strlen(type) == sizeof type - 1 || ++types > MTI_TYPES_MAX)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s%s: at most %d types of layers with names of %d bytes are read",
                           c->path, object, type, MTI_TYPES_MAX, MTI_TYPE_MAX - 2);
        snprintf(inner, sizeof inner, "%s%s.", object, type);
        if (mti_rope_has_type(r, type)) MT_TRY(mti_rope_read(c, inner, 1, r));
    }
    for (i = 0; types > 0 && i < r->types[place].count; i++) {
        const char *used = r->types[place].names[i];
        if (!mti_config_member(rope, used, &value) || value.text[0] == 'n')
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s%s is missing, and layer_types has '%s'", c->path, object, used,
                           used);
    }
    return MT_SUCCESS;
}

/* Writes the base, which transformers 4 writes as rope_theta, and transformers 5 in rope_parameters. Refuses what this
   library's rotary positions cannot be: they are the same in all layers. */
static mt_status mti_llama_rope(const mti_config *c, float *base) {
    mti_rope r;
    int i;
    r.theta = 10000;
    r.name[0] = 0;
    for (i = 0; i < MTI_PLACES; i++) MT_TRY(mti_types_read(c, i, &r.types[i]));
    for (i = 0; i < MTI_PLACES; i++) {
        MT_TRY(mti_rope_object(c, i, "rope_parameters", &r));
        MT_TRY(mti_rope_read(c, mti_config_objects[i], 0, &r));
        MT_TRY(mti_rope_object(c, i, "rope_scaling", &r));
    }
    *base = (float)r.theta;
    return MT_SUCCESS;
}

/* Checks how the numbers of a Llama fit together. */
static mt_status mti_llama_shape(const mti_config *c, const mt_gpt_desc *d, int64_t head_dim) {
    const mt_transformer_layer_desc *l = &d->layer;
    if (l->hidden % l->heads != 0)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: hidden_size is %lld, must be a multiple of num_attention_heads %lld",
                       c->path, (long long)l->hidden, (long long)l->heads);
    if (head_dim && head_dim != l->hidden / l->heads)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: head_dim is %lld, must be hidden_size / num_attention_heads, %lld",
                       c->path, (long long)head_dim, (long long)(l->hidden / l->heads));
    if (l->kv_heads && l->heads % l->kv_heads != 0)
        return mt_fail(c->ctx, MT_ERR_DATA,
                       "%s: num_key_value_heads is %lld, must be a divisor of num_attention_heads %lld", c->path,
                       (long long)l->kv_heads, (long long)l->heads);
    return MT_SUCCESS;
}

/* Reads the config.json of a Llama. Defaults are those of transformers' LlamaConfig. *out is zero. */
static mt_status mti_llama_read(const mti_config *c, mt_gpt_desc *out) {
    mt_transformer_layer_desc *l = &out->layer;
    double eps = 1e-6;
    int64_t head_dim = 0;
    int tied = 0, attention_bias = 0, mlp_bias = 0;
    char activation[64] = "silu"; /* truncated when longer; every accepted value fits */
    mti_number numbers[] = {{"vocab_size", NULL, INT32_MAX, 32000, &out->vocab, 0, 0},
                            {"max_position_embeddings", NULL, INT32_MAX, 2048, &out->max_seq, 0, 0},
                            {"hidden_size", NULL, INT32_MAX, 4096, &l->hidden, 0, 0},
                            {"num_hidden_layers", NULL, MTI_LAYERS_MAX, 32, &out->layers, 0, 0},
                            {"num_attention_heads", NULL, INT32_MAX, 32, &l->heads, 0, 0},
                            {"num_key_value_heads", NULL, INT32_MAX, 0, &l->kv_heads, 0, 0},
                            {"intermediate_size", NULL, INT32_MAX, 11008, &l->ffn, 0, 0},
                            {"head_dim", NULL, INT32_MAX, 0, &head_dim, 0, 0}};
    const mt_field fields[] = {{"rms_norm_eps", MT_FIELD_F64, &eps, 0, 0, 0, 0, 0},
                               {"hidden_act", MT_FIELD_TEXT, activation, 0, 0, sizeof activation, 0, 0},
                               {"tie_word_embeddings", MT_FIELD_BOOL, &tied, 0, 0, 0, 0, 0},
                               {"attention_bias", MT_FIELD_BOOL, &attention_bias, 0, 0, 0, 0, 0},
                               {"mlp_bias", MT_FIELD_BOOL, &mlp_bias, 0, 0, 0, 0, 0}};
    MT_TRY(mti_config_numbers(c, numbers, MTI_LENGTH(numbers), fields, MTI_LENGTH(fields)));
    if (mti_activation_named(activation) != MT_SWIGLU)
        return mti_config_refuse_text(c, "hidden_act", activation, "silu");
    MT_TRY(mti_llama_rope(c, &l->scores.rotary_base));
    MT_TRY(mti_config_eps(c, "rms_norm_eps", eps));
    if (mlp_bias != attention_bias)
        return mti_config_refuse(c, "mlp_bias", mlp_bias ? "true" : "false",
                                 attention_bias ? "true, as attention_bias is" : "false, as attention_bias is");
    MT_TRY(mti_llama_shape(c, out, head_dim));
    l->norm.kind = MT_RMS_NORM;
    l->activation = MT_SWIGLU;
    l->norm.eps = (float)eps;
    l->no_bias = !mlp_bias;
    out->untied_head = !tied;
    return MT_SUCCESS;
}

/* Reads the config.json of a BERT. Defaults are those of transformers' BertConfig. *out is zero. d.untied_head becomes
   1 for a head that is not tied, see mti_bert_tied. */
static mt_status mti_bert_read(const mti_config *c, mti_described *out) {
    mt_transformer_layer_desc *l = &out->d.layer;
    double eps = 1e-12;
    char activation[64] = "gelu", positions[64] = "absolute"; /* truncated when longer; accepted values fit */
    int tied = 1;
    mti_fixed fixed[] = {{"is_decoder", 0, 0}, {"add_cross_attention", 0, 0}};
    mti_number numbers[] = {{"vocab_size", NULL, INT32_MAX, 30522, &out->d.vocab, 0, 0},
                            {"max_position_embeddings", NULL, INT32_MAX, 512, &out->d.max_seq, 0, 0},
                            {"type_vocab_size", NULL, INT32_MAX, 2, &out->token_types, 0, 0},
                            {"hidden_size", NULL, INT32_MAX, 768, &l->hidden, 0, 0},
                            {"num_hidden_layers", NULL, MTI_LAYERS_MAX, 12, &out->d.layers, 0, 0},
                            {"num_attention_heads", NULL, INT32_MAX, 12, &l->heads, 0, 0},
                            {"intermediate_size", NULL, INT32_MAX, 3072, &l->ffn, 0, 0}};
    const mt_field fields[] = {{"layer_norm_eps", MT_FIELD_F64, &eps, 0, 0, 0, 0, 0},
                               {"hidden_act", MT_FIELD_TEXT, activation, 0, 0, sizeof activation, 0, 0},
                               {"position_embedding_type", MT_FIELD_TEXT, positions, 0, 0, sizeof positions, 0, 0},
                               {"tie_word_embeddings", MT_FIELD_BOOL, &tied, 0, 0, 0, 0, 0},
                               {fixed[0].name, MT_FIELD_BOOL, &fixed[0].value, 0, 0, 0, 0, 0},
                               {fixed[1].name, MT_FIELD_BOOL, &fixed[1].value, 0, 0, 0, 0, 0}};
    MT_TRY(mti_config_numbers(c, numbers, MTI_LENGTH(numbers), fields, MTI_LENGTH(fields)));
    if (strcmp(positions, "absolute") != 0)
        return mti_config_refuse_text(c, "position_embedding_type", positions, "absolute");
    MT_TRY(mti_config_activation(c, "hidden_act", activation, &l->activation));
    MT_TRY(mti_config_fixed(c, fixed, MTI_LENGTH(fixed)));
    MT_TRY(mti_config_eps(c, "layer_norm_eps", eps));
    if (l->hidden % l->heads != 0)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: hidden_size is %lld, must be a multiple of num_attention_heads %lld",
                       c->path, (long long)l->hidden, (long long)l->heads);
    l->norm.placement = MT_POST_LN;
    l->norm.eps = (float)eps;
    out->d.untied_head = !tied;
    return MT_SUCCESS;
}

/* The beginnings of the names of classes of transformers, and their model_type. */
static const char *const mti_families[][2] = {{"GPT2", "gpt2"}, {"Llama", "llama"}, {"Bert", "bert"}};

/* Returns the model_type of a class such as BertForMaskedLM, or NULL for a class of another family. */
static const char *mti_family_of(const char *architecture) {
    static const char *const endings[] = {"Model", "LMHeadModel", "DoubleHeadsModel", "For"};
    int i, k;
    for (i = 0; i < MTI_LENGTH(mti_families); i++) {
        size_t n = strlen(mti_families[i][0]);
        for (k = 0; strncmp(architecture, mti_families[i][0], n) == 0 && k < MTI_LENGTH(endings); k++)
            if (strncmp(architecture + n, endings[k], strlen(endings[k])) == 0) return mti_families[i][1];
    }
    return NULL;
}

/* Writes the family of the model. Without a model_type it is that of the class in architectures. Without both, a BERT
   is a BERT, as for transformers' BertModel.from_pretrained, and a GPT may be of two families. */
static mt_status mti_config_family(const mti_config *c, int is_bert, char type[64]) {
    char architecture[64] = "";
    const char *family;
    const char *wanted = is_bert ? "a class of BERT" : "a class of GPT2 or Llama";
    const mt_field fields[] = {{"model_type", MT_FIELD_TEXT, type, 0, 0, 64, 0, 1},
                               {"architectures.0", MT_FIELD_TEXT, architecture, 0, 0, sizeof architecture, 0, 1}};
    type[0] = 0;
    MT_TRY(mti_config_fields(c, fields, 2));
    if (type[0]) return MT_SUCCESS;
    family = architecture[0] ? mti_family_of(architecture) : is_bert ? "bert" : NULL;
    if (family && is_bert == (strcmp(family, "bert") == 0)) {
        snprintf(type, 64, "%s", family);
        return MT_SUCCESS;
    }
    if (architecture[0]) return mti_config_refuse_text(c, "architectures", architecture, wanted);
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: has no model_type, must have gpt2 or llama, or %s in architectures",
                   c->path, wanted);
}
