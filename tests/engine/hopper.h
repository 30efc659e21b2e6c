// hopper.h - what compute capability 9.0 adds to core.cpp, which includes this file: warpgroups and wgmma, mbarriers,
// named barriers, registers of warpgroups, and the order of shared memory between threads that these establish.
//
// Order. A thread has a clock, which counts its releases, and a vector with the last clock of each thread that is known
// to precede it. An arrival releases: the barrier's vector takes the maximum with that of the thread. A thread that has
// waited for a barrier takes the maximum with the barrier's vector. What thread u did at its clock c precedes what
// thread t does now if t's entry for u is at least c. __syncwarp exchanges the vectors of its lanes. __syncthreads does
// not need vectors: all that happened before it precedes all that follows, which block.epoch tells.
//
// Products. A product (wgmma) reads its tiles and computes when it is issued or at the wait, as MTE_WGMMA selects. From
// its issue to the wait, its accumulators hold a NaN, and the tiles and the registers of A are compared with what they
// were at the issue. Two tables with an entry for every 16 bytes of shared memory tell who wrote them and which warps
// have read them with products. A product may read what was written by a store or by cp.async if the writing thread has
// called mti_fence_proxy_async() afterwards, and if this call precedes the product. A write must not precede the wait
// for a product that reads the bytes, or be unordered with it. In builds without check.cpp only cp.async is seen.

namespace mte {

// ---- order of threads ----------------------------------------------------------------------------------------------

typedef std::vector<uint32_t> Clocks; // for each thread of the block

static uint32_t known[max_block_threads][max_block_threads]; // known[t][u]: the last clock of u that precedes t
static bool clocks_run;                                      // the block uses what this file is about

uint32_t clock_of(const Thread *t) { return clocks_run ? known[t->linear][t->linear] : 1; }

bool precedes(unsigned earlier, uint32_t clock, unsigned now) { return clocks_run && known[now][earlier] >= clock; }

static void start_clocks() {
    if (clocks_run) return;
    clocks_run = true;
    for (unsigned t = 0; t < block.threads; t++) {
        std::fill_n(known[t], block.threads, 0);
        known[t][t] = 1;
    }
}

static void take_maximum(uint32_t *to, const uint32_t *from) {
    for (unsigned i = 0; i < block.threads; i++) to[i] = std::max(to[i], from[i]);
}

static void release(const Thread *t, Clocks *to) {
    to->resize(block.threads);
    take_maximum(to->data(), known[t->linear]);
    known[t->linear][t->linear]++;
}

static void acquire(const Thread *t, const Clocks &from) {
    if (!from.empty()) take_maximum(known[t->linear], from.data());
}

static void exchange_clocks(Warp *warp, unsigned group) {
    if (!clocks_run) return;
    Clocks all;
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        if (group >> lane & 1) release(warp->lanes[lane], &all);
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        if (group >> lane & 1) acquire(warp->lanes[lane], all);
}

// Waits until another thread calls wake().
static void sleep_as(State state, Where where) {
    current->state = state;
    current->where = where;
    run_next();
}

// ---- who wrote and who read 16 bytes of shared memory --------------------------------------------------------------

static constexpr size_t piece_bytes = 16;
static constexpr size_t pieces = shared_arena_bytes / piece_bytes;
static constexpr unsigned max_warps = max_block_threads / warp_lanes;

struct Moment {
    uint32_t clock; // of the thread; 0: never
    uint16_t epoch; // barriers of the block
};

struct PieceWrite {
    uint32_t block; // number of the running block, see block_number
    uint16_t thread;
    Writer writer;
    Moment when;
    size_t fences; // proxy fences of the thread before the write
};

static PieceWrite piece_writes[pieces];
static Moment piece_reads[pieces][max_warps];         // by products; when the first lane of the warp waited for them
static uint32_t piece_reads_block[pieces];            // the block of piece_reads
static uint16_t piece_products[pieces];               // products in flight that read the piece
static std::vector<Moment> fences[max_block_threads]; // the proxy fences of each thread
static uint32_t block_number;

static Moment moment_of(const Thread *t) { return {clock_of(t), block.epoch}; }

static bool before(unsigned thread, Moment when, const Thread *now) {
    return thread / warp_lanes == now->linear / warp_lanes || when.epoch != block.epoch ||
           precedes(thread, when.clock, now->linear);
}

static size_t piece_of(const void *p) { return (size_t)((const char *)p - shared_arena()) / piece_bytes; }

void fence_proxy_async() {
    start_clocks();
    fences[current->linear].push_back(moment_of(current));
}

// Notes that the thread writes shared memory: with a store, with a cp.async that it starts, or with one for which it
// has waited. No fence is enough for a cp.async that is in flight.
static void note_shared_write(const Thread *t, const void *p, size_t bytes, Writer writer) {
    size_t before = writer == Writer::copy_in_flight ? SIZE_MAX : fences[t->linear].size();
    for (size_t i = piece_of(p), last = piece_of((const char *)p + bytes - 1); i <= last; i++)
        piece_writes[i] = {block_number, (uint16_t)t->linear, writer, moment_of(t), before};
}

static const char *describe_write(const PieceWrite &w) {
    return w.writer == Writer::store ? "a store" : w.writer == Writer::copy ? "cp.async" : "a cp.async still in flight";
}

// Checks that a product of the warp of `t` may read the 16 bytes at p.
static void check_product_reads(const Thread *t, const char *p) {
    const PieceWrite &w = piece_writes[piece_of(p)];
    if (w.block != block_number) return;
    if (!before(w.thread, w.when, t))
        fail("wgmma of warp %u reads shared memory at +%td that thread %u writes with %s, and nothing orders the two",
             t->linear / warp_lanes, p - shared_arena(), w.thread, describe_write(w));
    if (fences[w.thread].size() <= w.fences)
        fail("wgmma reads shared memory at +%td that thread %u wrote with %s, without a fence.proxy.async by this "
             "thread since",
             p - shared_arena(), w.thread, describe_write(w));
    if (!before(w.thread, fences[w.thread][w.fences], t))
        fail("wgmma reads shared memory at +%td that thread %u wrote with %s, and its fence.proxy.async does not "
             "precede the barrier between them",
             p - shared_arena(), w.thread, describe_write(w));
}

static void note_product_read(const Thread *t, const char *p) {
    size_t piece = piece_of(p);
    if (piece_reads_block[piece] != block_number) std::fill_n(piece_reads[piece], max_warps, Moment{0, 0});
    piece_reads_block[piece] = block_number;
    piece_reads[piece][t->linear / warp_lanes] = moment_of(t);
}

// ---- products ------------------------------------------------------------------------------------------------------

static constexpr uint32_t in_flight = 0x7fedc0deu; // a NaN
static constexpr unsigned product_rows = 64, product_depth = 16, most_columns = 256;

struct Accumulators {
    float *d[warpgroup_threads];
    unsigned columns;
    std::vector<float> value; // [64][columns]
};

struct Tiles {
    uint16_t a[product_rows][product_depth];
    uint16_t b[product_depth][most_columns];
};

struct Product {
    WgmmaOperands operands; // of the first thread
    const uint32_t *a[warpgroup_threads];
    std::shared_ptr<Accumulators> to;
    std::unique_ptr<Tiles> seen; // as they were at the issue
    int group;
    bool computed;
    Where where;
};

struct Warpgroup {
    Thread *first;
    unsigned arrived; // threads in the present instruction
    void (*step)(Warpgroup *group);
    unsigned exited;               // threads
    bool fenced;                   // mti_wgmma_fence since the last wait that completed a product
    int group;                     // number of commits
    std::vector<Product> products; // issued and not waited for
    int registers[warpgroup_threads / warp_lanes];
};

static Warpgroup warpgroups[max_block_threads / warpgroup_threads];

static Thread *thread_of(const Warpgroup *g, unsigned i) { return g->first + i; }

uint64_t wgmma_tile(const void *tile, unsigned lead, unsigned stride) {
    uint64_t at = (uint64_t)((const char *)tile - shared_arena());
    return (uint64_t)1 << 62 | (uint64_t)(stride >> 4) << 32 | (uint64_t)(lead >> 4) << 16 | (at & 0x3ffff) >> 4;
}

// Returns the address of element (row, i) of a tile whose rows are contiguous: (row of A or column of B, k), or for a
// transposed B (k, column of B). PTX manual, "Matrix Descriptor Format", "Canonical Layouts" with T = 8.
static const char *tile_element(uint64_t tile, unsigned row, unsigned i) {
    uint64_t start = (tile & 0x3fff) << 4, lead = (tile >> 16 & 0x3fff) << 4, stride = (tile >> 32 & 0x3fff) << 4;
    uint64_t at = start + i % 64 * 2 + i / 64 * lead + row % 8 * 128 + row / 8 * stride;
    uint64_t line = (at >> 7) - (tile >> 49 & 7); // from the start of the repeating pattern
    return shared_arena() + (at ^ (line & 7) << 4);
}

static float number_of(const WgmmaOperands &o, uint16_t bits) { return o.bf16 ? bf16_value(bits) : f16_value(bits); }

// Calls f(address, where the 8 elements go) for the 16-byte pieces of both tiles. A piece of a tile whose rows are
// those of K holds 8 elements of K.
template <class F> static void for_each_piece(const Product &p, Tiles *to, F f) {
    const WgmmaOperands &o = p.operands;
    if (!o.a)
        for (unsigned row = 0; row < product_rows; row++)
            for (unsigned k = 0; k < product_depth; k += 8) f(tile_element(o.a_tile, row, k), &to->a[row][k], 1u);
    for (unsigned n = 0; n < o.columns; n += o.transposed ? 8 : 1)
        for (unsigned k = 0; k < product_depth; k += o.transposed ? 1 : 8)
            f(o.transposed ? tile_element(o.b_tile, k, n) : tile_element(o.b_tile, n, k), &to->b[k][n],
              o.transposed ? 1u : most_columns);
}

static void read_tiles(const Product &p, Tiles *to) {
    for_each_piece(p, to, [](const char *from, uint16_t *element, unsigned distance) {
        for (unsigned i = 0; i < 8; i++) memcpy(element + i * distance, from + 2 * i, 2);
    });
}

// Copies the registers of A: those of mma.m16n8k16 for each warp.
static void read_registers(const Product &p, Tiles *to) {
    for (unsigned t = 0; t < warpgroup_threads; t++)
        for (unsigned i = 0; i < 8; i++) {
            unsigned row = t / warp_lanes * 16 + t % warp_lanes / 4 + i / 2 % 2 * 8;
            to->a[row][t % 4 * 2 + i / 4 * 8 + i % 2] = (uint16_t)(p.a[t][i / 2] >> (i % 2 * 16));
        }
}

static void read_operands(const Product &p, Tiles *to) {
    memset(static_cast<void *>(to), 0, sizeof *to);
    read_tiles(p, to);
    if (p.operands.a) read_registers(p, to);
}

typedef float Vector __attribute__((vector_size(16)));

static void compute(Product *p) {
    static Vector b[product_depth][most_columns / 4];
    const WgmmaOperands &o = p->operands;
    if (p->computed) return;
    p->computed = true;
    if (!o.add) std::fill(p->to->value.begin(), p->to->value.end(), 0.0f);
    for (unsigned k = 0; k < product_depth; k++)
        for (unsigned n = 0; n < o.columns; n++) b[k][n / 4][n % 4] = number_of(o, p->seen->b[k][n]);
    for (unsigned row = 0; row < product_rows; row++) {
        float *to = &p->to->value[row * o.columns];
        for (unsigned k = 0; k < product_depth; k++) {
            float a = number_of(o, p->seen->a[row][k]);
            for (unsigned n = 0; n < o.columns; n += 4) {
                Vector v;
                memcpy(&v, to + n, sizeof v);
                v += a * b[k][n / 4];
                memcpy(to + n, &v, sizeof v);
            }
        }
    }
}

// Calls f(register of thread t, its element) for all accumulators.
template <class F> static void for_each_accumulator(Accumulators *a, F f) {
    for (unsigned t = 0; t < warpgroup_threads; t++)
        for (unsigned i = 0; i < a->columns / 2; i++) {
            unsigned row = t / warp_lanes * 16 + t % warp_lanes / 4 + i % 4 / 2 * 8;
            f(&a->d[t][i], &a->value[row * a->columns + i / 4 * 8 + t % 4 * 2 + i % 2]);
        }
}

static void take_accumulators(Accumulators *a) {
    for_each_accumulator(a, [](float *d, float *value) {
        *value = *d;
        memcpy(d, &in_flight, sizeof *d);
    });
}

static void check_untouched(Accumulators *a, Where issued) {
    bool touched = false;
    for_each_accumulator(a, [&](float *d, float *) { touched = touched || memcmp(d, &in_flight, sizeof *d); });
    if (touched) fail("an accumulator of the wgmma at %s:%d was written before the wait", issued.file, issued.line);
}

static void give_accumulators(Accumulators *a, Where issued) {
    check_untouched(a, issued);
    for_each_accumulator(a, [](float *d, float *value) { *d = *value; });
}

// Returns the accumulators of a product in flight with the same registers, or new ones.
static std::shared_ptr<Accumulators> accumulators_for(Warpgroup *g, unsigned columns) {
    const float *d = static_cast<const WgmmaOperands *>(g->first->operands)->d;
    for (const Product &p : g->products) {
        Accumulators *a = p.to.get();
        if (d + columns / 2 <= a->d[0] || d >= a->d[0] + a->columns / 2) continue;
        if (d != a->d[0] || columns != a->columns)
            fail("the accumulators overlap those of the wgmma at %s:%d, which has another shape", p.where.file,
                 p.where.line);
        check_untouched(a, p.where);
        return p.to;
    }
    if (!g->fenced) fail("wgmma without wgmma.fence since its accumulators were used");
    auto a = std::make_shared<Accumulators>();
    a->columns = columns;
    a->value.resize((size_t)product_rows * columns);
    for (unsigned t = 0; t < warpgroup_threads; t++)
        a->d[t] = static_cast<const WgmmaOperands *>(thread_of(g, t)->operands)->d;
    take_accumulators(a.get());
    return a;
}

static bool early_product() {
    return config().wgmma == CopyTime::early || (config().wgmma == CopyTime::random && random_below(2));
}

static void check_product_tiles(Warpgroup *g, Product *p) {
    for_each_piece(*p, p->seen.get(), [&](const char *from, uint16_t *, unsigned) {
        check_shared(from, piece_bytes, piece_bytes, "tile of wgmma");
        for (unsigned t = 0; t < warpgroup_threads; t += warp_lanes) check_product_reads(thread_of(g, t), from);
        access(g->first, from, piece_bytes, Access::read, nullptr);
        piece_products[piece_of(from)]++;
    });
}

static void check_tile(uint64_t tile) {
    if (tile >> 62 != 1) fail("tile of wgmma: the engine knows only the 128-byte swizzle");
}

static void issue_product(Warpgroup *g) {
    const WgmmaOperands &o = *static_cast<const WgmmaOperands *>(g->first->operands);
    check_tile(o.b_tile);
    if (!o.a) check_tile(o.a_tile);
    Product p = {o, {}, accumulators_for(g, o.columns), std::make_unique<Tiles>(), g->group, false, g->first->where};
    for (unsigned t = 0; t < warpgroup_threads; t++)
        p.a[t] = static_cast<const WgmmaOperands *>(thread_of(g, t)->operands)->a;
    check_product_tiles(g, &p);
    read_operands(p, p.seen.get());
    g->products.push_back(std::move(p));
    if (early_product())
        for (Product &each : g->products) compute(&each);
}

// Completes a product: its operands must be what they were at the issue.
static void complete_product(Warpgroup *g, Product *p) {
    static Tiles now;
    read_operands(*p, &now);
    if (memcmp(now.b, p->seen->b, sizeof now.b) || (!p->operands.a && memcmp(now.a, p->seen->a, sizeof now.a)))
        fail("a tile of the wgmma at %s:%d was overwritten before the wait", p->where.file, p->where.line);
    if (memcmp(now.a, p->seen->a, sizeof now.a))
        fail("a register of operand A of the wgmma at %s:%d was written before the wait", p->where.file, p->where.line);
    compute(p);
    for_each_piece(*p, &now, [&](const char *from, uint16_t *, unsigned) {
        for (unsigned t = 0; t < warpgroup_threads; t += warp_lanes) note_product_read(thread_of(g, t), from);
        piece_products[piece_of(from)]--;
    });
}

static void wait_for_products(Warpgroup *g) {
    int groups_left = static_cast<const StepOperands *>(g->first->operands)->value;
    size_t done = 0;
    while (done < g->products.size() && g->products[done].group < g->group - groups_left)
        complete_product(g, &g->products[done++]);
    if (!done) return;
    g->fenced = false;
    for (size_t i = 0; i < done; i++) {
        const std::shared_ptr<Accumulators> &a = g->products[i].to;
        bool last = true;
        for (size_t j = i + 1; j < g->products.size(); j++) last = last && g->products[j].to != a;
        if (last) give_accumulators(a.get(), g->products[i].where);
    }
    g->products.erase(g->products.begin(), g->products.begin() + (ptrdiff_t)done);
}

static void fence_products(Warpgroup *g) { g->fenced = true; }
static void commit_products(Warpgroup *g) { g->group++; }

// Checks a write of cp.async or a store: no product may read these bytes before or unordered with it.
static void check_product_order(const Thread *t, const void *p, size_t bytes) {
    if (!clocks_run) return;
    for (size_t i = piece_of(p), last = piece_of((const char *)p + bytes - 1); i <= last; i++) {
        if (piece_products[i]) fail("a tile of a wgmma is overwritten before the wait, at +%zu", i * piece_bytes);
        if (piece_reads_block[i] != block_number) continue;
        for (unsigned w = 0; w * warp_lanes < block.threads; w++) {
            Moment read = piece_reads[i][w];
            if (read.clock && !before(w * warp_lanes, read, t))
                fail("shared memory at +%zu is overwritten, and nothing orders this after the wgmma of warp %u that "
                     "reads it",
                     i * piece_bytes, w);
        }
    }
}

void write_shared(const Thread *t, const void *p, size_t bytes) {
    check_product_order(t, p, bytes);
    note_shared_write(t, p, bytes, Writer::store);
}

// ---- registers of warpgroups ---------------------------------------------------------------------------------------

static int free_registers; // per thread and warp, in the pool of the block

// The registers with which the block is launched: as many as the multiprocessor has for its threads.
static int registers_at_launch() {
    int each = 65536 / (int)((block.threads + warpgroup_threads - 1) / warpgroup_threads * warpgroup_threads) / 8 * 8;
    return std::min(each, 256);
}

// Tries to set the registers of the warpgroup. Returns false if the pool has too few.
static bool take_registers(Warpgroup *g) {
    const StepOperands *o = static_cast<const StepOperands *>(g->first->operands);
    int more = (o->value - g->registers[0]) * (int)(warpgroup_threads / warp_lanes);
    if (more > free_registers) return false;
    free_registers -= more;
    for (int &r : g->registers) r = o->value;
    return true;
}

static void set_registers_of(Warpgroup *g) {
    const StepOperands *o = static_cast<const StepOperands *>(g->first->operands);
    if (o->value < 24 || o->value > 256 || o->value % 8) fail("setmaxnreg to %d registers", o->value);
    if (o->increases ? o->value < g->registers[0] : o->value > g->registers[0])
        fail("setmaxnreg.%s to %d of a warpgroup that has %d registers", o->increases ? "inc" : "dec", o->value,
             g->registers[0]);
    if (!g->products.empty()) fail("setmaxnreg while a wgmma is in flight");
}

// ---- instructions of a whole warpgroup -----------------------------------------------------------------------------

typedef void (*Step)(Warpgroup *g);

static const char *step_name(Step step) {
    return step == issue_product       ? "wgmma"
           : step == fence_products    ? "wgmma.fence"
           : step == commit_products   ? "wgmma.commit_group"
           : step == wait_for_products ? "wgmma.wait_group"
                                       : "setmaxnreg";
}

static bool same_step(const Thread *a, const Thread *b, Step step) {
    if (a->step != b->step || !same_place(a->where, b->where)) return false;
    if (step != issue_product) return !memcmp(a->operands, b->operands, sizeof(StepOperands));
    const WgmmaOperands *x = static_cast<const WgmmaOperands *>(a->operands);
    const WgmmaOperands *y = static_cast<const WgmmaOperands *>(b->operands);
    return x->columns == y->columns && x->bf16 == y->bf16 && x->transposed == y->transposed && x->add == y->add &&
           x->a_tile == y->a_tile && x->b_tile == y->b_tile && !x->a == !y->a;
}

static void check_steps_agree(Warpgroup *g, Step step) {
    for (unsigned i = 1; i < warpgroup_threads; i++) {
        const Thread *t = thread_of(g, i);
        if (!same_step(g->first, t, step))
            fail("threads of a warpgroup disagree in %s: thread %u at %s:%d, thread %u at %s:%d: the same place, "
                 "descriptors and numbers are needed",
                 step_name(step), g->first->linear, g->first->where.file, g->first->where.line, t->linear,
                 t->where.file, t->where.line);
    }
}

static void wake_warpgroup(Warpgroup *g) {
    g->arrived = 0;
    for (unsigned i = 0; i < warpgroup_threads; i++) wake(thread_of(g, i));
}

// Wakes the warpgroups that wait for registers, in turn, as long as there are enough.
static void give_registers() {
    for (Warpgroup &g : warpgroups)
        if (g.first && g.first->state == State::at_registers && g.arrived == warpgroup_threads && take_registers(&g))
            wake_warpgroup(&g);
}

// Waits until all threads of the warpgroup are at the instruction. The last one executes it for all.
static void warpgroup_step(Step step, const void *operands, Where where) {
    start_clocks();
    Thread *t = current;
    Warpgroup *g = &warpgroups[t->linear / warpgroup_threads];
    if (!g->first || g->exited)
        fail("%s:%d: %s needs all 128 threads of a warpgroup, from a multiple of 128 on", where.file, where.line,
             step_name(step));
    t->step = g->step = step;
    t->operands = const_cast<void *>(operands);
    bool registers = step == set_registers_of;
    if (++g->arrived < warpgroup_threads) {
        sleep_as(registers ? State::at_registers : State::in_warpgroup, where);
        return;
    }
    t->where = where;
    t->state = registers ? State::at_registers : State::in_warpgroup;
    check_steps_agree(g, step);
    step(g);
    if (registers && !take_registers(g)) {
        run_next();
        return;
    }
    wake_warpgroup(g);
    if (registers) give_registers();
    go_on();
}

void wgmma(const WgmmaOperands &operands, Where where) { warpgroup_step(issue_product, &operands, where); }
void wgmma_fence(Where where) {
    StepOperands o = {0, 0};
    warpgroup_step(fence_products, &o, where);
}
void wgmma_commit(Where where) {
    StepOperands o = {0, 0};
    warpgroup_step(commit_products, &o, where);
}
void wgmma_wait(int groups_left, Where where) {
    StepOperands o = {groups_left, 0};
    warpgroup_step(wait_for_products, &o, where);
}
void set_registers(int count, bool increases, Where where) {
    StepOperands o = {count, increases};
    warpgroup_step(set_registers_of, &o, where);
}

// ---- mbarriers -----------------------------------------------------------------------------------------------------

struct MBarrier {
    uint64_t *at;
    unsigned count;
    unsigned pending; // arrivals that the present phase still needs
    unsigned phase;   // number of complete phases
    unsigned by;      // the thread that initialised it
    Moment made;
    Clocks arrived;  // what precedes the present phase's completion
    Clocks complete; // what preceded the completion of the last phase
    std::vector<int>
        waited;   // for each thread, the number of complete phases after its last wait; -1: it has not waited
    int repeated; // the thread that has waited twice for the last phase; -1: none
    Where repeated_at;
};

static std::vector<MBarrier> mbarriers;

static uint64_t mark_of(const MBarrier &b) {
    return 0x6d62617272696572u ^ (uint64_t)b.phase << 32 ^ b.pending ^ (uint64_t)b.count << 12;
}

static MBarrier *find_mbarrier(const uint64_t *at) {
    for (MBarrier &b : mbarriers)
        if (b.at == at) return &b;
    return nullptr;
}

void mbarrier_init(uint64_t *at, unsigned count) {
    start_clocks();
    check_shared(at, 8, 8, "mbarrier");
    if (count < 1 || count > 0xfffff) fail("mbarrier with a count of %u", count);
    if (find_mbarrier(at)) fail("an mbarrier is initialised twice");
    access(current, at, 8, Access::write, nullptr);
    mbarriers.push_back({at,
                         count,
                         count,
                         0,
                         current->linear,
                         moment_of(current),
                         {},
                         {},
                         std::vector<int>(block.threads, -1),
                         -1,
                         {}});
    *at = mark_of(mbarriers.back());
}

static MBarrier *use_mbarrier(uint64_t *at, Where where) {
    MBarrier *b = find_mbarrier(at);
    if (!b) fail("%s:%d: mbarrier without mti_mbarrier_init", where.file, where.line);
    if (*at != mark_of(*b)) fail("%s:%d: an mbarrier was overwritten", where.file, where.line);
    if (!before(b->by, b->made, current))
        fail("%s:%d: nothing orders this after the mti_mbarrier_init of thread %u", where.file, where.line, b->by);
    return b;
}

static void complete_phase(MBarrier *b) {
    b->phase++;
    b->pending = b->count;
    b->complete.swap(b->arrived);
    b->arrived.assign(block.threads, 0);
    if (b->repeated >= 0)
        fail("thread %d waited a second time for a phase of an mbarrier at %s:%d, and now the next one is complete: "
             "stale parity?",
             b->repeated, b->repeated_at.file, b->repeated_at.line);
    for (unsigned i = 0; i < block.threads; i++)
        if (threads[i].state == State::at_mbarrier && threads[i].operands == b->at) wake(&threads[i]);
}

void mbarrier_arrive(uint64_t *at, Where where) {
    MBarrier *b = use_mbarrier(at, where);
    for (unsigned u = 0; u < b->complete.size(); u++)
        if (known[current->linear][u] < b->complete[u])
            fail("%s:%d: nothing orders this arrival after the last phase of the mbarrier: an arrival beyond its count "
                 "of %u",
                 where.file, where.line, b->count);
    release(current, &b->arrived);
    if (--b->pending == 0) complete_phase(b);
    *at = mark_of(*b);
    go_on();
}

static bool phase_over(const MBarrier *b, unsigned parity) { return b->phase % 2 != parity; }

void mbarrier_wait(uint64_t *at, unsigned parity, Where where) {
    MBarrier *b = use_mbarrier(at, where);
    unsigned self = current->linear;
    if (parity > 1) fail("%s:%d: mbarrier with parity %u", where.file, where.line, parity);
    int last = b->waited[self];
    if (phase_over(b, parity) && last == (int)b->phase) b->repeated = (int)self, b->repeated_at = where;
    if (!phase_over(b, parity) && last >= 0 && (int)b->phase >= last + 2)
        fail("%s:%d: %d phases of the mbarrier are complete since the last wait of this thread: it waits for one that "
             "is over by two",
             where.file, where.line, (int)b->phase - last);
    while (!phase_over(b, parity)) {
        unsigned phase = b->phase;
        current->operands = at;
        sleep_as(State::at_mbarrier, where);
        b = find_mbarrier(at);
        if (b->phase > phase + 1) fail("%s:%d: the phase after the awaited one is over, too", where.file, where.line);
    }
    b->waited[self] = (int)b->phase;
    acquire(current, b->complete);
}

// ---- named barriers ------------------------------------------------------------------------------------------------

struct NamedBarrier {
    int threads;               // of the present round; 0: nobody has arrived
    int arrived;               // threads of whole warps
    unsigned lanes[max_warps]; // that have arrived
    bool whole[max_warps];     // all lanes of the warp have arrived
    unsigned waiting;          // threads that wait
    Clocks clocks;
    Where where; // of the first arrival
};

static NamedBarrier named_barriers[16];

static void complete_named(NamedBarrier *n) {
    unsigned waiting = n->waiting;
    Clocks clocks = std::move(n->clocks);
    *n = NamedBarrier();
    if (!waiting) fail("a named barrier completes, but nobody waits at it");
    for (unsigned i = 0; i < block.threads; i++) {
        if (threads[i].state != State::at_named_barrier || threads[i].operands != n) continue;
        acquire(&threads[i], clocks);
        wake(&threads[i]);
    }
}

// Counts a warp when all its threads that have not exited have arrived.
static void count_warp(NamedBarrier *n, unsigned w) {
    Warp *warp = &block.warps[w];
    if (n->whole[w] || !n->lanes[w] || (warp->present & ~warp->exited & ~n->lanes[w])) return;
    n->whole[w] = true;
    n->arrived += (int)warp_lanes;
    if (n->arrived > n->threads) fail("more than %d threads arrive at a named barrier", n->threads);
    if (n->arrived == n->threads) complete_named(n);
}

void named_barrier(int id, int count, bool waits, Where where) {
    start_clocks();
    if (id < 1 || id > 15) fail("%s:%d: named barrier %d", where.file, where.line, id);
    if (count < 32 || count % 32 || count > (int)(block.threads + 31) / 32 * 32)
        fail("%s:%d: a named barrier of %d threads in a block of %u", where.file, where.line, count, block.threads);
    NamedBarrier *n = &named_barriers[id];
    unsigned w = current->linear / warp_lanes, lane = 1u << current->lane;
    if (!n->threads) n->threads = count, n->where = where;
    if (n->threads != count)
        fail("%s:%d: named barrier %d has %d threads here, %d at %s:%d", where.file, where.line, id, count, n->threads,
             n->where.file, n->where.line);
    if (n->lanes[w] & lane)
        fail("%s:%d: a thread arrives twice at named barrier %d before it is complete", where.file, where.line, id);
    n->lanes[w] |= lane;
    release(current, &n->clocks);
    current->operands = n;
    if (waits) {
        n->waiting++;
        current->where = where;
        current->state = State::at_named_barrier;
    }
    count_warp(n, w);
    if (waits && current->state == State::at_named_barrier) run_next();
    else go_on();
}

// ---- beginning and end ---------------------------------------------------------------------------------------------

static void begin_hopper() {
    clocks_run = false;
    block_number++;
    mbarriers.clear();
    for (NamedBarrier &n : named_barriers) n = NamedBarrier();
    for (unsigned i = 0; i < block.threads; i++) fences[i].clear();
    free_registers = 0;
    memset(piece_products, 0, sizeof piece_products);
    for (Warpgroup &g : warpgroups) {
        unsigned begin = (unsigned)(&g - warpgroups) * warpgroup_threads;
        g = Warpgroup();
        if (begin + warpgroup_threads <= block.threads) g.first = &threads[begin];
        for (int &r : g.registers) r = registers_at_launch();
    }
}

// Called when a thread exits: nobody may wait for it, and it may not leave products behind.
static void leave_hopper(const Thread *t) {
    if (!clocks_run) return;
    Warpgroup *g = &warpgroups[t->linear / warpgroup_threads];
    if (g->first) g->exited++;
    if (g->arrived) fail("this thread exits, but others of its warpgroup are in %s", step_name(g->step));
    if (!g->products.empty())
        fail("this thread exits before it has waited for the wgmma at %s:%d", g->products[0].where.file,
             g->products[0].where.line);
    for (NamedBarrier &n : named_barriers)
        if (n.threads) count_warp(&n, t->linear / warp_lanes);
}

static void end_hopper() {
    for (const NamedBarrier &n : named_barriers)
        if (n.threads)
            report("block (%u, %u, %u) ends, but %d of %d threads have arrived at the named barrier of %s:%d",
                   block.index.x, block.index.y, block.index.z, n.arrived, n.threads, n.where.file, n.where.line);
}

} // namespace mte
