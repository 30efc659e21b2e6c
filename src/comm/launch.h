/* ---- launch: ranks as threads of this process -------------------------------------------------------------------- */

#pragma once
#include "context.h"

/* A zero-initialised desc means: one rank, MT_TIMEOUT_DEFAULT, errors to stderr. */
typedef struct mt_launch_desc {
    int ranks; /* 1 to 1024; 0: 1, or in mt_world_from_env as many as the launcher has started */
    /* advanced */
    /* 1: threads are not pinned; 0: on Linux, with two or more ranks and enough cores, the thread of each rank is
       pinned to cores of its own */
    int no_pinning;
    /* cores for each pinned rank; set it to mt_context_desc.threads. Ignored with no_pinning. 0: 1 */
    int cores_per_rank;
    double timeout_s; /* timeout of world and of all groups split from it, in seconds; 0: MT_TIMEOUT_DEFAULT */
    mt_logger logger; /* gets one message per failed rank, "rank 1 of 4: MT_ERR_SHAPE: ..."; {NULL}: to stderr */
    /* called with the `user` of mt_launch when a rank's thread does not return, see mt_launch; NULL: never */
    void (*stuck)(void *user);
} mt_launch_desc;

/* The function that each rank runs. The library destroys world after the function has returned. */
typedef mt_status (*mt_rank_function)(mt_comm *world, void *user);

/* Runs rank_main once per rank, each on its own thread, and waits for all of them. A single rank runs on the caller's
   thread. desc may be NULL (all defaults). When a rank returns while others wait for it, they get MT_ERR_PEER. Returns
   MT_SUCCESS when no rank failed. Otherwise returns the status of the lowest rank that failed with an error other than
   MT_ERR_PEER, or MT_ERR_PEER when no rank failed with another error. The logger gets the message of each rank that
   failed; an error that several ranks have is reported once, with their number. Errors of mt_launch itself:
   MT_ERR_ARGUMENT (rank_main is NULL, a value of desc is out of range), MT_ERR_MEMORY, MT_ERR_SYSTEM (no thread for a
   rank).
   mt_launch cannot end a thread that does not return. When one rank has failed, and another rank has not returned
   timeout_s later (at least 5 s), mt_launch calls desc->stuck, which should end the process with _exit. If stuck
   returns, mt_launch goes on waiting.
   A C++ exception that leaves rank_main ends the program by std::terminate. With a single rank it reaches the caller of
   mt_launch instead. Callbacks (logger, allocator, stuck and those of the other headers) must not throw or longjmp. A
   rank whose thread is cancelled counts as failed with MT_ERR_SYSTEM. See docs/many-ranks.md, "When a thread ends
   early". */
MT_API mt_status mt_launch(const mt_launch_desc *desc, mt_rank_function rank_main, void *user);

/* ---- launch: ranks as processes that a launcher has started ------------------------------------------------------ */

/* Runs rank_main once, on the calling thread, as one rank of a program that torchrun, Open MPI, MPICH or Slurm has
   started once per rank. The rank and the number of ranks come from the launcher's environment variables; when there
   are none, this function calls mt_launch. See docs/many-ranks.md, "Launchers". desc->ranks is 0 or the number of ranks
   that the launcher must have started.

   On GPUs, each rank passes world to mt_comm_create_for and uses the communicator that it gets. On CPUs, build with
   MT_USE_MPI and start with mpirun or srun: world then has all collectives. Without MPI, a world of several processes
   only has a rank and a size: its collectives and mt_comm_split return MT_ERR_UNSUPPORTED.

   With MT_USE_MPI the ranks are those of MPI_COMM_WORLD. When the program has called MPI_Init_thread, it also calls
   MPI_Finalize. Otherwise this function calls both, unless a rank is lost, and the program can call it only once.

   With MT_USE_NCCL this function may set the environment variable NCCL_COMM_ID: call it before other threads read the
   environment. Returns the rank's status; over MPI, the status of the whole job, chosen as in mt_launch.
   Errors: MT_ERR_ARGUMENT (a variable of the launcher is missing, is no number, or contradicts another variable or
   desc->ranks; the message to desc->logger names the variables and their values), and those of mt_launch and
   mt_comm_create_mpi. */
MT_API mt_status mt_world_from_env(const mt_launch_desc *desc, mt_rank_function rank_main, void *user);
