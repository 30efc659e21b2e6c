/* ---- ranks that are threads: groups, messages and waiting -------------------------------------------------------- */

#pragma once
#include "communicator.h"
#include "status.c"
#include "cuda.c"

/* Ranks are threads. They share a group: one word (`state`) that counts arrivals, one slot per rank with the rank's
   current call and the addresses of its buffers, and one mutex and condition variable for long waits.

   A collective: write the call to the slot, arrive, wait for the others, compare all slots, move the data directly
   between the callers' buffers, arrive again. No rank passes the second meeting before all ranks have finished reading,
   so no data is staged. Only the first meeting can fail. Once it has succeeded, every rank is inside the library and
   will finish, so the second meeting needs no timeout. A call that fails in the first meeting has changed no buffer.

   Point to point: the sender posts its buffer in its outbox and waits. The receiver copies from this buffer and then
   changes the state of the outbox to MTI_DONE.

   On GPUs the threads meet in the same way, but the work of a call goes into the streams, and the call returns before
   it is done. Streams wait for each other by events: each rank's part of a call runs after what the other ranks had in
   their streams before the call (`ready`), and what a rank enqueues after the call runs after the parts of the others
   (`done`, and `taken` for a message). An event is recorded again only after all waits for it are enqueued: the
   meetings of a collective and the outbox of a message ensure this. Only mt_barrier and a call that fails wait for a
   GPU. The events belong to the group, because peers may need those of a rank that has left. */

/* mti_group.state: bit 0: the group is broken; bits 1 to 15: number of arrivals at the current meeting; bits 16 to 63:
   its generation, the number of meetings before it. */
#define MTI_BROKEN ((uint64_t)1)
#define MTI_ARRIVAL ((uint64_t)2)
#define MTI_GENERATION 16

/* mti_slot.outbox: the low three bits hold one of these states, the bits above hold the destination + 1. 0: empty. */
#define MTI_POSTED 1u
#define MTI_TAKEN 2u /* the receiver is copying: the sender must wait */
#define MTI_DONE 3u
#define MTI_REFUSED 4u

#define MTI_OUTSIDE 0
#define MTI_IN_COLLECTIVE 1
#define MTI_IN_P2P 2

#define MTI_SPIN_SECONDS 20e-6 /* a wait polls for this time before it sleeps */
#define MTI_LATE_TURN 500e-6   /* seconds; for this and the next two, see mti_note_turn */
#define MTI_LATE_TURNS 2       /* per rank, in a row */
#define MTI_CROWDED 32

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void
mti_say(mti_text *text, const char *format, ...) {
    size_t left = sizeof text->data - text->used;
    va_list args;
    int n;
    va_start(args, format);
    n = vsnprintf(text->data + text->used, left, format, args);
    va_end(args);
    if (n > 0) text->used += (size_t)n < left ? (size_t)n : left - 1;
}

#if MTI_NCCL || MTI_MPI
/* Writes that rank 0 and rank r are of different versions (MT_VERSION_NUMBER). */
static void mti_say_versions(mti_text *text, int first, int r, int other) {
    mti_say(text, "rank 0 is of megatron.h %d.%d.%d, but rank %d of %d.%d.%d: build all ranks with the same headers",
            first / 1000000, first / 1000 % 1000, first % 1000, r, other / 1000000, other / 1000 % 1000, other % 1000);
}
#endif

MT_API mt_status mt_comm_fail(mt_comm *comm, mt_status status, const char *text) {
    size_t n;
    if (!comm || (comm->owner && comm->owner->leaving)) return status;
    if (!text) text = "";
    n = strlen(text);
    if (n >= sizeof comm->error) n = sizeof comm->error - 1;
    memmove(comm->error, text, n); /* text may be comm->error itself */
    comm->error[n] = '\0';
    mti_one_line(comm->error);
    comm->error_status = status;
    if (comm->owner && comm->owner->world != comm) mt_comm_fail(comm->owner->world, status, text);
    return status;
}

/* As mt_fail, but stores the message in comm, too. ctx and comm may be NULL. */
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static mt_status
mti_refuse(mt_context *ctx, mt_comm *comm, mt_status status, const char *format, ...) {
    char text[MT_ERROR_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (comm) mt_comm_fail(comm, status, text);
    return ctx ? mt_fail(ctx, status, "%s", text) : status;
}

/* Refuses a call that would wait for ranks of the process from which this one was forked. name: without mt_ */
static mt_status mti_check_process(mt_context *ctx, mt_comm *comm, const char *name) {
    if (!comm->transport->has_peers || !mti_is_forked(comm->process)) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_UNSUPPORTED,
                      "mt_%s: \"%s\" (%d ranks) belongs to process %ld, from which this process %ld was forked and "
                      "which is no rank of it: create a communicator here, for example with mt_launch",
                      name, comm->name, comm->size, (long)comm->process, (long)getpid());
}

/* -- clocks and cores -- */

static double mti_now(void) {
#if MTI_MONOTONIC
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#else
    struct timeval t;
    gettimeofday(&t, NULL);
    return (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
#endif
}

static struct timespec mti_timespec(double seconds) {
    struct timespec t;
    double whole = seconds < 2e9 ? seconds : 2e9; /* fits a 32-bit time_t */
    t.tv_sec = (time_t)whole;
    t.tv_nsec = (long)(1e9 * (whole - (double)t.tv_sec));
    return t;
}

/* As pthread_cond_init, with the clock of mti_now. */
static int mti_cond_init(pthread_cond_t *cond) {
#if MTI_MONOTONIC
    pthread_condattr_t attr;
    int failed = pthread_condattr_init(&attr);
    if (failed) return failed;
    failed = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (!failed) failed = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return failed;
#else
    return pthread_cond_init(cond, NULL);
#endif
}

/* Measures a wait without the time in which this process was stopped. Otherwise the first thread that runs again would
   blame ranks that had no chance to arrive. A waiting thread reads the clock every `tick` seconds. An interval
   counts as at most two ticks: a longer one usually means that the process was stopped. */
typedef struct mti_stopwatch {
    double waited, looked, tick;
} mti_stopwatch;

#define MTI_TICKS 16         /* ticks per timeout, at least */
#define MTI_TICK_SECONDS 1.0 /* the longest tick */

static mti_stopwatch mti_stopwatch_start(double timeout) {
    mti_stopwatch w;
    w.waited = 0;
    w.looked = mti_now();
    w.tick = timeout / MTI_TICKS < MTI_TICK_SECONDS ? timeout / MTI_TICKS : MTI_TICK_SECONDS;
    return w;
}

/* Reads the clock, and returns the seconds counted since the start of the stopwatch. */
static double mti_waited(mti_stopwatch *w) {
    double now = mti_now(), step = now - w->looked;
    w->looked = now;
    if (step > 0) w->waited += step < 2 * w->tick ? step : 2 * w->tick;
    return w->waited;
}

/* Sleeps until cond is signalled, until the next tick, or until `timeout` is over. The caller holds the mutex. */
static void mti_stopwatch_sleep(const mti_stopwatch *w, double timeout, pthread_cond_t *cond, pthread_mutex_t *mutex) {
    double left = timeout - w->waited;
    struct timespec wake = mti_timespec(w->looked + (left < w->tick ? left : w->tick));
    pthread_cond_timedwait(cond, mutex, &wake);
}

/* A call on a communicator begins with mti_hold and ends with mti_release, which gets the result of mti_hold. Between
   the two the thread cannot be cancelled, because it may hold a lock and peers may read its buffers. mti_release
   executes a pending cancellation. Android cannot cancel threads. */
static int mti_hold(void) {
    int before = 0;
#if defined(PTHREAD_CANCEL_DISABLE)
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
#endif
    return before;
}

static void mti_release(int before) {
#if defined(PTHREAD_CANCEL_DISABLE)
    pthread_setcancelstate(before, NULL);
    pthread_testcancel();
#else
    (void)before;
#endif
}

static void mti_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#define MTI_MAX_RANKS 1024
#define MTI_CORE_BYTES 1024 /* 8192 cores */
#if defined(__linux__)
#define MTI_CAN_PIN 1
#else
#define MTI_CAN_PIN 0
#endif

/* Returns the number of cores that this thread may run on, and stores the first `limit` core numbers in core. */
static int mti_allowed_cores(int *core, int limit) {
    int found = 0;
#if defined(__linux__)
    unsigned char mask[MTI_CORE_BYTES];
    int i;
    long bytes;
    memset(mask, 0, sizeof mask); /* for MemorySanitizer, which does not see what a system call writes */
    bytes = syscall(SYS_sched_getaffinity, 0L, (long)sizeof mask, mask);
    for (i = 0; i < 8 * (int)bytes; i++) {
        if (!(mask[i / 8] >> (i % 8) & 1)) continue; /* assumes a little-endian machine */
        if (found < limit) core[found] = i;
        found++;
    }
#else
    (void)core;
    (void)limit;
    found = (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return found > 0 ? found : 1;
}

/* Pins this thread, and the threads that it starts later, to these cores. */
static void mti_pin(const int *core, int count) {
#if defined(__linux__)
    unsigned char mask[MTI_CORE_BYTES];
    int i;
    if (count < 1) return;
    memset(mask, 0, sizeof mask);
    for (i = 0; i < count; i++)
        if (core[i] < 8 * MTI_CORE_BYTES) mask[core[i] / 8] |= (unsigned char)(1u << (core[i] % 8));
    (void)syscall(SYS_sched_setaffinity, 0L, (long)sizeof mask, mask); /* an error only costs speed */
#else
    (void)core;
    (void)count;
#endif
}

/* Called between two polls of a wait: yields the core, or sleeps for 50 us when the wait has lasted `soon` seconds. */
static void mti_rest(double waited, double soon) {
    struct timespec nap = mti_timespec(50e-6);
    int before = mti_hold();
    if (waited < soon) sched_yield();
    else nanosleep(&nap, NULL);
    mti_release(before);
}

/* -- groups -- */

static mti_slot *mti_slot_of(const mti_group *g, int rank) {
    return (mti_slot *)(void *)(g->slots + (size_t)rank * mt_align_up(sizeof(mti_slot)));
}

static mt_comm *mti_comm_new(const mti_transport *transport, int rank, int size, const char *name) {
    mt_comm *comm = (mt_comm *)calloc(1, sizeof *comm);
    if (!comm) return NULL;
    comm->transport = transport;
    comm->process = getpid();
    comm->rank = comm->local_rank = rank;
    comm->size = size;
    mt_comm_set_name(comm, name);
    comm->is_named = 0;
    return comm;
}

static void mti_group_release(mti_group *g) {
    mti_group *root;
    int r;
    if (!g || mti_is_forked(g->process)) return; /* there, threads of the other process wait for ever */
    if (__atomic_sub_fetch(&g->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    root = g->root;
    for (r = 0; r < g->size; r++) {
        mti_event_free(&mti_slot_of(g, r)->ready);
        mti_event_free(&mti_slot_of(g, r)->done);
        mti_event_free(&mti_slot_of(g, r)->taken);
    }
    pthread_cond_destroy(&g->cond);
    pthread_mutex_destroy(&g->mutex);
    free(g->slots);
    free(g);
    mti_group_release(root);
}

/* Creates a group with one reference per rank; NULL: out of memory. */
static mti_group *mti_group_new(int size, double timeout, int spin) {
    size_t bytes = (size_t)size * mt_align_up(sizeof(mti_slot));
    mti_group *g = (mti_group *)mti_default_alloc(NULL, sizeof *g, MT_ALIGNMENT);
    unsigned char *slots = (unsigned char *)mti_default_alloc(NULL, bytes, MT_ALIGNMENT);
    int mutex = -1, cond = -1;
    if (g && slots) {
        memset(g, 0, sizeof *g);
        memset(slots, 0, bytes);
        mutex = pthread_mutex_init(&g->mutex, NULL);
        cond = mutex ? -1 : mti_cond_init(&g->cond);
    }
    if (cond) {
        if (!mutex) pthread_mutex_destroy(&g->mutex);
        free(slots);
        free(g);
        return NULL;
    }
    g->process = getpid();
    g->size = size;
    g->timeout = timeout;
    g->spin = spin;
    g->slots = slots;
    g->references = size;
    return g;
}

static mti_group *mti_root_of(mti_group *g) { return g && g->root ? g->root : g; }

MT_API void mt_comm_set_span(mt_comm *comm, int span) {
    if (comm && span >= comm->size - 1) comm->span = span;
}

MT_API void mt_comm_set_factors(mt_comm *comm, mt_comm *first, mt_comm *second) {
    if (!comm) return;
    comm->factors[0] = first;
    comm->factors[1] = second;
}

MT_API int mt_comm_rank(const mt_comm *comm) { return comm ? comm->rank : 0; }
MT_API int mt_comm_size(const mt_comm *comm) { return comm ? comm->size : 1; }
MT_API int mt_comm_local_rank(const mt_comm *comm) { return comm ? comm->local_rank : 0; }
MT_API const char *mt_comm_name(const mt_comm *comm) { return comm ? comm->name : ""; }
MT_API const char *mt_comm_last_error(const mt_comm *comm) { return comm ? comm->error : "the communicator is NULL"; }

MT_API void mt_comm_set_name(mt_comm *comm, const char *name) {
    size_t n = name ? strlen(name) : 0;
    if (!comm) return;
    if (n >= sizeof comm->name) n = sizeof comm->name - 1;
    if (n) memmove(comm->name, name, n);
    comm->name[n] = '\0';
    comm->is_named = n > 0;
}

/* -- messages -- */

/* The ranks whose blocks a call moves are in the place of root and source. */
static void mti_slot_write(mti_slot *slot, const mti_call *call) {
    int root = call->ranks ? call->first : call->root, source = call->ranks ? call->first + call->ranks : call->source;
    uint64_t what = (uint64_t)(call->kind + 1) | (uint64_t)call->dtype << 8 | (uint64_t)call->op << 16 |
                    (uint64_t)(root + 1) << 24 | (uint64_t)(source + 1) << 40;
    __atomic_store_n(&slot->what, what, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->count, (uint64_t)call->count, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->recvcount, (uint64_t)call->recvcount, __ATOMIC_RELAXED);
}

#define MTI_ON_META ((uint64_t)1 << 56) /* of `what`: the context is on MT_DEVICE_META */

static int mti_is_on_meta(const mti_slot *slot) {
    return (__atomic_load_n(&slot->what, __ATOMIC_RELAXED) & MTI_ON_META) != 0;
}

/* ctx: NULL for a call without a context */
static void mti_publish(const mt_context *ctx, mt_comm *comm, const mti_call *call, int inside) {
    mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    mti_slot_write(slot, call);
    if (ctx && ctx->device == MT_DEVICE_META) __atomic_or_fetch(&slot->what, MTI_ON_META, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->inside, inside, __ATOMIC_RELEASE); /* mti_wait_status reads it, then the outbox */
    slot->send = call->send;
    slot->recv = call->recv;
    slot->sends = call->sends;
    slot->recvs = call->recvs;
    slot->color = call->color;
    slot->key = call->key;
}

static const char *mti_call_name(int kind) {
    if (kind < 0) return "nothing yet"; /* an empty slot */
    if (kind == MTI_SPLIT) return "split";
    if (kind == MTI_SEND_RECV) return "send_recv";
    if (kind == MTI_CREATE) return "create";
    if (kind == MTI_GRAPH_BEGIN) return "graph_begin";
    if (kind == MTI_GRAPH_END) return "graph_end";
    if (kind == MTI_GRAPH_LAUNCH) return "graph_launch";
    return mt_collective_name((mt_collective)kind);
}

static const char *mti_op_name(uint64_t op) { return op == (uint64_t)MT_SUM ? "sum" : "max"; }

static void mti_say_send_recv(mti_text *text, const mti_slot *slot, int to, int from, const char *dtype) {
    unsigned long long count = __atomic_load_n(&slot->count, __ATOMIC_RELAXED);
    unsigned long long recvcount = __atomic_load_n(&slot->recvcount, __ATOMIC_RELAXED);
    mti_say(text, "send_recv(");
    if (to >= 0) mti_say(text, "count %llu to rank %d, ", count, to);
    if (from >= 0) mti_say(text, "count %llu from rank %d, ", recvcount, from);
    mti_say(text, "%s)", dtype);
}

/* Ends a call: ")", or ", blocks of ranks 2 to 3)" when it moves the blocks of ranks [first, end) alone. */
static void mti_say_blocks(mti_text *text, int first, int end) {
    if (end == first + 1) mti_say(text, ", block of rank %d", first);
    if (end > first + 1) mti_say(text, ", blocks of ranks %d to %d", first, end - 1);
    mti_say(text, ")");
}

/* Writes the call in a slot: "all_reduce(count 4, f32, sum)". */
static void mti_say_call(mti_text *text, const mti_slot *slot) {
    uint64_t what = __atomic_load_n(&slot->what, __ATOMIC_RELAXED);
    unsigned long long count = __atomic_load_n(&slot->count, __ATOMIC_RELAXED);
    int kind = (int)(what & 255) - 1, root = (int)(what >> 24 & 0xffff) - 1, source = (int)(what >> 40 & 0xffff) - 1;
    const char *dtype = mt_dtype_name((mt_dtype)(what >> 8 & 255)), *name = mti_call_name(kind);
    switch (kind) {
    case MT_ALL_REDUCE:
    case MT_REDUCE_SCATTER:
        mti_say(text, "%s(count %llu, %s, %s", name, count, dtype, mti_op_name(what >> 16 & 255));
        mti_say_blocks(text, root, source);
        break;
    case MT_ALL_GATHER:
    case MT_ALL_TO_ALL:
        mti_say(text, "%s(count %llu, %s", name, count, dtype);
        mti_say_blocks(text, root, source);
        break;
    case MT_ALL_TO_ALL_V: mti_say(text, "%s(%s)", name, dtype); break;
    case MT_BROADCAST: mti_say(text, "%s(count %llu, %s, root %d)", name, count, dtype, root); break;
    case MT_SEND: mti_say(text, "%s(count %llu, %s, to rank %d)", name, count, dtype, root); break;
    case MT_RECV: mti_say(text, "%s(count %llu, %s, from rank %d)", name, count, dtype, source); break;
    case MTI_SEND_RECV: mti_say_send_recv(text, slot, root, source, dtype); break;
    default: mti_say(text, "%s", name); break;
    }
}

static void mti_say_where(mti_text *text, const mt_comm *comm) {
    mti_say(text, " on \"%s\" (%d ranks): ", comm->name, comm->size);
}

/* Writes this rank's call: "all_reduce(count 4, f32, sum) on "world" (3 ranks): ". */
static void mti_say_mine(mti_text *text, const mt_comm *comm) {
    mti_say_call(text, mti_slot_of(comm->group, comm->rank));
    mti_say_where(text, comm);
}

static int mti_same_call(const mti_slot *a, const mti_slot *b) {
    return __atomic_load_n(&a->what, __ATOMIC_RELAXED) == __atomic_load_n(&b->what, __ATOMIC_RELAXED) &&
           __atomic_load_n(&a->count, __ATOMIC_RELAXED) == __atomic_load_n(&b->count, __ATOMIC_RELAXED);
}

/* Writes all ranks with the same call as rank `first`: "ranks 0, 2, 3 called all_reduce(...)". */
static void mti_say_alike(mti_text *text, const mti_group *g, int first) {
    int r, alike = 0, said = 0;
    for (r = first; r < g->size; r++) alike += mti_same_call(mti_slot_of(g, first), mti_slot_of(g, r));
    mti_say(text, alike > 1 ? "ranks " : "rank ");
    for (r = first; r < g->size && said < 8; r++) {
        if (!mti_same_call(mti_slot_of(g, first), mti_slot_of(g, r))) continue;
        mti_say(text, said++ ? ", %d" : "%d", r);
    }
    if (alike > said) mti_say(text, " and %d more", alike - said);
    mti_say(text, " called ");
    mti_say_call(text, mti_slot_of(g, first));
}

/* Says that of two ranks one has no data. */
static void mti_say_device(mti_text *text, const mti_group *g, int a, int b) {
    int on_meta = mti_is_on_meta(mti_slot_of(g, a));
    if (on_meta == mti_is_on_meta(mti_slot_of(g, b))) return;
    mti_say(text, "; rank %d is on MT_DEVICE_META, rank %d is not", on_meta ? a : b, on_meta ? b : a);
}

static void mti_say_two(mti_text *text, const mti_group *g, int a, int b) {
    mti_say(text, "rank %d called ", a);
    mti_say_call(text, mti_slot_of(g, a));
    mti_say(text, ", rank %d called ", b);
    mti_say_call(text, mti_slot_of(g, b));
    mti_say_device(text, g, a, b);
}

/* Writes which ranks called what. The message is the same on every rank, because all ranks read the same slots. */
static void mti_say_mismatch(mti_text *text, const mt_comm *comm) {
    const mti_group *g = comm->group;
    int r, before, said = 0;
    mti_say(text, "%s", mti_call_name((int)(__atomic_load_n(&mti_slot_of(g, 0)->what, __ATOMIC_RELAXED) & 255) - 1));
    mti_say_where(text, comm);
    for (r = 0; r < g->size; r++) {
        for (before = 0; before < r && !mti_same_call(mti_slot_of(g, before), mti_slot_of(g, r)); before++) continue;
        if (before < r) continue;
        if (said == 4) {
            mti_say(text, ", and other ranks made other calls");
            return;
        }
        if (said++) mti_say(text, ", ");
        mti_say_alike(text, g, r);
    }
    for (r = 1; r < g->size && mti_is_on_meta(mti_slot_of(g, r)) == mti_is_on_meta(mti_slot_of(g, 0)); r++) continue;
    if (r < g->size) mti_say_device(text, g, 0, r);
}

static void mti_say_absent(mti_text *text, const mti_group *g, int rank) {
    const mti_slot *slot = mti_slot_of(g, rank);
    mti_say(text, "rank %d, ", rank);
    if (!__atomic_load_n(&slot->what, __ATOMIC_RELAXED)) {
        mti_say(text, "which has not called anything here yet");
        return;
    }
    mti_say(text, __atomic_load_n(&slot->inside, __ATOMIC_RELAXED) ? "which waits in " : "whose last call here was ");
    mti_say_call(text, slot);
}

/* Writes which ranks a collective (peer < 0) or a message (to or from `peer`) waits for. For a collective it also names
   the first rank that waits in a different call. */
static void mti_say_timeout(mti_text *text, const mt_comm *comm, int peer) {
    const mti_group *g = comm->group;
    const mti_slot *mine = mti_slot_of(g, comm->rank);
    int r, absent = 0;
    mti_say_mine(text, comm);
    mti_say(text, "waited %.2f s for ", g->timeout);
    if (peer >= 0) {
        mti_say_absent(text, g, peer);
        return;
    }
    for (r = 0; r < g->size; r++) {
        if (__atomic_load_n(&mti_slot_of(g, r)->inside, __ATOMIC_RELAXED) == MTI_IN_COLLECTIVE) continue;
        if (absent && absent < 4) mti_say(text, "; ");
        if (absent++ < 4) mti_say_absent(text, g, r);
    }
    if (absent > 4) mti_say(text, "; and %d more", absent - 4);
    if (!absent) mti_say(text, "a rank that arrived only now");
    for (r = 0; r < g->size; r++) {
        const mti_slot *slot = mti_slot_of(g, r);
        int waits = __atomic_load_n(&slot->inside, __ATOMIC_RELAXED) == MTI_IN_COLLECTIVE;
        if (!waits || mti_same_call(slot, mine)) continue;
        mti_say(text, "; rank %d waits in ", r);
        mti_say_call(text, slot);
        return;
    }
}

static void mti_say_left(mti_text *text, const mt_comm *comm, int peer) {
    const mti_group *g = comm->group;
    int r;
    mti_say_mine(text, comm);
    for (r = 0; r < g->size; r++) {
        const char *left = __atomic_load_n(&mti_slot_of(g, r)->left, __ATOMIC_SEQ_CST);
        if (!left || (peer >= 0 && r != peer)) continue;
        mti_say(text, "rank %d %s", r, left);
        return;
    }
}

/* -- waiting -- */

/* A wait ends when (*word & mask) == value, or, with until_not, when (*word & mask) != value. */
typedef struct mti_wait {
    const uint64_t *word;
    uint64_t mask, value;
    int until_not;
    int peer;    /* the rank waited for; -1: all ranks */
    int rank;    /* if peer is -1: the rank that waits */
    int forever; /* 1: all ranks needed are inside the call and will finish: the wait cannot fail */
} mti_wait;

typedef enum mti_outcome { MTI_MET, MTI_SEES_BROKEN, MTI_SEES_LEFT, MTI_SEES_UNLIKE, MTI_SEES_LATE } mti_outcome;

static int mti_wait_over(const mti_wait *w) {
    return ((__atomic_load_n(w->word, __ATOMIC_SEQ_CST) & w->mask) == w->value) != (w->until_not != 0);
}

/* Detects cores that other threads use, perhaps those of another program: polling with sched_yield then took longer
   than MTI_LATE_TURN, because another thread computed for a time slice. After MTI_LATE_TURNS such polls per rank in a
   row, the ranks sleep without polling for MTI_CROWDED times as long as this poll took, because the scheduler runs a
   woken thread before threads that compute. */
static void mti_note_turn(mti_group *root, double start, double now) {
    if (now - start <= MTI_LATE_TURN) {
        if (__atomic_load_n(&root->late_turns, __ATOMIC_RELAXED) != 0)
            __atomic_store_n(&root->late_turns, 0, __ATOMIC_RELAXED);
    } else if (__atomic_add_fetch(&root->late_turns, 1, __ATOMIC_RELAXED) >= MTI_LATE_TURNS * root->size) {
        __atomic_store_n(&root->crowded_until, (int64_t)(1e6 * (now + MTI_CROWDED * (now - start))), __ATOMIC_RELAXED);
    }
}

/* Polls for about MTI_SPIN_SECONDS, and returns whether the wait is over. With a core for every rank it spins. With
   fewer cores it calls sched_yield, so that the ranks waited for can run: this costs an eighth of sleeping and waking
   up (8 ranks on 2 cores). */
static int mti_spin(mti_group *g, const mti_wait *w) {
    mti_group *root = mti_root_of(g);
    int rounds = g->spin ? 32 : 1, over = mti_wait_over(w), i;
    double start, now;
    if (over) return 1;
    start = mti_now();
    if (1e6 * start < (double)__atomic_load_n(&root->crowded_until, __ATOMIC_RELAXED)) return 0;
    do {
        for (i = 0; i < rounds && !over; i++) {
            if (g->spin) mti_pause();
            else sched_yield();
            over = mti_wait_over(w);
        }
        now = mti_now();
    } while (!over && now - start < MTI_SPIN_SECONDS);
    if (!g->spin) mti_note_turn(root, start, now);
    return over;
}

static int mti_is_broken(const mti_group *g) {
    return (__atomic_load_n(&g->state, __ATOMIC_SEQ_CST) & MTI_BROKEN) != 0;
}

static int mti_has_left(const mti_group *g, int peer) {
    if (peer < 0) return __atomic_load_n(&g->left_count, __ATOMIC_SEQ_CST) > 0;
    return __atomic_load_n(&mti_slot_of(g, peer)->left, __ATOMIC_SEQ_CST) != NULL;
}

static uint64_t mti_outbox(int destination, unsigned state) { return (uint64_t)(destination + 1) << 3 | state; }

/* Returns a rank that waits for `rank` in another kind of call, so that neither can go on, or -1. With a peer, `rank`
   waits for a message to or from it, and the peer may be in a collective. With peer -1, `rank` is in a collective, and
   others may send to it, or await a message of it. */
static int mti_waits_apart(const mti_group *g, int rank, int peer) {
    int r;
    if (peer >= 0)
        return __atomic_load_n(&mti_slot_of(g, peer)->inside, __ATOMIC_SEQ_CST) == MTI_IN_COLLECTIVE ? peer : -1;
    for (r = 0; r < g->size; r++) {
        const mti_slot *slot = mti_slot_of(g, r);
        if (__atomic_load_n(&slot->outbox, __ATOMIC_SEQ_CST) == mti_outbox(rank, MTI_POSTED)) return r;
        if (__atomic_load_n(&slot->awaited, __ATOMIC_SEQ_CST) == rank + 1) return r;
    }
    return -1;
}

/* A peer that is in a collective may have taken the message before, so the word is read again. */
static mti_outcome mti_wait_status(const mti_group *g, const mti_wait *w, int late) {
    if (mti_is_broken(g)) return MTI_SEES_BROKEN;
    if (mti_has_left(g, w->peer)) return MTI_SEES_LEFT;
    if (mti_waits_apart(g, w->rank, w->peer) >= 0 && !mti_wait_over(w)) return MTI_SEES_UNLIKE;
    return late ? MTI_SEES_LATE : MTI_MET;
}

/* Waits until w is over, the group breaks, a rank leaves, or the timeout expires.
   A thread that changes the word does this before it reads `sleepers`. A thread that sleeps increments `sleepers`
   before it reads the word. All four accesses are SEQ_CST: either the second thread sees the new word, or the first one
   sees that a thread sleeps. */
static mti_outcome mti_wait_for(mti_group *g, const mti_wait *w) {
    mti_stopwatch watch;
    mti_outcome outcome = MTI_MET;
    int late = 0;
    if (mti_spin(g, w)) return MTI_MET;
    watch = mti_stopwatch_start(g->timeout);
    pthread_mutex_lock(&g->mutex);
    __atomic_add_fetch(&g->sleepers, 1, __ATOMIC_SEQ_CST);
    while (!mti_wait_over(w)) {
        if (w->forever) {
            pthread_cond_wait(&g->cond, &g->mutex);
            continue;
        }
        outcome = mti_wait_status(g, w, late);
        if (outcome != MTI_MET) break;
        mti_stopwatch_sleep(&watch, g->timeout, &g->cond, &g->mutex);
        late = mti_waited(&watch) >= g->timeout;
    }
    __atomic_sub_fetch(&g->sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&g->mutex);
    return outcome;
}

static void mti_wake(mti_group *g) {
    if (__atomic_load_n(&g->sleepers, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&g->mutex); /* a thread counted in `sleepers` now sleeps, or will read the word again */
    pthread_mutex_unlock(&g->mutex);
    pthread_cond_broadcast(&g->cond);
}

/* Breaks the group: every current and future wait fails with this message. Only the first break of a group counts. The
   group breaks only if the meeting `generation` has not taken place; if it has, mti_break does nothing and returns
   nonzero. MTI_ANY: the break does not depend on a meeting. */
#define MTI_ANY UINT64_MAX
static int mti_break(mti_group *g, mt_status status, const mti_text *text, uint64_t generation) {
    uint64_t state;
    int moved = 0;
    pthread_mutex_lock(&g->mutex);
    state = __atomic_load_n(&g->state, __ATOMIC_SEQ_CST);
    if (!(state & MTI_BROKEN)) {
        g->why_broken = status;
        memcpy(g->text, text->data, text->used);
        g->text[text->used] = '\0';
        do moved = generation != MTI_ANY && state >> MTI_GENERATION != generation;
        while (!moved && !__atomic_compare_exchange_n(&g->state, &state, state | MTI_BROKEN, 0, __ATOMIC_SEQ_CST,
                                                      __ATOMIC_SEQ_CST));
    }
    pthread_mutex_unlock(&g->mutex);
    if (!moved) pthread_cond_broadcast(&g->cond);
    return moved;
}

/* After an error of any group while ranks record together: breaks their group, too, because ranks outside of the other
   group would wait there for this rank, which only comes to mt_graph_end. */
static void mti_break_recorders(mt_context *ctx) {
    mti_text text;
    if (!ctx || !ctx->recorders) return;
    text.used = 0;
    mti_say(&text, "graph");
    mti_say_where(&text, ctx->recorders);
    mti_say(&text, "rank %d failed while it recorded (%s)", ctx->recorders->rank, mt_last_error(ctx));
    mti_break(ctx->turns, MT_ERR_PEER, &text, MTI_ANY);
}

/* mti_broken_now is for ranks that were waiting when the group broke, mti_broken_before for ranks that call later. */
static mt_status mti_broken_now(mt_context *ctx, mt_comm *comm) {
    mt_status status = mti_refuse(ctx, comm, comm->group->why_broken, "%s", comm->group->text);
    mti_break_recorders(ctx);
    return status;
}

static mt_status mti_broken_before(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    return mti_refuse(ctx, comm, MT_ERR_PEER,
                      "%s on \"%s\" (%d ranks): rank %d calls after this communicator failed (%s)",
                      mti_call_name(call->kind), comm->name, comm->size, comm->rank, comm->group->text);
}

/* Writes the call of this rank and that of the other one in mti_waits_apart. Returns 0 when there is none any more: it
   has given up, and is about to break the group, or has done so. */
static int mti_say_apart(mti_text *text, const mt_comm *comm, int peer) {
    int other = mti_waits_apart(comm->group, comm->rank, peer);
    mti_say_mine(text, comm);
    if (other >= 0) mti_say_two(text, comm->group, comm->rank, other);
    return other >= 0;
}

/* Waits until another rank has broken the group. */
static mti_outcome mti_wait_broken(mti_group *g) {
    mti_wait w;
    memset(&w, 0, sizeof w);
    w.word = &g->state;
    w.mask = w.value = MTI_BROKEN;
    w.peer = -1;
    w.forever = 1;
    mti_wait_for(g, &w);
    return MTI_SEES_BROKEN;
}

/* Ends a wait that failed: breaks the group with a message and returns the error. Returns MT_SUCCESS when the meeting
   `generation` took place at the last moment. */
static mt_status mti_give_up(mt_context *ctx, mt_comm *comm, mti_outcome outcome, int peer, uint64_t generation) {
    mti_text text;
    mt_status why = MT_ERR_TIMEOUT;
    text.used = 0;
    text.data[0] = '\0';
    if (outcome == MTI_SEES_LEFT) why = MT_ERR_PEER, mti_say_left(&text, comm, peer);
    if (outcome == MTI_SEES_UNLIKE) why = MT_ERR_MISMATCH;
    if (outcome == MTI_SEES_UNLIKE && !mti_say_apart(&text, comm, peer)) outcome = mti_wait_broken(comm->group);
    if (outcome == MTI_SEES_LATE) mti_say_timeout(&text, comm, peer);
    if (outcome != MTI_SEES_BROKEN && mti_break(comm->group, why, &text, generation)) return MT_SUCCESS;
    return mti_broken_now(ctx, comm);
}

/* Breaks the group because this rank has failed inside the call. The message has the rank's error. Returns status. */
static mt_status mti_break_failed(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    mti_text text;
    text.used = 0;
    mti_say(&text, "%s", mti_call_name(call->kind));
    mti_say_where(&text, comm);
    mti_say(&text, "rank %d failed with %s (%s)", comm->rank, mt_status_name(status), mt_last_error(ctx));
    mti_break(comm->group, MT_ERR_PEER, &text, MTI_ANY);
    mti_break_recorders(ctx);
    return status;
}

/* Breaks the group because the calls of its ranks differ. */
static mt_status mti_break_mismatch(mt_context *ctx, mt_comm *comm, const mti_text *text) {
    mti_break(comm->group, MT_ERR_MISMATCH, text, MTI_ANY);
    mti_refuse(ctx, comm, MT_ERR_MISMATCH, "%s", text->data);
    mti_break_recorders(ctx);
    return MT_ERR_MISMATCH;
}

/* As mti_break_failed, after the rank may have put a part of its work into the stream: peers get no event behind it. */
static void mti_fail_inside(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    mti_break_failed(ctx, comm, call, status);
    if (ctx->device == MT_DEVICE_CUDA) mti_cuda_drain(ctx);
}

/* -- turns: of the ranks that record a graph together, one calls CUDA at a time -- */

/* CUDA allows only one thread at a time to work on a graph ("Graph object thread safety", CUDA Runtime API). So a rank
   gives its turn away before it waits for other ranks, and takes it again before its next call of CUDA. */
static void mti_turn_give(mt_context *ctx) {
    if (!ctx || !ctx->has_turn) return;
    ctx->has_turn = 0;
    __atomic_store_n(&ctx->turns->turn, 0, __ATOMIC_RELEASE);
}

#if MT_HAS_CUDA
/* Waits until *flag is 0, and returns 1; after the timeout returns 0. take: sets it to 1 */
static int mti_flag_wait(const mti_group *g, int *flag, int take) {
    mti_stopwatch watch = mti_stopwatch_start(g->timeout);
    while (take ? __atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE) : __atomic_load_n(flag, __ATOMIC_ACQUIRE)) {
        double waited = mti_waited(&watch);
        if (waited > g->timeout) return 0;
        mti_rest(waited, 1e-3);
    }
    return 1;
}

static mt_status mti_turn_take(mt_context *ctx) {
    if (!ctx || !ctx->recorders || ctx->has_turn) return MT_SUCCESS;
    ctx->has_turn = mti_flag_wait(ctx->turns, &ctx->turns->turn, 1);
    if (ctx->has_turn) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_TIMEOUT, "rank %d of \"%s\" (%d ranks) waited %.2f s for another rank to record",
                   ctx->recorders->rank, ctx->recorders->name, ctx->recorders->size, ctx->turns->timeout);
}
#else
static mt_status mti_turn_take(mt_context *ctx) { return (void)ctx, MT_SUCCESS; }
#endif

/* Returns 1 when this rank has waited for its turn until the timeout. */
static int mti_turn_is_lost(const mt_context *ctx) { return ctx && ctx->recorders && !ctx->has_turn; }

/* As mti_wait_for, without a turn. */
static mti_outcome mti_wait_aside(mt_context *ctx, mti_group *g, const mti_wait *w) {
    mti_outcome outcome;
    mti_turn_give(ctx);
    outcome = mti_wait_for(g, w);
    if (outcome != MTI_MET) return outcome; /* the recording is lost */
    return mti_turn_take(ctx) == MT_SUCCESS ? MTI_MET : MTI_SEES_LATE;
}
