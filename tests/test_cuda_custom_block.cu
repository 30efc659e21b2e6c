/* test_cuda_custom_block.cu - runs the block of examples/02_custom_block.c, mt_cross_attention, and self- and
   cross-attention with a bias that has a gradient, on 1 and 2 GPUs, or on ranks that share one, in f32, bf16 and f16,
   with and without sequence parallelism, and compares their outputs, gradients and losses with the CPU's. In invariant
   mode every split has the same bits. They use functions that no GPT uses on a GPU: shared f and g, QK-norm, a gate, an
   activation without an epilogue, attention to another sequence, the gradient of a bias of the scores.
     On GPUs:       nvcc -std=c++20 -O2 -arch=native -I. tests/test_cuda_custom_block.cu -lcublasLt
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. */

#define CUSTOM_BLOCK_NO_MAIN
#include "examples/02_custom_block.c"

#include "mt_test_ranks.h"

enum { FEW = 2, RANKS = 2, TENSORS = 16 /* y, dx and the gradients of 14 parameters */ };
enum { KEYS = 3 /* of a sequence, in cross-attention */ };
enum { CUSTOM_BLOCK, CROSS_ATTENTION, SELF_ATTENTION };
enum { NO_BIAS, SHARED_BIAS, OWN_BIAS /* of each sequence and head */ };

/* 1 rank; 2 ranks; 2 ranks with sequence parallelism */
static int ranks_of(int split) { return split == 0 ? 1 : RANKS; }
static int is_sequence_parallel(int split) { return split == 2; }

/* ---- output and gradients ---------------------------------------------------------------------------------------- */

/* What the ranks of a launch compute. They have the same weights and the same share of the same x and dy on every
   device. */
typedef struct result {
    int cuda, split, block, bias, invariant;
    mt_dtype dtype;
    int count; /* of tensors */
    char names[TENSORS][MT_NAME_MAX];
    float *values[RANKS][TENSORS];
    int64_t sizes[TENSORS];
} result;

/* Copies tensor number i to the result, as floats. */
static mt_status keep(mt_context *ctx, result *out, int rank, int i, const char *name, mt_tensor t) {
    size_t mark = mt_arena_mark(ctx);
    int64_t size = t.rows * t.cols;
    mt_tensor wide;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, t.rows, t.cols, &wide));
    MT_TRY(mt_convert(ctx, t, wide));
    out->values[rank][i] = (float *)malloc((size_t)size * sizeof(float));
    if (!out->values[rank][i]) return MT_ERR_MEMORY;
    MT_TRY(mt_download(ctx, wide, out->values[rank][i]));
    mt_arena_release(ctx, mark);
    if (rank != 0) return MT_SUCCESS;
    out->sizes[i] = size;
    out->count = i + 1;
    snprintf(out->names[i], MT_NAME_MAX, "%s", name);
    return MT_SUCCESS;
}

/* This rank's rows of noise that is the same for every split and device, rounded to the type. first is the first of
   them. */
static mt_status noise(test_rank *r, int64_t first, uint64_t seed, mt_tensor t) {
    size_t mark = mt_arena_mark(r->ctx);
    mt_tensor wide;
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, t.rows, t.cols, &wide));
    MT_TRY(mt_upload(r->ctx, test_noise(r, (first + t.rows) * t.cols, seed, 1.0f) + first * t.cols, wide));
    MT_TRY(mt_convert(r->ctx, wide, t));
    mt_arena_release(r->ctx, mark);
    return MT_SUCCESS;
}

/* What goes into a block and comes out of it: this rank's rows of [TOKENS, HIDDEN]. */
typedef struct ends {
    mt_tensor x, y, dy, dx;
} ends;

/* Initialises the parameters, and makes the tensors. x and dy are noise. */
static mt_status make_ends(test_rank *r, const result *out, ends *e) {
    const int sp = is_sequence_parallel(out->split);
    const int64_t rows = sp ? TOKENS / r->grid.tp_size : TOKENS, first = sp ? r->grid.tp_rank * rows : 0;
    mt_arena_request list[] = {{&e->x, out->dtype, rows, HIDDEN},
                               {&e->y, out->dtype, rows, HIDDEN},
                               {&e->dy, out->dtype, rows, HIDDEN},
                               {&e->dx, out->dtype, rows, HIDDEN}};
    MT_TRY(mt_params_init(r->ctx, r->params, 1234));
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    MT_TRY(mt_arena_tensors(r->ctx, list, 4));
    MT_TRY(noise(r, first, 1, e->x));
    return noise(r, first, 2, e->dy);
}

static mt_status custom_block(test_rank *r, result *out) {
    const int rank = r->grid.tp_rank;
    block b;
    block_saved saved;
    ends e;
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, out->dtype));
    MT_TRY(block_create(r->ctx, r->params, is_sequence_parallel(out->split), &b));
    MT_TRY(make_ends(r, out, &e));
    MT_TRY(block_forward(r->ctx, &b, e.x, e.y, &saved));
    MT_TRY(keep(r->ctx, out, rank, 0, "y", e.y));
    MT_TRY(block_backward(r->ctx, &b, e.dy, e.dx, &saved));
    MT_TRY(keep(r->ctx, out, rank, 1, "dx", e.dx));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    if (mt_params_count(r->params) != TENSORS - 2) return MT_ERR_DATA;
    for (int i = 2; i < TENSORS; i++) {
        mt_param *p = mt_params_at(r->params, i - 2);
        MT_TRY(keep(r->ctx, out, rank, i, p->name, p->grad));
    }
    return MT_SUCCESS;
}

/* Keeps the gradients of all parameters from number `first` on. They are whole, so that in invariant mode they can be
   compared between splits. */
static mt_status keep_gradients(test_rank *r, result *out, int first, int parameters) {
    if (mt_params_count(r->params) != parameters) return MT_ERR_DATA;
    for (int i = first; i < first + parameters; i++) {
        mt_param *p = mt_params_at(r->params, i - first);
        float *whole = (float *)malloc((size_t)(p->desc.rows * p->desc.cols) * sizeof(float));
        if (!whole) return MT_ERR_MEMORY;
        out->values[r->grid.tp_rank][i] = whole;
        MT_TRY(mt_param_gather(r->ctx, r->params, p, p->grad, whole));
        if (r->grid.tp_rank != 0) continue;
        out->sizes[i] = p->desc.rows * p->desc.cols;
        out->count = i + 1;
        snprintf(out->names[i], MT_NAME_MAX, "%s", p->name);
    }
    return MT_SUCCESS;
}

/* Sets the bias of the scores, and its gradient, to which backward adds: 1 on the first rank, 0 on the other one. */
static mt_status set_bias(test_rank *r, const result *out, int64_t queries, mt_batch *keys) {
    int own = out->bias == OWN_BIAS;
    if (out->bias == NO_BIAS) return MT_SUCCESS;
    keys->bias.batch = own ? keys->sequences : 1;
    keys->bias.heads = own ? HEADS : 1;
    int64_t rows = keys->bias.batch * keys->bias.heads * queries;
    MT_TRY(mt_arena_tensor(r->ctx, out->dtype, rows, keys->seq, &keys->bias.value));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, rows, keys->seq, &keys->bias.grad));
    MT_TRY(noise(r, 0, 4, keys->bias.value));
    return mt_fill(r->ctx, keys->bias.grad, r->grid.tp_rank == 0 ? 1.0f : 0.0f);
}

/* Keeps the gradient of the bias, summed over the ranks, as tensor number i. */
static mt_status keep_bias_gradient(test_rank *r, result *out, int i, mt_tensor d) {
    if (out->bias == NO_BIAS) return MT_SUCCESS;
    MT_TRY(mt_all_reduce(r->ctx, r->grid.tp, d.data, d.data, (size_t)(d.rows * d.cols), MT_F32, MT_SUM));
    return keep(r->ctx, out, r->grid.tp_rank, i, "attention_dbias", d);
}

/* Two sequences, two query heads for each key head, rotary positions. */
static mt_status self_attention(test_rank *r, result *out) {
    mt_self_attention_desc d;
    mt_self_attention a;
    mt_self_attention_saved saved;
    mt_batch batch;
    ends e;
    memset(&d, 0, sizeof d);
    d.hidden = HIDDEN;
    d.heads = HEADS;
    d.kv_heads = HEADS / 2;
    d.scores.rotary_base = 1e4f;
    d.max_seq = TOKENS / 2;
    d.dropout = 0.2f;
    d.init.std = 0.3f;
    d.sequence_parallel = is_sequence_parallel(out->split);
    memset(&batch, 0, sizeof batch);
    batch.sequences = 2;
    batch.seq = TOKENS / 2;
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, out->dtype));
    MT_TRY(mt_self_attention_create(r->ctx, r->params, "self", &d, &a));
    MT_TRY(make_ends(r, out, &e));
    MT_TRY(set_bias(r, out, batch.seq, &batch));
    MT_TRY(mt_self_attention_forward(r->ctx, &a, &batch, e.x, e.y, &saved));
    MT_TRY(keep(r->ctx, out, r->grid.tp_rank, 0, "y", e.y));
    MT_TRY(mt_self_attention_backward(r->ctx, &a, e.dy, e.dx, &saved));
    MT_TRY(keep(r->ctx, out, r->grid.tp_rank, 1, "dx", e.dx));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(keep_gradients(r, out, 2, 4));
    return keep_bias_gradient(r, out, 6, batch.bias.grad);
}

/* Two sequences of queries, and fewer keys, of which the first sequence has one less. With two ranks the only key head
   is in two pieces. The key's bias shifts all scores of a query alike, so its gradient would be rounding errors without
   a soft cap and scores that it changes. */
static mt_status cross_attention(test_rank *r, result *out) {
    static const int32_t lengths[2] = {KEYS - 1, KEYS};
    const int sp = is_sequence_parallel(out->split), rank = r->grid.tp_rank;
    const int64_t keys = 2 * KEYS / (sp ? r->grid.tp_size : 1);
    mt_cross_attention_desc d;
    mt_cross_attention a;
    mt_cross_attention_saved saved;
    mt_batch batch, memory_batch;
    mt_tensor memory, dmemory, valid;
    ends e;
    memset(&d, 0, sizeof d);
    d.hidden = HIDDEN;
    d.heads = HEADS;
    d.kv_heads = 1;
    d.kv_hidden = HIDDEN / 2;
    d.dropout = 0.2f;
    d.scores.softcap = 1.0f;
    d.init.std = 0.3f;
    d.sequence_parallel = sp;
    mt_arena_request list[] = {
        {&memory, out->dtype, keys, d.kv_hidden}, {&dmemory, out->dtype, keys, d.kv_hidden}, {&valid, MT_I32, 1, 2}};
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, out->dtype));
    MT_TRY(mt_cross_attention_create(r->ctx, r->params, "cross", &d, &a));
    MT_TRY(make_ends(r, out, &e));
    MT_TRY(mt_arena_tensors(r->ctx, list, 3));
    MT_TRY(noise(r, sp ? rank * keys : 0, 3, memory));
    MT_TRY(mt_upload(r->ctx, lengths, valid));
    memset(&batch, 0, sizeof batch);
    batch.sequences = 2;
    batch.seq = TOKENS / 2;
    memory_batch = batch;
    memory_batch.seq = KEYS;
    memory_batch.lengths = (const int32_t *)valid.data;
    MT_TRY(set_bias(r, out, batch.seq, &memory_batch));
    MT_TRY(mt_cross_attention_forward(r->ctx, &a, &batch, e.x, &memory_batch, memory, e.y, &saved));
    MT_TRY(keep(r->ctx, out, rank, 0, "y", e.y));
    MT_TRY(mt_cross_attention_backward(r->ctx, &a, e.dy, e.dx, dmemory, &saved));
    MT_TRY(keep(r->ctx, out, rank, 1, "dx", e.dx));
    MT_TRY(keep(r->ctx, out, rank, 2, "dmemory", dmemory));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(keep_gradients(r, out, 3, 8));
    return keep_bias_gradient(r, out, 11, memory_batch.bias.grad);
}

static mt_status result_rank(mt_comm *world, void *user) {
    result *out = (result *)user;
    mt_grid_desc shape;
    mt_context_desc where;
    test_rank r;
    memset(&shape, 0, sizeof shape);
    memset(&where, 0, sizeof where);
    shape.tp = mt_comm_size(world);
    where.device = out->cuda ? MT_DEVICE_CUDA : MT_DEVICE_CPU;
    where.arena_bytes = (size_t)16 << 20;
    where.invariant = out->invariant;
    mt_status status = test_rank_open(world, shape, &where, &r);
    if (status == MT_SUCCESS)
        status = out->block == CROSS_ATTENTION  ? cross_attention(&r, out)
                 : out->block == SELF_ATTENTION ? self_attention(&r, out)
                                                : custom_block(&r, out);
    test_rank_close(&r);
    return status;
}

static void result_of(int cuda, int split, mt_dtype dtype, int block, int bias, int invariant, result *out) {
    memset(out, 0, sizeof *out);
    out->cuda = cuda;
    out->split = split;
    out->dtype = dtype;
    out->block = block;
    out->bias = bias;
    out->invariant = invariant;
    test_launch(ranks_of(split), result_rank, out);
}

static void result_free(result *r) {
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < TENSORS; i++) free(r->values[rank][i]);
}

/* |a - b| <= tolerance |b|, in the Euclidean norm of a tensor. */
static double distance(const float *a, const float *b, int64_t n) {
    double apart = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)b[i];
        apart += d * d;
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(apart / size);
}

/* Both devices round the same values to 16 bits, but add in another order in fp32, so they may round a value near
   the middle of two 16-bit numbers to different sides. cuBLASLt may also round a product before it adds it to a
   16-bit tensor. The tolerance is reached when all elements of a tensor differ by three of these roundings, each
   half a unit in the last place: 2^-9 of a bf16 and 2^-12 of an f16, at least. On an H200 the largest differences
   are two thirds of it. On the engine, which rounds once, they are less than a sixth. Cross-attention without a bias
   runs on tensor cores, which also round probabilities and gradients of scores: five roundings. On the engine the
   largest differences are 0.6 of that. */
static void compare(int split, mt_dtype dtype, int block, int bias) {
    const double roundings = block == CROSS_ATTENTION && bias == NO_BIAS ? 5 : 3;
    const double tolerance = dtype == MT_F32 ? 2e-6 : roundings * (dtype == MT_BF16 ? 0x1p-9 : 0x1p-12);
    result cpu, gpu;
    result_of(0, split, dtype, block, bias, 0, &cpu);
    result_of(1, split, dtype, block, bias, 0, &gpu);
    for (int rank = 0; rank < ranks_of(split); rank++)
        for (int i = 0; i < cpu.count; i++) {
            double apart = distance(gpu.values[rank][i], cpu.values[rank][i], cpu.sizes[i]);
            if (!(apart <= tolerance))
                fail_msg("rank %d of %d, %s, sequence parallel %d, bias %d: %s is apart from the CPU's by %.3g, "
                         "allowed %.3g",
                         rank, ranks_of(split), mt_dtype_name(dtype), is_sequence_parallel(split), bias, cpu.names[i],
                         apart, tolerance);
        }
    if (bias != NO_BIAS) assert_string_equal(gpu.names[gpu.count - 1], "attention_dbias");
    result_free(&cpu);
    result_free(&gpu);
}

static void test_gradients_are_those_of_the_cpu(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
        for (int split = 0; split < 3; split++) compare(split, (mt_dtype)dtype, CUSTOM_BLOCK, NO_BIAS);
}

static void test_cross_attention_is_that_of_the_cpu(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
        for (int split = 0; split < 3; split++) compare(split, (mt_dtype)dtype, CROSS_ATTENTION, NO_BIAS);
}

static void test_bias_gradients_are_those_of_the_cpu(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
        for (int split = 0; split < 3; split++)
            for (int block = CROSS_ATTENTION; block <= SELF_ATTENTION; block++)
                for (int bias = SHARED_BIAS; bias <= OWN_BIAS; bias++)
                    if (test_takes((size_t)(dtype + split + block + bias), 2))
                        compare(split, (mt_dtype)dtype, block, bias);
}

/* In invariant mode two ranks have the bits of one. */
static void test_attention_in_invariant_mode(void **state) {
    static const int ways[][2] = {{CROSS_ATTENTION, NO_BIAS}, {CROSS_ATTENTION, OWN_BIAS}, {SELF_ATTENTION, OWN_BIAS}};
    (void)state;
    for (int i = 0; i < 9; i++) {
        mt_dtype dtype = (mt_dtype)(MT_F32 + i % 3);
        result one, two;
        result_of(1, 0, dtype, ways[i / 3][0], ways[i / 3][1], RANKS, &one);
        result_of(1, 1, dtype, ways[i / 3][0], ways[i / 3][1], RANKS, &two);
        assert_int_equal(one.count, two.count);
        for (int k = 0; k < one.count; k++)
            if (memcmp(one.values[0][k], two.values[0][k], (size_t)one.sizes[k] * sizeof(float)) != 0)
                fail_msg("%s, bias %d: %s has other bits on two ranks", mt_dtype_name(dtype), one.bias, one.names[k]);
        result_free(&one);
        result_free(&two);
    }
}

/* ---- losses ------------------------------------------------------------------------------------------------------ */

static settings run_on(int cuda, int split, mt_dtype dtype, int invariant) {
    settings s;
    memset(&s, 0, sizeof s);
    s.steps = FEW;
    s.cuda = cuda;
    s.dtype = dtype;
    s.invariant = invariant;
    s.sequence_parallel = is_sequence_parallel(split);
    test_launch(ranks_of(split), rank_main, &s);
    return s;
}

static void test_losses_are_those_of_the_cpu(void **state) {
    settings cpu = run_on(0, 0, MT_F32, 0);
    (void)state;
    assert_true(cpu.loss[0] > 10.0f);
    for (int split = 0; split < 3; split++) {
        settings gpu = run_on(1, split, MT_F32, 0);
        for (int step = 0; step < FEW; step++)
            if (!(fabs((double)gpu.loss[step] - (double)cpu.loss[step]) <= 1e-5 * (double)cpu.loss[step]))
                fail_msg("%d ranks, sequence parallel %d, step %d: loss %.9g, on the CPU %.9g", ranks_of(split),
                         is_sequence_parallel(split), step, (double)gpu.loss[step], (double)cpu.loss[step]);
    }
}

/* The second loss has the bits of all gradients of the first step. */
static void invariant_bits(mt_dtype dtype) {
    settings one = run_on(1, 0, dtype, RANKS);
    assert_true(one.loss[0] > 10.0f);
    for (int split = 1; split < 3; split++) {
        settings two = run_on(1, split, dtype, RANKS);
        assert_memory_equal(two.loss, one.loss, FEW * sizeof *one.loss);
    }
}

#define TEST_INVARIANT(name, dtype)                                                                                    \
    static void test_invariant_bits_##name(void **state) {                                                             \
        (void)state;                                                                                                   \
        invariant_bits(dtype);                                                                                         \
    }
TEST_INVARIANT(f32, MT_F32)
TEST_INVARIANT(bf16, MT_BF16)
TEST_INVARIANT(f16, MT_F16)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients_are_those_of_the_cpu),
        cmocka_unit_test(test_cross_attention_is_that_of_the_cpu),
        cmocka_unit_test(test_bias_gradients_are_those_of_the_cpu),
        cmocka_unit_test(test_attention_in_invariant_mode),
        cmocka_unit_test(test_losses_are_those_of_the_cpu),
        cmocka_unit_test(test_invariant_bits_f32),
        cmocka_unit_test(test_invariant_bits_bf16),
        cmocka_unit_test(test_invariant_bits_f16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
