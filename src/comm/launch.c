/* ---- launch ------------------------------------------------------------------------------------------------------ */

#pragma once
#include "launch.h"
#include "mpi.c"

/* Returns the message of the rank's status. When the last message is that of another error, which the rank has handled,
   returns the general text of the status. */
static const char *mti_rank_sentence(const mti_rank *rank) {
    const mt_comm *world = rank->world;
    return world->error[0] && world->error_status == rank->status ? world->error : mt_status_string(rank->status);
}

/* Tells the other ranks of all its groups that this rank leaves, and destroys the communicators that its function has
   not destroyed. */
static void mti_rank_over(mti_rank *rank) {
    mt_comm *comm;
    if (rank->status == MT_SUCCESS) snprintf(rank->reason, sizeof rank->reason, "returned from its function");
    else
        snprintf(rank->reason, sizeof rank->reason, "failed with %s (%s)", mt_status_name(rank->status),
                 mti_rank_sentence(rank));
    mti_leave(rank->world, rank->reason);
    for (comm = rank->children; comm; comm = comm->next) mti_leave(comm, rank->reason);
    while (rank->children) mt_comm_destroy(rank->children);
}

#define MTI_GRACE_SECONDS 5.0 /* after a failure, the other ranks have at least this time to return */

/* Through this struct, ranks that end inform the thread that waits for all ranks. */
typedef struct mti_watch {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    int ended, failed;
    mti_stopwatch since; /* time since the first rank failed */
} mti_watch;

static void mti_rank_ended(mti_rank *rank) {
    mti_watch *w = mti_is_forked(rank->world->process) ? NULL : rank->watch; /* the thread that watches is not here */
    if (w) pthread_mutex_lock(&w->mutex);
    rank->ended = 1;
    if (!w) return;
    w->ended++;
    if (rank->status != MT_SUCCESS && !w->failed++) w->since = mti_stopwatch_start(MTI_GRACE_SECONDS);
    pthread_cond_signal(&w->cond);
    pthread_mutex_unlock(&w->mutex);
}

static void mti_rank_run(mti_rank *rank) {
    int before;
    mti_pin(rank->core, rank->cores);
    rank->status = rank->run(rank->world, rank->user);
    before = mti_hold();
    mti_rank_over(rank);
    mti_rank_ended(rank);
    mti_release(before);
}

/* Ends a rank whose function has not returned, because its thread was cancelled or an exception has left it. */
static void mti_rank_cut_short(void *argument) {
    mti_rank *rank = (mti_rank *)argument;
    if (rank->ended) return;
    rank->status = mt_comm_fail(rank->world, MT_ERR_SYSTEM,
                                "pthread_cancel, pthread_exit or a C++ exception has ended its function");
    mti_rank_over(rank);
    mti_rank_ended(rank);
}

static void *mti_rank_thread(void *argument) {
    pthread_cleanup_push(mti_rank_cut_short, argument);
    mti_rank_run((mti_rank *)argument);
    pthread_cleanup_pop(0);
    return NULL;
}

static void mti_launch_say(const mt_launch_desc *desc, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
static void mti_launch_say(const mt_launch_desc *desc, const char *format, ...) {
    char text[MT_ERROR_BYTES + 64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (desc->logger.log) (desc->logger.log)(desc->logger.user, MT_LOG_ERROR, text);
    else fprintf(stderr, "%s\n", text);
}

/* Counts the ranks behind `first` that have failed with its message and were not reported, and notes that they are.
   Ranks that have lost another one are reported one by one. */
static int mti_ranks_say_the_same(mti_rank *first, mti_rank *end) {
    int same = 0;
    mti_rank *rank;
    if (first->status == MT_ERR_PEER || first->status == MT_ERR_TIMEOUT) return 0;
    for (rank = first + 1; rank < end; rank++) {
        if (!rank->ended || rank->told || rank->status != first->status) continue;
        if (strcmp(mti_rank_sentence(rank), mti_rank_sentence(first)) != 0) continue;
        rank->told++;
        same++;
    }
    return same;
}

/* Reports the ranks that have failed, and returns the status of the first one. Ranks with MT_ERR_PEER come last,
   because another rank's failure has usually caused theirs. A refusal that several ranks have is reported once. */
static mt_status mti_launch_report(const mt_launch_desc *desc, mti_rank *ranks, int count) {
    mt_status first = MT_SUCCESS;
    int secondary, r, same;
    char more[64];
    for (secondary = 0; secondary < 2; secondary++) {
        for (r = 0; r < count; r++) {
            mti_rank *rank = &ranks[r];
            if (!rank->ended || rank->status == MT_SUCCESS || (rank->status == MT_ERR_PEER) != secondary) continue;
            MT_KEEP(first, rank->status);
            if (rank->told++) continue;
            same = mti_ranks_say_the_same(rank, ranks + count);
            snprintf(more, sizeof more, " (%d more rank%s with the same error)", same, same == 1 ? "" : "s");
            mti_launch_say(desc, "rank %d of %d: %s: %s%s", rank->rank, rank->world->size, mt_status_name(rank->status),
                           mti_rank_sentence(rank), same > 0 ? more : "");
        }
    }
    return first;
}

static void mti_rank_not_started(mti_rank *rank, int error) {
    char text[128];
    snprintf(text, sizeof text, "mt_launch: the system gave no thread for rank %d (error %d)", rank->rank, error);
    rank->status = mt_comm_fail(rank->world, MT_ERR_SYSTEM, text);
    mti_rank_over(rank);
    mti_rank_ended(rank);
}

/* Waits until all ranks have ended, but at most until `seconds` after the first failure. Returns 1 when all ranks have
   ended. */
static int mti_watch_wait(const mt_launch_desc *desc, mti_watch *w, double seconds) {
    while (w->ended < desc->ranks && !(w->failed && mti_waited(&w->since) >= seconds)) {
        if (w->failed) mti_stopwatch_sleep(&w->since, seconds, &w->cond, &w->mutex);
        else pthread_cond_wait(&w->cond, &w->mutex);
    }
    return w->ended == desc->ranks;
}

/* Waits for the ranks. After a failure, it reports ranks that do not return, and in the end calls desc->stuck. Ranks
   that wait for a stuck rank return at their own timeout, so desc->stuck is not called before timeout_s. */
static void mti_watch_ranks(const mt_launch_desc *desc, mti_watch *w, mti_rank *ranks) {
    double patience = desc->timeout_s > 0 ? desc->timeout_s : MT_TIMEOUT_DEFAULT;
    int stuck = 0, r;
    if (patience < MTI_GRACE_SECONDS) patience = MTI_GRACE_SECONDS;
    pthread_mutex_lock(&w->mutex);
    if (!mti_watch_wait(desc, w, MTI_GRACE_SECONDS)) {
        mti_launch_report(desc, ranks, desc->ranks);
        for (r = 0; r < desc->ranks; r++)
            if (!ranks[r].ended)
                mti_launch_say(desc, "rank %d of %d: has not returned from its function, mt_launch waits for it", r,
                               desc->ranks);
        stuck = desc->stuck && !mti_watch_wait(desc, w, patience);
        if (stuck) mti_launch_report(desc, ranks, desc->ranks);
    }
    pthread_mutex_unlock(&w->mutex);
    if (stuck) desc->stuck(ranks->user);
}

/* The ranks of a launch, for mti_launch_end. worlds: NULL when `ranks` is not on the heap */
typedef struct mti_launch {
    mti_rank *ranks;
    mt_comm **worlds;
    int count;
} mti_launch;

/* Calls `function` with the variable's address at the end of its scope, also when an exception leaves the scope (in
   C++, or in C with -fexceptions). */
#define MTI_AT_END(function) __attribute__((unused, cleanup(function)))

/* Ends the ranks whose functions an exception has left, and frees everything. */
__attribute__((unused)) static void mti_launch_end(mti_launch *l) {
    int r;
    for (r = 0; l->ranks && r < l->count; r++) {
        if (!l->ranks[r].world) continue;
        mti_rank_cut_short(&l->ranks[r]);
        mti_comm_free(l->ranks[r].world);
    }
    if (!l->worlds) return;
    free(l->worlds);
    free(l->ranks);
}

/* Runs each rank on a thread. When the system refuses a thread, this rank and the ranks after it count as failed, and
   the started ranks see failed peers. */
static void mti_launch_threads(const mt_launch_desc *desc, mti_rank *ranks) {
    mti_watch watch;
    int r, error = 0, watched = pthread_mutex_init(&watch.mutex, NULL) == 0;
    if (watched && mti_cond_init(&watch.cond) != 0) {
        pthread_mutex_destroy(&watch.mutex);
        watched = 0;
    }
    watch.ended = watch.failed = 0;
    for (r = 0; r < desc->ranks; r++) {
        ranks[r].watch = watched ? &watch : NULL;
        if (!error) error = pthread_create(&ranks[r].thread, NULL, mti_rank_thread, &ranks[r]);
        ranks[r].started = !error;
        if (error) mti_rank_not_started(&ranks[r], error);
    }
    if (watched) mti_watch_ranks(desc, &watch, ranks);
    for (r = 0; r < desc->ranks; r++)
        if (ranks[r].started) pthread_join(ranks[r].thread, NULL);
    if (watched) pthread_cond_destroy(&watch.cond);
    if (watched) pthread_mutex_destroy(&watch.mutex);
}

/* Returns desc with the default of cores_per_rank. desc may be NULL. The caller sets the default of `ranks`. */
static mt_launch_desc mti_launch_defaults(const mt_launch_desc *desc) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.cores_per_rank == 0) d.cores_per_rank = 1;
    return d;
}

static mt_status mti_launch_check(const mt_launch_desc *desc, mt_rank_function rank_main) {
    if (!rank_main) {
        mti_launch_say(desc, "mt_launch: rank_main is NULL");
        return MT_ERR_ARGUMENT;
    }
    if (desc->ranks < 1 || desc->ranks > MTI_MAX_RANKS) {
        mti_launch_say(desc, "mt_launch: ranks is %d, must be from 1 to %d", desc->ranks, MTI_MAX_RANKS);
        return MT_ERR_ARGUMENT;
    }
    if (desc->cores_per_rank < 1) {
        mti_launch_say(desc, "mt_launch: cores_per_rank is %d, must be at least 0", desc->cores_per_rank);
        return MT_ERR_ARGUMENT;
    }
    if (!(desc->timeout_s >= 0)) {
        mti_launch_say(desc, "mt_launch: timeout_s is %g, must be at least 0", desc->timeout_s);
        return MT_ERR_ARGUMENT;
    }
    return MT_SUCCESS;
}

/* Creates the world, runs all ranks, and reports the failed ones. */
static mt_status mti_launch_ranks(const mt_launch_desc *desc, mti_rank *ranks, mt_comm **worlds, mt_rank_function run,
                                  void *user) {
    int core[8 * MTI_CORE_BYTES], cores = mti_allowed_cores(core, 8 * MTI_CORE_BYTES), each = desc->cores_per_rank, r;
    int pinned = !desc->no_pinning && desc->ranks > 1 && cores / each >= desc->ranks && MTI_CAN_PIN;
    mt_status status = mt_comm_create_local(desc->ranks, desc->timeout_s, worlds);
    if (status != MT_SUCCESS) {
        mti_launch_say(desc, "mt_launch: no memory for the communicators of %d ranks", desc->ranks);
        return status;
    }
    for (r = 0; r < desc->ranks; r++) {
        ranks[r].world = worlds[r];
        worlds[r]->owner = &ranks[r];
        ranks[r].run = run;
        ranks[r].user = user;
        ranks[r].rank = r;
        ranks[r].core = core + (pinned ? r * each : 0);
        ranks[r].cores = pinned ? each : 0;
    }
    if (desc->ranks == 1) mti_rank_run(ranks);
    else mti_launch_threads(desc, ranks);
    return mti_launch_report(desc, ranks, desc->ranks);
}

static mt_status mti_launch_all(const mt_launch_desc *desc, mt_rank_function run, void *user) {
    mti_launch all MTI_AT_END(mti_launch_end);
    all.count = desc->ranks;
    all.ranks = NULL;
    all.worlds = (mt_comm **)calloc((size_t)desc->ranks, sizeof *all.worlds);
    if (all.worlds) all.ranks = (mti_rank *)calloc((size_t)desc->ranks, sizeof *all.ranks);
    if (all.ranks) return mti_launch_ranks(desc, all.ranks, all.worlds, run, user);
    mti_launch_say(desc, "mt_launch: no memory for %d ranks", desc->ranks);
    return MT_ERR_MEMORY;
}

MT_API mt_status mt_launch(const mt_launch_desc *desc, mt_rank_function rank_main, void *user) {
    mt_launch_desc d = mti_launch_defaults(desc);
    int before = 0;
    mt_status status;
    if (d.ranks == 0) d.ranks = 1;
    MT_TRY(mti_launch_check(&d, rank_main));
    if (d.ranks > 1) mti_cuda_before_ranks();
    if (d.ranks > 1) before = mti_hold(); /* the ranks' threads use the stack of this one */
    status = mti_launch_all(&d, rank_main, user);
    if (d.ranks > 1) mti_release(before);
    return status;
}

/* -- ranks over MPI -- */

#if MTI_MPI
/* Reports the ranks that have not closed their ports in time, after this rank has closed its own. */
static mt_status mti_mpi_say_open(const mt_launch_desc *desc, const mti_port *port) {
    mti_text text;
    int r, said = 0;
    text.used = 0;
    for (r = 0; r < port->size && said < 8; r++)
        if (port->status[r] == MTI_LINK_OPEN) mti_say(&text, said++ ? ", %d" : "rank %d", r);
    mti_launch_say(desc, "rank %d of %d: %s: waited %.2f s at the end for %s", port->rank, port->size,
                   mt_status_name(MT_ERR_TIMEOUT), port->waited, text.data);
    return MT_ERR_TIMEOUT;
}

/* Returns the status of the whole job, chosen as in mti_launch_report, when all ranks have closed their ports. Else
   returns this rank's error, or MT_ERR_TIMEOUT. */
static mt_status mti_mpi_verdict(const mt_launch_desc *desc, const mti_port *port) {
    mt_status own = (mt_status)port->status[port->rank], first = MT_SUCCESS;
    int secondary, r;
    if (port->closed < port->size) return own == MT_SUCCESS ? mti_mpi_say_open(desc, port) : own;
    for (secondary = 0; secondary < 2; secondary++)
        for (r = 0; r < port->size; r++)
            if ((port->status[r] == (int)MT_ERR_PEER) == secondary) MT_KEEP(first, (mt_status)port->status[r]);
    return first;
}

/* Runs this process as one rank of an MPI communicator. *closed: the result of mti_link_close */
static mt_status mti_mpi_run(const mt_launch_desc *desc, MPI_Comm comm, mt_rank_function run, void *user, int *closed) {
    mti_port *port;
    mti_rank rank;
    mti_text text;
    mt_status status;
    memset(&rank, 0, sizeof rank);
    *closed = 0;
    text.used = 0;
    status = mti_mpi_create(&comm, desc->timeout_s, &rank.world, &text);
    if (status != MT_SUCCESS) {
        mti_launch_say(desc, "mt_world_from_env: %s: %s", mt_status_name(status),
                       text.used ? text.data : "the ranks of MPI do not connect");
        return status;
    }
    port = rank.world->link ? rank.world->link->port : NULL;
    if (port) port->references++;
    rank.world->owner = &rank;
    rank.rank = rank.world->rank;
    rank.run = run;
    rank.user = user;
    mti_rank_run(&rank);
    if (mti_is_forked(rank.world->process)) return rank.status;
    status = mti_launch_report(desc, &rank, 1);
    *closed = 1;
    if (port) {
        mti_link_destroy(rank.world);
        *closed = mti_link_close(port, rank.status);
        status = mti_mpi_verdict(desc, port);
        (port->wire->end)(port, *closed);
    }
    mti_comm_free(rank.world);
    return status;
}

/* Runs this process as one rank of MPI_COMM_WORLD. If the program has not initialized MPI, this function initializes
   and finalizes MPI. It calls MPI_Finalize only when all ranks have closed their ports, because MPI_Finalize waits for
   dead ranks. When a process ends without MPI_Finalize, mpirun ends the other processes. */
static mt_status mti_mpi_world(const mt_launch_desc *desc, mt_rank_function run, void *user) {
    int begun = 0, ended = 0, provided = MPI_THREAD_FUNNELED, size = 0, closed = 1;
    mt_status status;
    mti_text text;
    text.used = 0;
    MPI_Initialized(&begun); /* this and MPI_Finalized work in every process */
    MPI_Finalized(&ended);
    if (begun && mti_mpi_not_forked(&text) != MT_SUCCESS) {
        mti_launch_say(desc, "mt_world_from_env: %s", text.data);
        return MT_ERR_UNSUPPORTED;
    }
    if (ended || (!begun && MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)) {
        mti_launch_say(desc, "mt_world_from_env: MPI %s", ended ? "has been finalized" : "does not start");
        return MT_ERR_SYSTEM;
    }
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (provided < MPI_THREAD_FUNNELED) { /* a GEMM library may start threads */
        mti_launch_say(desc,
                       "mt_world_from_env: this MPI allows no threads: MPI_Init_thread provides %d, not "
                       "MPI_THREAD_FUNNELED (%d)",
                       provided, MPI_THREAD_FUNNELED);
        status = MT_ERR_UNSUPPORTED;
    } else if (desc->ranks && desc->ranks != size) {
        mti_launch_say(desc,
                       "mt_world_from_env: MPI_COMM_WORLD has %d ranks, not %d: was this program started by the mpirun "
                       "of another MPI than it was built with?",
                       size, desc->ranks);
        status = MT_ERR_ARGUMENT;
    } else {
        status = mti_mpi_run(desc, MPI_COMM_WORLD, run, user, &closed);
    }
    if (!begun && closed) MPI_Finalize();
    return status;
}
#endif

/* -- ranks that are processes -- */

/* The environment variables that a launcher sets for each process. The fields are arrays because pointers would need
   relocations.
   marker    this variable is set if and only if the launcher is used; "": rank, size or local_rank is set
   imitator  another launcher that sets this variable also sets rank and size: then only local_rank counts
   job_size  replaces `size` when that is not set
   mpi       1: the launcher starts MPI programs: when MPI is built, it connects the ranks */
typedef struct mti_launcher {
    char name[12], marker[16], imitator[16], rank[24], size[24], job_size[16], local_rank[28];
    int mpi;
} mti_launcher;

static const mti_launcher mti_launchers[] = {
    {"torchrun", "", "", "RANK", "WORLD_SIZE", "", "LOCAL_RANK", 0},
    {"Open MPI", "", "", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "", "OMPI_COMM_WORLD_LOCAL_RANK", 1},
    {"MPICH", "", "SLURM_STEP_ID", "PMI_RANK", "PMI_SIZE", "", "MPI_LOCALRANKID", 1},
    {"Slurm", "SLURM_STEP_ID", "", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", 1},
};

typedef struct mti_process {
    const mti_launcher *launcher; /* NULL: no launcher */
    int rank, size, local_rank;
    char rendezvous[320]; /* host:port for NCCL; "": not known */
} mti_process;

static int mti_in_env(const char *name) { return name[0] && getenv(name); }

static int mti_is_launcher(const mti_launcher *l) {
    if (l->marker[0]) return mti_in_env(l->marker);
    return mti_in_env(l->local_rank) || (!mti_in_env(l->imitator) && (mti_in_env(l->rank) || mti_in_env(l->size)));
}

static const mti_launcher *mti_find_launcher(void) {
    const mti_launcher *l = mti_launchers, *end = l + sizeof mti_launchers / sizeof *mti_launchers;
    while (l < end && !mti_is_launcher(l)) l++;
    return l < end ? l : NULL;
}

MT_API int mt_parse_whole(const char *text, uint64_t most, uint64_t *out) {
    uint64_t value = 0;
    if (!text || !*text || !out) return 0;
    for (; *text; text++) {
        uint64_t digit = (uint64_t)(unsigned char)*text - '0';
        if (digit > 9 || digit > most || value > (most - digit) / 10) return 0;
        value = 10 * value + digit;
    }
    *out = value;
    return 1;
}

/* Writes the variables of a launcher that are set: "RANK=3 LOCAL_RANK=1". */
static void mti_say_env(mti_text *text, const mti_launcher *l) {
    const char *names[5];
    int i, said = 0;
    names[0] = l->marker;
    names[1] = l->rank;
    names[2] = l->size;
    names[3] = l->job_size;
    names[4] = l->local_rank;
    text->used = 0;
    for (i = 0; i < 5; i++)
        if (mti_in_env(names[i])) mti_say(text, "%s%s=%.64s", said++ ? " " : "", names[i], getenv(names[i]));
}

/* Reads the number in a variable, which must be set and lie in [low, high]. */
static mt_status mti_env_number(const mt_launch_desc *desc, const mti_launcher *l, const char *name, int64_t low,
                                int64_t high, int64_t *out) {
    const char *text = getenv(name);
    uint64_t value = 0;
    mti_text there;
    int whole = text && mt_parse_whole(text, (uint64_t)high, &value);
    *out = whole ? (int64_t)value : -1;
    if (whole && *out >= low) return MT_SUCCESS;
    mti_say_env(&there, l);
    if (!text)
        mti_launch_say(desc, "mt_world_from_env: %s is not set, but there is %s (%s)", name, there.data, l->name);
    else
        mti_launch_say(desc,
                       "mt_world_from_env: %s is \"%.64s\", must be a whole number from %lld to %lld; there is %s (%s)",
                       name, text, (long long)low, (long long)high, there.data, l->name);
    return MT_ERR_ARGUMENT;
}

/* Writes the first host of a Slurm list: node01 for "node[01-04,7],login". Returns 0 when the list is malformed, or the
   name too long for `host`. */
static int mti_first_host(const char *list, char *host, size_t bytes) {
    size_t n = 0;
    int bracket = 0, skip = 0; /* bracket: inside [ ]; skip: behind the first number there */
    for (; *list && (bracket || *list != ','); list++) {
        if (*list == '[' || *list == ']') {
            if (bracket != (*list == ']') || (bracket && list[-1] == '[')) return 0;
            bracket = !bracket;
            skip = 0;
        } else if (bracket && (*list == ',' || *list == '-')) {
            if (list[-1] == '[') return 0;
            skip = 1;
        } else if (!skip) {
            if (n + 1 >= bytes) return 0;
            host[n++] = *list;
        }
    }
    host[n] = '\0';
    return n > 0 && !bracket;
}

static mt_status mti_find_host(const mt_launch_desc *desc, const mti_launcher *launcher, char *host, size_t bytes) {
    const char *name = "MASTER_ADDR", *list = getenv(name);
    host[0] = '\0';
    if (!list && launcher->marker[0]) {
        name = getenv("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
        list = getenv(name);
    }
    if (!list || mti_first_host(list, host, bytes)) return MT_SUCCESS;
    mti_launch_say(desc, "mt_world_from_env: %s is \"%.200s\", which names no host", name, list);
    return MT_ERR_ARGUMENT;
}

/* *port: 0: not known */
static mt_status mti_find_port(const mt_launch_desc *desc, const mti_launcher *launcher, int64_t *port) {
    int64_t job = 0, step = 0;
    *port = 0;
    if (getenv("MASTER_PORT")) {
        MT_TRY(mti_env_number(desc, launcher, "MASTER_PORT", 1, 65534, port));
        ++*port; /* torchrun listens on MASTER_PORT itself */
    } else if (launcher->marker[0] && getenv("SLURM_JOB_ID")) {
        MT_TRY(mti_env_number(desc, launcher, "SLURM_JOB_ID", 0, UINT32_MAX, &job));
        MT_TRY(mti_env_number(desc, launcher, "SLURM_STEP_ID", 0, UINT32_MAX, &step));
        *port = 61440 + (job + step) % 4096; /* above Linux' default range of automatic ports; differs between jobs */
    }
    return MT_SUCCESS;
}

/* Sets p->rendezvous when host and port are known. An IPv6 address is put in brackets, because it contains colons. */
static mt_status mti_find_rendezvous(const mt_launch_desc *desc, mti_process *p) {
    char host[256];
    int64_t port;
    MT_TRY(mti_find_host(desc, p->launcher, host, sizeof host));
    MT_TRY(mti_find_port(desc, p->launcher, &port));
    if (host[0] && port)
        snprintf(p->rendezvous, sizeof p->rendezvous, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, (int)port);
    return MT_SUCCESS;
}

/* Fills *p from the launcher's environment variables. Without a launcher, all fields of *p are 0. */
static mt_status mti_find_process(const mt_launch_desc *desc, mti_process *p) {
    const mti_launcher *l = mti_find_launcher();
    const char *size;
    mti_text there;
    int64_t value;
    memset(p, 0, sizeof *p);
    p->launcher = l;
    if (!l) return MT_SUCCESS;
    size = mti_in_env(l->job_size) && !getenv(l->size) ? l->job_size : l->size;
    MT_TRY(mti_env_number(desc, l, size, 1, INT32_MAX, &value));
    p->size = (int)value;
    MT_TRY(mti_env_number(desc, l, l->rank, 0, p->size - 1, &value));
    p->rank = (int)value;
    if (getenv(l->local_rank)) MT_TRY(mti_env_number(desc, l, l->local_rank, 0, p->size - 1, &value));
    p->local_rank = (int)value;
    if (desc->ranks != 0 && desc->ranks != p->size) {
        mti_say_env(&there, l);
        mti_launch_say(desc, "mt_world_from_env: the program wants %d ranks, but %s has started %d: %s", desc->ranks,
                       l->name, p->size, there.data);
        return MT_ERR_ARGUMENT;
    }
    return getenv("NCCL_COMM_ID") ? MT_SUCCESS : mti_find_rendezvous(desc, p);
}

/* Runs this process as one rank. Its world does not connect it to the other processes. */
static mt_status mti_run_process(const mt_launch_desc *desc, const mti_process *p, mt_rank_function run, void *user) {
    mti_rank rank;
    mti_launch all MTI_AT_END(mti_launch_end);
    all.ranks = &rank;
    all.worlds = NULL;
    all.count = 1;
    memset(&rank, 0, sizeof rank);
    rank.world = mti_comm_new(p->size > 1 ? &mti_apart : &mti_alone, p->rank, p->size, "world");
    if (!rank.world) {
        mti_launch_say(desc, "mt_world_from_env: no memory for the communicator of rank %d", p->rank);
        return MT_ERR_MEMORY;
    }
    rank.world->owner = &rank;
    rank.world->local_rank = p->local_rank;
    rank.world->launcher = p->launcher->name;
    rank.world->timeout = desc->timeout_s;
    rank.run = run;
    rank.user = user;
    rank.rank = p->rank;
#if MTI_NCCL
    if (p->size > 1 && p->rendezvous[0]) setenv("NCCL_COMM_ID", p->rendezvous, 0);
#endif
    mti_rank_run(&rank);
    return mti_launch_report(desc, &rank, 1);
}

MT_API mt_status mt_world_from_env(const mt_launch_desc *desc, mt_rank_function rank_main, void *user) {
    mt_launch_desc d = mti_launch_defaults(desc);
    mti_process process;
    MT_TRY(mti_find_process(&d, &process));
    if (!process.launcher) return mt_launch(desc, rank_main, user);
    d.ranks = 1; /* for the check: this process is one rank */
    MT_TRY(mti_launch_check(&d, rank_main));
#if MTI_MPI
    d.ranks = process.size;
    if (process.launcher->mpi) return mti_mpi_world(&d, rank_main, user);
#endif
    return mti_run_process(&d, &process, rank_main, user);
}
