/* test_comm_stress.c - 8 ranks, usually on fewer cores, make 20,000 random calls: every kind, type, operation and
   size, in the world and in groups that are created and destroyed, in place and not, at odd addresses. Every result
   is compared bit for bit with a reference that each rank computes from the definition; a counter-based generator
   gives every rank the inputs of all ranks. Bytes beside the buffers must stay unchanged.

   All ranks draw the same numbers, so they agree on the next call. A second generator, different on each rank, makes
   them arrive in a different order each time. Environment: MT_TEST_SEED=n selects another run, MT_TEST_STEPS=n its
   length. */

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"
#include "mt_test.h"

#include <math.h>
#include <sched.h>

#define RANKS 8
#define SLOTS 8
#define STEPS 20000      /* each rank takes part in more than 10,000 of them in a group of two or more */
#define MAX_BYTES 110000 /* largest part of one rank */
#define EDGE 64          /* bytes beside a buffer that must stay unchanged */
#define BUFFER_BYTES ((size_t)MAX_BYTES * RANKS + 4 * EDGE)

/* A group that this rank is in, and the world ranks of its members. size 0: this rank is not in a group. */
typedef struct group {
    mt_comm *comm;
    int rank, size, member[RANKS];
} group;

typedef struct rank_state {
    mt_context *ctx;
    group groups[SLOTS]; /* groups[0] is the world */
    uint64_t shared, own;
    unsigned char *a, *b;
} rank_state;

typedef struct call {
    group *g;
    mt_dtype dtype;
    mt_op op;
    size_t count, element;
    int in_place;
    uint64_t salt;
} call;

/* ---- elements ---------------------------------------------------------------------------------------------------- */

static uint64_t number(uint64_t salt, int world_rank, size_t i) {
    uint64_t state = salt + (uint64_t)world_rank * 0x51ed2701u + (uint64_t)i * 0x2545f491u;
    return test_random(&state);
}

/* The nearest number with `bits` bits after the leading one and an exponent of at least `lowest`; ties to even. */
static double round_to(double x, int bits, int lowest) {
    int exponent = x == 0 ? lowest : ilogb(x) < lowest ? lowest : ilogb(x);
    return nearbyint(ldexp(x, bits - exponent)) * ldexp(1, exponent - bits);
}

static uint16_t to_half(mt_dtype dtype, double x) {
    float f = (float)round_to(x, dtype == MT_BF16 ? 7 : 10, dtype == MT_BF16 ? -126 : -14);
    double size = fabs((double)f);
    uint16_t sign = signbit(f) ? 0x8000 : 0;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (dtype == MT_BF16) return (uint16_t)(bits >> 16);
    if (size < ldexp(1, -14)) return (uint16_t)(sign | (uint16_t)ldexp(size, 24));
    return (uint16_t)(sign | (ilogb(size) + 15) << 10 | ((int)ldexp(size, 10 - ilogb(size)) & 1023));
}

static double from_half(mt_dtype dtype, uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    if (dtype == MT_BF16) return (double)f;
    return (h >> 15 ? -1 : 1) * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

/* Element i of the input of a world rank. */
static void put(const call *c, int world_rank, size_t i, void *out) {
    uint64_t state = number(c->salt, world_rank, i);
    int32_t whole = (int32_t)(state >> 13);
    float f = test_float(&state);
    uint16_t h = c->dtype == MT_BF16 || c->dtype == MT_F16 ? to_half(c->dtype, 4 * (double)f) : 0;
    if (c->dtype == MT_F32) memcpy(out, &f, sizeof f);
    else if (c->dtype == MT_I32) memcpy(out, &whole, sizeof whole);
    else if (c->dtype == MT_U8) memcpy(out, &state, 1);
    else memcpy(out, &h, sizeof h);
}

static float float_in(const call *c, int world_rank, size_t i) {
    float f = 0;
    uint16_t h;
    if (c->dtype == MT_F32) {
        put(c, world_rank, i, &f);
        return f;
    }
    put(c, world_rank, i, &h);
    return (float)from_half(c->dtype, h);
}

/* Sums in the library's order: ((0+1)+(2+3))+..., with the larger power of two on the left. */
static float float_tree(const call *c, int first, int ranks, size_t i) {
    int half = 1;
    float x, y;
    if (ranks == 1) return float_in(c, c->g->member[first], i);
    while (2 * half < ranks) half *= 2;
    x = float_tree(c, first, half, i);
    y = float_tree(c, first + half, ranks - half, i);
    return c->op == MT_SUM ? x + y : x > y ? x : y;
}

static int32_t whole_of_all(const call *c, size_t i) {
    uint32_t sum = 0;
    int32_t most = INT32_MIN, x;
    for (int r = 0; r < c->g->size; r++) {
        put(c, c->g->member[r], i, &x);
        sum += (uint32_t)x;
        most = x > most ? x : most;
    }
    return c->op == MT_SUM ? (int32_t)sum : most;
}

/* Element i of the reduction over the group. */
static void reduced(const call *c, size_t i, void *out) {
    int32_t whole = c->dtype == MT_I32 ? whole_of_all(c, i) : 0;
    float f = c->dtype == MT_I32 ? 0 : float_tree(c, 0, c->g->size, i);
    uint16_t h = c->dtype == MT_BF16 || c->dtype == MT_F16 ? to_half(c->dtype, (double)f) : 0;
    if (c->dtype == MT_I32) memcpy(out, &whole, sizeof whole);
    else if (c->dtype == MT_F32) memcpy(out, &f, sizeof f);
    else memcpy(out, &h, sizeof h);
}

/* ---- buffers: EDGE bytes, some elements that make the address odd, the data, EDGE bytes -------------------------- */

static unsigned char *place(unsigned char *buffer, const call *c, size_t bytes, int shift) {
    unsigned char *data = buffer + EDGE + (c->salt >> shift) % 16 * c->element;
    memset(buffer, 0xa5, (size_t)(data - buffer) + bytes + EDGE);
    return data;
}

static void fill(const call *c, unsigned char *to, int world_rank, size_t n) {
    for (size_t i = 0; i < n; i++) put(c, world_rank, i, to + i * c->element);
}

/* Checks that elements [0, n) at x are elements [first, first + n) of a rank's input, or of the reduction if world_rank
   is -1. */
static mt_status holds(const call *c, const unsigned char *x, int world_rank, size_t first, size_t n) {
    unsigned char want[4];
    for (size_t i = 0; i < n; i++) {
        if (world_rank < 0) reduced(c, first + i, want);
        else put(c, world_rank, first + i, want);
        CHECK(memcmp(x + i * c->element, want, c->element) == 0);
    }
    return MT_SUCCESS;
}

/* Checks that the bytes beside [data, data + bytes) are unchanged. */
static mt_status edges(const unsigned char *buffer, const unsigned char *data, size_t bytes) {
    for (const unsigned char *p = buffer; p < data; p++) CHECK(*p == 0xa5);
    for (size_t i = 0; i < EDGE; i++) CHECK(data[bytes + i] == 0xa5);
    return MT_SUCCESS;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static mt_status all_reduce(rank_state *s, const call *c) {
    size_t bytes = c->count * c->element;
    unsigned char *send = place(s->a, c, bytes, 0), *recv = c->in_place ? send : place(s->b, c, bytes, 4);
    int me = c->g->member[c->g->rank];
    fill(c, send, me, c->count);
    MT_TRY(mt_all_reduce(s->ctx, c->g->comm, send, recv, c->count, c->dtype, c->op));
    MT_TRY(holds(c, recv, -1, 0, c->count));
    if (!c->in_place) MT_TRY(holds(c, send, me, 0, c->count));
    MT_TRY(edges(s->a, send, bytes));
    return c->in_place ? MT_SUCCESS : edges(s->b, recv, bytes);
}

static mt_status reduce_scatter(rank_state *s, const call *c) {
    size_t size = (size_t)c->g->size, rank = (size_t)c->g->rank, bytes = c->count * c->element, r;
    unsigned char *send = place(s->a, c, bytes * size, 0), *recv = send + rank * bytes;
    int me = c->g->member[rank];
    fill(c, send, me, c->count * size);
    if (!c->in_place) recv = place(s->b, c, bytes, 4);
    MT_TRY(mt_reduce_scatter(s->ctx, c->g->comm, send, recv, c->count, c->dtype, c->op));
    MT_TRY(holds(c, recv, -1, rank * c->count, c->count));
    for (r = 0; r < size; r++)
        if (r != rank || !c->in_place) MT_TRY(holds(c, send + r * bytes, me, r * c->count, c->count));
    MT_TRY(edges(s->a, send, bytes * size));
    return c->in_place ? MT_SUCCESS : edges(s->b, recv, bytes);
}

static mt_status all_gather(rank_state *s, const call *c) {
    size_t size = (size_t)c->g->size, rank = (size_t)c->g->rank, bytes = c->count * c->element, r;
    unsigned char *recv = place(s->b, c, bytes * size, 4),
                  *send = c->in_place ? recv + rank * bytes : place(s->a, c, bytes, 0);
    fill(c, send, c->g->member[rank], c->count);
    MT_TRY(mt_all_gather(s->ctx, c->g->comm, send, recv, c->count, c->dtype));
    for (r = 0; r < size; r++) MT_TRY(holds(c, recv + r * bytes, c->g->member[r], 0, c->count));
    MT_TRY(edges(s->b, recv, bytes * size));
    return c->in_place ? MT_SUCCESS : edges(s->a, send, bytes);
}

static mt_status broadcast(rank_state *s, const call *c) {
    size_t bytes = c->count * c->element;
    unsigned char *send = place(s->a, c, bytes, 0), *recv = c->in_place ? send : place(s->b, c, bytes, 4);
    int root = (int)((c->salt >> 24) % (uint64_t)c->g->size), sends = c->g->rank == root;
    if (sends || !c->in_place) fill(c, send, c->g->member[c->g->rank], c->count);
    MT_TRY(mt_broadcast(s->ctx, c->g->comm, sends || c->in_place ? send : NULL, recv, c->count, c->dtype, root));
    MT_TRY(holds(c, recv, c->g->member[root], 0, c->count));
    return edges(c->in_place ? s->a : s->b, recv, bytes);
}

/* All ranks exchange data in a ring, or along a line whose ends have only one neighbour. */
static mt_status send_recv(rank_state *s, const call *c) {
    size_t bytes = c->count * c->element;
    unsigned char *send = place(s->a, c, bytes, 0), *recv = place(s->b, c, bytes, 4);
    int size = c->g->size, rank = c->g->rank, line = (int)(c->salt >> 30 & 1);
    int shift = line ? 1 : (int)((c->salt >> 24) % (uint64_t)size);
    int to = (rank + shift) % size, from = (rank + size - shift) % size;
    if (line && rank == size - 1) to = -1;
    if (line && rank == 0) from = -1;
    if (to == rank && c->in_place) recv = send; /* a message to the own rank */
    fill(c, send, c->g->member[rank], c->count);
    MT_TRY(mt_send_recv(s->ctx, c->g->comm, send, to < 0 ? 99 : c->count, to, recv, from < 0 ? 99 : c->count, from,
                        c->dtype));
    if (from >= 0) MT_TRY(holds(c, recv, c->g->member[from], 0, c->count));
    MT_TRY(holds(c, send, c->g->member[rank], 0, c->count));
    MT_TRY(edges(s->a, send, bytes));
    return edges(s->b, recv == send ? s->b + EDGE : recv, recv == send ? 0 : bytes);
}

/* One random pair exchanges a message; the other ranks continue with the next step. */
static mt_status message(rank_state *s, const call *c) {
    size_t bytes = c->count * c->element;
    unsigned char *data = place(s->a, c, bytes, 0);
    int size = c->g->size, from = (int)((c->salt >> 24) % (uint64_t)size), to;
    if (size == 1) return MT_SUCCESS;
    to = (from + 1 + (int)((c->salt >> 32) % (uint64_t)(size - 1))) % size;
    if (c->g->rank == from) {
        fill(c, data, c->g->member[from], c->count);
        return mt_send(s->ctx, c->g->comm, data, c->count, c->dtype, to);
    }
    if (c->g->rank != to) return MT_SUCCESS;
    MT_TRY(mt_recv(s->ctx, c->g->comm, data, c->count, c->dtype, from));
    MT_TRY(holds(c, data, c->g->member[from], 0, c->count));
    return edges(s->a, data, bytes);
}

/* The elements that a rank sends another one: c->count, or with `in_place` a number of its own for each pair. */
static size_t block_of(const call *c, int from, int to) {
    return c->in_place ? (size_t)(number(c->salt, from, (size_t)to) % (c->count + 1)) : c->count;
}

static mt_status all_to_all(rank_state *s, const call *c) {
    size_t sends[RANKS], recvs[RANKS], sent = 0, received = 0, at = 0;
    int size = c->g->size, rank = c->g->rank, me = c->g->member[rank];
    for (int r = 0; r < size; r++) {
        sent += sends[r] = block_of(c, rank, r);
        received += recvs[r] = block_of(c, r, rank);
    }
    unsigned char *send = place(s->a, c, sent * c->element, 0), *recv = place(s->b, c, received * c->element, 4);
    fill(c, send, me, sent);
    if (c->in_place) MT_TRY(mt_all_to_all_v(s->ctx, c->g->comm, send, sends, recv, recvs, c->dtype));
    else MT_TRY(mt_all_to_all(s->ctx, c->g->comm, send, recv, c->count, c->dtype));
    for (int r = 0; r < size; at += recvs[r++]) {
        size_t first = 0;
        for (int to = 0; to < rank; to++) first += block_of(c, r, to);
        MT_TRY(holds(c, recv + at * c->element, c->g->member[r], first, recvs[r]));
    }
    MT_TRY(holds(c, send, me, 0, sent));
    MT_TRY(edges(s->a, send, sent * c->element));
    return edges(s->b, recv, received * c->element);
}

static mt_status one_call(rank_state *s, const call *c, int kind) {
    switch (kind) {
    case 0: return all_reduce(s, c);
    case 1: return reduce_scatter(s, c);
    case 2: return all_gather(s, c);
    case 3: return broadcast(s, c);
    case 4: return send_recv(s, c);
    case 5: return message(s, c);
    case 6: return all_to_all(s, c);
    default: return mt_barrier(s->ctx, c->g->comm);
    }
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

/* The color of a world rank in a split: a part of a grid, a random color, or none. */
static int color_of(uint64_t salt, int world_rank) {
    int size = 1 << (salt >> 8) % 4;
    if (salt % 4 == 0) return world_rank / size;
    if (salt % 4 == 1) return world_rank % size;
    return (int)(number(salt, world_rank, 0) % 4) - 1;
}

static int key_of(uint64_t salt, int world_rank) {
    return salt >> 16 & 1 ? 0 : (int)(number(salt, world_rank, 1) % 5) - 2;
}

/* The expected group: the parent's ranks with this rank's color, ordered by key, then by their rank in the parent. */
static void expect_group(const group *parent, uint64_t salt, group *out) {
    int me = parent->member[parent->rank], color = color_of(salt, me);
    out->size = 0;
    for (int key = -2; key <= 2; key++)
        for (int r = 0; r < parent->size; r++) {
            int other = parent->member[r];
            if (color < 0 || color_of(salt, other) != color || key_of(salt, other) != key) continue;
            if (other == me) out->rank = out->size;
            out->member[out->size++] = other;
        }
}

static mt_status regroup(rank_state *s, uint64_t salt) {
    /* often the world: otherwise all groups would soon be small */
    const group *parent = &s->groups[salt >> 41 & 1 ? 0 : (salt >> 20) % SLOTS];
    group *slot = &s->groups[1 + (salt >> 24) % (SLOTS - 1)], made;
    int me = s->groups[0].rank;
    memset(&made, 0, sizeof made);
    if (parent->comm) {
        expect_group(parent, salt, &made);
        MT_TRY(mt_comm_split(parent->comm, color_of(salt, me), key_of(salt, me), &made.comm));
    }
    CHECK((made.size > 0) == (made.comm != NULL));
    CHECK(!made.comm || (mt_comm_rank(made.comm) == made.rank && mt_comm_size(made.comm) == made.size));
    if (salt >> 40 & 7 && slot->comm != s->groups[0].comm)
        mt_comm_destroy(slot->comm); /* some communicators are left to the launcher */
    *slot = made;
    return MT_SUCCESS;
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

/* Mostly small counts, some near the sizes at which the library splits messages, few large ones. */
static size_t random_count(uint64_t *state, size_t element) {
    static const size_t borders[] = {16, 64, 256, 512, 1024, 4096, 8192};
    uint64_t r = test_random(state);
    size_t most = MAX_BYTES / element, n = (size_t)(r >> 16) % 40;
    if (r % 16 == 1) n = (size_t)(r >> 16) % 600;
    if (r % 32 == 2) n = borders[(r >> 16) % 7] + (size_t)(r >> 24) % 3 - 1;
    if (r % 256 == 3) n = (size_t)(r >> 16) % most;
    return n < most ? n : most;
}

static void linger(uint64_t lots) {
    volatile int spin;
    if (lots % 8 == 0) sched_yield();
    if (lots % 8 == 1)
        for (spin = 0; spin < (int)(lots >> 8 & 4095); spin++) continue;
}

static mt_status one_step(rank_state *s) {
    uint64_t salt = test_random(&s->shared), how = test_random(&s->shared);
    int kind = (int)(how % 8), slot = (int)((how >> 8) % SLOTS), reduces = kind < 2;
    call c;
    memset(&c, 0, sizeof c);
    c.g = &s->groups[slot];
    c.dtype = (mt_dtype)((how >> 16) % (reduces ? 4 : 5)); /* MT_U8, the last type, has no reductions */
    c.op = how >> 24 & 1 ? MT_SUM : MT_MAX;
    c.in_place = (int)(how >> 25 & 1);
    c.element = mt_dtype_size(c.dtype);
    c.count = random_count(&s->shared, c.element);
    c.salt = salt;
    linger(test_random(&s->own));
    if (how >> 32 & 15) return c.g->comm ? one_call(s, &c, kind) : MT_SUCCESS;
    return regroup(s, salt);
}

typedef struct plan {
    uint64_t seed;
    int steps;
} plan;

static mt_status stress_rank(mt_comm *world, void *user) {
    const plan *p = (const plan *)user;
    mt_context_desc d;
    rank_state s;
    int i;
    mt_status status;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.arena_bytes = 2 * BUFFER_BYTES + 256;
    s.shared = p->seed;
    s.own = 99 + (uint64_t)mt_comm_rank(world);
    s.groups[0].comm = world;
    s.groups[0].rank = mt_comm_rank(world);
    s.groups[0].size = RANKS;
    for (i = 0; i < RANKS; i++) s.groups[0].member[i] = i;
    for (i = 1; i < SLOTS; i++) s.groups[i] = s.groups[0]; /* until a split replaces it */
    MT_TRY(mt_context_create(world, &d, &s.ctx));
    status = mt_arena_alloc(s.ctx, BUFFER_BYTES, (void **)&s.a);
    MT_KEEP(status, mt_arena_alloc(s.ctx, BUFFER_BYTES, (void **)&s.b));
    for (i = 0; i < p->steps && status == MT_SUCCESS; i++) status = one_step(&s);
    if (status != MT_SUCCESS)
        fprintf(stderr, "MT_TEST_SEED=%llu: rank %d, step %d: %s\n", (unsigned long long)p->seed, mt_comm_rank(world),
                i, mt_last_error(s.ctx));
    mt_context_destroy(s.ctx);
    return status;
}

static void run(int no_pinning, double timeout_s, uint64_t seed, int steps) {
    plan p = {seed, steps};
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = RANKS;
    d.no_pinning = no_pinning;
    d.timeout_s = timeout_s;
    assert_int_equal(test_run(&d, stress_rank, &p, 0), MT_SUCCESS);
}

static void test_stress(void **state) {
    const char *steps = getenv("MT_TEST_STEPS");
    (void)state;
    run(0, TEST_NEVER_OVER, test_seed(20240607), steps ? atoi(steps) : STEPS);
}

/* Launches many groups for a few steps each, so that a group ends while some ranks are still leaving. */
static void test_short_lives(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 60; i++) run(1, TEST_NEVER_OVER, 20240607 + (uint64_t)i, i % 7);
}

/* Tests this file's own rounding, at known hard cases. */
static void test_halves(void **state) {
    static const struct {
        mt_dtype dtype;
        double x;
        uint16_t bits;
    } cases[] = {{MT_F16, 1, 0x3c00},
                 {MT_F16, -2.5, 0xc100},
                 {MT_F16, 0.1, 0x2e66},
                 {MT_F16, 5.9604644775390625e-8, 0x0001},
                 {MT_F16, 6.103515625e-5, 0x0400},
                 {MT_F16, 2049, 0x6800},
                 {MT_F16, 2051, 0x6802},
                 {MT_BF16, 1, 0x3f80},
                 {MT_BF16, 3.14159, 0x4049},
                 {MT_BF16, 257, 0x4380},
                 {MT_BF16, 259, 0x4382},
                 {MT_BF16, -0.3, 0xbe9a}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(to_half(cases[i].dtype, cases[i].x), cases[i].bits);
    for (int h = 0; h < 0x7c00; h++) assert_int_equal(to_half(MT_F16, from_half(MT_F16, (uint16_t)h)), h);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_halves), cmocka_unit_test(test_stress),
                                       cmocka_unit_test(test_short_lives)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
