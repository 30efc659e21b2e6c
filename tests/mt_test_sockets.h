/* mt_test_sockets.h - a transport as a program would write one: a socket pair between each two ranks, which are threads
   or forked processes. Include it after <sys/socket.h> and mt_comm.h. */

#ifndef MT_TEST_SOCKETS_H
#define MT_TEST_SOCKETS_H

#define SOCKETS_RANKS 8

/* The sockets of one rank. fd [peer] is -1 for the rank itself, and after sockets_close. */
typedef struct sockets {
    int rank, ranks;
    int fd[SOCKETS_RANKS];
    size_t most;       /* call n moves at most 1 + n % most bytes; 0: any number */
    long calls, fails; /* call number `fails` returns `why`; 0: none does */
    mt_status why;
} sockets;

/* Returns `why` when this is the call that fails. */
static inline mt_status sockets_call(sockets *s, size_t *bytes) {
    size_t limit = s->most ? 1 + (size_t)s->calls % s->most : *bytes;
    if (*bytes > limit) *bytes = limit;
    return ++s->calls == s->fails ? s->why : MT_SUCCESS;
}

static inline mt_status sockets_send(void *state, int peer, const void *data, size_t bytes, size_t *moved) {
    sockets *s = (sockets *)state;
    ssize_t n;
    MT_TRY(sockets_call(s, &bytes));
    n = send(s->fd[peer], data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN || errno == EINTR ? MT_SUCCESS : MT_ERR_PEER;
    *moved = (size_t)n;
    return MT_SUCCESS;
}

static inline mt_status sockets_recv(void *state, int peer, void *data, size_t bytes, size_t *moved) {
    sockets *s = (sockets *)state;
    ssize_t n;
    MT_TRY(sockets_call(s, &bytes));
    n = recv(s->fd[peer], data, bytes, MSG_DONTWAIT);
    if (n == 0) return MT_ERR_PEER;
    if (n < 0) return errno == EAGAIN || errno == EINTR ? MT_SUCCESS : MT_ERR_PEER;
    *moved = (size_t)n;
    return MT_SUCCESS;
}

static const mt_transport sockets_table = {"sockets", sockets_send, sockets_recv};

static inline void sockets_close(sockets *s) {
    for (int r = 0; r < s->ranks; r++) {
        if (s->fd[r] >= 0) close(s->fd[r]);
        s->fd[r] = -1;
    }
}

/* Connects `ranks` ranks: s [ranks]. Returns 0 when the system gives no sockets. */
static inline int sockets_open(sockets *s, int ranks) {
    memset(s, 0, (size_t)ranks * sizeof *s);
    for (int r = 0; r < ranks; r++) {
        s[r].rank = r;
        s[r].ranks = ranks;
        for (int peer = 0; peer < SOCKETS_RANKS; peer++) s[r].fd[peer] = -1;
    }
    for (int r = 0; r < ranks; r++) {
        for (int peer = 0; peer < r; peer++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return 0;
            s[r].fd[peer] = pair[0];
            s[peer].fd[r] = pair[1];
        }
    }
    return 1;
}

#endif /* MT_TEST_SOCKETS_H */
