/* mutants.h - runs a parallel program and its mutants: wrong programs that mutate.pl has made of it. See
   ../mutants.sh.

   A program includes this file after megatron.h, and defines

     static const mt_grid_desc program_grid = {.tp = 2};       the split of 4 ranks
     static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result);

   A program with several variants also defines MUTANTS_VARIANTS, their number; mutants_variant is the one that runs.
   program creates its parameters in `params`, and trains for some steps. In each it tells its loss (mutants_loss) and,
   after mt_sync_gradients, its gradients (mutants_gradients). The program runs on 1 and on 4 ranks, which are threads,
   and on one rank of 4 on the meta device, where mutants_loss and mutants_gradients do nothing. What that accepts runs
   on 4 ranks on the meta device, and what these accept, too, on 4 ranks that compute and compare values (check mode
   2). */

#ifndef MT_MUTANTS_H
#define MT_MUTANTS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../mt_test_message.h"

/* place: file and function. wants: what the message of the refused program must have, one of the words between |.
   kind: call or value, see ../mutants.sh. */
typedef struct mutant {
    const char *place, *title, *wants, *kind;
} mutant;

#include "mutants_list.h" /* written by mutate.pl: the mutants of this program */

enum { MUTANTS_RANKS = 4, MUTANTS_VALUES = 1 << 18, MUTANTS_LOSSES = 16, MUTANTS_GRADIENTS = 512 };

#ifndef MUTANTS_VARIANTS
#define MUTANTS_VARIANTS 1
#endif

static int mutants_variant;
static int mutants_selected; /* the number of the mutant that runs; 0: the program as it is */
static char mutants_reached[MUTANTS_COUNT + 1];

/* The mutated sources ask this at the place of each mutant. */
int mutants_is(int number);
int mutants_is(int number) {
    mutants_reached[number] = 1;
    return number == mutants_selected;
}

/* The gradient of a parameter in a step: the sum of its squares on this rank. */
typedef struct mutants_gradient {
    char name[64];
    int step, is_split; /* is_split: every tensor rank has a part */
    double squares;
    int64_t first, count; /* in values */
} mutants_gradient;

/* What one rank has computed. */
typedef struct mutants_result {
    float values[MUTANTS_VALUES]; /* gradients, one after the other */
    mutants_gradient gradients[MUTANTS_GRADIENTS];
    int64_t count;
    int tensors, losses;
    double loss[MUTANTS_LOSSES];
} mutants_result;

/* Adds this rank's part of the loss: the sum over the ranks of the data group and over pipeline stages is the loss of
   the step. `loss` is [1, n] or [n, 1], MT_F32; its elements are added up, and multiplied by scale. A rank of a stage
   that has no loss passes mt_none(). */
static mt_status mutants_loss(mt_context *ctx, mutants_result *result, mt_tensor loss, float scale) {
    double sum = 0;
    if (mt_context_device(ctx) == MT_DEVICE_META) return MT_SUCCESS;
    for (int64_t i = 0; i < loss.rows * loss.cols; i++) sum += (double)((const float *)loss.data)[i];
    if (result->losses == MUTANTS_LOSSES) return mt_fail(ctx, MT_ERR_SHAPE, "mutants_loss: too many steps");
    result->loss[result->losses++] = sum * (double)scale;
    return MT_SUCCESS;
}

/* Keeps the gradients of all parameters. */
static mt_status mutants_gradients(mt_context *ctx, mutants_result *result, mt_params *params) {
    if (mt_context_device(ctx) == MT_DEVICE_META) return MT_SUCCESS;
    for (int i = 0; i < mt_params_count(params); i++) {
        const mt_param *p = mt_params_at(params, i);
        mutants_gradient *g = &result->gradients[result->tensors];
        const int64_t n = p->grad.rows * p->grad.cols;
        if (result->count + n > MUTANTS_VALUES || result->tensors == MUTANTS_GRADIENTS)
            return mt_fail(ctx, MT_ERR_SHAPE, "mutants_gradients: too many parameters");
        memset(g, 0, sizeof *g);
        snprintf(g->name, sizeof g->name, "%s", p->name);
        g->step = result->losses;
        g->is_split = p->desc.placement != MT_REPLICATED;
        g->first = result->count;
        g->count = n;
        for (int64_t j = 0; j < n; j++) {
            const float value = ((const float *)p->grad.data)[j];
            g->squares += (double)value * value;
            result->values[result->count++] = value;
        }
        result->tensors++;
    }
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result);

/* ---- runs -------------------------------------------------------------------------------------------------------- */

typedef struct mutants_run {
    mutants_result ranks[MUTANTS_RANKS];
    int size; /* number of ranks */
    mt_context_desc where;
    mt_status status;
    char messages[MUTANTS_RANKS][MT_ERROR_BYTES]; /* of each rank */
    char message[MT_ERROR_BYTES];                 /* the one that is printed */
} mutants_run;

static mt_status mutants_rank(mt_comm *world, const mt_context_desc *where, mutants_result *result, char *message) {
    mt_context *ctx = NULL;
    mt_params *params = NULL;
    mt_grid grid = {0};
    mt_grid_desc shape = program_grid;
    mt_status status;
    if (mt_comm_size(world) == 1) memset(&shape, 0, sizeof shape);
    status = mt_context_create(world, where, &ctx);
    if (status == MT_SUCCESS) status = mt_grid_create(world, &shape, &grid);
    if (status == MT_SUCCESS) status = mt_params_create(ctx, &grid, &params);
    if (status == MT_SUCCESS) status = program(ctx, &grid, params, result);
    snprintf(message, MT_ERROR_BYTES, "%s", ctx ? mt_last_error(ctx) : "no context");
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return status;
}

static mt_status mutants_thread(mt_comm *world, void *user) {
    mutants_run *run = (mutants_run *)user;
    const int rank = mt_comm_rank(world);
    return mutants_rank(world, &run->where, &run->ranks[rank], run->messages[rank]);
}

static void mutants_quiet(void *user, mt_log_level level, const char *message) {
    (void)user, (void)level, (void)message;
}

static char mutants_badly_said[MT_ERROR_BYTES + 64]; /* the first message that is not one sentence */
static int mutants_is_badly_said;

static void mutants_hear(void *user, mt_log_level level, const char *message) {
    const char *fault = test_message_fault(message);
    (void)user, (void)level;
    if (fault && !__atomic_exchange_n(&mutants_is_badly_said, 1, __ATOMIC_RELAXED))
        snprintf(mutants_badly_said, sizeof mutants_badly_said, "%s: %s", fault, message);
}

/* Runs the program on ranks that are threads. check: mt_context_desc.check. */
static void mutants_launch(int ranks, mt_device device, int check, mutants_run *run) {
    mt_launch_desc launch = {.ranks = ranks, .timeout_s = 20, .logger = {mutants_quiet, NULL}};
    mt_context_desc where = {
        .arena_bytes = (size_t)32 << 20, .device = device, .check = check, .logger = {mutants_hear, NULL}};
    run->size = ranks;
    run->where = where;
    for (int i = 0; i < ranks; i++) run->ranks[i].count = run->ranks[i].tensors = run->ranks[i].losses = 0;
    run->status = mt_launch(&launch, mutants_thread, run);
}

static void mutants_compute(int ranks, mutants_run *run) { mutants_launch(ranks, MT_DEVICE_CPU, 0, run); }

/* One rank of 4 on the meta device, or one after the other until one refuses. */
static void mutants_check(mutants_run *run) {
    mt_context_desc where = {.device = MT_DEVICE_META, .check = 1, .logger = {mutants_hear, NULL}};
    run->status = MT_SUCCESS;
    for (int rank = 0; rank < MUTANTS_RANKS && run->status == MT_SUCCESS; rank++) {
        mt_comm *world;
        if ((run->status = mt_comm_create_meta(MUTANTS_RANKS, rank, &world)) != MT_SUCCESS) return;
        run->status = mutants_rank(world, &where, &run->ranks[0], run->message);
        mt_comm_destroy(world);
    }
}

/* ---- comparisons ------------------------------------------------------------------------------------------------- */

/* Rounding: sums over ranks are added in another order. A norm below MUTANTS_ZERO is zero, but for rounding. */
#define MUTANTS_ROUNDING 1e-4
#define MUTANTS_ZERO 1e-6

/* The distance of two vectors, relative to the second. NaN is infinite. */
static double mutants_distance(const float *a, const float *b, int64_t n) {
    double d = 0, square = 0;
    for (int64_t i = 0; i < n; i++) {
        d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        square += (double)b[i] * b[i];
    }
    d = sqrt(d) / (sqrt(square) > MUTANTS_ZERO ? sqrt(square) : 1);
    return isfinite(d) ? d : INFINITY;
}

static int mutants_tp(const mutants_run *run) { return run->size == 1 || !program_grid.tp ? 1 : program_grid.tp; }

/* The loss of a step: the sum over data ranks and stages. Tensor ranks have the same. */
static double mutants_loss_of(const mutants_run *run, int step) {
    double sum = 0;
    for (int i = 0; i < run->size; i++) sum += run->ranks[i].loss[step];
    return sum / mutants_tp(run);
}

static double mutants_losses_differ(const mutants_run *a, const mutants_run *b) {
    double most = 0;
    if (a->ranks[0].losses != b->ranks[0].losses) return INFINITY;
    for (int s = 0; s < a->ranks[0].losses; s++) {
        double x = mutants_loss_of(a, s), d = fabs(x - mutants_loss_of(b, s)) / fabs(x);
        if (!(d <= most)) most = isfinite(d) ? d : INFINITY;
    }
    return most;
}

/* The largest distance of a gradient of any rank, in two runs with the same ranks. */
static double mutants_gradients_differ(const mutants_run *a, const mutants_run *b) {
    double most = 0;
    for (int r = 0; r < a->size; r++) {
        const mutants_result *x = &a->ranks[r], *y = &b->ranks[r];
        if (x->count != y->count || x->tensors != y->tensors) return INFINITY;
        for (int t = 0; t < x->tensors; t++) {
            const mutants_gradient *g = &x->gradients[t];
            double d = mutants_distance(y->values + g->first, x->values + g->first, g->count);
            if (d > most) most = d;
        }
    }
    return most;
}

/* The norm of a gradient: of all parts of the tensor group that rank `rank` is in, or of its copy. */
static double mutants_norm_of(const mutants_run *run, int rank, const char *name, int step) {
    int tp = mutants_tp(run), group = rank - rank % tp;
    double sum = 0;
    for (int r = group; r < group + tp; r++)
        for (int t = 0; t < run->ranks[r].tensors; t++) {
            const mutants_gradient *g = &run->ranks[r].gradients[t];
            if (g->step == step && strcmp(g->name, name) == 0 && (g->is_split || r == rank)) sum += g->squares;
        }
    return sqrt(sum);
}

/* The largest relative difference of the norm of a gradient on any rank to that on one rank. */
static double mutants_norms_differ(const mutants_run *run, const mutants_run *one) {
    double most = 0;
    for (int r = 0; r < run->size; r++)
        for (int t = 0; t < run->ranks[r].tensors; t++) {
            const mutants_gradient *g = &run->ranks[r].gradients[t];
            double x = mutants_norm_of(run, r, g->name, g->step), y = mutants_norm_of(one, 0, g->name, g->step);
            double d = fabs(x - y) / (y > MUTANTS_ZERO ? y : 1);
            if (!(d <= most)) most = isfinite(d) ? d : INFINITY;
        }
    return most;
}

/* ---- main -------------------------------------------------------------------------------------------------------- */

static double mutants_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Whether a message has one of the words between |. What it says of the past, " since CALL at LAYER, must be", does not
   count: the call that is wrong or missing is named before or behind it. */
static int mutants_names(const char *message, const char *words) {
    char part[256], text[MT_ERROR_BYTES], *since, *must;
    snprintf(text, sizeof text, "%s", message);
    since = strstr(text, " since ");
    must = since ? strstr(since, ", must ") : NULL;
    if (must) memmove(since, must, strlen(must) + 1);
    while (*words) {
        size_t n = strcspn(words, "|");
        snprintf(part, sizeof part, "%.*s", (int)n, words);
        if (n && strstr(text, part)) return 1;
        words += n + (words[n] == '|');
    }
    return 0;
}

typedef struct mutants_runs {
    mutants_run right, run, one; /* the program on 4 ranks; a mutant on 4 ranks and on one */
} mutants_runs;

/* What a mutant does. `fails`: a rank returns an error, also without check mode. `same`: it computes what the program
   computes. `other`: it is another program, but a right parallel one: on one rank it computes the same as on 4. */
static const char *mutants_does(mutants_runs *m) {
    if (m->run.status != MT_SUCCESS) return "fails";
    if (mutants_losses_differ(&m->right, &m->run) <= MUTANTS_ROUNDING &&
        mutants_gradients_differ(&m->right, &m->run) <= MUTANTS_ROUNDING)
        return "same";
    mutants_compute(1, &m->one);
    if (m->one.status == MT_SUCCESS && mutants_losses_differ(&m->one, &m->run) <= MUTANTS_ROUNDING &&
        mutants_norms_differ(&m->run, &m->one) <= MUTANTS_ROUNDING)
        return "other";
    return "changes";
}

/* Runs a mutant on 4 ranks in check mode 2, and returns how they take it. run->message becomes that of a rank, which
   names what `wants` has if there is one. */
static const char *mutants_compare(const mutant *what, mt_device device, mutants_run *run) {
    const char *how = "unclear";
    mutants_launch(MUTANTS_RANKS, device, 2, run);
    run->message[0] = 0;
    if (run->status == MT_SUCCESS) return "accepted";
    for (int i = 0; i < MUTANTS_RANKS && strcmp(how, "unclear") == 0; i++) {
        char *advice = strstr(run->messages[i], ": check seeds, dropout"); /* names no call */
        if (advice) *advice = 0;
        if (run->messages[i][0]) snprintf(run->message, sizeof run->message, "%s", run->messages[i]);
        if (mutants_names(run->messages[i], what->wants)) how = "refused";
    }
    return how;
}

/* Runs a mutant and prints a line for it, see ../mutants.sh. */
static void mutants_try(int number, mutants_runs *m) {
    const mutant *what = &mutants_list[number - 1];
    const char *does, *how[3] = {"accepted", "-", "-"}; /* one rank, 4 ranks, 4 ranks that compute */
    double loss, gradient, ms;
    mutants_selected = number;
    mutants_compute(MUTANTS_RANKS, &m->run);
    does = mutants_does(m);
    loss = mutants_losses_differ(&m->right, &m->run);
    gradient = mutants_gradients_differ(&m->right, &m->run);
    ms = mutants_now();
    mutants_check(&m->run);
    if (m->run.status != MT_SUCCESS) how[0] = mutants_names(m->run.message, what->wants) ? "refused" : "unclear";
    else how[1] = mutants_compare(what, MT_DEVICE_META, &m->run);
    ms = (mutants_now() - ms) * 1e3;
    if (m->run.status == MT_SUCCESS) how[2] = mutants_compare(what, MT_DEVICE_CPU, &m->run);
    mutants_selected = 0;
    printf("%s\t%d.%d\t%s\t%s\t%s\t%s\t%.1e\t%.1e\t%.2f\t%s\t%s\t%s\t%s\n", what->place, number, mutants_variant, does,
           how[0], how[1], how[2], loss, gradient, ms, what->title, m->run.status == MT_SUCCESS ? "" : m->run.message,
           what->kind, mutants_badly_said);
    mutants_badly_said[0] = 0;
    mutants_is_badly_said = 0;
    fflush(stdout);
}

/* The program as it is must be accepted, and give on 4 ranks what it gives on one. */
static int mutants_right(mutants_runs *m) {
    double loss, norm;
    mutants_check(&m->one);
    if (m->one.status != MT_SUCCESS) return printf("the program is refused: %s\n", m->one.message), 0;
    mutants_compute(1, &m->one);
    mutants_compute(MUTANTS_RANKS, &m->right);
    for (int d = MT_DEVICE_CPU; d <= MT_DEVICE_META; d += MT_DEVICE_META - MT_DEVICE_CPU) {
        mutants_launch(MUTANTS_RANKS, (mt_device)d, 2, &m->run);
        if (m->run.status != MT_SUCCESS) return printf("check mode 2 refuses the program: %s\n", m->run.messages[0]), 0;
    }
    if (m->one.status != MT_SUCCESS || m->right.status != MT_SUCCESS) return printf("the program fails\n"), 0;
    loss = mutants_losses_differ(&m->one, &m->right);
    norm = mutants_norms_differ(&m->right, &m->one);
    if (loss <= MUTANTS_ROUNDING && norm <= MUTANTS_ROUNDING) return 1;
    return printf("on 1 and on 4 ranks losses differ by %.1e, norms of gradients by %.1e\n", loss, norm), 0;
}

/* Runs the mutant with the number of the argument, or all that the program reaches. */
int main(int argc, char **argv) {
    mutants_runs *m = (mutants_runs *)calloc(1, sizeof *m);
    int first = argc > 1 ? atoi(argv[1]) : 1, last = argc > 1 ? first : MUTANTS_COUNT;
    if (!m) return 1;
    for (mutants_variant = 0; mutants_variant < MUTANTS_VARIANTS; mutants_variant++) {
        memset(mutants_reached, 0, sizeof mutants_reached);
        if (!mutants_right(m)) return 1;
        for (int i = first; i <= last; i++)
            if (mutants_reached[i]) mutants_try(i, m);
    }
    free(m);
    return 0;
}

#endif
