/* train_gpt - trains a GPT with tensor x data x pipeline parallel ranks on a text file.

   cc -O3 -march=native -I. examples/train_gpt.c -o train_gpt -lm -lpthread
   cc -O3 -march=native -I. -DMT_USE_ONEDNN examples/train_gpt.c -o train_gpt -ldnnl -lm -lpthread
   nvcc -O3 -arch=native -I. -x cu examples/train_gpt.c -o train_gpt -lcublasLt   (several GPUs: -DMT_USE_NCCL -lnccl)

   ./train_gpt                      the defaults: 2-way tensor parallel, one to three minutes on two cores, on the text
                                    of this project's headers and README (run it in the root of the checkout)
   ./train_gpt --data FILE --tp 4 --dp 2 --steps 1000
   ./train_gpt --tp 2 --pp 2 --micro-batch 2   two pipeline stages, 8 micro-batches; --schedule gpipe instead of 1f1b
   ./train_gpt --device cuda --dtype bf16      on GPUs: rank r is on GPU r; with more ranks than GPUs, ranks share them
   ./train_gpt --checkpoint DIR --save-interval 100 --resume   continues a run that was stopped or killed, on any split
   ./train_gpt --init-from DIR ...  begins with the model of a checkpoint, or with a GPT-2 or Llama of Hugging Face
   ./train_gpt --help               all flags

   Ranks that are processes, on GPUs over NCCL, or on CPUs over MPI (see mt_world_from_env):
   torchrun --no-python --nproc-per-node 8 --nnodes 4 ... ./train_gpt --device cuda --tp 8 --dp 4
   srun -n 32 ./train_gpt --device cuda --tp 8 --dp 4
   mpicc -O3 -I. -DMT_USE_MPI examples/train_gpt.c -o train_gpt -lm -lpthread; mpirun -n 4 ./train_gpt --tp 2 --dp 2

   FILE is any text (a token is a byte), or a token file of llm.c (.bin: a header of 1024 bytes, then uint16 tokens).
   Ranks that are processes compare their flags and their data before the first step. Each may have its own --log,
   --timeout and --no-pinning, and its own path to the same data.
   Results go to stdout, errors to stderr.
   Up to rounding, the loss does not depend on --tp, --dp, --pp, --micro-batch or --sequence-parallel. With --invariant
   8 it has the same bits on 1, 2, 4 or 8 tensor ranks, 1, 2, 4 or 8 data ranks, and any number of stages. --hash-log
   FILE writes a hash of each tensor: a diff of two such files shows the first tensor in which two runs differ. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* fileno, getline: a strict -std=c99 hides them */
#endif
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GPT2_VOCAB 50257
#define LLMC_MAGIC 20240520
#define LLMC_HEADER_BYTES 1024
#define EVAL_SEQUENCES 32
#define SKIPPED_STEPS 10 /* a run ends after so many in a row, see skip_step */
#define MAX_RANKS 1024
#define MAX_FLAGS 64

/* ---- options: one table for parsing, ranges and --help ----------------------------------------------------------- */

typedef struct options {
    const char *data, *log, *hash_log, *prompt, *checkpoint, *init_from;
    double tp, dp, pp, layers, hidden, heads, kv_heads, ffn, seq, max_seq, batch, micro_batch, steps, warmup, seed,
        eval_interval;
    double sample, vocab, threads, invariant, invariant_data, lr, min_lr, dropout, clip, weight_decay, label_smoothing;
    double temperature, timeout, bucket_mb, save_interval;
    int dtype, device, cuda_graph, recompute, schedule, config, distributed_optimizer, sequence_parallel, no_pinning,
        rotary, activation;
    int rmsnorm, untied, resume, dry_run, help;
    char given[MAX_FLAGS]; /* 1: flags[i] was given, also by --config */
} options;

enum { TEXT, WHOLE, REAL, SWITCH, DTYPE, DEVICE, RECOMPUTE, SCHEDULE, ACTIVATION, CONFIG };

/* The values of flags of the kinds DTYPE to CONFIG, in this order. The index of a value is its number in mt_dtype,
   mt_device, mt_recompute, mt_schedule or mt_activation, or in the table of set_config. */
static const char *const choices[][MT_ACTIVATION_COUNT] = {
    {"f32", "bf16", "f16"},
    {"cpu", "cuda"},
    {"none", "selective", "full"},
    {"1f1b", "gpipe"},
    {"gelu", "gelu-erf", "swiglu", "squared-relu", "relu", "tanh"},
    {"gpt2-1.2b", "gpt2-2.5b", "gpt2-4.2b", "gpt2-8.3b"}};

typedef struct flag {
    const char *name;
    int kind;
    size_t offset;
    double low, high; /* allowed range, inclusive */
    const char *help;
} flag;

#define AT(field) offsetof(options, field)
static const flag flags[] = {
    {"config", CONFIG, AT(config), 0, 3,
     "gpt2-1.2b, gpt2-2.5b, gpt2-4.2b or gpt2-8.3b of the paper; flags after it change it"},
    {"data", TEXT, AT(data), 0, 0, "FILE to train on; default: this project's headers and README"},
    {"device", DEVICE, AT(device), 0, 1, "cpu or cuda"},
    {"cuda-graph", SWITCH, AT(cuda_graph), 0, 1,
     "record the second step as a CUDA graph, and launch it for all further steps"},
    {"dtype", DTYPE, AT(dtype), 0, 2, "f32, bf16 or f16, of weights and activations; f16 scales the loss"},
    {"tp", WHOLE, AT(tp), 1, 1024, "tensor parallel ranks"},
    {"dp", WHOLE, AT(dp), 1, 1024, "data parallel ranks"},
    {"bucket-mb", REAL, AT(bucket_mb), 0, 1e6,
     "MB of gradients that one collective sums over data parallel ranks (0: 160, or 4 x --dp)"},
    {"use-distributed-optimizer", SWITCH, AT(distributed_optimizer), 0, 1,
     "each data parallel rank keeps a share of the optimizer's state (ZeRO-1)"},
    {"pp", WHOLE, AT(pp), 1, MAX_RANKS, "pipeline stages, which share the layers evenly"},
    {"schedule", SCHEDULE, AT(schedule), 0, 1, "1f1b or gpipe: the order of micro-batches in the pipeline"},
    {"layers", WHOLE, AT(layers), 1, 1024, "transformer layers"},
    {"hidden", WHOLE, AT(hidden), 1, 65536, "hidden size"},
    {"heads", WHOLE, AT(heads), 1, 1024, "attention heads"},
    {"kv-heads", WHOLE, AT(kv_heads), 0, 1024, "key/value heads (0: as many as --heads)"},
    {"ffn", WHOLE, AT(ffn), 0, 1 << 20, "inner width of the MLP (0: 4 x hidden)"},
    {"seq", WHOLE, AT(seq), 1, 1 << 20, "tokens per sequence"},
    {"max-seq", WHOLE, AT(max_seq), 0, 1 << 20,
     "positions of the model (0: as in --init-from or --resume, otherwise --seq)"},
    {"batch", WHOLE, AT(batch), 1, 1 << 20, "sequences per step, over all ranks"},
    {"micro-batch", WHOLE, AT(micro_batch), 0, 1 << 20,
     "sequences per forward on a rank (0: all sequences of the rank; with --pp, 1)"},
    {"recompute", RECOMPUTE, AT(recompute), 0, 2,
     "none, selective (core attention) or full: what the backward of a layer recomputes"},
    {"invariant", WHOLE, AT(invariant), 0, 1024,
     "same bits on every split, for at most this number of tensor parallel ranks (0: off)"},
    {"invariant-data", WHOLE, AT(invariant_data), 0, 1024, "the same for data parallel ranks (0: as --invariant)"},
    {"steps", WHOLE, AT(steps), 1, 1e9, "optimizer steps"},
    {"lr", REAL, AT(lr), 0, 1e3, "peak learning rate"},
    {"min-lr", REAL, AT(min_lr), 0, 1e3, "learning rate at the end of the cosine"},
    {"warmup", WHOLE, AT(warmup), 0, 1e9, "steps of linear warm-up"},
    {"seed", WHOLE, AT(seed), 0, 9e15, "seed of weights, batches and dropout"},
    {"dropout", REAL, AT(dropout), 0, 0.999, "dropout probability of embedding, attention and residuals"},
    {"clip", REAL, AT(clip), 0, 1e9, "gradient norm to clip to (0: off)"},
    {"weight-decay", REAL, AT(weight_decay), 0, 1e3, "weight decay of AdamW, on matrices only"},
    {"label-smoothing", REAL, AT(label_smoothing), 0, 0.999, "label smoothing of the loss"},
    {"vocab", WHOLE, AT(vocab), 0, 1 << 20, "vocabulary (0: 256 for text, 50257 for .bin)"},
    {"eval-interval", WHOLE, AT(eval_interval), 0, 1e9, "steps between validation losses (0: never)"},
    {"sample", WHOLE, AT(sample), 0, 1 << 20, "tokens to generate at the end"},
    {"prompt", TEXT, AT(prompt), 0, 0, "TEXT to continue; default: from the validation text"},
    {"temperature", REAL, AT(temperature), 1e-3, 100, "temperature of --sample"},
    {"log", TEXT, AT(log), 0, 0, "FILE.csv: write step,loss,grad_norm,tokens_per_s,lr,val_loss"},
    {"hash-log", TEXT, AT(hash_log), 0, 0, "FILE: write step, name and hash of every tensor of every step"},
    {"checkpoint", TEXT, AT(checkpoint), 0, 0,
     "DIR of the run's checkpoints: one is saved at the end, the newest two are kept"},
    {"save-interval", WHOLE, AT(save_interval), 0, 1e9, "steps between checkpoints (0: only at the end)"},
    {"resume", SWITCH, AT(resume), 0, 1,
     "continue from the newest checkpoint, if there is one; logs continue after its step.\n"
     "                              Data, --seq, --batch, --seed and --dtype must not change; other flags may"},
    {"init-from", TEXT, AT(init_from), 0, 0,
     "DIR of a checkpoint, or of a GPT-2 or Llama of Hugging Face: the run begins with its model.\n"
     "                              Flags of the shape may be left out; they must not contradict the model"},
    {"threads", WHOLE, AT(threads), 1, 1024, "threads of the GEMM library on each rank"},
    {"timeout", REAL, AT(timeout), 1e-3, 1e6, "seconds a collective waits for a rank"},
    {"sequence-parallel", SWITCH, AT(sequence_parallel), 0, 1, "split tokens outside the tensor parallel regions"},
    {"no-pinning", SWITCH, AT(no_pinning), 0, 1, "let ranks move between cores, for a machine with other work"},
    {"rotary", SWITCH, AT(rotary), 0, 1, "rotary instead of learned positions"},
    {"activation", ACTIVATION, AT(activation), 0, MT_ACTIVATION_COUNT - 1,
     "gelu (with tanh, as in GPT-2), gelu-erf, swiglu, squared-relu, relu or tanh"},
    {"rmsnorm", SWITCH, AT(rmsnorm), 0, 1, "RMSNorm instead of layer normalisation"},
    {"untied", SWITCH, AT(untied), 0, 1, "an output head with its own weight"},
    {"dry-run", SWITCH, AT(dry_run), 0, 1, "print parameters, bytes and collectives per rank, train nothing"},
    {"help", SWITCH, AT(help), 0, 1, "this text"},
};
#define FLAGS (int)(sizeof flags / sizeof *flags)

static void *field(const flag *f, options *o) { return (char *)o + f->offset; }

static const flag *flag_of(const char *name) {
    int i = 0;
    while (strcmp(flags[i].name, name) != 0) i++;
    return &flags[i];
}

static char *given(options *o, const flag *f) { return &o->given[f - flags]; }

/* Sets the flags for a GPT-2 model of arXiv 1909.08053, table 1: its size, its number of tensor parallel ranks, and 8
   sequences per step. All activations are recomputed (section 4.2), because the GPUs of the paper have 32 GB. */
static void set_config(options *o) {
    static const struct {
        double hidden, heads, layers, tp;
    } table[] = {{1536, 16, 40, 1}, {1920, 20, 54, 2}, {2304, 24, 64, 4}, {3072, 32, 72, 8}};
    static const char *const sets[] = {"hidden", "heads", "layers", "seq", "vocab"};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) *given(o, flag_of(sets[i])) = 1;
    o->hidden = table[o->config].hidden;
    o->heads = table[o->config].heads;
    o->layers = table[o->config].layers;
    o->tp = table[o->config].tp;
    o->seq = 1024;
    o->vocab = GPT2_VOCAB;
    o->batch = o->micro_batch = 8;
    o->recompute = MT_RECOMPUTE_FULL;
}

static int parse_choice(const flag *f, const char *text, options *o) {
    for (int i = 0; i <= (int)f->high; i++) {
        if (strcmp(text, choices[f->kind - DTYPE][i]) != 0) continue;
        memcpy(field(f, o), &i, sizeof i);
        if (f->kind == CONFIG) set_config(o);
        return 1;
    }
    fprintf(stderr, "train_gpt: --%s %s: expected %s\n", f->name, text, f->help);
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
        fprintf(stderr, "train_gpt: --%s %s: expected %s from %.15g to %.15g\n", f->name, text,
                f->kind == WHOLE ? "a whole number" : "a number", f->low, f->high);
        return 0;
    }
    memcpy(field(f, o), &x, sizeof x);
    return 1;
}

static void print_help(options *o) {
    printf("usage: train_gpt [flags]\n");
    for (int i = 0; i < FLAGS; i++) {
        const flag *f = &flags[i];
        double x = 0;
        if (f->kind == WHOLE || f->kind == REAL) memcpy(&x, field(f, o), sizeof x);
        printf("  --%-25s %s", f->name, f->help);
        if (f->kind == WHOLE || f->kind == REAL) printf(" (default %.15g)", x);
        printf("\n");
    }
}

static int parse_options(int argc, char **argv, options *o) {
    const int on = 1;
    struct option table[FLAGS + 1];
    int index, c;
    memset(table, 0, sizeof table);
    for (index = 0; index < FLAGS; index++) {
        table[index].name = flags[index].name;
        table[index].has_arg = flags[index].kind != SWITCH;
    }
    while ((c = getopt_long(argc, argv, "", table, &index)) == 0) {
        const flag *f = &flags[index];
        *given(o, f) = 1;
        if (f->kind == SWITCH) memcpy(field(f, o), &on, sizeof on);
        else if (!parse_value(f, optarg, o)) return 0;
    }
    if (c != -1) return 0; /* getopt_long has printed what is wrong */
    if (optind < argc)
        fprintf(stderr, "train_gpt: unexpected argument '%s'; flags start with --, see --help\n", argv[optind]);
    return optind >= argc;
}

/* Checks how the ranks divide a batch, and chooses the micro-batch. The library checks the model. */
static int check_options(options *o, int64_t tokens, int text) {
    double per_rank = o->batch / o->dp;
    int chosen = o->invariant > 0 && o->micro_batch > 0;
    if (o->invariant > 0 && o->invariant_data == 0) o->invariant_data = o->invariant;
    if (o->invariant > 0) o->micro_batch = (double)mt_invariant_micro_batch((int)o->invariant_data, (int64_t)o->batch);
    if (o->micro_batch == 0) o->micro_batch = o->pp > 1 ? 1 : per_rank;
    if (chosen) fprintf(stderr, "train_gpt: --invariant chooses the micro-batch, leave --micro-batch out\n");
    else if (per_rank != floor(per_rank))
        fprintf(stderr, "train_gpt: --batch %.15g is not a multiple of --dp %.15g\n", o->batch, o->dp);
    else if (fmod(per_rank, o->micro_batch) != 0 && o->invariant > 0)
        fprintf(stderr,
                "train_gpt: --invariant-data %.15g makes %.15g micro-batches of --batch %.15g, which --dp %.15g cannot "
                "share\n",
                o->invariant_data, o->batch / o->micro_batch, o->batch, o->dp);
    else if (fmod(per_rank, o->micro_batch) != 0)
        fprintf(stderr,
                "train_gpt: the %.15g sequences of a rank (--batch / --dp) are not a multiple of --micro-batch %.15g\n",
                per_rank, o->micro_batch);
    else if (o->sequence_parallel && fmod(o->seq, o->tp) != 0)
        fprintf(stderr, "train_gpt: --seq %.15g is not a multiple of --tp %.15g, which --sequence-parallel needs\n",
                o->seq, o->tp);
    else if (o->tp * o->dp * o->pp > MAX_RANKS)
        fprintf(stderr, "train_gpt: --tp %.15g x --dp %.15g x --pp %.15g are more than %d ranks\n", o->tp, o->dp, o->pp,
                MAX_RANKS);
    else if (o->max_seq > 0 && o->max_seq < o->seq)
        fprintf(stderr, "train_gpt: --max-seq %.15g is less than --seq %.15g\n", o->max_seq, o->seq);
    else if (o->cuda_graph && (o->device != MT_DEVICE_CUDA || o->hash_log))
        fprintf(stderr,
                "train_gpt: --cuda-graph needs --device cuda, without --hash-log, which waits for each tensor\n");
    else if ((o->resume || o->save_interval > 0) && !o->checkpoint)
        fprintf(stderr, "train_gpt: --%s needs --checkpoint DIR\n", o->resume ? "resume" : "save-interval");
    else if (o->prompt && !text)
        fprintf(stderr, "train_gpt: --prompt %s needs text; a token file has no letters\n", o->prompt);
    else if ((double)tokens < 4 * o->seq + 8)
        fprintf(stderr, "train_gpt: the data has %lld tokens, too few for --seq %.15g (needs %.15g)\n",
                (long long)tokens, o->seq, 4 * o->seq + 8);
    else return 1;
    return 0;
}

/* ---- data -------------------------------------------------------------------------------------------------------- */

typedef struct dataset {
    int32_t *tokens;
    int64_t count, train; /* the first `train` tokens are for training, the rest for validation */
    uint64_t hash;        /* of all tokens */
    int text;             /* a token is a byte */
} dataset;

/* Appends the bytes of a file to bytes[*size]. */
static int read_file(const char *path, unsigned char **bytes, size_t *size) {
    FILE *f = fopen(path, "rb");
    size_t room = *size + (1 << 16), got = 1;
    while (f && got > 0) {
        unsigned char *more = (unsigned char *)realloc(*bytes, room);
        if (!more) {
            fprintf(stderr, "train_gpt: no memory for %s (%zu bytes)\n", path, room);
            fclose(f);
            return 0;
        }
        *bytes = more;
        got = fread(*bytes + *size, 1, room - *size, f);
        *size += got;
        if (*size == room) room *= 2;
    }
    int failed = !f || ferror(f);
    if (failed) fprintf(stderr, "train_gpt: cannot read %s: %s\n", path, strerror(errno));
    if (f) fclose(f);
    return !failed;
}

/* Returns token t of a file: a byte, or a little-endian uint16 after the header of llm.c. */
static int32_t token_at(const unsigned char *bytes, int text, int64_t t) {
    const unsigned char *p = bytes + LLMC_HEADER_BYTES + 2 * t;
    return text ? bytes[t] : p[0] | p[1] << 8;
}

/* Checks the header of a token file of llm.c. *count becomes the number of tokens. */
static int check_bin(const char *path, const unsigned char *bytes, size_t size, int64_t *count) {
    int32_t header[3] = {0};
    if (size >= LLMC_HEADER_BYTES) memcpy(header, bytes, sizeof header);
    if (header[0] != LLMC_MAGIC || header[1] != 1) {
        fprintf(stderr,
                "train_gpt: %s is not a token file of llm.c: magic %d, version %d; expected %d, 1 (uint16 tokens)\n",
                path, (int)header[0], (int)header[1], LLMC_MAGIC);
        return 0;
    }
    if (header[2] < 0 || LLMC_HEADER_BYTES + 2 * (size_t)header[2] != size) {
        fprintf(stderr, "train_gpt: %s announces %d tokens and has %zu bytes of them\n", path, (int)header[2],
                size - LLMC_HEADER_BYTES);
        return 0;
    }
    *count = header[2];
    return 1;
}

/* The training text without --data. */
static const char *const own_data[] = {"megatron.h", "mt_parallel.h", "mt_kernels.cuh", "mt_comm.h", "README.md"};
#define OWN_DATA (sizeof own_data / sizeof *own_data)

/* Reads the tokens, and divides them into training and validation. Sets o->vocab when it is 0. */
static int load_data(options *o, dataset *d) {
    unsigned char *bytes = NULL;
    size_t size = 0, length = o->data ? strlen(o->data) : 0;
    int ok = 1;
    d->text = !(length > 4 && strcmp(o->data + length - 4, ".bin") == 0);
    for (size_t i = 0; ok && i < (o->data ? 1 : OWN_DATA); i++)
        ok = read_file(o->data ? o->data : own_data[i], &bytes, &size);
    d->count = (int64_t)size;
    ok = ok && (d->text || check_bin(o->data, bytes, size, &d->count));
    d->tokens = ok ? (int32_t *)malloc((size_t)(d->count + 1) * sizeof *d->tokens) : NULL;
    if (ok && !d->tokens) fprintf(stderr, "train_gpt: no memory for %lld tokens\n", (long long)d->count);
    d->hash = 14695981039346656037u; /* FNV-1a */
    for (int64_t i = 0; d->tokens && i < d->count; i++) {
        d->tokens[i] = token_at(bytes, d->text, i);
        d->hash = (d->hash ^ (uint64_t)d->tokens[i]) * 1099511628211u;
    }
    free(bytes);
    d->train = d->count - (int64_t)fmax((double)d->count / 10, o->seq + 1); /* at least one sequence for validation */
    if (o->vocab == 0) o->vocab = d->text ? 256 : GPT2_VOCAB;
    return d->tokens != NULL;
}

/* Returns the first token of sequence i of a step. It depends on the sequence's global index, so every split trains on
   the same sequences. */
static int64_t draw_start(const options *o, const dataset *d, int64_t step, int64_t i) {
    uint64_t n = (uint64_t)(step * (int64_t)o->batch + i), seed = (uint64_t)o->seed;
    uint32_t counter[4] = {(uint32_t)n, (uint32_t)(n >> 32), 0x64617461, 0},
             key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t r[4];
    mt_philox4x32(counter, key, r);
    return (int64_t)(((uint64_t)r[0] << 32 | r[1]) % (uint64_t)(d->train - (int64_t)o->seq));
}

/* Returns the first token of validation sequence i of `count`. The sequences are spread evenly over the validation part
   and may overlap. */
static int64_t eval_start(const options *o, const dataset *d, int64_t i, int64_t count) {
    return d->train + (d->count - d->train - (int64_t)o->seq - 1) * i / (count > 1 ? count - 1 : 1);
}

/* ---- files: a log must not be another file that this run reads or writes ----------------------------------------- */

/* For a file that does not exist yet: finds its directory, and its name in there. Follows symbolic links to files that
   do not exist yet. Returns 0 when there is no such directory. */
static int find_place(const char *path, struct stat *folder, char name[MT_PATH_MAX]) {
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
static int same_file(const char *a, const char *b) {
    char name_a[MT_PATH_MAX], name_b[MT_PATH_MAX];
    struct stat x, y;
    int has_a = stat(a, &x) == 0, has_b = stat(b, &y) == 0, same = has_a && has_b && S_ISREG(x.st_mode);
    if (!has_a && !has_b) same = find_place(a, &x, name_a) && find_place(b, &y, name_b) && !strcmp(name_a, name_b);
    return same && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Returns 1 when the file `log` of --flag is not the file `path` of `other`; otherwise prints a message and returns 0.
   path may be NULL. */
static int is_apart(const char *flag, const char *log, const char *other, const char *path) {
    if (!path || !same_file(log, path)) return 1;
    fprintf(stderr, "train_gpt: --%s %s is the same file as %s%s%s\n", flag, log, other, *other ? " " : "", path);
    return 0;
}

/* The same for all files of a checkpoint (depth 0), or of a directory of checkpoints (depth 1). */
static int is_apart_from(const char *flag, const char *log, const char *other, const char *directory, int depth) {
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

static int is_log_apart(const options *o, const char *flag, const char *log) {
    int apart =
        !log || (is_apart(flag, log, "--data", o->data) && is_apart(flag, log, "", "/dev/stdout") &&
                 is_apart(flag, log, "", "/dev/stderr") && is_apart_from(flag, log, "--init-from", o->init_from, 0) &&
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

typedef struct job {
    options o;
    dataset data;
    needs stages[MAX_RANKS];
    int64_t parameters;           /* of the whole model */
    mt_gpt_desc origin;           /* the model of --init-from or --resume; zeros: there is none */
    FILE *log, *hash_log;         /* only rank 0 opens them */
    mt_status planned;            /* the status of --dry-run */
    char refusal[MT_ERROR_BYTES]; /* why the run does not begin; empty: it begins */
    int refused;                  /* 1: rank 0 has printed why the run does not begin */
} job;

enum { GROUPS = 5 };

typedef struct trainer {
    const struct job *job;
    mt_context *ctx;
    mt_comm *comm; /* all ranks, from mt_comm_create_for */
    mt_grid grid;
    mt_params *params;
    mt_gpt gpt;
    mt_optimizer optimizer;
    mt_loss_scaler scaler;     /* for f16; for other types the scale is always 1 */
    mt_graph *graph;           /* with --cuda-graph, from the second step on */
    int warm;                  /* 1: a step has run */
    mt_step numbers;           /* what changes from step to step, in memory of the device */
    mt_checkpoint *checkpoint; /* NULL without --checkpoint and --init-from */
    int64_t first_step;        /* 0, or with --resume the step of the checkpoint */
    mt_hash_log *hashes;       /* NULL without --hash-log */
    /* staging: one sequence, on the host; ids, targets: all sequences of this data rank in a step or in an evaluation,
       on the device */
    int32_t *staging, *ids, *targets;
    size_t device_bytes; /* of ids, targets, losses and totals together */
    mt_gpt_saved *saved; /* one for each slot */
    mt_action *actions;
    int slots, max_actions;
    mt_tensor losses, totals; /* losses [slots, tokens]; totals [micro-batches, 1]: the sum of each one's losses */
    int64_t micro_tokens;
    size_t model_bytes, optimizer_bytes;
    int refused;               /* 1: `refuse` was called, and rank 0 has printed why */
    int skipped;               /* number of skipped steps in a row without a smaller loss scale */
    mt_ledger ledgers[GROUPS]; /* of the last step */
} trainer;

static int rank_count(const options *o) { return (int)(o->tp * o->dp * o->pp); }
static int is_last_stage(const trainer *t) { return t->grid.pp_rank + 1 == t->grid.pp_size; }

/* Returns the desc of the model. What has no flag is as in `origin`, and so are, without --max-seq, the positions. */
static mt_gpt_desc model_of(const options *o, const mt_gpt_desc *origin) {
    int64_t positions = origin->max_seq > (int64_t)o->seq ? origin->max_seq : (int64_t)o->seq;
    mt_gpt_desc d = {.vocab = (int64_t)o->vocab,
                     .layers = (int64_t)o->layers,
                     .max_seq = o->max_seq > 0 ? (int64_t)o->max_seq : positions,
                     .layer = {.hidden = (int64_t)o->hidden,
                               .heads = (int64_t)o->heads,
                               .kv_heads = (int64_t)o->kv_heads,
                               .ffn = (int64_t)o->ffn,
                               .placement = origin->layer.placement,
                               .norm = o->rmsnorm ? MT_RMS_NORM : MT_LAYER_NORM,
                               .norm_eps = origin->layer.norm_eps,
                               .activation = (mt_activation)o->activation,
                               .mask = origin->layer.mask,
                               .rotary_base = !o->rotary                      ? 0.0f
                                              : origin->layer.rotary_base > 0 ? origin->layer.rotary_base
                                                                              : 10000.0f,
                               .attention_dropout = (float)o->dropout,
                               .hidden_dropout = (float)o->dropout,
                               .no_bias = origin->layer.no_bias,
                               .qkv_layout = origin->layer.qkv_layout,
                               .rotary_form = origin->layer.rotary_form,
                               .rotary_dim = origin->layer.rotary_dim,
                               .sequence_parallel = o->sequence_parallel,
                               .recompute = (mt_recompute)o->recompute},
                     .untied_head = o->untied,
                     .embedding_dropout = (float)o->dropout,
                     .label_smoothing = (float)o->label_smoothing};
    return d;
}

/* Allocates what the micro-batches of a training step and of an evaluation need. The number of micro-batches is at most
   the number of sequences. */
static mt_status create_slots(trainer *t) {
    const options *o = &t->job->o;
    int64_t per_rank = (int64_t)(o->batch / o->dp / o->micro_batch), totals = (int64_t)fmax(o->batch, EVAL_SEQUENCES);
    int64_t tokens = (int64_t)(ceil((double)totals / o->dp) * o->seq), losses;
    int count = 0;
    void *memory;
    t->max_actions = 6 * (int)totals;
    t->actions = (mt_action *)malloc((size_t)t->max_actions * sizeof *t->actions);
    if (!t->actions) return MT_ERR_MEMORY;
    MT_TRY(mt_pipeline_schedule((mt_schedule)o->schedule, t->grid.pp_size, t->grid.pp_rank, (int)per_rank, t->actions,
                                t->max_actions, &count));
    t->slots = mt_pipeline_slots(t->actions, count);
    t->saved = (mt_gpt_saved *)calloc((size_t)t->slots, sizeof *t->saved);
    if (!t->saved) return MT_ERR_MEMORY;
    for (int i = 0; i < t->slots; i++) MT_TRY(mt_gpt_saved_create(t->ctx, &t->gpt, &t->saved[i]));
    losses = t->slots * t->micro_tokens;
    t->device_bytes = (size_t)(2 * tokens + losses + totals) * 4;
    MT_TRY(mt_context_alloc(t->ctx, t->device_bytes, &memory));
    t->ids = (int32_t *)memory;
    t->targets = t->ids + tokens;
    t->losses = mt_tensor_f32((float *)memory + 2 * tokens, t->slots, t->micro_tokens);
    t->totals = mt_tensor_f32((float *)memory + 2 * tokens + losses, totals, 1);
    return MT_SUCCESS;
}

/* Returns 1 for a flag that may differ between ranks: it concerns only the rank's machine, or a log that only rank 0
   writes. Of --data the ranks compare the tokens, and of --config the flags that it sets. */
static int may_differ(const flag *f) {
    static const char *const names[] = {"config", "data", "log", "timeout", "no-pinning", "dry-run", "help"};
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
    if (f->kind == WHOLE || f->kind == REAL) {
        memcpy(&x, at, sizeof x);
        snprintf(text, VALUE_BYTES, f->kind == WHOLE ? "%.0f" : "%.9g", x);
        if (f->kind == REAL && strtod(text, NULL) != x) snprintf(text, VALUE_BYTES, "%.17g", x);
        return text;
    }
    memcpy(&i, at, sizeof i);
    return f->kind == SWITCH ? (i ? "given" : "not given") : choices[f->kind - DTYPE][i];
}

/* Compares the flags and the data of all ranks, because ranks that are processes have command lines of their own. */
static mt_status compare_ranks(const trainer *t) {
    const job *j = t->job;
    char names[FLAGS + 2][32], values[FLAGS + 2][VALUE_BYTES];
    mt_setting told[FLAGS + 2] = {{"the reason not to begin", j->refusal[0] ? j->refusal : "none"},
                                  {"--data", values[0]}};
    int n = 2;
    snprintf(values[0], VALUE_BYTES, "%lld tokens with hash %016llx", (long long)j->data.count,
             (unsigned long long)j->data.hash);
    for (int i = 0; i < FLAGS; i++) {
        if (may_differ(&flags[i])) continue;
        snprintf(names[n], sizeof names[n], "--%s", flags[i].name);
        told[n].name = names[n];
        told[n].value = value_of(&flags[i], &j->o, values[n]);
        n++;
    }
    return mt_comm_compare(t->ctx, t->comm, "train_gpt", 0, told, n);
}

/* Creates everything that a rank needs. device is MT_DEVICE_META for a plan. */
static mt_status trainer_create(mt_comm *world, const job *job, mt_device device, trainer *t) {
    const options *o = &job->o;
    mt_context_desc where = {.arena_bytes = job->stages[mt_comm_rank(world) / (int)(o->tp * o->dp)].arena,
                             .device = device,
                             .threads = (int)o->threads,
                             .invariant = (int)o->invariant,
                             .invariant_data = (int)o->invariant_data,
                             .ordinal = mt_comm_local_rank(world) % (int)fmax(1, mt_device_count(device)),
                             .planned = (mt_device)o->device};
    mt_grid_desc shape = {.tp = (int)o->tp, .dp = (int)o->dp, .pp = (int)o->pp};
    mt_gpt_desc model = model_of(o, &job->origin);
    mt_optimizer_desc adamw = {.beta2 = 0.95f, .weight_decay = (float)o->weight_decay};
    mt_loss_scaler_desc constant = {.initial_scale = 1, .growth = 1};
    mt_data_parallel_desc share = {.bucket_bytes = (size_t)(o->bucket_mb * 1e6),
                                   .sharded_optimizer = o->distributed_optimizer};
    mt_checkpoint_desc files = {.directory = o->checkpoint, .optimizer = &t->optimizer};
    t->job = job;
    t->micro_tokens = (int64_t)(o->micro_batch * o->seq);
    MT_TRY(mt_context_create(world, &where, &t->ctx));
    if (device != MT_DEVICE_META) MT_TRY(mt_comm_create_for(t->ctx, world, &t->comm));
    if (device != MT_DEVICE_META) MT_TRY(compare_ranks(t));
    MT_TRY(mt_grid_create(t->comm ? t->comm : world, &shape, &t->grid));
    MT_TRY(mt_params_create(t->ctx, &t->grid, &t->params));
    MT_TRY(mt_params_set_dtype(t->ctx, t->params, (mt_dtype)o->dtype));
    MT_TRY(mt_params_set_data_parallel(t->ctx, t->params, &share));
    MT_TRY(mt_gpt_create(t->ctx, t->params, &model, &t->gpt));
    MT_TRY(mt_params_init(t->ctx, t->params, (uint64_t)o->seed));
    t->model_bytes = mt_context_allocated(t->ctx);
    MT_TRY(mt_optimizer_create(t->ctx, t->params, &adamw, &t->optimizer));
    t->optimizer_bytes = mt_context_allocated(t->ctx) - t->model_bytes;
    MT_TRY(mt_loss_scaler_create(t->ctx, o->dtype == MT_F16 ? NULL : &constant, &t->scaler));
    MT_TRY(create_slots(t));
    if (o->hash_log) MT_TRY(mt_hash_log_create(t->ctx, &t->grid, &t->hashes));
    if (o->checkpoint || o->init_from)
        MT_TRY(mt_gpt_checkpoint_create(t->ctx, t->params, &t->gpt, &files, &t->checkpoint));
    if (device == MT_DEVICE_META) return MT_SUCCESS;
    t->staging = (int32_t *)malloc((size_t)o->seq * sizeof *t->staging);
    if (t->staging) return MT_SUCCESS;
    fprintf(stderr, "train_gpt: no memory for a sequence of %.15g tokens\n", o->seq);
    return MT_ERR_MEMORY;
}

static void trainer_destroy(trainer *t) {
    mt_checkpoint_destroy(t->ctx, t->checkpoint);
    mt_hash_log_destroy(t->hashes);
    mt_graph_destroy(t->ctx, t->graph);
    mt_step_destroy(t->ctx, &t->numbers);
    mt_context_free(t->ctx, t->ids, t->device_bytes);
    for (int i = 0; t->saved && i < t->slots; i++) mt_gpt_saved_destroy(&t->saved[i]);
    mt_optimizer_destroy(t->ctx, &t->optimizer);
    mt_params_destroy(t->params);
    mt_grid_destroy(&t->grid);
    mt_comm_destroy(t->comm);
    mt_context_destroy(t->ctx);
    free(t->saved);
    free(t->actions);
    free(t->staging);
}

/* A pass over sequences [first, end) of a training step, or of the `of` sequences of the validation set, in
   micro-batches of `micro` sequences. */
typedef struct pass {
    trainer *t;
    int64_t step, first, end, micro, of;
    int training;
} pass;

/* Copies seq tokens of the data, from number `start` on, to the device. */
static mt_status upload_tokens(trainer *t, int64_t start, int32_t *to) {
    int64_t seq = (int64_t)t->job->o.seq;
    for (int64_t i = 0; i < seq; i++) t->staging[i] = t->job->data.tokens[start + i];
    return mt_upload(t->ctx, t->staging, mt_tensor_make(to, MT_I32, 1, seq));
}

/* Loads the sequences of a pass. Every stage of a pipeline loads them. */
static mt_status load_sequences(const pass *p) {
    trainer *t = p->t;
    const options *o = &t->job->o;
    if (mt_context_device(t->ctx) == MT_DEVICE_META) return MT_SUCCESS;
    for (int64_t j = p->first; j < p->end; j++) {
        int64_t at = (j - p->first) * (int64_t)o->seq;
        int64_t start = p->training ? draw_start(o, &t->job->data, p->step, j) : eval_start(o, &t->job->data, j, p->of);
        MT_TRY(upload_tokens(t, start, t->ids + at));
        MT_TRY(upload_tokens(t, start + 1, t->targets + at));
    }
    return MT_SUCCESS;
}

/* Returns the rows of an activation on this rank. */
static int64_t rows_of(const options *o, int64_t sequences) {
    return sequences * (int64_t)o->seq / (o->sequence_parallel ? (int64_t)o->tp : 1);
}

/* The last micro-batch of an evaluation may have fewer rows than the tensors of the pipeline. */
static mt_tensor some_rows(mt_tensor t, int64_t rows) { return t.data ? mt_tensor_rows(t, 0, rows) : t; }

/* 1 / the number of tokens of a step, because the loss is their mean. mt_batch.loss_scale multiplies it. */
static float scale_of_loss(const trainer *t) { return (float)(1 / (t->job->o.batch * t->job->o.seq)); }

static mt_status forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    const pass *p = (const pass *)user;
    trainer *t = p->t;
    const options *o = &t->job->o;
    int64_t first = p->first + a->micro_batch * p->micro, count = p->end - first < p->micro ? p->end - first : p->micro;
    int64_t at = (first - p->first) * (int64_t)o->seq, rows = rows_of(o, count);
    mt_batch batch = {.sequences = count,
                      .seq = (int64_t)o->seq,
                      .first_sequence = first,
                      .seed = (uint64_t)o->seed,
                      .random_offset = mt_step_random_offset(&t->numbers),
                      .loss_scale = mt_step_loss_scale(&t->numbers),
                      .backward_scale = scale_of_loss(t)};
    mt_tensor loss = mt_tensor_cols(mt_tensor_rows(t->losses, a->slot, 1), 0, count * batch.seq);
    MT_TRY(mt_gpt_stage_forward(ctx, &t->gpt, &batch, t->ids + at, t->targets + at, some_rows(input, rows),
                                some_rows(output, rows), loss, p->training ? &t->saved[a->slot] : NULL));
    return is_last_stage(t) ? mt_sum(ctx, loss, mt_tensor_rows(t->totals, a->micro_batch, 1)) : MT_SUCCESS;
}

static mt_status backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    const pass *p = (const pass *)user;
    trainer *t = p->t;
    if (p->first + (a->micro_batch + 1) * p->micro >= p->end) MT_TRY(mt_sync_gradients_begin(ctx, t->params));
    MT_TRY(mt_gpt_stage_backward(ctx, &t->gpt, scale_of_loss(t), doutput, dinput, &t->saved[a->slot]));
    return mt_accumulate_gradients(ctx, t->params);
}

/* Returns the pass over this data rank's part of `sequences` sequences, in micro-batches of `micro`. */
static pass pass_of(trainer *t, int64_t step, int64_t sequences, int64_t micro, int training) {
    int64_t ranks = t->grid.dp_size, rank = t->grid.dp_rank;
    pass p = {t, step, sequences * rank / ranks, sequences * (rank + 1) / ranks, micro, sequences, training};
    return p;
}

/* Runs a pass. The first element of t->totals becomes the sum of the losses of the tokens of all data ranks. */
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
    MT_TRY(mt_tree_sum(t->ctx, mt_tensor_rows(t->totals, 0, n)));
    MT_TRY(mt_all_reduce(t->ctx, t->grid.dp, total, total, 1, MT_F32, MT_SUM));
    return mt_broadcast(t->ctx, t->grid.pp, total, total, 1, MT_F32, t->grid.pp_size - 1); /* by the last stage */
}

/* Returns the mean loss of a token of a pass. */
static float mean_loss(const pass *p, float total) { return total / (float)((double)p->of * p->t->job->o.seq); }

/* Returns communicator number i; NULL when this rank has no such group. */
static mt_comm *group(const trainer *t, int i) {
    mt_comm *const all[GROUPS] = {t->grid.tp, t->grid.dp, t->grid.pp, t->grid.model, t->grid.embedding};
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

static mt_status log_gradients(trainer *t, float loss, float norm) {
    if (!t->hashes) return MT_SUCCESS;
    MT_TRY(mt_hash_log_value(t->ctx, t->hashes, "loss", loss));
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
                "train_gpt: step %lld: loss %g, gradient norm %g is not finite: stopping after %d such steps in a row, "
                "the weights are untouched\n",
                (long long)step + 1, shown(loss), shown(norm), t->skipped);
    return MT_ERR_DATA;
}

/* What the device does in a training step. */
static mt_status device_step(pass *p) {
    trainer *t = p->t;
    ledgers_start(t);
    MT_TRY(mt_params_zero_grad(t->ctx, t->params));
    MT_TRY(run_pass(p));
    MT_TRY(mt_sync_gradients(t->ctx, t->params));
    MT_TRY(mt_step_update(t->ctx, &t->numbers, mt_tensor_rows(t->totals, 0, 1)));
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

static mt_status train_step(trainer *t, int64_t step, float lr, float *loss, float *norm) {
    const options *o = &t->job->o;
    pass p = pass_of(t, step, (int64_t)o->batch, (int64_t)o->micro_batch, 1);
    float scale = t->scaler.scale;
    mt_step_values values;
    MT_TRY(mt_step_begin(t->ctx, &t->numbers, lr, (uint64_t)step));
    MT_TRY(load_sequences(&p));
    MT_TRY(run_step(&p));
    MT_TRY(mt_step_read(t->ctx, &t->numbers, &values)); /* waits */
    *loss = mean_loss(&p, values.loss);
    *norm = values.norm;
    t->scaler = values.scaler;
    MT_TRY(log_gradients(t, *loss, *norm));
    if (values.adamw.skip) return skip_step(t, step, scale, *loss, *norm);
    t->skipped = 0;
    return log_weights(t, step);
}

/* Computes the validation loss. The micro-batch is a power of two, so that it divides the sequences of a data rank for
   every number of data ranks that is a power of two. */
static mt_status evaluate(trainer *t, float *loss) {
    const options *o = &t->job->o;
    int64_t most = (int64_t)fmin(o->micro_batch, EVAL_SEQUENCES / fmax(o->invariant_data, o->dp)), micro = 1;
    pass p;
    while (2 * micro <= most) micro *= 2;
    p = pass_of(t, 0, EVAL_SEQUENCES, micro, 0);
    MT_TRY(load_sequences(&p));
    MT_TRY(run_pass(&p));
    MT_TRY(mt_download(t->ctx, mt_tensor_rows(t->totals, 0, 1), loss));
    *loss = mean_loss(&p, *loss);
    return MT_SUCCESS;
}

/* ---- checkpoints ------------------------------------------------------------------------------------------------- */

enum { FIXED_LINES = 5 };

/* Writes a line for each flag that changes the bits of a run, except for those of the split, which may change, and
   those of the model, which the library compares. The first FIXED_LINES lines must be the same with --resume. */
static void note_flags(const job *j, char *note) {
    const options *o = &j->o;
    snprintf(note, MT_NOTE_MAX,
             "data of %lld tokens, hash %016llx\n--seq %.17g\n--batch %.17g\n--seed %.17g\n--dtype %s\n"
             "--steps %.17g\n--lr %.17g\n--min-lr %.17g\n--warmup %.17g\n--dropout %.17g\n--clip %.17g\n"
             "--weight-decay %.17g\n--label-smoothing %.17g\n",
             (long long)j->data.count, (unsigned long long)j->data.hash, o->seq, o->batch, o->seed,
             mt_dtype_name((mt_dtype)o->dtype), o->steps, o->lr, o->min_lr, o->warmup, o->dropout, o->clip,
             o->weight_decay, o->label_smoothing);
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
    fprintf(stderr, "train_gpt: ");
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

/* Removes the lines of steps after `step` from a log, and a last line that is not complete. A run that was killed has
   logged steps after its last checkpoint. */
static mt_status cut_log(const char *path, FILE *file, int64_t step) {
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    off_t end = 0;
    struct stat info;
    FILE *read;
    if (!file || fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode)) return MT_SUCCESS; /* e.g. a terminal */
    read = fopen(path, "r");
    while (read && (n = getline(&line, &room, read)) > 0 && line[n - 1] == '\n') {
        char *rest;
        long long of = strtoll(line, &rest, 10);
        if (rest != line && of > step) break;
        end += n;
    }
    free(line);
    if (read) fclose(read);
    if (read && ftruncate(fileno(file), end) == 0) return MT_SUCCESS;
    fprintf(stderr, "train_gpt: cannot shorten %s: %s\n", path, strerror(errno));
    return MT_ERR_IO;
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

/* Prepares the first step: opens checkpoints, and shortens the logs of a run that is resumed. */
static mt_status begin(trainer *t) {
    const options *o = &t->job->o;
    int64_t newest = -1;
    int speaks = mt_comm_rank(t->grid.world) == 0;
    mt_status status = open_checkpoints(t, &newest);
    /* when a file is wrong on one rank, all ranks have its error */
    if ((status == MT_ERR_IO || status == MT_ERR_DATA) && !t->refused) return refuse(t, "%s", mt_last_error(t->ctx));
    MT_TRY(status);
    if (!speaks || !o->resume) return MT_SUCCESS;
    if (newest >= 0) printf("going on after step %lld, from %s\n", (long long)newest, o->checkpoint);
    else printf("no checkpoint in %s: beginning with step 1\n", o->checkpoint);
    MT_TRY(cut_log(o->log, t->job->log, t->first_step));
    return cut_log(o->hash_log, t->job->hash_log, t->first_step);
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
    printf("GPT: %.15g layers, hidden %.15g, heads %.15g, vocabulary %.15g, %lld parameters in %s; %.15g x tensor, "
           "%.15g x data parallel%s",
           o->layers, o->hidden, o->heads, o->vocab, (long long)t->job->parameters, mt_dtype_name((mt_dtype)o->dtype),
           o->tp, o->dp, o->sequence_parallel ? ", sequence parallel" : "");
    if (o->pp > 1) printf("; %.15g pipeline stages, %s", o->pp, choices[SCHEDULE - DTYPE][o->schedule]);
    printf("\n");
    printf("data: %lld tokens, %.15g sequences of %.15g per step, GEMM: %s\n", (long long)t->job->data.count, o->batch,
           o->seq, o->device == MT_DEVICE_CUDA ? "cuBLASLt" : mt_gemm_library());
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
   validation. */
static void report(const trainer *t, progress *p, int64_t step, double seconds, float loss, float norm, float lr,
                   const float *val) {
    const options *o = &t->job->o;
    double time = now(), rate = o->batch * o->seq / seconds, done = (double)(step + 1);
    double left = (time - p->start) / (done - (double)t->first_step) * (o->steps - done);
    if (t->job->log) {
        fprintf(t->job->log, "%lld,%.9g,%.9g,%.9g,%.9g,", (long long)step + 1, shown(loss), shown(norm), rate,
                (double)lr);
        if (val) fprintf(t->job->log, "%.9g", shown(*val));
        fprintf(t->job->log, "\n");
    }
    if (step > t->first_step && done < o->steps && !val && time - p->last_print < 1.0) return;
    p->last_print = time;
    printf("step %5lld/%.15g  loss %7.4f  grad norm %7.3f  %8.0f tokens/s  %d:%02d left", (long long)step + 1, o->steps,
           shown(loss), shown(norm), rate, (int)(left / 60), (int)left % 60);
    if (o->dtype == MT_F16)
        printf("  loss scale %.15g, %lld skipped", (double)t->scaler.scale, (long long)t->scaler.skipped);
    if (val) printf("  validation %7.4f", shown(*val));
    printf("\n");
    fflush(stdout);
}

/* Draws token number n from softmax(logits / temperature). All ranks have the same logits, so they draw the same. */
static int32_t draw_token(const options *o, const float *logits, uint64_t n) {
    uint32_t counter[4] = {(uint32_t)n, (uint32_t)(n >> 32), 0x73616d70, 0}, key[2] = {(uint32_t)(uint64_t)o->seed, 0},
             r[4];
    int32_t vocab = (int32_t)o->vocab, i;
    double max = logits[0], sum = 0, u;
    mt_philox4x32(counter, key, r);
    for (i = 1; i < vocab; i++) max = fmax(max, logits[i]);
    for (i = 0; i < vocab; i++) sum += exp((logits[i] - max) / o->temperature);
    u = r[0] / 4294967296.0 * sum;
    for (i = 0; i < vocab - 1; i++)
        if ((u -= exp((logits[i] - max) / o->temperature)) < 0) break;
    return i;
}

static void print_token(const dataset *d, int32_t token) {
    if (!d->text) printf("%d ", (int)token);
    else if (token == '\n' || token == '\t' || (token >= ' ' && token < 127)) putchar(token);
    else printf("\\x%02x", (unsigned)token); /* a terminal should not see control characters */
}

/* Computes the logits of the token after history [count]. The sequence is padded: sequence parallelism needs a multiple
   of the tensor ranks, and invariant mode the same number of tokens on every split. */
static mt_status next_logits(trainer *t, const int32_t *history, int64_t count, float *logits) {
    const options *o = &t->job->o;
    int64_t unit = (int64_t)fmax(o->invariant, o->sequence_parallel ? o->tp : 1), max = (int64_t)o->seq;
    int32_t used = (int32_t)(count < max ? count : max);
    mt_batch batch = {.sequences = 1, .seq = (int64_t)fmin((double)((used + unit - 1) / unit * unit), (double)max)};
    mt_tensor ids, length, out;
    MT_TRY(mt_arena_tensor(t->ctx, MT_I32, 1, batch.seq, &ids));
    MT_TRY(mt_arena_tensor(t->ctx, MT_I32, 1, 1, &length));
    MT_TRY(mt_arena_tensor(t->ctx, MT_F32, 1, (int64_t)o->vocab, &out));
    MT_TRY(mt_upload(t->ctx, history + count - used, ids));
    MT_TRY(mt_upload(t->ctx, &used, length));
    batch.lengths = (const int32_t *)length.data;
    MT_TRY(mt_gpt_logits(t->ctx, &t->gpt, &batch, (const int32_t *)ids.data, out));
    return mt_download(t->ctx, out, logits);
}

/* Generates o->sample tokens after history [count]. Each takes a whole forward. */
static mt_status generate(trainer *t, int32_t *history, int64_t count, float *logits) {
    const options *o = &t->job->o;
    size_t mark = mt_arena_mark(t->ctx);
    if (mt_context_device(t->ctx) == MT_DEVICE_META) /* the longest history needs the most memory */
        return next_logits(t, history, count + (int64_t)o->sample - 1, logits);
    for (int64_t n = 0; n < (int64_t)o->sample; n++, count++) {
        MT_TRY(next_logits(t, history, count, logits));
        mt_arena_release(t->ctx, mark);
        history[count] = draw_token(o, logits, (uint64_t)n);
        if (mt_comm_rank(t->grid.world) == 0) print_token(&t->job->data, history[count]);
    }
    return MT_SUCCESS;
}

/* Generates o->sample tokens after --prompt or, without it, after the start of the validation text. Rank 0 prints. */
static mt_status sample(trainer *t) {
    const options *o = &t->job->o;
    const dataset *d = &t->job->data;
    int64_t prompt =
        o->prompt && o->prompt[0] && d->text ? (int64_t)strlen(o->prompt) : (int64_t)(o->seq < 64 ? o->seq : 64);
    int speaks = mt_comm_rank(t->grid.world) == 0 && mt_context_device(t->ctx) != MT_DEVICE_META;
    int32_t *history;
    float *logits;
    mt_status status;
    if (o->sample == 0 || t->grid.dp_rank != 0) return MT_SUCCESS;
    /* next_logits also reads padding after the last token */
    history =
        (int32_t *)calloc((size_t)(prompt + (int64_t)fmax(o->tp, o->invariant) + (int64_t)o->sample), sizeof *history);
    logits = (float *)malloc((size_t)o->vocab * sizeof *logits);
    for (int64_t i = 0; history && i < prompt; i++)
        history[i] = o->prompt && o->prompt[0] && d->text ? (unsigned char)o->prompt[i] : d->tokens[d->train + i];
    if (speaks) {
        printf("continuation of ");
        for (int64_t i = 0; history && i < prompt; i++) print_token(d, history[i]);
        printf("\n---\n");
    }
    status = history && logits ? generate(t, history, prompt, logits) : MT_ERR_MEMORY;
    if (speaks) printf("\n---\n");
    free(history);
    free(logits);
    return status;
}

/* ---- the job ----------------------------------------------------------------------------------------------------- */

static mt_status start_steps(trainer *t) {
    return mt_step_create(t->ctx, &t->optimizer, &t->scaler, (float)t->job->o.clip, &t->numbers);
}

static mt_status train(trainer *t) {
    const options *o = &t->job->o;
    int speaks = mt_comm_rank(t->grid.world) == 0;
    progress p = {now(), 0};
    if (speaks) print_model(t);
    MT_TRY(begin(t));
    MT_TRY(start_steps(t));
    for (int64_t step = t->first_step; step < (int64_t)o->steps; step++) {
        float lr = mt_cosine_schedule(step, (int64_t)o->warmup, (int64_t)o->steps, (float)o->lr, (float)o->min_lr);
        int evaluates = o->eval_interval > 0 && (step + 1) % (int64_t)o->eval_interval == 0;
        int saves =
            step + 1 == (int64_t)o->steps || (o->save_interval > 0 && (step + 1) % (int64_t)o->save_interval == 0);
        float loss, norm, val = 0;
        double start = now();
        MT_TRY(train_step(t, step, lr, &loss, &norm));
        double seconds = now() - start;
        if (evaluates) MT_TRY(evaluate(t, &val));
        if (speaks) report(t, &p, step, seconds, loss, norm, lr, evaluates ? &val : NULL);
        if (saves) MT_TRY(save(t, step + 1));
    }
    if (speaks) print_ledgers(t);
    return sample(t);
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

/* Runs one step of a stage on the meta device, which computes nothing, to measure the memory that a rank needs. */
static mt_status plan_stage(job *job, int stage, trainer *t) {
    needs *n = &job->stages[stage];
    float loss = 0, norm = 0;
    MT_TRY(start_steps(t));
    MT_TRY(train_step(t, 0, 0.0f, &loss, &norm));
    *n = (needs){.parameters = mt_params_elements(t->params),
                 .model = t->model_bytes,
                 .optimizer = t->optimizer_bytes,
                 .activations = mt_arena_peak(t->ctx),
                 .all = mt_context_allocated(t->ctx) + mt_arena_peak(t->ctx)};
    job->parameters += stage_parameters(t);
    MT_TRY(evaluate(t, &loss));
    MT_TRY(sample(t));
    MT_TRY(save(t, 0));
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

/* Plans all stages, from the last to the first. When speaks is 1, prints the plan after the first stage. */
static mt_status plan(job *job, int speaks) {
    mt_status status = MT_SUCCESS;
    for (int stage = (int)job->o.pp; status == MT_SUCCESS && stage-- > 0;) {
        trainer t;
        mt_comm *world = NULL;
        memset(&t, 0, sizeof t);
        status = mt_comm_create_meta(rank_count(&job->o), stage * (int)(job->o.tp * job->o.dp), &world);
        if (status == MT_SUCCESS) status = trainer_create(world, job, MT_DEVICE_META, &t);
        if (status == MT_SUCCESS) status = plan_stage(job, stage, &t);
        if (status != MT_SUCCESS)
            refuse_later(job, "%s: %s", mt_status_name(status), world ? mt_comm_last_error(world) : "");
        if (status == MT_SUCCESS && stage == 0 && speaks) {
            print_model(&t);
            print_memory(job);
            print_ledgers(&t);
        }
        trainer_destroy(&t);
        mt_comm_destroy(world);
    }
    return status;
}

/* Opens a file. When path is NULL, *out is NULL. Returns 0 after an error. */
static int open_file(const char *path, const char *mode, FILE **out) {
    *out = path ? fopen(path, mode) : NULL;
    if (path && !*out) fprintf(stderr, "train_gpt: cannot write %s: %s\n", path, strerror(errno));
    return !path || *out;
}

/* Closes a file, which may be NULL. Returns 0 when something could not be written. */
static int close_file(const char *path, FILE *file) {
    int failed = file && ferror(file);
    if (file && fclose(file) != 0) failed = 1;
    if (failed) fprintf(stderr, "train_gpt: cannot write %s: %s\n", path, strerror(errno));
    return !failed;
}

static mt_status open_logs(job *job) {
    const char *mode = job->o.resume ? "a" : "w";
    if (!open_file(job->o.log, mode, &job->log) || !open_file(job->o.hash_log, mode, &job->hash_log)) return MT_ERR_IO;
    if (!job->log || fseek(job->log, 0, SEEK_END) != 0 || ftell(job->log) > 0) return MT_SUCCESS;
    fprintf(job->log, "step,loss,grad_norm,tokens_per_s,lr,val_loss\n");
    fflush(job->log); /* cut_log reads the file */
    return MT_SUCCESS;
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
    if (status == MT_SUCCESS && mt_comm_rank(world) == 0) status = open_logs(j); /* only rank 0 uses them */
    if (status == MT_SUCCESS) status = train(&t);
    if (t.refused) __atomic_store_n(&j->refused, 1, __ATOMIC_RELAXED);
    if (t.refused) status = MT_SUCCESS; /* rank 0 has printed why: the launcher must not report it again */
    trainer_destroy(&t);
    return status;
}

/* Rank 0 plans alone, because a plan needs no communication. It has printed its errors, so every rank succeeds. */
static mt_status dry_run(mt_comm *world, void *user) {
    job *j = (job *)user;
    if (mt_comm_rank(world) != 0) return MT_SUCCESS;
    j->planned = j->refusal[0] ? MT_ERR_ARGUMENT : plan(j, 1);
    if (j->refusal[0]) fprintf(stderr, "train_gpt: %s\n", j->refusal);
    return MT_SUCCESS;
}

/* mt_launch calls this function when a rank's thread is stuck, for instance in a file system. The thread may hold the
   lock of the log, so the log is flushed only when the lock is free. */
static void leave(void *user) {
    FILE *log = ((job *)user)->log;
    if (log && ftrylockfile(log) == 0) fflush(log);
    _exit(1);
}

/* ---- the model of a checkpoint: flags that are not given take its shape ------------------------------------------ */

/* `theirs` is of the model in `from`, with the plural of what it counts. A flag of 0 is as if it was not given. */
static void take_number(job *job, const char *from, const char *name, int64_t theirs, const char *plural) {
    const flag *f = flag_of(name);
    double ours, their = (double)theirs;
    memcpy(&ours, field(f, &job->o), sizeof ours);
    if (*given(&job->o, f) && ours != 0 && ours != their)
        refuse_later(job, "--%s is %.15g, the model in %s has %lld %s", name, ours, from, (long long)theirs, plural);
    memcpy(field(f, &job->o), &their, sizeof their);
}

/* `otherwise` is what a model without the switch has. */
static void take_switch(job *job, const char *from, const char *name, int theirs, const char *otherwise) {
    const flag *f = flag_of(name);
    if (*given(&job->o, f) && !theirs)
        refuse_later(job, "--%s is given, the model in %s has %s", name, from, otherwise);
    memcpy(field(f, &job->o), &theirs, sizeof theirs);
}

/* The positions of a model with rotary are not fixed. */
static void take_positions(job *job, const char *from) {
    options *o = &job->o;
    int64_t positions = job->origin.max_seq;
    if (o->rotary) return;
    if (o->max_seq > 0 && o->max_seq != (double)positions)
        refuse_later(job, "--max-seq is %.15g, the model in %s has %lld positions", o->max_seq, from,
                     (long long)positions);
    if (*given(o, flag_of("seq")) && o->seq > (double)positions)
        refuse_later(job, "--seq is %.15g, the model in %s has %lld positions", o->seq, from, (long long)positions);
    o->seq = fmin(o->seq, (double)positions);
}

static void take_shape(job *job, const char *from) {
    const mt_gpt_desc *d = &job->origin;
    const mt_transformer_layer_desc *l = &d->layer;
    int ours = job->o.activation;
    take_number(job, from, "layers", d->layers, "layers");
    take_number(job, from, "hidden", l->hidden, "hidden features");
    take_number(job, from, "heads", l->heads, "heads");
    take_number(job, from, "kv-heads", l->kv_heads, "key/value heads");
    take_number(job, from, "ffn", l->ffn, "features in its MLP");
    take_number(job, from, "vocab", d->vocab, "tokens in its vocabulary");
    take_switch(job, from, "rotary", l->rotary_base > 0, "learned positions");
    take_switch(job, from, "rmsnorm", l->norm == MT_RMS_NORM, "layer normalisation");
    take_switch(job, from, "untied", d->untied_head, "an output head that is its embedding");
    take_positions(job, from);
    if (*given(&job->o, flag_of("activation")) && ours != (int)l->activation)
        refuse_later(job, "--activation is %s, the model in %s has %s", choices[ACTIVATION - DTYPE][ours], from,
                     choices[ACTIVATION - DTYPE][l->activation]);
    job->o.activation = (int)l->activation;
}

/* Reads the desc of the model that this run begins with. */
static mt_status find_origin(job *job) {
    const options *o = &job->o;
    const char *from = o->init_from;
    char path[MT_PATH_MAX];
    int64_t step = -1;
    mt_context *ctx = NULL;
    mt_context_desc small = {.arena_bytes = 64};
    mt_status status = mt_context_create(NULL, &small, &ctx);
    if (status == MT_SUCCESS && o->resume && o->checkpoint &&
        mt_checkpoint_latest(ctx, NULL, o->checkpoint, &step) == MT_SUCCESS && step >= 0 &&
        mt_checkpoint_path(ctx, o->checkpoint, step, path, sizeof path) == MT_SUCCESS)
        from = path;
    if (status == MT_SUCCESS && from) {
        if (mt_gpt_desc_read(ctx, from, &job->origin) == MT_SUCCESS) take_shape(job, from);
        else refuse_later(job, "%s", mt_last_error(ctx));
    }
    mt_context_destroy(ctx);
    return status;
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

int main(int argc, char **argv) {
    job job = {.o = {.tp = 2,
                     .dp = 1,
                     .pp = 1,
                     .layers = 4,
                     .hidden = 128,
                     .heads = 4,
                     .seq = 128,
                     .batch = 16,
                     .steps = 800,
                     .warmup = 20,
                     .seed = 1234,
                     .eval_interval = 100,
                     .sample = 300,
                     .threads = 1,
                     .lr = 3e-3,
                     .min_lr = 3e-4,
                     .clip = 1,
                     .weight_decay = 0.1,
                     .temperature = 0.7,
                     .timeout = 600}};
    mt_status status = MT_ERR_ARGUMENT;
    setlocale(LC_NUMERIC, "C"); /* flags, logs and notes have a decimal point in every locale */
    if (!parse_options(argc, argv, &job.o)) return 1;
    if (job.o.help) {
        print_help(&job.o);
        return 0;
    }
    if (check_logs(&job.o) && find_origin(&job) == MT_SUCCESS && load_data(&job.o, &job.data) &&
        check_options(&job.o, job.data.count, job.data.text))
        status = run(&job);
    if (!close_file(job.o.log, job.log)) status = MT_ERR_IO;
    if (!close_file(job.o.hash_log, job.hash_log)) status = MT_ERR_IO;
    free(job.data.tokens);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "train_gpt: cannot write the results: %s\n", strerror(errno));
        status = MT_ERR_IO;
    }
    return status == MT_SUCCESS ? 0 : 1;
}
