/* hostile_calls.c - calls every public function with hostile arguments: NULL for each pointer in turn and for all,
   sizes such as INT64_MIN, -1, 2^62 and INT64_MAX, views of such sizes or of misaligned data, enums that do not exist,
   descs with such fields, and combinations. No call may crash, hang or write elsewhere, and an error has a message.

   tests/hostile_calls.py writes hostile_calls_table.h from the headers, with a call of each function. tests/hostile.sh
   builds and runs both with the sanitizers of gcc and clang. Arguments:
     FIRST      number of the function to begin with
     -k         goes on behind a function that fails, in a new process */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include "mt_test_ranks.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ARGUMENTS = 16, ELEMENTS = 8, BUFFER = 1 << 15, COMBINATIONS = 200, SECONDS = 600, LIST = 8 };

/* What is known about the call that runs, in memory that outlives its process. */
typedef struct now {
    int number, device;
    char variant[ARGUMENTS];
} now_testing;
static now_testing *now;

/* Two worlds of objects: on a CPU, and on the meta device. */
typedef struct objects {
    test_rank r;
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_norm_layer norm;
    mt_vocab_parallel_embedding embedding;
    mt_mlp mlp;
    mt_self_attention attention;
    mt_transformer_layer layer;
    mt_gpt gpt;
    mt_optimizer optimizer;
    mt_step step;
    mt_machine *machine;
    mt_hash_log *log;
    mt_params *fresh; /* of no model, and not initialised: new in each call of a create function */
    int creates;
} objects;

typedef struct hostile {
    const char *function, *kinds;
    objects o;
    int variant[ARGUMENTS]; /* of each argument; 0: the usual one */
    int is_huge;            /* 1: a size is huge, so that no memory of the caller can have it */
    uint64_t random;
    mt_context *ctx; /* that the call has got, or NULL */
    mt_comm *comm;
} hostile;

typedef void (*filler)(hostile *h, void *s);

typedef struct call {
    const char *name;
    void (*function)(hostile *h);
    const char *kinds; /* of its arguments */
} call;

static char buffers[ARGUMENTS][BUFFER] __attribute__((aligned(64)));

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static const int64_t integers[] = {1, 0, -1, 7, INT64_MIN, (int64_t)1 << 62, INT64_MAX, INT32_MAX, INT32_MIN, 99};
enum { INTEGERS = sizeof integers / sizeof *integers, IS_HUGE = 4 }; /* from this one on */

static int rarely(hostile *h) { return test_below(&h->random, 4) == 0; }
static int64_t hostile_integer(hostile *h) { return integers[test_below(&h->random, INTEGERS)]; }
static double hostile_number(hostile *h) {
    static const double numbers[] = {0, 1, -1, 1e-30, 1e30, (double)INFINITY, (double)NAN};
    return numbers[test_below(&h->random, sizeof numbers / sizeof *numbers)];
}

static int64_t pick_integer(hostile *h, int i) { return integers[h->variant[i]]; }
static int64_t pick_size(hostile *h, int i) { return integers[h->variant[i]]; }
static double pick_number(hostile *h, int i) { return h->variant[i] == 0 ? 0.5 : hostile_number(h); }
static void *pick_null(hostile *h, int i) {
    (void)h, (void)i;
    return NULL;
}

static const char *pick_text(hostile *h, int i) {
    static char text[5000];
    static const char *const texts[] = {"name", NULL, "", "%s%n", "/nonexistent/file", "\xff{\"", "7", text};
    if (!text[0]) memset(text, 'x', sizeof text - 1);
    (void)h;
    return texts[h->variant[i]];
}

static const char *pick_format(hostile *h, int i) { return h->variant[i] == 1 ? NULL : "text"; }

/* Memory of the caller, unless no memory can have the sizes of this call. */
static void *pick_raw(hostile *h, int i) { return h->variant[i] == 1 || h->is_huge ? NULL : buffers[i]; }
static void *pick_out(hostile *h, int i) {
    static void *outs[ARGUMENTS];
    outs[i] = NULL;
    return h->variant[i] == 1 ? NULL : &outs[i];
}

/* What the function fills. */
static void *pick_scratch(hostile *h, int i) { return h->variant[i] == 1 ? NULL : buffers[i]; }

/* The program's slot, or one that does not exist: the others belong to the headers. */
static int pick_slot(hostile *h, int i) {
    static const int slots[] = {MT_SLOT_USER, -1, MT_SLOT_COUNT, INT32_MIN, INT32_MAX};
    return slots[h->variant[i]];
}

/* An array with a place for each rank. */
static void *pick_outs(hostile *h, int i) { return h->variant[i] == 1 || h->is_huge ? NULL : buffers[i]; }

/* Views: of 4 x 4 elements, none, misaligned, of types and shapes that do not exist, and of other shapes. */
enum { TENSORS = 14 };
static mt_tensor tensor_of(int i, int variant) {
    mt_tensor t = mt_tensor_make(buffers[i], MT_F32, 4, 4);
    switch (variant) {
    case 1: return mt_none();
    case 2: t.data = buffers[i] + 1; break;
    case 3: t.data = buffers[i] + 2; break;
    case 4: t.data = NULL; break;
    case 5: t.dtype = (mt_dtype)99; break;
    case 6: t.dtype = (mt_dtype)-1; break;
    case 7: t.rows = -1; break;
    case 8: t.rows = INT64_MIN, t.cols = INT64_MAX; break;
    case 9: t.rows = t.cols = (int64_t)1 << 62, t.data = now->device ? t.data : NULL; break;
    case 10: t.ld = 1; break;
    case 11: t.ld = INT64_MAX, t.rows = INT64_MAX, t.data = now->device ? t.data : NULL; break;
    case 12: t.rows = 1, t.dtype = MT_I32; break;
    case 13: t.cols = 1, t.ld = 4; break;
    default: break;
    }
    return t;
}

static mt_tensor pick_tensor(hostile *h, int i) {
    (void)h;
    return tensor_of(i, h->variant[i]);
}

static mt_tensor hostile_tensor(hostile *h) { return tensor_of(ARGUMENTS - 1, (int)test_below(&h->random, TENSORS)); }
static void fill_tensor(hostile *h, mt_tensor *t) { *t = hostile_tensor(h); }
static void fill_nothing(hostile *h, void *s) { (void)h, (void)s; }

static mt_context *context_of(hostile *h, int variant) {
    h->ctx = variant == 0 ? h->o.r.ctx : NULL;
    return h->ctx;
}

/* Valid descs, whose fields are then made hostile one by one. */
static const struct {
    mt_norm_layer_desc norm;
    mt_linear_desc linear;
    mt_mlp_desc mlp;
    mt_self_attention_desc attention;
    mt_cross_attention_desc cross;
    mt_transformer_layer_desc layer;
    mt_gpt_desc gpt;
    mt_bert_desc bert;
    mt_language_model_desc model;
    mt_embedding_desc embedding;
    mt_attention_desc heads;
    mt_param_desc param;
    mt_batch batch;
    mt_cross_entropy_shard_desc shard;
    mt_softmax_shard_desc softmax;
    mt_router_desc router;
} descs = {
    {.features = 4},
    {.in_features = 4, .out_features = 4},
    {.hidden = 4, .ffn = 4},
    {.hidden = 4, .heads = 4},
    {.hidden = 4, .heads = 4},
    {.hidden = 4, .heads = 4},
    {.vocab = 4, .layers = 1, .max_seq = 4, .layer = {.hidden = 4, .heads = 4}},
    {.vocab = 4, .layers = 1, .max_seq = 4, .layer = {.hidden = 4, .heads = 4}},
    {.vocab = 4, .layers = 1, .max_seq = 4, .layer = {.hidden = 4, .heads = 4}},
    {.vocab = 4, .features = 4},
    {.batch = 1, .seq = 4, .groups = 1, .heads_per_group = 1, .head_dim = 4},
    {.name = "weight", .rows = 4, .cols = 4},
    {.sequences = 1, .seq = 4},
    {.vocab = 4},
    {.vocab = 4},
    {.topk = 2},
};

static const void *desc_of(const char *type) {
    static const struct {
        const char *type;
        const void *desc;
    } all[] = {{"mt_norm_layer_desc", &descs.norm},
               {"mt_linear_desc", &descs.linear},
               {"mt_mlp_desc", &descs.mlp},
               {"mt_self_attention_desc", &descs.attention},
               {"mt_cross_attention_desc", &descs.cross},
               {"mt_transformer_layer_desc", &descs.layer},
               {"mt_gpt_desc", &descs.gpt},
               {"mt_bert_desc", &descs.bert},
               {"mt_language_model_desc", &descs.model},
               {"mt_embedding_desc", &descs.embedding},
               {"mt_attention_desc", &descs.heads},
               {"mt_param_desc", &descs.param},
               {"mt_batch", &descs.batch},
               {"mt_cross_entropy_shard_desc", &descs.shard},
               {"mt_softmax_shard_desc", &descs.softmax},
               {"mt_router_desc", &descs.router}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i].type, type) == 0) return all[i].desc;
    return NULL;
}

/* Objects that exist, by the name of their type. */
static void *object_of(hostile *h, const char *type) {
    objects *o = &h->o;
    const struct {
        const char *type;
        void *object;
    } all[] = {{"mt_grid", &o->r.grid},
               {"mt_params", o->creates ? o->fresh : o->r.params},
               {"mt_param", (void *)o->column.weight},
               {"mt_parallel_linear", test_below(&h->random, 2) ? &o->row : &o->column},
               {"mt_norm_layer", &o->norm},
               {"mt_vocab_parallel_embedding", &o->embedding},
               {"mt_mlp", &o->mlp},
               {"mt_self_attention", &o->attention},
               {"mt_transformer_layer", &o->layer},
               {"mt_gpt", &o->gpt},
               {"mt_language_model", &o->gpt.model},
               {"mt_optimizer", &o->optimizer},
               {"mt_step", &o->step},
               {"mt_machine", o->machine},
               {"mt_hash_log", o->log}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i].type, type) == 0) return all[i].object;
    return NULL;
}

/* An object of a type whose content the library alone knows: the one that exists, or NULL. */
static void *pick_opaque(hostile *h, int i, const char *type) {
    if (strcmp(type, "mt_context") == 0) return context_of(h, h->variant[i]);
    if (strcmp(type, "mt_comm") == 0) return h->comm = h->variant[i] == 0 ? h->o.r.world : NULL;
    return h->variant[i] == 0 ? object_of(h, type) : NULL;
}

/* A structure: an object that exists, a valid desc, or zeros; NULL; zeros; hostile fields in a valid desc. */
static void *pick_structure(hostile *h, int i, const char *type, size_t bytes, int is_list, filler fill) {
    void *object = object_of(h, type);
    const void *desc = desc_of(type);
    if (bytes * LIST > BUFFER) fail_msg("%s has %zu bytes", type, bytes);
    if (h->variant[i] == 1 || (is_list && h->is_huge)) return NULL;
    if (h->variant[i] == 0 && object) return object;
    memset(buffers[i], 0, bytes * LIST);
    if (desc && h->variant[i] != 2) memcpy(buffers[i], desc, bytes);
    for (int k = 0; k < (is_list ? LIST : 1) && h->variant[i] > 2; k++) fill(h, buffers[i] + (size_t)k * bytes);
    return buffers[i];
}

/* What a function returns, and that an error has a message. */
static void judge(hostile *h, mt_status status) {
    static const char no_message[] = "no message of the call";
    int has_context = strstr(h->kinds, "object_mt_context") != NULL;
    mt_comm *comm = has_context ? NULL : h->comm;
    const char *text = h->ctx ? mt_last_error(h->ctx) : comm ? mt_comm_last_error(comm) : "?";
    if (status > 0 || status < MT_ERR_SYSTEM) fail_msg("%s returns %d", h->function, (int)status);
    if (status != MT_SUCCESS && (!text[0] || strcmp(text, no_message) == 0))
        fail_msg("%s: %s without a message", h->function, mt_status_name(status));
    (void)mt_fail(h->o.r.ctx, MT_SUCCESS, "%s", no_message);
    (void)mt_comm_fail(h->o.r.world, MT_SUCCESS, no_message);
    mt_arena_release(h->o.r.ctx, 0);
}

#include "hostile_calls_table.h"

/* ---- all calls --------------------------------------------------------------------------------------------------- */

static int kinds_of(const call *c, char kinds[ARGUMENTS][64]) {
    const char *at = c->kinds;
    int n = 0, used = 0;
    while (n < ARGUMENTS && sscanf(at, " %63s%n", kinds[n], &used) == 1) at += used, n++;
    return n;
}

static int variants_of(const char *kind) {
    static const struct {
        const char *kind;
        int variants;
    } all[] = {{"integer", INTEGERS}, {"size", INTEGERS}, {"number", 8},   {"tensor", TENSORS}, {"text", 8},
               {"format", 2},         {"raw", 2},         {"out", 2},      {"outs", 2},         {"scratch", 2},
               {"slot", 5},           {"null", 1},        {"callback", 2}, {"value", 24}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i].kind, kind) == 0) return all[i].variants;
    return strcmp(kind, "object_mt_context") == 0 || strcmp(kind, "object_mt_comm") == 0 ? 2 : 24;
}

/* Makes the call with the variants in h. */
static void make(hostile *h, const call *c, char kinds[ARGUMENTS][64], int n) {
    h->is_huge = 0;
    h->ctx = NULL;
    h->comm = NULL;
    for (int i = 0; i < n; i++) {
        if (strcmp(kinds[i], "integer") == 0 && h->variant[i] >= IS_HUGE) h->is_huge = 1;
        if (strcmp(kinds[i], "size") == 0 && (uint64_t)integers[h->variant[i]] > 7) h->is_huge = 1;
        if ((strncmp(kinds[i], "object", 6) == 0 || strcmp(kinds[i], "value") == 0) && h->variant[i] > 2)
            h->is_huge = 1;
        now->variant[i] = (char)h->variant[i];
    }
    memset(buffers, 0, (size_t)n * sizeof *buffers);
    mt_params_destroy(h->o.fresh);
    h->o.fresh = NULL;
    h->o.creates =
        strstr(c->name, "_create") != NULL && !strstr(c->name, "optimizer") && !strstr(c->name, "checkpoint");
    h->o.creates |= strcmp(c->name, "mt_params_add") == 0 || strncmp(c->name, "mt_params_init", 14) == 0;
    if (h->o.creates && mt_params_create(h->o.r.ctx, &h->o.r.grid, &h->o.fresh) != MT_SUCCESS) fail_msg("no registry");
    c->function(h);
}

static int is_pointer(const char *kind) {
    return strcmp(kind, "raw") == 0 || strncmp(kind, "out", 3) == 0 || strcmp(kind, "scratch") == 0 ||
           strcmp(kind, "text") == 0 || strncmp(kind, "object", 6) == 0 || strcmp(kind, "callback") == 0;
}

static void make_all(hostile *h, const call *c) {
    char kinds[ARGUMENTS][64];
    int n = kinds_of(c, kinds);
    for (int i = 0; i < n; i++)
        for (int v = 0; v < variants_of(kinds[i]); v++) {
            memset(h->variant, 0, sizeof h->variant);
            h->variant[i] = v;
            make(h, c, kinds, n);
        }
    for (int but = -1; but < n; but++) { /* NULL for all pointers, and for all but one */
        for (int i = 0; i < n; i++) h->variant[i] = is_pointer(kinds[i]) && i != but;
        make(h, c, kinds, n);
    }
    for (int k = 0; k < COMBINATIONS; k++) {
        for (int i = 0; i < n; i++)
            h->variant[i] = test_below(&h->random, 3) ? 0 : (int)test_below(&h->random, (size_t)variants_of(kinds[i]));
        make(h, c, kinds, n);
    }
    if (n == 0) make(h, c, kinds, n);
}

static void objects_open(objects *o, mt_device device) {
    mt_context_desc where = {.device = device, .arena_bytes = (size_t)1 << 20, .check = 1};
    mt_gpt_desc gpt = {.vocab = 16, .layers = 1, .max_seq = 8, .layer = {.hidden = 8, .heads = 4}};
    mt_transformer_layer_desc layer = {.hidden = 8, .heads = 4};
    memset(o, 0, sizeof *o);
    if (device == MT_DEVICE_META) test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, &where, &o->r);
    else test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &where, &o->r);
    mt_params *p = o->r.params;
    mt_context *ctx = o->r.ctx;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_create(ctx, p, &gpt, &o->gpt));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_transformer_layer_create(ctx, p, "layer", &layer, &o->layer));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_mlp_create(ctx, p, "mlp", &(mt_mlp_desc){.hidden = 4, .ffn = 4}, &o->mlp));
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_self_attention_create(ctx, p, "attention", &(mt_self_attention_desc){.hidden = 4, .heads = 4},
                                           &o->attention));
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_column_parallel_linear_create(ctx, p, "column",
                                                   &(mt_linear_desc){.in_features = 4, .out_features = 4}, &o->column));
    ASSERT_STATUS(
        ctx, MT_SUCCESS,
        mt_row_parallel_linear_create(
            ctx, p, "row", &(mt_linear_desc){.in_features = 4, .out_features = 4, .input_is_parallel = 1}, &o->row));
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_norm_layer_create(ctx, p, "norm", &(mt_norm_layer_desc){.features = 4}, &o->norm));
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_vocab_parallel_embedding_create(ctx, p, "table", &(mt_embedding_desc){.vocab = 4, .features = 4},
                                                     &o->embedding));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_init(ctx, p, 1));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_optimizer_create(ctx, p, &(mt_optimizer_desc){.beta1 = 0.9f}, &o->optimizer));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_step_create(ctx, &o->optimizer, NULL, 1.0f, &o->step));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_machine_create(ctx, "name = test\n", &o->machine));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_hash_log_create(ctx, &o->r.grid, &o->log));
}

static void objects_close(objects *o) {
    mt_machine_destroy(o->machine);
    mt_hash_log_destroy(o->log);
    mt_params_destroy(o->fresh);
    test_paper_rank_close(&o->r);
}

/* Ends the process: the system's message names the call. */
static void takes_too_long(int signal) {
    (void)signal;
    (void)!write(2, "does not return\n", 16);
    _exit(1);
}

/* Calls the functions from number `first` on, each on new objects. */
static void call_from(int first) {
    static hostile h;
    signal(SIGALRM, takes_too_long);
    for (int i = first; i < (int)(sizeof calls / sizeof *calls); i++)
        for (int device = 0; device < 2; device++) {
            now->number = i;
            now->device = device;
            memset(&h, 0, sizeof h);
            h.random = 7;
            h.function = calls[i].name;
            h.kinds = calls[i].kinds;
            alarm(SECONDS);
            objects_open(&h.o, device ? MT_DEVICE_META : MT_DEVICE_CPU);
            make_all(&h, &calls[i]);
            objects_close(&h.o);
        }
}

/* Returns the status of a process that calls them, and says where it ended. */
static int run_from(int first) {
    int status = 0;
    pid_t child;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        call_from(first);
        fflush(NULL);
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) < 0) return 1;
    if (status == 0) return 0;
    printf("FAIL %d %s on %s, variants", now->number, calls[now->number].name, now->device ? "meta" : "CPU");
    for (int i = 0; i < ARGUMENTS; i++) printf(" %d", now->variant[i]);
    printf(" of %s\n", calls[now->number].kinds);
    return 1;
}

int main(int argc, char **argv) {
    int goes_on = argc > 1 && strcmp(argv[argc - 1], "-k") == 0, first = argc > 1 ? atoi(argv[1]) : 0, failed = 0;
    int count = (int)(sizeof calls / sizeof *calls);
    now = (now_testing *)mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (now == MAP_FAILED) return 1;
    while (first < count && run_from(first)) {
        failed++;
        first = goes_on ? now->number + 1 : count;
    }
    printf("%d functions, %d failed\n", count, failed);
    return failed > 0;
}
