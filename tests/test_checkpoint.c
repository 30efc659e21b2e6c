/* test_checkpoint.c - tests checkpoints: files and values on every split against those of one rank, GPT-2 against a
   file of Hugging Face, resumed training against training without a break, pipeline stages, every kind of wrong
   file, and a save that fails or is killed at each of its system calls. Run it from the root of the checkout. */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the operating system, as the library sees it: call number plan.at fails, or is the last one ----------------- */

enum { NO_FAULT, FAIL, DIE };

static struct {
    int fault, at, calls;
    int error;      /* errno of the failing call; 0: ENOSPC. EINTR: only calls that can block fail */
    int lock_error; /* errno of every flock; 0: none */
} plan;

static int warnings; /* number of warnings that any rank logs */

/* The files and directories that have changed since their last fsync. */
static struct {
    int watching, count, early; /* early: something was renamed before its fsync */
    struct {
        char path[1024];
        int dirty;
    } list[128];
} disk;

static int fault(void) {
    int n = __atomic_fetch_add(&plan.calls, 1, __ATOMIC_RELAXED);
    if (plan.fault == NO_FAULT || n != plan.at) return 0;
    if (plan.fault == DIE) _exit(7);
    errno = plan.error ? plan.error : ENOSPC;
    return 1;
}

/* A file that gets shorter while it is loaded: before a part of any file is read or mapped for the at-th time. */
static struct {
    const char *path; /* NULL: no file */
    off_t length;
    int at, calls;
} shortened;

static void shorten(void) {
    if (shortened.path && __atomic_fetch_add(&shortened.calls, 1, __ATOMIC_RELAXED) == shortened.at &&
        truncate(shortened.path, shortened.length) != 0)
        abort();
}

static ssize_t test_pread(int fd, void *data, size_t bytes, off_t at) {
    shorten();
    return pread(fd, data, bytes > 5000 ? bytes - 777 : bytes, at); /* short reads happen, too */
}

static void *test_mmap(void *wanted, size_t bytes, int protection, int flags, int fd, off_t at) {
    void *data = mmap(wanted, bytes, protection, flags, fd, at);
    shorten();
    return data;
}

/* For a call that signals do not interrupt. */
static int fault_at_once(void) { return plan.error == EINTR ? 0 : fault(); }

static void disk_mark(const char *path, int dirty) {
    int i = 0;
    if (!disk.watching) return;
    while (i < disk.count && strcmp(disk.list[i].path, path) != 0) i++;
    if (i == (int)(sizeof disk.list / sizeof *disk.list)) abort();
    if (i == disk.count) snprintf(disk.list[disk.count++].path, sizeof disk.list[0].path, "%s", path);
    disk.list[i].dirty = dirty;
}

static void disk_mark_parent(const char *path) {
    char parent[1024];
    snprintf(parent, sizeof parent, "%s", path);
    *strrchr(parent, '/') = 0;
    disk_mark(parent, 1);
}

static void disk_mark_fd(int fd, int dirty) {
    char link[64], path[1024];
    ssize_t n;
    if (!disk.watching) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    disk_mark(path, dirty);
}

static int disk_is_dirty(const char *below) {
    for (int i = 0; i < disk.count; i++)
        if (disk.list[i].dirty && strncmp(disk.list[i].path, below, strlen(below)) == 0) return 1;
    return 0;
}

static int test_open(const char *path, int flags, ...) {
    int fd;
    if (fault()) return -1;
    fd = open(path, flags, 0666);
    if (flags & O_CREAT) disk_mark_parent(path);
    return fd;
}

static int test_openat(int directory, const char *name, int flags, ...) {
    int fd;
    if (fault()) return -1;
    fd = openat(directory, name, flags, 0666);
    if (flags & O_CREAT) disk_mark_fd(directory, 1);
    return fd;
}

/* A process that is killed in a write has written half of the data. */
static ssize_t test_write(int fd, const void *data, size_t bytes) {
    if (plan.fault == DIE && plan.calls == plan.at && write(fd, data, bytes / 2) < 0) _exit(8);
    if (fault()) return -1;
    disk_mark_fd(fd, 1);
    return write(fd, data, bytes > 1000 ? bytes - 777 : bytes); /* short writes happen, too */
}

static int test_fsync(int fd) {
    if (fault()) return -1;
    disk_mark_fd(fd, 0);
    return 0; /* the test needs no real fsync of /tmp, which is slow */
}

static int lock_fd = -1;

/* Closing a file that was only read, or a lock, does not fail: no data can be lost. */
static int test_close(int fd) {
    int failed = fd != lock_fd && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && fault(), error = errno,
        result = close(fd);
    errno = error;
    if (fd == lock_fd) lock_fd = -1;
    return failed ? -1 : result;
}

static off_t test_lseek(int fd, off_t to, int whence) { return fault_at_once() ? -1 : lseek(fd, to, whence); }

static int test_mkdir(const char *path, mode_t mode) {
    if (fault_at_once()) return -1;
    disk_mark_parent(path);
    return mkdir(path, mode);
}

static int test_rename(const char *from, const char *to) {
    if (fault_at_once()) return -1;
    if (strstr(from, ".tmp") && disk_is_dirty(from)) disk.early = 1;
    disk_mark_parent(to);
    return rename(from, to);
}

static int test_unlink(const char *path) { return fault_at_once() ? -1 : unlink(path); }
static int test_rmdir(const char *path) { return fault_at_once() ? -1 : rmdir(path); }
static DIR *test_opendir(const char *path) { return fault_at_once() ? NULL : opendir(path); }
static DIR *test_fdopendir(int fd) { return fault_at_once() ? NULL : fdopendir(fd); }

static int test_unlinkat(int directory, const char *name, int flags) {
    return fault_at_once() ? -1 : unlinkat(directory, name, flags);
}

static pid_t lock_holder; /* not 0: a process that ends at the third try to lock a file */
static int lock_tries;

static int test_flock(int fd, int how) {
    if (fault()) return -1;
    lock_fd = fd;
    if (lock_holder && ++lock_tries == 3) {
        kill(lock_holder, SIGKILL);
        waitpid(lock_holder, NULL, 0);
        lock_holder = 0;
    }
    errno = plan.lock_error;
    return plan.lock_error ? -1 : flock(fd, how);
}

#define open(...) test_open(__VA_ARGS__)
#define write(fd, data, bytes) test_write(fd, data, bytes)
#define fsync(fd) test_fsync(fd)
#define close(fd) test_close(fd)
#define lseek(fd, to, whence) test_lseek(fd, to, whence)
#define mkdir(path, mode) test_mkdir(path, mode)
#define rename(from, to) test_rename(from, to)
#define unlink(path) test_unlink(path)
#define rmdir(path) test_rmdir(path)
#define opendir(path) test_opendir(path)
#define openat(directory, ...) test_openat(directory, __VA_ARGS__)
#define unlinkat(directory, name, flags) test_unlinkat(directory, name, flags)
#define fdopendir(fd) test_fdopendir(fd)
#define flock(fd, how) test_flock(fd, how)
#define pread(fd, data, bytes, at) test_pread(fd, data, bytes, at)
#define mmap(wanted, bytes, protection, flags, fd, at) test_mmap(wanted, bytes, protection, flags, fd, at)

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#undef open
#undef write
#undef fsync
#undef close
#undef lseek
#undef mkdir
#undef rename
#undef unlink
#undef rmdir
#undef opendir
#undef openat
#undef unlinkat
#undef fdopendir
#undef flock
#undef pread
#undef mmap

#define GPT_STEPS 6
#include "mt_test_gpt.h"
#include "mt_test_resume.h"
#include "mt_test_ranks.h"
#include "mt_test_scratch.h"

#define STRIDE (test_all() ? 1 : 3) /* the step through cases that are tried one by one */

/* The number of entries of a directory, without the lock, which stays. */
static int entries(const char *directory) {
    struct dirent *e;
    DIR *d = opendir(directory);
    int n = 0;
    if (!d) return -1;
    while ((e = readdir(d)) != NULL)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && strcmp(e->d_name, ".lock") != 0;
    closedir(d);
    return n;
}

/* ---- a model on some ranks --------------------------------------------------------------------------------------- */

enum { GPT2, LLAMA, LAYERS = 4, VOCAB = 37, HIDDEN = 24, SEQ = 8, ARENA = 1 << 20 };

/* The task of a job on each rank, and its results. */
typedef struct job {
    int model, tp, data, pipeline;
    mt_dtype dtype;
    int stochastic, no_optimizer, sharded, invariant, fill; /* fill: seed of values that are all different */
    enum { SAVE, LOAD, IMPORT, NOTHING, LOCK } action;
    /* A pipe that is written when the action is done; the process then waits to be killed. LOCK: -1: it also saves */
    int stays;
    const char *directory; /* below scratch, except for IMPORT */
    int64_t step;
    int keep, heads, kv_heads, hidden; /* of other models; 0: the default */
    size_t arena;                      /* arena of the action; 0: the default */
    mt_activation activation;
    mt_qkv_layout qkv_layout;
    mt_rotary_form rotary_form; /* of LLAMA */
    int64_t rotary_dim;
    int64_t window;
    float softcap, scale;
    int alibi;
    int64_t padded; /* padded_vocab */
    /* results */
    mt_training_state state;
    mt_status status[8];
    char sentence[8][MT_ERROR_BYTES];
    int changed[8]; /* 1: an action that failed has changed the replica */
    float *dump;    /* values, moments and masters of all parameters of the first stage, as whole tensors */
    int64_t dumped;
    uint64_t digest[8]; /* hash of the same values of each rank */
    int64_t optimizer_step;
} job;

typedef struct replica {
    test_rank r;
    mt_gpt gpt;
    mt_optimizer optimizer;
    mt_checkpoint *checkpoint;
} replica;

static mt_gpt_desc model_desc(const job *j) {
    mt_gpt_desc d = {.vocab = VOCAB,
                     .padded_vocab = j->padded,
                     .layers = LAYERS,
                     .max_seq = SEQ,
                     .layer = {.hidden = j->hidden ? j->hidden : HIDDEN,
                               .heads = j->heads ? j->heads : 6,
                               .ffn = 44,
                               .activation = j->activation,
                               .qkv_layout = j->qkv_layout,
                               .scores.window = j->window,
                               .scores.softcap = j->softcap,
                               .scores.alibi = j->alibi,
                               .scores.scale = j->scale}};
    if (j->model != LLAMA) return d;
    d.untied_head = 1;
    d.layer.kv_heads = j->kv_heads ? j->kv_heads : 4;
    d.layer.heads = j->heads ? j->heads : 12;
    d.layer.norm.kind = MT_RMS_NORM;
    d.layer.activation = MT_SWIGLU;
    d.layer.scores.rotary_base = 100.0f;
    d.layer.scores.rotary_form = j->rotary_form;
    d.layer.scores.rotary_dim = j->rotary_dim;
    d.layer.no_bias = 1;
    return d;
}

/* Fills with values that depend only on parameter, kind of state and element. */
static mt_status fill(replica *m, const job *j) {
    mt_status status = MT_SUCCESS;
    for (int i = 0; status == MT_SUCCESS && i < mt_params_count(m->r.params); i++) {
        const mt_param *p = mt_params_at(m->r.params, i);
        int64_t n = p->desc.rows * p->desc.cols;
        float *x = (float *)malloc((size_t)n * sizeof *x);
        for (int what = j->no_optimizer ? MT_MASTER : MT_EXP_AVG; status == MT_SUCCESS && what <= MT_MASTER; what++) {
            uint64_t seed = mti_name_hash(p->name) + (uint64_t)(3 * j->fill + what);
            for (int64_t k = 0; k < n; k++) x[k] = test_float(&seed);
            status = j->no_optimizer ? mt_param_scatter(m->r.ctx, p, x, p->value)
                                     : mt_optimizer_scatter(m->r.ctx, &m->optimizer, p, (mt_optimizer_state)what, x);
        }
        free(x);
    }
    m->optimizer.step = 1000 + j->fill;
    return status;
}

static void count_warnings(void *user, mt_log_level level, const char *text) {
    (void)user;
    (void)text;
    if (level == MT_LOG_WARNING) __atomic_fetch_add(&warnings, 1, __ATOMIC_RELAXED);
}

static mt_status replica_open(mt_comm *world, const job *j, replica *m) {
    mt_grid_desc shape = {.tp = j->tp, .dp = j->data, .pp = j->pipeline};
    mt_context_desc where = {.arena_bytes = ARENA,
                             .invariant = j->invariant,
                             .logger = {.log = count_warnings},
                             .device = mt_comm_is_meta(world) ? MT_DEVICE_META : MT_DEVICE_CPU};
    mt_optimizer_desc adamw = {.stochastic_rounding = j->stochastic};
    mt_data_parallel_desc share = {.sharded_optimizer = j->sharded};
    mt_gpt_desc d = model_desc(j);
    const char *directory = j->directory && j->action != IMPORT ? j->directory : "none";
    mt_checkpoint_desc c = {.directory = in_scratch(directory), .keep = j->keep};
    memset(m, 0, sizeof *m);
    MT_TRY(test_rank_open(world, shape, &where, &m->r));
    MT_TRY(mt_params_set_dtype(m->r.ctx, m->r.params, j->dtype));
    MT_TRY(mt_params_set_data_parallel(m->r.ctx, m->r.params, &share));
    MT_TRY(mt_gpt_create(m->r.ctx, m->r.params, &d, &m->gpt));
    MT_TRY(mt_params_init(m->r.ctx, m->r.params, 5));
    if (!j->no_optimizer) MT_TRY(mt_optimizer_create(m->r.ctx, m->r.params, &adamw, &m->optimizer));
    c.optimizer = j->no_optimizer ? NULL : &m->optimizer;
    if (j->fill) MT_TRY(fill(m, j));
    return mt_gpt_checkpoint_create(m->r.ctx, m->r.params, &m->gpt, &c, &m->checkpoint);
}

static void replica_close(replica *m) {
    mt_checkpoint_destroy(m->r.ctx, m->checkpoint);
    mt_optimizer_destroy(m->r.ctx, &m->optimizer);
    test_rank_close(&m->r);
}

/* Collects values, moments and masters of this stage, as whole tensors. */
static mt_status dump(replica *m, const job *j, float **out, int64_t *count) {
    int64_t n = mt_params_global_elements(m->r.params), used = 0;
    float *x = (float *)calloc((size_t)(4 * n), sizeof *x);
    *out = x;
    *count = (j->no_optimizer ? 1 : 4) * n;
    for (int i = 0; i < mt_params_count(m->r.params); i++) {
        const mt_param *p = mt_params_at(m->r.params, i);
        int64_t size = p->desc.rows * p->desc.cols;
        MT_TRY(mt_param_gather(m->r.ctx, m->r.params, p, p->value, x + used));
        for (int what = MT_EXP_AVG; !j->no_optimizer && what <= MT_MASTER; what++)
            MT_TRY(
                mt_optimizer_gather(m->r.ctx, &m->optimizer, p, (mt_optimizer_state)what, x + (what + 1) * n + used));
        used += size;
    }
    return MT_SUCCESS;
}

static mt_status job_rank(mt_comm *world, void *user) {
    job *j = (job *)user;
    int rank = mt_comm_rank(world);
    float *before = NULL, *after = NULL;
    void *taken;
    size_t mark;
    int64_t n = 0;
    replica m;
    mt_training_state state = j->state;
    mt_status status = replica_open(world, j, &m);
    if (status == MT_SUCCESS) status = dump(&m, j, &before, &n);
    if (status != MT_SUCCESS) return status;
    m.r.ctx->error[0] = 0;
    mark = mt_arena_mark(m.r.ctx);
    if (j->arena > 0) MT_TRY(mt_arena_alloc(m.r.ctx, ARENA - mark - j->arena, &taken));
    if (j->action == SAVE) j->status[rank] = mt_checkpoint_save(m.r.ctx, m.checkpoint, &state);
    if (j->action == LOAD) j->status[rank] = mt_checkpoint_load(m.r.ctx, m.checkpoint, j->step, &state);
    if (j->action == LOCK) j->status[rank] = mt_checkpoint_lock(m.r.ctx, m.checkpoint);
    if (j->action == LOCK && j->stays && j->status[rank] == MT_SUCCESS)
        j->status[rank] = mt_checkpoint_save(m.r.ctx, m.checkpoint, &state);
    if (j->stays > 0 && j->status[rank] == MT_SUCCESS && write(j->stays, "", 1) == 1) pause();
    if (j->action == IMPORT) j->status[rank] = mt_checkpoint_import(m.r.ctx, m.checkpoint, j->directory);
    snprintf(j->sentence[rank], MT_ERROR_BYTES, "%s", mt_last_error(m.r.ctx));
    mt_arena_release(m.r.ctx, mark);
    status = dump(&m, j, &after, &n);
    j->changed[rank] = memcmp(before, after, (size_t)n * sizeof *before) != 0;
    j->digest[rank] = mti_checksum(0, (const unsigned char *)after, (size_t)n * sizeof *after);
    if (rank == 0) {
        j->dump = after;
        j->dumped = n;
        j->state = state;
        j->optimizer_step = m.optimizer.step;
    } else {
        free(after);
    }
    free(before);
    replica_close(&m);
    return status;
}

/* Runs the job. The caller frees its dump. */
static void run(job *j) {
    if (!j->tp) j->tp = 1;
    if (!j->data) j->data = 1;
    if (!j->pipeline) j->pipeline = 1;
    test_launch(j->tp * j->data * j->pipeline, job_rank, j);
}

static void run_quietly(job *j) {
    run(j);
    free(j->dump);
    j->dump = NULL;
}

static void expect_success(const job *j) {
    for (int r = 0; r < j->tp * j->data * j->pipeline; r++)
        if (j->status[r] != MT_SUCCESS) fail_msg("rank %d: %s: %s", r, mt_status_name(j->status[r]), j->sentence[r]);
}

/* Checks that every rank has the same status and message, that the message contains all of these words, and that the
   ranks are unchanged. */
static void expect_refusal(const job *j, mt_status status, const char *words) {
    for (int r = 0; r < j->tp * j->data * j->pipeline; r++) {
        if (j->status[r] != status)
            fail_msg("rank %d: %s: '%s', must be %s", r, mt_status_name(j->status[r]), j->sentence[r],
                     mt_status_name(status));
        assert_string_equal(j->sentence[r], j->sentence[0]);
        if (j->changed[r]) fail_msg("rank %d has other parameters after '%s'", r, j->sentence[r]);
    }
    if (!test_has_words(j->sentence[0], words)) fail_msg("'%s' is not all in '%s'", words, j->sentence[0]);
}

static void same_dump(const job *want, const job *got) {
    assert_int_equal(want->dumped, got->dumped);
    for (int64_t i = 0; i < want->dumped; i++)
        if (memcmp(&want->dump[i], &got->dump[i], sizeof(float)) != 0)
            fail_msg("tensor %d x data %d: element %lld of %lld is %.9g, must be %.9g", got->tp, got->data,
                     (long long)i, (long long)want->dumped, (double)got->dump[i], (double)want->dump[i]);
}

static mt_training_state some_state(int64_t step) {
    mt_training_state s;
    memset(&s, 0, sizeof s);
    s.step = step;
    s.seed = UINT64_MAX - 3;
    s.position = (int64_t)1 << 62;
    s.scaler.desc = (mt_loss_scaler_desc){65536.0f, 1.17549435e-38f, 2.0f, 0.3333333f, 7, 2};
    s.scaler.scale = 0.1f;
    s.scaler.good_steps = 3;
    s.scaler.overflows = 1;
    s.scaler.skipped = 12345678901;
    snprintf(s.note, sizeof s.note, "a \"note\"\n\\ \xc3\xa9");
    return s;
}

/* ---- the same on every split ------------------------------------------------------------------------------------- */

static const struct { int tp, data; } splits[] = {{1, 1}, {2, 1}, {1, 2}, {4, 1}, {3, 2}};
#define SPLITS (int)(sizeof splits / sizeof *splits)

/* A checkpoint has the same bytes whatever the split that saves it, and loads on every other split. */
static void round_trips(job kind) {
    job first = kind;
    first.action = SAVE;
    first.fill = 1;
    first.directory = "a";
    first.state = some_state(7);
    run(&first);
    expect_success(&first);
    for (int i = 0; i < SPLITS; i++) {
        job again = first, load = kind;
        again.tp = splits[i].tp;
        again.data = splits[i].data;
        again.directory = "b";
        run_quietly(&again);
        expect_success(&again);
        shell("diff -r '%s' '%s'", in_scratch("a"), in_scratch("b"));
        forget("b");
        load.action = LOAD;
        load.directory = "a";
        load.step = 7;
        load.tp = splits[i].tp;
        load.data = splits[i].data;
        run(&load);
        expect_success(&load);
        same_dump(&first, &load);
        assert_memory_equal(&load.state, &first.state, sizeof load.state);
        assert_int_equal(load.optimizer_step, kind.no_optimizer ? 0 : 1001);
        free(load.dump);
    }
    free(first.dump);
    forget("a");
}

static void every_split(void **state) {
    (void)state;
    for (int model = GPT2; model <= LLAMA; model++)
        for (int dtype = MT_F32; dtype <= MT_F16; dtype++) {
            round_trips((job){.model = model, .dtype = (mt_dtype)dtype});
            round_trips((job){.model = model, .dtype = (mt_dtype)dtype, .sharded = 1});
            if (dtype != MT_F32) round_trips((job){.model = model, .dtype = (mt_dtype)dtype, .stochastic = 1});
        }
    round_trips((job){.model = LLAMA, .kv_heads = 2});
    round_trips((job){.model = LLAMA, .kv_heads = 1, .dtype = MT_BF16, .sharded = 1});
    round_trips((job){.model = LLAMA, .kv_heads = 1, .dtype = MT_F16, .qkv_layout = MT_QKV_SEPARATE});
    round_trips((job){.model = GPT2, .no_optimizer = 1, .dtype = MT_BF16});
    round_trips((job){.model = GPT2, .activation = MT_GELU_ERF});
    round_trips((job){.model = GPT2, .heads = 12, .qkv_layout = MT_QKV_CONCATENATED});
    round_trips((job){.model = GPT2, .heads = 12, .qkv_layout = MT_QKV_SEPARATE});
    round_trips((job){.model = GPT2, .heads = 12, .activation = MT_SQUARED_RELU, .qkv_layout = MT_QKV_CONCATENATED});
}

/* Files tell the layout of QKV, unless it is the one per group. A model of another layout does not load them, because
   the optimizer's state has the order of the weights. The first models are GPT-2, except with separate layers; the
   others are not. */
static void layouts_of_qkv(void **state) {
    static const char *const names[] = {"MT_QKV_PER_GROUP", "MT_QKV_CONCATENATED", "MT_QKV_SEPARATE"};
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (int i = 0; i < 2 * 3; i++) {
        job save = {.model = GPT2,
                    .activation = i / 3 ? MT_SQUARED_RELU : MT_GELU_TANH,
                    .action = SAVE,
                    .fill = 1,
                    .directory = "a",
                    .state = {.step = 1},
                    .qkv_layout = (mt_qkv_layout)(i % 3)};
        job load = save;
        const char *directory = in_scratch("a/step-00000001");
        mt_gpt_desc d;
        char words[128];
        run_quietly(&save);
        expect_success(&save);
        shell("%s grep -q gpt.qkv_layout '%s/model.safetensors'", i % 3 ? "" : "!", directory);
        shell("%s grep -q 0.self_attention.query.weight '%s/optimizer.safetensors'", i % 3 == 2 ? "" : "!", directory);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_desc_read(ctx, directory, &d));
        assert_int_equal(d.layer.qkv_layout, save.qkv_layout);
        load.action = LOAD;
        load.step = 1;
        load.fill = 0;
        load.tp = 2;
        run_quietly(&load);
        expect_success(&load);
        load.qkv_layout = (mt_qkv_layout)((i + 1) % 3);
        run_quietly(&load);
        snprintf(words, sizeof words, "its model has qkv_layout %s, this one %s", names[i % 3], names[(i + 1) % 3]);
        expect_refusal(&load, MT_ERR_DATA, words);
        forget("a");
    }
    mt_context_destroy(ctx);
}

/* Files tell the form of rotary embeddings and the number of features that turn, unless they are 0. A model with others
   does not load them. */
static void forms_of_rotary(void **state) {
    static const int64_t dims[] = {0, 2, 2, 4}; /* 4: the head size, which is the same as 0 */
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (int i = 0; i < 4; i++) {
        job save = {.model = LLAMA,
                    .hidden = 48,
                    .action = SAVE,
                    .fill = 1,
                    .directory = "a",
                    .state = {.step = 1},
                    .rotary_form = (mt_rotary_form)(i / 2),
                    .rotary_dim = dims[i]};
        job load = save;
        const char *directory = in_scratch("a/step-00000001");
        mt_gpt_desc d;
        run_quietly(&save);
        expect_success(&save);
        shell("%s grep -q gpt.rotary_form '%s/model.safetensors'", i / 2 ? "" : "!", directory);
        shell("%s grep -q gpt.rotary_dim '%s/model.safetensors'", dims[i] == 2 ? "" : "!", directory);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_desc_read(ctx, directory, &d));
        assert_true(d.layer.scores.rotary_form == save.rotary_form && d.layer.scores.rotary_dim == dims[i] % 4);
        load.action = LOAD;
        load.step = 1;
        load.fill = 0;
        load.rotary_dim = dims[i] == 2 ? 2 : 4 - dims[i];
        run_quietly(&load);
        expect_success(&load);
        load.rotary_form = (mt_rotary_form)(1 - i / 2);
        run_quietly(&load);
        expect_refusal(&load, MT_ERR_DATA,
                       i / 2 ? "has rotary_form MT_ROTARY_PAIRS, this one MT_ROTARY_HALVES"
                             : "has rotary_form MT_ROTARY_HALVES, this one MT_ROTARY_PAIRS");
        load.rotary_form = save.rotary_form;
        load.rotary_dim = dims[i] == 2 ? 0 : 2;
        run_quietly(&load);
        expect_refusal(&load, MT_ERR_DATA, dims[i] == 2 ? "rotary_dim 2, this one 0" : "rotary_dim 0, this one 2");
        forget("a");
    }
    mt_context_destroy(ctx);
}

/* Files tell the window, the soft cap and ALiBi, unless they are 0. They have the names of the registry then, and no
   config.json. A model with others does not load them. */
static void changed_scores(void **state) {
    static const struct {
        int64_t window;
        float softcap;
        int alibi;
        float scale;
        const char *word, *refusal;
    } cases[] = {{3, 0.0f, 0, 0.0f, "gpt.window", "has window 3, this one 0"},
                 {0, 1.5f, 0, 0.0f, "gpt.softcap", "has softcap 1.5"},
                 {0, 0.0f, 1, 0.0f, "gpt.alibi", "has alibi 1, this one 0"},
                 {0, 0.0f, 0, -0.5f, "gpt.scale", "has scale -5.0"}};
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (int i = 0; i < 8; i++) {
        const int c = i % 4;
        job save = {.model = i / 4 ? LLAMA : GPT2, .action = SAVE, .fill = 1, .directory = "a", .state = {.step = 1}};
        const char *directory = in_scratch("a/step-00000001");
        job load;
        mt_gpt_desc d;
        save.window = cases[c].window;
        save.softcap = cases[c].softcap;
        save.alibi = cases[c].alibi;
        save.scale = cases[c].scale;
        load = save;
        run_quietly(&save);
        expect_success(&save);
        for (int k = 0; k < 4; k++)
            shell("%s grep -q %s '%s/model.safetensors'", k == c ? "" : "!", cases[k].word, directory);
        shell("grep -q word_embeddings '%s/model.safetensors' && ! test -e '%s/config.json'", directory, directory);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_desc_read(ctx, directory, &d));
        assert_true(d.layer.scores.window == save.window && d.layer.scores.softcap == save.softcap &&
                    d.layer.scores.alibi == save.alibi && d.layer.scores.scale == save.scale);
        load.action = LOAD;
        load.step = 1;
        load.fill = 0;
        load.tp = 2;
        run_quietly(&load);
        expect_success(&load);
        load.window = load.alibi = 0;
        load.softcap = load.scale = 0.0f;
        run_quietly(&load);
        expect_refusal(&load, MT_ERR_DATA, cases[c].refusal);
        forget("a");
    }
    mt_context_destroy(ctx);
}

/* A vocabulary with padding of the program's has the files of one without, and they load with any padding. */
static void padded_vocabulary(void **state) {
    static const int64_t padded[] = {48, 0, 40};
    (void)state;
    for (int model = GPT2; model <= LLAMA; model++) {
        job plain = {.model = model, .action = SAVE, .fill = 1, .directory = "a", .state = some_state(7)};
        run(&plain);
        expect_success(&plain);
        for (int i = 0; i < 3; i++) {
            job again = plain, load = {.model = model, .action = LOAD, .directory = "b", .step = 7, .tp = 4 >> i};
            again.directory = "b";
            again.padded = padded[i];
            again.tp = 1 << i;
            run_quietly(&again);
            expect_success(&again);
            shell("diff -r '%s' '%s'", in_scratch("a"), in_scratch("b"));
            load.padded = padded[(i + 1) % 3];
            run(&load);
            expect_success(&load);
            same_dump(&plain, &load);
            free(load.dump);
            forget("b");
        }
        free(plain.dump);
        forget("a");
        round_trips((job){.model = model, .padded = 64, .sharded = 1});
    }
}

/* Only a model that is a GPT-2 gets the names and the config.json of GPT-2: its activation must not be SwiGLU. */
static void what_is_a_gpt2(void **state) {
    static const mt_activation kinds[] = {MT_GELU_TANH, MT_GELU_ERF, MT_SQUARED_RELU, MT_RELU, MT_TANH, MT_SWIGLU};
    (void)state;
    for (int i = 0; i < 6; i++) {
        job save = {
            .model = GPT2, .activation = kinds[i], .action = SAVE, .fill = 1, .directory = "a", .state = {.step = 1}};
        run(&save);
        expect_success(&save);
        shell("test %s -e '%s'", i < 5 ? "" : "!", in_scratch("a/step-00000001/config.json"));
        free(save.dump);
        forget("a");
    }
    round_trips((job){.model = GPT2, .activation = MT_SQUARED_RELU});
    round_trips((job){.model = GPT2, .activation = MT_SWIGLU});
}

/* Invariant mode divides the parameters differently among the ranks. The files are the same. */
static void invariant_mode(void **state) {
    job plain = {.model = LLAMA, .action = SAVE, .fill = 2, .directory = "a", .state = {.step = 1}};
    (void)state;
    run_quietly(&plain);
    expect_success(&plain);
    for (int tp = 1; tp <= 4; tp *= 2) {
        job sharded = plain, load = {.model = LLAMA, .action = LOAD, .directory = "b", .step = 1};
        sharded.invariant = 4;
        sharded.tp = tp;
        sharded.directory = "b";
        run(&sharded);
        expect_success(&sharded);
        shell("diff -r '%s' '%s'", in_scratch("a"), in_scratch("b"));
        load.invariant = 4;
        load.tp = 4 / tp;
        run(&load);
        expect_success(&load);
        same_dump(&sharded, &load);
        free(load.dump);
        free(sharded.dump);
        forget("b");
    }
    forget("a");
}

/* Loads parameters into a type other than that of the save. */
static void other_types(void **state) {
    job half = {.model = GPT2, .dtype = MT_BF16, .action = SAVE, .fill = 3, .directory = "a", .state = {.step = 1}};
    job whole = {.model = GPT2, .action = SAVE, .fill = 3, .directory = "b", .state = {.step = 1}}, load;
    (void)state;
    run(&half);
    run(&whole);
    expect_success(&half);
    expect_success(&whole);
    load = (job){.model = GPT2, .action = LOAD, .directory = "a", .step = 1, .tp = 2};
    run(&load); /* bf16 with master weights becomes f32 */
    expect_success(&load);
    assert_memory_equal(load.dump, half.dump + 3 * half.dumped / 4, (size_t)half.dumped / 4 * sizeof(float));
    assert_memory_equal(load.dump + load.dumped / 4, half.dump + half.dumped / 4,
                        (size_t)half.dumped / 2 * sizeof(float));
    free(load.dump);
    load = (job){.model = GPT2, .dtype = MT_BF16, .action = LOAD, .directory = "b", .step = 1, .tp = 2};
    run(&load); /* f32 becomes bf16 with master weights */
    expect_success(&load);
    assert_memory_equal(load.dump + 3 * load.dumped / 4, whole.dump, (size_t)whole.dumped / 4 * sizeof(float));
    assert_memory_equal(load.dump, half.dump, (size_t)half.dumped / 4 * sizeof(float));
    free(load.dump);
    load =
        (job){.model = GPT2, .dtype = MT_BF16, .stochastic = 1, .action = LOAD, .directory = "a", .step = 1, .tp = 2};
    run(&load); /* without master weights */
    expect_success(&load);
    assert_memory_equal(load.dump, half.dump, (size_t)half.dumped / 4 * 3 * sizeof(float));
    free(load.dump);
    load = (job){.model = GPT2, .dtype = MT_BF16, .no_optimizer = 1, .action = LOAD, .directory = "a", .step = 1};
    run(&load);
    expect_success(&load);
    assert_memory_equal(load.dump, half.dump, (size_t)load.dumped * sizeof(float));
    free(load.dump);
    free(half.dump);
    free(whole.dump);
    forget("a");
    forget("b");
}

/* ---- pipeline stages --------------------------------------------------------------------------------------------- */

/* A GPT on pipeline stages and one on a single stage read each other's checkpoints: values depend only on names. */
static void stages_of(int model) {
    static const int shapes[][3] = {{1, 1, 2}, {2, 1, 2}, {1, 2, 2}, {2, 1, 4}};
    job whole = {
        .model = model, .action = SAVE, .fill = 4, .directory = "whole", .state = {.step = 1}, .dtype = MT_BF16};
    run(&whole);
    expect_success(&whole);
    for (int i = 0; i < 4; i++) {
        job cut = whole, load = whole;
        cut.tp = shapes[i][0];
        cut.data = shapes[i][1];
        cut.pipeline = shapes[i][2];
        cut.directory = "cut";
        run_quietly(&cut);
        expect_success(&cut);
        assert_int_equal(entries(in_scratch("cut/step-00000001")), 2 * shapes[i][2] + 3);
        load.fill = 0;
        load.action = LOAD;
        load.directory = "cut";
        load.step = 1;
        load.tp = 2;
        run(&load);
        expect_success(&load);
        same_dump(&whole, &load);
        free(load.dump);
        cut.action = LOAD; /* stages read a checkpoint of one stage, and one of fewer stages */
        cut.directory = i == 3 ? "cut" : "whole";
        cut.step = 1;
        cut.fill = 0;
        run(&cut);
        expect_success(&cut);
        job filled = cut;
        filled.action = NOTHING;
        filled.fill = 4;
        run(&filled);
        same_dump(&filled, &cut);
        assert_memory_equal(filled.digest, cut.digest, sizeof cut.digest);
        free(filled.dump);
        free(cut.dump);
        if (i < 3) forget("cut");
    }
    job missing = {.model = model, .pipeline = 2, .action = LOAD, .directory = "cut", .step = 1, .dtype = MT_BF16};
    shell("rm '%s'/step-00000001/model-00003-of-00004.safetensors", in_scratch("cut"));
    run_quietly(&missing);
    expect_refusal(&missing, MT_ERR_IO, "model-00003-of-00004.safetensors|No such file");
    free(whole.dump);
    forget("whole");
    forget("cut");
}

static void stages(void **state) {
    (void)state;
    stages_of(GPT2);
    stages_of(LLAMA);
}

/* An index that names another file, names a tensor that is not there, or omits one. */
static void indices(void **state) {
    static const struct {
        const char *edit;
        mt_status status;
        const char *words;
    } wrong[] = {
        {"s/model-00002-of-00002/..\\/x\\/model/", MT_ERR_DATA, "not the name of a file"},
        {"s/model-00002-of-00002.safetensors/.hidden/", MT_ERR_DATA, "not the name of a file"},
        {"s/\"transformer.wpe.weight\"/\"transformer.wpx.weight\"/", MT_ERR_DATA, "transformer.wpx.weight|is not in"},
        {"/wpe/d", MT_ERR_DATA, "names|its files have"},
        {"s/weight_map/weight_mop/", MT_ERR_DATA, "names 0"},
        {"s/wpe/w\\\\qpe/", MT_ERR_DATA, "JSON|no such escape"},
        {"$d", MT_ERR_DATA, "JSON"}};
    job save = {.model = GPT2, .pipeline = 2, .action = SAVE, .fill = 1, .directory = "cut", .state = {.step = 1}};
    (void)state;
    run_quietly(&save);
    expect_success(&save);
    char index[SCRATCH_PATH];
    print_to(index, sizeof index, "%s", in_scratch("cut/step-00000001/model.safetensors.index.json"));
    shell("cp '%s' '%s'", index, in_scratch("index"));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        job load = {.model = GPT2, .action = LOAD, .directory = "cut", .step = 1, .tp = 2};
        shell("sed '%s' '%s' > '%s'", wrong[i].edit, in_scratch("index"), index);
        run_quietly(&load);
        expect_refusal(&load, wrong[i].status, wrong[i].words);
    }
    shell("rm '%s'", in_scratch("index"));
    forget("cut");
}

/* ---- GPT-2 of Hugging Face --------------------------------------------------------------------------------------- */

typedef struct golden_run {
    const char *directory;
    const mt_safetensors *expected;
    int tp;
    mt_qkv_layout qkv_layout;
    int64_t padded; /* padded_vocab */
} golden_run;

static mt_status expected(mt_context *ctx, const mt_safetensors *s, const char *name, float *out) {
    return mt_safetensors_read(ctx, mt_safetensors_find(s, name), out);
}

/* Compares the logits, the loss of each token, and the norm of the gradient of the mean loss. */
static mt_status golden_compare(const golden_run *g, replica *m) {
    enum { TOKENS = 48, V = 61 };
    mt_batch batch = {.sequences = 4, .seq = 12};
    float x[TOKENS], want_loss[TOKENS], loss[TOKENS], norm, want_norm;
    int32_t ids[TOKENS], targets[TOKENS];
    float *logits = test_floats(&m->r, TOKENS * V, 0), *want = test_floats(&m->r, TOKENS * V, 0);
    mt_gpt_saved saved;
    MT_TRY(expected(m->r.ctx, g->expected, "ids", x));
    for (int i = 0; i < TOKENS; i++) ids[i] = (int32_t)x[i];
    MT_TRY(expected(m->r.ctx, g->expected, "targets", x));
    for (int i = 0; i < TOKENS; i++) targets[i] = (int32_t)x[i];
    MT_TRY(expected(m->r.ctx, g->expected, "logits", want));
    MT_TRY(expected(m->r.ctx, g->expected, "loss", want_loss));
    MT_TRY(expected(m->r.ctx, g->expected, "grad_norm", &want_norm));
    MT_TRY(mt_gpt_logits(m->r.ctx, &m->gpt, &batch, ids, mt_tensor_f32(logits, TOKENS, V)));
    MT_TRY(test_near_f32("logits", logits, want, TOKENS * V, 1e-5));
    MT_TRY(mt_gpt_saved_create(m->r.ctx, &m->gpt, &saved));
    MT_TRY(mt_gpt_forward(m->r.ctx, &m->gpt, &batch, ids, targets, mt_tensor_f32(loss, 1, TOKENS), &saved));
    MT_TRY(test_near_f32("loss", loss, want_loss, TOKENS, 1e-5));
    MT_TRY(mt_gpt_backward(m->r.ctx, &m->gpt, 1.0f / TOKENS, &saved));
    mt_gpt_saved_destroy(&saved);
    MT_TRY(mt_sync_gradients(m->r.ctx, m->r.params));
    MT_TRY(mt_grad_norm(m->r.ctx, m->r.params, &norm));
    return test_near_f32("gradient norm", &norm, &want_norm, 1, 1e-5);
}

static mt_status golden_rank(mt_comm *world, void *user) {
    const golden_run *g = (const golden_run *)user;
    mt_grid_desc shape = {.tp = g->tp};
    mt_checkpoint_desc c = {.directory = NULL};
    mt_training_state s = {.step = 0};
    mt_gpt_desc d;
    replica m;
    memset(&m, 0, sizeof m);
    MT_TRY(test_rank_open(world, shape, NULL, &m.r));
    MT_TRY(mt_gpt_desc_read(m.r.ctx, g->directory, &d));
    CHECK(d.vocab == 61 && d.layers == 2 && d.max_seq == 12 && d.layer.heads == 4 && d.layer.ffn == 40);
    CHECK(d.layer.norm.eps == 1e-4f && d.layer.activation == MT_GELU_TANH && !d.untied_head);
    d.layer.qkv_layout = g->qkv_layout;
    d.padded_vocab = g->padded;
    MT_TRY(mt_gpt_create(m.r.ctx, m.r.params, &d, &m.gpt));
    if (!g->padded) MT_TRY(mt_params_init(m.r.ctx, m.r.params, 5)); /* all values are loaded anyway */
    MT_TRY(mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &m.checkpoint));
    MT_TRY(mt_checkpoint_import(m.r.ctx, m.checkpoint, g->directory));
    CHECK(mt_checkpoint_lock(m.r.ctx, m.checkpoint) == MT_ERR_ARGUMENT);
    CHECK(mt_checkpoint_load(m.r.ctx, m.checkpoint, 0, &s) == MT_ERR_ARGUMENT);
    CHECK(mt_checkpoint_save(m.r.ctx, m.checkpoint, &s) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(m.r.ctx), "mt_checkpoint_save: mt_checkpoint_desc.directory is NULL"));
    MT_TRY(golden_compare(g, &m));
    replica_close(&m);
    return MT_SUCCESS;
}

static void hugging_face(void **state) {
    static const char *const directories[] = {"tests/golden/gpt2_hf", "tests/golden/gpt2_hf_bare"};
    mt_context *ctx;
    mt_safetensors *values;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, "tests/golden/gpt2_hf/expected.safetensors", &values));
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 3 * 4; k++) {
            golden_run g = {directories[i], values, 1 << k / 4, k % 4 < 3 ? (mt_qkv_layout)(k % 4) : MT_QKV_PER_GROUP,
                            k % 4 == 3 ? 64 : 0};
            test_launch(g.tp, golden_rank, &g);
        }
    mt_safetensors_close(values);
    mt_context_destroy(ctx);
}

/* The file that the library saves has the names, shapes and values of the file that transformers saved. */
static mt_status rewrite_rank(mt_comm *world, void *user) {
    mt_training_state s = {.step = 0};
    mt_checkpoint_desc c = {.directory = in_scratch("hf")};
    const mt_gpt_desc *how = user;
    mt_gpt_desc d;
    replica m;
    memset(&m, 0, sizeof m);
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, NULL, &m.r));
    MT_TRY(mt_gpt_desc_read(m.r.ctx, "tests/golden/gpt2_hf", &d));
    d.layer.qkv_layout = how->layer.qkv_layout;
    d.padded_vocab = how->padded_vocab;
    MT_TRY(mt_gpt_create(m.r.ctx, m.r.params, &d, &m.gpt));
    MT_TRY(mt_params_init(m.r.ctx, m.r.params, 5));
    MT_TRY(mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &m.checkpoint));
    MT_TRY(mt_checkpoint_import(m.r.ctx, m.checkpoint, "tests/golden/gpt2_hf_bare"));
    MT_TRY(mt_checkpoint_save(m.r.ctx, m.checkpoint, &s));
    replica_close(&m);
    return MT_SUCCESS;
}

static void written_like_hugging_face(mt_gpt_desc how) {
    mt_context *ctx;
    mt_safetensors *theirs, *ours;
    mti_described a, b;
    int exists;
    char path[MT_PATH_MAX];
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    test_launch(2, rewrite_rank, &how);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_checkpoint_path(ctx, in_scratch("hf"), 0, path, sizeof path));
    ASSERT_STATUS(ctx, MT_SUCCESS, mti_config_open(ctx, "tests/golden/gpt2_hf", &exists, &a));
    ASSERT_STATUS(ctx, MT_SUCCESS, mti_config_open(ctx, path, &exists, &b));
    assert_true(exists);
    assert_int_equal(mti_described_differ(&a, &b), -1);
    strcat(path, "/model.safetensors");
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, path, &ours));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, "tests/golden/gpt2_hf/model.safetensors", &theirs));
    assert_int_equal(mt_safetensors_count(ours), mt_safetensors_count(theirs));
    assert_string_equal(mt_safetensors_metadata(ours, "format"), "pt");
    for (int i = 0; i < mt_safetensors_count(ours); i++) {
        const mt_safetensors_tensor *x = mt_safetensors_at(ours, i), *y = mt_safetensors_at(theirs, i);
        assert_string_equal(x->name, y->name);
        assert_string_equal(x->dtype, y->dtype);
        assert_int_equal(x->dims, y->dims);
        assert_memory_equal(x->shape, y->shape, sizeof x->shape);
        assert_memory_equal(x->data, y->data, (size_t)x->bytes);
    }
    mt_safetensors_close(ours);
    mt_safetensors_close(theirs);
    mt_context_destroy(ctx);
    forget("hf");
}

static void as_hugging_face_writes(void **state) {
    (void)state;
    written_like_hugging_face((mt_gpt_desc){.padded_vocab = 0});
    written_like_hugging_face((mt_gpt_desc){.layer = {.qkv_layout = MT_QKV_CONCATENATED}});
    written_like_hugging_face((mt_gpt_desc){.layer = {.qkv_layout = MT_QKV_SEPARATE}});
    written_like_hugging_face((mt_gpt_desc){.padded_vocab = 64});
}

/* Members of config.json that change what a GPT-2 computes, each with a value that is not supported. */
static void other_configs(void **state) {
    static const struct {
        const char *from, *to, *words;
    } wrong[] = {
        {"\"gpt2\"", "\"gptj\"", "model_type is 'gptj', must be gpt2 or llama"},
        {"gelu_new", "silu",
         "activation_function is 'silu', must be gelu_new, gelu_fast, gelu_pytorch_tanh, gelu, relu, |relu2 or tanh"},
        {"\"scale_attn_weights\": true", "\"scale_attn_weights\": false", "scale_attn_weights is false, must be true"},
        {"layer_idx\": false", "layer_idx\": true", "scale_attn_by_inverse_layer_idx is true, must be false"},
        {"cross_attention\": false", "cross_attention\": true", "add_cross_attention is true, must be false"},
        {"0.0001", "-0.0001", "layer_norm_epsilon is -0.0001"},
        {"0.0001", "1e-60", "layer_norm_epsilon is 1e-60, must be above 0"},
        {"\"vocab_size\": 61", "\"vocab_size\": 2147483648", "vocab_size is 2147483648, must be from 1 to 2147483647"},
        {"\"n_positions\": 12", "\"n_positions\": 0", "n_positions is 0, must be from 1 to 2147483647"},
        {"\"n_embd\": 16", "\"n_embd\": 4294967296", "n_embd is 4294967296, must be from 1 to 2147483647"},
        {"\"n_embd\": 16", "\"n_embd\": 536870912/;s/\"n_inner\": 40/\"n_inner\": null",
         "n_embd is 536870912, must be from 1 to 536870911 without n_inner"},
        {"\"n_layer\": 2", "\"n_layer\": 131073", "n_layer is 131073, must be from 1 to 131072"},
        {"\"n_head\": 4", "\"n_head\": 0", "n_head is 0, must be from 1 to 2147483647"},
        {"\"n_inner\": 40", "\"n_inner\": 9223372036854775807", "n_inner is 9223372036854775807, must be from 1"},
        {"\"n_embd\": 16", "\"n_embd\": 18", "n_embd is 18, must be a multiple of n_head 4"},
        {"\"n_layer\": 2", "\"n_layer\": 2.5", "n_layer: a number is not whole"},
        {"\"n_layer\": 2", "\"n_layer\": true", "whole number is missing"},
        {"\"n_positions\": 12,", "\"n_positions\": 12", "comma"}};
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        mt_context *ctx;
        mt_gpt_desc d;
        shell("mkdir -p '%s' && cp tests/golden/gpt2_hf/model.safetensors '%s'", in_scratch("hf"), in_scratch("hf"));
        shell("sed 's/%s/%s/' tests/golden/gpt2_hf/config.json > '%s'", wrong[i].from, wrong[i].to,
              in_scratch("hf/config.json"));
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
        mt_status status = mt_gpt_desc_read(ctx, in_scratch("hf"), &d);
        REFUSED(ctx, MT_ERR_DATA, wrong[i].words, status);
        mt_context_destroy(ctx);
    }
    forget("hf");
}

/* ---- training goes on -------------------------------------------------------------------------------------------- */

static void goes_on(gpt_run before, gpt_run after) {
    resume_same_bits(before, after, in_scratch("resume"));
    forget("resume");
}

static void goes_on_as_if_never_stopped(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
        for (int llama = 0; llama <= 1; llama++) {
            gpt_run one = {.dtype = (mt_dtype)dtype, .tp = 1, .data = 1, .llama = llama}, split = one, sharded;
            if (dtype == MT_F16) one.loss_scale = split.loss_scale = 268435456.0f; /* some steps are skipped */
            split.tp = split.data = 2;
            split.sequence_parallel = 1;
            goes_on(one, one);
            goes_on(split, split);
            sharded = one;
            one.invariant = split.invariant = sharded.invariant = 4;
            sharded.tp = 4;
            goes_on(sharded, split);
            goes_on(split, one);
        }
    gpt_run stochastic = {.dtype = MT_BF16, .tp = 2, .data = 1, .stochastic = 1};
    goes_on(stochastic, stochastic);
    gpt_run shared = {.dtype = MT_BF16, .tp = 1, .data = 2, .share = {.sharded_optimizer = 1, .bucket_bytes = 4096}};
    goes_on(shared, shared);
    gpt_run stages = {.tp = 2, .data = 1, .pipeline = 2, .share = {.sharded_optimizer = 1}};
    goes_on(stages, stages);
    stages.dtype = MT_BF16;
    stages.data = 2;
    goes_on(stages, stages);
}

/* ---- files that are not what they should be ---------------------------------------------------------------------- */

static job a_save(const char *directory, int64_t step, int fill) {
    return (job){.model = GPT2, .tp = 2, .action = SAVE, .fill = fill, .directory = directory, .state = {.step = step}};
}

static job a_load(const char *directory, int64_t step) {
    return (job){.model = GPT2, .tp = 2, .action = LOAD, .directory = directory, .step = step};
}

static void save_one(const char *directory, int64_t step, int fill) {
    job save = a_save(directory, step, fill);
    run_quietly(&save);
    expect_success(&save);
}

/* Checks that the checkpoint of this step loads, and contains the values of `fill`. */
static void loads(const char *directory, int64_t step, int fill) {
    job load = a_load(directory, step), filled = load;
    filled.action = NOTHING;
    filled.fill = fill;
    run(&load);
    expect_success(&load);
    run(&filled);
    same_dump(&filled, &load);
    free(load.dump);
    free(filled.dump);
}

/* Flips the same bit of two words: neighbouring words, and any two. */
static void two_bits(const char *path, const char *name, size_t size) {
    static const int bits[] = {63, 63, 63, 62, 0, 32, 31};
    uint64_t seed = 12, words[2], first = (4000 + 7) / 8, last = size / 8 - 1;
    for (size_t k = 0; k < 3 * sizeof bits / sizeof *bits; k++) {
        off_t at[2];
        job load = a_load("d", 1);
        int fd = open(path, O_RDWR);
        at[0] = (off_t)(8 * (first + test_below(&seed, last - first)));
        at[1] = k % 3 == 0 ? (off_t)(8 * last) : at[0] + 8;
        assert_true(fd >= 0);
        for (int w = 0; w < 2; w++) {
            assert_int_equal(pread(fd, &words[w], 8, at[w]), 8);
            words[w] ^= (uint64_t)1 << bits[k / 3];
            assert_int_equal(pwrite(fd, &words[w], 8, at[w]), 8);
        }
        run_quietly(&load);
        expect_refusal(&load, MT_ERR_DATA, name);
        for (int w = 0; w < 2; w++) {
            words[w] ^= (uint64_t)1 << bits[k / 3];
            assert_int_equal(pwrite(fd, &words[w], 8, at[w]), 8);
        }
        close(fd);
    }
}

/* Any single bit of either file is flipped, or the file has any wrong length. */
static void damaged(void **state) {
    static const char *const names[] = {"model.safetensors", "optimizer.safetensors"};
    uint64_t seed = 11;
    (void)state;
    save_one("d", 1, 1);
    for (int i = 0; i < 2; i++) {
        char path[SCRATCH_PATH];
        struct stat info;
        print_to(path, sizeof path, "%s/%s", in_scratch("d/step-00000001"), names[i]);
        assert_int_equal(stat(path, &info), 0);
        for (int k = 0; k < 120; k += STRIDE) {
            size_t size = k < 100 ? 4000 : (size_t)info.st_size; /* most of the flipped bits are in the header */
            off_t at = (off_t)(k < 70 ? (size_t)k : test_below(&seed, size));
            unsigned char byte = 0, changed;
            job load = a_load("d", 1);
            int fd = open(path, O_RDWR);
            assert_true(fd >= 0 && pread(fd, &byte, 1, at) == 1);
            changed = (unsigned char)(byte ^ (1u << test_below(&seed, 8)));
            assert_int_equal(pwrite(fd, &changed, 1, at), 1);
            run_quietly(&load);
            expect_refusal(&load, MT_ERR_DATA, names[i]);
            assert_int_equal(pwrite(fd, &byte, 1, at), 1);
            close(fd);
        }
        two_bits(path, names[i], (size_t)info.st_size);
        for (int k = 0; k < 40; k += STRIDE) {
            off_t length = k < 20 ? (off_t)k * 13 : (off_t)test_below(&seed, (size_t)info.st_size);
            job load = a_load("d", 1);
            shell("cp '%s' '%s'", path, in_scratch("whole"));
            assert_int_equal(truncate(path, k == 39 ? info.st_size + 1 : length), 0);
            run_quietly(&load);
            expect_refusal(&load, MT_ERR_DATA, names[i]);
            shell("mv '%s' '%s'", in_scratch("whole"), path);
        }
    }
    loads("d", 1, 1);
    forget("d");
}

/* A file that another program truncates while it is loaded gives no signal, but the same error on every rank. While the
   files are opened and checked, no parameter changes. */
static void truncated_while_loaded(void **state) {
    static const char *const names[] = {"model.safetensors", "optimizer.safetensors"};
    static const off_t lengths[] = {0, 100, 4096, 9000};
    (void)state;
    save_one("d", 1, 1);
    for (int i = 0; i < 2; i++) {
        char path[SCRATCH_PATH];
        int refused = 0, changed = 0, late = 0;
        print_to(path, sizeof path, "%s/%s", in_scratch("d/step-00000001"), names[i]);
        shell("cp '%s' '%s'", path, in_scratch("whole"));
        shortened.path = path;
        for (shortened.at = 0; late < 8; shortened.at += shortened.at < 30 ? 1 : 17) {
            job load = a_load("d", 1);
            shortened.calls = 0;
            shortened.length = lengths[refused % 4];
            run_quietly(&load);
            shell("cp '%s' '%s'", in_scratch("whole"), path);
            late += load.status[0] == MT_SUCCESS; /* everything had been read, or only the other file was left */
            if (load.status[0] == MT_SUCCESS) continue;
            if (shortened.at >= 10) {
                changed += load.changed[0] || load.changed[1];
                load.changed[0] = load.changed[1] = 0;
            }
            expect_refusal(&load, load.status[0] == MT_ERR_IO ? MT_ERR_IO : MT_ERR_DATA, names[i]);
            expect_refusal(&load, load.status[0], load.status[0] == MT_ERR_IO ? "wanted|got|truncated since" : "");
            refused++;
        }
        shortened.path = NULL;
        assert_in_range(refused, 30, 200);
        assert_in_range(changed, 1, refused - 10);
    }
    loads("d", 1, 1);
    shell("rm '%s'", in_scratch("whole"));
    forget("d");
}

/* Checkpoints of another model, of another step, or without one of the files. */
static void strangers(void **state) {
    job j;
    (void)state;
    save_one("s", 1, 1);
    save_one("s", 2, 2);
    j = a_load("s", 1), j.heads = 4, run_quietly(&j),
    expect_refusal(&j, MT_ERR_DATA, "step-00000001|heads 6|this one 4");
    j = a_load("s", 1), j.hidden = 48, run_quietly(&j), expect_refusal(&j, MT_ERR_DATA, "hidden 24|48");
    j = a_load("s", 1), j.activation = MT_GELU_ERF, run_quietly(&j),
    expect_refusal(&j, MT_ERR_DATA, "activation MT_GELU_TANH|this one MT_GELU_ERF");
    j = a_load("s", 1), j.model = LLAMA, run_quietly(&j), expect_refusal(&j, MT_ERR_DATA, "step-00000001|this one");
    j = a_load("s", 3), run_quietly(&j), expect_refusal(&j, MT_ERR_IO, "step-00000003");
    j = a_load("nowhere", 3), run_quietly(&j), expect_refusal(&j, MT_ERR_IO, "nowhere");
    j = a_load("s", 1), j.action = IMPORT, j.directory = "tests/golden/gpt2_hf", run_quietly(&j);
    expect_refusal(&j, MT_ERR_DATA, "tests/golden/gpt2_hf|vocab 61|37");
    shell("cp '%s' '%s'", in_scratch("s/step-00000002/optimizer.safetensors"), in_scratch("s/step-00000001/"));
    j = a_load("s", 1), run_quietly(&j), expect_refusal(&j, MT_ERR_DATA, "optimizer.safetensors: is of step 2|of 1");
    shell("rm '%s'", in_scratch("s/step-00000001/optimizer.safetensors"));
    j = a_load("s", 1), run_quietly(&j), expect_refusal(&j, MT_ERR_IO, "optimizer.safetensors");
    j = a_load("s", 1), j.no_optimizer = 1, run_quietly(&j), expect_success(&j);
    shell("mv '%s' '%s'", in_scratch("s/step-00000002"), in_scratch("s/step-00000009"));
    j = a_load("s", 9), run_quietly(&j), expect_refusal(&j, MT_ERR_DATA, "step-00000009/model|step '2'|directory 9");
    forget("s");
}

/* A state that load would refuse is refused by save, on every rank, and the previous checkpoint stays. */
static void impossible_states(void **state) {
    mt_training_state good = some_state(1);
    job save;
    (void)state;
    save_one("i", 1, 1);
    for (int i = 0; i < 20; i++) {
        static const char *const words[] = {"position is -5, must be a whole number from 0 to 4611686018427387904",
                                            "loss_scaler.scale is -1.0|, must be at least min_scale and finite",
                                            "loss_scaler.scale is 0.0",
                                            "loss_scaler.scale is 9.9",
                                            "loss_scaler.scale is inf, must be a finite number",
                                            "loss_scaler.min_scale is 0.0",
                                            "loss_scaler.initial_scale is 1.0",
                                            "loss_scaler.growth is 5.0",
                                            "loss_scaler.backoff is 2.0",
                                            "loss_scaler.growth_interval is 0, must be at least 1",
                                            "loss_scaler.hysteresis is -1",
                                            "loss_scaler.good_steps is -3",
                                            "loss_scaler.overflows is -4",
                                            "loss_scaler.skipped is -7",
                                            "optimizer_step is -9, must be a whole number from 0 to"};
        save = a_save("i", 2, 1);
        save.state = good;
        mt_loss_scaler *s = &save.state.scaler;
        s->desc.min_scale = s->scale = 1.0f;
        switch (i) {
        case 0: save.state.position = -5; break;
        case 1: s->scale = -1.0f; break;
        case 2: s->scale = 0.0f; break;
        case 3: s->scale = 0.99f; break;
        case 4: s->scale = INFINITY; break;
        case 5: s->desc.min_scale = 0.0f; break;
        case 6: s->desc.initial_scale = 1e-3f; break;
        case 7: s->desc.growth = 0.5f; break;
        case 8: s->desc.backoff = 2.0f; break;
        case 9: s->desc.growth_interval = 0; break;
        case 10: s->desc.hysteresis = -1; break;
        case 11: s->good_steps = -3; break;
        case 12: s->overflows = -4; break;
        case 13: s->skipped = -7; break;
        case 14: save.fill = -1000 - 9; break; /* the optimizer's step is 1000 + fill */
        default: continue;
        }
        run_quietly(&save);
        expect_refusal(&save, MT_ERR_ARGUMENT, "mt_checkpoint_save: ");
        expect_refusal(&save, MT_ERR_ARGUMENT, words[i]);
        assert_int_equal(entries(in_scratch("i")), 1);
    }
    loads("i", 1, 1);
    forget("i");
}

static int64_t latest(const char *directory) {
    mt_context *ctx;
    int64_t step = -2;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_checkpoint_latest(ctx, NULL, in_scratch(directory), &step));
    mt_context_destroy(ctx);
    return step;
}

/* Sets a field of a file's metadata, or removes it (value NULL), and updates the checksum. */
static void set_field(const char *path, const char *key, const char *value) {
    static unsigned char file[1 << 20], after[1 << 20];
    char member[64], zeros[] = "0000000000000000", digits[MTI_CHECKSUM_DIGITS + 1];
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t size = fread(file, 1, sizeof file - 1, f), used, length = 0;
    fclose(f);
    unsigned char *at = NULL;
    snprintf(member, sizeof member, ",\"%s\":\"", key);
    for (size_t i = 8; !at && i < size; i++)
        if (memcmp(file + i, member, strlen(member)) == 0) at = file + i;
    assert_non_null(at);
    while (at[strlen(member) + length] != '"') length++;
    used = (size_t)(at - file);
    memcpy(after, file, used);
    if (value) used += (size_t)sprintf((char *)after + used, "%s%s\"", member, value);
    at += strlen(member) + length + 1;
    memcpy(after + used, at, size - (size_t)(at - file));
    used += size - (size_t)(at - file);
    uint64_t header;
    memcpy(&header, after, sizeof header);
    header += used - size;
    memcpy(after, &header, sizeof header);
    memcpy(after + MTI_CHECKSUM_AT, zeros, MTI_CHECKSUM_DIGITS);
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)mti_checksum(MTI_CHECKSUM_BASIS, after, used));
    memcpy(after + MTI_CHECKSUM_AT, digits, MTI_CHECKSUM_DIGITS);
    f = fopen(path, "wb");
    assert_true(f && fwrite(after, 1, used, f) == used);
    fclose(f);
}

/* For each field of a training state, the last value that is accepted, and the first that is refused. */
static void bounds_of_a_state(void **state) {
    static const struct {
        const char *key, *good, *bad, *words;
    } fields[] = {
        {"step", NULL, "281474976710657", "must be a whole number from 0 to 281474976710656"},
        {"step", NULL, "-1", "must be a whole number from 0 to 281474976710656"},
        {"seed", "18446744073709551615", "18446744073709551616", "from 0 to 18446744073709551615"},
        {"position", "4611686018427387904", "4611686018427387905", "from 0 to 4611686018427387904"},
        {"position", "0", "-9223372036854775807", "must be a whole number from 0 to 4611686018427387904"},
        {"loss_scaler.initial_scale", "3.4028234e+38", "1e39", "must be a finite number"},
        {"loss_scaler.initial_scale", "1.0", "0.99", "must be at least min_scale and finite"},
        {"loss_scaler.min_scale", "3e-39", "2.9e-39", "1 / min_scale is finite"},
        {"loss_scaler.min_scale", "1.0", "-1.0", "must be above 0"},
        {"loss_scaler.growth", "1.0", "0.5", "must be at least 1 and finite"},
        {"loss_scaler.backoff", "1.0", "1.01", "must be above 0 and at most 1"},
        {"loss_scaler.backoff", "1e-30", "0", "must be above 0 and at most 1"},
        {"loss_scaler.growth_interval", "2147483647", "2147483648", "must be a whole number from 0 to 2147483647"},
        {"loss_scaler.growth_interval", "4", "0", "must be at least 1"},
        {"loss_scaler.hysteresis", "2147483647", "-1", "must be a whole number from 0 to 2147483647"},
        {"loss_scaler.hysteresis", "1", "0", "must be at least 1"},
        {"loss_scaler.scale", "3.4028234e+38", "nan", "must be a finite number"},
        {"loss_scaler.scale", "1.0", "0", "must be at least min_scale and finite"},
        {"loss_scaler.good_steps", "6", "7", "must be below growth_interval"},
        {"loss_scaler.good_steps", "0", "2147483647", "must be below growth_interval"},
        {"loss_scaler.good_steps", "0", "-1", "must be a whole number from 0 to 2147483647"},
        {"loss_scaler.overflows", "1073741823", "1073741824", "must be a whole number from 0 to 1073741823"},
        {"loss_scaler.skipped", "281474976710656", "9223372036854775807", "from 0 to 281474976710656"},
        {"optimizer_step", "281474976710656", "281474976710657", "from 0 to 281474976710656"},
        {"optimizer_step", "0", "9223372036854775807", "must be a whole number from 0 to 281474976710656"}};
    char path[SCRATCH_PATH], words[256];
    job save = a_save("i", 1, 1), load;
    (void)state;
    save.state = some_state(1);
    save.state.scaler.desc.min_scale = save.state.scaler.scale = 1.0f;
    run_quietly(&save);
    expect_success(&save);
    print_to(path, sizeof path, "%s", in_scratch("i/step-00000001/model.safetensors"));
    shell("cp '%s' '%s'", path, in_scratch("whole"));
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].good) {
            float overflow = INFINITY, norm = 1.0f;
            set_field(path, fields[i].key, fields[i].good);
            load = a_load("i", 1), run_quietly(&load), expect_success(&load);
            assert_true(load.optimizer_step + 1 > 0 && load.state.position + load.state.step > 0);
            for (int k = 0; k < 3; k++) mt_loss_scaler_update(&load.state.scaler, &overflow);
            assert_true(mt_loss_scaler_update(&load.state.scaler, &norm) > 0);
        }
        set_field(path, fields[i].key, fields[i].bad);
        load = a_load("i", 1), run_quietly(&load);
        snprintf(words, sizeof words, "step-00000001/model.safetensors: its metadata has %s '%s', must be |%s",
                 fields[i].key, fields[i].bad, fields[i].words);
        expect_refusal(&load, MT_ERR_DATA, words);
        assert_memory_equal(&load.state, &(mt_training_state){0}, sizeof load.state);
        set_field(path, fields[i].key, NULL);
        load = a_load("i", 1), run_quietly(&load);
        snprintf(words, sizeof words, "step-00000001/model.safetensors: its metadata has no %s", fields[i].key);
        expect_refusal(&load, MT_ERR_DATA, words);
        shell("cp '%s' '%s'", in_scratch("whole"), path);
    }
    save = a_save("i", MTI_STEPS_MAX + 1, 1), run_quietly(&save);
    expect_refusal(&save, MT_ERR_ARGUMENT, "step 281474976710657, must be at most 281474976710656");
    shell("rm '%s' && mkdir '%s'", in_scratch("whole"), in_scratch("i/step-281474976710657"));
    assert_int_equal(latest("i"), 1); /* not a directory of a checkpoint */
    forget("i");
}

#define TEXT(x) #x
#define NUMBER(macro) TEXT(macro)

/* The same for the fields of a model. A description that is refused is not changed. */
static void bounds_of_a_model(void **state) {
    static const struct {
        const char *key, *good, *bad, *words;
    } fields[] = {{"gpt.vocab", "2147483647", "2147483648", "must be a whole number from 1 to 2147483647"},
                  {"gpt.vocab", "1", "0", "must be a whole number from 1 to 2147483647"},
                  {"gpt.layers", "131072", "131073", "must be a whole number from 1 to 131072"},
                  {"gpt.max_seq", "2147483647", "9223372036854775807", "must be a whole number from 1 to 2147483647"},
                  {"gpt.hidden", "2147483647", "9223372036854775807", "must be a whole number from 1 to 2147483647"},
                  {"gpt.heads", "2147483647", "-6", "must be a whole number from 1 to 2147483647"},
                  {"gpt.kv_heads", "1", "0", "must be a whole number from 1 to 2147483647"},
                  {"gpt.ffn", "2147483647", "2147483648", "must be a whole number from 1 to 2147483647"},
                  {"gpt.placement", "2", "3", "must be a whole number from 0 to 2"},
                  {"gpt.norm", "1", "2", "must be a whole number from 0 to 1"},
                  {"gpt.norm_eps", "1e-30", "0", "must be above 0"},
                  {"gpt.norm_eps", "1e-5", "-1e-5", "must be above 0"},
                  {"gpt.activation", "5", NUMBER(MT_ACTIVATION_COUNT), "must be a whole number from 0 to "},
                  {"gpt.mask", "1", "-1", "must be a whole number from 0 to 1"},
                  {"gpt.rotary_base", "3e38", "-1", "must be at least 0"},
                  {"gpt.rotary_base", "0", "4e38", "must be a finite number"},
                  {"gpt.no_bias", "1", "2", "must be a whole number from 0 to 1"},
                  {"gpt.untied_head", "1", "2147483648", "must be a whole number from 0 to 1"}};
    char path[SCRATCH_PATH], words[256];
    mt_context *ctx;
    mt_gpt_desc d, before;
    (void)state;
    save_one("i", 1, 1);
    print_to(path, sizeof path, "%s", in_scratch("i/step-00000001/model.safetensors"));
    shell("cp '%s' '%s'", path, in_scratch("whole"));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    memset(&d, 0x5a, sizeof d);
    memcpy(&before, &d, sizeof d);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        mt_gpt_desc good;
        const char *directory = in_scratch("i/step-00000001");
        set_field(path, fields[i].key, fields[i].good);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_desc_read(ctx, directory, &good));
        set_field(path, fields[i].key, fields[i].bad);
        snprintf(words, sizeof words, "model.safetensors: its metadata has %s '%s', must be |%s", fields[i].key,
                 fields[i].bad, fields[i].words);
        REFUSED(ctx, MT_ERR_DATA, words, mt_gpt_desc_read(ctx, directory, &d));
        assert_memory_equal(&d, &before, sizeof d);
        job load = a_load("i", 1);
        run_quietly(&load);
        expect_refusal(&load, MT_ERR_DATA, words);
        shell("cp '%s' '%s'", in_scratch("whole"), path);
    }
    mt_context_destroy(ctx);
    shell("rm '%s'", in_scratch("whole"));
    forget("i");
}

/* A file without a qkv_layout has the layout per group. */
static void bounds_of_a_layout(void **state) {
    job save = a_save("i", 1, 1), load = a_load("i", 1);
    char path[SCRATCH_PATH];
    (void)state;
    save.qkv_layout = load.qkv_layout = MT_QKV_CONCATENATED;
    run_quietly(&save);
    expect_success(&save);
    print_to(path, sizeof path, "%s", in_scratch("i/step-00000001/model.safetensors"));
    set_field(path, "gpt.qkv_layout", "3");
    run_quietly(&load);
    expect_refusal(&load, MT_ERR_DATA, "its metadata has gpt.qkv_layout '3', must be a whole number from 0 to ");
    set_field(path, "gpt.qkv_layout", NULL);
    run_quietly(&load);
    expect_refusal(&load, MT_ERR_DATA, "its model has qkv_layout MT_QKV_PER_GROUP, this one MT_QKV_CONCATENATED");
    forget("i");
}

/* Files of this version and of older ones load. If one of the files is of a newer version, the load is refused. */
static void versions(void **state) {
    static const char *const names[] = {"model.safetensors", "optimizer.safetensors"};
    static const char *const older[] = {MT_VERSION, "0.4.0", "0.0.999999", "0.3.7"};
    static const char *const none[] = {"", "0.4", "0.4.", "0.4.x", "0.4.0.0", "-1.0.0", "0.4.0 ", "9999999.0.0", "a"};
    char newer[6][32], words[256], path[SCRATCH_PATH];
    const int now[] = {MT_VERSION_MAJOR, MT_VERSION_MINOR, MT_VERSION_PATCH};
    mt_context *ctx;
    mt_gpt_desc d;
    (void)state;
    snprintf(newer[0], sizeof newer[0], "%d.%d.%d", now[0], now[1], now[2] + 1);
    snprintf(newer[1], sizeof newer[1], "%d.%d.0", now[0], now[1] + 1);
    snprintf(newer[2], sizeof newer[2], "%d.0.0", now[0] + 1);
    snprintf(newer[3], sizeof newer[3], "%d.%d.%d", now[0], now[1], now[2] + 100);
    snprintf(newer[4], sizeof newer[4], "999999.999999.999999");
    snprintf(newer[5], sizeof newer[5], "%d.%d.%d", now[0], now[1] + 10, now[2]);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    save_one("v", 1, 1);
    for (int i = 0; i < 2; i++) {
        job load = a_load("v", 1);
        print_to(path, sizeof path, "%s/%s", in_scratch("v/step-00000001"), names[i]);
        shell("cp '%s' '%s'", path, in_scratch("whole"));
        for (int k = 0; k < 4; k++) {
            set_field(path, "megatron", older[k]);
            loads("v", 1, 1);
        }
        for (int k = 0; k < 6; k++) {
            set_field(path, "megatron", newer[k]);
            snprintf(words, sizeof words, "/%s: was written by megatron.h %s, this is " MT_VERSION ":", names[i],
                     newer[k]);
            load = a_load("v", 1), run_quietly(&load), expect_refusal(&load, MT_ERR_DATA, words);
        }
        if (i == 0) { /* the file contains only parameters and the description of the model: the same */
            char directory[SCRATCH_PATH];
            print_to(directory, sizeof directory, "%s", in_scratch("v/step-00000001"));
            load.action = IMPORT;
            load.directory = directory;
            run_quietly(&load), expect_refusal(&load, MT_ERR_DATA, words);
            REFUSED(ctx, MT_ERR_DATA, words, mt_gpt_desc_read(ctx, directory, &d));
        }
        for (int k = 0; k < 9; k++) {
            set_field(path, "megatron", none[k]);
            snprintf(words, sizeof words, "/%s: its metadata has megatron '%s', must be a version such as", names[i],
                     none[k]);
            load = a_load("v", 1), run_quietly(&load), expect_refusal(&load, MT_ERR_DATA, words);
        }
        set_field(path, "megatron", NULL);
        snprintf(words, sizeof words, "/%s: its metadata has no megatron", names[i]);
        load = a_load("v", 1), run_quietly(&load), expect_refusal(&load, MT_ERR_DATA, words);
        shell("mv '%s' '%s'", in_scratch("whole"), path);
    }
    mt_context_destroy(ctx);
    forget("v");
}

/* Texts that are not numbers of their field's type. */
static void field_texts(void **state) {
    static const mt_field f32 = {.name = "x", .kind = MT_FIELD_F32}, i64 = {.name = "x", .kind = MT_FIELD_I64},
                          u64 = {.name = "x", .kind = MT_FIELD_U64}, whole = {.name = "x", .kind = MT_FIELD_INT},
                          f64 = {.name = "x", .kind = MT_FIELD_F64},
                          text = {.name = "x", .kind = MT_FIELD_TEXT, .bytes = 8};
    static const struct {
        const mt_field *field;
        const char *text;
        int good;
    } texts[] = {{&f32, "3.4028234e38", 1},
                 {&f32, "-3.4028234e38", 1},
                 {&f32, "3.5e38", 0},
                 {&f32, "-1e39", 0},
                 {&f32, "1e999", 0},
                 {&f32, "nan", 0},
                 {&f32, "", 0},
                 {&i64, "9223372036854775807", 1},
                 {&i64, "9223372036854775808", 0},
                 {&i64, "-9223372036854775807", 1},
                 {&i64, "-", 0},
                 {&i64, "--1", 0},
                 {&i64, "+1", 0},
                 {&i64, " 1", 0},
                 {&u64, "18446744073709551615", 1},
                 {&u64, "18446744073709551616", 0},
                 {&u64, "99999999999999999999", 0},
                 {&u64, "-1", 0},
                 {&whole, "2147483647", 1},
                 {&whole, "2147483648", 0},
                 {&whole, "-2147483648", 1},
                 {&whole, "1x", 0},
                 {&f64, "1.7976931348623157e308", 1},
                 {&f64, "-1e999", 0},
                 {&text, "seven..", 1},
                 {&text, "eight...", 0}};
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        uint64_t room = 0;
        char again[MT_FIELD_TEXT_MAX];
        mt_field field = *texts[i].field;
        int good = mti_field_parse(&field, texts[i].text, &room);
        if (good != texts[i].good) fail_msg("'%s' was %s", texts[i].text, good ? "taken" : "refused");
        field.value = &room;
        mt_field_text(&field, again);
        if (good && field.kind < MT_FIELD_F32) assert_string_equal(again, texts[i].text);
    }
}

/* With an arena that is too small for the largest shard in f32, nothing is loaded and nothing is saved. */
static void small_arenas(void **state) {
    static const struct {
        mt_dtype dtype;
        int sharded;
    } kinds[] = {{MT_F32, 1}, {MT_BF16, 0}, {MT_BF16, 1}};
    const size_t largest = 3 * HIDDEN / 2 * HIDDEN * sizeof(float); /* the weight of query, key and value */
    (void)state;
    for (int i = 0; i < 3; i++) {
        job save = a_save("r", 1, 1), load = a_load("r", 1);
        save.dtype = load.dtype = kinds[i].dtype;
        save.sharded = load.sharded = kinds[i].sharded;
        save.data = load.data = 2;
        run_quietly(&save);
        expect_success(&save);
        load.arena = largest / 512 * 512 - 512;
        run_quietly(&load);
        expect_refusal(&load, MT_ERR_MEMORY, "mt_arena_alloc");
        load.arena = (largest + 511) / 512 * 512;
        run_quietly(&load);
        expect_success(&load);
        save.state.step = 2;
        save.arena = 512;
        run_quietly(&save);
        expect_refusal(&save, MT_ERR_MEMORY, "mt_arena_alloc");
        assert_int_equal(entries(in_scratch("r")), 1);
        save.state.step = 3;
        save.arena =
            /* as mt_parallel.h documents: twice what two tensor ranks have together, in f32. */
            2 * (2 * largest + 512);
        run_quietly(&save);
        expect_success(&save);
        forget("r");
    }
}

/* GPT-2 files with one tensor too many, too few, or of another shape or type, written with the library's own writer. */
static void write_tensors(const char *name, const char *tensor, const char *dtype, const char *shape, int64_t bytes,
                          unsigned char byte) {
    static mti_file f;
    mt_context *ctx;
    uint64_t header;
    char text[512];
    snprintf(text, sizeof text, "{\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[0,%lld]}}", tensor, dtype,
             shape, (long long)bytes);
    header = strlen(text);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mti_file_begin(ctx, &f, in_scratch("w"), name));
    mti_file_put(&f, &header, sizeof header);
    mti_file_text(&f, text);
    while (bytes-- > 0) mti_file_put(&f, &byte, 1);
    ASSERT_STATUS(ctx, MT_SUCCESS, mti_file_end(ctx, &f, 0));
    mt_context_destroy(ctx);
}

/* A small registry with names of its own. */
static mt_status small_rank(mt_comm *world, void *user) {
    const char *words = (const char *)user;
    mt_param_desc d = {.name = "w", .rows = 4, .cols = 6, .placement = MT_SPLIT_ROWS, .init_std = 1.0f};
    mt_param_desc bias = {.name = "a \"b\"", .rows = 1, .cols = 4, .placement = MT_SPLIT_COLS, .init_std = 1.0f};
    mt_checkpoint_desc c = {.directory = in_scratch("w")};
    mt_checkpoint *checkpoint;
    mt_param *p, *b;
    test_rank r;
    float before[24], after[24];
    mt_status status;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, NULL, &r));
    MT_TRY(mt_params_add(r.ctx, r.params, &d, &p));
    if (!words) MT_TRY(mt_params_add(r.ctx, r.params, &bias, &b));
    MT_TRY(mt_params_init(r.ctx, r.params, 5));
    MT_TRY(mt_checkpoint_create(r.ctx, r.params, &c, &checkpoint));
    MT_TRY(mt_param_gather(r.ctx, r.params, p, p->value, before));
    if (!words) {
        mt_training_state s = {.step = 3};
        MT_TRY(mt_checkpoint_save(r.ctx, checkpoint, &s));
        MT_TRY(mt_params_init(r.ctx, r.params, 6));
        MT_TRY(mt_checkpoint_load(r.ctx, checkpoint, 3, &s));
    } else {
        status = mt_checkpoint_import(r.ctx, checkpoint, in_scratch("w"));
        CHECK(status == (words[0] ? MT_ERR_DATA : MT_SUCCESS));
        if (!test_has_words(mt_last_error(r.ctx), words)) fprintf(stderr, "%s: %s\n", words, mt_last_error(r.ctx));
        CHECK(test_has_words(mt_last_error(r.ctx), words));
        r.ctx->error[0] = 0;
    }
    MT_TRY(mt_param_gather(r.ctx, r.params, p, p->value, after));
    CHECK((memcmp(before, after, sizeof before) == 0) == (!words || words[0]));
    mt_checkpoint_destroy(r.ctx, checkpoint);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void small_models(void **state) {
    static char words[128];
    static const struct {
        const char *tensor, *dtype, *shape;
        int64_t bytes;
        const char *words;
        unsigned char byte; /* of all elements; 0x7f: too large for a float */
    } files[] = {{"w", "F32", "[4,6]", 96, "", 0},
                 {"w", "BF16", "[4,6]", 48, "", 0},
                 {"w", "F64", "[4,6]", 192, "", 0},
                 {"w", "F64", "[4,6]", 192, "model.safetensors|element 0 of 'w' is 1.38|too large for a float", 0x7f},
                 {"w", "I32", "[4,6]", 96, "model.safetensors|'w' is I32", 0},
                 {"w", "F32", "[6,4]", 96, "shape [6, 4]|[4, 6]", 0},
                 {"w", "F32", "[24]", 96, "shape [24]", 0},
                 {"w", "F32", "[1,4,6]", 96, "shape [1, 4, 6]", 0},
                 {"v", "F32", "[4,6]", 96, "no tensor 'w'", 0},
                 {"w\\\",\\\"x", "F32", "[4,6]", 96, "no tensor 'w'", 0}};
    (void)state;
    test_launch(2, small_rank, NULL);
    shell("test -s '%s' && test ! -e '%s'", in_scratch("w/step-00000003/model.safetensors"),
          in_scratch("w/step-00000003/config.json"));
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        write_tensors("model.safetensors", files[i].tensor, files[i].dtype, files[i].shape, files[i].bytes,
                      files[i].byte);
        snprintf(words, sizeof words, "%s", files[i].words);
        test_launch(2, small_rank, words);
        shell("rm '%s'", in_scratch("w/model.safetensors"));
    }
    shell("cp '%s' '%s'", in_scratch("w/step-00000003/model.safetensors"), in_scratch("w"));
    snprintf(words, sizeof words, "%s", "'a \"b\"' is not a parameter");
    test_launch(2, small_rank, words);
    forget("w");
}

/* ---- values that are not finite, or would not be ----------------------------------------------------------------- */

enum { ROWS = 4, COLS = 6, ODD = 13 }; /* element ODD of each tensor is the odd one */

typedef struct odd_value {
    const char *dtype; /* of the file */
    double value;
    mt_dtype registry;
    const char *words; /* of the refusal; "": accepted */
} odd_value;

/* Writes v/model.safetensors: "w" is of ones, except for one element. */
static void write_odd(const odd_value *odd) {
    static const int64_t shape[] = {ROWS, COLS};
    mt_context *ctx;
    mt_safetensors_writer *w;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_create(ctx, in_scratch("v/model.safetensors"), NULL, 0, &w));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, "w", odd->dtype, 2, shape));
    for (int i = 0; i < ROWS * COLS; i++) {
        double x = i == ODD ? odd->value : 1;
        float f32 = (float)x;
        uint16_t bits;
        mt_f32_to_16bit(strcmp(odd->dtype, "F16") == 0 ? MT_F16 : MT_BF16, &f32, &bits, 1);
        if (strcmp(odd->dtype, "F64") == 0) ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, &x, 8));
        else if (strcmp(odd->dtype, "F32") == 0) ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, &f32, 4));
        else ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, &bits, 2));
    }
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    mt_context_destroy(ctx);
}

/* A registry with one matrix, and its optimizer. */
typedef struct odd_rank {
    test_rank r;
    mt_param *p;
    mt_optimizer adam;
    mt_checkpoint *checkpoint;
} odd_rank;

static mt_status odd_open(mt_comm *world, mt_dtype dtype, odd_rank *o) {
    mt_param_desc d = {.name = "w", .rows = ROWS, .cols = COLS, .placement = MT_SPLIT_ROWS, .init_value = 2};
    mt_checkpoint_desc c = {.directory = in_scratch("v")};
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &o->r));
    MT_TRY(mt_params_set_dtype(o->r.ctx, o->r.params, dtype));
    MT_TRY(mt_params_add(o->r.ctx, o->r.params, &d, &o->p));
    MT_TRY(mt_params_init(o->r.ctx, o->r.params, 5));
    MT_TRY(mt_optimizer_create(o->r.ctx, o->r.params, NULL, &o->adam));
    c.optimizer = &o->adam;
    return mt_checkpoint_create(o->r.ctx, o->r.params, &c, &o->checkpoint);
}

static void odd_close(odd_rank *o) {
    mt_checkpoint_destroy(o->r.ctx, o->checkpoint);
    mt_optimizer_destroy(o->r.ctx, &o->adam);
    test_rank_close(&o->r);
}

/* All elements of the parameter are 2 until an import has succeeded. */
static mt_status odd_unchanged(odd_rank *o) {
    float all[ROWS * COLS];
    MT_TRY(mt_param_gather(o->r.ctx, o->r.params, o->p, o->p->value, all));
    for (int i = 0; i < ROWS * COLS; i++) CHECK(all[i] == 2);
    return MT_SUCCESS;
}

static mt_status odd_import_rank(mt_comm *world, void *user) {
    const odd_value *odd = (const odd_value *)user;
    odd_rank o;
    mt_status status;
    MT_TRY(odd_open(world, odd->registry, &o));
    status = mt_checkpoint_import(o.r.ctx, o.checkpoint, in_scratch("v"));
    if (status != (odd->words[0] ? MT_ERR_DATA : MT_SUCCESS) || !test_has_words(mt_last_error(o.r.ctx), odd->words))
        fprintf(stderr, "%s %g to %s: %s\n", odd->dtype, odd->value, mt_dtype_name(odd->registry),
                mt_last_error(o.r.ctx));
    CHECK(status == (odd->words[0] ? MT_ERR_DATA : MT_SUCCESS));
    CHECK(test_has_words(mt_last_error(o.r.ctx), odd->words));
    if (odd->words[0]) MT_TRY(odd_unchanged(&o));
    odd_close(&o);
    return MT_SUCCESS;
}

/* A weight that is not finite, or not after it is rounded to the parameters' type, is refused by its name. */
static void values_of_imports(void **state) {
#define ELEMENT "v/model.safetensors: element 13 of 'w' is "
    static odd_value odd[] = {{"F32", 1e5, MT_F16, ELEMENT "100000, too large for f16"},
                              {"F32", -1e5, MT_F16, ELEMENT "-100000, too large for f16"},
                              {"BF16", 1e5, MT_F16, ELEMENT "99840, too large for f16"},
                              {"F64", 1e5, MT_F16, ELEMENT "100000, too large for f16"},
                              {"F32", 65520, MT_F16, ELEMENT "65520, too large for f16"},
                              {"F32", 65519, MT_F16, ""},
                              {"F32", 1e5, MT_BF16, ""},
                              {"F32", 3.4e38, MT_BF16, ELEMENT "3.39999995e+38, too large for bf16"},
                              {"F64", 3.4e38, MT_BF16, ELEMENT "3.39999995e+38, too large for bf16"},
                              {"F32", 3.396e38, MT_BF16, ""},
                              {"F32", 3.4e38, MT_F32, ""},
                              {"F64", 1e39, MT_F32, ELEMENT "1e+39, too large for a float"},
                              {"F64", 1e39, MT_F16, ELEMENT "1e+39, too large for a float"},
                              {"F16", 65504, MT_BF16, ""},
                              {"F16", 65504, MT_F16, ""}};
    static const char *const dtypes[] = {"F32", "F64", "BF16", "F16"};
    (void)state;
    shell("mkdir '%s'", in_scratch("v"));
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        write_odd(&odd[i]);
        for (int tp = 1; tp <= 2; tp++) test_launch(tp, odd_import_rank, &odd[i]);
    }
    for (int i = 0; i < 4 * 3 * 3; i++) {
        odd_value bad = {dtypes[i % 4], (double)INFINITY, (mt_dtype)(i / 4 % 3), ELEMENT "inf, must be a finite"};
        if (i / 12 == 1) bad.value = -(double)INFINITY, bad.words = ELEMENT "-inf, must be a finite number";
        if (i / 12 == 2) bad.value = -(double)NAN, bad.words = ELEMENT "nan, must be a finite number";
        write_odd(&bad);
        test_launch(2, odd_import_rank, &bad);
    }
#undef ELEMENT
    forget("v");
}

/* Sets one element of a state on the rank that has it. */
static mt_status odd_set(odd_rank *o, int state, float x) {
    float all[ROWS * COLS];
    if (state < 0) MT_TRY(mt_param_gather(o->r.ctx, o->r.params, o->p, o->p->value, all));
    else MT_TRY(mt_optimizer_gather(o->r.ctx, &o->adam, o->p, (mt_optimizer_state)state, all));
    all[ODD] = x;
    if (state < 0) return mt_param_scatter(o->r.ctx, o->p, all, o->p->value);
    return mt_optimizer_scatter(o->r.ctx, &o->adam, o->p, (mt_optimizer_state)state, all);
}

static mt_status odd_save_rank(mt_comm *world, void *user) {
    static const char *const names[] = {"w", "w.exp_avg", "w.exp_avg_sq", "w.master"};
    char words[96];
    mt_training_state s = {.step = 1};
    (void)user;
    for (int i = 0; i < 4 * 3; i++) {
        float x = i / 4 == 0 ? (float)NAN : i / 4 == 1 ? (float)INFINITY : -(float)INFINITY;
        odd_rank o;
        MT_TRY(odd_open(world, MT_F16, &o));
        MT_TRY(odd_set(&o, i % 4 - 1, x));
        if (i % 4 == 3) MT_TRY(mt_fill(o.r.ctx, o.p->value, 2.0f)); /* only the master */
        snprintf(words, sizeof words, "mt_checkpoint_save: element 13 of '%s' is %g, must be a finite number",
                 names[i % 4], (double)x);
        CHECK(mt_checkpoint_save(o.r.ctx, o.checkpoint, &s) == MT_ERR_DATA);
        if (!test_has_words(mt_last_error(o.r.ctx), words)) fprintf(stderr, "%s\n", mt_last_error(o.r.ctx));
        CHECK(test_has_words(mt_last_error(o.r.ctx), words));
        odd_close(&o);
    }
    return MT_SUCCESS;
}

/* What is not finite is not saved, and the directory is as before. */
static void values_of_saves(void **state) {
    (void)state;
    for (int tp = 1; tp <= 2; tp++) {
        test_launch(tp, odd_save_rank, NULL);
        assert_int_equal(entries(in_scratch("v")), 0);
        forget("v");
    }
}

/* A checkpoint in f32 or bf16 with a weight of 1e5 cannot be loaded into parameters in f16. */
static mt_status odd_load_rank(mt_comm *world, void *user) {
    mt_dtype from = *(const mt_dtype *)user;
    mt_training_state s = {.step = 1};
    odd_rank o;
    MT_TRY(odd_open(world, from, &o));
    MT_TRY(odd_set(&o, from == MT_F32 ? -1 : (int)MT_MASTER, 1e5f));
    MT_TRY(mt_checkpoint_save(o.r.ctx, o.checkpoint, &s));
    odd_close(&o);
    MT_TRY(odd_open(world, MT_F16, &o));
    CHECK(mt_checkpoint_load(o.r.ctx, o.checkpoint, 1, &s) == MT_ERR_DATA);
    CHECK(test_has_words(mt_last_error(o.r.ctx), "element 13 of 'w' is |too large for f16"));
    MT_TRY(odd_unchanged(&o));
    odd_close(&o);
    MT_TRY(odd_open(world, MT_BF16, &o));
    MT_TRY(mt_checkpoint_load(o.r.ctx, o.checkpoint, 1, &s));
    odd_close(&o);
    return MT_SUCCESS;
}

static void values_of_loads(void **state) {
    static mt_dtype from[] = {MT_F32, MT_BF16};
    (void)state;
    for (int i = 0; i < 2; i++) {
        test_launch(2, odd_load_rank, &from[i]);
        forget("v");
    }
}

/* A whole tensor of the program: what is finite must stay finite. What is not finite is copied. */
static mt_status odd_scatter_rank(mt_comm *world, void *user) {
    float all[ROWS * COLS] = {0};
    odd_rank o;
    (void)user;
    MT_TRY(odd_open(world, MT_F16, &o));
    all[0] = (float)NAN;
    all[ODD] = 1e5f;
    CHECK(mt_param_scatter(o.r.ctx, o.p, all, o.p->value) == MT_ERR_DATA);
    CHECK(test_has_words(mt_last_error(o.r.ctx), "mt_param_scatter: element 13 of 'w' is 100000, too large for f16"));
    CHECK(mt_optimizer_scatter(o.r.ctx, &o.adam, o.p, MT_MASTER, all) == MT_ERR_DATA);
    CHECK(test_has_words(mt_last_error(o.r.ctx), "mt_optimizer_scatter: element 13 of 'w' is 100000, too large"));
    MT_TRY(odd_unchanged(&o));
    MT_TRY(mt_param_scatter(o.r.ctx, o.p, all, o.p->grad));
    MT_TRY(mt_optimizer_scatter(o.r.ctx, &o.adam, o.p, MT_EXP_AVG, all));
    all[ODD] = (float)INFINITY;
    MT_TRY(mt_param_scatter(o.r.ctx, o.p, all, o.p->value));
    MT_TRY(mt_param_gather(o.r.ctx, o.r.params, o.p, o.p->value, all));
    CHECK(isnan(all[0]) && isinf(all[ODD]) && all[1] == 0);
    odd_close(&o);
    return MT_SUCCESS;
}

static void values_of_scatters(void **state) {
    (void)state;
    for (int tp = 1; tp <= 2; tp++) test_launch(tp, odd_scatter_rank, NULL);
}

/* ---- a save that fails, or dies ---------------------------------------------------------------------------------- */

/* The number of system calls in the save of a second checkpoint, which removes nothing, or of a third. */
static int count_calls(int64_t step) {
    plan.fault = NO_FAULT;
    plan.calls = 0;
    save_one("f", step, (int)step);
    return plan.calls;
}

static void seed_two(void) {
    plan.fault = NO_FAULT;
    forget("f");
    save_one("f", 1, 1);
    save_one("f", 2, 2);
}

/* Runs a job whose k-th call fails with `error`; 0: ENOSPC. */
static void run_failing(job *j, int k, int error) {
    plan.fault = FAIL;
    plan.at = k;
    plan.calls = warnings = 0;
    plan.error = error;
    run_quietly(j);
    plan.fault = NO_FAULT;
}

/* Each call of a save fails once. Every rank gets an error, the old checkpoints load, and the next save succeeds. If
   only the removal of an old checkpoint failed, this is a warning. */
static void every_call_fails(void **state) {
    int calls, waited = 0;
    (void)state;
    seed_two();
    calls = count_calls(3);
    assert_in_range(calls, 20, 200);
    for (int k = 0; k < calls; k += STRIDE) {
        job save = a_save("f", 3, 3);
        seed_two();
        run_failing(&save, k, k % 2 ? EACCES : ENOSPC);
        int64_t newest = latest("f");
        if (save.status[0] != MT_SUCCESS) {
            expect_refusal(&save, MT_ERR_IO, k % 2 ? "Permission denied|/f" : "No space left|/f");
        } else {
            if (warnings == 0) fail_msg("call %d of %d failed, and nobody was told", k, calls);
            assert_int_equal(newest, 3);
            waited++;
        }
        assert_true(newest == 2 || newest == 3); /* 3: the directory had its name when the fsync of the name failed */
        loads("f", newest, (int)newest);
        save_one("f", 4, 4);
        loads("f", 4, 4);
        assert_int_equal(entries(in_scratch("f")), 2);
    }
    plan.error = 0;
    assert_in_range(waited, 5 / STRIDE, 20);
    forget("f");
}

/* A file that cannot be opened: the load fails on every rank and changes nothing. */
static void every_open_of_a_load_fails(void **state) {
    job load = a_load("f", 1);
    int calls;
    (void)state;
    save_one("f", 1, 1);
    load.tp = 1; /* for the same order of calls each time */
    plan.fault = NO_FAULT;
    plan.calls = 0;
    run_quietly(&load);
    expect_success(&load);
    calls = plan.calls;
    assert_in_range(calls, 2, 10);
    for (int k = 0; k < calls; k++) {
        run_failing(&load, k, EACCES);
        plan.error = 0;
        expect_refusal(&load, MT_ERR_IO, "step-00000001/|Permission denied");
    }
    forget("f");
}

/* A signal that interrupts a call has no effect. */
static void every_call_is_interrupted(void **state) {
    int calls;
    (void)state;
    plan.error = EINTR;
    seed_two();
    calls = count_calls(3);
    assert_in_range(calls, 10, 200);
    for (int k = 0; k < calls; k += STRIDE) {
        job save = a_save("f", 3, 3);
        seed_two();
        run_failing(&save, k, EINTR);
        if (save.status[0] != MT_SUCCESS) fail_msg("call %d of %d: %s", k, calls, save.sentence[0]);
        assert_int_equal(warnings, 0);
        assert_int_equal(entries(in_scratch("f")), 2);
        loads("f", 3, 3);
    }
    plan.error = 0;
    forget("f");
}

/* A foreign file in a checkpoint that is to be removed: saves succeed, and the file stays. */
static void strangers_stay(void **state) {
    (void)state;
    seed_two();
    shell("mkdir '%s' && touch '%s'", in_scratch("f/step-00000001/mine"), in_scratch("f/step-00000001/mine/notes"));
    for (int step = 3; step <= 5; step++) {
        warnings = 0;
        save_one("f", step, step);
        assert_in_range(warnings, 2, 4); /* the directory in it, and therefore the checkpoint itself */
        assert_int_equal(latest("f"), step);
        loads("f", step, step);
        loads("f", step - 1, step - 1);
        assert_int_equal(entries(in_scratch("f")), 3);
    }
    shell("test -e '%s'", in_scratch("f/.step-00000001.tmp/mine/notes"));
    shell("mkdir '%s'", in_scratch("f/.step-00000006.tmp"));
    shell("mkdir '%s'", in_scratch("f/.step-00000006.tmp/mine"));
    job save = a_save("f", 6, 6);
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_IO, "/f/.step-00000006.tmp|File exists");
    save_one("f", 7, 7);
    forget("f");
}

/* A checkpoint directory, and the directory of another one beside it. */
static void victim(void) {
    forget("f");
    forget("victim");
    shell("mkdir '%s' '%s' && touch '%s'", in_scratch("f"), in_scratch("victim"), in_scratch("victim/notes"));
}

static void victim_stays(void) {
    shell("test -f '%s'", in_scratch("victim/notes"));
    assert_int_equal(entries(in_scratch("victim")), 1);
}

/* A symbolic link that a save finds where it writes, in what it removes, or in place of a checkpoint is removed as a
   link: its target stays. */
static void links_are_removed_as_links(void **state) {
    static const char *const planted[] = {"f/.step-00000001.tmp", "f/.step-00000007.tmp", "f/.step-probe.tmp"};
    static const char *const targets[] = {"../victim", "../victim/notes", "../victim/none"};
    (void)state;
    for (int i = 0; i < 9; i++) {
        victim();
        shell("ln -s %s '%s'", targets[i / 3], in_scratch(planted[i % 3]));
        warnings = 0;
        save_one("f", 1, 1);
        assert_int_equal(warnings, 0);
        victim_stays();
        assert_int_equal(entries(in_scratch("f")), 1);
        loads("f", 1, 1);
    }
    victim(); /* links in what a killed save has left, and in a checkpoint that is to be removed */
    save_one("f", 1, 1);
    save_one("f", 2, 2);
    shell("cd '%s' && mkdir .step-00000003.tmp && ln -s ../../victim .step-00000003.tmp/a && ln -s ../../victim/notes "
          ".step-00000003.tmp/b && ln -s ../../victim step-00000001/a && ln -s ../../victim/notes step-00000001/b",
          in_scratch("f"));
    warnings = 0;
    save_one("f", 3, 3);
    assert_int_equal(warnings, 0);
    victim_stays();
    assert_int_equal(entries(in_scratch("f")), 2);
    victim(); /* a checkpoint that was moved and replaced by a link: it loads, and later only the link is removed */
    save_one("f", 1, 1);
    shell("mv '%s' '%s'", in_scratch("f/step-00000001"), in_scratch("victim/moved"));
    shell("ln -s ../victim/moved '%s'", in_scratch("f/step-00000001"));
    loads("f", 1, 1);
    save_one("f", 2, 2);
    loads("f", 1, 1);
    save_one("f", 3, 3);
    assert_int_equal(warnings, 0);
    assert_int_equal(entries(in_scratch("f")), 2);
    assert_int_equal(entries(in_scratch("victim/moved")), 3);
    forget("f");
    forget("victim");
}

/* Nothing is written through a link: in place of a directory that a save has just made, of a file in it, or of the
   lock. */
static void links_are_not_written_through(void **state) {
    static mti_file f;
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    victim();
    shell("cd '%s' && ln -s victim link && ln -s ../victim/none f/new && ln -s ../victim/notes f/old", scratch);
    REFUSED(ctx, MT_ERR_IO, "/link: cannot open the directory", mti_file_begin(ctx, &f, in_scratch("link"), "new"));
    REFUSED(ctx, MT_ERR_IO, "/f/new: cannot create it: File exists", mti_file_begin(ctx, &f, in_scratch("f"), "new"));
    REFUSED(ctx, MT_ERR_IO, "/f/old: cannot create it: File exists", mti_file_begin(ctx, &f, in_scratch("f"), "old"));
    mt_context_destroy(ctx);
    victim_stays();
    shell("ln -s ../victim/lock '%s'", in_scratch("f/.lock"));
    job save = a_save("f", 1, 1);
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_IO, "/f/.lock: cannot open it");
    victim_stays();
    shell("rm '%s'", in_scratch("link"));
    forget("f");
    forget("victim");
}

/* Another process holds the lock until it ends, in whatever way. */
static void another_run(void **state) {
    int ready[2];
    char c;
    job save = a_save("f", 2, 2);
    (void)state;
    save_one("f", 1, 1);
    assert_int_equal(pipe(ready), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        job mine = a_save("f", 5, 5);
        mine.tp = mine.data = mine.pipeline = 1;
        mine.stays = ready[1];
        mt_launch(NULL, job_rank, &mine);
        _exit(1);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &c, 1), 1); /* its save is done, and it keeps running */
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_IO, "/f: another run writes to it");
    save.action = LOCK;
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_IO, "/f: another run writes to it");
    loads("f", 5, 5); /* a load needs no lock */
    lock_holder = child;
    lock_tries = 0;
    save_one("f", 6, 6); /* it waits for the lock until the other process has ended */
    assert_int_equal(lock_tries, 3);
    close(ready[0]);
    for (int i = 0; i < 4; i++) {
        static const int errors[] = {ENOLCK, ENOSYS, EOPNOTSUPP, EIO};
        plan.lock_error = errors[i];
        save = a_save("f", 7 + i, 1);
        run_quietly(&save);
        if (i < 3) expect_success(&save);
        else expect_refusal(&save, MT_ERR_IO, "/f/.lock: cannot lock it: Input/output error");
    }
    plan.lock_error = 0;
    forget("f");
}

/* mt_checkpoint_lock does what the first save would do. */
static void locked_before(void **state) {
    job lock = a_save("f", 1, 1), save = lock;
    (void)state;
    lock.action = LOCK;
    run_quietly(&lock);
    expect_success(&lock);
    assert_int_equal(entries(in_scratch("f")), 0); /* the directory was created */
    lock.stays = -1;                               /* the same checkpoint object then saves */
    run_quietly(&lock);
    expect_success(&lock);
    loads("f", 1, 1);
    forget("f");
    lock.directory = save.directory = "f/deeper";
    run_quietly(&lock);
    expect_refusal(&lock, MT_ERR_IO, "f/deeper|No such file");
    shell("mkdir '%s'", in_scratch("f"));
    for (int k = 0; k < 4; k++) { /* calls: mkdir; open and fsync of the parent; open of the lock */
        plan = (__typeof__(plan)){.fault = FAIL, .error = EACCES, .at = k};
        lock.stays = 0;
        run_quietly(&lock);
        plan.fault = NO_FAULT;
        expect_refusal(&lock, MT_ERR_IO, "/f|Permission denied");
        shell("rm -rf '%s'", in_scratch("f/deeper"));
    }
    plan.error = 0;
    forget("f");
}

/* The process is killed at each call of a save; if the call is a write, in the middle of it. */
static void every_call_is_the_last(void **state) {
    int calls, renamed = 0;
    (void)state;
    seed_two();
    calls = count_calls(3);
    for (int k = 0; k < calls; k += STRIDE) {
        int status;
        seed_two();
        fflush(NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            job save = a_save("f", 3, 3);
            save.tp = 1;
            plan.fault = DIE;
            plan.at = k;
            plan.calls = 0;
            save.data = save.pipeline = 1;
            mt_launch(NULL, job_rank, &save);
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 7);
        int64_t newest = latest("f");
        assert_true(newest == 3 || (newest == 2 && !renamed));
        renamed |= newest == 3;
        loads("f", newest, (int)newest);
        if (newest == 3 && mti_exists(in_scratch("f/step-00000002"))) loads("f", 2, 2);
        save_one("f", 4, 4);
        loads("f", 4, 4);
        assert_int_equal(entries(in_scratch("f")), 2);
    }
    assert_true(renamed);
    forget("f");
}

/* Data is on the disk before a rename, and the names are on the disk before the save returns. */
static void reaches_the_disk(void **state) {
    job save = a_save("new", 5, 1);
    (void)state;
    memset(&disk, 0, sizeof disk);
    disk.watching = 1;
    run_quietly(&save);
    expect_success(&save);
    disk.watching = 0;
    assert_in_range(disk.count, 5, 20);
    assert_false(disk.early);
    for (int i = 0; i < disk.count; i++)
        if (disk.list[i].dirty) fail_msg("%s was not brought to the disk", disk.list[i].path);
    forget("new");
}

/* A file size limit of the real system, with every size up to that of the files. */
static void no_room(void **state) {
    static const rlim_t limits[] = {0, 1, 100, 5000, 20000, 100000};
    struct rlimit before, less;
    (void)state;
    save_one("f", 1, 1);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        job save = a_save("f", 2, 2);
        less = before;
        less.rlim_cur = limits[i];
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &less), 0);
        run_quietly(&save);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        expect_refusal(&save, MT_ERR_IO, "File too large|/f/.step-00000002.tmp/");
        assert_int_equal(entries(in_scratch("f")), 1);
    }
    signal(SIGXFSZ, SIG_DFL);
    loads("f", 1, 1);
    forget("f");
}

/* Stages write at the same time. An error on the second stage is also reported on the first. */
static void a_stage_fails(void **state) {
    int refused = 0;
    (void)state;
    for (int k = 0; k < 24; k += 2) {
        job save = {
            .model = GPT2, .tp = 2, .pipeline = 2, .action = SAVE, .fill = 1, .directory = "f", .state = {.step = 1}};
        run_failing(&save, k, 0);
        expect_refusal(&save, MT_ERR_IO, "No space left");
        refused++;
        forget("f");
    }
    assert_int_equal(refused, 12);
}

/* Paths that cannot be written, or that already exist. */
static void in_the_way(void **state) {
    job save = a_save("f/deeper", 1, 1);
    (void)state;
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_IO, "f/deeper|No such file");
    shell("touch '%s'", in_scratch("f"));
    save = a_save("f", 1, 1);
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_IO, "/f|Not a directory");
    forget("f");
    save = a_save("f", 1, 1);
    strcpy(save.state.note, "Stra\xdf"
                            "e"); /* Latin-1, which no reader accepts */
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_DATA, "/f/.step-00000001.tmp/model.safetensors|not UTF-8");
    assert_int_equal(entries(in_scratch("f")), 0);
    save_one("f//", 1, 1);
    save = a_save("f", 1, 2);
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_IO, "/f: has a checkpoint of step 1 already|step 1 would");
    save = a_save("f", 0, 2);
    run_quietly(&save);
    expect_refusal(&save, MT_ERR_IO, "/f: has a checkpoint of step 1 already|step 0 would");
    assert_int_equal(entries(in_scratch("f")), 1);
    loads("f", 1, 1);
    forget("f");
}

/* Saves one checkpoint after the other, until call number `at` ends the process with the status 7. */
static void save_until_killed(const char *directory, int64_t step, int at) {
    plan.fault = DIE;
    plan.at = at;
    plan.calls = 0;
    for (;; step++) {
        job save = a_save(directory, step, (int)(step % 5) + 1);
        save.tp = save.data = save.pipeline = 1;
        if (mt_launch(NULL, job_rank, &save) != MT_SUCCESS || save.status[0] != MT_SUCCESS) _exit(1);
        free(save.dump);
    }
}

/* A process saves one checkpoint after the other until it is killed, at any call of the first saves. */
static void killed(void **state) {
    int kills = test_all() ? 300 : 60, saved = 0, window;
    uint64_t seed = test_seed(7);
    int64_t before = 2;
    (void)state;
    seed_two();
    window = 3 * count_calls(3);
    forget("f");
    forget("k");
    save_one("k", 1, 2);
    save_one("k", 2, 3);
    for (int k = 0; k < kills; k++) {
        int at = (int)test_below(&seed, (size_t)window), status;
        fflush(NULL);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) save_until_killed("k", before + 1, at);
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 7) fail_msg("the writer stopped by itself: %d", status);
        int64_t newest = latest("k");
        assert_true(newest >= before);
        loads("k", newest, (int)(newest % 5) + 1);
        saved += newest > before;
        before = newest;
    }
    printf("      %d kills, %d of them after another checkpoint, the last of step %lld\n", kills, saved,
           (long long)before);
    assert_in_range(saved, kills / 20, kills);
    forget("k");
}

/* ---- around it --------------------------------------------------------------------------------------------------- */

static void keeps_the_newest(void **state) {
    (void)state;
    assert_int_equal(latest("n"), -1);
    for (int64_t step = 1; step <= 5; step++) {
        job save = a_save("n", step * 99999999, (int)step); /* beyond eight digits, too */
        save.keep = 3;
        run_quietly(&save);
        expect_success(&save);
        assert_int_equal(latest("n"), step * 99999999);
        assert_int_equal(entries(in_scratch("n")), step < 3 ? step : 3);
    }
    loads("n", 3 * 99999999, 3);
    shell("mkdir '%s' '%s' && touch '%s'", in_scratch("n/step-999"), in_scratch("n/step-9999999999x"),
          in_scratch("n/other"));
    assert_int_equal(latest("n"), 5 * 99999999); /* these are not directories of checkpoints */
    save_one("n", 5 * 99999999 + 1, 1);
    assert_int_equal(entries(in_scratch("n")), 5);
    forget("n");
}

static mt_status latest_rank(mt_comm *world, void *user) {
    mt_context *ctx;
    int64_t step = 5;
    const char *const *directory = (const char *const *)user;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    MT_TRY(mt_checkpoint_latest(ctx, world, directory[0], &step));
    CHECK(step == 12);
    step = 5;
    CHECK(mt_checkpoint_latest(ctx, world, directory[1], &step) == MT_ERR_IO && step == -1);
    CHECK(strstr(mt_last_error(ctx), "Not a directory"));
    CHECK(mt_arena_mark(ctx) == 0);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void every_rank_is_told_the_latest(void **state) {
    const char *directory[2] = {in_scratch("l"), in_scratch("l/step-00000012/config.json")};
    (void)state;
    save_one("l", 11, 1);
    save_one("l", 12, 1);
    test_launch(4, latest_rank, (void *)(uintptr_t)directory);
    forget("l");
}

static void arguments(void **state) {
    job j = {.model = GPT2, .tp = 1, .data = 1, .pipeline = 1}, other = j;
    mt_comm *world, *world2;
    mt_checkpoint_desc d = {.directory = "x"};
    mt_training_state s = {.step = -1};
    mt_checkpoint *c;
    replica m, n;
    char path[32];
    int64_t step;
    mt_gpt_desc gpt;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &world2));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, replica_open(world, &j, &m));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, replica_open(world2, &other, &n));
    mt_context *ctx = m.r.ctx;
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_checkpoint_create(ctx, m.r.params, NULL, &c));
    d.directory = "";
    REFUSED(ctx, MT_ERR_ARGUMENT, "directory is empty", mt_checkpoint_create(ctx, m.r.params, &d, &c));
    d.directory = "x";
    REFUSED(ctx, MT_ERR_ARGUMENT, "out", mt_checkpoint_create(ctx, m.r.params, &d, NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "checkpoint", mt_checkpoint_lock(ctx, NULL));
    d.keep = -1;
    REFUSED(ctx, MT_ERR_ARGUMENT, "keep is -1", mt_checkpoint_create(ctx, m.r.params, &d, &c));
    d.keep = 0;
    d.optimizer = &n.optimizer;
    REFUSED(ctx, MT_ERR_ARGUMENT, "not of this registry", mt_checkpoint_create(ctx, m.r.params, &d, &c));
    d.optimizer = NULL;
    REFUSED(ctx, MT_ERR_ARGUMENT, "not of this registry", mt_gpt_checkpoint_create(ctx, m.r.params, &n.gpt, &d, &c));
    REFUSED(ctx, MT_ERR_ARGUMENT, "gpt is NULL", mt_gpt_checkpoint_create(ctx, m.r.params, NULL, &d, &c));
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_gpt_checkpoint_create(ctx, m.r.params, &m.gpt, NULL, &c));
    d.format = mti_gpt_formats;
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc.format", mt_gpt_checkpoint_create(ctx, m.r.params, &m.gpt, &d, &c));
    d.format = NULL, d.model = &m;
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc.model", mt_gpt_checkpoint_create(ctx, m.r.params, &m.gpt, &d, &c));
    REFUSED(ctx, MT_ERR_ARGUMENT, "step is negative", mt_checkpoint_save(ctx, m.checkpoint, &s));
    REFUSED(ctx, MT_ERR_ARGUMENT, "state", mt_checkpoint_save(ctx, m.checkpoint, NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "checkpoint", mt_checkpoint_save(ctx, NULL, &s));
    s.step = 0;
    memset(s.note, 'x', sizeof s.note);
    REFUSED(ctx, MT_ERR_ARGUMENT, "note", mt_checkpoint_save(ctx, m.checkpoint, &s));
    REFUSED(ctx, MT_ERR_ARGUMENT, "state", mt_checkpoint_load(ctx, m.checkpoint, 1, NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "step -1", mt_checkpoint_load(ctx, m.checkpoint, -1, &s));
    REFUSED(ctx, MT_ERR_ARGUMENT, "directory", mt_checkpoint_import(ctx, m.checkpoint, NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "step is NULL", mt_checkpoint_latest(ctx, NULL, "x", NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "out is NULL", mt_gpt_desc_read(ctx, "x", NULL));
    REFUSED(ctx, MT_ERR_IO, "/none|neither", mt_gpt_desc_read(ctx, "/none", &gpt));
    REFUSED(ctx, MT_ERR_ARGUMENT, "31 characters",
            mt_checkpoint_path(ctx, "a-name-of-20-letters", 1, path, sizeof path));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_checkpoint_path(ctx, "a-name-of-17-lets", 1, path, sizeof path));
    assert_string_equal(path, "a-name-of-17-lets/step-00000001");
    REFUSED(ctx, MT_ERR_ARGUMENT, "directory", mt_checkpoint_latest(ctx, NULL, NULL, &step));
    mt_checkpoint_destroy(ctx, NULL);
    replica_close(&m);
    replica_close(&n);
    mt_comm_destroy(world);
    mt_comm_destroy(world2);
}

/* The memory that a save needs is computed on the meta device, without touching a file. */
static void meta(void **state) {
    job j = {.model = GPT2, .tp = 4, .data = 1, .pipeline = 1, .directory = "m"};
    mt_comm *world;
    mt_training_state s = {.step = 1};
    replica m;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_meta(4, 0, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, replica_open(world, &j, &m));
    ASSERT_STATUS(m.r.ctx, MT_SUCCESS, mt_checkpoint_save(m.r.ctx, m.checkpoint, &s));
    assert_int_equal(entries(in_scratch("m")), -1);
    assert_true(mt_arena_peak(m.r.ctx) >= 44 * HIDDEN * sizeof(float));
    assert_true(mt_comm_ledger(m.r.grid.tp).calls[MT_ALL_GATHER] == 3 * (1 + 6 * LAYERS));
    REFUSED(m.r.ctx, MT_ERR_UNSUPPORTED, "META", mt_checkpoint_load(m.r.ctx, m.checkpoint, 1, &s));
    replica_close(&m);
    mt_comm_destroy(world);
}

/* When the last step of a sharded optimizer fails before the values are gathered, each data rank has new values only in
   its own part. Such values are not saved until a load makes them complete. */
static mt_status torn_rank(mt_comm *world, void *user) {
    const mt_data_parallel_desc shares = {.sharded_optimizer = 1};
    const mt_param_desc weight = {.name = "fc.weight", .rows = 8, .cols = 8};
    mt_checkpoint_desc d = {.directory = in_scratch("torn")};
    mt_training_state s = {.step = 1}, loaded;
    mt_optimizer adamw;
    mt_checkpoint *c;
    mt_param *w;
    test_rank r;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 1}, NULL, &r));
    MT_TRY(mt_params_add(r.ctx, r.params, &weight, &w));
    MT_TRY(mt_params_set_data_parallel(r.ctx, r.params, &shares));
    MT_TRY(mt_params_init(r.ctx, r.params, 1));
    MT_TRY(mt_optimizer_create(r.ctx, r.params, NULL, &adamw));
    MT_TRY(mt_checkpoint_create(r.ctx, r.params, &d, &c));
    MT_TRY(mt_params_zero_grad(r.ctx, r.params));
    MT_TRY(mt_sync_gradients(r.ctx, r.params));
    MT_TRY(mt_optimizer_step(r.ctx, &adamw, 1e-3f, 1.0f));
    MT_TRY(mt_checkpoint_save(r.ctx, c, &s));
    MT_TRY(mt_params_zero_grad(r.ctx, r.params));
    MT_TRY(mt_sync_gradients(r.ctx, r.params));
    if (mt_comm_rank(world) == 1) CHECK(mt_barrier(r.ctx, r.grid.dp) == MT_ERR_MISMATCH);
    else CHECK(mt_optimizer_step(r.ctx, &adamw, 1e-3f, 1.0f) == MT_ERR_MISMATCH);
    s.step = 2;
    CHECK(mt_checkpoint_save(r.ctx, c, &s) == MT_ERR_ARGUMENT);
    CHECK(test_has_words(mt_last_error(r.ctx), "mt_checkpoint_save|not complete|sharded optimizer|load"));
    MT_TRY(mt_checkpoint_load(r.ctx, c, 1, &loaded));
    MT_TRY(mt_checkpoint_save(r.ctx, c, &s));
    mt_checkpoint_destroy(r.ctx, c);
    mt_optimizer_destroy(r.ctx, &adamw);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void values_that_are_not_complete(void **state) {
    (void)state;
    test_launch(2, torn_rank, NULL);
    forget("torn");
}

static int open_all(void **state) {
    (void)state;
    return scratch_open("test_checkpoint");
}

static int close_all(void **state) {
    (void)state;
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_split),
        cmocka_unit_test(layouts_of_qkv),
        cmocka_unit_test(forms_of_rotary),
        cmocka_unit_test(changed_scores),
        cmocka_unit_test(padded_vocabulary),
        cmocka_unit_test(what_is_a_gpt2),
        cmocka_unit_test(invariant_mode),
        cmocka_unit_test(other_types),
        cmocka_unit_test(stages),
        cmocka_unit_test(indices),
        cmocka_unit_test(hugging_face),
        cmocka_unit_test(as_hugging_face_writes),
        cmocka_unit_test(other_configs),
        cmocka_unit_test(goes_on_as_if_never_stopped),
        cmocka_unit_test(damaged),
        cmocka_unit_test(truncated_while_loaded),
        cmocka_unit_test(strangers),
        cmocka_unit_test(impossible_states),
        cmocka_unit_test(bounds_of_a_state),
        cmocka_unit_test(bounds_of_a_layout),
        cmocka_unit_test(bounds_of_a_model),
        cmocka_unit_test(versions),
        cmocka_unit_test(field_texts),
        cmocka_unit_test(small_arenas),
        cmocka_unit_test(small_models),
        cmocka_unit_test(values_of_imports),
        cmocka_unit_test(values_of_saves),
        cmocka_unit_test(values_of_loads),
        cmocka_unit_test(values_of_scatters),
        cmocka_unit_test(every_call_fails),
        cmocka_unit_test(values_that_are_not_complete),
        cmocka_unit_test(every_open_of_a_load_fails),
        cmocka_unit_test(every_call_is_interrupted),
        cmocka_unit_test(strangers_stay),
        cmocka_unit_test(links_are_removed_as_links),
        cmocka_unit_test(links_are_not_written_through),
        cmocka_unit_test(another_run),
        cmocka_unit_test(locked_before),
        cmocka_unit_test(every_call_is_the_last),
        cmocka_unit_test(reaches_the_disk),
        cmocka_unit_test(no_room),
        cmocka_unit_test(a_stage_fails),
        cmocka_unit_test(in_the_way),
        cmocka_unit_test(killed),
        cmocka_unit_test(keeps_the_newest),
        cmocka_unit_test(every_rank_is_told_the_latest),
        cmocka_unit_test(arguments),
        cmocka_unit_test(meta),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
