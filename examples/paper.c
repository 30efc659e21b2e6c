/* paper - the tables of arXiv 1909.08053 (Megatron-LM) beside what the planner of this library predicts.

   cc -O2 -I. examples/paper.c -o paper -lm -lpthread && ./paper

   It trains nothing and needs no GPU. Each training step runs once on MT_DEVICE_META, which keeps a trace of it, and
   mt_plan_step predicts its time on a machine that is described by a text. There are two pages:
   1. The machine of the paper, DGX-2H servers. Peak and bandwidths are those of data sheets, the bandwidths times an
      assumed factor, which was chosen for links and network after a comparison with the paper. Latencies are assumed.
      The rate of the products is fitted to the 39 TFLOP/s of the 1.2B model on one GPU; the program finds it by
      bisection. Each prediction is printed with the number of the paper and the error.
   2. The same steps on H100 servers. Nothing was measured on these.
   What needs trained weights, data or GPUs is listed at the end, with the commands that compute it.
   docs/paper.md explains the output. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the models of the paper ------------------------------------------------------------------------------------- */

enum { SEQ = 1024, BERT_SEQ = 512, BATCH = 8, REPLICAS = 64, GPT2_VOCAB = 50257, PADDED_VOCAB = 51200 };
enum { BERT_VOCAB = 30522 };

typedef struct shape {
    const char *name;
    int hidden, layers, heads, tp;
    double parameters; /* as the paper prints them */
} shape;

/* Table 1: the models of the scaling studies. */
static const shape gpt[] = {{"GPT-2 1.2B", 1536, 40, 16, 1, 1.2e9},
                            {"GPT-2 2.5B", 1920, 54, 20, 2, 2.5e9},
                            {"GPT-2 4.2B", 2304, 64, 24, 4, 4.2e9},
                            {"GPT-2 8.3B", 3072, 72, 32, 8, 8.3e9}};
/* Table 2: the models that were trained. The 8.3B has fewer heads here. The 2.5B is that of table 1. */
static const shape gpt_355m = {"GPT-2 355M", 1024, 24, 16, 1, 355e6};
static const shape gpt_trained = {"GPT-2 8.3B", 3072, 72, 24, 8, 8.3e9};
/* Table 4. */
static const shape bert[] = {{"BERT 336M", 1024, 24, 16, 1, 336e6},
                             {"BERT 1.3B", 2048, 24, 32, 1, 1.3e9},
                             {"BERT 3.9B", 2560, 48, 40, 4, 3.9e9}};

/* ---- the machines ------------------------------------------------------------------------------------------------ */

/* The numbers of a machine. Rates are per second and of one GPU, except `network`, which is of a node. */
typedef struct sheet {
    const char *name;
    mt_dtype dtype;
    double peak, memory, link, network; /* of data sheets; link and network: bytes each way */
    double products;                    /* FLOP/s of products: fitted, or an assumption */
    double capacity;                    /* bytes of memory */
    int node;                           /* GPUs in a node */
    int eager;    /* 1: attention stores its scores, and data ranks sum gradients in f16, as the code of the paper */
    int overlaps; /* 1: the sums of gradients overlap with backward */
} sheet;

#define ACHIEVED                                                                                                       \
    0.83 /* of the data sheet's rates: assumed for memory, for link and network chosen as in docs/paper.md */
#define OPERATOR_SECONDS 5e-6 /* to launch an operator: an assumption */
#define LINK_LATENCY 5e-6     /* assumptions */
#define NETWORK_LATENCY 10e-6
#define H100_PRODUCTS 0.70  /* of the peak: an assumption */
#define H100_ATTENTION 0.50 /* of the rate of products: an assumption */

static const sheet v100 = {.name = "DGX-2H (V100-SXM3 32 GB)",
                           .dtype = MT_F16,
                           .peak = 130e12,
                           .memory = 900e9,
                           .link = 150e9,
                           .network = 100e9,
                           .capacity = 32e9,
                           .node = 16,
                           .eager = 1};
static const sheet h100 = {.name = "HGX H100 (SXM5 80 GB)",
                           .dtype = MT_BF16,
                           .peak = 989e12,
                           .memory = 3350e9,
                           .link = 450e9,
                           .network = 400e9,
                           .capacity = 80e9,
                           .products = H100_PRODUCTS * 989e12,
                           .node = 8,
                           .overlaps = 1};

/* Bytes that attention reads and writes for each score in the code of the paper, which is plain PyTorch: a call reads
   and writes all scores in f16. Forward: the product writes them; scale, mask (two calls) and softmax read and write;
   dropout reads and writes, and writes its mask of bytes; the product reads. Backward: the product of the values reads
   and that of the scores writes; dropout reads, writes and reads its mask; softmax reads twice and writes; mask and
   scale read and write; two products read. */
#define FORWARD_BYTES (2 * (1 + 2 + 4 + 2 + 2 + 1) + 1)
#define BACKWARD_BYTES (2 * (1 + 1 + 2 + 3 + 2 + 2 + 2) + 1)

/* The rates of attention for heads of `size` features, in FLOP/s of the trace, in which the scores that the mask
   excludes do not count. The code of the paper computes them as well. */
static void attention_rates(const sheet *s, double size, double *forward, double *backward) {
    double memory = ACHIEVED * s->memory, counted = 0.5 * (1 + 1.0 / SEQ);
    *forward = *backward = H100_ATTENTION * s->products;
    if (!s->eager) return;
    *forward = counted * 4 * size / (4 * size / s->products + FORWARD_BYTES / memory);
    *backward = counted * 8 * size / (8 * size / s->products + BACKWARD_BYTES / memory);
}

enum { TEXT_BYTES = 1024 };

/* Writes the text of a machine, see mt_machine in mt_parallel.h. */
static void describe(const sheet *s, double head_size, char text[TEXT_BYTES]) {
    const char *type = mt_dtype_name(s->dtype);
    double forward, backward;
    attention_rates(s, head_size, &forward, &backward);
    snprintf(text, TEXT_BYTES,
             "name %s\npeak %s %.9g\ngemm * * * * %.9g\nmemory * * %.9g\noperator %.9g\n"
             "attention mt_attention_forward %s %.9g\nattention mt_attention_backward %s %.9g\n"
             "node %d\nlink %.9g %.9g\nnetwork %.9g %.9g\noverlap %d\n",
             s->name, type, s->peak, s->products, ACHIEVED * s->memory, OPERATOR_SECONDS, type, forward, type, backward,
             s->node, ACHIEVED * s->link, LINK_LATENCY, ACHIEVED * s->network, NETWORK_LATENCY, s->overlaps);
}

/* ---- one step on the meta device --------------------------------------------------------------------------------- */

/* Memory of a rank in bytes. */
typedef struct memory {
    double model, optimizer, activations; /* model: parameters and gradients; activations: with scratch memory */
} memory;

/* What a rank needs for a step. */
typedef struct rank {
    mt_comm *world;
    mt_context *ctx;
    mt_grid grid;
    mt_params *params;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer adam;
    mt_step step;
} rank;

static void rank_destroy(rank *r) {
    mt_step_destroy(r->ctx, &r->step);
    mt_gpt_saved_destroy(&r->saved);
    mt_optimizer_destroy(r->ctx, &r->adam);
    mt_params_destroy(r->params);
    mt_grid_destroy(&r->grid);
    mt_context_destroy(r->ctx);
    mt_comm_destroy(r->world);
}

/* Rank 0 of a grid whose other ranks do not exist. The caller destroys *r, also after an error. */
static mt_status rank_create(int tp, int dp, mt_dtype dtype, rank *r) {
    mt_context_desc where = {.device = MT_DEVICE_META};
    mt_grid_desc grid = {.tp = tp, .dp = dp};
    memset(r, 0, sizeof *r);
    MT_TRY(mt_comm_create_meta(tp * dp, 0, &r->world));
    MT_TRY(mt_context_create(r->world, &where, &r->ctx));
    MT_TRY(mt_grid_create(r->world, &grid, &r->grid));
    MT_TRY(mt_params_create(r->ctx, &r->grid, &r->params));
    return mt_params_set_dtype(r->ctx, r->params, dtype);
}

/* The GPT-2 of the paper: dropout of 0.1, and each layer is recomputed in backward (section 4.2). */
static mt_gpt_desc gpt_of(const shape *m) {
    mt_gpt_desc d = {.vocab = GPT2_VOCAB,
                     .padded_vocab = PADDED_VOCAB,
                     .layers = m->layers,
                     .max_seq = SEQ,
                     .embedding_dropout = 0.1f,
                     .layer = {.hidden = m->hidden,
                               .heads = m->heads,
                               .dropout.attention = 0.1f,
                               .dropout.hidden = 0.1f,
                               .recompute = MT_RECOMPUTE_FULL}};
    return d;
}

/* Pointers are never read on MT_DEVICE_META, but must not be NULL. */
static mt_status one_step(rank *r, int sequences) {
    static int32_t ids[BATCH * SEQ];
    static float losses[BATCH * SEQ];
    float scale = 1.0f / (float)(sequences * SEQ * r->grid.dp_size);
    mt_batch batch = {.sequences = sequences,
                      .seq = SEQ,
                      .random_offset = mt_step_random_offset(&r->step),
                      .loss_scale = mt_step_loss_scale(&r->step),
                      .backward_scale = scale};
    MT_TRY(mt_step_begin(r->ctx, &r->step, 1e-4f, 1));
    MT_TRY(mt_params_zero_grad_lazy(r->ctx, r->params));
    MT_TRY(mt_gpt_forward(r->ctx, &r->gpt, &batch, ids, ids, mt_tensor_f32(losses, 1, sequences * SEQ), &r->saved));
    MT_TRY(mt_sync_gradients_begin(r->ctx, r->params));
    MT_TRY(mt_gpt_backward(r->ctx, &r->gpt, scale, &r->saved));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    return mt_step_update(r->ctx, &r->step, mt_none());
}

static mt_status step_of(rank *r, const shape *m, mt_trace *trace, memory *used) {
    mt_gpt_desc model = gpt_of(m);
    mt_loss_scaler scaler;
    mt_trace set_up;
    MT_TRY(mt_gpt_create(r->ctx, r->params, &model, &r->gpt));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    used->model = (double)mt_context_allocated(r->ctx);
    MT_TRY(mt_gpt_saved_create(r->ctx, &r->gpt, &r->saved));
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, &r->adam));
    MT_TRY(mt_loss_scaler_create(r->ctx, NULL, &scaler));
    MT_TRY(mt_step_create(r->ctx, &r->adam, &scaler, 1.0f, &r->step));
    MT_TRY(mt_context_take_trace(r->ctx, &set_up));
    mt_trace_free(&set_up);
    MT_TRY(one_step(r, BATCH));
    used->optimizer = (double)mt_context_allocated(r->ctx) - used->model;
    used->activations = (double)mt_arena_peak(r->ctx);
    return mt_context_take_trace(r->ctx, trace);
}

/* The code of the paper sums the gradients of data ranks in f16, this library in f32. */
static void halve_gradients(mt_trace *trace, const rank *r) {
    for (size_t i = 0; i < trace->count; i++) {
        mt_trace_entry *e = &trace->entries[i];
        if (e->work == MT_WORK_COMMUNICATION && e->ranks == r->grid.dp_size &&
            e->span == (e->ranks - 1) * r->grid.tp_size && e->dtype == MT_F32 && r->grid.dp_size > 1)
            e->bytes /= 2;
    }
}

static int report(const char *what, mt_context *ctx, mt_status status) {
    if (status == MT_SUCCESS) return 1;
    fprintf(stderr, "paper: %s: %s: %s\n", what, mt_status_name(status), ctx ? mt_last_error(ctx) : "");
    return 0;
}

static int trace_step(const sheet *s, const shape *m, int tp, int dp, mt_trace *trace, memory *used) {
    rank r;
    mt_status status = rank_create(tp, dp, s->dtype, &r);
    if (status == MT_SUCCESS) status = step_of(&r, m, trace, used);
    int ok = report(m->name, r.ctx, status);
    if (ok && s->eager) halve_gradients(trace, &r);
    rank_destroy(&r);
    return ok;
}

static int plan(const sheet *s, const shape *m, const mt_trace *trace, mt_step_time *out) {
    mt_context_desc meta = {.device = MT_DEVICE_META};
    mt_context *ctx = NULL;
    mt_machine *machine = NULL;
    char text[TEXT_BYTES];
    describe(s, (double)m->hidden / m->heads, text);
    mt_status status = mt_context_create(NULL, &meta, &ctx);
    if (status == MT_SUCCESS) status = mt_machine_create(ctx, text, &machine);
    if (status == MT_SUCCESS) status = mt_plan_step(ctx, machine, trace, 1, out);
    int ok = report(s->name, ctx, status);
    mt_machine_destroy(machine);
    mt_context_destroy(ctx);
    return ok;
}

/* Predicts a step of BATCH sequences for each of dp replicas. After an error the program ends. */
static mt_step_time predict(const sheet *s, const shape *m, int tp, int dp) {
    mt_step_time t;
    mt_trace trace = {NULL, 0};
    memory used;
    int ok = trace_step(s, m, tp, dp, &trace, &used) && plan(s, m, &trace, &t);
    mt_trace_free(&trace);
    if (!ok) exit(1);
    return t;
}

/* What a step of BATCH sequences needs, without data ranks. */
static memory memory_of(const sheet *s, const shape *m, int tp) {
    memory used;
    mt_trace trace = {NULL, 0};
    int ok = trace_step(s, m, tp, 1, &trace, &used);
    mt_trace_free(&trace);
    if (!ok) exit(1);
    return used;
}

/* FLOP/s of a GPU. Recomputed FLOPs count, as in the paper. */
static double flops_of(const mt_step_time *t) { return t->flops + t->recomputed; }
static double rate_of(const mt_step_time *t) { return flops_of(t) / t->seconds; }

/* Finds the rate of products with which the 1.2B model has 39 TFLOP/s on one GPU. */
static double fit_products(sheet s) {
    double low = 39e12, high = 1e15;
    mt_trace trace = {NULL, 0};
    memory used;
    int ok = trace_step(&s, &gpt[0], 1, 1, &trace, &used);
    for (int i = 0; ok && i < 60; i++) {
        mt_step_time t;
        s.products = 0.5 * (low + high);
        ok = plan(&s, &gpt[0], &trace, &t);
        if (ok && rate_of(&t) < 39e12) low = s.products;
        else high = s.products;
    }
    mt_trace_free(&trace);
    if (!ok) exit(1);
    return s.products;
}

/* ---- tables ------------------------------------------------------------------------------------------------------ */

/* Errors of one kind of rows. */
typedef struct errors {
    int rows;
    double sum; /* of the absolute values, in percent */
} errors;

static errors counts, times, again; /* again: of rows with a step that another row has; they are in no mean */

static double mean(errors e) { return e.rows ? e.sum / e.rows : 0; }

static void head(const char *title, const char *columns, const char *unit) {
    printf("\n%s\n  %-36s %12s %10s %9s\n", title, columns, unit, "paper", "error");
}

/* Prints a row. e: where its error counts; NULL: nowhere. */
static void row(const char *name, double predicted, double paper, int decimals, errors *e) {
    double error = 100 * (predicted / paper - 1);
    printf("  %-36s %12.*f %10.*f ", name, decimals, predicted, decimals, paper);
    if (!e) printf("%9s\n", "-");
    else printf("%+7.1f %%%s\n", fabs(error) < 0.05 ? 0 : error, e == &again ? "  again" : "");
    if (!e) return;
    e->rows++;
    e->sum += fabs(error);
}

static int64_t count_parameters(const shape *m, int is_bert) {
    rank r;
    mt_bert bert_out;
    mt_bert_desc b = {.vocab = BERT_VOCAB,
                      .layers = m->layers,
                      .max_seq = BERT_SEQ,
                      .layer = {.hidden = m->hidden, .heads = m->heads, .activation = MT_GELU_ERF}};
    mt_gpt_desc g = gpt_of(m);
    mt_status status = rank_create(m->tp, 1, MT_F16, &r);
    if (status == MT_SUCCESS)
        status = is_bert ? mt_bert_create(r.ctx, r.params, &b, &bert_out) : mt_gpt_create(r.ctx, r.params, &g, &r.gpt);
    int64_t count = status == MT_SUCCESS ? mt_params_global_elements(r.params) : 0;
    if (!report(m->name, r.ctx, status)) exit(1);
    rank_destroy(&r);
    return count;
}

static void row_of_parameters(const shape *m, int is_bert) {
    char name[64];
    int64_t count = count_parameters(m, is_bert);
    snprintf(name, sizeof name, "%-12s %12lld", m->name, (long long)count);
    row(name, (double)count / 1e6, m->parameters / 1e6, 0, &counts);
}

/* The numbers of the models do not depend on the machine. */
static void print_parameters(void) {
    head("Parameters (tables 1, 2 and 4)", "model          parameters", "millions");
    row_of_parameters(&gpt_355m, 0);
    for (int i = 0; i < 4; i++) row_of_parameters(&gpt[i], 0);
    for (int i = 0; i < 3; i++) row_of_parameters(&bert[i], 1);
}

static const char *const step_columns = "model         GPUs  heads    s/step";

/* Where the error of a step counts. Several tables have the same step; it counts once, in the first of them. The
   numbers of another machine have no error. */
static errors *times_of(const sheet *s, const shape *m, int gpus) {
    static struct { int hidden, heads, gpus; } seen[64];
    static int count;
    if (!s->eager) return NULL;
    for (int i = 0; i < count; i++)
        if (seen[i].hidden == m->hidden && seen[i].heads == m->heads && seen[i].gpus == gpus) return &again;
    seen[count].hidden = m->hidden;
    seen[count].heads = m->heads;
    seen[count++].gpus = gpus;
    return &times;
}

/* The row of a step on `gpus` GPUs. counts_not: 1 for what is so by definition, or by the fit. */
static void row_of_step(const sheet *s, const shape *m, int gpus, const mt_step_time *t, double predicted, double paper,
                        int decimals, int counts_not) {
    char name[64];
    snprintf(name, sizeof name, "%-12s %5d %6d %9.3f", m->name, gpus, m->heads, t->seconds);
    row(name, predicted, paper, decimals, counts_not ? NULL : times_of(s, m, gpus));
}

/* base: FLOP/s of a GPU with the 1.2B model. */
static void print_weak_scaling(const sheet *s, double base) {
    static const double model[] = {100, 95, 82, 77}, all[] = {96, 83, 79, 74};
    mt_step_time t;
    head("Weak scaling: FLOP/s of a GPU in % of the 1.2B model on one; model parallel, batch 8 (figure 5)",
         step_columns, "%");
    for (int i = 0; i < 4; i++) {
        t = predict(s, &gpt[i], gpt[i].tp, 1);
        row_of_step(s, &gpt[i], gpt[i].tp, &t, 100 * rate_of(&t) / base, model[i], 1, i == 0);
    }
    head("Weak scaling: the same with 64-way data parallel, batch 512 (figure 5)", step_columns, "%");
    for (int i = 0; i < 4; i++) {
        t = predict(s, &gpt[i], gpt[i].tp, REPLICAS);
        row_of_step(s, &gpt[i], gpt[i].tp * REPLICAS, &t, 100 * rate_of(&t) / base, all[i], 1, 0);
    }
}

static void print_heads(const sheet *s, double base) {
    static const int heads[] = {16, 24, 32};
    static const double paper[] = {82, 80, 77};
    head("Weak scaling with other numbers of attention heads, model parallel, batch 8 (table 7)", step_columns, "%");
    for (int i = 0; i < 3; i++) {
        shape m = gpt[3];
        m.heads = heads[i];
        mt_step_time t = predict(s, &m, 8, 1);
        row_of_step(s, &m, 8, &t, 100 * rate_of(&t) / base, paper[i], 1, 0);
    }
}

static void print_strong_scaling(const sheet *s) {
    static const double paper[] = {1, 1.64, 2.34, 2.98};
    double first = 0;
    head("Strong scaling: batch 8 on more GPUs (table 8)", step_columns, "speedup");
    for (int i = 0; i < 4; i++) {
        mt_step_time t = predict(s, &gpt[0], 1 << i, 1);
        if (i == 0) first = t.seconds;
        row_of_step(s, &gpt[0], 1 << i, &t, first / t.seconds, paper[i], 2, i == 0);
    }
}

/* The numbers of the abstract. t: of the 8.3B model with 24 heads on 512 GPUs. */
static void print_abstract(const sheet *s, const mt_step_time *single, const mt_step_time *t) {
    head("FLOP/s, which count what is recomputed (abstract)", step_columns, "FLOP/s");
    row_of_step(s, &gpt[0], 1, single, rate_of(single) / 1e12, 39, 1, 1);
    row_of_step(s, &gpt_trained, 512, t, rate_of(t) * 512 / 1e15, 15.1, 1, 0);
    printf("  in TFLOP/s of one GPU%s, and in PFLOP/s of all\n", s->eager ? ", to which the products are fitted" : "");
    head("Efficiency in % (abstract)", "", "predicted");
    row("FLOP/s of a GPU: 8.3B / 1.2B", 100 * rate_of(t) / rate_of(single), 76, 1, times_of(s, &gpt_trained, 512));
    row("1.2B on one GPU, of the peak", 100 * rate_of(single) / s->peak, 30, 1, NULL);
    if (s->eager) printf("  the second row is no prediction: it is 39 / 130, by the fit\n");
}

/* The models that were trained: 300k steps of 512 sequences; an epoch is 68,507 steps. */
static void print_training(const sheet *s, const mt_step_time *single) {
    const shape *models[] = {&gpt_355m, &gpt[1], &gpt_trained};
    static const double days[] = {0.86, 2.27, 2.10};
    mt_step_time t = predict(s, &gpt_trained, 8, REPLICAS);
    print_abstract(s, single, &t);
    head("300k steps of the 8.3B model on 512 GPUs", "", "predicted");
    row("ZFLOP, with what is recomputed", flops_of(&t) * 512 * 300e3 / 1e21, 12, 1, s->eager ? &counts : NULL);
    row("days", t.seconds * 300e3 / 86400, 9.2, 2, times_of(s, &gpt_trained, 512));
    head("An epoch of 68,507 steps of 512 sequences (table 2)", step_columns, "days");
    for (int i = 0; i < 3; i++) {
        t = predict(s, models[i], models[i]->tp, REPLICAS);
        row_of_step(s, models[i], models[i]->tp * REPLICAS, &t, t.seconds * 68507 / 86400, days[i], 2, 0);
    }
}

/* What one GPU of a tensor parallel group needs. */
static void print_memory(const sheet *s) {
    static const struct {
        const shape *model;
        int tp;
    } rows[] = {{&gpt_355m, 1}, {&gpt[0], 1}, {&gpt[1], 1}, {&gpt[1], 2}, {&gpt[2], 4}, {&gpt[3], 4}, {&gpt[3], 8}};
    double gib = 1024.0 * 1024 * 1024;
    printf("\nMemory of a GPU in GiB, model parallel, batch 8: calls of a CPU, each layer recomputed\n"
           "  model         GPUs  heads  parameters, gradients  optimizer  activations       all  fits %.0f GB\n",
           s->capacity / 1e9);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const shape *m = rows[i].model;
        memory used = memory_of(s, m, rows[i].tp);
        double all = used.model + used.optimizer + used.activations;
        printf("  %-12s %5d %6d %22.1f %10.1f %12.1f %9.1f %11s\n", m->name, rows[i].tp, m->heads, used.model / gib,
               used.optimizer / gib, used.activations / gib, all / gib, all <= s->capacity ? "yes" : "no");
    }
}

/* ---- pages ------------------------------------------------------------------------------------------------------- */

/* Where the time of a step goes, in percent. */
static void print_parts(const char *name, const mt_step_time *t) {
    double all = 100 / t->seconds;
    printf("  %-32s %8.3f %8.1f %9.1f %8.1f %9.1f %13.1f\n", name, t->seconds, all * t->gemm, all * t->attention,
           all * t->memory, all * t->optimizer, all * t->communication);
}

static void print_machine(const sheet *s) {
    double peak = s->peak, forward, backward;
    attention_rates(s, 96, &forward, &backward);
    printf("\n%s, %s\n", s->name, mt_dtype_name(s->dtype));
    printf("  data sheets   peak %.0f TFLOP/s, memory %.0f GB/s, nodes of %d GPUs, link %.0f GB/s each way, "
           "network %.0f GB/s\n",
           peak / 1e12, s->memory / 1e9, s->node, s->link / 1e9, s->network / 1e9);
    printf("  products      %.1f TFLOP/s, %.0f %% of the peak: %s\n", s->products / 1e12, 100 * s->products / peak,
           s->eager ? "fitted to the 39 TFLOP/s of the 1.2B model" : "an assumption");
    if (s->eager)
        printf("  attention     products at that rate and, for each score, %d bytes in forward and %d in backward\n"
               "                through memory: %.1f and %.1f TFLOP/s of the trace with heads of 96 features\n",
               FORWARD_BYTES, BACKWARD_BYTES, forward / 1e12, backward / 1e12);
    else printf("  attention     %.0f %% of the rate of products: an assumption\n", 100 * H100_ATTENTION);
    printf("  assumptions   memory, link and network at %.0f %% of the data sheets, %.0f us to launch an operator,\n"
           "                latencies of %.0f us on a link and %.0f us on the network; the %.0f %% of link and network "
           "were\n"
           "                chosen after a comparison with the paper, so they are not free of its numbers\n",
           100 * ACHIEVED, 1e6 * OPERATOR_SECONDS, 1e6 * LINK_LATENCY, 1e6 * NETWORK_LATENCY, 100 * ACHIEVED);
    printf("  gradients     %s\n",
           s->eager ? "summed in f16 after backward, as in the code of the paper" : "summed in f32 during backward");
}

static void print_page(const sheet *s) {
    mt_step_time single = predict(s, &gpt[0], 1, 1), t = predict(s, &gpt[3], 8, REPLICAS);
    double base = rate_of(&single);
    print_machine(s);
    printf("\nWhere the time goes                  s/step products attention memory-b. optimizer communication (%%)\n");
    print_parts("GPT-2 1.2B,   1 GPU", &single);
    print_parts("GPT-2 8.3B, 512 GPUs, 32 heads", &t);
    print_memory(s);
    print_weak_scaling(s, base);
    print_heads(s, base);
    print_strong_scaling(s);
    print_training(s, &single);
}

/* Commands have four spaces in front of them. tests/paper.sh runs those that train, with --dry-run. */
static void print_rest(void) {
    static const char *const lines[] = {
        "flags of all runs of GPT-2 and of BERT; the programs are those of examples/",
        "  gpt=\"--dtype f16 --seq 1024 --batch 512 --dropout 0.1 --steps 300000 --lr 1.5e-4 --min-lr 1e-5\"",
        "  gpt=\"$gpt --warmup 3000 --weight-decay 0.01 --data gpt.bin --device cuda\"",
        "  bert=\"--dtype f16 --dp 64 --data bert.bin --device cuda\"",
        "figure 6, table 2: validation perplexity of GPT-2 355M, 2.5B and 8.3B (9.27), exp(val_loss) of the log",
        ("  train_gpt --layers 24 --hidden 1024 --heads 16 --recompute full --tp 1 --dp 64 $gpt --log 355m.csv "
         "--checkpoint 355m"),
        "  train_gpt --config gpt2-2.5b --dp 64 $gpt --log 2.5b.csv --checkpoint 2.5b",
        "  train_gpt --config gpt2-8.3b --heads 24 --dp 64 $gpt --log 8.3b.csv --checkpoint 8.3b",
        "table 3: perplexity on WikiText103 19.31, 12.76, 10.81, accuracy on LAMBADA 45.18, 61.73, 66.51 %",
        "  eval_gpt --init-from 8.3b --tp 8 --dtype f16 --device cuda --data wikitext.bin",
        "  eval_gpt --init-from 8.3b --tp 8 --dtype f16 --device cuda --data lambada.bin",
        "appendix: generated text",
        "  04_generate --init-from 8.3b --tp 8 --ids 464 --tokens 500",
        "table 4: masked-LM perplexity of BERT 1.58, 1.30, 1.16, exp(val_lm_loss) of the log",
        "  train_bert --config bert-336m $bert --log 336m.csv --checkpoint 336m",
        "  train_bert --config bert-1.3b $bert --log 1.3b.csv --checkpoint 1.3b",
        "  train_bert --config bert-3.9b $bert --log 3.9b.csv --checkpoint 3.9b",
        "figure 7: loss of BERT with the original and the rearranged norms; a larger BERT here for the paper's 752M",
        "  train_bert --config bert-336m --placement post-ln $bert --log 336m-post.csv",
        "  train_bert --config bert-1.3b --placement post-ln $bert --log 1.3b-post.csv",
        "tables 5 and 6: MNLI, QQP, SQuAD and RACE: no program here fine-tunes the models of table 4",
        "174 GB of text, and its overlap with WikiText103 (10.8 %) and LAMBADA (1.4 %): not here, it needs that text",
        "measured times of the tables above: tokens_per_s in the logs above; on up to 8 GPUs",
        "  sh tests/bench/bench.sh --device cuda --only scaling",
    };
    printf("\nNeeds weights, data or GPUs (docs/training.md, docs/evaluation.md; figures 6 and 7 are there, small)\n");
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) printf("  %s\n", lines[i]);
}

int main(int argc, char **argv) {
    sheet paper = v100;
    int helps = argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
    if (argc > 1) {
        fprintf(helps ? stdout : stderr, "usage: paper      without arguments\n");
        return helps ? 0 : 2;
    }
    printf("arXiv 1909.08053: what mt_plan_step predicts, beside the paper\n");
    print_parameters();
    paper.products = fit_products(v100);
    printf("\n==== page 1: the machine of the paper ====\n");
    print_page(&paper);
    printf("\n==== page 2: H100, beside the paper's numbers of V100 ====\n");
    print_page(&h100);
    print_rest();
    printf("\nRows marked 'again' have the step of an earlier row, and count in no mean.\n"
           "mean absolute error: %.1f %% of %d times and rates, %.1f %% of %d counts, %.1f %% of all %d rows\n",
           mean(times), times.rows, mean(counts), counts.rows, (times.sum + counts.sum) / (times.rows + counts.rows),
           times.rows + counts.rows);
    return fflush(stdout) == 0 && !ferror(stdout) ? 0 : 1;
}
