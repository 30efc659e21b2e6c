// check.cpp - the checker: races, reads of unwritten memory, accesses out of bounds.
//
// Kernels are compiled with -fsanitize=thread, but linked against the hooks below instead of the sanitizer's library,
// so every load and store of a kernel calls a hook. A shadow cell for every 4 bytes of device and shared memory keeps
// the last accesses. An access is reported when it conflicts with one of these and is not ordered after it by a
// barrier, __syncwarp, mbarriers and named barriers (the clocks of hopper.h), __threadfence with atomics, or stream
// order. The checker tests the order, not the timing, so one schedule is enough to find a race.
//
// Build all files with -DMTE_CHECK, and the kernels with -fsanitize=thread in addition; link without it. With gcc, a
// store `*p = f()` of a structure that f returns is seen only when f is inlined. clang needs the objcopy of build.sh.

#include "core.h"

#ifndef MTE_CHECK

namespace mte {
void access_range(const void *, size_t, bool) {}
} // namespace mte

#else

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include <sys/mman.h>

extern "C" char __executable_start;
extern "C" char _end;

namespace mte {

// ---- shadow memory -------------------------------------------------------------------------------------------------

enum : uint8_t { is_atomic = 1, is_write = 2, is_pending = 4, is_whole = 8 };

struct Record {
    uint32_t operation; // id; 0: the record is empty
    uint32_t block;
    uint32_t clock; // of the thread, see hopper.h
    uint16_t thread;
    uint16_t barrier_epoch;
    uint16_t warp_epoch;
    uint8_t flags;
    uint8_t bytes; // mask of the accessed bytes of the cell
};

static constexpr size_t cell_bytes = 4;

struct Cell {
    Record writes[2];
    Record reads[2];
};

// The shadow of one memory range. The system allocates its pages when they are first touched.
struct Shadow {
    char *base = nullptr;
    Cell *cells = nullptr;
    uint8_t *written = nullptr; // for each cell, a mask of the bytes that have been written

    void make(char *range, size_t bytes) {
        base = range;
        cells = static_cast<Cell *>(map(bytes / cell_bytes * sizeof(Cell)));
        written = static_cast<uint8_t *>(map(bytes / cell_bytes));
    }

    static void *map(size_t bytes) {
        void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) {
            perror("ENGINE: mmap of the checker's shadow memory");
            abort();
        }
        return p;
    }
};

static Shadow device_shadow;
static Shadow shared_shadow;

// Device memory is never reused, so the shadow of a new allocation is still empty.
void checker_device_new(const void *, size_t) {
    if (!device_shadow.base) device_shadow.make(device_range(), device_range_bytes);
}

template <class T> static void give_back(T *first, T *last) {
    const uintptr_t page = 4096, from = ((uintptr_t)first + page - 1) / page * page, to = (uintptr_t)last / page * page;
    if (to > from) madvise(reinterpret_cast<void *>(from), to - from, MADV_DONTNEED);
}

// Returns the shadow of a freed allocation to the system: it is sixteen times as large as the allocation.
void checker_device_gone(const void *p, size_t bytes) {
    const size_t first = (size_t)((const char *)p - device_shadow.base) / cell_bytes, last = first + bytes / cell_bytes;
    give_back(device_shadow.cells + first, device_shadow.cells + last);
    give_back(device_shadow.written + first, device_shadow.written + last);
}

// Only the `written` masks are cleared. conflict() ignores the records of other blocks in shared memory.
void checker_shared_new(const void *p, size_t bytes) {
    if (!shared_shadow.base) shared_shadow.make(shared_arena(), shared_arena_bytes);
    size_t first = (size_t)((const char *)p - shared_shadow.base) / cell_bytes;
    memset(shared_shadow.written + first, 0, (bytes + cell_bytes - 1) / cell_bytes);
}

// ---- order between blocks: a __threadfence() and an atomic, then in another block an atomic on the same address -----

struct Release {
    const void *address;
    unsigned order; // number of the release at this address
    uint16_t thread;
    uint16_t barrier_epoch;
};

struct Acquire {
    const void *address;
    unsigned order; // number of the last release that the atomic saw
    uint16_t thread;
    uint16_t barrier_epoch;
};

static std::unordered_map<uint32_t, std::vector<Release>> releases; // key: block
static std::unordered_map<const void *, unsigned> release_counts;
static std::vector<Acquire> acquires; // those of the running block

// true on the host thread that runs a grid; other host threads may execute instrumented host code meanwhile
static thread_local bool running_grid;

void checker_grid_begins() {
    running_grid = true;
    releases.clear();
    release_counts.clear();
}

void checker_grid_ends() { running_grid = false; }

void checker_block_begins() { acquires.clear(); }

static void note_atomic(const Thread *t, const void *p) {
    uint16_t thread = (uint16_t)t->linear;
    auto seen = release_counts.find(p);
    if (seen != release_counts.end()) acquires.push_back({p, seen->second, thread, block.epoch});
    if (t->fenced) releases[block.linear].push_back({p, ++release_counts[p], thread, block.epoch});
}

static bool handed_over(const Record &earlier, const Record &now) {
    auto found = releases.find(earlier.block);
    if (found == releases.end()) return false;
    for (const Release &r : found->second) {
        if (r.thread != earlier.thread && r.barrier_epoch <= earlier.barrier_epoch) continue;
        for (const Acquire &a : acquires) {
            bool seen = a.address == r.address && a.order >= r.order;
            if (seen && (a.thread == now.thread || a.barrier_epoch < now.barrier_epoch)) return true;
        }
    }
    return false;
}

// ---- conflicts -----------------------------------------------------------------------------------------------------

static bool operation_ordered(uint32_t earlier) {
    static uint32_t cached_earlier;
    static uint32_t cached_now;
    static bool cached_answer;
    uint32_t now = operation_id();
    if (earlier == cached_earlier && now == cached_now) return cached_answer;
    cached_earlier = earlier;
    cached_now = now;
    return cached_answer = operation_before(earlier);
}

// Returns the reason why `now` conflicts with `earlier`: the same address, no order between them. NULL: no conflict.
static const char *conflict(const Record &earlier, const Record &now, bool shared) {
    if (!earlier.operation || !(earlier.bytes & now.bytes)) return nullptr;
    if (!((earlier.flags | now.flags) & is_write)) return nullptr;
    if (earlier.flags & now.flags & is_atomic) return nullptr;
    bool same_operation = earlier.operation == now.operation;
    if (shared && !(same_operation && earlier.block == now.block)) return nullptr;
    if (!same_operation)
        return operation_ordered(earlier.operation) ? nullptr
                                                    : "race between streams: no event orders the two operations";
    if (earlier.block != now.block) return handed_over(earlier, now) ? nullptr : "race between blocks";
    if (earlier.thread == now.thread || earlier.barrier_epoch != now.barrier_epoch) return nullptr;
    bool same_warp = earlier.thread / warp_lanes == now.thread / warp_lanes;
    if (same_warp && earlier.warp_epoch != now.warp_epoch) return nullptr;
    if (precedes(earlier.thread, earlier.clock, now.thread)) return nullptr;
    return same_warp ? "race in a warp: no __syncwarp between the two accesses"
                     : "race in a block: no __syncthreads between the two accesses, and no arrival and wait";
}

// ---- reports -------------------------------------------------------------------------------------------------------

struct Here {
    const void *p;
    size_t bytes;
    bool write;
    const void *code;
};

static std::string describe_address(const void *p) {
    char text[128];
    const Allocation *a = in_device_range(p) ? find_allocation(p) : nullptr;
    if (a)
        snprintf(text, sizeof text, "byte %td of a device allocation of %zu bytes%s", (const char *)p - a->begin,
                 a->bytes, a->live ? "" : ", freed");
    else if (in_shared_array(p, 1)) snprintf(text, sizeof text, "shared memory at %p", p);
    else snprintf(text, sizeof text, "%p", p);
    return text;
}

static std::string describe_record(const Record *r) {
    if (!r) return "";
    char text[256];
    const char *what = r->flags & is_write ? "written" : "read";
    if (r->flags & is_whole) snprintf(text, sizeof text, "; %s by '%s'", what, operation_label(r->operation));
    else
        snprintf(text, sizeof text, "; %s by '%s' block %u thread %u", what, operation_label(r->operation), r->block,
                 r->thread);
    return text;
}

// Reports each kind of error once per place in the code. `code` is an address for addr2line.
static void complain(const Here &here, const char *kind, const Record *earlier) {
    static std::set<std::pair<const void *, std::string>> *told = new std::set<std::pair<const void *, std::string>>;
    if (!told->insert({here.code, kind}).second) return;
    std::string address = describe_address(here.p);
    std::string before = describe_record(earlier);
    long offset = here.code ? (long)((const char *)here.code - 1 - &__executable_start) : 0;
    report("CHECK %s: '%s' %s %zu bytes, %s%s (code %#lx)", kind, operation_label(operation_id()),
           here.write ? "writes" : "reads", here.bytes, address.c_str(), before.c_str(), offset);
}

// ---- one access ----------------------------------------------------------------------------------------------------

static bool same_origin(const Record &a, const Record &b) {
    return a.operation == b.operation && a.block == b.block && a.thread == b.thread &&
           a.barrier_epoch == b.barrier_epoch && a.warp_epoch == b.warp_epoch && a.clock == b.clock &&
           a.flags == b.flags;
}

static bool same_epoch(const Record &a, const Record &b) {
    return a.operation == b.operation && a.block == b.block && a.barrier_epoch == b.barrier_epoch;
}

// Stores `now` in one of the two slots. A slot with a record of the same origin takes the bytes of `now`. Otherwise
// `now` replaces slot 0, or slot 1 if slot 0 is of the same epoch, is not ordered before `now` by the clocks, and `now`
// does not overwrite all its bytes.
static void keep(Record slots[2], const Record &now) {
    for (int i = 0; i < 2; i++)
        if (same_origin(slots[i], now)) {
            slots[i].bytes |= now.bytes;
            return;
        }
    bool overwritten = (now.flags & is_write) && !(slots[0].bytes & ~now.bytes);
    bool overtaken = !(slots[0].bytes & ~now.bytes) && precedes(slots[0].thread, slots[0].clock, now.thread);
    bool first_matters = same_epoch(slots[0], now) && !overwritten && !overtaken;
    slots[first_matters ? 1 : 0] = now;
}

static void check_pending(const Cell &cell, const Record &now, bool ends_copy, const Here &here) {
    for (const Record &w : cell.writes) {
        if (!(w.flags & is_pending) || !(w.bytes & now.bytes)) continue;
        if (w.operation != now.operation || w.block != now.block || (ends_copy && w.thread == now.thread)) continue;
        complain(here, "cp.async destination touched before the wait", &w);
    }
}

static void check_conflicts(const Cell &cell, const Record &now, bool shared, const Here &here) {
    for (int i = 0; i < 4; i++) {
        const Record &earlier = i < 2 ? cell.writes[i] : cell.reads[i - 2];
        if (const char *why = conflict(earlier, now, shared)) {
            complain(here, why, &earlier);
            return;
        }
    }
}

static void keep_write(Cell *cell, const Record &now) {
    bool covers = now.bytes == 0xf && !(now.flags & is_atomic);
    // an access that is ordered after this write is also ordered after the older ones
    if (covers) memset(static_cast<void *>(cell), 0, sizeof *cell);
    keep(cell->writes, now);
}

// Checks an access to one cell for pending copies, unwritten bytes and conflicts, and records it.
static void access_cell(Shadow *shadow, size_t index, Record now, Access kind, const Here &here) {
    Cell *cell = &shadow->cells[index];
    bool shared = shadow == &shared_shadow;
    bool reads = kind == Access::read || kind == Access::atomic;
    check_pending(*cell, now, kind == Access::copy_end, here);
    if (reads && (shadow->written[index] & now.bytes) != now.bytes) {
        complain(here, "read of unwritten memory", nullptr);
        shadow->written[index] |= now.bytes;
    }
    check_conflicts(*cell, now, shared, here);
    if (kind == Access::read) {
        keep(cell->reads, now);
        return;
    }
    shadow->written[index] |= now.bytes;
    keep_write(cell, now);
}

static void access_cells(Shadow *shadow, Record now, Access kind, const Here &here) {
    size_t begin = (size_t)((const char *)here.p - shadow->base);
    size_t end = begin + here.bytes;
    for (size_t index = begin / cell_bytes; index * cell_bytes < end; index++) {
        size_t first = index * cell_bytes < begin ? begin % cell_bytes : 0;
        size_t last = std::min(end - index * cell_bytes, cell_bytes);
        now.bytes = (uint8_t)((1u << last) - (1u << first));
        access_cell(shadow, index, now, kind, here);
    }
}

static void access_shared(const Thread *t, const Record &now, Access kind, const Here &here) {
    access_cells(&shared_shadow, now, kind, here);
    if (kind == Access::write || kind == Access::atomic) write_shared(t, here.p, here.bytes);
}

static uint8_t flags_of(Access kind) {
    switch (kind) {
    case Access::read: return 0;
    case Access::atomic: return is_write | is_atomic;
    case Access::copy_begin: return is_write | is_pending;
    default: return is_write;
    }
}

static bool kernel_may_touch(const void *p, size_t bytes) {
    const char *c = static_cast<const char *>(p);
    const Launch *launch = running_launch();
    const char *call = static_cast<const char *>(launch->call.get());
    if (c >= call && c < call + launch->call_bytes) return true;
    if (c >= &__executable_start && c < &_end) return true; // constants of the program
    return host_pinned(p, bytes);
}

static const char *device_fault(const void *p, size_t bytes) {
    static const Allocation *recent; // cache: most accesses are to the same allocation as the one before
    const char *c = static_cast<const char *>(p);
    bool known = recent && recent->live && c >= recent->begin && c + bytes <= recent->begin + recent->bytes;
    if (!known) {
        if (!device_valid(p, bytes)) return "out of bounds";
        recent = find_allocation(p);
    }
    int device = operation_device();
    return recent->device == device || reachable(*recent, device) ? nullptr : "memory of another device";
}

// Checks one access of a kernel. Device and shared memory have shadow cells; any other address must be in the kernel's
// arguments, its stack, the program's constants or pinned host memory.
void access(const Thread *t, const void *p, size_t bytes, Access kind, const void *code) {
    if (on_kernel_stack(p)) return;
    Here here = {p, bytes, kind != Access::read, code};
    Record now = {operation_id(), block.linear,   clock_of(t),    (uint16_t)t->linear,
                  block.epoch,    t->warp->epoch, flags_of(kind), 0};
    if (in_device_range(p)) {
        if (const char *wrong = device_fault(p, bytes)) {
            complain(here, wrong, nullptr);
            return;
        }
        if (kind == Access::atomic) note_atomic(t, p);
        access_cells(&device_shadow, now, kind, here);
    } else if (p >= shared_arena() && p < shared_arena() + shared_arena_bytes) {
        if (in_shared_array(p, bytes)) access_shared(t, now, kind, here);
        else complain(here, "out of bounds of shared memory", nullptr);
    } else if (!kernel_may_touch(p, bytes)) {
        complain(here, "host memory used by a kernel", nullptr);
    }
}

void access_range(const void *p, size_t bytes, bool write) {
    Guard guard;
    if (!bytes || !in_device_range(p)) return;
    Here here = {p, bytes, write, nullptr};
    if (!device_valid(p, bytes)) {
        complain(here, "out of bounds", nullptr);
        return;
    }
    Record now = {operation_id(), 0, 0, 0, 0, 0, (uint8_t)(is_whole | (write ? is_write : 0)), 0};
    access_cells(&device_shadow, now, write ? Access::write : Access::read, here);
}

static void hook(const void *p, size_t bytes, bool write, const void *code) {
    if (running_grid && current) access(current, p, bytes, write ? Access::write : Access::read, code);
}

} // namespace mte

// ---- what -fsanitize=thread calls ----------------------------------------------------------------------------------

#define CODE __builtin_return_address(0)

#define ACCESS_HOOKS(N)                                                                                                \
    extern "C" void __tsan_read##N(void *p) { mte::hook(p, N, false, CODE); }                                          \
    extern "C" void __tsan_write##N(void *p) { mte::hook(p, N, true, CODE); }                                          \
    extern "C" void __tsan_read_write##N(void *p) { mte::hook(p, N, true, CODE); }                                     \
    extern "C" void __tsan_volatile_read##N(void *p) { mte::hook(p, N, false, CODE); }                                 \
    extern "C" void __tsan_volatile_write##N(void *p) { mte::hook(p, N, true, CODE); }                                 \
    extern "C" void __tsan_unaligned_read##N(void *p) { mte::hook(p, N, false, CODE); }                                \
    extern "C" void __tsan_unaligned_write##N(void *p) { mte::hook(p, N, true, CODE); }                                \
    extern "C" void __tsan_unaligned_read_write##N(void *p) { mte::hook(p, N, true, CODE); }                           \
    extern "C" void __tsan_unaligned_volatile_read##N(void *p) { mte::hook(p, N, false, CODE); }                       \
    extern "C" void __tsan_unaligned_volatile_write##N(void *p) { mte::hook(p, N, true, CODE); }
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)

extern "C" void __tsan_read_range(void *p, unsigned long bytes) { mte::hook(p, bytes, false, CODE); }
extern "C" void __tsan_write_range(void *p, unsigned long bytes) { mte::hook(p, bytes, true, CODE); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void **, void *) {}
extern "C" void __tsan_vptr_read(void **) {}

extern "C" void *__tsan_memcpy(void *to, const void *from, unsigned long bytes) {
    mte::hook(from, bytes, false, CODE);
    mte::hook(to, bytes, true, CODE);
    return memcpy(to, from, bytes);
}

extern "C" void *__tsan_memmove(void *to, const void *from, unsigned long bytes) {
    mte::hook(from, bytes, false, CODE);
    mte::hook(to, bytes, true, CODE);
    return memmove(to, from, bytes);
}

extern "C" void *__tsan_memset(void *to, int value, unsigned long bytes) {
    mte::hook(to, bytes, true, CODE);
    return memset(to, value, bytes);
}

// Host code in the same file as kernels may use C or C++ atomics.
#define ATOMIC_OPERATION(T, bits, name)                                                                                \
    extern "C" T __tsan_atomic##bits##_fetch_##name(volatile T *p, T value, int) {                                     \
        return __atomic_fetch_##name(p, value, __ATOMIC_SEQ_CST);                                                      \
    }
#define ATOMIC_COMPARE(T, bits, strength)                                                                              \
    extern "C" int __tsan_atomic##bits##_compare_exchange_##strength(volatile T *p, T *expected, T value, int, int) {  \
        return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);             \
    }
#define ATOMIC_HOOKS(T, bits)                                                                                          \
    extern "C" T __tsan_atomic##bits##_load(const volatile T *p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
    extern "C" void __tsan_atomic##bits##_store(volatile T *p, T value, int) {                                         \
        __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                                  \
    }                                                                                                                  \
    extern "C" T __tsan_atomic##bits##_exchange(volatile T *p, T value, int) {                                         \
        return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                                  \
    extern "C" T __tsan_atomic##bits##_compare_exchange_val(volatile T *p, T expected, T value, int, int) {            \
        __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                   \
        return expected;                                                                                               \
    }                                                                                                                  \
    ATOMIC_OPERATION(T, bits, add)                                                                                     \
    ATOMIC_OPERATION(T, bits, sub)                                                                                     \
    ATOMIC_OPERATION(T, bits, and)                                                                                     \
    ATOMIC_OPERATION(T, bits, or)                                                                                      \
    ATOMIC_OPERATION(T, bits, xor)                                                                                     \
    ATOMIC_OPERATION(T, bits, nand)                                                                                    \
    ATOMIC_COMPARE(T, bits, strong)                                                                                    \
    ATOMIC_COMPARE(T, bits, weak)
ATOMIC_HOOKS(uint8_t, 8)
ATOMIC_HOOKS(uint16_t, 16)
ATOMIC_HOOKS(uint32_t, 32)
ATOMIC_HOOKS(uint64_t, 64)

extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
extern "C" void __tsan_atomic_signal_fence(int) {}

#endif
