// test_hopper.h - cases of test_engine.cu: wgmma, mbarriers, named barriers and setmaxnreg (hopper.h). Each kernel has
// a list of planted bugs; a case plants one of them.

// ---- products of a pipeline: a producer warpgroup with cp.async and two consumer warpgroups ------------------------

// out [128, 64] = sum over steps of a [128, 64] b [64, 64]^T; the operands of a step follow each other in `in`. A stage
// has the rows of both. The second half of each product takes A from registers.

enum class Plant {
    nothing,
    no_proxy_fence,      // in the producer
    late_proxy_fence,    // after the arrival
    no_copy_wait,        // the producer does not wait for its copies
    no_full_wait,        // a consumer does not wait for the producer
    stale_parity,        // a consumer waits with the same parity in each step
    no_empty_wait,       // the producer does not wait for the consumers
    early_empty_arrival, // a warpgroup arrives before its products are complete
    no_wgmma_wait,       // the accumulators are read before the wait
    short_wgmma_wait,    // a wait that leaves the last group in flight
    no_commit,
    accumulator_written,  // before the wait
    register_overwritten, // of operand A, before the wait
    no_wgmma_fence,
    wrong_swizzle,
    rows_of_the_other_warpgroup,
    warp_missing,       // a warp of a warpgroup skips a product
    warp_exits,         // instead
    descriptors_differ, // between the warps of a warpgroup
    tile_not_aligned,   // to 1024 bytes
    mbarrier_not_initialised,
    mbarrier_init_unordered,
    mbarrier_count_too_small,
    mbarrier_count_too_large,
    mbarrier_overwritten,
    registers_not_released, // by the producer
    more_registers_by_dec,
    fewer_registers_by_inc,
    registers_of_three_warps,
    registers_twice_too_many,
    exit_with_products,
};

static constexpr int pipeline_steps = 5, pipeline_stages = 2, stage_bytes = 3 * 64 * 128, tile_depth = 64;

struct PipelineStage {
    unsigned char *tiles; // a [128, 64], b [64, 64]
    uint64_t *full;
    uint64_t *empty;
};

__device__ static PipelineStage stage_of(int step, unsigned char *tiles, uint64_t *barriers) {
    int s = step % pipeline_stages;
    return {tiles + s * stage_bytes, barriers + s, barriers + pipeline_stages + s};
}

__device__ static void start_copies(unsigned char *tiles, const uint16_t *from, Plant plant) {
    for (int i = (int)threadIdx.x; i < 3 * 64 * 8; i += 128) {
        int row = i / 8, piece = i % 8, mask = plant == Plant::wrong_swizzle ? 3 : 7;
        mti_cp_async16(tiles + row * 128 + (piece ^ (row & mask)) * 16, from + row * tile_depth + piece * 8, 16);
    }
    mti_cp_async_commit();
}

__device__ static void produce(const uint16_t *in, unsigned char *tiles, uint64_t *barriers, Plant plant) {
    if (plant == Plant::more_registers_by_dec) mti_setmaxnreg_dec<240>();
    else if (plant == Plant::registers_of_three_warps && threadIdx.x < 32) mti_named_sync(3, 32);
    else if (plant != Plant::registers_not_released) mti_setmaxnreg_dec<24>();
    for (int step = 0; step < pipeline_steps; step++) {
        PipelineStage s = stage_of(step, tiles, barriers);
        if (plant != Plant::no_empty_wait) mti_mbarrier_wait(s.empty, (unsigned)(step / pipeline_stages + 1) % 2);
        start_copies(s.tiles, in + step * 3 * 64 * tile_depth, plant);
        if (plant != Plant::no_copy_wait) mti_cp_async_wait<0>();
        if (plant != Plant::no_proxy_fence && plant != Plant::late_proxy_fence) mti_fence_proxy_async();
        if (plant == Plant::mbarrier_overwritten && step == 2 && threadIdx.x == 0) *s.full = 0;
        mti_mbarrier_arrive(s.full);
        if (plant == Plant::late_proxy_fence) mti_fence_proxy_async();
    }
}

// The registers of rows `row` and `row` + 8, columns 16 k to 16 k + 15, of a tile in shared memory.
__device__ static void load_registers(uint32_t *r, const unsigned char *tile, int row, int k) {
    int column = (int)threadIdx.x % 4 * 4 + k * 32;
    for (int i = 0; i < 4; i++) {
        int at = (row + i % 2 * 8) * 128 + column + i / 2 * 16;
        memcpy(r + i, tile + (at ^ (at >> 7 & 7) << 4), 4);
    }
}

__device__ static void consume_step(float (&d)[8][4], const PipelineStage &s, int step, int group, Plant plant) {
    uint32_t a[2][4];
    int row = group * 64 + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4;
    if (plant == Plant::rows_of_the_other_warpgroup) group = 1 - group;
    uint64_t at = mti_wgmma_tile(s.tiles + group * 64 * 128, 16, 1024);
    uint64_t bt = mti_wgmma_tile(s.tiles + 2 * 64 * 128, 16, 1024);
    for (int k = 0; k < 2; k++) load_registers(a[k], s.tiles, row, k + 2);
    if (plant != Plant::no_wgmma_fence || step == 0) mti_wgmma_fence();
    if (plant == Plant::warp_missing && threadIdx.x / 32 == 5 && step == 1) {
        mti_wgmma_commit();
        return;
    }
    if (plant == Plant::descriptors_differ && threadIdx.x / 32 == 5) at += 2;
    for (uint64_t k = 0; k < 2; k++) mti_wgmma_ss<64, true, 0>(d, at + 2 * k, bt + 2 * k, step > 0 || k > 0);
    for (uint64_t k = 0; k < 2; k++) mti_wgmma_rs<64, true, 0>(d, a[k], bt + 2 * (k + 2), 1);
    if (plant == Plant::register_overwritten) a[1][2] ^= 1;
    if (plant == Plant::accumulator_written) d[1][1] = 0.0f;
    if (plant == Plant::early_empty_arrival && threadIdx.x < 256) mti_mbarrier_arrive(s.empty);
    if (plant != Plant::no_commit || step < pipeline_steps - 1) mti_wgmma_commit();
    if (plant == Plant::short_wgmma_wait) mti_wgmma_wait<1>();
    else if (plant != Plant::no_wgmma_wait || step < pipeline_steps - 1) mti_wgmma_wait<0>();
    for (int i = 0; i < 4; i++) d[0][i] += 0.0f;
}

__device__ static void consume(float *out, unsigned char *tiles, uint64_t *barriers, Plant plant) {
    int group = (int)threadIdx.x / 128 - 1, lane = (int)threadIdx.x % 32;
    int row = group * 64 + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    float d[8][4] = {};
    if (plant == Plant::fewer_registers_by_inc) mti_setmaxnreg_inc<24>();
    else if (plant == Plant::registers_twice_too_many) mti_setmaxnreg_inc<256>();
    else mti_setmaxnreg_inc<240>();
    for (int step = 0; step < pipeline_steps; step++) {
        PipelineStage s = stage_of(step, tiles, barriers);
        unsigned parity = plant == Plant::stale_parity ? 0u : (unsigned)(step / pipeline_stages) % 2;
        if (plant != Plant::no_full_wait) mti_mbarrier_wait(s.full, parity);
        if (plant == Plant::warp_exits && threadIdx.x / 32 == 5 && step == 1) return;
        consume_step(d, s, step, group, plant);
        if (plant != Plant::early_empty_arrival || threadIdx.x >= 256) mti_mbarrier_arrive(s.empty);
    }
    if (plant == Plant::exit_with_products) {
        mti_wgmma_fence();
        mti_wgmma_ss<64, true, 0>(d, mti_wgmma_tile(tiles, 16, 1024), mti_wgmma_tile(tiles, 16, 1024), 1);
        return;
    }
    for (int i = 0; i < 32; i++) out[(row + i % 4 / 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i / 4][i % 4];
}

__global__ static void pipeline(float *out, const uint16_t *in, Plant plant) {
    MT_SHARED(uint64_t, barriers, 2 * pipeline_stages);
    MT_DYN_SHARED(unsigned char, room);
    unsigned char *tiles = mti_align_1024(room);
    out += blockIdx.x * 128 * 64;
    if (plant == Plant::tile_not_aligned) tiles = room;
    if (threadIdx.x < pipeline_stages && plant != Plant::mbarrier_not_initialised) {
        unsigned full = 128;
        if (plant == Plant::mbarrier_count_too_small) full = 127;
        if (plant == Plant::mbarrier_count_too_large) full = 129;
        mti_mbarrier_init(&barriers[threadIdx.x], full);
        mti_mbarrier_init(&barriers[pipeline_stages + threadIdx.x], 256);
    }
    if (plant != Plant::mbarrier_init_unordered) __syncthreads();
    if (threadIdx.x < 128) produce(in, tiles, barriers, plant);
    else consume(out, tiles, barriers, plant);
}

static uint16_t bf16_bits(int x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static bool pipeline_case(Plant plant) {
    const size_t step_numbers = 3 * 64 * tile_depth;
    std::vector<int> x(pipeline_steps * step_numbers);
    std::vector<uint16_t> bits(x.size());
    for (size_t i = 0; i < x.size(); i++) x[i] = (int)((i * 7 + i / 64 * 5) % 9) - 4, bits[i] = bf16_bits(x[i]);
    Buffer<uint16_t> in(bits);
    Buffer<float> out(2 * 128 * 64);
    const int bytes = 896 + pipeline_stages * stage_bytes;
    CUDA(cudaFuncSetAttribute((const void *)pipeline, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    MT_LAUNCH_KERNEL(pipeline, 2, 384, (size_t)bytes, nullptr, out.p, in.p, plant);
    CHECK(launched());
    std::vector<float> got = out.download();
    for (size_t i = 0; i < 128 * 64; i++) {
        int sum = 0;
        for (size_t step = 0; step < pipeline_steps; step++)
            for (size_t k = 0; k < tile_depth; k++)
                sum += x[step * step_numbers + i / 64 * 64 + k] * x[step * step_numbers + (128 + i % 64) * 64 + k];
        CHECK(got[i] == (float)sum && got[128 * 64 + i] == (float)sum);
    }
    return true;
}

#define PIPELINE_CASE(name)                                                                                            \
    static bool name(bool bug) { return pipeline_case(bug ? Plant::name : Plant::nothing); }
PIPELINE_CASE(no_proxy_fence)
PIPELINE_CASE(late_proxy_fence)
PIPELINE_CASE(no_copy_wait)
PIPELINE_CASE(no_full_wait)
PIPELINE_CASE(stale_parity)
PIPELINE_CASE(no_empty_wait)
PIPELINE_CASE(early_empty_arrival)
PIPELINE_CASE(no_wgmma_wait)
PIPELINE_CASE(short_wgmma_wait)
PIPELINE_CASE(no_commit)
PIPELINE_CASE(accumulator_written)
PIPELINE_CASE(register_overwritten)
PIPELINE_CASE(no_wgmma_fence)
PIPELINE_CASE(wrong_swizzle)
PIPELINE_CASE(rows_of_the_other_warpgroup)
PIPELINE_CASE(warp_missing)
PIPELINE_CASE(warp_exits)
PIPELINE_CASE(descriptors_differ)
PIPELINE_CASE(tile_not_aligned)
PIPELINE_CASE(mbarrier_not_initialised)
PIPELINE_CASE(mbarrier_init_unordered)
PIPELINE_CASE(mbarrier_count_too_small)
PIPELINE_CASE(mbarrier_count_too_large)
PIPELINE_CASE(mbarrier_overwritten)
PIPELINE_CASE(registers_not_released)
PIPELINE_CASE(more_registers_by_dec)
PIPELINE_CASE(fewer_registers_by_inc)
PIPELINE_CASE(registers_of_three_warps)
PIPELINE_CASE(registers_twice_too_many)
PIPELINE_CASE(exit_with_products)

// ---- a product of tiles that stores write --------------------------------------------------------------------------

enum class StorePlant { nothing, no_fence, written_in_flight, written_unordered };

__global__ static void product_of_stores(float *out, StorePlant plant) {
    MT_DYN_SHARED(unsigned char, room);
    unsigned char *tile = mti_align_1024(room);
    uint16_t *numbers_of = reinterpret_cast<uint16_t *>(tile);
    float d[8][4] = {};
    for (unsigned i = threadIdx.x; i < 64 * 64; i += blockDim.x) numbers_of[i] = 0x3f80; // 1
    if (plant != StorePlant::no_fence) mti_fence_proxy_async();
    __syncthreads();
    if (threadIdx.x < 128) {
        uint64_t t = mti_wgmma_tile(tile, 16, 1024);
        mti_wgmma_fence();
        for (uint64_t k = 0; k < 4; k++) mti_wgmma_ss<64, true, 1>(d, t + 2 * k, t + 128 * k, 1);
        mti_wgmma_commit();
        if (plant == StorePlant::written_in_flight && threadIdx.x == 3) numbers_of[70] = 0;
        mti_wgmma_wait<0>();
        for (int i = 0; i < 32; i++) out[threadIdx.x * 32 + (unsigned)i] = d[i / 4][i % 4];
    }
    if (plant != StorePlant::written_unordered) __syncthreads();
    if (threadIdx.x == 140) numbers_of[70] = 0;
}

static bool store_case(StorePlant plant) {
    Buffer<float> out(128 * 32);
    MT_LAUNCH_KERNEL(product_of_stores, 1, 160, 896 + 64 * 128, nullptr, out.p, plant);
    for (float v : out.download()) CHECK(v == 64.0f);
    return launched();
}

static bool stores_without_proxy_fence(bool bug) {
    return store_case(bug ? StorePlant::no_fence : StorePlant::nothing);
}
static bool store_before_the_wait(bool bug) {
    return store_case(bug ? StorePlant::written_in_flight : StorePlant::nothing);
}
static bool store_unordered_with_product(bool bug) {
    return store_case(bug ? StorePlant::written_unordered : StorePlant::nothing);
}

// ---- mbarriers and named barriers between loads and stores ---------------------------------------------------------

enum class RingPlant { nothing, no_full_wait, no_empty_wait, no_syncwarp, arrival_before_store };

// Warp 0 hands numbers to warps 1 and 2 through a ring of two rows. One lane of a warp arrives for it.
__global__ static void ring(float *out, const float *in, RingPlant plant) {
    MT_SHARED(uint64_t, barriers, 4);
    MT_SHARED(float, rows, 2 * 32);
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < 2) mti_mbarrier_init(&barriers[threadIdx.x], 1), mti_mbarrier_init(&barriers[2 + threadIdx.x], 2);
    __syncthreads();
    for (unsigned i = 0; i < 6; i++) {
        uint64_t *full = &barriers[i % 2], *empty = &barriers[2 + i % 2];
        float *row = rows + i % 2 * 32;
        if (warp == 0) {
            if (plant != RingPlant::no_empty_wait) mti_mbarrier_wait(empty, (i / 2 + 1) % 2);
            if (plant == RingPlant::arrival_before_store && lane == 0) mti_mbarrier_arrive(full);
            row[lane] = in[i * 32 + lane];
            if (plant != RingPlant::no_syncwarp) __syncwarp();
            if (plant != RingPlant::arrival_before_store && lane == 0) mti_mbarrier_arrive(full);
        } else {
            if (plant != RingPlant::no_full_wait) mti_mbarrier_wait(full, i / 2 % 2);
            out[(i * 2 + warp - 1) * 32 + lane] = row[31 - lane];
            __syncwarp();
            if (lane == 0) mti_mbarrier_arrive(empty);
        }
    }
}

static bool ring_case(RingPlant plant) {
    std::vector<float> x = numbers(6 * 32);
    Buffer<float> in(x), out(2 * 6 * 32);
    MT_LAUNCH_KERNEL(ring, 1, 96, 0, nullptr, out.p, in.p, plant);
    std::vector<float> got = out.download();
    for (size_t i = 0; i < got.size(); i++) CHECK(got[i] == x[i / 64 * 32 + 31 - i % 32]);
    return launched();
}

static bool ring_without_full_wait(bool bug) { return ring_case(bug ? RingPlant::no_full_wait : RingPlant::nothing); }
static bool ring_without_empty_wait(bool bug) { return ring_case(bug ? RingPlant::no_empty_wait : RingPlant::nothing); }
static bool ring_without_syncwarp(bool bug) { return ring_case(bug ? RingPlant::no_syncwarp : RingPlant::nothing); }
static bool ring_arrives_before_store(bool bug) {
    return ring_case(bug ? RingPlant::arrival_before_store : RingPlant::nothing);
}

// Thread 0 completes four phases, and thread 32 waits for each. The bugs: it waits for the first one twice, or it waits
// for the second one when the third is over.
__global__ static void phases(float *out, bool twice, bool late) {
    MT_SHARED(uint64_t, b, 1);
    if (threadIdx.x == 0) mti_mbarrier_init(b, 1);
    __syncthreads();
    for (unsigned phase = 0; phase < 4; phase++) {
        bool waits = !late || phase == 0 || phase == 3;
        if (threadIdx.x == 0 && !(late && phase == 3)) mti_mbarrier_arrive(b);
        if (threadIdx.x == 32 && waits) mti_mbarrier_wait(b, phase % 2);
        if (threadIdx.x == 32 && phase == 0 && twice) mti_mbarrier_wait(b, 0);
        __syncthreads();
    }
    out[threadIdx.x] = 1.0f;
}

static bool phases_case(bool twice, bool late) {
    Buffer<float> out(64);
    MT_LAUNCH_KERNEL(phases, 1, 64, 0, nullptr, out.p, twice, late);
    CHECK(out.download()[63] == 1.0f);
    return launched();
}

static bool same_phase_twice(bool bug) { return phases_case(bug, false); }
static bool phase_over_by_two(bool bug) { return phases_case(false, bug); }

enum class NamedPlant {
    nothing,
    wrong_count,
    counts_differ,
    no_sync,
    no_back_sync,
    arrives_twice,
    one_lane,
    nobody_waits
};

// Warps 0 and 1 hand rows to warps 2 and 3, as in the PTX manual's example of bar.arrive. Warp 4 does nothing.
__global__ static void named_pipe(float *out, const float *in, NamedPlant plant) {
    MT_SHARED(float, row, 64);
    unsigned i = threadIdx.x % 64;
    int all = plant == NamedPlant::wrong_count ? 160 : 128;
    if (threadIdx.x >= 128) return;
    for (unsigned step = 0; step < 3; step++) {
        if (threadIdx.x < 64) {
            row[i] = in[step * 64 + i];
            if (plant == NamedPlant::one_lane && threadIdx.x % 32) continue;
            mti_named_arrive(1, all);
            if (plant == NamedPlant::arrives_twice) mti_named_arrive(1, all);
            if (plant == NamedPlant::nobody_waits && step == 2) mti_named_arrive(2, 128);
            else if (plant != NamedPlant::no_back_sync) mti_named_sync(2, 128);
        } else {
            if (plant == NamedPlant::counts_differ) mti_named_sync(1, 96);
            else if (plant == NamedPlant::no_sync) mti_named_arrive(1, 128);
            else mti_named_sync(1, all);
            out[step * 64 + i] = row[63 - i];
            mti_named_arrive(2, 128);
        }
    }
}

static bool named_case(NamedPlant plant) {
    std::vector<float> x = numbers(3 * 64);
    Buffer<float> in(x), out(3 * 64);
    MT_LAUNCH_KERNEL(named_pipe, 1, 160, 0, nullptr, out.p, in.p, plant);
    std::vector<float> got = out.download();
    for (size_t i = 0; i < got.size(); i++) CHECK(got[i] == x[i / 64 * 64 + 63 - i % 64]);
    return launched();
}

#define NAMED_CASE(name, bug_of_it)                                                                                    \
    static bool name(bool bug) { return named_case(bug ? NamedPlant::bug_of_it : NamedPlant::nothing); }
NAMED_CASE(named_barrier_of_too_many, wrong_count)
NAMED_CASE(named_barrier_counts_differ, counts_differ)
NAMED_CASE(named_barrier_without_sync, no_sync)
NAMED_CASE(named_barrier_without_sync_back, no_back_sync)
NAMED_CASE(named_barrier_entered_twice, arrives_twice)
NAMED_CASE(named_barrier_of_one_lane, one_lane)
NAMED_CASE(named_barrier_without_waiters, nobody_waits)
