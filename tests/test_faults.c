/* test_faults.c - tests mistakes that one rank, or two ranks together, can make: every rank gets the right status
   without a wait for the timeout, with a message that names ranks, calls and values, and no call is done by half. */

#include <pthread.h>

/* A pthread_create that fails after some threads. */
static int threads_allowed = 1000;
static int scarce_create(pthread_t *thread, const pthread_attr_t *attr, void *(*f)(void *), void *arg) {
    if (threads_allowed-- <= 0) return 11;
    return pthread_create(thread, attr, f, arg);
}
#define pthread_create scarce_create

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"
#include "mt_test.h"

#define MAX_RANKS 4
#define TEXT 1200
#define SHORT 0.2 /* the first timeout where one is waited for, and the longest that is tried */
#define LONGEST 60.0

/* ---- one fault: a function per rank, what it returned, what was said --------------------------------------------- */

typedef struct fault {
    int kind;
    int last;  /* this rank waits until the others have noted how their calls ended; -1: no rank does */
    int noted; /* ranks that have; not over MPI */
    mt_status status[MAX_RANKS];
    char text[MAX_RANKS][TEXT];  /* the context's last error */
    char text2[MAX_RANKS][TEXT]; /* the communicator's last error, where it is checked */
    double seconds[MAX_RANKS];
    char lines[MAX_RANKS + 1][TEXT]; /* the launcher's messages */
    int line_count;
} fault;

static void nap(double seconds) {
    struct timespec t = mti_timespec(seconds);
    nanosleep(&t, NULL);
}

static void keep_line(void *user, mt_log_level level, const char *message) {
    fault *f = (fault *)user;
    (void)level;
    if (f->line_count <= MAX_RANKS) snprintf(f->lines[f->line_count++], TEXT, "%s", message);
}

static mt_context *new_context(mt_comm *world) {
    mt_context_desc d;
    mt_context *ctx = NULL;
    memset(&d, 0, sizeof d);
    d.arena_bytes = 4096;
    return mt_context_create(world, &d, &ctx) == MT_SUCCESS ? ctx : NULL;
}

static mt_status launch_last(fault *f, int kind, int last, int ranks, double timeout, mt_rank_function function) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    memset(f, 0, sizeof *f);
    f->kind = kind;
    f->last = last;
    d.ranks = ranks;
    d.timeout_s = timeout;
    d.logger.log = keep_line;
    d.logger.user = f;
    return test_run(&d, function, f, sizeof *f);
}

static mt_status launch_fault(fault *f, int kind, int ranks, double timeout, mt_rank_function function) {
    return launch_last(f, kind, -1, ranks, timeout, function);
}

#if TEST_OVER_MPI
static void tell(fault *f) { MPI_Send(NULL, 0, MPI_BYTE, f->last, 1, MPI_COMM_WORLD); }

static void outlast(fault *f, int others) {
    (void)f;
    while (others-- > 0) MPI_Recv(NULL, 0, MPI_BYTE, MPI_ANY_SOURCE, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}
#else
static void tell(fault *f) { __atomic_add_fetch(&f->noted, 1, __ATOMIC_RELEASE); }

/* The last rank: waits until so many others have noted how their calls ended. */
static void outlast(fault *f, int others) {
    while (__atomic_load_n(&f->noted, __ATOMIC_ACQUIRE) < others) nap(0.001);
}
#endif

/* Records how a rank's faulty call ended. */
static void note(fault *f, mt_context *ctx, mt_comm *comm, mt_status status, double start) {
    int rank = mt_comm_rank(ctx->world);
    f->status[rank] = status;
    f->seconds[rank] = mti_now() - start;
    snprintf(f->text[rank], TEXT, "%s", mt_last_error(ctx));
    snprintf(f->text2[rank], TEXT, "%s", mt_comm_last_error(comm));
    if (f->last >= 0 && rank != f->last) tell(f);
}

/* Returns 1 when the ranks before `ranks` have timed out, and said this. On a busy machine not only the rank that a
   test wants to be late may be: then a test tries again with twice the timeout. */
static int have_timed_out(const fault *f, int ranks, const char *said) {
    for (int r = 0; r < ranks; r++)
        if (f->status[r] != MT_ERR_TIMEOUT || !strstr(f->text[r], said)) return 0;
    return 1;
}

static void assert_said(const char *text, const char *part) {
    const char *fault;
    int label = 0;
    if (!strstr(text, part)) fail_msg("\"%s\" does not contain \"%s\"", text, part);
    sscanf(text, "rank %*d of %*d: %*[A-Z_]: %n", &label); /* of mt_launch */
    fault = test_message_fault(text + label);
    if (fault) fail_msg("\"%s\" is not one sentence: %s", text, fault);
}

/* ---- different calls --------------------------------------------------------------------------------------------- */

enum {
    OTHER_COLLECTIVE,
    OTHER_COUNT,
    OTHER_DTYPE,
    OTHER_OP,
    OTHER_ROOT,
    OTHER_SCATTER,
    OTHER_BLOCKS,
    OTHER_SUMS,
    OTHER_ALL_TO_ALL,
    OTHER_SENT,
    OTHER_RECEIVED,
    BARRIER_INSTEAD,
    SPLIT_INSTEAD
};

static mt_status differ(mt_context *ctx, mt_comm *comm, int kind, void *a, void *b) {
    size_t sends[4] = {4, 4, 4, 4}, recvs[4] = {4, 4, 4, 4};
    mt_comm *out;
    int odd = mt_comm_rank(comm) == 1;
    switch (kind) {
    case OTHER_COLLECTIVE:
        return odd ? mt_all_gather(ctx, comm, a, b, 4, MT_F32) : mt_all_reduce(ctx, comm, a, b, 8, MT_F32, MT_SUM);
    case OTHER_COUNT: return mt_all_reduce(ctx, comm, a, a, odd ? 8 : 7, MT_F32, MT_SUM);
    case OTHER_DTYPE: return mt_all_reduce(ctx, comm, a, b, 8, odd ? MT_I32 : MT_F32, MT_SUM);
    case OTHER_OP: return mt_all_reduce(ctx, comm, a, b, 8, MT_F32, odd ? MT_MAX : MT_SUM);
    case OTHER_ROOT: return mt_broadcast(ctx, comm, a, b, 8, MT_F32, odd ? 1 : 0);
    case OTHER_SCATTER:
        return odd ? mt_reduce_scatter(ctx, comm, a, b, 2, MT_F32, MT_SUM) : mt_all_gather(ctx, comm, a, b, 2, MT_F32);
    case OTHER_BLOCKS:
        return mt_gather_ranks_from_sequence_region(ctx, comm, mt_tensor_f32(a, 1, 4),
                                                    mt_tensor_f32(b, mt_comm_size(comm), 4), odd ? 1 : 0, 1);
    case OTHER_SUMS:
        return mt_reduce_scatter_ranks_to_sequence_region(ctx, comm, mt_tensor_f32(a, mt_comm_size(comm), 4),
                                                          mt_tensor_f32(b, 1, 4), odd ? 1 : 0, 1);
    case OTHER_ALL_TO_ALL: return mt_all_to_all(ctx, comm, a, b, odd ? 3 : 2, MT_F32);
    case OTHER_SENT:
        if (odd) sends[0] = 3;
        return mt_all_to_all_v(ctx, comm, a, sends, b, recvs, MT_F32);
    case OTHER_RECEIVED:
        if (odd) recvs[0] = 5;
        return mt_all_to_all_v(ctx, comm, a, sends, b, recvs, MT_F32);
    case BARRIER_INSTEAD: return odd ? mt_barrier(ctx, comm) : mt_all_reduce(ctx, comm, a, b, 0, MT_F32, MT_SUM);
    default: return odd ? mt_comm_split(comm, 0, 0, &out) : mt_barrier(ctx, comm);
    }
}

static mt_status differ_rank(mt_comm *world, void *user) {
    fault *f = (fault *)user;
    mt_context *ctx = new_context(world);
    float a[32], b[32];
    double start = mti_now();
    int i, touched = 0;
    mt_status status, later;
    for (i = 0; i < 32; i++) a[i] = b[i] = 5;
    status = differ(ctx, world, f->kind, a, b);
    note(f, ctx, world, status, start);
    for (i = 0; i < 32; i++) touched |= a[i] != 5 || b[i] != 5;
    for (i = 0; i < MT_COLLECTIVE_COUNT; i++) touched |= mt_comm_ledger(world).calls[i] != 0;
    later = mt_barrier(ctx, world); /* after the fault, the communicator can only be destroyed */
    mt_context_destroy(ctx);
    CHECK(!touched);
    CHECK(later == MT_ERR_PEER);
    return status;
}

static void test_different_calls(void **state) {
    static const char *said[][2] = {
        {"all_reduce on \"world\"", "rank 1 called all_gather(count 4, f32)"},
        {"called all_reduce(count 7, f32, sum)", "rank 1 called all_reduce(count 8, f32, sum)"},
        {"called all_reduce(count 8, f32, sum)", "rank 1 called all_reduce(count 8, i32, sum)"},
        {"called all_reduce(count 8, f32, sum)", "rank 1 called all_reduce(count 8, f32, max)"},
        {"called broadcast(count 8, f32, root 0)", "rank 1 called broadcast(count 8, f32, root 1)"},
        {"called all_gather(count 2, f32)", "rank 1 called reduce_scatter(count 2, f32, sum)"},
        {"called all_gather(count 4, f32, block of rank 0)", "rank 1 called all_gather(count 4, f32, block of rank 1)"},
        {"called reduce_scatter(count 4, f32, sum, block of rank 0)",
         "rank 1 called reduce_scatter(count 4, f32, sum, block of rank 1)"},
        {"called all_to_all(count 2, f32)", "rank 1 called all_to_all(count 3, f32)"},
        {"all_to_all_v(f32) on \"world\"", "rank 1 sends 3 elements to rank 0, which receives 4"},
        {"all_to_all_v(f32) on \"world\"", "rank 0 sends 4 elements to rank 1, which receives 5"},
        {"called all_reduce(count 0, f32, sum)", "rank 1 called barrier"},
        {"called barrier", "rank 1 called split"},
    };
    static const char *who[] = {"rank 0 called", "ranks 0, 2 called", "ranks 0, 2, 3 called"};
    int kind, ranks, r;
    (void)state;
    for (kind = OTHER_COLLECTIVE; kind <= SPLIT_INSTEAD; kind++) {
        for (ranks = 2; ranks <= 4; ranks++) {
            fault f;
            assert_int_equal(launch_fault(&f, kind, ranks, TEST_NEVER_OVER, differ_rank), MT_ERR_MISMATCH);
            for (r = 0; r < ranks; r++) {
                assert_int_equal(f.status[r], MT_ERR_MISMATCH);
                assert_string_equal(f.text2[r], f.text2[0]);
                assert_said(f.text2[r], said[kind][0]);
                assert_said(f.text2[r], said[kind][1]);
                if (kind != OTHER_SENT && kind != OTHER_RECEIVED) assert_said(f.text2[r], who[ranks - 2]);
            }
        }
    }
}

static void test_mismatch_sentence(void **state) {
    fault f;
    (void)state;
    launch_fault(&f, OTHER_COLLECTIVE, 2, TEST_NEVER_OVER, differ_rank);
    assert_string_equal(f.text[0], "all_reduce on \"world\" (2 ranks): rank 0 called all_reduce(count 8, f32, sum), "
                                   "rank 1 called all_gather(count 4, f32)");
}

/* ---- ranks that do not come -------------------------------------------------------------------------------------- */

enum { NEVER, LATE, RETURNS, FAILS, RETURNS_LEAVING_SUBGROUP, DESTROYS, FAILS_ITS_ARGUMENTS, NEVER_EXCHANGES };

/* Rank 2 of 3 does not take part in the second call, which is on `group`. */
static mt_status absent_call(fault *f, mt_context *ctx, mt_comm *group, mt_comm **sub, int rank) {
    static const size_t one[3] = {1, 1, 1};
    float x[4] = {1, 2, 3, 4}, y[4];
    double start = mti_now();
    mt_status status;
    if (rank == 2) {
        switch (f->kind) {
        case NEVER:
        case NEVER_EXCHANGES: outlast(f, 2); return MT_SUCCESS;
        case LATE: outlast(f, 2); break;
        case RETURNS:
        case RETURNS_LEAVING_SUBGROUP: return MT_SUCCESS;
        case FAILS: return mt_fail(ctx, MT_ERR_DATA, "loss is 17, which is no good");
        case DESTROYS:
            mt_comm_destroy(*sub);
            *sub = NULL;
            outlast(f, 2);
            return MT_SUCCESS;
        default: return mt_all_reduce(ctx, group, x, x, 4, MT_F32, (mt_op)42);
        }
    }
    if (f->kind == NEVER_EXCHANGES) status = mt_all_to_all_v(ctx, group, x, one, y, one, MT_F32);
    else status = mt_all_reduce(ctx, group, x, x, 4, MT_F32, MT_SUM);
    note(f, ctx, group, status, start);
    CHECK(x[0] == 1 && x[3] == 4);
    return status;
}

static mt_status absent_rank(mt_comm *world, void *user) {
    fault *f = (fault *)user;
    mt_context *ctx = new_context(world);
    mt_comm *sub = NULL, *group = world;
    mt_status status = mt_barrier(ctx, world);
    if (f->kind == RETURNS_LEAVING_SUBGROUP || f->kind == DESTROYS) {
        MT_KEEP(status, mt_comm_split(world, 0, 0, &sub));
        MT_KEEP(status, mt_barrier(ctx, sub));
        mt_comm_set_name(sub, "tensor");
        group = sub;
    }
    MT_KEEP(status, absent_call(f, ctx, group, &sub, mt_comm_rank(world)));
    mt_context_destroy(ctx);
    return status; /* sub is not destroyed */
}

/* Returns the timeout with which only rank 2 was late. */
static double wait_for_rank_2(fault *f, int kind) {
    double timeout = SHORT;
    for (;; timeout *= 2) {
        assert_int_equal(launch_last(f, kind, 2, 3, timeout, absent_rank), MT_ERR_TIMEOUT);
        if (have_timed_out(f, 2, " s for rank 2, whose last call here was barrier") || 2 * timeout > LONGEST) break;
    }
    return timeout;
}

/* call: what the other ranks call meanwhile */
static void never_comes(int kind, const char *call) {
    char said[TEXT];
    fault f;
    double timeout = wait_for_rank_2(&f, kind);
    int r;
    snprintf(said, sizeof said, "%s on \"world\" (3 ranks): waited %.2f s for rank 2, whose last call here was barrier",
             call, timeout);
    for (r = 0; r < 2; r++) {
        assert_int_equal(f.status[r], MT_ERR_TIMEOUT);
        assert_string_equal(f.text[r], said);
    }
    /* the one that has waited so long tells the other, which may have begun to wait later */
    assert_true(f.seconds[0] > 0.99 * timeout || f.seconds[1] > 0.99 * timeout);
}

static void test_never_comes(void **state) {
    (void)state;
    never_comes(NEVER, "all_reduce(count 4, f32, sum)");
    never_comes(NEVER_EXCHANGES, "all_to_all_v(f32)");
}

static void test_comes_late(void **state) {
    fault f;
    (void)state;
    wait_for_rank_2(&f, LATE);
    assert_int_equal(f.status[0], MT_ERR_TIMEOUT);
    assert_int_equal(f.status[1], MT_ERR_TIMEOUT);
    assert_int_equal(f.status[2], MT_ERR_PEER);
    assert_said(f.text[2], "rank 2 calls after this communicator failed");
    assert_said(f.text[2], " s for rank 2");
}

static void assert_peer_error(fault *f, int kind, mt_status launch, const char *said) {
    int r;
    assert_int_equal(launch_last(f, kind, kind == DESTROYS ? 2 : -1, 3, TEST_NEVER_OVER, absent_rank), launch);
    for (r = 0; r < 2; r++) {
        assert_int_equal(f->status[r], MT_ERR_PEER);
        assert_said(f->text[r], said);
        assert_said(f->text[r], "all_reduce(count 4, f32, sum)");
    }
}

static void test_leaves(void **state) {
    fault f;
    (void)state;
    assert_peer_error(&f, RETURNS, MT_ERR_PEER, "on \"world\" (3 ranks): rank 2 returned from its function");
    assert_int_equal(f.line_count, 2);
    assert_said(f.lines[0], "rank 0 of 3: MT_ERR_PEER: all_reduce");
    assert_peer_error(&f, RETURNS_LEAVING_SUBGROUP, MT_ERR_PEER, "on \"tensor\" (3 ranks): rank 2 returned from its");
    assert_peer_error(&f, DESTROYS, MT_ERR_PEER, "on \"tensor\" (3 ranks): rank 2 has left the group");
    assert_peer_error(&f, FAILS, MT_ERR_DATA, "rank 2 failed with MT_ERR_DATA (loss is 17, which is no good)");
    assert_int_equal(f.line_count, 3);
    assert_string_equal(f.lines[0],
                        "rank 2 of 3: MT_ERR_DATA: loss is 17, which is no good"); /* the cause is reported first */
    assert_peer_error(&f, FAILS_ITS_ARGUMENTS, MT_ERR_ARGUMENT,
                      "rank 2 failed with MT_ERR_ARGUMENT (mt_all_reduce: op is 42");
}

/* A chain: rank 0 waits for rank 1 in one group, rank 1 for rank 2 in another, and rank 2 returns. */
static mt_status chain_rank(mt_comm *world, void *user) {
    fault *f = (fault *)user;
    mt_context *ctx = new_context(world);
    mt_comm *low = NULL, *high = NULL;
    int rank = mt_comm_rank(world);
    double start = mti_now();
    mt_status status = mt_comm_split(world, rank < 2 ? 0 : -1, 0, &low);
    MT_KEEP(status, mt_comm_split(world, rank > 0 ? 0 : -1, 0, &high));
    if (status == MT_SUCCESS && rank == 0) status = mt_barrier(ctx, low);
    if (status == MT_SUCCESS && rank == 1) status = mt_barrier(ctx, high);
    note(f, ctx, world, status, start);
    mt_context_destroy(ctx);
    return status;
}

static void test_chain(void **state) {
    fault f;
    (void)state;
    assert_int_equal(launch_fault(&f, 0, 3, TEST_NEVER_OVER, chain_rank), MT_ERR_PEER);
    assert_int_equal(f.status[0], MT_ERR_PEER);
    assert_int_equal(f.status[1], MT_ERR_PEER);
    assert_int_equal(f.status[2], MT_SUCCESS);
    assert_said(f.text[1], "rank 1 returned from its function"); /* rank 2 of the world is rank 1 of the group */
    assert_said(f.text[0], "rank 1 failed with MT_ERR_PEER (barrier");
}

/* Two ranks wait in different calls for a third rank that never makes a call. */
static mt_status two_wait_rank(mt_comm *world, void *user) {
    fault *f = (fault *)user;
    mt_context *ctx = new_context(world);
    float x[8] = {0};
    int rank = mt_comm_rank(world);
    double start = mti_now();
    mt_status status = MT_SUCCESS;
    if (rank == 0) status = mt_all_reduce(ctx, world, x, x, 4, MT_F32, MT_SUM);
    if (rank == 1) status = mt_broadcast(ctx, world, x, x, 6, MT_F32, 2);
    if (rank == 2) outlast(f, 2);
    note(f, ctx, world, status, start);
    mt_context_destroy(ctx);
    return status;
}

static void test_two_wait(void **state) {
    fault f;
    (void)state;
    for (double timeout = SHORT; timeout <= LONGEST; timeout *= 2) {
        assert_int_equal(launch_last(&f, 0, 2, 3, timeout, two_wait_rank), MT_ERR_TIMEOUT);
        if (have_timed_out(&f, 2, "broadcast(") && have_timed_out(&f, 2, "all_reduce(")) break;
    }
    assert_int_equal(f.status[0], MT_ERR_TIMEOUT);
    assert_int_equal(f.status[1], MT_ERR_TIMEOUT);
    if (!TEST_OVER_MESSAGES) assert_string_equal(f.text[0], f.text[1]);
    assert_said(f.text[0], "all_reduce(count 4, f32, sum)");
    assert_said(f.text[0], "broadcast(count 6, f32, root 2)");
    assert_said(f.text[0], "for rank 2, which has not called anything here yet");
}

/* ---- point to point ---------------------------------------------------------------------------------------------- */

enum {
    P2P_COUNT,
    P2P_DTYPE,
    P2P_NO_SEND,
    P2P_NO_RECV,
    P2P_COLLECTIVE,       /* the receiver calls a collective */
    P2P_COLLECTIVE_FIRST, /* it is in the collective when the message is sent */
    P2P_COLLECTIVE_LATE,  /* it comes to the collective when the message has been sent */
    P2P_COLLECTIVE_RECV,  /* it should send, and is in the collective when the other begins to wait */
    P2P_RECV_FIRST,       /* it should send, and comes to the collective when the other waits */
    P2P_LEFT,
    P2P_RING_BROKEN
};

static mt_status p2p_fault_call(fault *f, mt_context *ctx, mt_comm *w, int rank, float *a, float *b) {
    if (f->kind == (rank == 0 ? P2P_COLLECTIVE_FIRST : P2P_COLLECTIVE_LATE)) nap(0.05);
    if (rank == 1 && f->kind == P2P_RECV_FIRST) nap(0.05);
    if (rank == 0 && f->kind == P2P_COLLECTIVE_RECV) nap(0.05);
    if (rank == 0) {
        switch (f->kind) {
        case P2P_COLLECTIVE_RECV:
        case P2P_RECV_FIRST:
        case P2P_NO_SEND:
        case P2P_LEFT: return mt_recv(ctx, w, b, 4, MT_F32, 1);
        case P2P_RING_BROKEN: return mt_send_recv(ctx, w, a, 4, 1, b, 4, 1, MT_F32);
        default: return mt_send(ctx, w, a, 4, MT_F32, 1);
        }
    }
    switch (f->kind) {
    case P2P_COUNT: return mt_recv(ctx, w, b, 5, MT_F32, 0);
    case P2P_DTYPE: return mt_recv(ctx, w, b, 4, MT_I32, 0);
    case P2P_COLLECTIVE:
    case P2P_COLLECTIVE_FIRST:
    case P2P_COLLECTIVE_LATE:
    case P2P_COLLECTIVE_RECV:
    case P2P_RECV_FIRST: return mt_all_reduce(ctx, w, a, b, 4, MT_F32, MT_SUM);
    case P2P_RING_BROKEN: return mt_send_recv(ctx, w, a, 3, 0, b, 4, 0, MT_F32);
    case P2P_LEFT: return MT_SUCCESS;
    default: outlast(f, 1); return MT_SUCCESS;
    }
}

static mt_status p2p_fault_rank(mt_comm *world, void *user) {
    fault *f = (fault *)user;
    mt_context *ctx = new_context(world);
    float a[8], b[8];
    double start = mti_now();
    int i, touched = 0, rank = mt_comm_rank(world);
    mt_status status;
    for (i = 0; i < 8; i++) a[i] = b[i] = 5;
    status = p2p_fault_call(f, ctx, world, rank, a, b);
    note(f, ctx, world, status, start);
    for (i = 0; i < 8; i++) touched |= a[i] != 5 || (b[i] != 5 && f->kind != P2P_RING_BROKEN);
    touched |= mt_comm_ledger(world).calls[MT_SEND] != 0 || mt_comm_ledger(world).calls[MT_RECV] != 0;
    mt_context_destroy(ctx);
    CHECK(!touched);
    return status;
}

static void launch_p2p(fault *f, int kind, double timeout) {
    launch_last(f, kind, kind == P2P_NO_SEND || kind == P2P_NO_RECV ? 1 : -1, 2, timeout, p2p_fault_rank);
}

static void check_p2p(const fault *f, mt_status a, mt_status b, const char *said, const char *also) {
    assert_int_equal(f->status[0], a);
    assert_int_equal(f->status[1], b);
    assert_said(f->text[0], said);
    assert_said(f->text[0], also);
    /* two processes that time out at the same moment have different messages */
    if (b != MT_SUCCESS && !(TEST_OVER_MESSAGES && b == MT_ERR_TIMEOUT)) assert_string_equal(f->text[0], f->text[1]);
}

static void assert_p2p(int kind, double timeout, mt_status a, mt_status b, const char *said, const char *also) {
    fault f;
    launch_p2p(&f, kind, timeout);
    check_p2p(&f, a, b, said, also);
}

/* A rank is in a collective, and another one waits to send to it, or for a message of it. Neither can go on. Threads
   see it, and do not wait for the timeout. Processes do not see it. */
static void assert_apart(int kind, const char *said) {
    const char *also = "rank 1 called all_reduce(count 4, f32, sum)";
    fault f;
    if (!TEST_OVER_MESSAGES) {
        assert_p2p(kind, TEST_NEVER_OVER, MT_ERR_MISMATCH, MT_ERR_MISMATCH, said, also);
        return;
    }
    also = "all_reduce(count 4, f32, sum)";
    for (double timeout = SHORT; timeout <= LONGEST; timeout *= 2) {
        launch_p2p(&f, kind, timeout);
        if (have_timed_out(&f, 2, "all_reduce(") && strstr(f.text[0], said)) break;
    }
    check_p2p(&f, MT_ERR_TIMEOUT, MT_ERR_TIMEOUT, said, also);
}

static void test_p2p_faults(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 20; i++) {
        assert_p2p(P2P_COUNT, TEST_NEVER_OVER, MT_ERR_MISMATCH, MT_ERR_MISMATCH,
                   "rank 0 called send(count 4, f32, to rank 1)", "rank 1 called recv(count 5, f32, from rank 0)");
        assert_p2p(P2P_DTYPE, TEST_NEVER_OVER, MT_ERR_MISMATCH, MT_ERR_MISMATCH,
                   "rank 0 called send(count 4, f32, to rank 1)", "rank 1 called recv(count 4, i32, from rank 0)");
        assert_p2p(P2P_RING_BROKEN, TEST_NEVER_OVER, MT_ERR_MISMATCH, MT_ERR_MISMATCH,
                   "rank 1 called send_recv(count 3 to rank 0, count 4 from rank 0, f32)",
                   "rank 0 called send_recv(count 4 to rank 1, count 4 from rank 1, f32)");
        assert_p2p(P2P_LEFT, TEST_NEVER_OVER, MT_ERR_PEER, MT_SUCCESS,
                   "recv(count 4, f32, from rank 1) on \"world\" (2 ranks): ", "rank 1 returned from its function");
    }
    assert_p2p(P2P_NO_SEND, SHORT, MT_ERR_TIMEOUT, MT_SUCCESS,
               "recv(count 4, f32, from rank 1) on \"world\" (2 ranks): ",
               "waited 0.20 s for rank 1, which has not called anything here yet");
    assert_p2p(P2P_NO_RECV, SHORT, MT_ERR_TIMEOUT, MT_SUCCESS, "send(count 4, f32, to rank 1)",
               "waited 0.20 s for rank 1");
    for (i = P2P_COLLECTIVE; i <= P2P_COLLECTIVE_LATE; i++) assert_apart(i, "send(count 4, f32, to rank 1)");
    for (i = P2P_COLLECTIVE_RECV; i <= P2P_RECV_FIRST; i++) assert_apart(i, "recv(count 4, f32, from rank 1)");
}

/* Two ranks can still exchange messages after a third has returned without an error. */
static mt_status third_leaves_rank(mt_comm *world, void *user) {
    mt_context *ctx = new_context(world);
    int rank = mt_comm_rank(world), k;
    float x = 1;
    mt_status status = MT_SUCCESS;
    (void)user;
    for (k = 0; rank < 2 && k < 50; k++) {
        if (k == 10) nap(0.02);
        MT_KEEP(status, mt_send_recv(ctx, world, &rank, 1, 1 - rank, &x, 1, 1 - rank, MT_I32));
    }
    mt_context_destroy(ctx);
    return status;
}

static void test_third_leaves(void **state) {
    fault f;
    (void)state;
    assert_int_equal(launch_fault(&f, 0, 3, TEST_NEVER_OVER, third_leaves_rank), MT_SUCCESS);
    assert_int_equal(f.line_count, 0);
}

/* ---- arguments, one by one --------------------------------------------------------------------------------------- */

static mt_context *C;
static mt_comm *W; /* rank 1 of 3, whose peers never come: a wrong call must return without waiting */
static float A[64], B[64];

#define REFUSED(expected, part, call)                                                                                  \
    do {                                                                                                               \
        assert_int_equal((call), (expected));                                                                          \
        assert_said(mt_last_error(C), part);                                                                           \
        assert_string_equal(mt_last_error(C), mt_comm_last_error(W));                                                  \
    } while (0)

static void check_collective_arguments(void) {
    size_t huge = SIZE_MAX / 3;
    REFUSED(MT_ERR_ARGUMENT, "mt_all_reduce: sendbuf is NULL, count is 4",
            mt_all_reduce(C, W, NULL, B, 4, MT_F32, MT_SUM));
    REFUSED(MT_ERR_ARGUMENT, "mt_all_reduce: recvbuf is NULL, count is 4",
            mt_all_reduce(C, W, A, NULL, 4, MT_F32, MT_SUM));
    REFUSED(MT_ERR_DTYPE, "mt_all_reduce: dtype is 77, must be MT_F32, MT_BF16, MT_F16, MT_I32 or MT_U8",
            mt_all_reduce(C, W, A, B, 4, (mt_dtype)77, MT_SUM));
    REFUSED(MT_ERR_ARGUMENT, "to its 2-byte elements", mt_all_reduce(C, W, (char *)A + 1, B, 4, MT_BF16, MT_SUM));
    REFUSED(MT_ERR_DTYPE, "mt_all_reduce: u8", mt_all_reduce(C, W, A, B, 4, MT_U8, MT_SUM));
    REFUSED(MT_ERR_DTYPE, "mt_reduce_scatter: u8", mt_reduce_scatter(C, W, A, B, 4, MT_U8, MT_MAX));
    REFUSED(MT_ERR_ARGUMENT, "mt_all_reduce: op is 5", mt_all_reduce(C, W, A, B, 4, MT_F32, (mt_op)5));
    REFUSED(MT_ERR_ARGUMENT, "mt_broadcast: root is 3", mt_broadcast(C, W, A, B, 4, MT_F32, 3));
    REFUSED(MT_ERR_ARGUMENT, "mt_broadcast: root is -1", mt_broadcast(C, W, A, B, 4, MT_F32, -1));
    REFUSED(MT_ERR_ARGUMENT, "mt_broadcast: sendbuf is NULL", mt_broadcast(C, W, NULL, B, 4, MT_F32, 1));
    REFUSED(MT_ERR_ARGUMENT, "mt_broadcast: recvbuf is NULL", mt_broadcast(C, W, A, NULL, 4, MT_F32, 0));
    REFUSED(MT_ERR_ARGUMENT, "mt_all_gather: sendbuf is NULL", mt_all_gather(C, W, NULL, B, 4, MT_F32));
    REFUSED(MT_ERR_ARGUMENT, "mt_all_gather: recvbuf is NULL", mt_all_gather(C, W, A, NULL, 4, MT_F32));
    REFUSED(MT_ERR_ARGUMENT, "mt_reduce_scatter: sendbuf is NULL", mt_reduce_scatter(C, W, NULL, B, 4, MT_F32, MT_SUM));
    REFUSED(MT_ERR_ARGUMENT, "mt_reduce_scatter: recvbuf is NULL", mt_reduce_scatter(C, W, A, NULL, 4, MT_F32, MT_SUM));
    REFUSED(MT_ERR_ARGUMENT, "mt_all_reduce: count is 6148914691236517205",
            mt_all_reduce(C, W, A, B, huge, MT_F32, MT_SUM));
    REFUSED(MT_ERR_ARGUMENT, "mt_all_gather: count is 6148914691236517205", mt_all_gather(C, W, A, B, huge, MT_U8));
    REFUSED(MT_ERR_ARGUMENT, "mt_all_reduce: sendbuf", mt_all_reduce(C, W, A, A + 1, 4, MT_F32, MT_SUM));
    REFUSED(MT_ERR_ARGUMENT, "overlap", mt_all_gather(C, W, A, A, 4, MT_F32)); /* in place, rank 1 sends A + 4 */
    REFUSED(MT_ERR_ARGUMENT, "overlap", mt_reduce_scatter(C, W, A, A, 4, MT_F32, MT_SUM));
    REFUSED(MT_ERR_ARGUMENT, "overlap", mt_broadcast(C, W, A, A + 2, 4, MT_F32, 1));
    REFUSED(MT_ERR_ARGUMENT, "not aligned", mt_all_reduce(C, W, (char *)A + 1, B, 4, MT_F32, MT_SUM));
    REFUSED(MT_ERR_ARGUMENT, "mt_all_reduce: ctx is NULL",
            (mt_fail(C, MT_SUCCESS, "mt_all_reduce: ctx is NULL"), mt_all_reduce(NULL, W, A, B, 4, MT_F32, MT_SUM)));
    assert_int_equal(mt_all_reduce(NULL, NULL, A, B, 4, MT_F32, MT_SUM), MT_ERR_ARGUMENT);
    assert_int_equal(mt_all_reduce(C, NULL, A, B, 4, MT_F32, MT_SUM), MT_ERR_ARGUMENT);
    assert_said(mt_last_error(C), "mt_all_reduce: comm is NULL");
    assert_int_equal(mt_barrier(C, NULL), MT_ERR_ARGUMENT);
    assert_said(mt_last_error(C), "mt_barrier: comm is NULL");
}

static void check_p2p_arguments(void) {
    REFUSED(MT_ERR_ARGUMENT, "mt_send: dst is 3", mt_send(C, W, A, 4, MT_F32, 3));
    REFUSED(MT_ERR_ARGUMENT, "mt_send: dst is -1", mt_send(C, W, A, 4, MT_F32, -1));
    REFUSED(MT_ERR_ARGUMENT, "mt_send: dst is 1, this rank itself", mt_send(C, W, A, 4, MT_F32, 1));
    REFUSED(MT_ERR_ARGUMENT, "mt_recv: src is 7", mt_recv(C, W, A, 4, MT_F32, 7));
    REFUSED(MT_ERR_ARGUMENT, "mt_recv: src is 1, this rank itself", mt_recv(C, W, A, 4, MT_F32, 1));
    REFUSED(MT_ERR_ARGUMENT, "mt_send: sendbuf is NULL, count is 4", mt_send(C, W, NULL, 4, MT_F32, 0));
    REFUSED(MT_ERR_ARGUMENT, "mt_recv: recvbuf is NULL, count is 4", mt_recv(C, W, NULL, 4, MT_F32, 0));
    REFUSED(MT_ERR_DTYPE, "mt_send: dtype is -3", mt_send(C, W, A, 4, (mt_dtype)-3, 0));
    REFUSED(MT_ERR_ARGUMENT, "mt_send_recv: dst is -2", mt_send_recv(C, W, A, 4, -2, B, 4, 0, MT_F32));
    REFUSED(MT_ERR_ARGUMENT, "mt_send_recv: src is 3", mt_send_recv(C, W, A, 4, 0, B, 4, 3, MT_F32));
    REFUSED(MT_ERR_ARGUMENT, "(here 4 and 5)", mt_send_recv(C, W, A, 4, 1, B, 5, 1, MT_F32));
    REFUSED(MT_ERR_ARGUMENT, "this rank itself", mt_send_recv(C, W, A, 4, 1, B, 4, 0, MT_F32));
    REFUSED(MT_ERR_ARGUMENT, "mt_send_recv: sendbuf is NULL", mt_send_recv(C, W, NULL, 4, 0, B, 4, 0, MT_F32));
    REFUSED(MT_ERR_ARGUMENT, "overlap", mt_send_recv(C, W, A, 4, 0, A + 3, 4, 0, MT_F32));
    REFUSED(MT_ERR_ARGUMENT, "overlap", mt_send_recv(C, W, A, 4, 0, A, 4, 0, MT_F32));
    /* no peer in either direction */
    assert_int_equal(mt_send_recv(C, W, NULL, 9, -1, NULL, 9, -1, MT_F32), MT_SUCCESS);
    assert_int_equal(mt_send_recv(C, W, A, 4, 1, B, 4, 1, MT_F32), MT_SUCCESS); /* to the own rank */
    B[0] = B[1] = B[2] = B[3] = 7;
}

static void check_region_arguments(void) {
    mt_tensor x = mt_tensor_f32(A, 3, 4), y = mt_tensor_f32(B, 3, 12), t;
    REFUSED(MT_ERR_SHAPE, "mt_gather_from_tensor_region: x [3, 4] and y [3, 8] do not fit",
            mt_gather_from_tensor_region(C, W, x, mt_tensor_f32(B, 3, 8)));
    REFUSED(MT_ERR_SHAPE,
            "mt_scatter_to_tensor_region: x [3, 4] and y [3, 1] do not fit: y must be one of 3 equal parts",
            mt_scatter_to_tensor_region(C, W, x, mt_tensor_f32(B, 3, 1)));
    REFUSED(MT_ERR_SHAPE, "x [4, 4] and y [1, 4]",
            mt_scatter_to_sequence_region(C, W, mt_tensor_f32(A, 4, 4), mt_tensor_f32(B, 1, 4)));
    REFUSED(MT_ERR_SHAPE, "x [3, 4] and y [9, 5]", mt_gather_from_sequence_region(C, W, x, mt_tensor_f32(B, 9, 5)));
    REFUSED(MT_ERR_SHAPE, "x [3, 4] and y [2, 4]",
            mt_reduce_scatter_to_sequence_region(C, W, x, mt_tensor_f32(B, 2, 4)));
    t = x;
    t.ld = 5;
    REFUSED(MT_ERR_SHAPE, "must be contiguous, but its ld is 5", mt_reduce_from_tensor_region_forward(C, W, t));
    REFUSED(MT_ERR_SHAPE, "its ld is 5", mt_copy_to_tensor_region_forward(C, W, t));
    t = x;
    t.dtype = MT_I32;
    REFUSED(MT_ERR_DTYPE, "mt_gather_from_tensor_region: x is i32, y is f32", mt_gather_from_tensor_region(C, W, t, y));
    t.dtype = MT_U8;
    REFUSED(MT_ERR_DTYPE, "u8", mt_copy_to_tensor_region_backward(C, W, t));
    t = x;
    t.rows = -3;
    REFUSED(MT_ERR_SHAPE, "[-3, 4], which is not a valid shape", mt_copy_to_tensor_region_backward(C, W, t));
    t = x;
    t.data = NULL;
    REFUSED(MT_ERR_ARGUMENT, "the data of x [3, 4] is NULL", mt_gather_from_tensor_region(C, W, t, y));
    REFUSED(MT_ERR_MEMORY, "mt_arena_alloc",
            mt_gather_from_tensor_region(C, W, mt_tensor_f32(A, 1000, 4), mt_tensor_f32(B, 1000, 12)));
    assert_int_equal(mt_arena_mark(C), 0);
    assert_int_equal(mt_copy_to_tensor_region_forward(NULL, W, x), MT_ERR_ARGUMENT);
    assert_int_equal(mt_copy_to_tensor_region_backward(C, NULL, x), MT_ERR_ARGUMENT);
}

static void check_comm_arguments(void) {
    mt_comm *out = W, *comms[2] = {NULL, NULL};
    mt_comm *meta;
    mt_context *on_meta;
    mt_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = MT_DEVICE_META;
    assert_int_equal(mt_comm_create_local(0, 1, comms), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_local(1025, 1, comms), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_local(2, 1, NULL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_meta(0, 0, &out), MT_ERR_ARGUMENT);
    assert_null(out);
    assert_int_equal(mt_comm_create_meta(4, 4, &out), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_meta(4, -1, &out), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_meta(4, 1, NULL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_split(NULL, 0, 0, &out), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_split(W, 0, 0, NULL), MT_ERR_ARGUMENT);
    assert_said(mt_comm_last_error(W), "mt_comm_split: out is NULL");
    assert_int_equal(mt_comm_create_meta(4, 1, &meta), MT_SUCCESS);
    assert_int_equal(mt_comm_split(meta, 0, 0, &out), MT_ERR_ARGUMENT);
    assert_said(mt_comm_last_error(meta), "mt_comm_create_meta");
    assert_int_equal(mt_barrier(C, meta), MT_ERR_ARGUMENT);
    assert_said(mt_last_error(C), "mt_barrier: \"meta\" (4 ranks) is a meta communicator");
    assert_int_equal(mt_context_create(NULL, &d, &on_meta), MT_SUCCESS);
    /* a meta communicator checks arguments, too */
    assert_int_equal(mt_broadcast(on_meta, meta, A, B, 4, MT_F32, 4), MT_ERR_ARGUMENT);
    assert_said(mt_last_error(on_meta), "root is 4");
    mt_context_destroy(on_meta);
    mt_comm_destroy(meta);
}

static void test_arguments(void **state) {
    mt_comm *comms[3];
    mt_ledger ledger;
    int i;
    (void)state;
    for (i = 0; i < 64; i++) A[i] = 5, B[i] = 7;
    assert_int_equal(mt_comm_create_local(3, TEST_NEVER_OVER, comms), MT_SUCCESS);
    W = comms[1];
    C = new_context(W);
    check_collective_arguments();
    check_region_arguments();
    check_comm_arguments();
    ledger = mt_comm_ledger(W);
    for (i = 0; i < MT_COLLECTIVE_COUNT; i++) assert_int_equal(ledger.calls[i], 0);
    check_p2p_arguments();
    for (i = 0; i < 64; i++) assert_true(A[i] == 5 && B[i] == 7);
    assert_int_equal(mt_comm_rank(NULL), 0);
    assert_int_equal(mt_comm_size(NULL), 1);
    assert_string_equal(mt_comm_name(NULL), "");
    mt_comm_set_name(NULL, "x");
    mt_comm_ledger_reset(NULL);
    mt_context_destroy(C);
    for (i = 0; i < 3; i++) mt_comm_destroy(comms[i]);
}

/* ---- launch ------------------------------------------------------------------------------------------------------ */

static mt_status barrier_rank(mt_comm *world, void *user) {
    mt_context *ctx = new_context(world);
    mt_status status = mt_barrier(ctx, world);
    mt_comm_destroy(world); /* destroying the launcher's communicator has no effect */
    (void)user;
    mt_context_destroy(ctx);
    return status;
}

static mt_status silent_rank(mt_comm *world, void *user) {
    (void)user;
    return mt_comm_rank(world) == 1 ? MT_ERR_IO : MT_SUCCESS;
}

static void test_launch_arguments(void **state) {
    fault f;
    mt_launch_desc d;
    (void)state;
    memset(&d, 0, sizeof d);
    assert_int_equal(launch_fault(&f, 0, -1, 1, barrier_rank), MT_ERR_ARGUMENT);
    assert_string_equal(f.lines[0], "mt_launch: ranks is -1, must be from 1 to 1024");
    assert_int_equal(launch_fault(&f, 0, 1025, 1, barrier_rank), MT_ERR_ARGUMENT);
    assert_said(f.lines[0], "1025");
    assert_int_equal(launch_fault(&f, 0, 2, -0.5, barrier_rank), MT_ERR_ARGUMENT);
    assert_said(f.lines[0], "timeout_s is -0.5");
    assert_int_equal(launch_fault(&f, 0, 2, strtod("nan", NULL), barrier_rank), MT_ERR_ARGUMENT);
    assert_int_equal(launch_fault(&f, 0, 2, 1, NULL), MT_ERR_ARGUMENT);
    assert_said(f.lines[0], "rank_main is NULL");
    assert_int_equal(launch_fault(&f, 0, 2, TEST_NEVER_OVER, barrier_rank), MT_SUCCESS);
    assert_int_equal(launch_fault(&f, 0, 3, TEST_NEVER_OVER, silent_rank), MT_ERR_IO);
    assert_string_equal(f.lines[0], "rank 1 of 3: MT_ERR_IO: input/output error");
}

#if !TEST_OVER_MESSAGES
/* Ranks 1 and 2 refuse alike, rank 0 with other words, and rank 3 waits for them. */
static mt_status refusing_rank(mt_comm *world, void *user) {
    mt_context *ctx = new_context(world);
    int rank = mt_comm_rank(world);
    mt_status status = rank == 3 ? mt_barrier(ctx, world) : mt_fail(ctx, MT_ERR_SHAPE, "hidden is %d", rank ? 5 : 4);
    (void)user;
    mt_context_destroy(ctx);
    return status;
}

static void test_a_refusal_is_reported_once(void **state) {
    fault f;
    (void)state;
    assert_int_equal(launch_fault(&f, 0, 4, TEST_NEVER_OVER, refusing_rank), MT_ERR_SHAPE);
    assert_string_equal(f.lines[0], "rank 0 of 4: MT_ERR_SHAPE: hidden is 4");
    assert_string_equal(f.lines[1], "rank 1 of 4: MT_ERR_SHAPE: hidden is 5 (1 more rank with the same error)");
    assert_said(f.lines[2], "rank 3 of 4: MT_ERR_PEER");
    assert_string_equal(f.lines[3], "");
}

static void test_no_threads(void **state) {
    fault f;
    int allowed;
    (void)state;
    for (allowed = 0; allowed < 3; allowed++) {
        threads_allowed = allowed;
        assert_int_equal(launch_fault(&f, 0, 3, TEST_NEVER_OVER, barrier_rank), MT_ERR_SYSTEM);
        assert_said(f.lines[0], "MT_ERR_SYSTEM: mt_launch: the system gave no thread for rank");
        assert_int_equal(f.line_count, 3);
    }
    threads_allowed = 1000;
}

static void add_range(void *data, int thread, int64_t first, int64_t last) {
    (void)thread;
    __atomic_add_fetch((int64_t *)data, (last - first) * (first + last - 1) / 2, __ATOMIC_RELAXED);
}

/* When the system gives no more threads, the calling thread computes what is left. */
static void test_no_helper_threads(void **state) {
    int allowed;
    (void)state;
    for (allowed = 0; allowed < 4; allowed++) {
        mt_context_desc d;
        mt_context *ctx;
        int64_t sum = 0;
        memset(&d, 0, sizeof d);
        d.threads = 4;
        ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
        threads_allowed = allowed;
        mt_parallel_for(ctx, 1000, 1, add_range, &sum);
        mt_parallel_for(ctx, 1000, 1, add_range, &sum);
        threads_allowed = 1000;
        assert_int_equal(sum, 999 * 1000);
        mt_context_destroy(ctx);
    }
}
#endif

/* ---- leaving in every order, without a launcher ------------------------------------------------------------------ */

typedef struct seat {
    mt_comm *comm;
    mt_status status;
    char text[TEXT];
} seat;

static void *sit(void *user) {
    seat *s = (seat *)user;
    mt_context *ctx = new_context(s->comm);
    s->status = mt_barrier(ctx, s->comm);
    snprintf(s->text, TEXT, "%s", mt_last_error(ctx));
    mt_context_destroy(ctx);
    mt_comm_destroy(s->comm);
    return NULL;
}

static void test_leaving_without_launcher(void **state) {
    int leaver, r;
    (void)state;
    for (leaver = 0; leaver < 3; leaver++) {
        mt_comm *comms[3];
        pthread_t thread[3];
        seat s[3];
        assert_int_equal(mt_comm_create_local(3, TEST_NEVER_OVER, comms), MT_SUCCESS);
        for (r = 0; r < 3; r++) {
            s[r].comm = comms[r];
            if (r != leaver) pthread_create(&thread[r], NULL, sit, &s[r]);
        }
        nap(0.02);
        mt_comm_destroy(comms[leaver]);
        for (r = 0; r < 3; r++) {
            if (r == leaver) continue;
            pthread_join(thread[r], NULL);
            assert_int_equal(s[r].status, MT_ERR_PEER);
            assert_said(s[r].text, leaver == 0   ? "rank 0 has left"
                                   : leaver == 1 ? "rank 1 has left"
                                                 : "rank 2 has left");
        }
    }
}

/* A rank handles an error and later fails for another reason: the first error's message is not reported for it. */
static mt_status dealt_with_rank(mt_comm *world, void *user) {
    mt_context *ctx;
    (void)user;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    if (mt_all_reduce(ctx, world, NULL, NULL, 3, MT_F32, MT_SUM) != MT_ERR_ARGUMENT) return MT_ERR_SYSTEM;
    mt_context_destroy(ctx);
    return MT_ERR_IO;
}

static void keep_last(void *user, mt_log_level level, const char *message) {
    (void)level;
    snprintf((char *)user, 256, "%s", message);
}

static void test_report_is_not_stale(void **state) {
    char last[256] = "";
    mt_launch_desc d;
    (void)state;
    memset(&d, 0, sizeof d);
    d.logger.log = keep_last;
    d.logger.user = last;
    assert_int_equal(mt_launch(&d, dealt_with_rank, NULL), MT_ERR_IO);
    assert_string_equal(last, "rank 0 of 1: MT_ERR_IO: input/output error");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_report_is_not_stale),
        cmocka_unit_test(test_different_calls),
        cmocka_unit_test(test_mismatch_sentence),
        cmocka_unit_test(test_never_comes),
        cmocka_unit_test(test_comes_late),
        cmocka_unit_test(test_leaves),
        cmocka_unit_test(test_chain),
        cmocka_unit_test(test_two_wait),
        cmocka_unit_test(test_p2p_faults),
        cmocka_unit_test(test_third_leaves),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_launch_arguments),
#if !TEST_OVER_MESSAGES
        cmocka_unit_test(test_a_refusal_is_reported_once),
        cmocka_unit_test(test_no_threads),
        cmocka_unit_test(test_no_helper_threads),
#endif
        cmocka_unit_test(test_leaving_without_launcher),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
