/* 04_generate - loads a GPT from a checkpoint, on any number of tensor parallel ranks, and generates text.

   cc -O3 -march=native -I. examples/04_generate.c -o generate -lm -lpthread
   ./generate --init-from tests/golden/gpt2_hf --ids 1,2,3
   ./generate --init-from DIR --prompt "The "
   ./generate --init-from DIR --tp 4 --tokens 200
   ./generate --help                                all flags

   DIR is a directory that train_gpt --checkpoint wrote, or one of the step-N directories in it, or a GPT-2 or Llama of
   Hugging Face (model.safetensors and config.json).
   With a vocabulary of 256, a token is a byte: --prompt and the output are text. With any other vocabulary, --ids and
   the output are numbers of tokens, because the program has no tokenizer.
   --temperature 0 always takes the most probable token. --top-k and --top-p leave out improbable ones, as in Hugging
   Face's transformers. The same DIR and flags give the same tokens with every --tp, except where rounding decides
   between two tokens.
   The program has a key/value cache, so each further token takes a forward of this token only. When the text no longer
   fits into the model's max_seq tokens, the last max_seq / 2 begin a new cache: the model then sees only these tokens
   and what follows. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct job {
    const char *init_from, *prompt, *ids;
    double tp, tokens, temperature, top_k, top_p, seed;
    int help;
    char path[MT_PATH_MAX]; /* of the model */
    mt_gpt_desc gpt;
    int32_t *history; /* the tokens of the prompt */
    int64_t prompted; /* their number */
    int refused;      /* 1: the model cannot be loaded, and rank 0 has printed why */
} job;

/* What a rank has. */
typedef struct worker {
    mt_context *ctx;
    mt_grid grid;
    mt_params *params;
    mt_gpt gpt;
    mt_checkpoint *checkpoint;
} worker;

static int is_text(const job *j) { return j->gpt.vocab == 256; }

static void print_token(const job *j, int32_t token) {
    if (!is_text(j)) printf("%d ", (int)token);
    else if (token == '\n' || token == '\t' || (token >= ' ' && token < 127)) putchar(token);
    else printf("\\x%02x", (unsigned)token); /* a terminal should not see control characters */
}

/* Adds tokens [from, to) of the text to the cache, and draws the next one. `first` is the first token in the cache. */
static mt_status next_token(mt_context *ctx, const mt_gpt *gpt, const job *j, const mt_gpt_cache *cache, int64_t first,
                            int64_t from, int64_t to, int32_t *text) {
    mt_batch batch = {.sequences = 1, .seq = to - from};
    mt_sample_desc how = {.temperature = (float)j->temperature,
                          .top_k = (int64_t)j->top_k,
                          .top_p = (float)j->top_p > 0 ? (float)j->top_p : MT_ZERO,
                          .seed = (uint64_t)j->seed,
                          .position = first};
    size_t mark = mt_arena_mark(ctx);
    mt_tensor ids, next;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, batch.seq, &ids));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, 1, &next));
    MT_TRY(mt_upload(ctx, text + from, ids));
    MT_TRY(mt_gpt_sample(ctx, gpt, &batch, (const int32_t *)ids.data, cache, &how, (int32_t *)next.data));
    MT_TRY(mt_download(ctx, next, text + to));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Plans the calls of generate: the first one, one that begins a new cache, and one of a single token. Their scratch
   memory depends on the number of their tokens, but not on what is in the cache. A longer call may need less than a
   shorter one. */
static mt_status plan_calls(mt_context *ctx, const mt_gpt *gpt, const job *j, const mt_gpt_cache *cache, int32_t *text,
                            int64_t count) {
    int64_t half = (cache->max_seq + 1) / 2;
    if (j->prompted <= cache->max_seq) MT_TRY(next_token(ctx, gpt, j, cache, 0, 0, j->prompted, text));
    if (count - 1 > cache->max_seq) MT_TRY(next_token(ctx, gpt, j, cache, 0, 0, half, text));
    return next_token(ctx, gpt, j, cache, 0, 0, 1, text);
}

/* Generates the tokens of text [count] after the prompt. Tokens [first, held) of the text are in the cache. */
static mt_status generate(mt_context *ctx, const mt_gpt *gpt, const job *j, const mt_gpt_cache *cache, int32_t *text,
                          int64_t count, int speaks) {
    int64_t first = 0, held = 0, n;
    for (n = j->prompted; n < count; n++) {
        if (n - first > cache->max_seq) {
            first = held = n - (cache->max_seq + 1) / 2;
            MT_TRY(mt_gpt_cache_set_length(ctx, cache, 0, 0));
        }
        MT_TRY(next_token(ctx, gpt, j, cache, first, held, n, text));
        held = n;
        if (speaks) print_token(j, text[n]);
        if (speaks) fflush(stdout);
    }
    return MT_SUCCESS;
}

/* Allocates the text and the cache, and generates, or plans it on the meta device. When speaks is 1, prints the
   tokens. */
static mt_status speak(mt_context *ctx, const mt_gpt *gpt, const job *j, int speaks) {
    int64_t count = j->prompted + (int64_t)j->tokens;
    int32_t *text = (int32_t *)calloc((size_t)count + 1, sizeof *text); /* a plan has a token more */
    mt_gpt_cache cache = {0};
    mt_status status = text ? MT_SUCCESS : MT_ERR_MEMORY;
    if (status == MT_SUCCESS)
        status = mt_gpt_cache_create(ctx, gpt, 1, count < gpt->desc.max_seq ? count : gpt->desc.max_seq, &cache);
    if (text) memcpy(text, j->history, (size_t)j->prompted * sizeof *text);
    for (int64_t i = 0; speaks && text && i < j->prompted; i++) print_token(j, text[i]);
    if (status == MT_SUCCESS && mt_context_device(ctx) == MT_DEVICE_META)
        status = plan_calls(ctx, gpt, j, &cache, text, count);
    else if (status == MT_SUCCESS) status = generate(ctx, gpt, j, &cache, text, count, speaks);
    if (speaks) printf("\n");
    mt_gpt_cache_destroy(ctx, &cache);
    free(text);
    return status;
}

/* Loads the model. When a file is wrong, all ranks have the same error, and rank 0 prints it. */
static mt_status load(mt_context *ctx, mt_comm *world, mt_checkpoint *checkpoint, job *j, int *refused) {
    mt_status status = mt_checkpoint_import(ctx, checkpoint, j->path);
    *refused = status == MT_ERR_IO || status == MT_ERR_DATA;
    if (*refused && mt_comm_rank(world) == 0) fprintf(stderr, "04_generate: %s\n", mt_last_error(ctx));
    if (*refused) __atomic_store_n(&j->refused, 1, __ATOMIC_RELAXED);
    return status;
}

/* Creates what a rank has, without the values of the weights. The caller destroys it, also after an error. */
static mt_status worker_create(mt_comm *world, const job *j, mt_device device, size_t arena, worker *w) {
    mt_context_desc where = {.device = device, .arena_bytes = arena};
    mt_grid_desc shape = {.tp = mt_comm_size(world)};
    mt_checkpoint_desc files = {.directory = NULL}; /* only imports */
    memset(w, 0, sizeof *w);
    MT_TRY(mt_context_create(world, &where, &w->ctx));
    MT_TRY(mt_grid_create(world, &shape, &w->grid));
    MT_TRY(mt_params_create(w->ctx, &w->grid, &w->params));
    MT_TRY(mt_gpt_create(w->ctx, w->params, &j->gpt, &w->gpt));
    return mt_gpt_checkpoint_create(w->ctx, w->params, &w->gpt, &files, &w->checkpoint);
}

static void worker_destroy(worker *w) {
    mt_checkpoint_destroy(w->ctx, w->checkpoint);
    mt_params_destroy(w->params);
    mt_grid_destroy(&w->grid);
    mt_context_destroy(w->ctx);
}

/* Returns the bytes of the arena that this rank needs: it generates on the meta device. */
static mt_status plan(mt_comm *world, const job *j, size_t *arena) {
    mt_comm *meta = NULL;
    worker w = {0};
    mt_status status = mt_comm_create_meta(mt_comm_size(world), mt_comm_rank(world), &meta);
    if (status == MT_SUCCESS) status = worker_create(meta, j, MT_DEVICE_META, 0, &w);
    if (status == MT_SUCCESS) status = mt_params_init(w.ctx, w.params, 0);
    if (status == MT_SUCCESS) status = speak(w.ctx, &w.gpt, j, 0);
    if (status == MT_SUCCESS) *arena = mt_arena_peak(w.ctx);
    else mt_comm_fail(world, status, mt_comm_last_error(meta));
    worker_destroy(&w);
    mt_comm_destroy(meta);
    return status;
}

static mt_status rank_main(mt_comm *world, void *user) {
    job *j = (job *)user;
    worker w = {0};
    size_t arena = 0;
    int refused = 0;
    mt_status status = plan(world, j, &arena);
    if (status == MT_SUCCESS) status = worker_create(world, j, MT_DEVICE_CPU, arena, &w);
    if (status == MT_SUCCESS) status = load(w.ctx, world, w.checkpoint, j, &refused);
    if (status == MT_SUCCESS) status = speak(w.ctx, &w.gpt, j, mt_comm_rank(world) == 0);
    worker_destroy(&w);
    return refused ? MT_SUCCESS : status; /* the launcher must not report it again */
}

/* Finds the directory of the model (j->path) and reads its desc (j->gpt), before any rank starts. */
static mt_status find_model(job *j) {
    mt_context *ctx;
    int64_t step = -1;
    MT_TRY(mt_context_create(NULL, &(mt_context_desc){.arena_bytes = 64}, &ctx));
    mt_status status = mt_checkpoint_latest(ctx, NULL, j->init_from, &step);
    if (step >= 0) status = mt_checkpoint_path(ctx, j->init_from, step, j->path, sizeof j->path);
    else snprintf(j->path, sizeof j->path, "%s", j->init_from);
    if (status == MT_SUCCESS) status = mt_gpt_desc_read(ctx, j->path, &j->gpt);
    if (status != MT_SUCCESS) fprintf(stderr, "04_generate: %s\n", mt_last_error(ctx));
    mt_context_destroy(ctx);
    return status;
}

/* Reads numbers of tokens that are separated by commas. */
static int read_ids(job *j, const char *text) {
    char *end;
    for (const char *at = text; *at; at = end + (*end == ',')) {
        long token = strtol(at, &end, 10);
        if (end == at || token < 0 || token >= j->gpt.vocab || (*end && *end != ',')) {
            fprintf(stderr, "04_generate: --ids %s: expected numbers from 0 to %lld at number %lld\n", text,
                    (long long)j->gpt.vocab - 1, (long long)j->prompted + 1);
            return 0;
        }
        j->history[j->prompted++] = (int32_t)token;
    }
    return 1;
}

/* Reads the prompt from --ids or --prompt. Without either, the prompt is a newline. */
static int read_prompt(job *j) {
    const char *text = j->ids ? j->ids : j->prompt ? j->prompt : "\n";
    j->history = (int32_t *)malloc((strlen(text) + 1) * sizeof *j->history);
    if (!j->history) return 0;
    if (!j->ids && !is_text(j)) {
        fprintf(stderr, "04_generate: a vocabulary of %lld is not bytes; give the prompt with --ids 1,2,3\n",
                (long long)j->gpt.vocab);
        return 0;
    }
    if (j->ids && !read_ids(j, text)) return 0;
    while (!j->ids && *text) j->history[j->prompted++] = (unsigned char)*text++;
    if (j->prompted == 0) fprintf(stderr, "04_generate: the prompt is empty\n");
    return j->prompted > 0;
}

/* ---- flags ------------------------------------------------------------------------------------------------------- */

enum { TEXT, WHOLE, REAL, SWITCH };

typedef struct flag {
    const char *name;
    int kind;
    size_t offset;
    double low, high; /* allowed range, inclusive */
    const char *help;
} flag;

#define AT(field) offsetof(job, field)
static const flag flags[] = {
    {"init-from", TEXT, AT(init_from), 0, 0,
     "DIR of checkpoints, of one checkpoint, or of a GPT-2 or Llama of transformers, which has the shape of the model"},
    {"prompt", TEXT, AT(prompt), 0, 0, "TEXT to continue (models whose tokens are bytes); default: a newline"},
    {"ids", TEXT, AT(ids), 0, 0, "1,2,3: the tokens to continue, instead of --prompt"},
    {"tokens", WHOLE, AT(tokens), 0, 1 << 20, "tokens to generate"},
    {"tp", WHOLE, AT(tp), 1, 1024, "tensor parallel ranks"},
    {"temperature", REAL, AT(temperature), 0, 100, "0: always the most probable token; higher: more random"},
    {"top-k", WHOLE, AT(top_k), 0, 2147483647.0, "draw from the K most probable tokens (0: all)"},
    {"top-p", REAL, AT(top_p), 0, 1,
     "draw from the most probable tokens that together have probability P (0: one, 1: all)"},
    {"seed", WHOLE, AT(seed), 0, 4294967295.0, "seed of the tokens that are drawn"},
    {"help", SWITCH, AT(help), 0, 1, "this text"},
};
#define FLAGS (int)(sizeof flags / sizeof *flags)

/* Flags of train_gpt for the shape of a model, which are refused. */
static const char *const shape_flags[] = {"config",  "layers",     "hidden",  "heads",  "kv-heads", "ffn",
                                          "seq",     "max-seq",    "vocab",   "rotary", "alibi",    "window",
                                          "softcap", "activation", "rmsnorm", "untied"};
#define SHAPE_FLAGS (int)(sizeof shape_flags / sizeof *shape_flags)

static void *field(const flag *f, job *j) { return (char *)j + f->offset; }

/* Sets a flag. Messages print numbers with %.15g, which writes whole numbers without a point. */
static int parse_value(const flag *f, const char *text, job *j) {
    const int on = 1;
    char *end;
    double x;
    if (f->kind == SWITCH) memcpy(field(f, j), &on, sizeof on);
    if (f->kind == TEXT) memcpy(field(f, j), &text, sizeof text);
    if (f->kind == SWITCH || f->kind == TEXT) return 1;
    x = strtod(text, &end);
    if (end == text || *end || !(x >= f->low && x <= f->high) || (f->kind == WHOLE && x != floor(x))) {
        fprintf(stderr, "04_generate: --%s %s: expected %s from %.15g to %.15g\n", f->name, text,
                f->kind == WHOLE ? "a whole number" : "a number", f->low, f->high);
        return 0;
    }
    memcpy(field(f, j), &x, sizeof x);
    return 1;
}

static void print_help(job *j) {
    printf("usage: 04_generate --init-from DIR [flags]\n");
    for (int i = 0; i < FLAGS; i++) {
        const flag *f = &flags[i];
        double x = 0;
        if (f->kind == WHOLE || f->kind == REAL) memcpy(&x, field(f, j), sizeof x);
        printf("  --%-12s %s", f->name, f->help);
        if (f->kind == WHOLE || f->kind == REAL) printf(" (default %.15g)", x);
        printf("\n");
    }
}

static int parse_flags(int argc, char **argv, job *j) {
    struct option table[FLAGS + SHAPE_FLAGS + 1];
    int index, c;
    memset(table, 0, sizeof table);
    for (index = 0; index < FLAGS; index++) {
        table[index].name = flags[index].name;
        table[index].has_arg = flags[index].kind != SWITCH;
    }
    for (int i = 0; i < SHAPE_FLAGS; i++) {
        table[FLAGS + i].name = shape_flags[i];
        table[FLAGS + i].has_arg = optional_argument;
    }
    while ((c = getopt_long(argc, argv, "h", table, &index)) == 0 || c == 'h') {
        if (c == 'h') {
            j->help = 1;
            continue;
        }
        if (index >= FLAGS) {
            fprintf(stderr, "04_generate: --%s: the model in --init-from DIR has its own shape, see --help\n",
                    table[index].name);
            return 0;
        }
        if (!parse_value(&flags[index], optarg, j)) return 0;
    }
    if (c != -1) return 0; /* getopt_long has printed what is wrong */
    if (optind < argc)
        fprintf(stderr, "04_generate: unexpected argument '%s'; flags start with --, see --help\n", argv[optind]);
    else if (!j->init_from && !j->help) fprintf(stderr, "04_generate: --init-from DIR is missing, see --help\n");
    return optind >= argc && (j->init_from || j->help);
}

int main(int argc, char **argv) {
    job j = {.tp = 2, .tokens = 40, .temperature = 0.7, .top_p = 1};
    mt_status status = MT_ERR_ARGUMENT;
    if (!parse_flags(argc, argv, &j)) return 2;
    if (j.help) {
        print_help(&j);
        return 0;
    }
    if (find_model(&j) == MT_SUCCESS && read_prompt(&j)) {
        mt_launch_desc launch = {.ranks = (int)j.tp};
        status = mt_launch(&launch, rank_main, &j);
    }
    free(j.history);
    return status == MT_SUCCESS && !j.refused ? 0 : 1;
}
