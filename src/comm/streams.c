/* ---- ranks over a transport of the program: messages in streams of bytes ----------------------------------------- */

#pragma once
#include "transport.h"
#include "links.c"

/* A message in a stream is a head, and then its bytes. A message that no request waits for is kept aside when it is
   small: a header or a notice. Data that no request waits for stay in the stream, until a request comes or their group
   has broken. */
typedef struct mti_stream_head {
    int32_t version; /* MT_VERSION_NUMBER: other versions have other messages */
    int32_t tag;
    uint64_t bytes;
} mti_stream_head;

#define MTI_HEAD sizeof(mti_stream_head)

/* A message that has been kept aside. Its bytes are behind it. */
typedef struct mti_early {
    struct mti_early *next;
    mti_stream_head head;
} mti_early;

/* The two streams with another rank. */
typedef struct mti_stream {
    mti_request *sends;   /* list; the first one is on its way */
    mti_early *early;     /* list, in the order of arrival */
    mti_stream_head head; /* of the message that arrives */
    size_t arrived;       /* bytes of this message, with its head */
    /* where the message goes: to a request, aside, or (drops) nowhere. None: it stays in the stream */
    mti_request *into;
    mti_early *aside;
    int drops;
    mt_status no_send, no_recv; /* why the stream has ended; MT_SUCCESS: it has not */
    int malformed;              /* 1: it has ended because no message of this version has arrived */
} mti_stream;

typedef struct mti_streams {
    const mt_transport *transport;
    void *state;
    mti_request *receives; /* list of those that wait for a message */
    mti_stream *with;      /* [size] */
} mti_streams;

static mti_streams *mti_streams_of(const mti_port *port) { return (mti_streams *)port->ends; }

static void mti_request_append(mti_request **list, mti_request *r) {
    while (*list) list = &(*list)->next;
    r->next = NULL;
    *list = r;
}

static void mti_request_remove(mti_request **list, const mti_request *r) {
    while (*list != r) list = &(*list)->next;
    *list = r->next;
}

/* -- ends of streams -- */

/* The error of a request: the rank and the direction of its stream. */
static int mti_stream_error(int rank, int sends) { return 2 * rank + sends + 1; }

/* The two ranks cannot tell each other that they close their ports, so neither waits for it. */
static void mti_stream_end(mti_port *port, int rank) {
    if (port->status[rank] != MTI_LINK_OPEN) return;
    port->status[rank] = (int)MT_ERR_PEER;
    port->closed++;
}

static void mti_stream_end_send(mti_port *port, int rank, mt_status why) {
    mti_stream *s = &mti_streams_of(port)->with[rank];
    s->no_send = why;
    mti_stream_end(port, rank);
    for (; s->sends; s->sends = s->sends->next) {
        s->sends->error = mti_stream_error(rank, 1);
        s->sends->over = 1;
    }
}

static void mti_stream_end_recv(mti_port *port, int rank, mt_status why) {
    mti_streams *all = mti_streams_of(port);
    mti_stream *s = &all->with[rank];
    mti_request *r, *next;
    s->no_recv = why;
    if (s->into) mti_request_append(&all->receives, s->into);
    s->into = NULL;
    for (r = all->receives; r; r = next) {
        next = r->next;
        if (r->rank != rank) continue;
        mti_request_remove(&all->receives, r);
        r->error = mti_stream_error(rank, 0);
        r->over = 1;
    }
    mti_stream_end(port, rank);
}

static mt_status mti_stream_say(mti_port *port, int error, mti_text *text) {
    int rank = (error - 1) / 2, sends = (error - 1) % 2;
    const mti_stream *s = &mti_streams_of(port)->with[rank];
    mt_status why = sends ? s->no_send : s->no_recv;
    if (!sends && s->malformed) {
        mti_say(text,
                "what the transport \"%s\" received from its rank %d is no message of megatron.h " MT_VERSION
                ": build all ranks with the same headers",
                port->name, rank);
        return MT_ERR_MISMATCH;
    }
    mti_say(text, "the transport \"%s\" could not %s its rank %d: %s (%s)", port->name,
            sends ? "send to" : "receive from", rank, mt_status_name(why), mt_status_string(why));
    return why == MT_ERR_TIMEOUT ? MT_ERR_TIMEOUT : MT_ERR_PEER;
}

/* -- sending -- */

/* Sends what the stream takes. */
static void mti_stream_push(mti_port *port, int rank) {
    mti_streams *all = mti_streams_of(port);
    mti_stream *s = &all->with[rank];
    mti_request *r;
    while ((r = s->sends) != NULL) {
        mti_stream_head head;
        int begins = r->moved < MTI_HEAD;
        size_t left = begins ? MTI_HEAD - r->moved : MTI_HEAD + r->bytes - r->moved, moved = 0;
        const char *data = begins ? (const char *)&head + r->moved : r->data + (r->moved - MTI_HEAD);
        mt_status status = MT_SUCCESS;
        head.version = MT_VERSION_NUMBER;
        head.tag = r->tag;
        head.bytes = r->bytes;
        if (left > 0) status = (all->transport->send)(all->state, rank, data, left, &moved);
        if (status == MT_SUCCESS && moved > left) status = MT_ERR_DATA; /* not what it was given */
        if (status != MT_SUCCESS) {
            mti_stream_end_send(port, rank, status);
            return;
        }
        r->moved += moved;
        if (left > 0 && moved == 0) return;
        if (r->moved < MTI_HEAD + r->bytes) continue;
        s->sends = r->next;
        r->over = 1;
    }
}

static void mti_stream_send(mti_port *port, mti_request *r) {
    mti_stream *s = &mti_streams_of(port)->with[r->rank];
    mti_request_append(&s->sends, r);
    if (s->no_send != MT_SUCCESS) mti_stream_end_send(port, r->rank, s->no_send);
    else mti_stream_push(port, r->rank);
}

/* -- receiving -- */

/* Finds the first request that a message is for, and removes it from the list. */
static mti_request *mti_stream_request(mti_streams *all, int rank, int tag) {
    mti_request *r = all->receives;
    while (r && (r->tag != tag || (r->rank >= 0 && r->rank != rank))) r = r->next;
    if (r) mti_request_remove(&all->receives, r);
    return r;
}

/* Finds the first message with a tag that has been kept aside, and removes it from the list. */
static mti_early *mti_stream_early(mti_stream *s, int tag) {
    mti_early **at = &s->early, *e;
    while (*at && (*at)->head.tag != tag) at = &(*at)->next;
    e = *at;
    if (e) *at = e->next;
    return e;
}

/* Copies a message that was kept aside, and frees it. */
static void mti_early_move(mti_early *e, void *data) {
    memcpy(data, e + 1, (size_t)e->head.bytes);
    free(e);
}

/* Whether nobody will wait for a message: its group has broken, or this rank has destroyed it. */
static int mti_stream_is_lost(const mti_port *port, int tag) {
    const mti_link *m = port->groups;
    while (m && m->number != tag / 4) m = m->next;
    return !m || mti_is_broken(m->comm->group);
}

/* Decides where the message goes whose head has arrived. */
static mt_status mti_stream_route(mti_port *port, int rank) {
    mti_streams *all = mti_streams_of(port);
    mti_stream *s = &all->with[rank];
    size_t bytes = (size_t)s->head.bytes;
    s->malformed = s->head.version != MT_VERSION_NUMBER || s->head.bytes > MTI_LINK_MESSAGE;
    if (s->malformed) return MT_ERR_MISMATCH;
    s->into = mti_stream_request(all, rank, s->head.tag);
    s->malformed = s->into && bytes > s->into->bytes;
    if (s->malformed) return MT_ERR_MISMATCH;
    if (s->into) return MT_SUCCESS;
    if (bytes > sizeof(mti_link_message)) s->drops = mti_stream_is_lost(port, s->head.tag);
    else if ((s->aside = (mti_early *)malloc(sizeof *s->aside + bytes)) == NULL) return MT_ERR_MEMORY;
    return MT_SUCCESS;
}

/* A message that was to be kept aside may have got a request by now. */
static void mti_stream_complete(mti_streams *all, int rank) {
    mti_stream *s = &all->with[rank];
    mti_early **end = &s->early;
    mti_request *r = s->aside ? mti_stream_request(all, rank, s->head.tag) : s->into;
    if (s->aside) s->aside->head = s->head;
    if (s->aside && r) {
        mti_early_move(s->aside, r->data);
    } else if (s->aside) {
        while (*end) end = &(*end)->next;
        s->aside->next = NULL;
        *end = s->aside;
    }
    if (r) r->over = 1;
    s->into = NULL;
    s->aside = NULL;
    s->drops = 0;
    s->arrived = 0;
}

/* Whether the message has a place to go. */
static int mti_stream_has_place(const mti_stream *s) { return s->into || s->aside || s->drops; }

/* Receives some bytes of the message, or of its head. *more: 0 when nothing has arrived */
static mt_status mti_stream_read(mti_streams *all, int rank, int *more) {
    mti_stream *s = &all->with[rank];
    char nowhere[1024], *to = (char *)&s->head + s->arrived;
    size_t left = MTI_HEAD - s->arrived, moved = 0;
    mt_status status;
    if (s->arrived >= MTI_HEAD) {
        size_t got = s->arrived - MTI_HEAD;
        left = (size_t)s->head.bytes - got;
        to = s->drops ? nowhere : (s->into ? s->into->data : (char *)(s->aside + 1)) + got;
        if (s->drops && left > sizeof nowhere) left = sizeof nowhere;
    }
    status = (all->transport->recv)(all->state, rank, to, left, &moved);
    if (status == MT_SUCCESS && moved > left) status = MT_ERR_DATA; /* the transport has written where it may not */
    s->arrived += status == MT_SUCCESS ? moved : 0;
    *more = moved > 0;
    return status;
}

/* Receives what has arrived. */
static void mti_stream_pull(mti_port *port, int rank) {
    mti_streams *all = mti_streams_of(port);
    mti_stream *s = &all->with[rank];
    mt_status status = MT_SUCCESS;
    int more = 1;
    while (more && status == MT_SUCCESS) {
        if (s->arrived < MTI_HEAD) status = mti_stream_read(all, rank, &more);
        if (status != MT_SUCCESS || s->arrived < MTI_HEAD) continue;
        if (!mti_stream_has_place(s)) status = mti_stream_route(port, rank);
        if (status == MT_SUCCESS && !mti_stream_has_place(s)) return;
        if (status == MT_SUCCESS && s->arrived < MTI_HEAD + s->head.bytes) status = mti_stream_read(all, rank, &more);
        if (status == MT_SUCCESS && s->arrived == MTI_HEAD + s->head.bytes) mti_stream_complete(all, rank);
    }
    if (status != MT_SUCCESS) mti_stream_end_recv(port, rank, status);
}

/* Gives a request a message that was kept aside. Returns 0 when there is none. */
static int mti_stream_receive_early(mti_port *port, int rank, mti_request *r) {
    mti_stream *s = &mti_streams_of(port)->with[rank];
    mti_early *e = mti_stream_early(s, r->tag);
    if (!e) return 0;
    s->malformed = e->head.bytes > r->bytes;
    if (s->malformed) {
        free(e);
        mti_stream_end_recv(port, rank, MT_ERR_MISMATCH);
        return 0;
    }
    mti_early_move(e, r->data);
    return r->over = 1;
}

static void mti_stream_receive(mti_port *port, mti_request *r) {
    mti_streams *all = mti_streams_of(port);
    int first = r->rank < 0 ? 0 : r->rank, end = r->rank < 0 ? port->size : r->rank + 1, rank;
    for (rank = first; rank < end; rank++)
        if (mti_stream_receive_early(port, rank, r)) return;
    mti_request_append(&all->receives, r);
    if (r->rank >= 0 && all->with[r->rank].no_recv != MT_SUCCESS)
        mti_stream_end_recv(port, r->rank, all->with[r->rank].no_recv);
}

/* -- the wire -- */

/* Goes on with all streams. */
static int mti_stream_test(mti_port *port, mti_request *requests, int count, int *done) {
    int rank, i, found = 0;
    for (rank = 0; rank < port->size; rank++) {
        if (rank == port->rank) continue;
        mti_stream_push(port, rank);
        if (mti_streams_of(port)->with[rank].no_recv == MT_SUCCESS) mti_stream_pull(port, rank);
    }
    for (i = 0; i < count; i++) {
        if (!requests[i].active || !requests[i].over) continue;
        requests[i].active = 0;
        done[found++] = i;
    }
    return found;
}

/* A send that is on its way ends the stream, because its other end waits for the rest of the message. */
static void mti_stream_cancel(mti_port *port, mti_request *r) {
    mti_streams *all = mti_streams_of(port);
    mti_stream *s = &all->with[r->rank];
    if (r->over) return;
    if (r->sends && r->moved > 0) mti_stream_end_send(port, r->rank, MT_ERR_PEER);
    else if (r->sends) mti_request_remove(&s->sends, r);
    else if (s->into == r) s->into = NULL, s->drops = 1;
    else mti_request_remove(&all->receives, r);
    r->over = 1;
}

static int mti_stream_take(mti_port *port, int rank, int tag, void *data, size_t bytes) {
    mti_request r;
    memset(&r, 0, sizeof r);
    r.tag = tag;
    r.data = (char *)data;
    r.bytes = bytes;
    return mti_stream_receive_early(port, rank, &r);
}

static void mti_streams_free(mti_streams *all, int size) {
    int rank;
    for (rank = 0; all && all->with && rank < size; rank++) {
        mti_early *e = all->with[rank].early, *next;
        free(all->with[rank].aside);
        for (; e; e = next) {
            next = e->next;
            free(e);
        }
    }
    if (all) free(all->with);
    free(all);
}

static void mti_streams_end(mti_port *port, int closed) {
    (void)closed;
    mti_streams_free(mti_streams_of(port), port->size);
    while (port->ended) {
        mti_link *m = port->ended;
        port->ended = m->next;
        mti_link_free(m);
    }
    mti_port_free(port);
}

static const mti_wire mti_stream_wire = {mti_stream_send, mti_stream_receive, mti_stream_test, mti_stream_cancel,
                                         mti_stream_take, mti_stream_say,     mti_streams_end};

/* -- creating -- */

/* Creates the port and its wire; NULL: out of memory. */
static mti_port *mti_stream_port(const mt_transport *transport, void *state, int ranks, int rank, double timeout_s) {
    mti_port *port = mti_port_new(&mti_stream_wire, transport->name, rank, ranks, timeout_s);
    mti_streams *all = (mti_streams *)calloc(1, sizeof *all);
    if (all) all->with = (mti_stream *)calloc((size_t)ranks, sizeof *all->with);
    if (!port || !all || !all->with) {
        mti_streams_free(all, ranks);
        if (port) mti_port_free(port);
        return NULL;
    }
    all->transport = transport;
    all->state = state;
    port->ends = all;
    port->last_tag = INT32_MAX;
    port->local_rank = rank;
    return port;
}

/* The first meeting: all ranks compare their numbers of ranks. */
static mt_status mti_stream_meet(mt_comm *world) {
    mti_call call;
    mti_text text;
    int r, other = 0;
    memset(&call, 0, sizeof call);
    call.kind = MTI_CREATE;
    call.color = world->size;
    MT_TRY(mti_link_enter(NULL, world, &call));
    for (r = 0; r < world->size; r++)
        if (mti_slot_of(world->group, r)->color != world->size) other = r;
    text.used = 0;
    mti_say_mine(&text, world);
    mti_say(&text, "rank %d was created with %d ranks", other, mti_slot_of(world->group, other)->color);
    if (mti_slot_of(world->group, other)->color != world->size)
        return mti_link_fail(NULL, world, MT_ERR_MISMATCH, &text);
    mti_link_exit(world);
    for (r = 0; r < world->size; r++) mti_slot_of(world->group, r)->what = 0; /* no message names this call */
    return MT_SUCCESS;
}

/* Creates a communicator of two ranks or more. */
static mt_status mti_stream_create(const mt_transport *transport, void *state, int ranks, int rank, double timeout_s,
                                   mt_comm **out) {
    mti_port *port = mti_stream_port(transport, state, ranks, rank, timeout_s);
    mt_comm *world = port ? mti_link_comm_new(&mti_linked, port, rank, ranks, "world", port->next++) : NULL;
    mt_status status;
    int r;
    if (!world && port) mti_streams_end(port, 0);
    if (!world) return MT_ERR_MEMORY;
    for (r = 0; r < ranks; r++) world->link->world[r] = r;
    mti_link_open_inbox(port);
    status = mti_stream_meet(world);
    if (status == MT_SUCCESS) *out = world;
    else fprintf(stderr, "mt_comm_create_transport: %s\n", world->error);
    if (status != MT_SUCCESS) mt_comm_destroy(world);
    return status;
}

MT_API mt_status mt_comm_create_transport(const mt_transport *transport, void *state, int ranks, int rank,
                                          double timeout_s, mt_comm **out) {
    int before;
    mt_status status;
    if (out) *out = NULL;
    if (!out || !transport || !transport->name || !transport->send || !transport->recv || timeout_s != timeout_s)
        return MT_ERR_ARGUMENT;
    if (ranks < 1 || ranks > MTI_MAX_RANKS || rank < 0 || rank >= ranks) return MT_ERR_ARGUMENT;
    if (ranks == 1) return (*out = mti_comm_new(&mti_alone, 0, 1, "world")) != NULL ? MT_SUCCESS : MT_ERR_MEMORY;
    before = mti_hold();
    status = mti_stream_create(transport, state, ranks, rank, timeout_s, out);
    mti_release(before);
    return status;
}
