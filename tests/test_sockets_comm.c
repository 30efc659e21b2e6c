/* test_comm.c over a transport of the tests: see mt_test_over_sockets.h */
#include <errno.h>
#include <sys/socket.h>
#define MT_TEST_OVER_SOCKETS
#include "test_comm.c"
