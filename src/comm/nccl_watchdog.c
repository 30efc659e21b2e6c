/* ---- the watchdog of calls over NCCL, and aborts ---------------------------------------------------------------- */

#pragma once
#include "nccl_calls.c"

#if MTI_NCCL
/* -- aborts -- */

/* Communicators of NCCL that are aborted together. NCCL first tells the kernels of a communicator to end, and then
   waits for them. A kernel may have to wait for one of another communicator that is before it in the stream. So all
   kernels are told first: aborts in one group of NCCL wait at the same time. Blocking and non-blocking communicators
   cannot be in one group. */
typedef struct mti_aborts {
    int references; /* atomic: the thread and its caller */
    int done;       /* atomic */
    int ordinal, count, room;
    struct ncclComm *handles[2]; /* of 2 * room; the openers are behind the others */
} mti_aborts;

#define MTI_ABORT_PATIENCE 2.0 /* seconds that a call waits for aborts: a kernel of the program's own may hang */

/* Room for `comms` communicators. NULL: no memory. */
static mti_aborts *mti_aborts_new(int comms, int ordinal) {
    mti_aborts *a = (mti_aborts *)calloc(1, sizeof *a + 2 * (size_t)(comms - 1) * sizeof *a->handles);
    if (!a) return NULL;
    a->references = 2;
    a->ordinal = ordinal;
    a->room = comms;
    return a;
}

/* Adds the handles of a communicator, either of which may be NULL. Without memory, aborts them at once. */
static void mti_aborts_add(mti_aborts *a, struct ncclComm *handle, struct ncclComm *opener) {
    if (a) {
        a->handles[a->count] = handle;
        a->handles[a->room + a->count++] = opener;
        return;
    }
    ncclCommAbort(handle); /* NULL is allowed */
    ncclCommAbort(opener);
}

static void mti_aborts_release(mti_aborts *a) {
    if (__atomic_sub_fetch(&a->references, 1, __ATOMIC_ACQ_REL) == 0) free(a);
}

static void *mti_aborts_thread(void *argument) {
    mti_aborts *a = (mti_aborts *)argument;
    int openers, i;
    if (cudaSetDevice(a->ordinal) != cudaSuccess) cudaGetLastError();
    for (openers = 0; openers < 2; openers++) {
        ncclGroupStart();
        for (i = 0; i < a->count; i++) ncclCommAbort(a->handles[openers * a->room + i]);
        ncclGroupEnd();
    }
    __atomic_store_n(&a->done, 1, __ATOMIC_RELEASE);
    mti_aborts_release(a);
    return NULL;
}

/* Aborts all of them, and waits until that is done. Where it takes too long, it goes on behind the program. */
static void mti_aborts_run(mti_aborts *a) {
    pthread_t thread;
    mti_stopwatch watch = mti_stopwatch_start(MTI_ABORT_PATIENCE);
    double waited = 0;
    if (!a) return;
    if (a->count == 0) {
        free(a);
        return;
    }
    if (mti_thread_start(&thread, mti_aborts_thread, a) == 0) pthread_detach(thread);
    else mti_aborts_thread(a);
    for (; !__atomic_load_n(&a->done, __ATOMIC_ACQUIRE) && waited < MTI_ABORT_PATIENCE; waited = mti_waited(&watch))
        mti_rest(waited, 1e-3);
    mti_aborts_release(a);
}

/* -- the watchdog -- */

/* Owned by the communicators of one context, all of which belong to one thread: at most one call is inside NCCL. The
   watchdog looks at it once per tick. It sleeps without a tick when it has seen no call for the time of one, so that
   most calls do not wake it. */
typedef struct mti_watchdog {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    pthread_t thread;
    int ordinal, users; /* users: communicators that have this watchdog */
    int ends;
    int aborts;         /* atomic: the thread runs an abort */
    mt_comm *inside;    /* the communicator of the call that is inside NCCL; NULL: none */
    mti_stopwatch call; /* the time of the last call */
    uint64_t calls;     /* number of calls so far */
    double wakes;       /* when the thread looks next, by mti_now */
    double late;        /* seconds after which the thread has aborted the last call; 0: it has not */
} mti_watchdog;

#define MTI_WATCHDOG_SLEEP 3600.0 /* seconds; a call wakes the watchdog earlier */

static void *mti_watchdog_run(void *argument) {
    mti_watchdog *w = (mti_watchdog *)argument;
    uint64_t seen = 0;
    struct timespec wake;
    cudaSetDevice(w->ordinal);
    pthread_mutex_lock(&w->mutex);
    while (!w->ends) {
        double rest = w->calls != seen ? w->call.tick : MTI_WATCHDOG_SLEEP;
        double waited = w->inside ? mti_waited(&w->call) : 0,
               left = w->inside ? w->inside->nccl.timeout - waited : rest;
        if (left < 0 || (w->inside && mti_channel_is_decided(w->inside->nccl.channel))) {
            struct ncclComm *handle = w->inside->nccl.handle;
            mti_aborts *aborts = mti_aborts_new(1, w->ordinal);
            w->inside = NULL;
            w->late = waited + 1e-9; /* more than 0 */
            __atomic_store_n(&w->aborts, 1, __ATOMIC_RELAXED);
            /* An abort may wait for kernels of other communicators. The caller of the aborted call aborts those
               meanwhile, for which it needs the mutex. */
            pthread_mutex_unlock(&w->mutex);
            mti_aborts_add(aborts, handle, NULL);
            mti_aborts_run(aborts);
            __atomic_store_n(&w->aborts, 0, __ATOMIC_RELEASE);
            pthread_mutex_lock(&w->mutex);
            continue;
        }
        if (w->inside) rest = left < w->call.tick ? left : w->call.tick;
        seen = w->calls;
        w->wakes = mti_now() + rest;
        wake = mti_timespec(w->wakes);
        pthread_cond_timedwait(&w->cond, &w->mutex, &wake);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

static mti_watchdog *mti_watchdog_new(int ordinal) {
    mti_watchdog *w = (mti_watchdog *)calloc(1, sizeof *w);
    if (!w) return NULL;
    w->ordinal = ordinal;
    if (pthread_mutex_init(&w->mutex, NULL) == 0) {
        if (mti_cond_init(&w->cond) == 0) {
            if (mti_thread_start(&w->thread, mti_watchdog_run, w) == 0) return w;
            pthread_cond_destroy(&w->cond);
        }
        pthread_mutex_destroy(&w->mutex);
    }
    free(w);
    return NULL;
}

/* Gives comm the watchdog of the context, which the first communicator starts. */
static mt_status mti_watchdog_join(mt_context *ctx, mt_comm *comm) {
    mt_comm *other = ctx->nccl;
    while (other && !other->nccl.watchdog) other = other->nccl.next;
    comm->nccl.watchdog = other ? other->nccl.watchdog : mti_watchdog_new(ctx->ordinal);
    if (!comm->nccl.watchdog)
        return mt_fail(ctx, MT_ERR_SYSTEM, "no thread that watches the calls on \"%s\"", comm->name);
    comm->nccl.watchdog->users++;
    return MT_SUCCESS;
}

/* The last communicator ends the thread. */
static void mti_watchdog_leave(mt_comm *comm) {
    mti_watchdog *w = comm->nccl.watchdog;
    comm->nccl.watchdog = NULL;
    if (!w || --w->users > 0) return;
    pthread_mutex_lock(&w->mutex);
    w->ends = 1;
    pthread_mutex_unlock(&w->mutex);
    pthread_cond_signal(&w->cond);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->cond);
    pthread_mutex_destroy(&w->mutex);
    free(w);
}

/* Begins one call, or one group of calls, of NCCL on the handle of comm. mti_nccl_settle ends it. */
static void mti_nccl_enter(mt_comm *comm) {
    mti_watchdog *w = comm->nccl.watchdog;
    int sleeps;
    if (!w) return;
    pthread_mutex_lock(&w->mutex);
    w->inside = comm;
    w->late = 0;
    w->calls++;
    w->call = mti_stopwatch_start(comm->nccl.timeout);
    sleeps = w->wakes > w->call.looked + w->call.tick;
    pthread_mutex_unlock(&w->mutex);
    if (sleeps) pthread_cond_signal(&w->cond);
}

/* Waits for the abort that the watchdog runs, for at most the patience of mti_aborts_run. The abort releases the caller
   early, and deregisters memory at its end. */
static void mti_watchdog_wait(const mt_comm *comm) {
    const mti_watchdog *w = comm->nccl.watchdog;
    mti_stopwatch watch = mti_stopwatch_start(MTI_ABORT_PATIENCE);
    while (w && __atomic_load_n(&w->aborts, __ATOMIC_ACQUIRE)) mti_rest(mti_waited(&watch), 1e-3);
}

/* Ends what mti_nccl_enter has begun. Returns the seconds after which the watchdog aborted the call; 0: it did not. The
   handle of an aborted call is gone. */
static double mti_nccl_exit(mt_comm *comm) {
    mti_watchdog *w = comm->nccl.watchdog;
    double late;
    if (!w) return 0;
    pthread_mutex_lock(&w->mutex);
    w->inside = NULL;
    late = w->late;
    w->late = 0;
    if (late > 0) comm->nccl.handle = NULL;
    pthread_mutex_unlock(&w->mutex);
    return late;
}
#endif
