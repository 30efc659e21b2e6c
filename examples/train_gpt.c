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
   Results go to stdout, errors to stderr. train.h, beside this file, has what does not depend on the model.
   Up to rounding, the loss does not depend on --tp, --dp, --pp, --micro-batch or --sequence-parallel. With --invariant
   8 it has the same bits on 1, 2, 4 or 8 tensor ranks, 1, 2, 4 or 8 data ranks, and any number of stages. --hash-log
   FILE writes a hash of each tensor: a diff of two such files shows the first tensor in which two runs differ. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* fileno, fdopen: a strict -std=c99 hides them */
#endif
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT2_VOCAB 50257
#define PROGRAM "train_gpt"
#define ADAM_BETA2 0.95f
#define ADAM_EPS 0.0f
enum { TOKEN_INPUTS = 2, SEQUENCE_INPUTS = 0, SEQUENCE_LOSSES = 0 };
enum { IDS, TARGETS }; /* the inputs */

static const char *const loss_names[][2] = {{"loss", "loss"}};
static const char *const validation_names[][2] = {{"val_loss", "validation"}};

/* Those of the model are not noted: the library compares the shape. */
enum { FIXED_LINES = 5 };
static const char *const noted[] = {"seq",    "batch",  "seed",    "dtype", "steps",        "lr",
                                    "min-lr", "warmup", "dropout", "clip",  "weight-decay", "label-smoothing"};
static const char *const configs[] = {"gpt2-1.2b", "gpt2-2.5b", "gpt2-4.2b", "gpt2-8.3b"};

struct model {
    mt_gpt gpt;
    mt_gpt_saved *saved; /* one for each slot */
};

struct setup {
    mt_gpt_desc origin; /* the model of --init-from or --resume; zeros: there is none */
};

#include "train.h"

/* ---- flags ------------------------------------------------------------------------------------------------------- */

static const flag flags[] = {
    {"config", CONFIG, AT(config), 0, 3,
     "gpt2-1.2b, gpt2-2.5b, gpt2-4.2b or gpt2-8.3b of the paper; flags after it change it"},
    {"data", TEXT, AT(data), 0, 0, "FILE to train on; default: this project's headers and README"},
    {"device", DEVICE, AT(device), 0, 1, "cpu or cuda"},
    {"cuda-graph", SWITCH, AT(cuda_graph), 0, 1,
     "record the second step as a CUDA graph, and launch it for all further steps"},
    SPLIT_FLAGS,
    SIZE_FLAGS,
    {"kv-heads", WHOLE, AT(kv_heads), 0, 1024, "key/value heads (0: as many as --heads)"},
    {"ffn", WHOLE, AT(ffn), 0, 1 << 20, "inner width of the MLP (0: 4 x hidden)"},
    {"seq", WHOLE, AT(seq), 1, 1 << 20, "tokens per sequence"},
    {"max-seq", WHOLE, AT(max_seq), 0, 1 << 20,
     "positions of the model (0: as in --init-from or --resume, otherwise --seq)"},
    BATCH_FLAGS,
    {"min-lr", REAL, AT(min_lr), 0, 1e3, "learning rate at the end of the cosine"},
    TRAINING_FLAGS,
    {"label-smoothing", REAL, AT(label_smoothing), 0, 0.999, "label smoothing of the loss"},
    {"vocab", WHOLE, AT(vocab), 0, 1 << 20, "vocabulary (0: 256 for text, 50257 for .bin)"},
    {"eval-interval", WHOLE, AT(eval_interval), 0, 1e9, "steps between validation losses (0: never)"},
    {"sample", WHOLE, AT(sample), 0, 1 << 20, "tokens to generate at the end"},
    {"prompt", TEXT, AT(prompt), 0, 0, "TEXT to continue; default: from the validation text"},
    {"temperature", REAL, AT(temperature), 0, 100, "temperature of --sample (0: always the most probable token)"},
    {"top-k", WHOLE, AT(top_k), 0, 2147483647.0, "draw from the K most probable tokens (0: all)"},
    {"top-p", REAL, AT(top_p), 0, 1,
     "draw from the most probable tokens that together have probability P (0: one, 1: all)"},
    {"log", TEXT, AT(log), 0, 0, "FILE.csv: write step,loss,grad_norm,tokens_per_s,lr,val_loss"},
    FILE_FLAGS,
    {"init-from", TEXT, AT(init_from), 0, 0,
     "DIR of checkpoints, of one checkpoint, or of a GPT-2 or Llama of Hugging Face: the run begins with its\n"
     "                              model. Flags of the shape may be left out; they must not contradict the model"},
    RANK_FLAGS,
    {"rotary", SWITCH, AT(rotary), 0, 1, "rotary instead of learned positions"},
    {"alibi", SWITCH, AT(alibi), 0, 1, "ALiBi instead of learned positions"},
    {"window", WHOLE, AT(window), 0, 1 << 30, "a token sees only the last N tokens, itself included (0: all)"},
    {"softcap", REAL, AT(softcap), 0, 1e6, "soft cap of the attention scores (0: none)"},
    {"activation", ACTIVATION, AT(activation), 0, MT_ACTIVATION_COUNT - 1,
     "gelu (with tanh, as in GPT-2), gelu-erf, swiglu, squared-relu, relu or tanh"},
    {"rmsnorm", SWITCH, AT(rmsnorm), 0, 1, "RMSNorm instead of layer normalisation"},
    {"untied", SWITCH, AT(untied), 0, 1, "an output head with its own weight"},
    {"dry-run", SWITCH, AT(dry_run), 0, 1, "print parameters, bytes and collectives per rank, train nothing"},
    {"machine", TEXT, AT(machine), 0, 0,
     "FILE with the rates of a machine, see docs/planning.md: --dry-run also predicts the time of a step"},
    {"help", SWITCH, AT(help), 0, 1, "this text"},
};
#define FLAGS (int)(sizeof flags / sizeof *flags)

static const flag *flag_table(int *count) {
    *count = FLAGS;
    return flags;
}

/* Sets the flags for a GPT-2 model of arXiv 1909.08053, table 1: its size, its number of tensor parallel ranks, and 8
   sequences per step. All activations are recomputed (section 4.2), because the GPUs of the paper have 32 GB. */
static void set_config(options *o) {
    static const struct {
        double hidden, heads, layers, tp;
    } table[] = {{1536, 16, 40, 1}, {1920, 20, 54, 2}, {2304, 24, 64, 4}, {3072, 32, 72, 8}};
    give_shape(o);
    o->hidden = table[o->config].hidden;
    o->heads = table[o->config].heads;
    o->layers = table[o->config].layers;
    o->tp = table[o->config].tp;
    o->seq = 1024;
    o->vocab = GPT2_VOCAB;
    o->batch = o->micro_batch = 8;
    o->recompute = MT_RECOMPUTE_FULL;
}

/* Checks that the vocabulary has the bytes of --prompt, which are used only after the training. */
static int check_prompt(const options *o) {
    const char *at = o->prompt ? o->prompt : "";
    while (*at && (unsigned char)*at < o->vocab) at++;
    if (*at)
        fprintf(stderr, PROGRAM ": --prompt: byte %lld is %d, and the vocabulary of the model is %.15g\n",
                (long long)(at - o->prompt + 1), (unsigned char)*at, o->vocab);
    return !*at;
}

/* Checks the flags that only this program has, after those of the split. */
static int check_options(options *o, int64_t tokens, int text) {
    if (!check_split(o)) return 0;
    if (o->max_seq > 0 && o->max_seq < o->seq)
        fprintf(stderr, PROGRAM ": --max-seq %.15g is less than --seq %.15g\n", o->max_seq, o->seq);
    else if (o->cuda_graph && (o->device != MT_DEVICE_CUDA || o->hash_log))
        fprintf(stderr,
                PROGRAM ": --cuda-graph needs --device cuda, without --hash-log, which waits for each tensor\n");
    else if (o->prompt && !text)
        fprintf(stderr, PROGRAM ": --prompt %s needs text; a token file has no letters\n", o->prompt);
    else if ((double)tokens < 4 * o->seq + 8)
        fprintf(stderr, PROGRAM ": the data has %lld tokens, too few for --seq %.15g (needs %.15g)\n",
                (long long)tokens, o->seq, 4 * o->seq + 8);
    else return 1;
    return 0;
}

/* ---- data -------------------------------------------------------------------------------------------------------- */

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

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

/* Returns the desc of the model. What has no flag is as in `origin`, and so are, without --max-seq, the positions. */
static mt_gpt_desc model_of(const options *o, const mt_gpt_desc *origin) {
    int64_t positions = origin->max_seq > (int64_t)o->seq ? origin->max_seq : (int64_t)o->seq;
    const mt_scores_desc *of = &origin->layer.scores;
    float base = of->rotary_base > 0 ? of->rotary_base : 10000.0f;
    mt_gpt_desc d = {.vocab = (int64_t)o->vocab,
                     .layers = (int64_t)o->layers,
                     .max_seq = o->max_seq > 0 ? (int64_t)o->max_seq : positions,
                     .layer = {.hidden = (int64_t)o->hidden,
                               .heads = (int64_t)o->heads,
                               .kv_heads = (int64_t)o->kv_heads,
                               .ffn = (int64_t)o->ffn,
                               .norm = {.kind = o->rmsnorm ? MT_RMS_NORM : MT_LAYER_NORM,
                                        .eps = origin->layer.norm.eps,
                                        .placement = origin->layer.norm.placement},
                               .activation = (mt_activation)o->activation,
                               .scores = {.mask = of->mask,
                                          .rotary_base = o->rotary ? base : 0.0f,
                                          .rotary_form = of->rotary_form,
                                          .rotary_dim = of->rotary_dim,
                                          .window = (int64_t)o->window,
                                          .softcap = (float)o->softcap,
                                          .alibi = o->alibi,
                                          .scale = of->scale},
                               .dropout = {.attention = (float)o->dropout, .hidden = (float)o->dropout},
                               .no_bias = origin->layer.no_bias,
                               .qkv_layout = origin->layer.qkv_layout,
                               .sequence_parallel = o->sequence_parallel,
                               .recompute = (mt_recompute)o->recompute},
                     .untied_head = o->untied,
                     .embedding_dropout = (float)o->dropout,
                     .label_smoothing = (float)o->label_smoothing};
    return d;
}

static mt_status create_model(trainer *t) {
    mt_gpt_desc d = model_of(&t->job->o, &t->job->setup.origin);
    return mt_gpt_create(t->ctx, t->params, &d, &t->model.gpt);
}

static mt_status create_saved(trainer *t) {
    t->model.saved = (mt_gpt_saved *)calloc((size_t)t->slots, sizeof *t->model.saved);
    if (!t->model.saved) return MT_ERR_MEMORY;
    for (int i = 0; i < t->slots; i++) MT_TRY(mt_gpt_saved_create(t->ctx, &t->model.gpt, &t->model.saved[i]));
    return MT_SUCCESS;
}

static mt_status create_checkpoint(trainer *t, const mt_checkpoint_desc *files) {
    return mt_gpt_checkpoint_create(t->ctx, t->params, &t->model.gpt, files, &t->checkpoint);
}

static void destroy_model(trainer *t) {
    for (int i = 0; t->model.saved && i < t->slots; i++) mt_gpt_saved_destroy(&t->model.saved[i]);
    free(t->model.saved);
}

static mt_status load_sequences(const pass *p) {
    trainer *t = p->t;
    const options *o = &t->job->o;
    if (mt_context_device(t->ctx) == MT_DEVICE_META) return MT_SUCCESS;
    for (int64_t j = p->first; j < p->end; j++) {
        int64_t start = p->training ? draw_start(o, &t->job->data, p->step, j) : eval_start(o, &t->job->data, j, p->of);
        MT_TRY(upload_sequence(p, IDS, j, t->job->data.tokens + start));
        MT_TRY(upload_sequence(p, TARGETS, j, t->job->data.tokens + start + 1));
    }
    return MT_SUCCESS;
}

/* 1 / the number of tokens of a step, because the loss is their mean. mt_batch.loss_scale multiplies it. */
static float scale_of_loss(const trainer *t) { return (float)(1 / (t->job->o.batch * t->job->o.seq)); }

static mt_status stage_forward(const pass *p, mt_batch *batch, const mt_action *a, int64_t at, mt_tensor input,
                               mt_tensor output) {
    trainer *t = p->t;
    mt_tensor loss = mt_tensor_cols(mt_tensor_rows(t->losses, a->slot, 1), 0, tokens_of(&t->job->o, batch->sequences));
    batch->backward_scale = scale_of_loss(t);
    MT_TRY(mt_gpt_stage_forward(t->ctx, &t->model.gpt, batch, input_of(t, IDS, at), input_of(t, TARGETS, at), input,
                                output, loss, p->training ? &t->model.saved[a->slot] : NULL));
    return is_last_stage(t) ? add_losses(t, a, 0, loss) : MT_SUCCESS;
}

static mt_status stage_backward(trainer *t, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    return mt_gpt_stage_backward(t->ctx, &t->model.gpt, scale_of_loss(t), doutput, dinput, &t->model.saved[a->slot]);
}

/* The mean loss of a token. */
static void means_of(const pass *p, const float *sums, float *means) {
    means[0] = sums[0] / (float)((double)p->of * p->t->job->o.seq);
}

static double model_flops(const trainer *t) {
    return mt_gpt_flops(&t->model.gpt.desc, (int64_t)t->job->o.batch, (int64_t)t->job->o.seq);
}

static const char *model_name(const options *o) {
    (void)o;
    return "GPT";
}

static void print_more(const trainer *t) { (void)t; }

static float learning_rate(const options *o, int64_t step) {
    return mt_cosine_schedule(step, (int64_t)o->warmup, (int64_t)o->steps, (float)o->lr, (float)o->min_lr);
}

/* ---- sampling ---------------------------------------------------------------------------------------------------- */

static void print_token(const dataset *d, int32_t token) {
    if (!d->text) printf("%d ", (int)token);
    else if (token == '\n' || token == '\t' || (token >= ' ' && token < 127)) putchar(token);
    else printf("\\x%02x", (unsigned)token); /* a terminal should not see control characters */
}

/* Adds tokens [from, to) of the text to the cache, and draws the next one. `first` is the first token in the cache. */
static mt_status next_token(trainer *t, const mt_gpt_cache *cache, int64_t first, int64_t from, int64_t to,
                            int32_t *text) {
    const options *o = &t->job->o;
    mt_batch batch = {.sequences = 1, .seq = to - from};
    mt_sample_desc how = {.temperature = (float)o->temperature,
                          .top_k = (int64_t)o->top_k,
                          .top_p = (float)o->top_p > 0 ? (float)o->top_p : MT_ZERO,
                          .seed = (uint64_t)o->seed,
                          .first_sequence = 0x73616d70,
                          .position = first};
    size_t mark = mt_arena_mark(t->ctx);
    mt_tensor ids, next;
    MT_TRY(mt_arena_tensor(t->ctx, MT_I32, 1, batch.seq, &ids));
    MT_TRY(mt_arena_tensor(t->ctx, MT_I32, 1, 1, &next));
    MT_TRY(mt_upload(t->ctx, text + from, ids));
    MT_TRY(mt_gpt_sample(t->ctx, &t->model.gpt, &batch, (const int32_t *)ids.data, cache, &how, (int32_t *)next.data));
    MT_TRY(mt_download(t->ctx, next, text + to));
    mt_arena_release(t->ctx, mark);
    return MT_SUCCESS;
}

/* Plans the calls of generate: the first one, one that begins a new cache, and one of a single token. Their scratch
   memory depends on the number of their tokens, but not on what is in the cache. A longer call may need less than a
   shorter one. */
static mt_status plan_generate(trainer *t, const mt_gpt_cache *cache, int32_t *text, int64_t count, int64_t end) {
    int64_t half = (cache->max_seq + 1) / 2;
    MT_TRY(next_token(t, cache, 0, 0, count > cache->max_seq ? half : count, text));
    if (end > cache->max_seq) MT_TRY(next_token(t, cache, 0, 0, half, text));
    return next_token(t, cache, 0, 0, 1, text);
}

/* Generates o->sample tokens after text [count]. Tokens [first, held) of the text are in the cache, which has room for
   one sequence. When the cache is full, the last max_seq / 2 tokens begin a new one. */
static mt_status generate(trainer *t, const mt_gpt_cache *cache, int32_t *text, int64_t count) {
    int64_t first = 0, held = 0, half = (cache->max_seq + 1) / 2, end = count + (int64_t)t->job->o.sample;
    if (mt_context_device(t->ctx) == MT_DEVICE_META) return plan_generate(t, cache, text, count, end);
    for (; count < end; count++) {
        if (count - first > cache->max_seq) {
            first = held = count - half;
            MT_TRY(mt_gpt_cache_set_length(t->ctx, cache, 0, 0));
        }
        MT_TRY(next_token(t, cache, first, held, count, text));
        held = count;
        if (mt_comm_rank(t->grid.world) == 0) print_token(&t->job->data, text[count]);
        fflush(stdout);
    }
    return MT_SUCCESS;
}

/* Generates o->sample tokens after --prompt or, without it, after the start of the validation text. Rank 0 prints. */
static mt_status finish(trainer *t) {
    const options *o = &t->job->o;
    const dataset *d = &t->job->data;
    int64_t prompt =
        o->prompt && o->prompt[0] && d->text ? (int64_t)strlen(o->prompt) : (int64_t)(o->seq < 64 ? o->seq : 64);
    int speaks = mt_comm_rank(t->grid.world) == 0 && mt_context_device(t->ctx) != MT_DEVICE_META;
    int32_t *text;
    mt_gpt_cache cache = {0};
    mt_status status;
    if (o->sample == 0 || t->grid.dp_rank != 0) return MT_SUCCESS;
    text = (int32_t *)calloc((size_t)(prompt + (int64_t)o->sample + (int64_t)o->seq), sizeof *text);
    for (int64_t i = 0; text && i < prompt; i++)
        text[i] = o->prompt && o->prompt[0] && d->text ? (unsigned char)o->prompt[i] : d->tokens[d->train + i];
    if (speaks) {
        printf("continuation of ");
        for (int64_t i = 0; text && i < prompt; i++) print_token(d, text[i]);
        printf("\n---\n");
    }
    status = text ? mt_gpt_cache_create(t->ctx, &t->model.gpt, 1, (int64_t)o->seq, &cache) : MT_ERR_MEMORY;
    if (status == MT_SUCCESS) status = generate(t, &cache, text, prompt);
    if (speaks) printf("\n---\n");
    mt_gpt_cache_destroy(t->ctx, &cache);
    free(text);
    return status;
}

/* ---- the model of a checkpoint: flags that are not given take its shape ------------------------------------------ */

/* `otherwise` is what a model without the switch has. */
static void take_switch(job *job, const char *from, const char *name, int theirs, const char *otherwise) {
    const flag *f = flag_of(name);
    if (*given(&job->o, f) && !theirs)
        refuse_later(job, "--%s is given, the model in %s has %s", name, from, otherwise);
    memcpy(field(f, &job->o), &theirs, sizeof theirs);
}

/* A number of which 0 means none: a flag of 0 also contradicts a model that has it. */
static void take_limit(job *job, const char *from, const char *name, double theirs) {
    const flag *f = flag_of(name);
    double ours;
    memcpy(&ours, field(f, &job->o), sizeof ours);
    if (*given(&job->o, f) && (float)ours != (float)theirs && theirs == 0)
        refuse_later(job, "--%s is %.15g, the model in %s has none", name, ours, from);
    else if (*given(&job->o, f) && (float)ours != (float)theirs)
        refuse_later(job, "--%s is %.15g, the model in %s has %.9g", name, ours, from, theirs);
    memcpy(field(f, &job->o), &theirs, sizeof theirs);
}

/* The positions of a model with rotary or ALiBi are not fixed. */
static void take_positions(job *job, const char *from) {
    options *o = &job->o;
    int64_t positions = job->setup.origin.max_seq;
    if (o->rotary || o->alibi) return;
    if (o->max_seq > 0 && o->max_seq != (double)positions)
        refuse_later(job, "--max-seq is %.15g, the model in %s has %lld positions", o->max_seq, from,
                     (long long)positions);
    take_seq(job, from, positions);
}

static void take_shape(job *job, const char *from) {
    const mt_gpt_desc *d = &job->setup.origin;
    const mt_transformer_layer_desc *l = &d->layer;
    const char *positions = l->scores.alibi             ? "ALiBi"
                            : l->scores.rotary_base > 0 ? "rotary positions"
                                                        : "learned positions";
    take_number(job, from, "layers", d->layers, "layers");
    take_number(job, from, "hidden", l->hidden, "hidden features");
    take_number(job, from, "heads", l->heads, "heads");
    take_number(job, from, "kv-heads", l->kv_heads, "key/value heads");
    take_number(job, from, "ffn", l->ffn, "features in its MLP");
    take_number(job, from, "vocab", d->vocab, "tokens in its vocabulary");
    take_switch(job, from, "rotary", l->scores.rotary_base > 0, positions);
    take_switch(job, from, "alibi", l->scores.alibi, positions);
    take_limit(job, from, "window", (double)l->scores.window);
    take_limit(job, from, "softcap", (double)l->scores.softcap);
    take_switch(job, from, "rmsnorm", l->norm.kind == MT_RMS_NORM, "layer normalisation");
    take_switch(job, from, "untied", d->untied_head, "an output head that is its embedding");
    take_positions(job, from);
    take_choice(job, from, "activation", (int)l->activation);
}

static mt_status read_origin(mt_context *ctx, job *job, const char *from) {
    MT_TRY(mt_gpt_desc_read(ctx, from, &job->setup.origin));
    take_shape(job, from);
    return MT_SUCCESS;
}

static int prepare(job *job) {
    options *o = &job->o;
    if (find_origin(job) != MT_SUCCESS || !load_data(o, &job->data)) return 0;
    if (o->vocab == 0) o->vocab = job->data.text ? 256 : GPT2_VOCAB;
    /* the model has replaced the flags, so the checks below would report values that nobody gave */
    if (job->refusal[0]) return 1;
    if (!check_options(o, job->data.count, job->data.text) || !check_prompt(o)) return 0;
    check_tokens(job);
    return 1;
}

int main(int argc, char **argv) {
    job job = {.o = default_options()};
    job.o.layers = 4;
    job.o.hidden = 128;
    job.o.heads = 4;
    job.o.seq = 128;
    job.o.batch = 16;
    job.o.steps = 800;
    job.o.warmup = 20;
    job.o.sample = 300;
    job.o.lr = 3e-3;
    job.o.min_lr = 3e-4;
    job.o.weight_decay = 0.1;
    job.o.temperature = 0.7;
    job.o.top_p = 1;
    return train_main(argc, argv, &job);
}
