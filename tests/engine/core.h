// core.h - interfaces between the parts of the engine: threads, warps and blocks of the running kernel, shared memory,
// the running stream operation, and the hooks of the checker. Kernels include engine.h instead.
#ifndef MTE_CORE_H
#define MTE_CORE_H

#include "runtime.h"

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define MTE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MTE_ASAN 1
#endif
#endif
#ifdef MTE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, bytes) ((void)(p), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(p, bytes) ((void)(p), (void)(bytes))
#endif

namespace mte {

// ---- places in the source ------------------------------------------------------------------------------------------

struct Where {
    const char *file;
    int line;

    // For use as a default argument: returns the place of the call.
    static Where here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) { return Where{file, line}; }
};

// ---- the running kernel --------------------------------------------------------------------------------------------

constexpr unsigned warp_lanes = 32;
constexpr unsigned max_block_threads = 1024;

struct Warp;

// Completes a collective for the lanes in the mask `group`. All of them have arrived.
typedef void (*Collective)(Warp *warp, unsigned group);

enum class State {
    runnable,
    at_barrier,
    in_collective,
    in_warpgroup,
    at_registers,
    at_mbarrier,
    at_named_barrier,
    exited
};

struct PendingCopy {
    char *destination;
    const char *source;
    int source_bytes;
    int group;
    bool moved; // the data has been moved early
};

struct Fiber;
struct Warpgroup;

struct Thread {
    uint3 index;
    unsigned linear;
    unsigned lane;
    Warp *warp;
    State state;
    bool fenced;  // the thread has called __threadfence()
    Fiber *fiber; // NULL before the thread has started

    // The barrier or collective in which the thread waits.
    Where where;
    Collective collective;
    unsigned mask;
    void (*step)(Warpgroup *group);
    void *operands;

    std::vector<PendingCopy> copies;
    int copy_group;
};

struct Warp {
    Thread *lanes[warp_lanes];
    unsigned present;
    unsigned exited;
    unsigned waiting; // lanes inside a collective
    uint16_t epoch;   // number of __syncwarp calls so far
};

struct Block {
    uint3 index;
    dim3 size;
    dim3 grid;
    unsigned linear;
    unsigned threads;
    unsigned live;
    uint16_t epoch; // number of barriers so far
    unsigned arrived;
    Where barrier;
    int barrier_count;  // arrived threads whose predicate is true
    int barrier_result; // barrier_count of the last complete barrier
    void *dynamic_shared;
    Warp warps[max_block_threads / warp_lanes];
};

extern Thread *current; // the running thread, NULL outside of kernels
extern Block block;

int barrier(int predicate, Where where);
void collective(Collective complete, unsigned mask, void *operands, Where where);
void yield();
void fence();

// Reports an error, ends the running kernel and makes the device unusable (cudaErrorLaunchFailure).
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
void fail(const char *format, ...);

struct Launch {
    std::string kernel;
    dim3 grid;
    dim3 threads;
    size_t dynamic_shared;
    void (*thread_main)(const void *call); // calls the kernel
    std::shared_ptr<const void> call;      // the kernel and a copy of its arguments
    size_t call_bytes;
    bool shared_allowed = true; // cudaFuncSetAttribute was called for the kernel
};

// Runs all blocks, one after the other. Returns false when fail() ended the kernel.
bool run_grid(const Launch &launch);
const Launch *running_launch();

// ---- collectives ---------------------------------------------------------------------------------------------------

struct ShuffleOperands {
    uint64_t in;
    uint64_t out;
    int source;
};
struct VoteOperands {
    int predicate;
    unsigned ballot;
};
struct LdmatrixOperands {
    uint32_t *registers;
    const void *row;
};
struct MmaOperands {
    float *d;
    const uint32_t *a;
    const uint32_t *b;
};

void complete_syncwarp(Warp *warp, unsigned group);
void complete_shuffle(Warp *warp, unsigned group);
void complete_vote(Warp *warp, unsigned group);
void complete_ldmatrix(Warp *warp, unsigned group);
void complete_ldmatrix_trans(Warp *warp, unsigned group);
void complete_mma_bf16(Warp *warp, unsigned group);
void complete_mma_f16(Warp *warp, unsigned group);

void copy_async(void *destination, const void *source, int source_bytes);
void copy_commit();
void copy_wait(int groups_left);
size_t copies_that_read(); // the number of copies so far with source_bytes > 0

// ---- compute capability 9.0 (hopper.h) -----------------------------------------------------------------------------

constexpr unsigned warpgroup_threads = 128;

struct WgmmaOperands {
    float *d;          // of the thread
    const uint32_t *a; // of the thread; NULL: A is the tile
    uint64_t a_tile;
    uint64_t b_tile;
    unsigned columns;
    bool bf16;
    bool transposed; // B
    bool add;
};

// The operands of the other instructions of a warpgroup.
struct StepOperands {
    int value;
    int increases; // setmaxnreg.inc
};

uint64_t wgmma_tile(const void *tile, unsigned lead, unsigned stride);
void wgmma(const WgmmaOperands &operands, Where where);
void wgmma_fence(Where where);
void wgmma_commit(Where where);
void wgmma_wait(int groups_left, Where where);
void set_registers(int count, bool increases, Where where);
void fence_proxy_async();
void named_barrier(int id, int threads, bool waits, Where where);
void mbarrier_init(uint64_t *b, unsigned count);
void mbarrier_arrive(uint64_t *b, Where where);
void mbarrier_wait(uint64_t *b, unsigned parity, Where where);

// For the checker. The clock of a thread; whether what `earlier` did at its clock `clock` precedes what `now` does.
uint32_t clock_of(const Thread *t);
bool precedes(unsigned earlier, uint32_t clock, unsigned now);
// Checks that no product reads the bytes in shared memory before or unordered with a write, and notes the write.
void write_shared(const Thread *t, const void *p, size_t bytes);

// ---- shared memory -------------------------------------------------------------------------------------------------

constexpr size_t shared_arena_bytes = 320 << 10;
// the limit of static arrays, and of all shared memory of a kernel without cudaFuncSetAttribute
constexpr size_t shared_per_block = 48 << 10;
constexpr size_t shared_per_block_optin = 227 << 10; // the limit after cudaFuncSetAttribute, unless MTE_SHARED is set

// Returns the array declared at the site with the address `key`. The first thread of a block that calls this allocates
// the array.
void *shared_array(const void *key, size_t bytes, size_t alignment, const char *name);
bool in_shared_array(const void *p, size_t bytes);
char *shared_arena();
bool on_kernel_stack(const void *p);

// ---- configuration (environment) -----------------------------------------------------------------------------------

enum class Order { fifo, lifo, random };
enum class CopyTime { late, early, random };
enum class Schedule { eager, lazy, random, greedy };

// See engine.h for the variables and their values.
struct Config {
    Order threads;
    Order blocks;
    CopyTime copy;
    CopyTime wgmma;
    Schedule streams;
    bool hopper;
    bool protect;
    int devices;
    size_t memory; // bytes per device
    size_t shared; // bytes per block that cudaFuncSetAttribute can allow
    int patience;  // seconds
};

const Config &config();            // reads the environment at the first call
uint64_t random_below(uint64_t n); // random number generator, seeded with MTE_SEED

// ---- device memory and stream operations (runtime.cpp) -------------------------------------------------------------

constexpr size_t device_range_bytes = (size_t)64 << 30;

struct Allocation {
    char *begin;
    size_t bytes;
    int device;
    bool live;
};

char *device_range();
bool in_device_range(const void *p);
const Allocation *find_allocation(const void *p); // the last allocation that begins at or before p, or NULL
bool host_pinned(const void *p, size_t bytes);
bool reachable(const Allocation &allocation, int device);

uint32_t operation_id(); // id of the running operation; 0: none is running
int operation_device();  // device of the running operation; -1: none is running, or it has several devices
const char *operation_label(uint32_t id);
bool operation_before(uint32_t id); // true if the operation is ordered before the running one

// Enqueues a kernel. `pointers` are the pointers among its arguments, which are checked when it runs.
void launch(const void *function, Launch launch, cudaStream_t stream, std::vector<const void *> pointers);

// ---- the checker (check.cpp) ---------------------------------------------------------------------------------------

enum class Access { read, write, atomic, copy_begin, copy_end };

#ifdef MTE_CHECK
void access(const Thread *thread, const void *p, size_t bytes, Access kind, const void *code);
void checker_shared_new(const void *p, size_t bytes);
void checker_device_new(const void *p, size_t bytes);
void checker_device_gone(const void *p, size_t bytes);
void checker_block_begins();
void checker_grid_begins();
void checker_grid_ends();
#else
inline void access(const Thread *, const void *, size_t, Access, const void *) {}
inline void checker_shared_new(const void *, size_t) {}
inline void checker_device_new(const void *, size_t) {}
inline void checker_device_gone(const void *, size_t) {}
inline void checker_block_begins() {}
inline void checker_grid_begins() {}
inline void checker_grid_ends() {}
#endif

} // namespace mte

#endif // MTE_CORE_H
