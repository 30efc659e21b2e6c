/* ---- the time of a step ------------------------------------------------------------------------------------------ */

#pragma once
#include "plan.h"
#include "authors.h"
#include "../files/safetensors.c"

/* -- the text of a machine -- */

/* A rate of products, attention or memory, or a peak. */
typedef struct mti_rate {
    int key;         /* index in mti_machine_keys */
    char name[40];   /* of an operator; "": any */
    int dtype;       /* -1: any */
    double shape[3]; /* M, N, K; 0: any */
    double rate;
} mti_rate;

struct mt_machine {
    char name[96];
    double ranks_per_node, latency[2], bandwidth[2], operator_seconds, capacity, overlap; /* [0]: link, [1]: network */
    mti_rate *rates;
    int count, rates_capacity;
};

enum { MTI_GEMM_RATE, MTI_ATTENTION_RATE, MTI_MEMORY_RATE, MTI_PEAK_RATE, MTI_RATE_KINDS };

/* The keys. `values` has a letter for each value: t type, w name of an operator, n size or *, r rate (> 0), s seconds,
   i whole number, b 0 or 1. The first MTI_RATE_KINDS keys are rates. `at` is the place of the values of the others in
   mt_machine, one or two doubles. */
typedef struct mti_machine_key {
    const char *key, *values;
    size_t at[2];
} mti_machine_key;

#define MTI_AT_MACHINE(field) offsetof(mt_machine, field)
static const mti_machine_key mti_machine_keys[] = {
    {"gemm", "tnnnr", {0, 0}},
    {"attention", "wtr", {0, 0}},
    {"memory", "wtr", {0, 0}},
    {"peak", "tr", {0, 0}},
    {"operator", "s", {MTI_AT_MACHINE(operator_seconds), 0}},
    {"node", "i", {MTI_AT_MACHINE(ranks_per_node), 0}},
    {"link", "rs", {MTI_AT_MACHINE(bandwidth), MTI_AT_MACHINE(latency)}},
    {"network", "rs", {MTI_AT_MACHINE(bandwidth) + sizeof(double), MTI_AT_MACHINE(latency) + sizeof(double)}},
    {"overlap", "b", {MTI_AT_MACHINE(overlap), 0}},
    {"capacity", "r", {MTI_AT_MACHINE(capacity), 0}},
};
#define MTI_MACHINE_KEYS ((int)(sizeof mti_machine_keys / sizeof *mti_machine_keys))

/* The text that is read, at one of its lines. */
typedef struct mti_machine_text {
    const char *path, *at, *end; /* end: of the line, or of its comment */
    int line;
} mti_machine_text;

/* Reads the next word of the line. Returns its length, 0 at the end of the line. */
static size_t mti_machine_word(mti_machine_text *t, const char **word) {
    while (t->at < t->end && (*t->at == ' ' || *t->at == '\t' || *t->at == '\r')) t->at++;
    *word = t->at;
    while (t->at < t->end && *t->at != ' ' && *t->at != '\t' && *t->at != '\r') t->at++;
    return (size_t)(t->at - *word);
}

static int mti_machine_number(const char *word, size_t n, double *out) {
    mti_json j = mti_json_begin(word, n);
    *out = mti_json_number(&j);
    mti_json_end(&j);
    return !j.error && *out >= 0 && *out <= DBL_MAX;
}

/* Reads a value of the kind `letter` into *row, or into *number. Returns what it must be, or NULL. */
static const char *mti_machine_value(char letter, const char *word, size_t n, mti_rate *row, double *number) {
    int any = n == 1 && word[0] == '*', i;
    if (letter == 'w') {
        if (n >= sizeof row->name || memchr(word, 0, n)) return "a name of at most 39 characters";
        if (!any) memcpy(row->name, word, n);
        return NULL;
    }
    if (letter == 't') {
        row->dtype = -1;
        for (i = MT_F32; i <= MT_F16; i++)
            if (strlen(mt_dtype_name((mt_dtype)i)) == n && memcmp(mt_dtype_name((mt_dtype)i), word, n) == 0)
                row->dtype = i;
        return any || row->dtype >= 0 ? NULL : "f32, bf16, f16 or *";
    }
    *number = 0;
    if (letter == 'n' && any) return NULL;
    if (!mti_machine_number(word, n, number)) return letter == 'n' ? "a number above 0 or *" : "a number";
    if (letter == 'r' && !(*number > 0)) return "a number above 0";
    if (letter == 'n' && !(*number > 0)) return "a number above 0 or *";
    if (letter == 'i' && (*number < 1 || *number > INT32_MAX || *number != floor(*number)))
        return "a whole number from 1";
    return letter == 'b' && *number != 0 && *number != 1 ? "0 or 1" : NULL;
}

/* Reads the values of a key into `row` and `numbers`. */
static mt_status mti_machine_values(mt_context *ctx, mti_machine_text *t, const mti_machine_key *key, mti_rate *row,
                                    double numbers[4]) {
    const char *word, *wanted, *letter;
    size_t n;
    int count = 0;
    for (letter = key->values; *letter; letter++) {
        n = mti_machine_word(t, &word);
        if (n == 0)
            return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: '%s' has %d values, must have %zu", t->path, t->line,
                           key->key, (int)(letter - key->values), strlen(key->values));
        wanted = mti_machine_value(*letter, word, n, row, &numbers[count]);
        if (wanted)
            return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: '%s' has '%.*s', must be %s", t->path, t->line, key->key,
                           (int)(n < 40 ? n : 40), word, wanted);
        count += *letter != 'w' && *letter != 't';
    }
    n = mti_machine_word(t, &word);
    if (n == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: '%.*s' follows the values of '%s'", t->path, t->line,
                   (int)(n < 40 ? n : 40), word, key->key);
}

static mt_status mti_machine_add_rate(mt_context *ctx, mt_machine *m, const mti_rate *rate) {
    void *list = m->rates;
    MT_TRY(mti_reserve(ctx, &list, m->count, &m->rates_capacity, sizeof *m->rates));
    m->rates = (mti_rate *)list;
    m->rates[m->count++] = *rate;
    return MT_SUCCESS;
}

/* The name of a machine is the rest of the line. */
static void mti_machine_named(mt_machine *m, const mti_machine_text *t) {
    const char *first = t->at, *end = t->end;
    while (first < end && (*first == ' ' || *first == '\t')) first++;
    while (end > first && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\r')) end--;
    snprintf(m->name, sizeof m->name, "%.*s", (int)(end - first), first);
}

static mt_status mti_machine_line(mt_context *ctx, mt_machine *m, mti_machine_text *t) {
    const char *word;
    size_t n = mti_machine_word(t, &word);
    double numbers[4] = {0, 0, 0, 0};
    mti_rate row;
    int i;
    if (n == 0) return MT_SUCCESS;
    if (n == 4 && memcmp(word, "name", 4) == 0) return mti_machine_named(m, t), MT_SUCCESS;
    memset(&row, 0, sizeof row);
    for (i = 0; i < MTI_MACHINE_KEYS; i++) {
        const mti_machine_key *key = &mti_machine_keys[i];
        if (strlen(key->key) != n || memcmp(key->key, word, n) != 0) continue;
        MT_TRY(mti_machine_values(ctx, t, key, &row, numbers));
        if (i >= MTI_RATE_KINDS) {
            memcpy((char *)m + key->at[0], &numbers[0], sizeof(double));
            if (key->at[1]) memcpy((char *)m + key->at[1], &numbers[1], sizeof(double));
            return MT_SUCCESS;
        }
        row.key = i;
        if (i == MTI_GEMM_RATE) memcpy(row.shape, numbers, sizeof row.shape);
        if ((row.shape[0] > 0) != (row.shape[1] > 0) || (row.shape[0] > 0) != (row.shape[2] > 0))
            return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: the shape of 'gemm' must be three numbers or * * *", t->path,
                           t->line);
        row.rate = numbers[i == MTI_GEMM_RATE ? 3 : 0];
        return mti_machine_add_rate(ctx, m, &row);
    }
    return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: '%.*s' is no key of a machine", t->path, t->line,
                   (int)(n < 40 ? n : 40), word);
}

static mt_status mti_machine_lines(mt_context *ctx, const char *path, const char *text, size_t bytes, mt_machine *m) {
    mti_machine_text t;
    const char *end = text + bytes, *next;
    t.path = path;
    for (t.line = 1; text < end; t.line++, text = next + 1) {
        next = (const char *)memchr(text, '\n', (size_t)(end - text));
        if (!next) next = end;
        t.at = text;
        t.end = (const char *)memchr(text, '#', (size_t)(next - text));
        if (!t.end) t.end = next;
        MT_TRY(mti_machine_line(ctx, m, &t));
        if (next == end) break;
    }
    return MT_SUCCESS;
}

#define MTI_MACHINE_BYTES ((size_t)1 << 20)

static mt_status mti_machine_size(mt_context *ctx, const char *path, size_t bytes) {
    if (bytes <= MTI_MACHINE_BYTES) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: has %zu bytes, must have at most %zu", path, bytes, MTI_MACHINE_BYTES);
}

static mt_status mti_machine_new(mt_context *ctx, const char *path, const char *text, size_t bytes, mt_machine **out) {
    void *memory;
    mt_machine *m;
    mt_status status;
    MT_TRY(mti_machine_size(ctx, path, bytes));
    MT_TRY(mti_host_new(ctx, sizeof *m, &memory));
    m = (mt_machine *)memory;
    m->ranks_per_node = 1;
    m->overlap = 1;
    status = mti_machine_lines(ctx, path, text, bytes, m);
    if (status == MT_SUCCESS) *out = m;
    else mt_machine_destroy(m);
    return status;
}

MT_API mt_status mt_machine_create(mt_context *ctx, const char *text, mt_machine **out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!text || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_machine_create: %s is NULL", text ? "out" : "text");
    *out = NULL;
    return mti_machine_new(ctx, "machine", text, strlen(text), out);
}

MT_API mt_status mt_machine_read(mt_context *ctx, const char *path, mt_machine **out) {
    mti_mapped file;
    void *text = NULL;
    mt_status status = MT_SUCCESS;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!path || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_machine_read: %s is NULL", path ? "out" : "path");
    *out = NULL;
    MT_TRY(mti_mapped_open(ctx, path, 0, &file));
    status = mti_machine_size(ctx, path, file.bytes);
    if (status == MT_SUCCESS) status = mti_host_new(ctx, file.bytes ? file.bytes : 1, &text);
    if (status == MT_SUCCESS) status = mti_mapped_read(ctx, path, &file, 0, file.bytes, text);
    if (status == MT_SUCCESS) status = mti_machine_new(ctx, path, (const char *)text, file.bytes, out);
    mt_host_free(text);
    mti_mapped_close(&file);
    return status;
}

MT_API void mt_machine_destroy(mt_machine *machine) {
    if (!machine) return;
    mt_host_free(machine->rates);
    mt_host_free(machine);
}

MT_API const char *mt_machine_name(const mt_machine *machine) { return machine ? machine->name : ""; }
MT_API double mt_machine_capacity(const mt_machine *machine) { return machine ? machine->capacity : 0; }

/* -- the time of one entry -- */

/* The rate of a kind for a name and a type; 0 if there is none. A line that names the operator counts before one that
   names only the type. Integers count as f32. */
static double mti_rate_of(const mt_machine *m, int key, const char *name, mt_dtype dtype) {
    double rate = 0;
    int i, best = -1;
    if (dtype > MT_F16) dtype = MT_F32;
    for (i = 0; i < m->count; i++) {
        const mti_rate *r = &m->rates[i];
        int fits = 2 * (r->name[0] != 0) + (r->dtype >= 0);
        if (r->key != key || r->shape[0] > 0) continue;
        if ((r->name[0] && strcmp(r->name, name) != 0) || (r->dtype >= 0 && r->dtype != (int)dtype)) continue;
        if (fits >= best) best = fits, rate = r->rate;
    }
    return rate;
}

MT_API double mt_machine_peak(const mt_machine *machine, mt_dtype dtype) {
    return machine ? mti_rate_of(machine, MTI_PEAK_RATE, "", dtype) : 0;
}

/* Has a line with a shape the type of this entry? `typed`: only lines that name the type. */
static int mti_has_shape(const mti_rate *r, const mt_trace_entry *e, int typed) {
    return r->key == MTI_GEMM_RATE && r->shape[0] > 0 && (r->dtype == (int)e->dtype || (!typed && r->dtype < 0));
}

/* The square of the distance between the logarithms of the shapes. */
static double mti_shape_distance(const mti_rate *r, const mt_trace_entry *e) {
    const double shape[3] = {(double)e->m, (double)e->n, (double)e->k};
    double square = 0;
    int d;
    for (d = 0; d < 3; d++) {
        double distance = log(shape[d] / r->shape[d]);
        square += distance * distance;
    }
    return square;
}

/* The rate of a product from the lines with shapes; 0 if there are none. *exact = a line has this shape. */
static double mti_shape_rate(const mt_machine *m, const mt_trace_entry *e, int *exact) {
    double sum = 0, weights = 0, rate = 0;
    int i, typed = 0;
    for (i = 0; i < m->count; i++) typed |= mti_has_shape(&m->rates[i], e, 1);
    *exact = 0;
    for (i = 0; i < m->count; i++) {
        double square, weight;
        if (!mti_has_shape(&m->rates[i], e, typed)) continue;
        square = mti_shape_distance(&m->rates[i], e);
        if (square < 1e-12) {
            *exact = 1;
            rate = m->rates[i].rate;
            continue;
        }
        weight = 1 / (square * square);
        sum += weight * log(m->rates[i].rate);
        weights += weight;
    }
    if (*exact) return rate;
    return weights > 0 ? exp(sum / weights) : 0;
}

/* The time of the FLOPs of an entry, but at least that of its bytes. */
static double mti_flops_seconds(const mt_machine *m, const mt_trace_entry *e, double rate) {
    double memory = mti_rate_of(m, MTI_MEMORY_RATE, e->name, e->dtype), seconds = e->flops / rate;
    return memory > 0 && e->bytes / memory > seconds ? e->bytes / memory : seconds;
}

/* A line for this shape was measured with its bytes, so they are not counted again. */
static double mti_gemm_seconds(const mt_machine *m, const mt_trace_entry *e) {
    double rate;
    int exact = 0;
    if (!(e->flops > 0)) return 0;
    rate = mti_shape_rate(m, e, &exact);
    if (exact) return e->flops / rate;
    if (!(rate > 0)) rate = mti_rate_of(m, MTI_GEMM_RATE, "", e->dtype);
    return rate > 0 ? mti_flops_seconds(m, e, rate) : -1;
}

static double mti_attention_seconds(const mt_machine *m, const mt_trace_entry *e) {
    double rate = mti_rate_of(m, MTI_ATTENTION_RATE, e->name, e->dtype);
    return rate > 0 ? mti_flops_seconds(m, e, rate) : -1;
}

/* The number of ranks of a group in one node. */
static double mti_ranks_together(const mt_machine *m, const mt_trace_entry *e) {
    double together = floor(m->ranks_per_node * (double)(e->ranks - 1) / e->span);
    return together > 1 ? together : 1;
}

/* An all_to_all: the links and the network move different blocks at the same time. leaves: 1: the group has ranks in
   other nodes */
static double mti_blocks_seconds(const mt_machine *m, const mt_trace_entry *e, int leaves) {
    double n = e->ranks, q = leaves ? mti_ranks_together(m, e) : n, inside = 0, outside = 0;
    if ((leaves && !(m->bandwidth[1] > 0)) || (q > 1 && !(m->bandwidth[0] > 0))) return -1;
    if (q > 1) inside = (q - 1) / n * e->bytes / m->bandwidth[0];
    if (leaves) outside = (n - q) / n * e->bytes * m->ranks_per_node / m->bandwidth[1];
    return (inside > outside ? inside : outside) + m->latency[leaves];
}

static double mti_communication_seconds(const mt_machine *m, const mt_trace_entry *e) {
    double n = e->ranks, node = m->ranks_per_node, share = 1, steps = ceil(log2(n));
    int leaves = e->span >= m->ranks_per_node; /* 1: the group has ranks in other nodes */
    double bandwidth = m->bandwidth[0], latency = m->latency[leaves];
    if (e->collective == MT_ALL_TO_ALL || e->collective == MT_ALL_TO_ALL_V) return mti_blocks_seconds(m, e, leaves);
    if (leaves) {
        double across = m->bandwidth[1] * mti_ranks_together(m, e) / node;
        if (across < bandwidth || node == 1) bandwidth = across;
    }
    if (!(bandwidth > 0)) return -1;
    switch (e->collective) {
    case MT_ALL_REDUCE: return 2 * ((n - 1) / n * e->bytes / bandwidth + steps * latency);
    case MT_ALL_GATHER:
    case MT_REDUCE_SCATTER: share = (n - 1) / n; break;
    case MT_SEND:
    case MT_RECV: steps = 1; break;
    case MT_ALL_TO_ALL:
    case MT_ALL_TO_ALL_V:
    case MT_BROADCAST:
    case MT_BARRIER:
    case MT_COLLECTIVE_COUNT: break;
    }
    return share * e->bytes / bandwidth + steps * latency;
}

/* The seconds of an entry; -1: the machine has no rate for it. */
static double mti_entry_seconds(const mt_machine *m, const mt_trace_entry *e) {
    double rate = 0, seconds = 0;
    switch (e->work) {
    case MT_WORK_GEMM: seconds = mti_gemm_seconds(m, e); break;
    case MT_WORK_ATTENTION: seconds = mti_attention_seconds(m, e); break;
    case MT_WORK_MEMORY:
    case MT_WORK_OPTIMIZER:
        rate = mti_rate_of(m, MTI_MEMORY_RATE, e->name, e->dtype);
        seconds = rate > 0 ? e->bytes / rate : -1;
        break;
    case MT_WORK_COMMUNICATION: return mti_communication_seconds(m, e);
    case MT_WORK_OVERLAP_BEGIN:
    case MT_WORK_OVERLAP_END:
    case MT_WORK_OVERLAP_WAIT:
    case MT_WORK_COUNT: return 0;
    }
    return seconds < 0 ? -1 : seconds + m->operator_seconds;
}

/* Refuses what the library does not write into a trace. */
static mt_status mti_trace_check(mt_context *ctx, const char *function, size_t at, const mt_trace_entry *e) {
    const char *wrong = NULL;
    if (e->work < MT_WORK_MEMORY || e->work >= MT_WORK_COUNT) wrong = "work";
    else if (!e->name) wrong = "name";
    else if (!(e->flops >= 0 && e->flops <= DBL_MAX)) wrong = "flops";
    else if (!(e->bytes >= 0 && e->bytes <= DBL_MAX)) wrong = "bytes";
    else if (e->work == MT_WORK_GEMM && (e->m < 0 || e->n < 0 || e->k < 0)) wrong = "m, n, k";
    else if (e->work == MT_WORK_COMMUNICATION && (e->ranks < 2 || e->span < e->ranks - 1)) wrong = "ranks, span";
    else if (e->collective < MT_ALL_REDUCE || e->collective >= MT_COLLECTIVE_COUNT) wrong = "collective";
    else if (e->stream < MT_STREAM_NONE || e->stream > MT_STREAM_THIRD) wrong = "stream";
    else if (e->ticket < 0 || e->ticket > MT_OVERLAP_TICKET_THIRD) wrong = "ticket";
    if (!wrong) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: entry %zu (%s): %s is not valid", function, at, e->name ? e->name : "",
                   wrong);
}

static mt_status mti_plan_seconds(mt_context *ctx, const char *function, const mt_machine *m, const mt_trace_entry *e,
                                  double *seconds) {
    const char *key = "memory";
    *seconds = mti_entry_seconds(m, e);
    if (*seconds >= 0) return MT_SUCCESS;
    *seconds = 0;
    if (e->work == MT_WORK_GEMM) key = "gemm";
    else if (e->work == MT_WORK_ATTENTION) key = "attention";
    else if (e->work == MT_WORK_COMMUNICATION) key = e->span >= m->ranks_per_node ? "network" : "link";
    return mt_fail(ctx, MT_ERR_DATA, "%s: machine '%s' has no '%s' for %s of %s%s", function, m->name, key, e->name,
                   mt_dtype_name(e->dtype), e->work == MT_WORK_COMMUNICATION ? " between the ranks" : "");
}

MT_API mt_status mt_machine_seconds(mt_context *ctx, const mt_machine *machine, const mt_trace_entry *entry,
                                    double *seconds) {
    static const char *const function = "mt_machine_seconds";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!machine || !entry || !seconds)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                       !machine ? "machine"
                       : entry  ? "seconds"
                                : "entry");
    MT_TRY(mti_trace_check(ctx, function, 0, entry));
    return mti_plan_seconds(ctx, function, machine, entry, seconds);
}

/* -- the time of a step: each stage has a clock, and one for each stream -- */

/* A stage while its trace is run. It stops at an entry for which it waits for other stages. */
typedef struct mti_stage_run {
    const mt_trace *trace;
    size_t at;         /* the next entry */
    double now;        /* the clock of the computation */
    double streams[3]; /* when the work in a stream ends */
    double tickets[MT_OVERLAP_TICKET_THIRD + 1];
    mt_stream stream;   /* of the entries that follow; MT_STREAM_NONE: they advance `now` */
    int stopped;        /* 1: at an entry that needs other stages */
    int sent, received; /* 1: this half of the entry is done */
    double done;        /* when the halves were done */
    mt_step_time *time;
} mti_stage_run;

typedef struct mti_step_run {
    mt_context *ctx;
    const mt_machine *machine;
    mti_stage_run *stages;
    int count;
    int ranks; /* number of ranks of a stage; 0: no stage needs another one */
} mti_step_run;

static int mti_is_message(const mt_trace_entry *e) {
    return e->work == MT_WORK_COMMUNICATION && (e->collective == MT_SEND || e->collective == MT_RECV);
}

/* Does the entry need other stages: a message between stages, or a collective whose group has ranks of several? */
static int mti_needs_stages(const mti_step_run *run, const mt_trace_entry *e) {
    return e->work == MT_WORK_COMMUNICATION && run->ranks > 0 && e->span >= run->ranks;
}

/* Advances the clock to `until`, when work in another stream ends. The difference counts as communication, whatever
   the work is. */
static void mti_stage_wait(mti_stage_run *s, double until) {
    if (until <= s->now) return;
    s->time->communication += until - s->now;
    s->time->overlapped -= until - s->now;
    s->now = until;
}

/* The time of an operator or a communication: in another stream, or in its part of the step. */
static void mti_stage_spend(mti_stage_run *s, mt_work work, double seconds) {
    mt_step_time *t = s->time;
    double *const parts[] = {&t->memory, &t->gemm, &t->attention, &t->optimizer, &t->communication};
    if (s->stream != MT_STREAM_NONE) {
        s->streams[s->stream] += seconds;
        t->overlapped += seconds;
        return;
    }
    *parts[work] += seconds; /* in the order of mt_work */
    s->now += seconds;
}

/* Adds an entry that needs no other stage. */
static mt_status mti_stage_add(const mti_step_run *run, mti_stage_run *s, const mt_trace_entry *e) {
    double seconds;
    MT_TRY(mti_plan_seconds(run->ctx, "mt_plan_step", run->machine, e, &seconds));
    if (e->recomputed) s->time->recomputed += e->flops;
    else s->time->flops += e->flops;
    if (e->work <= MT_WORK_COMMUNICATION) {
        mti_stage_spend(s, e->work, seconds);
    } else if (e->work == MT_WORK_OVERLAP_BEGIN) {
        s->stream = run->machine->overlap != 0 ? e->stream : MT_STREAM_NONE;
        if (s->streams[s->stream] < s->now) s->streams[s->stream] = s->now;
    } else if (e->work == MT_WORK_OVERLAP_END) {
        s->tickets[e->ticket] = s->stream == MT_STREAM_NONE ? 0 : s->streams[s->stream];
        s->stream = MT_STREAM_NONE;
    } else {
        mti_stage_wait(s, s->tickets[e->ticket]);
    }
    return MT_SUCCESS;
}

/* Runs a stage until it needs other stages, or to its end. */
static mt_status mti_stage_advance(const mti_step_run *run, mti_stage_run *s) {
    for (; s->at < s->trace->count; s->at++) {
        const mt_trace_entry *e = &s->trace->entries[s->at];
        MT_TRY(mti_trace_check(run->ctx, "mt_plan_step", s->at, e));
        if (mti_needs_stages(run, e)) {
            s->stopped = 1;
            s->sent = !mti_is_message(e) || e->to < 0;
            s->received = !mti_is_message(e) || e->from < 0;
            s->done = s->now;
            return MT_SUCCESS;
        }
        MT_TRY(mti_stage_add(run, s, e));
    }
    mti_stage_wait(s, s->streams[MT_STREAM_SECOND]);
    mti_stage_wait(s, s->streams[MT_STREAM_THIRD]);
    return MT_SUCCESS;
}

static const mt_trace_entry *mti_stage_entry(const mti_stage_run *s) {
    return s->stopped ? &s->trace->entries[s->at] : NULL;
}

/* Ends the entry at which the stage has stopped. `seconds` of it are communication, the rest is a wait. */
static void mti_stage_go_on(mti_stage_run *s, double done, double seconds) {
    double all = done - s->now;
    if (seconds > all) seconds = all;
    s->time->communication += seconds;
    s->time->bubble += all - seconds;
    s->now = done;
    s->stopped = 0;
    s->at++;
}

/* Delivers the message of stage `from`, if its receiver waits for it. Returns 1 if it does. */
static int mti_deliver(mti_step_run *run, int from, double seconds) {
    mti_stage_run *a = &run->stages[from], *b;
    const mt_trace_entry *sends = mti_stage_entry(a), *receives;
    double at;
    if (!sends || !mti_is_message(sends) || a->sent || sends->to >= run->count) return 0;
    b = &run->stages[sends->to];
    receives = mti_stage_entry(b);
    if (!receives || !mti_is_message(receives) || b->received || receives->from != from) return 0;
    at = (a->now > b->now ? a->now : b->now) + seconds;
    a->sent = b->received = 1;
    if (a->done < at) a->done = at;
    if (b->done < at) b->done = at;
    return 1;
}

/* Does the stage wait in this collective? */
static int mti_waits_in(const mti_stage_run *s, const mt_trace_entry *collective) {
    const mt_trace_entry *e = mti_stage_entry(s);
    return e && !mti_is_message(e) && e->collective == collective->collective && e->ranks == collective->ranks &&
           e->span == collective->span && e->bytes == collective->bytes;
}

/* Runs a collective for which as many stages wait as it has. Returns 1 if there are as many. */
static int mti_stages_meet(mti_step_run *run, const mt_trace_entry *e, double seconds) {
    int wanted = e->ranks < run->count ? e->ranks : run->count, there = 0, i;
    double at = 0;
    for (i = 0; i < run->count; i++) {
        if (!mti_waits_in(&run->stages[i], e)) continue;
        there++;
        if (run->stages[i].now > at) at = run->stages[i].now;
    }
    if (there < wanted) return 0;
    for (i = 0; i < run->count; i++)
        if (mti_waits_in(&run->stages[i], e)) mti_stage_go_on(&run->stages[i], at + seconds, seconds);
    return 1;
}

/* Does what can be done for the stages that have stopped. *progress = 1 if something was done. */
static mt_status mti_exchange(mti_step_run *run, int *progress) {
    int i;
    for (i = 0; i < run->count; i++) {
        mti_stage_run *s = &run->stages[i];
        const mt_trace_entry *e = mti_stage_entry(s);
        double seconds;
        if (!e) continue;
        MT_TRY(mti_plan_seconds(run->ctx, "mt_plan_step", run->machine, e, &seconds));
        if (!mti_is_message(e)) {
            if (mti_stages_meet(run, e, seconds)) *progress = 1;
            continue;
        }
        if (mti_deliver(run, i, seconds)) *progress = 1;
        if (s->sent && s->received) {
            mti_stage_go_on(s, s->done, seconds);
            *progress = 1;
        }
    }
    return MT_SUCCESS;
}

/* Runs all stages to their ends. */
static mt_status mti_step_run_all(mti_step_run *run) {
    int i, progress = 1, ended = 0;
    while (progress && ended < run->count) {
        progress = ended = 0;
        for (i = 0; i < run->count; i++) {
            mti_stage_run *s = &run->stages[i];
            size_t before = s->at;
            if (!s->stopped) MT_TRY(mti_stage_advance(run, s));
            progress |= s->at > before;
            ended += !s->stopped && s->at == s->trace->count;
        }
        if (ended < run->count) MT_TRY(mti_exchange(run, &progress));
    }
    if (ended == run->count) return MT_SUCCESS;
    for (i = 0; !run->stages[i].stopped; i++) {
    }
    return mt_fail(run->ctx, MT_ERR_ARGUMENT, "mt_plan_step: stage %d waits for other stages in entry %zu (%s)", i,
                   run->stages[i].at, mti_stage_entry(&run->stages[i])->name);
}

/* The number of ranks of a stage is the distance of two ranks of the pipeline group, the group with messages whose
   ranks are farthest apart. */
static int mti_stage_ranks(const mt_trace_entry *e, int before) {
    int distance = mti_is_message(e) && e->ranks > 1 ? e->span / (e->ranks - 1) : 0;
    return distance > before ? distance : before;
}

MT_API mt_status mt_plan_step(mt_context *ctx, const mt_machine *machine, const mt_trace *traces, int stages,
                              mt_step_time *out) {
    static const char *const function = "mt_plan_step";
    mti_step_run run;
    void *memory;
    double end = 0;
    mt_status status;
    int i;
    size_t j;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!machine || !traces || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                       !machine ? "machine"
                       : traces ? "out"
                                : "traces");
    MT_TRY(mt_check_integer(ctx, function, NULL, "stages", stages, 1, INT32_MAX));
    MT_TRY(mti_host_new(ctx, (size_t)stages * sizeof *run.stages, &memory));
    memset(out, 0, (size_t)stages * sizeof *out);
    memset(&run, 0, sizeof run);
    run.ctx = ctx;
    run.machine = machine;
    run.stages = (mti_stage_run *)memory;
    run.count = stages;
    for (i = 0; i < stages; i++) {
        run.stages[i].trace = &traces[i];
        run.stages[i].time = &out[i];
        for (j = 0; stages > 1 && j < traces[i].count; j++)
            run.ranks = mti_stage_ranks(&traces[i].entries[j], run.ranks);
    }
    status = mti_step_run_all(&run);
    for (i = 0; i < stages; i++)
        if (run.stages[i].now > end) end = run.stages[i].now;
    for (i = 0; status == MT_SUCCESS && i < stages; i++) {
        out[i].bubble += end - run.stages[i].now;
        out[i].seconds = end;
    }
    mt_host_free(memory);
    return status;
}
