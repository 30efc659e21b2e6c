/* ---- checkpoints: tables of names, what a file has of a parameter ------------------------------------------------ */

#pragma once
#include "checkpoint.h"
#include "formats.h"
#include "fields.c"
#include "../parallel/optimizer.c"

/* Limits of numbers that are read from files, so that sums and products do not overflow. 2^48 steps of 1 us take nine
   years. */
#define MTI_STEPS_MAX ((int64_t)1 << 48)
#define MTI_POSITION_MAX ((int64_t)1 << 62)

enum { MTI_STATE_FIELDS = 13 };

/* Lists the fields of the training state, as they are in the metadata of files. A loss scaler of zeros means that the
   run has none. */
static void mti_state_fields(mt_training_state *s, mt_field *out) {
    mt_loss_scaler *l = &s->scaler;
    const mt_field list[MTI_STATE_FIELDS] = {
        {"step", MT_FIELD_I64, &s->step, 0, MTI_STEPS_MAX, 0, 0, 0},
        {"seed", MT_FIELD_U64, &s->seed, 0, 0, 0, 0, 0},
        {"position", MT_FIELD_I64, &s->position, 0, MTI_POSITION_MAX, 0, 0, 0},
        {"loss_scaler.initial_scale", MT_FIELD_F32, &l->desc.initial_scale, 0, 0, 0, 0, 0},
        {"loss_scaler.min_scale", MT_FIELD_F32, &l->desc.min_scale, 0, 0, 0, 0, 0},
        {"loss_scaler.growth", MT_FIELD_F32, &l->desc.growth, 0, 0, 0, 0, 0},
        {"loss_scaler.backoff", MT_FIELD_F32, &l->desc.backoff, 0, 0, 0, 0, 0},
        {"loss_scaler.growth_interval", MT_FIELD_INT, &l->desc.growth_interval, 0, INT32_MAX, 0, 0, 0},
        {"loss_scaler.hysteresis", MT_FIELD_INT, &l->desc.hysteresis, 0, INT32_MAX, 0, 0, 0},
        {"loss_scaler.scale", MT_FIELD_F32, &l->scale, 0, 0, 0, 0, 0},
        {"loss_scaler.good_steps", MT_FIELD_INT, &l->good_steps, 0, INT32_MAX, 0, 0, 0},
        {"loss_scaler.overflows", MT_FIELD_INT, &l->overflows, 0, INT32_MAX / 2, 0, 0, 0},
        {"loss_scaler.skipped", MT_FIELD_I64, &l->skipped, 0, MTI_STEPS_MAX, 0, 0, 0}};
    memcpy(out, list, sizeof list);
}

static mt_field mti_optimizer_field(mt_optimizer *optimizer) {
    const mt_field field = {"optimizer_step", MT_FIELD_I64, &optimizer->step, 0, MTI_STEPS_MAX, 0, 0, 0};
    return field;
}

/* Returns 1 when all fields of a scaler are 0. memcmp would also compare the padding of the struct, which the caller
   need not set. */
static int mti_scaler_is_none(const mt_loss_scaler *s) {
    const mt_loss_scaler_desc *d = &s->desc;
    return d->initial_scale == 0 && d->min_scale == 0 && d->growth == 0 && d->backoff == 0 && d->growth_interval == 0 &&
           d->hysteresis == 0 && s->scale == 0 && s->good_steps == 0 && s->overflows == 0 && s->skipped == 0;
}

/* Returns the name of a field of the loss scaler with a value that no run can produce, or NULL. */
static const char *mti_state_fault(const mt_training_state *state) {
    const mt_loss_scaler *scaler = &state->scaler;
    if (mti_scaler_is_none(scaler)) return NULL;
    return mti_scaler_fault(scaler);
}

/* Returns the field of this name, which is one of the list. */
static const mt_field *mti_state_field(const mt_field fields[MTI_STATE_FIELDS], const char *name) {
    while (strcmp(fields->name, name) != 0) fields++;
    return fields;
}

static mt_status mti_state_read(mt_context *ctx, const mt_safetensors *file, mt_training_state *state) {
    mt_field fields[MTI_STATE_FIELDS];
    const char *fault;
    mti_state_fields(state, fields);
    MT_TRY(mt_safetensors_fields(ctx, file, fields, MTI_STATE_FIELDS));
    fault = mti_state_fault(state);
    return fault ? mt_safetensors_refuse(ctx, file, fault, mti_scaler_wanted(fault)) : MT_SUCCESS;
}

/* -- names and layouts -- */

/* A part of a parameter in a tensor of a file. */
typedef struct mti_slice {
    int param, tensor; /* indices in the registry and in mti_table_map.tensors */
    int row;           /* of the table; -1: the parameter has no row */
    int next;          /* piece of the same tensor, below this one; -1: none */
    int64_t at, count; /* its first row in the tensor; its rows */
    mt_tensor_part part;
} mti_slice;

/* A tensor of a file. */
typedef struct mti_stored {
    int row;            /* the first of the table with its name; -1: the name is that of its parameter */
    int64_t number;     /* in the place of '#'; -1: none */
    int first;          /* its first piece */
    int64_t rows, cols; /* before it is transposed; a vector has cols 1 */
    int vector, transposed;
    int whole; /* 1: it is one parameter, as in the registry */
} mti_stored;

/* Which tensor of the files has which parts of the parameters of this rank's stage. */
typedef struct mti_table_map {
    const mt_tensor_table *table; /* NULL: names and layouts of the registry */
    mti_stored *tensors;          /* in the order of the files */
    mti_slice *pieces;            /* in the order of the parameters */
    int *begin;                   /* the first piece of each parameter, and at the end piece_count */
    int tensor_count, piece_count;
} mti_table_map;

/* -- a checkpoint -- */

struct mt_checkpoint {
    mt_params *params;
    int count; /* of params, when the checkpoint was created */
    mt_optimizer *optimizer;
    int keep;
    mt_checkpoint_format format; /* zeros: no format */
    const void *model;
    mti_table_map own, other; /* of the registry's names; of the table, empty without one */
    mt_field *fields;         /* a copy of mt_checkpoint_desc.fields */
    int field_count;
    /* whole: a parameter in host memory; spare: a tensor of a file that is not one whole parameter, or NULL */
    float *whole, *spare;
    int held;       /* the index of the parameter in whole, or of the tensor in spare; -1: none */
    char *given[2]; /* texts of the files mti_given_names that were loaded last, or NULL */
    void *exchange; /* device memory of MT_ERROR_BYTES, for mti_agree */
    /* file descriptor of the lock, on the first rank after mti_checkpoint_lock; otherwise -1 */
    int lock;
    pid_t process; /* that has taken the lock; a process forked from it may not write */
    char directory[MT_PATH_MAX];
    mt_safetensors_writer writer; /* its file also writes the JSON files */
};

/* Returns 1 when name is the pattern, with a number in the place of '#', which goes to *number (-1: there is none). */
static int mti_pattern_fits(const char *pattern, const char *name, int64_t *number) {
    const char *place = strchr(pattern, '#');
    size_t n = place ? (size_t)(place - pattern) : 0, digits;
    char text[32];
    uint64_t value;
    *number = -1;
    if (!place) return strcmp(pattern, name) == 0;
    if (strncmp(pattern, name, n) != 0) return 0;
    digits = strspn(name + n, "0123456789");
    if (digits == 0 || digits > 18 || (digits > 1 && name[n] == '0')) return 0;
    memcpy(text, name + n, digits);
    text[digits] = 0;
    if (!mt_parse_whole(text, (uint64_t)INT64_MAX, &value)) return 0;
    *number = (int64_t)value;
    return strcmp(place + 1, name + n + digits) == 0;
}

/* Writes the pattern with a number in the place of '#'. */
static void mti_pattern_text(const char *pattern, int64_t number, char *text, size_t bytes) {
    const char *place = strchr(pattern, '#');
    if (!place || number < 0) snprintf(text, bytes, "%s", pattern);
    else snprintf(text, bytes, "%.*s%lld%s", (int)(place - pattern), pattern, (long long)number, place + 1);
}

/* Returns 1 when a row describes a parameter or a part of it, and *number, when its name is `param`. */
static int mti_row_fits(const mt_tensor_table *table, int row, const char *param, int64_t *number) {
    const mt_tensor_name *n = &table->names[row];
    return n->param && !(n->flags & MT_TENSOR_COPY) && mti_pattern_fits(n->param, param, number);
}

/* Returns the row whose tensor a row with MT_TENSOR_COPY repeats, or -1. */
static int mti_row_original(const mt_tensor_table *table, int row) {
    int i;
    for (i = 0; i < table->count; i++)
        if (table->names[i].param && !(table->names[i].flags & MT_TENSOR_COPY) &&
            strcmp(table->names[i].param, table->names[row].param) == 0)
            return i;
    return -1;
}

/* Returns the file's name of a row; bare: without the prefix of the table. */
static const char *mti_row_file(const mt_tensor_table *table, int row, int bare) {
    const char *file = table->names[row].file;
    size_t n = bare && table->prefix ? strlen(table->prefix) : 0;
    return strncmp(file, table->prefix ? table->prefix : "", n) == 0 ? file + n : file;
}

/* Returns the first row of the table with the same file. */
static int mti_row_first(const mt_tensor_table *table, int row) {
    int first = 0;
    while (strcmp(table->names[first].file, table->names[row].file) != 0) first++;
    return first;
}

/* Returns 1 when another row of the table has the same file. */
static int mti_row_is_shared(const mt_tensor_table *table, int row) {
    int i;
    for (i = 0; i < table->count; i++)
        if (i != row && strcmp(table->names[i].file, table->names[row].file) == 0) return 1;
    return 0;
}

/* The rows and columns of a parameter in tables: a parameter of one row is a column. */
static int64_t mti_named_rows(const mt_param *p) { return p->desc.rows == 1 ? p->desc.cols : p->desc.rows; }
static int64_t mti_named_cols(const mt_param *p) { return p->desc.rows == 1 ? 1 : p->desc.cols; }

static mt_status mti_table_check(mt_context *ctx, const mt_tensor_table *table) {
    int i, original;
    if (!table->names || table->count <= 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: the table has %d names", table->count);
    for (i = 0; i < table->count; i++) {
        const mt_tensor_name *n = &table->names[i];
        if (!n->file || !n->file[0] || strlen(n->file) > MT_NAME_MAX)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_checkpoint_create: row %d of the table has no file, or one of more than %d characters",
                           i, MT_NAME_MAX);
        if (strchr(n->file, '#') != strrchr(n->file, '#'))
            return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: '%s' has two '#', must have one at most",
                           n->file);
        if (n->param && !strchr(n->param, '#') != !strchr(n->file, '#'))
            return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: only one of '%s' and '%s' has a number '#'",
                           n->file, n->param);
        if (!(n->flags & MT_TENSOR_COPY)) continue;
        original = n->param ? mti_row_original(table, i) : -1;
        if (original < 0 || n->part != 0 || table->names[original].part != 0)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_checkpoint_create: '%s' of the table has MT_TENSOR_COPY, but no other row has the whole "
                           "parameter",
                           n->file);
    }
    return MT_SUCCESS;
}

/* Checks that the part is a part of n rows. */
static int mti_part_is_valid(const mt_tensor_part *x, int64_t n) {
    int64_t zip = x->zip < 0 ? -x->zip : x->zip;
    if (x->unit <= 0 || n % x->unit != 0 || x->first < 0 || x->rows <= 0 || x->first > x->unit - x->rows) return 0;
    return zip == 0 || (zip % 2 == 0 && zip <= x->zip_unit && n / x->unit * x->rows % x->zip_unit == 0);
}

/* Adds a piece to the list of its tensor, which is made when there is none of this name. */
static void mti_map_join(mti_table_map *map, int k, int64_t number) {
    mti_slice *piece = &map->pieces[k];
    int row = piece->row < 0 ? -1 : mti_row_first(map->table, piece->row), *link;
    int t = piece->row >= 0 && mti_row_is_shared(map->table, piece->row) ? map->tensor_count - 1 : -1;
    while (t >= 0 && (map->tensors[t].row != row || map->tensors[t].number != number)) t--;
    if (t < 0) {
        t = map->tensor_count++;
        map->tensors[t].row = row;
        map->tensors[t].number = number;
        map->tensors[t].first = -1;
    }
    piece->tensor = t;
    for (link = &map->tensors[t].first; *link >= 0 && map->pieces[*link].row < piece->row;)
        link = &map->pieces[*link].next;
    piece->next = *link;
    *link = k;
}

/* Adds the piece of parameter i that a row of the table describes; row -1: the whole parameter. */
static mt_status mti_map_piece(mt_context *ctx, const mt_checkpoint *c, mti_table_map *map, int i, int row,
                               int64_t number) {
    const mt_param *p = c->params->list[i];
    int64_t n = mti_named_rows(p);
    mti_slice *piece = &map->pieces[map->piece_count];
    int part = row < 0 ? 0 : map->table->names[row].part;
    memset(piece, 0, sizeof *piece);
    piece->param = i;
    piece->row = row;
    piece->part.unit = piece->part.rows = part == 0 ? n : 0;
    if (part != 0 && !c->format.part)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_checkpoint_create: '%s': table.names[%d].part is %d, must be 0 without "
                       "mt_checkpoint_format.part",
                       p->name, row, part);
    if (part != 0) (c->format.part)(c->model, p, part, &piece->part);
    if (piece->part.rows == 0) return MT_SUCCESS;
    if (!mti_part_is_valid(&piece->part, n))
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "mt_checkpoint_create: part %d of '%s' is rows from %lld on, %lld of each %lld, zip %lld of %lld, "
            "which the %lld rows cannot have",
            part, p->name, (long long)piece->part.first, (long long)piece->part.rows, (long long)piece->part.unit,
            (long long)piece->part.zip, (long long)piece->part.zip_unit, (long long)n);
    piece->count = n / piece->part.unit * piece->part.rows;
    mti_map_join(map, map->piece_count++, number);
    return MT_SUCCESS;
}

/* Checks that the pieces of a parameter have each of its rows once. */
static mt_status mti_map_covers(mt_context *ctx, const mt_checkpoint *c, const mti_table_map *map, int i) {
    const mti_slice *x = &map->pieces[map->begin[i]], *end = &map->pieces[map->piece_count], *y;
    int64_t unit = x->part.unit, rows = 0;
    int apart = 1;
    for (; x < end; x++) {
        rows += x->part.rows;
        if (x->part.unit != unit) apart = 0;
        for (y = x + 1; y < end; y++)
            if (x->part.first < y->part.first + y->part.rows && y->part.first < x->part.first + x->part.rows) apart = 0;
    }
    if (apart && rows == unit) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: the parts of '%s' in the table are not each row once",
                   c->params->list[i]->name);
}

/* Computes where the pieces of a tensor are in it, and its shape. */
static int mti_piece_transposed(const mti_table_map *map, const mti_slice *piece) {
    return piece->row >= 0 && (map->table->names[piece->row].flags & MT_TENSOR_TRANSPOSED);
}

static mt_status mti_map_finish(mt_context *ctx, const mt_checkpoint *c, mti_table_map *map, int t) {
    mti_stored *s = &map->tensors[t];
    const mt_param *first = c->params->list[map->pieces[s->first].param];
    const mti_slice *one = &map->pieces[s->first];
    int k, same = 1;
    s->cols = mti_named_cols(first);
    s->vector = first->desc.rows == 1;
    s->transposed = mti_piece_transposed(map, one) && !s->vector;
    for (k = s->first; k >= 0; k = map->pieces[k].next) {
        const mt_param *p = c->params->list[map->pieces[k].param];
        if (mti_piece_transposed(map, &map->pieces[k]) != mti_piece_transposed(map, one))
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_checkpoint_create: the rows of '%s' in the table do not agree on MT_TENSOR_TRANSPOSED",
                           map->table->names[one->row].file);
        map->pieces[k].at = s->rows;
        s->rows += map->pieces[k].count;
        same = same && mti_named_cols(p) == s->cols && (p->desc.rows == 1) == s->vector;
    }
    s->whole = one->next < 0 && one->part.rows == one->part.unit && one->part.zip == 0 && !s->transposed;
    if (same) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: '%s' of the table has parts of different widths",
                   map->table->names[s->row].file);
}

/* Finds the tensors of the parameters of this stage. On entry *map is zero. */
static mt_status mti_map_build(mt_context *ctx, const mt_checkpoint *c, const mt_tensor_table *table,
                               mti_table_map *map) {
    int i, r, rows = table ? table->count : 0, pieces = 0;
    int64_t number;
    void *memory;
    map->table = table;
    if (table) MT_TRY(mti_table_check(ctx, table));
    for (i = 0; i < c->count; i++)
        for (r = -1; r < rows; r++) pieces += r < 0 || mti_row_fits(table, r, c->params->list[i]->name, &number);
    MT_TRY(mti_host_new(ctx, (size_t)pieces * sizeof *map->pieces, &memory));
    map->pieces = (mti_slice *)memory;
    MT_TRY(mti_host_new(ctx, (size_t)pieces * sizeof *map->tensors, &memory));
    map->tensors = (mti_stored *)memory;
    MT_TRY(mti_host_new(ctx, (size_t)(c->count + 1) * sizeof *map->begin, &memory));
    map->begin = (int *)memory;
    for (i = 0; i < c->count; i++) {
        map->begin[i] = map->piece_count;
        for (r = 0; r < rows; r++)
            if (mti_row_fits(table, r, c->params->list[i]->name, &number))
                MT_TRY(mti_map_piece(ctx, c, map, i, r, number));
        if (map->piece_count == map->begin[i]) MT_TRY(mti_map_piece(ctx, c, map, i, -1, -1));
        MT_TRY(mti_map_covers(ctx, c, map, i));
    }
    map->begin[c->count] = map->piece_count;
    for (i = 0; i < map->tensor_count; i++) MT_TRY(mti_map_finish(ctx, c, map, i));
    return MT_SUCCESS;
}

static void mti_map_free(mti_table_map *map) {
    mt_host_free(map->tensors);
    mt_host_free(map->pieces);
    mt_host_free(map->begin);
}

/* Returns the row of the parameter that is row r of a piece. */
static int64_t mti_slice_row(const mti_slice *x, int64_t r) {
    int64_t half = (x->part.zip < 0 ? -x->part.zip : x->part.zip) / 2, k = half ? r % x->part.zip_unit : 0;
    if (k < 2 * half) r += (x->part.zip > 0 ? k / 2 + k % 2 * half : k % half * 2 + k / half) - k;
    return r / x->part.rows * x->part.unit + x->part.first + r % x->part.rows;
}

/* Copies a piece between the whole parameter and a tensor of a file, in blocks of 32 x 32, which fit into the cache. */
static void mti_slice_copy(const mti_stored *s, const mti_slice *x, int to_file, float *param, float *tensor) {
    int64_t cols = s->cols, r, c, i, j;
    for (r = 0; r < x->count; r += 32)
        for (c = 0; c < cols; c += 32)
            for (i = r; i < mt_min(r + 32, x->count); i++) {
                float *ours = param + mti_slice_row(x, i) * cols;
                for (j = c; j < mt_min(c + 32, cols); j++) {
                    float *theirs = tensor + (s->transposed ? j * s->rows + x->at + i : (x->at + i) * cols + j);
                    if (to_file) *theirs = ours[j];
                    else ours[j] = *theirs;
                }
            }
}

static int64_t mti_largest_stored(const mti_table_map *map, int all) {
    int64_t most = 0;
    int t;
    for (t = 0; t < map->tensor_count; t++)
        if (all || !map->tensors[t].whole) most = mt_max(most, map->tensors[t].rows * map->tensors[t].cols);
    return most;
}

static mt_status mti_checkpoint_memory(mt_context *ctx, mt_checkpoint *c) {
    int64_t spare = mti_largest_stored(&c->other, 0);
    void *memory;
    MT_TRY(mti_host_new(ctx, (size_t)mti_largest_stored(&c->own, 1) * sizeof(float), &memory));
    c->whole = (float *)memory;
    if (spare > 0) MT_TRY(mti_host_new(ctx, (size_t)spare * sizeof(float), &memory));
    if (spare > 0) c->spare = (float *)memory;
    return mt_context_alloc(ctx, MT_ERROR_BYTES, &c->exchange);
}

/* Returns 1 when the name of a field is already in the metadata: from the library, the format, or one of the first
   `fields` fields. */
static int mti_field_is_taken(const mt_checkpoint *c, const char *name, int fields) {
    static const char *const own[] = {"checksum", "format", MTI_VERSION_KEY, "note", "optimizer_step"};
    mt_training_state none;
    mt_field state[MTI_STATE_FIELDS];
    const char *other;
    char value[MT_FIELD_TEXT_MAX];
    int i;
    for (i = 0; i < (int)(sizeof own / sizeof *own); i++)
        if (strcmp(name, own[i]) == 0) return 1;
    mti_state_fields(&none, state);
    for (i = 0; i < MTI_STATE_FIELDS; i++)
        if (strcmp(name, state[i].name) == 0) return 1;
    for (i = 0; c->format.metadata && (other = (c->format.metadata)(c->model, i, value)) != NULL; i++)
        if (strcmp(name, other) == 0) return 1;
    while (fields-- > 0)
        if (strcmp(name, c->fields[fields].name) == 0) return 1;
    return 0;
}

/* Copies the program's fields to c->fields and checks them. */
static mt_status mti_checkpoint_fields(mt_context *ctx, mt_checkpoint *c, const mt_checkpoint_desc *desc) {
    void *memory;
    int i;
    if (desc->field_count == 0) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)desc->field_count * sizeof *c->fields, &memory));
    c->fields = (mt_field *)memory;
    c->field_count = desc->field_count;
    memcpy(c->fields, desc->fields, (size_t)c->field_count * sizeof *c->fields);
    MT_TRY(mti_fields_check(ctx, "mt_checkpoint_create", c->fields, c->field_count));
    for (i = 0; i < c->field_count; i++) {
        const mt_field *f = &c->fields[i];
        if (mti_field_is_taken(c, f->name, i))
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_checkpoint_create: fields[%d]: another field is also called '%.100s'", i, f->name);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_checkpoint_create(mt_context *ctx, mt_params *params, const mt_checkpoint_desc *desc,
                                      mt_checkpoint **out) {
    static const char *const function = "mt_checkpoint_create";
    mt_checkpoint *c;
    void *memory;
    size_t end;
    mt_status status;
    MT_TRY(mti_params_known(ctx, params, function));
    if (!desc || (desc->directory && !desc->directory[0]) || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                       !out   ? "out is NULL"
                       : desc ? "desc.directory is empty"
                              : "desc is NULL");
    *out = NULL;
    if (desc->directory && strlen(desc->directory) > MT_PATH_MAX - 128)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: directory has %zu characters, must have at most %d", function,
                       strlen(desc->directory), MT_PATH_MAX - 128);
    MT_TRY(mt_check_integer(ctx, function, NULL, "keep", desc->keep, 0, INT64_MAX));
    if (desc->optimizer && desc->optimizer->params != params)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the optimizer is not of this registry", function);
    if (desc->model && !desc->format)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: model is set, but format, which it is for, is NULL", function);
    if (desc->field_count < 0 || (desc->field_count > 0) != (desc->fields != NULL))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: field_count is %d, fields is %s", function, desc->field_count,
                       desc->fields ? "not NULL" : "NULL");
    MT_TRY(mti_host_new(ctx, sizeof *c, &memory));
    c = (mt_checkpoint *)memory;
    c->params = params;
    c->count = params->count;
    c->optimizer = desc->optimizer;
    c->keep = desc->keep ? desc->keep : 2;
    if (desc->format) c->format = *desc->format;
    c->model = desc->model;
    c->held = c->writer.file.fd = c->lock = -1;
    snprintf(c->directory, sizeof c->directory, "%s", desc->directory ? desc->directory : "");
    for (end = strlen(c->directory); end > 1 && c->directory[end - 1] == '/'; end--) c->directory[end - 1] = 0;
    status = mti_checkpoint_fields(ctx, c, desc);
    if (status == MT_SUCCESS) status = mti_map_build(ctx, c, NULL, &c->own);
    if (status == MT_SUCCESS && desc->table) status = mti_map_build(ctx, c, desc->table, &c->other);
    if (status == MT_SUCCESS) status = mti_checkpoint_memory(ctx, c);
    if (status == MT_SUCCESS) *out = c;
    else mt_checkpoint_destroy(ctx, c);
    return status;
}

MT_API void mt_checkpoint_destroy(mt_context *ctx, mt_checkpoint *checkpoint) {
    if (!ctx || !checkpoint) return;
    if (checkpoint->lock >= 0) close(checkpoint->lock);
    mt_context_free(ctx, checkpoint->exchange, MT_ERROR_BYTES);
    mti_header_free(&checkpoint->writer);
    mti_map_free(&checkpoint->own);
    mti_map_free(&checkpoint->other);
    mt_host_free(checkpoint->whole);
    mt_host_free(checkpoint->spare);
    mt_host_free(checkpoint->given[0]);
    mt_host_free(checkpoint->given[1]);
    mt_host_free(checkpoint->fields);
    mt_host_free(checkpoint);
}
