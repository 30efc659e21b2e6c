/* test_cuda_nvtx.cu - tests the ranges that MT_USE_NVTX adds to a profile, against the expected names: each block
   and each collective has one, they nest, and they are closed when a call fails. NVTX is real; this program is the
   tool that receives the ranges.
     On a GPU:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_nvtx.cu -lcublasLt
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU. */

#define MT_USE_NVTX
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test.h"

#define DEEPEST 16
#define NAMES 64

/* The ranges of one thread. */
typedef struct profile {
    const char *open[DEEPEST];
    int depth, deepest, unbalanced, names;
    char names_seen[NAMES][96]; /* "outer > inner" of each range that was opened */
} profile;

static __thread profile mine;

static int seen(const profile *p, const char *name) {
    for (int i = 0; i < p->names; i++)
        if (strcmp(p->names_seen[i], name) == 0) return 1;
    return 0;
}

static int NVTX_API push(const char *name) {
    char text[96];
    snprintf(text, sizeof text, "%s > %s", mine.depth ? mine.open[mine.depth - 1] : "", name);
    if (!seen(&mine, text) && mine.names < NAMES) snprintf(mine.names_seen[mine.names++], sizeof text, "%s", text);
    if (mine.depth < DEEPEST) mine.open[mine.depth] = name;
    mine.depth++;
    if (mine.depth > mine.deepest) mine.deepest = mine.depth;
    return mine.depth - 1;
}

static int NVTX_API pop(void) {
    if (mine.depth == 0) mine.unbalanced++;
    else mine.depth--;
    return mine.depth;
}

static int NVTX_API initialize(NvtxGetExportTableFunc_t get) {
    const NvtxExportTableCallbacks *callbacks = (const NvtxExportTableCallbacks *)get(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned size = 0;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}

typedef struct job {
    mt_device device;
    profile found;
} job;

/* A training step of a small GPT, then a step that fails in the middle. */
static mt_status step(mt_comm *world, mt_context *ctx, mt_params **params, mt_gpt *gpt, mt_gpt_saved *saved,
                      mt_optimizer *optimizer, mt_grid *grid) {
    mt_grid_desc shape = {0, 1, 1, 1};
    mt_gpt_desc model;
    mt_batch batch;
    mt_tensor ids, loss;
    void *rest = NULL;
    int32_t host[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    memset(&model, 0, sizeof model);
    memset(&batch, 0, sizeof batch);
    model.vocab = 16, model.layers = 1, model.max_seq = 8;
    model.layer.hidden = 16, model.layer.heads = 2;
    batch.sequences = 1, batch.seq = 8;
    shape.tp = mt_comm_size(world);
    MT_TRY(mt_grid_create(world, &shape, grid));
    MT_TRY(mt_params_create(ctx, grid, params));
    MT_TRY(mt_gpt_create(ctx, *params, &model, gpt));
    MT_TRY(mt_params_init(ctx, *params, 1));
    MT_TRY(mt_gpt_saved_create(ctx, gpt, saved));
    MT_TRY(mt_optimizer_create(ctx, *params, NULL, optimizer));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, 8, &ids));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 8, &loss));
    MT_TRY(mt_upload(ctx, host, ids));
    size_t mark = mt_arena_mark(ctx);
    MT_TRY(mt_gpt_forward(ctx, gpt, &batch, (int32_t *)ids.data, (int32_t *)ids.data, loss, saved));
    MT_TRY(mt_gpt_backward(ctx, gpt, 1.0f, saved));
    MT_TRY(mt_optimizer_step(ctx, optimizer, 1e-3f, 1.0f));
    mt_arena_release(ctx, mark);
    if (mine.depth != 0) return MT_ERR_DATA;
    batch.backward_scale = 1.0f;
    for (size_t more = 256; more < 40000; more += 1500) { /* the arena is exhausted earlier each time */
        mark = mt_arena_mark(ctx);
        MT_TRY(mt_params_zero_grad(ctx, *params));
        if (mt_arena_alloc(ctx, ((size_t)4 << 20) - mark - 40000 + more, &rest) != MT_SUCCESS) return MT_ERR_MEMORY;
        mt_status status = mt_gpt_forward(ctx, gpt, &batch, (int32_t *)ids.data, (int32_t *)ids.data, loss, saved);
        if (status == MT_SUCCESS) status = mt_gpt_backward(ctx, gpt, 1.0f, saved);
        if (mine.depth != 0) return MT_ERR_DATA;
        mt_arena_release(ctx, mark);
        if (more > 35000 && status != MT_ERR_MEMORY) return MT_ERR_DATA;
    }
    return MT_SUCCESS;
}

static mt_status rank_main(mt_comm *world, void *user) {
    job *j = (job *)user;
    mt_context_desc where;
    mt_context *ctx;
    mt_params *params = NULL;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer optimizer;
    mt_grid grid;
    memset(&mine, 0, sizeof mine);
    memset(&where, 0, sizeof where);
    memset(&saved, 0, sizeof saved);
    memset(&optimizer, 0, sizeof optimizer);
    memset(&grid, 0, sizeof grid);
    where.device = j->device;
    where.arena_bytes = (size_t)4 << 20;
    MT_TRY(mt_context_create(world, &where, &ctx));
    mt_status status = step(world, ctx, &params, &gpt, &saved, &optimizer, &grid);
    mt_optimizer_destroy(ctx, &optimizer);
    mt_gpt_saved_destroy(&saved);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    if (mt_comm_rank(world) == 0) j->found = mine;
    return status;
}

static void test_ranges(void **state) {
    static const char *const names[] = {" > embedding forward",
                                        "embedding forward > all_reduce",
                                        " > layer forward",
                                        "layer forward > attention forward",
                                        "layer forward > mlp forward",
                                        "mlp forward > all_reduce",
                                        " > head forward",
                                        " > loss forward",
                                        "loss forward > all_gather",
                                        " > loss backward",
                                        " > loss forward and backward",
                                        "loss forward and backward > all_gather",
                                        " > head backward",
                                        " > layer backward",
                                        "layer backward > mlp backward",
                                        "layer backward > attention backward",
                                        "mlp backward > all_reduce",
                                        " > embedding backward",
                                        " > optimizer step"};
    static job j;
    (void)state;
    for (int device = 0; device < 2; device++) {
        mt_launch_desc d;
        memset(&d, 0, sizeof d);
        memset(&j, 0, sizeof j);
        d.ranks = 2;
        d.no_pinning = 1;
        j.device = (mt_device)device;
        mt_status status = mt_launch(&d, rank_main, &j);
        if (status != MT_SUCCESS) fail_msg("device %d: %s", device, mt_status_name(status));
        assert_int_equal(j.found.depth, 0);
        assert_int_equal(j.found.unbalanced, 0);
        assert_int_equal(j.found.deepest, 3);
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (!seen(&j.found, names[i])) fail_msg("device %d: no range \"%s\"", device, names[i]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ranges)};
    InitializeInjectionNvtx2_fnptr = initialize; /* the tool is linked, not loaded */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
