/* train_gpt - trains a GPT with tensor x data parallel ranks on a text file.

   cc -O3 -march=native -I. examples/train_gpt.c -o train_gpt -lm -lpthread
   cc -O3 -march=native -I. -DMT_USE_ONEDNN examples/train_gpt.c -o train_gpt -ldnnl -lm -lpthread
   nvcc -O3 -I. -x cu examples/train_gpt.c -o train_gpt -lcublasLt             (add -DMT_USE_NCCL -lnccl for several GPUs)

   ./train_gpt                      the defaults: 2-way tensor parallel, about a minute on two cores, on this project's own
                                    headers and README (run it from the checkout's root)
   ./train_gpt --data FILE --tp 4 --dp 2 --steps 1000
   ./train_gpt --device cuda --dtype bf16      on GPUs: rank r on GPU r, or shared when there are more ranks than GPUs
   ./train_gpt --help               all flags

   FILE is any text (a token is a byte), or a token file of llm.c (.bin: a header of 1024 bytes, then uint16 tokens).
   Results go to stdout, errors to stderr. The loss does not depend on --tp, --dp, --micro-batch or --sequence-parallel, to
   rounding; with --invariant 8 it does not to the last bit, and --hash-log FILE shows where two runs part. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <errno.h>
#include <getopt.h>
#include <time.h>

#define GPT2_VOCAB 50257
#define LLMC_MAGIC 20240520
#define LLMC_HEADER_BYTES 1024
#define EVAL_SEQUENCES 32

/* ---- options: one table for parsing, ranges and --help ------------------------------------------------------------- */

typedef struct options {
    const char *data, *log, *hash_log, *prompt;
    double tp, dp, layers, hidden, heads, kv_heads, ffn, seq, batch, micro_batch, steps, warmup, seed, eval_interval;
    double sample, vocab, threads, invariant, invariant_data, lr, min_lr, dropout, clip, weight_decay, label_smoothing;
    double temperature, timeout;
    int dtype, device, sequence_parallel, no_pinning, rotary, swiglu, rmsnorm, untied, dry_run, help;
} options;

enum { TEXT, WHOLE, REAL, SWITCH, DTYPE, DEVICE };

/* The words of mt_dtype and mt_device that can be chosen, in their order. */
static const char *const choices[][3] = {{"f32", "bf16", "f16"}, {"cpu", "cuda", NULL}};

typedef struct flag {
    const char *name;
    int kind;
    size_t offset;
    double low, high; /* allowed range, inclusive */
    const char *help;
} flag;

#define AT(field) offsetof(options, field)
static const flag flags[] = {
    {"data", TEXT, AT(data), 0, 0, "FILE to train on; default: this project's headers and README"},
    {"device", DEVICE, AT(device), 0, 1, "cpu or cuda"},
    {"dtype", DTYPE, AT(dtype), 0, 2, "f32, bf16 or f16, of weights and activations; f16 scales the loss"},
    {"tp", WHOLE, AT(tp), 1, 1024, "tensor parallel ranks"},
    {"dp", WHOLE, AT(dp), 1, 1024, "data parallel ranks"},
    {"layers", WHOLE, AT(layers), 1, 1024, "transformer layers"},
    {"hidden", WHOLE, AT(hidden), 1, 65536, "hidden size"},
    {"heads", WHOLE, AT(heads), 1, 1024, "attention heads"},
    {"kv-heads", WHOLE, AT(kv_heads), 0, 1024, "key/value heads (0: as heads)"},
    {"ffn", WHOLE, AT(ffn), 0, 1 << 20, "inner width of the MLP (0: 4 x hidden)"},
    {"seq", WHOLE, AT(seq), 1, 1 << 20, "tokens per sequence"},
    {"batch", WHOLE, AT(batch), 1, 1 << 20, "sequences per step, over all ranks"},
    {"micro-batch", WHOLE, AT(micro_batch), 0, 1 << 20, "sequences per forward on a rank (0: all of the rank's)"},
    {"invariant", WHOLE, AT(invariant), 0, 1024, "same bits on every split up to so many tensor ranks (0: off)"},
    {"invariant-data", WHOLE, AT(invariant_data), 0, 1024, "and up to so many data ranks (0: as --invariant)"},
    {"steps", WHOLE, AT(steps), 1, 1e9, "optimizer steps"},
    {"lr", REAL, AT(lr), 0, 1e3, "peak learning rate"},
    {"min-lr", REAL, AT(min_lr), 0, 1e3, "learning rate at the end of the cosine"},
    {"warmup", WHOLE, AT(warmup), 0, 1e9, "steps of linear warm-up"},
    {"seed", WHOLE, AT(seed), 0, 9e15, "of weights, batches and dropout"},
    {"dropout", REAL, AT(dropout), 0, 0.999, "of embedding, attention and residuals"},
    {"clip", REAL, AT(clip), 0, 1e9, "gradient norm to clip to (0: off)"},
    {"weight-decay", REAL, AT(weight_decay), 0, 1e3, "AdamW, on matrices only"},
    {"label-smoothing", REAL, AT(label_smoothing), 0, 0.999, "of the loss"},
    {"vocab", WHOLE, AT(vocab), 0, 1 << 20, "vocabulary (0: 256 for text, 50257 for .bin)"},
    {"eval-interval", WHOLE, AT(eval_interval), 0, 1e9, "steps between validation losses (0: never)"},
    {"sample", WHOLE, AT(sample), 0, 1 << 20, "tokens to generate at the end"},
    {"prompt", TEXT, AT(prompt), 0, 0, "TEXT to continue; default: from the validation text"},
    {"temperature", REAL, AT(temperature), 1e-3, 100, "of the sampling"},
    {"log", TEXT, AT(log), 0, 0, "FILE.csv to write step,loss,grad_norm,tokens_per_s,lr,val_loss to"},
    {"hash-log", TEXT, AT(hash_log), 0, 0, "FILE to write step, tensor, hash to, for every tensor of every step"},
    {"threads", WHOLE, AT(threads), 1, 1024, "of the GEMM library on each rank"},
    {"timeout", REAL, AT(timeout), 1e-3, 1e6, "seconds a collective waits for a rank"},
    {"sequence-parallel", SWITCH, AT(sequence_parallel), 0, 1, "split tokens outside the tensor parallel regions"},
    {"no-pinning", SWITCH, AT(no_pinning), 0, 1, "let ranks move between cores, for a machine that others use too"},
    {"rotary", SWITCH, AT(rotary), 0, 1, "rotary instead of learned positions"},
    {"swiglu", SWITCH, AT(swiglu), 0, 1, "SwiGLU instead of GeLU"},
    {"rmsnorm", SWITCH, AT(rmsnorm), 0, 1, "RMSNorm instead of layer normalisation"},
    {"untied", SWITCH, AT(untied), 0, 1, "an output head of its own"},
    {"dry-run", SWITCH, AT(dry_run), 0, 1, "print parameters, bytes and collectives per rank, train nothing"},
    {"help", SWITCH, AT(help), 0, 1, "this text"},
};
#define FLAGS (int)(sizeof flags / sizeof *flags)

static void *field(const flag *f, options *o) { return (char *)o + f->offset; }

static int parse_choice(const flag *f, const char *text, options *o) {
    for (int i = 0; i <= (int)f->high; i++) {
        if (strcmp(text, choices[f->kind - DTYPE][i]) != 0) continue;
        memcpy(field(f, o), &i, sizeof i);
        return 1;
    }
    fprintf(stderr, "train_gpt: --%s %s: expected %s\n", f->name, text, f->help);
    return 0;
}

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
        fprintf(stderr, "train_gpt: --%s %s: expected %s from %g to %g\n", f->name, text,
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
        printf("  --%-18s %s", f->name, f->help);
        if (f->kind == WHOLE || f->kind == REAL) printf(" (default %g)", x);
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
        if (f->kind == SWITCH) memcpy(field(f, o), &on, sizeof on);
        else if (!parse_value(f, optarg, o)) return 0;
    }
    if (c != -1) return 0; /* getopt_long has said what is wrong */
    if (optind < argc) fprintf(stderr, "train_gpt: what is '%s'? Flags start with --, see --help\n", argv[optind]);
    return optind >= argc;
}

/* What the library cannot know: how the job is cut into batches. It checks the model itself. */
static int check_options(options *o, int64_t tokens, int text) {
    double per_rank = o->batch / o->dp;
    int chosen = o->invariant > 0 && o->micro_batch > 0;
    if (o->invariant > 0 && o->invariant_data == 0) o->invariant_data = o->invariant;
    if (o->invariant > 0) o->micro_batch = (double)mt_invariant_micro_batch((int)o->invariant_data, (int64_t)o->batch);
    if (o->micro_batch == 0) o->micro_batch = per_rank;
    if (chosen) fprintf(stderr, "train_gpt: --invariant chooses the micro-batch, leave --micro-batch out\n");
    else if (per_rank != floor(per_rank))
        fprintf(stderr, "train_gpt: --batch %g is not a multiple of --dp %g\n", o->batch, o->dp);
    else if (fmod(per_rank, o->micro_batch) != 0 && o->invariant > 0)
        fprintf(stderr, "train_gpt: --invariant-data %g makes %g micro-batches of --batch %g, which --dp %g cannot share\n",
                o->invariant_data, o->batch / o->micro_batch, o->batch, o->dp);
    else if (fmod(per_rank, o->micro_batch) != 0)
        fprintf(stderr, "train_gpt: the %g sequences of a rank (--batch / --dp) are not a multiple of --micro-batch %g\n",
                per_rank, o->micro_batch);
    else if (o->sequence_parallel && fmod(o->seq, o->tp) != 0)
        fprintf(stderr, "train_gpt: --seq %g is not a multiple of --tp %g, which --sequence-parallel needs\n", o->seq, o->tp);
    else if (o->tp * o->dp > 1024)
        fprintf(stderr, "train_gpt: --tp %g x --dp %g are more than 1024 ranks\n", o->tp, o->dp);
    else if (o->prompt && !text)
        fprintf(stderr, "train_gpt: --prompt %s needs text; a token file has no letters\n", o->prompt);
    else if ((double)tokens < 4 * o->seq + 8)
        fprintf(stderr, "train_gpt: the data has %lld tokens, too few for --seq %g (needs %g)\n", (long long)tokens, o->seq,
                4 * o->seq + 8);
    else return 1;
    return 0;
}

/* ---- data ---------------------------------------------------------------------------------------------------------- */

typedef struct dataset {
    int32_t *tokens;
    int64_t count, train; /* the first `train` tokens are for training, the rest for validation */
    int text;             /* a token is a byte */
} dataset;

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

/* Token t of the file: a byte, or a little-endian uint16 behind llm.c's header. */
static int32_t token_at(const unsigned char *bytes, int text, int64_t t) {
    const unsigned char *p = bytes + LLMC_HEADER_BYTES + 2 * t;
    return text ? bytes[t] : p[0] | p[1] << 8;
}

static int check_bin(const char *path, const unsigned char *bytes, size_t size, int64_t *count) {
    int32_t header[3] = {0};
    if (size >= LLMC_HEADER_BYTES) memcpy(header, bytes, sizeof header);
    if (header[0] != LLMC_MAGIC || header[1] != 1) {
        fprintf(stderr, "train_gpt: %s is no llm.c token file: magic %d, version %d; expected %d, 1 (uint16 tokens)\n", path,
                (int)header[0], (int)header[1], LLMC_MAGIC);
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

static int load_data(options *o, dataset *d) {
    static const char *const own[] = {"megatron.h", "mt_parallel.h", "mt_kernels.cuh", "mt_comm.h", "README.md"};
    unsigned char *bytes = NULL;
    size_t size = 0, length = o->data ? strlen(o->data) : 0;
    int ok = 1;
    d->text = !(length > 4 && strcmp(o->data + length - 4, ".bin") == 0);
    for (size_t i = 0; ok && i < (o->data ? 1 : sizeof own / sizeof *own); i++)
        ok = read_file(o->data ? o->data : own[i], &bytes, &size);
    d->count = (int64_t)size;
    ok = ok && (d->text || check_bin(o->data, bytes, size, &d->count));
    d->tokens = ok ? (int32_t *)malloc((size_t)(d->count + 1) * sizeof *d->tokens) : NULL;
    if (ok && !d->tokens) fprintf(stderr, "train_gpt: no memory for %lld tokens\n", (long long)d->count);
    for (int64_t i = 0; d->tokens && i < d->count; i++) d->tokens[i] = token_at(bytes, d->text, i);
    free(bytes);
    d->train = d->count - (int64_t)fmax((double)d->count / 10, o->seq + 1); /* at least one sequence for validation */
    if (o->vocab == 0) o->vocab = d->text ? 256 : GPT2_VOCAB;
    return d->tokens != NULL;
}

/* Where sequence i of a step starts: drawn by its global index, so every split trains on the same sequences. */
static int64_t draw_start(const options *o, const dataset *d, int64_t step, int64_t i) {
    uint64_t n = (uint64_t)(step * (int64_t)o->batch + i), seed = (uint64_t)o->seed;
    uint32_t counter[4] = {(uint32_t)n, (uint32_t)(n >> 32), 0x64617461, 0}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t r[4];
    mt_philox4x32(counter, key, r);
    return (int64_t)(((uint64_t)r[0] << 32 | r[1]) % (uint64_t)(d->train - (int64_t)o->seq));
}

/* Validation sequences are spread evenly over the validation part. */
static int64_t eval_start(const options *o, const dataset *d, int64_t i, int64_t count) {
    return d->train + (d->count - d->train - (int64_t)o->seq - 1) * i / (count > 1 ? count - 1 : 1);
}

/* ---- one rank ------------------------------------------------------------------------------------------------------ */

typedef struct job {
    options o;
    dataset data;
    size_t arena_bytes;
    FILE *log, *hash_log;
} job;

typedef struct trainer {
    const struct job *job;
    mt_context *ctx;
    mt_comm *comm;                    /* of all ranks: over NCCL, if it is built, when each has a GPU of its own */
    mt_grid grid;
    mt_params *params;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer optimizer;
    mt_loss_scaler scaler;            /* of f16; of the others it is and stays 1 */
    mt_hash_log *hashes;              /* NULL without --hash-log */
    int64_t *starts;                  /* of a micro-batch's sequences in the data */
    int32_t *staging, *ids, *targets; /* one micro-batch: host, device, device */
    mt_tensor loss, totals;           /* [1, tokens] of a micro-batch; [micro-batches, 1] their sums */
    int64_t micro_tokens;
    mt_ledger ledgers[3];             /* of the last step: tensor, data, model group */
} trainer;

static mt_gpt_desc model_of(const options *o) {
    mt_gpt_desc d = {
        .vocab = (int64_t)o->vocab, .layers = (int64_t)o->layers, .max_seq = (int64_t)o->seq,
        .layer = {.hidden = (int64_t)o->hidden, .heads = (int64_t)o->heads, .kv_heads = (int64_t)o->kv_heads,
                  .ffn = (int64_t)o->ffn, .norm = o->rmsnorm ? MT_RMS_NORM : MT_LAYER_NORM,
                  .activation = o->swiglu ? MT_SWIGLU : MT_GELU_TANH, .rotary_base = o->rotary ? 10000.0f : 0.0f,
                  .attention_dropout = (float)o->dropout, .hidden_dropout = (float)o->dropout,
                  .sequence_parallel = o->sequence_parallel},
        .untied_head = o->untied, .embedding_dropout = (float)o->dropout, .label_smoothing = (float)o->label_smoothing};
    return d;
}

static mt_status trainer_create(mt_comm *world, const job *job, mt_device device, trainer *t) {
    const options *o = &job->o;
    mt_context_desc where = {.arena_bytes = job->arena_bytes, .device = device, .threads = (int)o->threads,
                             .invariant = (int)o->invariant, .invariant_data = (int)o->invariant_data,
                             .ordinal = mt_comm_rank(world) % (int)fmax(1, mt_device_count(device)),
                             .planned = (mt_device)o->device};
    int64_t totals = (int64_t)fmax(o->batch, EVAL_SEQUENCES);
    mt_grid_desc shape = {.tensor = (int)o->tp, .data = (int)o->dp};
    mt_gpt_desc model = model_of(o);
    mt_optimizer_desc adamw = {.beta2 = 0.95f, .weight_decay = (float)o->weight_decay};
    mt_loss_scaler_desc constant = {.initial_scale = 1, .growth = 1};
    void *memory;
    t->job = job;
    t->micro_tokens = (int64_t)(o->micro_batch * o->seq);
    MT_TRY(mt_context_create(world, &where, &t->ctx));
    if (device != MT_DEVICE_META) MT_TRY(mt_comm_create_for(t->ctx, world, &t->comm));
    MT_TRY(mt_grid_create(t->comm ? t->comm : world, &shape, &t->grid));
    MT_TRY(mt_params_create(t->ctx, &t->grid, &t->params));
    MT_TRY(mt_params_set_dtype(t->ctx, t->params, (mt_dtype)o->dtype));
    MT_TRY(mt_gpt_create(t->ctx, t->params, &model, &t->gpt));
    MT_TRY(mt_params_init(t->ctx, t->params, (uint64_t)o->seed));
    MT_TRY(mt_optimizer_create(t->ctx, t->params, &adamw, &t->optimizer));
    MT_TRY(mt_loss_scaler_create(t->ctx, o->dtype == MT_F16 ? NULL : &constant, &t->scaler));
    MT_TRY(mt_gpt_saved_create(t->ctx, &t->gpt, &t->saved));
    MT_TRY(mt_context_alloc(t->ctx, (size_t)(3 * t->micro_tokens + totals) * 4, &memory));
    t->ids = (int32_t *)memory;
    t->targets = t->ids + t->micro_tokens;
    t->loss = mt_tensor_f32((float *)memory + 2 * t->micro_tokens, 1, t->micro_tokens);
    t->totals = mt_tensor_f32((float *)memory + 3 * t->micro_tokens, totals, 1);
    if (o->hash_log) MT_TRY(mt_hash_log_create(t->ctx, &t->grid, &t->hashes));
    if (device == MT_DEVICE_META) return MT_SUCCESS;
    t->starts = (int64_t *)malloc((size_t)o->micro_batch * sizeof *t->starts);
    t->staging = (int32_t *)malloc((size_t)t->micro_tokens * sizeof *t->staging);
    if (t->starts && t->staging) return MT_SUCCESS;
    fprintf(stderr, "train_gpt: no memory for a micro-batch of %lld tokens\n", (long long)t->micro_tokens);
    return MT_ERR_MEMORY;
}

static void trainer_destroy(trainer *t) {
    mt_hash_log_destroy(t->hashes);
    mt_context_free(t->ctx, t->ids, (size_t)(3 * t->micro_tokens + t->totals.rows) * 4);
    mt_gpt_saved_destroy(&t->saved);
    mt_optimizer_destroy(t->ctx, &t->optimizer);
    mt_params_destroy(t->params);
    mt_grid_destroy(&t->grid);
    mt_comm_destroy(t->comm);
    mt_context_destroy(t->ctx);
    free(t->starts);
    free(t->staging);
}

/* Copies tokens [start + shift, + seq) of a micro-batch's sequences to the device. */
static mt_status upload_tokens(trainer *t, int64_t sequences, int shift, int32_t *to) {
    int64_t seq = (int64_t)t->job->o.seq, tokens = sequences * seq;
    for (int64_t i = 0; i < tokens; i++) t->staging[i] = t->job->data.tokens[t->starts[i / seq] + shift + i % seq];
    return mt_upload(t->ctx, t->staging, mt_tensor_make(to, MT_I32, 1, tokens));
}

/* Sequences [first, first + count) of a step (training) or of the validation set, of which there are `of`. */
static mt_status load_batch(trainer *t, int64_t step, int64_t first, int64_t count, int64_t of, int training) {
    const options *o = &t->job->o;
    if (mt_context_device(t->ctx) == MT_DEVICE_META) return MT_SUCCESS;
    for (int64_t j = 0; j < count; j++)
        t->starts[j] = training ? draw_start(o, &t->job->data, step, first + j) : eval_start(o, &t->job->data, first + j, of);
    MT_TRY(upload_tokens(t, count, 0, t->ids));
    return upload_tokens(t, count, 1, t->targets);
}

/* Forward, and backward when training, of `micro` sequences from `first` on; *total is the sum of their losses. */
static mt_status run_micro_batch(trainer *t, int64_t step, int64_t first, int64_t micro, int64_t of, int training,
                                 mt_tensor total) {
    const options *o = &t->job->o;
    mt_batch batch = {.sequences = micro, .seq = (int64_t)o->seq, .first_sequence = first, .seed = (uint64_t)o->seed,
                      .step = (uint64_t)step};
    mt_tensor loss = mt_tensor_cols(t->loss, 0, micro * batch.seq);
    size_t mark = mt_arena_mark(t->ctx);
    MT_TRY(load_batch(t, step, first, micro, of, training));
    MT_TRY(mt_gpt_forward(t->ctx, &t->gpt, &batch, t->ids, t->targets, loss, training ? &t->saved : NULL));
    MT_TRY(mt_sum(t->ctx, loss, total));
    if (!training) return MT_SUCCESS;
    MT_TRY(mt_gpt_backward(t->ctx, &t->gpt, (float)(t->scaler.scale / (o->batch * o->seq)), &t->saved));
    mt_arena_release(t->ctx, mark);
    return mt_accumulate_gradients(t->ctx, t->params);
}

/* This rank's part of `sequences` sequences, `micro` at a time; *loss is the mean over those of all data ranks. */
static mt_status run_sequences(trainer *t, int64_t step, int64_t sequences, int64_t micro, int training, float *loss) {
    int64_t ranks = t->grid.data_size, end = sequences * (t->grid.data_rank + 1) / ranks, n = 0;
    float *total = (float *)t->totals.data;
    MT_TRY(mt_fill(t->ctx, t->totals, 0.0f));
    for (int64_t i = sequences * t->grid.data_rank / ranks; i < end; i += micro)
        MT_TRY(run_micro_batch(t, step, i, end - i < micro ? end - i : micro, sequences, training,
                               mt_tensor_rows(t->totals, n++, 1)));
    MT_TRY(mt_tree_sum(t->ctx, mt_tensor_rows(t->totals, 0, n)));
    MT_TRY(mt_all_reduce(t->ctx, t->grid.data, total, total, 1, MT_F32, MT_SUM));
    MT_TRY(mt_download(t->ctx, mt_tensor_rows(t->totals, 0, 1), loss));
    *loss /= (float)((double)sequences * t->job->o.seq);
    return MT_SUCCESS;
}

static void ledgers_start(const trainer *t) {
    mt_comm_ledger_reset(t->grid.tensor);
    mt_comm_ledger_reset(t->grid.data);
    mt_comm_ledger_reset(t->grid.model);
}

static void ledgers_stop(trainer *t) {
    t->ledgers[0] = mt_comm_ledger(t->grid.tensor);
    t->ledgers[1] = mt_comm_ledger(t->grid.data);
    t->ledgers[2] = mt_comm_ledger(t->grid.model);
}

typedef struct hash_writer {
    FILE *file; /* NULL on all ranks but one */
    int64_t step;
} hash_writer;

static void write_hash(void *user, const char *name, uint64_t hash, int differs) {
    const hash_writer *w = (const hash_writer *)user;
    if (w->file) fprintf(w->file, "%lld %s %016llx%s\n", (long long)w->step, name, (unsigned long long)hash,
                         differs ? " ranks differ" : "");
}

static mt_status log_gradients(trainer *t, float loss, float norm) {
    if (!t->hashes) return MT_SUCCESS;
    MT_TRY(mt_hash_log_value(t->ctx, t->hashes, "loss", loss));
    for (int i = 0; i < mt_params_count(t->params); i++) {
        const mt_param *p = mt_params_at(t->params, i);
        MT_TRY(mt_hash_log_shard(t->ctx, t->hashes, p, ".grad", p->grad));
    }
    return mt_hash_log_value(t->ctx, t->hashes, "grad_norm", norm);
}

/* The names are those of torch.optim.AdamW's state. */
static mt_status log_weights(trainer *t, int64_t step) {
    hash_writer writer = {mt_comm_rank(t->grid.world) == 0 ? t->job->hash_log : NULL, step + 1};
    if (!t->hashes) return MT_SUCCESS;
    for (int i = 0; i < mt_params_count(t->params); i++) {
        const mt_param *p = mt_params_at(t->params, i);
        mt_tensor m, v, master;
        MT_TRY(mt_optimizer_moments(t->ctx, &t->optimizer, p, &m, &v));
        MT_TRY(mt_optimizer_master(t->ctx, &t->optimizer, p, &master));
        MT_TRY(mt_hash_log_shard(t->ctx, t->hashes, p, "", p->value));
        if (master.data != p->value.data) MT_TRY(mt_hash_log_shard(t->ctx, t->hashes, p, ".master", master));
        MT_TRY(mt_hash_log_shard(t->ctx, t->hashes, p, ".exp_avg", m));
        MT_TRY(mt_hash_log_shard(t->ctx, t->hashes, p, ".exp_avg_sq", v));
    }
    return mt_hash_log_flush(t->ctx, t->hashes, write_hash, &writer);
}

/* A gradient that is not finite: f16 goes on with a smaller scale, as long as there is one. */
static mt_status skip_step(trainer *t, int64_t step, float scale, float loss, float norm) {
    MT_TRY(log_weights(t, step));
    if (scale > t->scaler.desc.min_scale) return MT_SUCCESS;
    if (mt_comm_rank(t->grid.world) == 0)
        fprintf(stderr, "train_gpt: step %lld: loss %g, gradient norm %g is not finite: stopping, the weights are untouched\n",
                (long long)step + 1, (double)loss, (double)norm);
    return MT_ERR_DATA;
}

static mt_status train_step(trainer *t, int64_t step, float lr, float *loss, float *norm) {
    const options *o = &t->job->o;
    float scale = t->scaler.scale, unscale;
    ledgers_start(t);
    MT_TRY(mt_params_zero_grad(t->ctx, t->params));
    MT_TRY(run_sequences(t, step, (int64_t)o->batch, (int64_t)o->micro_batch, 1, loss));
    MT_TRY(mt_sync_gradients(t->ctx, t->params));
    MT_TRY(mt_grad_norm(t->ctx, t->params, norm));
    ledgers_stop(t);
    unscale = mt_loss_scaler_update(&t->scaler, norm);
    MT_TRY(log_gradients(t, *loss, *norm));
    if (unscale == 0) return skip_step(t, step, scale, *loss, *norm);
    MT_TRY(mt_optimizer_step(t->ctx, &t->optimizer, lr, unscale * mt_clip_coefficient(*norm, (float)o->clip)));
    return log_weights(t, step);
}

/* In micro-batches of a power of two, which every power of two of data ranks leaves whole. */
static mt_status evaluate(trainer *t, float *loss) {
    const options *o = &t->job->o;
    int64_t most = (int64_t)fmin(o->micro_batch, EVAL_SEQUENCES / fmax(o->invariant_data, o->dp)), micro = 1;
    while (2 * micro <= most) micro *= 2;
    return run_sequences(t, 0, EVAL_SEQUENCES, micro, 0, loss);
}

/* ---- what a rank prints -------------------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void print_ledger(const char *name, int ranks, const mt_ledger *l) {
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++)
        if (l->calls[k])
            printf("  %-8s (%d ranks)  %-14s %6llu calls  %12llu bytes\n", name, ranks, mt_collective_name((mt_collective)k),
                   (unsigned long long)l->calls[k], (unsigned long long)l->bytes[k]);
}

static void print_ledgers(const trainer *t) {
    printf("communication of one step, per rank%s:\n", t->grid.tensor_size * t->grid.data_size == 1 ? ": none" : "");
    print_ledger("tensor", t->grid.tensor_size, &t->ledgers[0]);
    print_ledger("data", t->grid.data_size, &t->ledgers[1]);
    print_ledger("model", t->grid.tensor_size, &t->ledgers[2]);
}

static void print_model(const trainer *t) {
    const options *o = &t->job->o;
    printf("GPT: %g layers, hidden %g, heads %g, vocabulary %g, %lld parameters in %s; %g x tensor, %g x data parallel%s\n",
           o->layers, o->hidden, o->heads, o->vocab, (long long)mt_params_global_elements(t->params),
           mt_dtype_name((mt_dtype)o->dtype), o->tp, o->dp, o->sequence_parallel ? ", sequence parallel" : "");
    printf("data: %lld tokens, %g sequences of %g per step, GEMM: %s\n", (long long)t->job->data.count, o->batch, o->seq,
           o->device == MT_DEVICE_CUDA ? "cuBLASLt" : mt_gemm_library());
    fflush(stdout);
}

typedef struct progress {
    double start, last_print;
} progress;

/* One line of the log, and of the console about once a second. seconds: of the training step, without the validation. */
static void report(const trainer *t, progress *p, int64_t step, double seconds, float loss, float norm, float lr,
                   const float *val) {
    const options *o = &t->job->o;
    double time = now(), rate = o->batch * o->seq / seconds, done = (double)(step + 1);
    double left = (time - p->start) / done * (o->steps - done);
    if (t->job->log) {
        fprintf(t->job->log, "%lld,%.9g,%.9g,%.9g,%.9g,", (long long)step + 1, (double)loss, (double)norm, rate, (double)lr);
        if (val) fprintf(t->job->log, "%.9g", (double)*val);
        fprintf(t->job->log, "\n");
    }
    if (step > 0 && done < o->steps && !val && time - p->last_print < 1.0) return;
    p->last_print = time;
    printf("step %5lld/%g  loss %7.4f  grad norm %7.3f  %8.0f tokens/s  %d:%02d left", (long long)step + 1, o->steps,
           (double)loss, (double)norm, rate, (int)(left / 60), (int)left % 60);
    if (o->dtype == MT_F16) printf("  loss scale %g, %lld skipped", (double)t->scaler.scale, (long long)t->scaler.skipped);
    if (val) printf("  validation %7.4f", (double)*val);
    printf("\n");
    fflush(stdout);
}

/* Draws from softmax(logits / temperature); every rank draws the same, since all have the same logits. */
static int32_t draw_token(const options *o, const float *logits, uint64_t n) {
    uint32_t counter[4] = {(uint32_t)n, (uint32_t)(n >> 32), 0x73616d70, 0}, key[2] = {(uint32_t)(uint64_t)o->seed, 0}, r[4];
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

/* The logits of the token after history [count]. Sequence parallelism wants a multiple of ranks, invariant mode the same number
   of tokens on every split: the rest is padding. */
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

/* Generates o->sample tokens after those in history [count], one whole forward each. */
static mt_status generate(trainer *t, int32_t *history, int64_t count, float *logits) {
    const options *o = &t->job->o;
    size_t mark = mt_arena_mark(t->ctx);
    if (mt_context_device(t->ctx) == MT_DEVICE_META) /* the longest context is the one that needs most */
        return next_logits(t, history, count + (int64_t)o->sample - 1, logits);
    for (int64_t n = 0; n < (int64_t)o->sample; n++, count++) {
        MT_TRY(next_logits(t, history, count, logits));
        mt_arena_release(t->ctx, mark);
        history[count] = draw_token(o, logits, (uint64_t)n);
        if (t->grid.tensor_rank == 0) print_token(&t->job->data, history[count]);
    }
    return MT_SUCCESS;
}

static mt_status sample(trainer *t) {
    const options *o = &t->job->o;
    const dataset *d = &t->job->data;
    int64_t prompt = o->prompt && o->prompt[0] && d->text ? (int64_t)strlen(o->prompt) : (int64_t)(o->seq < 64 ? o->seq : 64);
    int speaks = t->grid.tensor_rank == 0 && mt_context_device(t->ctx) != MT_DEVICE_META;
    int32_t *history;
    float *logits;
    mt_status status;
    if (o->sample == 0 || t->grid.data_rank != 0) return MT_SUCCESS;
    /* padding reads past the end */
    history = (int32_t *)calloc((size_t)(prompt + (int64_t)fmax(o->tp, o->invariant) + (int64_t)o->sample), sizeof *history);
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

/* ---- the job ------------------------------------------------------------------------------------------------------- */

static mt_status train(trainer *t) {
    const options *o = &t->job->o;
    int speaks = mt_comm_rank(t->grid.world) == 0;
    progress p = {now(), 0};
    if (speaks) print_model(t);
    for (int64_t step = 0; step < (int64_t)o->steps; step++) {
        float lr = mt_cosine_schedule(step, (int64_t)o->warmup, (int64_t)o->steps, (float)o->lr, (float)o->min_lr);
        int evaluates = o->eval_interval > 0 && (step + 1) % (int64_t)o->eval_interval == 0;
        float loss, norm, val = 0;
        double start = now();
        MT_TRY(train_step(t, step, lr, &loss, &norm));
        double seconds = now() - start;
        if (evaluates) MT_TRY(evaluate(t, &val));
        if (speaks) report(t, &p, step, seconds, loss, norm, lr, evaluates ? &val : NULL);
    }
    if (speaks) print_ledgers(t);
    return sample(t);
}

static mt_status rank_main(mt_comm *world, void *user) {
    const job *j = (const job *)user;
    trainer t;
    mt_status status;
    memset(&t, 0, sizeof t);
    status = trainer_create(world, j, (mt_device)j->o.device, &t);
    if (status == MT_SUCCESS) status = train(&t);
    trainer_destroy(&t);
    return status;
}

/* Runs one step on a device that computes nothing, to learn what a rank needs. */
static mt_status plan(job *job, int speaks) {
    trainer t;
    mt_comm *world = NULL;
    float loss, norm;
    mt_status status = mt_comm_create_meta((int)(job->o.tp * job->o.dp), 0, &world);
    memset(&t, 0, sizeof t);
    if (status == MT_SUCCESS) status = trainer_create(world, job, MT_DEVICE_META, &t);
    if (status == MT_SUCCESS) status = train_step(&t, 0, 0.0f, &loss, &norm);
    if (status == MT_SUCCESS && speaks) {
        print_model(&t);
        printf("per rank: %lld parameters; %zu bytes of parameters, gradients and optimizer state; %zu bytes of activations\n",
               (long long)mt_params_elements(t.params), mt_context_allocated(t.ctx), mt_arena_peak(t.ctx));
        print_ledgers(&t);
    }
    if (status == MT_SUCCESS) status = evaluate(&t, &loss);
    if (status == MT_SUCCESS) status = sample(&t);
    if (status == MT_SUCCESS) job->arena_bytes = mt_arena_peak(t.ctx);
    else fprintf(stderr, "train_gpt: %s: %s\n", mt_status_name(status), world ? mt_comm_last_error(world) : "");
    trainer_destroy(&t);
    mt_comm_destroy(world);
    return status;
}

/* A file to write to, if there is to be one. */
static int open_file(const char *path, FILE **out) {
    *out = path ? fopen(path, "w") : NULL;
    if (path && !*out) fprintf(stderr, "train_gpt: cannot write %s: %s\n", path, strerror(errno));
    return !path || *out;
}

/* Whether everything that was written has arrived. */
static int close_file(const char *path, FILE *file) {
    int failed = file && ferror(file);
    if (file && fclose(file) != 0) failed = 1;
    if (failed) fprintf(stderr, "train_gpt: cannot write %s: %s\n", path, strerror(errno));
    return !failed;
}

static mt_status run(job *job) {
    mt_launch_desc ranks = {.ranks = (int)(job->o.tp * job->o.dp), .no_pinning = job->o.no_pinning,
                            .cores_per_rank = (int)job->o.threads, .timeout_s = job->o.timeout};
    MT_TRY(plan(job, job->o.dry_run));
    if (job->o.dry_run) return MT_SUCCESS;
    if (!open_file(job->o.log, &job->log) || !open_file(job->o.hash_log, &job->hash_log)) return MT_ERR_IO;
    if (job->log) fprintf(job->log, "step,loss,grad_norm,tokens_per_s,lr,val_loss\n");
    return mt_launch(&ranks, rank_main, job);
}

int main(int argc, char **argv) {
    job job = {.o = {.tp = 2, .dp = 1, .layers = 4, .hidden = 128, .heads = 4, .seq = 128, .batch = 16, .steps = 800,
                     .warmup = 20, .seed = 1234, .eval_interval = 100, .sample = 300, .threads = 1, .lr = 3e-3,
                     .min_lr = 3e-4, .clip = 1, .weight_decay = 0.1, .temperature = 0.7, .timeout = 600}};
    mt_status status = MT_ERR_ARGUMENT;
    if (!parse_options(argc, argv, &job.o)) return 1;
    if (job.o.help) {
        print_help(&job.o);
        return 0;
    }
    if (load_data(&job.o, &job.data) && check_options(&job.o, job.data.count, job.data.text)) status = run(&job);
    if (!close_file(job.o.log, job.log)) status = MT_ERR_IO;
    if (!close_file(job.o.hash_log, job.hash_log)) status = MT_ERR_IO;
    free(job.data.tokens);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "train_gpt: cannot write the results: %s\n", strerror(errno));
        status = MT_ERR_IO;
    }
    return status == MT_SUCCESS ? 0 : 1;
}
