/* eval_gpt - evaluates a GPT without training it: the perplexity of a text, or the accuracy of a cloze test (LAMBADA).

   cc -O3 -march=native -I. examples/eval_gpt.c -o eval_gpt -lm -lpthread
   cc -O3 -march=native -I. -DMT_USE_ONEDNN examples/eval_gpt.c -o eval_gpt -ldnnl -lm -lpthread
   nvcc -O3 -arch=native -I. -x cu examples/eval_gpt.c -o eval_gpt -lcublasLt   (several GPUs: -DMT_USE_NCCL -lnccl)

   ./eval_gpt --init-from DIR --data wikitext.bin                 perplexity per word of the original text
   ./eval_gpt --init-from DIR --data lambada.bin                  part of the passages whose last word is predicted
   ./eval_gpt --init-from DIR --data FILE --tp 2 --dp 2 --pp 2    any split; --device cuda --dtype bf16 on GPUs
   ./eval_gpt --help                                              all flags

   DIR is a directory that train_gpt --checkpoint wrote, or one of the step-N directories in it, or a GPT-2 or Llama of
   Hugging Face (model.safetensors and config.json). The model has the shape and the vocabulary of DIR. Without --data
   the program only prints them.
   FILE is a text, if the vocabulary is 256 (a token is a byte), or a token file, which examples/text_to_bin.py writes.

   Perplexity is exp(-sum log P / words), as in arXiv 1909.08053, section 5.3 and appendix E. Words are those of the
   original text, before it is detokenised: the parts between single spaces. The first token has no probability. A
   window has --seq tokens. The next one begins --stride tokens later, and only its last --stride targets count, so
   each target counts once, and all but those of the first window have a context of at least --seq - --stride tokens.
   In the cloze test a passage is right if each token of its last word is the most probable one after the correct
   tokens before it. Of equal probabilities, the one with the lowest number is the most probable. A passage that is too
   long for --seq keeps its last tokens. Without a finite loss for each target, or finite logits for each answer, there
   is no result: a message names the token, and the status is 1.
   Up to rounding, results do not depend on the split. On a CPU they have the same bits for any --dp and --pp.

   A token file (.bin) is that of llm.c: 256 int32, then uint16 tokens, all little-endian. The header has the number
   20240520, the version 1, the number of tokens, the number of words of the original text (0: unknown) and the number
   of passages (0: a text). Further numbers are 0. With passages, two int32 for each of them follow the tokens: the
   tokens of the passage, and how many of them, at its end, are its last word. A text is a training file for train_gpt.
   Results go to stdout, progress and errors to stderr. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* clock_gettime: a strict -std=c99 hides it */
#endif
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define PROGRAM "eval_gpt"
#define FILES_ONLY
#include "train.h"

#include <errno.h>
#include <getopt.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define LLMC_MAGIC 20240520
#define LLMC_HEADER_BYTES 1024
#define PAPER_STRIDE 32 /* of the paper and of Megatron-LM */
#define PROGRESS_SECONDS 10
#define SHARE_FLOATS (1 << 20) /* results that one collective shares */
#define MAX_RANKS 1024

/* ---- options: one table for parsing, ranges and --help ----------------------------------------------------------- */

typedef struct options {
    const char *init_from, *data, *log;
    double tp, cp, dp, pp, seq, stride, micro_batch, words, threads, timeout;
    int dtype, device, sequence_parallel, no_pinning, help;
} options;

enum { TEXT, WHOLE, REAL, SWITCH, DTYPE, DEVICE };

/* The values of flags of the kinds DTYPE and DEVICE. The index of a value is its number in mt_dtype or mt_device. */
static const char *const choices[][3] = {{"f32", "bf16", "f16"}, {"cpu", "cuda"}};

typedef struct flag {
    const char *name;
    int kind;
    size_t offset;
    double low, high; /* allowed range, inclusive */
    const char *help;
} flag;

#define AT(field) offsetof(options, field)
static const flag flags[] = {
    {"init-from", TEXT, AT(init_from), 0, 0,
     "DIR of checkpoints, of one checkpoint, or of a GPT-2 or Llama of transformers, which has the shape of the model"},
    {"data", TEXT, AT(data), 0, 0, "FILE to evaluate on; without it, only the model is printed"},
    {"seq", WHOLE, AT(seq), 0, 1 << 20, "tokens of a window (0: the positions of the model)"},
    {"stride", WHOLE, AT(stride), 0, 1 << 20, "tokens between windows of a text (0: 32, or --seq if that is less)"},
    {"words", WHOLE, AT(words), 0, 1e15, "words of the original text (0: as --data has it)"},
    {"micro-batch", WHOLE, AT(micro_batch), 1, 1 << 20, "windows in one forward of a rank"},
    {"tp", WHOLE, AT(tp), 1, MAX_RANKS, "tensor parallel ranks"},
    {"cp", WHOLE, AT(cp), 1, MAX_RANKS, "context parallel ranks, which have parts of each window"},
    {"dp", WHOLE, AT(dp), 1, MAX_RANKS, "data parallel ranks, which share the windows"},
    {"pp", WHOLE, AT(pp), 1, MAX_RANKS, "pipeline stages, which share the layers evenly"},
    {"sequence-parallel", SWITCH, AT(sequence_parallel), 0, 1, "split tokens outside the tensor parallel regions"},
    {"device", DEVICE, AT(device), 0, 1, "cpu or cuda"},
    {"dtype", DTYPE, AT(dtype), 0, 2, "f32, bf16 or f16, of weights and activations"},
    {"log", TEXT, AT(log), 0, 0, "FILE.csv: write target,token,loss of a text, or passage,tokens,answer,right"},
    {"threads", WHOLE, AT(threads), 1, 1024, "threads that compute on each rank"},
    {"timeout", REAL, AT(timeout), 1e-3, 1e6, "seconds a collective waits for a rank"},
    {"no-pinning", SWITCH, AT(no_pinning), 0, 1, "let ranks move between cores, for a machine with other work"},
    {"help", SWITCH, AT(help), 0, 1, "this text"},
};
#define FLAGS (int)(sizeof flags / sizeof *flags)

/* Flags of train_gpt for the shape of a model, which are refused. */
static const char *const shape_flags[] = {"config", "layers",  "hidden",     "heads",   "kv-heads",
                                          "ffn",    "max-seq", "vocab",      "rotary",  "alibi",
                                          "window", "softcap", "activation", "rmsnorm", "untied"};
#define SHAPE_FLAGS (int)(sizeof shape_flags / sizeof *shape_flags)

static void *field(const flag *f, options *o) { return (char *)o + f->offset; }

static int parse_choice(const flag *f, const char *text, options *o) {
    for (int i = 0; i <= (int)f->high; i++) {
        if (strcmp(text, choices[f->kind - DTYPE][i]) != 0) continue;
        memcpy(field(f, o), &i, sizeof i);
        return 1;
    }
    fprintf(stderr, "eval_gpt: --%s %s: expected %s\n", f->name, text, f->help);
    return 0;
}

/* Sets a flag. Messages print numbers with %.15g, which writes whole numbers without a point. */
static int parse_value(const flag *f, const char *text, options *o) {
    char *end;
    double x;
    if (f->kind >= DTYPE) return parse_choice(f, text, o);
    if (f->kind == TEXT) {
        memcpy(field(f, o), &text, sizeof text);
        return 1;
    }
    errno = 0;
    x = strtod(text, &end);
    if (end == text || *end || errno || !(x >= f->low && x <= f->high) || (f->kind == WHOLE && x != floor(x))) {
        fprintf(stderr, "eval_gpt: --%s %s: expected %s from %.15g to %.15g\n", f->name, text,
                f->kind == WHOLE ? "a whole number" : "a number", f->low, f->high);
        return 0;
    }
    memcpy(field(f, o), &x, sizeof x);
    return 1;
}

static void print_help(options *o) {
    printf("usage: eval_gpt --init-from DIR --data FILE [flags]\n");
    for (int i = 0; i < FLAGS; i++) {
        const flag *f = &flags[i];
        double x = 0;
        if (f->kind == WHOLE || f->kind == REAL) memcpy(&x, field(f, o), sizeof x);
        printf("  --%-18s %s", f->name, f->help);
        if (f->kind == WHOLE || f->kind == REAL) printf(" (default %.15g)", x);
        printf("\n");
    }
}

static int parse_options(int argc, char **argv, options *o) {
    const int on = 1;
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
            o->help = 1;
            continue;
        }
        if (index >= FLAGS) {
            fprintf(stderr, "eval_gpt: --%s: the model in --init-from DIR has its own shape, see --help\n",
                    table[index].name);
            return 0;
        }
        if (flags[index].kind == SWITCH) memcpy(field(&flags[index], o), &on, sizeof on);
        else if (!parse_value(&flags[index], optarg, o)) return 0;
    }
    if (c != -1) return 0; /* getopt_long has printed what is wrong */
    if (optind < argc)
        fprintf(stderr, "eval_gpt: unexpected argument '%s'; flags start with --, see --help\n", argv[optind]);
    else if (!o->init_from && !o->help) fprintf(stderr, "eval_gpt: --init-from DIR is missing, see --help\n");
    return optind >= argc && (o->init_from || o->help);
}

/* ---- data -------------------------------------------------------------------------------------------------------- */

/* A passage of a cloze test: tokens [first, first + count), of which the last `answer` are its last word. */
typedef struct passage {
    int64_t first, count, answer;
} passage;

typedef struct dataset {
    int32_t *tokens;
    int64_t count, words; /* words of the original text; 0: unknown */
    passage *passages;    /* of a cloze test */
    int64_t passage_count;
    uint64_t hash; /* of the tokens, the words and the passages */
    int bytes;     /* a token is a byte */
} dataset;

static int is_cloze(const dataset *d) { return d->passage_count > 0; }

/* Returns number i of a file of little-endian int32. */
static int32_t number_at(const unsigned char *bytes, int64_t i) {
    const unsigned char *p = bytes + 4 * i;
    return (int32_t)((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
}

/* Checks the header of a token file, and reads the counts in it. */
static int check_bin(const char *path, const unsigned char *bytes, size_t size, dataset *d) {
    int64_t header[5] = {0};
    for (int i = 0; i < 5 && size >= LLMC_HEADER_BYTES; i++) header[i] = number_at(bytes, i);
    if (header[0] != LLMC_MAGIC || header[1] != 1) {
        fprintf(stderr, "eval_gpt: %s is not a token file: magic %lld, version %lld; expected %d, 1 (uint16 tokens)\n",
                path, (long long)header[0], (long long)header[1], LLMC_MAGIC);
        return 0;
    }
    d->count = header[2];
    d->words = header[3];
    d->passage_count = header[4];
    if (d->count >= 0 && d->words >= 0 && d->passage_count >= 0 &&
        LLMC_HEADER_BYTES + 2 * (uint64_t)d->count + 8 * (uint64_t)d->passage_count == size)
        return 1;
    fprintf(stderr, "eval_gpt: %s announces %lld tokens, %lld words and %lld passages, and has %zu bytes after this\n",
            path, (long long)d->count, (long long)d->words, (long long)d->passage_count, size - LLMC_HEADER_BYTES);
    return 0;
}

/* Reads the table of passages, which is behind the tokens. */
static int read_passages(const char *path, const unsigned char *table, dataset *d) {
    int64_t first = 0;
    d->passages = (passage *)calloc((size_t)d->passage_count, sizeof *d->passages);
    if (!d->passages) fprintf(stderr, "eval_gpt: no memory for %lld passages\n", (long long)d->passage_count);
    for (int64_t i = 0; d->passages && i < d->passage_count; i++) {
        passage *p = &d->passages[i];
        p->first = first;
        p->count = number_at(table, 2 * i);
        p->answer = number_at(table, 2 * i + 1);
        if (p->answer < 1 || p->count <= p->answer || p->count > d->count - first) {
            fprintf(stderr, "eval_gpt: %s: passage %lld has %lld tokens, and %lld of them as its last word\n", path,
                    (long long)i + 1, (long long)p->count, (long long)p->answer);
            return 0;
        }
        first += p->count;
    }
    if (d->passages && first != d->count)
        fprintf(stderr, "eval_gpt: %s: the passages have %lld tokens, the file has %lld\n", path, (long long)first,
                (long long)d->count);
    return d->passages && first == d->count;
}

static int is_blank(int c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

/* Returns the number of words of a text: the parts between single spaces, without white space at both ends. */
static int64_t count_words(const unsigned char *text, int64_t count) {
    int64_t first = 0, words = 1;
    while (count > first && is_blank(text[count - 1])) count--;
    while (first < count && is_blank(text[first])) first++;
    for (int64_t i = first; i < count; i++) words += text[i] == ' ';
    return first < count ? words : 0;
}

static uint64_t hash_of(uint64_t hash, const void *data, size_t bytes) { /* FNV-1a */
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return hash;
}

static int load_data(const char *path, dataset *d) {
    unsigned char *bytes = NULL;
    size_t size = 0, length = strlen(path);
    int ok = whole_file_read(path, WHOLE_FILE_MAX, &bytes, &size);
    d->bytes = !(length > 4 && strcmp(path + length - 4, ".bin") == 0);
    d->count = (int64_t)size;
    if (ok && d->bytes) d->words = count_words(bytes, d->count);
    ok = ok && (d->bytes || check_bin(path, bytes, size, d));
    d->tokens = ok ? (int32_t *)malloc((size_t)(d->count + 1) * sizeof *d->tokens) : NULL;
    if (ok && !d->tokens) fprintf(stderr, "eval_gpt: no memory for %lld tokens\n", (long long)d->count);
    for (int64_t i = 0; d->tokens && i < d->count; i++) {
        const unsigned char *p = bytes + LLMC_HEADER_BYTES + 2 * i;
        d->tokens[i] = d->bytes ? bytes[i] : p[0] | p[1] << 8;
    }
    if (d->tokens && is_cloze(d)) ok = read_passages(path, bytes + LLMC_HEADER_BYTES + 2 * d->count, d);
    free(bytes);
    if (!ok || !d->tokens) return 0;
    d->hash = hash_of(14695981039346656037u, d->tokens, (size_t)d->count * sizeof *d->tokens);
    d->hash = hash_of(d->hash, &d->words, sizeof d->words);
    d->hash = hash_of(d->hash, d->passages, (size_t)d->passage_count * sizeof *d->passages);
    return 1;
}

/* ---- windows ----------------------------------------------------------------------------------------------------- */

/* A sequence that the model sees: tokens [first, first + length). Target i is the token after token i. The last
   `counted` targets give results, from number `result` on: of a text the loss of a target, of a cloze test 1 when a
   token of an answer is the most probable one, otherwise 0, and NaN when a logit is not finite. */
typedef struct window {
    int64_t first, length, counted, result;
} window;

typedef struct job {
    options o;
    dataset data;
    mt_gpt_desc gpt;
    char path[MT_PATH_MAX]; /* of the model */
    window *windows;
    int64_t window_count, results;
    int64_t cut; /* passages that are too long and keep only their last tokens */
    int refused; /* 1: there is no result, and rank 0 has printed why */
} job;

/* Makes the windows of a text: a window of o.seq tokens, then one for each o.stride further targets. */
static int make_text_windows(job *j) {
    int64_t seq = (int64_t)j->o.seq, stride = (int64_t)j->o.stride, targets = j->data.count - 1, i;
    if (targets < 1) {
        fprintf(stderr, "eval_gpt: %s has %lld tokens, at least 2 are needed\n", j->o.data, (long long)j->data.count);
        return 0;
    }
    j->results = targets;
    j->window_count = 1 + (targets > seq ? (targets - seq + stride - 1) / stride : 0);
    j->windows = (window *)calloc((size_t)j->window_count, sizeof *j->windows);
    for (i = 0; j->windows && i < j->window_count; i++) {
        window *w = &j->windows[i];
        int64_t done = i > 0 ? seq + (i - 1) * stride : 0; /* targets of the windows before */
        w->first = i * stride;
        w->length = targets - w->first < seq ? targets - w->first : seq;
        w->counted = w->first + w->length - done;
        w->result = done;
    }
    return j->windows != NULL;
}

/* Makes the windows of a cloze test: one for each token of an answer, which ends before that token. */
static int make_cloze_windows(job *j) {
    const dataset *d = &j->data;
    int64_t seq = (int64_t)j->o.seq, n = 0;
    for (int64_t i = 0; i < d->passage_count; i++) n += d->passages[i].answer;
    j->results = j->window_count = n;
    j->windows = (window *)calloc((size_t)n, sizeof *j->windows);
    n = 0;
    for (int64_t i = 0; j->windows && i < d->passage_count; i++) {
        const passage *p = &d->passages[i];
        int64_t end = p->first + p->count, first = end - 1 - seq > p->first ? end - 1 - seq : p->first;
        if (p->answer > seq) {
            fprintf(stderr, "eval_gpt: the last word of passage %lld has %lld tokens, too many for --seq %lld\n",
                    (long long)i + 1, (long long)p->answer, (long long)seq);
            return 0;
        }
        j->cut += first > p->first;
        for (int64_t target = end - p->answer; target < end; target++, n++) {
            window w = {first, target - first, 1, n};
            j->windows[n] = w;
        }
    }
    return j->windows != NULL;
}

/* Finds the directory of the model and reads its desc, before any rank starts. */
static mt_status find_model(job *j) {
    mt_context *ctx = NULL;
    mt_context_desc small = {.arena_bytes = 64};
    int64_t step = -1;
    mt_status status = mt_context_create(NULL, &small, &ctx);
    if (status != MT_SUCCESS) return status;
    status = mt_checkpoint_latest(ctx, NULL, j->o.init_from, &step);
    if (step >= 0) status = mt_checkpoint_path(ctx, j->o.init_from, step, j->path, sizeof j->path);
    else snprintf(j->path, sizeof j->path, "%s", j->o.init_from);
    if (status == MT_SUCCESS) status = mt_gpt_desc_read(ctx, j->path, &j->gpt);
    if (status != MT_SUCCESS) fprintf(stderr, "eval_gpt: %s\n", mt_last_error(ctx));
    mt_context_destroy(ctx);
    j->gpt.layer.sequence_parallel = j->o.sequence_parallel;
    return status;
}

/* Returns what the tokens of a window must be a multiple of. With --cp, a rank has two parts of a window. */
static double seq_unit(const options *o) { return (o->cp > 1 ? 2 * o->cp : 1) * (o->sequence_parallel ? o->tp : 1); }

/* Checks the flags with the model, and sets those that are 0. The library checks how the ranks divide the model. */
static int check_options(options *o, const mt_gpt_desc *gpt) {
    double max = (double)gpt->max_seq;
    if (o->seq == 0) o->seq = max;
    if (o->stride == 0) o->stride = fmin(PAPER_STRIDE, o->seq);
    if (o->seq > max)
        fprintf(stderr, "eval_gpt: --seq %.15g is more than the %.15g positions of the model\n", o->seq, max);
    else if (o->stride > o->seq)
        fprintf(stderr, "eval_gpt: --stride %.15g is more than --seq %.15g\n", o->stride, o->seq);
    else if (o->cp > 1 && fmod(o->seq, seq_unit(o)) != 0)
        fprintf(stderr, "eval_gpt: --seq %.15g is not a multiple of %.15g: each of --cp %.15g ranks has 2 parts%s\n",
                o->seq, seq_unit(o), o->cp,
                o->sequence_parallel ? ", which --sequence-parallel divides over --tp" : "");
    else if (fmod(o->seq, seq_unit(o)) != 0)
        fprintf(stderr, "eval_gpt: --seq %.15g is not a multiple of --tp %.15g, which --sequence-parallel needs\n",
                o->seq, o->tp);
    else if (o->tp * o->cp * o->dp * o->pp > MAX_RANKS)
        fprintf(stderr, "eval_gpt: --tp %.15g x --cp %.15g x --dp %.15g x --pp %.15g are more than %d ranks\n", o->tp,
                o->cp, o->dp, o->pp, MAX_RANKS);
    else if (gpt->layer.scores.mask != MT_MASK_CAUSAL)
        fprintf(stderr, "eval_gpt: the model is not causal: each of its tokens sees its own target\n");
    else return 1;
    return 0;
}

/* Checks the data with the model. */
static int check_data(const options *o, const dataset *d, int64_t vocab) {
    if (d->bytes && vocab != 256) {
        fprintf(stderr,
                "eval_gpt: %s is text, and the vocabulary of %lld is not bytes: make a .bin of it with "
                "examples/text_to_bin.py\n",
                o->data, (long long)vocab);
        return 0;
    }
    for (int64_t i = 0; i < d->count; i++) {
        if (d->tokens[i] < vocab) continue;
        fprintf(stderr, "eval_gpt: %s: token %lld is %d, and the vocabulary of the model is %lld\n", o->data,
                (long long)i + 1, (int)d->tokens[i], (long long)vocab);
        return 0;
    }
    if (is_cloze(d) && o->words > 0)
        fprintf(stderr, "eval_gpt: --words is for a text, and %s is a cloze test\n", o->data);
    return !is_cloze(d) || o->words == 0;
}

/* A log must not overwrite another file of the run. */
static int check_log(const options *o) {
    return !o->log || (is_apart("log", o->log, "--data", o->data) && is_apart_from_streams("log", o->log) &&
                       is_apart_from("log", o->log, "--init-from", o->init_from, 1));
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

/* Groups of o.micro_batch windows are computed together, on every split the same ones. A data rank has the groups
   [first, end). A text is computed in rounds of `round` groups, which go through the pipeline together. */
typedef struct evaluator {
    const struct job *job;
    mt_context *ctx;
    mt_comm *comm; /* all ranks, from mt_comm_create_for */
    mt_grid grid;
    mt_params *params;
    mt_gpt gpt;
    mt_checkpoint *checkpoint;
    int64_t first, end, round;
    int32_t *ids, *targets; /* [round * o.micro_batch * o.seq], on the device; also on the host: */
    int32_t *host_ids, *host_targets;
    mt_tensor losses;       /* [round, o.micro_batch * o.seq] */
    float *numbers;         /* on the host: the losses of a round, or the logits of a group */
    float *results;         /* [job->results], on the host */
    mt_action *actions;     /* of a round */
    size_t device_bytes;    /* of ids, targets and losses together */
    double start, reported; /* seconds */
} evaluator;

static int rank_count(const options *o) { return (int)(o->tp * o->cp * o->dp * o->pp); }
static int is_last_stage(const evaluator *e) { return e->grid.pp_rank + 1 == e->grid.pp_size; }
/* Returns the tokens of a group that a context rank has. */
static int64_t group_tokens(const options *o) { return (int64_t)(o->micro_batch * o->seq / o->cp); }
static int64_t group_count(const job *j) {
    int64_t micro = (int64_t)j->o.micro_batch;
    return (j->window_count + micro - 1) / micro;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Returns window i of a group. The last group is filled with windows that count nothing. */
static window window_of(const job *j, int64_t group, int64_t i) {
    const window none = {0, 1, 0, 0};
    int64_t at = group * (int64_t)j->o.micro_batch + i;
    return at < j->window_count ? j->windows[at] : none;
}

/* Compares the flags and the data of all ranks, because ranks that are processes have command lines of their own. */
static mt_status compare_ranks(const evaluator *e) {
    const options *o = &e->job->o;
    const double numbers[] = {o->tp,
                              o->cp,
                              o->dp,
                              o->pp,
                              o->seq,
                              o->stride,
                              o->micro_batch,
                              o->words,
                              (double)o->device,
                              (double)o->dtype,
                              (double)o->sequence_parallel};
    static const char *const names[] = {"--tp",
                                        "--cp",
                                        "--dp",
                                        "--pp",
                                        "--seq",
                                        "--stride",
                                        "--micro-batch",
                                        "--words",
                                        "--device",
                                        "--dtype",
                                        "--sequence-parallel"};
    enum { COUNT = sizeof numbers / sizeof *numbers };
    char values[COUNT + 1][64];
    mt_setting told[COUNT + 1] = {{"--data", values[0]}};
    snprintf(values[0], sizeof values[0], "%lld tokens with hash %016llx", (long long)e->job->data.count,
             (unsigned long long)e->job->data.hash);
    for (int i = 0; i < COUNT; i++) {
        snprintf(values[i + 1], sizeof values[i + 1], "%.15g", numbers[i]);
        told[i + 1].name = names[i];
        told[i + 1].value = values[i + 1];
    }
    return mt_comm_compare(e->ctx, e->comm, "eval_gpt", 0, told, COUNT + 1);
}

/* Allocates what a round of a text or a group of a cloze test needs. */
static mt_status create_buffers(evaluator *e) {
    const job *j = e->job;
    size_t tokens = (size_t)(e->round * group_tokens(&j->o));
    size_t numbers = is_cloze(&j->data) ? (size_t)((double)j->gpt.vocab * j->o.micro_batch) : tokens;
    void *memory;
    e->device_bytes = 3 * tokens * 4;
    MT_TRY(mt_context_alloc(e->ctx, e->device_bytes, &memory));
    e->ids = (int32_t *)memory;
    e->targets = e->ids + tokens;
    e->losses = mt_tensor_f32((float *)memory + 2 * tokens, e->round, group_tokens(&j->o));
    e->host_ids = (int32_t *)malloc(tokens * sizeof *e->host_ids);
    e->host_targets = (int32_t *)malloc(tokens * sizeof *e->host_targets);
    e->numbers = (float *)malloc(numbers * sizeof *e->numbers);
    e->results = (float *)calloc((size_t)j->results, sizeof *e->results);
    e->actions = (mt_action *)malloc(6 * (size_t)e->round * sizeof *e->actions);
    if (e->host_ids && e->host_targets && e->numbers && e->results && e->actions) return MT_SUCCESS;
    fprintf(stderr, "eval_gpt: no memory for %zu tokens and %lld results\n", tokens, (long long)j->results);
    return MT_ERR_MEMORY;
}

/* Creates everything that a rank needs, except for the weights. device is MT_DEVICE_META for a plan. */
static mt_status evaluator_create(mt_comm *world, const job *j, mt_device device, size_t arena, evaluator *e) {
    const options *o = &j->o;
    mt_context_desc where = {.arena_bytes = arena,
                             .device = device,
                             .threads = (int)o->threads,
                             .ordinal = mt_comm_local_rank(world) % (int)fmax(1, mt_device_count(device)),
                             .planned = (mt_device)o->device};
    mt_grid_desc shape = {.tp = (int)o->tp, .dp = (int)o->dp, .pp = (int)o->pp, .cp = (int)o->cp};
    mt_checkpoint_desc files = {.directory = NULL}; /* only imports */
    e->job = j;
    MT_TRY(mt_context_create(world, &where, &e->ctx));
    if (device != MT_DEVICE_META) MT_TRY(mt_comm_create_for(e->ctx, world, &e->comm));
    if (device != MT_DEVICE_META) MT_TRY(compare_ranks(e));
    MT_TRY(mt_grid_create(e->comm ? e->comm : world, &shape, &e->grid));
    MT_TRY(mt_params_create(e->ctx, &e->grid, &e->params));
    MT_TRY(mt_params_set_dtype(e->ctx, e->params, (mt_dtype)o->dtype));
    MT_TRY(mt_gpt_create(e->ctx, e->params, &j->gpt, &e->gpt));
    MT_TRY(mt_params_init(e->ctx, e->params, 0));
    MT_TRY(mt_gpt_checkpoint_create(e->ctx, e->params, &e->gpt, &files, &e->checkpoint));
    e->first = group_count(j) * e->grid.dp_rank / e->grid.dp_size;
    e->end = group_count(j) * (e->grid.dp_rank + 1) / e->grid.dp_size;
    e->round = is_cloze(&j->data) ? 1 : 4 * e->grid.pp_size; /* few enough for the memory, enough to fill a pipeline */
    return create_buffers(e);
}

static void evaluator_destroy(evaluator *e) {
    mt_context_free(e->ctx, e->ids, e->device_bytes);
    mt_checkpoint_destroy(e->ctx, e->checkpoint);
    mt_params_destroy(e->params);
    mt_grid_destroy(&e->grid);
    mt_comm_destroy(e->comm);
    mt_context_destroy(e->ctx);
    free(e->host_ids);
    free(e->host_targets);
    free(e->numbers);
    free(e->results);
    free(e->actions);
}

static void report_progress(evaluator *e, int64_t done) {
    double time = now(), left = (time - e->start) / (double)(done - e->first) * (double)(e->end - done);
    if (mt_comm_rank(e->grid.world) != 0 || time - e->reported < PROGRESS_SECONDS) return;
    e->reported = time;
    fprintf(stderr, "eval_gpt: %lld of %lld windows of the first data rank, %d:%02d left\n",
            (long long)((done - e->first) * (int64_t)e->job->o.micro_batch),
            (long long)((e->end - e->first) * (int64_t)e->job->o.micro_batch), (int)(left / 60), (int)left % 60);
}

/* ---- the loss of each target of a text --------------------------------------------------------------------------- */

/* A token of this rank: number `at` of a window. */
typedef struct place {
    window w;
    int64_t at;
} place;

/* Returns the token in row `row` of a group whose windows have `seq` tokens. */
static place place_of(const evaluator *e, int64_t group, int64_t seq, int64_t row) {
    int64_t token =
        mt_context_parallel_token(NULL, e->grid.cp_rank, e->grid.cp_size, (int64_t)e->job->o.micro_batch, seq, row);
    place p = {window_of(e->job, group, token / seq), token % seq};
    return p;
}

/* Returns its id; 0: the window is shorter. */
static int32_t id_at(const evaluator *e, const place *p) {
    return p->at < p->w.length ? e->job->data.tokens[p->w.first + p->at] : 0;
}

/* Returns whether the target of a token counts. */
static int counts(const place *p) { return p->at < p->w.length && p->at >= p->w.length - p->w.counted; }

/* Copies `groups` groups to the device. Targets that do not count have the value that the loss ignores. */
static mt_status load_groups(evaluator *e, int64_t first, int64_t groups) {
    const job *j = e->job;
    int64_t part = group_tokens(&j->o), tokens = groups * part;
    for (int64_t i = 0; i < tokens; i++) {
        place p = place_of(e, first + i / part, (int64_t)j->o.seq, i % part);
        e->host_ids[i] = id_at(e, &p);
        e->host_targets[i] = counts(&p) ? j->data.tokens[p.w.first + p.at + 1] : -100;
    }
    MT_TRY(mt_upload(e->ctx, e->host_ids, mt_tensor_make(e->ids, MT_I32, 1, tokens)));
    return mt_upload(e->ctx, e->host_targets, mt_tensor_make(e->targets, MT_I32, 1, tokens));
}

/* The forward of a pipeline's stage: the losses of group a->micro_batch of the round. */
static mt_status forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    evaluator *e = (evaluator *)user;
    const options *o = &e->job->o;
    int64_t at = a->micro_batch * group_tokens(o);
    mt_batch batch = {.sequences = (int64_t)o->micro_batch, .seq = (int64_t)o->seq};
    return mt_gpt_stage_forward(ctx, &e->gpt, &batch, e->ids + at, e->targets + at, input, output,
                                mt_tensor_rows(e->losses, a->micro_batch, 1), NULL);
}

/* Computes a round of `groups` groups. The last stage gets the results. */
static mt_status text_round(evaluator *e, int64_t first, int64_t groups) {
    const job *j = e->job;
    int64_t part = group_tokens(&j->o);
    mt_pipeline_stage stage = {.rows = part / (j->o.sequence_parallel ? (int64_t)j->o.tp : 1),
                               .cols = j->gpt.layer.hidden,
                               .dtype = mt_params_dtype(e->params),
                               .forward = forward,
                               .user = e};
    int count = 0;
    MT_TRY(load_groups(e, first, groups));
    MT_TRY(mt_pipeline_schedule(MT_SCHEDULE_FORWARD_ONLY, e->grid.pp_size, e->grid.pp_rank, (int)groups, e->actions,
                                6 * (int)groups, &count));
    MT_TRY(mt_pipeline_run(e->ctx, &e->grid, &stage, e->actions, count));
    if (!is_last_stage(e)) return MT_SUCCESS;
    MT_TRY(mt_download(e->ctx, mt_tensor_rows(e->losses, 0, groups), e->numbers));
    for (int64_t i = 0; i < groups * part; i++) {
        place p = place_of(e, first + i / part, (int64_t)j->o.seq, i % part);
        if (counts(&p)) e->results[p.w.result + p.at - (p.w.length - p.w.counted)] = e->numbers[i];
    }
    return MT_SUCCESS;
}

/* ---- the tokens of the answers of a cloze test ------------------------------------------------------------------- */

/* Returns 1 if x[index] is the largest number, of equal ones the first, and otherwise 0; NaN if a number is not
   finite. */
static float is_largest(const float *x, int64_t count, int64_t index) {
    int64_t best = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(x[i])) return NAN;
        if (x[i] > x[best]) best = i;
    }
    return best == index;
}

/* Returns the tokens of the longest window of a group, and as many as make a multiple of seq_unit. */
static int64_t group_seq(const job *j, int64_t group) {
    int64_t unit = (int64_t)seq_unit(&j->o), longest = 1;
    for (int64_t i = 0; i < (int64_t)j->o.micro_batch; i++) {
        window w = window_of(j, group, i);
        if (w.length > longest) longest = w.length;
    }
    return (longest + unit - 1) / unit * unit;
}

/* Computes the logits after each window of a group, and whether the next token has the largest. */
static mt_status cloze_group(evaluator *e, int64_t group) {
    const job *j = e->job;
    int64_t micro = (int64_t)j->o.micro_batch, vocab = j->gpt.vocab, tokens;
    mt_batch batch = {.sequences = micro, .seq = group_seq(j, group)};
    size_t mark = mt_arena_mark(e->ctx);
    mt_tensor lengths, logits;
    for (int64_t i = 0; i < micro; i++) e->host_targets[i] = (int32_t)window_of(j, group, i).length;
    tokens = micro * batch.seq / e->grid.cp_size;
    for (int64_t i = 0; i < tokens; i++) {
        place p = place_of(e, group, batch.seq, i);
        e->host_ids[i] = id_at(e, &p);
    }
    MT_TRY(mt_arena_tensor(e->ctx, MT_I32, 1, micro, &lengths));
    MT_TRY(mt_arena_tensor(e->ctx, MT_F32, micro, vocab, &logits));
    MT_TRY(mt_upload(e->ctx, e->host_ids, mt_tensor_make(e->ids, MT_I32, 1, tokens)));
    MT_TRY(mt_upload(e->ctx, e->host_targets, lengths));
    batch.lengths = (const int32_t *)lengths.data;
    MT_TRY(mt_gpt_logits(e->ctx, &e->gpt, &batch, e->ids, logits));
    MT_TRY(mt_download(e->ctx, logits, e->numbers));
    mt_arena_release(e->ctx, mark);
    for (int64_t i = 0; i < micro; i++) {
        window w = window_of(j, group, i);
        if (w.counted && e->grid.cp_rank == 0) /* the context ranks have the same logits */
            e->results[w.result] = is_largest(e->numbers + i * vocab, vocab, j->data.tokens[w.first + w.length]);
    }
    return MT_SUCCESS;
}

/* ---- all results ------------------------------------------------------------------------------------------------- */

/* Gives every rank the results of all. A result of another data or context rank is 0 here, so the sums are exact. */
static mt_status share_results(evaluator *e) {
    size_t mark = mt_arena_mark(e->ctx);
    int64_t all = e->job->results, room = all < SHARE_FLOATS ? all : SHARE_FLOATS;
    mt_tensor part;
    MT_TRY(mt_arena_tensor(e->ctx, MT_F32, 1, room, &part));
    for (int64_t at = 0; at < all; at += room) {
        int64_t count = all - at < room ? all - at : room;
        mt_tensor some = mt_tensor_cols(part, 0, count);
        MT_TRY(mt_upload(e->ctx, e->results + at, some));
        MT_TRY(mt_all_reduce(e->ctx, e->grid.dp_cp, part.data, part.data, (size_t)count, MT_F32, MT_SUM));
        MT_TRY(mt_broadcast(e->ctx, e->grid.pp, part.data, part.data, (size_t)count, MT_F32, e->grid.pp_size - 1));
        MT_TRY(mt_download(e->ctx, some, e->results + at));
    }
    mt_arena_release(e->ctx, mark);
    return MT_SUCCESS;
}

static mt_status evaluate(evaluator *e) {
    int cloze = is_cloze(&e->job->data);
    e->start = e->reported = now();
    for (int64_t g = e->first; g < e->end; g += e->round) {
        int64_t groups = e->end - g < e->round ? e->end - g : e->round;
        MT_TRY(cloze ? cloze_group(e, g) : text_round(e, g, groups));
        report_progress(e, g + groups);
    }
    return share_results(e);
}

/* Plans the load of the model, which takes the arena for a shard of a parameter in f32. */
static mt_status plan_load(const evaluator *e) {
    size_t mark = mt_arena_mark(e->ctx);
    mt_tensor shard;
    for (int i = 0; i < mt_params_count(e->params); i++) {
        const mt_param *p = mt_params_at(e->params, i);
        MT_TRY(mt_arena_tensor(e->ctx, MT_F32, p->value.rows, p->value.cols, &shard));
        mt_arena_release(e->ctx, mark);
    }
    return MT_SUCCESS;
}

/* Returns the bytes of the arena that this rank needs: it runs a round, or the group with the longest windows, on the
   meta device. */
static mt_status plan(mt_comm *world, const job *j, size_t *arena) {
    mt_comm *meta = NULL;
    evaluator e;
    int64_t longest = 0;
    mt_status status = mt_comm_create_meta(mt_comm_size(world), mt_comm_rank(world), &meta);
    memset(&e, 0, sizeof e);
    for (int64_t g = 0; g < group_count(j); g++)
        if (group_seq(j, g) > group_seq(j, longest)) longest = g;
    if (status == MT_SUCCESS) status = evaluator_create(meta, j, MT_DEVICE_META, 0, &e);
    if (status == MT_SUCCESS) status = is_cloze(&j->data) ? cloze_group(&e, longest) : text_round(&e, 0, e.round);
    if (status == MT_SUCCESS) status = share_results(&e);
    if (status == MT_SUCCESS) status = plan_load(&e);
    if (status == MT_SUCCESS) *arena = mt_arena_peak(e.ctx);
    else if (mt_comm_rank(world) == 0)
        fprintf(stderr, "eval_gpt: %s: %s\n", mt_status_name(status), mt_comm_last_error(meta));
    evaluator_destroy(&e);
    mt_comm_destroy(meta);
    return status;
}

/* ---- what is printed --------------------------------------------------------------------------------------------- */

/* Prints which result is not finite, and why there is therefore no result at all. */
static void print_refusal(const job *j, int64_t result, float value) {
    const dataset *d = &j->data;
    int64_t i = 0, before = 0;
    if (!is_cloze(d)) {
        fprintf(stderr, "eval_gpt: %s: the loss of token %lld, which is %d, is %s: no perplexity\n", j->o.data,
                (long long)result + 2, (int)d->tokens[result + 1], isnan(value) ? "nan" : "infinite");
        return;
    }
    while (before + d->passages[i].answer <= result) before += d->passages[i++].answer;
    fprintf(stderr,
            "eval_gpt: %s: passage %lld: the logits for token %lld of its last word are not all finite: no accuracy\n",
            j->o.data, (long long)i + 1, (long long)(result - before) + 1);
}

static double sum_of(const job *j, const float *losses) {
    double sum = 0; /* in the order of the text */
    for (int64_t i = 0; i < j->results; i++) sum += (double)losses[i];
    return sum;
}

static double words_of(const job *j) { return j->o.words > 0 ? j->o.words : (double)j->data.words; }

/* Checks that what will be printed is finite. All ranks have the same results, and rank 0 prints what is wrong. */
static int check_results(const evaluator *e) {
    const job *j = e->job;
    int speaks = mt_comm_rank(e->grid.world) == 0;
    double sum = 0, words = words_of(j);
    for (int64_t i = 0; i < j->results; i++) {
        if (isfinite(e->results[i])) continue;
        if (speaks) print_refusal(j, i, e->results[i]);
        return 0;
    }
    if (!is_cloze(&j->data)) sum = sum_of(j, e->results);
    if (isfinite(exp(sum / (double)j->results)) && (words == 0 || isfinite(exp(sum / words)))) return 1;
    if (speaks)
        fprintf(stderr,
                "eval_gpt: %s: the sum of losses %.9g, over %lld tokens and %.15g words, is too large for a "
                "perplexity\n",
                j->o.data, sum, (long long)j->results, words);
    return 0;
}

/* Prints the perplexity. The sum is in double. */
static void print_perplexity(const job *j, const float *losses, double seconds, FILE *log) {
    double sum = sum_of(j, losses), words = words_of(j);
    if (log) fprintf(log, "target,token,loss\n");
    for (int64_t i = 0; log && i < j->results; i++)
        fprintf(log, "%lld,%d,%.9g\n", (long long)i + 1, (int)j->data.tokens[i + 1], (double)losses[i]);
    if (words > 0) printf("perplexity %.9g per word, %.15g words, ", exp(sum / words), words);
    else printf("words unknown, see --words, ");
    printf("%.9g per token, %lld tokens, sum of losses %.9g, %lld windows of %.15g, stride %.15g, %.1f s\n",
           exp(sum / (double)j->results), (long long)j->results, sum, (long long)j->window_count, j->o.seq, j->o.stride,
           seconds);
}

static void print_accuracy(const job *j, const float *tokens, double seconds, FILE *log) {
    const dataset *d = &j->data;
    int64_t right = 0, at = 0;
    if (log) fprintf(log, "passage,tokens,answer,right\n");
    for (int64_t i = 0; i < d->passage_count; i++) {
        int all = 1;
        for (int64_t n = 0; n < d->passages[i].answer; n++, at++) all = all && tokens[at] > 0;
        right += all;
        if (log)
            fprintf(log, "%lld,%lld,%lld,%d\n", (long long)i + 1, (long long)d->passages[i].count,
                    (long long)d->passages[i].answer, all);
    }
    printf("accuracy %.4f %%, %lld of %lld passages, %lld tokens in their last words, %.1f s",
           100 * (double)right / (double)d->passage_count, (long long)right, (long long)d->passage_count,
           (long long)j->results, seconds);
    if (j->cut > 0) printf(", %lld passages cut to --seq %.15g", (long long)j->cut, j->o.seq);
    printf("\n");
}

static void print_model(const job *j) {
    printf("GPT: %lld layers, hidden %lld, heads %lld, vocabulary %lld, %lld positions, from %s in %s\n",
           (long long)j->gpt.layers, (long long)j->gpt.layer.hidden, (long long)j->gpt.layer.heads,
           (long long)j->gpt.vocab, (long long)j->gpt.max_seq, j->path, mt_dtype_name((mt_dtype)j->o.dtype));
    fflush(stdout);
}

static mt_status write_results(const evaluator *e, double seconds) {
    const job *j = e->job;
    FILE *log = j->o.log ? output_file_open(j->o.log) : NULL;
    int failed = j->o.log && (!log || !output_file_cut(j->o.log, log, 0));
    if (is_cloze(&j->data)) print_accuracy(j, e->results, seconds, log);
    else print_perplexity(j, e->results, seconds, log);
    if (!output_file_close(j->o.log, log)) failed = 1;
    return failed ? MT_ERR_IO : MT_SUCCESS;
}

/* ---- the job ----------------------------------------------------------------------------------------------------- */

/* Loads the model. When a file is wrong, all ranks have the same error, and rank 0 prints it. */
static mt_status import_model(mt_comm *world, evaluator *e, job *j, int *refused) {
    mt_status status = mt_checkpoint_import(e->ctx, e->checkpoint, j->path);
    *refused = status == MT_ERR_IO || status == MT_ERR_DATA;
    if (*refused && mt_comm_rank(world) == 0) fprintf(stderr, "eval_gpt: %s\n", mt_last_error(e->ctx));
    if (*refused) __atomic_store_n(&j->refused, 1, __ATOMIC_RELAXED);
    return status;
}

static mt_status rank_main(mt_comm *world, void *user) {
    job *j = (job *)user;
    evaluator e;
    size_t arena = 0;
    int refused = 0;
    mt_status status = plan(world, j, &arena);
    if (status != MT_SUCCESS) { /* rank 0 has printed why: the launcher must not report it again */
        __atomic_store_n(&j->refused, 1, __ATOMIC_RELAXED);
        return MT_SUCCESS;
    }
    memset(&e, 0, sizeof e);
    status = evaluator_create(world, j, (mt_device)j->o.device, arena, &e);
    if (status == MT_SUCCESS && mt_comm_rank(world) == 0) print_model(j);
    if (status == MT_SUCCESS) status = import_model(world, &e, j, &refused);
    if (status == MT_SUCCESS) status = evaluate(&e);
    if (status == MT_SUCCESS && !check_results(&e)) {
        refused = 1;
        __atomic_store_n(&j->refused, 1, __ATOMIC_RELAXED);
    }
    if (status == MT_SUCCESS && !refused && mt_comm_rank(world) == 0) status = write_results(&e, now() - e.start);
    evaluator_destroy(&e);
    return refused ? MT_SUCCESS : status; /* the launcher must not report it again */
}

static mt_status run(job *j) {
    mt_launch_desc ranks = {.ranks = rank_count(&j->o),
                            .no_pinning = j->o.no_pinning,
                            .cores_per_rank = (int)j->o.threads,
                            .timeout_s = j->o.timeout};
    mt_status status = find_model(j);
    if (status != MT_SUCCESS || !check_options(&j->o, &j->gpt)) return MT_ERR_ARGUMENT;
    if (!j->o.data) {
        print_model(j);
        return MT_SUCCESS;
    }
    if (!load_data(j->o.data, &j->data) || !check_data(&j->o, &j->data, j->gpt.vocab) || !check_log(&j->o) ||
        !(is_cloze(&j->data) ? make_cloze_windows(j) : make_text_windows(j)))
        return MT_ERR_ARGUMENT;
    status = mt_world_from_env(&ranks, rank_main, j);
    return j->refused ? MT_ERR_ARGUMENT : status;
}

int main(int argc, char **argv) {
    job job = {.o = {.tp = 1, .cp = 1, .dp = 1, .pp = 1, .micro_batch = 4, .threads = 1, .timeout = 600}};
    mt_status status;
    setlocale(LC_NUMERIC, "C"); /* flags and logs have a decimal point in every locale */
    if (!parse_options(argc, argv, &job.o)) return 2;
    if (job.o.help) {
        print_help(&job.o);
        return 0;
    }
    status = run(&job);
    free(job.windows);
    free(job.data.tokens);
    free(job.data.passages);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "eval_gpt: cannot write the results: %s\n", strerror(errno));
        status = MT_ERR_IO;
    }
    return status == MT_SUCCESS ? 0 : 1;
}
