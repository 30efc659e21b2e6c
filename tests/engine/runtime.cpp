// runtime.cpp - a CUDA runtime without a GPU: device memory, streams, events, copies, graphs, devices.
//
// Prototypes come from the real cuda_runtime_api.h. Sections: >>config >>lock >>memory >>order >>schedule >>enqueue
// >>capture >>api-device >>api-memory >>api-copy >>api-stream >>api-event >>api-capture >>api-graph >>api-error

#include "core.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

namespace mte {

// device number of all streams that stand for other processes; greater than every real device number
constexpr int kElsewhere = 64;

// ---- >>config ------------------------------------------------------------------------------------------------------

static std::string environment(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static int environment_number(const char *name, int otherwise) {
    return atoi(environment(name, std::to_string(otherwise).c_str()).c_str());
}

static int environment_choice(const char *name, std::initializer_list<const char *> choices) {
    std::string value = environment(name, *choices.begin());
    int i = 0;
    for (const char *choice : choices) {
        if (value == choice) return i;
        i++;
    }
    fprintf(stderr, "ENGINE: %s=%s is none of:", name, value.c_str());
    for (const char *choice : choices) fprintf(stderr, " %s", choice);
    fprintf(stderr, "\n");
    exit(2);
}

static CopyTime copy_time() {
    CopyTime chosen = static_cast<CopyTime>(environment_choice("MTE_CP", {"late", "early", "random"}));
#ifdef MTE_CHECK
    chosen = CopyTime::late; // so that the checker sees all accesses to a copy's destination before the wait
#endif
    return chosen;
}

static Config read_config() {
    Config c;
    c.threads = static_cast<Order>(environment_choice("MTE_THREADS", {"fifo", "lifo", "random"}));
    c.blocks = static_cast<Order>(environment_choice("MTE_BLOCKS", {"fifo", "lifo", "random"}));
    c.copy = copy_time();
    c.wgmma = static_cast<CopyTime>(environment_choice("MTE_WGMMA", {"late", "early", "random"}));
    c.streams = static_cast<Schedule>(environment_choice("MTE_STREAMS", {"eager", "lazy", "random", "greedy"}));
    c.hopper = environment_number("MTE_HOPPER", 1) != 0;
    c.protect = environment_number("MTE_PROTECT", 0) != 0;
    c.devices = std::clamp(environment_number("MTE_DEVICES", 8), 0, kElsewhere);
    c.memory = (size_t)environment_number("MTE_MEMORY", 4096) << 20;
    c.shared = (size_t)environment_number("MTE_SHARED", shared_per_block_optin >> 10) << 10;
    c.patience = environment_number("MTE_PATIENCE", 600);
    return c;
}

const Config &config() {
    static const Config c = read_config();
    return c;
}

// splitmix64
uint64_t random_below(uint64_t n) {
    static uint64_t state = (uint64_t)environment_number("MTE_SEED", 0) * 0xd1342543de82ef95u + 1;
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (z ^ (z >> 31)) % n;
}

// ---- >>lock --------------------------------------------------------------------------------------------------------

// The lock is recursive. wait_for_change() releases it at any depth.
struct Lock {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t changes = 0;
};
static Lock &the_lock() {
    static Lock *l = new Lock; // never destroyed: threads may outlive main()
    return *l;
}
static thread_local int lock_depth;

void lock() {
    if (lock_depth++ == 0) the_lock().mutex.lock();
}

void unlock() {
    if (--lock_depth == 0) the_lock().mutex.unlock();
}

void notify() {
    the_lock().changes++;
    the_lock().changed.notify_all();
}

static void print_streams();

void wait_for_change() {
    Lock &l = the_lock();
    uint64_t before = l.changes;
    int depth = std::exchange(lock_depth, 0);
    std::unique_lock<std::mutex> held(l.mutex, std::adopt_lock);
    bool changed =
        l.changed.wait_for(held, std::chrono::seconds(config().patience), [&] { return l.changes != before; });
    held.release();
    lock_depth = depth;
    if (changed) return;
    report("deadlock: a host thread waits, and nothing has happened for %d seconds", config().patience);
    print_streams();
    abort();
}

// ---- >>memory ------------------------------------------------------------------------------------------------------

// The memory of all devices is cut from one reserved range, front to back, and never reused. A freed allocation stays
// mapped, filled with 0xff. When more than quarantine_bytes have been freed, the oldest allocations return their pages.

static constexpr size_t red_zone = 256;
static constexpr size_t granule = 256;
static constexpr size_t page = 4096;
static constexpr size_t quarantine_bytes = (size_t)256 << 20;
static constexpr unsigned char unwritten = 0xff;

struct Memory {
    char *range = nullptr;
    size_t used = 0;
    std::map<const char *, Allocation> allocations;
    std::map<const char *, size_t> pinned;
    std::deque<const Allocation *> quarantine;
    size_t quarantined = 0;
    size_t live_bytes[kElsewhere] = {};
    std::set<std::pair<int, int>> peers; // (accessing device, owning device)
};
static Memory &memory() {
    static Memory *m = new Memory;
    return *m;
}

static thread_local int host_device;
static thread_local long waits_of_thread; // see host_waits

static void host_touched_device_memory(int number, siginfo_t *info, void *) {
    if (in_device_range(info->si_addr)) {
        static const char text[] = "ENGINE: host code touched device memory\n";
        if (write(2, text, sizeof text - 1) < 0) _exit(98);
        _exit(97);
    }
    signal(number, SIG_DFL);
    raise(number);
}

static void catch_host_access() {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = host_touched_device_memory;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
}

char *device_range() {
    Memory &m = memory();
    if (m.range) return m.range;
    int access = config().protect ? PROT_NONE : PROT_READ | PROT_WRITE;
    void *p = mmap(nullptr, device_range_bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("ENGINE: mmap");
        abort();
    }
    if (config().protect) catch_host_access();
    return m.range = static_cast<char *>(p);
}

bool in_device_range(const void *p) {
    const char *range = memory().range;
    return range && (const char *)p >= range && (const char *)p < range + device_range_bytes;
}

// Device memory is accessible to the host while an object of this type exists, also with MTE_PROTECT=1.
struct Unprotected {
    static int depth;
    Unprotected() {
        if (depth++ == 0) protect(PROT_READ | PROT_WRITE);
    }
    ~Unprotected() {
        if (--depth == 0) protect(PROT_NONE);
    }
    static void protect(int access) {
        if (!config().protect) return;
        size_t bytes = memory().used;
        if (bytes) mprotect(device_range(), bytes, access);
    }
};
int Unprotected::depth;

const Allocation *find_allocation(const void *p) {
    auto &all = memory().allocations;
    auto after = all.upper_bound(static_cast<const char *>(p));
    return after == all.begin() ? nullptr : &std::prev(after)->second;
}

static bool inside(const Allocation *a, const void *p, size_t bytes) {
    size_t offset = (size_t)((const char *)p - a->begin);
    return offset <= a->bytes && bytes <= a->bytes - offset;
}

bool device_valid(const void *p, size_t bytes) {
    Guard guard;
    const Allocation *a = find_allocation(p);
    return a && a->live && inside(a, p, bytes);
}

bool reachable(const Allocation &a, int device) {
    return device < 0 || a.device == device || memory().peers.count({device, a.device}) != 0;
}

bool host_pinned(const void *p, size_t bytes) {
    Guard guard;
    auto &all = memory().pinned;
    auto after = all.upper_bound(static_cast<const char *>(p));
    if (after == all.begin()) return false;
    auto found = std::prev(after);
    return (const char *)p + bytes <= found->first + found->second;
}

// Returns why [p, p + bytes) may not be used on the device, or NULL if it may.
static const char *fault(const void *p, size_t bytes, int device) {
    if (!in_device_range(p)) return host_pinned(p, bytes) ? nullptr : "is not device memory";
    const Allocation *a = find_allocation(p);
    if (!a || !inside(a, p, bytes)) return "is not inside one device allocation";
    if (!a->live) return "has been freed";
    if (!reachable(*a, device)) return "belongs to another device, and peer access is not enabled";
    return nullptr;
}

void check_global(const void *p, size_t bytes, int alignment, const char *what) {
    Guard guard;
    const char *wrong = fault(p, bytes, operation_device());
    if (wrong) report("%s: %p + %zu %s", what, p, bytes, wrong);
    if (alignment > 1 && (uintptr_t)p % (unsigned)alignment)
        report("%s: %p is not %d-byte aligned", what, p, alignment);
}

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Marks the range up to `end` as used and fills it with 0xff. [begin, begin + bytes) is the allocation inside it.
static void fill_new(char *begin, size_t bytes, size_t end) {
    Memory &m = memory();
    size_t offset = (size_t)(begin - m.range);
    Unprotected unprotected;
    if (config().protect) mprotect(m.range + m.used, end - m.used, PROT_READ | PROT_WRITE);
    memset(m.range + m.used, unwritten, end - m.used);
    ASAN_POISON_MEMORY_REGION(m.range + m.used, end - m.used);
    ASAN_UNPOISON_MEMORY_REGION(m.range + offset, bytes);
    m.used = end;
}

// Cuts an allocation with red zones from the reserved range. Returns NULL when the device or the range is full.
static void *device_allocate(size_t bytes, int device) {
    Memory &m = memory();
    device_range();
    size_t offset = round_up(m.used + red_zone, granule);
    size_t end = round_up(offset + bytes + red_zone, page);
    if (bytes > config().memory || m.live_bytes[device] + bytes > config().memory) return nullptr;
    if (end > device_range_bytes) report("the program has allocated more than device_range_bytes (core.h) in all");
    if (end > device_range_bytes) return nullptr;
    char *begin = m.range + offset;
    fill_new(begin, bytes, end);
    m.live_bytes[device] += bytes;
    m.allocations[begin] = Allocation{begin, bytes, device, true};
    checker_device_new(begin, bytes);
    return begin;
}

static void shrink_quarantine() {
    Memory &m = memory();
    while (m.quarantined > quarantine_bytes) {
        const Allocation *a = m.quarantine.front();
        m.quarantine.pop_front();
        m.quarantined -= a->bytes;
        uintptr_t first = round_up((uintptr_t)a->begin, page);
        uintptr_t last = ((uintptr_t)a->begin + a->bytes) / page * page;
        if (last > first) madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED);
    }
}

// Fills an allocation with 0xff and puts it into quarantine. Returns false if p is not a live allocation.
static bool device_release(void *p) {
    Memory &m = memory();
    auto found = m.allocations.find(static_cast<const char *>(p));
    if (found == m.allocations.end() || !found->second.live) return false;
    Allocation &a = found->second;
    Unprotected unprotected;
    memset(a.begin, unwritten, a.bytes);
    ASAN_POISON_MEMORY_REGION(a.begin, a.bytes);
    checker_device_gone(a.begin, a.bytes);
    a.live = false;
    m.live_bytes[a.device] -= a.bytes;
    m.quarantined += a.bytes;
    m.quarantine.push_back(&a);
    shrink_quarantine();
    return true;
}

#ifdef MTE_ASAN

static void check_red_zones() {} // AddressSanitizer reports a write into a red zone when it happens

#else

// Finds a byte in the red zones of an allocation that has changed. *offset is its distance from the allocation's begin.
static bool red_zone_damage(const Allocation &a, long *offset) {
    for (size_t i = 0; i < red_zone; i++) {
        *offset = -(long)i - 1;
        if ((unsigned char)a.begin[*offset] != unwritten) return true;
        *offset = (long)(a.bytes + i);
        if ((unsigned char)a.begin[*offset] != unwritten) return true;
    }
    return false;
}

// Reports writes into red zones. Called when the host synchronises.
static void check_red_zones() {
    Unprotected unprotected;
    for (auto &entry : memory().allocations) {
        Allocation &a = entry.second;
        long offset;
        if (!a.live || !red_zone_damage(a, &offset)) continue;
        report("device memory was written outside of an allocation: at byte %ld of %p, which has %zu bytes", offset,
               (void *)a.begin, a.bytes);
        a.begin[offset] = (char)unwritten;
    }
}

#endif

// ---- >>order: operations, and how they are ordered ------------------------------------------------------------------

// A vector clock. Element i is the sequence number of the last operation of stream i that is ordered before this one.
typedef std::vector<uint32_t> Clock;

struct Stream;

struct Operation {
    uint32_t id;
    Stream *stream;
    uint32_t sequence; // position within the stream, from 1
    std::function<void()> work;
    bool host_work;        // true for a cudaLaunchHostFunc
    bool replayed = false; // true for a node of a graph
    bool done = false;
    // operations that must be done first: event waits, the legacy default stream
    std::vector<std::shared_ptr<Operation>> after;
    std::vector<Stream *> followers; // streams with an operation that has this one in `after`
    Rendezvous *rendezvous = nullptr;
    Clock clock;
};
typedef std::shared_ptr<Operation> OperationRef;

// The nodes that the next node of a captured stream depends on: numbers of nodes of the graph.
typedef std::set<size_t> Tail;

struct Capture;

struct Stream {
    unsigned index;
    int device;
    bool blocking; // true: ordered with the legacy default stream
    bool is_default;
    bool destroyed = false;
    int priority = 0;
    uint32_t sequence = 0;
    std::deque<OperationRef> queue;
    std::vector<OperationRef> waits; // events that the next operation waits for
    OperationRef last;
    Clock clock;                      // clock of the last operation that ran
    std::shared_ptr<Capture> capture; // null: operations are run, not recorded
    Tail tail;
};

struct OldestFirst {
    bool operator()(const Stream *a, const Stream *b) const { return a->index < b->index; }
};

struct Event {
    OperationRef recorded;
    int device;
    std::shared_ptr<double> seconds;  // time at which the record ran
    std::shared_ptr<Capture> capture; // not null: the last record was captured, and depends on `tail`
    Tail tail;
};

struct Rendezvous {
    int ranks;
    const char *label;
    std::function<void()> work;
    std::vector<OperationRef> participants;
};

// One operation of a graph. It depends on the nodes `after`, whose numbers are smaller than its own.
struct Node {
    const char *label;
    int device;
    bool host_work;
    std::shared_ptr<const std::function<void()>> work;
    std::function<void(cudaStream_t)> call; // see capture_call; then there is no work
    Tail after;
};

struct Graph {
    std::deque<Node> nodes; // a handle of a node is its address
};

// A graph that can be launched. Its nodes are divided into lanes: each node of a lane depends on the one before it. So
// the streams of the lanes order no two nodes that the graph does not order.
struct GraphExec {
    std::shared_ptr<Graph> graph;
    std::vector<Stream *> lanes;
    std::vector<size_t> lane_of; // index: node
    std::vector<size_t> sinks;   // nodes that no other node depends on
    OperationRef last;           // the end of the last launch
};

// From cudaStreamBeginCapture to cudaStreamEndCapture.
struct Capture {
    unsigned long long id;
    Stream *origin;
    std::thread::id thread;
    cudaStreamCaptureMode mode;
    bool invalid = false;
    bool ended = false;
    std::shared_ptr<Graph> graph;
    std::set<Stream *> streams;
};

// What the engine still knows about an operation after it has run.
struct Past {
    unsigned stream;
    uint32_t sequence;
    const char *label;
};

struct Queues {
    std::vector<std::unique_ptr<Stream>> all;
    std::vector<Stream *> streams;        // streams that are not destroyed, or still have operations
    std::set<Stream *, OldestFirst> busy; // streams that have operations
    // In the schedule eager: at least the streams whose first operation is ready. There may be many whose first
    // operation waits for another rank, so not all are looked at after each operation.
    std::set<Stream *, OldestFirst> candidates;
    std::set<const void *> handles;
    std::set<const void *> events;
    Stream *default_streams[kElsewhere] = {};
    Clock gone[kElsewhere + 1]; // clocks of destroyed streams, by device
    std::vector<Past> past;     // index: id - 1
    Operation *running = nullptr;
    // The operations that the host has waited for. All host threads share this clock, so the checker may miss a race of
    // two host threads, but never reports a false one.
    Clock host;
    cudaError_t sticky = cudaSuccess;
    std::vector<std::shared_ptr<Capture>> captures; // those that have not ended
    unsigned long long captures_begun = 0;
    std::map<const void *, std::shared_ptr<Graph>> graphs;
    std::map<const void *, std::shared_ptr<GraphExec>> execs;
    long kernels_replayed = 0;
};
static Queues &queues() {
    static Queues *q = new Queues;
    return *q;
}

// Only the checker reads clocks. They have an element for every stream of the program, so others do not keep them.
#ifdef MTE_CHECK
static constexpr bool keeps_clocks = true;
#else
static constexpr bool keeps_clocks = false;
#endif

static void join(Clock &clock, const Clock &other) {
    if (!keeps_clocks) return;
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

static void add(Clock &clock, const Operation &o) {
    if (!keeps_clocks) return;
    if (clock.size() <= o.stream->index) clock.resize(o.stream->index + 1);
    clock[o.stream->index] = std::max(clock[o.stream->index], o.sequence);
}

uint32_t operation_id() { return queues().running ? queues().running->id : 0; }

int operation_device() {
    const Operation *o = queues().running;
    return !o || o->rendezvous ? -1 : o->stream->device;
}

const char *operation_label(uint32_t id) { return id ? queues().past[id - 1].label : "the host"; }

bool operation_before(uint32_t id) {
    const Operation *o = queues().running;
    if (!id || !o || id == o->id) return true;
    const Past &past = queues().past[id - 1];
    return past.stream < o->clock.size() && o->clock[past.stream] >= past.sequence;
}

// Prints the operations of each stream, and what the first one waits for.
static void print_streams() {
    for (const Stream *s : queues().streams) {
        if (s->queue.empty()) continue;
        const Operation &head = *s->queue.front();
        fprintf(stderr, "    stream %u of device %d: %zu operations, first '%s'", s->index, s->device, s->queue.size(),
                operation_label(head.id));
        for (const OperationRef &o : head.after)
            if (!o->done) fprintf(stderr, ", waits for '%s' of stream %u", operation_label(o->id), o->stream->index);
        if (head.rendezvous)
            fprintf(stderr, ", %zu of %d ranks have come", head.rendezvous->participants.size(),
                    head.rendezvous->ranks);
        fprintf(stderr, "\n");
    }
}

// ---- >>schedule: what runs, and when -------------------------------------------------------------------------------

static bool at_head(const Operation &o) {
    if (o.stream->queue.front().get() != &o) return false;
    return std::all_of(o.after.begin(), o.after.end(), [](const OperationRef &before) { return before->done; });
}

static bool ready(const Operation &o) {
    if (!at_head(o)) return false;
    const Rendezvous *r = o.rendezvous;
    if (!r) return true;
    return (int)r->participants.size() == r->ranks && std::all_of(r->participants.begin(), r->participants.end(),
                                                                  [](const OperationRef &p) { return at_head(*p); });
}

// The streams whose first operation is ready.
static std::vector<Stream *> ready_streams() {
    std::vector<Stream *> found;
    for (Stream *s : queues().busy)
        if (ready(*s->queue.front())) found.push_back(s);
    return found;
}

static bool eager() { return config().streams == Schedule::eager; }

// Called when the stream has another first operation, or when one that this waits for is done.
static void may_be_ready(Stream *s) {
    if (!eager() || s->queue.empty()) return;
    queues().candidates.insert(s);
    if (const Rendezvous *r = s->queue.front()->rendezvous)
        for (const OperationRef &o : r->participants) queues().candidates.insert(o->stream);
}

// The first operation of the first of ready_streams, which the schedule eager takes.
static OperationRef first_ready() {
    std::set<Stream *, OldestFirst> &candidates = queues().candidates;
    while (!candidates.empty()) {
        Stream *s = *candidates.begin();
        if (!s->queue.empty() && ready(*s->queue.front())) return s->queue.front();
        candidates.erase(candidates.begin());
    }
    return nullptr;
}

static void set_clocks(const std::vector<OperationRef> &group) {
    Clock clock;
    for (const OperationRef &o : group) {
        join(clock, o->clock);
        join(clock, o->stream->clock);
        for (const OperationRef &before : o->after) join(clock, before->clock);
        add(clock, *o);
    }
    for (const OperationRef &o : group) o->clock = clock;
}

// Removes a destroyed stream whose queue is empty.
static void forget(Stream *s) {
    Queues &q = queues();
    q.streams.erase(std::find(q.streams.begin(), q.streams.end(), s));
    join(q.gone[s->device], s->clock);
    s->clock.clear();
    s->last.reset();
}

static void retire(const OperationRef &o) {
    Stream *s = o->stream;
    o->done = true;
    o->work = nullptr;
    o->after.clear();
    for (Stream *follower : o->followers) may_be_ready(follower);
    o->rendezvous = nullptr;
    s->clock = o->clock;
    s->queue.pop_front();
    if (s->queue.empty()) queues().busy.erase(s);
    may_be_ready(s);
    if (s->destroyed && s->queue.empty()) forget(s);
}

// Runs an operation and removes it from its stream; of a rendezvous, from the streams of all participants.
static void run(OperationRef o) {
    Queues &q = queues();
    std::unique_ptr<Rendezvous> rendezvous(o->rendezvous);
    std::vector<OperationRef> group = rendezvous ? rendezvous->participants : std::vector<OperationRef>{o};
    set_clocks(group);
    Operation *interrupted = std::exchange(q.running, o.get());
    const std::function<void()> &work = rendezvous ? rendezvous->work : o->work;
    if (work && o->host_work) {
        work();
    } else if (work) {
        Unprotected unprotected;
        work();
    }
    q.running = interrupted;
    for (const OperationRef &member : group) retire(member);
    notify();
}

// Index: id. The operations that must run before `target` is done, including `target`. Empty in the schedule eager,
// which does not use them.
typedef std::vector<bool> Needed;

static Needed find_needed(const OperationRef &target) {
    Needed needed(queues().past.size() + 1);
    std::vector<Operation *> open = {target.get()};
    while (!open.empty()) {
        Operation *o = open.back();
        open.pop_back();
        if (o->done || needed[o->id]) continue;
        for (const OperationRef &earlier : o->stream->queue) {
            if (earlier->id > o->id) break;
            if (needed[earlier->id]) continue;
            needed[earlier->id] = true;
            for (const OperationRef &before : earlier->after) open.push_back(before.get());
            if (!earlier->rendezvous) continue;
            for (const OperationRef &peer : earlier->rendezvous->participants) open.push_back(peer.get());
        }
    }
    return needed;
}

// What find_needed has found for this thread's target. A thread asks for the same one many times, and only an operation
// that was enqueued since can be missing there.
static const Needed &needed_for(const OperationRef &target) {
    static thread_local uint32_t id;
    static thread_local size_t enqueued;
    static thread_local Needed needed;
    if (eager()) return needed;
    if (id != target->id || enqueued != queues().past.size()) needed = find_needed(target);
    id = target->id;
    enqueued = queues().past.size();
    return needed;
}

static OperationRef pick(const std::vector<Stream *> &streams) {
    return streams.empty() ? nullptr : streams[random_below(streams.size())]->queue.front();
}

// Selects the next operation to run while a host thread waits for the operations in `needed`.
static OperationRef choose(const Needed &needed) {
    if (eager()) return first_ready();
    std::vector<Stream *> all = ready_streams();
    std::vector<Stream *> wanted;
    std::vector<Stream *> others;
    for (Stream *s : all) {
        uint32_t id = s->queue.front()->id; // one that is new is not needed
        (id < needed.size() && needed[id] ? wanted : others).push_back(s);
    }
    switch (config().streams) {
    case Schedule::lazy: return pick(wanted);
    case Schedule::greedy: return pick(others.empty() ? wanted : others);
    case Schedule::random: return pick(wanted.empty() || random_below(2) ? all : wanted);
    default: return pick(all);
    }
}

// Runs operations until `target` is done. When none can run, waits for other host threads.
static void wait_for(OperationRef target) {
    while (!target->done) {
        OperationRef next = choose(needed_for(target));
        if (next) run(next);
        else wait_for_change();
    }
    join(queues().host, target->clock);
}

static void wait_for_stream(Stream *s) {
    if (!s->queue.empty()) wait_for(s->queue.back());
    join(queues().host, s->clock);
}

static void wait_for_device(int device) {
    std::vector<Stream *> streams = queues().streams;
    if (config().streams != Schedule::eager && !streams.empty())
        std::rotate(streams.begin(), streams.begin() + (long)random_below(streams.size()), streams.end());
    for (Stream *s : streams)
        if (s->device == device) wait_for_stream(s);
    join(queues().host, queues().gone[device]);
}

// Runs operations after one was enqueued: all that are ready (eager), up to two (random), or none.
static void run_some() {
    uint64_t steps = eager() ? UINT64_MAX : config().streams == Schedule::random ? random_below(3) : 0;
    for (; steps; steps--) {
        OperationRef next = eager() ? first_ready() : pick(ready_streams());
        if (!next) return;
        run(next);
    }
}

// ---- >>enqueue -----------------------------------------------------------------------------------------------------

static Stream *new_stream(bool blocking, bool is_default) {
    Queues &q = queues();
    Stream *s = new Stream();
    s->index = (unsigned)q.all.size();
    s->device = host_device;
    s->blocking = blocking;
    s->is_default = is_default;
    q.all.emplace_back(s);
    q.streams.push_back(s);
    q.handles.insert(s);
    return s;
}

static Stream *default_stream() {
    Stream *&s = queues().default_streams[host_device];
    if (!s) s = new_stream(true, true);
    return s;
}

static Stream *stream_of(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) return default_stream();
    if (queues().handles.count(handle)) return reinterpret_cast<Stream *>(handle);
    report("stream %p was never created, or has been destroyed", (void *)handle);
    return nullptr;
}

// Finds the stream that an operation is appended to. Fails if a capture forbids this.
// CUDA Programming Guide, "Prohibited and Unhandled Operations": the legacy default stream may not be used at all while
// a blocking stream is captured. "Invalidation": an invalid operation makes the capture useless.
static cudaError_t stream_for_work(cudaStream_t handle, Stream **found) {
    Stream *s = *found = stream_of(handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s->capture) return s->capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    bool implicit = false;
    for (const std::shared_ptr<Capture> &c : queues().captures)
        for (const Stream *other : c->streams)
            if (s->is_default && other->blocking && other->device == s->device) implicit = c->invalid = true;
    return implicit ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}

// Orders an operation with the legacy default stream: this stream and the blocking streams of its device wait for each
// other.
static void wait_legacy(Operation &o) {
    Stream *s = o.stream;
    if (!s->blocking) return;
    if (s->is_default) join(o.clock, queues().gone[s->device]);
    for (Stream *other : queues().streams) {
        bool ordered =
            other != s && other->blocking && other->device == s->device && (s->is_default || other->is_default);
        if (ordered && other->last && !other->last->done) o.after.push_back(other->last);
        if (ordered) join(o.clock, other->clock);
    }
}

static void capture_node(Stream *s, Node node);

// Appends an operation to the stream, or to the graph that the stream is captured into; then the result is null.
static OperationRef append(Stream *s, const char *label, std::function<void()> work, Rendezvous *rendezvous = nullptr,
                           bool host_work = false, bool replayed = false) {
    Queues &q = queues();
    if (s->capture) {
        if (rendezvous) report("'%s': a rendezvous cannot be captured", label);
        auto kept = work ? std::make_shared<const std::function<void()>>(std::move(work)) : nullptr;
        capture_node(s, Node{label, s->device, host_work, kept, nullptr, {}});
        return nullptr;
    }
    OperationRef o = std::make_shared<Operation>();
    o->id = (uint32_t)q.past.size() + 1;
    o->stream = s;
    o->sequence = ++s->sequence;
    o->work = std::move(work);
    o->host_work = host_work;
    o->replayed = replayed;
    o->rendezvous = rendezvous;
    o->clock = q.host;
    o->after.swap(s->waits);
    wait_legacy(*o);
    if (rendezvous) rendezvous->participants.push_back(o);
    q.past.push_back(Past{s->index, o->sequence, label});
    if (s->queue.empty()) queues().busy.insert(s);
    s->queue.push_back(o);
    for (const OperationRef &before : o->after)
        if (!before->done) before->followers.push_back(s);
    may_be_ready(s);
    s->last = o;
    notify();
    if (!q.running) run_some();
    return o;
}

cudaError_t enqueue(cudaStream_t stream, const char *label, std::function<void()> work) {
    Stream *s;
    cudaError_t error = stream_for_work(stream, &s);
    if (error == cudaSuccess) append(s, label, std::move(work));
    return error;
}

Rendezvous *rendezvous_new(int ranks, const char *label, std::function<void()> work) {
    return new Rendezvous{ranks, label, std::move(work), {}};
}

void enqueue_rendezvous(cudaStream_t stream, Rendezvous *rendezvous) {
    Stream *s = stream_of(stream);
    if (s) append(s, rendezvous->label, nullptr, rendezvous);
}

size_t leave_rendezvous(cudaStream_t stream, Rendezvous *rendezvous) {
    std::vector<OperationRef> &all = rendezvous->participants;
    Stream *s = stream_of(stream);
    const auto own = std::find_if(all.begin(), all.end(), [s](const OperationRef &o) { return o->stream == s; });
    if (own != all.end()) {
        (*own)->rendezvous = nullptr;
        all.erase(own);
        may_be_ready(s);
    }
    const size_t left = all.size();
    if (left == 0) delete rendezvous;
    notify();
    if (!queues().running) run_some();
    return left;
}

// ---- >>capture -----------------------------------------------------------------------------------------------------

// The rules are those of the CUDA Programming Guide, "Creating a Graph Using Stream Capture", and of
// cudaThreadExchangeStreamCaptureMode in the documentation of the runtime API.

static thread_local cudaStreamCaptureMode interaction_mode = cudaStreamCaptureModeGlobal;

static void capture_node(Stream *s, Node node) {
    std::deque<Node> &nodes = s->capture->graph->nodes;
    node.after = std::exchange(s->tail, Tail{nodes.size()});
    nodes.push_back(std::move(node));
}

// Returns `error` after it has invalidated the capture.
static cudaError_t spoil(Capture &capture, cudaError_t error) {
    capture.invalid = true;
    return error;
}

// Fails if the calling thread is prohibited from potentially unsafe calls: by its own captures that are not relaxed, or
// by a global capture of another thread. Such a call invalidates the captures that prohibit it. The documentation names
// cudaMalloc as an example. Here every call counts that allocates or frees memory, or waits for a device or queries it.
static cudaError_t check_unsafe() {
    cudaError_t error = cudaSuccess;
    for (const std::shared_ptr<Capture> &c : queues().captures) {
        bool own = c->thread == std::this_thread::get_id();
        bool global = c->mode == cudaStreamCaptureModeGlobal && interaction_mode == cudaStreamCaptureModeGlobal;
        bool prohibits = own ? c->mode != cudaStreamCaptureModeRelaxed : global;
        if (prohibits && interaction_mode != cudaStreamCaptureModeRelaxed)
            error = spoil(*c, cudaErrorStreamCaptureUnsupported);
    }
    return error;
}

// Fails if a stream of the device is captured: the host may not wait for a handle that includes a captured stream, and
// no mode permits it.
static cudaError_t check_wait_for_device(int device) {
    cudaError_t error = check_unsafe();
    for (const std::shared_ptr<Capture> &c : queues().captures)
        for (const Stream *s : c->streams)
            if (s->device == device) error = spoil(*c, cudaErrorStreamCaptureUnsupported);
    return error;
}

static cudaError_t check_wait_for_stream(cudaStream_t handle, Stream **s) {
    cudaError_t error = stream_for_work(handle, s);
    if (error != cudaSuccess) return error;
    return (*s)->capture ? spoil(*(*s)->capture, cudaErrorStreamCaptureUnsupported) : check_unsafe();
}

static cudaError_t check_wait_for_event(const Event *e) {
    if (!e) return cudaErrorInvalidResourceHandle;
    return e->capture ? spoil(*e->capture, cudaErrorCapturedEvent) : check_unsafe();
}

static void join_capture(const std::shared_ptr<Capture> &capture, Stream *s, const Tail &tail) {
    s->capture = capture;
    s->tail.insert(tail.begin(), tail.end());
    capture->streams.insert(s);
}

// A wait for an event when the stream is captured, or the event's last record. A stream that waits for a captured event
// joins the capture. A stream that is captured may wait only for events of its capture.
static cudaError_t wait_captured(Stream *s, const Event *e) {
    if (s->capture == e->capture) {
        s->tail.insert(e->tail.begin(), e->tail.end());
        return cudaSuccess;
    }
    if (!e->capture || (s->capture && e->capture->ended)) return spoil(*s->capture, cudaErrorStreamCaptureIsolation);
    if (s->capture) {
        e->capture->invalid = true;
        return spoil(*s->capture, cudaErrorStreamCaptureMerge);
    }
    if (e->capture->ended) return cudaErrorCapturedEvent;
    if (e->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (s->is_default) return spoil(*e->capture, cudaErrorStreamCaptureImplicit);
    join_capture(e->capture, s, e->tail);
    return cudaSuccess;
}

// Returns true if the origin of the capture is ordered after all nodes.
static bool all_joined(const Capture &c) {
    std::vector<bool> joined(c.graph->nodes.size());
    for (size_t i : c.origin->tail) joined[i] = true;
    for (size_t i = joined.size(); i-- > 0;) {
        if (!joined[i]) return false; // the nodes that depend on this one have been seen
        for (size_t before : c.graph->nodes[i].after) joined[before] = true;
    }
    return true;
}

bool is_capturing(cudaStream_t stream) {
    Guard guard;
    const Stream *s = stream_of(stream);
    return s && s->capture;
}

cudaError_t capture_call(const std::vector<cudaStream_t> &streams, const char *label,
                         std::function<void(cudaStream_t)> call) {
    Stream *first = nullptr;
    std::vector<Stream *> all(streams.size());
    for (size_t i = 0; i < streams.size(); i++) {
        cudaError_t error = stream_for_work(streams[i], &all[i]);
        if (error != cudaSuccess) return error;
        if (!first) first = all[i];
        if (!first->capture || all[i]->capture != first->capture) return cudaErrorStreamCaptureMerge;
    }
    for (const Stream *s : all) first->tail.insert(s->tail.begin(), s->tail.end());
    capture_node(first, Node{label, first->device, false, nullptr, std::move(call), {}});
    for (Stream *s : all) s->tail = first->tail;
    return cudaSuccess;
}

// ---- errors --------------------------------------------------------------------------------------------------------

static thread_local cudaError_t last_error;

// Set by cuda_fail_after: the calling thread's call of `name` fails after `after` more calls.
struct Injected {
    const char *name;
    int after;
    cudaError_t error;
};
static thread_local Injected injected;
static thread_local const char *call_name = "";

void cuda_fail_after(const char *name, int after, cudaError_t error) { injected = Injected{name, after, error}; }

bool call_fails(const char *name) {
    if (!injected.name || strcmp(injected.name, name) != 0 || injected.after-- > 0) return false;
    injected.name = nullptr;
    return true;
}

bool call_will_fail() { return injected.name != nullptr; }

// Returns `error`, an injected error, or the error that ended a kernel: that one is returned by every later call.
static cudaError_t result(cudaError_t error) {
    if (error == cudaSuccess && call_fails(call_name)) error = injected.error;
    if (queues().sticky != cudaSuccess) error = queues().sticky;
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

// Constructed by every API call: takes the lock, and reports calls inside a host function, which CUDA forbids.
struct Call {
    Guard guard;
    explicit Call(const char *name) {
        call_name = name;
        const Operation *o = queues().running;
        if (o && o->host_work) report("%s called inside a host function", name);
    }
};

// ---- kernels -------------------------------------------------------------------------------------------------------

struct FunctionLimits {
    std::map<std::pair<const void *, int>, size_t> dynamic_shared; // key: function and device
};
static FunctionLimits &function_limits() {
    static FunctionLimits *limits = new FunctionLimits;
    return *limits;
}

static bool shared_is_allowed(const void *function) {
    return function_limits().dynamic_shared.count({function, host_device}) > 0;
}

static size_t dynamic_shared_limit(const void *function) {
    return shared_is_allowed(function) ? function_limits().dynamic_shared[{function, host_device}] : shared_per_block;
}

static bool within(dim3 size, uint64_t x, uint64_t y, uint64_t z) {
    return size.x >= 1 && size.y >= 1 && size.z >= 1 && size.x <= x && size.y <= y && size.z <= z;
}

static cudaError_t check_launch(const void *function, const Launch &launch, cudaStream_t stream, Stream **s) {
    cudaError_t error = stream_for_work(stream, s);
    if (error != cudaSuccess) return error;
    bool shape = within(launch.grid, 0x7fffffff, 65535, 65535) && within(launch.threads, 1024, 1024, 64) &&
                 (uint64_t)launch.threads.x * launch.threads.y * launch.threads.z <= max_block_threads;
    if (!shape) return cudaErrorInvalidConfiguration;
    if (launch.dynamic_shared > dynamic_shared_limit(function)) return cudaErrorInvalidValue;
    if ((*s)->device != host_device) return cudaErrorInvalidResourceHandle;
    return cudaSuccess;
}

static void run_kernel(const Launch &launch, const std::vector<const void *> &pointers) {
    if (queues().running->replayed) queues().kernels_replayed++;
    for (size_t i = 0; i < pointers.size(); i++) {
        const char *wrong = pointers[i] ? fault(pointers[i], 0, operation_device()) : nullptr;
        if (!wrong) continue;
        report("kernel %s, pointer argument %zu: %p %s", launch.kernel.c_str(), i + 1, pointers[i], wrong);
        queues().sticky = cudaErrorIllegalAddress;
        return;
    }
    if (!run_grid(launch)) queues().sticky = cudaErrorLaunchFailure;
}

static const char *permanent(const std::string &name) {
    static std::set<std::string> *names = new std::set<std::string>;
    return names->insert(name).first->c_str();
}

static std::function<void(const char *)> launch_watch;

void on_launch(std::function<void(const char *)> watch) {
    Guard guard;
    launch_watch = std::move(watch);
}

void launch(const void *function, Launch what, cudaStream_t stream, std::vector<const void *> pointers) {
    Call call("a kernel launch");
    Stream *s;
    cudaError_t error = result(check_launch(function, what, stream, &s));
    if (error != cudaSuccess) return;
    what.shared_allowed = shared_is_allowed(function);
    const char *label = permanent(what.kernel);
    if (launch_watch) launch_watch(label);
    append(s, label, [what = std::move(what), pointers = std::move(pointers)] { run_kernel(what, pointers); });
}

} // namespace mte

using namespace mte;

// ---- >>api-device --------------------------------------------------------------------------------------------------

static constexpr int compute_major = 9;
static constexpr int compute_minor = 0;
static int ptx_arch = 10 * compute_major + compute_minor;

void mte::set_ptx_arch(int arch) {
    Guard guard;
    ptx_arch = arch;
}

static constexpr int max_pitch = 0x7fffffff; // of a two-dimensional copy
static constexpr int multiprocessors = 132;
static constexpr int threads_per_multiprocessor = 2048;
static constexpr int shared_per_multiprocessor = 228 << 10;

static bool device_exists(int device) { return device >= 0 && device < config().devices; }

cudaError_t cudaGetDeviceCount(int *count) {
    Call call("cudaGetDeviceCount");
    *count = config().devices;
    return result(config().devices ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
    Call call("cudaSetDevice");
    if (!device_exists(device)) return result(cudaErrorInvalidDevice);
    host_device = device;
    return result(cudaSuccess);
}

cudaError_t cudaGetDevice(int *device) {
    *device = host_device;
    return cudaSuccess;
}

static int device_attribute(cudaDeviceAttr attribute) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 0x7fffffff;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return (int)shared_per_block;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (int)config().shared;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return shared_per_multiprocessor;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrMaxPitch: return max_pitch;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return multiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return threads_per_multiprocessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return compute_major;
    case cudaDevAttrComputeCapabilityMinor: return compute_minor;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported: return 1;
    default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    Call call("cudaDeviceGetAttribute");
    if (!device_exists(device)) return result(cudaErrorInvalidDevice);
    *value = device_attribute(attribute);
    return result(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    Call call("cudaGetDeviceProperties");
    if (!device_exists(device)) return result(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "test engine (sm_90)");
    p->major = compute_major;
    p->minor = compute_minor;
    p->totalGlobalMem = config().memory;
    p->sharedMemPerBlock = shared_per_block;
    p->sharedMemPerBlockOptin = config().shared;
    p->sharedMemPerMultiprocessor = shared_per_multiprocessor;
    p->reservedSharedMemPerBlock = 1024;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = threads_per_multiprocessor;
    p->multiProcessorCount = multiprocessors;
    p->regsPerBlock = 65536;
    p->l2CacheSize = 50 << 20;
    p->unifiedAddressing = 1;
    p->concurrentKernels = 1;
    p->pciBusID = device + 1;
    return result(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    Call call("cudaDeviceSynchronize");
    waits_of_thread++;
    cudaError_t error = check_wait_for_device(host_device);
    if (error != cudaSuccess) return result(error);
    wait_for_device(host_device);
    check_red_zones();
    return result(cudaSuccess);
}

cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    Call call("cudaDeviceCanAccessPeer");
    if (!device_exists(device) || !device_exists(peer)) return result(cudaErrorInvalidDevice);
    *can = device != peer;
    return result(cudaSuccess);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    Call call("cudaDeviceEnablePeerAccess");
    if (flags || !device_exists(peer) || peer == host_device) return result(cudaErrorInvalidDevice);
    bool added = memory().peers.insert({host_device, peer}).second;
    return result(added ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    Call call("cudaDeviceDisablePeerAccess");
    return result(memory().peers.erase({host_device, peer}) ? cudaSuccess : cudaErrorPeerAccessNotEnabled);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value) {
    Call call("cudaFuncSetAttribute");
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return result(cudaSuccess);
    if (value < 0 || (size_t)value > config().shared) return result(cudaErrorInvalidValue);
    function_limits().dynamic_shared[{function, host_device}] = (size_t)value;
    return result(cudaSuccess);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *function) {
    Call call("cudaFuncGetAttributes");
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = (int)dynamic_shared_limit(function);
    attributes->numRegs = 64;
    attributes->binaryVersion = 10 * compute_major + compute_minor;
    attributes->ptxVersion = ptx_arch;
    attributes->sharedSizeBytes = config().hopper && ptx_arch >= 90 ? 4096 : 0; // what mti_hopper_probe_kernel asks for
    return result(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int block_size,
                                                                   size_t dynamic_shared, unsigned) {
    Call call("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    if (block_size < 1 || block_size > 1024) return result(cudaErrorInvalidValue);
    size_t by_shared = shared_per_multiprocessor / (dynamic_shared + 1024);
    *blocks = std::min({threads_per_multiprocessor / ((block_size + 31) / 32 * 32), 32, (int)by_shared});
    return result(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                          size_t dynamic_shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, dynamic_shared, 0);
}

// ---- >>api-memory --------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void **p, size_t bytes) {
    Call call("cudaMalloc");
    *p = nullptr;
    if (!device_exists(host_device)) return result(cudaErrorNoDevice);
    if (!bytes) return result(cudaSuccess);
    cudaError_t error = check_unsafe();
    if (error != cudaSuccess) return result(error);
    *p = device_allocate(bytes, host_device);
    return result(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}

// Waits for the device of the allocation first, as CUDA does.
cudaError_t cudaFree(void *p) {
    Call call("cudaFree");
    if (!p) return result(cudaSuccess);
    cudaError_t error = check_unsafe();
    if (error != cudaSuccess) return result(error);
    const Allocation *a = find_allocation(p);
    if (a) wait_for_device(a->device);
    check_red_zones();
    if (device_release(p)) return result(cudaSuccess);
    report("cudaFree(%p): not a live device allocation", p);
    return result(cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t stream) {
    if (is_capturing(stream)) report("cudaMallocAsync in a captured stream is not modelled");
    return cudaMalloc(p, bytes);
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) {
    Call call("cudaFreeAsync");
    if (!p) return result(cudaSuccess);
    if (is_capturing(stream)) report("cudaFreeAsync in a captured stream is not modelled");
    return result(enqueue(stream, "cudaFreeAsync", [p] {
        if (!device_release(p)) report("cudaFreeAsync(%p): not a live device allocation", p);
    }));
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    Call call("cudaMemGetInfo");
    *total = config().memory;
    *available = config().memory - memory().live_bytes[host_device];
    return result(cudaSuccess);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
    Call call("cudaHostAlloc");
    cudaError_t error = check_unsafe();
    if (error != cudaSuccess) return result(error);
    *p = malloc(std::max<size_t>(bytes, 1));
    if (!*p) return result(cudaErrorMemoryAllocation);
    memset(*p, unwritten, bytes);
    memory().pinned[static_cast<const char *>(*p)] = bytes;
    return result(cudaSuccess);
}

cudaError_t cudaMallocHost(void **p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }

cudaError_t cudaFreeHost(void *p) {
    Call call("cudaFreeHost");
    if (!p) return result(cudaSuccess);
    cudaError_t error = check_unsafe();
    if (error != cudaSuccess) return result(error);
    for (int device = 0; device < config().devices; device++) wait_for_device(device);
    if (!memory().pinned.erase(static_cast<const char *>(p))) {
        report("cudaFreeHost(%p): not pinned memory", p);
        return result(cudaErrorInvalidValue);
    }
    free(p);
    return result(cudaSuccess);
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned) {
    Call call("cudaHostRegister");
    cudaError_t error = check_unsafe();
    if (error != cudaSuccess) return result(error);
    bool added = memory().pinned.insert({static_cast<const char *>(p), bytes}).second;
    return result(added ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void *p) {
    Call call("cudaHostUnregister");
    cudaError_t error = check_unsafe();
    if (error != cudaSuccess) return result(error);
    bool removed = memory().pinned.erase(static_cast<const char *>(p)) != 0;
    return result(removed ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    Call call("cudaHostGetDevicePointer");
    *device = host;
    return result(host_pinned(host, 1) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *p) {
    Call call("cudaPointerGetAttributes");
    memset(attributes, 0, sizeof *attributes);
    void *pointer = const_cast<void *>(p);
    if (device_valid(p, 1)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = find_allocation(p)->device;
        attributes->devicePointer = pointer;
    } else if (host_pinned(p, 1)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->devicePointer = attributes->hostPointer = pointer;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;
        attributes->hostPointer = pointer;
    }
    return result(cudaSuccess);
}

// ---- >>api-copy ----------------------------------------------------------------------------------------------------

// A copy of `height` rows of `width` bytes. A plain copy has one row.
struct Copy {
    char *destination;
    size_t destination_pitch;
    const char *source;
    size_t source_pitch;
    size_t width;
    size_t height;
};

// Checks one end of a copy if it is device memory. A copy may have its ends on different devices.
static bool copy_end_valid(const char *p, size_t pitch, const Copy &copy, const char *what) {
    if (!in_device_range(p)) return true;
    size_t bytes = pitch * (copy.height - 1) + copy.width;
    const char *wrong = fault(p, bytes, -1);
    if (wrong) report("%s: %p + %zu %s", what, (const void *)p, bytes, wrong);
    return !wrong;
}

static void perform(const Copy &copy) {
    bool valid = copy_end_valid(copy.destination, copy.destination_pitch, copy, "copy, destination");
    valid = copy_end_valid(copy.source, copy.source_pitch, copy, "copy, source") && valid;
    if (!valid) return;
    for (size_t row = 0; row < copy.height; row++) {
        char *to = copy.destination + row * copy.destination_pitch;
        const char *from = copy.source + row * copy.source_pitch;
        access_range(from, copy.width, false);
        access_range(to, copy.width, true);
        memcpy(to, from, copy.width);
    }
}

static bool kind_fits(const Copy &copy, cudaMemcpyKind kind) {
    bool to_device = in_device_range(copy.destination);
    bool from_device = in_device_range(copy.source);
    switch (kind) {
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    default: return kind == cudaMemcpyDefault;
    }
}

static const char *copy_label(const Copy &copy) {
    bool to_device = in_device_range(copy.destination);
    bool from_device = in_device_range(copy.source);
    if (to_device) return from_device ? "copy device to device" : "copy host to device";
    return from_device ? "copy device to host" : "copy host to host";
}

// Copies pageable host memory to a buffer now, because CUDA reads it before the call returns.
static std::function<void()> staged(Copy copy) {
    auto stage = std::make_shared<std::vector<char>>(copy.width * copy.height);
    for (size_t row = 0; row < copy.height; row++)
        memcpy(stage->data() + row * copy.width, copy.source + row * copy.source_pitch, copy.width);
    copy.source = stage->data();
    copy.source_pitch = copy.width;
    return [copy, stage] { perform(copy); };
}

static bool pageable(const char *p, size_t pitch, const Copy &copy) {
    return !in_device_range(p) && !host_pinned(p, pitch * (copy.height - 1) + copy.width);
}

// Enqueues a copy. Pageable host memory as source is copied at once; as destination, it makes the host wait. A captured
// copy uses all host memory when the graph runs, also pageable memory (as in NVIDIA's sample simpleCudaGraphs).
static cudaError_t copy_asynchronously(const Copy &copy, cudaMemcpyKind kind, cudaStream_t stream, bool wait) {
    if (!copy.width || !copy.height) return result(cudaSuccess);
    if (!kind_fits(copy, kind)) {
        report("%s, but the call says kind %d", copy_label(copy), (int)kind);
        return result(cudaErrorInvalidValue);
    }
    Stream *s;
    cudaError_t error = stream_for_work(stream, &s);
    if (error != cudaSuccess) return result(error);
    bool stage = !s->capture && pageable(copy.source, copy.source_pitch, copy);
    wait = !s->capture && (wait || pageable(copy.destination, copy.destination_pitch, copy));
    std::function<void()> work = stage ? staged(copy) : [copy] { perform(copy); };
    OperationRef o = append(s, copy_label(copy), work);
    waits_of_thread += wait || stage;
    if (wait) wait_for(o);
    return result(cudaSuccess);
}

static Copy plain_copy(void *destination, const void *source, size_t bytes) {
    return Copy{static_cast<char *>(destination), bytes, static_cast<const char *>(source), bytes, bytes, 1};
}

// A copy that is not asynchronous uses the legacy default stream, and may make the host wait.
static cudaError_t copy_synchronously(const Copy &copy, cudaMemcpyKind kind) {
    Stream *s;
    cudaError_t error = stream_for_work(nullptr, &s);
    if (error == cudaSuccess) error = check_unsafe();
    if (error != cudaSuccess) return result(error);
    bool wait = !in_device_range(copy.destination) || !in_device_range(copy.source);
    return copy_asynchronously(copy, kind, nullptr, wait);
}

cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    Call call("cudaMemcpyAsync");
    return copy_asynchronously(plain_copy(destination, source, bytes), kind, stream, false);
}

// A copy within device memory does not make the host wait, as in CUDA.
cudaError_t cudaMemcpy(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind) {
    Call call("cudaMemcpy");
    return copy_synchronously(plain_copy(destination, source, bytes), kind);
}

cudaError_t cudaMemcpyPeerAsync(void *destination, int, const void *source, int, size_t bytes, cudaStream_t stream) {
    Call call("cudaMemcpyPeerAsync");
    return copy_asynchronously(plain_copy(destination, source, bytes), cudaMemcpyDeviceToDevice, stream, false);
}

// CUDA checks the pitches also when there is only one row.
static bool pitches_fit(const Copy &copy) {
    if (!copy.width || !copy.height) return true;
    return copy.width <= std::min(copy.destination_pitch, copy.source_pitch) &&
           std::max(copy.destination_pitch, copy.source_pitch) <= (size_t)max_pitch;
}

cudaError_t cudaMemcpy2DAsync(void *destination, size_t destination_pitch, const void *source, size_t source_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    Call call("cudaMemcpy2DAsync");
    Copy copy = {static_cast<char *>(destination),
                 destination_pitch,
                 static_cast<const char *>(source),
                 source_pitch,
                 width,
                 height};
    if (!pitches_fit(copy)) return result(cudaErrorInvalidPitchValue);
    return copy_asynchronously(copy, kind, stream, false);
}

cudaError_t cudaMemcpy2D(void *destination, size_t destination_pitch, const void *source, size_t source_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind) {
    Call call("cudaMemcpy2D");
    Copy copy = {static_cast<char *>(destination),
                 destination_pitch,
                 static_cast<const char *>(source),
                 source_pitch,
                 width,
                 height};
    if (!pitches_fit(copy)) return result(cudaErrorInvalidPitchValue);
    return copy_synchronously(copy, kind);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
    Call call("cudaMemsetAsync");
    if (!bytes) return result(cudaSuccess);
    Stream *s;
    cudaError_t error = stream_for_work(stream, &s);
    if (error != cudaSuccess) return result(error);
    append(s, "memset", [p, value, bytes] {
        const char *wrong = fault(p, bytes, operation_device());
        if (wrong) {
            report("memset: %p + %zu %s", p, bytes, wrong);
            return;
        }
        access_range(p, bytes, true);
        memset(p, value, bytes);
    });
    return result(cudaSuccess);
}

cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }

// ---- >>api-stream --------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    Call call("cudaStreamCreate");
    if (!device_exists(host_device)) return result(cudaErrorNoDevice);
    Stream *s = new_stream(!(flags & cudaStreamNonBlocking), false);
    s->priority = priority;
    *stream = reinterpret_cast<cudaStream_t>(s);
    return result(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

namespace mte {
cudaStream_t stream_elsewhere() {
    Stream *s = new_stream(false, false);
    s->device = kElsewhere;
    return reinterpret_cast<cudaStream_t>(s);
}
} // namespace mte

static void destroy(Stream *s) {
    s->destroyed = true;
    queues().handles.erase(s);
    if (s->queue.empty()) forget(s);
}

// Operations that are still in the stream will run. The handle is invalid at once.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    Call call("cudaStreamDestroy");
    Stream *s = stream_of(stream);
    if (!s || s->is_default) return result(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        report("cudaStreamDestroy: the stream is being captured");
        return result(spoil(*s->capture, cudaErrorStreamCaptureUnsupported));
    }
    destroy(s);
    return result(cudaSuccess);
}

long mte::host_waits() { return waits_of_thread; }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Call call("cudaStreamSynchronize");
    waits_of_thread++;
    Stream *s;
    cudaError_t error = check_wait_for_stream(stream, &s);
    if (error != cudaSuccess) return result(error);
    wait_for_stream(s);
    check_red_zones();
    return result(cudaSuccess);
}

// Answers a query from the state before the call, then runs one operation so that polling makes progress.
static cudaError_t query(const OperationRef &o) {
    if (!o || o->done) {
        if (o) join(queues().host, o->clock);
        return result(cudaSuccess);
    }
    OperationRef next = choose(needed_for(o));
    if (next) run(next);
    return cudaErrorNotReady;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Call call("cudaStreamQuery");
    Stream *s;
    cudaError_t error = check_wait_for_stream(stream, &s);
    return error == cudaSuccess ? query(s->last) : result(error);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    Call call("cudaStreamGetPriority");
    Stream *s = stream_of(stream);
    if (!s) return result(cudaErrorInvalidResourceHandle);
    *priority = s->priority;
    return result(cudaSuccess);
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    Call call("cudaStreamGetFlags");
    Stream *s = stream_of(stream);
    if (!s) return result(cudaErrorInvalidResourceHandle);
    *flags = s->blocking ? cudaStreamDefault : cudaStreamNonBlocking;
    return result(cudaSuccess);
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    Call call("cudaStreamGetDevice");
    Stream *s = stream_of(stream);
    if (!s) return result(cudaErrorInvalidResourceHandle);
    *device = s->device;
    return result(cudaSuccess);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    Call call("cudaLaunchHostFunc");
    Stream *s;
    cudaError_t error = stream_for_work(stream, &s);
    if (error != cudaSuccess) return result(error);
    append(
        s, "host function", [function, argument] { function(argument); }, nullptr, true);
    return result(cudaSuccess);
}

// ---- >>api-event ---------------------------------------------------------------------------------------------------

static Event *event_of(cudaEvent_t handle) {
    if (queues().events.count(handle)) return reinterpret_cast<Event *>(handle);
    report("event %p was never created, or has been destroyed", (void *)handle);
    return nullptr;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    Call call("cudaEventCreate");
    if (!device_exists(host_device)) return result(cudaErrorNoDevice);
    Event *e = new Event{nullptr, host_device, nullptr, nullptr, {}};
    queues().events.insert(e);
    *event = reinterpret_cast<cudaEvent_t>(e);
    return result(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Call call("cudaEventDestroy");
    Event *e = event_of(event);
    if (!e) return result(cudaErrorInvalidResourceHandle);
    queues().events.erase(e);
    delete e;
    return result(cudaSuccess);
}

static double spent = 0.0; // seconds that spend() has added

void mte::spend(double seconds) {
    Guard guard;
    spent += seconds;
}

static double now() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count() + spent;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    Call call("cudaEventRecord");
    Event *e = event_of(event);
    Stream *s;
    cudaError_t error = stream_for_work(stream, &s);
    if (error != cudaSuccess) return result(error);
    if (!e || e->device != s->device) return result(cudaErrorInvalidResourceHandle);
    e->capture = s->capture;
    e->tail = s->tail;
    e->recorded = nullptr;
    if (s->capture && flags & cudaEventRecordExternal) report("cudaEventRecordExternal is not modelled");
    if (s->capture) return result(cudaSuccess);
    auto seconds = std::make_shared<double>(0.0);
    e->seconds = seconds;
    e->recorded = append(s, "event record", [seconds] { *seconds = now(); });
    return result(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

// Waits for the last record of the event before this call. An event without a record orders nothing. In a captured
// stream, records and waits are no nodes: they only change what the next node depends on.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    Call call("cudaStreamWaitEvent");
    Event *e = event_of(event);
    Stream *s;
    cudaError_t error = stream_for_work(stream, &s);
    if (error != cudaSuccess) return result(error);
    if (!e) return result(cudaErrorInvalidResourceHandle);
    if (s->capture && flags & cudaEventWaitExternal) report("cudaEventWaitExternal is not modelled");
    if (s->capture || e->capture) return result(wait_captured(s, e));
    if (!e->recorded) return result(cudaSuccess);
    s->waits.push_back(e->recorded);
    append(s, "event wait", nullptr);
    return result(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Call call("cudaEventSynchronize");
    waits_of_thread++;
    Event *e = event_of(event);
    cudaError_t error = check_wait_for_event(e);
    if (error != cudaSuccess) return result(error);
    if (e->recorded) wait_for(e->recorded);
    return result(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    Call call("cudaEventQuery");
    Event *e = event_of(event);
    cudaError_t error = check_wait_for_event(e);
    return error == cudaSuccess ? query(e->recorded) : result(error);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    Call call("cudaEventElapsedTime");
    Event *first = event_of(begin);
    Event *second = event_of(end);
    if (!first || !second || !first->recorded || !second->recorded) return result(cudaErrorInvalidResourceHandle);
    if (!first->recorded->done || !second->recorded->done) return cudaErrorNotReady;
    *milliseconds = (float)(1e3 * (*second->seconds - *first->seconds));
    return result(cudaSuccess);
}

// ---- >>api-capture -------------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    std::swap(*mode, interaction_mode);
    return cudaSuccess;
}

static cudaError_t check_begin(const Stream *s, cudaStreamCaptureMode mode) {
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s->is_default) return cudaErrorStreamCaptureUnsupported;
    if (s->capture) return cudaErrorIllegalState;
    bool known = mode == cudaStreamCaptureModeGlobal || mode == cudaStreamCaptureModeThreadLocal ||
                 mode == cudaStreamCaptureModeRelaxed;
    return known ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    Call call("cudaStreamBeginCapture");
    Stream *s = stream_of(stream);
    cudaError_t error = result(check_begin(s, mode));
    if (error != cudaSuccess) return error;
    Queues &q = queues();
    auto capture = std::make_shared<Capture>();
    capture->id = ++q.captures_begun;
    capture->origin = s;
    capture->thread = std::this_thread::get_id();
    capture->mode = mode;
    capture->graph = std::make_shared<Graph>();
    q.captures.push_back(capture);
    join_capture(capture, s, Tail());
    return cudaSuccess;
}

// Takes all streams out of the capture.
static void end(const std::shared_ptr<Capture> &capture) {
    auto &all = queues().captures;
    all.erase(std::find(all.begin(), all.end(), capture));
    capture->ended = true;
    for (Stream *s : capture->streams) {
        s->capture = nullptr;
        s->tail.clear();
    }
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    Call call("cudaStreamEndCapture");
    *graph = nullptr;
    Stream *s = stream_of(stream);
    if (!s) return result(cudaErrorInvalidResourceHandle);
    std::shared_ptr<Capture> c = s->capture;
    if (!c) return result(cudaErrorIllegalState);
    if (c->origin != s) return result(spoil(*c, cudaErrorStreamCaptureUnmatched));
    if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id())
        return result(spoil(*c, cudaErrorStreamCaptureWrongThread));
    bool joined = all_joined(*c);
    end(c);
    cudaError_t error = c->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    if (error == cudaSuccess && !joined) error = cudaErrorStreamCaptureUnjoined;
    std::shared_ptr<Graph> made = std::move(c->graph); // events may keep the capture, but not the graph
    error = result(error);
    if (error != cudaSuccess) return error;
    *graph = reinterpret_cast<cudaGraph_t>(made.get());
    queues().graphs[*graph] = made;
    return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id = nullptr,
                                cudaGraph_t *graph = nullptr, const cudaGraphNode_t **dependencies = nullptr,
                                size_t *count = nullptr) {
    static thread_local std::vector<cudaGraphNode_t> nodes;
    Stream *s = stream_of(stream);
    if (!s) return result(cudaErrorInvalidResourceHandle);
    for (const std::shared_ptr<Capture> &c : queues().captures)
        for (const Stream *other : c->streams)
            if (s->is_default && other->blocking && other->device == s->device)
                return result(cudaErrorStreamCaptureImplicit);
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    if (*status != cudaStreamCaptureStatusActive) return result(cudaSuccess);
    nodes.clear();
    for (size_t i : s->tail) nodes.push_back(reinterpret_cast<cudaGraphNode_t>(&s->capture->graph->nodes[i]));
    if (id) *id = s->capture->id;
    if (graph) *graph = reinterpret_cast<cudaGraph_t>(s->capture->graph.get());
    if (dependencies) *dependencies = nodes.data();
    if (count) *count = nodes.size();
    return result(cudaSuccess);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    Call call("cudaStreamGetCaptureInfo");
    if (edges) *edges = nullptr; // no edge has data
    return capture_info(stream, status, id, graph, dependencies, count);
}
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies, size_t *count) {
    Call call("cudaStreamGetCaptureInfo");
    return capture_info(stream, status, id, graph, dependencies, count);
}
#endif

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    Call call("cudaStreamIsCapturing");
    return capture_info(stream, status);
}

// ---- >>api-graph ---------------------------------------------------------------------------------------------------

static thread_local long launches_of_thread; // see graph_launches

long mte::graph_launches() { return launches_of_thread; }

long mte::kernels_replayed() {
    Guard guard;
    return queues().kernels_replayed;
}

template <class T>
static std::shared_ptr<T> found(const std::map<const void *, std::shared_ptr<T>> &all, void *handle) {
    auto entry = all.find(handle);
    if (entry != all.end()) return entry->second;
    report("graph %p was never created, or has been destroyed", handle);
    return nullptr;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    Call call("cudaGraphGetNodes");
    std::shared_ptr<Graph> g = found(queues().graphs, graph);
    if (!g || !count) return result(cudaErrorInvalidValue);
    if (nodes) {
        for (size_t i = 0; i < *count; i++)
            nodes[i] = i < g->nodes.size() ? reinterpret_cast<cudaGraphNode_t>(&g->nodes[i]) : nullptr;
        *count = std::min(*count, g->nodes.size());
    } else {
        *count = g->nodes.size();
    }
    return result(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    Call call("cudaGraphDestroy");
    if (!found(queues().graphs, graph)) return result(cudaErrorInvalidValue);
    queues().graphs.erase(graph);
    return result(cudaSuccess);
}

// Returns the lane whose last node is one that `node` depends on and has the same device; or a new lane.
static size_t lane_for(GraphExec &exec, const Node &node, std::vector<size_t> *ends) {
    for (size_t before : node.after) {
        size_t lane = exec.lane_of[before];
        if ((*ends)[lane] == before && exec.lanes[lane]->device == node.device) return lane;
    }
    exec.lanes.push_back(new_stream(false, false));
    exec.lanes.back()->device = node.device;
    ends->push_back(0);
    return exec.lanes.size() - 1;
}

static void make_lanes(GraphExec &exec) {
    const std::deque<Node> &nodes = exec.graph->nodes;
    std::vector<size_t> ends; // index: lane; its last node so far
    std::vector<bool> followed(nodes.size());
    for (size_t i = 0; i < nodes.size(); i++) {
        size_t lane = lane_for(exec, nodes[i], &ends);
        ends[lane] = i;
        exec.lane_of.push_back(lane);
        for (size_t before : nodes[i].after) followed[before] = true;
    }
    for (size_t i = 0; i < nodes.size(); i++)
        if (!followed[i]) exec.sinks.push_back(i);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    Call call("cudaGraphInstantiate");
    *exec = nullptr;
    std::shared_ptr<Graph> g = found(queues().graphs, graph);
    if (!g || (flags & ~(unsigned long long)cudaGraphInstantiateFlagUseNodePriority))
        return result(cudaErrorInvalidValue);
    cudaError_t error = result(cudaSuccess);
    if (error != cudaSuccess) return error;
    auto made = std::make_shared<GraphExec>();
    made->graph = g;
    make_lanes(*made);
    queues().execs[made.get()] = made;
    *exec = reinterpret_cast<cudaGraphExec_t>(made.get());
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(exec, graph, flags);
}

// A launch that has not run yet will run.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    Call call("cudaGraphExecDestroy");
    std::shared_ptr<GraphExec> e = found(queues().execs, exec);
    if (!e) return result(cudaErrorInvalidValue);
    for (Stream *lane : e->lanes) destroy(lane);
    queues().execs.erase(exec);
    return result(cudaSuccess);
}

static cudaError_t find_launch(cudaGraphExec_t handle, cudaStream_t stream, std::shared_ptr<GraphExec> *e, Stream **s) {
    *e = found(queues().execs, handle);
    if (!*e) return cudaErrorInvalidValue;
    cudaError_t error = stream_for_work(stream, s);
    if (error != cudaSuccess || !(*s)->capture) return error;
    report("cudaGraphLaunch in a captured stream is not modelled");
    return spoil(*(*s)->capture, cudaErrorStreamCaptureUnsupported);
}

// Appends a node to its lane. `done` has the operations of the nodes before.
static OperationRef append_node(const Node &node, Stream *lane, const OperationRef &begin,
                                const std::vector<OperationRef> &done) {
    for (size_t before : node.after) lane->waits.push_back(done[before]);
    if (node.after.empty()) lane->waits.push_back(begin);
    if (node.call) {
        node.call(reinterpret_cast<cudaStream_t>(lane));
        return lane->waits.empty() ? lane->last : append(lane, node.label, nullptr);
    }
    std::function<void()> work;
    if (node.work) work = [kept = node.work] { (*kept)(); };
    return append(lane, node.label, std::move(work), nullptr, node.host_work, true);
}

// The graph is one operation of the stream: it begins after all that is in the stream, and after the last launch.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    Call call("cudaGraphLaunch");
    std::shared_ptr<GraphExec> e;
    Stream *s;
    cudaError_t error = result(find_launch(exec, stream, &e, &s));
    if (error != cudaSuccess) return error;
    launches_of_thread++;
    if (e->last) s->waits.push_back(e->last);
    OperationRef begin = append(s, "begin of a graph", nullptr);
    std::vector<OperationRef> done;
    for (const Node &node : e->graph->nodes)
        done.push_back(append_node(node, e->lanes[e->lane_of[done.size()]], begin, done));
    for (size_t sink : e->sinks) s->waits.push_back(done[sink]);
    e->last = append(s, "end of a graph", nullptr);
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
    Call call("cudaGraphUpload");
    std::shared_ptr<GraphExec> e;
    Stream *s;
    cudaError_t error = find_launch(exec, stream, &e, &s);
    if (error != cudaSuccess) return result(error);
    if (e->last) s->waits.push_back(e->last);
    append(s, "upload of a graph", nullptr);
    return result(cudaSuccess);
}

// ---- >>api-error ---------------------------------------------------------------------------------------------------

cudaError_t cudaPeekAtLastError() {
    Guard guard;
    return queues().sticky != cudaSuccess ? queues().sticky : last_error;
}

cudaError_t cudaGetLastError() {
    Guard guard;
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

struct ErrorText {
    cudaError_t error;
    const char *name;
    const char *text;
};

static const ErrorText error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

static const ErrorText *find_text(cudaError_t error) {
    for (const ErrorText &text : error_texts)
        if (text.error == error) return &text;
    return nullptr;
}

const char *cudaGetErrorString(cudaError_t error) {
    const ErrorText *found = find_text(error);
    return found ? found->text : "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t error) {
    const ErrorText *found = find_text(error);
    return found ? found->name : "unrecognized error code";
}
