/* test_golden.c - tests the library against PyTorch.

   Small GPT-2 and Llama models, each with a tied and an untied head, BERT and residual-post-LN models, models with
   windows, soft caps, ALiBi, packed documents, masks and biases, and whole BERTs with both of their heads, are trained
   for 5 steps on every split (tensor x data x pipeline x sequence parallelism x micro-batches) and compared with what
   PyTorch computed in float64: logits, every loss, every gradient, the gradient norm, and every weight after the steps.
   tests/golden/make_golden.py and make_bert.py created the values and describe the files.

       cc -std=gnu17 -O2 -I. tests/test_golden.c -lpthread -lm      Run it in the root of the repository. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mt_harness.h"

#ifndef MT_TEST_DATA
#define MT_TEST_DATA "tests/golden"
#endif

/* ---- the files --------------------------------------------------------------------------------------------------- */

typedef struct record {
    char name[64];
    int32_t dtype, rows, cols; /* dtype 0: float, 1: int32_t */
    void *data;
} record;

typedef struct golden {
    const char *variant;
    record *records;
    int count;
} golden;

static void golden_free(golden *g) {
    for (int i = 0; i < g->count; i++) free(g->records[i].data);
    free(g->records);
    memset(g, 0, sizeof *g);
}

static int read_record(FILE *file, record *r) {
    if (fread(r->name, sizeof r->name, 1, file) != 1 || r->name[sizeof r->name - 1]) return 0;
    if (fread(&r->dtype, 4, 1, file) != 1) return 0;
    if (fread(&r->rows, 4, 1, file) != 1 || fread(&r->cols, 4, 1, file) != 1) return 0;
    if (r->dtype < 0 || r->dtype > 1 || r->rows < 1 || r->cols < 1 || r->rows > 4096 || r->cols > 4096) return 0;
    r->data = malloc((size_t)r->rows * (size_t)r->cols * 4);
    return r->data && fread(r->data, (size_t)r->rows * (size_t)r->cols * 4, 1, file) == 1;
}

/* Returns 1, or 0 if the file is missing, too short or too long. */
static int golden_read(const char *variant, golden *g) {
    char path[512], magic[8];
    int32_t count = 0;
    int ok;
    FILE *file;
    memset(g, 0, sizeof *g);
    g->variant = variant;
    snprintf(path, sizeof path, "%s/%s.bin", MT_TEST_DATA, variant);
    file = fopen(path, "rb");
    if (!file) return 0;
    ok = fread(magic, 8, 1, file) == 1 && memcmp(magic, "MTGOLD01", 8) == 0 && fread(&count, 4, 1, file) == 1 &&
         count > 0 && count < 1000;
    g->records = (record *)calloc(ok ? (size_t)count : 1, sizeof *g->records);
    ok = ok && g->records;
    for (g->count = 0; ok && g->count < count; g->count++) ok = read_record(file, &g->records[g->count]);
    ok = ok && fgetc(file) == EOF;
    fclose(file);
    return ok;
}

/* Call from the main thread only: it fails the test. */
static void golden_load(const char *variant, golden *g) {
    if (golden_read(variant, g)) return;
    golden_free(g);
    fail_msg("%s/%s.bin cannot be read; run this in the root of the repository", MT_TEST_DATA, variant);
}

static const record *find(const golden *g, const char *name) {
    for (int i = 0; i < g->count; i++)
        if (strcmp(g->records[i].name, name) == 0) return &g->records[i];
    return NULL;
}

static double number(const golden *g, const char *name) {
    char full[64];
    const record *r;
    snprintf(full, sizeof full, "config/%s", name);
    r = find(g, full);
    if (!r) return NAN;
    return r->dtype ? (double)*(const int32_t *)r->data : (double)*(const float *)r->data;
}

static int64_t integer(const golden *g, const char *name) { return (int64_t)number(g, name); }

/* What only some models have; 0 for the others. */
static double optional(const golden *g, const char *name) {
    double x = number(g, name);
    return isnan(x) ? 0.0 : x;
}

/* ---- comparing --------------------------------------------------------------------------------------------------- */

/* The largest error allowed, relative to the largest element of the tensor.

   A float has a relative rounding error of 6e-8. A gradient here is the result of some 30 operations with sums of up
   to 64 terms. PyTorch in float32 stays within 2e-6 of its own float64 gradients and within 1e-6 for losses and
   logits (make_golden.py prints this), and a split reorders sums. Five times these errors are allowed.

   Weights get the same errors through AdamW's division by sqrt(v), which enlarges them where a gradient is almost 0:
   there PyTorch is off by up to 1e-5. A key bias has a gradient of exactly 0 (it shifts all scores of a query
   alike); AdamW scales its rounding noise, up to 4e-8, by lr / eps = 1e3 per step. So the tolerance of its tensor, the
   QKV bias, is 5e-4.

   One wrong element, sign, mask or factor is an error of 1e-3 to 1: see test_comparison_catches_one_wrong_element. */
static double tolerance(const char *name) {
    size_t length = strlen(name);
    if (strncmp(name, "final/", 6) == 0)
        return length > 15 && strcmp(name + length - 15, "linear_qkv.bias") == 0 ? 5e-4 : 5e-5;
    if (strncmp(name, "gradient", 8) == 0) return 1e-5;
    if (strcmp(name, "step_loss") == 0) return 1e-5;
    return 5e-6; /* loss, logits, grad_norm */
}

/* Returns the largest |got - want| / max |want|, and its place in *where. The maximum is over the whole record; got has
   n elements from `first` on. Returns infinity if a value is not finite. */
static double worst_error(const record *want, int64_t first, const float *got, int64_t n, int64_t *where) {
    const float *w = (const float *)want->data;
    int64_t all = (int64_t)want->rows * want->cols;
    double scale = 0, worst = 0;
    *where = 0;
    for (int64_t i = 0; i < all; i++) scale = fmax(scale, fabs(w[i]));
    for (int64_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - w[first + i]) / scale;
        if (!isfinite(error)) error = INFINITY;
        if (error > worst) {
            worst = error;
            *where = first + i;
        }
    }
    return worst;
}

/* ---- one run ----------------------------------------------------------------------------------------------------- */

typedef enum micro_batches {
    WHOLE = 0,    /* all sequences of a data rank in one call */
    SINGLE = 1,   /* one sequence at a time: forward, then backward; in a pipeline 1F1B */
    IN_FLIGHT = 2 /* all forwards, one sequence each, then all backwards, last first; in a pipeline GPipe */
} micro_batches;

#define MAX_SEQUENCES 4
#define MAX_TOKENS 64
#define MAX_PARAMETER 8192
#define MAX_BIAS 4096
#define MESSAGE_BYTES 4096

typedef struct run {
    const golden *g;
    int tp, data, pipeline, sequence_parallel;
    int invariant; /* mt_context_desc.invariant */
    micro_batches micro;
    pthread_mutex_t lock;
    double worst[4]; /* largest error / tolerance: loss and logits, gradients, norm, weights after the steps */
    int failures;
    char message[MESSAGE_BYTES]; /* the first failures */
} run;

/* A GPT (mt_gpt), or a whole BERT (mt_bert). */
typedef struct model {
    mt_gpt gpt;
    mt_bert bert;
} model;

typedef struct kept {
    mt_gpt_saved gpt;
    mt_bert_saved bert;
} kept;

typedef struct rank {
    run *run;
    mt_comm *world;
    mt_context *ctx;
    mt_grid grid;
    mt_params *params;
    int is_bert;
    model model;
    kept saved[MAX_SEQUENCES];
    mt_optimizer optimizer;
    int64_t seq, first, count; /* the sequences of this data rank */
    float loss[MAX_TOKENS], logits[MAX_TOKENS * MAX_TOKENS], host[MAX_PARAMETER];
    float sop_loss[MAX_SEQUENCES], sop_logits[2 * MAX_SEQUENCES];
    /* of packed models: the boundaries of documents of each sequence, and of all sequences of this data rank */
    int32_t cu_seqlens[MAX_SEQUENCES + 1][MAX_TOKENS + 1];
    uint8_t mask[MAX_TOKENS * MAX_TOKENS];
    float dbias[MAX_BIAS]; /* of the whole global batch */
} rank;

static void report(rank *r, const char *format, ...) {
    run *run = r->run;
    size_t used;
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&run->lock);
    run->failures++;
    used = strlen(run->message);
    if (used < MESSAGE_BYTES - 256) {
        used += (size_t)snprintf(run->message + used, 32, "\n      rank %d: ", mt_comm_rank(r->world));
        vsnprintf(run->message + used, 220, format, args);
    }
    pthread_mutex_unlock(&run->lock);
    va_end(args);
}

/* Compares n values with elements first, first + 1, ... of a golden record. kind: index of run.worst. */
static void check(rank *r, int kind, const char *prefix, const char *name, int64_t first, const float *got, int64_t n) {
    char full[160];
    const record *want;
    int64_t where;
    double error, allowed;
    snprintf(full, sizeof full, "%s%s", prefix, name);
    want = find(r->run->g, full);
    if (!want) {
        report(r, "PyTorch has no %s", full);
        return;
    }
    if (first + n > (int64_t)want->rows * want->cols) {
        report(r, "%s has %d x %d elements, not %lld", full, want->rows, want->cols, (long long)(first + n));
        return;
    }
    error = worst_error(want, first, got, n, &where);
    allowed = tolerance(full);
    pthread_mutex_lock(&r->run->lock);
    if (!(error / allowed <= r->run->worst[kind])) r->run->worst[kind] = error / allowed;
    pthread_mutex_unlock(&r->run->lock);
    if (!(error <= allowed))
        report(r, "%s[%lld, %lld] is %.9g, PyTorch has %.9g; error %.2e of the largest element, %.0e allowed", full,
               (long long)(where / want->cols), (long long)(where % want->cols), (double)got[where - first],
               (double)((const float *)want->data)[where], error, allowed);
}

static mt_transformer_layer_desc describe_layer(const golden *g, int sequence_parallel) {
    mt_transformer_layer_desc d;
    memset(&d, 0, sizeof d);
    d.hidden = integer(g, "hidden");
    d.heads = integer(g, "heads");
    d.kv_heads = integer(g, "kv_heads");
    d.ffn = integer(g, "ffn");
    d.norm.placement = (mt_ln_placement)integer(g, "placement");
    d.norm.kind = (mt_norm_kind)integer(g, "norm");
    d.norm.eps = (float)number(g, "norm_eps");
    d.activation = (mt_activation)integer(g, "activation");
    d.scores.mask = (mt_mask)integer(g, "mask");
    d.scores.rotary_base = (float)number(g, "rotary_base");
    d.no_bias = (int)integer(g, "no_bias");
    d.scores.window = (int64_t)optional(g, "window");
    d.scores.softcap = (float)optional(g, "softcap");
    d.scores.alibi = (int)optional(g, "alibi");
    d.sequence_parallel = sequence_parallel;
    return d;
}

static mt_status create_gpt(rank *r) {
    const golden *g = r->run->g;
    mt_gpt_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = integer(g, "vocab");
    d.layers = integer(g, "layers");
    d.max_seq = integer(g, "seq");
    d.untied_head = (int)integer(g, "untied_head");
    d.label_smoothing = (float)number(g, "label_smoothing");
    d.ignore_index = (int32_t)integer(g, "ignore_index");
    d.layer = describe_layer(g, r->run->sequence_parallel);
    MT_TRY(mt_gpt_create(r->ctx, r->params, &d, &r->model.gpt));
    for (int i = 0; i < MAX_SEQUENCES; i++) MT_TRY(mt_gpt_saved_create(r->ctx, &r->model.gpt, &r->saved[i].gpt));
    return MT_SUCCESS;
}

static mt_status create_bert(rank *r) {
    const golden *g = r->run->g;
    mt_bert_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = integer(g, "vocab");
    d.layers = integer(g, "layers");
    d.max_seq = integer(g, "seq");
    d.token_types = integer(g, "token_types");
    d.ignore_index = (int32_t)integer(g, "ignore_index");
    d.layer = describe_layer(g, r->run->sequence_parallel);
    MT_TRY(mt_bert_create(r->ctx, r->params, &d, &r->model.bert));
    for (int i = 0; i < MAX_SEQUENCES; i++) MT_TRY(mt_bert_saved_create(r->ctx, &r->model.bert, &r->saved[i].bert));
    return MT_SUCCESS;
}

static int is_last_stage(const rank *r) { return r->grid.pp_rank + 1 == r->grid.pp_size; }

static const int32_t *tokens_of(const rank *r, const char *name, int64_t sequence) {
    return (const int32_t *)find(r->run->g, name)->data + sequence * r->seq;
}

/* Writes where the documents of `count` sequences begin and end, and returns the number of documents. */
static int64_t find_documents(const int32_t *positions, int64_t tokens, int32_t *cu_seqlens) {
    int64_t documents = 0;
    for (int64_t i = 0; i < tokens; i++)
        if (positions[i] == 0) cu_seqlens[documents++] = (int32_t)i;
    cu_seqlens[documents] = (int32_t)tokens;
    return documents;
}

/* Sets the fields of the batch that change scores. The arrays stay until the end of the run. */
static void set_scores(rank *r, int64_t from, int64_t count, mt_batch *b) {
    const golden *g = r->run->g;
    const record *positions = find(g, "positions"), *bias = find(g, "bias"), *mask = find(g, "mask");
    int64_t rows = integer(g, "heads") * r->seq;
    if (positions) {
        int32_t *cu_seqlens = r->cu_seqlens[count > 1 ? MAX_SEQUENCES : from - r->first];
        b->cu_seqlens = cu_seqlens;
        b->documents = find_documents(tokens_of(r, "positions", from), count * r->seq, cu_seqlens);
    }
    if (bias) {
        b->bias.batch = count;
        b->bias.heads = integer(g, "heads");
        b->bias.value = mt_tensor_f32((const float *)bias->data + from * rows * r->seq, count * rows, r->seq);
        b->bias.grad = mt_tensor_f32(r->dbias + from * rows * r->seq, count * rows, r->seq);
    }
    if (!mask) return;
    for (int64_t i = 0; i < r->seq * r->seq; i++) r->mask[i] = (uint8_t)((const int32_t *)mask->data)[i];
    b->bias.value = mt_tensor_make(r->mask, MT_U8, r->seq, r->seq);
}

/* Sequences [from, from + count) of the global batch. */
static mt_batch batch_of(rank *r, int64_t from, int64_t count) {
    const int32_t *lengths = (const int32_t *)find(r->run->g, "lengths")->data;
    int padded = 0;
    mt_batch b;
    memset(&b, 0, sizeof b);
    for (int64_t i = 0; i < integer(r->run->g, "sequences"); i++) padded |= lengths[i] < r->seq;
    b.sequences = count;
    b.seq = r->seq;
    b.first_sequence = from;
    b.lengths = padded ? lengths + from : NULL;
    b.token_types = r->is_bert ? tokens_of(r, "token_types", from) : NULL;
    set_scores(r, from, count, &b);
    return b;
}

/* The forward of one stage. saved NULL: evaluation */
static mt_status forward(rank *r, int64_t from, int64_t count, mt_tensor input, mt_tensor output, kept *saved) {
    mt_batch batch = batch_of(r, from, count);
    const int32_t *ids = tokens_of(r, "ids", from), *targets = tokens_of(r, "targets", from);
    mt_tensor loss = mt_tensor_f32(r->loss + (from - r->first) * r->seq, 1, count * r->seq);
    mt_tensor sop_loss = mt_tensor_f32(r->sop_loss + (from - r->first), 1, count);
    if (!r->is_bert)
        return mt_gpt_stage_forward(r->ctx, &r->model.gpt, &batch, ids, targets, input, output, loss,
                                    saved ? &saved->gpt : NULL);
    return mt_bert_stage_forward(r->ctx, &r->model.bert, &batch, ids, targets,
                                 (const int32_t *)find(r->run->g, "sentence_order")->data + from, input, output, loss,
                                 sop_loss, saved ? &saved->bert : NULL);
}

static mt_status backward(rank *r, mt_tensor doutput, mt_tensor dinput, kept *saved) {
    float scale = (float)(1.0 / number(r->run->g, "valid"));
    if (r->is_bert)
        MT_TRY(mt_bert_stage_backward(r->ctx, &r->model.bert, scale, (float)number(r->run->g, "sop_scale"), doutput,
                                      dinput, &saved->bert));
    else MT_TRY(mt_gpt_stage_backward(r->ctx, &r->model.gpt, scale, doutput, dinput, &saved->gpt));
    return mt_accumulate_gradients(r->ctx, r->params);
}

/* The functions of a pipeline. Evaluation and WHOLE have one micro-batch, of all sequences of this data rank. */
static mt_status evaluate_stage(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    rank *r = (rank *)user;
    (void)ctx, (void)a;
    return forward(r, r->first, r->count, input, output, NULL);
}

static mt_status forward_stage(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    rank *r = (rank *)user;
    int64_t count = r->run->micro == WHOLE ? r->count : 1;
    (void)ctx;
    return forward(r, r->first + a->micro_batch * count, count, input, output, &r->saved[a->slot]);
}

static mt_status backward_stage(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    rank *r = (rank *)user;
    (void)ctx;
    return backward(r, doutput, dinput, &r->saved[a->slot]);
}

/* evaluation 1: one forward of all sequences of this data rank */
static mt_status run_pipeline(rank *r, int evaluation) {
    mt_pipeline_stage stage;
    mt_action actions[6 * MAX_SEQUENCES];
    int whole = evaluation || r->run->micro == WHOLE, count = 0;
    mt_schedule schedule = evaluation                   ? MT_SCHEDULE_FORWARD_ONLY
                           : r->run->micro == IN_FLIGHT ? MT_SCHEDULE_GPIPE
                                                        : MT_SCHEDULE_1F1B;
    memset(&stage, 0, sizeof stage);
    stage.rows = (whole ? r->count : 1) * r->seq / (r->run->sequence_parallel ? r->run->tp : 1);
    stage.cols = integer(r->run->g, "hidden");
    stage.forward = evaluation ? evaluate_stage : forward_stage;
    stage.backward = evaluation ? NULL : backward_stage;
    stage.user = r;
    MT_TRY(mt_pipeline_schedule(schedule, r->grid.pp_size, r->grid.pp_rank, whole ? 1 : (int)r->count, actions,
                                6 * MAX_SEQUENCES, &count));
    return mt_pipeline_run(r->ctx, &r->grid, &stage, actions, count);
}

/* Runs forward and backward for the sequences of this data rank. Their losses are in r->loss of the last stage. */
static mt_status accumulate(rank *r) {
    size_t mark = mt_arena_mark(r->ctx);
    int64_t step = r->run->micro == WHOLE ? r->count : 1, end = r->first + r->count;
    mt_tensor none = mt_none();
    if (r->run->pipeline > 1) return run_pipeline(r, 0);
    if (r->run->micro == IN_FLIGHT) {
        for (int64_t i = r->first; i < end; i++) MT_TRY(forward(r, i, 1, none, none, &r->saved[i - r->first]));
        for (int64_t i = end - 1; i >= r->first; i--) MT_TRY(backward(r, none, none, &r->saved[i - r->first]));
        mt_arena_release(r->ctx, mark);
        return MT_SUCCESS;
    }
    for (int64_t i = r->first; i < end; i += step) {
        MT_TRY(forward(r, i, step, none, none, &r->saved[0]));
        MT_TRY(backward(r, none, none, &r->saved[0]));
        mt_arena_release(r->ctx, mark);
    }
    return MT_SUCCESS;
}

/* Checks the losses of this data rank, which the last stage has. */
static void check_losses(rank *r) {
    if (!is_last_stage(r)) return;
    check(r, 0, "", "loss", r->first * r->seq, r->loss, r->count * r->seq);
    if (r->is_bert) check(r, 0, "", "sop_loss", r->first, r->sop_loss, r->count);
}

/* Computes all logits of this data rank, and of a GPT also those of the last tokens alone. */
static mt_status check_logits(rank *r) {
    int64_t vocab = integer(r->run->g, "vocab"), tokens = r->count * r->seq, token = r->first * r->seq;
    mt_batch batch = batch_of(r, r->first, r->count);
    const int32_t *ids = tokens_of(r, "ids", r->first);
    mt_tensor all = mt_tensor_f32(r->logits, tokens, vocab), last = mt_tensor_f32(r->logits, r->count, vocab);
    if (r->is_bert)
        MT_TRY(mt_bert_logits(r->ctx, &r->model.bert, &batch, ids, all, mt_tensor_f32(r->sop_logits, r->count, 2)));
    else MT_TRY(mt_gpt_logits(r->ctx, &r->model.gpt, &batch, ids, all));
    check(r, 0, "", "logits", token * vocab, r->logits, tokens * vocab);
    if (r->is_bert) check(r, 0, "", "sop_logits", 2 * r->first, r->sop_logits, 2 * r->count);
    if (r->is_bert || batch.lengths) return MT_SUCCESS;
    MT_TRY(mt_gpt_logits(r->ctx, &r->model.gpt, &batch, ids, last));
    for (int64_t i = 0; i < r->count; i++)
        check(r, 0, "", "logits", (token + (i + 1) * r->seq - 1) * vocab, r->logits + i * vocab, vocab);
    return MT_SUCCESS;
}

static mt_status check_evaluation(rank *r) {
    MT_TRY(run_pipeline(r, 1));
    check_losses(r);
    return check_logits(r);
}

static mt_status gather(rank *r, const mt_param *p, mt_tensor shard, int64_t *n) {
    *n = p->desc.rows * p->desc.cols;
    if (*n > MAX_PARAMETER) return MT_ERR_SHAPE;
    for (int64_t i = 0; i < *n; i++) r->host[i] = NAN; /* detects elements that are not written */
    return mt_param_gather(r->ctx, r->params, p, shard, r->host);
}

static mt_status check_parameters(rank *r, int kind, const char *prefix) {
    for (int i = 0; i < mt_params_count(r->params); i++) {
        const mt_param *p = mt_params_at(r->params, i);
        int64_t n;
        MT_TRY(gather(r, p, kind == 1 ? p->grad : p->value, &n));
        check(r, kind, prefix, p->name, 0, r->host, n);
    }
    return MT_SUCCESS;
}

/* Checks that the stages together have as many parameters as PyTorch. */
static mt_status count_parameters(rank *r) {
    const golden *g = r->run->g;
    float expected = 0, found = 0;
    for (int i = 0; i < g->count; i++) expected += strncmp(g->records[i].name, "initial/", 8) == 0;
    for (int i = 0; i < mt_params_count(r->params); i++) /* the last stage's copy of the embedding is not counted */
        found += r->grid.pp_rank == 0 || !mt_params_at(r->params, i)->desc.shared_embedding;
    MT_TRY(mt_all_reduce(r->ctx, r->grid.pp, &found, &found, 1, MT_F32, MT_SUM));
    if (found != expected) report(r, "%g parameters, PyTorch has %g", (double)found, (double)expected);
    return MT_SUCCESS;
}

/* Checks that the library and PyTorch have the same parameters, and that gather returns what scatter stored. */
static mt_status load_parameters(rank *r) {
    const golden *g = r->run->g;
    MT_TRY(count_parameters(r));
    for (int i = 0; i < mt_params_count(r->params); i++) {
        mt_param *p = mt_params_at(r->params, i);
        char name[160];
        const record *want;
        int64_t n;
        snprintf(name, sizeof name, "initial/%s", p->name);
        want = find(g, name);
        if (!want || want->rows != p->desc.rows || want->cols != p->desc.cols) {
            report(r, "%s is [%lld, %lld], PyTorch has %s", name, (long long)p->desc.rows, (long long)p->desc.cols,
                   want ? "another shape" : "none");
            return MT_ERR_SHAPE;
        }
        MT_TRY(mt_param_scatter(r->ctx, p, (const float *)want->data, p->value));
        MT_TRY(gather(r, p, p->value, &n));
        if (memcmp(r->host, want->data, (size_t)n * 4) != 0) report(r, "%s is not what was scattered", p->name);
    }
    return MT_SUCCESS;
}

/* The loss of the global batch: sum(loss) / valid, and of a BERT also sop_scale * sum(sop_loss). */
static mt_status mean_loss(rank *r, float *mean) {
    double sum = 0;
    for (int64_t i = 0; i < r->count * r->seq; i++) sum += r->loss[i] / number(r->run->g, "valid");
    for (int64_t i = 0; r->is_bert && i < r->count; i++) sum += r->sop_loss[i] * number(r->run->g, "sop_scale");
    *mean = (float)sum;
    MT_TRY(mt_all_reduce(r->ctx, r->grid.dp, mean, mean, 1, MT_F32, MT_SUM));
    return mt_broadcast(r->ctx, r->grid.pp, mean, mean, 1, MT_F32, r->grid.pp_size - 1);
}

/* Sums the gradient of the bias over all ranks, and checks it. */
static mt_status check_bias_gradient(rank *r) {
    const record *bias = find(r->run->g, "bias");
    size_t n = bias ? (size_t)bias->rows * (size_t)bias->cols : 0;
    if (!bias) return MT_SUCCESS;
    MT_TRY(mt_all_reduce(r->ctx, r->world, r->dbias, r->dbias, n, MT_F32, MT_SUM));
    check(r, 1, "", "gradient_bias", 0, r->dbias, (int64_t)n);
    return MT_SUCCESS;
}

static mt_status train(rank *r) {
    const golden *g = r->run->g;
    float lr = (float)number(g, "lr"), max_norm = (float)number(g, "max_norm");
    for (int64_t step = 0; step < integer(g, "steps"); step++) {
        float norm = NAN, mean = NAN;
        for (int i = 0; i < MAX_TOKENS; i++) r->loss[i] = NAN;
        for (int i = 0; i < MAX_SEQUENCES; i++) r->sop_loss[i] = NAN;
        MT_TRY(mt_params_zero_grad(r->ctx, r->params));
        MT_TRY(accumulate(r));
        MT_TRY(mt_sync_gradients(r->ctx, r->params));
        MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
        if (step == 0) {
            check_losses(r);
            MT_TRY(check_parameters(r, 1, "gradient/"));
            MT_TRY(check_bias_gradient(r));
            check(r, 2, "", "grad_norm", 0, &norm, 1);
        }
        MT_TRY(mean_loss(r, &mean));
        check(r, 3, "", "step_loss", step, &mean, 1);
        MT_TRY(mt_optimizer_step(r->ctx, &r->optimizer, lr, mt_clip_coefficient(norm, max_norm)));
    }
    return check_parameters(r, 3, "final/");
}

static mt_status build(rank *r) {
    const golden *g = r->run->g;
    mt_grid_desc shape = {.tp = r->run->tp, .dp = r->run->data, .pp = r->run->pipeline};
    mt_context_desc where;
    mt_optimizer_desc adam = {(float)number(g, "beta1"),
                              (float)number(g, "beta2"),
                              (float)number(g, "adam_eps"),
                              (float)number(g, "weight_decay"),
                              0,
                              0};
    memset(&where, 0, sizeof where);
    where.arena_bytes = (size_t)8 << 20;
    where.invariant = r->run->invariant;
    MT_TRY(mt_grid_create(r->world, &shape, &r->grid));
    MT_TRY(mt_context_create(r->world, &where, &r->ctx));
    MT_TRY(mt_params_create(r->ctx, &r->grid, &r->params));
    r->is_bert = find(g, "config/token_types") != NULL;
    MT_TRY(r->is_bert ? create_bert(r) : create_gpt(r));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_optimizer_create(r->ctx, r->params, &adam, &r->optimizer));
    r->seq = integer(g, "seq");
    r->count = integer(g, "sequences") / r->run->data;
    r->first = r->count * r->grid.dp_rank;
    return MT_SUCCESS;
}

static mt_status run_rank(rank *r) {
    MT_TRY(build(r));
    MT_TRY(load_parameters(r));
    MT_TRY(check_evaluation(r));
    return train(r);
}

static mt_status rank_main(mt_comm *world, void *user) {
    rank *r = (rank *)calloc(1, sizeof *r);
    mt_status status;
    if (!r) return MT_ERR_MEMORY;
    r->run = (run *)user;
    r->world = world;
    status = run_rank(r);
    if (status != MT_SUCCESS)
        report(r, "%s: %s", mt_status_name(status), r->ctx ? mt_last_error(r->ctx) : mt_comm_last_error(world));
    if (r->ctx) {
        mt_optimizer_destroy(r->ctx, &r->optimizer);
        for (int i = 0; i < MAX_SEQUENCES; i++) mt_gpt_saved_destroy(&r->saved[i].gpt);
        for (int i = 0; i < MAX_SEQUENCES; i++) mt_bert_saved_destroy(&r->saved[i].bert);
        mt_params_destroy(r->params);
    }
    mt_context_destroy(r->ctx);
    mt_grid_destroy(&r->grid);
    free(r);
    return status;
}

static void silent(void *user, mt_log_level level, const char *message) {
    (void)user, (void)level, (void)message; /* the run's message contains it */
}

static void execute(run *run) {
    mt_launch_desc launch;
    mt_status status;
    memset(&launch, 0, sizeof launch);
    launch.ranks = run->tp * run->data * run->pipeline;
    launch.timeout_s = 3600;
    launch.logger.log = silent;
    pthread_mutex_init(&run->lock, NULL);
    status = mt_launch(&launch, rank_main, run);
    pthread_mutex_destroy(&run->lock);
    if (status != MT_SUCCESS && !run->failures) {
        run->failures = 1;
        snprintf(run->message, sizeof run->message, "\n      mt_launch: %s", mt_status_name(status));
    }
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static const char *micro_name(micro_batches micro) {
    return micro == WHOLE ? "whole batch" : micro == SINGLE ? "one by one" : "in flight";
}

/* Returns 1 if the split is possible: sequence parallelism divides the tokens of every call, and invariant mode those
   of every training call. Pipelines have at most 8 ranks. */
static int possible(const golden *g, const run *run) {
    int64_t sequences = run->micro == WHOLE ? integer(g, "sequences") / run->data : 1,
            tokens = sequences * integer(g, "seq");
    if (run->pipeline > 1 && (integer(g, "layers") % run->pipeline != 0 || run->tp * run->data > 4)) return 0;
    if (run->tp > integer(g, "heads")) return 0;
    if (run->invariant && (run->invariant % run->tp != 0 || tokens % run->invariant != 0)) return 0;
    return !run->sequence_parallel || (run->tp > 1 && tokens % run->tp == 0);
}

static int execute_and_print(run *run, double worst[4]) {
    execute(run);
    for (int i = 0; i < 4; i++)
        if (!(run->worst[i] <= worst[i])) worst[i] = run->worst[i];
    if (run->failures)
        print_message("   %s, tensor %d, data %d, pipeline %d, sequence parallel %d, invariant %d, %s: %d wrong%s\n",
                      run->g->variant, run->tp, run->data, run->pipeline, run->sequence_parallel, run->invariant,
                      micro_name(run->micro), run->failures, run->message);
    return run->failures != 0;
}

/* tensor 3 divides neither the heads nor the vocabulary: there is padding, and with 4 groups a rank without heads. */
static void check_variant(const char *variant) {
    static const int tensors[] = {1, 2, 3, 4, 8};
    double worst[4] = {0, 0, 0, 0};
    int runs = 0, wrong = 0, shards = 1;
    golden g;
    golden_load(variant, &g);
    while (2 * shards <= integer(&g, "heads")) shards *= 2;
    for (size_t t = 0; t < sizeof tensors / sizeof *tensors; t++)
        for (int variation = 0; variation < 48; variation++) {
            run run;
            memset(&run, 0, sizeof run);
            run.g = &g;
            run.tp = tensors[t];
            run.data = 1 + variation % 2;
            run.sequence_parallel = variation / 2 % 2;
            run.micro = (micro_batches)(variation / 4 % 3);
            run.invariant = variation / 12 % 2 ? shards : 0;
            run.pipeline = 1 + variation / 24;
            if (!possible(&g, &run)) continue;
            runs++;
            wrong += execute_and_print(&run, worst);
        }
    print_message("   %s: %d splits; largest error, as a part of what is allowed: loss and logits %.2f, "
                  "gradients %.2f, norm %.2f, after 5 steps %.2f\n",
                  variant, runs, worst[0], worst[1], worst[2], worst[3]);
    golden_free(&g);
    assert_int_equal(wrong, 0);
}

static void test_gpt2(void **state) {
    (void)state;
    check_variant("gpt2");
}

static void test_llama(void **state) {
    (void)state;
    check_variant("llama");
}

static void test_bert(void **state) {
    (void)state;
    check_variant("bert");
}

static void test_residual_post_ln(void **state) {
    (void)state;
    check_variant("residual_post_ln");
}

static void test_window_packed(void **state) {
    (void)state;
    check_variant("window_packed");
}

static void test_alibi_bias(void **state) {
    (void)state;
    check_variant("alibi_bias");
}

static void test_mask_packed(void **state) {
    (void)state;
    check_variant("mask_packed");
}

static void test_gpt2_untied(void **state) {
    (void)state;
    check_variant("gpt2_untied");
}

static void test_llama_tied(void **state) {
    (void)state;
    check_variant("llama_tied");
}

static void test_bert_post_ln(void **state) {
    (void)state;
    check_variant("bert_post_ln");
}

static void test_bert_pre_ln(void **state) {
    (void)state;
    check_variant("bert_pre_ln");
}

/* Changes elements of every compared record, one at a time, by 1e-3 of the largest element. Each change must be found,
   at the right place. */
static void test_comparison_catches_one_wrong_element(void **state) {
    golden g;
    int64_t missed = 0;
    (void)state;
    golden_load("gpt2", &g);
    for (int i = 0; i < g.count; i++) {
        record *r = &g.records[i];
        int64_t n = (int64_t)r->rows * r->cols, where;
        float *copy, largest = 0;
        if (r->dtype != 0 || strncmp(r->name, "config/", 7) == 0 || strncmp(r->name, "initial/", 8) == 0) continue;
        copy = (float *)malloc((size_t)n * sizeof *copy);
        assert_non_null(copy);
        memcpy(copy, r->data, (size_t)n * sizeof *copy);
        missed += worst_error(r, 0, copy, n, &where) != 0;
        for (int64_t e = 0; e < n; e++) largest = fmaxf(largest, fabsf(copy[e]));
        for (int64_t e = 0; e<n; e += n> 500 ? 37 : 1) {
            copy[e] += 1e-3f * largest;
            missed += !(worst_error(r, 0, copy, n, &where) > tolerance(r->name)) || where != e;
            copy[e] = NAN;
            missed += !(worst_error(r, 0, copy, n, &where) > tolerance(r->name)) || where != e;
            copy[e] = ((float *)r->data)[e];
        }
        free(copy);
    }
    golden_free(&g);
    assert_int_equal(missed, 0);
}

/* Runs against golden values of which one is wrong. The run must fail and name this element. */
static void check_planted(const char *name, int64_t element, const char *expected) {
    golden g;
    run run;
    float largest = 0, *values = NULL;
    memset(&run, 0, sizeof run);
    golden_load("llama", &g);
    for (int i = 0; i < g.count; i++)
        if (strcmp(g.records[i].name, name) == 0) values = (float *)g.records[i].data;
    assert_non_null(values);
    for (int64_t i = 0; i < (int64_t)find(&g, name)->rows * find(&g, name)->cols; i++)
        largest = fmaxf(largest, fabsf(values[i]));
    values[element] += 1e-3f * largest;
    run.g = &g;
    run.tp = 2;
    run.data = run.pipeline = 1;
    execute(&run);
    golden_free(&g);
    if (run.failures != 2 || !strstr(run.message, expected))
        print_message("   %d failures, expected 2 with \"%s\":%s\n", run.failures, expected, run.message);
    assert_int_equal(run.failures, 2); /* both ranks see it */
    assert_non_null(strstr(run.message, expected));
}

static void test_run_catches_a_planted_error(void **state) {
    (void)state;
    check_planted("gradient/decoder.layers.1.mlp.linear_fc1.weight", 67 * 32 + 5, "linear_fc1.weight[67, 5]");
    check_planted("final/output_layer.weight", 36 * 32 + 31, "final/output_layer.weight[36, 31]");
    check_planted("grad_norm", 0, "grad_norm[0, 0]");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_comparison_catches_one_wrong_element),
        cmocka_unit_test(test_gpt2),
        cmocka_unit_test(test_llama),
        cmocka_unit_test(test_bert),
        cmocka_unit_test(test_residual_post_ln),
        cmocka_unit_test(test_window_packed),
        cmocka_unit_test(test_alibi_bias),
        cmocka_unit_test(test_mask_packed),
        cmocka_unit_test(test_gpt2_untied),
        cmocka_unit_test(test_llama_tied),
        cmocka_unit_test(test_bert_post_ln),
        cmocka_unit_test(test_bert_pre_ln),
        cmocka_unit_test(test_run_catches_a_planted_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
