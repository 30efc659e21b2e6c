/* mt_test_over_sockets.h - runs a test program that was written for ranks as threads over a transport of the test:
   mt_test_sockets.h. mt_test.h includes it when MT_TEST_OVER_SOCKETS is defined. The ranks are threads, but communicate
   only through the sockets. */

#ifndef MT_TEST_OVER_SOCKETS_H
#define MT_TEST_OVER_SOCKETS_H

#include "mt_test_sockets.h"

typedef struct over_sockets {
    sockets ends[SOCKETS_RANKS];
    mti_rank ranks[SOCKETS_RANKS];
    mt_launch_desc desc;
    mt_rank_function run;
    void *user;
} over_sockets;

/* One rank, as mti_mpi_run runs a process. */
static mt_status over_sockets_rank(mt_comm *threads, void *user) {
    over_sockets *all = (over_sockets *)user;
    int rank = mt_comm_rank(threads);
    mti_rank *mine = &all->ranks[rank];
    mti_port *port;
    all->ends[rank].most = rank == 0 ? 61 : 1000 * (size_t)rank;
    MT_TRY(mt_comm_create_transport(&sockets_table, &all->ends[rank], all->desc.ranks, rank, TEST_NEVER_OVER,
                                    &mine->world));
    port = mine->world->link ? mine->world->link->port : NULL;
    if (port && all->desc.timeout_s > 0) port->timeout = mine->world->group->timeout = all->desc.timeout_s;
    if (port) port->references++;
    mine->world->owner = mine;
    mine->rank = rank;
    mine->run = all->run;
    mine->user = all->user;
    mti_rank_run(mine);
    if (port) {
        mti_link_destroy(mine->world);
        (port->wire->end)(port, mti_link_close(port, mine->status));
    }
    return MT_SUCCESS;
}

static mt_status test_run(const mt_launch_desc *desc, mt_rank_function f, void *user, size_t bytes) {
    over_sockets *all = (over_sockets *)calloc(1, sizeof *all);
    mt_launch_desc threads;
    mt_status status;
    (void)bytes;
    memset(&threads, 0, sizeof threads);
    if (!all) return MT_ERR_MEMORY;
    all->desc = mti_launch_defaults(desc);
    all->run = f;
    all->user = user;
    if (all->desc.ranks == 0) all->desc.ranks = 1;
    status = mti_launch_check(&all->desc, f);
    if (status == MT_SUCCESS && (all->desc.ranks > SOCKETS_RANKS || !sockets_open(all->ends, all->desc.ranks)))
        fail_msg("%d ranks have no sockets", all->desc.ranks);
    threads.ranks = all->desc.ranks;
    threads.no_pinning = 1;
    if (status == MT_SUCCESS) status = mt_launch(&threads, over_sockets_rank, all);
    if (status == MT_SUCCESS) status = mti_launch_report(&all->desc, all->ranks, all->desc.ranks);
    for (int r = 0; r < SOCKETS_RANKS; r++) {
        sockets_close(&all->ends[r]);
        if (all->ranks[r].world) mti_comm_free(all->ranks[r].world);
    }
    free(all);
    return status;
}

#endif /* MT_TEST_OVER_SOCKETS_H */
