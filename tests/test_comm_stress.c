/* test_comm_stress.c - 8 ranks, mostly on fewer cores: thousands of random collectives and messages of random sizes in
   random sub-groups, every result compared bit for bit. All ranks draw the same numbers, so they agree on what comes
   next; a second generator, different on every rank, makes them arrive in a different order each time. */

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"
#include "mt_test.h"

#define RANKS 8
#define GROUPS 6
#define MAX_COUNT 6000

typedef struct rank_state {
    mt_context *ctx;
    mt_comm *group[GROUPS];  /* world, pairs, quads, odd and even, {0..4} {5..7}, reversed */
    int member[GROUPS][8];   /* world rank of each rank of my group */
    uint64_t shared, own;
    float *a, *b;
} rank_state;

static float value(uint64_t salt, int world_rank, size_t i) {
    uint64_t state = salt + (uint64_t)world_rank * 0x51ed2701u + (uint64_t)i * 0x2545f491u;
    return test_float(&state);
}

static float tree(const rank_state *s, uint64_t salt, int g, int first, int ranks, size_t i, mt_op op) {
    float a, b;
    int half = 1;
    if (ranks == 1) return value(salt, s->member[g][first], i);
    while (2 * half < ranks) half *= 2;
    a = tree(s, salt, g, first, half, i, op);
    b = tree(s, salt, g, first + half, ranks - half, i, op);
    return op == MT_SUM ? a + b : a > b ? a : b;
}

static void fill(float *x, uint64_t salt, int world_rank, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) x[i] = value(salt, world_rank, i);
}

static mt_status is_value(const float *x, uint64_t salt, int world_rank, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) CHECK(x[i] == value(salt, world_rank, i));
    return MT_SUCCESS;
}

static mt_status is_tree(const rank_state *s, const float *x, uint64_t salt, int g, size_t first, size_t n, mt_op op) {
    size_t i;
    for (i = 0; i < n; i++) CHECK(x[i] == tree(s, salt, g, 0, mt_comm_size(s->group[g]), first + i, op));
    return MT_SUCCESS;
}

static mt_status one_collective(rank_state *s, int g, int kind, size_t n, uint64_t salt) {
    mt_comm *comm = s->group[g];
    size_t size = (size_t)mt_comm_size(comm), rank = (size_t)mt_comm_rank(comm), r;
    int me = s->member[g][rank], in_place = (int)(salt >> 8 & 1), root = (int)((salt >> 16) % size);
    mt_op op = salt >> 9 & 1 ? MT_SUM : MT_MAX;
    float *recv = in_place ? s->a : s->b;
    switch (kind) {
    case MT_ALL_REDUCE:
        fill(s->a, salt, me, n);
        MT_TRY(mt_all_reduce(s->ctx, comm, s->a, recv, n, MT_F32, op));
        return is_tree(s, recv, salt, g, 0, n, op);
    case MT_REDUCE_SCATTER:
        recv = in_place ? s->a + rank * n : s->b;
        fill(s->a, salt, me, n * size);
        MT_TRY(mt_reduce_scatter(s->ctx, comm, s->a, recv, n, MT_F32, op));
        return is_tree(s, recv, salt, g, n * rank, n, op);
    case MT_ALL_GATHER:
        fill(in_place ? s->b + rank * n : s->a, salt, me, n);
        MT_TRY(mt_all_gather(s->ctx, comm, in_place ? s->b + rank * n : s->a, s->b, n, MT_F32));
        for (r = 0; r < size; r++) MT_TRY(is_value(s->b + r * n, salt, s->member[g][r], n));
        return MT_SUCCESS;
    case MT_BROADCAST:
        fill(s->a, salt, me, n);
        MT_TRY(mt_broadcast(s->ctx, comm, s->a, recv, n, MT_F32, root));
        return is_value(recv, salt, s->member[g][root], n);
    default: return mt_barrier(s->ctx, comm);
    }
}

static mt_status one_ring(rank_state *s, int g, size_t n, uint64_t salt) {
    mt_comm *comm = s->group[g];
    int size = mt_comm_size(comm), rank = mt_comm_rank(comm), shift = (int)((salt >> 16) % (uint64_t)size);
    int from = (rank + size - shift) % size;
    fill(s->a, salt, s->member[g][rank], n);
    MT_TRY(mt_send_recv(s->ctx, comm, s->a, n, (rank + shift) % size, s->b, n, from, MT_F32));
    return is_value(s->b, salt, s->member[g][from], n);
}

/* One random pair talks, the others go on to the next step. */
static mt_status one_message(rank_state *s, int g, size_t n, uint64_t salt) {
    mt_comm *comm = s->group[g];
    int size = mt_comm_size(comm), rank = mt_comm_rank(comm);
    int from = (int)((salt >> 16) % (uint64_t)size), to = (from + 1 + (int)((salt >> 24) % (uint64_t)(size - 1))) % size;
    if (rank == from) {
        fill(s->a, salt, s->member[g][from], n);
        return mt_send(s->ctx, comm, s->a, n, MT_F32, to);
    }
    if (rank != to) return MT_SUCCESS;
    MT_TRY(mt_recv(s->ctx, comm, s->b, n, MT_F32, from));
    return is_value(s->b, salt, s->member[g][from], n);
}

static size_t random_count(uint64_t *state) {
    uint64_t r = test_random(state);
    if (r % 16 == 0) return (size_t)(r >> 8) % MAX_COUNT;
    return (size_t)(r >> 8) % (r % 4 ? 40 : 600);
}

/* A short-lived communicator now and then, sometimes left to the launcher to free. */
static mt_status one_split(rank_state *s, uint64_t salt) {
    mt_comm *comm = NULL;
    int rank = mt_comm_rank(s->group[0]), color = (int)((salt >> (8 + 2 * rank)) % 4) - 1, x = 1, sum = 0, same = 0, r;
    MT_TRY(mt_comm_split(s->group[0], color, 0, &comm));
    for (r = 0; r < RANKS; r++) same += (int)((salt >> (8 + 2 * r)) % 4) - 1 == color;
    if (comm) MT_TRY(mt_all_reduce(s->ctx, comm, &x, &sum, 1, MT_I32, MT_SUM));
    CHECK(color < 0 ? comm == NULL : sum == same);
    if (salt & 1) mt_comm_destroy(comm);
    return MT_SUCCESS;
}

static mt_status one_step(rank_state *s) {
    uint64_t salt = test_random(&s->shared), lots = test_random(&s->own);
    int g = (int)test_below(&s->shared, GROUPS), kind = (int)test_below(&s->shared, 9);
    size_t n = random_count(&s->shared);
    volatile int spin;
    if (lots % 8 == 0) sched_yield();
    if (lots % 8 == 1)
        for (spin = 0; spin < (int)(lots >> 8 & 4095); spin++) continue;
    if (kind < 4 || kind == MT_BARRIER) return one_collective(s, g, kind, n, salt);
    if (kind == 4 || kind == 5) return one_ring(s, g, n, salt);
    if (kind == 7) return one_message(s, g, n, salt);
    return salt % 8 ? MT_SUCCESS : one_split(s, salt >> 3);
}

static mt_status make_groups(rank_state *s, mt_comm *world) {
    int rank = mt_comm_rank(world), color[GROUPS], g;
    color[1] = rank / 2;
    color[2] = rank / 4;
    color[3] = rank % 2;
    color[4] = rank >= 5;
    color[5] = 0;
    s->group[0] = world;
    for (g = 1; g < GROUPS; g++) MT_TRY(mt_comm_split(world, color[g], g == 5 ? -rank : 0, &s->group[g]));
    for (g = 0; g < GROUPS; g++) MT_TRY(mt_all_gather(s->ctx, s->group[g], &rank, s->member[g], 1, MT_I32));
    return MT_SUCCESS;
}

static mt_status stress_rank(mt_comm *world, void *user) {
    int steps = *(const int *)user, i;
    mt_context_desc d;
    rank_state s;
    mt_status status;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.arena_bytes = 2 * sizeof(float) * RANKS * MAX_COUNT + 256;
    s.shared = 20240607;
    s.own = 99 + (uint64_t)mt_comm_rank(world);
    MT_TRY(mt_context_create(world, &d, &s.ctx));
    status = mt_arena_alloc(s.ctx, sizeof(float) * RANKS * MAX_COUNT, (void **)&s.a);
    MT_KEEP(status, mt_arena_alloc(s.ctx, sizeof(float) * RANKS * MAX_COUNT, (void **)&s.b));
    MT_KEEP(status, make_groups(&s, world));
    for (i = 0; i < steps && status == MT_SUCCESS; i++) status = one_step(&s);
    if (status != MT_SUCCESS) fprintf(stderr, "step %d: %s\n", i, mt_last_error(s.ctx));
    mt_context_destroy(s.ctx);
    return status;
}

static void run(int no_pinning, double timeout_s, int steps) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = RANKS;
    d.no_pinning = no_pinning;
    d.timeout_s = timeout_s;
    assert_int_equal(mt_launch(&d, stress_rank, &steps), MT_SUCCESS);
}

static void test_stress(void **state) {
    (void)state;
    run(0, 120, 30000);
}

/* Many short lives of a group: start, a few steps, the end, with peers still on their way out. */
static void test_short_lives(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 60; i++) run(1, 60, i % 7);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_stress), cmocka_unit_test(test_short_lives)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
