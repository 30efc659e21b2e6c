/* ---- the ranks compare their settings ---------------------------------------------------------------------------- */

#pragma once
#include "compare.h"
#include "context.c"

#define MTI_COMPARED_CHUNK ((size_t)1024)

/* What each rank sends to all others: a hash of its settings, and its group. */
typedef struct mti_compared {
    uint64_t hash;
    int64_t group;
} mti_compared;

/* The settings of a rank in one block of memory: name, NUL, value, NUL, ... */
typedef struct mti_compared_text {
    char *data;
    uint64_t bytes;
} mti_compared_text;

/* Returns data == NULL when out of memory. */
static mti_compared_text mti_compared_write(const mt_setting *settings, int count) {
    mti_compared_text t;
    size_t n;
    int i, value;
    t.bytes = 0;
    for (i = 0; i < count; i++) t.bytes += strlen(settings[i].name) + strlen(settings[i].value) + 2;
    t.data = (char *)mt_host_alloc((size_t)t.bytes + 1);
    t.bytes = 0;
    for (i = 0; t.data && i < 2 * count; i++) {
        value = i % 2;
        n = strlen(value ? settings[i / 2].value : settings[i / 2].name) + 1;
        memcpy(t.data + t.bytes, value ? settings[i / 2].value : settings[i / 2].name, n);
        t.bytes += n;
    }
    return t;
}

/* FNV-1a. */
static uint64_t mti_compared_hash(const mti_compared_text *t) {
    uint64_t h = 14695981039346656037u, i;
    for (i = 0; i < t->bytes; i++) h = (h ^ (uint64_t)(unsigned char)t->data[i]) * 1099511628211u;
    return h;
}

/* Returns the string at offset *at, and advances *at to the next one; NULL at the end. */
static const char *mti_compared_next(const mti_compared_text *t, uint64_t *at) {
    const char *s = t->data + *at;
    if (*at >= t->bytes) return NULL;
    *at += strlen(s) + 1;
    return s;
}

/* Begins calls that move bytes of the host, through *space on the device. On MT_DEVICE_META *space is in the host. */
static mt_status mti_space_begin(mt_context *ctx, size_t bytes, void **space) {
    if (ctx->device != MT_DEVICE_META) return mt_context_alloc(ctx, bytes, space);
    *space = mt_host_alloc(bytes);
    if (!*space) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for what %zu bytes of ranks are compared in", bytes);
    ctx->compares++;
    return MT_SUCCESS;
}

/* space: of mti_space_begin; NULL if that has failed */
static void mti_space_end(mt_context *ctx, void *space, size_t bytes) {
    if (ctx->device != MT_DEVICE_META) {
        mt_context_free(ctx, space, bytes); /* waits for copies that still run */
        return;
    }
    if (space) ctx->compares--;
    mt_host_free(space);
}

/* Copies from the device to the host, after the earlier collectives are done. */
static mt_status mti_compared_fetch(mt_context *ctx, void *to, const void *from, size_t bytes) {
    MT_TRY(mti_synchronize(ctx)); /* a copy to pageable memory would wait without a timeout */
    MT_TRY(mti_bytes_copy(ctx, to, from, bytes));
    return mti_synchronize(ctx);
}

/* Broadcasts `bytes` of host memory from rank `root`, through `space` [MTI_COMPARED_CHUNK] on the device. */
static mt_status mti_compared_broadcast(mt_context *ctx, mt_comm *comm, int root, void *data, uint64_t bytes,
                                        void *space) {
    uint64_t at, n;
    for (at = 0; at < bytes; at += n) {
        n = bytes - at < MTI_COMPARED_CHUNK ? bytes - at : MTI_COMPARED_CHUNK;
        if (comm->rank == root) MT_TRY(mti_bytes_copy(ctx, space, (char *)data + at, (size_t)n));
        MT_TRY(mt_broadcast(ctx, comm, space, space, (size_t)n, MT_U8, root));
        MT_TRY(mti_compared_fetch(ctx, (char *)data + at, space, (size_t)n));
    }
    return MT_SUCCESS;
}

/* Broadcasts the settings of rank `root` to *out, which is empty before. The caller frees out->data. */
static mt_status mti_compared_share(mt_context *ctx, mt_comm *comm, int root, const mti_compared_text *mine,
                                    void *space, mti_compared_text *out) {
    out->bytes = mine->bytes;
    MT_TRY(mti_compared_broadcast(ctx, comm, root, &out->bytes, sizeof out->bytes, space));
    out->data = (char *)mt_host_alloc((size_t)out->bytes + 1); /* + 1: a NUL at the end */
    if (!out->data) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "no memory for what rank %d has told", root);
    if (comm->rank == root) memcpy(out->data, mine->data, (size_t)mine->bytes);
    return mti_compared_broadcast(ctx, comm, root, out->data, out->bytes, space);
}

/* Finds two ranks of one group with different settings: *a is the lowest rank of the group, and *b the next rank after
   *b that differs from it, and from all ranks that were found before. Returns 0 when there is none. */
static int mti_compared_differ(const mti_compared *all, int size, int *a, int *b) {
    int same;
    while (++*b < size) {
        for (*a = 0; all[*a].group != all[*b].group; ++*a) continue;
        for (same = *a; all[same].group != all[*b].group || all[same].hash != all[*b].hash; same++) continue;
        if (same == *b && *a != *b) return 1;
    }
    return 0;
}

/* Writes " on ranks 0, 2 and 3 more": the ranks of the group with the same settings as rank `like`. */
static void mti_say_ranks_alike(mti_text *text, const mti_compared *all, int size, int like) {
    int r, alike = 0, said = 0;
    for (r = 0; r < size; r++) alike += all[r].group == all[like].group && all[r].hash == all[like].hash;
    mti_say(text, alike > 1 ? " on ranks " : " on rank ");
    for (r = 0; r < size && said < 8; r++)
        if (all[r].group == all[like].group && all[r].hash == all[like].hash) mti_say(text, said++ ? ", %d" : "%d", r);
    if (alike > said) mti_say(text, " and %d more", alike - said);
}

/* Writes a setting. same: number of characters at the start that are equal in both values; when there are more than
   100, the text begins 20 characters before the difference. 340 characters of two values fit into a message */
static void mti_say_setting(mti_text *text, const char *name, const char *value, size_t same) {
    int cut = same > 100;
    if (!name) mti_say(text, "nothing more");
    else mti_say(text, "%.100s%s%s%.340s", name, *name ? " " : "", cut ? "..." : "", value + (cut ? same - 20 : 0));
}

/* Writes the first difference between the settings x of rank a and y of rank b. */
static int mti_say_settings(mti_text *text, const mti_compared *all, const mt_comm *comm, int a, int b,
                            const mti_compared_text *x, const mti_compared_text *y) {
    const char *name, *other, *value = "", *second = "";
    uint64_t i = 0, j = 0;
    size_t same = 0;
    do {
        name = mti_compared_next(x, &i);
        other = mti_compared_next(y, &j);
        if (name) value = mti_compared_next(x, &i);
        if (other) second = mti_compared_next(y, &j);
    } while (name && other && strcmp(name, other) == 0 && strcmp(value, second) == 0);
    if (name && other && strcmp(name, other) == 0) {
        mti_say(text, "%.100s is ", name);
        name = other = "";
        while (value[same] && value[same] == second[same]) same++;
    }
    mti_say_setting(text, name, value, same);
    mti_say_ranks_alike(text, all, comm->size, a);
    mti_say(text, ", but ");
    mti_say_setting(text, other, second, same);
    mti_say_ranks_alike(text, all, comm->size, b);
    mti_say(text, " of \"%s\" (%d ranks)", comm->name, comm->size);
    return 1;
}

/* What a comparison is about. `write` makes the text that describes this rank; it is called when the hashes of two
   ranks differ. `say` writes the first difference of two texts, and returns 0 when there is none. */
typedef struct mti_comparison {
    const void *user;
    mti_compared_text (*write)(const void *user);
    int (*say)(mti_text *text, const mti_compared *all, const mt_comm *comm, int a, int b, const mti_compared_text *x,
               const mti_compared_text *y);
} mti_comparison;

/* Gathers `bytes` bytes of each rank into all [ranks, bytes], through `space` of the same size. */
static mt_status mti_space_gather(mt_context *ctx, mt_comm *comm, const void *mine, size_t bytes, void *all,
                                  void *space) {
    char *place = (char *)space + (size_t)comm->rank * bytes;
    MT_TRY(mti_synchronize(ctx)); /* a copy from pageable memory would wait without a timeout */
    MT_TRY(mti_bytes_copy(ctx, place, mine, bytes));
    MT_TRY(mt_all_gather(ctx, comm, place, space, bytes, MT_U8));
    return mti_compared_fetch(ctx, all, space, (size_t)comm->size * bytes);
}

MT_API mt_status mt_comm_gather_host(mt_context *ctx, mt_comm *comm, const void *mine, size_t bytes, void *all) {
    mt_ledger ledger;
    void *space = NULL;
    size_t size;
    mt_status status;
    if (!ctx || !comm || !mine || !all || bytes == 0 || bytes > SIZE_MAX / 2 / MTI_MAX_RANKS)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_comm_gather_host: %zu bytes, or something is NULL", bytes);
    size = (size_t)comm->size * bytes;
    ledger = comm->ledger;
    mti_checks_pause(ctx);
    status = mti_space_begin(ctx, size, &space);
    if (status == MT_SUCCESS) status = mti_space_gather(ctx, comm, mine, bytes, all, space);
    mti_space_end(ctx, space, size);
    comm->ledger = ledger; /* that of the program alone */
    return mti_checks_resume(ctx, status);
}

/* Compares all ranks. all: [size], this rank's entry is filled in; space: of mti_space_begin */
static mt_status mti_compare_texts(mt_context *ctx, mt_comm *comm, const char *what, const mti_comparison *comparison,
                                   mti_compared *all, void *space) {
    mti_compared own = all[comm->rank];
    mti_compared_text mine, x, y;
    mti_text text;
    mt_status status;
    int a, b = 0;
    MT_TRY(mti_space_gather(ctx, comm, &own, sizeof own, all, space));
    if (!mti_compared_differ(all, comm->size, &a, &b)) return MT_SUCCESS;
    mine = (comparison->write)(comparison->user);
    if (!mine.data) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "%s: no memory for a comparison of ranks", what);
    do {
        text.used = 0;
        mti_say(&text, "%.100s: ", what);
        x.data = y.data = NULL;
        status = mti_compared_share(ctx, comm, a, &mine, space, &x);
        if (status == MT_SUCCESS) status = mti_compared_share(ctx, comm, b, &mine, space, &y);
        if (status == MT_SUCCESS && (comparison->say)(&text, all, comm, a, b, &x, &y))
            status = mti_refuse(ctx, comm, MT_ERR_MISMATCH, "%s", text.data);
        mt_host_free(x.data);
        mt_host_free(y.data);
    } while (status == MT_SUCCESS && mti_compared_differ(all, comm->size, &a, &b));
    mt_host_free(mine.data);
    return status;
}

/* Compares all ranks by a hash, and says what differs. */
static mt_status mti_compare_ranks(mt_context *ctx, mt_comm *comm, const char *what, mti_compared told,
                                   const mti_comparison *comparison) {
    size_t bytes =
        (size_t)comm->size * sizeof told > MTI_COMPARED_CHUNK ? (size_t)comm->size * sizeof told : MTI_COMPARED_CHUNK;
    mti_compared *all = (mti_compared *)mt_host_alloc((size_t)comm->size * sizeof *all);
    void *space = NULL;
    mt_status status =
        all ? mti_space_begin(ctx, bytes, &space)
            : mti_refuse(ctx, comm, MT_ERR_MEMORY, "%s: no memory for a comparison of %d ranks", what, comm->size);
    if (status == MT_SUCCESS) {
        all[comm->rank] = told;
        status = mti_compare_texts(ctx, comm, what, comparison, all, space);
    }
    mti_space_end(ctx, space, bytes);
    mt_host_free(all);
    return status;
}

/* The settings that a rank passes to mt_comm_compare. */
typedef struct mti_setting_list {
    const mt_setting *list;
    int count;
} mti_setting_list;

static mti_compared_text mti_settings_write(const void *user) {
    const mti_setting_list *s = (const mti_setting_list *)user;
    return mti_compared_write(s->list, s->count);
}

MT_API mt_status mt_comm_compare(mt_context *ctx, mt_comm *comm, const char *what, int group,
                                 const mt_setting *settings, int count) {
    mti_setting_list mine;
    mti_comparison comparison;
    mti_compared_text text;
    mti_compared told;
    int i, bad = !what || count < 0 || (count > 0 && !settings);
    if (!ctx || !comm)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_comm_compare: %s is NULL", ctx ? "comm" : "ctx");
    for (i = 0; !bad && i < count; i++) bad = !settings[i].name || !settings[i].value;
    if (bad) return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_comm_compare: count is %d, or something is NULL", count);
    if (!comm->transport->has_peers) return MT_SUCCESS;
    text = mti_compared_write(settings, count);
    if (!text.data) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "mt_comm_compare: no memory for %d settings", count);
    told.hash = mti_compared_hash(&text);
    told.group = group;
    mt_host_free(text.data);
    mine.list = settings;
    mine.count = count;
    comparison.user = &mine;
    comparison.write = mti_settings_write;
    comparison.say = mti_say_settings;
    return mti_compare_ranks(ctx, comm, what, told, &comparison);
}

MT_API void mt_decimal_point(char *text) {
    static const char *const others = "+-0123456789abcdefghijklmnopqrstuvwxyz()_"; /* letters: inf, nan, exponents */
    char *point;
    size_t n;
    if (!text) return;
    point = text + strspn(text, others);
    n = strcspn(point, others);
    if (n == 0) return;
    *point = '.';
    memmove(point + 1, point + n, strlen(point + n) + 1);
}

MT_API const char *mt_f32_digits(float x, char text[32]) {
    if (!text) return "";
    snprintf(text, 32, "%.9g", (double)x);
    mt_decimal_point(text);
    return text;
}
