/* bench - measures the library on a CPU: GEMM, layer, GPT-2 training step, collectives, memory. Not a test.

   cc -O3 -march=native -I. -DMT_USE_ONEDNN tests/bench/bench.c -o bench -ldnnl -lm -lpthread
   cc -O3 -march=native -I. -DMT_USE_CBLAS tests/bench/bench.c -o bench -lopenblas -lm -lpthread
   cc -O3 -march=native -I. tests/bench/bench.c -o bench -lm -lpthread

   ./bench                 measures everything, in some minutes; ./bench --help lists the flags
   tests/bench/README.md explains the rows.

   How it measures: ranks (two; up to 64 in some items) of one thread each, pinned one per core where there are enough
   cores. The cases that are compared alternate (A B A B ...) in rounds of one run, after a warm-up that touches all
   memory. Before each sample a fixed calibration loop runs on the cores that take part. A round in which this loop was
   more than 4 % slower than its best time is discarded and repeated, up to a limit. Ratios are medians of the ratios
   within rounds. */

#define _GNU_SOURCE
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <getopt.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#include <sched.h>
#include <stdarg.h>
#include <sys/resource.h>

#define HIDDEN 768
#define HEADS 12
#define TOKENS 1024 /* one sequence */
#define GPT_VOCAB 50257
#define GPT_GIB 14.0 /* memory of the models of a row of item gpt2 together */

#define RANKS 2
#define MANY_RANKS 8
#define MAX_RANKS 64
#define MAX_CASES 32
#define MAX_PARTS 64
#define MAX_ROUNDS 101
#define TRIES 3              /* the limit of rounds, as a multiple of the rounds that are kept */
#define SLOW 1.04            /* calibration time over its best, above which a round is discarded */
#define SHORTEST_SAMPLE 5e-3 /* seconds; a shorter call is repeated within a sample */

typedef struct options {
    int csv, quick, tiny, help; /* tiny: one sample, and small GPTs in plan and scaling */
    int unpacked;               /* 1: item inference without mt_params_pack */
    double seconds;
    int64_t tokens; /* of the item context; 0: its own */
    const char *only, *machine;
} options;

/* ---- statistics and the table ------------------------------------------------------------------------------------ */

typedef struct stat3 {
    double median, low, high;
} stat3;

static const options *opt;
static int rounds_kept, rounds_discarded, rounds_slow; /* of the whole run, counted by rank 0 */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static stat3 stat_of(double *values, int count) {
    stat3 s;
    qsort(values, (size_t)count, sizeof *values, by_value);
    s.median = count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
    s.low = values[0];
    s.high = values[count - 1];
    return s;
}

static stat3 exactly(double value) { return (stat3){value, value, value}; }

static void table_begin(void) {
    if (opt->csv) printf("item,name,median,min,max,unit,ratio,versus\n");
    else printf("\n%-44s %11s %23s  %-12s %7s  %s\n", "name", "median", "min - max", "unit", "ratio", "of");
}

static void table_item(const char *item, const char *title) {
    if (!opt->csv) printf("\n[%s] %s\n", item, title);
    fflush(stdout);
}

static const char *number(char *out, size_t size, double x) {
    double a = fabs(x);
    snprintf(out, size, "%.*f", a >= 1e4 || x == floor(x) ? 0 : a >= 100 ? 1 : a >= 10 ? 2 : 3, x);
    return out;
}

/* Prints a row. versus names what `ratio` compares with; NULL: there is no ratio. A name that begins with two spaces
   belongs to the row above. */
static void row(const char *item, const char *name, stat3 s, const char *unit, double ratio, const char *versus) {
    static char above[64];
    char a[32], b[32], c[32];
    int continues = name[0] == ' ';
    if (!continues) snprintf(above, sizeof above, "%s", name);
    if (opt->csv) {
        printf("%s,\"%s%s%s\",%.6g,%.6g,%.6g,%s,", item, above, continues ? ":" : "", continues ? name + 1 : "",
               s.median, s.low, s.high, unit);
        if (versus) printf("%.4f,\"%s\"\n", ratio, versus);
        else printf(",\n");
    } else {
        printf("%-44s %11s %11s -%10s  %-12s ", name, number(a, sizeof a, s.median), number(b, sizeof b, s.low),
               number(c, sizeof c, s.high), unit);
        if (versus) printf("%7.3f  %s", ratio, versus);
        printf("\n");
    }
    fflush(stdout);
}

/* ---- the measuring team: some ranks that take samples together --------------------------------------------------- */

typedef struct team {
    int size, calibrators; /* the first `calibrators` ranks run the calibration loop */
    int once;              /* 1: each case is called once, without a warm-up */
    int rounds, reps[MAX_CASES], tries, kept[MAX_ROUNDS];
    double best[MAX_RANKS], calibration[MAX_RANKS], elapsed[MAX_RANKS];
    double slowness[TRIES * MAX_ROUNDS];
    double seconds[TRIES * MAX_ROUNDS][MAX_CASES];
    double parts[TRIES * MAX_ROUNDS][MAX_CASES][MAX_PARTS];
} team;

typedef struct worker {
    team *team;
    mt_comm *world;
    mt_context *ctx;
    void *item;              /* the data of the current item, for its cases */
    double parts[MAX_PARTS]; /* seconds */
} worker;

typedef mt_status (*case_function)(worker *w, int arg);

typedef struct bench_case {
    case_function run;
    int arg;
    int alone; /* 1: only rank 0 runs it, and the others sleep */
    int parts; /* number of timings that the case writes to worker.parts */
} bench_case;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int rank_of(const worker *w) { return mt_comm_rank(w->world); }
static mt_status barrier(worker *w) { return mt_barrier(w->ctx, w->world); }

/* Runs the calibration loop, some milliseconds of multiply-adds in the L1 cache. Returns its seconds. */
static double calibrate(void) {
    static const int passes = 8000;
    float x[4096];
    double start;
    for (int i = 0; i < 4096; i++) x[i] = (float)i;
    start = now();
    for (int p = 0; p < passes; p++) {
        for (int i = 0; i < 4096; i++) x[i] = x[i] * 0.999f + 0.5f;
        __asm__ volatile("" : : "r"(x) : "memory");
    }
    return now() - start;
}

static mt_status find_best(worker *w) {
    int rank = rank_of(w);
    double best = 1e9;
    MT_TRY(barrier(w));
    for (int i = 0; i < 50 && rank < w->team->calibrators; i++) best = fmin(best, calibrate());
    w->team->best[rank] = best;
    return barrier(w);
}

/* Returns the calibration time over its best, of the slowest of the ranks that take part. Rank 0 calls it between two
   barriers. */
static double slowness(team *t, int ranks) {
    double worst = 1;
    for (int r = 0; r < ranks && r < t->calibrators; r++) {
        t->best[r] = fmin(t->best[r], t->calibration[r]);
        worst = fmax(worst, t->calibration[r] / t->best[r]);
    }
    return worst;
}

/* Takes one sample. *seconds becomes the time of one call on the slowest rank, and *slow the maximum of itself and the
   slowness. Only rank 0 gets the results. */
static mt_status take(worker *w, const bench_case *c, int reps, double *seconds, double *slow) {
    team *t = w->team;
    int rank = rank_of(w), ranks = c->alone ? 1 : t->size;
    double start;
    *seconds = 0;
    if (rank < ranks && rank < t->calibrators) t->calibration[rank] = calibrate();
    MT_TRY(barrier(w));
    if (rank == 0) *slow = fmax(*slow, slowness(t, ranks));
    MT_TRY(barrier(w)); /* the first barrier wakes ranks that sleep; all leave the second one together */
    start = now();
    for (int i = 0; i < reps && rank < ranks; i++) MT_TRY(c->run(w, c->arg));
    t->elapsed[rank] = (now() - start) / reps;
    MT_TRY(barrier(w));
    for (int r = 0; r < ranks && rank == 0; r++) *seconds = fmax(*seconds, t->elapsed[r]);
    return MT_SUCCESS;
}

/* Runs a case until it is warm, and chooses *reps, the number of calls in a sample. On rank 0, *seconds becomes the
   time of one call. */
static mt_status warm_up(worker *w, const bench_case *c, int *reps, double *seconds) {
    double slow = 1;
    MT_TRY(take(w, c, 1, seconds, &slow));
    for (int tries = 1; tries <= 100; tries *= 10) { /* a call of a microsecond needs many calls to be timed */
        MT_TRY(take(w, c, tries, seconds, &slow));
        if (rank_of(w) == 0) *reps = *seconds < SHORTEST_SAMPLE ? (int)(SHORTEST_SAMPLE / *seconds) + 1 : 1;
        MT_TRY(barrier(w));
        if (*reps <= tries) break;
    }
    return barrier(w);
}

/* Warms up all cases, and chooses the number of rounds that fit into opt->seconds. */
static mt_status plan_rounds(worker *w, const bench_case *cases, int count) {
    team *t = w->team;
    double total = 0, seconds = 0;
    int least = opt->tiny ? 1 : opt->quick ? 3 : 5, most = opt->tiny ? 1 : opt->quick ? 5 : MAX_ROUNDS;
    if (t->once) least = most = 1;
    for (int i = 0; i < count; i++) {
        if (t->once) t->reps[i] = 1;
        else MT_TRY(warm_up(w, &cases[i], &t->reps[i], &seconds));
        total += seconds * t->reps[i] + 4e-3; /* about 4 ms for the calibration */
    }
    if (rank_of(w) == 0) {
        t->rounds = (int)fmin(most, fmax(least, opt->seconds / total));
        t->tries = 0;
    }
    return barrier(w);
}

/* Chooses the rounds to keep: the clean ones and, when the limit was reached, the least slow of the others. Rank 0. */
static void choose_rounds(team *t) {
    int count = 0;
    for (int i = 0; i < t->tries && count < t->rounds; i++)
        if (t->slowness[i] <= SLOW) t->kept[count++] = i;
    for (; count < t->rounds; rounds_slow++) {
        int pick = -1;
        for (int i = 0; i < t->tries; i++)
            if (t->slowness[i] > SLOW && (pick < 0 || t->slowness[i] < t->slowness[pick])) pick = i;
        t->kept[count++] = pick;
        t->slowness[pick] = 0; /* taken */
    }
    rounds_kept += t->rounds;
    rounds_discarded += t->tries - t->rounds;
}

static int clean_rounds(const team *t) {
    int clean = 0;
    for (int i = 0; i < t->tries; i++) clean += t->slowness[i] <= SLOW;
    return clean;
}

/* Takes one sample of each case. */
static mt_status take_round(worker *w, const bench_case *cases, int count) {
    team *t = w->team;
    double slow = 1, seconds;
    int index = t->tries;
    for (int i = 0; i < count; i++) {
        MT_TRY(take(w, &cases[i], t->reps[i], &seconds, &slow));
        if (rank_of(w) != 0) continue;
        t->seconds[index][i] = seconds;
        for (int p = 0; p < cases[i].parts; p++) t->parts[index][i][p] = w->parts[p];
    }
    MT_TRY(barrier(w));
    if (rank_of(w) == 0) {
        t->slowness[index] = slow;
        t->tries++;
    }
    return barrier(w);
}

/* Measures the cases. All ranks of the team call it with the same cases. Rank 0 then reads the results with the
   functions below. */
static mt_status measure(worker *w, const bench_case *cases, int count) {
    team *t = w->team;
    MT_TRY(plan_rounds(w, cases, count));
    while (clean_rounds(t) < t->rounds && t->tries < (opt->tiny || t->once ? 1 : TRIES) * t->rounds)
        MT_TRY(take_round(w, cases, count));
    MT_TRY(barrier(w));
    if (rank_of(w) == 0) choose_rounds(t);
    return barrier(w);
}

static double taken(const team *t, int c, int round) { return t->seconds[t->kept[round]][c]; }

/* Returns factor * seconds of case c. */
static stat3 case_time(const team *t, int c, double factor) {
    double v[MAX_ROUNDS];
    for (int i = 0; i < t->rounds; i++) v[i] = factor * taken(t, c, i);
    return stat_of(v, t->rounds);
}

/* Returns amount / seconds of case c. */
static stat3 case_rate(const team *t, int c, double amount) {
    double v[MAX_ROUNDS];
    for (int i = 0; i < t->rounds; i++) v[i] = amount / taken(t, c, i);
    return stat_of(v, t->rounds);
}

/* Returns the median of factor * seconds of case a / seconds of case b. */
static double case_ratio(const team *t, int a, int b, double factor) {
    double v[MAX_ROUNDS];
    for (int i = 0; i < t->rounds; i++) v[i] = factor * taken(t, a, i) / taken(t, b, i);
    return stat_of(v, t->rounds).median;
}

/* Returns factor * the sum of the seconds of those parts of case c for which chosen[p] is set. */
static stat3 part_time(const team *t, int c, const int *chosen, int parts, double factor) {
    double v[MAX_ROUNDS];
    for (int i = 0; i < t->rounds; i++) {
        v[i] = 0;
        for (int p = 0; p < parts; p++)
            if (chosen[p]) v[i] += factor * t->parts[t->kept[i]][c][p];
    }
    return stat_of(v, t->rounds);
}

/* ---- a place to compute: this rank of a split, or rank 0 alone --------------------------------------------------- */

typedef struct place {
    mt_comm *solo; /* a group of this rank alone, or of the meta device; NULL: the place uses the world */
    mt_context *ctx;
    mt_grid grid;
} place;

static int grid_ranks(mt_grid_desc d) { return (d.tp ? d.tp : 1) * (d.dp ? d.dp : 1) * (d.pp ? d.pp : 1); }

/* where is the desc of the context: threads, arena and invariant mode. */
static mt_status place_create(worker *w, mt_grid_desc shape, mt_context_desc where, place *out) {
    mt_comm *world = w->world;
    memset(out, 0, sizeof *out);
    if (grid_ranks(shape) == 1) {
        MT_TRY(mt_comm_create_local(1, 0, &out->solo));
        world = out->solo;
    }
    MT_TRY(mt_context_create(world, &where, &out->ctx));
    return mt_grid_create(world, &shape, &out->grid);
}

static mt_grid_desc split_of(int tp) { return (mt_grid_desc){.tp = tp, .dp = 1}; }

/* The same place of a rank on the meta device. */
static mt_status place_plan(mt_grid_desc shape, int rank, mt_context_desc where, place *out) {
    where.device = MT_DEVICE_META;
    memset(out, 0, sizeof *out);
    MT_TRY(mt_comm_create_meta(grid_ranks(shape), rank, &out->solo));
    MT_TRY(mt_context_create(out->solo, &where, &out->ctx));
    return mt_grid_create(out->solo, &shape, &out->grid);
}

static void place_destroy(place *p) {
    mt_grid_destroy(&p->grid);
    mt_context_destroy(p->ctx);
    mt_comm_destroy(p->solo);
}

/* Returns the number of cores that this process may run on, and stores the first `limit` of them. */
static int allowed_cores(int *cores, int limit) {
    cpu_set_t set;
    int count = 0;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 0;
    for (int c = 0; c < CPU_SETSIZE; c++)
        if (CPU_ISSET((size_t)c, &set) && count++ < limit) cores[count - 1] = c;
    return count;
}

static int first_cores[RANKS], core_count; /* set by main before any thread starts */

static void pin_thread(void *cores, int thread, int64_t first, int64_t last) {
    cpu_set_t one;
    (void)first;
    (void)last;
    CPU_ZERO(&one);
    CPU_SET((size_t)((const int *)cores)[thread], &one);
    sched_setaffinity(0, sizeof one, &one);
}

/* Pins each of the RANKS threads of a context to a core. Without it they would share the core of the rank. */
static int pin_threads(mt_context *ctx) {
    if (core_count < RANKS) return 0;
    mt_parallel_for(ctx, RANKS, 1, pin_thread, first_cores);
    return 1;
}

/* ---- the operators of one layer, one after the other ------------------------------------------------------------- */

/* The operators of a layer's forward and backward, in the layer's order and with its shapes. Each operator can thus be
   timed with the caches as the operator before it leaves them. */

enum { GEMM, ATTENTION, ALL_REDUCE, NORM, ACTIVATION, BIAS_DROPOUT, KINDS };
static const char *const kind_names[KINDS] = {"GEMM", "attention",  "all-reduce",
                                              "norm", "activation", "bias, dropout, add"};

struct ops;

typedef struct op {
    const char *name;
    int kind;
    double flops, bytes; /* of this rank; bytes: those read and written, counting each tensor once */
    mt_status (*run)(const struct ops *s, const struct op *o);
    mt_tensor a, b, c, d;
    mt_transpose trans_a, trans_b;
    float beta;
} op;

typedef struct ops_size {
    int64_t tokens, seq, hidden, heads;
} ops_size;

static const ops_size layer_size = {TOKENS, TOKENS, HIDDEN, HEADS};

typedef struct ops {
    const ops_size *size;
    mt_dtype dtype; /* of activations and weights */
    place place;
    float *memory;
    size_t bytes, used;
    mt_attention_desc desc;
    mt_dropout dropout;
    mt_tensor gain, dgain, bias_h, dbias_h, bias_q, dbias_q, bias_f, dbias_f; /* vectors */
    mt_tensor x, n1, stats1, qkv, lse, out, x1, n2, stats2, h, act, y, block, dy, dblock, dact, dh, dinner, dx1, dout,
        dqkv, dx;
    mt_tensor wqkv, wproj, wfc1, wfc2, gqkv, gproj, gfc1, gfc2; /* weights and their gradients */
    op list[MAX_PARTS];
    int count;
} ops;

static mt_status op_gemm(const ops *s, const op *o) {
    return mt_gemm(s->place.ctx, o->trans_a, o->trans_b, 1.0f, o->a, o->b, o->beta, o->c);
}
static mt_status op_all_reduce(const ops *s, const op *o) {
    return mt_all_reduce(s->place.ctx, s->place.grid.tp, o->a.data, o->a.data, (size_t)(o->a.rows * o->a.cols), MT_F32,
                         MT_SUM);
}
static mt_status op_norm(const ops *s, const op *o) {
    return mt_norm_forward(s->place.ctx, MT_LAYER_NORM, o->a, s->gain, s->bias_h, 1e-5f, o->b, o->c);
}
static mt_status op_norm_backward(const ops *s, const op *o) {
    return mt_norm_backward(s->place.ctx, MT_LAYER_NORM, o->a, s->gain, o->b, s->dinner, o->c, o->d, s->dgain,
                            s->dbias_h);
}
static mt_status op_attention(const ops *s, const op *o) {
    (void)o;
    return mt_attention_forward(s->place.ctx, &s->desc, s->qkv, s->out, s->lse);
}
static mt_status op_attention_backward(const ops *s, const op *o) {
    (void)o;
    return mt_attention_backward(s->place.ctx, &s->desc, s->qkv, s->out, s->lse, s->dout, s->dqkv);
}
static mt_status op_gelu(const ops *s, const op *o) {
    (void)o;
    return mt_activation_forward(s->place.ctx, MT_GELU_TANH, s->h, s->bias_f, s->act);
}
static mt_status op_gelu_backward(const ops *s, const op *o) {
    (void)o;
    return mt_activation_backward(s->place.ctx, MT_GELU_TANH, s->h, s->dact, s->dh, s->dbias_f);
}
static mt_status op_bias(const ops *s, const op *o) { return mt_bias_forward(s->place.ctx, o->a, o->b); }
static mt_status op_bias_backward(const ops *s, const op *o) { return mt_bias_backward(s->place.ctx, o->a, o->b); }
static mt_status op_add(const ops *s, const op *o) {
    return mt_bias_dropout_add_forward(s->place.ctx, o->a, s->bias_h, o->b, s->dropout, o->c);
}
static mt_status op_drop_backward(const ops *s, const op *o) {
    return mt_bias_dropout_add_backward(s->place.ctx, o->a, s->dropout, o->b, s->dbias_h);
}

static double bytes_of(mt_tensor t) { return (double)mt_dtype_size(t.dtype) * (double)t.rows * (double)t.cols; }

static op *ops_add(ops *s, const char *name, int kind, mt_status (*run)(const ops *, const op *), double bytes) {
    op *o = &s->list[s->count++];
    memset(o, 0, sizeof *o);
    o->name = name;
    o->kind = kind;
    o->run = run;
    o->bytes = bytes;
    return o;
}

static void ops_gemm(ops *s, const char *name, mt_transpose ta, mt_transpose tb, mt_tensor a, mt_tensor b, float beta,
                     mt_tensor c) {
    op *o = ops_add(s, name, GEMM, op_gemm, bytes_of(a) + bytes_of(b) + (beta == 0.0f ? 1 : 2) * bytes_of(c));
    o->flops = 2.0 * (double)(c.rows * c.cols) * (double)(ta == MT_TRANS ? a.rows : a.cols);
    o->trans_a = ta;
    o->trans_b = tb;
    o->a = a;
    o->b = b;
    o->beta = beta;
    o->c = c;
}

static void ops_view(ops *s, const char *name, int kind, mt_status (*run)(const ops *, const op *), double bytes,
                     mt_tensor a, mt_tensor b, mt_tensor c, mt_tensor d) {
    op *o = ops_add(s, name, kind, run, bytes);
    o->a = a;
    o->b = b;
    o->c = c;
    o->d = d;
}

static void ops_reduce(ops *s, const char *name, mt_tensor x) {
    if (s->place.grid.tp_size > 1)
        ops_view(s, name, ALL_REDUCE, op_all_reduce, 2 * bytes_of(x), x, mt_none(), mt_none(), mt_none());
}

static void ops_add_forward(ops *s, const char *name, mt_tensor residual, mt_tensor y) {
    ops_view(s, name, BIAS_DROPOUT, op_add, 3 * bytes_of(y), y, residual, y, mt_none());
}

/* Adds the backward of dropout and bias; without dropout, that of the bias only. */
static void ops_add_backward(ops *s, const char *name, mt_tensor dy) {
    if (s->dropout.p > 0.0f)
        ops_view(s, name, BIAS_DROPOUT, op_drop_backward, 2 * bytes_of(dy), dy, s->dblock, mt_none(), mt_none());
    else ops_view(s, name, BIAS_DROPOUT, op_bias_backward, bytes_of(dy), dy, s->dbias_h, mt_none(), mt_none());
}

/* Returns the floating-point operations of causal attention's forward: 2 products, over the visible half of the scores.
   Backward has 4 products, not counting recomputation. */
static double attention_flops(double sequences, double seq, double width) {
    return 2 * sequences * seq * (seq + 1) * width;
}

static double ops_attention_flops(const ops *s) {
    return attention_flops((double)(s->size->tokens / s->size->seq), (double)s->size->seq, (double)s->out.cols);
}

static void ops_list_forward(ops *s) {
    const mt_transpose n = MT_NO_TRANS, t = MT_TRANS;
    ops_view(s, "norm 1", NORM, op_norm, 2 * bytes_of(s->x), s->x, s->n1, s->stats1, mt_none());
    ops_gemm(s, "qkv", n, t, s->n1, s->wqkv, 0, s->qkv);
    ops_view(s, "qkv bias", BIAS_DROPOUT, op_bias, 2 * bytes_of(s->qkv), s->qkv, s->bias_q, mt_none(), mt_none());
    ops_add(s, "attention", ATTENTION, op_attention, bytes_of(s->qkv) + bytes_of(s->out))->flops =
        ops_attention_flops(s);
    ops_gemm(s, "proj", n, t, s->out, s->wproj, 0, s->x1);
    ops_reduce(s, "all-reduce of proj", s->x1);
    ops_add_forward(s, "bias, dropout, residual 1", s->x, s->x1);
    ops_view(s, "norm 2", NORM, op_norm, 2 * bytes_of(s->x), s->x1, s->n2, s->stats2, mt_none());
    ops_gemm(s, "fc1", n, t, s->n2, s->wfc1, 0, s->h);
    ops_add(s, "bias, gelu", ACTIVATION, op_gelu, 3 * bytes_of(s->h));
    ops_gemm(s, "fc2", n, t, s->act, s->wfc2, 0, s->y);
    ops_reduce(s, "all-reduce of fc2", s->y);
    ops_add_forward(s, "bias, dropout, residual 2", s->x1, s->y);
}

static void ops_list_backward(ops *s) {
    const mt_transpose n = MT_NO_TRANS, t = MT_TRANS;
    mt_tensor second = s->dropout.p > 0.0f ? s->dblock : s->dy, first = s->dropout.p > 0.0f ? s->dblock : s->dx1;
    ops_add_backward(s, "bias, dropout 2 backward", s->dy);
    ops_gemm(s, "fc2 input gradient", n, n, second, s->wfc2, 0, s->dact);
    ops_gemm(s, "fc2 weight gradient", t, n, second, s->act, 1, s->gfc2);
    ops_add(s, "bias, gelu backward", ACTIVATION, op_gelu_backward, 3 * bytes_of(s->h));
    ops_gemm(s, "fc1 input gradient", n, n, s->dh, s->wfc1, 0, s->dinner);
    ops_reduce(s, "all-reduce of fc1 input gradient", s->dinner);
    ops_gemm(s, "fc1 weight gradient", t, n, s->dh, s->n2, 1, s->gfc1);
    ops_view(s, "norm 2 backward", NORM, op_norm_backward, 4 * bytes_of(s->x), s->x1, s->stats2, s->dy, s->dx1);
    ops_add_backward(s, "bias, dropout 1 backward", s->dx1);
    ops_gemm(s, "proj input gradient", n, n, first, s->wproj, 0, s->dout);
    ops_gemm(s, "proj weight gradient", t, n, first, s->out, 1, s->gproj);
    ops_add(s, "attention backward", ATTENTION, op_attention_backward, 2 * bytes_of(s->qkv) + 2 * bytes_of(s->out))
        ->flops = 2 * ops_attention_flops(s);
    ops_gemm(s, "qkv input gradient", n, n, s->dqkv, s->wqkv, 0, s->dinner);
    ops_reduce(s, "all-reduce of qkv input gradient", s->dinner);
    ops_view(s, "qkv bias backward", BIAS_DROPOUT, op_bias_backward, bytes_of(s->dqkv), s->dqkv, s->dbias_q, mt_none(),
             mt_none());
    ops_gemm(s, "qkv weight gradient", t, n, s->dqkv, s->n1, 1, s->gqkv);
    ops_view(s, "norm 1 backward", NORM, op_norm_backward, 4 * bytes_of(s->x), s->x, s->stats1, s->dx1, s->dx);
}

/* Returns a tensor of small random numbers. Before s->memory is allocated, it only counts in s->used. */
static mt_tensor ops_typed(ops *s, mt_dtype dtype, int64_t rows, int64_t cols) {
    mt_tensor t = mt_tensor_make(s->memory + s->used, dtype, rows, cols);
    mt_random at = {.seed = 7, .subsequence = s->used, .global_cols = cols};
    s->used += (size_t)(rows * cols + 15) / 16 * 16;
    if (s->used * sizeof(float) <= s->bytes) mt_random_normal(s->place.ctx, t, 0.02f, at);
    return t;
}

static mt_tensor ops_tensor(ops *s, int64_t rows, int64_t cols) { return ops_typed(s, s->dtype, rows, cols); }
static mt_tensor ops_f32(ops *s, int64_t rows, int64_t cols) { return ops_typed(s, MT_F32, rows, cols); }

static void ops_activations(ops *s, int64_t split) {
    const int64_t tokens = s->size->tokens, hidden = s->size->hidden;
    mt_tensor *const wide[] = {&s->x, &s->n1, &s->x1, &s->n2, &s->y, &s->dy, &s->dblock, &s->dinner, &s->dx1, &s->dx};
    mt_tensor *const inner[] = {&s->h, &s->act, &s->dact, &s->dh};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) *wide[i] = ops_tensor(s, tokens, hidden);
    for (size_t i = 0; i < sizeof inner / sizeof *inner; i++) *inner[i] = ops_tensor(s, tokens, 4 * hidden / split);
    s->stats1 = ops_f32(s, tokens, 2);
    s->stats2 = ops_f32(s, tokens, 2);
    s->qkv = ops_tensor(s, tokens, 3 * hidden / split);
    s->dqkv = ops_tensor(s, tokens, 3 * hidden / split);
    s->out = ops_tensor(s, tokens, hidden / split);
    s->dout = ops_tensor(s, tokens, hidden / split);
    s->lse = ops_f32(s, s->size->heads / split, tokens);
}

static void ops_parameters(ops *s, int64_t split) {
    const int64_t hidden = s->size->hidden;
    s->gain = ops_tensor(s, 1, hidden);
    s->dgain = ops_f32(s, 1, hidden);
    s->bias_h = ops_tensor(s, 1, hidden);
    s->dbias_h = ops_f32(s, 1, hidden);
    s->bias_q = ops_tensor(s, 1, 3 * hidden / split);
    s->dbias_q = ops_f32(s, 1, 3 * hidden / split);
    s->bias_f = ops_tensor(s, 1, 4 * hidden / split);
    s->dbias_f = ops_f32(s, 1, 4 * hidden / split);
    s->wqkv = ops_tensor(s, 3 * hidden / split, hidden);
    s->gqkv = ops_f32(s, 3 * hidden / split, hidden);
    s->wproj = ops_tensor(s, hidden, hidden / split);
    s->gproj = ops_f32(s, hidden, hidden / split);
    s->wfc1 = ops_tensor(s, 4 * hidden / split, hidden);
    s->gfc1 = ops_f32(s, 4 * hidden / split, hidden);
    s->wfc2 = ops_tensor(s, hidden, 4 * hidden / split);
    s->gfc2 = ops_f32(s, hidden, 4 * hidden / split);
}

/* Creates the tensors and the list of operators for a rank of a split over `split` ranks, in s->place and s->dtype. */
static mt_status ops_build(ops *s, int split, float dropout, const ops_size *size) {
    void *memory;
    s->size = size;
    s->dropout.p = dropout;
    s->dropout.at = (mt_random){.seed = 1, .subsequence = 1, .global_cols = size->hidden};
    s->desc = (mt_attention_desc){.batch = size->tokens / size->seq,
                                  .seq = size->seq,
                                  .groups = size->heads / split,
                                  .heads_per_group = 1,
                                  .head_dim = size->hidden / size->heads,
                                  .dropout = s->dropout};
    s->desc.dropout.at.global_cols = size->heads;
    ops_activations(s, split); /* counts the floats */
    ops_parameters(s, split);
    s->bytes = s->used * sizeof(float);
    MT_TRY(mt_context_alloc(s->place.ctx, s->bytes, &memory));
    s->memory = memory;
    s->used = 0;
    ops_activations(s, split);
    ops_parameters(s, split);
    ops_list_forward(s);
    ops_list_backward(s);
    return MT_SUCCESS;
}

static mt_status ops_create(worker *w, int split, mt_dtype dtype, ops *s) {
    mt_context_desc where = {.threads = 1, .arena_bytes = (size_t)64 << 20};
    memset(s, 0, sizeof *s);
    s->dtype = dtype;
    MT_TRY(place_create(w, split_of(split), where, &s->place));
    return ops_build(s, split, 0, &layer_size);
}

static void ops_destroy(ops *s) {
    if (s->place.ctx) mt_context_free(s->place.ctx, s->memory, s->bytes);
    place_destroy(&s->place);
}

/* Runs all operators of one kind, or of all kinds for KINDS. When seconds is not NULL, seconds[i] becomes the time of
   operator i. */
static mt_status ops_run(const ops *s, int kind, double *seconds) {
    double start = now(), end;
    for (int i = 0; i < s->count; i++) {
        if (kind != KINDS && s->list[i].kind != kind) continue;
        MT_TRY(s->list[i].run(s, &s->list[i]));
        if (!seconds) continue;
        end = now();
        seconds[i] = end - start;
        start = end;
    }
    return MT_SUCCESS;
}

static double ops_flops(const ops *s, int kind) {
    double flops = 0;
    for (int i = 0; i < s->count; i++)
        if (kind == KINDS || s->list[i].kind == kind) flops += s->list[i].flops;
    return flops;
}

/* ---- the peak of products: multiply-adds of vectors in registers ------------------------------------------------- */

#if defined(__AVX512F__)
typedef float peak_vector __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float peak_vector __attribute__((vector_size(32)));
#else
typedef float peak_vector __attribute__((vector_size(16)));
#endif
#define PEAK_SUMS 12 /* independent sums, more than a core has multiply-adds in flight */
#define PEAK_PASSES 100000
#define PEAK_FLOPS (2.0 * PEAK_SUMS * PEAK_PASSES * (sizeof(peak_vector) / sizeof(float)))

static volatile float peak_factor, peak_result; /* the compiler must not know that all sums are 0 */

static mt_status run_peak(worker *w, int arg) {
    peak_vector x[PEAK_SUMS] = {{0}}, a = {0};
    (void)w;
    (void)arg;
    a += peak_factor;
    for (int i = 0; i < PEAK_SUMS; i++) x[i] += peak_factor;
    for (int pass = 0; pass < PEAK_PASSES; pass++)
        for (int i = 0; i < PEAK_SUMS; i++) x[i] = x[i] * a + a;
    for (int i = 1; i < PEAK_SUMS; i++) x[0] += x[i];
    peak_result = x[0][0];
    return MT_SUCCESS;
}

/* The same in bf16. Without AVX512-BF16, products of bf16 are those of f32. */
#if defined(__AVX512BF16__)
static const char *const peak_bf16_name = "peak of bf16";
#define PEAK_BF16_FLOPS (2 * PEAK_FLOPS)

static mt_status run_peak_bf16(worker *w, int arg) {
    __m512 x[PEAK_SUMS];
    __m512bh a = (__m512bh)_mm512_set1_ps(peak_factor);
    (void)w;
    (void)arg;
    for (int i = 0; i < PEAK_SUMS; i++) x[i] = _mm512_set1_ps(peak_factor);
    for (int pass = 0; pass < PEAK_PASSES; pass++)
        for (int i = 0; i < PEAK_SUMS; i++) x[i] = _mm512_dpbf16_ps(x[i], a, a);
    for (int i = 1; i < PEAK_SUMS; i++) x[0] = _mm512_add_ps(x[0], x[i]);
    peak_result = _mm512_cvtss_f32(x[0]);
    return MT_SUCCESS;
}
#else
static const char *const peak_bf16_name = "peak of f32";
#define PEAK_BF16_FLOPS PEAK_FLOPS
static mt_status run_peak_bf16(worker *w, int arg) { return run_peak(w, arg); }
#endif

/* ---- item gemm --------------------------------------------------------------------------------------------------- */

typedef struct gemm_item {
    ops one, two;                /* at TP=1 (only rank 0 runs it) and at TP=2 */
    int index[MAX_PARTS], count; /* the places of the GEMMs in two.list, and their number */
    int index_one[MAX_PARTS];    /* the places of the same GEMMs in one.list */
} gemm_item;

static int gemm_indices(const ops *s, int *index) {
    int count = 0;
    for (int i = 0; i < s->count; i++)
        if (s->list[i].kind == GEMM) index[count++] = i;
    return count;
}

static mt_status run_gemm_one(worker *w, int arg) {
    gemm_item *g = w->item;
    return op_gemm(&g->one, &g->one.list[g->index_one[arg]]);
}
static mt_status run_gemm_two(worker *w, int arg) {
    gemm_item *g = w->item;
    return op_gemm(&g->two, &g->two.list[g->index[arg]]);
}
static mt_status run_gemms_one(worker *w, int arg) {
    (void)arg;
    return ops_run(&((gemm_item *)w->item)->one, GEMM, NULL);
}
static mt_status run_gemms_two(worker *w, int arg) {
    (void)arg;
    return ops_run(&((gemm_item *)w->item)->two, GEMM, NULL);
}

/* Case c runs on one rank and compares with the peak, case c + 1 on both and compares with case c. */
static void gemm_row(const team *t, const gemm_item *g, const char *name, int c, double flops) {
    int peak = 2 * g->count + 2, two = c % 2;
    row("gemm", name, case_rate(t, c, 1e-9 * flops), "GFLOP/s/core",
        two ? case_ratio(t, c - 1, c, 0.5) : case_ratio(t, peak, c, flops / PEAK_FLOPS), two ? "TP=1 rate" : "peak");
}

static void gemm_op_row(const team *t, const gemm_item *g, const ops *s, const op *o, int c) {
    char name[64];
    int64_t k = o->trans_a == MT_TRANS ? o->a.rows : o->a.cols;
    snprintf(name, sizeof name, "%s TP=%d %lldx%lldx%lld", o->name, s->place.grid.tp_size, (long long)o->c.rows,
             (long long)o->c.cols, (long long)k);
    gemm_row(t, g, name, c, o->flops);
}

static void gemm_rows(const team *t, const gemm_item *g) {
    int n = g->count;
    for (int i = 0; i < n; i++) {
        gemm_op_row(t, g, &g->one, &g->one.list[g->index_one[i]], 2 * i);
        gemm_op_row(t, g, &g->two, &g->two.list[g->index[i]], 2 * i + 1);
    }
    gemm_row(t, g, "all 12 GEMMs of the layer, TP=1", 2 * n, ops_flops(&g->one, GEMM));
    gemm_row(t, g, "all 12 GEMMs, TP=2, both ranks at once", 2 * n + 1, ops_flops(&g->two, GEMM));
    row("gemm", "peak: multiply-adds in registers", case_rate(t, 2 * n + 2, 1e-9 * PEAK_FLOPS), "GFLOP/s/core", 0,
        NULL);
}

static mt_status gemm_measure(worker *w) {
    gemm_item *g = w->item;
    bench_case cases[MAX_CASES] = {{0}};
    MT_TRY(ops_create(w, 1, MT_F32, &g->one));
    MT_TRY(ops_create(w, RANKS, MT_F32, &g->two));
    gemm_indices(&g->one, g->index_one);
    g->count = gemm_indices(&g->two, g->index);
    for (int i = 0; i < g->count; i++) {
        cases[2 * i] = (bench_case){run_gemm_one, i, 1, 0};
        cases[2 * i + 1] = (bench_case){run_gemm_two, i, 0, 0};
    }
    cases[2 * g->count] = (bench_case){run_gemms_one, 0, 1, 0};
    cases[2 * g->count + 1] = (bench_case){run_gemms_two, 0, 0, 0};
    cases[2 * g->count + 2] = (bench_case){run_peak, 0, 1, 0};
    MT_TRY(measure(w, cases, 2 * g->count + 3));
    if (rank_of(w) == 0) gemm_rows(w->team, g);
    return MT_SUCCESS;
}

static mt_status item_gemm(worker *w) {
    gemm_item g = {0};
    w->item = &g;
    mt_status status = gemm_measure(w);
    ops_destroy(&g.one);
    ops_destroy(&g.two);
    return status;
}

/* ---- item gemm: bf16, and few rows of activations ---------------------------------------------------------------- */

enum { FEW_CASES = 8, TYPED_CASES = 6, READ_CASES = 2, PEAK_CASE = FEW_CASES + TYPED_CASES + READ_CASES };

static const struct {
    mt_dtype dtype;
    int64_t rows, n;
} few_list[FEW_CASES] = {{MT_F32, 1, GPT_VOCAB},  {MT_F32, 4, GPT_VOCAB},  {MT_F32, 8, GPT_VOCAB},
                         {MT_F32, 1, 4 * HIDDEN}, {MT_BF16, 1, GPT_VOCAB}, {MT_BF16, 4, GPT_VOCAB},
                         {MT_BF16, 8, GPT_VOCAB}, {MT_BF16, 1, 4 * HIDDEN}};

static const struct {
    const char *name;
    mt_transpose trans_a, trans_b;
    int64_t m, n, k;
} typed_list[TYPED_CASES / 2] = {{"forward", MT_NO_TRANS, MT_TRANS, TOKENS, 4 * HIDDEN, HIDDEN},
                                 {"input gradient", MT_NO_TRANS, MT_NO_TRANS, TOKENS, HIDDEN, 4 * HIDDEN},
                                 {"weight gradient", MT_TRANS, MT_NO_TRANS, 4 * HIDDEN, HIDDEN, TOKENS}};

typedef struct products_item {
    char *weights, *x, *y; /* of GPT_VOCAB x HIDDEN floats, and of TOKENS x 4 HIDDEN */
    size_t at;             /* weights from here on are read next, so that they are not in a cache */
    uint64_t sum;
} products_item;

#define WEIGHT_BYTES ((size_t)GPT_VOCAB * HIDDEN * sizeof(float))

static const char *next_weights(products_item *p, size_t bytes) {
    if (p->at + bytes > WEIGHT_BYTES) p->at = 0;
    p->at += bytes;
    return p->weights + p->at - bytes;
}

static mt_status run_few(worker *w, int arg) {
    products_item *p = w->item;
    mt_dtype dtype = few_list[arg].dtype;
    int64_t m = few_list[arg].rows, n = few_list[arg].n;
    const char *b = next_weights(p, (size_t)(n * HIDDEN) * mt_dtype_size(dtype));
    return mt_gemm(w->ctx, MT_NO_TRANS, MT_TRANS, 1, mt_tensor_make(p->x, dtype, m, HIDDEN),
                   mt_tensor_make(b, dtype, n, HIDDEN), 0, mt_tensor_make(p->y, dtype, m, n));
}

/* Reads as many bytes as a weight [GPT_VOCAB, HIDDEN] has in f32 (0) or bf16 (1). */
static mt_status run_read(worker *w, int arg) {
    products_item *p = w->item;
    size_t bytes = WEIGHT_BYTES >> arg, i, j;
    const uint64_t *x = (const uint64_t *)(const void *)next_weights(p, bytes);
    uint64_t sum = 0;
    for (i = 0; i + 64 <= bytes / 8; i += 64) {
        for (j = 0; j < 64; j += 8) __builtin_prefetch(x + i + j + 1024);
        for (j = 0; j < 64; j++) sum += x[i + j];
    }
    p->sum += sum;
    return MT_SUCCESS;
}

/* Case 2 i is typed_list[i] in f32, and 2 i + 1 in bf16. */
static mt_status run_typed(worker *w, int arg) {
    products_item *p = w->item;
    mt_dtype dtype = arg % 2 ? MT_BF16 : MT_F32;
    int64_t m = typed_list[arg / 2].m, n = typed_list[arg / 2].n, k = typed_list[arg / 2].k;
    int ta = typed_list[arg / 2].trans_a == MT_TRANS, tb = typed_list[arg / 2].trans_b == MT_TRANS;
    return mt_gemm(w->ctx, typed_list[arg / 2].trans_a, typed_list[arg / 2].trans_b, 1,
                   mt_tensor_make(p->x, dtype, ta ? k : m, ta ? m : k),
                   mt_tensor_make(p->weights, dtype, tb ? n : k, tb ? k : n), ta ? 1.0f : 0.0f,
                   mt_tensor_make(p->y, ta ? MT_F32 : dtype, m, n));
}

static void products_rows(const team *t) {
    char name[64];
    for (int i = 0; i < TYPED_CASES; i++) {
        int64_t m = typed_list[i / 2].m, n = typed_list[i / 2].n, k = typed_list[i / 2].k;
        snprintf(name, sizeof name, "%s %s %lldx%lldx%lld", i % 2 ? "bf16" : "f32", typed_list[i / 2].name,
                 (long long)m, (long long)n, (long long)k);
        stat3 rate = case_rate(t, i, 2e-9 * (double)(m * n * k));
        row("gemm", name, rate, "GFLOP/s",
            case_ratio(t, PEAK_CASE + i % 2, i, 2.0 * (double)(m * n * k) / (i % 2 ? PEAK_BF16_FLOPS : PEAK_FLOPS)),
            i % 2 ? peak_bf16_name : "peak of f32");
        if (i % 2) row("gemm", "  the same", rate, "GFLOP/s", case_ratio(t, i - 1, i, 1), "f32 rate");
    }
    row("gemm", "peak of f32: multiply-adds in registers", case_rate(t, PEAK_CASE, 1e-9 * PEAK_FLOPS), "GFLOP/s", 0,
        NULL);
    row("gemm", "  in bf16", case_rate(t, PEAK_CASE + 1, 1e-9 * PEAK_BF16_FLOPS), "GFLOP/s", 0, NULL);
    for (int i = 0; i < FEW_CASES; i++) {
        int read = TYPED_CASES + FEW_CASES + (few_list[i].dtype == MT_BF16), c = TYPED_CASES + i;
        double bytes = (double)few_list[i].n * HIDDEN * (double)mt_dtype_size(few_list[i].dtype);
        snprintf(name, sizeof name, "%s %lldx%lldx%d, bytes of the weight", mt_dtype_name(few_list[i].dtype),
                 (long long)few_list[i].rows, (long long)few_list[i].n, HIDDEN);
        row("gemm", name, case_rate(t, c, 1e-9 * bytes), "GB/s",
            case_ratio(t, read, c, (double)few_list[i].n / GPT_VOCAB), "read's GB/s");
    }
    row("gemm", "read of 154 MB", case_rate(t, TYPED_CASES + FEW_CASES, 1e-9 * (double)WEIGHT_BYTES), "GB/s", 0, NULL);
}

/* bf16 patterns of numbers near 1, which are numbers near 1 as f32, too. */
static mt_status products_create(worker *w, products_item *p) {
    const size_t sizes[3] = {WEIGHT_BYTES, (size_t)TOKENS * 4 * HIDDEN * sizeof(float),
                             (size_t)8 * GPT_VOCAB * sizeof(float) + (size_t)TOKENS * 4 * HIDDEN * sizeof(float)};
    char **const all[3] = {&p->weights, &p->x, &p->y};
    for (int i = 0; i < 3; i++) {
        void *memory;
        MT_TRY(mt_context_alloc(w->ctx, sizes[i], &memory));
        *all[i] = memory;
        for (size_t j = 0; j < sizes[i] / 2; j++)
            ((uint16_t *)memory)[j] = (uint16_t)(0x3f80 | (j * 0x9e37 >> 3 & 0x803f));
    }
    return MT_SUCCESS;
}

static void products_destroy(worker *w, products_item *p) {
    if (p->weights) mt_context_free(w->ctx, p->weights, WEIGHT_BYTES);
    if (p->x) mt_context_free(w->ctx, p->x, (size_t)TOKENS * 4 * HIDDEN * sizeof(float));
    if (p->y)
        mt_context_free(w->ctx, p->y,
                        (size_t)8 * GPT_VOCAB * sizeof(float) + (size_t)TOKENS * 4 * HIDDEN * sizeof(float));
}

/* Only rank 0 computes. */
static mt_status item_products(worker *w) {
    products_item p = {0};
    bench_case cases[PEAK_CASE + 2] = {[PEAK_CASE] = {run_peak, 0, 1, 0}, [PEAK_CASE + 1] = {run_peak_bf16, 0, 1, 0}};
    mt_status status = MT_SUCCESS;
    for (int i = 0; i < TYPED_CASES; i++) cases[i] = (bench_case){run_typed, i, 1, 0};
    for (int i = 0; i < FEW_CASES; i++) cases[TYPED_CASES + i] = (bench_case){run_few, i, 1, 0};
    for (int i = 0; i < READ_CASES; i++) cases[TYPED_CASES + FEW_CASES + i] = (bench_case){run_read, i, 1, 0};
    w->item = &p;
    if (rank_of(w) == 0) status = products_create(w, &p);
    if (status == MT_SUCCESS) status = measure(w, cases, PEAK_CASE + 2);
    if (status == MT_SUCCESS && rank_of(w) == 0) products_rows(w->team);
    products_destroy(w, &p);
    w->item = NULL;
    return status;
}

/* ---- item layer -------------------------------------------------------------------------------------------------- */

#define HEAD (HIDDEN / HEADS)
typedef struct one_layer {
    place place;
    mt_params *params;
    mt_transformer_layer layer;
    mt_tensor x, y, dy, dx;
    mt_batch batch;
} one_layer;

typedef struct layer_dims {
    int64_t tokens, hidden;
} layer_dims;

static mt_transformer_layer_desc layer_desc(float dropout, int64_t hidden) {
    return (mt_transformer_layer_desc){
        .hidden = hidden, .heads = hidden / HEAD, .dropout.attention = dropout, .dropout.hidden = dropout};
}

/* Creates a layer on a context with the fields of `where`. */
static mt_status layer_create_on(worker *w, int split, mt_context_desc where, layer_dims size, float dropout,
                                 mt_dtype dtype, one_layer *l) {
    mt_transformer_layer_desc d = layer_desc(dropout, size.hidden);
    mt_tensor *const views[] = {&l->x, &l->y, &l->dy, &l->dx};
    mt_random at = {.seed = 3, .global_cols = size.hidden};
    memset(l, 0, sizeof *l);
    MT_TRY(place_create(w, split_of(split), where, &l->place));
    MT_TRY(mt_params_create(l->place.ctx, &l->place.grid, &l->params));
    MT_TRY(mt_params_set_dtype(l->place.ctx, l->params, dtype));
    MT_TRY(mt_transformer_layer_create(l->place.ctx, l->params, "layer", &d, &l->layer));
    MT_TRY(mt_params_init(l->place.ctx, l->params, 1234));
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        MT_TRY(mt_arena_tensor(l->place.ctx, dtype, size.tokens, size.hidden, views[i]));
        at.subsequence = i;
        MT_TRY(mt_random_normal(l->place.ctx, *views[i], 1.0f, at));
        MT_TRY(mt_declare(l->place.ctx, l->place.grid.tp, *views[i], MT_REPLICATED));
    }
    l->batch = (mt_batch){.sequences = 1, .seq = size.tokens, .seed = 5};
    return MT_SUCCESS;
}

static mt_status layer_create(worker *w, int split, int threads, float dropout, mt_dtype dtype, one_layer *l) {
    return layer_create_on(w, split, (mt_context_desc){.threads = threads}, (layer_dims){TOKENS, HIDDEN}, dropout,
                           dtype, l);
}

static void layer_destroy(one_layer *l) {
    mt_params_destroy(l->params);
    place_destroy(&l->place);
}

static mt_status layer_step(one_layer *l) {
    mt_transformer_layer_saved saved;
    size_t mark = mt_arena_mark(l->place.ctx);
    l->batch.step++;
    MT_TRY(mt_transformer_layer_forward(l->place.ctx, &l->layer, &l->batch, l->x, l->y, &saved));
    MT_TRY(mt_transformer_layer_backward(l->place.ctx, &l->layer, l->dy, l->dx, &saved));
    mt_arena_release(l->place.ctx, mark);
    return MT_SUCCESS;
}

static double layer_flops(void) {
    double gemm = 3 * 2.0 * TOKENS * 12 * HIDDEN * HIDDEN; /* 12 hidden^2 weights; forward, input and weight gradient */
    return gemm + 3 * attention_flops(1, TOKENS, HIDDEN);
}

/* Cases in the order in which they alternate. */
enum {
    GEMMS_1,
    GEMMS_2,
    GEMMS_1_BF16,
    GEMMS_2_BF16,
    LAYER_1,
    LAYER_1_THREADS_2,
    LAYER_1_DROPOUT,
    LAYER_2,
    LAYER_2_DROPOUT,
    LAYER_1_BF16,
    LAYER_1_BF16_THREADS_2,
    LAYER_2_BF16,
    REPLAY_2,
    LAYER_CASES
};

typedef struct layer_item {
    ops products[LAYER_1]; /* of the cases before LAYER_1, the GEMMs of a layer alone */
    one_layer layers[LAYER_CASES];
    int pinned;
    double faults;
    uint64_t all_reduces;
} layer_item;

static mt_status run_layer(worker *w, int arg) { return layer_step(&((layer_item *)w->item)->layers[arg]); }

static mt_status run_products(worker *w, int arg) {
    return ops_run(&((layer_item *)w->item)->products[arg], GEMM, NULL);
}

static mt_status run_replay(worker *w, int arg) {
    return ops_run(&((layer_item *)w->item)->products[arg], KINDS, w->parts);
}

static mt_status layer_item_create(worker *w, layer_item *l) {
    int first = rank_of(w) == 0;
    MT_TRY(ops_create(w, 1, MT_F32, &l->products[GEMMS_1]));
    MT_TRY(ops_create(w, RANKS, MT_F32, &l->products[GEMMS_2]));
    MT_TRY(ops_create(w, 1, MT_BF16, &l->products[GEMMS_1_BF16]));
    MT_TRY(ops_create(w, RANKS, MT_BF16, &l->products[GEMMS_2_BF16]));
    if (first) MT_TRY(layer_create(w, 1, 1, 0, MT_F32, &l->layers[LAYER_1]));
    if (first) MT_TRY(layer_create(w, 1, 2, 0, MT_F32, &l->layers[LAYER_1_THREADS_2]));
    if (first) MT_TRY(layer_create(w, 1, 1, 0.1f, MT_F32, &l->layers[LAYER_1_DROPOUT]));
    if (first) MT_TRY(layer_create(w, 1, 1, 0, MT_BF16, &l->layers[LAYER_1_BF16]));
    if (first) MT_TRY(layer_create(w, 1, 2, 0, MT_BF16, &l->layers[LAYER_1_BF16_THREADS_2]));
    MT_TRY(layer_create(w, RANKS, 1, 0, MT_F32, &l->layers[LAYER_2]));
    MT_TRY(layer_create(w, RANKS, 1, 0.1f, MT_F32, &l->layers[LAYER_2_DROPOUT]));
    MT_TRY(layer_create(w, RANKS, 1, 0, MT_BF16, &l->layers[LAYER_2_BF16]));
    if (first) l->pinned = pin_threads(l->layers[LAYER_1_THREADS_2].place.ctx);
    if (first) pin_threads(l->layers[LAYER_1_BF16_THREADS_2].place.ctx);
    return barrier(w);
}

static void layer_item_destroy(layer_item *l) {
    for (int i = 0; i < LAYER_CASES; i++) layer_destroy(&l->layers[i]);
    for (int i = 0; i < LAYER_1; i++) ops_destroy(&l->products[i]);
}

static long minor_faults(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_minflt : 0;
}

/* Counts the page faults and all-reduces of one step at TP=2, after the timed steps. */
static mt_status layer_count(worker *w) {
    enum { STEPS = 4 };
    layer_item *l = w->item;
    mt_comm *tp = l->layers[LAYER_2].place.grid.tp;
    long before;
    MT_TRY(layer_step(&l->layers[LAYER_2]));
    before = minor_faults();
    mt_comm_ledger_reset(tp);
    for (int i = 0; i < STEPS; i++) MT_TRY(layer_step(&l->layers[LAYER_2]));
    l->faults = (double)(minor_faults() - before) / STEPS;
    l->all_reduces = mt_comm_ledger(tp).calls[MT_ALL_REDUCE] / STEPS;
    return MT_SUCCESS;
}

/* The cases of a layer, the order of the rows. A row compares with the speed of case `reference`, and its FLOP/s with
   those of its GEMMs alone, case `products`. */
static const struct layer_row {
    const char *name;
    int c, reference, products;
    const char *versus, *limit;
} layer_list[] = {
    {"TP=1, 1 thread", LAYER_1, LAYER_1, GEMMS_1, NULL, "GEMMs alone"},
    {"TP=1, 2 threads", LAYER_1_THREADS_2, LAYER_1, GEMMS_2, "speed of TP=1, 1 thread", "GEMMs alone, TP=2"},
    {"TP=2", LAYER_2, LAYER_1, GEMMS_2, "speed of TP=1, 1 thread (aim 1.85)", "GEMMs alone, TP=2 (aim 0.95)"},
    {"TP=1, 1 thread, dropout 0.1", LAYER_1_DROPOUT, LAYER_1, GEMMS_1, "speed without dropout", "GEMMs alone"},
    {"TP=2, dropout 0.1", LAYER_2_DROPOUT, LAYER_1_DROPOUT, GEMMS_2, "speed of TP=1 with dropout", "GEMMs alone, TP=2"},
    {"bf16, TP=1, 1 thread", LAYER_1_BF16, LAYER_1, GEMMS_1_BF16, "speed in float", "bf16 GEMMs alone"},
    {"bf16, TP=1, 2 threads", LAYER_1_BF16_THREADS_2, LAYER_1_THREADS_2, GEMMS_2_BF16, "speed in float",
     "bf16 GEMMs alone, TP=2"},
    {"bf16, TP=2", LAYER_2_BF16, LAYER_2, GEMMS_2_BF16, "speed in float (aim 1.6)", "bf16 GEMMs alone, TP=2"}};

/* The FLOP of the GEMMs of one layer, of all ranks. */
static double products_flops(const layer_item *l, int c) {
    const ops *s = &l->products[c];
    return s->place.grid.tp_size * ops_flops(s, GEMM);
}

static void layer_rows_of(const team *t, const layer_item *l, const struct layer_row *x) {
    const one_layer *layer = &l->layers[x->c];
    int cores = layer->place.grid.tp_size * mt_context_threads(layer->place.ctx);
    int threads = mt_context_threads(layer->place.ctx) > 1;
    char name[64];
    snprintf(name, sizeof name, "%s%s", x->name, !threads ? "" : l->pinned ? ", pinned" : ", not pinned");
    row("layer", name, case_time(t, x->c, 1e3), "ms", case_ratio(t, x->reference, x->c, 1), x->versus);
    row("layer", "  tokens", case_rate(t, x->c, TOKENS), "tokens/s", 0, NULL);
    snprintf(name, sizeof name, "  %d core%s", cores, cores > 1 ? "s together" : "");
    row("layer", name, case_rate(t, x->c, 1e-9 * layer_flops()), "GFLOP/s",
        case_ratio(t, x->products, x->c, layer_flops() / products_flops(l, x->products)), x->limit);
}

static void layer_products_rows(const team *t, const layer_item *l) {
    static const char *const names[LAYER_1] = {"GEMMs alone, TP=1", "GEMMs alone, TP=2, both ranks at once",
                                               "bf16 GEMMs alone, TP=1", "bf16 GEMMs alone, TP=2, both ranks at once"};
    for (int c = 0; c < LAYER_1; c++) {
        double cores = l->products[c].place.grid.tp_size;
        row("layer", names[c], case_rate(t, c, 1e-9 * products_flops(l, c) / cores), "GFLOP/s/core",
            case_ratio(t, c - c % 2, c, 1 / cores), c % 2 ? names[c - 1] : NULL);
    }
}

static void layer_rows(const team *t, const layer_item *l) {
    const ops *two = &l->products[GEMMS_2];
    int reduces[MAX_PARTS] = {0};
    for (int i = 0; i < two->count; i++) reduces[i] = two->list[i].kind == ALL_REDUCE;
    for (size_t i = 0; i < sizeof layer_list / sizeof *layer_list; i++) layer_rows_of(t, l, &layer_list[i]);
    layer_products_rows(t, l);
    stat3 r = part_time(t, REPLAY_2, reduces, two->count, 1e3);
    row("layer", "its 4 all-reduces, waiting included", r, "ms", r.median / case_time(t, LAYER_2, 1e3).median,
        "layer TP=2");
    row("layer", "all-reduces in one TP=2 step (ledger)", exactly((double)l->all_reduces), "calls", 0, NULL);
    row("layer", "minor page faults in one TP=2 step", exactly(l->faults), "faults", 0, NULL);
}

static mt_status layer_measure(worker *w) {
    layer_item *l = w->item;
    bench_case cases[LAYER_CASES] = {[GEMMS_1] = {run_products, GEMMS_1, 1, 0},
                                     [GEMMS_2] = {run_products, GEMMS_2, 0, 0},
                                     [GEMMS_1_BF16] = {run_products, GEMMS_1_BF16, 1, 0},
                                     [GEMMS_2_BF16] = {run_products, GEMMS_2_BF16, 0, 0},
                                     [LAYER_1] = {run_layer, LAYER_1, 1, 0},
                                     [LAYER_1_THREADS_2] = {run_layer, LAYER_1_THREADS_2, 1, 0},
                                     [LAYER_1_DROPOUT] = {run_layer, LAYER_1_DROPOUT, 1, 0},
                                     [LAYER_2] = {run_layer, LAYER_2, 0, 0},
                                     [LAYER_2_DROPOUT] = {run_layer, LAYER_2_DROPOUT, 0, 0},
                                     [LAYER_1_BF16] = {run_layer, LAYER_1_BF16, 1, 0},
                                     [LAYER_1_BF16_THREADS_2] = {run_layer, LAYER_1_BF16_THREADS_2, 1, 0},
                                     [LAYER_2_BF16] = {run_layer, LAYER_2_BF16, 0, 0},
                                     [REPLAY_2] = {run_replay, GEMMS_2, 0, MAX_PARTS}};
    MT_TRY(layer_item_create(w, l));
    MT_TRY(measure(w, cases, LAYER_CASES));
    MT_TRY(layer_count(w));
    if (rank_of(w) == 0) layer_rows(w->team, l);
    return MT_SUCCESS;
}

static mt_status item_layer(worker *w) {
    layer_item *l = calloc(1, sizeof *l);
    mt_status status = MT_ERR_MEMORY;
    if (!l) return status;
    w->item = l;
    status = layer_measure(w);
    layer_item_destroy(l);
    free(l);
    return status;
}

/* ---- item composed: blocks made of the functions for authors of blocks, beside built-in ones --------------------- */

/* The cases of one split. The blocks are parallel ones, y = x + attention(n) + MLP(n) with n = norm(x). */
enum { BUILT_IN_MLP, OWN_MLP, BUILT_IN_BLOCK, OWN_BLOCK, BLOCKS };
enum { QKV, GATE, FC1, INPUTS, PROJ = 0, FC2, OUTPUTS }; /* the layers of OWN_BLOCK; OWN_MLP has FC1 and FC2 */

#define WIDE_FFN (4 * HIDDEN + HIDDEN / 2) /* BUILT_IN_BLOCK has no gate: so its GEMMs have as many FLOP */

typedef struct one_block {
    place place;
    mt_params *params;
    mt_mlp mlp; /* built in, and attention */
    mt_self_attention attention;
    mt_norm_layer norm;
    mt_qk_norm qk_norm;
    mt_column_parallel_linear in[INPUTS];
    mt_row_parallel_linear out[OUTPUTS];
    mt_tensor x, y, dy, dx;
    int kind;
    size_t kept, peak; /* bytes of the arena after forward, and at most in a step */
} one_block;

static mt_status own_layers(one_block *m) {
    mt_context *ctx = m->place.ctx;
    mt_norm_layer_desc per_head = {.features = HEAD, .kind = MT_RMS_NORM};
    mt_linear_desc qkv = {.in_features = HIDDEN, .out_features = 3 * HIDDEN, .unit = 3 * HEAD};
    mt_linear_desc gate = {.in_features = HIDDEN, .out_features = HIDDEN, .unit = HEAD}, proj = gate;
    mt_linear_desc fc1 = {.in_features = HIDDEN, .out_features = 4 * HIDDEN};
    mt_linear_desc fc2 = {.in_features = 4 * HIDDEN, .out_features = HIDDEN, .input_is_parallel = 1};
    proj.input_is_parallel = 1;
    MT_TRY(mt_column_parallel_linear_create(ctx, m->params, "fc1", &fc1, &m->in[FC1]));
    MT_TRY(mt_row_parallel_linear_create(ctx, m->params, "fc2", &fc2, &m->out[FC2]));
    if (m->kind == OWN_MLP) return MT_SUCCESS;
    MT_TRY(mt_column_parallel_linear_create(ctx, m->params, "qkv", &qkv, &m->in[QKV]));
    MT_TRY(mt_qk_norm_create(ctx, m->params, "attention", &per_head, &m->in[QKV], &m->qk_norm));
    MT_TRY(mt_column_parallel_linear_create(ctx, m->params, "gate", &gate, &m->in[GATE]));
    return mt_row_parallel_linear_create(ctx, m->params, "proj", &proj, &m->out[PROJ]);
}

static mt_status block_layers(one_block *m) {
    mt_context *ctx = m->place.ctx;
    mt_norm_layer_desc norm = {.features = HIDDEN};
    mt_mlp_desc mlp = {.hidden = HIDDEN, .ffn = m->kind == BUILT_IN_BLOCK ? WIDE_FFN : 0};
    mt_self_attention_desc attention = {.hidden = HIDDEN, .heads = HEADS};
    if (m->kind >= BUILT_IN_BLOCK) MT_TRY(mt_norm_layer_create(ctx, m->params, "norm", &norm, &m->norm));
    if (m->kind % 2) return own_layers(m);
    if (m->kind == BUILT_IN_BLOCK)
        MT_TRY(mt_self_attention_create(ctx, m->params, "attention", &attention, &m->attention));
    return mt_mlp_create(ctx, m->params, "mlp", &mlp, &m->mlp);
}

static mt_status block_create(worker *w, int split, int kind, one_block *m) {
    mt_tensor *const views[] = {&m->x, &m->y, &m->dy, &m->dx};
    mt_random at = {.seed = 3, .global_cols = HIDDEN};
    MT_TRY(place_create(w, split_of(split), (mt_context_desc){.threads = 1}, &m->place));
    MT_TRY(mt_params_create(m->place.ctx, &m->place.grid, &m->params));
    m->kind = kind;
    MT_TRY(block_layers(m));
    MT_TRY(mt_params_init(m->place.ctx, m->params, 1234));
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        MT_TRY(mt_arena_tensor(m->place.ctx, MT_F32, TOKENS, HIDDEN, views[i]));
        at.subsequence = i;
        MT_TRY(mt_random_normal(m->place.ctx, *views[i], 1.0f, at));
    }
    return MT_SUCCESS;
}

static void block_destroy(one_block *m) {
    mt_params_destroy(m->params);
    place_destroy(&m->place);
}

static mt_status step_built_in_mlp(one_block *m, size_t mark) {
    mt_context *ctx = m->place.ctx;
    mt_mlp_saved saved;
    MT_TRY(mt_mlp_forward(ctx, &m->mlp, m->x, m->y, &saved));
    m->kept = mt_arena_mark(ctx) - mark;
    return mt_mlp_backward(ctx, &m->mlp, m->dy, m->dx, &saved);
}

static mt_status step_own_mlp(one_block *m, size_t mark) {
    mt_context *ctx = m->place.ctx;
    mt_linear_saved in, out;
    mt_tensor h, act, dh, dact;
    MT_TRY(mt_parallel_linear_tensors(ctx, &m->in[FC1], 1, m->x, &h));
    MT_TRY(mt_parallel_linear_tensors(ctx, &m->out[FC2], 1, m->y, &act));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, &m->in[FC1], 1, &m->x, &h, &in));
    MT_TRY(mt_column_parallel_activation_forward(ctx, &m->in[FC1], MT_GELU_TANH, h, act));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, &m->out[FC2], 1, &act, &m->y, &out));
    m->kept = mt_arena_mark(ctx) - mark;
    MT_TRY(mt_parallel_linear_tensors(ctx, &m->in[FC1], 1, m->dx, &dh));
    MT_TRY(mt_parallel_linear_tensors(ctx, &m->out[FC2], 1, m->dy, &dact));
    MT_TRY(mt_parallel_linear_backward_shared(ctx, &m->out[FC2], 1, &m->dy, &dact, &out));
    MT_TRY(mt_column_parallel_activation_backward(ctx, &m->in[FC1], MT_GELU_TANH, h, dact, dh));
    return mt_parallel_linear_backward_shared(ctx, &m->in[FC1], 1, &dh, &m->dx, &in);
}

static mt_status step_built_in_block(one_block *m, size_t mark) {
    const mt_batch batch = {.sequences = 1, .seq = TOKENS};
    mt_context *ctx = m->place.ctx;
    mt_norm_saved norm;
    mt_self_attention_saved attention;
    mt_mlp_saved mlp;
    mt_tensor n, z, dn;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &n));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &z));
    MT_TRY(mt_norm_layer_forward(ctx, &m->norm, m->x, n, &norm));
    MT_TRY(mt_self_attention_forward(ctx, &m->attention, &batch, n, m->y, &attention));
    MT_TRY(mt_mlp_forward(ctx, &m->mlp, n, z, &mlp));
    MT_TRY(mt_add(ctx, m->y, z, m->y));
    MT_TRY(mt_add(ctx, m->x, m->y, m->y));
    m->kept = mt_arena_mark(ctx) - mark;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &dn));
    MT_TRY(mt_mlp_backward(ctx, &m->mlp, m->dy, dn, &mlp));
    MT_TRY(mt_self_attention_backward(ctx, &m->attention, m->dy, m->dx, &attention));
    MT_TRY(mt_add(ctx, m->dx, dn, m->dx));
    return mt_norm_layer_backward(ctx, &m->norm, m->dx, m->dy, m->dx, &norm);
}

typedef struct own_saved {
    mt_norm_saved norm;
    mt_qk_norm_saved qk_norm;
    mt_linear_saved in, out[OUTPUTS];
    mt_attention_desc heads;
    mt_tensor h[INPUTS], core, lse;
} own_saved;

/* Forward and backward of the block of examples/02_custom_block.c. */
static mt_status own_forward(one_block *m, own_saved *s) {
    const mt_batch batch = {.sequences = 1, .seq = TOKENS};
    mt_context *ctx = m->place.ctx;
    mt_tensor n, z[OUTPUTS];
    s->heads = mt_core_attention_desc(&m->in[QKV], HEAD, &batch);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &n));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->heads.groups, TOKENS, &s->lse));
    MT_TRY(mt_parallel_linear_tensors(ctx, m->in, INPUTS, m->x, s->h));
    MT_TRY(mt_parallel_linear_tensors(ctx, &m->out[PROJ], 1, m->y, &s->core));
    MT_TRY(mt_parallel_linear_tensors(ctx, m->out, OUTPUTS, m->y, z));
    MT_TRY(mt_norm_layer_forward(ctx, &m->norm, m->x, n, &s->norm));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, m->in, INPUTS, &n, s->h, &s->in));
    MT_TRY(mt_qk_norm_forward(ctx, &m->qk_norm, s->h[QKV], &s->qk_norm));
    MT_TRY(mt_core_attention_forward(ctx, &s->heads, m->in[QKV].weight->shards, s->h[QKV], s->core, s->lse));
    MT_TRY(mt_sigmoid_gate_forward(ctx, s->h[GATE], s->core, z[PROJ]));
    MT_TRY(mt_column_parallel_activation_forward(ctx, &m->in[FC1], MT_SQUARED_RELU, s->h[FC1], z[FC2]));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, m->out, OUTPUTS, z, &m->y, s->out));
    return mt_add(ctx, m->x, m->y, m->y);
}

static mt_status own_backward(one_block *m, const own_saved *s) {
    mt_context *ctx = m->place.ctx;
    mt_tensor dh[INPUTS], dz[OUTPUTS];
    MT_TRY(mt_parallel_linear_tensors(ctx, m->in, INPUTS, m->dx, dh));
    MT_TRY(mt_parallel_linear_tensors(ctx, m->out, OUTPUTS, m->dy, dz));
    MT_TRY(mt_parallel_linear_backward_shared(ctx, m->out, OUTPUTS, &m->dy, dz, s->out));
    MT_TRY(mt_sigmoid_gate_backward(ctx, s->h[GATE], s->core, dz[PROJ], dh[GATE], dz[PROJ]));
    MT_TRY(mt_core_attention_backward(ctx, &s->heads, m->in[QKV].weight->shards, s->h[QKV], s->core, s->lse, dz[PROJ],
                                      dh[QKV]));
    MT_TRY(mt_qk_norm_backward(ctx, &m->qk_norm, dh[QKV], &s->qk_norm));
    MT_TRY(mt_column_parallel_activation_backward(ctx, &m->in[FC1], MT_SQUARED_RELU, s->h[FC1], dz[FC2], dh[FC1]));
    MT_TRY(mt_parallel_linear_backward_shared(ctx, m->in, INPUTS, dh, &m->dx, &s->in));
    return mt_norm_layer_backward(ctx, &m->norm, m->dx, m->dy, m->dx, &s->norm);
}

static mt_status step_own_block(one_block *m, size_t mark) {
    own_saved saved;
    MT_TRY(own_forward(m, &saved));
    m->kept = mt_arena_mark(m->place.ctx) - mark;
    return own_backward(m, &saved);
}

static mt_status run_block(worker *w, int arg) {
    static mt_status (*const steps[])(one_block * m, size_t mark) = {step_built_in_mlp, step_own_mlp,
                                                                     step_built_in_block, step_own_block};
    one_block *m = (one_block *)w->item + arg;
    size_t mark = mt_arena_mark(m->place.ctx);
    mt_arena_reset_peak(m->place.ctx);
    MT_TRY(steps[m->kind](m, mark));
    m->peak = mt_arena_peak(m->place.ctx) - mark;
    mt_arena_release(m->place.ctx, mark);
    return MT_SUCCESS;
}

static void composed_rows(const team *t, const one_block *m) {
    static const char *const names[] = {"mt_mlp", "composed MLP", "built-in block", "composed block"};
    for (int c = 1; c < 2 * BLOCKS; c += 2) {
        const char *split = c < BLOCKS ? "TP=1" : "TP=2";
        char name[64], time[64], bytes[64];
        snprintf(time, sizeof time, "time of %s", names[m[c].kind - 1]);
        snprintf(bytes, sizeof bytes, "bytes of %s", names[m[c].kind - 1]);
        snprintf(name, sizeof name, "%s, %s", names[m[c].kind - 1], split);
        row("composed", name, case_time(t, c - 1, 1e3), "ms", 0, NULL);
        snprintf(name, sizeof name, "%s, %s", names[m[c].kind], split);
        row("composed", name, case_time(t, c, 1e3), "ms", case_ratio(t, c, c - 1, 1), time);
        row("composed", "  kept from forward to backward", exactly((double)m[c].kept / (1 << 20)), "MiB",
            (double)m[c].kept / (double)m[c - 1].kept, bytes);
        row("composed", "  arena at most", exactly((double)m[c].peak / (1 << 20)), "MiB",
            (double)m[c].peak / (double)m[c - 1].peak, bytes);
    }
}

static mt_status composed_measure(worker *w) {
    one_block *m = w->item;
    bench_case cases[2 * BLOCKS];
    for (int c = 0; c < 2 * BLOCKS; c++) {
        int alone = c < BLOCKS;
        cases[c] = (bench_case){run_block, c, alone, 0};
        if (!alone || rank_of(w) == 0) MT_TRY(block_create(w, alone ? 1 : RANKS, c % BLOCKS, &m[c]));
    }
    MT_TRY(measure(w, cases, 2 * BLOCKS));
    if (rank_of(w) == 0) composed_rows(w->team, m);
    return MT_SUCCESS;
}

static mt_status item_composed(worker *w) {
    one_block *m = calloc(2 * BLOCKS, sizeof *m);
    mt_status status = MT_ERR_MEMORY;
    if (!m) return status;
    w->item = m;
    status = composed_measure(w);
    for (int c = 0; c < 2 * BLOCKS; c++) block_destroy(&m[c]);
    free(m);
    return status;
}

/* ---- item checking ----------------------------------------------------------------------------------------------- */

static const layer_dims checked_sizes[] = {{TOKENS, HIDDEN}, {256, 256}};
enum { CHECKS = 3, CHECKED_SIZES = 2, CHECKED = CHECKS * CHECKED_SIZES };

static mt_status run_checked(worker *w, int arg) { return layer_step((one_layer *)w->item + arg); }

static void checked_rows(const team *t) {
    for (int c = 0; c < CHECKED; c++) {
        const layer_dims *size = &checked_sizes[c / CHECKS];
        int off = c - c % CHECKS;
        char name[64];
        snprintf(name, sizeof name, "layer, hidden %d, %d tokens, check %d", (int)size->hidden, (int)size->tokens,
                 c % CHECKS);
        row("checking", name, case_time(t, c, 1e3), "ms", case_ratio(t, c, off, 1), c == off ? NULL : "check 0");
    }
}

static mt_status item_checking(worker *w) {
    one_layer layers[CHECKED];
    bench_case cases[CHECKED];
    mt_status status = MT_SUCCESS;
    memset(layers, 0, sizeof layers);
    w->item = layers;
    for (int c = 0; c < CHECKED && status == MT_SUCCESS; c++) {
        mt_context_desc where = {.threads = 1, .check = c % CHECKS};
        cases[c] = (bench_case){run_checked, c, 0, 0};
        status = layer_create_on(w, RANKS, where, checked_sizes[c / CHECKS], 0, MT_F32, &layers[c]);
    }
    if (status == MT_SUCCESS) status = measure(w, cases, CHECKED);
    if (status == MT_SUCCESS && rank_of(w) == 0) checked_rows(w->team);
    for (int c = 0; c < CHECKED; c++) layer_destroy(&layers[c]);
    w->item = NULL;
    return status;
}

/* ---- item breakdown ---------------------------------------------------------------------------------------------- */

enum { BREAK_LAYER, BREAK_REPLAY, BREAK_PEAK, BREAK_MEMCPY, BREAK_CASES };
#define BREAK_BYTES                                                                                                    \
    ((size_t)12 << 20) /* that a memcpy reads, and writes: as many as an inner activation of the MLP has */

typedef struct breakdown_item {
    ops ops;
    one_layer layer;
    char *from, *to; /* of the memcpy */
} breakdown_item;

static mt_status run_breakdown_layer(worker *w, int arg) {
    (void)arg;
    return layer_step(&((breakdown_item *)w->item)->layer);
}
static mt_status run_breakdown_replay(worker *w, int arg) {
    (void)arg;
    return ops_run(&((breakdown_item *)w->item)->ops, KINDS, w->parts);
}

static mt_status run_breakdown_memcpy(worker *w, int arg) {
    breakdown_item *b = w->item;
    (void)arg;
    memcpy(b->to, b->from, BREAK_BYTES);
    __asm__ volatile("" : : "r"(b->to) : "memory");
    return MT_SUCCESS;
}

/* The rate of an operator compares with the peak of products or with a memcpy, on both ranks at once. */
static void breakdown_op_row(const team *t, const op *o, int index, double all) {
    int chosen[MAX_PARTS] = {0}, product = o->flops > 0;
    int limit = product ? BREAK_PEAK : BREAK_MEMCPY;
    double amount = product ? o->flops : o->bytes, limit_amount = product ? PEAK_FLOPS : 2.0 * BREAK_BYTES, rate;
    chosen[index] = 1;
    stat3 s = part_time(t, BREAK_REPLAY, chosen, MAX_PARTS, 1e3);
    rate = 1e-6 * amount / s.median;
    row("breakdown", o->name, s, "ms", s.median / all, "layer");
    row("breakdown", "  rate", exactly(rate), product ? "GFLOP/s" : "GB/s",
        rate / case_rate(t, limit, 1e-9 * limit_amount).median, product ? "peak" : "memcpy's GB/s");
}

static void breakdown_kind_row(const team *t, const ops *s, int kind, double all) {
    char name[64];
    int chosen[MAX_PARTS] = {0};
    for (int i = 0; i < s->count; i++) chosen[i] = kind == KINDS || s->list[i].kind == kind;
    stat3 x = part_time(t, BREAK_REPLAY, chosen, s->count, 1e3);
    snprintf(name, sizeof name, "all %s", kind == KINDS ? "operators" : kind_names[kind]);
    row("breakdown", name, x, "ms", x.median / all, "layer");
}

static void breakdown_rows(const team *t, const breakdown_item *b) {
    stat3 all = case_time(t, BREAK_LAYER, 1e3);
    for (int i = 0; i < b->ops.count; i++) breakdown_op_row(t, &b->ops.list[i], i, all.median);
    for (int k = 0; k <= KINDS; k++) breakdown_kind_row(t, &b->ops, k, all.median);
    row("breakdown", "the layer itself", all, "ms", 0, NULL);
    row("breakdown", "peak: multiply-adds in registers", case_rate(t, BREAK_PEAK, 1e-9 * PEAK_FLOPS), "GFLOP/s", 0,
        NULL);
    row("breakdown", "memcpy of 12 MiB", case_rate(t, BREAK_MEMCPY, 2e-9 * BREAK_BYTES), "GB/s", 0, NULL);
}

static mt_status breakdown_measure(worker *w) {
    breakdown_item *b = w->item;
    bench_case cases[BREAK_CASES] = {[BREAK_LAYER] = {run_breakdown_layer, 0, 0, 0},
                                     [BREAK_REPLAY] = {run_breakdown_replay, 0, 0, MAX_PARTS},
                                     [BREAK_PEAK] = {run_peak, 0, 0, 0},
                                     [BREAK_MEMCPY] = {run_breakdown_memcpy, 0, 0, 0}};
    void *from, *to;
    MT_TRY(ops_create(w, RANKS, MT_F32, &b->ops));
    MT_TRY(layer_create(w, RANKS, 1, 0, MT_F32, &b->layer));
    MT_TRY(mt_arena_alloc(w->ctx, BREAK_BYTES, &from));
    MT_TRY(mt_arena_alloc(w->ctx, BREAK_BYTES, &to));
    memset(from, 0, BREAK_BYTES);
    b->from = from;
    b->to = to;
    MT_TRY(measure(w, cases, BREAK_CASES));
    if (rank_of(w) == 0) breakdown_rows(w->team, b);
    return MT_SUCCESS;
}

static mt_status item_breakdown(worker *w) {
    breakdown_item b = {0};
    w->item = &b;
    mt_status status = breakdown_measure(w);
    layer_destroy(&b.layer);
    ops_destroy(&b.ops);
    return status;
}

/* ---- item gpt2 --------------------------------------------------------------------------------------------------- */

typedef struct gpt_size {
    int64_t layers, hidden, heads, vocab, max_seq, seq, batch;
    int64_t micro; /* sequences of a micro-batch; 0: as many as the rank has */
    int sequence_parallel;
    mt_recompute recompute;
    mt_dtype dtype;
} gpt_size;

static const gpt_size gpt2_124m = {12, HIDDEN, HEADS, GPT_VOCAB, 1024, 64, 4, 0, 0, MT_RECOMPUTE_NONE, MT_F32};

typedef struct gpt_model {
    const gpt_size *size;
    place place;
    mt_params *params;
    mt_gpt gpt;
    mt_gpt_saved saved[RANKS]; /* of the slots of a pipeline of RANKS stages; without a pipeline the first one */
    mt_optimizer optimizer;
    mt_tensor loss;
    int64_t first, count, micro; /* this rank's first sequence and number of sequences; sequences of a micro-batch */
    uint64_t step;
    const int32_t *tokens;
    int created;
    int eager; /* 1: mt_params_zero_grad instead of mt_params_zero_grad_lazy */
} gpt_model;

#define GPT_TOKENS 4096                    /* enough for every size */
#define GPT_LEAST_VOCAB 2048               /* the smallest vocabulary */
static int32_t gpt_tokens[GPT_TOKENS + 1]; /* set by main */

/* Creates the model in m->place, whose context is on the CPU or the meta device. */
static mt_status gpt_build(gpt_model *m, const gpt_size *size) {
    mt_gpt_desc d = {.vocab = size->vocab,
                     .layers = size->layers,
                     .max_seq = size->max_seq,
                     .layer = {.hidden = size->hidden,
                               .heads = size->heads,
                               .sequence_parallel = size->sequence_parallel,
                               .recompute = size->recompute}};
    mt_optimizer_desc adamw = {.beta2 = 0.95f, .weight_decay = 0.1f};
    mt_context *ctx = m->place.ctx;
    int invariant = mt_context_invariant(ctx);
    m->created = 1;
    m->size = size;
    m->count = size->batch / m->place.grid.dp_size;
    m->first = m->place.grid.dp_rank * m->count;
    m->micro = invariant ? mt_invariant_micro_batch(invariant, size->batch) : size->micro ? size->micro : m->count;
    m->tokens = gpt_tokens;
    MT_TRY(mt_params_create(ctx, &m->place.grid, &m->params));
    MT_TRY(mt_params_set_dtype(ctx, m->params, size->dtype));
    MT_TRY(mt_gpt_create(ctx, m->params, &d, &m->gpt));
    MT_TRY(mt_params_init(ctx, m->params, 1234));
    MT_TRY(mt_optimizer_create(ctx, m->params, &adamw, &m->optimizer));
    for (int i = 0; i < RANKS; i++) MT_TRY(mt_gpt_saved_create(ctx, &m->gpt, &m->saved[i]));
    return mt_arena_tensor(ctx, MT_F32, 1, m->micro * size->seq, &m->loss);
}

static void gpt_destroy(gpt_model *m) {
    for (int i = 0; i < RANKS && m->created; i++) mt_gpt_saved_destroy(&m->saved[i]);
    if (m->created) mt_optimizer_destroy(m->place.ctx, &m->optimizer);
    mt_params_destroy(m->params);
    place_destroy(&m->place);
}

static mt_batch gpt_batch(const gpt_model *m, int64_t first) {
    return (mt_batch){.sequences = m->micro,
                      .seq = m->size->seq,
                      .first_sequence = first,
                      .step = m->step,
                      .backward_scale = 1.0f / (float)(m->size->batch * m->size->seq)};
}

static mt_status gpt_micro_batch(gpt_model *m, int64_t first) {
    mt_context *ctx = m->place.ctx;
    mt_batch batch = gpt_batch(m, first);
    const int32_t *ids = m->tokens + first * m->size->seq;
    size_t mark = mt_arena_mark(ctx);
    MT_TRY(mt_gpt_forward(ctx, &m->gpt, &batch, ids, ids + 1, m->loss, &m->saved[0]));
    MT_TRY(mt_gpt_backward(ctx, &m->gpt, batch.backward_scale, &m->saved[0]));
    mt_arena_release(ctx, mark);
    return mt_accumulate_gradients(ctx, m->params);
}

static mt_status gpt_stage_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    gpt_model *m = user;
    int64_t first = m->first + a->micro_batch * m->micro;
    mt_batch batch = gpt_batch(m, first);
    const int32_t *ids = m->tokens + first * m->size->seq;
    return mt_gpt_stage_forward(ctx, &m->gpt, &batch, ids, ids + 1, input, output, m->loss, &m->saved[a->slot]);
}

static mt_status gpt_stage_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor dout, mt_tensor din) {
    gpt_model *m = user;
    return mt_gpt_stage_backward(ctx, &m->gpt, gpt_batch(m, 0).backward_scale, dout, din, &m->saved[a->slot]);
}

/* Runs the micro-batches of a step through a pipeline of RANKS stages. */
static mt_status gpt_pipeline(gpt_model *m) {
    enum { MOST = 64 };
    mt_action actions[MOST];
    const mt_grid *grid = &m->place.grid;
    mt_pipeline_stage stage = {.rows = m->micro * m->size->seq,
                               .cols = m->size->hidden,
                               .forward = gpt_stage_forward,
                               .backward = gpt_stage_backward,
                               .user = m};
    int count = 0;
    MT_TRY(mt_pipeline_schedule(MT_SCHEDULE_1F1B, grid->pp_size, grid->pp_rank, (int)(m->count / m->micro), actions,
                                MOST, &count));
    return mt_pipeline_run(m->place.ctx, grid, &stage, actions, count);
}

static mt_status gpt_step(gpt_model *m) {
    mt_context *ctx = m->place.ctx;
    float norm = 0;
    int stages = m->place.grid.pp_size;
    m->step++;
    MT_TRY((m->eager ? mt_params_zero_grad : mt_params_zero_grad_lazy)(ctx, m->params));
    for (int64_t i = 0; i < m->count && stages == 1; i += m->micro) MT_TRY(gpt_micro_batch(m, m->first + i));
    if (stages > 1) MT_TRY(gpt_pipeline(m));
    MT_TRY(mt_sync_gradients(ctx, m->params));
    MT_TRY(mt_grad_norm(ctx, m->params, &norm));
    return mt_optimizer_step(ctx, &m->optimizer, 1e-4f, mt_clip_coefficient(norm, 1.0f));
}

/* Runs one step of a rank on the meta device. *arena becomes the arena that it needs, in bytes. trace is optional: it
   becomes the trace of the step. */
static mt_status gpt_plan(mt_grid_desc shape, int rank, mt_context_desc where, const gpt_size *size, size_t *arena,
                          mt_trace *trace) {
    gpt_model m = {0};
    mt_trace set_up = {0};
    mt_status status = place_plan(shape, rank, where, &m.place);
    if (status == MT_SUCCESS) status = gpt_build(&m, size);
    if (status == MT_SUCCESS) status = mt_context_take_trace(m.place.ctx, &set_up);
    if (status == MT_SUCCESS) status = gpt_step(&m);
    if (status == MT_SUCCESS) *arena = mt_arena_peak(m.place.ctx);
    if (status == MT_SUCCESS && trace) status = mt_context_take_trace(m.place.ctx, trace);
    if (status != MT_SUCCESS) fprintf(stderr, "bench: plan of a step: %s\n", mt_last_error(m.place.ctx));
    mt_trace_free(&set_up);
    gpt_destroy(&m);
    return status;
}

static mt_status gpt_create_on(worker *w, gpt_model *m, mt_grid_desc shape, mt_context_desc where,
                               const gpt_size *size) {
    int rank = grid_ranks(shape) > 1 ? rank_of(w) : 0;
    MT_TRY(gpt_plan(shape, rank, where, size, &where.arena_bytes, NULL));
    MT_TRY(place_create(w, shape, where, &m->place));
    return gpt_build(m, size);
}

static mt_status gpt_create(worker *w, gpt_model *m, int tp, int data, int invariant, const gpt_size *size) {
    return gpt_create_on(w, m, (mt_grid_desc){.tp = tp, .dp = data}, (mt_context_desc){.invariant = invariant}, size);
}

/* -- the products of a step alone -- */

/* The products of a trace, in its order, on matrices that follow each other in memory: a step reads its weights and
   gradients from memory, not from a cache. */
typedef struct replay {
    mt_trace trace;
    int64_t tokens; /* of this rank: a weight gradient is a product over them */
    float *memory;  /* for A, B and C, `part` floats each */
    size_t part, at_b, at_c;
} replay;

/* Allocates the memory for the products of r->trace. */
static mt_status replay_create(worker *w, int64_t tokens, replay *r) {
    int64_t most = 0;
    void *memory;
    r->tokens = tokens;
    for (size_t i = 0; i < r->trace.count; i++) {
        const mt_trace_entry *e = &r->trace.entries[i];
        if (e->work == MT_WORK_GEMM) most = mt_max(most, mt_max(e->m * e->k, mt_max(e->k, e->m) * e->n));
    }
    r->part = (size_t)most;
    MT_TRY(mt_context_alloc(w->ctx, 3 * r->part * sizeof(float), &memory));
    r->memory = memory;
    memset(memory, 0x3c, 3 * r->part * sizeof(float)); /* small numbers, also in bf16 */
    return MT_SUCCESS;
}

static void replay_destroy(worker *w, replay *r) {
    if (r->memory) mt_context_free(w->ctx, r->memory, 3 * r->part * sizeof(float));
    mt_trace_free(&r->trace);
}

/* Returns the next `count` floats of a part. */
static float *replay_take(const replay *r, int part, size_t *at, int64_t count) {
    if (*at + (size_t)count > r->part) *at = 0;
    *at += (size_t)count;
    return r->memory + (size_t)part * r->part + *at - (size_t)count;
}

/* The trace does not tell products A B^T of forward from A B of backward: those before the first weight gradient are of
   forward. */
static mt_status replay_run(worker *w, replay *r) {
    int backward = 0;
    for (size_t i = 0; i < r->trace.count; i++) {
        const mt_trace_entry *e = &r->trace.entries[i];
        int gradient = e->k == r->tokens;
        mt_tensor a, b, c;
        if (e->work != MT_WORK_GEMM) continue;
        backward |= gradient;
        a = mt_tensor_make(r->memory, e->dtype, gradient ? e->k : e->m, gradient ? e->m : e->k);
        b = mt_tensor_make(replay_take(r, 1, &r->at_b, e->n * e->k), e->dtype, backward ? e->k : e->n,
                           backward ? e->n : e->k);
        c = mt_tensor_make(replay_take(r, 2, &r->at_c, e->m * e->n), gradient ? MT_F32 : e->dtype, e->m, e->n);
        MT_TRY(mt_gemm(w->ctx, gradient ? MT_TRANS : MT_NO_TRANS, backward ? MT_NO_TRANS : MT_TRANS, 1, a, b,
                       gradient ? 1.0f : 0.0f, c));
    }
    return MT_SUCCESS;
}

static double replay_flops(const replay *r) {
    double flops = 0;
    for (size_t i = 0; i < r->trace.count; i++)
        if (r->trace.entries[i].work == MT_WORK_GEMM) flops += r->trace.entries[i].flops;
    return flops;
}

/* -- the item -- */

/* Case GPT_CASES + i has the products of case i alone. Those of GPT_TP2 stand for GPT_TP1_THREADS_2, too. */
enum { GPT_TP2, GPT_TP1, GPT_DP2, GPT_TP1_THREADS_2, GPT_CASES };

typedef struct gpt_item {
    gpt_size size;
    gpt_model models[GPT_CASES];
    replay products[GPT_CASES];
    double faults;
} gpt_item;

static mt_status run_gpt(worker *w, int arg) { return gpt_step(&((gpt_item *)w->item)->models[arg]); }
static mt_status run_gpt_products(worker *w, int arg) { return replay_run(w, &((gpt_item *)w->item)->products[arg]); }

static mt_status gpt_count_faults(worker *w) {
    gpt_item *g = w->item;
    long before = minor_faults();
    MT_TRY(gpt_step(&g->models[GPT_TP2]));
    g->faults = (double)(minor_faults() - before);
    return MT_SUCCESS;
}

/* The model of a case, the case of its products, and the ranks of both. */
static const struct gpt_case {
    const char *name;
    int tp, dp, threads, products;
} gpt_cases[GPT_CASES] = {[GPT_TP2] = {"TP=2", RANKS, 1, 1, GPT_TP2},
                          [GPT_TP1] = {"TP=1", 1, 1, 1, GPT_TP1},
                          [GPT_DP2] = {"TP=1 x DP=2", 1, RANKS, 1, GPT_DP2},
                          [GPT_TP1_THREADS_2] = {"TP=1, 2 threads", 1, 1, RANKS, GPT_TP2}};

static int gpt_is_alone(int c) { return gpt_cases[c].tp * gpt_cases[c].dp == 1; }

/* GPT_DP2 needs a sequence for each rank. */
static int gpt_is_left_out(const gpt_item *g, int c) { return g->size.batch % gpt_cases[c].dp != 0; }

/* place[c] is the place of case c in the rounds, place[GPT_CASES + c] that of its products. */
static void gpt_rows(const team *t, const gpt_item *g, const int *place) {
    const gpt_size *size = &g->size;
    double tokens = (double)(size->batch * size->seq), layers = (double)size->layers;
    double flops = 6 * (double)mt_params_global_elements(g->models[GPT_TP2].params) * tokens +
                   layers * 3 * attention_flops((double)size->batch, (double)size->seq, HIDDEN);
    char name[64];
    for (int c = 0; c < GPT_CASES; c++) {
        const struct gpt_case *x = &gpt_cases[c];
        int products = place[GPT_CASES + x->products];
        double ranks = gpt_cases[x->products].tp * gpt_cases[x->products].dp;
        double alone = ranks * replay_flops(&g->products[x->products]);
        if (gpt_is_left_out(g, c)) continue;
        snprintf(name, sizeof name, "GPT-2 124M step, %lld x %lld, %s, %s", (long long)size->batch,
                 (long long)size->seq, mt_dtype_name(size->dtype), x->name);
        row("gpt2", name, case_time(t, place[c], 1e3), "ms", case_ratio(t, place[GPT_TP1], place[c], 1),
            c == GPT_TP1 ? NULL : "speed of TP=1");
        row("gpt2", "  tokens", case_rate(t, place[c], tokens), "tokens/s", 0, NULL);
        row("gpt2", c == GPT_TP1 ? "  1 core" : "  2 cores together", case_rate(t, place[c], 1e-9 * flops), "GFLOP/s",
            case_ratio(t, products, place[c], flops / alone), "its products alone");
        row("gpt2", "  its products alone", case_rate(t, products, 1e-9 * alone), "GFLOP/s", 0, NULL);
    }
    row("gpt2", "minor page faults in one TP=2 step", exactly(g->faults), "faults", 0, NULL);
}

/* Creates the model of a case, and its products. Ranks that do not take part do nothing. */
static mt_status gpt_case_create(worker *w, gpt_item *g, int c) {
    const struct gpt_case *x = &gpt_cases[c];
    mt_grid_desc shape = {.tp = x->tp, .dp = x->dp};
    mt_context_desc where = {.threads = x->threads};
    int alone = gpt_is_alone(c);
    size_t arena;
    if (alone && rank_of(w) != 0) return MT_SUCCESS;
    MT_TRY(gpt_create_on(w, &g->models[c], shape, where, &g->size));
    if (x->threads > 1) pin_threads(g->models[c].place.ctx);
    if (x->products != c) return MT_SUCCESS;
    MT_TRY(gpt_plan(shape, alone ? 0 : rank_of(w), where, &g->size, &arena, &g->products[c].trace));
    return replay_create(w, g->size.batch / x->dp * g->size.seq, &g->products[c]);
}

static mt_status gpt_measure(worker *w) {
    gpt_item *g = w->item;
    bench_case cases[2 * GPT_CASES] = {{0}};
    int place[2 * GPT_CASES] = {0}, count = 0;
    for (int c = 0; c < GPT_CASES; c++) {
        if (gpt_is_left_out(g, c)) continue;
        MT_TRY(gpt_case_create(w, g, c));
        place[c] = count;
        cases[count++] = (bench_case){run_gpt, c, gpt_is_alone(c), 0};
        if (gpt_cases[c].products != c) continue;
        place[GPT_CASES + c] = count;
        cases[count++] = (bench_case){run_gpt_products, c, gpt_is_alone(c), 0};
    }
    MT_TRY(measure(w, cases, count));
    MT_TRY(gpt_count_faults(w));
    if (rank_of(w) == 0) gpt_rows(w->team, g, place);
    return MT_SUCCESS;
}

static double free_gib(void) {
    double kib = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lf", &kib) == 1) break;
    if (f) fclose(f);
    return kib / (1 << 20);
}

static double free_gib_at_start; /* set by main, so that all ranks decide alike */

/* Returns 1 when there is enough memory for GPT-2; otherwise prints that `what` is left out. */
static int fits(const worker *w, const char *what) {
    if (free_gib_at_start >= GPT_GIB) return 1;
    if (rank_of(w) == 0)
        fprintf(stderr, "bench: %s left out: wants %g GiB, %.1f are free\n", what, GPT_GIB, free_gib_at_start);
    return 0;
}

static mt_status item_gpt(worker *w) {
    static const int64_t batches[][2] = {{4, 64}, {1, 1024}};
    mt_status status = MT_SUCCESS;
    if (!fits(w, "gpt2")) return MT_SUCCESS;
    for (int i = 0; i < 4 && status == MT_SUCCESS; i++) {
        gpt_item g = {.size = gpt2_124m};
        g.size.batch = batches[i / 2][0];
        g.size.seq = batches[i / 2][1];
        g.size.dtype = i % 2 ? MT_BF16 : MT_F32;
        w->item = &g;
        status = gpt_measure(w);
        for (int c = 0; c < GPT_CASES; c++) {
            gpt_destroy(&g.models[c]);
            replay_destroy(w, &g.products[c]);
        }
    }
    return status;
}

/* ---- item inference ---------------------------------------------------------------------------------------------- */

/* An encoder of BERT's shape, without heads: one forward of a sequence of 128 tokens. */
typedef struct encoder_size {
    const char *name;
    int64_t layers, hidden, heads;
    mt_dtype dtype;
} encoder_size;

static const encoder_size encoder_sizes[] = {{"BERT-base, float", 12, 768, 12, MT_F32},
                                             {"BERT-base, bf16", 12, 768, 12, MT_BF16},
                                             {"BERT-large, float", 24, 1024, 16, MT_F32},
                                             {"BERT-large, bf16", 24, 1024, 16, MT_BF16}};
#define ENCODERS (int)(sizeof encoder_sizes / sizeof *encoder_sizes)
enum { ENCODER_SEQ = 128, ENCODER_VOCAB = 30522 };

typedef struct encoder {
    place place;
    mt_params *params;
    mt_language_model model;
    mt_tensor output;
} encoder;

enum { ENCODER_TP2, ENCODER_TP1, ENCODER_CASES };

/* Case ENCODER_CASES + i has the products of case i alone. */
typedef struct encoder_item {
    encoder models[ENCODER_CASES];
    replay products[ENCODER_CASES];
} encoder_item;

static mt_status encoder_build(encoder *e, const encoder_size *size) {
    mt_language_model_desc d = {.vocab = opt->tiny ? GPT_LEAST_VOCAB : ENCODER_VOCAB,
                                .layers = opt->tiny ? 1 : size->layers,
                                .max_seq = 512,
                                .layer = {.hidden = size->hidden,
                                          .heads = size->heads,
                                          .norm.placement = MT_POST_LN,
                                          .activation = MT_GELU_ERF,
                                          .scores.mask = MT_MASK_BIDIRECTIONAL},
                                .is_encoder = 1,
                                .token_types = 2,
                                .embedding_norm = 1};
    mt_context *ctx = e->place.ctx;
    MT_TRY(mt_params_create(ctx, &e->place.grid, &e->params));
    MT_TRY(mt_params_set_dtype(ctx, e->params, size->dtype));
    MT_TRY(mt_language_model_create(ctx, e->params, &d, &e->model));
    MT_TRY(mt_params_init(ctx, e->params, 1234));
    if (!opt->unpacked) MT_TRY(mt_params_pack(ctx, e->params));
    return mt_arena_tensor(ctx, size->dtype, ENCODER_SEQ, size->hidden, &e->output);
}

static mt_status encoder_create(worker *w, int tp, const encoder_size *size, encoder *e) {
    mt_context_desc where = {.threads = 1,
                             .arena_bytes = (size_t)192 << 20}; /* the 16-bit embedding begins as floats */
    MT_TRY(place_create(w, split_of(tp), where, &e->place));
    return encoder_build(e, size);
}

static void encoder_destroy(encoder *e) {
    mt_params_destroy(e->params);
    place_destroy(&e->place);
}

static mt_status encoder_forward(encoder *e) {
    mt_context *ctx = e->place.ctx;
    mt_batch batch = {.sequences = 1, .seq = ENCODER_SEQ};
    size_t mark = mt_arena_mark(ctx);
    MT_TRY(mt_language_model_forward(ctx, &e->model, &batch, gpt_tokens, mt_none(), e->output, NULL));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status run_encoder(worker *w, int arg) { return encoder_forward(&((encoder_item *)w->item)->models[arg]); }
static mt_status run_encoder_products(worker *w, int arg) {
    return replay_run(w, &((encoder_item *)w->item)->products[arg]);
}

/* Makes the products of one forward. */
static mt_status encoder_products(worker *w, int tp, const encoder_size *size, replay *products) {
    encoder e = {0};
    mt_trace set_up = {0};
    mt_status status = place_plan(split_of(tp), tp > 1 ? rank_of(w) : 0, (mt_context_desc){.threads = 1}, &e.place);
    if (status == MT_SUCCESS) status = encoder_build(&e, size);
    if (status == MT_SUCCESS) status = mt_context_take_trace(e.place.ctx, &set_up);
    if (status == MT_SUCCESS) status = encoder_forward(&e);
    if (status == MT_SUCCESS) status = mt_context_take_trace(e.place.ctx, &products->trace);
    mt_trace_free(&set_up);
    encoder_destroy(&e);
    return status == MT_SUCCESS ? replay_create(w, 0, products) : status; /* no weight gradients */
}

/* FLOP of the products: 24 hidden^2 for each token and layer, and the two of attention without a mask. */
static double encoder_flops(const encoder *e) {
    double h = (double)e->model.desc.layer.hidden;
    return (double)e->model.desc.layers * ENCODER_SEQ * (24 * h * h + 4 * ENCODER_SEQ * h);
}

static void encoder_rows(const team *t, const encoder_item *e, const encoder_size *size) {
    for (int c = ENCODER_CASES - 1; c >= 0; c--) {
        int one = c == ENCODER_TP1;
        double flops = encoder_flops(&e->models[c]), alone = (one ? 1 : RANKS) * replay_flops(&e->products[c]);
        char name[64];
        snprintf(name, sizeof name, "%s, TP=%d", size->name, one ? 1 : RANKS);
        row("inference", name, case_time(t, c, 1e3), "ms", case_ratio(t, ENCODER_TP1, c, 1),
            one ? NULL : "speed of TP=1");
        row("inference", one ? "  1 core" : "  2 cores together", case_rate(t, c, 1e-9 * flops), "GFLOP/s",
            case_ratio(t, ENCODER_CASES + c, c, flops / alone), "its products alone");
        row("inference", "  its products alone", case_rate(t, ENCODER_CASES + c, 1e-9 * alone), "GFLOP/s", 0, NULL);
    }
}

static mt_status encoder_measure(worker *w, const encoder_size *size) {
    encoder_item *e = w->item;
    bench_case cases[2 * ENCODER_CASES] = {{0}};
    for (int c = 0; c < ENCODER_CASES; c++) {
        int one = c == ENCODER_TP1, tp = one ? 1 : RANKS;
        cases[c] = (bench_case){run_encoder, c, one, 0};
        cases[ENCODER_CASES + c] = (bench_case){run_encoder_products, c, one, 0};
        if (one && rank_of(w) != 0) continue;
        MT_TRY(encoder_create(w, tp, size, &e->models[c]));
        MT_TRY(encoder_products(w, tp, size, &e->products[c]));
    }
    MT_TRY(measure(w, cases, 2 * ENCODER_CASES));
    if (rank_of(w) == 0) encoder_rows(w->team, e, size);
    return MT_SUCCESS;
}

static mt_status item_inference(worker *w) {
    for (int i = 0; i < ENCODERS; i++) {
        encoder_item e = {0};
        mt_status status;
        w->item = &e;
        status = encoder_measure(w, &encoder_sizes[i]);
        for (int c = 0; c < ENCODER_CASES; c++) {
            encoder_destroy(&e.models[c]);
            replay_destroy(w, &e.products[c]);
        }
        MT_TRY(status);
    }
    return MT_SUCCESS;
}

/* ---- item decode ------------------------------------------------------------------------------------------------- */

enum { DECODE_PROMPT = 64, DECODE_STEPS = 64 };
enum { DECODE_TP2, DECODE_TP2_COPY, DECODE_TP1, DECODE_TP1_COPY, DECODE_CASES };

/* GPT-2 124M for inference, with a key/value cache, and two buffers for a memcpy. */
typedef struct decoder {
    place place;
    mt_params *params;
    mt_gpt gpt;
    mt_gpt_cache cache;
    mt_tensor logits;
    char *from, *to;
    size_t copy; /* bytes of each buffer: half of those of the weights that a step reads */
} decoder;

typedef struct decode_item {
    decoder models[2]; /* TP=2, TP=1 */
} decode_item;

static const decoder *decode_model(const worker *w, int c) { return &((decode_item *)w->item)->models[c / 2]; }

/* The bytes of the weights that a step reads on this rank: all but the positions. The embedding is the output head. */
static size_t decode_bytes(const decoder *d) {
    size_t elements = 0;
    for (int i = 0; i < mt_params_count(d->params); i++) {
        const mt_param *p = mt_params_at(d->params, i);
        if (p != d->gpt.model.positions) elements += (size_t)(p->value.rows * p->value.cols);
    }
    return elements * mt_dtype_size(d->gpt.model.positions->value.dtype);
}

static mt_status decode_build(decoder *d, mt_dtype dtype) {
    mt_gpt_desc shape = {.vocab = opt->tiny ? GPT_LEAST_VOCAB : GPT_VOCAB,
                         .layers = opt->tiny ? 1 : 12,
                         .max_seq = 1024,
                         .layer = {.hidden = HIDDEN, .heads = HEADS}};
    mt_batch prompt = {.sequences = 1, .seq = DECODE_PROMPT};
    mt_context *ctx = d->place.ctx;
    MT_TRY(mt_params_create(ctx, &d->place.grid, &d->params));
    MT_TRY(mt_params_set_dtype(ctx, d->params, dtype));
    MT_TRY(mt_gpt_create(ctx, d->params, &shape, &d->gpt));
    MT_TRY(mt_params_init(ctx, d->params, 1234));
    MT_TRY(mt_gpt_cache_create(ctx, &d->gpt, 1, DECODE_PROMPT + DECODE_STEPS, &d->cache));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, shape.vocab, &d->logits));
    d->copy = decode_bytes(d) / 2;
    d->from = calloc(1, d->copy);
    d->to = calloc(1, d->copy);
    if (!d->from || !d->to) return MT_ERR_MEMORY;
    memset(d->from, 1, d->copy);
    return mt_gpt_cached_logits(ctx, &d->gpt, &prompt, gpt_tokens, &d->cache, mt_none());
}

static mt_status decode_create(worker *w, int tp, mt_dtype dtype, decoder *d) {
    mt_context_desc where = {.threads = 1, .arena_bytes = (size_t)192 << 20}; /* as in encoder_create */
    MT_TRY(place_create(w, split_of(tp), where, &d->place));
    return decode_build(d, dtype);
}

static void decode_destroy(decoder *d) {
    free(d->from);
    free(d->to);
    mt_gpt_cache_destroy(d->place.ctx, &d->cache);
    mt_params_destroy(d->params);
    place_destroy(&d->place);
}

/* Generates DECODE_STEPS tokens after the prompt. */
static mt_status run_decode(worker *w, int c) {
    const decoder *d = decode_model(w, c);
    mt_batch batch = {.sequences = 1, .seq = 1};
    MT_TRY(mt_gpt_cache_set_length(d->place.ctx, &d->cache, 0, DECODE_PROMPT));
    for (int i = 0; i < DECODE_STEPS; i++)
        MT_TRY(mt_gpt_cached_logits(d->place.ctx, &d->gpt, &batch, gpt_tokens + i, &d->cache, d->logits));
    return MT_SUCCESS;
}

static mt_status run_decode_copy(worker *w, int c) {
    const decoder *d = decode_model(w, c);
    memcpy(d->to, d->from, d->copy);
    __asm__ volatile("" : : "r"(d->to) : "memory");
    return MT_SUCCESS;
}

static void decode_rows(const team *t, const char *dtype) {
    for (int tp = 1; tp <= RANKS; tp++) {
        int c = tp == 1 ? DECODE_TP1 : DECODE_TP2;
        char name[64];
        snprintf(name, sizeof name, "GPT-2 124M, %s, TP=%d, a token", dtype, tp);
        row("decode", name, case_time(t, c, 1e3 / DECODE_STEPS), "ms", case_ratio(t, c + 1, c, DECODE_STEPS),
            "memcpy of as many bytes as the weights");
        row("decode", "  tokens", case_rate(t, c, DECODE_STEPS), "tokens/s", case_ratio(t, DECODE_TP1, c, 1),
            "speed of TP=1");
    }
}

static mt_status decode_measure(worker *w, mt_dtype dtype) {
    decode_item *d = w->item;
    bench_case cases[DECODE_CASES] = {[DECODE_TP2] = {run_decode, DECODE_TP2, 0, 0},
                                      [DECODE_TP2_COPY] = {run_decode_copy, DECODE_TP2_COPY, 0, 0},
                                      [DECODE_TP1] = {run_decode, DECODE_TP1, 1, 0},
                                      [DECODE_TP1_COPY] = {run_decode_copy, DECODE_TP1_COPY, 1, 0}};
    MT_TRY(decode_create(w, RANKS, dtype, &d->models[0]));
    if (rank_of(w) == 0) MT_TRY(decode_create(w, 1, dtype, &d->models[1]));
    MT_TRY(measure(w, cases, DECODE_CASES));
    if (rank_of(w) == 0) decode_rows(w->team, dtype == MT_F32 ? "float" : "bf16");
    return MT_SUCCESS;
}

static mt_status item_decode(worker *w) {
    static const mt_dtype dtypes[] = {MT_F32, MT_BF16};
    for (int i = 0; i < 2; i++) {
        decode_item d = {0};
        mt_status status;
        w->item = &d;
        status = decode_measure(w, dtypes[i]);
        for (int c = 0; c < 2; c++) decode_destroy(&d.models[c]);
        MT_TRY(status);
    }
    return MT_SUCCESS;
}

/* ---- item invariant: what invariant mode costs ------------------------------------------------------------------- */

/* A GPT of 17M parameters that 8 virtual shards divide without padding. */
static const gpt_size gpt_of_8_heads = {4, 512, 8, 8192, 256, 256, 8, 0, 0, MT_RECOMPUTE_NONE, MT_F32};

/* A model in both modes. */
typedef struct price {
    const char *name;
    const gpt_size *size;
    int tp, invariant;
    gpt_model plain, invariant_model;
} price;

static mt_status run_plain(worker *w, int arg) { return gpt_step(&((price *)w->item)[arg].plain); }
static mt_status run_invariant(worker *w, int arg) { return gpt_step(&((price *)w->item)[arg].invariant_model); }

static mt_status price_create(worker *w, price *p) {
    if (p->tp == 1 && rank_of(w) != 0) return MT_SUCCESS;
    MT_TRY(gpt_create(w, &p->plain, p->tp, 1, 0, p->size));
    return gpt_create(w, &p->invariant_model, p->tp, 1, p->invariant, p->size);
}

static void price_rows(const team *t, const price *p, int index) {
    char name[96];
    row("invariant", p->name, case_time(t, 2 * index, 1e3), "ms", 0, NULL);
    snprintf(name, sizeof name, "  invariant = %d, micro-batches of %lld", p->invariant,
             (long long)p->invariant_model.micro);
    row("invariant", name, case_time(t, 2 * index + 1, 1e3), "ms", case_ratio(t, 2 * index + 1, 2 * index, 1),
        "times the default");
}

static mt_status prices_measure(worker *w, price *prices, int count) {
    bench_case cases[MAX_CASES];
    for (int i = 0; i < count; i++) {
        int alone = prices[i].tp == 1;
        MT_TRY(price_create(w, &prices[i]));
        cases[2 * i] = (bench_case){run_plain, i, alone, 0};
        cases[2 * i + 1] = (bench_case){run_invariant, i, alone, 0};
    }
    w->item = prices;
    MT_TRY(measure(w, cases, 2 * count));
    for (int i = 0; i < count && rank_of(w) == 0; i++) price_rows(w->team, &prices[i], i);
    return MT_SUCCESS;
}

static mt_status prices_item(worker *w, price *prices, int count) {
    mt_status status = prices_measure(w, prices, count);
    for (int i = 0; i < count; i++) {
        gpt_destroy(&prices[i].plain);
        gpt_destroy(&prices[i].invariant_model);
    }
    return status;
}

static mt_status item_invariant(worker *w) {
    price two[] = {{"GPT of 17M, 8 x 256 tokens, TP=1", &gpt_of_8_heads, 1, 8, {0}, {0}},
                   {"GPT of 17M, 8 x 256 tokens, TP=2", &gpt_of_8_heads, RANKS, 8, {0}, {0}}};
    price gpt2 = {"GPT-2 124M, 4 x 64 tokens, TP=2", &gpt2_124m, RANKS, 8, {0}, {0}};
    MT_TRY(prices_item(w, two, 2));
    return fits(w, "invariant mode of GPT-2") ? prices_item(w, &gpt2, 1) : MT_SUCCESS;
}

static mt_status item_invariant_many(worker *w) {
    price many = {"GPT of 17M, 8 x 256 tokens, TP=8", &gpt_of_8_heads, MANY_RANKS, 8, {0}, {0}};
    return prices_item(w, &many, 1);
}

/* ---- item zero_grad ---------------------------------------------------------------------------------------------- */

/* A model twice, with the two calls that make its gradients zero. */
typedef struct zeroed {
    const char *name;
    gpt_size size;
    gpt_model eager, lazy;
} zeroed;

static mt_status run_eager(worker *w, int arg) { return gpt_step(&((zeroed *)w->item)[arg].eager); }
static mt_status run_lazy(worker *w, int arg) { return gpt_step(&((zeroed *)w->item)[arg].lazy); }

static mt_status zero_grad_measure(worker *w, zeroed *list, int count) {
    bench_case cases[MAX_CASES];
    for (int i = 0; i < count; i++) {
        MT_TRY(gpt_create(w, &list[i].eager, 1, 1, 0, &list[i].size));
        MT_TRY(gpt_create(w, &list[i].lazy, 1, 1, 0, &list[i].size));
        list[i].eager.eager = 1;
        cases[2 * i] = (bench_case){run_eager, i, 1, 0};
        cases[2 * i + 1] = (bench_case){run_lazy, i, 1, 0};
    }
    w->item = list;
    MT_TRY(measure(w, cases, 2 * count));
    for (int i = 0; i < count; i++) {
        row("zero_grad", list[i].name, case_time(w->team, 2 * i, 1e3), "ms", 0, NULL);
        row("zero_grad", "  mt_params_zero_grad_lazy", case_time(w->team, 2 * i + 1, 1e3), "ms",
            case_ratio(w->team, 2 * i + 1, 2 * i, 1), "times mt_params_zero_grad");
    }
    return MT_SUCCESS;
}

static mt_status item_zero_grad(worker *w) {
    zeroed list[] = {{"GPT of 17M, 1 x 64 tokens", {4, 512, 8, 8192, 256, 64, 1, 0, 0, MT_RECOMPUTE_NONE, MT_F32}},
                     {"GPT of 17M, 8 x 256 tokens", {4, 512, 8, 8192, 256, 256, 8, 0, 0, MT_RECOMPUTE_NONE, MT_F32}},
                     {"bf16, 1 x 64 tokens", {4, 512, 8, 8192, 256, 64, 1, 0, 0, MT_RECOMPUTE_NONE, MT_BF16}}};
    mt_status status = zero_grad_measure(w, list, 3);
    for (int i = 0; i < 3; i++) {
        gpt_destroy(&list[i].eager);
        gpt_destroy(&list[i].lazy);
    }
    return status;
}

/* ---- item collectives -------------------------------------------------------------------------------------------- */

enum { ALL_REDUCE_CALL, ALL_GATHER_CALL, REDUCE_SCATTER_CALL, ALL_TO_ALL_CALL, SEND_RECV_CALL };

typedef struct transfer {
    const char *name;
    int call;
    size_t bytes; /* of the whole tensor; of one direction for send_recv */
} transfer;

static const transfer transfers[] = {
    {"all_reduce 4 KB", ALL_REDUCE_CALL, 4 << 10}, {"all_reduce 64 KB", ALL_REDUCE_CALL, 64 << 10},
    {"all_reduce 3 MB", ALL_REDUCE_CALL, 3 << 20}, {"all_reduce 64 MB", ALL_REDUCE_CALL, 64 << 20},
    {"all_gather 3 MB", ALL_GATHER_CALL, 3 << 20}, {"reduce_scatter 3 MB", REDUCE_SCATTER_CALL, 3 << 20},
    {"all_to_all 3 MB", ALL_TO_ALL_CALL, 3 << 20}, {"send_recv 3 MB each way", SEND_RECV_CALL, 3 << 20}};
#define TRANSFERS (int)(sizeof transfers / sizeof *transfers)

typedef struct transfer_item {
    float *a, *b;
} transfer_item;

static mt_status transfer_call(worker *w, const transfer *t, const transfer_item *x) {
    size_t n = t->bytes / sizeof(float);
    size_t size = (size_t)mt_comm_size(w->world);
    int peer = (rank_of(w) + 1) % (int)size;
    switch (t->call) {
    case ALL_REDUCE_CALL: return mt_all_reduce(w->ctx, w->world, x->a, x->a, n, MT_F32, MT_SUM);
    case ALL_GATHER_CALL: return mt_all_gather(w->ctx, w->world, x->b, x->a, n / size, MT_F32);
    case REDUCE_SCATTER_CALL: return mt_reduce_scatter(w->ctx, w->world, x->a, x->b, n / size, MT_F32, MT_SUM);
    case ALL_TO_ALL_CALL: return mt_all_to_all(w->ctx, w->world, x->a, x->b, n / size, MT_F32);
    default: return mt_send_recv(w->ctx, w->world, x->a, n, peer, x->b, n, peer, MT_F32);
    }
}

static mt_status run_transfer(worker *w, int arg) { return transfer_call(w, &transfers[arg], w->item); }

static mt_status run_memcpy(worker *w, int arg) {
    transfer_item *x = w->item;
    memcpy(x->b, x->a, transfers[arg].bytes);
    __asm__ volatile("" : : "r"(x->b) : "memory");
    return MT_SUCCESS;
}

/* Allocates the buffers. They are zero, so that repeated sums stay finite. */
static mt_status transfer_buffers(worker *w, size_t bytes, transfer_item *x) {
    void *a, *b;
    MT_TRY(mt_context_alloc(w->ctx, bytes, &a));
    x->a = a;
    MT_TRY(mt_context_alloc(w->ctx, bytes, &b));
    x->b = b;
    return MT_SUCCESS;
}

/* Returns the bytes of all ranks of a call, divided by the cores. With more ranks than cores, the time is at best
   proportional to them. */
static double transfer_work(const team *t, int i) {
    return (double)transfers[i].bytes * t->size / (t->size < core_count ? t->size : core_count);
}

static void transfer_rows(const team *t, int i) {
    static double rate_of_two[TRANSFERS]; /* of RANKS ranks, which come first in a run */
    stat3 rate = case_rate(t, 2 * i, 1e-9 * transfer_work(t, i));
    char name[64];
    if (t->size == RANKS) rate_of_two[i] = rate.median;
    snprintf(name, sizeof name, "%s, %d ranks", transfers[i].name, t->size);
    row("collectives", name, case_time(t, 2 * i, 1e6), "us", case_ratio(t, 2 * i, 2 * i + 1, 1),
        "memcpy time of as many bytes");
    row("collectives", "  memcpy, all ranks at once", case_time(t, 2 * i + 1, 1e6), "us", 0, NULL);
    row("collectives", "  bytes x ranks / cores", rate, "GB/s", rate_of_two[i] > 0 ? rate.median / rate_of_two[i] : 0,
        t->size == RANKS || rate_of_two[i] == 0 ? NULL : "2 ranks' GB/s");
}

static mt_status transfers_measure(worker *w, int count) {
    bench_case cases[MAX_CASES] = {{0}};
    for (int i = 0; i < count; i++) {
        cases[2 * i] = (bench_case){run_transfer, i, 0, 0};
        cases[2 * i + 1] = (bench_case){run_memcpy, i, 0, 0};
    }
    MT_TRY(measure(w, cases, 2 * count));
    for (int i = 0; i < count && rank_of(w) == 0; i++) transfer_rows(w->team, i);
    return MT_SUCCESS;
}

static mt_status transfers_item(worker *w, int count, size_t bytes) {
    transfer_item x = {0};
    mt_status status = transfer_buffers(w, bytes, &x);
    w->item = &x;
    if (status == MT_SUCCESS) status = transfers_measure(w, count);
    mt_context_free(w->ctx, x.a, bytes);
    mt_context_free(w->ctx, x.b, bytes);
    return status;
}

static mt_status item_collectives(worker *w) { return transfers_item(w, TRANSFERS, (size_t)64 << 20); }
static mt_status item_many_ranks(worker *w) { return transfers_item(w, 3, (size_t)3 << 20); }

/* ---- item plan: steps that are predicted, and then measured ------------------------------------------------------ */

/* No rate comes from a measured step. Products: mt_gemm alone, in the shapes of the traces of the steps. Operators:
   each alone, in the shapes of the calibration model. Links: transfers alone. All cases alternate in each round. */

/* A step of a GPT on a grid. With pp, there are RANKS stages. */
typedef struct setup {
    const char *name;
    mt_grid_desc grid;
    gpt_size size;
} setup;

/* main makes them small for --tiny. */
static setup setups[] = {
    {"1 rank", {.tp = 1}, {3, 256, 4, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32}},
    {"1 rank, hidden 320", {.tp = 1}, {2, 320, 5, 2560, 144, 144, 1, 0, 0, MT_RECOMPUTE_NONE, MT_F32}},
    {"1 rank, recomputed", {.tp = 1}, {3, 256, 4, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_FULL, MT_F32}},
    {"TP=2", {.tp = RANKS}, {4, 256, 4, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32}},
    {"TP=2, sequence parallel", {.tp = RANKS}, {4, 256, 4, 2048, 96, 96, 2, 0, 1, MT_RECOMPUTE_NONE, MT_F32}},
    {"TP=2, recomputed", {.tp = RANKS}, {4, 256, 4, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_FULL, MT_F32}},
    {"TP=2, hidden 512", {.tp = RANKS}, {2, 512, 8, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32}},
    {"DP=2", {.tp = 1, .dp = RANKS}, {2, 256, 4, 2048, 96, 96, 4, 0, 0, MT_RECOMPUTE_NONE, MT_F32}},
    {"DP=2, 2 micro-batches", {.tp = 1, .dp = RANKS}, {2, 256, 4, 2048, 96, 96, 4, 1, 0, MT_RECOMPUTE_NONE, MT_F32}},
    {"PP=2, 4 micro-batches",
     {.tp = 1, .dp = 1, .pp = RANKS},
     {4, 256, 4, 2048, 96, 96, 4, 1, 0, MT_RECOMPUTE_NONE, MT_F32}}};
#define SETUPS (int)(sizeof setups / sizeof *setups)

/* The size with two layers, which two stages can share, and short sequences. */
static gpt_size tiny_size(gpt_size size) {
    size.layers = 2;
    size.seq = size.max_seq = 16;
    return size;
}

/* The model whose operators are measured. It is none of the setups. */
static const gpt_size calibration_size = {2, 384, 6, 3072, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32};
static const ops_size calibration_ops = {192, 96, 384, 6};

static const transfer links[] = {{"all_reduce 16 KB", ALL_REDUCE_CALL, 16 << 10},
                                 {"all_reduce 512 KB", ALL_REDUCE_CALL, 512 << 10},
                                 {"all_reduce 8 MB", ALL_REDUCE_CALL, 8 << 20},
                                 {"all_gather 16 KB", ALL_GATHER_CALL, 16 << 10},
                                 {"all_gather 512 KB", ALL_GATHER_CALL, 512 << 10},
                                 {"reduce_scatter 16 KB", REDUCE_SCATTER_CALL, 16 << 10},
                                 {"reduce_scatter 512 KB", REDUCE_SCATTER_CALL, 512 << 10},
                                 {"send_recv 16 KB each way", SEND_RECV_CALL, 16 << 10},
                                 {"send_recv 256 KB each way", SEND_RECV_CALL, 256 << 10}};
#define LINKS (int)(sizeof links / sizeof *links)

/* A shape of mt_gemm in the traces. With beta 0: forward and input gradients. With beta 1: weight gradients. */
typedef struct product {
    int64_t m, n, k;
    int forward, gradient;
} product;

typedef struct product_list {
    product all[MAX_PARTS];
    int count;
} product_list;

/* Calls of operators outside the layer, after those of ops.list. */
enum { ZERO, LOOKUP, LOOKUP_BACKWARD, LOSS, LOSS_STATS, LOSS_BACKWARD, SQUARES, ADAMW, CALLS };

typedef struct calibration {
    gpt_model model;
    ops ops; /* in the place of the model */
    mt_tensor logits, loss, stats, lse;
    mt_tensor spare; /* as large as the gradients */
} calibration;

/* What is measured on one rank alone, [0], and on all ranks at once, [1]. */
enum { ALONE, TOGETHER, CROWDS };

/* The cases: products and operators in both ways, links, steps. */
enum { PRODUCT_CASE, OPERATOR_CASE = PRODUCT_CASE + CROWDS, LINK_CASE = OPERATOR_CASE + CROWDS };
#define STEP_CASE (LINK_CASE + LINKS)

typedef struct machine_text {
    char text[16384];
    size_t used;
} machine_text;

/* The machines as the item plan has measured them, for the item scaling. Rank 0 writes and reads them. */
static machine_text machines[CROWDS];

typedef struct plan_item {
    gpt_model models[SETUPS];
    mt_trace traces[SETUPS][RANKS];
    product_list products[CROWDS];
    calibration cal;
    mt_trace_entry work[MAX_PARTS]; /* of the calls of the calibration */
    transfer_item buffers;
    float *pool;
    size_t at_b, at_c; /* the next B and C in the pool */
} plan_item;

/* -- products -- */

/* Matrices in floats: A is always at the start of the pool, because the operator before has just written it. B and C
   move through the pool, because weights and gradients are in memory and not in a cache. */
#define POOL_A ((size_t)4 << 20)
#define POOL_B ((size_t)8 << 20)
#define POOL_FLOATS (POOL_A + 2 * POOL_B)

static float *pool_take(float *pool, size_t *at, int64_t count) {
    float *result;
    if (*at + (size_t)count > POOL_B) *at = 0;
    result = pool + *at;
    *at += (size_t)(count + 15) / 16 * 16;
    return result;
}

static mt_status product_run(worker *w, plan_item *p, const product *x, mt_transpose ta, mt_transpose tb) {
    float *b = pool_take(p->pool + POOL_A, &p->at_b, x->n * x->k);
    float *c = pool_take(p->pool + POOL_A + POOL_B, &p->at_c, x->m * x->n);
    mt_tensor first = ta == MT_TRANS ? mt_tensor_f32(p->pool, x->k, x->m) : mt_tensor_f32(p->pool, x->m, x->k);
    mt_tensor second = tb == MT_TRANS ? mt_tensor_f32(b, x->n, x->k) : mt_tensor_f32(b, x->k, x->n);
    return mt_gemm(w->ctx, ta, tb, 1.0f, first, second, ta == MT_TRANS ? 1.0f : 0.0f, mt_tensor_f32(c, x->m, x->n));
}

/* The time of a product is the mean over the ways in which it occurs. The trace does not tell forward (A B^T) from
   input gradients (A B). */
static mt_status run_shapes(worker *w, int crowd) {
    plan_item *p = w->item;
    const product_list *list = &p->products[crowd];
    for (int i = 0; i < list->count; i++) {
        const product *x = &list->all[i];
        double start = now();
        if (x->forward) MT_TRY(product_run(w, p, x, MT_NO_TRANS, MT_TRANS));
        if (x->forward) MT_TRY(product_run(w, p, x, MT_NO_TRANS, MT_NO_TRANS));
        if (x->gradient) MT_TRY(product_run(w, p, x, MT_TRANS, MT_NO_TRANS));
        w->parts[i] = (now() - start) / (2 * x->forward + x->gradient);
    }
    return MT_SUCCESS;
}

static void products_note(product_list *list, const mt_trace_entry *e) {
    double once = 4.0 * ((double)e->m * (double)e->k + (double)e->k * (double)e->n + (double)e->m * (double)e->n);
    int i = 0;
    if (e->work != MT_WORK_GEMM) return;
    while (i < list->count && (list->all[i].m != e->m || list->all[i].n != e->n || list->all[i].k != e->k)) i++;
    if (i == MAX_PARTS) return;
    if (i == list->count) list->all[list->count++] = (product){e->m, e->n, e->k, 0, 0};
    if (e->bytes > once) list->all[i].gradient = 1;
    else list->all[i].forward = 1;
}

/* -- operators -- */

static mt_status calibration_call(calibration *c, int call) {
    const mt_cross_entropy_shard_desc desc = {c->model.size->vocab, 0, 0.0f, 0};
    mt_context *ctx = c->model.place.ctx;
    const mt_param *table = c->model.gpt.model.tokens.weight;
    const int32_t *ids = gpt_tokens;
    float norm = 0;
    if (call < c->ops.count) return c->ops.list[call].run(&c->ops, &c->ops.list[call]);
    switch (call - c->ops.count) {
    case ZERO: return mt_fill(ctx, c->spare, 0.0f);
    case LOOKUP: return mt_embedding_forward(ctx, table->value, 0, ids, 0.0f, c->ops.x);
    case LOOKUP_BACKWARD: return mt_embedding_backward(ctx, c->ops.dx, 0, ids, table->grad);
    case LOSS: return mt_cross_entropy_forward_backward(ctx, &desc, c->logits, ids, mt_none(), 1.0f, c->loss);
    case LOSS_STATS: return mt_cross_entropy_stats(ctx, &desc, c->logits, ids, c->stats);
    case LOSS_BACKWARD: return mt_cross_entropy_backward(ctx, &desc, c->logits, ids, c->lse, mt_none(), 1.0f);
    case SQUARES: return mt_grad_norm(ctx, c->model.params, &norm);
    default: return mt_optimizer_step(ctx, &c->model.optimizer, 0.0f, 1.0f);
    }
}

/* Writes gradients for the step of the optimizer: AdamW of zeros would be faster. */
static mt_status calibration_gradients(calibration *c) {
    MT_TRY(mt_params_zero_grad(c->model.place.ctx, c->model.params));
    for (int i = 0; i < mt_params_count(c->model.params); i++)
        MT_TRY(mt_fill(c->model.place.ctx, mt_params_at(c->model.params, i)->grad, 1e-3f));
    return MT_SUCCESS;
}

static mt_status run_operators(worker *w, int crowd) {
    calibration *c = &((plan_item *)w->item)->cal;
    (void)crowd;
    for (int i = 0; i < c->ops.count + CALLS; i++) {
        double start;
        if (i == c->ops.count + ADAMW) MT_TRY(calibration_gradients(c));
        start = now();
        MT_TRY(calibration_call(c, i));
        w->parts[i] = now() - start;
    }
    return MT_SUCCESS;
}

/* Builds the calibration in c->model.place. */
static mt_status calibration_build(calibration *c) {
    mt_context *ctx = c->model.place.ctx;
    int64_t tokens = calibration_ops.tokens;
    MT_TRY(gpt_build(&c->model, &calibration_size));
    MT_TRY(gpt_step(&c->model));
    MT_TRY(calibration_gradients(c));
    c->ops.place = c->model.place;
    MT_TRY(ops_build(&c->ops, 1, 0, &calibration_ops));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, tokens, calibration_size.vocab, &c->logits));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, tokens, &c->loss));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, tokens, 4, &c->stats));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, tokens, &c->lse));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, mt_params_global_elements(c->model.params), &c->spare));
    MT_TRY(mt_fill(ctx, c->logits, 0.5f));
    return mt_fill(ctx, c->lse, 4.0f);
}

static void calibration_destroy(calibration *c) {
    if (c->ops.memory) mt_context_free(c->ops.place.ctx, c->ops.memory, c->ops.bytes);
    gpt_destroy(&c->model);
}

/* Writes the entry of each call: of its largest one, if it has several. */
static mt_status calibration_entries(calibration *c, mt_trace_entry *work) {
    mt_trace trace;
    for (int i = 0; i < c->ops.count + CALLS; i++) {
        MT_TRY(calibration_call(c, i));
        MT_TRY(mt_context_take_trace(c->model.place.ctx, &trace));
        for (size_t e = 0; e < trace.count; e++)
            if (trace.entries[e].bytes > work[i].bytes) work[i] = trace.entries[e];
        mt_trace_free(&trace);
    }
    return MT_SUCCESS;
}

/* The same calls on the meta device say what each of them is in a trace. */
static mt_status calibration_plan(mt_trace_entry *work) {
    calibration *c = calloc(1, sizeof *c);
    mt_trace set_up = {0};
    mt_status status = MT_ERR_MEMORY;
    if (!c) return status;
    status = place_plan(split_of(1), 0, (mt_context_desc){.threads = 1}, &c->model.place);
    if (status == MT_SUCCESS) status = calibration_build(c);
    if (status == MT_SUCCESS) status = mt_context_take_trace(c->model.place.ctx, &set_up);
    if (status == MT_SUCCESS) status = calibration_entries(c, work);
    mt_trace_free(&set_up);
    calibration_destroy(c);
    free(c);
    return status;
}

/* -- links -- */

static mt_status run_link(worker *w, int arg) {
    const transfer_item *x = &((plan_item *)w->item)->buffers;
    return transfer_call(w, &links[arg], x);
}

/* The factors of 1 / bandwidth and of the latency in the time of a transfer between 2 ranks. */
static void link_factors(const transfer *t, double *bytes, double *latencies) {
    int half = t->call == ALL_GATHER_CALL || t->call == REDUCE_SCATTER_CALL;
    *bytes = (half ? 0.5 : 1.0) * (double)t->bytes;
    *latencies = t->call == ALL_REDUCE_CALL ? 2 : 1;
}

/* Least squares of the relative errors. x[0]: seconds of a byte, x[1]: seconds of a latency. */
static void link_fit(const team *t, double x[2]) {
    double aa = 0, ab = 0, bb = 0, a1 = 0, b1 = 0, det;
    for (int i = 0; i < LINKS; i++) {
        double a, b, seconds = case_time(t, LINK_CASE + i, 1).median;
        link_factors(&links[i], &a, &b);
        a /= seconds, b /= seconds;
        aa += a * a, ab += a * b, bb += b * b, a1 += a, b1 += b;
    }
    det = aa * bb - ab * ab;
    x[0] = (a1 * bb - b1 * ab) / det;
    x[1] = (b1 * aa - a1 * ab) / det;
    if (x[0] <= 0 || x[1] < 0) x[0] = a1 / aa, x[1] = 0; /* bandwidth alone explains the times best */
}

static void link_rows(const team *t, const double x[2]) {
    for (int i = 0; i < LINKS; i++) {
        double a, b, seconds = case_time(t, LINK_CASE + i, 1).median;
        link_factors(&links[i], &a, &b);
        row("plan", links[i].name, case_time(t, LINK_CASE + i, 1e6), "us", (a * x[0] + b * x[1]) / seconds,
            "fitted / measured");
    }
}

/* -- the machine -- */

static void machine_add(machine_text *m, const char *format, ...) {
    va_list values;
    int n;
    va_start(values, format);
    n = vsnprintf(m->text + m->used, sizeof m->text - m->used, format, values);
    va_end(values);
    if (n > 0 && m->used + (size_t)n < sizeof m->text) m->used += (size_t)n;
}

/* Returns the rate of an operator of the calibration, over all its calls: FLOPs of attention, otherwise bytes, per
   second. name NULL: of all operators whose time is that of their bytes. */
static double operator_rate(const team *t, const plan_item *p, int crowd, const char *name) {
    int chosen[MAX_PARTS] = {0};
    double amount = 0;
    for (int i = 0; i < MAX_PARTS; i++) {
        const mt_trace_entry *e = &p->work[i];
        int by_bytes = e->work == MT_WORK_MEMORY || e->work == MT_WORK_OPTIMIZER;
        if (!e->name || (name ? strcmp(name, e->name) != 0 : !by_bytes)) continue;
        chosen[i] = 1;
        amount += e->work == MT_WORK_ATTENTION ? e->flops : e->bytes;
    }
    return amount / part_time(t, OPERATOR_CASE + crowd, chosen, MAX_PARTS, 1).median;
}

static int operator_is_first(const plan_item *p, int i) {
    if (!p->work[i].name || p->work[i].work == MT_WORK_GEMM) return 0;
    for (int j = 0; j < i; j++)
        if (p->work[j].name && strcmp(p->work[j].name, p->work[i].name) == 0) return 0;
    return 1;
}

static void machine_write(const team *t, const plan_item *p, int crowd, const double link[2], machine_text *m) {
    const product_list *list = &p->products[crowd];
    m->used = 0;
    machine_add(m, "name this machine, %s\n", crowd == ALONE ? "one rank" : "2 ranks at once");
    for (int i = 0; i < list->count; i++) {
        const product *x = &list->all[i];
        int chosen[MAX_PARTS] = {0};
        chosen[i] = 1;
        machine_add(m, "gemm f32 %lld %lld %lld %.4g\n", (long long)x->m, (long long)x->n, (long long)x->k,
                    2.0 * (double)x->m * (double)x->n * (double)x->k /
                        part_time(t, PRODUCT_CASE + crowd, chosen, MAX_PARTS, 1).median);
    }
    for (int i = 0; i < MAX_PARTS; i++)
        if (operator_is_first(p, i))
            machine_add(m, "%s %s f32 %.4g\n", p->work[i].work == MT_WORK_ATTENTION ? "attention" : "memory",
                        p->work[i].name, operator_rate(t, p, crowd, p->work[i].name));
    machine_add(m, "memory * * %.4g\n", operator_rate(t, p, crowd, NULL));
    machine_add(m, "node %d\nlink %.4g %.4g\noverlap 0\n", RANKS, 1 / link[0], link[1]);
}

/* Predicts the seconds of a step. */
static mt_status predict(const machine_text *m, const mt_trace *traces, int stages, double *seconds) {
    place here;
    mt_machine *machine = NULL;
    mt_step_time times[RANKS];
    mt_status status = place_plan(split_of(1), 0, (mt_context_desc){.threads = 1}, &here);
    if (status == MT_SUCCESS) status = mt_machine_create(here.ctx, m->text, &machine);
    if (status == MT_SUCCESS) status = mt_plan_step(here.ctx, machine, traces, stages, times);
    if (status == MT_SUCCESS) *seconds = times[0].seconds;
    else fprintf(stderr, "bench: prediction: %s\n", mt_last_error(here.ctx));
    mt_machine_destroy(machine);
    place_destroy(&here);
    return status;
}

static mt_status machine_save(const machine_text *m) {
    FILE *f = opt->machine ? fopen(opt->machine, "w") : NULL;
    if (!opt->machine) return MT_SUCCESS;
    if (f && fwrite(m->text, 1, m->used, f) == m->used && fclose(f) == 0) return MT_SUCCESS;
    fprintf(stderr, "bench: cannot write %s\n", opt->machine);
    return MT_ERR_IO;
}

/* -- rows -- */

static void operator_rows(const team *t, const plan_item *p) {
    for (int i = 0; i < MAX_PARTS; i++) {
        const mt_trace_entry *e = &p->work[i];
        char name[64];
        double one, two;
        if (!operator_is_first(p, i)) continue;
        one = 1e-9 * operator_rate(t, p, ALONE, e->name);
        two = 1e-9 * operator_rate(t, p, TOGETHER, e->name);
        snprintf(name, sizeof name, "%s, 2 ranks at once", e->name);
        row("plan", name, exactly(two), e->work == MT_WORK_ATTENTION ? "GFLOP/s" : "GB/s", two / one, "1 rank alone");
    }
}

static int crowd_of(const setup *s) { return grid_ranks(s->grid) > 1 ? TOGETHER : ALONE; }
static int stages_of(const setup *s) { return s->grid.pp > 1 ? s->grid.pp : 1; }

static mt_status step_rows(const team *t, const plan_item *p) {
    double largest = 0, sum = 0;
    for (int i = 0; i < SETUPS; i++) {
        const setup *s = &setups[i];
        stat3 measured = case_time(t, STEP_CASE + i, 1e3);
        double predicted = 0, deviation;
        MT_TRY(predict(&machines[crowd_of(s)], p->traces[i], stages_of(s), &predicted));
        deviation = fabs(1e3 * predicted / measured.median - 1);
        row("plan", s->name, measured, "ms", 0, NULL);
        row("plan", "  predicted", exactly(1e3 * predicted), "ms", 1e3 * predicted / measured.median, "measured");
        largest = fmax(largest, deviation);
        sum += deviation;
    }
    row("plan", "largest deviation", exactly(100 * largest), "%", 0, NULL);
    row("plan", "mean deviation", exactly(100 * sum / SETUPS), "%", 0, NULL);
    return MT_SUCCESS;
}

static mt_status plan_rows(const team *t, const plan_item *p) {
    double link[2];
    link_fit(t, link);
    for (int crowd = 0; crowd < CROWDS; crowd++) machine_write(t, p, crowd, link, &machines[crowd]);
    operator_rows(t, p);
    link_rows(t, link);
    MT_TRY(step_rows(t, p));
    return machine_save(&machines[TOGETHER]);
}

/* -- the item -- */

static mt_status plan_traces(plan_item *p) {
    for (int i = 0; i < SETUPS; i++) {
        const setup *s = &setups[i];
        size_t arena;
        for (int stage = 0; stage < stages_of(s); stage++) {
            mt_trace *trace = &p->traces[i][stage];
            MT_TRY(gpt_plan(s->grid, stage, (mt_context_desc){0}, &s->size, &arena, trace));
            for (size_t e = 0; e < trace->count; e++) products_note(&p->products[crowd_of(s)], &trace->entries[e]);
        }
    }
    return calibration_plan(p->work);
}

static mt_status plan_create(worker *w, plan_item *p) {
    mt_context_desc where = {.threads = 1, .arena_bytes = (size_t)128 << 20};
    mt_random at = {.seed = 11, .global_cols = (int64_t)POOL_FLOATS};
    void *pool;
    MT_TRY(plan_traces(p));
    MT_TRY(place_create(w, split_of(1), where, &p->cal.model.place));
    MT_TRY(calibration_build(&p->cal));
    MT_TRY(mt_context_alloc(w->ctx, POOL_FLOATS * sizeof(float), &pool));
    p->pool = pool;
    MT_TRY(mt_random_normal(w->ctx, mt_tensor_f32(p->pool, 1, (int64_t)POOL_FLOATS), 0.02f, at));
    MT_TRY(transfer_buffers(w, (size_t)8 << 20, &p->buffers));
    for (int i = 0; i < SETUPS; i++)
        if (crowd_of(&setups[i]) == TOGETHER || rank_of(w) == 0)
            MT_TRY(gpt_create_on(w, &p->models[i], setups[i].grid, (mt_context_desc){0}, &setups[i].size));
    return MT_SUCCESS;
}

static void plan_destroy(worker *w, plan_item *p) {
    calibration_destroy(&p->cal);
    mt_context_free(w->ctx, p->pool, POOL_FLOATS * sizeof(float));
    mt_context_free(w->ctx, p->buffers.a, (size_t)8 << 20);
    mt_context_free(w->ctx, p->buffers.b, (size_t)8 << 20);
    for (int i = 0; i < SETUPS; i++) {
        gpt_destroy(&p->models[i]);
        for (int stage = 0; stage < RANKS; stage++) mt_trace_free(&p->traces[i][stage]);
    }
}

static mt_status run_setup(worker *w, int arg) { return gpt_step(&((plan_item *)w->item)->models[arg]); }

static mt_status plan_measure(worker *w) {
    plan_item *p = w->item;
    bench_case cases[MAX_CASES] = {{0}};
    MT_TRY(plan_create(w, p));
    for (int crowd = 0; crowd < CROWDS; crowd++) {
        cases[PRODUCT_CASE + crowd] = (bench_case){run_shapes, crowd, crowd == ALONE, MAX_PARTS};
        cases[OPERATOR_CASE + crowd] = (bench_case){run_operators, crowd, crowd == ALONE, MAX_PARTS};
    }
    for (int i = 0; i < LINKS; i++) cases[LINK_CASE + i] = (bench_case){run_link, i, 0, 0};
    for (int i = 0; i < SETUPS; i++)
        cases[STEP_CASE + i] = (bench_case){run_setup, i, crowd_of(&setups[i]) == ALONE, 0};
    MT_TRY(measure(w, cases, STEP_CASE + SETUPS));
    return rank_of(w) == 0 ? plan_rows(w->team, p) : MT_SUCCESS;
}

static mt_status item_plan(worker *w) {
    plan_item *p = calloc(1, sizeof *p);
    mt_status status = MT_ERR_MEMORY;
    if (!p) return status;
    w->item = p;
    status = plan_measure(w);
    plan_destroy(w, p);
    free(p);
    return status;
}

/* ---- item scaling: the paper's scaling runs, at sizes for a CPU -------------------------------------------------- */

/* arXiv 1909.08053, table 1, has 1.2, 2.5, 4.2 and 8.3 billion parameters on 1, 2, 4 and 8 ranks of a tensor group:
   about as many for each rank. These GPTs have about 1/400 of them in their layers, with the same batch for all. */
static const gpt_size weak_sizes[] = {{4, 256, 8, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32},
                                      {5, 320, 16, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32},
                                      {7, 384, 16, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32},
                                      {8, 512, 16, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32}};
static const gpt_size strong_size = {4, 512, 16, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE, MT_F32};
static const gpt_size heads_size = {4,     384, 0, 2048, 96, 96, 2, 0, 0, MT_RECOMPUTE_NONE,
                                    MT_F32}; /* the heads vary: table 7 */

/* A GPT on a grid of tp x dp ranks. `one` is the run on one rank that it compares with. */
typedef struct scaling_run {
    const char *name;
    int tp, dp, one;
    gpt_size size;
} scaling_run;

enum { WEAK_ONE, STRONG_ONE, SCALING_MOST = 8 };

typedef struct scaling_item {
    scaling_run runs[SCALING_MOST];
    gpt_model models[SCALING_MOST];
    int count;
} scaling_item;

static void scaling_add(scaling_item *s, const char *name, int tp, int dp, int one, gpt_size size) {
    size.batch *= dp;
    s->runs[s->count++] = (scaling_run){name, tp, dp, one, opt->tiny ? tiny_size(size) : size};
}

static gpt_size weak_size(int tp) { return weak_sizes[tp >= 8 ? 3 : tp / 2]; }

/* Lists the runs of a team: on one rank and on all ranks. With data parallelism, each replica has the whole batch of
   the other runs. */
static void scaling_list(scaling_item *s, int ranks) {
    scaling_add(s, "weak", 1, 1, WEAK_ONE, weak_size(1));
    scaling_add(s, "strong", 1, 1, STRONG_ONE, strong_size);
    scaling_add(s, "weak", ranks, 1, WEAK_ONE, weak_size(ranks));
    scaling_add(s, "weak", ranks / 2, 2, WEAK_ONE, weak_size(ranks / 2));
    scaling_add(s, "strong", ranks, 1, STRONG_ONE, strong_size);
    for (int heads = 16; heads <= 32 && ranks == RANKS; heads += 8) {
        gpt_size size = heads_size;
        size.heads = heads;
        scaling_add(s, "heads", ranks, 1, WEAK_ONE, size);
    }
}

static int scaling_is_alone(const scaling_run *r) { return r->tp * r->dp == 1; }
static mt_grid_desc scaling_grid(const scaling_run *r) { return (mt_grid_desc){.tp = r->tp, .dp = r->dp}; }

static mt_status run_scaling(worker *w, int arg) { return gpt_step(&((scaling_item *)w->item)->models[arg]); }

static double scaling_flops(const gpt_model *m) {
    const gpt_size *s = m->size;
    return 6 * (double)mt_params_global_elements(m->params) * (double)(s->batch * s->seq) +
           (double)s->layers * 3 * attention_flops((double)s->batch, (double)s->seq, (double)s->hidden);
}

/* Prints what the machine of the item plan predicts, if that item has run, for as many ranks as it has measured. */
static mt_status scaling_predicted(const team *t, const scaling_run *r, double measured) {
    const machine_text *machine = &machines[scaling_is_alone(r) ? ALONE : TOGETHER];
    double seconds = 0;
    size_t arena;
    mt_trace trace;
    mt_status status;
    if (t->size != RANKS || machine->used == 0) return MT_SUCCESS;
    MT_TRY(gpt_plan(scaling_grid(r), 0, (mt_context_desc){0}, &r->size, &arena, &trace));
    status = predict(machine, &trace, 1, &seconds);
    mt_trace_free(&trace);
    if (status == MT_SUCCESS)
        row("scaling", "  predicted from the rates of item plan", exactly(1e3 * seconds), "ms", seconds / measured,
            "measured");
    return status;
}

/* examples/figures.py reads these rows. */
static mt_status scaling_row(const team *t, const scaling_item *s, int c) {
    const scaling_run *r = &s->runs[c];
    int cores = t->size < core_count ? t->size : core_count;
    double work = scaling_flops(&s->models[c]) / scaling_flops(&s->models[r->one]);
    char grid[32], heads[32] = "", name[96], versus[64];
    if (r->dp > 1) snprintf(grid, sizeof grid, "TP=%d x DP=%d", r->tp, r->dp);
    else snprintf(grid, sizeof grid, "TP=%d", r->tp);
    if (strcmp(r->name, "heads") == 0) snprintf(heads, sizeof heads, " %lld", (long long)r->size.heads);
    snprintf(name, sizeof name, "%s%s, %s, %lld layers, hidden %lld, %.1fM", r->name, heads, grid,
             (long long)r->size.layers, (long long)r->size.hidden,
             1e-6 * (double)mt_params_global_elements(s->models[c].params));
    snprintf(versus, sizeof versus, "efficiency on %d core%s", cores, cores > 1 ? "s" : "");
    row("scaling", name, case_time(t, c, 1e3), "ms", case_ratio(t, r->one, c, work / cores),
        scaling_is_alone(r) ? NULL : versus);
    return scaling_predicted(t, r, case_time(t, c, 1).median);
}

static mt_status scaling_measure(worker *w) {
    scaling_item *s = w->item;
    bench_case cases[SCALING_MOST];
    for (int c = 0; c < s->count; c++) {
        const scaling_run *r = &s->runs[c];
        int alone = scaling_is_alone(r);
        cases[c] = (bench_case){run_scaling, c, alone, 0};
        if (!alone || rank_of(w) == 0)
            MT_TRY(gpt_create_on(w, &s->models[c], scaling_grid(r), (mt_context_desc){0}, &r->size));
    }
    MT_TRY(measure(w, cases, s->count));
    for (int c = 0; c < s->count && rank_of(w) == 0; c++) MT_TRY(scaling_row(w->team, s, c));
    return MT_SUCCESS;
}

static mt_status item_scaling(worker *w) {
    scaling_item s = {0};
    mt_status status;
    w->item = &s;
    scaling_list(&s, w->team->size);
    status = scaling_measure(w);
    for (int c = 0; c < s.count; c++) gpt_destroy(&s.models[c]);
    return status;
}

/* ---- item bandwidth ---------------------------------------------------------------------------------------------- */

#define CE_TOKENS 256
#define FLAT_ELEMENTS (4 << 20)
#define BW_GROUP (MAX_CASES / 3) /* rows that alternate with each other and with two other cases for each */
#define BW_CACHED 16             /* rows of HIDDEN floats, 48 KiB, for operators whose tensors stay in the L2 cache */

typedef struct bandwidth_item {
    mt_dtype dtype;
    mt_tensor x, y, z, r, stats, vector, grads, scales; /* [tokens, hidden], vectors, scales and their gradients */
    mt_tensor h, act, dh, zero; /* [tokens, ffn]; a bias of zeros, so that repeated calls do not change h */
    mt_tensor gated;            /* [tokens, ffn / 2] */
    mt_tensor logits, scalars, lse, total;
    mt_tensor p, g, m, v;
    mt_tensor bf16, f16; /* [tokens, ffn] */
    int32_t targets[CE_TOKENS];
    char *from, *to;
    size_t copy; /* bytes of from, and of to */
    int rows[BW_GROUP];
} bandwidth_item;

static const mt_cross_entropy_shard_desc ce_desc = {GPT_VOCAB, 0, 0.0f, 0};

static mt_tensor bw_bias(const bandwidth_item *b) { return mt_tensor_cols(b->vector, 0, HIDDEN); }
static mt_tensor bw_dbias(const bandwidth_item *b) { return mt_tensor_cols(b->grads, 0, HIDDEN); }

static mt_status bw_norm(mt_context *c, const bandwidth_item *b) {
    return mt_norm_forward(c, MT_LAYER_NORM, b->x, bw_bias(b), bw_bias(b), 1e-5f, b->y, b->stats);
}
static mt_status bw_norm_backward(mt_context *c, const bandwidth_item *b) {
    return mt_norm_backward(c, MT_LAYER_NORM, b->x, bw_bias(b), b->stats, b->y, b->r, b->z, bw_dbias(b),
                            mt_tensor_cols(b->grads, HIDDEN, HIDDEN));
}
static mt_status bw_rms(mt_context *c, const bandwidth_item *b) {
    return mt_norm_forward(c, MT_RMS_NORM, b->x, bw_bias(b), mt_none(), 1e-5f, b->y, b->stats);
}
static mt_status bw_rms_backward(mt_context *c, const bandwidth_item *b) {
    return mt_norm_backward(c, MT_RMS_NORM, b->x, bw_bias(b), b->stats, b->y, b->r, b->z, bw_dbias(b), mt_none());
}
static mt_status bw_gelu(mt_context *c, const bandwidth_item *b) {
    return mt_activation_forward(c, MT_GELU_TANH, b->h, b->zero, b->act);
}
static mt_status bw_gelu_backward(mt_context *c, const bandwidth_item *b) {
    return mt_activation_backward(c, MT_GELU_TANH, b->h, b->act, b->dh, b->grads);
}
static mt_status bw_erf(mt_context *c, const bandwidth_item *b) {
    return mt_activation_forward(c, MT_GELU_ERF, b->h, b->zero, b->act);
}
static mt_status bw_erf_backward(mt_context *c, const bandwidth_item *b) {
    return mt_activation_backward(c, MT_GELU_ERF, b->h, b->act, b->dh, b->grads);
}
static mt_status bw_swiglu(mt_context *c, const bandwidth_item *b) {
    return mt_activation_forward(c, MT_SWIGLU, b->h, mt_none(), b->gated);
}
static mt_status bw_swiglu_backward(mt_context *c, const bandwidth_item *b) {
    return mt_activation_backward(c, MT_SWIGLU, b->h, b->gated, b->dh, mt_none());
}
static mt_status bw_drop_by(mt_context *c, const bandwidth_item *b, float p) {
    mt_dropout drop = {.at = {.seed = 1, .subsequence = 1, .global_cols = HIDDEN}, .p = p};
    return mt_bias_dropout_add_forward(c, b->x, bw_bias(b), b->r, drop, b->z);
}
static mt_status bw_add(mt_context *c, const bandwidth_item *b) { return bw_drop_by(c, b, 0); }
static mt_status bw_drop(mt_context *c, const bandwidth_item *b) { return bw_drop_by(c, b, 0.1f); }
static mt_status bw_drop_backward(mt_context *c, const bandwidth_item *b) {
    mt_dropout drop = {.at = {.seed = 1, .subsequence = 1, .global_cols = HIDDEN}, .p = 0.1f};
    return mt_bias_dropout_add_backward(c, b->x, drop, b->z, bw_dbias(b));
}
static mt_status bw_multiply(mt_context *c, const bandwidth_item *b) { return mt_multiply(c, b->x, b->r, b->z); }
static mt_status bw_row_backward(mt_context *c, const bandwidth_item *b) {
    return mt_multiply_row_backward(c, b->x, bw_bias(b), b->r, b->z, bw_dbias(b));
}
static mt_status bw_col_backward(mt_context *c, const bandwidth_item *b) {
    return mt_multiply_col_backward(c, b->x, mt_tensor_cols(b->scales, 0, 1), b->r, b->z,
                                    mt_tensor_cols(b->scales, 1, 1));
}
static mt_status bw_sigmoid(mt_context *c, const bandwidth_item *b) { return mt_sigmoid_forward(c, b->x, b->z); }
static mt_status bw_sigmoid_backward(mt_context *c, const bandwidth_item *b) {
    return mt_sigmoid_backward(c, b->x, b->r, b->z);
}
static mt_status bw_silu_backward(mt_context *c, const bandwidth_item *b) {
    return mt_silu_backward(c, b->x, b->r, b->z);
}
static mt_status bw_ce(mt_context *c, const bandwidth_item *b) {
    return mt_cross_entropy_stats(c, &ce_desc, b->logits, b->targets, b->scalars);
}
static mt_status bw_ce_backward(mt_context *c, const bandwidth_item *b) {
    return mt_cross_entropy_backward(c, &ce_desc, b->logits, b->targets, b->lse, mt_none(), 1.0f);
}
static mt_status bw_adamw(mt_context *c, const bandwidth_item *b) {
    mt_adamw adamw = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 1, NULL};
    return mt_adamw_step(c, &adamw, b->p, mt_none(), b->g, b->m, b->v);
}
static mt_status bw_squares(mt_context *c, const bandwidth_item *b) { return mt_sum_of_squares(c, b->g, b->total); }
static mt_status bw_normal(mt_context *c, const bandwidth_item *b) {
    return mt_random_normal(c, b->dh, 0.5f, (mt_random){.seed = 1, .global_cols = b->dh.cols});
}
static mt_status bw_to_bf16(mt_context *c, const bandwidth_item *b) { return mt_convert(c, b->act, b->bf16); }
static mt_status bw_from_bf16(mt_context *c, const bandwidth_item *b) { return mt_convert(c, b->bf16, b->dh); }
static mt_status bw_to_f16(mt_context *c, const bandwidth_item *b) { return mt_convert(c, b->act, b->f16); }
static mt_status bw_from_f16(mt_context *c, const bandwidth_item *b) { return mt_convert(c, b->f16, b->dh); }

enum { BW_WIDE, BW_INNER, BW_LOGITS, BW_FLAT };
#define BW_F32 1
#define BW_BF16 2

/* A row reads and writes `tensors` tensors of a size, counting each of them once; a 16-bit one beside f32 is half a
   tensor. types: the types in which it is measured. */
static const struct bandwidth_row {
    const char *name;
    mt_status (*run)(mt_context *c, const bandwidth_item *b);
    int size;
    double tensors;
    int types;
} bandwidth_rows[] = {{"layer norm", bw_norm, BW_WIDE, 2, BW_F32 | BW_BF16},
                      {"layer norm backward", bw_norm_backward, BW_WIDE, 4, BW_F32 | BW_BF16},
                      {"RMS norm", bw_rms, BW_WIDE, 2, BW_F32},
                      {"RMS norm backward", bw_rms_backward, BW_WIDE, 4, BW_F32},
                      {"bias + gelu", bw_gelu, BW_INNER, 3, BW_F32 | BW_BF16},
                      {"gelu backward + bias gradient", bw_gelu_backward, BW_INNER, 3, BW_F32 | BW_BF16},
                      {"bias + gelu (erf)", bw_erf, BW_INNER, 3, BW_F32},
                      {"gelu (erf) backward + bias gradient", bw_erf_backward, BW_INNER, 3, BW_F32},
                      {"SwiGLU", bw_swiglu, BW_INNER, 1.5, BW_F32},
                      {"SwiGLU backward", bw_swiglu_backward, BW_INNER, 2.5, BW_F32},
                      {"bias + residual", bw_add, BW_WIDE, 3, BW_F32},
                      {"bias + dropout 0.1 + residual", bw_drop, BW_WIDE, 3, BW_F32 | BW_BF16},
                      {"dropout 0.1 backward + bias gradient", bw_drop_backward, BW_WIDE, 2, BW_F32},
                      {"multiply", bw_multiply, BW_WIDE, 3, BW_F32},
                      {"multiply by a row, backward", bw_row_backward, BW_WIDE, 3, BW_F32},
                      {"multiply by a column, backward", bw_col_backward, BW_WIDE, 3, BW_F32},
                      {"sigmoid", bw_sigmoid, BW_WIDE, 2, BW_F32},
                      {"sigmoid backward", bw_sigmoid_backward, BW_WIDE, 3, BW_F32},
                      {"SiLU backward", bw_silu_backward, BW_WIDE, 3, BW_F32},
                      {"cross-entropy forward", bw_ce, BW_LOGITS, 1, BW_F32 | BW_BF16},
                      {"cross-entropy backward", bw_ce_backward, BW_LOGITS, 2, BW_F32 | BW_BF16},
                      {"AdamW", bw_adamw, BW_FLAT, 7, BW_F32},
                      {"sum of squares", bw_squares, BW_FLAT, 1, BW_F32},
                      {"random normal", bw_normal, BW_INNER, 1, BW_F32},
                      {"f32 to bf16", bw_to_bf16, BW_INNER, 1.5, BW_F32},
                      {"bf16 to f32", bw_from_bf16, BW_INNER, 1.5, BW_F32},
                      {"f32 to f16", bw_to_f16, BW_INNER, 1.5, BW_F32},
                      {"f16 to f32", bw_from_f16, BW_INNER, 1.5, BW_F32}};
#define BW_ROWS (int)(sizeof bandwidth_rows / sizeof *bandwidth_rows)

static double bandwidth_bytes(const bandwidth_item *b, int r) {
    const int64_t elements[] = {b->x.rows * b->x.cols, b->h.rows * b->h.cols, b->logits.rows * b->logits.cols,
                                b->p.rows * b->p.cols};
    return bandwidth_rows[r].tensors * (double)(elements[bandwidth_rows[r].size] * mt_dtype_size(b->dtype));
}

/* Returns the item with the first rows of each tensor. All tensors of an operator then stay in an L2 cache of 1 MiB. */
static bandwidth_item bandwidth_cached(const bandwidth_item *b) {
    bandwidth_item c = *b;
    mt_tensor *const wide[] = {&c.x, &c.y, &c.z, &c.r, &c.stats, &c.scales};
    mt_tensor *const inner[] = {&c.h, &c.act, &c.dh, &c.gated, &c.bf16, &c.f16};
    mt_tensor *const flat[] = {&c.p, &c.g, &c.m, &c.v};
    for (int i = 0; i < 6; i++) *wide[i] = mt_tensor_rows(*wide[i], 0, BW_CACHED);
    for (int i = 0; i < 6; i++) *inner[i] = mt_tensor_rows(*inner[i], 0, BW_CACHED / 4);
    for (int i = 0; i < 4; i++) *flat[i] = mt_tensor_cols(*flat[i], 0, BW_CACHED * HIDDEN);
    c.logits = mt_tensor_rows(c.logits, 0, 1);
    c.scalars = mt_tensor_rows(c.scalars, 0, 1);
    c.lse = mt_tensor_cols(c.lse, 0, 1);
    return c;
}

static mt_status run_bandwidth(worker *w, int arg) {
    bandwidth_item *b = w->item;
    return bandwidth_rows[b->rows[arg]].run(w->ctx, b);
}

static mt_status run_bandwidth_cached(worker *w, int arg) {
    const bandwidth_item *b = w->item, c = bandwidth_cached(b);
    return bandwidth_rows[b->rows[arg]].run(w->ctx, &c);
}

static mt_status run_bandwidth_memcpy(worker *w, int arg) {
    bandwidth_item *b = w->item;
    memcpy(b->to, b->from, (size_t)(bandwidth_bytes(b, b->rows[arg]) / 2));
    __asm__ volatile("" : : "r"(b->to) : "memory");
    return MT_SUCCESS;
}

/* Allocates the tensors in the arena, with small random numbers. AdamW's second moment must not be negative. */
static mt_status bandwidth_tensors(worker *w, bandwidth_item *b) {
    const mt_dtype any = b->dtype;
    const struct {
        mt_tensor *t;
        mt_dtype dtype;
        int64_t rows, cols;
    } all[] = {{&b->x, any, TOKENS, HIDDEN},
               {&b->y, any, TOKENS, HIDDEN},
               {&b->z, any, TOKENS, HIDDEN},
               {&b->r, any, TOKENS, HIDDEN},
               {&b->stats, MT_F32, TOKENS, 2},
               {&b->vector, any, 1, 4 * HIDDEN},
               {&b->grads, MT_F32, 1, 4 * HIDDEN},
               {&b->scales, MT_F32, TOKENS, 2},
               {&b->h, any, TOKENS, 4 * HIDDEN},
               {&b->act, any, TOKENS, 4 * HIDDEN},
               {&b->dh, any, TOKENS, 4 * HIDDEN},
               {&b->zero, any, 1, 4 * HIDDEN},
               {&b->gated, any, TOKENS, 2 * HIDDEN},
               {&b->bf16, MT_BF16, TOKENS, 4 * HIDDEN},
               {&b->f16, MT_F16, TOKENS, 4 * HIDDEN},
               {&b->logits, any, CE_TOKENS, GPT_VOCAB},
               {&b->scalars, MT_F32, CE_TOKENS, 4},
               {&b->lse, MT_F32, 2, CE_TOKENS},
               {&b->total, MT_F32, 1, 1},
               {&b->p, MT_F32, 1, FLAT_ELEMENTS},
               {&b->g, MT_F32, 1, FLAT_ELEMENTS},
               {&b->m, MT_F32, 1, FLAT_ELEMENTS},
               {&b->v, MT_F32, 1, FLAT_ELEMENTS}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        mt_random at = {.seed = 9, .subsequence = i, .global_cols = all[i].cols};
        MT_TRY(mt_arena_tensor(w->ctx, all[i].dtype, all[i].rows, all[i].cols, all[i].t));
        MT_TRY(mt_random_normal(w->ctx, *all[i].t, 0.5f, at));
    }
    MT_TRY(mt_fill(w->ctx, b->v, 0.01f));
    MT_TRY(mt_fill(w->ctx, b->zero, 0.0f));
    return mt_fill(w->ctx, b->lse, 11.0f);
}

static mt_status bandwidth_create(worker *w, bandwidth_item *b) {
    void *from, *to;
    MT_TRY(bandwidth_tensors(w, b));
    for (int i = 0; i < CE_TOKENS; i++) b->targets[i] = i * 100;
    for (int r = 0; r < BW_ROWS; r++) b->copy = (size_t)fmax((double)b->copy, bandwidth_bytes(b, r) / 2);
    MT_TRY(mt_arena_alloc(w->ctx, b->copy, &from));
    MT_TRY(mt_arena_alloc(w->ctx, b->copy, &to));
    memset(from, 0, b->copy);
    memset(to, 0, b->copy);
    b->from = from;
    b->to = to;
    return MT_SUCCESS;
}

/* Prints the rows of operator i of the group. A ratio below 1 in the L2 cache is the limit that arithmetic sets. */
static void bandwidth_print(const team *t, const bandwidth_item *b, int i) {
    const bandwidth_item cached = bandwidth_cached(b);
    const double bytes = 1e-9 * bandwidth_bytes(b, b->rows[i]), few = 1e-9 * bandwidth_bytes(&cached, b->rows[i]);
    char name[64];
    snprintf(name, sizeof name, "%s%s", b->dtype == MT_BF16 ? "bf16 " : "", bandwidth_rows[b->rows[i]].name);
    row("bandwidth", name, case_rate(t, 3 * i, bytes), "GB/s", case_ratio(t, 3 * i + 1, 3 * i, 1), "memcpy's GB/s");
    row("bandwidth", "  memcpy of as many bytes", case_rate(t, 3 * i + 1, bytes), "GB/s", 0, NULL);
    row("bandwidth", "  in the L2 cache", case_rate(t, 3 * i + 2, few), "GB/s",
        case_ratio(t, 3 * i + 1, 3 * i + 2, few / bytes), "memcpy's GB/s");
}

/* Measures the `count` rows of b->rows. */
static mt_status bandwidth_measure(worker *w, int count) {
    const bandwidth_item *b = w->item;
    bench_case cases[3 * BW_GROUP] = {{0}};
    for (int i = 0; i < count; i++) {
        cases[3 * i] = (bench_case){run_bandwidth, i, 1, 0};
        cases[3 * i + 1] = (bench_case){run_bandwidth_memcpy, i, 1, 0};
        cases[3 * i + 2] = (bench_case){run_bandwidth_cached, i, 1, 0};
    }
    MT_TRY(measure(w, cases, 3 * count));
    for (int i = 0; i < count && rank_of(w) == 0; i++) bandwidth_print(w->team, b, i);
    return MT_SUCCESS;
}

static mt_status bandwidth_in(worker *w, bandwidth_item *b, mt_dtype dtype) {
    size_t mark = mt_arena_mark(w->ctx);
    int count = 0;
    memset(b, 0, sizeof *b);
    b->dtype = dtype;
    w->item = b;
    if (rank_of(w) == 0) MT_TRY(bandwidth_create(w, b));
    for (int r = 0; r < BW_ROWS; r++) {
        if (bandwidth_rows[r].types & (dtype == MT_F32 ? BW_F32 : BW_BF16)) b->rows[count++] = r;
        if (count < BW_GROUP && (r + 1 < BW_ROWS || count == 0)) continue;
        MT_TRY(bandwidth_measure(w, count));
        count = 0;
    }
    mt_arena_release(w->ctx, mark);
    return MT_SUCCESS;
}

static mt_status item_bandwidth(worker *w) {
    bandwidth_item b;
    MT_TRY(bandwidth_in(w, &b, MT_F32));
    return bandwidth_in(w, &b, MT_BF16);
}

/* ---- item attention: long sequences ------------------------------------------------------------------------------ */

#define ATTENTION_GEMM 1024 /* rows, columns and depth of the product that attention is compared with */
enum { ATTENTION_PRODUCT, ATTENTION_FORWARD, ATTENTION_BACKWARD, ATTENTION_CASES };

static const struct attention_size {
    int64_t tokens, head_dim;
    float dropout;
} attention_sizes[] = {{8192, 64, 0}, {8192, 128, 0}, {8192, 64, 0.1f}, {32768, 64, 0}, {32768, 128, 0}};
#define ATTENTION_SIZES (int)(sizeof attention_sizes / sizeof *attention_sizes)

/* One sequence and one head, causal. */
typedef struct attention_item {
    mt_attention_desc desc;
    mt_dtype dtype;
    mt_tensor qkv, out, lse, dout, dqkv, a, b, c;
    size_t arena[2]; /* of a forward and of a backward */
} attention_item;

static mt_status run_attention(worker *w, int backward) {
    attention_item *x = w->item;
    size_t mark = mt_arena_mark(w->ctx);
    mt_arena_reset_peak(w->ctx);
    if (backward) MT_TRY(mt_attention_backward(w->ctx, &x->desc, x->qkv, x->out, x->lse, x->dout, x->dqkv));
    else MT_TRY(mt_attention_forward(w->ctx, &x->desc, x->qkv, x->out, x->lse));
    x->arena[backward] = mt_arena_peak(w->ctx) - mark;
    return MT_SUCCESS;
}

static mt_status run_attention_product(worker *w, int count) {
    attention_item *x = w->item;
    for (int i = 0; i < count; i++) MT_TRY(mt_gemm(w->ctx, MT_NO_TRANS, MT_TRANS, 1, x->a, x->b, 0, x->c));
    return MT_SUCCESS;
}

static mt_status attention_create(worker *w, const struct attention_size *size, attention_item *x) {
    const int64_t tokens = x->desc.seq, d = size->head_dim, n = ATTENTION_GEMM;
    const struct {
        mt_tensor *t;
        mt_dtype dtype;
        int64_t rows, cols;
    } all[] = {{&x->qkv, x->dtype, tokens, 3 * d},
               {&x->dqkv, x->dtype, tokens, 3 * d},
               {&x->out, x->dtype, tokens, d},
               {&x->dout, x->dtype, tokens, d},
               {&x->lse, MT_F32, 1, tokens},
               {&x->a, x->dtype, n, n},
               {&x->b, x->dtype, n, n},
               {&x->c, x->dtype, n, n}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        mt_random at = {.seed = 5, .subsequence = i, .global_cols = all[i].cols};
        MT_TRY(mt_arena_tensor(w->ctx, all[i].dtype, all[i].rows, all[i].cols, all[i].t));
        MT_TRY(mt_random_normal(w->ctx, *all[i].t, 0.5f, at));
    }
    return MT_SUCCESS;
}

static void attention_rows(const team *t, const attention_item *x, int cases, int products) {
    const double n = ATTENTION_GEMM, product = 2e-9 * n * n * n * products;
    const double seq = (double)x->desc.seq, width = (double)x->desc.head_dim;
    for (int c = ATTENTION_FORWARD; c < cases; c++) {
        int backward = c == ATTENTION_BACKWARD;
        double flops = 1e-9 * (1 + backward) * attention_flops(1, seq, width);
        double views = bytes_of(x->qkv) + bytes_of(x->out) + bytes_of(x->lse);
        char name[64];
        if (backward) views += bytes_of(x->dqkv) + bytes_of(x->dout);
        snprintf(name, sizeof name, "%s, %.0f tokens, head of %.0f, %s%s", mt_dtype_name(x->dtype), seq, width,
                 x->desc.dropout.p > 0 ? "dropout, " : "", backward ? "backward" : "forward");
        row("attention", name, case_rate(t, c, flops), "GFLOP/s", case_ratio(t, ATTENTION_PRODUCT, c, flops / product),
            "mt_gemm's GFLOP/s");
        row("attention", "  mt_gemm 1024x1024x1024", case_rate(t, ATTENTION_PRODUCT, product), "GFLOP/s", 0, NULL);
        row("attention", "  arena", exactly((double)x->arena[backward] / (1 << 20)), "MiB",
            (double)x->arena[backward] / views, "bytes of its views");
    }
}

/* Long calls are made once, without a warm-up. */
static mt_status attention_measure(worker *w, const struct attention_size *size, mt_dtype dtype) {
    attention_item x = {.desc = {.batch = 1, .seq = opt->tiny ? 512 : size->tokens, .groups = 1, .heads_per_group = 1},
                        .dtype = dtype};
    const int products = opt->tiny ? 1 : 8;
    const bench_case cases[ATTENTION_CASES] = {[ATTENTION_PRODUCT] = {run_attention_product, products, 1, 0},
                                               [ATTENTION_FORWARD] = {run_attention, 0, 1, 0},
                                               [ATTENTION_BACKWARD] = {run_attention, 1, 1, 0}};
    const int count = opt->quick ? ATTENTION_BACKWARD : ATTENTION_CASES;
    size_t mark = mt_arena_mark(w->ctx);
    x.desc.head_dim = size->head_dim;
    x.desc.dropout.p = size->dropout;
    x.desc.dropout.at.global_cols = 1;
    w->item = &x;
    if (rank_of(w) == 0) {
        w->team->once = size->tokens > 8192;
        MT_TRY(attention_create(w, size, &x));
    }
    MT_TRY(barrier(w));
    MT_TRY(measure(w, cases, count));
    if (rank_of(w) == 0) attention_rows(w->team, &x, count, products);
    mt_arena_release(w->ctx, mark);
    return barrier(w);
}

static mt_status item_attention(worker *w) {
    static const mt_dtype dtypes[] = {MT_F32, MT_BF16};
    for (int i = 0; i < (opt->quick || opt->tiny ? 3 : ATTENTION_SIZES); i++)
        for (int d = 0; d < 2; d++) MT_TRY(attention_measure(w, &attention_sizes[i], dtypes[d]));
    return MT_SUCCESS;
}

/* ---- item context: attention of sequences of which each rank has a part ------------------------------------------ */

enum { CONTEXT_HEADS = 12, CONTEXT_DIM = 64 };

static const struct context_way {
    const char *name;
    mt_context_parallel_desc how;
} context_ways[] = {{"ring, zigzag", {MT_CP_P2P, 0}},
                    {"ring, contiguous", {MT_CP_P2P, 1}},
                    {"all-gather, zigzag", {MT_CP_ALL_GATHER, 0}},
                    {"all-to-all", {MT_CP_A2A, 0}}};
#define CONTEXT_WAYS (int)(sizeof context_ways / sizeof *context_ways)
/* The ways forward, then forward and backward, then one rank with the whole sequence, then what a ring sends. */
enum { CONTEXT_ALONE = 2 * CONTEXT_WAYS, CONTEXT_SENDS = CONTEXT_ALONE + 2, CONTEXT_CASES = CONTEXT_SENDS + 2 };

typedef struct context_item {
    mt_attention_desc desc;
    mt_tensor q, k, v, out, lse, dout, dq, dk, dv; /* of a rank; those of rank 0 have room for all tokens */
} context_item;

/* A view of the first rows, in lse of the first columns, for the tokens of a rank. */
static mt_tensor context_rows(const context_item *x, mt_tensor t, int ranks) {
    return mt_tensor_rows(t, 0, x->desc.seq / ranks);
}

static mt_status context_call(worker *w, int backward, int ranks, const mt_context_parallel_desc *how) {
    const context_item *x = w->item;
    mt_tensor q = context_rows(x, x->q, ranks), k = context_rows(x, x->k, ranks), v = context_rows(x, x->v, ranks);
    mt_tensor out = context_rows(x, x->out, ranks), lse = mt_tensor_cols(x->lse, 0, q.rows);
    mt_tensor dout = context_rows(x, x->dout, ranks);
    if (ranks == 1) MT_TRY(mt_dot_product_attention_forward(w->ctx, &x->desc, q, k, v, out, lse));
    else MT_TRY(mt_context_parallel_attention_forward(w->ctx, w->world, how, &x->desc, q, k, v, out, lse));
    if (!backward) return MT_SUCCESS;
    if (ranks == 1)
        return mt_dot_product_attention_backward(w->ctx, &x->desc, q, k, v, out, lse, dout, x->dq, x->dk, x->dv);
    return mt_context_parallel_attention_backward(w->ctx, w->world, how, &x->desc, q, k, v, out, lse, dout,
                                                  context_rows(x, x->dq, ranks), context_rows(x, x->dk, ranks),
                                                  context_rows(x, x->dv, ranks));
}

static mt_status run_context(worker *w, int arg) {
    return context_call(w, arg / CONTEXT_WAYS, mt_comm_size(w->world), &context_ways[arg % CONTEXT_WAYS].how);
}

static mt_status run_context_alone(worker *w, int backward) { return context_call(w, backward, 1, NULL); }

/* What the ring sends, without the attention. */
static mt_status run_context_sends(worker *w, int backward) {
    const context_item *x = w->item;
    const int ranks = mt_comm_size(w->world), next = (rank_of(w) + 1) % ranks, last = (rank_of(w) + ranks - 1) % ranks;
    const size_t count = (size_t)(x->desc.seq / ranks * x->k.cols);
    /* forward: k and v, n - 1 times; backward: these again, and the gradients of both n times */
    for (int i = 0; i < 2 * (ranks - 1) * (1 + backward) + 2 * ranks * backward; i++)
        MT_TRY(mt_send_recv(w->ctx, w->world, x->k.data, count, next, x->dk.data, count, last, MT_F32));
    return MT_SUCCESS;
}

static mt_status context_create(worker *w, context_item *x) {
    const int64_t tokens = x->desc.seq / (rank_of(w) == 0 ? 1 : mt_comm_size(w->world));
    mt_tensor *const all[] = {&x->q, &x->k, &x->v, &x->out, &x->dout, &x->dq, &x->dk, &x->dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        mt_random at = {.seed = 5, .subsequence = i, .global_cols = CONTEXT_HEADS * CONTEXT_DIM};
        MT_TRY(mt_arena_tensor(w->ctx, MT_F32, tokens, CONTEXT_HEADS * CONTEXT_DIM, all[i]));
        MT_TRY(mt_random_normal(w->ctx, *all[i], 0.5f, at));
    }
    return mt_arena_tensor(w->ctx, MT_F32, CONTEXT_HEADS, tokens, &x->lse);
}

static void context_rows_of(const team *t, const context_item *x, int way) {
    char name[64];
    snprintf(name, sizeof name, "%s, %lld tokens, %d ranks", context_ways[way].name, (long long)x->desc.seq, t->size);
    for (int backward = 0; backward < 2; backward++) {
        const int c = backward * CONTEXT_WAYS + way;
        row("context", backward ? "  with backward" : name, case_time(t, c, 1), "s",
            case_ratio(t, c, CONTEXT_ALONE + backward, t->size), "1 rank's time / ranks");
        if (context_ways[way].how.comm_type == MT_CP_P2P)
            row("context", "  sending alone", case_time(t, CONTEXT_SENDS + backward, 1), "s",
                case_ratio(t, CONTEXT_SENDS + backward, c, 1), "of it");
    }
}

static mt_status context_measure(worker *w, int64_t tokens) {
    context_item x = {
        .desc = {.batch = 1, .seq = tokens, .groups = CONTEXT_HEADS, .heads_per_group = 1, .head_dim = CONTEXT_DIM}};
    bench_case cases[CONTEXT_CASES];
    size_t mark = mt_arena_mark(w->ctx);
    for (int i = 0; i < CONTEXT_ALONE; i++) cases[i] = (bench_case){run_context, i, 0, 0};
    for (int i = 0; i < 2; i++) {
        cases[CONTEXT_ALONE + i] = (bench_case){run_context_alone, i, 1, 0};
        cases[CONTEXT_SENDS + i] = (bench_case){run_context_sends, i, 0, 0};
    }
    w->item = &x;
    if (rank_of(w) == 0) w->team->once = tokens > 8192;
    MT_TRY(context_create(w, &x));
    MT_TRY(barrier(w));
    MT_TRY(measure(w, cases, CONTEXT_CASES));
    for (int way = 0; way < CONTEXT_WAYS && rank_of(w) == 0; way++) context_rows_of(w->team, &x, way);
    mt_arena_release(w->ctx, mark);
    return barrier(w);
}

static mt_status item_context(worker *w) {
    if (opt->tokens) return context_measure(w, opt->tokens);
    if (opt->tiny || opt->quick) return context_measure(w, opt->tiny ? 256 : 2048);
    MT_TRY(context_measure(w, 4096));
    return context_measure(w, 16384);
}

/* ---- item memory: on the meta device, which allocates nothing ---------------------------------------------------- */

static mt_status memory_forward(mt_context *ctx, mt_grid *grid, int sequence_parallel, double *bytes) {
    mt_params *params = NULL;
    mt_transformer_layer layer;
    mt_transformer_layer_saved saved;
    mt_transformer_layer_desc d = layer_desc(0.1f, HIDDEN);
    mt_batch batch = {.sequences = 1, .seq = TOKENS};
    mt_tensor x = mt_none(), y = mt_none();
    int64_t rows = sequence_parallel ? TOKENS / grid->tp_size : TOKENS;
    size_t mark = 0;
    mt_status status = mt_params_create(ctx, grid, &params);
    d.sequence_parallel = sequence_parallel;
    MT_KEEP(status, mt_transformer_layer_create(ctx, params, "layer", &d, &layer));
    MT_KEEP(status, mt_params_init(ctx, params, 1));
    MT_KEEP(status, mt_arena_tensor(ctx, MT_F32, rows, HIDDEN, &y));
    mark = mt_arena_mark(ctx); /* x counts as memory of the layer, because backward reads it */
    MT_KEEP(status, mt_arena_tensor(ctx, MT_F32, rows, HIDDEN, &x));
    MT_KEEP(status, mt_transformer_layer_forward(ctx, &layer, &batch, x, y, &saved));
    *bytes = (double)(mt_arena_mark(ctx) - mark);
    mt_params_destroy(params);
    return status;
}

static mt_status memory_of(int split, int sequence_parallel, double *bytes) {
    mt_context_desc where = {.device = MT_DEVICE_META};
    mt_grid_desc shape = {.tp = split};
    mt_context *ctx = NULL;
    mt_comm *world = NULL;
    mt_grid grid = {0};
    mt_status status = mt_comm_create_meta(split, 0, &world);
    if (status == MT_SUCCESS) status = mt_context_create(world, &where, &ctx);
    if (status == MT_SUCCESS) status = mt_grid_create(world, &shape, &grid);
    if (status == MT_SUCCESS) status = memory_forward(ctx, &grid, sequence_parallel, bytes);
    if (status != MT_SUCCESS) fprintf(stderr, "bench: memory, TP=%d: %s\n", split, ctx ? mt_last_error(ctx) : "");
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
    return status;
}

/* Returns the bytes that a layer keeps. With 4 bytes for each value, these are per token and per feature of hidden: 16
   for the input, the outputs of both norms and the activation between the sublayers; 16 for qkv and the output of
   attention; 32 for the two inner activations of the MLP. by_heads = 1: attention is split by whole heads. On 8 ranks,
   HEADS = 12 gives 2 heads to each rank (and none to the last two), not 1.5. */
static double memory_formula(int split, int sequence_parallel, int by_heads) {
    double share = by_heads ? (double)((HEADS + split - 1) / split) / HEADS : 1.0 / split;
    return (double)TOKENS * HIDDEN * (16.0 / (sequence_parallel ? split : 1) + 16 * share + 32.0 / split);
}

static mt_status memory_row(int split, int sequence_parallel) {
    const char *formula = sequence_parallel ? "s b h 64/t bytes" : "s b h (16 + 48/t) bytes";
    char name[64];
    double bytes = 0;
    MT_TRY(memory_of(split, sequence_parallel, &bytes));
    stat3 mib = exactly(bytes / (1 << 20));
    snprintf(name, sizeof name, "kept, TP=%d%s", split, sequence_parallel ? ", sequence parallel" : "");
    row("memory", name, mib, "MiB", bytes / memory_formula(split, sequence_parallel, 0), formula);
    if (HEADS % split)
        row("memory", "  the same", mib, "MiB", bytes / memory_formula(split, sequence_parallel, 1),
            "that, by whole heads");
    return MT_SUCCESS;
}

static mt_status item_memory(void) {
    for (int split = 1; split <= 8; split *= 2) MT_TRY(memory_row(split, 0));
    for (int split = 1; split <= 8; split *= 2) MT_TRY(memory_row(split, 1));
    return MT_SUCCESS;
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

typedef struct item {
    const char *name, *title;
    mt_status (*run)(worker *w);
    int ranks;
} item;

static const item items[] = {
    {"gemm", "mt_gemm alone: the GEMMs of one layer, hidden 768, 1024 tokens; m x n x k of a rank", item_gemm, RANKS},
    {"gemm", "mt_gemm in bf16, and with few rows, on one core; m x n x k", item_products, RANKS},
    {"layer", "one layer, forward + backward, hidden 768, 12 heads, one sequence of 1024 tokens, float", item_layer,
     RANKS},
    {"composed", "blocks of the functions for authors of blocks beside built-in ones, forward + backward, hidden 768",
     item_composed, RANKS},
    {"checking", "one layer in check mode, forward + backward, TP=2, float", item_checking, RANKS},
    {"breakdown", "the layer's operators at TP=2, one after the other, as rank 0 sees them", item_breakdown, RANKS},
    {"gpt2", "training step, 12 layers, vocabulary 50257, AdamW, clipped", item_gpt, RANKS},
    {"inference", "one forward of an encoder: batch 1, 128 tokens", item_inference, RANKS},
    {"decode", "generation with a key/value cache, batch 1: 64 tokens after a prompt of 64", item_decode, RANKS},
    {"invariant", "training step in invariant mode, beside the default", item_invariant, RANKS},
    {"invariant", "8 ranks", item_invariant_many, MANY_RANKS},
    {"zero_grad", "training step with each of the calls that make gradients zero, one rank", item_zero_grad, 1},
    {"plan",
     "training step of small GPTs, measured and predicted; rates of products from the shapes of these steps, of other "
     "operators from another model (hidden 384)",
     item_plan, RANKS},
    {"scaling", "tensor parallel GPTs, one rank per core; weak: as many parameters for each rank", item_scaling, RANKS},
    {"scaling", "4 ranks", item_scaling, 4},
    {"scaling", "8 ranks", item_scaling, 8},
    {"collectives", "ranks as threads, one per core", item_collectives, RANKS},
    {"collectives", "4 ranks", item_many_ranks, 4},
    {"collectives", "8 ranks", item_many_ranks, MANY_RANKS},
    {"collectives", "16 ranks", item_many_ranks, 16},
    {"collectives", "64 ranks", item_many_ranks, MAX_RANKS},
    {"bandwidth", "operators on one core; bytes read and written, each tensor counted once", item_bandwidth, RANKS},
    {"attention", "causal attention of long sequences on one core, one head", item_attention, RANKS},
    {"context", "causal attention over context ranks, hidden 768, 12 heads, float", item_context, RANKS},
    {"context", "4 ranks", item_context, 4}};
#define ITEMS (int)(sizeof items / sizeof *items)

static int wanted(const char *name) { return !opt->only || strcmp(opt->only, name) == 0; }

typedef struct session {
    const item *item;
    team *team;
} session;

static size_t arena_mib(const item *i) {
    if (i->ranks > MANY_RANKS) return 1;
    return i->run != item_context ? 512 : opt->tokens > 16384 ? (size_t)opt->tokens / 16 : 1536;
}

static mt_status rank_main(mt_comm *world, void *user) {
    const session *s = user;
    mt_context_desc where = {.threads = 1, .arena_bytes = arena_mib(s->item) << 20};
    worker w = {.team = s->team, .world = world};
    mt_status status;
    MT_TRY(mt_context_create(world, &where, &w.ctx));
    status = find_best(&w);
    if (status == MT_SUCCESS) status = s->item->run(&w);
    mt_context_destroy(w.ctx);
    return status;
}

static mt_status run_item(const item *i, team *t) {
    mt_launch_desc ranks = {.ranks = i->ranks};
    session s = {i, t};
    int pinned = i->ranks <= core_count;
    char title[256];
    if (!wanted(i->name)) return MT_SUCCESS;
    memset(t, 0, sizeof *t);
    t->size = i->ranks;
    t->calibrators = pinned ? i->ranks : 1;
    snprintf(title, sizeof title, "%s%s", i->title,
             i->ranks == RANKS ? ""
             : pinned          ? ", each with a core"
                               : ", more than cores, not pinned");
    table_item(i->name, title);
    return mt_launch(&ranks, rank_main, &s);
}

static mt_status run_all(void) {
    team *t = calloc(1, sizeof *t);
    mt_status status = t ? MT_SUCCESS : MT_ERR_MEMORY;
    for (int i = 0; i < ITEMS && status == MT_SUCCESS; i++) status = run_item(&items[i], t);
    free(t);
    if (status == MT_SUCCESS && wanted("memory")) {
        table_item("memory", "arena of one layer from forward to backward, and its input; float, dropout 0.1");
        status = item_memory();
    }
    return status;
}

/* Where the lines that start with # go: with --csv not into the CSV. */
static FILE *notes(void) { return opt->csv ? stderr : stdout; }

static void print_machine(void) {
    char line[256], model[200] = "unknown";
    double load = 0;
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %199[^\n]", model) == 1) break;
    if (f) fclose(f);
    fprintf(notes(), "# %s, %d core%s; GEMM: %s, 1 thread per rank unless said; %s run\n", model, core_count,
            core_count == 1 ? "" : "s", mt_gemm_library(),
            opt->tiny    ? "tiny"
            : opt->quick ? "quick"
                         : "full");
    if (getloadavg(&load, 1) == 1 && load > 1)
        fprintf(notes(),
                "# load average %.1f at the start: other programs run, which the calibration loop sees only in part\n",
                load);
    if (core_count < RANKS) fprintf(notes(), "# fewer cores than ranks: two-rank rows mean little\n");
    fprintf(notes(), "# layer: GFLOP = 72 tokens hidden^2 (GEMMs) + 6 seq (seq + 1) hidden (causal attention) = %.2f\n",
            1e-9 * layer_flops());
    fprintf(notes(), "# GPT-2: GFLOP = 6 parameters tokens + 6 seq (seq + 1) hidden per sequence and layer\n");
}

static void print_rounds(void) {
    fprintf(notes(), "%s# rounds: %d kept, %d discarded because a core ran more than 4 %% below its best",
            opt->csv ? "" : "\n", rounds_kept, rounds_discarded);
    if (rounds_slow)
        fprintf(notes(), "; %d of the kept ones are such (limit of %d tries): read them with care", rounds_slow, TRIES);
    fprintf(notes(), "\n");
}

static void print_help(void) {
    printf("usage: bench [--csv] [--quick] [--tiny] [--seconds S] [--only ITEM] [--unpacked] [--tokens N]\n"
           "             [--machine FILE]\n"
           "  --csv        lines item,name,median,min,max,unit,ratio,versus instead of a table; comments go to stderr\n"
           "  --quick      3 to 5 samples of each\n"
           "  --tiny       one sample of each, and small GPTs in plan and scaling: only shows that everything runs\n"
           "  --seconds S  time for each item (default 15)\n"
           "  --only ITEM  one of gemm layer composed checking breakdown gpt2 inference decode invariant plan\n"
           "               scaling collectives bandwidth attention context memory\n"
           "  --unpacked   item inference without packed weights\n"
           "  --tokens N   item context with one sequence of N tokens, a multiple of 8: 65536 takes half an hour\n"
           "  --machine FILE  item plan writes the rates of 2 ranks at once, for train_gpt --dry-run --machine FILE\n");
}

/* When libgomp is told to bind threads, it binds the first thread as it is loaded. All ranks would inherit its core. */
static int bound_by_openmp(void) {
    int asked = getenv("OMP_PROC_BIND") || getenv("OMP_PLACES") || getenv("GOMP_CPU_AFFINITY");
    if (core_count >= RANKS || !asked) return 0;
    fprintf(stderr,
            "bench: OpenMP has bound this process to %d core; unset OMP_PROC_BIND, OMP_PLACES and\n"
            "bench: GOMP_CPU_AFFINITY: bench pins its threads itself\n",
            core_count);
    return 1;
}

static int known_item(const char *name) {
    for (int i = 0; i < ITEMS; i++)
        if (strcmp(items[i].name, name) == 0) return 1;
    return strcmp(name, "memory") == 0;
}

static int parse(int argc, char **argv, options *o) {
    static const struct option table[] = {
        {"csv", no_argument, NULL, 'c'},          {"quick", no_argument, NULL, 'q'},
        {"tiny", no_argument, NULL, 't'},         {"seconds", required_argument, NULL, 's'},
        {"only", required_argument, NULL, 'o'},   {"machine", required_argument, NULL, 'm'},
        {"help", no_argument, NULL, 'h'},         {"unpacked", no_argument, NULL, 'u'},
        {"tokens", required_argument, NULL, 'n'}, {NULL, 0, NULL, 0}};
    int c;
    while ((c = getopt_long(argc, argv, "", table, NULL)) != -1) {
        char *end = NULL;
        if (c == 'c') o->csv = 1;
        else if (c == 'q') o->quick = 1;
        else if (c == 't') o->tiny = 1;
        else if (c == 'h') o->help = 1;
        else if (c == 'u') o->unpacked = 1;
        else if (c == 'o') o->only = optarg;
        else if (c == 'm') o->machine = optarg;
        else if (c == 's') o->seconds = strtod(optarg, &end);
        else if (c == 'n') o->tokens = strtoll(optarg, &end, 10);
        else return 0;
        if (c == 's' && (*end || !(o->seconds > 0))) return 0;
        if (c == 'n' && (*end || o->tokens < 8 || o->tokens > 1 << 20 || o->tokens % 8)) return 0;
    }
    return optind == argc && (!o->only || known_item(o->only));
}

int main(int argc, char **argv) {
    options o = {.seconds = 15};
    mt_status status;
    if (!parse(argc, argv, &o) || o.help) {
        print_help();
        return o.help ? 0 : 1;
    }
    opt = &o;
    core_count = allowed_cores(first_cores, RANKS);
    free_gib_at_start = free_gib();
    for (int i = 0; i < SETUPS && o.tiny; i++) setups[i].size = tiny_size(setups[i].size);
    for (int i = 0; i <= GPT_TOKENS; i++) gpt_tokens[i] = (int32_t)((uint32_t)i * 2654435761u % GPT_LEAST_VOCAB);
    if (bound_by_openmp()) return 1;
    print_machine();
    table_begin();
    status = run_all();
    print_rounds();
    return status == MT_SUCCESS ? 0 : 1;
}
