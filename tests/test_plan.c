/* test_plan.c - tests the trace of the meta device against counts made by hand and against formulas, the texts of
   machines, the time of an entry, and the time of a step against the formulas of pipelines and overlaps.
       cc -std=gnu17 -O2 -I. tests/test_plan.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT_STEPS 1
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"
#include "mt_test_scratch.h"

/* ---- entries of operators ---------------------------------------------------------------------------------------- */

static void open_meta(int ranks, mt_grid_desc shape, mt_device planned, test_rank *r) {
    mt_context_desc meta = {.device = MT_DEVICE_META, .planned = planned};
    test_paper_rank(ranks, 0, shape, &meta, r);
}

static mt_tensor view(mt_context *ctx, mt_dtype dtype, int64_t rows, int64_t cols) {
    mt_tensor t;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, dtype, rows, cols, &t));
    return t;
}

/* Takes the trace, which must have one entry, and returns it. */
static mt_trace_entry only_entry(mt_context *ctx) {
    mt_trace_entry e;
    mt_trace trace;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_take_trace(ctx, &trace));
    if (trace.count != 1) fail_msg("%zu entries", trace.count);
    e = trace.entries[0];
    mt_trace_free(&trace);
    assert_true(trace.entries == NULL && trace.count == 0);
    return e;
}

static void assert_entry(mt_context *ctx, mt_work work, const char *name, mt_dtype dtype, double flops, double bytes) {
    mt_trace_entry e = only_entry(ctx);
    if (e.work != work || strcmp(e.name, name) != 0 || e.dtype != dtype || e.flops != flops || e.bytes != bytes)
        fail_msg("%s: work %d, %s, %.0f FLOPs, %.0f bytes; expected %s: %d, %s, %.0f, %.0f", e.name, (int)e.work,
                 mt_dtype_name(e.dtype), e.flops, e.bytes, name, (int)work, mt_dtype_name(dtype), flops, bytes);
    assert_int_equal(e.recomputed, 0);
    assert_int_equal(e.ranks, 0);
}

static void test_products(void **state) {
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++) {
        const double size = dtype == MT_F32 ? 4 : 2;
        for (int transposed = 0; transposed < 4; transposed++) {
            int ta = transposed & 1, tb = transposed >> 1;
            mt_tensor a = view(r.ctx, (mt_dtype)dtype, ta ? 7 : 5, ta ? 5 : 7);
            mt_tensor b = view(r.ctx, (mt_dtype)dtype, tb ? 3 : 7, tb ? 7 : 3), c = view(r.ctx, MT_F32, 5, 3);
            for (int beta = 0; beta < 2; beta++) {
                mt_trace trace;
                ASSERT_STATUS(
                    r.ctx, MT_SUCCESS,
                    mt_gemm(r.ctx, ta ? MT_TRANS : MT_NO_TRANS, tb ? MT_TRANS : MT_NO_TRANS, 1, a, b, (float)beta, c));
                ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
                assert_int_equal(trace.count, 1);
                assert_int_equal(trace.entries->work, MT_WORK_GEMM);
                assert_int_equal(trace.entries->dtype, dtype);
                assert_int_equal(trace.entries->m, 5);
                assert_int_equal(trace.entries->n, 3);
                assert_int_equal(trace.entries->k, 7);
                assert_true(trace.entries->flops == 2 * 5 * 3 * 7);
                assert_true(trace.entries->bytes == size * (35 + 21) + 4 * 15 * (1 + beta));
                mt_trace_free(&trace);
            }
        }
    }
    test_paper_rank_close(&r);
}

/* The number of pairs of a query and a key that it sees, counted. */
static int64_t pairs(int64_t seq, int64_t keys, int causal, int64_t window) {
    int64_t n = 0;
    for (int64_t i = 0; i < seq; i++)
        for (int64_t j = 0; j < keys; j++) {
            int64_t at = i + keys - seq;
            n += !(causal && j > at) && !(window && (at - j >= window || j - at >= window));
        }
    return n;
}

static void test_attention(void **state) {
    static const struct {
        int64_t seq, keys, window;
        int causal;
    } cases[] = {{6, 6, 0, 1}, {6, 6, 0, 0}, {6, 6, 2, 1}, {6, 6, 3, 0}, {4, 9, 0, 1}, {4, 9, 3, 1}, {9, 4, 0, 0},
                 {9, 4, 0, 1}, {9, 4, 2, 0}, {9, 4, 3, 1}, {4, 9, 2, 0}, {6, 6, 9, 0}, {6, 6, 9, 1}, {6, 6, 1, 0}};
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t b = 2, groups = 3, shared = 2, dim = 5, heads = groups * shared, seq = cases[i].seq;
        mt_attention_desc d = {.batch = b, .seq = seq, .kv_seq = cases[i].keys, .groups = groups};
        mt_tensor q = view(r.ctx, MT_BF16, b * seq, heads * dim), k = view(r.ctx, MT_BF16, b * d.kv_seq, groups * dim);
        mt_tensor lse = view(r.ctx, MT_F32, heads, b * seq), out = view(r.ctx, MT_BF16, b * seq, heads * dim);
        mt_tensor dout = view(r.ctx, MT_BF16, b * seq, heads * dim), dq = view(r.ctx, MT_BF16, b * seq, heads * dim);
        mt_tensor v = view(r.ctx, MT_BF16, b * d.kv_seq, groups * dim);
        mt_tensor dk = view(r.ctx, MT_BF16, b * d.kv_seq, groups * dim);
        mt_tensor dv = view(r.ctx, MT_BF16, b * d.kv_seq, groups * dim);
        double scores = (double)(b * heads * pairs(seq, d.kv_seq, cases[i].causal, cases[i].window));
        double bytes = 2.0 * (double)(2 * b * seq * heads * dim + 2 * b * d.kv_seq * groups * dim);
        double logs = 4.0 * (double)(heads * b * seq);
        d.heads_per_group = shared;
        d.head_dim = dim;
        d.scores.mask = cases[i].causal ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL;
        d.scores.window = cases[i].window;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_dot_product_attention_forward(r.ctx, &d, q, k, v, out, lse));
        assert_entry(r.ctx, MT_WORK_ATTENTION, "mt_dot_product_attention_forward", MT_BF16, 4 * (double)dim * scores,
                     bytes + logs);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_dot_product_attention_backward(r.ctx, &d, q, k, v, out, lse, dout, dq, dk, dv));
        assert_entry(r.ctx, MT_WORK_ATTENTION, "mt_dot_product_attention_backward", MT_BF16, 8 * (double)dim * scores,
                     2 * bytes + logs);
    }
    test_paper_rank_close(&r);
}

/* Operators that read and write memory, AdamW, and what has no entry. */
static void test_bytes(void **state) {
    mt_adamw hyper = {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f, .step = 1, .grad_scale = 1};
    int32_t *ids = NULL;
    mt_tensor x, y, small, p, master, g, m, v;
    mt_adamw_tensor adamw;
    mt_multi_tensor *list = NULL;
    mt_square_tensor square;
    mt_attention_desc rotary;
    mt_trace trace;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    x = view(r.ctx, MT_BF16, 6, 10), y = view(r.ctx, MT_F32, 6, 10), small = view(r.ctx, MT_F32, 1, 10);
    ids = (int32_t *)view(r.ctx, MT_I32, 1, 6).data;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, x, 1));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_fill", MT_BF16, 0, 2 * 60);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_convert(r.ctx, x, y));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_convert", MT_BF16, 0, 2 * 60 + 4 * 60);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_forward(r.ctx, y, small)); /* y is read and written */
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_bias_forward", MT_F32, 0, 2 * 240 + 40);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_silu_forward(r.ctx, y, y));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_silu_forward", MT_F32, 0, 2 * 240);
    /* of an embedding only the rows of the tokens count, not the table of 1000 rows */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_embedding_forward(r.ctx, view(r.ctx, MT_F32, 1000, 10), 0, ids, 0, y));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_embedding_forward", MT_F32, 0, 2 * 240);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_embedding_backward(r.ctx, y, 0, ids, view(r.ctx, MT_F32, 1000, 10)));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_embedding_backward", MT_F32, 0, 3 * 240);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_embedding_forward(r.ctx, view(r.ctx, MT_F32, 1000, 10), 0, ids, 1, x));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_embedding_forward", MT_BF16, 0, 3 * 120);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_embedding_backward(r.ctx, x, 0, ids, view(r.ctx, MT_F32, 1000, 10)));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_embedding_backward", MT_BF16, 0, 120 + 2 * 240);
    rotary = (mt_attention_desc){
        .batch = 2, .seq = 3, .groups = 2, .heads_per_group = 3, .head_dim = 8, .scores.rotary_dim = 4};
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_rotary_forward(r.ctx, &rotary, view(r.ctx, MT_F32, 3, 4), view(r.ctx, MT_BF16, 6, 80)));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_rotary_forward", MT_BF16, 0, 2 * 6 * 4 * 8 * 2 + 48); /* 6 + 2 heads */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_tree_sum(r.ctx, with_shape(y, 2, 10, 0)));
    assert_entry(r.ctx, MT_WORK_MEMORY, "mt_tree_sum", MT_F32, 0, 3 * 40);
    p = view(r.ctx, MT_BF16, 3, 4), master = view(r.ctx, MT_F32, 3, 4), g = view(r.ctx, MT_F32, 3, 4);
    m = view(r.ctx, MT_F32, 3, 4), v = view(r.ctx, MT_F32, 3, 4);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_adamw_step(r.ctx, &hyper, p, master, g, m, v));
    assert_entry(r.ctx, MT_WORK_OPTIMIZER, "mt_adamw_step", MT_BF16, 0, 12 * (2 + 4 + 3 * 8)); /* p is only written */
    adamw = (mt_adamw_tensor){.param = p, .master = master, .grad = g, .m = m, .v = v};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multi_tensor_create_adamw(r.ctx, &adamw, 1, 0, &list));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multi_tensor_adamw(r.ctx, list, &hyper, NULL));
    assert_entry(r.ctx, MT_WORK_OPTIMIZER, "mt_multi_tensor_adamw", MT_F32, 0, 12 * (2 + 4 + 3 * 8));
    mt_multi_tensor_destroy(r.ctx, list);
    square = (mt_square_tensor){.x = g};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multi_tensor_create_squares(r.ctx, &square, 1, &list));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multi_tensor_sum_of_squares(r.ctx, list, small));
    assert_entry(r.ctx, MT_WORK_OPTIMIZER, "mt_multi_tensor_sum_of_squares", MT_F32, 0, 48);
    mt_multi_tensor_destroy(r.ctx, list);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, with_shape(y, 0, 10, 0), 1)); /* nothing to do */
    REFUSED(r.ctx, MT_ERR_SHAPE, "bias", mt_bias_forward(r.ctx, y, with_shape(small, 1, 9, 0)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    assert_int_equal(trace.count, 0);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_context_take_trace(r.ctx, NULL));
    assert_int_equal(mt_context_take_trace(NULL, &trace), MT_ERR_ARGUMENT);
    mt_trace_free(NULL);
    test_paper_rank_close(&r);
}

/* A program's own operator, marked as recomputed. On a CPU nothing is kept. */
static void test_own_entries(void **state) {
    mt_trace_entry own = {.work = MT_WORK_MEMORY, .name = "my_operator", .bytes = 12, .recomputed = 1}, e;
    float data[4] = {0};
    mt_trace trace;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    for (int i = 0; i < 1000; i++) mt_trace_add(r.ctx, &own);
    mt_trace_recompute(r.ctx, 1);
    mt_trace_recompute(r.ctx, 1);
    mt_trace_recompute(r.ctx, 0);
    mt_trace_add(r.ctx, &own);
    mt_trace_recompute(r.ctx, 0);
    mt_trace_add(r.ctx, NULL);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    assert_int_equal(trace.count, 1001);
    for (size_t i = 0; i < trace.count; i++) {
        e = trace.entries[i];
        assert_string_equal(e.name, "my_operator");
        assert_true(e.bytes == 12);
        assert_int_equal(e.recomputed, i == 1000);
    }
    mt_trace_free(&trace);
    test_paper_rank_close(&r);
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    mt_trace_add(r.ctx, &own);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, mt_tensor_f32(data, 1, 4), 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    assert_true(trace.count == 0 && trace.entries == NULL);
    test_paper_rank_close(&r);
}

/* ---- entries of communication ------------------------------------------------------------------------------------ */

static void test_communication(void **state) {
    static const struct {
        mt_collective kind;
        const char *name;
        double bytes;
        int to, from;
    } expected[] = {{MT_ALL_REDUCE, "all_reduce", 40, -1, -1},
                    {MT_ALL_GATHER, "all_gather", 80, -1, -1},
                    {MT_REDUCE_SCATTER, "reduce_scatter", 80, -1, -1},
                    {MT_BROADCAST, "broadcast", 40, -1, -1},
                    {MT_SEND, "send", 40, 1, -1},
                    {MT_RECV, "recv", 40, -1, 1},
                    {MT_SEND, "send_recv", 80, 1, 1},
                    {MT_RECV, "send_recv", 40, -1, 1}};
    mt_trace trace;
    test_rank r;
    float *x;
    (void)state;
    open_meta(12, (mt_grid_desc){.tp = 2, .pp = 2}, MT_DEVICE_CPU, &r); /* 2 tensor, 3 data, 2 pipeline ranks */
    x = (float *)view(r.ctx, MT_F32, 1, 100).data;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.tp, x, x, 10, MT_F32, MT_SUM));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_gather(r.ctx, r.grid.tp, x, x, 10, MT_F32));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_reduce_scatter(r.ctx, r.grid.tp, x, x, 10, MT_F32, MT_SUM));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.tp, x, x, 10, MT_F32, 0));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send(r.ctx, r.grid.tp, x, 10, MT_F32, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_recv(r.ctx, r.grid.tp, x, 10, MT_F32, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send_recv(r.ctx, r.grid.tp, x, 10, 1, x + 50, 20, 1, MT_F32));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send_recv(r.ctx, r.grid.tp, NULL, 99, -1, x + 50, 10, 1, MT_F32));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    assert_int_equal(trace.count, sizeof expected / sizeof *expected);
    for (size_t i = 0; i < trace.count; i++) {
        const mt_trace_entry *e = &trace.entries[i];
        if (e->work != MT_WORK_COMMUNICATION || e->collective != expected[i].kind || e->bytes != expected[i].bytes ||
            strcmp(e->name, expected[i].name) != 0 || e->to != expected[i].to || e->from != expected[i].from ||
            e->ranks != 2 || e->span != 1 || e->dtype != MT_F32)
            fail_msg("entry %zu: %s, %.0f bytes, %d to %d, %d ranks, span %d", i, e->name, e->bytes, e->from, e->to,
                     e->ranks, e->span);
    }
    mt_trace_free(&trace);
    test_paper_rank_close(&r);
}

/* The span of each group of a grid of 2 x 3 x 4 ranks, tensor, data and pipeline. */
static void test_spans(void **state) {
    mt_trace_entry e;
    test_rank r;
    float *x;
    (void)state;
    open_meta(24, (mt_grid_desc){.tp = 2, .pp = 4}, MT_DEVICE_CPU, &r);
    mt_comm *const groups[] = {r.world, r.grid.tp, r.grid.dp, r.grid.pp, r.grid.model, r.grid.embedding};
    static const int ranks[] = {24, 2, 3, 4, 8, 2}, spans[] = {23, 1, 4, 18, 19, 18};
    x = (float *)view(r.ctx, MT_F32, 1, 100).data;
    for (int i = 0; i < 6; i++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, groups[i], x, x, 1, MT_F32, MT_SUM));
        e = only_entry(r.ctx);
        assert_int_equal(e.ranks, ranks[i]);
        assert_int_equal(e.span, spans[i]);
    }
    mt_comm_set_span(r.grid.dp, 7);
    mt_comm_set_span(r.grid.dp, 1); /* ignored: 3 ranks */
    mt_comm_set_span(NULL, 2);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.dp, x, x, 1, MT_F32, MT_SUM));
    assert_int_equal(only_entry(r.ctx).span, 7);
    test_paper_rank_close(&r);
}

/* Begin, end and wait of an overlap; a wait without work has no entry, and neither has an overlap in a group of one. */
static void test_overlaps(void **state) {
    mt_trace trace;
    test_rank r;
    float *x;
    (void)state;
    open_meta(2, (mt_grid_desc){.tp = 2}, MT_DEVICE_CPU, &r);
    x = (float *)view(r.ctx, MT_F32, 1, 100).data;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_overlap_begin(r.ctx, r.grid.tp, MT_STREAM_SECOND));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "has not ended", mt_overlap_begin(r.ctx, r.grid.tp, MT_STREAM_SECOND));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_overlap_end(r.ctx, 3, mt_all_reduce(r.ctx, r.grid.tp, x, x, 1, MT_F32, MT_SUM)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_overlap_wait(r.ctx, 2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_overlap_wait_all(r.ctx));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_overlap_wait(r.ctx, 3));                           /* is over */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_overlap_begin(r.ctx, r.grid.dp, MT_STREAM_THIRD)); /* one rank */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_overlap_end(r.ctx, MT_OVERLAP_TICKET_THIRD, MT_SUCCESS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_overlap_begin(r.ctx, r.grid.tp, MT_STREAM_THIRD));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "ticket is 1, must be 8 to 8", mt_overlap_end(r.ctx, 1, MT_SUCCESS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    assert_int_equal(trace.count, 6);
    assert_int_equal(trace.entries[0].work, MT_WORK_OVERLAP_BEGIN);
    assert_int_equal(trace.entries[0].stream, MT_STREAM_SECOND);
    assert_int_equal(trace.entries[1].work, MT_WORK_COMMUNICATION);
    assert_int_equal(trace.entries[2].work, MT_WORK_OVERLAP_END);
    assert_int_equal(trace.entries[2].ticket, 3);
    assert_int_equal(trace.entries[3].work, MT_WORK_OVERLAP_WAIT);
    assert_int_equal(trace.entries[3].ticket, 3);
    assert_int_equal(trace.entries[4].stream, MT_STREAM_THIRD);
    assert_int_equal(trace.entries[5].ticket, MT_OVERLAP_TICKET_THIRD);
    mt_trace_free(&trace);
    test_paper_rank_close(&r);
}

/* ---- the trace of a whole step ----------------------------------------------------------------------------------- */

/* What the trace of one step has, summed over the ranks. */
typedef struct sums {
    double gemm, attention, again, again_attention, bytes[MT_COLLECTIVE_COUNT], ledger[MT_COLLECTIVE_COUNT];
} sums;

static void add_trace(const mt_trace *trace, sums *s) {
    for (size_t i = 0; i < trace->count; i++) {
        const mt_trace_entry *e = &trace->entries[i];
        if (e->work == MT_WORK_GEMM) *(e->recomputed ? &s->again : &s->gemm) += e->flops;
        if (e->work == MT_WORK_ATTENTION) *(e->recomputed ? &s->again_attention : &s->attention) += e->flops;
        if (e->work == MT_WORK_COMMUNICATION && e->collective == MT_ALL_REDUCE) s->bytes[MT_ALL_REDUCE] += e->bytes;
        if (e->work == MT_WORK_COMMUNICATION && e->collective == MT_ALL_GATHER) s->bytes[MT_ALL_GATHER] += e->bytes;
        if (e->work == MT_WORK_COMMUNICATION && e->collective == MT_REDUCE_SCATTER)
            s->bytes[MT_REDUCE_SCATTER] += e->bytes;
    }
}

static sums sums_of(gpt_run run) {
    static gpt_result result;
    sums s;
    memset(&s, 0, sizeof s);
    run.device = MT_DEVICE_META;
    run.out = &result;
    for (int rank = 0; rank < run.tp; rank++) {
        mt_comm *world = NULL;
        float loss, norm;
        gpt_worker w;
        mt_trace trace;
        assert_int_equal(mt_comm_create_meta(run.tp, rank, &world), MT_SUCCESS);
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, gpt_open(world, &run, &w));
        ASSERT_STATUS(w.ctx, MT_SUCCESS, mt_context_take_trace(w.ctx, &trace));
        mt_trace_free(&trace);
        mt_comm *const groups[] = {w.grid.tp, w.grid.model};
        for (int g = 0; g < 2; g++) mt_comm_ledger_reset(groups[g]);
        ASSERT_STATUS(w.ctx, MT_SUCCESS, gpt_gradients(&w, 0, &loss, &norm));
        ASSERT_STATUS(w.ctx, MT_SUCCESS, mt_context_take_trace(w.ctx, &trace));
        add_trace(&trace, &s);
        for (int k = 0; k < MT_COLLECTIVE_COUNT; k++)
            for (int g = 0; g < 2; g++) s.ledger[k] += (double)mt_comm_ledger(groups[g]).bytes[k];
        mt_trace_free(&trace);
        gpt_close(&w);
        mt_comm_destroy(world);
    }
    return s;
}

/* The products of a GPT-2 (llama 0) in a forward of n tokens: QKV, projection and MLP of each layer, and the head. */
static double layer_products(const mt_gpt_desc *d, double n) {
    double h = (double)d->layer.hidden;
    return 2 * n * (3 * h * h + h * h + 2 * h * (double)d->layer.ffn) * (double)d->layers;
}

/* The second product of the MLPs, which full recomputation leaves out: backward does not need its result. */
static double last_products(const mt_gpt_desc *d, double n) {
    return 2 * n * (double)(d->layer.hidden * d->layer.ffn * d->layers);
}

static double layer_attention(const mt_gpt_desc *d, double n) {
    return 4 * (double)d->layer.hidden * n * (GPT_SEQ + 1) / 2 * (double)d->layers; /* causal */
}

/* The FLOPs of a step are those of the formula, on 1, 2 and 4 ranks, with each kind of recomputation, and the bytes of
   the collectives are those of the ledger. vocab 40 and ffn 64 need no padding. */
static void test_step_of_a_gpt(void **state) {
    (void)state;
    for (int tp = 1; tp <= 4; tp *= 2)
        for (int how = MT_RECOMPUTE_NONE; how <= MT_RECOMPUTE_FULL; how++)
            for (int sp = 0; sp <= (tp > 1); sp++) {
                gpt_run r = {.tp = tp, .data = 1, .recompute = (mt_recompute)how, .vocab = 40, .ffn = 64};
                double n = GPT_BATCH * GPT_SEQ, again, again_attention;
                mt_gpt_desc d;
                sums s;
                r.sequence_parallel = sp;
                d = gpt_model(&r);
                s = sums_of(r);
                again = how == MT_RECOMPUTE_FULL ? layer_products(&d, n) - last_products(&d, n) : 0;
                again_attention = how == MT_RECOMPUTE_NONE ? 0 : layer_attention(&d, n);
                if (s.gemm != 3 * (layer_products(&d, n) + 2 * n * (double)d.layer.hidden * 40) || s.again != again ||
                    s.attention != 3 * layer_attention(&d, n) || s.again_attention != again_attention)
                    fail_msg("tp %d, recompute %d: products %.0f and again %.0f, attention %.0f and again %.0f", tp,
                             how, s.gemm, s.again, s.attention, s.again_attention);
                for (int k = 0; k <= MT_REDUCE_SCATTER; k++)
                    if (s.bytes[k] != s.ledger[k])
                        fail_msg("tp %d: %s: %.0f bytes, ledger %.0f", tp, mt_collective_name((mt_collective)k),
                                 s.bytes[k], s.ledger[k]);
                assert_true(tp == 1 || s.bytes[MT_ALL_REDUCE] > 0);
            }
}

/* mt_gpt_flops and mt_bert_flops are the products and the attention of a trace on one rank, for each kind of model,
   and without what is recomputed. On more ranks a trace has more, with padding and copies; the model has not. */
static void test_flops_of_a_model(void **state) {
    static const int kinds[] = {0, 1, 2, GPT_BERT, GPT_BERT + 1};
    int more = 0;
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int i = 0; i < 12; i++) {
            gpt_run r = {.tp = i % 2 ? 4 : 1, .data = 1, .llama = kinds[k], .recompute = (mt_recompute)(i / 2 % 3)};
            mt_gpt_desc gpt;
            mt_bert_desc bert;
            double flops;
            sums s;
            r.scores = i / 6;
            r.kv_heads = kinds[k] == 1 && i / 6 ? 2 : 0;
            r.layers = 3;
            gpt = gpt_model(&r);
            bert = gpt_bert_model(&r);
            flops =
                kinds[k] < GPT_BERT ? mt_gpt_flops(&gpt, GPT_BATCH, GPT_SEQ) : mt_bert_flops(&bert, GPT_BATCH, GPT_SEQ);
            s = sums_of(r);
            if (r.tp == 1 ? flops != s.gemm + s.attention : flops > s.gemm + s.attention)
                fail_msg("model %d, case %d: %.0f FLOPs, the trace has %.0f", kinds[k], i, flops, s.gemm + s.attention);
            more += flops < s.gemm + s.attention;
        }
    assert_true(more > 5);
}

/* The formula of arXiv 2204.02311 without its mask: 6 N and 12 L H Q T for each token, where N has no embedding. A desc
   that cannot be a model has no FLOPs. */
static void test_flops_by_hand(void **state) {
    mt_gpt_desc d = {.vocab = 50257, .layers = 24, .max_seq = 1024, .layer = {.hidden = 1024, .heads = 16}};
    double n = 24 * 12.0 * 1024 * 1024 + 50257.0 * 1024, tokens = 8 * 1024;
    (void)state;
    d.layer.scores.mask = MT_MASK_BIDIRECTIONAL;
    assert_true(mt_gpt_flops(&d, 8, 1024) == tokens * (6 * n + 12 * 24 * 1024.0 * 1024));
    d.padded_vocab = 50304;
    d.layer.recompute = MT_RECOMPUTE_FULL;
    d.layer.scores.window = 5000;
    assert_true(mt_gpt_flops(&d, 8, 1024) == tokens * (6 * n + 12 * 24 * 1024.0 * 1024));
    d.layer.scores.window = 1; /* each query sees one key */
    assert_true(mt_gpt_flops(&d, 8, 1024) == tokens * (6 * n + 12 * 24 * 1024.0));
    d.layer.kv_heads = 1;
    d.layer.activation = MT_SWIGLU;
    n += 24 * (4.0 * 1024 * 1024 - 2 * 15 * 64 * 1024.0);
    assert_true(mt_gpt_flops(&d, 8, 1024) == tokens * (6 * n + 12 * 24 * 1024.0));
    assert_true(mt_gpt_flops(NULL, 8, 1024) == 0 && mt_gpt_flops(&d, 0, 1024) == 0 && mt_gpt_flops(&d, 8, 0) == 0);
    d.layer.heads = 0;
    assert_true(mt_gpt_flops(&d, 8, 1024) == 0 && mt_bert_flops(NULL, 1, 1) == 0);
}

/* ---- machines ---------------------------------------------------------------------------------------------------- */

static const char rates[] = "# a comment, and an empty line\n"
                            "\n"
                            "name  two nodes, of four \t\r\n"
                            "node 4\n"
                            "gemm * * * * 1 # the last line counts\r\n"
                            "gemm * * * * 1e12 # every product\r\n"
                            "gemm f32 * * * 5e11\n"
                            "attention * f16 2e11\n"
                            "attention mt_attention_forward * 3e11\n"
                            "\tmemory * * 1e9\n"
                            "memory mt_fill f32 4e9\n"
                            "memory mt_fill * 2e9\n"
                            "operator 0.001\n"
                            "link 1e9 1e-4\n"
                            "network 2e9 1e-3\n"
                            "peak bf16 9e12\n"
                            "capacity 3.5e10"; /* the last line has no end */

static mt_machine *machine_of(mt_context *ctx, const char *text) {
    mt_machine *m = NULL;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_machine_create(ctx, text, &m));
    return m;
}

static void assert_seconds(mt_context *ctx, const mt_machine *m, mt_trace_entry e, double expected) {
    double seconds = -1;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_machine_seconds(ctx, m, &e, &seconds));
    if (fabs(seconds - expected) > 1e-12 + 1e-9 * expected)
        fail_msg("%s, %d ranks, span %d: %.9g s, expected %.9g", e.name, e.ranks, e.span, seconds, expected);
}

static void test_rates(void **state) {
    mt_trace_entry e = {.work = MT_WORK_MEMORY, .name = "mt_copy", .bytes = 5e8};
    mt_machine *m;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    m = machine_of(r.ctx, rates);
    assert_string_equal(mt_machine_name(m), "two nodes, of four");
    assert_true(mt_machine_peak(m, MT_BF16) == 9e12 && mt_machine_peak(m, MT_F16) == 0);
    assert_true(mt_machine_capacity(m) == 3.5e10);
    assert_seconds(r.ctx, m, e, 0.501);
    e.name = "mt_fill", e.dtype = MT_F32;
    assert_seconds(r.ctx, m, e, 0.126); /* the line of its name and type */
    e.dtype = MT_BF16;
    assert_seconds(r.ctx, m, e, 0.251); /* the line of its name */
    e.work = MT_WORK_OPTIMIZER;
    assert_seconds(r.ctx, m, e, 0.251);
    e.dtype = MT_I32; /* as f32 */
    assert_seconds(r.ctx, m, e, 0.126);
    e = (mt_trace_entry){.work = MT_WORK_ATTENTION, .name = "mt_attention_backward", .dtype = MT_F16, .flops = 6e11};
    assert_seconds(r.ctx, m, e, 3.001);
    e.name = "mt_attention_forward", e.dtype = MT_F16;
    assert_seconds(r.ctx, m, e, 2.001);
    e = (mt_trace_entry){.work = MT_WORK_GEMM, .name = "mt_gemm", .dtype = MT_F32, .flops = 1e12, .bytes = 1};
    e.m = e.n = e.k = 100;
    assert_seconds(r.ctx, m, e, 2.001);
    e.dtype = MT_F16;
    assert_seconds(r.ctx, m, e, 1.001);
    e.bytes = 7e9; /* takes longer than its FLOPs */
    assert_seconds(r.ctx, m, e, 7.001);
    e.work = MT_WORK_ATTENTION;
    assert_seconds(r.ctx, m, e, 7.001);
    e = (mt_trace_entry){.work = MT_WORK_OVERLAP_WAIT, .name = "overlap_wait"};
    assert_seconds(r.ctx, m, e, 0);
    mt_machine_destroy(m);
    assert_string_equal(mt_machine_name(NULL), "");
    assert_true(mt_machine_peak(NULL, MT_F32) == 0 && mt_machine_capacity(NULL) == 0);
    mt_machine_destroy(NULL);
    test_paper_rank_close(&r);
}

/* Products between the shapes of the lines. */
static void test_shapes(void **state) {
    static const char text[] = "gemm f32 100 100 100 1e9\ngemm f32 400 100 100 4e9\ngemm f32 * * * 1\n"
                               "gemm * 100 100 100 5\ngemm f16 100 100 100 7e9\nmemory * * 1e9\n";
    mt_trace_entry e = {.work = MT_WORK_GEMM, .name = "mt_gemm", .flops = 4e9, .m = 100, .n = 100, .k = 100};
    mt_machine *m;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    m = machine_of(r.ctx, text);
    assert_seconds(r.ctx, m, e, 4);
    e.m = 400;
    assert_seconds(r.ctx, m, e, 1);
    e.m = 200; /* in the middle: the mean of the logarithms */
    assert_seconds(r.ctx, m, e, 2);
    e.m = 100, e.k = 1000000; /* nearly as far from both */
    assert_seconds(r.ctx, m, e,
                   4e9 / exp((log(1e9) + log(4e9) / pow(1 + pow(log(4) / log(1e4), 2), 2)) /
                             (1 + 1 / pow(1 + pow(log(4) / log(1e4), 2), 2))));
    e.dtype = MT_F16, e.m = 3, e.n = 5; /* the only line of its type */
    assert_seconds(r.ctx, m, e, 4.0 / 7);
    e.bytes = 2e9; /* take longer than the FLOPs */
    assert_seconds(r.ctx, m, e, 2);
    e.m = e.n = e.k = 100; /* a measured shape */
    assert_seconds(r.ctx, m, e, 4.0 / 7);
    e.dtype = MT_BF16, e.flops = 5; /* a line of any type */
    assert_seconds(r.ctx, m, e, 1);
    e = (mt_trace_entry){.work = MT_WORK_GEMM, .name = "mt_gemm"}; /* an empty product */
    assert_seconds(r.ctx, m, e, 0);
    mt_machine_destroy(m);
    test_paper_rank_close(&r);
}

/* Collectives in a node of 4, between nodes, and of groups whose ranks are 2 and 8 apart. Link: 1 GB/s, 0.1 ms. Network
   of a node: 2 GB/s, 1 ms. */
static void test_collectives(void **state) {
    static const struct {
        mt_collective kind;
        int ranks, stride;
        double seconds; /* for 1 GB */
    } cases[] = {
        {MT_ALL_REDUCE, 4, 1, 2 * 0.75 + 4e-4},
        {MT_ALL_REDUCE, 3, 1, 2 * 2.0 / 3 + 4e-4},
        {MT_ALL_GATHER, 4, 1, 0.75 + 2e-4},
        {MT_REDUCE_SCATTER, 2, 2, 0.5 + 1e-4},
        {MT_BROADCAST, 4, 1, 1 + 2e-4},
        {MT_SEND, 2, 1, 1 + 1e-4},
        {MT_RECV, 4, 1, 1 + 1e-4},
        {MT_BARRIER, 4, 1, 1 + 2e-4},
        {MT_ALL_REDUCE, 8, 1, 2 * 7.0 / 8 + 6e-3},    /* a whole node sends 2 GB/s, the link 1 GB/s */
        {MT_ALL_REDUCE, 4, 2, 2 * 0.75 + 4e-3},       /* 2 ranks of a node: half of 2 GB/s */
        {MT_ALL_REDUCE, 4, 4, 2 * 0.75 / 0.5 + 4e-3}, /* 1 rank of a node: a quarter of 2 GB/s */
        {MT_ALL_GATHER, 2, 8, 0.5 / 0.5 + 1e-3},
        {MT_SEND, 2, 4, 1 / 0.5 + 1e-3},
        {MT_ALL_TO_ALL, 4, 1, 0.75 + 1e-4},
        {MT_ALL_TO_ALL_V, 3, 1, 2.0 / 3 + 1e-4},
        {MT_ALL_TO_ALL, 8, 1, 4.0 / 8 / 0.5 + 1e-3},   /* half of the blocks leave the node; a rank has 0.5 GB/s */
        {MT_ALL_TO_ALL_V, 4, 4, 3.0 / 4 / 0.5 + 1e-3}, /* all but the own one do */
    };
    mt_machine *m, *alone;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    m = machine_of(r.ctx, rates);
    alone = machine_of(r.ctx, "network 1e9 0"); /* nodes of one rank need no link */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_trace_entry e = {.work = MT_WORK_COMMUNICATION, .name = "collective", .bytes = 1e9};
        e.collective = cases[i].kind;
        e.ranks = cases[i].ranks;
        e.span = (cases[i].ranks - 1) * cases[i].stride;
        assert_seconds(r.ctx, m, e, cases[i].seconds);
    }
    assert_seconds(
        r.ctx, alone,
        (mt_trace_entry){
            .work = MT_WORK_COMMUNICATION, .name = "send", .bytes = 1e9, .ranks = 2, .span = 1, .collective = MT_SEND},
        1);
    mt_machine_destroy(alone);
    mt_machine_destroy(m);
    test_paper_rank_close(&r);
}

static void test_texts_refused(void **state) {
    static const char *const cases[][2] = {
        {"gemms f32 1 1 1 1", "line 1: 'gemms' is no key of a machine"},
        {"\n# x\ngemm f32 1 1 1", "line 3: 'gemm' has 4 values, must have 5"},
        {"gemm f64 1 1 1 1", "line 1: 'gemm' has 'f64', must be f32, bf16, f16 or *"},
        {"gemm f32 0 1 1 1", "'gemm' has '0', must be a number above 0 or *"},
        {"gemm f32 1 1 1 0", "'gemm' has '0', must be a number above 0"},
        {"gemm f32 1 1 1 *", "'gemm' has '*', must be a number"},
        {"gemm f32 1 1 1 -1", "'gemm' has '-1', must be a number"},
        {"gemm f32 1 1 1 1e999", "'gemm' has '1e999', must be a number"},
        {"gemm f32 1 1 1 1,5", "'gemm' has '1,5', must be a number"},
        {"gemm f32 1 1 1 nan", "'gemm' has 'nan', must be a number"},
        {"gemm f32 1 1 1 1 2", "line 1: '2' follows the values of 'gemm'"},
        {"node 0", "'node' has '0', must be a whole number from 1"},
        {"node 1.5", "'node' has '1.5', must be a whole number from 1"},
        {"overlap 2", "'overlap' has '2', must be 0 or 1"},
        {"link 1e9", "'link' has 1 values, must have 2"},
        {"gemm f32 100 * * 1", "line 1: the shape of 'gemm' must be three numbers or * * *"},
        {"operator -1", "'operator' has '-1', must be a number"},
        {"memory a_name_that_is_longer_than_any_of_the_operators f32 1", "must be a name of at most 39 characters"},
    };
    const char *path = "/";
    mt_machine *m = NULL;
    char words[160];
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(words, sizeof words, "machine, |%s", cases[i][1]);
        REFUSED(r.ctx, MT_ERR_DATA, words, mt_machine_create(r.ctx, cases[i][0], &m));
        assert_true(m == NULL);
    }
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "text is NULL", mt_machine_create(r.ctx, NULL, &m));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_machine_create(r.ctx, "", NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "path is NULL", mt_machine_read(r.ctx, NULL, &m));
    REFUSED(r.ctx, MT_ERR_IO, path, mt_machine_read(r.ctx, path, &m));
    assert_int_equal(mt_machine_create(NULL, "", &m), MT_ERR_ARGUMENT);
    char *large = (char *)calloc(1, (1 << 20) + 2);
    memset(large, '#', (1 << 20) + 1);
    shell("truncate -s 1T '%s'", in_scratch("large")); /* it has a hole of this size, and memory has not: not read */
    REFUSED(r.ctx, MT_ERR_DATA, "has 1099511627776 bytes, must have at most 1048576",
            mt_machine_read(r.ctx, in_scratch("large"), &m));
    forget("large");
    REFUSED(r.ctx, MT_ERR_DATA, "machine: has 1048577 bytes, must have at most 1048576",
            mt_machine_create(r.ctx, large, &m));
    free(large);
    assert_int_equal(mt_machine_read(NULL, path, &m), MT_ERR_ARGUMENT);
    test_paper_rank_close(&r);
}

/* A machine is read from a file as from memory. An entry without a rate is refused. */
static void test_file(void **state) {
    const char *path = in_scratch("machine.txt");
    FILE *file = fopen(path, "wb");
    mt_trace_entry e = {.work = MT_WORK_ATTENTION, .name = "mt_attention_forward", .flops = 6e11};
    double seconds;
    mt_machine *m = NULL;
    mt_step_time time;
    mt_trace trace = {&e, 1};
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    assert_true(file && fputs(rates, file) >= 0 && fclose(file) == 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_machine_read(r.ctx, path, &m));
    forget("machine.txt");
    assert_seconds(r.ctx, m, e, 2.001);
    mt_machine_destroy(m);
    m = machine_of(r.ctx, "name M\nattention other f32 1\nmemory * bf16 1\ngemm f16 1 1 1 1\nnode 2\nlink 1 1");
    REFUSED(r.ctx, MT_ERR_DATA, "mt_machine_seconds: machine 'M' has no 'attention' for mt_attention_forward of f32",
            mt_machine_seconds(r.ctx, m, &e, &seconds));
    REFUSED(r.ctx, MT_ERR_DATA, "mt_plan_step: machine 'M' has no 'attention' for mt_attention_forward of f32",
            mt_plan_step(r.ctx, m, &trace, 1, &time));
    e.work = MT_WORK_MEMORY;
    REFUSED(r.ctx, MT_ERR_DATA, "has no 'memory'", mt_machine_seconds(r.ctx, m, &e, &seconds));
    e.work = MT_WORK_GEMM;
    REFUSED(r.ctx, MT_ERR_DATA, "has no 'gemm'", mt_machine_seconds(r.ctx, m, &e, &seconds));
    e = (mt_trace_entry){.work = MT_WORK_COMMUNICATION, .name = "all_reduce", .ranks = 4, .span = 3};
    REFUSED(r.ctx, MT_ERR_DATA, "has no 'network' for all_reduce of f32 between the ranks",
            mt_machine_seconds(r.ctx, m, &e, &seconds));
    mt_machine_destroy(m);
    m = machine_of(r.ctx, "node 8");
    REFUSED(r.ctx, MT_ERR_DATA, "has no 'link'", mt_machine_seconds(r.ctx, m, &e, &seconds));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "machine is NULL", mt_machine_seconds(r.ctx, NULL, &e, &seconds));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "entry is NULL", mt_machine_seconds(r.ctx, m, NULL, &seconds));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "seconds is NULL", mt_machine_seconds(r.ctx, m, &e, NULL));
    assert_int_equal(mt_machine_seconds(NULL, m, &e, &seconds), MT_ERR_ARGUMENT);
    mt_machine_destroy(m);
    test_paper_rank_close(&r);
}

/* Entries that the library does not write are refused, whatever the machine. */
static void test_entries_refused(void **state) {
    static const struct {
        mt_trace_entry e;
        const char *what;
    } cases[] = {
        {{.work = (mt_work)-1, .name = "x"}, "entry 0 (x): work"},
        {{.work = MT_WORK_COUNT, .name = "x"}, "work"},
        {{.work = MT_WORK_MEMORY}, "entry 0 (): name"},
        {{.name = "x", .flops = -1}, "flops"},
        {{.name = "x", .bytes = INFINITY}, "bytes"},
        {{.name = "x", .bytes = NAN}, "bytes"},
        {{.work = MT_WORK_GEMM, .name = "x", .k = -1}, "m, n, k"},
        {{.work = MT_WORK_COMMUNICATION, .name = "x", .ranks = 1}, "ranks, span"},
        {{.work = MT_WORK_COMMUNICATION, .name = "x", .ranks = 3, .span = 1}, "ranks, span"},
        {{.work = MT_WORK_COMMUNICATION, .name = "x", .ranks = 2, .span = 1, .collective = MT_COLLECTIVE_COUNT},
         "collective"},
        {{.work = MT_WORK_OVERLAP_BEGIN, .name = "x", .stream = (mt_stream)1000}, "stream"},
        {{.work = MT_WORK_OVERLAP_END, .name = "x", .ticket = MT_OVERLAP_TICKET_THIRD + 1}, "ticket"},
        {{.work = MT_WORK_OVERLAP_WAIT, .name = "x", .ticket = -1}, "ticket"},
    };
    mt_step_time times[2];
    mt_machine *m;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    m = machine_of(r.ctx, rates);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_trace_entry e = cases[i].e;
        mt_trace traces[2] = {{&e, 1}, {&e, 1}};
        char words[80];
        double seconds;
        snprintf(words, sizeof words, "mt_machine_seconds: |%s is not valid", cases[i].what);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_machine_seconds(r.ctx, m, &e, &seconds));
        snprintf(words, sizeof words, "mt_plan_step: |%s is not valid", cases[i].what);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_plan_step(r.ctx, m, traces, 2, times));
    }
    mt_machine_destroy(m);
    test_paper_rank_close(&r);
}

/* ---- the time of a step ------------------------------------------------------------------------------------------ */

/* A machine on which the bytes and FLOPs of an entry are its seconds. */
static const char unit[] = "gemm * * * * 1\nattention * * 1\nmemory * * 1\nnode 1024\nlink 1 0\n";

enum { ENTRIES = 4096 };

typedef struct list {
    mt_trace_entry entries[ENTRIES];
    mt_trace trace;
} list;

static mt_trace_entry *add(list *l, mt_work work, const char *name, double seconds) {
    mt_trace_entry *e = &l->entries[l->trace.count++];
    memset(e, 0, sizeof *e);
    if (l->trace.count >= ENTRIES) abort();
    l->trace.entries = l->entries;
    e->work = work;
    e->name = name;
    e->to = e->from = -1;
    if (work == MT_WORK_GEMM || work == MT_WORK_ATTENTION) e->flops = seconds;
    else e->bytes = seconds;
    e->m = e->n = e->k = 1;
    return e;
}

/* An all-reduce of two ranks takes 2 * (1/2) * bytes. */
static void add_reduce(list *l, double seconds) {
    mt_trace_entry *e = add(l, MT_WORK_COMMUNICATION, "all_reduce", seconds);
    e->ranks = 2;
    e->span = 1;
    e->collective = MT_ALL_REDUCE;
}

static void assert_time(const char *what, double got, double expected) {
    if (fabs(got - expected) > 1e-9 * (1 + fabs(expected))) fail_msg("%s: %.9g, expected %.9g", what, got, expected);
}

/* Everything in a row, and with communication in another stream. */
static void test_one_stage(void **state) {
    static list l;
    mt_machine *m, *blocking;
    mt_step_time t;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    m = machine_of(r.ctx, unit);
    blocking = machine_of(r.ctx, "gemm * * * * 1\nattention * * 1\nmemory * * 1\nnode 8\nlink 1 0\noverlap 0");
    add(&l, MT_WORK_GEMM, "mt_gemm", 5);
    add(&l, MT_WORK_GEMM, "mt_gemm", 7)->recomputed = 1;
    add(&l, MT_WORK_ATTENTION, "mt_attention_forward", 3);
    add(&l, MT_WORK_MEMORY, "mt_fill", 2);
    add(&l, MT_WORK_OPTIMIZER, "mt_adamw_step", 4);
    add_reduce(&l, 6);
    add(&l, MT_WORK_OVERLAP_BEGIN, "overlap_begin", 0)->stream = MT_STREAM_SECOND;
    add_reduce(&l, 10);
    add(&l, MT_WORK_OVERLAP_END, "overlap_end", 0)->ticket = 2;
    add(&l, MT_WORK_OVERLAP_BEGIN, "overlap_begin", 0)->stream = MT_STREAM_SECOND;
    add_reduce(&l, 1); /* after the 10 in the same stream */
    add(&l, MT_WORK_OVERLAP_END, "overlap_end", 0)->ticket = 3;
    add(&l, MT_WORK_OVERLAP_BEGIN, "overlap_begin", 0)->stream = MT_STREAM_THIRD;
    add_reduce(&l, 3);
    add(&l, MT_WORK_OVERLAP_END, "overlap_end", 0)->ticket = MT_OVERLAP_TICKET_THIRD;
    add(&l, MT_WORK_GEMM, "mt_gemm", 4);
    add(&l, MT_WORK_OVERLAP_WAIT, "overlap_wait", 0)->ticket = MT_OVERLAP_TICKET_THIRD; /* is over */
    add(&l, MT_WORK_OVERLAP_WAIT, "overlap_wait", 0)->ticket = 2;                       /* 6 are left */
    add(&l, MT_WORK_OVERLAP_WAIT, "overlap_wait", 0)->ticket = 3;                       /* and 1 */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_plan_step(r.ctx, m, &l.trace, 1, &t));
    assert_time("gemm", t.gemm, 16);
    assert_time("attention", t.attention, 3);
    assert_time("memory", t.memory, 2);
    assert_time("optimizer", t.optimizer, 4);
    assert_time("communication", t.communication, 6 + 7);
    assert_time("overlapped", t.overlapped, 14 - 7);
    assert_time("bubble", t.bubble, 0);
    assert_time("seconds", t.seconds, 16 + 3 + 2 + 4 + 6 + 7);
    assert_time("flops", t.flops, 12);
    assert_time("recomputed", t.recomputed, 7);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_plan_step(r.ctx, blocking, &l.trace, 1, &t));
    assert_time("communication without overlap", t.communication, 20);
    assert_time("overlapped", t.overlapped, 0);
    assert_time("seconds without overlap", t.seconds, 16 + 3 + 2 + 4 + 20);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "machine is NULL", mt_plan_step(r.ctx, NULL, &l.trace, 1, &t));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "traces is NULL", mt_plan_step(r.ctx, m, NULL, 1, &t));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_plan_step(r.ctx, m, &l.trace, 1, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "stages is 0", mt_plan_step(r.ctx, m, &l.trace, 0, &t));
    assert_int_equal(mt_plan_step(NULL, m, &l.trace, 1, &t), MT_ERR_ARGUMENT);
    mt_machine_destroy(m);
    mt_machine_destroy(blocking);
    test_paper_rank_close(&r);
}

/* Operators between begin and end are in the stream, too. Work that no call waits for belongs to the step. Two traces
   without messages do not wait for each other. */
static void test_streams(void **state) {
    static list l;
    mt_trace traces[2];
    mt_step_time t[2];
    mt_machine *m;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    m = machine_of(r.ctx, unit);
    add(&l, MT_WORK_OVERLAP_BEGIN, "overlap_begin", 0)->stream = MT_STREAM_THIRD;
    add_reduce(&l, 10);
    add(&l, MT_WORK_MEMORY, "mt_convert", 5);
    add(&l, MT_WORK_OVERLAP_END, "overlap_end", 0)->ticket = MT_OVERLAP_TICKET_THIRD;
    add(&l, MT_WORK_GEMM, "mt_gemm", 3);
    traces[0] = traces[1] = l.trace;
    for (int stages = 1; stages <= 2; stages++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_plan_step(r.ctx, m, traces, stages, t));
        assert_time("seconds", t[stages - 1].seconds, 15);
        assert_time("gemm", t[stages - 1].gemm, 3);
        assert_time("memory", t[stages - 1].memory, 0);
        assert_time("communication", t[stages - 1].communication, 12);
        assert_time("overlapped", t[stages - 1].overlapped, 3);
        assert_time("bubble", t[stages - 1].bubble, 0);
    }
    mt_machine_destroy(m);
    test_paper_rank_close(&r);
}

/* Adds what a stage does in a step, from the library's schedule: forward takes 1 s, backward 2 s, a message `message`
   seconds. */
static void add_stage(list *l, mt_schedule schedule, int stages, int stage, int micro_batches, double message) {
    static mt_action actions[ENTRIES];
    int count = 0;
    memset(&l->trace, 0, sizeof l->trace);
    assert_int_equal(mt_pipeline_schedule(schedule, stages, stage, micro_batches, actions, ENTRIES, &count),
                     MT_SUCCESS);
    for (int i = 0; i < count; i++) {
        mt_action_kind k = actions[i].kind;
        mt_trace_entry *e;
        if (k == MT_FORWARD || k == MT_BACKWARD) {
            add(l, MT_WORK_GEMM, "mt_gemm", k == MT_FORWARD ? 1 : 2);
            continue;
        }
        e = add(l, MT_WORK_COMMUNICATION, "message", message);
        e->ranks = stages;
        e->span = 2 * (stages - 1);
        e->collective = k == MT_RECV_FORWARD || k == MT_RECV_BACKWARD ? MT_RECV : MT_SEND;
        if (k == MT_SEND_FORWARD || k == MT_SEND_FORWARD_RECV_BACKWARD) e->to = stage + 1;
        if (k == MT_SEND_BACKWARD || k == MT_SEND_BACKWARD_RECV_FORWARD) e->to = stage - 1;
        if (k == MT_RECV_FORWARD || k == MT_SEND_BACKWARD_RECV_FORWARD) e->from = stage - 1;
        if (k == MT_RECV_BACKWARD || k == MT_SEND_FORWARD_RECV_BACKWARD) e->from = stage + 1;
    }
}

/* Without the time of messages, p stages need (m + p - 1) (forward + backward) for m micro-batches, in both schedules
   (arXiv 2104.04473, section 2.2). */
static void test_pipelines(void **state) {
    static list lists[8];
    mt_trace traces[8];
    mt_step_time times[8];
    mt_machine *m;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    m = machine_of(r.ctx, unit);
    for (int schedule = MT_SCHEDULE_1F1B; schedule <= MT_SCHEDULE_GPIPE; schedule++)
        for (int p = 1; p <= 8; p++)
            for (int n = 1; n <= 13; n += 3) {
                for (int s = 0; s < p; s++) {
                    add_stage(&lists[s], (mt_schedule)schedule, p, s, n, 0);
                    traces[s] = lists[s].trace;
                }
                ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_plan_step(r.ctx, m, traces, p, times));
                for (int s = 0; s < p; s++) {
                    assert_time("step", times[s].seconds, 3 * (n + p - 1));
                    assert_time("products", times[s].gemm, 3 * n);
                    assert_time("bubble", times[s].bubble, 3 * (p - 1));
                    assert_time("communication", times[s].communication, 0);
                }
            }
    /* two stages and one micro-batch: forward, message, forward, backward, message, backward */
    for (int s = 0; s < 2; s++) {
        add_stage(&lists[s], MT_SCHEDULE_1F1B, 2, s, 1, 0.25);
        traces[s] = lists[s].trace;
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_plan_step(r.ctx, m, traces, 2, times));
    for (int s = 0; s < 2; s++) {
        assert_time("step", times[s].seconds, 6.5);
        assert_time("communication", times[s].communication, 0.5);
        assert_time("bubble", times[s].bubble, 3);
    }
    mt_machine_destroy(m);
    test_paper_rank_close(&r);
}

/* Stages wait for each other in a collective of all ranks, and the first and the last one in theirs. */
static void test_stages_meet(void **state) {
    static list lists[3];
    mt_trace traces[3];
    mt_step_time times[3];
    mt_machine *m;
    mt_trace_entry *e;
    test_rank r;
    (void)state;
    open_meta(1, (mt_grid_desc){.tp = 1}, MT_DEVICE_CPU, &r);
    m = machine_of(r.ctx, unit);
    for (int s = 0; s < 3; s++) {
        memset(&lists[s].trace, 0, sizeof lists[s].trace);
        if (s > 0) { /* a message tells how many ranks a stage has: 2 */
            e = add(&lists[s], MT_WORK_COMMUNICATION, "recv", 0);
            e->collective = MT_RECV, e->from = s - 1, e->ranks = 3, e->span = 4;
        }
        if (s < 2) {
            e = add(&lists[s], MT_WORK_COMMUNICATION, "send", 0);
            e->collective = MT_SEND, e->to = s + 1, e->ranks = 3, e->span = 4;
        }
        add(&lists[s], MT_WORK_GEMM, "mt_gemm", 1 + s); /* 1, 2, 3 */
        add_reduce(&lists[s], 1);                       /* inside a stage */
        if (s != 1) {                                   /* of stages 0 and 2, at 4 */
            add_reduce(&lists[s], 2);
            lists[s].entries[lists[s].trace.count - 1].span = 4;
        }
        e = add(&lists[s], MT_WORK_COMMUNICATION, "all_reduce", 6); /* of all 6 ranks, at 6: 2 * 5/6 * 6 = 10 s */
        e->collective = MT_ALL_REDUCE, e->ranks = 6, e->span = 5;
        add(&lists[s], MT_WORK_OPTIMIZER, "mt_adamw_step", 1 + s);
        traces[s] = lists[s].trace;
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_plan_step(r.ctx, m, traces, 3, times));
    for (int s = 0; s < 3; s++) {
        assert_time("step", times[s].seconds, 6 + 10 + 3);
        assert_time("optimizer", times[s].optimizer, 1 + s);
        assert_time("communication", times[s].communication, 1 + (s == 1 ? 0 : 2) + 10);
        assert_time("bubble", times[s].bubble, 19 - (1 + s) - (1 + s) - (1 + (s == 1 ? 0 : 2) + 10));
    }
    traces[1].count -= 2; /* stage 1 does not come */
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_plan_step: stage 0 waits for other stages in entry 4 (all_reduce)",
            mt_plan_step(r.ctx, m, traces, 3, times));
    lists[0].entries[0].to = 7; /* no such stage */
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "stage 0 waits for other stages in entry 0 (send)",
            mt_plan_step(r.ctx, m, traces, 3, times));
    mt_machine_destroy(m);
    test_paper_rank_close(&r);
}

static int open_all(void **state) {
    (void)state;
    return scratch_open("test_plan");
}

static int close_all(void **state) {
    (void)state;
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_own_entries),
        cmocka_unit_test(test_communication),
        cmocka_unit_test(test_spans),
        cmocka_unit_test(test_overlaps),
        cmocka_unit_test(test_step_of_a_gpt),
        cmocka_unit_test(test_flops_of_a_model),
        cmocka_unit_test(test_flops_by_hand),
        cmocka_unit_test(test_rates),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_texts_refused),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_one_stage),
        cmocka_unit_test(test_pipelines),
        cmocka_unit_test(test_stages_meet),
        cmocka_unit_test(test_entries_refused),
        cmocka_unit_test(test_streams),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
