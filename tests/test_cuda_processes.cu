/* test_cuda_processes.cu - tests ranks that are processes with a GPU each, over NCCL, with the environment of
   torchrun or srun: how they connect; their results against sums computed on the host; and the messages of the other
   ranks when one is killed, stopped, stuck, fails or never starts.
     On 4 GPUs:     nvcc -std=c++17 -O2 -arch=native -I. -DMT_USE_NCCL tests/test_cuda_processes.cu -lcublasLt -lnccl
     On 1 GPU:      the same with NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU.
   The test process itself does not use a GPU: CUDA does not work after a fork. */

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"

#include "mt_gpus.h"
#include "mt_test.h"
#include "mt_test_port.h"

#include <signal.h>
#include <sys/wait.h>

#define MAX_RANKS 4
#define TIMEOUT 2.5     /* the first timeout in seconds for jobs that lose a rank */
#define TIMEOUT_MAX 60  /* on a busy machine other ranks may be late, too: then once more with twice the timeout */
#define WATCHDOG 1200.0 /* seconds; what ends then has hung */

/* ---- a job of processes ------------------------------------------------------------------------------------------ */

typedef struct job {
    int ranks;
    const char *environment[MAX_RANKS]; /* "RANK=%d ..." of each rank; NULL: that of torchrun on one machine */
    mt_rank_function function;
    int fault, collective, victim; /* -1: none */
    double timeout;
    int port, held; /* a port that is held for the job: see mt_test_port.h */
    /* results */
    pid_t pid[MAX_RANKS];
    int code[MAX_RANKS]; /* exit status, or 128 + signal */
    char said[MAX_RANKS][2000];
} job;

static void take_port(job *j) {
    j->port = test_take_port(0, &j->held);
    if (j->port < 0) abort();
}

static void set_environment(const char *text) {
    char copy[512], *word, *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    for (word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *equals = strchr(word, '=');
        *equals = '\0';
        setenv(word, equals + 1, 1);
    }
}

/* Writes the environment that torchrun sets for a rank. torchrun's port is the one before NCCL's. */
static void say_torchrun(char *text, size_t bytes, int rank, int ranks, int local_rank, int port, const char *more) {
    snprintf(text, bytes, "RANK=%d WORLD_SIZE=%d LOCAL_RANK=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=%d%s", rank, ranks,
             local_rank, port - 1, more);
}

static void run_child(job *j, int rank, FILE *errors) {
    mt_launch_desc d;
    char text[512];
    memset(&d, 0, sizeof d);
    d.timeout_s = j->timeout;
    dup2(fileno(errors), 2);
    say_torchrun(text, sizeof text, rank, j->ranks, rank, j->port, "");
    set_environment(j->environment[rank] ? j->environment[rank] : text);
    exit(mt_world_from_env(&d, j->function, j) == MT_SUCCESS ? 0 : 1);
}

static void wait_child(job *j, int rank, double start, double limit) {
    int state = 0;
    while (waitpid(j->pid[rank], &state, WNOHANG) == 0) {
        struct timespec nap = {0, 2000000};
        if (cm_seconds_() - start > limit) {
            kill(j->pid[rank], SIGKILL);
            waitpid(j->pid[rank], &state, 0);
            break;
        }
        nanosleep(&nap, NULL);
    }
    j->code[rank] = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
}

/* Runs the job to its end. The survivors end first, then the victim is killed. */
static void run_job(job *j) {
    FILE *errors[MAX_RANKS];
    double start = cm_seconds_();
    int r;
    if (j->timeout == 0) j->timeout = j->victim >= 0 ? TIMEOUT : TEST_NEVER_OVER;
    if (j->port == 0) take_port(j);
    fflush(NULL);
    for (r = 0; r < j->ranks; r++) {
        errors[r] = tmpfile();
        assert_non_null(errors[r]);
        j->pid[r] = fork();
        if (j->pid[r] == 0) run_child(j, r, errors[r]);
    }
    for (r = 0; r < j->ranks; r++)
        if (r != j->victim) wait_child(j, r, start, WATCHDOG);
    if (j->victim >= 0) wait_child(j, j->victim, start, 0);
    for (r = 0; r < j->ranks; r++) {
        rewind(errors[r]);
        j->said[r][fread(j->said[r], 1, sizeof j->said[r] - 1, errors[r])] = '\0';
        fclose(errors[r]);
    }
    close(j->held);
}

static job new_job(int ranks, mt_rank_function function) {
    job j;
    memset(&j, 0, sizeof j);
    j.ranks = ranks;
    j.function = function;
    j.victim = j.held = -1;
    return j;
}

static void assert_all_succeed(job *j) {
    for (int r = 0; r < j->ranks; r++)
        if (j->code[r] != 0 || j->said[r][0])
            fail_msg("rank %d of %d: code %d: %s", r, j->ranks, j->code[r], j->said[r]);
}

#define WANT_GPUS(n)                                                                                                   \
    if (!test_enough_gpus(n, gpus())) skip()

/* Returns the number of GPUs. A child process asks CUDA. */
static int gpus(void) {
    int state = 0;
    pid_t pid;
    fflush(NULL);
    pid = fork();
    if (pid == 0) _exit(mt_device_count(MT_DEVICE_CUDA));
    waitpid(pid, &state, 0);
    return WIFEXITED(state) ? WEXITSTATUS(state) : 0;
}

/* ---- a rank ------------------------------------------------------------------------------------------------------ */

typedef struct rank_state {
    mt_context *ctx;
    mt_comm *all, *tp, *data; /* all ranks, groups of neighbours, and groups across them */
    float *a, *b;
} rank_state;

#define COUNT 300

static mt_status open_rank(mt_comm *world, rank_state *s) {
    mt_context_desc where;
    int rank = mt_comm_rank(world), half = mt_comm_size(world) / 2;
    void *memory = NULL;
    memset(s, 0, sizeof *s);
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 1 << 20;
    where.ordinal = test_gpu_of(mt_comm_local_rank(world));
    MT_TRY(mt_context_create(world, &where, &s->ctx));
    MT_TRY(mt_comm_create_for(s->ctx, world, &s->all));
    CHECK(mt_comm_rank(s->all) == rank && mt_comm_size(s->all) == mt_comm_size(world));
    CHECK(mt_comm_local_rank(s->all) == mt_comm_local_rank(world) && strcmp(mt_comm_name(s->all), "world") == 0);
    MT_TRY(mt_comm_split(s->all, rank / (half ? half : 1), 0, &s->tp));
    MT_TRY(mt_comm_split(s->all, rank % (half ? half : 1), -rank, &s->data));
    mt_comm_set_name(s->tp, "tensor");
    mt_comm_set_name(s->data, "data");
    MT_TRY(mt_context_alloc(s->ctx, 2 * MAX_RANKS * COUNT * sizeof(float), &memory));
    s->a = (float *)memory;
    s->b = s->a + MAX_RANKS * COUNT;
    return MT_SUCCESS;
}

static void close_rank(rank_state *s) {
    mt_context_free(s->ctx, s->a, 2 * MAX_RANKS * COUNT * sizeof(float));
    mt_comm_destroy(s->tp);
    mt_comm_destroy(s->data);
    mt_comm_destroy(s->all);
    mt_context_destroy(s->ctx);
}

/* Small whole numbers: sums are exact in any order. */
static float value(int world_rank, int i) { return (float)(100 * world_rank + i % 50); }

static mt_status fill(const rank_state *s, float *to, int world_rank, int first, int n) {
    float host[MAX_RANKS * COUNT];
    for (int i = 0; i < n; i++) host[i] = value(world_rank, first + i);
    MT_TRY(mt_context_synchronize(s->ctx));
    CHECK(cudaMemcpy(to, host, (size_t)n * sizeof *host, cudaMemcpyHostToDevice) == cudaSuccess);
    return MT_SUCCESS;
}

/* Checks for the sum over the world ranks first, first + step, ... */
static mt_status is_sum(const rank_state *s, const float *from, int first, int step, int ranks, int offset, int n) {
    float host[MAX_RANKS * COUNT];
    MT_TRY(mt_context_synchronize(s->ctx));
    CHECK(cudaMemcpy(host, from, (size_t)n * sizeof *host, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (int i = 0; i < n; i++) {
        float sum = 0;
        for (int r = 0; r < ranks; r++) sum += value(first + r * step, offset + i);
        CHECK(host[i] == sum);
    }
    return MT_SUCCESS;
}

static mt_status every_collective(rank_state *s, mt_comm *c, int first, int step) {
    int rank = mt_comm_rank(c), size = mt_comm_size(c), me = first + rank * step;
    MT_TRY(fill(s, s->a, me, 0, MAX_RANKS * COUNT));
    MT_TRY(mt_all_reduce(s->ctx, c, s->a, s->b, COUNT, MT_F32, MT_SUM));
    MT_TRY(is_sum(s, s->b, first, step, size, 0, COUNT));
    MT_TRY(mt_reduce_scatter(s->ctx, c, s->a, s->b, COUNT, MT_F32, MT_SUM));
    MT_TRY(is_sum(s, s->b, first, step, size, rank * COUNT, COUNT));
    MT_TRY(mt_all_gather(s->ctx, c, s->a, s->b, COUNT, MT_F32));
    for (int r = 0; r < size; r++) MT_TRY(is_sum(s, s->b + r * COUNT, first + r * step, 0, 1, 0, COUNT));
    MT_TRY(mt_broadcast(s->ctx, c, s->a, s->b, 7, MT_F32, size - 1));
    MT_TRY(is_sum(s, s->b, first + (size - 1) * step, 0, 1, 0, 7));
    MT_TRY(mt_send_recv(s->ctx, c, s->a, COUNT, (rank + 1) % size, s->b, COUNT, (rank + size - 1) % size, MT_F32));
    MT_TRY(is_sum(s, s->b, first + (rank + size - 1) % size * step, 0, 1, 0, COUNT));
    if (size > 1 && rank == 0) MT_TRY(mt_send(s->ctx, c, s->a, 5, MT_F32, size - 1));
    if (size > 1 && rank == size - 1) {
        MT_TRY(mt_recv(s->ctx, c, s->b, 5, MT_F32, 0));
        MT_TRY(is_sum(s, s->b, first, 0, 1, 0, 5));
    }
    return mt_barrier(s->ctx, c);
}

static void take_a_nap(void) {
    struct timespec nap = {0, 200000000};
    nanosleep(&nap, NULL);
}

/* cudaFree waits until the device is idle. The next collective, which the other ranks have probably started, runs on
   other devices: cudaFree must not wait for it. */
static mt_status free_late(rank_state *s, int late) {
    const size_t bytes = 1024;
    void *memory = NULL;
    MT_TRY(mt_context_alloc(s->ctx, bytes, &memory));
    MT_TRY(mt_context_synchronize(s->ctx));
    if (late) take_a_nap();
    mt_context_free(s->ctx, memory, bytes);
    return every_collective(s, s->all, 0, 1);
}

static mt_status compute(mt_comm *world, void *user) {
    rank_state s;
    int rank = mt_comm_rank(world), size = mt_comm_size(world), half = size > 1 ? size / 2 : 1;
    mt_status status = open_rank(world, &s);
    (void)user;
    for (int i = 0; i < 2 && status == MT_SUCCESS; i++) {
        status = every_collective(&s, s.all, 0, 1);
        if (status == MT_SUCCESS) status = every_collective(&s, s.tp, rank / half * half, 1);
        /* This group has the reverse order: ranks are ordered by key. */
        if (status == MT_SUCCESS) status = every_collective(&s, s.data, rank % half + (size / half - 1) * half, -half);
    }
    if (status == MT_SUCCESS) status = free_late(&s, rank == 0);
    close_rank(&s);
    return status;
}

/* ---- where they meet --------------------------------------------------------------------------------------------- */

static void test_torchrun(void **state) {
    (void)state;
    WANT_GPUS(4);
    for (int ranks = 1; ranks <= 4; ranks++) {
        job j = new_job(ranks == 3 ? 2 : ranks, compute);
        run_job(&j);
        assert_all_succeed(&j);
    }
}

/* The environment of two machines with two GPUs each. */
static void test_two_machines(void **state) {
    job j = new_job(4, compute);
    char text[MAX_RANKS][200];
    (void)state;
    WANT_GPUS(4);
    take_port(&j);
    for (int r = 0; r < 4; r++) {
        say_torchrun(text[r], sizeof text[r], r, 4, r % 2, j.port, r < 2 ? " NCCL_HOSTID=n1" : " NCCL_HOSTID=n2");
        j.environment[r] = text[r];
    }
    run_job(&j);
    assert_all_succeed(&j);
}

/* The port is derived from the job's number; the host is the first in the list. */
static void test_srun(void **state) {
    job j = new_job(2, compute);
    char text[MAX_RANKS][300];
    int id = 0;
    (void)state;
    WANT_GPUS(2);
    while ((j.port = test_take_port(61440 + id, &j.held)) < 0 && id < 4095) id++; /* see mt_world_from_env */
    for (int r = 0; r < 2; r++) {
        snprintf(text[r], sizeof text[r],
                 "SLURM_JOB_ID=%d SLURM_STEP_ID=0 SLURM_PROCID=%d SLURM_NTASKS=2 SLURM_LOCALID=%d "
                 "SLURM_JOB_NODELIST=127.0.0.[1-2]",
                 id, r, r);
        j.environment[r] = text[r];
    }
    run_job(&j);
    assert_all_succeed(&j);
}

/* NCCL_COMM_ID set by the user has priority. mpirun sets no address. */
static void test_nccl_comm_id(void **state) {
    job j = new_job(2, compute);
    char text[MAX_RANKS][300];
    (void)state;
    WANT_GPUS(2);
    take_port(&j);
    for (int with_id = 1; with_id >= 0; with_id--) {
        for (int r = 0; r < 2; r++) {
            char id[100] = "";
            if (with_id)
                snprintf(id, sizeof id, " NCCL_COMM_ID=127.0.0.1:%d MASTER_ADDR=nowhere MASTER_PORT=1", j.port);
            snprintf(text[r], sizeof text[r],
                     "OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=2 "
                     "OMPI_COMM_WORLD_LOCAL_RANK=%d%s",
                     r, r, id);
            j.environment[r] = text[r];
        }
        run_job(&j);
        if (with_id) assert_all_succeed(&j);
    }
    for (int r = 0; r < 2; r++) {
        assert_int_equal(j.code[r], 1);
        assert_non_null(
            strstr(j.said[r], "MT_ERR_ARGUMENT: mt_comm_create_for: the 2 ranks of \"world\" do not know where"));
    }
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

enum { KILLED, STOPPED, STUCK, RETURNS, FAILS, FAULTS };
static const char *const fault_names[] = {"killed", "stopped", "stuck", "returns", "fails"};

/* IN_GROUP: first in the groups beside the victim's, then in the groups across, so that every rank is affected. */
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, BARRIER, SEND_RECV, IN_GROUP, COLLECTIVES };
static const char *const collective_names[] = {"all_reduce(count 300, f32, sum) on \"world\" (4 ranks)",
                                               "all_gather(count 300, f32) on \"world\"",
                                               "reduce_scatter(count 300, f32, sum) on \"world\"",
                                               "broadcast(count 300, f32, root 2) on \"world\"",
                                               "barrier on \"world\"",
                                               "send_recv(",
                                               "all_reduce(count 300, f32, sum) on \""};

static mt_status one_collective(rank_state *s, int kind) {
    int rank = mt_comm_rank(s->all);
    switch (kind) {
    case ALL_REDUCE: return mt_all_reduce(s->ctx, s->all, s->a, s->b, COUNT, MT_F32, MT_SUM);
    case ALL_GATHER: return mt_all_gather(s->ctx, s->all, s->a, s->b, COUNT, MT_F32);
    case REDUCE_SCATTER: return mt_reduce_scatter(s->ctx, s->all, s->a, s->b, COUNT, MT_F32, MT_SUM);
    case BROADCAST: return mt_broadcast(s->ctx, s->all, s->a, s->b, COUNT, MT_F32, 2);
    case BARRIER: return mt_barrier(s->ctx, s->all);
    case SEND_RECV:
        return mt_send_recv(s->ctx, s->all, s->a, COUNT, (rank + 1) % 4, s->b, COUNT, (rank + 3) % 4, MT_F32);
    default:
        MT_TRY(mt_all_reduce(s->ctx, s->tp, s->a, s->b, COUNT, MT_F32, MT_SUM));
        return mt_all_reduce(s->ctx, s->data, s->a, s->b, COUNT, MT_F32, MT_SUM);
    }
}

/* By this time the other ranks are most probably in the collective. */
static mt_status suffer(int fault) {
    take_a_nap();
    if (fault == KILLED) raise(SIGKILL);
    if (fault == STOPPED) raise(SIGSTOP);
    while (fault == STUCK) pause();
    if (fault != FAILS) return MT_SUCCESS;
    fprintf(stderr, "this rank fails by itself\n");
    return MT_ERR_DATA;
}

static mt_status survive(mt_comm *world, void *user) {
    const job *j = (const job *)user;
    rank_state s;
    mt_status status = open_rank(world, &s);
    if (status == MT_SUCCESS) status = mt_barrier(s.ctx, s.all); /* no rank is lost while the ranks connect */
    if (status == MT_SUCCESS && mt_comm_rank(world) == j->victim) {
        status = suffer(j->fault);
    } else {
        if (status == MT_SUCCESS) status = one_collective(&s, j->collective);
        if (status == MT_SUCCESS) status = mt_context_synchronize(s.ctx);
    }
    close_rank(&s);
    return status;
}

/* Checks a rank that needed the victim: it ends by itself, with one message that names the rank and the call. Returns
   1, or 0 and writes what is wrong. */
static int is_told(const job *j, int rank, char *wrong, size_t bytes) {
    const char *name = collective_names[j->collective], *said = j->said[rank], *line = strchr(said, '\n');
    int named =
        /* or the call before */
        strstr(said, name) != NULL || (j->fault == KILLED && strstr(said, "barrier on \"world\""));
    char who[32];
    if (j->collective == SEND_RECV && rank == (j->victim + 2) % 4 && j->code[rank] == 0 && !said[0])
        return 1; /* not a neighbour of the victim */
    snprintf(who, sizeof who, "rank %d of 4: MT_ERR_", rank);
    if (j->code[rank] == 1 && strncmp(said, who, strlen(who)) == 0 && line && !line[1] && named &&
        (strstr(said, "MT_ERR_PEER") ||
         (strstr(said, "MT_ERR_TIMEOUT") && j->fault != KILLED))) /* a killed process is detected at once */
        return 1;
    snprintf(wrong, bytes, "rank %d is %s in %s; rank %d: code %d, \"%s\"", j->victim, fault_names[j->fault], name,
             rank, j->code[rank], said);
    return 0;
}

static void assert_victim(const job *j) {
    static const int codes[] = {128 + SIGKILL, 128 + SIGKILL, 128 + SIGKILL, 0, 1};
    int codes_match =
        j->code[j->victim] == codes[j->fault] || (j->fault >= RETURNS && j->code[j->victim] == 128 + SIGKILL);
    if (!codes_match)
        fail_msg("the rank that %s: code %d: %s", fault_names[j->fault], j->code[j->victim], j->said[j->victim]);
}

static void run_fault(int fault, int collective, int victim) {
    char wrong[3000];
    for (double timeout = TIMEOUT; timeout <= TIMEOUT_MAX; timeout *= 2) {
        job j = new_job(4, survive);
        int told = 0;
        j.fault = fault;
        j.collective = collective;
        j.victim = victim;
        j.timeout = timeout;
        run_job(&j);
        for (int r = 0; r < 4; r++) told += r == victim || is_told(&j, r, wrong, sizeof wrong);
        if (told < 4) continue;
        assert_victim(&j);
        return;
    }
    fail_msg("%s", wrong);
}

static void test_killed(void **state) {
    (void)state;
    WANT_GPUS(4);
    for (int kind = 0; kind < COLLECTIVES; kind++) run_fault(KILLED, kind, kind % 4 == 3 ? 0 : kind % 4);
}

static void test_stopped(void **state) {
    (void)state;
    WANT_GPUS(4);
    run_fault(STOPPED, ALL_REDUCE, 2);
    run_fault(STOPPED, BARRIER, 0);
    run_fault(STOPPED, IN_GROUP, 3);
}

static void test_stuck(void **state) {
    (void)state;
    WANT_GPUS(4);
    run_fault(STUCK, ALL_GATHER, 1);
    run_fault(STUCK, SEND_RECV, 0);
    run_fault(STUCK, REDUCE_SCATTER, 3);
}

static void test_returns_or_fails(void **state) {
    (void)state;
    WANT_GPUS(4);
    run_fault(RETURNS, BROADCAST, 3);
    run_fault(FAILS, ALL_REDUCE, 0);
}

/* ---- ranks that make other calls --------------------------------------------------------------------------------- */

enum { OTHER_COUNT, OTHER_CALL, OTHER_ROOT, OTHER_MESSAGE, NO_CALL, ODD_CALLS };

static mt_status odd_call(rank_state *s, int kind, int is_odd) {
    int rank = mt_comm_rank(s->all);
    if (kind == OTHER_ROOT) return mt_broadcast(s->ctx, s->all, s->a, s->b, COUNT, MT_F32, is_odd);
    if (kind == OTHER_MESSAGE && is_odd) return mt_send(s->ctx, s->all, s->a, COUNT, MT_F32, 0);
    if (kind == OTHER_MESSAGE && rank == 0) return mt_recv(s->ctx, s->all, s->b, COUNT - 1, MT_F32, 1);
    if (kind == OTHER_CALL && is_odd) return mt_all_gather(s->ctx, s->all, s->a, s->b, COUNT, MT_F32);
    return mt_all_reduce(s->ctx, s->all, s->a, s->b, kind == OTHER_COUNT && is_odd ? COUNT - 1 : COUNT, MT_F32, MT_SUM);
}

#if defined(MT_CUDA_ENGINE)
namespace mte {
void nccl_let_mismatches_hang(bool on); /* tests/engine/nccl.cpp */
}
#endif

/* As with NCCL, calls that do not match may wait for ever. */
static void let_mismatches_hang(void) {
#if defined(MT_CUDA_ENGINE)
    mte::nccl_let_mismatches_hang(true);
#endif
}

static mt_status make_odd_calls(mt_comm *world, void *user) {
    const job *j = (const job *)user;
    int is_odd = mt_comm_rank(world) == 1;
    rank_state s;
    mt_status status;
    let_mismatches_hang();
    status = open_rank(world, &s);
    if (status == MT_SUCCESS) status = mt_barrier(s.ctx, s.all);
    while (status == MT_SUCCESS && j->collective == NO_CALL && is_odd) pause(); /* until it is killed */
    if (status == MT_SUCCESS) status = odd_call(&s, j->collective, is_odd);
    if (status == MT_SUCCESS) status = mt_barrier(s.ctx, s.all); /* one that returned gets the error here */
    close_rank(&s);
    return status;
}

/* Returns 1, or 0 and writes what is wrong. */
static int say_the_same(const job *j, const char *status, const char *words, char *wrong, size_t bytes) {
    for (int r = 0; r < 3; r++) {
        if (r == j->victim || (j->code[r] == 1 && strstr(j->said[r], status) && strstr(j->said[r], words))) continue;
        snprintf(wrong, bytes, "case %d, rank %d: code %d, \"%s\"", j->collective, r, j->code[r], j->said[r]);
        return 0;
    }
    return 1;
}

/* Every process gets the sentence that threads get, and does not wait for the timeout. When one does not call, the
   others name it after the timeout. */
static void test_other_calls(void **state) {
    static const char *const words[] = {
        "all_reduce on \"world\" (3 ranks): ranks 0, 2 called all_reduce(count 300, f32, sum), rank 1 called "
        "all_reduce(count 299, f32, sum)",
        "ranks 0, 2 called all_reduce(count 300, f32, sum), rank 1 called all_gather(count 300, f32)",
        "ranks 0, 2 called broadcast(count 300, f32, root 0), rank 1 called broadcast(count 300, f32, root 1)",
        "rank 0 called recv(count 299, f32, from rank 1)", "for rank 1, whose last call here was barrier"};
    (void)state;
    WANT_GPUS(3);
    for (int kind = 0; kind < ODD_CALLS; kind++) {
        const char *status = kind == NO_CALL ? "MT_ERR_TIMEOUT" : "MT_ERR_MISMATCH";
        char wrong[3000];
        double timeout = kind == NO_CALL ? 0.5 : TEST_NEVER_OVER;
        for (;; timeout *= 2) {
            job j = new_job(3, make_odd_calls);
            j.collective = kind;
            j.timeout = timeout;
            if (kind == NO_CALL) j.victim = 1;
            run_job(&j);
            if (say_the_same(&j, status, words[kind], wrong, sizeof wrong)) break;
            if (timeout > TIMEOUT_MAX) fail_msg("%s", wrong);
        }
    }
}

/* ---- ranks that do not get as far as a collective ---------------------------------------------------------------- */

static mt_status connect_only(mt_comm *world, void *user) {
    const job *j = (const job *)user;
    rank_state s;
    mt_status status;
    memset(&s, 0, sizeof s);
    if (mt_comm_rank(world) == j->victim) {
        take_a_nap();
        raise(SIGKILL);
    }
    status = open_rank(world, &s);
    close_rank(&s);
    return status;
}

static void test_never_comes(void **state) {
    (void)state;
    WANT_GPUS(4);
    for (int victim = 0; victim < 4; victim += 3) { /* rank 0 is the one that listens */
        job j = new_job(4, connect_only);
        j.victim = victim;
        run_job(&j);
        for (int r = 0; r < 4; r++) {
            if (r == victim) continue;
            if (j.code[r] != 1 || !strstr(j.said[r], "create on \"world\" (4 ranks): ") ||
                (!strstr(j.said[r], "MT_ERR_TIMEOUT") && !strstr(j.said[r], "MT_ERR_PEER")))
                fail_msg("rank %d: code %d: %s", r, j.code[r], j.said[r]);
        }
    }
}

/* Both ranks use GPU 0 of one machine, and NCCL was not asked to let them. */
static void test_one_gpu_for_two(void **state) {
    job j = new_job(2, connect_only);
    char text[MAX_RANKS][200];
    (void)state;
    WANT_GPUS(1);
    take_port(&j);
    j.timeout = TEST_NEVER_OVER;
    for (int r = 0; r < 2; r++) {
        say_torchrun(text[r], sizeof text[r], r, 2, 0, j.port, " NCCL_MULTI_RANK_GPU_ENABLE=0");
        j.environment[r] = text[r];
    }
    run_job(&j);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(j.code[r], 1);
        if (!strstr(j.said[r], "Duplicate GPU") && !strstr(j.said[r], "using the same GPU"))
            fail_msg("rank %d: %s", r, j.said[r]);
    }
}

/* ---- a process that a rank forks --------------------------------------------------------------------------------- */

static int is_refused(rank_state *s, mt_status status, const char *message, const char *words) {
    if (status == MT_ERR_UNSUPPORTED && strstr(message, "was forked") && strstr(message, words)) return 1;
    fprintf(stderr, "rank %d, in a fork: %s: %s\n", mt_comm_rank(s->all), mt_status_name(status), message);
    return 0;
}

/* In the new process: nothing runs on the GPU or reaches other ranks, and everything can be destroyed. */
static int is_no_rank(rank_state *s) {
    mt_comm *out = NULL, *comms[3] = {s->all, s->tp, s->data};
    float host[COUNT];
    void *memory = NULL;
    int ok = 1;
    for (int i = 0; i < 3; i++) {
        if (mt_comm_size(comms[i]) == 1) continue;
        ok &= is_refused(s, mt_barrier(s->ctx, comms[i]), mt_last_error(s->ctx), "mt_barrier");
        ok &= is_refused(s, mt_all_reduce(s->ctx, comms[i], s->a, s->b, COUNT, MT_F32, MT_SUM), mt_last_error(s->ctx),
                         mt_comm_name(comms[i]));
        ok &= is_refused(s, mt_comm_split(comms[i], 0, 0, &out), mt_comm_last_error(comms[i]), "mt_comm_split");
        ok &= is_refused(s, mt_comm_register(s->ctx, comms[i], s->a, 1 << 22), mt_last_error(s->ctx), "register");
    }
    ok &= is_refused(s, mt_context_synchronize(s->ctx), mt_last_error(s->ctx), "CUDA does not work");
    ok &= is_refused(s, mt_context_alloc(s->ctx, 64, &memory), mt_last_error(s->ctx), "CUDA does not work");
    ok &= is_refused(s, mt_cuda_zero(s->ctx, s->a, 4), mt_last_error(s->ctx), "CUDA does not work");
    ok &= is_refused(s, mt_cuda_fetch(s->ctx, host, s->a, 4), mt_last_error(s->ctx), "CUDA does not work");
    ok &= is_refused(s, mt_graph_begin(s->ctx, s->all), mt_last_error(s->ctx), "CUDA does not work");
    ok &= !out && !memory;
    close_rank(s);
    return ok ? 0 : 1;
}

/* Forks between calls, and while the other ranks wait. */
static mt_status fork_and_compute(mt_comm *world, void *user) {
    rank_state s;
    int rank = mt_comm_rank(world), code = -1;
    mt_status status = open_rank(world, &s);
    (void)user;
    for (int i = 0; i < 3 && status == MT_SUCCESS; i++) {
        pid_t pid = -1;
        if (rank == i % 2) {
            fflush(NULL);
            pid = fork();
            if (pid == 0) {
                alarm(600); /* ends a process that hangs */
                _exit(is_no_rank(&s));
            }
            if (pid < 0 || waitpid(pid, &code, 0) != pid || !WIFEXITED(code) || WEXITSTATUS(code) != 0) {
                fprintf(stderr, "the new process ends with %d\n", code);
                status = MT_ERR_DATA;
                break;
            }
        }
        status = every_collective(&s, s.all, 0, 1);
    }
    close_rank(&s);
    return status;
}

static void test_forked(void **state) {
    job j = new_job(2, fork_and_compute);
    (void)state;
    run_job(&j);
    assert_all_succeed(&j);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_torchrun),
        cmocka_unit_test(test_two_machines),
        cmocka_unit_test(test_srun),
        cmocka_unit_test(test_nccl_comm_id),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_stuck),
        cmocka_unit_test(test_returns_or_fails),
        cmocka_unit_test(test_other_calls),
        cmocka_unit_test(test_never_comes),
        cmocka_unit_test(test_one_gpu_for_two),
        cmocka_unit_test(test_forked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
