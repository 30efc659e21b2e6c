/* mt_test.h - what the test programs share: the harness, a status check, a small generator, and a place where ranks
   report.

   Assertions belong to the main thread: inside a rank use CHECK and return the status, assert outside.      */

#ifndef MT_TEST_H
#define MT_TEST_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mt_harness.h"

/* A sanitizer looks at every kind of step, but does not need many of them: tests that compare numbers take fewer. */
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

/* A quick run takes every test case, and a fixed sample of the products in it (types x splits x options).
   MT_TEST_ALL=1, which tests/run.sh --all sets, takes them whole. A sanitizer always samples. */
static inline int test_all(void) {
    const char *all = getenv("MT_TEST_ALL");
    return !SANITIZED && all && strcmp(all, "1") == 0;
}

/* Whether number i of a product is in the sample of one in `of`. A prime reaches every entry of the inner lists. */
static inline int test_takes(size_t i, size_t of) { return test_all() || i % of == 0; }

/* Main thread: fails the test, with the sentence of ctx (may be NULL), unless status is the expected one. */
#define ASSERT_STATUS(ctx, expected, call)                                                                             \
    do {                                                                                                               \
        mt_status got_ = (call);                                                                                       \
        if (got_ != (expected))                                                                                        \
            fail_msg("%s: got %s, expected %s; %s", #call, mt_status_name(got_), mt_status_name(expected),             \
                     (ctx) ? mt_last_error(ctx) : "");                                                                 \
    } while (0)

/* Inside a rank: says where, and returns MT_ERR_DATA from the rank's function (or a status-returning helper). */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            return MT_ERR_DATA;                                                                                        \
        }                                                                                                              \
    } while (0)

/* Whether the text holds every word of "a|b|c". */
static inline int test_has_words(const char *text, const char *words) {
    char list[512], *word, *rest = NULL;
    snprintf(list, sizeof list, "%s", words);
    for (word = strtok_r(list, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
        if (!strstr(text, word)) return 0;
    return 1;
}

/* splitmix64: small, and the same everywhere. */
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline size_t test_below(uint64_t *state, size_t n) { return (size_t)(test_random(state) % n); }

/* In (-1, 1), with a full mantissa, so that the order of additions shows. */
static inline float test_float(uint64_t *state) {
    return (float)((double)(int64_t)test_random(state) / 9223372036854775808.0);
}

/* mt_launch, or the same between processes: see tests/mpi/over_mpi.h. bytes: of what user points to, if ranks write
 * there. */
#if defined(MT_TEST_OVER_MPI)
#define TEST_OVER_MPI 1
#include "mpi/over_mpi.h"
#elif defined(MT_COMM_H)
#define TEST_OVER_MPI 0
static inline mt_status test_run(const mt_launch_desc *desc, mt_rank_function f, void *user, size_t bytes) {
    (void)bytes;
    return mt_launch(desc, f, user);
}
#endif

#endif /* MT_TEST_H */
