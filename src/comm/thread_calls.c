/* ---- ranks that are threads: calls, sends and splits ------------------------------------------------------------- */

#pragma once
#include "alone.c"

typedef enum mti_arrival { MTI_WAITS, MTI_IS_LAST, MTI_TOO_LATE } mti_arrival;

/* Counts this rank as arrived at the current meeting, whose generation goes to *generation. The last rank starts the
   next generation. whatever: 1: also in a broken group */
static mti_arrival mti_arrive(mti_group *g, uint64_t *generation, int whatever) {
    uint64_t state = __atomic_load_n(&g->state, __ATOMIC_SEQ_CST), next;
    int last;
    do {
        if ((state & MTI_BROKEN) && !whatever) return MTI_TOO_LATE;
        *generation = state >> MTI_GENERATION;
        last = (int)(state >> 1 & 0x7fff) + 1 == g->size;
        next = last ? (*generation + 1) << MTI_GENERATION | (state & MTI_BROKEN) : state + MTI_ARRIVAL;
    } while (!__atomic_compare_exchange_n(&g->state, &state, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    if (last) mti_wake(g);
    return last ? MTI_IS_LAST : MTI_WAITS;
}

static mti_outcome mti_wait_meeting(mt_context *ctx, mt_comm *comm, uint64_t generation, int forever) {
    mti_group *g = comm->group;
    mti_wait w;
    w.word = &g->state;
    w.mask = ~(uint64_t)0 << MTI_GENERATION;
    w.value = generation << MTI_GENERATION;
    w.until_not = 1;
    w.rank = comm->rank;
    w.peer = -1;
    w.forever = forever;
    return mti_wait_aside(ctx, g, &w);
}

/* A meeting that cannot fail, because all ranks have passed mti_enter and are inside the same call. */
static void mti_meet(mt_comm *comm) {
    uint64_t generation;
    if (mti_arrive(comm->group, &generation, 1) == MTI_WAITS) mti_wait_meeting(NULL, comm, generation, 1);
}

/* Writes that a rank sends another one more or fewer elements of an all_to_all_v than this one receives. */
static void mti_say_counts(mti_text *text, const mt_comm *comm, int from, size_t sent, int to, size_t received) {
    text->used = 0;
    mti_say_call(text, mti_slot_of(comm->group, from));
    mti_say_where(text, comm);
    mti_say(text, "rank %d sends %zu elements to rank %d, which receives %zu", from, sent, to, received);
}

/* Compares the counts of an all_to_all_v. Each rank compares all of them, so all have the same result. After a mismatch
   they meet again: until then another rank may read the counts of this one. */
static mt_status mti_compare_counts(mt_context *ctx, mt_comm *comm) {
    const mti_group *g = comm->group;
    mti_text text;
    int from, to;
    if (!mti_slot_of(g, comm->rank)->sends) return MT_SUCCESS;
    for (from = 0; from < g->size; from++)
        for (to = 0; to < g->size; to++) {
            size_t sent = mti_slot_of(g, from)->sends[to], received = mti_slot_of(g, to)->recvs[from];
            if (sent == received) continue;
            mti_say_counts(&text, comm, from, sent, to, received);
            mti_break_mismatch(ctx, comm, &text);
            mti_meet(comm);
            return MT_ERR_MISMATCH;
        }
    return MT_SUCCESS;
}

static void mti_set_inside(mt_comm *comm, int inside) {
    __atomic_store_n(&mti_slot_of(comm->group, comm->rank)->inside, inside, __ATOMIC_RELEASE);
}

/* Compares the calls of all ranks. When they differ, every rank gets the same message. */
static mt_status mti_compare(mt_context *ctx, mt_comm *comm) {
    const mti_group *g = comm->group;
    mti_text text;
    int r = 1;
    while (r < g->size && mti_same_call(mti_slot_of(g, 0), mti_slot_of(g, r))) r++;
    if (r == g->size) return MT_SUCCESS;
    text.used = 0;
    mti_say_mismatch(&text, comm);
    return mti_break_mismatch(ctx, comm, &text);
}

/* The first meeting. After MT_SUCCESS every rank is in the same call and must call mti_exit. After an error this rank
   is not in the call, and no peer reads its buffers. */
static mt_status mti_enter(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_group *g = comm->group;
    uint64_t generation = 0;
    mt_status status = MT_SUCCESS;
    mti_arrival arrival;
    if (mti_is_broken(g)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_COLLECTIVE);
    arrival = mti_arrive(g, &generation, 0);
    if (arrival == MTI_TOO_LATE) status = mti_broken_before(ctx, comm, call);
    if (arrival == MTI_WAITS) {
        mti_outcome outcome = mti_wait_meeting(ctx, comm, generation, 0);
        if (outcome != MTI_MET) status = mti_give_up(ctx, comm, outcome, -1, generation);
    }
    if (status == MT_SUCCESS) status = mti_compare(ctx, comm);
    if (status == MT_SUCCESS) status = mti_compare_counts(ctx, comm);
    if (status == MT_SUCCESS && arrival == MTI_WAITS && mti_turn_is_lost(ctx))
        status = mti_break_failed(ctx, comm, call, MT_ERR_TIMEOUT);
    if (status != MT_SUCCESS) mti_set_inside(comm, MTI_OUTSIDE);
    return status;
}

static void mti_exit(mt_comm *comm) {
    mti_set_inside(comm, MTI_OUTSIDE);
    mti_meet(comm);
}

/* Before a call on a GPU: what is in the stream now comes before the parts of the peers. A collective over NCCL in the
   stream might never end. A peer would wait for it without a timeout, so this rank first waits with one. */
static mt_status mti_local_begin(mt_context *ctx, mt_comm *comm) {
    if (ctx->device != MT_DEVICE_CUDA) return MT_SUCCESS;
    if (!ctx->recording) MT_TRY(mt_cuda_wait_peers(ctx));
    return mti_cuda_record(ctx, &mti_slot_of(comm->group, comm->rank)->ready);
}

/* -- collectives -- */

/* A rank's part of a collective on a GPU. */
static mt_status mti_cuda_move(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    int r;
    for (r = 0; r < comm->size; r++)
        if (r != comm->rank) MT_TRY(mti_cuda_await(ctx, &mti_slot_of(comm->group, r)->ready));
    MT_TRY(mti_move(ctx, comm, call));
    return mti_cuda_record(ctx, &mti_slot_of(comm->group, comm->rank)->done);
}

/* After the second meeting of a collective on a GPU: later work comes after the parts of the peers. A rank that has
   failed (`status`) has set `failed` before this meeting, and has no event behind its part. The others return an
   error. */
static mt_status mti_cuda_moved(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    mt_status waits = MT_SUCCESS;
    int failed = 0, r;
    for (r = 0; r < comm->size; r++) {
        const mti_slot *slot = mti_slot_of(comm->group, r);
        failed |= slot->failed;
        if (r != comm->rank && !slot->failed) MT_KEEP(waits, mti_cuda_await(ctx, &slot->done));
    }
    if (status != MT_SUCCESS) return status;
    if (waits != MT_SUCCESS) return mti_break_failed(ctx, comm, call, waits);
    return failed ? mti_broken_now(ctx, comm) : MT_SUCCESS;
}

/* Each rank waits for its stream before the meeting. After it, the work of all ranks before the barrier is done. */
static mt_status mti_cuda_barrier(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mt_status status = mti_cuda_synchronize(ctx);
    if (status != MT_SUCCESS) return mti_break_failed(ctx, comm, call, status);
    MT_TRY(mti_enter(ctx, comm, call));
    mti_exit(comm);
    return MT_SUCCESS;
}

/* Between the two meetings a rank can fail only on a GPU. */
static mt_status mti_local_collective(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_slot *mine = mti_slot_of(comm->group, comm->rank);
    int on_gpu = ctx->device == MT_DEVICE_CUDA;
    mt_status status, turn;
    if (on_gpu && call->kind == MT_BARRIER) return mti_cuda_barrier(ctx, comm, call);
    status = mti_local_begin(ctx, comm);
    if (status != MT_SUCCESS) return mti_break_failed(ctx, comm, call, status);
    mine->ordinal = ctx->ordinal;
    MT_TRY(mti_enter(ctx, comm, call));
    status = on_gpu ? mti_cuda_move(ctx, comm, call) : mti_move(ctx, comm, call);
    mine->failed = status != MT_SUCCESS;
    if (status != MT_SUCCESS) mti_fail_inside(ctx, comm, call, status);
    mti_turn_give(ctx);
    mti_exit(comm);
    turn = mti_turn_take(ctx);
    if (turn != MT_SUCCESS) return mti_break_failed(ctx, comm, call, turn);
    return on_gpu ? mti_cuda_moved(ctx, comm, call, status) : status;
}

/* -- point to point -- */

static mti_wait mti_wait_outbox(const mti_slot *slot, uint64_t value, int until_not, int peer, int forever) {
    mti_wait w;
    w.word = &slot->outbox;
    w.mask = ~(uint64_t)0;
    w.value = value;
    w.until_not = until_not;
    w.peer = peer;
    w.rank = -1;
    w.forever = forever;
    return w;
}

static void mti_outbox_set(mti_group *g, mti_slot *slot, uint64_t value) {
    __atomic_store_n(&slot->outbox, value, __ATOMIC_SEQ_CST);
    mti_wake(g);
}

static void mti_post(mt_comm *comm, const mti_call *call) {
    mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    slot->send_count = call->count;
    slot->send_dtype = call->dtype;
    mti_outbox_set(comm->group, slot, mti_outbox(call->root, MTI_POSTED));
}

static void mti_say_unlike(mti_text *text, const mt_comm *comm, int from, int to) {
    text->used = 0;
    mti_say(text, "recv");
    mti_say_where(text, comm);
    mti_say_two(text, comm->group, from, to);
}

static mt_status mti_take_mismatch(mt_context *ctx, mt_comm *comm, int source) {
    mti_group *g = comm->group;
    mti_text text;
    mti_say_unlike(&text, comm, source, comm->rank);
    mti_break_mismatch(ctx, comm, &text);
    mti_outbox_set(g, mti_slot_of(g, source), mti_outbox(comm->rank, MTI_REFUSED));
    return MT_ERR_MISMATCH;
}

/* Copies the message that is posted in a slot. On a GPU the copy is in the stream. */
static mt_status mti_copy_message(mt_context *ctx, const mti_call *call, mti_slot *slot) {
    size_t bytes = call->recvcount * mt_dtype_size(call->dtype);
    if (ctx->device == MT_DEVICE_CUDA) MT_TRY(mti_cuda_await(ctx, &slot->ready));
    MT_TRY(mti_bytes_copy(ctx, call->recv, slot->send, bytes));
    return ctx->device == MT_DEVICE_CUDA ? mti_cuda_record(ctx, &slot->taken) : MT_SUCCESS;
}

/* Says from which rank this one awaits a message. -1: none */
static void mti_await(mt_comm *comm, int source) {
    __atomic_store_n(&mti_slot_of(comm->group, comm->rank)->awaited, source + 1, __ATOMIC_SEQ_CST);
}

/* Receives: waits until the source has posted a message for this rank, copies it, and updates the source's outbox. */
static mt_status mti_take(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_group *g = comm->group;
    mti_slot *slot = mti_slot_of(g, call->source);
    uint64_t posted;
    mt_status status;
    mti_await(comm, call->source);
    do { /* the exchange fails when the sender has given up: it then breaks the group, which ends the next wait */
        mti_wait w = mti_wait_outbox(slot, mti_outbox(comm->rank, MTI_POSTED), 0, call->source, 0);
        mti_outcome outcome = mti_wait_aside(ctx, g, &w);
        mti_await(comm, -1); /* before the sender can go on */
        if (outcome != MTI_MET) return mti_give_up(ctx, comm, outcome, call->source, MTI_ANY);
        posted = w.value;
    } while (!__atomic_compare_exchange_n(&slot->outbox, &posted, mti_outbox(comm->rank, MTI_TAKEN), 0,
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    if (slot->send_count != call->recvcount || slot->send_dtype != call->dtype ||
        mti_is_on_meta(slot) != (ctx->device == MT_DEVICE_META))
        return mti_take_mismatch(ctx, comm, call->source);
    status = mti_copy_message(ctx, call, slot);
    if (status != MT_SUCCESS) mti_fail_inside(ctx, comm, call, status);
    mti_outbox_set(g, slot, mti_outbox(comm->rank, status == MT_SUCCESS ? MTI_DONE : MTI_REFUSED));
    return status;
}

/* Waits until the receiver has copied the posted message, or on a GPU has put the copy into its stream. After an error
   of this wait, or of the receive of the same call (`status`), withdraws the message; when the receiver is already
   copying, waits until the copy is done. */
static mt_status mti_finish_send(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    mti_group *g = comm->group;
    mti_slot *slot = mti_slot_of(g, comm->rank);
    uint64_t posted = mti_outbox(call->root, MTI_POSTED), end;
    mt_status sent = MT_SUCCESS;
    mti_wait w = mti_wait_outbox(slot, posted, 1, call->root, 0);
    mti_outcome outcome = status == MT_SUCCESS ? mti_wait_aside(ctx, g, &w) : MTI_SEES_BROKEN;
    if (outcome != MTI_MET &&
        __atomic_compare_exchange_n(&slot->outbox, &posted, (uint64_t)0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return status != MT_SUCCESS ? status : mti_give_up(ctx, comm, outcome, call->root, MTI_ANY);
    w = mti_wait_outbox(slot, mti_outbox(call->root, MTI_TAKEN), 1, call->root, 1);
    mti_wait_aside(ctx, g, &w);
    end = __atomic_load_n(&slot->outbox, __ATOMIC_SEQ_CST) & 7;
    __atomic_store_n(&slot->outbox, (uint64_t)0, __ATOMIC_SEQ_CST);
    if (mti_turn_is_lost(ctx)) sent = MT_ERR_TIMEOUT;
    else if (end == MTI_DONE && ctx->device == MT_DEVICE_CUDA) sent = mti_cuda_await(ctx, &slot->taken);
    if (sent != MT_SUCCESS) mti_break_failed(ctx, comm, call, sent);
    MT_KEEP(status, sent);
    if (status != MT_SUCCESS || end == MTI_DONE) return status;
    return mti_broken_now(ctx, comm);
}

static mt_status mti_local_p2p(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mt_status status = mti_local_begin(ctx, comm);
    if (status != MT_SUCCESS) return mti_break_failed(ctx, comm, call, status);
    if (mti_is_broken(comm->group)) return mti_broken_before(ctx, comm, call);
    mti_publish(ctx, comm, call, MTI_IN_P2P);
    if (call->root >= 0) mti_post(comm, call);
    if (call->source >= 0) status = mti_take(ctx, comm, call);
    if (call->root >= 0) status = mti_finish_send(ctx, comm, call, status);
    mti_set_inside(comm, MTI_OUTSIDE);
    return status;
}

/* -- leaving and splitting -- */

static void mti_leave(mt_comm *comm, const char *reason) {
    if (!mti_is_forked(comm->process)) (comm->transport->leave)(comm, reason);
}

/* Returns 0 when this rank has left before, else 1. */
static int mti_mark_left(mt_comm *comm, const char *reason) {
    mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    if (__atomic_load_n(&slot->left, __ATOMIC_SEQ_CST)) return 0;
    __atomic_store_n(&slot->left, reason, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&comm->group->left_count, 1, __ATOMIC_SEQ_CST);
    return 1;
}

static void mti_local_leave(mt_comm *comm, const char *reason) {
    if (mti_mark_left(comm, reason)) mti_wake(comm->group);
}

static void mti_comm_free(mt_comm *comm) {
    mti_group_release(comm->group);
    free(comm);
}

/* Leaves the group, and destroys comm unless comm is the world of a launched rank. */
static void mti_comm_end(mt_comm *comm) {
    struct mti_rank *owner;
    mt_comm **at;
    mti_leave(comm, "has left the group");
    owner = comm->owner;
    if (owner) {
        if (comm == owner->world) return; /* mt_launch or mt_world_from_env destroys it */
        for (at = &owner->children; *at != comm; at = &(*at)->next) continue;
        *at = comm->next;
        owner->leaving = 1;
    }
    (comm->transport->destroy)(comm);
    if (owner) owner->leaving = 0;
    mti_comm_free(comm);
}

MT_API void mt_comm_destroy(mt_comm *comm) {
    int before = mti_hold();
    if (comm) mti_comm_end(comm);
    mti_release(before);
}

/* Makes child belong to the same launched rank as parent, which it was created from. */
static void mti_adopt(mt_comm *parent, mt_comm *child) {
    child->local_rank = parent->local_rank;
    child->owner = parent->owner;
    if (!parent->owner) return;
    child->next = parent->owner->children;
    parent->owner->children = child;
}

/* Computes the place of rank `of` in its new group: its rank there, the group's size, and the leader, which is the
   lowest rank in comm with the same color. */
static void mti_split_member(const mt_comm *comm, int of, int *rank, int *size, int *leader) {
    const mti_slot *mine = mti_slot_of(comm->group, of);
    int r;
    *rank = *size = 0;
    *leader = -1;
    for (r = 0; r < comm->size; r++) {
        const mti_slot *slot = mti_slot_of(comm->group, r);
        if (slot->color != mine->color) continue;
        if (*leader < 0) *leader = r;
        *rank += slot->key < mine->key || (slot->key == mine->key && r < of);
        ++*size;
    }
}

/* Creates all communicators of a new group, or none. threads: the transport of a group of two or more; parent: the
   group that is split; NULL: none */
static mt_status mti_family_new(const mti_transport *threads, int size, double timeout, int spin, mti_group *parent,
                                const char *name, mt_comm **comms) {
    mti_group *g = size > 1 ? mti_group_new(size, timeout, spin) : NULL;
    int r, made = 0;
    if (size > 1 && !g) return MT_ERR_MEMORY;
    while (made < size && (comms[made] = mti_comm_new(g ? threads : &mti_alone, made, size, name)) != NULL) made++;
    if (made < size) {
        for (r = 0; r < made; r++) free(comms[r]);
        if (g) g->references = 1;
        mti_group_release(g);
        return MT_ERR_MEMORY;
    }
    for (r = 0; r < size; r++) comms[r]->group = g;
    if (g && parent) {
        g->root = mti_root_of(parent);
        __atomic_add_fetch(&g->root->references, 1, __ATOMIC_RELAXED);
    }
    return MT_SUCCESS;
}

/* Creates all communicators of one color's group; NULL: out of memory. The caller frees the array. */
static mt_comm **mti_split_family(const mt_comm *comm, int size, int color) {
    mt_comm **family = (mt_comm **)calloc((size_t)size, sizeof *family);
    char name[32];
    if (snprintf(name, sizeof name, "%s/%d", comm->name, color) < 0) name[0] = '\0';
    if (!family) return NULL;
    if (mti_family_new(comm->transport, size, comm->group->timeout, comm->group->spin, comm->group, name, family) ==
        MT_SUCCESS)
        return family;
    free(family);
    return NULL;
}

/* Splits between mti_enter and mti_exit: the leader of each color creates the group's communicators, and after a
   meeting each rank takes its own. */
static mt_comm *mti_split(mt_comm *comm, int color) {
    mti_slot *slot = mti_slot_of(comm->group, comm->rank);
    mt_comm **family = NULL, *out = NULL;
    int rank, size, leader;
    mti_split_member(comm, comm->rank, &rank, &size, &leader);
    if (leader == comm->rank) slot->family = color < 0 ? NULL : mti_split_family(comm, size, color);
    mti_meet(comm);
    if (color >= 0) family = mti_slot_of(comm->group, leader)->family;
    if (family) out = family[rank];
    mti_exit(comm);
    if (leader == comm->rank) free(family);
    return out;
}

static mt_status mti_local_split(mt_comm *comm, int color, int key, mt_comm **out) {
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = MTI_SPLIT;
    call.color = color;
    call.key = key;
    MT_TRY(mti_enter(NULL, comm, &call));
    *out = mti_split(comm, color);
    return MT_SUCCESS;
}

static mt_status mti_comm_split(mt_comm *comm, int color, int key, mt_comm **out) {
    if (!out) return mti_refuse(NULL, comm, MT_ERR_ARGUMENT, "mt_comm_split: out is NULL");
    MT_TRY(mti_check_process(NULL, comm, "comm_split"));
    MT_TRY((comm->transport->split)(comm, color < 0 ? -1 : color, key, out));
    if (color < 0) return MT_SUCCESS;
    if (!*out)
        return mti_refuse(NULL, comm, MT_ERR_MEMORY, "mt_comm_split: no memory for the group of color %d", color);
    mti_adopt(comm, *out);
    return MT_SUCCESS;
}

/* The limit of thread blocks for collectives in a stream; 0: none */
static int mti_stream_ctas(const mt_context *ctx, mt_stream stream) {
    int second = stream == MT_STREAM_SECOND, asked;
    if (!ctx || stream == MT_STREAM_NONE) return 0;
    asked = second ? ctx->nccl_options.second_ctas : ctx->nccl_options.third_ctas;
    return asked < 0 ? 0 : asked > 0 ? asked : second ? MT_SECOND_CTAS : MT_THIRD_CTAS;
}

MT_API mt_status mt_comm_split_for(mt_comm *comm, int color, int key, mt_stream stream, mt_comm **out) {
    int before;
    mt_status status;
    if (out) *out = NULL;
    if (!comm) return MT_ERR_ARGUMENT;
    if (stream < MT_STREAM_NONE || stream > MT_STREAM_THIRD)
        return mti_refuse(NULL, comm, MT_ERR_ARGUMENT, "mt_comm_split_for: stream is %d, must be %d to %d", (int)stream,
                          (int)MT_STREAM_NONE, (int)MT_STREAM_THIRD);
    before = mti_hold();
    comm->nccl.split_ctas = mti_stream_ctas(comm->nccl.home, stream);
    status = mti_comm_split(comm, color, key, out);
    comm->nccl.split_ctas = 0;
    mti_release(before);
    return status;
}

MT_API mt_status mt_comm_split(mt_comm *comm, int color, int key, mt_comm **out) {
    return mt_comm_split_for(comm, color, key, MT_STREAM_NONE, out);
}

static const mti_transport mti_threads = {1,         1,        mti_no_check,    mti_local_collective, mti_local_p2p,
                                          mti_enter, mti_exit, mti_local_split, mti_local_leave,      mti_no_destroy};

MT_API mt_status mt_comm_create_local(int ranks, double timeout_s, mt_comm **comms) {
    int r, spin;
    mt_status status;
    if (!comms || ranks < 1 || ranks > MTI_MAX_RANKS || timeout_s != timeout_s) return MT_ERR_ARGUMENT;
    spin = ranks <= mti_allowed_cores(NULL, 0);
    status =
        mti_family_new(&mti_threads, ranks, timeout_s > 0 ? timeout_s : MT_TIMEOUT_DEFAULT, spin, NULL, "world", comms);
    for (r = 0; status != MT_SUCCESS && r < ranks; r++) comms[r] = NULL;
    return status;
}
