/* whole_file.h - reads a whole file, which may be anything that a person names, for the programs of this directory. A
   file that is longer than the program can use is refused before it fills the memory, and what has no end or no
   content, such as /dev/zero, a pipe without a writer or a directory, is refused at once. */

#ifndef WHOLE_FILE_H
#define WHOLE_FILE_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Of texts and token files. The largest file of train_bert has 2^31 tokens of 3 bytes. */
#define WHOLE_FILE_MAX ((int64_t)8 << 30)

/* Opens a file. A pipe without a writer does not block. Returns -1 with errno. */
static int whole_file_open(const char *path) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &info) != 0 || S_ISREG(info.st_mode)) return fd;
    close(fd);
    errno = S_ISDIR(info.st_mode) ? EISDIR : 0; /* 0: neither a directory nor a file */
    return -1;
}

/* Reads up to `most` + 1 bytes, and appends them to bytes[*size]. Returns 0 with errno after an error. */
static int whole_file_append(int fd, int64_t most, unsigned char **bytes, size_t *size) {
    const size_t end = *size + (size_t)most + 1;
    size_t room = *size + (1 << 16);
    ssize_t n = 1;
    while (n > 0 && *size < end) {
        unsigned char *more;
        if (room > end) room = end;
        more = (unsigned char *)realloc(*bytes, room + 1); /* also for the NUL */
        if (!more) return 0;
        *bytes = more;
        n = read(fd, *bytes + *size, room - *size);
        if (n < 0 && errno != EINTR) return 0;
        if (n > 0) *size += (size_t)n;
        else if (n < 0) n = 1;
        if (*size == room) room *= 2;
    }
    (*bytes)[*size] = 0;
    return 1;
}

/* Appends the content of a file of at most `most` bytes to bytes[*size], and a NUL that does not count. path NULL: the
   standard input, which may be a pipe. The caller frees *bytes, also after an error. Returns 0 after it has printed
   what is wrong, with the name of the program. */
static int whole_file_read(const char *program, const char *path, int64_t most, unsigned char **bytes, size_t *size) {
    const char *name = path ? path : "the standard input";
    const size_t before = *size;
    struct stat info;
    int fd = path ? whole_file_open(path) : STDIN_FILENO, ok = fd >= 0, is_long = 0;
    if (ok && fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) is_long = info.st_size > most; /* do not read it */
    if (ok && !is_long) ok = whole_file_append(fd, most, bytes, size);
    if (ok && *size - before > (size_t)most) is_long = 1; /* of a pipe, or of a file that has grown */
    if (!ok)
        fprintf(stderr, "%s: cannot read %s: %s\n", program, name,
                errno ? strerror(errno) : "it is not a regular file");
    else if (is_long)
        fprintf(stderr, "%s: cannot read %s: it has more than %lld bytes, the most that the program reads\n", program,
                name, (long long)most);
    if (fd >= 0 && path) close(fd);
    return ok && !is_long;
}

#endif
