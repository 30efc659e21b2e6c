// core.cpp - runs one kernel: a fiber per CUDA thread, barriers, warp collectives, cp.async, shared memory.
//
// All functions run with the engine's lock held, so one kernel runs at a time. Fibers switch only at barriers, at
// collectives and in __nanosleep; the run queue selects the thread that continues (MTE_THREADS). Blocks run one after
// the other, in the order that MTE_BLOCKS selects.

#include "core.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>

#if defined(MTE_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#define MTE_UCONTEXT 1
#include <ucontext.h>
#endif

namespace mte {

Thread *current;
Block block;

static Thread threads[max_block_threads];
static const Launch *running;
static bool ended_by_failure;

const Launch *running_launch() { return running; }

// ---- reports -------------------------------------------------------------------------------------------------------

static int error_count;

// Ends the program with status 97 after the engine has reported an error, even if the test program itself passed.
static void exit_with_failure() {
    fprintf(stderr, "ENGINE: %d error%s reported\n", error_count, error_count == 1 ? "" : "s");
    fflush(nullptr);
    _Exit(97);
}

static void report_list(const char *format, va_list arguments) {
    lock();
    if (error_count++ == 0) atexit(exit_with_failure);
    fprintf(stderr, "ENGINE: ");
    if (running) fprintf(stderr, "kernel %s: ", running->kernel.c_str());
    if (current)
        fprintf(stderr, "block (%u, %u, %u) thread (%u, %u, %u): ", block.index.x, block.index.y, block.index.z,
                current->index.x, current->index.y, current->index.z);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    unlock();
}

void report(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report_list(format, arguments);
    va_end(arguments);
}

int errors() {
    lock();
    int count = error_count;
    unlock();
    return count;
}

static const char *state_name(State state) {
    switch (state) {
    case State::runnable: return "runnable";
    case State::at_barrier: return "at the barrier";
    case State::in_collective: return "in the warp collective";
    case State::in_warpgroup: return "in the instruction of a warpgroup";
    case State::at_registers: return "in setmaxnreg";
    case State::at_mbarrier: return "at the mbarrier";
    case State::at_named_barrier: return "at the named barrier";
    default: return "exited";
    }
}

static bool same_place(Where a, Where b) { return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file)); }

// Prints where the threads of the block are, one line for each run of consecutive threads in the same state and place.
static void print_threads() {
    const Thread *previous = nullptr;
    int lines_left = 12;
    for (unsigned i = 0; i < block.threads && lines_left; i++) {
        const Thread *t = &threads[i];
        bool same = previous && previous->state == t->state && same_place(previous->where, t->where);
        previous = t;
        if (same) continue;
        lines_left--;
        fprintf(stderr, "    from thread %u: %s", i, state_name(t->state));
        if (t->state != State::runnable && t->state != State::exited)
            fprintf(stderr, " at %s:%d", t->where.file, t->where.line);
        if (t->state == State::in_collective) fprintf(stderr, ", mask %08x", t->mask);
        fprintf(stderr, "\n");
    }
}

// ---- fibers --------------------------------------------------------------------------------------------------------

struct Fiber {
    void *stack_pointer; // valid while the fiber is suspended (with ucontext: points to its ucontext_t)
    const void *stack_low;
    size_t stack_bytes;
    void *asan_fake_stack;
};

static constexpr size_t stack_bytes = 256 << 10;
static constexpr size_t guard_bytes = 4096;

static Fiber fibers[max_block_threads];
static Fiber *free_fibers[max_block_threads];
static unsigned free_fiber_count;
static Fiber scheduler; // the host thread that called run_grid
static char *stacks;

#ifdef MTE_UCONTEXT

static void switch_stack(void **save, void *load) { swapcontext(static_cast<ucontext_t *>(*save), (ucontext_t *)load); }

static void prepare_stack(Fiber *fiber, void (*entry)()) {
    if (!fiber->stack_pointer) fiber->stack_pointer = new ucontext_t;
    ucontext_t *context = static_cast<ucontext_t *>(fiber->stack_pointer);
    getcontext(context);
    context->uc_stack.ss_sp = const_cast<void *>(fiber->stack_low);
    context->uc_stack.ss_size = fiber->stack_bytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}

static void prepare_scheduler() {
    if (!scheduler.stack_pointer) scheduler.stack_pointer = new ucontext_t;
}

#else

// Pushes the callee-saved registers, stores the stack pointer in *save, and continues with the stack `load`.
extern "C" void mte_switch_stack(void **save, void *load);

#if defined(__x86_64__)
static constexpr int entry_word = 6; // index of the return address among the saved words
__asm__(".text\n"
        ".globl mte_switch_stack\n"
        ".type mte_switch_stack, @function\n"
        "mte_switch_stack:\n"
        "push %rbp\n"
        "push %rbx\n"
        "push %r12\n"
        "push %r13\n"
        "push %r14\n"
        "push %r15\n"
        "mov %rsp, (%rdi)\n"
        "mov %rsi, %rsp\n"
        "pop %r15\n"
        "pop %r14\n"
        "pop %r13\n"
        "pop %r12\n"
        "pop %rbx\n"
        "pop %rbp\n"
        "ret\n"
        ".size mte_switch_stack, .-mte_switch_stack\n");
#else
static constexpr int entry_word = 11; // index of x30 (the return address) among the saved words
__asm__(".text\n"
        ".globl mte_switch_stack\n"
        ".type mte_switch_stack, %function\n"
        "mte_switch_stack:\n"
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp, #0]\n"
        "stp x21, x22, [sp, #16]\n"
        "stp x23, x24, [sp, #32]\n"
        "stp x25, x26, [sp, #48]\n"
        "stp x27, x28, [sp, #64]\n"
        "stp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\n"
        "stp d10, d11, [sp, #112]\n"
        "stp d12, d13, [sp, #128]\n"
        "stp d14, d15, [sp, #144]\n"
        "mov x9, sp\n"
        "str x9, [x0]\n"
        "mov sp, x1\n"
        "ldp x19, x20, [sp, #0]\n"
        "ldp x21, x22, [sp, #16]\n"
        "ldp x23, x24, [sp, #32]\n"
        "ldp x25, x26, [sp, #48]\n"
        "ldp x27, x28, [sp, #64]\n"
        "ldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\n"
        "ldp d10, d11, [sp, #112]\n"
        "ldp d12, d13, [sp, #128]\n"
        "ldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\n"
        "ret\n"
        ".size mte_switch_stack, .-mte_switch_stack\n");
#endif

static void switch_stack(void **save, void *load) { mte_switch_stack(save, load); }

// Builds the stack that switch_stack would leave behind just before it enters `entry`.
static void prepare_stack(Fiber *fiber, void (*entry)()) {
    // offset of the stack top: tops at equal distances would share few cache sets
    size_t color = (size_t)(fiber - fibers) % 61 * 64;
    uintptr_t top = (uintptr_t)fiber->stack_low + fiber->stack_bytes - color;
    void **words = reinterpret_cast<void **>(top - 32 * sizeof(void *)); // a multiple of 16, as both ABIs require
    memset(words, 0, 32 * sizeof(void *));
    words[entry_word] = reinterpret_cast<void *>(entry);
    fiber->stack_pointer = words;
}

static void prepare_scheduler() {}

#endif

// Switches stacks, and tells AddressSanitizer. `leaving`: `from` is never resumed.
static void switch_fiber(Fiber *from, Fiber *to, bool leaving) {
#ifdef MTE_ASAN
    __sanitizer_start_switch_fiber(leaving ? nullptr : &from->asan_fake_stack, to->stack_low, to->stack_bytes);
#else
    (void)leaving;
#endif
    switch_stack(&from->stack_pointer, to->stack_pointer);
#ifdef MTE_ASAN
    __sanitizer_finish_switch_fiber(from->asan_fake_stack, nullptr, nullptr);
#endif
}

static void make_stacks() {
    size_t bytes = max_block_threads * stack_bytes;
    stacks = static_cast<char *>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) abort();
    for (unsigned i = 0; i < max_block_threads; i++) {
        char *low = stacks + i * stack_bytes;
        mprotect(low, guard_bytes, PROT_NONE);
        fibers[i].stack_low = low;
        fibers[i].stack_bytes = stack_bytes;
    }
}

bool on_kernel_stack(const void *p) {
    return (const char *)p >= stacks && (const char *)p < stacks + max_block_threads * stack_bytes;
}

// ---- run queue -----------------------------------------------------------------------------------------------------

static unsigned queue[max_block_threads];
static unsigned queue_head;
static unsigned queue_length;

static unsigned &queue_slot(unsigned i) { return queue[(queue_head + i) % max_block_threads]; }

static void queue_push(unsigned thread) { queue_slot(queue_length++) = thread; }

static unsigned queue_pop() {
    queue_length--;
    if (config().threads == Order::lifo) return queue_slot(queue_length);
    if (config().threads == Order::random)
        std::swap(queue_slot(0), queue_slot((unsigned)random_below(queue_length + 1)));
    unsigned thread = queue_slot(0);
    queue_head++;
    return thread;
}

static void free_all_fibers() {
    free_fiber_count = 0;
    for (Fiber &fiber : fibers) free_fibers[free_fiber_count++] = &fiber;
}

// Clears AddressSanitizer's marks near the stack top. A fiber ends in the middle of fiber_entry(), which leaves the
// marks of its frame behind.
static void clean_stack_top(const Fiber *fiber) {
    constexpr size_t top_bytes = 8192;
    ASAN_UNPOISON_MEMORY_REGION((const char *)fiber->stack_low + stack_bytes - top_bytes, top_bytes);
}

static void fiber_entry();

static void start(Thread *t) {
    t->fiber = free_fibers[--free_fiber_count];
    clean_stack_top(t->fiber);
    prepare_stack(t->fiber, fiber_entry);
}

static void switch_to_thread(Fiber *from, Thread *to, bool leaving) {
    if (!to->fiber) start(to);
    current = to;
    switch_fiber(from, to->fiber, leaving);
}

static void return_to_scheduler(Fiber *from) {
    current = nullptr;
    switch_fiber(from, &scheduler, true);
}

static void end_after_failure() {
    ended_by_failure = true;
    return_to_scheduler(current->fiber);
}

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report_list(format, arguments);
    va_end(arguments);
    if (!current) abort();
    end_after_failure();
}

static void deadlock() {
    Thread *t = current;
    current = nullptr;
    report("block (%u, %u, %u): deadlock, %u of %u threads have not exited", block.index.x, block.index.y,
           block.index.z, block.live, block.threads);
    print_threads();
    current = t;
    end_after_failure();
}

static Thread *next_thread() {
    if (!queue_length) deadlock();
    return &threads[queue_pop()];
}

// Runs the next runnable thread. Returns when the calling thread is selected again.
static void run_next() {
    Thread *self = current;
    Thread *next = next_thread();
    if (next != self) switch_to_thread(self->fiber, next, false);
}

void yield() {
    queue_push(current->linear);
    run_next();
}

void fence() { current->fenced = true; }

static void wake(Thread *t) {
    t->state = State::runnable;
    if (t != current) queue_push(t->linear);
}

// Called by the last thread to arrive, after it has woken the others. With fifo it continues itself; with the other
// orders another thread may run first.
static void go_on() {
    if (config().threads != Order::fifo) yield();
}

// ---- barrier -------------------------------------------------------------------------------------------------------

static void complete_barrier() {
    block.arrived = 0;
    block.barrier_result = block.barrier_count;
    block.epoch++;
    for (unsigned i = 0; i < block.threads; i++)
        if (threads[i].state == State::at_barrier) wake(&threads[i]);
}

static void divergent_barrier(Where where) {
    print_threads();
    fail("divergent barrier: this thread is at %s:%d, others wait at %s:%d", where.file, where.line, block.barrier.file,
         block.barrier.line);
}

// Waits until all threads that have not exited are at the barrier. Returns how many of their predicates are true.
int barrier(int predicate, Where where) {
    if (!block.arrived) {
        block.barrier = where;
        block.barrier_count = 0;
    } else if (!same_place(block.barrier, where)) {
        divergent_barrier(where);
    }
    block.barrier_count += predicate;
    block.arrived++;
    current->where = where;
    current->state = State::at_barrier;
    if (block.arrived < block.live) {
        run_next();
    } else {
        complete_barrier();
        go_on();
    }
    return block.barrier_result;
}

// ---- warp collectives ----------------------------------------------------------------------------------------------

// Returns the lanes of `mask` that must arrive: those that exist in the block and have not exited.
static unsigned lanes_needed(const Warp *warp, unsigned mask) { return mask & warp->present & ~warp->exited; }

// Checks that all lanes of a collective call the same one at the same place, with masks for the same lanes.
static void check_agreement(const Warp *warp, unsigned group) {
    const Thread *first = warp->lanes[__builtin_ctz(group)];
    for (unsigned lane = 0; lane < warp_lanes; lane++) {
        if (!(group >> lane & 1)) continue;
        const Thread *t = warp->lanes[lane];
        bool agrees = t->collective == first->collective && same_place(t->where, first->where) &&
                      lanes_needed(warp, t->mask) == group;
        if (agrees) continue;
        fail("lanes of a warp disagree in the collective: lane %u at %s:%d with mask %08x, lane %u at %s:%d with mask "
             "%08x",
             first->lane, first->where.file, first->where.line, first->mask, lane, t->where.file, t->where.line,
             t->mask);
    }
}

// Completes the collective in which a lane with this mask waits, if all its lanes have arrived.
static bool try_complete(Warp *warp, unsigned mask) {
    unsigned group = lanes_needed(warp, mask);
    if (!group || (warp->waiting & group) != group) return false;
    check_agreement(warp, group);
    warp->lanes[__builtin_ctz(group)]->collective(warp, group);
    warp->waiting &= ~group;
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        if (group >> lane & 1) wake(warp->lanes[lane]);
    return true;
}

// Waits in a warp collective until all lanes of the mask have arrived. The last one completes it for all.
void collective(Collective complete, unsigned mask, void *operands, Where where) {
    Thread *t = current;
    if (!(mask >> t->lane & 1))
        fail("%s:%d: lane %u calls a collective with mask %08x, which leaves it out", where.file, where.line, t->lane,
             mask);
    t->collective = complete;
    t->mask = mask;
    t->operands = operands;
    t->where = where;
    t->state = State::in_collective;
    t->warp->waiting |= 1u << t->lane;
    if (try_complete(t->warp, mask)) go_on();
    else run_next();
}

static void exchange_clocks(Warp *warp, unsigned group); // hopper.h

void complete_syncwarp(Warp *warp, unsigned group) {
    warp->epoch++;
    exchange_clocks(warp, group);
}

template <class Operands> static Operands *operands_of(Warp *warp, unsigned lane) {
    return static_cast<Operands *>(warp->lanes[lane]->operands);
}

void complete_shuffle(Warp *warp, unsigned group) {
    for (unsigned lane = 0; lane < warp_lanes; lane++) {
        if (!(group >> lane & 1)) continue;
        ShuffleOperands *operands = operands_of<ShuffleOperands>(warp, lane);
        if (!(group >> operands->source & 1)) {
            Where where = warp->lanes[lane]->where;
            fail("%s:%d: lane %u shuffles from lane %d, which takes no part (mask %08x)", where.file, where.line, lane,
                 operands->source, group);
        }
        operands->out = operands_of<ShuffleOperands>(warp, (unsigned)operands->source)->in;
    }
}

void complete_vote(Warp *warp, unsigned group) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        if ((group >> lane & 1) && operands_of<VoteOperands>(warp, lane)->predicate) ballot |= 1u << lane;
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        if (group >> lane & 1) operands_of<VoteOperands>(warp, lane)->ballot = ballot;
}

static void need_all_lanes(unsigned group, const char *instruction) {
    if (group != 0xffffffffu) fail("%s without all 32 lanes (mask %08x)", instruction, group);
}

// ---- ldmatrix, mma -------------------------------------------------------------------------------------------------

static void check_shared(const void *p, size_t bytes, size_t alignment, const char *what) {
    if (!in_shared_array(p, bytes)) fail("%s: %p is not inside an array in shared memory", what, p);
    if ((uintptr_t)p % alignment) fail("%s: %p is not %zu-byte aligned", what, p, alignment);
}

static void check_rows(Warp *warp, unsigned group) {
    need_all_lanes(group, "ldmatrix");
    for (unsigned lane = 0; lane < warp_lanes; lane++) {
        const void *row = operands_of<LdmatrixOperands>(warp, lane)->row;
        check_shared(row, 16, 16, "ldmatrix row");
        access(warp->lanes[lane], row, 16, Access::read, nullptr);
    }
}

static void load_element(Warp *warp, unsigned matrix, unsigned row, unsigned column, void *to) {
    const void *p = operands_of<LdmatrixOperands>(warp, 8 * matrix + row)->row;
    memcpy(to, static_cast<const char *>(p) + 2 * column, 2);
}

// Register m of lane l receives two adjacent elements of matrix m: row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1. The
// transposed form swaps rows and columns.
static void load_matrices(Warp *warp, bool transposed) {
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        for (unsigned matrix = 0; matrix < 4; matrix++) {
            uint16_t pair[2];
            for (unsigned j = 0; j < 2; j++) {
                unsigned row = lane / 4;
                unsigned column = 2 * (lane % 4) + j;
                load_element(warp, matrix, transposed ? column : row, transposed ? row : column, &pair[j]);
            }
            memcpy(&operands_of<LdmatrixOperands>(warp, lane)->registers[matrix], pair, sizeof pair);
        }
}

void complete_ldmatrix(Warp *warp, unsigned group) {
    check_rows(warp, group);
    load_matrices(warp, false);
}

void complete_ldmatrix_trans(Warp *warp, unsigned group) {
    check_rows(warp, group);
    load_matrices(warp, true);
}

static float bf16_value(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static float f16_value(uint16_t bits) {
    __half_raw raw;
    raw.x = bits;
    return __half2float(__half(raw));
}

typedef float (*Decode)(uint16_t bits);

struct MmaTile {
    float a[16][16];
    float b[16][8];
    float d[16][8];
};

// Copies the elements of one lane to the places that the PTX manual gives for mma.m16n8k16.
static void gather_lane(MmaTile *tile, const MmaOperands *operands, unsigned lane, Decode decode) {
    unsigned group = lane / 4;
    unsigned pair = 2 * (lane % 4);
    for (unsigned i = 0; i < 8; i++) {
        uint32_t word = operands->a[i / 2];
        unsigned row = group + (i / 2 % 2) * 8;
        tile->a[row][pair + (i / 4) * 8 + i % 2] = decode((uint16_t)(word >> (i % 2 * 16)));
    }
    for (unsigned i = 0; i < 4; i++) {
        uint32_t word = operands->b[i / 2];
        tile->b[pair + (i / 2) * 8 + i % 2][group] = decode((uint16_t)(word >> (i % 2 * 16)));
        tile->d[group + (i / 2) * 8][pair + i % 2] = operands->d[i];
    }
}

static void multiply(MmaTile *tile) {
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) tile->d[i][j] += tile->a[i][k] * tile->b[k][j];
}

static void complete_mma(Warp *warp, unsigned group, Decode decode) {
    need_all_lanes(group, "mma.sync");
    MmaTile tile;
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        gather_lane(&tile, operands_of<MmaOperands>(warp, lane), lane, decode);
    multiply(&tile);
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        for (unsigned i = 0; i < 4; i++)
            operands_of<MmaOperands>(warp, lane)->d[i] = tile.d[lane / 4 + (i / 2) * 8][2 * (lane % 4) + i % 2];
}

void complete_mma_bf16(Warp *warp, unsigned group) { complete_mma(warp, group, bf16_value); }
void complete_mma_f16(Warp *warp, unsigned group) { complete_mma(warp, group, f16_value); }

// ---- cp.async ------------------------------------------------------------------------------------------------------

static constexpr int copy_bytes = 16;

enum class Writer { store, copy, copy_in_flight };

static void check_product_order(const Thread *t, const void *p, size_t bytes);              // hopper.h
static void note_shared_write(const Thread *t, const void *p, size_t bytes, Writer writer); // hopper.h

static void perform(Thread *t, const PendingCopy &copy) {
    if (copy.source_bytes) access(t, copy.source, (size_t)copy.source_bytes, Access::read, nullptr);
    access(t, copy.destination, copy_bytes, Access::copy_end, nullptr);
    memcpy(copy.destination, copy.source, (size_t)copy.source_bytes);
    memset(copy.destination + copy.source_bytes, 0, (size_t)(copy_bytes - copy.source_bytes));
}

static void check_copy(const void *destination, const void *source, int source_bytes) {
    check_shared(destination, copy_bytes, copy_bytes, "cp.async destination");
    if (source_bytes < 0 || source_bytes > copy_bytes) fail("cp.async of %d bytes", source_bytes);
    if ((uintptr_t)source % copy_bytes) fail("cp.async source: %p is not %d-byte aligned", source, copy_bytes);
    if (source_bytes && !device_valid(source, (size_t)source_bytes))
        fail("cp.async source: %p + %d is not inside a device allocation", source, source_bytes);
}

// Starts a cp.async. The hardware may move the data at any time until the wait; MTE_CP selects the time.
static size_t copies_with_source;
size_t copies_that_read() { return copies_with_source; }

void copy_async(void *destination, const void *source, int source_bytes) {
    check_copy(destination, source, source_bytes);
    copies_with_source += source_bytes > 0;
    bool early = config().copy == CopyTime::early || (config().copy == CopyTime::random && random_below(2));
    PendingCopy copy = {static_cast<char *>(destination), static_cast<const char *>(source), source_bytes,
                        current->copy_group, early};
    check_product_order(current, destination, copy_bytes);
    note_shared_write(current, destination, copy_bytes, Writer::copy_in_flight);
    access(current, destination, copy_bytes, Access::copy_begin, __builtin_return_address(0));
    if (early) perform(current, copy);
    current->copies.push_back(copy);
}

void copy_commit() { current->copy_group++; }

void copy_wait(int groups_left) {
    Thread *t = current;
    size_t kept = 0;
    for (const PendingCopy &copy : t->copies) {
        if (copy.group >= t->copy_group - groups_left) {
            t->copies[kept++] = copy;
            continue;
        }
        if (!copy.moved) perform(t, copy);
        note_shared_write(t, copy.destination, copy_bytes, Writer::copy);
    }
    t->copies.resize(kept);
}

// ---- shared memory -------------------------------------------------------------------------------------------------

struct SharedArray {
    const void *key;
    char *begin;
    size_t bytes;
    const char *name;
};

static constexpr size_t shared_red_zone = 64;
static constexpr unsigned char unwritten = 0xff; // a NaN in every floating-point type

static char *arena;
static size_t arena_used;   // end of the last array, red zones included
static size_t shared_bytes; // sum of the sizes of all arrays
static std::vector<SharedArray> arrays;

char *shared_arena() {
    if (arena) return arena;
    void *p = mmap(nullptr, shared_arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) abort();
    return arena = static_cast<char *>(p);
}

static void check_shared_size(size_t bytes, const char *name) {
    size_t fixed = shared_bytes + bytes - running->dynamic_shared;
    if (fixed > shared_per_block)
        fail("MT_SHARED arrays take %zu bytes with '%s', more than %zu", fixed, name, shared_per_block);
    if (!running->shared_allowed && shared_bytes + bytes > shared_per_block)
        fail("shared memory takes %zu bytes with '%s', more than %zu without cudaFuncSetAttribute",
             shared_bytes + bytes, name, shared_per_block);
    if (shared_bytes + bytes > config().shared)
        fail("shared memory takes %zu bytes with '%s', more than %zu", shared_bytes + bytes, name, config().shared);
}

// Fills the arena with 0xff up to the offset `end`.
static void clear_shared(size_t end) {
    if (end > shared_arena_bytes) fail("too many arrays in shared memory");
    ASAN_UNPOISON_MEMORY_REGION(arena + arena_used, end - arena_used);
    memset(arena + arena_used, unwritten, end - arena_used);
    ASAN_POISON_MEMORY_REGION(arena + arena_used, end - arena_used);
    arena_used = end;
}

// Appends an array and a red zone to the arena, and fills both with 0xff.
static void *new_shared_array(const void *key, size_t bytes, size_t alignment, const char *name) {
    alignment = std::max<size_t>(alignment, 16);
    size_t offset = (arena_used + alignment - 1) / alignment * alignment;
    char *begin = shared_arena() + offset;
    clear_shared(offset + bytes + shared_red_zone);
    ASAN_UNPOISON_MEMORY_REGION(begin, bytes);
    shared_bytes += bytes;
    arrays.push_back({key, begin, bytes, name});
    checker_shared_new(begin, bytes);
    return begin;
}

void *shared_array(const void *key, size_t bytes, size_t alignment, const char *name) {
    for (const SharedArray &array : arrays)
        if (array.key == key) return array.begin;
    check_shared_size(bytes, name);
    return new_shared_array(key, bytes, alignment, name);
}

bool in_shared_array(const void *p, size_t bytes) {
    const char *begin = static_cast<const char *>(p);
    for (const SharedArray &array : arrays)
        if (begin >= array.begin && begin + bytes <= array.begin + array.bytes) return true;
    return false;
}

// Checks the red zones after a block has ended. With AddressSanitizer this is not needed: it reports the write itself.
static void check_shared_red_zones() {
#ifndef MTE_ASAN
    for (const SharedArray &array : arrays)
        for (size_t i = 0; i < shared_red_zone; i++) {
            if ((unsigned char)array.begin[array.bytes + i] == unwritten) continue;
            report("block (%u, %u, %u) wrote %zu bytes past the end of shared array '%s'", block.index.x, block.index.y,
                   block.index.z, i, array.name);
            break;
        }
#endif
}

static void begin_shared_memory() {
    ASAN_POISON_MEMORY_REGION(shared_arena(), shared_arena_bytes);
    arrays.clear();
    arena_used = 0;
    shared_bytes = 0;
    block.dynamic_shared = nullptr;
    if (!running->dynamic_shared) return;
    clear_shared(128); // so that the address is no multiple of 256
    block.dynamic_shared = new_shared_array(nullptr, running->dynamic_shared, 128, "dynamic shared memory");
}

} // namespace mte

#include "hopper.h"

namespace mte {

// ---- blocks --------------------------------------------------------------------------------------------------------

// Marks a thread as exited, and completes the collectives and the barrier that waited only for this thread.
static void leave(Thread *t) {
    t->state = State::exited;
    t->warp->exited |= 1u << t->lane;
    block.live--;
    for (unsigned lane = 0; lane < warp_lanes; lane++)
        if (t->warp->waiting >> lane & 1) try_complete(t->warp, t->warp->lanes[lane]->mask);
    if (block.live && block.arrived == block.live) complete_barrier();
    leave_hopper(t);
}

static void note_scheduler_stack() {
#ifdef MTE_ASAN
    const void *low;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &low, &bytes);
    if (scheduler.stack_low) return;
    scheduler.stack_low = low;
    scheduler.stack_bytes = bytes;
#endif
}

// Runs one thread after the other on this fiber, until the next thread already has a fiber of its own.
static void fiber_entry() {
    note_scheduler_stack();
    Fiber *self = current->fiber;
    for (;;) {
        running->thread_main(running->call.get());
        leave(current);
        if (!block.live) return_to_scheduler(self);
        Thread *next = next_thread();
        if (next->fiber) {
            free_fibers[free_fiber_count++] = self;
            switch_to_thread(self, next, true);
        }
        next->fiber = self;
        current = next;
    }
}

static void begin_thread(unsigned linear) {
    Thread *t = &threads[linear];
    dim3 size = block.size;
    t->index = uint3{linear % size.x, linear / size.x % size.y, linear / (size.x * size.y)};
    t->linear = linear;
    t->lane = linear % warp_lanes;
    t->warp = &block.warps[linear / warp_lanes];
    t->warp->lanes[t->lane] = t;
    t->warp->present |= 1u << t->lane;
    t->state = State::runnable;
    t->fenced = false;
    t->fiber = nullptr;
    t->where = Where{"", 0};
    t->copies.clear();
    t->copy_group = 0;
    queue_push(linear);
}

static void begin_block(unsigned linear) {
    dim3 grid = running->grid;
    dim3 size = running->threads;
    memset(static_cast<void *>(&block), 0, sizeof block);
    block.linear = linear;
    block.index = uint3{linear % grid.x, linear / grid.x % grid.y, linear / (grid.x * grid.y)};
    block.size = size;
    block.grid = grid;
    block.threads = size.x * size.y * size.z;
    block.live = block.threads;
    checker_block_begins();
    begin_shared_memory();
    begin_hopper();
    free_all_fibers();
    queue_head = 0;
    queue_length = 0;
    for (unsigned i = 0; i < block.threads; i++) begin_thread(i);
}

static void run_block(unsigned linear) {
    begin_block(linear);
    scheduler.stack_low = nullptr;
    prepare_scheduler();
    switch_to_thread(&scheduler, next_thread(), false);
    if (!ended_by_failure) end_hopper();
    check_shared_red_zones();
}

static std::vector<unsigned> block_order(size_t blocks) {
    std::vector<unsigned> order(blocks);
    for (size_t i = 0; i < blocks; i++) order[i] = (unsigned)i;
    if (config().blocks == Order::lifo) std::reverse(order.begin(), order.end());
    if (config().blocks == Order::random)
        for (size_t i = blocks; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
    return order;
}

// Clears AddressSanitizer's marks on all stacks. Fibers that a failed kernel abandoned have left marks behind.
static void clean_stacks() {
    for (const Fiber &fiber : fibers)
        ASAN_UNPOISON_MEMORY_REGION((const char *)fiber.stack_low + guard_bytes, stack_bytes - guard_bytes);
}

bool run_grid(const Launch &launch) {
    if (!stacks) make_stacks();
    running = &launch;
    ended_by_failure = false;
    checker_grid_begins();
    for (unsigned linear : block_order((size_t)launch.grid.x * launch.grid.y * launch.grid.z)) {
        run_block(linear);
        if (ended_by_failure) break;
    }
    checker_grid_ends();
    if (ended_by_failure) clean_stacks();
    ASAN_UNPOISON_MEMORY_REGION(shared_arena(), shared_arena_bytes);
    running = nullptr;
    return !ended_by_failure;
}

} // namespace mte
