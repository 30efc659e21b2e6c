/* ---- ranks that are processes, over MPI -------------------------------------------------------------------------- */

#pragma once
#include "mpi.h"
#include "links.c"

#if MTI_MPI
/* The wire is a duplicate of the caller's MPI_Comm. No wait for a rank blocks inside MPI. After the creation, no call
   is a collective of MPI, which would wait for dead ranks. */
typedef struct mti_mpi {
    MPI_Comm comm;
    int32_t version, *versions; /* MT_VERSION_NUMBER of this rank, and of all [size] */
    /* scratch memory of a test */
    MPI_Request *handles;
    MPI_Status *statuses;
    int *indices, *places; /* places: of the handles among the requests */
} mti_mpi;

static mti_mpi *mti_mpi_of(const mti_port *port) { return (mti_mpi *)port->ends; }

/* Stores the result of a call of MPI that begins a request. */
static void mti_mpi_begun(mti_request *r, int error) {
    r->error = error;
    if (error != MPI_SUCCESS) r->mpi = MPI_REQUEST_NULL;
}

static void mti_mpi_send(mti_port *port, mti_request *r) {
    mti_mpi_begun(r, MPI_Isend(r->data, (int)r->bytes, MPI_BYTE, r->rank, r->tag, mti_mpi_of(port)->comm, &r->mpi));
}

static void mti_mpi_receive(mti_port *port, mti_request *r) {
    mti_mpi_begun(r, MPI_Irecv(r->data, (int)r->bytes, MPI_BYTE, r->rank < 0 ? MPI_ANY_SOURCE : r->rank, r->tag,
                               mti_mpi_of(port)->comm, &r->mpi));
}

/* After an error that belongs to no request: all fail, but MPI may go on using their memory. */
static int mti_mpi_lose(mti_port *port, mti_request *requests, int active, int error, int *done) {
    int i;
    for (i = 0; i < active; i++) {
        mti_request *r = &requests[done[i] = mti_mpi_of(port)->places[i]];
        r->active = 0;
        r->error = error;
    }
    port->keeps = 1;
    return active;
}

/* A request that could not begin is done at once. */
static int mti_mpi_test(mti_port *port, mti_request *requests, int count, int *done) {
    mti_mpi *m = mti_mpi_of(port);
    int i, active = 0, completed = 0, found = 0, error;
    for (i = 0; i < count; i++) {
        if (!requests[i].active) continue;
        m->handles[active] = requests[i].mpi;
        m->places[active++] = i;
        if (requests[i].mpi == MPI_REQUEST_NULL) done[found++] = i;
    }
    if (active == 0) return 0;
    error = MPI_Testsome(active, m->handles, &completed, m->indices, m->statuses);
    if (error != MPI_SUCCESS && error != MPI_ERR_IN_STATUS) return mti_mpi_lose(port, requests, active, error, done);
    for (i = 0; i < completed && completed != MPI_UNDEFINED; i++) {
        int at = done[found++] = m->places[m->indices[i]];
        if (error == MPI_ERR_IN_STATUS) requests[at].error = m->statuses[i].MPI_ERROR;
        else requests[at].error = error;
    }
    for (i = 0; i < found; i++) requests[done[i]].active = 0;
    return found;
}

/* A send stays with MPI. */
static void mti_mpi_cancel(mti_port *port, mti_request *r) {
    (void)port;
    if (!r->sends && r->mpi != MPI_REQUEST_NULL) MPI_Cancel(&r->mpi);
}

static int mti_mpi_take(mti_port *port, int rank, int tag, void *data, size_t bytes) {
    MPI_Message message;
    MPI_Status status;
    int there = 0;
    if (MPI_Improbe(rank, tag, mti_mpi_of(port)->comm, &there, &message, &status) != MPI_SUCCESS || !there) return 0;
    MPI_Mrecv(data, (int)bytes, MPI_BYTE, &message, &status);
    return 1;
}

static mt_status mti_mpi_say(mti_port *port, int error, mti_text *text) {
    char why[MPI_MAX_ERROR_STRING];
    int length = 0;
    (void)port;
    if (MPI_Error_string(error, why, &length) != MPI_SUCCESS) length = 0;
    mti_say(text, "MPI: %.*s", length, why);
    return MT_ERR_PEER;
}

static void mti_mpi_free(mti_mpi *m) {
    if (!m) return;
    free(m->versions);
    free(m->handles);
    free(m->statuses);
    free(m->indices);
    free(m->places);
    free(m);
}

/* Frees the port if all ranks have closed. Otherwise the port stays until the process ends, because MPI may still write
   to it. The duplicate is not freed when it may have messages that no rank has received: the next duplicate might
   receive them. */
static void mti_mpi_end(mti_port *port, int closed) {
    if (!closed) return;
    if (port->inbox_request.active) {
        MPI_Cancel(&port->inbox_request.mpi);
        MPI_Wait(&port->inbox_request.mpi, MPI_STATUS_IGNORE);
    }
    if (!port->broken) MPI_Comm_free(&mti_mpi_of(port)->comm);
    mti_mpi_free(mti_mpi_of(port));
    mti_port_free(port);
}

static const mti_wire mti_mpi_wire = {mti_mpi_send, mti_mpi_receive, mti_mpi_test, mti_mpi_cancel,
                                      mti_mpi_take, mti_mpi_say,     mti_mpi_end};

/* -- creating -- */

/* Creates the port and its wire; NULL: out of memory. */
static mti_port *mti_mpi_port(int rank, int size, double timeout_s) {
    size_t n = 2 * (size_t)size;
    mti_port *port = mti_port_new(&mti_mpi_wire, "MPI", rank, size, timeout_s);
    mti_mpi *m = (mti_mpi *)calloc(1, sizeof *m);
    if (m) {
        m->versions = (int32_t *)calloc(n, sizeof *m->versions);
        m->handles = (MPI_Request *)calloc(n, sizeof *m->handles);
        m->statuses = (MPI_Status *)calloc(n, sizeof *m->statuses);
        m->indices = (int *)calloc(n, sizeof *m->indices);
        m->places = (int *)calloc(n, sizeof *m->places);
    }
    if (port && m && m->versions && m->handles && m->statuses && m->indices && m->places) {
        port->ends = m;
        return port;
    }
    mti_mpi_free(m);
    if (port) mti_port_free(port);
    return NULL;
}

/* Waits for the end of a request of the opening. */
static mt_status mti_mpi_opened(const mti_port *port, MPI_Request *request) {
    mti_stopwatch watch = mti_stopwatch_start(port->timeout);
    int done = 0;
    while (!done) {
        if (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return MT_ERR_SYSTEM;
        if (!done && mti_waited(&watch) > port->timeout) return MT_ERR_TIMEOUT;
        if (!done) mti_rest(watch.waited, 1e-3);
    }
    return MT_SUCCESS;
}

/* Compares the versions of all ranks before any other message, as other versions may have other messages. After an
   error MPI may use the memory, which is therefore that of the port. */
static mt_status mti_mpi_versions(mti_port *port, mti_text *text) {
    mti_mpi *m = mti_mpi_of(port);
    MPI_Request request = MPI_REQUEST_NULL;
    int r;
    m->version = MT_VERSION_NUMBER;
    if (MPI_Iallgather(&m->version, (int)sizeof m->version, MPI_BYTE, m->versions, (int)sizeof m->version, MPI_BYTE,
                       m->comm, &request) != MPI_SUCCESS)
        return MT_ERR_SYSTEM;
    MT_TRY(mti_mpi_opened(port, &request));
    for (r = 1; r < port->size && m->versions[r] == m->versions[0]; r++) continue;
    if (r == port->size) return MT_SUCCESS;
    mti_say_versions(text, m->versions[0], r, m->versions[r]);
    return MT_ERR_MISMATCH;
}

/* Duplicates the caller's MPI_Comm. MPI returns errors on the duplicate, they are not fatal. text: what is wrong with
   MT_ERR_MISMATCH */
static mt_status mti_mpi_open(mti_port *port, MPI_Comm theirs, mti_text *text) {
    MPI_Request request = MPI_REQUEST_NULL;
    mti_mpi *m = mti_mpi_of(port);
    int found = 0, *last = NULL;
    if (MPI_Comm_idup(theirs, &m->comm, &request) != MPI_SUCCESS) return MT_ERR_SYSTEM;
    MT_TRY(mti_mpi_opened(port, &request));
    if (MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN) != MPI_SUCCESS ||
        MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &last, &found) != MPI_SUCCESS || !found)
        return MT_ERR_SYSTEM;
    port->last_tag = *last;
    MT_TRY(mti_mpi_versions(port, text));
    mti_link_open_inbox(port);
    return port->inbox_request.error == MPI_SUCCESS ? MT_SUCCESS : MT_ERR_SYSTEM;
}

/* Finds out which ranks run on this machine, and sets local_rank and port->spin: all ranks exchange a hash of their
   processor name. */
static mt_status mti_mpi_neighbours(mt_comm *world) {
    char name[MPI_MAX_PROCESSOR_NAME];
    mti_port *port = world->link->port;
    uint32_t hash = 2166136261u; /* FNV-1a */
    int length = 0, i, here = 0, mine;
    mti_call call;
    memset(&call, 0, sizeof call);
    call.kind = MTI_CREATE;
    if (MPI_Get_processor_name(name, &length) != MPI_SUCCESS) length = 0;
    for (i = 0; i < length; i++) hash = (hash ^ (unsigned char)name[i]) * 16777619u;
    call.color = mine = (int)(hash >> 1);
    MT_TRY(mti_link_enter(NULL, world, &call));
    mti_link_exit(world);
    for (i = 0; i < world->size; i++) {
        if (mti_slot_of(world->group, i)->color != mine) continue;
        if (i == world->rank) port->local_rank = here;
        here++;
    }
    for (i = 0; i < world->size; i++) mti_slot_of(world->group, i)->what = 0; /* no message names this call */
    port->spin = here <= (int)sysconf(_SC_NPROCESSORS_ONLN);
    world->local_rank = port->local_rank;
    return MT_SUCCESS;
}

/* Whether this process was forked, and has neither called exec nor started a thread since. MPI knows no such process,
   and has none of its threads there. (A process that calls MPI_Init itself after the fork has them.) Only Linux tells;
   elsewhere the answer is 0. The numbers are the 9th and the 20th of proc_pid_stat(5). */
static int mti_is_bare_fork(void) {
    const unsigned forked_no_exec = 0x40; /* PF_FORKNOEXEC */
    char text[1024], *at;
    unsigned flags = 0;
    long threads = 0;
    FILE *file = fopen("/proc/self/stat", "r");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = '\0';
    if (file) fclose(file);
    at = strrchr(text, ')'); /* the name of the program may have blanks */
    return at &&
           sscanf(at + 1, " %*c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld", &flags,
                  &threads) == 2 &&
           (flags & forked_no_exec) && threads == 1;
}

/* Refuses to connect a process that was forked from a rank. */
static mt_status mti_mpi_not_forked(mti_text *text) {
    if (!mti_is_bare_fork()) return MT_SUCCESS;
    mti_say(text,
            "process %ld was forked from process %ld, so it is no rank of MPI, and MPI does not work in it; start its "
            "ranks with mpirun or MPI_Comm_spawn",
            (long)getpid(), (long)getppid());
    return MT_ERR_UNSUPPORTED;
}

/* mt_comm_create_mpi. text is empty, or says what is wrong. */
static mt_status mti_mpi_create(const void *mpi_comm, double timeout_s, mt_comm **out, mti_text *text) {
    int begun = 0, ended = 0, rank = 0, size = 0, r;
    mti_port *port;
    MPI_Comm theirs;
    mt_comm *world;
    mt_status status;
    if (out) *out = NULL;
    if (!out || !mpi_comm || timeout_s != timeout_s) return MT_ERR_ARGUMENT;
    if (MPI_Initialized(&begun) != MPI_SUCCESS || MPI_Finalized(&ended) != MPI_SUCCESS || !begun || ended)
        return MT_ERR_ARGUMENT;
    memcpy(&theirs, mpi_comm, sizeof theirs);
    if (theirs == MPI_COMM_NULL) return MT_ERR_ARGUMENT;
    if (MPI_Comm_rank(theirs, &rank) != MPI_SUCCESS || MPI_Comm_size(theirs, &size) != MPI_SUCCESS)
        return MT_ERR_SYSTEM;
    if (size > MTI_MAX_RANKS) return MT_ERR_UNSUPPORTED;
    if (size == 1) return (*out = mti_comm_new(&mti_alone, 0, 1, "world")) != NULL ? MT_SUCCESS : MT_ERR_MEMORY;
    port = mti_mpi_port(rank, size, timeout_s);
    if (!port) return MT_ERR_MEMORY;
    status = mti_mpi_open(port, theirs, text);
    world = status == MT_SUCCESS ? mti_link_comm_new(&mti_linked, port, rank, size, "world", port->next++) : NULL;
    if (!world) return status == MT_SUCCESS ? MT_ERR_MEMORY : status; /* not freed: MPI may use the port */
    for (r = 0; r < size; r++) world->link->world[r] = r;
    status = mti_mpi_neighbours(world);
    if (status == MT_SUCCESS) *out = world;
    else mt_comm_destroy(world);
    return status;
}

MT_API mt_status mt_comm_create_mpi(const void *mpi_comm, double timeout_s, mt_comm **out) {
    mti_text text;
    mt_status status;
    text.used = 0;
    status = out && mpi_comm ? mti_mpi_not_forked(&text) : MT_SUCCESS;
    if (status == MT_SUCCESS) status = mti_mpi_create(mpi_comm, timeout_s, out, &text);
    else *out = NULL;
    if (text.used) fprintf(stderr, "mt_comm_create_mpi: %s\n", text.data);
    return status;
}
#else /* not built */
MT_API mt_status mt_comm_create_mpi(const void *mpi_comm, double timeout_s, mt_comm **out) {
    if (out) *out = NULL;
    return (void)mpi_comm, (void)timeout_s, MT_ERR_UNSUPPORTED;
}
#endif
