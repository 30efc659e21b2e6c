/* test_messages.c - tests the connections over which ranks over NCCL compare their calls, without NCCL: the address at
   which a rank listens, hostile and silent connections, malformed messages, memory that runs out, ranks that run ahead,
   64 ranks in a tree, calls while the comparer waits, and arbitrary bytes of a fixed seed (fuzz/messages.h).

   MT_TEST_RANKS=4096 MT_TEST_CASE=test_tree ./test_messages runs the tree with so many ranks. It takes a minute, 4 GiB
   of memory, and 3 file descriptors per rank. */

#include "fuzz/messages.h"

#include "mt_test.h"

#include <sys/resource.h>

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

static const char zeros[THREE + 2], calls[THREE + 2] = {(char)200};
static const sample samples[] = {
    /* what ranks send */
    {0, MTI_MESSAGE_CALL, 1, ALLREDUCE, 0, 0, NULL, 0, 1},
    {0, MTI_MESSAGE_LATE, 1, 0, 0, 0, NULL, 0, 1},
    {0, MTI_MESSAGE_LEFT, 1, 0, 9, 0, NULL, 9, 1},
    {0, MTI_MESSAGE_FAILED, 1, 0, 9, 0, NULL, 9, 1},
    {0, MTI_MESSAGE_END, 1, MTI_END_AHEAD, 0, 0, NULL, 0, 1},
    {1, MTI_MESSAGE_END, 0, MTI_END_LEFT, 0, 0, NULL, 0, 1},
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
    {0, MTI_MESSAGE_CALL, -1, ALLREDUCE, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_LEFT, 1, 2, 9, 0, NULL, 9, 0},
    /* about ranks that are not at the other end */
    {0, MTI_MESSAGE_CALL, 2, ALLREDUCE, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_CALL, 0, ALLREDUCE, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_LATE, 2, 0, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_LEFT, 0, 0, 9, 0, NULL, 9, 0},
    {0, MTI_MESSAGE_FAILED, 2, 0, 9, 0, NULL, 9, 0},
    {0, MTI_MESSAGE_END, 2, MTI_END_AHEAD, 0, 0, NULL, 0, 1}, /* because of any rank */
    {1, MTI_MESSAGE_LEFT, 1, 0, 9, 0, NULL, 9, 0},
    {1, MTI_MESSAGE_LEFT, 2, 0, 9, 0, NULL, 9, 0},
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
    {0, MTI_MESSAGE_CALLS, 1, ALLREDUCE, 0, 0, NULL, 0, 0}, /* no rank is below rank 1 */
    {0, MTI_MESSAGE_CALLS, 1, (uint64_t)MT_SEND + 1, 0, 0, NULL, 0, 0},
    /* kinds that do not come from there */
    {0, MTI_MESSAGE_HELLO, 1, 0, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_CHALLENGE, 1, 0, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_PROOF, 1, 0, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_READY, 1, 0, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_ABSENT, 1, 0, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_OPEN, 1, 0, 0, 0, NULL, 0, 0},
    {0, MTI_MESSAGE_RESULT, -1, MTI_WHY_DIFFERS, THREE + 1, 0, zeros, THREE + 1, 0},
    {1, MTI_MESSAGE_CALL, 0, ALLREDUCE, 0, 0, NULL, 0, 0},
    {1, MTI_MESSAGE_CALLS, 0, ALLREDUCE, 0, 0, NULL, 0, 0},
    {1, MTI_MESSAGE_LATE, 0, 0, 0, 0, NULL, 0, 0},
    {1, MTI_MESSAGE_FAILED, 0, 0, 9, 0, NULL, 9, 0},
    {1, MTI_MESSAGE_OPEN, 0, 0, 0, 0, NULL, 0, 0},
    {1, MTI_MESSAGE_ABSENT, 0, 0, 0, 0, NULL, 0, 0},
    {0, 99, 1, 0, 0, 0, NULL, 0, 0},
    {0, -1, 1, 0, 0, 0, NULL, 0, 0},
};

static void test_malformed(void **state) {
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
        for (int r = 1; r <= PEERS; r++) said = send_of(r, (uint64_t)i), mti_channel_call(b, 0, 0, &said);
    assert_int_equal(b->waiting, PEERS * SENDS);
    assert_true(mti_channel_waits_for(b, 0, -1) > 0 && mti_channel_waits_for(b, 1, -1) < 0);
    assert_true(mti_channel_waits_for(b, -1, PEERS) == PEERS && mti_channel_waits_for(b, -1, 0) < 0);
    for (int r = PEERS; r >= 1; r--)
        for (int i = 0; i < SENDS; i++) said = recv_of(0, (uint64_t)i), mti_channel_call(b, r, 0, &said);
    assert_int_equal(b->waiting, 0);
    assert_true(!b->decided && !b->ended);
    said = send_of(3, 5), mti_channel_call(b, 0, 0, &said);
    said = recv_of(0, 6), mti_channel_call(b, 3, 0, &said);
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
        for (long i = 0; i < MTI_CHANNEL_AHEAD; i++) mti_channel_call(m.channel, 0, 0, &said);
        assert_false(m.channel->ended);
        mti_channel_call(m.channel, 0, 0, &said);
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
        mti_channel_swap(m.channel);
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
                mti_channel_call(m.channel, 0, 0, &said);
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

/* ---- the tree ---------------------------------------------------------------------------------------------------- */

/* Rank 1 of 40 has the children 33 to 39. Returns what it has sent over a line, the first message in *head. */
static int sent_over(messages *m, int line, mti_message *head) {
    static mti_message all[8];
    ssize_t n;
    mti_channel_swap(m->channel);
    for (int i = 0; i < 2; i++) mti_channel_work(m->channel); /* the first time may close a connection */
    n = recv(m->far[line], all, sizeof all, MSG_DONTWAIT);
    if (n > 0) *head = all[0];
    return n > 0 ? (int)((size_t)n / sizeof *head) : 0;
}

static void test_relayed(void **state) {
    messages m;
    mti_message call = message_of(MTI_MESSAGE_CALL, 35, ALLREDUCE, 0), late = message_of(MTI_MESSAGE_LATE, 39, 0, 0),
                got;
    (void)state;
    assert_true(messages_open(&m, 1, 40));
    assert_int_equal(m.channel->connection_count, 8);
    messages_send(&m, 3, &call, sizeof call);
    mti_channel_read(m.channel, 3);
    messages_send(&m, 7, &late, sizeof late);
    mti_channel_read(m.channel, 7);
    assert_int_equal(sent_over(&m, 0, &got), 2); /* a question goes behind the calls before it */
    assert_memory_equal(&got, &call, sizeof got);
    assert_true(mti_channel_number(m.channel, 35) == 1 && !m.channel->ended);
    /* a child cannot speak for a rank behind another one: it is gone */
    messages_send(&m, 2, &call, sizeof call);
    mti_channel_read(m.channel, 2);
    assert_true(sent_over(&m, 0, &got) >= 1 && got.kind == MTI_MESSAGE_LEFT && got.rank == 34 && got.what == 1);
    assert_true(m.channel->connections[2].fd < 0 && m.channel->connections[3].fd >= 0);
    /* what the parent says goes to all children, and the end to all ranks */
    late = message_of(MTI_MESSAGE_END, 17, MTI_END_AHEAD, 0);
    messages_send(&m, 0, &late, sizeof late);
    mti_channel_read(m.channel, 0);
    for (int line = 1; line < 8; line++)
        if (line != 2) assert_true(sent_over(&m, line, &got) == 1 && got.kind == MTI_MESSAGE_END && got.rank == 17);
    messages_close(&m);
}

/* Rank 0 of 40 hears of the rank behind the rank that passes it on. */
static void test_ranks_of_a_subtree(void **state) {
    messages m;
    (void)state;
    assert_true(messages_open(&m, 0, 40));
    assert_true(m.channel->connection_count == 33 && mti_channel_line(m.channel, 39) == 1);
    assert_true(mti_channel_line(m.channel, 32) == 32 && mti_channel_line(m.channel, 0) == 0);
    for (int r = 33; r < 36; r++) {
        mti_message call = message_of(MTI_MESSAGE_CALL, r, ALLREDUCE, 0);
        call.count = r == 35 ? 2 : 1;
        messages_send(&m, 1, &call, sizeof call);
    }
    messages_work(&m);
    assert_true(mti_channel_number(m.channel, 33) == 1 && mti_channel_number(m.channel, 35) == 1);
    assert_true(mti_channel_number(m.channel, 1) == 0 && mti_channel_last(m.channel)[35].count == 2);
    assert_true(m.channel->odd == 1 && m.channel->odd_calls[35].count == 2 && m.channel->odd_calls[33].count == 1);
    messages_close(&m);
}

/* Rank 1 of 1,100, which has children with children, and rank 0, to which it passes on their calls. */
typedef struct branch {
    messages middle, root;
    uint64_t number[1100], seed; /* number: of collectives */
    int told;                    /* number of messages that rank 1 has sent */
    mti_message last;            /* the last one of these */
} branch;

static void branch_work(branch *b) {
    char bytes[4096];
    ssize_t n;
    for (int i = 0; i < b->middle.channel->connection_count; i++) mti_channel_read(b->middle.channel, i);
    mti_channel_swap(b->middle.channel);
    mti_channel_work(b->middle.channel);
    while ((n = recv(b->middle.far[0], bytes, sizeof b->last, MSG_DONTWAIT | MSG_WAITALL)) > 0) {
        assert_int_equal(n, sizeof b->last);
        memcpy(&b->last, bytes, sizeof b->last);
        b->told++;
        messages_send(&b->root, 1, bytes, (size_t)n);
    }
    messages_work(&b->root);
    assert_true(b->root.channel->connections[1].fd >= 0 && !b->root.channel->ended && !b->root.channel->odd);
}

/* The next collective of rank r, or (whole) of its branch. */
static void branch_call(branch *b, int r, int whole) {
    mti_message m = message_of(whole ? MTI_MESSAGE_CALLS : MTI_MESSAGE_CALL, r, ALLREDUCE, 0);
    m.count = 1 + b->number[r] % 5;
    b->number[r]++;
    for (int k = 32 * r + 1; k <= 32 * r + 32 && k < 1100 && whole; k++) b->number[k]++;
    if (r == 1) assert_true(mti_message_add(&b->middle.channel->queue, &m, NULL));
    else messages_send(&b->middle, mti_channel_line(b->middle.channel, r), &m, sizeof m);
}

/* One of the children of rank 1, or its branch as far as it can, makes a call. */
static void branch_step(branch *b) {
    int c = 33 + (int)test_below(&b->seed, 32), kids = mti_branch_size(c, 1100) - 1, even = kids > 0, r = c;
    uint64_t least = b->number[1];
    for (int k = 1; k <= kids; k++) even &= b->number[32 * c + k] == b->number[c];
    for (int k = 33; k < 65; k++) least = b->number[k] < least ? b->number[k] : least;
    even &= test_below(&b->seed, 3) > 0;
    if (!even && kids && test_below(&b->seed, 8)) r = 32 * c + 1 + (int)test_below(&b->seed, (uint64_t)kids);
    if (test_below(&b->seed, 40) == 0) r = 1, even = 0;
    if (b->number[r] < least + 30) branch_call(b, r, even);
    if (test_below(&b->seed, 50) == 0) mti_channel_pour(b->middle.channel);
}

/* Rank 0 learns the calls of each rank, in whatever order they come and however they are held back. */
static void test_merged(void **state) {
    static branch b;
    uint64_t most = 0;
    (void)state;
    memset(&b, 0, sizeof b);
    b.seed = 5;
    assert_true(messages_open(&b.middle, 1, 1100) && messages_open(&b.root, 0, 1100));
    for (int i = 0; i < 4000; i++) {
        branch_step(&b);
        branch_work(&b);
    }
    mti_channel_pour(b.middle.channel);
    branch_work(&b);
    for (int r = 1; r < 1100; r++) {
        if (mti_channel_line(b.root.channel, r) != 1) continue;
        assert_int_equal(mti_channel_number(b.root.channel, r), b.number[r]);
        assert_int_equal(mti_channel_last(b.root.channel)[r].count, b.number[r] ? 1 + (b.number[r] - 1) % 5 : 0);
        most = b.number[r] > most ? b.number[r] : most;
    }
    assert_true(most > 30);
    for (int r = 1; r < 1100; r++)
        while (mti_channel_line(b.root.channel, r) == 1 && b.number[r] < most) {
            branch_call(&b, r, 0);
            branch_work(&b);
        }
    mti_channel_pour(b.middle.channel);
    branch_work(&b);
    b.told = 0; /* from here on all are even: one message for the branch; the clock may only make more of it */
    while (b.told != 1) {
        b.told = 0;
        for (int r = 33; r < 65; r++) branch_call(&b, r, mti_branch_size(r, 1100) > 1);
        branch_call(&b, 1, 0);
        while (b.middle.channel->first < b.middle.channel->last_round || !b.told) branch_work(&b);
        most++;
    }
    assert_true(b.last.kind == MTI_MESSAGE_CALLS && b.last.rank == 1 && b.last.count == 1 + (most - 1) % 5);
    for (int r = 1; r < 1100; r++)
        if (mti_channel_line(b.root.channel, r) == 1) assert_int_equal(mti_channel_number(b.root.channel, r), most);
    messages_close(&b.middle);
    messages_close(&b.root);
}

/* A rank over which others are compared leaves in order. The others learn when they make more collectives; sends and
   receives can no longer be compared, which every rank is told. */
static void test_a_rank_in_the_middle_leaves(void **state) {
    static const char reason[] = "has left the group";
    (void)state;
    for (int how = 0; how < 4; how++) {
        messages m;
        mti_message left = message_of(MTI_MESSAGE_LEFT, 1, 0, sizeof reason), call;
        assert_true(messages_open(&m, how == 3 ? 0 : 33, 40));
        if (how == 3) left.rank = 1;
        messages_send(&m, how == 3 ? 1 : 0, &left, sizeof left);
        messages_send(&m, how == 3 ? 1 : 0, reason, sizeof reason);
        messages_work(&m);
        assert_true(!m.channel->decided && !m.channel->ended);
        call = message_of(MTI_MESSAGE_CALL, how == 3 ? 0 : 33, how == 0 ? ALLREDUCE : send_of(34, 1).what, 0);
        if (how == 2) close(m.far[0]), m.far[0] = -1; /* the end of the connection is no news */
        if (how == 2) messages_work(&m);
        assert_true(mti_message_add(&m.channel->queue, &call, NULL));
        messages_work(&m);
        assert_int_equal(m.channel->decided, how == 0);
        if (how == 0) assert_true(m.channel->result.what == MTI_WHY_LEFT && m.channel->result.rank == 1);
        assert_int_equal(m.channel->ended, how != 0);
        if (how) assert_true(m.channel->end.what == MTI_END_LEFT && m.channel->end.rank == 1);
        messages_close(&m);
    }
}

/* A rank ends the comparison because of a rank that is not below it: those between it and rank 0 end it, too. */
static void test_an_end_from_below(void **state) {
    (void)state;
    for (int middle = 0; middle < 2; middle++) {
        messages m;
        mti_message end = message_of(MTI_MESSAGE_END, middle ? 0 : 2, MTI_END_LEFT, 0);
        assert_true(messages_open(&m, middle, 40));
        messages_send(&m, 1, &end, sizeof end);
        messages_work(&m);
        assert_true(m.channel->ended && m.channel->end.rank == end.rank && m.channel->end.what == MTI_END_LEFT);
        assert_true(m.channel->connections[1].fd >= 0);
        messages_close(&m);
    }
}

/* ---- secrets and addresses --------------------------------------------------------------------------------------- */

/* The vectors of the reference implementation: the key 00 01 ... 0f, and the data 00 01 ... of 0 to 15 bytes. */
static void test_siphash(void **state) {
    static const uint64_t hashes[16] = {
        0x726fdb47dd0e0e31u, 0x74f839c593dc67fdu, 0x0d6c8009d9a94f5au, 0x85676696d7fb7e2du,
        0xcf2794e0277187b7u, 0x18765564cd99a68du, 0xcbc9466e58fee3ceu, 0xab0200f58b01d137u,
        0x93f5f5799a932462u, 0x9e0082df0ba9e4b0u, 0x7a5dbbc594ddb9f3u, 0xf4b32f46226bada7u,
        0x751e8fbc860ee5fbu, 0x14ea5627c0843d90u, 0xf723ca908e7af2eeu, 0xa129ca6149be45e5u};
    static const uint64_t key[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
    unsigned char data[16];
    uint64_t one[2], other[2];
    (void)state;
    for (int i = 0; i < 16; i++) data[i] = (unsigned char)i;
    for (size_t i = 0; i < 16; i++) assert_int_equal(mti_siphash(key, data, i), hashes[i]);
    assert_true(mti_random(one) && mti_random(other) && memcmp(one, other, sizeof one) != 0);
}

/* Each part of what a proof depends on changes it. */
static void test_proof(void **state) {
    uint64_t key[2] = {1, 2}, hello[2] = {3, 4}, challenge[2] = {5, 6};
    uint64_t proof = mti_proof(key, MTI_MESSAGE_PROOF, 7, 0, hello, challenge);
    (void)state;
    assert_int_not_equal(proof, mti_proof(key, MTI_MESSAGE_CHALLENGE, 7, 0, hello, challenge));
    assert_int_not_equal(proof, mti_proof(key, MTI_MESSAGE_PROOF, 8, 0, hello, challenge));
    assert_int_not_equal(proof, mti_proof(key, MTI_MESSAGE_PROOF, 7, 1, hello, challenge));
    for (int i = 0; i < 6; i++) {
        uint64_t *part = i < 2 ? key : i < 4 ? hello : challenge;
        part[i % 2] ^= 1;
        assert_int_not_equal(proof, mti_proof(key, MTI_MESSAGE_PROOF, 7, 0, hello, challenge));
        part[i % 2] ^= 1;
    }
    assert_int_equal(proof, mti_proof(key, MTI_MESSAGE_PROOF, 7, 0, hello, challenge));
}

static mti_address address_of(const char *text) {
    struct in_addr in;
    struct in6_addr in6;
    mti_address a;
    memset(&a, 0, sizeof a);
    if (inet_pton(AF_INET, text, &in) == 1) {
        a.family = AF_INET;
        memcpy(a.host, &in, 4);
    } else {
        assert_int_equal(inet_pton(AF_INET6, text, &in6), 1);
        a.family = AF_INET6;
        memcpy(a.host, &in6, 16);
        if (mti_address_is_link_local(&a)) a.scope = 4;
    }
    return a;
}

typedef struct choice {
    const char *without; /* interfaces that this machine lacks, with spaces around them */
    const char *list;    /* NCCL_SOCKET_IFNAME */
    int family;
    const char *beside; /* NCCL_COMM_ID */
    const char *chosen; /* NULL: none */
} choice;

static const struct {
    const char *name, *at, *mask;
} fake_interfaces[] = {
    {"lo", "127.0.0.1", "255.0.0.0"},
    {"docker0", "172.17.0.1", "255.255.0.0"},
    {"virbr0", "192.168.122.1", "255.255.255.0"},
    {"eth0", "10.0.0.1", "255.255.255.0"},
    {"eth1", "10.0.1.1", "255.255.255.0"},
    {"eth10", "10.0.10.1", "255.255.255.0"},
    {"ib0", "10.1.0.1", "255.255.255.0"},
    {"lo", "::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"},
    {"eth1", "fe80::1", "ffff:ffff:ffff:ffff::"},
    {"eth1", "fd00::1", "ffff:ffff:ffff:ffff::"},
    {"eth2", "fe80::2", "ffff:ffff:ffff:ffff::"},
};
static const choice choices[] = {
    /* NCCL's own order */
    {"", NULL, 0, NULL, "10.1.0.1"},
    {" ib0 ", NULL, 0, NULL, "10.0.0.1"},
    {" ib0 eth0 eth1 eth10 eth2 ", NULL, 0, NULL, "172.17.0.1"},
    {" ib0 eth0 eth1 eth10 eth2 docker0 ", NULL, 0, NULL, "127.0.0.1"},
    {" ib0 eth0 eth1 eth10 eth2 docker0 lo ", NULL, 0, NULL, "192.168.122.1"},
    {" ib0 eth0 eth1 eth10 eth2 docker0 lo virbr0 ", NULL, 0, NULL, NULL},
    {" ib0 ", NULL, 0, "10.0.10.7", "10.0.10.1"},
    {" ib0 ", NULL, 0, "127.0.0.1", "127.0.0.1"},
    {" ib0 ", NULL, 0, "8.8.8.8", "10.0.0.1"},
    {"", NULL, 0, "10.0.10.7", "10.1.0.1"},
    {" ib0 ", NULL, AF_INET6, "10.0.10.7", "10.0.10.1"},
    {" ib0 ", NULL, 0, "fd00::9", "fd00::1"},
    /* families; fe80:: and ::1 only when there is no other */
    {"", NULL, AF_INET6, NULL, "fd00::1"},
    {"", "lo", AF_INET6, NULL, "::1"},
    {"", "eth2", 0, NULL, "fe80::2"},
    {"", "eth1", AF_INET6, NULL, "fd00::1"},
    {"", "eth2", AF_INET, NULL, NULL},
    {" eth0 eth1 eth10 ib0 docker0 lo virbr0 ", NULL, 0, NULL, "fe80::2"},
    /* lists: prefixes, exact names, exclusion */
    {"", "eth", 0, NULL, "10.0.0.1"},
    {"", "eth1", 0, NULL, "10.0.1.1"},
    {"", "nothing,eth10,ib", 0, NULL, "10.0.10.1"},
    {"", "eth1:4,ib", 0, NULL, "10.0.1.1"},
    {"", "=eth", 0, NULL, NULL},
    {"", "=eth10", 0, NULL, "10.0.10.1"},
    {"", "=ib,eth1", 0, NULL, "10.0.1.1"},
    {"", "^lo,docker,virbr", 0, NULL, "10.0.0.1"},
    {"", "^lo,docker,virbr,eth", 0, NULL, "10.1.0.1"},
    {"", "^=lo,docker0,virbr0,eth0,eth1", 0, NULL, "10.0.10.1"},
    {"", "^=lo,docker,virbr,eth", 0, NULL, "172.17.0.1"},
    {"", "eth1", 0, "10.0.10.7", "10.0.1.1"},
    {"", "^", 0, NULL, NULL},
    {"", "nothing", 0, NULL, NULL},
};

static void test_interfaces(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        const choice *c = &choices[i];
        mti_interface here[16];
        mti_address beside, wanted;
        const mti_interface *chosen;
        int count = 0;
        for (size_t k = 0; k < sizeof fake_interfaces / sizeof *fake_interfaces; k++) {
            char word[32];
            snprintf(word, sizeof word, " %s ", fake_interfaces[k].name);
            if (strstr(c->without, word)) continue;
            here[count].name = fake_interfaces[k].name;
            here[count].at = address_of(fake_interfaces[k].at);
            here[count++].mask = address_of(fake_interfaces[k].mask);
        }
        if (c->beside) beside = address_of(c->beside);
        chosen = mti_interface_choose(here, count, c->list, c->family, c->beside ? &beside : NULL);
        if (c->chosen) wanted = address_of(c->chosen);
        if (!chosen != !c->chosen || (chosen && memcmp(&chosen->at, &wanted, sizeof wanted) != 0))
            fail_msg("choice %d: not %s", (int)i, c->chosen ? c->chosen : "none");
    }
}

/* ---- connections ------------------------------------------------------------------------------------------------- */

/* Listens at the loopback address, so that a test needs no network. */
static int listen_at(const char *host, mti_listener *listener) {
    mti_address address = address_of(host);
    int fd;
    memset(listener, 0, sizeof *listener);
    assert_true(mti_random(listener->secret));
    fd = mti_listener_bind(&address, listener);
    return fd;
}

static int connect_to(const mti_listener *listener) {
    mti_address address = mti_listener_address(listener);
    struct sockaddr_storage at;
    socklen_t bytes = mti_address_write(&address, listener->port, &at);
    int fd = socket(address.family, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, bytes) != 0) fail_msg("no connection to this machine");
    return fd;
}

/* A rank that connects in a thread of its own. The time only ends a test that hangs. */
typedef struct peer {
    int rank, size, fd; /* fd: of its listener */
    const mti_listener *listeners;
    double seconds;
    mti_channel *channel;
    int opened, absent;
    pthread_t thread;
} peer;

static void *connect_peer(void *argument) {
    peer *p = (peer *)argument;
    p->opened = mti_channel_connect(p->channel, p->fd, p->listeners, p->seconds, &p->absent);
    return NULL;
}

static void peer_start(peer *p, int rank, int size, int fd, const mti_listener *listeners, double seconds) {
    pthread_attr_t small;
    memset(p, 0, sizeof *p);
    p->rank = rank;
    p->size = size;
    p->fd = fd;
    p->listeners = listeners;
    p->seconds = seconds;
    p->channel = mti_channel_new(rank, size);
    assert_non_null(p->channel);
    assert_int_equal(pthread_attr_init(&small), 0);
    assert_int_equal(pthread_attr_setstacksize(&small, (size_t)256 << 10), 0);
    assert_int_equal(pthread_create(&p->thread, &small, connect_peer, p), 0);
    pthread_attr_destroy(&small);
}

static void peer_end(peer *p) { mti_channel_free(p->channel); }

/* Sends a message of the first part of a connection, as one that knows `secret`. */
static void say(int fd, mti_message_kind kind, int rank, const uint64_t *random, uint64_t proof) {
    mti_caller c;
    mti_caller_begin(&c, fd, MTI_CONNECTS, rank);
    mti_caller_say(&c, kind, rank, random, proof);
}

static mti_message hear(int fd) {
    mti_message m;
    assert_int_equal(recv(fd, &m, sizeof m, MSG_WAITALL), sizeof m);
    return m;
}

/* Waits until the other side has closed the connection, and closes it. */
static void is_closed(int fd) {
    char byte;
    assert_true(recv(fd, &byte, 1, 0) <= 0);
    close(fd);
}

#define SILENT 120
#define GROUP 4

/* Says hello as rank 1, and returns the connection and the random numbers of both sides. */
static int greet(const mti_listener *listener, uint64_t hello[2], uint64_t challenge[2]) {
    int fd = connect_to(listener);
    mti_message m;
    hello[0] = hello[1] = 7;
    say(fd, MTI_MESSAGE_HELLO, 1, hello, 0);
    m = hear(fd);
    assert_true(m.kind == MTI_MESSAGE_CHALLENGE && m.rank == 0);
    challenge[0] = m.what;
    challenge[1] = m.count;
    assert_int_equal(m.recvcount, mti_proof(listener->secret, MTI_MESSAGE_CHALLENGE, 1, 0, hello, challenge));
    assert_true(m.what != listener->secret[0] && m.count != listener->secret[1]);
    return fd;
}

/* Who says something wrong, or does not know the secret, is refused. */
static void refuse_strangers(const mti_listener *listener) {
    static const struct {
        int kind, rank;
    } wrong[] = {{MTI_MESSAGE_HELLO, 0},
                 {MTI_MESSAGE_HELLO, GROUP},
                 {MTI_MESSAGE_HELLO, -1},
                 {MTI_MESSAGE_OPEN, 1},
                 {MTI_MESSAGE_PROOF, 1},
                 {MTI_MESSAGE_READY, 1},
                 {1000000, 1}};
    uint64_t hello[2], challenge[2], old[2], other[2] = {listener->secret[0], listener->secret[1] ^ 1};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        int fd = connect_to(listener);
        say(fd, (mti_message_kind)wrong[i].kind, wrong[i].rank, NULL, 0);
        is_closed(fd);
    }
    for (int how = 0; how < 6; how++) {
        int fd = greet(listener, hello, challenge), as = how == 2 ? 2 : 1, kind = MTI_MESSAGE_PROOF;
        const uint64_t *secret = how == 0 ? other : listener->secret;
        uint64_t proof;
        if (how == 1) kind = MTI_MESSAGE_CHALLENGE; /* what the parent has sent comes back */
        proof = mti_proof(secret, kind, as, 0, hello, how == 5 ? old : challenge);
        memcpy(old, challenge, sizeof old); /* the last one sends what was right in another connection */
        if (how == 3) proof = 0;
        if (how == 4) say(fd, MTI_MESSAGE_READY, 1, NULL, proof);
        else say(fd, MTI_MESSAGE_PROOF, as, NULL, proof);
        is_closed(fd);
    }
}

/* Many connections that say nothing, not enough, or something wrong: all ranks connect. The silent ones stay open, and
   rank 0 could not wait for each of them. */
static void test_strangers(void **state) {
    mti_listener listeners[GROUP];
    int fd = listen_at("127.0.0.1", listeners), silent[SILENT];
    mti_message part = message_of(MTI_MESSAGE_HELLO, 1, 1, 0);
    uint64_t hello[2], challenge[2];
    peer peers[GROUP];
    (void)state;
    assert_true(fd >= 0);
    peer_start(&peers[0], 0, GROUP, fd, listeners, 600);
    for (int i = 0; i < SILENT; i++) {
        silent[i] = i % 3 == 1 ? greet(listeners, hello, challenge) : connect_to(listeners);
        if (i % 3 == 0) assert_int_equal(send(silent[i], &part, 1 + (size_t)i % (sizeof part - 1), 0), 1 + i % 39);
    }
    refuse_strangers(listeners);
    for (int r = 1; r < GROUP; r++) peer_start(&peers[r], r, GROUP, -1, listeners, 600);
    for (int r = 0; r < GROUP; r++) {
        pthread_join(peers[r].thread, NULL);
        assert_true(peers[r].opened && peers[r].absent == -1);
    }
    for (int r = 1; r < GROUP; r++) {
        mti_message m = message_of(MTI_MESSAGE_LATE, r, 0, 0), back;
        int line = peers[0].channel->connections[r].fd;
        assert_int_equal(send(peers[r].channel->connections[0].fd, &m, sizeof m, 0), sizeof m);
        assert_int_equal(fcntl(line, F_SETFL, 0), 0);
        back = hear(line);
        assert_int_equal(back.rank, r);
    }
    for (int r = 0; r < GROUP; r++) peer_end(&peers[r]);
    for (int i = 0; i < SILENT; i++) close(silent[i]);
    close(fd);
}

/* A rank that has given up before all have come is not a part of the group: when it comes again, it is. */
static void test_a_rank_that_comes_again(void **state) {
    mti_listener listener;
    int fd = listen_at("127.0.0.1", &listener), first, second;
    uint64_t hello[2], challenge[2];
    peer peers[2];
    (void)state;
    peer_start(&peers[0], 0, 2, fd, &listener, 600);
    first = greet(&listener, hello, challenge);
    say(first, MTI_MESSAGE_PROOF, 1, NULL, mti_proof(listener.secret, MTI_MESSAGE_PROOF, 1, 0, hello, challenge));
    second = greet(&listener, hello, challenge); /* a second one of the same rank is refused while the first is there */
    say(second, MTI_MESSAGE_PROOF, 1, NULL, mti_proof(listener.secret, MTI_MESSAGE_PROOF, 1, 0, hello, challenge));
    is_closed(second);
    say(first, MTI_MESSAGE_HELLO, 1, NULL, 0); /* no rank says this again */
    is_closed(first);
    peer_start(&peers[1], 1, 2, -1, &listener, 600);
    for (int r = 0; r < 2; r++) pthread_join(peers[r].thread, NULL);
    assert_true(peers[0].opened && peers[1].opened);
    for (int r = 0; r < 2; r++) peer_end(&peers[r]);
    close(fd);
}

/* A process that listens in the place of rank 0 and does not know the secret: it is refused, and says what is wrong. */
static void test_another_listener(void **state) {
    mti_listener listener;
    mti_message old = message_of(MTI_MESSAGE_OPEN, 0, 0, 0);
    int fd = listen_at("127.0.0.1", &listener);
    (void)state;
    assert_int_equal(fcntl(fd, F_SETFL, 0), 0);
    for (int how = 0; how < 8; how++) {
        uint64_t other[2] = {listener.secret[0] ^ 1, listener.secret[1]}, random[2] = {3, 4}, said[2], proof;
        mti_message hello;
        peer p;
        int caller, kind = how == 3 ? MTI_MESSAGE_PROOF : MTI_MESSAGE_CHALLENGE;
        peer_start(&p, 1, 2, -1, &listener, 600);
        caller = accept(fd, NULL, NULL);
        hello = hear(caller);
        assert_true(hello.kind == MTI_MESSAGE_HELLO && hello.rank == 1);
        assert_true(hello.what != listener.secret[0] && hello.count != listener.secret[1]);
        said[0] = hello.what;
        said[1] = hello.count;
        proof = mti_proof(how == 0 ? other : listener.secret, kind, how == 2 ? 2 : 1, 0, said, random);
        if (how <= 3) say(caller, MTI_MESSAGE_CHALLENGE, 0, random, proof);
        if (how == 4) say(caller, MTI_MESSAGE_OPEN, 0, NULL, 0);
        if (how == 5) assert_int_equal(send(caller, &hello, sizeof hello, 0), sizeof hello);
        if (how == 6) assert_int_equal(send(caller, &old, sizeof old, 0), sizeof old);
        if (how == 1) { /* this one is right; what it has sent is replayed later */
            mti_message answer = hear(caller);
            assert_true(answer.kind == MTI_MESSAGE_PROOF && answer.rank == 1);
            assert_int_equal(answer.recvcount, mti_proof(listener.secret, MTI_MESSAGE_PROOF, 1, 0, said, random));
            old = message_of(MTI_MESSAGE_CHALLENGE, 0, random[0], 0);
            old.count = random[1];
            old.recvcount = proof;
        }
        if (how == 1 || how == 7) close(caller);
        else is_closed(caller); /* without a proof, which who does not know the secret could use */
        pthread_join(p.thread, NULL);
        assert_true(!p.opened && p.absent == 1);
        peer_end(&p);
    }
    close(fd);
}

/* Rank 0 waits for a rank that never comes, and then names it. The listener of the other one says nothing. */
static void test_nobody_comes(void **state) {
    mti_listener listener;
    int fd = listen_at("127.0.0.1", &listener);
    (void)state;
    for (int r = 0; r < 2; r++) {
        mti_channel *b = mti_channel_new(r, 2);
        int absent = -1;
        assert_int_equal(mti_channel_connect(b, fd, &listener, 0.05, &absent), 0);
        assert_int_equal(absent, 1);
        mti_channel_free(b);
    }
    close(fd);
}

/* ---- many ranks -------------------------------------------------------------------------------------------------- */

typedef struct crowd {
    int size;
    mti_listener *listeners;
    int *fds;
    peer *peers;
    mt_comm *comm; /* for the sentences */
} crowd;

/* A process needs a descriptor for each end of a connection, and one for each listener. */
static int descriptors_suffice(int size) {
    rlim_t wanted = (rlim_t)size * 3 + 64;
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_cur >= wanted) return 1;
    if (limit.rlim_max < wanted) {
        print_message(
            "%d ranks need %lld file descriptors, and this process gets %lld: raise the hard limit (ulimit -Hn)\n",
            size, (long long)wanted, (long long)limit.rlim_max);
        return 0;
    }
    limit.rlim_cur = wanted;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

/* Connects ranks at the address `host`. Rank `lost` does not find its parent; -1: none */
static void crowd_connect_in(crowd *c, int size, const char *host, int lost, double seconds) {
    mti_listener *astray = NULL;
    struct sockaddr_in closed;
    socklen_t bytes = sizeof closed;
    int no_listener = socket(AF_INET, SOCK_STREAM, 0);
    memset(c, 0, sizeof *c);
    c->size = size;
    c->listeners = calloc((size_t)size, sizeof *c->listeners);
    c->fds = calloc((size_t)size, sizeof *c->fds);
    c->peers = calloc((size_t)size, sizeof *c->peers);
    for (int r = 0; r < size; r++) c->fds[r] = listen_at(host, &c->listeners[r]);
    if (lost >= 0) { /* an address that belongs to this test, at which nothing listens */
        astray = calloc((size_t)size, sizeof *astray);
        memcpy(astray, c->listeners, (size_t)size * sizeof *astray);
        memset(&closed, 0, sizeof closed);
        closed.sin_family = AF_INET;
        closed.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        assert_int_equal(bind(no_listener, (struct sockaddr *)&closed, sizeof closed), 0);
        assert_int_equal(getsockname(no_listener, (struct sockaddr *)&closed, &bytes), 0);
        astray[mti_rank_parent(lost)].port = ntohs(closed.sin_port);
    }
    for (int r = 0; r < size; r++)
        peer_start(&c->peers[r], r, size, c->fds[r], r == lost ? astray : c->listeners, seconds);
    for (int r = 0; r < size; r++) pthread_join(c->peers[r].thread, NULL);
    close(no_listener);
    free(astray);
}

static void crowd_connect(crowd *c, int size, const char *host) { crowd_connect_in(c, size, host, -1, 600); }

static void crowd_end(crowd *c) {
    for (int r = 0; r < c->size; r++) {
        peer_end(&c->peers[r]);
        if (c->fds[r] >= 0) close(c->fds[r]);
    }
    free(c->listeners);
    free(c->fds);
    free(c->peers);
}

/* Rank `rank` makes a call, or says something else. */
static void crowd_say(crowd *c, int rank, mti_message_kind kind, const mti_said *said, const char *text) {
    mti_message m = message_of((int)kind, rank, said ? said->what : 0, text ? strlen(text) + 1 : 0);
    if (said) m.count = said->count;
    if (said) m.recvcount = said->recvcount;
    assert_true(mti_message_add(&c->peers[rank].channel->queue, &m, text));
}

/* All ranks read and work once, as their comparers do. */
static void crowd_work(crowd *c) {
    for (int r = 0; r < c->size; r++) {
        mti_channel *b = c->peers[r].channel;
        for (int i = 0; i < b->connection_count; i++) mti_channel_read(b, i);
        mti_channel_swap(b);
        mti_channel_work(b);
    }
}

/* The descriptors that stay open. */
static int connections_of(const mti_channel *b) {
    int n = 0;
    for (int i = 0; i < b->connection_count; i++) n += b->connections[i].fd >= 0;
    return n;
}

/* Waits until all ranks have the result. Checks the sentence on some of them. */
static void crowd_result(crowd *c, mti_why why, const char *words) {
    mt_comm *comm = mti_comm_new(&mti_threads, 0, c->size, "crowd");
    mti_text text;
    assert_non_null(comm);
    comm->group = mti_group_new(c->size, 1, 0);
    assert_non_null(comm->group);
    comm->group->references = 1;
    for (int r = 0; r < c->size; r++)
        while (!mti_channel_is_decided(c->peers[r].channel)) crowd_work(c);
    for (int r = 0; r < c->size; r += c->size < 100 ? 1 : 97) {
        assert_int_equal(c->peers[r].channel->result.what, why);
        comm->nccl.channel = c->peers[r].channel;
        mti_channel_error(comm, &text);
        if (!strstr(text.data, words)) fail_msg("rank %d: %s", r, text.data);
    }
    comm->nccl.channel = NULL;
    mti_comm_free(comm);
}

#define ROUNDS 20

/* Ranks call the same; then one calls something else. No rank has more than 33 connections. */
static void test_tree(void **state) {
    int size = getenv("MT_TEST_RANKS") ? atoi(getenv("MT_TEST_RANKS")) : 64, odd = size - 1;
    char words[160];
    mti_said sum = sum_of(1), other = sum_of(2), half;
    crowd c;
    (void)state;
    if (!descriptors_suffice(size)) skip();
    crowd_connect(&c, size, "127.0.0.1");
    for (int r = 0; r < size; r++) {
        assert_true(c.peers[r].opened && c.peers[r].absent == -1);
        assert_true(connections_of(c.peers[r].channel) <= 1 + MTI_CHANNEL_CHILDREN);
    }
    for (int i = 0; i < ROUNDS; i++)
        for (int r = 0; r < size; r++) crowd_say(&c, (r + i) % size, MTI_MESSAGE_CALL, &sum, NULL);
    half = send_of(odd, 3), crowd_say(&c, odd - 1, MTI_MESSAGE_CALL, &half, NULL);
    half = recv_of(odd - 1, 3), crowd_say(&c, odd, MTI_MESSAGE_CALL, &half, NULL);
    while (c.peers[0].channel->first < ROUNDS || c.peers[0].channel->waiting ||
           mti_channel_last(c.peers[0].channel)[odd].count != 3) {
        crowd_work(&c);
        assert_true(c.peers[0].channel->gone_at == 0);
    }
    for (int r = 0; r < size; r++) assert_true(!c.peers[r].channel->decided && !c.peers[r].channel->ended);
    for (int r = 0; r < size; r++) crowd_say(&c, r, MTI_MESSAGE_CALL, r == odd ? &other : &sum, NULL);
    snprintf(words, sizeof words, "rank %d called all_reduce(count 2, f32, sum)", odd);
    crowd_result(&c, MTI_WHY_DIFFERS, words);
    crowd_end(&c);
}

/* Sends between ranks of different branches, a rank that is late, one that fails, one that leaves and one that is
   killed: every rank learns it, with the right number. */
static void test_ranks_of_a_tree(void **state) {
    static const struct {
        mti_why why;
        const char *words;
    } cases[] = {
        {MTI_WHY_UNLIKE,
         "rank 40 called send(count 3, f32, to rank 50), rank 50 called recv(count 4, f32, from rank 40)"},
        {MTI_WHY_LATE, " s for rank 45, which has not called anything here yet"},
        {MTI_WHY_FAILED, "rank 63 has failed"},
        {MTI_WHY_LEFT, "rank 44 has left early"},
        {MTI_WHY_LEFT, "rank 1 has left early"},
        {MTI_WHY_LEFT, "rank 44 is gone"},
        {MTI_WHY_LEFT, "rank 1 is gone"},
    };
    (void)state;
    for (int how = 0; how < 7; how++) {
        mti_said sum = sum_of(1), half;
        int absent = how == 1 ? 45 : how == 3 || how == 5 ? 44 : how == 4 || how == 6 ? 1 : -1;
        crowd c;
        crowd_connect(&c, 64, "127.0.0.1");
        half = send_of(50, 3);
        if (how == 0) crowd_say(&c, 40, MTI_MESSAGE_CALL, &half, NULL);
        half = recv_of(40, 4);
        if (how == 0) crowd_say(&c, 50, MTI_MESSAGE_CALL, &half, NULL);
        if (how == 2) crowd_say(&c, 63, MTI_MESSAGE_FAILED, NULL, "rank 63 has failed");
        if (how == 3 || how == 4) crowd_say(&c, absent, MTI_MESSAGE_LEFT, NULL, "has left early");
        if (how == 5 || how == 6)
            for (int i = 0; i < c.peers[absent].channel->connection_count; i++)
                mti_connection_close(&c.peers[absent].channel->connections[i]);
        for (int r = 0; r < 64 && how; r++)
            if (r != absent && how != 2) crowd_say(&c, r, MTI_MESSAGE_CALL, &sum, NULL);
        if (how == 1) { /* the question must not overtake the calls of the others */
            while (c.peers[0].channel->last_round == 0 || c.peers[0].channel->rounds[0].ranks < 63) crowd_work(&c);
            crowd_say(&c, 33, MTI_MESSAGE_LATE, NULL, NULL);
        }
        if (how >= 5) { /* the killed one learns nothing */
            c.peers[absent].channel->decided = 1;
            c.peers[absent].channel->result.what = MTI_WHY_LEFT;
        }
        if (how < 5) crowd_result(&c, cases[how].why, cases[how].words);
        for (int r = 0; r < 64 && how >= 5; r++) {
            mti_channel *b = c.peers[r].channel;
            while (!b->decided) crowd_work(&c);
            assert_true(r == absent || (b->result.what == MTI_WHY_LEFT && b->result.rank == absent));
        }
        crowd_end(&c);
    }
}

/* Whether all ranks say that this one could not connect. In too short a time others could not, either. */
static int is_absent(int lost, double seconds) {
    crowd c;
    int all = 1;
    crowd_connect_in(&c, 40, "127.0.0.1", lost, seconds);
    for (int r = 0; r < 40; r++) assert_false(c.peers[r].opened);
    for (int r = 0; r < 40; r++) all &= c.peers[r].absent == lost;
    crowd_end(&c);
    return all;
}

/* A rank cannot connect, next to rank 0 or below another one: every rank knows which, and none compares. */
static void test_absent(void **state) {
    (void)state;
    for (int lost = 1; lost <= 35; lost += 34) {
        double seconds = 0.25;
        while (!is_absent(lost, seconds) && seconds < 60) seconds *= 2;
        assert_true(seconds < 60);
    }
}

/* IPv6, where the machine has it. */
static void test_ip6(void **state) {
    mti_listener listener;
    char text[MTI_LISTENER_TEXT], wanted[MTI_LISTENER_TEXT];
    int fd = listen_at("::1", &listener);
    crowd c;
    (void)state;
    if (fd < 0) {
        print_message("this machine has no IPv6: ::1 cannot be bound\n");
        skip();
    }
    mti_listener_write(&listener, text);
    snprintf(wanted, sizeof wanted, "[::1]:%d", (int)listener.port);
    assert_string_equal(text, wanted);
    close(fd);
    crowd_connect(&c, 3, "::1");
    for (int r = 0; r < 3; r++) assert_true(c.peers[r].opened);
    crowd_end(&c);
}

/* A rank listens at the address of one interface, and not at others. */
static void test_one_address(void **state) {
    mti_listener listener, elsewhere;
    struct sockaddr_storage at;
    mti_address address;
    socklen_t bytes;
    int fd, other;
    (void)state;
    assert_int_equal(setenv("NCCL_SOCKET_IFNAME", "=lo", 1), 0);
    fd = mti_listener_open(&listener);
    if (fd < 0 && listener.lacks == MTI_LACKS_ADDRESS) {
        unsetenv("NCCL_SOCKET_IFNAME");
        print_message("this machine has no interface lo\n");
        skip();
    }
    assert_true(fd >= 0 && listener.version == 4 && listener.host[0] == 127 && listener.lacks == MTI_LACKS_NOTHING);
    elsewhere = listener;
    elsewhere.host[3] = 2; /* 127.0.0.2 belongs to this machine, too */
    address = mti_listener_address(&elsewhere);
    bytes = mti_address_write(&address, listener.port, &at);
    other = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(other, (struct sockaddr *)&at, bytes), -1);
    close(other);
    close(connect_to(&listener));
    close(fd);
    assert_int_equal(setenv("NCCL_SOCKET_IFNAME", "=no interface", 1), 0);
    assert_int_equal(mti_listener_open(&listener), -1);
    assert_true(listener.lacks == MTI_LACKS_ADDRESS && listener.port == 0);
    unsetenv("NCCL_SOCKET_IFNAME");
}

/* ---- the thread of the rank does not wait ------------------------------------------------------------------------ */

typedef struct told {
    char text[256];
    mt_log_level level;
} told;

static void keep_warning(void *user, mt_log_level level, const char *text) {
    told *t = (told *)user;
    t->level = level;
    snprintf(t->text, sizeof t->text, "%s", text);
}

/* Makes calls of this kind wait, and lets go those of others. */
static void gate_close(messages_call wanted) {
    pthread_mutex_lock(&messages_gate.mutex);
    messages_gate.wanted = wanted;
    pthread_cond_broadcast(&messages_gate.cond);
    pthread_mutex_unlock(&messages_gate.mutex);
}

static void gate_wait(void) {
    pthread_mutex_lock(&messages_gate.mutex);
    while (!messages_gate.waits) pthread_cond_wait(&messages_gate.cond, &messages_gate.mutex);
    pthread_mutex_unlock(&messages_gate.mutex);
}

/* The comparer waits inside a call of the system, or while it compares. Meanwhile the rank can append its calls. */
static void test_calls_do_not_wait(void **state) {
    static const messages_call calls[] = {MESSAGES_SEND, MESSAGES_RECV, MESSAGES_POLL, MESSAGES_CALLOC};
    mt_context_desc where;
    mt_context *ctx;
    (void)state;
    memset(&where, 0, sizeof where);
    where.arena_bytes = 4096;
    assert_int_equal(mt_context_create(NULL, &where, &ctx), MT_SUCCESS);
    for (int how = 0; how < 4; how++) {
        mti_call call = mti_call_make(MT_ALL_REDUCE, NULL, NULL, 1, MT_F32);
        mti_message message = message_of(MTI_MESSAGE_CALL, 1, ALLREDUCE, 0);
        messages m;
        assert_true(messages_open(&m, how == 0 ? 1 : 0, 2));
        m.comm->nccl.home = ctx;
        assert_true(mti_comparer_join(ctx, m.channel));
        gate_close(calls[how]);
        if (how == 1) messages_send(&m, 1, &message, sizeof message);
        else mti_channel_append(m.comm, MTI_MESSAGE_CALL, &call, NULL);
        gate_wait();
        assert_int_equal(pthread_mutex_trylock(&m.channel->comparer->mutex), 0);
        pthread_mutex_unlock(&m.channel->comparer->mutex);
        for (int i = 0; i < 100; i++) mti_channel_append(m.comm, MTI_MESSAGE_CALL, &call, NULL);
        assert_true(messages_gate.waits && mti_bytes_size(&m.channel->queue) >= 100 * sizeof message);
        gate_close(MESSAGES_NONE);
        mti_channel_close(m.comm);
        m.channel = NULL;
        messages_close(&m);
    }
    mt_context_destroy(ctx);
}

/* When a call has no room in the queue, the comparison ends, and the rank says so, also without another call. */
static void test_no_room_for_calls(void **state) {
    mt_context_desc where;
    mt_context *ctx;
    told warning;
    (void)state;
    memset(&where, 0, sizeof where);
    where.arena_bytes = 4096;
    where.logger.log = keep_warning;
    where.logger.user = &warning;
    assert_int_equal(mt_context_create(NULL, &where, &ctx), MT_SUCCESS);
    for (int ahead = 0; ahead < 2; ahead++) {
        mti_call call = mti_call_make(MT_ALL_REDUCE, NULL, NULL, 1, MT_F32);
        messages m;
        memset(&warning, 0, sizeof warning);
        assert_true(messages_open(&m, 1, 2));
        m.comm->nccl.home = ctx;
        assert_true(mti_comparer_join(ctx, m.channel));
        gate_close(MESSAGES_POLL);
        mti_channel_append(m.comm, MTI_MESSAGE_CALL, &call, NULL);
        gate_wait();
        for (long i = 0; i < MTI_CHANNEL_AHEAD + 3 && ahead; i++)
            mti_channel_append(m.comm, MTI_MESSAGE_CALL, &call, NULL);
        for (long i = 0; i < 100 && !ahead; i++) {
            messages_memory = 0;
            mti_channel_append(m.comm, MTI_MESSAGE_CALL, &call, NULL);
        }
        messages_memory = -1;
        gate_close(MESSAGES_NONE);
        mti_channel_close(m.comm);
        assert_non_null(
            strstr(warning.text, ahead ? "are no longer compared: rank 1 has seen calls that are too far ahead"
                                       : "are no longer compared: rank 1 has no memory for them"));
        m.channel = NULL;
        messages_close(&m);
    }
    mt_context_destroy(ctx);
}

/* ---- a communicator ---------------------------------------------------------------------------------------------- */

typedef enum obstacle { NO_OBSTACLE, NO_LISTENERS, NO_SECRET, NO_INTERFACE, NO_SOCKET, NOBODY, OBSTACLES } obstacle;

typedef struct job {
    mti_listener listeners[2];
    int fd; /* of the listener of rank 0 */
    obstacle obstacle;
    int logs, differs;
    char warning[2][256];
    mt_status status[2];
    mti_text said[2];
} job;

/* What a rank over NCCL does: connects, tells its calls, reads the result, and closes. */
static mt_status comparing_rank(mt_comm *world, void *user) {
    job *j = (job *)user;
    int rank = mt_comm_rank(world), i;
    told warning;
    mti_call call = mti_call_make(MT_ALL_REDUCE, NULL, NULL, (size_t)(j->differs ? 1 + rank : 1), MT_F32);
    mt_context_desc where;
    mt_context *ctx;
    mt_comm *comm;
    memset(&warning, 0, sizeof warning);
    memset(&where, 0, sizeof where);
    where.arena_bytes = 4096;
    if (j->logs) where.logger.log = keep_warning;
    where.logger.user = &warning;
    MT_TRY((mt_context_create)(world, &where, &ctx)); /* really without a logger */
    comm = mti_comm_new(&mti_threads, rank, 2, "compared");
    CHECK(comm);
    comm->nccl.timeout = j->obstacle == NOBODY ? 0.05 : 60;
    comm->nccl.home = ctx;
    comm->nccl.last = call;
    if (j->obstacle != NOBODY || rank == 0)
        MT_TRY(mti_channel_open(ctx, comm, rank ? -1 : j->fd, j->obstacle == NO_LISTENERS ? NULL : j->listeners));
    CHECK((comm->nccl.channel != NULL) == (j->obstacle == NO_OBSTACLE));
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
    j->fd = listen_at("127.0.0.1", j->listeners);
    if (j->obstacle == NO_SECRET) j->listeners[0].lacks = MTI_LACKS_SECRET;
    if (j->obstacle == NO_INTERFACE) j->listeners[0].lacks = MTI_LACKS_ADDRESS;
    if (j->obstacle == NO_INTERFACE || j->obstacle == NO_SOCKET) j->listeners[0].port = 0;
    assert_int_equal(mt_launch(&two, comparing_rank, j), MT_SUCCESS);
    close(j->fd);
}

static void test_compared(void **state) {
    (void)state;
    for (int differs = 0; differs < 2; differs++) {
        job j;
        memset(&j, 0, sizeof j);
        j.differs = differs;
        run_job(&j);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(j.status[r], differs ? MT_ERR_MISMATCH : MT_SUCCESS);
            if (differs) assert_non_null(strstr(j.said[r].data, "rank 1 called all_reduce(count 2, f32, sum)"));
        }
    }
}

/* Without a connection every rank says so, and why: to its logger, or else on stderr. */
static void is_not_compared(obstacle what, int logs, const char *why) {
    static const char words[] = "the calls of the ranks of \"compared\" are not compared: ";
    job j;
    char text[2048] = "", wanted[256];
    FILE *file = tmpfile();
    int old = dup(2), count = 0, ranks = what == NOBODY ? 1 : 2;
    memset(&j, 0, sizeof j);
    j.logs = logs;
    j.obstacle = what;
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
    assert_int_equal(count, logs ? 0 : ranks);
    for (int r = 0; r < ranks; r++) {
        snprintf(wanted, sizeof wanted, why, r, (int)j.listeners[0].port);
        if (what == NOBODY) snprintf(wanted, sizeof wanted, why, (int)j.listeners[0].port);
        if (!strstr(logs ? j.warning[r] : text, wanted)) fail_msg("rank %d: %s%s", r, text, j.warning[r]);
    }
}

static void test_not_compared(void **state) {
    static const char *const why[OBSTACLES] = {
        "",
        "rank %d has no memory for them",
        "rank 0 has no random numbers for a secret: it cannot read /dev/urandom",
        "rank 0 has no network interface to listen at; NCCL_SOCKET_IFNAME may exclude all",
        "rank 0 cannot listen at its address",
        "rank 1 could not connect to rank 0 at 127.0.0.1:%d over TCP",
    };
    (void)state;
    for (int logs = 0; logs < 2; logs++)
        for (int what = NO_LISTENERS; what < OBSTACLES; what++) is_not_compared((obstacle)what, logs, why[what]);
}

/* Without random numbers a rank has no secret, and takes nothing else for one. */
static void test_no_secret(void **state) {
    struct rlimit before, few;
    mti_listener listener;
    int probe = dup(0), fd;
    (void)state;
    close(probe);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = (rlim_t)probe;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    fd = mti_listener_open(&listener);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_true(fd == -1 && listener.lacks == MTI_LACKS_SECRET && listener.port == 0);
}

/* When the comparison ends, the next call of every rank says so once. A rank that has left is no reason for a warning:
   right programs end so. */
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
    for (int why = 0; why < 3; why++) {
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
        assert_int_equal(warning.level, why == MTI_END_LEFT ? MT_LOG_INFO : MT_LOG_WARNING);
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

#define INPUTS 10000

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
        cmocka_unit_test(test_relayed),
        cmocka_unit_test(test_ranks_of_a_subtree),
        cmocka_unit_test(test_merged),
        cmocka_unit_test(test_a_rank_in_the_middle_leaves),
        cmocka_unit_test(test_an_end_from_below),
        cmocka_unit_test(test_siphash),
        cmocka_unit_test(test_proof),
        cmocka_unit_test(test_interfaces),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_a_rank_that_comes_again),
        cmocka_unit_test(test_another_listener),
        cmocka_unit_test(test_nobody_comes),
        cmocka_unit_test(test_tree),
        cmocka_unit_test(test_ranks_of_a_tree),
        cmocka_unit_test(test_absent),
        cmocka_unit_test(test_ip6),
        cmocka_unit_test(test_one_address),
        cmocka_unit_test(test_calls_do_not_wait),
        cmocka_unit_test(test_no_room_for_calls),
        cmocka_unit_test(test_compared),
        cmocka_unit_test(test_not_compared),
        cmocka_unit_test(test_no_secret),
        cmocka_unit_test(test_end_is_told),
        cmocka_unit_test(test_abandon),
        cmocka_unit_test(test_arbitrary_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
