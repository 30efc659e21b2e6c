/* test_blocks.c - tests the blocks of megatron.h: MLP, attention, transformer layer and GPT on every split against
   one rank, against finite differences, and on the meta device; what they communicate, allocate and refuse.
       cc -std=gnu17 -O2 -I. tests/test_blocks.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

/* ---- one block of any kind --------------------------------------------------------------------------------------- */

typedef enum kind { MLP, ATTENTION, LAYER } kind;

typedef enum bias_kind {
    NO_BIAS,
    MASK,      /* boolean, one for all sequences and heads */
    FULL_MASK, /* boolean, one for each sequence and head */
    ONE_BIAS,  /* one for all sequences and heads, with a gradient */
    HEAD_BIAS, /* one for each head, with a gradient */
    FULL_BIAS  /* one for each sequence and head, with a gradient */
} bias_kind;

typedef struct block_case {
    const char *name;
    kind kind;
    mt_mlp_desc mlp;
    mt_self_attention_desc attention;
    mt_transformer_layer_desc layer;
    int lengths; /* 1: the sequences have different lengths */
    int packed;  /* 1: the batch is packed documents */
    bias_kind bias;
} block_case;

#define DOCUMENTS 5

typedef struct block {
    const block_case *c;
    test_rank *r;
    mt_mlp mlp;
    mt_self_attention attention;
    mt_transformer_layer layer;
    mt_batch batch;
    int32_t cu_seqlens[DOCUMENTS + 1];
    uint8_t mask[2 * 8 * 12 * 12];
    int64_t hidden;
    int sequence_parallel;
} block;

typedef struct block_saved {
    mt_mlp_saved mlp;
    mt_self_attention_saved attention;
    mt_transformer_layer_saved layer;
} block_saved;

static const int32_t some_lengths[] = {7, 12, 0, 5};

/* The second of 5 documents is empty, and the fourth one begins in the first sequence and ends in the second one. */
static void pack_documents(int64_t sequences, int64_t seq, int32_t *cu_seqlens) {
    const int64_t ends[DOCUMENTS] = {seq / 3, seq / 3, seq - 2, sequences * seq - seq / 2, sequences * seq};
    cu_seqlens[0] = 0;
    for (int i = 0; i < DOCUMENTS; i++) cu_seqlens[i + 1] = (int32_t)ends[i];
}

static int64_t block_heads(const block *b) { return b->c->kind == LAYER ? b->c->layer.heads : b->c->attention.heads; }

/* Sets the bias of the batch, and zeros for its gradient. */
static void set_bias(block *b) {
    mt_batch *batch = &b->batch;
    int64_t rows, n;
    int is_mask = b->c->bias == MASK || b->c->bias == FULL_MASK,
        full = b->c->bias == FULL_MASK || b->c->bias == FULL_BIAS;
    batch->bias.heads = full || b->c->bias == HEAD_BIAS ? block_heads(b) : 1;
    batch->bias.batch = full ? batch->sequences : 1;
    rows = batch->bias.batch * batch->bias.heads * batch->seq;
    n = rows * batch->seq;
    batch->bias.value = mt_tensor_f32(test_noise(b->r, n, 50, 1.0f), rows, batch->seq);
    batch->bias.grad = mt_tensor_f32(test_floats(b->r, n, 0.0f), rows, batch->seq);
    if (!is_mask) return;
    for (int64_t i = 0; i < n; i++)
        b->mask[i] =
            i % batch->seq == i / batch->seq % batch->seq || ((const float *)batch->bias.value.data)[i] > -0.5f;
    batch->bias.value = mt_tensor_make(b->mask, MT_U8, rows, batch->seq);
    batch->bias.grad = mt_none();
}

static mt_status block_create(block *b) {
    test_rank *r = b->r;
    mt_mlp_desc m = b->c->mlp;
    mt_self_attention_desc a = b->c->attention;
    mt_transformer_layer_desc l = b->c->layer;
    m.sequence_parallel = a.sequence_parallel = l.sequence_parallel = b->sequence_parallel;
    switch (b->c->kind) {
    case MLP: b->hidden = m.hidden; return mt_mlp_create(r->ctx, r->params, "block", &m, &b->mlp);
    case ATTENTION:
        b->hidden = a.hidden;
        return mt_self_attention_create(r->ctx, r->params, "block", &a, &b->attention);
    case LAYER: b->hidden = l.hidden; return mt_transformer_layer_create(r->ctx, r->params, "block", &l, &b->layer);
    }
    return MT_ERR_ARGUMENT;
}

static mt_status block_open(block *b, const block_case *c, test_rank *r, int sequence_parallel, int64_t sequences,
                            int64_t seq) {
    memset(b, 0, sizeof *b);
    MT_TRY(test_rank_renew(r));
    b->c = c;
    b->r = r;
    b->sequence_parallel = sequence_parallel;
    b->batch.sequences = sequences;
    b->batch.seq = seq;
    b->batch.first_sequence = 3;
    b->batch.seed = 11;
    b->batch.step = 2;
    b->batch.lengths = c->lengths ? some_lengths : NULL;
    pack_documents(sequences, seq, b->cu_seqlens);
    b->batch.cu_seqlens = c->packed ? b->cu_seqlens : NULL;
    b->batch.documents = c->packed ? DOCUMENTS : 0;
    if (c->bias != NO_BIAS) set_bias(b);
    MT_TRY(block_create(b));
    MT_TRY(mt_params_init(r->ctx, r->params, 7));
    return disturb_params(r, 0.3f);
}

static mt_status block_forward(const block *b, mt_tensor x, mt_tensor y, block_saved *s) {
    mt_context *ctx = b->r->ctx;
    switch (b->c->kind) {
    case MLP: return mt_mlp_forward(ctx, &b->mlp, x, y, s ? &s->mlp : NULL);
    case ATTENTION: return mt_self_attention_forward(ctx, &b->attention, &b->batch, x, y, s ? &s->attention : NULL);
    case LAYER: return mt_transformer_layer_forward(ctx, &b->layer, &b->batch, x, y, s ? &s->layer : NULL);
    }
    return MT_ERR_ARGUMENT;
}

static mt_status block_backward(const block *b, mt_tensor dy, mt_tensor dx, const block_saved *s) {
    mt_context *ctx = b->r->ctx;
    switch (b->c->kind) {
    case MLP: return mt_mlp_backward(ctx, &b->mlp, dy, dx, &s->mlp);
    case ATTENTION: return mt_self_attention_backward(ctx, &b->attention, dy, dx, &s->attention);
    case LAYER: return mt_transformer_layer_backward(ctx, &b->layer, dy, dx, &s->layer);
    }
    return MT_ERR_ARGUMENT;
}

#define ATT_MHA .hidden = 32, .heads = 8
#define ATT_GQA .hidden = 32, .heads = 8, .kv_heads = 4

static const block_case cases[] = {
    {"mlp, tanh", MLP, .mlp = {.hidden = 16, .ffn = 48}},
    {"mlp, erf", MLP, .mlp = {.hidden = 16, .activation = MT_GELU_ERF}},
    {"mlp, swiglu", MLP, .mlp = {.hidden = 16, .ffn = 24, .activation = MT_SWIGLU}},
    {"mlp, uneven", MLP, .mlp = {.hidden = 16, .ffn = 19}},
    {"mlp, swiglu, uneven, no bias", MLP, .mlp = {.hidden = 16, .ffn = 13, .activation = MT_SWIGLU, .no_bias = 1}},
    {"mlp, bias left to the caller", MLP, .mlp = {.hidden = 16, .ffn = 5, .skip_bias_add = 1}},
    {"attention", ATTENTION, .attention = {ATT_MHA}},
    {"attention, dropout", ATTENTION, .attention = {ATT_MHA, .dropout = 0.2f, .layer_number = 3}},
    {"attention, both ways, no bias", ATTENTION,
     .attention = {ATT_MHA, .scores.mask = MT_MASK_BIDIRECTIONAL, .no_bias = 1}},
    {"attention, lengths", ATTENTION, .attention = {ATT_MHA, .scores.mask = MT_MASK_BIDIRECTIONAL, .dropout = 0.1f},
     .lengths = 1},
    {"attention, causal with lengths", ATTENTION, .attention = {ATT_MHA}, .lengths = 1},
    {"attention, groups, rotary", ATTENTION, .attention = {ATT_GQA, .scores.rotary_base = 100.0f, .max_seq = 12}},
    {"attention, rotary table longer than the sequences", ATTENTION,
     .attention = {ATT_MHA, .scores.rotary_base = 10000.0f, .max_seq = 50, .dropout = 0.1f}},
    {"attention, groups, bias left to the caller", ATTENTION,
     .attention = {ATT_GQA, .dropout = 0.1f, .skip_bias_add = 1}},
    {"attention, 6 groups", ATTENTION,
     .attention = {.hidden = 24, .heads = 12, .kv_heads = 6, .scores.rotary_base = 50.0f, .max_seq = 12}},
    {"attention, 6 groups, dropout", ATTENTION,
     .attention = {.hidden = 24, .heads = 12, .kv_heads = 6, .dropout = 0.2f}},
    {"attention, 5 heads, dropout, lengths", ATTENTION, .attention = {.hidden = 20, .heads = 5, .dropout = 0.2f},
     .lengths = 1},
    {"layer, pre-LN", LAYER,
     .layer = {ATT_MHA, .dropout.attention = 0.1f, .dropout.hidden = 0.1f, .dropout.layer_number = 2}},
    {"layer, pre-LN, no dropout", LAYER, .layer = {ATT_MHA}},
    {"layer, pre-RMS, Llama", LAYER,
     .layer = {ATT_GQA, .norm.kind = MT_RMS_NORM, .activation = MT_SWIGLU, .ffn = 43, .scores.rotary_base = 10000.0f,
               .max_seq = 12, .no_bias = 1, .dropout.hidden = 0.1f}},
    {"layer, post-LN, BERT", LAYER,
     .layer = {ATT_MHA, .norm.placement = MT_POST_LN, .activation = MT_GELU_ERF, .scores.mask = MT_MASK_BIDIRECTIONAL,
               .dropout.attention = 0.1f, .dropout.hidden = 0.2f},
     .lengths = 1},
    {"layer, post-RMS", LAYER,
     .layer = {ATT_MHA, .norm.placement = MT_POST_LN, .norm.kind = MT_RMS_NORM, .no_bias = 1}},
    {"layer, residual post-LN", LAYER,
     .layer = {ATT_MHA, .norm.placement = MT_RESIDUAL_POST_LN, .dropout.attention = 0.1f, .dropout.hidden = 0.1f}},
    {"layer, residual post-RMS", LAYER,
     .layer = {.hidden = 24,
               .heads = 6,
               .ffn = 50,
               .norm.placement = MT_RESIDUAL_POST_LN,
               .norm.kind = MT_RMS_NORM,
               .dropout.attention = 0.2f,
               .dropout.hidden = 0.1f}},
    {"mlp, squared relu", MLP, .mlp = {.hidden = 16, .activation = MT_SQUARED_RELU}},
    {"mlp, relu", MLP, .mlp = {.hidden = 16, .activation = MT_RELU}},
    {"mlp, tanh instead of GELU", MLP, .mlp = {.hidden = 16, .activation = MT_TANH}},
    {"attention, concatenated, rotary", ATTENTION,
     .attention = {ATT_MHA, .qkv_layout = MT_QKV_CONCATENATED, .scores.rotary_base = 100.0f, .max_seq = 12,
                   .dropout = 0.1f},
     .lengths = 1},
    {"layer, concatenated", LAYER,
     .layer = {ATT_MHA, .qkv_layout = MT_QKV_CONCATENATED, .dropout.attention = 0.1f, .no_bias = 1}},
    {"attention, separate, groups, rotary", ATTENTION,
     .attention = {ATT_GQA, .qkv_layout = MT_QKV_SEPARATE, .scores.rotary_base = 100.0f, .max_seq = 12,
                   .dropout = 0.1f},
     .lengths = 1},
    {"layer, separate", LAYER, .layer = {ATT_MHA, .qkv_layout = MT_QKV_SEPARATE, .dropout.attention = 0.1f}},
    {"layer, groups, rotary in pairs of half a head", LAYER,
     .layer = {ATT_GQA, .scores.rotary_base = 100.0f, .max_seq = 12, .scores.rotary_form = MT_ROTARY_PAIRS,
               .scores.rotary_dim = 2}},
    {"attention, 1 group of 8 heads, dropout", ATTENTION,
     .attention = {.hidden = 32, .heads = 8, .kv_heads = 1, .dropout = 0.2f}, .lengths = 1},
    {"attention, 2 groups of 6 heads, rotary", ATTENTION,
     .attention = {.hidden = 24, .heads = 12, .kv_heads = 2, .scores.rotary_base = 50.0f, .max_seq = 12}},
    {"attention, 3 groups of 4 heads, no bias", ATTENTION,
     .attention = {.hidden = 24, .heads = 12, .kv_heads = 3, .no_bias = 1, .dropout = 0.2f}},
    {"attention, separate, 2 groups of 6 heads", ATTENTION,
     .attention = {.hidden = 24, .heads = 12, .kv_heads = 2, .qkv_layout = MT_QKV_SEPARATE, .dropout = 0.2f}},
    {"layer, 1 group of 8 heads", LAYER, .layer = {.hidden = 32, .heads = 8, .kv_heads = 1, .dropout.attention = 0.1f}},
    {"attention, window, soft cap, lengths", ATTENTION,
     .attention = {ATT_MHA, .scores.mask = MT_MASK_BIDIRECTIONAL, .scores.window = 4, .scores.softcap = 1.5f,
                   .dropout = 0.1f},
     .lengths = 1},
    {"attention, 5 heads with ALiBi, packed", ATTENTION,
     .attention = {.hidden = 20, .heads = 5, .scores.alibi = 1, .dropout = 0.2f}, .packed = 1},
    {"attention, groups with ALiBi, rotary, packed", ATTENTION,
     .attention = {ATT_GQA, .scores.alibi = 1, .scores.window = 6, .scores.rotary_base = 100.0f, .max_seq = 12},
     .packed = 1},
    {"attention, 2 groups of 6 heads with ALiBi", ATTENTION,
     .attention = {.hidden = 24, .heads = 12, .kv_heads = 2, .scores.alibi = 1}, .bias = ONE_BIAS},
    {"attention, mask", ATTENTION, .attention = {ATT_MHA, .scores.mask = MT_MASK_BIDIRECTIONAL}, .bias = MASK},
    {"attention, groups, a mask for each sequence and head", ATTENTION, .attention = {ATT_GQA, .dropout = 0.1f},
     .bias = FULL_MASK},
    {"attention, 5 heads, a bias for each", ATTENTION, .attention = {.hidden = 20, .heads = 5, .dropout = 0.1f},
     .bias = HEAD_BIAS},
    {"attention, separate, a bias for each sequence and head", ATTENTION,
     .attention = {ATT_GQA, .qkv_layout = MT_QKV_SEPARATE, .scores.softcap = 2.0f}, .bias = FULL_BIAS},
    {"layer, ALiBi, window, soft cap, packed, a bias for each head", LAYER,
     .layer = {ATT_MHA, .scores.alibi = 1, .scores.window = 5, .scores.softcap = 1.0f, .dropout.attention = 0.1f},
     .packed = 1, .bias = HEAD_BIAS}};
#define CASES ((int)(sizeof cases / sizeof *cases))
#define SEQUENCES 2
#define SEQ 12
#define TOKENS (SEQUENCES * SEQ)
#define WIDTH_MAX 32
#define PARAMS_MAX 16384
#define BIAS_MAX (TOKENS * 8 * SEQ)

/* Absolute tolerances, as in Megatron's tests of version 2.0. Values here are about 1. */
static double case_tolerance(const block_case *c) { return c->kind == LAYER ? 5e-5 : 5e-6; }

static int case_fits(const block_case *c, int ranks) {
    mt_qkv_layout layout = c->kind == LAYER ? c->layer.qkv_layout : c->attention.qkv_layout;
    int64_t heads = c->kind == LAYER ? c->layer.heads : c->attention.heads;
    if (c->kind == MLP) return 1;
    if (layout != MT_QKV_PER_GROUP && heads % ranks != 0) return 0;
    return heads >= ranks;
}

typedef struct outcome {
    float y[TOKENS * WIDTH_MAX], dx[TOKENS * WIDTH_MAX], grads[PARAMS_MAX], dbias[BIAS_MAX];
} outcome;

typedef struct expected {
    uint64_t all_reduce, all_gather, reduce_scatter,
        scalars; /* numbers of calls; scalars: all-gathers of 4 floats per token and rank */
} expected;

/* Checks that the ledger contains exactly these calls, each of `floats` floats. */
static mt_status check_ledger(mt_comm *comm, const char *what, expected want, int64_t floats, int64_t scalars) {
    mt_ledger got = mt_comm_ledger(comm), l = {{0}, {0}};
    l.calls[MT_ALL_REDUCE] = want.all_reduce;
    l.calls[MT_ALL_GATHER] = want.all_gather + want.scalars;
    l.calls[MT_REDUCE_SCATTER] = want.reduce_scatter;
    l.bytes[MT_ALL_REDUCE] = want.all_reduce * (uint64_t)floats * 4;
    l.bytes[MT_ALL_GATHER] = (want.all_gather * (uint64_t)floats + want.scalars * (uint64_t)scalars) * 4;
    l.bytes[MT_REDUCE_SCATTER] = want.reduce_scatter * (uint64_t)floats * 4;
    if (mt_comm_size(comm) == 1) memset(&l, 0, sizeof l);
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++) {
        if (got.calls[k] == l.calls[k] && got.bytes[k] == l.bytes[k]) continue;
        fprintf(stderr, "%s: %s: %llu calls of %llu bytes, expected %llu of %llu\n", what,
                mt_collective_name((mt_collective)k), (unsigned long long)got.calls[k],
                (unsigned long long)got.bytes[k], (unsigned long long)l.calls[k], (unsigned long long)l.bytes[k]);
        return MT_ERR_DATA;
    }
    mt_comm_ledger_reset(comm);
    return MT_SUCCESS;
}

static mt_status check_block_ledger(const block *b) {
    uint64_t n = b->c->kind == LAYER ? 2 : 1;
    expected plain = {2 * n, 0, 0, 0}, sequence = {0, 3 * n, 2 * n, 0};
    mt_ledger world = mt_comm_ledger(b->r->world);
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++) CHECK(world.calls[k] == 0);
    return check_ledger(b->r->grid.tp, "training step", b->sequence_parallel ? sequence : plain, TOKENS * b->hidden, 0);
}

/* The gradient of the bias, summed over the tensor ranks, is that of one rank. */
static mt_status bias_gradient_against_serial(const block *b, outcome *serial) {
    mt_tensor d = b->batch.bias.grad;
    size_t n = (size_t)(d.rows * d.cols);
    if (!d.data) return MT_SUCCESS;
    CHECK(n <= BIAS_MAX);
    MT_TRY(mt_all_reduce(b->r->ctx, b->r->grid.tp, d.data, d.data, n, MT_F32, MT_SUM));
    if (b->r->grid.tp_size == 1 && !b->sequence_parallel) memcpy(serial->dbias, d.data, n * sizeof(float));
    return test_near_f32("dbias", (const float *)d.data, serial->dbias, (int64_t)n, case_tolerance(b->c));
}

static mt_status block_against_serial(const block *b, outcome *serial) {
    test_rank *r = b->r;
    int ranks = r->grid.tp_size, shards = b->sequence_parallel ? ranks : 1;
    int64_t rows = TOKENS / shards, n = rows * b->hidden, first = shards > 1 ? n * r->grid.tp_rank : 0, params;
    mt_tensor x = mt_tensor_f32(test_noise(r, TOKENS * b->hidden, 1, 1.5f) + first, rows, b->hidden);
    mt_tensor dy = mt_tensor_f32(test_noise(r, TOKENS * b->hidden, 2, 0.5f) + first, rows, b->hidden);
    mt_tensor y = test_tensor(r, rows, b->hidden, NAN), dx = test_tensor(r, rows, b->hidden, NAN);
    float *grads = test_floats(r, PARAMS_MAX, NAN);
    double tolerance = case_tolerance(b->c);
    block_saved saved;
    size_t mark = mt_arena_mark(r->ctx);
    mt_comm_ledger_reset(r->grid.tp);
    mt_comm_ledger_reset(r->world);
    MT_TRY(block_forward(b, x, y, &saved));
    MT_TRY(block_backward(b, dy, dx, &saved));
    MT_TRY(check_block_ledger(b));
    mt_arena_release(r->ctx, mark);
    MT_TRY(bias_gradient_against_serial(b, serial));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    for (int i = 0; i < mt_params_count(r->params); i++) MT_TRY(check_padding(mt_params_at(r->params, i)));
    MT_TRY(gather_grads(r, grads, PARAMS_MAX, &params));
    if (ranks == 1 && !b->sequence_parallel) {
        memcpy(serial->y, y.data, (size_t)n * sizeof(float));
        memcpy(serial->dx, dx.data, (size_t)n * sizeof(float));
        memcpy(serial->grads, grads, (size_t)params * sizeof(float));
    }
    MT_TRY(test_near_f32("y", (const float *)y.data, serial->y + first, n, tolerance));
    MT_TRY(test_near_f32("dx", (const float *)dx.data, serial->dx + first, n, tolerance));
    return test_near_f32("gradients", grads, serial->grads, params, tolerance);
}

typedef struct split_run {
    int sequence_parallel;
    outcome serial[CASES];
} split_run;

static mt_status split_rank(mt_comm *world, void *user) {
    split_run *run = (split_run *)user;
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    block b;
    mt_status status = test_rank_open(world, all, NULL, &r);
    for (int i = 0; status == MT_SUCCESS && i < CASES; i++) {
        if (!case_fits(&cases[i], mt_comm_size(world))) continue;
        status = block_open(&b, &cases[i], &r, run->sequence_parallel, SEQUENCES, SEQ);
        if (status == MT_SUCCESS) status = block_against_serial(&b, &run->serial[i]);
        if (status != MT_SUCCESS)
            fprintf(stderr, "%s on %d ranks, sequence parallelism %d: %s\n", cases[i].name, mt_comm_size(world),
                    run->sequence_parallel, mt_last_error(r.ctx));
    }
    test_rank_close(&r);
    return status;
}

static void test_blocks_do_not_depend_on_the_split(void **state) {
    static const int splits[] = {1, 2, 3, 4, 7, 8};
    static split_run run;
    (void)state;
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++)
        for (run.sequence_parallel = 0; run.sequence_parallel < (TOKENS % splits[i] == 0 ? 2 : 1);
             run.sequence_parallel++)
            test_launch(splits[i], split_rank, &run);
}

/* skip_bias_add: the output is that of the same block without its bias, and the gradient of the bias is not changed. */
static void test_skip_bias_add(void **state) {
    float whole[4 * WIDTH_MAX];
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int k = 0; k < 4; k++) {
        block_case c = cases[k < 2 ? 0 : 6];
        const mt_param *bias;
        block_saved saved;
        mt_tensor x, y;
        block b;
        c.mlp.skip_bias_add = c.attention.skip_bias_add = k % 2;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_open(&b, &c, &r, 0, 1, 4));
        x = mt_tensor_f32(test_noise(&r, 4 * b.hidden, 1, 1.0f), 4, b.hidden);
        y = test_tensor(&r, 4, b.hidden, NAN);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, x, y, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_backward(&b, x, mt_none(), &saved));
        mt_arena_release(r.ctx, 0);
        bias = k < 2 ? b.mlp.fc2.bias : b.attention.proj.bias;
        if (k % 2 == 0) {
            memcpy(whole, y.data, (size_t)(y.rows * y.cols) * sizeof(float));
            assert_true(fabs((double)*(const float *)bias->grad.data) > 1e-3);
            continue;
        }
        test_untouched("dbias", (const float *)bias->grad.data, b.hidden, 0.0f);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_forward(r.ctx, y, bias->value));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, test_near_f32("y", (const float *)y.data, whole, y.rows * y.cols, 1e-6));
    }
    test_paper_rank_close(&r);
}

/* ---- finite differences ------------------------------------------------------------------------------------------ */

/* A scalar of the fp32 forward, summed in double (sum c_i y_i of a block, the sum of the losses of a GPT), is
   differentiated along a unit direction v of one tensor (x or a parameter): central differences at h and h / 2,
   extrapolated to an error of h^4, with h = 0.05.

   Truncation: terms of the fifth order times h^4 / 480 = 1.3e-8. Noise: y has rounding errors of about 1e-7, the sum
   of up to 160 of them about 1e-6, the difference 1e-6 / h * 3 = 6e-5; |gradient| is 0.5 to 100 here. The tolerance
   is 1e-3 of the norm of the gradient plus 1e-4 (measured: at most a fifth of it).

   The first direction is the analytic gradient itself, along which the derivative must be its norm: this finds a
   factor that is off by 0.2 %. Three random directions follow. They find a missing part of the gradient: of a part
   with the norm p |gradient|, they see about p / sqrt(elements), elements < 300. */
#define DIFFERENCE_STEP 0.05
#define DIFFERENCE_MAX 512
#define DIRECTIONS 4
#define SMALL_SEQ 5

/* MT_RELU is not here: a step of this size crosses its kink. */
static const block_case small_cases[] = {
    {"mlp, tanh", MLP, .mlp = {.hidden = 8, .ffn = 12}},
    {"mlp, erf", MLP, .mlp = {.hidden = 8, .ffn = 12, .activation = MT_GELU_ERF}},
    {"mlp, swiglu", MLP, .mlp = {.hidden = 8, .ffn = 12, .activation = MT_SWIGLU}},
    {"mlp, squared relu", MLP, .mlp = {.hidden = 8, .ffn = 12, .activation = MT_SQUARED_RELU}},
    {"mlp, tanh instead of GELU", MLP, .mlp = {.hidden = 8, .ffn = 12, .activation = MT_TANH}},
    {"attention", ATTENTION, .attention = {.hidden = 12, .heads = 3, .dropout = 0.2f}},
    {"attention, groups, rotary", ATTENTION,
     .attention =
         {.hidden = 16, .heads = 4, .kv_heads = 2, .scores.rotary_base = 10.0f, .max_seq = 9, .dropout = 0.2f}},
    {"attention, both ways, lengths", ATTENTION,
     .attention = {.hidden = 12, .heads = 3, .scores.mask = MT_MASK_BIDIRECTIONAL, .dropout = 0.2f}, .lengths = 1},
    {"attention, concatenated", ATTENTION,
     .attention =
         {.hidden = 12, .heads = 3, .qkv_layout = MT_QKV_CONCATENATED, .scores.rotary_base = 10.0f, .max_seq = 9}},
    {"attention, separate, groups", ATTENTION,
     .attention = {.hidden = 16,
                   .heads = 4,
                   .kv_heads = 2,
                   .qkv_layout = MT_QKV_SEPARATE,
                   .scores.rotary_base = 10.0f,
                   .max_seq = 9}},
    {"attention, rotary in pairs", ATTENTION,
     .attention =
         {.hidden = 12, .heads = 3, .scores.rotary_base = 10.0f, .max_seq = 9, .scores.rotary_form = MT_ROTARY_PAIRS}},
    {"attention, rotary of two features", ATTENTION,
     .attention = {.hidden = 9, .heads = 3, .scores.rotary_base = 10.0f, .max_seq = 9, .scores.rotary_dim = 2}},
    {"layer, pre-LN", LAYER,
     .layer = {.hidden = 8, .heads = 2, .ffn = 12, .dropout.attention = 0.2f, .dropout.hidden = 0.2f}},
    {"layer, pre-RMS, swiglu", LAYER,
     .layer = {.hidden = 8,
               .heads = 2,
               .ffn = 12,
               .norm.kind = MT_RMS_NORM,
               .activation = MT_SWIGLU,
               .dropout.hidden = 0.2f}},
    {"layer, post-LN", LAYER,
     .layer = {.hidden = 8,
               .heads = 2,
               .ffn = 12,
               .norm.placement = MT_POST_LN,
               .dropout.attention = 0.2f,
               .dropout.hidden = 0.2f}},
    {"layer, post-RMS", LAYER,
     .layer = {.hidden = 8, .heads = 2, .ffn = 12, .norm.placement = MT_POST_LN, .norm.kind = MT_RMS_NORM}},
    {"layer, residual post-LN", LAYER,
     .layer = {.hidden = 8, .heads = 2, .ffn = 12, .norm.placement = MT_RESIDUAL_POST_LN, .dropout.hidden = 0.2f}},
    {"layer, residual post-RMS", LAYER,
     .layer = {.hidden = 8,
               .heads = 2,
               .ffn = 12,
               .norm.placement = MT_RESIDUAL_POST_LN,
               .norm.kind = MT_RMS_NORM,
               .dropout.attention = 0.2f,
               .dropout.hidden = 0.2f}},
    {"attention, window, soft cap, packed, rotary", ATTENTION,
     .attention = {.hidden = 12,
                   .heads = 2,
                   .scores.window = 3,
                   .scores.softcap = 0.5f,
                   .scores.scale = 0.8f,
                   .scores.rotary_base = 10.0f,
                   .max_seq = 9},
     .packed = 1},
    {"attention, ALiBi, a bias for each sequence and head", ATTENTION,
     .attention = {.hidden = 12, .heads = 3, .scores.alibi = 1, .scores.softcap = 1.0f, .dropout = 0.2f},
     .bias = FULL_BIAS},
    {"layer, ALiBi, window, one bias", LAYER,
     .layer = {.hidden = 8, .heads = 2, .ffn = 12, .scores.alibi = 1, .scores.window = 4, .dropout.attention = 0.2f},
     .bias = ONE_BIAS},
    {"attention, mask, packed", ATTENTION,
     .attention = {.hidden = 12, .heads = 3, .scores.mask = MT_MASK_BIDIRECTIONAL}, .packed = 1, .bias = MASK},
};
#define SMALL_CASES ((int)(sizeof small_cases / sizeof *small_cases))

/* A function to differentiate: f(user) for the n floats at w, and its analytic gradient g. */
typedef struct differentiable {
    const char *name, *what;
    double (*f)(void *user);
    void *user;
    float *w;
    const float *g;
    int64_t n;
} differentiable;

/* The central difference of width `step` along v. Restores w. */
static double central_difference(const differentiable *d, const double *v, double step) {
    double at[2];
    float kept[DIFFERENCE_MAX];
    memcpy(kept, d->w, (size_t)d->n * sizeof *kept);
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < d->n; i++) d->w[i] = (float)((double)kept[i] + (side ? step : -step) * v[i]);
        at[side] = d->f(d->user);
    }
    memcpy(d->w, kept, (size_t)d->n * sizeof *kept);
    return (at[1] - at[0]) / (2 * step);
}

static void check_directions(const differentiable *d) {
    double norm = 0, v[DIFFERENCE_MAX], length, want, got;
    uint64_t seed = test_name_seed(d->what);
    assert_true(d->n <= DIFFERENCE_MAX);
    for (int64_t i = 0; i < d->n; i++) norm += (double)d->g[i] * (double)d->g[i];
    norm = sqrt(norm);
    assert_true(norm > 0.1);
    for (int k = 0; k < DIRECTIONS; k++) {
        length = want = 0;
        for (int64_t i = 0; i < d->n; i++) v[i] = k == 0 ? (double)d->g[i] : (double)test_float(&seed);
        for (int64_t i = 0; i < d->n; i++) length += v[i] * v[i];
        for (int64_t i = 0; i < d->n; i++) {
            v[i] /= sqrt(length);
            want += v[i] * (double)d->g[i];
        }
        got = (4 * central_difference(d, v, DIFFERENCE_STEP / 2) - central_difference(d, v, DIFFERENCE_STEP)) / 3;
        if (!(fabs(got - want) <= 1e-3 * norm + 1e-4))
            fail_msg("%s, %s, direction %d: difference %.7g, gradient %.7g, norm %.4g", d->name, d->what, k, got, want,
                     norm);
    }
}

/* Checks x, then every parameter of r. d contains the fields that all of them share. */
static void check_all_directions(test_rank *r, differentiable d) {
    if (d.w) check_directions(&d);
    for (int k = 0; k < mt_params_count(r->params); k++) {
        mt_param *p = mt_params_at(r->params, k);
        d.what = p->name;
        d.w = (float *)p->value.data;
        d.g = (const float *)p->grad.data;
        d.n = p->value.rows * p->value.cols;
        check_directions(&d);
    }
}

typedef struct block_point {
    const block *b;
    mt_tensor x, y;
    const float *c;
} block_point;

static double block_scalar(void *user) {
    const block_point *p = (const block_point *)user;
    size_t mark = mt_arena_mark(p->b->r->ctx);
    block_saved saved; /* given, so that the forward is a training forward with dropout */
    double sum = 0;
    if (block_forward(p->b, p->x, p->y, &saved) != MT_SUCCESS) return NAN;
    mt_arena_release(p->b->r->ctx, mark);
    for (int64_t i = 0; i < p->y.rows * p->y.cols; i++) sum += (double)p->c[i] * (double)((const float *)p->y.data)[i];
    return sum;
}

static void test_gradients_are_finite_differences(void **state) {
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int i = 0; i < SMALL_CASES; i++) {
        differentiable d = {.name = small_cases[i].name, .what = "x", .f = block_scalar};
        block_saved saved;
        block_point at;
        mt_tensor dx;
        block b;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_open(&b, &small_cases[i], &r, 0, 2, SMALL_SEQ));
        b.batch.lengths = small_cases[i].lengths ? some_lengths + 2 : NULL; /* {0, 5} */
        d.n = 2 * SMALL_SEQ * b.hidden;
        at.b = &b;
        at.x = mt_tensor_f32(test_noise(&r, d.n, 1, 1.5f), 2 * SMALL_SEQ, b.hidden);
        at.y = test_tensor(&r, at.x.rows, at.x.cols, NAN);
        at.c = test_noise(&r, d.n, 2, 1.0f);
        dx = test_tensor(&r, at.x.rows, at.x.cols, NAN);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, at.x, at.y, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_backward(&b, mt_tensor_f32(at.c, at.x.rows, at.x.cols), dx, &saved));
        d.user = &at;
        d.w = (float *)at.x.data;
        d.g = (const float *)dx.data;
        check_all_directions(&r, d);
        if (!b.batch.bias.grad.data) continue;
        d.what = "bias";
        d.w = (float *)b.batch.bias.value.data;
        d.g = (const float *)b.batch.bias.grad.data;
        d.n = b.batch.bias.value.rows * SMALL_SEQ;
        check_directions(&d);
    }
    test_paper_rank_close(&r);
}

/* ---- inference, flight, recomputation ---------------------------------------------------------------------------- */

static int64_t block_elements(const block *b) { return b->batch.sequences * b->batch.seq * b->hidden; }

static mt_tensor block_tensor(const block *b, float *data) {
    return mt_tensor_f32(data, b->batch.sequences * b->batch.seq, b->hidden);
}

/* saved == NULL gives the bits of training without dropout, and leaves the arena unchanged. */
static void test_inference(void **state) {
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int i = 0; i < CASES; i++) {
        block_case c = cases[i];
        block_saved saved;
        mt_tensor x, y, z;
        size_t mark;
        int has_dropout = c.attention.dropout + c.layer.dropout.attention + c.layer.dropout.hidden > 0.0f;
        block b;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_open(&b, &c, &r, 0, SEQUENCES, SEQ));
        x = block_tensor(&b, test_noise(&r, block_elements(&b), 1, 1.0f));
        y = block_tensor(&b, test_floats(&r, block_elements(&b), NAN));
        z = block_tensor(&b, test_floats(&r, block_elements(&b), NAN));
        mark = mt_arena_mark(r.ctx);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, x, y, NULL));
        assert_int_equal(mt_arena_mark(r.ctx), mark);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, x, z, &saved));
        assert_true(mt_arena_mark(r.ctx) > mark); /* the arena contains what backward needs */
        mt_arena_release(r.ctx, mark);
        assert_true(has_dropout == (memcmp(y.data, z.data, (size_t)block_elements(&b) * 4) != 0));
        b.attention.desc.dropout = b.layer.attention.desc.dropout = b.layer.desc.dropout.hidden = 0.0f;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, x, z, &saved));
        mt_arena_release(r.ctx, mark);
        assert_memory_equal(y.data, z.data, (size_t)block_elements(&b) * 4);
    }
    test_paper_rank_close(&r);
}

/* Two micro-batches: each backward after its forward; both forwards, then the backwards in either order; and each
   forward recomputed before its backward. The outputs are equal, and gradients have the same bits if the order of sums
   is the same. */
static void run_micro_batches(const block *b, int plan, float *dx, float *grads) {
    mt_context *ctx = b->r->ctx;
    int64_t n = block_elements(b), count;
    size_t mark = mt_arena_mark(ctx);
    block_saved saved[2];
    block at[2];
    mt_tensor x[2], y[2], dy[2];
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_zero_grad(ctx, b->r->params));
    for (int k = 0; k < 2; k++) {
        at[k] = *b;
        at[k].batch.first_sequence += k * b->batch.sequences;
        x[k] = block_tensor(b, test_noise(b->r, n, 10 + (uint64_t)k, 1.0f));
        dy[k] = block_tensor(b, test_noise(b->r, n, 20 + (uint64_t)k, 1.0f));
        y[k] = block_tensor(b, test_floats(b->r, n, NAN));
    }
    for (int k = 0; k < 2;
         k++) { /* plan 0: one after the other, 1: both in flight, 2: both in flight, last first, 3: recomputed */
        ASSERT_STATUS(ctx, MT_SUCCESS, block_forward(&at[k], x[k], y[k], plan == 3 ? NULL : &saved[k]));
        if (plan == 0)
            ASSERT_STATUS(ctx, MT_SUCCESS, block_backward(&at[k], dy[k], block_tensor(b, dx + k * n), &saved[k]));
    }
    for (int i = 0; i < 2 && plan > 0; i++) {
        int k = plan == 2 ? 1 - i : i;
        if (plan == 3) ASSERT_STATUS(ctx, MT_SUCCESS, block_forward(&at[k], x[k], y[k], &saved[k]));
        ASSERT_STATUS(ctx, MT_SUCCESS, block_backward(&at[k], dy[k], block_tensor(b, dx + k * n), &saved[k]));
    }
    mt_arena_release(ctx, mark);
    ASSERT_STATUS(ctx, MT_SUCCESS, gather_grads(b->r, grads, PARAMS_MAX, &count));
}

static void test_micro_batches_in_flight(void **state) {
    static float dx[4][2 * TOKENS * WIDTH_MAX], grads[4][PARAMS_MAX];
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int i = 0; i < CASES; i++) {
        block b;
        size_t bytes;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_open(&b, &cases[i], &r, 0, SEQUENCES, SEQ));
        memset(grads, 0, sizeof grads);
        bytes = 2 * (size_t)block_elements(&b) * sizeof(float);
        for (int plan = 0; plan < 4; plan++) run_micro_batches(&b, plan, dx[plan], grads[plan]);
        for (int plan = 1; plan < 4; plan++) assert_memory_equal(dx[plan], dx[0], bytes);
        assert_memory_equal(grads[1], grads[0], sizeof grads[0]);
        assert_memory_equal(grads[3], grads[0], sizeof grads[0]);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      test_near_f32("other order", grads[2], grads[0], PARAMS_MAX, 2 * case_tolerance(&cases[i])));
    }
    test_paper_rank_close(&r);
}

/* The loop of mt_arena_mark's comment: a backward follows a forward in one step of three. Neither the bytes in use nor
   the peak grow after the first steps, and the gradients are those of the steps that have a backward. */
static void run_sometimes_backward(block *b, int only_training, float *grads) {
    int64_t n = block_elements(b);
    mt_context *ctx = b->r->ctx;
    mt_tensor x = block_tensor(b, test_noise(b->r, n, 10, 1.0f)), dy = block_tensor(b, test_noise(b->r, n, 20, 1.0f));
    mt_tensor y = block_tensor(b, test_floats(b->r, n, NAN)), dx = block_tensor(b, test_floats(b->r, n, NAN));
    size_t mark = mt_arena_mark(ctx), kept = 0, peak = 0;
    block_saved saved;
    int64_t count;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_zero_grad(ctx, b->r->params));
    mt_arena_reset_peak(ctx);
    for (int step = 0; step < 9; step++) {
        int training = step % 3 == 0;
        if (only_training && !training) continue;
        mt_arena_release(ctx, mark);
        ASSERT_STATUS(ctx, MT_SUCCESS, block_forward(b, x, y, &saved));
        if (training) ASSERT_STATUS(ctx, MT_SUCCESS, block_backward(b, dy, dx, &saved));
        if (step == 0) {
            kept = mt_arena_mark(ctx);
            peak = mt_arena_peak(ctx);
        }
        assert_true(kept > mark && mt_arena_mark(ctx) == kept && mt_arena_peak(ctx) == peak);
    }
    mt_arena_release(ctx, mark);
    ASSERT_STATUS(ctx, MT_SUCCESS, gather_grads(b->r, grads, PARAMS_MAX, &count));
}

/* -- two halves of a batch in turn -- */

/* A training call of a layer on the sequences [first, first + count) of a batch of `all`, with their rows of x, dy, y
   and dx. The batch of b has all sequences. */
static mt_status layer_on(const block *b, int64_t first, int64_t count, mt_tensor x, mt_tensor dy, mt_tensor y,
                          mt_tensor dx) {
    mt_context *ctx = b->r->ctx;
    int64_t seq = b->batch.seq, bias_rows = b->batch.bias.heads * seq;
    size_t mark = mt_arena_mark(ctx);
    block part = *b;
    block_saved saved;
    part.batch.sequences = count;
    part.batch.first_sequence += first;
    if (b->batch.lengths) part.batch.lengths += first;
    if (b->batch.bias.batch > 1) {
        part.batch.bias.batch = count;
        part.batch.bias.value = mt_tensor_rows(b->batch.bias.value, first * bias_rows, count * bias_rows);
        if (b->batch.bias.grad.data)
            part.batch.bias.grad = mt_tensor_rows(b->batch.bias.grad, first * bias_rows, count * bias_rows);
    }
    MT_TRY(block_forward(&part, mt_tensor_rows(x, first * seq, count * seq),
                         mt_tensor_rows(y, first * seq, count * seq), &saved));
    MT_TRY(block_backward(&part, mt_tensor_rows(dy, first * seq, count * seq),
                          mt_tensor_rows(dx, first * seq, count * seq), &saved));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

typedef struct interleave_run {
    mt_recompute recompute;
    int no_effect; /* 1: the option has none, the layer runs as a whole */
    int sequence_parallel;
    int64_t sequences;
} interleave_run;

/* Runs a layer with the option and as micro-batches without it. */
static mt_status interleave_case(const block *b, const interleave_run *run) {
    test_rank *r = b->r;
    int64_t shards = run->sequence_parallel ? r->grid.tp_size : 1, rows = b->batch.sequences * b->batch.seq / shards;
    int64_t n = rows * b->hidden, count[2], bias = b->batch.bias.grad.rows * b->batch.bias.grad.cols;
    mt_tensor x = mt_tensor_f32(test_noise(r, n, 1, 1.5f), rows, b->hidden);
    mt_tensor dy = mt_tensor_f32(test_noise(r, n, 2, 0.5f), rows, b->hidden), y[3], dx[2];
    float *grads[2], *dbias[2];
    block_saved saved;
    for (int i = 0; i < 2; i++) {
        mt_parallel_options options = {.interleave = i == 0, .overlap_chunks = i == 0 && !run->no_effect ? 4 : 0};
        int64_t half = i == 0 || run->no_effect ? b->batch.sequences : b->batch.sequences / 2;
        y[i] = test_tensor(r, rows, b->hidden, NAN), dx[i] = test_tensor(r, rows, b->hidden, NAN);
        grads[i] = test_floats(r, PARAMS_MAX, 0.0f), dbias[i] = test_floats(r, bias, 0.0f);
        if (bias > 0) memset(b->batch.bias.grad.data, 0, (size_t)bias * sizeof(float));
        MT_TRY(mt_params_zero_grad(r->ctx, r->params));
        MT_TRY(mt_parallel_set_options(r->ctx, &options));
        if (run->sequence_parallel) {
            size_t mark = mt_arena_mark(r->ctx);
            MT_TRY(block_forward(b, x, y[i], &saved));
            MT_TRY(block_backward(b, dy, dx[i], &saved));
            mt_arena_release(r->ctx, mark);
        } else {
            MT_TRY(layer_on(b, 0, half, x, dy, y[i], dx[i]));
            if (half < b->batch.sequences) MT_TRY(layer_on(b, half, b->batch.sequences - half, x, dy, y[i], dx[i]));
        }
        MT_TRY(mt_sync_gradients(r->ctx, r->params));
        MT_TRY(gather_grads(r, grads[i], PARAMS_MAX, &count[i]));
        if (bias > 0) memcpy(dbias[i], b->batch.bias.grad.data, (size_t)bias * sizeof(float));
    }
    CHECK(memcmp(y[0].data, y[1].data, (size_t)n * sizeof(float)) == 0);
    CHECK(memcmp(dx[0].data, dx[1].data, (size_t)n * sizeof(float)) == 0);
    CHECK(count[0] == count[1] && memcmp(grads[0], grads[1], (size_t)count[0] * sizeof(float)) == 0);
    CHECK(memcmp(dbias[0], dbias[1], (size_t)bias * sizeof(float)) == 0);
    y[2] = test_tensor(r, rows, b->hidden, NAN); /* inference: the halves of a batch are independent */
    MT_TRY(mt_parallel_set_options(r->ctx, &(mt_parallel_options){.interleave = 1}));
    MT_TRY(block_forward(b, x, y[2], NULL));
    MT_TRY(block_forward(b, x, y[0], &saved));
    MT_TRY(mt_parallel_set_options(r->ctx, NULL));
    if (!run->no_effect)
        CHECK(block_backward(b, dy, dx[0], &saved) == MT_ERR_ARGUMENT); /* other options than forward */
    MT_TRY(mt_layers_hold_reduction(r->ctx, 1));
    MT_TRY(block_forward(b, x, y[1], NULL)); /* waits for its reductions itself */
    return test_near_f32("inference", (const float *)y[2].data, (const float *)y[1].data, n, case_tolerance(b->c));
}

static mt_status interleave_rank(mt_comm *world, void *user) {
    const interleave_run *run = (const interleave_run *)user;
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status = test_rank_open(world, all, NULL, &r);
    for (int i = 0; status == MT_SUCCESS && i < CASES; i++) {
        block_case c = cases[i];
        block b;
        if (c.kind != LAYER || c.packed != (run->no_effect && !run->sequence_parallel)) continue;
        if (!case_fits(&c, mt_comm_size(world))) continue;
        if (run->recompute == MT_RECOMPUTE_FULL && !c.bias) c.bias = FULL_BIAS;
        c.layer.recompute = run->recompute;
        status = block_open(&b, &c, &r, run->sequence_parallel, run->sequences, SEQ);
        if (status == MT_SUCCESS) status = interleave_case(&b, run);
        if (status != MT_SUCCESS)
            fprintf(stderr, "%s on %d ranks, recompute %d: %s\n", c.name, mt_comm_size(world), (int)run->recompute,
                    mt_last_error(r.ctx));
    }
    test_rank_close(&r);
    return status;
}

static void test_interleaved_halves_are_two_micro_batches(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (int recompute = MT_RECOMPUTE_NONE; recompute <= MT_RECOMPUTE_FULL; recompute++) {
            interleave_run run = {.recompute = (mt_recompute)recompute, .sequences = recompute == 1 ? 3 : 4};
            test_launch(ranks, interleave_rank, &run);
        }
}

static void test_interleaving_has_no_effect_where_it_says_so(void **state) {
    interleave_run packed = {.no_effect = 1, .sequences = 2},
                   sequence_parallel = {.no_effect = 1, .sequence_parallel = 1, .sequences = 2};
    (void)state;
    test_launch(2, interleave_rank, &packed);
    test_launch(2, interleave_rank, &sequence_parallel);
}

static void test_a_backward_may_follow_or_not(void **state) {
    static float grads[2][PARAMS_MAX];
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int i = 0; i < CASES; i++) {
        block b;
        void *first;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_alloc(r.ctx, 64, &first)); /* the mark need not be 0 */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_open(&b, &cases[i], &r, 0, SEQUENCES, SEQ));
        memset(grads, 0, sizeof grads);
        for (int plan = 0; plan < 2; plan++) run_sometimes_backward(&b, plan, grads[plan]);
        assert_memory_equal(grads[1], grads[0], sizeof grads[0]);
    }
    test_paper_rank_close(&r);
}

/* Masks depend on seed, step, layer and global element: changing any of them changes the output. */
static void test_dropout_masks_change_with_what_they_depend_on(void **state) {
    test_rank r;
    float *y[6];
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int k = 0; k < 2; k++) { /* attention with dropout, then a layer with hidden dropout only */
        block_case c = cases[k ? 18 : 7];
        mt_tensor x;
        block b, base;
        c.layer.dropout.hidden = 0.3f;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_open(&b, &c, &r, 0, SEQUENCES, SEQ));
        x = block_tensor(&b, test_noise(&r, block_elements(&b), 1, 1.0f));
        base = b;
        for (int v = 0; v < 6; v++) {
            block_saved saved;
            b = base;
            if (v == 1) b.batch.seed++;
            if (v == 2) b.batch.step++;
            if (v == 3) b.attention.desc.layer_number = ++b.layer.desc.dropout.layer_number;
            if (v == 4) b.batch.first_sequence++;
            if (v == 5) b.batch.step += 4; /* differs from a change of the layer by one */
            y[v] = test_floats(&r, block_elements(&b), NAN);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, x, block_tensor(&b, y[v]), &saved));
            mt_arena_release(r.ctx, 0);
            for (int u = 0; u < v; u++) assert_memory_not_equal(y[u], y[v], (size_t)block_elements(&b) * sizeof(float));
        }
    }
    test_paper_rank_close(&r);
}

/* The blocks of this layer are only their output biases of 1, so for x = 0 the output is the sum of the two halves'
   masks: each element is kept by neither, one or both of two independent masks. With 768 elements, a share of 1/2 has a
   standard error of 1.8 %. */
static void test_the_halves_of_a_layer_drop_independently(void **state) {
    block_case c = {"layer", LAYER, .layer = {ATT_MHA, .dropout.hidden = 0.5f}};
    const int64_t n = TOKENS * 32;
    double kept[3] = {0, 0, 0};
    block_saved saved;
    mt_tensor x, y;
    test_rank r;
    block b;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, block_open(&b, &c, &r, 0, SEQUENCES, SEQ));
    for (int i = 0; i < mt_params_count(r.params); i++)
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, mt_params_at(r.params, i)->value, 0.0f));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, b.layer.attention.proj.bias->value, 0.5f));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, b.layer.mlp.fc2.bias->value, 0.5f));
    x = test_tensor(&r, TOKENS, 32, 0.0f);
    y = test_tensor(&r, TOKENS, 32, NAN);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, x, y, &saved));
    for (int64_t i = 0; i < n; i++) {
        float v = ((const float *)y.data)[i];
        assert_true(v == 0.0f || v == 1.0f || v == 2.0f);
        kept[(int)v] += 1.0 / (double)n;
    }
    assert_true(fabs(kept[0] - 0.25) < 0.07 && fabs(kept[1] - 0.5) < 0.07 && fabs(kept[2] - 0.25) < 0.07);
    test_paper_rank_close(&r);
}

/* ---- activation memory ------------------------------------------------------------------------------------------- */

static size_t rounded(int64_t floats) { return ((size_t)floats * sizeof(float) + 63) / 64 * 64; }

/* The memory that a training forward of one layer keeps, in units of tokens * hidden floats. x (the caller's), the two
   normalised inputs and the sum between the halves: 4; q, k, v and the output of attention: 4 / t; before and after the
   activation: 8 / t. With sequence parallelism the first four are divided by t, too. In addition: lse [heads / t,
   tokens], and a mean and a reciprocal deviation per norm and token. (arXiv 2205.05198, table 2, counts bytes of 16-bit
   activations and masks.) */
static void check_activation_bytes(int ranks, int sequence_parallel) {
    const int64_t tokens = 2 * 16, hidden = 64, heads = 8;
    block_case c = {"layer", LAYER,
                    .layer = {.hidden = 64, .heads = 8, .dropout.attention = 0.1f, .dropout.hidden = 0.1f}};
    mt_context_desc meta = {.device = MT_DEVICE_META};
    int64_t t = ranks, rows = sequence_parallel ? tokens / t : tokens;
    size_t want = rounded(rows * hidden * 4 + tokens * hidden * 12 / t), kept;
    block_saved saved;
    mt_tensor x, y;
    test_rank r;
    void *output;
    block b;
    test_paper_rank(ranks, ranks - 1, (mt_grid_desc){.tp = ranks}, &meta, &r);
    memset(&b, 0, sizeof b);
    b.c = &c;
    b.r = &r;
    b.sequence_parallel = sequence_parallel;
    b.batch.sequences = 2;
    b.batch.seq = 16;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, block_create(&b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, rows, hidden, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_alloc(r.ctx, (size_t)(rows * hidden) * sizeof(float), &output));
    y = mt_tensor_f32((const float *)output, rows, hidden);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, x, y, &saved));
    kept = mt_arena_mark(r.ctx) - rounded(heads / t * tokens) - 2 * rounded(2 * rows);
    assert_int_equal(kept, want);
    test_paper_rank_close(&r);
}

static void test_activation_bytes_of_a_layer(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        check_activation_bytes(ranks, 0);
        check_activation_bytes(ranks, 1);
    }
}

/* ---- GPT --------------------------------------------------------------------------------------------------------- */

#define BATCH 4
#define GPT_SEQ 8
#define GPT_TOKENS (BATCH * GPT_SEQ)
#define VOCAB 37

typedef struct gpt_case {
    const char *name;
    mt_gpt_desc desc;
    int lengths;
} gpt_case;

static const gpt_case gpt_cases[] = {
    {"tied, pre-LN",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = 10,
      .ignore_index = MT_ZERO,
      .embedding_dropout = 0.1f,
      .layer = {.hidden = 16, .heads = 4, .dropout.attention = 0.1f, .dropout.hidden = 0.1f}},
     0},
    {"untied, Llama",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = 10,
      .untied_head = 1,
      .label_smoothing = 0.1f,
      .embedding_dropout = 0.1f,
      .layer = {.hidden = 16,
                .heads = 8,
                .kv_heads = 4,
                .ffn = 21,
                .norm.kind = MT_RMS_NORM,
                .activation = MT_SWIGLU,
                .scores.rotary_base = 100.0f,
                .no_bias = 1,
                .dropout.hidden = 0.1f}},
     0},
    {"tied, post-LN, lengths",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = 8,
      .ignore_index = -1,
      .layer = {.hidden = 16,
                .heads = 4,
                .norm.placement = MT_POST_LN,
                .scores.mask = MT_MASK_BIDIRECTIONAL,
                .activation = MT_GELU_ERF,
                .dropout.attention = 0.1f,
                .dropout.hidden = 0.1f}},
     1},
    {"tied, concatenated",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = 8,
      .layer = {.hidden = 24,
                .heads = 12,
                .ffn = 20,
                .qkv_layout = MT_QKV_CONCATENATED,
                .dropout.attention = 0.1f,
                .dropout.hidden = 0.1f}},
     1},
    {"untied, padded vocabulary",
     {.vocab = VOCAB,
      .padded_vocab = 48,
      .layers = 2,
      .max_seq = 10,
      .untied_head = 1,
      .label_smoothing = 0.1f,
      .layer = {.hidden = 16, .heads = 4, .dropout.hidden = 0.1f}},
     0},
    {"untied, separate, groups",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = 8,
      .untied_head = 1,
      .layer = {.hidden = 24,
                .heads = 24,
                .kv_heads = 12,
                .ffn = 20,
                .qkv_layout = MT_QKV_SEPARATE,
                .dropout.attention = 0.1f,
                .dropout.hidden = 0.1f}},
     0},
};
#define GPT_CASES ((int)(sizeof gpt_cases / sizeof *gpt_cases))

typedef struct gpt_split {
    int tp, data, sequence_parallel;
    int micro;    /* sequences per micro-batch; all micro-batches are in flight, and backwards run last first */
    int one_pass; /* 1: forward also computes the gradient of the loss */
} gpt_split;

typedef struct gpt_outcome {
    float loss[GPT_TOKENS], evaluation[GPT_TOKENS], logits[GPT_TOKENS * VOCAB], last[BATCH * VOCAB], grads[PARAMS_MAX],
        norm;
    int64_t params;
} gpt_outcome;

/* What a rank allocated and sent, to compare the real device with the meta device. */
typedef struct gpt_needs {
    size_t peak, allocated, mark;
    mt_ledger tp, data, model;
} gpt_needs;

typedef struct gpt_run {
    const gpt_case *c;
    gpt_split split;
    gpt_outcome serial, mine;
    gpt_needs needs[8];
} gpt_run;

static void gpt_data(const gpt_case *c, int32_t *ids, int32_t *targets, int32_t *lengths) {
    uint64_t seed = 4;
    for (int i = 0; i < GPT_TOKENS; i++) {
        ids[i] = (int32_t)test_below(&seed, VOCAB);
        targets[i] = i % 7 == 3 ? test_ignored(c->desc.ignore_index) : (int32_t)test_below(&seed, VOCAB);
    }
    for (int i = 0; i < BATCH; i++) lengths[i] = i < 3 ? 8 - 3 * i : 0;
}

static mt_batch gpt_batch(const gpt_case *c, int64_t first, int64_t sequences, const int32_t *lengths) {
    mt_batch b = {.sequences = sequences, .seq = GPT_SEQ, .first_sequence = first, .seed = 21, .step = 5};
    if (c->lengths) b.lengths = lengths + first;
    return b;
}

static mt_status gpt_open(test_rank *r, const gpt_case *c, int sequence_parallel, mt_gpt *gpt) {
    mt_gpt_desc d = c->desc;
    MT_TRY(test_rank_renew(r));
    d.layer.sequence_parallel = sequence_parallel;
    MT_TRY(mt_gpt_create(r->ctx, r->params, &d, gpt));
    return mt_params_init(r->ctx, r->params, 7);
}

/* Runs forward for every micro-batch of this rank, then backward, last first. loss: of this rank's sequences. */
static mt_status gpt_passes(test_rank *r, const mt_gpt *gpt, const gpt_case *c, gpt_split s, float *loss) {
    static const uint64_t step5 = (uint64_t)5 << 20;
    int32_t ids[GPT_TOKENS], targets[GPT_TOKENS], lengths[BATCH];
    int64_t per = BATCH / s.data, first = per * r->grid.dp_rank, n = per / s.micro, k;
    mt_gpt_saved saved[BATCH];
    mt_status status = MT_SUCCESS;
    size_t mark = mt_arena_mark(r->ctx);
    memset(saved, 0, sizeof saved);
    gpt_data(c, ids, targets, lengths);
    for (k = 0; k < n && status == MT_SUCCESS; k++) {
        mt_batch b = gpt_batch(c, first + k * s.micro, s.micro, lengths);
        int64_t at = b.first_sequence * GPT_SEQ;
        if (n > 1) b.step = 0, b.random_offset = &step5; /* the same random numbers */
        if (s.one_pass) b.backward_scale = 4.0f / GPT_TOKENS;
        status = mt_gpt_saved_create(r->ctx, gpt, &saved[k]);
        if (status == MT_SUCCESS)
            status = mt_gpt_forward(r->ctx, gpt, &b, ids + at, targets + at,
                                    mt_tensor_f32(loss + k * s.micro * GPT_SEQ, 1, s.micro * GPT_SEQ), &saved[k]);
    }
    while (k-- > 0) {
        if (status == MT_SUCCESS) status = mt_gpt_backward(r->ctx, gpt, 4.0f / GPT_TOKENS, &saved[k]);
        mt_gpt_saved_destroy(&saved[k]);
    }
    mt_arena_release(r->ctx, mark);
    return status;
}

/* Checks that the ledger of the tensor group contains exactly the calls that megatron.h documents, and that other
   groups have none before mt_sync_gradients. */
static mt_status check_gpt_ledger(test_rank *r, const gpt_case *c, gpt_split s) {
    uint64_t micro = (uint64_t)(BATCH / s.data / s.micro), layers = (uint64_t)c->desc.layers;
    expected plain = {micro * (4 * layers + 2), 0, 0, micro};
    expected sequence = {0, micro * (6 * layers + 3), micro * (4 * layers + 2), micro};
    int64_t tokens = s.micro * GPT_SEQ;
    mt_ledger data = mt_comm_ledger(r->grid.dp), model = mt_comm_ledger(r->grid.model);
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++) CHECK(data.calls[k] == 0 && model.calls[k] == 0);
    return check_ledger(r->grid.tp, "gpt", s.sequence_parallel ? sequence : plain, tokens * c->desc.layer.hidden,
                        4 * tokens * s.tp);
}

static mt_status gpt_train(test_rank *r, gpt_run *run) {
    const gpt_case *c = run->c;
    gpt_split s = run->split;
    int64_t per = BATCH / s.data * GPT_SEQ;
    float *loss, *grads, norm = NAN;
    double tolerance = 2e-5;
    int64_t params;
    mt_gpt gpt;
    MT_TRY(gpt_open(r, c, s.sequence_parallel, &gpt));
    MT_TRY(disturb_params(r, 0.2f));
    loss = test_floats(r, per, NAN);
    grads = test_floats(r, PARAMS_MAX, NAN);
    mt_comm_ledger_reset(r->grid.tp);
    MT_TRY(gpt_passes(r, &gpt, c, s, loss));
    MT_TRY(check_gpt_ledger(r, c, s));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
    MT_TRY(gather_grads(r, grads, PARAMS_MAX, &params));
    for (int i = 0; i < mt_params_count(r->params); i++) MT_TRY(check_padding(mt_params_at(r->params, i)));
    if (s.tp * s.data == 1 && s.micro == BATCH && !s.sequence_parallel) {
        memcpy(run->serial.loss, loss, sizeof run->serial.loss);
        memcpy(run->serial.grads, grads, (size_t)params * sizeof *grads);
        run->serial.norm = norm;
    }
    MT_TRY(test_near_f32("loss", loss, run->serial.loss + per * r->grid.dp_rank, per, tolerance));
    MT_TRY(test_near_f32("gradients", grads, run->serial.grads, params, tolerance));
    return test_near_f32("norm", &norm, &run->serial.norm, 1, tolerance * (double)run->serial.norm);
}

static mt_status gpt_rank(mt_comm *world, void *user) {
    gpt_run *run = (gpt_run *)user;
    mt_grid_desc shape = {.tp = run->split.tp, .dp = run->split.data};
    test_rank r;
    mt_status status = test_rank_open(world, shape, NULL, &r);
    if (status == MT_SUCCESS) status = gpt_train(&r, run);
    if (status != MT_SUCCESS)
        fprintf(stderr, "%s, tensor %d, data %d, sequence parallelism %d, micro-batches of %d: %s\n", run->c->name,
                run->split.tp, run->split.data, run->split.sequence_parallel, run->split.micro, mt_last_error(r.ctx));
    test_rank_close(&r);
    return status;
}

static const gpt_split gpt_splits[] = {{1, 1, 0, 4, 0}, {1, 1, 1, 4, 0}, {1, 1, 0, 1, 1}, {2, 1, 0, 4, 1},
                                       {2, 1, 1, 2, 0}, {3, 1, 0, 2, 1}, {4, 1, 0, 1, 0}, {4, 1, 1, 4, 1},
                                       {1, 2, 0, 1, 0}, {1, 4, 0, 1, 1}, {2, 2, 0, 2, 0}, {2, 2, 1, 1, 1},
                                       {4, 2, 1, 2, 0}, {2, 4, 0, 1, 0}};
#define GPT_SPLITS (sizeof gpt_splits / sizeof *gpt_splits)

static void test_gpt_does_not_depend_on_the_split(void **state) {
    static gpt_run run;
    (void)state;
    for (int i = 0; i < GPT_CASES; i++)
        for (size_t k = 0; k < GPT_SPLITS; k++) {
            run.c = &gpt_cases[i];
            run.split = gpt_splits[k];
            test_launch(run.split.tp * run.split.data, gpt_rank, &run);
        }
}

/* A vocabulary with padding of the program's: losses, gradients and their norm are those of one rank without
   padding. */
static void test_gpt_with_a_padded_vocabulary(void **state) {
    static const int64_t padded[] = {48, 38, 200};
    static gpt_run run;
    (void)state;
    for (int i = 0; i < GPT_CASES; i++) {
        gpt_case c = gpt_cases[i];
        c.desc.padded_vocab = 0;
        run.c = &c;
        run.split = gpt_splits[0];
        test_launch(1, gpt_rank, &run);
        for (size_t k = 1; k < GPT_SPLITS; k++) {
            c.desc.padded_vocab = padded[k % 3];
            run.split = gpt_splits[k];
            test_launch(run.split.tp * run.split.data, gpt_rank, &run);
        }
    }
}

/* -log softmax(logits)[target] in double, with the label smoothing of the description. */
static double loss_of_logits(const gpt_case *c, const float *x, int32_t target) {
    double sum = 0, mean = 0, a = (double)c->desc.label_smoothing;
    if (target == test_ignored(c->desc.ignore_index)) return 0;
    for (int j = 0; j < VOCAB; j++) {
        sum += exp((double)x[j]);
        mean += (double)x[j] / VOCAB;
    }
    return log(sum) - (1 - a) * (double)x[target] - a * mean;
}

static mt_status gpt_evaluate(test_rank *r, gpt_run *run) {
    int32_t ids[GPT_TOKENS], targets[GPT_TOKENS], lengths[BATCH];
    gpt_outcome *o = &run->serial;
    int alone = run->split.tp == 1;
    mt_gpt gpt;
    mt_batch b;
    float *all, *last, *loss;
    double want[GPT_TOKENS];
    MT_TRY(gpt_open(r, run->c, run->split.sequence_parallel, &gpt));
    MT_TRY(disturb_params(r, 0.2f));
    gpt_data(run->c, ids, targets, lengths);
    b = gpt_batch(run->c, 0, BATCH, lengths);
    all = test_floats(r, GPT_TOKENS * VOCAB, NAN);
    last = test_floats(r, BATCH * (VOCAB + 3), NAN); /* with gaps between the rows */
    loss = test_floats(r, GPT_TOKENS, NAN);
    MT_TRY(mt_gpt_forward(r->ctx, &gpt, &b, ids, targets, mt_tensor_f32(loss, 1, GPT_TOKENS), NULL));
    MT_TRY(mt_gpt_logits(r->ctx, &gpt, &b, ids, mt_tensor_f32(all, GPT_TOKENS, VOCAB)));
    MT_TRY(mt_gpt_logits(r->ctx, &gpt, &b, ids, (mt_tensor){last, BATCH, VOCAB, VOCAB + 3, MT_F32}));
    CHECK(mt_arena_mark(r->ctx) == 0);
    if (alone) {
        memcpy(o->logits, all, sizeof o->logits);
        memcpy(o->evaluation, loss, sizeof o->evaluation);
    }
    MT_TRY(test_near_f32("logits", all, o->logits, GPT_TOKENS * VOCAB, 1e-5));
    MT_TRY(test_near_f32("loss of evaluation", loss, o->evaluation, GPT_TOKENS, 1e-5));
    for (int i = 0; i < GPT_TOKENS; i++) want[i] = loss_of_logits(run->c, all + i * VOCAB, targets[i]);
    MT_TRY(test_near("loss from the logits", loss, want, GPT_TOKENS, 1e-5));
    for (int i = 0; i < BATCH; i++) {
        int row = i * GPT_SEQ + (!run->c->lengths ? GPT_SEQ - 1 : lengths[i] > 0 ? lengths[i] - 1 : 0);
        MT_TRY(test_near_f32("last logits", last + i * (VOCAB + 3), all + row * VOCAB, VOCAB, 1e-6));
        for (int j = VOCAB; j < VOCAB + 3; j++) CHECK(isnan(last[i * (VOCAB + 3) + j]));
    }
    return MT_SUCCESS;
}

static mt_status gpt_evaluate_rank(mt_comm *world, void *user) {
    gpt_run *run = (gpt_run *)user;
    mt_grid_desc shape = {.tp = run->split.tp};
    test_rank r;
    mt_status status = test_rank_open(world, shape, NULL, &r);
    if (status == MT_SUCCESS) status = gpt_evaluate(&r, run);
    if (status == MT_ERR_DATA) fprintf(stderr, "%s on %d ranks\n", run->c->name, run->split.tp);
    test_rank_close(&r);
    return status;
}

static void test_gpt_logits_and_evaluation(void **state) {
    static gpt_run run;
    (void)state;
    for (int i = 0; i < GPT_CASES; i++)
        for (int k = 0; k < 6; k++) {
            run.c = &gpt_cases[i];
            run.split = (gpt_split){1 << k % 3, 1, k / 3, BATCH, 0};
            test_launch(run.split.tp, gpt_evaluate_rank, &run);
        }
}

static void test_gpt_parameters(void **state) {
    static const char *const names[] = {"embedding.word_embeddings.weight",
                                        "embedding.position_embeddings.weight",
                                        "decoder.layers.0.input_layernorm.weight",
                                        "decoder.layers.0.input_layernorm.bias",
                                        "decoder.layers.0.self_attention.linear_qkv.weight",
                                        "decoder.layers.0.self_attention.linear_qkv.bias",
                                        "decoder.layers.0.self_attention.linear_proj.weight",
                                        "decoder.layers.0.self_attention.linear_proj.bias",
                                        "decoder.layers.1.pre_mlp_layernorm.weight",
                                        "decoder.layers.1.pre_mlp_layernorm.bias",
                                        "decoder.layers.1.mlp.linear_fc1.weight",
                                        "decoder.layers.1.mlp.linear_fc1.bias",
                                        "decoder.layers.1.mlp.linear_fc2.weight",
                                        "decoder.layers.1.mlp.linear_fc2.bias",
                                        "decoder.final_layernorm.weight",
                                        "decoder.final_layernorm.bias"};
    double square = 0;
    const mt_param *p;
    const mt_gpt_desc alibi = {
        .vocab = 9, .layers = 1, .max_seq = 4, .layer = {.hidden = 8, .heads = 2, .scores.alibi = 1}};
    test_rank r;
    mt_gpt gpt;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, gpt_open(&r, &gpt_cases[0], 0, &gpt));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!mt_params_find(r.params, names[i])) fail_msg("there is no %s", names[i]);
    assert_int_equal(mt_params_count(r.params), 2 + 2 * 12 + 2); /* tied: no output_layer */
    assert_int_equal(mt_params_global_elements(r.params), VOCAB * 16 + 10 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16);
    assert_ptr_equal(gpt.head.weight, gpt.model.tokens.weight);
    /* 0.02 / sqrt(2 * 2); the standard error of 1024 draws is 2.2 % */
    p = mt_params_find(r.params, "decoder.layers.0.mlp.linear_fc2.weight");
    for (int64_t i = 0; i < 1024; i++) square += pow((double)((const float *)p->value.data)[i], 2);
    assert_true(fabs(sqrt(square / 1024) / 0.01 - 1) < 4 * 0.022);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, gpt_open(&r, &gpt_cases[1], 0, &gpt));
    assert_non_null(mt_params_find(r.params, "output_layer.weight"));
    assert_null(mt_params_find(r.params, "embedding.position_embeddings.weight")); /* rotary */
    assert_null(mt_params_find(r.params, "decoder.final_layernorm.bias"));         /* RMSNorm */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, gpt_open(&r, &gpt_cases[2], 0, &gpt));
    assert_null(mt_params_find(r.params, "decoder.final_layernorm.weight")); /* post-LN */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &alibi, &gpt));
    assert_null(mt_params_find(r.params, "embedding.position_embeddings.weight")); /* ALiBi */
    test_paper_rank_close(&r);
}

/* Shards add to the gradient of a shared bias one after the other, so its bits would depend on the split. */
static void test_shared_bias_gradient_in_invariant_mode(void **state) {
    const mt_self_attention_desc d = {.hidden = 16, .heads = 4};
    const mt_context_desc where = {.invariant = 2};
    mt_batch batch = {.sequences = 1, .seq = 2};
    mt_self_attention a;
    mt_tensor x, y;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, &where, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_self_attention_create(r.ctx, r.params, "a", &d, &a));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 7));
    x = mt_tensor_f32(test_noise(&r, 32, 1, 1.0f), 2, 16);
    y = test_tensor(&r, 2, 16, NAN);
    batch.bias.value = mt_tensor_f32(test_noise(&r, 4, 2, 1.0f), 2, 2);
    batch.bias.grad = test_tensor(&r, 2, 2, 0.0f);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "bias.grad in invariant mode|bias.heads 4|it is 0",
            mt_self_attention_forward(r.ctx, &a, &batch, x, y, NULL));
    batch.bias.grad = mt_none();
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_self_attention_forward(r.ctx, &a, &batch, x, y, NULL));
    test_paper_rank_close(&r);
}

/* The losses of a packed batch are those of each document alone: positions, learned or rotary, begin again. Documents
   also end at the end of a sequence, so the third one is two here. */
static void test_packed_documents_are_alone(void **state) {
    static const mt_gpt_desc models[] = {
        {.vocab = VOCAB, .layers = 2, .max_seq = 8, .layer = {.hidden = 16, .heads = 4}},
        {.vocab = VOCAB, .layers = 2, .max_seq = 8, .layer = {.hidden = 16, .heads = 4, .scores.rotary_base = 10.0f}},
        {.vocab = VOCAB,
         .layers = 1,
         .max_seq = 8,
         .layer = {.hidden = 20, .heads = 5, .scores.alibi = 1, .scores.window = 3}}};
    static const int32_t cu_seqlens[] = {0, 3, 4, 11, 16}, alone[] = {0, 3, 4, 8, 11, 16};
    int32_t ids[17];
    uint64_t seed = 5;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int i = 0; i < 17; i++) ids[i] = (int32_t)test_below(&seed, VOCAB);
    for (size_t k = 0; k < sizeof models / sizeof *models; k++) {
        mt_batch b = {.sequences = 2, .seq = 8, .cu_seqlens = cu_seqlens, .documents = 4};
        float packed[16], own[8];
        mt_gpt gpt;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &models[k], &gpt));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 7));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, disturb_params(&r, 0.3f));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_gpt_forward(r.ctx, &gpt, &b, ids, ids + 1, mt_tensor_f32(packed, 1, 16), NULL));
        for (int d = 0; d < 5; d++) {
            int n = alone[d + 1] - alone[d];
            const int32_t *first = ids + alone[d];
            mt_batch one = {.sequences = 1, .seq = n};
            ASSERT_STATUS(r.ctx, MT_SUCCESS,
                          mt_gpt_forward(r.ctx, &gpt, &one, first, first + 1, mt_tensor_f32(own, 1, n), NULL));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, test_near_f32("loss", packed + alone[d], own, n, 1e-6));
        }
    }
    test_paper_rank_close(&r);
}

typedef struct gpt_point {
    test_rank *r;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_batch batch;
    const int32_t *ids, *targets;
} gpt_point;

/* The sum of the losses of a training forward. `keep`: leave it to a later backward. */
static double gpt_sum(gpt_point *p, int keep) {
    float loss[16];
    size_t mark = mt_arena_mark(p->r->ctx);
    int64_t n = p->batch.sequences * p->batch.seq;
    double sum = 0;
    if (mt_gpt_forward(p->r->ctx, &p->gpt, &p->batch, p->ids, p->targets, mt_tensor_f32(loss, 1, n), &p->saved) !=
        MT_SUCCESS)
        return NAN;
    if (!keep) mt_arena_release(p->r->ctx, mark);
    for (int64_t i = 0; i < n; i++) sum += (double)loss[i];
    return sum;
}

static double gpt_scalar(void *user) { return gpt_sum((gpt_point *)user, 0); }

/* The columns between the rows of the logits: they are there to align the rows, and hold nothing. */
static mt_tensor between_logits(const gpt_point *p) {
    mt_tensor t = p->saved.loss.logits;
    t.data = (float *)t.data + t.cols;
    t.cols = t.ld - t.cols;
    return t;
}

/* Backward with NaN between the rows of the logits, which it must neither read nor overwrite. */
static void gpt_backward_with_gaps(gpt_point *p) {
    mt_tensor gaps = between_logits(p);
    assert_true(gaps.ld % 64 == 0 && gaps.cols > 0 && gaps.cols < 64);
    ASSERT_STATUS(p->r->ctx, MT_SUCCESS, mt_fill(p->r->ctx, gaps, NAN));
    ASSERT_STATUS(p->r->ctx, MT_SUCCESS, mt_gpt_backward(p->r->ctx, &p->gpt, 1.0f, &p->saved));
    for (int64_t i = 0; i < gaps.rows * gaps.cols; i++)
        assert_true(isnan(((const float *)gaps.data)[i / gaps.cols * gaps.ld + i % gaps.cols]));
}

static void test_gpt_gradients_are_finite_differences(void **state) {
    static const int32_t ids[] = {0, 10, 3, 3, 7, 1, 9, 5, 2, 8}, targets[] = {10, 3, -100, 7, 0, 9, 5, 2, 8, 4};
    static const mt_transformer_layer_desc layer = {
        .hidden = 8, .heads = 2, .ffn = 12, .dropout.attention = 0.1f, .dropout.hidden = 0.1f};
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int n = 0; n < 6; n++) {
        int i = n % 3, one_pass = n / 3; /* i: tied; untied; post-LN without learned positions */
        mt_gpt_desc d = {.vocab = 11,
                         .layers = 2,
                         .max_seq = 6,
                         .untied_head = i == 1,
                         .label_smoothing = 0.1f * (float)i,
                         .embedding_dropout = 0.3f,
                         .layer = layer};
        differentiable diff = {.name = i == 0 ? "tied" : i == 1 ? "untied" : "post-LN", .f = gpt_scalar};
        gpt_point p = {
            .r = &r,
            .batch = {.sequences = 2, .seq = 5, .first_sequence = 1, .seed = 4, .backward_scale = (float)one_pass},
            .ids = ids,
            .targets = targets};
        d.layer.norm.placement = i == 2 ? MT_POST_LN : MT_PRE_LN;
        d.layer.scores.rotary_base = i == 2 ? 10.0f : 0.0f;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &p.gpt));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, disturb_params(&r, 0.4f));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_saved_create(r.ctx, &p.gpt, &p.saved));
        assert_true(gpt_sum(&p, 1) > 0);
        gpt_backward_with_gaps(&p);
        mt_arena_release(r.ctx, 0);
        diff.user = &p;
        check_all_directions(&r, diff);
        mt_gpt_saved_destroy(&p.saved);
    }
    test_paper_rank_close(&r);
}

/* With only embedding dropout, training and evaluation differ, too. */
static void test_gpt_embedding_dropout(void **state) {
    static const int32_t ids[] = {0, 10, 3, 3, 7};
    mt_gpt_desc d = {
        .vocab = 11, .layers = 1, .max_seq = 5, .embedding_dropout = 0.5f, .layer = {.hidden = 8, .heads = 2}};
    gpt_point p = {.batch = {.sequences = 1, .seq = 5}, .ids = ids, .targets = ids};
    float loss[5];
    double sum = 0;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    p.r = &r;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &p.gpt));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, disturb_params(&r, 0.4f));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_saved_create(r.ctx, &p.gpt, &p.saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_gpt_forward(r.ctx, &p.gpt, &p.batch, ids, ids, mt_tensor_f32(loss, 1, 5), NULL));
    for (int i = 0; i < 5; i++) sum += (double)loss[i];
    assert_true(fabs(gpt_sum(&p, 0) - sum) > 1e-2);
    mt_gpt_saved_destroy(&p.saved);
    test_paper_rank_close(&r);
}

/* ---- on paper, and without allocating ---------------------------------------------------------------------------- */

/* One whole training step; *needs is what the rank needed. */
static mt_status gpt_step(test_rank *r, gpt_run *run, gpt_needs *needs) {
    float loss[GPT_TOKENS], norm = 0;
    mt_optimizer o = {0};
    mt_status status;
    mt_gpt gpt;
    MT_TRY(gpt_open(r, run->c, run->split.sequence_parallel, &gpt));
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, &o));
    mt_arena_reset_peak(r->ctx);
    mt_comm_ledger_reset(r->grid.tp);
    status = gpt_passes(r, &gpt, run->c, run->split, loss);
    if (status == MT_SUCCESS) status = mt_sync_gradients(r->ctx, r->params);
    if (status == MT_SUCCESS) status = mt_grad_norm(r->ctx, r->params, &norm);
    if (status == MT_SUCCESS) status = mt_optimizer_step(r->ctx, &o, 1e-3f, mt_clip_coefficient(norm, 1.0f));
    needs->peak = mt_arena_peak(r->ctx);
    needs->allocated = mt_context_allocated(r->ctx);
    needs->mark = mt_arena_mark(r->ctx);
    needs->tp = mt_comm_ledger(r->grid.tp);
    needs->data = mt_comm_ledger(r->grid.dp);
    needs->model = mt_comm_ledger(r->grid.model);
    mt_optimizer_destroy(r->ctx, &o);
    return status;
}

static mt_status gpt_step_rank(mt_comm *world, void *user) {
    gpt_run *run = (gpt_run *)user;
    mt_grid_desc shape = {.tp = run->split.tp, .dp = run->split.data};
    test_rank r;
    mt_status status = test_rank_open(world, shape, NULL, &r);
    if (status == MT_SUCCESS) status = gpt_step(&r, run, &run->needs[mt_comm_rank(world)]);
    test_rank_close(&r);
    return status;
}

static void test_meta_device_knows_what_a_step_needs(void **state) {
    static const gpt_split splits[] = {{1, 1, 0, 4, 0}, {1, 1, 0, 4, 1}, {2, 1, 0, 2, 1},
                                       {4, 1, 1, 4, 0}, {2, 2, 1, 1, 0}, {4, 2, 0, 2, 1}};
    mt_context_desc meta = {.device = MT_DEVICE_META};
    static gpt_run run;
    (void)state;
    for (int i = 0; i < GPT_CASES; i++)
        for (size_t k = 0; k < sizeof splits / sizeof *splits; k++) {
            int ranks = splits[k].tp * splits[k].data;
            run.c = &gpt_cases[i];
            run.split = splits[k];
            test_launch(ranks, gpt_step_rank, &run);
            for (int rank = 0; rank < ranks; rank++) {
                gpt_needs needs;
                test_rank r;
                test_paper_rank(ranks, rank, (mt_grid_desc){.tp = splits[k].tp, .dp = splits[k].data}, &meta, &r);
                ASSERT_STATUS(r.ctx, MT_SUCCESS, gpt_step(&r, &run, &needs));
                assert_int_equal(needs.peak, run.needs[rank].peak);
                assert_int_equal(needs.allocated, run.needs[rank].allocated);
                assert_int_equal(needs.mark, 0);
                assert_memory_equal(&needs.tp, &run.needs[rank].tp, sizeof needs.tp);
                assert_memory_equal(&needs.data, &run.needs[rank].data, sizeof needs.data);
                assert_memory_equal(&needs.model, &run.needs[rank].model, sizeof needs.model);
                assert_true(needs.peak > 0 && needs.allocated > 0);
                test_paper_rank_close(&r);
            }
        }
}

typedef struct counting_allocator {
    int calls;
    size_t held;
} counting_allocator;

static void *counting_alloc(void *user, size_t bytes, size_t alignment) {
    counting_allocator *a = (counting_allocator *)user;
    void *p = NULL;
    a->calls++;
    a->held += bytes;
    return posix_memalign(&p, alignment, bytes) == 0 ? p : NULL;
}

static void counting_free(void *user, void *ptr, size_t bytes) {
    counting_allocator *a = (counting_allocator *)user;
    a->calls++;
    a->held -= bytes;
    free(ptr);
}

/* The arena has exactly the size that the meta device computed, the allocator is not called after creation, and all
   memory is freed. */
static mt_status frugal_step(test_rank *r, gpt_run *run, counting_allocator *a) {
    float loss[GPT_TOKENS], logits[BATCH * VOCAB], norm;
    int32_t ids[GPT_TOKENS], targets[GPT_TOKENS], lengths[BATCH];
    mt_gpt_saved saved = {0};
    mt_optimizer o;
    mt_batch b;
    mt_gpt gpt;
    int calls;
    MT_TRY(gpt_open(r, run->c, run->split.sequence_parallel, &gpt));
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, &o));
    MT_TRY(mt_gpt_saved_create(r->ctx, &gpt, &saved));
    calls = a->calls;
    gpt_data(run->c, ids, targets, lengths);
    b = gpt_batch(run->c, 0, BATCH, lengths);
    for (int step = 0; step < 2; step++) {
        MT_TRY(mt_gpt_forward(r->ctx, &gpt, &b, ids, targets, mt_tensor_f32(loss, 1, GPT_TOKENS), &saved));
        MT_TRY(mt_gpt_backward(r->ctx, &gpt, 1.0f, &saved));
        mt_arena_release(r->ctx, 0);
        MT_TRY(mt_sync_gradients(r->ctx, r->params));
        MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
        MT_TRY(mt_optimizer_step(r->ctx, &o, 1e-3f, 1.0f));
        MT_TRY(mt_params_zero_grad(r->ctx, r->params));
        MT_TRY(mt_gpt_forward(r->ctx, &gpt, &b, ids, targets, mt_tensor_f32(loss, 1, GPT_TOKENS), NULL));
        MT_TRY(mt_gpt_logits(r->ctx, &gpt, &b, ids, mt_tensor_f32(logits, BATCH, VOCAB)));
    }
    CHECK(a->calls == calls);
    CHECK(mt_arena_peak(r->ctx) <= run->needs[0].peak);
    mt_gpt_saved_destroy(&saved);
    mt_optimizer_destroy(r->ctx, &o);
    return MT_SUCCESS;
}

static mt_status frugal_rank(mt_comm *world, void *user) {
    gpt_run *run = (gpt_run *)user;
    mt_grid_desc shape = {.tp = run->split.tp};
    counting_allocator a = {0, 0};
    mt_context_desc where = {.arena_bytes = run->needs[0].peak, .allocator = {counting_alloc, counting_free, &a}};
    test_rank r;
    mt_status status = test_rank_open(world, shape, &where, &r);
    if (status == MT_SUCCESS) status = frugal_step(&r, run, &a);
    if (status != MT_SUCCESS) fprintf(stderr, "%s: %s\n", run->c->name, mt_last_error(r.ctx));
    test_rank_close(&r);
    CHECK(status != MT_SUCCESS || a.held == 0);
    return status;
}

static void test_nothing_is_allocated_after_creation(void **state) {
    mt_context_desc meta = {.device = MT_DEVICE_META};
    static gpt_run run;
    (void)state;
    for (int i = 0; i < GPT_CASES; i++)
        for (int tp = 1; tp <= 4; tp *= 2) {
            test_rank r;
            run.c = &gpt_cases[i];
            run.split = (gpt_split){tp, 1, tp == 4, BATCH, 0};
            test_paper_rank(tp, 0, (mt_grid_desc){.tp = tp}, &meta, &r);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, gpt_step(&r, &run, &run.needs[0]));
            test_paper_rank_close(&r);
            test_launch(tp, frugal_rank, &run);
        }
}

/* An arena that is too small gives the same error on every rank, and is left unchanged. */
static void test_an_arena_that_is_too_small(void **state) {
    mt_context_desc meta = {.device = MT_DEVICE_META}, where = {.arena_bytes = 0};
    float loss[GPT_TOKENS];
    gpt_split s = {1, 1, 0, BATCH, 0};
    static gpt_run run;
    test_rank r;
    mt_gpt gpt;
    (void)state;
    run.c = &gpt_cases[0];
    run.split = s;
    test_paper_rank(1, 0, (mt_grid_desc){0}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, gpt_step(&r, &run, &run.needs[0]));
    test_paper_rank_close(&r);
    for (size_t part = 1; part <= 8; part++) {
        where.arena_bytes = part < 8 ? run.needs[0].peak * part / 8 : run.needs[0].peak - 64;
        test_paper_rank(1, 0, (mt_grid_desc){0}, &where, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, gpt_open(&r, &gpt_cases[0], 0, &gpt));
        REFUSED(r.ctx, MT_ERR_MEMORY, "bytes", gpt_passes(&r, &gpt, &gpt_cases[0], s, loss));
        assert_int_equal(mt_arena_mark(r.ctx), 0);
        test_paper_rank_close(&r);
    }
}

/* ---- fused q, k, v ----------------------------------------------------------------------------------------------- */

/* 4 heads in 2 groups, head_dim 2, 1 column. Each group has its two queries, its key and its value. */
static void test_qkv_layout(void **state) {
    static const float q[] = {0, 1, 10, 11, 20, 21, 30, 31}, k[] = {40, 41, 50, 51}, v[] = {60, 61, 70, 71};
    static const float golden[] = {0, 1, 10, 11, 40, 41, 60, 61, 20, 21, 30, 31, 50, 51, 70, 71};
    float qkv[16], q2[8], k2[4], v2[4];
    (void)state;
    assert_int_equal(mt_qkv_from_separate(4, 2, 2, 1, q, k, v, qkv), MT_SUCCESS);
    assert_memory_equal(qkv, golden, sizeof golden);
    assert_int_equal(mt_qkv_to_separate(4, 2, 2, 1, golden, q2, k2, v2), MT_SUCCESS);
    assert_memory_equal(q2, q, sizeof q);
    assert_memory_equal(k2, k, sizeof k);
    assert_memory_equal(v2, v, sizeof v);
}

static void test_qkv_round_trip(void **state) {
    static const int64_t shapes[][4] = {{1, 1, 1, 1}, {6, 6, 4, 5}, {6, 3, 2, 7}, {8, 1, 3, 2}, {12, 4, 2, 1}};
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t h = shapes[i][0], g = shapes[i][1], d = shapes[i][2], c = shapes[i][3], nq = h * d * c, nk = g * d * c;
        float *whole = test_noise(&r, nq + 2 * nk, 3, 1.0f), *again = test_floats(&r, nq + 2 * nk, NAN);
        float *q = test_floats(&r, nq, NAN), *k = test_floats(&r, nk, NAN), *v = test_floats(&r, nk, NAN);
        assert_int_equal(mt_qkv_to_separate(h, g, d, c, whole, q, k, v), MT_SUCCESS);
        assert_int_equal(mt_qkv_from_separate(h, g, d, c, q, k, v, again), MT_SUCCESS);
        assert_memory_equal(again, whole, (size_t)(nq + 2 * nk) * sizeof(float));
    }
    test_paper_rank_close(&r);
}

/* Copies QKV [rows, cols] per group, whole, to another layout: all parts (part -1), or one of them. */
static void permute_qkv(const mt_self_attention_desc *d, int part, int64_t cols, const float *per_group, float *other) {
    int64_t groups = d->kv_heads ? d->kv_heads : d->heads, n = d->heads / groups, size = d->hidden / d->heads * cols;
    for (int p = 0; p < 3; p++)
        for (int64_t h = 0; (part < 0 || p == part) && h < (p == 0 ? d->heads : groups); h++) {
            const float *x = per_group + (p == 0 ? h / n * (n + 2) + h % n : h * (n + 2) + n + p - 1) * size;
            float *y = other + (part >= 0 || p == 0 ? h : d->heads + (p - 1) * groups + h) * size;
            memcpy(y, x, (size_t)size * sizeof(float));
        }
}

enum { QKV_MAX = 3 * WIDTH_MAX };

/* The numbers of the layer per group, for which other layouts are the same after a permutation. */
typedef struct layout_run {
    block_case c;
    int sequence_parallel;
    float weights[2][QKV_MAX * WIDTH_MAX], grads[2][QKV_MAX * WIDTH_MAX]; /* of the weight and of the bias */
    float y[TOKENS * WIDTH_MAX], dx[TOKENS * WIDTH_MAX];
} layout_run;

/* Sets a QKV weight or bias from `kept` per group (what 0), or checks its gradient (what 1). Per group, keeps it in
   `kept` instead. part is 0, 1 or 2 for separate queries, keys and values, and -1 for all three. */
static mt_status layout_param(test_rank *r, const mt_self_attention_desc *d, const char *name, int part, int what,
                              float *kept) {
    float *want = test_floats(r, QKV_MAX * WIDTH_MAX, NAN), *got = test_floats(r, QKV_MAX * WIDTH_MAX, NAN);
    mt_param *p = mt_params_find(r->params, name);
    CHECK(p != NULL);
    if (d->qkv_layout == MT_QKV_PER_GROUP)
        return mt_param_gather(r->ctx, r->params, p, what ? p->grad : p->value, kept);
    permute_qkv(d, part, p->desc.placement == MT_SPLIT_ROWS ? p->desc.cols : 1, kept, want);
    if (!what) return mt_param_scatter(r->ctx, p, want, p->value);
    MT_TRY(mt_param_gather(r->ctx, r->params, p, p->grad, got));
    return test_near_f32(name, got, want, p->desc.rows * p->desc.cols, 5e-6);
}

static mt_status layout_params(test_rank *r, layout_run *run, int what) {
    static const char *const parts[] = {"query", "key", "value"};
    const mt_self_attention_desc *d = &run->c.attention;
    char name[MT_NAME_MAX];
    for (int k = 0; k < 2; k++) {
        float *kept = what ? run->grads[k] : run->weights[k];
        int separate = d->qkv_layout == MT_QKV_SEPARATE;
        for (int part = 0; part < (separate ? 3 : 1); part++) {
            snprintf(name, sizeof name, "block.%s.%s", separate ? parts[part] : "linear_qkv", k ? "bias" : "weight");
            MT_TRY(layout_param(r, d, name, separate ? part : -1, what, kept));
        }
    }
    return MT_SUCCESS;
}

static mt_status layout_passes(test_rank *r, layout_run *run) {
    int ranks = r->grid.tp_size, parts = run->sequence_parallel ? ranks : 1;
    int64_t hidden = run->c.attention.hidden, rows = TOKENS / parts, n = rows * hidden;
    int64_t first = parts > 1 ? n * r->grid.tp_rank : 0;
    block_saved saved;
    block b;
    MT_TRY(block_open(&b, &run->c, r, run->sequence_parallel, SEQUENCES, SEQ));
    MT_TRY(layout_params(r, run, 0));
    mt_tensor x = mt_tensor_f32(test_noise(r, TOKENS * hidden, 1, 1.5f) + first, rows, hidden);
    mt_tensor dy = mt_tensor_f32(test_noise(r, TOKENS * hidden, 2, 0.5f) + first, rows, hidden);
    mt_tensor y = test_tensor(r, rows, hidden, NAN), dx = test_tensor(r, rows, hidden, NAN);
    MT_TRY(block_forward(&b, x, y, &saved));
    MT_TRY(block_backward(&b, dy, dx, &saved));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    if (run->c.attention.qkv_layout == MT_QKV_PER_GROUP) memcpy(run->y, y.data, (size_t)n * sizeof(float));
    if (run->c.attention.qkv_layout == MT_QKV_PER_GROUP) memcpy(run->dx, dx.data, (size_t)n * sizeof(float));
    MT_TRY(test_near_f32("y", (const float *)y.data, run->y + first, n, 5e-6));
    MT_TRY(test_near_f32("dx", (const float *)dx.data, run->dx + first, n, 5e-6));
    return layout_params(r, run, 1);
}

static mt_status layout_rank(mt_comm *world, void *user) {
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r);
    if (status == MT_SUCCESS) status = layout_passes(&r, (layout_run *)user);
    if (status != MT_SUCCESS) fprintf(stderr, "%s\n", mt_last_error(r.ctx));
    test_rank_close(&r);
    return status;
}

/* With permuted weights, the outputs and gradients of the layout per group, on any number of ranks. */
static void test_layouts_are_permutations(void **state) {
    static const struct {
        mt_qkv_layout layout;
        mt_self_attention_desc desc;
    } tries[] = {
        {MT_QKV_CONCATENATED, {ATT_MHA, .scores.rotary_base = 100.0f, .max_seq = 12, .dropout = 0.2f}},
        {MT_QKV_CONCATENATED, {ATT_MHA, .scores.mask = MT_MASK_BIDIRECTIONAL, .recompute_core = 1}},
        {MT_QKV_SEPARATE, {ATT_GQA, .scores.rotary_base = 100.0f, .max_seq = 12, .dropout = 0.2f}},
        {MT_QKV_SEPARATE, {ATT_MHA, .scores.mask = MT_MASK_BIDIRECTIONAL, .recompute_core = 1}},
    };
    static layout_run run;
    (void)state;
    for (size_t i = 0; i < sizeof tries / sizeof *tries; i++) {
        run.c = (block_case){"layout", ATTENTION, .attention = tries[i].desc};
        run.sequence_parallel = 0;
        test_launch(1, layout_rank, &run);
        run.c.attention.qkv_layout = tries[i].layout;
        for (int ranks = 1; ranks <= 4; ranks *= 2)
            for (run.sequence_parallel = 0; run.sequence_parallel < 2; run.sequence_parallel++)
                test_launch(ranks, layout_rank, &run);
    }
}

/* ---- the forms of rotary ----------------------------------------------------------------------------------------- */

/* 2 heads of 6 features, of which 4 turn. 1 column. */
static void test_rotary_weights(void **state) {
    static const float pairs[] = {0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15};
    static const float halves[] = {0, 2, 1, 3, 4, 5, 10, 12, 11, 13, 14, 15};
    static const float wide_pairs[] = {0, 1, 2, 3, 4, 5, 6, 7}, wide_halves[] = {0, 1, 4, 5, 2, 3, 6, 7};
    float got[12];
    (void)state;
    assert_int_equal(mt_rotary_halves_from_pairs(2, 6, 4, 1, pairs, got), MT_SUCCESS);
    assert_memory_equal(got, halves, sizeof halves);
    assert_int_equal(mt_rotary_pairs_from_halves(2, 6, 4, 1, halves, got), MT_SUCCESS);
    assert_memory_equal(got, pairs, sizeof pairs);
    assert_int_equal(mt_rotary_halves_from_pairs(1, 4, 0, 2, wide_pairs, got), MT_SUCCESS);
    assert_memory_equal(got, wide_halves, sizeof wide_halves);
    assert_int_equal(mt_rotary_halves_from_pairs(2, 6, 8, 1, pairs, got), MT_ERR_SHAPE);
    assert_int_equal(mt_rotary_halves_from_pairs(2, 6, 3, 1, pairs, got), MT_ERR_SHAPE);
    assert_int_equal(mt_rotary_halves_from_pairs(2, 3, 0, 1, pairs, got), MT_ERR_SHAPE);
    assert_int_equal(mt_rotary_halves_from_pairs(0, 6, 4, 1, pairs, got), MT_ERR_SHAPE);
    assert_int_equal(mt_rotary_pairs_from_halves(2, 6, -2, 1, pairs, got), MT_ERR_SHAPE);
    assert_int_equal(mt_rotary_pairs_from_halves(2, 6, 4, 1, NULL, got), MT_ERR_ARGUMENT);
    assert_int_equal(mt_rotary_halves_from_pairs(2, 6, 4, 1, pairs, NULL), MT_ERR_ARGUMENT);
}

/* Converts the QKV weight or bias of a layer from halves to pairs. */
static void convert_to_pairs(test_rank *r, const mt_transformer_layer_desc *d, mt_param *p) {
    int64_t head = d->hidden / d->heads, rows = p->value.rows * p->value.cols / (d->heads + 2 * d->kv_heads) / head;
    int64_t nq = d->heads * head * rows, nk = d->kv_heads * head * rows; /* rows: the columns of a weight, or 1 */
    float *x = (float *)p->value.data, *q = test_floats(r, nq, NAN), *k = test_floats(r, nk, NAN),
          *v = test_floats(r, nk, NAN), *q2 = test_floats(r, nq, NAN), *k2 = test_floats(r, nk, NAN);
    assert_int_equal(mt_qkv_to_separate(d->heads, d->kv_heads, head, rows, x, q, k, v), MT_SUCCESS);
    assert_int_equal(mt_rotary_pairs_from_halves(d->heads, head, d->scores.rotary_dim, rows, q, q2), MT_SUCCESS);
    assert_int_equal(mt_rotary_pairs_from_halves(d->kv_heads, head, d->scores.rotary_dim, rows, k, k2), MT_SUCCESS);
    assert_int_equal(mt_qkv_from_separate(d->heads, d->kv_heads, head, rows, q2, k2, v, x), MT_SUCCESS);
}

/* A GPT with pairs and converted weights has the logits of the one with halves. Without conversion it does not. */
static void test_rotary_forms(void **state) {
    static const int32_t ids[] = {0, 10, 3, 3, 7, 1, 9, 5, 2, 8};
    float logits[3][110];
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int dim = 0; dim <= 4; dim += 4) {
        for (int i = 0; i < 3; i++) { /* halves; pairs; pairs, converted */
            mt_gpt_desc d = {.vocab = 11, .layers = 2, .max_seq = 5};
            mt_batch batch = {.sequences = 2, .seq = 5};
            mt_gpt gpt;
            d.layer = (mt_transformer_layer_desc){.hidden = 32, .heads = 4, .kv_heads = 2, .scores.rotary_base = 10.0f};
            d.layer.scores.rotary_dim = dim;
            d.layer.scores.rotary_form = i ? MT_ROTARY_PAIRS : MT_ROTARY_HALVES;
            ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &gpt));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, disturb_params(&r, 0.4f));
            for (int l = 0; i == 2 && l < 2; l++) {
                convert_to_pairs(&r, &d.layer, gpt.model.layers[l].attention.qkv.weight);
                convert_to_pairs(&r, &d.layer, gpt.model.layers[l].attention.qkv.bias);
            }
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_logits(r.ctx, &gpt, &batch, ids, mt_tensor_f32(logits[i], 10, 11)));
        }
        assert_int_equal(test_near_f32("logits", logits[2], logits[0], 110, 2e-5), MT_SUCCESS);
        double apart = 0;
        for (int i = 0; i < 110; i++) apart = fmax(apart, fabs((double)logits[1][i] - (double)logits[0][i]));
        assert_true(apart > 0.01);
    }
    test_paper_rank_close(&r);
}

/* The default scale is 1 / sqrt(features of a head). With 4 times the scale, a layer computes what it computes with 4
   times the queries. */
static void test_scale(void **state) {
    const float scales[] = {0.0f, 1.0f / sqrtf(8.0f), 4.0f / sqrtf(8.0f), 0.0f};
    float y[4][6 * 32];
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int i = 0; i < 4; i++) {
        mt_transformer_layer_desc d = {.hidden = 32, .heads = 4, .qkv_layout = MT_QKV_SEPARATE, .no_bias = 1};
        mt_batch batch = {.sequences = 1, .seq = 6};
        mt_transformer_layer l;
        mt_param *query;
        d.scores.scale = scales[i];
        ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_transformer_layer_create(r.ctx, r.params, "l", &d, &l));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, disturb_params(&r, 0.4f));
        query = l.attention.separate[0].weight;
        for (int k = 0; i == 3 && k < 32 * 32; k++) ((float *)query->value.data)[k] *= 4.0f;
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_transformer_layer_forward(r.ctx, &l, &batch,
                                                   mt_tensor_f32(test_noise(&r, 6 * 32, 5, 1.0f), 6, 32),
                                                   mt_tensor_f32(y[i], 6, 32), NULL));
    }
    assert_memory_equal(y[1], y[0], sizeof y[0]);
    assert_int_equal(test_near_f32("y", y[3], y[2], 6 * 32, 1e-5), MT_SUCCESS);
    assert_true(test_near_f32("y", y[2], y[0], 6 * 32, 1e-2) != MT_SUCCESS);
    test_paper_rank_close(&r);
}

/* ---- QK-norm ----------------------------------------------------------------------------------------------------- */

enum { QK_TOKENS = 3, QK_GROUPS = 2, QK_QUERIES = 2, QK_HEAD = 4, QK_UNIT = (QK_QUERIES + 2) * QK_HEAD };
enum { QK_COLS = QK_GROUPS * QK_UNIT, QK_ALL = QK_TOKENS * QK_COLS };

/* Returns sum(weight * y) in double. y may be NULL. gains: those of the queries, then those of the keys. */
static double qk_norm_reference(mt_norm_kind kind, const double *x, const double *gains, const float *weight,
                                double *y) {
    double total = 0;
    for (int head = 0; head < QK_ALL / QK_HEAD; head++) {
        const double *from = x + head * QK_HEAD;
        int part = head % (QK_QUERIES + 2), key = part == QK_QUERIES, value = part > QK_QUERIES;
        double mean = 0, square = 0;
        for (int i = 0; i < QK_HEAD && kind == MT_LAYER_NORM; i++) mean += from[i] / QK_HEAD;
        for (int i = 0; i < QK_HEAD; i++) square += (from[i] - mean) * (from[i] - mean) / QK_HEAD;
        for (int i = 0; i < QK_HEAD; i++) {
            double at = value ? from[i] : (from[i] - mean) / sqrt(square + 1e-5) * gains[key * QK_HEAD + i];
            total += at * (double)weight[head * QK_HEAD + i];
            if (y) y[head * QK_HEAD + i] = at;
        }
    }
    return total;
}

static mt_status qk_layer(test_rank *r, int64_t unit, mt_column_parallel_linear *out) {
    mt_linear_desc d = {.in_features = 4, .out_features = QK_GROUPS * unit, .unit = unit, .no_bias = 1};
    return mt_column_parallel_linear_create(r->ctx, r->params, unit == QK_UNIT ? "qkv" : "other", &d, out);
}

/* Values against double precision, gradients against central differences of it. Inference gives the same bits. */
static void qk_norm_is_the_formula(mt_norm_kind kind) {
    mt_norm_layer_desc d = {.features = QK_HEAD, .kind = kind};
    mt_column_parallel_linear layer;
    double x[QK_ALL], y[QK_ALL], dx[QK_ALL], gains[2 * QK_HEAD], dgains[2 * QK_HEAD], h = 1e-5;
    mt_qk_norm norm;
    mt_qk_norm_saved saved;
    test_rank r;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, qk_layer(&r, QK_UNIT, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_qk_norm_create(r.ctx, r.params, "a", &d, &layer, &norm));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    assert_non_null(mt_params_find(r.params, "a.q_layernorm.weight"));
    assert_non_null(mt_params_find(r.params, "a.k_layernorm.weight"));
    mt_tensor qkv = mt_tensor_f32(test_noise(&r, QK_ALL, 1, 2.0f), QK_TOKENS, QK_COLS);
    mt_tensor again = mt_tensor_f32(test_noise(&r, QK_ALL, 1, 2.0f), QK_TOKENS, QK_COLS);
    mt_tensor dqkv = mt_tensor_f32(test_noise(&r, QK_ALL, 2, 1.0f), QK_TOKENS, QK_COLS);
    const float *weight = test_noise(&r, QK_ALL, 2, 1.0f);
    for (int i = 0; i < 2 * QK_HEAD; i++) {
        float *gain = (float *)(i < QK_HEAD ? norm.q : norm.k).weight->value.data + i % QK_HEAD;
        gains[i] = (double)(*gain = 0.5f + 0.25f * (float)i);
    }
    for (int i = 0; i < QK_ALL; i++) x[i] = (double)((float *)qkv.data)[i];
    qk_norm_reference(kind, x, gains, weight, y);
    for (int i = 0; i < QK_ALL + 2 * QK_HEAD; i++) {
        double *at = i < QK_ALL ? &x[i] : &gains[i - QK_ALL], kept = *at, up;
        *at = kept + h;
        up = qk_norm_reference(kind, x, gains, weight, NULL);
        *at = kept - h;
        up = (up - qk_norm_reference(kind, x, gains, weight, NULL)) / (2 * h);
        *at = kept;
        *(i < QK_ALL ? &dx[i] : &dgains[i - QK_ALL]) = up;
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_qk_norm_forward(r.ctx, &norm, qkv, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_qk_norm_forward(r.ctx, &norm, again, NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_qk_norm_backward(r.ctx, &norm, dqkv, &saved));
    assert_memory_equal(again.data, qkv.data, QK_ALL * sizeof(float));
    assert_int_equal(test_near("qkv", qkv.data, y, QK_ALL, 1e-5), MT_SUCCESS);
    assert_int_equal(test_near("dqkv", dqkv.data, dx, QK_ALL, 1e-4), MT_SUCCESS);
    assert_int_equal(test_near("dgain of q", norm.q.weight->grad.data, dgains, QK_HEAD, 1e-4), MT_SUCCESS);
    assert_int_equal(test_near("dgain of k", norm.k.weight->grad.data, dgains + QK_HEAD, QK_HEAD, 1e-4), MT_SUCCESS);
    test_paper_rank_close(&r);
}

static void test_qk_norm(void **state) {
    (void)state;
    qk_norm_is_the_formula(MT_RMS_NORM);
    qk_norm_is_the_formula(MT_LAYER_NORM);
}

static void test_qk_norm_refuses(void **state) {
    mt_norm_layer_desc d = {.features = QK_HEAD}, again = {.features = QK_HEAD, .groups = QK_GROUPS};
    mt_column_parallel_linear layer, other;
    mt_qk_norm norm;
    mt_qk_norm_saved saved;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    mt_tensor wide = test_tensor(&r, QK_TOKENS, QK_COLS + 1, 7.0f), qkv = mt_tensor_f32(wide.data, QK_TOKENS, QK_COLS);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, qk_layer(&r, QK_UNIT, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, qk_layer(&r, 2 * QK_HEAD, &other));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'a': groups is 2|'qkv'",
            mt_qk_norm_create(r.ctx, r.params, "a", &again, &layer, &norm));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_qk_norm_create(r.ctx, r.params, "a", NULL, &layer, &norm));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_qk_norm_create(r.ctx, r.params, "a", &d, NULL, &norm));
    REFUSED_EXACTLY(r.ctx, MT_ERR_SHAPE, /* two heads in each group */
                    "'a': features is 4, must divide the unit 8 of 'other' into three heads or more",
                    mt_qk_norm_create(r.ctx, r.params, "a", &d, &other, &norm));
    mt_column_parallel_linear fused = layer;
    fused.desc.parts = 3;
    fused.desc.unit = QK_HEAD;
    REFUSED_EXACTLY(r.ctx, MT_ERR_SHAPE, "'a': 'qkv' has no query groups: its parts is 3",
                    mt_qk_norm_create(r.ctx, r.params, "a", &d, &fused, &norm));
    d.eps = -1.0f;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "a.q_layernorm|eps is -1",
            mt_qk_norm_create(r.ctx, r.params, "a", &d, &layer, &norm));
    assert_int_equal(mt_params_count(r.params), 2);
    d.eps = 0.0f;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_qk_norm_create(r.ctx, r.params, "a", &d, &layer, &norm));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init", mt_qk_norm_forward(r.ctx, &norm, qkv, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_SHAPE, "mt_qk_norm_forward: qkv|[3, 33]", mt_qk_norm_forward(r.ctx, &norm, wide, &saved));
    REFUSED(r.ctx, MT_ERR_SHAPE, "qkv [3, 32] with ld 33",
            mt_qk_norm_forward(r.ctx, &norm, mt_tensor_cols(wide, 0, QK_COLS), &saved));
    REFUSED(r.ctx, MT_ERR_SHAPE, "qkv|[3, 16]", /* one group of the two */
            mt_qk_norm_forward(r.ctx, &norm, mt_tensor_f32(wide.data, QK_TOKENS, QK_COLS / 2), &saved));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "saved is NULL", mt_qk_norm_backward(r.ctx, &norm, qkv, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_qk_norm_backward(r.ctx, NULL, qkv, &saved));
    test_untouched("qkv", wide.data, QK_TOKENS * (QK_COLS + 1), 7.0f);
    test_paper_rank_close(&r);
}

enum { QK_MANY = 7, QK_WIDE = QK_MANY * QK_UNIT, QK_RANKS = 4, QK_LOCAL = 2 * QK_UNIT };

/* Applies the norms of one rank of tp: replaces its columns of qkv and dqkv, and writes the gradients of its gains. */
static void qk_norm_of_rank(int tp, int rank, mt_norm_kind kind, const float *from, const float *up, float *qkv,
                            float *dqkv, float *dgains) {
    int64_t cols = tp == 1 ? QK_WIDE : QK_LOCAL, first = rank * cols, used = mt_min(cols, QK_WIDE - first);
    mt_linear_desc wide = {.in_features = 4, .out_features = QK_WIDE, .unit = QK_UNIT, .no_bias = 1};
    mt_norm_layer_desc d = {.features = QK_HEAD, .kind = kind};
    mt_column_parallel_linear layer;
    mt_qk_norm norm;
    mt_qk_norm_saved saved;
    test_rank r;
    test_paper_rank(tp, rank, (mt_grid_desc){.tp = tp}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "qkv", &wide, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_qk_norm_create(r.ctx, r.params, "a", &d, &layer, &norm));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    for (int i = 0; i < QK_HEAD; i++) ((float *)norm.q.weight->value.data)[i] = 0.5f + (float)i;
    for (int i = 0; i < QK_HEAD; i++) ((float *)norm.k.weight->value.data)[i] = 2.0f - (float)i;
    mt_tensor own = test_tensor(&r, QK_TOKENS, cols, 0.0f), down = test_tensor(&r, QK_TOKENS, cols, 0.0f);
    mt_tensor used_own = mt_tensor_cols(own, 0, used), used_down = mt_tensor_cols(down, 0, used);
    mt_tensor all = mt_tensor_f32((void *)(uintptr_t)from, QK_TOKENS, QK_WIDE);
    mt_tensor all_up = mt_tensor_f32((void *)(uintptr_t)up, QK_TOKENS, QK_WIDE);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_cols(all, first, used), used_own));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_cols(all_up, first, used), used_down));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_qk_norm_forward(r.ctx, &norm, own, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_qk_norm_backward(r.ctx, &norm, down, &saved));
    for (int i = 0; i < QK_HEAD; i++) dgains[i] += ((float *)norm.q.weight->grad.data)[i];
    for (int i = 0; i < QK_HEAD; i++) dgains[QK_HEAD + i] += ((float *)norm.k.weight->grad.data)[i];
    all = mt_tensor_cols(mt_tensor_f32(qkv, QK_TOKENS, QK_WIDE), first, used);
    all_up = mt_tensor_cols(mt_tensor_f32(dqkv, QK_TOKENS, QK_WIDE), first, used);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, used_own, all));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, used_down, all_up));
    test_paper_rank_close(&r);
}

/* 7 groups of 2 queries on 4 ranks, of which the last has an empty group: the bits of one rank, and gradients of gains
   whose sum is the gradient on one rank. */
static void qk_norm_is_split(mt_norm_kind kind) {
    enum { ALL = QK_TOKENS * QK_WIDE };
    float from[ALL], up[ALL], y[2][ALL], dx[2][ALL], dgains[2][2 * QK_HEAD] = {{0}};
    double expected[2 * QK_HEAD];
    uint64_t seed = 7;
    for (int i = 0; i < ALL; i++) from[i] = 2 * test_float(&seed), up[i] = test_float(&seed);
    qk_norm_of_rank(1, 0, kind, from, up, y[0], dx[0], dgains[0]);
    for (int rank = 0; rank < QK_RANKS; rank++) qk_norm_of_rank(QK_RANKS, rank, kind, from, up, y[1], dx[1], dgains[1]);
    assert_memory_equal(y[1], y[0], sizeof y[0]);
    assert_memory_equal(dx[1], dx[0], sizeof dx[0]);
    for (int i = 0; i < 2 * QK_HEAD; i++) expected[i] = (double)dgains[0][i];
    assert_int_equal(test_near("dgains", dgains[1], expected, 2 * QK_HEAD, 1e-5), MT_SUCCESS);
}

static void test_qk_norm_split(void **state) {
    (void)state;
    qk_norm_is_split(MT_RMS_NORM);
    qk_norm_is_split(MT_LAYER_NORM);
}

/* ---- core attention ---------------------------------------------------------------------------------------------- */

/* The last of 4 ranks has one of the 7 groups, and an empty place for a second one. */
static void test_core_attention_desc(void **state) {
    static const int32_t lengths[] = {1, 2};
    mt_linear_desc d = {.in_features = 8, .out_features = 7 * 20, .unit = 20};
    mt_batch batch = {.sequences = 2, .seq = 6, .first_sequence = 5, .lengths = lengths};
    mt_column_parallel_linear qkv;
    mt_attention_desc s;
    test_rank r;
    (void)state;
    test_paper_rank(4, 3, (mt_grid_desc){.tp = 4}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "qkv", &d, &qkv));
    s = mt_core_attention_desc(&qkv, 4, &batch);
    assert_true(s.batch == 2 && s.seq == 6 && s.groups == 1 && s.heads_per_group == 3 && s.head_dim == 4);
    assert_true(s.lengths == lengths && s.scores.mask == MT_MASK_CAUSAL && s.scores.scale == 0.0f &&
                s.dropout.p == 0.0f);
    assert_true(s.dropout.at.first_row == 5 && s.dropout.at.first_col == 18 && s.dropout.at.global_cols == 21);
    assert_true(mt_core_attention_desc(&qkv, 3, &batch).heads_per_group == 0);
    assert_true(mt_core_attention_desc(&qkv, 10, &batch).heads_per_group == 0);
    assert_true(mt_core_attention_desc(&qkv, 0, &batch).heads_per_group == 0);
    assert_true(mt_core_attention_desc(&qkv, 4, NULL).heads_per_group == 0);
    assert_true(mt_core_attention_desc(NULL, 4, &batch).heads_per_group == 0);
    d = (mt_linear_desc){.in_features = 8, .out_features = 3 * 8 * 4, .parts = 3, .unit = 4};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "fused", &d, &qkv));
    s = mt_core_attention_desc(&qkv, 4, &batch);
    assert_true(s.groups == 2 && s.heads_per_group == 1 && s.head_dim == 4 && s.qkv_layout == MT_QKV_CONCATENATED);
    assert_true(s.dropout.at.first_col == 6 && s.dropout.at.global_cols == 8);
    assert_true(mt_core_attention_desc(&qkv, 2, &batch).heads_per_group == 0);
    test_paper_rank_close(&r);
}

/* A rank with two places for groups but only one group: a refused call does not clear the empty place. */
static void test_core_attention_refuses(void **state) {
    mt_attention_desc s = {.batch = 2, .seq = 4, .groups = 1, .heads_per_group = 2, .head_dim = 4}, bad = s;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    mt_tensor qkv = test_tensor(&r, 8, 32, 0.5f), out = test_tensor(&r, 8, 16, 7.0f), lse = test_tensor(&r, 4, 8, 7.0f);
    mt_tensor dout = test_tensor(&r, 8, 16, 1.0f), dqkv = test_tensor(&r, 8, 32, 7.0f);
    mt_tensor two = mt_tensor_rows(lse, 0, 2), i32 = qkv;
    i32.dtype = MT_I32;
#define FORWARD(...) mt_core_attention_forward(r.ctx, __VA_ARGS__)
#define BACKWARD(...) mt_core_attention_backward(r.ctx, __VA_ARGS__)
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", FORWARD(NULL, 1, qkv, out, two));
    REFUSED(r.ctx, MT_ERR_SHAPE, "31 columns", FORWARD(&s, 1, mt_tensor_cols(qkv, 0, 31), out, two));
    REFUSED(r.ctx, MT_ERR_SHAPE, "qkv is [7, 32]|[8, 32]", FORWARD(&s, 1, mt_tensor_rows(qkv, 0, 7), out, two));
    REFUSED(r.ctx, MT_ERR_SHAPE, "out is [7, 16]|[8, 16]", FORWARD(&s, 1, qkv, mt_tensor_rows(out, 0, 7), two));
    REFUSED(r.ctx, MT_ERR_DTYPE, "qkv is i32", FORWARD(&s, 1, i32, out, two));
    REFUSED(r.ctx, MT_ERR_SHAPE, "lse is [1, 8]|[2, 8]", FORWARD(&s, 1, qkv, out, mt_tensor_rows(lse, 0, 1)));
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, "shards is 0, must be at least 1", FORWARD(&s, 0, qkv, out, two));
    bad.groups = -1;
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, "groups is -1, must be at least 0", FORWARD(&bad, 2, qkv, out, two));
    bad.groups = 1, bad.head_dim = 0;
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, "head_dim is 0, must be from 1 to 715827882",
                    FORWARD(&bad, 2, qkv, out, two));
    bad.head_dim = 4, bad.heads_per_group = 0;
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, "heads_per_group is 0, must be from 1 to 536870909",
                    FORWARD(&bad, 2, qkv, out, two));
    bad.heads_per_group = 2;
    bad.scores.mask = (mt_mask)5;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mask is 5", FORWARD(&bad, 2, qkv, out, two));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mask is 5", BACKWARD(&bad, 2, qkv, out, two, dout, dqkv));
    bad = s;
    bad.groups = 2; /* there are rows of lse for this rank's groups, not for more */
    REFUSED(r.ctx, MT_ERR_SHAPE, "lse is [2, 8]|[4, 8]", FORWARD(&bad, 2, qkv, out, two));
    REFUSED(r.ctx, MT_ERR_SHAPE, "lse is [2, 8]|[4, 8]", BACKWARD(&bad, 2, qkv, out, two, dout, dqkv));
    REFUSED(r.ctx, MT_ERR_SHAPE, "lse", BACKWARD(&s, 1, qkv, out, mt_none(), dout, dqkv));
    bad = s;
    bad.qkv_layout = MT_QKV_CONCATENATED;
    REFUSED(r.ctx, MT_ERR_SHAPE, "1 of 2 groups are empty|MT_QKV_PER_GROUP", FORWARD(&bad, 1, qkv, out, two));
    REFUSED(r.ctx, MT_ERR_SHAPE, "1 of 2 groups are empty", BACKWARD(&bad, 2, qkv, out, two, dout, dqkv));
    REFUSED(r.ctx, MT_ERR_SHAPE, "dqkv is [7, 32]|[8, 32]",
            BACKWARD(&s, 1, qkv, out, two, dout, mt_tensor_rows(dqkv, 0, 7)));
    REFUSED(r.ctx, MT_ERR_SHAPE, "dqkv has 16 columns",
            BACKWARD(&s, 1, qkv, out, two, mt_tensor_cols(dout, 0, 8), mt_tensor_cols(dqkv, 0, 16)));
    REFUSED(r.ctx, MT_ERR_SHAPE, "dout is [7, 16]|[8, 16]",
            BACKWARD(&s, 1, qkv, out, two, mt_tensor_rows(dout, 0, 7), dqkv));
    test_untouched("out", out.data, 8 * 16, 7.0f);
    test_untouched("lse", lse.data, 4 * 8, 7.0f);
    test_untouched("dqkv", dqkv.data, 8 * 32, 7.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, FORWARD(&s, 2, qkv, out, two));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, BACKWARD(&s, 2, qkv, out, two, dout, dqkv));
    for (int64_t i = 0; i < 8; i++) {
        test_untouched("out of no group", (float *)out.data + i * 16 + 8, 8, 0.0f);
        test_untouched("dqkv of no group", (float *)dqkv.data + i * 32 + 16, 16, 0.0f);
        assert_float_equal(((float *)out.data)[i * 16], 0.5f, 1e-6f);
    }
#undef FORWARD
#undef BACKWARD
    test_paper_rank_close(&r);
}

/* Virtual shards have the bias and the slopes of their own heads: the results are those of one call. */
static void test_core_attention_shards(void **state) {
    static const float slopes[] = {0.5f, 0.25f, 0.0f, 1.0f};
    mt_attention_desc s = {.batch = 2, .seq = 4, .groups = 2, .heads_per_group = 2, .head_dim = 4};
    test_rank r;
    float out[2][8 * 16], dqkv[2][8 * 32], dbias[2][7 * 16];
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    mt_tensor qkv = mt_tensor_f32(test_noise(&r, 8 * 32, 1, 1.0f), 8, 32);
    mt_tensor dout = mt_tensor_f32(test_noise(&r, 8 * 16, 2, 1.0f), 8, 16), lse = test_tensor(&r, 4, 8, 0.0f);
    s.scores.alibi = 1;
    s.scores.alibi_slopes = slopes;
    s.bias.value = mt_tensor_f32(test_noise(&r, 7 * 16, 3, 1.0f), 28, 4);
    s.bias.heads = 7, s.bias.first_head = 2;
    for (int i = 0; i < 2; i++) {
        memset(dbias[i], 0, sizeof dbias[i]);
        s.bias.grad = mt_tensor_f32(dbias[i], 28, 4);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_core_attention_forward(r.ctx, &s, 1 + i, qkv, mt_tensor_f32(out[i], 8, 16), lse));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_core_attention_backward(r.ctx, &s, 1 + i, qkv, mt_tensor_f32(out[i], 8, 16), lse, dout,
                                                 mt_tensor_f32(dqkv[i], 8, 32)));
    }
    assert_memory_equal(out[1], out[0], sizeof out[0]);
    assert_memory_equal(dqkv[1], dqkv[0], sizeof dqkv[0]);
    assert_memory_equal(dbias[1], dbias[0], sizeof dbias[0]);
    test_paper_rank_close(&r);
}

static void test_qkv_refuses(void **state) {
    static const int64_t bad[][4] = {{0, 1, 2, 2},  {4, 0, 2, 2}, {4, 3, 2, 2},
                                     {4, 2, 0, 2},  {4, 2, 2, 0}, {-4, 2, 2, 2},
                                     {4, -2, 2, 2}, {2, 4, 2, 2}, {4, 2, INT64_MAX, INT64_MAX}};
    float x[32] = {0}, y[32] = {0};
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(mt_qkv_from_separate(bad[i][0], bad[i][1], bad[i][2], bad[i][3], x, x, x, y), MT_ERR_SHAPE);
        assert_int_equal(mt_qkv_to_separate(bad[i][0], bad[i][1], bad[i][2], bad[i][3], x, y, y, y), MT_ERR_SHAPE);
    }
    for (int i = 0; i < 4; i++) {
        float *p[4] = {x, x, x, y};
        p[i] = NULL;
        assert_int_equal(mt_qkv_from_separate(4, 2, 2, 1, p[0], p[1], p[2], p[3]), MT_ERR_ARGUMENT);
        assert_int_equal(mt_qkv_to_separate(4, 2, 2, 1, p[0], p[1], p[2], p[3]), MT_ERR_ARGUMENT);
    }
}

/* ---- bad input --------------------------------------------------------------------------------------------------- */

/* Rank 1 of a meta tensor group of 4 ranks: arguments are checked before any communication. */
#define HUGE_SIZE (INT64_MAX / 2)

static void test_mlp_create_refuses(void **state) {
    static const struct {
        mt_mlp_desc desc;
        mt_status status;
        const char *rest; /* of the message, behind the function */
    } bad[] = {
        {{.hidden = 0, .ffn = -1}, MT_ERR_ARGUMENT, "'m': hidden is 0, must be from 1 to 2147483647"},
        {{.hidden = -8}, MT_ERR_ARGUMENT, "'m': hidden is -8, must be from 1 to 2147483647"},
        {{.hidden = (int64_t)INT32_MAX + 1},
         MT_ERR_ARGUMENT,
         "'m': hidden is 2147483648, must be from 1 to 2147483647"},
        {{.hidden = 8, .ffn = -1, .activation = (mt_activation)-1},
         MT_ERR_ARGUMENT,
         "'m': ffn is -1, must be from 0 to 2147483647"},
        {{.hidden = 8, .ffn = HUGE_SIZE + 1, .activation = MT_SWIGLU},
         MT_ERR_ARGUMENT,
         "'m': ffn is 4611686018427387904, must be from 0 to 2147483647"},
        {{.hidden = 8, .activation = (mt_activation)MT_ACTIVATION_COUNT},
         MT_ERR_ARGUMENT,
         "'m': activation is 6, must be MT_GELU_TANH, MT_GELU_ERF, MT_SWIGLU, MT_SQUARED_RELU, MT_RELU or MT_TANH"},
        {{.hidden = 8, .activation = (mt_activation)-1},
         MT_ERR_ARGUMENT,
         "'m': activation is -1, must be MT_GELU_TANH, MT_GELU_ERF, MT_SWIGLU, MT_SQUARED_RELU, MT_RELU or MT_TANH"},
        {{.hidden = 8, .no_bias = 1, .skip_bias_add = 1},
         MT_ERR_ARGUMENT,
         "'m.linear_fc2' sets skip_bias_add, but with no_bias there is no bias"},
        {{.hidden = 8, .init.std = -1.0f}, MT_ERR_ARGUMENT, "'m': init.std is -1, must be at least 0 and finite"},
        {{.hidden = 8, .init.output_std = NAN},
         MT_ERR_ARGUMENT,
         "'m': init.output_std is nan, must be at least 0 and finite"}};
    static char name[MT_NAME_MAX];
    mt_mlp_desc good = {.hidden = 8};
    float x[8] = {0};
    mt_mlp m;
    test_rank r;
    (void)state;
    memset(name, 'n', MT_NAME_MAX - 12);
    open_quarter(&r);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        REFUSED_EXACTLY(r.ctx, bad[i].status, bad[i].rest, mt_mlp_create(r.ctx, r.params, "m", &bad[i].desc, &m));
        assert_int_equal(mt_params_count(r.params), 0);
    }
    assert_int_equal(mt_mlp_create(NULL, r.params, "m", &good, &m), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_mlp_create(r.ctx, NULL, "m", &good, &m));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name ''|95", mt_mlp_create(r.ctx, r.params, "", &good, &m));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_mlp_create(r.ctx, r.params, "m", NULL, &m));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_mlp_create(r.ctx, r.params, "m", &good, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "nnn|95", mt_mlp_create(r.ctx, r.params, name, &good, &m));
    assert_int_equal(mt_params_count(r.params), 0);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", /* the object of a refused creation */
            mt_mlp_forward(r.ctx, &m, mt_tensor_f32(x, 1, 8), mt_tensor_f32(x, 1, 8), NULL));
    test_paper_rank_close(&r);
}

static const struct {
    mt_self_attention_desc desc;
    mt_status status;
    const char *rest; /* of the message, behind the function */
} bad_attention[] = {
    {{.hidden = 0, .heads = 0}, MT_ERR_ARGUMENT, "'a': hidden is 0, must be from 1 to 2147483647"},
    {{.hidden = HUGE_SIZE, .heads = HUGE_SIZE},
     MT_ERR_ARGUMENT,
     "'a': hidden is 4611686018427387903, must be from 1 to 2147483647"},
    {{.hidden = 16, .heads = 0}, MT_ERR_ARGUMENT, "'a': heads is 0, must be at least 1"},
    {{.hidden = 16, .heads = -4}, MT_ERR_ARGUMENT, "'a': heads is -4, must be at least 1"},
    {{.hidden = 16, .heads = 4, .kv_heads = -2}, MT_ERR_ARGUMENT, "'a': kv_heads is -2, must be at least 0"},
    {{.hidden = 16, .heads = 4, .scores.mask = (mt_mask)2, .scores.rotary_base = -1.0f},
     MT_ERR_ARGUMENT,
     "'a': scores.mask is 2, must be MT_MASK_CAUSAL or MT_MASK_BIDIRECTIONAL"},
    {{.hidden = 16, .heads = 4, .scores.rotary_base = -1.0f},
     MT_ERR_ARGUMENT,
     "'a': scores.rotary_base is -1, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .scores.rotary_base = INFINITY, .max_seq = 8},
     MT_ERR_ARGUMENT,
     "'a': scores.rotary_base is inf, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .max_seq = -1}, MT_ERR_ARGUMENT, "'a': max_seq is -1, must be from 0 to 2147483647"},
    {{.hidden = 16, .heads = 4, .scores.rotary_base = 1e4f, .max_seq = HUGE_SIZE},
     MT_ERR_ARGUMENT,
     "'a': max_seq is 4611686018427387903, must be from 0 to 2147483647"},
    {{.hidden = 16, .heads = 4, .dropout = 1.0f, .layer_number = -1},
     MT_ERR_ARGUMENT,
     "'a': dropout is 1, must be at least 0 and below 1"},
    {{.hidden = 16, .heads = 4, .dropout = -0.5f},
     MT_ERR_ARGUMENT,
     "'a': dropout is -0.5, must be at least 0 and below 1"},
    {{.hidden = 16, .heads = 4, .dropout = NAN},
     MT_ERR_ARGUMENT,
     "'a': dropout is nan, must be at least 0 and below 1"},
    {{.hidden = 16, .heads = 4, .layer_number = -1}, MT_ERR_ARGUMENT, "'a': layer_number is -1, must be at least 0"},
    {{.hidden = 16, .heads = 4, .qkv_layout = (mt_qkv_layout)3},
     MT_ERR_ARGUMENT,
     "'a': qkv_layout is 3, must be MT_QKV_PER_GROUP, MT_QKV_CONCATENATED or MT_QKV_SEPARATE"},
    {{.hidden = 16, .heads = 4, .scores.rotary_form = (mt_rotary_form)2},
     MT_ERR_ARGUMENT,
     "'a': scores.rotary_form is 2, must be MT_ROTARY_HALVES or MT_ROTARY_PAIRS"},
    {{.hidden = 16, .heads = 4, .scores.window = -1, .scores.softcap = -1.0f},
     MT_ERR_ARGUMENT,
     "'a': scores.window is -1, must be at least 0"},
    {{.hidden = 16, .heads = 4, .scores.softcap = -1.0f, .scores.alibi = 2},
     MT_ERR_ARGUMENT,
     "'a': scores.softcap is -1, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .scores.softcap = INFINITY},
     MT_ERR_ARGUMENT,
     "'a': scores.softcap is inf, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .scores.softcap = NAN},
     MT_ERR_ARGUMENT,
     "'a': scores.softcap is nan, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .scores.alibi = 2}, MT_ERR_ARGUMENT, "'a': scores.alibi is 2, must be 0 or 1"},
    {{.hidden = 16, .heads = 4, .scores.alibi = -1}, MT_ERR_ARGUMENT, "'a': scores.alibi is -1, must be 0 or 1"},
    {{.hidden = 16, .heads = 4, .init.std = -1.0f},
     MT_ERR_ARGUMENT,
     "'a': init.std is -1, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .qkv_layout = MT_QKV_SEPARATE, .init.std = INFINITY},
     MT_ERR_ARGUMENT,
     "'a': init.std is inf, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .init.output_std = -1.0f},
     MT_ERR_ARGUMENT,
     "'a': init.output_std is -1, must be at least 0 and finite"},
    {{.hidden = 18, .heads = 4}, MT_ERR_SHAPE, "'a': hidden is 18, must be a multiple of heads 4"},
    {{.hidden = 30, .heads = 10, .kv_heads = 4}, MT_ERR_SHAPE, "'a': kv_heads is 4, must divide heads 10"},
    {{.hidden = 16, .heads = 2}, MT_ERR_SHAPE, "'a': 2 heads cannot be split over 4 tensor ranks"},
    {{.hidden = 18, .heads = 6, .kv_heads = 2, .qkv_layout = MT_QKV_SEPARATE},
     MT_ERR_SHAPE,
     "'a': 6 heads are not a multiple of 4 tensor ranks, which MT_QKV_SEPARATE needs; use MT_QKV_PER_GROUP"},
    {{.hidden = 16, .heads = 8, .kv_heads = 4, .qkv_layout = MT_QKV_CONCATENATED},
     MT_ERR_SHAPE,
     "'a' has 8 heads and 4 kv_heads, which must be equal with MT_QKV_CONCATENATED; use MT_QKV_PER_GROUP or "
     "MT_QKV_SEPARATE"},
    {{.hidden = 12, .heads = 6, .qkv_layout = MT_QKV_CONCATENATED},
     MT_ERR_SHAPE,
     "'a': 6 kv_heads are not a multiple of 4 tensor ranks, which MT_QKV_CONCATENATED needs; use MT_QKV_PER_GROUP"},
    {{.hidden = 12, .heads = 12, .kv_heads = 6, .qkv_layout = MT_QKV_SEPARATE},
     MT_ERR_SHAPE,
     "'a': 6 kv_heads are not a multiple of 4 tensor ranks, which MT_QKV_SEPARATE needs; use MT_QKV_PER_GROUP"},
    {{.hidden = 16, .heads = 4, .no_bias = 1, .skip_bias_add = 1},
     MT_ERR_ARGUMENT,
     "'a.linear_proj' sets skip_bias_add, but with no_bias there is no bias"}};

static void test_attention_create_refuses(void **state) {
    mt_self_attention_desc good = {.hidden = 16, .heads = 4};
    mt_self_attention a;
    test_rank r;
    (void)state;
    open_quarter(&r);
    for (size_t i = 0; i < sizeof bad_attention / sizeof *bad_attention; i++) {
        REFUSED_EXACTLY(r.ctx, bad_attention[i].status, bad_attention[i].rest,
                        mt_self_attention_create(r.ctx, r.params, "a", &bad_attention[i].desc, &a));
        assert_int_equal(mt_params_count(r.params), 0);
    }
    assert_int_equal(mt_self_attention_create(NULL, r.params, "a", &good, &a), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_self_attention_create(r.ctx, NULL, "a", &good, &a));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name ''|95", mt_self_attention_create(r.ctx, r.params, "", &good, &a));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_self_attention_create(r.ctx, r.params, "a", NULL, &a));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_self_attention_create(r.ctx, r.params, "a", &good, NULL));
    test_paper_rank_close(&r);
}

static void test_rotary_create_refuses(void **state) {
    static const struct {
        mt_self_attention_desc desc;
        mt_status status;
        const char *rest; /* of the message, behind the function */
    } bad[] = {
        {{.hidden = 16, .heads = 4, .max_seq = 8, .scores.rotary_form = MT_ROTARY_PAIRS},
         MT_ERR_ARGUMENT,
         "'a': max_seq is 8, must be 0 without scores.rotary_base"},
        {{.hidden = 16, .heads = 4, .scores.rotary_form = MT_ROTARY_PAIRS, .scores.rotary_dim = 2},
         MT_ERR_ARGUMENT,
         "'a': scores.rotary_form is MT_ROTARY_PAIRS, must be MT_ROTARY_HALVES without rotary_base"},
        {{.hidden = 16, .heads = 4, .scores.rotary_dim = 2},
         MT_ERR_ARGUMENT,
         "'a': scores.rotary_dim is 2, must be 0 without scores.rotary_base"},
        {{.hidden = 16, .heads = 4, .scores.rotary_base = 1e4f},
         MT_ERR_SHAPE,
         "'a': max_seq is 0, must be from 1 to 2147483647"},
        {{.hidden = 16, .heads = 4, .scores.rotary_base = 1e4f, .max_seq = 8, .scores.rotary_form = (mt_rotary_form)-1},
         MT_ERR_ARGUMENT,
         "'a': scores.rotary_form is -1, must be MT_ROTARY_HALVES or MT_ROTARY_PAIRS"},
        {{.hidden = 16, .heads = 4, .scores.rotary_base = 1e4f, .max_seq = 8, .scores.rotary_dim = 3},
         MT_ERR_SHAPE,
         "'a': scores.rotary_dim is 3, must be even for rotary"},
        {{.hidden = 16, .heads = 4, .scores.rotary_base = 1e4f, .max_seq = 8, .scores.rotary_dim = 6},
         MT_ERR_SHAPE,
         "'a': scores.rotary_dim is 6, must be from 0 to 4"},
        {{.hidden = 16, .heads = 4, .scores.rotary_base = 1e4f, .max_seq = 8, .scores.rotary_dim = -2},
         MT_ERR_SHAPE,
         "'a': scores.rotary_dim is -2, must be from 0 to 4"},
        {{.hidden = 12, .heads = 4, .scores.rotary_base = 1e4f, .max_seq = 8},
         MT_ERR_SHAPE,
         "'a': the head size is 3, must be even for rotary"}};
    mt_self_attention a;
    test_rank r;
    (void)state;
    open_quarter(&r);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        REFUSED_EXACTLY(r.ctx, bad[i].status, bad[i].rest,
                        mt_self_attention_create(r.ctx, r.params, "a", &bad[i].desc, &a));
        assert_int_equal(mt_params_count(r.params), 0);
    }
    test_paper_rank_close(&r);
}

static const struct {
    mt_transformer_layer_desc desc;
    mt_status status;
    const char *rest; /* of the message, behind the function */
} bad_layers[] = {
    {{.hidden = 0, .heads = 4, .norm.placement = (mt_ln_placement)3},
     MT_ERR_ARGUMENT,
     "'l': hidden is 0, must be from 1 to 2147483647"},
    {{.hidden = 16, .heads = 4, .norm.placement = (mt_ln_placement)3, .norm.kind = (mt_norm_kind)2},
     MT_ERR_ARGUMENT,
     "'l': norm.placement is 3, must be MT_PRE_LN, MT_POST_LN or MT_RESIDUAL_POST_LN"},
    {{.hidden = 16, .heads = 4, .norm.kind = (mt_norm_kind)2},
     MT_ERR_ARGUMENT,
     "'l': norm.kind is 2, must be MT_LAYER_NORM or MT_RMS_NORM"},
    {{.hidden = 16, .heads = 4, .norm.kind = (mt_norm_kind)-1},
     MT_ERR_ARGUMENT,
     "'l': norm.kind is -1, must be MT_LAYER_NORM or MT_RMS_NORM"},
    {{.hidden = 16, .heads = 4, .norm.eps = -1e-5f},
     MT_ERR_ARGUMENT,
     "'l': norm.eps is -1e-05, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .norm.eps = NAN},
     MT_ERR_ARGUMENT,
     "'l': norm.eps is nan, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .dropout.attention = 1.5f, .dropout.hidden = 1.0f},
     MT_ERR_ARGUMENT,
     "'l': dropout.attention is 1.5, must be at least 0 and below 1"},
    {{.hidden = 16, .heads = 4, .dropout.hidden = 1.0f},
     MT_ERR_ARGUMENT,
     "'l': dropout.hidden is 1, must be at least 0 and below 1"},
    {{.hidden = 16, .heads = 4, .dropout.hidden = NAN},
     MT_ERR_ARGUMENT,
     "'l': dropout.hidden is nan, must be at least 0 and below 1"},
    {{.hidden = 16, .heads = 4, .recompute = (mt_recompute)3},
     MT_ERR_ARGUMENT,
     "'l': recompute is 3, must be MT_RECOMPUTE_NONE, MT_RECOMPUTE_SELECTIVE or MT_RECOMPUTE_FULL"},
    {{.hidden = 16, .heads = 4, .norm.eps = MT_ZERO},
     MT_ERR_ARGUMENT,
     "'l': norm.eps is -2.14748e+09, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .init.std = NAN},
     MT_ERR_ARGUMENT,
     "'l': init.std is nan, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .init.output_std = -1.0f},
     MT_ERR_ARGUMENT,
     "'l': init.output_std is -1, must be at least 0 and finite"},
    {{.hidden = 16, .heads = -4}, MT_ERR_ARGUMENT, "'l.self_attention': heads is -4, must be at least 1"},
    {{.hidden = 16, .heads = 4, .kv_heads = -1},
     MT_ERR_ARGUMENT,
     "'l.self_attention': kv_heads is -1, must be at least 0"},
    {{.hidden = 16, .heads = 2, .kv_heads = 1},
     MT_ERR_SHAPE,
     "'l.self_attention': 2 heads cannot be split over 4 tensor ranks"},
    {{.hidden = 18, .heads = 4}, MT_ERR_SHAPE, "'l.self_attention': hidden is 18, must be a multiple of heads 4"},
    {{.hidden = 16, .heads = 4, .scores.mask = (mt_mask)7},
     MT_ERR_ARGUMENT,
     "'l.self_attention': scores.mask is 7, must be MT_MASK_CAUSAL or MT_MASK_BIDIRECTIONAL"},
    {{.hidden = 16, .heads = 4, .max_seq = 8},
     MT_ERR_ARGUMENT,
     "'l.self_attention': max_seq is 8, must be 0 without scores.rotary_base"},
    {{.hidden = 16, .heads = 4, .ffn = -5}, MT_ERR_ARGUMENT, "'l.mlp': ffn is -5, must be from 0 to 2147483647"},
    {{.hidden = 16, .heads = 4, .activation = (mt_activation)7},
     MT_ERR_ARGUMENT,
     "'l.mlp': activation is 7, must be MT_GELU_TANH, MT_GELU_ERF, MT_SWIGLU, MT_SQUARED_RELU, MT_RELU or "
     "MT_TANH"}};

/* Checks that a matrix begins with zeros if its name has one of these endings or, with NULL, in any case. */
static void check_zeros(const mt_params *params, const char *const *endings, int count) {
    int matrices = 0;
    for (int i = 0; i < mt_params_count(params); i++) {
        const mt_param *p = mt_params_at(params, i);
        int zero = count == 0, found = 1;
        if (!p->desc.weight_decay) continue; /* a bias or a gain */
        for (int k = 0; k < count; k++) zero |= strstr(p->name, endings[k]) != NULL;
        for (int64_t k = 0; k < p->value.rows * p->value.cols; k++) found &= ((const float *)p->value.data)[k] == 0.0f;
        if (found != zero) fail_msg("'%s' %s zeros", p->name, found ? "begins with" : "does not begin with");
        matrices++;
    }
    assert_true(matrices > 2);
}

/* init_std and output_init_std of MT_ZERO are the number 0, in blocks and in models. */
static void test_first_weights_of_zero(void **state) {
    static const char *const outputs[] = {"linear_proj.weight", "linear_fc2.weight"};
    (void)state;
    for (int only = 0; only < 2; only++)
        for (int model = 0; model < 3; model++) {
            float inner = only ? 0.0f : (float)MT_ZERO, outer = only ? (float)MT_ZERO : 0.0f;
            mt_transformer_layer_desc l = {.hidden = 16, .heads = 4, .init.std = inner, .init.output_std = outer};
            mt_gpt_desc g = {.vocab = 20, .layers = 2, .max_seq = 8, .layer = l, .untied_head = 1};
            mt_bert_desc b = {.vocab = 20, .layers = 2, .max_seq = 8, .layer = l};
            mt_transformer_layer layer;
            mt_gpt gpt;
            mt_bert bert;
            test_rank r;
            open_quarter(&r);
            if (!only) l.init.output_std = MT_ZERO; /* a layer does not take it from init_std */
            ASSERT_STATUS(r.ctx, MT_SUCCESS,
                          model == 0   ? mt_transformer_layer_create(r.ctx, r.params, "l", &l, &layer)
                          : model == 1 ? mt_gpt_create(r.ctx, r.params, &g, &gpt)
                                       : mt_bert_create(r.ctx, r.params, &b, &bert));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 3));
            check_zeros(r.params, outputs, only ? 2 : 0);
            test_paper_rank_close(&r);
        }
}

static void test_layer_create_refuses(void **state) {
    mt_transformer_layer_desc good = {.hidden = 16, .heads = 4};
    float x[16] = {0};
    mt_batch batch = {.sequences = 1, .seq = 1};
    mt_transformer_layer l;
    test_rank r;
    (void)state;
    open_quarter(&r);
    for (size_t i = 0; i < sizeof bad_layers / sizeof *bad_layers; i++) {
        REFUSED_EXACTLY(r.ctx, bad_layers[i].status, bad_layers[i].rest,
                        mt_transformer_layer_create(r.ctx, r.params, "l", &bad_layers[i].desc, &l));
        assert_int_equal(mt_params_count(r.params), 0);
    }
    assert_int_equal(mt_transformer_layer_create(NULL, r.params, "l", &good, &l), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_transformer_layer_create(r.ctx, NULL, "l", &good, &l));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name ''|95", mt_transformer_layer_create(r.ctx, r.params, "", &good, &l));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_transformer_layer_create(r.ctx, r.params, "l", NULL, &l));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_transformer_layer_create(r.ctx, r.params, "l", &good, NULL));
    good.activation = (mt_activation)7; /* refused by its last part, after attention was created */
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "activation is 7", mt_transformer_layer_create(r.ctx, r.params, "l", &good, &l));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created",
            mt_transformer_layer_forward(r.ctx, &l, &batch, mt_tensor_f32(x, 1, 16), mt_tensor_f32(x, 1, 16), NULL));
    test_paper_rank_close(&r);
}

static mt_tensor with(mt_tensor t, int64_t rows, int64_t cols, int64_t ld, mt_dtype dtype) {
    return with_dtype(with_shape(t, rows, cols, ld), dtype);
}

/* batch may be NULL for an MLP, which takes none. b is not changed. */
static mt_status forward_with(const block *b, const mt_batch *batch, mt_tensor x, mt_tensor y) {
    mt_context *ctx = b->r->ctx;
    block_saved s;
    switch (b->c->kind) {
    case MLP: return mt_mlp_forward(ctx, &b->mlp, x, y, &s.mlp);
    case ATTENTION: return mt_self_attention_forward(ctx, &b->attention, batch, x, y, &s.attention);
    case LAYER: return mt_transformer_layer_forward(ctx, &b->layer, batch, x, y, &s.layer);
    }
    return MT_SUCCESS;
}

/* Runs the backward of s as if its forward had used this batch. */
static mt_status backward_with(const block *b, const mt_batch *batch, mt_tensor dy, mt_tensor dx,
                               const block_saved *s) {
    mt_context *ctx = b->r->ctx;
    block_saved t;
    memset(&t, 0, sizeof t);
    if (s) t = *s;
    if (b->c->kind == ATTENTION) t.attention.batch = *batch;
    if (b->c->kind == LAYER) t.layer.batch = *batch;
    switch (b->c->kind) {
    case MLP: return mt_mlp_backward(ctx, &b->mlp, dy, dx, s ? &t.mlp : NULL);
    case ATTENTION: return mt_self_attention_backward(ctx, &b->attention, dy, dx, s ? &t.attention : NULL);
    case LAYER: return mt_transformer_layer_backward(ctx, &b->layer, dy, dx, s ? &t.layer : NULL);
    }
    return MT_SUCCESS;
}

static mt_status forward_of_nothing(const block *b, mt_context *ctx, mt_tensor x, mt_tensor y) {
    switch (b->c->kind) {
    case MLP: return mt_mlp_forward(ctx, NULL, x, y, NULL);
    case ATTENTION: return mt_self_attention_forward(ctx, NULL, &b->batch, x, y, NULL);
    case LAYER: return mt_transformer_layer_forward(ctx, NULL, &b->batch, x, y, NULL);
    }
    return MT_SUCCESS;
}

static mt_status backward_of_nothing(const block *b, mt_context *ctx, mt_tensor x, mt_tensor y) {
    block_saved s;
    memset(&s, 0, sizeof s);
    switch (b->c->kind) {
    case MLP: return mt_mlp_backward(ctx, NULL, x, y, &s.mlp);
    case ATTENTION: return mt_self_attention_backward(ctx, NULL, x, y, &s.attention);
    case LAYER: return mt_transformer_layer_backward(ctx, NULL, x, y, &s.layer);
    }
    return MT_SUCCESS;
}

/* The batch of b has 2 sequences of 6 tokens. x and y have 12 or 3 rows of 16. */
static void batches_are_refused(const block *b, mt_tensor x, mt_tensor y, int backward) {
    static const int32_t low[] = {6, -1}, high[] = {7, 2}, cut[] = {0, 4, 11}, back[] = {0, 5, 4, 12};
    static const float bias[12 * 6] = {0};
    static const uint8_t mask[6 * 6] = {0};
    const mt_tensor one = mt_tensor_f32(bias, 6, 6), two = mt_tensor_f32(bias, 12, 6);
    const mt_tensor bytes = mt_tensor_make(mask, MT_U8, 6, 6);
    const struct {
        mt_batch batch;
        mt_status status;
        const char *words;
    } bad[] = {{{.sequences = 0, .seq = 6}, MT_ERR_ARGUMENT, "batch.sequences is 0, must be at least 1"},
               {{.sequences = 2, .seq = 0}, MT_ERR_ARGUMENT, "batch.seq is 0, must be at least 1"},
               {{.sequences = -2, .seq = -6}, MT_ERR_ARGUMENT, "batch.sequences is -2"},
               {{.sequences = 2, .seq = 6, .first_sequence = -1},
                MT_ERR_ARGUMENT,
                "batch.first_sequence is -1, must be from 0 to"},
               {{.sequences = 2, .seq = 6, .first_sequence = INT64_MAX},
                MT_ERR_ARGUMENT,
                "batch.first_sequence is 9223372036854775807"},
               {{.sequences = INT64_MAX, .seq = INT64_MAX}, MT_ERR_ARGUMENT, "9223372036854775807"},
               {{.sequences = 1, .seq = 12}, MT_ERR_SHAPE, "batch.seq is 12, must be at most max_seq 8"},
               {{.sequences = 2, .seq = 5}, MT_ERR_SHAPE, "10"},
               {{.sequences = 2, .seq = 6, .lengths = low}, MT_ERR_DATA, "lengths[1] is -1|[0, 6]"},
               {{.sequences = 2, .seq = 6, .lengths = high}, MT_ERR_DATA, "lengths[0] is 7|[0, 6]"},
               {{.sequences = 2, .seq = 6, .cu_seqlens = cut}, MT_ERR_ARGUMENT, "documents is 0|cu_seqlens is set"},
               {{.sequences = 2, .seq = 6, .documents = 2}, MT_ERR_ARGUMENT, "documents is 2|cu_seqlens is NULL"},
               {{.sequences = 2, .seq = 6, .cu_seqlens = cut, .documents = 2}, MT_ERR_DATA, "cu_seqlens[2] is 11|12"},
               {{.sequences = 2, .seq = 6, .cu_seqlens = back, .documents = 3}, MT_ERR_DATA, "cu_seqlens[2] is 4"},
               {{.sequences = 2, .seq = 6, .bias.value = two}, MT_ERR_SHAPE, "bias is [12, 6], must be [6, 6]"},
               {{.sequences = 2, .seq = 6, .bias.value = one, .bias.heads = 2},
                MT_ERR_SHAPE,
                "bias.heads is 2|1 or the 4 heads"},
               {{.sequences = 2, .seq = 6, .bias.value = one, .bias.first_head = 1},
                MT_ERR_ARGUMENT,
                "batch.bias.first_head is 1, must be 0"},
               {{.sequences = 2, .seq = 6, .bias.value = one, .bias.batch = 3}, MT_ERR_SHAPE, "bias.batch is 3"},
               {{.sequences = 2, .seq = 6, .bias.grad = one}, MT_ERR_ARGUMENT, "desc.bias.grad"},
               {{.sequences = 2, .seq = 6, .bias.value = bytes, .bias.grad = one}, MT_ERR_ARGUMENT, "desc.bias.grad"},
               {{.sequences = 2, .seq = 6, .bias.value = one, .bias.grad = one}, MT_ERR_ARGUMENT, "overlap"},
               {{.sequences = 2, .seq = 6, .bias.value = one, .bias.grad = mt_tensor_f32(x.data, 6, 6)},
                MT_ERR_ARGUMENT,
                "bias.grad|overlap"},
               {{.sequences = 2, .seq = 6, .bias.value = one, .bias.grad = mt_tensor_f32(y.data, 6, 6)},
                MT_ERR_ARGUMENT,
                "bias.grad|overlap"},
               {{.sequences = 2, .seq = 6, .bias.value = one, .bias.grad = two},
                MT_ERR_SHAPE,
                "dbias is [12, 6], must be [6, 6]"}};
    mt_context *ctx = b->r->ctx;
    block_saved s;
    memset(&s, 0, sizeof s);
    if (b->c->kind == MLP) return;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        REFUSED(ctx, bad[i].status, bad[i].words,
                backward ? backward_with(b, &bad[i].batch, x, y, &s) : forward_with(b, &bad[i].batch, x, y));
    if (!backward) REFUSED(ctx, MT_ERR_ARGUMENT, "batch is NULL", forward_with(b, NULL, x, y));
}

static void block_calls_are_refused(const block *b, mt_tensor x, mt_tensor y) {
    mt_context *ctx = b->r->ctx;
    const mt_batch *batch = &b->batch;
    int64_t n = x.rows, h = x.cols;
    block_saved s;
    memset(&s, 0, sizeof s);
    assert_int_equal(forward_of_nothing(b, NULL, x, y), MT_ERR_ARGUMENT);
    assert_int_equal(backward_of_nothing(b, NULL, x, y), MT_ERR_ARGUMENT);
    REFUSED(ctx, MT_ERR_ARGUMENT, "NULL", forward_of_nothing(b, ctx, x, y));
    REFUSED(ctx, MT_ERR_ARGUMENT, "NULL", backward_of_nothing(b, ctx, x, y));
    REFUSED(ctx, MT_ERR_DTYPE, "x is bf16", forward_with(b, batch, with(x, n, h, h, MT_BF16), y));
    REFUSED(ctx, MT_ERR_DTYPE, "y is f16", forward_with(b, batch, x, with(y, n, h, h, MT_F16)));
    REFUSED(ctx, MT_ERR_DTYPE, "x is i32", forward_with(b, batch, with(x, n, h, h, MT_I32), y));
    REFUSED(ctx, MT_ERR_SHAPE, "x is|15]|16]", forward_with(b, batch, with(x, n, 15, 16, MT_F32), y));
    REFUSED(ctx, MT_ERR_SHAPE, "y is|15]|16]", forward_with(b, batch, x, with(y, n, 15, 16, MT_F32)));
    REFUSED(ctx, MT_ERR_SHAPE, "ld 15", forward_with(b, batch, with(x, n, h, 15, MT_F32), y));
    REFUSED(ctx, MT_ERR_SHAPE, "", forward_with(b, batch, with(x, n - 1, h, h, MT_F32), y));
    REFUSED(ctx, MT_ERR_SHAPE, "-1", forward_with(b, batch, with(x, -1, h, h, MT_F32), with(y, -1, h, h, MT_F32)));
    REFUSED(ctx, MT_ERR_SHAPE, "y|ld 20|contiguous", forward_with(b, batch, x, with(y, n, h, 20, MT_F32)));
    REFUSED(ctx, MT_ERR_ARGUMENT, "x is|data is NULL", forward_with(b, batch, mt_tensor_f32(NULL, n, h), y));
    REFUSED(ctx, MT_ERR_ARGUMENT, "y is|data is NULL", forward_with(b, batch, x, mt_tensor_f32(NULL, n, h)));
    mt_tensor later = with(x, n, h, h, MT_F32);
    later.data = (char *)x.data + ((n - 1) * h + h - 1) * 4; /* its first element is the last element of x */
    REFUSED(ctx, MT_ERR_ARGUMENT, "x [|and y|overlap", forward_with(b, batch, x, x));
    REFUSED(ctx, MT_ERR_ARGUMENT, "x [|and y|overlap", forward_with(b, batch, x, later));
    REFUSED(ctx, MT_ERR_ARGUMENT, "x [|and y|overlap", forward_with(b, batch, later, x));
    REFUSED(ctx, MT_ERR_ARGUMENT, "saved is NULL", backward_with(b, batch, x, y, NULL));
    REFUSED(ctx, MT_ERR_SHAPE, "saved", backward_with(b, batch, x, y, &s)); /* no forward has filled s */
    REFUSED(ctx, MT_ERR_DTYPE, "dy is bf16", backward_with(b, batch, with(x, n, h, h, MT_BF16), y, &s));
    REFUSED(ctx, MT_ERR_DTYPE, "dx is bf16", backward_with(b, batch, x, with(y, n, h, h, MT_BF16), &s));
    REFUSED(ctx, MT_ERR_SHAPE, "dy is|15]", backward_with(b, batch, with(x, n, 15, 16, MT_F32), y, &s));
    REFUSED(ctx, MT_ERR_SHAPE, "dx is|15]", backward_with(b, batch, x, with(y, n, 15, 16, MT_F32), &s));
    REFUSED(ctx, MT_ERR_ARGUMENT, "dy is|data is NULL", backward_with(b, batch, mt_tensor_f32(NULL, n, h), y, &s));
    s.mlp.fc1.x = x; /* so that nothing but the overlap is wrong */
    REFUSED(ctx, MT_ERR_ARGUMENT, "dy [|and dx|overlap", backward_with(b, batch, x, x, &s));
    REFUSED(ctx, MT_ERR_ARGUMENT, "dy [|and dx|overlap", backward_with(b, batch, x, later, &s));
    s.mlp.fc1.x = s.attention.qkv_in.x = s.layer.x = y;
    REFUSED(ctx, MT_ERR_ARGUMENT, "saved.|x [|and dx|overlap", backward_with(b, batch, x, y, &s));
    batches_are_refused(b, x, y, 0);
    batches_are_refused(b, x, y, 1);
}

static const block_case plain_cases[] = {
    {"mlp", MLP, .mlp = {.hidden = 16}},
    {"attention", ATTENTION, .attention = {.hidden = 16, .heads = 4, .scores.rotary_base = 10.0f, .max_seq = 8}},
    {"layer", LAYER,
     .layer = {.hidden = 16,
               .heads = 4,
               .scores.rotary_base = 10.0f,
               .max_seq = 8,
               .dropout.hidden = 0.1f,
               .dropout.attention = 0.1f}},
};

static void test_block_calls_refuse(void **state) {
    (void)state;
    for (int k = 0; k < 6; k++) {
        mt_tensor x, y;
        mt_ledger ledger;
        test_rank r;
        block b;
        open_quarter(&r);
        memset(&b, 0, sizeof b);
        b.c = &plain_cases[k / 2];
        b.r = &r;
        b.sequence_parallel = k % 2;
        b.batch.sequences = 2;
        b.batch.seq = 6;
        x = test_tensor(&r, b.sequence_parallel ? 3 : 12, 16, 7.0f);
        y = test_tensor(&r, b.sequence_parallel ? 3 : 12, 20, 7.0f);
        y = with(y, y.rows, 16, 16, MT_F32);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", forward_with(&b, &b.batch, x, y));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_create(&b));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init before", forward_with(&b, &b.batch, x, y));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        block_calls_are_refused(&b, x, y);
        test_untouched("x", (const float *)x.data, x.rows * 16, 7.0f);
        test_untouched("y", (const float *)y.data, y.rows * 20, 7.0f);
        for (int i = 0; i < mt_params_count(r.params); i++) {
            mt_tensor g = mt_params_at(r.params, i)->grad;
            test_untouched("gradient", (const float *)g.data, g.rows * g.cols, 0.0f);
        }
        ledger = mt_comm_ledger(r.grid.tp);
        for (int i = 0; i < MT_COLLECTIVE_COUNT; i++) assert_int_equal(ledger.calls[i], 0);
        assert_int_equal(mt_arena_mark(r.ctx), 0);
        test_paper_rank_close(&r);
    }
}

/* A dx that is sent between ranks must be contiguous: otherwise the call is refused before a gradient is changed. With
   sequence parallelism, the same holds for x and dy. */
static void test_strided_views_are_refused_where_they_travel(void **state) {
    mt_context_desc meta = {.device = MT_DEVICE_META};
    (void)state;
    for (int k = 0; k < 6; k++) {
        mt_ledger ledger;
        mt_tensor t, y, strided;
        block_saved s;
        test_rank r;
        block b;
        test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, &meta, &r);
        memset(&b, 0, sizeof b);
        b.c = &plain_cases[k / 2];
        b.r = &r;
        b.sequence_parallel = k % 2;
        b.batch.sequences = 2;
        b.batch.seq = 6;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_create(&b));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, k % 2 ? 3 : 12, 16, &t));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, t.rows, 16, &y));
        strided = with(t, t.rows, 16, 20, MT_F32);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_forward(&b, t, y, &s));
        mt_comm_ledger_reset(r.grid.tp);
        REFUSED(r.ctx, MT_ERR_SHAPE, "dx|ld 20|contiguous", block_backward(&b, t, strided, &s));
        if (k % 2) REFUSED(r.ctx, MT_ERR_SHAPE, "dy|ld 20|contiguous", block_backward(&b, strided, t, &s));
        if (k % 2) REFUSED(r.ctx, MT_ERR_SHAPE, "x|ld 20|contiguous", block_forward(&b, strided, t, &s));
        ledger = mt_comm_ledger(r.grid.tp);
        for (int i = 0; i < MT_COLLECTIVE_COUNT; i++) assert_int_equal(ledger.calls[i], 0);
        test_paper_rank_close(&r);
    }
}

static void test_tokens_that_sequence_parallelism_cannot_split(void **state) {
    (void)state;
    for (int k = 1; k < 3; k++) {
        mt_batch odd = {.sequences = 2, .seq = 5};
        mt_tensor t;
        test_rank r;
        block b;
        open_quarter(&r);
        memset(&b, 0, sizeof b);
        b.c = &plain_cases[k];
        b.r = &r;
        b.sequence_parallel = 1;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, block_create(&b));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        t = test_tensor(&r, 3, 16, 7.0f);
        REFUSED(r.ctx, MT_ERR_SHAPE, "10 tokens|4 tensor ranks", forward_with(&b, &odd, t, t));
        test_paper_rank_close(&r);
    }
}

static const mt_transformer_layer_desc gpt_layer = {.hidden = 16, .heads = 4};

static void test_gpt_create_refuses(void **state) {
    static const struct {
        mt_gpt_desc desc;
        const char *rest; /* of the message, behind the function */
    } bad[] = {
        {{.vocab = 0, .layers = 0, .max_seq = 4}, "vocab is 0, must be from 1 to 2147483647"},
        {{.vocab = (int64_t)INT32_MAX + 1, .layers = 1, .max_seq = 4},
         "vocab is 2147483648, must be from 1 to 2147483647"},
        {{.vocab = 8, .layers = 0}, "layers is 0, must be from 1 to 131072"},
        {{.vocab = 8, .layers = (1 << 17) + 1, .max_seq = 4}, "layers is 131073, must be from 1 to 131072"},
        {{.vocab = 8, .layers = 1, .max_seq = -1}, "max_seq is -1, must be at least 1"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .layer.max_seq = 5}, "layer.max_seq is 5, must be 0 or max_seq 4"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .layer.dropout.layer_number = 1},
         "layer.dropout.layer_number is 1, must be 0: the model numbers its layers"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .recompute_layers = 1},
         "recompute_layers is 1, must be 0 with MT_RECOMPUTE_NONE"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .recompute_layers = 2}, "recompute_layers is 2, must be 0 or 1"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .recompute_layers = -1}, "recompute_layers is -1, must be 0 or 1"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .embedding_dropout = 1.0f},
         "embedding_dropout is 1, must be at least 0 and below 1"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .embedding_dropout = NAN},
         "embedding_dropout is nan, must be at least 0 and below 1"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .padded_vocab = 7}, "padded_vocab is 7, must be from 8 to 2147483647"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .padded_vocab = (int64_t)1 << 31},
         "padded_vocab is 2147483648, must be from 8 to 2147483647"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .label_smoothing = 1.0f},
         "label_smoothing is 1, must be at least 0 and below 1"},
        {{.vocab = 8, .layers = 1, .max_seq = 4, .label_smoothing = -0.1f},
         "label_smoothing is -0.1, must be at least 0 and below 1"}};
    mt_gpt_desc d = {.vocab = 8, .layers = 2, .max_seq = 4, .layer = gpt_layer};
    mt_gpt gpt;
    test_rank r;
    (void)state;
    open_quarter(&r);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        mt_gpt_desc each = bad[i].desc;
        each.layer.hidden = gpt_layer.hidden, each.layer.heads = gpt_layer.heads;
        REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, bad[i].rest, mt_gpt_create(r.ctx, r.params, &each, &gpt));
    }
    assert_int_equal(mt_gpt_create(NULL, r.params, &d, &gpt), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_gpt_create(r.ctx, NULL, &d, &gpt));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_gpt_create(r.ctx, r.params, NULL, &gpt));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_gpt_create(r.ctx, r.params, &d, NULL));
    assert_int_equal(mt_params_count(r.params), 0);
    test_paper_rank_close(&r);
}

/* A layer is refused after other parts were created: these are removed again, and the GPT cannot be used. */
static void test_gpt_create_refuses_a_layer(void **state) {
    mt_gpt_desc d = {.vocab = 8, .layers = 2, .max_seq = 4, .layer = gpt_layer};
    float x[4] = {0};
    int32_t ids[4] = {0};
    mt_batch batch = {.sequences = 1, .seq = 4};
    mt_param_desc taken = {.name = "decoder.layers.1.mlp.linear_fc2.weight", .rows = 1, .cols = 1};
    mt_gpt_saved saved = {0};
    mt_param *p;
    size_t before;
    mt_gpt gpt;
    test_rank r;
    (void)state;
    open_quarter(&r);
    d.layer.hidden = 18; /* refused by its first layer, after the embedding was created */
    REFUSED(r.ctx, MT_ERR_SHAPE, "decoder.layers.0|hidden is 18|heads 4", mt_gpt_create(r.ctx, r.params, &d, &gpt));
    d.layer = gpt_layer;
    d.layer.heads = 2;
    REFUSED(r.ctx, MT_ERR_SHAPE, "2 heads|4 tensor ranks", mt_gpt_create(r.ctx, r.params, &d, &gpt));
    d.layer.heads = 4;
    d.layer.hidden = HUGE_SIZE / 4 * 4;
    REFUSED(r.ctx, MT_ERR_SHAPE, "4611686018427387900", mt_gpt_create(r.ctx, r.params, &d, &gpt));
    assert_int_equal(mt_params_count(r.params), 0);
    d.layer = gpt_layer;
    d.layer.scores.rotary_base = 100.0f; /* the second layer is refused, and the table of the first is freed again */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &taken, &p));
    before = mt_context_allocated(r.ctx);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "already|decoder.layers.1", mt_gpt_create(r.ctx, r.params, &d, &gpt));
    assert_int_equal(mt_params_mark(r.params), 1);
    assert_int_equal(mt_context_allocated(r.ctx), before);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created",
            mt_gpt_forward(r.ctx, &gpt, &batch, ids, ids, mt_tensor_f32(x, 1, 4), NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_gpt_saved_create(r.ctx, &gpt, &saved));
    test_paper_rank_close(&r);
}

static void test_gpt_create_refuses_stages(void **state) {
    static const mt_context_desc symmetric = {.arena_symmetric = 1};
    mt_gpt_desc d = {.vocab = 8, .layers = 3, .max_seq = 4, .layer = gpt_layer};
    mt_gpt gpt;
    test_rank r;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.pp = 2}, NULL, &r);
    REFUSED(r.ctx, MT_ERR_SHAPE, "3 layers|2 pipeline stages", mt_gpt_create(r.ctx, r.params, &d, &gpt));
    assert_int_equal(mt_params_count(r.params), 0);
    test_paper_rank_close(&r);
    test_paper_rank(4, 1, (mt_grid_desc){.pp = 2}, &symmetric, &r);
    d.layers = 2;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "2 pipeline stages|arena_symmetric", mt_gpt_create(r.ctx, r.params, &d, &gpt));
    test_paper_rank_close(&r);
}

/* The refusals that forward and logits have in common. f: 0 or 1 selects the call. */
static mt_status gpt_call(int f, mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                          float *out, mt_gpt_saved *saved) {
    if (f == 0) return mt_gpt_forward(ctx, gpt, batch, ids, ids, mt_tensor_f32(out, 1, 12), saved);
    return mt_gpt_logits(ctx, gpt, batch, ids, mt_tensor_f32(out, 12, 10));
}

static void gpt_calls_are_refused(test_rank *r, const mt_gpt *gpt, float *out, mt_gpt_saved *saved) {
    static const int32_t ids[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1}, lengths[] = {6, 7};
    static const mt_batch good = {.sequences = 2, .seq = 6};
    for (int f = 0; f < 2; f++) {
        mt_batch b = good;
        assert_int_equal(gpt_call(f, NULL, gpt, &good, ids, out, saved), MT_ERR_ARGUMENT);
        REFUSED(r->ctx, MT_ERR_ARGUMENT, "not created", gpt_call(f, r->ctx, NULL, &good, ids, out, saved));
        REFUSED(r->ctx, MT_ERR_ARGUMENT, "batch is NULL", gpt_call(f, r->ctx, gpt, NULL, ids, out, saved));
        b.seq = 9;
        REFUSED(r->ctx, MT_ERR_SHAPE, "batch.seq is 9, must be at most max_seq 8",
                gpt_call(f, r->ctx, gpt, &b, ids, out, saved));
        b.seq = 5;
        REFUSED(r->ctx, MT_ERR_SHAPE, "10 tokens|4 tensor ranks", gpt_call(f, r->ctx, gpt, &b, ids, out, saved));
        b.seq = 0;
        REFUSED(r->ctx, MT_ERR_ARGUMENT, "batch.seq is 0", gpt_call(f, r->ctx, gpt, &b, ids, out, saved));
        b = good;
        b.first_sequence = INT64_MAX - 1;
        REFUSED(r->ctx, MT_ERR_ARGUMENT, "9223372036854775806", gpt_call(f, r->ctx, gpt, &b, ids, out, saved));
        b = good;
        b.lengths = lengths;
        REFUSED(r->ctx, MT_ERR_DATA, "lengths[1] is 7|[0, 6]", gpt_call(f, r->ctx, gpt, &b, ids, out, saved));
        REFUSED(r->ctx, MT_ERR_ARGUMENT, "ids is NULL", gpt_call(f, r->ctx, gpt, &good, NULL, out, saved));
    }
}

static void gpt_data_is_refused(test_rank *r, const mt_gpt *gpt, float *out, mt_gpt_saved *saved) {
    static const mt_batch good = {.sequences = 2, .seq = 6};
    static const float wrong[] = {NAN, INFINITY, -INFINITY};
    mt_gpt_saved none = {0};
    int32_t ids[12] = {0}, bad[12] = {0};
    mt_tensor loss = mt_tensor_f32(out, 1, 12), logits = mt_tensor_f32(out, 12, 10);
    bad[7] = 10;
    REFUSED(r->ctx, MT_ERR_DATA, "token id 10|index 7|[0, 10)",
            mt_gpt_forward(r->ctx, gpt, &good, bad, ids, loss, saved));
    REFUSED(r->ctx, MT_ERR_DATA, "target 10|index 7|[0, 10)",
            mt_gpt_forward(r->ctx, gpt, &good, ids, bad, loss, saved));
    REFUSED(r->ctx, MT_ERR_DATA, "token id 10|index 7", mt_gpt_logits(r->ctx, gpt, &good, bad, logits));
    bad[7] = -100;
    REFUSED(r->ctx, MT_ERR_DATA, "token id -100|index 7", mt_gpt_forward(r->ctx, gpt, &good, bad, ids, loss, saved));
    bad[7] = -1;
    REFUSED(r->ctx, MT_ERR_DATA, "target -1|index 7", mt_gpt_forward(r->ctx, gpt, &good, ids, bad, loss, saved));
    REFUSED(r->ctx, MT_ERR_DATA, "token id -1|index 7", mt_gpt_logits(r->ctx, gpt, &good, bad, logits));
    REFUSED(r->ctx, MT_ERR_ARGUMENT, "NULL", mt_gpt_forward(r->ctx, gpt, &good, ids, NULL, loss, saved));
    for (int i = 0; i < 3; i++) {
        mt_batch b = good;
        b.backward_scale = wrong[i];
        REFUSED(r->ctx, MT_ERR_ARGUMENT, i ? "backward_scale is|inf, must be finite" : "backward_scale is|nan",
                mt_gpt_forward(r->ctx, gpt, &b, ids, ids, loss, saved));
    }
    REFUSED(r->ctx, MT_ERR_ARGUMENT, "mt_gpt_saved_create", mt_gpt_forward(r->ctx, gpt, &good, ids, ids, loss, &none));
    REFUSED(r->ctx, MT_ERR_SHAPE, "loss|[1, 11]|[1, 12]",
            mt_gpt_forward(r->ctx, gpt, &good, ids, ids, mt_tensor_f32(out, 1, 11), saved));
    REFUSED(r->ctx, MT_ERR_DTYPE, "loss|bf16",
            mt_gpt_forward(r->ctx, gpt, &good, ids, ids, mt_tensor_make(out, MT_BF16, 1, 12), saved));
    REFUSED(r->ctx, MT_ERR_ARGUMENT, "loss is|data is NULL",
            mt_gpt_forward(r->ctx, gpt, &good, ids, ids, mt_tensor_f32(NULL, 1, 12), saved));
    REFUSED(r->ctx, MT_ERR_SHAPE, "logits|[3, 10]|[12, 10]",
            mt_gpt_logits(r->ctx, gpt, &good, ids, mt_tensor_f32(out, 3, 10)));
    REFUSED(r->ctx, MT_ERR_SHAPE, "logits|[2, 12]|[2, 10]",
            mt_gpt_logits(r->ctx, gpt, &good, ids, mt_tensor_f32(out, 2, 12)));
    REFUSED(r->ctx, MT_ERR_DTYPE, "logits|i32",
            mt_gpt_logits(r->ctx, gpt, &good, ids, mt_tensor_make(out, MT_I32, 12, 10)));
    REFUSED(r->ctx, MT_ERR_ARGUMENT, "saved holds no forward", mt_gpt_backward(r->ctx, gpt, 1.0f, NULL));
    REFUSED(r->ctx, MT_ERR_ARGUMENT, "saved holds no forward", mt_gpt_backward(r->ctx, gpt, 1.0f, saved));
    assert_int_equal(mt_gpt_backward(NULL, gpt, 1.0f, saved), MT_ERR_ARGUMENT);
}

static void test_gpt_calls_refuse(void **state) {
    mt_gpt_desc d = {
        .vocab = 10, .layers = 2, .max_seq = 8, .layer = {.hidden = 16, .heads = 4, .sequence_parallel = 1}};
    mt_gpt_saved saved = {0};
    mt_gpt gpt;
    mt_ledger ledger;
    test_rank r;
    float *out;
    (void)state;
    open_quarter(&r);
    out = test_floats(&r, 12 * 10, 7.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &gpt));
    assert_int_equal(mt_gpt_saved_create(NULL, &gpt, &saved), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_gpt_saved_create(r.ctx, NULL, &saved));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_gpt_saved_create(r.ctx, &gpt, NULL));
    mt_gpt_saved_destroy(&saved);
    mt_gpt_saved_destroy(&saved);
    mt_gpt_saved_destroy(NULL);
    mt_gpt_saved_destroy(&saved);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_saved_create(r.ctx, &gpt, &saved));
    for (int f = 0; f < 2; f++) {
        static const int32_t ids[12] = {0};
        static const mt_batch good = {.sequences = 2, .seq = 6};
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init before", gpt_call(f, r.ctx, &gpt, &good, ids, out, &saved));
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    gpt_calls_are_refused(&r, &gpt, out, &saved);
    gpt_data_is_refused(&r, &gpt, out, &saved);
    test_untouched("out", out, 12 * 10, 7.0f);
    for (int i = 0; i < mt_params_count(r.params); i++) {
        mt_tensor g = mt_params_at(r.params, i)->grad;
        test_untouched("gradient", (const float *)g.data, g.rows * g.cols, 0.0f);
    }
    ledger = mt_comm_ledger(r.grid.tp);
    for (int i = 0; i < MT_COLLECTIVE_COUNT; i++) assert_int_equal(ledger.calls[i], 0);
    assert_int_equal(mt_arena_mark(r.ctx), 0);
    mt_gpt_saved_destroy(&saved);
    test_paper_rank_close(&r);
}

/* One forward allows one backward: the logits are gone after the first, and a forward that failed allows none. */
static void test_gpt_backward_only_once(void **state) {
    mt_gpt_desc d = {.vocab = 10, .layers = 1, .max_seq = 8, .layer = {.hidden = 8, .heads = 2}};
    static const int32_t ids[12] = {0}, bad[12] = {99};
    mt_batch batch = {.sequences = 2, .seq = 6};
    mt_gpt_saved saved;
    float loss[12];
    mt_gpt gpt;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &gpt));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_saved_create(r.ctx, &gpt, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_forward(r.ctx, &gpt, &batch, ids, ids, mt_tensor_f32(loss, 1, 12), &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_backward(r.ctx, &gpt, 1.0f, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "saved holds no forward", mt_gpt_backward(r.ctx, &gpt, 1.0f, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_forward(r.ctx, &gpt, &batch, ids, ids, mt_tensor_f32(loss, 1, 12), &saved));
    REFUSED(r.ctx, MT_ERR_DATA, "token id 99",
            mt_gpt_forward(r.ctx, &gpt, &batch, bad, ids, mt_tensor_f32(loss, 1, 12), &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_backward(r.ctx, &gpt, 0.0f, &saved)); /* the refused call changed nothing */
    for (int i = 0; i < mt_params_count(r.params); i++) {
        mt_tensor g = mt_params_at(r.params, i)->grad;
        test_untouched("gradient", (const float *)g.data, g.rows * g.cols, 0.0f);
    }
    mt_gpt_saved_destroy(&saved);
    test_paper_rank_close(&r);
}

/* With mt_batch.backward_scale, backward refuses another scale, and then accepts the right one. loss_scale counts when
   forward runs. */
static void test_gpt_backward_scale(void **state) {
    mt_gpt_desc d = {.vocab = 10, .layers = 1, .max_seq = 8, .layer = {.hidden = 8, .heads = 2}};
    static const int32_t ids[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    static const float others[] = {0.0f, 0.5f, 1.0f, -0.25f, NAN};
    float loss[12], again[12], factor = 4.0f, norm[2];
    mt_batch batch = {.sequences = 2, .seq = 6, .loss_scale = mt_tensor_f32(&factor, 1, 1)};
    mt_gpt_saved saved;
    mt_gpt gpt;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &gpt));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_saved_create(r.ctx, &gpt, &saved));
    for (int i = 0; i < 2; i++) {
        factor = 4.0f;
        batch.backward_scale = i ? 0.25f : 0.0f;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_gpt_forward(r.ctx, &gpt, &batch, ids, ids, mt_tensor_f32(i ? again : loss, 1, 12), &saved));
        if (i) factor = NAN;
        for (size_t k = 0; i && k < sizeof others / sizeof *others; k++)
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_backward: scale is|, must be 0.25, the backward_scale of the batch",
                    mt_gpt_backward(r.ctx, &gpt, others[k], &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_backward(r.ctx, &gpt, 0.25f, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_grad_norm(r.ctx, r.params, &norm[i]));
        mt_arena_release(r.ctx, 0);
    }
    assert_true(norm[0] == norm[1]);
    assert_memory_equal(loss, again, sizeof loss);
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_gpt_forward(r.ctx, &gpt, &batch, ids, ids, mt_tensor_f32(again, 1, 12), NULL)); /* evaluation */
    assert_memory_equal(loss, again, sizeof loss);
    mt_gpt_saved_destroy(&saved);
    test_paper_rank_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_do_not_depend_on_the_split),
        cmocka_unit_test(test_skip_bias_add),
        cmocka_unit_test(test_gradients_are_finite_differences),
        cmocka_unit_test(test_inference),
        cmocka_unit_test(test_micro_batches_in_flight),
        cmocka_unit_test(test_interleaved_halves_are_two_micro_batches),
        cmocka_unit_test(test_interleaving_has_no_effect_where_it_says_so),
        cmocka_unit_test(test_a_backward_may_follow_or_not),
        cmocka_unit_test(test_dropout_masks_change_with_what_they_depend_on),
        cmocka_unit_test(test_the_halves_of_a_layer_drop_independently),
        cmocka_unit_test(test_activation_bytes_of_a_layer),
        cmocka_unit_test(test_gpt_does_not_depend_on_the_split),
        cmocka_unit_test(test_gpt_with_a_padded_vocabulary),
        cmocka_unit_test(test_gpt_logits_and_evaluation),
        cmocka_unit_test(test_gpt_gradients_are_finite_differences),
        cmocka_unit_test(test_gpt_embedding_dropout),
        cmocka_unit_test(test_gpt_parameters),
        cmocka_unit_test(test_meta_device_knows_what_a_step_needs),
        cmocka_unit_test(test_nothing_is_allocated_after_creation),
        cmocka_unit_test(test_an_arena_that_is_too_small),
        cmocka_unit_test(test_qkv_layout),
        cmocka_unit_test(test_rotary_weights),
        cmocka_unit_test(test_rotary_forms),
        cmocka_unit_test(test_scale),
        cmocka_unit_test(test_layouts_are_permutations),
        cmocka_unit_test(test_qkv_round_trip),
        cmocka_unit_test(test_packed_documents_are_alone),
        cmocka_unit_test(test_shared_bias_gradient_in_invariant_mode),
        cmocka_unit_test(test_core_attention_refuses),
        cmocka_unit_test(test_core_attention_shards),
        cmocka_unit_test(test_core_attention_desc),
        cmocka_unit_test(test_qk_norm),
        cmocka_unit_test(test_qk_norm_refuses),
        cmocka_unit_test(test_qk_norm_split),
        cmocka_unit_test(test_qkv_refuses),
        cmocka_unit_test(test_mlp_create_refuses),
        cmocka_unit_test(test_attention_create_refuses),
        cmocka_unit_test(test_rotary_create_refuses),
        cmocka_unit_test(test_first_weights_of_zero),
        cmocka_unit_test(test_layer_create_refuses),
        cmocka_unit_test(test_block_calls_refuse),
        cmocka_unit_test(test_strided_views_are_refused_where_they_travel),
        cmocka_unit_test(test_tokens_that_sequence_parallelism_cannot_split),
        cmocka_unit_test(test_gpt_create_refuses),
        cmocka_unit_test(test_gpt_create_refuses_a_layer),
        cmocka_unit_test(test_gpt_create_refuses_stages),
        cmocka_unit_test(test_gpt_calls_refuse),
        cmocka_unit_test(test_gpt_backward_only_once),
        cmocka_unit_test(test_gpt_backward_scale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
