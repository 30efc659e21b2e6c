/* ---- ranks that do not communicate: a group of one, meta, and processes that nothing connects -------------------- */

#pragma once
#include "collectives.c"

static mt_status mti_no_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    return (void)ctx, (void)comm, (void)call, MT_SUCCESS;
}

static void mti_no_leave(mt_comm *comm, const char *reason) { (void)comm, (void)reason; }
static void mti_no_destroy(mt_comm *comm) { (void)comm; }

/* -- a group of one -- */

static mt_status mti_alone_split(mt_comm *comm, int color, int key, mt_comm **out) {
    char name[32];
    (void)key;
    if (snprintf(name, sizeof name, "%s/%d", comm->name, color) < 0) name[0] = '\0';
    if (color >= 0) *out = mti_comm_new(comm->transport, 0, 1, name);
    return MT_SUCCESS;
}

static const mti_transport mti_alone = {0,    0,    mti_no_check,    mti_alone_call, mti_no_call,
                                        NULL, NULL, mti_alone_split, mti_no_leave,   mti_no_destroy};

/* -- a meta communicator: no data and no peers -- */

static mt_status mti_meta_check(mt_context *ctx, mt_comm *comm, const char *name) {
    if (ctx->device == MT_DEVICE_META) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_ARGUMENT,
                      "mt_%s: \"%s\" (%d ranks) is a meta communicator, the context is on device %d, not on "
                      "MT_DEVICE_META",
                      name, comm->name, comm->size, (int)ctx->device);
}

static mt_status mti_meta_split(mt_comm *comm, int color, int key, mt_comm **out) {
    (void)color, (void)key, (void)out;
    return mti_refuse(NULL, comm, MT_ERR_ARGUMENT,
                      "mt_comm_split: \"%s\" is a meta communicator, which has no peers; use mt_comm_create_meta",
                      comm->name);
}

static const mti_transport mti_meta = {0,    0,    mti_meta_check, mti_no_call,  mti_no_call,
                                       NULL, NULL, mti_meta_split, mti_no_leave, mti_no_destroy};

MT_API mt_status mt_comm_create_meta(int size, int rank, mt_comm **out) {
    if (!out) return MT_ERR_ARGUMENT;
    *out = NULL;
    if (size < 1 || rank < 0 || rank >= size) return MT_ERR_ARGUMENT;
    *out = mti_comm_new(&mti_meta, rank, size, "meta");
    mt_comm_set_span(*out, size - 1);
    return *out ? MT_SUCCESS : MT_ERR_MEMORY;
}

MT_API int mt_comm_is_meta(const mt_comm *comm) { return comm && comm->transport == &mti_meta; }

/* -- processes of mt_world_from_env without MPI, which are not connected -- */

/* Refuses a call on processes that are not connected, and says how to connect them. device: the context's device; -1:
   no context */
static mt_status mti_refuse_apart(mt_context *ctx, mt_comm *comm, const char *function, int device) {
    const char *how = "call mt_comm_create_for with a context on MT_DEVICE_CUDA, or, for ranks on CPUs, compile the "
                      "implementation with -DMT_USE_MPI and start them with mpirun or srun";
    if (device == (int)MT_DEVICE_CUDA)
        how = MTI_NCCL ? "call mt_comm_create_for, and use what it gives"
                       : "compile the implementation with -DMT_USE_NCCL, link with -lnccl, and call mt_comm_create_for";
    else if (device >= 0)
        how = "compile the implementation with -DMT_USE_MPI and start them with mpirun or srun, or use MT_DEVICE_CUDA";
    return mti_refuse(ctx, comm, MT_ERR_UNSUPPORTED,
                      "mt_%s: the %d ranks of \"%s\" are processes of %s, and nothing connects them yet: %s", function,
                      comm->size, comm->name, comm->launcher, how);
}

static mt_status mti_apart_check(mt_context *ctx, mt_comm *comm, const char *name) {
    MT_TRY(mti_peers_check(ctx, comm, name));
    return mti_refuse_apart(ctx, comm, name, (int)ctx->device);
}

static mt_status mti_apart_split(mt_comm *comm, int color, int key, mt_comm **out) {
    (void)color, (void)key, (void)out;
    return mti_refuse_apart(NULL, comm, "comm_split", -1);
}

static const mti_transport mti_apart = {1,    0,    mti_apart_check, mti_no_call,  mti_no_call,
                                        NULL, NULL, mti_apart_split, mti_no_leave, mti_no_destroy};
