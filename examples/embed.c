/* embed - computes sentence embeddings with a BERT, on any number of tensor parallel ranks.

   cc -O3 -march=native -I. examples/embed.c -o embed -lm -lpthread
   ./embed tests/golden/bert_hf --ids tests/golden/embed/ids.txt
   ./embed DIR --tp 2 <ids.txt >vectors.txt
   ./embed DIR --ids ids.txt --out vectors.safetensors

   DIR has a BERT of Hugging Face (model.safetensors and config.json), such as a sentence encoder of the package
   sentence-transformers, or a checkpoint of an mt_bert. Each line of the input, the file --ids or the standard input,
   is one sentence: the numbers of its tokens, with those that the tokenizer adds at its ends ([CLS] and [SEP]). Each
   line of the output is its vector: the mean of the encoder's outputs over the tokens, or another mode of pooling that
   the files of the model name, scaled to the length 1, also if the model has no module Normalize. --normalize 0 leaves
   out the scaling. With --out the vectors are the tensor "embeddings" [sentences, hidden], F32, of a safetensors file,
   which must not be the input or a file of the model.
   Of a model with modules.json, the modules are Transformer and Pooling, and there may be a Normalize. The program
   refuses others, such as Dense, and several modes of pooling side by side. Without modules.json, 1_Pooling/config.json
   names the mode. The text of a sentence is the tokenizer's work, so do_lower_case and prompts have no effect here.
   The vectors are the same with every --tp, up to rounding. The input has at most 1 GiB. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* fstat: a strict -std=c99 hides it */
#endif
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define PROGRAM "embed"
#define FILES_ONLY
#include "train.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INPUT_MAX ((int64_t)1 << 30) /* bytes; a number of 4 bytes is kept for each */
enum { MODULES = 8, TEXT = 128 };    /* the most modules of a model that are read; bytes of a text */

/* How the vector of a sentence is made: the names that sentence-transformers has for it, since 5.4 and before. */
typedef enum pooling { MEAN, CLS, MAX, MEAN_SQRT_LEN, WEIGHTED_MEAN, LAST_TOKEN, POOLINGS } pooling;
static const char *const pooling_names[][2] = {{"mean", "pooling_mode_mean_tokens"},
                                               {"cls", "pooling_mode_cls_token"},
                                               {"max", "pooling_mode_max_tokens"},
                                               {"mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"},
                                               {"weightedmean", "pooling_mode_weightedmean_tokens"},
                                               {"lasttoken", "pooling_mode_lasttoken"}};

/* What a rank has. */
typedef struct worker {
    mt_context *ctx;
    mt_grid grid;
    mt_params *params;
    mt_bert bert;
    mt_checkpoint *checkpoint;
} worker;

typedef struct job {
    const char *directory, *in, *out;
    double tp, batch, normalize;
    int help;
    char path[MT_PATH_MAX]; /* of the model */
    char folders[2][TEXT];  /* in path: of the Pooling, and of the Normalize or "" */
    mt_bert_desc bert;
    pooling pooling;
    int64_t most;    /* tokens of a sentence */
    int32_t *ids;    /* of all sentences, one after the other */
    int64_t *begins; /* [sentences + 1]: where each sentence begins in ids */
    int64_t sentences;
    float *vectors; /* [sentences, hidden] */
    int refused;    /* 1: the model cannot be loaded, and rank 0 has printed why */
} job;

/* ---- computing --------------------------------------------------------------------------------------------------- */

/* Returns the weight of output t of a sentence in its vector; not for MAX. */
static double weight_of(pooling p, int64_t t, int64_t tokens) {
    double n = (double)tokens;
    if (p == CLS) return t == 0;
    if (p == LAST_TOKEN) return t == tokens - 1;
    if (p == WEIGHTED_MEAN) return 2 * (double)(t + 1) / (n * (n + 1));
    return p == MEAN_SQRT_LEN ? 1 / sqrt(n) : 1 / n;
}

/* Returns feature i of the vector of a sentence with the outputs y [tokens, hidden]. A NaN stays one. */
static double pool_feature(const job *j, const float *y, int64_t tokens, int64_t i) {
    int64_t hidden = j->bert.layer.hidden;
    double sum = 0, top = (double)y[i];
    for (int64_t t = 0; t < tokens; t++) {
        double x = (double)y[t * hidden + i], weight = weight_of(j->pooling, t, tokens);
        if (x > top || isnan(x)) top = x;
        if (weight != 0) sum += weight * x;
    }
    return j->pooling == MAX ? top : sum;
}

/* Writes the vector of a sentence with the outputs y to out and, if asked for, divides it by its length. */
static void pool(const job *j, const float *y, int64_t tokens, float *out) {
    int64_t hidden = j->bert.layer.hidden;
    double squares = 0;
    for (int64_t i = 0; i < hidden; i++) {
        out[i] = (float)pool_feature(j, y, tokens, i);
        squares += (double)out[i] * (double)out[i];
    }
    for (int64_t i = 0; i < hidden && j->normalize != 0; i++)
        out[i] = (float)((double)out[i] / fmax(sqrt(squares), 1e-12));
}

/* Uploads sentences [first, first + count), padded to seq tokens with id 0, and their lengths. */
static mt_status upload(mt_context *ctx, const job *j, int64_t first, mt_tensor ids, mt_tensor lengths) {
    int64_t count = lengths.cols, seq = ids.cols / count;
    int32_t *host = (int32_t *)calloc((size_t)(count * (seq + 1)), sizeof *host), *n = host + count * seq;
    mt_status status = host ? MT_SUCCESS : MT_ERR_MEMORY;
    for (int64_t i = 0; host && i < count; i++) {
        const int64_t *begin = j->begins + first + i;
        n[i] = (int32_t)(begin[1] - begin[0]);
        memcpy(host + i * seq, j->ids + begin[0], (size_t)n[i] * sizeof *host);
    }
    if (host) status = mt_upload(ctx, host, ids);
    if (status == MT_SUCCESS) status = mt_upload(ctx, n, lengths);
    free(host);
    return status;
}

/* Computes the vectors of sentences [first, first + count). y has memory for the outputs of their tokens. */
static mt_status embed_some(mt_context *ctx, const mt_bert *bert, job *j, int64_t first, int64_t count, int64_t seq,
                            float *y, int stores) {
    int64_t hidden = j->bert.layer.hidden;
    mt_batch batch;
    mt_tensor ids, lengths, out;
    memset(&batch, 0, sizeof batch);
    batch.sequences = count;
    batch.seq = seq;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, count * seq, &ids));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, count, &lengths));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, count * seq, hidden, &out));
    MT_TRY(upload(ctx, j, first, ids, lengths));
    batch.lengths = (const int32_t *)lengths.data;
    MT_TRY(mt_language_model_forward(ctx, &bert->model, &batch, (const int32_t *)ids.data, mt_none(), out, NULL));
    if (mt_context_device(ctx) == MT_DEVICE_META) return MT_SUCCESS; /* y is NULL */
    MT_TRY(mt_download(ctx, out, y));
    for (int64_t i = 0; stores && i < count; i++)
        pool(j, y + i * seq * hidden, j->begins[first + i + 1] - j->begins[first + i],
             j->vectors + (first + i) * hidden);
    return MT_SUCCESS;
}

static int64_t longest(const job *j, int64_t first, int64_t count) {
    int64_t most = 0;
    for (int64_t i = first; i < first + count; i++) most = mt_max(most, j->begins[i + 1] - j->begins[i]);
    return most;
}

/* Plans the calls of embed: one for each number of sentences, and of tokens, that a call can have. */
static mt_status plan_calls(mt_context *ctx, const mt_bert *bert, job *j) {
    int64_t most = (int64_t)j->batch, seq = longest(j, 0, j->sentences);
    char *planned = (char *)calloc((size_t)seq + 1, 1);
    mt_status status = planned ? MT_SUCCESS : MT_ERR_MEMORY;
    for (int64_t i = 0; i < j->sentences && status == MT_SUCCESS; i += most) {
        int64_t count = mt_min(most, j->sentences - i), tokens = longest(j, i, count);
        size_t mark = mt_arena_mark(ctx);
        if (count == most && planned[tokens]) continue;
        planned[tokens] = 1;
        status = embed_some(ctx, bert, j, i, count, tokens, NULL, 0);
        mt_arena_release(ctx, mark);
    }
    free(planned);
    return status;
}

/* All ranks compute all sentences, and have the same outputs. Rank 0 stores the vectors. */
static mt_status embed(mt_context *ctx, const mt_bert *bert, job *j, int stores) {
    int64_t most = (int64_t)j->batch, seq = longest(j, 0, j->sentences);
    float *y = (float *)malloc((size_t)(most * seq * j->bert.layer.hidden) * sizeof *y);
    mt_status status = y ? MT_SUCCESS : MT_ERR_MEMORY;
    for (int64_t i = 0; i < j->sentences && status == MT_SUCCESS; i += most) {
        int64_t count = mt_min(most, j->sentences - i);
        size_t mark = mt_arena_mark(ctx);
        status = embed_some(ctx, bert, j, i, count, longest(j, i, count), y, stores);
        mt_arena_release(ctx, mark);
    }
    free(y);
    return status;
}

/* Loads the model. When a file is wrong, all ranks have the same error, and rank 0 prints it. */
static mt_status load(mt_context *ctx, mt_comm *world, mt_checkpoint *checkpoint, job *j, int *refused) {
    mt_status status = mt_checkpoint_import(ctx, checkpoint, j->path);
    *refused = status == MT_ERR_IO || status == MT_ERR_DATA;
    if (*refused && mt_comm_rank(world) == 0) fprintf(stderr, "embed: %s\n", mt_last_error(ctx));
    if (*refused) __atomic_store_n(&j->refused, 1, __ATOMIC_RELAXED);
    return status;
}

/* Creates what a rank has, without the values of the weights. The caller destroys it, also after an error. */
static mt_status worker_create(mt_comm *world, const job *j, mt_device device, size_t arena, worker *w) {
    mt_context_desc where;
    mt_grid_desc shape;
    mt_checkpoint_desc files;
    memset(&where, 0, sizeof where);
    memset(&shape, 0, sizeof shape);
    memset(&files, 0, sizeof files); /* without a directory of a run: it only imports */
    memset(w, 0, sizeof *w);
    where.device = device;
    where.arena_bytes = arena;
    shape.tp = mt_comm_size(world);
    MT_TRY(mt_context_create(world, &where, &w->ctx));
    MT_TRY(mt_grid_create(world, &shape, &w->grid));
    MT_TRY(mt_params_create(w->ctx, &w->grid, &w->params));
    MT_TRY(mt_bert_create(w->ctx, w->params, &j->bert, &w->bert));
    MT_TRY(mt_params_init(w->ctx, w->params, 0)); /* heads, which the files may not have */
    return mt_bert_checkpoint_create(w->ctx, w->params, &w->bert, &files, &w->checkpoint);
}

static void worker_destroy(worker *w) {
    mt_checkpoint_destroy(w->ctx, w->checkpoint);
    mt_params_destroy(w->params);
    mt_grid_destroy(&w->grid);
    mt_context_destroy(w->ctx);
}

/* Returns the bytes of the arena that this rank needs: it computes on the meta device. */
static mt_status plan(mt_comm *world, job *j, size_t *arena) {
    mt_comm *meta = NULL;
    worker w;
    mt_status status = mt_comm_create_meta(mt_comm_size(world), mt_comm_rank(world), &meta);
    memset(&w, 0, sizeof w);
    if (status == MT_SUCCESS) status = worker_create(meta, j, MT_DEVICE_META, 0, &w);
    if (status == MT_SUCCESS) status = mt_params_pack(w.ctx, w.params);
    if (status == MT_SUCCESS) status = plan_calls(w.ctx, &w.bert, j);
    if (status == MT_SUCCESS) *arena = mt_arena_peak(w.ctx);
    else mt_comm_fail(world, status, mt_comm_last_error(meta));
    worker_destroy(&w);
    mt_comm_destroy(meta);
    return status;
}

static mt_status rank_main(mt_comm *world, void *user) {
    job *j = (job *)user;
    worker w;
    size_t arena = 0;
    int refused = 0;
    mt_status status = plan(world, j, &arena);
    memset(&w, 0, sizeof w);
    if (status == MT_SUCCESS) status = worker_create(world, j, MT_DEVICE_CPU, arena, &w);
    if (status == MT_SUCCESS) status = load(w.ctx, world, w.checkpoint, j, &refused);
    if (status == MT_SUCCESS) status = mt_params_pack(w.ctx, w.params); /* the weights do not change from now on */
    if (status == MT_SUCCESS) status = embed(w.ctx, &w.bert, j, mt_comm_rank(world) == 0);
    worker_destroy(&w);
    return refused ? MT_SUCCESS : status; /* the launcher must not report it again */
}

/* ---- the files of sentence-transformers -------------------------------------------------------------------------- */

typedef struct module {
    char type[TEXT], path[TEXT]; /* of the class, and of its folder */
} module;

/* Returns 1 if the module is of a class of sentence-transformers. Its modules in Python have moved between versions. */
static int is_class(const module *m, const char *name) {
    const char *dot = strrchr(m->type, '.');
    return strncmp(m->type, "sentence_transformers.", 22) == 0 && strcmp(dot + 1, name) == 0;
}

/* Checks the modules: Transformer and Pooling, and perhaps Normalize. */
static mt_status check_modules(mt_context *ctx, const job *j, const module *m) {
    static const char *const classes[] = {"Transformer", "Pooling", "Normalize"};
    for (int i = 0; i < MODULES; i++) {
        if (i < 3 && is_class(&m[i], classes[i])) continue;
        if (m[i].type[0] || i < 2 || m[i].path[0])
            return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                           "%s/modules.json: module %d is '%s', this program has Transformer, Pooling and, after them, "
                           "Normalize",
                           j->path, i + 1, m[i].type);
    }
    if (m[0].path[0])
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s/modules.json: the Transformer is in '%s', must be beside this file",
                       j->path, m[0].path);
    return m[1].path[0] ? MT_SUCCESS : mt_fail(ctx, MT_ERR_DATA, "%s/modules.json: the Pooling has no folder", j->path);
}

/* Reads modules.json. Without it, *exists becomes 0. */
static mt_status read_modules(mt_context *ctx, const job *j, module *m, int *exists) {
    char names[2 * MODULES][16];
    mt_field fields[2 * MODULES];
    memset(fields, 0, sizeof fields);
    memset(m, 0, MODULES * sizeof *m);
    for (int i = 0; i < 2 * MODULES; i++) {
        snprintf(names[i], sizeof names[i], i % 2 ? "%d.path" : "%d.type", i / 2);
        fields[i].name = names[i];
        fields[i].kind = MT_FIELD_TEXT;
        fields[i].value = i % 2 ? m[i / 2].path : m[i / 2].type;
        fields[i].bytes = TEXT;
    }
    MT_TRY(mt_json_read(ctx, j->path, "modules.json", fields, 2 * MODULES, exists));
    return *exists ? check_modules(ctx, j, m) : MT_SUCCESS;
}

/* A text that must have one value. */
static mt_status check_text(mt_context *ctx, const job *j, const char *file, const char *name, const char *value,
                            const char *wanted) {
    if (strcmp(value, wanted) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s/%s: %s is '%s', must be '%s'", j->path, file, name, value, wanted);
}

/* Refuses a Normalize that is not of the vectors. */
static mt_status check_normalize(mt_context *ctx, const job *j, const module *m) {
    static const char *const wanted = "sentence_embedding";
    char file[TEXT + 16], input[TEXT], output[TEXT];
    const mt_field fields[] = {{"module_input_name", MT_FIELD_TEXT, input, 0, 0, sizeof input, 0, 1},
                               {"module_output_name", MT_FIELD_TEXT, output, 0, 0, sizeof output, 0, 1}};
    int exists = 0;
    if (!m->path[0]) return MT_SUCCESS;
    snprintf(input, sizeof input, "%s", wanted);
    snprintf(output, sizeof output, "%s", wanted);
    snprintf(file, sizeof file, "%s/config.json", m->path);
    MT_TRY(mt_json_read(ctx, j->path, file, fields, 2, &exists));
    MT_TRY(check_text(ctx, j, file, "module_input_name", input, wanted));
    return check_text(ctx, j, file, "module_output_name", output, wanted);
}

/* What the config.json of a Pooling says. */
typedef struct pooling_config {
    char mode[TEXT], second[TEXT]; /* of pooling_mode, which may be a list; "?": there is none */
    int older[POOLINGS];           /* the values of pooling_names[][1] */
    int include_prompt;
    int64_t width, older_width;
} pooling_config;

/* Sets the mode that pooling_mode names. */
static mt_status name_pooling(mt_context *ctx, job *j, const char *file, const pooling_config *c) {
    if (strcmp(c->second, "?") != 0)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                       "%s/%s: pooling_mode is a list of '%s', '%s', ..., this program has one mode", j->path, file,
                       c->mode, c->second);
    for (int i = 0; i < POOLINGS; i++) {
        if (strcmp(c->mode, pooling_names[i][0]) != 0) continue;
        j->pooling = (pooling)i;
        return MT_SUCCESS;
    }
    return mt_fail(
        ctx, MT_ERR_UNSUPPORTED,
        "%s/%s: pooling_mode is '%s', must be mean, cls, max, mean_sqrt_len_tokens, weightedmean or lasttoken", j->path,
        file, c->mode);
}

/* Sets the mode whose older member is true. Without the member, the mean is meant. */
static mt_status find_pooling(mt_context *ctx, job *j, const char *file, const pooling_config *c) {
    int found = -1;
    for (int i = 0; i < POOLINGS; i++) {
        if (!c->older[i]) continue;
        if (found >= 0)
            return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s/%s: %s is true and %s is true%s, this program has one mode",
                           j->path, file, pooling_names[i][1], pooling_names[found][1],
                           found == MEAN ? " or missing" : "");
        found = i;
    }
    if (found < 0)
        return mt_fail(ctx, MT_ERR_DATA, "%s/%s: pooling_mode_mean_tokens is false, and no other mode is true", j->path,
                       file);
    j->pooling = (pooling)found;
    return MT_SUCCESS;
}

/* Checks the members of a Pooling that must have one value, and sets the mode. */
static mt_status take_pooling(mt_context *ctx, job *j, const char *file, const pooling_config *c) {
    int64_t hidden = j->bert.layer.hidden, width = c->width != hidden ? c->width : c->older_width;
    if (!c->include_prompt)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                       "%s/%s: include_prompt is false, this program does not know which tokens are a prompt", j->path,
                       file);
    if (width != hidden)
        return mt_fail(ctx, MT_ERR_DATA, "%s/%s: the embedding has %lld features, the model has %lld", j->path, file,
                       (long long)width, (long long)hidden);
    return strcmp(c->mode, "?") == 0 ? find_pooling(ctx, j, file, c) : name_pooling(ctx, j, file, c);
}

/* Reads how the outputs are pooled from FOLDER/config.json. It may be missing if exists is not NULL. */
static mt_status read_pooling(mt_context *ctx, job *j, const char *folder, int *exists) {
    pooling_config c = {"?", "?", {1, 0, 0, 0, 0, 0}, 1, j->bert.layer.hidden, j->bert.layer.hidden};
    const mt_field fields[] = {{"pooling_mode.0", MT_FIELD_TEXT, c.mode, 0, 0, TEXT, 0, 0},
                               {"pooling_mode.1", MT_FIELD_TEXT, c.second, 0, 0, TEXT, 0, 0},
                               {"pooling_mode", MT_FIELD_TEXT, c.mode, 0, 0, TEXT, 0, 0},
                               {"include_prompt", MT_FIELD_BOOL, &c.include_prompt, 0, 0, 0, 0, 0},
                               {"embedding_dimension", MT_FIELD_I64, &c.width, 0, 0, 0, 0, 0},
                               {"word_embedding_dimension", MT_FIELD_I64, &c.older_width, 0, 0, 0, 0, 0},
                               {pooling_names[0][1], MT_FIELD_BOOL, &c.older[0], 0, 0, 0, 0, 0},
                               {pooling_names[1][1], MT_FIELD_BOOL, &c.older[1], 0, 0, 0, 0, 0},
                               {pooling_names[2][1], MT_FIELD_BOOL, &c.older[2], 0, 0, 0, 0, 0},
                               {pooling_names[3][1], MT_FIELD_BOOL, &c.older[3], 0, 0, 0, 0, 0},
                               {pooling_names[4][1], MT_FIELD_BOOL, &c.older[4], 0, 0, 0, 0, 0},
                               {pooling_names[5][1], MT_FIELD_BOOL, &c.older[5], 0, 0, 0, 0, 0}};
    char file[TEXT + 16];
    snprintf(file, sizeof file, "%s/config.json", folder);
    MT_TRY(mt_json_read(ctx, j->path, file, fields, sizeof fields / sizeof *fields, exists));
    /* an empty list has no element: as a text it is an error */
    if (strcmp(c.mode, "?") == 0) MT_TRY(mt_json_read(ctx, j->path, file, fields + 2, 1, exists));
    return take_pooling(ctx, j, file, &c);
}

/* Reads how long a sentence may be. The outputs must be those of the tokens. */
static mt_status read_transformer(mt_context *ctx, job *j) {
    static const char *const file = "sentence_bert_config.json";
    char task[TEXT] = "feature-extraction", output[TEXT] = "token_embeddings";
    int64_t most = j->bert.max_seq;
    const mt_field fields[] = {{"max_seq_length", MT_FIELD_I64, &most, 1, INT32_MAX, 0, 0, 1},
                               {"transformer_task", MT_FIELD_TEXT, task, 0, 0, sizeof task, 0, 0},
                               {"module_output_name", MT_FIELD_TEXT, output, 0, 0, sizeof output, 0, 0}};
    int exists = 0;
    MT_TRY(mt_json_read(ctx, j->path, file, fields, 3, &exists));
    j->most = mt_min(most, j->bert.max_seq);
    MT_TRY(check_text(ctx, j, file, "transformer_task", task, "feature-extraction"));
    return check_text(ctx, j, file, "module_output_name", output, "token_embeddings");
}

/* ---- model, input and output ------------------------------------------------------------------------------------- */

/* Reads the desc of the model (j->bert), and how a sentence encoder pools its outputs. */
static mt_status read_model(mt_context *ctx, job *j) {
    module modules[MODULES];
    int exists = 0;
    MT_TRY(mt_bert_desc_read(ctx, j->path, &j->bert));
    MT_TRY(read_transformer(ctx, j));
    MT_TRY(read_modules(ctx, j, modules, &exists));
    snprintf(j->folders[0], TEXT, "%s", exists ? modules[1].path : "1_Pooling");
    snprintf(j->folders[1], TEXT, "%s", modules[2].path);
    if (!exists) return read_pooling(ctx, j, j->folders[0], &exists);
    MT_TRY(check_normalize(ctx, j, &modules[2]));
    return read_pooling(ctx, j, j->folders[0], NULL);
}

/* Finds the directory of the model (j->path) and reads its desc, before any rank starts. */
static mt_status find_model(job *j) {
    mt_context_desc small;
    mt_context *ctx;
    int64_t step = -1;
    mt_status status;
    memset(&small, 0, sizeof small);
    small.arena_bytes = 64;
    MT_TRY(mt_context_create(NULL, &small, &ctx));
    status = mt_checkpoint_latest(ctx, NULL, j->directory, &step);
    if (step >= 0) status = mt_checkpoint_path(ctx, j->directory, step, j->path, sizeof j->path);
    else snprintf(j->path, sizeof j->path, "%s", j->directory);
    if (status == MT_SUCCESS) status = read_model(ctx, j);
    if (status != MT_SUCCESS) fprintf(stderr, "embed: %s\n", mt_last_error(ctx));
    mt_context_destroy(ctx);
    return status;
}

/* The vectors must not replace a file that this run reads. Returns 0 after it has printed which. */
static int check_output(const job *j) {
    char folder[MT_PATH_MAX];
    int apart = !j->out || (is_apart("out", j->out, j->in ? "--ids" : "", j->in ? j->in : "/dev/stdin") &&
                            is_apart_from("out", j->out, "the model's", j->directory, 1));
    for (int i = 0; j->out && apart && i < 2; i++)
        if (snprintf(folder, sizeof folder, "%s/%s", j->path, j->folders[i]) < (int)sizeof folder)
            apart = is_apart_from("out", j->out, "the model's", folder, 0);
    return apart;
}

static const char *input_name(const job *j) { return j->in ? j->in : "the standard input"; }

/* Reads the ids of one line, which ends at `stop` with a NUL, to the end of j->ids. Returns 0 and prints what is
   wrong. */
static int read_line(job *j, char *line, const char *stop) {
    int64_t *end = &j->begins[j->sentences + 1];
    long long sentence = (long long)j->sentences + 1;
    char *rest, *at = line;
    *end = j->begins[j->sentences];
    for (;; at = rest) {
        long long id;
        while (*at == ' ' || *at == '\t' || *at == '\r') at++;
        if (at == stop) break;
        errno = 0;
        id = strtoll(at, &rest, 10);
        if (rest == at || errno || id < 0 || id >= j->bert.vocab) {
            fprintf(stderr, "embed: %s: sentence %lld: '%.20s': expected a number from 0 to %lld, as token %lld\n",
                    input_name(j), sentence, *at ? at : "\\0", (long long)j->bert.vocab - 1,
                    (long long)(*end - end[-1] + 1));
            return 0;
        }
        j->ids[(*end)++] = (int32_t)id;
    }
    if (*end - end[-1] >= 1 && *end - end[-1] <= j->most) return 1;
    fprintf(stderr, "embed: %s: sentence %lld has %lld tokens, must have 1 to %lld\n", input_name(j), sentence,
            (long long)(*end - end[-1]), (long long)j->most);
    return 0;
}

/* Reads the sentences, one in each line. A last line without a newline counts. */
static int parse_sentences(job *j, char *text, size_t bytes) {
    int64_t lines = 1;
    char *line = text, *end = text + bytes, *stop;
    for (const char *at = text; at < end; at++) lines += *at == '\n';
    j->ids = (int32_t *)malloc((bytes + 1) * sizeof *j->ids);
    j->begins = (int64_t *)calloc((size_t)lines + 1, sizeof *j->begins);
    if (!j->ids || !j->begins) {
        fprintf(stderr, "embed: %s: no memory for %lld lines\n", input_name(j), (long long)lines);
        return 0;
    }
    for (; line < end; line = stop + 1, j->sentences++) {
        stop = (char *)memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        *stop = 0;
        if (!read_line(j, line, stop)) return 0;
    }
    if (j->sentences == 0) fprintf(stderr, "embed: %s: the input has no sentence\n", input_name(j));
    return j->sentences > 0;
}

static int read_sentences(job *j) {
    unsigned char *text = NULL;
    size_t bytes = 0;
    int ok = whole_file_read(j->in, INPUT_MAX, &text, &bytes) && parse_sentences(j, (char *)text, bytes);
    free(text);
    if (ok) j->vectors = (float *)malloc((size_t)(j->sentences * j->bert.layer.hidden) * sizeof *j->vectors);
    if (ok && !j->vectors) fprintf(stderr, "embed: no memory for %lld vectors\n", (long long)j->sentences);
    return j->vectors != NULL;
}

static mt_status save(mt_context *ctx, const job *j, mt_safetensors_writer **writer) {
    int64_t shape[2];
    shape[0] = j->sentences;
    shape[1] = j->bert.layer.hidden;
    MT_TRY(mt_safetensors_create(ctx, j->out, NULL, 0, writer));
    MT_TRY(mt_safetensors_add(ctx, *writer, "embeddings", "F32", 2, shape));
    MT_TRY(mt_safetensors_write(ctx, *writer, j->vectors, (size_t)(shape[0] * shape[1]) * sizeof *j->vectors));
    return mt_safetensors_finish(ctx, *writer);
}

/* Returns 0 when a number of a vector is not finite, and prints which. */
static int check_vectors(const job *j) {
    int64_t hidden = j->bert.layer.hidden;
    for (int64_t i = 0; i < j->sentences * hidden; i++) {
        double x = (double)j->vectors[i];
        if (isfinite(x)) continue;
        fprintf(stderr, "embed: sentence %lld: number %lld of its vector is %s, must be finite: no vector is written\n",
                (long long)(i / hidden) + 1, (long long)(i % hidden) + 1, isnan(x) ? "nan" : "infinite");
        return 0;
    }
    return 1;
}

static mt_status write_vectors(const job *j) {
    int64_t hidden = j->bert.layer.hidden;
    mt_safetensors_writer *writer = NULL;
    mt_context_desc small;
    mt_context *ctx;
    mt_status status;
    for (int64_t i = 0; !j->out && i < j->sentences * hidden; i++)
        printf("%.9g%c", (double)j->vectors[i], (i + 1) % hidden ? ' ' : '\n');
    if (!j->out) return fflush(stdout) == 0 ? MT_SUCCESS : MT_ERR_IO;
    memset(&small, 0, sizeof small);
    small.arena_bytes = 64;
    MT_TRY(mt_context_create(NULL, &small, &ctx));
    status = save(ctx, j, &writer);
    if (status != MT_SUCCESS) fprintf(stderr, "embed: %s\n", mt_last_error(ctx));
    mt_safetensors_destroy(writer);
    mt_context_destroy(ctx);
    return status;
}

/* ---- flags ------------------------------------------------------------------------------------------------------- */

static int read_number(const char *name, const char *text, double low, double high, double *out) {
    char *end;
    *out = strtod(text, &end);
    if (end != text && !*end && *out >= low && *out <= high && *out == floor(*out)) return 1;
    fprintf(stderr, "embed: %s %s: expected a whole number from %.15g to %.15g\n", name, text, low, high);
    return 0;
}

static void print_usage(FILE *to) {
    fprintf(to, "usage: embed DIR [--ids FILE] [--tp N] [--batch N] [--normalize 0|1] [--out FILE]\n");
}

static void print_help(const job *j) {
    print_usage(stdout);
    printf(
        "  DIR          of a BERT of transformers, of a sentence encoder, or of a checkpoint\n"
        "  --ids        FILE with the numbers of the tokens of a sentence in each line; default: the standard input\n"
        "  --tp         tensor parallel ranks (default %.15g)\n"
        "  --batch      sentences that are computed at a time (default %.15g)\n"
        "  --normalize  1: each vector has the length 1; 0: as it is (default %.15g)\n"
        "  --out        FILE.safetensors for the vectors; default: the standard output, as text\n"
        "  --help       this text\n",
        j->tp, j->batch, j->normalize);
}

/* Sets a flag. Returns 0 after it has printed what is wrong. */
static int parse_flag(job *j, const char *name, const char *value) {
    if (strcmp(name, "--tp") == 0 && *value) return read_number(name, value, 1, 1024, &j->tp);
    if (strcmp(name, "--batch") == 0 && *value) return read_number(name, value, 1, 4096, &j->batch);
    if (strcmp(name, "--normalize") == 0 && *value) return read_number(name, value, 0, 1, &j->normalize);
    if (strcmp(name, "--ids") == 0 && *value) j->in = value;
    else if (strcmp(name, "--out") == 0 && *value) j->out = value;
    else return fprintf(stderr, "embed: unknown flag '%s', or its value is missing; see --help\n", name) < 0;
    return 1;
}

static int parse(int argc, char **argv, job *j) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) j->help = 1;
        else if (argv[i][0] == '-') {
            if (!parse_flag(j, argv[i], i + 1 < argc ? argv[i + 1] : "")) return 0;
            i++;
        } else if (!j->directory) j->directory = argv[i];
        else {
            fprintf(stderr, "embed: unexpected argument '%s', see --help\n", argv[i]);
            return 0;
        }
    }
    if (!j->directory && !j->help) print_usage(stderr);
    return j->directory || j->help;
}

int main(int argc, char **argv) {
    job j;
    mt_status status = MT_ERR_ARGUMENT;
    memset(&j, 0, sizeof j);
    j.tp = 2;
    j.batch = 32;
    j.normalize = 1;
    if (!parse(argc, argv, &j)) return 2;
    if (j.help) {
        print_help(&j);
        return 0;
    }
    if (find_model(&j) == MT_SUCCESS && check_output(&j) && read_sentences(&j)) {
        mt_launch_desc launch;
        memset(&launch, 0, sizeof launch);
        launch.ranks = (int)j.tp;
        status = mt_launch(&launch, rank_main, &j);
        if (status == MT_SUCCESS && !j.refused) status = check_vectors(&j) ? write_vectors(&j) : MT_ERR_DATA;
    }
    free(j.ids);
    free(j.begins);
    free(j.vectors);
    return status == MT_SUCCESS && !j.refused ? 0 : 1;
}
