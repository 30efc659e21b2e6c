/* ---- the rules of communication ---------------------------------------------------------------------------------- */

#pragma once
#include "rules.c"

/* Sets *r to a rule that one operand must fit. */
static void mti_ruling_of(mti_ruling *r, const mti_checker *c, const char *where, const mt_rule *rule,
                          const mt_operand *operand) {
    r->checker = c;
    r->where = where;
    r->rule = rule;
    r->with = NULL;
    r->over_all = 0;
    r->count = 1;
    r->operands[0].operand = operand;
    r->operands[0].gradient_of = -1;
    r->operands[0].known = mti_known_of(c, operand->t);
}

static mt_operand mti_operand_of(const char *name, mt_tensor t, int use) {
    mt_operand o;
    o.name = name;
    o.t = t;
    o.use = use;
    return o;
}

/* Notes what y is after communication from x. */
static mt_status mti_move_note(mt_context *ctx, const mti_known *x_known, mt_tensor x, mt_tensor y,
                               const unsigned char *may, int zero, const char *where) {
    MT_TRY(mti_placement_note(ctx, y, may, zero, where, x_known->with));
    if (x_known->some_columns && x.cols == y.cols) mti_columns_note(ctx->checker, y);
    if (x_known->is_gradient) mti_gradient_note(ctx->checker, y);
    return MT_SUCCESS;
}

/* In a group of one, y is a copy of x. */
static mt_status mti_moved(mt_context *ctx, const char *where, mt_tensor x, mt_tensor y) {
    mti_known k = mti_known_of(ctx->checker, x);
    if (!mti_has_elements(y) || y.data == x.data) return MT_SUCCESS;
    return k.unwritten ? mti_forget_view(ctx, y) : mti_move_note(ctx, &k, x, y, k.may, k.zero, where);
}

/* Tells the listener of communication from x, the operand of the ruling, to y, which may be x or have no elements. */
static void mti_notify_move(mt_context *ctx, const mti_ruling *r, const mt_operand *y) {
    const mti_placed *p = r->operands[0].known.parameter;
    mt_operand told[2];
    int in_place;
    told[0] = *r->operands[0].operand;
    told[1] = *y;
    in_place = y->t.data == told[0].t.data && y->t.rows == told[0].t.rows && y->t.cols == told[0].t.cols;
    if (in_place) told[0].use |= MT_ARG_OUT;
    mti_notify(ctx, r->where, p ? p->name : NULL, told, in_place || !mti_has_elements(y->t) ? 1 : 2);
}

/* Refuses a sum over a group over which nothing is known about x, when x is a sum over groups of other ranks. */
static mt_status mti_sum_check(mt_context *ctx, const mti_ruling *r, int g) {
    const mti_known *k = &r->operands[0].known;
    char hint[400];
    int64_t ranks = 1;
    int other;
    if (k->zero || k->may[g] != MTI_ALL_PLACEMENTS) return MT_SUCCESS;
    for (other = 0; other < ctx->checker->count; other++)
        if (k->may[other] == 1 << MT_PARTIAL) ranks *= ctx->checker->axes[other].size;
    mti_group_hint(r, g, 1 << MT_PARTIAL, hint, sizeof hint);
    if (!hint[0] || (!ctx->checker->axes[g].is_named && ranks == ctx->checker->axes[g].size)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s over \"%s\" of %s%s", r->where, ctx->checker->axes[g].name,
                   r->operands[0].operand->name, hint);
}

/* Checks that one of the cases fits x on a group. y then becomes `becomes` there, and what x is on the other groups. */
static mt_status mti_move_check(mt_context *ctx, const mt_comm *comm, const char *where, const char *cases,
                                char becomes, const mt_operand *from, const mt_operand *to) {
    mt_rule rule = {"x", cases, NULL};
    unsigned char results[MTI_RULE_OPERANDS], may[MTI_AXES];
    mt_tensor x = from->t, y = to->t;
    mti_axes axes;
    mti_known read;
    mti_ruling r;
    int i;
    if (!mt_check_mode(ctx) || !mti_has_elements(x)) return MT_SUCCESS;
    axes = mti_axes_of(ctx->checker, comm, 1);
    if (axes.count == 0) return mti_moved(ctx, where, x, y);
    mti_ruling_of(&r, ctx->checker, where, &rule, from);
    if (from->use & MT_ARG_GRADIENT) r.operands[0].known.is_gradient = 1;
    MT_TRY(mti_slots_check(ctx, &r));
    MT_TRY(mti_slot_check(ctx, where, NULL, to->name, y));
    MT_TRY(mti_written_check(ctx, &r));
    read = r.operands[0].known;
    memcpy(may, r.operands[0].known.may, sizeof may);
    for (i = 0; i < axes.count; i++) {
        int g = axes.at[i];
        if (strcmp(cases, "P") == 0) MT_TRY(mti_sum_check(ctx, &r, g));
        MT_TRY(mti_rule_axis(ctx, &r, g, results));
        if (mti_has_elements(y) && y.rows > x.rows && mti_extents_meet(mti_extent_of(x), mti_extent_of(y)))
            read.may[g] = MTI_ALL_PLACEMENTS; /* a gather in place: each rank reads its own part of the whole */
        may[g] = (unsigned char)mti_letter_set(becomes);
    }
    MT_TRY(mti_replica_read(ctx, where, NULL, from, &read));
    if (mti_has_elements(y)) MT_TRY(mti_move_note(ctx, &r.operands[0].known, x, y, may, 0, where));
    mti_notify_move(ctx, &r, to);
    return MT_SUCCESS;
}

/* The rules of the conjugates: what x is on the group, and what y, or x in place, becomes. */
static mt_status mti_region_check(mt_context *ctx, const mt_comm *comm, const char *where, char is, char becomes,
                                  int is_gradient, const char *x_name, mt_tensor x, mt_tensor y) {
    const mt_operand from = mti_operand_of(x_name, x, MT_ARG_IN | (is_gradient ? MT_ARG_GRADIENT : 0));
    const mt_operand to = mti_operand_of("y", y, MT_ARG_OUT);
    char cases[2];
    cases[0] = is;
    cases[1] = 0;
    return mti_move_check(ctx, comm, where, cases, becomes, &from, &to);
}

/* Whether something is known about x on a group. */
static int mti_is_known(mt_context *ctx, const mt_comm *comm, mt_tensor x) {
    const mti_axes axes = mti_axes_of(ctx->checker, comm, 0);
    mti_known k;
    int i;
    if (axes.count == 0) return 0;
    k = mti_known_of(ctx->checker, x);
    for (i = 0; i < axes.count && !k.zero; i++)
        if (!ctx->checker->axes[axes.at[i]].only_group && k.may[axes.at[i]] != MTI_ALL_PLACEMENTS) return 1;
    return 0;
}

/* Whether x is split over a group. */
static int mti_is_split(mt_context *ctx, const mt_comm *comm, mt_tensor x) {
    const mti_axes axes = mti_axes_of(ctx->checker, comm, 0);
    mti_known k;
    int i;
    if (axes.count == 0) return 0;
    k = mti_known_of(ctx->checker, x);
    for (i = 0; i < axes.count; i++)
        if (k.may[axes.at[i]] & ~MTI_SPLIT_PLACEMENTS) return 0;
    return 1;
}

/* Returns the memory of a collective as a tensor with the columns of what was written there, or with one row. */
static mt_tensor mti_shaped(const mti_checker *c, const void *data, mt_dtype dtype, int64_t count) {
    mt_tensor t = mt_tensor_make(data, dtype, 1, count);
    mti_extent e = mti_extent_of(t);
    uintptr_t size = (uintptr_t)mt_dtype_size(dtype);
    const mti_placed *p = mti_parameter_at(c, e);
    if (!p) p = mti_placed_older(&c->written, e, UINT64_MAX);
    if (!p || !mti_extent_is_dense(p->at) || !mti_extent_covers(p->at, e)) return t;
    if (e.width % p->at.width || (e.begin - p->at.begin) % p->at.width || p->at.width % size) return t;
    return mt_tensor_make(data, dtype, (int64_t)(e.width / p->at.width), (int64_t)(p->at.width / size));
}

/* What a rank sends over a group that is not followed. A partial sum must not travel: the receiver would take it for
   the sum. Gradients that the data ranks have not summed yet may. */
static const mt_rule mti_sent_rule = {"sendbuf", "R r c", "P"};

static mt_status mti_sent_check(mt_context *ctx, const mti_ruling *r) {
    unsigned char results[MTI_RULE_OPERANDS];
    int g;
    MT_TRY(mti_written_check(ctx, r));
    for (g = 0; g < ctx->checker->count; g++) MT_TRY(mti_rule_axis(ctx, r, g, results));
    return MT_SUCCESS;
}

/* Notes what y, or x in place, is at the root of a broadcast over a group that is not followed: what x is, or
   replicated if the ranks that receive it are ranks of a followed group, too. */
static mt_status mti_root_note(mt_context *ctx, const mti_known *known, mt_tensor x, mt_tensor y) {
    unsigned char may[MTI_AXES];
    int g;
    for (g = 0; g < MTI_AXES; g++) may[g] = (unsigned char)(known->may[g] | 1 << MT_REPLICATED);
    return mti_move_note(ctx, known, x, y, may, known->zero, "mt_broadcast");
}

/* A broadcast in a group of several ranks. All of them then have the values of the root, which must not be a part of a
   sum. Over a group that check mode has not met before, such as the pipeline group, only the root knows what they
   are. */
static mt_status mti_broadcast_check(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    static const mt_rule rule = {"sendbuf", "R r c", NULL};
    unsigned char results[MTI_RULE_OPERANDS], may[MTI_AXES];
    const mti_axes axes = mti_axes_of(ctx->checker, comm, 0);
    int is_root = comm->rank == call->root, i;
    mt_operand operand;
    mt_tensor x;
    mti_ruling r;
    x = mti_shaped(ctx->checker, is_root ? call->send : call->recv, call->dtype, (int64_t)call->count);
    operand = is_root ? mti_operand_of("sendbuf", x, MT_ARG_IN) : mti_operand_of("recvbuf", x, MT_ARG_OUT);
    mti_ruling_of(&r, ctx->checker, "mt_broadcast", &mti_sent_rule, &operand);
    MT_TRY(mti_slots_check(ctx, &r));
    if (is_root) MT_TRY(mti_sent_check(ctx, &r));
    r.rule = &rule;
    for (i = 0; is_root && i < axes.count; i++) MT_TRY(mti_rule_axis(ctx, &r, axes.at[i], results));
    operand.t.data = call->recv;
    if (axes.count == 0 && !is_root) return mti_forget_view(ctx, operand.t);
    if (!mti_parameter_at(ctx->checker, mti_extent_of(operand.t)))
        mti_forget_parameters(ctx->checker, mti_extent_of(operand.t));
    if (axes.count == 0) return mti_root_note(ctx, &r.operands[0].known, x, operand.t);
    if (is_root) memcpy(may, r.operands[0].known.may, sizeof may);
    else memset(may, MTI_ALL_PLACEMENTS, sizeof may); /* the root alone knows about the other groups */
    for (i = 0; i < axes.count; i++) may[axes.at[i]] = 1 << MT_REPLICATED;
    MT_TRY(mti_placement_note(ctx, operand.t, may, 0, "mt_broadcast", is_root ? r.operands[0].known.with : NULL));
    operand = mti_operand_of("recvbuf", operand.t, MT_ARG_OUT);
    mti_notify(ctx, "mt_broadcast", NULL, &operand, 1);
    return MT_SUCCESS;
}

/* Refuses a collective from memory of the arena that nothing has written, also over a group that check mode does not
   know. */
static mt_status mti_sendbuf_written(mt_context *ctx, const char *where, mt_tensor x) {
    static const mt_rule rule = {"sendbuf", "*", NULL};
    const mt_operand operand = mti_operand_of("sendbuf", x, MT_ARG_IN);
    mti_ruling r;
    mti_ruling_of(&r, ctx->checker, where, &rule, &operand);
    MT_TRY(mti_slots_check(ctx, &r));
    return mti_written_check(ctx, &r);
}

/* Notes what a collective of memory that is not known makes of y. Over a group of mt_check_group, all ranks have the
   same then, if each gets the whole. Over others, the program may write y and pass it to the collective again. */
static mt_status mti_collective_unknown(mt_context *ctx, const mt_comm *comm, int kind, const char *where,
                                        mt_tensor y) {
    int g = mti_axis_of(ctx->checker, comm, 0);
    int is_split = kind == MT_REDUCE_SCATTER || kind == MT_ALL_TO_ALL || kind == MT_ALL_TO_ALL_V;
    unsigned char may[MTI_AXES];
    MT_TRY(mti_forget_view(ctx, y));
    if (g < 0 || !ctx->checker->axes[g].only_group || is_split) return MT_SUCCESS;
    memset(may, MTI_ALL_PLACEMENTS, sizeof may);
    may[g] = 1 << MT_REPLICATED;
    return mti_placement_note(ctx, y, may, 0, where, NULL);
}

/* The sum over the world of a term of a sum: it must be one over each group, because all of them are added up. */
static mt_status mti_world_sum(mt_context *ctx, const mti_ruling *r, mt_tensor y) {
    const mt_operand to = mti_operand_of("recvbuf", y, MT_ARG_OUT);
    unsigned char results[MTI_RULE_OPERANDS], may[MTI_AXES];
    int g;
    for (g = 0; g < ctx->checker->count; g++)
        if (!ctx->checker->axes[g].only_group) MT_TRY(mti_rule_axis(ctx, r, g, results));
    memset(may, 1 << MT_REPLICATED, sizeof may);
    MT_TRY(mti_move_note(ctx, &r->operands[0].known, r->operands[0].operand->t, y, may, 0, r->where));
    mti_notify_move(ctx, r, &to);
    return MT_SUCCESS;
}

/* Whether a communicator is the world, and x is a term of a sum over one of the groups that the world consists of. Of
   numbers, such as losses, programs also sum what some ranks have, and divide by their number. */
static int mti_is_term_of_world(const mt_context *ctx, const mt_comm *comm, mt_tensor x, const mti_known *k) {
    const mti_checker *c = ctx->checker;
    int64_t ranks = 1;
    int g, term = 0;
    if (comm != ctx->world || x.rows == 1 || k->zero) return 0;
    for (g = 0; g < c->count; g++) {
        if (mti_axis_is(&c->axes[g], comm)) return 0;
        if (!c->axes[g].only_group) ranks *= c->axes[g].size;
        term |= k->may[g] == 1 << MT_PARTIAL;
    }
    return term && ranks == comm->size;
}

/* An all-reduce over a communicator that is none of the known groups. */
static mt_status mti_sum_of_others(mt_context *ctx, const mt_comm *comm, const mti_call *call, mt_tensor x,
                                   mt_tensor y) {
    static const mt_rule terms = {"sendbuf", "P", NULL};
    const mt_operand operand = mti_operand_of("sendbuf", x, MT_ARG_IN);
    mti_placed *p;
    mti_ruling r;
    mti_ruling_of(&r, ctx->checker, "mt_all_reduce", &terms, &operand);
    r.over_all = 1;
    if (mti_is_term_of_world(ctx, comm, x, &r.operands[0].known)) return mti_world_sum(ctx, &r, y);
    MT_TRY(mti_collective_unknown(ctx, comm, call->kind, "mt_all_reduce", y));
    p = mti_parameter_at(ctx->checker, mti_extent_of(y));
    if (p && p->is_gradient) snprintf(p->summed_over, sizeof p->summed_over, "%s", comm->name);
    return MT_SUCCESS;
}

/* An all_to_all or all_to_all_v: terms of a sum are not sent. What a rank receives is not known. */
static mt_status mti_all_to_all_check(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    const char *where = call->kind == MT_ALL_TO_ALL ? "mt_all_to_all" : "mt_all_to_all_v";
    size_t sent = mti_send_elements(comm, call), received = mti_recv_elements(comm, call);
    mt_tensor x = mti_shaped(ctx->checker, call->send, call->dtype, (int64_t)sent);
    mt_tensor y = mt_tensor_make(call->recv, call->dtype, 1, (int64_t)received);
    const mt_operand operand = mti_operand_of("sendbuf", x, MT_ARG_IN);
    mti_ruling r;
    if (sent > 0) {
        mti_ruling_of(&r, ctx->checker, where, &mti_sent_rule, &operand);
        MT_TRY(mti_slots_check(ctx, &r));
        MT_TRY(mti_sent_check(ctx, &r));
    }
    if (received == 0) return MT_SUCCESS;
    if (comm->size == 1) return mti_moved(ctx, where, x, mt_tensor_make(call->recv, call->dtype, x.rows, x.cols));
    return mti_collective_unknown(ctx, comm, call->kind, where, y);
}

/* A collective of the caller's own. What it makes of memory that is not declared is not known. Ranks with other
   tokens may sum losses, one by one. */
static mt_status mti_collective_check(mt_context *ctx, const mt_comm *comm, const mti_call *call) {
    static const char *const names[] = {"mt_all_reduce", "mt_all_gather", "mt_reduce_scatter", "mt_broadcast"};
    const char *parts = "P";
    int is_float = mt_dtype_is_float(call->dtype), sums = call->op == MT_SUM && is_float;
    mt_operand from, to;
    mt_tensor x, y;
    mti_axes axes;
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    axes = mti_axes_of(ctx->checker, comm, 0);
    if (axes.count > 0 && mti_has_tokens(&ctx->checker->axes[axes.at[0]])) parts = "P r c";
    if (mti_is_all_to_all(call)) return mti_all_to_all_check(ctx, comm, call);
    if (call->count == 0 || call->kind == MT_BARRIER) return MT_SUCCESS;
    if (call->kind == MT_BROADCAST && comm->size > 1) return mti_broadcast_check(ctx, comm, call);
    x = mti_shaped(ctx->checker, call->send, call->dtype,
                   (int64_t)call->count * (call->kind == MT_REDUCE_SCATTER ? comm->size : 1));
    y = mt_tensor_make(call->recv, call->dtype, x.rows, x.cols);
    MT_TRY(mti_sendbuf_written(ctx, names[call->kind], x));
    if (comm->size == 1) return mti_moved(ctx, names[call->kind], x, y);
    if (call->kind == MT_ALL_GATHER) y.rows *= comm->size;
    if (call->kind == MT_REDUCE_SCATTER && x.rows % comm->size == 0) y.rows /= comm->size;
    else if (call->kind == MT_REDUCE_SCATTER) y = mt_tensor_make(call->recv, call->dtype, 1, (int64_t)call->count);
    from = mti_operand_of("sendbuf", x, MT_ARG_IN);
    to = mti_operand_of("recvbuf", y, MT_ARG_OUT);
    if (mti_is_known(ctx, comm, x)) {
        if (call->kind == MT_ALL_REDUCE && sums)
            return mti_move_check(ctx, comm, "mt_all_reduce", parts, 'R', &from, &to);
        if (call->kind == MT_ALL_REDUCE && is_float) /* a maximum of terms is not the maximum of their sums */
            return mti_move_check(ctx, comm, "mt_all_reduce", "R r c", 'R', &from, &to);
        if (call->kind == MT_REDUCE_SCATTER && sums)
            return mti_move_check(ctx, comm, "mt_reduce_scatter", parts, 'r', &from, &to);
        /* A gather in place leaves what is replicated as it is: the parameters of a sharded optimizer, for instance.
           Candidates of a vocabulary are floats and ids, gathered as MT_I32. */
        if (call->kind == MT_ALL_GATHER && (is_float || mti_is_split(ctx, comm, x)))
            return mti_move_check(ctx, comm, "mt_all_gather",
                                  mti_extents_meet(mti_extent_of(x), mti_extent_of(y)) ? "r c R" : "r c", 'R', &from,
                                  &to);
    }
    if (call->kind == MT_ALL_REDUCE && sums) return mti_sum_of_others(ctx, comm, call, x, y);
    return mti_collective_unknown(ctx, comm, call->kind, names[call->kind], y);
}

static mt_status mti_send_check(mt_context *ctx, const mti_call *call) {
    const mt_operand operand =
        mti_operand_of("sendbuf", mt_tensor_make(call->send, call->dtype, 1, (int64_t)call->count), MT_ARG_IN);
    mti_ruling r;
    if (!mti_has_elements(operand.t)) return MT_SUCCESS;
    mti_ruling_of(&r, ctx->checker, "mt_send", &mti_sent_rule, &operand);
    MT_TRY(mti_sent_check(ctx, &r));
    return mti_replica_read(ctx, "mt_send", NULL, &operand, &r.operands[0].known);
}

/* A send, a receive, or both. */
static mt_status mti_p2p_check(mt_context *ctx, const mti_call *call) {
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    MT_TRY(mti_send_check(ctx, call));
    return mti_forget_view(ctx, mt_tensor_make(call->recv, call->dtype, 1, (int64_t)call->recvcount));
}

/* The rule of mt_gather_ranks_from_sequence_region, or of mt_reduce_scatter_ranks_to_sequence_region, for the block of
   each rank of [first, first + ranks) in the whole view. A block has as many rows as this rank's part. This rank's
   block comes last, because it may be the memory of the part: in place, a gather has made the part replicated in an
   earlier chunk. The listener is told of one block: this rank's, or that of `first` when this rank has none in the
   call. The part that a gather reads is hashed with this rank's block alone. */
static mt_status mti_ranks_check(mt_context *ctx, const mt_comm *comm, int gathers, const char *where, mt_tensor x,
                                 mt_tensor y, int first, int ranks) {
    mt_check_listener listener;
    struct mti_replicas *replicas;
    mt_tensor part = gathers ? x : y, whole = gathers ? y : x;
    mt_status status = MT_SUCCESS;
    int i, has_mine = comm->rank >= first && comm->rank < first + ranks, last = has_mine ? comm->rank : first;
    int gathered = comm->rank < first && mt_tensor_rows(whole, comm->rank * part.rows, 1).data == part.data;
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    listener = ctx->checker->listener;
    replicas = ctx->checker->replicas;
    for (i = 1; i <= ranks && status == MT_SUCCESS; i++) {
        int rank = first + (last - first + i) % ranks, mine = rank == comm->rank;
        mt_tensor block = mt_tensor_rows(whole, rank * part.rows, part.rows);
        ctx->checker->listener = i == ranks ? listener : NULL;
        ctx->checker->replicas = !gathers || mine ? replicas : NULL;
        if (gathers) status = mti_region_check(ctx, comm, where, gathered ? 'R' : 'r', 'R', 0, "x", part, block);
        else
            status =
                mti_region_check(ctx, comm, where, 'P', 'r', 0, "x", block, mine ? part : mt_tensor_rows(part, 0, 0));
    }
    ctx->checker->listener = listener;
    ctx->checker->replicas = replicas;
    return status;
}
