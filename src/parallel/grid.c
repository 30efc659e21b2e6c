/* ---- process grid ------------------------------------------------------------------------------------------------ */

#pragma once
#include "grid.h"
#include "options.c"
#include "system.h"
#include "../comm/communicator.h"
#include "../comm/hash.c"
#include "../ops/system.h"

/* The directions of the grid, the fastest first. */
enum { MTI_TP, MTI_CP, MTI_DP, MTI_PP, MTI_DIRECTIONS };

/* Writes the size of each direction to sizes, with the zeros of desc resolved. When they do not fit `world` ranks,
   writes the error message to text. */
static mt_status mti_grid_sizes(const mt_grid_desc *desc, int world, int sizes[MTI_DIRECTIONS], char *text,
                                size_t text_bytes) {
    static const char *const names[] = {"tp", "cp", "dp", "pp", "world_size"};
    const int given[] = {desc->tp, desc->cp, desc->dp, desc->pp, world};
    int64_t others = 1; /* ranks without those of dp; at most 2 * world, so that it does not overflow */
    int i;
    for (i = 0; i <= MTI_DIRECTIONS; i++) {
        int least = i == MTI_DIRECTIONS;
        if (given[i] >= least) continue;
        snprintf(text, text_bytes, "mt_grid: %s is %d, must be at least %d", names[i], given[i], least);
        return MT_ERR_ARGUMENT;
    }
    for (i = 0; i < MTI_DIRECTIONS; i++) {
        sizes[i] = given[i] ? given[i] : 1;
        if (i != MTI_DP && others <= world) others *= sizes[i];
    }
    if (!given[MTI_DP] && world % others == 0) sizes[MTI_DP] = (int)(world / others);
    if (others > world || others * sizes[MTI_DP] != world) {
        snprintf(text, text_bytes, "mt_grid: tp %d x cp %d x dp %d x pp %d is not %d ranks", sizes[MTI_TP],
                 sizes[MTI_CP], given[MTI_DP], sizes[MTI_PP], world);
        return MT_ERR_SHAPE;
    }
    return MT_SUCCESS;
}

/* Writes the place of `rank` in each direction to at. */
static void mti_grid_coordinates(const int sizes[MTI_DIRECTIONS], int rank, int at[MTI_DIRECTIONS]) {
    int i;
    for (i = 0; i < MTI_DIRECTIONS; i++) {
        at[i] = rank % sizes[i];
        rank /= sizes[i];
    }
}

/* The directions along which the ranks of a group lie: a bit for each. */
static unsigned mti_grid_along(mt_group group) {
    switch (group) {
    case MT_GROUP_TENSOR: return 1u << MTI_TP;
    case MT_GROUP_DATA: return 1u << MTI_DP;
    case MT_GROUP_PIPELINE:
    case MT_GROUP_EMBEDDING: return 1u << MTI_PP;
    case MT_GROUP_MODEL: return 1u << MTI_TP | 1u << MTI_PP;
    case MT_GROUP_CONTEXT: return 1u << MTI_CP;
    case MT_GROUP_DATA_CONTEXT: return 1u << MTI_DP | 1u << MTI_CP;
    }
    return 0;
}

static int mti_grid_end_stage(const int sizes[MTI_DIRECTIONS], const int at[MTI_DIRECTIONS]) {
    return at[MTI_PP] == 0 || at[MTI_PP] == sizes[MTI_PP] - 1;
}

/* Returns 1 when ranks a and b are in the same group of this kind. */
static int mti_grid_together(const int sizes[MTI_DIRECTIONS], mt_group group, int a, int b) {
    int x[MTI_DIRECTIONS], y[MTI_DIRECTIONS], i;
    mti_grid_coordinates(sizes, a, x);
    mti_grid_coordinates(sizes, b, y);
    for (i = 0; i < MTI_DIRECTIONS; i++)
        if (x[i] != y[i] && !(mti_grid_along(group) >> i & 1)) return 0;
    return group != MT_GROUP_EMBEDDING || (mti_grid_end_stage(sizes, x) && mti_grid_end_stage(sizes, y));
}

MT_API mt_status mt_grid_ranks(const mt_grid_desc *desc, int world_size, mt_group group, int rank, int *ranks,
                               int *count) {
    char text[160];
    int sizes[MTI_DIRECTIONS], r;
    if (!desc || !ranks || !count || group < MT_GROUP_TENSOR || group > MT_GROUP_DATA_CONTEXT) return MT_ERR_ARGUMENT;
    *count = 0;
    MT_TRY(mti_grid_sizes(desc, world_size, sizes, text, sizeof text));
    if (rank < 0 || rank >= world_size) return MT_ERR_ARGUMENT;
    for (r = 0; r < world_size; r++)
        if (mti_grid_together(sizes, group, rank, r)) ranks[(*count)++] = r;
    return MT_SUCCESS;
}

/* Creates one communicator of the grid: with mt_comm_split_for, or with mt_comm_create_meta on a meta world. *out stays
   NULL when this rank is in no group of this kind. */
static mt_status mti_grid_group(mt_comm *world, const int sizes[MTI_DIRECTIONS], mt_group group, const char *name,
                                mt_comm **out) {
    mt_stream stream = group == MT_GROUP_TENSOR || group == MT_GROUP_CONTEXT      ? MT_STREAM_SECOND
                       : group == MT_GROUP_DATA || group == MT_GROUP_DATA_CONTEXT ? MT_STREAM_THIRD
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

static mt_status mti_grid_groups(mt_grid *grid, const int sizes[MTI_DIRECTIONS]) {
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_TENSOR, "tensor", &grid->tp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_DATA, "data", &grid->dp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_PIPELINE, "pipeline", &grid->pp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_MODEL, "model", &grid->model));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_EMBEDDING, "embedding", &grid->embedding));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_CONTEXT, "context", &grid->cp));
    grid->dp_cp = grid->dp;
    if (grid->cp_size == 1) return MT_SUCCESS;
    grid->dp_cp = NULL;
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_DATA_CONTEXT, "data x context", &grid->dp_cp));
    mt_comm_set_factors(grid->dp_cp, grid->dp, grid->cp);
    return MT_SUCCESS;
}

MT_API mt_status mt_grid_create(mt_comm *world, const mt_grid_desc *desc, mt_grid *out) {
    static const mt_grid_desc defaults = {0, 0, 0, 0};
    char text[160];
    int sizes[MTI_DIRECTIONS], at[MTI_DIRECTIONS];
    mt_status status;
    if (!world) return MT_ERR_ARGUMENT;
    if (!out) return mt_comm_fail(world, MT_ERR_ARGUMENT, "mt_grid_create: out is NULL");
    memset(out, 0, sizeof *out);
    status = mti_grid_sizes(desc ? desc : &defaults, mt_comm_size(world), sizes, text, sizeof text);
    if (status != MT_SUCCESS) return mt_comm_fail(world, status, text);
    mti_grid_coordinates(sizes, mt_comm_rank(world), at);
    out->world = world;
    out->tp_size = sizes[MTI_TP];
    out->dp_size = sizes[MTI_DP];
    out->pp_size = sizes[MTI_PP];
    out->cp_size = sizes[MTI_CP];
    out->tp_rank = at[MTI_TP];
    out->dp_rank = at[MTI_DP];
    out->pp_rank = at[MTI_PP];
    out->cp_rank = at[MTI_CP];
    status = mti_grid_groups(out, sizes);
    if (status != MT_SUCCESS) mt_grid_destroy(out);
    return status;
}

MT_API void mt_grid_destroy(mt_grid *grid) {
    if (!grid) return;
    if (grid->dp_cp != grid->dp) mt_comm_destroy(grid->dp_cp);
    mt_comm_destroy(grid->cp);
    mt_comm_destroy(grid->embedding);
    mt_comm_destroy(grid->model);
    mt_comm_destroy(grid->pp);
    mt_comm_destroy(grid->dp);
    mt_comm_destroy(grid->tp);
    memset(grid, 0, sizeof *grid);
}

/* Returns the number of chunks of a sequence that a rank has. */
static int mti_ring_halves(const mt_context_parallel_desc *context, int size) {
    return size == 1 || (context && context->contiguous) ? 1 : 2;
}

/* The chunks of each sequence that a context rank has, one after the other: `count` of `chunk` tokens. In invariant
   mode they are those of `own` virtual ranks from `first` on. */
typedef struct mti_cp_layout {
    int first, own, ranks, halves, count; /* ranks: of all context ranks together; halves: chunks of a virtual rank */
    int64_t chunk;
} mti_cp_layout;

/* rank must be less than size, which must divide context->invariant if that is not 0. */
static mti_cp_layout mti_cp_layout_of(const mt_context_parallel_desc *context, int rank, int size, int64_t seq) {
    mti_cp_layout l;
    l.ranks = context && context->invariant > size ? context->invariant : size;
    l.own = l.ranks / size;
    l.first = rank * l.own;
    l.halves = mti_ring_halves(context, l.ranks);
    l.count = l.halves * l.own;
    l.chunk = seq / l.halves / l.ranks;
    return l;
}

/* Checks what the layout of `size` context ranks needs in invariant mode. */
static mt_status mti_cp_layout_check(mt_context *ctx, const char *function, const mt_context_parallel_desc *context,
                                     int size) {
    const int ranks = context ? context->invariant : 0;
    if (ranks == 0) return MT_SUCCESS;
    if (!mti_is_context_ranks(ranks))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: context.invariant is %d, must be 0 or a power of two up to 1024",
                       function, ranks);
    if (!mt_context_invariant(ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: context.invariant is %d, must be 0 without mt_context_desc.invariant",
                       function, ranks);
    if (context->whole_keys && ranks > 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: context.whole_keys must be 0 with context.invariant %d", function,
                       ranks);
    if (ranks % size == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %d virtual context ranks (context.invariant) cannot be split over %d",
                   function, ranks, size);
}

/* The first token of chunk i of the rank in its sequence. */
static int64_t mti_cp_layout_token(const mti_cp_layout *l, int i) {
    const int64_t rank = l->first + i / l->halves;
    return (i % l->halves ? 2 * (int64_t)l->ranks - 1 - rank : rank) * l->chunk;
}

MT_API int64_t mt_context_parallel_token(const mt_context_parallel_desc *context, int rank, int size, int64_t batch,
                                         int64_t seq, int64_t row) {
    mti_cp_layout l;
    if (rank < 0 || rank >= size || batch < 1 || seq < 1 || seq > INT64_MAX / batch) return -1;
    if (context && (!mti_is_context_ranks(context->invariant) || context->invariant % size != 0)) return -1;
    l = mti_cp_layout_of(context, rank, size, seq);
    if (l.chunk * l.halves * l.ranks != seq || row < 0 || row >= batch * l.count * l.chunk) return -1;
    return row / l.chunk % batch * seq + mti_cp_layout_token(&l, (int)(row / l.chunk / batch)) + row % l.chunk;
}
