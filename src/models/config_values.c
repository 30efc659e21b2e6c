/* ---- values that a config.json has under several names or in several places -------------------------------------- */

#pragma once
#include "names.c"
#include "layer_types.c"

/* A value of the model. names[0] is its name in files of the family; the others are of other families, or NULL. */
typedef struct mti_same {
    const char *names[4];
    mt_field_kind kind; /* MT_FIELD_I64, MT_FIELD_F32 or MT_FIELD_BOOL */
    const void *value;
} mti_same;

/* Writes the value of a field for a message. */
static void mti_same_text(mt_field *f, void *value, char text[MT_FIELD_TEXT_MAX]) {
    float x = 0;
    f->value = value;
    mt_field_text(f, text);
    if (f->kind == MT_FIELD_BOOL) snprintf(text, MT_FIELD_TEXT_MAX, text[0] == '0' ? "false" : "true");
    if (f->kind != MT_FIELD_F32) return;
    memcpy(&x, value, sizeof x);
    snprintf(text, MT_FIELD_TEXT_MAX, "%.7g", (double)x);
}

/* Refuses another value under the name number k of `same` at a place. */
static mt_status mti_config_same(const mti_config *c, const mti_same *same, int k, int place) {
    char name[64], theirs[MT_FIELD_TEXT_MAX], ours[MT_FIELD_TEXT_MAX];
    int64_t value = 0, own = 0;
    mt_json_part part;
    mt_field field;
    if (!mti_config_at(c, place, same->names[k], &part)) return MT_SUCCESS;
    snprintf(name, sizeof name, "%s%s", mti_config_objects[place], same->names[k]);
    memset(&field, 0, sizeof field);
    field.name = name;
    field.kind = same->kind;
    field.value = &value;
    MT_TRY(mti_config_fields(c, &field, 1));
    memcpy(&own, same->value, same->kind == MT_FIELD_I64 ? sizeof(int64_t) : sizeof(int));
    mti_same_text(&field, &value, theirs);
    mti_same_text(&field, &own, ours);
    if (strcmp(theirs, ours) == 0) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %s, but %s%s is %s", c->path, name, theirs, same->names[0],
                   mti_config_at(c, 0, same->names[0], &part) ? "" : " (by default or another name)", ours);
}

/* Refuses other values of the model under any name that one of the families has, at every place. transformers reads
   only the names of its family, without a word about others. */
static mt_status mti_config_agree(const mti_config *c, const char *type, const mti_described *m) {
    const mt_transformer_layer_desc *l = &m->d.layer;
    int gpt2 = strcmp(type, "gpt2") == 0, tied = !m->d.untied_head, biases = !l->no_bias, i, k;
    int64_t head_dim = l->hidden / l->heads;
    const char *eps = gpt2 ? "layer_norm_epsilon" : m->is_bert ? "layer_norm_eps" : "rms_norm_eps";
    const mti_same list[] = {
        {{"vocab_size", NULL, NULL, NULL}, MT_FIELD_I64, &m->d.vocab},
        {{gpt2 ? "n_positions" : "max_position_embeddings", gpt2 ? "max_position_embeddings" : "n_positions", "n_ctx",
          NULL},
         MT_FIELD_I64,
         &m->d.max_seq},
        {{gpt2 ? "n_embd" : "hidden_size", gpt2 ? "hidden_size" : "n_embd", NULL, NULL}, MT_FIELD_I64, &l->hidden},
        {{gpt2 ? "n_layer" : "num_hidden_layers", gpt2 ? "num_hidden_layers" : "n_layer", NULL, NULL},
         MT_FIELD_I64,
         &m->d.layers},
        {{gpt2 ? "n_head" : "num_attention_heads", gpt2 ? "num_attention_heads" : "n_head", NULL, NULL},
         MT_FIELD_I64,
         &l->heads},
        {{gpt2 ? "n_inner" : "intermediate_size", gpt2 ? "intermediate_size" : "n_inner", NULL, NULL},
         MT_FIELD_I64,
         &l->ffn},
        {{"num_key_value_heads", NULL, NULL, NULL}, MT_FIELD_I64, &l->kv_heads},
        {{"head_dim", NULL, NULL, NULL}, MT_FIELD_I64, &head_dim},
        {{eps, "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"}, MT_FIELD_F32, &l->norm.eps},
        {{"tie_word_embeddings", NULL, NULL, NULL}, MT_FIELD_BOOL, &tied},
        {{"attention_bias", "mlp_bias", NULL, NULL}, MT_FIELD_BOOL, &biases},
        {{"type_vocab_size", NULL, NULL, NULL}, MT_FIELD_I64, &m->token_types}};
    int count = MTI_LENGTH(list) - !m->is_bert; /* a GPT has no token types */
    for (i = 0; i < count * 4; i++)
        for (k = 0; list[i / 4].names[i % 4] && k < MTI_PLACES; k++) MT_TRY(mti_config_same(c, &list[i / 4], i % 4, k));
    return MT_SUCCESS;
}

/* Reads a text of a place into text; "": the file does not have it. */
static mt_status mti_config_text(const mti_config *c, int place, const char *name, char path[64], char text[64]) {
    mt_field field;
    memset(&field, 0, sizeof field);
    snprintf(path, 64, "%s%s", mti_config_objects[place], name);
    text[0] = 0;
    field.name = path;
    field.kind = MT_FIELD_TEXT;
    field.value = text;
    field.bytes = 64;
    field.nullable = 1;
    return mti_config_fields(c, &field, 1);
}

/* Refuses another activation than the model's under one of its names. */
static mt_status mti_config_activations(const mti_config *c, const char *type, const mti_described *m) {
    static const char *const names[] = {"activation_function", "hidden_act", "hidden_activation"};
    char path[64], text[64];
    int i;
    for (i = 0; i < MTI_LENGTH(names) * MTI_PLACES; i++) {
        MT_TRY(mti_config_text(c, i % MTI_PLACES, names[i / MTI_PLACES], path, text));
        if (text[0] && mti_activation_named(text) != (int)m->d.layer.activation)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is '%s', but %s is %s", c->path, path, text,
                           names[strcmp(type, "gpt2") != 0], mti_activation_text(m->d.layer.activation));
    }
    return MT_SUCCESS;
}

/* Refuses a class of another family than model_type. A class of no family says nothing: programs have their own. */
static mt_status mti_config_families(const mti_config *c, const char *type) {
    char name[64] = "", path[64];
    const mt_field field = {"architectures.0", MT_FIELD_TEXT, name, 0, 0, sizeof name, 0, 1};
    const char *family;
    MT_TRY(mti_config_fields(c, &field, 1));
    family = mti_family_of(name);
    if (family && strcmp(family, type) != 0)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: architectures is '%s', but model_type is '%s'", c->path, name, type);
    MT_TRY(mti_config_text(c, 1, "model_type", path, name));
    if (!name[0] || strcmp(name, type) == 0) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: text_config.model_type is '%s', but model_type is '%s'", c->path, name,
                   type);
}

/* Refuses two types of weights. The library reads the type of each tensor from the files. */
static mt_status mti_config_dtypes(const mti_config *c) {
    static const char *const names[] = {"dtype", "torch_dtype"};
    char first[64] = "", first_path[64] = "", path[64], text[64];
    int i;
    for (i = 0; i < MTI_LENGTH(names) * MTI_PLACES; i++) {
        const char *type = text;
        MT_TRY(mti_config_text(c, i / 2, names[i % 2], path, text));
        if (strncmp(text, "torch.", 6) == 0) type += 6;
        if (first[0] && type[0] && strcmp(first, type) != 0)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is '%s', but %s is '%s'", c->path, path, type, first_path,
                           first);
        if (first[0] || !type[0]) continue;
        snprintf(first, sizeof first, "%s", type);
        snprintf(first_path, sizeof first_path, "%s", path);
    }
    return MT_SUCCESS;
}

/* Reads the config.json of a GPT or, when out->is_bert is 1, of a BERT. */
static mt_status mti_config_read(const mti_config *c, mti_described *out) {
    char type[64];
    mti_described m;
    int place;
    memset(&m, 0, sizeof m);
    m.is_bert = out->is_bert;
    MT_TRY(mti_config_family(c, m.is_bert, type));
    if (m.is_bert && strcmp(type, "bert") == 0) MT_TRY(mti_bert_read(c, &m));
    else if (!m.is_bert && strcmp(type, "gpt2") == 0) MT_TRY(mti_gpt2_read(c, &m.d));
    else if (!m.is_bert && strcmp(type, "llama") == 0) MT_TRY(mti_llama_read(c, &m.d));
    else return mti_config_refuse_text(c, "model_type", type, m.is_bert ? "bert" : "gpt2 or llama");
    MT_TRY(mti_config_plain(c));
    mti_described_plain(&m);
    MT_TRY(mti_config_families(c, type));
    MT_TRY(mti_config_agree(c, type, &m));
    MT_TRY(mti_config_activations(c, type, &m));
    MT_TRY(mti_config_dtypes(c));
    for (place = 0; place < MTI_PLACES; place++) MT_TRY(mti_config_types(c, place, &m));
    *out = m;
    return MT_SUCCESS;
}

/* Reads DIRECTORY/config.json. *exists is 0, and *out unchanged, when there is no such file. */
static mt_status mti_config_open(mt_context *ctx, const char *directory, int *exists, mti_described *out) {
    mti_config c;
    char *text;
    mt_status status;
    memset(&c, 0, sizeof c);
    c.ctx = ctx;
    snprintf(c.path, sizeof c.path, "%.*s/config.json", MT_PATH_MAX - 16, directory);
    MT_TRY(mt_json_text(ctx, directory, "config.json", MTI_CONFIG_BYTES, &text, exists));
    c.text = text;
    status = text ? mti_config_read(&c, out) : MT_SUCCESS;
    mt_host_free(text);
    return status;
}

static const char *mti_float_text(float x, char *text) {
    mt_field f;
    memset(&f, 0, sizeof f);
    f.kind = MT_FIELD_F32;
    f.value = &x;
    mt_field_text(&f, text);
    return text;
}

/* Writes a config.json of a GPT-2. bos_token_id and eos_token_id are 50256 with GPT-2's vocabulary of 50257 tokens, and
   null with any other. */
static int mti_gpt2_write(const mt_gpt_desc *d, char *text, size_t bytes) {
    char eps[MT_FIELD_TEXT_MAX], embedding[MT_FIELD_TEXT_MAX], attention[MT_FIELD_TEXT_MAX], hidden[MT_FIELD_TEXT_MAX];
    int has_end = d->vocab == 50257;
    return snprintf(
        text, bytes,
        "{\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n"
        "  \"activation_function\": \"%s\",\n  \"vocab_size\": %lld,\n  \"n_positions\": %lld,\n"
        "  \"n_embd\": %lld,\n  \"n_layer\": %lld,\n  \"n_head\": %lld,\n  \"n_inner\": %lld,\n"
        "  \"layer_norm_epsilon\": %s,\n  \"embd_pdrop\": %s,\n  \"attn_pdrop\": %s,\n"
        "  \"resid_pdrop\": %s,\n  \"bos_token_id\": %s,\n  \"eos_token_id\": %s,\n"
        "  \"tie_word_embeddings\": %s\n}\n",
        mti_activation_text(d->layer.activation), (long long)d->vocab, (long long)d->max_seq,
        (long long)d->layer.hidden, (long long)d->layers, (long long)d->layer.heads, (long long)d->layer.ffn,
        mti_float_text(d->layer.norm.eps, eps), mti_float_text(d->embedding_dropout, embedding),
        mti_float_text(d->layer.dropout.attention, attention), mti_float_text(d->layer.dropout.hidden, hidden),
        has_end ? "50256" : "null", has_end ? "50256" : "null", d->untied_head ? "false" : "true");
}

/* Writes a config.json of a Llama. The token ids are null, because the library does not know them. */
static int mti_llama_write(const mt_gpt_desc *d, char *text, size_t bytes) {
    char eps[MT_FIELD_TEXT_MAX], theta[MT_FIELD_TEXT_MAX], attention[MT_FIELD_TEXT_MAX];
    const char *biases = d->layer.no_bias ? "false" : "true";
    mti_float_text(d->layer.scores.rotary_base, theta);
    return snprintf(text, bytes,
                    "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\",\n"
                    "  \"hidden_act\": \"silu\",\n  \"vocab_size\": %lld,\n  \"max_position_embeddings\": %lld,\n"
                    "  \"hidden_size\": %lld,\n  \"num_hidden_layers\": %lld,\n  \"num_attention_heads\": %lld,\n"
                    "  \"num_key_value_heads\": %lld,\n  \"head_dim\": %lld,\n  \"intermediate_size\": %lld,\n"
                    "  \"rms_norm_eps\": %s,\n  \"rope_theta\": %s,\n"
                    "  \"rope_parameters\": {\"rope_theta\": %s, \"rope_type\": \"default\"},\n"
                    "  \"attention_bias\": %s,\n  \"mlp_bias\": %s,\n  \"attention_dropout\": %s,\n"
                    "  \"bos_token_id\": null,\n  \"eos_token_id\": null,\n  \"tie_word_embeddings\": %s\n}\n",
                    (long long)d->vocab, (long long)d->max_seq, (long long)d->layer.hidden, (long long)d->layers,
                    (long long)d->layer.heads, (long long)d->layer.kv_heads,
                    (long long)(d->layer.hidden / d->layer.heads), (long long)d->layer.ffn,
                    mti_float_text(d->layer.norm.eps, eps), theta, theta, biases, biases,
                    mti_float_text(d->layer.dropout.attention, attention), d->untied_head ? "false" : "true");
}

/* Writes a config.json of a BERT of the class `head`. */
static int mti_bert_write(const mti_described *m, const char *head, char *text, size_t bytes) {
    char eps[MT_FIELD_TEXT_MAX], attention[MT_FIELD_TEXT_MAX], hidden[MT_FIELD_TEXT_MAX];
    return snprintf(text, bytes,
                    "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"bert\",\n  \"hidden_act\": \"%s\",\n"
                    "  \"vocab_size\": %lld,\n  \"max_position_embeddings\": %lld,\n  \"type_vocab_size\": %lld,\n"
                    "  \"hidden_size\": %lld,\n  \"num_hidden_layers\": %lld,\n  \"num_attention_heads\": %lld,\n"
                    "  \"intermediate_size\": %lld,\n  \"layer_norm_eps\": %s,\n"
                    "  \"attention_probs_dropout_prob\": %s,\n  \"hidden_dropout_prob\": %s,\n"
                    "  \"pad_token_id\": null,\n  \"tie_word_embeddings\": true\n}\n",
                    head, mti_activation_text(m->d.layer.activation), (long long)m->d.vocab, (long long)m->d.max_seq,
                    (long long)m->token_types, (long long)m->d.layer.hidden, (long long)m->d.layers,
                    (long long)m->d.layer.heads, (long long)m->d.layer.ffn, mti_float_text(m->d.layer.norm.eps, eps),
                    mti_float_text(m->d.layer.dropout.attention, attention),
                    mti_float_text(m->d.layer.dropout.hidden, hidden));
}

/* Replaces the value of a member at each place that has it. The text has room for it. */
static void mti_config_set(char *text, const char *name, const char *value) {
    size_t n = strlen(value);
    mt_json_part part;
    int i;
    for (i = 0; i < MTI_PLACES; i++) {
        char *from;
        if (!mti_config_find(text, i, name, &part)) continue;
        from = text + (part.text - text);
        memmove(from + n, from + part.bytes, strlen(from + part.bytes) + 1);
        memcpy(from, value, n);
    }
}

/* Returns 1 when the member of the object in text contains a word. */
static int mti_config_has(const char *text, const char *name, const char *word) {
    mt_json_part part;
    const char *at = mti_config_find(text, 0, name, &part) ? strstr(part.text, word) : NULL;
    return at && at < part.text + part.bytes;
}

/* Adds a member to the object in text, as the first one, if it does not have the member. The text has room for it. */
static void mti_config_add(char *text, const char *name, const char *value) {
    char member[64], *begin = strchr(text, '{');
    mt_json_part part;
    size_t n;
    if (!begin || mti_config_find(text, 0, name, &part)) return;
    begin++;
    snprintf(member, sizeof member, "\n  \"%s\": \"%s\"%s", name, value,
             begin[strspn(begin, " \t\r\n")] == '}' ? "" : ",");
    n = strlen(member);
    memmove(begin + n, begin, strlen(begin) + 1);
    memcpy(begin, member, n);
}

/* Copies a config.json that describes the same model, with the type that the files have and the head that they have
   names for. max_seq is the number of positions; 0: as it is. Returns the length of the text. */
static int mti_config_keep(const char *given, int64_t max_seq, mt_dtype dtype, const char *head, char *text,
                           size_t bytes) {
    const char *type = dtype == MT_BF16 ? "\"bfloat16\"" : dtype == MT_F16 ? "\"float16\"" : "\"float32\"";
    static const char *const positions[] = {"max_position_embeddings", "n_positions", "n_ctx"};
    char value[64];
    int i;
    if (strlen(given) + 512 > bytes) return (int)strlen(given) + 512;
    memcpy(text, given, strlen(given) + 1);
    mti_config_set(text, "dtype", type);
    mti_config_set(text, "torch_dtype", type);
    snprintf(value, sizeof value, "[\"%s\"]", head);
    if (!mti_config_has(text, "architectures", head)) mti_config_set(text, "architectures", value);
    snprintf(value, sizeof value, "%lld", (long long)max_seq);
    for (i = 0; max_seq > 0 && i < MTI_LENGTH(positions); i++) mti_config_set(text, positions[i], value);
    mti_config_add(text, "model_type", mti_family_of(head));
    if (strncmp(head, "Bert", 4) == 0) mti_config_set(text, "tie_word_embeddings", "true");
    return (int)strlen(text);
}

/* The layout of QKV and the form of rotary positions in a file of Hugging Face are converted to those of the model. */
static void mti_described_adopt(mti_described *theirs, const mti_described *ours) {
    if (!mti_described_table(ours)) return;
    theirs->d.layer.qkv_layout = ours->d.layer.qkv_layout;
    theirs->d.layer.scores.rotary_form = ours->d.layer.scores.rotary_form;
}

/* Returns 1 when the text of a config.json describes the model. *theirs becomes what it describes. */
static int mti_config_is_of(const char *text, const mti_described *m, mti_described *theirs) {
    mti_described ours = *m;
    mti_config c;
    if (!text) return 0;
    *theirs = *m;
    memset(&c, 0, sizeof c);
    c.text = text;
    if (mti_config_read(&c, theirs) != MT_SUCCESS) return 0;
    mti_described_adopt(theirs, m);
    return mti_described_differ(theirs, &ours) < 0;
}

/* Writes the text of config.json. dtype is the type of the parameters. A kept text that no longer says one thing, for
   example because of a window that is shorter than the new number of positions, is written anew. */
static int mti_described_config(mti_described *m, mt_dtype dtype, const char *given, char *text, size_t bytes) {
    const char *head = mti_is_llama(m) ? "LlamaForCausalLM" : "GPT2LMHeadModel";
    mti_described theirs = *m;
    if (!mti_described_table(m)) return 0;
    if (m->is_bert) head = m->no_binary_head ? "BertForMaskedLM" : "BertForPreTraining";
    if (mti_config_is_of(given, m, &theirs)) {
        int length =
            mti_config_keep(given, theirs.d.max_seq == m->d.max_seq ? 0 : m->d.max_seq, dtype, head, text, bytes);
        if (length >= (int)bytes || mti_config_is_of(text, m, &theirs)) return length;
    }
    if (m->is_bert) return mti_bert_write(m, head, text, bytes);
    return mti_is_llama(m) ? mti_llama_write(&m->d, text, bytes) : mti_gpt2_write(&m->d, text, bytes);
}

static int mti_gpt_config(const void *model, const char *given, char *text, size_t bytes) {
    const mt_gpt *gpt = (const mt_gpt *)model;
    mti_described m = mti_describe_gpt(&gpt->desc);
    return mti_described_config(&m, gpt->model.tokens.weight->value.dtype, given, text, bytes);
}

static int mti_bert_config(const void *model, const char *given, char *text, size_t bytes) {
    const mt_bert *bert = (const mt_bert *)model;
    mti_described m = mti_describe_bert(&bert->desc);
    return mti_described_config(&m, bert->model.tokens.weight->value.dtype, given, text, bytes);
}

/* Copies the config.json of a model with a table of the program. */
static int mti_given_config(const void *model, const char *given, char *text, size_t bytes) {
    (void)model;
    return given ? snprintf(text, bytes, "%s", given) : 0;
}
