/* test_cuda_gemm.cu - tests matrix products on MT_DEVICE_CUDA: every cuBLASLt epilogue in every layout that the
   library uses against the separate operators, the choice of an algorithm by measurement, and the memory that a meta
   context computes for a GPU. The test is small: run it early on a new GPU.
     On a GPU:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_gemm.cu -lcublasLt
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU; the test then sets how
                     long a product takes. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test.h"

#include <cublasLt.h>
#include <math.h>
#if defined(MT_CUDA_ENGINE)
#include "runtime.h"
#endif

static mt_context *cpu, *separate, *fused; /* fused never measures */

#define OK(ctx, call) ASSERT_STATUS(ctx, MT_SUCCESS, call)

static mt_context *context_of(mt_device device, mt_gemm_choice choice, mt_epilogue epilogue, size_t arena) {
    mt_context_desc where;
    mt_gemm_options options;
    mt_context *ctx = NULL;
    memset(&where, 0, sizeof where);
    where.device = device;
    where.arena_bytes = arena;
    if (mt_context_create(NULL, &where, &ctx) != MT_SUCCESS) fail_msg("no context");
    memset(&options, 0, sizeof options);
    options.choice = choice;
    options.epilogue = epilogue;
    OK(ctx, mt_gemm_set_options(ctx, &options));
    return ctx;
}

/* A view of rows of cols elements with `more` elements between them, filled with noise from `seed`. */
static mt_tensor noise(mt_context *ctx, mt_dtype type, int64_t rows, int64_t cols, int64_t more, uint64_t seed,
                       float scale) {
    mt_tensor whole, f, t;
    float *x = (float *)malloc((size_t)(rows * cols + 1) * sizeof *x);
    for (int64_t i = 0; i < rows * cols; i++) x[i] = scale * test_float(&seed);
    OK(ctx, mt_arena_tensor(ctx, type, rows, cols + more, &whole));
    OK(ctx, mt_arena_tensor(ctx, MT_F32, rows, cols, &f));
    t = mt_tensor_cols(whole, 0, cols);
    OK(ctx, mt_upload(ctx, x, f));
    OK(ctx, mt_convert(ctx, f, t));
    free(x);
    return t;
}

static float *values(mt_context *ctx, mt_tensor t) {
    float *x = (float *)malloc((size_t)(t.rows * t.cols + 1) * sizeof *x);
    size_t mark = mt_arena_mark(ctx);
    mt_tensor f;
    OK(ctx, mt_arena_tensor(ctx, MT_F32, t.rows, t.cols, &f));
    OK(ctx, mt_convert(ctx, t, f));
    OK(ctx, mt_download(ctx, f, x));
    mt_arena_release(ctx, mark);
    return x;
}

static uint64_t hash_of(mt_context *ctx, mt_tensor t) {
    uint64_t hash = 0;
    OK(ctx, mt_hash(ctx, t, 0, 0, t.cols, &hash));
    return hash;
}

/* Checks that the difference is at most `places` units in the last place of the largest element, in the type of t. */
static void near(const char *what, mt_tensor expected, mt_context *ctx, mt_tensor t, double places) {
    float *a = values(cpu, expected), *b = values(ctx, t);
    double unit = t.dtype == MT_F32 ? 1.0 / (1 << 23) : t.dtype == MT_F16 ? 1.0 / (1 << 10) : 1.0 / (1 << 7), most = 0;
    for (int64_t i = 0; i < t.rows * t.cols; i++) most = fmax(most, fabs((double)a[i]));
    for (int64_t i = 0; i < t.rows * t.cols; i++)
        if (!(fabs((double)a[i] - (double)b[i]) <= places * unit * most))
            fail_msg("%s, %s: [%lld, %lld] is %.9g, must be %.9g", what, mt_dtype_name(t.dtype),
                     (long long)(i / t.cols), (long long)(i % t.cols), (double)b[i], (double)a[i]);
    free(a);
    free(b);
}

/* The error of cuBLASLt's own GELU in f32, in units of the last place: on a GPU it uses an approximate tanh. */
#if defined(MT_CUDA_ENGINE)
#define GELU_PLACES 64
#else
#define GELU_PLACES 8192
#endif

/* ---- each epilogue, each type, sizes that are odd ---------------------------------------------------------------- */

typedef struct sizes {
    int64_t tokens, in, out, more; /* more: gap behind each row of the tensors that are written */
} sizes;

typedef struct tensors {
    mt_tensor x, weight, bias, h, y, z, dy, dh, dweight, dbias, dbias_in;
} tensors;

static tensors tensors_of(mt_context *ctx, mt_dtype type, mt_dtype wide, sizes s) {
    tensors t;
    t.x = noise(ctx, type, s.tokens, s.in, 0, 1, 1.0f);
    t.weight = noise(ctx, type, s.out, s.in, 0, 2, 1.0f);
    t.bias = noise(ctx, wide, 1, s.out, 0, 3, 1.0f);
    t.h = noise(ctx, wide, s.tokens, s.out, s.more, 4, 1.0f);
    t.y = noise(ctx, wide, s.tokens, s.out, s.more, 5, 1.0f);
    t.z = noise(ctx, wide, s.tokens, s.out, s.more, 5, 1.0f);
    t.dy = noise(ctx, type, s.tokens, s.out, 0, 6, 1.0f);
    t.dh = noise(ctx, wide, s.tokens, s.in, s.more, 7, 1.0f);
    t.dweight = noise(ctx, MT_F32, s.out, s.in, 0, 8, 1.0f);
    t.dbias = noise(ctx, MT_F32, 1, s.out, 0, 9, 1.0f);
    t.dbias_in = noise(ctx, MT_F32, 1, s.in, 0, 10, 1.0f);
    return t;
}

/* Runs the separate operators. h_in is the value that the layer before the second product has kept. */
static void operators(mt_context *ctx, tensors t, mt_activation kind, int with_bias, mt_tensor h_in) {
    mt_tensor bias = with_bias ? t.bias : mt_none(), dbias = with_bias ? t.dbias : mt_none();
    OK(ctx, mt_linear_activation_forward(ctx, kind, t.x, t.weight, bias, t.h, t.y));
    OK(ctx, mt_linear_forward(ctx, t.x, t.weight, bias, t.z));
    OK(ctx, mt_linear_activation_backward(ctx, kind, t.dy, t.weight, h_in, t.dh, with_bias ? t.dbias_in : mt_none()));
    OK(ctx, mt_linear_gradients(ctx, t.dy, t.x, t.dweight, dbias));
}

#if defined(MT_CUDA_ENGINE)
static int epilogues_seen[1024];
static double note_epilogue(const mte::GemmCall &call) {
    epilogues_seen[call.epilogue % 1024] = 1;
    return 0;
}
static void start_noting(void) {
    memset(epilogues_seen, 0, sizeof epilogues_seen);
    mte::gemm_time(note_epilogue);
}
#define SEEN(name) (epilogues_seen[(name) % 1024])
#endif

static void check_operators(mt_dtype type, mt_dtype wide, sizes s, mt_activation kind, int with_bias) {
    mt_context *gpu[2] = {separate, fused};
    size_t on_cpu = mt_arena_mark(cpu);
    tensors want = tensors_of(cpu, type, wide, s);
    mt_tensor h_in = noise(cpu, wide, s.tokens, s.in, s.more, 11, 2.0f);
    operators(cpu, want, kind, with_bias, h_in);
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "fused" : "separate";
        size_t mark = mt_arena_mark(gpu[i]);
        tensors t = tensors_of(gpu[i], type, wide, s);
        mt_tensor h = noise(gpu[i], wide, s.tokens, s.in, s.more, 11, 2.0f);
        size_t used = mt_arena_mark(gpu[i]);
        operators(gpu[i], t, kind, with_bias, h);
        assert_int_equal(mt_arena_mark(gpu[i]), used);
        near(name, want.h, gpu[i], t.h, wide == MT_F32 ? 64 : 1.01);
        near(name, want.y, gpu[i], t.y, wide == MT_F32 ? GELU_PLACES : 2.02);
        near(name, want.dh, gpu[i], t.dh, wide == MT_F32 ? GELU_PLACES : 2.02);
        near(name, want.dweight, gpu[i], t.dweight, 64);
        near(name, want.dbias, gpu[i], t.dbias, 64);
        /* For a 16-bit dh, the fused sum adds rounded values. */
        near(name, want.dbias_in, gpu[i], t.dbias_in,
             wide == MT_F32    ? GELU_PLACES
             : wide == MT_BF16 ? 1 << 16
                               : 1 << 13);
        near(name, want.z, gpu[i], t.z, wide == MT_F32 ? 64 : 2.02);
        mt_arena_release(gpu[i], mark);
    }
    mt_arena_release(cpu, on_cpu);
}

static void test_epilogues(void **state) {
    static const mt_dtype types[][2] = {{MT_F32, MT_F32}, {MT_BF16, MT_BF16}, {MT_F16, MT_F16}, {MT_BF16, MT_F32}};
    static const mt_activation kinds[] = {MT_GELU_TANH, MT_GELU_TANH, MT_GELU_ERF, MT_SQUARED_RELU, MT_RELU, MT_TANH};
    static const sizes shapes[] = {{8, 16, 24, 0},  {1, 8, 8, 0}, {13, 40, 16, 0},
                                   {33, 24, 72, 8}, {5, 7, 9, 0}, {6, 8, 12, 3}};
    (void)state;
    for (int i = 0; i < 4; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
            for (int how = 0; how < 12; how++)
                check_operators(types[i][0], types[i][1], shapes[j], kinds[how / 2], how & 1);
}

/* Shapes that cuBLASLt supports are fused; other shapes, and contexts without fused epilogues, are not. */
static void test_what_is_fused(void **state) {
    (void)state;
#if defined(MT_CUDA_ENGINE)
    sizes s = {16, 24, 40, 0}, crooked = {16, 23, 41, 0};
    for (int how = 0; how < 6; how++) {
        mt_context *ctx = how == 3 ? separate : fused;
        size_t mark = mt_arena_mark(ctx);
        mt_dtype type = how == 1 ? MT_BF16 : MT_F32;
        tensors t = tensors_of(ctx, type, type, how == 2 ? crooked : s);
        mt_tensor h = noise(ctx, type, t.dh.rows, t.dh.cols, 0, 11, 2.0f);
        int expected = how < 2;
        start_noting();
        operators(ctx, t, how == 4 ? MT_GELU_ERF : how == 5 ? MT_SQUARED_RELU : MT_GELU_TANH, 1, h);
        OK(ctx, mt_context_synchronize(ctx));
        assert_int_equal(SEEN(CUBLASLT_EPILOGUE_GELU_AUX_BIAS), expected);
        assert_int_equal(SEEN(how == 1 ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_DGELU_BGRAD), expected);
        assert_int_equal(SEEN(CUBLASLT_EPILOGUE_BGRADB), expected || how >= 4);
        assert_int_equal(SEEN(CUBLASLT_EPILOGUE_BIAS), expected || how >= 4);
        assert_int_equal(SEEN(CUBLASLT_EPILOGUE_DEFAULT), !expected);
        mt_arena_release(ctx, mark);
    }
    mte::gemm_time(nullptr);
#endif
}

/* A forward of one kind works with a backward of the other: both leave the same h. */
static void test_mixed(void **state) {
    sizes s = {24, 32, 32, 0};
    size_t mark[2] = {mt_arena_mark(separate), mt_arena_mark(fused)};
    tensors a = tensors_of(separate, MT_F32, MT_F32, s), b = tensors_of(fused, MT_F32, MT_F32, s);
    (void)state;
    OK(separate, mt_linear_activation_forward(separate, MT_GELU_TANH, a.x, a.weight, a.bias, a.h, a.y));
    OK(fused, mt_linear_activation_forward(fused, MT_GELU_TANH, b.x, b.weight, b.bias, b.h, b.y));
    size_t on_cpu = mt_arena_mark(cpu);
    tensors want = tensors_of(cpu, MT_F32, MT_F32, s);
    OK(cpu, mt_linear_activation_forward(cpu, MT_GELU_TANH, want.x, want.weight, want.bias, want.h, want.y));
    OK(cpu, mt_linear_activation_backward(cpu, MT_GELU_TANH, want.dy, want.weight, want.h, want.dh, want.dbias_in));
    OK(fused, mt_context_synchronize(fused));
    OK(separate, mt_context_synchronize(separate));
    OK(separate, mt_linear_activation_backward(separate, MT_GELU_TANH, a.dy, a.weight, b.h, a.dh, a.dbias_in));
    OK(fused, mt_linear_activation_backward(fused, MT_GELU_TANH, b.dy, b.weight, a.h, b.dh, b.dbias_in));
    near("fused, then separate", want.dh, separate, a.dh, 64);
    near("separate, then fused", want.dh, fused, b.dh, GELU_PLACES);
    near("fused, then separate", want.dbias_in, separate, a.dbias_in, 64);
    near("separate, then fused", want.dbias_in, fused, b.dbias_in, GELU_PLACES);
    mt_arena_release(cpu, on_cpu);
    mt_arena_release(separate, mark[0]);
    mt_arena_release(fused, mark[1]);
}

static void test_refusals(void **state) {
    sizes s = {4, 8, 16, 0};
    size_t mark = mt_arena_mark(fused);
    tensors t = tensors_of(fused, MT_F32, MT_F32, s);
    (void)state;
    ASSERT_STATUS(fused, MT_ERR_SHAPE, mt_linear_forward(fused, t.x, t.weight, t.bias, t.x));
    assert_non_null(strstr(mt_last_error(fused), "mt_linear_forward: y is [4, 8], must be [4, 16]"));
    ASSERT_STATUS(fused, MT_ERR_SHAPE, mt_linear_forward(fused, t.dy, t.weight, t.bias, t.y));
    ASSERT_STATUS(fused, MT_ERR_SHAPE, mt_linear_forward(fused, t.x, t.weight, t.dbias_in, t.y));
    ASSERT_STATUS(
        fused, MT_ERR_ARGUMENT,
        mt_linear_activation_forward(fused, (mt_activation)MT_ACTIVATION_COUNT, t.x, t.weight, t.bias, t.h, t.y));
    ASSERT_STATUS(fused, MT_ERR_ARGUMENT,
                  mt_linear_activation_forward(fused, MT_GELU_TANH, t.x, t.weight, t.bias, t.h, t.h));
    ASSERT_STATUS(fused, MT_ERR_SHAPE, mt_linear_activation_forward(fused, MT_SWIGLU, t.x, t.weight, t.bias, t.h, t.y));
    ASSERT_STATUS(fused, MT_ERR_ARGUMENT,
                  mt_linear_activation_backward(fused, MT_GELU_TANH, t.dy, t.weight, t.dh, t.dh, mt_none()));
    ASSERT_STATUS(fused, MT_ERR_SHAPE,
                  mt_linear_activation_backward(fused, MT_GELU_TANH, t.dy, t.weight, t.h, t.dh, mt_none()));
    ASSERT_STATUS(fused, MT_ERR_SHAPE, mt_linear_gradients(fused, t.dy, t.dy, t.dweight, mt_none()));
    ASSERT_STATUS(fused, MT_ERR_SHAPE, mt_linear_gradients(fused, t.dy, t.x, t.dweight, t.dbias_in));
    mt_arena_release(fused, mark);
}

/* ---- the choice of an algorithm ---------------------------------------------------------------------------------- */

/* Whatever algorithm is chosen, the bits are those of the heuristic's first choice. */
static void test_measured_has_the_same_bits(void **state) {
    mt_context *first = context_of(MT_DEVICE_CUDA, MT_GEMM_HEURISTIC, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
    mt_context *best = context_of(MT_DEVICE_CUDA, MT_GEMM_MEASURED, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
    mt_context *both[2] = {first, best};
    (void)state;
    for (int how = 0; how < 8; how++) {
        mt_dtype type = how & 4 ? MT_BF16 : MT_F32;
        float beta = how & 2 ? 1.0f : 0.0f;
        uint64_t hash[2];
        for (int i = 0; i < 2; i++) {
            size_t mark = mt_arena_mark(both[i]), peak;
            mt_tensor a = noise(both[i], type, 264, 72, 0, 1, 1.0f), b = noise(both[i], type, 72, 256, 0, 2, 1.0f);
            mt_tensor c = noise(both[i], how & 1 ? type : MT_F32, 264, 256, 0, 3, 1.0f);
            peak = mt_arena_peak(both[i]);
            for (int again = 0; again < 2; again++)
                OK(both[i], mt_gemm(both[i], MT_NO_TRANS, MT_NO_TRANS, 1.0f, a, b, beta, c));
            assert_int_equal(mt_arena_peak(both[i]), peak); /* measuring does not change the peak */
            hash[i] = hash_of(both[i], c);
            mt_arena_release(both[i], mark);
        }
        assert_true(hash[0] == hash[1]);
    }
    mt_context_destroy(best);
    mt_context_destroy(first);
}

#if defined(MT_CUDA_ENGINE)
static mte::GemmCall favourite;
static double by_favour(const mte::GemmCall &call) {
    if (call.id != favourite.id || call.splits != favourite.splits) return 1.0; /* faster, but with other bits */
    return call.tile == favourite.tile ? 1000.0 : 100.0;
}

/* Returns a hash of one product [m, 256]. With zeros, all algorithms give the same bits. */
static uint64_t product(mt_context *ctx, int64_t m, int zeros) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor a = noise(ctx, MT_F32, m, 96, 0, 1, zeros ? 0.0f : 1.0f), b = noise(ctx, MT_F32, 96, 256, 0, 2, 1.0f), c;
    OK(ctx, mt_arena_tensor(ctx, MT_F32, m, 256, &c));
    OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, a, b, 0.0f, c));
    uint64_t hash = hash_of(ctx, c);
    mt_arena_release(ctx, mark);
    return hash;
}

static int same_call(mte::GemmCall a, mte::GemmCall b) {
    return a.id == b.id && a.splits == b.splits && a.tile == b.tile;
}

/* The algorithm that rounds like the heuristic's first choice is faster, and one that rounds differently is faster
   still. The first of these is chosen. */
static void test_the_fastest_of_those_that_round_alike(void **state) {
    int twins = 0;
    (void)state;
    for (int64_t m = 256; m <= 320; m += 8) {
        mt_context *first = context_of(MT_DEVICE_CUDA, MT_GEMM_HEURISTIC, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
        mt_context *best = context_of(MT_DEVICE_CUDA, MT_GEMM_MEASURED, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
        mte::gemm_time(nullptr);
        long before = mte::gemm_count();
        uint64_t expected = product(first, m, 0);
        assert_int_equal(mte::gemm_count(), before + 1);
        favourite = mte::gemm_last();
        mte::gemm_time(by_favour);
        product(best, m, 1);
        assert_true(product(best, m, 0) == expected);
        before = mte::gemm_count();
        assert_true(product(best, m, 0) == expected);
        assert_int_equal(mte::gemm_count(), before + 1); /* measured once */
        mte::GemmCall taken = mte::gemm_last();
        assert_true(taken.id == favourite.id && taken.splits == favourite.splits);
        twins += taken.tile != favourite.tile;
        if (favourite.id == 0 || favourite.id == 1 || (favourite.id == 2 && favourite.splits == 2))
            assert_true(taken.tile != favourite.tile);
        mt_context_destroy(best);
        mt_context_destroy(first);
    }
    assert_true(twins >= 3);
    mte::gemm_time(nullptr);
}

/* An algorithm that fails is skipped. The first one that succeeds determines the bits. */
static void test_a_candidate_that_fails(void **state) {
    (void)state;
    mt_context *first = context_of(MT_DEVICE_CUDA, MT_GEMM_HEURISTIC, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
    product(first, 256, 0);
    favourite = mte::gemm_last();
    for (int how = 0; how < 2; how++) { /* the first one fails; then all except the first and those that round alike */
        mt_context *best = context_of(MT_DEVICE_CUDA, MT_GEMM_MEASURED, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
        mte::gemm_fail([how](const mte::GemmCall &call) {
            return (call.id == favourite.id && call.splits == favourite.splits) == (how == 0);
        });
        uint64_t hash = product(best, 256, 0);
        mte::GemmCall taken = mte::gemm_last();
        assert_true((taken.id == favourite.id && taken.splits == favourite.splits) == (how == 1));
        mt_context_destroy(best);
        mte::gemm_fail(nullptr);
        if (how == 1) assert_true(hash == product(first, 256, 0));
    }
    mt_context *none = context_of(MT_DEVICE_CUDA, MT_GEMM_MEASURED, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
    mt_tensor a = noise(none, MT_F32, 256, 96, 0, 1, 1.0f), b = noise(none, MT_F32, 96, 256, 0, 2, 1.0f), c;
    OK(none, mt_arena_tensor(none, MT_F32, 256, 256, &c));
    mte::gemm_fail([](const mte::GemmCall &) { return true; });
    ASSERT_STATUS(none, MT_ERR_SYSTEM, mt_gemm(none, MT_NO_TRANS, MT_NO_TRANS, 1.0f, a, b, 0.0f, c));
    assert_non_null(strstr(mt_last_error(none), "cuBLASLt status 13"));
    mte::gemm_fail(nullptr);
    mt_context_destroy(none);
    mt_context_destroy(first);
}

/* Relaxed, because the first product of a context allocates memory. */
static void begin_capture(mt_context *ctx) {
    assert_int_equal(cudaStreamBeginCapture(mt_context_stream(ctx), cudaStreamCaptureModeRelaxed), cudaSuccess);
}

static void end_capture_and_launch(mt_context *ctx) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    assert_int_equal(cudaStreamEndCapture(mt_context_stream(ctx), &graph), cudaSuccess);
    assert_int_equal(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    assert_int_equal(cudaGraphLaunch(exec, mt_context_stream(ctx)), cudaSuccess);
    assert_int_equal(cudaGraphExecDestroy(exec), cudaSuccess);
    assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
}

/* When measuring is not possible, the heuristic's first choice runs, and nothing else. */
static void test_when_nothing_is_measured(void **state) {
    (void)state;
    mte::gemm_time(by_favour);
    for (int how = 0; how < 4; how++) {
        mt_context_desc where;
        mt_context *ctx, *first = context_of(MT_DEVICE_CUDA, MT_GEMM_HEURISTIC, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
        int64_t m = how == 2 ? 248 : 256; /* 248 rows: too small to be measured */
        memset(&where, 0, sizeof where);
        where.device = MT_DEVICE_CUDA;
        where.arena_bytes = how == 0 ? (size_t)1 << 19 : (size_t)16 << 20;
        where.invariant = how == 1 ? 2 : 0;
        OK(first, mt_context_create(NULL, &where, &ctx));
        product(first, m, 0);
        favourite = mte::gemm_last();
        size_t mark = mt_arena_mark(ctx);
        mt_tensor a = noise(ctx, MT_F32, m, 96, 0, 1, 1.0f), b = noise(ctx, MT_F32, 96, 256, 0, 2, 1.0f), c;
        mt_arena_release(ctx, mark);
        OK(ctx, mt_arena_tensor(ctx, MT_F32, m, 96, &a));
        OK(ctx, mt_arena_tensor(ctx, MT_F32, 96, 256, &b));
        OK(ctx, mt_arena_tensor(ctx, MT_F32, m, 256, &c));
        OK(ctx, mt_context_synchronize(ctx));
        long before = mte::gemm_count();
        if (how == 3) begin_capture(ctx);
        OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, a, b, 0.0f, c));
        if (how == 3) end_capture_and_launch(ctx);
        OK(ctx, mt_context_synchronize(ctx));
        assert_int_equal(mte::gemm_count(), before + 1);
        assert_true(same_call(mte::gemm_last(), favourite));
        mt_context_destroy(ctx);
        mt_context_destroy(first);
    }
    mte::gemm_time(nullptr);
}

static int plain_is_slow;
static double by_epilogue(const mte::GemmCall &call) {
    return (call.epilogue == CUBLASLT_EPILOGUE_DEFAULT) == (plain_is_slow != 0) ? 1000.0 : 0.0;
}

/* The faster way is kept. The sums computed while measuring are discarded. */
static void test_epilogues_measured(void **state) {
    sizes s = {24, 32, 40, 0};
    (void)state;
    for (int how = 0; how < 4; how++) {
        mt_context *ctx = context_of(MT_DEVICE_CUDA, MT_GEMM_MEASURED, MT_EPILOGUE_MEASURED, (size_t)16 << 20);
        mt_dtype type = how & 2 ? MT_BF16 : MT_F32;
        size_t on_cpu = mt_arena_mark(cpu);
        tensors want = tensors_of(cpu, type, type, s), t = tensors_of(ctx, type, type, s);
        mt_tensor h = noise(cpu, type, s.tokens, s.in, 0, 11, 2.0f),
                  on_gpu = noise(ctx, type, s.tokens, s.in, 0, 11, 2.0f);
        plain_is_slow = how & 1;
        mte::gemm_time(by_epilogue);
        operators(cpu, want, MT_GELU_TANH, 1, h);
        operators(ctx, t, MT_GELU_TANH, 1, on_gpu);
        near("h", want.h, ctx, t.h, type == MT_F32 ? 64 : 1.01);
        near("y", want.y, ctx, t.y, type == MT_F32 ? 64 : 2.02);
        near("dh", want.dh, ctx, t.dh, type == MT_F32 ? 64 : 2.02);
        near("dweight", want.dweight, ctx, t.dweight, 64);
        near("dbias", want.dbias, ctx, t.dbias, 64);
        near("dbias of the layer before", want.dbias_in, ctx, t.dbias_in, type == MT_F32 ? 64 : 1 << 16);
        start_noting();
        long before = mte::gemm_count();
        operators(ctx, t, MT_GELU_TANH, 1, on_gpu);
        OK(ctx, mt_context_synchronize(ctx));
        assert_int_equal(mte::gemm_count(), before + 4); /* measured once */
        assert_int_equal(SEEN(CUBLASLT_EPILOGUE_DEFAULT), !(how & 1));
        assert_int_equal(SEEN(CUBLASLT_EPILOGUE_BGRADB), how & 1);
        assert_int_equal(SEEN(CUBLASLT_EPILOGUE_GELU_AUX_BIAS), how & 1);
        mt_arena_release(cpu, on_cpu);
        mt_context_destroy(ctx);
    }
    mte::gemm_time(nullptr);
}

/* While a stream is being captured, waiting is not allowed: the epilogue runs separately, and this choice is kept. */
/* Epilogues that cuBLASLt lacks: the separate operators run, with their bits, and cuBLASLt is not asked again. */
static void test_epilogues_refused(void **state) {
    static const int statuses[] = {CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE};
    static const mt_epilogue options[] = {MT_EPILOGUE_FUSED, MT_EPILOGUE_MEASURED};
    const sizes s = {16, 32, 24, 0};
    size_t mark = mt_arena_mark(separate);
    tensors want = tensors_of(separate, MT_BF16, MT_BF16, s);
    mt_tensor h = noise(separate, MT_BF16, s.tokens, s.in, 0, 11, 2.0f);
    (void)state;
    operators(separate, want, MT_GELU_TANH, 1, h);
    for (int i = 0; i < 8; i++) {
        mt_context *ctx = context_of(MT_DEVICE_CUDA, MT_GEMM_HEURISTIC, options[i / 4], (size_t)16 << 20);
        tensors t = tensors_of(ctx, MT_BF16, MT_BF16, s);
        mt_tensor h_in = noise(ctx, MT_BF16, s.tokens, s.in, 0, 11, 2.0f), again;
        long choices, count;
        mte::gemm_refuse(statuses[i % 2], i / 2 % 2);
        mte::gemm_time([](const mte::GemmCall &) { return (double)mte::gemm_count(); }); /* what runs first is faster */
        operators(ctx, t, MT_GELU_TANH, 1, h_in);
        assert_true(hash_of(ctx, t.y) == hash_of(separate, want.y) && hash_of(ctx, t.z) == hash_of(separate, want.z) &&
                    hash_of(ctx, t.h) == hash_of(separate, want.h) && hash_of(ctx, t.dh) == hash_of(separate, want.dh));
        assert_true(hash_of(ctx, t.dweight) == hash_of(separate, want.dweight) &&
                    hash_of(ctx, t.dbias) == hash_of(separate, want.dbias) &&
                    hash_of(ctx, t.dbias_in) == hash_of(separate, want.dbias_in));
        choices = mte::gemm_choices();
        mte::gemm_refuse(0, 0); /* a plan that was refused stays apart, although cuBLASLt would now run it */
        OK(ctx, mt_arena_tensor(ctx, MT_BF16, s.tokens, s.out, &again));
        count = mte::gemm_count();
        OK(ctx, mt_linear_forward(ctx, t.x, t.weight, t.bias, again));
        OK(ctx, mt_context_synchronize(ctx)); /* the stand-in counts a product when it runs */
        assert_true(mte::gemm_count() == count + 1 && mte::gemm_choices() == choices);
        assert_true(mte::gemm_last().epilogue == CUBLASLT_EPILOGUE_DEFAULT);
        assert_true(hash_of(ctx, again) == hash_of(separate, want.z));
        mt_context_destroy(ctx);
    }
    mte::gemm_time(nullptr);
    mt_arena_release(separate, mark);
}

/* Another error of a product with an epilogue is an error. */
static void test_epilogues_failing(void **state) {
    size_t mark = mt_arena_mark(fused);
    tensors t = tensors_of(fused, MT_BF16, MT_BF16, {16, 40, 24, 0});
    (void)state;
    mte::gemm_fail([](const mte::GemmCall &) { return true; });
    ASSERT_STATUS(fused, MT_ERR_SYSTEM, mt_linear_forward(fused, t.x, t.weight, t.bias, t.y));
    mte::gemm_fail(nullptr);
    assert_non_null(strstr(mt_last_error(fused), "cublasLtMatmul: cuBLASLt status 13"));
    mt_arena_release(fused, mark);
}

static void test_epilogues_captured(void **state) {
    mt_context *ctx = context_of(MT_DEVICE_CUDA, MT_GEMM_MEASURED, MT_EPILOGUE_MEASURED, (size_t)16 << 20);
    sizes s = {24, 32, 40, 0};
    tensors t = tensors_of(ctx, MT_F32, MT_F32, s);
    (void)state;
    plain_is_slow = 1;
    start_noting();
    begin_capture(ctx);
    OK(ctx, mt_linear_forward(ctx, t.x, t.weight, t.bias, t.y));
    end_capture_and_launch(ctx);
    OK(ctx, mt_linear_forward(ctx, t.x, t.weight, t.bias, t.y));
    OK(ctx, mt_context_synchronize(ctx));
    assert_true(SEEN(CUBLASLT_EPILOGUE_DEFAULT) && !SEEN(CUBLASLT_EPILOGUE_BIAS));
    mte::gemm_time(nullptr);
    mt_context_destroy(ctx);
}
#endif

/* The largest arena use of operators with scratch memory. Every operand of the product must be copied. */
static size_t scratch_of(mt_context *ctx, int op) {
    mt_tensor a, b, c, stats, row, qkv, heads;
    mt_attention_desc desc;
    size_t mark = mt_arena_mark(ctx), peak;
    memset(&desc, 0, sizeof desc);
    desc.batch = 1, desc.seq = 40, desc.groups = 1, desc.heads_per_group = 1, desc.head_dim = 64;
    OK(ctx, mt_arena_tensor(ctx, MT_BF16, 80, 3 * 64, &qkv));
    OK(ctx, mt_arena_tensor(ctx, MT_BF16, 40, 2 * 64, &heads));
    OK(ctx, mt_fill(ctx, qkv, 0.5f));
    OK(ctx, mt_fill(ctx, heads, 0.5f));
    OK(ctx, mt_arena_tensor(ctx, MT_BF16, 40, 23, &a));
    OK(ctx, mt_arena_tensor(ctx, MT_F16, 23, 31, &b));
    OK(ctx, mt_arena_tensor(ctx, MT_BF16, 40, 31, &c));
    OK(ctx, mt_arena_tensor(ctx, MT_F32, 40, 2, &stats));
    OK(ctx, mt_arena_tensor(ctx, MT_F32, 1, 31, &row));
    OK(ctx, mt_fill(ctx, a, 0.5f));
    OK(ctx, mt_fill(ctx, b, 0.5f));
    OK(ctx, mt_fill(ctx, c, 0.5f));
    OK(ctx, mt_fill(ctx, stats, 0.5f));
    OK(ctx, mt_fill(ctx, row, 0.5f));
    mt_arena_reset_peak(ctx);
    if (op == 0) OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, a, b, 1.0f, c));
    if (op == 1) OK(ctx, mt_bias_backward(ctx, c, row));
    if (op == 2) OK(ctx, mt_sum(ctx, c, mt_tensor_cols(row, 0, 1)));
    if (op == 3)
        OK(ctx, mt_norm_backward(ctx, MT_LAYER_NORM, mt_tensor_cols(a, 0, 23), mt_tensor_cols(row, 0, 23), stats, a,
                                 mt_none(), mt_tensor_cols(c, 0, 23), mt_tensor_cols(row, 0, 23), mt_none()));
    if (op == 4) { /* on tensor cores */
        b = mt_tensor_make(stats.data, MT_F32, 1, 40);
        OK(ctx, mt_attention_backward(ctx, &desc, mt_tensor_rows(qkv, 0, 40), mt_tensor_cols(heads, 0, 64), b,
                                      mt_tensor_cols(heads, 64, 64), mt_tensor_rows(qkv, 40, 40)));
    }
    peak = mt_arena_peak(ctx) - mark;
    mt_arena_release(ctx, mark);
    return peak;
}

static void test_planned_scratch(void **state) {
    mt_context_desc where;
    mt_context *meta = NULL, *on_cpu = NULL;
    (void)state;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_META;
    OK(fused, mt_context_create(NULL, &where, &on_cpu));
    where.planned = MT_DEVICE_CUDA;
    OK(fused, mt_context_create(NULL, &where, &meta));
    for (int op = 0; op < 5; op++) {
        assert_int_equal(scratch_of(meta, op), scratch_of(separate, op));
        assert_int_equal(scratch_of(on_cpu, op), scratch_of(cpu, op));
        assert_int_equal(mt_arena_mark(meta), 0);
    }
    mt_context_destroy(on_cpu);
    mt_context_destroy(meta);
}

/* ---- more products than plans are kept --------------------------------------------------------------------------- */

#define PRODUCTS 600 /* of which 512 plans are kept */

static uint64_t small_product(mt_context *ctx, int64_t m) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor a = noise(ctx, MT_F32, m, 24, 0, 1, 1.0f), b = noise(ctx, MT_F32, 24, 8, 0, 2, 1.0f), c;
    OK(ctx, mt_arena_tensor(ctx, MT_F32, m, 8, &c));
    OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, a, b, 0.0f, c));
    uint64_t hash = hash_of(ctx, c);
    mt_arena_release(ctx, mark);
    return hash;
}

/* The plan that has not been used for the longest time is dropped; created again, it has the same bits. A plan that is
   used often is kept. */
static void test_more_products_than_plans(void **state) {
    static uint64_t hash[PRODUCTS + 1];
    mt_context *ctx = context_of(MT_DEVICE_CUDA, MT_GEMM_MEASURED, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
    (void)state;
    for (int64_t m = 1; m <= PRODUCTS; m++) {
        hash[m] = small_product(ctx, m);
        assert_true(small_product(ctx, 1) == hash[1]);
    }
#if defined(MT_CUDA_ENGINE)
    long before = mte::gemm_choices();
    small_product(ctx, 1);
    for (int64_t m = PRODUCTS; m > PRODUCTS - 511; m--) small_product(ctx, m);
    assert_int_equal(mte::gemm_choices(), before);
    small_product(ctx, PRODUCTS - 511);
    assert_int_equal(mte::gemm_choices(), before + 1);
#endif
    for (int64_t m = 1; m <= PRODUCTS; m++) assert_true(small_product(ctx, m) == hash[m]);
    mt_context_destroy(ctx);
}

#if defined(MT_CUDA_ENGINE)
/* Returns 1 if the epilogue was fused, 0 if it was separate. *count: number of products that ran. */
static int small_linear(mt_context *ctx, int64_t m, long *count) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor x = noise(ctx, MT_F32, m, 8, 0, 1, 1.0f), w = noise(ctx, MT_F32, 8, 8, 0, 2, 1.0f);
    mt_tensor bias = noise(ctx, MT_F32, 1, 8, 0, 3, 1.0f), y;
    OK(ctx, mt_arena_tensor(ctx, MT_F32, m, 8, &y));
    *count = -mte::gemm_count();
    OK(ctx, mt_linear_forward(ctx, x, w, bias, y));
    OK(ctx, mt_context_synchronize(ctx));
    *count += mte::gemm_count();
    mt_arena_release(ctx, mark);
    return mte::gemm_last().epilogue == CUBLASLT_EPILOGUE_BIAS;
}

/* The choice between fused and separate, which have different bits, is made once per context. */
static void test_a_measured_epilogue_stays(void **state) {
    mt_context *ctx = context_of(MT_DEVICE_CUDA, MT_GEMM_MEASURED, MT_EPILOGUE_MEASURED, (size_t)16 << 20);
    static int fused_before[PRODUCTS + 1];
    int fused_ones = 0;
    long ran;
    (void)state;
    mte::gemm_time(by_epilogue);
    for (int64_t m = 1; m <= PRODUCTS; m++) {
        plain_is_slow = m % 2 != 0;
        small_linear(ctx, m, &ran); /* the last product may have been a measurement */
        fused_before[m] = small_linear(ctx, m, &ran);
        assert_int_equal(ran, 1);
        assert_int_equal(fused_before[m], m <= 256 && m % 2);
        fused_ones += fused_before[m];
    }
    assert_int_equal(fused_ones, 128);
    for (int64_t m = 1; m <= PRODUCTS; m++) {
        plain_is_slow = m % 2 == 0;
        assert_int_equal(small_linear(ctx, m, &ran), fused_before[m]);
        assert_int_equal(ran, 1);
    }
    mte::gemm_time(nullptr);
    mt_context_destroy(ctx);
}

/* ---- a creation that fails once ---------------------------------------------------------------------------------- */

static int memory_is_short; /* 1: the next allocation fails */

static void *scarce_alloc(void *user, size_t bytes, size_t alignment) {
    void *memory = NULL;
    (void)user, (void)alignment;
    if (memory_is_short) return memory_is_short = 0, (void *)NULL;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}

static void scarce_free(void *user, void *memory, size_t bytes) {
    (void)user, (void)bytes;
    cudaFree(memory);
}

static mt_context *scarce_context(void) {
    mt_context_desc where;
    mt_gemm_options options;
    mt_context *ctx = NULL;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = (size_t)16 << 20;
    where.allocator.alloc = scarce_alloc;
    where.allocator.free = scarce_free;
    if (mt_context_create(NULL, &where, &ctx) != MT_SUCCESS) fail_msg("no context");
    memset(&options, 0, sizeof options);
    options.epilogue = MT_EPILOGUE_MEASURED;
    OK(ctx, mt_gemm_set_options(ctx, &options));
    return ctx;
}

/* Runs a product, with an epilogue or without. call: what fails, after so many calls; NULL: nothing. */
static mt_status product_after(mt_context *ctx, int epilogue, tensors t, const char *call, int after) {
    if (call && strcmp(call, "memory") == 0) memory_is_short = 1;
    else mte::cuda_fail_after(call, after, cudaErrorMemoryAllocation);
    return epilogue ? mt_linear_forward(ctx, t.x, t.weight, t.bias, t.y)
                    : mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, t.x, t.weight, 0.0f, t.y);
}

/* Returns 1 if the call failed. The products behind it are right, fused or separate as without an error. */
static int fails_once(int epilogue, const char *call, int after) {
    mt_context *ctx = scarce_context();
    sizes s = {epilogue ? 24 : 256, 8, epilogue ? 40 : 256, 0};
    size_t on_cpu = mt_arena_mark(cpu), used;
    tensors want = tensors_of(cpu, MT_F32, MT_F32, s), t = tensors_of(ctx, MT_F32, MT_F32, s);
    mt_status status;
    int failed;
    product_after(cpu, epilogue, want, NULL, 0);
    used = mt_arena_mark(ctx);
    mte::gemm_time(by_epilogue);
    plain_is_slow = 1;
    status = product_after(ctx, epilogue, t, call, after);
    failed = !memory_is_short && !mte::call_will_fail();
    memory_is_short = 0;
    mte::cuda_fail_after(NULL, 0, cudaSuccess);
    if (failed != (status != MT_SUCCESS)) fail_msg("%s %d: status %d", call, after, (int)status);
    assert_int_equal(mt_arena_mark(ctx), used);
    for (int i = 0; i < 2; i++) {
        OK(ctx, mt_fill(ctx, t.y, -1.0f));
        OK(ctx, product_after(ctx, epilogue, t, NULL, 0));
        OK(ctx, mt_context_synchronize(ctx));
        near(call, want.y, ctx, t.y, 64);
        if (epilogue && mte::gemm_last().epilogue != CUBLASLT_EPILOGUE_BIAS) fail_msg("%s %d: separate", call, after);
    }
    mte::gemm_time(nullptr);
    mt_context_destroy(ctx);
    mt_arena_release(cpu, on_cpu);
    return failed;
}

/* Whatever fails in the first product, the next ones work: what it creates is created completely or not at all. */
static void test_a_first_product_that_fails(void **state) {
    static const char *const calls[] = {"cublasLtCreate",
                                        "cublasLtMatmulDescCreate",
                                        "cublasLtMatrixLayoutCreate",
                                        "cublasLtMatmulPreferenceCreate",
                                        "cudaEventCreate",
                                        "cudaEventRecord",
                                        "cudaEventElapsedTime",
                                        "cudaStreamIsCapturing",
                                        "cudaStreamSynchronize",
                                        "a kernel launch"};
    (void)state;
    for (int epilogue = 0; epilogue < 2; epilogue++) {
        assert_true(fails_once(epilogue, "memory", 0));
        for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
            int after = 0;
            while (fails_once(epilogue, calls[i], after)) after += 1 + after / 2;
            if (after == 0) fail_msg("%s has not failed", calls[i]);
        }
    }
}

/* A recorded graph cannot allocate the workspace. */
static void test_a_first_product_in_a_graph(void **state) {
    mt_context *ctx = scarce_context();
    sizes s = {24, 32, 40, 0};
    tensors want = tensors_of(cpu, MT_F32, MT_F32, s), t = tensors_of(ctx, MT_F32, MT_F32, s);
    (void)state;
    for (int epilogue = 0; epilogue < 2; epilogue++) {
        product_after(cpu, epilogue, want, NULL, 0);
        OK(ctx, mt_graph_begin(ctx, NULL));
        if (epilogue == 0) ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, product_after(ctx, epilogue, t, NULL, 0));
        OK(ctx, mt_graph_end(ctx, NULL));
        OK(ctx, product_after(ctx, epilogue, t, NULL, 0));
        near("behind the graph", want.y, ctx, t.y, 64);
    }
    mt_context_destroy(ctx);
}
#endif

static int open_contexts(void **state) {
    (void)state;
    cpu = context_of(MT_DEVICE_CPU, MT_GEMM_MEASURED, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
    separate = context_of(MT_DEVICE_CUDA, MT_GEMM_HEURISTIC, MT_EPILOGUE_SEPARATE, (size_t)16 << 20);
    fused = context_of(MT_DEVICE_CUDA, MT_GEMM_HEURISTIC, MT_EPILOGUE_FUSED, (size_t)16 << 20);
    return 0;
}

static int close_contexts(void **state) {
    (void)state;
    mt_context_destroy(fused);
    mt_context_destroy(separate);
    mt_context_destroy(cpu);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_epilogues),
        cmocka_unit_test(test_what_is_fused),
        cmocka_unit_test(test_mixed),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_planned_scratch),
        cmocka_unit_test(test_measured_has_the_same_bits),
        cmocka_unit_test(test_more_products_than_plans),
#if defined(MT_CUDA_ENGINE)
        cmocka_unit_test(test_the_fastest_of_those_that_round_alike),
        cmocka_unit_test(test_a_candidate_that_fails),
        cmocka_unit_test(test_when_nothing_is_measured),
        cmocka_unit_test(test_epilogues_measured),
        cmocka_unit_test(test_epilogues_captured),
        cmocka_unit_test(test_epilogues_refused),
        cmocka_unit_test(test_epilogues_failing),
        cmocka_unit_test(test_a_measured_epilogue_stays),
        cmocka_unit_test(test_a_first_product_that_fails),
        cmocka_unit_test(test_a_first_product_in_a_graph),
#endif
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
