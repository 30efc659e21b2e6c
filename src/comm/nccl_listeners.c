/* ---- how the ranks over NCCL connect ----------------------------------------------------------------------------- */

#pragma once
#include "nccl_comparer.c"
#include "nccl_secret.c"
#include "nccl_interfaces.c"

#if MTI_COMPARES

/* An all-gather over NCCL tells every rank the addresses at which the ranks listen, and a secret of rank 0. A child
   connects to its parent and says hello; the parent proves that it knows the secret, and then the child does. Each
   proof depends on random numbers of both sides, so the secret is never sent, and what was sent once is of no use in
   another connection. A rank serves all connections at the same time, so one on which nothing comes costs nothing.

   When all ranks below a rank are connected, it tells its parent that it is ready. When rank 0 is ready, it opens the
   connections, and each rank opens those of its children. When a rank cannot connect to its parent, they tell each
   other which one, up and down the tree, and no rank compares calls. */

#define MTI_LISTENER_STRANGERS 128 /* connections at the same time that may come from others than the children */

typedef enum mti_listener_lack {
    MTI_LACKS_NOTHING,
    MTI_LACKS_SECRET,
    MTI_LACKS_ADDRESS,
    MTI_LACKS_SOCKET
} mti_listener_lack;

/* Where a rank listens. Sent as it is. */
typedef struct mti_listener {
    uint64_t secret[2];     /* only that of rank 0 counts */
    unsigned char host[16]; /* as in mti_address */
    uint16_t port;          /* 0: the rank does not listen */
    uint8_t version;        /* of IP: 4 or 6 */
    uint8_t lacks;          /* mti_listener_lack */
    uint32_t unused;
} mti_listener;

/* Listens at one address. Returns the socket, or -1. */
static int mti_listener_bind(const mti_address *address, mti_listener *listener) {
    struct sockaddr_storage at;
    struct sockaddr_in6 in6;
    struct sockaddr_in in;
    socklen_t bytes = mti_address_write(address, 0, &at);
    int fd = socket(address->family, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    mti_socket_set(fd);
    if (bind(fd, (struct sockaddr *)&at, bytes) != 0 || listen(fd, MTI_MAX_RANKS) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &bytes) != 0) {
        close(fd);
        return -1;
    }
    memcpy(&in, &at, sizeof in);
    memcpy(&in6, &at, sizeof in6);
    memcpy(listener->host, address->host, sizeof listener->host);
    listener->port = ntohs(address->family == AF_INET ? in.sin_port : in6.sin6_port);
    listener->version = address->family == AF_INET ? 4 : 6;
    return fd;
}

/* Opens a socket that listens, and describes it. Returns -1, and what is missing, when it cannot. */
static int mti_listener_open(mti_listener *listener) {
    mti_address address;
    int fd = -1;
    memset(listener, 0, sizeof *listener);
    if (!mti_random(listener->secret)) listener->lacks = MTI_LACKS_SECRET;
    else if (!mti_address_choose(&address)) listener->lacks = MTI_LACKS_ADDRESS;
    else if ((fd = mti_listener_bind(&address, listener)) < 0) listener->lacks = MTI_LACKS_SOCKET;
    return fd;
}

static mti_address mti_listener_address(const mti_listener *listener) {
    mti_address at, mine;
    memset(&at, 0, sizeof at);
    at.family = listener->version == 4 ? AF_INET : AF_INET6;
    memcpy(at.host, listener->host, sizeof at.host);
    if (mti_address_is_link_local(&at) && mti_address_choose(&mine)) at.scope = mine.scope;
    return at;
}

#define MTI_LISTENER_TEXT 64 /* bytes of host:port or [host]:port */

static void mti_listener_write(const mti_listener *listener, char text[MTI_LISTENER_TEXT]) {
    char host[INET6_ADDRSTRLEN];
    int four = listener->version == 4;
    if (!inet_ntop(four ? AF_INET : AF_INET6, listener->host, host, (socklen_t)sizeof host)) host[0] = '\0';
    snprintf(text, MTI_LISTENER_TEXT, four ? "%s:%d" : "[%s]:%d", host, (int)listener->port);
}

/* -- one connection -- */

typedef enum mti_stage {
    /* at the child */
    MTI_CONNECTS,
    MTI_AWAITS_CHALLENGE,
    MTI_AWAITS_OPENING, /* or READY has not been sent yet */
    MTI_OPENED,
    /* at the parent */
    MTI_AWAITS_HELLO,
    MTI_AWAITS_PROOF,
    MTI_AWAITS_READY,
    MTI_IS_READY
} mti_stage;

/* A connection, or an attempt to make one, over which messages without a text come. */
typedef struct mti_caller {
    int fd; /* -1: closed */
    mti_stage stage;
    int rank;   /* of the child */
    size_t got; /* bytes of the message that have come */
    mti_message message;
    uint64_t hello[2], challenge[2];
} mti_caller;

static void mti_caller_begin(mti_caller *c, int fd, mti_stage stage, int rank) {
    memset(c, 0, sizeof *c);
    c->fd = fd;
    c->stage = stage;
    c->rank = rank;
}

static void mti_caller_close(mti_caller *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

/* Reads the next message. size: of the group. Does not read beyond the message, and does not wait. */
static mti_parsed mti_caller_read(mti_caller *c, int size) {
    ssize_t n;
    while (c->got < sizeof c->message) {
        n = recv(c->fd, (char *)&c->message + c->got, sizeof c->message - c->got, MSG_DONTWAIT);
        if (n > 0) c->got += (size_t)n;
        else if (n == 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) return MTI_MALFORMED;
        else if (errno != EINTR) return MTI_INCOMPLETE;
    }
    c->got = 0;
    return mti_message_is_valid(&c->message, size) ? MTI_PARSED : MTI_MALFORMED;
}

/* Sends a message of `rank`. random: two numbers, or NULL. Closes the connection when it fails. */
static void mti_caller_say(mti_caller *c, mti_message_kind kind, int rank, const uint64_t *random, uint64_t proof) {
    mti_message message;
    memset(&message, 0, sizeof message);
    message.kind = (int32_t)kind;
    message.rank = rank;
    if (random) message.what = random[0];
    if (random) message.count = random[1];
    message.recvcount = proof;
    if (c->fd >= 0 && send(c->fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof message)
        mti_caller_close(c);
}

/* Waits until one of the sockets has an event, or until `end` by mti_now. Returns 0 when the time is over. */
static int mti_listener_wait(struct pollfd *polled, int count, double end) {
    double left = end - mti_now();
    int i;
    for (i = 0; i < count; i++) polled[i].revents = 0;
    if (left <= 0) return 0;
    if (poll(polled, (nfds_t)count, left < 1e3 ? (int)(1e3 * left) + 1 : 1000000) < 0)
        for (i = 0; i < count; i++) polled[i].revents = 0;
    return 1;
}

/* -- the meeting of a rank with its parent and its children -- */

typedef struct mti_meeting {
    int fd;                        /* listens; -1: not */
    const mti_listener *listeners; /* of all ranks */
    int rank, size, children;      /* children: number of them */
    int come, ready;               /* number of children that have proved to know the secret, and that are ready */
    int absent;                    /* a rank that could not connect to its parent; -1: none is known */
    mti_caller up;                 /* to the parent */
    mti_caller *down;              /* per line; the first one is unused */
    mti_caller *callers;           /* who has not proved anything yet */
    int count, room;               /* of the callers */
    struct pollfd *polled;
} mti_meeting;

/* After an event of the connection to the parent: goes on with what comes next. */
static void mti_meeting_rise(mti_meeting *m) {
    mti_caller *c = &m->up;
    const uint64_t *secret = m->listeners[0].secret;
    int parent = mti_rank_parent(m->rank), error = -1, ok;
    socklen_t bytes = sizeof error;
    const mti_message *said = &c->message;
    mti_parsed parsed;
    if (c->stage == MTI_CONNECTS) {
        ok = getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == 0 && mti_random(c->hello);
        c->stage = MTI_AWAITS_CHALLENGE;
        if (ok) mti_caller_say(c, MTI_MESSAGE_HELLO, m->rank, c->hello, 0);
        else mti_caller_close(c);
        return;
    }
    parsed = mti_caller_read(c, m->size);
    if (parsed == MTI_INCOMPLETE) return;
    c->challenge[0] = said->what;
    c->challenge[1] = said->count;
    ok = parsed == MTI_PARSED;
    if (ok && c->stage == MTI_AWAITS_CHALLENGE && said->kind == MTI_MESSAGE_CHALLENGE &&
        said->recvcount == mti_proof(secret, MTI_MESSAGE_CHALLENGE, m->rank, parent, c->hello, c->challenge)) {
        c->stage = MTI_AWAITS_OPENING;
        mti_caller_say(c, MTI_MESSAGE_PROOF, m->rank, NULL,
                       mti_proof(secret, MTI_MESSAGE_PROOF, m->rank, parent, c->hello, c->challenge));
    } else if (ok && c->stage == MTI_AWAITS_OPENING && said->kind == MTI_MESSAGE_OPEN) c->stage = MTI_OPENED;
    else if (ok && c->stage == MTI_AWAITS_OPENING && said->kind == MTI_MESSAGE_ABSENT) m->absent = said->rank;
    else mti_caller_close(c);
}

/* Takes a child that has proved to know the secret. Returns 0 when it has come before. */
static int mti_meeting_admit(mti_meeting *m, mti_caller *c) {
    mti_caller *child = &m->down[c->rank - MTI_CHANNEL_CHILDREN * m->rank];
    if (child->fd >= 0) return 0;
    *child = *c;
    child->stage = MTI_AWAITS_READY;
    c->fd = -1;
    m->come++;
    return 1;
}

/* Takes what a caller has sent. One that is no child, has come before, or does not know the secret is closed. */
static void mti_meeting_hear(mti_meeting *m, mti_caller *c) {
    const uint64_t *secret = m->listeners[0].secret;
    const mti_message *said = &c->message;
    mti_parsed parsed = mti_caller_read(c, m->size);
    int ok = parsed == MTI_PARSED;
    if (parsed == MTI_INCOMPLETE) return;
    if (ok && c->stage == MTI_AWAITS_HELLO && said->kind == MTI_MESSAGE_HELLO && said->rank > 0 &&
        mti_rank_parent(said->rank) == m->rank && mti_random(c->challenge)) {
        c->stage = MTI_AWAITS_PROOF;
        c->rank = said->rank;
        c->hello[0] = said->what;
        c->hello[1] = said->count;
        mti_caller_say(c, MTI_MESSAGE_CHALLENGE, m->rank, c->challenge,
                       mti_proof(secret, MTI_MESSAGE_CHALLENGE, c->rank, m->rank, c->hello, c->challenge));
        return;
    }
    ok = ok && c->stage == MTI_AWAITS_PROOF && said->kind == MTI_MESSAGE_PROOF && said->rank == c->rank &&
         said->recvcount == mti_proof(secret, MTI_MESSAGE_PROOF, c->rank, m->rank, c->hello, c->challenge);
    if (!ok || !mti_meeting_admit(m, c)) mti_caller_close(c);
}

/* Takes what a child says: that it is ready, or which rank is absent. A child that has given up may come again. */
static void mti_meeting_listen(mti_meeting *m, mti_caller *c) {
    mti_parsed parsed = mti_caller_read(c, m->size);
    int ready = c->stage == MTI_IS_READY;
    if (parsed == MTI_INCOMPLETE) return;
    if (parsed == MTI_PARSED && !ready && c->message.kind == MTI_MESSAGE_READY) {
        c->stage = MTI_IS_READY;
        m->ready++;
    } else if (parsed == MTI_PARSED && !ready && c->message.kind == MTI_MESSAGE_ABSENT) m->absent = c->message.rank;
    else {
        m->ready -= ready;
        m->come--;
        mti_caller_close(c);
    }
}

/* Accepts who has called. When there are too many, the one that has been silent for longest is closed. */
static void mti_meeting_accept(mti_meeting *m) {
    int fd = 0, most = m->room;
    while (most-- > 0 && (fd = accept(m->fd, NULL, NULL)) >= 0) {
        if (m->count == m->room) {
            mti_caller_close(m->callers);
            memmove(m->callers, m->callers + 1, (size_t)--m->count * sizeof *m->callers);
        }
        mti_socket_set(fd);
        mti_caller_begin(&m->callers[m->count], fd, MTI_AWAITS_HELLO, -1);
        mti_meeting_hear(m, &m->callers[m->count++]);
    }
    if (fd < 0 && errno != EAGAIN && errno != EWOULDBLOCK) mti_rest(1, 0); /* there may be no descriptor for it */
}

/* Waits for events of all connections, and takes what has come. Returns 0 when the time is over. */
static int mti_meeting_poll(mti_meeting *m, double end) {
    struct pollfd *p = m->polled;
    int n = 2, before = m->count, i, kept = 0;
    p[0].fd = m->fd;
    p[1].fd = m->up.fd;
    for (i = 0; i < before; i++) p[n++].fd = m->callers[i].fd;
    for (i = 1; i <= m->children; i++) p[n++].fd = m->down[i].fd;
    for (i = 0; i < n; i++) p[i].events = POLLIN;
    if (m->up.stage == MTI_CONNECTS) p[1].events = POLLOUT;
    if (!mti_listener_wait(p, n, end)) return 0;
    if (p[1].revents) mti_meeting_rise(m);
    for (i = 1; i <= m->children; i++)
        if (p[1 + before + i].revents) mti_meeting_listen(m, &m->down[i]);
    for (i = 0; i < before; i++)
        if (p[2 + i].revents) mti_meeting_hear(m, &m->callers[i]);
    for (i = 0; i < before; i++)
        if (m->callers[i].fd >= 0) m->callers[kept++] = m->callers[i];
    m->count = kept;
    if (p[0].revents) mti_meeting_accept(m);
    return 1;
}

/* Begins to connect to the parent. */
static void mti_meeting_call(mti_meeting *m) {
    const mti_listener *to = &m->listeners[mti_rank_parent(m->rank)];
    const mti_address address = mti_listener_address(to);
    struct sockaddr_storage at;
    socklen_t bytes = mti_address_write(&address, to->port, &at);
    mti_caller_begin(&m->up, socket(address.family, SOCK_STREAM, 0), MTI_CONNECTS, m->rank);
    if (m->up.fd < 0) return;
    mti_socket_set(m->up.fd);
    if (connect(m->up.fd, (struct sockaddr *)&at, bytes) != 0 && errno != EINPROGRESS) mti_caller_close(&m->up);
}

/* Meets the parent and the children, until all ranks below are connected, or one of them is absent. */
static void mti_meeting_gather(mti_meeting *m, double end) {
    int i, up = 0, over = 0;
    while (!over && (!up || m->come < m->children || (m->ready < m->children && m->absent < 0))) {
        over = !mti_meeting_poll(m, end);
        up = m->rank == 0 || m->up.fd < 0 || m->up.stage == MTI_AWAITS_OPENING;
    }
    if (m->absent < 0 && m->rank > 0 && (m->up.fd < 0 || m->up.stage != MTI_AWAITS_OPENING)) m->absent = m->rank;
    for (i = 1; i <= m->children && m->absent < 0; i++)
        if (m->down[i].stage != MTI_IS_READY) m->absent = MTI_CHANNEL_CHILDREN * m->rank + i;
}

/* Waits until the parent opens the connection, or says which rank is absent. Without either it is this one. */
static void mti_meeting_await(mti_meeting *m, double end) {
    struct pollfd p;
    p.events = POLLIN;
    while (m->up.stage != MTI_OPENED && m->absent < 0) {
        p.fd = m->up.fd;
        if (p.fd < 0 || (!mti_listener_wait(&p, 1, end) && poll(&p, 1, 0) <= 0)) m->absent = m->rank;
        else if (p.revents) mti_meeting_rise(m);
    }
}

/* Tells the parent the outcome, and the children what rank 0 has decided. Returns 1 when all ranks are connected. */
static int mti_meeting_decide(mti_meeting *m, double end) {
    int i, all = m->absent < 0;
    if (m->rank > 0) {
        mti_caller_say(&m->up, all ? MTI_MESSAGE_READY : MTI_MESSAGE_ABSENT, all ? m->rank : m->absent, NULL, 0);
        mti_meeting_await(m, end);
        all = m->absent < 0;
    }
    for (i = 1; i <= m->children; i++)
        mti_caller_say(&m->down[i], all ? MTI_MESSAGE_OPEN : MTI_MESSAGE_ABSENT, all ? m->rank : m->absent, NULL, 0);
    return all;
}

/* Connects the ranks of b, in at most so many seconds, or a few more. fd: of this rank's listener, or -1; listeners: of
   all ranks. The ranks that are further from rank 0 first give up their children, so that the others learn who is
   absent. Returns 1 when all are connected; otherwise *absent is a rank that could not connect to its parent, or -1: no
   memory. */
static int mti_channel_connect(mti_channel *b, int fd, const mti_listener *listeners, double seconds, int *absent) {
    int levels = mti_rank_depth(b->size - 1) - 1, depth = mti_rank_depth(b->rank), opened = 0, i;
    double end = mti_now() + seconds + MTI_CHANNEL_GRACE * levels;
    mti_meeting m;
    memset(&m, 0, sizeof m);
    m.fd = b->connection_count > 1 ? fd : -1;
    m.listeners = listeners;
    m.rank = b->rank;
    m.size = b->size;
    m.children = b->connection_count - 1;
    m.absent = m.up.fd = -1;
    m.room = m.children + MTI_LISTENER_STRANGERS;
    m.callers = (mti_caller *)calloc((size_t)m.room, sizeof *m.callers);
    m.down = (mti_caller *)calloc((size_t)b->connection_count, sizeof *m.down);
    m.polled = (struct pollfd *)calloc((size_t)(m.room + m.children + 2), sizeof *m.polled);
    for (i = 0; m.down && i <= m.children; i++) m.down[i].fd = -1;
    if (m.callers && m.down && m.polled) {
        if (m.rank > 0) mti_meeting_call(&m);
        mti_meeting_gather(&m, end - MTI_CHANNEL_GRACE * (depth < levels ? depth : levels));
        opened = mti_meeting_decide(&m, end + MTI_CHANNEL_GRACE * depth);
    }
    for (i = 0; m.callers && i < m.count; i++) mti_caller_close(&m.callers[i]);
    b->connections[0].fd = m.up.fd;
    for (i = 1; m.down && i <= m.children; i++) {
        b->connections[i].fd = m.down[i].fd;
        b->connections[i].lost = opened && m.down[i].fd < 0; /* since rank 0 has decided */
    }
    free(m.callers);
    free(m.down);
    free(m.polled);
    *absent = m.absent;
    return opened;
}

#define MTI_LISTENER_NO_MEMORY "rank %d has no memory for them"

/* Why no rank can connect, as all ranks know it from the listeners of all; "": nothing is missing. */
static void mti_listeners_check(const mti_listener *listeners, int size, char *text, size_t bytes) {
    int r = 0, parents = size > 1 ? mti_rank_parent(size - 1) + 1 : 0;
    text[0] = '\0';
    if (listeners[0].lacks == MTI_LACKS_SECRET)
        snprintf(text, bytes, "rank 0 has no random numbers for a secret: it cannot read /dev/urandom");
    while (r < parents && listeners[r].port) r++;
    if (text[0] || r == parents) return;
    if (listeners[r].lacks == MTI_LACKS_ADDRESS)
        snprintf(text, bytes, "rank %d has no network interface to listen at; NCCL_SOCKET_IFNAME may exclude all", r);
    else snprintf(text, bytes, "rank %d cannot listen at its address", r);
}

/* Connects the ranks of b, or writes why it cannot. */
static int mti_channel_meet(mti_channel *b, int fd, const mti_listener *listeners, double timeout, char *text,
                            size_t bytes) {
    char where[MTI_LISTENER_TEXT];
    int absent = -1, parent;
    mti_listeners_check(listeners, b->size, text, bytes);
    if (text[0]) return 0;
    if (mti_channel_connect(b, fd, listeners, timeout < MTI_CHANNEL_OPENING ? timeout : MTI_CHANNEL_OPENING, &absent))
        return 1;
    parent = absent > 0 ? mti_rank_parent(absent) : 0;
    mti_listener_write(&listeners[parent], where);
    if (absent <= 0) snprintf(text, bytes, MTI_LISTENER_NO_MEMORY, b->rank);
    else snprintf(text, bytes, "rank %d could not connect to rank %d at %s over TCP", absent, parent, where);
    return 0;
}

/* Connects the ranks of comm. fd: of this rank's listener, or -1; listeners: of all ranks, or NULL: no memory. Where a
   rank cannot connect, the calls are not compared on any rank, with a warning that says why. */
static mt_status mti_channel_open(mt_context *ctx, mt_comm *comm, int fd, const mti_listener *listeners) {
    mti_channel *b = mti_channel_new(comm->rank, comm->size);
    char why[160], text[256];
    int opened;
    if (!comm->group) comm->group = mti_group_new(comm->size, comm->nccl.timeout, 0);
    if (comm->group) comm->group->references = 1;
    snprintf(why, sizeof why, MTI_LISTENER_NO_MEMORY, comm->rank);
    opened = listeners && b && comm->group && mti_channel_meet(b, fd, listeners, comm->nccl.timeout, why, sizeof why);
    if (opened && mti_comparer_join(ctx, b)) {
        comm->nccl.channel = b;
        return MT_SUCCESS;
    }
    mti_channel_free(b);
    if (opened) return mti_refuse(ctx, comm, MT_ERR_SYSTEM, "no thread that compares the calls on \"%s\"", comm->name);
    snprintf(text, sizeof text, "the calls of the ranks of \"%s\" are not compared: %s", comm->name, why);
    mti_warn(ctx, text);
    return MT_SUCCESS;
}
#endif
