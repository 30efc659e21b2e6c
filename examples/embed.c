/* embed - computes sentence embeddings with a BERT, on any number of tensor parallel ranks.

   cc -O3 -march=native -I. examples/embed.c -o embed -lm -lpthread
   ./embed tests/golden/bert_hf --ids tests/golden/embed/ids.txt
   ./embed DIR --tp 2 <ids.txt >vectors.txt
   ./embed DIR --ids ids.txt --out vectors.safetensors

   DIR has a BERT of Hugging Face (model.safetensors and config.json), such as a sentence encoder of the package
   sentence-transformers, or a checkpoint of an mt_bert. Each line of the input, the file --ids or the standard input,
   is one sentence: the numbers of its tokens, with those that the tokenizer adds at its ends ([CLS] and [SEP]). Each
   line of the output is its vector: the mean of the encoder's outputs over the tokens, scaled to the length 1.
   --normalize 0 leaves out the scaling. With --out the vectors are the tensor "embeddings" [sentences, hidden], F32,
   of a safetensors file.
   The vectors are the same with every --tp, up to rounding. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct job {
    const char *directory, *in, *out;
    double tp, batch, normalize;
    char path[MT_PATH_MAX]; /* of the model */
    mt_bert_desc bert;
    int32_t *ids;    /* of all sentences, one after the other */
    int64_t *begins; /* [sentences + 1]: where each sentence begins in ids */
    int64_t sentences;
    float *vectors; /* [sentences, hidden] */
    int refused;    /* 1: the model cannot be loaded, and rank 0 has printed why */
} job;

/* ---- computing --------------------------------------------------------------------------------------------------- */

/* Writes the mean of the first `tokens` rows of y to out and, if asked for, divides it by its length. */
static void pool(const job *j, const float *y, int64_t tokens, float *out) {
    int64_t hidden = j->bert.layer.hidden;
    double squares = 0;
    for (int64_t i = 0; i < hidden; i++) {
        double sum = 0;
        for (int64_t t = 0; t < tokens; t++) sum += (double)y[t * hidden + i];
        out[i] = (float)(sum / (double)tokens);
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

static mt_status rank_main(mt_comm *world, void *user) {
    job *j = (job *)user;
    int refused = 0;
    mt_grid_desc shape;
    mt_grid grid;
    mt_context *ctx = NULL;
    mt_params *params = NULL;
    mt_bert bert;
    mt_checkpoint_desc files;
    mt_checkpoint *checkpoint = NULL;
    mt_status status = mt_context_create(world, NULL, &ctx);
    memset(&shape, 0, sizeof shape);
    memset(&grid, 0, sizeof grid);
    memset(&files, 0, sizeof files); /* without a directory of a run: it only imports */
    shape.tp = mt_comm_size(world);
    if (status == MT_SUCCESS) status = mt_grid_create(world, &shape, &grid);
    if (status == MT_SUCCESS) status = mt_params_create(ctx, &grid, &params);
    if (status == MT_SUCCESS) status = mt_bert_create(ctx, params, &j->bert, &bert);
    if (status == MT_SUCCESS) status = mt_params_init(ctx, params, 0); /* heads, which the files may not have */
    if (status == MT_SUCCESS) status = mt_bert_checkpoint_create(ctx, params, &bert, &files, &checkpoint);
    if (status == MT_SUCCESS) status = load(ctx, world, checkpoint, j, &refused);
    if (status == MT_SUCCESS) status = mt_params_pack(ctx, params); /* the weights do not change from now on */
    if (status == MT_SUCCESS) status = embed(ctx, &bert, j, mt_comm_rank(world) == 0);
    mt_checkpoint_destroy(ctx, checkpoint);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return refused ? MT_SUCCESS : status; /* the launcher must not report it again */
}

/* ---- model, input and output ------------------------------------------------------------------------------------- */

/* Reads the desc of the model (j->bert), and refuses a sentence encoder that pools its outputs in another way than by
   their mean. The message is in the context, or was printed if *printed becomes 1. */
static mt_status read_model(mt_context *ctx, job *j, int *printed) {
    int mean = 1, cls = 0, max = 0, root = 0, exists = 0;
    char path[MT_PATH_MAX + 16];
    mt_field fields[4], *wrong = fields;
    memset(fields, 0, sizeof fields);
    fields[0].name = "pooling_mode_mean_tokens", fields[0].value = &mean;
    fields[1].name = "pooling_mode_cls_token", fields[1].value = &cls;
    fields[2].name = "pooling_mode_max_tokens", fields[2].value = &max;
    fields[3].name = "pooling_mode_mean_sqrt_len_tokens", fields[3].value = &root;
    fields[0].kind = fields[1].kind = fields[2].kind = fields[3].kind = MT_FIELD_BOOL;
    MT_TRY(mt_bert_desc_read(ctx, j->path, &j->bert));
    j->bert.no_binary_head = 1;
    snprintf(path, sizeof path, "%s/1_Pooling", j->path);
    MT_TRY(mt_json_read(ctx, path, "config.json", fields, 4, &exists));
    if (mean && !cls && !max && !root) return MT_SUCCESS;
    if (mean) wrong += cls ? 1 : max ? 2 : 3;
    fprintf(stderr, "embed: %s/config.json: %s is %s, this program computes the mean\n", path, wrong->name,
            mean ? "true" : "false");
    *printed = 1;
    return MT_ERR_UNSUPPORTED;
}

/* Finds the directory of the model (j->path) and reads its desc, before any rank starts. */
static mt_status find_model(job *j) {
    mt_context_desc small;
    mt_context *ctx;
    int64_t step = -1;
    int printed = 0;
    mt_status status;
    memset(&small, 0, sizeof small);
    small.arena_bytes = 64;
    MT_TRY(mt_context_create(NULL, &small, &ctx));
    status = mt_checkpoint_latest(ctx, NULL, j->directory, &step);
    if (step >= 0) status = mt_checkpoint_path(ctx, j->directory, step, j->path, sizeof j->path);
    else snprintf(j->path, sizeof j->path, "%s", j->directory);
    if (status == MT_SUCCESS) status = read_model(ctx, j, &printed);
    if (status != MT_SUCCESS && !printed) fprintf(stderr, "embed: %s\n", mt_last_error(ctx));
    mt_context_destroy(ctx);
    return status;
}

/* Reads the whole input. Returns NULL when there is no memory for it. */
static char *read_input(FILE *file) {
    size_t used = 0, size = 1 << 16, n = 1;
    char *text = (char *)malloc(size);
    while (text && n > 0) {
        n = fread(text + used, 1, size - used - 1, file);
        used += n;
        if (used + 1 < size) continue;
        char *more = (char *)realloc(text, size *= 2);
        if (!more) free(text);
        text = more;
    }
    if (text) text[used] = 0;
    return text;
}

/* Reads the ids of one line, which ends with a NUL, to the end of j->ids. Returns 0 and prints what is wrong. */
static int read_line(job *j, char *line) {
    int64_t *end = &j->begins[j->sentences + 1];
    char *rest, *at = line;
    *end = j->begins[j->sentences];
    for (;; at = rest) {
        long long id;
        while (*at == ' ' || *at == '\t' || *at == '\r') at++;
        if (!*at) break;
        errno = 0;
        id = strtoll(at, &rest, 10);
        if (rest == at || errno || id < 0 || id >= j->bert.vocab) {
            fprintf(stderr, "embed: sentence %lld: '%.20s': expected a number from 0 to %lld\n",
                    (long long)j->sentences + 1, at, (long long)j->bert.vocab - 1);
            return 0;
        }
        j->ids[(*end)++] = (int32_t)id;
    }
    if (*end - end[-1] >= 1 && *end - end[-1] <= j->bert.max_seq) return 1;
    fprintf(stderr, "embed: sentence %lld has %lld tokens, must have 1 to %lld\n", (long long)j->sentences + 1,
            (long long)(*end - end[-1]), (long long)j->bert.max_seq);
    return 0;
}

/* Reads the sentences, one in each line. A last line without a newline counts. */
static int read_sentences(job *j) {
    FILE *file = j->in ? fopen(j->in, "rb") : stdin;
    char *text = file ? read_input(file) : NULL, *line = text;
    int64_t lines = 1;
    int ok = text != NULL;
    if (!file) fprintf(stderr, "embed: %s: %s\n", j->in, strerror(errno));
    if (file && file != stdin) fclose(file);
    for (char *at = text; ok && *at; at++) lines += *at == '\n';
    j->ids = ok ? (int32_t *)malloc((strlen(text) + 1) * sizeof *j->ids) : NULL;
    j->begins = ok ? (int64_t *)calloc((size_t)lines + 1, sizeof *j->begins) : NULL;
    ok = j->ids && j->begins;
    while (ok && *line) {
        char *end = strchr(line, '\n'), *next = end ? end + 1 : line + strlen(line);
        if (end) *end = 0;
        ok = read_line(j, line);
        j->sentences += ok;
        line = next;
    }
    if (ok && j->sentences == 0) ok = fprintf(stderr, "embed: the input has no sentence\n") < 0;
    if (ok) j->vectors = (float *)malloc((size_t)(j->sentences * j->bert.layer.hidden) * sizeof *j->vectors);
    free(text);
    return ok && j->vectors != NULL;
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

static int parse(int argc, char **argv, job *j) {
    j->directory = argc > 1 ? argv[1] : NULL;
    for (int i = 2; i < argc; i += 2) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        int ok = 1;
        if (strcmp(name, "--tp") == 0) ok = read_number(name, value, 1, 1024, &j->tp);
        else if (strcmp(name, "--batch") == 0) ok = read_number(name, value, 1, 4096, &j->batch);
        else if (strcmp(name, "--normalize") == 0) ok = read_number(name, value, 0, 1, &j->normalize);
        else if (strcmp(name, "--ids") == 0 && *value) j->in = value;
        else if (strcmp(name, "--out") == 0 && *value) j->out = value;
        else ok = fprintf(stderr, "embed: unknown flag '%s', or its value is missing\n", name) < 0;
        if (!ok) return 0;
    }
    if (j->directory) return 1;
    fprintf(stderr, "usage: embed DIR [--ids FILE] [--tp N] [--batch N] [--normalize 0|1] [--out FILE]\n");
    return 0;
}

int main(int argc, char **argv) {
    job j;
    mt_status status = MT_ERR_ARGUMENT;
    memset(&j, 0, sizeof j);
    j.tp = 2;
    j.batch = 32;
    j.normalize = 1;
    if (parse(argc, argv, &j) && find_model(&j) == MT_SUCCESS && read_sentences(&j)) {
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
