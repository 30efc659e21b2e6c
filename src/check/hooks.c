/* ---- check mode begins and ends with a context ------------------------------------------------------------------- */

#pragma once
#include "moves.c"
#include "replicas.c"

static mt_status mti_replicas_create(mt_context *ctx) {
    ctx->checker->replicas = (mti_replicas *)mt_host_alloc(sizeof *ctx->checker->replicas);
    if (ctx->checker->replicas) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_create: no memory for the checker");
}

static void mti_replicas_destroy(mt_context *ctx) {
    mti_replicas *r = ctx->checker->replicas;
    int g;
    if (!r) return;
    for (g = 0; g < MTI_AXES; g++) mt_host_free(r->groups[g].list);
    for (g = 0; g < MTI_AXES; g++) mt_host_free(r->shares[g].list);
    mt_context_free(ctx, r->sums, MTI_REPLICA_SUMS * sizeof *r->sums);
    mt_host_free(r);
    ctx->checker->replicas = NULL;
}

static void mti_checker_destroy(mt_context *ctx) {
    mti_checker *c = ctx->checker;
    size_t i;
    for (i = 0; i < c->names.count; i++) mt_host_free(c->names.list[i].text);
    mt_host_free(c->names.list);
    mt_host_free(c->parameters.list);
    mt_host_free(c->written.list);
    mt_host_free(c->memory.list);
    mt_host_free(c->meant.list);
    mt_host_free(c->views.list);
    mt_host_free(c);
}

static const mti_hooks mti_check_hooks = {
    mti_memory_allocated, mti_memory_freed, mti_memory_reused,     mti_collective_check, mti_p2p_check,
    mti_region_check,     mti_ranks_check,  mti_collective_passed, mti_replicas_destroy, mti_checker_destroy};

static mt_status mti_checker_create(mt_context *ctx, int check) {
    ctx->checker = (mti_checker *)mt_host_alloc(sizeof *ctx->checker);
    if (!ctx->checker) return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_create: no memory for the checker");
    ctx->hooks = &mti_check_hooks;
    ctx->checker->strict = check != 0;
    return check == 2 && !mt_comm_is_meta(ctx->world) ? mti_replicas_create(ctx) : MT_SUCCESS;
}
