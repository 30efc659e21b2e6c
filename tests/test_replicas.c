/* test_replicas.c - check mode 2: ranks that have other values than the rules say are named, and right programs are
   not refused and compute the same bits as without. */

#define GPT_STEPS 3
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"

/* ---- right programs ---------------------------------------------------------------------------------------------- */

static const gpt_run right[] = {
    {.tp = 2, .data = 2},
    {.tp = 2, .data = 1, .sequence_parallel = 1, .recompute = MT_RECOMPUTE_SELECTIVE},
    {.tp = 4, .data = 1, .sequence_parallel = 1, .overlap_chunks = 2},
    {.tp = 2, .data = 2, .pipeline = 2},
    {.tp = 2, .data = 1, .llama = 1, .dtype = MT_BF16, .loss_scale = 8.0f},
    {.tp = 1, .data = 4, .dtype = MT_BF16, .share = {.sharded_optimizer = 1}, .begins = 1},
    {.tp = 2, .data = 2, .llama = GPT_BERT, .recompute = MT_RECOMPUTE_FULL},
    {.tp = 2, .data = 2, .invariant = 4, .share = {.sharded_optimizer = 1}},
    {.tp = 2, .data = 1, .on_device = 1, .one_pass = 1, .junk = 1.0f, .padded_vocab = 48},
};

static void test_right_programs(void **state) {
    static gpt_result want, got;
    (void)state;
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        gpt_run r = right[i];
        gpt_execute(r, &want);
        r.check = 2;
        gpt_execute(r, &got);
        if (memcmp(&want, &got, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits with check", gpt_name(&r));
    }
}

/* ---- faults on one rank ------------------------------------------------------------------------------------------ */

typedef enum fault {
    NO_FAULT,
    SEED,       /* dropout has other random numbers */
    WEIGHT,     /* a parameter is written behind the library's back */
    IDS,        /* other tokens */
    ACTIVATION, /* the output of a stage is written before it is sent */
    RATE,       /* another learning rate */
    SCALE,      /* another scale of the gradients */
    NOT_A_NUMBER
} fault;

typedef struct faulty {
    gpt_run run;
    fault fault;
    const char *param; /* of WEIGHT */
    int rank;          /* which has the fault; -1: all */
    int other;         /* another rank of its group */
    const char *words; /* of the message of both; NULL: no rank is refused */
    mt_status status[8];
    char text[8][MT_ERROR_BYTES];
} faulty;

static mt_status spoiling_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    gpt_worker *w = (gpt_worker *)user;
    MT_TRY(gpt_forward(ctx, user, a, input, output));
    if (output.data) ((float *)output.data)[3] += w->step == 1 ? 1.0f : 0.0f;
    return MT_SUCCESS;
}

static mt_status spoil(gpt_worker *w, const faulty *f) {
    mt_tensor ids = mt_tensor_make(w->ids, MT_I32, 1, GPT_BATCH * 2 * GPT_SEQ);
    MT_TRY(mt_declare(w->ctx, w->grid.tp, ids, MT_REPLICATED));
    if (f->rank >= 0 && mt_comm_rank(w->world) != f->rank) return MT_SUCCESS;
    if (f->fault == ACTIVATION) w->forward = spoiling_forward;
    if (f->fault == IDS) ((int32_t *)w->ids)[2] ^= 1;
    for (int i = 0; i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        if (!f->param || strcmp(p->name, f->param) != 0) continue;
        if (f->fault == WEIGHT) ((float *)p->value.data)[1] += 0.5f;
        if (f->fault == NOT_A_NUMBER) ((float *)p->value.data)[1] = NAN;
    }
    return MT_SUCCESS;
}

/* A step of a rank with the fault. */
static mt_status faulty_step(gpt_worker *w, const faulty *f) {
    int mine = mt_comm_rank(w->world) == f->rank;
    float loss, norm;
    MT_TRY(gpt_gradients(w, mine && f->fault == SEED ? 7 : 1, &loss, &norm));
    return mt_optimizer_step(w->ctx, &w->optimizer, mine && f->fault == RATE ? 0.02f : 0.01f,
                             mine && f->fault == SCALE ? 0.5f : 1.0f);
}

static mt_status faulty_rank(mt_comm *world, void *user) {
    faulty *f = (faulty *)user;
    int rank = mt_comm_rank(world);
    static gpt_result out;
    gpt_worker w;
    mt_status status;
    f->run.out = &out;
    status = gpt_open(world, &f->run, &w);
    if (status == MT_SUCCESS) status = gpt_step(&w, 0);
    if (status == MT_SUCCESS) status = gpt_keep_weights(&w); /* reads the optimizer's state, too */
    if (status == MT_SUCCESS) status = spoil(&w, f);
    if (status == MT_SUCCESS) status = faulty_step(&w, f);
    if (status == MT_SUCCESS && f->fault == WEIGHT) status = gpt_step(&w, 2);
    f->status[rank] = status;
    snprintf(f->text[rank], sizeof f->text[rank], "%s", mt_last_error(w.ctx));
    gpt_close(&w);
    return MT_SUCCESS;
}

static void check_fault(faulty f) {
    int ranks[2];
    f.run.check = 2;
    gpt_launch(&f.run, faulty_rank, &f);
    ranks[0] = f.rank;
    ranks[1] = f.other;
    for (int i = 0; i < 2; i++) {
        int r = ranks[i] < 0 ? 0 : ranks[i];
        if (f.status[r] != (f.words ? MT_ERR_MISMATCH : MT_SUCCESS))
            fail_msg("%s, fault %d: rank %d: got %s: %s", gpt_name(&f.run), f.fault, r, mt_status_name(f.status[r]),
                     f.text[r]);
        if (f.words && !test_has_words(f.text[r], f.words))
            fail_msg("%s, fault %d: rank %d: '%s' is not all in '%s'", gpt_name(&f.run), f.fault, r, f.words,
                     f.text[r]);
    }
}

#define OVER_TENSOR "over \"tensor\" (2 ranks)|, but rank 1 has other values than rank 0: check seeds, dropout"
#define OVER_DATA "over \"data\" (2 ranks)|, but rank 1 has other values than rank 0: check seeds, dropout"
#define OTHER_MASK "over \"tensor\" (2 ranks), but rank 1 has another seed or place than rank 0: check seeds, dropout"
#define NORM "decoder.layers.0.input_layernorm.weight"
#define FC1 "decoder.layers.1.mlp.linear_fc1.weight"

static void test_faults_are_named(void **state) {
    static const mt_data_parallel_desc shards = {.sharded_optimizer = 1};
    const gpt_run tp = {.tp = 2, .data = 1}, dp = {.tp = 1, .data = 2}, pp = {.tp = 2, .data = 1, .pipeline = 2};
    gpt_run bf16 = dp, zero = dp, bert = tp, stages = pp;
    (void)state;
    bf16.dtype = MT_BF16;
    zero.share = shards;
    stages.tp = 1;
    bert.llama = GPT_BERT;
    check_fault((faulty){tp, NO_FAULT, .rank = 0, .other = 1});
    check_fault((faulty){pp, NO_FAULT, .rank = 0, .other = 3});
    zero.dtype = MT_BF16;
    check_fault((faulty){zero, NO_FAULT, .rank = 0, .other = 1});
    check_fault((faulty){tp, NOT_A_NUMBER, .param = NORM, .rank = -1, .other = 1});
    check_fault(
        (faulty){tp, SEED, .rank = 1,
                 .words = "mt_sync_gradients: dropout.at of mt_bias_dropout_add_forward must agree " OTHER_MASK});
    check_fault((faulty){bert, SEED, .rank = 1, .words = "mt_sync_gradients: dropout.at of |" OTHER_MASK});
    check_fault(
        (faulty){pp, SEED, .rank = 3, .other = 2, .words = "mt_sync_gradients: dropout.at of |must agree " OTHER_MASK});
    check_fault((faulty){tp, WEIGHT, .param = NORM, .rank = 1,
                         .words = "mt_sync_gradients: the value of '" NORM "' is replicated |" OVER_TENSOR});
    check_fault((faulty){dp, WEIGHT, .param = FC1, .rank = 1,
                         .words = "mt_sync_gradients: the value of '" FC1 "' is replicated |" OVER_DATA});
    check_fault((faulty){bf16, WEIGHT, .param = FC1, .rank = 1,
                         .words = "mt_sync_gradients: the value of '" FC1 "' is replicated |" OVER_DATA});
    check_fault((faulty){tp, IDS, .rank = 1,
                         .words = "mt_sync_gradients: ids of mt_embedding_forward |is replicated |" OVER_TENSOR});
    check_fault(
        (faulty){pp, ACTIVATION, .rank = 1,
                 .words = "mt_sync_gradients: |is replicated |since mt_bias_dropout_add_forward at |" OVER_TENSOR});
    check_fault((faulty){tp, RATE, .rank = 1, .words = "mt_optimizer_step: lr is replicated |" OVER_TENSOR});
    check_fault((faulty){dp, RATE, .rank = 1, .words = "mt_optimizer_step: lr is replicated |" OVER_DATA});
    check_fault((faulty){stages, RATE, .rank = 1, .words = "mt_optimizer_step: lr is replicated over \"pipeline\""});
    check_fault((faulty){zero, RATE, .rank = 1, .words = "mt_optimizer_step: lr is replicated |" OVER_DATA});
    check_fault((faulty){zero, SCALE, .rank = 1, .words = "mt_optimizer_step: grad_scale is replicated |" OVER_DATA});
}

/* ---- ranks without data ------------------------------------------------------------------------------------------ */

/* Threads on the meta device compare what there is without data. */
static void test_without_data(void **state) {
    const gpt_run tp = {.tp = 2, .data = 1, .device = MT_DEVICE_META},
                  dp = {.tp = 1, .data = 2, .device = MT_DEVICE_META};
    (void)state;
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        static gpt_result out;
        gpt_run r = right[i];
        r.device = MT_DEVICE_META;
        r.check = 2;
        gpt_execute(r, &out);
    }
    check_fault((faulty){tp, NO_FAULT, .rank = 0, .other = 1});
    check_fault((faulty){tp, SEED, .rank = 1, .words = "mt_sync_gradients: dropout.at of mt_|must agree " OTHER_MASK});
    check_fault((faulty){dp, RATE, .rank = 1, .words = "mt_optimizer_step: lr is replicated |" OVER_DATA});
}

#if !TEST_OVER_MESSAGES /* on MT_DEVICE_META, only threads communicate */
enum {
    UNLIKE_NOTHING,
    UNLIKE_KNOWN, /* rank 1 does not know that it has other columns, and so not whether it has the same rows */
    UNLIKE_FIRST,
    UNLIKE_ROWS,
    UNLIKE_SEED,
    UNLIKE_SUBSEQUENCE,
    UNLIKE_PLACE,
    UNLIKE_SPLIT_SEED, /* the ranks have other rows, and so other masks, but must have one seed */
    UNLIKE_SPLIT_COL,  /* of these rows, all ranks have the same columns */
    UNLIKE_SPLIT_ROW,  /* of other columns, all ranks have the same rows */
    UNLIKE_COUNT
};

/* Rank 1 reads other rows of what both have, or draws other random words for it. */
static mt_status unlike_rank(mt_comm *world, void *user) {
    static const char read[] = "my_step: x of mt_sum is replicated |since mt_declare";
    static const char seed[] = "my_step: dropout.at of mt_bias_dropout_add_forward must agree ";
    static const char row[] = "my_step: dropout.at.first_row of mt_bias_dropout_add_forward must agree ";
    static const char col[] = "my_step: dropout.at.first_col of mt_bias_dropout_add_forward must agree ";
    static const char *const words[UNLIKE_COUNT] = {NULL, NULL, read, read, seed, seed, row, seed, col, row};
    const mt_context_desc where = {.device = MT_DEVICE_META, .check = 2};
    int kind = *(const int *)user, fault = mt_comm_rank(world) == 1 ? kind : UNLIKE_NOTHING;
    mt_random at = {.seed = 1 + (fault == UNLIKE_SEED),
                    .subsequence = fault == UNLIKE_SUBSEQUENCE,
                    .first_row = 4 * (fault == UNLIKE_PLACE),
                    .global_cols = 6},
              rows_at = {.seed = 1 + (fault == UNLIKE_SPLIT_SEED),
                         .first_row = 4 * mt_comm_rank(world),
                         .first_col = 6 * (fault == UNLIKE_SPLIT_COL),
                         .global_cols = 12},
              cols_at = {.seed = 1,
                         .first_row = 4 * (fault == UNLIKE_SPLIT_ROW),
                         .first_col = 6 * mt_comm_rank(world),
                         .global_cols = 12};
    mt_tensor x, y, rows, cols, out;
    mt_arena_request memory[] = {
        {&x, MT_F32, 4, 6}, {&y, MT_F32, 4, 6}, {&rows, MT_F32, 4, 6}, {&cols, MT_F32, 4, 6}, {&out, MT_F32, 1, 1}};
    mt_status status, want = kind > UNLIKE_KNOWN ? MT_ERR_MISMATCH : MT_SUCCESS;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &where, &r));
    CHECK(mt_check_mode(r.ctx) == 2);
    MT_TRY(mt_arena_tensors(r.ctx, memory, 5));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, rows, MT_SPLIT_ROWS));
    if (fault == UNLIKE_KNOWN) MT_TRY(mt_declare_complete(r.ctx, r.grid.tp, cols));
    else MT_TRY(mt_declare(r.ctx, r.grid.tp, cols, MT_SPLIT_COLS));
    MT_TRY(mt_fill(r.ctx, out, 0.0f));
    MT_TRY(mt_sum(r.ctx, mt_tensor_rows(x, fault == UNLIKE_FIRST, 2 + (fault == UNLIKE_ROWS)), out));
    MT_TRY(mt_bias_dropout_add_forward(r.ctx, x, mt_none(), x, (mt_dropout){at, 0.5f}, y));
    MT_TRY(mt_bias_dropout_add_forward(r.ctx, rows, mt_none(), rows, (mt_dropout){rows_at, 0.5f}, y));
    MT_TRY(mt_bias_dropout_add_forward(r.ctx, cols, mt_none(), cols, (mt_dropout){cols_at, 0.5f}, y));
    status = mt_check_replicas(r.ctx, r.grid.tp, "my_step");
    if (status != want) return status ? status : MT_ERR_DATA;
    CHECK(!words[kind] || test_has_words(mt_last_error(r.ctx), words[kind]));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_views_without_data(void **state) {
    (void)state;
    for (int kind = UNLIKE_NOTHING; kind < UNLIKE_COUNT; kind++) test_launch(2, unlike_rank, &kind);
}

/* A gradient that only one tensor rank computes. The ranks sum it over the data ranks all the same. */
static mt_status idle_rank(mt_comm *world, void *user) {
    const mt_context_desc where = {.device = MT_DEVICE_META, .check = 2};
    const int *busy = (const int *)user;
    mt_param_desc desc = {.name = "head.bias", .rows = 1, .cols = 6};
    char words[100];
    mt_tensor dy;
    mt_param *head;
    mt_status status;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &where, &r));
    MT_TRY(mt_params_add(r.ctx, r.params, &desc, &head));
    MT_TRY(mt_params_init(r.ctx, r.params, 1));
    MT_TRY(mt_arena_tensor(r.ctx, MT_F32, 4, 6, &dy));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, dy, MT_REPLICATED));
    MT_TRY(mt_declare(r.ctx, r.grid.dp, dy, MT_SPLIT_ROWS));
    MT_TRY(mt_params_zero_grad(r.ctx, r.params));
    if (*busy < 0 || r.grid.tp_rank == *busy) MT_TRY(mt_bias_backward(r.ctx, dy, head->grad));
    status = mt_sync_gradients(r.ctx, r.params);
    if (status != (*busy < 0 ? MT_SUCCESS : MT_ERR_MISMATCH)) return status ? status : MT_ERR_DATA;
    snprintf(words, sizeof words, "the gradient of 'head.bias' is replicated |rank 1 has %s zeros, unlike rank 0",
             *busy ? "not only" : "only");
    if (status) CHECK(test_has_words(mt_last_error(r.ctx), words));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_gradients_of_one_rank(void **state) {
    (void)state;
    for (int busy = -1; busy < 2; busy++) test_launch(4, idle_rank, &busy);
}
#endif

/* ---- the two functions ------------------------------------------------------------------------------------------- */

static const mt_context_desc checks = {.arena_bytes = 1 << 20, .check = 2};

/* Reads x, with a call that all ranks make, and y between two collectives. Rank 0 reads more. */
static mt_status reading_rank(mt_comm *world, void *user) {
    int fault = *(const int *)user, rank = mt_comm_rank(world);
    mt_tensor x, y, out, more;
    mt_arena_request memory[] = {{&x, MT_F32, 4, 3}, {&y, MT_F32, 4, 3}, {&out, MT_F32, 1, 1}, {&more, MT_F32, 1, 1}};
    mt_status status, want = fault ? MT_ERR_MISMATCH : MT_SUCCESS;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 4));
    MT_TRY(mt_fill(r.ctx, out, 0.0f));
    MT_TRY(mt_fill(r.ctx, more, 0.0f));
    MT_TRY(mt_fill(r.ctx, x, 1.0f));
    MT_TRY(mt_fill(r.ctx, y, 2.0f));
    if (rank == 1 && fault) ((float *)(fault == 1 ? x : y).data)[5] = 3.0f;
    MT_TRY(mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, y, MT_REPLICATED));
    MT_TRY(mt_sum(r.ctx, x, out));
    if (rank == 0) MT_TRY(mt_sum(r.ctx, y, more));
    MT_TRY(mt_sum_of_squares(r.ctx, y, out)); /* not compared: other calls lie before it on rank 0 */
    MT_TRY(mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, mt_tensor_f32(test_floats(&r, 1, 1.0f), 1, 1)));
    MT_TRY(mt_sum(r.ctx, y, out));
    status = mt_check_replicas(r.ctx, r.grid.tp, "my_step");
    if (status != want) return status ? status : MT_ERR_DATA;
    if (fault) CHECK(test_has_words(mt_last_error(r.ctx), "my_step: x of mt_sum is |since mt_declare"));
    MT_TRY(mt_check_replicas(r.ctx, r.grid.tp, "my_step")); /* the list is empty */
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_ranks_may_read_more(void **state) {
    (void)state;
    for (int fault = 0; fault < 3; fault++) test_launch(2, reading_rank, &fault);
}

/* What a rank sends is read, too. */
static mt_status sending_rank(mt_comm *world, void *user) {
    mt_tensor x;
    test_rank r;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2, .pp = 2}, &checks, &r));
    MT_TRY(mt_arena_tensor(r.ctx, MT_F32, 2, 2, &x));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ((float *)x.data)[2] = (float)r.grid.tp_rank;
    if (r.grid.pp_rank == 0) MT_TRY(mt_send(r.ctx, r.grid.pp, x.data, 4, MT_F32, 1));
    else MT_TRY(mt_recv(r.ctx, r.grid.pp, x.data, 4, MT_F32, 0));
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == (r.grid.pp_rank == 0 ? MT_ERR_MISMATCH : MT_SUCCESS));
    if (r.grid.pp_rank == 0)
        CHECK(test_has_words(mt_last_error(r.ctx), "my_step: sendbuf of mt_send is |since mt_declare"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_what_is_sent(void **state) {
    (void)state;
    test_launch(4, sending_rank, NULL);
}

/* A gather in place of what is replicated reads another part on each rank. What it makes is compared. */
static mt_status gathering_rank(mt_comm *world, void *user) {
    int rank = mt_comm_rank(world);
    mt_tensor x, own, out;
    mt_arena_request memory[] = {{&x, MT_F32, 4, 3}, {&out, MT_F32, 1, 1}};
    test_rank r;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 2));
    MT_TRY(mt_fill(r.ctx, out, 0.0f));
    own = mt_tensor_rows(x, 2 * rank, 2);
    for (int i = 0; i < 6; i++) ((float *)own.data)[i] = (float)(6 * rank + i);
    MT_TRY(mt_declare(r.ctx, r.grid.tp, own, MT_SPLIT_ROWS));
    for (int i = 0; i < 2; i++) MT_TRY(mt_all_gather(r.ctx, r.grid.tp, own.data, x.data, 6, MT_F32));
    CHECK(mt_placement_of(r.ctx, r.grid.tp, x) == MT_REPLICATED);
    MT_TRY(mt_sum(r.ctx, x, out));
    MT_TRY(mt_check_replicas(r.ctx, r.grid.tp, "my_step"));
    ((float *)x.data)[0] += (float)rank;
    MT_TRY(mt_sum(r.ctx, x, out));
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == MT_ERR_MISMATCH);
    CHECK(test_has_words(mt_last_error(r.ctx), "my_step: x of mt_sum is |since mt_all_gather"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_a_gather_in_place(void **state) {
    (void)state;
    test_launch(2, gathering_rank, NULL);
}

/* A gather of some rows over the data ranks reads what the tensor ranks have alike. */
static mt_status gathering_rows_rank(mt_comm *world, void *user) {
    int fault = *(const int *)user;
    mt_tensor x, y;
    mt_arena_request memory[] = {{&x, MT_F32, 4, 3}, {&y, MT_F32, 8, 3}};
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 2));
    for (int i = 0; i < 12; i++) ((float *)x.data)[i] = (float)i;
    if (fault && r.grid.tp_rank == 1) ((float *)x.data)[10] = 0.5f; /* in the second chunk */
    MT_TRY(mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    MT_TRY(mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
    for (int first = 0; first < 2; first++) { /* the part that a rank reads is in the chunk of this rank */
        if (first == r.grid.dp_rank) CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == MT_SUCCESS);
        MT_TRY(mt_gather_ranks_from_sequence_region(r.ctx, r.grid.dp, x, y, first, 1));
    }
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == (fault ? MT_ERR_MISMATCH : MT_SUCCESS));
    if (fault)
        CHECK(test_has_words(mt_last_error(r.ctx), "my_step: x of mt_gather_ranks_from_sequence_region is |since mt_"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_a_gather_in_chunks(void **state) {
    (void)state;
    for (int fault = 0; fault < 2; fault++) test_launch(4, gathering_rows_rank, &fault);
}

/* ---- the two ends of a pipeline ---------------------------------------------------------------------------------- */

/* The parameters of the first and of the last of two or three stages. */
typedef struct ends {
    mt_grid_desc grid;
    const char *name[2];
    int shared[2];
    const char *words; /* of the message of all stages; NULL: accepted */
} ends;

/* mt_params_bind refuses the same, and then binds nothing. */
static mt_status ends_bind(test_rank *r, const ends *e) {
    mt_params_memory m = {.elements = mt_params_elements(r->params)};
    mt_status status;
    m.grads = test_floats(r, m.elements, 0.0f);
    status = mt_params_bind(r->ctx, r->params, &m);
    if (!e->words) return status;
    CHECK(status == MT_ERR_MISMATCH);
    CHECK(test_has_words(mt_last_error(r->ctx), "mt_params_bind: ") && test_has_words(mt_last_error(r->ctx), e->words));
    for (int i = 0; i < mt_params_count(r->params); i++) CHECK(!mt_params_at(r->params, i)->grad.data);
    return MT_SUCCESS;
}

static mt_status ends_rank(mt_comm *world, void *user) {
    const ends *e = (const ends *)user;
    mt_param_desc words = {.rows = 4, .cols = 2, .placement = MT_SPLIT_ROWS}, own = {.rows = 1, .cols = 2};
    mt_param *p;
    test_rank r;
    int end, others;
    MT_TRY(test_rank_open(world, e->grid, &checks, &r));
    end = r.grid.pp_rank == 0 ? 0 : r.grid.pp_rank + 1 == r.grid.pp_size ? 1 : 2;
    own.name = end == 0 ? "first" : end == 1 ? "last" : "middle";
    words.name = end == 2 ? e->name[0] : e->name[end]; /* a middle stage is not compared */
    words.shared_embedding = end == 2 ? 0 : e->shared[end];
    others = 3 * end; /* so that the stages have different numbers of parameters */
    for (int i = 0; i < others && end < 2; i++) {
        char name[] = "n0";
        mt_param_desc more = {.name = name, .rows = 1, .cols = 1};
        name[1] = (char)('0' + i);
        MT_TRY(mt_params_add(r.ctx, r.params, &more, &p));
    }
    MT_TRY(mt_params_add(r.ctx, r.params, &own, &p));
    MT_TRY(mt_params_add(r.ctx, r.params, &words, &p));
    MT_TRY(ends_bind(&r, e));
    if (!e->words) MT_TRY(mt_params_init(r.ctx, r.params, 1));
    else {
        CHECK(mt_params_init(r.ctx, r.params, 1) == MT_ERR_MISMATCH);
        CHECK(test_has_words(mt_last_error(r.ctx), "mt_params_init: ") &&
              test_has_words(mt_last_error(r.ctx), e->words));
        CHECK(mt_context_allocated(r.ctx) == 0);
    }
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_the_ends_of_a_pipeline(void **state) {
    static const char both[] = "'w' is on the first and on the last pipeline stage, but "
                               "shared_embedding is not set on both|mt_embedding_desc.shared",
                      first[] = "'w' is on |not set on the first", last[] = "'w' is on |not set on the last",
                      no_last[] = "'w' is a shared_embedding of the first |the last has no parameter",
                      neither[] = "'w' is a shared_embedding of the first |the last has no parameter|"
                                  "'v' is a shared_embedding of the last |the first has no parameter";
    static const ends cases[] = {
        {{.pp = 2}, {"w", "w"}, {1, 1}, NULL},          {{.pp = 2}, {"w", "v"}, {0, 0}, NULL},
        {{.pp = 2}, {"w", "w"}, {0, 0}, both},          {{.pp = 2}, {"w", "w"}, {1, 0}, last},
        {{.pp = 2}, {"w", "w"}, {0, 1}, first},         {{.pp = 2}, {"w", "v"}, {1, 1}, neither},
        {{.tp = 2, .pp = 2}, {"w", "w"}, {0, 0}, both}, {{.pp = 3}, {"w", "w"}, {1, 0}, last},
        {{.dp = 2, .pp = 2}, {"w", "w"}, {1, 1}, NULL}, {{.pp = 2}, {"w", "v"}, {1, 0}, no_last}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ends e = cases[i];
        test_launch((e.grid.tp ? e.grid.tp : 1) * (e.grid.dp ? e.grid.dp : 1) * e.grid.pp, ends_rank, &e);
    }
}

/* Two shared embeddings at both ends. */
typedef struct tables {
    int pp, swapped;    /* 1: the last stage has them in another order */
    mt_param_desc last; /* of the second one on the last stage */
    const char *words;
} tables;

static mt_status tables_rank(mt_comm *world, void *user) {
    const tables *t = (const tables *)user;
    mt_param_desc d[2] = {{.name = "words", .rows = 4, .cols = 2, .init_std = 0.5f, .shared_embedding = 1},
                          {.name = "types", .rows = 4, .cols = 2, .init_std = 0.5f, .shared_embedding = 1}};
    mt_param *p;
    test_rank r;
    mt_status status;
    int last;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.pp = t->pp}, &checks, &r));
    last = r.grid.pp_rank + 1 == t->pp;
    if (last && t->last.name) d[1] = t->last;
    for (int i = 0; i < 2; i++) {
        mt_param_desc one = d[last && t->swapped ? 1 - i : i];
        if (r.grid.pp_rank > 0 && !last) one.shared_embedding = 0;
        MT_TRY(mt_params_add(r.ctx, r.params, &one, &p));
    }
    status = mt_params_init(r.ctx, r.params, 1);
    CHECK(status == (t->words ? MT_ERR_MISMATCH : MT_SUCCESS));
    if (t->words) CHECK(test_has_words(mt_last_error(r.ctx), t->words));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_two_shared_embeddings(void **state) {
    static const mt_param_desc same = {.name = "types", .rows = 4, .cols = 2, .init_std = 0.5f, .shared_embedding = 1};
    static const char order[] =
        "of the shared embeddings, 'words' comes before 'types' on the first |after it on the last";
    tables t[] = {
        {.pp = 2},
        {.pp = 2, .last = same},
        {.pp = 2, .swapped = 1, .words = order},
        {.pp = 3, .swapped = 1, .words = order},
        {.pp = 2, .last = same, .words = "mt_params_init: the shared_embedding 'types' is [4, 2], |[2, 4], "},
        {.pp = 2,
         .last = same,
         .words = "mt_params_init: the shared_embedding 'types' is |init_std 0.25, |on the last"},
        {.pp = 2, .last = same, .words = "mt_params_init: the shared_embedding 'types' is |weight_decay 1 on the last"},
        {.pp = 2, .last = same, .words = "'types' is on the first and on |not set on the last"},
        {.pp = 2, .swapped = 1, .last = same, .words = "'types' is a shared_embedding of the first |'others'"}};
    (void)state;
    t[4].last.rows = 2;
    t[4].last.cols = 4;
    t[5].last.init_std = 0.25f;
    t[6].last.weight_decay = 1;
    t[7].last.shared_embedding = 0;
    t[8].last.name = "others";
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) test_launch(t[i].pp, tables_rank, &t[i]);
}

/* ---- ranks in another check mode --------------------------------------------------------------------------------- */

/* The last rank compares values, the others do not. */
static mt_status modes_rank(mt_comm *world, void *user) {
    const mt_grid_desc *grid = (const mt_grid_desc *)user;
    const int last = mt_comm_size(world) - 1;
    mt_context_desc where = {.arena_bytes = 1 << 20, .check = mt_comm_rank(world) == last ? 2 : 1};
    mt_param_desc d = {.name = "", .rows = 1, .cols = 2};
    char words[200];
    mt_param *p;
    test_rank r;
    MT_TRY(test_rank_open(world, *grid, &where, &r));
    d.name = r.grid.pp_rank ? "v" : "w";
    MT_TRY(mt_params_add(r.ctx, r.params, &d, &p));
    for (int bind = 0; bind < 2; bind++) {
        snprintf(words, sizeof words, "%s: mt_context_desc.check is not 2 on rank|, but 2 on rank %d of \"world\"",
                 bind ? "mt_params_bind" : "mt_params_init", last);
        CHECK((bind ? mt_params_bind(r.ctx, r.params, NULL) : mt_params_init(r.ctx, r.params, 1)) == MT_ERR_MISMATCH);
        CHECK(test_has_words(mt_last_error(r.ctx), words));
        CHECK(mt_context_allocated(r.ctx) == 0);
    }
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_ranks_in_other_modes(void **state) {
    mt_grid_desc shapes[] = {{.tp = 2}, {.dp = 2}, {.pp = 2}, {.pp = 3}};
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        test_launch(shapes[i].pp == 3 ? 3 : 2, modes_rank, &shapes[i]);
}

/* ---- loops without steps, and tensors of one's own --------------------------------------------------------------- */

/* Without mt_check_replicas, a difference is found after 256 collectives. */
static mt_status endless_rank(mt_comm *world, void *user) {
    mt_status status = MT_SUCCESS;
    mt_tensor x, sum;
    mt_arena_request memory[] = {{&x, MT_BF16, 4, 3}, {&sum, MT_F32, 1, 2}};
    test_rank r;
    int n;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 2));
    memset(x.data, mt_comm_rank(world), 24);
    MT_TRY(mt_fill(r.ctx, sum, 0.0f));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    MT_TRY(mt_copy_to_tensor_region_forward(r.ctx, r.grid.tp, x));
    for (n = 0; n < 300 && status == MT_SUCCESS; n++)
        status = mt_all_reduce(r.ctx, r.grid.tp, sum.data, sum.data, 2, MT_F32, MT_SUM);
    CHECK(n == 256 && status == MT_ERR_MISMATCH);
    CHECK(test_has_words(mt_last_error(r.ctx), "mt_all_reduce: x of mt_copy_to_tensor_region_forward is"));
    CHECK(mt_comm_ledger(r.grid.tp).calls[MT_ALL_GATHER] == 0);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_loops_without_steps(void **state) {
    (void)state;
    test_launch(2, endless_rank, NULL);
}

/* A tensor of the caller's own. */
static mt_status own_rank(mt_comm *world, void *user) {
    mt_tensor t;
    test_rank r;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    CHECK(mt_check_mode(r.ctx) == 2);
    MT_TRY(mt_declare(r.ctx, r.grid.tp, mt_tensor_f32(test_floats(&r, 1, 0.0f), 1, 1), MT_SPLIT_ROWS));
    t = test_tensor(&r, 2, 2, (float)mt_comm_rank(world));
    mt_check_pause(r.ctx);
    MT_TRY(mt_check_replica(r.ctx, r.grid.tp, "running mean", "bn1", t));
    MT_TRY(mt_check_resume(r.ctx, MT_SUCCESS));
    MT_TRY(mt_check_replicas(r.ctx, r.grid.tp, "my_step"));
    MT_TRY(mt_check_replica(r.ctx, r.grid.dp, "running mean", "bn1", t)); /* a group of one */
    MT_TRY(mt_check_replicas(r.ctx, r.grid.dp, "my_step"));
    MT_TRY(mt_check_replica(r.ctx, r.grid.tp, "running mean", "bn1", t));
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == MT_ERR_MISMATCH);
    MT_TRY(mt_check_replicas(r.ctx, r.grid.tp, "my_step")); /* the list is empty */
    CHECK(mt_check_replica(r.ctx, r.grid.tp, "running mean", NULL, t) == MT_SUCCESS);
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == MT_ERR_MISMATCH);
    CHECK(test_has_words(mt_last_error(r.ctx), "my_step: running mean is replicated"));
    MT_TRY(mt_check_replica(r.ctx, r.grid.tp, "running mean", "bn1", t));
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == MT_ERR_MISMATCH);
    CHECK(test_has_words(mt_last_error(r.ctx), "my_step: the running mean of 'bn1' is replicated over \"tensor\""));
    CHECK(mt_check_replica(r.ctx, r.grid.tp, NULL, "bn1", t) == MT_ERR_ARGUMENT);
    MT_TRY(mt_check_number(r.ctx, r.grid.tp, "lr", 0.5f));
    MT_TRY(mt_check_replicas(r.ctx, r.grid.tp, "my_step"));
    MT_TRY(mt_check_number(r.ctx, r.grid.tp, "lr", (float)mt_comm_rank(world)));
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == MT_ERR_MISMATCH);
    CHECK(test_has_words(mt_last_error(r.ctx), "my_step: lr is replicated over \"tensor\""));
    CHECK(mt_check_number(r.ctx, r.grid.tp, NULL, 0.5f) == MT_ERR_ARGUMENT);
    CHECK(mt_check_number(NULL, r.grid.tp, "lr", 0.5f) == MT_ERR_ARGUMENT);
    CHECK(mt_check_replica(r.ctx, r.grid.tp, "mask", "bn1", mt_tensor_make(t.data, MT_U8, 1, 1)) == MT_ERR_ARGUMENT);
    CHECK(test_has_words(mt_last_error(r.ctx), "mt_check_replica: |u8"));
    CHECK(mt_check_replicas(r.ctx, NULL, "my_step") == MT_ERR_ARGUMENT);
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, NULL) == MT_ERR_ARGUMENT);
    CHECK(mt_check_replicas(NULL, r.grid.tp, "my_step") == MT_ERR_ARGUMENT);
    test_rank_close(&r);
    return MT_SUCCESS;
}

/* Rank 0 also notes a number of its own, and rank 2 another one than all others. */
static mt_status third_rank(mt_comm *world, void *user) {
    test_rank r;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 4}, &checks, &r));
    MT_TRY(mt_check_number(r.ctx, r.grid.tp, "lr", mt_comm_rank(world) == 2 ? 2.0f : 1.0f));
    if (mt_comm_rank(world) == 0) MT_TRY(mt_check_number(r.ctx, r.grid.tp, "printed", 3.0f));
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == MT_ERR_MISMATCH);
    CHECK(test_has_words(mt_last_error(r.ctx), "my_step: lr is replicated|rank 2 has other values than rank 0"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

/* A rank that has noted more does not hide another one. */
static void test_the_third_rank(void **state) {
    (void)state;
    test_launch(4, third_rank, NULL);
}

static void test_tensors_of_ones_own(void **state) {
    mt_context_desc meta = {.device = MT_DEVICE_META, .check = 2}, bad = {.check = 3};
    mt_context *ctx;
    mt_comm *world;
    (void)state;
    test_launch(2, own_rank, NULL);
    assert_int_equal(mt_comm_create_meta(2, 0, &world), MT_SUCCESS);
    assert_int_equal(mt_context_create(world, &meta, &ctx), MT_SUCCESS);
    assert_int_equal(mt_check_mode(ctx), 1);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_replica(ctx, world, "value", "w", mt_tensor_f32((float *)64, 1, 1)));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_replicas(ctx, world, "my_step"));
    mt_context_destroy(ctx);
    assert_int_equal(mt_context_create(world, &bad, &ctx), MT_ERR_ARGUMENT);
    assert_true(test_has_words(mt_comm_last_error(world), "check is 3, must be 0, 1 or 2"));
    mt_comm_destroy(world);
}

/* ---- what ranks must not have alike, and numbers that they must have alike --------------------------------------- */

typedef enum alike {
    ALIKE_NONE,
    ALIKE_POSITIONS, /* of each rank's own tokens */
    ALIKE_SLOPES,    /* of heads from 0 on */
    ALIKE_SHARD,     /* of a weight */
    ALIKE_MEANT,     /* the same, and said to be meant */
    ALIKE_WORDS,     /* random words of a weight; found by one rank */
    ALIKE_TOKENS,    /* of data ranks */
    ALIKE_TARGETS,   /* of data ranks, whose tokens are said to be meant */
    ALIKE_BY_HEART,  /* tokens and targets of data ranks, both said to be meant */
    ALIKE_BY_CHANCE, /* the same of data ranks in all steps but the first one; right */
    ALIKE_GROUP,     /* of keys and values, in a view of what all ranks have */
    UNLIKE_EPS,
    UNLIKE_BETA,  /* only one rank adds its positions */
    UNLIKE_TERMS, /* one rank adds to its term of a sum; right */
    UNLIKE_MASKS,
    UNLIKE_TARGETS,
    ALIKE_COUNT
} alike;

static const char *const alike_words[] = {
    NULL,
    "ids of mt_embedding_forward|split over \"tensor\"|same as rank 0",
    "alibi_slopes of mt_attention_forward|same as rank 0",
    "the value of 'w'|same as rank 0|call mt_declare_meant for it before",
    NULL,
    "mt_random_normal|first_row is 0",
    "ids of mt_embedding_forward|split over \"data\"|same as rank 0|call mt_declare_meant for it before",
    "targets of mt_cross_entropy_stats|split over \"data\"|same as rank 0|call mt_declare_meant for it before",
    NULL,
    NULL,
    "the view of mt_check_view|same as rank 0",
    "kind or eps of mt_norm_forward|other numbers than rank 0",
    "beta of mt_embedding_forward|other numbers than rank 0",
    NULL,
    "mask of mt_attention_forward|other numbers than rank 0",
    "targets of mt_cross_entropy_stats|other values than rank 0",
};

typedef struct alike_tensors {
    mt_tensor x, y, stats, ids, tokens, slopes, qkv, out, kv, logits, part, targets;
} alike_tensors;

static mt_status alike_declare(mt_context *ctx, const mt_grid *g, alike_tensors *t) {
    mt_arena_request memory[] = {{&t->x, MT_F32, 6, 8},       {&t->y, MT_F32, 6, 8},      {&t->stats, MT_F32, 6, 2},
                                 {&t->ids, MT_I32, 6, 1},     {&t->tokens, MT_I32, 6, 1}, {&t->slopes, MT_F32, 1, 2},
                                 {&t->qkv, MT_F32, 12, 24},   {&t->out, MT_F32, 12, 8},   {&t->kv, MT_F32, 6, 8},
                                 {&t->logits, MT_F32, 6, 10}, {&t->part, MT_F32, 6, 4},   {&t->targets, MT_I32, 6, 1}};
    MT_TRY(mt_arena_tensors(ctx, memory, 12));
    MT_TRY(mt_fill(ctx, t->x, 0));
    MT_TRY(mt_fill(ctx, t->qkv, 0));
    MT_TRY(mt_fill(ctx, t->kv, 0));
    MT_TRY(mt_fill(ctx, t->logits, 0));
    MT_TRY(mt_declare(ctx, g->tp, t->x, MT_SPLIT_ROWS));
    MT_TRY(mt_declare(ctx, g->tp, t->qkv, MT_SPLIT_COLS));
    MT_TRY(mt_declare(ctx, g->tp, t->kv, MT_REPLICATED));
    return mt_declare(ctx, g->tp, t->logits, MT_SPLIT_COLS);
}

static mt_status alike_weights(mt_context *ctx, const mt_grid *g, alike fault, mt_param *w) {
    mt_random at = {.seed = 1, .first_row = fault == ALIKE_WORDS ? 0 : g->tp_rank * w->value.rows, .global_cols = 8};
    float host[64];
    MT_TRY(mt_random_normal(ctx, w->value, 1, at));
    for (int i = 0; i < 64; i++) host[i] = (float)(i * i);
    if (fault == ALIKE_MEANT) MT_TRY(mt_declare_meant(ctx, w->value));
    return fault == ALIKE_SHARD || fault == ALIKE_MEANT ? mt_upload(ctx, host, w->value) : MT_SUCCESS;
}

/* The calls of a step in which rank 1 of a group makes one mistake, or all ranks make it. */
static mt_status alike_calls(mt_context *ctx, const mt_grid *g, alike fault, int step, const mt_param *places,
                             const mt_param *table, const mt_param *gain, alike_tensors *t) {
    const int odd = g->tp_rank == 1, by_heart = fault == ALIKE_TARGETS || fault == ALIKE_BY_HEART;
    const int same = by_heart || fault == ALIKE_TOKENS || (fault == ALIKE_BY_CHANCE && step > 0);
    mt_attention_desc s = {.batch = 1, .seq = 12, .groups = 2, .heads_per_group = 1, .head_dim = 4};
    mt_cross_entropy_shard_desc vocabulary = {.vocab = 20, .first_col = 10 * g->tp_rank};
    int32_t ids[12] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8};
    s.scores.alibi = 1;
    s.scores.alibi_slopes = (const float *)t->slopes.data;
    s.scores.mask = fault == UNLIKE_MASKS && odd ? MT_MASK_BIDIRECTIONAL : MT_MASK_CAUSAL;
    MT_TRY(mt_upload(ctx, ids + (same ? 0 : 6 * g->dp_rank), t->tokens));
    MT_TRY(mt_upload(ctx, ids + (by_heart ? 0 : 5 * g->dp_rank) + (fault == UNLIKE_TARGETS && odd), t->targets));
    MT_TRY(mt_declare(ctx, g->dp, t->tokens, MT_SPLIT_ROWS));
    if (by_heart) MT_TRY(mt_declare_meant(ctx, t->tokens));
    if (fault == ALIKE_BY_HEART) MT_TRY(mt_declare_meant(ctx, t->targets));
    MT_TRY(mt_declare(ctx, g->dp, t->logits, MT_SPLIT_ROWS));
    MT_TRY(mt_position_ids(ctx, fault == ALIKE_POSITIONS ? 0 : 6 * g->tp_rank, 12, NULL, 0, (int32_t *)t->ids.data, 6));
    MT_TRY(mt_embedding_forward(ctx, places->value, 0, (const int32_t *)t->ids.data,
                                fault == UNLIKE_BETA && odd ? 0 : 1, t->x));
    for (int i = 0; i < 2; i++)
        MT_TRY(mt_embedding_forward(ctx, table->value, g->tp_rank * table->value.rows, (const int32_t *)t->tokens.data,
                                    fault == UNLIKE_TERMS && !odd ? (float)i : 0, t->y));
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, t->x, gain->value, mt_none(), fault == UNLIKE_EPS && odd ? 1e-2f : 1e-5f,
                           t->y, t->stats));
    MT_TRY(mt_alibi_slopes(ctx, 4, fault == ALIKE_SLOPES ? 0 : 2 * g->tp_rank, t->slopes));
    MT_TRY(mt_attention_forward(ctx, &s, t->qkv, t->out, mt_none()));
    MT_TRY(
        mt_check_view(ctx, g->tp, mt_tensor_cols(t->kv, fault == ALIKE_GROUP ? 0 : 4 * g->tp_rank, 4), MT_SPLIT_COLS));
    return mt_check_view_end(
        ctx, mt_cross_entropy_stats(ctx, &vocabulary, t->logits, (const int32_t *)t->targets.data, t->part));
}

static mt_status alike_rank(mt_comm *world, void *user) {
    const alike fault = *(const alike *)user;
    const mt_grid_desc shape = {.tp = 2};
    mt_param_desc w = {.name = "w", .rows = 16, .cols = 8, .placement = MT_SPLIT_ROWS, .init_std = 1};
    mt_param_desc places = {.name = "places", .rows = 24, .cols = 8, .init_std = 1};
    mt_param_desc table = {.name = "table", .rows = 20, .cols = 8, .placement = MT_SPLIT_ROWS, .init_std = 1};
    mt_param_desc gain = {.name = "gain", .rows = 1, .cols = 8, .init_value = 1};
    mt_param *p[4];
    mt_context *ctx;
    mt_grid grid;
    mt_params *params;
    alike_tensors t;
    mt_status status;
    MT_TRY(mt_context_create(world, &checks, &ctx));
    MT_TRY(mt_grid_create(world, &shape, &grid));
    MT_TRY(mt_params_create(ctx, &grid, &params));
    MT_TRY(mt_params_add(ctx, params, &w, &p[0]));
    MT_TRY(mt_params_add(ctx, params, &places, &p[1]));
    MT_TRY(mt_params_add(ctx, params, &table, &p[2]));
    MT_TRY(mt_params_add(ctx, params, &gain, &p[3]));
    MT_TRY(mt_params_init(ctx, params, 1234));
    MT_TRY(alike_declare(ctx, &grid, &t));
    status = alike_weights(ctx, &grid, fault, p[0]);
    for (int step = 0; step < 4 && status == MT_SUCCESS; step++) {
        status = mt_params_zero_grad(ctx, params);
        if (status == MT_SUCCESS) status = alike_calls(ctx, &grid, fault, step, p[1], p[2], p[3], &t);
        if (status == MT_SUCCESS) status = mt_sync_gradients(ctx, params);
    }
    if (!alike_words[fault]) MT_TRY(status);
    else CHECK(status != MT_SUCCESS);
    if (alike_words[fault] && status != MT_ERR_PEER && fault != ALIKE_WORDS)
        CHECK(test_has_words(mt_last_error(ctx), alike_words[fault]));
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_what_ranks_must_not_have_alike(void **state) {
    (void)state;
    for (int fault = ALIKE_NONE; fault < ALIKE_COUNT; fault++) {
        alike which = (alike)fault;
        test_launch(4, alike_rank, &which);
    }
}

/* Sequence parallelism by hand, with whole sequences on each rank: ranks may have the same positions. A shard whose
   rows are all equal may be that of another rank, too. */
static mt_status whole_rank(mt_comm *world, void *user) {
    const int fault = *(const int *)user;
    mt_param_desc places = {.name = "places", .rows = 24, .cols = 8, .init_std = 1};
    mt_param_desc decay = {.name = "decay", .rows = 16, .cols = 8, .placement = MT_SPLIT_ROWS};
    mt_attention_desc s = {
        .batch = fault ? 1 : 2, .seq = fault ? 12 : 6, .groups = 1, .heads_per_group = 1, .head_dim = 4};
    int32_t positions[6] = {2, 3, 4, 5, 6, 7};
    float rows[64];
    mt_tensor ids, x, qkv, out;
    mt_arena_request memory[] = {
        {&ids, MT_I32, 6, 1}, {&x, MT_F32, 6, 8}, {&qkv, MT_F32, 12, 12}, {&out, MT_F32, 12, 4}};
    mt_param *p, *a;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    MT_TRY(mt_params_add(r.ctx, r.params, &places, &p));
    MT_TRY(mt_params_add(r.ctx, r.params, &decay, &a));
    MT_TRY(mt_params_init(r.ctx, r.params, 1234));
    for (int i = 0; i < 64; i++) rows[i] = (float)(i % 8 + 1);
    MT_TRY(mt_upload(r.ctx, rows, a->value));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 4));
    MT_TRY(mt_fill(r.ctx, qkv, (float)(1 + r.grid.tp_rank)));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, qkv, MT_SPLIT_COLS));
    MT_TRY(mt_params_zero_grad(r.ctx, r.params));
    MT_TRY(mt_upload(r.ctx, positions, ids));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, ids, MT_SPLIT_ROWS));
    MT_TRY(mt_embedding_forward(r.ctx, p->value, 0, (const int32_t *)ids.data, 0, x));
    MT_TRY(mt_attention_forward(r.ctx, &s, qkv, out, mt_none()));
    CHECK(mt_sync_gradients(r.ctx, r.params) == (fault ? MT_ERR_MISMATCH : MT_SUCCESS));
    if (fault) CHECK(test_has_words(mt_last_error(r.ctx), "ids of mt_embedding_forward|split over \"tensor\"|same as"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_whole_sequences_and_rows_alike(void **state) {
    (void)state;
    for (int fault = 0; fault < 2; fault++)
        test_launch(4, whole_rank, &fault); /* 1: a sequence has rows of both ranks */
}

/* Positions of 6 rows of each of 4 ranks, from first[rank] on, in sequences of seq tokens. */
typedef struct positions {
    int64_t seq, first[4];
    int step;     /* of the positions of a rank */
    int is_meant; /* 1: the program says so */
    const char *words;
} positions;

static const positions own_positions[] = {
    {24, {0, 6, 12, 18}, 1, 0, NULL},
    {24, {18, 0, 12, 6}, 1, 0, NULL}, /* chunks in another order */
    {24, {3, 9, 15, 21}, 1, 0, NULL}, /* the last rank also has the first ones of the next sequence */
    {24, {0, 7, 14, 21}, 1, 0, "rank 0 has the positions from 0 on and rank 1 those from 7 on|each has 6 rows"},
    {24, {1, 7, 13, 18}, 1, 0, "rank 0 has the positions from 1 on and rank 3 those from 18 on"},
    {24, {0, 5, 10, 15}, 1, 0, NULL}, /* without the last position, they may be tokens that count up */
    {24, {0, 6, 0, 6}, 1, 0, NULL},   /* row % 12 */
    {24, {0, 6, 12, 0}, 1, 0, NULL},  /* row % 18 */
    {24, {0, 1, 2, 3}, 1, 0, NULL},   /* row + rank */
    {24, {0, 7, 13, 18}, 1, 0, "ids of mt_embedding_forward|rank 0 has|rank 1 those from 7 on|mt_declare_meant"},
    {24, {0, 6, 18, 18}, 1, 0, "rank 2 has the positions from 18 on and rank 3 those from 18 on"},
    {24, {0, 6, 18, 18}, 1, 1, NULL},
    {24, {0, 0, 0, 0}, 1, 0, "same as rank 0"},
    {12, {0, 6, 0, 6}, 1, 0, NULL}, /* two sequences */
    {12, {0, 0, 6, 6}, 1, 0, NULL},
    {12, {0, 6, 0, 0}, 1, 0, "rank 2 has the positions from 0 on and rank 3 those from 0 on"},
    {24, {0, 1, 2, 4}, 4, 0, NULL}, /* no chunks of neighbours */
};

static mt_status positions_rank(mt_comm *world, void *user) {
    const positions *p = (const positions *)user;
    const mt_attention_desc s = {.batch = 24 / p->seq, .seq = p->seq, .groups = 1, .heads_per_group = 1, .head_dim = 4};
    mt_param_desc places = {.name = "places", .rows = 48, .cols = 8, .init_std = 1};
    mt_tensor ids, x, qkv, out;
    mt_arena_request memory[] = {
        {&ids, MT_I32, 6, 1}, {&x, MT_F32, 6, 8}, {&qkv, MT_F32, 24, 12}, {&out, MT_F32, 24, 4}};
    int32_t host[6];
    mt_param *table;
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 4}, &checks, &r));
    MT_TRY(mt_params_add(r.ctx, r.params, &places, &table));
    MT_TRY(mt_params_init(r.ctx, r.params, 1234));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 4));
    for (int i = 0; i < 6; i++) host[i] = (int32_t)((p->first[r.grid.tp_rank] + i * p->step) % p->seq);
    MT_TRY(mt_upload(r.ctx, host, ids));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, ids, MT_SPLIT_ROWS));
    if (p->is_meant) MT_TRY(mt_declare_meant(r.ctx, ids));
    MT_TRY(mt_embedding_forward(r.ctx, table->value, 0, (const int32_t *)ids.data, 0, x));
    MT_TRY(mt_fill(r.ctx, qkv, 1));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, qkv, MT_SPLIT_COLS));
    MT_TRY(mt_attention_forward(r.ctx, &s, qkv, out, mt_none()));
    status = mt_check_replicas(r.ctx, r.grid.tp, "my_step");
    CHECK(status == (p->words ? MT_ERR_MISMATCH : MT_SUCCESS));
    if (p->words) CHECK(test_has_words(mt_last_error(r.ctx), p->words));
    test_rank_close(&r);
    return MT_SUCCESS;
}

/* Ids beyond the table, up to the largest number, are no positions, and are split over both groups. */
static mt_status largest_ids_rank(mt_comm *world, void *user) {
    mt_param_desc of_table = {.name = "table", .rows = 48, .cols = 8, .init_std = 1};
    mt_tensor ids, x;
    mt_arena_request memory[] = {{&ids, MT_I32, 6, 1}, {&x, MT_F32, 6, 8}};
    int32_t host[6] = {INT32_MAX - 1, INT32_MAX, 0, 1, 2, 3};
    mt_param *table;
    test_rank r;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    MT_TRY(mt_params_add(r.ctx, r.params, &of_table, &table));
    MT_TRY(mt_params_init(r.ctx, r.params, 1234));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 2));
    host[5] += mt_comm_rank(world);
    MT_TRY(mt_upload(r.ctx, host, ids));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, ids, MT_SPLIT_ROWS));
    MT_TRY(mt_embedding_forward(r.ctx, table->value, 0, (const int32_t *)ids.data, 0, x));
    MT_TRY(mt_check_replicas(r.ctx, r.grid.tp, "my_step"));
    MT_TRY(mt_check_replicas(r.ctx, r.grid.dp, "my_step"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_ids_up_to_the_largest(void **state) {
    (void)state;
    test_launch(4, largest_ids_rank, NULL);
}

/* ---- context ranks ----------------------------------------------------------------------------------------------- */

/* What is wrong on rank 1 of 2 context ranks, in each of 2 data ranks. */
typedef enum of_context {
    CONTEXT_RIGHT,
    CONTEXT_IDS,       /* each rank has the tokens of the whole sequence's beginning */
    CONTEXT_POSITIONS, /* from 0 on, on each rank */
    CONTEXT_JUMPS,     /* those of rank 0 in zigzag, on each rank */
    CONTEXT_WEIGHT,
    CONTEXT_RATE,
    CONTEXT_COUNT
} of_context;

static const char *const context_words[] = {
    NULL,
    "ids of mt_embedding_forward|split over \"context\"|same as rank 0|call mt_declare_meant for it before",
    "ids of mt_embedding_forward \"places\"|split over \"context\"|same as rank 0",
    "ids of mt_embedding_forward \"places\"|split over \"context\"|same as rank 0",
    "the value of 'table' is replicated over \"context\" (2 ranks)|other values than rank 0",
    "mt_optimizer_step: lr is replicated over \"context\" (2 ranks)|other values than rank 0"};

static mt_status context_step(test_rank *r, of_context fault, mt_param *const p[3], mt_optimizer *adam, int step) {
    const mt_grid *g = &r->grid;
    const int odd = g->cp_rank == 1;
    int32_t ids[6], places[6], types[6] = {0, 0, 1, 1, 0, 1}; /* types: ranks may have the same */
    mt_tensor x, of_ids = mt_tensor_make(ids, MT_I32, 6, 1), of_places = mt_tensor_make(places, MT_I32, 6, 1);
    mt_tensor of_types = mt_tensor_make(types, MT_I32, 6, 1);
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, 6, 8, &x));
    for (int i = 0; i < 6; i++) {
        int at = (fault == CONTEXT_IDS ? 0 : 6 * g->cp_rank) + i;
        ids[i] = (at * at + 3 * g->dp_rank + step) % 20;
        places[i] = (fault == CONTEXT_POSITIONS ? 0 : 6 * g->cp_rank) + i;
        if (fault == CONTEXT_JUMPS) places[i] = i < 3 ? i : 6 + i;
    }
    MT_TRY(mt_declare(r->ctx, g->dp_cp, of_ids, MT_SPLIT_ROWS));
    MT_TRY(mt_declare(r->ctx, g->cp, of_places, MT_SPLIT_ROWS)); /* the sequences of data ranks begin at 0, too */
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    if (fault == CONTEXT_WEIGHT && odd && step == 1) ((float *)p[0]->value.data)[5] += 0.5f;
    MT_TRY(mt_embedding_forward(r->ctx, p[0]->value, 0, ids, 0, x));
    MT_TRY(mt_embedding_forward(r->ctx, p[1]->value, 0, places, 1, x));
    MT_TRY(mt_declare(r->ctx, g->dp_cp, of_types, MT_SPLIT_ROWS));
    MT_TRY(mt_embedding_forward(r->ctx, p[2]->value, 0, types, 1, x));
    MT_TRY(mt_embedding_backward(r->ctx, x, 0, ids, p[0]->grad));
    MT_TRY(mt_embedding_backward(r->ctx, x, 0, places, p[1]->grad));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(mt_optimizer_step(r->ctx, adam, fault == CONTEXT_RATE && odd ? 0.02f : 0.01f, 0.01f));
    MT_TRY(mt_declare(r->ctx, NULL, of_ids, MT_UNDECLARED));
    MT_TRY(mt_declare(r->ctx, NULL, of_types, MT_UNDECLARED));
    return mt_declare(r->ctx, NULL, of_places, MT_UNDECLARED);
}

static mt_status context_rank(mt_comm *world, void *user) {
    const of_context fault = *(const of_context *)user;
    const mt_param_desc table = {.name = "table", .rows = 20, .cols = 8, .init_std = 1};
    const mt_param_desc places = {.name = "places", .rows = 12, .cols = 8, .init_std = 1};
    const mt_param_desc types = {.name = "types", .rows = 2, .cols = 8, .init_std = 1};
    mt_optimizer adam;
    mt_param *p[3];
    mt_status status;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.cp = 2, .dp = 2}, &checks, &r));
    MT_TRY(mt_params_add(r.ctx, r.params, &table, &p[0]));
    MT_TRY(mt_params_add(r.ctx, r.params, &places, &p[1]));
    MT_TRY(mt_params_add(r.ctx, r.params, &types, &p[2]));
    MT_TRY(mt_params_init(r.ctx, r.params, 1234));
    MT_TRY(mt_optimizer_create(r.ctx, r.params, NULL, &adam));
    status = MT_SUCCESS;
    for (int step = 0; step < 4 && status == MT_SUCCESS; step++) status = context_step(&r, fault, p, &adam, step);
    if (!context_words[fault]) MT_TRY(status);
    else CHECK(status == MT_ERR_MISMATCH || status == MT_ERR_PEER);
    if (status == MT_ERR_MISMATCH) CHECK(test_has_words(mt_last_error(r.ctx), context_words[fault]));
    mt_optimizer_destroy(r.ctx, &adam);
    test_rank_close(&r);
    return MT_SUCCESS;
}

/* What rank 1 of 2 context ranks calls attention with. */
typedef struct of_attention {
    const char *words; /* NULL: it is right */
    int documents, lengths;
    int64_t window;
    float scale;
    mt_context_parallel_desc how;
} of_attention;

static const of_attention attentions[] = {
    {NULL, 0, 0, 0, 0, {0}},
    {"cu_seqlens of attention is replicated over \"context\" (2 ranks)|other values than rank 0", 1, 0, 0, 0, {0}},
    {"lengths of attention is replicated over \"context\" (2 ranks)|other values than rank 0", 0, 1, 0, 0, {0}},
    {"window of attention is replicated over \"context\" (2 ranks)|other values than rank 0", 0, 0, 3, 0, {0}},
    {"scale of attention is replicated over \"context\" (2 ranks)|other values than rank 0", 0, 0, 0, 0.5f, {0}},
    {"contiguous of attention is replicated over \"context\" (2 ranks)|other values than rank 0",
     0,
     0,
     0,
     0,
     {.contiguous = 1}}};

static mt_status differing_attention_rank(mt_comm *world, void *user) {
    const of_attention *a = (const of_attention *)user;
    const int odd = mt_comm_rank(world) == 1;
    const int32_t documents[2][3] = {{0, 3, 8}, {0, 4, 8}}, lengths[2][1] = {{8}, {7}};
    mt_attention_desc s = {.batch = 1, .seq = 8, .groups = 2, .heads_per_group = 1, .head_dim = 4};
    mt_tensor q, k, v, out;
    mt_arena_request rooms[] = {{&q, MT_F32, 4, 8}, {&k, MT_F32, 4, 8}, {&v, MT_F32, 4, 8}, {&out, MT_F32, 4, 8}};
    mt_status status;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.cp = 2}, &checks, &r));
    MT_TRY(mt_arena_tensors(r.ctx, rooms, 4));
    MT_TRY(mt_fill(r.ctx, q, 0.5f));
    MT_TRY(mt_fill(r.ctx, k, 0.25f));
    MT_TRY(mt_fill(r.ctx, v, 2.0f));
    MT_TRY(mt_declare(r.ctx, r.grid.cp, q, MT_SPLIT_ROWS));
    MT_TRY(mt_declare(r.ctx, r.grid.cp, k, MT_SPLIT_ROWS));
    MT_TRY(mt_declare(r.ctx, r.grid.cp, v, MT_SPLIT_ROWS));
    s.cu_seqlens = documents[a->documents && odd], s.documents = 2;
    s.lengths = lengths[a->lengths && odd];
    s.scores.window = odd ? a->window : 0;
    s.scores.scale = odd ? a->scale : 0;
    MT_TRY(mt_context_parallel_attention_forward(r.ctx, r.grid.cp, odd ? &a->how : NULL, &s, q, k, v, out, mt_none()));
    status = mt_check_replicas(r.ctx, r.grid.cp, "my_step");
    CHECK(status == (a->words ? MT_ERR_MISMATCH : MT_SUCCESS));
    if (a->words) CHECK(test_has_words(mt_last_error(r.ctx), a->words));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_attention_of_context_ranks(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof attentions / sizeof *attentions; i++)
        test_launch(2, differing_attention_rank, (void *)&attentions[i]);
}

static void test_context_ranks(void **state) {
    (void)state;
    for (int fault = CONTEXT_RIGHT; fault < CONTEXT_COUNT; fault++) {
        of_context which = (of_context)fault;
        test_launch(4, context_rank, &which);
    }
}

/* Which rows of a shard, that both ranks have, are said to be meant. */
typedef struct meaning {
    int64_t rows[2];  /* of the two parts */
    int writes_again; /* 1: a row is written after that */
    int is_refused;
} meaning;

static mt_status meant_rank(mt_comm *world, void *user) {
    const meaning *m = (const meaning *)user;
    float values[64];
    mt_arena_request memory[1];
    mt_tensor w;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    for (int i = 0; i < 64; i++) values[i] = (float)(i * i);
    memory[0] = (mt_arena_request){&w, MT_F32, 8, 8};
    MT_TRY(mt_arena_tensors(r.ctx, memory, 1));
    MT_TRY(mt_upload(r.ctx, values, w));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, w, MT_SPLIT_ROWS));
    if (m->rows[0]) MT_TRY(mt_declare_meant(r.ctx, mt_tensor_rows(w, 0, m->rows[0])));
    if (m->rows[1]) MT_TRY(mt_declare_meant(r.ctx, mt_tensor_rows(w, m->rows[0], m->rows[1])));
    if (m->writes_again) MT_TRY(mt_fill(r.ctx, mt_tensor_rows(w, 3, 1), 2));
    if (m->writes_again) MT_TRY(mt_declare(r.ctx, r.grid.tp, w, MT_SPLIT_ROWS));
    MT_TRY(mt_add(r.ctx, w, w, w));
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == (m->is_refused ? MT_ERR_MISMATCH : MT_SUCCESS));
    test_rank_close(&r);
    return MT_SUCCESS;
}

/* mt_declare_meant is about what it covers, and about nothing else. */
static void test_only_what_is_meant(void **state) {
    static const meaning all[] = {{{0, 0}, 0, 1}, {{1, 0}, 0, 1}, {{4, 3}, 0, 1},
                                  {{8, 0}, 0, 0}, {{4, 4}, 0, 0}, {{8, 0}, 1, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_launch(2, meant_rank, (void *)&all[i]);
}

/* Two parameters in one buffer of the program, whose shards are the same. What is meant stays so when the buffer is
   written as a whole; the memory of the other one is not meant. */
static mt_status meant_values_rank(mt_comm *world, void *user) {
    const int both = *(const int *)user;
    float values[64];
    mt_arena_request memory[1];
    mt_tensor buffer, w[2];
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &checks, &r));
    for (int i = 0; i < 64; i++) values[i] = (float)(i * i);
    memory[0] = (mt_arena_request){&buffer, MT_F32, 8, 8};
    MT_TRY(mt_arena_tensors(r.ctx, memory, 1));
    for (int i = 0; i < 2; i++) {
        w[i] = mt_tensor_rows(buffer, 4 * i, 4);
        MT_TRY(mt_declare_parameter(r.ctx, i ? "b" : "a", r.grid.tp, NULL, w[i], mt_none(), MT_SPLIT_ROWS, 1, 0));
        if (i == 0 || both) MT_TRY(mt_declare_meant(r.ctx, w[i]));
    }
    MT_TRY(mt_upload(r.ctx, values, buffer));
    for (int i = 0; i < 2; i++) MT_TRY(mt_check_share(r.ctx, r.grid.tp, "value", i ? "b" : "a", w[i]));
    CHECK(mt_check_replicas(r.ctx, r.grid.tp, "my_step") == (both ? MT_SUCCESS : MT_ERR_MISMATCH));
    if (!both) CHECK(test_has_words(mt_last_error(r.ctx), "the value of 'b'|same as rank 0"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_values_that_are_meant(void **state) {
    (void)state;
    for (int both = 0; both < 2; both++) test_launch(2, meant_values_rank, &both);
}

/* Memory of the program's own is not watched because it is meant. */
static mt_status unwatched_rank(mt_comm *world, void *user) {
    mt_context_desc where = checks;
    float own[16] = {0};
    mt_tensor x, y = mt_tensor_f32(own, 4, 4);
    mt_arena_request memory[] = {{&x, MT_F32, 4, 4}};
    test_rank r;
    where.check = *(const int *)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &where, &r));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 1));
    MT_TRY(mt_upload(r.ctx, own, x));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    MT_TRY(mt_declare_meant(r.ctx, y));
    MT_TRY(mt_copy(r.ctx, x, y));
    CHECK(mt_placement_of(r.ctx, r.grid.tp, y) == MT_UNDECLARED);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_what_is_meant_is_not_watched(void **state) {
    (void)state;
    for (int check = 1; check < 3; check++) test_launch(2, unwatched_rank, &check);
}

static void test_positions_of_ranks(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof own_positions / sizeof *own_positions; i++)
        test_launch(4, positions_rank, (void *)&own_positions[i]);
}

/* ---- numbers that are off by the number of ranks, and activations that are used twice ---------------------------- */

#define SAYS(ctx, words, call) CHECK((call) == MT_ERR_ARGUMENT && test_has_words(mt_last_error(ctx), words))

typedef struct scaled {
    mt_tensor qkv, out, logits, stats, lse;
} scaled;

static mt_status scaled_open(const test_rank *r, scaled *t) {
    mt_arena_request memory[] = {{&t->qkv, MT_F32, 4, 12},
                                 {&t->out, MT_F32, 4, 4},
                                 {&t->logits, MT_F32, 4, 4},
                                 {&t->stats, MT_F32, 4, 4},
                                 {&t->lse, MT_F32, 2, 4}};
    MT_TRY(mt_arena_tensors(r->ctx, memory, 5));
    MT_TRY(mt_declare(r->ctx, r->grid.tp, t->qkv, MT_SPLIT_COLS));
    return mt_declare(r->ctx, r->grid.tp, t->logits, MT_SPLIT_COLS);
}

/* A step with the tokens of two micro-batches on two data ranks, 16 in all. */
static mt_status scaled_step(const test_rank *r, const scaled *t, float scale, int is_meant) {
    const mt_cross_entropy_shard_desc all = {.vocab = 8, .first_col = 4 * r->grid.tp_rank};
    for (int micro = 0; micro < 2; micro++) {
        MT_TRY(mt_declare(r->ctx, r->grid.dp, t->logits, MT_SPLIT_ROWS));
        MT_TRY(mt_declare(r->ctx, r->grid.tp, t->lse, MT_REPLICATED));
        MT_TRY(mt_declare(r->ctx, r->grid.dp, t->lse, MT_SPLIT_COLS));
        MT_TRY(mt_cross_entropy_backward(r->ctx, &all, t->logits, (const int32_t *)64, t->lse, mt_none(), scale));
    }
    if (is_meant) mt_check_mean(r->ctx, t->logits, NAN);
    return mt_check_mean_end(r->ctx, "my_step", 1);
}

/* Scales by the sizes of a rank are refused with check = 2, unless the program says that they are meant so. */
static mt_status scaled_rank(mt_comm *world, void *user) {
    const int check = *(const int *)user;
    const mt_context_desc where = {.device = MT_DEVICE_META, .check = check};
    static const float scales[] = {1.0f / 16, 1.0f / 8, 1.0f / 32, 1.0f / 3, 1.00001f / 8};
    static const char *const words[] = {NULL, "my_step|2 times|mt_check_mean(ctx, logits, NAN)", "my_step|0.5 times"};
    mt_attention_desc s = {.batch = 1, .seq = 4, .groups = 1, .heads_per_group = 1, .head_dim = 4};
    scaled t;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &where, &r));
    MT_TRY(scaled_open(&r, &t));
    MT_TRY(mt_attention_forward(r.ctx, &s, t.qkv, t.out, mt_none()));
    s.scores.scale = 0.25f; /* 1 / head_dim, as in muP */
    MT_TRY(mt_attention_forward(r.ctx, &s, t.qkv, t.out, mt_none()));
    s.scores.scale = 0.5f * 1.41421356f; /* of half the features */
    if (check == 2)
        SAYS(r.ctx, "mt_attention_forward|desc.scale is 2 times|\"tensor\" has 2 ranks|if it is meant so",
             mt_attention_forward(r.ctx, &s, t.qkv, t.out, mt_none()));
    MT_TRY(mt_declare_meant(r.ctx, t.qkv));
    MT_TRY(mt_attention_forward(r.ctx, &s, t.qkv, t.out, mt_none()));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, t.qkv, MT_SPLIT_COLS)); /* other queries */
    if (check == 2)
        SAYS(r.ctx, "mt_attention_forward|call mt_declare_meant(ctx, qkv) before",
             mt_attention_forward(r.ctx, &s, t.qkv, t.out, mt_none()));
    for (int i = 0; i < 5; i++) {
        if (check == 2 && (i == 1 || i == 2)) SAYS(r.ctx, words[i], scaled_step(&r, &t, scales[i], 0));
        else MT_TRY(scaled_step(&r, &t, scales[i], 0));
        MT_TRY(scaled_step(&r, &t, scales[i], 1));
    }
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_scales_of_a_rank(void **state) {
    (void)state;
    for (int check = 1; check <= 2; check++) test_launch(4, scaled_rank, &check);
}

/* Two data ranks, of whose tokens those of rank 0 have a loss. 1 / 4 is right then: the number of tokens of all ranks
   that count, and of rank 0 alone. Rank 0 cannot tell it from a mean of means, until rank 1 says that it has ignored
   tokens. ignored 0: those of rank 1 have a loss, too. */
static mt_status half_of_the_loss(mt_comm *world, void *user) {
    const int ignored = *(const int *)user, rank = mt_comm_rank(world);
    const mt_context_desc where = {.arena_bytes = 1 << 16, .check = 2};
    const mt_cross_entropy_shard_desc all = {.vocab = 4};
    const int32_t counts[4] = {0, 1, 2, 3}, none[4] = {-100, -100, -100, -100};
    mt_arena_request memory[2];
    mt_tensor logits, loss;
    test_rank r;
    mt_status status;
    memory[0] = (mt_arena_request){&logits, MT_F32, 4, 4};
    memory[1] = (mt_arena_request){&loss, MT_F32, 1, 4};
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 1, .dp = 2}, &where, &r));
    MT_TRY(mt_arena_tensors(r.ctx, memory, 2));
    MT_TRY(mt_random_normal(r.ctx, logits, 1.0f, (mt_random){.seed = 1 + (uint64_t)rank, .global_cols = 4}));
    MT_TRY(mt_declare(r.ctx, r.grid.dp, logits, MT_SPLIT_ROWS));
    MT_TRY(mt_cross_entropy_forward_backward(r.ctx, &all, logits, rank == 1 && ignored ? none : counts, mt_none(),
                                             0.25f, loss));
    MT_TRY(mt_check_replicas(r.ctx, r.grid.dp, "my_sync"));
    status = mt_check_mean_end(r.ctx, "my_step", 1);
    CHECK(status == (ignored ? MT_SUCCESS : MT_ERR_ARGUMENT));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_ranks_without_a_loss(void **state) {
    (void)state;
    for (int ignored = 0; ignored < 2; ignored++) test_launch(2, half_of_the_loss, &ignored);
}

typedef struct used {
    mt_param *w;
    mt_tensor x, other, h, dh;
} used;

static mt_status used_open(test_rank *r, used *t) {
    mt_param_desc w = {.name = "w", .rows = 16, .cols = 8, .placement = MT_SPLIT_ROWS, .init_std = 1};
    mt_arena_request memory[] = {
        {&t->x, MT_F32, 4, 8}, {&t->other, MT_F32, 4, 8}, {&t->h, MT_F32, 4, 8}, {&t->dh, MT_F32, 4, 8}};
    MT_TRY(mt_params_add(r->ctx, r->params, &w, &t->w));
    MT_TRY(mt_params_init(r->ctx, r->params, 1234));
    MT_TRY(mt_arena_tensors(r->ctx, memory, 4));
    MT_TRY(mt_declare(r->ctx, r->grid.tp, t->x, MT_REPLICATED));
    MT_TRY(mt_declare(r->ctx, r->grid.dp, t->x, MT_SPLIT_ROWS));
    return mt_declare(r->ctx, r->grid.tp, t->other, MT_SPLIT_COLS);
}

/* A backward of the rows [from, from + 2) of h. */
static mt_status used_backward(const test_rank *r, const used *t, int64_t from) {
    return mt_linear_gradients(r->ctx, mt_tensor_rows(t->dh, from, 2), mt_tensor_rows(t->h, from, 2), t->w->grad,
                               mt_none());
}

/* Two forwards, each with the backwards of two losses, into the same memory. The second ones have two parts. */
static mt_status used_rightly(const test_rank *r, const used *t) {
    MT_TRY(mt_copy(r->ctx, t->x, t->h)); /* an evaluation */
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_copy(r->ctx, t->x, t->h));
        for (int loss = 0; loss < 2; loss++) {
            MT_TRY(mt_copy(r->ctx, t->other, t->dh));
            MT_TRY(used_backward(r, t, 0));
            if (i > 0) MT_TRY(used_backward(r, t, 2));
        }
    }
    return MT_SUCCESS;
}

static mt_status used_rank(mt_comm *world, void *user) {
    const mt_context_desc where = {.device = MT_DEVICE_CPU, .check = 2};
    test_rank r;
    used t;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &where, &r));
    MT_TRY(used_open(&r, &t));
    MT_TRY(used_rightly(&r, &t));
    SAYS(r.ctx, "mt_linear_gradients|gradient of 'w'|same activations twice",
         used_backward(&r, &t, 2)); /* the same dh */
    MT_TRY(mt_params_zero_grad(r.ctx, r.params));
    for (int i = 0; i < 2; i++) MT_TRY(mt_copy(r.ctx, t.x, t.h)); /* forwards of two micro-batches */
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_copy(r.ctx, t.other, t.dh));
        if (i == 0) MT_TRY(used_backward(&r, &t, 0));
        else SAYS(r.ctx, "same activations twice|mt_declare the activations before", used_backward(&r, &t, 0));
    }
    MT_TRY(mt_declare(r.ctx, r.grid.tp, t.h, MT_REPLICATED)); /* both are meant */
    for (int i = 0; i < 2; i++) MT_TRY(used_backward(&r, &t, 0));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_activations_are_used_once(void **state) {
    (void)state;
    test_launch(4, used_rank, NULL);
}

/* A backward that writes the gradient of its activations over them. */
typedef enum replaces {
    REPLACES_LOGITS,
    REPLACES_LOGITS_IN_ONE_CALL,
    REPLACES_H, /* of GELU */
    REPLACES_X, /* of SiLU */
    REPLACES_OWN,
    REPLACES_COUNT
} replaces;

static const char *const replaced_words[] = {
    "mt_cross_entropy_backward|logits is its own gradient since mt_cross_entropy_backward",
    "mt_cross_entropy_forward_backward|logits is its own gradient since mt_cross_entropy_forward_backward",
    "mt_activation_backward|h is its own gradient since mt_activation_backward",
    "mt_silu_backward|x is its own gradient since mt_silu_backward",
    "mine|from is its own gradient since mine",
};

/* The backward of `rows` rows of t->h from row `from` on. */
static mt_status replaced_backward(const test_rank *r, const used *t, replaces which, int64_t from, int64_t rows) {
    static const int32_t targets[4] = {1, 0, 3, 2};
    static const mt_rule own_rule = {"from with to(from)", "RRR rrr", NULL};
    const mt_cross_entropy_shard_desc all = {.vocab = 8};
    const mt_tensor h = mt_tensor_rows(t->h, from, rows), d = mt_tensor_rows(t->dh, from, rows);
    const mt_operand own[] = {
        {"from", h, MT_ARG_IN}, {"with", d, MT_ARG_IN | MT_ARG_GRADIENT}, {"to", h, MT_ARG_OUT | MT_ARG_GRADIENT}};
    mt_tensor loss, lse;
    mt_arena_request memory[] = {{&loss, MT_F32, 1, rows}, {&lse, MT_F32, 2, rows}};
    MT_TRY(mt_arena_tensors(r->ctx, memory, 2));
    MT_TRY(mt_fill(r->ctx, lse, 1));
    switch (which) {
    case REPLACES_LOGITS: return mt_cross_entropy_backward(r->ctx, &all, h, targets, lse, mt_none(), 1);
    case REPLACES_LOGITS_IN_ONE_CALL:
        return mt_cross_entropy_forward_backward(r->ctx, &all, h, targets, mt_none(), 1, loss);
    case REPLACES_OWN: return mt_rule_check(r->ctx, "mine", &own_rule, own, 3);
    case REPLACES_H: return mt_activation_backward(r->ctx, MT_GELU_TANH, h, d, h, mt_none());
    default: return mt_silu_backward(r->ctx, h, d, h);
    }
}

static mt_status replaced_rank(mt_comm *world, void *user) {
    const replaces which = *(const replaces *)user;
    const mt_context_desc where = {.device = MT_DEVICE_CPU, .check = 2};
    test_rank r;
    used t;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &where, &r));
    MT_TRY(used_open(&r, &t));
    MT_TRY(mt_params_zero_grad(r.ctx, r.params));
    for (int i = 0; i < 2; i++) { /* of all rows, then of two parts */
        MT_TRY(mt_copy(r.ctx, t.x, t.h));
        MT_TRY(mt_copy(r.ctx, t.x, t.dh));
        MT_TRY(replaced_backward(&r, &t, which, 0, 4 - 2 * i));
        if (i > 0) MT_TRY(replaced_backward(&r, &t, which, 2, 2));
    }
    SAYS(r.ctx, replaced_words[which], replaced_backward(&r, &t, which, 2, 2));
    SAYS(r.ctx, "each forward needs its own saved", replaced_backward(&r, &t, which, 0, 4));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, t.h, MT_REPLICATED)); /* the program has written it again */
    MT_TRY(mt_declare(r.ctx, r.grid.dp, t.h, MT_SPLIT_ROWS));
    MT_TRY(replaced_backward(&r, &t, which, 0, 4));
    MT_TRY(mt_copy(r.ctx, t.x, t.dh)); /* a gradient may be replaced by the next one */
    for (int i = 0; i < 2; i++) MT_TRY(mt_silu_backward(r.ctx, t.x, t.dh, t.dh));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_activations_that_their_gradient_has_replaced(void **state) {
    (void)state;
    for (int i = 0; i < REPLACES_COUNT; i++) {
        replaces which = (replaces)i;
        test_launch(4, replaced_rank, &which);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_ranks_must_not_have_alike),
        cmocka_unit_test(test_whole_sequences_and_rows_alike),
        cmocka_unit_test(test_positions_of_ranks),
        cmocka_unit_test(test_ids_up_to_the_largest),
        cmocka_unit_test(test_context_ranks),
        cmocka_unit_test(test_attention_of_context_ranks),
        cmocka_unit_test(test_only_what_is_meant),
        cmocka_unit_test(test_values_that_are_meant),
        cmocka_unit_test(test_what_is_meant_is_not_watched),
        cmocka_unit_test(test_scales_of_a_rank),
        cmocka_unit_test(test_ranks_without_a_loss),
        cmocka_unit_test(test_activations_are_used_once),
        cmocka_unit_test(test_activations_that_their_gradient_has_replaced),
        cmocka_unit_test(test_right_programs),
        cmocka_unit_test(test_faults_are_named),
        cmocka_unit_test(test_ranks_may_read_more),
        cmocka_unit_test(test_loops_without_steps),
        cmocka_unit_test(test_what_is_sent),
        cmocka_unit_test(test_the_third_rank),
        cmocka_unit_test(test_tensors_of_ones_own),
        cmocka_unit_test(test_a_gather_in_place),
        cmocka_unit_test(test_the_ends_of_a_pipeline),
        cmocka_unit_test(test_without_data),
        cmocka_unit_test(test_ranks_in_other_modes),
        cmocka_unit_test(test_two_shared_embeddings),
        cmocka_unit_test(test_a_gather_in_chunks),
#if !TEST_OVER_MESSAGES
        cmocka_unit_test(test_views_without_data),
        cmocka_unit_test(test_gradients_of_one_rank),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
