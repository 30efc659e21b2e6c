/* test_fork.c - tests fork(): the new process has copies of contexts, communicators and files of the old one, but not
   its threads. Calls that would wait for other ranks, or write a file of the old process, are refused. Everything else
   works, and the old process does not notice. The alarm only ends a process that hangs. */

#define MEGATRON_IMPLEMENTATION
#include "mt_parallel.h"
#include "mt_test.h"
#include "mt_test_ranks.h"
#include "mt_test_scratch.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE 256

/* Runs f in a new process, where it returns 0 or the number of its error. Returns that, or -1 when a signal has ended
   the process. */
static int in_child(int (*f)(void *), void *user) {
    int code = 0;
    pid_t child;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        alarm(600);
        _exit(f(user));
    }
    if (child < 0 || waitpid(child, &code, 0) != child || !WIFEXITED(code)) return -1;
    return WEXITSTATUS(code);
}

/* In a new process: the number of the first line that is wrong, modulo 256. */
#define HOLDS(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            return __LINE__ % 255 + 1;                                                                                 \
        }                                                                                                              \
    } while (0)

static int is_refusal(mt_status status, const char *message) {
    char numbers[2][32];
    snprintf(numbers[0], sizeof numbers[0], "%ld", (long)getppid());
    snprintf(numbers[1], sizeof numbers[1], "%ld", (long)getpid());
    if (status == MT_ERR_UNSUPPORTED && strstr(message, "was forked") && strstr(message, numbers[0]) &&
        strstr(message, numbers[1]))
        return 1;
    fprintf(stderr, "%s: %s\n", mt_status_name(status), message);
    return 0;
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

typedef struct product {
    mt_context *ctx;
    mt_tensor a, b, c;
} product;

static int multiplies(void *user) {
    product *p = (product *)user;
    int i;
    HOLDS(mt_gemm(p->ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, p->a, p->b, 0.0f, p->c) == MT_SUCCESS);
    for (i = 0; i < SIZE * SIZE; i++) HOLDS(((float *)p->c.data)[i] == SIZE);
    HOLDS(mt_fill(p->ctx, p->c, 0.0f) == MT_SUCCESS);
    return 0;
}

static int multiplies_and_destroys(void *user) {
    product *p = (product *)user;
    int wrong = multiplies(user);
    if (!wrong) wrong = multiplies(user);
    mt_context_destroy(p->ctx);
    return wrong;
}

static int only_destroys(void *user) {
    product *p = (product *)user;
    mt_context_destroy(p->ctx);
    return 0;
}

/* A child of a child has neither's threads. */
static int has_children(void *user) {
    int wrong = multiplies(user);
    if (!wrong) wrong = in_child(multiplies_and_destroys, user);
    return wrong ? wrong : multiplies_and_destroys(user);
}

static void test_threads(void **state) {
    static int (*const functions[])(void *) = {multiplies_and_destroys, only_destroys, has_children};
    (void)state;
    for (int threads = 1; threads <= 4; threads += 3)
        for (int used = 0; used < 2; used++)
            for (int f = 0; f < 3; f++) {
                product p;
                p.ctx = test_context(MT_DEVICE_CPU, threads);
                ASSERT_STATUS(p.ctx, MT_SUCCESS, mt_arena_tensor(p.ctx, MT_F32, SIZE, SIZE, &p.a));
                ASSERT_STATUS(p.ctx, MT_SUCCESS, mt_arena_tensor(p.ctx, MT_F32, SIZE, SIZE, &p.b));
                ASSERT_STATUS(p.ctx, MT_SUCCESS, mt_arena_tensor(p.ctx, MT_F32, SIZE, SIZE, &p.c));
                ASSERT_STATUS(p.ctx, MT_SUCCESS, mt_fill(p.ctx, p.a, 1.0f));
                ASSERT_STATUS(p.ctx, MT_SUCCESS, mt_fill(p.ctx, p.b, 1.0f));
                if (used) assert_int_equal(multiplies(&p), 0);
                assert_int_equal(in_child(functions[f], &p), 0);
                assert_int_equal(multiplies(&p), 0);
                mt_context_destroy(p.ctx);
            }
}

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

typedef struct ranks {
    mt_context *ctx;
    mt_comm *world, *pair, *alone;
} ranks;

static mt_status sum_rank(mt_comm *world, void *user) {
    mt_context *ctx;
    float x = 1;
    mt_status status;
    (void)user;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    status = mt_all_reduce(ctx, world, &x, &x, 1, MT_F32, MT_SUM);
    mt_context_destroy(ctx);
    return status == MT_SUCCESS && x != (float)mt_comm_size(world) ? MT_ERR_DATA : status;
}

/* Every call on a communicator of the old process that needs another rank. */
static int calls_are_refused(mt_context *ctx, mt_comm *comm) {
    static const char *const names[] = {
        "mt_all_reduce", "mt_all_gather", "mt_reduce_scatter", "mt_broadcast",       "mt_barrier", "mt_send",
        "mt_recv",       "mt_send_recv",  "mt_comm_split",     "mt_comm_create_for", "",           ""};
    mt_setting told[] = {{"--lr", "1"}};
    float x[8] = {0}, y[8] = {0};
    mt_comm *out = NULL;
    int other = 1 - mt_comm_rank(comm), i;
    for (i = 0; i < 12; i++) {
        mt_status status = i == 0    ? mt_all_reduce(ctx, comm, x, y, 1, MT_F32, MT_SUM)
                           : i == 1  ? mt_all_gather(ctx, comm, x, y, 1, MT_F32)
                           : i == 2  ? mt_reduce_scatter(ctx, comm, x, y, 1, MT_F32, MT_SUM)
                           : i == 3  ? mt_broadcast(ctx, comm, x, y, 1, MT_F32, 0)
                           : i == 4  ? mt_barrier(ctx, comm)
                           : i == 5  ? mt_send(ctx, comm, x, 1, MT_F32, other)
                           : i == 6  ? mt_recv(ctx, comm, x, 1, MT_F32, other)
                           : i == 7  ? mt_send_recv(ctx, comm, x, 1, other, y, 1, other, MT_F32)
                           : i == 8  ? mt_comm_split(comm, 0, 0, &out)
                           : i == 9  ? mt_comm_create_for(ctx, comm, &out)
                           : i == 10 ? mt_comm_compare(ctx, comm, "test", 0, told, 1)
                                     : mt_comm_gather_host(ctx, comm, x, sizeof *x, y);
        const char *message = i == 8 ? mt_comm_last_error(comm) : mt_last_error(ctx);
        HOLDS(is_refusal(status, message) && !out && strstr(message, names[i]));
    }
    return 0;
}

static int is_no_rank(void *user) {
    ranks *r = (ranks *)user;
    mt_launch_desc two;
    float x = 2;
    memset(&two, 0, sizeof two);
    two.ranks = 2;
    HOLDS(calls_are_refused(r->ctx, r->world) == 0);
    HOLDS(calls_are_refused(r->ctx, r->pair) == 0);
    HOLDS(mt_all_reduce(r->ctx, r->alone, &x, &x, 1, MT_F32, MT_SUM) == MT_SUCCESS && x == 2);
    HOLDS(mt_launch(&two, sum_rank, NULL) == MT_SUCCESS);
    mt_comm_destroy(r->alone);
    mt_comm_destroy(r->pair);
    mt_comm_destroy(r->world);
    mt_context_destroy(r->ctx);
    HOLDS(mt_launch(&two, sum_rank, NULL) == MT_SUCCESS);
    return 0;
}

/* Rank 1 forks some times, while rank 0 polls or sleeps in a barrier, and holds its lock or not. */
static mt_status forking_rank(mt_comm *world, void *user) {
    struct timespec moment = {0, 2000000};
    ranks r;
    float x = 1;
    int *wrong = (int *)user;
    memset(&r, 0, sizeof r);
    r.world = world;
    MT_TRY(mt_context_create(world, NULL, &r.ctx));
    MT_TRY(mt_comm_split(world, 0, -mt_comm_rank(world), &r.pair));
    MT_TRY(mt_comm_split(world, mt_comm_rank(world), 0, &r.alone));
    for (int i = 0; i < 10 && mt_comm_rank(world) == 1 && !*wrong; i++) {
        *wrong = in_child(is_no_rank, &r);
        nanosleep(&moment, NULL);
    }
    MT_TRY(mt_barrier(r.ctx, world));
    MT_TRY(mt_all_reduce(r.ctx, r.pair, &x, &x, 1, MT_F32, MT_SUM));
    mt_comm_destroy(r.alone);
    mt_comm_destroy(r.pair);
    mt_context_destroy(r.ctx);
    return x == 2 ? MT_SUCCESS : MT_ERR_DATA;
}

static void test_ranks(void **state) {
    mt_launch_desc two;
    int wrong = 0;
    (void)state;
    memset(&two, 0, sizeof two);
    two.ranks = 2;
    two.no_pinning = 1;
    assert_int_equal(mt_launch(&two, forking_rank, &wrong), MT_SUCCESS);
    assert_int_equal(wrong, 0);
}

/* The new process returns from the function of a rank: it ends, because it has no thread but this one. */
static mt_status returning_rank(mt_comm *world, void *user) {
    int *code = (int *)user;
    mt_comm *pair = NULL;
    mt_context *ctx;
    pid_t child = -1;
    mt_status status;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    MT_TRY(mt_comm_split(world, 0, 0, &pair)); /* is not destroyed */
    if (mt_comm_rank(world) == 1) {
        fflush(NULL);
        child = fork();
        if (child == 0) {
            alarm(600);
            return MT_ERR_DATA;
        }
        if (child < 0 || waitpid(child, code, 0) != child) return MT_ERR_SYSTEM;
    }
    status = mt_barrier(ctx, pair);
    mt_context_destroy(ctx);
    return status;
}

static void test_a_rank_that_returns(void **state) {
    mt_launch_desc two;
    int code = -1;
    (void)state;
    memset(&two, 0, sizeof two);
    two.ranks = 2;
    assert_int_equal(mt_launch(&two, returning_rank, &code), MT_SUCCESS);
    assert_true(WIFEXITED(code));
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

typedef struct file {
    mt_context *ctx;
    mt_safetensors_writer *writer;
    mt_checkpoint *checkpoint;
} file;

static const float numbers[6] = {1, 2, 3, 4, 5, 6};

static int may_not_write(void *user) {
    file *f = (file *)user;
    HOLDS(is_refusal(mt_safetensors_write(f->ctx, f->writer, numbers, 4), mt_last_error(f->ctx)));
    mt_safetensors_destroy(f->writer);
    return 0;
}

static int may_not_finish(void *user) {
    file *f = (file *)user;
    HOLDS(is_refusal(mt_safetensors_finish(f->ctx, f->writer), mt_last_error(f->ctx)));
    mt_safetensors_destroy(f->writer);
    mt_context_destroy(f->ctx);
    return 0;
}

static void test_writer(void **state) {
    int64_t shape[] = {6};
    const char *path = in_scratch("x.safetensors");
    mt_safetensors *s;
    float back[6];
    file f;
    (void)state;
    f.ctx = test_context(MT_DEVICE_CPU, 1);
    ASSERT_STATUS(f.ctx, MT_SUCCESS, mt_safetensors_create(f.ctx, path, NULL, 0, &f.writer));
    ASSERT_STATUS(f.ctx, MT_SUCCESS, mt_safetensors_add(f.ctx, f.writer, "x", "F32", 1, shape));
    ASSERT_STATUS(f.ctx, MT_SUCCESS, mt_safetensors_write(f.ctx, f.writer, numbers, 8));
    assert_int_equal(in_child(may_not_write, &f), 0);
    ASSERT_STATUS(f.ctx, MT_SUCCESS, mt_safetensors_write(f.ctx, f.writer, numbers + 2, 16));
    assert_int_equal(in_child(may_not_finish, &f), 0);
    ASSERT_STATUS(f.ctx, MT_SUCCESS, mt_safetensors_finish(f.ctx, f.writer));
    mt_safetensors_destroy(f.writer);
    ASSERT_STATUS(f.ctx, MT_SUCCESS, mt_safetensors_open(f.ctx, path, &s));
    ASSERT_STATUS(f.ctx, MT_SUCCESS, mt_safetensors_read(f.ctx, mt_safetensors_find(s, "x"), back));
    assert_memory_equal(back, numbers, sizeof back);
    mt_safetensors_close(s);
    mt_context_destroy(f.ctx);
    forget("x.safetensors");
}

static int may_not_save(void *user) {
    file *f = (file *)user;
    mt_training_state s;
    memset(&s, 0, sizeof s);
    s.step = 2;
    HOLDS(is_refusal(mt_checkpoint_save(f->ctx, f->checkpoint, &s), mt_last_error(f->ctx)));
    HOLDS(is_refusal(mt_checkpoint_lock(f->ctx, f->checkpoint), mt_last_error(f->ctx)));
    mt_checkpoint_destroy(f->ctx, f->checkpoint);
    return 0;
}

static void test_checkpoint(void **state) {
    mt_linear_desc linear = {.in_features = 4, .out_features = 4};
    mt_checkpoint_desc c = {.directory = in_scratch("run")};
    mt_training_state s;
    mt_column_parallel_linear layer;
    mt_comm *world;
    test_rank r;
    file f;
    (void)state;
    memset(&s, 0, sizeof s);
    assert_int_equal(mt_comm_create_local(1, 0, &world), MT_SUCCESS);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, test_rank_open(world, (mt_grid_desc){0}, NULL, &r));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "first", &linear, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_create(r.ctx, r.params, &c, &f.checkpoint));
    f.ctx = r.ctx;
    for (s.step = 1; s.step <= 3; s.step++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_save(r.ctx, f.checkpoint, &s));
        assert_int_equal(in_child(may_not_save, &f), 0);
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_checkpoint_load(r.ctx, f.checkpoint, 3, &s));
    mt_checkpoint_destroy(r.ctx, f.checkpoint);
    test_rank_close(&r);
    mt_comm_destroy(world);
    forget("run");
}

static int open_scratch(void **state) {
    (void)state;
    return scratch_open("test_fork");
}

static int close_scratch(void **state) {
    (void)state;
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads), cmocka_unit_test(test_ranks),      cmocka_unit_test(test_a_rank_that_returns),
        cmocka_unit_test(test_writer),  cmocka_unit_test(test_checkpoint),
    };
    return cmocka_run_group_tests(tests, open_scratch, close_scratch);
}
