/* ---- ranks over NCCL compare their calls over TCP ---------------------------------------------------------------- */

#pragma once
#include "thread_calls.c"

#if MTI_COMPARES
/* Starts a thread with all signals blocked: those of the program are for its own threads. */
static int mti_thread_start(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    int error;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* NCCL does not compare calls, so each communicator has a channel. Every rank has a TCP connection to rank 0. A call
   appends a message to the queue of its rank and goes on. A thread of the context, the comparer, sends the messages to
   rank 0, whose comparer compares the n-th collectives of all ranks, and the n-th send from a rank to another one with
   the n-th receive. When calls differ, or when a rank has left before a call of the others, it sends the result to all
   ranks, with the calls of all. A rank finds the result in its next call and while it waits for the stream, and writes
   the sentence that threads write (threads.c). A rank whose wait has lasted for the timeout asks who is missing.

   During the creation of a communicator every rank opens a listener, a listening socket, and an all_gather over NCCL
   tells the ranks its addresses. All fields of a channel are guarded by the mutex of the comparer, except those of a
   result, which do not change after `decided` is set, and those of the end, which do not change after `ended` is set.

   What arrives over a connection is checked before it is used: a message that no rank sends ends the connection. All
   buffers have a limit. When there is no memory, or a rank is too far ahead, the comparison ends on all ranks, with a
   warning: calls that differ then time out or have undefined results, as with no_nccl_checks. */

#define MTI_CHANNEL_TICK 2     /* milliseconds: the comparer sends the messages of this time together */
#define MTI_CHANNEL_GRACE 1.0  /* seconds for messages that are on their way: of other ranks, or of one that is gone */
#define MTI_CHANNEL_ANSWER 0.5 /* seconds that a rank waits for the answer who is missing */
#define MTI_CHANNEL_OPENING 10.0 /* seconds in which all ranks must connect to rank 0 */
#define MTI_CHANNEL_AHEAD 262144 /* calls by which a rank may be ahead of another one, or of the network */
#define MTI_CHANNEL_PART 16384   /* bytes that are read from a connection before they are looked at */

typedef enum mti_message_kind {
    MTI_MESSAGE_HELLO, /* `what`: the listener's token */
    MTI_MESSAGE_OPEN,  /* all ranks are connected; `what`: the token */
    MTI_MESSAGE_CALL,
    MTI_MESSAGE_LATE,   /* the rank has waited for the timeout */
    MTI_MESSAGE_FAILED, /* text: a sentence */
    MTI_MESSAGE_LEFT,   /* text: why; of rank 0: `count` is the number of its collectives */
    MTI_MESSAGE_RESULT, /* `what`: mti_why; rank, and recvcount - 1: the ranks that it is about, or -1; text: the calls
                           of all ranks, and a sentence */
    MTI_MESSAGE_END /* the calls are no longer compared; rank: that has ended the comparison; `what`: mti_end_reason */
} mti_message_kind;

typedef struct mti_message {
    int32_t kind, rank;
    uint64_t what, count, recvcount; /* the call, as in mti_slot */
    uint64_t bytes;                  /* of the text behind the message */
} mti_message;

#define MTI_MESSAGE_TEXT ((size_t)MT_ERROR_BYTES + 128) /* most bytes of a sentence, with its NUL */

typedef enum mti_why { MTI_WHY_DIFFERS, MTI_WHY_UNLIKE, MTI_WHY_LATE, MTI_WHY_LEFT, MTI_WHY_FAILED } mti_why;

typedef enum mti_end_reason { MTI_END_MEMORY, MTI_END_AHEAD } mti_end_reason;

typedef struct mti_said {
    uint64_t what, count, recvcount, inside; /* as in mti_slot */
} mti_said;

/* The n-th collective as the first rank has called it. */
typedef struct mti_round {
    mti_said said;
    int ranks; /* number of ranks that have called their n-th collective */
} mti_round;

/* Bytes that leave in the order in which they came: those from `first` to `end` of data. */
typedef struct mti_bytes {
    char *data;
    size_t first, end, room;
} mti_bytes;

/* Between two ranks: the sends that have no receive yet, or the receives that have no send. Rank `from` keeps them. */
typedef struct mti_pair {
    struct mti_pair *next; /* the next one with the same `from` */
    int from, to, sends;
    mti_bytes waiting; /* mti_said */
} mti_pair;

typedef struct mti_connection {
    int fd;   /* -1: closed */
    int lost; /* 1: the comparer closes it */
    mti_bytes in, out;
} mti_connection;

typedef struct mti_channel {
    struct mti_channel *next; /* in the list of the comparer */
    struct mti_comparer *comparer;
    int rank, size;
    mti_bytes queue; /* messages of this rank that the comparer has not taken yet */
    /* rank 0: one to each rank, the first one unused; other ranks: only the first one, to rank 0 */
    mti_connection *connections;
    int connection_count;
    int decided; /* atomic; 1: there is a result */
    mti_message result;
    mti_bytes shown;              /* the text of the result */
    int ended;                    /* atomic; 1: the calls are no longer compared */
    mti_message end;              /* why */
    int end_is_sent, end_is_told; /* to the other ranks; to the program */
    /* per rank; only rank 0 knows those of the others */
    mti_said *last;     /* the last call */
    uint64_t *number;   /* number of collectives */
    mti_bytes *reasons; /* why the rank has left; empty: it has not left */
    double gone_at;     /* a rank is gone without a farewell since then; 0: none is */
    int gone, left_count;
    /* only at rank 0 */
    mti_round *rounds; /* a ring of `room` rounds, which has those from `first` on */
    size_t room;
    uint64_t first, last_round; /* last_round: behind the last one */
    mti_pair **pairs;           /* per rank: the list of those that it sends to */
    size_t waiting;             /* sends and receives in all pairs */
    uint64_t odd;               /* number of the collective that differs + 1; 0: none does */
    mti_said *odd_calls;        /* that call of each rank */
    double odd_at;
} mti_channel;

/* Belongs to the channels of one context. */
typedef struct mti_comparer {
    pthread_mutex_t mutex;
    pthread_t thread;
    int users, ends;
    mti_channel *channels;
    int changed; /* 1: a channel has been added or removed while the thread was in poll */
    int sleeps;  /* 1: the thread is in poll until something happens */
    int bell[2]; /* a pipe that wakes the thread */
    struct pollfd *polled;
    int polled_room;
} mti_comparer;

static size_t mti_bytes_size(const mti_bytes *b) { return b->end - b->first; }
static const char *mti_bytes_front(const mti_bytes *b) { return b->data + b->first; }

/* Makes room for n bytes, and for the one message that mti_channel_send_end appends. Returns 0 when there is no memory.
   Bytes move to the front only when at least as many have left, so that each of them moves a few times at most. */
static int mti_bytes_reserve(mti_bytes *b, size_t n) {
    size_t size = mti_bytes_size(b), room = 2 * (size + n) + 1024;
    char *data;
    if (b->room - b->end >= n + sizeof(mti_message)) return 1;
    if (b->first >= size && b->room - size >= n + sizeof(mti_message)) {
        if (size) memmove(b->data, b->data + b->first, size);
    } else {
        data = (char *)malloc(room);
        if (!data) return 0;
        if (size) memcpy(data, b->data + b->first, size);
        free(b->data);
        b->data = data;
        b->room = room;
    }
    b->first = 0;
    b->end = size;
    return 1;
}

static void mti_bytes_put(mti_bytes *b, const void *from, size_t n) {
    if (n) memcpy(b->data + b->end, from, n);
    b->end += n;
}

static int mti_bytes_add(mti_bytes *b, const void *from, size_t n) {
    if (!mti_bytes_reserve(b, n)) return 0;
    mti_bytes_put(b, from, n);
    return 1;
}

static void mti_bytes_drop(mti_bytes *b, size_t n) {
    b->first += n;
    if (b->first == b->end) b->first = b->end = 0;
}

static void mti_bytes_free(mti_bytes *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

/* Adds a message with a text, both or nothing. */
static int mti_message_add(mti_bytes *b, const mti_message *message, const char *text) {
    if (!mti_bytes_reserve(b, sizeof *message + (size_t)message->bytes)) return 0;
    mti_bytes_put(b, message, sizeof *message);
    mti_bytes_put(b, text, (size_t)message->bytes);
    return 1;
}

/* Whether a rank can have made this call, or (0) none. */
static int mti_said_is_valid(const mti_said *said) {
    int kind = (int)(said->what & 255) - 1, known = kind >= 0 && kind < (int)MT_COLLECTIVE_COUNT;
    return said->inside <= 255 && (said->what >> 8 & 255) <= MT_U8 && (said->what >> 16 & 255) <= MT_MAX &&
           (kind == -1 || known || (kind >= (int)MTI_SPLIT && kind <= (int)MTI_GRAPH_LAUNCH));
}

static mti_said mti_said_of(const mti_message *message) {
    mti_said said;
    said.what = message->what;
    said.count = message->count;
    said.recvcount = message->recvcount;
    said.inside = 0;
    return said;
}

/* Whether a message of this head can come from a rank of a group of `size`. */
static int mti_message_is_valid(const mti_message *m, int size) {
    size_t calls = (size_t)size * sizeof(mti_said);
    mti_said said = mti_said_of(m);
    if (m->rank < -1 || m->rank >= size) return 0;
    switch (m->kind) {
    case MTI_MESSAGE_HELLO:
    case MTI_MESSAGE_OPEN:
    case MTI_MESSAGE_LATE: return m->bytes == 0;
    case MTI_MESSAGE_CALL: return m->bytes == 0 && mti_said_is_valid(&said);
    case MTI_MESSAGE_END: return m->bytes == 0 && m->rank >= 0 && m->what <= MTI_END_AHEAD;
    case MTI_MESSAGE_FAILED:
    case MTI_MESSAGE_LEFT: return m->bytes >= 2 && m->bytes <= MTI_MESSAGE_TEXT;
    case MTI_MESSAGE_RESULT:
        if (m->bytes < calls + 1 || m->bytes > calls + MTI_MESSAGE_TEXT || m->recvcount > (uint64_t)size) return 0;
        if (m->what == MTI_WHY_UNLIKE) return m->rank >= 0 && m->recvcount >= 1;
        return m->what <= MTI_WHY_FAILED && (m->what != MTI_WHY_LEFT || m->rank >= 0);
    default: return 0;
    }
}

/* Whether the text behind a valid head is valid: it ends, and the calls in it are calls. */
static int mti_message_text_is_valid(const mti_message *m, int size, const char *text) {
    size_t calls = m->kind == MTI_MESSAGE_RESULT ? (size_t)size * sizeof(mti_said) : 0, at;
    mti_said said;
    if (m->bytes == 0) return 1;
    for (at = 0; at < calls; at += sizeof said) {
        memcpy(&said, text + at, sizeof said);
        if (!mti_said_is_valid(&said)) return 0;
    }
    return strlen(text + calls) == (size_t)m->bytes - calls - 1;
}

typedef enum mti_parsed { MTI_PARSED, MTI_INCOMPLETE, MTI_MALFORMED } mti_parsed;

/* Reads the first message of b, and the address of its text. size: of the group */
static mti_parsed mti_message_parse(const mti_bytes *b, int size, mti_message *message, const char **text) {
    if (mti_bytes_size(b) < sizeof *message) return MTI_INCOMPLETE;
    memcpy(message, mti_bytes_front(b), sizeof *message);
    if (!mti_message_is_valid(message, size)) return MTI_MALFORMED;
    *text = mti_bytes_front(b) + sizeof *message;
    if (mti_bytes_size(b) - sizeof *message < message->bytes) return MTI_INCOMPLETE;
    /* strlen stops at the NUL, or at the last byte */
    if (message->bytes && (*text)[message->bytes - 1] != '\0') return MTI_MALFORMED;
    return mti_message_text_is_valid(message, size, *text) ? MTI_PARSED : MTI_MALFORMED;
}

static void mti_connection_flush(mti_connection *connection) {
    while (connection->fd >= 0 && !connection->lost && mti_bytes_size(&connection->out)) {
        ssize_t n = send(connection->fd, mti_bytes_front(&connection->out), mti_bytes_size(&connection->out),
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) mti_bytes_drop(&connection->out, (size_t)n);
        else if (n < 0 && errno == EINTR) continue;
        else {
            connection->lost = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
            return;
        }
    }
}

/* Reads what has arrived, up to MTI_CHANNEL_PART bytes. Returns their number; -1: there is no memory for them. */
static int mti_connection_read(mti_connection *connection) {
    ssize_t n;
    if (connection->fd < 0 || connection->lost) return 0;
    if (!mti_bytes_reserve(&connection->in, MTI_CHANNEL_PART)) return -1;
    do n = recv(connection->fd, connection->in.data + connection->in.end, MTI_CHANNEL_PART, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n <= 0) {
        connection->lost = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
        return 0;
    }
    connection->in.end += (size_t)n;
    return (int)n;
}

static void mti_connection_close(mti_connection *connection) {
    if (connection->fd >= 0) close(connection->fd);
    connection->fd = -1;
    mti_bytes_free(&connection->in);
    mti_bytes_free(&connection->out);
}

/* -- the end of a comparison -- */

/* Ends the comparison because of rank `rank`. The memory of what has not been compared is freed. A message that has
   been sent in part is completed, and mti_channel_send_end follows. */
static void mti_channel_end(mti_channel *b, int rank, mti_end_reason why) {
    if (b->ended) return;
    memset(&b->end, 0, sizeof b->end);
    b->end.kind = MTI_MESSAGE_END;
    b->end.rank = rank;
    b->end.what = (uint64_t)why;
    mti_bytes_free(&b->queue);
    free(b->rounds);
    b->rounds = NULL;
    b->room = 0;
    b->first = b->last_round = 0;
    __atomic_store_n(&b->ended, 1, __ATOMIC_RELEASE);
}

static int mti_channel_is_ended(const mti_channel *b) { return __atomic_load_n(&b->ended, __ATOMIC_ACQUIRE); }

/* Appends the last message to every connection. mti_bytes_reserve has left room for it. */
static void mti_channel_send_end(mti_channel *b) {
    int i;
    if (!b->ended || b->end_is_sent) return;
    b->end_is_sent = 1;
    for (i = 0; i < b->connection_count; i++)
        if (b->connections[i].fd >= 0) mti_bytes_put(&b->connections[i].out, &b->end, sizeof b->end);
}

static void mti_channel_send(mti_channel *b, mti_connection *connection, const mti_message *message, const char *text) {
    if (connection->fd < 0 || b->ended) return;
    if (mti_bytes_size(&connection->out) > MTI_CHANNEL_AHEAD * sizeof *message)
        mti_channel_end(b, b->rank, MTI_END_AHEAD);
    else if (!mti_message_add(&connection->out, message, text)) mti_channel_end(b, b->rank, MTI_END_MEMORY);
}

/* -- results -- */

/* Stores the result, and at rank 0 sends it to all ranks. Only the first one counts. calls: the calls of all ranks;
   rank, peer: the ranks that it is about, or -1. b->shown has the room since the creation of the channel. */
static void mti_channel_decide(mti_channel *b, mti_why why, int rank, int peer, const mti_said *calls,
                               const char *text) {
    size_t bytes = (size_t)b->size * sizeof *calls, length = strlen(text);
    int i;
    if (b->decided || b->ended) return;
    if (length >= MTI_MESSAGE_TEXT) length = MTI_MESSAGE_TEXT - 1;
    memset(&b->result, 0, sizeof b->result);
    b->result.kind = MTI_MESSAGE_RESULT;
    b->result.rank = rank;
    b->result.what = (uint64_t)why;
    b->result.recvcount = (uint64_t)(peer + 1);
    mti_bytes_put(&b->shown, calls, bytes);
    mti_bytes_put(&b->shown, text, length);
    mti_bytes_put(&b->shown, "", 1);
    b->result.bytes = mti_bytes_size(&b->shown);
    for (i = 0; i < b->connection_count && b->rank == 0; i++)
        mti_channel_send(b, &b->connections[i], &b->result, b->shown.data);
    __atomic_store_n(&b->decided, 1, __ATOMIC_RELEASE);
}

static int mti_channel_is_decided(const mti_channel *b) { return b && __atomic_load_n(&b->decided, __ATOMIC_ACQUIRE); }

static int mti_said_alike(const mti_said *a, const mti_said *b) { return a->what == b->what && a->count == b->count; }

/* The sentence of a result: "rank `rank` has left the group", in all calls. */
static void mti_channel_decide_left(mti_channel *b, int rank) {
    mti_channel_decide(b, MTI_WHY_LEFT, rank, -1, b->last, b->reasons[rank].data);
}

static int mti_channel_has_left(const mti_channel *b, int rank) { return mti_bytes_size(&b->reasons[rank]) > 0; }

/* Writes the error of a result, and returns its status; MT_SUCCESS: there is no result. */
static mt_status mti_channel_error(const mt_comm *comm, mti_text *text) {
    const mti_channel *b = comm->nccl.channel;
    const mti_said *calls;
    int r, rank, peer;
    if (!mti_channel_is_decided(b)) return MT_SUCCESS;
    calls = (const mti_said *)(const void *)b->shown.data;
    rank = b->result.rank;
    peer = (int)b->result.recvcount - 1;
    for (r = 0; r < comm->size; r++) {
        mti_slot *slot = mti_slot_of(comm->group, r);
        slot->what = calls[r].what;
        slot->count = calls[r].count;
        slot->recvcount = calls[r].recvcount;
        slot->inside = (int)calls[r].inside;
        slot->left = r == rank ? (const char *)(calls + comm->size) : NULL;
    }
    if (b->result.what == MTI_WHY_LATE || b->result.what == MTI_WHY_LEFT) /* rank 0 may not know it yet */
        mti_slot_write(mti_slot_of(comm->group, comm->rank), &comm->nccl.last);
    text->used = 0;
    switch ((mti_why)b->result.what) {
    case MTI_WHY_DIFFERS: mti_say_mismatch(text, comm); return MT_ERR_MISMATCH;
    case MTI_WHY_UNLIKE: mti_say_unlike(text, comm, rank, peer); return MT_ERR_MISMATCH;
    case MTI_WHY_LATE: mti_say_timeout(text, comm, peer); return MT_ERR_TIMEOUT;
    case MTI_WHY_LEFT: mti_say_left(text, comm, rank); return MT_ERR_PEER;
    default: mti_say(text, "%s", (const char *)(calls + comm->size)); return MT_ERR_PEER;
    }
}

/* -- the comparison, at rank 0 -- */

/* Makes room for one more round. Returns 0 when the comparison has ended. */
static int mti_channel_grow(mti_channel *b) {
    size_t room = b->room ? 2 * b->room : 64, i;
    mti_round *rounds;
    if (b->last_round - b->first < b->room) return 1;
    rounds = b->room < MTI_CHANNEL_AHEAD ? (mti_round *)calloc(room, sizeof *rounds) : NULL;
    if (!rounds) {
        mti_channel_end(b, b->rank, b->room < MTI_CHANNEL_AHEAD ? MTI_END_MEMORY : MTI_END_AHEAD);
        return 0;
    }
    for (i = 0; b->first + i < b->last_round; i++)
        rounds[(b->first + i) & (room - 1)] = b->rounds[(b->first + i) & (b->room - 1)];
    free(b->rounds);
    b->rounds = rounds;
    b->room = room;
    return 1;
}

/* Stores the calls of the first round in which they differ. The result waits for the calls of the other ranks. */
static void mti_channel_differs(mti_channel *b, uint64_t n, int rank, const mti_said *said) {
    int r;
    if (!b->odd) {
        b->odd = n + 1;
        b->odd_at = mti_now();
        for (r = 0; r < b->size; r++)
            if (r != rank && b->number[r] > n) b->odd_calls[r] = b->rounds[n & (b->room - 1)].said;
    }
    b->odd_calls[rank] = *said;
}

static void mti_channel_collective(mti_channel *b, int rank, const mti_said *said) {
    uint64_t n = b->number[rank];
    mti_round *round;
    int r;
    if (n == b->last_round) {
        if (!mti_channel_grow(b)) return;
        b->last_round++;
        round = &b->rounds[n & (b->room - 1)];
        round->said = *said;
        round->ranks = 0;
    }
    b->number[rank]++;
    round = &b->rounds[n & (b->room - 1)];
    if (b->odd == n + 1 || (!b->odd && !mti_said_alike(&round->said, said))) mti_channel_differs(b, n, rank, said);
    round->ranks++;
    while (b->first < b->last_round && b->rounds[b->first & (b->room - 1)].ranks == b->size) b->first++;
    if (b->odd && b->first >= b->odd) mti_channel_decide(b, MTI_WHY_DIFFERS, -1, -1, b->odd_calls, "");
    for (r = 0; r < b->size && b->left_count && !b->odd; r++)
        if (mti_channel_has_left(b, r) && b->number[r] <= n) mti_channel_decide_left(b, r);
}

/* The messages from one rank to another one; NULL: no memory. */
static mti_pair *mti_channel_pair(mti_channel *b, int from, int to) {
    mti_pair *p = b->pairs[from];
    while (p && p->to != to) p = p->next;
    if (p) return p;
    p = (mti_pair *)calloc(1, sizeof *p);
    if (!p) return NULL;
    p->from = from;
    p->to = to;
    p->next = b->pairs[from];
    b->pairs[from] = p;
    return p;
}

/* Takes the first send or receive that waits, and compares it with its other half. */
static void mti_pair_match(mti_channel *b, mti_pair *p, const mti_said *said, int sends) {
    const mti_said *send = said, *recv = said;
    mti_said first;
    memcpy(&first, mti_bytes_front(&p->waiting), sizeof first);
    mti_bytes_drop(&p->waiting, sizeof first);
    b->waiting--;
    if (sends) recv = &first;
    else send = &first;
    if (send->count == recv->recvcount && (send->what >> 8 & 255) == (recv->what >> 8 & 255)) return;
    b->odd_calls[p->from] = *send;
    b->odd_calls[p->to] = *recv;
    mti_channel_decide(b, MTI_WHY_UNLIKE, p->from, p->to, b->odd_calls, "");
}

/* Compares a send or a receive with its other half, or keeps it until the other half comes. */
static void mti_channel_half(mti_channel *b, int from, int to, int sends, const mti_said *said) {
    mti_pair *p = mti_channel_pair(b, from, to);
    int peer = sends ? to : from;
    if (p && mti_bytes_size(&p->waiting) && p->sends != sends) {
        mti_pair_match(b, p, said, sends);
        return;
    }
    if (mti_channel_has_left(b, peer)) mti_channel_decide_left(b, peer);
    if (b->waiting >= MTI_CHANNEL_AHEAD) mti_channel_end(b, b->rank, MTI_END_AHEAD);
    else if (!p || !mti_bytes_add(&p->waiting, said, sizeof *said)) mti_channel_end(b, b->rank, MTI_END_MEMORY);
    else {
        p->sends = sends;
        b->waiting++;
    }
}

static void mti_channel_call(mti_channel *b, int rank, const mti_said *said) {
    int kind = (int)(said->what & 255) - 1, to = (int)(said->what >> 24 & 0xffff) - 1,
        from = (int)(said->what >> 40 & 0xffff) - 1;
    b->last[rank] = *said;
    if (kind != MT_SEND && kind != MT_RECV && kind != MTI_SEND_RECV) {
        mti_channel_collective(b, rank, said);
        return;
    }
    if (to >= 0 && to < b->size) mti_channel_half(b, rank, to, 1, said);
    if (from >= 0 && from < b->size && !b->ended) mti_channel_half(b, from, rank, 0, said);
}

/* Returns a rank whose send or receive `rank` waits for, or -1. With sender or receiver -1: any of them. */
static int mti_channel_waits_for(const mti_channel *b, int rank, int peer) {
    const mti_pair *p;
    int r;
    for (r = 0; r < b->size; r++)
        for (p = b->pairs[r]; p; p = p->next) {
            int waits = p->sends ? p->from : p->to, other = p->sends ? p->to : p->from;
            if (mti_bytes_size(&p->waiting) && (rank < 0 || waits == rank) && (peer < 0 || other == peer)) return other;
        }
    return -1;
}

/* Stores why a rank has left. It is an error when another rank has made a call that needs it. */
static void mti_channel_leave(mti_channel *b, int rank, const char *reason, size_t bytes) {
    if (mti_channel_has_left(b, rank)) return;
    if (!mti_bytes_add(&b->reasons[rank], reason, bytes)) {
        mti_channel_end(b, b->rank, MTI_END_MEMORY);
        return;
    }
    b->left_count++;
    if (b->last_round > b->number[rank] && !b->odd) mti_channel_decide_left(b, rank);
    if (mti_channel_waits_for(b, -1, rank) >= 0) mti_channel_decide_left(b, rank);
}

/* Answers a rank that has waited for the timeout: which ranks are missing. When none is, there is no result. */
static void mti_channel_late(mti_channel *b, int rank) {
    int r, missing = 0, peer = mti_channel_waits_for(b, rank, -1);
    for (r = 0; r < b->size; r++) {
        b->last[r].inside = b->number[r] >= b->number[rank] ? MTI_IN_COLLECTIVE : MTI_OUTSIDE;
        missing += !b->last[r].inside;
    }
    if (peer >= 0 || missing) mti_channel_decide(b, MTI_WHY_LATE, rank, peer, b->last, "");
}

/* A connection has ended without a farewell: the process of the rank has probably ended. */
static void mti_channel_lost(mti_channel *b, int rank) {
    static const char reason[] = "is gone: its process has ended, or its connection is lost";
    if (mti_channel_has_left(b, rank) || b->ended) return;
    mti_channel_leave(b, rank, reason, sizeof reason);
    b->gone = rank;
    b->gone_at = mti_now();
}

/* Takes a valid message of a rank at rank 0. Returns 0 when no rank sends it to rank 0. */
static int mti_channel_take(mti_channel *b, int rank, const mti_message *message, const char *text) {
    mti_said said = mti_said_of(message);
    switch (message->kind) {
    case MTI_MESSAGE_CALL: mti_channel_call(b, rank, &said); return 1;
    case MTI_MESSAGE_LATE: mti_channel_late(b, rank); return 1;
    case MTI_MESSAGE_LEFT: mti_channel_leave(b, rank, text, (size_t)message->bytes); return 1;
    case MTI_MESSAGE_FAILED: mti_channel_decide(b, MTI_WHY_FAILED, -1, -1, b->last, text); return 1;
    case MTI_MESSAGE_END: mti_channel_end(b, rank, (mti_end_reason)message->what); return 1;
    default: return 0;
    }
}

/* -- the comparison, at the other ranks -- */

/* Takes a valid message of rank 0. Returns 0 when rank 0 does not send it. */
static int mti_channel_take_result(mti_channel *b, const mti_message *message, const char *text) {
    switch (message->kind) {
    case MTI_MESSAGE_RESULT:
        if (b->decided) return 1;
        b->result = *message;
        mti_bytes_put(&b->shown, text,
                      (size_t)message->bytes); /* its largest size, since the creation of the channel */
        __atomic_store_n(&b->decided, 1, __ATOMIC_RELEASE);
        return 1;
    case MTI_MESSAGE_LEFT:
        b->number[0] = message->count;
        mti_channel_leave(b, 0, text, (size_t)message->bytes);
        if (b->number[b->rank] > b->number[0]) mti_channel_decide_left(b, 0);
        return 1;
    case MTI_MESSAGE_END: mti_channel_end(b, message->rank, (mti_end_reason)message->what); return 1;
    default: return 0;
    }
}

/* Sends a message of this rank to rank 0. Behind the farewell of rank 0 a collective is an error. */
static void mti_channel_pass(mti_channel *b, const mti_message *message, const char *text) {
    int kind = (int)(message->what & 255) - 1;
    mti_channel_send(b, b->connections, message, text);
    if (message->kind != MTI_MESSAGE_CALL) return;
    b->last[b->rank] = mti_said_of(message);
    if (kind == MT_SEND || kind == MT_RECV || kind == MTI_SEND_RECV) return;
    b->number[b->rank]++;
    if (mti_channel_has_left(b, 0) && !b->gone_at && b->number[b->rank] > b->number[0]) mti_channel_decide_left(b, 0);
}

/* -- the comparer -- */

/* Takes the messages that have arrived in a connection. rank: the rank at its other end */
static void mti_channel_take_all(mti_channel *b, mti_connection *connection, int rank) {
    mti_message message;
    const char *text = NULL;
    mti_parsed parsed = MTI_PARSED;
    while (!b->ended && (parsed = mti_message_parse(&connection->in, b->size, &message, &text)) == MTI_PARSED) {
        int known =
            b->rank == 0 ? mti_channel_take(b, rank, &message, text) : mti_channel_take_result(b, &message, text);
        mti_bytes_drop(&connection->in, sizeof message + (size_t)message.bytes);
        if (!known) parsed = MTI_MALFORMED;
        if (!known) break;
    }
    if (parsed == MTI_MALFORMED) connection->lost = 1;
    if (b->ended) mti_bytes_drop(&connection->in, mti_bytes_size(&connection->in));
}

/* Reads from a connection, and takes the messages. After the end of a comparison it only waits for the connection's
   end. Returns 1 when there may be more to read. */
static int mti_channel_read(mti_channel *b, mti_connection *connection, int rank) {
    int bytes = mti_connection_read(connection);
    if (bytes < 0) mti_channel_end(b, b->rank, MTI_END_MEMORY);
    mti_channel_take_all(b, connection, rank);
    return bytes > 0 && !connection->lost;
}

/* Takes the messages of this rank. */
static void mti_channel_empty(mti_channel *b) {
    mti_message message;
    const char *text = NULL;
    while (!b->ended && mti_message_parse(&b->queue, b->size, &message, &text) == MTI_PARSED) {
        if (b->rank == 0) mti_channel_take(b, 0, &message, text);
        else mti_channel_pass(b, &message, text);
        if (!b->ended) mti_bytes_drop(&b->queue, sizeof message + (size_t)message.bytes); /* the end has freed it */
    }
}

/* Takes the messages of this rank, sends what there is to send, and ends lost connections. Returns 1 when the comparer
   must look again soon. */
static int mti_channel_work(mti_channel *b) {
    int i, soon = mti_bytes_size(&b->queue) > 0;
    mti_channel_empty(b);
    if (b->odd && !b->decided && mti_now() > b->odd_at + MTI_CHANNEL_GRACE)
        mti_channel_decide(b, MTI_WHY_DIFFERS, -1, -1, b->odd_calls, "");
    if (b->gone_at > 0 && !b->decided && mti_now() > b->gone_at + MTI_CHANNEL_GRACE)
        mti_channel_decide_left(b, b->gone);
    mti_channel_send_end(b);
    for (i = 0; i < b->connection_count; i++) {
        mti_connection_flush(&b->connections[i]);
        if (!b->connections[i].lost) continue;
        b->connections[i].lost = 0;
        mti_connection_close(&b->connections[i]);
        mti_channel_lost(b, b->rank == 0 ? i : 0);
        soon = 1;
    }
    if (b->ended) return !b->end_is_sent;
    return soon || ((b->odd || b->gone_at > 0) && !b->decided);
}

static void mti_channel_free(mti_channel *b) {
    int i;
    if (!b) return;
    for (i = 0; b->connections && i < b->connection_count; i++) mti_connection_close(&b->connections[i]);
    for (i = 0; b->reasons && i < b->size; i++) mti_bytes_free(&b->reasons[i]);
    for (i = 0; b->pairs && i < b->size; i++)
        while (b->pairs[i]) {
            mti_pair *next = b->pairs[i]->next;
            mti_bytes_free(&b->pairs[i]->waiting);
            free(b->pairs[i]);
            b->pairs[i] = next;
        }
    mti_bytes_free(&b->queue);
    mti_bytes_free(&b->shown);
    free(b->connections);
    free(b->last);
    free(b->number);
    free(b->reasons);
    free(b->rounds);
    free(b->pairs);
    free(b->odd_calls);
    free(b);
}

/* Allocates the arrays of a channel, and the memory that must not be missing later. Returns 0 when there is none. */
static int mti_channel_fill(mti_channel *b) {
    size_t n = (size_t)b->size;
    int i;
    b->connections = (mti_connection *)calloc((size_t)b->connection_count, sizeof *b->connections);
    for (i = 0; b->connections && i < b->connection_count; i++) b->connections[i].fd = -1;
    for (i = 0; b->connections && i < b->connection_count; i++)
        if (!mti_bytes_reserve(&b->connections[i].out, 0)) return 0;
    b->last = (mti_said *)calloc(n, sizeof *b->last);
    b->odd_calls = (mti_said *)calloc(n, sizeof *b->odd_calls);
    b->number = (uint64_t *)calloc(n, sizeof *b->number);
    b->reasons = (mti_bytes *)calloc(n, sizeof *b->reasons);
    b->pairs = (mti_pair **)calloc(n, sizeof *b->pairs);
    return b->connections && b->last && b->odd_calls && b->number && b->reasons && b->pairs &&
           mti_bytes_reserve(&b->shown, n * sizeof(mti_said) + MTI_MESSAGE_TEXT);
}

/* NULL: out of memory. */
static mti_channel *mti_channel_new(int rank, int size) {
    mti_channel *b = (mti_channel *)calloc(1, sizeof *b);
    if (!b) return NULL;
    b->rank = rank;
    b->size = size;
    b->connection_count = rank == 0 ? size : 1;
    if (mti_channel_fill(b)) return b;
    mti_channel_free(b);
    return NULL;
}

/* Lists the sockets to poll, the bell first. Returns their number; 0: no memory */
static int mti_comparer_list(mti_comparer *c) {
    int count = 1, n = 0, i;
    mti_channel *b;
    for (b = c->channels; b; b = b->next) count += b->connection_count;
    if (count > c->polled_room) {
        struct pollfd *polled = (struct pollfd *)realloc(c->polled, (size_t)count * sizeof *polled);
        if (!polled) return 0;
        c->polled = polled;
        c->polled_room = count;
    }
    memset(c->polled, 0, (size_t)count * sizeof *c->polled);
    c->polled[n].fd = c->bell[0];
    c->polled[n++].events = POLLIN;
    for (b = c->channels; b; b = b->next)
        for (i = 0; i < b->connection_count; i++, n++) { /* poll ignores a negative fd */
            c->polled[n].fd = b->connections[i].fd;
            c->polled[n].events = (short)(POLLIN | (mti_bytes_size(&b->connections[i].out) ? POLLOUT : 0));
        }
    return n;
}

static void *mti_comparer_run(void *argument) {
    mti_comparer *c = (mti_comparer *)argument;
    mti_channel *b;
    char rung[64];
    pthread_mutex_lock(&c->mutex);
    while (!c->ends) {
        int soon = 0, n, i;
        for (b = c->channels; b; b = b->next) soon |= mti_channel_work(b);
        n = mti_comparer_list(c);
        c->changed = 0;
        c->sleeps = !soon;
        pthread_mutex_unlock(&c->mutex);
        poll(c->polled, (nfds_t)n, soon || !n ? MTI_CHANNEL_TICK : -1);
        pthread_mutex_lock(&c->mutex);
        c->sleeps = 0;
        if (n && c->polled[0].revents && read(c->bell[0], rung, sizeof rung) < 0) continue;
        if (c->changed || !n) continue;
        for (b = c->channels, n = 1; b; b = b->next)
            for (i = 0; i < b->connection_count; i++, n++)
                if (c->polled[n].revents) mti_channel_read(b, &b->connections[i], i);
    }
    pthread_mutex_unlock(&c->mutex);
    return NULL;
}

/* Wakes the thread. The caller holds the mutex. */
static void mti_comparer_ring(mti_comparer *c) {
    if (write(c->bell[1], "", 1) == 1) c->sleeps = 0;
}

static void mti_socket_set(int fd) {
    int on = 1;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* fails on a pipe, which needs none */
}

static mti_comparer *mti_comparer_new(void) {
    mti_comparer *c = (mti_comparer *)calloc(1, sizeof *c);
    if (!c) return NULL;
    if (pipe(c->bell) == 0) {
        mti_socket_set(c->bell[0]);
        mti_socket_set(c->bell[1]);
        if (pthread_mutex_init(&c->mutex, NULL) == 0) {
            if (mti_thread_start(&c->thread, mti_comparer_run, c) == 0) return c;
            pthread_mutex_destroy(&c->mutex);
        }
        close(c->bell[0]);
        close(c->bell[1]);
    }
    free(c);
    return NULL;
}

/* The last channel ends the thread. */
static void mti_comparer_leave(mti_comparer *c) {
    if (--c->users > 0) return;
    pthread_mutex_lock(&c->mutex);
    c->ends = 1;
    mti_comparer_ring(c);
    pthread_mutex_unlock(&c->mutex);
    pthread_join(c->thread, NULL);
    pthread_mutex_destroy(&c->mutex);
    close(c->bell[0]);
    close(c->bell[1]);
    free(c->polled);
    free(c);
}

/* Hands the channel to the comparer of the context, which the first one starts. Returns 0 on failure. */
static int mti_comparer_join(mt_context *ctx, mti_channel *b) {
    mt_comm *other = ctx->nccl;
    mti_comparer *c;
    while (other && !other->nccl.channel) other = other->nccl.next;
    c = other ? other->nccl.channel->comparer : mti_comparer_new();
    if (!c) return 0;
    b->comparer = c;
    pthread_mutex_lock(&c->mutex);
    c->users++;
    b->next = c->channels;
    c->channels = b;
    c->changed = 1;
    mti_comparer_ring(c);
    pthread_mutex_unlock(&c->mutex);
    return 1;
}

/* -- what the thread of the rank does -- */

/* Warns also a program without a logger, which would not learn otherwise that an error may not be found. */
static void mti_warn(mt_context *ctx, const char *text) {
    if (ctx && !ctx->logger.log) fprintf(stderr, "%s\n", text);
    mt_log(ctx, MT_LOG_WARNING, text);
}

/* Says once that the comparison has ended. */
static void mti_channel_warn(mt_comm *comm) {
    mti_channel *b = comm->nccl.channel;
    char text[192];
    if (!mti_channel_is_ended(b) || b->end_is_told) return;
    b->end_is_told = 1;
    snprintf(text, sizeof text, "the calls of the ranks of \"%s\" are no longer compared: rank %d %s", comm->name,
             (int)b->end.rank,
             b->end.what == MTI_END_MEMORY ? "has no memory for them" : "has seen calls that are too far ahead");
    mti_warn(comm->nccl.home, text);
}

/* Appends a message to the queue, or ends the comparison. call: NULL for other messages than MTI_MESSAGE_CALL */
static void mti_channel_append(mt_comm *comm, mti_message_kind kind, const mti_call *call, const char *text) {
    mti_channel *b = comm->nccl.channel;
    mti_slot slot;
    mti_message message;
    if (!b) return;
    mti_channel_warn(comm);
    memset(&message, 0, sizeof message);
    message.kind = (int32_t)kind;
    message.rank = comm->rank;
    message.bytes = text ? strlen(text) + 1 : 0;
    if (call) {
        mti_slot_write(&slot, call);
        message.what = slot.what;
        message.count = slot.count;
        message.recvcount = slot.recvcount;
    }
    pthread_mutex_lock(&b->comparer->mutex);
    if (mti_bytes_size(&b->queue) > MTI_CHANNEL_AHEAD * sizeof message) mti_channel_end(b, b->rank, MTI_END_AHEAD);
    else if (!b->ended && !mti_message_add(&b->queue, &message, text)) mti_channel_end(b, b->rank, MTI_END_MEMORY);
    if (b->comparer->sleeps) mti_comparer_ring(b->comparer);
    pthread_mutex_unlock(&b->comparer->mutex);
}

/* Asks which ranks are missing, and waits for the answer. */
static void mti_channel_find_missing(mt_comm *comm) {
    double start = mti_now();
    mti_channel *b = comm->nccl.channel;
    if (!b || mti_channel_is_decided(b)) return;
    mti_channel_append(comm, MTI_MESSAGE_LATE, NULL, NULL);
    while (!mti_channel_is_decided(b) && !mti_channel_is_ended(b) && mti_now() < start + MTI_CHANNEL_ANSWER)
        mti_rest(1, 0);
}

/* Tells the other ranks that comm has failed here. Where a result is the cause, they know. */
static void mti_channel_fail(mt_comm *comm, mt_status status, const char *why) {
    mti_text text;
    if (!comm->nccl.channel || mti_channel_is_decided(comm->nccl.channel)) return;
    text.used = 0;
    mti_say(&text, "%s", mti_call_name(comm->nccl.last.kind));
    mti_say_where(&text, comm);
    mti_say(&text, "rank %d failed with %s (%s)", comm->rank, mt_status_name(status), why);
    mti_channel_append(comm, MTI_MESSAGE_FAILED, NULL, text.data);
}

static int mti_channel_has_more(const mti_channel *b) {
    int i;
    for (i = 0; i < b->connection_count; i++)
        if (b->connections[i].fd >= 0 && mti_bytes_size(&b->connections[i].out)) return 1;
    return 0;
}

/* Sends what is left, and ends the connections. Rank 0 first compares what has arrived, and says farewell. */
static void mti_channel_close(mt_comm *comm) {
    static const char reason[] = "has left the group";
    mti_channel *b = comm->nccl.channel, **at;
    mti_comparer *c;
    mti_message message;
    double start = mti_now();
    int i;
    comm->nccl.channel = NULL;
    if (!b) return;
    c = b->comparer;
    memset(&message, 0, sizeof message);
    message.kind = MTI_MESSAGE_LEFT;
    message.bytes = sizeof reason;
    pthread_mutex_lock(&c->mutex);
    mti_channel_work(b);
    for (i = 0; i < b->connection_count && b->rank == 0; i++)
        while (mti_channel_read(b, &b->connections[i], i) && mti_now() < start + MTI_CHANNEL_GRACE) continue;
    message.count = b->number[0];
    for (i = 0; i < b->connection_count && b->rank == 0; i++) mti_channel_send(b, &b->connections[i], &message, reason);
    while (mti_channel_work(b), mti_channel_has_more(b) && mti_now() < start + MTI_CHANNEL_GRACE) {
        pthread_mutex_unlock(&c->mutex);
        mti_rest(1, 0);
        pthread_mutex_lock(&c->mutex);
    }
    for (at = &c->channels; *at != b; at = &(*at)->next) continue;
    *at = b->next;
    c->changed = 1;
    mti_comparer_ring(c);
    mti_channel_free(b);
    pthread_mutex_unlock(&c->mutex);
    mti_comparer_leave(c);
}

/* Closes the connections of a process that was forked, so that the other one's end as if this one did not exist. */
static void mti_channel_abandon(mt_comm *comm) {
    mti_channel *b = comm->nccl.channel;
    int i;
    if (!b) return;
    for (i = 0; i < b->connection_count; i++)
        if (b->connections[i].fd >= 0) close(b->connections[i].fd);
    comm->nccl.channel = NULL; /* the memory stays: another thread of the other process may have held the mutex */
}

#endif
