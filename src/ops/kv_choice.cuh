/* ---- attention with a key/value cache on a GPU: which kernels compute it ----------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* Whether mti_kv_tile_kernel can run a call whose views have the type `type`, see mti_row_type. */
static int mti_kv_tile_fits(const mti_kv *kv, int type, int built_for) {
    (void)kv; /* all scores */
    return (type == MT_BF16 || type == MT_F16) && built_for >= 80;
}

/* The same for the forward kernel of attention without a cache, see mti_flash_fits. Calls with few tokens have too few
   rows for its tiles. */
static int mti_kv_flash_fits(const mti_kv *kv, int type, int built_for) {
    const mt_attention_desc *s = &kv->desc;
    return mti_kv_tile_fits(kv, type, built_for) && mti_flash_size(s) > 0 && s->seq > MTI_KV_FEW &&
           s->scores.scale > 0.0f && mti_flash_fits_scores(s);
}

template <int HeadDim> static mt_status mti_kv_flash(const mti_attention *a, const mti_flash &f) {
    void (*kernel)(mti_flash) = a->q.dtype == MT_BF16 ? mti_flash_forward_kernel<HeadDim, true, false, true, true>
                                                      : mti_flash_forward_kernel<HeadDim, false, false, true, true>;
    return mti_flash_launch(a, "mt_kv_cache_attention", kernel, MTI_FLASH_ROWS, a->desc.seq,
                            mti_attention_heads(&a->desc), 2 * f.cached.max_seq / a->desc.heads_per_group,
                            mti_flash_threads<HeadDim>(), mti_flash_forward_bytes<HeadDim, true>(), f);
}

static mt_status mti_kv_run_flash(const mti_kv *kv, int type) {
    mti_attention a = mti_attention_resolve(kv->ctx, &kv->desc, kv->out, mt_none());
    mti_flash f;
    (void)type;
    a.q = kv->qkv, a.k = kv->cache.keys, a.v = kv->cache.values;
    a.q_step = kv->cols.q_step;
    f = mti_flash_of(&a);
    f.cached = mti_cached_of(kv);
    MT_TRY(mt_cuda_enter(kv->ctx));
    switch (mti_flash_size(&kv->desc)) {
    case 64: return mti_kv_flash<64>(&a, f);
    case 96: return mti_kv_flash<96>(&a, f);
    case 128: return mti_kv_flash<128>(&a, f);
    case 192: return mti_kv_flash<192>(&a, f);
    default: return mti_kv_flash<256>(&a, f);
    }
}

/* Launches mti_kv_tile_kernel, and merges the splits. */
template <int TYPE, int HeadDim> static mt_status mti_kv_tile_launch(const mti_kv *kv, const mti_kv_gpu &k) {
    int64_t tiles = (k.s.seq * k.s.heads_per_group + MTI_KV_ROWS - 1) / MTI_KV_ROWS;
    dim3 grid((unsigned)(tiles * k.splits), (unsigned)k.s.groups, (unsigned)k.s.batch);
    constexpr size_t bytes = mti_kv_tile_bytes<HeadDim>();
    MT_TRY(mti_shared_allow(kv->ctx, mti_kv_tile_kernel<TYPE, HeadDim>, bytes));
    MT_LAUNCH_KERNEL((mti_kv_tile_kernel<TYPE, HeadDim>), grid, 32 * mti_kv_tile_warps<HeadDim>(), bytes,
                     mt_context_stream(kv->ctx), k);
    MT_TRY(mt_cuda_launched(kv->ctx, "mt_kv_cache_attention"));
    return mti_split_merge<TYPE>(kv, k);
}

static mt_status mti_kv_run_tile(const mti_kv *kv, int type) {
    mti_kv_gpu k = mti_kv_gpu_of(kv);
    int64_t d = k.s.head_dim;
    MT_TRY(mti_split_room(kv, &k));
    MT_TRY(mt_cuda_enter(kv->ctx));
    return mti_by_kind<2>(type == MT_F16, [&](auto half) {
        return mti_by_kind<3>(d > 128 ? 2 : d > 64, [&](auto size) {
            constexpr int Type = decltype(half)::value ? MT_F16 : MT_BF16;
            return mti_kv_tile_launch<Type, (64 << decltype(size)::value)>(kv, k);
        });
    });
}

static int mti_kv_split_fits(const mti_kv *kv, int type, int built_for) {
    (void)kv, (void)type, (void)built_for;
    return 1; /* mti_cuda_attention_check refuses what it cannot run */
}

static mt_status mti_kv_run_split(const mti_kv *kv, int type) {
    mti_kv_gpu k = mti_kv_gpu_of(kv);
    MT_TRY(mti_split_room(kv, &k));
    MT_TRY(mt_cuda_enter(kv->ctx));
    return mti_by_type(type, [&](auto t) {
        MT_TRY(mti_split_attention<t.value>(kv, k));
        return mti_split_merge<t.value>(kv, k);
    });
}

/* The kernels of attention with a cache. The first row that fits a call runs it. `type` is that of mti_row_type for all
   views, `built_for` that of mti_built_for. */
struct mti_kv_kernels {
    const char *name;
    int (*fits)(const mti_kv *kv, int type, int built_for);
    mt_status (*run)(const mti_kv *kv, int type);
};

static const mti_kv_kernels mti_kv_table[] = {{"flash", mti_kv_flash_fits, mti_kv_run_flash},
                                              {"tile", mti_kv_tile_fits, mti_kv_run_tile},
                                              {"split", mti_kv_split_fits, mti_kv_run_split}};

static int mti_kv_type(const mti_kv *kv) {
    return mti_row_type(kv->desc.head_dim, kv->qkv, kv->cache.keys, kv->cache.values, kv->out);
}

static const mti_kv_kernels *mti_kv_choose(const mti_kv *kv, int type, int built_for) {
    const mti_kv_kernels *k = mti_kv_table;
    while (!k->fits(kv, type, built_for)) k++;
    return k;
}

static mt_status mti_cuda_kv_cache_attention(const mti_kv *kv) {
    int built_for = 0, type = mti_kv_type(kv);
    MT_TRY(mti_cuda_attention_check(kv->ctx, &kv->desc));
    MT_TRY(mti_cuda_attention_limit(kv->ctx, "max_seq", kv->cache.max_seq, INT_MAX / 2));
    if (mti_is_empty(kv->out)) return MT_SUCCESS;
    MT_TRY(mti_built_for(kv->ctx, &built_for));
    return mti_kv_choose(kv, type, built_for)->run(kv, type);
}

} /* extern "C++" */
#endif
