/* messages.h - shared by fuzz_messages.c and test_messages.c: passes arbitrary bytes to the connections over which
   ranks compare their calls, and checks what must hold. It includes the implementation of mt_comm.h with that part,
   and without NCCL. Allocations of the implementation can fail. */

#ifndef MT_FUZZ_MESSAGES_H
#define MT_FUZZ_MESSAGES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The allocation before which so many others succeed fails, once. -1: none fails. */
static long messages_memory = -1;

static inline int messages_no_memory(void) { return messages_memory >= 0 && messages_memory-- == 0; }
static inline void *messages_malloc(size_t bytes) { return messages_no_memory() ? NULL : malloc(bytes); }
static inline void *messages_calloc(size_t n, size_t bytes) { return messages_no_memory() ? NULL : calloc(n, bytes); }
#define malloc messages_malloc
#define calloc messages_calloc
#define MTI_COMPARES 1
#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"
#undef malloc
#undef calloc

#define MESSAGES_HOLD(condition)                                                                                       \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#define MESSAGES_RANKS 9
#define MESSAGES_TOKEN 0x1234567890abcdefu

/* A rank of a group: its channel, and the far ends of its connections. */
typedef struct messages {
    mt_comm *comm;
    mti_channel *channel;
    int far[MESSAGES_RANKS]; /* per line; -1: closed */
    mti_bytes heard[MESSAGES_RANKS];
} messages;

/* Returns 0 when there is no memory. */
static inline int messages_open(messages *m, int rank, int size) {
    memset(m, 0, sizeof *m);
    m->channel = mti_channel_new(rank, size);
    m->comm = mti_comm_new(&mti_threads, rank, size, "test");
    if (m->comm) m->comm->group = mti_group_new(size, 1, 0);
    for (int i = 0; i < MESSAGES_RANKS; i++) m->far[i] = -1;
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
    for (int i = 0; i < MESSAGES_RANKS; i++) {
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
    for (int i = 0; i < b->connection_count; i++) mti_channel_read(b, &b->connections[i], i);
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
    m.kind = (int32_t)messages_byte(in) % 10;
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
    head.rank = m->channel->rank;
    head.bytes = 0;
    head.kind = head.kind % 2 ? MTI_MESSAGE_CALL : MTI_MESSAGE_LATE;
    if (!mti_message_is_valid(&head, m->channel->size) || m->channel->ended) return;
    if (!mti_message_add(&m->channel->queue, &head, NULL))
        mti_channel_end(m->channel, m->channel->rank, MTI_END_MEMORY);
}

/* A channel of rank 0, or of another rank, to which the other ranks send what the input says. */
static inline void messages_channel(messages_input *in) {
    int size = 2 + (int)(messages_byte(in) % (MESSAGES_RANKS - 1)), rank = (int)messages_byte(in) % size;
    messages m;
    messages_memory = (long)messages_byte(in) - 1;
    if (messages_byte(in) % 2) rank = 0;
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
            default: messages_send_message(&m, in, line); break;
            }
            if (messages_byte(in) % 2) messages_work(&m);
        }
        messages_work(&m);
    }
    messages_memory = -1;
    messages_close(&m);
}

/* Says hello to rank 0, or opens a connection for another rank, in parts and with errors as the input says. */
static inline void messages_call(messages_input *in, mti_server *s, const mti_listener *listener) {
    int size = s->channel->size, ends[2], opened = 0, as_rank = (int)messages_byte(in) % 2;
    mti_message head = messages_head(in, size);
    unsigned how = messages_byte(in);
    mti_caller c;
    MESSAGES_HOLD(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    memset(&c, 0, sizeof c);
    c.fd = ends[0];
    if (how % 4) head.bytes = 0;
    if (how % 4) head.kind = as_rank ? MTI_MESSAGE_OPEN : MTI_MESSAGE_HELLO;
    if (how % 3) head.what = MESSAGES_TOKEN;
    for (size_t at = 0, n; at < sizeof head && c.fd >= 0 && !opened; at += n) {
        int before = s->come;
        n = 1 + messages_byte(in) % sizeof head;
        if (n > sizeof head - at) n = sizeof head - at;
        (void)!send(ends[1], (char *)&head + at, n, MSG_NOSIGNAL);
        if (as_rank) opened = mti_listener_called(listener, 1, size, &c);
        else mti_server_hear(s, &c);
        opened |= s->come != before;
        if (opened) MESSAGES_HOLD(at + n == sizeof head && head.what == MESSAGES_TOKEN && head.bytes == 0);
        if (opened) MESSAGES_HOLD(head.kind == (as_rank ? MTI_MESSAGE_OPEN : MTI_MESSAGE_HELLO));
    }
    mti_caller_close(&c);
    close(ends[1]);
}

static inline void messages_server(messages_input *in) {
    mti_listener listener;
    mti_server s;
    int size = 2 + (int)(messages_byte(in) % (MESSAGES_RANKS - 1)), come = 1;
    memset(&listener, 0, sizeof listener);
    listener.token = MESSAGES_TOKEN;
    memset(&s, 0, sizeof s);
    s.channel = mti_channel_new(0, size);
    MESSAGES_HOLD(s.channel);
    s.listener = &listener;
    s.come = 1;
    while (in->at < in->size) messages_call(in, &s, &listener);
    for (int i = 1; i < size; i++) come += s.channel->connections[i].fd >= 0;
    MESSAGES_HOLD(s.channel->connections[0].fd < 0 && s.come == come);
    mti_channel_free(s.channel);
}

static inline void messages_all(const uint8_t *data, size_t size) {
    messages_input in;
    in.data = data;
    in.size = size;
    in.at = 0;
    if (messages_byte(&in) % 4) messages_channel(&in);
    else messages_server(&in);
}

#endif /* MT_FUZZ_MESSAGES_H */
