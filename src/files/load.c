/* ---- checkpoints are read ---------------------------------------------------------------------------------------- */

#pragma once
#include "save.c"

/* The files that are loaded. */
typedef struct mti_source {
    mt_safetensors_set model, optimizer;
    const mti_table_map *map; /* of the names in the model's files */
    int bare, lenient;        /* see mti_part */
    int has_masters;
    char *given[2]; /* on the first rank: texts of the files mti_given_names, NULL: no such file */
} mti_source;

static int mti_shape_fits(const mti_layout *l, const mt_safetensors_tensor *t) {
    int dims = l->dims;
    if (t->dims == 2 && dims == 1 && t->shape[0] == 1) return t->shape[1] == l->shape[0]; /* a vector as one row */
    return t->dims == dims && t->shape[0] == l->shape[0] && (dims == 1 || t->shape[1] == l->shape[1]);
}

static void mti_shape_text(const int64_t *shape, int dims, char *text, size_t bytes) {
    size_t used = 0;
    int i;
    text[0] = 0;
    for (i = 0; i < dims && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%lld", i > 0 ? ", " : "", (long long)shape[i]);
}

/* Finds a tensor by its name in the table, or with another ending. */
static const mt_safetensors_tensor *mti_source_named(const mt_safetensors_set *b, const mti_part *part,
                                                     const char *name) {
    const mt_safetensors_tensor *found = mt_safetensors_set_find(b, name);
    const mt_tensor_table *table = part->map->table;
    char other[2 * MT_NAME_MAX + 64];
    size_t n = strlen(name), ending;
    int i;
    for (i = 0; !found && table && i < table->alias_count; i++) {
        ending = strlen(table->aliases[i].stands_for);
        if (ending > n || strcmp(name + n - ending, table->aliases[i].stands_for) != 0) continue;
        snprintf(other, sizeof other, "%.*s%s", (int)(n - ending), name, table->aliases[i].ending);
        found = mt_safetensors_set_find(b, other);
    }
    return found;
}

/* Finds the tensor that one with this name repeats (MT_TENSOR_COPY). NULL: the name is none of a copy, or the files do
   not have the other tensor. */
static const mt_safetensors_tensor *mti_source_original(const mt_safetensors_set *b, const mti_part *part,
                                                        const char *name) {
    const mt_tensor_table *table = part->map->table;
    char other[MT_NAME_MAX + 32];
    int64_t number;
    int i;
    for (i = 0; table && i < table->count; i++) {
        if (!(table->names[i].flags & MT_TENSOR_COPY)) continue;
        if (!mti_pattern_fits(mti_row_file(table, i, part->bare), name, &number)) continue;
        mti_pattern_text(mti_row_file(table, mti_row_original(table, i), part->bare), number, other, sizeof other);
        return mti_source_named(b, part, other);
    }
    return NULL;
}

/* Finds a tensor by its name in the table, with another ending, or by the name of a copy. */
static const mt_safetensors_tensor *mti_source_find(const mt_safetensors_set *b, const mti_part *part,
                                                    const char *name) {
    const mt_safetensors_tensor *found = mti_source_named(b, part, name);
    const mt_tensor_table *table = part->map->table;
    char copy[MT_NAME_MAX + 32];
    int64_t number;
    int i;
    for (i = 0; !found && table && i < table->count; i++) {
        if (!(table->names[i].flags & MT_TENSOR_COPY)) continue;
        if (!mti_pattern_fits(mti_row_file(table, mti_row_original(table, i), part->bare), name, &number)) continue;
        mti_pattern_text(mti_row_file(table, i, part->bare), number, copy, sizeof copy);
        found = mt_safetensors_set_find(b, copy);
    }
    return found;
}

static mti_part mti_source_part(const mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_model_part(c);
    part.map = s->map;
    part.bare = s->bare;
    part.lenient = s->lenient;
    return part;
}

/* Compares a tensor of the files with the one that it repeats, if it is a copy. */
static mt_status mti_source_copy_check(mt_context *ctx, const mt_safetensors_set *b, const mti_part *part,
                                       const mt_safetensors_tensor *t) {
    const mt_safetensors_tensor *original = mti_source_original(b, part, t->name);
    char theirs[192], ours[192];
    if (!original) return MT_SUCCESS;
    if (mti_safetensors_dtypes[mti_safetensors_dtype(t->dtype)].dtype < 0)
        return mt_fail(ctx, MT_ERR_DATA, "%s: '%s' is %s, must be F32, F64, BF16 or F16", b->path, t->name, t->dtype);
    if (t->dims == original->dims && memcmp(t->shape, original->shape, sizeof t->shape) == 0)
        return mti_tensors_equal(ctx, t, original);
    mti_shape_text(t->shape, t->dims, theirs, sizeof theirs);
    mti_shape_text(original->shape, original->dims, ours, sizeof ours);
    return mt_fail(ctx, MT_ERR_DATA, "%s: '%s' has shape [%s], but '%s' [%s]; this model has one parameter for both",
                   b->path, t->name, theirs, original->name, ours);
}

/* Compares all copies in the model's files, on the first rank. */
static mt_status mti_source_copies(mt_context *ctx, const mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_source_part(c, s);
    int i, k;
    if (mt_comm_rank(c->params->grid->world) != 0) return MT_SUCCESS;
    for (i = 0; i < s->model.count; i++)
        for (k = 0; k < mt_safetensors_count(s->model.files[i]); k++)
            MT_TRY(mti_source_copy_check(ctx, &s->model, &part, mt_safetensors_at(s->model.files[i], k)));
    return MT_SUCCESS;
}

/* Returns 1 when the files have no tensor t of a part, and need not have it. */
static int mti_source_lacks(const mt_checkpoint *c, const mt_safetensors_set *b, const mti_part *part, int t) {
    int row = part->map->tensors[t].row;
    mti_layout l;
    if (!part->lenient || row < 0 || !(part->map->table->names[row].flags & MT_TENSOR_OPTIONAL)) return 0;
    l = mti_part_layout(c, part, t, MTI_VALUE);
    return !mti_source_find(b, part, l.name);
}

/* Checks that the files have a tensor with this name and shape, of type F32, F64, BF16 or F16. */
static mt_status mti_source_check_tensor(mt_context *ctx, const mt_safetensors_set *b, const mti_part *part,
                                         const mti_layout *l) {
    const mt_safetensors_tensor *t = mti_source_find(b, part, l->name);
    char theirs[192], ours[64];
    if (!t) return mt_fail(ctx, MT_ERR_DATA, "%s: has no tensor '%s'", b->path, l->name);
    if (mti_tensor_type(t) < 0)
        return mt_fail(ctx, MT_ERR_DATA, "%s: '%s' is %s, must be F32, F64, BF16 or F16", b->path, l->name, t->dtype);
    if (mti_shape_fits(l, t)) return MT_SUCCESS;
    mti_shape_text(t->shape, t->dims, theirs, sizeof theirs);
    mti_shape_text(l->shape, l->dims, ours, sizeof ours);
    return mt_fail(ctx, MT_ERR_DATA, "%s: '%s' has shape [%s], this model's has [%s]", b->path, l->name, theirs, ours);
}

/* Checks that every tensor of a part is in the files and has the right shape and type. */
static mt_status mti_source_check_part(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b,
                                       const mti_part *part) {
    mti_layout l;
    int what, t;
    for (what = part->first; what <= part->last; what++)
        for (t = 0; t < part->map->tensor_count; t++) {
            l = mti_part_layout(c, part, t, what);
            if (!mti_source_lacks(c, b, part, t)) MT_TRY(mti_source_check_tensor(ctx, b, part, &l));
            else if (!c->params->placed)
                return mt_fail(ctx, MT_ERR_ARGUMENT,
                               "%s: has no tensor '%s'; call mt_params_init first, as the parameter keeps its value",
                               b->path, l.name);
        }
    return MT_SUCCESS;
}

/* Returns 1 when `name` is that of a row with a parameter; bare = 1: without the prefix. With a prefix, rows that do
   not begin with it do not count. */
static int mti_table_has(const mt_tensor_table *table, const char *name, int bare) {
    size_t n = table->prefix ? strlen(table->prefix) : 0;
    int64_t number;
    int i;
    for (i = 0; i < table->count; i++)
        if (table->names[i].param && strncmp(table->names[i].file, n ? table->prefix : "", n) == 0 &&
            mti_pattern_fits(mti_row_file(table, i, bare), name, &number))
            return 1;
    return 0;
}

/* Returns 1 when a tensor of the files has a name of the table. It depends on the files alone, so all pipeline stages
   get the same answer. */
static int mti_files_have(const mt_safetensors_set *b, const mt_tensor_table *table, int bare) {
    int i, t;
    for (i = 0; i < b->count; i++)
        for (t = 0; t < mt_safetensors_count(b->files[i]); t++)
            if (mti_table_has(table, mt_safetensors_at(b->files[i], t)->name, bare)) return 1;
    return 0;
}

/* Returns 1 when the files have a tensor with the name of a parameter of this stage. */
static int mti_files_have_own(const mt_checkpoint *c, const mt_safetensors_set *b) {
    int i;
    for (i = 0; i < c->params->count; i++)
        if (mt_safetensors_set_find(b, c->params->list[i]->name)) return 1;
    return 0;
}

/* Finds out which names the files have: those of the table, those without its prefix, or those of the registry. */
static void mti_source_names(const mt_checkpoint *c, mti_source *s) {
    const mt_tensor_table *table;
    s->map = mti_model_part(c).map;
    s->bare = 0;
    table = s->map->table;
    if (!table || mti_files_have(&s->model, table, 0)) return;
    s->bare = table->prefix && mti_files_have(&s->model, table, 1);
    if (!s->bare && mti_files_have_own(c, &s->model)) s->map = &c->own;
}

/* Reads a text that save keeps. It is copied into every checkpoint, so it must be a file of the folder and a JSON
   object: a folder from elsewhere must not make a save publish another file of the user. */
static mt_status mti_given_read(mt_context *ctx, const char *directory, const char *name, char **out) {
    void *text;
    int exists;
    mt_status status = mti_json_file(ctx, directory, name, MTI_GIVEN_MAX, NULL, 0, &text, &exists);
    *out = (char *)text;
    return status;
}

/* Returns 1 when a component of path is a link that is named like a checkpoint. It may have come with the directory of
   checkpoints that it is in; a program has named links of other names itself. */
static int mti_behind_step_link(const char *path) {
    char part[MT_PATH_MAX], to[1];
    const char *name = path, *end;
    for (; *name && strlen(path) < sizeof part; name = end + (*end == '/')) {
        end = name + strcspn(name, "/");
        memcpy(part, path, (size_t)(end - path));
        part[end - path] = 0; /* without a slash at its end, which would follow the link */
        if (mti_step_of(part + (name - path)) >= 0 && readlink(part, to, sizeof to) >= 0) return 1;
    }
    return 0;
}

/* Reads the texts that save keeps, on the first rank. Without a directory, nothing is saved. The folder behind a link
   may be any folder of the user, so it is loaded, but none of its texts is copied. */
static mt_status mti_source_given(mt_context *ctx, const mt_checkpoint *c, const char *directory, mti_source *s) {
    char text[MT_PATH_MAX + 128];
    int i, keeps = c->format.config && c->directory[0] && mt_comm_rank(c->params->grid->world) == 0;
    if (keeps && mti_behind_step_link(directory)) {
        snprintf(text, sizeof text, "%s: is behind a link, so a save does not copy its config.json", directory);
        mt_log(ctx, MT_LOG_INFO, text);
        return MT_SUCCESS;
    }
    for (i = 0; keeps && i < 2; i++) MT_TRY(mti_given_read(ctx, directory, mti_given_names[i], &s->given[i]));
    return MT_SUCCESS;
}

static mt_status mti_source_open_model(mt_context *ctx, mt_checkpoint *c, const char *directory, mti_source *s) {
    mti_part part;
    MT_TRY(mti_set_open(ctx, directory, "model", &s->model));
    if (c->format.check) MT_TRY((c->format.check)(ctx, c->model, directory, &s->model));
    mti_source_names(c, s);
    part = mti_source_part(c, s);
    MT_TRY(mti_source_check_part(ctx, c, &s->model, &part));
    MT_TRY(mti_source_copies(ctx, c, s));
    return mti_source_given(ctx, c, directory, s);
}

/* Verifies the checksums; each file is read by one rank. needed = 1: a file without a checksum is an error. */
static mt_status mti_source_verify(mt_context *ctx, const mt_checkpoint *c, const mti_source *s, int needed) {
    mt_comm *world = c->params->grid->world;
    int i, has;
    for (i = mt_comm_rank(world); i < s->model.count + s->optimizer.count; i += mt_comm_size(world)) {
        const mt_safetensors *file = i < s->model.count ? s->model.files[i] : s->optimizer.files[i - s->model.count];
        MT_TRY(mti_safetensors_verify(ctx, file, &has));
        if (needed && !has) return mt_fail(ctx, MT_ERR_DATA, "%s: has no checksum, is not of a checkpoint", file->path);
    }
    return MT_SUCCESS;
}

/* Checks that the elements of a tensor are finite, and stay so when they are rounded to a type. */
static mt_status mti_source_check_values(mt_context *ctx, const mt_safetensors_tensor *t, mt_dtype dtype) {
    float block[1 << 11];
    int64_t elements = mti_tensor_elements(t), i, k, n;
    for (i = 0; i < elements; i += n) {
        n = mt_min(elements - i, (int64_t)(sizeof block / sizeof *block));
        MT_TRY(mti_elements_read(ctx, t, i, n, block));
        k = mti_unfit(block, n, dtype);
        if (k < n) return mti_unfit_fail(ctx, t->file->path, t->name, i + k, block[k], dtype);
    }
    return MT_SUCCESS;
}

/* Checks the values of a part. The ranks of a stage share the tensors. A master is rounded to the type of its
   parameter. */
static mt_status mti_source_check_numbers(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b,
                                          const mti_part *part) {
    const mt_grid *g = c->params->grid;
    int ranks = mt_comm_size(g->dp_cp) * g->tp_size, rank = mt_comm_rank(g->dp_cp) * g->tp_size + g->tp_rank, what, t;
    mt_dtype dtype = mt_params_dtype(c->params);
    for (what = part->first; what <= part->last; what++)
        for (t = rank; t < part->map->tensor_count; t += ranks) {
            mti_layout l = mti_part_layout(c, part, t, what);
            int moment = what == MT_EXP_AVG || what == MT_EXP_AVG_SQ;
            if (!mti_source_lacks(c, b, part, t))
                MT_TRY(mti_source_check_values(ctx, mti_source_find(b, part, l.name), moment ? MT_F32 : dtype));
        }
    return MT_SUCCESS;
}

/* Returns 1 for a tensor that the table has without a parameter, and for a copy of one that the files have. */
static int mti_source_ignores(const mt_safetensors_set *b, const mti_part *part, const char *name) {
    const mt_tensor_table *table = part->map->table;
    int64_t number;
    int i;
    if (mti_source_original(b, part, name)) return 1;
    for (i = 0; table && i < table->count; i++)
        if (!table->names[i].param && mti_pattern_fits(mti_row_file(table, i, part->bare), name, &number)) return 1;
    return 0;
}

/* Returns an error that names a tensor that belongs to no parameter of this rank. */
static mt_status mti_source_name_extra(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b,
                                       const mti_part *part) {
    mti_layout l;
    int f, k, t, what;
    for (f = 0; f < b->count; f++)
        for (k = 0; k < mt_safetensors_count(b->files[f]); k++) {
            const char *name = mt_safetensors_at(b->files[f], k)->name;
            int ours = mti_source_ignores(b, part, name);
            for (what = part->first; what <= part->last && !ours; what++)
                for (t = 0; t < part->map->tensor_count && !ours; t++) {
                    const mt_safetensors_tensor *found;
                    l = mti_part_layout(c, part, t, what);
                    found = mti_source_find(b, part, l.name);
                    ours = found && strcmp(found->name, name) == 0;
                }
            if (!ours) return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is not a parameter of this model", b->path, name);
        }
    return MT_SUCCESS;
}

/* Checks that the files have as many tensors as the parameters of all stages need. Collective over the pipeline
   group. */
static mt_status mti_source_count(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b,
                                  const mti_part *part) {
    mt_comm *pipeline = c->params->grid->pp;
    int32_t wanted = 0;
    int64_t has = b->tensors;
    int i, k;
    for (i = 0; i < part->map->tensor_count; i++)
        if (mti_param_is_ours(c->params, mti_stored_param(c, part->map, i)) && !mti_source_lacks(c, b, part, i))
            wanted += part->last - part->first + 1;
    if (mt_comm_size(pipeline) > 1) {
        mt_tensor one = mt_tensor_make(c->exchange, MT_I32, 1, 1);
        MT_TRY(mt_upload(ctx, &wanted, one));
        MT_TRY(mt_all_reduce(ctx, pipeline, c->exchange, c->exchange, 1, MT_I32, MT_SUM));
        MT_TRY(mt_download(ctx, one, &wanted));
    }
    for (i = 0; i < b->count; i++)
        for (k = 0; k < mt_safetensors_count(b->files[i]); k++)
            has -= mti_source_ignores(b, part, mt_safetensors_at(b->files[i], k)->name);
    if (has == wanted) return MT_SUCCESS;
    if (mt_comm_size(pipeline) == 1) MT_TRY(mti_source_name_extra(ctx, c, b, part));
    return mt_fail(ctx, MT_ERR_DATA, "%s: has %lld tensors, the model %d", b->path, (long long)has, (int)wanted);
}

/* Reads parameter i into c->whole. */
static mt_status mti_source_read(mt_context *ctx, mt_checkpoint *c, const mt_safetensors_set *b, const mti_part *part,
                                 int i, int what) {
    int k;
    for (k = part->map->begin[i]; k < part->map->begin[i + 1]; k++) {
        const mti_slice *piece = &part->map->pieces[k];
        const mti_stored *s = &part->map->tensors[piece->tensor];
        mti_layout l = mti_part_layout(c, part, piece->tensor, what);
        if (s->whole || c->held != piece->tensor)
            MT_TRY(mt_safetensors_read(ctx, mti_source_find(b, part, l.name), s->whole ? c->whole : c->spare));
        if (s->whole) continue;
        c->held = piece->tensor;
        mti_slice_copy(s, piece, 0, c->whole, c->spare);
    }
    return MT_SUCCESS;
}

/* Returns 1 when the files lack a part of parameter i, which therefore keeps its value. One rank logs it. */
static int mti_source_keeps(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b, const mti_part *part,
                            int i) {
    const mt_grid *g = c->params->grid;
    char text[MT_PATH_MAX + 512];
    mti_layout l;
    int k;
    for (k = part->map->begin[i]; k < part->map->begin[i + 1]; k++) {
        int t = part->map->pieces[k].tensor;
        if (!mti_source_lacks(c, b, part, t)) continue;
        l = mti_part_layout(c, part, t, MTI_VALUE);
        snprintf(text, sizeof text, "%s: has no tensor '%s'; '%s' keeps its value", b->path, l.name,
                 c->params->list[i]->name);
        if (g->tp_rank == 0 && mt_comm_rank(g->dp_cp) == 0) mt_log(ctx, MT_LOG_WARNING, text);
        return 1;
    }
    return 0;
}

/* Loads tensor number `what` of parameter i and writes it to its tensor number `as`. Every rank reads the whole tensor
   and takes its part; nothing is communicated. */
static mt_status mti_source_scatter(mt_context *ctx, mt_checkpoint *c, const mt_safetensors_set *b,
                                    const mti_part *part, int i, int what, int as) {
    const mt_param *p = c->params->list[i];
    MT_TRY(mti_source_read(ctx, c, b, part, i, what));
    if (as == MTI_VALUE) return mt_param_scatter(ctx, p, c->whole, p->value);
    return mt_optimizer_scatter(ctx, c->optimizer, p, (mt_optimizer_state)as, c->whole);
}

/* Loads all tensors. Parameters are loaded from the masters when the files have masters. Otherwise masters are loaded
   from the parameters. */
static mt_status mti_source_apply(mt_context *ctx, mt_checkpoint *c, const mti_source *s) {
    mti_part model = mti_source_part(c, s), optimizer = model;
    int masters = c->optimizer && !c->optimizer->desc.stochastic_rounding, i, what;
    int value = masters ? (int)MT_MASTER : (int)MTI_VALUE; /* scattering a master also writes its parameter */
    c->held = -1;
    if (s->optimizer.count > 0) optimizer = mti_optimizer_part(c);
    for (i = 0; i < c->params->count; i++) {
        if (masters && s->has_masters)
            MT_TRY(mti_source_scatter(ctx, c, &s->optimizer, &optimizer, i, MT_MASTER, value));
        else if (!mti_source_keeps(ctx, c, &s->model, &model, i))
            MT_TRY(mti_source_scatter(ctx, c, &s->model, &model, i, MTI_VALUE, value));
        for (what = MT_EXP_AVG; s->optimizer.count > 0 && what <= MT_EXP_AVG_SQ; what++)
            MT_TRY(mti_source_scatter(ctx, c, &s->optimizer, &optimizer, i, what, what));
    }
    return MT_SUCCESS;
}

/* The next save keeps the texts of the files that were loaded. */
static void mti_source_keep(mt_checkpoint *c, mti_source *s) {
    int i;
    for (i = 0; i < 2; i++) {
        mt_host_free(c->given[i]);
        c->given[i] = s->given[i];
        s->given[i] = NULL;
    }
}

static void mti_source_close(mti_source *s) {
    mti_set_close(&s->model);
    mti_set_close(&s->optimizer);
    mt_host_free(s->given[0]);
    mt_host_free(s->given[1]);
}

/* Opens and checks the optimizer's files. They have the masters of all parameters or of none. */
static mt_status mti_source_open_optimizer(mt_context *ctx, mt_checkpoint *c, const char *directory, mti_source *s) {
    mti_part part = mti_optimizer_part(c);
    mti_layout l = mti_part_layout(c, &part, 0, MT_MASTER);
    MT_TRY(mti_set_open(ctx, directory, part.stem, &s->optimizer));
    s->has_masters = mt_safetensors_set_find(&s->optimizer, l.name) != NULL;
    part.last = s->has_masters ? MT_MASTER : MT_EXP_AVG_SQ;
    return mti_source_check_part(ctx, c, &s->optimizer, &part);
}

/* Reads the training state and the optimizer's step from the first file. The state must be of step `wanted`. */
static mt_status mti_source_run(mt_context *ctx, const mti_source *s, int64_t wanted, mt_training_state *state,
                                mt_optimizer *optimizer) {
    const mt_safetensors *first = s->model.files[0];
    const char *note = mt_safetensors_metadata(first, "note");
    mt_field step = mti_optimizer_field(optimizer);
    memset(state, 0, sizeof *state);
    MT_TRY(mti_state_read(ctx, first, state));
    if (!note || strlen(note) >= sizeof state->note)
        return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has no note of at most %d bytes", first->path,
                       MT_NOTE_MAX - 1);
    memcpy(state->note, note, strlen(note) + 1);
    if (s->optimizer.count > 0) MT_TRY(mt_safetensors_fields(ctx, first, &step, 1));
    if (state->step == wanted) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has step '%lld', its directory %lld", first->path,
                   (long long)state->step, (long long)wanted);
}

/* Reads the training state, and checks that all files are of step `wanted` and of a version that can be read. */
static mt_status mti_source_state(mt_context *ctx, const mti_source *s, int64_t wanted, mt_training_state *state,
                                  mt_optimizer *optimizer) {
    const mt_safetensors *first = s->model.files[0];
    const char *step = mt_safetensors_metadata(first, "step"), *other;
    int i;
    MT_TRY(mti_source_run(ctx, s, wanted, state, optimizer));
    for (i = 0; i < s->model.count + s->optimizer.count; i++) {
        const mt_safetensors *file = i < s->model.count ? s->model.files[i] : s->optimizer.files[i - s->model.count];
        MT_TRY(mti_version_check(ctx, file, 1));
        other = mt_safetensors_metadata(file, "step");
        if (!other || strcmp(step, other) != 0)
            return mt_fail(ctx, MT_ERR_DATA, "%s: is of step %.24s, %s of %.24s", file->path, other ? other : "(none)",
                           mti_file_name(first->path), step);
    }
    return MT_SUCCESS;
}

/* Checks the program's fields without writing any. all = 1: every field must be there and valid, and those with
   must_match must match. all = 0: checks only fields with must_match that are there. */
static mt_status mti_source_fields(mt_context *ctx, const mt_checkpoint *c, const mti_source *s, int all) {
    const mt_safetensors *first = s->model.files[0];
    int i;
    for (i = 0; i < c->field_count; i++) {
        mt_field f = c->fields[i];
        const char *text = mt_safetensors_metadata(first, f.name);
        char ours[MT_FIELD_TEXT_MAX], theirs[MT_FIELD_TEXT_MAX], wanted[64];
        uint64_t value = 0;
        if (!all && (!text || !f.must_match)) continue;
        if (f.kind == MT_FIELD_TEXT) {
            if (!text || strlen(text) >= f.bytes) return mti_field_refuse(ctx, first, &f);
            if (!f.must_match || strncmp(text, (const char *)f.value, f.bytes) == 0) continue;
            snprintf(wanted, sizeof wanted, "'%.*s'", (int)mt_min((int64_t)f.bytes, 40), (const char *)f.value);
            return mt_safetensors_refuse(ctx, first, f.name, wanted);
        }
        mt_field_text(&f, ours);
        f.value = &value;
        MT_TRY(mt_safetensors_fields(ctx, first, &f, 1));
        mt_field_text(&f, theirs);
        if (f.must_match && strcmp(ours, theirs) != 0) return mt_safetensors_refuse(ctx, first, f.name, ours);
    }
    return MT_SUCCESS;
}

/* Writes the program's fields, after everything else has succeeded. */
static mt_status mti_source_take_fields(mt_context *ctx, const mt_checkpoint *c, const mti_source *s) {
    int i;
    for (i = 0; i < c->field_count; i++)
        if (!c->fields[i].must_match) MT_TRY(mt_safetensors_fields(ctx, s->model.files[0], &c->fields[i], 1));
    return MT_SUCCESS;
}

/* Checks that the arena has memory for the largest shard in f32. A scatter needs it for 16-bit parameters and for
   sharded optimizers. */
static mt_status mti_source_arena(mt_context *ctx, const mt_checkpoint *c) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor shard;
    int i;
    for (i = 0; i < c->params->count; i++) {
        const mt_tensor *value = &c->params->list[i]->value;
        if (value->dtype == MT_F32 && c->params->buckets.ranks <= 1) continue;
        MT_TRY(mt_arena_tensor(ctx, MT_F32, value->rows, value->cols, &shard));
        mt_arena_release(ctx, mark);
    }
    return MT_SUCCESS;
}

/* The optimizer's files, as mti_source_open_optimizer has found them. */
static mti_part mti_source_optimizer_part(const mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_optimizer_part(c);
    part.last = s->has_masters ? MT_MASTER : MT_EXP_AVG_SQ;
    return part;
}

/* Calls mti_source_check_numbers for each part. */
static mt_status mti_source_numbers(mt_context *ctx, const mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_source_part(c, s);
    MT_TRY(mti_source_check_numbers(ctx, c, &s->model, &part));
    if (s->optimizer.count == 0) return MT_SUCCESS;
    part = mti_source_optimizer_part(c, s);
    return mti_source_check_numbers(ctx, c, &s->optimizer, &part);
}

/* Opens and checks the files on this rank. state NULL: parameters only; otherwise state->step must be `step`. */
static mt_status mti_source_open(mt_context *ctx, mt_checkpoint *c, const char *directory, mti_source *s, int64_t step,
                                 mt_training_state *state, mt_optimizer *optimizer) {
    MT_TRY(mti_params_known(ctx, c->params, "mt_checkpoint_load"));
    MT_TRY(mti_checkpoint_params(ctx, "mt_checkpoint_load", c));
    MT_TRY(mti_source_arena(ctx, c));
    MT_TRY(mti_source_open_model(ctx, c, directory, s));
    if (state && c->optimizer) MT_TRY(mti_source_open_optimizer(ctx, c, directory, s));
    if (state) MT_TRY(mti_source_state(ctx, s, step, state, optimizer));
    MT_TRY(mti_source_fields(ctx, c, s, state != NULL));
    MT_TRY(mti_source_verify(ctx, c, s, state != NULL));
    return mti_source_numbers(ctx, c, s);
}

/* Calls mti_source_count for each part. Collective: called after mti_source_open has succeeded on every rank. */
static mt_status mti_source_counts(mt_context *ctx, mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_source_part(c, s);
    MT_TRY(mti_source_count(ctx, c, &s->model, &part));
    if (s->optimizer.count == 0) return MT_SUCCESS;
    part = mti_source_optimizer_part(c, s);
    return mti_source_count(ctx, c, &s->optimizer, &part);
}

/* All ranks must have read the same state from the same files: one whose file system lags may have seen others. */
static mt_status mti_load_compare(mt_context *ctx, const mt_checkpoint *c, const mti_source *s,
                                  mt_training_state *state, mt_optimizer *optimizer) {
    int i, files = s->model.count + s->optimizer.count;
    mti_settings t;
    MT_TRY(mti_settings_begin(ctx, MTI_STATE_FIELDS + 2 + files, &t));
    if (state) mti_settings_add_state(&t, state, c->optimizer ? optimizer : NULL);
    for (i = 0; i < files; i++) {
        const mt_safetensors *file = i < s->model.count ? s->model.files[i] : s->optimizer.files[i - s->model.count];
        const char *checksum = mt_safetensors_metadata(file, "checksum");
        mti_settings_add(&t, mti_file_name(file->path), "%zu bytes, checksum %.16s", file->map.bytes,
                         checksum ? checksum : "(none)");
    }
    return mti_settings_end(ctx, c->params, state ? "mt_checkpoint_load" : "mt_checkpoint_import", 0, &t);
}

/* Checks everything first, then loads. state NULL: parameters only. */
static mt_status mti_checkpoint_load(mt_context *ctx, mt_checkpoint *c, const char *directory, int64_t step,
                                     mt_training_state *state) {
    mt_comm *world = c->params->grid->world;
    mt_training_state theirs;
    mt_optimizer steps;
    mti_source s;
    mt_status status;
    memset(&s, 0, sizeof s);
    memset(&steps, 0, sizeof steps);
    s.lenient = !state;
    status = mti_agree(ctx, world, c->exchange,
                       mti_source_open(ctx, c, directory, &s, step, state ? &theirs : NULL, &steps));
    if (status == MT_SUCCESS) status = mti_load_compare(ctx, c, &s, state ? &theirs : NULL, &steps);
    if (status == MT_SUCCESS) status = mti_agree(ctx, world, c->exchange, mti_source_counts(ctx, c, &s));
    if (status == MT_SUCCESS && !c->params->placed)
        status =
            mti_agree(ctx, world, c->exchange,
                      mti_params_begin(ctx, c->params, state ? "mt_checkpoint_load" : "mt_checkpoint_import", NULL));
    if (status == MT_SUCCESS) status = mti_agree(ctx, world, c->exchange, mti_source_apply(ctx, c, &s));
    if (status == MT_SUCCESS && state) status = mti_source_take_fields(ctx, c, &s);
    if (status == MT_SUCCESS) mti_source_keep(c, &s);
    mti_source_close(&s);
    if (status == MT_SUCCESS) c->params->torn = 0;
    if (status != MT_SUCCESS || !state) return status;
    *state = theirs;
    if (c->optimizer) c->optimizer->step = steps.step;
    return MT_SUCCESS;
}

static mt_status mti_load_check(mt_context *ctx, const char *function, const mt_checkpoint *c, const void *argument,
                                const char *name) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!c || !argument) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, c ? name : "checkpoint");
    if (mt_context_has_data(ctx)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: MT_DEVICE_META has no memory to load files into", function);
}

MT_API mt_status mt_checkpoint_load(mt_context *ctx, mt_checkpoint *checkpoint, int64_t step,
                                    mt_training_state *state) {
    char path[MT_PATH_MAX];
    MT_TRY(mti_load_check(ctx, "mt_checkpoint_load", checkpoint, state, "state"));
    MT_TRY(mti_directory_check(ctx, "mt_checkpoint_load", checkpoint));
    MT_TRY(mt_checkpoint_path(ctx, checkpoint->directory, step, path, sizeof path));
    return mti_checkpoint_load(ctx, checkpoint, path, step, state);
}

MT_API mt_status mt_checkpoint_import(mt_context *ctx, mt_checkpoint *checkpoint, const char *directory) {
    MT_TRY(mti_load_check(ctx, "mt_checkpoint_import", checkpoint, directory, "directory"));
    return mti_checkpoint_load(ctx, checkpoint, directory, -1, NULL);
}
