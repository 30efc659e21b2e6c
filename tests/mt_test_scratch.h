/* mt_test_scratch.h - a folder of the program's own for files, and shell commands on what is in it. C and C++. */

#ifndef MT_TEST_SCRATCH_H
#define MT_TEST_SCRATCH_H

#include <stdarg.h>
#include <unistd.h>

#include "mt_test.h"

static char scratch[96]; /* the folder, in TMPDIR or /tmp */

/* The path of a file in the folder. It is valid until this thread has asked for eight more. */
static inline const char *in_scratch(const char *name) {
    static __thread char path[8][256];
    static __thread int next;
    char *p = path[next++ % 8];
    snprintf(p, sizeof path[0], "%s/%s", scratch, name);
    return p;
}

/* Main thread: runs a command, which must succeed. */
static inline void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline void shell(const char *format, ...) {
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    if (system(command) != 0) fail_msg("%s", command);
}

static inline void forget(const char *name) { shell("rm -rf '%s'", in_scratch(name)); }

/* Before the first test: makes the folder, with the name of the program in its name. Returns 0 when it did. */
static inline int scratch_open(const char *program) {
    const char *tmp = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%.40s/%.40s_XXXXXX", tmp ? tmp : "/tmp", program);
    return !mkdtemp(scratch);
}

/* After the last test. The tests have removed what they wrote: anything else is a failure. */
static inline int scratch_close(void) { return rmdir(scratch); }

#endif /* MT_TEST_SCRATCH_H */
