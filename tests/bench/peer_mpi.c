/* peer_mpi - measures the all-reduce between processes: that of MPI, and that of megatron.h over MPI.

   mpicc -O3 -march=native -I. tests/bench/peer_mpi.c -o peer_mpi -lm -lpthread && mpirun -n 2 --bind-to core ./peer_mpi

   Prints lines name,median,min,max,unit and, for megatron.h, the median of the ratios of its time to that of MPI within
   rounds. A round takes one sample of each. A sample is the time of the slowest rank; the ranks start it together.
   Buffers are allocated and touched once. The figures of MPI also compare with the rows "collectives" of bench.c. */

#define MT_USE_MPI
#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"

enum { SAMPLES = 200, WARM_UP = 20 };

typedef struct bench {
    mt_context *ctx;
    mt_comm *world;
    float *x;
    int rank, failed;
} bench;

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns the microseconds of one all-reduce on the slowest rank: ours, or that of MPI. */
static double sample(bench *b, size_t count, int ours) {
    double start, mine, slowest;
    MPI_Barrier(MPI_COMM_WORLD);
    start = MPI_Wtime();
    if (!ours) MPI_Allreduce(MPI_IN_PLACE, b->x, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (mt_all_reduce(b->ctx, b->world, b->x, b->x, count, MT_F32, MT_SUM) != MT_SUCCESS) b->failed = 1;
    mine = MPI_Wtime() - start;
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return 1e6 * slowest;
}

static void print(const char *who, const char *size, double *us) {
    qsort(us, SAMPLES, sizeof *us, ascending);
    printf("%s_all_reduce_%s,%.2f,%.2f,%.2f,us", who, size, us[SAMPLES / 2], us[0], us[SAMPLES - 1]);
}

static void time_all_reduce(bench *b, const char *size, size_t count) {
    static double mpi[SAMPLES], ours[SAMPLES], ratio[SAMPLES];
    for (int i = -WARM_UP; i < SAMPLES; i++) {
        double theirs = sample(b, count, 0), mine = sample(b, count, 1);
        if (i < 0) continue;
        mpi[i] = theirs;
        ours[i] = mine;
        ratio[i] = mine / theirs;
    }
    if (b->rank != 0) return;
    print("mpi", size, mpi);
    printf("\n");
    print("megatron", size, ours);
    qsort(ratio, SAMPLES, sizeof *ratio, ascending);
    printf(",%.2f\n", ratio[SAMPLES / 2]);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        size_t count;
    } sizes[] = {{"64b", 16}, {"4kb", 1 << 10}, {"64kb", 1 << 14}, {"3mb", 3 << 18}};
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Comm theirs = MPI_COMM_WORLD;
    mt_context_desc small = {.arena_bytes = 4096};
    bench b = {.x = calloc(3 << 18, sizeof *b.x)};
    int length;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(theirs, &b.rank);
    MPI_Get_library_version(library, &length);
    if (b.rank == 0) printf("# %.40s\n", library);
    b.failed = !b.x || mt_comm_create_mpi(&theirs, 60, &b.world) != MT_SUCCESS ||
               mt_context_create(b.world, &small, &b.ctx) != MT_SUCCESS;
    for (size_t i = 0; !b.failed && i < sizeof sizes / sizeof *sizes; i++)
        time_all_reduce(&b, sizes[i].name, sizes[i].count);
    if (b.failed) fprintf(stderr, "rank %d: %s\n", b.rank, mt_comm_last_error(b.world));
    mt_context_destroy(b.ctx);
    mt_comm_destroy(b.world);
    free(b.x);
    if (!b.failed) MPI_Finalize();
    return b.failed;
}
