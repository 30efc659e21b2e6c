/* ---- contexts, communicators, calls and transports --------------------------------------------------------------- */

#pragma once
#include "collectives.h"
#include "graph.h"
#include "launch.h"
#include "overlap.h"
#include "authors.h"
#include "system.h"

#define MTI_EVENTS (MT_OVERLAP_TICKET_THIRD + 2)

typedef struct mti_slot_memory {
    void *memory;
    void (*destroy)(mt_context *ctx, void *memory);
} mti_slot_memory;

#define MTI_SECTIONS 8

/* Page-locked memory for small uploads: sections of MT_UPLOAD_BYTES, used in turn. An upload takes the next bytes of
   the current section. `copied` is recorded when a section is full, so it is reached when all its copies are done. */
typedef struct mti_staging {
    unsigned char *memory; /* the sections, and an mt_range_error behind them */
    struct CUevent_st *copied[MTI_SECTIONS];
    int section;
    size_t used;
} mti_staging;

#define MTI_MAX_THREADS 1024

struct mt_context {
    pid_t process; /* that has created the context, see mti_is_forked */
    mt_device device;
    int threads;
    struct mti_team *team; /* the other threads; NULL before the first call that needs them */
    int invariant, invariant_data;
    mt_comm *world;
    mt_allocator allocator;
    mt_logger logger;
    unsigned char *arena;
    size_t arena_bytes, arena_used, arena_peak, allocated;
    size_t region_end, region_top; /* see mt_arena_region */
    size_t meta_end;               /* MT_DEVICE_META: bytes that mt_context_alloc has given out so far */
    mti_slot_memory slots[MT_SLOT_COUNT];
    mt_forget_function forget;          /* see mt_context_set_forget; NULL: none */
    mt_graph_border border;             /* see mt_context_set_graph_border; NULL: none */
    const struct mti_hooks *hooks;      /* of check mode; NULL: it is off */
    struct mti_checker *checker;        /* what the hooks know; NULL: no hooks */
    int checks_paused;                  /* number of open mti_checks_pause */
    mt_device planned;                  /* MT_DEVICE_META: the device whose memory is planned */
    int ordinal, owns_stream;           /* MT_DEVICE_CUDA */
    int capability;                     /* compute capability of the GPU: 90 for sm_90 */
    struct CUstream_st *compute_stream; /* mt_context_desc.stream, or a stream that the context has created */
    struct CUstream_st *second_stream, *third_stream;
    struct CUevent_st *events[MTI_EVENTS]; /* one per ticket; the last one is for mti_cuda_fork */
    mti_staging staging;
    int recording;               /* 1: between mt_graph_begin and mt_graph_end */
    mt_graph *graphs;            /* list of the graphs of this context that can run */
    int captures;                /* 1: this context has begun a capture, which has not ended */
    mt_comm *recorders;          /* the ranks that record together; NULL: this rank alone */
    struct mti_group *turns;     /* the group of the recorders, kept alive */
    int has_turn;                /* 1: of the recorders, this rank records now */
    unsigned pending;            /* bit mask of tickets that the compute stream has not waited for */
    int forked_ctas;             /* thread blocks of the communicator of the overlap that has begun last */
    int ticket_ctas[MTI_EVENTS]; /* the same for the overlap with each ticket */
    int overlapped;              /* 1: mti_cuda_fork has been called */
    int stuck;                   /* 1: a stream has not ended in time, so nothing is freed that it may use */
    uint64_t reached;            /* bit mask of other GPUs whose memory this GPU can read */
    struct CUstream_st *stream;  /* where calls put their work: compute_stream, or another one after mti_cuda_fork */
    int arena_symmetric, no_nccl_checks;
    mt_nccl_options nccl_options;
    mt_comm *nccl;              /* list of the communicators over NCCL that belong to this context */
    uint64_t nccl_calls;        /* number of calls on these communicators so far */
    struct mti_window *windows; /* list of the memory registered with these communicators */
    struct mti_parked *parked;  /* list of freed memory that stays with the context, see mti_cuda_give */
    mt_trace trace;             /* MT_DEVICE_META */
    size_t trace_capacity;
    int trace_lost;           /* 1: there was no memory for an entry */
    int recomputes;           /* number of open pairs of mt_trace_recompute */
    mt_stream planned_stream; /* MT_DEVICE_META: the stream between mt_overlap_begin and mt_overlap_end */
    int compares;             /* MT_DEVICE_META: number of open mti_space_begin, whose calls move bytes */
    char error[MT_ERROR_BYTES];
};

/* Codes for calls that have no mt_collective, for slots and messages. The ledger does not count these calls. */
typedef enum mti_call_kind {
    MTI_SPLIT = 64,
    MTI_SEND_RECV = 65,
    MTI_CREATE = 66,
    MTI_GRAPH_BEGIN = 67,
    MTI_GRAPH_END = 68,
    MTI_GRAPH_LAUNCH = 69
} mti_call_kind;

typedef struct mti_call {
    int kind; /* mt_collective or mti_call_kind */
    mt_dtype dtype;
    mt_op op;
    int root;   /* root of a broadcast, or destination of a send; -1: none */
    int source; /* source of a receive; -1: none */
    size_t count, recvcount;
    /* the ranks whose blocks an all_gather or a reduce_scatter moves: `ranks` ranks from `first` on; ranks 0: all */
    int first, ranks;
    int goes_on; /* 1: this is not the first chunk of a call */
    const void *send;
    void *recv;
    const size_t *sends, *recvs; /* all_to_all_v: the elements for each rank, and from each rank; else NULL */
    struct CUgraphExec_st *run;  /* MTI_GRAPH_LAUNCH */
    int color, key;
} mti_call;

/* An event of CUDA, see mti_cuda_record. */
typedef struct mti_event {
    struct CUevent_st *handle; /* NULL: not recorded yet */
    int ordinal;               /* the GPU that the event belongs to */
} mti_event;

typedef struct mti_slot {
    uint64_t what, count, recvcount; /* the call, packed; atomic: other ranks read them at any time, for messages */
    uint64_t outbox;                 /* destination + 1 and state of a posted message, see MTI_POSTED; atomic */
    const char *left;                /* why this rank has left the group; NULL: it has not left */
    int inside;                      /* MTI_OUTSIDE, MTI_IN_COLLECTIVE or MTI_IN_P2P; atomic */
    int awaited;                     /* 1 + the rank from which a message is awaited; 0: none; atomic */
    /* The fields below are valid between the two meetings of a call, or while the outbox is posted. */
    int failed;
    const void *send;
    void *recv;
    const size_t *sends, *recvs; /* of an all_to_all_v */
    size_t send_count;
    mt_dtype send_dtype;
    int ordinal; /* the GPU that holds send and recv */
    int color, key;
    mt_comm **family; /* mt_comm_split: the communicators of the new group, created by its leader */
    /* On GPUs. A rank records `ready` before a call and `done` behind its part of a collective; the receiver of its
       message records `taken` behind the copy. */
    mti_event ready, done, taken;
} mti_slot;

typedef struct mti_group {
    uint64_t state;          /* atomic, see MTI_BROKEN */
    unsigned char apart[56]; /* padding: `state` has its own cache line, because all ranks spin on it */
    int sleepers, left_count, references;
    int size;
    int spin;               /* 1: each rank on this machine has a core */
    struct mti_group *root; /* the first group of the chain of splits, kept alive by this one; NULL: this group */
    int late_turns;         /* used in the root, atomic: number of late polls in a row, see mti_note_turn */
    int64_t crowded_until;  /* used in the root, atomic: microseconds by mti_now; until then waits do not poll */
    double timeout;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    unsigned char *slots;
    pid_t process; /* that has created the group */
    int turn;      /* atomic; 1: a rank of this group records a graph */
    int captured;  /* atomic; 1: the capture that rank 0 has begun has not ended */
    mt_status why_broken;
    char text[MT_ERROR_BYTES];
} mti_group;

struct mti_rank;

struct mti_watchdog;
struct mti_channel;

typedef struct mti_nccl {
    struct ncclComm *handle; /* carries the collectives; blocking if owned. NULL: aborted */
    struct ncclComm *opener; /* the same ranks, non-blocking, only for splits; NULL: splits are made from handle */
    struct mti_watchdog *watchdog; /* bounds the calls on handle; NULL: the handle is the caller's */
    mt_comm *twin;                 /* the same ranks as threads; NULL: they are not, or it is not known */
    struct mti_channel *channel;   /* compares the calls of the ranks; NULL: they are not compared */
    mt_context *home;              /* the context that the communicator belongs to; NULL: the context is destroyed */
    mt_comm *next;                 /* in the list mt_context.nccl */
    struct CUstream_st *stream;    /* the stream of the last call */
    int recorded;                  /* 1: a graph has recorded a call */
    mti_call last;                 /* the last call, for messages */
    uint64_t number;               /* mt_context.nccl_calls at the last call */
    double timeout;
    int ordinal, owned;
    int max_ctas;     /* most thread blocks of a kernel; 0: as many as NCCL likes */
    int split_ctas;   /* the same for the groups of the mt_comm_split_for that runs */
    int busy;         /* 1: the communicator may have work in the stream */
    mt_status broken; /* MT_SUCCESS: not broken */
} mti_nccl;

struct mt_comm {
    const struct mti_transport *transport;
    pid_t process; /* that has created the communicator */
    /* threads: the shared group; over messages (links.c), and over NCCL with a channel: a copy that only this process
       uses, for messages; else NULL */
    mti_group *group;
    struct mti_link *link; /* only over MPI or a transport of the program */
    int rank, size;
    int span;               /* see mt_comm_set_span */
    mt_comm *factors[2];    /* see mt_comm_set_factors; NULL: none */
    mti_nccl nccl;          /* only over NCCL */
    struct mti_rank *owner; /* the launched rank that the communicator belongs to, or NULL */
    mt_comm *next;          /* in the list mti_rank.children of the owner */
    uint64_t graphs;        /* number of graphs whose recording has begun with this communicator */
    int local_rank;         /* see mt_comm_local_rank */
    const char *launcher;   /* only mti_apart: name of the launcher */
    double timeout;         /* only mti_apart: timeout of the communicators made from this one */
    mt_ledger ledger;
    char name[16];
    int is_named;           /* 1: mt_comm_set_name has given the name */
    mt_status error_status; /* the status that `error` belongs to */
    char error[MT_ERROR_BYTES];
};

/* A rank that mt_launch or mt_world_from_env runs. */
typedef struct mti_rank {
    mt_comm *world, *children;
    mt_rank_function run;
    void *user;
    int rank, started;
    int leaving;     /* 1: the rank is destroying a communicator; mt_comm_fail then stores no message */
    int ended, told; /* ended: the rank's function has returned; told: the logger has got the rank's error */
    struct mti_watch *watch;
    const int *core; /* the cores that the rank is pinned to */
    int cores;       /* number of these cores; 0: not pinned */
    mt_status status;
    pthread_t thread;
    char reason[MT_ERROR_BYTES + 64]; /* why the rank left, for the messages of ranks that wait for it */
} mti_rank;

typedef struct mti_text {
    size_t used;
    char data[MT_ERROR_BYTES];
} mti_text;

/* A transport connects the ranks of a communicator: a table of functions, which is at the end of its file.
   has_peers     0: a call moves no data to other ranks
   are_threads   1: the ranks are threads of this process
   check         returns an error when the context cannot be used with the communicator
   collective    runs a collective
   p2p           runs a send, a receive or both, with other ranks
   enter, exit   the two meetings of a call: all ranks compare their calls, and leave the call; NULL: never called
   split         as mt_comm_split; color -1 leaves *out NULL
   leave         tells the other ranks that this rank leaves; `reason` completes "rank 1 ...", must outlive the group */
typedef struct mti_transport {
    int has_peers, are_threads;
    mt_status (*check)(mt_context *ctx, mt_comm *comm, const char *name);
    mt_status (*collective)(mt_context *ctx, mt_comm *comm, const mti_call *call);
    mt_status (*p2p)(mt_context *ctx, mt_comm *comm, const mti_call *call);
    mt_status (*enter)(mt_context *ctx, mt_comm *comm, const mti_call *call);
    void (*exit)(mt_comm *comm);
    mt_status (*split)(mt_comm *comm, int color, int key, mt_comm **out);
    void (*leave)(mt_comm *comm, const char *reason);
    void (*destroy)(mt_comm *comm);
} mti_transport;

/* What check mode does at these points of calls, on the thread of the rank. A status other than MT_SUCCESS refuses the
   call on this rank; the others then wait for it, as after any error. Hooks are also called in a pause
   (mti_checks_pause), and look at it themselves.
   allocated     mt_context_alloc gives out memory. If the hook refuses, `freed` follows
   freed         mt_context_free has freed it
   reused        mt_arena_alloc gives out memory, perhaps not for the first time
   collective    a collective begins; its arguments are valid
   p2p           the same for a send, a receive or both
   region        an f, g, scatter or gather begins. It makes y of x; `is` and `becomes` are their placements, R, r, c or
                 P as in mt_rule. y is empty where nothing is written. is_gradient: 1 if x is a gradient for certain
   ranks         the same for the blocks of some ranks, in the calls in chunks of sequence parallelism
   passed        the call `name`, a collective or region without "mt_", has passed the checks of this rank. Every rank
                 calls this hook here, so it may communicate
   close_device  the context is destroyed; the hook may use its device and free its memory
   destroy       the device is closed; the hook frees memory of the host */
typedef struct mti_hooks {
    mt_status (*allocated)(mt_context *ctx, const void *data, size_t bytes);
    void (*freed)(mt_context *ctx, const void *data, size_t bytes);
    void (*reused)(mt_context *ctx, const void *data, size_t bytes);
    mt_status (*collective)(mt_context *ctx, const mt_comm *comm, const mti_call *call);
    mt_status (*p2p)(mt_context *ctx, const mti_call *call);
    mt_status (*region)(mt_context *ctx, const mt_comm *comm, const char *where, char is, char becomes, int is_gradient,
                        const char *x_name, mt_tensor x, mt_tensor y);
    mt_status (*ranks)(mt_context *ctx, const mt_comm *comm, int gathers, const char *where, mt_tensor x, mt_tensor y,
                       int first, int ranks);
    mt_status (*passed)(mt_context *ctx, mt_comm *comm, const char *name);
    void (*close_device)(mt_context *ctx);
    void (*destroy)(mt_context *ctx);
} mti_hooks;

/* Calls a hook that returns a status: MTI_HOOK(ctx, p2p(ctx, call)). */
#define MTI_HOOK(ctx, call) ((ctx)->hooks ? (ctx)->hooks->call : MT_SUCCESS)

/* -- declarations of functions that are called before their section -- */

static mt_status mti_checker_create(mt_context *ctx, int check); /* src/check/hooks.c: sets ctx->hooks */

static mt_status mti_cuda_graph_launch(mt_context *ctx, const mti_call *call); /* graph.c */
static void mti_graph_forget(mt_context *ctx);
#if MT_HAS_CUDA
static void mti_cuda_drop(mt_context *ctx);
static void mti_graph_await_end(mt_context *ctx);
static mt_status mti_nccl_wait(mt_context *ctx);
static void mti_nccl_close(mt_context *ctx);
static void mti_nccl_forget(mt_context *ctx, const mt_comm *comm, const void *memory);
#endif
#if MTI_NCCL
static void mti_graphs_lose(mt_context *ctx); /* graph.c */
#endif
