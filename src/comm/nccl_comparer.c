/* ---- the thread that sends and compares calls over NCCL ---------------------------------------------------------- */

#pragma once
#include "nccl_calls.c"

#if MTI_COMPARES

/* Belongs to the channels of one context. */
typedef struct mti_comparer {
    pthread_mutex_t mutex;
    pthread_cond_t cond; /* a channel has been let go */
    pthread_t thread;
    int users; /* channels; only the thread of the rank uses this number */
    /* guarded by the mutex */
    mti_channel *joining; /* that the thread has not seen yet */
    int ends;
    int pending; /* 1: a queue has messages, or a channel joins or leaves */
    int sleeps;  /* 1: the thread is in poll until something happens */
    int bell[2]; /* a pipe that wakes the thread */
    /* only of the thread */
    mti_channel *channels;
    struct pollfd *polled;
    int polled_room;
} mti_comparer;

/* Takes the messages that have arrived in a connection. line: its number */
static void mti_channel_take_all(mti_channel *b, mti_connection *connection, int line) {
    mti_message message;
    const char *text = NULL;
    mti_parsed parsed = MTI_PARSED;
    while (!b->ended && (parsed = mti_message_parse(&connection->in, b->size, &message, &text)) == MTI_PARSED) {
        int known = line == 0 ? mti_channel_take_down(b, &message, text)
                              : (mti_channel_line(b, message.rank) == line || message.kind == MTI_MESSAGE_END) &&
                                    (b->rank == 0 ? mti_channel_compare(b, &message, text)
                                                  : mti_channel_relay(b, &message, text));
        mti_bytes_drop(&connection->in, sizeof message + (size_t)message.bytes);
        if (!known) parsed = MTI_MALFORMED;
        if (!known) break;
    }
    if (parsed == MTI_MALFORMED) connection->lost = 1;
    if (b->ended) mti_bytes_drop(&connection->in, mti_bytes_size(&connection->in));
}

/* Reads from a connection, and takes the messages. After the end of a comparison it only waits for the connection's
   end. Returns 1 when there may be more to read. */
static int mti_channel_read(mti_channel *b, int line) {
    mti_connection *connection = &b->connections[line];
    int bytes = mti_connection_read(connection);
    if (bytes < 0) mti_channel_end(b, b->rank, MTI_END_MEMORY);
    mti_channel_take_all(b, connection, line);
    return bytes > 0 && !connection->lost;
}

/* Takes the queue of the rank's thread. The caller holds the mutex. mti_channel_empty has emptied `taken`. */
static void mti_channel_swap(mti_channel *b) {
    mti_bytes taken = b->taken;
    b->taken = b->queue;
    b->queue = taken;
    b->overflowed = b->overflow;
    b->closing = b->leaves;
}

/* Takes the messages of this rank. */
static void mti_channel_empty(mti_channel *b) {
    mti_message message;
    const char *text = NULL;
    while (!b->ended && mti_message_parse(&b->taken, b->size, &message, &text) == MTI_PARSED) {
        if (b->rank == 0) mti_channel_compare(b, &message, text);
        else mti_channel_pass(b, &message, text);
        if (!b->ended) mti_bytes_drop(&b->taken, sizeof message + (size_t)message.bytes); /* the end has freed it */
    }
    if (b->ended) mti_bytes_free(&b->taken);
}

/* Takes the messages of this rank, sends what there is to send, and ends lost connections. Returns 1 when the comparer
   must look again soon. */
static int mti_channel_work(mti_channel *b) {
    int i, soon = mti_bytes_size(&b->taken) > 0;
    double since;
    if (b->overflowed) mti_channel_end(b, b->rank, (mti_end_reason)(b->overflowed - 1));
    mti_channel_empty(b);
    if (b->odd && !b->decided && mti_now() > b->odd_at + MTI_CHANNEL_GRACE)
        mti_channel_decide(b, MTI_WHY_DIFFERS, -1, -1, b->odd_calls, "");
    if (b->gone_at > 0 && !b->decided && mti_now() > b->gone_at + MTI_CHANNEL_GRACE)
        mti_channel_decide_left(b, b->gone);
    if (mti_channel_holds(b, &since)) {
        if (mti_now() > since + MTI_CHANNEL_HOLD) mti_channel_pour(b);
        soon = 1;
    }
    mti_channel_send_end(b);
    for (i = 0; i < b->connection_count; i++) {
        mti_connection_flush(&b->connections[i]);
        if (!b->connections[i].lost) continue;
        b->connections[i].lost = 0;
        mti_connection_close(&b->connections[i]);
        mti_channel_lost(b, i);
        soon = 1;
    }
    if (b->ended) return !b->end_is_sent;
    return soon || ((b->odd || b->gone_at > 0) && !b->decided);
}

static int mti_channel_has_more(const mti_channel *b) {
    int i;
    for (i = 0; i < b->connection_count; i++)
        if (b->connections[i].fd >= 0 && mti_bytes_size(&b->connections[i].out)) return 1;
    return 0;
}

/* Begins to close: takes what the ranks below have sent, and says farewell to them. */
static void mti_channel_farewell(mti_channel *b) {
    static const char left[] = "has left the group";
    const mti_bytes *reason = &b->reasons[b->rank];
    double start = mti_now();
    mti_message message;
    int i;
    b->closes_at = start + MTI_CHANNEL_GRACE;
    for (i = 1; i < b->connection_count; i++)
        while (mti_channel_read(b, i) && mti_now() < b->closes_at) continue;
    if (b->rank) mti_channel_pour(b);
    memset(&message, 0, sizeof message);
    message.kind = MTI_MESSAGE_LEFT;
    message.rank = b->rank;
    message.count = b->heard[b->rank].single;
    message.bytes = mti_bytes_size(reason) ? mti_bytes_size(reason) : sizeof left;
    mti_channel_send_down(b, &message, mti_bytes_size(reason) ? mti_bytes_front(reason) : left);
    mti_channel_work(b);
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
    mti_bytes_free(&b->taken);
    mti_bytes_free(&b->shown);
    free(b->connections);
    free(b->last);
    free(b->heard);
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
    b->heard = (mti_heard *)calloc(n, sizeof *b->heard);
    b->reasons = (mti_bytes *)calloc(n, sizeof *b->reasons);
    b->pairs = (mti_pair **)calloc(n, sizeof *b->pairs);
    return b->connections && b->last && b->odd_calls && b->heard && b->reasons && b->pairs &&
           mti_bytes_reserve(&b->shown, n * sizeof(mti_said) + MTI_MESSAGE_TEXT);
}

/* NULL: out of memory. */
static mti_channel *mti_channel_new(int rank, int size) {
    mti_channel *b = (mti_channel *)calloc(1, sizeof *b);
    int children = size - 1 - MTI_CHANNEL_CHILDREN * rank;
    if (!b) return NULL;
    b->rank = rank;
    b->size = size;
    if (children < 0) children = 0;
    b->connection_count = 1 + (children < MTI_CHANNEL_CHILDREN ? children : MTI_CHANNEL_CHILDREN);
    if (mti_channel_fill(b)) return b;
    mti_channel_free(b);
    return NULL;
}

/* -- the thread -- */

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

/* Takes over what the thread of the rank has left. Returns 0 when the comparer ends. */
static int mti_comparer_take(mti_comparer *c) {
    mti_channel *b;
    int ends;
    pthread_mutex_lock(&c->mutex);
    while ((b = c->joining) != NULL) {
        c->joining = b->next;
        b->next = c->channels;
        c->channels = b;
    }
    c->pending = 0;
    c->sleeps = 0;
    for (b = c->channels; b; b = b->next) mti_channel_swap(b);
    ends = c->ends;
    pthread_mutex_unlock(&c->mutex);
    return !ends;
}

/* Lets go of a channel that is closing and has nothing left to send, or no time. Returns 1 when it has. */
static int mti_comparer_release(mti_comparer *c, mti_channel **at) {
    mti_channel *b = *at;
    if (b->closes_at <= 0 || (mti_channel_has_more(b) && mti_now() < b->closes_at)) return 0;
    *at = b->next;
    pthread_mutex_lock(&c->mutex);
    b->let_go = 1;
    pthread_cond_broadcast(&c->cond);
    pthread_mutex_unlock(&c->mutex);
    return 1;
}

/* Works on all channels. Returns 1 when the comparer must look again soon. */
static int mti_comparer_work(mti_comparer *c) {
    mti_channel **at = &c->channels;
    int soon = 0;
    while (*at) {
        mti_channel *b = *at;
        soon |= mti_channel_work(b) | b->closing;
        if (b->closing && b->closes_at <= 0) mti_channel_farewell(b);
        if (!mti_comparer_release(c, at)) at = &b->next;
    }
    return soon;
}

/* Whether the comparer can sleep until something happens. */
static int mti_comparer_rests(mti_comparer *c, int soon) {
    int rests;
    pthread_mutex_lock(&c->mutex);
    rests = c->sleeps = !soon && !c->pending;
    pthread_mutex_unlock(&c->mutex);
    return rests;
}

/* Reads what poll has found. */
static void mti_comparer_hear(mti_comparer *c) {
    mti_channel *b;
    char rung[64];
    int n = 1, i;
    if (c->polled[0].revents && read(c->bell[0], rung, sizeof rung) < 0 && errno != EAGAIN && errno != EINTR) return;
    for (b = c->channels; b; b = b->next)
        for (i = 0; i < b->connection_count; i++, n++)
            if (c->polled[n].revents) mti_channel_read(b, i);
}

static void *mti_comparer_run(void *argument) {
    mti_comparer *c = (mti_comparer *)argument;
    while (mti_comparer_take(c)) {
        int soon = mti_comparer_work(c), n = mti_comparer_list(c);
        int found = poll(c->polled, (nfds_t)n, mti_comparer_rests(c, soon || !n) ? -1 : MTI_CHANNEL_TICK);
        if (found > 0) mti_comparer_hear(c);
    }
    return NULL;
}

/* -- what the thread of the rank does -- */

/* Releases the mutex, and wakes the thread when it sleeps. */
static void mti_comparer_post(mti_comparer *c) {
    int rings = c->sleeps;
    c->pending = 1;
    c->sleeps = 0;
    pthread_mutex_unlock(&c->mutex);
    while (rings && write(c->bell[1], "", 1) < 0 && errno == EINTR) continue;
}

static void mti_socket_set(int fd) {
    int on = 1;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* fails on a pipe, which needs none */
}

/* Starts the thread. The rest of c is made. */
static int mti_comparer_start(mti_comparer *c) {
    if (pthread_mutex_init(&c->mutex, NULL) == 0) {
        if (pthread_cond_init(&c->cond, NULL) == 0) {
            if (mti_thread_start(&c->thread, mti_comparer_run, c) == 0) return 1;
            pthread_cond_destroy(&c->cond);
        }
        pthread_mutex_destroy(&c->mutex);
    }
    return 0;
}

static mti_comparer *mti_comparer_new(void) {
    mti_comparer *c = (mti_comparer *)calloc(1, sizeof *c);
    if (!c) return NULL;
    if (pipe(c->bell) == 0) {
        mti_socket_set(c->bell[0]);
        mti_socket_set(c->bell[1]);
        if (mti_comparer_start(c)) return c;
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
    mti_comparer_post(c);
    pthread_join(c->thread, NULL);
    pthread_cond_destroy(&c->cond);
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
    c->users++;
    pthread_mutex_lock(&c->mutex);
    b->next = c->joining;
    c->joining = b;
    mti_comparer_post(c);
    return 1;
}

/* Warns also a program without a logger, which would not learn otherwise that an error may not be found. */
static void mti_warn(mt_context *ctx, const char *text) {
    if (ctx && !ctx->logger.log) fprintf(stderr, "%s\n", text);
    mt_log(ctx, MT_LOG_WARNING, text);
}

/* Says once that the comparison has ended. Right programs may end with messages between some ranks when another one has
   left: that is no warning. */
static void mti_channel_warn(mt_comm *comm) {
    static const char *const why[] = {"has no memory for them", "has seen calls that are too far ahead",
                                      "has left the group, and their calls went over it"};
    mti_channel *b = comm->nccl.channel;
    char text[192];
    if (!mti_channel_is_ended(b) || b->end_is_told) return;
    b->end_is_told = 1;
    snprintf(text, sizeof text, "the calls of the ranks of \"%s\" are no longer compared: rank %d %s", comm->name,
             (int)b->end.rank, why[b->end.what]);
    if (b->end.what == MTI_END_LEFT) mt_log(comm->nccl.home, MT_LOG_INFO, text);
    else mti_warn(comm->nccl.home, text);
}

/* Appends a message to the queue. call: NULL for other messages than MTI_MESSAGE_CALL */
static void mti_channel_append(mt_comm *comm, mti_message_kind kind, const mti_call *call, const char *text) {
    mti_channel *b = comm->nccl.channel;
    mti_slot slot;
    mti_message message;
    if (!b) return;
    mti_channel_warn(comm);
    if (mti_channel_is_ended(b)) return;
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
    if (mti_bytes_size(&b->queue) > MTI_CHANNEL_AHEAD * sizeof message) b->overflow = 1 + MTI_END_AHEAD;
    else if (!b->overflow && !mti_message_add(&b->queue, &message, text)) b->overflow = 1 + MTI_END_MEMORY;
    mti_comparer_post(b->comparer);
}

/* Asks which ranks are missing. The answer is a result; when none is missing, there is no answer. */
static void mti_channel_ask(mt_comm *comm) {
    if (comm->nccl.channel && !mti_channel_is_decided(comm->nccl.channel))
        mti_channel_append(comm, MTI_MESSAGE_LATE, NULL, NULL);
}

/* Whether there may still be an answer, which was asked for at `start`. */
static int mti_channel_awaits(const mt_comm *comm, double start) {
    const mti_channel *b = comm->nccl.channel;
    return b && !mti_channel_is_decided(b) && !mti_channel_is_ended(b) && mti_now() < start + MTI_CHANNEL_ANSWER;
}

static void mti_channel_find_missing(mt_comm *comm) {
    double start = mti_now();
    mti_channel_ask(comm);
    while (mti_channel_awaits(comm, start)) mti_rest(1, 0);
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

/* Waits until the comparer has sent what is left, said farewell and let go of the channel, and frees it. */
static void mti_channel_close(mt_comm *comm) {
    mti_channel *b = comm->nccl.channel;
    mti_comparer *c;
    if (!b) return;
    c = b->comparer;
    pthread_mutex_lock(&c->mutex);
    b->leaves = 1;
    mti_comparer_post(c);
    pthread_mutex_lock(&c->mutex);
    while (!b->let_go) pthread_cond_wait(&c->cond, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
    mti_channel_warn(comm);
    comm->nccl.channel = NULL;
    mti_channel_free(b);
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
