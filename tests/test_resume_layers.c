/* test_resume_layers.c - tests checkpoints of a program that has its own layers and uses only mt_parallel.h. Two linear
   layers are trained, saved, killed, loaded on another split and trained on, against training without a break; also the
   program's fields, formats and JSON, and what is refused with which message. Run it from the root of the checkout. */

#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* The calls of the library that change files, until the process kills itself; 0: it does not. */
static int calls_left;

static void count_call(void) {
    if (__atomic_load_n(&calls_left, __ATOMIC_RELAXED) && __atomic_sub_fetch(&calls_left, 1, __ATOMIC_RELAXED) == 0)
        raise(SIGKILL);
}

static ssize_t counted_write(int fd, const void *data, size_t bytes) {
    count_call();
    return write(fd, data, bytes);
}

static int counted_fsync(int fd) {
    count_call();
    return fsync(fd);
}

static int counted_rename(const char *from, const char *to) {
    count_call();
    return rename(from, to);
}

#define write(fd, data, bytes) counted_write(fd, data, bytes)
#define fsync(fd) counted_fsync(fd)
#define rename(from, to) counted_rename(from, to)

#define MEGATRON_IMPLEMENTATION
#include "mt_parallel.h"

#undef write
#undef fsync
#undef rename

#ifdef MEGATRON_H
#error "mt_parallel.h includes megatron.h"
#endif

#include "mt_test_ranks.h"
#include "mt_test_scratch.h"

enum { IN = 12, MIDDLE = 20, OUT = 6, TOKENS = 8, STEPS = 6, HALF = 3 };

/* ---- a program of two linear layers ------------------------------------------------------------------------------ */

/* State that a program keeps beside its parameters: a field of each kind. The last two must match. */
typedef struct notes {
    int64_t epoch;
    uint64_t words;
    int level, frozen;
    float temperature;
    double clock;
    char tokenizer[16];
    int64_t width;
    char task[16];
} notes;

enum { FIELDS = 9 };

static void notes_fields(notes *n, mt_field *out) {
    const mt_field list[FIELDS] = {
        {.name = "my.epoch", .value = &n->epoch, .low = 0, .high = 1000},
        {.name = "my.words", .kind = MT_FIELD_U64, .value = &n->words},
        {.name = "my.level", .kind = MT_FIELD_INT, .value = &n->level},
        {.name = "my.frozen", .kind = MT_FIELD_BOOL, .value = &n->frozen},
        {.name = "my.temperature", .kind = MT_FIELD_F32, .value = &n->temperature},
        {.name = "my.clock", .kind = MT_FIELD_F64, .value = &n->clock},
        {.name = "my.tokenizer", .kind = MT_FIELD_TEXT, .value = n->tokenizer, .bytes = 16},
        {.name = "my.width", .value = &n->width, .must_match = 1},
        {.name = "my.task", .kind = MT_FIELD_TEXT, .value = n->task, .bytes = sizeof n->task, .must_match = 1}};
    memcpy(out, list, sizeof list);
}

static const notes written = {.epoch = 7,
                              .words = UINT64_MAX,
                              .level = -3,
                              .frozen = 1,
                              .temperature = 0.1f,
                              .clock = 1.0 / 3,
                              .tokenizer = "\"bytes\" \xc3\xa9",
                              .width = MIDDLE,
                              .task = "sums"};
static const notes fresh = {.width = MIDDLE, .task = "sums"};

#define STATE_MAX (4 * (IN * MIDDLE + MIDDLE + MIDDLE * OUT + OUT))

typedef struct job {
    int tp, dp;
    mt_dtype dtype;
    int sharded, invariant;
    const char *directory;
    int64_t from, to, save_at; /* from: step of the checkpoint to load; 0: none */
    int middle;                /* features between the layers, at most MIDDLE; 0: MIDDLE */
    const char *second;        /* name of the second layer; NULL: "second" */
    int one_layer, no_optimizer;
    const mt_checkpoint_format *format;
    const mt_tensor_table *table;
    notes n;
    /* Results on the first rank. */
    mt_status status; /* of the load */
    char sentence[MT_ERROR_BYTES];
    mt_training_state state;
    int64_t optimizer_step;
    float values[STATE_MAX]; /* whole parameters, moments and masters */
    int changed;             /* 1: a load that failed has changed them */
} job;

typedef struct model {
    test_rank r;
    mt_column_parallel_linear first;
    mt_row_parallel_linear second;
    mt_optimizer adam;
    mt_checkpoint *checkpoint;
    mt_field fields[FIELDS];
    int wrong; /* case of wrong_part */
} model;

static mt_status model_open(mt_comm *world, const job *j, notes *n, model *m) {
    int middle = j->middle ? j->middle : MIDDLE;
    mt_grid_desc shape = {.tp = j->tp, .dp = j->dp};
    mt_context_desc where = {.arena_bytes = 1 << 20, .invariant = j->invariant};
    mt_data_parallel_desc share = {.sharded_optimizer = j->sharded};
    mt_linear_desc first = {.in_features = IN, .out_features = middle},
                   second = {.in_features = middle, .out_features = OUT, .input_is_parallel = 1};
    mt_checkpoint_desc c = {.directory = in_scratch(j->directory), .fields = m->fields, .field_count = FIELDS};
    memset(m, 0, sizeof *m);
    MT_TRY(test_rank_open(world, shape, &where, &m->r));
    MT_TRY(mt_params_set_dtype(m->r.ctx, m->r.params, j->dtype));
    MT_TRY(mt_params_set_data_parallel(m->r.ctx, m->r.params, &share));
    MT_TRY(mt_column_parallel_linear_create(m->r.ctx, m->r.params, "first", &first, &m->first));
    if (!j->one_layer)
        MT_TRY(mt_row_parallel_linear_create(m->r.ctx, m->r.params, j->second ? j->second : "second", &second,
                                             &m->second));
    MT_TRY(mt_params_init(m->r.ctx, m->r.params, j->from ? 99 : 5)); /* other initial values than the saved ones */
    if (!j->no_optimizer) MT_TRY(mt_optimizer_create(m->r.ctx, m->r.params, NULL, &m->adam));
    notes_fields(n, m->fields);
    c.optimizer = j->no_optimizer ? NULL : &m->adam;
    c.table = j->table;
    c.format = j->format;
    c.model = j->format ? m : NULL;
    return mt_checkpoint_create(m->r.ctx, m->r.params, &c, &m->checkpoint);
}

static void model_close(model *m) {
    mt_checkpoint_destroy(m->r.ctx, m->checkpoint);
    mt_optimizer_destroy(m->r.ctx, &m->adam);
    test_rank_close(&m->r);
}

/* The same x and dy on all tensor ranks of a data rank, different in each step. */
static void put_noise(mt_tensor t, uint64_t seed) {
    for (int64_t i = 0; i < t.rows * t.cols; i++) {
        float x = test_float(&seed);
        if (t.dtype == MT_F32) ((float *)t.data)[i] = x;
        else mt_f32_to_16bit(t.dtype, &x, (uint16_t *)t.data + i, 1);
    }
}

static mt_status train(model *m, const job *j, int64_t step) {
    mt_context *ctx = m->r.ctx;
    size_t mark = mt_arena_mark(ctx);
    uint64_t seed = (uint64_t)(100 * step + m->r.grid.dp_rank);
    mt_linear_saved saved[2];
    mt_tensor x, h, y, dh;
    MT_TRY(mt_arena_tensor(ctx, j->dtype, TOKENS, IN, &x));
    MT_TRY(mt_arena_tensor(ctx, j->dtype, TOKENS, m->first.local_features, &h));
    MT_TRY(mt_arena_tensor(ctx, j->dtype, TOKENS, m->first.local_features, &dh));
    MT_TRY(mt_arena_tensor(ctx, j->dtype, TOKENS, OUT, &y));
    put_noise(x, seed);
    MT_TRY(mt_declare(ctx, m->r.grid.tp, x, MT_REPLICATED));
    MT_TRY(mt_params_zero_grad(ctx, m->r.params));
    MT_TRY(mt_parallel_linear_forward(ctx, &m->first, x, h, &saved[0]));
    /* the loss is sum(y^2) / 2, so its gradient is y */
    MT_TRY(mt_parallel_linear_forward(ctx, &m->second, h, y, &saved[1]));
    MT_TRY(mt_parallel_linear_backward(ctx, &m->second, y, dh, &saved[1]));
    MT_TRY(mt_parallel_linear_backward(ctx, &m->first, dh, mt_none(), &saved[0]));
    MT_TRY(mt_sync_gradients(ctx, m->r.params));
    MT_TRY(mt_optimizer_step(ctx, &m->adam, 1e-2f, 1.0f));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status whole(model *m, const job *j, float *out) {
    memset(out, 0, STATE_MAX * sizeof *out);
    for (int i = 0; i < mt_params_count(m->r.params); i++) {
        const mt_param *p = mt_params_at(m->r.params, i);
        MT_TRY(mt_param_gather(m->r.ctx, m->r.params, p, p->value, out));
        out += p->desc.rows * p->desc.cols;
        for (int what = MT_EXP_AVG; !j->no_optimizer && what <= MT_MASTER; what++) {
            MT_TRY(mt_optimizer_gather(m->r.ctx, &m->adam, p, (mt_optimizer_state)what, out));
            out += p->desc.rows * p->desc.cols;
        }
    }
    return MT_SUCCESS;
}

static mt_status job_rank(mt_comm *world, void *user) {
    job *shared = (job *)user, j = *shared;
    model m;
    float before[STATE_MAX];
    mt_status status;
    MT_TRY(model_open(world, &j, &j.n, &m));
    if (j.from) {
        MT_TRY(whole(&m, &j, before));
        j.status = mt_checkpoint_load(m.r.ctx, m.checkpoint, j.from, &j.state);
        snprintf(j.sentence, sizeof j.sentence, "%s", mt_last_error(m.r.ctx));
    }
    for (int64_t step = j.from; j.status == MT_SUCCESS && step < j.to; step++) {
        MT_TRY(train(&m, &j, step));
        j.state.step = step + 1;
        if (step + 1 == j.save_at) MT_TRY(mt_checkpoint_save(m.r.ctx, m.checkpoint, &j.state));
    }
    status = whole(&m, &j, j.values);
    j.changed = j.status != MT_SUCCESS && memcmp(before, j.values, sizeof before) != 0;
    j.optimizer_step = m.adam.step;
    model_close(&m);
    if (mt_comm_rank(world) == 0) *shared = j;
    return status;
}

static void run(job *j) {
    if (!j->dp) j->dp = 1;
    test_launch(j->tp * j->dp, job_rank, j);
}

/* ---- training goes on -------------------------------------------------------------------------------------------- */

/* Checks that training without a break (`before`) and training that is loaded in the middle (`after`) give the same. */
static void goes_on(job before, job after) {
    before.directory = after.directory = "resume";
    before.n = written;
    after.n = fresh;
    before.state.seed = 11;
    before.state.position = 12;
    before.save_at = HALF;
    before.to = after.to = STEPS;
    after.from = HALF;
    run(&before);
    run(&after);
    if (after.status != MT_SUCCESS) fail_msg("%s", after.sentence);
    assert_memory_equal(after.values, before.values, sizeof before.values);
    assert_memory_equal(&after.n, &written, sizeof written);
    assert_true(after.state.seed == 11 && after.state.position == 12);
    assert_int_equal(after.optimizer_step, STEPS);
    forget("resume");
}

static void same_bits(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
        for (int sharded = 0; sharded <= 1; sharded++) {
            job j = {.tp = 2, .dp = 1 + sharded, .dtype = (mt_dtype)dtype, .sharded = sharded};
            goes_on(j, j);
        }
}

/* In invariant mode the split changes no bit of the training, so it must not change a bit of the checkpoint either. */
static void another_split(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_BF16; dtype++) {
        job one = {.tp = 1, .dtype = (mt_dtype)dtype, .invariant = 2}, two = one, shares = one;
        two.tp = 2;
        goes_on(two, one);
        goes_on(one, two);
        shares.dp = 2; /* ZeRO-1, and the same two data ranks without it */
        one.dp = two.dp = 2;
        shares.sharded = 1;
        goes_on(two, shares);
        goes_on(shares, two);
    }
}

/* Values do not depend on how the optimizer's state is divided: a checkpoint of ZeRO-1 on 2 ranks loads on 1 without
   it. */
static void fewer_data_ranks(void **state) {
    job save = {.tp = 1, .dp = 2, .dtype = MT_BF16, .sharded = 1, .directory = "z", .to = HALF, .save_at = HALF};
    job load = {.tp = 2, .dp = 1, .dtype = MT_BF16, .directory = "z", .from = HALF, .to = HALF};
    (void)state;
    save.n = written;
    load.n = fresh;
    run(&save);
    run(&load);
    if (load.status != MT_SUCCESS) fail_msg("%s", load.sentence);
    assert_memory_equal(load.values, save.values, sizeof save.values);
    forget("z");
}

/* ---- the files --------------------------------------------------------------------------------------------------- */

static void expect_tensor(mt_context *ctx, const mt_safetensors *s, const char *name, int64_t rows, int64_t cols,
                          const float *want) {
    const mt_safetensors_tensor *t = mt_safetensors_find(s, name);
    float got[IN * MIDDLE];
    if (!t) fail_msg("there is no '%s'", name);
    assert_string_equal(t->dtype, "F32");
    assert_int_equal(t->dims, rows ? 2 : 1);
    assert_int_equal(t->shape[0], rows ? rows : cols);
    if (rows) assert_int_equal(t->shape[1], cols);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, t, got));
    assert_memory_equal(got, want, (size_t)(cols * (rows ? rows : 1)) * sizeof *want);
}

/* The files contain whole tensors with the names of the registry, and all fields as the texts below. */
static void files(void **state) {
    static const char *const words[FIELDS][2] = {{"my.epoch", "7"},
                                                 {"my.words", "18446744073709551615"},
                                                 {"my.level", "-3"},
                                                 {"my.frozen", "1"},
                                                 {"my.temperature", "1.00000001e-01"},
                                                 {"my.clock", "3.3333333333333331e-01"},
                                                 {"my.tokenizer", "\"bytes\" \xc3\xa9"},
                                                 {"my.width", "20"},
                                                 {"my.task", "sums"}};
    job j = {.tp = 2, .directory = "f", .to = 1, .save_at = 1, .n = written};
    mt_context *ctx;
    mt_safetensors *s;
    const float *x = j.values;
    struct stat info;
    (void)state;
    run(&j);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, in_scratch("f/step-00000001/model.safetensors"), &s));
    assert_int_equal(mt_safetensors_count(s), 4);
    expect_tensor(ctx, s, "first.weight", MIDDLE, IN, x);
    expect_tensor(ctx, s, "first.bias", 0, MIDDLE, x + 4 * MIDDLE * IN);
    for (int i = 0; i < FIELDS; i++) {
        const char *text = mt_safetensors_metadata(s, words[i][0]);
        assert_string_equal(text ? text : "(none)", words[i][1]);
    }
    assert_true(!mt_safetensors_metadata(s, "gpt.vocab"));
    mt_safetensors_close(s);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, in_scratch("f/step-00000001/optimizer.safetensors"), &s));
    assert_int_equal(mt_safetensors_count(s), 8);
    expect_tensor(ctx, s, "first.weight.exp_avg", MIDDLE, IN, x + MIDDLE * IN);
    expect_tensor(ctx, s, "first.bias.exp_avg_sq", 0, MIDDLE, x + 4 * MIDDLE * IN + 2 * MIDDLE);
    mt_safetensors_close(s);
    assert_true(stat(in_scratch("f/step-00000001/config.json"), &info) != 0);
    mt_context_destroy(ctx);
    forget("f");
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

/* Checks that the message contains the words, and that nothing has changed. */
static void refused(job j, mt_status status, const char *words) {
    notes before;
    if (!j.tp) j.tp = 2;
    if (!j.from) j.from = HALF;
    if (!j.n.width) j.n = fresh;
    j.directory = "r";
    before = j.n;
    run(&j);
    if (j.status != status) fail_msg("%s: got %s: %s", words, mt_status_name(j.status), j.sentence);
    if (!test_has_words(j.sentence, words)) fail_msg("'%s' is not all in '%s'", words, j.sentence);
    assert_false(j.changed);
    assert_memory_equal(&j.n, &before, sizeof before);
}

static void other_models(void **state) {
    job save = {.tp = 1, .directory = "r", .to = HALF, .save_at = HALF, .n = written}, other;
    (void)state;
    run(&save);
    refused((job){.from = 2}, MT_ERR_IO, "step-00000002: has neither model.safetensors nor its index");
    refused((job){.middle = 16}, MT_ERR_DATA, "'first.weight' has shape [20, 12], this model's has [16, 12]");
    refused((job){.second = "last"}, MT_ERR_DATA, "model.safetensors: has no tensor 'last.weight'");
    refused((job){.one_layer = 1}, MT_ERR_DATA, "'second.bias' is not a parameter of this model");
    memset(&other, 0, sizeof other);
    other.n = fresh;
    other.n.width = 21;
    refused(other, MT_ERR_DATA, "model.safetensors: its metadata has my.width '20', must be 21");
    other.n = fresh;
    strcpy(other.n.task, "products");
    refused(other, MT_ERR_DATA, "its metadata has my.task 'sums', must be 'products'");
    shell("rm '%s'", in_scratch("r/step-00000003/optimizer.safetensors"));
    refused((job){.tp = 1}, MT_ERR_IO, "has neither optimizer.safetensors");
    forget("r");
}

/* A checkpoint with fields that another version of the program wrote. */
static void other_fields(void **state) {
    static const char *const wrong[][2] = {{"my.epoch", "must be a whole number from 0 to 1000"},
                                           {"my.tokenizer", "must be a text of at most 15 bytes"},
                                           {"my.level", "must be a whole number from -2147483648 to 2147483647"},
                                           {"my.frozen", "must be 0 or 1"},
                                           {"my.clock", "must be a finite number"}};
    (void)state;
    for (size_t i = 0; i <= sizeof wrong / sizeof *wrong; i++) {
        mt_field f = {
            .name = "my.other", .kind = MT_FIELD_TEXT, .value = (void *)(uintptr_t) "a text of 18 bytes", .bytes = 32};
        mt_checkpoint_desc c = {.directory = in_scratch("r"), .fields = &f, .field_count = 1};
        mt_linear_desc first = {.in_features = IN, .out_features = MIDDLE};
        mt_training_state s = {.step = 1};
        mt_column_parallel_linear layer;
        mt_checkpoint *checkpoint;
        mt_comm *world;
        test_rank r;
        char words[128];
        if (i < sizeof wrong / sizeof *wrong) f.name = wrong[i][0];
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &world));
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, test_rank_open(world, (mt_grid_desc){0}, NULL, &r));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "first", &first, &layer));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_create(r.ctx, r.params, &c, &checkpoint));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_save(r.ctx, checkpoint, &s));
        /* Only the field with this name is read. */
        notes n = fresh;
        mt_field all[FIELDS];
        notes_fields(&n, all);
        for (int k = 0; k < FIELDS; k++)
            if (strcmp(all[k].name, f.name) == 0 || (i == sizeof wrong / sizeof *wrong && k == 0)) c.fields = &all[k];
        mt_checkpoint_destroy(r.ctx, checkpoint);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_create(r.ctx, r.params, &c, &checkpoint));
        snprintf(words, sizeof words, "its metadata has %s 'a text of 18 bytes'|%s", f.name,
                 i < sizeof wrong / sizeof *wrong ? wrong[i][1] : "");
        if (i == sizeof wrong / sizeof *wrong) snprintf(words, sizeof words, "its metadata has no my.epoch");
        REFUSED(r.ctx, MT_ERR_DATA, words, mt_checkpoint_load(r.ctx, checkpoint, 1, &s));
        assert_memory_equal(&n, &fresh, sizeof n);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_checkpoint_import(r.ctx, checkpoint, in_scratch("r/step-00000001"))); /* no fields are read */
        assert_memory_equal(&n, &fresh, sizeof n);
        mt_checkpoint_destroy(r.ctx, checkpoint);
        test_rank_close(&r);
        mt_comm_destroy(world);
        forget("r");
    }
}

/* Fields that load would refuse or misread are refused by save on both ranks, also if only the second rank has them.
   The padding of the caller's scaler struct is not compared. */
static mt_status unsaved_rank(mt_comm *world, void *user) {
    static const char *const wanted[] = {"my.epoch is 1001, must be a whole number from 0 to 1000",
                                         "my.epoch is -1, must be",
                                         "my.frozen is 2, must be 0 or 1",
                                         "my.temperature is inf, must be a finite number",
                                         "my.temperature is -inf, must be a finite number",
                                         "my.clock is inf, must be a finite number",
                                         "my.clock is nan, must be a finite number",
                                         "my.tokenizer is 'xxxxxxxxxxxxxxxx', must be a text of at most 15 bytes",
                                         "my.task is 'yyyyyyyyyyyyyyyy', must be a text of at most 15 bytes"};
    job j = {.tp = 2, .directory = "u"};
    int rank = mt_comm_rank(world);
    mt_training_state s = {.step = 1};
    const char *first = in_scratch("u/step-00000001"), *second = in_scratch("u/step-00000002");
    notes n = written;
    model m;
    (void)user;
    MT_TRY(model_open(world, &j, &n, &m));
    memset(&s.scaler, 0x55, sizeof s.scaler);
    s.scaler.desc = (mt_loss_scaler_desc){0};
    s.scaler.scale = 0, s.scaler.good_steps = s.scaler.overflows = 0, s.scaler.skipped = 0;
    MT_TRY(mt_checkpoint_save(m.r.ctx, m.checkpoint, &s));
    s.step = 2;
    for (int i = 0; i < 18; i++) {
        n = written;
        switch (i >= 9 && rank == 0 ? -1 : i % 9) {
        case 0: n.epoch = 1001; break;
        case 1: n.epoch = -1; break;
        case 2: n.frozen = 2; break;
        case 3: n.temperature = INFINITY; break;
        case 4: n.temperature = -INFINITY; break;
        case 5: n.clock = (double)INFINITY; break;
        case 6: n.clock = fabs((double)NAN); break;
        case 7: memset(n.tokenizer, 'x', sizeof n.tokenizer); break;
        case 8: memset(n.task, 'y', sizeof n.task); break;
        default: break;
        }
        CHECK(mt_checkpoint_save(m.r.ctx, m.checkpoint, &s) == MT_ERR_ARGUMENT);
        if (!strstr(mt_last_error(m.r.ctx), wanted[i % 9])) fprintf(stderr, "%s\n", mt_last_error(m.r.ctx));
        CHECK(strstr(mt_last_error(m.r.ctx), wanted[i % 9]));
        CHECK(access(first, F_OK) == 0 && access(second, F_OK) != 0);
        /* the field `task` is compared */
        if (i == 8) CHECK(mt_checkpoint_load(m.r.ctx, m.checkpoint, 1, &s) == MT_ERR_DATA);
        if (i == 8) CHECK(strstr(mt_last_error(m.r.ctx), "my.task 'sums', must be 'yyyyyyyyyyyyyyyy'"));
        m.r.ctx->error[0] = 0;
    }
    n = written;
    MT_TRY(mt_checkpoint_save(m.r.ctx, m.checkpoint, &s));
    MT_TRY(mt_checkpoint_load(m.r.ctx, m.checkpoint, 2, &s));
    model_close(&m);
    return MT_SUCCESS;
}

static void not_saved(void **state) {
    (void)state;
    test_launch(2, unsaved_rank, NULL);
    shell("test -z \"$(find '%s' -name '.step*')\"", in_scratch("u"));
    forget("u");
}

/* A registry with one parameter, on one rank. */
static void open_one(test_rank *r) {
    mt_param_desc p = {.name = "w", .rows = 1, .cols = 1};
    mt_param *w;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, r);
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_add(r->ctx, r->params, &p, &w));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_init(r->ctx, r->params, 1));
}

static void arguments(void **state) {
    static const mt_field taken[] = {
        {.name = "step"},     {.name = "note"},           {.name = "checksum"},         {.name = "format"},
        {.name = "megatron"}, {.name = "optimizer_step"}, {.name = "loss_scaler.scale"}};
    int64_t x = 0;
    mt_field two[2] = {{.name = "my", .value = &x}, {.name = "my", .value = &x}}, f = {.name = "my", .value = &x};
    mt_checkpoint_desc c = {.directory = "x", .fields = &f, .field_count = 1};
    mt_checkpoint *out;
    mt_field_kind kinds[] = {(mt_field_kind)7, MT_FIELD_TEXT};
    test_rank r;
    (void)state;
    open_one(&r);
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        f.name = taken[i].name;
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "fields[0]: another field is also called",
                mt_checkpoint_create(r.ctx, r.params, &c, &out));
    }
    f.name = NULL;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "fields[0] has no name", mt_checkpoint_create(r.ctx, r.params, &c, &out));
    f.name = "my";
    for (int i = 0; i < 2; i++) {
        f.kind = kinds[i];
        REFUSED(r.ctx, MT_ERR_ARGUMENT, kinds[i] == MT_FIELD_TEXT ? "'my': bytes is 0" : "'my': kind is 7",
                mt_checkpoint_create(r.ctx, r.params, &c, &out));
    }
    f.kind = MT_FIELD_I64, f.value = NULL;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'my': value is NULL", mt_checkpoint_create(r.ctx, r.params, &c, &out));
    c.fields = two, c.field_count = 2;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "fields[1]: another field is also called 'my'",
            mt_checkpoint_create(r.ctx, r.params, &c, &out));
    c.field_count = 0;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "field_count is 0", mt_checkpoint_create(r.ctx, r.params, &c, &out));
    c.fields = NULL, c.model = &f;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "model|format", mt_checkpoint_create(r.ctx, r.params, &c, &out));
    c.field_count = 2, c.model = NULL;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "field_count is 2", mt_checkpoint_create(r.ctx, r.params, &c, &out));
    c.field_count = -1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "field_count is -1", mt_checkpoint_create(r.ctx, r.params, &c, &out));
    test_paper_rank_close(&r);
}

/* Arguments of the calls that read, without any file. */
static void reading_arguments(void **state) {
    int64_t x = 0;
    mt_field f = {.name = "my"}, whole = {.name = "my", .value = &x};
    mt_safetensors_set *set;
    char text[MT_FIELD_TEXT_MAX];
    test_rank r;
    (void)state;
    open_one(&r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "directory is NULL", mt_safetensors_set_open(r.ctx, NULL, "model", &set));
    REFUSED(r.ctx, MT_ERR_IO, "/none|neither", mt_safetensors_set_open(r.ctx, "/none", "model", &set));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "/none|40 characters",
            mt_safetensors_set_open(r.ctx, "/none", "a-stem-of-more-letters-than-the-40-it-has", &set));
    assert_true(!set && !mt_safetensors_set_file(NULL, 0) && !mt_safetensors_set_find(NULL, "x"));
    mt_safetensors_set_close(NULL);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "file is NULL", mt_safetensors_fields(r.ctx, NULL, &f, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name is NULL", mt_json_read(r.ctx, "/none", NULL, &f, 1, NULL));
    text[0] = 'x';
    mt_field_text(NULL, text);
    assert_string_equal(text, "");
    text[0] = 'x';
    mt_field_text(&f, text); /* a field without a value */
    assert_string_equal(text, "");
    mt_field_text(&whole, NULL);
    test_paper_rank_close(&r);
}

/* Bad fields to read from a file that is there: no value is written. */
static void field_arguments(void **state) {
    int64_t x = 0;
    mt_checkpoint_desc c = {.directory = in_scratch("r")};
    mt_training_state s = {.step = 1};
    mt_checkpoint *out;
    mt_safetensors *file;
    test_rank r;
    (void)state;
    open_one(&r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_create(r.ctx, r.params, &c, &out));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_save(r.ctx, out, &s));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_safetensors_open(r.ctx, in_scratch("r/step-00000001/model.safetensors"), &file));
    shell("echo '{\"step\": 1}' > '%s'", in_scratch("r/a.json"));
    for (int i = 0; i < 4; i++) {
        mt_field bad[2] = {{.name = "step", .value = &x}, {.name = "step", .value = &x}};
        if (i == 0) bad[1].name = NULL;
        if (i == 1) bad[1].value = NULL;
        if (i == 2) bad[1].kind = MT_FIELD_TEXT; /* of 0 bytes */
        if (i == 3) bad[1].kind = (mt_field_kind)-1;
        static const char *const rest[] = {"fields[1] has no name", "'step': value is NULL",
                                           "'step': bytes is 0, must be at least 1",
                                           "'step': kind is -1, must be MT_FIELD_I64, MT_FIELD_U64, MT_FIELD_INT, "
                                           "MT_FIELD_F32, MT_FIELD_F64, MT_FIELD_BOOL or MT_FIELD_TEXT"};
        x = 5;
        REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, rest[i], mt_safetensors_fields(r.ctx, file, bad, 2));
        REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, rest[i], mt_json_read(r.ctx, in_scratch("r"), "a.json", bad, 2, NULL));
        assert_true(x == 5);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_safetensors_fields(r.ctx, file, bad, 1));
        assert_true(x == 1);
    }
    mt_safetensors_close(file);
    mt_checkpoint_destroy(r.ctx, out);
    forget("r");
    test_paper_rank_close(&r);
}

/* With MT_DEVICE_META no file is accessed, also when the world is a real communicator of one rank. */
static void without_data(void **state) {
    mt_context_desc where = {.device = MT_DEVICE_META};
    mt_param_desc p = {.name = "w", .rows = 4, .cols = 6};
    mt_checkpoint_desc c = {.directory = in_scratch("m")};
    mt_training_state s = {.step = 1};
    mt_checkpoint *checkpoint;
    mt_param *w;
    (void)state;
    for (int paper = 0; paper < 2; paper++) {
        mt_comm *world;
        test_rank r;
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS,
                      paper ? mt_comm_create_meta(1, 0, &world) : mt_comm_create_local(1, 0, &world));
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, test_rank_open(world, (mt_grid_desc){0}, &where, &r));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &p, &w));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_create(r.ctx, r.params, &c, &checkpoint));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_lock(r.ctx, checkpoint));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_save(r.ctx, checkpoint, &s));
        REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "META", mt_checkpoint_load(r.ctx, checkpoint, 1, &s));
        REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "META", mt_checkpoint_import(r.ctx, checkpoint, in_scratch("m")));
        assert_int_not_equal(access(in_scratch("m"), F_OK), 0);
        mt_checkpoint_destroy(r.ctx, checkpoint);
        test_rank_close(&r);
        mt_comm_destroy(world);
    }
}

/* ---- a save that is killed --------------------------------------------------------------------------------------- */

/* Saves at every step until the process kills itself. */
static mt_status saves_until_killed(mt_comm *world, void *user) {
    job *j = (job *)user;
    notes n = written;
    model m;
    mt_training_state s = {.step = j->from};
    MT_TRY(model_open(world, j, &n, &m));
    if (j->from) MT_TRY(mt_checkpoint_load(m.r.ctx, m.checkpoint, j->from, &s));
    for (;;) {
        MT_TRY(train(&m, j, s.step));
        s.step++;
        MT_TRY(mt_checkpoint_save(m.r.ctx, m.checkpoint, &s));
    }
}

static int64_t newest(void) {
    mt_context *ctx;
    int64_t step;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_checkpoint_latest(ctx, NULL, in_scratch("k"), &step));
    mt_context_destroy(ctx);
    return step;
}

/* After each kill, the newest checkpoint is a complete step with the values of a run without a kill. Two tensor ranks
   with master weights and ZeRO-1 write, one rank reads. */
static void killed(void **state) {
    job j = {.tp = 2, .dp = 2, .dtype = MT_BF16, .sharded = 1, .invariant = 2, .directory = "k"};
    job whole = j, load = {.tp = 1, .dp = 2, .dtype = MT_BF16, .invariant = 2, .directory = "k"};
    uint64_t seed = test_seed(7);
    int64_t before = -1;
    (void)state;
    for (int kills = 0; kills < (test_all() ? 30 : 6) || before < 3; kills++) {
        int status, calls = 1 + (int)test_below(&seed, 100); /* a save has about 15 */
        pid_t child = fork();
        if (child == 0) {
            mt_launch_desc d = {.ranks = 4, .no_pinning = 1, .timeout_s = TEST_NEVER_OVER};
            calls_left = calls;
            mt_launch(&d, saves_until_killed, &j);
            _exit(1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFSIGNALED(status)) fail_msg("the writer stopped by itself: %d", status);
        if (newest() < before) fail_msg("step %lld is gone", (long long)before);
        before = newest();
        j.from = before > 0 ? before : 0;
    }
    printf("      killed until step %lld\n", (long long)before);
    load.from = load.to = whole.to = before;
    load.n = fresh;
    whole.directory = "never";
    whole.n = written;
    run(&whole);
    run(&load);
    if (load.status != MT_SUCCESS) fail_msg("%s", load.sentence);
    assert_memory_equal(load.values, whole.values, sizeof whole.values);
    assert_memory_equal(&load.n, &written, sizeof written);
    forget("k");
}

/* ---- a format of the program's own ------------------------------------------------------------------------------- */

/* In the file, weights are [in, out] and names begin with "net.". */
static const char *my_metadata(const void *model, int index, char value[MT_FIELD_TEXT_MAX]) {
    (void)model;
    if (index > 0) return NULL;
    strcpy(value, "nobody");
    return "author";
}

static int my_config(const void *model, const char *given, char *text, size_t bytes) {
    (void)model;
    CHECK(!given || strncmp(given, "{\"layers\": 2, ", 14) == 0);
    return snprintf(text, bytes, "{\"layers\": 2, \"eps\": 1e-5, \"name\": \"net\", \"norm\": true}\n");
}

static mt_status my_check(mt_context *ctx, const void *model, const char *directory, const mt_safetensors_set *files) {
    const mt_safetensors *first = mt_safetensors_set_file(files, 0);
    (void)model;
    CHECK(directory && !mt_safetensors_set_file(files, 1) && !mt_safetensors_set_file(files, -1));
    if (strcmp(mt_safetensors_metadata(first, "author"), "nobody") == 0) return MT_SUCCESS;
    return mt_safetensors_refuse(ctx, first, "author", "nobody");
}

/* Part 1 are the even rows and part 2 the odd ones. Part 3 is not used for parameters of one row, and otherwise has all
   rows, in another order: half of them, zipped with the others. */
static void my_part(const void *model, const mt_param *p, int part, mt_tensor_part *out) {
    int64_t rows = p->desc.rows == 1 ? p->desc.cols : p->desc.rows;
    (void)model;
    out->unit = part == 3 ? rows : 2;
    out->rows = part == 3 ? (p->desc.rows == 1 ? 0 : rows) : 1;
    out->first = part == 2;
    out->zip_unit = out->zip = part == 3 ? rows : 0;
}

static const mt_checkpoint_format mine = {
    .metadata = my_metadata, .config = my_config, .check = my_check, .part = my_part};
static const mt_tensor_name my_names[] = {{"net.first.weight", "first.weight", 0, MT_TENSOR_TRANSPOSED},
                                          {"net.first.even", "first.bias", 1, 0},
                                          {"net.first.odd", "first.bias", 2, 0},
                                          {"net.second.weight", "second.weight", 3, MT_TENSOR_TRANSPOSED},
                                          {"net.mask.#", NULL, 0, 0},
                                          {"net.never", "second.bias", 3, 0}};
static const mt_tensor_table my_table = {my_names, 6, "net.", NULL, 0};

static void own_format(void **state) {
    job j = {.tp = 2, .format = &mine, .table = &my_table}, save = j, strange = j;
    mt_context *ctx;
    mt_safetensors *s;
    float transposed[IN * MIDDLE], zipped[MIDDLE * OUT], even[MIDDLE / 2];
    const float *bias = save.values + 4 * IN * MIDDLE, *second = bias + 4 * MIDDLE; /* value, two moments, master */
    (void)state;
    goes_on(j, j);
    save.directory = "r", save.to = save.save_at = HALF, save.n = written;
    run(&save);
    for (int r = 0; r < MIDDLE; r++)
        for (int c = 0; c < IN; c++) transposed[c * MIDDLE + r] = save.values[r * IN + c];
    for (int r = 0; r < MIDDLE / 2; r++) even[r] = bias[2 * r];
    for (int r = 0; r < OUT; r++)
        for (int c = 0; c < MIDDLE; c++) zipped[c * OUT + r] = second[(r / 2 + r % 2 * (OUT / 2)) * MIDDLE + c];
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, in_scratch("r/step-00000003/model.safetensors"), &s));
    expect_tensor(ctx, s, "net.first.weight", IN, MIDDLE, transposed);
    expect_tensor(ctx, s, "net.second.weight", MIDDLE, OUT, zipped);
    expect_tensor(ctx, s, "net.first.even", 0, MIDDLE / 2, even);
    assert_non_null(mt_safetensors_find(s, "second.bias"));
    assert_int_equal(mt_safetensors_count(s), 5);
    assert_string_equal(mt_safetensors_metadata(s, "author"), "nobody");
    mt_safetensors_close(s);
    shell("grep -q '^{\"layers\": 2, ' '%s'", in_scratch("r/step-00000003/config.json"));
    /* Without the table, the names in the file are those of another model. With it, a field that must match is
       refused. */
    strange.table = NULL;
    refused(strange, MT_ERR_DATA, "has no tensor 'first.weight'");
    strange = j;
    strange.n = fresh, strange.n.width = 5;
    refused(strange, MT_ERR_DATA, "my.width '20', must be 5");
    mt_context_destroy(ctx);
    forget("r");
}

/* Parts that first.weight, [20, 12] or so, cannot have. */
static void wrong_part(const void *user, const mt_param *p, int part, mt_tensor_part *out) {
    static const mt_tensor_part parts[] = {{MIDDLE, 0, MIDDLE, 0, 0},
                                           {0, 0, 1, 0, 0},
                                           {7, 0, 7, 0, 0},
                                           {MIDDLE, -1, MIDDLE, 0, 0},
                                           {MIDDLE, 1, MIDDLE, 0, 0},
                                           {MIDDLE, INT64_MAX, MIDDLE, 0, 0},
                                           {MIDDLE, 0, -1, 0, 0},
                                           {MIDDLE, 0, MIDDLE, MIDDLE, 3},
                                           {MIDDLE, 0, MIDDLE, 2, 4},
                                           {MIDDLE, 0, MIDDLE, 7, 2},
                                           {MIDDLE, 0, MIDDLE - 1, 0, 0}};
    (void)p;
    (void)part;
    *out = parts[((const model *)user)->wrong];
}

static void wrong_tables(void **state) {
    static const struct {
        mt_tensor_name names[3];
        const char *words;
    } wrong[] = {{{{NULL, "first.weight", 0, 0}}, "row 0 of the table has no file"},
                 {{{"", "first.weight", 0, 0}}, "row 0 of the table has no file"},
                 {{{"x.#.#", "x.#", 0, 0}}, "'x.#.#' has two '#'"},
                 {{{"a", "b", 0, 0}, {"h.#", "first", 0, 0}}, "only one of 'h.#' and 'first' has a number '#'"},
                 {{{"a", "first.weight", 0, 0}, {"b", "first.weight", 0, 0}}, "'first.weight'|not each row once"},
                 {{{"a", "first.weight", 0, 0}, {"a", "second.weight", 0, 0}}, "'a'|parts of different widths"},
                 {{{"a", "first.bias", 0, 0}, {"a", "second.weight", 0, 0}}, "'a'|parts of different widths"},
                 {{{"a", "first.weight", 0, 0}, {"a", "second.weight", 0, MT_TENSOR_TRANSPOSED}},
                  "the rows of 'a'|do not agree on MT_TENSOR_TRANSPOSED"},
                 {{{"a", "first.weight", 0, MT_TENSOR_COPY}}, "'a'|MT_TENSOR_COPY, but no other row has the whole"},
                 {{{"a", NULL, 0, MT_TENSOR_COPY}}, "'a'|MT_TENSOR_COPY, but no other row has the whole"},
                 {{{"a", "first.weight", 0, 0}, {"b", "first.weight", 1, MT_TENSOR_COPY}},
                  "'b'|MT_TENSOR_COPY, but no other row has the whole"}};
    static const mt_tensor_name all = {"a", "first.weight", 1, 0};
    job j = {.tp = 1, .directory = "w"};
    mt_checkpoint_format format = {.part = wrong_part};
    mt_checkpoint_desc c = {.directory = in_scratch("w")};
    mt_tensor_table table = {&all, 1, NULL, NULL, 0};
    notes n = fresh;
    mt_checkpoint *out;
    mt_comm *world;
    model m;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, model_open(world, &j, &n, &m));
    c.table = &table;
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT,
            "'first.weight': table.names[0].part is 1, must be 0 without mt_checkpoint_format.part",
            mt_checkpoint_create(m.r.ctx, m.r.params, &c, &out));
    c.format = &format, c.model = &m;
    for (m.wrong = 1; m.wrong < 10; m.wrong++)
        REFUSED(m.r.ctx, MT_ERR_ARGUMENT, "part 1 of 'first.weight' is rows",
                mt_checkpoint_create(m.r.ctx, m.r.params, &c, &out));
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT, "'first.weight'|not each row once",
            mt_checkpoint_create(m.r.ctx, m.r.params, &c, &out));
    m.wrong = 0;
    ASSERT_STATUS(m.r.ctx, MT_SUCCESS, mt_checkpoint_create(m.r.ctx, m.r.params, &c, &out));
    mt_checkpoint_destroy(m.r.ctx, out);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        table.names = wrong[i].names;
        for (table.count = 1; table.count < 3 && wrong[i].names[table.count].file; table.count++) continue;
        REFUSED(m.r.ctx, MT_ERR_ARGUMENT, wrong[i].words, mt_checkpoint_create(m.r.ctx, m.r.params, &c, &out));
    }
    table.count = 0;
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT, "the table has 0 names", mt_checkpoint_create(m.r.ctx, m.r.params, &c, &out));
    model_close(&m);
    mt_comm_destroy(world);
}

/* ---- ranks that differ ------------------------------------------------------------------------------------------- */

/* What one rank has otherwise, and the message of each rank. */
typedef struct odd_state {
    int what, rank;
    const char *words;
} odd_state;

static const char *const odd_words[] = {
    "mt_checkpoint_save|step is 3 on ranks 0, 1, 2|but 4 on rank 3",
    "mt_checkpoint_save|seed is 18446744073709551615 on ranks 0, 1, 2|but 7 on rank 3",
    "mt_checkpoint_save|position is 100 on ranks 0, 1, 2|but 200 on rank 3",
    "mt_checkpoint_save|loss_scaler.scale is |on ranks 0, 1, 2|on rank 3",
    "mt_checkpoint_save|note is |on ranks 0, 1, 2|z on rank 3",
    "mt_checkpoint_save|optimizer_step is 0 on ranks 0, 1, 2|but 1 on rank 3",
    "mt_checkpoint_save|my.epoch is 7 on ranks 0, 1, 2|but 8 on rank 3",
    "mt_checkpoint_save|my.words is 18446744073709551615 on ranks 0, 1, 2|but 1 on rank 3",
    "mt_checkpoint_save|my.clock is 3.3333333333333331e-01 on ranks 0, 1, 2|but 3.3333333333333337e-01 on rank 3",
    "mt_checkpoint_save|my.task is sums on ranks 0, 1, 2|but sumz on rank 3",
};
enum { ODD_STATES = sizeof odd_words / sizeof *odd_words };

static void make_odd(int what, mt_training_state *state, model *m, notes *n) {
    if (what == 0) state->step = 4;
    if (what == 1) state->seed = 7;
    if (what == 2) state->position = 200;
    if (what == 3) state->scaler.scale *= 2;
    if (what == 4) state->note[MT_NOTE_MAX - 2] = 'z'; /* the last character of the longest note */
    if (what == 5) m->adam.step = 1;
    if (what == 6) n->epoch = 8;
    if (what == 7) n->words = 1;
    if (what == 8) n->clock = nextafter(n->clock, 1);
    if (what == 9) n->task[3] = 'z';
}

/* Every rank gets the error of the whole group, nothing is written, and a save of the same state then succeeds. */
static mt_status odd_rank(mt_comm *world, void *user) {
    const odd_state *o = (const odd_state *)user;
    const job j = {.tp = 2, .dp = 2, .directory = "odd"};
    const mt_loss_scaler_desc scaling = {.initial_scale = 1024};
    mt_training_state state = {.step = 3, .seed = UINT64_MAX, .position = 100};
    notes n = written;
    model m;
    MT_TRY(model_open(world, &j, &n, &m));
    MT_TRY(mt_loss_scaler_create(m.r.ctx, &scaling, &state.scaler));
    memset(state.note, 'a', MT_NOTE_MAX - 1);
    if (mt_comm_rank(world) == o->rank) make_odd(o->what, &state, &m, &n);
    REFUSED(m.r.ctx, MT_ERR_MISMATCH, o->words, mt_checkpoint_save(m.r.ctx, m.checkpoint, &state));
    MT_TRY(mt_barrier(m.r.ctx, world));
    shell("test ! -e '%s'", in_scratch("odd"));
    MT_TRY(mt_barrier(m.r.ctx, world));
    state = (mt_training_state){.step = 3, .position = 100};
    m.adam.step = 5;
    n = written;
    MT_TRY(mt_checkpoint_save(m.r.ctx, m.checkpoint, &state));
    model_close(&m);
    return MT_SUCCESS;
}

static void states_of_ranks(void **state) {
    (void)state;
    for (int i = 0; i < ODD_STATES; i++) {
        odd_state o = {.what = i, .rank = 3, .words = odd_words[i]};
        test_launch(4, odd_rank, &o);
        forget("odd");
    }
}

/* A rank loads another step, or from another folder, as one does whose file system lags behind. */
static mt_status lagging_rank(mt_comm *world, void *user) {
    const int other_folder = *(const int *)user, lags = mt_comm_rank(world) == 1;
    const job j = {.tp = 2, .dp = 1, .directory = "odd"}, other = {.tp = 2, .dp = 1, .directory = "other"};
    const char *where = lags && other_folder ? "other/step-00000004" : "odd/step-00000004";
    mt_training_state state = {.position = 77};
    notes n = fresh;
    model m;
    float before;
    MT_TRY(model_open(world, lags && other_folder ? &other : &j, &n, &m));
    before = *(const float *)m.first.weight->value.data + 1;
    *(float *)m.first.weight->value.data = before;
    REFUSED(m.r.ctx, MT_ERR_MISMATCH,
            other_folder ? "mt_checkpoint_load|model.safetensors is |checksum|on rank 0|on rank 1"
                         : "mt_checkpoint_load|step is 4 on rank 0|but 3 on rank 1",
            mt_checkpoint_load(m.r.ctx, m.checkpoint, lags && !other_folder ? 3 : 4, &state));
    if (other_folder) /* the types of the files differ */
        REFUSED(m.r.ctx, MT_ERR_MISMATCH, "mt_checkpoint_import|model.safetensors is |checksum",
                mt_checkpoint_import(m.r.ctx, m.checkpoint, in_scratch(where)));
    CHECK(state.position == 77 && n.epoch == fresh.epoch && *(const float *)m.first.weight->value.data == before);
    MT_TRY(mt_checkpoint_load(m.r.ctx, m.checkpoint, 3, &state));
    CHECK(state.step == 3 && n.epoch == written.epoch);
    model_close(&m);
    return MT_SUCCESS;
}

static void ranks_that_read_other_files(void **state) {
    job j = {.tp = 2, .dp = 1, .n = written, .directory = "odd", .to = 4, .save_at = 3};
    (void)state;
    run(&j);
    j.save_at = 4;
    j.directory = "more";
    run(&j);
    shell("mv '%s' '%s' && cp -r '%s' '%s'", in_scratch("more/step-00000004"), in_scratch("odd"), in_scratch("odd"),
          in_scratch("other"));
    j = (job){.tp = 2, .dp = 1, .n = written, .directory = "third", .to = 4, .save_at = 4, .dtype = MT_BF16};
    run(&j);
    shell("rm -r '%s' && mv '%s' '%s'", in_scratch("other/step-00000004"), in_scratch("third/step-00000004"),
          in_scratch("other"));
    for (int other_folder = 0; other_folder < 2; other_folder++) test_launch(2, lagging_rank, &other_folder);
    forget("odd");
    forget("other");
    forget("more");
    forget("third");
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static void json(void **state) {
    static const struct {
        const char *text, *words;
    } wrong[] = {{"{\"whole\": 1.5}", "a.json: JSON, byte |a number is not whole"},
                 {"{\"whole\": 101}", "a.json: whole is 101, must be from 1 to 100"},
                 {"{\"whole\": null}", "a whole number is missing"},
                 {"{\"real\": 1e999}", "a number is too large"},
                 {"{\"on\": 1}", "true or false is missing"},
                 {"{\"text\": 5}", "a string is missing"},
                 {"[1]", "it does not begin with '{'"},
                 {"{\"whole\": 7", "a comma or a closing bracket is missing"}};
    struct {
        int64_t whole, null;
        double real;
        int on;
        char text[8];
    } v = {1, 5, 2, 0, "before"}, before = v;
    const mt_field fields[] = {{.name = "whole", .value = &v.whole, .low = 1, .high = 100},
                               {.name = "null", .value = &v.null, .nullable = 1},
                               {.name = "real", .kind = MT_FIELD_F64, .value = &v.real},
                               {.name = "on", .kind = MT_FIELD_BOOL, .value = &v.on},
                               {.name = "text", .kind = MT_FIELD_TEXT, .value = v.text, .bytes = sizeof v.text}};
    char path[SCRATCH_PATH];
    mt_context *ctx;
    int exists = 1;
    (void)state;
    print_to(path, sizeof path, "%s/a.json", scratch);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_read(ctx, scratch, "a.json", fields, 5, &exists));
    assert_true(!exists);
    REFUSED(ctx, MT_ERR_IO, "a.json: cannot open it", mt_json_read(ctx, scratch, "a.json", fields, 5, NULL));
    shell("printf '{}' > '%s'", path);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_read(ctx, scratch, "a.json", fields, 5, &exists));
    assert_true(exists);
    assert_memory_equal(&v, &before, sizeof v);
    shell("printf '{\"other\": [{}, 5], \"whole\": 100, \"null\": null, \"real\": -2.5e-3, \"on\": true,"
          " \"text\": \"a long text\"}' > '%s'",
          path);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_read(ctx, scratch, "a.json", fields, 5, NULL));
    assert_true(v.whole == 100 && v.null == 5 && v.real == -2.5e-3 && v.on == 1);
    assert_string_equal(v.text, "a long ");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        shell("printf '%s' > '%s'", wrong[i].text, path);
        REFUSED(ctx, MT_ERR_DATA, wrong[i].words, mt_json_read(ctx, scratch, "a.json", fields, 5, NULL));
    }
    unlink(path);
    mt_context_destroy(ctx);
}

/* Elements of lists are members with numbers as names, in a list that is a member, and in a file that is a list. A list
   without such a field is ignored, or is of the wrong kind. */
static void json_lists(void **state) {
    static const struct {
        const char *text;
        int one, two;
        const char *first, *second, *words; /* words: of the error; NULL: there is none */
    } cases[] = {{"[{\"a\": 1}, {\"b\": [7], \"a\": 2}]", 1, 2, "", "", NULL},
                 {"[]", 0, 0, "", "", NULL},
                 {"[5, {\"a\": 2}, {\"a\": 3}]", 0, 2, "", "", NULL},
                 {"{\"t\": [\"x\", \"y\", \"z\"], \"a\": 5}", 0, 0, "x", "y", NULL},
                 {"{\"t\": []}", 0, 0, "", "", NULL},
                 {"{\"u\": {\"t\": [\"x\"]}, \"0\": {\"a\": 4}}", 4, 0, "", "", NULL},
                 {"[{\"a\": \"x\"}]", 0, 0, "", "", "0.a: a whole number is missing"},
                 {"{\"t\": [1]}", 0, 0, "", "", "t.0: a string is missing"},
                 {"{\"n\": [1]}", 0, 0, "", "", "n: a whole number is missing"},
                 {"{\"t\": [\"x\" \"y\"]}", 0, 0, "x", "", "a comma or a closing bracket is missing"},
                 {"{\"t\": [\"x\"", 0, 0, "x", "", "a comma or a closing bracket is missing"},
                 {"[{\"a\": 1}] 2", 1, 0, "", "", "something follows the end"},
                 {"[{\"a\": 1}", 1, 0, "", "", "a comma or a closing bracket is missing"},
                 {"[{\"a\": 1},]", 1, 0, "", "", "a value is missing"}};
    int one, two, n;
    char first[8], second[8];
    const mt_field fields[] = {{"0.a", MT_FIELD_INT, &one, 0, 0, 0, 0, 0},
                               {"1.a", MT_FIELD_INT, &two, 0, 0, 0, 0, 0},
                               {"t.0", MT_FIELD_TEXT, first, 0, 0, sizeof first, 0, 0},
                               {"t.1", MT_FIELD_TEXT, second, 0, 0, sizeof second, 0, 0},
                               {"n", MT_FIELD_INT, &n, 0, 0, 0, 0, 0}};
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        one = two = n = 0;
        first[0] = second[0] = 0;
        if (cases[i].words)
            REFUSED(ctx, MT_ERR_DATA, cases[i].words, mt_json_parse(ctx, "text", cases[i].text, fields, 5));
        else ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_parse(ctx, "text", cases[i].text, fields, 5));
        assert_int_equal(one, cases[i].one);
        assert_int_equal(two, cases[i].two);
        assert_string_equal(first, cases[i].first);
        assert_string_equal(second, cases[i].second);
    }
    REFUSED(ctx, MT_ERR_DATA, "it does not begin with '{'", mt_json_parse(ctx, "text", "[]", fields + 2, 3));
    mt_context_destroy(ctx);
}

/* Members at any depth. A value that is neither an object nor null cannot have a member. */
static void json_depths(void **state) {
    static const struct {
        const char *text;
        int deep, deeper;
        const char *words; /* words: of the error; NULL: there is none */
    } cases[] = {{"{\"a\": {\"b\": {\"c\": 1, \"d\": {\"e\": [7, 2]}}}}", 1, 2, NULL},
                 {"{\"a\": {\"b\": null}}", 0, 0, NULL},
                 {"{\"a\": null}", 0, 0, NULL},
                 {"{\"b\": {\"c\": 1}, \"x\": {\"a\": {\"b\": {\"c\": 1}}}}", 0, 0, NULL},
                 {"{\"a\": 5}", 0, 0, "text: JSON, byte 6: a: an object is missing"},
                 {"{\"a\": [1]}", 0, 0, "text: JSON, byte 6: a: an object is missing"},
                 {"{\"a\": {\"b\": \"c\"}}", 0, 0, "text: JSON, byte 12: a.b: an object is missing"},
                 {"{\"a\": {\"b\": {\"d\": true}}}", 0, 0, "text: JSON, byte 18: a.b.d: an object is missing"},
                 {"{\"a\": {\"b\": {\"d\": {\"e\": 7}}}}", 0, 0, "text: JSON, byte 24: a.b.d.e: a list is missing"},
                 {"{\"a\": {\"b\": {\"c\": \"x\"}}}", 0, 0, "a.b.c: a whole number is missing"},
                 {"{\"a\": {\"b\": {\"c\": 1}", 1, 0, "a comma or a closing bracket is missing"}};
    char longest[400] = "{\"", name[400] = "";
    int deep, deeper;
    const mt_field fields[] = {{"a.b.c", MT_FIELD_INT, &deep, 0, 0, 0, 0, 0},
                               {"a.b.d.e.1", MT_FIELD_INT, &deeper, 0, 0, 0, 0, 0}};
    const mt_field too_long = {name, MT_FIELD_INT, &deep, 0, 0, 0, 0, 0};
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        deep = deeper = 0;
        if (cases[i].words)
            REFUSED(ctx, MT_ERR_DATA, cases[i].words, mt_json_parse(ctx, "text", cases[i].text, fields, 2));
        else ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_parse(ctx, "text", cases[i].text, fields, 2));
        assert_true(deep == cases[i].deep && deeper == cases[i].deeper);
    }
    for (int n = 150; n < 170; n++) { /* names that are too long for the reader are not found, and harm nothing */
        memset(name, 'x', (size_t)n);
        memcpy(name + n, ".b.c", 5);
        memcpy(longest + 2, name, (size_t)n);
        memcpy(longest + 2 + n, "\": {\"b\": {\"c\": 1}}}", 20);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_parse(ctx, "text", longest, &too_long, 1));
    }
    mt_context_destroy(ctx);
}

/* mt_json_next: the members and elements of a value, one after the other. */
static void json_members(void **state) {
    static const char *const cases[][2] = {
        {"{}", ""},
        {"[]", ""},
        {"5", ""},
        {"\"x\"", ""},
        {" { \"a\" : 1 ,\"b\":{\"c\": [2]}, \"\": null } rest", "a=1;b={\"c\": [2]};=null;"},
        {"[\"x\", 1, {\"y\": 2}, [3], \"\\u0041bcdefghij\"]",
         "x=\"x\";=1;={\"y\": 2};=[3];Abcdefg=\"\\u0041bcdefghij\";"},
        {"[1, 2", "=1;=2;"},
        {"[1, }", "=1;"},
        {"{\"a\": }", ""},
        {"{\"a\"}", "a=\"a\";"}, /* not well-formed */
        {"[\"x", ""}};
    char name[8], got[200];
    mt_json_part rest, value, none = {NULL, 5};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rest.text = cases[i][0];
        rest.bytes = strlen(rest.text);
        for (got[0] = 0; mt_json_next(&rest, name, sizeof name, &value);)
            snprintf(got + strlen(got), sizeof got - strlen(got), "%s=%.*s;", name, (int)value.bytes, value.text);
        assert_string_equal(got, cases[i][1]);
    }
    rest.text = "[1]";
    rest.bytes = 3;
    assert_false(mt_json_next(NULL, name, sizeof name, &value));
    assert_false(mt_json_next(&none, name, sizeof name, &value));
    assert_false(mt_json_next(&rest, NULL, sizeof name, &value));
    assert_false(mt_json_next(&rest, name, 0, &value));
    assert_false(mt_json_next(&rest, name, sizeof name, NULL));
}

/* mt_json_text reads what mt_json_read accepts, up to a number of bytes. */
static void json_texts(void **state) {
    char path[SCRATCH_PATH], *text;
    mt_context *ctx;
    int exists = 1;
    (void)state;
    print_to(path, sizeof path, "%s/a.json", scratch);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_text(ctx, scratch, "a.json", 100, &text, &exists));
    assert_true(!exists && !text);
    REFUSED(ctx, MT_ERR_IO, "a.json: cannot open it", mt_json_text(ctx, scratch, "a.json", 100, &text, NULL));
    shell("printf '{\"a\": 1}' > '%s'", path);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_text(ctx, scratch, "a.json", 8, &text, &exists));
    assert_true(exists);
    assert_string_equal(text, "{\"a\": 1}");
    mt_host_free(text);
    REFUSED(ctx, MT_ERR_DATA, "a.json: has 8 bytes, must be at most 7",
            mt_json_text(ctx, scratch, "a.json", 7, &text, NULL));
    assert_null(text);
    shell("printf '{\"a\": 1, \"a\": 1}' > '%s'", path);
    REFUSED(ctx, MT_ERR_DATA, "the key 'a' is given twice", mt_json_text(ctx, scratch, "a.json", 100, &text, NULL));
    assert_null(text);
    REFUSED(ctx, MT_ERR_ARGUMENT, "text is NULL", mt_json_text(ctx, scratch, "a.json", 100, NULL, NULL));
    unlink(path);
    mt_context_destroy(ctx);
}

/* NAME may have directories, which must not be links or lead out. */
static void json_folders(void **state) {
    int n = 0, exists = 1;
    const mt_field field = {"n", MT_FIELD_INT, &n, 0, 0, 0, 0, 0};
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    shell("cd '%s' && mkdir -p d/e out && echo '{\"n\": 5}' >d/e/a.json && cp d/e/a.json out && ln -s ../out d/link && "
          "ln -s e d/near && ln -s ../../out/a.json d/e/far.json",
          scratch);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_read(ctx, in_scratch("d"), "e/a.json", &field, 1, &exists));
    assert_true(n == 5 && exists);
    REFUSED(ctx, MT_ERR_IO, "/d/link/a.json: cannot open it",
            mt_json_read(ctx, in_scratch("d"), "link/a.json", &field, 1, NULL));
    REFUSED(ctx, MT_ERR_IO, "/d/near/a.json: cannot open it",
            mt_json_read(ctx, in_scratch("d"), "near/a.json", &field, 1, &exists));
    REFUSED(ctx, MT_ERR_IO, "/d/../out/a.json: cannot open it",
            mt_json_read(ctx, in_scratch("d"), "../out/a.json", &field, 1, NULL));
    REFUSED(ctx, MT_ERR_IO, "/d//etc/passwd: cannot open it",
            mt_json_read(ctx, in_scratch("d"), "/etc/passwd", &field, 1, NULL));
    REFUSED(ctx, MT_ERR_IO, "/d/e/far.json: is a link that leads out of its folder",
            mt_json_read(ctx, in_scratch("d"), "e/far.json", &field, 1, NULL));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_read(ctx, in_scratch("d"), "none/a.json", &field, 1, &exists));
    assert_true(!exists);
    shell("cd '%s' && rm -r d out", scratch);
    mt_context_destroy(ctx);
}

static int open_all(void **state) {
    (void)state;
    return scratch_open("test_resume_layers");
}

static int close_all(void **state) {
    (void)state;
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),        cmocka_unit_test(another_split),
        cmocka_unit_test(fewer_data_ranks), cmocka_unit_test(files),
        cmocka_unit_test(other_models),     cmocka_unit_test(other_fields),
        cmocka_unit_test(arguments),        cmocka_unit_test(reading_arguments),
        cmocka_unit_test(field_arguments),  cmocka_unit_test(killed),
        cmocka_unit_test(own_format),       cmocka_unit_test(json),
        cmocka_unit_test(states_of_ranks),  cmocka_unit_test(ranks_that_read_other_files),
        cmocka_unit_test(not_saved),        cmocka_unit_test(wrong_tables),
        cmocka_unit_test(without_data),     cmocka_unit_test(json_lists),
        cmocka_unit_test(json_depths),      cmocka_unit_test(json_members),
        cmocka_unit_test(json_texts),       cmocka_unit_test(json_folders),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
