/* ---- checkpoints are written ------------------------------------------------------------------------------------- */

#pragma once
#include "checkpoint.c"

/* Returns the status of the first rank that failed, with its message, on every rank. exchange is device memory of
   MT_ERROR_BYTES. Collective: a rank that has failed must call it, too. */
static mt_status mti_agree(mt_context *ctx, mt_comm *comm, void *exchange, mt_status mine) {
    int rank = mt_comm_rank(comm), size = mt_comm_size(comm), worst;
    mt_tensor one = mt_tensor_make(exchange, MT_I32, 1, 1), all = mt_tensor_make(exchange, MT_U8, 1, MT_ERROR_BYTES);
    char text[MT_ERROR_BYTES];
    int32_t code = mine == MT_SUCCESS ? 0 : size - rank;
    if (size == 1) return mine;
    MT_TRY(mt_upload(ctx, &code, one));
    MT_TRY(mt_all_reduce(ctx, comm, exchange, exchange, 1, MT_I32, MT_MAX));
    MT_TRY(mt_download(ctx, one, &code));
    if (code <= 0 || code > size) return mine; /* no rank failed, or comm is a meta communicator */
    worst = size - code;
    memset(text, 0, sizeof text);
    memcpy(text, &mine, sizeof mine);
    snprintf(text + sizeof mine, sizeof text - sizeof mine, "%.*s", (int)(sizeof text - sizeof mine - 1),
             mt_last_error(ctx));
    MT_TRY(mt_upload(ctx, text, all));
    MT_TRY(mt_broadcast(ctx, comm, exchange, exchange, MT_ERROR_BYTES, MT_U8, worst));
    MT_TRY(mt_download(ctx, all, text));
    if (rank == worst) return mine;
    memcpy(&mine, text, sizeof mine);
    return mt_fail(ctx, mine, "%s", text + sizeof mine);
}

static const char *const mti_step_format = "step-%08lld";

MT_API mt_status mt_checkpoint_path(mt_context *ctx, const char *directory, int64_t step, char *path, size_t bytes) {
    char name[32];
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !path || step < 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_path: step %lld, directory or path is NULL",
                       (long long)step);
    snprintf(name, sizeof name, mti_step_format, (long long)step);
    return mti_path(ctx, directory, name, path, bytes);
}

/* Returns the step of a directory entry that is named like a checkpoint, or -1. */
static int64_t mti_step_of(const char *name) {
    uint64_t step;
    char same[32];
    if (strncmp(name, "step-", 5) != 0 || !mt_parse_whole(name + 5, (uint64_t)MTI_STEPS_MAX, &step)) return -1;
    snprintf(same, sizeof same, mti_step_format, (long long)step);
    return strcmp(same, name) == 0 ? (int64_t)step : -1;
}

static int mti_is_leftover(const char *name) {
    size_t n = strlen(name);
    return n > 9 && strncmp(name, ".step-", 6) == 0 && strcmp(name + n - 4, ".tmp") == 0;
}

/* Writes the step of the newest checkpoint below step `below` to *newest, or -1. Returns 0 or errno. */
static int mti_checkpoint_list(const char *directory, int64_t below, int64_t *newest) {
    struct dirent *entry;
    DIR *d = opendir(directory);
    *newest = -1;
    if (!d) return errno == ENOENT ? 0 : errno;
    while ((entry = readdir(d)) != NULL) {
        int64_t step = mti_step_of(entry->d_name);
        if (step < below && step > *newest) *newest = step;
    }
    closedir(d);
    return 0;
}

/* Removes what a killed save or a failed removal has left behind. */
static void mti_leftovers_remove(mt_context *ctx, const char *directory) {
    char path[MT_PATH_MAX];
    struct dirent *entry;
    DIR *d = opendir(directory);
    if (!d) mti_io_warning(ctx, directory, "list the directory", errno);
    while (d && (entry = readdir(d)) != NULL)
        if (mti_is_leftover(entry->d_name) &&
            snprintf(path, sizeof path, "%s/%s", directory, entry->d_name) < (int)sizeof path)
            mti_directory_remove(ctx, path);
    if (d) closedir(d);
}

static mt_status mti_checkpoint_newest(mt_context *ctx, const char *directory, int64_t *step) {
    int error = mti_checkpoint_list(directory, INT64_MAX, step);
    return error ? mti_io_error(ctx, directory, "list the directory", error) : MT_SUCCESS;
}

/* Gives the step of the first rank to every rank of comm, or the error of the first rank with one. */
static mt_status mti_step_share(mt_context *ctx, mt_comm *comm, mt_status status, int64_t *step) {
    mt_tensor exchange = mt_none();
    MT_TRY(mt_arena_tensor(ctx, MT_U8, 1, MT_ERROR_BYTES, &exchange));
    MT_TRY(mti_agree(ctx, comm, exchange.data, status));
    exchange.cols = (int64_t)sizeof *step;
    MT_TRY(mt_upload(ctx, step, exchange));
    MT_TRY(mt_broadcast(ctx, comm, exchange.data, exchange.data, sizeof *step, MT_U8, 0));
    return mt_download(ctx, exchange, step);
}

MT_API mt_status mt_checkpoint_latest(mt_context *ctx, mt_comm *comm, const char *directory, int64_t *step) {
    mt_status status = MT_SUCCESS;
    size_t mark;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !step)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_latest: %s is NULL", step ? "directory" : "step");
    *step = -1;
    if (!comm || mt_comm_rank(comm) == 0) status = mti_checkpoint_newest(ctx, directory, step);
    if (!comm || mt_comm_size(comm) == 1) return status;
    mark = mt_arena_mark(ctx);
    status = mti_step_share(ctx, comm, status, step);
    mt_arena_release(ctx, mark);
    return status;
}

/* Returns 1 when this stage writes a parameter. The first stage writes a parameter that several stages share. */
static int mti_param_is_ours(const mt_params *params, const mt_param *p) {
    return !p->desc.shared_embedding || params->grid->pp_rank == 0;
}

/* The numbers of the tensors that a file has of a parameter: MTI_VALUE for its value, and those of
   mt_optimizer_state. */
enum { MTI_VALUE = -1 };

/* A part of a checkpoint: for each number from first to last, the tensors of a map. */
typedef struct mti_part {
    const char *stem;
    const mti_table_map *map;
    int bare;    /* 1: names are without the prefix of the table */
    int lenient; /* 1: optional tensors may be missing */
    mt_dtype dtype;
    int first, last; /* MTI_VALUE, or a range of mt_optimizer_state */
} mti_part;

static mti_part mti_model_part(const mt_checkpoint *c) {
    mti_part part;
    part.stem = "model";
    part.map = c->other.table ? &c->other : &c->own;
    part.bare = part.lenient = 0;
    part.dtype = mt_params_dtype(c->params);
    part.first = part.last = MTI_VALUE;
    return part;
}

static mti_part mti_optimizer_part(const mt_checkpoint *c) {
    mti_part part;
    part.stem = "optimizer";
    part.map = &c->own;
    part.bare = part.lenient = 0;
    part.dtype = MT_F32;
    part.first = MT_EXP_AVG;
    part.last = mti_has_masters(c->optimizer) ? MT_MASTER : MT_EXP_AVG_SQ;
    return part;
}

/* The name and shape of a tensor in a file. */
typedef struct mti_layout {
    char name[MT_NAME_MAX + 32];
    int dims; /* 1 or 2 */
    int64_t shape[2];
} mti_layout;

static const mt_param *mti_stored_param(const mt_checkpoint *c, const mti_table_map *map, int t) {
    return c->params->list[map->pieces[map->tensors[t].first].param];
}

/* Returns the layout that tensor t of a part has in its file, for number `what`. */
static mti_layout mti_part_layout(const mt_checkpoint *c, const mti_part *part, int t, int what) {
    static const char *const suffixes[] = {".exp_avg", ".exp_avg_sq", ".master"};
    const mti_stored *s = &part->map->tensors[t];
    mti_layout l;
    if (s->row >= 0)
        mti_pattern_text(mti_row_file(part->map->table, s->row, part->bare), s->number, l.name, sizeof l.name);
    else
        snprintf(l.name, sizeof l.name, "%s%s", mti_stored_param(c, part->map, t)->name,
                 what == MTI_VALUE ? "" : suffixes[what]);
    l.dims = s->vector ? 1 : 2;
    l.shape[0] = s->transposed ? s->cols : s->rows;
    l.shape[1] = s->transposed ? s->rows : s->cols;
    return l;
}

static void mti_put_fields(mt_context *ctx, mt_safetensors_writer *w, const mt_field *fields, int count) {
    char text[MT_FIELD_TEXT_MAX];
    int i;
    for (i = 0; i < count; i++) {
        mt_field_text(&fields[i], text);
        mti_header_member(ctx, w, fields[i].name,
                          fields[i].kind == MT_FIELD_TEXT ? (const char *)fields[i].value : text);
    }
}

/* Writes the metadata. Hugging Face's transformers requires the entry "format". */
static void mti_put_metadata(mt_context *ctx, mt_checkpoint *c, const mt_training_state *state) {
    mt_safetensors_writer *w = &c->writer;
    mt_training_state copy = *state;
    mt_field fields[MTI_STATE_FIELDS];
    char text[MT_FIELD_TEXT_MAX];
    const char *name;
    int i;
    mti_header_begin(ctx, w);
    mti_header_member(ctx, w, "format", "pt");
    mti_header_member(ctx, w, MTI_VERSION_KEY, MT_VERSION);
    mti_state_fields(&copy, fields);
    mti_put_fields(ctx, w, fields, MTI_STATE_FIELDS);
    mti_header_member(ctx, w, "note", state->note);
    if (c->optimizer) {
        fields[0] = mti_optimizer_field(c->optimizer);
        mti_put_fields(ctx, w, fields, 1);
    }
    for (i = 0; c->format.metadata && (name = (c->format.metadata)(c->model, i, text)) != NULL; i++)
        mti_header_member(ctx, w, name, text);
    mti_put_fields(ctx, w, c->fields, c->field_count);
    mti_header_text(ctx, w, "}");
}

/* Makes the header of a part's file, without its end. */
static void mti_put_header(mt_context *ctx, mt_checkpoint *c, const mti_part *part, const mt_training_state *state) {
    const char *dtype = part->dtype == MT_F32 ? "F32" : part->dtype == MT_BF16 ? "BF16" : "F16";
    int what, t;
    mti_put_metadata(ctx, c, state);
    for (what = part->first; what <= part->last; what++)
        for (t = 0; t < part->map->tensor_count; t++) {
            const mti_stored *s = &part->map->tensors[t];
            mti_layout l = mti_part_layout(c, part, t, what);
            if (mti_param_is_ours(c->params, mti_stored_param(c, part->map, t)))
                mti_header_tensor(ctx, &c->writer, l.name, dtype, l.dims, l.shape,
                                  s->rows * s->cols * (int64_t)mt_dtype_size(part->dtype));
        }
}

/* Writes the name of a part's file: STEM.safetensors, or with several stages that of one stage. */
static void mti_part_name(char *name, size_t bytes, const char *stem, int stage, int stages) {
    if (stages == 1) snprintf(name, bytes, "%s.safetensors", stem);
    else snprintf(name, bytes, "%s-%05d-of-%05d.safetensors", stem, stage + 1, stages);
}

/* Creates this stage's file and writes its header. */
static mt_status mti_part_begin(mt_context *ctx, mt_checkpoint *c, const mti_part *part, const mt_training_state *state,
                                const char *directory) {
    char name[64], path[MT_PATH_MAX];
    mti_part_name(name, sizeof name, part->stem, c->params->grid->pp_rank, c->params->grid->pp_size);
    MT_TRY(mti_path(ctx, directory, name, path, sizeof path));
    mti_put_header(ctx, c, part, state);
    MT_TRY(mti_header_end(ctx, &c->writer, path));
    MT_TRY(mti_file_begin(ctx, &c->writer.file, directory, name));
    mti_header_write(&c->writer);
    return MT_SUCCESS;
}

/* Writes n elements. Rounding the values of a 16-bit parameter to 16 bits is exact. */
static void mti_put_elements(mt_checkpoint *c, const float *x, mt_dtype dtype, int64_t n) {
    uint16_t bits[256];
    int64_t i, count;
    if (dtype == MT_F32) {
        mti_file_put(&c->writer.file, x, (size_t)n * sizeof(float));
        return;
    }
    for (i = 0; i < n; i += count) {
        count = mt_min(n - i, (int64_t)(sizeof bits / sizeof *bits));
        mt_f32_to_16bit(dtype, x + i, bits, count);
        mti_file_put(&c->writer.file, bits, (size_t)count * sizeof *bits);
    }
}

/* Writes tensor t. MT_ERR_DATA: it has an element that is not finite, so that no run could load it. */
static mt_status mti_stored_put(mt_context *ctx, mt_checkpoint *c, const mti_part *part, int t, int what) {
    const mti_stored *s = &part->map->tensors[t];
    const float *x = s->whole ? c->whole : c->spare;
    int64_t n = s->rows * s->cols, bad = mti_unfit(x, n, MT_F32);
    mti_layout l = mti_part_layout(c, part, t, what);
    if (bad < n) return mti_unfit_fail(ctx, "mt_checkpoint_save", l.name, bad, x[bad], MT_F32);
    mti_put_elements(c, x, part->dtype, n);
    return MT_SUCCESS;
}

/* Gathers the parameters of tensor t, one after the other, and writes the tensor when `writes` is 1 and no write has
   failed, see mti_part_write. */
static mt_status mti_stored_write(mt_context *ctx, mt_checkpoint *c, const mti_part *part, int t, int what, int writes,
                                  mt_status *io) {
    const mti_stored *s = &part->map->tensors[t];
    int k;
    for (k = s->first; k >= 0; k = part->map->pieces[k].next) {
        const mti_slice *piece = &part->map->pieces[k];
        const mt_param *p = c->params->list[piece->param];
        if (c->held != piece->param)
            MT_TRY(what == MTI_VALUE ? mt_param_gather(ctx, c->params, p, p->value, c->whole)
                                     : mt_optimizer_gather(ctx, c->optimizer, p, (mt_optimizer_state)what, c->whole));
        c->held = piece->param;
        if (writes && !s->whole) mti_slice_copy(s, piece, 1, c->whole, c->spare);
    }
    if (writes && *io == MT_SUCCESS) *io = mti_stored_put(ctx, c, part, t, what);
    return MT_SUCCESS;
}

/* Gathers every tensor of a part and writes it when `writes` is 1. Collective: after an error with the file, *io, a
   rank still gathers. */
static mt_status mti_part_write(mt_context *ctx, mt_checkpoint *c, const mti_part *part, int writes, mt_status *io) {
    int what, t;
    for (what = part->first; what <= part->last; what++) {
        c->held = -1;
        for (t = 0; t < part->map->tensor_count; t++)
            if (mti_param_is_ours(c->params, mti_stored_param(c, part->map, t)))
                MT_TRY(mti_stored_write(ctx, c, part, t, what, writes, io));
    }
    return MT_SUCCESS;
}

static mt_status mti_part_save(mt_context *ctx, mt_checkpoint *c, const mti_part *part, const mt_training_state *state,
                               const char *directory, mt_status *io) {
    const mt_grid *g = c->params->grid;
    int writes = g->tp_rank == 0 && mt_comm_rank(g->dp_cp) == 0 && mt_context_has_data(ctx);
    mt_status status;
    if (writes && *io == MT_SUCCESS) *io = mti_part_begin(ctx, c, part, state, directory);
    status = mti_part_write(ctx, c, part, writes, io);
    if (c->writer.file.fd >= 0) MT_KEEP(*io, mti_file_end(ctx, &c->writer.file, 1));
    return status;
}

/* Locks a directory by a file in it, because on some network file systems the lock of a directory holds on one host
   only. The lock ends with the process, however that ends; the file stays. */
static mt_status mti_lock_take(mt_context *ctx, mt_checkpoint *c) {
    char path[MT_PATH_MAX];
    int error;
    MT_TRY(mti_path(ctx, c->directory, ".lock", path, sizeof path));
    c->lock = mti_open(path, O_RDWR | O_CREAT | MTI_NOFOLLOW);
    c->process = getpid();
    if (c->lock < 0) return mti_io_error(ctx, path, "open it", errno);
    error = mti_lock_wait(c->lock);
    /* locked, or the file system has no locks */
    if (!error || error == ENOLCK || error == ENOSYS || error == EOPNOTSUPP) return MT_SUCCESS;
    close(c->lock);
    c->lock = -1;
    if (error == EWOULDBLOCK) return mt_fail(ctx, MT_ERR_IO, "%s: another run writes to it", c->directory);
    return mti_io_error(ctx, path, "lock it", error);
}

/* Creates the directory, locks it, and tries to create a directory in it, as a save does. Called on the first rank;
   does nothing after it has succeeded once. */
static mt_status mti_checkpoint_lock(mt_context *ctx, mt_checkpoint *c) {
    char probe[MT_PATH_MAX];
    if (c->lock >= 0) return MT_SUCCESS;
    if (!mti_exists(c->directory)) MT_TRY(mti_directory_make(ctx, c->directory));
    MT_TRY(mti_lock_take(ctx, c));
    mti_leftovers_remove(ctx, c->directory);
    MT_TRY(mti_path(ctx, c->directory, ".step-probe.tmp", probe, sizeof probe));
    if (mkdir(probe, 0777) != 0) return mti_io_error(ctx, probe, "create the directory", errno);
    if (rmdir(probe) != 0) mti_io_warning(ctx, probe, "remove the directory", errno);
    return MT_SUCCESS;
}

/* Checks that the registry has the parameters that it had in mt_checkpoint_create. */
static mt_status mti_checkpoint_params(mt_context *ctx, const char *function, const mt_checkpoint *c) {
    if (c->params->count == c->count) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the registry had %d parameters in mt_checkpoint_create, and has %d",
                   function, c->count, c->params->count);
}

/* Checks that the checkpoint has a directory, and that no process from which this one was forked has locked it. */
static mt_status mti_directory_check(mt_context *ctx, const char *function, const mt_checkpoint *c) {
    if (c->lock >= 0 && c->process != getpid())
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: process %ld, from which this process %ld was forked, writes to %s",
                       function, (long)c->process, (long)getpid(), c->directory);
    if (c->directory[0]) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: mt_checkpoint_desc.directory is NULL, so this can only import", function);
}

MT_API mt_status mt_checkpoint_lock(mt_context *ctx, mt_checkpoint *checkpoint) {
    mt_status status = MT_SUCCESS;
    mt_comm *world;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!checkpoint) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_lock: checkpoint is NULL");
    MT_TRY(mti_directory_check(ctx, "mt_checkpoint_lock", checkpoint));
    world = checkpoint->params->grid->world;
    if (mt_comm_rank(world) == 0 && mt_context_has_data(ctx)) status = mti_checkpoint_lock(ctx, checkpoint);
    return mti_agree(ctx, world, checkpoint->exchange, status);
}

/* Returns the error for a field whose value load would refuse. */
static mt_status mti_save_refuse(mt_context *ctx, const mt_field *f, const char *wanted) {
    char text[MT_FIELD_TEXT_MAX];
    if (f->kind == MT_FIELD_TEXT)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_save: %.100s is '%.*s', must be %s", f->name,
                       (int)mt_min((int64_t)f->bytes, 40), (const char *)f->value, wanted);
    mt_field_text(f, text);
    return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_save: %.100s is %s, must be %s", f->name, text, wanted);
}

static mt_status mti_save_fields(mt_context *ctx, const mt_field *fields, int count) {
    char wanted[MTI_WANTED_MAX];
    int i;
    for (i = 0; i < count; i++) {
        if (mti_field_is_valid(&fields[i])) continue;
        mti_field_wanted(&fields[i], wanted);
        return mti_save_refuse(ctx, &fields[i], wanted);
    }
    return MT_SUCCESS;
}

/* Checks that load would accept every value that the metadata will have. */
static mt_status mti_save_values(mt_context *ctx, const mt_checkpoint *c, const mt_training_state *state) {
    mt_training_state copy = *state;
    mt_field fields[MTI_STATE_FIELDS];
    const char *fault;
    mti_state_fields(&copy, fields);
    MT_TRY(mti_save_fields(ctx, fields, MTI_STATE_FIELDS));
    fault = mti_state_fault(&copy);
    if (fault) return mti_save_refuse(ctx, mti_state_field(fields, fault), mti_scaler_wanted(fault));
    if (c->optimizer) {
        fields[0] = mti_optimizer_field(c->optimizer);
        MT_TRY(mti_save_fields(ctx, fields, 1));
    }
    return mti_save_fields(ctx, c->fields, c->field_count);
}

/* Adds the values of fields. A text is not copied. */
static void mti_settings_add_fields(mti_settings *t, const mt_field *fields, int count) {
    char text[MT_FIELD_TEXT_MAX];
    int i;
    for (i = 0; i < count; i++) {
        mt_field_text(&fields[i], text);
        mti_settings_add(t, fields[i].name, "%s", text);
        if (fields[i].kind == MT_FIELD_TEXT) t->list[t->count - 1].value = (const char *)fields[i].value;
    }
}

/* Adds the training state and the optimizer's step (optimizer NULL: none). The state must be valid until
   mti_settings_end. */
static void mti_settings_add_state(mti_settings *t, mt_training_state *state, mt_optimizer *optimizer) {
    mt_field fields[MTI_STATE_FIELDS];
    mti_state_fields(state, fields);
    mti_settings_add_fields(t, fields, MTI_STATE_FIELDS);
    if (optimizer) {
        fields[0] = mti_optimizer_field(optimizer);
        mti_settings_add_fields(t, fields, 1);
    }
    memset(fields, 0, sizeof *fields);
    fields[0].name = "note";
    fields[0].kind = MT_FIELD_TEXT;
    fields[0].value = state->note;
    mti_settings_add_fields(t, fields, 1);
}

/* All ranks must save the same state and fields, because the files have those of one rank. */
static mt_status mti_save_compare(mt_context *ctx, const mt_checkpoint *c, const mt_training_state *state) {
    mt_training_state copy = *state;
    mti_settings t;
    MT_TRY(mti_settings_begin(ctx, MTI_STATE_FIELDS + 2 + c->field_count, &t));
    mti_settings_add_state(&t, &copy, c->optimizer);
    mti_settings_add_fields(&t, c->fields, c->field_count);
    return mti_settings_end(ctx, c->params, "mt_checkpoint_save", 0, &t);
}

/* Locks the directory, checks that this step is newer than all checkpoints, and creates the directory `beside`. Called
   on the first rank before anything is written. */
static mt_status mti_save_prepare(mt_context *ctx, mt_checkpoint *c, int64_t step, const char *beside) {
    int64_t newest;
    if (c->lock >= 0) mti_leftovers_remove(ctx, c->directory);
    else MT_TRY(mti_checkpoint_lock(ctx, c));
    MT_TRY(mti_checkpoint_newest(ctx, c->directory, &newest));
    if (newest >= step)
        return mt_fail(ctx, MT_ERR_IO,
                       "%s: has a checkpoint of step %lld already; one of step %lld would not be its newest",
                       c->directory, (long long)newest, (long long)step);
    return mti_directory_make(ctx, beside);
}

/* Writes the path of the directory in which the checkpoint of a step is written, and to which it is renamed before it
   is removed. The path fits, because mt_checkpoint_create has checked the length of the directory. */
static void mti_beside(mt_context *ctx, const char *directory, int64_t step, char *path) {
    char name[48];
    snprintf(name, sizeof name, ".step-%08lld.tmp", (long long)step);
    mti_path(ctx, directory, name, path, MT_PATH_MAX);
}

/* Removes all checkpoints except the newest c->keep. Each is renamed first, so that a partly removed one never looks
   complete. Failures are only logged, because the new checkpoint is complete; the next save tries again. */
static void mti_save_prune(mt_context *ctx, const mt_checkpoint *c) {
    char path[MT_PATH_MAX], beside[MT_PATH_MAX];
    int64_t step = INT64_MAX;
    int i = 0, error;
    while (step >= 0) {
        error = mti_checkpoint_list(c->directory, step, &step);
        if (error) mti_io_warning(ctx, c->directory, "list the directory", error);
        if (step < 0 || i++ < c->keep) continue;
        mti_beside(ctx, c->directory, step, beside);
        mt_checkpoint_path(ctx, c->directory, step, path, sizeof path);
        if (rename(path, beside) == 0) mti_directory_remove(ctx, beside);
        else mti_io_warning(ctx, path, "rename it", errno);
    }
}

/* Writes the index of the files STEM-0000s-of-0000S.safetensors that the stages have written. */
static mt_status mti_index_write(mt_context *ctx, mti_file *f, const char *directory, const char *stem,
                                 mt_safetensors_set *b) {
    char name[64];
    int64_t bytes = 0;
    int i, k;
    for (i = 0; i < b->count; i++) bytes += b->files[i]->data_bytes;
    snprintf(name, sizeof name, "%s.safetensors.index.json", stem);
    MT_TRY(mti_file_begin(ctx, f, directory, name));
    mti_file_text(f, "{\n  \"metadata\": {\"total_size\": ");
    mti_file_whole(f, bytes);
    mti_file_text(f, "},\n  \"weight_map\": {");
    for (i = 0; i < b->count; i++)
        for (k = 0; k < mt_safetensors_count(b->files[i]); k++) {
            mti_file_text(f, i + k > 0 ? ",\n    " : "\n    ");
            mti_file_string(f, mt_safetensors_at(b->files[i], k)->name);
            mti_file_text(f, ": ");
            mti_file_string(f, mti_file_name(b->files[i]->path));
        }
    mti_file_text(f, "\n  }\n}\n");
    return mti_file_end(ctx, f, 0);
}

/* Opens the files that the stages have written, to check that they can be read: a name or the note may not be UTF-8, or
   a name may occur twice. With several stages, also writes their index. */
static mt_status mti_save_check(mt_context *ctx, mt_checkpoint *c, const char *directory, const char *stem) {
    char name[64];
    mt_safetensors_set b;
    mt_status status = MT_SUCCESS;
    int i, stages = c->params->grid->pp_size;
    memset(&b, 0, sizeof b);
    for (i = 0; i < stages && status == MT_SUCCESS; i++) {
        mti_part_name(name, sizeof name, stem, i, stages);
        status = mti_set_add(ctx, &b, directory, name);
    }
    if (status == MT_SUCCESS && stages > 1) status = mti_index_write(ctx, &c->writer.file, directory, stem, &b);
    mti_set_close(&b);
    return status;
}

#define MTI_GIVEN_MAX ((size_t)1 << 20) /* bytes */
#define MTI_CONFIG_MAX 4096             /* bytes of a config.json, in addition to those of the one that was loaded */

static const char *const mti_given_names[] = {"config.json", "generation_config.json"};

static mt_status mti_given_write(mt_context *ctx, mt_checkpoint *c, const char *directory, int which,
                                 const char *text) {
    MT_TRY(mti_file_begin(ctx, &c->writer.file, directory, mti_given_names[which]));
    mti_file_text(&c->writer.file, text);
    return mti_file_end(ctx, &c->writer.file, 0);
}

static mt_status mti_config_write(mt_context *ctx, mt_checkpoint *c, const char *directory) {
    int bytes = MTI_CONFIG_MAX + (c->given[0] ? (int)strlen(c->given[0]) : 0), length;
    void *text;
    mt_status status = MT_SUCCESS;
    if (!c->format.config) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)bytes, &text));
    length = (c->format.config)(c->model, c->given[0], (char *)text, (size_t)bytes);
    if (length >= bytes)
        status = mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: a config.json of %d bytes, at most %d are written", directory,
                         length, bytes - 1);
    else if (length > 0) status = mti_given_write(ctx, c, directory, 0, (const char *)text);
    if (status == MT_SUCCESS && length > 0 && c->given[1]) status = mti_given_write(ctx, c, directory, 1, c->given[1]);
    mt_host_free(text);
    return status;
}

/* Checks the files, writes the indexes and config.json, and renames the directory. Called on the first rank when all
   stages have written their files. */
static mt_status mti_save_publish(mt_context *ctx, mt_checkpoint *c, const char *final_path, const char *beside) {
    MT_TRY(mti_save_check(ctx, c, beside, "model"));
    if (c->optimizer) MT_TRY(mti_save_check(ctx, c, beside, "optimizer"));
    MT_TRY(mti_config_write(ctx, c, beside));
    MT_TRY(mti_directory_sync(ctx, beside));
    if (rename(beside, final_path) != 0) return mti_io_error(ctx, final_path, "rename a directory to it", errno);
    MT_TRY(mti_directory_sync(ctx, c->directory));
    mti_save_prune(ctx, c);
    return MT_SUCCESS;
}

/* Refuses to save values of which the data ranks have new and old parts. */
static mt_status mti_save_complete(mt_context *ctx, const mt_checkpoint *c) {
    if (!c->params->torn) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "mt_checkpoint_save: the parameters are not complete: the last step of the sharded optimizer failed "
                   "before each rank had the values that the other data ranks have updated; load an older checkpoint");
}

/* Saves in four steps, after each of which the ranks agree: check, prepare, write the files, publish. */
static mt_status mti_checkpoint_save(mt_context *ctx, mt_checkpoint *c, const mt_training_state *state,
                                     const char *final_path, const char *beside) {
    mt_comm *world = c->params->grid->world;
    int first = mt_comm_rank(world) == 0 && mt_context_has_data(ctx);
    mti_part model = mti_model_part(c), optimizer;
    mt_status status = mti_params_ready(ctx, c->params, "mt_checkpoint_save"), io = MT_SUCCESS;
    if (status == MT_SUCCESS) status = mti_checkpoint_params(ctx, "mt_checkpoint_save", c);
    if (status == MT_SUCCESS) status = mti_save_complete(ctx, c);
    if (status == MT_SUCCESS) status = mti_save_values(ctx, c, state);
    MT_TRY(mti_agree(ctx, world, c->exchange, status));
    MT_TRY(mti_save_compare(ctx, c, state));
    if (first) status = mti_save_prepare(ctx, c, state->step, beside);
    MT_TRY(mti_agree(ctx, world, c->exchange, status));
    status = mti_part_save(ctx, c, &model, state, beside, &io);
    if (c->optimizer && status == MT_SUCCESS) {
        optimizer = mti_optimizer_part(c);
        status = mti_part_save(ctx, c, &optimizer, state, beside, &io);
    }
    if (status == MT_SUCCESS) status = mti_agree(ctx, world, c->exchange, io);
    if (status == MT_SUCCESS)
        status = mti_agree(ctx, world, c->exchange, first ? mti_save_publish(ctx, c, final_path, beside) : MT_SUCCESS);
    return status;
}

MT_API mt_status mt_checkpoint_save(mt_context *ctx, mt_checkpoint *checkpoint, const mt_training_state *state) {
    char final_path[MT_PATH_MAX], beside[MT_PATH_MAX];
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!checkpoint || !state || state->step < 0 || !memchr(state->note, 0, sizeof state->note))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_save: %s",
                       !checkpoint       ? "checkpoint is NULL"
                       : !state          ? "state is NULL"
                       : state->step < 0 ? "step is negative"
                                         : "the note does not end");
    if (state->step > MTI_STEPS_MAX)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_save: step %lld, must be at most %lld",
                       (long long)state->step, (long long)MTI_STEPS_MAX);
    MT_TRY(mti_directory_check(ctx, "mt_checkpoint_save", checkpoint));
    MT_TRY(mt_checkpoint_path(ctx, checkpoint->directory, state->step, final_path, sizeof final_path));
    mti_beside(ctx, checkpoint->directory, state->step, beside);
    status = mti_checkpoint_save(ctx, checkpoint, state, final_path, beside);
    if (status != MT_SUCCESS && checkpoint->lock >= 0 && mti_exists(beside)) mti_directory_remove(ctx, beside);
    return status;
}
