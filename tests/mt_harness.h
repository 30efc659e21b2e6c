/* mt_harness.h - the harness of the test programs: a list of cases, assertions, and one line per case. C and C++.

   It implements the part of CMocka (https://cmocka.org) that the tests use, with the same names and output. Only the
   thread that runs a case may use assertions. MT_TEST_CASE selects the cases whose name contains its value, or with "="
   before it the case of exactly this name. MT_TEST_EXCEPT names cases that do not run, with spaces between them.
   MT_TEST_LIST=1 prints the names of the cases that would run, and runs none.

       MT_TEST_CASE=split build/tests/test_comm
       MT_TEST_CASE==test_split build/tests/test_comm

   For a case that takes longer than a second, the program prints the time. The exit status is 0 when all cases passed,
   1 after a failure, and 77 when every case was skipped. */

#ifndef MT_HARNESS_H
#define MT_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int (*CMFixtureFunction)(void **state);
struct CMUnitTest {
    const char *name;
    void (*test_func)(void **state);
    CMFixtureFunction setup_func, teardown_func;
    void *initial_state;
};

enum { CM_FAILED = 1, CM_SKIPPED = 2 };

/* A test program is one translation unit, so there is only one copy of the static variable. */
static jmp_buf *cm_jump_(void) {
    static jmp_buf jump;
    return &jump;
}

#if defined(__GNUC__)
__attribute__((noreturn))
#endif
static inline void
cm_leave_(int how, const char *file, int line, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (how == CM_FAILED) {
        vfprintf(stderr, format, args);
        fprintf(stderr, "\n%s:%d: error: Failure!\n", file, line);
    }
    va_end(args);
    longjmp(*cm_jump_(), how);
}

/* The number of complaints so far, see cm_complain. */
static inline int *cm_complaints_(void) {
    static int count = 0;
    return &count;
}

/* Prints a message and lets the running case fail when it has ended. Any thread may call this, unlike assertions. */
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
static inline void
cm_complain(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    __atomic_add_fetch(cm_complaints_(), 1, __ATOMIC_RELAXED);
}

static inline double cm_seconds_(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int cm_call_(const struct CMUnitTest *test, void **state) {
    int how = setjmp(*cm_jump_());
    if (how == 0) test->test_func(state);
    return how;
}

/* Runs a case with its fixtures. Returns 0, CM_FAILED or CM_SKIPPED. */
static inline int cm_run_(const struct CMUnitTest *test, void *group_state) {
    void *state = test->initial_state ? test->initial_state : group_state;
    double start = cm_seconds_(), seconds;
    int how;
    printf("[ RUN      ] %s\n", test->name);
    fflush(stdout);
    __atomic_store_n(cm_complaints_(), 0, __ATOMIC_RELAXED);
    how = test->setup_func && test->setup_func(&state) ? CM_FAILED : cm_call_(test, &state);
    if (test->teardown_func && test->teardown_func(&state)) how = CM_FAILED;
    if (__atomic_load_n(cm_complaints_(), __ATOMIC_RELAXED)) how = CM_FAILED;
    seconds = cm_seconds_() - start;
    printf("%s %s", how == 0 ? "[       OK ]" : how == CM_SKIPPED ? "[  SKIPPED ]" : "[  FAILED  ]", test->name);
    if (seconds >= 1) printf(" (%.1f s)", seconds);
    printf("\n");
    fflush(stdout);
    return how;
}

/* Returns 1 when one of the words of the list is the name. */
static inline int cm_is_one_of_(const char *name, const char *list) {
    size_t length = strlen(name);
    const char *at = list;
    while (at && (at = strstr(at, name)) != NULL) {
        if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == 0)) return 1;
        at++;
    }
    return 0;
}

static inline int cm_chosen_(const struct CMUnitTest *test) {
    const char *pattern = getenv("MT_TEST_CASE");
    if (cm_is_one_of_(test->name, getenv("MT_TEST_EXCEPT"))) return 0;
    if (pattern && pattern[0] == '=') return strcmp(test->name, pattern + 1) == 0;
    return !pattern || strstr(test->name, pattern) != NULL;
}

static inline int cm_list_(const struct CMUnitTest *tests, size_t count) {
    size_t i;
    for (i = 0; i < count; i++)
        if (cm_chosen_(&tests[i])) printf("%s\n", tests[i].name);
    return 0;
}

/* Runs the selected cases. Returns the exit status of the program. */
static inline int cm_run_group_(const struct CMUnitTest *tests, size_t count, CMFixtureFunction setup,
                                CMFixtureFunction teardown) {
    void *state = NULL;
    size_t i, chosen = 0, failed = 0, skipped = 0;
    const char *list = getenv("MT_TEST_LIST");
    int how;
    if (list && strcmp(list, "1") == 0) return cm_list_(tests, count);
    for (i = 0; i < count; i++) chosen += (size_t)cm_chosen_(&tests[i]);
    printf("[==========] Running %d test(s).\n", (int)chosen);
    if (chosen == 0 || (setup && setup(&state))) return 1;
    for (i = 0; i < count; i++) {
        if (!cm_chosen_(&tests[i])) continue;
        how = cm_run_(&tests[i], state);
        failed += how == CM_FAILED;
        skipped += how == CM_SKIPPED;
    }
    if (teardown && teardown(&state)) failed++;
    printf("[==========] %d test(s) run.\n", (int)chosen);
    printf("[  PASSED  ] %d test(s).\n", failed + skipped > chosen ? 0 : (int)(chosen - failed - skipped));
    if (skipped) printf("[  SKIPPED ] %d test(s).\n", (int)skipped);
    if (failed) printf("[  FAILED  ] %d test(s).\n", (int)failed);
    return failed ? 1 : skipped == chosen ? 77 : 0;
}
#define cmocka_unit_test(f)                                                                                            \
    { #f, f, NULL, NULL, NULL }
#define cmocka_unit_test_setup(f, setup)                                                                               \
    { #f, f, setup, NULL, NULL }
#define cmocka_unit_test_teardown(f, teardown)                                                                         \
    { #f, f, NULL, teardown, NULL }
#define cmocka_unit_test_setup_teardown(f, setup, teardown)                                                            \
    { #f, f, setup, teardown, NULL }
#define cmocka_unit_test_prestate(f, state)                                                                            \
    { #f, f, NULL, NULL, state }
#define cmocka_run_group_tests(tests, setup, teardown)                                                                 \
    cm_run_group_(tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)
#define cmocka_run_group_tests_name(name, tests, setup, teardown) cmocka_run_group_tests(tests, setup, teardown)
#define cmocka_set_message_output(output) ((void)0)
#define print_message printf
#define print_error(...) fprintf(stderr, __VA_ARGS__)

#define fail_msg(...) cm_leave_(CM_FAILED, __FILE__, __LINE__, __VA_ARGS__)
#define fail() fail_msg("fail()")
#define skip() cm_leave_(CM_SKIPPED, __FILE__, __LINE__, "skip()")

#define CM_CHECK_(condition, ...) ((condition) ? (void)0 : cm_leave_(CM_FAILED, __FILE__, __LINE__, __VA_ARGS__))
#define CM_COMPARE_(a, op, b)                                                                                          \
    CM_CHECK_((uintmax_t)(a)op(uintmax_t)(b), "not %s %s %s: %jd, %jd", #a, #op, #b, (intmax_t)(a), (intmax_t)(b))
#define CM_POINTERS_(a, op, b) CM_CHECK_((const void *)(a)op(const void *)(b), "not %s %s %s", #a, #op, #b)
#define assert_true(c) CM_CHECK_(c, "not true: %s", #c)
#define assert_false(c) CM_CHECK_(!(c), "not false: %s", #c)
#define assert_int_equal(a, b) CM_COMPARE_(a, ==, b)
#define assert_int_not_equal(a, b) CM_COMPARE_(a, !=, b)
#define assert_in_range(v, lo, hi)                                                                                     \
    CM_CHECK_((uintmax_t)(v) >= (uintmax_t)(lo) && (uintmax_t)(v) <= (uintmax_t)(hi), "%s out of range: %jd", #v,      \
              (intmax_t)(v))
#define assert_return_code(rc, error) CM_CHECK_((rc) >= 0, "%s is negative, errno %d", #rc, (int)(error))
#define assert_float_equal(a, b, epsilon)                                                                              \
    CM_CHECK_((a) - (b) <= (epsilon) && (b) - (a) <= (epsilon), "%s != %s: %g, %g", #a, #b, (double)(a), (double)(b))
#define assert_null(p) CM_POINTERS_(p, ==, NULL)
#define assert_non_null(p) CM_POINTERS_(p, !=, NULL)
#define assert_ptr_equal(a, b) CM_POINTERS_(a, ==, b)
#define assert_ptr_not_equal(a, b) CM_POINTERS_(a, !=, b)
#define assert_string_equal(a, b) CM_CHECK_(strcmp(a, b) == 0, "\"%s\" != \"%s\"", a, b)
#define assert_string_not_equal(a, b) CM_CHECK_(strcmp(a, b) != 0, "both are \"%s\"", a)
#define assert_memory_equal(a, b, size) CM_CHECK_(memcmp(a, b, size) == 0, "%s and %s differ", #a, #b)
#define assert_memory_not_equal(a, b, size) CM_CHECK_(memcmp(a, b, size) != 0, "%s and %s are the same", #a, #b)

#endif /* MT_HARNESS_H */
