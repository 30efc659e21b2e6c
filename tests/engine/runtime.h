// runtime.h - what the stand-ins for CUDA's libraries (cudart, cuBLASLt, NCCL) share: one lock, device work queues,
// checks of device memory. Test-only.
//
// Every stream is a queue of operations. A host thread runs them when it enqueues an operation or waits for one.
// MTE_STREAMS selects which operation runs next, among all orders that CUDA permits. While a stream is captured, its
// operations become nodes of a graph. A launch of the graph appends all nodes to streams of the graph's own.
#ifndef MTE_RUNTIME_H
#define MTE_RUNTIME_H

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <vector>

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

// Call with the lock held. Releases the lock until another thread calls notify(). When nothing changes for MTE_PATIENCE
// seconds, reports a deadlock and calls abort().
void wait_for_change();
void notify();

// Appends an operation to a stream. Call with the lock held. `work` runs later, with the lock held, on any host thread.
// `label` must stay valid until the program ends (a string literal). Fails if the capture of a stream forbids this.
cudaError_t enqueue(cudaStream_t stream, const char *label, std::function<void()> work);

// An operation of `ranks` streams. `work` runs once, when every participant has been enqueued and has reached the head
// of its stream. The runtime then frees the rendezvous.
Rendezvous *rendezvous_new(int ranks, const char *label, std::function<void()> work);
void enqueue_rendezvous(cudaStream_t stream, Rendezvous *rendezvous);
// Makes the stream's part of a rendezvous that has not run an operation that waits for nobody. The other participants
// wait for another one. Returns their number; 0: the rendezvous is freed. Call with the lock held.
size_t leave_rendezvous(cudaStream_t stream, Rendezvous *rendezvous);

// Creates a stream that stands for a device of another process in a rendezvous. No call that waits for a device waits
// for this stream.
cudaStream_t stream_elsewhere();

// Returns true if the stream is being captured: its operations are recorded, and run when the graph is launched.
bool is_capturing(cudaStream_t stream);
// Records one call that uses several captured streams. Each launch of the graph calls `call` with a stream, and all
// operations that the call appends to this stream take the place of the recorded call. Call with the lock held.
cudaError_t capture_call(const std::vector<cudaStream_t> &streams, const char *label,
                         std::function<void(cudaStream_t)> call);

// Returns true if [p, p + bytes) lies inside one live device allocation.
bool device_valid(const void *p, size_t bytes);
// Reports an error if [p, p + bytes) is not memory that the running operation may use, or if p is not a multiple of
// `alignment`.
void check_global(const void *p, size_t bytes, int alignment, const char *what);
// Tells the checker that the running operation reads or writes the whole range [p, p + bytes) of device memory.
void access_range(const void *p, size_t bytes, bool write);

// Adds `seconds` to the clock of cudaEventElapsedTime, as if the running operation took that much longer.
void spend(double seconds);

// For tests: sets the architecture that nvcc has compiled the kernels for (cudaFuncAttributes.ptxVersion; default: that
// of the GPU, 90).
void set_ptx_arch(int arch);

// For tests: sets a function that gets the name of each kernel that is launched, as MT_LAUNCH_KERNEL has it. It is
// called with the lock held. An empty function: none.
void on_launch(std::function<void(const char *name)> watch);

// For tests: how many graphs this thread has launched, and how many kernels have run in graphs. on_launch sees a kernel
// when it is captured, not when a graph runs it.
long graph_launches();
long kernels_replayed();

// For tests. gemm_time sets the duration of each matrix product as cudaEventElapsedTime measures it (default 0).
// gemm_last returns the product that ran last, gemm_count how many have run.
struct GemmCall {
    int id, splits, tile;
    unsigned epilogue;
    int target = 0; // multiprocessors that the product is for; 0: all
};
void gemm_time(std::function<double(const GemmCall &)> seconds);
GemmCall gemm_last();
long gemm_count();
// For tests. gemm_fail selects products whose call fails. gemm_refuse: products with an epilogue get this status of
// cuBLASLt, from the heuristic or from the call only; 0: they run. gemm_choices returns how often the heuristic was
// called.
void gemm_fail(std::function<bool(const GemmCall &)> which);
void gemm_refuse(int status, bool by_heuristic);
long gemm_choices();

// For tests: how often a call of this thread has waited for a GPU, or may have done so: a synchronisation of a stream,
// an event or a device, a copy that is not asynchronous, a copy from or to pageable host memory.
long host_waits();

// Makes a call of this thread return `error`. `name` selects the function ("cudaMemcpyAsync"; "a kernel launch"), and
// `after` is the number of its calls that succeed before. A failing copy is done all the same, a failing launch is not.
// The functions of cuBLASLt that create something can fail, too: then with CUBLAS_STATUS_ALLOC_FAILED.
void cuda_fail_after(const char *name, int after, cudaError_t error);

// Returns true, once, when cuda_fail_after has been told that this call of `name` fails.
bool call_fails(const char *name);

// Returns true while a failure of cuda_fail_after has not happened yet.
bool call_will_fail();

// Counts an error and prints it as "ENGINE: ..." to stderr.
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
void report(const char *format, ...);
int errors();

} // namespace mte

#endif // MTE_RUNTIME_H
