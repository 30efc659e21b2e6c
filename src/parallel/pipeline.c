/* ---- pipeline schedules ------------------------------------------------------------------------------------------ */

#pragma once
#include "pipeline.h"
#include "params.c"

/* A list of actions that mt_pipeline_schedule writes. */
typedef struct mti_schedule {
    mt_action *actions; /* NULL: only counts them */
    int capacity, count, slots;
    int is_first, is_last; /* 1: this is the first or the last stage */
} mti_schedule;

/* Adds an action, except a send or receive on an end stage that has no neighbour there. */
static void mti_act(mti_schedule *s, mt_action_kind kind, int micro_batch, int received) {
    int goes_back = kind == MT_RECV_FORWARD || kind == MT_SEND_BACKWARD || kind == MT_SEND_BACKWARD_RECV_FORWARD;
    mt_action *a = s->actions && s->count < s->capacity ? &s->actions[s->count] : NULL;
    if (kind != MT_FORWARD && kind != MT_BACKWARD && (goes_back ? s->is_first : s->is_last))
        return; /* no such neighbour */
    s->count++;
    if (!a) return;
    a->kind = kind;
    a->micro_batch = micro_batch;
    a->slot = micro_batch % s->slots;
    a->recv_micro_batch = received;
    a->recv_slot = received % s->slots;
}

/* Lists the actions of n micro-batches. The first `warmup` run only forward. Then each further forward is followed by a
   backward, and the remaining backwards come last. This is Megatron's forward_backward_pipelining_without_interleaving.
   With warmup == n it is GPipe. */
static void mti_schedule_fill(mti_schedule *s, int warmup, int n, int backward) {
    int i;
    for (i = 0; i < warmup; i++) {
        mti_act(s, MT_RECV_FORWARD, i, i);
        mti_act(s, MT_FORWARD, i, i);
        mti_act(s, MT_SEND_FORWARD, i, i);
    }
    if (!backward) return;
    if (warmup < n) mti_act(s, MT_RECV_FORWARD, warmup, warmup);
    for (i = 0; warmup + i < n; i++) {
        mti_act(s, MT_FORWARD, warmup + i, warmup + i);
        mti_act(s, MT_SEND_FORWARD_RECV_BACKWARD, warmup + i, i);
        mti_act(s, MT_BACKWARD, i, i);
        if (warmup + i + 1 < n) mti_act(s, MT_SEND_BACKWARD_RECV_FORWARD, i, warmup + i + 1);
        else mti_act(s, MT_SEND_BACKWARD, i, i);
    }
    for (i = n - warmup; i < n; i++) {
        mti_act(s, MT_RECV_BACKWARD, i, i);
        mti_act(s, MT_BACKWARD, i, i);
        mti_act(s, MT_SEND_BACKWARD, i, i);
    }
}

MT_API mt_status mt_pipeline_schedule(mt_schedule schedule, int stages, int stage, int micro_batches,
                                      mt_action *actions, int capacity, int *count) {
    mti_schedule s;
    int warmup = micro_batches, backward = schedule != MT_SCHEDULE_FORWARD_ONLY;
    if (!count || schedule < MT_SCHEDULE_1F1B || schedule > MT_SCHEDULE_FORWARD_ONLY || stages < 1 || stage < 0 ||
        stage >= stages || micro_batches < 0 || micro_batches > INT32_MAX / 6)
        return MT_ERR_ARGUMENT;
    if (schedule == MT_SCHEDULE_1F1B && stages - stage - 1 < warmup) warmup = stages - stage - 1;
    memset(&s, 0, sizeof s);
    s.actions = actions;
    s.capacity = capacity;
    s.slots = !backward ? 1 : warmup < micro_batches ? warmup + 1 : micro_batches;
    s.is_first = stage == 0;
    s.is_last = stage == stages - 1;
    mti_schedule_fill(&s, warmup, micro_batches, backward);
    *count = s.count;
    return actions && capacity < s.count ? MT_ERR_SHAPE : MT_SUCCESS;
}

MT_API int mt_pipeline_slots(const mt_action *actions, int count) {
    int last = -1, i;
    for (i = 0; actions && i < count; i++) {
        if (actions[i].slot > last) last = actions[i].slot;
        if (actions[i].recv_slot > last) last = actions[i].recv_slot;
    }
    return last < INT32_MAX ? last + 1 : last; /* too many for mt_pipeline_run, which refuses them */
}

/* The state of mt_pipeline_run. */
typedef struct mti_pipeline {
    const mt_grid *grid;
    const mt_pipeline_stage *stage;
    /* inputs has one tensor for each slot. Tensors for a neighbour that does not exist are mt_none() */
    mt_tensor inputs, output, doutput, dinput;
    /* offsets in the arena: slot i has [base + i * kept, base + (i + 1) * kept), and all slots end at top */
    size_t base, kept, top;
    const char *first; /* the memory of slot 0 */
    /* measured: 1 when kept is known */
    int slots, measured;
} mti_pipeline;

/* Returns 1 when the forward of this backward was the last use of its slot. */
static int mti_pipeline_has_forward(const mt_action *actions, const mt_action *backward) {
    const mt_action *a = backward;
    while (a-- > actions) {
        if ((a->kind == MT_FORWARD || a->kind == MT_BACKWARD) && a->slot == backward->slot)
            return a->kind == MT_FORWARD && a->micro_batch == backward->micro_batch;
        if ((a->kind == MT_RECV_FORWARD || a->kind == MT_SEND_BACKWARD_RECV_FORWARD) && a->recv_slot == backward->slot)
            return 0;
    }
    return 0;
}

/* Returns what is wrong with action number i, or NULL. first: no forward has come before it. */
static const char *mti_pipeline_wrong(const mt_pipeline_stage *stage, const mt_action *actions, int count, int i,
                                      int first) {
    const mt_action *a = &actions[i];
    if (a->slot < 0 || a->slot >= count) return "slot must be at least 0 and below the number of actions";
    if (a->recv_slot < 0 || a->recv_slot >= count)
        return "recv_slot must be at least 0 and below the number of actions";
    if (a->kind == MT_FORWARD && first && a->slot != 0) return "the first forward must be in slot 0";
    if (a->kind == MT_BACKWARD && !stage->backward) return "stage.backward is NULL";
    if (a->kind == MT_BACKWARD && !mti_pipeline_has_forward(actions, a))
        return "this backward needs the forward of its micro-batch in its slot, and nothing else there since";
    return NULL;
}

#define MTI_ACTION_WORDS                                                                                               \
    "MT_FORWARD MT_BACKWARD MT_SEND_FORWARD MT_RECV_FORWARD MT_SEND_BACKWARD MT_RECV_BACKWARD "                        \
    "MT_SEND_FORWARD_RECV_BACKWARD MT_SEND_BACKWARD_RECV_FORWARD"

/* Checks the arguments of mt_pipeline_run, including each action. */
static mt_status mti_pipeline_check(mt_context *ctx, const mt_grid *grid, const mt_pipeline_stage *stage,
                                    const mt_action *actions, int count) {
    static const char *const function = "mt_pipeline_run";
    char word[MT_WORD_MAX];
    int i, forwards = 0;
    if (!grid || !grid->pp || !stage || !stage->forward || !actions)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                       !grid || !grid->pp ? "the grid was not created"
                       : !stage           ? "stage is NULL"
                       : actions          ? "stage.forward is NULL"
                                          : "actions is NULL");
    MT_TRY(mt_check_integer(ctx, function, NULL, "stage.rows", stage->rows, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "stage.cols", stage->cols, 1, INT64_MAX));
    if (!mt_dtype_is_float(stage->dtype))
        return mti_float_dtype_fail(ctx, MT_ERR_ARGUMENT, function, "stage.dtype", stage->dtype);
    MT_TRY(mt_check_integer(ctx, function, NULL, "count", count, 0, INT64_MAX));
    if (mt_size_mul(mt_size_mul(stage->rows, stage->cols), 8 * mt_max(1, count)) < 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: [%lld, %lld] in up to %d slots is more than can be counted", function,
                       (long long)stage->rows, (long long)stage->cols, count);
    for (i = 0; i < count; i++) {
        const mt_action *a = &actions[i];
        const char *wrong;
        char field[32];
        snprintf(field, sizeof field, "actions[%d].kind", i);
        MT_TRY(mt_check_enum(ctx, function, NULL, field, (int)a->kind, MTI_ACTION_WORDS));
        wrong = mti_pipeline_wrong(stage, actions, count, i, !forwards);
        if (wrong) {
            mt_enum_word(MTI_ACTION_WORDS, (int)a->kind, word);
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: action %d of %d: kind %s, micro-batch %d, slot %d, recv_slot %d: %s", function, i,
                           count, word, a->micro_batch, a->slot, a->recv_slot, wrong);
        }
        forwards += a->kind == MT_FORWARD;
    }
    return MT_SUCCESS;
}

/* Allocates the tensors that stages send. Each slot has its own input, because the backward needs it. One output,
   doutput and dinput is enough, because they are used immediately. */
static mt_status mti_pipeline_buffers(mt_context *ctx, mti_pipeline *p) {
    int64_t rows = p->stage->rows, cols = p->stage->cols;
    mt_dtype dtype = p->stage->dtype;
    int backward = p->stage->backward != NULL;
    p->inputs = p->output = p->doutput = p->dinput = mt_none();
    if (p->grid->pp_rank > 0) {
        MT_TRY(mt_arena_tensor(ctx, dtype, p->slots * rows, cols, &p->inputs));
        if (backward) MT_TRY(mt_arena_tensor(ctx, dtype, rows, cols, &p->dinput));
    }
    if (p->grid->pp_rank + 1 < p->grid->pp_size) {
        MT_TRY(mt_arena_tensor(ctx, dtype, rows, cols, &p->output));
        if (backward) MT_TRY(mt_arena_tensor(ctx, dtype, rows, cols, &p->doutput));
    }
    p->base = mt_arena_mark(ctx);
    return MT_SUCCESS;
}

static mt_tensor mti_pipeline_input(const mti_pipeline *p, int slot) {
    return p->inputs.data ? mt_tensor_rows(p->inputs, slot * p->stage->rows, p->stage->rows) : mt_none();
}

/* Stores how much of the arena the first forward has kept, and reserves as much for each other slot. */
static mt_status mti_pipeline_measure(mt_context *ctx, mti_pipeline *p) {
    void *others;
    p->kept = mt_arena_mark(ctx) - p->base;
    p->measured = 1;
    MT_TRY(mt_arena_alloc(ctx, (size_t)(p->slots - 1) * p->kept, &others));
    p->first = (const char *)others - p->kept;
    p->top = mt_arena_mark(ctx);
    return MT_SUCCESS;
}

/* Runs a forward whose allocations go to the region of its slot. */
static mt_status mti_pipeline_forward(mt_context *ctx, mti_pipeline *p, const mt_action *a) {
    size_t first = p->base + (size_t)a->slot * p->kept, end = first + p->kept;
    int keeps_too_much;
    if (p->measured) mt_arena_region(ctx, first, end, p->top);
    MT_TRY(p->stage->forward(ctx, p->stage->user, a, mti_pipeline_input(p, a->slot), p->output));
    if (!p->measured) return mti_pipeline_measure(ctx, p);
    keeps_too_much = mt_arena_mark(ctx) > end;
    mt_arena_region(ctx, p->top, 0, 0);
    if (!keeps_too_much) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "mt_pipeline_run: micro-batch %d keeps more of the arena than the first, which kept %zu "
                   "bytes: they must have one size",
                   a->micro_batch, p->kept);
}

static mt_status mti_pipeline_backward(mt_context *ctx, mti_pipeline *p, const mt_action *a) {
    size_t mark = mt_arena_mark(ctx);
    mti_parallel *options;
    mt_status status;
    MT_TRY(mti_parallel_open(ctx, &options));
    options->micro_batch = ++options->backwards;
    status = p->stage->backward(ctx, p->stage->user, a, p->doutput, p->dinput);
    options->micro_batch = 0;
    if (status == MT_SUCCESS) mt_arena_release(ctx, mark);
    return status;
}

/* Checks what is sent to another stage: over the tensor group it must be complete. */
static mt_status mti_pipeline_complete(mt_context *ctx, const mti_pipeline *p, int backward) {
    static const mt_rule rules[2] = {{"output", "R r", "P"}, {"dinput", "R r", "P"}};
    mt_operand operand;
    operand.name = rules[backward].operands;
    operand.t = backward ? p->dinput : p->output;
    operand.use = MT_ARG_IN | (backward ? MT_ARG_GRADIENT : 0);
    return mt_rule_check(ctx, "mt_pipeline_run", &rules[backward], &operand, 1);
}

/* Says what was received over one group. */
static mt_status mti_declare_received(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement) {
    if (mt_placement_of(ctx, comm, t) != MT_UNDECLARED) return MT_SUCCESS;
    return placement == MT_UNDECLARED ? mt_declare_complete(ctx, comm, t) : mt_declare(ctx, comm, t, placement);
}

MT_API mt_status mt_declare_received(mt_context *ctx, const mt_grid *grid, mt_tensor t, mt_placement tp,
                                     mt_placement dp) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!grid) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_received: grid is NULL");
    if ((int)tp < 0 || tp > MT_UNDECLARED || tp == MT_PARTIAL)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_received: tp is %d, must be a placement other than MT_PARTIAL",
                       (int)tp);
    if ((int)dp < 0 || dp > MT_UNDECLARED)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_received: dp is %d, must be a placement", (int)dp);
    MT_TRY(mti_declare_received(ctx, grid->tp, t, tp));
    return mti_declare_received(ctx, grid->dp_cp, t, dp);
}

static mt_status mti_pipeline_communicate(mt_context *ctx, const mti_pipeline *p, const mt_action *a) {
    mt_comm *comm = p->grid->pp;
    int next = p->grid->pp_rank + 1, before = p->grid->pp_rank - 1;
    mt_tensor input = mti_pipeline_input(p, a->recv_slot);
    size_t n = (size_t)(p->stage->rows * p->stage->cols);
    mt_dtype dtype = p->stage->dtype;
    switch (a->kind) {
    case MT_SEND_FORWARD: return mt_send(ctx, comm, p->output.data, n, dtype, next);
    case MT_RECV_FORWARD: return mt_recv(ctx, comm, input.data, n, dtype, before);
    case MT_SEND_BACKWARD: return mt_send(ctx, comm, p->dinput.data, n, dtype, before);
    case MT_RECV_BACKWARD: return mt_recv(ctx, comm, p->doutput.data, n, dtype, next);
    case MT_SEND_FORWARD_RECV_BACKWARD:
        return mt_send_recv(ctx, comm, p->output.data, n, next, p->doutput.data, n, next, dtype);
    case MT_SEND_BACKWARD_RECV_FORWARD:
        return mt_send_recv(ctx, comm, p->dinput.data, n, before, input.data, n, before, dtype);
    case MT_FORWARD:
    case MT_BACKWARD: break;
    }
    return MT_ERR_ARGUMENT; /* mti_pipeline_check has refused it */
}

/* Runs a forward or a backward, which must leave the slots of other micro-batches alone. */
static mt_status mti_pipeline_compute(mt_context *ctx, mti_pipeline *p, const mt_action *a) {
    size_t input = (size_t)(p->stage->rows * p->stage->cols) * mt_dtype_size(p->stage->dtype);
    mt_status status;
    mt_check_slots(ctx, 0, p->inputs.data, input, p->inputs.data ? p->slots : 0, a->slot);
    mt_check_slots(ctx, 1, p->first, p->kept, p->slots, a->slot);
    status = a->kind == MT_FORWARD ? mti_pipeline_forward(ctx, p, a) : mti_pipeline_backward(ctx, p, a);
    mt_check_slots(ctx, 0, NULL, 0, 0, 0);
    mt_check_slots(ctx, 1, NULL, 0, 0, 0);
    return status;
}

/* Runs one action. */
static mt_status mti_pipeline_act(mt_context *ctx, mti_pipeline *p, const mt_action *a) {
    if (a->kind == MT_FORWARD || a->kind == MT_BACKWARD) return mti_pipeline_compute(ctx, p, a);
    if (a->kind == MT_SEND_FORWARD || a->kind == MT_SEND_FORWARD_RECV_BACKWARD)
        MT_TRY(mti_pipeline_complete(ctx, p, 0));
    if (a->kind == MT_SEND_BACKWARD || a->kind == MT_SEND_BACKWARD_RECV_FORWARD)
        MT_TRY(mti_pipeline_complete(ctx, p, 1));
    MT_TRY(mti_pipeline_communicate(ctx, p, a));
    if (a->kind == MT_RECV_FORWARD || a->kind == MT_SEND_BACKWARD_RECV_FORWARD)
        return mt_declare_received(ctx, p->grid, mti_pipeline_input(p, a->recv_slot), MT_UNDECLARED, MT_UNDECLARED);
    if (a->kind == MT_RECV_BACKWARD || a->kind == MT_SEND_FORWARD_RECV_BACKWARD)
        return mt_declare_received(ctx, p->grid, p->doutput, MT_UNDECLARED, MT_UNDECLARED);
    return MT_SUCCESS;
}

MT_API mt_status mt_pipeline_run(mt_context *ctx, const mt_grid *grid, const mt_pipeline_stage *stage,
                                 const mt_action *actions, int count) {
    mti_pipeline p;
    mt_status status;
    size_t mark;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_pipeline_check(ctx, grid, stage, actions, count));
    memset(&p, 0, sizeof p);
    p.grid = grid;
    p.stage = stage;
    p.slots = mt_pipeline_slots(actions, count);
    mark = mt_arena_mark(ctx);
    status = mti_pipeline_buffers(ctx, &p);
    for (i = 0; status == MT_SUCCESS && i < count; i++) status = mti_pipeline_act(ctx, &p, &actions[i]);
    mt_arena_region(ctx, mark, 0, 0);
    return status;
}
