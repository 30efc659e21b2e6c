/* kill_at.c - ends a process at a chosen call, so that no clock decides where a run is killed. The script that tests
   the program links it with

       -Wl,--wrap=write,--wrap=rename,--wrap=fsync,--wrap=openat,--wrap=unlinkat,--wrap=mkdir

   and, for ranks that are processes over MPI, -DMT_USE_MPI and -Wl,--wrap=MPI_Isend. Environment:

       MT_KILL_SAVES=M      the calls are counted after M checkpoints have got their final names (0)
       MT_KILL_CALL=N       the process kills itself at the Nth of these calls; a write has then written the half
       MT_KILL_COUNT=FILE   at its end, the process writes the number of its calls to the file

   Between two calls nothing on the disk changes, and no message is sent. */

#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(MT_USE_MPI)
#include <mpi.h>
#endif

static long saves, calls;

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

/* Returns 1 for the last call of the process. */
static int is_last(void) {
    if (__atomic_load_n(&saves, __ATOMIC_ACQUIRE) < number("MT_KILL_SAVES")) return 0;
    return __atomic_add_fetch(&calls, 1, __ATOMIC_ACQ_REL) == number("MT_KILL_CALL");
}

static void call(void) {
    if (is_last()) raise(SIGKILL);
}

__attribute__((destructor)) static void write_count(void) {
    const char *name = getenv("MT_KILL_COUNT");
    FILE *file = name ? fopen(name, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld\n", calls);
    fclose(file);
}

ssize_t __real_write(int fd, const void *data, size_t bytes);
int __real_rename(const char *from, const char *to);
int __real_fsync(int fd);
int __real_openat(int directory, const char *name, int flags, ...);
int __real_unlinkat(int directory, const char *name, int flags);
int __real_mkdir(const char *path, mode_t mode);

ssize_t __wrap_write(int fd, const void *data, size_t bytes);
ssize_t __wrap_write(int fd, const void *data, size_t bytes) {
    struct stat s; /* a pipe or a socket does not count */
    if (fstat(fd, &s) == 0 && S_ISREG(s.st_mode) && is_last() && __real_write(fd, data, bytes / 2) >= 0) raise(SIGKILL);
    return __real_write(fd, data, bytes);
}

int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) {
    const char *name = strrchr(to, '/');
    int failed;
    call();
    failed = __real_rename(from, to);
    if (!failed && strncmp(name ? name + 1 : to, "step-", 5) == 0) __atomic_add_fetch(&saves, 1, __ATOMIC_ACQ_REL);
    return failed;
}

int __wrap_fsync(int fd);
int __wrap_fsync(int fd) {
    call();
    return __real_fsync(fd);
}

int __wrap_openat(int directory, const char *name, int flags, ...);
int __wrap_openat(int directory, const char *name, int flags, ...) {
    va_list more;
    mode_t mode = 0;
    va_start(more, flags);
    if (flags & O_CREAT) mode = (mode_t)va_arg(more, int);
    va_end(more);
    call();
    return __real_openat(directory, name, flags, mode);
}

int __wrap_unlinkat(int directory, const char *name, int flags);
int __wrap_unlinkat(int directory, const char *name, int flags) {
    call();
    return __real_unlinkat(directory, name, flags);
}

int __wrap_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode) {
    call();
    return __real_mkdir(path, mode);
}

#if defined(MT_USE_MPI)
int __real_MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *out);
int __wrap_MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *out);
int __wrap_MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *out) {
    call();
    return __real_MPI_Isend(data, count, type, to, tag, comm, out);
}
#endif
