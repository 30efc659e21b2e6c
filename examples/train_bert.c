/* train_bert - trains a BERT (masked LM, sentence order) with tensor x data x pipeline parallel ranks on a text file.

   cc -O3 -march=native -I. examples/train_bert.c -o train_bert -lm -lpthread
   cc -O3 -march=native -I. -DMT_USE_ONEDNN examples/train_bert.c -o train_bert -ldnnl -lm -lpthread
   nvcc -O3 -arch=native -I. -x cu examples/train_bert.c -o train_bert -lcublasLt   (several GPUs: -DMT_USE_NCCL -lnccl)

   ./train_bert                     the defaults: 2-way tensor parallel, a few minutes on two cores, on the text of this
                                    project's headers and README (run it in the root of the checkout)
   ./train_bert --placement post-ln the norms of the original BERT; pre-ln, the default, are those of Megatron-LM
   ./train_bert --config bert-1.3b --dp 64 --dtype f16 --dry-run      a model of the paper (arXiv 1909.08053, table 4)
   ./train_bert --data FILE.bin ... tokens of examples/text_to_bin.py bert
   ./train_bert --init-from DIR ... begins with the model of a checkpoint, or with a BERT of Hugging Face
   ./train_bert --help              all flags

   Processes, GPUs, checkpoints, logs and --invariant are as in train_gpt.c. train.h, beside this file, has what both
   programs share. There is no --cuda-graph: the loss is a mean over the masked tokens, whose number a graph would fix.

   FILE is any text (a token is a byte; a sentence ends at a new line, or at a full stop with a space behind it; a word
   is a run of letters and digits, or any other byte), or a token file with marks of sentences and words.
   A sequence is [CLS] A [SEP] B [SEP]: two segments of consecutive sentences, exchanged with probability 1/2. The model
   learns whether they are (ALBERT, arXiv 1909.11942). 15 % of the tokens are to be predicted: whole words, in n-grams
   of 1 to 3 words with probabilities as 1/n. Of these tokens 80 % become [MASK], 10 % a random token, and 10 % stay.
   All draws depend on the seed, the number of the sequence in the whole run, and the place in the sequence (Philox), so
   every split trains on the same batches. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* fileno, fdopen: a strict -std=c99 hides them */
#endif
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <stdint.h>
#include <stdio.h>

#define BERT_VOCAB 30522 /* of bert-base-uncased */
#define PAD_TO 128       /* Megatron-LM pads a vocabulary to a multiple of this times the tensor parallel ranks */
#define PROGRAM "train_bert"
#define ADAM_BETA2 0.0f
#define ADAM_EPS 0.0f
enum { TOKEN_INPUTS = 3, SEQUENCE_INPUTS = 2, SEQUENCE_LOSSES = 1 };
enum { IDS, TARGETS, TYPES, LENGTHS, ORDER }; /* the inputs */
enum { LM, SOP, CORRECT };                    /* the totals; CORRECT: sequences whose order is predicted correctly */

static const char *const loss_names[][2] = {{"lm_loss", "lm loss"}, {"sop_loss", "sop loss"}};
static const char *const validation_names[][2] = {
    {"val_lm_loss", "validation lm loss"}, {"val_sop_loss", "sop loss"}, {"val_sop_accuracy", "sop accuracy"}};

/* Those of the model are not noted: the library compares the shape. */
enum { FIXED_LINES = 5 };
static const char *const noted[] = {"seq",    "batch",  "seed",    "dtype", "steps",       "lr",
                                    "min-lr", "warmup", "dropout", "clip",  "weight-decay"};
static const char *const configs[] = {"bert-336m", "bert-1.3b", "bert-3.9b"};

struct model {
    mt_bert bert;
    mt_bert_saved *saved; /* one for each slot */
    int32_t *staging;     /* ids, targets and types of a sequence, on the host */
    double targets;       /* tokens to predict in this pass, on all data ranks */
};

/* Sentence i is the tokens [starts[i], starts[i + 1]). The first `train` sentences are for training. */
struct setup {
    int64_t *starts, count, train;
    int32_t special[4]; /* [PAD], [CLS], [SEP], [MASK] */
    int32_t words;      /* a random token is from 0 to words - 1 */
    int64_t padded_vocab;
    mt_bert_desc origin; /* the model of --init-from or --resume; zeros: there is none */
};

#include "train.h"

/* ---- flags ------------------------------------------------------------------------------------------------------- */

static const flag flags[] = {
    {"config", CONFIG, AT(config), 0, 2, "bert-336m, bert-1.3b or bert-3.9b of the paper; flags after it change it"},
    {"data", TEXT, AT(data), 0, 0, "FILE to train on; default: this project's headers and README"},
    {"device", DEVICE, AT(device), 0, 1, "cpu or cuda"},
    SPLIT_FLAGS,
    {"placement", PLACEMENT, AT(placement), 0, 1,
     "pre-ln (norms inside the residual branches) or post-ln (after the sums, the original BERT)"},
    SIZE_FLAGS,
    {"ffn", WHOLE, AT(ffn), 0, 1 << 20, "inner width of the MLP (0: 4 x hidden)"},
    {"seq", WHOLE, AT(seq), 8, 1 << 20, "tokens per sequence, at most"},
    BATCH_FLAGS,
    {"min-lr", REAL, AT(min_lr), 0, 1e3, "learning rate at the end of the linear decay"},
    TRAINING_FLAGS,
    {"vocab", WHOLE, AT(vocab), 0, 1 << 20, "vocabulary (0: 260 for text, 30522 for .bin)"},
    {"eval-interval", WHOLE, AT(eval_interval), 0, 1e9, "steps between validations (0: never)"},
    {"log", TEXT, AT(log), 0, 0,
     "FILE.csv: write step,lm_loss,sop_loss,grad_norm,tokens_per_s,lr,val_lm_loss,val_sop_loss,val_sop_accuracy"},
    FILE_FLAGS,
    {"init-from", TEXT, AT(init_from), 0, 0,
     "DIR of checkpoints, of one checkpoint, or of a BERT of Hugging Face: the run begins with its\n"
     "                              model. Flags of the shape may be left out; they must not contradict the model"},
    RANK_FLAGS,
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

/* Sets the flags for a BERT of arXiv 1909.08053, table 4 and section 5.3: 1024 sequences per step, 2 million steps.
   Activations are recomputed, and the number of tensor parallel ranks is such that f16 fits into 32 GB. */
static void set_config(options *o) {
    static const struct {
        double hidden, heads, layers, tp;
    } table[] = {{1024, 16, 24, 1}, {2048, 32, 24, 1}, {2560, 40, 48, 4}};
    give_shape(o);
    o->hidden = table[o->config].hidden;
    o->heads = table[o->config].heads;
    o->layers = table[o->config].layers;
    o->tp = table[o->config].tp;
    o->seq = 512;
    o->vocab = BERT_VOCAB;
    o->batch = 1024;
    o->micro_batch = 4;
    o->steps = 2e6;
    o->warmup = 10000;
    o->lr = 1e-4;
    o->min_lr = 0;
    o->dropout = 0.1;
    o->recompute = MT_RECOMPUTE_FULL;
}

/* Checks that the vocabulary has the special tokens of the data. */
static int check_special(const options *o, const setup *s) {
    static const char *const names[] = {"[PAD]", "[CLS]", "[SEP]", "[MASK]"};
    for (int i = 0; i < 4; i++) {
        if (s->special[i] >= 0 && s->special[i] < o->vocab) continue;
        fprintf(stderr, PROGRAM ": --vocab %.15g: %s of the data is token %d\n", o->vocab, names[i],
                (int)s->special[i]);
        return 0;
    }
    return 1;
}

static int check_options(options *o, const setup *s) {
    if (!check_split(o) || !check_special(o, s)) return 0;
    if (s->train < 2 || s->count - s->train < 2)
        fprintf(stderr,
                PROGRAM ": the data have %lld sentences for training and %lld for validation; both need at least 2\n",
                (long long)s->train, (long long)(s->count - s->train));
    else return 1;
    return 0;
}

/* ---- data: sentences and words ----------------------------------------------------------------------------------- */

static int is_space(int32_t byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

/* Bytes above 127 are parts of letters in UTF-8. */
static int is_letter(int32_t byte) {
    return (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z') || byte > 127;
}

/* Marks the words and sentences of a text. White space before a sentence belongs to the sentence before it. */
static int mark_text(dataset *d) {
    const int32_t *t = d->tokens;
    int ended = 1;
    d->marks = (unsigned char *)calloc((size_t)d->count + 1, 1);
    if (!d->marks) fprintf(stderr, PROGRAM ": no memory for the marks of %lld bytes\n", (long long)d->count);
    for (int64_t i = 0; d->marks && i < d->count; i++) {
        if (i == 0 || !is_letter(t[i]) || !is_letter(t[i - 1])) d->marks[i] |= WORD_START;
        if (ended && !is_space(t[i])) {
            d->marks[i] |= SENTENCE_START;
            ended = 0;
        }
        if (t[i] == '\n' || (t[i] == ' ' && i > 0 && t[i - 1] == '.')) ended = 1;
    }
    return d->marks != NULL;
}

/* ---- the model of a checkpoint ----------------------------------------------------------------------------------- */

static mt_status read_origin(mt_context *ctx, job *j, const char *from) {
    const mt_bert_desc *d = &j->setup.origin;
    MT_TRY(mt_bert_desc_read(ctx, from, &j->setup.origin));
    take_number(j, from, "layers", d->layers, "layers");
    take_number(j, from, "hidden", d->layer.hidden, "hidden features");
    take_number(j, from, "heads", d->layer.heads, "heads");
    take_number(j, from, "ffn", d->layer.ffn, "features in its MLP");
    take_number(j, from, "vocab", d->vocab, "tokens in its vocabulary");
    take_choice(j, from, "placement", (int)d->layer.norm.placement);
    take_seq(j, from, d->max_seq);
    return MT_SUCCESS;
}

/* ---- data: lists of sentences ------------------------------------------------------------------------------------ */

/* Lists the sentences. Those that begin in the training part of the data are for training. */
static int find_sentences(const dataset *d, setup *s) {
    for (int64_t i = 0; i < d->count; i++) s->count += (d->marks[i] & SENTENCE_START) != 0;
    s->starts = (int64_t *)malloc((size_t)(s->count + 1) * sizeof *s->starts);
    if (!s->starts) fprintf(stderr, PROGRAM ": no memory for %lld sentences\n", (long long)s->count);
    for (int64_t i = 0, n = 0; s->starts && i < d->count; i++) {
        if (!(d->marks[i] & SENTENCE_START)) continue;
        s->train += i < d->train;
        s->starts[n++] = i;
    }
    if (s->starts) s->starts[s->count] = d->count;
    return s->starts != NULL;
}

/* Takes the special tokens of the file. In a text they are 256 to 259. */
static int find_tokens(const options *o, const dataset *d, setup *s) {
    for (int i = 0; i < 4; i++) s->special[i] = d->text ? 256 + i : d->header[PAD + i];
    if (d->text) return 1;
    if (!d->marks)
        fprintf(stderr, PROGRAM ": %s has no marks of sentences and words: make it with examples/text_to_bin.py bert\n",
                o->data);
    return d->marks != NULL;
}

static int prepare(job *j) {
    options *o = &j->o;
    dataset *d = &j->data;
    setup *s = &j->setup;
    double unit;
    if (find_origin(j) != MT_SUCCESS) return 0;
    if (!load_data(o, d) || (d->text && !mark_text(d)) || !find_tokens(o, d, s) || !find_sentences(d, s)) return 0;
    for (int64_t i = 0; !d->text && i < d->count; i++) d->hash = (d->hash ^ d->marks[i]) * 1099511628211u;
    if (o->vocab == 0) o->vocab = d->text ? 260 : BERT_VOCAB;
    unit = PAD_TO * (o->invariant > 0 ? o->invariant : o->tp); /* --invariant: the same on every split */
    s->padded_vocab = (int64_t)(ceil(o->vocab / unit) * unit);
    /* the model has replaced the flags, so the checks below would report values that nobody gave */
    if (j->refusal[0]) return 1;
    if (!check_options(o, s)) return 0;
    check_tokens(j);
    s->words = d->text ? 256 : (int32_t)o->vocab;
    return 1;
}

/* ---- data: sequences --------------------------------------------------------------------------------------------- */

/* A sequence of the run or of the validation. All its random numbers depend only on the seed and on these fields. */
typedef struct sequence {
    int training;
    uint64_t number;
    int32_t *ids, *targets, *types, length, order; /* ids, targets, types: [seq] */
} sequence;

enum { PLACE = 0x7fffffff, SWAP = 0x7ffffffe, IGNORED = -100 };

/* Draws four words for `what`: a place in the sequence, or PLACE or SWAP. */
static void draw(const options *o, const sequence *s, int32_t what, uint32_t r[4]) {
    uint64_t seed = (uint64_t)o->seed;
    uint32_t counter[4] = {(uint32_t)s->number, (uint32_t)(s->number >> 32), (uint32_t)what,
                           s->training ? 0x62657274 : 0x76616c69},
             key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    mt_philox4x32(counter, key, r);
}

/* Two segments of the data: the tokens [at[i], at[i] + count[i]). */
typedef struct segments {
    int64_t at[2], count[2];
} segments;

/* Draws consecutive sentences, as many as fit, and divides them at the start of a sentence. One sequence in ten is to
   be shorter, so that the model sees such sequences, too. The first two sentences are cut when they are too long. */
static segments draw_segments(const job *j, const sequence *q) {
    const setup *s = &j->setup;
    int64_t from = q->training ? 0 : s->train, to = q->training ? s->train : s->count;
    int64_t room = (int64_t)j->o.seq - 3, first, end, middle;
    uint32_t r[4];
    segments a;
    draw(&j->o, q, PLACE, r);
    first = from + (int64_t)(((uint64_t)r[0] << 32 | r[1]) % (uint64_t)(to - from - 1));
    if (r[2] % 10 == 0) room = 2 + (int64_t)(r[2] / 10 % (uint32_t)(room - 1));
    for (end = first + 2; end < to && s->starts[end + 1] - s->starts[first] <= room;) end++;
    middle = first + 1 + (int64_t)(r[3] % (uint32_t)(end - first - 1));
    a.at[0] = s->starts[first];
    a.at[1] = s->starts[middle];
    a.count[0] = a.at[1] - a.at[0];
    a.count[1] = s->starts[end] - a.at[1];
    while (a.count[0] + a.count[1] > room) a.count[a.count[1] > a.count[0]]--;
    return a;
}

/* Appends token t of segment `type` to a sequence. */
static void append(sequence *q, int32_t token, int32_t type) {
    q->ids[q->length] = token;
    q->types[q->length++] = type;
}

/* A word of a sequence: the tokens [begin, end). last: 1 if it is the last one of its segment. */
typedef struct word {
    int32_t begin, end, last;
    uint32_t key; /* words are visited in the order of their keys */
} word;

/* Builds a sequence without masks, and lists its words. Returns their number. */
static int build(const job *j, sequence *q, word *words) {
    const dataset *d = &j->data;
    const int32_t *special = j->setup.special;
    segments a = draw_segments(j, q);
    uint32_t r[4];
    int n = 0;
    draw(&j->o, q, SWAP, r);
    q->order = (int32_t)(r[0] & 1);
    q->length = 0;
    append(q, special[CLS - PAD], 0);
    for (int i = 0; i < 2; i++) {
        int which = i ^ q->order;
        for (int64_t k = 0; k < a.count[which]; k++) {
            if (k == 0 || d->marks[a.at[which] + k] & WORD_START) {
                word w = {q->length, q->length, 0, 0};
                words[n++] = w;
            }
            append(q, d->tokens[a.at[which] + k], i);
            words[n - 1].end = q->length;
        }
        words[n - 1].last = 1;
        append(q, special[SEP - PAD], i);
    }
    for (int64_t k = q->length; k < (int64_t)j->o.seq; k++) {
        q->ids[k] = special[PAD - PAD];
        q->types[k] = 0;
    }
    for (int64_t k = 0; k < (int64_t)j->o.seq; k++) q->targets[k] = IGNORED;
    return n;
}

/* Hides token `at`, which is to be predicted: 80 % become [MASK], 10 % a random token, and 10 % stay. */
static void hide(const job *j, sequence *q, int32_t at) {
    uint32_t r[4];
    draw(&j->o, q, at, r);
    q->targets[at] = q->ids[at];
    if (r[2] % 10 < 8) q->ids[at] = j->setup.special[MASK - PAD];
    else if (r[2] % 10 == 8) q->ids[at] = (int32_t)(r[3] % (uint32_t)j->setup.words);
}

/* Draws the number of words of an n-gram: 1, 2 or 3 with probabilities as 1 : 1/2 : 1/3. */
static int draw_ngram(uint32_t r) { return r % 11 < 6 ? 1 : r % 11 < 9 ? 2 : 3; }

static int by_key(const void *a, const void *b) {
    const word *x = *(const word *const *)a, *y = *(const word *const *)b;
    return x->key != y->key ? (x->key < y->key ? -1 : 1) : (x->begin < y->begin ? -1 : 1);
}

/* Hides n-grams of whole words in a random order, until 15 % of the tokens are hidden, as Megatron-LM does: an n-gram
   that is too long for the rest loses words, and one with a hidden token is left out. order [n] is scratch memory.
   Returns the number of hidden tokens. */
static int hide_words(const job *j, sequence *q, word *words, word **order, int n) {
    int budget = (int)fmax(1.0, floor(0.15 * q->length + 0.5)), done = 0;
    uint32_t r[4];
    for (int i = 0; i < n; i++) {
        draw(&j->o, q, words[i].begin, r);
        words[i].key = r[0];
        order[i] = &words[i];
    }
    qsort(order, (size_t)n, sizeof *order, by_key);
    for (int i = 0; i < n && done < budget; i++) {
        const word *w = order[i], *e = w;
        int32_t free_tokens = 0;
        draw(&j->o, q, w->begin, r);
        for (int k = draw_ngram(r[1]); k > 1 && !e->last; k--) e++;
        while (e >= w && e->end - w->begin > budget - done) e--;
        if (e < w) continue;
        for (int32_t at = w->begin; at < e->end; at++) free_tokens += q->targets[at] == IGNORED;
        if (free_tokens < e->end - w->begin) continue;
        for (int32_t at = w->begin; at < e->end; at++) hide(j, q, at);
        done += free_tokens;
    }
    return done;
}

/* Makes a sequence. Returns the number of tokens to predict; -1: there is no memory. */
static int make_sequence(const job *j, sequence *q) {
    size_t seq = (size_t)j->o.seq;
    word *words = (word *)malloc(seq * sizeof *words);
    word **order = (word **)malloc(seq * sizeof *order);
    int targets = words && order ? hide_words(j, q, words, order, build(j, q, words)) : -1;
    free(words);
    free(order);
    return targets;
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

/* What has no flag is as in the model that the run begins with. */
static mt_status create_model(trainer *t) {
    const options *o = &t->job->o;
    mt_bert_desc d = t->job->setup.origin;
    mt_transformer_layer_desc *l = &d.layer;
    if (!d.layers) l->activation = MT_GELU_ERF;
    d.vocab = (int64_t)o->vocab;
    d.layers = (int64_t)o->layers;
    d.max_seq = d.max_seq > (int64_t)o->seq ? d.max_seq : (int64_t)o->seq;
    d.no_binary_head = 0;
    d.embedding_dropout = (float)o->dropout;
    d.ignore_index = IGNORED;
    d.padded_vocab = t->job->setup.padded_vocab;
    l->hidden = (int64_t)o->hidden;
    l->heads = (int64_t)o->heads;
    l->ffn = (int64_t)o->ffn;
    l->norm.placement = (mt_ln_placement)o->placement;
    l->dropout.attention = l->dropout.hidden = (float)o->dropout;
    l->sequence_parallel = o->sequence_parallel;
    l->recompute = (mt_recompute)o->recompute;
    return mt_bert_create(t->ctx, t->params, &d, &t->model.bert);
}

static mt_status create_saved(trainer *t) {
    t->model.saved = (mt_bert_saved *)calloc((size_t)t->slots, sizeof *t->model.saved);
    t->model.staging = (int32_t *)malloc(3 * (size_t)t->job->o.seq * sizeof *t->model.staging);
    if (!t->model.saved || !t->model.staging) return MT_ERR_MEMORY;
    for (int i = 0; i < t->slots; i++) MT_TRY(mt_bert_saved_create(t->ctx, &t->model.bert, &t->model.saved[i]));
    return MT_SUCCESS;
}

static mt_status create_checkpoint(trainer *t, const mt_checkpoint_desc *files) {
    return mt_bert_checkpoint_create(t->ctx, t->params, &t->model.bert, files, &t->checkpoint);
}

static void destroy_model(trainer *t) {
    for (int i = 0; t->model.saved && i < t->slots; i++) mt_bert_saved_destroy(&t->model.saved[i]);
    free(t->model.saved);
    free(t->model.staging);
}

/* Copies sequence `number` of a pass, with its context rank's part of the tokens, to the device. */
static mt_status upload_inputs(const pass *p, const sequence *q, int64_t number) {
    trainer *t = p->t;
    int64_t at = number - p->first;
    MT_TRY(upload_sequence(p, IDS, number, q->ids));
    MT_TRY(upload_sequence(p, TARGETS, number, q->targets));
    MT_TRY(upload_sequence(p, TYPES, number, q->types));
    MT_TRY(mt_upload(t->ctx, &q->length, mt_tensor_make(input_of(t, LENGTHS, at), MT_I32, 1, 1)));
    return mt_upload(t->ctx, &q->order, mt_tensor_make(input_of(t, ORDER, at), MT_I32, 1, 1));
}

/* Adds the numbers of the data ranks. The sum is exact up to 2^24. */
static mt_status sum_over_data(trainer *t, float *x) {
    mt_tensor place = mt_tensor_cols(mt_tensor_rows(t->totals, 0, 1), 0, 1);
    if (t->grid.dp_size == 1) return MT_SUCCESS;
    MT_TRY(mt_upload(t->ctx, x, place));
    MT_TRY(mt_all_reduce(t->ctx, t->grid.dp, (float *)place.data, (float *)place.data, 1, MT_F32, MT_SUM));
    return mt_download(t->ctx, place, x);
}

static mt_status load_sequences(const pass *p) {
    trainer *t = p->t;
    const options *o = &t->job->o;
    int64_t seq = (int64_t)o->seq;
    float targets = 0;
    t->model.targets = 1;
    if (mt_context_device(t->ctx) == MT_DEVICE_META) return MT_SUCCESS;
    for (int64_t j = p->first; j < p->end; j++) {
        uint64_t number = (uint64_t)(p->training ? p->step * (int64_t)o->batch + j : j);
        sequence q = {p->training, number, t->model.staging, t->model.staging + seq, t->model.staging + 2 * seq, 0, 0};
        int hidden = make_sequence(t->job, &q);
        if (hidden < 0) return MT_ERR_MEMORY;
        targets += (float)hidden;
        MT_TRY(upload_inputs(p, &q, j));
    }
    MT_TRY(sum_over_data(t, &targets));
    t->model.targets = fmax(1.0, (double)targets);
    return MT_SUCCESS;
}

/* The loss is the mean over the tokens to predict, plus the mean over the sequences. */
static float lm_scale(const trainer *t) { return (float)(1 / t->model.targets); }
static float sop_scale(const trainer *t) { return (float)(1 / t->job->o.batch); }

/* Counts the losses of sequences that are less than ln 2: of two classes, the right one then has more than 1/2. Context
   rank 0 has these losses. */
static mt_status count_correct(trainer *t, mt_tensor losses, mt_tensor out) {
    float all[EVAL_SEQUENCES] = {0};
    int correct = 0;
    if (t->grid.cp_rank > 0) return MT_SUCCESS;
    MT_TRY(mt_download(t->ctx, losses, all));
    for (int64_t i = 0; i < losses.cols; i++) correct += all[i] < 0.693147f;
    return mt_fill(t->ctx, out, (float)correct);
}

static mt_status stage_forward(const pass *p, mt_batch *batch, const mt_action *a, int64_t at, mt_tensor input,
                               mt_tensor output) {
    trainer *t = p->t;
    mt_tensor losses = mt_tensor_rows(t->losses, a->slot, 1);
    mt_tensor lm = mt_tensor_cols(losses, 0, tokens_of(&t->job->o, batch->sequences));
    mt_tensor sop = mt_tensor_cols(losses, t->micro_tokens, batch->sequences);
    batch->lengths = input_of(t, LENGTHS, at);
    batch->token_types = input_of(t, TYPES, at);
    batch->backward_scale = lm_scale(t);
    MT_TRY(mt_bert_stage_forward(t->ctx, &t->model.bert, batch, input_of(t, IDS, at), input_of(t, TARGETS, at),
                                 input_of(t, ORDER, at), input, output, lm, sop,
                                 p->training ? &t->model.saved[a->slot] : NULL));
    if (!is_last_stage(t)) return MT_SUCCESS;
    MT_TRY(add_losses(t, a, LM, lm));
    MT_TRY(mt_sum(t->ctx, sop, total_of(t, a, SOP)));
    return p->training ? MT_SUCCESS : count_correct(t, sop, total_of(t, a, CORRECT));
}

static mt_status stage_backward(trainer *t, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    return mt_bert_stage_backward(t->ctx, &t->model.bert, lm_scale(t), sop_scale(t), doutput, dinput,
                                  &t->model.saved[a->slot]);
}

static void means_of(const pass *p, const float *sums, float *means) {
    means[LM] = (float)((double)sums[LM] / p->t->model.targets);
    means[SOP] = (float)((double)sums[SOP] / (double)p->of);
    means[CORRECT] = (float)((double)sums[CORRECT] / (double)p->of);
}

static float learning_rate(const options *o, int64_t step) {
    return mt_linear_schedule(step, (int64_t)o->warmup, (int64_t)o->steps, (float)o->lr, (float)o->min_lr);
}

static double model_flops(const trainer *t) {
    return mt_bert_flops(&t->model.bert.desc, (int64_t)t->job->o.batch, (int64_t)t->job->o.seq);
}

static const char *model_name(const options *o) {
    return o->placement == MT_POST_LN ? "BERT, post-LN" : "BERT, pre-LN";
}

/* Prints the number of parameters that papers give. It has the embeddings (tokens with the padding, positions, types),
   in each layer 12 h^2 + 13 h (with --ffn another number), the norm and the pooler. It does not have the other heads:
   the dense layer, norm and bias of the masked LM, and the two classes of the sentence order. */
static void print_more(const trainer *t) {
    const options *o = &t->job->o;
    double h = o->hidden, ffn = o->ffn > 0 ? o->ffn : 4 * h, rows = (double)t->job->setup.padded_vocab;
    double layer = 4 * h * h + 2 * h * ffn + 9 * h + ffn;
    printf("parameters with a vocabulary of %.15g, without heads except the pooler: %.15g\n", rows,
           (rows + o->seq + 2) * h + o->layers * layer + 2 * h + h * h + h);
}

static mt_status finish(trainer *t) {
    (void)t;
    return MT_SUCCESS;
}

static options defaults(void) {
    options o = default_options();
    o.layers = 4;
    o.hidden = 128;
    o.heads = 4;
    o.seq = 128;
    o.batch = 16;
    o.steps = 1000;
    o.warmup = 100;
    o.lr = 1e-3;
    o.weight_decay = 0.01;
    return o;
}

int main(int argc, char **argv) {
    job job = {.o = defaults()};
    int status = train_main(argc, argv, &job);
    free(job.setup.starts);
    return status;
}
