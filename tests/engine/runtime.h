// runtime.h - what the stand-ins for CUDA's libraries (cudart, cuBLASLt, NCCL) share: one lock, device work queues,
// checks of device memory.  Test-only.
//
// Every stream is a queue of operations that run on the host thread that waits for them or enqueues them.  Which
// operation runs next, and when, is chosen by MTE_STREAMS among all orders that CUDA permits.
#ifndef MTE_RUNTIME_H
#define MTE_RUNTIME_H

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace mte {

struct Rendezvous;

// One recursive lock over all state of the engine.
void lock();
void unlock();

struct Guard {
    Guard() { lock(); }
    ~Guard() { unlock(); }
    Guard(const Guard &) = delete;
    Guard &operator=(const Guard &) = delete;
};

// Called with the lock held (once): releases it until somebody called notify().  Gives up loudly, by abort(), after
// 10 seconds in which nothing changed.
void wait_for_change();
void notify();

// Appends an operation to a stream; call with the lock held.  `work` runs later, with the lock held, on any host
// thread.  `label` must stay valid for ever (a string literal).
void enqueue(cudaStream_t stream, const char *label, std::function<void()> work);

// An operation of `ranks` streams.  `work` runs once, when every participant has been enqueued and has reached the
// head of its stream.  The runtime frees the rendezvous after it ran.
Rendezvous *rendezvous_new(int ranks, const char *label, std::function<void()> work);
void enqueue_rendezvous(cudaStream_t stream, Rendezvous *rendezvous);

// A stream of a device of another process, for its part of a rendezvous: nothing that waits for a device waits for it.
cudaStream_t stream_elsewhere();

// Does [p, p + bytes) lie inside one live device allocation?
bool device_valid(const void *p, size_t bytes);
// Reports when it does not, or when p is not a multiple of `alignment`.
void check_global(const void *p, size_t bytes, int alignment, const char *what);
// Tells the checker that the running operation reads or writes a whole range of device memory.
void access_range(const void *p, size_t bytes, bool write);

// The operation that runs takes that much longer, by the clock of cudaEventElapsedTime.
void spend(double seconds);

// For tests: whether streams say that they are being captured.
void set_capturing(bool on);

// For tests: how long a product takes, as cudaEventElapsedTime sees it (by default no time at all), the last one that
// ran, and how many did.
struct GemmCall {
    int id, splits, tile;
    unsigned epilogue;
};
void gemm_time(std::function<double(const GemmCall &)> seconds);
GemmCall gemm_last();
long gemm_count();
// Which products fail when they are called, and how often the heuristic was asked.
void gemm_fail(std::function<bool(const GemmCall &)> which);
long gemm_choices();

// Makes a call of this thread return an error: the one of `name` ("cudaMemcpyAsync"; "a kernel launch") that comes
// after so many others of it.  Copies are done all the same, a kernel is not.
void cuda_fail_after(const char *name, int after, cudaError_t error);

// Counts an error and prints "ENGINE: ..." to stderr.
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
void report(const char *format, ...);
int errors();

} // namespace mte

#endif // MTE_RUNTIME_H
