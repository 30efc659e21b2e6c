// nccl.cpp - stand-in for NCCL: the library's own prototypes, executed on the CPU through runtime.h. Test-only.
//
// Ranks are threads of one process, or one thread that uses groups; each rank has its own device. If
// NCCL_COMM_ID=host:port is in the environment of ncclGetUniqueId, ranks may also be processes, on one machine or
// several (see "ranks in other processes").
//
//   Types       int8, uint8, int32, uint32, int64, uint64, float16, bfloat16, float32, float64
//   Order       A sum rounds at each hop along a ring. The start and the direction of the ring depend on the element's
//               chunk; the size of a chunk depends on the count. An average multiplies each input by 1/n first
//               (integers: divides the sum).
//   Groups      Groups nest. Calls of one communicator in one group run in any order among themselves. Every send is a
//               rendezvous with its receive: nothing is buffered.
//   blocking=1  A call waits on the host while NCCL would connect the ranks: the first collective of a communicator
//               until every rank has called one, the first message between two ranks until both have called it.
//   blocking=0  A call returns ncclInProgress. Its operations reach the stream when ncclCommGetAsyncError is called the
//               second time, as if the helper thread had been busy. A split is non-blocking when its parent is,
//               whatever its child will be.
//   Mismatches  Calls that do not match are reported with both calls, and the outputs are filled with 0xff bytes. With
//               nccl_let_mismatches_hang, the later call never arrives instead.
//   Handles     A non-blocking split or window registration sets the caller's handle when ncclCommGetAsyncError returns
//               success. A window of a non-blocking communicator is registered until then, too.
//   Windows     Symmetric: either each rank's buffer lies in a window, at the same offset, or no rank's buffer does. A
//               buffer may be in a symmetric window of one communicator only. A communicator without windows is
//               destroyed.
//   Abort       Releases the streams of this rank only, as in the library. Peers wait until they abort themselves. A
//               call of this rank that waits in another thread returns ncclInternalError. An abort waits for the
//               kernels of the communicator, also behind a kernel of another one that hangs; aborts in one group first
//               release the streams of all, and then wait. Reported: the abort or destruction of a communicator that is
//               gone, and the abort of a blocking one while it is being created.
//   Graphs      A call on a captured stream is recorded. Each launch of the graph makes the call anew: calls are
//               matched in the order of the launches and of the other calls of the communicator.
//   Processes   A process that dies, or has aborted all its communicators, closes its connections: the other ranks get
//               ncclRemoteError from ncclCommGetAsyncError. A stopped process is not noticed. A device belongs to a
//               host; NCCL_HOSTID changes the name of the host. Only with MTE_STREAMS=eager.
//   Sharing     Ranks on one device are refused, unless the version is 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE is
//               not 0. Then the blocks of all ranks of a device must fit into its multiprocessors: reported are a
//               collective whose ranks may start more of them, for 3 communicators at a time, and symmetric windows.
//               MTE_NCCL_VERSION is the version, for example 23007; otherwise it is the header's.
//
// Faults. The environment sets them, or a test through the functions below. They select a rank by its device, because
// the device is the same in all communicators. Where ranks may share a device, they select it by its number in the
// communicator from which the others are split:
//   MTE_NCCL_SILENT=device:calls         after this number of calls the rank enqueues operations that never arrive
//   MTE_NCCL_ERROR=device:calls:result   the same, and ncclCommGetAsyncError returns the result
#include "mesh.h"
#include "runtime.h"

#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace mte {
namespace {
struct Clique;
struct Node;
struct Round;
} // namespace

// For tests, which declare these functions extern. The device -1 selects no rank. `after` counts the calls from now on.
void nccl_silence(int device, int after);
void nccl_fail_after(int device, int after, ncclResult_t result);
void nccl_fail(ncclComm_t comm, ncclResult_t result);
void nccl_reset_faults();
void nccl_set_version(int version); // sets what ncclGetVersion returns; 0: the version of the header
void nccl_keep_windows(bool on);    // ncclCommWindowDeregister fails
void nccl_let_mismatches_hang(bool on);
void nccl_refuse_windows(bool on); // ncclCommWindowRegister returns success, and no window
// The creation of a communicator does not end on a rank while a collective of any communicator waits for peers, as if
// the rank had to allocate memory, and the memory of all devices were one. Rank 0 is ahead of the others.
void nccl_allocate_in_creation(bool on);
// The abort of a communicator with windows first releases its calls and streams. It deregisters the windows a while
// later.
void nccl_abort_slowly(bool on);

struct NcclCounts {
    // communicators created so far, and alive now; registrations now, including windows; windows now; groups of calls
    // on non-blocking communicators so far, each of which costs a thread in the library; collectives, sends and
    // receives so far
    int created, alive, registered, windows, threads, calls;
};
NcclCounts nccl_counts();
int nccl_max_ctas(ncclComm *comm); // of its configuration; 0: not set
bool nccl_waits(ncclComm *comm);   // a call on the communicator waits on the host for peers
} // namespace mte

constexpr uint32_t kCommMagic = 0x6e63636c;

// The header's handle types name these incomplete types.
struct ncclComm {
    uint32_t magic = kCommMagic;
    std::shared_ptr<mte::Clique> clique;
    int rank = 0, device = 0;
    int first = 0; // its rank in the communicator from which the others are split
    bool blocking = true, finalized = false, aborted = false;
    int waiting = 0;  // calls that wait on the host for peers
    int max_ctas = 0; // of its configuration; 0: not set
    int creating = 0; // questions until its creation can end, see nccl_allocate_in_creation
    ncclResult_t state = ncclInProgress;
    // an error that ncclCommGetAsyncError does not return yet, but will when it is called again
    ncclResult_t later = ncclSuccess;
    // calls of ncclCommGetAsyncError until one of them ends "in progress" and runs `deferred`
    int polls = 0;
    // what the helper thread of a non-blocking communicator has still to do
    std::vector<std::function<void()>> deferred;
    size_t operations = 0, rounds = 0; // numbers of collectives and of rounds so far
    // what this rank connects to or has connected to: all ranks, for collectives; peers, for messages
    bool collects = false;
    std::set<int> sends_to, receives_from;
    cudaStream_t order = nullptr; // its operations order one group of calls after the other
    cudaEvent_t event = nullptr;
    std::vector<cudaStream_t> idle, streams;
    std::vector<std::shared_ptr<mte::Node>> pending;
    std::shared_ptr<mte::Round> round;          // the last round of this rank
    std::vector<std::function<void()>> handles; // set the caller's handles when ncclCommGetAsyncError returns success
    std::set<void *> registrations;
    std::set<ncclWindow_vidmem *> windows;
    bool remote = false;             // true: represents a rank of another process
    std::string host, trouble;       // host of the device; message of a connection error
    std::shared_ptr<mte::Mesh> mesh; // connections to the other processes; null: all ranks are threads
    uint64_t serial = 0;             // number of calls so far
    // Each call in a graph holds a copy, until the graph and the executable graphs made from it are destroyed.
    std::shared_ptr<char> graphs = std::make_shared<char>();
};

struct ncclWindow_vidmem {
    const char *begin;
    size_t bytes;
    int flags;
};

namespace mte {
namespace {

// ---- calls ----------------------------------------------------------------------------------------------------------

enum Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce, kSend, kReceive };

const char *const kind_names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
                                  "ncclReduce",    "ncclSend",          "ncclRecv"};
const char *const type_names[] = {"int8",    "uint8",   "int32",   "uint32",   "int64", "uint64",
                                  "float16", "float32", "float64", "bfloat16", "fp8",   "fp8"};
const char *const op_names[] = {"sum", "prod", "max", "min", "avg"};

struct Call {
    Kind kind;
    const void *send;
    void *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root; // root, or the peer of a send or receive
    cudaStream_t stream;
    bool remote = false;                  // true: a call of another process, whose pointers are not valid here
    bool replayed = false;                // true: made by the launch of a graph
    std::vector<unsigned char> data = {}; // the input that this process has sent

    bool pairwise() const { return kind == kSend || kind == kReceive; }
    bool reduces() const { return kind == kAllReduce || kind == kReduceScatter || kind == kReduce; }
    bool rooted() const { return kind == kBroadcast || kind == kReduce; }
};

size_t type_size(ncclDataType_t type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

std::string describe(const Call &call) {
    std::string text = kind_names[call.kind];
    text += "(count " + std::to_string(call.count) + ", " + type_names[call.type];
    if (call.reduces()) text += std::string(", ") + op_names[call.op];
    if (call.rooted()) text += ", root " + std::to_string(call.root);
    if (call.pairwise()) text += ", peer " + std::to_string(call.root);
    return text + ")";
}

bool same_collective(const Call &x, const Call &y) {
    if (x.kind != y.kind || x.count != y.count || x.type != y.type) return false;
    if (x.reduces() && x.op != y.op) return false;
    return !x.rooted() || x.root == y.root;
}

thread_local char last_error[512];

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
ncclResult_t
refuse(ncclResult_t result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return result;
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
// Number<T> converts an element to the type in which sums are computed, and rounds the result back.

template <class T> struct Number {
    using Wide = T;
    static constexpr bool integer = std::is_integral<T>::value;
    static Wide widen(T x) { return x; }
    static T round(Wide x) { return x; }
};

template <> struct Number<__half> {
    using Wide = float;
    static constexpr bool integer = false;
    static Wide widen(__half x) { return __half2float(x); }
    static __half round(Wide x) { return __float2half(x); }
};

template <> struct Number<__nv_bfloat16> {
    using Wide = float;
    static constexpr bool integer = false;
    static Wide widen(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __nv_bfloat16 round(Wide x) { return __float2bfloat16(x); }
};

// Integers wrap around, as on the device.
template <class W> W wrapped(W x, W y, bool product) {
    const uint64_t a = static_cast<uint64_t>(x), b = static_cast<uint64_t>(y);
    return static_cast<W>(product ? a * b : a + b);
}

// Applies a reduction to two elements and rounds the result to T.
template <class T> T combine(T left, T right, ncclRedOp_t op) {
    using N = Number<T>;
    const typename N::Wide x = N::widen(left), y = N::widen(right);
    if constexpr (N::integer) {
        if (op == ncclMax) return x > y ? left : right;
        if (op == ncclMin) return x < y ? left : right;
        return wrapped(x, y, op == ncclProd);
    } else {
        if (op == ncclMax) return N::round(std::fmax(x, y));
        if (op == ncclMin) return N::round(std::fmin(x, y));
        return N::round(op == ncclProd ? x * y : x + y);
    }
}

template <class T> T before_sum(T x, ncclRedOp_t op, int ranks) {
    using N = Number<T>;
    if (op != ncclAvg || N::integer) return x;
    const typename N::Wide share = N::widen(N::round(typename N::Wide(1) / static_cast<typename N::Wide>(ranks)));
    return N::round(N::widen(x) * share);
}

template <class T> T after_sum(T x, ncclRedOp_t op, int ranks) {
    if constexpr (Number<T>::integer)
        if (op == ncclAvg) return static_cast<T>(x / static_cast<T>(ranks));
    return x;
}

// Reduces element `at` of `total` as a ring does. The first rank and the direction depend on the chunk of the element.
template <class T> T reduce_element(const std::vector<const T *> &inputs, size_t at, size_t total, ncclRedOp_t op) {
    const int ranks = static_cast<int>(inputs.size());
    const size_t chunks = 2 * inputs.size(), length = (total + chunks - 1) / chunks, chunk = at / length;
    const int first = static_cast<int>(chunk % inputs.size()), step = chunk % 2 == 0 ? 1 : ranks - 1;
    T sum = before_sum(inputs[static_cast<size_t>(first)][at], op, ranks);
    for (int hop = 1; hop < ranks; hop++) {
        const size_t rank = static_cast<size_t>((first + hop * step) % ranks);
        sum = combine(sum, before_sum(inputs[rank][at], op, ranks), op);
    }
    return after_sum(sum, op, ranks);
}

using Bytes = std::vector<unsigned char>;

template <class T> Bytes reduce_as(const std::vector<Bytes> &inputs, size_t total, ncclRedOp_t op) {
    std::vector<const T *> typed;
    for (const Bytes &input : inputs) typed.push_back(reinterpret_cast<const T *>(input.data()));
    Bytes output(total * sizeof(T));
    for (size_t i = 0; i < total; i++) {
        const T value = reduce_element(typed, i, total, op);
        memcpy(&output[i * sizeof(T)], &value, sizeof(T));
    }
    return output;
}

Bytes reduce(const std::vector<Bytes> &inputs, size_t total, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
    case ncclInt8: return reduce_as<int8_t>(inputs, total, op);
    case ncclUint8: return reduce_as<uint8_t>(inputs, total, op);
    case ncclInt32: return reduce_as<int32_t>(inputs, total, op);
    case ncclUint32: return reduce_as<uint32_t>(inputs, total, op);
    case ncclInt64: return reduce_as<int64_t>(inputs, total, op);
    case ncclUint64: return reduce_as<uint64_t>(inputs, total, op);
    case ncclFloat16: return reduce_as<__half>(inputs, total, op);
    case ncclBfloat16: return reduce_as<__nv_bfloat16>(inputs, total, op);
    case ncclFloat32: return reduce_as<float>(inputs, total, op);
    default: return reduce_as<double>(inputs, total, op);
    }
}

// ---- operations on streams ------------------------------------------------------------------------------------------
// The calls that one rank makes in one group are a node: its user streams wait for all of them. Each call is a leg on
// its own stream. There it meets the legs of the other ranks in an op, which is a collective or a send with its
// receive. A leg enters the node's rendezvous `finish` when all ranks have called. An abort takes the rank's own legs
// out of their ops, which never run then: the legs of the other ranks wait until their ranks abort.

struct Op;

struct Leg {
    Node *node;
    cudaStream_t stream;
    std::shared_ptr<Op> op;
    bool released;
};

struct Node {
    ncclComm *comm;
    Rendezvous *finish;
    std::vector<std::unique_ptr<Leg>> legs;
};

struct Op {
    Clique *clique = nullptr;
    size_t number = 0, entered = 0; // streams that have entered `meeting`
    bool pairwise = false, mismatched = false;
    Rendezvous *meeting = nullptr; // null: the op has run, or all ranks that came have left it
    std::vector<Call> calls;       // index: rank, or 0 for the send and 1 for the receive of a pair
    std::vector<int> ranks;        // in order of arrival
    std::vector<Leg *> legs;       // valid until all ranks have called
    std::vector<std::pair<ncclComm *, std::unique_ptr<Leg>>> remote_legs; // owned until the op ends
    std::thread::id thread;
    uint64_t group = 0;

    size_t expected() const { return calls.size(); }
};

struct Clique {
    int size = 0;
    bool settled = false, broken = false;
    size_t left = 0;
    std::vector<ncclComm *> members;
    // collectives that some rank has not yet called
    std::map<size_t, std::shared_ptr<Op>> open;
    // unmatched sends or receives; key: source and destination
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Op>>> pairs;
    std::map<size_t, std::shared_ptr<Round>> rounds;
    // The fields below are used when ranks are processes.
    std::shared_ptr<Mesh> mesh;
    uint64_t id = 0;
    int here = 0;            // the rank of this process
    std::vector<int> places; // ranks of the members in the mesh
    std::map<std::pair<int, uint64_t>, std::pair<std::shared_ptr<Op>, Leg *>>
        announced; // calls whose data has not arrived yet; key: rank and serial
};

struct Faults {
    bool read = false;
    int silent_device = -1, silent_after = 0, error_device = -1, error_after = 0;
    ncclResult_t error = ncclSuccess;
};

Faults faults;

void read_faults() {
    if (faults.read) return;
    faults.read = true;
    int result = ncclSuccess;
    const char *silent = getenv("MTE_NCCL_SILENT"), *error = getenv("MTE_NCCL_ERROR");
    if (silent && sscanf(silent, "%d:%d", &faults.silent_device, &faults.silent_after) != 2)
        report("MTE_NCCL_SILENT is not device:calls");
    if (error && sscanf(error, "%d:%d:%d", &faults.error_device, &faults.error_after, &result) != 3)
        report("MTE_NCCL_ERROR is not device:calls:result");
    faults.error = static_cast<ncclResult_t>(result);
}

int library_version = 0;

int version_now() {
    static const char *const version = getenv("MTE_NCCL_VERSION");
    return library_version ? library_version : version ? atoi(version) : NCCL_VERSION_CODE;
}

// May ranks share a device?
bool may_share() {
    const char *const asked = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return asked && atoi(asked) != 0 && version_now() >= NCCL_VERSION(2, 30, 0);
}

// Returns true if this call is to be lost (see Faults).
bool loses_call(ncclComm &comm) {
    const int name = may_share() ? comm.first : comm.device;
    read_faults();
    if (name == faults.error_device && faults.error_after-- <= 0) {
        comm.later = faults.error;
        return true;
    }
    return name == faults.silent_device && faults.silent_after-- <= 0;
}

struct DeviceScope {
    explicit DeviceScope(int device) {
        cudaGetDevice(&saved);
        cudaSetDevice(device);
    }
    ~DeviceScope() { cudaSetDevice(saved); }
    DeviceScope(const DeviceScope &) = delete;
    DeviceScope &operator=(const DeviceScope &) = delete;
    int saved = 0;
};

cudaStream_t take_stream(ncclComm &comm) {
    if (!comm.idle.empty()) {
        const cudaStream_t stream = comm.idle.back();
        comm.idle.pop_back();
        return stream;
    }
    DeviceScope scope(comm.device);
    cudaStream_t stream = comm.remote ? stream_elsewhere() : nullptr;
    if (!stream && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) report("NCCL: no stream");
    comm.streams.push_back(stream);
    return stream;
}

struct Range {
    const void *p;
    size_t bytes;
};

Range input_of(const Call &c, size_t rank, size_t ranks) {
    const bool used = c.kind != kReceive && (c.kind != kBroadcast || static_cast<int>(rank) == c.root);
    const size_t blocks = c.kind == kReduceScatter ? ranks : 1;
    return {c.send, used ? c.count * blocks * type_size(c.type) : 0};
}

Range input_of(const Op &op, size_t rank) { return input_of(op.calls[rank], rank, op.calls.size()); }

Range output_of(const Op &op, size_t rank) {
    const Call &c = op.calls[rank];
    const bool used = c.kind != kReduce || static_cast<int>(rank) == c.root;
    const size_t blocks = c.kind == kAllGather ? op.calls.size() : 1;
    return {c.recv, used ? c.count * blocks * type_size(c.type) : 0};
}

bool touch(Range range, ncclDataType_t type, bool write, Kind kind) {
    if (range.bytes == 0) return true;
    const int before = errors();
    check_global(range.p, range.bytes, static_cast<int>(type_size(type)), kind_names[kind]);
    if (device_valid(range.p, range.bytes)) {
        access_range(range.p, range.bytes, write);
        return true;
    }
    if (errors() == before) report("%s: %p is not device memory", kind_names[kind], range.p);
    return false;
}

// Returns true if the buffers are in place in NCCL's sense: at one exact position. Any other overlap is undefined.
bool in_place(const Call &c, size_t rank) {
    const char *send = static_cast<const char *>(c.send);
    const char *recv = static_cast<const char *>(c.recv);
    const size_t block = rank * c.count * type_size(c.type);
    if (c.kind == kAllGather) return send == recv + block;
    if (c.kind == kReduceScatter) return recv == send + block;
    return send == recv;
}

void check_overlap(const Op &op, size_t rank) {
    const Range in = input_of(op, rank), out = output_of(op, rank);
    const uintptr_t p = reinterpret_cast<uintptr_t>(in.p), q = reinterpret_cast<uintptr_t>(out.p);
    if (in.bytes == 0 || out.bytes == 0 || p >= q + out.bytes || q >= p + in.bytes) return;
    if (in_place(op.calls[rank], rank)) return;
    report("NCCL: %s of rank %zu: the buffers overlap without being in place", kind_names[op.calls[rank].kind], rank);
}

// Returns the window that contains a buffer of a rank, or null.
const ncclWindow_vidmem *window_of(const Op &op, size_t rank, Range range) {
    const uintptr_t p = reinterpret_cast<uintptr_t>(range.p);
    for (const ncclWindow_vidmem *w : op.clique->members[rank]->windows) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(w->begin);
        if (p >= begin && p + range.bytes <= begin + w->bytes) return w;
    }
    return nullptr;
}

// Reports buffers at different window offsets: a rank computes the address of a peer's buffer from its own offset.
void check_windows(const Op &op, Range (*range_of)(const Op &, size_t)) {
    if (op.clique->mesh) return; // the windows of other processes are unknown
    const Range first = range_of(op, 0);
    const ncclWindow_vidmem *const window = window_of(op, 0, first);
    const Call &call = op.calls[0];
    if (call.rooted() || first.bytes == 0) return;
    for (size_t rank = 1; rank < op.calls.size(); rank++) {
        const Range range = range_of(op, rank);
        const ncclWindow_vidmem *const other = window_of(op, rank, range);
        if (!window != !other) report("NCCL: %s: a buffer lies in a window on some ranks only", kind_names[call.kind]);
        if (!window || !other) continue;
        // For an in-place reduce-scatter or all-gather, the offset of the part includes the rank's block.
        const Range in = input_of(op, rank), out = output_of(op, rank);
        const bool part =
            (call.kind == kAllGather && range.p == in.p) || (call.kind == kReduceScatter && range.p == out.p);
        const size_t block = part && in_place(op.calls[rank], rank) ? rank * range.bytes : 0;
        const ptrdiff_t here = static_cast<const char *>(range.p) - other->begin - static_cast<ptrdiff_t>(block);
        if (here == static_cast<const char *>(first.p) - window->begin) continue;
        report("NCCL: %s: buffers in a symmetric window at different offsets on ranks 0 and %zu", kind_names[call.kind],
               rank);
    }
}

void poison_outputs(const Op &op) {
    for (size_t rank = 0; rank < op.calls.size(); rank++) {
        const Range out = output_of(op, rank);
        if (op.calls[rank].remote || op.calls[rank].kind == kSend) continue;
        if (out.bytes == 0 || !device_valid(out.p, out.bytes)) continue;
        access_range(out.p, out.bytes, true);
        memset(const_cast<void *>(out.p), 0xff, out.bytes);
    }
}

Bytes result_of(const Call &c, const std::vector<Bytes> &inputs) {
    if (c.kind == kBroadcast) return inputs[static_cast<size_t>(c.root)];
    if (c.kind != kAllGather) return reduce(inputs, inputs[0].size() / type_size(c.type), c.type, c.op);
    Bytes all;
    for (const Bytes &input : inputs) all.insert(all.end(), input.begin(), input.end());
    return all;
}

// Executes a collective. It reads all inputs before it writes an output, because buffers may be in place.
void run_collective(const Op &op) {
    const Call &first = op.calls[0];
    std::vector<Bytes> inputs(op.calls.size());
    bool good = true;
    for (size_t rank = 0; rank < op.calls.size(); rank++) {
        const Range in = input_of(op, rank);
        if (op.calls[rank].remote) {
            inputs[rank] = op.calls[rank].data;
            continue;
        }
        check_overlap(op, rank);
        if (!touch(in, first.type, false, first.kind)) good = false;
        else if (in.bytes > 0)
            inputs[rank].assign(static_cast<const char *>(in.p), static_cast<const char *>(in.p) + in.bytes);
        good = touch(output_of(op, rank), first.type, true, first.kind) && good;
    }
    if (!good) return;
    check_windows(op, input_of);
    check_windows(op, output_of);
    const Bytes result = result_of(first, inputs);
    for (size_t rank = 0; rank < op.calls.size(); rank++) {
        const Range out = output_of(op, rank);
        const size_t offset = first.kind == kReduceScatter ? rank * out.bytes : 0;
        if (out.bytes > 0 && !op.calls[rank].remote) memcpy(const_cast<void *>(out.p), &result[offset], out.bytes);
    }
}

void run_pair(const Op &op) {
    const Call &send = op.calls[0], &receive = op.calls[1];
    const size_t bytes = send.count * type_size(send.type);
    const bool readable = send.remote || touch({send.send, bytes}, send.type, false, kSend);
    const bool writable = !receive.remote && touch({receive.recv, bytes}, send.type, true, kReceive);
    if (readable && writable && bytes > 0) memmove(receive.recv, send.remote ? send.data.data() : send.send, bytes);
}

void run_op(Op &op) {
    op.meeting = nullptr;
    if (op.mismatched) poison_outputs(op);
    else if (op.pairwise) run_pair(op);
    else run_collective(op);
    for (const auto &item : op.remote_legs) item.first->idle.push_back(item.second->stream);
}

std::shared_ptr<Op> new_op(Clique &clique, size_t parts, size_t number, Kind kind) {
    std::shared_ptr<Op> op = std::make_shared<Op>();
    op->clique = &clique;
    op->number = number;
    op->pairwise = kind == kSend || kind == kReceive;
    op->calls.resize(parts);
    op->meeting = rendezvous_new(static_cast<int>(parts), kind_names[kind], [op] { run_op(*op); });
    return op;
}

void release(Leg &leg, cudaStream_t stream) {
    leg.released = true;
    enqueue_rendezvous(stream, leg.node->finish);
}

thread_local uint64_t current_group = 0;

// Reports a thread that calls an operation for several ranks without a group: the first call may wait for the second.
void check_threads(Op &op, const ncclComm &comm, Kind kind) {
    if (op.ranks.empty()) {
        op.thread = std::this_thread::get_id();
        op.group = current_group;
        return;
    }
    if (!comm.blocking || op.thread != std::this_thread::get_id() || op.group == current_group) return;
    report("NCCL: one thread calls %s for ranks %d and %d of one communicator without a group, which can deadlock",
           kind_names[kind], op.ranks[0], comm.rank);
}

// Notes that a rank has made a call: its peers need not wait for its connection any more.
void connect(ncclComm &comm, const Call &call) {
    if (!call.pairwise()) comm.collects = true;
    else (call.kind == kSend ? comm.sends_to : comm.receives_from).insert(call.root);
}

bool is_connected(const ncclComm &comm, const Call &call) {
    const std::vector<ncclComm *> &ranks = comm.clique->members;
    if (!call.pairwise())
        return std::all_of(ranks.begin(), ranks.end(), [](const ncclComm *other) { return other->collects; });
    const ncclComm &peer = *ranks[static_cast<size_t>(call.root)];
    return call.root == comm.rank || (call.kind == kSend ? peer.receives_from : peer.sends_to).count(comm.rank) > 0;
}

void enter_meeting(Op &op, Leg &leg) {
    op.entered++;
    enqueue_rendezvous(leg.stream, op.meeting);
}

// Adds a rank to an op. The last rank releases all legs into the `finish` of their nodes. Where all ranks that came
// have left the op again, a rank that arrives late waits for an abort.
void arrive(const std::shared_ptr<Op> &op, ncclComm &comm, Leg &leg, const Call &call, size_t part) {
    leg.op = op;
    if (!op->meeting) return;
    if (!call.replayed) check_threads(*op, comm, call.kind); // the launch of a graph does not wait
    op->calls[part] = call;
    op->ranks.push_back(comm.rank);
    op->legs.push_back(&leg);
    if (!comm.remote) enter_meeting(*op, leg); // a remote rank enters when its data has arrived
    if (op->ranks.size() < op->expected()) return;
    for (Leg *each : op->legs)
        if (!each->released) release(*each, each->stream);
}

bool mismatches_hang = false;

void mismatch(Op &op, int rank, const Call &call, int other_rank, const Call &other) {
    op.mismatched = true;
    report("NCCL: mismatch in operation %zu of a communicator of %d ranks: rank %d calls %s, rank %d calls %s",
           op.number, op.clique->size, other_rank, describe(other).c_str(), rank, describe(call).c_str());
}

// Adds a rank's call to the collective with this number. The first rank creates it. A call that differs is reported.
void join_collective(ncclComm &comm, Leg &leg, const Call &call, size_t number) {
    Clique &clique = *comm.clique;
    std::shared_ptr<Op> &slot = clique.open[number];
    if (!slot) slot = new_op(clique, static_cast<size_t>(clique.size), number, call.kind);
    const std::shared_ptr<Op> op = slot;
    if (!op->ranks.empty()) {
        const int other = op->ranks[0];
        const Call &theirs = op->calls[static_cast<size_t>(other)];
        if (!same_collective(call, theirs)) {
            if (mismatches_hang) return;
            mismatch(*op, comm.rank, call, other, theirs);
        }
    }
    if (op->ranks.size() + 1 == op->expected() && op->meeting) clique.open.erase(number);
    arrive(op, comm, leg, call, static_cast<size_t>(comm.rank));
}

// Matches sends and receives between two ranks in the order of the calls.
void join_pair(ncclComm &comm, Leg &leg, const Call &call) {
    Clique &clique = *comm.clique;
    const bool sends = call.kind == kSend;
    const std::pair<int, int> key = sends ? std::make_pair(comm.rank, call.root) : std::make_pair(call.root, comm.rank);
    const size_t mine = sends ? 0 : 1;
    std::deque<std::shared_ptr<Op>> &queue = clique.pairs[key];
    // The queue contains only sends or only receives. An op whose rank has left it stays in the queue until the
    // peer has called.
    if (queue.empty() || queue.front()->calls[1 - mine].count == SIZE_MAX) {
        queue.push_back(new_op(clique, 2, comm.operations, call.kind));
        queue.back()->calls[1 - mine].count = SIZE_MAX;
        arrive(std::shared_ptr<Op>(queue.back()), comm, leg, call, mine);
        return;
    }
    const std::shared_ptr<Op> op = queue.front();
    const Call &theirs = op->calls[1 - mine];
    if (mismatches_hang && (theirs.count != call.count || theirs.type != call.type)) return;
    queue.pop_front();
    if (theirs.count != call.count || theirs.type != call.type) mismatch(*op, comm.rank, call, op->ranks[0], theirs);
    arrive(op, comm, leg, call, mine);
}

// ---- ranks in other processes ---------------------------------------------------------------------------------------
// A local ncclComm with `remote` set represents each rank of another process. Its process sends two messages per call:
// one when it makes the call, with which the call joins its op, and one with the input data when its stream reaches the
// operation, with which it enters the meeting. So every process runs every op on all inputs, and writes the outputs of
// its own rank.

void tell(const Clique &clique, int rank, const Message &message, const Bytes &payload) {
    if (rank != clique.here) clique.mesh->send(clique.places[static_cast<size_t>(rank)], message, payload);
}

// Sends a message to the ranks that a call concerns: one peer, or all ranks.
void tell_peers(const Clique &clique, const Call &call, const Message &message, const Bytes &payload) {
    for (int rank = 0; rank < clique.size; rank++)
        if (!call.pairwise() || rank == call.root) tell(clique, rank, message, payload);
}

Message message_from(const ncclComm &comm, MessageKind what, uint64_t number) {
    Message message = {};
    message.what = what;
    message.rank = comm.rank;
    message.clique = comm.clique->id;
    message.number = number;
    return message;
}

bool has_left(const Clique &clique) { return clique.members[static_cast<size_t>(clique.here)]->magic != kCommMagic; }

// Sends a call to the other processes: the call itself at once, its input data when its stream reaches it.
void announce(ncclComm &comm, Leg &leg, const Call &call, size_t number) {
    const std::shared_ptr<Clique> clique = comm.clique;
    Message message = message_from(comm, MessageKind::call, number);
    message.serial = comm.serial++;
    message.count = call.count;
    message.kind = call.kind;
    message.type = call.type;
    message.op = call.op;
    message.root = call.root;
    tell_peers(*clique, call, message, {});
    message.what = MessageKind::data;
    enqueue(leg.stream, "what a rank sends to other processes", [clique, call, message]() mutable {
        if (has_left(*clique)) return; // the communicator was aborted in the meantime
        const Range in = input_of(call, static_cast<size_t>(message.rank), static_cast<size_t>(clique->size));
        const unsigned char *p = static_cast<const unsigned char *>(in.p);
        Bytes payload;
        if (touch(in, call.type, false, call.kind) && in.bytes > 0) payload.assign(p, p + in.bytes);
        message.bytes = payload.size();
        tell_peers(*clique, call, message, payload);
    });
}

// Tells the other processes of a call that is recorded: their calls wait until the ranks are connected.
void announce_connection(const ncclComm &comm, const Call &call) {
    Message message = message_from(comm, MessageKind::connect, 0);
    message.kind = call.kind;
    message.root = call.root;
    tell_peers(*comm.clique, call, message, {});
}

Call remote_call(const Message &message) {
    Call call{static_cast<Kind>(message.kind),
              nullptr,
              nullptr,
              message.count,
              static_cast<ncclDataType_t>(message.type),
              static_cast<ncclRedOp_t>(message.op),
              message.root,
              nullptr};
    call.remote = true;
    return call;
}

// Adds a call of another process to its op.
void join_remote(Clique &clique, const Message &message) {
    ncclComm &comm = *clique.members[static_cast<size_t>(message.rank)];
    const Call call = remote_call(message);
    std::unique_ptr<Leg> leg(new Leg{nullptr, take_stream(comm), nullptr, true});
    connect(comm, call);
    if (call.pairwise()) join_pair(comm, *leg, call);
    else join_collective(comm, *leg, call, message.number);
    if (!leg->op) { // a mismatch that hangs: its data are not awaited
        comm.idle.push_back(leg->stream);
        return;
    }
    clique.announced[{message.rank, message.serial}] = {leg->op, leg.get()};
    leg->op->remote_legs.emplace_back(&comm, std::move(leg));
}

void take_data(Clique &clique, const Message &message, const Bytes &payload) {
    const auto entry = clique.announced.find({message.rank, message.serial});
    if (entry == clique.announced.end()) return;
    const std::shared_ptr<Op> op = entry->second.first;
    Leg &leg = *entry->second.second;
    clique.announced.erase(entry);
    if (!op->meeting) return;
    op->calls[static_cast<size_t>(op->pairwise ? message.kind == kReceive : message.rank)].data = payload;
    leg.op = nullptr;
    enter_meeting(*op, leg);
}

void finished(const std::shared_ptr<Node> &node) {
    ncclComm &comm = *node->comm;
    for (const std::unique_ptr<Leg> &leg : node->legs) comm.idle.push_back(leg->stream);
    comm.pending.erase(std::remove(comm.pending.begin(), comm.pending.end(), node), comm.pending.end());
}

// Orders the node after all user streams and after the communicator's previous node. Returns a CUDA error if a stream
// belongs to another device.
cudaError_t begin(ncclComm &comm, Node &node, const std::vector<cudaStream_t> &users) {
    cudaError_t error = cudaSuccess;
    for (cudaStream_t user : users) {
        if (error == cudaSuccess) error = cudaEventRecord(comm.event, user);
        if (error == cudaSuccess) error = cudaStreamWaitEvent(comm.order, comm.event, 0);
    }
    if (error == cudaSuccess) error = cudaEventRecord(comm.event, comm.order);
    for (const std::unique_ptr<Leg> &leg : node.legs)
        if (error == cudaSuccess) error = cudaStreamWaitEvent(leg->stream, comm.event, 0);
    return error;
}

// Puts the calls of one group on one communicator onto the streams. Call with the lock held.
ncclResult_t post(ncclComm &comm, const std::vector<Call> &calls) {
    DeviceScope scope(comm.device);
    std::vector<cudaStream_t> users;
    const std::shared_ptr<Node> node = std::make_shared<Node>();
    node->comm = &comm;
    for (const Call &call : calls) {
        if (std::find(users.begin(), users.end(), call.stream) == users.end()) users.push_back(call.stream);
        node->legs.emplace_back(new Leg{node.get(), take_stream(comm), nullptr, false});
    }
    if (begin(comm, *node, users) != cudaSuccess) return refuse(ncclUnhandledCudaError, "a stream of another device");
    const int parts = static_cast<int>(users.size() + 1 + calls.size());
    node->finish = rendezvous_new(parts, kind_names[calls[0].kind], [node] { finished(node); });
    comm.pending.push_back(node);
    for (cudaStream_t user : users) enqueue_rendezvous(user, node->finish);
    enqueue_rendezvous(comm.order, node->finish);
    for (size_t i = 0; i < calls.size(); i++) {
        const size_t number = calls[i].pairwise() ? 0 : comm.operations++;
        if (loses_call(comm)) continue;
        connect(comm, calls[i]);
        if (comm.clique->mesh) announce(comm, *node->legs[i], calls[i], number);
        if (calls[i].pairwise()) join_pair(comm, *node->legs[i], calls[i]);
        else join_collective(comm, *node->legs[i], calls[i], number);
    }
    notify();
    return ncclSuccess;
}

// Makes recorded calls. Call with the lock held.
void replay(ncclComm &comm, std::vector<Call> calls, cudaStream_t stream) {
    for (Call &call : calls) {
        call.stream = stream;
        call.replayed = true;
    }
    if (comm.magic != kCommMagic)
        report("NCCL: a graph calls %s of a communicator that is gone", kind_names[calls[0].kind]);
    else if (post(comm, calls) != ncclSuccess)
        report("NCCL: a graph calls %s: %s", kind_names[calls[0].kind], last_error);
}

// Puts the calls of one group onto the streams, or records them if the streams are captured. Call with the lock held.
ncclResult_t post_or_record(ncclComm &comm, const std::vector<Call> &calls) {
    std::vector<cudaStream_t> users;
    for (const Call &call : calls) users.push_back(call.stream);
    const auto captured = std::count_if(users.begin(), users.end(), is_capturing);
    if (captured == 0) return post(comm, calls);
    ncclComm *const c = &comm;
    const cudaError_t error =
        capture_call(users, kind_names[calls[0].kind],
                     [c, calls, held = comm.graphs](cudaStream_t stream) { replay(*c, calls, stream); });
    if (captured < static_cast<ptrdiff_t>(users.size()) || error == cudaErrorStreamCaptureMerge)
        return refuse(ncclInvalidUsage, "Streams given to a communicator within a NCCL group must either be all "
                                        "uncaptured or all captured by the same graph.");
    if (error != cudaSuccess) return refuse(ncclUnhandledCudaError, "the capture of a stream is invalid");
    for (const Call &call : calls) {
        connect(comm, call);
        if (comm.clique->mesh) announce_connection(comm, call);
    }
    notify();
    return ncclSuccess;
}

// ---- communicators --------------------------------------------------------------------------------------------------

// All communicators ever created. A destroyed one remains, so that its `magic` reveals a stale handle.
std::vector<std::unique_ptr<ncclComm>> all_comms;
std::map<std::string, std::shared_ptr<Clique>> lobby; // key: unique id; the value is null until the first rank joins
uint64_t next_id = 0;

ncclResult_t check_comm(const ncclComm *comm, const char *function) {
    if (!comm) return refuse(ncclInvalidArgument, "%s : comm argument is NULL", function);
    if (comm->magic != kCommMagic) return refuse(ncclInvalidArgument, "%s: corrupted comm object detected", function);
    return ncclSuccess;
}

ncclResult_t check_ready(const ncclComm *comm, const char *function) {
    const ncclResult_t result = check_comm(comm, function);
    if (result != ncclSuccess) return result;
    if (comm->finalized) return refuse(ncclInvalidArgument, "%s: communicator is finalized", function);
    if (comm->state == ncclSuccess) return ncclSuccess;
    if (!comm->trouble.empty()) return refuse(comm->state, "%s", comm->trouble.c_str());
    refuse(comm->state, "%s: attempt to use communicator before the previous operation returned ncclSuccess", function);
    return comm->state == ncclInProgress ? ncclInvalidArgument : comm->state;
}

bool windows_stay = false;
bool windows_refused = false;

ncclComm *new_comm(bool blocking) {
    all_comms.emplace_back(new ncclComm());
    ncclComm *comm = all_comms.back().get();
    comm->blocking = blocking;
    cudaGetDevice(&comm->device);
    if (cudaStreamCreateWithFlags(&comm->order, cudaStreamNonBlocking) != cudaSuccess) report("NCCL: no stream");
    if (cudaEventCreateWithFlags(&comm->event, cudaEventDisableTiming) != cudaSuccess) report("NCCL: no event");
    return comm;
}

void set_ready(ncclComm &comm, ncclResult_t result) {
    comm.state = comm.blocking || result != ncclSuccess ? result : ncclInProgress;
    comm.polls = 2;
}

// The number of ranks on the device of comm
int ranks_on_device(const ncclComm &comm) {
    const auto here = [&](const ncclComm *other) { return other->device == comm.device && other->host == comm.host; };
    return static_cast<int>(std::count_if(comm.clique->members.begin(), comm.clique->members.end(), here));
}

bool is_refused(const ncclComm &comm) {
    if (may_share() || ranks_on_device(comm) == 1) return false;
    if (version_now() >= NCCL_VERSION(2, 30, 0))
        refuse(ncclInvalidUsage, "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to "
                                 "enable this configuration.");
    else
        refuse(ncclInvalidUsage, "Duplicate GPU detected : rank %d shares CUDA device %x", comm.rank,
               static_cast<unsigned>(comm.device));
    return true;
}

// Kernels of ranks that share a device wait for each other, so all of their blocks must be on it at the same time. A
// communicator has at most 32 blocks, and 3 communicators may be busy at the same time.
void check_blocks(const ncclComm &comm) {
    const int ranks = ranks_on_device(comm), blocks = comm.max_ctas ? comm.max_ctas : 32, most = 132;
    if (ranks > 1 && 3 * ranks * blocks > most)
        report("NCCL: %d ranks of one device with %d blocks each in 3 communicators: it has room for %d", ranks, blocks,
               most);
}

// Completes the creation when every rank has joined. Ranks that share a device and may not fail with ncclInvalidUsage,
// and then the others with ncclRemoteError.
void settle(Clique &clique) {
    const auto refused = [](const ncclComm *comm) { return is_refused(*comm); };
    const bool good = std::none_of(clique.members.begin(), clique.members.end(), refused);
    for (ncclComm *comm : clique.members) {
        if (good) set_ready(*comm, ncclSuccess);
        else set_ready(*comm, refused(comm) ? ncclInvalidUsage : ncclRemoteError);
    }
    clique.settled = true;
    notify();
}

bool complete(const Clique &clique) {
    return std::all_of(clique.members.begin(), clique.members.end(),
                       [](const ncclComm *comm) { return comm != nullptr; });
}

ncclResult_t check_config(const ncclConfig_t *config) {
    if (!config) return ncclSuccess;
    if (config->magic != 0xcafebeef || config->size != sizeof *config)
        return refuse(ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    const int blocking = config->blocking;
    if (blocking != NCCL_CONFIG_UNDEF_INT && blocking != 0 && blocking != 1)
        return refuse(ncclInvalidArgument, "Invalid config blocking attribute value %d", blocking);
    if (config->maxCTAs != NCCL_CONFIG_UNDEF_INT && config->maxCTAs <= 0)
        return refuse(ncclInvalidArgument, "Invalid config max CTA attribute value %d", config->maxCTAs);
    return ncclSuccess;
}

bool is_blocking(const ncclConfig_t *config, bool inherited) {
    return config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking != 0 : inherited;
}

// Adds a rank to the communicator of a unique id. The last rank completes it.
ncclResult_t enter_lobby(ncclComm &comm, int ranks, const ncclUniqueId &id, int rank) {
    const auto entry = lobby.find(std::string(id.internal, sizeof id.internal));
    if (entry == lobby.end()) return refuse(ncclInvalidArgument, "a unique id that ncclGetUniqueId did not make");
    if (!entry->second) entry->second = std::make_shared<Clique>();
    Clique &clique = *entry->second;
    if (clique.members.empty()) {
        clique.size = ranks;
        clique.members.resize(static_cast<size_t>(ranks));
    }
    if (clique.size != ranks) {
        report("NCCL: ranks of one unique id ask for %d and %d ranks", clique.size, ranks);
        return refuse(ncclInvalidArgument, "number of ranks differs");
    }
    if (clique.members[static_cast<size_t>(rank)]) {
        report("NCCL: rank %d joins twice with one unique id", rank);
        return refuse(ncclInvalidUsage, "rank %d is taken", rank);
    }
    clique.members[static_cast<size_t>(rank)] = &comm;
    comm.rank = comm.first = rank;
    comm.clique = entry->second;
    if (complete(clique) && !clique.broken) settle(clique);
    return ncclSuccess;
}

// ---- rounds: calls that all ranks of a communicator make together on the host ---------------------------------------

enum RoundKind { kSplitRound, kWindowRound };
const char *const round_names[] = {"ncclCommSplit", "ncclCommWindowRegister"};

struct Entry {
    int rank, color, key;
    ncclComm *child;
    size_t bytes;
};

struct Round {
    RoundKind kind;
    bool done = false, broken = false; // broken: a rank has aborted its communicator
    std::vector<Entry> entries;
};

uint64_t child_id(uint64_t parent, uint64_t number, int color) {
    return (parent * 0x9e3779b97f4a7c15u + number) * 0xd1342543de82ef95u + static_cast<uint64_t>(color) + 1;
}

void open_clique(const std::shared_ptr<Clique> &clique);

// Connects the children of a split between processes. Only a child that contains this process is opened.
void connect_children(const Clique &parent, uint64_t number, const std::map<int, std::shared_ptr<Clique>> &cliques,
                      const std::vector<Entry> &entries) {
    for (const Entry &entry : entries)
        if (entry.child) cliques.at(entry.color)->places.push_back(parent.places[static_cast<size_t>(entry.rank)]);
    for (const auto &item : cliques) {
        const auto own = [](const ncclComm *comm) { return !comm->remote; };
        const auto here = std::find_if(item.second->members.begin(), item.second->members.end(), own);
        if (here == item.second->members.end()) continue;
        item.second->here = (*here)->rank;
        item.second->mesh = (*here)->mesh = parent.mesh;
        item.second->id = child_id(parent.id, number, item.first);
        parent.mesh->users++;
        open_clique(item.second);
    }
}

// Creates the communicators of a split: one for each color, its ranks ordered by key and parent rank.
void form_children(const Clique &parent, uint64_t number, Round &round) {
    std::sort(round.entries.begin(), round.entries.end(), [](const Entry &x, const Entry &y) {
        return std::make_tuple(x.color, x.key, x.rank) < std::make_tuple(y.color, y.key, y.rank);
    });
    std::map<int, std::shared_ptr<Clique>> cliques;
    for (const Entry &entry : round.entries) {
        if (!entry.child) continue;
        std::shared_ptr<Clique> &clique = cliques[entry.color];
        if (!clique) clique = std::make_shared<Clique>();
        entry.child->rank = clique->size++;
        entry.child->clique = clique;
        clique->members.push_back(entry.child);
    }
    for (auto &item : cliques) settle(*item.second);
    if (parent.mesh) connect_children(parent, number, cliques, round.entries);
}

void tell_round(const ncclComm &comm, RoundKind kind, const Entry &entry, size_t number) {
    Message message = message_from(comm, MessageKind::round, number);
    message.kind = kind;
    message.color = entry.child ? entry.color : NCCL_SPLIT_NOCOLOR;
    message.key = entry.key;
    message.count = entry.bytes;
    for (int rank = 0; rank < comm.clique->size; rank++) tell(*comm.clique, rank, message, {});
}

// Adds a rank to its next round. The last rank completes the round.
std::shared_ptr<Round> enter_round(ncclComm &comm, RoundKind kind, const Entry &entry) {
    Clique &clique = *comm.clique;
    const size_t number = comm.rounds++;
    if (clique.mesh && !comm.remote) tell_round(comm, kind, entry, number);
    std::shared_ptr<Round> &slot = clique.rounds[number];
    if (!slot) {
        slot = std::make_shared<Round>();
        slot->kind = kind;
    }
    const std::shared_ptr<Round> round = slot;
    comm.round = round;
    if (!comm.blocking) {
        comm.state = ncclInProgress;
        comm.polls = 2;
    }
    if (round->kind != kind)
        report("NCCL: mismatch: rank %d calls %s, others call %s", comm.rank, round_names[kind],
               round_names[round->kind]);
    if (!round->entries.empty() && round->entries[0].bytes != entry.bytes)
        report("NCCL: a window of %zu bytes on rank %d, of %zu on others", entry.bytes, comm.rank,
               round->entries[0].bytes);
    round->entries.push_back(entry);
    if (round->broken || round->entries.size() < static_cast<size_t>(clique.size)) return round;
    clique.rounds.erase(number);
    if (round->kind == kSplitRound) form_children(clique, number, *round);
    round->done = true;
    notify();
    return round;
}

// ---- ranks in other processes, continued ----------------------------------------------------------------------------

// Communicators between processes, and messages that arrived before their communicator existed. Key: mesh and id.
std::map<std::pair<Mesh *, uint64_t>, std::shared_ptr<Clique>> cliques_between;
std::map<std::pair<Mesh *, uint64_t>, std::vector<std::pair<Message, Bytes>>> early;

ncclComm *new_remote(int rank, int device, const std::string &host) {
    ncclComm *comm = new_comm(false);
    comm->remote = true;
    comm->rank = rank;
    comm->device = device;
    comm->host = host;
    comm->state = ncclSuccess;
    return comm;
}

void enter_remote_round(Clique &clique, const Message &message) {
    ncclComm &comm = *clique.members[static_cast<size_t>(message.rank)];
    const bool takes_part = message.kind == kSplitRound && message.color != NCCL_SPLIT_NOCOLOR;
    ncclComm *child = takes_part ? new_remote(0, comm.device, comm.host) : nullptr;
    enter_round(comm, static_cast<RoundKind>(message.kind),
                Entry{comm.rank, message.color, message.key, child, message.count});
}

void handle(const std::shared_ptr<Clique> &clique, const Message &message, const Bytes &payload) {
    if (has_left(*clique)) return;
    if (message.what == MessageKind::call) join_remote(*clique, message);
    else if (message.what == MessageKind::data) take_data(*clique, message, payload);
    else if (message.what == MessageKind::connect)
        connect(*clique->members[static_cast<size_t>(message.rank)], remote_call(message));
    else enter_remote_round(*clique, message);
    notify();
}

void open_clique(const std::shared_ptr<Clique> &clique) {
    const std::pair<Mesh *, uint64_t> key = {clique->mesh.get(), clique->id};
    std::vector<std::pair<Message, Bytes>> waiting;
    cliques_between[key] = clique;
    std::swap(waiting, early[key]);
    early.erase(key);
    for (const auto &item : waiting) handle(clique, item.first, item.second);
}

void receive(Mesh *mesh, const Message &message, const Bytes &payload) {
    const std::pair<Mesh *, uint64_t> key = {mesh, message.clique};
    const auto found = cliques_between.find(key);
    if (found == cliques_between.end()) early[key].emplace_back(message, payload);
    else handle(std::shared_ptr<Clique>(found->second), message, payload);
}

void break_connection(ncclComm &comm, ncclResult_t result, const std::string &why) {
    if (comm.magic != kCommMagic || (comm.state != ncclSuccess && comm.state != ncclInProgress)) return;
    comm.state = result;
    comm.trouble = why;
    notify();
}

// Fails every communicator that contains the lost process.
void lose_peer(Mesh *mesh, int place, const std::string &why) {
    for (const auto &item : cliques_between) {
        const std::vector<int> &places = item.second->places;
        if (item.first.first != mesh || std::find(places.begin(), places.end(), place) == places.end()) continue;
        break_connection(*item.second->members[static_cast<size_t>(item.second->here)], ncclRemoteError, why);
    }
}

// Creates the peers of this process's communicator when all processes are connected.
void form_root(ncclComm &comm, const std::vector<Introduction> &all) {
    if (comm.magic != kCommMagic) return;
    const std::shared_ptr<Clique> clique = std::make_shared<Clique>();
    DeviceScope scope(comm.device);
    for (const Introduction &who : all) {
        const int rank = static_cast<int>(clique->members.size());
        clique->members.push_back(rank == comm.rank ? &comm : new_remote(rank, who.device, who.host));
        clique->members.back()->clique = clique;
        clique->places.push_back(rank);
    }
    clique->size = static_cast<int>(all.size());
    clique->here = comm.rank;
    clique->mesh = comm.mesh;
    clique->id = 1;
    settle(*clique);
    if (comm.state != ncclSuccess && comm.state != ncclInProgress) comm.trouble = last_error;
    open_clique(clique);
}

const std::string id_of_environment = "NCCL_COMM_ID=";

// Starts the connections to ranks in other processes. The mesh's thread completes the communicator.
ncclResult_t enter_mesh(ncclComm &comm, int ranks, const std::string &place, int rank) {
    static const bool eager = !getenv("MTE_STREAMS") || strcmp(getenv("MTE_STREAMS"), "eager") == 0;
    const char *const host = getenv("NCCL_HOSTID");
    Introduction self = {rank, comm.device, 0, 0, ""};
    if (!eager) report("NCCL: ranks in several processes need MTE_STREAMS=eager");
    if (host) snprintf(self.host, sizeof self.host, "%s", host);
    else gethostname(self.host, sizeof self.host - 1);
    comm.rank = comm.first = rank;
    comm.host = self.host;
    Mesh::Hooks hooks;
    hooks.ready = [&comm](const std::vector<Introduction> &all) { form_root(comm, all); };
    hooks.failed = [&comm](const std::string &why) { break_connection(comm, ncclSystemError, why); };
    hooks.message = [&comm](int, const Message &message, const Bytes &payload) {
        receive(comm.mesh.get(), message, payload);
    };
    hooks.lost = [&comm](int place_of, const std::string &why) { lose_peer(comm.mesh.get(), place_of, why); };
    comm.mesh = Mesh::start(place, ranks, self, hooks);
    return comm.mesh ? ncclSuccess
                     : refuse(ncclInvalidArgument, "Invalid NCCL_COMM_ID, please use format: <ipv4>:<port>");
}

// ---- groups ---------------------------------------------------------------------------------------------------------

// A host-side task that a group waits for: the creation of a communicator, or a round.
struct Job {
    ncclComm *caller; // the communicator of the call
    ncclComm *comm;   // the state of this communicator is the result; may be null
    ncclComm **place; // set to comm, or to null if the result is an error
    std::shared_ptr<Round> round;
    bool blocking;

    bool done() const {
        if (round) return round->done;
        return (comm->clique && comm->clique->settled) || comm->state != ncclInProgress;
    }
};

struct Group {
    int depth = 0;
    ncclResult_t error = ncclSuccess;
    std::vector<std::pair<ncclComm *, Call>> calls;
    std::vector<Job> jobs;
    std::vector<ncclComm *> aborts;
};

thread_local Group group;
uint64_t next_group = 0;

void group_start() { group.depth++; }

void leave(ncclComm &comm);
void reclaim(const std::vector<ncclComm *> &comms);

// Waits on the host until a peer, or an abort, changes something. Call with the lock held.
void wait_for_peers(ncclComm &comm) {
    comm.waiting++;
    wait_for_change();
    comm.waiting--;
}

// Waits until the job is done. Call with the lock held.
ncclResult_t wait_for(const Job &job) {
    while (!job.done() && !job.caller->aborted) wait_for_peers(*job.caller);
    if (job.caller->aborted) return refuse(ncclInternalError, "the communicator was aborted");
    if (!job.comm) return ncclSuccess;
    const ncclResult_t state = job.comm->state;
    *job.place = state == ncclSuccess || state == ncclInProgress ? job.comm : nullptr;
    if (*job.place) return ncclSuccess;
    leave(*job.comm);
    return state;
}

// Waits for the jobs of blocking communicators. For a non-blocking one the result is ncclInProgress.
ncclResult_t finish_jobs(const std::vector<Job> &jobs) {
    ncclResult_t result = ncclSuccess;
    Guard guard;
    for (const Job &job : jobs) {
        if (!job.blocking) {
            if (result == ncclSuccess) result = ncclInProgress;
            continue;
        }
        const ncclResult_t each = wait_for(job);
        if (each != ncclSuccess) result = each;
    }
    return result;
}

// A send to the own rank must have its receive in the same group.
bool self_pairs_match(const ncclComm &comm, const std::vector<Call> &calls) {
    std::vector<size_t> sent, received;
    for (const Call &call : calls) {
        if (!call.pairwise() || call.root != comm.rank) continue;
        (call.kind == kSend ? sent : received).push_back(call.count * type_size(call.type));
    }
    return sent == received;
}

int helper_threads = 0;

ncclResult_t launch(ncclComm &comm, const std::vector<Call> &calls) {
    if (comm.blocking) return post_or_record(comm, calls);
    helper_threads++;
    const bool captured = is_capturing(calls[0].stream);
    comm.deferred.push_back([&comm, calls, captured] {
        if (captured && !is_capturing(calls[0].stream))
            report("NCCL: the capture ended while %s was in progress", kind_names[calls[0].kind]);
        const ncclResult_t result = post_or_record(comm, calls);
        if (result != ncclSuccess) comm.state = result;
    });
    comm.state = ncclInProgress;
    comm.polls = 2;
    return ncclInProgress;
}

// Waits as a blocking communicator does while it connects to the ranks of new calls. Call with the lock held.
ncclResult_t wait_connected(ncclComm &comm, const std::vector<Call> &calls) {
    for (const Call &call : calls)
        while (!is_connected(comm, call)) {
            if (comm.aborted) return refuse(ncclInternalError, "the communicator was aborted");
            if (comm.state != ncclSuccess) return refuse(comm.state, "%s", comm.trouble.c_str());
            wait_for_peers(comm);
        }
    return ncclSuccess;
}

// Launches the calls of a group, for one communicator after the other.
ncclResult_t launch_all(const std::vector<std::pair<ncclComm *, Call>> &calls) {
    std::vector<std::pair<ncclComm *, std::vector<Call>>> by_comm;
    for (const auto &item : calls) {
        const auto same = [&](const std::pair<ncclComm *, std::vector<Call>> &x) { return x.first == item.first; };
        const auto found = std::find_if(by_comm.begin(), by_comm.end(), same);
        if (found != by_comm.end()) found->second.push_back(item.second);
        else by_comm.push_back({item.first, {item.second}});
    }
    for (const auto &item : by_comm) {
        if (item.first->blocking != by_comm[0].first->blocking)
            return refuse(ncclInvalidArgument,
                          "Blocking and nonblocking communicators are not allowed in the same group.");
        if (!self_pairs_match(*item.first, item.second))
            return refuse(ncclInvalidUsage, "Trying to send to self without a matching recv");
    }
    ncclResult_t result = ncclSuccess;
    for (const auto &item : by_comm) {
        const ncclResult_t each = launch(*item.first, item.second);
        if (each != ncclSuccess && (result == ncclSuccess || result == ncclInProgress)) result = each;
    }
    for (const auto &item : by_comm) {
        if (result != ncclSuccess) break;
        if (item.first->blocking) result = wait_connected(*item.first, item.second);
    }
    return result;
}

ncclResult_t group_end() {
    if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--group.depth > 0) return ncclSuccess;
    Group now;
    std::swap(now, group);
    if (!now.aborts.empty()) reclaim(now.aborts);
    if (now.error != ncclSuccess) return now.error;
    if (!now.calls.empty() && !now.jobs.empty())
        return refuse(ncclInvalidUsage, "communicators and operations made in one group");
    if (!now.jobs.empty()) return finish_jobs(now.jobs);
    if (now.calls.empty()) return ncclSuccess;
    Guard guard;
    current_group = ++next_group;
    return launch_all(now.calls);
}

// Records a failed call. It fails the whole group, which then executes nothing.
ncclResult_t note(ncclResult_t result) {
    if (group.depth > 0 && result != ncclSuccess && group.error == ncclSuccess) group.error = result;
    return result;
}

ncclResult_t add_job(const Job &job) {
    if (group.depth > 0) {
        group.jobs.push_back(job);
        return ncclSuccess;
    }
    return finish_jobs({job});
}

// NCCL 2.28.3 returns ncclSuccess from a split and from a registration that are in progress.
ncclResult_t hide_progress(ncclResult_t result) { return result == ncclInProgress ? ncclSuccess : result; }

// Returns true if a buffer belongs to a device other than the rank's. Whether a buffer is device memory at all is
// checked when the operation runs.
bool of_other_device(const ncclComm &comm, const void *buffer) {
    cudaPointerAttributes attributes = {};
    if (!buffer || cudaPointerGetAttributes(&attributes, buffer) != cudaSuccess) return false;
    return attributes.type == cudaMemoryTypeDevice && attributes.device != comm.device;
}

ncclResult_t check_call(const ncclComm &comm, const Call &call) {
    const char *name = kind_names[call.kind];
    const int ranks = comm.clique->size;
    if (call.type < 0 || call.type >= ncclNumTypes)
        return refuse(ncclInvalidArgument, "%s : invalid type %d", name, call.type);
    if (call.type == ncclFloat8e4m3 || call.type == ncclFloat8e5m2) {
        report("%s: fp8 is not modelled", name);
        return refuse(ncclInvalidArgument, "%s : fp8 is not modelled", name);
    }
    if (call.root < 0 || call.root >= ranks)
        return refuse(ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)", name, call.root,
                      ranks);
    if (call.op < 0 || call.op >= ncclNumOps)
        return refuse(ncclInvalidArgument, "%s : invalid operation %d", name, call.op);
    const bool sends = call.kind != kReceive && (call.kind != kBroadcast || comm.rank == call.root);
    const bool receives = call.kind != kSend && (call.kind != kReduce || comm.rank == call.root);
    if (call.count > 0 && ((sends && !call.send) || (receives && !call.recv))) {
        report("%s of rank %d: a null buffer", name, comm.rank);
        return refuse(ncclInvalidArgument, "%s : a null buffer", name);
    }
    if ((sends && of_other_device(comm, call.send)) || (receives && of_other_device(comm, call.recv))) {
        report("%s of rank %d: a buffer of another device", name, comm.rank);
        return refuse(ncclInvalidArgument, "%s : buffer mismatchs with NCCL device %d", name, comm.device);
    }
    return ncclSuccess;
}

ncclResult_t check_and_add(ncclComm *comm, const Call &call) {
    Guard guard;
    ncclResult_t result = check_ready(comm, kind_names[call.kind]);
    if (result == ncclSuccess) result = check_call(*comm, call);
    if (result == ncclSuccess) check_blocks(*comm);
    // The library drops a collective of 0 elements without telling the other ranks.
    if (result == ncclSuccess && (call.count > 0 || call.pairwise())) group.calls.push_back({comm, call});
    return note(result);
}

std::atomic<int> submitted{0};

ncclResult_t submit(ncclComm *comm, const Call &call) {
    submitted++;
    group_start();
    const ncclResult_t result = check_and_add(comm, call);
    const ncclResult_t end = group_end();
    return result != ncclSuccess ? result : end;
}

// ---- the end of a communicator --------------------------------------------------------------------------------------

void run_deferred(ncclComm &comm) {
    std::vector<std::function<void()>> work;
    std::swap(work, comm.deferred);
    for (const std::function<void()> &each : work) each();
}

// Waits until all enqueued operations have run. Call without the lock held: they run inside cudaStreamSynchronize.
ncclResult_t flush(ncclComm &comm) {
    {
        Guard guard;
        run_deferred(comm);
    }
    return cudaStreamSynchronize(comm.order) == cudaSuccess ? ncclSuccess
                                                            : refuse(ncclUnhandledCudaError, "stream failed");
}

void free_streams(ncclComm &comm) {
    for (cudaStream_t stream : comm.streams) cudaStreamDestroy(stream);
    cudaStreamDestroy(comm.order);
    cudaEventDestroy(comm.event);
    comm.streams.clear();
    comm.idle.clear();
}

void drop_registrations(ncclComm &comm) {
    for (void *handle : comm.registrations) delete static_cast<Range *>(handle);
    for (ncclWindow_vidmem *window : comm.windows) delete window;
    comm.registrations.clear();
    comm.windows.clear();
}

// Ends a communicator and makes its handle stale. The last rank to leave destroys the streams.
void leave(ncclComm &comm) {
    comm.magic = 0;
    comm.handles.clear();
    drop_registrations(comm);
    if (comm.mesh && --comm.mesh->users == 0) comm.mesh->close(!comm.aborted);
    if (!comm.clique || !comm.clique->settled) {
        if (comm.clique) comm.clique->broken = true;
        free_streams(comm);
        return;
    }
    Clique &clique = *comm.clique;
    if (++clique.left < (clique.mesh ? 1 : clique.members.size())) return;
    clique.open.clear();
    clique.pairs.clear();
    for (ncclComm *member : clique.members) free_streams(*member);
}

// Takes a leg out of an op that has not run.
void leave_op(Op &op, const Leg &leg) {
    if (!op.meeting) return;
    op.legs.erase(std::remove(op.legs.begin(), op.legs.end(), &leg), op.legs.end());
    op.entered = leave_rendezvous(leg.stream, op.meeting);
    if (op.entered == 0) op.meeting = nullptr;
}

// Takes a leg of a rank that aborts out of its op, and with it the legs of ranks in other processes: in this process,
// nobody waits for them any more.
void break_op(Op &op, const Leg &leg) {
    leave_op(op, leg);
    for (const auto &item : op.remote_legs) leave_op(op, *item.second);
}

// The last call first: otherwise a call behind one that ends could run.
void abort_nodes(ncclComm &comm) {
    const std::vector<std::shared_ptr<Node>> nodes(comm.pending.rbegin(), comm.pending.rend());
    for (const std::shared_ptr<Node> &node : nodes)
        for (const std::unique_ptr<Leg> &leg : node->legs) {
            if (leg->op) break_op(*leg->op, *leg);
            if (!leg->released) release(*leg, leg->stream);
        }
}

// Ends the round that other ranks have not joined. The child of this rank is gone.
void abort_round(ncclComm &comm) {
    if (!comm.round || comm.round->done) return;
    comm.round->broken = true;
    for (const Entry &entry : comm.round->entries)
        if (entry.rank == comm.rank && entry.child) leave(*entry.child);
}

// Returns true if nothing but the helper thread delays a non-blocking communicator.
bool others_came(const ncclComm &comm) {
    if (!comm.clique || !comm.clique->settled) return false;
    if (comm.round && !comm.round->done) return false;
    return !comm.finalized || cudaStreamQuery(comm.order) == cudaSuccess;
}

// Memory from ncclMemAlloc. Key: the aligned pointer; value: its size, and the pointer from cudaMalloc.
std::map<char *, std::pair<size_t, void *>> memory;

// Returns true if a registration or a window begins in [p, p + bytes).
bool still_registered(const char *p, size_t bytes) {
    const auto within = [&](const void *q) { return q >= p && q < p + bytes; };
    for (const auto &comm : all_comms) {
        for (const void *handle : comm->registrations)
            if (within(static_cast<const Range *>(handle)->p)) return true;
        for (const ncclWindow_vidmem *window : comm->windows)
            if (within(window->begin)) return true;
    }
    return false;
}

// Results are undefined when a buffer is in symmetric windows of several communicators.
void check_one_communicator(const ncclComm &comm, const ncclWindow_vidmem &made) {
    for (const auto &other : all_comms)
        for (const ncclWindow_vidmem *window : other->windows)
            if (other.get() != &comm && made.flags & window->flags & NCCL_WIN_COLL_SYMMETRIC &&
                made.begin < window->begin + window->bytes && window->begin < made.begin + made.bytes)
                report("ncclCommWindowRegister: the buffer is in a symmetric window of another communicator");
}

bool inside_memory(const void *p, size_t bytes) {
    const char *begin = static_cast<const char *>(p);
    for (const auto &item : memory)
        if (begin >= item.first && begin + bytes <= item.first + item.second.first) return true;
    return false;
}

Call collective(Kind kind, const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                cudaStream_t stream) {
    return Call{kind, send, recv, count, type, op, root, stream};
}

ncclResult_t init_rank(ncclComm_t *out, int ranks, const ncclUniqueId &id, int rank, const ncclConfig_t *config) {
    if (!out) return refuse(ncclInvalidArgument, "CommInitRank : newcomm argument is NULL");
    *out = nullptr;
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return refuse(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, ranks);
    ncclResult_t result = check_config(config);
    if (result != ncclSuccess) return result;
    ncclComm *comm;
    {
        Guard guard;
        comm = new_comm(is_blocking(config, true));
        if (config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT) comm->max_ctas = config->maxCTAs;
        const bool between = strncmp(id.internal, id_of_environment.c_str(), id_of_environment.size()) == 0;
        if (between) result = enter_mesh(*comm, ranks, id.internal + id_of_environment.size(), rank);
        else result = enter_lobby(*comm, ranks, id, rank);
        if (result != ncclSuccess) {
            leave(*comm);
            return result;
        }
        *out = comm;
    }
    return add_job(Job{comm, comm, out, nullptr, comm->blocking});
}

ncclResult_t check_devices(int count, const int *devices) {
    int available = 0;
    if (cudaGetDeviceCount(&available) != cudaSuccess) return refuse(ncclUnhandledCudaError, "no devices");
    std::set<int> seen;
    for (int i = 0; i < count; i++) {
        const int device = devices ? devices[i] : i;
        if (device < 0 || device >= available) return refuse(ncclInvalidArgument, "Invalid device %d", device);
        if (!seen.insert(device).second && !may_share())
            return refuse(ncclInvalidUsage, "Device %d used multiple times", device);
    }
    return ncclSuccess;
}

template <class T> ncclResult_t query(const ncclComm *comm, T *value, T answer, const char *function) {
    const ncclResult_t result = check_ready(comm, function);
    if (result != ncclSuccess) return result;
    if (!value) return refuse(ncclInvalidArgument, "%s : result argument is NULL", function);
    *value = answer;
    return ncclSuccess;
}

bool creation_allocates = false;
std::atomic<bool> aborts_are_slow{false};

bool a_collective_waits() {
    for (const auto &comm : all_comms)
        if (comm->clique)
            for (const auto &item : comm->clique->open)
                if (item.second->entered > 0 && item.second->entered < item.second->expected()) return true;
    return false;
}

// The rest of a creation that needs an allocation. A rank behind rank 0 is 100 questions late.
bool still_creates(ncclComm &comm) {
    if (comm.creating == 0) return false;
    if (comm.creating > 1) comm.creating--;
    if (comm.creating > 1 || a_collective_waits()) return true;
    comm.creating = 0;
    return false;
}

// Reports that a call would wait forever: NCCL waits in ncclCommAbort and in ncclCommDestroy until all graphs with
// calls of the communicator have been destroyed (commReclaim in src/init.cc of NCCL 2.27).
void check_graphs(const ncclComm &comm, const char *what) {
    if (comm.graphs.use_count() > 1) report("%s: a graph has calls of the communicator, and is not destroyed", what);
}

// The second half of aborts: waits for the kernels of the communicators, and ends them.
void reclaim(const std::vector<ncclComm *> &comms) {
    for (ncclComm *comm : comms) {
        if (aborts_are_slow && !comm->windows.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        if (comm->order && cudaStreamSynchronize(comm->order) != cudaSuccess) report("ncclCommAbort: a stream failed");
        Guard guard;
        leave(*comm);
        check_graphs(*comm, "ncclCommAbort");
        notify();
    }
}

} // namespace

void nccl_silence(int device, int after) {
    Guard guard;
    read_faults();
    faults.silent_device = device;
    faults.silent_after = after;
}

void nccl_fail_after(int device, int after, ncclResult_t result) {
    Guard guard;
    read_faults();
    faults.error_device = device;
    faults.error_after = after;
    faults.error = result;
}

void nccl_fail(ncclComm_t comm, ncclResult_t result) {
    Guard guard;
    comm->state = result;
    notify();
}

void nccl_reset_faults() {
    Guard guard;
    faults = Faults();
    faults.read = true;
}

void nccl_keep_windows(bool on) {
    Guard guard;
    windows_stay = on;
}

void nccl_refuse_windows(bool on) {
    Guard guard;
    windows_refused = on;
}

void nccl_allocate_in_creation(bool on) {
    Guard guard;
    creation_allocates = on;
}

void nccl_abort_slowly(bool on) { aborts_are_slow = on; }

void nccl_let_mismatches_hang(bool on) {
    Guard guard;
    mismatches_hang = on;
}

void nccl_set_version(int version) {
    Guard guard;
    library_version = version;
}

int nccl_max_ctas(ncclComm *comm) {
    Guard guard;
    return comm->max_ctas;
}

bool nccl_waits(ncclComm *comm) {
    Guard guard;
    return comm->waiting > 0;
}

NcclCounts nccl_counts() {
    Guard guard;
    NcclCounts counts = {static_cast<int>(all_comms.size()), 0, 0, 0, helper_threads, submitted};
    for (const auto &comm : all_comms) {
        counts.alive += comm->magic == kCommMagic;
        counts.windows += static_cast<int>(comm->windows.size());
        counts.registered += static_cast<int>(comm->windows.size() + comm->registrations.size());
    }
    return counts;
}

} // namespace mte

using namespace mte;

// ---- the library's functions ----------------------------------------------------------------------------------------

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
    if (!version) return refuse(ncclInvalidArgument, "GetVersion : version argument is NULL");
    Guard guard;
    *version = version_now();
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}

const char *ncclGetLastError(ncclComm_t) { return last_error; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (!id) return refuse(ncclInvalidArgument, "GetUniqueId : out argument is NULL");
    Guard guard;
    memset(id, 0, sizeof *id);
    if (const char *const place =
            getenv("NCCL_COMM_ID")) { // the same id for all ranks, which may be in other processes
        snprintf(id->internal, sizeof id->internal, "%s%s", id_of_environment.c_str(), place);
        return ncclSuccess;
    }
    snprintf(id->internal, sizeof id->internal, "stand-in %llu", static_cast<unsigned long long>(++next_id));
    lobby[std::string(id->internal, sizeof id->internal)] = nullptr;
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return note(init_rank(comm, ranks, id, rank, config));
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    return note(init_rank(comm, ranks, id, rank, nullptr));
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
    if (!comms || count < 1) return refuse(ncclInvalidArgument, "Invalid device count requested : %d", count);
    ncclResult_t result = check_devices(count, devices);
    if (result != ncclSuccess) return result;
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    group_start();
    for (int i = 0; i < count; i++) {
        DeviceScope scope(devices ? devices[i] : i);
        result = note(init_rank(&comms[i], count, id, i, nullptr));
        if (result != ncclSuccess) break;
    }
    const ncclResult_t end = group_end();
    return result != ncclSuccess ? result : end;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
    ncclComm *child = nullptr;
    std::shared_ptr<Round> round;
    {
        Guard guard;
        ncclResult_t result = check_ready(comm, "ncclCommSplit");
        if (result == ncclSuccess && !out) result = refuse(ncclInvalidArgument, "CommSplit : newcomm argument is NULL");
        if (result == ncclSuccess) result = check_config(config);
        if (result == ncclSuccess && color < 0 && color != NCCL_SPLIT_NOCOLOR)
            result = refuse(ncclInvalidArgument, "CommSplit : invalid color %d", color);
        if (result != ncclSuccess) return note(result);
        DeviceScope scope(comm->device);
        if (color != NCCL_SPLIT_NOCOLOR) child = new_comm(is_blocking(config, comm->blocking));
        if (child && config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT) child->max_ctas = config->maxCTAs;
        if (child) child->first = comm->first;
        if (child && creation_allocates) child->creating = comm->rank > 0 ? 100 : 1;
        *out = nullptr;
        if (!comm->blocking && child) comm->handles.push_back([out, child] { *out = child; });
        round = enter_round(*comm, kSplitRound, Entry{comm->rank, color, key, child, 0});
    }
    return hide_progress(add_job(Job{comm, child, out, round, comm->blocking}));
}

// This call drives a non-blocking communicator: the first call still returns ncclInProgress, and the second runs the
// deferred work.
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    Guard guard;
    const ncclResult_t result = check_comm(comm, "ncclCommGetAsyncError");
    if (result != ncclSuccess) return result;
    if (!error) return refuse(ncclInvalidArgument, "GetAsyncError : asyncError argument is NULL");
    if (comm->state == ncclSuccess && still_creates(*comm)) return *error = ncclInProgress, ncclSuccess;
    if (comm->state == ncclInProgress && others_came(*comm) && --comm->polls <= 0) {
        comm->state = ncclSuccess;
        run_deferred(*comm);
        std::vector<std::function<void()>> handles;
        std::swap(handles, comm->handles);
        for (const std::function<void()> &fill : handles) fill();
    }
    if (!comm->trouble.empty()) refuse(comm->state, "%s", comm->trouble.c_str());
    *error = comm->state;
    if (comm->state == ncclSuccess && comm->later != ncclSuccess) std::swap(comm->state, comm->later);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    {
        Guard guard;
        const ncclResult_t result = check_ready(comm, "ncclCommFinalize");
        if (result != ncclSuccess) return result;
        comm->finalized = true;
        if (!comm->blocking) {
            comm->state = ncclInProgress;
            comm->polls = 2;
            return ncclInProgress;
        }
    }
    return flush(*comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    ncclResult_t result;
    {
        Guard guard;
        result = check_comm(comm, "ncclCommDestroy");
        if (result != ncclSuccess) report("ncclCommDestroy of a communicator that is gone");
        else check_graphs(*comm, "ncclCommDestroy");
        if (result != ncclSuccess) return result;
        if (!comm->clique || !comm->clique->settled)
            return refuse(ncclInvalidArgument, "ncclCommDestroy: the communicator is not ready; abort it instead");
    }
    if (!comm->windows.empty()) report("ncclCommDestroy: windows are still registered");
    if (comm->finalized && comm->state == ncclInProgress)
        report("ncclCommDestroy before ncclCommGetAsyncError said that ncclCommFinalize is done");
    result = flush(*comm);
    {
        Guard guard;
        leave(*comm);
    }
    if (comm->mesh) comm->mesh->wait_closed();
    return result;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    {
        Guard guard;
        const ncclResult_t result = check_comm(comm, "ncclCommAbort");
        if (result != ncclSuccess || comm->aborted) report("ncclCommAbort of a communicator that is gone");
        if (result != ncclSuccess || comm->aborted) return ncclInvalidArgument;
        if (comm->blocking && !(comm->clique && comm->clique->settled))
            report("ncclCommAbort of a blocking communicator that is being created");
        comm->aborted = true;
        comm->deferred.clear();
        abort_round(*comm);
        abort_nodes(*comm);
        notify();
    }
    if (group.depth > 0) group.aborts.push_back(comm);
    else reclaim({comm});
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    Guard guard;
    return query(comm, count, comm && comm->clique ? comm->clique->size : 0, "ncclCommCount");
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    Guard guard;
    return query(comm, device, comm ? comm->device : 0, "ncclCommCuDevice");
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    Guard guard;
    return query(comm, rank, comm ? comm->rank : 0, "ncclCommUserRank");
}

ncclResult_t ncclMemAlloc(void **p, size_t bytes) {
    if (!p || bytes == 0) return refuse(ncclInvalidArgument, "ncclMemAlloc: null place or no bytes");
    void *raw = nullptr;
    const size_t alignment = NCCL_WIN_REQUIRED_ALIGNMENT;
    if (cudaMalloc(&raw, bytes + alignment) != cudaSuccess)
        return refuse(ncclUnhandledCudaError, "ncclMemAlloc: no memory");
    Guard guard;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(raw) + alignment - 1) / alignment * alignment;
    *p = reinterpret_cast<void *>(start);
    memory[static_cast<char *>(*p)] = {bytes, raw};
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void *p) {
    void *raw = nullptr;
    {
        Guard guard;
        const auto entry = memory.find(static_cast<char *>(p));
        if (entry == memory.end()) {
            report("ncclMemFree of %p, which ncclMemAlloc did not give", p);
            return refuse(ncclInvalidArgument, "ncclMemFree: not from ncclMemAlloc");
        }
        if (still_registered(entry->first, entry->second.first))
            report("ncclMemFree of %p, which is still registered", p);
        raw = entry->second.second;
        memory.erase(entry);
    }
    return cudaFree(raw) == cudaSuccess ? ncclSuccess : refuse(ncclUnhandledCudaError, "ncclMemFree: cudaFree failed");
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle) {
    Guard guard;
    const ncclResult_t result = check_ready(comm, "ncclCommRegister");
    if (result != ncclSuccess) return result;
    if (!handle || !buffer || bytes == 0)
        return refuse(ncclInvalidArgument, "ncclCommRegister: null argument or no bytes");
    if (!device_valid(buffer, bytes)) return refuse(ncclInvalidArgument, "ncclCommRegister: not one device allocation");
    *handle = new Range{buffer, bytes};
    comm->registrations.insert(*handle);
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    Guard guard;
    const ncclResult_t result = check_comm(comm, "ncclCommDeregister");
    if (result != ncclSuccess) return result;
    if (comm->registrations.erase(handle) == 0)
        return refuse(ncclInvalidArgument, "ncclCommDeregister: unknown handle");
    delete static_cast<Range *>(handle);
    return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window, int flags) {
    std::shared_ptr<Round> round;
    {
        Guard guard;
        ncclResult_t result = check_ready(comm, "ncclCommWindowRegister");
        if (result != ncclSuccess) return note(result);
        if (!window || !buffer || bytes == 0) result = refuse(ncclInvalidArgument, "window: null argument or no bytes");
        else if (flags != NCCL_WIN_DEFAULT && flags != NCCL_WIN_COLL_SYMMETRIC)
            result = refuse(ncclInvalidArgument, "window: unknown flags %d", flags);
        else if (reinterpret_cast<uintptr_t>(buffer) % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
            result = refuse(ncclInvalidArgument, "window: buffer not aligned to %d bytes", NCCL_WIN_REQUIRED_ALIGNMENT);
        else if (!inside_memory(buffer, bytes))
            result = refuse(ncclInvalidArgument, "window: memory not from ncclMemAlloc");
        if (result != ncclSuccess) return note(result);
        if (windows_refused) return *window = nullptr, ncclSuccess;
        if (ranks_on_device(*comm) > 1) report("ncclCommWindowRegister: ranks share a device");
        ncclWindow_vidmem *const made = new ncclWindow_vidmem{static_cast<const char *>(buffer), bytes, flags};
        check_one_communicator(*comm, *made);
        comm->windows.insert(made);
        *window = comm->blocking ? made : nullptr;
        if (!comm->blocking) comm->handles.push_back([window, made] { *window = made; });
        round = enter_round(*comm, kWindowRound, Entry{comm->rank, 0, 0, nullptr, bytes});
    }
    return hide_progress(add_job(Job{comm, nullptr, nullptr, round, comm->blocking}));
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    Guard guard;
    const ncclResult_t result = check_comm(comm, "ncclCommWindowDeregister");
    if (result != ncclSuccess) return result;
    if (!window) return ncclSuccess;
    if (comm->windows.count(window) == 0)
        return refuse(ncclInvalidArgument, "ncclCommWindowDeregister: unknown window");
    if (windows_stay) return refuse(ncclInternalError, "ncclCommWindowDeregister: a fault of the test");
    const auto end = [comm, window] {
        comm->windows.erase(window);
        delete window;
    };
    if (comm->blocking || comm->state != ncclSuccess) return end(), ncclSuccess;
    comm->handles.push_back(end);
    comm->state = ncclInProgress;
    comm->polls = 2;
    return ncclInProgress;
}

ncclResult_t ncclGroupStart(void) {
    group_start();
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) { return group_end(); }

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return submit(comm, collective(kAllReduce, send, recv, count, type, op, 0, stream));
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return submit(comm, collective(kReduceScatter, send, recv, count, type, op, 0, stream));
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return submit(comm, collective(kAllGather, send, recv, count, type, ncclSum, 0, stream));
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return submit(comm, collective(kBroadcast, send, recv, count, type, ncclSum, root, stream));
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return submit(comm, collective(kReduce, send, recv, count, type, op, root, stream));
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return submit(comm, collective(kSend, send, nullptr, count, type, ncclSum, peer, stream));
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return submit(comm, collective(kReceive, nullptr, recv, count, type, ncclSum, peer, stream));
}

} // extern "C"
