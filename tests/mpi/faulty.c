/* faulty.c - a program for tests/mpi.sh, which checks the messages and the exit status of its ranks. The ranks
   repeat the same collectives until one of them has a fault.
       faulty FAULT RANK CALL TIMEOUT
   In round 5 the rank is killed (kill), stopped (stop), sleeps (sleep), returns (return), fails (fail), or has no
   fault (none). With `work`, it prints "works", and goes on when the file $FAULTY_UNTIL exists. The timeout begins to
   count in round 5: before, the ranks connect, which may take long on a busy machine. CALL: all_reduce, large,
   all_gather, reduce_scatter, broadcast, barrier, ring, or group for an all_reduce among the even and among the odd
   ranks. */

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"

#include <signal.h>
#include <unistd.h>

#define LARGE ((size_t)1 << 20)

typedef struct plan {
    const char *fault, *call;
    int rank;
    double timeout;
    float *a, *b;
} plan;

static mt_status misbehave(mt_context *ctx, const plan *p) {
    struct timespec long_time = {600, 0};
    if (strcmp(p->fault, "kill") == 0) raise(SIGKILL);
    if (strcmp(p->fault, "stop") == 0) raise(SIGSTOP);
    if (strcmp(p->fault, "sleep") == 0) nanosleep(&long_time, NULL);
    if (strcmp(p->fault, "fail") == 0) return mt_fail(ctx, MT_ERR_DATA, "loss is 17, which is no good");
    return MT_SUCCESS;
}

static void work(void) {
    const char *until = getenv("FAULTY_UNTIL");
    struct timespec piece = {0, 10000000};
    printf("works\n");
    fflush(stdout);
    while (until && access(until, F_OK) != 0) nanosleep(&piece, NULL);
}

/* Calls that begin now, and the end of the program, wait for this time. */
static void set_timeout(mt_comm *world, mt_comm *group, double timeout) {
    world->group->timeout = group->group->timeout = world->link->port->timeout = timeout;
}

static mt_status call(mt_context *ctx, mt_comm *world, mt_comm *group, const plan *p) {
    int rank = mt_comm_rank(world), size = mt_comm_size(world);
    const char *name = p->call;
    if (strcmp(name, "large") == 0) return mt_all_reduce(ctx, world, p->a, p->b, LARGE, MT_F32, MT_SUM);
    if (strcmp(name, "all_gather") == 0) return mt_all_gather(ctx, world, p->a, p->b, 100, MT_F32);
    if (strcmp(name, "reduce_scatter") == 0) return mt_reduce_scatter(ctx, world, p->a, p->b, 5000, MT_F32, MT_MAX);
    if (strcmp(name, "broadcast") == 0) return mt_broadcast(ctx, world, p->a, p->b, 100, MT_F32, 1);
    if (strcmp(name, "barrier") == 0) return mt_barrier(ctx, world);
    if (strcmp(name, "ring") == 0)
        return mt_send_recv(ctx, world, p->a, 9000, (rank + 1) % size, p->b, 9000, (rank + size - 1) % size, MT_F32);
    return mt_all_reduce(ctx, strcmp(name, "group") == 0 ? group : world, p->a, p->b, 100, MT_F32, MT_SUM);
}

static mt_status rank_main(mt_comm *world, void *user) {
    const plan *p = (const plan *)user;
    mt_context_desc small = {.arena_bytes = 4096};
    mt_context *ctx;
    mt_comm *group;
    mt_status status = MT_SUCCESS;
    int rank = mt_comm_rank(world), bad = rank == p->rank && strcmp(p->fault, "none") != 0;
    MT_TRY(mt_context_create(world, &small, &ctx));
    MT_TRY(mt_comm_split(world, rank % 2, 0, &group));
    mt_comm_set_name(group, rank % 2 ? "odd" : "even");
    for (int round = 0; round < 20 && status == MT_SUCCESS; round++) {
        if (round == 5) set_timeout(world, group, p->timeout);
        if (bad && round == 5 && strcmp(p->fault, "work") == 0) {
            work();
        } else if (bad && round == 5) {
            status = misbehave(ctx, p);
            break;
        }
        status = call(ctx, world, group, p);
    }
    mt_context_destroy(ctx);
    return status;
}

int main(int argc, char **argv) {
    plan p = {"none", "all_reduce", 0, argc > 4 ? atof(argv[4]) : 1, NULL, NULL};
    mt_launch_desc d = {.timeout_s = 3600};
    int failed;
    if (argc > 1) p.fault = argv[1];
    if (argc > 2) p.rank = atoi(argv[2]);
    if (argc > 3) p.call = argv[3];
    p.a = (float *)calloc(LARGE, sizeof *p.a);
    p.b = (float *)calloc(LARGE, sizeof *p.b);
    failed = !p.a || !p.b || mt_world_from_env(&d, rank_main, &p) != MT_SUCCESS;
    if (!failed || strcmp(p.fault, "none") != 0) free(p.a), free(p.b);
    return failed;
}
