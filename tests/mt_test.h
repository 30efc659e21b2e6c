/* mt_test.h - what the test programs share: the harness, checks of statuses, a random generator, and test_run.

   Only the main thread may use assertions. Inside a rank use CHECK, return the status, and assert it outside. */

#ifndef MT_TEST_H
#define MT_TEST_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mt_harness.h"
#include "mt_test_message.h"

/* SANITIZED is 1 under a sanitizer. Tests then run fewer steps, because a sanitizer needs only one of each kind. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

/* A timeout in seconds that is never over: a call that waits for it hangs, and the time limit of CTest ends it. */
#define TEST_NEVER_OVER 3600.0

/* Returns 1 when a test runs all combinations of types, splits and options: MT_TEST_ALL=1, which tests/run.sh --all
   sets. Otherwise, and always under a sanitizer, it runs a fixed sample of them. */
static inline int test_all(void) {
    const char *all = getenv("MT_TEST_ALL");
    return !SANITIZED && all && strcmp(all, "1") == 0;
}

/* Returns 1 when combination number i runs: all of them, or one in `of`. With a prime as `of`, the sample has every
   entry of the inner lists of which the combinations are made. */
static inline int test_takes(size_t i, size_t of) { return test_all() || i % of == 0; }

/* Main thread: fails the test unless the call returns the expected status. Prints the message of ctx, which may be
   NULL. */
#define ASSERT_STATUS(ctx, expected, call)                                                                             \
    do {                                                                                                               \
        mt_status got_ = (call);                                                                                       \
        if (got_ != (expected))                                                                                        \
            fail_msg("%s: got %s, expected %s; %s", #call, mt_status_name(got_), mt_status_name(expected),             \
                     (ctx) ? mt_last_error(ctx) : "");                                                                 \
    } while (0)

/* Inside a rank: when the condition is false, prints the place, and returns MT_ERR_DATA from the calling function. */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            return MT_ERR_DATA;                                                                                        \
        }                                                                                                              \
    } while (0)

/* Returns 1 when the text contains every word of "a|b|c". */
static inline int test_has_words(const char *text, const char *words) {
    char list[512], *word, *rest = NULL;
    snprintf(list, sizeof list, "%s", words);
    for (word = strtok_r(list, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
        if (!strstr(text, word)) return 0;
    return 1;
}

/* splitmix64: a small generator with the same numbers on every platform. */
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Returns the seed of a case: MT_TEST_SEED, or without it `otherwise`. Prints it, so that a failure can be repeated. */
static inline uint64_t test_seed(uint64_t otherwise) {
    const char *text = getenv("MT_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : otherwise;
    printf("      MT_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

static inline size_t test_below(uint64_t *state, size_t n) { return (size_t)(test_random(state) % n); }

/* The larger of two numbers, and NaN if one of them is NaN: fmax would leave it out. */
static inline double test_larger(double a, double b) { return a == a && !(b <= a) ? b : a; }

/* Returns a number in (-1, 1) with a full mantissa, so that the order of additions changes the bits of a sum. */
static inline float test_float(uint64_t *state) {
    return (float)((double)(int64_t)test_random(state) / 9223372036854775808.0);
}

#if defined(MT_COMM_H)
/* The target that has no loss, from a field ignore_index. */
static inline int32_t test_ignored(int32_t ignore_index) {
    return ignore_index == MT_ZERO ? 0 : ignore_index == 0 ? -100 : ignore_index;
}

/* Return t with another shape, or with another data type, of the same memory. */
static inline mt_tensor with_shape(mt_tensor t, int64_t rows, int64_t cols, int64_t ld) {
    t.rows = rows;
    t.cols = cols;
    t.ld = ld;
    return t;
}

static inline mt_tensor with_dtype(mt_tensor t, mt_dtype dtype) {
    t.dtype = dtype;
    return t;
}

/* A logger that checks each message, and prints warnings. */
static inline void test_judge(void *user, mt_log_level level, const char *message) {
    const char *fault = test_message_fault(message);
    (void)user;
    if (fault) cm_complain("not one sentence, %s: %s\n", fault, message);
    if (level == MT_LOG_WARNING) fprintf(stderr, "%s\n", message);
}

/* Creates a context. Without a logger of its own it has test_judge. */
static inline mt_status test_judged_create(mt_comm *world, const mt_context_desc *desc, mt_context **out) {
    mt_context_desc judged;
    memset(&judged, 0, sizeof judged);
    if (desc) judged = *desc;
    if (!judged.logger.log) judged.logger.log = test_judge;
    return mt_context_create(world, &judged, out);
}

#undef mt_context_create /* of check_all.h, which test_judged_create calls */
#define mt_context_create(world, desc, out) test_judged_create(world, desc, out)

/* Main thread: creates a context of `threads` threads on a CPU or on the meta device. */
static inline mt_context *test_context(mt_device device, int threads) {
    mt_context_desc d;
    mt_context *ctx = NULL;
    memset(&d, 0, sizeof d);
    d.device = device;
    d.threads = threads;
    d.arena_bytes = (size_t)64 << 20;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    return ctx;
}

/* A logger that writes nothing. */
static inline void test_quiet(void *user, mt_log_level level, const char *message) {
    (void)user, (void)level, (void)message;
}
#endif

/* Runs f on threads (mt_launch), with MT_TEST_OVER_MPI on processes (see tests/mpi/over_mpi.h), or with
   MT_TEST_OVER_SOCKETS over a transport of the tests (mt_test_over_sockets.h). bytes is the size of *user when ranks
   write to it. TEST_OVER_MESSAGES: 1 when ranks know of each other only by messages. */
#if defined(MT_TEST_OVER_MPI)
#define TEST_OVER_MPI 1
#define TEST_OVER_MESSAGES 1
#include "mpi/over_mpi.h"
#elif defined(MT_TEST_OVER_SOCKETS)
#define TEST_OVER_MPI 0
#define TEST_OVER_MESSAGES 1
#include "mt_test_over_sockets.h"
#elif defined(MT_COMM_H)
#define TEST_OVER_MPI 0
#define TEST_OVER_MESSAGES 0
static inline mt_status test_run(const mt_launch_desc *desc, mt_rank_function f, void *user, size_t bytes) {
    (void)bytes;
    return mt_launch(desc, f, user);
}
#endif

#endif /* MT_TEST_H */
