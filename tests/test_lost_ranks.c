/* test_lost_ranks.c - tests 2 to 8 ranks, which are threads, one of which is lost: it is stuck in the user's code,
   returns, or fails. Every other rank must return from every call, in the world or in a group of a grid, with a
   message that names the call and the lost rank. No call is done by half, and mt_launch returns. */

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"
#include "mt_test.h"

#include <signal.h>
#include <sys/wait.h>

#define MAX_RANKS 8
#define COUNT 6
#define TIMEOUT 0.25
#define TRIES 9 /* each with twice the timeout of the last: on a busy machine other ranks may be late, too */

enum { STUCK, RETURNS, FAILS, FAULTS };
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST_TO, BROADCAST_FROM, BARRIER, SPLIT, RING, RECV, SEND, CALLS };

static const char *const call_names[] = {"all_reduce(count 6, f32, sum) on ",
                                         "all_gather(count 6, f32) on ",
                                         "reduce_scatter(count 6, f32, sum) on ",
                                         "broadcast(count 6, f32, root ",
                                         "broadcast(count 6, f32, root ",
                                         "barrier on ",
                                         "split on ",
                                         "send_recv(count 6 to rank ",
                                         "recv(count 6, f32, from rank ",
                                         "send(count 6, f32, to rank "};

typedef struct loss {
    int ranks, victim, fault, call;
    int in_group;    /* the call is made in the victim's half of the world */
    int here, ended; /* ranks that have started, and survivors that have ended */
    int given_up;    /* number of messages when `stuck` was called; 0: it was not called */
    double timeout;
    void (*stuck)(void *user);
    char wrong[2500]; /* the first error that was found; "": none */
    mt_status status[MAX_RANKS];
    double seconds[MAX_RANKS];
    char said[MAX_RANKS][1200], line[2 * MAX_RANKS][1200];
    int lines;
} loss;

static void keep_line(void *user, mt_log_level level, const char *message) {
    loss *l = (loss *)user;
    (void)level;
    if (l->lines < 2 * MAX_RANKS) snprintf(l->line[l->lines], sizeof l->line[0], "%s", message);
    __atomic_add_fetch(&l->lines, 1, __ATOMIC_RELEASE);
}

static mt_status launch(loss *l, mt_rank_function f) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = l->ranks;
    d.no_pinning = 1;
    d.timeout_s = l->timeout;
    d.stuck = l->stuck;
    d.logger.log = keep_line;
    d.logger.user = l;
    return mt_launch(&d, f, l);
}

static void wait_until(const int *counter, int value) {
    struct timespec moment = mti_timespec(0.001);
    int tries;
    for (tries = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) < value; tries++)
        if (tries < 1000) sched_yield();
        else nanosleep(&moment, NULL);
}

/* Waits until the threads of all ranks run, so that no rank waits for a start within its timeout. */
static void meet(loss *l) {
    __atomic_add_fetch(&l->here, 1, __ATOMIC_RELEASE);
    wait_until(&l->here, l->ranks);
}

/* The lost rank. A stuck one returns only when all survivors have ended without it. */
static mt_status be_lost(loss *l, mt_context *ctx) {
    if (l->fault == STUCK) wait_until(&l->ended, l->ranks - 1);
    return l->fault == FAILS ? mt_fail(ctx, MT_ERR_DATA, "loss is 17") : MT_SUCCESS;
}

static mt_status make_call(const loss *l, mt_context *ctx, mt_comm *c, int victim, float *a, float *b) {
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    mt_comm *out;
    switch (l->call) {
    case ALL_REDUCE: return mt_all_reduce(ctx, c, a, b, COUNT, MT_F32, MT_SUM);
    case ALL_GATHER: return mt_all_gather(ctx, c, a, b, COUNT, MT_F32);
    case REDUCE_SCATTER: return mt_reduce_scatter(ctx, c, a, b, COUNT, MT_F32, MT_SUM);
    case BROADCAST_TO: return mt_broadcast(ctx, c, a, b, COUNT, MT_F32, (victim + 1) % size);
    case BROADCAST_FROM: return mt_broadcast(ctx, c, a, b, COUNT, MT_F32, victim);
    case BARRIER: return mt_barrier(ctx, c);
    case SPLIT: return mt_comm_split(c, 0, 0, &out);
    case RING: return mt_send_recv(ctx, c, a, COUNT, (rank + 1) % size, b, COUNT, (rank + size - 1) % size, MT_F32);
    case RECV: return mt_recv(ctx, c, b, COUNT, MT_F32, victim);
    default: return mt_send(ctx, c, a, COUNT, MT_F32, victim);
    }
}

static void note(loss *l, int rank, mt_comm *world, mt_status status, double start) {
    l->status[rank] = status;
    l->seconds[rank] = mti_now() - start;
    snprintf(l->said[rank], sizeof l->said[0], "%s", mt_comm_last_error(world));
    __atomic_add_fetch(&l->ended, 1, __ATOMIC_RELEASE);
}

static mt_context *new_context(mt_comm *world) {
    mt_context_desc d;
    mt_context *ctx = NULL;
    memset(&d, 0, sizeof d);
    d.arena_bytes = 4096;
    return mt_context_create(world, &d, &ctx) == MT_SUCCESS ? ctx : NULL;
}

/* In a ring, ranks that are not neighbours of the lost rank succeed, and learn of the loss in the barrier that
   follows. */
static mt_status lossy_rank(mt_comm *world, void *user) {
    loss *l = (loss *)user;
    mt_context *ctx = new_context(world);
    mt_comm *group = world;
    int rank = mt_comm_rank(world), half = l->in_group ? l->ranks / 2 : l->ranks, touched = 0, i;
    int mine = rank / half == l->victim / half;
    float a[COUNT * MAX_RANKS], b[COUNT * MAX_RANKS];
    double start;
    mt_status status = MT_SUCCESS;
    for (i = 0; i < COUNT * MAX_RANKS; i++) a[i] = b[i] = 5;
    meet(l);
    if (l->in_group) status = mt_comm_split(world, rank / half, 0, &group);
    if (status == MT_SUCCESS && rank == l->victim) {
        status = be_lost(l, ctx);
    } else {
        start = mti_now();
        if (status == MT_SUCCESS && mine) status = make_call(l, ctx, group, l->victim - rank / half * half, a, b);
        for (i = 0; i < COUNT * MAX_RANKS; i++) touched |= a[i] != 5 || (b[i] != 5 && l->call != RING);
        if (status == MT_SUCCESS && (!mine || l->call == RING)) status = mt_barrier(ctx, mine ? group : world);
        note(l, rank, world, status, start);
    }
    if (rank % 2 && rank != l->victim) mt_comm_destroy(group); /* the other ranks leave it to the launcher */
    mt_context_destroy(ctx);
    CHECK(!touched);
    return status;
}

/* The timeout is waited for only when a rank is stuck. */
static loss *new_loss(int fault, int ranks, int victim) {
    static loss l;
    memset(&l, 0, sizeof l);
    l.fault = fault;
    l.ranks = ranks;
    l.victim = victim;
    l.timeout = fault == STUCK ? TIMEOUT : TEST_NEVER_OVER;
    return &l;
}

/* Records an error, unless there is one already. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void
wrong(loss *l, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (!l->wrong[0]) vsnprintf(l->wrong, sizeof l->wrong, format, args);
    va_end(args);
}

/* Returns 1 when what was wrong is that another rank was late, too, or that the end of the stuck one was. */
static int is_late(const loss *l) {
    return l->fault == STUCK && (strstr(l->wrong, "waited ") || strstr(l->wrong, "a timeout after ") ||
                                 strstr(l->wrong, "has not returned from its function"));
}

/* Repeats such a try with a longer timeout. Any other failure is one at once. */
static void lose_in_time(loss *l, void (*lose_once)(loss *l)) {
    const loss wanted = *l;
    int try;
    for (try = 1;; try++) {
        lose_once(l);
        if (!l->wrong[0]) return;
        if (!is_late(l) || try == TRIES) fail_msg("timeout %g s: %s", l->timeout, l->wrong);
        print_message("timeout %g s: %s; once more with twice that\n", l->timeout, l->wrong);
        *l = wanted;
        l->timeout = wanted.timeout * (1 << try);
    }
}

/* Returns the longest wait of a rank that has timed out. The others may have begun later: it tells them at once. */
static double longest_wait(const loss *l) {
    double most = 0;
    for (int r = 0; r < l->ranks; r++)
        if (l->status[r] == MT_ERR_TIMEOUT && l->seconds[r] > most) most = l->seconds[r];
    return most;
}

static void look_at(loss *l, int rank) {
    const char *said = l->said[rank];
    int half = l->in_group ? l->ranks / 2 : l->ranks, beside = rank / half != l->victim / half;
    int late = l->call == RING || beside; /* these ranks learn of the loss in the barrier */
    mt_status expected = l->fault == STUCK ? MT_ERR_TIMEOUT : MT_ERR_PEER;
    char who[32], what[64] = "returned from its function";
    if (l->fault == STUCK) snprintf(what, sizeof what, "waited %.2f s for ", l->timeout);
    if (l->fault == FAILS) snprintf(what, sizeof what, "failed with MT_ERR_DATA (loss is 17");
    snprintf(who, sizeof who, "rank %d", l->victim % half);
    if (l->status[rank] != expected && !(late && l->status[rank] == MT_ERR_PEER))
        wrong(l, "rank %d: %s: %s", rank, mt_status_name(l->status[rank]), said);
    if (l->status[rank] == MT_ERR_TIMEOUT && longest_wait(l) < 0.99 * l->timeout)
        wrong(l, "rank %d: a timeout after %.2f s", rank, longest_wait(l));
    if (beside) return; /* the message may name any rank of the victim's group */
    if (!strstr(said, what) || !strstr(said, who) || (!late && !strstr(said, call_names[l->call])))
        wrong(l, "rank %d, %s, lost %s: %s", rank, call_names[l->call], who, said);
}

static void lose_once(loss *l) {
    static const mt_status statuses[] = {MT_ERR_TIMEOUT, MT_ERR_PEER, MT_ERR_DATA};
    mt_status status = launch(l, lossy_rank);
    int r;
    if (status != statuses[l->fault])
        wrong(l, "%s: the launch returns %s", call_names[l->call], mt_status_name(status));
    if (l->lines != l->ranks - 1 + (l->fault == FAILS)) { /* one message from each rank that failed */
        for (r = 0; r < l->lines && r < 2 * MAX_RANKS - 1 && !strstr(l->line[r], "has not returned"); r++) continue;
        wrong(l, "%d sentences, as: %s", l->lines, l->line[r]);
    }
    for (r = 0; r < l->ranks; r++)
        if (r != l->victim) look_at(l, r);
}

static void lose(int fault, int call, int ranks, int victim, int in_group) {
    loss *l = new_loss(fault, ranks, victim);
    l->call = call;
    l->in_group = in_group;
    lose_in_time(l, lose_once);
}

static void test_gone(void **state) {
    int fault, call, ranks;
    (void)state;
    for (fault = RETURNS; fault < FAULTS; fault++)
        for (call = 0; call < CALLS; call++)
            for (ranks = 2; ranks <= MAX_RANKS; ranks++) lose(fault, call, ranks, (call + ranks) % ranks, 0);
}

static void test_stuck(void **state) {
    int call;
    (void)state;
    for (call = 0; call < CALLS; call++) {
        lose(STUCK, call, 2, call % 2, 0);
        lose(STUCK, call, 3 + call % 5, call % 3, 0);
        lose(STUCK, call, 8, call % 8, 0);
    }
}

static void test_lost_in_a_group(void **state) {
    int call;
    (void)state;
    for (call = 0; call < CALLS; call++) {
        lose(RETURNS, call, 8, call % 8, 1);
        lose(FAILS, call, 4, call % 4, 1);
        lose(STUCK, call, call % 2 ? 4 : 8, call % 4, 1);
    }
}

/* ---- stuck until the launch has said so -------------------------------------------------------------------------- */

static mt_status patient_rank(mt_comm *world, void *user) {
    loss *l = (loss *)user;
    mt_context *ctx;
    mt_status status = MT_SUCCESS;
    meet(l);
    if (mt_comm_rank(world) == l->victim) wait_until(&l->lines, l->ranks);
    ctx = new_context(world);
    status = mt_barrier(ctx, world); /* too late for the victim */
    mt_context_destroy(ctx);
    return status;
}

static void test_launch_does_not_wait_in_silence(void **state) {
    loss *l = new_loss(STUCK, 3, 1);
    int last;
    (void)state;
    assert_int_equal(launch(l, patient_rank), MT_ERR_TIMEOUT);
    assert_int_equal(l->lines, 4); /* those of the two others, that rank 1 has not returned, and at the end its own */
    last = strstr(l->line[0], "rank 0 of 3") != NULL; /* a rank that is late, too, is told by the other one */
    assert_non_null(strstr(l->line[!last], "rank 0 of 3: MT_ERR_"));
    assert_non_null(strstr(l->line[!last], ": barrier on \"world\" (3 ranks): "));
    assert_non_null(strstr(l->line[last], "rank 2 of 3: MT_ERR_"));
    assert_non_null(strstr(l->line[last], ": barrier on \"world\""));
    assert_string_equal(l->line[2], "rank 1 of 3: has not returned from its function, mt_launch waits for it");
    assert_non_null(strstr(l->line[3], "rank 1 of 3: MT_ERR_PEER: barrier on \"world\" (3 ranks): rank 1 calls after"));
}

static void give_up(void *user) {
    loss *l = (loss *)user;
    __atomic_store_n(&l->given_up, __atomic_load_n(&l->lines, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
}

/* One rank fails at once, one after the first three messages, and one not before the launch gives up. */
static mt_status released_rank(mt_comm *world, void *user) {
    loss *l = (loss *)user;
    meet(l);
    if (mt_comm_rank(world) == 2) wait_until(&l->lines, 3);
    if (mt_comm_rank(world) != l->victim) return MT_ERR_DATA;
    wait_until(&l->given_up, 1);
    return MT_SUCCESS;
}

static void test_launch_gives_up(void **state) {
    loss *l = new_loss(STUCK, 3, 0);
    (void)state;
    l->stuck = give_up;
    l->timeout = MTI_GRACE_SECONDS + 5;
    assert_int_equal(launch(l, released_rank), MT_ERR_DATA);
    assert_int_equal(l->given_up, 4); /* all four messages had been logged */
    assert_int_equal(l->lines, 4);
    assert_non_null(strstr(l->line[0], "rank 1 of 3: MT_ERR_DATA"));
    assert_string_equal(l->line[1], "rank 0 of 3: has not returned from its function, mt_launch waits for it");
    assert_string_equal(l->line[2], "rank 2 of 3: has not returned from its function, mt_launch waits for it");
    assert_non_null(strstr(l->line[3], "rank 2 of 3: MT_ERR_DATA"));
}

static mt_status slow_rank(mt_comm *world, void *user) {
    loss *l = (loss *)user;
    if (mt_comm_rank(world) == l->victim) wait_until(&l->lines, 2);
    return mt_comm_rank(world) == l->victim ? MT_ERR_IO : MT_ERR_DATA;
}

/* A rank that is late by less than the timeout is not lost. */
static void test_launch_does_not_give_up_early(void **state) {
    loss *l = new_loss(STUCK, 2, 1);
    (void)state;
    l->timeout = TEST_NEVER_OVER;
    l->stuck = give_up;
    assert_int_equal(launch(l, slow_rank), MT_ERR_DATA);
    assert_int_equal(l->given_up, 0);
    assert_int_equal(l->lines, 3);
    assert_string_equal(l->line[1], "rank 1 of 2: has not returned from its function, mt_launch waits for it");
    assert_non_null(strstr(l->line[2], "rank 1 of 2: MT_ERR_IO"));
}

/* ---- a rank whose thread is cancelled ---------------------------------------------------------------------------- */

enum { OUTSIDE, WAITING, WAITING_LONG, CANCELLED };

typedef struct cancelled {
    loss l;
    int where;
    pthread_t thread;
    mt_context *ctx[3]; /* they exist longer than the threads of the ranks */
} cancelled;

/* Rank 2 cancels rank 1, which is in the user's code or waits in a barrier. Then rank 2 enters this barrier, or does so
   only at the end. */
static mt_status cancelled_rank(mt_comm *world, void *user) {
    cancelled *c = (cancelled *)user;
    int rank = mt_comm_rank(world);
    double start = mti_now();
    mt_status status = MT_SUCCESS;
    if (rank == 1) c->thread = pthread_self();
    meet(&c->l);
    while (rank == 1 && c->where == OUTSIDE) { /* ThreadSanitizer crashes when a thread is cancelled in its nanosleep */
        sched_yield();
        pthread_testcancel();
    }
    if (rank == 2) {
        if (c->where != OUTSIDE) wait_until(&world->group->sleepers, 2); /* the other two are in the barrier */
        CHECK(pthread_cancel(c->thread) == 0);
        if (c->where == WAITING_LONG) wait_until(&c->l.ended, 1);
    }
    while (status == MT_SUCCESS) status = mt_barrier(c->ctx[rank], world);
    note(&c->l, rank, world, status, start);
    return status;
}

static void cancel_rank(int where) {
    static cancelled c;
    loss *l = &c.l;
    mt_context_desc small;
    int r;
    memset(&c, 0, sizeof c);
    memset(&small, 0, sizeof small);
    small.arena_bytes = 4096;
    c.where = where;
    l->ranks = 3;
    l->timeout = where == WAITING_LONG ? 1 : TEST_NEVER_OVER;
    for (r = 0; r < 3; r++) ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, &small, &c.ctx[r]));
    assert_int_equal(launch(l, cancelled_rank), where == WAITING_LONG ? MT_ERR_TIMEOUT : MT_ERR_SYSTEM);
    for (r = 0; r < 3; r += 2) {
        if (where != WAITING_LONG) {
            assert_int_equal(l->status[r], MT_ERR_PEER);
            assert_non_null(strstr(l->said[r], "rank 1 failed with MT_ERR_SYSTEM (pthread_cancel"));
        }
    }
    for (r = 0; r < l->lines && !strstr(l->line[r], "rank 1 of 3: MT_ERR_SYSTEM: pthread_cancel"); r++) continue;
    assert_true(r < l->lines);
    for (r = 0; r < 3; r++) mt_context_destroy(c.ctx[r]);
}

static void test_cancelled(void **state) {
    int where;
    (void)state;
    for (where = 0; where < CANCELLED; where++) cancel_rank(where);
}

/* ---- a process that is stopped for longer than the timeout ------------------------------------------------------- */

enum { BEGUN, CONTINUED }; /* pipes */

/* Rank 1 works until the process has been stopped and continued, while the others wait for it. */
static mt_status working_rank(mt_comm *world, void *user) {
    int(*pipes)[2] = (int(*)[2])user;
    mt_context *ctx = new_context(world);
    mt_status status;
    char byte;
    if (mt_comm_rank(world) == 1) {
        wait_until(&world->group->sleepers, 2);
        CHECK(write(pipes[BEGUN][1], "", 1) == 1);
        CHECK(read(pipes[CONTINUED][0], &byte, 1) == 1);
    }
    status = mt_barrier(ctx, world);
    mt_context_destroy(ctx);
    return status;
}

/* Returns MT_SUCCESS when ranks of a process that is stopped for longer than the timeout find each other afterwards. */
static mt_status outlive_a_stop(double timeout) {
    struct timespec stop = mti_timespec(1.25 * timeout);
    int pipes[2][2], code = 0;
    char byte;
    pid_t child;
    assert_int_equal(pipe(pipes[BEGUN]), 0);
    assert_int_equal(pipe(pipes[CONTINUED]), 0);
    child = fork();
    if (child == 0) {
        mt_launch_desc d;
        memset(&d, 0, sizeof d);
        d.ranks = 3;
        d.no_pinning = 1;
        d.timeout_s = timeout;
        _exit(-(int)mt_launch(&d, working_rank, pipes));
    }
    assert_true(child > 0);
    assert_int_equal(read(pipes[BEGUN][0], &byte, 1), 1);
    assert_int_equal(kill(child, SIGSTOP), 0);
    assert_int_equal(waitpid(child, &code, WUNTRACED), child);
    assert_true(WIFSTOPPED(code));
    nanosleep(&stop, NULL); /* a longer one is as good */
    assert_int_equal(kill(child, SIGCONT), 0);
    assert_int_equal(write(pipes[CONTINUED][1], "", 1), 1);
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_true(WIFEXITED(code));
    for (int i = 0; i < 2; i++) {
        close(pipes[i][0]);
        close(pipes[i][1]);
    }
    return (mt_status)-WEXITSTATUS(code);
}

/* The process is stopped for longer than the timeout. On a busy machine it may also run so slowly afterwards that it
   needs a longer timeout. A stop that counts as a wait is longer than each of them. */
static void test_stopped_process(void **state) {
    double timeout = 0.5;
    mt_status status = outlive_a_stop(timeout);
    (void)state;
    while (status == MT_ERR_TIMEOUT && timeout < 60) status = outlive_a_stop(timeout *= 2);
    assert_int_equal(status, MT_SUCCESS);
}

/* ---- a grid: 2 x tensor, 4 x data -------------------------------------------------------------------------------- */

/* Calls as in a training step: in the tensor group, in the data group, in the world. */
static mt_status grid_rank(mt_comm *world, void *user) {
    loss *l = (loss *)user;
    mt_context *ctx = new_context(world);
    mt_comm *tp = NULL, *data = NULL;
    int rank = mt_comm_rank(world), step;
    float x[COUNT] = {0};
    double start;
    mt_status status;
    meet(l);
    status = mt_comm_split(world, rank / 2, 0, &tp);
    MT_KEEP(status, mt_comm_split(world, rank % 2, 0, &data));
    start = mti_now();
    for (step = 0; step < 3 && status == MT_SUCCESS; step++) {
        if (rank == l->victim && step == 1) {
            status = be_lost(l, ctx);
            mt_context_destroy(ctx);
            return status; /* the groups are not destroyed */
        }
        status = mt_all_reduce(ctx, tp, x, x, COUNT, MT_F32, MT_SUM);
        if (status == MT_SUCCESS) status = mt_all_reduce(ctx, data, x, x, COUNT, MT_F32, MT_SUM);
        if (status == MT_SUCCESS) status = mt_barrier(ctx, world);
    }
    note(l, rank, world, status, start);
    mt_comm_destroy(data);
    mt_comm_destroy(tp);
    mt_context_destroy(ctx);
    return status;
}

static void lose_in_grid(loss *l) {
    int r;
    if (launch(l, grid_rank) == MT_SUCCESS) wrong(l, "the launch succeeds");
    for (r = 0; r < 8; r++) {
        int waits_for_it = r / 2 == l->victim / 2;
        mt_status direct = l->fault == STUCK ? MT_ERR_TIMEOUT : MT_ERR_PEER;
        if (r == l->victim) continue;
        if ((l->status[r] != MT_ERR_PEER && l->status[r] != MT_ERR_TIMEOUT) || (waits_for_it && l->status[r] != direct))
            wrong(l, "rank %d: %s: %s", r, mt_status_name(l->status[r]), l->said[r]);
        if (!strstr(l->said[r], "all_reduce(count 6, f32, sum) on \"world/") &&
            !strstr(l->said[r], "barrier on \"world\""))
            wrong(l, "rank %d: %s", r, l->said[r]);
        if (l->status[r] == MT_ERR_TIMEOUT && longest_wait(l) < 0.99 * l->timeout)
            wrong(l, "rank %d: a timeout after %.2f s", r, longest_wait(l));
    }
}

static void test_grid(void **state) {
    int victim, fault;
    (void)state;
    for (victim = 0; victim < 8; victim++)
        for (fault = 0; fault < FAULTS; fault++) lose_in_time(new_loss(fault, 8, victim), lose_in_grid);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gone),
                                       cmocka_unit_test(test_stuck),
                                       cmocka_unit_test(test_lost_in_a_group),
                                       cmocka_unit_test(test_grid),
                                       cmocka_unit_test(test_launch_does_not_wait_in_silence),
                                       cmocka_unit_test(test_launch_gives_up),
                                       cmocka_unit_test(test_launch_does_not_give_up_early),
                                       cmocka_unit_test(test_cancelled),
                                       cmocka_unit_test(test_stopped_process)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
