/* mt_test_ranks.h - what the tests of mt_parallel.h and megatron.h share: a rank with its grid, context and registry, a
   launch that fails the test when a rank fails, comparisons that print the element that differs, checks of all
   parameters of a registry, and checks of calls that must be refused. Include it after the implementation of
   megatron.h. */

#ifndef MT_TEST_RANKS_H
#define MT_TEST_RANKS_H

#include "mt_test.h"

#include <math.h>

#define TEST_MEMORY_MAX 256

/* memory has the allocations of test_floats, which are not in the arena: a sanitizer detects an access outside them. */
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

/* Replaces the registry by an empty one on the same grid and context. */
static inline mt_status test_rank_renew(test_rank *r) {
    test_rank_free_memory(r);
    mt_params_destroy(r->params);
    r->params = NULL;
    return mt_params_create(r->ctx, &r->grid, &r->params);
}

/* Returns n floats with the value `value`. test_rank_close frees them. */
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

/* Returns n numbers in (-scale, scale), which depend only on the seed. */
static inline float *test_noise(test_rank *r, int64_t n, uint64_t seed, float scale) {
    float *x = test_floats(r, n, 0.0f);
    for (int64_t i = 0; i < n; i++) x[i] = scale * test_float(&seed);
    return x;
}

static inline int64_t test_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Returns the global index of element `local` of the rank's share of a dimension of n features, or -1 for padding. This
   follows the description of mt_param_desc, not the library's code: n is `parts` equal blocks of units, a unit is not
   divided, and each rank has the same number of units of each block. */
static inline int64_t test_global(int64_t n, int64_t parts, int64_t unit, int ranks, int rank, int64_t local) {
    int64_t units = n / parts / unit, share = test_ceil(units, ranks) * unit;
    int64_t within = rank * share + local % share;
    return within < n / parts ? local / share * (n / parts) + within : -1;
}

/* The same with copies: ranks share the pieces of all units, and a piece is its part of the unit's first features, then
   the unit's copied features. */
static inline int64_t test_copied_global(int64_t n, const mt_param_desc *d, int ranks, int rank, int64_t local) {
    int64_t own = (d->unit - d->copied) / d->copies, size = own + d->copied, pieces = n / d->unit * d->copies;
    int64_t piece = rank * test_ceil(pieces, ranks) + local / size, within = local % size;
    if (piece >= pieces) return -1;
    if (within < own) return piece / d->copies * d->unit + piece % d->copies * own + within;
    return (piece / d->copies + 1) * d->unit - d->copied + within - own;
}

/* The same for the split dimension of a parameter. With padding of the caller's, ranks share padded_features, and what
   comes after the true features is padding. */
static inline int64_t test_param_global(const mt_param_desc *d, int ranks, int rank, int64_t local) {
    int64_t n = d->placement == MT_SPLIT_COLS ? d->cols : d->rows, unit = d->unit ? d->unit : 1, at;
    if (d->copies > 1) return test_copied_global(n, d, ranks, rank, local);
    if (!d->padded_features) return test_global(n, d->parts ? d->parts : 1, unit, ranks, rank, local);
    at = rank * test_ceil(d->padded_features / unit, ranks) * unit + local;
    return at < n ? at : -1;
}

static inline int64_t test_local(int64_t n, int64_t parts, int64_t unit, int ranks) {
    return parts * test_ceil(n / parts / unit, ranks) * unit;
}

/* Inside a rank: checks that |got - want| <= tolerance for every element. NaN fails. */
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

/* Returns a seed that depends on the name (FNV-1a). */
static inline uint64_t test_name_seed(const char *name) {
    uint64_t seed = 14695981039346656037u;
    for (; *name; name++) seed = (seed ^ (unsigned char)*name) * 1099511628211u;
    return seed;
}

/* Sets every parameter, including biases and norms, to its value + noise in (-scale, scale) that depends on the global
   element. */
static inline mt_status disturb_params(test_rank *r, float scale) {
    for (int i = 0; i < mt_params_count(r->params); i++) {
        mt_param *p = mt_params_at(r->params, i);
        int64_t n = p->desc.rows * p->desc.cols;
        float *x = (float *)malloc((size_t)n * sizeof *x);
        uint64_t seed = test_name_seed(p->name);
        mt_status status = mt_param_gather(r->ctx, r->params, p, p->value, x);
        for (int64_t k = 0; status == MT_SUCCESS && k < n; k++) x[k] += scale * test_float(&seed);
        if (status == MT_SUCCESS) status = mt_param_scatter(r->ctx, p, x, p->value);
        free(x);
        MT_TRY(status);
    }
    return MT_SUCCESS;
}

/* Gathers all gradients, one whole parameter after the other, in the order of the registry. */
static inline mt_status gather_grads(test_rank *r, float *out, int64_t room, int64_t *n) {
    *n = 0;
    for (int i = 0; i < mt_params_count(r->params); i++) {
        const mt_param *p = mt_params_at(r->params, i);
        CHECK(*n + p->desc.rows * p->desc.cols <= room);
        MT_TRY(mt_param_gather(r->ctx, r->params, p, p->grad, out + *n));
        *n += p->desc.rows * p->desc.cols;
    }
    return MT_SUCCESS;
}

/* Checks that the padding of a parameter is exactly zero, in its value and its gradient. */
static inline mt_status check_padding(const mt_param *p) {
    const mt_param_desc *d = &p->desc;
    for (int64_t i = 0; i < p->value.rows; i++)
        for (int64_t j = 0; j < p->value.cols; j++) {
            int by_rows = d->placement == MT_SPLIT_ROWS;
            if (d->placement == MT_REPLICATED) continue;
            if (test_param_global(d, p->tp_size, p->tp_rank, by_rows ? i : j) >= 0) continue;
            CHECK(((const float *)p->value.data)[i * p->value.cols + j] == 0.0f);
            CHECK(((const float *)p->grad.data)[i * p->value.cols + j] == 0.0f);
        }
    return MT_SUCCESS;
}

/* Main thread: runs f on `ranks` threads. The error of any rank fails the test; its message is on stderr. Over MPI (see
   mpi/over_mpi.h) the ranks are processes, and what f writes to *user stays in its process. */
static inline void test_launch(int ranks, mt_rank_function f, void *user) {
    mt_launch_desc d = {.ranks = ranks, .no_pinning = 1, .timeout_s = TEST_NEVER_OVER};
    mt_status status = test_run(&d, f, user, 0);
    if (status != MT_SUCCESS) fail_msg("%d ranks: %s", ranks, mt_status_name(status));
}

/* Opens a rank of a meta communicator, which cannot communicate. This is enough for create functions and for calls that
   are refused, and for all calls on the meta device. A world of one rank on a CPU or a GPU is a real one. */
static inline void test_paper_rank(int ranks, int rank, mt_grid_desc shape, const mt_context_desc *where,
                                   test_rank *out) {
    int real = ranks == 1 && !(where && where->device == MT_DEVICE_META);
    mt_comm *world = NULL;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS,
                  real ? mt_comm_create_local(1, 0, &world) : mt_comm_create_meta(ranks, rank, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, test_rank_open(world, shape, where, out));
}

/* Opens rank 1 of 4 tensor parallel ranks. */
static inline void open_quarter(test_rank *r) { test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, NULL, r); }

static inline void test_paper_rank_close(test_rank *r) {
    mt_comm *world = r->world;
    test_rank_close(r);
    mt_comm_destroy(world);
}

/* Main thread: checks that a call returned the expected error, and that its message contains every word of "a|b|c". */
static inline void test_refused(mt_context *ctx, mt_status got, mt_status expected, const char *call, const char *words,
                                const char *file, int line) {
    if (got != expected)
        fail_msg("%s:%d: %s: got %s, expected %s; %s", file, line, call, mt_status_name(got), mt_status_name(expected),
                 mt_last_error(ctx));
    if (!test_has_words(mt_last_error(ctx), words))
        fail_msg("%s:%d: %s: '%s' is not all in '%s'", file, line, call, words, mt_last_error(ctx));
    *(char *)mt_last_error(ctx) = 0; /* a later check must not find this message */
}

#define REFUSED(ctx, expected, words, ...)                                                                             \
    test_refused(ctx, (__VA_ARGS__), expected, #__VA_ARGS__, words, __FILE__, __LINE__)

/* Main thread: checks that a call returned the expected error, and that its message is the name of the function and
   `rest`, and nothing else. */
static inline void test_refused_exactly(mt_context *ctx, mt_status got, mt_status expected, const char *call,
                                        const char *rest, const char *file, int line) {
    const char *message = mt_last_error(ctx), *colon = strstr(message, ": ");
    if (got != expected || !colon || strcmp(colon + 2, rest) != 0)
        fail_msg("%s:%d: %s: got %s '%s', expected %s '%s'", file, line, call, mt_status_name(got), message,
                 mt_status_name(expected), rest);
    *(char *)mt_last_error(ctx) = 0; /* a later check must not find this message */
}

#define REFUSED_EXACTLY(ctx, expected, rest, ...)                                                                      \
    test_refused_exactly(ctx, (__VA_ARGS__), expected, #__VA_ARGS__, rest, __FILE__, __LINE__)

/* Main thread: checks that every element is still `value`. */
static inline void test_untouched(const char *what, const float *x, int64_t n, float value) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&x[i], &value, sizeof value) != 0)
            fail_msg("%s[%lld] was written: %g", what, (long long)i, (double)x[i]);
}

#endif /* MT_TEST_RANKS_H */
