/* mt_test_scratch.h - a folder of the program's own for files, and shell commands on what is in it. C and C++. */

#ifndef MT_TEST_SCRATCH_H
#define MT_TEST_SCRATCH_H

#include <errno.h>
#include <stdarg.h>
#include <unistd.h>

#include "mt_test.h"

#define SCRATCH_MAX 384                  /* characters of the folder's path, with its NUL */
#define SCRATCH_PATH (SCRATCH_MAX + 128) /* of the path of a file in it */
static char scratch[SCRATCH_MAX];        /* the folder, in TMPDIR or /tmp */

/* As snprintf. A text that does not fit ends the program, because a path that is cut is another path. */
static inline void print_to(char *out, size_t bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));
static inline void print_to(char *out, size_t bytes, const char *format, ...) {
    va_list args;
    int length;
    va_start(args, format);
    length = vsnprintf(out, bytes, format, args);
    va_end(args);
    if (length >= 0 && (size_t)length < bytes) return;
    fprintf(stderr, "%d characters do not fit into %d bytes: %s...\n", length, (int)bytes, out);
    abort();
}

/* The path of a file in the folder. It is valid until this thread has asked for eight more. */
static inline const char *in_scratch(const char *name) {
    static __thread char path[8][SCRATCH_PATH];
    static __thread int next;
    char *p = path[next++ % 8];
    print_to(p, sizeof path[0], "%s/%s", scratch, name);
    return p;
}

/* Main thread: runs a command, which must succeed. */
static inline void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline void shell(const char *format, ...) {
    char command[4 * SCRATCH_PATH];
    va_list args;
    int length;
    va_start(args, format);
    length = vsnprintf(command, sizeof command, format, args);
    va_end(args);
    if (length < 0 || (size_t)length >= sizeof command) fail_msg("a command of %d characters: %s...", length, command);
    if (system(command) != 0) fail_msg("%s", command);
}

static inline void forget(const char *name) { shell("rm -rf '%s'", in_scratch(name)); }

/* Before the first test: makes the folder, with the name of the program in its name. Returns 0 when it did; otherwise
   says why not. */
static inline int scratch_open(const char *program) {
    const char *tmp = getenv("TMPDIR");
    if (!tmp || !*tmp) tmp = "/tmp";
    if (snprintf(scratch, sizeof scratch, "%s/%s_XXXXXX", tmp, program) >= (int)sizeof scratch) {
        fprintf(stderr, "TMPDIR has %d characters, too many for the paths in %s: %s\n", (int)strlen(tmp), program, tmp);
        return 1;
    }
    if (mkdtemp(scratch)) return 0;
    fprintf(stderr, "cannot make the folder %s: %s\n", scratch, strerror(errno));
    return 1;
}

/* After the last test. The tests have removed what they wrote: anything else is a failure. */
static inline int scratch_close(void) {
    if (rmdir(scratch) == 0) return 0;
    fprintf(stderr, "cannot remove %s: %s\n", scratch, strerror(errno));
    return 1;
}

#endif /* MT_TEST_SCRATCH_H */
