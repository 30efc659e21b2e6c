/* test_cuda_gpt.cu - a GPT trained on 1, 2, 4 and 8 GPUs, or ranks that share one, gives the CPU's losses,
    gradients and weights;
   in invariant mode all of them give the same bits.

   On GPUs:       nvcc -std=c++17 -O2 -I. tests/test_cuda_gpt.cu -lcublasLt -lcmocka    (and -DMT_USE_NCCL -lnccl)
   Without:       tests/engine/ runs the same file on a CPU, see there.                                                 */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test.h"

#include <math.h>

#ifndef GPT_STEPS
#define GPT_STEPS 20
#endif
#define SEQ 8
#define BATCH 8
#define MAX_FLOATS 32768

/* What rank 0 of a run found: loss and gradient norm of every step, and all weights at the end. */
typedef struct result {
    float loss[GPT_STEPS], norm[GPT_STEPS], weights[MAX_FLOATS];
    int64_t count;
    size_t arena_peak, allocated;
} result;

typedef struct run {
    mt_device device;
    int tensor, data, sequence_parallel, invariant, llama;
    result *out;
    mt_epilogue epilogue;
    mt_device planned;
    int64_t ffn; /* 0: 44 */
} run;

typedef struct worker {
    const run *r;
    mt_comm *world, *comm; /* the launcher's; over NCCL where that is built */
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer optimizer;
    int32_t *ids; /* ids and targets of a sequence, on the device */
    mt_tensor losses;
} worker;

static mt_gpt_desc model_of(const run *r) {
    mt_gpt_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 37;
    d.layers = 2;
    d.max_seq = SEQ;
    d.embedding_dropout = 0.1f;
    d.layer.hidden = r->llama ? 32 : 24;
    d.layer.heads = r->llama ? 16 : 8;
    d.layer.kv_heads = 8;
    d.layer.ffn = r->ffn ? r->ffn : 44;
    d.layer.attention_dropout = d.layer.hidden_dropout = 0.1f;
    d.layer.sequence_parallel = r->sequence_parallel;
    if (!r->llama) return d;
    d.untied_head = 1;
    d.label_smoothing = 0.1f;
    d.layer.norm = MT_RMS_NORM;
    d.layer.activation = MT_SWIGLU;
    d.layer.rotary_base = 100.0f;
    d.layer.no_bias = 1;
    return d;
}

static mt_status micro_batch(worker *w, int step, int64_t sequence, mt_tensor total) {
    mt_batch batch;
    int32_t ids[SEQ + 1];
    uint64_t seed = (uint64_t)(step * 1000 + sequence);
    size_t mark = mt_arena_mark(w->ctx);
    memset(&batch, 0, sizeof batch);
    batch.sequences = 1;
    batch.seq = SEQ;
    batch.first_sequence = sequence;
    batch.seed = 5;
    batch.step = (uint64_t)step;
    for (int i = 0; i <= SEQ; i++) ids[i] = (int32_t)(i ? (ids[i - 1] * 3 + 1 + (int)test_below(&seed,
                                                                                                2)) % 37 : sequence % 37);
    MT_TRY(mt_upload(w->ctx, ids, mt_tensor_make(w->ids, MT_I32, 1, SEQ)));
    MT_TRY(mt_upload(w->ctx, ids + 1, mt_tensor_make(w->ids + SEQ, MT_I32, 1, SEQ)));
    MT_TRY(mt_gpt_forward(w->ctx, &w->gpt, &batch, w->ids, w->ids + SEQ, w->losses, &w->saved));
    MT_TRY(mt_sum(w->ctx, w->losses, total));
    MT_TRY(mt_gpt_backward(w->ctx, &w->gpt, 1.0f / (BATCH * SEQ), &w->saved));
    mt_arena_release(w->ctx, mark);
    return mt_accumulate_gradients(w->ctx, w->params);
}

static mt_status train_step(worker *w, int step) {
    int64_t share = BATCH / w->grid.data_size;
    float loss, norm;
    mt_tensor totals;
    size_t mark = mt_arena_mark(w->ctx);
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, share, 1, &totals));
    MT_TRY(mt_fill(w->ctx, totals, 0.0f));
    MT_TRY(mt_params_zero_grad(w->ctx, w->params));
    for (int64_t i = 0; i < share; i++)
        MT_TRY(micro_batch(w, step, w->grid.data_rank * share + i, mt_tensor_rows(totals, i, 1)));
    MT_TRY(mt_tree_sum(w->ctx, totals));
    MT_TRY(mt_all_reduce(w->ctx, w->grid.data, totals.data, totals.data, 1, MT_F32, MT_SUM));
    MT_TRY(mt_download(w->ctx, mt_tensor_rows(totals, 0, 1), &loss));
    MT_TRY(mt_sync_gradients(w->ctx, w->params));
    MT_TRY(mt_grad_norm(w->ctx, w->params, &norm));
    mt_arena_release(w->ctx, mark);
    if (mt_comm_rank(w->world) == 0) {
        w->r->out->loss[step] = loss / (BATCH * SEQ);
        w->r->out->norm[step] = norm;
    }
    return mt_optimizer_step(w->ctx, &w->optimizer, 1e-2f, mt_clip_coefficient(norm, 1.0f));
}

static mt_status keep_weights(worker *w) {
    float *all = (float *)malloc(MAX_FLOATS * sizeof *all);
    int64_t n = 0;
    mt_status status = all ? MT_SUCCESS : MT_ERR_MEMORY;
    for (int i = 0; status == MT_SUCCESS && i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        if (n + p->desc.rows * p->desc.cols > MAX_FLOATS) abort();
        status = mt_param_gather(w->ctx, w->params, p, p->value, all + n);
        n += p->desc.rows * p->desc.cols;
    }
    if (status == MT_SUCCESS && mt_comm_rank(w->world) == 0) {
        memcpy(w->r->out->weights, all, (size_t)n * sizeof *all);
        w->r->out->count = n;
    }
    free(all);
    return status;
}

static mt_status train(worker *w) {
    const run *r = w->r;
    mt_grid_desc shape = {r->tensor, r->data, 1};
    mt_context_desc where;
    mt_gpt_desc model = model_of(r);
    void *memory;
    memset(&where, 0, sizeof where);
    where.device = r->device;
    where.ordinal = mt_comm_rank(w->world);
    where.arena_bytes = (size_t)4 << 20;
    where.invariant = r->invariant;
    where.epilogue = r->epilogue;
    where.planned = r->planned;
    where.arena_symmetric = 1;
    MT_TRY(mt_context_create(w->world, &where, &w->ctx));
    MT_TRY(mt_comm_create_for(w->ctx, w->world, &w->comm));
    MT_TRY(mt_grid_create(w->comm, &shape, &w->grid));
    MT_TRY(mt_params_create(w->ctx, &w->grid, &w->params));
    MT_TRY(mt_gpt_create(w->ctx, w->params, &model, &w->gpt));
    MT_TRY(mt_params_init(w->ctx, w->params, 77));
    MT_TRY(mt_gpt_saved_create(w->ctx, &w->gpt, &w->saved));
    MT_TRY(mt_optimizer_create(w->ctx, w->params, NULL, &w->optimizer));
    MT_TRY(mt_arena_alloc(w->ctx, 2 * SEQ * sizeof(int32_t), &memory));
    w->ids = (int32_t *)memory;
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, 1, SEQ, &w->losses));
    for (int step = 0; step < (r->device == MT_DEVICE_META ? 1 : GPT_STEPS); step++) MT_TRY(train_step(w, step));
    if (mt_comm_rank(w->world) == 0) {
        r->out->arena_peak = mt_arena_peak(w->ctx);
        r->out->allocated = mt_context_allocated(w->ctx);
    }
    return keep_weights(w);
}

static mt_status rank_main(mt_comm *world, void *user) {
    worker w;
    mt_status status;
    memset(&w, 0, sizeof w);
    w.r = (const run *)user;
    w.world = world;
    status = train(&w);
    mt_optimizer_destroy(w.ctx, &w.optimizer);
    mt_gpt_saved_destroy(&w.saved);
    mt_params_destroy(w.params);
    mt_grid_destroy(&w.grid);
    mt_comm_destroy(w.comm);
    mt_context_destroy(w.ctx);
    return status;
}

static void execute_run(run r) {
    mt_launch_desc d;
    mt_status status;
    int tensor = r.tensor, data = r.data;
    memset(&d, 0, sizeof d);
    memset(r.out, 0, sizeof *r.out);
    d.ranks = tensor * data;
    d.no_pinning = 1;
    d.timeout_s = 120;
    status = mt_launch(&d, rank_main, &r);
    if (status != MT_SUCCESS) fail_msg("%d x %d: %s", tensor, data, mt_status_name(status));
}

static void execute(mt_device device, int tensor, int data, int sp, int invariant, int llama, result *out) {
    run r = {device, tensor, data, sp, invariant, llama, out, MT_EPILOGUE_SEPARATE, MT_DEVICE_CPU, 0};
    execute_run(r);
}

/* The arena that a meta context plans for a device is what rank 0 takes there. */
static void assert_planned(mt_device device, int tensor, int data, int sp, int llama, const result *found) {
    static result plan;
    run r = {MT_DEVICE_META, tensor, data, sp, 0, llama, &plan, MT_EPILOGUE_SEPARATE, device, 0};
    mt_comm *world = NULL;
    memset(&plan, 0, sizeof plan);
    assert_int_equal(mt_comm_create_meta(tensor * data, 0, &world), MT_SUCCESS);
    mt_status status = rank_main(world, &r);
    if (status != MT_SUCCESS) fail_msg("a plan for %d x %d: %s", tensor, data, mt_comm_last_error(world));
    mt_comm_destroy(world);
    if (plan.arena_peak != found->arena_peak)
        fail_msg("device %d, %d x %d, sequence parallel %d, llama %d: an arena of %zu bytes was planned, %zu were used",
                 (int)device, tensor, data, sp, llama, plan.arena_peak, found->arena_peak);
}

/* Losses within 1e-5 at every step; norms and weights with what 20 steps of AdamW make of rounding. */
static void assert_near(const result *a, const result *b, const char *what) {
    double worst = 0;
    for (int i = 0; i < GPT_STEPS; i++) {
        if (!(fabs(a->loss[i] - b->loss[i]) <= 1e-5 * a->loss[i]))
            fail_msg("%s: step %d: loss %.9g, on the CPU %.9g", what, i, (double)b->loss[i], (double)a->loss[i]);
        if (!(fabs(a->norm[i] - b->norm[i]) <= 1e-4 * a->norm[i]))
            fail_msg("%s: step %d: norm %.9g, on the CPU %.9g", what, i, (double)b->norm[i], (double)a->norm[i]);
    }
    assert_int_equal(a->count, b->count);
    for (int64_t i = 0; i < a->count; i++) worst = fmax(worst, fabs((double)a->weights[i] - (double)b->weights[i]));
    if (!(worst <= 2e-3)) fail_msg("%s: a weight is off by %g", what, worst);
}

static const int splits[][3] = {{1, 1, 0}, {2, 1, 0}, {4, 1, 1}, {8, 1, 0}, {2, 2, 1}, {1, 4, 0}};
#define SPLITS (sizeof splits / sizeof *splits)

static void test_training_as_on_the_cpu(void **state) {
    static result on_cpu, on_gpu;
    (void)state;
    for (int llama = 0; llama < 2; llama++) {
        execute(MT_DEVICE_CPU, 1, 1, 0, 0, llama, &on_cpu);
        assert_true(on_cpu.loss[GPT_STEPS - 1] < on_cpu.loss[0]);
        assert_planned(MT_DEVICE_CPU, 1, 1, 0, llama, &on_cpu);
        for (size_t i = 0; i < SPLITS; i++) {
            char what[64];
            snprintf(what, sizeof what, "%s, tensor %d x data %d%s", llama ? "Llama" : "GPT-2", splits[i][0], splits[i][1],
                     splits[i][2] ? ", sequence parallel" : "");
            execute(MT_DEVICE_CUDA, splits[i][0], splits[i][1], splits[i][2], 0, llama, &on_gpu);
            assert_near(&on_cpu, &on_gpu, what);
            assert_planned(MT_DEVICE_CUDA, splits[i][0], splits[i][1], splits[i][2], llama, &on_gpu);
        }
    }
}

/* Products with epilogues give the same model; on a CPU, where operators run one after the other, the same bits. */
static void test_epilogues(void **state) {
    static result on_cpu, on_gpu, apart;
    static const int ways[][4] = {{MT_EPILOGUE_FUSED, 1, 1, 0}, {MT_EPILOGUE_MEASURED, 2, 1, 0}, {MT_EPILOGUE_FUSED, 4, 1, 1}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        run r = {MT_DEVICE_CPU, 1, 1, 0, 0, 0, &on_cpu, (mt_epilogue)ways[i][0], MT_DEVICE_CPU, 64};
        if (i == 0) {
            execute_run(r);
            r.epilogue = MT_EPILOGUE_SEPARATE;
            r.out = &apart;
            execute_run(r);
            assert_true(memcmp(&on_cpu, &apart, offsetof(result, arena_peak)) == 0);
            r.epilogue = (mt_epilogue)ways[i][0];
        }
        r.device = MT_DEVICE_CUDA;
        r.tensor = ways[i][1], r.data = ways[i][2], r.sequence_parallel = ways[i][3];
        r.out = &on_gpu;
        execute_run(r);
        assert_near(&on_cpu, &on_gpu, "with epilogues");
    }
}

static void test_invariant_mode(void **state) {
    static result one, many;
    (void)state;
    for (int llama = 0; llama < 2; llama++) {
        execute(MT_DEVICE_CUDA, 1, 1, 0, 8, llama, &one);
        for (size_t i = 1; i < SPLITS; i++) {
            execute(MT_DEVICE_CUDA, splits[i][0], splits[i][1], splits[i][2], 8, llama, &many);
            if (memcmp(&one, &many, offsetof(result, arena_peak)) != 0)
                fail_msg("tensor %d x data %d, sequence parallel %d: other bits than on one rank", splits[i][0],
                         splits[i][1], splits[i][2]);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_training_as_on_the_cpu),
        cmocka_unit_test(test_invariant_mode),
        cmocka_unit_test(test_epilogues),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
