/* test_creation.c - tests what a call creates for later calls: contexts, threads, plans, registries, optimizers, logs,
   checkpoints. Each allocation, and each start of a thread, fails once. The call then returns an error or succeeds
   without it. After an error, the same call succeeds, and what follows computes the bits of a run without an error. */

#include <pthread.h>
#include <stdlib.h>

/* Before how many more of them one fails. -1: none fails. */
static long allocations_left = -1, threads_left = -1;

static int is_last(long *left) { return *left >= 0 && (*left)-- == 0; }
static void *scarce_calloc(size_t count, size_t bytes) {
    return is_last(&allocations_left) ? NULL : (calloc)(count, bytes);
}
static int scarce_memalign(void **out, size_t alignment, size_t bytes) {
    return is_last(&allocations_left) ? 12 : (posix_memalign)(out, alignment, bytes);
}
static int scarce_create(pthread_t *thread, const pthread_attr_t *attr, void *(*f)(void *), void *argument) {
    return is_last(&threads_left) ? 11 : (pthread_create)(thread, attr, f, argument);
}
#define calloc(count, bytes) scarce_calloc(count, bytes)
#define posix_memalign(out, alignment, bytes) scarce_memalign(out, alignment, bytes)
#define pthread_create(thread, attr, f, argument) scarce_create(thread, attr, f, argument)

#define MEGATRON_IMPLEMENTATION
#include "mt_parallel.h"
#undef calloc
#undef posix_memalign
#undef pthread_create

#include "mt_test.h"
#include "mt_test_scratch.h"

#define TOKENS 64
#define IN 96
#define OUT 80

/* One rank, step by step. */
typedef struct job {
    int check, threads;
    mt_dtype dtype;
    mt_device device;
    mt_comm *world, *group, *meta;
    mt_context *ctx;
    mt_grid grid;
    mt_params *params;
    mt_column_parallel_linear layer;
    mt_optimizer optimizer;
    mt_hash_log *log;
    mt_checkpoint *checkpoint;
    mt_training_state state;
} job;

static void add_line(void *user, const char *name, uint64_t hash, int differs) {
    uint64_t *lines = (uint64_t *)user;
    (void)name;
    *lines = 31 * *lines + hash + (uint64_t)differs;
}

static mt_status open_world(job *j) { return j->world ? MT_SUCCESS : mt_comm_create_local(1, 5, &j->world); }
static mt_status open_meta(job *j) { return mt_comm_create_meta(4, 1, &j->meta); }

static mt_status open_context(job *j) {
    mt_context_desc d;
    memset(&d, 0, sizeof d);
    d.arena_bytes = (size_t)4 << 20;
    d.threads = j->threads;
    d.check = j->check;
    d.device = j->device;
    return mt_context_create(j->world, &d, &j->ctx);
}

static mt_status split(job *j) { return mt_comm_split(j->world, 0, 0, &j->group); }

static mt_status compare(job *j) {
    mt_setting told[] = {{"--lr", "1"}};
    return mt_comm_compare(j->ctx, j->world, "test", 0, told, 1);
}

static mt_status open_grid(job *j) {
    mt_grid_desc d;
    memset(&d, 0, sizeof d);
    return mt_grid_create(j->world, &d, &j->grid);
}

static mt_status open_params(job *j) {
    MT_TRY(mt_params_create(j->ctx, &j->grid, &j->params));
    return mt_params_set_dtype(j->ctx, j->params, j->dtype);
}

static mt_status open_layer(job *j) {
    mt_linear_desc d;
    memset(&d, 0, sizeof d);
    d.in_features = IN;
    d.out_features = OUT;
    return mt_column_parallel_linear_create(j->ctx, j->params, "layer", &d, &j->layer);
}

static mt_status init(job *j) { return mt_params_init(j->ctx, j->params, 1); }
static mt_status open_optimizer(job *j) { return mt_optimizer_create(j->ctx, j->params, NULL, &j->optimizer); }
static mt_status pack(job *j) { return mt_params_pack(j->ctx, j->params); }

static mt_status open_log(job *j) { return mt_hash_log_create(j->ctx, &j->grid, &j->log); }

static mt_status open_checkpoint(job *j) {
    mt_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    d.directory = in_scratch("run");
    d.optimizer = &j->optimizer;
    return mt_checkpoint_create(j->ctx, j->params, &d, &j->checkpoint);
}

static mt_status train(job *j) {
    size_t mark = mt_arena_mark(j->ctx);
    mt_linear_saved saved;
    mt_tensor x, y, dx;
    mt_status status = mt_params_zero_grad(j->ctx, j->params);
    memset(&saved, 0, sizeof saved);
    if (status == MT_SUCCESS) status = mt_arena_tensor(j->ctx, j->dtype, TOKENS, IN, &x);
    if (status == MT_SUCCESS) status = mt_arena_tensor(j->ctx, j->dtype, TOKENS, OUT, &y);
    if (status == MT_SUCCESS) status = mt_arena_tensor(j->ctx, j->dtype, TOKENS, IN, &dx);
    if (status == MT_SUCCESS) status = mt_fill(j->ctx, x, 0.5f);
    if (status == MT_SUCCESS) status = mt_parallel_linear_forward(j->ctx, &j->layer, x, y, &saved);
    if (status == MT_SUCCESS) status = mt_parallel_linear_backward(j->ctx, &j->layer, y, dx, &saved);
    if (status == MT_SUCCESS) status = mt_sync_gradients(j->ctx, j->params);
    mt_arena_release(j->ctx, mark);
    return status;
}

static mt_status log_shard(job *j) {
    const mt_param *w = j->layer.weight;
    return mt_hash_log_shard(j->ctx, j->log, w, ".grad", w->grad);
}

static mt_status step(job *j) {
    return j->optimizer.step ? MT_SUCCESS : mt_optimizer_step(j->ctx, &j->optimizer, 0.1f, 1.0f);
}

static mt_status save(job *j) {
    j->state.step = 1;
    return mt_checkpoint_save(j->ctx, j->checkpoint, &j->state);
}

static mt_status load(job *j) {
    if (j->device == MT_DEVICE_META) return MT_SUCCESS; /* it has no memory to load files into */
    return mt_checkpoint_load(j->ctx, j->checkpoint, 1, &j->state);
}

static const struct {
    const char *name;
    mt_status (*run)(job *j);
} steps[] = {
    {"mt_comm_create_local", open_world},
    {"mt_comm_create_meta", open_meta},
    {"mt_context_create", open_context},
    {"mt_comm_split", split},
    {"mt_comm_compare", compare},
    {"mt_grid_create", open_grid},
    {"mt_params_create", open_params},
    {"mt_column_parallel_linear_create", open_layer},
    {"mt_params_init", init},
    {"mt_optimizer_create", open_optimizer},
    {"mt_checkpoint_create", open_checkpoint},
    {"forward and backward", train},
    {"mt_hash_log_create", open_log},
    {"mt_hash_log_shard", log_shard},
    {"mt_optimizer_step", step},
    {"mt_params_pack", pack},
    {"mt_checkpoint_save", save},
    {"mt_checkpoint_load", load},
};
#define STEPS ((int)(sizeof steps / sizeof *steps))
#define DISK (STEPS - 2) /* from here on steps wait for the disk */

static void close_job(job *j) {
    mt_checkpoint_destroy(j->ctx, j->checkpoint);
    mt_hash_log_destroy(j->log);
    mt_optimizer_destroy(j->ctx, &j->optimizer);
    mt_params_destroy(j->params);
    mt_grid_destroy(&j->grid);
    mt_comm_destroy(j->group);
    mt_comm_destroy(j->meta);
    mt_context_destroy(j->ctx);
    mt_comm_destroy(j->world);
    forget("run");
}

/* What the steps have computed. */
static uint64_t result_of(const job *j) {
    const mt_param *w = j->layer.weight;
    uint64_t hash = 0;
    if (mt_hash_log_flush(j->ctx, j->log, add_line, &hash) != MT_SUCCESS) fail_msg("no lines");
    if (j->device != MT_DEVICE_META && mt_hash_add(j->ctx, w->value, 0, 0, w->value.cols, &hash) != MT_SUCCESS)
        fail_msg("no hash");
    return 31 * hash + (uint64_t)j->optimizer.step;
}

/* Runs all steps. In step `which` the n-th allocation, or the n-th start of a thread, fails, and the step runs again.
   Returns 1 if it failed. */
static int run(job j, int which, long *left, long n, uint64_t *result) {
    int failed = 0;
    for (int i = 0; i < (which >= DISK ? STEPS : DISK); i++) {
        mt_status status;
        if (i == which) *left = n;
        status = steps[i].run(&j);
        if (i == which) {
            failed = *left < 0;
            *left = -1;
            if (status != MT_SUCCESS && (!failed || (status != MT_ERR_MEMORY && status != MT_ERR_SYSTEM)))
                fail_msg("%s, %ld: %s: %s", steps[i].name, n, mt_status_name(status), mt_last_error(j.ctx));
            if (status != MT_SUCCESS) status = steps[i].run(&j);
        }
        if (status != MT_SUCCESS)
            fail_msg("%s, %ld in %s: %s: %s", steps[i].name, n, which < 0 ? "none" : steps[which].name,
                     mt_status_name(status), mt_last_error(j.ctx));
    }
    *result = result_of(&j);
    close_job(&j);
    return failed;
}

/* Returns how many allocations, or starts of threads, have failed. */
static long fail_each(job j, long *left) {
    uint64_t want, got;
    long failures = 0;
    int disk = !j.check && j.dtype == MT_F32;
    run(j, -1, left, 0, &want);
    for (int which = 0; which < (disk ? STEPS : DISK); which++)
        for (long n = 0; run(j, which, left, n, &got); n++) {
            failures++;
            if (got != want) fail_msg("%s: other bits after failure %ld", steps[which].name, n);
        }
    return failures;
}

static job job_make(int check, int threads, mt_dtype dtype, mt_device device) {
    job j;
    memset(&j, 0, sizeof j);
    j.check = check;
    j.threads = threads;
    j.dtype = dtype;
    j.device = device;
    return j;
}

static void test_memory(void **state) {
    (void)state;
    for (int check = 0; check < 3; check++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            job j = job_make(check, 3, bf16 ? MT_BF16 : MT_F32, MT_DEVICE_CPU);
            assert_true(fail_each(j, &allocations_left) > 30);
        }
}

static void test_memory_on_meta(void **state) {
    (void)state;
    for (int check = 0; check < 2; check++)
        assert_true(fail_each(job_make(check, 1, MT_BF16, MT_DEVICE_META), &allocations_left) > 20);
}

static void test_threads(void **state) {
    (void)state;
    assert_int_equal(fail_each(job_make(0, 4, MT_F32, MT_DEVICE_CPU), &threads_left), 3);
}

static int open_scratch(void **state) {
    (void)state;
    return scratch_open("test_creation");
}

static int close_scratch(void **state) {
    (void)state;
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_memory_on_meta),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, open_scratch, close_scratch);
}
