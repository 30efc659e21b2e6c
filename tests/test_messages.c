/* test_messages.c - tests the connections over which ranks over NCCL compare their calls, without NCCL: hostile and
   silent connections, malformed messages, memory that runs out, ranks that run ahead, and arbitrary bytes of a fixed
   seed (fuzz/messages.h). */

#include "fuzz/messages.h"

#include "mt_test.h"

#include <pthread.h>

/* ---- messages ---------------------------------------------------------------------------------------------------- */

static mti_message message_of(int kind, int rank, uint64_t what, uint64_t bytes) {
    mti_message m;
    memset(&m, 0, sizeof m);
    m.kind = kind;
    m.rank = rank;
    m.what = what;
    m.bytes = bytes;
    return m;
}

/* A message over the line to rank 1, or of rank 0, and whether the connection is kept. */
typedef struct sample {
    int rank; /* that gets it */
    int kind, about;
    uint64_t what, bytes, recvcount;
    const char *text;
    size_t length; /* of the text that is sent */
    int is_kept;
} sample;

static void check_sample(const sample *s) {
    static const char text[MTI_MESSAGE_TEXT + 64] = "has left";
    messages m;
    int line = s->rank ? 0 : 1;
    mti_message head = message_of(s->kind, s->about, s->what, s->bytes);
    head.recvcount = s->recvcount;
    assert_true(messages_open(&m, s->rank, 3));
    messages_send(&m, line, &head, sizeof head);
    messages_send(&m, line, s->text ? s->text : text, s->length);
    messages_work(&m);
    if ((m.channel->connections[line].fd >= 0) != s->is_kept)
        fail_msg("kind %d to rank %d with %llu bytes: %s", s->kind, s->rank, (unsigned long long)s->bytes,
                 s->is_kept ? "closed" : "kept");
    assert_int_equal(!s->is_kept, m.channel->gone_at > 0);
    messages_close(&m);
}

#define ALLREDUCE ((uint64_t)MT_ALL_REDUCE + 1)
#define THREE (3 * sizeof(mti_said)) /* bytes of the calls of 3 ranks */

static void test_malformed(void **state) {
    static const char zeros[THREE + 2], calls[THREE + 2] = {(char)200};
    static const sample samples[] = {
        /* what ranks send */
        {0, MTI_MESSAGE_CALL, 1, ALLREDUCE, 0, 0, NULL, 0, 1},
        {0, MTI_MESSAGE_LATE, 1, 0, 0, 0, NULL, 0, 1},
        {0, MTI_MESSAGE_LEFT, 1, 0, 9, 0, NULL, 9, 1},
        {0, MTI_MESSAGE_FAILED, 1, 0, 9, 0, NULL, 9, 1},
        {0, MTI_MESSAGE_END, 1, MTI_END_AHEAD, 0, 0, NULL, 0, 1},
        {1, MTI_MESSAGE_LEFT, 0, 0, 9, 0, NULL, 9, 1},
        {1, MTI_MESSAGE_RESULT, -1, MTI_WHY_DIFFERS, THREE + 1, 0, zeros, THREE + 1, 1},
        {1, MTI_MESSAGE_RESULT, 0, MTI_WHY_UNLIKE, THREE + 1, 3, zeros, THREE + 1, 1},
        {1, MTI_MESSAGE_END, 2, MTI_END_MEMORY, 0, 0, NULL, 0, 1},
        {0, MTI_MESSAGE_LEFT, 1, 0, MTI_MESSAGE_TEXT, 0, NULL, 100, 1}, /* the rest may still come */
        /* sizes */
        {0, MTI_MESSAGE_LEFT, 1, 0, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_LEFT, 1, 0, 1, 0, "", 1, 0},
        {0, MTI_MESSAGE_FAILED, 1, 0, 0, 0, NULL, 0, 0},
        {1, MTI_MESSAGE_LEFT, 0, 0, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_LEFT, 1, 0, MTI_MESSAGE_TEXT + 1, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_LEFT, 1, 0, (uint64_t)1 << 60, 0, NULL, 100, 0},
        {0, MTI_MESSAGE_LEFT, 1, 0, UINT64_MAX, 0, NULL, 100, 0},
        {0, MTI_MESSAGE_CALL, 1, ALLREDUCE, 4, 0, NULL, 4, 0},
        {0, MTI_MESSAGE_CALL, 1, ALLREDUCE, UINT64_MAX - 39, 0, NULL, 100, 0},
        {1, MTI_MESSAGE_RESULT, -1, MTI_WHY_DIFFERS, 0, 0, NULL, 0, 0},
        {1, MTI_MESSAGE_RESULT, -1, MTI_WHY_DIFFERS, THREE, 0, zeros, THREE, 0},
        {1, MTI_MESSAGE_RESULT, -1, MTI_WHY_DIFFERS, THREE + MTI_MESSAGE_TEXT + 1, 0, zeros, THREE, 0},
        /* texts that do not end, or end before */
        {0, MTI_MESSAGE_LEFT, 1, 0, 8, 0, NULL, 8, 0},
        {0, MTI_MESSAGE_LEFT, 1, 0, 12, 0, NULL, 12, 0},
        {0, MTI_MESSAGE_FAILED, 1, 0, 4, 0, NULL, 4, 0},
        {1, MTI_MESSAGE_LEFT, 0, 0, 8, 0, NULL, 8, 0},
        {1, MTI_MESSAGE_RESULT, -1, MTI_WHY_DIFFERS, THREE + 2, 0, zeros, THREE + 2, 0},
        /* values */
        {0, MTI_MESSAGE_CALL, 3, ALLREDUCE, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_CALL, -2, ALLREDUCE, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_CALL, 1, 40, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_CALL, 1, ALLREDUCE | 9 << 8, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_CALL, 1, ALLREDUCE | 9 << 16, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_END, 1, 7, 0, 0, NULL, 0, 0},
        {1, MTI_MESSAGE_RESULT, -1, MTI_WHY_UNLIKE, THREE + 1, 3, zeros, THREE + 1, 0},
        {1, MTI_MESSAGE_RESULT, 1, MTI_WHY_UNLIKE, THREE + 1, 0, zeros, THREE + 1, 0},
        {1, MTI_MESSAGE_RESULT, 1, MTI_WHY_UNLIKE, THREE + 1, 4, zeros, THREE + 1, 0},
        {1, MTI_MESSAGE_RESULT, -1, MTI_WHY_LEFT, THREE + 1, 0, zeros, THREE + 1, 0},
        {1, MTI_MESSAGE_RESULT, -1, 99, THREE + 1, 0, zeros, THREE + 1, 0},
        {1, MTI_MESSAGE_RESULT, -1, MTI_WHY_DIFFERS, THREE + 1, 0, calls, THREE + 1, 0},
        /* kinds that do not come from there */
        {0, MTI_MESSAGE_HELLO, 1, 0, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_OPEN, 1, 0, 0, 0, NULL, 0, 0},
        {0, MTI_MESSAGE_RESULT, -1, MTI_WHY_DIFFERS, THREE + 1, 0, zeros, THREE + 1, 0},
        {1, MTI_MESSAGE_CALL, 0, ALLREDUCE, 0, 0, NULL, 0, 0},
        {1, MTI_MESSAGE_LATE, 0, 0, 0, 0, NULL, 0, 0},
        {1, MTI_MESSAGE_FAILED, 0, 0, 9, 0, NULL, 9, 0},
        {1, MTI_MESSAGE_OPEN, 0, 0, 0, 0, NULL, 0, 0},
        {0, 99, 1, 0, 0, 0, NULL, 0, 0},
        {0, -1, 1, 0, 0, 0, NULL, 0, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof samples / sizeof *samples; i++) check_sample(&samples[i]);
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static mti_said send_of(int to, uint64_t count) {
    mti_said s;
    memset(&s, 0, sizeof s);
    s.what = ((uint64_t)MT_SEND + 1) | (uint64_t)(to + 1) << 24;
    s.count = count;
    return s;
}

static mti_said recv_of(int from, uint64_t count) {
    mti_said s;
    memset(&s, 0, sizeof s);
    s.what = ((uint64_t)MT_RECV + 1) | (uint64_t)(from + 1) << 40;
    s.count = s.recvcount = count;
    return s;
}

static mti_said sum_of(uint64_t count) {
    mti_said s;
    memset(&s, 0, sizeof s);
    s.what = ALLREDUCE;
    s.count = count;
    return s;
}

#define PEERS 8
#define SENDS 30000 /* to each of them */

/* Sends that run ahead of their receives by 240,000. A search among those that wait would take an hour. */
static void test_sends_ahead(void **state) {
    mti_channel *b = mti_channel_new(0, PEERS + 1);
    mti_said said;
    (void)state;
    assert_non_null(b);
    for (int i = 0; i < SENDS; i++)
        for (int r = 1; r <= PEERS; r++) said = send_of(r, (uint64_t)i), mti_channel_call(b, 0, &said);
    assert_int_equal(b->waiting, PEERS * SENDS);
    assert_true(mti_channel_waits_for(b, 0, -1) > 0 && mti_channel_waits_for(b, 1, -1) < 0);
    assert_true(mti_channel_waits_for(b, -1, PEERS) == PEERS && mti_channel_waits_for(b, -1, 0) < 0);
    for (int r = PEERS; r >= 1; r--)
        for (int i = 0; i < SENDS; i++) said = recv_of(0, (uint64_t)i), mti_channel_call(b, r, &said);
    assert_int_equal(b->waiting, 0);
    assert_true(!b->decided && !b->ended);
    said = send_of(3, 5), mti_channel_call(b, 0, &said);
    said = recv_of(0, 6), mti_channel_call(b, 3, &said);
    assert_true(b->decided && b->result.what == MTI_WHY_UNLIKE && b->result.rank == 0 && b->result.recvcount == 4);
    mti_channel_free(b);
}

/* A rank that runs ahead without end: the comparison ends on all ranks, and its memory is bounded. */
static void test_too_far_ahead(void **state) {
    (void)state;
    for (int sends = 0; sends < 2; sends++) {
        messages m;
        mti_said said = sends ? send_of(1, 1) : sum_of(1);
        assert_true(messages_open(&m, 0, 3));
        for (long i = 0; i < MTI_CHANNEL_AHEAD; i++) mti_channel_call(m.channel, 0, &said);
        assert_false(m.channel->ended);
        mti_channel_call(m.channel, 0, &said);
        assert_true(m.channel->ended && m.channel->end.what == MTI_END_AHEAD && m.channel->end.rank == 0);
        assert_true(!m.channel->decided && m.channel->room == 0);
        messages_work(&m);
        assert_true(m.channel->end_is_sent && m.channel->connections[1].fd >= 0);
        messages_close(&m);
    }
}

/* The network does not take the messages of a rank: its queue is bounded, too. */
static void test_a_network_that_stops(void **state) {
    messages m;
    mti_message call = message_of(MTI_MESSAGE_CALL, 1, ALLREDUCE, 0);
    long i;
    (void)state;
    assert_true(messages_open(&m, 1, 2));
    for (i = 0; i < 4 * (long)MTI_CHANNEL_AHEAD && !m.channel->ended; i++) {
        assert_true(mti_message_add(&m.channel->queue, &call, NULL));
        mti_channel_work(m.channel);
    }
    assert_true(m.channel->ended && m.channel->end.what == MTI_END_AHEAD && i >= MTI_CHANNEL_AHEAD);
    assert_true(mti_bytes_size(&m.channel->connections[0].out) <= (MTI_CHANNEL_AHEAD + 2) * sizeof call);
    for (i = 0; i < 4 * (long)MTI_CHANNEL_AHEAD && mti_bytes_size(&m.channel->connections[0].out); i++) {
        messages_hear(&m, 0);
        mti_channel_work(m.channel);
    }
    messages_hear(&m, 0);
    assert_true(m.channel->connections[0].fd >= 0 && mti_bytes_size(&m.channel->connections[0].out) == 0);
    assert_int_equal(mti_bytes_size(&m.heard[0]), 0);
    messages_close(&m);
}

/* Calls of 3 ranks at rank 0, of which some wait, until the memory is short. Returns 1 if it was. */
static int calls_without_memory(long allocations) {
    messages m;
    int short_of_memory = 1;
    messages_memory = allocations;
    if (messages_open(&m, 0, 3)) {
        static const char reason[] = "has left the group";
        mti_message sum = message_of(MTI_MESSAGE_CALL, 1, ALLREDUCE, 0), left;
        for (int i = 0; i < 500; i++) messages_send(&m, 1, &sum, sizeof sum);
        messages_work(&m);
        for (int to = 1; to < 3 && !m.channel->ended; to++)
            for (int i = 0; i < 200 && !m.channel->ended; i++) {
                mti_said said = send_of(to, 1);
                mti_channel_call(m.channel, 0, &said);
            }
        messages_work(&m);
        left = message_of(MTI_MESSAGE_LEFT, 2, 0, sizeof reason);
        messages_send(&m, 2, &left, sizeof left);
        messages_send(&m, 2, reason, sizeof reason);
        messages_work(&m);
        messages_work(&m);
        short_of_memory = messages_memory < 0;
        messages_memory = -1;
        messages_work(&m);
        if (m.channel->ended) assert_true(m.channel->end_is_sent && m.channel->end.what == MTI_END_MEMORY);
        assert_true(m.channel->ended == short_of_memory || m.channel->decided);
        if (!short_of_memory) assert_true(m.channel->decided && m.channel->result.what == MTI_WHY_LEFT);
    }
    messages_memory = -1;
    messages_close(&m);
    return short_of_memory;
}

static void test_memory(void **state) {
    long n = 0;
    (void)state;
    while (n < 10000 && calls_without_memory(n)) n++;
    assert_true(n > 20 && n < 10000);
}

/* ---- connections ------------------------------------------------------------------------------------------------- */

static int listen_at(mti_listener *listener) {
    int fd = mti_listener_open(listener);
    if (fd < 0) fail_msg("this machine lets no program listen");
    listener->hosts = 1;
    listener->host[0] = htonl(INADDR_LOOPBACK);
    return fd;
}

static int connect_to(const mti_listener *listener) {
    struct sockaddr_in at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_port = htons((uint16_t)listener->port);
    at.sin_addr.s_addr = listener->host[0];
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at) != 0) fail_msg("no connection to this machine");
    return fd;
}

typedef struct peer {
    const mti_listener *listener;
    int rank, size, fd;
    pthread_t thread;
} peer;

/* The time only ends a test that hangs. */
static void *connect_peer(void *argument) {
    peer *p = (peer *)argument;
    p->fd = mti_listener_connect(p->listener, p->rank, p->size, mti_now() + 60);
    return NULL;
}

#define SILENT 120
#define GROUP 4

/* Many connections that say nothing, not enough, or something wrong: all ranks connect. The silent ones stay open, and
   rank 0 could not wait for each of them. */
static void test_strangers(void **state) {
    mti_listener listener, other;
    int fd = listen_at(&listener), silent[SILENT], wrong[6];
    mti_channel *b = mti_channel_new(0, GROUP);
    mti_message part = message_of(MTI_MESSAGE_HELLO, 1, listener.token, 0);
    peer peers[GROUP];
    (void)state;
    assert_non_null(b);
    other = listener;
    other.token++;
    for (int i = 0; i < SILENT; i++) {
        silent[i] = connect_to(&listener);
        if (i % 3 == 0) assert_int_equal(send(silent[i], &part, 1 + (size_t)i % (sizeof part - 1), 0), 1 + i % 39);
    }
    for (int i = 0; i < 6; i++) wrong[i] = connect_to(&listener);
    mti_listener_say(wrong[0], MTI_MESSAGE_HELLO, 1, listener.token + 1);
    mti_listener_say(wrong[1], MTI_MESSAGE_HELLO, 0, listener.token);
    mti_listener_say(wrong[2], MTI_MESSAGE_HELLO, GROUP, listener.token);
    mti_listener_say(wrong[3], MTI_MESSAGE_HELLO, -1, listener.token);
    mti_listener_say(wrong[4], MTI_MESSAGE_OPEN, 1, listener.token);
    mti_listener_say(wrong[5], 1000000, 1, listener.token);
    for (int r = 1; r < GROUP; r++) {
        peers[r].listener = &listener;
        peers[r].rank = r;
        peers[r].size = GROUP;
        assert_int_equal(pthread_create(&peers[r].thread, NULL, connect_peer, &peers[r]), 0);
    }
    assert_int_equal(mti_listener_serve(fd, &listener, b, mti_now() + 60), 1);
    for (int r = 1; r < GROUP; r++) {
        mti_message m = message_of(MTI_MESSAGE_LATE, r, 0, 0), back;
        pthread_join(peers[r].thread, NULL);
        assert_true(peers[r].fd >= 0 && b->connections[r].fd >= 0);
        assert_int_equal(send(peers[r].fd, &m, sizeof m, 0), sizeof m);
        assert_int_equal(fcntl(b->connections[r].fd, F_SETFL, 0), 0);
        assert_int_equal(recv(b->connections[r].fd, &back, sizeof back, MSG_WAITALL), sizeof back);
        assert_int_equal(back.rank, r);
        close(peers[r].fd);
    }
    for (int i = 0; i < SILENT; i++) close(silent[i]);
    for (int i = 0; i < 6; i++) close(wrong[i]);
    mti_channel_free(b);
    close(fd);
}

/* A rank that has given up before all have come is not a part of the group: when it comes again, it is. */
static void test_a_rank_that_comes_again(void **state) {
    mti_listener listener;
    int fd = listen_at(&listener), first;
    mti_channel *b = mti_channel_new(0, 2);
    peer p = {&listener, 1, 2, -1, 0};
    (void)state;
    first = connect_to(&listener);
    mti_listener_say(first, MTI_MESSAGE_HELLO, 1, listener.token);
    close(first);
    assert_int_equal(pthread_create(&p.thread, NULL, connect_peer, &p), 0);
    while (!mti_listener_serve(fd, &listener, b, mti_now() + 60) || b->connections[1].fd < 0) continue;
    mti_connection_close(&b->connections[1]);
    mti_channel_free(b);
    close(fd);
    pthread_join(p.thread, NULL);
    if (p.fd >= 0) close(p.fd);
}

/* Of two addresses the first one accepts and says nothing. */
static void test_a_silent_listener(void **state) {
    mti_listener listener;
    struct sockaddr_in at;
    int one = socket(AF_INET, SOCK_STREAM, 0), silent = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t bytes = sizeof at;
    mti_channel *b = mti_channel_new(0, 2);
    peer p = {&listener, 1, 2, -1, 0};
    (void)state;
    memset(&listener, 0, sizeof listener);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(bind(one, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(getsockname(one, (struct sockaddr *)&at, &bytes), 0);
    listener.port = ntohs(at.sin_port);
    listener.token = 7;
    listener.host[1] = at.sin_addr.s_addr;
    listener.host[0] = at.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
    listener.hosts = bind(silent, (struct sockaddr *)&at, sizeof at) == 0 ? 2 : 0;
    if (!listener.hosts) { /* not every system has a second loopback address */
        listener.host[0] = listener.host[1];
        listener.hosts = 1;
    }
    assert_int_equal(listen(one, 9), 0);
    if (listener.hosts == 2) assert_int_equal(listen(silent, 9), 0);
    mti_socket_set(one);
    assert_int_equal(pthread_create(&p.thread, NULL, connect_peer, &p), 0);
    assert_int_equal(mti_listener_serve(one, &listener, b, mti_now() + 60), 1);
    pthread_join(p.thread, NULL);
    assert_true(p.fd >= 0);
    close(p.fd);
    close(one);
    close(silent);
    mti_channel_free(b);
}

/* A process that is not rank 0 of this communicator opens the connection: its token differs. */
static void test_another_listener(void **state) {
    mti_listener listener;
    int fd = listen_at(&listener);
    (void)state;
    for (int how = 0; how < 4; how++) {
        peer p = {&listener, 1, 2, -1, 0};
        mti_message hello;
        int caller, size = (int)sizeof hello;
        assert_int_equal(pthread_create(&p.thread, NULL, connect_peer, &p), 0);
        assert_int_equal(fcntl(fd, F_SETFL, 0), 0);
        caller = accept(fd, NULL, NULL);
        assert_int_equal(recv(caller, &hello, sizeof hello, MSG_WAITALL), size);
        assert_true(hello.kind == MTI_MESSAGE_HELLO && hello.rank == 1 && hello.what == listener.token);
        if (how == 0) mti_listener_say(caller, MTI_MESSAGE_OPEN, 0, listener.token + 1);
        if (how == 1) mti_listener_say(caller, MTI_MESSAGE_HELLO, 0, listener.token);
        if (how == 2) mti_listener_say(caller, MTI_MESSAGE_OPEN, 2, listener.token);
        if (how == 3) close(caller);
        pthread_join(p.thread, NULL);
        assert_int_equal(p.fd, -1);
        if (how != 3) close(caller);
    }
    close(fd);
}

/* ---- a communicator ---------------------------------------------------------------------------------------------- */

typedef struct job {
    mti_listener listener;
    int fd; /* of the listener of rank 0 */
    int connects, logs, differs;
    char warning[2][256];
    mt_status status[2];
    mti_text said[2];
} job;

typedef struct told {
    char text[256];
} told;

static void keep_warning(void *user, mt_log_level level, const char *text) {
    told *t = (told *)user;
    if (level == MT_LOG_WARNING) snprintf(t->text, sizeof t->text, "%s", text);
}

/* What a rank over NCCL does: connects, tells its calls, reads the result, and closes. */
static mt_status comparing_rank(mt_comm *world, void *user) {
    job *j = (job *)user;
    int rank = mt_comm_rank(world), i;
    told warning;
    mti_listener none;
    mti_call call = mti_call_make(MT_ALL_REDUCE, NULL, NULL, (size_t)(j->differs ? 1 + rank : 1), MT_F32);
    mt_context_desc where;
    mt_context *ctx;
    mt_comm *comm;
    memset(&warning, 0, sizeof warning);
    memset(&none, 0, sizeof none);
    memset(&where, 0, sizeof where);
    where.arena_bytes = 4096;
    if (j->logs) where.logger.log = keep_warning;
    where.logger.user = &warning;
    MT_TRY(mt_context_create(world, &where, &ctx));
    comm = mti_comm_new(&mti_threads, rank, 2, "compared");
    CHECK(comm);
    comm->nccl.timeout = 60;
    comm->nccl.home = ctx;
    comm->nccl.last = call;
    MT_TRY(mti_channel_open(ctx, comm, rank == 0 && j->connects ? j->fd : -1, j->connects ? &j->listener : &none));
    CHECK((comm->nccl.channel != NULL) == j->connects);
    for (i = 0; i < 1000; i++) mti_channel_append(comm, MTI_MESSAGE_CALL, &call, NULL);
    if (j->differs)
        while (!mti_channel_is_decided(comm->nccl.channel)) mti_rest(1, 0);
    if (j->differs) mti_channel_find_missing(comm);
    if (comm->nccl.channel) j->status[rank] = mti_channel_error(comm, &j->said[rank]);
    MT_TRY(mt_barrier(ctx, world));
    mti_channel_fail(comm, MT_ERR_PEER, "the test wants it");
    snprintf(j->warning[rank], sizeof j->warning[rank], "%s", warning.text);
    MT_TRY(mt_barrier(ctx, world)); /* as NCCL's own end of a communicator */
    mti_channel_close(comm);
    mti_comm_free(comm);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void run_job(job *j) {
    mt_launch_desc two;
    memset(&two, 0, sizeof two);
    two.ranks = 2;
    j->fd = listen_at(&j->listener);
    assert_int_equal(mt_launch(&two, comparing_rank, j), MT_SUCCESS);
    close(j->fd);
}

static void test_compared(void **state) {
    (void)state;
    for (int differs = 0; differs < 2; differs++) {
        job j;
        memset(&j, 0, sizeof j);
        j.connects = 1;
        j.differs = differs;
        run_job(&j);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(j.status[r], differs ? MT_ERR_MISMATCH : MT_SUCCESS);
            if (differs) assert_non_null(strstr(j.said[r].data, "rank 1 called all_reduce(count 2, f32, sum)"));
        }
    }
}

/* Without a connection every rank says so: to its logger, or else on stderr. */
static void test_not_compared(void **state) {
    static const char words[] = "the calls of the ranks of \"compared\" are not compared";
    (void)state;
    for (int logs = 0; logs < 2; logs++) {
        job j;
        char text[2048] = "";
        FILE *file = tmpfile();
        int old = dup(2), count = 0;
        memset(&j, 0, sizeof j);
        j.logs = logs;
        assert_true(file && old >= 0);
        fflush(stderr);
        dup2(fileno(file), 2);
        run_job(&j);
        fflush(stderr);
        dup2(old, 2);
        close(old);
        rewind(file);
        text[fread(text, 1, sizeof text - 1, file)] = '\0';
        fclose(file);
        for (const char *at = text; (at = strstr(at, words)) != NULL; at++) count++;
        assert_int_equal(count, logs ? 0 : 2);
        for (int r = 0; r < 2; r++) assert_int_equal(strstr(j.warning[r], words) != NULL, logs);
    }
}

/* When the comparison ends, the next call of every rank says so once. */
static void test_end_is_told(void **state) {
    mt_context_desc where;
    mt_context *ctx;
    messages m;
    told warning;
    (void)state;
    memset(&where, 0, sizeof where);
    where.arena_bytes = 4096;
    where.logger.log = keep_warning;
    where.logger.user = &warning;
    assert_int_equal(mt_context_create(NULL, &where, &ctx), MT_SUCCESS);
    for (int why = 0; why < 2; why++) {
        mti_message end = message_of(MTI_MESSAGE_END, 2, (uint64_t)why, 0);
        memset(&warning, 0, sizeof warning);
        assert_true(messages_open(&m, 1, 3));
        m.comm->nccl.home = ctx;
        mti_channel_warn(m.comm);
        assert_string_equal(warning.text, "");
        messages_send(&m, 0, &end, sizeof end);
        messages_work(&m);
        mti_channel_warn(m.comm);
        assert_non_null(strstr(warning.text, "the calls of the ranks of \"test\" are no longer compared: rank 2 has"));
        memset(&warning, 0, sizeof warning);
        mti_channel_warn(m.comm);
        assert_string_equal(warning.text, "");
        assert_false(m.channel->gone_at > 0);
        messages_close(&m);
    }
    mt_context_destroy(ctx);
}

/* A process that was forked closes the connections, and the ranks notice nothing. */
static void test_abandon(void **state) {
    messages m;
    (void)state;
    assert_true(messages_open(&m, 0, 3));
    mti_channel *b = m.channel;
    int copies[3];
    for (int i = 1; i < 3; i++) copies[i] = dup(b->connections[i].fd);
    mti_channel_abandon(m.comm);
    for (int i = 1; i < 3; i++) {
        char byte;
        assert_int_equal(recv(m.far[i], &byte, 1, MSG_DONTWAIT), -1);
        assert_true(errno == EAGAIN);
        b->connections[i].fd = copies[i];
    }
    assert_null(m.comm->nccl.channel);
    messages_close(&m);
}

/* ---- arbitrary bytes --------------------------------------------------------------------------------------------- */

#define INPUTS 20000

static void test_arbitrary_bytes(void **state) {
    uint64_t seed = 20260101;
    uint8_t data[512];
    (void)state;
    for (int i = 0; i < INPUTS; i++) {
        size_t size = 1 + test_below(&seed, sizeof data);
        for (size_t k = 0; k < size; k++) data[k] = (uint8_t)test_random(&seed);
        messages_all(data, size);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_sends_ahead),
        cmocka_unit_test(test_too_far_ahead),
        cmocka_unit_test(test_a_network_that_stops),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_a_rank_that_comes_again),
        cmocka_unit_test(test_a_silent_listener),
        cmocka_unit_test(test_another_listener),
        cmocka_unit_test(test_compared),
        cmocka_unit_test(test_not_compared),
        cmocka_unit_test(test_end_is_told),
        cmocka_unit_test(test_abandon),
        cmocka_unit_test(test_arbitrary_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
