/* test_cuda_launches.cu - counts the kernels and the matrix products that a layer, a GPT's loss and an optimizer step
   start on a GPU, in which order some of them do, and how often the host waits, also in a training step of ranks that
   share a GPU. Each launch costs the host a few microseconds. Only the engine in tests/engine/ can count them: the
   program does not run on a GPU. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test.h"

#include "runtime.h"

#define GPT_STEPS 1
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"

static long kernels = 0, losses = 0; /* of them, the kernels of the cross-entropy */

/* Returns how many kernels and products have been started since the last call. */
static long started(void) {
    static long before = 0;
    long now = kernels + mte::gemm_count(), since = now - before;
    before = now;
    return since;
}

typedef struct model {
    mt_dtype dtype;
    int layers;
    long forward, backward, norm, step, on_gpu, waits; /* the counts */
} model;

static mt_status run_layer(test_rank *r, const mt_transformer_layer *layer, model *m) {
    const int64_t tokens = 32, hidden = layer->desc.hidden;
    mt_transformer_layer_saved saved;
    mt_tensor x, y, dy, dx;
    mt_arena_request memory[] = {{&x, m->dtype, tokens, hidden},
                                 {&y, m->dtype, tokens, hidden},
                                 {&dy, m->dtype, tokens, hidden},
                                 {&dx, m->dtype, tokens, hidden}};
    mt_batch batch;
    size_t mark = mt_arena_mark(r->ctx);
    memset(&batch, 0, sizeof batch);
    batch.sequences = 2;
    batch.seq = tokens / 2;
    MT_TRY(mt_arena_tensors(r->ctx, memory, 4));
    MT_TRY(mt_fill(r->ctx, x, 0.5f));
    MT_TRY(mt_fill(r->ctx, dy, 0.25f));
    started();
    MT_TRY(mt_transformer_layer_forward(r->ctx, layer, &batch, x, y, &saved));
    m->forward = started();
    MT_TRY(mt_transformer_layer_backward(r->ctx, layer, dy, dx, &saved));
    m->backward = started();
    mt_arena_release(r->ctx, mark);
    return MT_SUCCESS;
}

static mt_status run_optimizer(test_rank *r, model *m) {
    mt_optimizer optimizer;
    mt_status status;
    float norm;
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, &optimizer));
    started();
    status = mt_grad_norm(r->ctx, r->params, &norm);
    m->norm = started();
    if (status == MT_SUCCESS) status = mt_optimizer_step(r->ctx, &optimizer, 1e-3f, mt_clip_coefficient(norm, 1.0f));
    m->step = started();
    mt_optimizer_destroy(r->ctx, &optimizer);
    return status;
}

static mt_status run_step_on_gpu(test_rank *r, model *m) {
    mt_optimizer optimizer;
    mt_step step;
    mt_status status;
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, &optimizer));
    MT_TRY(mt_step_create(r->ctx, &optimizer, NULL, 1.0f, &step));
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    started();
    m->waits = -mte::host_waits();
    status = mt_step_begin(r->ctx, &step, 1e-3f, 1);
    if (status == MT_SUCCESS) status = mt_step_update(r->ctx, &step, mt_none());
    m->waits += mte::host_waits();
    m->on_gpu = started();
    mt_step_destroy(r->ctx, &step);
    mt_optimizer_destroy(r->ctx, &optimizer);
    return status;
}

static mt_status run_rank(test_rank *r, model *m) {
    mt_transformer_layer layers[4];
    mt_transformer_layer_desc d;
    memset(&d, 0, sizeof d);
    d.hidden = 128;
    d.heads = 2;
    d.dropout.attention = d.dropout.hidden = 0.1f;
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, m->dtype));
    for (int i = 0; i < m->layers; i++) {
        d.dropout.layer_number = i + 1;
        MT_TRY(mt_transformer_layer_create(r->ctx, r->params, NULL, &d, &layers[i]));
    }
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    for (int i = 0; i < 2; i++) MT_TRY(run_layer(r, &layers[0], m)); /* the first time chooses the products */
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(run_optimizer(r, m));
    return run_step_on_gpu(r, m);
}

static mt_status model_rank(mt_comm *world, void *user) {
    mt_grid_desc shape;
    mt_context_desc where;
    test_rank r;
    memset(&shape, 0, sizeof shape);
    memset(&where, 0, sizeof where);
    shape.tp = 1;
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = (size_t)16 << 20;
    mt_status status = test_rank_open(world, shape, &where, &r);
    if (status == MT_SUCCESS) status = run_rank(&r, (model *)user);
    test_rank_close(&r);
    return status;
}

/* At most 11 kernels and products forward and 23 backward. */
static void test_layer(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    (void)state;
    for (int i = 0; i < 3; i++) {
        model m = {types[i], 1, 0, 0, 0, 0, 0, 0};
        test_launch(1, model_rank, &m);
        if (m.forward > 11 || m.backward > 23 || m.forward < 5)
            fail_msg("%s: a layer starts %ld kernels and products forward and %ld backward", mt_dtype_name(m.dtype),
                     m.forward, m.backward);
    }
}

/* The norm and the step start the same few kernels for every number of parameters. A step that the GPU decides waits
   for nothing. */
static void test_optimizer(void **state) {
    (void)state;
    for (int layers = 1; layers <= 4; layers += 3) {
        model m = {MT_BF16, layers, 0, 0, 0, 0, 0, 0};
        test_launch(1, model_rank, &m);
        if (m.norm != 3 || m.step != 1)
            fail_msg("%d layers: the norm starts %ld kernels, and the step %ld", layers, m.norm, m.step);
        if (m.on_gpu != 6 || m.waits != 0)
            fail_msg("%d layers: a step on the GPU starts %ld kernels and waits %ld times", layers, m.on_gpu, m.waits);
    }
}

/* ---- ranks that share a GPU -------------------------------------------------------------------------------------- */

typedef struct waits_run {
    gpt_run r;
    long step[8], sync[8],
        norm[8]; /* how often each rank waits: in forward and backward; for the gradients; the norm */
} waits_run;

/* The first step chooses the products. */
static mt_status waits_rank(mt_comm *world, void *user) {
    waits_run *run = (waits_run *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, &run->r, &w);
    long before, behind, synced;
    float loss, norm;
    int rank = mt_comm_rank(world);
    if (status == MT_SUCCESS) status = gpt_gradients(&w, 0, &loss, &norm);
    w.step = 1;
    if (status == MT_SUCCESS)
        status = mt_arena_tensor(w.ctx, MT_F32, GPT_BATCH / (run->r.data ? run->r.data : 1), 1, &w.totals);
    if (status == MT_SUCCESS) status = mt_params_zero_grad(w.ctx, w.params);
    before = mte::host_waits();
    if (status == MT_SUCCESS) status = gpt_run_schedule(&w);
    behind = mte::host_waits();
    if (status == MT_SUCCESS) status = mt_sync_gradients(w.ctx, w.params);
    synced = mte::host_waits();
    if (status == MT_SUCCESS) status = mt_grad_norm(w.ctx, w.params, &norm);
    run->step[rank] = behind - before;
    run->sync[rank] = synced - behind;
    run->norm[rank] = mte::host_waits() - synced;
    gpt_close(&w);
    return status;
}

/* A training step waits for the GPU only where the host reads the norm: in the copy, and until it is done. */
static void test_ranks_on_one_gpu_do_not_wait(void **state) {
    static const int ways[][5] = {/* tensor, data, stages, sequence parallel, gradients summed beside the backward */
                                  {2, 1, 1, 0, 0}, {1, 2, 1, 0, 0}, {1, 2, 1, 0, 1}, {2, 1, 1, 1, 0},
                                  {1, 1, 2, 0, 0}, {2, 2, 1, 1, 1}, {2, 1, 2, 0, 0}, {1, 2, 2, 0, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        static waits_run run;
        memset(&run, 0, sizeof run);
        run.r.device = MT_DEVICE_CUDA;
        run.r.dtype = i % 2 ? MT_BF16 : MT_F32;
        run.r.tp = ways[i][0];
        run.r.data = ways[i][1];
        run.r.pipeline = ways[i][2];
        run.r.sequence_parallel = ways[i][3];
        run.r.begins = ways[i][4];
        test_launch(run.r.tp * run.r.data * run.r.pipeline, waits_rank, &run);
        for (int rank = 0; rank < run.r.tp * run.r.data * run.r.pipeline; rank++)
            if (run.step[rank] != 0 || run.sync[rank] != 0 || run.norm[rank] != 2)
                fail_msg("case %zu: rank %d waits %ld times in a step, %ld times for the gradients, %ld for their norm",
                         i, rank, run.step[rank], run.sync[rank], run.norm[rank]);
    }
}

/* ---- a step that does not wait ----------------------------------------------------------------------------------- */

typedef struct device_run {
    gpt_run r;
    long waits[8], starts, graph_waits[8], graph_starts, graph_launches; /* starts: of all ranks */
} device_run;

static mt_status device_begin(gpt_worker *w, uint64_t number) {
    MT_TRY(gpt_load(w));
    return mt_step_begin(w->ctx, &w->numbers, 1e-3f, number);
}

/* Counts in the second step, because the first one chooses the products, and in the third one, as a graph. */
static mt_status device_steps(gpt_worker *w, device_run *run) {
    int rank = mt_comm_rank(w->world);
    long waits, launches, kernels_before;
    MT_TRY(gpt_step_on_device(w, 0));
    MT_TRY(mt_barrier(w->ctx, w->comm));
    if (rank == 0) started();
    MT_TRY(mt_barrier(w->ctx, w->comm));
    waits = mte::host_waits();
    MT_TRY(device_begin(w, 1));
    MT_TRY(gpt_device_step(w));
    run->waits[rank] = mte::host_waits() - waits;
    MT_TRY(mt_barrier(w->ctx, w->comm));
    if (rank == 0) run->starts = started();
    MT_TRY(gpt_record(w));
    MT_TRY(mt_barrier(w->ctx, w->comm));
    kernels_before = kernels;
    MT_TRY(mt_barrier(w->ctx, w->comm));
    waits = mte::host_waits();
    launches = mte::graph_launches();
    MT_TRY(device_begin(w, 2));
    MT_TRY(mt_graph_launch(w->ctx, w->graph));
    run->graph_waits[rank] = mte::host_waits() - waits;
    if (rank == 0) run->graph_launches = mte::graph_launches() - launches;
    MT_TRY(mt_barrier(w->ctx, w->comm));
    if (rank == 0) run->graph_starts = kernels - kernels_before;
    return MT_SUCCESS;
}

static mt_status device_rank(mt_comm *world, void *user) {
    device_run *run = (device_run *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, &run->r, &w);
    if (status == MT_SUCCESS) status = device_steps(&w, run);
    gpt_close(&w);
    return status;
}

/* Uploads, forward, backward, norm, loss scale and optimizer: the host waits for none of them. A step of 4
   micro-batches through 2 layers starts 433 kernels and products. As a graph, it is one launch of one rank. */
static void test_a_step_does_not_wait(void **state) {
    static const int ways[][4] = {/* tensor, data, stages, f16 */
                                  {1, 1, 1, 0},
                                  {1, 1, 1, 1},
                                  {2, 1, 1, 1},
                                  {1, 2, 1, 0},
                                  {2, 1, 2, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        static device_run run;
        static gpt_result result;
        int ranks = ways[i][0] * ways[i][1] * ways[i][2];
        memset(&run, 0, sizeof run);
        run.r.device = MT_DEVICE_CUDA;
        run.r.dtype = ways[i][3] ? MT_F16 : MT_BF16;
        run.r.tp = ways[i][0];
        run.r.data = ways[i][1];
        run.r.pipeline = ways[i][2];
        run.r.loss_scale = ways[i][3] ? 1024.0f : 0.0f;
        run.r.on_device = run.r.one_pass = 1;
        run.r.out = &result;
        test_launch(ranks, device_rank, &run);
        for (int rank = 0; rank < ranks; rank++)
            if (run.waits[rank] != 0 || run.graph_waits[rank] != 0)
                fail_msg("case %zu: rank %d waits %ld times in a step, and %ld times in a step as a graph", i, rank,
                         run.waits[rank], run.graph_waits[rank]);
        if (ranks == 1 && run.starts != 433) fail_msg("case %zu: a step starts %ld kernels", i, run.starts);
        if (run.graph_starts != 0 || run.graph_launches != 1)
            fail_msg("case %zu: a graph starts %ld kernels with %ld launches", i, run.graph_starts, run.graph_launches);
    }
}

/* ---- the loss of a GPT ------------------------------------------------------------------------------------------ */

/* One forward and backward of a GPT, or an evaluation. */
typedef struct loss_run {
    float backward_scale;
    int invariant, training;
    long forward, backward; /* kernels of the cross-entropy */
    long others;            /* kernels and products besides them */
} loss_run;

static mt_status run_gpt(test_rank *r, loss_run *run) {
    const int64_t tokens = 16;
    mt_gpt_desc d;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_batch batch;
    mt_tensor ids, loss;
    memset(&d, 0, sizeof d);
    memset(&batch, 0, sizeof batch);
    d.vocab = 64;
    d.layers = 1;
    d.max_seq = batch.seq = tokens;
    d.layer.hidden = 64;
    d.layer.heads = 2;
    batch.sequences = 1;
    batch.backward_scale = run->backward_scale;
    MT_TRY(mt_gpt_create(r->ctx, r->params, &d, &gpt));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_arena_tensor(r->ctx, MT_I32, 1, tokens, &ids));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, 1, tokens, &loss));
    MT_TRY(mt_position_ids(r->ctx, 0, tokens, NULL, 0, (int32_t *)ids.data, tokens));
    MT_TRY(mt_gpt_saved_create(r->ctx, &gpt, &saved));
    mt_status status = MT_SUCCESS;
    for (int i = 0; status == MT_SUCCESS && i < 2; i++) { /* the first time chooses the products */
        size_t mark = mt_arena_mark(r->ctx);
        started();
        losses = 0;
        status = mt_gpt_forward(r->ctx, &gpt, &batch, (int32_t *)ids.data, (int32_t *)ids.data, loss,
                                run->training ? &saved : NULL);
        run->forward = losses;
        losses = 0;
        if (status == MT_SUCCESS && run->training) status = mt_gpt_backward(r->ctx, &gpt, 0.5f, &saved);
        run->backward = losses;
        run->others = started() - run->forward - run->backward;
        mt_arena_release(r->ctx, mark);
    }
    mt_gpt_saved_destroy(&saved);
    return status;
}

static mt_status loss_rank(mt_comm *world, void *user) {
    loss_run *run = (loss_run *)user;
    mt_grid_desc shape;
    mt_context_desc where;
    test_rank r;
    memset(&shape, 0, sizeof shape);
    memset(&where, 0, sizeof where);
    shape.tp = 1;
    where.device = MT_DEVICE_CUDA;
    where.invariant = run->invariant;
    where.arena_bytes = (size_t)16 << 20;
    mt_status status = test_rank_open(world, shape, &where, &r);
    if (status == MT_SUCCESS) status = run_gpt(&r, run);
    test_rank_close(&r);
    return status;
}

static loss_run count_loss(float backward_scale, int invariant, int training) {
    loss_run run = {backward_scale, invariant, training, 0, 0, 0};
    test_launch(1, loss_rank, &run);
    return run;
}

/* A training step whose forward knows the scale of backward starts one kernel for the loss, instead of three. In
   invariant mode, and in an evaluation, it starts those of a step that does not know it. */
static void test_loss(void **state) {
    static const struct {
        int invariant, training;
        long apart[2], together[2]; /* kernels in forward and in backward */
    } want[] = {{0, 1, {2, 1}, {1, 0}}, {1, 1, {2, 1}, {3, 0}}, {2, 1, {3, 2}, {5, 0}}, {0, 0, {2, 0}, {2, 0}}};
    (void)state;
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        loss_run apart = count_loss(0.0f, want[i].invariant, want[i].training);
        loss_run together = count_loss(0.5f, want[i].invariant, want[i].training);
        if (apart.forward != want[i].apart[0] || apart.backward != want[i].apart[1] ||
            together.forward != want[i].together[0] || together.backward != want[i].together[1])
            fail_msg("invariant %d: the loss starts %ld and %ld kernels, and %ld and %ld in one pass",
                     want[i].invariant, apart.forward, apart.backward, together.forward, together.backward);
        assert_true(apart.others == together.others && apart.others > 0);
    }
}

/* ---- weight gradients behind reductions -------------------------------------------------------------------------- */

/* Opens rank 0 of 2 tensor ranks on the meta device. */
static void open_half(mt_device planned, int invariant, test_rank *r) {
    const mt_grid_desc shape = {.tp = 2};
    mt_context_desc meta;
    memset(&meta, 0, sizeof meta);
    meta.device = MT_DEVICE_META;
    meta.planned = planned;
    meta.invariant = invariant;
    test_paper_rank(2, 0, shape, &meta, r);
}

static mt_tensor view(mt_context *ctx, int64_t rows, int64_t cols) {
    mt_tensor t;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, rows, cols, &t));
    return t;
}

static void drop_trace(mt_context *ctx) {
    mt_trace trace;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_take_trace(ctx, &trace));
    mt_trace_free(&trace);
}

/* Takes the trace, which must have so many products. */
static void assert_gemms(mt_context *ctx, int expected) {
    int gemms = 0;
    mt_trace trace;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_take_trace(ctx, &trace));
    for (size_t i = 0; i < trace.count; i++) gemms += trace.entries[i].work == MT_WORK_GEMM;
    mt_trace_free(&trace);
    assert_int_equal(gemms, expected);
}

/* Checks that the backward of a block of 2 tensor ranks has so many products, and `behind` of them between its last
   reduction and the wait for it. */
static void assert_products_behind(mt_context *ctx, const char *what, int products, int behind) {
    int gemms = 0, hidden = 0, ticket = -1, done = 0; /* of the last reduction */
    mt_trace trace;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_take_trace(ctx, &trace));
    for (size_t i = 0; i < trace.count; i++) {
        const mt_trace_entry *e = &trace.entries[i];
        if (e->work == MT_WORK_COMMUNICATION) hidden = done = 0;
        if (e->work == MT_WORK_OVERLAP_END) ticket = e->ticket;
        if (e->work == MT_WORK_OVERLAP_WAIT && e->ticket == ticket) done = 1;
        gemms += e->work == MT_WORK_GEMM;
        hidden += e->work == MT_WORK_GEMM && !done;
    }
    mt_trace_free(&trace);
    if (gemms != products || hidden != behind)
        fail_msg("%s: %d of %d products are behind the last reduction, expected %d of %d", what, hidden, gemms, behind,
                 products);
}

/* On a GPU, the weight gradients of fc2 and of proj wait for the reduction of fc1's and of qkv's dx; not where they
   cannot, and not on a CPU. */
static void test_weight_gradients_wait_for_reductions(void **state) {
    (void)state;
    for (int how = 0; how < 4; how++) {
        int sp = how == 1, gpu = how != 2, invariant = how == 3;
        const mt_mlp_desc mlp_desc = {.hidden = 16, .sequence_parallel = sp};
        const mt_self_attention_desc attention_desc = {.hidden = 16, .heads = 2, .sequence_parallel = sp};
        const mt_batch batch = {.sequences = 2, .seq = 8};
        const int at_once = sp || !gpu || invariant;
        mt_self_attention_saved attention_saved;
        mt_self_attention attention;
        mt_params *params;
        mt_mlp_saved saved;
        mt_tensor x, y, dx;
        mt_mlp mlp;
        test_rank r;
        open_half(gpu ? MT_DEVICE_CUDA : MT_DEVICE_CPU, invariant ? 2 : 0, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_create(r.ctx, &r.grid, &params));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_mlp_create(r.ctx, params, "mlp", &mlp_desc, &mlp));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_self_attention_create(r.ctx, params, "attn", &attention_desc, &attention));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, params));
        x = view(r.ctx, sp ? 8 : 16, 16), y = view(r.ctx, x.rows, 16);
        dx = view(r.ctx, x.rows, 16);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_mlp_forward(r.ctx, &mlp, x, y, &saved));
        drop_trace(r.ctx);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_mlp_backward(r.ctx, &mlp, y, dx, &saved));
        assert_products_behind(r.ctx, "mlp", 4, at_once ? 1 : 2);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_self_attention_forward(r.ctx, &attention, &batch, x, y, &attention_saved));
        drop_trace(r.ctx);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_self_attention_backward(r.ctx, &attention, y, dx, &attention_saved));
        assert_products_behind(r.ctx, "attention", 4, at_once ? 1 : 2);
        mt_params_destroy(params);
        test_paper_rank_close(&r);
    }
}

/* What is left over is named, and an error of the calls between, or the end of the parameters, drops it. */
static void test_weight_gradients_left_over(void **state) {
    const mt_linear_desc desc = {.in_features = 8, .out_features = 8, .input_is_parallel = 1};
    mt_row_parallel_linear layer;
    mt_linear_saved saved;
    mt_params *params;
    mt_tensor x, y, dx;
    test_rank r;
    (void)state;
    open_half(MT_DEVICE_CUDA, 0, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_create(r.ctx, &r.grid, &params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, params, "out", &desc, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, params));
    x = view(r.ctx, 4, 4), y = view(r.ctx, 4, 8), dx = view(r.ctx, 4, 4);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_forward(r.ctx, &layer, x, y, &saved));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "call mt_defer_weight_gradients first",
            mt_defer_weight_gradients_end(r.ctx, MT_SUCCESS));
    assert_int_equal(mt_defer_weight_gradients_end(r.ctx, MT_ERR_SYSTEM), MT_ERR_SYSTEM);
    assert_int_equal(mt_defer_weight_gradients(NULL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_defer_weight_gradients_end(NULL, MT_SUCCESS), MT_ERR_ARGUMENT);
    drop_trace(r.ctx);
    for (int products = 0; products < 3; products++) { /* pairs inside each other */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_defer_weight_gradients(r.ctx));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_backward(r.ctx, &layer, y, dx, &saved));
    }
    assert_gemms(r.ctx, 3); /* dx only */
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "gradient of 'out.weight' was left for later; call mt_defer_weight_gradients_end",
            mt_sync_gradients(r.ctx, params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_defer_weight_gradients_end(r.ctx, MT_SUCCESS));
    assert_gemms(r.ctx, 3);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_defer_weight_gradients_end(r.ctx, MT_SUCCESS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_backward(r.ctx, &layer, y, dx, &saved));
    assert_gemms(r.ctx, 1);
    assert_int_equal(mt_defer_weight_gradients_end(r.ctx, MT_ERR_SYSTEM), MT_ERR_SYSTEM);
    assert_gemms(r.ctx, 0);
    for (int i = 0; i < 9; i++) { /* more than fit */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_defer_weight_gradients(r.ctx));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_backward(r.ctx, &layer, y, dx, &saved));
    }
    for (int i = 0; i < 9; i++) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_defer_weight_gradients_end(r.ctx, MT_SUCCESS));
    assert_gemms(r.ctx, 18);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_defer_weight_gradients(r.ctx));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_backward(r.ctx, &layer, y, dx, &saved));
    mt_params_destroy(params);
    assert_gemms(r.ctx, 1);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_defer_weight_gradients_end(r.ctx, MT_SUCCESS));
    assert_gemms(r.ctx, 0);
    test_paper_rank_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layer),
        cmocka_unit_test(test_optimizer),
        cmocka_unit_test(test_ranks_on_one_gpu_do_not_wait),
        cmocka_unit_test(test_a_step_does_not_wait),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_weight_gradients_wait_for_reductions),
        cmocka_unit_test(test_weight_gradients_left_over),
    };
    setenv("MTE_DEVICES", "1", 1); /* before the engine reads it */
    mte::on_launch([](const char *name) {
        ++kernels;
        losses += strstr(name, "mti_ce_") != NULL;
    });
    return cmocka_run_group_tests(tests, NULL, NULL);
}
