/* ---- ranks that exchange messages: over MPI, or a transport of the program --------------------------------------- */

#pragma once
#include "thread_calls.c"

/* A port connects this rank with the others. A world and all groups split from it share one port: a group is a list of
   ranks, and a number that is part of its tags. So creating, splitting and leaving a group needs only messages.

   A collective: each rank sends every other rank a header that describes its call in the form of a slot, followed by up
   to MTI_LINK_SMALL bytes of data. Then it waits for the headers of all other ranks, and compares the calls. So each
   rank fills its own copy of the slots that threads share (threads.c), and writes the same error messages. Larger data
   follow when all headers have arrived. A large reduction divides the buffer into one piece per rank: each rank
   receives its piece from all other ranks, reduces it in the tree of threads.c, and for an all_reduce sends the result
   to all ranks. Point to point: both ranks send a header, then the data follow.

   Notices are messages between ports that say at any time that a group has broken or a rank has left. No wait for a
   rank blocks: requests are tested until they are done, the timeout has expired, or a notice says that they will never
   be done. What sends and receives the messages is the wire of the port: MPI (mpi.c), or the streams of bytes that a
   transport of the program moves (streams.c). */

/* Bytes of data behind a header: the message is smaller than 4 KiB, which MPI libraries send eagerly. */
#define MTI_LINK_SMALL ((size_t)3968)
#define MTI_LINK_SCRATCH ((size_t)4 << 20)  /* bytes per group for received pieces; only used pages take memory */
#define MTI_LINK_MESSAGE ((size_t)16 << 20) /* most bytes of one message: MPI counts bytes in an int */
#define MTI_LINK_SOON 1e-3    /* seconds for which a wait polls without sleeping; it yields where ranks share cores */
#define MTI_LINK_LISTEN 50e-6 /* seconds for which a wait polls only the requests of its call, and no notices */
#define MTI_LINK_GRACE 2.0    /* seconds to wait for other ranks to close their ports when a group has broken */

/* The kinds of messages: the low two bits of a tag. The bits above are the number of the group. Tag 0 is for
   notices. */
#define MTI_LINK_MEET 0  /* header of a collective */
#define MTI_LINK_OFFER 1 /* header from a sender to its receiver */
#define MTI_LINK_ASK 2   /* header from a receiver to its sender */
#define MTI_LINK_DATA 3

#define MTI_LINK_OPEN 1 /* mti_port.status of a rank that has not closed its port; errors are negative */

typedef struct mti_link_message {
    uint64_t what, count, recvcount; /* as in a slot */
    int color, key;
    int next; /* the lowest group number that the sender has not used yet */
    unsigned char apart[28];
    unsigned char data[MTI_LINK_SMALL];
} mti_link_message;

#define MTI_LINK_HEADER offsetof(mti_link_message, data)

/* The news of a notice: a group has broken; a rank has left a group, or, with mti_link_notice.everywhere, all its
   groups; a rank closes its port. */
typedef enum mti_link_news { MTI_LINK_BROKEN, MTI_LINK_LEFT, MTI_LINK_CLOSES } mti_link_news;

typedef struct mti_link_notice {
    int news, group, rank, status; /* rank: in the group; in the port for `everywhere` and MTI_LINK_CLOSES */
    int everywhere;
    int keeps, broken; /* MTI_LINK_CLOSES: these fields of the sender's port */
    char text[MT_ERROR_BYTES + 64];
} mti_link_notice;

/* A message that is sent or received. */
typedef struct mti_request {
    int active; /* 1: not done; a test makes it 0 */
    int error;  /* of the wire, see mti_wire.say; 0: none */
    int rank;   /* in the port; -1: receives from any rank */
    int tag;
    char *data;
    size_t bytes; /* of the message that is sent; at most these are received */
#if MTI_MPI
    MPI_Request mpi;
#endif
    struct mti_request *next; /* the fields below are for streams.c */
    size_t moved;
    int sends, over;
} mti_request;

struct mti_port;

/* Messages from one rank to another with the same tag stay in order. The wire uses the memory of a request, and of its
   data, until the request is done.
   send, receive  begin a request, whose rank, tag, data and bytes are set
   test           finds requests that are done: writes their indices, and returns how many there are
   cancel         ends a request early. Over MPI only a receive that has not begun; the others stay active
   take           receives a message that has arrived and that no request waits for; returns 0 if there is none
   say            writes what an error means, and returns the status for it
   end            frees what is behind the port, and the port. closed: of mti_link_close */
typedef struct mti_wire {
    void (*send)(struct mti_port *port, mti_request *r);
    void (*receive)(struct mti_port *port, mti_request *r);
    int (*test)(struct mti_port *port, mti_request *requests, int count, int *done);
    void (*cancel)(struct mti_port *port, mti_request *r);
    int (*take)(struct mti_port *port, int rank, int tag, void *data, size_t bytes);
    mt_status (*say)(struct mti_port *port, int error, mti_text *text);
    void (*end)(struct mti_port *port, int closed);
} mti_wire;

typedef struct mti_port {
    const mti_wire *wire;
    const char *name; /* of the transport */
    void *ends;       /* what the wire needs */
    int rank, size, last_tag, next, spin, local_rank;
    int references;         /* number of groups */
    int keeps;              /* 1: on some rank, the wire still holds requests of a call that was given up */
    int broken;             /* 1: on some rank, a group has broken: there may be messages that no rank has received */
    int closed;             /* number of ranks that have closed their ports, this rank included */
    int *status;            /* [size] the status with which each rank has closed its port, or MTI_LINK_OPEN */
    double timeout, waited; /* waited: seconds that mti_link_close has waited for the other ranks */
    /* groups: list of the groups in use; ended: list of destroyed groups whose memory the wire may still use, for
       instance for their last notices */
    struct mti_link *groups, *ended;
    const char **left;        /* [size] why a rank has left all its groups; NULL: it has not left */
    mti_link_notice *reasons; /* [size] the notices whose text `left` points to */
    mti_link_notice *early;   /* notices on a new group whose split this rank has not finished */
    int early_count;
    mti_link_notice inbox, closing;
    mti_request inbox_request, *closing_requests;
    int *indices; /* [2 * size] scratch memory of tests */
} mti_port;

/* What a request is for. */
typedef struct mti_link_about {
    int peer;
    mti_link_message *header; /* the header to receive; NULL: the request receives data, or sends */
    int inside;               /* the peer's mti_slot.inside after the header has arrived */
} mti_link_about;

typedef struct mti_link {
    mti_port *port;
    mt_comm *comm;
    struct mti_link *next;
    int size, number;
    int count, active, error; /* requests of the current call: their number, how many are not done, an error */
    mti_stopwatch watch;      /* measures the time without progress */
    int *world;               /* [size] the rank of each rank in the port */
    mti_request *requests;
    uint64_t *counts; /* [4 * size] of an all_to_all_v: for each rank those of this one, then those of each rank */
    mti_link_about *about;
    mti_link_message *in, *out; /* in: [size] the header received from each rank; out: this rank's header */
    /* asked: the header of the receiver of this rank's message; other: a header of another kind than this rank waits
       for, see mti_link_look_around */
    mti_link_message *asked, *other;
    char *scratch;
    mti_link_notice *reasons;   /* [size] why each rank has left */
    mti_link_notice notices[2]; /* of this rank, by mti_link_news */
    mti_request *notice_requests;
} mti_link;

/* -- requests -- */

static void mti_request_begin(mti_port *port, mti_request *r, int sends, int rank, int tag, void *data, size_t bytes) {
    memset(r, 0, sizeof *r);
    r->active = 1;
    r->sends = sends;
    r->rank = rank;
    r->tag = tag;
    r->data = (char *)data;
    r->bytes = bytes;
    (sends ? port->wire->send : port->wire->receive)(port, r);
}

static int mti_link_tag(const mti_link *m, int kind) { return 4 * m->number + kind; }

/* Begins request `at` of the current call. header: the header to receive; NULL: data */
static void mti_link_post(mt_comm *comm, int at, int sends, int peer, int kind, void *data, size_t bytes,
                          mti_link_message *header) {
    mti_link *m = comm->link;
    m->about[at].peer = peer;
    m->about[at].header = header;
    m->about[at].inside = kind == MTI_LINK_MEET ? MTI_IN_COLLECTIVE : MTI_IN_P2P;
    if (m->count <= at) m->count = at + 1;
    m->active++;
    mti_request_begin(m->port, &m->requests[at], sends, m->world[peer], mti_link_tag(m, kind), data, bytes);
}

static void mti_link_send(mt_comm *comm, int at, const void *data, size_t bytes, int peer, int kind) {
    mti_link_post(comm, at, 1, peer, kind, mt_tensor_make(data, MT_U8, 0, 0).data, bytes, NULL);
}

static void mti_link_receive(mt_comm *comm, int at, void *data, size_t bytes, int peer) {
    mti_link_post(comm, at, 0, peer, MTI_LINK_DATA, data, bytes, NULL);
}

/* Starts to receive a peer's header. */
static void mti_link_expect(mt_comm *comm, int at, mti_link_message *header, int peer, int kind) {
    mti_link_post(comm, at, 0, peer, kind, header, sizeof *header, header);
}

static int mti_link_is_done(const mt_comm *comm, int at) { return !comm->link->requests[at].active; }

/* Writes a received header to the slot of its sender. */
static void mti_link_arrived(mt_comm *comm, const mti_link_message *header, int peer, int inside) {
    mti_slot *slot = mti_slot_of(comm->group, peer);
    slot->what = header->what;
    slot->count = header->count;
    slot->recvcount = header->recvcount;
    slot->color = header->color;
    slot->key = header->key;
    slot->send = header->data;
    slot->inside = inside;
}

/* Returns 1 when a request has completed since the last test, or when no request is active. */
static int mti_link_test(mt_comm *comm) {
    mti_link *m = comm->link;
    int *done = m->port->indices, count, i;
    if (m->active == 0) return 1;
    count = (m->port->wire->test)(m->port, m->requests, m->count, done);
    for (i = 0; i < count; i++) {
        const mti_link_about *about = &m->about[done[i]];
        if (m->requests[done[i]].error) m->error = m->requests[done[i]].error;
        else if (about->header) mti_link_arrived(comm, about->header, about->peer, about->inside);
    }
    m->active -= count;
    return count > 0;
}

/* -- notices -- */

/* Marks a rank of a group as left. */
static void mti_link_take_left(mti_link *m, int rank, const char *reason) {
    mti_slot *slot = mti_slot_of(m->comm->group, rank);
    if (slot->left) return;
    slot->left = reason;
    m->comm->group->left_count++;
}

/* Returns the rank in the group of rank `world` of the port; -1: not a member. */
static int mti_link_member(const mti_link *m, int world) {
    int r = 0;
    while (r < m->comm->size && m->world[r] != world) r++;
    return r < m->comm->size ? r : -1;
}

/* Marks a rank of the port as left in all its groups. */
static void mti_link_take_everywhere(mti_port *port, const mti_link_notice *notice) {
    mti_link *m;
    if (port->left[notice->rank]) return;
    port->reasons[notice->rank] = *notice;
    port->left[notice->rank] = port->reasons[notice->rank].text;
    for (m = port->groups; m; m = m->next)
        if (mti_link_member(m, notice->rank) >= 0)
            mti_link_take_left(m, mti_link_member(m, notice->rank), port->left[notice->rank]);
}

static void mti_link_take_broken(mti_link *m, const mti_link_notice *notice) {
    mti_text text;
    text.used = 0;
    mti_say(&text, "%s", notice->text);
    mti_break(m->comm->group, (mt_status)notice->status, &text, MTI_ANY);
    m->port->broken = 1;
}

/* Keeps a notice on a new group whose split this rank has not finished. Drops a notice on a group that this rank has
   destroyed. */
static void mti_link_take_early(mti_port *port, const mti_link_notice *notice) {
    if (notice->group >= port->next && port->early_count < 2 * port->size) port->early[port->early_count++] = *notice;
}

/* Handles one notice. */
static void mti_link_take_notice(mti_port *port, const mti_link_notice *notice) {
    mti_link *m = port->groups;
    while (m && m->number != notice->group) m = m->next;
    if (notice->news == MTI_LINK_CLOSES) {
        port->closed += port->status[notice->rank] == MTI_LINK_OPEN;
        port->status[notice->rank] = notice->status;
        port->keeps |= notice->keeps;
        port->broken |= notice->broken;
    } else if (notice->everywhere) {
        mti_link_take_everywhere(port, notice);
    } else if (!m) {
        mti_link_take_early(port, notice);
    } else if (notice->news == MTI_LINK_BROKEN) {
        mti_link_take_broken(m, notice);
    } else if (!mti_slot_of(m->comm->group, notice->rank)->left) {
        m->reasons[notice->rank] = *notice;
        mti_link_take_left(m, notice->rank, m->reasons[notice->rank].text);
    }
}

static void mti_link_open_inbox(mti_port *port) {
    mti_request_begin(port, &port->inbox_request, 0, -1, 0, &port->inbox, sizeof port->inbox);
}

/* Receives and handles all notices that have arrived. */
static void mti_link_listen(mti_port *port) {
    int at;
    while (port->inbox_request.active && (port->wire->test)(port, &port->inbox_request, 1, &at) > 0) {
        if (port->inbox_request.error) return;
        mti_link_take_notice(port, &port->inbox);
        mti_link_open_inbox(port);
    }
}

/* Sends a notice to all other ranks of the group. Each kind of news is sent at most once, because the wire keeps using
   the notice's memory. */
static void mti_link_notify(mt_comm *comm, mti_link_news news, mt_status status, const char *text, int everywhere) {
    mti_link *m = comm->link;
    mti_link_notice *notice = &m->notices[news];
    int r;
    notice->news = (int)news;
    notice->group = m->number;
    notice->rank = everywhere ? m->port->rank : comm->rank;
    notice->status = (int)status;
    notice->everywhere = everywhere;
    snprintf(notice->text, sizeof notice->text, "%s", text);
    for (r = 0; r < comm->size; r++)
        if (r != comm->rank)
            mti_request_begin(m->port, &m->notice_requests[(int)news * comm->size + r], 1, m->world[r], 0, notice,
                              sizeof *notice);
}

static void mti_link_leave(mt_comm *comm, const char *reason) {
    if (!mti_mark_left(comm, reason)) return;
    mti_link_notify(comm, MTI_LINK_LEFT, MT_SUCCESS, reason, comm->owner && comm->owner->world == comm);
}

/* -- failing -- */

/* Cancels the requests of the current call. Those that stay active stay with the wire, with their memory: see
   mti_port.keeps. */
static void mti_link_abandon(mt_comm *comm) {
    mti_link *m = comm->link;
    int i;
    for (i = 0; i < m->count; i++) {
        m->about[i].header = NULL; /* mti_link_test must not read a header that was cancelled */
        if (m->requests[i].active) (m->port->wire->cancel)(m->port, &m->requests[i]);
    }
    while (m->active > 0 && mti_link_test(comm)) continue;
    if (m->active > 0) m->port->keeps = 1;
}

/* Ends a call with an error, and breaks the group with this message. If the group has broken before, the earlier status
   and message stay. */
static mt_status mti_link_fail(mt_context *ctx, mt_comm *comm, mt_status status, const mti_text *text) {
    if (!mti_is_broken(comm->group)) {
        mti_break(comm->group, status, text, MTI_ANY);
        mti_link_notify(comm, MTI_LINK_BROKEN, status, comm->group->text, 0);
    }
    comm->link->port->broken = 1;
    mti_link_abandon(comm);
    mti_set_inside(comm, MTI_OUTSIDE);
    return mti_broken_now(ctx, comm);
}

/* Returns the next request after `after` that waits for a header; -1: none. */
static int mti_link_missing(const mt_comm *comm, int after) {
    int i;
    for (i = after + 1; i < comm->link->count; i++)
        if (!mti_link_is_done(comm, i) && comm->link->about[i].header) return i;
    return -1;
}

/* Returns a rank that has left and whose header is still missing; -1: none. */
static int mti_link_gone(const mt_comm *comm) {
    int i = -1;
    if (comm->group->left_count == 0) return -1;
    while ((i = mti_link_missing(comm, i)) >= 0)
        if (mti_slot_of(comm->group, comm->link->about[i].peer)->left) return comm->link->about[i].peer;
    return -1;
}

/* Finds out what the missing ranks have called instead: receives headers of another kind than this rank waits for. */
static void mti_link_look_around(mt_comm *comm) {
    mti_link *m = comm->link;
    int r, kind;
    for (r = 0; r < comm->size; r++) {
        for (kind = MTI_LINK_MEET; kind < MTI_LINK_DATA && r != comm->rank; kind++) {
            if (mti_slot_of(comm->group, r)->inside) continue;
            if ((m->port->wire->take)(m->port, m->world[r], mti_link_tag(m, kind), m->other, sizeof *m->other))
                mti_link_arrived(comm, m->other, r, kind == MTI_LINK_MEET ? MTI_IN_COLLECTIVE : MTI_IN_P2P);
        }
    }
}

/* Writes the ranks whose data have not arrived, or that have not received this rank's data. */
static void mti_link_say_stuck(mti_text *text, const mt_comm *comm) {
    const mti_group *g = comm->group;
    int i, r, said = 0;
    mti_say_mine(text, comm);
    mti_say(text, "waited %.2f s in the middle of it for", g->timeout);
    for (r = 0; r < comm->size && said < 8; r++) {
        for (i = 0; i < comm->link->count && (mti_link_is_done(comm, i) || comm->link->about[i].peer != r); i++)
            continue;
        if (i < comm->link->count) mti_say(text, said++ ? ", %d" : " rank %d", r);
    }
}

/* Ends a call that cannot complete: the group has broken, rank `gone` has left (-1: none), or the timeout is over. */
static mt_status mti_link_give_up(mt_context *ctx, mt_comm *comm, int gone) {
    int collective = mti_slot_of(comm->group, comm->rank)->inside == MTI_IN_COLLECTIVE, header;
    mti_text text;
    text.used = 0;
    text.data[0] = '\0';
    if (mti_is_broken(comm->group)) return mti_link_fail(ctx, comm, comm->group->why_broken, &text);
    if (gone >= 0) {
        mti_say_left(&text, comm, gone);
        return mti_link_fail(ctx, comm, MT_ERR_PEER, &text);
    }
    header = mti_link_missing(comm, -1);
    if (header >= 0) mti_link_look_around(comm);
    if (header >= 0) mti_say_timeout(&text, comm, collective ? -1 : comm->link->about[header].peer);
    else mti_link_say_stuck(&text, comm);
    return mti_link_fail(ctx, comm, MT_ERR_TIMEOUT, &text);
}

/* Ends a call that has failed with an error of the wire. A notice may say why. */
static mt_status mti_link_error(mt_context *ctx, mt_comm *comm) {
    mti_text text;
    mt_status status;
    mti_link_listen(comm->link->port);
    if (mti_is_broken(comm->group) || mti_link_gone(comm) >= 0) return mti_link_give_up(ctx, comm, mti_link_gone(comm));
    text.used = 0;
    mti_say_mine(&text, comm);
    mti_say(&text, "rank %d: ", comm->rank);
    status = (comm->link->port->wire->say)(comm->link->port, comm->link->error, &text);
    return mti_link_fail(ctx, comm, status, &text);
}

/* -- waiting -- */

static void mti_link_begin(mt_comm *comm) {
    comm->link->count = 0;
    comm->link->watch = mti_stopwatch_start(comm->group->timeout);
}

/* Returns MT_SUCCESS when a request has completed, or after a short pause, and an error when the call cannot complete.
   A notice that a rank has left or broken the group may overtake earlier messages of that rank. So the requests are
   tested once more before the call is given up. */
static mt_status mti_link_step(mt_context *ctx, mt_comm *comm) {
    mti_link *m = comm->link;
    int came = mti_link_test(comm), gone, late;
    double waited;
    if (m->error) return mti_link_error(ctx, comm);
    if (came) return MT_SUCCESS;
    waited = mti_waited(&m->watch);
    if (waited > MTI_LINK_LISTEN) mti_link_listen(m->port);
    gone = mti_link_gone(comm);
    late = waited > comm->group->timeout;
    if (late || gone >= 0 || mti_is_broken(comm->group)) {
        if (mti_link_test(comm)) return MT_SUCCESS;
        return mti_link_give_up(ctx, comm, gone);
    }
    if (!m->port->spin || waited > MTI_LINK_SOON) mti_rest(waited, MTI_LINK_SOON);
    return MT_SUCCESS;
}

static mt_status mti_link_wait(mt_context *ctx, mt_comm *comm) {
    while (comm->link->active > 0) MT_TRY(mti_link_step(ctx, comm));
    return comm->link->error ? mti_link_error(ctx, comm) : MT_SUCCESS;
}

/* -- collectives -- */

/* Returns how many bytes one rank contributes to the call; the same on all ranks. At most MTI_LINK_SMALL bytes travel
   with the header. The data of an all_to_all_v, of which each rank has its own number of bytes, follow its counts. */
static size_t mti_link_bytes(const mt_comm *comm, const mti_call *call) {
    if (call->kind == MT_ALL_TO_ALL_V) return SIZE_MAX;
    if (call->kind == MT_BROADCAST || call->kind == MT_ALL_GATHER) return call->count * mt_dtype_size(call->dtype);
    return mti_send_elements(comm, call) * mt_dtype_size(call->dtype);
}

/* Returns 1 when this rank has data that other ranks read. */
static int mti_link_has_data(const mt_comm *comm, const mti_call *call) {
    if (call->kind == MT_BROADCAST) return call->root == comm->rank;
    return call->kind != MT_ALL_GATHER || mti_has_block(call, comm->rank);
}

/* Writes this rank's header, and up to MTI_LINK_SMALL bytes of data behind it. Returns the size of the message. */
static size_t mti_link_write(mt_comm *comm, const mti_call *call, size_t bytes) {
    mti_link_message *out = comm->link->out;
    const mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    out->what = slot->what;
    out->count = slot->count;
    out->recvcount = slot->recvcount;
    out->color = slot->color;
    out->key = slot->key;
    out->next = comm->link->port->next;
    if (bytes > MTI_LINK_SMALL) bytes = 0;
    mti_copy(out->data, call->send, bytes);
    return MTI_LINK_HEADER + bytes;
}

/* The first meeting, as mti_enter. Afterwards mti_slot.send of each other rank points to the data that came with the
   rank's header. */
static mt_status mti_link_enter(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_link *m = comm->link;
    size_t bytes;
    int i;
    mt_status status;
    mti_link_listen(m->port);
    if (mti_is_broken(comm->group)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_COLLECTIVE);
    bytes = mti_link_write(comm, call, mti_link_has_data(comm, call) ? mti_link_bytes(comm, call) : 0);
    mti_link_begin(comm);
    for (i = 1; i < comm->size; i++) {
        int peer = (comm->rank + i) % comm->size;
        mti_link_expect(comm, 2 * i - 2, &m->in[peer], peer, MTI_LINK_MEET);
        mti_link_send(comm, 2 * i - 1, m->out, bytes, peer, MTI_LINK_MEET);
    }
    MT_TRY(mti_link_wait(ctx, comm));
    mti_link_listen(m->port); /* a rank may have sent its header and then given up */
    status = mti_is_broken(comm->group) ? mti_broken_before(ctx, comm, call) : mti_compare(ctx, comm);
    if (status != MT_SUCCESS) mti_set_inside(comm, MTI_OUTSIDE);
    return status;
}

static void mti_link_exit(mt_comm *comm) {
    int r;
    for (r = 0; r < comm->size; r++) mti_slot_of(comm->group, r)->inside = MTI_OUTSIDE;
}

/* Exchanges pieces between all ranks. With `out`: sends piece r to rank r, and stores every rank's copy of this rank's
   piece in `out`, n elements apart. Without `out`: sends this rank's result to all ranks, and stores their results in
   p->to. */
static mt_status mti_link_exchange(mt_context *ctx, mt_comm *comm, const mti_pieces *p, char *out) {
    size_t mine = mti_piece_size(p, comm->rank), apart = (out ? p->n : p->stride) * p->element;
    int i;
    mti_link_begin(comm);
    for (i = 1; i < comm->size; i++) {
        int peer = (comm->rank + i) % comm->size, from = (comm->rank + comm->size - i) % comm->size;
        size_t send = out ? mti_piece_size(p, peer) : mine, recv = out ? mine : mti_piece_size(p, from);
        const char *data = out ? p->from + p->stride * p->element * (size_t)peer : p->own;
        mti_link_receive(comm, 2 * i - 2, (out ? out : p->to) + apart * (size_t)from, recv * p->element, from);
        mti_link_send(comm, 2 * i - 1, data, send * p->element, peer, MTI_LINK_DATA);
    }
    return mti_link_wait(ctx, comm);
}

/* Reduces in chunks: gathers every rank's copy of this rank's piece in `scratch`, reduces the copies in the tree of
   threads.c, and sends the result to all ranks if p.to is set. */
static mt_status mti_link_reduce(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t most = mti_pieces_most(comm, call, MTI_LINK_SCRATCH), done = 0;
    mti_call own = *call;
    mti_pieces p;
    int r;
    while (done < call->count) {
        done += mti_pieces_next(comm, call, most, done, &p);
        MT_TRY(mti_link_exchange(ctx, comm, &p, comm->link->scratch));
        for (r = 0; r < comm->size; r++)
            mti_slot_of(comm->group, r)->send = comm->link->scratch + p.n * p.element * (size_t)r;
        mti_slot_of(comm->group, comm->rank)->send = p.from + p.stride * p.element * (size_t)comm->rank;
        own.recv = p.own;
        mti_reduce_range(comm, &own, 0, mti_piece_size(&p, comm->rank), 0);
        if (p.to) MT_TRY(mti_link_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* Tells each rank how many elements this one sends it and receives from it, and compares what the ranks tell. */
static mt_status mti_link_compare_counts(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    uint64_t *mine = comm->link->counts, *theirs = mine + 2 * comm->size;
    mti_text text;
    int i;
    mti_link_begin(comm);
    for (i = 1; i < comm->size; i++) {
        int peer = (comm->rank + i) % comm->size;
        mine[2 * peer] = call->sends[peer];
        mine[2 * peer + 1] = call->recvs[peer];
        mti_link_receive(comm, 2 * i - 2, &theirs[2 * peer], 2 * sizeof *theirs, peer);
        mti_link_send(comm, 2 * i - 1, &mine[2 * peer], 2 * sizeof *mine, peer, MTI_LINK_DATA);
    }
    MT_TRY(mti_link_wait(ctx, comm));
    for (i = 0; i < comm->size; i++) {
        size_t sent = (size_t)theirs[2 * i], received = (size_t)theirs[2 * i + 1];
        if (i == comm->rank || (sent == call->recvs[i] && received == call->sends[i])) continue;
        if (sent != call->recvs[i]) mti_say_counts(&text, comm, i, sent, comm->rank, call->recvs[i]);
        else mti_say_counts(&text, comm, comm->rank, call->sends[i], i, received);
        return mti_link_fail(ctx, comm, MT_ERR_MISMATCH, &text);
    }
    return MT_SUCCESS;
}

/* The elements of a block that are in the chunk after `done` of them. */
static size_t mti_link_chunk(size_t block, size_t done, size_t most) {
    size_t left = block > done ? block - done : 0;
    return left < most ? left : most;
}

/* Sends each rank its block, and receives one from each rank, in chunks of at most MTI_LINK_MESSAGE bytes. */
static mt_status mti_link_all_to_all(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype), most = MTI_LINK_MESSAGE / element, largest = 1, done;
    int i;
    for (done = 0; done < largest; done += most) {
        mti_link_begin(comm);
        for (i = 0; i < comm->size; i++) {
            int peer = (comm->rank + i) % comm->size;
            size_t sends = mti_count_at(call->sends, call->count, peer);
            size_t recvs = mti_count_at(call->recvs, call->count, peer);
            const char *from = (const char *)call->send;
            char *to = (char *)call->recv;
            from += (mti_counts_sum(call->sends, call->count, peer) + done) * element;
            to += (mti_counts_sum(call->recvs, call->count, peer) + done) * element;
            if (largest < sends) largest = sends;
            if (largest < recvs) largest = recvs;
            sends = mti_link_chunk(sends, done, most) * element;
            recvs = mti_link_chunk(recvs, done, most) * element;
            if (i == 0) mti_copy(to, from, sends);
            if (i > 0 && recvs) mti_link_receive(comm, comm->link->count, to, recvs, peer);
            if (i > 0 && sends) mti_link_send(comm, comm->link->count, from, sends, peer, MTI_LINK_DATA);
        }
        MT_TRY(mti_link_wait(ctx, comm));
    }
    return MT_SUCCESS;
}

/* In chunks of at most MTI_LINK_MESSAGE bytes of each rank. */
static mt_status mti_link_all_gather(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype), most = MTI_LINK_MESSAGE / element, done, mine;
    mti_pieces p;
    memset(&p, 0, sizeof p);
    p.element = element;
    p.call = call;
    p.stride = call->count;
    p.whole = call->count * (size_t)comm->size;
    mine = p.stride * element * (size_t)comm->rank;
    if (mti_has_block(call, comm->rank)) mti_copy((char *)call->recv + mine, call->send, call->count * element);
    for (done = 0; done < call->count; done += p.n) {
        p.n = call->count - done < most ? call->count - done : most;
        p.to = (char *)call->recv + done * element;
        p.own = p.to + mine;
        MT_TRY(mti_link_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* The root sends each rank a piece, then each rank sends its piece to all others. With pieces of many cache lines, the
   root sends about twice the bytes of the buffer, and each other rank about once. */
static mt_status mti_link_broadcast(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t done = 0;
    mti_call whole = *call;
    mti_pieces p;
    int r;
    if (comm->rank == call->root) mti_copy(call->recv, call->send, call->count * mt_dtype_size(call->dtype));
    whole.send = call->recv;
    while (done < call->count) {
        done += mti_pieces_next(comm, &whole, mti_pieces_most(comm, call, MTI_LINK_MESSAGE), done, &p);
        mti_link_begin(comm);
        for (r = 0; r < comm->size && comm->rank == call->root; r++) {
            const char *piece = p.from + p.stride * p.element * (size_t)r;
            if (r != call->root) mti_link_send(comm, r, piece, mti_piece_size(&p, r) * p.element, r, MTI_LINK_DATA);
        }
        if (comm->rank != call->root)
            mti_link_receive(comm, 0, p.own, mti_piece_size(&p, comm->rank) * p.element, call->root);
        MT_TRY(mti_link_wait(ctx, comm));
        MT_TRY(mti_link_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* Moves the data after the first meeting. Small data have arrived with the headers. */
static mt_status mti_link_move(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (mti_link_bytes(comm, call) <= MTI_LINK_SMALL) {
        if (call->kind != MT_ALL_REDUCE) return mti_move(ctx, comm, call);
        mti_reduce_range(comm, call, 0, call->count, 0);
        return MT_SUCCESS;
    }
    if (call->kind == MT_ALL_TO_ALL_V) MT_TRY(mti_link_compare_counts(ctx, comm, call));
    if (mti_is_all_to_all(call)) return mti_link_all_to_all(ctx, comm, call);
    if (call->kind == MT_ALL_GATHER) return mti_link_all_gather(ctx, comm, call);
    if (call->kind == MT_BROADCAST) return mti_link_broadcast(ctx, comm, call);
    return mti_link_reduce(ctx, comm, call);
}

static mt_status mti_link_collective(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mt_status status;
    MT_TRY(mti_link_enter(ctx, comm, call));
    status = mti_link_move(ctx, comm, call);
    mti_link_exit(comm);
    return status;
}

/* -- point to point -- */

/* One direction of a send_recv: first the headers, then the data, one message after the other. Request `at` receives
   the peer's header. Request at + 1 sends this rank's header, and then moves the data. */
typedef struct mti_link_lane {
    int sends, peer, at, matched; /* peer: -1: nothing to do; matched: 1: mti_link_match has compared the headers */
    const mti_link_message *header;
    char *data;
    size_t bytes, done;
} mti_link_lane;

static int mti_link_is_over(const mt_comm *comm, const mti_link_lane *lane) {
    return lane->peer < 0 || (lane->matched && lane->done == lane->bytes && mti_link_is_done(comm, lane->at + 1));
}

/* Fails when the peer's call has another count or data type. */
static mt_status mti_link_match(mt_context *ctx, mt_comm *comm, const mti_call *call, mti_link_lane *lane) {
    const mti_link_message *h = lane->header;
    size_t mine = lane->sends ? call->count : call->recvcount, theirs = (size_t)(lane->sends ? h->recvcount : h->count);
    mti_text text;
    lane->matched = 1;
    if (mine == theirs && (mt_dtype)(h->what >> 8 & 255) == call->dtype) return MT_SUCCESS;
    mti_link_arrived(comm, h, lane->peer, MTI_IN_P2P);
    mti_say_unlike(&text, comm, lane->sends ? comm->rank : lane->peer, lane->sends ? lane->peer : comm->rank);
    return mti_link_fail(ctx, comm, MT_ERR_MISMATCH, &text);
}

/* Starts the next request of a lane when the last one is done. */
static mt_status mti_link_advance(mt_context *ctx, mt_comm *comm, const mti_call *call, mti_link_lane *lane) {
    size_t bytes;
    if (lane->peer < 0 || !mti_link_is_done(comm, lane->at)) return MT_SUCCESS;
    if (!lane->matched) {
        MT_TRY(mti_link_match(ctx, comm, call, lane));
        if (lane->bytes <= MTI_LINK_SMALL) { /* the data travel with the header */
            if (!lane->sends) mti_copy(lane->data, lane->header->data, lane->bytes);
            lane->done = lane->bytes;
        }
    }
    if (lane->done == lane->bytes || !mti_link_is_done(comm, lane->at + 1)) return MT_SUCCESS;
    bytes = lane->bytes - lane->done < MTI_LINK_MESSAGE ? lane->bytes - lane->done : MTI_LINK_MESSAGE;
    if (lane->sends) mti_link_send(comm, lane->at + 1, lane->data + lane->done, bytes, lane->peer, MTI_LINK_DATA);
    else mti_link_receive(comm, lane->at + 1, lane->data + lane->done, bytes, lane->peer);
    lane->done += bytes;
    comm->link->watch = mti_stopwatch_start(comm->group->timeout);
    return MT_SUCCESS;
}

/* Starts to receive the peer's header, and sends this rank's header to the peer. */
static mti_link_lane mti_link_lane_open(mt_comm *comm, const mti_call *call, int sends, int at) {
    mti_link *m = comm->link;
    mti_link_lane lane;
    memset(&lane, 0, sizeof lane);
    lane.sends = sends;
    lane.at = at;
    lane.peer = sends ? call->root : call->source;
    if (lane.peer < 0) return lane;
    lane.bytes = (sends ? call->count : call->recvcount) * mt_dtype_size(call->dtype);
    lane.data = sends ? (char *)mt_tensor_make(call->send, call->dtype, 0, 0).data : (char *)call->recv;
    lane.header = sends ? m->asked : &m->in[lane.peer];
    mti_link_expect(comm, at, sends ? m->asked : &m->in[lane.peer], lane.peer, sends ? MTI_LINK_ASK : MTI_LINK_OFFER);
    mti_link_send(comm, at + 1, m->out, sends ? mti_link_write(comm, call, lane.bytes) : MTI_LINK_HEADER, lane.peer,
                  sends ? MTI_LINK_OFFER : MTI_LINK_ASK);
    return lane;
}

/* Runs the send and the receive of a call at the same time, each in its own lane. */
static mt_status mti_link_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_link_lane out, in;
    mti_link_listen(comm->link->port);
    if (mti_is_broken(comm->group)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_P2P);
    mti_link_write(comm, call, 0);
    mti_link_begin(comm);
    out = mti_link_lane_open(comm, call, 1, 0);
    in = mti_link_lane_open(comm, call, 0, 2);
    while (!mti_link_is_over(comm, &out) || !mti_link_is_over(comm, &in)) {
        MT_TRY(mti_link_step(ctx, comm));
        MT_TRY(mti_link_advance(ctx, comm, call, &out));
        MT_TRY(mti_link_advance(ctx, comm, call, &in));
    }
    mti_link_exit(comm);
    return comm->link->error ? mti_link_error(ctx, comm) : MT_SUCCESS;
}

static mt_status mti_link_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (ctx->device != MT_DEVICE_CPU)
        return mti_refuse(
            ctx, comm, MT_ERR_UNSUPPORTED,
            "mt_%s: \"%s\" (%d ranks) is over %s, which moves memory of the host, and the context is on device "
            "%d: use mt_comm_create_for, and an implementation built with -DMT_USE_NCCL",
            mti_call_name(call->kind), comm->name, comm->size, comm->link->port->name, (int)ctx->device);
    return mti_is_p2p(call) ? mti_link_p2p(ctx, comm, call) : mti_link_collective(ctx, comm, call);
}

/* -- groups and ports -- */

static void mti_link_free(mti_link *m) {
    if (!m) return;
    free(m->world);
    free(m->requests);
    free(m->counts);
    free(m->about);
    free(m->reasons);
    free(m->notice_requests);
    free(m->in);
    free(m->scratch);
    free(m);
}

/* Allocates the arrays for a group of `size` ranks; NULL: out of memory. A collective needs two requests per peer, and
   a send_recv needs four. */
static mti_link *mti_link_new(int size) {
    size_t n = (size_t)size, requests = 2 * n > 4 ? 2 * n : 4;
    mti_link *m = (mti_link *)calloc(1, sizeof *m);
    if (!m) return NULL;
    m->world = (int *)calloc(n, sizeof *m->world);
    m->requests = (mti_request *)calloc(requests, sizeof *m->requests);
    m->counts = (uint64_t *)calloc(4 * n, sizeof *m->counts);
    m->about = (mti_link_about *)calloc(requests, sizeof *m->about);
    m->reasons = (mti_link_notice *)calloc(n, sizeof *m->reasons);
    m->notice_requests = (mti_request *)calloc(2 * n, sizeof *m->notice_requests);
    m->in = (mti_link_message *)mti_default_alloc(NULL, (n + 3) * sizeof *m->in, MT_ALIGNMENT);
    m->scratch = (char *)mti_default_alloc(NULL, MTI_LINK_SCRATCH, MT_ALIGNMENT);
    if (!m->world || !m->requests || !m->counts || !m->about || !m->reasons || !m->notice_requests || !m->in ||
        !m->scratch) {
        mti_link_free(m);
        return NULL;
    }
    m->out = m->in + n;
    m->asked = m->out + 1;
    m->other = m->asked + 1;
    memset(m->out, 0, sizeof *m->out);
    m->size = size;
    return m;
}

/* Creates a communicator and its group. The caller fills mti_link.world. */
static mt_comm *mti_link_comm_new(const mti_transport *transport, mti_port *port, int rank, int size, const char *name,
                                  int number) {
    mt_comm *comm = mti_comm_new(transport, rank, size, name);
    mti_group *g = mti_group_new(size, port->timeout, port->spin);
    mti_link *m = mti_link_new(size);
    if (!comm || !g || !m) {
        if (g) g->references = 1;
        mti_group_release(g);
        mti_link_free(m);
        free(comm);
        return NULL;
    }
    g->references = 1;
    comm->group = g;
    comm->link = m;
    m->port = port;
    m->comm = comm;
    m->number = number;
    m->next = port->groups;
    port->groups = m;
    port->references++;
    return comm;
}

static void mti_port_free(mti_port *port) {
    free(port->status);
    free(port->indices);
    free(port->left);
    free(port->reasons);
    free(port->early);
    free(port->closing_requests);
    free(port);
}

static mti_port *mti_port_new(const mti_wire *wire, const char *name, int rank, int size, double timeout_s) {
    size_t n = (size_t)size, i;
    mti_port *port = (mti_port *)calloc(1, sizeof *port);
    if (!port) return NULL;
    port->rank = rank;
    port->size = size;
    port->wire = wire;
    port->name = name;
    port->timeout = timeout_s > 0 ? timeout_s : MT_TIMEOUT_DEFAULT;
    port->next = 1;
    port->status = (int *)calloc(n, sizeof *port->status);
    port->indices = (int *)calloc(2 * n, sizeof *port->indices);
    port->left = (const char **)calloc(n, sizeof *port->left);
    port->reasons = (mti_link_notice *)calloc(n, sizeof *port->reasons);
    port->early = (mti_link_notice *)calloc(2 * n, sizeof *port->early);
    port->closing_requests = (mti_request *)calloc(n, sizeof *port->closing_requests);
    if (!port->status || !port->indices || !port->left || !port->reasons || !port->early || !port->closing_requests) {
        mti_port_free(port);
        return NULL;
    }
    for (i = 0; i < n; i++) port->status[i] = MTI_LINK_OPEN;
    return port;
}

/* The number of the new groups is one that no rank of comm has used. All groups of a split have the same number, also
   on ranks that are in none of these groups. */
static mt_status mti_link_split(mt_comm *comm, int color, int key, mt_comm **out) {
    mti_link *m = comm->link;
    int rank, size, leader, r, at, number = m->port->next;
    char name[32];
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = MTI_SPLIT;
    call.color = color;
    call.key = key;
    m->port->early_count = 0;
    MT_TRY(mti_link_enter(NULL, comm, &call));
    mti_link_exit(comm);
    for (r = 0; r < comm->size; r++)
        if (r != comm->rank && m->in[r].next > number) number = m->in[r].next;
    if (number >= m->port->last_tag / 4)
        return mti_refuse(NULL, comm, MT_ERR_UNSUPPORTED,
                          "mt_comm_split: %d groups so far, more than the tags of this MPI can tell apart", number);
    m->port->next = number + 1;
    if (color < 0) return MT_SUCCESS;
    mti_split_member(comm, comm->rank, &rank, &size, &leader);
    if (snprintf(name, sizeof name, "%s/%d", comm->name, color) < 0) name[0] = '\0';
    *out = size == 1 ? mti_comm_new(&mti_alone, 0, 1, name)
                     : mti_link_comm_new(comm->transport, m->port, rank, size, name, number);
    if (!*out || size == 1) return MT_SUCCESS; /* *out is NULL: mt_comm_split returns MT_ERR_MEMORY */
    for (r = 0; r < comm->size; r++) {
        if (mti_slot_of(comm->group, r)->color != color) continue;
        mti_split_member(comm, r, &at, &size, &leader);
        (*out)->link->world[at] = m->world[r];
        if (m->port->left[m->world[r]]) mti_link_take_left((*out)->link, at, m->port->left[m->world[r]]);
    }
    for (r = 0; r < m->port->early_count; r++) mti_link_take_notice(m->port, &m->port->early[r]);
    return MT_SUCCESS;
}

/* -- ending -- */

/* Returns 1 when all requests are complete. */
static int mti_link_all_done(mti_port *port, mti_request *requests, int count) {
    int i = 0;
    (port->wire->test)(port, requests, count, port->indices);
    while (i < count && !requests[i].active) i++;
    return i == count;
}

/* Frees the destroyed groups whose requests are complete: before that, the wire may use their memory. */
static void mti_link_reap(mti_port *port) {
    struct mti_link **at = &port->ended, *m;
    while ((m = *at) != NULL) {
        if (!mti_link_all_done(port, m->requests, m->count) ||
            !mti_link_all_done(port, m->notice_requests, 2 * m->size)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        mti_link_free(m);
    }
}

/* Tells all ranks of the port that this rank closes its port, and waits until they have closed theirs. Returns 1 when
   all have done so, and the wire holds no memory of any rank. */
static int mti_link_close(mti_port *port, mt_status status) {
    double limit = port->broken ? MTI_LINK_GRACE : port->timeout;
    mti_stopwatch watch = mti_stopwatch_start(limit);
    mti_link_notice *notice = &port->closing;
    int r;
    notice->news = MTI_LINK_CLOSES;
    notice->rank = port->rank;
    notice->status = port->status[port->rank] = (int)status;
    notice->keeps = port->keeps;
    notice->broken = port->broken;
    port->closed++;
    for (r = 0; r < port->size; r++)
        if (r != port->rank) mti_request_begin(port, &port->closing_requests[r], 1, r, 0, notice, sizeof *notice);
    while (port->waited < limit) {
        mti_link_listen(port);
        mti_link_reap(port);
        if (mti_link_all_done(port, port->closing_requests, port->size) && !port->ended && port->closed == port->size)
            return !port->keeps;
        port->waited = mti_waited(&watch);
        mti_rest(port->waited, MTI_LINK_SOON);
    }
    return 0;
}

/* Destroys a group, and with the last group the port. */
static void mti_link_destroy(mt_comm *comm) {
    mti_link *m = comm->link, **at;
    mti_port *port = m->port;
    if (mti_is_forked(comm->process)) return;
    for (at = &port->groups; *at != m; at = &(*at)->next) continue;
    *at = m->next;
    m->next = port->ended;
    port->ended = m;
    m->comm = NULL;
    mti_link_reap(port);
    if (--port->references == 0) (port->wire->end)(port, mti_link_close(port, MT_SUCCESS));
}

static const mti_transport mti_linked = {1,
                                         0,
                                         mti_peers_check,
                                         mti_link_call,
                                         mti_link_call,
                                         mti_link_enter,
                                         mti_link_exit,
                                         mti_link_split,
                                         mti_link_leave,
                                         mti_link_destroy};
