/* ---- ranks that are processes, over MPI -------------------------------------------------------------------------- */

#pragma once
#include "mpi.h"
#include "thread_calls.c"

/* Ranks are processes. A port is a duplicate of the caller's MPI_Comm. A world and all groups split from it share one
   port: a group is a list of ranks, and a number that is part of its tags. So creating, splitting and leaving a group
   needs only messages, and no collective call of MPI, which would wait for dead ranks.

   A collective: each rank sends every other rank a header that describes its call in the form of a slot, followed by up
   to MTI_MPI_SMALL bytes of data. Then it waits for the headers of all other ranks, and compares the calls. So each
   process fills its own copy of the slots that threads share (threads.c), and writes the same error messages. Larger
   data follow when all headers have arrived. A large reduction divides the buffer into one piece per rank: each rank
   receives its piece from all other ranks, reduces it in the tree of threads.c, and for an all_reduce sends the result
   to all ranks. Point to point: both ranks send a header, then the data follow.

   Notices are messages between ports that say at any time that a group has broken or a rank has left. No wait for a
   rank blocks inside MPI: requests are tested until they are done, the timeout has expired, or a notice says that they
   will never be done. */

#if MTI_MPI
/* Bytes of data behind a header: the message is smaller than 4 KiB, which MPI libraries send eagerly. */
#define MTI_MPI_SMALL ((size_t)3968)
#define MTI_MPI_SCRATCH ((size_t)4 << 20)  /* bytes per group for received pieces; only used pages take memory */
#define MTI_MPI_MESSAGE ((size_t)16 << 20) /* most bytes of one message: MPI counts bytes in an int */
#define MTI_MPI_SOON 1e-3    /* seconds for which a wait polls without sleeping; it yields where ranks share cores */
#define MTI_MPI_LISTEN 50e-6 /* seconds for which a wait polls only the requests of its call, and no notices */
#define MTI_MPI_GRACE 2.0    /* seconds to wait for other ranks to close their ports when a group has broken */

/* The kinds of messages: the low two bits of a tag. The bits above are the number of the group. Tag 0 is for
   notices. */
#define MTI_MPI_MEET 0  /* header of a collective */
#define MTI_MPI_OFFER 1 /* header from a sender to its receiver */
#define MTI_MPI_ASK 2   /* header from a receiver to its sender */
#define MTI_MPI_DATA 3

#define MTI_MPI_OPEN 1 /* mti_mpi_port.status of a rank that has not closed its port; errors are negative */

typedef struct mti_mpi_message {
    uint64_t what, count, recvcount; /* as in a slot */
    int color, key;
    int next; /* the lowest group number that the sender has not used yet */
    unsigned char apart[28];
    unsigned char data[MTI_MPI_SMALL];
} mti_mpi_message;

#define MTI_MPI_HEADER offsetof(mti_mpi_message, data)

/* The news of a notice: a group has broken; a rank has left a group, or, with mti_mpi_notice.everywhere, all its
   groups; a rank closes its port. */
typedef enum mti_mpi_news { MTI_MPI_BROKEN, MTI_MPI_LEFT, MTI_MPI_CLOSES } mti_mpi_news;

typedef struct mti_mpi_notice {
    int news, group, rank, status; /* rank: in the group; in the port for `everywhere` and MTI_MPI_CLOSES */
    int everywhere;
    int keeps, broken; /* MTI_MPI_CLOSES: these fields of the sender's port */
    char text[MT_ERROR_BYTES + 64];
} mti_mpi_notice;

typedef struct mti_mpi_port {
    MPI_Comm comm;
    int rank, size, last_tag, next, spin, local_rank;
    int references;         /* number of groups */
    int keeps;              /* 1: on some rank, MPI still holds requests of a call that was given up */
    int broken;             /* 1: on some rank, a group has broken: there may be messages that no rank has received */
    int closed;             /* number of ranks that have closed their ports, this rank included */
    int *status;            /* [size] the status with which each rank has closed its port, or MTI_MPI_OPEN */
    double timeout, waited; /* waited: seconds that mti_mpi_close has waited for the other ranks */
    /* groups: list of the groups in use; ended: list of destroyed groups whose memory MPI may still use, for instance
       for their last notices */
    struct mti_mpi *groups, *ended;
    const char **left;       /* [size] why a rank has left all its groups; NULL: it has not left */
    mti_mpi_notice *reasons; /* [size] the notices whose text `left` points to */
    mti_mpi_notice *early;   /* notices on a new group whose split this rank has not finished */
    int early_count;
    mti_mpi_notice inbox, closing;
    MPI_Request inbox_request, *closing_requests;
    int32_t version, *versions; /* MT_VERSION_NUMBER of this rank, and of all [size] */
} mti_mpi_port;

/* What a request is for. */
typedef struct mti_mpi_about {
    int peer, receives;
    mti_mpi_message *header; /* the header to receive; NULL: the request receives data, or sends */
    int inside;              /* the peer's mti_slot.inside after the header has arrived */
} mti_mpi_about;

typedef struct mti_mpi {
    mti_mpi_port *port;
    mt_comm *comm;
    struct mti_mpi *next;
    int size, number;
    int count, active, error; /* requests of the current call: their number, how many are not done, an MPI error */
    mti_stopwatch watch;      /* measures the time without progress */
    int *world;               /* [size] the rank of each rank in the port */
    int *indices;
    MPI_Status *statuses;
    MPI_Request *requests;
    mti_mpi_about *about;
    mti_mpi_message *in, *out; /* in: [size] the header received from each rank; out: this rank's header */
    /* asked: the header of the receiver of this rank's message; other: a header of another kind than this rank waits
       for, see mti_mpi_look_around */
    mti_mpi_message *asked, *other;
    char *scratch;
    mti_mpi_notice *reasons;   /* [size] why each rank has left */
    mti_mpi_notice notices[2]; /* of this rank, by mti_mpi_news */
    MPI_Request *notice_requests;
} mti_mpi;

/* -- requests -- */

/* Adds request `at`, which an MPI call has started with the result `error`, to the requests of the current call. */
static void mti_mpi_post(mt_comm *comm, int at, int peer, int receives, mti_mpi_message *header, int inside,
                         int error) {
    mti_mpi *m = comm->mpi;
    m->about[at].peer = peer;
    m->about[at].receives = receives;
    m->about[at].header = header;
    m->about[at].inside = inside;
    if (m->count <= at) m->count = at + 1;
    m->active++;
    if (error != MPI_SUCCESS && !m->error) m->error = error;
}

static int mti_mpi_tag(const mti_mpi *m, int kind) { return 4 * m->number + kind; }

static void mti_mpi_send(mt_comm *comm, int at, const void *data, size_t bytes, int peer, int kind) {
    mti_mpi *m = comm->mpi;
    mti_mpi_post(
        comm, at, peer, 0, NULL, 0,
        MPI_Isend(data, (int)bytes, MPI_BYTE, m->world[peer], mti_mpi_tag(m, kind), m->port->comm, &m->requests[at]));
}

static void mti_mpi_receive(mt_comm *comm, int at, void *data, size_t bytes, int peer) {
    mti_mpi *m = comm->mpi;
    mti_mpi_post(comm, at, peer, 1, NULL, 0,
                 MPI_Irecv(data, (int)bytes, MPI_BYTE, m->world[peer], mti_mpi_tag(m, MTI_MPI_DATA), m->port->comm,
                           &m->requests[at]));
}

/* Starts to receive a peer's header. */
static void mti_mpi_expect(mt_comm *comm, int at, mti_mpi_message *header, int peer, int kind) {
    mti_mpi *m = comm->mpi;
    mti_mpi_post(comm, at, peer, 1, header, kind == MTI_MPI_MEET ? MTI_IN_COLLECTIVE : MTI_IN_P2P,
                 MPI_Irecv(header, (int)sizeof *header, MPI_BYTE, m->world[peer], mti_mpi_tag(m, kind), m->port->comm,
                           &m->requests[at]));
}

static int mti_mpi_is_done(const mt_comm *comm, int at) { return comm->mpi->requests[at] == MPI_REQUEST_NULL; }

/* Writes a received header to the slot of its sender. */
static void mti_mpi_arrived(mt_comm *comm, const mti_mpi_message *header, int peer, int inside) {
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
static int mti_mpi_test(mt_comm *comm) {
    mti_mpi *m = comm->mpi;
    int done = 0, i, error;
    if (m->active == 0) return 1;
    error = MPI_Testsome(m->count, m->requests, &done, m->indices, m->statuses);
    if (error != MPI_SUCCESS && error != MPI_ERR_IN_STATUS) m->error = error;
    if (done == MPI_UNDEFINED) return m->active = 0, 1;
    for (i = 0; i < done; i++) {
        const mti_mpi_about *about = &m->about[m->indices[i]];
        if (error == MPI_ERR_IN_STATUS && m->statuses[i].MPI_ERROR != MPI_SUCCESS) m->error = m->statuses[i].MPI_ERROR;
        else if (about->header) mti_mpi_arrived(comm, about->header, about->peer, about->inside);
    }
    m->active -= done;
    return done > 0;
}

/* -- notices -- */

/* Marks a rank of a group as left. */
static void mti_mpi_take_left(mti_mpi *m, int rank, const char *reason) {
    mti_slot *slot = mti_slot_of(m->comm->group, rank);
    if (slot->left) return;
    slot->left = reason;
    m->comm->group->left_count++;
}

/* Returns the rank in the group of rank `world` of the port; -1: not a member. */
static int mti_mpi_member(const mti_mpi *m, int world) {
    int r = 0;
    while (r < m->comm->size && m->world[r] != world) r++;
    return r < m->comm->size ? r : -1;
}

/* Marks a rank of the port as left in all its groups. */
static void mti_mpi_take_everywhere(mti_mpi_port *port, const mti_mpi_notice *notice) {
    mti_mpi *m;
    if (port->left[notice->rank]) return;
    port->reasons[notice->rank] = *notice;
    port->left[notice->rank] = port->reasons[notice->rank].text;
    for (m = port->groups; m; m = m->next)
        if (mti_mpi_member(m, notice->rank) >= 0)
            mti_mpi_take_left(m, mti_mpi_member(m, notice->rank), port->left[notice->rank]);
}

static void mti_mpi_take_broken(mti_mpi *m, const mti_mpi_notice *notice) {
    mti_text text;
    text.used = 0;
    mti_say(&text, "%s", notice->text);
    mti_break(m->comm->group, (mt_status)notice->status, &text, MTI_ANY);
    m->port->broken = 1;
}

/* Keeps a notice on a new group whose split this rank has not finished. Drops a notice on a group that this rank has
   destroyed. */
static void mti_mpi_take_early(mti_mpi_port *port, const mti_mpi_notice *notice) {
    if (notice->group >= port->next && port->early_count < 2 * port->size) port->early[port->early_count++] = *notice;
}

/* Handles one notice. */
static void mti_mpi_take_notice(mti_mpi_port *port, const mti_mpi_notice *notice) {
    mti_mpi *m = port->groups;
    while (m && m->number != notice->group) m = m->next;
    if (notice->news == MTI_MPI_CLOSES) {
        port->status[notice->rank] = notice->status;
        port->keeps |= notice->keeps;
        port->broken |= notice->broken;
        port->closed++;
    } else if (notice->everywhere) {
        mti_mpi_take_everywhere(port, notice);
    } else if (!m) {
        mti_mpi_take_early(port, notice);
    } else if (notice->news == MTI_MPI_BROKEN) {
        mti_mpi_take_broken(m, notice);
    } else if (!mti_slot_of(m->comm->group, notice->rank)->left) {
        m->reasons[notice->rank] = *notice;
        mti_mpi_take_left(m, notice->rank, m->reasons[notice->rank].text);
    }
}

static int mti_mpi_open_inbox(mti_mpi_port *port) {
    return MPI_Irecv(&port->inbox, (int)sizeof port->inbox, MPI_BYTE, MPI_ANY_SOURCE, 0, port->comm,
                     &port->inbox_request);
}

/* Receives and handles all notices that have arrived. */
static void mti_mpi_listen(mti_mpi_port *port) {
    int came = 1;
    while (port->inbox_request != MPI_REQUEST_NULL) {
        if (MPI_Test(&port->inbox_request, &came, MPI_STATUS_IGNORE) != MPI_SUCCESS || !came) return;
        mti_mpi_take_notice(port, &port->inbox);
        if (mti_mpi_open_inbox(port) != MPI_SUCCESS) port->inbox_request = MPI_REQUEST_NULL;
    }
}

/* Sends a notice to all other ranks of the group. Each kind of news is sent at most once, because MPI keeps using the
   notice's memory. */
static void mti_mpi_notify(mt_comm *comm, mti_mpi_news news, mt_status status, const char *text, int everywhere) {
    mti_mpi *m = comm->mpi;
    mti_mpi_notice *notice = &m->notices[news];
    int r;
    notice->news = (int)news;
    notice->group = m->number;
    notice->rank = everywhere ? m->port->rank : comm->rank;
    notice->status = (int)status;
    notice->everywhere = everywhere;
    snprintf(notice->text, sizeof notice->text, "%s", text);
    for (r = 0; r < comm->size; r++)
        if (r != comm->rank)
            MPI_Isend(notice, (int)sizeof *notice, MPI_BYTE, m->world[r], 0, m->port->comm,
                      &m->notice_requests[(int)news * comm->size + r]);
}

static void mti_mpi_leave(mt_comm *comm, const char *reason) {
    if (!mti_mark_left(comm, reason)) return;
    mti_mpi_notify(comm, MTI_MPI_LEFT, MT_SUCCESS, reason, comm->owner && comm->owner->world == comm);
}

/* -- failing -- */

/* Cancels the receives that have not begun. Requests that have begun stay with MPI, with their memory: port->keeps. */
static void mti_mpi_abandon(mt_comm *comm) {
    mti_mpi *m = comm->mpi;
    int i;
    for (i = 0; i < m->count; i++) {
        m->about[i].header = NULL; /* mti_mpi_test must not read a header that was cancelled */
        if (m->requests[i] != MPI_REQUEST_NULL && m->about[i].receives) MPI_Cancel(&m->requests[i]);
    }
    while (m->active > 0 && mti_mpi_test(comm)) continue;
    if (m->active > 0) m->port->keeps = 1;
}

/* Ends a call with an error, and breaks the group with this message. If the group has broken before, the earlier status
   and message stay. */
static mt_status mti_mpi_fail(mt_context *ctx, mt_comm *comm, mt_status status, const mti_text *text) {
    if (!mti_is_broken(comm->group)) {
        mti_break(comm->group, status, text, MTI_ANY);
        mti_mpi_notify(comm, MTI_MPI_BROKEN, status, comm->group->text, 0);
    }
    comm->mpi->port->broken = 1;
    mti_mpi_abandon(comm);
    mti_set_inside(comm, MTI_OUTSIDE);
    return mti_broken_now(ctx, comm);
}

static mt_status mti_mpi_error(mt_context *ctx, mt_comm *comm) {
    char why[MPI_MAX_ERROR_STRING];
    int length = 0;
    mti_text text;
    text.used = 0;
    mti_say_mine(&text, comm);
    if (MPI_Error_string(comm->mpi->error, why, &length) != MPI_SUCCESS) length = 0;
    mti_say(&text, "rank %d: MPI: %.*s", comm->rank, length, why);
    return mti_mpi_fail(ctx, comm, MT_ERR_PEER, &text);
}

/* Returns the next request after `after` that waits for a header; -1: none. */
static int mti_mpi_missing(const mt_comm *comm, int after) {
    int i;
    for (i = after + 1; i < comm->mpi->count; i++)
        if (!mti_mpi_is_done(comm, i) && comm->mpi->about[i].header) return i;
    return -1;
}

/* Returns a rank that has left and whose header is still missing; -1: none. */
static int mti_mpi_gone(const mt_comm *comm) {
    int i = -1;
    if (comm->group->left_count == 0) return -1;
    while ((i = mti_mpi_missing(comm, i)) >= 0)
        if (mti_slot_of(comm->group, comm->mpi->about[i].peer)->left) return comm->mpi->about[i].peer;
    return -1;
}

/* Finds out what the missing ranks have called instead: receives headers of another kind than this rank waits for. */
static void mti_mpi_look_around(mt_comm *comm) {
    mti_mpi *m = comm->mpi;
    MPI_Message message;
    int r, kind, there;
    for (r = 0; r < comm->size; r++) {
        for (kind = MTI_MPI_MEET; kind < MTI_MPI_DATA && r != comm->rank; kind++) {
            there = 0;
            if (mti_slot_of(comm->group, r)->inside) continue;
            if (MPI_Improbe(m->world[r], mti_mpi_tag(m, kind), m->port->comm, &there, &message, m->statuses) !=
                    MPI_SUCCESS ||
                !there)
                continue;
            MPI_Mrecv(m->other, (int)sizeof *m->other, MPI_BYTE, &message, m->statuses);
            mti_mpi_arrived(comm, m->other, r, kind == MTI_MPI_MEET ? MTI_IN_COLLECTIVE : MTI_IN_P2P);
        }
    }
}

/* Writes the ranks whose data have not arrived, or that have not received this rank's data. */
static void mti_mpi_say_stuck(mti_text *text, const mt_comm *comm) {
    const mti_group *g = comm->group;
    int i, r, said = 0;
    mti_say_mine(text, comm);
    mti_say(text, "waited %.2f s in the middle of it for", g->timeout);
    for (r = 0; r < comm->size && said < 8; r++) {
        for (i = 0; i < comm->mpi->count && (mti_mpi_is_done(comm, i) || comm->mpi->about[i].peer != r); i++) continue;
        if (i < comm->mpi->count) mti_say(text, said++ ? ", %d" : " rank %d", r);
    }
}

/* Ends a call that cannot complete: the group has broken, rank `gone` has left (-1: none), or the timeout is over. */
static mt_status mti_mpi_give_up(mt_context *ctx, mt_comm *comm, int gone) {
    int collective = mti_slot_of(comm->group, comm->rank)->inside == MTI_IN_COLLECTIVE, header;
    mti_text text;
    text.used = 0;
    text.data[0] = '\0';
    if (mti_is_broken(comm->group)) return mti_mpi_fail(ctx, comm, comm->group->why_broken, &text);
    if (gone >= 0) {
        mti_say_left(&text, comm, gone);
        return mti_mpi_fail(ctx, comm, MT_ERR_PEER, &text);
    }
    header = mti_mpi_missing(comm, -1);
    if (header >= 0) mti_mpi_look_around(comm);
    if (header >= 0) mti_say_timeout(&text, comm, collective ? -1 : comm->mpi->about[header].peer);
    else mti_mpi_say_stuck(&text, comm);
    return mti_mpi_fail(ctx, comm, MT_ERR_TIMEOUT, &text);
}

/* -- waiting -- */

static void mti_mpi_begin(mt_comm *comm) {
    comm->mpi->count = 0;
    comm->mpi->watch = mti_stopwatch_start(comm->group->timeout);
}

/* Returns MT_SUCCESS when a request has completed, or after a short pause, and an error when the call cannot complete.
   A notice that a rank has left or broken the group may overtake earlier messages of that rank. So the requests are
   tested once more before the call is given up. */
static mt_status mti_mpi_step(mt_context *ctx, mt_comm *comm) {
    mti_mpi *m = comm->mpi;
    int came = mti_mpi_test(comm), gone, late;
    double waited;
    if (m->error) return mti_mpi_error(ctx, comm);
    if (came) return MT_SUCCESS;
    waited = mti_waited(&m->watch);
    if (waited > MTI_MPI_LISTEN) mti_mpi_listen(m->port);
    gone = mti_mpi_gone(comm);
    late = waited > comm->group->timeout;
    if (late || gone >= 0 || mti_is_broken(comm->group)) {
        if (mti_mpi_test(comm)) return MT_SUCCESS;
        return mti_mpi_give_up(ctx, comm, gone);
    }
    if (!m->port->spin || waited > MTI_MPI_SOON) mti_rest(waited, MTI_MPI_SOON);
    return MT_SUCCESS;
}

static mt_status mti_mpi_wait(mt_context *ctx, mt_comm *comm) {
    while (comm->mpi->active > 0) MT_TRY(mti_mpi_step(ctx, comm));
    return comm->mpi->error ? mti_mpi_error(ctx, comm) : MT_SUCCESS;
}

/* -- collectives -- */

/* Returns how many bytes one rank contributes to the call; the same on all ranks. At most MTI_MPI_SMALL bytes travel
   with the header. */
static size_t mti_mpi_bytes(const mt_comm *comm, const mti_call *call) {
    size_t elements = call->kind == MT_BROADCAST ? call->count : mti_send_elements(comm, call);
    return elements * mt_dtype_size(call->dtype);
}

/* Writes this rank's header, and up to MTI_MPI_SMALL bytes of data behind it. Returns the size of the message. */
static size_t mti_mpi_write(mt_comm *comm, const mti_call *call, size_t bytes) {
    mti_mpi_message *out = comm->mpi->out;
    const mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    out->what = slot->what;
    out->count = slot->count;
    out->recvcount = slot->recvcount;
    out->color = slot->color;
    out->key = slot->key;
    out->next = comm->mpi->port->next;
    if (bytes > MTI_MPI_SMALL) bytes = 0;
    mti_copy(out->data, call->send, bytes);
    return MTI_MPI_HEADER + bytes;
}

/* The first meeting, as mti_enter. Afterwards mti_slot.send of each other rank points to the data that came with the
   rank's header. */
static mt_status mti_mpi_enter(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_mpi *m = comm->mpi;
    int i, has_data = call->kind != MT_BROADCAST || call->root == comm->rank;
    size_t bytes;
    mt_status status;
    mti_mpi_listen(m->port);
    if (mti_is_broken(comm->group)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_COLLECTIVE);
    bytes = mti_mpi_write(comm, call, has_data ? mti_mpi_bytes(comm, call) : 0);
    mti_mpi_begin(comm);
    for (i = 1; i < comm->size; i++) {
        int peer = (comm->rank + i) % comm->size;
        mti_mpi_expect(comm, 2 * i - 2, &m->in[peer], peer, MTI_MPI_MEET);
        mti_mpi_send(comm, 2 * i - 1, m->out, bytes, peer, MTI_MPI_MEET);
    }
    MT_TRY(mti_mpi_wait(ctx, comm));
    mti_mpi_listen(m->port); /* a rank may have sent its header and then given up */
    status = mti_is_broken(comm->group) ? mti_broken_before(ctx, comm, call) : mti_compare(ctx, comm);
    if (status != MT_SUCCESS) mti_set_inside(comm, MTI_OUTSIDE);
    return status;
}

static void mti_mpi_exit(mt_comm *comm) {
    int r;
    for (r = 0; r < comm->size; r++) mti_slot_of(comm->group, r)->inside = MTI_OUTSIDE;
}

/* Exchanges pieces between all ranks. With `out`: sends piece r to rank r, and stores every rank's copy of this rank's
   piece in `out`, n elements apart. Without `out`: sends this rank's result to all ranks, and stores their results in
   p->to. */
static mt_status mti_mpi_exchange(mt_context *ctx, mt_comm *comm, const mti_pieces *p, char *out) {
    size_t mine = mti_piece_size(p, comm->rank), apart = (out ? p->n : p->stride) * p->element;
    int i;
    mti_mpi_begin(comm);
    for (i = 1; i < comm->size; i++) {
        int peer = (comm->rank + i) % comm->size, from = (comm->rank + comm->size - i) % comm->size;
        size_t send = out ? mti_piece_size(p, peer) : mine, recv = out ? mine : mti_piece_size(p, from);
        const char *data = out ? p->from + p->stride * p->element * (size_t)peer : p->own;
        mti_mpi_receive(comm, 2 * i - 2, (out ? out : p->to) + apart * (size_t)from, recv * p->element, from);
        mti_mpi_send(comm, 2 * i - 1, data, send * p->element, peer, MTI_MPI_DATA);
    }
    return mti_mpi_wait(ctx, comm);
}

/* Reduces in chunks: gathers every rank's copy of this rank's piece in `scratch`, reduces the copies in the tree of
   threads.c, and sends the result to all ranks if p.to is set. */
static mt_status mti_mpi_reduce(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t most = mti_pieces_most(comm, call, MTI_MPI_SCRATCH), done = 0;
    mti_call own = *call;
    mti_pieces p;
    int r;
    while (done < call->count) {
        done += mti_pieces_next(comm, call, most, done, &p);
        MT_TRY(mti_mpi_exchange(ctx, comm, &p, comm->mpi->scratch));
        for (r = 0; r < comm->size; r++)
            mti_slot_of(comm->group, r)->send = comm->mpi->scratch + p.n * p.element * (size_t)r;
        mti_slot_of(comm->group, comm->rank)->send = p.from + p.stride * p.element * (size_t)comm->rank;
        own.recv = p.own;
        mti_reduce_range(comm, &own, 0, mti_piece_size(&p, comm->rank), 0);
        if (p.to) MT_TRY(mti_mpi_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* In chunks of at most MTI_MPI_MESSAGE bytes of each rank. */
static mt_status mti_mpi_all_gather(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t element = mt_dtype_size(call->dtype), most = MTI_MPI_MESSAGE / element, done, mine;
    mti_pieces p;
    memset(&p, 0, sizeof p);
    p.element = element;
    p.stride = call->stride;
    p.whole = call->stride * (size_t)comm->size;
    mine = p.stride * element * (size_t)comm->rank;
    mti_copy((char *)call->recv + mine, call->send, call->count * element);
    for (done = 0; done < call->count; done += p.n) {
        p.n = call->count - done < most ? call->count - done : most;
        p.to = (char *)call->recv + done * element;
        p.own = p.to + mine;
        MT_TRY(mti_mpi_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* The root sends each rank a piece, then each rank sends its piece to all others. With pieces of many cache lines, the
   root sends about twice the bytes of the buffer, and each other rank about once. */
static mt_status mti_mpi_broadcast(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t done = 0;
    mti_call whole = *call;
    mti_pieces p;
    int r;
    if (comm->rank == call->root) mti_copy(call->recv, call->send, call->count * mt_dtype_size(call->dtype));
    whole.send = call->recv;
    while (done < call->count) {
        done += mti_pieces_next(comm, &whole, mti_pieces_most(comm, call, MTI_MPI_MESSAGE), done, &p);
        mti_mpi_begin(comm);
        for (r = 0; r < comm->size && comm->rank == call->root; r++) {
            const char *piece = p.from + p.stride * p.element * (size_t)r;
            if (r != call->root) mti_mpi_send(comm, r, piece, mti_piece_size(&p, r) * p.element, r, MTI_MPI_DATA);
        }
        if (comm->rank != call->root)
            mti_mpi_receive(comm, 0, p.own, mti_piece_size(&p, comm->rank) * p.element, call->root);
        MT_TRY(mti_mpi_wait(ctx, comm));
        MT_TRY(mti_mpi_exchange(ctx, comm, &p, NULL));
    }
    return MT_SUCCESS;
}

/* Moves the data after the first meeting. Small data have arrived with the headers. */
static mt_status mti_mpi_move(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (mti_mpi_bytes(comm, call) <= MTI_MPI_SMALL) {
        if (call->kind != MT_ALL_REDUCE) return mti_move(ctx, comm, call);
        mti_reduce_range(comm, call, 0, call->count, 0);
        return MT_SUCCESS;
    }
    if (call->kind == MT_ALL_GATHER) return mti_mpi_all_gather(ctx, comm, call);
    if (call->kind == MT_BROADCAST) return mti_mpi_broadcast(ctx, comm, call);
    return mti_mpi_reduce(ctx, comm, call);
}

static mt_status mti_mpi_collective(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mt_status status;
    MT_TRY(mti_mpi_enter(ctx, comm, call));
    status = mti_mpi_move(ctx, comm, call);
    mti_mpi_exit(comm);
    return status;
}

/* -- point to point -- */

/* One direction of a send_recv: first the headers, then the data, one message after the other. Request `at` receives
   the peer's header. Request at + 1 sends this rank's header, and then moves the data. */
typedef struct mti_mpi_lane {
    int sends, peer, at, matched; /* peer: -1: nothing to do; matched: 1: mti_mpi_match has compared the headers */
    const mti_mpi_message *header;
    char *data;
    size_t bytes, done;
} mti_mpi_lane;

static int mti_mpi_is_over(const mt_comm *comm, const mti_mpi_lane *lane) {
    return lane->peer < 0 || (lane->matched && lane->done == lane->bytes && mti_mpi_is_done(comm, lane->at + 1));
}

/* Fails when the peer's call has another count or data type. */
static mt_status mti_mpi_match(mt_context *ctx, mt_comm *comm, const mti_call *call, mti_mpi_lane *lane) {
    const mti_mpi_message *h = lane->header;
    size_t mine = lane->sends ? call->count : call->recvcount, theirs = (size_t)(lane->sends ? h->recvcount : h->count);
    mti_text text;
    lane->matched = 1;
    if (mine == theirs && (mt_dtype)(h->what >> 8 & 255) == call->dtype) return MT_SUCCESS;
    mti_mpi_arrived(comm, h, lane->peer, MTI_IN_P2P);
    mti_say_unlike(&text, comm, lane->sends ? comm->rank : lane->peer, lane->sends ? lane->peer : comm->rank);
    return mti_mpi_fail(ctx, comm, MT_ERR_MISMATCH, &text);
}

/* Starts the next request of a lane when the last one is done. */
static mt_status mti_mpi_advance(mt_context *ctx, mt_comm *comm, const mti_call *call, mti_mpi_lane *lane) {
    size_t bytes;
    if (lane->peer < 0 || !mti_mpi_is_done(comm, lane->at)) return MT_SUCCESS;
    if (!lane->matched) {
        MT_TRY(mti_mpi_match(ctx, comm, call, lane));
        if (lane->bytes <= MTI_MPI_SMALL) { /* the data travel with the header */
            if (!lane->sends) mti_copy(lane->data, lane->header->data, lane->bytes);
            lane->done = lane->bytes;
        }
    }
    if (lane->done == lane->bytes || !mti_mpi_is_done(comm, lane->at + 1)) return MT_SUCCESS;
    bytes = lane->bytes - lane->done < MTI_MPI_MESSAGE ? lane->bytes - lane->done : MTI_MPI_MESSAGE;
    if (lane->sends) mti_mpi_send(comm, lane->at + 1, lane->data + lane->done, bytes, lane->peer, MTI_MPI_DATA);
    else mti_mpi_receive(comm, lane->at + 1, lane->data + lane->done, bytes, lane->peer);
    lane->done += bytes;
    comm->mpi->watch = mti_stopwatch_start(comm->group->timeout);
    return MT_SUCCESS;
}

/* Starts to receive the peer's header, and sends this rank's header to the peer. */
static mti_mpi_lane mti_mpi_lane_open(mt_comm *comm, const mti_call *call, int sends, int at) {
    mti_mpi *m = comm->mpi;
    mti_mpi_lane lane;
    memset(&lane, 0, sizeof lane);
    lane.sends = sends;
    lane.at = at;
    lane.peer = sends ? call->root : call->source;
    if (lane.peer < 0) return lane;
    lane.bytes = (sends ? call->count : call->recvcount) * mt_dtype_size(call->dtype);
    lane.data = sends ? (char *)mt_tensor_make(call->send, call->dtype, 0, 0).data : (char *)call->recv;
    lane.header = sends ? m->asked : &m->in[lane.peer];
    mti_mpi_expect(comm, at, sends ? m->asked : &m->in[lane.peer], lane.peer, sends ? MTI_MPI_ASK : MTI_MPI_OFFER);
    mti_mpi_send(comm, at + 1, m->out, sends ? mti_mpi_write(comm, call, lane.bytes) : MTI_MPI_HEADER, lane.peer,
                 sends ? MTI_MPI_OFFER : MTI_MPI_ASK);
    return lane;
}

/* Runs the send and the receive of a call at the same time, each in its own lane. */
static mt_status mti_mpi_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_mpi_lane out, in;
    mti_mpi_listen(comm->mpi->port);
    if (mti_is_broken(comm->group)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_P2P);
    mti_mpi_write(comm, call, 0);
    mti_mpi_begin(comm);
    out = mti_mpi_lane_open(comm, call, 1, 0);
    in = mti_mpi_lane_open(comm, call, 0, 2);
    while (!mti_mpi_is_over(comm, &out) || !mti_mpi_is_over(comm, &in)) {
        MT_TRY(mti_mpi_step(ctx, comm));
        MT_TRY(mti_mpi_advance(ctx, comm, call, &out));
        MT_TRY(mti_mpi_advance(ctx, comm, call, &in));
    }
    mti_mpi_exit(comm);
    return comm->mpi->error ? mti_mpi_error(ctx, comm) : MT_SUCCESS;
}

static mt_status mti_mpi_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (ctx->device != MT_DEVICE_CPU)
        return mti_refuse(
            ctx, comm, MT_ERR_UNSUPPORTED,
            "mt_%s: \"%s\" (%d ranks) is over MPI, which moves memory of the host, and the context is on device "
            "%d: use mt_comm_create_for, and an implementation built with -DMT_USE_NCCL",
            mti_call_name(call->kind), comm->name, comm->size, (int)ctx->device);
    return mti_is_p2p(call) ? mti_mpi_p2p(ctx, comm, call) : mti_mpi_collective(ctx, comm, call);
}

/* -- groups and ports -- */

static void mti_mpi_free(mti_mpi *m) {
    if (!m) return;
    free(m->world);
    free(m->indices);
    free(m->statuses);
    free(m->requests);
    free(m->about);
    free(m->reasons);
    free(m->notice_requests);
    free(m->in);
    free(m->scratch);
    free(m);
}

/* Allocates the arrays for a group of `size` ranks; NULL: out of memory. A collective needs two requests per peer, and
   a send_recv needs four. */
static mti_mpi *mti_mpi_new(int size) {
    size_t n = (size_t)size, requests = 2 * n > 4 ? 2 * n : 4, i;
    mti_mpi *m = (mti_mpi *)calloc(1, sizeof *m);
    if (!m) return NULL;
    m->world = (int *)calloc(n, sizeof *m->world);
    m->indices = (int *)calloc(requests, sizeof *m->indices);
    m->statuses = (MPI_Status *)calloc(requests, sizeof *m->statuses);
    m->requests = (MPI_Request *)calloc(requests, sizeof *m->requests);
    m->about = (mti_mpi_about *)calloc(requests, sizeof *m->about);
    m->reasons = (mti_mpi_notice *)calloc(n, sizeof *m->reasons);
    m->notice_requests = (MPI_Request *)calloc(2 * n, sizeof *m->notice_requests);
    m->in = (mti_mpi_message *)mti_default_alloc(NULL, (n + 3) * sizeof *m->in, MT_ALIGNMENT);
    m->scratch = (char *)mti_default_alloc(NULL, MTI_MPI_SCRATCH, MT_ALIGNMENT);
    if (!m->world || !m->indices || !m->statuses || !m->requests || !m->about || !m->reasons || !m->notice_requests ||
        !m->in || !m->scratch) {
        mti_mpi_free(m);
        return NULL;
    }
    m->out = m->in + n;
    m->asked = m->out + 1;
    m->other = m->asked + 1;
    memset(m->out, 0, sizeof *m->out);
    for (i = 0; i < requests; i++) m->requests[i] = MPI_REQUEST_NULL;
    for (i = 0; i < 2 * n; i++) m->notice_requests[i] = MPI_REQUEST_NULL;
    m->size = size;
    return m;
}

/* Creates a communicator and its group. The caller fills mti_mpi.world. */
static mt_comm *mti_mpi_comm_new(const mti_transport *transport, mti_mpi_port *port, int rank, int size,
                                 const char *name, int number) {
    mt_comm *comm = mti_comm_new(transport, rank, size, name);
    mti_group *g = mti_group_new(size, port->timeout, port->spin);
    mti_mpi *m = mti_mpi_new(size);
    if (!comm || !g || !m) {
        if (g) g->references = 1;
        mti_group_release(g);
        mti_mpi_free(m);
        free(comm);
        return NULL;
    }
    g->references = 1;
    comm->group = g;
    comm->mpi = m;
    m->port = port;
    m->comm = comm;
    m->number = number;
    m->next = port->groups;
    port->groups = m;
    port->references++;
    return comm;
}

static void mti_mpi_port_free(mti_mpi_port *port) {
    free(port->status);
    free(port->versions);
    free(port->left);
    free(port->reasons);
    free(port->early);
    free(port->closing_requests);
    free(port);
}

static mti_mpi_port *mti_mpi_port_new(int rank, int size, double timeout_s) {
    size_t n = (size_t)size, i;
    mti_mpi_port *port = (mti_mpi_port *)calloc(1, sizeof *port);
    if (!port) return NULL;
    port->rank = rank;
    port->size = size;
    port->timeout = timeout_s > 0 ? timeout_s : MT_TIMEOUT_DEFAULT;
    port->next = 1;
    port->inbox_request = MPI_REQUEST_NULL;
    port->status = (int *)calloc(n, sizeof *port->status);
    port->versions = (int32_t *)calloc(n, sizeof *port->versions);
    port->left = (const char **)calloc(n, sizeof *port->left);
    port->reasons = (mti_mpi_notice *)calloc(n, sizeof *port->reasons);
    port->early = (mti_mpi_notice *)calloc(2 * n, sizeof *port->early);
    port->closing_requests = (MPI_Request *)calloc(n, sizeof *port->closing_requests);
    if (!port->status || !port->versions || !port->left || !port->reasons || !port->early || !port->closing_requests) {
        mti_mpi_port_free(port);
        return NULL;
    }
    for (i = 0; i < n; i++) {
        port->status[i] = MTI_MPI_OPEN;
        port->closing_requests[i] = MPI_REQUEST_NULL;
    }
    return port;
}

/* The number of the new groups is one that no rank of comm has used. All groups of a split have the same number, also
   on ranks that are in none of these groups. */
static mt_status mti_mpi_split(mt_comm *comm, int color, int key, mt_comm **out) {
    mti_mpi *m = comm->mpi;
    int rank, size, leader, r, at, number = m->port->next;
    char name[32];
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = MTI_SPLIT;
    call.color = color;
    call.key = key;
    m->port->early_count = 0;
    MT_TRY(mti_mpi_enter(NULL, comm, &call));
    mti_mpi_exit(comm);
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
                     : mti_mpi_comm_new(comm->transport, m->port, rank, size, name, number);
    if (!*out || size == 1) return MT_SUCCESS; /* *out is NULL: mt_comm_split returns MT_ERR_MEMORY */
    for (r = 0; r < comm->size; r++) {
        if (mti_slot_of(comm->group, r)->color != color) continue;
        mti_split_member(comm, r, &at, &size, &leader);
        (*out)->mpi->world[at] = m->world[r];
        if (m->port->left[m->world[r]]) mti_mpi_take_left((*out)->mpi, at, m->port->left[m->world[r]]);
    }
    for (r = 0; r < m->port->early_count; r++) mti_mpi_take_notice(m->port, &m->port->early[r]);
    return MT_SUCCESS;
}

/* -- ending -- */

/* Returns 1 when all requests are complete. */
static int mti_mpi_all_done(MPI_Request *requests, int count) {
    int done = 1, i;
    for (i = 0; i < count && done; i++) MPI_Test(&requests[i], &done, MPI_STATUS_IGNORE);
    return done;
}

/* Frees the destroyed groups whose requests are complete: before that, MPI may use their memory. */
static void mti_mpi_reap(mti_mpi_port *port) {
    struct mti_mpi **at = &port->ended, *m;
    while ((m = *at) != NULL) {
        if (!mti_mpi_all_done(m->requests, m->count) || !mti_mpi_all_done(m->notice_requests, 2 * m->size)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        mti_mpi_free(m);
    }
}

/* Tells all ranks of the port that this rank closes its port, and waits until they have closed theirs. Returns 1 when
   all have done so, and MPI holds no memory of any rank. */
static int mti_mpi_close(mti_mpi_port *port, mt_status status) {
    double limit = port->broken ? MTI_MPI_GRACE : port->timeout;
    mti_stopwatch watch = mti_stopwatch_start(limit);
    mti_mpi_notice *notice = &port->closing;
    int r;
    notice->news = MTI_MPI_CLOSES;
    notice->rank = port->rank;
    notice->status = port->status[port->rank] = (int)status;
    notice->keeps = port->keeps;
    notice->broken = port->broken;
    port->closed++;
    for (r = 0; r < port->size; r++)
        if (r != port->rank)
            MPI_Isend(notice, (int)sizeof *notice, MPI_BYTE, r, 0, port->comm, &port->closing_requests[r]);
    while (port->waited < limit) {
        mti_mpi_listen(port);
        mti_mpi_reap(port);
        if (mti_mpi_all_done(port->closing_requests, port->size) && !port->ended && port->closed == port->size)
            return !port->keeps;
        port->waited = mti_waited(&watch);
        mti_rest(port->waited, MTI_MPI_SOON);
    }
    return 0;
}

/* Frees the port if all ranks have closed. Otherwise the port stays until the process ends, because MPI may still write
   to it. The duplicate is not freed when it may have messages that no rank has received: the next duplicate might
   receive them. */
static void mti_mpi_port_end(mti_mpi_port *port, int closed) {
    if (!closed) return;
    if (port->inbox_request != MPI_REQUEST_NULL) {
        MPI_Cancel(&port->inbox_request);
        MPI_Wait(&port->inbox_request, MPI_STATUS_IGNORE);
    }
    if (!port->broken) MPI_Comm_free(&port->comm);
    mti_mpi_port_free(port);
}

/* Destroys a group, and with the last group the port. */
static void mti_mpi_destroy(mt_comm *comm) {
    mti_mpi *m = comm->mpi, **at;
    mti_mpi_port *port = m->port;
    if (mti_is_forked(comm->process)) return;
    for (at = &port->groups; *at != m; at = &(*at)->next) continue;
    *at = m->next;
    m->next = port->ended;
    port->ended = m;
    m->comm = NULL;
    mti_mpi_reap(port);
    if (--port->references == 0) mti_mpi_port_end(port, mti_mpi_close(port, MT_SUCCESS));
}

static const mti_transport mti_over_mpi = {1,
                                           0,
                                           mti_peers_check,
                                           mti_mpi_call,
                                           mti_mpi_call,
                                           mti_mpi_enter,
                                           mti_mpi_exit,
                                           mti_mpi_split,
                                           mti_mpi_leave,
                                           mti_mpi_destroy};

/* -- creating -- */

/* Waits for the end of a request of the opening. */
static mt_status mti_mpi_opened(const mti_mpi_port *port, MPI_Request *request) {
    mti_stopwatch watch = mti_stopwatch_start(port->timeout);
    int done = 0;
    while (!done) {
        if (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return MT_ERR_SYSTEM;
        if (!done && mti_waited(&watch) > port->timeout) return MT_ERR_TIMEOUT;
        if (!done) mti_rest(watch.waited, 1e-3);
    }
    return MT_SUCCESS;
}

/* Compares the versions of all ranks before any other message, as other versions may have other messages. After an
   error MPI may use the memory, which is therefore that of the port. */
static mt_status mti_mpi_versions(mti_mpi_port *port, mti_text *text) {
    MPI_Request request = MPI_REQUEST_NULL;
    int r;
    port->version = MT_VERSION_NUMBER;
    if (MPI_Iallgather(&port->version, (int)sizeof port->version, MPI_BYTE, port->versions, (int)sizeof port->version,
                       MPI_BYTE, port->comm, &request) != MPI_SUCCESS)
        return MT_ERR_SYSTEM;
    MT_TRY(mti_mpi_opened(port, &request));
    for (r = 1; r < port->size && port->versions[r] == port->versions[0]; r++) continue;
    if (r == port->size) return MT_SUCCESS;
    mti_say_versions(text, port->versions[0], r, port->versions[r]);
    return MT_ERR_MISMATCH;
}

/* Duplicates the caller's MPI_Comm. MPI returns errors on the duplicate, they are not fatal. text: what is wrong with
   MT_ERR_MISMATCH */
static mt_status mti_mpi_open(mti_mpi_port *port, MPI_Comm theirs, mti_text *text) {
    MPI_Request request = MPI_REQUEST_NULL;
    int found = 0, *last = NULL;
    if (MPI_Comm_idup(theirs, &port->comm, &request) != MPI_SUCCESS) return MT_ERR_SYSTEM;
    MT_TRY(mti_mpi_opened(port, &request));
    if (MPI_Comm_set_errhandler(port->comm, MPI_ERRORS_RETURN) != MPI_SUCCESS ||
        MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &last, &found) != MPI_SUCCESS || !found)
        return MT_ERR_SYSTEM;
    port->last_tag = *last;
    MT_TRY(mti_mpi_versions(port, text));
    return mti_mpi_open_inbox(port) == MPI_SUCCESS ? MT_SUCCESS : MT_ERR_SYSTEM;
}

/* Finds out which ranks run on this machine, and sets local_rank and port->spin: all ranks exchange a hash of their
   processor name. */
static mt_status mti_mpi_neighbours(mt_comm *world) {
    char name[MPI_MAX_PROCESSOR_NAME];
    mti_mpi_port *port = world->mpi->port;
    uint32_t hash = 2166136261u; /* FNV-1a */
    int length = 0, i, here = 0, mine;
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = MTI_CREATE;
    if (MPI_Get_processor_name(name, &length) != MPI_SUCCESS) length = 0;
    for (i = 0; i < length; i++) hash = (hash ^ (unsigned char)name[i]) * 16777619u;
    call.color = mine = (int)(hash >> 1);
    MT_TRY(mti_mpi_enter(NULL, world, &call));
    mti_mpi_exit(world);
    for (i = 0; i < world->size; i++) {
        if (mti_slot_of(world->group, i)->color != mine) continue;
        if (i == world->rank) port->local_rank = here;
        here++;
    }
    for (i = 0; i < world->size; i++) mti_slot_of(world->group, i)->what = 0; /* no message names this call */
    port->spin = here <= (int)sysconf(_SC_NPROCESSORS_ONLN);
    world->local_rank = port->local_rank;
    return MT_SUCCESS;
}

/* Whether this process was forked, and has neither called exec nor started a thread since. MPI knows no such process,
   and has none of its threads there. (A process that calls MPI_Init itself after the fork has them.) Only Linux tells;
   elsewhere the answer is 0. The numbers are the 9th and the 20th of proc_pid_stat(5). */
static int mti_is_bare_fork(void) {
    const unsigned forked_no_exec = 0x40; /* PF_FORKNOEXEC */
    char text[1024], *at;
    unsigned flags = 0;
    long threads = 0;
    FILE *file = fopen("/proc/self/stat", "r");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = '\0';
    if (file) fclose(file);
    at = strrchr(text, ')'); /* the name of the program may have blanks */
    return at &&
           sscanf(at + 1, " %*c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld", &flags,
                  &threads) == 2 &&
           (flags & forked_no_exec) && threads == 1;
}

/* Refuses to connect a process that was forked from a rank. */
static mt_status mti_mpi_not_forked(mti_text *text) {
    if (!mti_is_bare_fork()) return MT_SUCCESS;
    mti_say(text,
            "process %ld was forked from process %ld, so it is no rank of MPI, and MPI does not work in it; start its "
            "ranks with mpirun or MPI_Comm_spawn",
            (long)getpid(), (long)getppid());
    return MT_ERR_UNSUPPORTED;
}

/* mt_comm_create_mpi. text is empty, or says what is wrong. */
static mt_status mti_mpi_create(const void *mpi_comm, double timeout_s, mt_comm **out, mti_text *text) {
    int begun = 0, ended = 0, rank = 0, size = 0, r;
    mti_mpi_port *port;
    MPI_Comm theirs;
    mt_comm *world;
    mt_status status;
    if (out) *out = NULL;
    if (!out || !mpi_comm || timeout_s != timeout_s) return MT_ERR_ARGUMENT;
    if (MPI_Initialized(&begun) != MPI_SUCCESS || MPI_Finalized(&ended) != MPI_SUCCESS || !begun || ended)
        return MT_ERR_ARGUMENT;
    memcpy(&theirs, mpi_comm, sizeof theirs);
    if (theirs == MPI_COMM_NULL) return MT_ERR_ARGUMENT;
    if (MPI_Comm_rank(theirs, &rank) != MPI_SUCCESS || MPI_Comm_size(theirs, &size) != MPI_SUCCESS)
        return MT_ERR_SYSTEM;
    if (size > MTI_MAX_RANKS) return MT_ERR_UNSUPPORTED;
    if (size == 1) return (*out = mti_comm_new(&mti_alone, 0, 1, "world")) != NULL ? MT_SUCCESS : MT_ERR_MEMORY;
    port = mti_mpi_port_new(rank, size, timeout_s);
    if (!port) return MT_ERR_MEMORY;
    status = mti_mpi_open(port, theirs, text);
    world = status == MT_SUCCESS ? mti_mpi_comm_new(&mti_over_mpi, port, rank, size, "world", port->next++) : NULL;
    if (!world) return status == MT_SUCCESS ? MT_ERR_MEMORY : status; /* not freed: MPI may use the port */
    for (r = 0; r < size; r++) world->mpi->world[r] = r;
    status = mti_mpi_neighbours(world);
    if (status == MT_SUCCESS) *out = world;
    else mt_comm_destroy(world);
    return status;
}

MT_API mt_status mt_comm_create_mpi(const void *mpi_comm, double timeout_s, mt_comm **out) {
    mti_text text;
    mt_status status;
    text.used = 0;
    status = out && mpi_comm ? mti_mpi_not_forked(&text) : MT_SUCCESS;
    if (status == MT_SUCCESS) status = mti_mpi_create(mpi_comm, timeout_s, out, &text);
    else *out = NULL;
    if (text.used) fprintf(stderr, "mt_comm_create_mpi: %s\n", text.data);
    return status;
}
#else /* not built */
MT_API mt_status mt_comm_create_mpi(const void *mpi_comm, double timeout_s, mt_comm **out) {
    if (out) *out = NULL;
    return (void)mpi_comm, (void)timeout_s, MT_ERR_UNSUPPORTED;
}
#endif
