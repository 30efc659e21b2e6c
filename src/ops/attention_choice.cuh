/* ---- attention on a GPU: which kernels compute it ---------------------------------------------------------------- */

#pragma once
#include "attention_cudnn.cuh"
#include "attention_hopper_back.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* Whether the tensor-core kernels can read or write a view. mt_none() is not read. Of a view with one row, they compute
   the addresses of rows that are not there, too: these must be aligned, although nothing is read. */
static int mti_flash_fits_view(const mti_attention *a, mt_tensor t) {
    return !t.data || (t.dtype == a->q.dtype && mti_is_wide(t) && mt_tensor_ld(t) % MTI_VECTOR == 0);
}

/* The same for q, k and v. The kernels find a value by its distance from the key. */
static int mti_flash_fits_inputs(const mti_attention *a) {
    return mti_flash_fits_view(a, a->q) && mti_flash_fits_view(a, a->k) && mti_flash_fits_view(a, a->v) &&
           mt_tensor_ld(a->v) == mt_tensor_ld(a->k);
}

/* The same for the gradients. dq may have another distance. */
static int mti_flash_fits_gradients(const mti_attention *a) {
    return mti_flash_fits_view(a, a->dq) && mti_flash_fits_view(a, a->dk) && mti_flash_fits_view(a, a->dv) &&
           mt_tensor_ld(a->dk) == mt_tensor_ld(a->dv);
}

/* Whether a call needs the kernels with SPANS. */
static int mti_flash_needs_spans(const mt_attention_desc *s) {
    return s->scores.window > 0 || s->scores.softcap > 0.0f || s->cu_seqlens || s->scores.alibi_slopes ||
           s->kv_seq != s->seq || (s->scores.mask == MT_MASK_CAUSAL && mti_key_of_query(s) != 0);
}

/* Whether the kernels know everything that changes a score. With a soft cap they multiply by scale / softcap, and by
   softcap / ln 2, which must be finite, and with ALiBi by slopes / scale. They have no derivative of a soft cap below
   ALiBi. */
static int mti_flash_fits_scores(const mt_attention_desc *s) {
    if (s->scores.alibi_slopes && (s->scores.softcap > 0.0f || s->scores.scale < 1e-6f)) return 0;
    return !s->bias.value.data &&
           (s->scores.softcap == 0.0f || (s->scores.softcap < 1e30f && s->scores.scale / s->scores.softcap < 1e30f));
}

/* Sets *arch to the architecture that nvcc compiled this GPU's kernels for: 80 for compute_80. It can be older than the
   GPU, because the driver translates PTX for newer GPUs: without -arch, nvcc 13 compiles for compute_75. The context
   asks the driver once. MT_DEVICE_META plans for the GPU that it stands for. */
static mt_status mti_built_for(mt_context *ctx, int *arch) {
    cudaFuncAttributes attributes;
    mti_kernels *k;
    *arch = mt_context_compute_capability(ctx);
    if (mt_context_device(ctx) == MT_DEVICE_META) return MT_SUCCESS;
    MT_TRY(mti_kernels_open(ctx, &k));
    if (!k->built_for) {
        MT_TRY(mt_cuda_enter(ctx));
        MT_CUDA_TRY(ctx, cudaFuncGetAttributes(&attributes, (const void *)mti_flash_stats_kernel));
        k->built_for = attributes.ptxVersion;
    }
    *arch = k->built_for;
    return MT_SUCCESS;
}

/* Returns the HeadDim of the tensor-core kernels for a call, which pad its heads with zeros to this size. 0: none has
   it. Their blocks, of 64 rows or more, are the second number of a grid. */
static int mti_flash_size(const mt_attention_desc *s) {
    int64_t dim = s->head_dim;
    if (dim % MTI_VECTOR != 0 || mt_max(s->seq, s->kv_seq) > 64 * MTI_FLASH_GRID) return 0;
    return dim <= 64 ? 64 : dim <= 96 ? 96 : dim <= 128 ? 128 : dim <= 192 ? 192 : dim <= 256 ? 256 : 0;
}

/* Whether the tensor-core kernels of a size can run a call. The maximum of the scores is taken before scale, so
   scale must be positive. Sizes above 128 have only kernels with SPANS, so that nvcc has fewer of them to compile. */
template <int HeadDim, bool SPANS>
static int mti_flash_fits(const mti_attention *a, int capability, int built_for, int hopper) {
    const mt_attention_desc *s = &a->desc;
    (void)capability, (void)hopper; /* capability is at least built_for */
    return mti_flash_size(s) == HeadDim && built_for >= 80 && s->scores.scale > 0.0f &&
           (HeadDim > 128 || mti_flash_needs_spans(s) == SPANS) && mti_flash_fits_scores(s) && a->q.dtype != MT_F32 &&
           mti_flash_fits_inputs(a) && mti_flash_fits_view(a, a->out) && mti_flash_fits_view(a, a->dout) &&
           mti_flash_fits_gradients(a);
}

/* The kernels with wgmma run the same calls, where the program has them. */
template <int HeadDim, bool SPANS>
static int mti_hopper_fits(const mti_attention *a, int capability, int built_for, int hopper) {
    return hopper && mti_flash_fits<HeadDim, SPANS>(a, capability, built_for, hopper);
}

static int mti_plain_fits(const mti_attention *a, int capability, int built_for, int hopper) {
    (void)a, (void)capability, (void)built_for, (void)hopper;
    return 1; /* mti_cuda_attention_check refuses what it cannot run */
}

/* The shapes of the plain kernels for heads of up to 32 * SLICES elements. Every GPU grants their shared memory. */
template <int SLICES> struct mti_plain_shapes {
    typedef mti_plain_shape<SLICES, SLICES == 8 ? 2 : 4, 4, SLICES == 8 ? 2 : 4, SLICES == 8 ? 4 : 3> forward;
    typedef mti_plain_shape<SLICES, SLICES == 2 ? 4 : 2, SLICES == 8 ? 2 : 4, SLICES == 8 ? 2 : 4, SLICES == 2 ? 3 : 4>
        dq;
    typedef mti_plain_shape<SLICES, SLICES == 2 ? 4 : 2, SLICES == 8 ? 2 : 4, 8 / SLICES, SLICES == 2 ? 3 : 4> dkv;
    static constexpr size_t forward_bytes = forward::bytes(1, 1), dq_bytes = dq::bytes(2, 1),
                            dkv_bytes = dkv::bytes(2, 2);
    static_assert(forward_bytes <= MTI_SHARED_LEAST && dq_bytes <= MTI_SHARED_LEAST && dkv_bytes <= MTI_SHARED_LEAST,
                  "shared memory");
};

/* Launches a kernel with tiles. `rows` x heads x sequences are its rows. */
template <typename T>
static mt_status mti_plain_launch_tiles(const mti_attention *a, const char *name, void (*kernel)(mti_plain),
                                        int64_t rows, int64_t heads, size_t bytes, const mti_plain &p) {
    dim3 grid((unsigned)((rows + T::Rows - 1) / T::Rows), (unsigned)heads, (unsigned)a->desc.batch);
    MT_TRY(mti_shared_allow(a->ctx, kernel, bytes));
    MT_LAUNCH_KERNEL(kernel, grid, T::Threads, bytes, mt_context_stream(a->ctx), p);
    return mt_cuda_launched(a->ctx, name);
}

/* `rows` x heads x batch are the warps of a kernel without tiles. */
static mt_status mti_plain_launch(const mti_attention *a, const char *name, void (*kernel)(mti_plain), int64_t rows,
                                  int64_t heads, int64_t batch, const mti_plain &p) {
    MT_LAUNCH_KERNEL(kernel, mti_plain_grid(rows, heads, batch), 32 * MTI_PLAIN_WARPS, 0, mt_context_stream(a->ctx), p);
    return mt_cuda_launched(a->ctx, name);
}

template <int SLICES> static mt_status mti_plain_forward(const mti_attention *a, const mti_plain &p) {
    typedef mti_plain_shapes<SLICES> S;
    return mti_plain_launch_tiles<typename S::forward>(a, "mt_attention_forward",
                                                       mti_plain_forward_kernel<typename S::forward>, p.s.seq,
                                                       mti_attention_heads(&p.s), S::forward_bytes, p);
}

template <int SLICES>
static mt_status mti_plain_backward(const mti_attention *a, const char *name, const mti_plain &p) {
    typedef mti_plain_shapes<SLICES> S;
    MT_TRY(mti_plain_launch_tiles<typename S::dq>(a, name, mti_plain_dq_kernel<typename S::dq>, p.s.seq,
                                                  mti_attention_heads(&p.s), S::dq_bytes, p));
    return mti_plain_launch_tiles<typename S::dkv>(a, name, mti_plain_dkv_kernel<typename S::dkv>, p.s.kv_seq,
                                                   p.s.groups, S::dkv_bytes, p);
}

static mt_status mti_plain_run_forward(const mti_attention *a) {
    mti_plain p = mti_plain_of(a);
    MT_TRY(mt_cuda_enter(a->ctx));
    if (p.s.head_dim <= 64) return mti_plain_forward<2>(a, p);
    return p.s.head_dim <= 128 ? mti_plain_forward<4>(a, p) : mti_plain_forward<8>(a, p);
}

/* mt_attention_backward releases the memory of delta when it ends. */
static mt_status mti_plain_run_backward(const mti_attention *a) {
    const mt_attention_desc *s = &a->desc;
    static const char *const name = "mt_attention_backward";
    mti_plain p = mti_plain_of(a);
    int64_t heads = mti_attention_heads(s);
    mt_tensor delta;
    MT_TRY(mt_arena_tensor(a->ctx, MT_F32, heads, s->batch * s->seq, &delta));
    p.delta = mti_view_of(delta);
    MT_TRY(mt_cuda_enter(a->ctx));
    MT_TRY(mti_plain_launch(a, name, mti_plain_stats_kernel, s->seq, heads, s->batch, p));
    MT_TRY(s->head_dim <= 64    ? mti_plain_backward<2>(a, name, p)
           : s->head_dim <= 128 ? mti_plain_backward<4>(a, name, p)
                                : mti_plain_backward<8>(a, name, p));
    if (!s->bias.grad.data) return MT_SUCCESS;
    return mti_plain_launch(a, name, mti_plain_dbias_kernel, s->seq, s->bias.heads > 1 ? heads : 1, s->bias.batch, p);
}

/* The kernels of attention on a GPU. The first row that fits a call runs it, forward or backward. To add a kernel, add
   a row. `capability` is the compute capability of the GPU, 90 for 9.0. `built_for` is the architecture that nvcc has
   compiled this library's kernels for. A row for kernels of another library need not ask it. `hopper`: see
   mti_hopper_built. The memory that a call takes from the arena must not depend on it, because a plan on the meta
   device does not know how the program is compiled. A row may fit forward alone; another row's backward then takes its
   out and lse. */
struct mti_attention_kernels {
    const char *name;
    int (*fits)(const mti_attention *a, int capability, int built_for, int hopper);
    mt_status (*forward)(const mti_attention *a);
    mt_status (*backward)(const mti_attention *a);
};

#define MTI_FLASH_KERNELS(dim, spans)                                                                                  \
    mti_flash_fits<dim, spans>, mti_flash_run_forward<dim, spans>, mti_flash_run_backward<dim, spans>
#define MTI_HOPPER_KERNELS(dim, spans)                                                                                 \
    mti_hopper_fits<dim, spans>, mti_hopper_run_forward<dim, spans>, mti_hopper_run_backward<dim>
static const mti_attention_kernels mti_attention_table[] = {
#if defined(MT_USE_CUDNN)
    {"cudnn", mti_cudnn_fits, mti_cudnn_run_forward, NULL}, /* fits no backward */
#endif
    {"hopper_64", MTI_HOPPER_KERNELS(64, false)},
    {"hopper_96", MTI_HOPPER_KERNELS(96, false)},
    {"hopper_128", MTI_HOPPER_KERNELS(128, false)},
    {"hopper_64_spans", MTI_HOPPER_KERNELS(64, true)},
    {"hopper_96_spans", MTI_HOPPER_KERNELS(96, true)},
    {"hopper_128_spans", MTI_HOPPER_KERNELS(128, true)},
    {"hopper_192", MTI_HOPPER_KERNELS(192, true)},
    {"hopper_256", MTI_HOPPER_KERNELS(256, true)},
    {"flash_64", MTI_FLASH_KERNELS(64, false)},
    {"flash_96", MTI_FLASH_KERNELS(96, false)},
    {"flash_128", MTI_FLASH_KERNELS(128, false)},
    {"flash_64_spans", MTI_FLASH_KERNELS(64, true)},
    {"flash_96_spans", MTI_FLASH_KERNELS(96, true)},
    {"flash_128_spans", MTI_FLASH_KERNELS(128, true)},
    {"flash_192", MTI_FLASH_KERNELS(192, true)},
    {"flash_256", MTI_FLASH_KERNELS(256, true)},
    {"plain", mti_plain_fits, mti_plain_run_forward, mti_plain_run_backward}};
#undef MTI_FLASH_KERNELS
#undef MTI_HOPPER_KERNELS

static const mti_attention_kernels *mti_attention_choose(const mti_attention *a, int capability, int built_for,
                                                         int hopper) {
    const mti_attention_kernels *k = mti_attention_table;
    while (!k->fits(a, capability, built_for, hopper)) k++;
    return k;
}

static mt_status mti_cuda_attention_limit(mt_context *ctx, const char *field, int64_t value, int most) {
    if (value <= most) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "attention on a GPU: %s is %lld, must be at most %d", field,
                   (long long)value, most);
}

static mt_status mti_cuda_attention_check(mt_context *ctx, const mt_attention_desc *s) {
    MT_TRY(mti_cuda_attention_limit(ctx, "head_dim", s->head_dim, MTI_PLAIN_DIM));
    MT_TRY(mti_cuda_attention_limit(ctx, "groups * heads_per_group", s->groups * s->heads_per_group, 65535));
    return mti_cuda_attention_limit(ctx, "batch", s->batch, 65535);
}

static mt_status mti_cuda_attention(const mti_attention *a, int backward) {
    const mti_attention_kernels *kernels;
    int built_for = 0, hopper = 0;
    MT_TRY(mti_cuda_attention_check(a->ctx, &a->desc));
    if (a->desc.batch * a->desc.seq * a->desc.groups == 0) return MT_SUCCESS;
    MT_TRY(mti_built_for(a->ctx, &built_for));
#if defined(MT_USE_CUDNN)
    MT_TRY(mti_cudnn_prepare(a));
#endif
    MT_TRY(mti_hopper_built(a->ctx, &hopper));
    kernels = mti_attention_choose(a, mt_context_compute_capability(a->ctx), built_for, hopper);
    return backward ? kernels->backward(a) : kernels->forward(a);
}

} /* extern "C++" */
#endif
