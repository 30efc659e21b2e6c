/* mt_test_port.h - a port that no other process gets. C and C++. tests/processes.sh includes it, too. */

#ifndef MT_TEST_PORT_H
#define MT_TEST_PORT_H

#include <netinet/in.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Returns the port, and with 0 one that the system chooses; -1 when it is in use. Until *held is closed, the system
   gives the port to nobody who does not ask for it. NCCL, which asks for it, can listen: both have SO_REUSEADDR. */
static inline int test_take_port(int port, int *held) {
    struct sockaddr_in a;
    socklen_t bytes = sizeof a;
    const int yes = 1;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons((uint16_t)port);
    *held = socket(AF_INET, SOCK_STREAM, 0);
    if (*held >= 0 && setsockopt(*held, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
        bind(*held, (struct sockaddr *)&a, sizeof a) == 0 && getsockname(*held, (struct sockaddr *)&a, &bytes) == 0)
        return ntohs(a.sin_port);
    close(*held);
    *held = -1;
    return -1;
}

#endif
