/* ---- what files need of the system ------------------------------------------------------------------------------- */

#pragma once
#include "../comm/types.h"

#include <dirent.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* With -std=c99 the system headers do not declare these functions. glibc defines __USE_MISC when it does declare them.
   _GNU_SOURCE is no test for this, because OpenBLAS's header may define it after the system headers were read. */
#if !defined(__cplusplus) && !defined(__USE_MISC)
int fsync(int fd);
ssize_t pread(int fd, void *data, size_t bytes, off_t at);
int openat(int directory, const char *name, int flags, ...);
int unlinkat(int directory, const char *name, int flags);
DIR *fdopendir(int fd);
ssize_t readlink(const char *path, char *to, size_t bytes);
#endif
