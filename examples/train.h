/* train.h - what a training program needs besides its model: flags, data files, logs, one rank of a training run,
   checkpoints, printing, the plan of a dry run, and main. It is a part of these programs, not of the library.

   A program includes it once. Before that it includes megatron.h with the implementation, and defines
       PROGRAM                      the name of the program, which begins its messages
       ADAM_BETA2, ADAM_EPS         of AdamW; 0 is the default of mt_optimizer_desc
       TOKEN_INPUTS                 number of int32 on the device for each token of a step, such as ids and targets
       SEQUENCE_INPUTS              the same for each sequence
       SEQUENCE_LOSSES              number of losses of a sequence, in addition to one for each token
       loss_names, validation_names names of the losses of a step and of a validation, in the log and on the screen
       noted, FIXED_LINES           flags that a checkpoint notes; with --resume the first lines of the note must not
                                    change, where the data are line 1
       configs                      the values of --config
       struct model                 what one rank has of the model
       struct setup                 what is the same for all ranks of a process, in addition to flags and data
   Below it defines the functions that are declared in "what the program defines".

   A program that does not train defines PROGRAM and FILES_ONLY, and gets only the part "files". */

#ifndef TRAIN_H
#define TRAIN_H

#include "megatron.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- files: what a program reads whole, and what it writes besides its results ----------------------------------- */

/* A person may name anything: a file, /dev/null, /dev/fd/N, a terminal, a pipe or /dev/zero. A file that is longer than
   the program can use is refused before it fills the memory. What has no end or no content, and what nobody reads, is
   refused at once, and so is a file to write that the run reads or writes for another purpose. */

/* Of texts and token files. The largest file of train_bert has 2^31 tokens of 3 bytes. */
#define WHOLE_FILE_MAX ((int64_t)8 << 30)

/* Opens a file. A pipe without a writer does not block. Returns -1 with errno. */
static inline int whole_file_open(const char *path) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &info) != 0 || S_ISREG(info.st_mode)) return fd;
    close(fd);
    errno = S_ISDIR(info.st_mode) ? EISDIR : 0; /* 0: neither a directory nor a file */
    return -1;
}

/* Reads up to `most` + 1 bytes, and appends them to bytes[*size]. Returns 0 with errno after an error. */
static inline int whole_file_append(int fd, int64_t most, unsigned char **bytes, size_t *size) {
    const size_t end = *size + (size_t)most + 1;
    size_t room = *size + (1 << 16);
    ssize_t n = 1;
    while (n > 0 && *size < end) {
        unsigned char *more;
        if (room > end) room = end;
        more = (unsigned char *)realloc(*bytes, room + 1); /* also for the NUL */
        if (!more) return 0;
        *bytes = more;
        n = read(fd, *bytes + *size, room - *size);
        if (n < 0 && errno != EINTR) return 0;
        if (n > 0) *size += (size_t)n;
        else if (n < 0) n = 1;
        if (*size == room) room *= 2;
    }
    (*bytes)[*size] = 0;
    return 1;
}

/* Appends the content of a file of at most `most` bytes to bytes[*size], and a NUL that does not count. path NULL: the
   standard input, which may be a pipe. The caller frees *bytes, also after an error. Returns 0 after it has printed
   what is wrong. */
static inline int whole_file_read(const char *path, int64_t most, unsigned char **bytes, size_t *size) {
    const char *name = path ? path : "the standard input";
    const size_t before = *size;
    struct stat info;
    int fd = path ? whole_file_open(path) : STDIN_FILENO, ok = fd >= 0, is_long = 0;
    if (ok && fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) is_long = info.st_size > most; /* do not read it */
    if (ok && !is_long) ok = whole_file_append(fd, most, bytes, size);
    if (ok && *size - before > (size_t)most) is_long = 1; /* of a pipe, or of a file that has grown */
    if (!ok)
        fprintf(stderr, PROGRAM ": cannot read %s: %s\n", name, errno ? strerror(errno) : "it is not a regular file");
    else if (is_long)
        fprintf(stderr, PROGRAM ": cannot read %s: it has more than %lld bytes, the most that the program reads\n",
                name, (long long)most);
    if (fd >= 0 && path) close(fd);
    return ok && !is_long;
}

/* Returns why a program does not write to the file that open has returned as fd, or NULL. */
static inline const char *output_file_fault(int fd) {
    struct stat info;
    if (fd < 0 && errno == ENXIO) return "it is a socket, or a pipe that nobody reads";
    if (fd < 0 || fstat(fd, &info) != 0) return strerror(errno);
    return S_ISBLK(info.st_mode) ? "it is a block device" : NULL;
}

/* Opens a file to write at its end, and creates it if it is missing; what it has stays. Does not wait for a reader of a
   pipe, but the writes to a pipe wait. Returns NULL after it has printed what is wrong. */
static inline FILE *output_file_open(const char *path) {
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_NOCTTY, 0666);
    const char *fault = output_file_fault(fd);
    FILE *file = NULL;
    if (!fault && (fcntl(fd, F_SETFL, O_APPEND) != 0 || !(file = fdopen(fd, "a")))) fault = strerror(errno);
    if (!fault) return file;
    fprintf(stderr, PROGRAM ": cannot write %s: %s\n", path, fault);
    if (fd >= 0) close(fd);
    return NULL;
}

/* Returns 1 for a file that can be locked and shortened, which pipes and devices cannot. */
static inline int output_file_is_regular(FILE *file) {
    struct stat info;
    return fstat(fileno(file), &info) == 0 && S_ISREG(info.st_mode);
}

/* Keeps the first `end` bytes of a regular file; file may be NULL. Returns 0 after it has printed what is wrong. */
static inline int output_file_cut(const char *path, FILE *file, off_t end) {
    if (!file || !output_file_is_regular(file) || ftruncate(fileno(file), end) == 0) return 1;
    fprintf(stderr, PROGRAM ": cannot shorten %s: %s\n", path, strerror(errno));
    return 0;
}

/* Closes a file, which may be NULL. Returns 0 when something could not be written. */
static inline int output_file_close(const char *path, FILE *file) {
    int failed = file && ferror(file);
    if (file && fclose(file) != 0) failed = 1;
    if (failed) fprintf(stderr, PROGRAM ": cannot write %s: %s\n", path, strerror(errno));
    return !failed;
}

/* For a file that does not exist yet: finds its directory, and its name in there. Follows symbolic links to files that
   do not exist yet. Returns 0 when there is no such directory. */
static inline int find_place(const char *path, struct stat *folder, char name[MT_PATH_MAX]) {
    char at[MT_PATH_MAX], to[MT_PATH_MAX], *last;
    ssize_t n = 0;
    int links = 0, length = snprintf(at, sizeof at, "%s", path);
    while (length < (int)sizeof at && links++ < 16 && (n = readlink(at, to, sizeof to - 1)) > 0) {
        to[n] = 0;
        last = strrchr(at, '/');
        last = last && to[0] != '/' ? last + 1 : at; /* a relative link replaces only the last component of the path */
        length = (int)(last - at) + snprintf(last, sizeof at - (size_t)(last - at), "%s", to);
    }
    if (length >= (int)sizeof at || n > 0) return 0;
    last = strrchr(at, '/');
    snprintf(name, MT_PATH_MAX, "%s", last ? last + 1 : at);
    if (last) last[last == at] = 0; /* the root keeps its slash */
    return stat(last ? at : ".", folder) == 0;
}

/* Returns 1 when two paths lead to the same regular file, which need not exist yet. Terminals, pipes and devices do not
   count: they may be written to twice. */
static inline int same_file(const char *a, const char *b) {
    char name_a[MT_PATH_MAX], name_b[MT_PATH_MAX];
    struct stat x, y;
    int has_a = stat(a, &x) == 0, has_b = stat(b, &y) == 0, same = has_a && has_b && S_ISREG(x.st_mode);
    if (!has_a && !has_b) same = find_place(a, &x, name_a) && find_place(b, &y, name_b) && !strcmp(name_a, name_b);
    return same && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Returns 1 when the file `log` of --flag is not the file `path` of `other`; otherwise prints a message and returns 0.
   path may be NULL. */
static inline int is_apart(const char *flag, const char *log, const char *other, const char *path) {
    if (!path || !same_file(log, path)) return 1;
    fprintf(stderr, PROGRAM ": --%s %s is the same file as %s%s%s\n", flag, log, other, *other ? " " : "", path);
    return 0;
}

/* The same for all files of a checkpoint (depth 0), or of a directory of checkpoints (depth 1). */
static inline int is_apart_from(const char *flag, const char *log, const char *other, const char *directory,
                                int depth) {
    DIR *d = directory ? opendir(directory) : NULL;
    const struct dirent *e;
    char path[MT_PATH_MAX];
    int apart = 1;
    while (d && apart && (e = readdir(d))) {
        const char *end = strrchr(e->d_name, '.');
        int ours = end && (!strcmp(end, ".safetensors") || !strcmp(end, ".json"));
        if (snprintf(path, sizeof path, "%s/%s", directory, e->d_name) >= (int)sizeof path) continue;
        if (ours) apart = is_apart(flag, log, other, path);
        else if (depth > 0 && strncmp(e->d_name, "step-", 5) == 0)
            apart = is_apart_from(flag, log, other, path, depth - 1);
    }
    if (d) closedir(d);
    if (apart && directory && depth > 0 && snprintf(path, sizeof path, "%s/.lock", directory) < (int)sizeof path)
        apart = is_apart(flag, log, other, path);
    return apart;
}

/* The same for the files of the process. */
static inline int is_apart_from_streams(const char *flag, const char *log) {
    return is_apart(flag, log, "", "/dev/stdout") && is_apart(flag, log, "", "/dev/stderr");
}

#ifndef FILES_ONLY

#define LLMC_MAGIC 20240520
#define LLMC_HEADER_BYTES 1024
#define EVAL_SEQUENCES 32
#define SKIPPED_STEPS 10 /* a run ends after so many in a row, see skip_step */
#define MAX_RANKS 1024
#define MAX_FLAGS 64
#define COUNT_OF(array) (int)(sizeof(array) / sizeof *(array))
#define LOSSES COUNT_OF(loss_names)
#define TOTALS COUNT_OF(validation_names) /* sums that a pass computes; the first ones are those of its losses */

/* ---- options: one table for parsing, ranges and --help ----------------------------------------------------------- */

/* The flags of all programs. A program does not read the fields of flags that its table lacks. */
typedef struct options {
    const char *data, *log, *hash_log, *prompt, *checkpoint, *init_from, *machine;
    double tp, cp, dp, pp, layers, hidden, heads, kv_heads, ffn, seq, max_seq, batch, micro_batch, steps, warmup, seed,
        eval_interval;
    double sample, top_k, top_p, vocab, threads, invariant, invariant_data, invariant_context, lr, min_lr, dropout,
        clip, weight_decay, label_smoothing;
    double temperature, timeout, bucket_mb, save_interval, window, softcap, check;
    int dtype, device, cuda_graph, recompute, schedule, config, distributed_optimizer, sequence_parallel, interleave,
        no_pinning, rotary, activation, placement, cp_comm_type;
    int rmsnorm, untied, alibi, resume, dry_run, help;
    char given[MAX_FLAGS]; /* of flags[i]: GIVEN, GIVEN_BY_CONFIG, or 0 */
} options;

enum { GIVEN = 1, GIVEN_BY_CONFIG };

/* A LEVEL is a whole number that may be left out: it is then 1. */
enum {
    TEXT,
    WHOLE,
    LEVEL,
    REAL,
    SWITCH,
    DTYPE,
    DEVICE,
    RECOMPUTE,
    SCHEDULE,
    ACTIVATION,
    PLACEMENT,
    CP_COMM_TYPE,
    CONFIG
};

/* The values of flags of the kinds DTYPE to CP_COMM_TYPE, in this order; those of CONFIG are `configs`. The index of a
   value is its number in mt_dtype, mt_device, mt_recompute, mt_schedule, mt_activation, mt_placement or
   mt_cp_comm_type. */
static const char *const choices[][MT_ACTIVATION_COUNT] = {
    {"f32", "bf16", "f16"},
    {"cpu", "cuda"},
    {"none", "selective", "full"},
    {"1f1b", "gpipe"},
    {"gelu", "gelu-erf", "swiglu", "squared-relu", "relu", "tanh"},
    {"pre-ln", "post-ln"},
    {"auto", "p2p", "allgather", "a2a"}};

typedef struct flag {
    const char *name;
    int kind;
    size_t offset;
    double low, high; /* allowed range, inclusive */
    const char *help;
} flag;

#define AT(field) offsetof(options, field)

/* The rows of the flags that all programs have. */
/* clang-format off */
#define SPLIT_FLAGS \
    {"dtype", DTYPE, AT(dtype), 0, 2, "f32, bf16 or f16, of weights and activations; f16 scales the loss"}, \
    {"tp", WHOLE, AT(tp), 1, 1024, "tensor parallel ranks"}, \
    {"cp", WHOLE, AT(cp), 1, 1024, "context parallel ranks, which have parts of each sequence"}, \
    {"cp-comm-type", CP_COMM_TYPE, AT(cp_comm_type), 0, 3, \
     "auto, p2p, allgather or a2a: how context parallel ranks share keys and values"}, \
    {"dp", WHOLE, AT(dp), 1, 1024, "data parallel ranks"}, \
    {"bucket-mb", REAL, AT(bucket_mb), 0, 1e6, \
     "MB of gradients that one collective sums over data parallel ranks (0: 160, or 4 x --dp)"}, \
    {"use-distributed-optimizer", SWITCH, AT(distributed_optimizer), 0, 1, \
     "each data parallel rank keeps a share of the optimizer's state (ZeRO-1)"}, \
    {"pp", WHOLE, AT(pp), 1, MAX_RANKS, "pipeline stages, which share the layers evenly"}, \
    {"schedule", SCHEDULE, AT(schedule), 0, 1, "1f1b or gpipe: the order of micro-batches in the pipeline"}
#define SIZE_FLAGS \
    {"layers", WHOLE, AT(layers), 1, 1024, "transformer layers"}, \
    {"hidden", WHOLE, AT(hidden), 1, 65536, "hidden size"}, \
    {"heads", WHOLE, AT(heads), 1, 1024, "attention heads"}
#define BATCH_FLAGS \
    {"batch", WHOLE, AT(batch), 1, 1 << 20, "sequences per step, over all ranks"}, \
    {"micro-batch", WHOLE, AT(micro_batch), 0, 1 << 20, \
     "sequences per forward on a rank (0: all sequences of the rank; with --pp, 1)"}, \
    {"recompute", RECOMPUTE, AT(recompute), 0, 2, \
     "none, selective (core attention) or full: what the backward of a layer recomputes"}, \
    {"invariant", WHOLE, AT(invariant), 0, 1024, \
     "same bits on every split, for at most this number of tensor parallel ranks (0: off)"}, \
    {"invariant-data", WHOLE, AT(invariant_data), 0, 1024, "the same for data parallel ranks (0: as --invariant)"}, \
    {"invariant-context", WHOLE, AT(invariant_context), 0, 1024, "the same for context parallel ranks (0: 1)"}, \
    {"steps", WHOLE, AT(steps), 1, 1e9, "optimizer steps"}, \
    {"lr", REAL, AT(lr), 0, 1e3, "peak learning rate"}
#define TRAINING_FLAGS \
    {"warmup", WHOLE, AT(warmup), 0, 1e9, "steps of linear warm-up"}, \
    {"seed", WHOLE, AT(seed), 0, 9e15, "seed of weights, batches and dropout"}, \
    {"dropout", REAL, AT(dropout), 0, 0.999, "dropout probability of embedding, attention and residuals"}, \
    {"clip", REAL, AT(clip), 0, 1e9, "gradient norm to clip to (0: off)"}, \
    {"weight-decay", REAL, AT(weight_decay), 0, 1e3, "weight decay of AdamW, on matrices only"}
#define FILE_FLAGS \
    {"hash-log", TEXT, AT(hash_log), 0, 0, "FILE: write step, name and hash of every tensor of every step"}, \
    {"checkpoint", TEXT, AT(checkpoint), 0, 0, \
     "DIR of the run's checkpoints: one is saved at the end, the newest two are kept"}, \
    {"save-interval", WHOLE, AT(save_interval), 0, 1e9, "steps between checkpoints (0: only at the end)"}, \
    {"resume", SWITCH, AT(resume), 0, 1, \
     "continue from the newest checkpoint, if there is one; logs continue after its step.\n" \
     "                              Data, --seq, --batch, --seed and --dtype must not change; other flags may"}
#define RANK_FLAGS \
    {"threads", WHOLE, AT(threads), 1, 1024, "threads that compute on each rank"}, \
    {"timeout", REAL, AT(timeout), 1e-3, 1e6, "seconds a collective waits for a rank"}, \
    {"sequence-parallel", SWITCH, AT(sequence_parallel), 0, 1, "split tokens outside the tensor parallel regions"}, \
    {"interleave", SWITCH, AT(interleave), 0, 1, \
     "layers work on two halves of a micro-batch in turn: on GPUs, one communicates while the other computes"}, \
    {"no-pinning", SWITCH, AT(no_pinning), 0, 1, "let ranks move between cores, for a machine with other work"}, \
    {"check", LEVEL, AT(check), 0, 2, \
     "print what the tensors of a layer are on the ranks, and train in check mode, see docs/checking.md.\n" \
     "                              --check 2 also compares the values of what is replicated"}
/* clang-format on */

/* ---- what the program defines ------------------------------------------------------------------------------------ */

typedef struct model model;
typedef struct setup setup;
typedef struct job job;
typedef struct trainer trainer;
typedef struct pass pass;

/* Returns the table of flags, of which there are *count, at most MAX_FLAGS. */
static const flag *flag_table(int *count);

/* Sets the flags for configs[o->config]. */
static void set_config(options *o);

/* Loads the data, and completes and checks the flags. Returns 0 after it has printed what is wrong. A reason that only
   the ranks can tell together is for refuse_later. */
static int prepare(job *j);
/* Reads the desc of the model in the directory `from`, and gives its shape to the flags. */
static mt_status read_origin(mt_context *ctx, job *j, const char *from);

/* Creates the parameters of this rank. */
static mt_status create_model(trainer *t);

/* Creates the `saved` of each slot, and what else a step needs that create_slots does not allocate. */
static mt_status create_saved(trainer *t);
static mt_status create_checkpoint(trainer *t, const mt_checkpoint_desc *files);
static void destroy_model(trainer *t);

/* Loads the sequences of a pass. Every stage of a pipeline loads them. */
static mt_status load_sequences(const pass *p);

/* Compute one micro-batch of a stage. `at` is the number of its first sequence among those of the pass on this rank. On
   the last stage, stage_forward writes the TOTALS sums of the micro-batch to total_of(t, a, i). */
static mt_status stage_forward(const pass *p, mt_batch *batch, const mt_action *a, int64_t at, mt_tensor input,
                               mt_tensor output);
static mt_status stage_backward(trainer *t, const mt_action *a, mt_tensor doutput, mt_tensor dinput);

/* Computes means from the TOTALS sums over all sequences of a pass. */
static void means_of(const pass *p, const float *sums, float *means);

/* Returns the name of the model. print_more prints what is to be known of it besides its shape. */
static const char *model_name(const options *o);
static void print_more(const trainer *t);

/* Returns the FLOPs of the model in a step of all ranks, without padding, copies and recomputation. */
static double model_flops(const trainer *t);

/* Returns the learning rate of a step. */
static float learning_rate(const options *o, int64_t step);

/* Is called by every rank after the last step, and by the plan. */
static mt_status finish(trainer *t);

/* ---- flags ------------------------------------------------------------------------------------------------------- */

static void *field(const flag *f, options *o) { return (char *)o + f->offset; }
static int is_whole(const flag *f) { return f->kind == WHOLE || f->kind == LEVEL; }
static int is_number(const flag *f) { return is_whole(f) || f->kind == REAL; }

static const flag *flag_of(const char *name) {
    int count, i = 0;
    const flag *flags = flag_table(&count);
    while (strcmp(flags[i].name, name) != 0) i++;
    return &flags[i];
}

static char *given(options *o, const flag *f) {
    int count;
    return &o->given[f - flag_table(&count)];
}

/* Marks the flags of the model that --config sets. */
static void give_shape(options *o) {
    static const char *const names[] = {"layers", "hidden", "heads", "seq", "vocab"};
    for (int i = 0; i < COUNT_OF(names); i++) *given(o, flag_of(names[i])) = GIVEN_BY_CONFIG;
}

static const char *choice(const flag *f, int i) { return f->kind == CONFIG ? configs[i] : choices[f->kind - DTYPE][i]; }

static int parse_choice(const flag *f, const char *text, options *o) {
    for (int i = 0; i <= (int)f->high; i++) {
        if (strcmp(text, choice(f, i)) != 0) continue;
        memcpy(field(f, o), &i, sizeof i);
        if (f->kind == CONFIG) set_config(o);
        return 1;
    }
    fprintf(stderr, PROGRAM ": --%s %s: expected %s\n", f->name, text, f->help);
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
    if (end == text || *end || errno || !(x >= f->low && x <= f->high) || (is_whole(f) && x != floor(x))) {
        fprintf(stderr, PROGRAM ": --%s %s: expected %s from %.15g to %.15g\n", f->name, text,
                is_whole(f) ? "a whole number" : "a number", f->low, f->high);
        return 0;
    }
    memcpy(field(f, o), &x, sizeof x);
    return 1;
}

static void print_help(options *o) {
    int count;
    const flag *flags = flag_table(&count);
    printf("usage: " PROGRAM " [flags]\n");
    for (int i = 0; i < count; i++) {
        const flag *f = &flags[i];
        double x = 0;
        if (is_number(f)) memcpy(&x, field(f, o), sizeof x);
        printf("  --%-25s %s", f->name, f->help);
        if (is_number(f)) printf(" (default %.15g)", x);
        printf("\n");
    }
}

static int parse_options(int argc, char **argv, options *o) {
    const int on = 1;
    struct option table[MAX_FLAGS + 1];
    int index, c, count;
    const flag *flags = flag_table(&count);
    memset(table, 0, sizeof table);
    for (index = 0; index < count; index++) {
        table[index].name = flags[index].name;
        table[index].has_arg = flags[index].kind == LEVEL ? optional_argument : flags[index].kind != SWITCH;
    }
    while ((c = getopt_long(argc, argv, "h", table, &index)) == 0 || c == 'h') {
        const flag *f = &flags[index];
        if (c == 'h') {
            o->help = 1;
            continue;
        }
        *given(o, f) = GIVEN;
        if (f->kind == LEVEL && !optarg && optind < argc && argv[optind][0] != '-') optarg = argv[optind++];
        if (f->kind == SWITCH) memcpy(field(f, o), &on, sizeof on);
        else if (!parse_value(f, optarg ? optarg : "1", o)) return 0;
    }
    if (c != -1) return 0; /* getopt_long has printed what is wrong */
    if (optind < argc)
        fprintf(stderr, PROGRAM ": unexpected argument '%s'; flags start with --, see --help\n", argv[optind]);
    return optind >= argc;
}

/* The ranks that divide a sequence: with --invariant-context that number, however many context ranks there are. */
static double parts_of(const options *o) { return fmax(o->cp, o->invariant_context); }

/* Returns what the tokens of a sequence must be a multiple of. With --cp, a rank has two parts of a sequence. */
static double seq_unit(const options *o) {
    return (parts_of(o) > 1 ? 2 * parts_of(o) : 1) * (o->sequence_parallel ? o->tp : 1);
}

/* Checks how the ranks divide a batch, and chooses the micro-batch. The library checks the model.
   Returns 0 after it has printed what is wrong. */
static int check_split(options *o) {
    double per_rank = o->batch / o->dp;
    int chosen = o->invariant > 0 && o->micro_batch > 0;
    if (o->invariant > 0 && o->invariant_data == 0) o->invariant_data = o->invariant;
    if (o->invariant > 0) o->micro_batch = (double)mt_invariant_micro_batch((int)o->invariant_data, (int64_t)o->batch);
    if (o->micro_batch == 0) o->micro_batch = o->pp > 1 ? 1 : per_rank;
    if (chosen) fprintf(stderr, PROGRAM ": --invariant chooses the micro-batch, leave --micro-batch out\n");
    else if (per_rank != floor(per_rank))
        fprintf(stderr, PROGRAM ": --batch %.15g is not a multiple of --dp %.15g\n", o->batch, o->dp);
    else if (fmod(per_rank, o->micro_batch) != 0 && o->invariant > 0)
        fprintf(stderr,
                PROGRAM ": --invariant-data %.15g makes %.15g micro-batches of --batch %.15g, which --dp %.15g cannot "
                        "share\n",
                o->invariant_data, o->batch / o->micro_batch, o->batch, o->dp);
    else if (fmod(per_rank, o->micro_batch) != 0)
        fprintf(stderr,
                PROGRAM ": the %.15g sequences of a rank (--batch / --dp) are not a multiple of --micro-batch %.15g\n",
                per_rank, o->micro_batch);
    else if (parts_of(o) > 1 && fmod(o->seq, seq_unit(o)) != 0)
        fprintf(stderr, PROGRAM ": --seq %.15g is not a multiple of %.15g: each of --%s %.15g ranks has 2 parts%s\n",
                o->seq, seq_unit(o), o->invariant_context > o->cp ? "invariant-context" : "cp", parts_of(o),
                o->sequence_parallel ? ", which --sequence-parallel divides over --tp" : "");
    else if (fmod(o->seq, seq_unit(o)) != 0)
        fprintf(stderr, PROGRAM ": --seq %.15g is not a multiple of --tp %.15g, which --sequence-parallel needs\n",
                o->seq, o->tp);
    else if (o->invariant_context > 0 && o->invariant == 0)
        fprintf(stderr, PROGRAM ": --invariant-context %.15g needs --invariant\n", o->invariant_context);
    else if (o->invariant > 0 && fmod(fmax(o->invariant_context, 1), o->cp) != 0)
        fprintf(stderr, PROGRAM ": --invariant-context %.15g cannot be split over --cp %.15g\n",
                fmax(o->invariant_context, 1), o->cp);
    else if (o->interleave && (o->tp == 1 || o->sequence_parallel || o->invariant > 0 || o->micro_batch == 1))
        fprintf(stderr, PROGRAM ": --interleave has no effect with %s\n",
                o->tp == 1             ? "--tp 1"
                : o->sequence_parallel ? "--sequence-parallel"
                : o->invariant > 0     ? "--invariant"
                                       : "--micro-batch 1");
    else if (o->tp * o->cp * o->dp * o->pp > MAX_RANKS)
        fprintf(stderr, PROGRAM ": --tp %.15g x --cp %.15g x --dp %.15g x --pp %.15g are more than %d ranks\n", o->tp,
                o->cp, o->dp, o->pp, MAX_RANKS);
    else if ((o->resume || o->save_interval > 0) && !o->checkpoint)
        fprintf(stderr, PROGRAM ": --%s needs --checkpoint DIR\n", o->resume ? "resume" : "save-interval");
    else if (o->machine && !o->dry_run) fprintf(stderr, PROGRAM ": --machine needs --dry-run\n");
    else return 1;
    return 0;
}

/* ---- data -------------------------------------------------------------------------------------------------------- */

/* The numbers in the header of a token file: its magic, its version, tokens, words, passages (see text_to_bin.py), 1 if
   a byte of marks for each token follows the tokens, then the special tokens [PAD], [CLS], [SEP] and [MASK]. */
enum { MAGIC, VERSION, TOKENS, WORDS, PASSAGES, MARKS, PAD, CLS, SEP, MASK, HEADER_NUMBERS };
enum { WORD_START = 1, SENTENCE_START = 2 }; /* marks: the token begins a word, a sentence */

/* The training text without --data. */
static const char *const own_data[] = {"megatron.h", "mt_parallel.h", "mt_kernels.cuh", "mt_comm.h", "README.md"};
#define OWN_DATA (sizeof own_data / sizeof *own_data)

typedef struct dataset {
    int32_t *tokens;
    int64_t count, train;   /* the first `train` tokens are for training, the rest for validation */
    int64_t ends[OWN_DATA]; /* of a text: the number of bytes up to the end of each file */
    uint64_t hash;          /* of all tokens */
    int text;               /* a token is a byte */
    /* of a token file: its first numbers, and a byte of marks for each token; NULL: it has no marks */
    int32_t header[HEADER_NUMBERS];
    unsigned char *marks;
} dataset;

/* Returns token t of a file: a byte, or a little-endian uint16 after the header of llm.c. */
static int32_t token_at(const unsigned char *bytes, int text, int64_t t) {
    const unsigned char *p = bytes + LLMC_HEADER_BYTES + 2 * t;
    return text ? bytes[t] : p[0] | p[1] << 8;
}

/* Reads and checks the header of a token file of llm.c. *count becomes the number of tokens. */
static int check_bin(const char *path, const unsigned char *bytes, size_t size, int32_t *header, int64_t *count) {
    size_t token;
    if (size >= LLMC_HEADER_BYTES) memcpy(header, bytes, HEADER_NUMBERS * sizeof *header);
    token = header[MARKS] == 1 ? 3 : 2; /* its bytes */
    if (header[MAGIC] != LLMC_MAGIC || header[VERSION] != 1) {
        fprintf(stderr,
                PROGRAM ": %s is not a token file of llm.c: magic %d, version %d; expected %d, 1 (uint16 tokens)\n",
                path, (int)header[MAGIC], (int)header[VERSION], LLMC_MAGIC);
        return 0;
    }
    if (header[TOKENS] < 0 || LLMC_HEADER_BYTES + token * (size_t)header[TOKENS] != size) {
        fprintf(stderr, PROGRAM ": %s announces %d tokens and has %zu bytes of them\n", path, (int)header[TOKENS],
                size - LLMC_HEADER_BYTES);
        return 0;
    }
    *count = header[TOKENS];
    return 1;
}

/* Reads the tokens, and divides them into training and validation. */
static int load_data(options *o, dataset *d) {
    unsigned char *bytes = NULL;
    size_t size = 0, length = o->data ? strlen(o->data) : 0;
    int ok = 1;
    d->text = !(length > 4 && strcmp(o->data + length - 4, ".bin") == 0);
    for (size_t i = 0; ok && i < (o->data ? 1 : OWN_DATA); i++) {
        ok = whole_file_read(o->data ? o->data : own_data[i], WHOLE_FILE_MAX, &bytes, &size);
        d->ends[i] = (int64_t)size;
    }
    d->count = (int64_t)size;
    ok = ok && (d->text || check_bin(o->data, bytes, size, d->header, &d->count));
    d->tokens = ok ? (int32_t *)malloc((size_t)(d->count + 1) * sizeof *d->tokens) : NULL;
    if (ok && !d->tokens) fprintf(stderr, PROGRAM ": no memory for %lld tokens\n", (long long)d->count);
    d->hash = 14695981039346656037u; /* FNV-1a */
    for (int64_t i = 0; d->tokens && i < d->count; i++) {
        d->tokens[i] = token_at(bytes, d->text, i);
        d->hash = (d->hash ^ (uint64_t)d->tokens[i]) * 1099511628211u;
    }
    if (d->tokens && d->header[MARKS] == 1) {
        d->marks = bytes; /* moves the marks to the front */
        memmove(bytes, bytes + LLMC_HEADER_BYTES + 2 * d->count, (size_t)d->count);
    } else free(bytes);
    d->train = d->count - (int64_t)fmax((double)d->count / 10, o->seq + 1); /* at least one sequence for validation */
    return d->tokens != NULL;
}

/* ---- a log must not be another file that this run reads or writes ------------------------------------------------ */

static int is_log_apart(const options *o, const char *flag, const char *log) {
    int apart = !log || (is_apart(flag, log, "--data", o->data) && is_apart_from_streams(flag, log) &&
                         is_apart_from(flag, log, "--init-from", o->init_from, 1) &&
                         is_apart_from(flag, log, "--checkpoint", o->checkpoint, 1));
    for (size_t i = 0; log && !o->data && apart && i < OWN_DATA; i++)
        apart = is_apart(flag, log, "the data's", own_data[i]);
    return apart;
}

/* Must be called before the logs are opened, because this empties them. */
static int check_logs(const options *o) {
    return is_log_apart(o, "log", o->log) && is_log_apart(o, "hash-log", o->hash_log) &&
           (!o->log || is_apart("log", o->log, "--hash-log", o->hash_log));
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

/* What a rank of a pipeline stage needs, from plan_stage. */
typedef struct needs {
    int64_t parameters;
    /* bytes; activations: the arena of a training step; arena: also that of evaluation, sampling and saving */
    size_t model, optimizer, activations, all, arena;
} needs;

struct job {
    options o;
    dataset data;
    struct setup setup;
    needs stages[MAX_RANKS];
    int64_t parameters;           /* of the whole model */
    mt_machine *machine;          /* --machine, or NULL */
    double step_seconds;          /* with a machine: of a step */
    mt_trace traces[MAX_RANKS];   /* with a machine: of a step of each stage */
    char *table;                  /* with --check: the table of a layer, from tabulate */
    char newest[MT_PATH_MAX];     /* the newest checkpoint in the directory of --init-from */
    FILE *log, *hash_log;         /* only rank 0 opens them */
    mt_status planned;            /* the status of --dry-run */
    char refusal[MT_ERROR_BYTES]; /* why the run does not begin; empty: it begins */
    int refused;                  /* 1: rank 0 has printed why the run does not begin */
};

enum { GROUPS = 7 };

struct trainer {
    const struct job *job;
    mt_context *ctx;
    mt_comm *comm; /* all ranks, from mt_comm_create_for */
    mt_grid grid;
    mt_params *params;
    struct model model;
    mt_optimizer optimizer;
    mt_loss_scaler scaler;     /* for f16; for other types the scale is always 1 */
    mt_graph *graph;           /* with --cuda-graph, from the second step on */
    int warm;                  /* 1: a step has run */
    mt_step numbers;           /* what changes from step to step, in memory of the device */
    mt_checkpoint *checkpoint; /* NULL without --checkpoint and --init-from */
    int64_t first_step;        /* 0, or with --resume the step of the checkpoint */
    mt_hash_log *hashes;       /* NULL without --hash-log */
    FILE *table;               /* NULL outside tabulate */
    /* TOKEN_INPUTS arrays of all tokens and SEQUENCE_INPUTS arrays of all sequences of this rank in a step or in an
       evaluation, on the device */
    int32_t *inputs;
    int64_t sequences;   /* that `inputs` has room for */
    size_t device_bytes; /* of inputs, losses and totals together */
    mt_action *actions;
    int slots, max_actions;
    mt_tensor losses, totals; /* losses [slots, of a micro-batch]; totals [micro-batches, TOTALS]: sums */
    int64_t micro_tokens;
    size_t model_bytes, optimizer_bytes;
    int refused;               /* 1: `refuse` was called, and rank 0 has printed why */
    int skipped;               /* number of skipped steps in a row without a smaller loss scale */
    mt_ledger ledgers[GROUPS]; /* of the last step */
};

/* How context ranks divide a sequence. */
static mt_context_parallel_desc context_of(const options *o) {
    mt_context_parallel_desc d = {.comm_type = (mt_cp_comm_type)o->cp_comm_type,
                                  .invariant = (int)o->invariant_context};
    return d;
}

static int rank_count(const options *o) { return (int)(o->tp * o->cp * o->dp * o->pp); }
/* Returns the ranks of a pipeline stage. */
static int stage_ranks(const options *o) { return (int)(o->tp * o->cp * o->dp); }
/* Returns the tokens of sequences that a context rank has. */
static int64_t tokens_of(const options *o, int64_t sequences) { return sequences * (int64_t)(o->seq / o->cp); }
static int is_last_stage(const trainer *t) { return t->grid.pp_rank + 1 == t->grid.pp_size; }

/* Returns array i of inputs, from sequence `at` on: the first TOKEN_INPUTS arrays are of tokens, the others of
   sequences. Of tokens, `at` must begin a micro-batch. */
static int32_t *input_of(const trainer *t, int i, int64_t at) {
    int64_t tokens = tokens_of(&t->job->o, t->sequences);
    if (i < TOKEN_INPUTS) return t->inputs + i * tokens + tokens_of(&t->job->o, at);
    return t->inputs + TOKEN_INPUTS * tokens + (i - TOKEN_INPUTS) * t->sequences + at;
}

/* Allocates what the micro-batches of a training step and of an evaluation need. The number of micro-batches is at most
   the number of sequences. */
static mt_status create_slots(trainer *t) {
    const options *o = &t->job->o;
    int64_t per_rank = (int64_t)(o->batch / o->dp / o->micro_batch), totals = (int64_t)fmax(o->batch, EVAL_SEQUENCES);
    int64_t inputs, losses;
    int count = 0;
    void *memory;
    t->max_actions = 6 * (int)totals;
    t->actions = (mt_action *)malloc((size_t)t->max_actions * sizeof *t->actions);
    if (!t->actions) return MT_ERR_MEMORY;
    MT_TRY(mt_pipeline_schedule((mt_schedule)o->schedule, t->grid.pp_size, t->grid.pp_rank, (int)per_rank, t->actions,
                                t->max_actions, &count));
    t->slots = mt_pipeline_slots(t->actions, count);
    MT_TRY(create_saved(t));
    t->sequences = (int64_t)ceil((double)totals / o->dp);
    inputs = TOKEN_INPUTS * tokens_of(o, t->sequences) + SEQUENCE_INPUTS * t->sequences;
    losses = t->micro_tokens + SEQUENCE_LOSSES * (int64_t)o->micro_batch;
    t->device_bytes = (size_t)(inputs + t->slots * losses + totals * TOTALS) * 4;
    MT_TRY(mt_context_alloc(t->ctx, t->device_bytes, &memory));
    t->inputs = (int32_t *)memory;
    t->losses = mt_tensor_f32((float *)memory + inputs, t->slots, losses);
    t->totals = mt_tensor_f32((float *)memory + inputs + t->slots * losses, totals, TOTALS);
    return MT_SUCCESS;
}

/* Returns 1 for a flag that may differ between ranks: it concerns only the rank's machine, or a log that only rank 0
   writes. Of --data the ranks compare the tokens, and of --config the flags that it sets. */
static int may_differ(const flag *f) {
    static const char *const names[] = {"config", "data", "log", "timeout", "no-pinning", "dry-run", "machine", "help"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(f->name, names[i]) == 0) return 1;
    return 0;
}

enum { VALUE_BYTES = 64 };

/* Returns the value of a flag as text. A number is written to `text`. */
static const char *value_of(const flag *f, const options *o, char text[VALUE_BYTES]) {
    const char *at = (const char *)o + f->offset, *words = NULL;
    double x = 0;
    int i = 0;
    if (f->kind == TEXT) {
        memcpy(&words, at, sizeof words);
        if (words && strcmp(f->name, "hash-log") == 0) return "given"; /* only rank 0 writes the file */
        return words ? words : "not given";
    }
    if (is_number(f)) {
        memcpy(&x, at, sizeof x);
        snprintf(text, VALUE_BYTES, is_whole(f) ? "%.0f" : "%.9g", x);
        if (f->kind == REAL && strtod(text, NULL) != x) snprintf(text, VALUE_BYTES, "%.17g", x);
        return text;
    }
    memcpy(&i, at, sizeof i);
    return f->kind == SWITCH ? (i ? "given" : "not given") : choice(f, i);
}

/* Compares the flags and the data of all ranks, because ranks that are processes have command lines of their own. */
static mt_status compare_ranks(const trainer *t) {
    const job *j = t->job;
    char names[MAX_FLAGS + 2][32], values[MAX_FLAGS + 2][VALUE_BYTES];
    mt_setting told[MAX_FLAGS + 2] = {{"the reason not to begin", j->refusal[0] ? j->refusal : "none"},
                                      {"--data", values[0]}};
    int n = 2, count;
    const flag *flags = flag_table(&count);
    snprintf(values[0], VALUE_BYTES, "%lld tokens with hash %016llx", (long long)j->data.count,
             (unsigned long long)j->data.hash);
    for (int i = 0; i < count; i++) {
        if (may_differ(&flags[i])) continue;
        snprintf(names[n], sizeof names[n], "--%s", flags[i].name);
        told[n].name = names[n];
        told[n].value = value_of(&flags[i], &j->o, values[n]);
        n++;
    }
    return mt_comm_compare(t->ctx, t->comm, PROGRAM, 0, told, n);
}

/* Creates everything that a rank needs. device is MT_DEVICE_META for a plan. */
static mt_status trainer_create(mt_comm *world, const job *job, mt_device device, trainer *t) {
    const options *o = &job->o;
    mt_context_desc where = {.arena_bytes = job->stages[mt_comm_rank(world) / stage_ranks(o)].arena,
                             .device = device,
                             .threads = (int)o->threads,
                             .invariant = (int)o->invariant,
                             .invariant_data = (int)o->invariant_data,
                             .check = (int)o->check,
                             .ordinal = mt_comm_local_rank(world) % (int)fmax(1, mt_device_count(device)),
                             .planned = (mt_device)o->device};
    mt_grid_desc shape = {.tp = (int)o->tp, .dp = (int)o->dp, .pp = (int)o->pp, .cp = (int)o->cp};
    mt_parallel_options layers = {.interleave = o->interleave, .context = context_of(o)};
    mt_optimizer_desc adamw = {.beta2 = ADAM_BETA2, .eps = ADAM_EPS, .weight_decay = (float)o->weight_decay};
    mt_loss_scaler_desc constant = {.initial_scale = 1, .growth = 1};
    mt_data_parallel_desc share = {.bucket_bytes = (size_t)(o->bucket_mb * 1e6),
                                   .sharded_optimizer = o->distributed_optimizer};
    mt_checkpoint_desc files = {.directory = o->checkpoint, .optimizer = &t->optimizer};
    t->job = job;
    t->micro_tokens = tokens_of(o, (int64_t)o->micro_batch);
    MT_TRY(mt_context_create(world, &where, &t->ctx));
    MT_TRY(mt_parallel_set_options(t->ctx, &layers));
    if (device != MT_DEVICE_META) MT_TRY(mt_comm_create_for(t->ctx, world, &t->comm));
    if (device != MT_DEVICE_META) MT_TRY(compare_ranks(t));
    MT_TRY(mt_grid_create(t->comm ? t->comm : world, &shape, &t->grid));
    MT_TRY(mt_params_create(t->ctx, &t->grid, &t->params));
    MT_TRY(mt_params_set_dtype(t->ctx, t->params, (mt_dtype)o->dtype));
    MT_TRY(mt_params_set_data_parallel(t->ctx, t->params, &share));
    MT_TRY(create_model(t));
    MT_TRY(mt_params_init(t->ctx, t->params, (uint64_t)o->seed));
    t->model_bytes = mt_context_allocated(t->ctx);
    MT_TRY(mt_optimizer_create(t->ctx, t->params, &adamw, &t->optimizer));
    t->optimizer_bytes = mt_context_allocated(t->ctx) - t->model_bytes;
    MT_TRY(mt_loss_scaler_create(t->ctx, o->dtype == MT_F16 ? NULL : &constant, &t->scaler));
    MT_TRY(create_slots(t));
    if (o->hash_log) MT_TRY(mt_hash_log_create(t->ctx, &t->grid, &t->hashes));
    return o->checkpoint || o->init_from ? create_checkpoint(t, &files) : MT_SUCCESS;
}

static void trainer_destroy(trainer *t) {
    mt_checkpoint_destroy(t->ctx, t->checkpoint);
    mt_hash_log_destroy(t->hashes);
    mt_graph_destroy(t->ctx, t->graph);
    mt_step_destroy(t->ctx, &t->numbers);
    mt_context_free(t->ctx, t->inputs, t->device_bytes);
    destroy_model(t);
    mt_optimizer_destroy(t->ctx, &t->optimizer);
    mt_params_destroy(t->params);
    mt_grid_destroy(&t->grid);
    mt_comm_destroy(t->comm);
    mt_context_destroy(t->ctx);
    free(t->actions);
}

/* A pass over sequences [first, end) of a training step, or of the `of` sequences of the validation set, in
   micro-batches of `micro` sequences. */
struct pass {
    trainer *t;
    int64_t step, first, end, micro, of;
    int training;
};

/* Returns the rows of an activation on this rank. */
static int64_t rows_of(const options *o, int64_t sequences) {
    return tokens_of(o, sequences) / (o->sequence_parallel ? (int64_t)o->tp : 1);
}

/* Returns the sequences of the micro-batch that begins with sequence `first`. */
static int64_t sequences_of(const pass *p, int64_t first) {
    return p->end - first < p->micro ? p->end - first : p->micro;
}

/* Copies what this context rank has of sequence `at` to the device, from x [seq] to array `input`. Its rows in the
   micro-batch are those of mt_context_parallel_token. */
static mt_status upload_sequence(const pass *p, int input, int64_t at, const int32_t *x) {
    trainer *t = p->t;
    int64_t seq = (int64_t)t->job->o.seq, number = (at - p->first) % p->micro, count = sequences_of(p, at - number);
    mt_context_parallel_desc context = context_of(&t->job->o);
    int ranks = (int)parts_of(&t->job->o), parts = (ranks > 1 ? 2 : 1) * ranks / t->grid.cp_size;
    int64_t chunk = seq / t->grid.cp_size / parts;
    for (int part = 0; part < parts; part++) {
        int64_t row = (part * count + number) * chunk;
        int64_t token = mt_context_parallel_token(&context, t->grid.cp_rank, t->grid.cp_size, count, seq, row);
        int32_t *to = input_of(t, input, at - number - p->first) + row;
        MT_TRY(mt_upload(t->ctx, x + token % seq, mt_tensor_make(to, MT_I32, 1, chunk)));
    }
    return MT_SUCCESS;
}

/* The last micro-batch of an evaluation may have fewer rows than the tensors of the pipeline. */
static mt_tensor some_rows(mt_tensor t, int64_t rows) { return t.data ? mt_tensor_rows(t, 0, rows) : t; }

/* Returns the place of total number i of a micro-batch. */
static mt_tensor total_of(const trainer *t, const mt_action *a, int i) {
    return mt_tensor_cols(mt_tensor_rows(t->totals, a->micro_batch, 1), i, 1);
}

/* Adds losses of tokens to total i of a micro-batch. With --invariant-context, those of the parts are added in the tree
   that run_pass goes on with. */
static mt_status add_losses(const trainer *t, const mt_action *a, int i, mt_tensor losses) {
    int parts = (int)parts_of(&t->job->o) / t->grid.cp_size;
    int64_t n = losses.cols / parts;
    size_t mark = mt_arena_mark(t->ctx);
    mt_tensor sums;
    if (parts == 1) return mt_sum(t->ctx, losses, total_of(t, a, i));
    MT_TRY(mt_arena_tensor(t->ctx, MT_F32, parts, 1, &sums));
    MT_TRY(mt_fill(t->ctx, sums, 0.0f));
    for (int part = 0; part < parts; part++)
        MT_TRY(mt_sum(t->ctx, mt_tensor_cols(losses, part * n, n), mt_tensor_rows(sums, part, 1)));
    MT_TRY(mt_tree_sum(t->ctx, sums));
    MT_TRY(mt_sum(t->ctx, mt_tensor_rows(sums, 0, 1), total_of(t, a, i)));
    mt_arena_release(t->ctx, mark);
    return MT_SUCCESS;
}

/* ---- the table of --check ---------------------------------------------------------------------------------------- */

/* Returns what x is on the ranks of a group. In a group of one it is whole. The words are shorter than those of
   mt_placement_name, so that a row has at most 120 columns. */
static const char *placement_text(const trainer *t, const mt_comm *comm, mt_tensor x) {
    static const char *const texts[] = {"replicated", "split rows", "split cols", "partial", "not known"};
    return mt_comm_size(comm) > 1 ? texts[mt_placement_of(t->ctx, comm, x)] : "whole";
}

/* Writes the cells of a row. The last one is only there with context ranks. */
static void write_cells(const trainer *t, const char *call, const char *parameter, const char *name, const char *shape,
                        const char *over_tensor, const char *over_data, const char *over_context) {
    const char *cells[] = {call, parameter, name, shape, over_tensor, over_data, over_context};
    static const int widths[] = {37, 37, 7, 12, 11, 11};
    const int last = t->grid.cp_size > 1 ? 6 : 5;
    for (int i = 0; i < last; i++) fprintf(t->table, "%-*s ", widths[i], cells[i]);
    fprintf(t->table, "%s\n", cells[last]);
}

/* Writes a row. The name of a parameter is without that of its layer. */
static void write_row(const trainer *t, const char *call, const char *parameter, const char *name, mt_tensor x) {
    const char *layer = parameter ? strstr(parameter, ".layers.0.") : NULL;
    char shape[48];
    snprintf(shape, sizeof shape, "[%lld, %lld]", (long long)x.rows, (long long)x.cols);
    if (layer) parameter = layer + strlen(".layers.0.");
    write_cells(t, call, parameter ? parameter : "", name, shape, placement_text(t, t->grid.tp, x),
                placement_text(t, t->grid.dp, x), placement_text(t, t->grid.cp, x));
}

/* Returns the parameter whose gradient, or a part of it, is x, or NULL. */
static const mt_param *parameter_of(const trainer *t, mt_tensor x) {
    for (int i = 0; i < mt_params_count(t->params); i++) {
        const mt_param *p = mt_params_at(t->params, i);
        uintptr_t first = (uintptr_t)p->grad.data, at = (uintptr_t)x.data;
        if (at >= first && at < first + (uintptr_t)(p->grad.rows * p->grad.cols) * sizeof(float)) return p;
    }
    return NULL;
}

/* Writes a row for each tensor that a call has written. */
static void write_call(mt_context *ctx, void *user, const char *where, const char *with, const mt_operand *operands,
                       int count) {
    const trainer *t = (const trainer *)user;
    (void)ctx;
    for (int i = 0; i < count; i++) {
        const mt_operand *o = &operands[i];
        const mt_param *p = parameter_of(t, o->t);
        if (!o->t.data || !(o->use & MT_ARG_OUT)) continue;
        write_row(t, where, p ? p->name : with, p ? "grad" : o->name, o->t);
        where = with = "";
    }
}

/* Writes the calls to the table from here on, if they are of the first micro-batch. */
static void listen(trainer *t, const mt_action *a, const char *phase) {
    if (!t->table || a->micro_batch > 0) return;
    fprintf(t->table, "%s\n", phase);
    mt_check_listen(t->ctx, write_call, t);
}

/* ---- a pass ------------------------------------------------------------------------------------------------------ */

static mt_status forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    const pass *p = (const pass *)user;
    trainer *t = p->t;
    const options *o = &t->job->o;
    int64_t first = p->first + a->micro_batch * p->micro, count = sequences_of(p, first);
    int64_t rows = rows_of(o, count);
    mt_batch batch = {.sequences = count,
                      .seq = (int64_t)o->seq,
                      .first_sequence = first,
                      .seed = (uint64_t)o->seed,
                      .random_offset = mt_step_random_offset(&t->numbers),
                      .loss_scale = mt_step_loss_scale(&t->numbers)};
    listen(t, a, "forward");
    MT_TRY(stage_forward(p, &batch, a, first - p->first, some_rows(input, rows), some_rows(output, rows)));
    mt_check_listen(ctx, NULL, NULL);
    return MT_SUCCESS;
}

static mt_status backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    const pass *p = (const pass *)user;
    trainer *t = p->t;
    if (p->first + (a->micro_batch + 1) * p->micro >= p->end) MT_TRY(mt_sync_gradients_begin(ctx, t->params));
    listen(t, a, "backward");
    MT_TRY(stage_backward(t, a, doutput, dinput));
    mt_check_listen(ctx, NULL, NULL);
    return mt_accumulate_gradients(ctx, t->params);
}

/* Returns the pass over this data rank's part of `sequences` sequences, in micro-batches of `micro`. */
static pass pass_of(trainer *t, int64_t step, int64_t sequences, int64_t micro, int training) {
    int64_t ranks = t->grid.dp_size, rank = t->grid.dp_rank;
    pass p = {t, step, sequences * rank / ranks, sequences * (rank + 1) / ranks, micro, sequences, training};
    return p;
}

/* Runs a pass. The first row of t->totals becomes the sums over all data and context ranks. */
static mt_status run_pass(pass *p) {
    trainer *t = p->t;
    mt_pipeline_stage stage = {.rows = rows_of(&t->job->o, p->micro),
                               .cols = (int64_t)t->job->o.hidden,
                               .dtype = mt_params_dtype(t->params),
                               .forward = forward,
                               .backward = p->training ? backward : NULL,
                               .user = p};
    int n = (int)((p->end - p->first + p->micro - 1) / p->micro), count = 0;
    float *total = (float *)t->totals.data;
    MT_TRY(mt_pipeline_schedule(p->training ? (mt_schedule)t->job->o.schedule : MT_SCHEDULE_FORWARD_ONLY,
                                t->grid.pp_size, t->grid.pp_rank, n, t->actions, t->max_actions, &count));
    MT_TRY(mt_fill(t->ctx, t->totals, 0.0f));
    MT_TRY(mt_pipeline_run(t->ctx, &t->grid, &stage, t->actions, count));
    if (t->job->o.invariant > 0)
        MT_TRY(mt_all_reduce(t->ctx, t->grid.cp, total, total, (size_t)n * TOTALS, MT_F32, MT_SUM));
    MT_TRY(mt_tree_sum(t->ctx, mt_tensor_rows(t->totals, 0, n)));
    MT_TRY(mt_all_reduce(t->ctx, t->job->o.invariant > 0 ? t->grid.dp : t->grid.dp_cp, total, total, TOTALS, MT_F32,
                         MT_SUM));
    return mt_broadcast(t->ctx, t->grid.pp, total, total, TOTALS, MT_F32, t->grid.pp_size - 1); /* by the last stage */
}

/* Returns communicator number i; NULL when this rank has no such group. */
static mt_comm *group(const trainer *t, int i) {
    mt_comm *const dp_cp = t->grid.cp_size > 1 ? t->grid.dp_cp : NULL; /* otherwise it is dp */
    mt_comm *const all[GROUPS] = {t->grid.tp, t->grid.cp,    t->grid.dp,       dp_cp,
                                  t->grid.pp, t->grid.model, t->grid.embedding};
    return all[i];
}

static void ledgers_start(const trainer *t) {
    for (int i = 0; i < GROUPS; i++) mt_comm_ledger_reset(group(t, i));
}

static void ledgers_stop(trainer *t) {
    for (int i = 0; i < GROUPS; i++) t->ledgers[i] = mt_comm_ledger(group(t, i));
}

typedef struct hash_writer {
    FILE *file; /* NULL on all ranks except rank 0 */
    int64_t step;
} hash_writer;

static void write_hash(void *user, const char *name, uint64_t hash, int differs) {
    const hash_writer *w = (const hash_writer *)user;
    if (w->file)
        fprintf(w->file, "%lld %s %016llx%s\n", (long long)w->step, name, (unsigned long long)hash,
                differs ? " ranks differ" : "");
}

/* Logs the losses under their names in the log. */
static mt_status log_gradients(trainer *t, const float *losses, float norm) {
    if (!t->hashes) return MT_SUCCESS;
    for (int i = 0; i < LOSSES; i++) MT_TRY(mt_hash_log_value(t->ctx, t->hashes, loss_names[i][0], losses[i]));
    MT_TRY(mt_gather_gradients(t->ctx, t->params));
    for (int i = 0; i < mt_params_count(t->params); i++) {
        const mt_param *p = mt_params_at(t->params, i);
        MT_TRY(mt_hash_log_shard(t->ctx, t->hashes, p, ".grad", p->grad));
    }
    return mt_hash_log_value(t->ctx, t->hashes, "grad_norm", norm);
}

/* Logs a state of the optimizer. The suffix is .master, or the name that torch.optim.AdamW has for the state. */
static mt_status log_state(trainer *t, const mt_param *p, mt_optimizer_state state, const char *suffix) {
    size_t mark = mt_arena_mark(t->ctx);
    mt_tensor shard;
    MT_TRY(mt_arena_tensor(t->ctx, MT_F32, p->grad.rows, p->grad.cols, &shard));
    MT_TRY(mt_optimizer_read(t->ctx, &t->optimizer, p, state, shard));
    MT_TRY(mt_hash_log_shard(t->ctx, t->hashes, p, suffix, shard));
    mt_arena_release(t->ctx, mark);
    return MT_SUCCESS;
}

static mt_status log_weights(trainer *t, int64_t step) {
    hash_writer writer = {mt_comm_rank(t->grid.world) == 0 ? t->job->hash_log : NULL, step + 1};
    if (!t->hashes) return MT_SUCCESS;
    for (int i = 0; i < mt_params_count(t->params); i++) {
        const mt_param *p = mt_params_at(t->params, i);
        MT_TRY(mt_hash_log_shard(t->ctx, t->hashes, p, "", p->value));
        if (t->optimizer.master) MT_TRY(log_state(t, p, MT_MASTER, ".master"));
        MT_TRY(log_state(t, p, MT_EXP_AVG, ".exp_avg"));
        MT_TRY(log_state(t, p, MT_EXP_AVG_SQ, ".exp_avg_sq"));
    }
    return mt_hash_log_flush(t->ctx, t->hashes, write_hash, &writer);
}

/* Returns x for printing. The sign of a NaN is removed, because platforms differ in it. */
static double shown(float x) { return isnan(x) ? (double)NAN : (double)x; }

/* Handles a loss or a gradient that is not finite. Parameters and optimizer stay unchanged on every rank, and the run
   goes on, for f16 with a smaller loss scale. When there is no smaller scale, SKIPPED_STEPS steps in a row end it. */
static mt_status skip_step(trainer *t, int64_t step, float scale, float loss, float norm) {
    int speaks = mt_comm_rank(t->grid.world) == 0;
    if (speaks)
        printf("step %lld: loss %g, gradient norm %g, step skipped (%lld so far)\n", (long long)step + 1, shown(loss),
               shown(norm), (long long)t->scaler.skipped);
    MT_TRY(log_weights(t, step));
    t->skipped = scale > t->scaler.desc.min_scale ? 0 : t->skipped + 1;
    if (t->skipped < SKIPPED_STEPS) return MT_SUCCESS;
    if (speaks)
        fprintf(stderr,
                PROGRAM ": step %lld: loss %g, gradient norm %g is not finite: stopping after %d such steps in a row, "
                        "the weights are untouched\n",
                (long long)step + 1, shown(loss), shown(norm), t->skipped);
    return MT_ERR_DATA;
}

/* What the device does in a training step. */
static mt_status device_step(pass *p) {
    trainer *t = p->t;
    ledgers_start(t);
    MT_TRY(mt_params_zero_grad_lazy(t->ctx, t->params));
    MT_TRY(run_pass(p));
    MT_TRY(mt_sync_gradients(t->ctx, t->params));
    MT_TRY(mt_step_update(t->ctx, &t->numbers, mt_tensor_cols(mt_tensor_rows(t->totals, 0, 1), 0, 1)));
    ledgers_stop(t);
    return MT_SUCCESS;
}

static mt_status record_step(pass *p) {
    trainer *t = p->t;
    mt_status status;
    MT_TRY(mt_graph_begin(t->ctx, t->comm));
    status = device_step(p);
    MT_KEEP(status, mt_graph_end(t->ctx, status == MT_SUCCESS ? &t->graph : NULL));
    return status;
}

/* The first step chooses the algorithms of products by measurement, which a graph cannot record. */
static mt_status run_step(pass *p) {
    trainer *t = p->t;
    if (t->job->o.cuda_graph && t->warm && !t->graph) MT_TRY(record_step(p));
    t->warm = 1;
    return t->graph ? mt_graph_launch(t->ctx, t->graph) : device_step(p);
}

/* losses: the LOSSES means of the step. Those after the first one wait for the device again. */
static mt_status train_step(trainer *t, int64_t step, float lr, float *losses, float *norm) {
    const options *o = &t->job->o;
    pass p = pass_of(t, step, (int64_t)o->batch, (int64_t)o->micro_batch, 1);
    float scale = t->scaler.scale, sums[TOTALS] = {0}, means[TOTALS] = {0};
    mt_step_values values;
    MT_TRY(mt_step_begin(t->ctx, &t->numbers, lr, (uint64_t)step));
    MT_TRY(load_sequences(&p));
    MT_TRY(run_step(&p));
    MT_TRY(mt_step_read(t->ctx, &t->numbers, &values)); /* waits */
    sums[0] = values.loss;
    if (TOTALS > 1) MT_TRY(mt_download(t->ctx, mt_tensor_rows(t->totals, 0, 1), sums));
    means_of(&p, sums, means);
    memcpy(losses, means, LOSSES * sizeof *losses);
    *norm = values.norm;
    t->scaler = values.scaler;
    MT_TRY(log_gradients(t, losses, *norm));
    if (values.adamw.skip) return skip_step(t, step, scale, losses[0], *norm);
    t->skipped = 0;
    return log_weights(t, step);
}

/* Computes the TOTALS means of a validation. The micro-batch is a power of two, so that it divides the sequences of a
   data rank for every number of data ranks that is a power of two. */
static mt_status evaluate(trainer *t, float *means) {
    float sums[TOTALS];
    const options *o = &t->job->o;
    int64_t most = (int64_t)fmin(o->micro_batch, EVAL_SEQUENCES / fmax(o->invariant_data, o->dp)), micro = 1;
    pass p;
    while (2 * micro <= most) micro *= 2;
    p = pass_of(t, 0, EVAL_SEQUENCES, micro, 0);
    MT_TRY(load_sequences(&p));
    MT_TRY(run_pass(&p));
    MT_TRY(mt_download(t->ctx, mt_tensor_rows(t->totals, 0, 1), sums));
    means_of(&p, sums, means);
    return MT_SUCCESS;
}

/* ---- logs -------------------------------------------------------------------------------------------------------- */

enum { LOG_LINE = 1024 }; /* each line of a log has fewer characters, with its end */

/* Returns 1 for line `number` of a log of this program or, when whole is 0, for the beginning of one. A line that is
   whole has its newline. *step is that of the line. */
typedef int line_check(int64_t number, const char *line, int whole, int64_t *step);

/* Writes the first line of --log. */
static void write_head(char head[LOG_LINE]) {
    int n = snprintf(head, LOG_LINE, "step,");
    for (int i = 0; i < LOSSES; i++) n += snprintf(head + n, LOG_LINE - (size_t)n, "%s,", loss_names[i][0]);
    n += snprintf(head + n, LOG_LINE - (size_t)n, "grad_norm,tokens_per_s,lr");
    for (int i = 0; i < TOTALS; i++) n += snprintf(head + n, LOG_LINE - (size_t)n, ",%s", validation_names[i][0]);
    snprintf(head + n, LOG_LINE - (size_t)n, "\n");
}

static int commas_in(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == ',';
    return n;
}

/* Of --log: a head, and numbers with commas between them, of which some may be missing. */
static int is_log_line(int64_t number, const char *line, int whole, int64_t *step) {
    char head[LOG_LINE];
    const int commas = LOSSES + TOTALS + 3; /* of the head */
    size_t length = strlen(line) - (whole != 0);
    *step = strtoll(line, NULL, 10);
    if (number == 1) {
        write_head(head);
        return strncmp(line, head, whole ? LOG_LINE : length) == 0;
    }
    if (*line < '1' || *line > '9' || strspn(line, "0123456789,.+-einfa") != length) return 0;
    return whole ? commas_in(line) == commas : commas_in(line) <= commas;
}

/* Of --hash-log: a step, a name, and 16 digits. The beginning of the first line could be that of any text. */
static int is_hash_line(int64_t number, const char *line, int whole, int64_t *step) {
    char *rest;
    const char *hash;
    *step = strtoll(line, &rest, 10);
    if (*line < '1' || *line > '9') return 0;
    if (!whole) return number > 1 && (*rest == ' ' || !*rest);
    hash = *rest == ' ' ? strchr(rest + 1, ' ') : NULL;
    if (!hash || strspn(hash + 1, "0123456789abcdef") != 16) return 0;
    return strcmp(hash + 17, "\n") == 0 || strcmp(hash + 17, " ranks differ\n") == 0;
}

/* Reads the lines of a log of `size` bytes. *end becomes where those after `step` begin, or a last line that is not
   whole. Returns the number of the first line that is none of such a log, or 0. */
static int64_t read_lines(FILE *file, off_t size, line_check *is_line, int64_t step, off_t *end) {
    char line[LOG_LINE];
    int64_t number = 0, last = 0, of = 0;
    int whole = 1;
    for (off_t at = 0; whole && fgets(line, LOG_LINE, file); last = of) {
        size_t n = strlen(line);
        whole = n > 0 && line[n - 1] == '\n';
        at += (off_t)n;
        if (!is_line(++number, line, whole, &of) || (whole ? of < last : at != size)) return number;
        if (whole && of <= step) *end = at;
    }
    return 0;
}

/* Finds where the lines of steps after `step` begin in a log, and changes nothing. A run that was killed has logged
   steps after its last checkpoint, and its last line may not be whole. Without --resume, all lines go. Returns 0 after
   it has printed what is wrong; another file that this run would destroy is no log. */
static int measure_log(const job *j, const char *path, FILE *log, line_check *is_line, int64_t step, off_t *end) {
    struct stat info;
    FILE *file;
    int64_t wrong = 0;
    int failed;
    *end = 0;
    if (!log || !j->o.resume || !output_file_is_regular(log)) return 1;
    file = fopen(path, "r");
    failed = !file || fstat(fileno(file), &info) != 0;
    if (!failed) wrong = read_lines(file, info.st_size, is_line, step, end);
    failed = failed || ferror(file);
    if (failed) fprintf(stderr, PROGRAM ": cannot read %s: %s\n", path, strerror(errno));
    else if (wrong > 0)
        fprintf(stderr, PROGRAM ": --resume cannot go on with %s: line %lld is none of such a log of " PROGRAM "\n",
                path, (long long)wrong);
    if (file) fclose(file);
    return !failed && wrong == 0;
}

/* Keeps the lines of the steps up to `step`. Nothing is changed before both logs are understood. */
static int begin_logs(const job *j, int64_t step) {
    char head[LOG_LINE];
    off_t end, hash_end;
    if (!measure_log(j, j->o.log, j->log, is_log_line, step, &end) ||
        !measure_log(j, j->o.hash_log, j->hash_log, is_hash_line, step, &hash_end))
        return 0;
    if (!output_file_cut(j->o.log, j->log, end) || !output_file_cut(j->o.hash_log, j->hash_log, hash_end)) return 0;
    write_head(head);
    if (j->log && end == 0) fputs(head, j->log);
    return 1;
}

/* Locks a regular file. Returns 0 when another run has locked it; tries for one second, because a process that was just
   killed keeps its lock until the system has freed its memory. */
static int lock_file(FILE *file) {
    const struct timespec nap = {.tv_nsec = 10000000};
    int busy = output_file_is_regular(file);
    for (int tries = 0; busy && tries < 100; tries++) {
        if (tries > 0) nanosleep(&nap, NULL);
        busy = flock(fileno(file), LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR);
    }
    return !busy;
}

/* Opens a log and locks it until it is closed: two runs would write into each other's lines. When path is NULL, *out is
   NULL. Returns 0 after an error. */
static int open_log(const char *path, FILE **out) {
    *out = path ? output_file_open(path) : NULL;
    if (!*out) return !path;
    if (lock_file(*out)) return 1;
    fprintf(stderr, PROGRAM ": %s: another run writes to it\n", path);
    return 0;
}

/* Every rank calls it with whether its files are right, and returns MT_SUCCESS if all are. The rank with a wrong one
   has printed what is wrong, so no rank reports it again. */
static mt_status agree(trainer *t, int right) {
    size_t mark = mt_arena_mark(t->ctx);
    int32_t wrong = !right;
    mt_tensor one;
    MT_TRY(mt_arena_tensor(t->ctx, MT_I32, 1, 1, &one));
    MT_TRY(mt_upload(t->ctx, &wrong, one));
    MT_TRY(mt_all_reduce(t->ctx, t->grid.world, one.data, one.data, 1, MT_I32, MT_MAX));
    MT_TRY(mt_download(t->ctx, one, &wrong));
    mt_arena_release(t->ctx, mark);
    t->refused |= wrong;
    return wrong ? MT_ERR_ARGUMENT : MT_SUCCESS;
}

/* Opens the logs, which rank 0 alone has. */
static mt_status open_logs(trainer *t, job *j) {
    int writes = mt_comm_rank(t->grid.world) == 0;
    return agree(t, !writes || (open_log(j->o.log, &j->log) && open_log(j->o.hash_log, &j->hash_log)));
}

/* ---- checkpoints ------------------------------------------------------------------------------------------------- */

/* Writes a line for each flag that changes the bits of a run, except for those of the split, which may change, and
   those of the model if the library compares them. The first FIXED_LINES lines must be the same with --resume. */
static void note_flags(const job *j, char *note) {
    int n = snprintf(note, MT_NOTE_MAX, "data of %lld tokens, hash %016llx\n", (long long)j->data.count,
                     (unsigned long long)j->data.hash);
    for (int i = 0; i < COUNT_OF(noted); i++) {
        const flag *f = flag_of(noted[i]);
        char text[VALUE_BYTES];
        const char *value = value_of(f, &j->o, text);
        double x;
        memcpy(&x, (const char *)&j->o + f->offset, sizeof x);
        if (is_number(f)) snprintf(text, sizeof text, "%.17g", x);
        n += snprintf(note + n, (size_t)(MT_NOTE_MAX - n), "--%s %s\n", noted[i], value);
    }
}

/* Saves a checkpoint after `step` steps. It flushes the logs first, so that they have all steps of the checkpoint. */
static mt_status save(trainer *t, int64_t step) {
    mt_training_state state = {.step = step,
                               .seed = (uint64_t)t->job->o.seed,
                               .position = step * (int64_t)t->job->o.batch,
                               .scaler = t->scaler};
    int writes = mt_comm_rank(t->grid.world) == 0 && mt_context_device(t->ctx) != MT_DEVICE_META;
    if (!t->job->o.checkpoint) return MT_SUCCESS;
    if (writes && t->job->log) fflush(t->job->log);
    if (writes && t->job->hash_log) fflush(t->job->hash_log);
    note_flags(t->job, state.note);
    return mt_checkpoint_save(t->ctx, t->checkpoint, &state);
}

/* Refuses the run. Every rank calls it; rank 0 prints why. */
static mt_status refuse(trainer *t, const char *format, ...) {
    va_list args;
    t->refused = 1;
    if (mt_comm_rank(t->comm) != 0) return MT_ERR_ARGUMENT;
    va_start(args, format);
    fprintf(stderr, PROGRAM ": ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return MT_ERR_ARGUMENT;
}

/* Compares two notes line by line. Refuses a difference in the first FIXED_LINES lines, and prints any other one. */
static mt_status compare_notes(trainer *t, const char *theirs, const char *ours) {
    int speaks = mt_comm_rank(t->grid.world) == 0;
    for (int line = 0; *theirs || *ours; line++) {
        int a = (int)strcspn(theirs, "\n"), b = (int)strcspn(ours, "\n");
        int same = a == b && strncmp(theirs, ours, (size_t)a) == 0;
        if (!same && (line < FIXED_LINES || a == 0 || b == 0))
            return refuse(t, "--resume: the checkpoint in %s is of '%.*s', this run is of '%.*s'", t->job->o.checkpoint,
                          a, theirs, b, ours);
        if (!same && speaks) printf("going on with %.*s, which was %.*s\n", b, ours, a, theirs);
        theirs += a + (theirs[a] == '\n');
        ours += b + (ours[b] == '\n');
    }
    return MT_SUCCESS;
}

/* Loads the weights of --init-from. All ranks have the same error, which rank 0 prints. */
static mt_status begin_from(trainer *t, const char *directory) {
    mt_status status = mt_checkpoint_import(t->ctx, t->checkpoint, directory);
    if (status == MT_ERR_IO || status == MT_ERR_DATA) return refuse(t, "%s", mt_last_error(t->ctx));
    return status;
}

/* Loads the newest checkpoint or, without one, the weights of --init-from. Without both the weights stay random. */
static mt_status load(trainer *t, int64_t newest) {
    const options *o = &t->job->o;
    mt_training_state state;
    char note[MT_NOTE_MAX];
    if (newest < 0) return o->init_from ? begin_from(t, o->init_from) : MT_SUCCESS;
    MT_TRY(mt_checkpoint_load(t->ctx, t->checkpoint, newest, &state));
    note_flags(t->job, note);
    MT_TRY(compare_notes(t, state.note, note));
    t->scaler = state.scaler;
    t->first_step = state.step;
    return MT_SUCCESS;
}

/* Locks the directory of checkpoints and loads what the run begins with. */
static mt_status open_checkpoints(trainer *t, int64_t *newest) {
    const options *o = &t->job->o;
    if (o->checkpoint) MT_TRY(mt_checkpoint_lock(t->ctx, t->checkpoint));
    if (o->checkpoint) MT_TRY(mt_checkpoint_latest(t->ctx, t->grid.world, o->checkpoint, newest));
    if (*newest >= 0 && !o->resume)
        return refuse(t, "%s has a checkpoint of step %lld: go on with --resume, or take another directory",
                      o->checkpoint, (long long)*newest);
    return load(t, *newest);
}

/* Prepares the first step: opens checkpoints, and shortens the logs, which are as they were until then. */
static mt_status begin(trainer *t) {
    const options *o = &t->job->o;
    int64_t newest = -1;
    int speaks = mt_comm_rank(t->grid.world) == 0;
    mt_status status = open_checkpoints(t, &newest);
    /* when a file is wrong on one rank, all ranks have its error */
    if ((status == MT_ERR_IO || status == MT_ERR_DATA) && !t->refused) return refuse(t, "%s", mt_last_error(t->ctx));
    MT_TRY(status);
    MT_TRY(agree(t, !speaks || begin_logs(t->job, t->first_step)));
    if (speaks && newest >= 0) printf("going on after step %lld, from %s\n", (long long)newest, o->checkpoint);
    else if (speaks && o->resume) printf("no checkpoint in %s: beginning with step 1\n", o->checkpoint);
    return MT_SUCCESS;
}

/* ---- what a rank prints ------------------------------------------------------------------------------------------ */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void print_ledger(const char *name, int ranks, const mt_ledger *l) {
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++)
        if (l->calls[k])
            printf("  %-8s (%d ranks)  %-14s %6llu calls  %12llu bytes\n", name, ranks,
                   mt_collective_name((mt_collective)k), (unsigned long long)l->calls[k],
                   (unsigned long long)l->bytes[k]);
}

static void print_ledgers(const trainer *t) {
    printf("communication of one step, per rank%s%s:\n", t->grid.pp_size > 1 ? " of stage 0" : "",
           rank_count(&t->job->o) == 1 ? ": none" : "");
    for (int i = 0; i < GROUPS; i++) print_ledger(mt_comm_name(group(t, i)), mt_comm_size(group(t, i)), &t->ledgers[i]);
}

static void print_model(const trainer *t) {
    const options *o = &t->job->o;
    printf("%s: %.15g layers, hidden %.15g, heads %.15g, vocabulary %.15g, %lld parameters in %s; %.15g x tensor, "
           "%.15g x data parallel%s",
           model_name(o), o->layers, o->hidden, o->heads, o->vocab, (long long)t->job->parameters,
           mt_dtype_name((mt_dtype)o->dtype), o->tp, o->dp, o->sequence_parallel ? ", sequence parallel" : "");
    if (o->cp > 1) printf("; %.15g x context parallel, %s", o->cp, choices[CP_COMM_TYPE - DTYPE][o->cp_comm_type]);
    if (o->pp > 1) printf("; %.15g pipeline stages, %s", o->pp, choices[SCHEDULE - DTYPE][o->schedule]);
    if (o->check > 0) printf("; check mode %d", mt_check_mode(t->ctx));
    printf("\n");
    printf("data: %lld tokens, %.15g sequences of %.15g per step, GEMM: %s\n", (long long)t->job->data.count, o->batch,
           o->seq, o->device == MT_DEVICE_CUDA ? "cuBLASLt" : mt_gemm_library());
    print_more(t);
    if (t->job->table) printf("%s", t->job->table);
    fflush(stdout);
}

static void print_memory(const job *job) {
    for (int i = 0; i < (int)job->o.pp; i++) {
        const needs *n = &job->stages[i];
        printf("per rank");
        if (job->o.pp > 1) printf(" of stage %d", i);
        printf(": %lld parameters\n", (long long)n->parameters);
        printf("  parameters, gradients %15zu bytes\n  optimizer state       %15zu bytes\n", n->model, n->optimizer);
        printf("  activations, scratch  %15zu bytes\n  all                   %15zu bytes, %.2f GiB\n", n->activations,
               n->all, (double)n->all / 1073741824.0);
    }
}

typedef struct progress {
    double start, last_print;
} progress;

/* Writes a line to the log and, about once a second, to stdout. seconds is the time of the training step, without
   validation. means: of the validation, or NULL. */
static void report(const trainer *t, progress *p, int64_t step, double seconds, const float *losses, float norm,
                   float lr, const float *means) {
    const options *o = &t->job->o;
    FILE *log = t->job->log;
    double time = now(), rate = o->batch * o->seq / seconds, done = (double)(step + 1);
    double left = (time - p->start) / (done - (double)t->first_step) * (o->steps - done);
    if (log) {
        fprintf(log, "%lld,", (long long)step + 1);
        for (int i = 0; i < LOSSES; i++) fprintf(log, "%.9g,", shown(losses[i]));
        fprintf(log, "%.9g,%.9g,%.9g", shown(norm), rate, (double)lr);
        for (int i = 0; i < TOTALS; i++)
            if (means) fprintf(log, ",%.9g", shown(means[i]));
            else fprintf(log, ",");
        fprintf(log, "\n");
    }
    if (step > t->first_step && done < o->steps && !means && time - p->last_print < 1.0) return;
    p->last_print = time;
    printf("step %5lld/%.15g", (long long)step + 1, o->steps);
    for (int i = 0; i < LOSSES; i++) printf("  %s %7.4f", loss_names[i][1], shown(losses[i]));
    printf("  grad norm %7.3f  %8.0f tokens/s  %d:%02d left", shown(norm), rate, (int)(left / 60), (int)left % 60);
    if (o->dtype == MT_F16)
        printf("  loss scale %.15g, %lld skipped", (double)t->scaler.scale, (long long)t->scaler.skipped);
    for (int i = 0; means && i < TOTALS; i++) printf("  %s %7.4f", validation_names[i][1], shown(means[i]));
    printf("\n");
    fflush(stdout);
}

/* ---- the job ----------------------------------------------------------------------------------------------------- */

static mt_status start_steps(trainer *t) {
    return mt_step_create(t->ctx, &t->optimizer, &t->scaler, (float)t->job->o.clip, &t->numbers);
}

/* Refuses a result that is not finite. `when` is the step. */
static mt_status check_finite(trainer *t, int64_t when, const char *name, float value) {
    if (isfinite(value)) return MT_SUCCESS;
    return refuse(t, "step %lld: %s is %g: the run ends without a result", (long long)when, name, shown(value));
}

/* Checks the last step of a run that began with `skipped` skipped steps. A skipped step is normal only as long as the
   loss scale can shrink. means: of the last validation, NULL: there was none. */
static mt_status check_end(trainer *t, int64_t skipped, const float *losses, float norm, const float *means) {
    int64_t last = (int64_t)t->job->o.steps, steps = last - t->first_step;
    if (steps <= 0) return MT_SUCCESS;
    for (int i = 0; i < LOSSES; i++) MT_TRY(check_finite(t, last, loss_names[i][0], losses[i]));
    if (t->skipped > 0) MT_TRY(check_finite(t, last, "the gradient norm", norm));
    for (int i = 0; means && i < TOTALS; i++) MT_TRY(check_finite(t, last, validation_names[i][0], means[i]));
    if (t->scaler.skipped - skipped == steps && mt_comm_rank(t->grid.world) == 0)
        fprintf(stderr,
                PROGRAM
                ": warning: step %lld: all %lld steps were skipped, because the gradients were not finite with a "
                "loss scale that is still shrinking: the weights are those of the beginning\n",
                (long long)last, (long long)steps);
    return MT_SUCCESS;
}

static mt_status train(trainer *t) {
    const options *o = &t->job->o;
    int speaks = mt_comm_rank(t->grid.world) == 0, evaluated = 0;
    float losses[LOSSES] = {0}, norm = 0, means[TOTALS];
    int64_t skipped;
    progress p = {now(), 0};
    if (speaks) print_model(t);
    MT_TRY(begin(t));
    MT_TRY(start_steps(t));
    skipped = t->scaler.skipped;
    for (int64_t step = t->first_step; step < (int64_t)o->steps; step++) {
        float lr = learning_rate(o, step);
        int evaluates = o->eval_interval > 0 && (step + 1) % (int64_t)o->eval_interval == 0;
        int saves =
            step + 1 == (int64_t)o->steps || (o->save_interval > 0 && (step + 1) % (int64_t)o->save_interval == 0);
        double start = now();
        MT_TRY(train_step(t, step, lr, losses, &norm));
        double seconds = now() - start;
        if (evaluates) MT_TRY(evaluate(t, means));
        evaluated |= evaluates;
        if (speaks) report(t, &p, step, seconds, losses, norm, lr, evaluates ? means : NULL);
        if (saves) MT_TRY(save(t, step + 1));
    }
    MT_TRY(check_end(t, skipped, losses, norm, evaluated ? means : NULL));
    if (speaks) print_ledgers(t);
    return finish(t);
}

/* ---- the plan of a dry run --------------------------------------------------------------------------------------- */

/* What a trace has of one function: calls, and sums over them. ranks, span: of the group of a collective, else 0. */
typedef struct function_cost {
    const char *name;
    int ranks, span, calls;
    double flops, bytes, seconds;
} function_cost;

enum { FUNCTIONS = 128 };

/* Sums up a trace by function and group, in the order of their first calls. Returns the number of rows. */
static int sum_trace(mt_context *ctx, const mt_machine *machine, const mt_trace *trace, function_cost *costs) {
    int count = 0, f;
    for (size_t i = 0; i < trace->count; i++) {
        const mt_trace_entry *e = &trace->entries[i];
        double seconds = 0;
        if (e->work > MT_WORK_COMMUNICATION || mt_machine_seconds(ctx, machine, e, &seconds) != MT_SUCCESS) continue;
        for (f = 0; f < count; f++)
            if (strcmp(costs[f].name, e->name) == 0 && costs[f].ranks == e->ranks && costs[f].span == e->span) break;
        if (f == FUNCTIONS) continue;
        if (f == count) costs[count++] = (function_cost){.name = e->name, .ranks = e->ranks, .span = e->span};
        costs[f].calls++;
        costs[f].flops += e->flops;
        costs[f].bytes += e->bytes;
        costs[f].seconds += seconds;
    }
    return count;
}

static void print_functions(mt_context *ctx, const mt_machine *machine, const mt_trace *trace) {
    static function_cost costs[FUNCTIONS];
    int count = sum_trace(ctx, machine, trace, costs);
    printf("  %-40s %7s %12s %12s %12s\n", "function, each by itself", "calls", "GFLOP", "GB", "ms");
    for (int f = 0; f < count; f++) {
        const function_cost *c = &costs[f];
        char name[80];
        snprintf(name, sizeof name, c->ranks ? "%s, %d ranks, 0 to %d" : "%s", c->name, c->ranks, c->span);
        printf("  %-40s %7d %12.3f %12.3f %12.3f\n", name, c->calls, c->flops / 1e9, c->bytes / 1e9, c->seconds * 1e3);
    }
}

/* Prints the time of a step, what it means for the job, and where a rank of stage 0 spends it. */
static void print_time(const trainer *t, const mt_step_time *times) {
    const job *job = t->job;
    const mt_machine *machine = job->machine;
    const options *o = &job->o;
    double flops = model_flops(t) / rank_count(o), seconds = times->seconds;
    double peak = mt_machine_peak(machine, (mt_dtype)o->dtype);
    printf("time of a step on %s: %.4g s, %.0f tokens/s, %.4g TFLOP/s of each rank", mt_machine_name(machine), seconds,
           o->batch * o->seq / seconds, flops / seconds / 1e12);
    if (peak > 0) printf(", MFU %.1f %%", 100 * flops / seconds / peak);
    printf(
        "\n  products %.1f %%, attention %.1f %%, other operators %.1f %%, optimizer %.1f %%, communication %.1f %%, "
        "bubble %.1f %%\n  hidden behind the above: %.4g s of work in other streams\n",
        100 * times->gemm / seconds, 100 * times->attention / seconds, 100 * times->memory / seconds,
        100 * times->optimizer / seconds, 100 * times->communication / seconds, 100 * times->bubble / seconds,
        times->overlapped);
    for (int i = 0; i < (int)o->pp; i++)
        if (mt_machine_capacity(machine) > 0 && (double)job->stages[i].all > mt_machine_capacity(machine))
            printf("  stage %d does not fit: it needs %.1f of %.1f GB\n", i, (double)job->stages[i].all / 1e9,
                   mt_machine_capacity(machine) / 1e9);
}

/* Refuses a prediction that is not a number, or a time that is no time. */
static mt_status check_time(trainer *t, double seconds) {
    const mt_machine *machine = t->job->machine;
    double peak = mt_machine_peak(machine, (mt_dtype)t->job->o.dtype), rate = model_flops(t) / seconds;
    if (seconds > 0 && isfinite(seconds) && isfinite(rate) && (peak <= 0 || isfinite(rate / peak))) return MT_SUCCESS;
    return refuse(t, "the rates of %s predict a step of %g s at a peak of %g FLOP/s, which cannot be",
                  mt_machine_name(machine), seconds, peak);
}

/* Predicts the time of a step and, if speaks is 1, prints it. */
static mt_status predict(trainer *t, job *job, int speaks) {
    static mt_step_time times[MAX_RANKS];
    MT_TRY(mt_plan_step(t->ctx, job->machine, job->traces, (int)job->o.pp, times));
    MT_TRY(check_time(t, times->seconds));
    job->step_seconds = times->seconds;
    if (!speaks) return MT_SUCCESS;
    print_time(t, times);
    print_functions(t->ctx, job->machine, job->traces);
    return MT_SUCCESS;
}

/* Returns the number of parameters of this stage, without the last stage's copy of a shared embedding. */
static int64_t stage_parameters(const trainer *t) {
    int64_t n = mt_params_global_elements(t->params);
    for (int i = 0; t->grid.pp_rank > 0 && i < mt_params_count(t->params); i++) {
        const mt_param_desc *d = &mt_params_at(t->params, i)->desc;
        if (d->shared_embedding) n -= d->rows * d->cols;
    }
    return n;
}

/* Plans a load, which takes the arena for a shard of a parameter in f32: it may be more than a step of short sequences
   needs. */
static mt_status plan_load(const trainer *t) {
    size_t mark = mt_arena_mark(t->ctx);
    mt_tensor shard;
    for (int i = 0; i < mt_params_count(t->params); i++) {
        const mt_param *p = mt_params_at(t->params, i);
        MT_TRY(mt_arena_tensor(t->ctx, MT_F32, p->value.rows, p->value.cols, &shard));
        mt_arena_release(t->ctx, mark);
    }
    return MT_SUCCESS;
}

/* Runs one step of a stage on the meta device, which computes nothing, to measure the memory that a rank needs. */
static mt_status plan_stage(job *job, int stage, trainer *t) {
    needs *n = &job->stages[stage];
    float losses[LOSSES], norm, means[TOTALS];
    mt_trace set_up;
    MT_TRY(start_steps(t));
    MT_TRY(mt_context_take_trace(t->ctx, &set_up));
    mt_trace_free(&set_up);
    MT_TRY(train_step(t, 0, 0.0f, losses, &norm));
    if (job->machine) MT_TRY(mt_context_take_trace(t->ctx, &job->traces[stage]));
    *n = (needs){.parameters = mt_params_elements(t->params),
                 .model = t->model_bytes,
                 .optimizer = t->optimizer_bytes,
                 .activations = mt_arena_peak(t->ctx),
                 .all = mt_context_allocated(t->ctx) + mt_arena_peak(t->ctx)};
    job->parameters += stage_parameters(t);
    MT_TRY(evaluate(t, means));
    MT_TRY(finish(t));
    MT_TRY(save(t, 0));
    if (job->o.init_from || job->o.resume) MT_TRY(plan_load(t));
    n->arena = mt_arena_peak(t->ctx);
    return MT_SUCCESS;
}

/* Notes why the run does not begin. The ranks say it together, as they may be processes. Keeps the first reason. */
static void refuse_later(job *job, const char *format, ...) {
    va_list args;
    if (job->refusal[0]) return;
    va_start(args, format);
    vsnprintf(job->refusal, sizeof job->refusal, format, args);
    va_end(args);
}

/* Checks that the vocabulary has all tokens of the data, before a batch has one that it lacks. Names the place of the
   first of these in its file. */
static void check_tokens(job *j) {
    const options *o = &j->o;
    const dataset *d = &j->data;
    int64_t i = 0, begin = 0, file = 0;
    while (i < d->count && d->tokens[i] < o->vocab) i++;
    if (i == d->count) return;
    for (; !o->data && i >= d->ends[file]; file++) begin = d->ends[file];
    refuse_later(j, "%s: %s %lld is %d, and the vocabulary of the model is %.15g", o->data ? o->data : own_data[file],
                 d->text ? "byte" : "token", (long long)(i - begin + 1), (int)d->tokens[i], o->vocab);
}

/* ---- the model of a checkpoint: flags that are not given take its shape ------------------------------------------ */

/* `theirs` is of the model in `from`, with the plural of what it counts. */
static void refuse_number(job *job, const char *from, const char *name, double ours, int64_t theirs,
                          const char *plural) {
    options *o = &job->o;
    if (*given(o, flag_of(name)) == GIVEN_BY_CONFIG)
        refuse_later(job, "--config %s has %.15g %s, the model in %s has %lld %s", configs[o->config], ours, plural,
                     from, (long long)theirs, plural);
    else refuse_later(job, "--%s is %.15g, the model in %s has %lld %s", name, ours, from, (long long)theirs, plural);
}

/* As refuse_number, if they differ. A flag of 0 is as if it was not given. */
static void take_number(job *job, const char *from, const char *name, int64_t theirs, const char *plural) {
    const flag *f = flag_of(name);
    double ours, their = (double)theirs;
    memcpy(&ours, field(f, &job->o), sizeof ours);
    if (*given(&job->o, f) && ours != 0 && ours != their) refuse_number(job, from, name, ours, theirs, plural);
    memcpy(field(f, &job->o), &their, sizeof their);
}

/* The values of the flag are those of the model's desc. */
static void take_choice(job *job, const char *from, const char *name, int theirs) {
    const flag *f = flag_of(name);
    const char *their = choices[f->kind - DTYPE][theirs];
    int ours;
    memcpy(&ours, field(f, &job->o), sizeof ours);
    if (*given(&job->o, f) && ours != theirs)
        refuse_later(job, "--%s is %s, the model in %s has %s", name, choice(f, ours), from, their ? their : "another");
    memcpy(field(f, &job->o), &theirs, sizeof theirs);
}

/* A model has so many positions. A sequence that is not asked for may be shorter. */
static void take_seq(job *job, const char *from, int64_t positions) {
    options *o = &job->o;
    if (*given(o, flag_of("seq")) && o->seq > (double)positions)
        refuse_number(job, from, "seq", o->seq, positions, "positions");
    o->seq = fmin(o->seq, (double)positions);
}

/* Sets path to the newest checkpoint in a directory of checkpoints, or returns 0. */
static int newest_in(mt_context *ctx, const char *directory, char path[MT_PATH_MAX]) {
    int64_t step = -1;
    return mt_checkpoint_latest(ctx, NULL, directory, &step) == MT_SUCCESS && step >= 0 &&
           mt_checkpoint_path(ctx, directory, step, path, MT_PATH_MAX) == MT_SUCCESS;
}

/* A context for files, before there are ranks. */
static mt_status open_small(mt_context **ctx) {
    mt_context_desc desc = {.arena_bytes = 64};
    return mt_context_create(NULL, &desc, ctx);
}

/* Reads the desc of the model that this run begins with. --init-from becomes the directory of one model. */
static mt_status find_origin(job *job) {
    options *o = &job->o;
    char path[MT_PATH_MAX];
    const char *from;
    mt_context *ctx = NULL;
    MT_TRY(open_small(&ctx));
    if (o->init_from && newest_in(ctx, o->init_from, job->newest)) o->init_from = job->newest;
    from = o->resume && o->checkpoint && newest_in(ctx, o->checkpoint, path) ? path : o->init_from;
    if (from && read_origin(ctx, job, from) != MT_SUCCESS) refuse_later(job, "%s", mt_last_error(ctx));
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

/* Reads --machine before anything is planned. */
static mt_status read_machine(job *job) {
    mt_context *ctx = NULL;
    if (!job->o.machine) return MT_SUCCESS;
    MT_TRY(open_small(&ctx));
    if (mt_machine_read(ctx, job->o.machine, &job->machine) != MT_SUCCESS) refuse_later(job, "%s", mt_last_error(ctx));
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

/* Writes the parameters, and what one step computes from them. */
static mt_status write_table(trainer *t) {
    float losses[LOSSES], norm;
    MT_TRY(start_steps(t));
    write_cells(t, "call", "parameter", "writes", "shape", "over tensor", "over data", "over context");
    fprintf(t->table, "parameters\n");
    for (int i = 0; i < mt_params_count(t->params); i++) {
        const mt_param *p = mt_params_at(t->params, i);
        write_row(t, "", p->desc.name, "", p->value);
    }
    return train_step(t, 0, 0.0f, losses, &norm);
}

/* Sets the table of --check: what the calls of the first stage write in a micro-batch, in a model with one layer in
   each stage. */
static mt_status tabulate(job *job) {
    static struct job one;
    trainer t;
    mt_comm *world = NULL;
    size_t bytes = 0;
    mt_status status;
    one = *job;
    one.o.layers = one.o.pp;
    one.o.checkpoint = one.o.init_from = one.o.hash_log = NULL;
    memset(&t, 0, sizeof t);
    status = mt_comm_create_meta(rank_count(&one.o), 0, &world);
    if (status == MT_SUCCESS) status = trainer_create(world, &one, MT_DEVICE_META, &t);
    if (status == MT_SUCCESS && !(t.table = open_memstream(&job->table, &bytes))) status = MT_ERR_MEMORY;
    if (t.table) status = write_table(&t);
    if (t.table) fclose(t.table);
    if (status != MT_SUCCESS)
        refuse_later(job, "%s: %s", mt_status_name(status), world ? mt_comm_last_error(world) : "");
    trainer_destroy(&t);
    mt_comm_destroy(world);
    return status;
}

/* Plans all stages, from the last to the first. When speaks is 1, prints the plan after the first stage. */
static mt_status plan(job *job, int speaks) {
    mt_status status = job->o.check > 0 ? tabulate(job) : MT_SUCCESS;
    for (int stage = (int)job->o.pp; status == MT_SUCCESS && stage-- > 0;) {
        trainer t;
        mt_comm *world = NULL;
        memset(&t, 0, sizeof t);
        status = mt_comm_create_meta(rank_count(&job->o), stage * stage_ranks(&job->o), &world);
        if (status == MT_SUCCESS) status = trainer_create(world, job, MT_DEVICE_META, &t);
        if (status == MT_SUCCESS) status = plan_stage(job, stage, &t);
        if (status != MT_SUCCESS)
            refuse_later(job, "%s: %s", mt_status_name(status), world ? mt_comm_last_error(world) : "");
        if (status == MT_SUCCESS && stage == 0 && speaks) {
            print_model(&t);
            print_memory(job);
            print_ledgers(&t);
        }
        if (status == MT_SUCCESS && stage == 0 && job->machine) {
            status = predict(&t, job, speaks);
            if (status != MT_SUCCESS) refuse_later(job, "%s", mt_last_error(t.ctx));
        }
        trainer_destroy(&t);
        mt_comm_destroy(world);
    }
    for (int stage = 0; stage < (int)job->o.pp; stage++) mt_trace_free(&job->traces[stage]);
    return status;
}

/* Rank 0 prints why the run does not begin, if all ranks have the same reason. */
static mt_status refuse_together(mt_comm *world, const job *job, trainer *t) {
    mt_context_desc where = {.arena_bytes = 1 << 20,
                             .device = mt_comm_size(world) > 1 ? (mt_device)job->o.device : MT_DEVICE_CPU};
    where.ordinal = mt_comm_local_rank(world) % (int)fmax(1, mt_device_count(where.device));
    t->job = job;
    MT_TRY(mt_context_create(world, &where, &t->ctx));
    MT_TRY(mt_comm_create_for(t->ctx, world, &t->comm));
    MT_TRY(compare_ranks(t));
    return refuse(t, "%s", job->refusal);
}

static mt_status rank_main(mt_comm *world, void *user) {
    job *j = (job *)user;
    trainer t;
    mt_status status;
    memset(&t, 0, sizeof t);
    status = j->refusal[0] ? refuse_together(world, j, &t) : trainer_create(world, j, (mt_device)j->o.device, &t);
    if (status == MT_SUCCESS) status = open_logs(&t, j);
    if (status == MT_SUCCESS) status = train(&t);
    if (t.refused) __atomic_store_n(&j->refused, 1, __ATOMIC_RELAXED);
    if (t.refused) status = MT_SUCCESS; /* rank 0 has printed why: the launcher must not report it again */
    trainer_destroy(&t);
    return status;
}

/* Prints the times of a step with each --cp-comm-type. */
static void compare_comm_types(const job *job) {
    static struct job other;
    double seconds[4] = {0}, least = INFINITY;
    for (int type = 1; type < 4; type++) {
        other = *job;
        other.o.cp_comm_type = type;
        other.o.check = 0;
        if (plan(&other, 0) == MT_SUCCESS) seconds[type] = other.step_seconds;
        if (seconds[type] > 0) least = fmin(least, seconds[type]);
    }
    printf("--cp-comm-type:");
    for (int type = 1; type < 4; type++) {
        printf("%s %s ", type > 1 ? "," : "", choices[CP_COMM_TYPE - DTYPE][type]);
        if (seconds[type] > 0) printf("%.4g s%s", seconds[type], seconds[type] == least ? " (the fastest)" : "");
        else printf("is not possible");
    }
    printf("\n");
}

/* Rank 0 plans alone, because a plan needs no communication. It has printed its errors, so every rank succeeds. */
static mt_status dry_run(mt_comm *world, void *user) {
    job *j = (job *)user;
    if (mt_comm_rank(world) != 0) return MT_SUCCESS;
    MT_TRY(read_machine(j));
    j->planned = j->refusal[0] ? MT_ERR_ARGUMENT : plan(j, 1);
    if (j->planned == MT_SUCCESS && j->machine && j->o.cp > 1) compare_comm_types(j);
    if (j->refusal[0]) fprintf(stderr, PROGRAM ": %s\n", j->refusal);
    mt_machine_destroy(j->machine);
    return MT_SUCCESS;
}

/* mt_launch calls this function when a rank's thread is stuck, for instance in a file system. The thread may hold the
   lock of the log, so the log is flushed only when the lock is free. */
static void leave(void *user) {
    FILE *log = ((job *)user)->log;
    if (log && ftrylockfile(log) == 0) fflush(log);
    _exit(1);
}

static mt_status run(job *job) {
    mt_launch_desc ranks = {.ranks = rank_count(&job->o),
                            .no_pinning = job->o.no_pinning,
                            .cores_per_rank = (int)job->o.threads,
                            .timeout_s = job->o.timeout,
                            .stuck = leave};
    if (job->o.dry_run) {
        MT_TRY(mt_world_from_env(NULL, dry_run, job));
        return job->planned;
    }
    if (!job->refusal[0]) plan(job, 0);
    if (job->refusal[0]) ranks.ranks = 0; /* one thread, or the processes that there are */
    MT_TRY(mt_world_from_env(&ranks, rank_main, job));
    return job->refused ? MT_ERR_ARGUMENT : MT_SUCCESS;
}

/* The defaults that programs have in common. */
static options default_options(void) {
    options o = {.tp = 2,
                 .cp = 1,
                 .dp = 1,
                 .pp = 1,
                 .seed = 1234,
                 .eval_interval = 100,
                 .threads = 1,
                 .clip = 1,
                 .timeout = 600};
    return o;
}

/* The whole program. The caller has set the default flags. */
static int train_main(int argc, char **argv, job *job) {
    mt_status status = MT_ERR_ARGUMENT;
    setlocale(LC_NUMERIC, "C"); /* flags, logs and notes have a decimal point in every locale */
    if (!parse_options(argc, argv, &job->o)) return 2;
    if (job->o.help) {
        print_help(&job->o);
        return 0;
    }
    if (check_logs(&job->o) && prepare(job)) status = run(job);
    if (!output_file_close(job->o.log, job->log)) status = MT_ERR_IO;
    if (!output_file_close(job->o.hash_log, job->hash_log)) status = MT_ERR_IO;
    free(job->data.tokens);
    free(job->data.marks);
    free(job->table);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, PROGRAM ": cannot write the results: %s\n", strerror(errno));
        status = MT_ERR_IO;
    }
    return status == MT_SUCCESS ? 0 : 1;
}

#endif /* FILES_ONLY */
#endif /* TRAIN_H */
