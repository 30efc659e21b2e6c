/* ---- files and directories --------------------------------------------------------------------------------------- */

#pragma once
#include "checkpoint.h"
#include "../comm/context.c"
#include "../parallel/params.c"

/* The files are little-endian, and their numbers are copied to and from memory without conversion. */
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "mt_parallel.h: safetensors files are little-endian and this machine is not: its files would be byte-swapped"
#endif

static mt_status mti_io_error(mt_context *ctx, const char *path, const char *what, int error) {
    return mt_fail(ctx, MT_ERR_IO, "%s: cannot %s: %s", path, what, strerror(error));
}

/* Logs a failure that is no error, because the next save tries again. */
static void mti_io_warning(mt_context *ctx, const char *path, const char *what, int error) {
    char text[MT_PATH_MAX + 128];
    snprintf(text, sizeof text, "%s: cannot %s: %s", path, what, strerror(error));
    mt_log(ctx, MT_LOG_WARNING, text);
}

#if defined(O_CLOEXEC)
#define MTI_CLOEXEC O_CLOEXEC
#elif defined(__O_CLOEXEC) /* -std=c99 hides O_CLOEXEC */
#define MTI_CLOEXEC __O_CLOEXEC
#else
#define MTI_CLOEXEC 0
#endif

/* With these flags, open returns an error instead of following a link. */
#if defined(O_NOFOLLOW) && defined(O_DIRECTORY)
#define MTI_NOFOLLOW O_NOFOLLOW
#define MTI_DIRECTORY O_DIRECTORY
#elif defined(__O_NOFOLLOW) && defined(__O_DIRECTORY)
#define MTI_NOFOLLOW __O_NOFOLLOW
#define MTI_DIRECTORY __O_DIRECTORY
#else
#error                                                                                                                 \
    "mt_parallel.h: open has no O_NOFOLLOW and O_DIRECTORY here, so links in a checkpoint directory would be followed"
#endif

/* Calls open again when a signal has interrupted it. Returns -1 and sets errno as open does. */
static int mti_open(const char *path, int flags) {
    int fd;
    do fd = open(path, flags | MTI_CLOEXEC, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Calls fsync again when a signal has interrupted it. Returns 0 or errno. */
static int mti_fsync(int fd) {
    int failed;
    do failed = fsync(fd) != 0;
    while (failed && errno == EINTR);
    return failed ? errno : 0;
}

/* Locks fd and returns 0 or errno. Tries for one second, because a process that was just killed keeps its lock until
   the system has freed its memory. */
static int mti_lock_wait(int fd) {
    struct timespec nap;
    int tries = 0, error = 0;
    nap.tv_sec = 0;
    nap.tv_nsec = 10000000;
    do {
        if (error == EWOULDBLOCK) nanosleep(&nap, NULL);
        error = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    } while (error == EINTR || (error == EWOULDBLOCK && ++tries < 100));
    return error;
}

/* Returns 1 when path is the file that is open as fd. */
static int mti_is_at(int fd, const char *path) {
    struct stat open_file, named;
    return fstat(fd, &open_file) == 0 && stat(path, &named) == 0 && open_file.st_dev == named.st_dev &&
           open_file.st_ino == named.st_ino;
}

/* Writes DIRECTORY/NAME to path. */
static mt_status mti_path(mt_context *ctx, const char *directory, const char *name, char *path, size_t bytes) {
    size_t n = strlen(directory), more = strlen(name);
    if (n + more + 2 > bytes)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%.200s.../%.200s: the path has more than %zu characters", directory, name,
                       bytes - 1);
    memcpy(path, directory, n);
    path[n] = '/';
    memcpy(path + n + 1, name, more + 1);
    return MT_SUCCESS;
}

static int mti_exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

/* A regular file that is open for reading. It is mapped only for the pointers that programs get. The library itself
   reads from fd, because a mapping of a truncated file raises SIGBUS. */
typedef struct mti_mapped {
    int fd;       /* -1: no file; data is memory that the caller owns */
    void *data;   /* NULL: not mapped, or an empty file */
    size_t bytes; /* size of the file when it was opened */
} mti_mapped;

static mt_status mti_mapped_file(mt_context *ctx, const char *path, int maps, mti_mapped *out) {
    struct stat info;
    void *data;
    if (fstat(out->fd, &info) != 0) return mti_io_error(ctx, path, "look at it", errno);
    if (!S_ISREG(info.st_mode)) return mt_fail(ctx, MT_ERR_IO, "%s: is not a regular file", path);
    out->bytes = (size_t)info.st_size;
    if (!maps || info.st_size == 0) return MT_SUCCESS;
    data = mmap(NULL, out->bytes, PROT_READ, MAP_PRIVATE, out->fd, 0);
    if (data == MAP_FAILED) return mti_io_error(ctx, path, "map it into memory", errno);
    out->data = data;
    return MT_SUCCESS;
}

static void mti_mapped_close(mti_mapped *map) {
    if (map->fd >= 0 && map->data) munmap(map->data, map->bytes);
    if (map->fd >= 0) close(map->fd);
    memset(map, 0, sizeof *map);
    map->fd = -1;
}

/* Takes fd, which open has returned, also after an error. */
static mt_status mti_mapped_take(mt_context *ctx, const char *path, int fd, int maps, mti_mapped *out) {
    mt_status status;
    memset(out, 0, sizeof *out);
    out->fd = fd;
    if (fd < 0) return mti_io_error(ctx, path, "open it", errno);
    status = mti_mapped_file(ctx, path, maps, out);
    if (status != MT_SUCCESS) mti_mapped_close(out);
    return status;
}

#define MTI_READ_FLAGS (O_RDONLY | O_NONBLOCK) /* opening a pipe must not wait for a writer */

/* Opens a file that the program has named. Links are followed. */
static mt_status mti_mapped_open(mt_context *ctx, const char *path, int maps, mti_mapped *out) {
    return mti_mapped_take(ctx, path, mti_open(path, MTI_READ_FLAGS), maps, out);
}

/* -- a folder that comes from elsewhere, such as a model that was downloaded or cloned --

   A link in it could lead to any file of the user, which this library would then read, and a save would copy. So a
   file of the folder must be in the folder. A link is followed only to a file beside it and, as in the cache of Hugging
   Face, from snapshots/REVISION/NAME to ../../blobs/HASH. Neither may be another link. */

/* As openat. A link is not followed: then it returns -1. */
static int mti_open_at(int at, const char *name, int flags) {
    int fd;
    do fd = openat(at, name, flags | MTI_NOFOLLOW | MTI_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Closes `at`, and keeps errno. */
static void mti_close_at(int at) {
    int error = errno;
    if (at >= 0) close(at);
    errno = error;
}

/* Opens the directory that has the last component of *name, which is then *name. The directories in *name must not be
   links or "..". Returns -1 and sets errno as open does. */
static int mti_folder_of(const char *directory, const char **name) {
    int at = mti_open(directory, O_RDONLY | MTI_DIRECTORY), next;
    const char *slash;
    char part[256];
    for (; at >= 0 && (slash = strchr(*name, '/')) != NULL; at = next, *name = slash + 1) {
        size_t n = (size_t)(slash - *name);
        if (n >= sizeof part) n = 0;
        memcpy(part, *name, n);
        part[n] = 0;
        errno = EINVAL;
        next = n == 0 || strcmp(part, "..") == 0 ? -1 : mti_open_at(at, part, O_RDONLY | MTI_DIRECTORY);
        mti_close_at(at);
    }
    return at;
}

/* Returns the place of HASH in ../../blobs/HASH, where more ../ may precede for a file in a subfolder of a snapshot; 0
   for other texts. */
static size_t mti_blob_of(const char *to) {
    size_t up = 0;
    while (strncmp(to + up, "../", 3) == 0) up += 3;
    if (up < 6 || strncmp(to + up, "blobs/", 6) != 0) return 0;
    up += 6;
    return strspn(to + up, "0123456789abcdef") == strlen(to + up) && strlen(to + up) >= 40 ? up : 0;
}

/* Opens what a link in the directory `at` leads to, if such a link is followed. Changes `to`, the text of the link. */
static int mti_open_link(int at, char *to) {
    size_t hash = mti_blob_of(to);
    int blobs, fd;
    errno = ELOOP;
    if (hash == 0) return strchr(to, '/') ? -1 : mti_open_at(at, to, MTI_READ_FLAGS);
    to[hash - 1] = 0;
    blobs = mti_open_at(at, to, O_RDONLY | MTI_DIRECTORY);
    fd = blobs < 0 ? -1 : mti_open_at(blobs, to + hash, MTI_READ_FLAGS);
    mti_close_at(blobs);
    return fd;
}

/* Opens DIRECTORY/NAME, whose path is `path`, by the rule above. The directory itself may be a link. */
static mt_status mti_folder_open(mt_context *ctx, const char *directory, const char *name, const char *path, int maps,
                                 mti_mapped *out) {
    char to[MT_PATH_MAX];
    ssize_t length = readlink(path, to, sizeof to - 1);
    int at = mti_folder_of(directory, &name), fd = -1;
    if (length >= 0) to[length] = 0;
    if (at >= 0) fd = length >= 0 ? mti_open_link(at, to) : mti_open_at(at, name, MTI_READ_FLAGS);
    mti_close_at(at);
    if (fd >= 0 || errno != ELOOP) return mti_mapped_take(ctx, path, fd, maps, out);
    return mt_fail(ctx, MT_ERR_IO,
                   "%s: is a link that leads out of its folder, which is not followed: put the file itself there",
                   path);
}

/* Returns 1 when there is such a file or link. */
static int mti_folder_has(const char *path) {
    char to[1];
    return readlink(path, to, sizeof to) >= 0 || errno == EINVAL; /* EINVAL: it is no link */
}

#define MTI_READ_MAX ((size_t)1 << 30) /* bytes in one call of pread; some systems allow no more */

/* Reads the bytes [at, at + bytes), which the file had when it was opened. pread moves no file position, so ranks may
   share fd. */
static mt_status mti_mapped_read(mt_context *ctx, const char *path, const mti_mapped *map, size_t at, size_t bytes,
                                 void *out) {
    size_t done = 0;
    ssize_t n = 1;
    if (map->fd < 0 && bytes > 0) memcpy(out, (const unsigned char *)map->data + at, bytes);
    if (map->fd < 0) return MT_SUCCESS;
    while (done < bytes && n != 0) {
        size_t rest = bytes - done;
        n = pread(map->fd, (unsigned char *)out + done, rest < MTI_READ_MAX ? rest : MTI_READ_MAX, (off_t)(at + done));
        if (n < 0 && errno != EINTR) return mti_io_error(ctx, path, "read it", errno);
        if (n > 0) done += (size_t)n;
    }
    if (done == bytes) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_IO,
                   "%s: wanted %zu bytes at byte %zu, got %zu: it had %zu bytes when it was opened, "
                   "and was truncated since",
                   path, bytes, at, done, map->bytes);
}

/* Reads a whole JSON file of a folder, of at most `most` bytes. path is DIRECTORY/NAME. The caller frees *text, also
   after an error. */
static mt_status mti_text_read(mt_context *ctx, const char *directory, const char *name, const char *path, size_t most,
                               void **text, size_t *bytes) {
    mti_mapped file;
    mt_status status = MT_SUCCESS;
    *text = NULL;
    MT_TRY(mti_folder_open(ctx, directory, name, path, 0, &file));
    *bytes = file.bytes;
    if (file.bytes > most)
        status = mt_fail(ctx, MT_ERR_DATA, "%s: has %zu bytes, must be at most %zu", path, file.bytes, most);
    if (status == MT_SUCCESS) status = mti_host_new(ctx, file.bytes + 1, text);
    if (status == MT_SUCCESS) status = mti_mapped_read(ctx, path, &file, 0, file.bytes, *text);
    mti_mapped_close(&file);
    return status;
}

static uint64_t mti_load_word(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

#define MTI_CHECKSUM_BASIS 14695981039346656037u

/* Adds a word to a checksum. A multiplication moves changes only to higher bits, so two changes in the highest bit
   would cancel. The xor with h >> 32 moves them down again. */
static uint64_t mti_checksum_word(uint64_t h, const unsigned char *p) {
    h = (h ^ mti_load_word(p)) * 1099511628211u;
    return h ^ h >> 32;
}

/* Continues the checksum h over more bytes. It is FNV-1a with words of 8 bytes instead of single bytes; the last word
   is padded with zeros. Each step is one-to-one in h and in the word, so a file in which one word has changed always
   has another checksum. */
static uint64_t mti_checksum(uint64_t h, const unsigned char *p, size_t bytes) {
    unsigned char rest[8] = {0};
    for (; bytes >= 8; p += 8, bytes -= 8) h = mti_checksum_word(h, p);
    if (bytes == 0) return h;
    memcpy(rest, p, bytes);
    return mti_checksum_word(h, rest);
}

/* The checksum is the first entry of a file's metadata, at a fixed place. It is computed with the digits 0 in its
   place. */
#define MTI_CHECKSUM_BEFORE "{\"__metadata__\":{\"checksum\":\""
#define MTI_CHECKSUM_DIGITS 16
#define MTI_CHECKSUM_AT (8 + sizeof MTI_CHECKSUM_BEFORE - 1)
#define MTI_CHECKSUM_FIRST 64 /* bytes at the beginning of a file that have the whole entry; a multiple of 8 */

/* A file that is written from front to back. */
typedef struct mti_file {
    int fd;            /* -1: not open */
    int error;         /* errno of the first call that failed; nothing is written after it */
    uint64_t checksum; /* of the bytes that were flushed from the buffer */
    size_t used;
    char path[MT_PATH_MAX];
    unsigned char buffer[1 << 16];
} mti_file;

static void mti_file_write(mti_file *f, const unsigned char *data, size_t bytes) {
    while (bytes > 0 && f->error == 0) {
        ssize_t done = write(f->fd, data, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) {
            f->error = done < 0 ? errno : ENOSPC;
            return;
        }
        data += done;
        bytes -= (size_t)done;
    }
}

static void mti_file_flush(mti_file *f) {
    f->checksum = mti_checksum(f->checksum, f->buffer, f->used);
    mti_file_write(f, f->buffer, f->used);
    f->used = 0;
}

/* Appends bytes to the buffer, and flushes it when it is full. */
static void mti_file_put(mti_file *f, const void *data, size_t bytes) {
    const unsigned char *from = (const unsigned char *)data;
    while (bytes > 0) {
        size_t left = sizeof f->buffer - f->used, n = bytes < left ? bytes : left;
        memcpy(f->buffer + f->used, from, n);
        f->used += n;
        from += n;
        bytes -= n;
        if (f->used == sizeof f->buffer) mti_file_flush(f);
    }
}

static void mti_file_text(mti_file *f, const char *text) { mti_file_put(f, text, strlen(text)); }

static void mti_file_whole(mti_file *f, int64_t x) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)x);
    mti_file_text(f, text);
}

/* Writes a character of a JSON string as text. */
static const char *mti_json_escaped(char character, char escaped[8]) {
    unsigned char c = (unsigned char)character;
    if (c == '"' || c == '\\') snprintf(escaped, 8, "\\%c", c);
    else if (c < 0x20) snprintf(escaped, 8, "\\u%04x", c);
    else snprintf(escaped, 8, "%c", c);
    return escaped;
}

/* Writes a JSON string. */
static void mti_file_string(mti_file *f, const char *text) {
    char escaped[8];
    mti_file_text(f, "\"");
    for (; *text; text++) mti_file_text(f, mti_json_escaped(*text, escaped));
    mti_file_text(f, "\"");
}

static void mti_file_reset(mti_file *f) {
    f->fd = -1;
    f->error = 0;
    f->used = 0;
    f->checksum = MTI_CHECKSUM_BASIS;
}

/* Begins to write a new file. Neither the directory nor the file may be a link, and the file must not exist. */
static mt_status mti_file_begin(mt_context *ctx, mti_file *f, const char *directory, const char *name) {
    int at, error;
    mti_file_reset(f);
    MT_TRY(mti_path(ctx, directory, name, f->path, sizeof f->path));
    at = mti_open(directory, O_RDONLY | MTI_DIRECTORY | MTI_NOFOLLOW);
    if (at < 0) return mti_io_error(ctx, directory, "open the directory", errno);
    do f->fd = openat(at, name, O_WRONLY | O_CREAT | O_EXCL | MTI_NOFOLLOW | MTI_CLOEXEC, 0666);
    while (f->fd < 0 && errno == EINTR);
    error = errno;
    close(at);
    return f->fd < 0 ? mti_io_error(ctx, f->path, "create it", error) : MT_SUCCESS;
}

/* Writes the checksum to its place. */
static void mti_file_seal(mti_file *f) {
    char digits[MTI_CHECKSUM_DIGITS + 1];
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)f->checksum);
    if (f->error == 0 && lseek(f->fd, (off_t)MTI_CHECKSUM_AT, SEEK_SET) < 0) f->error = errno;
    mti_file_write(f, (const unsigned char *)digits, MTI_CHECKSUM_DIGITS);
}

/* Writes the rest of the file and synchronises it with the disk. sealed = 1: writes the checksum. */
static void mti_file_sync(mti_file *f, int sealed) {
    mti_file_flush(f);
    if (sealed) mti_file_seal(f);
    if (f->error == 0) f->error = mti_fsync(f->fd);
}

/* The same, and closes the file. */
static mt_status mti_file_end(mt_context *ctx, mti_file *f, int sealed) {
    mti_file_sync(f, sealed);
    if (close(f->fd) != 0 && errno != EINTR && f->error == 0)
        f->error = errno; /* EINTR: the file is closed, and fsync has succeeded */
    f->fd = -1;
    return f->error ? mti_io_error(ctx, f->path, "write it", f->error) : MT_SUCCESS;
}

/* Synchronises a directory, that is the names in it, with the disk. */
static mt_status mti_directory_sync(mt_context *ctx, const char *path) {
    int fd = mti_open(path, O_RDONLY), error = fd < 0 ? errno : mti_fsync(fd);
    if (fd >= 0) close(fd);
    if (fd >= 0 && error == EINVAL) return MT_SUCCESS; /* this file system does not synchronise directories */
    return error ? mti_io_error(ctx, path, "sync the directory", error) : MT_SUCCESS;
}

/* Synchronises the directory that path is in. */
static mt_status mti_parent_sync(mt_context *ctx, const char *path) {
    char parent[MT_PATH_MAX];
    char *slash;
    snprintf(parent, sizeof parent, "%s", path);
    slash = strrchr(parent, '/');
    if (slash) slash[slash == parent] = 0;
    return mti_directory_sync(ctx, slash ? parent : ".");
}

/* Creates a directory and synchronises its parent. */
static mt_status mti_directory_make(mt_context *ctx, const char *path) {
    if (mkdir(path, 0777) != 0) return mti_io_error(ctx, path, "create the directory", errno);
    return mti_parent_sync(ctx, path);
}

/* Removes the files in a directory and then the directory. This library creates no subdirectories: if there is one, it
   stays, and so does the directory. Links in the directory, or in its place, are removed, but not their targets.
   Failures are logged. */
static void mti_directory_remove(mt_context *ctx, const char *path) {
    char file[MT_PATH_MAX];
    struct dirent *entry;
    int fd = mti_open(path, O_RDONLY | MTI_DIRECTORY | MTI_NOFOLLOW), error = errno;
    DIR *d;
    if (fd < 0 && unlink(path) == 0) return; /* path was a file or a link */
    if (fd < 0) {
        mti_io_warning(ctx, path, "list the directory", error);
        return;
    }
    d = fdopendir(fd);
    if (!d) {
        mti_io_warning(ctx, path, "list the directory", errno);
        close(fd);
        return;
    }
    while ((entry = readdir(d)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(fd, entry->d_name, 0) == 0) continue;
        error = errno;
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        mti_io_warning(ctx, file, "remove it", error);
    }
    closedir(d);
    if (rmdir(path) != 0) mti_io_warning(ctx, path, "remove the directory", errno);
}
