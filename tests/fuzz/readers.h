/* readers.h - shared by fuzz_readers.c and test_safetensors.c: passes arbitrary bytes as a whole file to every reader
   of megatron.h, and checks what must hold for accepted files. Include it after the implementation of megatron.h. */

#ifndef MT_FUZZ_READERS_H
#define MT_FUZZ_READERS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define READERS_HOLD(condition)                                                                                        \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A status is MT_SUCCESS, or an error with a message that names the file. */
static inline void readers_status(mt_context *ctx, mt_status status) {
    READERS_HOLD(status == MT_SUCCESS || status == MT_ERR_DATA || status == MT_ERR_IO || status == MT_ERR_ARGUMENT);
    if (status != MT_SUCCESS) READERS_HOLD(strstr(mt_last_error(ctx), "fuzz") != NULL);
    ctx->error[0] = 0;
}

/* The tensors of an accepted file lie inside the file, and together cover its data. */
static inline void readers_tensors(mt_context *ctx, const mt_safetensors *s, const unsigned char *bytes, size_t size) {
    int64_t sum = 0;
    for (int i = 0; i < mt_safetensors_count(s); i++) {
        const mt_safetensors_tensor *t = mt_safetensors_at(s, i);
        const unsigned char *data = (const unsigned char *)t->data;
        READERS_HOLD(t->bytes >= 0 && data >= bytes + 8 && data + t->bytes <= bytes + size);
        READERS_HOLD(mt_safetensors_find(s, t->name) == t);
        READERS_HOLD(t->dims >= 0 && t->dims <= MT_SAFETENSORS_DIMS);
        sum += t->bytes;
        float *values = (float *)malloc((size_t)t->bytes * 2 + 1);
        READERS_HOLD(values);
        mt_status status = mt_safetensors_read(ctx, t, values);
        READERS_HOLD(status == MT_SUCCESS || status == MT_ERR_DTYPE || status == MT_ERR_DATA);
        free(values);
    }
    READERS_HOLD(sum == s->data_bytes);
}

/* Reads the state of a run. If the file has one, its counters and its scale are valid, so that training can continue.
   Returns 1 if it has one. */
static inline int readers_state(mt_context *ctx, mt_safetensors *s) {
    mti_source source;
    mt_training_state state;
    mt_optimizer optimizer;
    float norm = 1.0f, overflow = INFINITY;
    memset(&source, 0, sizeof source);
    memset(&optimizer, 0, sizeof optimizer);
    source.model.files = source.optimizer.files = &s; /* both files of a checkpoint are this one */
    source.model.count = source.optimizer.count = 1;
    mt_status status = mti_source_state(ctx, &source, 7, &state, &optimizer);
    readers_status(ctx, status);
    if (status != MT_SUCCESS) return 0;
    READERS_HOLD(state.step == 7 && state.position >= 0 && optimizer.step >= 0);
    READERS_HOLD(state.position + state.step > 0 && optimizer.step + state.scaler.skipped + 1 > 0); /* no overflow */
    READERS_HOLD(memchr(state.note, 0, sizeof state.note));
    if (state.scaler.desc.initial_scale == 0.0f) return 1;
    READERS_HOLD(mt_loss_scaler_update(&state.scaler, &norm) > 0.0f);
    READERS_HOLD(mt_loss_scaler_update(&state.scaler, &overflow) == 0.0f);
    READERS_HOLD(state.scaler.scale >= state.scaler.desc.min_scale && state.scaler.scale <= FLT_MAX);
    return 1;
}

/* Opens a file that is in memory. */
static inline mt_status readers_parse(mt_context *ctx, mt_safetensors *s, const unsigned char *bytes, size_t size) {
    s->map.fd = -1;
    s->map.data = (void *)(uintptr_t)bytes;
    s->map.bytes = size;
    return mti_safetensors_parse(ctx, s);
}

/* Returns 1 if the bytes are a safetensors file, plus 8 if it is one of a checkpoint of step 7. */
static inline int readers_safetensors(mt_context *ctx, const unsigned char *bytes, size_t size) {
    mt_safetensors *s = (mt_safetensors *)calloc(1, sizeof *s);
    READERS_HOLD(s);
    snprintf(s->path, sizeof s->path, "fuzz");
    mt_status status = readers_parse(ctx, s, bytes, size);
    readers_status(ctx, status);
    int took = status == MT_SUCCESS;
    if (took) readers_tensors(ctx, s, bytes, size);
    if (took) took |= readers_state(ctx, s) << 3;
    mt_safetensors_close(s);
    return took;
}

/* Reads the bytes as an object or a list with lists, as the modules.json and the pooling of a sentence encoder. */
static inline mt_status readers_lists(mt_context *ctx, const unsigned char *bytes, size_t size) {
    char type[2][8] = {"", ""}, mode[3][8] = {"", "", ""};
    const mt_field fields[] = {{"0.type", MT_FIELD_TEXT, type[0], 0, 0, sizeof type[0], 0, 0},
                               {"1.type", MT_FIELD_TEXT, type[1], 0, 0, sizeof type[1], 0, 0},
                               {"m.0", MT_FIELD_TEXT, mode[0], 0, 0, sizeof mode[0], 0, 0},
                               {"m.1", MT_FIELD_TEXT, mode[1], 0, 0, sizeof mode[1], 0, 1},
                               {"m", MT_FIELD_TEXT, mode[2], 0, 0, sizeof mode[2], 0, 0}};
    mt_status status = mti_json_object(ctx, "fuzz", bytes, size, fields, 5);
    for (int i = 0; i < 2; i++) READERS_HOLD(memchr(type[i], 0, sizeof type[i]));
    for (int i = 0; i < 3; i++) READERS_HOLD(memchr(mode[i], 0, sizeof mode[i]));
    return status;
}

/* Reads the bytes as a config.json of a GPT and, if they describe one, writes it again as a save does. */
static inline int readers_config(mt_context *ctx, const unsigned char *bytes, size_t size) {
    mti_config config;
    mti_described gpt, bert;
    char *text = (char *)malloc(size + 1), *again = (char *)malloc(size + 4096);
    READERS_HOLD(text && again);
    memset(&config, 0, sizeof config);
    memset(&gpt, 0, sizeof gpt);
    memset(&bert, 0, sizeof bert);
    bert.is_bert = 1;
    memcpy(text, bytes, size);
    text[size] = 0;
    config.ctx = ctx;
    config.text = text;
    snprintf(config.path, sizeof config.path, "fuzz");
    readers_status(ctx, readers_lists(ctx, bytes, size));
    mt_status status = mti_json_object(ctx, "fuzz", bytes, size, NULL, 0); /* ends where the memory ends */
    if (status == MT_SUCCESS) status = mti_config_read(&config, &gpt);
    readers_status(ctx, status);
    if (status != MT_SUCCESS) readers_status(ctx, mti_config_read(&config, &bert));
    if (status == MT_SUCCESS) {
        int length = mti_config_keep(text, gpt.d.max_seq + 1, MT_BF16, "LlamaForCausalLM", again, size + 4096);
        READERS_HOLD(length < (int)size + 4096 && length == (int)strlen(again));
        READERS_HOLD(mt_json_parse(ctx, "again", again, NULL, 0) == MT_SUCCESS);
    }
    free(text);
    free(again);
    return status == MT_SUCCESS;
}

static inline int readers_index(mt_context *ctx, const unsigned char *bytes, size_t size) {
    mt_safetensors_set b;
    mti_json j = mti_json_begin(bytes, size);
    /* as in mti_set_open_index, of the exact size, so that a sanitizer detects reads beyond the end */
    char *text = (char *)malloc(size + 1);
    READERS_HOLD(text);
    memset(&b, 0, sizeof b);
    snprintf(b.path, sizeof b.path, "fuzz");
    mt_status status = mti_set_index(ctx, &b, "/dev/null/fuzz", &j, text, size + 1);
    readers_status(ctx, status);
    mti_set_close(&b);
    free(text);
    return status == MT_SUCCESS;
}

/* Bit i of the result: reader i accepted the bytes. The last bit is for the state of a run. */
static inline int readers_all(mt_context *ctx, const unsigned char *bytes, size_t size) {
    return readers_safetensors(ctx, bytes, size) | readers_config(ctx, bytes, size) << 1 |
           readers_index(ctx, bytes, size) << 2;
}

#endif /* MT_FUZZ_READERS_H */
