/* messages.h - shared by fuzz_messages.c and test_messages.c: passes arbitrary bytes to the connections over which
   ranks compare their calls, and checks what must hold. It includes the implementation of mt_comm.h with that part,
   and without NCCL. Allocations of the implementation can fail, and its calls of the system can be made to wait. */

#ifndef MT_FUZZ_MESSAGES_H
#define MT_FUZZ_MESSAGES_H

#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* The allocation before which so many others succeed fails, once. -1: none fails. */
static long messages_memory = -1;

static inline int messages_no_memory(void) { return messages_memory >= 0 && messages_memory-- == 0; }

/* Calls of the implementation that wait while `wanted` names them. The comparer makes those of calloc, too. */
typedef enum messages_call {
    MESSAGES_NONE,
    MESSAGES_SEND,
    MESSAGES_RECV,
    MESSAGES_POLL,
    MESSAGES_CALLOC
} messages_call;

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    messages_call wanted;
    int waits; /* 1: a call waits */
} messages_gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, MESSAGES_NONE, 0};

static inline void messages_enter(messages_call call) {
    pthread_mutex_lock(&messages_gate.mutex);
    while (messages_gate.wanted == call) {
        messages_gate.waits = 1;
        pthread_cond_broadcast(&messages_gate.cond);
        pthread_cond_wait(&messages_gate.cond, &messages_gate.mutex);
    }
    messages_gate.waits = 0;
    pthread_mutex_unlock(&messages_gate.mutex);
}

/* Fresh memory is full of letters: a text that does not end runs on to the end of the memory. */
static inline void *messages_malloc(size_t bytes) {
    void *p = messages_no_memory() ? NULL : malloc(bytes);
    return p ? memset(p, 'x', bytes) : NULL;
}
static inline void *messages_calloc(size_t n, size_t bytes) {
    messages_enter(MESSAGES_CALLOC);
    return messages_no_memory() ? NULL : calloc(n, bytes);
}
static inline ssize_t messages_os_send(int fd, const void *from, size_t n, int flags) {
    messages_enter(MESSAGES_SEND);
    return send(fd, from, n, flags);
}
static inline ssize_t messages_os_recv(int fd, void *to, size_t n, int flags) {
    messages_enter(MESSAGES_RECV);
    return recv(fd, to, n, flags);
}
static inline int messages_os_poll(struct pollfd *polled, nfds_t n, int milliseconds) {
    messages_enter(MESSAGES_POLL);
    return poll(polled, n, milliseconds);
}
#define malloc messages_malloc
#define calloc messages_calloc
#define send(fd, from, n, flags) messages_os_send(fd, from, n, flags)
#define recv(fd, to, n, flags) messages_os_recv(fd, to, n, flags)
#define poll(polled, n, milliseconds) messages_os_poll(polled, n, milliseconds)
#define MTI_COMPARES 1
#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"
#undef malloc
#undef calloc
#undef send
#undef recv
#undef poll

#define MESSAGES_HOLD(condition)                                                                                       \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#define MESSAGES_RANKS 45                         /* ranks 33 to 44 are children of rank 1 */
#define MESSAGES_LINES (1 + MTI_CHANNEL_CHILDREN) /* most connections of a rank */

/* A rank of a group: its channel, and the far ends of its connections. */
typedef struct messages {
    mt_comm *comm;
    mti_channel *channel;
    int far[MESSAGES_LINES]; /* per line; -1: closed */
    mti_bytes heard[MESSAGES_LINES];
} messages;

/* Returns 0 when there is no memory. */
static inline int messages_open(messages *m, int rank, int size) {
    memset(m, 0, sizeof *m);
    m->channel = mti_channel_new(rank, size);
    m->comm = mti_comm_new(&mti_threads, rank, size, "test");
    if (m->comm) m->comm->group = mti_group_new(size, 1, 0);
    for (int i = 0; i < MESSAGES_LINES; i++) m->far[i] = -1;
    if (m->comm && m->comm->group) m->comm->group->references = 1;
    if (!m->channel || !m->comm || !m->comm->group) return 0;
    m->comm->nccl.channel = m->channel;
    for (int i = rank ? 0 : 1; i < m->channel->connection_count; i++) {
        int ends[2];
        MESSAGES_HOLD(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        m->channel->connections[i].fd = ends[0];
        m->far[i] = ends[1];
    }
    return 1;
}

static inline void messages_close(messages *m) {
    for (int i = 0; i < MESSAGES_LINES; i++) {
        if (m->far[i] >= 0) close(m->far[i]);
        mti_bytes_free(&m->heard[i]);
    }
    mti_channel_free(m->channel);
    if (m->comm) mti_comm_free(m->comm);
}

/* What the channel sends is valid, and complete at the end. */
static inline void messages_hear(messages *m, int line) {
    mti_message message;
    const char *text;
    char part[4096];
    ssize_t n;
    while (m->far[line] >= 0 && (n = recv(m->far[line], part, sizeof part, MSG_DONTWAIT)) > 0)
        MESSAGES_HOLD(mti_bytes_add(&m->heard[line], part, (size_t)n));
    for (;;) {
        mti_parsed parsed = mti_message_parse(&m->heard[line], m->channel->size, &message, &text);
        MESSAGES_HOLD(parsed != MTI_MALFORMED);
        if (parsed == MTI_INCOMPLETE) return;
        mti_bytes_drop(&m->heard[line], sizeof message + (size_t)message.bytes);
    }
}

/* The error of a result is a sentence about ranks of the group. */
static inline void messages_result(const messages *m) {
    mti_text text;
    mt_status status = mti_channel_error(m->comm, &text);
    MESSAGES_HOLD((status != MT_SUCCESS) == (m->channel->decided != 0));
    if (status == MT_SUCCESS) return;
    MESSAGES_HOLD(status == MT_ERR_MISMATCH || status == MT_ERR_PEER || status == MT_ERR_TIMEOUT);
    MESSAGES_HOLD(text.used > 0 && text.used < sizeof text.data && strlen(text.data) == text.used);
}

/* Reads and works as the comparer does. */
static inline void messages_work(messages *m) {
    mti_channel *b = m->channel;
    long memory;
    for (int i = 0; i < b->connection_count; i++) mti_channel_read(b, i);
    mti_channel_swap(b);
    mti_channel_work(b);
    memory = messages_memory;
    messages_memory = -1;
    for (int i = 0; i < b->connection_count; i++) {
        MESSAGES_HOLD(mti_bytes_size(&b->connections[i].in) <
                      2 * MTI_CHANNEL_PART + MTI_MESSAGE_TEXT + 1024 * sizeof(mti_said));
        messages_hear(m, i);
    }
    MESSAGES_HOLD(b->waiting <= MTI_CHANNEL_AHEAD && b->room <= MTI_CHANNEL_AHEAD);
    messages_result(m);
    messages_memory = memory;
}

/* Bytes of an input, and zeros behind them. */
typedef struct messages_input {
    const uint8_t *data;
    size_t size, at;
} messages_input;

static inline unsigned messages_byte(messages_input *in) { return in->at < in->size ? in->data[in->at++] : 0; }

/* The head of a message whose fields are often valid. */
static inline mti_message messages_head(messages_input *in, int size) {
    mti_message m;
    memset(&m, 0, sizeof m);
    m.kind = (int32_t)messages_byte(in) % (MTI_MESSAGE_END + 2);
    m.rank = (int32_t)messages_byte(in) % (size + 2) - 1;
    m.what = messages_byte(in) % 10 | (uint64_t)(messages_byte(in) % 7) << 8;
    m.what |= (uint64_t)(messages_byte(in) % (unsigned)(size + 2)) << 24;
    m.what |= (uint64_t)(messages_byte(in) % (unsigned)(size + 2)) << 40;
    if (messages_byte(in) % 4 == 0) m.what = (MTI_SEND_RECV + 1) | (m.what & ~(uint64_t)255);
    m.count = messages_byte(in) % 4;
    m.recvcount = messages_byte(in) % 4;
    switch (messages_byte(in) % 8) {
    case 0: m.bytes = messages_byte(in); break;
    case 1: m.bytes = (uint64_t)size * sizeof(mti_said) + messages_byte(in); break;
    case 2: m.bytes = (uint64_t)1 << messages_byte(in) % 64; break;
    default: break;
    }
    return m;
}

static inline void messages_send(const messages *m, int line, const void *bytes, size_t n) {
    if (m->far[line] >= 0) (void)!send(m->far[line], bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Sends a message with a text of letters, which ends or not. */
static inline void messages_send_message(messages *m, messages_input *in, int line) {
    char text[2048];
    mti_message head = messages_head(in, m->channel->size);
    size_t n = head.bytes < sizeof text ? (size_t)head.bytes : sizeof text;
    memset(text, messages_byte(in) % 3 ? 0 : 'x', sizeof text);
    if (n > 1 && messages_byte(in) % 4) {
        if (head.kind != MTI_MESSAGE_RESULT) memset(text, 'x', n);
        text[n - 2] = 'x';
        text[n - 1] = 0;
    }
    messages_send(m, line, &head, sizeof head);
    messages_send(m, line, text, n);
}

/* A message of the rank itself, which is always valid. */
static inline void messages_own(messages *m, messages_input *in) {
    mti_message head = messages_head(in, m->channel->size);
    static const int kinds[] = {MTI_MESSAGE_CALL, MTI_MESSAGE_LATE, MTI_MESSAGE_CALL, MTI_MESSAGE_LEFT,
                                MTI_MESSAGE_CALL, MTI_MESSAGE_LATE, MTI_MESSAGE_CALL, MTI_MESSAGE_FAILED};
    static const char why[] = "has left the group";
    int texts;
    head.rank = m->channel->rank;
    head.kind = kinds[(unsigned)head.kind % 8];
    texts = head.kind == MTI_MESSAGE_LEFT || head.kind == MTI_MESSAGE_FAILED;
    head.bytes = texts ? sizeof why : 0;
    if (!mti_message_is_valid(&head, m->channel->size) || m->channel->ended) return;
    if (!mti_message_add(&m->channel->queue, &head, texts ? why : NULL)) m->channel->overflow = 1 + MTI_END_MEMORY;
}

/* Sends a message that is often about a rank behind the line. */
static inline void messages_send_any(messages *m, messages_input *in, int line) {
    size_t at = in->at + 1;
    if (line && messages_byte(in) % 4 && at < in->size) {
        mti_message head = messages_head(in, m->channel->size);
        head.rank = mti_channel_child(m->channel, line);
        head.bytes = 0;
        messages_send(m, line, &head, sizeof head);
    } else messages_send_message(m, in, line);
}

static inline int messages_size(messages_input *in) {
    unsigned n = messages_byte(in);
    return n % 8 ? 2 + (int)(n / 8 % 8) : 34 + (int)(n / 8 % (MESSAGES_RANKS - 33));
}

/* A channel of rank 0, or of another rank, to which the other ranks send what the input says. */
static inline void messages_channel(messages_input *in) {
    int size = messages_size(in), rank = (int)messages_byte(in) % size, usual = (int)messages_byte(in);
    messages m;
    messages_memory = (long)messages_byte(in) - 1;
    if (usual % 4) rank = usual % 4 == 1 ? 1 : 0;
    if (messages_open(&m, rank, size)) {
        while (in->at < in->size) {
            int line = (int)(messages_byte(in) % (unsigned)m.channel->connection_count);
            size_t n;
            switch (messages_byte(in) % 8) {
            case 0:
                n = messages_byte(in) % 64;
                if (n > in->size - in->at) n = in->size - in->at;
                messages_send(&m, line, in->data + in->at, n);
                in->at += n;
                break;
            case 1:
                if (m.far[line] >= 0 && messages_byte(in) % 4 == 0) {
                    close(m.far[line]);
                    m.far[line] = -1;
                }
                break;
            case 2:
            case 3: messages_own(&m, in); break;
            default: messages_send_any(&m, in, line); break;
            }
            if (messages_byte(in) % 2) messages_work(&m);
        }
        messages_work(&m);
    }
    messages_memory = -1;
    messages_close(&m);
}

/* A message of a child or a parent, often with the right proof. Returns 1 if it proves the knowledge of the secret. */
static inline int messages_prove(messages_input *in, const mti_meeting *m, const mti_caller *c, int kind, int rank,
                                 mti_message *head) {
    static const int kinds[] = {MTI_MESSAGE_HELLO, MTI_MESSAGE_CHALLENGE, MTI_MESSAGE_PROOF, MTI_MESSAGE_OPEN};
    unsigned how = messages_byte(in);
    uint64_t random[2] = {messages_byte(in), messages_byte(in)};
    const uint64_t *challenge = kind == MTI_MESSAGE_CHALLENGE ? random : c->challenge;
    uint64_t proof = mti_proof(m->listeners[0].secret, kind, rank, mti_rank_parent(rank), c->hello, challenge);
    *head = messages_head(in, m->size);
    if (how % 8 == 0) return 0;
    head->bytes = 0;
    head->kind = how % 4 ? kind : kinds[how / 16 % 4];
    head->rank = kind == MTI_MESSAGE_CHALLENGE ? mti_rank_parent(rank) : rank;
    if (how % 5) head->rank = rank;
    head->what = random[0];
    head->count = random[1];
    head->recvcount = how % 3 ? proof : proof ^ (uint64_t)1 << messages_byte(in) % 64;
    return how % 3 && head->kind == kind && (kind == MTI_MESSAGE_CHALLENGE || head->rank == rank);
}

/* Sends a message in parts. Returns 1 when all of it was taken. */
static inline int messages_parts(messages_input *in, mti_meeting *m, mti_caller *c, int far, const mti_message *head) {
    for (size_t at = 0, n; at < sizeof *head; at += n) {
        n = 1 + messages_byte(in) % sizeof *head;
        if (n > sizeof *head - at) n = sizeof *head - at;
        if (c->fd < 0) return 0;
        (void)!send(far, (const char *)head + at, n, MSG_NOSIGNAL);
        if (c == &m->up) mti_meeting_rise(m);
        else mti_meeting_hear(m, c);
    }
    return 1;
}

/* Calls a parent: only who proves that it knows the secret, after a hello of the same rank, is admitted. */
static inline void messages_call_parent(messages_input *in, mti_meeting *m) {
    mti_message head;
    mti_caller c;
    int ends[2], line = 1 + (int)(messages_byte(in) % (unsigned)m->children), come = m->come, proves = 0;
    int rank = MTI_CHANNEL_CHILDREN * m->rank + line, free_line = m->down[line].fd < 0;
    MESSAGES_HOLD(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    mti_caller_begin(&c, ends[0], MTI_AWAITS_HELLO, -1);
    messages_prove(in, m, &c, MTI_MESSAGE_HELLO, rank, &head);
    messages_parts(in, m, &c, ends[1], &head);
    MESSAGES_HOLD(m->come == come && (c.fd < 0 || c.stage == MTI_AWAITS_HELLO || c.stage == MTI_AWAITS_PROOF));
    if (c.fd >= 0 && c.stage == MTI_AWAITS_PROOF) {
        int greeted = c.rank;
        proves = messages_prove(in, m, &c, MTI_MESSAGE_PROOF, rank, &head) && greeted == rank;
        if (messages_parts(in, m, &c, ends[1], &head)) MESSAGES_HOLD(m->come == come + (proves && free_line));
    }
    MESSAGES_HOLD(m->come == come || (proves && m->down[line].fd == ends[0] && c.fd < 0));
    for (int i = 0; i < 2 && m->down[line].fd >= 0; i++) {
        head = messages_head(in, m->size);
        (void)!send(ends[1], &head, sizeof head, MSG_NOSIGNAL);
        if (m->come > come) mti_meeting_listen(m, &m->down[line]);
        if (m->down[line].fd < 0) come--;
    }
    mti_caller_close(&c);
    close(ends[1]);
}

/* Calls a child as its parent: it opens only behind a proof. */
static inline void messages_call_child(messages_input *in, mti_meeting *m) {
    mti_message head;
    int ends[2], proves;
    MESSAGES_HOLD(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    mti_caller_begin(&m->up, ends[0], MTI_AWAITS_CHALLENGE, m->rank);
    proves = messages_prove(in, m, &m->up, MTI_MESSAGE_CHALLENGE, m->rank, &head);
    messages_parts(in, m, &m->up, ends[1], &head);
    MESSAGES_HOLD((m->up.fd >= 0 && m->up.stage == MTI_AWAITS_OPENING) == proves);
    if (m->up.fd >= 0) {
        head = messages_head(in, m->size);
        if (messages_byte(in) % 2) memset(&head, 0, sizeof head);
        if (messages_byte(in) % 2) head.kind = MTI_MESSAGE_OPEN;
        messages_parts(in, m, &m->up, ends[1], &head);
    }
    MESSAGES_HOLD(proves || m->up.stage != MTI_OPENED);
    mti_caller_close(&m->up);
    close(ends[1]);
}

static inline void messages_meeting(messages_input *in) {
    mti_listener listeners[MESSAGES_RANKS];
    mti_caller down[MESSAGES_LINES];
    mti_meeting m;
    int come = 0, is_child = (int)messages_byte(in) % 2;
    memset(&m, 0, sizeof m);
    memset(listeners, 0, sizeof listeners);
    listeners[0].secret[0] = listeners[0].secret[1] = 0x1234567890abcdefu;
    m.listeners = listeners;
    m.down = down;
    m.size = messages_size(in);
    m.rank = m.size > 33 || is_child ? (int)messages_byte(in) % 2 : 0;
    if (is_child) m.rank = 1;
    m.children = m.rank ? m.size - 33 : m.size > 33 ? 32 : m.size - 1;
    m.absent = m.up.fd = -1;
    for (int i = 0; i < MESSAGES_LINES; i++) down[i].fd = -1;
    while (in->at < in->size) {
        if (is_child) messages_call_child(in, &m);
        else messages_call_parent(in, &m);
    }
    for (int i = 1; i <= m.children; i++) come += down[i].fd >= 0;
    MESSAGES_HOLD(m.come == come && m.ready <= m.come && m.ready >= 0 && down[0].fd < 0);
    for (int i = 1; i <= m.children; i++) mti_caller_close(&down[i]);
}

static inline void messages_all(const uint8_t *data, size_t size) {
    messages_input in;
    in.data = data;
    in.size = size;
    in.at = 0;
    if (messages_byte(&in) % 4) messages_channel(&in);
    else messages_meeting(&in);
}

#endif /* MT_FUZZ_MESSAGES_H */
