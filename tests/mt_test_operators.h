/* mt_test_operators.h - operators that are tested by their tables: an entry here is a test of an operator.

   test_operators.c tests what an operator computes, and test_rules.c its rule for check mode. What the table does not
   say, a program of its own tests. */
#ifndef MT_TEST_OPERATORS_H
#define MT_TEST_OPERATORS_H

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct operator_entry {
    const mti_table *table;
    const char *what; /* of the variant */
    mt_status (*run)(mt_context *ctx, const mt_tensor *v);
    /* Computes the outputs from the operands, in double: x[operand][row * cols + column]; NULL: it is left out. */
    void (*define)(double *const *x, const int64_t *rows, const int64_t *cols);
    const char *left_out; /* optional operands, with spaces around each */
    const char *reads;    /* the same, operands that this variant reads and writes, though the table says writes */
    double tolerance;     /* of f32, relative to 1 or to the value if it is larger */
    const char *positive; /* as left_out, operands whose numbers are above 0 */
    int by_place;         /* 1: the call depends on the place of its shard, and test_rules.c has an entry of its own */
} operator_entry;

/* Whether a list of names with spaces around each has a name. */
static inline int operator_lists(const char *list, const char *name) {
    char word[64];
    snprintf(word, sizeof word, " %s ", name);
    return strstr(list, word) != NULL;
}

/* The operands are v and x, in the order of the table. */
#define CALLS(name, ...)                                                                                               \
    static mt_status run_##name(mt_context *ctx, const mt_tensor *v) { return __VA_ARGS__; }
#define DEFINES(name) static void define_##name(double *const *x, const int64_t *rows, const int64_t *cols)
#define EACH(i) for (int64_t i = 0; i < rows[0] * cols[0]; i++) /* element of the first operand */

CALLS(add, mt_add(ctx, v[1], v[2], v[0]))
DEFINES(add) { EACH(i) x[0][i] = x[1][i] + x[2][i]; }

CALLS(bias_forward, mt_bias_forward(ctx, v[0], v[1]))
DEFINES(bias_forward) { EACH(i) x[0][i] += x[1][i % cols[0]]; }
CALLS(bias_backward, mt_bias_backward(ctx, v[0], v[1]))
DEFINES(bias_backward) { EACH(i) x[1][i % cols[0]] += x[0][i]; }

CALLS(multiply, mt_multiply(ctx, v[1], v[2], v[0]))
DEFINES(multiply) { EACH(i) x[0][i] = x[1][i] * x[2][i]; }
CALLS(multiply_row_forward, mt_multiply_row_forward(ctx, v[1], v[2], v[0]))
DEFINES(multiply_row_forward) { EACH(i) x[0][i] = x[1][i] * x[2][i % cols[0]]; }
CALLS(multiply_row_backward, mt_multiply_row_backward(ctx, v[1], v[2], v[0], v[3], v[4]))
DEFINES(multiply_row_backward) {
    EACH(i) x[3][i] = x[0][i] * x[2][i % cols[0]], x[4][i % cols[0]] += x[0][i] * x[1][i];
}
CALLS(multiply_col_forward, mt_multiply_col_forward(ctx, v[1], v[2], v[0]))
DEFINES(multiply_col_forward) { EACH(i) x[0][i] = x[1][i] * x[2][i / cols[0]]; }

static inline double sigmoid_of(double x) { return 1.0 / (1.0 + exp(-x)); }
static inline double slope_of(double x) { return sigmoid_of(x) * (1.0 - sigmoid_of(x)); } /* of the sigmoid */

CALLS(sigmoid_forward, mt_sigmoid_forward(ctx, v[1], v[0]))
DEFINES(sigmoid_forward) { EACH(i) x[0][i] = sigmoid_of(x[1][i]); }
CALLS(sigmoid_backward, mt_sigmoid_backward(ctx, v[1], v[2], v[0]))
DEFINES(sigmoid_backward) { EACH(i) x[0][i] = x[2][i] * slope_of(x[1][i]); }
CALLS(silu_forward, mt_silu_forward(ctx, v[1], v[0]))
DEFINES(silu_forward) { EACH(i) x[0][i] = x[1][i] * sigmoid_of(x[1][i]); }
CALLS(silu_backward, mt_silu_backward(ctx, v[1], v[2], v[0]))
DEFINES(silu_backward) { EACH(i) x[0][i] = x[2][i] * (sigmoid_of(x[1][i]) + x[1][i] * slope_of(x[1][i])); }
CALLS(sigmoid_gate_forward, mt_sigmoid_gate_forward(ctx, v[1], v[2], v[0]))
DEFINES(sigmoid_gate_forward) { EACH(i) x[0][i] = sigmoid_of(x[1][i]) * x[2][i]; }
CALLS(sigmoid_gate_backward, mt_sigmoid_gate_backward(ctx, v[1], v[2], v[0], v[3], v[4]))
DEFINES(sigmoid_gate_backward) {
    EACH(i) x[3][i] = x[0][i] * x[2][i] * slope_of(x[1][i]), x[4][i] = x[0][i] * sigmoid_of(x[1][i]);
}

CALLS(scale_add, mt_scale_add(ctx, 0.75f, v[2], v[1], -1.5f, v[3], v[0]))
DEFINES(scale_add) {
    double a = 0.75 * (x[2] ? x[2][0] : 1.0), b = -1.5 * (x[3] ? x[3][0] : 1.0);
    EACH(i) x[0][i] = a * x[1][i] + b * x[0][i];
}
CALLS(scale, mt_scale_add(ctx, 0.75f, v[2], v[1], 0.0f, v[3], v[0]))
DEFINES(scale) {
    double a = 0.75 * (x[2] ? x[2][0] : 1.0);
    EACH(i) x[0][i] = a * x[1][i];
}

/* Softmax. A shard has the columns from SOFTMAX_FIRST on of a row of SOFTMAX_VOCAB columns, and padding behind them. */
enum { SOFTMAX_FIRST = 7, SOFTMAX_VOCAB = 40, SOFTMAX_SHARDS = 2 };
static const mt_softmax_shard_desc softmax_shard = {SOFTMAX_VOCAB, SOFTMAX_FIRST, 0},
                                   log_softmax_shard = {SOFTMAX_VOCAB, SOFTMAX_FIRST, 1};

CALLS(softmax_forward, mt_softmax_forward(ctx, v[1], v[0]))
CALLS(log_softmax_forward, mt_log_softmax_forward(ctx, v[1], v[0]))
CALLS(softmax_backward, mt_softmax_backward(ctx, v[1], v[2], v[0]))
CALLS(log_softmax_backward, mt_log_softmax_backward(ctx, v[1], v[2], v[0]))
CALLS(softmax_stats, mt_softmax_shard_stats(ctx, &softmax_shard, v[1], v[0]))
CALLS(softmax_shard, mt_softmax_shard_forward(ctx, &softmax_shard, v[1], v[2], SOFTMAX_SHARDS, v[0]))
CALLS(log_softmax_shard, mt_softmax_shard_forward(ctx, &log_softmax_shard, v[1], v[2], SOFTMAX_SHARDS, v[0]))
CALLS(softmax_sums, mt_softmax_shard_sums(ctx, &softmax_shard, v[2], v[1], v[0]))
CALLS(log_softmax_sums, mt_softmax_shard_sums(ctx, &log_softmax_shard, v[2], v[1], v[0]))
CALLS(softmax_shard_backward, mt_softmax_shard_backward(ctx, &softmax_shard, v[1], v[2], v[3], v[0]))
CALLS(log_softmax_shard_backward, mt_softmax_shard_backward(ctx, &log_softmax_shard, v[1], v[2], v[3], v[0]))

/* The maximum of n numbers, and the sum of exponentials relative to it. */
static inline void define_stats(const double *x, int64_t n, double *top, double *sum) {
    *top = -INFINITY;
    *sum = 0.0;
    for (int64_t j = 0; j < n; j++) *top = fmax(*top, x[j]);
    for (int64_t j = 0; j < n; j++) *sum += exp(x[j] - *top);
}
static inline double softmax_of(double x, double top, double sum, int log_of_it) {
    return log_of_it ? x - top - log(sum) : exp(x - top) / sum;
}
static inline void define_rows(double *const *x, const int64_t *rows, const int64_t *cols, int log_of_it) {
    for (int64_t i = 0; i < rows[0]; i++) {
        double top, sum;
        define_stats(x[1] + i * cols[0], cols[0], &top, &sum);
        for (int64_t j = i * cols[0]; j < (i + 1) * cols[0]; j++) x[0][j] = softmax_of(x[1][j], top, sum, log_of_it);
    }
}
DEFINES(softmax_forward) { define_rows(x, rows, cols, 0); }
DEFINES(log_softmax_forward) { define_rows(x, rows, cols, 1); }

/* The columns of a shard that are not padding. */
static inline int64_t real_of(int64_t cols) {
    return cols < SOFTMAX_VOCAB - SOFTMAX_FIRST ? cols : SOFTMAX_VOCAB - SOFTMAX_FIRST;
}

/* sums[i] = the sum over row i of y dy, or of dy if y is NULL */
static inline double sum_of_row(const double *y, const double *dy, int64_t i, int64_t cols, int64_t real) {
    double sum = 0.0;
    for (int64_t j = i * cols; j < i * cols + real; j++) sum += y ? y[j] * dy[j] : dy[j];
    return sum;
}
static inline double softmax_slope(double y, double dy, double sum, int log_of_it) {
    return log_of_it ? dy - exp(y) * sum : y * (dy - sum);
}
static inline void define_gradients(double *const *x, const int64_t *rows, const int64_t *cols, int log_of_it,
                                    int shard) {
    int64_t real = shard ? real_of(cols[0]) : cols[0];
    for (int64_t i = 0; i < rows[0]; i++) {
        double sum = shard ? x[3][i] : sum_of_row(log_of_it ? NULL : x[1], x[2], i, cols[0], cols[0]);
        for (int64_t j = 0; j < cols[0]; j++) {
            int64_t k = i * cols[0] + j;
            x[0][k] = j < real ? softmax_slope(x[1][k], x[2][k], sum, log_of_it) : 0.0;
        }
    }
}
DEFINES(softmax_backward) { define_gradients(x, rows, cols, 0, 0); }
DEFINES(log_softmax_backward) { define_gradients(x, rows, cols, 1, 0); }
DEFINES(softmax_shard_backward) { define_gradients(x, rows, cols, 0, 1); }
DEFINES(log_softmax_shard_backward) { define_gradients(x, rows, cols, 1, 1); }
DEFINES(softmax_stats) {
    for (int64_t i = 0; i < rows[0]; i++)
        define_stats(x[1] + i * cols[1], real_of(cols[1]), &x[0][2 * i], &x[0][2 * i + 1]);
}
DEFINES(softmax_sums) {
    for (int64_t i = 0; i < rows[0]; i++) x[0][i] = sum_of_row(x[2], x[1], i, cols[1], real_of(cols[1]));
}
static inline void define_shards(double *const *x, const int64_t *rows, const int64_t *cols, int log_of_it) {
    for (int64_t i = 0; i < rows[0]; i++) {
        const double *a = x[2] + 2 * i, *b = x[2] + 2 * (rows[0] + i);
        double top = fmax(a[0], b[0]), sum = a[1] * exp(a[0] - top) + b[1] * exp(b[0] - top);
        for (int64_t j = 0; j < cols[0]; j++) {
            int64_t k = i * cols[0] + j;
            x[0][k] = j < real_of(cols[0]) ? softmax_of(x[1][k], top, sum, log_of_it) : 0.0;
        }
    }
}
DEFINES(softmax_shard) { define_shards(x, rows, cols, 0); }
DEFINES(log_softmax_shard) { define_shards(x, rows, cols, 1); }

#define OPERATOR(name, tolerance)                                                                                      \
    { &mti_##name##_table, "", run_##name, define_##name, "", "", tolerance, "", 0 }

static const operator_entry operator_entries[] = {
    OPERATOR(add, 1e-6),
    OPERATOR(bias_forward, 1e-6),
    OPERATOR(bias_backward, 1e-5),
    OPERATOR(multiply, 1e-6),
    OPERATOR(multiply_row_forward, 1e-6),
    OPERATOR(multiply_row_backward, 1e-5),
    OPERATOR(multiply_col_forward, 1e-6),
    OPERATOR(sigmoid_forward, 1e-6),
    OPERATOR(sigmoid_backward, 1e-6),
    OPERATOR(silu_forward, 1e-6),
    OPERATOR(silu_backward, 1e-6),
    OPERATOR(sigmoid_gate_forward, 1e-6),
    OPERATOR(sigmoid_gate_backward, 1e-6),
    {&mti_scale_add_table, "b = 0", run_scale, define_scale, "", "", 1e-6, "", 0},
    {&mti_scale_add_table, "device", run_scale_add, define_scale_add, "", " y ", 1e-6, "", 0},
    {&mti_scale_add_table, "host", run_scale_add, define_scale_add, " a_factor b_factor ", " y ", 1e-6, "", 0},
    {&mti_scale_add_table, "one factor", run_scale_add, define_scale_add, " b_factor ", " y ", 1e-6, "", 0},
    OPERATOR(softmax_forward, 1e-6),
    OPERATOR(softmax_backward, 2e-5),
    OPERATOR(log_softmax_forward, 1e-6),
    OPERATOR(log_softmax_backward, 1e-5),
    {&mti_softmax_shard_stats_table, "a shard", run_softmax_stats, define_softmax_stats, "", "", 1e-6, "", 1},
    {&mti_softmax_shard_forward_table, "softmax", run_softmax_shard, define_softmax_shard, "", "", 2e-6, " gathered ",
     1},
    {&mti_softmax_shard_forward_table, "log", run_log_softmax_shard, define_log_softmax_shard, "", "", 1e-6,
     " gathered ", 1},
    {&mti_softmax_shard_sums_table, "softmax", run_softmax_sums, define_softmax_sums, "", "", 2e-6, "", 1},
    {&mti_softmax_shard_sums_table, "log", run_log_softmax_sums, define_softmax_sums, " y ", "", 2e-6, "", 1},
    {&mti_softmax_shard_backward_table, "softmax", run_softmax_shard_backward, define_softmax_shard_backward, "", "",
     1e-6, "", 1},
    {&mti_softmax_shard_backward_table, "log", run_log_softmax_shard_backward, define_log_softmax_shard_backward, "",
     "", 1e-6, "", 1},
};

#define OPERATOR_ENTRIES (sizeof operator_entries / sizeof *operator_entries)

#endif /* MT_TEST_OPERATORS_H */
