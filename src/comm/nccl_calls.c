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

/* NCCL does not compare calls, so each communicator has a channel. The ranks are a tree: each one has a TCP connection
   to its parent, and to at most MTI_CHANNEL_CHILDREN children. A call appends a message to the queue of its rank and
   goes on. A thread of the context, the comparer (nccl_comparer.c), sends the messages to the parent, which passes
   them on to its own, up to rank 0. Where all ranks of a branch, a rank with all those below it, make the same n-th
   collective, one message says so for all of them: a rank holds such calls back for a short time. The comparer of
   rank 0 compares the n-th collectives of all ranks, and the n-th send from a rank to another one with the n-th
   receive. When calls differ, or when a rank has left before a call of the others, it sends the result down the tree
   to all ranks, with the calls of all. A rank finds the result in its next call and while it waits for the stream,
   and writes the sentence that threads write (threads.c). A rank whose wait has lasted for the timeout asks who is
   missing.

   The rank's own thread only appends to the queue, under a mutex that the comparer holds for an exchange of two buffers
   and never while it sends, reads or compares. Everything else in a channel belongs to the comparer, except a result
   after `decided` is set, and the end after `ended` is set, which do not change.

   What arrives over a connection is checked before it is used: a message that no rank sends, or that is about a rank
   which is not behind this connection, ends the connection. All buffers have a limit. When there is no memory, a rank
   is too far ahead, or a rank has left over which the messages went, the comparison ends, and each rank says so: calls
   that differ then time out or have undefined results, as with no_nccl_checks. */

#define MTI_CHANNEL_CHILDREN 32 /* most children of a rank; in a group of at most 33 all ranks are children of rank 0 */
#define MTI_CHANNEL_TICK 2      /* milliseconds: the comparer sends the messages of this time together */
#define MTI_CHANNEL_HOLD 0.02   /* seconds in which a rank waits for the same collective of its whole branch */
#define MTI_CHANNEL_GRACE 1.0   /* seconds for messages that are on their way: of other ranks, or of one that is gone */
#define MTI_CHANNEL_ANSWER 0.5  /* seconds that a rank waits for the answer who is missing */
#define MTI_CHANNEL_OPENING 10.0 /* seconds in which all ranks must connect to their parents */
#define MTI_CHANNEL_AHEAD 262144 /* calls by which a rank may be ahead of another one, or of the network */
#define MTI_CHANNEL_PART 16384   /* bytes that are read from a connection before they are looked at */

typedef enum mti_message_kind {
    /* how ranks connect (nccl_listeners.c); `what` and `count`: random numbers */
    MTI_MESSAGE_HELLO,     /* of a child */
    MTI_MESSAGE_CHALLENGE, /* of the parent; recvcount: its proof */
    MTI_MESSAGE_PROOF,     /* of the child; recvcount: its proof */
    MTI_MESSAGE_READY,     /* of the child: all ranks below it are connected */
    MTI_MESSAGE_OPEN,      /* of the parent: all ranks are connected */
    MTI_MESSAGE_ABSENT,    /* instead of either: rank: that could not connect to its parent */
    /* to the parent; rank: whose message it is */
    MTI_MESSAGE_CALL,
    MTI_MESSAGE_CALLS,  /* a collective, of all ranks of the branch of `rank` */
    MTI_MESSAGE_LATE,   /* the rank has waited for the timeout */
    MTI_MESSAGE_FAILED, /* text: a sentence */
    /* to the parent, or to the children of the rank and all below them */
    MTI_MESSAGE_LEFT,   /* text: why; `what`: 1: without a farewell; to children: `count`: number of its collectives */
    MTI_MESSAGE_RESULT, /* to the children; `what`: mti_why; rank, and recvcount - 1: the ranks that it is about, or -1;
                           text: the calls of all ranks, and a sentence */
    MTI_MESSAGE_END /* the calls are no longer compared; rank: that has ended the comparison; `what`: mti_end_reason */
} mti_message_kind;

typedef struct mti_message {
    int32_t kind, rank;
    uint64_t what, count, recvcount; /* the call, as in mti_slot */
    uint64_t bytes;                  /* of the text behind the message */
} mti_message;

#define MTI_MESSAGE_TEXT ((size_t)MT_ERROR_BYTES + 128) /* most bytes of a sentence, with its NUL */

typedef enum mti_why { MTI_WHY_DIFFERS, MTI_WHY_UNLIKE, MTI_WHY_LATE, MTI_WHY_LEFT, MTI_WHY_FAILED } mti_why;

typedef enum mti_end_reason { MTI_END_MEMORY, MTI_END_AHEAD, MTI_END_LEFT } mti_end_reason;

typedef struct mti_said {
    uint64_t what, count, recvcount, inside; /* as in mti_slot */
} mti_said;

/* The n-th collective as the first rank has called it. */
typedef struct mti_round {
    mti_said said;
    int ranks;    /* number of ranks that have called their n-th collective */
    double since; /* not at rank 0: when the first one has, by mti_now */
} mti_round;

/* What a rank has been told of another one alone, and of all ranks of that one's branch together. */
typedef struct mti_heard {
    uint64_t single, whole;     /* numbers of collectives */
    mti_said last, last_whole;  /* the last calls */
    uint64_t last_at, whole_at; /* mti_channel.clock at these */
} mti_heard;

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
    struct mti_channel *next; /* in a list of the comparer */
    struct mti_comparer *comparer;
    int rank, size;
    /* guarded by the mutex of the comparer */
    mti_bytes queue; /* messages of this rank that the comparer has not taken yet */
    int overflow;    /* 1 + mti_end_reason: a message had no room; 0: all had */
    int leaves;      /* 1: the rank waits for the comparer to let go of the channel */
    int let_go;      /* 1: the comparer has let go of it */
    /* the rest belongs to the comparer */
    mti_bytes taken;             /* messages of this rank, taken from the queue */
    int overflowed, closing;     /* copies of `overflow` and `leaves` of the same time */
    double closes_at;            /* when the channel is let go at the latest, by mti_now; 0: not yet */
    mti_connection *connections; /* the first one: to the parent, unused at rank 0; then one to each child */
    int connection_count;
    int decided; /* atomic; 1: there is a result */
    mti_message result;
    mti_bytes shown;              /* the text of the result */
    int ended;                    /* atomic; 1: the calls are no longer compared */
    mti_message end;              /* why */
    int end_is_sent, end_is_told; /* to the other ranks; to the program */
    /* per rank; of the ranks that are not below this one, only some are known */
    mti_heard *heard;
    mti_said *last;     /* the last calls, by mti_channel_last */
    uint64_t clock;     /* number of calls */
    mti_bytes *reasons; /* why the rank has left; empty: it has not left */
    double gone_at;     /* a rank is gone without a farewell since then; 0: none is */
    int gone, left_count;
    /* of this rank and those below it */
    mti_round *rounds; /* a ring of `room` rounds, which has those from `first` on */
    size_t room;
    uint64_t first, last_round; /* last_round: behind the last one */
    uint64_t passed;            /* not at rank 0: calls of earlier rounds are passed on as they come */
    /* only at rank 0 */
    mti_pair **pairs;    /* per rank: the list of those that it sends to */
    size_t waiting;      /* sends and receives in all pairs */
    uint64_t odd;        /* number of the collective that differs + 1; 0: none does */
    mti_said *odd_calls; /* that call of each rank */
    double odd_at;
} mti_channel;

/* -- the tree -- */

static int mti_rank_parent(int rank) { return (rank - 1) / MTI_CHANNEL_CHILDREN; }

static int mti_rank_depth(int rank) {
    int depth = 0;
    for (; rank > 0; rank = mti_rank_parent(rank)) depth++;
    return depth;
}

/* The number of ranks in the branch of `rank`: itself and those below it. */
static int mti_branch_size(int rank, int size) {
    int last = rank, n = 0;
    for (; rank < size;
         rank = MTI_CHANNEL_CHILDREN * rank + 1, last = MTI_CHANNEL_CHILDREN * last + MTI_CHANNEL_CHILDREN)
        n += (last < size ? last : size - 1) - rank + 1;
    return n;
}

/* The number of collectives of a rank below this one, or of this one. */
static uint64_t mti_channel_number(const mti_channel *b, int rank) {
    uint64_t n = b->heard[rank].single;
    for (; rank > b->rank; rank = mti_rank_parent(rank)) n += b->heard[rank].whole;
    return n;
}

/* Fills and returns the last calls of all ranks. */
static mti_said *mti_channel_last(mti_channel *b) {
    int r, above;
    for (r = 0; r < b->size; r++) {
        uint64_t at = b->heard[r].last_at;
        b->last[r] = b->heard[r].last;
        for (above = r; above > b->rank; above = mti_rank_parent(above))
            if (b->heard[above].whole_at > at) {
                at = b->heard[above].whole_at;
                b->last[r] = b->heard[above].last_whole;
            }
    }
    return b->last;
}

static int mti_channel_child(const mti_channel *b, int line) { return MTI_CHANNEL_CHILDREN * b->rank + line; }

/* The connection over which a child sends the messages of `rank`; 0: rank is not below this one. */
static int mti_channel_line(const mti_channel *b, int rank) {
    while (rank > b->rank && mti_rank_parent(rank) != b->rank) rank = mti_rank_parent(rank);
    return rank > b->rank ? rank - MTI_CHANNEL_CHILDREN * b->rank : 0;
}

static int mti_channel_is_below(const mti_channel *b, int rank) {
    int r = b->rank;
    while (r > rank) r = mti_rank_parent(r);
    return r == rank && rank != b->rank;
}

/* -- bytes and messages -- */

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

/* Whether what is said are the counts between two ranks of an all_to_all_v, which is said before them. */
static int mti_said_is_counts(const mti_said *said) {
    return (int)(said->what & 255) - 1 == MT_ALL_TO_ALL_V && (said->what >> 24 & 0xffff) != 0;
}

/* Whether a call is a send or a receive, or both. */
static int mti_said_is_message(const mti_said *said) {
    int kind = (int)(said->what & 255) - 1;
    return kind == MT_SEND || kind == MT_RECV || kind == MTI_SEND_RECV || mti_said_is_counts(said);
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
    if (m->rank < -1 || m->rank >= size || (m->rank < 0 && m->kind != MTI_MESSAGE_RESULT)) return 0;
    switch (m->kind) {
    case MTI_MESSAGE_HELLO:
    case MTI_MESSAGE_CHALLENGE:
    case MTI_MESSAGE_PROOF:
    case MTI_MESSAGE_READY:
    case MTI_MESSAGE_OPEN:
    case MTI_MESSAGE_ABSENT:
    case MTI_MESSAGE_LATE: return m->bytes == 0;
    case MTI_MESSAGE_CALL: return m->bytes == 0 && mti_said_is_valid(&said);
    case MTI_MESSAGE_CALLS: return m->bytes == 0 && mti_said_is_valid(&said) && !mti_said_is_message(&said);
    case MTI_MESSAGE_END: return m->bytes == 0 && m->what <= MTI_END_LEFT;
    case MTI_MESSAGE_FAILED:
    case MTI_MESSAGE_LEFT:
        return m->bytes >= 2 && m->bytes <= MTI_MESSAGE_TEXT && (m->kind == MTI_MESSAGE_FAILED || m->what <= 1);
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

/* Sends nothing more: the other end is closed. What it has sent before is still read, and then the end. */
static void mti_connection_mute(mti_connection *connection) {
    mti_bytes_drop(&connection->out, mti_bytes_size(&connection->out));
    shutdown(connection->fd, SHUT_WR);
}

static void mti_connection_flush(mti_connection *connection) {
    while (connection->fd >= 0 && !connection->lost && mti_bytes_size(&connection->out)) {
        ssize_t n = send(connection->fd, mti_bytes_front(&connection->out), mti_bytes_size(&connection->out),
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) mti_bytes_drop(&connection->out, (size_t)n);
        else if (n < 0 && errno == EINTR) continue;
        else {
            if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) mti_connection_mute(connection);
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
    mti_bytes_free(&b->taken);
    free(b->rounds);
    b->rounds = NULL;
    b->room = 0;
    b->first = b->last_round = b->passed = 0;
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

static void mti_channel_send_down(mti_channel *b, const mti_message *message, const char *text) {
    int i;
    for (i = 1; i < b->connection_count; i++) mti_channel_send(b, &b->connections[i], message, text);
}

/* -- results -- */

/* Stores the result, and sends it to all ranks below this one. Only the first one counts. calls: the calls of all
   ranks; rank, peer: the ranks that it is about, or -1. b->shown has the room since the creation of the channel. */
static void mti_channel_decide(mti_channel *b, mti_why why, int rank, int peer, const mti_said *calls,
                               const char *text) {
    size_t bytes = (size_t)b->size * sizeof *calls, length = strlen(text);
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
    mti_channel_send_down(b, &b->result, b->shown.data);
    __atomic_store_n(&b->decided, 1, __ATOMIC_RELEASE);
}

static int mti_channel_is_decided(const mti_channel *b) { return b && __atomic_load_n(&b->decided, __ATOMIC_ACQUIRE); }

static int mti_said_alike(const mti_said *a, const mti_said *b) { return a->what == b->what && a->count == b->count; }

/* The sentence of a result: "rank `rank` has left the group", in all calls. */
static void mti_channel_decide_left(mti_channel *b, int rank) {
    if (!b->decided && !b->ended)
        mti_channel_decide(b, MTI_WHY_LEFT, rank, -1, mti_channel_last(b), b->reasons[rank].data);
}

static int mti_channel_has_left(const mti_channel *b, int rank) { return mti_bytes_size(&b->reasons[rank]) > 0; }

/* A rank over which the messages of `rank` went to rank 0, or to this one, and that has left; -1: none has. */
static int mti_channel_left_above(const mti_channel *b, int rank) {
    while (rank > 0 && (rank = mti_rank_parent(rank)) != b->rank)
        if (mti_channel_has_left(b, rank)) return rank;
    return -1;
}

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
    case MTI_WHY_UNLIKE:
        if (mti_said_is_counts(&calls[rank]) && mti_said_is_counts(&calls[peer]))
            mti_say_counts(text, comm, rank, (size_t)calls[rank].count, peer, (size_t)calls[peer].recvcount);
        else mti_say_unlike(text, comm, rank, peer);
        return MT_ERR_MISMATCH;
    case MTI_WHY_LATE: mti_say_timeout(text, comm, peer); return MT_ERR_TIMEOUT;
    case MTI_WHY_LEFT: mti_say_left(text, comm, rank); return MT_ERR_PEER;
    default: mti_say(text, "%s", (const char *)(calls + comm->size)); return MT_ERR_PEER;
    }
}

/* -- the collectives of a branch -- */

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

/* Makes the round n of a collective, if it is the next one. Returns NULL when the comparison has ended, or when no rank
   can have told this. */
static mti_round *mti_channel_round(mti_channel *b, uint64_t n, const mti_said *said) {
    mti_round *round;
    if (n < b->first || n > b->last_round) return NULL;
    if (n < b->last_round) return &b->rounds[n & (b->room - 1)];
    if (!mti_channel_grow(b)) return NULL;
    b->last_round++;
    round = &b->rounds[n & (b->room - 1)];
    round->said = *said;
    round->ranks = 0;
    round->since = b->rank ? mti_now() : 0;
    return round;
}

/* Counts a collective of a rank, or of its whole branch, in a round. Returns 0 when no rank can have told this. */
static int mti_channel_count(mti_channel *b, int rank, int whole, const mti_said *said, mti_round *round) {
    mti_heard *heard = &b->heard[rank];
    int ranks = whole ? mti_branch_size(rank, b->size) : 1;
    if ((whole && ranks == 1) || round->ranks + ranks > mti_branch_size(b->rank, b->size)) return 0;
    round->ranks += ranks;
    if (whole) {
        heard->whole++;
        heard->whole_at = ++b->clock;
        heard->last_whole = *said;
    } else {
        heard->single++;
        heard->last_at = ++b->clock;
        heard->last = *said;
    }
    return 1;
}

static int mti_channel_is_full(const mti_channel *b) {
    return b->first < b->last_round && b->rounds[b->first & (b->room - 1)].ranks == mti_branch_size(b->rank, b->size);
}

/* -- the comparison, at rank 0 -- */

/* Stores the calls of the first round in which they differ. The result waits for the calls of the other ranks. */
static void mti_channel_differs(mti_channel *b, uint64_t n, int rank, int whole, const mti_said *said) {
    int r, above;
    if (!b->odd) {
        b->odd = n + 1;
        b->odd_at = mti_now();
        for (r = 0; r < b->size; r++)
            if (mti_channel_number(b, r) > n) b->odd_calls[r] = b->rounds[n & (b->room - 1)].said;
    }
    for (r = rank; r < (whole ? b->size : rank + 1); r++) {
        for (above = r; above > rank;) above = mti_rank_parent(above);
        if (above == rank) b->odd_calls[r] = *said;
    }
}

/* Returns 0 when no rank can have told this. */
static int mti_channel_collective(mti_channel *b, int rank, int whole, const mti_said *said) {
    uint64_t n = mti_channel_number(b, rank);
    mti_round *round = mti_channel_round(b, n, said);
    int r;
    if (!round || !mti_channel_count(b, rank, whole, said, round)) return b->ended;
    if (b->odd == n + 1 || (!b->odd && !mti_said_alike(&round->said, said)))
        mti_channel_differs(b, n, rank, whole, said);
    while (mti_channel_is_full(b)) b->first++;
    if (b->odd && b->first >= b->odd) mti_channel_decide(b, MTI_WHY_DIFFERS, -1, -1, b->odd_calls, "");
    for (r = 0; r < b->size && b->left_count && !b->odd; r++)
        if (mti_channel_has_left(b, r) && mti_channel_number(b, r) <= n) mti_channel_decide_left(b, r);
    return 1;
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
    if (!mti_bytes_size(&p->waiting)) mti_bytes_free(&p->waiting);
    b->waiting--;
    if (sends) recv = &first;
    else send = &first;
    if (send->count == recv->recvcount && (send->what >> 8 & 255) == (recv->what >> 8 & 255) &&
        mti_said_is_counts(send) == mti_said_is_counts(recv))
        return;
    b->odd_calls[p->from] = *send;
    b->odd_calls[p->to] = *recv;
    mti_channel_decide(b, MTI_WHY_UNLIKE, p->from, p->to, b->odd_calls, "");
}

/* Compares a send or a receive with its other half, or keeps it until the other half comes. */
static void mti_channel_half(mti_channel *b, int from, int to, int sends, const mti_said *said) {
    mti_pair *p = mti_channel_pair(b, from, to);
    int peer = sends ? to : from, left = mti_channel_left_above(b, peer);
    if (p && mti_bytes_size(&p->waiting) && p->sends != sends) {
        mti_pair_match(b, p, said, sends);
        return;
    }
    if (mti_channel_has_left(b, peer)) mti_channel_decide_left(b, peer);
    if (left >= 0 && b->gone_at <= 0) mti_channel_end(b, left, MTI_END_LEFT);
    else if (b->waiting >= MTI_CHANNEL_AHEAD) mti_channel_end(b, b->rank, MTI_END_AHEAD);
    else if (!p || !mti_bytes_add(&p->waiting, said, sizeof *said)) mti_channel_end(b, b->rank, MTI_END_MEMORY);
    else {
        p->sends = sends;
        b->waiting++;
    }
}

/* Takes a call of a rank, or a collective of its whole branch. Returns 0 when no rank can have told this. */
static int mti_channel_call(mti_channel *b, int rank, int whole, const mti_said *said) {
    int to = (int)(said->what >> 24 & 0xffff) - 1, from = (int)(said->what >> 40 & 0xffff) - 1;
    if (!mti_said_is_message(said)) return mti_channel_collective(b, rank, whole, said);
    b->heard[rank].last = *said;
    b->heard[rank].last_at = ++b->clock;
    if (to >= 0 && to < b->size) mti_channel_half(b, rank, to, 1, said);
    if (from >= 0 && from < b->size && !b->ended) mti_channel_half(b, from, rank, 0, said);
    return 1;
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
    if (b->rank) return;
    if (b->last_round > mti_channel_number(b, rank) && !b->odd) mti_channel_decide_left(b, rank);
    if (mti_channel_waits_for(b, -1, rank) >= 0) mti_channel_decide_left(b, rank);
}

/* Answers a rank that has waited for the timeout: which ranks are missing. When none is, there is no result. */
static void mti_channel_late(mti_channel *b, int rank) {
    int r, missing = 0, peer = mti_channel_waits_for(b, rank, -1);
    mti_said *last = mti_channel_last(b);
    for (r = 0; r < b->size; r++) {
        int here = mti_channel_number(b, r) >= mti_channel_number(b, rank);
        last[r].inside = here ? MTI_IN_COLLECTIVE : MTI_OUTSIDE;
        missing += !here;
    }
    if (peer >= 0 || missing) mti_channel_decide(b, MTI_WHY_LATE, rank, peer, last, "");
}

static const char mti_is_gone[] = "is gone: its process has ended, or its connection is lost";

/* A connection of the rank has ended without a farewell: its process has probably ended. */
static void mti_channel_gone(mti_channel *b, int rank) {
    if (mti_channel_has_left(b, rank) || b->ended) return;
    mti_channel_leave(b, rank, mti_is_gone, sizeof mti_is_gone);
    if (b->ended) return;
    b->gone = rank;
    b->gone_at = mti_now();
}

/* Takes a valid message of a rank at rank 0. Returns 0 when no rank sends it. */
static int mti_channel_compare(mti_channel *b, const mti_message *message, const char *text) {
    mti_said said = mti_said_of(message);
    int rank = message->rank;
    switch (message->kind) {
    case MTI_MESSAGE_CALL:
    case MTI_MESSAGE_CALLS: return mti_channel_call(b, rank, message->kind == MTI_MESSAGE_CALLS, &said);
    case MTI_MESSAGE_LATE: mti_channel_late(b, rank); return 1;
    case MTI_MESSAGE_LEFT:
        if (message->what) mti_channel_gone(b, rank);
        else mti_channel_leave(b, rank, text, (size_t)message->bytes);
        return 1;
    case MTI_MESSAGE_FAILED: mti_channel_decide(b, MTI_WHY_FAILED, -1, -1, mti_channel_last(b), text); return 1;
    case MTI_MESSAGE_END: mti_channel_end(b, rank, (mti_end_reason)message->what); return 1;
    default: return 0;
    }
}

/* -- the other ranks -- */

static void mti_channel_tell(mti_channel *b, int rank, int whole, const mti_said *said) {
    mti_message message;
    memset(&message, 0, sizeof message);
    message.kind = whole ? MTI_MESSAGE_CALLS : MTI_MESSAGE_CALL;
    message.rank = rank;
    message.what = said->what;
    message.count = said->count;
    message.recvcount = said->recvcount;
    mti_channel_send(b, b->connections, &message, NULL);
}

/* Passes on what is held back: each held call is that of this rank, or of the whole branch of a child. */
static void mti_channel_pour(mti_channel *b) {
    uint64_t n = b->passed > b->first ? b->passed : b->first;
    for (; n < b->last_round && !b->ended; n++) {
        const mti_said said = b->rounds[n & (b->room - 1)].said;
        int line, rank;
        for (line = 0; line < b->connection_count && !b->ended; line++) {
            rank = line ? mti_channel_child(b, line) : b->rank;
            if (mti_channel_number(b, rank) > n)
                mti_channel_tell(b, rank, line && mti_branch_size(rank, b->size) > 1, &said);
        }
    }
    b->passed = b->last_round;
}

/* Whether calls are held back, and since when the first one is, by mti_now. */
static int mti_channel_holds(const mti_channel *b, double *since) {
    uint64_t n = b->passed > b->first ? b->passed : b->first;
    if (b->rank == 0 || n >= b->last_round) return 0;
    *since = b->rounds[n & (b->room - 1)].since;
    return 1;
}

/* Holds a collective back until the whole branch of this rank has made it, or passes it on: when a part of a branch has
   made it alone, or when it differs from those of the others. Returns 0 when no rank can have told this. */
static int mti_channel_merge(mti_channel *b, int rank, int whole, const mti_said *said) {
    int branch = mti_branch_size(rank, b->size), is_part = rank != b->rank && whole != (branch > 1);
    uint64_t n = mti_channel_number(b, rank);
    mti_round *round;
    if (rank != b->rank && mti_rank_parent(rank) != b->rank) is_part = 1;
    if (!is_part && n >= b->first && n < b->last_round) {
        const mti_said *first = &b->rounds[n & (b->room - 1)].said;
        is_part = !mti_said_alike(first, said) || first->recvcount != said->recvcount;
    }
    if (is_part) mti_channel_pour(b);
    round = b->ended ? NULL : mti_channel_round(b, n, said);
    if (!round || !mti_channel_count(b, rank, whole, said, round)) return b->ended;
    if (is_part && b->passed <= n) b->passed = n + 1;
    if (n < b->passed) mti_channel_tell(b, rank, whole, said);
    while (!b->ended && mti_channel_is_full(b)) {
        const mti_said full = b->rounds[b->first & (b->room - 1)].said;
        if (b->first >= b->passed) mti_channel_tell(b, b->rank, b->connection_count > 1, &full);
        b->first++;
    }
    return 1;
}

/* Passes a valid message of this rank or of one below on to the parent. Returns 0 when no rank sends it there. */
static int mti_channel_relay(mti_channel *b, const mti_message *message, const char *text) {
    mti_said said = mti_said_of(message);
    int calls = message->kind == MTI_MESSAGE_CALL || message->kind == MTI_MESSAGE_CALLS;
    if (calls && !mti_said_is_message(&said))
        return mti_channel_merge(b, message->rank, message->kind == MTI_MESSAGE_CALLS, &said);
    mti_channel_pour(b);
    if (b->ended) return 1; /* which has freed the text of this rank's own message */
    if (message->kind == MTI_MESSAGE_LEFT && (message->rank == b->rank || mti_rank_parent(message->rank) == b->rank))
        mti_channel_leave(b, message->rank, text, (size_t)message->bytes); /* the end of its connection is no news */
    switch (message->kind) {
    case MTI_MESSAGE_CALL:
    case MTI_MESSAGE_LATE:
    case MTI_MESSAGE_LEFT:
    case MTI_MESSAGE_FAILED: mti_channel_send(b, b->connections, message, text); return 1;
    case MTI_MESSAGE_END: mti_channel_end(b, message->rank, (mti_end_reason)message->what); return 1;
    default: return 0;
    }
}

/* Takes a valid message of the parent, and passes it on. Returns 0 when no parent sends it. */
static int mti_channel_take_down(mti_channel *b, const mti_message *message, const char *text) {
    int rank = message->rank;
    switch (message->kind) {
    case MTI_MESSAGE_RESULT:
        mti_channel_send_down(b, message, text);
        if (b->decided) return 1;
        b->result = *message;
        mti_bytes_put(&b->shown, text,
                      (size_t)message->bytes); /* its largest size, since the creation of the channel */
        __atomic_store_n(&b->decided, 1, __ATOMIC_RELEASE);
        return 1;
    case MTI_MESSAGE_LEFT:
        if (!mti_channel_is_below(b, rank)) return 0;
        mti_channel_send_down(b, message, text);
        b->heard[rank].single = message->count;
        mti_channel_leave(b, rank, text, (size_t)message->bytes);
        if (b->heard[b->rank].single > b->heard[rank].single) mti_channel_decide_left(b, rank);
        return 1;
    case MTI_MESSAGE_END: mti_channel_end(b, rank, (mti_end_reason)message->what); return 1;
    default: return 0;
    }
}

/* Takes a message of this rank. Where a rank has left over which it would go to rank 0, a collective behind the last
   one of that rank is an error, and a send or a receive can no longer be compared. */
static void mti_channel_pass(mti_channel *b, const mti_message *message, const char *text) {
    int left = b->gone_at > 0 ? -1 : mti_channel_left_above(b, b->rank);
    mti_said said = mti_said_of(message);
    mti_channel_relay(b, message, text);
    if (message->kind != MTI_MESSAGE_CALL || b->ended) return;
    if (mti_said_is_message(&said)) {
        b->heard[b->rank].last = said;
        b->heard[b->rank].last_at = ++b->clock;
        if (left >= 0 && !b->decided) mti_channel_end(b, left, MTI_END_LEFT);
    } else if (left >= 0 && b->heard[b->rank].single > b->heard[left].single) mti_channel_decide_left(b, left);
}

/* A connection has ended. Without a farewell of the rank at its other end, that rank is gone. */
static void mti_channel_lost(mti_channel *b, int line) {
    int rank = line ? mti_channel_child(b, line) : mti_rank_parent(b->rank);
    mti_message message;
    if (!line || b->rank == 0) {
        mti_channel_gone(b, rank);
        return;
    }
    if (mti_channel_has_left(b, rank)) return;
    memset(&message, 0, sizeof message);
    message.kind = MTI_MESSAGE_LEFT;
    message.rank = rank;
    message.what = 1;
    message.bytes = sizeof mti_is_gone;
    mti_channel_relay(b, &message, mti_is_gone);
}

#endif
