/* ---- process grid ------------------------------------------------------------------------------------------------ */

#pragma once
#include "grid.h"
#include "system.h"
#include "../comm/communicator.h"
#include "../comm/hash.c"
#include "../ops/system.h"

/* Writes the tensor, data and pipeline sizes to sizes, with the zeros of desc resolved. When they do not fit `world`
   ranks, writes the error message to text. */
static mt_status mti_grid_sizes(const mt_grid_desc *desc, int world, int sizes[3], char *text, size_t text_bytes) {
    int tp = desc->tp ? desc->tp : 1, pipeline = desc->pp ? desc->pp : 1, data = desc->dp;
    int64_t model = (int64_t)tp * pipeline;
    const char *const names[] = {"tp", "dp", "pp", "world_size"};
    const int values[] = {desc->tp, desc->dp, desc->pp, world};
    int i;
    for (i = 0; i < 4; i++) {
        int least = i == 3;
        if (values[i] >= least) continue;
        snprintf(text, text_bytes, "mt_grid: %s is %d, must be at least %d", names[i], values[i], least);
        return MT_ERR_ARGUMENT;
    }
    if (!data && world % model == 0) data = (int)(world / model);
    if (!data || model > world || model * data != world) {
        snprintf(text, text_bytes, "mt_grid: tp %d x dp %d x pp %d is not %d ranks", tp, data, pipeline, world);
        return MT_ERR_SHAPE;
    }
    sizes[0] = tp;
    sizes[1] = data;
    sizes[2] = pipeline;
    return MT_SUCCESS;
}

/* Writes the tensor, data and pipeline rank of `rank` to at. */
static void mti_grid_coordinates(const int sizes[3], int rank, int at[3]) {
    at[0] = rank % sizes[0];
    at[1] = rank / sizes[0] % sizes[1];
    at[2] = rank / sizes[0] / sizes[1];
}

static int mti_grid_end_stage(const int sizes[3], const int at[3]) { return at[2] == 0 || at[2] == sizes[2] - 1; }

/* Returns 1 when ranks a and b are in the same group of this kind. */
static int mti_grid_together(const int sizes[3], mt_group group, int a, int b) {
    int x[3], y[3];
    mti_grid_coordinates(sizes, a, x);
    mti_grid_coordinates(sizes, b, y);
    switch (group) {
    case MT_GROUP_TENSOR: return x[1] == y[1] && x[2] == y[2];
    case MT_GROUP_DATA: return x[0] == y[0] && x[2] == y[2];
    case MT_GROUP_PIPELINE: return x[0] == y[0] && x[1] == y[1];
    case MT_GROUP_MODEL: return x[1] == y[1];
    case MT_GROUP_EMBEDDING:
        return x[0] == y[0] && x[1] == y[1] && mti_grid_end_stage(sizes, x) && mti_grid_end_stage(sizes, y);
    }
    return 0;
}

MT_API mt_status mt_grid_ranks(const mt_grid_desc *desc, int world_size, mt_group group, int rank, int *ranks,
                               int *count) {
    char text[160];
    int sizes[3], r;
    if (!desc || !ranks || !count || group < MT_GROUP_TENSOR || group > MT_GROUP_EMBEDDING) return MT_ERR_ARGUMENT;
    *count = 0;
    MT_TRY(mti_grid_sizes(desc, world_size, sizes, text, sizeof text));
    if (rank < 0 || rank >= world_size) return MT_ERR_ARGUMENT;
    for (r = 0; r < world_size; r++)
        if (mti_grid_together(sizes, group, rank, r)) ranks[(*count)++] = r;
    return MT_SUCCESS;
}

/* Creates one communicator of the grid: with mt_comm_split_for, or with mt_comm_create_meta on a meta world. *out stays
   NULL when this rank is in no group of this kind. */
static mt_status mti_grid_group(mt_comm *world, const int sizes[3], mt_group group, const char *name, mt_comm **out) {
    mt_stream stream = group == MT_GROUP_TENSOR ? MT_STREAM_SECOND
                       : group == MT_GROUP_DATA ? MT_STREAM_THIRD
                                                : MT_STREAM_NONE;
    int rank = mt_comm_rank(world), first = -1, last = -1, size = 0, index = 0, r;
    for (r = 0; r < mt_comm_size(world); r++) {
        if (!mti_grid_together(sizes, group, rank, r)) continue;
        if (first < 0) first = r;
        if (r < rank) index++;
        last = r;
        size++;
    }
    if (!mt_comm_is_meta(world)) MT_TRY(mt_comm_split_for(world, first, rank, stream, out));
    else if (size > 0) MT_TRY(mt_comm_create_meta(size, index, out));
    if (size > 1) mt_comm_set_span(*out, last - first);
    if (*out) mt_comm_set_name(*out, name);
    return MT_SUCCESS;
}

static mt_status mti_grid_groups(mt_grid *grid, const int sizes[3]) {
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_TENSOR, "tensor", &grid->tp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_DATA, "data", &grid->dp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_PIPELINE, "pipeline", &grid->pp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_MODEL, "model", &grid->model));
    return mti_grid_group(grid->world, sizes, MT_GROUP_EMBEDDING, "embedding", &grid->embedding);
}

MT_API mt_status mt_grid_create(mt_comm *world, const mt_grid_desc *desc, mt_grid *out) {
    static const mt_grid_desc defaults = {0, 0, 0};
    char text[160];
    int sizes[3], at[3];
    mt_status status;
    if (!world) return MT_ERR_ARGUMENT;
    if (!out) return mt_comm_fail(world, MT_ERR_ARGUMENT, "mt_grid_create: out is NULL");
    memset(out, 0, sizeof *out);
    status = mti_grid_sizes(desc ? desc : &defaults, mt_comm_size(world), sizes, text, sizeof text);
    if (status != MT_SUCCESS) return mt_comm_fail(world, status, text);
    mti_grid_coordinates(sizes, mt_comm_rank(world), at);
    out->world = world;
    out->tp_size = sizes[0];
    out->dp_size = sizes[1];
    out->pp_size = sizes[2];
    out->tp_rank = at[0];
    out->dp_rank = at[1];
    out->pp_rank = at[2];
    status = mti_grid_groups(out, sizes);
    if (status != MT_SUCCESS) mt_grid_destroy(out);
    return status;
}

MT_API void mt_grid_destroy(mt_grid *grid) {
    if (!grid) return;
    mt_comm_destroy(grid->embedding);
    mt_comm_destroy(grid->model);
    mt_comm_destroy(grid->pp);
    mt_comm_destroy(grid->dp);
    mt_comm_destroy(grid->tp);
    memset(grid, 0, sizeof *grid);
}
