/* ---- hash log ---------------------------------------------------------------------------------------------------- */

#pragma once
#include "hash_log.h"
#include "grid.c"
#include "scatter.c"

#define MTI_LOG_NAME (MT_NAME_MAX + 32)

/* A flush exchanges the lines of the stages in rounds of this many lines, so that its scratch memory does not depend on
   the number of lines. */
#define MTI_LOG_ROUND 64

typedef struct mti_log_entry {
    char name[MTI_LOG_NAME];
    uint64_t hash;
    /* split[axis], for the axes tensor and data: 1 when ranks have different parts of the tensor, 0 when they have
       copies */
    int split[2], differs;
    int order; /* position among the lines of all stages, see mti_log_lines */
} mti_log_entry;

/* The rows of mt_hash_log_parts. */
typedef struct mti_log_rows {
    mt_context_parallel_desc context;
    int rank, size; /* size 0 or 1: the rows are tokens one after the other */
    int64_t sequences, seq;
} mti_log_rows;

struct mt_hash_log {
    mt_context *ctx;
    const mt_grid *grid;
    mti_log_entry *entries;
    /* last: index of the entry that was found last. Steps repeat, so the next search starts after it */
    int count, capacity, last;
    int64_t first_token; /* of the current call, in the global batch */
    mti_log_rows rows;
    int values; /* calls of mt_hash_log_value so far; every stage makes all of them */
    int paused;
};

MT_API mt_status mt_hash_log_create(mt_context *ctx, const mt_grid *grid, mt_hash_log **out) {
    mti_parallel *p;
    void *memory;
    if (out) *out = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!grid || !grid->tp || !out || mti_hash_log_of(ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_create: %s",
                       !out                   ? "out is NULL"
                       : mti_hash_log_of(ctx) ? "the context has a hash log"
                                              : "the grid was not created");
    MT_TRY(mti_parallel_open(ctx, &p));
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    *out = p->hash_log = (mt_hash_log *)memory;
    (*out)->ctx = ctx;
    (*out)->grid = grid;
    return MT_SUCCESS;
}

MT_API void mt_hash_log_destroy(mt_hash_log *log) {
    if (!log) return;
    mti_parallel_of(log->ctx)->hash_log = NULL;
    mt_host_free(log->entries);
    mt_host_free(log);
}

/* Finds the entry of this name, or adds one. */
static mt_status mti_log_entry_of(mt_context *ctx, mt_hash_log *log, const char *name, mti_log_entry **out) {
    int i;
    for (i = 1; i <= log->count; i++) {
        int at = (log->last + i) % log->count;
        if (strcmp(log->entries[at].name, name) != 0) continue;
        log->last = at;
        *out = &log->entries[at];
        return MT_SUCCESS;
    }
    if (log->count == log->capacity) {
        int capacity = log->capacity ? 2 * log->capacity : 256;
        void *memory;
        MT_TRY(mti_host_new(ctx, (size_t)capacity * sizeof **out, &memory));
        if (log->entries) memcpy(memory, log->entries, (size_t)log->count * sizeof **out);
        mt_host_free(log->entries);
        log->entries = (mti_log_entry *)memory;
        log->capacity = capacity;
    }
    log->last = log->count++;
    *out = &log->entries[log->last];
    memset(*out, 0, sizeof **out);
    snprintf((*out)->name, sizeof(*out)->name, "%s", name);
    return MT_SUCCESS;
}

MT_API void mt_hash_log_tokens(mt_context *ctx, int64_t first_token) {
    mt_hash_log *log = mti_hash_log_of(ctx);
    if (!log) return;
    log->first_token = first_token > 0 ? first_token : 0;
    memset(&log->rows, 0, sizeof log->rows);
    log->rows.size = 1;
}

MT_API void mt_hash_log_parts(mt_context *ctx, const mt_comm *cp, const mt_context_parallel_desc *context,
                              int64_t sequences, int64_t seq) {
    mt_hash_log *log = mti_hash_log_of(ctx);
    if (!log) return;
    memset(&log->rows, 0, sizeof log->rows);
    if (context) log->rows.context = *context;
    log->rows.rank = mt_comm_rank(cp);
    log->rows.size = mt_comm_size(cp);
    log->rows.sequences = sequences;
    log->rows.seq = seq;
}

/* Returns how many rows from `row` to `end` are tokens one after the other. *token becomes the number of the first one
   in the call; -1: they count nothing. */
static int64_t mti_log_run(const mti_log_rows *r, int64_t row, int64_t end, int64_t *token) {
    int64_t chunk;
    *token = row;
    if (r->size <= 1 && r->context.invariant <= 1) return end - row;
    *token = mt_context_parallel_token(&r->context, r->rank, r->size, r->sequences, r->seq, row);
    if (*token < 0) return end - row;
    chunk = mti_cp_layout_of(&r->context, r->rank, r->size, r->seq).chunk;
    return mt_min(end - row, chunk - row % chunk);
}

/* Adds the hash of the rows of t, all of which, or some columns of which, the rank has. The first one is row `row` of
   the rank. */
static mt_status mti_log_add(mt_context *ctx, const mt_hash_log *log, mt_tensor t, int64_t row, const mt_param *cols,
                             uint64_t *hash) {
    int64_t at, count, token, i;
    mti_shard_run run;
    for (at = 0; at < t.rows; at += count) {
        const mt_tensor x = mt_tensor_rows(t, at, count = mti_log_run(&log->rows, row + at, row + t.rows, &token));
        if (token < 0) continue;
        token += log->first_token;
        if (!cols) MT_TRY(mt_hash(ctx, x, token, 0, t.cols, hash));
        for (i = 0; cols && mti_run_next(cols, cols->tp_rank, &i, &run);)
            if (run.counts)
                MT_TRY(mt_hash(ctx, mti_run_cols(cols, x, run), token, run.global, mti_split_dimension(cols), hash));
    }
    return MT_SUCCESS;
}

MT_API void mt_hash_log_pause(mt_context *ctx, int paused) {
    mt_hash_log *log = mti_hash_log_of(ctx);
    if (log) log->paused = paused != 0;
}

MT_API mt_status mt_hash_log_activation(mt_context *ctx, const char *name, int up, const char *what, mt_tensor t,
                                        int sequence_parallel, const mt_param *cols) {
    mt_hash_log *log = ctx ? mti_hash_log_of(ctx) : NULL;
    mti_log_entry *entry;
    char full[MTI_LOG_NAME];
    int length, row_split;
    int64_t row;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!name || !what)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_activation: %s is NULL", name ? "what" : "name");
    if (!log || log->paused || !t.data || !name[0]) return MT_SUCCESS;
    MT_TRY(mt_tensor_check(ctx, "mt_hash_log_activation", what, t, MT_ARG_ANY, t.rows, t.cols));
    if (cols && t.cols != cols->local_features)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "mt_hash_log_activation: %s of '%s' has %lld columns, '%s' has %lld on a rank", what, name,
                       (long long)t.cols, cols->name, (long long)cols->local_features);
    row_split = sequence_parallel && log->grid->tp_size > 1;
    row = row_split ? mt_size_mul(log->grid->tp_rank, t.rows) : 0;
    if (row < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_hash_log_activation: %s of '%s' has %lld rows, too many for %d ranks",
                       what, name, (long long)t.rows, log->grid->tp_size);
    if (log->first_token > INT64_MAX - row)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_tokens: first_token is %lld, and its row %lld has no number",
                       (long long)log->first_token, (long long)row);
    for (length = (int)strlen(name); length > 0 && up > 0;) up -= name[--length] == '.';
    snprintf(full, sizeof full, "%.*s.%s", length, name, what);
    MT_TRY(mti_log_entry_of(ctx, log, full, &entry));
    entry->order = strstr(what, "_grad") != NULL;
    entry->split[0] = cols != NULL || row_split;
    entry->split[1] = 1;
    return mti_log_add(ctx, log, t, row, cols, &entry->hash);
}

static mt_status mti_log_check(mt_context *ctx, const char *function, const mt_hash_log *log) {
    if (!ctx) return MT_ERR_ARGUMENT;
    return log ? MT_SUCCESS : mt_fail(ctx, MT_ERR_ARGUMENT, "%s: log is NULL", function);
}

MT_API mt_status mt_hash_log_shard(mt_context *ctx, mt_hash_log *log, const mt_param *param, const char *suffix,
                                   mt_tensor shard) {
    char name[MTI_LOG_NAME];
    mti_log_entry *entry;
    mti_shard_run run;
    int64_t i = 0;
    MT_TRY(mti_shard_check(ctx, "mt_hash_log_shard", param, shard, "log", log));
    snprintf(name, sizeof name, "%s%.31s", param->name, suffix ? suffix : "");
    MT_TRY(mti_log_entry_of(ctx, log, name, &entry));
    entry->split[0] = param->desc.placement != MT_REPLICATED;
    entry->order = 2 + 2 * log->values;
    while (mti_run_next(param, param->tp_rank, &i, &run)) {
        int by_cols = param->desc.placement == MT_SPLIT_COLS;
        if (!run.counts) continue;
        MT_TRY(mt_hash(ctx, mti_run_view(param, shard, run), by_cols ? 0 : run.global, by_cols ? run.global : 0,
                       param->desc.cols, &entry->hash));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_hash_log_value(mt_context *ctx, mt_hash_log *log, const char *name, float value) {
    mti_log_entry *entry;
    uint32_t bits;
    MT_TRY(mti_log_check(ctx, "mt_hash_log_value", log));
    if (!name) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_value: name is NULL");
    MT_TRY(mti_log_entry_of(ctx, log, name, &entry));
    entry->order = 2 + 2 * ++log->values;
    memcpy(&bits, &value, sizeof bits);
    entry->hash += mt_hash_element(0, bits);
    return MT_SUCCESS;
}

/* What a rank sends of an entry. */
typedef struct mti_log_part {
    uint64_t hash;
    uint64_t differs;
} mti_log_part;

/* Joins the hashes that the ranks of one axis have of an entry. Hashes of parts are added. Hashes of copies should be
   equal; when they are not, sets differs, and the result is a hash of all of them. */
static void mti_log_join_entry(mti_log_entry *entry, int axis, const mti_log_part *parts, int ranks, int stride) {
    uint64_t sum = parts[0].hash, mixed = sum;
    int r, same = 1;
    for (r = 0; r < ranks; r++) entry->differs |= parts[r * stride].differs != 0;
    for (r = 1; r < ranks; r++) {
        uint64_t h = parts[r * stride].hash;
        same &= h == parts[0].hash;
        sum += h;
        mixed = mt_hash_element(mixed + h, (uint32_t)r);
    }
    entry->hash = entry->split[axis] ? sum : same ? parts[0].hash : mixed;
    entry->differs |= !entry->split[axis] && !same;
}

/* Gathers the hashes of all entries from all ranks of comm. */
static mt_status mti_log_exchange(mt_context *ctx, mt_hash_log *log, mt_comm *comm, mti_log_part *parts) {
    int64_t words = log->count * (int64_t)(sizeof *parts / sizeof(int32_t));
    mt_tensor own, all;
    int i;
    for (i = 0; i < log->count; i++) {
        parts[i].hash = log->entries[i].hash;
        parts[i].differs = (uint64_t)log->entries[i].differs;
    }
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, words, &own));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, mt_comm_size(comm), words, &all));
    MT_TRY(mt_upload(ctx, parts, own));
    MT_TRY(mt_all_gather(ctx, comm, own.data, all.data, (size_t)words, MT_I32));
    return mt_download(ctx, all, parts);
}

/* Joins the hashes of all entries over one axis. comm is the group of that axis. */
static mt_status mti_log_join(mt_context *ctx, mt_hash_log *log, mt_comm *comm, int axis) {
    int ranks = mt_comm_size(comm), i;
    mti_log_part *parts;
    void *memory;
    mt_status status;
    MT_TRY(mti_host_new(ctx, (size_t)log->count * (size_t)ranks * sizeof *parts, &memory));
    parts = (mti_log_part *)memory;
    status = mti_log_exchange(ctx, log, comm, parts);
    for (i = 0; status == MT_SUCCESS && i < log->count; i++)
        mti_log_join_entry(&log->entries[i], axis, parts + i, ranks, log->count);
    mt_host_free(memory);
    return status;
}

/* Gathers the entries of all stages, with space for `each` entries of a stage. Unused entries have an empty name. */
static mt_status mti_log_gather(mt_context *ctx, const mt_hash_log *log, int each, mti_log_entry *all) {
    int64_t words = MTI_LOG_ROUND * (int64_t)(sizeof *all / sizeof(int32_t));
    int rank = log->grid->pp_rank, stages = log->grid->pp_size, first, stage;
    mt_tensor own, every;
    memcpy(all + rank * each, log->entries, (size_t)log->count * sizeof *all);
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, words, &own));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, stages, words, &every));
    for (first = 0; first < each; first += MTI_LOG_ROUND) {
        MT_TRY(mt_upload(ctx, all + rank * each + first, own));
        MT_TRY(mt_all_gather(ctx, log->grid->pp, own.data, every.data, (size_t)words, MT_I32));
        for (stage = 0; stage < stages; stage++)
            MT_TRY(mt_download(ctx, mt_tensor_rows(every, stage, 1), all + stage * each + first));
    }
    return MT_SUCCESS;
}

/* Returns 1 when an entry before e, of another stage, is of the same tensor. When the two hashes are not equal, sets
   differs in that entry. */
static int mti_log_is_copy(mti_log_entry *all, mti_log_entry *e) {
    mti_log_entry *other;
    for (other = all; other < e; other++) {
        if (other->order != e->order || strcmp(other->name, e->name) != 0) continue;
        other->differs |= e->differs || other->hash != e->hash;
        return 1;
    }
    return 0;
}

/* Calls `line` in the order in which one stage with all layers would write the lines. What is computed in forward comes
   first, stage by stage. What is computed in backward follows, with the stages in reverse. Last come the lines that a
   loop adds: those between two calls of mt_hash_log_value are again in order of the stages. */
static void mti_log_lines(mti_log_entry *all, int stages, int each, mt_hash_line line, void *user) {
    int order, last = 0, i;
    for (i = stages * each; i-- > 0;) {
        if (all[i].name[0] && mti_log_is_copy(all, &all[i])) all[i].name[0] = '\0';
        last = all[i].order > last ? all[i].order : last;
    }
    for (order = 0; order <= last; order++)
        for (i = 0; i < stages * each; i++) {
            const mti_log_entry *e = &all[(order == 1 ? stages - 1 - i / each : i / each) * each + i % each];
            if (e->name[0] && e->order == order) line(user, e->name, e->hash, e->differs);
        }
}

/* Gathers the entries of all stages and calls `line` for each tensor. */
static mt_status mti_log_stages(mt_context *ctx, mt_hash_log *log, mt_hash_line line, void *user) {
    int stages = log->grid->pp_size, each = log->count;
    mt_tensor most;
    void *memory;
    mt_status status;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, 1, &most));
    MT_TRY(mt_upload(ctx, &each, most));
    MT_TRY(mt_all_reduce(ctx, log->grid->pp, most.data, most.data, 1, MT_I32, MT_MAX));
    MT_TRY(mt_download(ctx, most, &each));
    if (each < log->count) each = log->count; /* MT_DEVICE_META downloads 0 */
    each = (int)mt_round_up(each, MTI_LOG_ROUND);
    MT_TRY(mti_host_new(ctx, (size_t)stages * (size_t)each * sizeof(mti_log_entry), &memory));
    status = mti_log_gather(ctx, log, each, (mti_log_entry *)memory);
    if (status == MT_SUCCESS) mti_log_lines((mti_log_entry *)memory, stages, each, line, user);
    mt_host_free(memory);
    return status;
}

MT_API mt_status mt_hash_log_flush(mt_context *ctx, mt_hash_log *log, mt_hash_line line, void *user) {
    size_t mark;
    mt_status status;
    int i;
    MT_TRY(mti_log_check(ctx, "mt_hash_log_flush", log));
    if (!line) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_flush: line is NULL");
    if (log->count == 0) return MT_SUCCESS;
    mark = mt_arena_mark(ctx);
    status = mti_log_join(ctx, log, log->grid->tp, 0);
    if (status == MT_SUCCESS) status = mti_log_join(ctx, log, log->grid->dp_cp, 1);
    if (status == MT_SUCCESS && log->grid->pp_size > 1) status = mti_log_stages(ctx, log, line, user);
    else
        for (i = 0; status == MT_SUCCESS && i < log->count; i++)
            line(user, log->entries[i].name, log->entries[i].hash, log->entries[i].differs);
    mt_arena_release(ctx, mark);
    log->count = log->last = log->values = 0;
    return status;
}
