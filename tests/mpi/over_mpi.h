/* over_mpi.h - runs a test program that was written for ranks as threads with ranks as processes. mt_test.h includes it
   when MT_TEST_OVER_MPI is defined. Every process runs the whole program, under an mpirun with at least as many ranks
   as the program launches. Only functions started by test_run are distributed over the processes. Afterwards every
   process has the results of all of them. */

#ifndef OVER_MPI_H
#define OVER_MPI_H

#include <mpi.h>

#define OVER_MPI_TEXT 1200

static void over_mpi_keep(void *user, mt_log_level level, const char *message) {
    (void)level;
    snprintf((char *)user, OVER_MPI_TEXT, "%s", message);
}

/* Merges the changes that each rank has made in its copy of `user`, as if they shared one copy. */
static void over_mpi_merge(char *user, size_t bytes, const char *before, int ranks) {
    char *theirs = (char *)malloc(bytes + 1);
    for (int r = 0; r < ranks; r++) {
        if (bytes) memcpy(theirs, user, bytes);
        MPI_Bcast(theirs, (int)bytes, MPI_BYTE, r, MPI_COMM_WORLD);
        for (size_t i = 0; i < bytes; i++)
            if (theirs[i] != before[i]) user[i] = theirs[i];
    }
    free(theirs);
}

/* Logs the messages of all ranks in the order of mt_launch: ranks that failed only because of a peer come last. */
static void over_mpi_say(const mt_launch_desc *desc, const char *line, int me) {
    char text[OVER_MPI_TEXT];
    for (int secondary = 0; secondary < 2; secondary++) {
        for (int r = 0; r < desc->ranks; r++) {
            memcpy(text, line, sizeof text);
            MPI_Bcast(text, (int)sizeof text, MPI_BYTE, r, MPI_COMM_WORLD);
            if (!text[0] || (strstr(text, ": MT_ERR_PEER: ") == strchr(text, ':')) != secondary) continue;
            if (desc->logger.log || me == 0) mti_launch_say(desc, "%s", text);
        }
    }
}

static mt_status test_run(const mt_launch_desc *desc, mt_rank_function f, void *user, size_t bytes) {
    mt_launch_desc d = mti_launch_defaults(desc);
    char *before = (char *)malloc(bytes + 1), line[OVER_MPI_TEXT] = "";
    int me, size, closed;
    MPI_Comm sub;
    mt_status status = mti_launch_check(&d, f);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (status == MT_SUCCESS && d.ranks > size) fail_msg("%d ranks, started with %d", d.ranks, size);
    if (status == MT_SUCCESS) {
        MPI_Comm_split(MPI_COMM_WORLD, me < d.ranks, me, &sub);
        memcpy(before, user ? user : "", bytes);
        d.logger.log = over_mpi_keep;
        d.logger.user = line;
        if (me < d.ranks) status = mti_mpi_run(&d, sub, f, user, &closed);
        over_mpi_merge((char *)user, bytes, before, d.ranks);
        d.logger = desc->logger;
        over_mpi_say(&d, line, me);
        MPI_Bcast(&status, (int)sizeof status, MPI_BYTE, 0, MPI_COMM_WORLD);
        MPI_Comm_free(&sub);
    }
    free(before);
    return status;
}

/* The main of each process calls the program's own main. Only rank 0 prints which tests it runs. */
int test_main(void);
int main(void) {
    int me, code, worst;
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    if (me > 0 && !freopen("/dev/null", "w", stdout)) return 2;
    code = test_main();
    MPI_Allreduce(&code, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    MPI_Finalize();
    return worst;
}
#define main test_main

#endif /* OVER_MPI_H */
