/* test_pipeline.c - tests pipelines: schedules with a simulator written here, the executor with a toy model, and
   GPTs against the losses, gradients, norms and weights of one rank.
       cc -std=gnu17 -O2 -I. tests/test_pipeline.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT_STEPS 3
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"

/* ---- schedules --------------------------------------------------------------------------------------------------- */

#define STAGES 8
#define MICRO_BATCHES 16
#define ACTIONS (6 * MICRO_BATCHES)

typedef struct stage_run {
    mt_action list[ACTIONS];
    int count, at;
    double time;                    /* end of the last action */
    int received[2][MICRO_BATCHES]; /* index 0: forward, 1: backward */
    /* micro-batches computed so far; slot_used[slot]: micro-batch + 1, or 0 */
    int done[2], in_flight, most, slot_used[ACTIONS];
} stage_run;

typedef struct message {
    int backward, micro_batch, to;
} message;

static int sends(const mt_action *a, int stage, message *m) {
    m->backward = a->kind == MT_SEND_BACKWARD || a->kind == MT_SEND_BACKWARD_RECV_FORWARD;
    m->micro_batch = a->micro_batch;
    m->to = m->backward ? stage - 1 : stage + 1;
    return m->backward || a->kind == MT_SEND_FORWARD || a->kind == MT_SEND_FORWARD_RECV_BACKWARD;
}

/* Returns 1 if the action receives; m->to is the stage that it receives from. */
static int receives(const mt_action *a, int stage, message *m) {
    m->backward = a->kind == MT_RECV_BACKWARD || a->kind == MT_SEND_FORWARD_RECV_BACKWARD;
    m->micro_batch = a->recv_micro_batch;
    m->to = m->backward ? stage + 1 : stage - 1;
    return m->backward || a->kind == MT_RECV_FORWARD || a->kind == MT_SEND_BACKWARD_RECV_FORWARD;
}

/* Rendezvous: a send or receive ends when the peer is in the matching action, and takes no time. An action that does
   both ends when both are matched. Blocking: a stage does nothing else meanwhile. */
static int answered(const stage_run *runs, int stages, int stage) {
    const mt_action *a = &runs[stage].list[runs[stage].at];
    message m, other;
    if (sends(a, stage, &m)) {
        assert_true(m.to >= 0 && m.to < stages);
        if (runs[m.to].at == runs[m.to].count || !receives(&runs[m.to].list[runs[m.to].at], m.to, &other)) return 0;
        if (other.to != stage || other.backward != m.backward || other.micro_batch != m.micro_batch) return 0;
    }
    if (receives(a, stage, &m)) {
        assert_true(m.to >= 0 && m.to < stages);
        if (runs[m.to].at == runs[m.to].count || !sends(&runs[m.to].list[runs[m.to].at], m.to, &other)) return 0;
        if (other.to != stage || other.backward != m.backward || other.micro_batch != m.micro_batch) return 0;
    }
    return 1;
}

static void take_slot(stage_run *r, int micro_batch, int slot) {
    assert_in_range(slot, 0, ACTIONS - 1);
    if (r->slot_used[slot] == micro_batch + 1) return;
    assert_int_equal(r->slot_used[slot], 0); /* the slot is free */
    r->slot_used[slot] = micro_batch + 1;
}

/* A forward takes the time 1, a backward 2. */
static void compute(stage_run *r, int stages, int stage, const mt_action *a) {
    int backward = a->kind == MT_BACKWARD, edge = backward ? stage == stages - 1 : stage == 0;
    assert_int_equal(a->micro_batch, r->done[backward]++); /* each micro-batch once, in order */
    assert_true(edge || r->received[backward][a->micro_batch]);
    if (backward) {
        assert_true(a->micro_batch < r->done[0]);
        assert_int_equal(r->slot_used[a->slot], a->micro_batch + 1);
        r->slot_used[a->slot] = 0;
        r->in_flight--;
    } else {
        take_slot(r, a->micro_batch, a->slot);
        if (++r->in_flight > r->most) r->most = r->in_flight;
    }
    r->time += backward ? 2 : 1;
}

/* Ends both sides of an exchange at the same time. Two stages that exchange both ways have one action each. */
static void communicate(stage_run *runs, int stage) {
    message m;
    int peer = -1;
    const mt_action *a = &runs[stage].list[runs[stage].at];
    double time;
    if (sends(a, stage, &m) || receives(a, stage, &m)) peer = m.to;
    time = fmax(runs[stage].time, runs[peer].time);
    for (int side = 0; side < 2; side++) {
        int me = side ? peer : stage;
        stage_run *r = &runs[me];
        if (receives(&r->list[r->at], me, &m)) {
            assert_false(r->received[m.backward][m.micro_batch]++);
            if (!m.backward) take_slot(r, m.micro_batch, r->list[r->at].recv_slot);
        }
        r->time = time;
        r->at++;
    }
}

static int advance(stage_run *runs, int stages, int stage) {
    stage_run *r = &runs[stage];
    const mt_action *a = &r->list[r->at];
    if (r->at == r->count) return 0;
    if (a->kind == MT_FORWARD || a->kind == MT_BACKWARD) {
        compute(r, stages, stage, a);
        r->at++;
        return 1;
    }
    if (!answered(runs, stages, stage)) return 0;
    communicate(runs, stage);
    return 1;
}

/* Runs until no stage can continue. Returns the time of the last stage. */
static double simulate(stage_run *runs, int stages, const char *what) {
    double time = 0;
    for (int moved = 1; moved;) {
        moved = 0;
        for (int s = 0; s < stages; s++)
            while (advance(runs, stages, s)) moved = 1;
    }
    for (int s = 0; s < stages; s++) {
        if (runs[s].at < runs[s].count) fail_msg("%s: stage %d hangs in action %d", what, s, runs[s].at);
        time = fmax(time, runs[s].time);
    }
    return time;
}

static void test_schedules(void **state) {
    static stage_run runs[STAGES];
    char what[64];
    (void)state;
    for (int kind = MT_SCHEDULE_1F1B; kind <= MT_SCHEDULE_FORWARD_ONLY; kind++)
        for (int p = 1; p <= STAGES; p++)
            for (int m = 1; m <= MICRO_BATCHES; m++) {
                int backward = kind != MT_SCHEDULE_FORWARD_ONLY;
                snprintf(what, sizeof what, "schedule %d, %d stages, %d micro-batches", kind, p, m);
                memset(runs, 0, sizeof runs);
                for (int s = 0; s < p; s++)
                    assert_int_equal(
                        mt_pipeline_schedule((mt_schedule)kind, p, s, m, runs[s].list, ACTIONS, &runs[s].count),
                        MT_SUCCESS);
                /* without backwards a slot is free after its forward, which the simulator does not know */
                if (!backward) {
                    for (int s = 0; s < p; s++)
                        for (int i = 0; i < runs[s].count; i++) {
                            assert_int_equal(runs[s].list[i].slot, 0);
                            runs[s].list[i].slot = runs[s].list[i].recv_slot = runs[s].list[i].micro_batch;
                        }
                }
                double time = simulate(runs, p, what);
                /* m forwards and backwards, and a bubble of (p - 1) / m of that time */
                if (!(fabs(time - (backward ? 3 : 1) * (m + p - 1)) < 1e-9)) fail_msg("%s: takes %g", what, time);
                for (int s = 0; s < p; s++) {
                    int most = kind == MT_SCHEDULE_1F1B && p - s < m ? p - s : m;
                    assert_int_equal(runs[s].done[0], m);
                    assert_int_equal(runs[s].done[1], backward ? m : 0);
                    if (!backward) continue;
                    assert_int_equal(runs[s].most, most);
                    assert_int_equal(mt_pipeline_slots(runs[s].list, runs[s].count), most);
                }
            }
}

/* Stage 1 of 3 with 4 micro-batches, read from figure 4 of arXiv 2104.04473. */
static void test_schedule_as_data(void **state) {
    static const int expected[][2] = {{MT_RECV_FORWARD, 0},  {MT_FORWARD, 0},
                                      {MT_SEND_FORWARD, 0},  {MT_RECV_FORWARD, 1},
                                      {MT_FORWARD, 1},       {MT_SEND_FORWARD_RECV_BACKWARD, 1},
                                      {MT_BACKWARD, 0},      {MT_SEND_BACKWARD_RECV_FORWARD, 0},
                                      {MT_FORWARD, 2},       {MT_SEND_FORWARD_RECV_BACKWARD, 2},
                                      {MT_BACKWARD, 1},      {MT_SEND_BACKWARD_RECV_FORWARD, 1},
                                      {MT_FORWARD, 3},       {MT_SEND_FORWARD_RECV_BACKWARD, 3},
                                      {MT_BACKWARD, 2},      {MT_SEND_BACKWARD, 2},
                                      {MT_RECV_BACKWARD, 3}, {MT_BACKWARD, 3},
                                      {MT_SEND_BACKWARD, 3}};
    mt_action list[ACTIONS];
    int count = 0, n = sizeof expected / sizeof *expected;
    (void)state;
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 3, 1, 4, NULL, 0, &count), MT_SUCCESS);
    assert_int_equal(count, n);
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 3, 1, 4, list, n, &count), MT_SUCCESS);
    for (int i = 0; i < n; i++) {
        assert_int_equal(list[i].kind, expected[i][0]);
        assert_int_equal(list[i].micro_batch, expected[i][1]);
        assert_int_equal(list[i].slot, expected[i][1] % 2);
    }
    assert_int_equal(list[5].recv_micro_batch, 0);
    assert_int_equal(list[7].recv_micro_batch, 2);
    memset(list, 0x55, sizeof list);
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 3, 1, 4, list, n - 1, &count), MT_ERR_SHAPE);
    assert_int_equal(count, n);
    assert_int_equal(list[n - 1].slot, 0x55555555); /* nothing is written beyond the list */
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 0, 0, 4, list, n, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 2, 2, 4, list, n, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 2, -1, 4, list, n, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 2, 1, -1, list, n, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 2, 1, INT32_MAX, NULL, 0, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_pipeline_schedule((mt_schedule)3, 2, 1, 1, list, n, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 2, 1, 1, list, n, NULL), MT_ERR_ARGUMENT);
}

/* ---- the executor: a model of our own ---------------------------------------------------------------------------- */

#define ROWS 3
#define COLS 32
#define KEPT 5000 /* bytes that one micro-batch keeps on one stage */

/* Stage s computes y = x * (s + 2) + micro-batch; the gradient of micro-batch b enters as 100 + b. Forward fills what
   it keeps with the number of the micro-batch, and backward checks it. Every action overwrites its scratch memory,
   which is larger. */
typedef struct toy {
    mt_grid grid;
    unsigned char *kept[MICRO_BATCHES];
    /* inputs of the first stage; results and gradients of the last */
    float first[MICRO_BATCHES], result[MICRO_BATCHES], gradient[MICRO_BATCHES];
    int uneven; /* later micro-batches keep more */
    int fails;  /* the backward of this micro-batch fails; 0: none */
    size_t peak;
    mt_ledger ledger;
} toy;

static mt_status spoil_scratch(mt_context *ctx, int pieces) {
    size_t mark = mt_arena_mark(ctx);
    for (int i = 0; i < pieces; i++) {
        void *scratch;
        MT_TRY(mt_arena_alloc(ctx, 900, &scratch));
        memset(scratch, 0xee, 900);
    }
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static void fill(mt_tensor t, float value) {
    for (int64_t i = 0; t.data && i < t.rows * t.cols; i++) ((float *)t.data)[i] = value;
}

static mt_status is_filled(mt_tensor t, float value) {
    for (int64_t i = 0; i < t.rows * t.cols; i++) CHECK(((float *)t.data)[i] == value);
    return MT_SUCCESS;
}

static float toy_output(int stage, int micro_batch) {
    float x = 1;
    for (int s = 0; s <= stage; s++) x = x * (float)(s + 2) + (float)micro_batch;
    return x;
}

static float toy_gradient(int stage, int stages, int micro_batch) { /* with respect to the input of a stage */
    float d = (float)(100 + micro_batch);
    for (int s = stages - 1; s >= stage; s--) d *= (float)(s + 2);
    return d;
}

static mt_status toy_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    toy *t = (toy *)user;
    int stage = t->grid.pp_rank, b = a->micro_batch;
    void *kept;
    CHECK((input.data == NULL) == (stage == 0) && (output.data == NULL) == (stage + 1 == t->grid.pp_size));
    if (input.data) MT_TRY(is_filled(input, toy_output(stage - 1, b)));
    MT_TRY(mt_arena_alloc(ctx, 100, &kept));
    memset(kept, b, 100);
    MT_TRY(spoil_scratch(ctx, 8)); /* more than what is kept: it is allocated on both sides of the hole */
    t->kept[b] = (unsigned char *)kept;
    MT_TRY(mt_arena_alloc(ctx, KEPT - 100 + 500 * (size_t)(t->uneven * b), &kept));
    memset(kept, b, KEPT - 100);
    MT_TRY(spoil_scratch(ctx, 8));
    fill(output, toy_output(stage, b));
    t->result[b] = toy_output(stage, b);
    return MT_SUCCESS;
}

static mt_status toy_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    toy *t = (toy *)user;
    int stage = t->grid.pp_rank, stages = t->grid.pp_size, b = a->micro_batch;
    void *left;
    if (t->fails && t->fails == b) return MT_ERR_DATA;
    CHECK((dinput.data == NULL) == (stage == 0) && (doutput.data == NULL) == (stage + 1 == stages));
    if (doutput.data) MT_TRY(is_filled(doutput, toy_gradient(stage + 1, stages, b)));
    MT_TRY(spoil_scratch(ctx, 12));
    for (int i = 0; i < 100; i++) CHECK(t->kept[b][i] == b);
    for (int i = 128; i < KEPT; i++) CHECK(t->kept[b][i] == b);
    fill(dinput, toy_gradient(stage, stages, b));
    t->gradient[b] = toy_gradient(stage, stages, b);
    return mt_arena_alloc(ctx, 64, &left); /* mt_pipeline_run frees it */
}

typedef struct toy_job {
    int stages, micro_batches, uneven, failing_stage;
    mt_schedule schedule;
    toy toys[STAGES];
    mt_status results[STAGES];
} toy_job;

static mt_status toy_rank(mt_comm *world, void *user) {
    toy_job *job = (toy_job *)user;
    mt_grid_desc shape = {.pp = job->stages, .dp = 1};
    mt_action list[ACTIONS];
    toy *t = &job->toys[mt_comm_rank(world)];
    mt_pipeline_stage stage = {
        .rows = ROWS, .cols = COLS, .dtype = MT_F32, .forward = toy_forward, .backward = toy_backward, .user = t};
    size_t mark;
    void *own;
    int count;
    test_rank r;
    mt_status status = test_rank_open(world, shape, NULL, &r);
    memset(t, 0, sizeof *t);
    t->grid = r.grid;
    t->uneven = job->uneven;
    t->fails = job->failing_stage > 0 && job->failing_stage == mt_comm_rank(world) ? 2 : 0;
    if (job->schedule == MT_SCHEDULE_FORWARD_ONLY) stage.backward = NULL;
    if (status == MT_SUCCESS) status = mt_arena_alloc(r.ctx, 77, &own);
    mark = mt_arena_mark(r.ctx);
    if (status == MT_SUCCESS)
        status =
            mt_pipeline_schedule(job->schedule, job->stages, r.grid.pp_rank, job->micro_batches, list, ACTIONS, &count);
    if (status == MT_SUCCESS) status = mt_pipeline_run(r.ctx, &r.grid, &stage, list, count);
    if (status == MT_SUCCESS && mt_arena_mark(r.ctx) != mark) status = MT_ERR_DATA;
    t->peak = mt_arena_peak(r.ctx);
    t->ledger = mt_comm_ledger(r.grid.pp);
    job->results[mt_comm_rank(world)] = status;
    test_rank_close(&r);
    return status;
}

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

static void test_executor(void **state) {
    static toy_job job;
    static const int sizes[][2] = {{1, 0}, {3, 0}, {1, 1}, {1, 5}, {2, 1}, {2, 6}, {3, 2}, {4, 9}, {8, 16}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = MT_SCHEDULE_1F1B; kind <= MT_SCHEDULE_GPIPE; kind++) {
            int p = sizes[i][0], m = sizes[i][1];
            job.stages = p;
            job.micro_batches = m;
            job.schedule = (mt_schedule)kind;
            test_launch(p, toy_rank, &job);
            for (int s = 0; s < p; s++) {
                const toy *t = &job.toys[s];
                int slots = kind == MT_SCHEDULE_1F1B && p - s < m ? p - s : m, neighbours = (s > 0) + (s + 1 < p);
                size_t travels = aligned(ROWS * COLS * 4), own = aligned(77);
                for (int b = 0; b < m; b++) {
                    assert_true(t->result[b] == toy_output(s, b));
                    assert_true(t->gradient[b] == toy_gradient(s, p, b));
                }
                /* Every boundary carries one tensor each way per micro-batch. This rank is at one or two boundaries. */
                assert_int_equal(t->ledger.calls[MT_SEND], neighbours * m);
                assert_int_equal(t->ledger.calls[MT_RECV], neighbours * m);
                assert_int_equal(t->ledger.bytes[MT_SEND], neighbours * m * ROWS * COLS * 4);
                /* what each slot keeps, the scratch memory of one backward, and the tensors that are sent */
                assert_int_equal(t->peak, own + (size_t)slots * (aligned(100) + aligned(KEPT - 100)) +
                                              (m > 0 ? 12 * aligned(900) : 0) +
                                              travels * (size_t)((s > 0) * (slots + 1) + (s + 1 < p) * 2));
            }
        }
}

static void test_executor_forward_only(void **state) {
    static toy_job job;
    (void)state;
    job.stages = 3;
    job.micro_batches = 5;
    job.schedule = MT_SCHEDULE_FORWARD_ONLY;
    test_launch(3, toy_rank, &job);
    for (int b = 0; b < 5; b++) assert_true(job.toys[2].result[b] == toy_output(2, b));
    assert_int_equal(job.toys[1].ledger.calls[MT_SEND] + job.toys[1].ledger.calls[MT_RECV], 10);
}

/* A stage fails in the middle of a run. All other stages get an error and return. */
static void test_executor_stage_fails(void **state) {
    static toy_job job;
    (void)state;
    for (int kind = MT_SCHEDULE_1F1B; kind <= MT_SCHEDULE_GPIPE; kind++)
        for (int failing = 1; failing < 4; failing++) {
            mt_launch_desc d = {
                .ranks = 4, .no_pinning = 1, .timeout_s = TEST_NEVER_OVER, .logger = {test_quiet, NULL}};
            job.stages = 4;
            job.micro_batches = 6;
            job.schedule = (mt_schedule)kind;
            job.failing_stage = failing;
            assert_int_equal(mt_launch(&d, toy_rank, &job), MT_ERR_DATA);
            for (int s = 0; s < 4; s++) assert_int_equal(job.results[s], s == failing ? MT_ERR_DATA : MT_ERR_PEER);
        }
}

/* Parses an action list: three characters (kind, micro-batch, slot) per action. */
static int by_hand(mt_action *list, const char *text) {
    static const char kinds[] = "FBsrtuxy"; /* in the order of mt_action_kind */
    int count = 0;
    for (const char *at = text; *at; at += 4) {
        mt_action *a = &list[count++];
        a->kind = (mt_action_kind)(strchr(kinds, at[0]) - kinds);
        a->micro_batch = a->recv_micro_batch = at[1] - '0';
        a->slot = a->recv_slot = at[2] - '0';
        if (!at[3]) break;
    }
    return count;
}

static void test_lists_made_by_hand(void **state) {
    static const char *const wrong[][2] = {
        {"B00", "action 0 of 1: kind MT_BACKWARD, micro-batch 0, slot 0|needs the forward"},
        {"F00 B11", "action 1 of 2|micro-batch 1, slot 1|needs the forward"}, /* in no slot */
        {"F00 F11 B01 B10", "action 2 of 4"},                                 /* in the other slot */
        {"F00 B00 B00", "action 2 of 3"},                                     /* twice */
        /* another micro-batch has taken its slot */
        {"F00 F10 B00 B10", "action 2 of 4|micro-batch 0"},
        {"F00 F10 B10 B00", "action 3 of 4|micro-batch 0"},
        {"F00 r10 B00 F10 B10", "action 2 of 5"}, /* another micro-batch has taken its input */
        {"F00 F11 B11 y11 B00 F11 y10 B10", "action 7 of 8"},
        {"F01 B01", "action 0 of 2|first forward must be in slot 0"},
    };
    toy t = {.grid = {.pp_size = 1}};
    mt_pipeline_stage stage = {
        .rows = ROWS, .cols = COLS, .dtype = MT_F32, .forward = toy_forward, .backward = toy_backward, .user = &t};
    mt_action list[ACTIONS];
    int count;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        count = by_hand(list, wrong[i][0]);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, wrong[i][1], mt_pipeline_run(r.ctx, &r.grid, &stage, list, count));
    }
    /* any order is allowed; the last forward is only for its result */
    count = by_hand(list, "F00 F11 F22 B11 F11 B00 B22 B11 F00");
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_pipeline_run(r.ctx, &r.grid, &stage, list, count));
    assert_int_equal(mt_pipeline_slots(list, count), 3);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "count is -1", mt_pipeline_run(r.ctx, &r.grid, &stage, list, -1));
    assert_int_equal(mt_pipeline_slots(list, -1), 0);
    for (int k = 0; k < 4; k++) { /* invalid slots */
        static const int slots[] = {INT32_MAX, INT32_MIN, -1, 9};
        list[8].slot = list[8].recv_slot = 8;
        *(k % 2 ? &list[8].slot : &list[8].recv_slot) = slots[k];
        REFUSED(r.ctx, MT_ERR_ARGUMENT,
                k % 2 ? "action 8 of 9|: slot must be at least 0 and"
                      : "action 8 of 9|: recv_slot must be at least 0 and",
                mt_pipeline_run(r.ctx, &r.grid, &stage, list, count));
        assert_int_equal(mt_pipeline_slots(list, count), k == 0 ? INT32_MAX : k == 3 ? 10 : 9);
    }
    test_paper_rank_close(&r);
}

/* Wrong arguments are refused, and a micro-batch that keeps more than its slot has: it would overwrite the next
   slot. */
static void test_executor_refuses(void **state) {
    toy t = {.grid = {.pp_size = 1}};
    mt_pipeline_stage stage = {.rows = ROWS,
                               .cols = COLS,
                               .dtype = MT_F32,
                               .forward = toy_forward,
                               .backward = toy_backward,
                               .user = &t},
                      bad;
    mt_action list[ACTIONS];
    int count;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    assert_int_equal(mt_pipeline_schedule(MT_SCHEDULE_GPIPE, 1, 0, 3, list, ACTIONS, &count), MT_SUCCESS);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "grid", mt_pipeline_run(r.ctx, NULL, &stage, list, count));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "stage is NULL", mt_pipeline_run(r.ctx, &r.grid, NULL, list, count));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "actions is NULL", mt_pipeline_run(r.ctx, &r.grid, &stage, NULL, count));
    bad = stage;
    bad.forward = NULL;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "forward is NULL", mt_pipeline_run(r.ctx, &r.grid, &bad, list, count));
    bad = stage;
    bad.backward = NULL;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "backward is NULL", mt_pipeline_run(r.ctx, &r.grid, &bad, list, count));
    bad = stage;
    bad.rows = 0;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "stage.rows is 0, must be at least 1",
            mt_pipeline_run(r.ctx, &r.grid, &bad, list, count));
    bad = stage;
    bad.cols = -1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "stage.cols is -1, must be at least 1",
            mt_pipeline_run(r.ctx, &r.grid, &bad, list, count));
    bad = stage;
    bad.dtype = MT_I32;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "stage.dtype is MT_I32, must be MT_F32, MT_BF16 or MT_F16",
            mt_pipeline_run(r.ctx, &r.grid, &bad, list, count));
    bad.dtype = (mt_dtype)9;
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, "stage.dtype is 9, must be MT_F32, MT_BF16 or MT_F16",
                    mt_pipeline_run(r.ctx, &r.grid, &bad, list, count));
    list[0].slot = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "action 0 of 6|slot 0", mt_pipeline_run(r.ctx, &r.grid, &stage, list, count));
    list[0].slot = 0;
    list[2].kind = (mt_action_kind)9;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "actions[2].kind is 9, must be MT_FORWARD, MT_BACKWARD, ",
            mt_pipeline_run(r.ctx, &r.grid, &stage, list, count));
    list[2].kind = MT_FORWARD;
    t.uneven = 1;
    REFUSED(r.ctx, MT_ERR_SHAPE, "micro-batch 1 keeps more", mt_pipeline_run(r.ctx, &r.grid, &stage, list, count));
    assert_int_equal(mt_arena_mark(r.ctx), 0);
    t.uneven = 0;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_pipeline_run(r.ctx, &r.grid, &stage, list, count));
    list[5].kind = MT_RECV_FORWARD; /* there is no previous stage */
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "src is -1", mt_pipeline_run(r.ctx, &r.grid, &stage, list, count));
    assert_int_equal(mt_pipeline_run(NULL, &r.grid, &stage, list, count), MT_ERR_ARGUMENT);
    test_paper_rank_close(&r);
}

/* ---- GPTs -------------------------------------------------------------------------------------------------------- */

/* tensor, data, pipeline, sequence parallel, schedule */
static const int splits[][5] = {
    {1, 1, 2, 0, MT_SCHEDULE_1F1B}, {1, 1, 8, 0, MT_SCHEDULE_1F1B},  {1, 1, 4, 0, MT_SCHEDULE_GPIPE},
    {2, 2, 2, 0, MT_SCHEDULE_1F1B}, {2, 2, 2, 1, MT_SCHEDULE_GPIPE}, {1, 2, 4, 0, MT_SCHEDULE_1F1B},
    {4, 1, 2, 1, MT_SCHEDULE_1F1B}, {1, 4, 2, 0, MT_SCHEDULE_GPIPE}, {2, 1, 4, 1, MT_SCHEDULE_1F1B}};
#define SPLITS (SANITIZED ? 4 : (int)(sizeof splits / sizeof *splits))

static gpt_run run_of(int split, mt_dtype dtype, int llama, int invariant) {
    gpt_run r;
    memset(&r, 0, sizeof r);
    r.dtype = dtype;
    r.llama = llama;
    r.qkv_layout = llama == 2 ? MT_QKV_CONCATENATED : llama == 1 ? MT_QKV_SEPARATE : MT_QKV_PER_GROUP;
    r.invariant = invariant;
    r.layers = 8;
    r.tp = r.data = 1;
    if (split < 0) return r;
    r.tp = splits[split][0];
    r.data = splits[split][1];
    r.pipeline = splits[split][2];
    r.sequence_parallel = splits[split][3];
    r.schedule = (mt_schedule)splits[split][4];
    return r;
}

static void assert_close(const gpt_run *r, const gpt_result *a, const gpt_result *b) {
    assert_int_equal(a->count, b->count);
    for (int i = 0; i < GPT_STEPS; i++) {
        if (!(fabs(a->loss[i] - b->loss[i]) <= 1e-5 * a->loss[i]))
            fail_msg("%s: step %d: loss %.9g, on one rank %.9g", gpt_name(r), i, (double)b->loss[i],
                     (double)a->loss[i]);
        if (!(fabs(a->norm[i] - b->norm[i]) <= 1e-4 * a->norm[i]))
            fail_msg("%s: step %d: norm %.9g, on one rank %.9g", gpt_name(r), i, (double)b->norm[i],
                     (double)a->norm[i]);
    }
    for (int64_t i = 0; i < a->count; i++)
        if (!(fabs((double)a->weights[i] - (double)b->weights[i]) <= 2e-3))
            fail_msg("%s: weight %lld is %.9g, on one rank %.9g", gpt_name(r), (long long)i, (double)b->weights[i],
                     (double)a->weights[i]);
}

/* With dropout: tied and untied embeddings, and post-LN. */
static void test_gpt_as_on_one_rank(void **state) {
    static gpt_result one, many;
    (void)state;
    for (int llama = 0; llama < 3; llama++) {
        gpt_execute(run_of(-1, MT_F32, llama, 0), &one);
        assert_true(one.loss[GPT_STEPS - 1] < one.loss[0]);
        for (int i = llama % 3; i < SPLITS; i += 1 + (llama > 0)) {
            gpt_run r = run_of(i, MT_F32, llama, 0);
            gpt_execute(r, &many);
            assert_close(&r, &one, &many);
        }
    }
}

static void test_gpt_invariant(void **state) {
    static gpt_result one, many;
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_BF16; dtype++)
        for (int llama = 0; llama < 3; llama++) {
            gpt_execute(run_of(-1, (mt_dtype)dtype, llama, 4), &one);
            for (int i = 0; i < SPLITS; i++) {
                if (!test_takes((size_t)(i + llama + dtype), 3)) continue;
                gpt_run r = run_of(i, (mt_dtype)dtype, llama, 4);
                r.recompute = (mt_recompute)(i % 3);
                gpt_execute(r, &many);
                for (int step = 0; step < GPT_STEPS; step++)
                    if (one.loss[step] != many.loss[step] || one.norm[step] != many.norm[step])
                        fail_msg("%s: step %d: loss %.9g, norm %.9g, on one rank %.9g, %.9g", gpt_name(&r), step,
                                 (double)many.loss[step], (double)many.norm[step], (double)one.loss[step],
                                 (double)one.norm[step]);
                if (memcmp(&one, &many, GPT_SAME_BYTES) != 0)
                    fail_msg("%s: other weights than on one rank", gpt_name(&r));
            }
        }
}

/* A vocabulary with padding of the program's trains as one without. What is in the padding does not matter: the weights
   of the true rows, losses and norms have the same bits. In invariant mode they have the same bits on every split. */
static void test_gpt_padded_vocabulary(void **state) {
    static gpt_result one, many, with_junk;
    (void)state;
    for (int invariant = 0; invariant <= 4; invariant += 4)
        for (int llama = 0; llama < 2; llama++) {
            gpt_run first = run_of(-1, MT_F32, llama, invariant);
            first.weight_decay = 0.1f;
            first.padded_vocab = invariant ? 48 : 0; /* invariant mode: the virtual shards must be the same */
            gpt_execute(first, &one);
            for (int i = -1; i < SPLITS; i++) {
                gpt_run r = run_of(i, MT_F32, llama, invariant);
                if (i >= 0 && !test_takes((size_t)(i + llama), 2)) continue;
                r.weight_decay = 0.1f;
                r.padded_vocab = 48;
                gpt_execute(r, &many);
                assert_close(&r, &one, &many);
                if (invariant && memcmp(&one, &many, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits", gpt_name(&r));
                r.junk = -300.0f;
                gpt_execute(r, &with_junk);
                if (memcmp(&many, &with_junk, GPT_SAME_BYTES) != 0)
                    fail_msg("%s: the padding changes the results", gpt_name(&r));
            }
        }
}

/* Data ranks reduce small buckets while the last backward runs, and share the state of the optimizer. */
static void test_gpt_shared_between_data_ranks(void **state) {
    static gpt_result one, many;
    (void)state;
    for (int invariant = 0; invariant <= 4; invariant += 4)
        for (int llama = 0; llama < 2; llama++) {
            gpt_execute(run_of(-1, MT_F32, llama, invariant), &one);
            for (int i = 3; i < SPLITS; i++) {
                gpt_run r = run_of(i, MT_F32, llama, invariant);
                if (r.data == 1) continue;
                r.begins = 1;
                r.share.bucket_bytes = 3000;
                r.share.sharded_optimizer = i != 4;
                gpt_execute(r, &many);
                assert_close(&r, &one, &many);
                if (invariant && memcmp(&one, &many, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits", gpt_name(&r));
            }
        }
}

/* The arena size that a meta context computes is what each stage uses. 1F1B uses less than GPipe where it can. */
static void test_gpt_planned(void **state) {
    static gpt_result plan, found;
    (void)state;
    for (int i = 0; i < SPLITS; i++)
        for (int how = MT_RECOMPUTE_NONE; how <= MT_RECOMPUTE_FULL; how += 2) {
            gpt_run r = run_of(i, i % 2 ? MT_BF16 : MT_F32, i % 3, 0), p;
            r.recompute = (mt_recompute)how;
            gpt_execute(r, &found);
            p = r;
            p.device = MT_DEVICE_META;
            p.out = &plan;
            for (int s = 0; s < r.pipeline; s++) {
                mt_comm *world = NULL;
                int ranks = r.tp * r.data;
                assert_int_equal(mt_comm_create_meta(ranks * r.pipeline, s * ranks, &world), MT_SUCCESS);
                if (gpt_rank(world, &p) != MT_SUCCESS) fail_msg("%s: %s", gpt_name(&r), mt_comm_last_error(world));
                mt_comm_destroy(world);
                if (plan.stage_peaks[s] != found.stage_peaks[s])
                    fail_msg("%s: stage %d: %zu bytes planned, %zu used", gpt_name(&r), s, plan.stage_peaks[s],
                             found.stage_peaks[s]);
            }
            if (r.pipeline * r.data < 8 || r.schedule != MT_SCHEDULE_1F1B) continue;
            r.schedule = MT_SCHEDULE_GPIPE;
            gpt_execute(r, &plan);
            assert_true(found.stage_peaks[r.pipeline - 1] < plan.stage_peaks[r.pipeline - 1]);
        }
}

/* A stage must not write to its input: the other stage may still be sending it. */
static mt_status reads(mt_tensor given, mt_status (*f)(mt_context *, void *, const mt_action *, mt_tensor, mt_tensor),
                       mt_context *ctx, void *user, const mt_action *a, mt_tensor other) {
    size_t bytes = given.data ? (size_t)(given.rows * given.cols) * mt_dtype_size(given.dtype) : 0;
    void *before = malloc(bytes + 1);
    mt_status status;
    int same;
    if (!before) abort();
    if (bytes) memcpy(before, given.data, bytes);
    status = f(ctx, user, a, given, other);
    same = !bytes || memcmp(before, given.data, bytes) == 0;
    free(before);
    CHECK(status != MT_SUCCESS || same);
    return status;
}

static mt_status reads_input(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    return reads(input, gpt_forward, ctx, user, a, output);
}

static mt_status reads_doutput(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    return reads(doutput, gpt_backward, ctx, user, a, dinput);
}

/* Checks the parameters of each stage (names and total number), and its traffic. */
static mt_status parts_rank(mt_comm *world, void *user) {
    gpt_run *r = (gpt_run *)user;
    gpt_worker w;
    mt_ledger l;
    int s, last, tied = r->llama != 1, boundaries;
    mt_status status = gpt_open(world, r, &w);
    if (status == MT_SUCCESS) {
        mt_comm_ledger_reset(w.grid.pp);
        status = mt_arena_tensor(w.ctx, MT_F32, GPT_BATCH, 1, &w.totals);
    }
    if (status == MT_SUCCESS) status = mt_fill(w.ctx, w.totals, 0.0f);
    if (status == MT_SUCCESS) {
        w.forward = reads_input;
        w.backward = reads_doutput;
        status = gpt_run_schedule(&w);
    }
    if (status != MT_SUCCESS) return status;
    s = w.grid.pp_rank;
    last = s == w.grid.pp_size - 1;
    boundaries = (s > 0) + !last;
    l = mt_comm_ledger(w.grid.pp);
    CHECK(w.gpt.model.first_layer == s * 8 / w.grid.pp_size && w.gpt.model.local_layers == 8 / w.grid.pp_size);
    for (int i = 0; i < 8; i++) {
        char name[MT_NAME_MAX];
        snprintf(name, sizeof name, "decoder.layers.%d.mlp.linear_fc1.weight", i);
        CHECK((mt_params_find(w.params, name) != NULL) == (i / w.gpt.model.local_layers == s));
    }
    CHECK((mt_params_find(w.params, "embedding.word_embeddings.weight") != NULL) == (s == 0 || (last && tied)));
    CHECK((mt_params_find(w.params, "embedding.position_embeddings.weight") != NULL) ==
          (s == 0 && tied)); /* otherwise rotary */
    CHECK((mt_params_find(w.params, "decoder.final_layernorm.weight") != NULL) == last);
    CHECK((mt_params_find(w.params, "output_layer.weight") != NULL) == (last && !tied));
    CHECK(l.calls[MT_SEND] == (uint64_t)(boundaries * GPT_BATCH / w.grid.dp_size));
    CHECK(l.calls[MT_RECV] == l.calls[MT_SEND]);
    CHECK(l.bytes[MT_SEND] == l.calls[MT_SEND] * GPT_SEQ * (uint64_t)w.gpt.desc.layer.hidden * mt_dtype_size(r->dtype) /
                                  (r->sequence_parallel ? (uint64_t)w.grid.tp_size : 1));
    gpt_close(&w);
    return MT_SUCCESS;
}

static void test_gpt_parts(void **state) {
    (void)state;
    for (int i = 0; i < SPLITS; i++) {
        gpt_run r = run_of(i, i % 2 ? MT_BF16 : MT_F32, i % 2, 0);
        gpt_launch(&r, parts_rank, &r);
    }
}

/* ---- evaluation and logits --------------------------------------------------------------------------------------- */

typedef struct evaluation {
    gpt_run run;
    float losses[GPT_BATCH * GPT_SEQ], logits[3 * GPT_VOCAB];
} evaluation;

static mt_status evaluate_only(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    gpt_worker *w = (gpt_worker *)user;
    mt_batch batch = gpt_batch_of(w, a->micro_batch);
    mt_tensor loss = mt_tensor_rows(w->losses, a->micro_batch, 1);
    for (int i = 0; i < 2 * GPT_SEQ; i++) w->ids[i] = (7 * i + a->micro_batch) % GPT_VOCAB;
    return mt_gpt_stage_forward(ctx, &w->gpt, &batch, w->ids, w->ids + GPT_SEQ, input, output, loss, NULL);
}

static mt_status evaluate_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    return reads(input, evaluate_only, ctx, user, a, output);
}

static mt_status evaluate(gpt_worker *w, evaluation *e) {
    mt_pipeline_stage stage = {.rows = GPT_SEQ / (w->r->sequence_parallel ? w->grid.tp_size : 1),
                               .cols = w->gpt.desc.layer.hidden,
                               .dtype = w->r->dtype,
                               .forward = evaluate_forward,
                               .user = w};
    mt_batch batch = {.sequences = 3, .seq = GPT_SEQ};
    static const int32_t ids[3 * GPT_SEQ] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12,
                                             13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24};
    mt_action actions[3 * GPT_BATCH];
    size_t mark = mt_arena_mark(w->ctx);
    float wide[3 * (GPT_VOCAB + 5)]; /* ld > cols */
    mt_tensor logits = mt_tensor_cols(mt_tensor_f32(wide, 3, GPT_VOCAB + 5), 2, GPT_VOCAB);
    int count;
    MT_TRY(mt_pipeline_schedule(MT_SCHEDULE_FORWARD_ONLY, w->grid.pp_size, w->grid.pp_rank, GPT_BATCH, actions,
                                3 * GPT_BATCH, &count));
    MT_TRY(mt_pipeline_run(w->ctx, &w->grid, &stage, actions, count));
    MT_TRY(gpt_load(w)); /* evaluate_only has replaced the ids */
    if (w->grid.pp_rank + 1 == w->grid.pp_size && w->grid.tp_rank == 0)
        memcpy(e->losses, w->losses.data, sizeof e->losses);
    for (int i = 0; i < 3 * (GPT_VOCAB + 5); i++) wide[i] = 99;
    MT_TRY(mt_gpt_logits(w->ctx, &w->gpt, &batch, ids, logits));
    CHECK(wide[1] == 99.0f && wide[GPT_VOCAB + 2] == 99.0f);
    if (mt_comm_rank(w->world) == 0)
        for (int i = 0; i < 3; i++)
            memcpy(e->logits + i * GPT_VOCAB, mt_tensor_rows(logits, i, 1).data, GPT_VOCAB * sizeof(float));
    CHECK(mt_arena_mark(w->ctx) == mark);
    return MT_SUCCESS;
}

static mt_status evaluation_rank(mt_comm *world, void *user) {
    evaluation *e = (evaluation *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, &e->run, &w);
    if (status == MT_SUCCESS) status = evaluate(&w, e);
    gpt_close(&w);
    return status;
}

static void test_gpt_evaluation(void **state) {
    static evaluation one, many;
    (void)state;
    for (int llama = 0; llama < 2; llama++) {
        one.run = run_of(-1, MT_F32, llama, 0);
        gpt_launch(&one.run, evaluation_rank, &one);
        for (int i = 0; i < SPLITS; i++) {
            memset(&many, 0, sizeof many);
            many.run = run_of(i, MT_F32, llama, 0);
            if (many.run.data > 1) continue;
            gpt_launch(&many.run, evaluation_rank, &many);
            for (int j = 0; j < GPT_BATCH * GPT_SEQ; j++)
                if (!(fabs(one.losses[j] - many.losses[j]) <= 1e-5)) fail_msg("%s: loss %d", gpt_name(&many.run), j);
            for (int j = 0; j < 3 * GPT_VOCAB; j++)
                if (!(fabs(one.logits[j] - many.logits[j]) <= 1e-5)) fail_msg("%s: logit %d", gpt_name(&many.run), j);
        }
    }
}

/* ---- the hash log ------------------------------------------------------------------------------------------------ */

/* The log has the same lines in the same order as on one rank. */
static void test_gpt_hash_log(void **state) {
    static gpt_lines one, many;
    int differ = 0;
    (void)state;
    for (int llama = 0; llama < 2; llama++) {
        one.run = run_of(-1, MT_F32, llama, 4);
        one.run.padded_vocab = llama ? 48 : 0; /* the lines have no padding */
        gpt_launch(&one.run, gpt_log_rank, &one);
        assert_true(one.count > 200);
        for (int i = 0; i < SPLITS; i++) {
            many.run = run_of(i, MT_F32, llama, 4);
            many.run.padded_vocab = one.run.padded_vocab;
            many.run.junk = llama ? 2.0f : 0.0f;
            many.spoil = 0;
            gpt_launch(&many.run, gpt_log_rank, &many);
            assert_int_equal(one.count, many.count);
            for (int j = 0; j < one.count; j++) {
                assert_string_equal(one.name[j], many.name[j]);
                if (one.hash[j] != many.hash[j]) fail_msg("%s: %s", gpt_name(&many.run), one.name[j]);
            }
        }
    }
    many.run = run_of(3, MT_F32, 0, 4);
    many.spoil = 1;
    gpt_launch(&many.run, gpt_log_rank, &many);
    for (int j = 0; j < many.count; j++)
        differ += strcmp(many.name[j], "embedding.word_embeddings.weight differs") == 0;
    assert_int_equal(differ, 1); /* only the line that stands for the copies differs */
}

/* Arguments that the stage does not accept, or that it lacks. */
static void test_gpt_stage_refuses(void **state) {
    mt_gpt_desc d = {.vocab = 11, .layers = 3, .max_seq = 4, .layer = {.hidden = 8, .heads = 2}};
    mt_batch batch = {.sequences = 1, .seq = 4};
    mt_context_desc meta = {.device = MT_DEVICE_META};
    (void)state;
    for (int stage = 0; stage < 3; stage++) {
        mt_tensor x = mt_none(), y, dx, short_x, none = mt_none();
        const int32_t *ids;
        mt_gpt_saved saved;
        mt_gpt gpt;
        test_rank r;
        test_paper_rank(3, stage, (mt_grid_desc){.pp = 3}, &meta, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &gpt));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_saved_create(r.ctx, &gpt, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &x));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &y));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &dx));
        ids = (const int32_t *)x.data;
        short_x = mt_tensor_rows(x, 0, 3);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, stage == 0 ? "stage 0 of 3 needs output" : "needs input",
                mt_gpt_forward(r.ctx, &gpt, &batch, ids, ids, mt_tensor_f32((float *)x.data, 1, 4), &saved));
        REFUSED(r.ctx, stage == 1 ? MT_ERR_SHAPE : MT_ERR_ARGUMENT,
                stage == 0   ? "takes no input"
                : stage == 1 ? "input|[3, 8]"
                             : "stage 2 of 3 takes no output",
                mt_gpt_stage_forward(r.ctx, &gpt, &batch, ids, ids, stage == 2 ? x : short_x, x, none, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_gpt_stage_forward(r.ctx, &gpt, &batch, ids, ids, stage > 0 ? x : none, stage < 2 ? y : none,
                                           stage < 2 ? none : mt_tensor_f32((float *)x.data, 1, 4), &saved));
        if (stage != 1)
            REFUSED(r.ctx, MT_ERR_ARGUMENT, stage == 2 ? "takes no doutput" : "takes no dinput",
                    mt_gpt_stage_backward(r.ctx, &gpt, 1, x, x, &saved));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, stage == 2 ? "needs dinput" : "needs doutput",
                mt_gpt_backward(r.ctx, &gpt, 1, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_gpt_stage_backward(r.ctx, &gpt, 1, stage < 2 ? y : none, stage > 0 ? dx : none, &saved));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "holds no forward", mt_gpt_stage_backward(r.ctx, &gpt, 1, x, x, &saved));
        mt_gpt_saved_destroy(&saved);
        test_paper_rank_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_schedule_as_data),
        cmocka_unit_test(test_executor),
        cmocka_unit_test(test_executor_forward_only),
        cmocka_unit_test(test_executor_stage_fails),
        cmocka_unit_test(test_executor_refuses),
        cmocka_unit_test(test_lists_made_by_hand),
        cmocka_unit_test(test_gpt_as_on_one_rank),
        cmocka_unit_test(test_gpt_invariant),
        cmocka_unit_test(test_gpt_padded_vocabulary),
        cmocka_unit_test(test_gpt_shared_between_data_ranks),
        cmocka_unit_test(test_gpt_planned),
        cmocka_unit_test(test_gpt_parts),
        cmocka_unit_test(test_gpt_evaluation),
        cmocka_unit_test(test_gpt_hash_log),
        cmocka_unit_test(test_gpt_stage_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
