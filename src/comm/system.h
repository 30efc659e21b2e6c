/* ---- what the implementation needs of the system, of CUDA, NCCL and MPI ------------------------------------------ */

#pragma once
#include "status.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#if (defined(__F16C__) || defined(__AVX512BF16__)) && defined(__GNUC__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#if defined(MT_USE_NVTX)
#include <nvtx3/nvToolsExt.h>
#endif

/* nvcc compiles .cu files; MT_CUDA_ENGINE is defined by the tests, which run CUDA code on a CPU. */
#if defined(__CUDACC__) || defined(MT_CUDA_ENGINE)
#define MT_HAS_CUDA 1
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#define MT_HAS_CUDA 0
#endif

#if defined(MT_USE_NCCL)
#if !MT_HAS_CUDA
#error "MT_USE_NCCL: NCCL works between GPUs; compile the implementation of megatron.h with nvcc, as a .cu file"
#endif
#include <nccl.h>
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)
#error "MT_USE_NCCL needs NCCL 2.19 or later"
#endif
#define MTI_NCCL 1
#else
#define MTI_NCCL 0
#endif

/* Whether the comparison of calls over TCP is built. Tests of it define this macro: it needs neither NCCL nor a GPU. */
#if !defined(MTI_COMPARES)
#define MTI_COMPARES MTI_NCCL
#endif
#if MTI_COMPARES
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#endif

#if defined(MT_USE_MPI)
/* Leaves out MPI's old C++ bindings, which need a library of their own. */
#if !defined(OMPI_SKIP_MPICXX) && !defined(MPICH_SKIP_MPICXX)
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#undef OMPI_SKIP_MPICXX
#undef MPICH_SKIP_MPICXX
#else
#include <mpi.h>
#endif
#if MPI_VERSION < 3
#error "MT_USE_MPI needs MPI 3.0 or later"
#endif
#define MTI_MPI 1
#else
#define MTI_MPI 0
#endif

/* A strict -std=c99 hides these functions of POSIX and Linux; C++ does not. */
#if !defined(__cplusplus) && !defined(_DEFAULT_SOURCE) && !defined(_GNU_SOURCE)
int posix_memalign(void **ptr, size_t alignment, size_t bytes);
int nanosleep(const struct timespec *time, struct timespec *left);
#if defined(__linux__)
long syscall(long number, ...);
#endif
#endif

/* On macOS and with a strict -std=c99, pthread_cond_timedwait cannot use the monotonic clock. */
#if defined(_POSIX_C_SOURCE) && _POSIX_C_SOURCE >= 200112L && defined(CLOCK_MONOTONIC) && !defined(__APPLE__)
#define MTI_MONOTONIC 1
#else
#define MTI_MONOTONIC 0
#endif

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "megatron.h needs infinities, NaN and the order of additions: compile its implementation without -ffast-math, \
in a file of its own: cc -O3 -march=native -fno-fast-math -c megatron.c; link without -ffast-math, too"
#endif

/* Whether this process was forked from the one that has created something. It has copies of that process's memory, but
   not its threads, whose locks stay as they were, and it shares the files and connections. */
static int mti_is_forked(pid_t process) { return process != getpid(); }

static void *mti_default_alloc(void *user, size_t bytes, size_t alignment) {
    void *ptr = NULL;
    (void)user;
    return posix_memalign(&ptr, alignment, bytes) == 0 ? ptr : NULL;
}

static void mti_default_free(void *user, void *ptr, size_t bytes) {
    (void)user;
    (void)bytes;
    free(ptr);
}

/* MT_RANGE returns the status of `call`. The NVTX range ends after the call, also when the call fails. */
#if defined(MT_USE_NVTX)
static mt_status mti_range_end(mt_status status) {
    nvtxRangePop();
    return status;
}
#define MT_RANGE(name, call) (nvtxRangePushA(name), mti_range_end(call))
#else
#define MT_RANGE(name, call) (call)
#endif
