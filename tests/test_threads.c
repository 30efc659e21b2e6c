/* test_threads.c - tests that every operator gives the same bits with any number of threads, and needs the scratch
   memory that a meta context plans. The first run, with one thread, is what the other tests compare with definitions.
   The shapes are large enough for several ranges of rows and of columns, odd, and with fewer rows than threads. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"
#include "mt_test.h"

#define VIEWS 9
#define ROWS (-1)  /* the rows of a shape */
#define COLS (-1)  /* the columns of a shape */
#define TWICE (-2) /* two times as many columns */

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

static mt_context *context_of(mt_device device, int threads) {
    mt_context_desc d;
    mt_context *c = NULL;
    memset(&d, 0, sizeof d);
    d.device = device;
    d.threads = threads;
    d.arena_bytes = device == MT_DEVICE_META ? 0 : (size_t)32 << 20;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &c));
    return c;
}

static int setup(void **state) {
    int k;
    (void)state;
    for (k = 0; k < COUNTS; k++) {
        contexts[k] = context_of(MT_DEVICE_CPU, counts[k]);
        metas[k] = context_of(MT_DEVICE_META, counts[k]);
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

static operands operands_of(const operation *o, shape s, mt_dtype dtype) {
    uint64_t random = 20240607;
    operands x;
    memset(&x, 0, sizeof x);
    for (; x.count < VIEWS && o->views[x.count].rows; x.count++) {
        const view *w = &o->views[x.count];
        int64_t rows = w->rows == ROWS ? s.rows : w->rows, cols = w->cols < 0 ? s.cols * -w->cols : w->cols;
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

static const shape matrices[] = {{67, 1003}, {3, 20011}, {16001, 5}, {150, 333}, {1, 1}};

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

/* ---- dropout ----------------------------------------------------------------------------------------------------- */

/* A part of a tensor of 30000 columns, from an odd element on. */
static const mt_random place = {5, 77, 3, 11, 30000, NULL};

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

static void test_dropout(void **state) {
    static const operation list[] = {
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_bias_and_activation),
        cmocka_unit_test(test_dropout),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
