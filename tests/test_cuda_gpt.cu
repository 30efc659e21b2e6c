/* test_cuda_gpt.cu - trains a GPT, and a BERT, on 1, 2, 4 and 8 GPUs, or on ranks that share one, and compares losses,
   gradients and weights with the CPU's, in f32, bf16 and f16. In invariant mode all have the same bits.
     On GPUs:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_gpt.cu -lcublasLt    (and -DMT_USE_NCCL -lnccl)
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_gpt.h"

#if defined(MT_CUDA_ENGINE)
#include "runtime.h"

#include <map>
#include <string>
#endif

/* f32: losses agree within 1e-5 at every step, norms and weights within the rounding that 20 steps of AdamW amplify. */
static void assert_near(const gpt_run *r, const gpt_result *a, const gpt_result *b) {
    double worst = 0;
    for (int i = 0; i < GPT_STEPS; i++) {
        if (!(fabs(a->loss[i] - b->loss[i]) <= 1e-5 * a->loss[i]))
            fail_msg("%s: step %d: loss %.9g, on the CPU %.9g", gpt_name(r), i, (double)b->loss[i], (double)a->loss[i]);
        if (!(fabs(a->norm[i] - b->norm[i]) <= 1e-4 * a->norm[i]))
            fail_msg("%s: step %d: norm %.9g, on the CPU %.9g", gpt_name(r), i, (double)b->norm[i], (double)a->norm[i]);
    }
    assert_int_equal(a->count, b->count);
    for (int64_t i = 0; i < a->count; i++)
        worst = test_larger(worst, fabs((double)a->weights[i] - (double)b->weights[i]));
    if (!(worst <= 2e-3)) fail_msg("%s: a weight is off by %g", gpt_name(r), worst);
}

/* tensor, data, sequence parallel */
static const int splits[][3] = {{1, 1, 0}, {2, 1, 0}, {4, 1, 1}, {8, 1, 0}, {2, 2, 1}, {1, 4, 0}};
#define SPLITS (sizeof splits / sizeof *splits)

static gpt_run run_of(mt_device device, mt_dtype dtype, size_t split, int invariant, int llama) {
    gpt_run r;
    memset(&r, 0, sizeof r);
    r.device = device;
    r.dtype = dtype;
    r.tp = splits[split][0];
    r.data = splits[split][1];
    r.sequence_parallel = splits[split][2];
    r.invariant = invariant;
    r.llama = llama;
    r.loss_scale = dtype == MT_F16 ? 1024.0f : 0.0f;
    return r;
}

/* The arena size that a meta context computes for a device is the peak of rank 0 there. */
static void assert_planned(gpt_run r, const gpt_result *found) {
    static gpt_result plan;
    mt_comm *world = NULL;
    mt_status status;
    memset(&plan, 0, sizeof plan);
    r.planned = r.device;
    r.device = MT_DEVICE_META;
    r.out = &plan;
    assert_int_equal(mt_comm_create_meta(r.tp * r.data * (r.pipeline ? r.pipeline : 1), 0, &world), MT_SUCCESS);
    status = gpt_rank(world, &r);
    if (status != MT_SUCCESS) fail_msg("a plan for %s: %s", gpt_name(&r), mt_comm_last_error(world));
    mt_comm_destroy(world);
    if (plan.arena_peak != found->arena_peak)
        fail_msg("%s on device %d: an arena of %zu bytes was planned, %zu were used", gpt_name(&r), (int)r.planned,
                 plan.arena_peak, found->arena_peak);
}

static void test_training_as_on_the_cpu(void **state) {
    static gpt_result on_cpu, on_gpu;
    (void)state;
    for (int llama = 0; llama < 2; llama++) {
        gpt_execute(run_of(MT_DEVICE_CPU, MT_F32, 0, 0, llama), &on_cpu);
        assert_true(on_cpu.loss[GPT_STEPS - 1] < on_cpu.loss[0]);
        assert_planned(run_of(MT_DEVICE_CPU, MT_F32, 0, 0, llama), &on_cpu);
        for (size_t i = 0; i < SPLITS; i++) {
            gpt_run r = run_of(MT_DEVICE_CUDA, MT_F32, i, 0, llama);
            gpt_execute(r, &on_gpu);
            assert_near(&r, &on_cpu, &on_gpu);
            assert_planned(r, &on_gpu);
        }
    }
}

/* Steps whose numbers are in the GPU's memory have the bits of steps that the host decides, also those with
   mt_params_zero_grad_lazy. */
static void test_steps_on_the_gpu(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    static gpt_result host, device;
    (void)state;
    for (int i = 0; i < 6; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, types[i % 3], i < 3 ? 0 : 4, i < 3 ? 0 : 8, i % 2);
        if (r.dtype == MT_F16) r.loss_scale = 67108864.0f; /* overflows at first */
        r.stochastic = i == 4;
        gpt_execute(r, &host);
        if (r.dtype == MT_F16 && host.scaler.skipped == 0) fail_msg("no step was skipped");
        r.on_device = r.lazy = 1;
        gpt_execute(r, &device);
        if (memcmp(&host, &device, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits on the GPU", gpt_name(&r));
        if (r.invariant == 0) assert_planned(r, &device);
        r.graph = 1;
        gpt_execute(r, &device);
        if (memcmp(&host, &device, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits as a graph", gpt_name(&r));
    }
}

/* Forward also computes the gradient of the loss: near the CPU's results of two passes, in the planned arena; in
   invariant mode the bits of two passes, in an arena that is not larger. */
static void test_loss_in_one_pass(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    static gpt_result want, got;
    (void)state;
    for (int i = 0; i < 8; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, types[i % 3], (size_t)i % 3, i < 5 ? 0 : 8, i % 2), c = r;
        r.pipeline = c.pipeline = i == 3 || i == 7 ? 2 : 1;
        r.padded_vocab = i == 4 ? 48 : 0;
        r.on_device = i == 2 || i == 5; /* the loss scale is read by forward */
        c.device = i < 5 ? MT_DEVICE_CPU : MT_DEVICE_CUDA;
        gpt_execute(c, &want);
        r.one_pass = 1;
        gpt_execute(r, &got);
        if (i < 5) assert_planned(r, &got);
        else if (memcmp(&want, &got, GPT_SAME_BYTES) != 0 || got.arena_peak > want.arena_peak)
            fail_msg("%s: other bits, or more memory, than in two passes", gpt_name(&r));
        if (r.dtype == MT_F32) assert_near(&r, &want, &got);
        else gpt_assert_near(&r, &want, &got, gpt_half_error(r.dtype));
    }
}

/* A vocabulary with padding of the program's: near the CPU's results without padding, and what is in the padding does
   not change a bit. */
static void test_padded_vocabulary(void **state) {
    static gpt_result on_cpu, on_gpu, with_junk;
    static const int ways[] = {0, 1, 2}; /* index into splits */
    (void)state;
    for (int i = 0; i < 3; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, i == 1 ? MT_BF16 : MT_F32, (size_t)ways[i], 0, i == 2), c = r;
        c.device = MT_DEVICE_CPU;
        r.padded_vocab = 48;
        gpt_execute(c, &on_cpu);
        gpt_execute(r, &on_gpu);
        if (r.dtype == MT_F32) assert_near(&r, &on_cpu, &on_gpu);
        else gpt_assert_near(&r, &on_cpu, &on_gpu, gpt_half_error(r.dtype));
        assert_planned(r, &on_gpu);
        r.junk = 100.0f;
        gpt_execute(r, &with_junk);
        if (memcmp(&on_gpu, &with_junk, GPT_SAME_BYTES) != 0)
            fail_msg("%s: the padding changes the results", gpt_name(&r));
    }
}

#if defined(MT_CUDA_ENGINE)
/* Runs r. *launched = the launches of each kernel, *products = the number of products. */
static void run_and_count(gpt_run r, gpt_result *out, std::map<std::string, long> *launched, long *products) {
    launched->clear();
    *products = -mte::gemm_count();
    mte::on_launch([launched](const char *name) { ++(*launched)[name]; });
    gpt_execute(r, out);
    mte::on_launch({});
    *products += mte::gemm_count();
}

/* With an odd vocabulary, or an odd shard of it, a step launches the kernels of an even one: nothing is copied because
   rows are not aligned, and all kernels move 16 bytes at a time. The arena differs only in the logits of a sequence. */
static void test_odd_vocabulary(void **state) {
    static gpt_result on_cpu, even, odd;
    std::map<std::string, long> kernels_even, kernels_odd;
    long products_even, products_odd;
    (void)state;
    for (int i = 0; i < 4; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, i % 2 ? MT_BF16 : MT_F32, (size_t)i / 2, 0, i == 2), c;
        r.ffn = 64;
        r.vocab = 256 * r.tp;
        run_and_count(r, &even, &kernels_even, &products_even);
        r.vocab++;
        run_and_count(r, &odd, &kernels_odd, &products_odd);
        for (const auto &k : kernels_odd)
            if (k.second != kernels_even[k.first])
                fail_msg("%s: %ld launches of %s, with an even vocabulary %ld", gpt_name(&r), k.second, k.first.c_str(),
                         kernels_even[k.first]);
        assert_true(kernels_odd == kernels_even && products_odd == products_even);
        assert_true(odd.arena_peak - even.arena_peak <= GPT_SEQ * 64 * mt_dtype_size(r.dtype));
        assert_planned(r, &odd);
        c = r;
        c.device = MT_DEVICE_CPU;
        gpt_execute(c, &on_cpu);
        if (r.dtype == MT_F32) assert_near(&r, &on_cpu, &odd);
        else gpt_assert_near(&r, &on_cpu, &odd, gpt_half_error(r.dtype));
    }
}
#endif

/* Products with epilogues give the same model. On the CPU, which always runs separate operators, the bits are the
   same. */
static void test_epilogues(void **state) {
    static gpt_result on_cpu, on_gpu, apart;
    static const int ways[][2] = {
        {MT_EPILOGUE_FUSED, 0}, {MT_EPILOGUE_MEASURED, 1}, {MT_EPILOGUE_FUSED, 2}}; /* index into splits */
    (void)state;
    for (int i = 0; i < 3; i++) {
        gpt_run r = run_of(MT_DEVICE_CPU, MT_F32, 0, 0, 0);
        r.ffn = 64;
        if (i == 0) {
            gpt_execute(r, &apart);
            r.epilogue = (mt_epilogue)ways[i][0];
            gpt_execute(r, &on_cpu);
            assert_true(memcmp(&on_cpu, &apart, GPT_SAME_BYTES) == 0);
        }
        r = run_of(MT_DEVICE_CUDA, MT_F32, (size_t)ways[i][1], 0, 0);
        r.ffn = 64;
        r.epilogue = (mt_epilogue)ways[i][0];
        gpt_execute(r, &on_gpu);
        assert_near(&r, &on_cpu, &on_gpu);
    }
}

/* The expected difference in bf16 and f16 with loss scaling. Both backends round nearly the same floats: sums of up to
   64 products in another order differ by about 2^-22. Neighbours are 2 u apart. The middle between two neighbours lies
   between the two floats in 2^-22 / 2 u of all cases, and then the results are neighbours. NCCL rounds a sum over n
   ranks n - 1 times, the library once: this adds n roundings in each of ten sums, two per layer and one for the
   embedding or the head, forward and backward. */
static double backend_error(const gpt_run *r) {
    double u = gpt_roundoff(r->dtype), gap = 2 * u, error = sqrt(GPT_ROUNDINGS * ldexp(1, -22) / gap) * gap;
#if defined(MT_USE_NCCL)
    if (r->tp > 1) error = sqrt(error * error + 10 * r->tp * u * u);
#endif
    return error;
}

static void test_16bit_as_on_the_cpu(void **state) {
    static gpt_result on_cpu, on_gpu;
    (void)state;
    for (int dtype = MT_BF16; dtype <= MT_F16; dtype++)
        for (size_t i = 0; i < SPLITS; i++) {
            gpt_run r = run_of(MT_DEVICE_CUDA, (mt_dtype)dtype, i, 0, (int)(i + (size_t)dtype) % 2), c = r;
            c.device = MT_DEVICE_CPU;
            gpt_execute(c, &on_cpu);
            gpt_execute(r, &on_gpu);
            gpt_assert_near(&r, &on_cpu, &on_gpu, backend_error(&r));
            assert_true(on_cpu.loss[GPT_STEPS - 1] < on_cpu.loss[0]);
            assert_int_equal(on_gpu.scaler.skipped, 0);
            assert_int_equal(on_gpu.count, on_cpu.count);
            assert_planned(c, &on_cpu);
            assert_planned(r, &on_gpu);
        }
}

/* Heads of 64 features: attention runs on tensor cores, which also round probabilities to 16 bits. */
static void test_attention_on_tensor_cores(void **state) {
    static gpt_result on_cpu, on_gpu;
    (void)state;
    for (int dtype = MT_BF16; dtype <= MT_F16; dtype++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, (mt_dtype)dtype, dtype == MT_F16, 0, 0), c;
        r.wide = 1;
        r.qkv_layout = dtype == MT_F16 ? MT_QKV_CONCATENATED : MT_QKV_PER_GROUP;
        c = r;
        c.device = MT_DEVICE_CPU;
        gpt_execute(c, &on_cpu);
        gpt_execute(r, &on_gpu);
        gpt_assert_near(&r, &on_cpu, &on_gpu, gpt_half_error(r.dtype));
        assert_planned(r, &on_gpu);
    }
}

/* Windows, soft caps, packed documents, ALiBi, a bias and a boolean mask in the model, on 1 and 2 ranks. Heads of 64
   features in 16 bits are on tensor cores, if neither ALiBi nor a bias or mask needs the plain kernels. */
static void test_scores(void **state) {
    static const struct {
        int scores, split, llama, wide;
        mt_dtype dtype;
    } ways[] = {{1, 0, 0, 0, MT_F32},  {1, 1, 1, 0, MT_F32}, {1, 0, 0, 1, MT_BF16}, {1, 1, 0, 0, MT_BF16},
                {2, 0, 0, 0, MT_F32},  {2, 1, 0, 1, MT_F16}, {3, 0, 0, 0, MT_F32},  {3, 1, 0, 0, MT_F32},
                {3, 0, 0, 0, MT_BF16}, {3, 1, 0, 0, MT_BF16}};
    static gpt_result on_cpu, on_gpu;
    (void)state;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, ways[i].dtype, (size_t)ways[i].split, 0, ways[i].llama), c;
        r.scores = ways[i].scores;
        r.wide = ways[i].wide;
        c = r;
        c.device = MT_DEVICE_CPU;
        gpt_execute(c, &on_cpu);
        gpt_execute(r, &on_gpu);
        if (r.dtype == MT_F32) assert_near(&r, &on_cpu, &on_gpu);
        else gpt_assert_near(&r, &on_cpu, &on_gpu, r.wide ? gpt_half_error(r.dtype) : backend_error(&r));
        assert_planned(r, &on_gpu);
    }
}

/* Runs r on the GPU, and on the CPU, to which the results are compared, and the memory to the plan. */
static void execute_beside_cpu(const gpt_run *r, gpt_result *on_cpu, gpt_result *on_gpu) {
    gpt_run c = *r;
    c.device = MT_DEVICE_CPU;
    gpt_execute(c, on_cpu);
    gpt_execute(*r, on_gpu);
    assert_near(r, on_cpu, on_gpu);
    assert_planned(*r, on_gpu);
}

/* Tokens in chunks, with communication beside products or not, give the same bits, and the CPU's results for the same
   chunks. The two streams run concurrently. */
static void test_overlap(void **state) {
    static gpt_result on_cpu, beside, apart;
    static const int ways[] = {1, 2, 4, 5}; /* index into splits */
    (void)state;
    for (int i = 0; i < 4; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, MT_F32, (size_t)ways[i], 0, i % 2);
        r.overlap_chunks = 3;
        execute_beside_cpu(&r, &on_cpu, &beside);
        for (int off = 1; off <= MT_OVERLAP_ALL; off += 3) {
            r.no_overlap = off;
            gpt_execute(r, &apart);
            if (memcmp(&beside, &apart, GPT_SAME_BYTES) != 0)
                fail_msg("%s: other bits with no_overlap %d", gpt_name(&r), off);
        }
        if (i > 1) continue;
        r.dtype = MT_BF16;
        gpt_execute(r, &apart);
        r.no_overlap = 0;
        gpt_execute(r, &beside);
        if (memcmp(&beside, &apart, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits without overlap", gpt_name(&r));
    }
}

/* The halves of a batch in turn: the reductions of one half beside the products of the other one, or not, have the same
   bits, in training and where backward runs forward again; and the CPU's results. */
static void test_interleaved_halves(void **state) {
    static gpt_result on_cpu, beside, apart;
    (void)state;
    for (int i = 0; i < 2; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, MT_F32, 1, 0, i);
        r.interleave = 1;
        r.recompute = i == 1 ? MT_RECOMPUTE_FULL : MT_RECOMPUTE_NONE;
        execute_beside_cpu(&r, &on_cpu, &beside);
        r.no_overlap = MT_OVERLAP_ROW_FORWARD | MT_OVERLAP_COLUMN_BACKWARD;
        gpt_execute(r, &apart);
        if (memcmp(&beside, &apart, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits without overlap", gpt_name(&r));
    }
}

/* Gradients in buckets, reduced during the backward or after it, with the optimizer sharded or not: the bits of a
   run without these on one GPU; with NCCL, the same bits during or after; near the CPU's results; and the planned
   memory. */
static void test_data_parallel(void **state) {
    static gpt_result on_cpu, plain, beside, apart;
    static const int ways[][2] = {{4, MT_F32}, {5, MT_BF16}}; /* index into splits, and type */
    (void)state;
    for (int i = 0; i < 4; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, (mt_dtype)ways[i / 2][1], (size_t)ways[i / 2][0], 0, i / 2 % 2), c = r;
        c.device = MT_DEVICE_CPU;
        r.clip = c.clip = 1e9f; /* the coefficient does not depend on the order in which the norm is summed */
        if (i % 2 == 0) gpt_execute(c, &on_cpu);
        if (i % 2 == 0) gpt_execute(r, &plain);
        r.begins = 1;
        r.share.bucket_bytes = 4096;
        r.share.sharded_optimizer = i % 2;
        gpt_execute(r, &beside);
        if (r.dtype == MT_F32) assert_near(&r, &on_cpu, &beside);
        else gpt_assert_near(&r, &on_cpu, &beside, backend_error(&r));
        assert_planned(r, &beside);
        r.no_overlap = MT_OVERLAP_GRADIENTS;
        gpt_execute(r, &apart);
        if (memcmp(&beside, &apart, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits without overlap", gpt_name(&r));
#if !defined(MT_USE_NCCL) /* with NCCL, the order of additions depends on the call */
        if (memcmp(plain.weights, beside.weights, sizeof plain.weights) != 0 ||
            memcmp(plain.masters, beside.masters, sizeof plain.masters) != 0)
            fail_msg("%s: other bits in buckets, sharded %d", gpt_name(&r), i % 2);
#endif
    }
}

/* Parameters, gradients and the optimizer's state in memory of the test, with and without gaps: the bits of the
   registry's memory, with buckets that are summed during the backward. On a GPU, products of parameters that are not
   aligned may have other bits, but not in invariant mode. */
static void test_data_parallel_in_bound_memory(void **state) {
    static gpt_result own, bound;
    static const int ways[] = {31, 3 | GPT_BOUND_FILLED, 31 | GPT_BOUND_GAPS, 3 | GPT_BOUND_GAPS,
                               31 | GPT_BOUND_ONE | GPT_BOUND_FILLED};
    (void)state;
    for (int i = 0; i < 5; i++) { /* the last one binds the state of 16-bit parameters, too */
        gpt_run r = run_of(MT_DEVICE_CUDA, i % 2 || i == 4 ? MT_BF16 : MT_F32, i < 2 ? 4 : 2 + (size_t)i % 2 * 3,
                           i < 2 ? 0 : 8, 0);
        r.wide = i < 2;
        r.begins = 1;
        r.share.bucket_bytes = 4096;
        r.share.sharded_optimizer = i % 2;
        gpt_execute(r, &own);
        r.bound = ways[i];
        gpt_execute(r, &bound);
        if (memcmp(&own, &bound, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits with bound %d", gpt_name(&r), r.bound);
    }
}

/* Memory that the GPU cannot use is refused before a kernel gets it. */
static void test_host_memory_is_refused(void **state) {
    static float host[6];
    mt_comm *world = NULL;
    mt_context *ctx = NULL;
    mt_context_desc where;
    mt_param_desc desc;
    mt_params_memory m;
    mt_params *params = NULL;
    mt_param *p = NULL;
    mt_grid grid;
    int pageable = 0;
    (void)state;
    memset(&where, 0, sizeof where);
    memset(&desc, 0, sizeof desc);
    memset(&m, 0, sizeof m);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 1 << 16;
    desc.name = "w";
    desc.rows = 2;
    desc.cols = 3;
    m.values = host;
    m.elements = 6;
    assert_int_equal(mt_comm_create_local(1, 0, &world), MT_SUCCESS);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_grid_create(world, NULL, &grid));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_create(world, &where, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_create(ctx, &grid, &params));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_add(ctx, params, &desc, &p));
    assert_int_equal(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0), cudaSuccess);
    if (!pageable) {
        ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_params_bind(ctx, params, &m));
        assert_non_null(strstr(mt_last_error(ctx), "mt_params_bind: values is memory of the host"));
        ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_param_bind(ctx, p, &m));
        assert_null(p->value.data);
    }
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_init(ctx, params, 1));
    mt_params_destroy(params);
    mt_context_destroy(ctx);
    mt_grid_destroy(&grid);
    mt_comm_destroy(world);
}

/* Runs one rank in invariant mode, once for each type and model. */
static const gpt_result *one_rank(mt_dtype dtype, int llama) {
    static gpt_result one[2][GPT_BERT + 2];
    static int done[2][GPT_BERT + 2];
    int i = dtype != MT_F32;
    if (!done[i][llama]) gpt_execute(run_of(MT_DEVICE_CUDA, dtype, 0, 8, llama), &one[i][llama]);
    done[i][llama] = 1;
    return &one[i][llama];
}

static void assert_bits_of_one_rank(const gpt_run *r, const gpt_result *found) {
    const gpt_result *one = one_rank(r->dtype, r->llama);
    if (memcmp(one, found, GPT_SAME_BYTES) != 0)
        fail_msg("%s%s: other bits than on one rank", gpt_name(r), r->share.sharded_optimizer ? ", sharded" : "");
}

/* Four tensor ranks that share one key and one value: near the CPU's results; in invariant mode the bits of one
   rank. */
static void test_copies(void **state) {
    static gpt_result on_cpu, on_gpu, one;
    (void)state;
    for (int i = 0; i < 2; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, i ? MT_BF16 : MT_F32, 0, 0, 1), c;
        r.tp = 4;
        r.kv_heads = 1;
        r.qkv_layout = i ? MT_QKV_SEPARATE : MT_QKV_PER_GROUP;
        c = r;
        c.device = MT_DEVICE_CPU;
        gpt_execute(c, &on_cpu);
        gpt_execute(r, &on_gpu);
        gpt_assert_near(&r, &on_cpu, &on_gpu, backend_error(&r));
        assert_planned(r, &on_gpu);
        if (i) continue;
        r.invariant = 8;
        gpt_execute(r, &on_gpu);
        r.tp = 1;
        gpt_execute(r, &one);
        if (memcmp(&one, &on_gpu, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits than on four ranks", gpt_name(&r));
    }
}

/* Two stages, and 2 x 2 x 2 ranks, with both schedules and recomputation: near the CPU's results, in the planned arena;
   in invariant mode the bits of one rank. */
static void test_pipeline(void **state) {
    static gpt_result on_cpu, on_gpu;
    (void)state;
    for (int i = 0; i < 4; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, i == 3 ? MT_BF16 : MT_F32, i == 1 ? 4 : 0, 0, i == 2), c;
        r.pipeline = 2;
        r.schedule = i % 2 ? MT_SCHEDULE_GPIPE : MT_SCHEDULE_1F1B;
        r.recompute = (mt_recompute)(i % 3);
        r.qkv_layout = i >= 2 ? MT_QKV_SEPARATE : MT_QKV_PER_GROUP;
        c = r;
        c.device = MT_DEVICE_CPU;
        gpt_execute(c, &on_cpu);
        gpt_execute(r, &on_gpu);
        if (i < 3) assert_near(&r, &on_cpu, &on_gpu);
        else gpt_assert_near(&r, &on_cpu, &on_gpu, backend_error(&r));
        assert_planned(r, &on_gpu);
        if (i > 1) continue;
        r.invariant = 8;
        gpt_execute(r, &on_gpu);
        assert_bits_of_one_rank(&r, &on_gpu);
    }
}

/* All options together still give the bits of one rank. */
static void invariant_data_parallel(mt_dtype dtype) {
    static gpt_result many;
    gpt_run r = run_of(MT_DEVICE_CUDA, dtype, 4, 8, 0);
    r.begins = r.share.sharded_optimizer = 1;
    r.share.bucket_bytes = 4096;
    gpt_execute(r, &many);
    assert_bits_of_one_rank(&r, &many);
}

/* Each split in both types and with both models, but not in all combinations. */
static void test_invariant_mode(void **state) {
    static gpt_result many;
    (void)state;
    invariant_data_parallel(MT_F32);
    for (size_t i = 1; i < SPLITS; i++)
        for (size_t half = 0; half < 2; half++) {
            gpt_run r = run_of(MT_DEVICE_CUDA, half ? MT_BF16 : MT_F32, i, 8, (int)((i / 2 + half) % 2));
            if (!test_takes(i + half, 2)) continue;
            gpt_execute(r, &many);
            assert_bits_of_one_rank(&r, &many);
        }
}

/* ---- BERT -------------------------------------------------------------------------------------------------------- */

/* Training as on the CPU, in the planned arena, on several GPUs, with sequence parallelism and on two stages. Steps
   whose numbers are in the GPU's memory, and those of a graph, have the same bits as others. */
static void test_bert_as_on_the_cpu(void **state) {
    static const struct {
        size_t split;
        int pipeline;
        mt_dtype dtype;
    } ways[] = {{0, 1, MT_F32}, {1, 1, MT_F32}, {2, 1, MT_F32}, {4, 2, MT_F32}, {1, 1, MT_BF16}, {2, 2, MT_BF16}};
    static gpt_result on_cpu, on_gpu, stepped;
    (void)state;
    for (int i = 0; i < 12; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, ways[i % 6].dtype, ways[i % 6].split, 0, GPT_BERT + i / 6), c;
        if (!test_takes((size_t)(i + i / 6), 2)) continue;
        r.pipeline = ways[i % 6].pipeline;
        r.one_pass = i / 6;
        c = r;
        c.device = MT_DEVICE_CPU;
        gpt_execute(c, &on_cpu);
        gpt_execute(r, &on_gpu);
        if (r.dtype == MT_F32) assert_near(&r, &on_cpu, &on_gpu);
        else gpt_assert_near(&r, &on_cpu, &on_gpu, backend_error(&r));
        assert_true(on_cpu.loss[GPT_STEPS - 1] < on_cpu.loss[0]);
        assert_planned(r, &on_gpu);
        if (i % 6 != 2) continue;
        r.on_device = 1;
        for (r.graph = 0; r.graph < 2; r.graph++) {
            gpt_execute(r, &stepped);
            if (memcmp(&on_gpu, &stepped, GPT_SAME_BYTES) != 0)
                fail_msg("%s: other bits with on_device, graph %d", gpt_name(&r), r.graph);
        }
    }
}

static void test_bert_invariant(void **state) {
    static const struct {
        size_t split;
        int pipeline;
    } ways[] = {{1, 1}, {2, 1}, {4, 1}, {0, 2}, {4, 2}};
    static gpt_result many;
    (void)state;
    for (int i = 0; i < 10; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, i % 3 ? MT_F32 : MT_BF16, ways[i % 5].split, 8, GPT_BERT + i / 5);
        if (!test_takes((size_t)(i + i / 5), 2)) continue;
        r.pipeline = ways[i % 5].pipeline;
        r.recompute = (mt_recompute)(i % 3);
        gpt_execute(r, &many);
        assert_bits_of_one_rank(&r, &many);
    }
}

/* All sequences in one call. The results of rank 0. */
typedef struct whole_batch {
    gpt_run r;
    float lm[GPT_BATCH * GPT_SEQ], sop[GPT_BATCH], logits[GPT_BATCH * GPT_SEQ * GPT_VOCAB], sop_logits[GPT_BATCH * 2];
    float grads[GPT_MAX_FLOATS];
    int64_t n[128]; /* elements of each parameter */
    int count;
} whole_batch;

/* Uploads ids, targets, token types, sentence orders and lengths, one after the other. */
static mt_status load_whole_batch(gpt_worker *w, int32_t **ids) {
    enum { TOKENS = GPT_BATCH * GPT_SEQ };
    int32_t host[3 * TOKENS + 2 * GPT_BATCH];
    void *memory;
    uint64_t seed = 3;
    for (int i = 0; i < TOKENS; i++) {
        host[i] = (int32_t)test_below(&seed, GPT_VOCAB);
        host[TOKENS + i] = i % 3 ? (int32_t)test_below(&seed, GPT_VOCAB) : -100;
        host[2 * TOKENS + i] = (i + i / GPT_SEQ) / 3 % 2;
    }
    for (int i = 0; i < GPT_BATCH; i++) {
        host[3 * TOKENS + i] = i == 2 ? -100 : i % 2;
        host[3 * TOKENS + GPT_BATCH + i] = GPT_SEQ - i;
    }
    MT_TRY(mt_arena_alloc(w->ctx, sizeof host, &memory));
    *ids = (int32_t *)memory;
    return mt_upload(w->ctx, host, mt_tensor_make(memory, MT_I32, 1, 3 * TOKENS + 2 * GPT_BATCH));
}

static mt_status keep_whole_gradients(gpt_worker *w, whole_batch *out) {
    int64_t at = 0;
    for (int i = 0; i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        int64_t n = p->desc.rows * p->desc.cols;
        float *x = (float *)malloc((size_t)n * sizeof *x);
        mt_status status = x ? mt_param_gather(w->ctx, w->params, p, p->grad, x) : MT_ERR_MEMORY;
        if (status == MT_SUCCESS && mt_comm_rank(w->world) == 0) {
            memcpy(out->grads + at, x, (size_t)n * sizeof *x);
            out->n[i] = n;
            out->count = i + 1;
        }
        free(x);
        MT_TRY(status);
        at += n;
    }
    return MT_SUCCESS;
}

static mt_status run_whole_batch(gpt_worker *w, whole_batch *out) {
    enum { TOKENS = GPT_BATCH * GPT_SEQ };
    mt_batch batch = gpt_batch_of(w, 0);
    int first = mt_comm_rank(w->world) == 0;
    float skipped[TOKENS * GPT_VOCAB];
    mt_tensor lm, sop, logits, sop_logits;
    int32_t *ids;
    MT_TRY(load_whole_batch(w, &ids));
    batch.sequences = GPT_BATCH;
    batch.token_types = ids + 2 * TOKENS;
    batch.lengths = ids + 3 * TOKENS + GPT_BATCH;
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, 1, TOKENS, &lm));
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, 1, GPT_BATCH, &sop));
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, TOKENS, GPT_VOCAB, &logits));
    MT_TRY(mt_arena_tensor(w->ctx, MT_F32, GPT_BATCH, 2, &sop_logits));
    MT_TRY(mt_bert_forward(w->ctx, &w->bert, &batch, ids, ids + TOKENS, ids + 3 * TOKENS, lm, sop, &w->bert_saved[0]));
    MT_TRY(mt_bert_backward(w->ctx, &w->bert, 0.1f, 0.7f, &w->bert_saved[0]));
    MT_TRY(mt_sync_gradients(w->ctx, w->params));
    MT_TRY(mt_bert_logits(w->ctx, &w->bert, &batch, ids, logits, sop_logits));
    MT_TRY(mt_download(w->ctx, lm, first ? out->lm : skipped));
    MT_TRY(mt_download(w->ctx, sop, first ? out->sop : skipped));
    MT_TRY(mt_download(w->ctx, logits, first ? out->logits : skipped));
    MT_TRY(mt_download(w->ctx, sop_logits, first ? out->sop_logits : skipped));
    return keep_whole_gradients(w, out);
}

static mt_status whole_batch_rank(mt_comm *world, void *user) {
    whole_batch *out = (whole_batch *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, &out->r, &w);
    if (status == MT_SUCCESS) status = run_whole_batch(&w, out);
    gpt_close(&w);
    return status;
}

/* Checks that n floats differ by at most 1e-5 of the largest of them. */
static void assert_close(const gpt_run *r, const char *what, const float *want, const float *got, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs((double)want[i]));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= 1e-5 * most))
            fail_msg("%s: %s[%lld] is %.9g, on the CPU %.9g", gpt_name(r), what, (long long)i, (double)got[i],
                     (double)want[i]);
}

/* Several sequences in a call, whose first tokens the pooler takes: losses, logits and gradients of both heads. */
static void test_bert_whole_batch(void **state) {
    static whole_batch on_cpu, on_gpu;
    (void)state;
    for (int llama = GPT_BERT; llama < GPT_BERT + 2; llama++) {
        memset(&on_cpu, 0, sizeof on_cpu);
        on_cpu.r = run_of(MT_DEVICE_CPU, MT_F32, 0, 0, llama);
        gpt_launch(&on_cpu.r, whole_batch_rank, &on_cpu);
        for (size_t split = 0; split < 3; split++) {
            const gpt_run *r = &on_gpu.r;
            int64_t at = 0;
            memset(&on_gpu, 0, sizeof on_gpu);
            on_gpu.r = run_of(MT_DEVICE_CUDA, MT_F32, split, 0, llama);
            gpt_launch(&on_gpu.r, whole_batch_rank, &on_gpu);
            assert_close(r, "lm_loss", on_cpu.lm, on_gpu.lm, GPT_BATCH * GPT_SEQ);
            assert_close(r, "sop_loss", on_cpu.sop, on_gpu.sop, GPT_BATCH);
            assert_close(r, "lm_logits", on_cpu.logits, on_gpu.logits, GPT_BATCH * GPT_SEQ * GPT_VOCAB);
            assert_close(r, "sop_logits", on_cpu.sop_logits, on_gpu.sop_logits, 2 * GPT_BATCH);
            assert_int_equal(on_gpu.count, on_cpu.count);
            for (int i = 0; i < on_cpu.count; at += on_cpu.n[i++])
                assert_close(r, "a gradient", on_cpu.grads + at, on_gpu.grads + at, on_cpu.n[i]);
        }
    }
}

/* A micro-batch with a wrong token id (1000 at index 5) on the ranks of `where`, or a right one on the others. */
typedef struct wrong_id {
    gpt_run r;
    int only; /* the only rank with the wrong id; -1: all ranks */
    mt_status found[8];
} wrong_id;
static wrong_id *wrong;

static mt_status forward_with_a_wrong_id(mt_context *ctx, void *user, const mt_action *a, mt_tensor input,
                                         mt_tensor output) {
    gpt_worker *w = (gpt_worker *)user;
    int32_t ids[GPT_SEQ] = {0}, *on_device = w->ids + 2 * GPT_SEQ * a->micro_batch;
    int64_t sequence = w->grid.dp_rank * (GPT_BATCH / w->grid.dp_size) + a->micro_batch;
    mt_batch batch = gpt_batch_of(w, sequence);
    int here = wrong->only < 0 || wrong->only == mt_comm_rank(w->world);
    if (w->step != 1 || a->micro_batch != 1 || !here) return gpt_forward(ctx, user, a, input, output);
    MT_TRY(mt_upload(ctx, ids, mt_tensor_make(on_device + GPT_SEQ, MT_I32, 1, GPT_SEQ)));
    ids[5] = 1000;
    MT_TRY(mt_upload(ctx, ids, mt_tensor_make(on_device, MT_I32, 1, GPT_SEQ)));
    MT_TRY(mt_gpt_stage_forward(ctx, &w->gpt, &batch, on_device, on_device + GPT_SEQ, input, output,
                                mt_tensor_rows(w->losses, a->slot, 1), &w->saved[a->slot]));
    if (w->grid.pp_rank + 1 < w->grid.pp_size) return MT_SUCCESS;
    return mt_sum(ctx, mt_tensor_rows(w->losses, a->slot, 1), mt_tensor_rows(w->totals, a->micro_batch, 1));
}

/* Step 0 is good. Step 1 has the wrong id, and returns the error where it first waits. When all ranks have the error,
   step 2 is good again. */
static mt_status wrong_id_rank(mt_comm *world, void *user) {
    wrong_id *test = (wrong_id *)user;
    gpt_worker w;
    float loss = 0, norm;
    mt_status status = gpt_open(world, &test->r, &w), found = MT_SUCCESS;
    w.forward = forward_with_a_wrong_id;
    if (status == MT_SUCCESS) status = gpt_gradients(&w, 0, &loss, &norm);
    if (status == MT_SUCCESS) {
        size_t mark = mt_arena_mark(w.ctx);
        found = test->found[mt_comm_rank(world)] = gpt_gradients(&w, 1, &loss, &norm);
        mt_arena_release(w.ctx, mark);
        if (found == MT_ERR_DATA && !strstr(mt_last_error(w.ctx), "token id 1000 at index 5 is not in [0, "))
            status = mt_fail(w.ctx, MT_ERR_MISMATCH, "the message of a wrong id is: %.99s", mt_last_error(w.ctx));
    }
    if (status == MT_SUCCESS && test->only < 0) status = gpt_load(&w);
    if (status == MT_SUCCESS && test->only < 0) status = gpt_gradients(&w, 2, &loss, &norm);
    if (status == MT_SUCCESS && test->only < 0 && !(loss > 0.1f && loss < 10.0f))
        status = mt_fail(w.ctx, MT_ERR_MISMATCH, "the loss after a wrong id is %g", (double)loss);
    gpt_close(&w);
    return status != MT_SUCCESS ? status : test->only < 0 ? MT_SUCCESS : found;
}

/* A wrong id in the middle of a step: every rank that has it gets the error at its next wait, with the index. When one
   tensor rank alone has it, the others do not hang. */
static void test_wrong_id(void **state) {
    static wrong_id test;
    mt_launch_desc d;
    (void)state;
    for (int i = 0; i < 4; i++) {
        memset(&test, 0, sizeof test);
        test.r = run_of(MT_DEVICE_CUDA, MT_F32, i == 1 ? 4 : i == 3 ? 1 : (size_t)i / 2, 0, 0);
        test.r.pipeline = i < 2 ? 2 : 1;
        test.only = i == 3 ? 1 : -1;
        wrong = &test;
        memset(&d, 0, sizeof d);
        d.ranks = test.r.tp * test.r.data * test.r.pipeline;
        d.no_pinning = 1;
        d.timeout_s = 30;
        assert_true((mt_launch(&d, wrong_id_rank, &test) == MT_SUCCESS) == (test.only < 0));
        for (int rank = 0; rank < d.ranks; rank++) {
            if (test.only < 0 || rank == test.only) assert_int_equal(test.found[rank], MT_ERR_DATA);
            else assert_true(test.found[rank] == MT_ERR_PEER || test.found[rank] == MT_ERR_TIMEOUT);
        }
    }
}

/* ---- steps as a graph, with texts that change -------------------------------------------------------------------- */

#define TEXTS 4 /* steps, each with a text of its own */

typedef struct text_run {
    gpt_run r;
    float loss[TEXTS], norm[TEXTS]; /* of rank 0 */
    long waits[8][TEXTS], reads[8]; /* of each rank: how often the host waits in a step, and to read all numbers */
    gpt_result result;              /* the weights behind the last step */
} text_run;

/* How often this thread has waited for a GPU. Only the engine counts. */
static long waits_so_far(void) {
#if defined(MT_CUDA_ENGINE)
    return mte::host_waits();
#else
    return 0;
#endif
}

/* One step, without the wait for its numbers: uploads, forward, backward, the sum of the gradients, their norm, the
   decision, and the optimizer. */
static mt_status step_with_text(gpt_worker *w, int step) {
    MT_TRY(gpt_load_text(w, step));
    MT_TRY(mt_step_begin(w->ctx, &w->numbers, GPT_LR / (float)(1 + step), (uint64_t)step));
    return w->graph ? mt_graph_launch(w->ctx, w->graph) : gpt_device_step(w);
}

static mt_status steps_with_texts(gpt_worker *w, text_run *run) {
    int rank = mt_comm_rank(w->world);
    for (int step = 0; step < TEXTS; step++) {
        mt_step_values values;
        if (run->r.graph && step == 1) MT_TRY(gpt_record(w));
        run->waits[rank][step] = -waits_so_far();
        MT_TRY(step_with_text(w, step));
        run->waits[rank][step] += waits_so_far();
        run->reads[rank] -= waits_so_far();
        MT_TRY(mt_step_read(w->ctx, &w->numbers, &values));
        run->reads[rank] += waits_so_far();
        if (rank == 0) run->loss[step] = values.loss;
        if (rank == 0) run->norm[step] = values.norm;
    }
    return gpt_keep_weights(w);
}

static mt_status text_rank(mt_comm *world, void *user) {
    text_run *run = (text_run *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, &run->r, &w);
    if (status == MT_SUCCESS) status = steps_with_texts(&w, run);
    gpt_close(&w);
    return status;
}

static void run_texts(gpt_run r, text_run *run) {
    memset(run, 0, sizeof *run);
    run->r = r;
    run->r.out = &run->result;
    gpt_launch(&run->r, text_rank, run);
}

/* In f32, losses and norms agree with the CPU's as in assert_near. */
static void assert_texts_near(const gpt_run *r, const text_run *want, const text_run *got) {
    for (int i = 0; i < TEXTS; i++)
        if (!(fabs(got->loss[i] - want->loss[i]) <= 1e-5 * want->loss[i]) ||
            !(fabs(got->norm[i] - want->norm[i]) <= 1e-4 * want->norm[i]))
            fail_msg("%s: text %d: loss %.9g and norm %.9g, on the CPU %.9g and %.9g", gpt_name(r), i,
                     (double)got->loss[i], (double)got->norm[i], (double)want->loss[i], (double)want->norm[i]);
}

/* The host waits for no GPU in a step, only where it reads the numbers. The first step chooses the products and
   connects the ranks, for which it may wait. */
static void assert_no_waits(const text_run *run) {
    int ranks = run->r.tp * run->r.data * run->r.pipeline;
    for (int rank = 0; rank < ranks; rank++) {
        for (int i = 1; i < TEXTS; i++)
            if (run->waits[rank][i] != 0)
                fail_msg("%s: rank %d waits %ld times in step %d%s", gpt_name(&run->r), rank, run->waits[rank][i], i,
                         run->r.graph ? ", which is a graph" : "");
#if defined(MT_CUDA_ENGINE)
        if (run->reads[rank] < TEXTS) fail_msg("%s: waits are not counted", gpt_name(&run->r));
#endif
    }
}

/* A graph is recorded once and launched in three steps, each with another text, learning rate and step number.
   Losses, norms and weights have the bits of the same steps as calls. In f32, the losses and norms of the calls are
   also near those of a CPU. On the engine, no step on these splits waits for the GPU. */
static void test_steps_with_other_texts(void **state) {
    static const struct {
        int tp, data, pipeline;
        mt_dtype dtype;
    } ways[] = {{2, 1, 1, MT_F32}, {1, 2, 1, MT_F32}, {1, 1, 2, MT_F32}, {2, 2, 1, MT_F16}, {2, 2, 1, MT_BF16}};
    static text_run on_cpu, calls, graph;
    (void)state;
    for (int i = 0; i < 5; i++) {
        gpt_run r = run_of(MT_DEVICE_CPU, ways[i].dtype, 0, 0, i % 2), on_gpu;
        r.on_device = r.pipeline = 1;
        r.loss_scale = r.dtype == MT_F16 ? 1024.0f : 0.0f;
        on_gpu = r;
        on_gpu.device = MT_DEVICE_CUDA;
        on_gpu.tp = ways[i].tp;
        on_gpu.data = ways[i].data;
        on_gpu.pipeline = ways[i].pipeline;
        on_gpu.sequence_parallel = i % 3 == 0;
        on_gpu.begins = on_gpu.share.sharded_optimizer = on_gpu.data > 1;
        on_gpu.share.bucket_bytes = on_gpu.data > 1 ? 4096 : 0;
        run_texts(on_gpu, &calls);
        if (r.dtype == MT_F32) run_texts(r, &on_cpu);
        if (r.dtype == MT_F32) assert_texts_near(&on_gpu, &on_cpu, &calls);
        on_gpu.graph = 1;
        run_texts(on_gpu, &graph);
        if (memcmp(calls.loss, graph.loss, sizeof graph.loss) != 0 ||
            memcmp(calls.norm, graph.norm, sizeof graph.norm) != 0 ||
            memcmp(&calls.result, &graph.result, GPT_SAME_BYTES) != 0)
            fail_msg("%s: other bits as a graph", gpt_name(&on_gpu));
        assert_no_waits(&calls);
        assert_no_waits(&graph);
    }
}

/* Check mode has the bits of a run without it, also with recorded steps, which check mode 2 does not compare. */
static void test_values_are_compared(void **state) {
    static gpt_result want, got;
    static const int ways[] = {1, 4, 5}; /* index into splits */
    (void)state;
    for (int i = 0; i < 3; i++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, i == 1 ? MT_BF16 : MT_F32, (size_t)ways[i], 0, i == 1);
        r.on_device = r.graph = i == 2;
        gpt_execute(r, &want);
        for (r.check = 1; r.check <= 2; r.check++) {
            gpt_execute(r, &got);
            if (memcmp(&want, &got, GPT_SAME_BYTES) != 0)
                fail_msg("%s: other bits with check %d", gpt_name(&r), r.check);
        }
    }
}

/* The parameter differs whose value one rank has changed. */
static mt_status changed_rank(mt_comm *world, void *user) {
    gpt_worker w;
    const gpt_run *r = (const gpt_run *)user;
    mt_status status = gpt_open(world, r, &w);
    const mt_param *p = mt_params_at(w.params, mt_params_count(w.params) - 1);
    const float other = 3.0f;
    if (status == MT_SUCCESS) status = gpt_step(&w, 0);
    if (status == MT_SUCCESS && mt_comm_rank(world) == 1)
        status = mt_upload(w.ctx, &other, mt_tensor_cols(mt_tensor_rows(p->value, 0, 1), 2, 1));
    if (status == MT_SUCCESS) {
        status = gpt_step(&w, 1);
        if (status == MT_SUCCESS || !strstr(mt_last_error(w.ctx), "mt_sync_gradients: the value of '") ||
            !strstr(mt_last_error(w.ctx), p->name) || !strstr(mt_last_error(w.ctx), "rank 1 has other values"))
            fprintf(stderr, "'%s' was changed: %s\n", p->name, mt_last_error(w.ctx));
        else status = MT_SUCCESS;
    }
    gpt_close(&w);
    return status;
}

static void test_a_changed_value_is_named(void **state) {
    static gpt_result out;
    (void)state;
    for (size_t split = 1; split < SPLITS; split += 4) {
        gpt_run r = run_of(MT_DEVICE_CUDA, MT_F32, split, 0, 0);
        r.data = r.data > 1 ? 2 : 1;
        r.check = 2;
        r.out = &out;
        gpt_launch(&r, changed_rank, &r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_training_as_on_the_cpu),
        cmocka_unit_test(test_16bit_as_on_the_cpu),
        cmocka_unit_test(test_padded_vocabulary),
        cmocka_unit_test(test_loss_in_one_pass),
        cmocka_unit_test(test_steps_on_the_gpu),
#if defined(MT_CUDA_ENGINE)
        cmocka_unit_test(test_odd_vocabulary),
#endif
        cmocka_unit_test(test_attention_on_tensor_cores),
        cmocka_unit_test(test_scores),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_interleaved_halves),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_pipeline),
        cmocka_unit_test(test_data_parallel),
        cmocka_unit_test(test_data_parallel_in_bound_memory),
        cmocka_unit_test(test_host_memory_is_refused),
        cmocka_unit_test(test_invariant_mode),
        cmocka_unit_test(test_epilogues),
        cmocka_unit_test(test_bert_as_on_the_cpu),
        cmocka_unit_test(test_bert_invariant),
        cmocka_unit_test(test_bert_whole_batch),
        cmocka_unit_test(test_wrong_id),
        cmocka_unit_test(test_steps_with_other_texts),
        cmocka_unit_test(test_values_are_compared),
        cmocka_unit_test(test_a_changed_value_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
