/* test_operators.c - operators by their tables: an entry here is a test of an operator.

   For each entry, with the shapes, types and overlaps of its table (src/ops/operator.c): values against a definition in
   double precision, also in rows with gaps; bf16 and f16 give the result of f32, rounded once; any number of threads
   gives the same bits; an empty first operand is no error; and each wrong operand is refused, by name, and changes
   nothing: another shape or type, no data, an odd address, an overlap.
   test_cuda_operators.cu runs the same entries on a GPU. tests/test_rules.c tests the rules. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"
#include "mt_test.h"

#include <math.h>

#if defined(OPERATORS_ON_GPU)
#define DEVICE MT_DEVICE_CUDA
#else
#define DEVICE MT_DEVICE_CPU
#endif

enum { MOST = 4096, SPARE = 3 };

typedef struct entry {
    const mti_table *table;
    const char *what; /* of the variant */
    mt_status (*run)(mt_context *ctx, const mt_tensor *v);
    /* Computes the outputs from the operands, in double: x[operand][row * cols + column], 0 where one is left out. */
    void (*define)(double *const *x, const int64_t *rows, const int64_t *cols);
    const char *left_out; /* optional operands, with spaces around each */
    const char *unread;   /* the same, operands of the table that this variant only writes */
    double tolerance;     /* of f32, relative to 1 or to the value if it is larger */
} entry;

/* ---- entries ----------------------------------------------------------------------------------------------------- */

static mt_status run_scale_add(mt_context *ctx, const mt_tensor *v) {
    return mt_scale_add(ctx, 0.75f, v[2], v[1], -1.5f, v[3], v[0]);
}
static mt_status run_scale(mt_context *ctx, const mt_tensor *v) {
    return mt_scale_add(ctx, 0.75f, v[2], v[1], 0.0f, v[3], v[0]);
}
static void define_scale_add(double *const *x, const int64_t *rows, const int64_t *cols) {
    double a = 0.75 * (x[2] ? x[2][0] : 1.0), b = -1.5 * (x[3] ? x[3][0] : 1.0);
    for (int64_t i = 0; i < rows[0] * cols[0]; i++) x[0][i] = a * x[1][i] + b * x[0][i];
}
static void define_scale(double *const *x, const int64_t *rows, const int64_t *cols) {
    double a = 0.75 * (x[2] ? x[2][0] : 1.0);
    for (int64_t i = 0; i < rows[0] * cols[0]; i++) x[0][i] = a * x[1][i];
}

static const entry entries[] = {
    {&mti_scale_add_table, "host", run_scale_add, define_scale_add, " a_factor b_factor ", "", 1e-6},
    {&mti_scale_add_table, "device", run_scale_add, define_scale_add, "", "", 1e-6},
    {&mti_scale_add_table, "one factor", run_scale_add, define_scale_add, " b_factor ", "", 1e-6},
    {&mti_scale_add_table, "b = 0", run_scale, define_scale, "", " y ", 1e-6},
};

#define ENTRIES (sizeof entries / sizeof *entries)

/* ---- operands ---------------------------------------------------------------------------------------------------- */

static mt_context *ctx;

typedef struct operands {
    const entry *e;
    int count;
    int64_t rows[MTI_ARGS], cols[MTI_ARGS];
    mt_tensor v[MTI_ARGS];
    unsigned char *memory[MTI_ARGS]; /* of the context */
    size_t bytes[MTI_ARGS];
    float given[MTI_ARGS][MOST]; /* the values that the operands have before the call, in rows without gaps */
} operands;

static operands o;

static int is_in(const char *list, const char *name) {
    char word[64];
    snprintf(word, sizeof word, " %s ", name);
    return strstr(list, word) != NULL;
}
static int is_left_out(int i) { return is_in(o.e->left_out, o.e->table->operands[i].name); }
static int is_output(int i) { return (o.e->table->operands[i].use & MT_ARG_OUT) != 0; }
static int is_float(int i) { return o.e->table->operands[i].type == MT_ARG_FLOAT; }

/* n and m are the letters of rows and columns; the third letter, if there is one, is k. */
static int64_t size_of(char letter, int64_t n, int64_t m) {
    return letter <= '9' ? letter - '0' : letter == 'n' ? n : letter == 'm' ? m : 5;
}

static void free_operands(void) {
    for (int i = 0; i < o.count; i++) mt_context_free(ctx, o.memory[i], o.bytes[i]);
    o.count = 0;
}

static mt_tensor whole_memory(int i) { return mt_tensor_make(o.memory[i], MT_U8, 1, (int64_t)o.bytes[i]); }

/* Gives an operand memory that is full of NaN (0xff), with rows `gap` elements apart. */
static void make_view(int i, mt_dtype dtype, int64_t gap) {
    static unsigned char guards[4 * MOST];
    int64_t ld = o.cols[i] + gap;
    o.bytes[i] = (size_t)(o.rows[i] * ld) * mt_dtype_size(dtype) + 8;
    assert_true(o.bytes[i] <= sizeof guards);
    memset(guards, 0xff, sizeof guards);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_alloc(ctx, o.bytes[i], (void **)&o.memory[i]));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_upload(ctx, guards, whole_memory(i)));
    o.v[i] = mt_tensor_make(o.memory[i], dtype, o.rows[i], o.cols[i]);
    o.v[i].ld = ld;
}

/* Writes `given` to the view, rounded to its type; given becomes what the view has. */
static void put_values(int i) {
    int64_t n = o.rows[i] * o.cols[i];
    uint16_t narrow[MOST];
    if (o.v[i].dtype == MT_F32) {
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_upload(ctx, o.given[i], o.v[i]));
        return;
    }
    mt_f32_to_16bit(o.v[i].dtype, o.given[i], narrow, n);
    mt_f32_from_16bit(o.v[i].dtype, narrow, o.given[i], n);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_upload(ctx, narrow, o.v[i]));
}

/* Makes the operands of an entry: n x m, random, of these types. An operand that the call only writes stays NaN. */
static void make_operands(const entry *e, int64_t n, int64_t m, const mt_dtype *types, int64_t gap) {
    uint64_t random = 7;
    o.e = e;
    for (o.count = 0; o.count < MTI_ARGS && e->table->operands[o.count].name; o.count++) {
        const mti_operand *p = &e->table->operands[o.count];
        int i = o.count;
        o.rows[i] = size_of(p->shape[0], n, m);
        o.cols[i] = size_of(p->shape[1], n, m);
        o.v[i] = mt_none();
        o.memory[i] = NULL;
        o.bytes[i] = 0;
        if (is_left_out(i)) continue;
        make_view(i, types && is_float(i) ? types[i] : MT_F32, gap);
        for (int64_t k = 0; k < o.rows[i] * o.cols[i]; k++) o.given[i][k] = 2.0f * test_float(&random);
        if (o.rows[i] * o.cols[i] > 0 && !is_in(e->unread, p->name)) put_values(i);
    }
}

/* Reads a view as f32, in rows without gaps. */
static void get_values(int i, float *out) {
    int64_t n = o.rows[i] * o.cols[i];
    uint16_t narrow[MOST];
    if (n == 0) return;
    if (o.v[i].dtype == MT_F32) {
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_download(ctx, o.v[i], out));
        return;
    }
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_download(ctx, o.v[i], narrow));
    mt_f32_from_16bit(o.v[i].dtype, narrow, out, n);
}

/* Checks that the memory between the rows, and behind them, is as before. */
static void gaps_are_whole(int i) {
    static unsigned char now[4 * MOST];
    size_t size = mt_dtype_size(o.v[i].dtype), row = (size_t)o.cols[i] * size, pitch = (size_t)o.v[i].ld * size;
    if (!o.memory[i]) return;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_download(ctx, whole_memory(i), now));
    for (size_t b = 0; b < o.bytes[i]; b++)
        if ((b / pitch >= (size_t)o.rows[i] || b % pitch >= row) && now[b] != 0xff)
            fail_msg("%s: byte %zu of %s was written", o.e->table->name, b, o.e->table->operands[i].name);
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

/* Compares the outputs with the definition, and the inputs with what they were. slack: of a 16-bit type, as a part of
   the value */
static void outputs_are_right(double slack) {
    static double exact[MTI_ARGS][MOST];
    static float got[MOST];
    double *x[MTI_ARGS];
    for (int i = 0; i < o.count; i++) {
        x[i] = is_left_out(i) ? NULL : exact[i];
        for (int64_t k = 0; k < o.rows[i] * o.cols[i]; k++) exact[i][k] = o.given[i][k];
    }
    o.e->define(x, o.rows, o.cols);
    for (int i = 0; i < o.count; i++) {
        if (is_left_out(i)) continue;
        get_values(i, got);
        gaps_are_whole(i);
        for (int64_t k = 0; k < o.rows[i] * o.cols[i]; k++) {
            double want = exact[i][k], most = o.e->tolerance;
            if (o.v[i].dtype != MT_F32) most += slack;
            if (!(fabs(got[k] - want) <= (is_output(i) ? most * fmax(1.0, fabs(want)) : 0.0)))
                fail_msg("%s, %s: element %lld of %s is %.9g, must be %.9g", o.e->table->name, o.e->what, (long long)k,
                         o.e->table->operands[i].name, got[k], want);
        }
    }
}

static mt_status run_entry(void) { return (o.e->run)(ctx, o.v); }

static const int64_t shapes[][2] = {{1, 1}, {5, 37}, {3, 515}, {61, 8}, {1, 1000}};

static void test_values(void **state) {
    (void)state;
    for (size_t e = 0; e < ENTRIES; e++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int64_t gap = 0; gap <= SPARE; gap += SPARE) {
                make_operands(&entries[e], shapes[s][0], shapes[s][1], NULL, gap);
                ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
                outputs_are_right(0.0);
                free_operands();
            }
}

/* Every combination of types. On a CPU the bits are those of the same call in f32, rounded. */
static void test_types(void **state) {
    static const mt_dtype all[] = {MT_F32, MT_BF16, MT_F16};
    static float narrow[MTI_ARGS][MOST], wide[MOST];
    mt_dtype types[MTI_ARGS];
    uint16_t bits[MOST];
    (void)state;
    for (size_t e = 0; e < ENTRIES; e++) {
        int floats = 0, combinations = 1;
        o.e = &entries[e];
        for (int i = 0; o.e->table->operands[i].name; i++) floats += is_float(i);
        for (int i = 0; i < floats; i++) combinations *= 3;
        for (int c = 1; c < combinations; c++) {
            for (int i = 0, rest = c; i < MTI_ARGS; i++) {
                types[i] = all[rest % 3];
                if (i < MTI_ARGS && o.e->table->operands[i].name && is_float(i)) rest /= 3;
            }
            make_operands(&entries[e], 5, 37, types, SPARE);
            ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
            outputs_are_right(0.004); /* half of the last bit of bf16 */
            for (int i = 0; i < o.count; i++)
                if (!is_left_out(i)) get_values(i, narrow[i]);
            /* the same values in f32 */
            for (int i = 0; i < o.count; i++) {
                if (is_left_out(i)) continue;
                mt_context_free(ctx, o.memory[i], o.bytes[i]);
                make_view(i, MT_F32, SPARE);
                put_values(i);
            }
            ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
            for (int i = 0; i < o.count && DEVICE == MT_DEVICE_CPU; i++) {
                int64_t n = o.rows[i] * o.cols[i];
                if (is_left_out(i) || !is_output(i)) continue;
                get_values(i, wide);
                if (is_float(i) && types[i] != MT_F32) {
                    mt_f32_to_16bit(types[i], wide, bits, n);
                    mt_f32_from_16bit(types[i], bits, wide, n);
                }
                if (memcmp(wide, narrow[i], (size_t)n * sizeof *wide) != 0)
                    fail_msg("%s, %s: %s in %s is not the result of f32, rounded", o.e->table->name, o.e->what,
                             o.e->table->operands[i].name, mt_dtype_name(types[i]));
            }
            free_operands();
        }
    }
}

/* The first operand is empty: nothing is read or written, and the call succeeds. */
static void test_nothing_to_do(void **state) {
    (void)state;
    for (size_t e = 0; e < ENTRIES; e++)
        for (int rows = 0; rows < 2; rows++) {
            make_operands(&entries[e], rows ? 0 : 4, rows ? 4 : 0, NULL, 0);
            ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
            free_operands();
        }
}

#if !defined(OPERATORS_ON_GPU)
static void test_number_of_threads(void **state) {
    static const int threads[] = {1, 2, 3, 7};
    static float first[MTI_ARGS][MOST], now[MOST];
    mt_context *one = ctx;
    (void)state;
    for (size_t e = 0; e < ENTRIES; e++)
        for (size_t t = 0; t < 4; t++) {
            ctx = test_context(MT_DEVICE_CPU, threads[t]);
            make_operands(&entries[e], 61, 67, NULL, 0);
            ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
            for (int i = 0; i < o.count; i++) {
                if (is_left_out(i)) continue;
                get_values(i, t == 0 ? first[i] : now);
                if (t > 0) assert_memory_equal(first[i], now, (size_t)(o.rows[i] * o.cols[i]) * sizeof(float));
            }
            free_operands();
            mt_context_destroy(ctx);
        }
    ctx = one;
}
#endif

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

/* The call with one wrong operand is refused: the message names the operator and the operand, and nothing changes. */
static void is_refused(int i, mt_tensor wrong, mt_status status, const char *words) {
    static float before[MTI_ARGS][MOST], now[MOST];
    const mt_tensor right = o.v[i];
    char text[128];
    for (int k = 0; k < o.count; k++)
        if (!is_left_out(k)) get_values(k, before[k]);
    o.v[i] = wrong;
    mt_status got = run_entry();
    o.v[i] = right;
    snprintf(text, sizeof text, "%s: |%s", o.e->table->name, words);
    if (got != status || !test_has_words(mt_last_error(ctx), text))
        fail_msg("%s with a wrong %s: %s, \"%s\"; must be %s, with %s", o.e->table->name, o.e->table->operands[i].name,
                 mt_status_name(got), mt_last_error(ctx), mt_status_name(status), text);
    for (int k = 0; k < o.count; k++) {
        if (is_left_out(k)) continue;
        get_values(k, now);
        assert_memory_equal(before[k], now, (size_t)(o.rows[k] * o.cols[k]) * sizeof(float));
    }
}

/* Whether another operand, which is given, has the size of this letter too. Then one of the two is refused. */
static int is_shared(int i, char letter) {
    if (letter <= '9') return 1;
    for (int k = 0; k < o.count; k++)
        if (k != i && !is_left_out(k) && strchr(o.e->table->operands[k].shape, letter)) return 1;
    return 0;
}

static void wrong_views(int i) {
    const char *name = o.e->table->operands[i].name, *shape = o.e->table->operands[i].shape;
    mt_tensor t = o.v[i], wrong = t;
    wrong.rows--;
    if (is_shared(i, shape[0])) is_refused(i, wrong, MT_ERR_SHAPE, "must be [");
    wrong = t;
    wrong.cols--;
    if (is_shared(i, shape[1])) is_refused(i, wrong, MT_ERR_SHAPE, "must be [");
    wrong = t;
    wrong.rows = -1;
    is_refused(i, wrong, MT_ERR_SHAPE, name);
    wrong = t;
    wrong.ld = t.cols > 1 ? t.cols - 1 : -1;
    is_refused(i, wrong, MT_ERR_SHAPE, name);
    if (o.e->table->operands[i].type != MT_ARG_ANY) is_refused(i, with_dtype(t, MT_I32), MT_ERR_DTYPE, name);
    is_refused(i, with_dtype(t, (mt_dtype)77), MT_ERR_DTYPE, name);
    wrong = t;
    wrong.data = NULL;
    if (!(o.e->table->operands[i].use & MT_ARG_OPTIONAL)) is_refused(i, wrong, MT_ERR_ARGUMENT, name);
    wrong = t;
    wrong.data = (char *)t.data + 1;
    is_refused(i, wrong, MT_ERR_ARGUMENT, name);
}

/* What the table says of two operands: 0: they may share memory, 1: they may not, 2: unless they are the same view. */
static int kept_apart(const mti_table *table, int i, int k) {
    char words[128], name[64], same[64];
    snprintf(words, sizeof words, " %s ", table->operands[i].apart ? table->operands[i].apart : "");
    snprintf(name, sizeof name, " %s ", table->operands[k].name);
    snprintf(same, sizeof same, " =%s ", table->operands[k].name);
    if (i == k) return 0;
    if (strcmp(words, " * ") == 0) return k < i;
    return strstr(words, name) ? 1 : strstr(words, same) ? 2 : 0;
}

/* Each pair that the table keeps apart. The second operand begins in the last row of the first one. */
static void overlaps(void) {
    for (int i = 0; i < o.count; i++)
        for (int k = 0; k < o.count; k++) {
            mt_tensor other = o.v[k], at = o.v[i];
            if (!kept_apart(o.e->table, i, k) || is_left_out(i) || is_left_out(k)) continue;
            other.data = (float *)at.data + (at.rows - 1) * at.ld;
            other.ld = other.rows > 1 ? at.ld : other.ld;
            is_refused(k, other, MT_ERR_ARGUMENT, "overlap");
        }
}

static void test_refusals(void **state) {
    (void)state;
    for (size_t e = 0; e < ENTRIES; e++) {
        make_operands(&entries[e], 5, 37, NULL, SPARE);
        for (int i = 0; i < o.count; i++)
            if (!is_left_out(i)) wrong_views(i);
        overlaps();
        free_operands();
        assert_int_equal(entries[e].run(NULL, o.v), MT_ERR_ARGUMENT);
    }
}

/* An output may be an input where the table says so ("=x"), or where it says nothing. */
static void test_in_place(void **state) {
    (void)state;
    for (size_t e = 0; e < ENTRIES; e++)
        for (int i = 0; i < MTI_ARGS && entries[e].table->operands[i].name; i++)
            for (int k = 0; k < MTI_ARGS && entries[e].table->operands[k].name; k++) {
                make_operands(&entries[e], 5, 37, NULL, SPARE);
                int same = o.rows[i] == o.rows[k] && o.cols[i] == o.cols[k] && !is_left_out(i) && !is_left_out(k);
                if (i != k && same && is_output(i) && !is_output(k) && kept_apart(o.e->table, i, k) != 1) {
                    const mt_tensor own = o.v[k];
                    memcpy(o.given[i], o.given[k], sizeof o.given[i]);
                    put_values(i);
                    o.v[k] = o.v[i];
                    ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
                    o.v[k] = own; /* still has what it had */
                    outputs_are_right(0.0);
                }
                free_operands();
            }
}

/* ---- the tables themselves --------------------------------------------------------------------------------------- */

static int table_operands(const mti_table *table) {
    int n = 0;
    while (n < MTI_ARGS && table->operands[n].name) n++;
    return n;
}

/* Whether a word is the name of an operand; "=x" is x. */
static int is_operand(const mti_table *table, const char *word, size_t length) {
    for (int i = 0; i < table_operands(table); i++) {
        const char *name = table->operands[i].name;
        if (strlen(name) == length && strncmp(name, word, length) == 0) return 1;
    }
    return 0;
}

/* Checks that each word is an operand, and returns the number of words. "dx(x)" has two. */
static int words_are_operands(const mti_table *table, const char *words) {
    int count = 0;
    for (const char *at = words; at && *at; at += strspn(at, " =()"), count++) {
        size_t length = strcspn(at += strspn(at, "="), " ()");
        if (!is_operand(table, at, length)) fail_msg("%s: '%.*s' is no operand", table->name, (int)length, at);
        at += length;
    }
    return count;
}

/* Whether an operand is the gradient of an operand of some table, by the names that operators have: "dx" of x. */
static int is_named_gradient(const char *name) {
    int known = strcmp(name, "grad") == 0; /* of a parameter */
    for (size_t t = 0; name[0] == 'd' && !known && t < sizeof mti_tables / sizeof *mti_tables; t++)
        known = is_operand(mti_tables[t], name + 1, strlen(name + 1));
    return known;
}

/* An operand is called a gradient if and only if it is one. One of which the rule says whose gradient it is, as in
   "dx(x)", is written, and has the shape of the other. */
static void test_gradients(void **state) {
    int gradients = 0, pairs = 0;
    (void)state;
    for (size_t t = 0; t < sizeof mti_tables / sizeof *mti_tables; t++) {
        const mti_table *table = mti_tables[t];
        for (int i = 0; i < table_operands(table); i++) {
            const mti_operand *o = &table->operands[i];
            char words[256], name[64];
            snprintf(words, sizeof words, " %s", table->rule.operands ? table->rule.operands : "");
            snprintf(name, sizeof name, " %s(", o->name);
            if (!(o->use & MT_ARG_GRADIENT) != !is_named_gradient(o->name))
                fail_msg("%s: is %s a gradient?", table->name, o->name);
            gradients += (o->use & MT_ARG_GRADIENT) != 0;
            if (!strstr(words, name)) continue;
            const char *of = strstr(words, name) + strlen(name);
            for (int k = 0; k < table_operands(table); k++) {
                const mti_operand *x = &table->operands[k];
                if (strncmp(x->name, of, strlen(x->name)) != 0 || of[strlen(x->name)] != ')') continue;
                if (!(o->use & MT_ARG_OUT) || !(x->use & MT_ARG_IN) || strcmp(o->shape, x->shape) != 0)
                    fail_msg("%s: %s is no gradient of %s", table->name, o->name, x->name);
                pairs++;
            }
        }
    }
    assert_true(gradients > 40 && pairs > 12);
}

/* Checks that a size of a shape is known: a digit, a capital letter, or a letter of an operand that is not optional. */
static void size_is_known(const mti_table *table, char size) {
    int known = (size >= '0' && size <= '9') || (size >= 'A' && size <= 'H');
    for (int i = 0; i < table_operands(table); i++)
        known |= !(table->operands[i].use & MT_ARG_OPTIONAL) && strchr(table->operands[i].shape, size) != NULL;
    if (!known) fail_msg("%s: no operand has the size '%c'", table->name, size);
}

/* Returns how many operands a rule calls the gradient of another one. */
static int pairs_of(const char *words) {
    int count = 0;
    for (; *words; words++) count += *words == '(';
    return count;
}

/* A rule names all operands of its table, and no others. Operands that are no views of the call come last. */
static void test_tables(void **state) {
    (void)state;
    assert_true(sizeof mti_tables / sizeof *mti_tables > 50);
    for (size_t t = 0; t < sizeof mti_tables / sizeof *mti_tables; t++) {
        const mti_table *table = mti_tables[t];
        int n = table_operands(table), unseen = 0;
        assert_true(n > 0);
        if (table->rule.operands)
            assert_int_equal(words_are_operands(table, table->rule.operands), n + pairs_of(table->rule.operands));
        for (int i = 0; i < n; i++) {
            const mti_operand *o = &table->operands[i];
            assert_int_equal(strlen(o->shape), 2);
            size_is_known(table, o->shape[0]);
            size_is_known(table, o->shape[1]);
            if (!o->apart || strcmp(o->apart, "*") != 0) words_are_operands(table, o->apart);
            assert_true((o->use & MTI_UNSEEN) || !unseen);
            unseen |= o->use & MTI_UNSEEN;
        }
    }
}

/* mt_rule_of finds the rule of every operator by its name. */
static void test_rules_by_name(void **state) {
    (void)state;
    for (size_t t = 0; t < sizeof mti_tables / sizeof *mti_tables; t++)
        assert_ptr_equal(mt_rule_of(mti_tables[t]->name), mti_tables[t]->rule.operands ? &mti_tables[t]->rule : NULL);
    assert_null(mt_rule_of("mt_bias"));
    assert_null(mt_rule_of(""));
    assert_null(mt_rule_of(NULL));
}

/* ---- what the table does not say --------------------------------------------------------------------------------- */

static void test_scale_add_numbers(void **state) {
    static const float wrong[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    make_operands(&entries[1], 3, 4, NULL, 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(mt_scale_add(ctx, wrong[i], mt_none(), o.v[1], 1.0f, mt_none(), o.v[0]), MT_ERR_ARGUMENT);
        assert_true(test_has_words(mt_last_error(ctx), "mt_scale_add: |a is |must be finite"));
        assert_int_equal(mt_scale_add(ctx, 1.0f, mt_none(), o.v[1], wrong[i], mt_none(), o.v[0]), MT_ERR_ARGUMENT);
        assert_true(test_has_words(mt_last_error(ctx), "mt_scale_add: |b is |must be finite"));
    }
    free_operands();
}

/* A moving average of constant weights comes as near to them as its decay says: 1 - 0.9^n. */
static void test_moving_average(void **state) {
    float got[12];
    (void)state;
    make_operands(&entries[0], 3, 4, NULL, 0);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, o.v[0], 0.0f));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, o.v[1], 2.0f));
    for (int i = 0; i < 20; i++)
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_scale_add(ctx, 0.1f, mt_none(), o.v[1], 0.9f, mt_none(), o.v[0]));
    get_values(0, got);
    for (int i = 0; i < 12; i++) assert_true(fabs(got[i] - 2.0 * (1.0 - pow(0.9, 20.0))) < 1e-5);
    free_operands();
}

static int open_context(void **state) {
    (void)state;
    ctx = test_context(DEVICE, 1);
    return ctx ? 0 : 1;
}

static int close_context(void **state) {
    (void)state;
    mt_context_destroy(ctx);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_types),
        cmocka_unit_test(test_nothing_to_do),
#if !defined(OPERATORS_ON_GPU)
        cmocka_unit_test(test_number_of_threads),
#endif
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_rules_by_name),
        cmocka_unit_test(test_scale_add_numbers),
        cmocka_unit_test(test_moving_average),
    };
    return cmocka_run_group_tests(tests, open_context, close_context);
}
