/* mt_test_program.h - runs a program of examples/ in the process of its test. The test has included the program with
   its main renamed to program_main, and its name is PROGRAM. */

#ifndef MT_TEST_PROGRAM_H
#define MT_TEST_PROGRAM_H

#include "mt_test.h"
#include "mt_test_scratch.h"

#define MAX_ARGS 64
#define WORDS 4096 /* characters of a command line */
#define COUNT(a) (sizeof(a) / sizeof *(a))

/* Runs the program with these words as its arguments. Its output goes to the files "out" and "err". */
static inline int run_program(const char *words) {
    static char text[WORDS];
    char *argv[MAX_ARGS] = {(char *)(uintptr_t)PROGRAM};
    int argc = 1, out = dup(1), err = dup(2), rc;
    print_to(text, sizeof text, "%s", words);
    for (char *w = strtok(text, " "); w && argc < MAX_ARGS - 1; w = strtok(NULL, " ")) argv[argc++] = w;
    fflush(NULL);
    assert_non_null(freopen(in_scratch("out"), "w", stdout));
    assert_non_null(freopen(in_scratch("err"), "w", stderr));
    /* unbuffered, as before: the text is in the file even if the process ends early */
    setvbuf(stderr, NULL, _IONBF, 0);
    optind = 0; /* resets getopt */
    rc = program_main(argc, argv);
    fflush(NULL);
    dup2(out, 1);
    dup2(err, 2);
    close(out);
    close(err);
    return rc;
}

static inline void read_text(const char *name, char *text, size_t bytes) {
    FILE *f = fopen(in_scratch(name), "r");
    assert_non_null(f);
    text[fread(text, 1, bytes - 1, f)] = 0;
    fclose(f);
}

static inline void write_bytes(const char *name, const void *bytes, size_t size) {
    FILE *f = fopen(in_scratch(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, size, f), size);
    fclose(f);
}

static inline void expect_success(const char *words) {
    char text[4096];
    int rc = run_program(words);
    read_text("err", text, sizeof text);
    if (rc != 0) fail_msg(PROGRAM " %s: exit %d, stderr: %s", words, rc, text);
}

static inline void expect_error(const char *words, const char *sentence) {
    char text[4096];
    int rc = run_program(words);
    read_text("err", text, sizeof text);
    if (rc == 0 || !strstr(text, sentence)) fail_msg(PROGRAM " %s: exit %d, stderr: %s", words, rc, text);
}

/* The help has every flag. */
static inline void test_help(void **state) {
    char text[8192];
    (void)state;
    expect_success("--help");
    read_text("out", text, sizeof text);
    for (int i = 0; i < FLAGS; i++) assert_non_null(strstr(text, flags[i].name));
}

/* A text that is independent of the project's files: sentences of few words, which a small model learns quickly. */
static inline void write_text(void) {
    static const char *const words[] = {"the ",     "a ",   "rank ", "sums ",   "splits ", "rows ",
                                        "columns ", "of ",  "and ",  "every ",  "layer ",  "tensor ",
                                        "token ",   "has ", "sees ", "again.\n"};
    static char text[40000];
    uint64_t seed = 3, word = 0;
    size_t used = 0;
    while (used + 16 < sizeof text) {
        word = (3 * word + 1 + test_random(&seed) % 3) % 16;
        used += (size_t)snprintf(text + used, sizeof text - used, "%s", words[word]);
    }
    write_bytes("text", text, used);
}

/* --data refuses what is not a whole file of at most WHOLE_FILE_MAX bytes, and does not wait for a writer of a pipe.
   A file that has more bytes than its size said, such as one in /proc or one that grows, is refused when they are
   read. */
static inline void expect_whole_files(const char *flags) {
    char words[512];
    unsigned char *bytes = NULL;
    size_t size = 0;
    print_to(words, sizeof words, "%s --data /dev/zero", flags);
    expect_error(words, PROGRAM ": cannot read /dev/zero: it is not a regular file");
    assert_int_equal(mkfifo(in_scratch("fifo"), 0600), 0);
    print_to(words, sizeof words, "%s --data %s", flags, in_scratch("fifo"));
    expect_error(words, "fifo: it is not a regular file");
    print_to(words, sizeof words, "%s --data %s", flags, scratch);
    expect_error(words, "Is a directory");
    write_bytes("long", "", 0);
    assert_int_equal(truncate(in_scratch("long"), (off_t)WHOLE_FILE_MAX + 1), 0);
    print_to(words, sizeof words, "%s --data %s", flags, in_scratch("long"));
    expect_error(words, "long: it has more than 8589934592 bytes");
    write_bytes("long", "0123456789", 10);
    assert_true(whole_file_read(in_scratch("long"), 10, &bytes, &size));
    assert_true(whole_file_read(in_scratch("long"), 10, &bytes, &size)); /* after the first */
    assert_int_equal(size, 20);
    assert_memory_equal(bytes, "01234567890123456789", 21);
    assert_false(whole_file_read(in_scratch("long"), 9, &bytes, &size));
    assert_int_equal(size, 20); /* not read */
    assert_false(whole_file_read("/proc/self/status", 9, &bytes, &size));
    assert_int_equal(size, 30); /* one byte more than allowed */
    free(bytes);
    unlink(in_scratch("fifo"));
    unlink(in_scratch("long"));
}

#endif
