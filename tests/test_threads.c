/* test_threads.c - tests that every operator gives the same bits with any number of threads, and needs the scratch
   memory that a meta context plans. The first run, with one thread, is what the other tests compare with definitions.
   The shapes are large enough for several ranges of rows and of columns, odd, and with fewer rows than threads. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"
#include "mt_test.h"

#define VIEWS 9
#define ROWS (-1)   /* the rows of a shape */
#define COLS (-1)   /* the columns of a shape */
#define TWICE (-2)  /* two times as many columns */
#define ACROSS (-3) /* as many columns as the shape has rows */

typedef struct view {
    int64_t rows, cols;
    int any; /* any float type; otherwise f32 */
} view;

#define ANY(rows, cols)                                                                                                \
    { rows, cols, 1 }
#define F32(rows, cols)                                                                                                \
    { rows, cols, 0 }

/* An operator, and its views. All have values before the call, also those that it overwrites. */
typedef struct operation {
    const char *name;
    mt_status (*run)(mt_context *c, const mt_tensor *v);
    view views[VIEWS];
} operation;

typedef struct shape {
    int64_t rows, cols;
} shape;

#define COUNTS 4
static const int counts[COUNTS] = {1, 2, 3, 7};
static mt_context *contexts[COUNTS], *metas[COUNTS];

static int setup(void **state) {
    int k;
    (void)state;
    for (k = 0; k < COUNTS; k++) {
        contexts[k] = test_context(MT_DEVICE_CPU, counts[k]);
        metas[k] = test_context(MT_DEVICE_META, counts[k]);
    }
    return 0;
}

static int teardown(void **state) {
    int k;
    (void)state;
    for (k = 0; k < COUNTS; k++) {
        mt_context_destroy(contexts[k]);
        mt_context_destroy(metas[k]);
    }
    return 0;
}

typedef struct operands {
    int count;
    mt_tensor view[VIEWS];
    size_t bytes[VIEWS];
    void *values[VIEWS], *want[VIEWS]; /* before the call, and after a call with one thread */
} operands;

static void *allocated(size_t bytes) {
    void *p = malloc(bytes);
    assert_non_null(p);
    return p;
}

static int64_t columns_of(const view *w, shape s) {
    if (w->cols == ACROSS) return s.rows;
    return w->cols < 0 ? s.cols * -w->cols : w->cols;
}

static operands operands_of(const operation *o, shape s, mt_dtype dtype) {
    uint64_t random = 20240607;
    operands x;
    memset(&x, 0, sizeof x);
    for (; x.count < VIEWS && o->views[x.count].rows; x.count++) {
        const view *w = &o->views[x.count];
        int64_t rows = w->rows == ROWS ? s.rows : w->rows, cols = columns_of(w, s);
        int64_t ld = cols + x.count % 3, n = rows * ld, j;
        float *f = (float *)allocated((size_t)n * sizeof(float));
        mt_tensor *t = &x.view[x.count];
        *t = mt_tensor_make(NULL, w->any ? dtype : MT_F32, rows, cols);
        t->ld = ld;
        x.bytes[x.count] = (size_t)n * mt_dtype_size(t->dtype);
        for (j = 0; j < n; j++) f[j] = 1.5f * test_float(&random);
        x.values[x.count] = f;
        if (t->dtype != MT_F32) {
            x.values[x.count] = allocated(x.bytes[x.count]);
            mt_f32_to_16bit(t->dtype, f, (uint16_t *)x.values[x.count], n);
            free(f);
        }
        t->data = allocated(x.bytes[x.count]);
        x.want[x.count] = allocated(x.bytes[x.count]);
    }
    return x;
}

static void free_operands(operands *x) {
    int v;
    for (v = 0; v < x->count; v++) {
        free(x->view[v].data);
        free(x->values[v]);
        free(x->want[v]);
    }
}

/* Computes with contexts[k], and compares with what one thread computed. */
static void check_threads(const operation *o, operands *x, int k) {
    int v, changed = 0;
    for (v = 0; v < x->count; v++) memcpy(x->view[v].data, x->values[v], x->bytes[v]);
    mt_arena_reset_peak(contexts[k]);
    mt_arena_reset_peak(metas[k]);
    ASSERT_STATUS(contexts[k], MT_SUCCESS, o->run(contexts[k], x->view));
    for (v = 0; v < x->count; v++) {
        changed |= memcmp(x->view[v].data, x->values[v], x->bytes[v]) != 0;
        if (k == 0) memcpy(x->want[v], x->view[v].data, x->bytes[v]);
        if (memcmp(x->view[v].data, x->want[v], x->bytes[v]) != 0)
            fail_msg("%s of [%ld, %ld] in %s: view %d has other bits with %d threads", o->name, (long)x->view[0].rows,
                     (long)x->view[0].cols, mt_dtype_name(x->view[0].dtype), v, counts[k]);
    }
    assert_true(changed);
    assert_int_equal(mt_arena_mark(contexts[k]), 0);
    ASSERT_STATUS(metas[k], MT_SUCCESS, o->run(metas[k], x->view));
    assert_int_equal(mt_arena_peak(contexts[k]), mt_arena_peak(metas[k]));
}

static void check_operations(const operation *o, size_t count, const shape *shapes, size_t shape_count) {
    size_t i, s;
    int k, type;
    for (i = 0; i < count; i++)
        for (s = 0; s < shape_count; s++)
            for (type = 0; type < 3; type++) {
                operands x = operands_of(&o[i], shapes[s], (mt_dtype)type);
                for (k = 0; k < COUNTS; k++) check_threads(&o[i], &x, k);
                free_operands(&x);
            }
}

#define LENGTH(list) (sizeof(list) / sizeof(list)[0])

static const shape matrices[] = {{67, 1003}, {3, 20011}, {16001, 5}, {150, 333}, {1, 70001}, {1, 1}};

/* ---- moving and filling ------------------------------------------------------------------------------------------ */

static mt_status run_fill(mt_context *c, const mt_tensor *v) { return mt_fill(c, v[0], 0.3f); }
static mt_status run_copy(mt_context *c, const mt_tensor *v) { return mt_copy(c, v[0], v[1]); }
static mt_status run_convert(mt_context *c, const mt_tensor *v) { return mt_convert(c, v[0], v[1]); }
static mt_status run_add(mt_context *c, const mt_tensor *v) { return mt_add(c, v[0], v[1], v[2]); }
static mt_status run_upload(mt_context *c, const mt_tensor *v) { return mt_upload(c, v[0].data, v[1]); }
static mt_status run_download(mt_context *c, const mt_tensor *v) {
    return mt_context_has_data(c) ? mt_download(c, v[0], v[1].data) : MT_SUCCESS;
}

static void test_moves(void **state) {
    static const operation list[] = {
        {"mt_fill", run_fill, {ANY(ROWS, COLS)}},
        {"mt_copy", run_copy, {ANY(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_convert", run_convert, {F32(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_convert", run_convert, {ANY(ROWS, COLS), F32(ROWS, COLS)}},
        {"mt_add", run_add, {ANY(ROWS, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_upload", run_upload, {ANY(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_download", run_download, {ANY(ROWS, COLS), ANY(ROWS, COLS)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), matrices, LENGTH(matrices));
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

static mt_status run_sum(mt_context *c, const mt_tensor *v) { return mt_sum(c, v[0], v[1]); }
static mt_status run_squares(mt_context *c, const mt_tensor *v) { return mt_sum_of_squares(c, v[0], v[1]); }
static mt_status run_squares_list(mt_context *c, const mt_tensor *v) {
    mt_square_tensor tensors[] = {{v[0], 1}, {v[1], 0}, {v[2], 1}};
    mt_multi_tensor *list = NULL;
    mt_status status;
    MT_TRY(mt_multi_tensor_create_squares(c, tensors, 3, &list));
    status = mt_multi_tensor_sum_of_squares(c, list, v[3]);
    mt_multi_tensor_destroy(c, list);
    return status;
}

/* The last shapes have more elements than a sum has parts of the smallest size: long rows, and narrow ones. */
static void test_sums(void **state) {
    static const shape shapes[] = {{67, 1003}, {3, 20011}, {16001, 5}, {1, 70001}, {1, 1}, {2, 700001}, {300007, 5}};
    static const operation list[] = {
        {"mt_sum", run_sum, {ANY(ROWS, COLS), F32(1, 1)}},
        {"mt_sum_of_squares", run_squares, {ANY(ROWS, COLS), F32(1, 1)}},
        {"mt_multi_tensor_sum_of_squares",
         run_squares_list,
         {F32(ROWS, COLS), F32(1, COLS), F32(ROWS, COLS), F32(1, 2)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), shapes, LENGTH(shapes));
}

/* ---- normalisation ----------------------------------------------------------------------------------------------- */

static mt_status run_layer_norm(mt_context *c, const mt_tensor *v) {
    return mt_norm_forward(c, MT_LAYER_NORM, v[0], v[1], v[2], 1e-5f, v[3], v[4]);
}
static mt_status run_rms_norm(mt_context *c, const mt_tensor *v) {
    return mt_norm_forward(c, MT_RMS_NORM, v[0], v[1], mt_none(), 1e-5f, v[2], mt_none());
}
static mt_status run_layer_norm_backward(mt_context *c, const mt_tensor *v) {
    return mt_norm_backward(c, MT_LAYER_NORM, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]);
}
static mt_status run_norm_backward_in_place(mt_context *c, const mt_tensor *v) {
    return mt_norm_backward(c, MT_LAYER_NORM, v[0], v[1], v[2], v[3], mt_none(), v[3], v[4], v[5]);
}
static mt_status run_rms_norm_backward(mt_context *c, const mt_tensor *v) {
    return mt_norm_backward(c, MT_RMS_NORM, v[0], v[1], v[2], v[3], mt_none(), v[4], v[5], mt_none());
}

static void test_norm(void **state) {
    static const operation list[] = {
        {"mt_norm_forward",
         run_layer_norm,
         {ANY(ROWS, COLS), ANY(1, COLS), ANY(1, COLS), ANY(ROWS, COLS), F32(ROWS, 2)}},
        {"mt_norm_forward", run_rms_norm, {ANY(ROWS, COLS), ANY(1, COLS), ANY(ROWS, COLS)}},
        {"mt_norm_backward",
         run_layer_norm_backward,
         {ANY(ROWS, COLS), ANY(1, COLS), F32(ROWS, 2), ANY(ROWS, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS), F32(1, COLS),
          F32(1, COLS)}},
        {"mt_norm_backward",
         run_norm_backward_in_place,
         {ANY(ROWS, COLS), ANY(1, COLS), F32(ROWS, 2), ANY(ROWS, COLS), F32(1, COLS), F32(1, COLS)}},
        {"mt_norm_backward",
         run_rms_norm_backward,
         {ANY(ROWS, COLS), ANY(1, COLS), F32(ROWS, 2), ANY(ROWS, COLS), ANY(ROWS, COLS), F32(1, COLS)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), matrices, LENGTH(matrices));
}

/* ---- bias and activations ---------------------------------------------------------------------------------------- */

static mt_status run_bias(mt_context *c, const mt_tensor *v) { return mt_bias_forward(c, v[0], v[1]); }
static mt_status run_bias_backward(mt_context *c, const mt_tensor *v) { return mt_bias_backward(c, v[0], v[1]); }
static mt_status run_gelu(mt_context *c, const mt_tensor *v) {
    return mt_activation_forward(c, MT_GELU_TANH, v[0], v[1], v[2]);
}
static mt_status run_swiglu(mt_context *c, const mt_tensor *v) {
    return mt_activation_forward(c, MT_SWIGLU, v[0], v[1], v[2]);
}
static mt_status run_gelu_backward(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_GELU_TANH, v[0], v[1], v[2], v[3]);
}
static mt_status run_erf_backward_in_place(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_GELU_ERF, v[0], v[1], v[0], mt_none());
}
static mt_status run_swiglu_backward(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_SWIGLU, v[0], v[1], v[2], v[3]);
}

static void test_bias_and_activation(void **state) {
    static const operation list[] = {
        {"mt_bias_forward", run_bias, {ANY(ROWS, COLS), ANY(1, COLS)}},
        {"mt_bias_backward", run_bias_backward, {ANY(ROWS, COLS), F32(1, COLS)}},
        {"mt_activation_forward", run_gelu, {ANY(ROWS, COLS), ANY(1, COLS), ANY(ROWS, COLS)}},
        {"mt_activation_forward", run_swiglu, {ANY(ROWS, TWICE), ANY(1, TWICE), ANY(ROWS, COLS)}},
        {"mt_activation_backward",
         run_gelu_backward,
         {ANY(ROWS, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS), F32(1, COLS)}},
        {"mt_activation_backward", run_erf_backward_in_place, {ANY(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_activation_backward",
         run_swiglu_backward,
         {ANY(ROWS, TWICE), ANY(ROWS, COLS), ANY(ROWS, TWICE), F32(1, TWICE)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), matrices, LENGTH(matrices));
}

/* ---- hash, random numbers and dropout ---------------------------------------------------------------------------- */

/* A part of a tensor of 100000 columns, from an odd element on. */
static const mt_random place = {5, 77, 3, 11, 100000, NULL};

static mt_dropout dropout_of(float p) {
    mt_dropout d;
    d.at = place;
    d.p = p;
    return d;
}

static mt_status run_dropout(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_forward(c, v[0], v[1], v[2], dropout_of(0.3f), v[3]);
}
static mt_status run_no_dropout(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_forward(c, v[0], v[1], v[2], dropout_of(0), v[3]);
}
static mt_status run_dropout_backward(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_backward(c, v[0], dropout_of(0.3f), v[1], v[2]);
}
static mt_status run_no_dropout_backward(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_backward(c, v[0], dropout_of(0), v[0], v[1]);
}

static mt_status run_normal(mt_context *c, const mt_tensor *v) { return mt_random_normal(c, v[0], 0.02f, place); }

/* The hash takes the place of the two elements of view 1. */
static mt_status run_hash(mt_context *c, const mt_tensor *v) {
    uint64_t hash = 1;
    MT_TRY(mt_hash(c, v[0], 5, 7, 100000, &hash));
    if (mt_context_has_data(c)) memcpy(v[1].data, &hash, sizeof hash);
    return MT_SUCCESS;
}

static void test_random_and_dropout(void **state) {
    static const operation list[] = {
        {"mt_hash", run_hash, {ANY(ROWS, COLS), F32(1, 2)}},
        {"mt_random_normal", run_normal, {ANY(ROWS, COLS)}},
        {"mt_bias_dropout_add_forward", run_dropout, {ANY(ROWS, COLS), ANY(1, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_bias_dropout_add_forward",
         run_no_dropout,
         {ANY(ROWS, COLS), ANY(1, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_bias_dropout_add_backward", run_dropout_backward, {ANY(ROWS, COLS), ANY(ROWS, COLS), F32(1, COLS)}},
        {"mt_bias_dropout_add_backward", run_no_dropout_backward, {ANY(ROWS, COLS), F32(1, COLS)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), matrices, LENGTH(matrices));
}

/* ---- element by element ------------------------------------------------------------------------------------------ */

static mt_status run_by_row(mt_context *c, const mt_tensor *v) { return mt_multiply_row_forward(c, v[0], v[1], v[2]); }
static mt_status run_by_row_backward(mt_context *c, const mt_tensor *v) {
    return mt_multiply_row_backward(c, v[0], v[1], v[2], v[2], v[3]);
}
static mt_status run_by_col(mt_context *c, const mt_tensor *v) { return mt_multiply_col_forward(c, v[0], v[1], v[2]); }
static mt_status run_by_col_backward(mt_context *c, const mt_tensor *v) {
    return mt_multiply_col_backward(c, v[0], v[1], v[2], v[2], v[3]);
}
static mt_status run_silu_backward(mt_context *c, const mt_tensor *v) { return mt_silu_backward(c, v[0], v[1], v[2]); }
static mt_status run_gate(mt_context *c, const mt_tensor *v) { return mt_sigmoid_gate_forward(c, v[0], v[1], v[2]); }
static mt_status run_gate_backward(mt_context *c, const mt_tensor *v) {
    return mt_sigmoid_gate_backward(c, v[0], v[1], v[2], v[3], v[1]);
}

static void test_products(void **state) {
    static const operation list[] = {
        {"mt_multiply_row_forward", run_by_row, {ANY(ROWS, COLS), ANY(1, COLS), ANY(ROWS, COLS)}},
        {"mt_multiply_row_backward",
         run_by_row_backward,
         {ANY(ROWS, COLS), ANY(1, COLS), ANY(ROWS, COLS), F32(1, COLS)}},
        {"mt_multiply_col_forward", run_by_col, {ANY(ROWS, COLS), ANY(ROWS, 1), ANY(ROWS, COLS)}},
        {"mt_multiply_col_backward",
         run_by_col_backward,
         {ANY(ROWS, COLS), ANY(ROWS, 1), ANY(ROWS, COLS), ANY(ROWS, 1)}},
        {"mt_silu_backward", run_silu_backward, {ANY(ROWS, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_sigmoid_gate_forward", run_gate, {ANY(ROWS, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS)}},
        {"mt_sigmoid_gate_backward",
         run_gate_backward,
         {ANY(ROWS, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS), ANY(ROWS, COLS)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), matrices, LENGTH(matrices));
}

/* ---- rotary ------------------------------------------------------------------------------------------------------ */

static mt_attention_desc rotary_of(mt_rotary_form form) {
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = 3;
    s.seq = 67;
    s.groups = 2;
    s.heads_per_group = 3;
    s.head_dim = 42;
    s.scores.rotary_form = form;
    return s;
}

static mt_status run_rotary_table(mt_context *c, const mt_tensor *v) { return mt_rotary_table(c, 10000, v[0]); }
static mt_status run_rotary(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = rotary_of(MT_ROTARY_HALVES);
    return mt_rotary_forward(c, &s, v[0], v[1]);
}
static mt_status run_rotary_backward(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = rotary_of(MT_ROTARY_PAIRS);
    return mt_rotary_backward(c, &s, v[0], v[1]);
}

static void test_rotary(void **state) {
    static const shape tokens[] = {{3 * 67, 5 * 2 * 42}};
    static const operation list[] = {
        {"mt_rotary_table", run_rotary_table, {ANY(1201, 42)}},
        {"mt_rotary_forward", run_rotary, {ANY(67, 42), ANY(ROWS, COLS)}},
        {"mt_rotary_backward", run_rotary_backward, {ANY(67, 42), ANY(ROWS, COLS)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), tokens, LENGTH(tokens));
}

/* ---- embedding and ids ------------------------------------------------------------------------------------------- */

#define IDS 20011

/* Ids below `limit`. Neighbours differ, and some ids repeat. */
static const int32_t *ids_below(int64_t limit) {
    static int32_t ids[IDS];
    int i;
    for (i = 0; i < IDS; i++) ids[i] = (int32_t)((5 + i * 7919LL) % limit);
    return ids;
}

static mt_status run_embedding(mt_context *c, const mt_tensor *v) {
    return mt_embedding_forward(c, v[0], 5, ids_below(40), 0.0f, v[1]);
}
static mt_status run_embedding_added(mt_context *c, const mt_tensor *v) {
    return mt_embedding_forward(c, v[0], 5, ids_below(40), 0.5f, v[1]);
}
static mt_status run_embedding_backward(mt_context *c, const mt_tensor *v) {
    return mt_embedding_backward(c, v[0], 5, ids_below(40), v[1]);
}
static mt_status run_positions(mt_context *c, const mt_tensor *v) {
    static const int32_t documents[] = {0, 7, 1000, 9001, 20011};
    return mt_position_ids(c, 0, 3000, documents, 4, (int32_t *)v[0].data, v[0].rows);
}

static void test_embedding(void **state) {
    static const operation list[] = {
        {"mt_embedding_forward", run_embedding, {ANY(30, COLS), ANY(ROWS, COLS)}},
        {"mt_embedding_forward", run_embedding_added, {ANY(30, COLS), ANY(ROWS, COLS)}},
        {"mt_embedding_backward", run_embedding_backward, {ANY(ROWS, COLS), F32(38, COLS)}},
        {"mt_position_ids", run_positions, {F32(ROWS, 1)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), matrices, LENGTH(matrices));
}

/* ---- cross-entropy ----------------------------------------------------------------------------------------------- */

/* The last columns are padding. */
static mt_cross_entropy_shard_desc shard_of(mt_tensor logits) {
    mt_cross_entropy_shard_desc d = {.vocab = mt_max(1, logits.cols - 2), .label_smoothing = 0.1f, .ignore_index = 3};
    return d;
}

static mt_status run_stats(mt_context *c, const mt_tensor *v) {
    mt_cross_entropy_shard_desc d = shard_of(v[0]);
    return mt_cross_entropy_stats(c, &d, v[0], ids_below(d.vocab), v[1]);
}
static mt_status run_combine(mt_context *c, const mt_tensor *v) {
    mt_cross_entropy_shard_desc d = shard_of(v[0]);
    return mt_cross_entropy_combine(c, &d, v[0], 1, ids_below(d.vocab), v[1], v[2]);
}
static mt_status run_cross_entropy_backward(mt_context *c, const mt_tensor *v) {
    mt_cross_entropy_shard_desc d = shard_of(v[0]);
    return mt_cross_entropy_backward(c, &d, v[0], ids_below(d.vocab), v[1], v[2], 3.0f);
}
static mt_status run_loss(mt_context *c, const mt_tensor *v) {
    mt_cross_entropy_shard_desc d = shard_of(v[0]);
    return mt_cross_entropy_forward_backward(c, &d, v[0], ids_below(d.vocab), mt_none(), 3.0f, v[1]);
}

static void test_cross_entropy(void **state) {
    static const operation list[] = {
        {"mt_cross_entropy_stats", run_stats, {ANY(ROWS, COLS), F32(ROWS, 4)}},
        {"mt_cross_entropy_combine", run_combine, {F32(ROWS, 4), F32(1, ACROSS), F32(2, ACROSS)}},
        {"mt_cross_entropy_backward", run_cross_entropy_backward, {ANY(ROWS, COLS), F32(2, ACROSS), F32(1, ACROSS)}},
        {"mt_cross_entropy_forward_backward", run_loss, {ANY(ROWS, COLS), F32(1, ACROSS)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), matrices, LENGTH(matrices));
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

static const mt_adamw hyper = {
    .lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-3f, .weight_decay = 0.1f, .grad_scale = 0.5f, .step = 3};

static mt_status run_adamw(mt_context *c, const mt_tensor *v) {
    return mt_adamw_step(c, &hyper, v[0], v[0].dtype == MT_F32 ? mt_none() : v[1], v[2], v[3], v[4]);
}
static mt_status run_stochastic_adamw(mt_context *c, const mt_tensor *v) {
    mt_adamw h = hyper;
    if (v[0].dtype != MT_F32) h.stochastic_rounding = &place;
    return mt_adamw_step(c, &h, v[0], mt_none(), v[1], v[2], v[3]);
}
static mt_status run_adamw_list(mt_context *c, const mt_tensor *v) {
    mt_adamw_tensor tensors[] = {{v[0], mt_none(), v[2], v[3], v[4], 1, {0, 0, 0, 0, 0, NULL}},
                                 {v[5], mt_none(), v[6], v[7], v[8], 0, {0, 0, 0, 0, 0, NULL}}};
    mt_multi_tensor *list = NULL;
    mt_status status;
    MT_TRY(mt_multi_tensor_create_adamw(c, tensors, 2, 0, &list));
    status = mt_multi_tensor_adamw(c, list, &hyper, NULL);
    mt_multi_tensor_destroy(c, list);
    return status;
}

static void test_adamw(void **state) {
    static const shape rows[] = {{67, 1003}, {3, 20011}, {1, 70001}, {16001, 5}, {1, 1}};
    static const operation list[] = {
        {"mt_adamw_step",
         run_adamw,
         {ANY(ROWS, COLS), F32(ROWS, COLS), F32(ROWS, COLS), F32(ROWS, COLS), F32(ROWS, COLS)}},
        {"mt_adamw_step", run_stochastic_adamw, {ANY(ROWS, COLS), F32(ROWS, COLS), F32(ROWS, COLS), F32(ROWS, COLS)}},
        {"mt_multi_tensor_adamw",
         run_adamw_list,
         {ANY(ROWS, COLS), F32(1, 1), F32(ROWS, COLS), F32(ROWS, COLS), F32(ROWS, COLS), ANY(1, COLS), F32(1, COLS),
          F32(1, COLS), F32(1, COLS)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), rows, LENGTH(rows));
}

/* The rows of a loop are computed in several parts. Each has its own random words. */
static void test_long_rows(void **state) {
    static const operation whole = {
        "mt_adamw_step", run_stochastic_adamw, {ANY(1, COLS), F32(1, COLS), F32(1, COLS), F32(1, COLS)}};
    operands x = operands_of(&whole, (shape){1, 9001}, MT_BF16);
    mt_adamw h = hyper;
    mt_random at = place;
    int v;
    (void)state;
    h.stochastic_rounding = &at;
    check_threads(&whole, &x, 0);
    for (v = 0; v < x.count; v++) memcpy(x.view[v].data, x.values[v], x.bytes[v]);
    for (; at.first_col < place.first_col + 9001; at.first_col += 1000) {
        mt_tensor part[4];
        int64_t first = at.first_col - place.first_col;
        for (v = 0; v < 4; v++) part[v] = mt_tensor_cols(x.view[v], first, mt_min(1000, 9001 - first));
        ASSERT_STATUS(contexts[0], MT_SUCCESS,
                      mt_adamw_step(contexts[0], &h, part[0], mt_none(), part[1], part[2], part[3]));
    }
    for (v = 0; v < x.count; v++) assert_memory_equal(x.view[v].data, x.want[v], x.bytes[v]);
    free_operands(&x);
}

/* ---- sampling ---------------------------------------------------------------------------------------------------- */

/* The ids are in v[3], whose rows are contiguous. */
static mt_status sample(mt_context *c, mt_sample_desc d, const mt_tensor *v) {
    MT_TRY(mt_sample_candidates(c, &d, v[0].cols, 0, v[0], v[1]));
    return mt_sample_ids(c, &d, v[0].cols, v[1], 1, (int32_t *)v[3].data);
}
static mt_status run_sample(mt_context *c, const mt_tensor *v) {
    mt_sample_desc d = {.temperature = 0.7f, .seed = 5, .position = 3};
    return sample(c, d, v);
}
static mt_status run_sample_k(mt_context *c, const mt_tensor *v) {
    mt_sample_desc d = {.temperature = 0.7f, .top_k = 5, .seed = 5};
    return sample(c, d, v);
}
static mt_status run_sample_p(mt_context *c, const mt_tensor *v) {
    mt_sample_desc d = {.temperature = 0.7f, .top_p = 0.8f, .seed = 5};
    return sample(c, d, v);
}

static void test_sampling(void **state) {
    static const shape logits[] = {{67, 1003}, {3, 20011}, {1001, 33}};
    static const operation list[] = {
        {"mt_sample_ids", run_sample, {ANY(ROWS, COLS), F32(ROWS, 2), F32(1, 1), F32(ROWS, 1)}},
        {"mt_sample_ids", run_sample_k, {ANY(ROWS, COLS), F32(ROWS, 10), F32(1, 1), F32(ROWS, 1)}},
        {"mt_sample_ids", run_sample_p, {ANY(ROWS, COLS), F32(ROWS, TWICE), F32(1, 1), F32(ROWS, 1)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), logits, LENGTH(logits));
}

/* ---- key/value cache --------------------------------------------------------------------------------------------- */

/* Three sequences of one to three new tokens, and two key/value heads with two query heads each. The cache is in v[0]
   and v[3], whose rows are contiguous. With the many tokens of the longer one, threads work at the same time. */
#define KV_SEQ 3
#define KV_MAX 300
#define KV_ROWS (3 * 2 * KV_MAX)
#define KV_LONG 4000
#define KV_LONG_ROWS (3 * 2 * KV_LONG)

static mt_attention_desc kv_desc(mt_tensor keys) {
    static const int32_t added[] = {3, 1, 2};
    mt_attention_desc d = {.batch = 3, .seq = KV_SEQ, .groups = 2, .heads_per_group = 2, .lengths = added};
    d.head_dim = keys.cols;
    d.scores.mask = MT_MASK_CAUSAL;
    return d;
}

static mt_status run_append(mt_context *c, const mt_tensor *v) {
    static const int32_t lengths[] = {KV_MAX - 3, 0, 201};
    mt_kv_cache cache = {v[0], v[3], KV_MAX, lengths};
    mt_attention_desc d = kv_desc(v[0]);
    return mt_kv_cache_append(c, &d, v[2], v[1], &cache);
}
static mt_status run_prompts(mt_context *c, const mt_tensor *v) {
    static const int32_t lengths[] = {0, KV_MAX - 20, 100};
    mt_kv_cache cache = {v[0], v[3], KV_MAX, lengths};
    mt_attention_desc d = kv_desc(v[0]);
    d.seq = 20;
    d.lengths = NULL;
    return mt_kv_cache_attention(c, &d, v[1], &cache, v[2]);
}
static mt_status run_attention(mt_context *c, const mt_tensor *v) {
    static const int32_t lengths[] = {KV_LONG - 3, 3000, 3901};
    mt_kv_cache cache = {v[0], v[3], KV_LONG, lengths};
    mt_attention_desc d = kv_desc(v[0]);
    return mt_kv_cache_attention(c, &d, v[1], &cache, v[2]);
}

static void test_kv_cache(void **state) {
    static const shape any = {1, 1};
    static const operation list[] = {
        {"mt_kv_cache_append",
         run_append,
         {ANY(KV_ROWS, 1000), ANY(3 * KV_SEQ, 8 * 1000), ANY(KV_MAX, 1000), ANY(KV_ROWS, 1000)}},
        {"mt_kv_cache_attention",
         run_prompts,
         {ANY(KV_ROWS, 40), ANY(3 * 20, 8 * 40), ANY(3 * 20, 4 * 40), ANY(KV_ROWS, 40)}},
        {"mt_kv_cache_attention",
         run_attention,
         {ANY(KV_LONG_ROWS, 40), ANY(3 * KV_SEQ, 8 * 40), ANY(3 * KV_SEQ, 4 * 40), ANY(KV_LONG_ROWS, 40)}},
        {"mt_kv_cache_attention",
         run_attention,
         {ANY(KV_LONG_ROWS, 64), ANY(3 * KV_SEQ, 8 * 64), ANY(3 * KV_SEQ, 4 * 64), ANY(KV_LONG_ROWS, 64)}},
    };
    (void)state;
    check_operations(list, LENGTH(list), &any, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_bias_and_activation),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_long_rows),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_kv_cache),
        cmocka_unit_test(test_random_and_dropout),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_rotary),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
