/* mt_test_ranks.h - what test_parallel.c and test_blocks.c share: a rank with its grid, context and registry, a
   launch that fails the test, comparisons that say where, and refusals with the words their sentence must hold.
   Include it after the implementation of megatron.h. */

#ifndef MT_TEST_RANKS_H
#define MT_TEST_RANKS_H

#include "mt_test.h"

#include <math.h>

#define TEST_MEMORY_MAX 256

/* memory: what test_floats handed out. It is not the arena's, so that a sanitizer sees its ends. */
typedef struct test_rank {
    mt_comm *world;
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    void *memory[TEST_MEMORY_MAX];
    int memory_count;
} test_rank;

static inline mt_status test_rank_open(mt_comm *world, mt_grid_desc shape, const mt_context_desc *where,
                                       test_rank *out) {
    mt_context_desc small = {.arena_bytes = (size_t)16 << 20};
    memset(out, 0, sizeof *out);
    out->world = world;
    MT_TRY(mt_grid_create(world, &shape, &out->grid));
    MT_TRY(mt_context_create(world, where ? where : &small, &out->ctx));
    return mt_params_create(out->ctx, &out->grid, &out->params);
}

static inline void test_rank_free_memory(test_rank *r) {
    while (r->memory_count > 0) free(r->memory[--r->memory_count]);
}

static inline void test_rank_close(test_rank *r) {
    test_rank_free_memory(r);
    mt_params_destroy(r->params);
    mt_context_destroy(r->ctx);
    mt_grid_destroy(&r->grid);
}

/* Another, empty registry on the same grid and context. */
static inline mt_status test_rank_renew(test_rank *r) {
    test_rank_free_memory(r);
    mt_params_destroy(r->params);
    r->params = NULL;
    return mt_params_create(r->ctx, &r->grid, &r->params);
}

/* n floats set to value, freed with the rank. */
static inline float *test_floats(test_rank *r, int64_t n, float value) {
    float *x = (float *)malloc((size_t)(n > 0 ? n : 1) * sizeof *x);
    if (!x || r->memory_count == TEST_MEMORY_MAX) abort();
    r->memory[r->memory_count++] = x;
    for (int64_t i = 0; i < n; i++) x[i] = value;
    return x;
}

static inline mt_tensor test_tensor(test_rank *r, int64_t rows, int64_t cols, float value) {
    return mt_tensor_f32(test_floats(r, rows * cols, value), rows, cols);
}

/* The same n numbers in (-scale, scale) for the same seed, whoever asks. */
static inline float *test_noise(test_rank *r, int64_t n, uint64_t seed, float scale) {
    float *x = test_floats(r, n, 0.0f);
    for (int64_t i = 0; i < n; i++) x[i] = scale * test_float(&seed);
    return x;
}

static inline int64_t test_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Where element `local` of rank's share of a dimension of n features lies in the whole; -1 for padding. Written from
   the description of mt_param_desc, not from the library: n is `parts` equal blocks of units that stay together, and a
   rank has the same number of units of each block. */
static inline int64_t test_global(int64_t n, int64_t parts, int64_t unit, int ranks, int rank, int64_t local) {
    int64_t units = n / parts / unit, share = test_ceil(units, ranks) * unit;
    int64_t within = rank * share + local % share;
    return within < n / parts ? local / share * (n / parts) + within : -1;
}

static inline int64_t test_local(int64_t n, int64_t parts, int64_t unit, int ranks) {
    return parts * test_ceil(n / parts / unit, ranks) * unit;
}

/* Inside a rank: |got - want| <= tolerance everywhere, which NaN is not. */
static inline mt_status test_near(const char *what, const float *got, const double *want, int64_t n, double tolerance) {
    int64_t worst = -1;
    double most = tolerance;
    for (int64_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - want[i]);
        if (error <= most) continue;
        worst = i;
        most = isnan(error) ? INFINITY : error;
    }
    if (worst < 0) return MT_SUCCESS;
    fprintf(stderr, "%s: element %lld of %lld is %.9g, expected %.9g: off by %.3g, allowed %.3g\n", what,
            (long long)worst, (long long)n, (double)got[worst], want[worst], most, tolerance);
    return MT_ERR_DATA;
}

static inline mt_status test_near_f32(const char *what, const float *got, const float *want, int64_t n,
                                      double tolerance) {
    for (int64_t i = 0; i < n; i++) {
        double w = (double)want[i];
        if (!(fabs((double)got[i] - w) <= tolerance)) return test_near(what, got + i, &w, 1, tolerance);
    }
    return MT_SUCCESS;
}

/* A seed of its own for each name (FNV-1a). */
static inline uint64_t test_name_seed(const char *name) {
    uint64_t seed = 14695981039346656037u;
    for (; *name; name++) seed = (seed ^ (unsigned char)*name) * 1099511628211u;
    return seed;
}

/* Main thread: f on `ranks` threads; any rank's error fails the test (the sentence is on stderr). */
static inline void test_launch(int ranks, mt_rank_function f, void *user) {
    mt_launch_desc d = {.ranks = ranks, .no_pinning = 1, .timeout_s = 60.0};
    mt_status status = mt_launch(&d, f, user);
    if (status != MT_SUCCESS) fail_msg("%d ranks: %s", ranks, mt_status_name(status));
}

/* A rank of a world that exists on paper only: enough to create things and to have calls refused, and on the meta
   device to do anything. A world of one rank is real on a real device. */
static inline void test_paper_rank(int ranks, int rank, mt_grid_desc shape, const mt_context_desc *where,
                                   test_rank *out) {
    int real = ranks == 1 && !(where && where->device == MT_DEVICE_META);
    mt_comm *world = NULL;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS,
                  real ? mt_comm_create_local(1, 0, &world) : mt_comm_create_meta(ranks, rank, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, test_rank_open(world, shape, where, out));
}

static inline void test_paper_rank_close(test_rank *r) {
    mt_comm *world = r->world;
    test_rank_close(r);
    mt_comm_destroy(world);
}

/* Main thread: the call was refused with this status, and the sentence holds every word of "a|b|c". */
static inline void test_refused(mt_context *ctx, mt_status got, mt_status expected, const char *call, const char *words,
                                const char *file, int line) {
    if (got != expected)
        fail_msg("%s:%d: %s: got %s, expected %s; %s", file, line, call, mt_status_name(got), mt_status_name(expected),
                 mt_last_error(ctx));
    if (!test_has_words(mt_last_error(ctx), words))
        fail_msg("%s:%d: %s: '%s' is not all in '%s'", file, line, call, words, mt_last_error(ctx));
    *(char *)mt_last_error(ctx) = 0; /* or an old sentence could be taken for a new one */
}

#define REFUSED(ctx, expected, words, ...)                                                                             \
    test_refused(ctx, (__VA_ARGS__), expected, #__VA_ARGS__, words, __FILE__, __LINE__)

/* Main thread: every element is still `value`. */
static inline void test_untouched(const char *what, const float *x, int64_t n, float value) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&x[i], &value, sizeof value) != 0)
            fail_msg("%s[%lld] was written: %g", what, (long long)i, (double)x[i]);
}

#endif /* MT_TEST_RANKS_H */
