/* output_file.h - opens a file that a program writes besides its results, such as a log, for the programs of this
   directory. It may be anything that a person names: a new file, /dev/null, /dev/fd/N, a terminal or a pipe. What
   nobody reads is refused instead of waited for, and so is a file that the run reads or writes for another purpose.

   A program defines PROGRAM, its name, which begins the messages, and includes megatron.h before. */

#ifndef OUTPUT_FILE_H
#define OUTPUT_FILE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns why a program does not write to the file that open has returned as fd, or NULL. */
static const char *output_file_fault(int fd) {
    struct stat info;
    if (fd < 0 && errno == ENXIO) return "it is a socket, or a pipe that nobody reads";
    if (fd < 0 || fstat(fd, &info) != 0) return strerror(errno);
    return S_ISBLK(info.st_mode) ? "it is a block device" : NULL;
}

/* Opens a file to write at its end, and creates it if it is missing; what it has stays. Does not wait for a reader of a
   pipe, but the writes to a pipe wait. Returns NULL after it has printed what is wrong. */
static FILE *output_file_open(const char *path) {
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_NOCTTY, 0666);
    const char *fault = output_file_fault(fd);
    FILE *file = NULL;
    if (!fault && (fcntl(fd, F_SETFL, O_APPEND) != 0 || !(file = fdopen(fd, "a")))) fault = strerror(errno);
    if (!fault) return file;
    fprintf(stderr, PROGRAM ": cannot write %s: %s\n", path, fault);
    if (fd >= 0) close(fd);
    return NULL;
}

/* Returns 1 for a file that can be locked and shortened, which pipes and devices cannot. */
static int output_file_is_regular(FILE *file) {
    struct stat info;
    return fstat(fileno(file), &info) == 0 && S_ISREG(info.st_mode);
}

/* Keeps the first `end` bytes of a regular file; file may be NULL. Returns 0 after it has printed what is wrong. */
static int output_file_cut(const char *path, FILE *file, off_t end) {
    if (!file || !output_file_is_regular(file) || ftruncate(fileno(file), end) == 0) return 1;
    fprintf(stderr, PROGRAM ": cannot shorten %s: %s\n", path, strerror(errno));
    return 0;
}

/* Closes a file, which may be NULL. Returns 0 when something could not be written. */
static int output_file_close(const char *path, FILE *file) {
    int failed = file && ferror(file);
    if (file && fclose(file) != 0) failed = 1;
    if (failed) fprintf(stderr, PROGRAM ": cannot write %s: %s\n", path, strerror(errno));
    return !failed;
}

/* ---- whether two paths are of one file --------------------------------------------------------------------------- */

/* For a file that does not exist yet: finds its directory, and its name in there. Follows symbolic links to files that
   do not exist yet. Returns 0 when there is no such directory. */
static int find_place(const char *path, struct stat *folder, char name[MT_PATH_MAX]) {
    char at[MT_PATH_MAX], to[MT_PATH_MAX], *last;
    ssize_t n = 0;
    int links = 0, length = snprintf(at, sizeof at, "%s", path);
    while (length < (int)sizeof at && links++ < 16 && (n = readlink(at, to, sizeof to - 1)) > 0) {
        to[n] = 0;
        last = strrchr(at, '/');
        last = last && to[0] != '/' ? last + 1 : at; /* a relative link replaces only the last component of the path */
        length = (int)(last - at) + snprintf(last, sizeof at - (size_t)(last - at), "%s", to);
    }
    if (length >= (int)sizeof at || n > 0) return 0;
    last = strrchr(at, '/');
    snprintf(name, MT_PATH_MAX, "%s", last ? last + 1 : at);
    if (last) last[last == at] = 0; /* the root keeps its slash */
    return stat(last ? at : ".", folder) == 0;
}

/* Returns 1 when two paths lead to the same regular file, which need not exist yet. Terminals, pipes and devices do not
   count: they may be written to twice. */
static int same_file(const char *a, const char *b) {
    char name_a[MT_PATH_MAX], name_b[MT_PATH_MAX];
    struct stat x, y;
    int has_a = stat(a, &x) == 0, has_b = stat(b, &y) == 0, same = has_a && has_b && S_ISREG(x.st_mode);
    if (!has_a && !has_b) same = find_place(a, &x, name_a) && find_place(b, &y, name_b) && !strcmp(name_a, name_b);
    return same && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Returns 1 when the file `log` of --flag is not the file `path` of `other`; otherwise prints a message and returns 0.
   path may be NULL. */
static int is_apart(const char *flag, const char *log, const char *other, const char *path) {
    if (!path || !same_file(log, path)) return 1;
    fprintf(stderr, PROGRAM ": --%s %s is the same file as %s%s%s\n", flag, log, other, *other ? " " : "", path);
    return 0;
}

/* The same for all files of a checkpoint (depth 0), or of a directory of checkpoints (depth 1). */
static int is_apart_from(const char *flag, const char *log, const char *other, const char *directory, int depth) {
    DIR *d = directory ? opendir(directory) : NULL;
    const struct dirent *e;
    char path[MT_PATH_MAX];
    int apart = 1;
    while (d && apart && (e = readdir(d))) {
        const char *end = strrchr(e->d_name, '.');
        int ours = end && (!strcmp(end, ".safetensors") || !strcmp(end, ".json"));
        if (snprintf(path, sizeof path, "%s/%s", directory, e->d_name) >= (int)sizeof path) continue;
        if (ours) apart = is_apart(flag, log, other, path);
        else if (depth > 0 && strncmp(e->d_name, "step-", 5) == 0)
            apart = is_apart_from(flag, log, other, path, depth - 1);
    }
    if (d) closedir(d);
    if (apart && directory && depth > 0 && snprintf(path, sizeof path, "%s/.lock", directory) < (int)sizeof path)
        apart = is_apart(flag, log, other, path);
    return apart;
}

/* The same for the files of the process. */
static int is_apart_from_streams(const char *flag, const char *log) {
    return is_apart(flag, log, "", "/dev/stdout") && is_apart(flag, log, "", "/dev/stderr");
}

#endif
