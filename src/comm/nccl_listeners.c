/* ---- how the ranks over NCCL connect ----------------------------------------------------------------------------- */

#pragma once
#include "nccl_calls.c"

#if MTI_COMPARES

/* Rank 0 serves all connections at the same time, so one on which nothing comes costs nothing. A rank tries all
   addresses of rank 0 at the same time, for the same reason. Both sides compare the listener's token. A rank has
   connected when rank 0 has opened one of its connections; rank 0 closes the others. */

#define MTI_LISTENER_HOSTS 6
#define MTI_LISTENER_STRANGERS 64 /* connections that may come from others than the ranks */

/* Where a rank listens. Sent as it is. */
typedef struct mti_listener {
    uint64_t token; /* a connection without this number is not from a rank of the communicator */
    uint32_t port;  /* 0: there is no listener */
    uint32_t hosts, host[MTI_LISTENER_HOSTS];
} mti_listener;

/* The random number is not a secret: it protects from mistakes. */
static uint64_t mti_listener_token(const void *salt) {
    struct timespec t;
    uint64_t token = 0;
    int fd = open("/dev/urandom", O_RDONLY);
    if (fd < 0 || read(fd, &token, sizeof token) != (ssize_t)sizeof token) {
        clock_gettime(CLOCK_REALTIME, &t);
        token = (uint64_t)t.tv_nsec * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid() << 32 ^ (uint64_t)(uintptr_t)salt;
    }
    if (fd >= 0) close(fd);
    return token;
}

/* Lists the IPv4 addresses of this machine; the loopback address only when there is no other. */
static void mti_listener_hosts(mti_listener *listener) {
    struct ifaddrs *all = NULL, *a;
    if (getifaddrs(&all) != 0) all = NULL;
    for (a = all; a && listener->hosts < MTI_LISTENER_HOSTS; a = a->ifa_next) {
        struct sockaddr_in in;
        if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET || !(a->ifa_flags & IFF_UP) ||
            (a->ifa_flags & IFF_LOOPBACK))
            continue;
        memcpy(&in, a->ifa_addr, sizeof in);
        listener->host[listener->hosts++] = in.sin_addr.s_addr;
    }
    if (!listener->hosts) listener->host[listener->hosts++] = htonl(INADDR_LOOPBACK);
    if (all) freeifaddrs(all);
}

/* Opens a socket that listens, and describes it. Returns -1, and a listener without a port, when there is none. */
static int mti_listener_open(mti_listener *listener) {
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(listener, 0, sizeof *listener);
    if (fd < 0) return -1;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_ANY);
    mti_socket_set(fd);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) != 0 || listen(fd, MTI_MAX_RANKS) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &bytes) != 0) {
        close(fd);
        return -1;
    }
    listener->port = ntohs(at.sin_port);
    listener->token = mti_listener_token(listener);
    mti_listener_hosts(listener);
    return fd;
}

/* A connection, or an attempt to make one, over which a message without a text must come: MTI_MESSAGE_HELLO at rank 0,
   MTI_MESSAGE_OPEN at the other ranks. */
typedef struct mti_caller {
    int fd;       /* -1: closed */
    int connects; /* 1: connect has not ended yet */
    size_t got;   /* bytes of the message that have come */
    mti_message message;
} mti_caller;

static void mti_caller_close(mti_caller *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

/* Reads the message of a caller. size: of the group. Does not read beyond the message, and does not wait. */
static mti_parsed mti_caller_read(mti_caller *c, int size) {
    ssize_t n;
    while (c->got < sizeof c->message) {
        n = recv(c->fd, (char *)&c->message + c->got, sizeof c->message - c->got, MSG_DONTWAIT);
        if (n > 0) c->got += (size_t)n;
        else if (n == 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) return MTI_MALFORMED;
        else if (errno != EINTR) return MTI_INCOMPLETE;
    }
    return mti_message_is_valid(&c->message, size) ? MTI_PARSED : MTI_MALFORMED;
}

static int mti_listener_say(int fd, int kind, int rank, uint64_t token) {
    mti_message message;
    memset(&message, 0, sizeof message);
    message.kind = kind;
    message.rank = rank;
    message.what = token;
    return send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof message;
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

/* Begins to connect to one address of rank 0. */
static void mti_listener_call(const mti_listener *listener, uint32_t host, mti_caller *c) {
    struct sockaddr_in at;
    memset(c, 0, sizeof *c);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    c->connects = 1;
    if (c->fd < 0) return;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_port = htons((uint16_t)listener->port);
    at.sin_addr.s_addr = host;
    mti_socket_set(c->fd);
    if (connect(c->fd, (struct sockaddr *)&at, sizeof at) != 0 && errno != EINPROGRESS) mti_caller_close(c);
}

/* After an event of an attempt: says hello when it is connected, or reads what rank 0 says. Returns 1 when rank 0 has
   opened the connection. */
static int mti_listener_called(const mti_listener *listener, int rank, int size, mti_caller *c) {
    int error = -1;
    socklen_t bytes = sizeof error;
    mti_parsed parsed;
    if (c->connects) {
        c->connects = 0;
        if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0 || error != 0 ||
            !mti_listener_say(c->fd, MTI_MESSAGE_HELLO, rank, listener->token))
            mti_caller_close(c);
        return 0;
    }
    parsed = mti_caller_read(c, size);
    if (parsed == MTI_INCOMPLETE) return 0;
    if (parsed == MTI_PARSED && c->message.kind == MTI_MESSAGE_OPEN && c->message.what == listener->token) return 1;
    mti_caller_close(c);
    return 0;
}

/* Connects to rank 0, and waits until all ranks are connected. Returns the socket; -1: it fails. */
static int mti_listener_connect(const mti_listener *listener, int rank, int size, double end) {
    mti_caller callers[MTI_LISTENER_HOSTS];
    struct pollfd polled[MTI_LISTENER_HOSTS];
    int count = listener->hosts < MTI_LISTENER_HOSTS ? (int)listener->hosts : MTI_LISTENER_HOSTS, open, fd = -1, i;
    for (i = 0; i < count; i++) mti_listener_call(listener, listener->host[i], &callers[i]);
    do {
        for (i = open = 0; i < count; i++) {
            polled[i].fd = callers[i].fd;
            polled[i].events = callers[i].connects ? POLLOUT : POLLIN;
            open += callers[i].fd >= 0;
        }
        if (!open || !mti_listener_wait(polled, count, end)) break;
        for (i = 0; i < count && fd < 0; i++)
            if (polled[i].revents && mti_listener_called(listener, rank, size, &callers[i])) fd = callers[i].fd;
    } while (fd < 0);
    for (i = 0; i < count; i++)
        if (callers[i].fd != fd) mti_caller_close(&callers[i]);
    return fd;
}

/* What rank 0 has while the ranks connect. */
typedef struct mti_server {
    int fd; /* of the listener */
    const mti_listener *listener;
    mti_channel *channel;
    int come; /* ranks that are connected, with rank 0 */
    mti_caller *callers;
    int count, room; /* of the callers */
    struct pollfd *polled;
} mti_server;

/* Takes what a caller has sent. A caller that is no rank of the group, or has come before, is closed. */
static void mti_server_hear(mti_server *s, mti_caller *c) {
    mti_parsed parsed = mti_caller_read(c, s->channel->size);
    const mti_message *m = &c->message;
    if (parsed == MTI_INCOMPLETE) return;
    if (parsed == MTI_PARSED && m->kind == MTI_MESSAGE_HELLO && m->what == s->listener->token && m->rank >= 1 &&
        s->channel->connections[m->rank].fd < 0) {
        s->channel->connections[m->rank].fd = c->fd;
        c->fd = -1;
        s->come++;
    }
    mti_caller_close(c);
}

/* Accepts who has called. When there are too many, the one that has been silent for longest is closed. */
static void mti_server_accept(mti_server *s) {
    mti_caller *c;
    int fd = 0, most = s->room;
    while (most-- > 0 && (fd = accept(s->fd, NULL, NULL)) >= 0) {
        if (s->count == s->room) {
            mti_caller_close(s->callers);
            memmove(s->callers, s->callers + 1, (size_t)--s->count * sizeof *s->callers);
        }
        c = &s->callers[s->count++];
        memset(c, 0, sizeof *c);
        c->fd = fd;
        mti_socket_set(fd);
        mti_server_hear(s, c);
    }
    if (fd < 0 && errno != EAGAIN && errno != EWOULDBLOCK) mti_rest(1, 0); /* there may be no descriptor for it */
}

/* A rank says nothing before its connection is open: it has given up. */
static void mti_server_drop(mti_server *s, mti_connection *connection) {
    mti_connection_close(connection);
    if (!mti_bytes_reserve(&connection->out, 0)) s->room = 0;
    s->come--;
}

/* One round of mti_listener_serve. Returns 0 when the time is over. */
static int mti_server_poll(mti_server *s, double end) {
    mti_channel *b = s->channel;
    int n = 1, before = s->count, i, kept = 0;
    s->polled[0].fd = s->fd;
    for (i = 0; i < before; i++) s->polled[n++].fd = s->callers[i].fd;
    for (i = 1; i < b->size; i++) s->polled[n++].fd = b->connections[i].fd;
    for (i = 0; i < n; i++) s->polled[i].events = POLLIN;
    if (!mti_listener_wait(s->polled, n, end)) return 0;
    for (i = 1; i < b->size; i++)
        if (s->polled[before + i].revents) mti_server_drop(s, &b->connections[i]);
    for (i = 0; i < before; i++)
        if (s->polled[1 + i].revents) mti_server_hear(s, &s->callers[i]);
    for (i = 0; i < before; i++)
        if (s->callers[i].fd >= 0) s->callers[kept++] = s->callers[i];
    s->count = kept;
    if (s->polled[0].revents) mti_server_accept(s);
    return s->room > 0;
}

/* Accepts the other ranks, at most until `end`, and opens their connections. Returns 1 when all of them have come. */
static int mti_listener_serve(int listener, const mti_listener *mine, mti_channel *b, double end) {
    mti_server s;
    int i, opened;
    memset(&s, 0, sizeof s);
    s.fd = listener;
    s.listener = mine;
    s.channel = b;
    s.come = 1;
    s.room = MTI_LISTENER_HOSTS * b->size + MTI_LISTENER_STRANGERS;
    s.callers = (mti_caller *)calloc((size_t)s.room, sizeof *s.callers);
    s.polled = (struct pollfd *)calloc((size_t)(s.room + b->size + 1), sizeof *s.polled);
    while (s.callers && s.polled && s.come < b->size && mti_server_poll(&s, end)) continue;
    opened = s.come == b->size && s.room > 0;
    for (i = 1; i < b->size && opened; i++) mti_listener_say(b->connections[i].fd, MTI_MESSAGE_OPEN, 0, mine->token);
    for (i = 0; s.callers && i < s.count; i++) mti_caller_close(&s.callers[i]);
    free(s.callers);
    free(s.polled);
    return opened;
}

/* Connects the ranks of b. listener: this rank's socket, or -1; theirs: the listener of rank 0. Returns 1 when all are
   connected. The other ranks wait longer than rank 0, so that they learn what it has decided. */
static int mti_channel_connect(mti_channel *b, int listener, const mti_listener *theirs, double timeout) {
    double end = mti_now() + (timeout < MTI_CHANNEL_OPENING ? timeout : MTI_CHANNEL_OPENING);
    if (b->rank == 0) return listener >= 0 && mti_listener_serve(listener, theirs, b, end);
    if (!theirs->port) return 0;
    b->connections[0].fd = mti_listener_connect(theirs, b->rank, b->size, end + MTI_CHANNEL_GRACE);
    return b->connections[0].fd >= 0;
}

/* Connects the ranks of comm, see mti_channel_connect. Where a rank cannot connect, the calls are not compared on any
   rank, with a warning. */
static mt_status mti_channel_open(mt_context *ctx, mt_comm *comm, int listener, const mti_listener *theirs) {
    mti_channel *b = mti_channel_new(comm->rank, comm->size);
    char text[160];
    int opened;
    if (!comm->group) comm->group = mti_group_new(comm->size, comm->nccl.timeout, 0);
    if (comm->group) comm->group->references = 1;
    opened = b && comm->group && mti_channel_connect(b, listener, theirs, comm->nccl.timeout);
    if (opened && mti_comparer_join(ctx, b)) {
        comm->nccl.channel = b;
        return MT_SUCCESS;
    }
    mti_channel_free(b);
    if (opened) return mti_refuse(ctx, comm, MT_ERR_SYSTEM, "no thread that compares the calls on \"%s\"", comm->name);
    snprintf(text, sizeof text,
             "the calls of the ranks of \"%s\" are not compared: not all of them could connect to rank 0 over TCP",
             comm->name);
    mti_warn(ctx, text);
    return MT_SUCCESS;
}
#endif
