/* test_replicas.c over MPI: see over_mpi.h */
#define MT_USE_MPI
#define MT_TEST_OVER_MPI
#include "../test_replicas.c"
