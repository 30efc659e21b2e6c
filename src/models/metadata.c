/* ---- what a checkpoint says of its model ------------------------------------------------------------------------- */

#pragma once
#include "config_values.c"

/* Returns 1 for the text of the integer 0 or of the float 0. */
static int mti_is_zero_text(const char *text) {
    text += strspn(text, "0.");
    return *text == 0 || *text == 'e';
}

static const char *mti_described_metadata(mti_described *m, int index, char *value) {
    mt_field f;
    int i, n = 0;
    for (i = 0; i < MTI_LENGTH(mti_fields); i++) {
        if (!mti_described_field(m, i, &f)) continue;
        mt_field_text(&f, value);
        if (mti_fields[i].optional && mti_is_zero_text(value)) continue;
        if (n++ == index) return f.name;
    }
    return NULL;
}

static const char *mti_gpt_metadata(const void *model, int index, char *value) {
    mti_described m = mti_describe_gpt(&((const mt_gpt *)model)->desc);
    return mti_described_metadata(&m, index, value);
}

static const char *mti_bert_metadata(const void *model, int index, char *value) {
    mti_described m = mti_describe_bert(&((const mt_bert *)model)->desc);
    return mti_described_metadata(&m, index, value);
}

/* Returns 1 when the metadata describe a model. */
static int mti_described_has(const mt_safetensors_set *files, int is_bert) {
    return mt_safetensors_metadata(mt_safetensors_set_file(files, 0), is_bert ? "bert.vocab" : "gpt.vocab") != NULL;
}

/* Reads the fields from the metadata of a file. Only is_bert of *out is set. */
static mt_status mti_described_read(mt_context *ctx, const mt_safetensors *file, mti_described *out) {
    mt_field f;
    float x;
    int i;
    for (i = 0; i < MTI_LENGTH(mti_fields); i++) {
        if (!mti_described_field(out, i, &f)) continue;
        if (mti_fields[i].optional && !mt_safetensors_metadata(file, f.name)) continue;
        MT_TRY(mt_safetensors_fields(ctx, file, &f, 1));
    }
    for (i = 0; i < MTI_LENGTH(mti_fields); i++) {
        if (!mti_described_field(out, i, &f) || f.kind != MT_FIELD_F32 || f.low < 0) continue;
        memcpy(&x, f.value, sizeof x);
        if (!(x >= 0.0f) || (f.low && x == 0.0f))
            return mt_safetensors_refuse(ctx, file, f.name, f.low ? "above 0" : "at least 0");
    }
    return MT_SUCCESS;
}

/* The head of a BERT is tied. An encoder has no head, so it does not matter what its config.json says; and a head that
   is not tied may have the same weight, which import compares. */
static mt_status mti_bert_tied(mt_context *ctx, const char *directory, const mt_safetensors_set *files,
                               mti_described *m) {
    int has_head = mt_safetensors_set_find(files, "cls.predictions.transform.dense.weight") != NULL;
    int has_weight = mt_safetensors_set_find(files, "cls.predictions.decoder.weight") != NULL;
    if (m->d.untied_head && has_head && !has_weight)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s/config.json: tie_word_embeddings is false, must be true: the files have no "
                       "cls.predictions.decoder.weight",
                       directory);
    m->d.untied_head = 0;
    return MT_SUCCESS;
}

/* Reads the model from the metadata of the first file or, when the metadata has none, from config.json. *known is 0
   when neither has one. What the config.json of a BERT does not tell is in the tensors. */
static mt_status mti_described_source(mt_context *ctx, const char *directory, const mt_safetensors_set *files,
                                      int is_bert, int *known, mti_described *out) {
    memset(out, 0, sizeof *out);
    out->is_bert = is_bert;
    *known = 1;
    if (mti_described_has(files, is_bert)) return mti_described_read(ctx, mt_safetensors_set_file(files, 0), out);
    MT_TRY(mti_config_open(ctx, directory, known, out));
    if (!is_bert) return MT_SUCCESS;
    out->no_binary_head = !mt_safetensors_set_find(files, "cls.seq_relationship.weight");
    return mti_bert_tied(ctx, directory, files, out);
}

/* Writes the value of a field, in words if it has some. */
static const char *mti_described_value(mti_described *m, int i, char text[MT_FIELD_TEXT_MAX]) {
    mt_field f;
    int value = 0;
    mti_described_field(m, i, &f);
    mt_field_text(&f, text);
    if (!mti_fields[i].words) return text;
    memcpy(&value, f.value, sizeof value);
    mt_enum_word(mti_fields[i].words, value, text);
    return text;
}

/* -- tensors that are no parameters: transformers computes their values anew, and does not read them -- */

/* A constant that files of transformers may have: the end of its name, and what it is. */
typedef enum mti_known_constant {
    MTI_MASK,
    MTI_MASK_VALUE,
    MTI_FREQUENCIES,
    MTI_POSITIONS,
    MTI_CONSTANTS
} mti_known_constant;
static const char *const mti_constants[][2] = {{".attn.bias", "the causal mask"},
                                               {".attn.masked_bias", "-10000 or less"},
                                               {".rotary_emb.inv_freq", "the frequencies of rope_theta"},
                                               {"embeddings.position_ids", "0, 1, 2, ..."}};

static int mti_ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* Returns element i of the bytes of a tensor, or NAN for a type that no constant has. */
static double mti_constant_element(const char *dtype, const unsigned char *bytes, int64_t i) {
    int64_t whole;
    double wide;
    uint16_t bits;
    float x;
    if (strcmp(dtype, "BOOL") == 0 || strcmp(dtype, "U8") == 0) return bytes[i];
    memcpy(&wide, bytes + 8 * i, sizeof wide);
    memcpy(&whole, bytes + 8 * i, sizeof whole);
    if (strcmp(dtype, "I64") == 0) return (double)whole;
    if (strcmp(dtype, "F64") == 0) return wide;
    memcpy(&x, bytes + 4 * i, sizeof x);
    if (strcmp(dtype, "F32") == 0) return (double)x;
    memcpy(&bits, bytes + 2 * i, sizeof bits);
    if (strcmp(dtype, "BF16") != 0 && strcmp(dtype, "F16") != 0) return NAN;
    mt_f32_from_16bit(strcmp(dtype, "BF16") == 0 ? MT_BF16 : MT_F16, &bits, &x, 1);
    return (double)x;
}

/* Returns 1 when x is the constant's element i in a tensor whose last size is n. Frequencies may have been rounded to
   16 bits. */
static int mti_constant_is(const mti_described *m, mti_known_constant which, int64_t i, int64_t n, double x) {
    double frequency =
        which == MTI_FREQUENCIES ? pow((double)m->d.layer.scores.rotary_base, -(double)i / (double)n) : 0;
    if (which == MTI_MASK) return x == (i % n <= i / n % n);
    if (which == MTI_MASK_VALUE) return x <= -9900; /* -10000 in bf16 is -9984 */
    if (which == MTI_FREQUENCIES) return fabs(x - frequency) <= 0.01 * frequency + 1e-7;
    return x == (double)(i % n);
}

/* Checks the shape of a constant. */
static int mti_constant_fits(const mti_described *m, mti_known_constant which, const mt_safetensors_tensor *t) {
    int64_t n = t->dims > 0 ? t->shape[t->dims - 1] : 1;
    if (which == MTI_MASK) return t->dims >= 2 && t->shape[t->dims - 2] == n;
    return which != MTI_FREQUENCIES || (t->dims == 1 && 2 * n == m->d.layer.hidden / m->d.layer.heads);
}

/* Writes whether a tensor has the values of a constant to *is. */
static mt_status mti_constant_read(mt_context *ctx, const mti_described *m, mti_known_constant which,
                                   const mt_safetensors_tensor *t, int *is) {
    enum { MTI_BLOCK_BYTES = 8192 };
    unsigned char block[MTI_BLOCK_BYTES + 8]; /* mti_constant_element reads 8 bytes of each element */
    int64_t elements = 1, size, per, i, k, last = t->dims > 0 ? t->shape[t->dims - 1] : 1;
    int d;
    for (d = 0; d < t->dims; d++) elements *= t->shape[d];
    *is = mti_constant_fits(m, which, t);
    if (!*is || elements == 0) return MT_SUCCESS;
    size = t->bytes / elements;
    per = size > 0 ? MTI_BLOCK_BYTES / 8 : 0;
    memset(block, 0, sizeof block);
    for (i = 0; i < elements && *is; i += per) {
        int64_t n = mt_min(per, elements - i);
        MT_TRY(mt_safetensors_read_bytes(ctx, t, i * size, n * size, block));
        for (k = 0; k < n && *is; k++)
            *is = mti_constant_is(m, which, i + k, last, mti_constant_element(t->dtype, block, k));
    }
    return MT_SUCCESS;
}

/* Warns of a constant with other values than transformers computes, because they are not used. */
static mt_status mti_constant_check(mt_context *ctx, const mti_described *m, const char *directory,
                                    const mt_safetensors_tensor *t) {
    char text[MT_PATH_MAX + 512];
    int which = 0, is = 1;
    while (which < MTI_CONSTANTS && !mti_ends_with(t->name, mti_constants[which][0])) which++;
    if (which < MTI_CONSTANTS) MT_TRY(mti_constant_read(ctx, m, (mti_known_constant)which, t, &is));
    if (is) return MT_SUCCESS;
    snprintf(text, sizeof text, "%s: '%.200s' is not %s; it is not used", directory, t->name, mti_constants[which][1]);
    mt_log(ctx, MT_LOG_WARNING, text);
    return MT_SUCCESS;
}

/* Returns 1 for a tensor of the pooler or of sentence order. */
static int mti_is_binary(const char *name) {
    return mti_ends_with(name, "pooler.dense.weight") || mti_ends_with(name, "pooler.dense.bias") ||
           strncmp(name, "cls.seq_relationship.", 21) == 0;
}

/* Looks at the tensors of files of transformers that are no parameters of the model. */
static mt_status mti_unused_check(mt_context *ctx, const mti_described *m, const char *directory,
                                  const mt_safetensors_set *files) {
    char text[MT_PATH_MAX + 512];
    const mt_safetensors *file;
    int f, i, unused = 0;
    text[0] = 0;
    for (f = 0; (file = mt_safetensors_set_file(files, f)) != NULL; f++)
        for (i = 0; i < mt_safetensors_count(file); i++) {
            const mt_safetensors_tensor *t = mt_safetensors_at(file, i);
            MT_TRY(mti_constant_check(ctx, m, directory, t));
            if (!m->is_bert || !m->no_binary_head || !mti_is_binary(t->name)) continue;
            if (unused++ == 0)
                snprintf(text, sizeof text,
                         "%s: '%.200s' is not used, because the model has no_binary_head; nor are the other tensors of "
                         "the pooler and of sentence order",
                         directory, t->name);
        }
    if (unused) mt_log(ctx, MT_LOG_WARNING, text);
    return MT_SUCCESS;
}

/* Returns MT_ERR_DATA when the files describe another model. */
static mt_status mti_described_check(mt_context *ctx, mti_described *ours, const mt_grid *grid, const char *directory,
                                     const mt_safetensors_set *files) {
    char their_text[MT_FIELD_TEXT_MAX], our_text[MT_FIELD_TEXT_MAX];
    mti_described theirs;
    mt_field f;
    int known, i;
    MT_TRY(mti_described_source(ctx, directory, files, ours->is_bert, &known, &theirs));
    if (!mti_described_has(files, ours->is_bert)) mti_described_adopt(&theirs, ours);
    i = known ? mti_described_differ(&theirs, ours) : -1;
    if (i < 0) return mt_comm_rank(grid->world) == 0 ? mti_unused_check(ctx, ours, directory, files) : MT_SUCCESS;
    mti_described_field(ours, i, &f);
    return mt_fail(ctx, MT_ERR_DATA, "%s: its model has %s %s, this one %s", directory, strchr(f.name, '.') + 1,
                   mti_described_value(&theirs, i, their_text), mti_described_value(ours, i, our_text));
}

static mt_status mti_gpt_check(mt_context *ctx, const void *model, const char *directory,
                               const mt_safetensors_set *files) {
    const mt_gpt *gpt = (const mt_gpt *)model;
    mti_described ours = mti_describe_gpt(&gpt->desc);
    return mti_described_check(ctx, &ours, gpt->model.grid, directory, files);
}

static mt_status mti_bert_check(mt_context *ctx, const void *model, const char *directory,
                                const mt_safetensors_set *files) {
    const mt_bert *bert = (const mt_bert *)model;
    mti_described ours = mti_describe_bert(&bert->desc);
    return mti_described_check(ctx, &ours, bert->model.grid, directory, files);
}

/* The same with a table of the program: only metadata describe the model. */
static mt_status mti_gpt_other_check(mt_context *ctx, const void *model, const char *directory,
                                     const mt_safetensors_set *files) {
    return mti_described_has(files, 0) ? mti_gpt_check(ctx, model, directory, files) : MT_SUCCESS;
}

static mt_status mti_bert_other_check(mt_context *ctx, const void *model, const char *directory,
                                      const mt_safetensors_set *files) {
    return mti_described_has(files, 1) ? mti_bert_check(ctx, model, directory, files) : MT_SUCCESS;
}

/* Without a table of the program, and with one. */
static const mt_checkpoint_format mti_gpt_formats[] = {
    {mti_gpt_metadata, mti_gpt_config, mti_gpt_check, mti_gpt_part},
    {mti_gpt_metadata, mti_given_config, mti_gpt_other_check, mti_gpt_part}};
static const mt_checkpoint_format mti_bert_formats[] = {
    {mti_bert_metadata, mti_bert_config, mti_bert_check, mti_bert_part},
    {mti_bert_metadata, mti_given_config, mti_bert_other_check, mti_bert_part}};

/* Part 0 is all of a parameter. */
#define MTI_PART_WORDS                                                                                                 \
    "0 MT_PART_QUERY MT_PART_KEY MT_PART_VALUE MT_PART_QUERY_PAIRS MT_PART_KEY_PAIRS MT_PART_GATE MT_PART_UP"

/* Checks the parts of a table of the program. mt_checkpoint_create checks the rest of it. */
static mt_status mti_model_parts_check(mt_context *ctx, const char *function, const mt_tensor_table *table) {
    char field[48];
    int i;
    for (i = 0; table->names && i < table->count; i++) {
        if (!table->names[i].param) continue;
        snprintf(field, sizeof field, "table.names[%d].part", i);
        MT_TRY(mt_check_enum(ctx, function, table->names[i].param, field, table->names[i].part, MTI_PART_WORDS));
    }
    return MT_SUCCESS;
}

/* Checks the arguments. */
static mt_status mti_model_checkpoint_check(mt_context *ctx, const char *function, const mt_params *params,
                                            const mt_language_model *model, const mt_checkpoint_desc *desc) {
    const mt_param *weight = model->layers ? model->layers[0].attention.proj.weight : NULL; /* every stage has it */
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", function);
    if (!weight) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the model was not created", function);
    if (mt_params_find(params, weight->name) != weight)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the model is not of this registry", function);
    if (desc->format || desc->model)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc.%s is set, the model has its own", function,
                       desc->format ? "format" : "model");
    return desc->table ? mti_model_parts_check(ctx, function, desc->table) : MT_SUCCESS;
}

MT_API mt_status mt_gpt_checkpoint_create(mt_context *ctx, mt_params *params, const mt_gpt *gpt,
                                          const mt_checkpoint_desc *desc, mt_checkpoint **out) {
    static const char *const function = "mt_gpt_checkpoint_create";
    mt_checkpoint_desc d;
    mti_described m;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!gpt) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: gpt is NULL", function);
    MT_TRY(mti_model_checkpoint_check(ctx, function, params, &gpt->model, desc));
    m = mti_describe_gpt(&gpt->desc);
    d = *desc;
    d.format = &mti_gpt_formats[desc->table != NULL];
    if (!desc->table) d.table = mti_described_table(&m);
    d.model = gpt;
    return mt_checkpoint_create(ctx, params, &d, out);
}

MT_API mt_status mt_bert_checkpoint_create(mt_context *ctx, mt_params *params, const mt_bert *bert,
                                           const mt_checkpoint_desc *desc, mt_checkpoint **out) {
    static const char *const function = "mt_bert_checkpoint_create";
    mt_checkpoint_desc d;
    mti_described m;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!bert) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: bert is NULL", function);
    MT_TRY(mti_model_checkpoint_check(ctx, function, params, &bert->model, desc));
    m = mti_describe_bert(&bert->desc);
    d = *desc;
    d.format = &mti_bert_formats[desc->table != NULL];
    if (!desc->table) d.table = mti_described_table(&m);
    d.model = bert;
    return mt_checkpoint_create(ctx, params, &d, out);
}

static mt_status mti_desc_read(mt_context *ctx, const char *function, const char *directory, const void *out,
                               int is_bert, mti_described *theirs) {
    mt_safetensors_set *files;
    mt_status status;
    int known;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, directory ? "out" : "directory");
    MT_TRY(mt_safetensors_set_open(ctx, directory, "model", &files));
    status = mti_described_source(ctx, directory, files, is_bert, &known, theirs);
    mt_safetensors_set_close(files);
    if (status != MT_SUCCESS || known) return status;
    return mt_fail(ctx, MT_ERR_DATA, "%s: neither the metadata of its model nor a config.json describes a %s",
                   directory, is_bert ? "BERT" : "GPT");
}

MT_API mt_status mt_gpt_desc_read(mt_context *ctx, const char *directory, mt_gpt_desc *out) {
    mti_described m;
    MT_TRY(mti_desc_read(ctx, "mt_gpt_desc_read", directory, out, 0, &m));
    *out = m.d;
    return MT_SUCCESS;
}

MT_API mt_status mt_bert_desc_read(mt_context *ctx, const char *directory, mt_bert_desc *out) {
    mti_described m;
    MT_TRY(mti_desc_read(ctx, "mt_bert_desc_read", directory, out, 1, &m));
    memset(out, 0, sizeof *out);
    out->vocab = m.d.vocab;
    out->layers = m.d.layers;
    out->max_seq = m.d.max_seq;
    out->layer = m.d.layer;
    out->no_binary_head = m.no_binary_head;
    out->token_types = m.token_types;
    return MT_SUCCESS;
}
