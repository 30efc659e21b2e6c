/* test_operators.c - operators by their tables.

   For each entry of mt_test_operators.h, with the shapes, types and overlaps of its table (src/ops/operator.c): values
   against a definition in double precision, also in rows with gaps; bf16 and f16 give the result of f32, rounded once;
   any number of threads gives the same bits; an empty first operand is no error; and each wrong operand is refused, by
   name, and changes nothing: another shape or type, no data, an odd address, an overlap.
   test_cuda_operators.cu runs the same entries on a GPU. tests/test_rules.c tests the rules. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"
#include "mt_test.h"
#include "mt_test_operators.h"

#if defined(OPERATORS_ON_GPU)
#define DEVICE MT_DEVICE_CUDA
#else
#define DEVICE MT_DEVICE_CPU
#endif

enum { MOST = 4096, SPARE = 3 };

/* ---- operands ---------------------------------------------------------------------------------------------------- */

static mt_context *ctx;

typedef struct operands {
    const operator_entry *e;
    int count;
    int64_t rows[MTI_ARGS], cols[MTI_ARGS];
    mt_tensor v[MTI_ARGS];
    unsigned char *memory[MTI_ARGS]; /* of the context */
    size_t bytes[MTI_ARGS];
    float given[MTI_ARGS][MOST]; /* the values that the operands have before the call, in rows without gaps */
} operands;

static operands o;

static int is_left_out(int i) { return operator_lists(o.e->left_out, o.e->table->operands[i].name); }
static int is_input(int i) {
    return (o.e->table->operands[i].use & MT_ARG_IN) || operator_lists(o.e->reads, o.e->table->operands[i].name);
}
static int is_output(int i) { return (o.e->table->operands[i].use & MT_ARG_OUT) != 0; }
static int is_float(int i) { return o.e->table->operands[i].type == MT_ARG_FLOAT; }

/* n and m are the letters of rows and columns; the third letter, if there is one, is k. A is the rows of all shards. */
static int64_t size_of(char letter, int64_t n, int64_t m) {
    return letter <= '9'   ? letter - '0'
           : letter == 'n' ? n
           : letter == 'm' ? m
           : letter == 'A' ? SOFTMAX_SHARDS * n
                           : 5;
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
static void make_operands(const operator_entry *e, int64_t n, int64_t m, const mt_dtype *types, int64_t gap) {
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
        for (int64_t k = 0; operator_lists(e->positive, p->name) && k < o.rows[i] * o.cols[i]; k++)
            o.given[i][k] = fabsf(o.given[i][k]) + 0.125f;
        if (o.rows[i] * o.cols[i] > 0 && is_input(i)) put_values(i);
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

static const int64_t shapes[][2] = {{1, 1}, {5, 37}, {3, 515}, {61, 8}, {1, 1000}, {2, 1500}};

static void test_values(void **state) {
    (void)state;
    for (size_t e = 0; e < OPERATOR_ENTRIES; e++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int64_t gap = 0; gap <= SPARE; gap += SPARE) {
                make_operands(&operator_entries[e], shapes[s][0], shapes[s][1], NULL, gap);
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
    for (size_t e = 0; e < OPERATOR_ENTRIES; e++) {
        int floats = 0, combinations = 1;
        o.e = &operator_entries[e];
        for (int i = 0; o.e->table->operands[i].name; i++) floats += is_float(i);
        for (int i = 0; i < floats; i++) combinations *= 3;
        for (int c = 1; c < combinations; c++) {
            for (int i = 0, rest = c; i < MTI_ARGS; i++) {
                types[i] = all[rest % 3];
                if (i < MTI_ARGS && o.e->table->operands[i].name && is_float(i)) rest /= 3;
            }
            make_operands(&operator_entries[e], 5, 37, types, SPARE);
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
    for (size_t e = 0; e < OPERATOR_ENTRIES; e++)
        for (int rows = 0; rows < 2; rows++) {
            make_operands(&operator_entries[e], rows ? 0 : 4, rows ? 4 : 0, NULL, 0);
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
    for (size_t e = 0; e < OPERATOR_ENTRIES; e++)
        for (size_t t = 0; t < 4; t++) {
            ctx = test_context(MT_DEVICE_CPU, threads[t]);
            make_operands(&operator_entries[e], 61, 67, NULL, 0);
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
            other.ld = other.rows > 1 ? mt_max(at.ld, other.cols) : other.ld;
            is_refused(k, other, MT_ERR_ARGUMENT, "overlap");
        }
}

static void test_refusals(void **state) {
    (void)state;
    for (size_t e = 0; e < OPERATOR_ENTRIES; e++) {
        make_operands(&operator_entries[e], 5, 37, NULL, SPARE);
        for (int i = 0; i < o.count; i++)
            if (!is_left_out(i)) wrong_views(i);
        overlaps();
        free_operands();
        assert_int_equal(operator_entries[e].run(NULL, o.v), MT_ERR_ARGUMENT);
    }
}

/* An output may be an input where the table says so ("=x"), or where it says nothing. */
static void test_in_place(void **state) {
    (void)state;
    for (size_t e = 0; e < OPERATOR_ENTRIES; e++)
        for (int i = 0; i < MTI_ARGS && operator_entries[e].table->operands[i].name; i++)
            for (int k = 0; k < MTI_ARGS && operator_entries[e].table->operands[k].name; k++) {
                make_operands(&operator_entries[e], 5, 37, NULL, SPARE);
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

static const operator_entry *scale_add_entry(const char *what) {
    const operator_entry *e = operator_entries;
    while (e->table != &mti_scale_add_table || strcmp(e->what, what) != 0) e++;
    return e;
}

static void test_scale_add_numbers(void **state) {
    static const float wrong[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    make_operands(scale_add_entry("device"), 3, 4, NULL, 0);
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
    make_operands(scale_add_entry("host"), 3, 4, NULL, 0);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, o.v[0], 0.0f));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, o.v[1], 2.0f));
    for (int i = 0; i < 20; i++)
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_scale_add(ctx, 0.1f, mt_none(), o.v[1], 0.9f, mt_none(), o.v[0]));
    get_values(0, got);
    for (int i = 0; i < 12; i++) assert_true(fabs(got[i] - 2.0 * (1.0 - pow(0.9, 20.0))) < 1e-5);
    free_operands();
}

/* ---- softmax ----------------------------------------------------------------------------------------------------- */

/* Gives an operand these values in place of the random ones. */
static void give(int i, const float *values) {
    memcpy(o.given[i], values, (size_t)(o.rows[i] * o.cols[i]) * sizeof *values);
    put_values(i);
}

static const operator_entry *entry_of(mt_status (*run)(mt_context *, const mt_tensor *)) {
    const operator_entry *e = operator_entries;
    while (e->run != run) e++;
    return e;
}

/* Rows with numbers that are not finite, with the results of PyTorch, in every type: rows without a result, one with a
   masked column, and one with all columns masked but one. */
static void test_softmax_of_special_values(void **state) {
    static const float x[] = {-INFINITY, -INFINITY, -INFINITY, INFINITY, 1, 2, NAN,       1,         2,
                              1,         2,         NAN,       -1000,    1, 1, -INFINITY, -INFINITY, 7};
    static const float want[] = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0, 0.5f, 0.5f, 0, 0, 1};
    static const float logs[] = {NAN, NAN, NAN, NAN,           NAN,        NAN,        NAN,       NAN,       NAN,
                                 NAN, NAN, NAN, -1001.693147f, -0.693147f, -0.693147f, -INFINITY, -INFINITY, 0};
    static const mt_dtype all[] = {MT_F32, MT_BF16, MT_F16};
    float got[18];
    (void)state;
    for (int k = 0; k < 6; k++) {
        const mt_dtype types[] = {all[k / 2], all[k / 2]};
        make_operands(entry_of(k % 2 ? run_log_softmax_forward : run_softmax_forward), 6, 3, types, SPARE);
        give(1, x);
        ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
        get_values(0, got);
        for (int i = 0; i < 18; i++) {
            float exact = k % 2 ? logs[i] : want[i], most = (k < 2 ? 1e-6f : 0.004f) * fmaxf(1.0f, fabsf(exact));
            int right = isnan(exact) ? isnan(got[i]) : got[i] == exact || fabsf(got[i] - exact) <= most;
            if (!right)
                fail_msg("%s in %s: element %d is %g, must be %g", o.e->table->name, mt_dtype_name(all[k / 2]), i,
                         (double)got[i], (double)exact);
        }
        free_operands();
    }
}

/* Gradients against central differences of the double-precision forward. A masked column has no slope. */
static void test_softmax_slopes(void **state) {
    enum { COLS = 37 };
    static float y[COLS], got[COLS];
    (void)state;
    for (int log_of_it = 0; log_of_it < 2; log_of_it++) {
        double x[COLS], up[COLS], value[2], top, sum;
        make_operands(entry_of(log_of_it ? run_log_softmax_forward : run_softmax_forward), 1, COLS, NULL, 0);
        o.given[1][5] = log_of_it ? -40.0f : -INFINITY;
        give(1, o.given[1]);
        for (int j = 0; j < COLS; j++) x[j] = (double)o.given[1][j];
        ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
        get_values(0, y);
        free_operands();
        make_operands(entry_of(log_of_it ? run_log_softmax_backward : run_softmax_backward), 1, COLS, NULL, 0);
        give(1, y);
        for (int j = 0; j < COLS; j++) up[j] = (double)o.given[2][j];
        ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
        get_values(0, got);
        free_operands();
        for (int j = 0; j < COLS; j++) {
            const double at = x[j], step = 1e-5;
            for (int side = 0; side < 2; side++) {
                x[j] = side ? at + step : at - step;
                define_stats(x, COLS, &top, &sum);
                value[side] = 0.0;
                for (int k = 0; k < COLS; k++) value[side] += up[k] * softmax_of(x[k], top, sum, log_of_it);
            }
            x[j] = at;
            assert_true(fabs((double)got[j] - (value[1] - value[0]) / (2 * step)) < 1e-5);
        }
    }
}

enum { SPLIT = 5, SHARD_COLS = 11, WHOLE = 40 }; /* the last shard of five has padding only */

/* The softmax of rows in shards, as one tensor with padding, with what each step gives. */
typedef struct split_rows {
    mt_tensor x, y, dy, dx, gathered, sums, sum;
    void *memory;
    size_t bytes;
} split_rows;

static void open_split_rows(split_rows *r, int64_t rows) {
    const int64_t cols = SPLIT * SHARD_COLS;
    mt_tensor *wide[] = {&r->x, &r->y, &r->dy, &r->dx};
    float *at;
    r->bytes = (size_t)(rows * (4 * cols + SPLIT * 3 + 1)) * sizeof(float);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_alloc(ctx, r->bytes, &r->memory));
    at = (float *)r->memory;
    for (int i = 0; i < 4; i++, at += rows * cols) *wide[i] = mt_tensor_f32(at, rows, cols);
    r->gathered = mt_tensor_f32(at, SPLIT * rows, 2);
    r->sums = mt_tensor_f32(at + 2 * SPLIT * rows, SPLIT * rows, 1);
    r->sum = mt_tensor_f32(at + 3 * SPLIT * rows, rows, 1);
}

static mt_tensor shard_cols(mt_tensor t, int shard) { return mt_tensor_cols(t, shard * SHARD_COLS, SHARD_COLS); }

/* forward and backward of all shards, whose y and dx are apart or in place */
static void run_split_rows(split_rows *r, int log_of_it, int in_place) {
    const int64_t rows = r->x.rows;
    mt_tensor y = in_place ? r->x : r->y, dx = in_place ? r->dy : r->dx;
    mt_softmax_shard_desc d = {WHOLE, 0, log_of_it};
    for (int k = 0; k < SPLIT; k++) {
        d.first_col = k * SHARD_COLS;
        ASSERT_STATUS(
            ctx, MT_SUCCESS,
            mt_softmax_shard_stats(ctx, &d, shard_cols(r->x, k), mt_tensor_rows(r->gathered, k * rows, rows)));
    }
    for (int k = 0; k < SPLIT; k++) {
        d.first_col = k * SHARD_COLS;
        ASSERT_STATUS(ctx, MT_SUCCESS,
                      mt_softmax_shard_forward(ctx, &d, shard_cols(r->x, k), r->gathered, SPLIT, shard_cols(y, k)));
        ASSERT_STATUS(ctx, MT_SUCCESS,
                      mt_softmax_shard_sums(ctx, &d, shard_cols(y, k), shard_cols(r->dy, k),
                                            mt_tensor_rows(r->sums, k * rows, rows)));
        if (k == 0) ASSERT_STATUS(ctx, MT_SUCCESS, mt_copy(ctx, mt_tensor_rows(r->sums, 0, rows), r->sum));
        else ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, r->sum, mt_tensor_rows(r->sums, k * rows, rows), r->sum));
    }
    for (int k = 0; k < SPLIT; k++) {
        d.first_col = k * SHARD_COLS;
        ASSERT_STATUS(
            ctx, MT_SUCCESS,
            mt_softmax_shard_backward(ctx, &d, shard_cols(y, k), shard_cols(r->dy, k), r->sum, shard_cols(dx, k)));
    }
    r->y = y;
    r->dx = dx;
}

/* Five shards against double precision of whole rows. The padding holds NaN, and its y and dx are 0. */
static void test_softmax_of_shards(void **state) {
    enum { ROWS = 3, COLS = SPLIT * SHARD_COLS };
    static float x[ROWS * COLS], dy[ROWS * COLS], y[ROWS * COLS], dx[ROWS * COLS];
    (void)state;
    for (int how = 0; how < 4; how++) {
        const int log_of_it = how % 2;
        uint64_t random = 5;
        split_rows r;
        open_split_rows(&r, ROWS);
        for (int k = 0; k < ROWS * COLS; k++) {
            x[k] = k % COLS < WHOLE ? 20.0f * test_float(&random) : NAN;
            dy[k] = k % COLS < WHOLE ? test_float(&random) : NAN;
        }
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_upload(ctx, x, r.x));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_upload(ctx, dy, r.dy));
        run_split_rows(&r, log_of_it, how / 2);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_download(ctx, r.y, y));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_download(ctx, r.dx, dx));
        for (int i = 0; i < ROWS; i++) {
            double row[WHOLE], exact[WHOLE], slopes[WHOLE], top, sum, total = 0.0;
            for (int j = 0; j < WHOLE; j++) row[j] = (double)x[i * COLS + j];
            define_stats(row, WHOLE, &top, &sum);
            for (int j = 0; j < WHOLE; j++) exact[j] = softmax_of(row[j], top, sum, log_of_it);
            for (int j = 0; j < WHOLE; j++) total += (double)dy[i * COLS + j] * (log_of_it ? 1.0 : exact[j]);
            for (int j = 0; j < WHOLE; j++)
                slopes[j] = softmax_slope(exact[j], (double)dy[i * COLS + j], total, log_of_it);
            for (int j = 0; j < COLS; j++) {
                const double got = (double)y[i * COLS + j], slope = (double)dx[i * COLS + j];
                if (j >= WHOLE) assert_true(got == 0.0 && slope == 0.0);
                if (j >= WHOLE) continue;
                assert_true(fabs(got - exact[j]) <= 1e-6 * fmax(1.0, fabs(exact[j])));
                assert_true(fabs(slope - slopes[j]) <= 2e-6);
            }
        }
        mt_context_free(ctx, r.memory, r.bytes);
    }
}

/* A whole row is the only shard: both ways have the same bits. */
static void test_softmax_of_one_shard(void **state) {
    static float whole[MOST], shard[MOST];
    static const int64_t cols[] = {37, 1500};
    (void)state;
    for (int k = 0; k < 4; k++) {
        mt_softmax_shard_desc d = {cols[k / 2], 0, k % 2};
        float stats[4], *there;
        make_operands(entry_of(k % 2 ? run_log_softmax_forward : run_softmax_forward), 2, d.vocab, NULL, SPARE);
        ASSERT_STATUS(ctx, MT_SUCCESS, run_entry());
        get_values(0, whole);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_alloc(ctx, sizeof stats, (void **)&there));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_softmax_shard_stats(ctx, &d, o.v[1], mt_tensor_f32(there, 2, 2)));
        ASSERT_STATUS(ctx, MT_SUCCESS,
                      mt_softmax_shard_forward(ctx, &d, o.v[1], mt_tensor_f32(there, 2, 2), 1, o.v[0]));
        get_values(0, shard);
        assert_memory_equal(whole, shard, (size_t)(2 * d.vocab) * sizeof(float));
        mt_context_free(ctx, there, sizeof stats);
        free_operands();
    }
}

static void test_softmax_shard_numbers(void **state) {
    static const struct {
        mt_softmax_shard_desc desc;
        int shards;
        const char *words;
    } wrong[] = {{{0, 0, 0}, 2, "vocab is 0"},  {{-1, 0, 0}, 2, "vocab is -1"},  {{8, -1, 0}, 2, "first_col is -1"},
                 {{8, 0, 0}, 0, "shards is 0"}, {{8, 0, 0}, -1, "shards is -1"}, {{8, 0, 0}, 1025, "shards is 1025"}};
    (void)state;
    make_operands(entry_of(run_softmax_shard), 3, 4, NULL, 0);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(mt_softmax_shard_forward(ctx, &wrong[i].desc, o.v[1], o.v[2], wrong[i].shards, o.v[0]),
                         i < 3 ? MT_ERR_SHAPE : MT_ERR_ARGUMENT);
        assert_true(test_has_words(mt_last_error(ctx), wrong[i].words));
    }
    assert_int_equal(mt_softmax_shard_forward(ctx, NULL, o.v[1], o.v[2], 2, o.v[0]), MT_ERR_ARGUMENT);
    assert_true(test_has_words(mt_last_error(ctx), "mt_softmax_shard_forward: desc is NULL"));
    free_operands();
    make_operands(entry_of(run_softmax_sums), 3, 4, NULL, 0);
    assert_int_equal(mt_softmax_shard_sums(ctx, NULL, o.v[2], o.v[1], o.v[0]), MT_ERR_ARGUMENT);
    assert_int_equal(mt_softmax_shard_sums(ctx, &softmax_shard, mt_none(), o.v[1], o.v[0]), MT_ERR_SHAPE);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_softmax_shard_sums(ctx, &log_softmax_shard, mt_none(), o.v[1], o.v[0]));
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
        cmocka_unit_test(test_softmax_of_special_values),
        cmocka_unit_test(test_softmax_slopes),
        cmocka_unit_test(test_softmax_of_shards),
        cmocka_unit_test(test_softmax_of_one_shard),
        cmocka_unit_test(test_softmax_shard_numbers),
    };
    return cmocka_run_group_tests(tests, open_context, close_context);
}
