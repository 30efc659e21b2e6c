/* peer_mpi - all-reduce by MPI between processes, to compare with the "collectives" rows of bench.c.

   mpicc -O3 tests/bench/peer_mpi.c -o peer_mpi && mpirun -n 2 --bind-to core ./peer_mpi

   Prints name,median,min,max,unit. Buffers are allocated and touched once; the ranks start each sample together. */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 200, WARM_UP = 20 };

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void time_all_reduce(const char *name, float *x, int count, int rank) {
    static double us[SAMPLES];
    for (int i = -WARM_UP; i < SAMPLES; i++) {
        double start, slowest, mine;
        MPI_Barrier(MPI_COMM_WORLD);
        start = MPI_Wtime();
        MPI_Allreduce(MPI_IN_PLACE, x, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        mine = MPI_Wtime() - start;
        MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (i >= 0) us[i] = 1e6 * slowest;
    }
    qsort(us, SAMPLES, sizeof *us, ascending);
    if (rank == 0) printf("%s,%.2f,%.2f,%.2f,us\n", name, us[SAMPLES / 2], us[0], us[SAMPLES - 1]);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        int count;
    } sizes[] = {{"mpi_all_reduce_4kb", 1 << 10}, {"mpi_all_reduce_64kb", 1 << 14}, {"mpi_all_reduce_3mb", 3 << 18}};
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    int rank, length;
    float *x = calloc(3 << 18, sizeof *x);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Get_library_version(library, &length);
    if (rank == 0) printf("# %.40s\n", library);
    for (size_t i = 0; x && i < sizeof sizes / sizeof *sizes; i++) time_all_reduce(sizes[i].name, x, sizes[i].count, rank);
    free(x);
    return MPI_Finalize();
}
