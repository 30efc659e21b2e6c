/* mt_test_gpt.h - what the tests that train a GPT or a BERT share: a small model, trained for a few steps on any
   device, in any type and on any grid, and the result of its training. C and C++. Include it after the implementation
   of megatron.h. */

#ifndef MT_TEST_GPT_H
#define MT_TEST_GPT_H

#include "mt_test.h"

#include <math.h>

#ifndef GPT_STEPS
#define GPT_STEPS 20
#endif
#define GPT_SEQ 8
#define GPT_BATCH 4
#define GPT_VOCAB 37
#define GPT_MAX_FLOATS (1 << 19)
#define GPT_LR 1e-2f

/* The result of a run: loss and gradient norm of every step (the norm of a skipped step is NaN), and the parameters and
   their masters after the last step. */
typedef struct gpt_result {
    float loss[GPT_STEPS], norm[GPT_STEPS], weights[GPT_MAX_FLOATS], masters[GPT_MAX_FLOATS];
    int64_t count, steps; /* of weights; of the optimizer */
    mt_loss_scaler scaler;
    size_t arena_peak;     /* of rank 0; this member and those after it depend on the split */
    size_t stage_peaks[8]; /* of tensor and data rank 0 */
} gpt_result;

/* The bytes of a gpt_result that are the same on every split in invariant mode. */
#define GPT_SAME_BYTES offsetof(gpt_result, arena_peak)

typedef struct gpt_run {
    mt_device device;
    mt_dtype dtype;
    int tp, data, sequence_parallel, invariant;
    /* 0: like GPT-2; 1: like Llama (RMSNorm, SwiGLU, rotary, GQA, no biases, untied head); 2: like GPT-2 with
       MT_POST_LN; 3: like GPT-2 with MT_RESIDUAL_POST_LN; GPT_BERT: the original BERT, an mt_bert; GPT_BERT + 1: a BERT
       with MT_PRE_LN */
    int llama;
    int stochastic;   /* 1: stochastic rounding of the parameters */
    float loss_scale; /* the initial loss scale; 0: none */
    int first_step;   /* the number of the first step, for dropout */
    gpt_result *out;
    mt_epilogue epilogue;
    mt_device planned;
    int no_overlap, overlap_chunks, interleave;
    int64_t ffn; /* 0: 44 */
    int wide;    /* 1: heads of 64 features, for attention on tensor cores */
    mt_recompute recompute;
    mt_data_parallel_desc share;
    int begins; /* 1: mt_sync_gradients_begin before the backward of the last micro-batch */
    float clip; /* gradient norm to clip to; 0: 1 */
    float weight_decay;
    int pipeline; /* stages; 0: 1 */
    mt_schedule schedule;
    int layers;           /* 0: 2 */
    int kv_heads;         /* 0: 8 */
    int64_t padded_vocab; /* of mt_gpt_desc */
    float junk;           /* in the rows of the embedding and of the head that are padding, before the first step */
    mt_qkv_layout qkv_layout;
    int bound;     /* bits GPT_BOUND_...: memory that the test allocates and binds; 0: none */
    int vocab;     /* 0: GPT_VOCAB */
    int on_device; /* 1: the numbers of a step are in memory of the device (mt_step) */
    int graph;     /* 1: with on_device: step 1 is recorded as a CUDA graph, which steps 1, 2, ... launch */
    /* 1: a window, a soft cap and packed documents; 2: also ALiBi and a bias of each head; 3: only ALiBi and a boolean
       mask of each head */
    int scores;
    int one_pass; /* 1: forward computes the gradient of the loss, too (mt_batch.backward_scale) */
    int check;    /* of mt_context_desc */
    int lazy;     /* 1: mt_params_zero_grad_lazy, with gradients that hold NaN before */
} gpt_run;

enum { GPT_BERT = 4 };

enum {
    GPT_BOUND_KINDS = 31,  /* 1: values, 2: grads, 4: exp_avg, 8: exp_avg_sq, 16: master */
    GPT_BOUND_ONE = 32,    /* with mt_param_bind: every second parameter, or with GPT_BOUND_FILLED all */
    GPT_BOUND_GAPS = 64,   /* in reverse order, with gaps, and not aligned to more than an element */
    GPT_BOUND_FILLED = 128 /* without mt_params_init */
};

/* One rank. */
typedef struct gpt_worker {
    const gpt_run *r;
    mt_comm *world, *comm; /* that of the launcher; that of mt_comm_create_for */
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    mt_gpt gpt;
    mt_gpt_saved saved[GPT_BATCH]; /* one for each slot */
    mt_bert bert;                  /* instead of gpt */
    mt_bert_saved bert_saved[GPT_BATCH];
    mt_optimizer optimizer;
    mt_loss_scaler scaler;
    mt_step numbers;          /* with on_device */
    mt_graph *graph;          /* with graph */
    int32_t *ids;             /* for each micro-batch the ids and targets of a sequence, on the device */
    int32_t *types;           /* of a BERT, for each micro-batch: its token types, sentence order and length */
    int32_t *cu_seqlens;      /* with scores: of a micro-batch */
    mt_tensor bias;           /* with scores 2 and 3 */
    mt_tensor losses, totals; /* losses: one row for each slot; totals: the sum of each micro-batch's losses */
    int step;
    mt_tensor memory[5]; /* [1, n]: what is bound of values, grads, exp_avg, exp_avg_sq and master, or mt_none() */
    int64_t *offsets;    /* of the parameters in `memory` */
    float *spoil, bad;   /* CPU: a gradient that is set to `bad` before the next backward; NULL: none */
    mt_status (*forward)(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output);
    mt_status (*backward)(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput);
} gpt_worker;

static inline int gpt_is_bert(const gpt_run *r) { return r->llama >= GPT_BERT; }

static inline int32_t gpt_vocab(const gpt_run *r) { return r->vocab ? r->vocab : GPT_VOCAB; }

/* Returns the desc of the model. */
static inline mt_gpt_desc gpt_model(const gpt_run *r) {
    mt_gpt_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = gpt_vocab(r);
    d.padded_vocab = r->padded_vocab;
    d.layers = r->layers ? r->layers : 2;
    d.max_seq = GPT_SEQ;
    d.embedding_dropout = 0.1f;
    d.layer.hidden = r->llama == 1 ? 32 : 24;
    d.layer.heads = r->llama == 1 ? 16 : 8;
    d.layer.kv_heads = r->kv_heads ? r->kv_heads : 8;
    d.layer.ffn = r->ffn ? r->ffn : 44;
    d.layer.dropout.attention = d.layer.dropout.hidden = 0.1f;
    d.layer.sequence_parallel = r->sequence_parallel;
    if (r->wide) {
        d.layer.hidden = d.layer.ffn = 128;
        d.layer.heads = d.layer.kv_heads = 2;
    }
    if (r->scores == 1 || r->scores == 2) {
        d.layer.scores.window = 4;
        d.layer.scores.softcap = 1.5f;
    }
    d.layer.scores.alibi = r->scores >= 2;
    d.layer.recompute = r->recompute;
    d.layer.qkv_layout = r->qkv_layout;
    if (r->llama == 2 || r->llama == GPT_BERT) d.layer.norm.placement = MT_POST_LN;
    if (r->llama == 3) d.layer.norm.placement = MT_RESIDUAL_POST_LN;
    if (r->llama != 1) return d;
    d.untied_head = 1;
    d.label_smoothing = 0.1f;
    d.layer.norm.kind = MT_RMS_NORM;
    d.layer.activation = MT_SWIGLU;
    d.layer.scores.rotary_base = 100.0f;
    d.layer.no_bias = 1;
    return d;
}

static inline mt_bert_desc gpt_bert_model(const gpt_run *r) {
    mt_gpt_desc of = gpt_model(r);
    mt_bert_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = of.vocab;
    d.padded_vocab = of.padded_vocab;
    d.layers = of.layers;
    d.max_seq = of.max_seq;
    d.embedding_dropout = of.embedding_dropout;
    d.layer = of.layer;
    if (r->llama != GPT_BERT) return d;
    d.layer.activation = MT_GELU_ERF;
    d.layer.norm.eps = 1e-12f;
    return d;
}

/* Returns the scale of the loss for backward. */
static inline float gpt_scale(const gpt_worker *w) {
    float scale = w->scaler.scale > 0.0f && !w->r->on_device ? w->scaler.scale : 1.0f;
    return scale / (GPT_BATCH * GPT_SEQ);
}

/* The token types of a micro-batch, of a BERT. Its sentence order and its length follow them. */
#define GPT_TYPES (GPT_SEQ + 2)
static inline int32_t *gpt_types(const gpt_worker *w, int64_t sequence) {
    return w->types + GPT_TYPES * (sequence - w->grid.dp_rank * (GPT_BATCH / w->grid.dp_size));
}

#define GPT_DOCUMENTS 3

/* A third of the mask is 0. A token sees itself, so that all have an output, and their gradients. */
static inline mt_status gpt_load_mask(gpt_worker *w) {
    int64_t rows = gpt_model(w->r).layer.heads * GPT_SEQ, i;
    unsigned char *host = (unsigned char *)malloc((size_t)(rows * GPT_SEQ));
    uint64_t seed = 78;
    mt_status status = host ? mt_arena_tensor(w->ctx, MT_U8, rows, GPT_SEQ, &w->bias) : MT_ERR_MEMORY;
    for (i = 0; host && i < rows * GPT_SEQ; i++)
        host[i] = test_below(&seed, 3) > 0 || i % GPT_SEQ == i / GPT_SEQ % GPT_SEQ;
    if (status == MT_SUCCESS) status = mt_upload(w->ctx, host, w->bias);
    free(host);
    return status;
}

/* Allocates and fills what changes the scores of attention. */
static inline mt_status gpt_load_scores(gpt_worker *w) {
    static const int32_t cu_seqlens[GPT_DOCUMENTS + 1] = {0, 3, 3, GPT_SEQ};
    int64_t rows = gpt_model(w->r).layer.heads * GPT_SEQ, i;
    mt_tensor ends = mt_none();
    float *host;
    uint64_t seed = 77;
    mt_status status;
    if (w->r->scores == 3) return gpt_load_mask(w);
    if (!w->r->scores) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(w->ctx, MT_I32, 1, GPT_DOCUMENTS + 1, &ends));
    MT_TRY(mt_upload(w->ctx, cu_seqlens, ends));
    w->cu_seqlens = (int32_t *)ends.data;
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, rows, GPT_SEQ, &w->bias));
    host = (float *)malloc((size_t)(rows * GPT_SEQ) * sizeof *host);
    if (!host) return MT_ERR_MEMORY;
    for (i = 0; i < rows * GPT_SEQ; i++) host[i] = test_float(&seed);
    status = mt_upload(w->ctx, host, w->bias);
    free(host);
    return status;
}

static inline mt_batch gpt_batch_of(const gpt_worker *w, int64_t sequence) {
    mt_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = 1;
    batch.seq = GPT_SEQ;
    batch.first_sequence = sequence;
    batch.seed = 5;
    batch.step = (uint64_t)w->step;
    if (gpt_is_bert(w->r)) {
        batch.token_types = gpt_types(w, sequence);
        batch.lengths = batch.token_types + GPT_SEQ + 1;
    }
    if (w->cu_seqlens) {
        batch.cu_seqlens = w->cu_seqlens;
        batch.documents = GPT_DOCUMENTS;
    }
    if (w->r->scores >= 2) {
        batch.bias.value = w->bias;
        batch.bias.heads = gpt_model(w->r).layer.heads;
    }
    if (w->r->one_pass) batch.backward_scale = gpt_scale(w);
    if (!w->r->on_device) return batch;
    batch.step = 0;
    batch.random_offset = mt_step_random_offset(&w->numbers);
    if (w->scaler.scale > 0.0f) batch.loss_scale = mt_step_loss_scale(&w->numbers);
    return batch;
}

/* Uploads the sequences of this data rank, and those after them for tests with more micro-batches. Each step has the
   same text, so that the loss falls. shift: 0, or another number for another text */
static inline mt_status gpt_load_types(gpt_worker *w, int64_t n, int64_t sequence) {
    int32_t types[GPT_TYPES], length = GPT_SEQ - (int32_t)(sequence % 3);
    for (int i = 0; i < GPT_SEQ; i++) types[i] = i > 2 + sequence % 3;
    types[GPT_SEQ] = (int32_t)(sequence % 2);
    types[GPT_SEQ + 1] = length;
    return mt_upload(w->ctx, types, mt_tensor_make(w->types + GPT_TYPES * n, MT_I32, 1, GPT_TYPES));
}

static inline mt_status gpt_load_text(gpt_worker *w, int64_t shift) {
    int64_t first = w->grid.dp_rank * (GPT_BATCH / w->grid.dp_size);
    int32_t ids[GPT_SEQ + 1], vocab = gpt_vocab(w->r);
    for (int64_t n = 0; n < GPT_BATCH; n++) {
        int32_t *to = w->ids + 2 * GPT_SEQ * n;
        uint64_t seed = (uint64_t)(first + n + shift);
        ids[0] = (int32_t)((first + n + shift) % vocab);
        for (int i = 1; i <= GPT_SEQ; i++) ids[i] = (ids[i - 1] * 3 + 1 + (int32_t)test_below(&seed, 2)) % vocab;
        MT_TRY(mt_upload(w->ctx, ids, mt_tensor_make(to, MT_I32, 1, GPT_SEQ)));
        for (int i = 1; gpt_is_bert(w->r) && i <= GPT_SEQ; i++)
            if (i % 3 == 1 || i > GPT_SEQ - (first + n) % 3) ids[i] = -100; /* the padding, and others */
        MT_TRY(mt_upload(w->ctx, ids + 1, mt_tensor_make(to + GPT_SEQ, MT_I32, 1, GPT_SEQ)));
        if (gpt_is_bert(w->r)) MT_TRY(gpt_load_types(w, n, first + n));
    }
    return MT_SUCCESS;
}

static inline mt_status gpt_load(gpt_worker *w) { return gpt_load_text(w, 0); }

/* The forward of a micro-batch, which is one sequence. The loss of the sentence order follows those of the tokens. */
static inline mt_status gpt_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input,
                                    mt_tensor output) {
    gpt_worker *w = (gpt_worker *)user;
    int64_t sequence = w->grid.dp_rank * (GPT_BATCH / w->grid.dp_size) + a->micro_batch;
    mt_batch batch = gpt_batch_of(w, sequence);
    mt_tensor loss = mt_tensor_rows(w->losses, a->slot, 1);
    const int32_t *ids = w->ids + 2 * GPT_SEQ * a->micro_batch;
    if (gpt_is_bert(w->r))
        MT_TRY(mt_bert_stage_forward(ctx, &w->bert, &batch, ids, ids + GPT_SEQ, batch.token_types + GPT_SEQ, input,
                                     output, mt_tensor_cols(loss, 0, GPT_SEQ), mt_tensor_cols(loss, GPT_SEQ, 1),
                                     &w->bert_saved[a->slot]));
    else
        MT_TRY(mt_gpt_stage_forward(ctx, &w->gpt, &batch, ids, ids + GPT_SEQ, input, output, loss, &w->saved[a->slot]));
    if (w->grid.pp_rank + 1 < w->grid.pp_size) return MT_SUCCESS;
    return mt_sum(ctx, loss, mt_tensor_rows(w->totals, a->micro_batch, 1));
}

static inline mt_status gpt_backward_of(gpt_worker *w, int slot, mt_tensor doutput, mt_tensor dinput) {
    float scale = gpt_scale(w);
    if (gpt_is_bert(w->r))
        MT_TRY(mt_bert_stage_backward(w->ctx, &w->bert, scale, scale, doutput, dinput, &w->bert_saved[slot]));
    else MT_TRY(mt_gpt_stage_backward(w->ctx, &w->gpt, scale, doutput, dinput, &w->saved[slot]));
    return mt_accumulate_gradients(w->ctx, w->params);
}

static inline mt_status gpt_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput,
                                     mt_tensor dinput) {
    gpt_worker *w = (gpt_worker *)user;
    if (w->r->begins && a->micro_batch == GPT_BATCH / w->grid.dp_size - 1)
        MT_TRY(mt_sync_gradients_begin(ctx, w->params));
    return gpt_backward_of(w, a->slot, doutput, dinput);
}

/* Forward and backward of micro-batch n without a pipeline. */
static inline mt_status gpt_micro_batch(gpt_worker *w, int n, int last) {
    size_t mark = mt_arena_mark(w->ctx);
    mt_action a;
    memset(&a, 0, sizeof a);
    a.micro_batch = n;
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, n + 1, 1, &w->totals));
    MT_TRY(mt_fill(w->ctx, w->totals, 0.0f));
    MT_TRY(gpt_forward(w->ctx, w, &a, mt_none(), mt_none()));
    if (last && w->r->begins) MT_TRY(mt_sync_gradients_begin(w->ctx, w->params));
    MT_TRY(gpt_backward_of(w, 0, mt_none(), mt_none()));
    mt_arena_release(w->ctx, mark);
    return MT_SUCCESS;
}

static inline mt_status gpt_run_schedule(gpt_worker *w) {
    mt_pipeline_stage stage;
    mt_action actions[6 * GPT_BATCH];
    int count = 0;
    memset(&stage, 0, sizeof stage);
    stage.rows = GPT_SEQ / (w->r->sequence_parallel ? w->grid.tp_size : 1);
    stage.cols = gpt_model(w->r).layer.hidden;
    stage.dtype = w->r->dtype;
    stage.forward = w->forward ? w->forward : gpt_forward;
    stage.backward = w->backward ? w->backward : gpt_backward;
    stage.user = w;
    MT_TRY(mt_pipeline_schedule(w->r->schedule, w->grid.pp_size, w->grid.pp_rank, GPT_BATCH / w->grid.dp_size, actions,
                                6 * GPT_BATCH, &count));
    return mt_pipeline_run(w->ctx, &w->grid, &stage, actions, count);
}

/* Makes the gradients zero for a step. */
static inline mt_status gpt_zero_grad(gpt_worker *w) {
    if (!w->r->lazy) return mt_params_zero_grad(w->ctx, w->params);
    for (int i = 0; i < mt_params_count(w->params); i++) MT_TRY(mt_fill(w->ctx, mt_params_at(w->params, i)->grad, NAN));
    return mt_params_zero_grad_lazy(w->ctx, w->params);
}

/* Computes the sum of the losses, the first element of w->totals, and the gradients of a step on all ranks. */
static inline mt_status gpt_compute(gpt_worker *w) {
    mt_comm *pipeline = w->grid.pp;
    void *total;
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, GPT_BATCH / w->grid.dp_size, 1, &w->totals));
    MT_TRY(mt_fill(w->ctx, w->totals, 0.0f));
    MT_TRY(gpt_zero_grad(w));
    if (w->spoil) *w->spoil = w->bad;
    MT_TRY(gpt_run_schedule(w));
    MT_TRY(mt_tree_sum(w->ctx, w->totals));
    total = w->totals.data;
    MT_TRY(mt_all_reduce(w->ctx, w->grid.dp, total, total, 1, MT_F32, MT_SUM));
    MT_TRY(mt_broadcast(w->ctx, pipeline, total, total, 1, MT_F32, w->grid.pp_size - 1));
    return mt_sync_gradients(w->ctx, w->params);
}

/* As gpt_compute. Returns the mean loss and the norm of the gradients. */
static inline mt_status gpt_gradients(gpt_worker *w, int step, float *loss, float *norm) {
    size_t mark = mt_arena_mark(w->ctx);
    w->step = step;
    MT_TRY(gpt_compute(w));
    MT_TRY(mt_download(w->ctx, mt_tensor_rows(w->totals, 0, 1), loss));
    *loss /= GPT_BATCH * GPT_SEQ;
    MT_TRY(mt_grad_norm(w->ctx, w->params, norm));
    mt_arena_release(w->ctx, mark);
    return MT_SUCCESS;
}

/* The wide model needs a lower learning rate for a steady training. */
static inline float gpt_lr(const gpt_run *r) { return r->wide ? GPT_LR / 10 : GPT_LR; }

static inline float gpt_clip(const gpt_run *r) { return r->clip > 0.0f ? r->clip : 1.0f; }

static inline void gpt_keep(const gpt_worker *w, int step, float loss, float norm) {
    if (mt_comm_rank(w->world) != 0) return;
    w->r->out->loss[step] = loss;
    w->r->out->norm[step] = norm;
}

/* What the device does in a step. */
static inline mt_status gpt_device_step(gpt_worker *w) {
    size_t mark = mt_arena_mark(w->ctx);
    MT_TRY(gpt_compute(w));
    MT_TRY(mt_step_update(w->ctx, &w->numbers, mt_tensor_rows(w->totals, 0, 1)));
    mt_arena_release(w->ctx, mark);
    return MT_SUCCESS;
}

/* Records a step, with numbers and a text that no launch may use. */
static inline mt_status gpt_record(gpt_worker *w) {
    mt_status status;
    MT_TRY(mt_step_begin(w->ctx, &w->numbers, 1e3f, 12345));
    MT_TRY(gpt_load_text(w, 7));
    MT_TRY(mt_graph_begin(w->ctx, w->comm));
    status = gpt_device_step(w);
    MT_KEEP(status, mt_graph_end(w->ctx, status == MT_SUCCESS ? &w->graph : NULL));
    MT_KEEP(status, gpt_load(w));
    return status;
}

static inline mt_status gpt_step_on_device(gpt_worker *w, int step) {
    mt_step_values values;
    if (w->r->graph && step == 1) MT_TRY(gpt_record(w));
    MT_TRY(mt_step_begin(w->ctx, &w->numbers, gpt_lr(w->r), (uint64_t)(w->r->first_step + step)));
    MT_TRY(w->graph ? mt_graph_launch(w->ctx, w->graph) : gpt_device_step(w));
    MT_TRY(mt_step_read(w->ctx, &w->numbers, &values));
    if (w->scaler.scale > 0.0f) w->scaler = values.scaler;
    gpt_keep(w, step, values.loss / (GPT_BATCH * GPT_SEQ), values.adamw.skip ? (float)NAN : values.norm);
    return MT_SUCCESS;
}

/* Runs a training step. Rank 0 keeps its loss and norm. */
static inline mt_status gpt_step(gpt_worker *w, int step) {
    float loss, norm, unscale = 1.0f;
    if (w->r->on_device) return gpt_step_on_device(w, step);
    MT_TRY(gpt_gradients(w, w->r->first_step + step, &loss, &norm));
    if (w->r->loss_scale > 0.0f) unscale = mt_loss_scaler_update(&w->scaler, &norm);
    gpt_keep(w, step, loss, unscale > 0.0f ? norm : (float)NAN);
    if (unscale == 0.0f) return MT_SUCCESS;
    unscale *= mt_clip_coefficient(norm, gpt_clip(w->r));
    return mt_optimizer_step(w->ctx, &w->optimizer, gpt_lr(w->r), unscale);
}

/* Returns 1 for the last stage's copy of a shared embedding. */
static inline int gpt_is_copy(const gpt_worker *w, const mt_param *p) {
    return w->grid.pp_rank > 0 && p->desc.shared_embedding;
}

/* Copies the parameters and masters of all stages to the result, in the order of the stages. Ranks are threads of one
   process, so each stage writes its own part. A stage receives the number of floats before its part from the previous
   stage. */
static inline mt_status gpt_keep_weights(gpt_worker *w) {
    gpt_result *all = (gpt_result *)malloc(sizeof *all);
    int64_t n = 0, first = 0;
    int32_t before = 0, behind;
    int stage = w->grid.pp_rank, writes = w->grid.tp_rank == 0 && w->grid.dp_rank == 0;
    mt_tensor number;
    mt_status status = all ? MT_SUCCESS : MT_ERR_MEMORY;
    for (int i = 0; status == MT_SUCCESS && i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        if (n + p->desc.rows * p->desc.cols > GPT_MAX_FLOATS) abort();
        if (gpt_is_copy(w, p)) continue;
        status = mt_param_gather(w->ctx, w->params, p, p->value, all->weights + n);
        if (status == MT_SUCCESS) status = mt_optimizer_gather(w->ctx, &w->optimizer, p, MT_MASTER, all->masters + n);
        n += p->desc.rows * p->desc.cols;
    }
    if (status == MT_SUCCESS) status = mt_arena_tensor(w->ctx, MT_I32, 1, 1, &number);
    if (status == MT_SUCCESS && stage > 0) status = mt_recv(w->ctx, w->grid.pp, number.data, 1, MT_I32, stage - 1);
    if (status == MT_SUCCESS && stage > 0) status = mt_download(w->ctx, number, &before);
    first = before;
    behind = (int32_t)(first + n);
    if (status == MT_SUCCESS) status = mt_upload(w->ctx, &behind, number);
    if (status == MT_SUCCESS && stage + 1 < w->grid.pp_size)
        status = mt_send(w->ctx, w->grid.pp, number.data, 1, MT_I32, stage + 1);
    if (status == MT_SUCCESS && writes && first + n <= GPT_MAX_FLOATS) {
        memcpy(w->r->out->weights + first, all->weights, (size_t)n * sizeof(float));
        memcpy(w->r->out->masters + first, all->masters, (size_t)n * sizeof(float));
    }
    if (status == MT_SUCCESS && writes && stage + 1 == w->grid.pp_size) {
        w->r->out->count = first + n;
        w->r->out->steps = w->optimizer.step;
        w->r->out->scaler = w->scaler;
    }
    free(all);
    return status;
}

/* Fills the rows of the embedding and of the head, or the columns of the bias, from the vocabulary on. */
static inline mt_status gpt_fill_padding(gpt_worker *w, mt_param *p) {
    int is_bias = p && p->desc.rows == 1;
    int64_t n, first, real;
    if (!p || w->r->junk == 0.0f) return MT_SUCCESS;
    n = is_bias ? p->value.cols : p->value.rows;
    first = w->grid.tp_rank * n;
    real = mt_max(0, mt_min(n, gpt_vocab(w->r) - first));
    if (is_bias) return mt_fill(w->ctx, mt_tensor_cols(p->value, real, n - real), w->r->junk);
    return mt_fill(w->ctx, mt_tensor_rows(p->value, real, n - real), w->r->junk);
}

/* Returns the first element of a parameter in bound memory, and writes their number to *total. */
static inline int64_t gpt_offset(const gpt_worker *w, int index, int64_t *total) {
    int gaps = w->r->bound & GPT_BOUND_GAPS ? 1 : 0, count = mt_params_count(w->params);
    int64_t found = 0;
    *total = gaps;
    for (int i = 0; i < count; i++) {
        int at = gaps ? count - 1 - i : i;
        const mt_param *p = mt_params_at(w->params, at);
        if (at == index) found = *total;
        *total += p->value.rows * p->value.cols + 4 * gaps;
    }
    return found;
}

/* Allocates the memory to bind, and fills it with -77. */
static inline mt_status gpt_bound_memory(gpt_worker *w) {
    int count = mt_params_count(w->params), kinds = w->r->bound & GPT_BOUND_KINDS;
    int64_t n = 0;
    w->offsets = (int64_t *)calloc((size_t)count + 1, sizeof *w->offsets);
    if (!w->offsets) return MT_ERR_MEMORY;
    for (int i = 0; i < count; i++) w->offsets[i] = gpt_offset(w, i, &n);
    for (int k = 0; k < 5; k++) {
        mt_dtype dtype = k == 0 ? w->r->dtype : MT_F32;
        void *data;
        if (!(kinds & 1 << k) || (k == 4 && (w->r->dtype == MT_F32 || w->r->stochastic))) continue;
        MT_TRY(mt_context_alloc(w->ctx, (size_t)n * mt_dtype_size(dtype), &data));
        w->memory[k] = mt_tensor_make(data, dtype, 1, n);
        for (int64_t at = 0; at < n; at += 4096) /* a conversion needs little scratch memory */
            MT_TRY(mt_fill(w->ctx, mt_tensor_cols(w->memory[k], at, n - at < 4096 ? n - at : 4096), -77.0f));
    }
    return MT_SUCCESS;
}

static inline mt_params_memory gpt_memory(const gpt_worker *w) {
    mt_params_memory m;
    memset(&m, 0, sizeof m);
    m.values = w->memory[0].data;
    m.grads = (float *)w->memory[1].data;
    m.exp_avg = (float *)w->memory[2].data;
    m.exp_avg_sq = (float *)w->memory[3].data;
    m.master = (float *)w->memory[4].data;
    for (int k = 0; k < 5; k++)
        if (w->memory[k].data) m.elements = w->memory[k].cols;
    m.offsets = w->r->bound & GPT_BOUND_GAPS ? w->offsets : NULL;
    return m;
}

/* Binds every second parameter, or all with GPT_BOUND_FILLED, one by one. */
static inline mt_status gpt_bind_each(gpt_worker *w) {
    for (int i = 0; i < mt_params_count(w->params); i++) {
        mt_params_memory m = gpt_memory(w);
        m.offsets = &w->offsets[i];
        if (w->r->bound & GPT_BOUND_FILLED || i % 2 == 0) MT_TRY(mt_param_bind(w->ctx, mt_params_at(w->params, i), &m));
    }
    return MT_SUCCESS;
}

static inline mt_status gpt_create(gpt_worker *w, mt_params *params, mt_gpt *gpt, mt_bert *bert) {
    mt_gpt_desc model = gpt_model(w->r);
    mt_bert_desc bert_model = gpt_bert_model(w->r);
    if (gpt_is_bert(w->r)) return mt_bert_create(w->ctx, params, &bert_model, bert);
    return mt_gpt_create(w->ctx, params, &model, gpt);
}

/* Fills bound values with those that mt_params_init gives to another registry. */
static inline mt_status gpt_fill_values(gpt_worker *w) {
    mt_params *other;
    mt_bert bert;
    mt_gpt gpt;
    MT_TRY(mt_params_create(w->ctx, &w->grid, &other));
    MT_TRY(mt_params_set_dtype(w->ctx, other, w->r->dtype));
    MT_TRY(gpt_create(w, other, &gpt, &bert));
    MT_TRY(mt_params_init(w->ctx, other, 77));
    for (int i = 0; i < mt_params_count(other); i++)
        MT_TRY(mt_copy(w->ctx, mt_params_at(other, i)->value, mt_params_at(w->params, i)->value));
    mt_params_destroy(other);
    return MT_SUCCESS;
}

/* Binds memory, and initialises the parameters. */
static inline mt_status gpt_init(gpt_worker *w) {
    mt_params_memory m;
    if (w->r->bound) MT_TRY(gpt_bound_memory(w));
    m = gpt_memory(w);
    if (w->r->bound & GPT_BOUND_ONE) MT_TRY(gpt_bind_each(w));
    else if (w->r->bound) MT_TRY(mt_params_bind(w->ctx, w->params, &m));
    if (!(w->r->bound & GPT_BOUND_FILLED)) return mt_params_init(w->ctx, w->params, 77);
    if (w->r->bound & GPT_BOUND_ONE) MT_TRY(mt_params_bind(w->ctx, w->params, NULL));
    return gpt_fill_values(w);
}

/* Creates the model and initialises it. */
static inline mt_status gpt_open_model(gpt_worker *w) {
    mt_column_parallel_linear *head = gpt_is_bert(w->r) ? &w->bert.head : &w->gpt.head;
    MT_TRY(gpt_create(w, w->params, &w->gpt, &w->bert));
    MT_TRY(gpt_init(w));
    MT_TRY(gpt_fill_padding(w, gpt_is_bert(w->r) ? w->bert.model.tokens.weight : w->gpt.model.tokens.weight));
    MT_TRY(gpt_fill_padding(w, head->weight));
    MT_TRY(gpt_fill_padding(w, head->bias));
    for (int i = 0; i < GPT_BATCH; i++) {
        if (gpt_is_bert(w->r)) MT_TRY(mt_bert_saved_create(w->ctx, &w->bert, &w->bert_saved[i]));
        else MT_TRY(mt_gpt_saved_create(w->ctx, &w->gpt, &w->saved[i]));
    }
    return MT_SUCCESS;
}

/* Allocates memory for the text and the losses, and loads the text. */
static inline mt_status gpt_open_text(gpt_worker *w) {
    int64_t losses = GPT_SEQ + gpt_is_bert(w->r);
    void *memory;
    MT_TRY(mt_arena_alloc(w->ctx, GPT_BATCH * 2 * GPT_SEQ * sizeof(int32_t), &memory));
    w->ids = (int32_t *)memory;
    if (gpt_is_bert(w->r)) MT_TRY(mt_arena_alloc(w->ctx, GPT_BATCH * GPT_TYPES * sizeof(int32_t), &memory));
    w->types = (int32_t *)memory;
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, GPT_BATCH, losses, &w->losses));
    MT_TRY(gpt_load_scores(w));
    return gpt_load(w);
}

static inline mt_status gpt_open(mt_comm *world, const gpt_run *r, gpt_worker *w) {
    mt_grid_desc shape = {.tp = r->tp, .dp = r->data, .pp = r->pipeline, .cp = 1};
    mt_context_desc where;
    mt_optimizer_desc adamw;
    mt_loss_scaler_desc scale;
    mt_gemm_options gemm;
    mt_parallel_options parallel;
    memset(w, 0, sizeof *w);
    w->r = r;
    w->world = world;
    memset(&where, 0, sizeof where);
    memset(&adamw, 0, sizeof adamw);
    memset(&parallel, 0, sizeof parallel);
    memset(&scale, 0, sizeof scale);
    where.device = r->device;
    where.ordinal = r->device == MT_DEVICE_CUDA ? mt_comm_rank(w->world) % mt_device_count(MT_DEVICE_CUDA) : 0;
    where.arena_bytes = (size_t)4 << 20;
    where.invariant = r->invariant;
    where.check = r->check;
    where.planned = r->planned;
    where.arena_symmetric = r->pipeline <= 1;
    adamw.stochastic_rounding = r->stochastic;
    adamw.weight_decay = r->weight_decay;
    scale.initial_scale = r->loss_scale;
    memset(&gemm, 0, sizeof gemm);
    gemm.epilogue = r->epilogue;
    parallel.no_overlap = r->no_overlap;
    parallel.overlap_chunks = r->overlap_chunks;
    parallel.interleave = r->interleave;
    MT_TRY(mt_context_create(w->world, &where, &w->ctx));
    MT_TRY(mt_gemm_set_options(w->ctx, &gemm));
    MT_TRY(mt_parallel_set_options(w->ctx, &parallel));
    if (!mt_comm_is_meta(w->world)) MT_TRY(mt_comm_create_for(w->ctx, w->world, &w->comm));
    MT_TRY(mt_grid_create(w->comm ? w->comm : w->world, &shape, &w->grid));
    MT_TRY(mt_params_create(w->ctx, &w->grid, &w->params));
    MT_TRY(mt_params_set_dtype(w->ctx, w->params, r->dtype));
    MT_TRY(mt_params_set_data_parallel(w->ctx, w->params, &r->share));
    MT_TRY(gpt_open_model(w));
    MT_TRY(mt_optimizer_create(w->ctx, w->params, &adamw, &w->optimizer));
    if (r->loss_scale > 0.0f) MT_TRY(mt_loss_scaler_create(w->ctx, &scale, &w->scaler));
    if (r->on_device)
        MT_TRY(
            mt_step_create(w->ctx, &w->optimizer, r->loss_scale > 0.0f ? &w->scaler : NULL, gpt_clip(r), &w->numbers));
    return gpt_open_text(w);
}

static inline void gpt_close(gpt_worker *w) {
    mt_graph_destroy(w->ctx, w->graph);
    mt_step_destroy(w->ctx, &w->numbers);
    mt_optimizer_destroy(w->ctx, &w->optimizer);
    for (int i = 0; i < GPT_BATCH; i++) mt_gpt_saved_destroy(&w->saved[i]);
    for (int i = 0; i < GPT_BATCH; i++) mt_bert_saved_destroy(&w->bert_saved[i]);
    mt_params_destroy(w->params);
    for (int k = 0; k < 5; k++)
        mt_context_free(w->ctx, w->memory[k].data, (size_t)w->memory[k].cols * mt_dtype_size(w->memory[k].dtype));
    free(w->offsets);
    mt_grid_destroy(&w->grid);
    mt_comm_destroy(w->comm);
    mt_context_destroy(w->ctx);
}

static inline mt_status gpt_rank(mt_comm *world, void *user) {
    gpt_worker w;
    const gpt_run *r = (const gpt_run *)user;
    mt_status status = gpt_open(world, r, &w);
    int steps = r->device == MT_DEVICE_META ? 1 : GPT_STEPS;
    for (int step = 0; status == MT_SUCCESS && step < steps; step++) status = gpt_step(&w, step);
    if (status == MT_SUCCESS && mt_comm_rank(world) == 0) r->out->arena_peak = mt_arena_peak(w.ctx);
    if (status == MT_SUCCESS && w.grid.tp_rank == 0 && w.grid.dp_rank == 0)
        r->out->stage_peaks[w.grid.pp_rank] = mt_arena_peak(w.ctx);
    if (status == MT_SUCCESS) status = gpt_keep_weights(&w);
    gpt_close(&w);
    return status;
}

static inline const char *gpt_name(const gpt_run *r) {
    static const char *const names[] = {"GPT-2", "Llama", "post-LN", "residual post-LN", "BERT", "BERT, pre-LN"};
    static const char *const recompute[] = {"", ", selective recomputation", ", full recomputation"};
    static const char *const scores[] = {"", ", a window, a soft cap and documents",
                                         ", a window, a soft cap, documents, ALiBi and a bias", ", ALiBi and a mask"};
    static char text[256];
    snprintf(text, sizeof text, "%s, %s, tensor %d x data %d x pipeline %d%s%s%s%s%s%s", names[r->llama],
             mt_dtype_name(r->dtype), r->tp, r->data, r->pipeline ? r->pipeline : 1,
             r->schedule == MT_SCHEDULE_GPIPE ? ", GPipe" : "", r->sequence_parallel ? ", sequence parallel" : "",
             r->invariant ? ", invariant" : "", r->one_pass ? ", loss in one pass" : "", recompute[r->recompute],
             scores[r->scores]);
    return text;
}

/* Main thread. */
static inline void gpt_launch(const gpt_run *r, mt_rank_function f, void *user) {
    mt_launch_desc d;
    mt_status status;
    memset(&d, 0, sizeof d);
    d.ranks = r->tp * r->data * (r->pipeline ? r->pipeline : 1);
    d.no_pinning = 1;
    d.timeout_s = TEST_NEVER_OVER;
    status = mt_launch(&d, f, user);
    if (status != MT_SUCCESS) fail_msg("%s: %s", gpt_name(r), mt_status_name(status));
}

static inline void gpt_execute(gpt_run r, gpt_result *out) {
    memset(out, 0, sizeof *out);
    r.out = out;
    gpt_launch(&r, gpt_rank, &r);
}

#define GPT_MAX_LINES 512

/* The hash log of a step. */
typedef struct gpt_lines {
    gpt_run run;
    char name[GPT_MAX_LINES][128];
    uint64_t hash[GPT_MAX_LINES];
    int count, spoil; /* spoil: change the last stage's copy of the embedding */
} gpt_lines;

static inline void gpt_keep_line(void *user, const char *name, uint64_t hash, int differs) {
    gpt_lines *all = (gpt_lines *)user;
    if (all->count == GPT_MAX_LINES) abort();
    snprintf(all->name[all->count], sizeof all->name[0], "%s%s", name, differs ? " differs" : "");
    all->hash[all->count++] = hash;
}

static inline mt_status gpt_log_step(gpt_worker *w, mt_hash_log *log) {
    float loss, norm;
    MT_TRY(gpt_gradients(w, 0, &loss, &norm));
    MT_TRY(mt_hash_log_value(w->ctx, log, "loss", loss));
    for (int i = 0; i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        MT_TRY(mt_hash_log_shard(w->ctx, log, p, ".grad", p->grad));
    }
    MT_TRY(mt_hash_log_value(w->ctx, log, "grad_norm", norm));
    for (int i = 0; i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        MT_TRY(mt_hash_log_shard(w->ctx, log, p, "", p->value));
    }
    return MT_SUCCESS;
}

static inline mt_status gpt_log_rank(mt_comm *world, void *user) {
    gpt_lines *l = (gpt_lines *)user, *mine = (gpt_lines *)calloc(1, sizeof *mine);
    mt_hash_log *log = NULL;
    gpt_worker w;
    mt_status status = mine ? gpt_open(world, &l->run, &w) : MT_ERR_MEMORY;
    if (status == MT_SUCCESS) status = mt_hash_log_create(w.ctx, &w.grid, &log);
    if (status == MT_SUCCESS && l->spoil && w.grid.pp_rank + 1 == w.grid.pp_size)
        ((float *)mt_params_find(w.params, "embedding.word_embeddings.weight")->value.data)[0] = 3.0f;
    for (int step = 0; status == MT_SUCCESS && step < 2; step++) { /* the log is empty again after the first step */
        mine->count = 0;
        status = gpt_log_step(&w, log);
        if (status == MT_SUCCESS) status = mt_hash_log_flush(w.ctx, log, gpt_keep_line, mine);
    }
    if (status == MT_SUCCESS && mt_comm_rank(world) == 0) {
        memcpy(l->name, mine->name, sizeof l->name);
        memcpy(l->hash, mine->hash, sizeof l->hash);
        l->count = mine->count;
    }
    mt_hash_log_destroy(log);
    gpt_close(&w);
    free(mine);
    return status;
}

/* Returns the largest relative error of one rounding to nearest. */
static inline double gpt_roundoff(mt_dtype dtype) { return dtype == MT_BF16 ? ldexp(1, -8) : ldexp(1, -11); }

/* Returns the relative error of a logit, or of a gradient, of a model in a 16-bit type. In forward a number is rounded
   about ten times in each of the two layers (two norms, QKV, attention, projection, two residuals, three in the MLP)
   and three times outside of them. Backward has as many roundings, so there are 46. They are independent and of random
   sign. */
#define GPT_ROUNDINGS 46.0
static inline double gpt_half_error(mt_dtype dtype) { return sqrt(GPT_ROUNDINGS) * gpt_roundoff(dtype); }

/* Checks that the losses of two runs differ by no more than a relative error e of logits and gradients can cause.
   `gained` is how much the loss has fallen. The limit is the sum of three terms:
   - e (0.12 + gained): a loss is off by e times its logits, which begin with 0.02 sqrt(hidden) < 0.12 and grow by what
     the loss has gained;
   - e gained: a step lowers the loss by lr |g|_1, and an error e in g changes this by at most a part e. This adds up to
     e gained over all steps;
   - 6 lr sqrt(n e / pi) |g| after n steps: a step of AdamW is nearly lr sign(g). The error changes the sign of a part
     e / pi of the elements (those smaller than their error, when g is normally distributed), and these are off by 2 lr.
     With the gradient g of the next batch, this changes the loss by a random sum. Its standard deviation is
     2 lr sqrt(e / pi) |g| after one step, and sqrt(n) times as much after n steps. The limit is three times that: with
     twice that, one loss in some hundred is beyond it, as on an H200. */
static inline void gpt_assert_near(const gpt_run *r, const gpt_result *want, const gpt_result *got, double e) {
    double norm = 0, worst = 0;
    for (int i = 0; i < GPT_STEPS; i++) {
        double gained = fabs((double)want->loss[0] - (double)want->loss[i]), loss = (double)want->loss[i], off, allowed;
        norm = fmax(norm, (double)want->norm[i]);
        allowed = e * (0.12 + 2 * gained) + 6 * (double)gpt_lr(r) * sqrt(e / 3.14159 * i) * norm;
        off = fabs((double)got->loss[i] - loss);
        worst = test_larger(worst, off / allowed);
        if (!(off <= allowed))
            fail_msg("%s: step %d: loss %.9g, must be %.9g, to %.3g", gpt_name(r), i, (double)got->loss[i], loss,
                     allowed);
    }
    if (getenv("GPT_SHOW")) printf("      %s: at most %.2f of what is allowed\n", gpt_name(r), worst);
}

#endif /* MT_TEST_GPT_H */
