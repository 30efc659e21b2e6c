/* ---- the threads of a context ------------------------------------------------------------------------------------ */

#pragma once
#include "threads.c"

/* The items of one mt_parallel_for. Thread i computes [i * each, (i + 1) * each). */
typedef struct mti_ranges {
    mt_range_function work;
    void *data;
    int64_t count, each;
} mti_ranges;

static void mti_range_run(const mti_ranges *r, int thread) {
    int64_t first = mt_size_mul(thread, r->each);
    if (first < 0 || first >= r->count) return; /* below 0: thread * each does not fit */
    (r->work)(r->data, thread, first, first + mt_min(r->each, r->count - first));
}

/* One of a context's threads, except the one that calls. */
typedef struct mti_helper {
    struct mti_team *team;
    pthread_t thread;
    int number; /* from 1 */
} mti_helper;

/* The helpers of a context. They and their caller wait for each other like ranks, by means of a group. */
typedef struct mti_team {
    mti_group *group;
    uint64_t calls;     /* number of calls so far; a helper waits for the next one */
    uint64_t busy;      /* number of helpers that have not finished the call; the caller waits for 0 */
    int ends;           /* 1: the helpers return */
    int count;          /* number of helpers */
    mti_ranges ranges;  /* of the call */
    mti_helper *helper; /* [count] */
} mti_team;

/* Waits until *word == value, or, with until_not, until *word != value. */
static void mti_team_wait(mti_team *t, const uint64_t *word, uint64_t value, int until_not) {
    mti_wait w;
    w.word = word;
    w.mask = UINT64_MAX;
    w.value = value;
    w.until_not = until_not;
    w.peer = w.rank = -1;
    w.forever = 1;
    mti_wait_for(t->group, &w);
}

static void *mti_helper_run(void *argument) {
    const mti_helper *h = (const mti_helper *)argument;
    mti_team *t = h->team;
    uint64_t seen;
    for (seen = 0;; seen++) {
        mti_team_wait(t, &t->calls, seen, 1);
        if (t->ends) return NULL;
        mti_range_run(&t->ranges, h->number);
        if (__atomic_sub_fetch(&t->busy, 1, __ATOMIC_SEQ_CST) == 0) mti_wake(t->group);
    }
}

/* Begins a call: the helpers see all that was written before. */
static void mti_team_call(mti_team *t) {
    __atomic_store_n(&t->busy, (uint64_t)t->count, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&t->calls, 1, __ATOMIC_SEQ_CST);
    mti_wake(t->group);
}

/* A process that was forked has no helpers. */
static int mti_team_is_forked(const mti_team *t) { return t->group && mti_is_forked(t->group->process); }

static void mti_team_destroy(mti_team *t) {
    int i, here;
    if (!t) return;
    here = !mti_team_is_forked(t);
    t->ends = 1;
    if (t->group && here) mti_team_call(t);
    for (i = 0; i < t->count && here; i++) pthread_join(t->helper[i].thread, NULL);
    mti_group_release(t->group);
    free(t->helper);
    free(t);
}

/* Starts up to `count` helpers; NULL: out of memory. */
static mti_team *mti_team_new(int count) {
    mti_team *t = (mti_team *)calloc(1, sizeof *t);
    int i, error = 0;
    if (!t) return NULL;
    t->helper = (mti_helper *)calloc((size_t)count, sizeof *t->helper);
    t->group = mti_group_new(1, 0, 0);
    if (!t->helper || !t->group) {
        mti_team_destroy(t);
        return NULL;
    }
    for (i = 0; i < count && !error; i++) {
        t->helper[i].team = t;
        t->helper[i].number = i + 1;
        error = pthread_create(&t->helper[i].thread, NULL, mti_helper_run, &t->helper[i]);
        t->count += !error;
    }
    return t;
}

/* Computes the ranges of a call on the helpers and on this thread, which takes the first one, and those of helpers that
   could not be started. A thread that is cancelled waits for the helpers, because they use its data. */
static void mti_team_run(mti_team *t, const mti_ranges *ranges, int threads) {
    int before = mti_hold(), i;
    t->ranges = *ranges;
    mti_team_call(t);
    mti_range_run(ranges, 0);
    for (i = t->count + 1; i < threads; i++) mti_range_run(ranges, i);
    mti_team_wait(t, &t->busy, 0, 0);
    mti_release(before);
}

MT_API void mt_parallel_for(mt_context *ctx, int64_t count, int64_t grain, mt_range_function work, void *data) {
    int threads = mt_context_threads(ctx), i;
    mti_ranges r;
    if (count <= 0 || !work) return;
    r.work = work;
    r.data = data;
    r.count = count;
    r.each = mt_round_up(count / threads + (count % threads != 0), mt_max(grain, 1));
    if (r.each < count && ctx->team && mti_team_is_forked(ctx->team)) {
        mti_team_destroy(ctx->team);
        ctx->team = NULL;
    }
    if (r.each < count && !ctx->team) ctx->team = mti_team_new(threads - 1);
    if (r.each < count && ctx->team) {
        mti_team_run(ctx->team, &r, threads);
        return;
    }
    for (i = 0; i < threads; i++) mti_range_run(&r, i);
}
