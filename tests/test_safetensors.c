/* test_safetensors.c - tests the writer of safetensors files, and the reader: good files against their known content,
   each reason to refuse a bad file, and the seeds of tests/fuzz with a fixed series of mutations. Run it from the root
   of the checkout. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <signal.h>
#include <sys/wait.h>

#include "fuzz/readers.h"
#include "mt_test_locale.h"
#include "mt_test_ranks.h"
#include "mt_test_scratch.h"

static mt_context *ctx;

/* A file in memory: a header and `data` bytes. *size: of all. The memory ends where the file ends. */
static unsigned char *make_file(const char *header, size_t header_bytes, size_t data, size_t *size) {
    uint64_t n = header_bytes;
    unsigned char *file = (unsigned char *)malloc(8 + header_bytes + data);
    assert_non_null(file);
    memcpy(file, &n, 8);
    memcpy(file + 8, header, header_bytes);
    for (size_t i = 0; i < data; i++) file[8 + header_bytes + i] = (unsigned char)(i + 1);
    *size = 8 + header_bytes + data;
    return file;
}

static const char *write_file(const void *bytes, size_t size) {
    const char *path = in_scratch("file");
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, size, f), size);
    fclose(f);
    return path;
}

/* Parses a file of this header and data. NULL: it is accepted; else the error message must contain these words. */
static void expect(const char *header, size_t data, const char *words) {
    size_t size;
    unsigned char *file = make_file(header, strlen(header), data, &size);
    mt_safetensors *s = (mt_safetensors *)calloc(1, sizeof *s);
    assert_non_null(s);
    snprintf(s->path, sizeof s->path, "NAME.safetensors");
    mt_status status = readers_parse(ctx, s, file, size);
    if (!words && status != MT_SUCCESS) fail_msg("%s: %s", header, mt_last_error(ctx));
    if (words && (status != MT_ERR_DATA || !strstr(ctx->error, words) || !strstr(ctx->error, "NAME.safetensors")))
        fail_msg("%s: %s, '%s' has no '%s'", header, mt_status_name(status), ctx->error, words);
    ctx->error[0] = 0;
    mt_safetensors_close(s);
    free(file);
}

static void good_files(void **state) {
    static const char header[] =
        "{\"b.2\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[4,10]},\"__metadata__\":{\"k\":\"v\",\"format\":"
        "\"pt\"},"
        "\"a\\u00e9\\ud83d\\ude00\\n\\\"\":{\"data_offsets\":[0,4],\"shape\":[1,1],\"dtype\":\"F32\","
        "\"new\":[{\"x\":[1e3,null]}]},"
        "\"none\":{\"dtype\":\"F16\",\"shape\":[2,0],\"data_offsets\":[10,10]},"
        "\"scalar\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[10,12]},"
        "\"i\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[12,20]}}   ";
    size_t size;
    unsigned char *file = make_file(header, sizeof header - 1, 20, &size);
    float one = -2.5f, out[3];
    uint16_t halves[4] = {0x3f80, 0xc000, 0x7f80, 0x3c00};
    (void)state;
    memcpy(file + size - 20, &one, 4);
    memcpy(file + size - 16, halves, 8);
    mt_safetensors *s;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, write_file(file, size), &s));
    free(file);
    assert_int_equal(mt_safetensors_count(s), 5);
    assert_string_equal(mt_safetensors_at(s, 0)->name, "a\xc3\xa9\xf0\x9f\x98\x80\n\"");
    assert_string_equal(mt_safetensors_at(s, 1)->name, "b.2");
    assert_string_equal(mt_safetensors_at(s, 4)->name, "scalar");
    assert_null(mt_safetensors_at(s, 5));
    assert_null(mt_safetensors_at(s, -1));
    assert_null(mt_safetensors_find(s, "b"));
    assert_null(mt_safetensors_find(s, "__metadata__"));
    assert_string_equal(mt_safetensors_metadata(s, "k"), "v");
    assert_string_equal(mt_safetensors_metadata(s, "format"), "pt");
    assert_null(mt_safetensors_metadata(s, "form"));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, mt_safetensors_at(s, 0), out));
    assert_true(out[0] == -2.5f);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, mt_safetensors_find(s, "b.2"), out));
    assert_true(out[0] == 1.0f && out[1] == -2.0f && isinf(out[2]));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, mt_safetensors_find(s, "scalar"), out));
    assert_true(out[0] == 1.0f && mt_safetensors_find(s, "scalar")->dims == 0);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, mt_safetensors_find(s, "none"), out));
    assert_int_equal(mt_safetensors_find(s, "none")->bytes, 0);
    REFUSED(ctx, MT_ERR_DTYPE, "'i'|I64", mt_safetensors_read(ctx, mt_safetensors_find(s, "i"), out));
    REFUSED(ctx, MT_ERR_ARGUMENT, "tensor", mt_safetensors_read(ctx, NULL, out));
    mt_safetensors_close(s);
    mt_safetensors_close(NULL);
    assert_int_equal(mt_safetensors_count(NULL), 0);
    expect("{}", 0, NULL);
    expect("{ \t\n\r} \n", 0, NULL);
}

/* Tensors long enough to be read in pieces. */
static void long_tensors(void **state) {
    char header[128];
    (void)state;
    for (int n = 255; n <= 515; n += 1) {
        size_t size, bytes = 2 * (size_t)n;
        snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"BF16\",\"shape\":[%d],\"data_offsets\":[0,%zu]}}", n,
                 bytes);
        unsigned char *file = make_file(header, strlen(header), bytes, &size);
        float *out = (float *)malloc((size_t)n * sizeof *out);
        mt_safetensors *s;
        for (int i = 0; i < n; i++) memcpy(file + size - bytes + 2 * (size_t)i, &(uint16_t){(uint16_t)(0x3f80 + i)}, 2);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, write_file(file, size), &s));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, mt_safetensors_at(s, 0), out));
        for (int i = 0; i < n; i++) assert_true(mt_f32_bits(out[i]) == (uint32_t)(0x3f80 + i) << 16);
        mt_safetensors_close(s);
        free(out);
        free(file);
    }
}

/* A text of exactly as many characters as its room is cut, because it ends with a NUL. */
static void text_of_the_size_of_its_room(void **state) {
    char *room = (char *)malloc(8);
    mt_field f = {.name = "t", .kind = MT_FIELD_TEXT, .value = room, .bytes = 8};
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_parse(ctx, "text", "{\"t\": \"12345678\"}", &f, 1));
    assert_string_equal(room, "1234567");
    mt_context_destroy(ctx);
    free(room);
}

/* F64 is rounded to floats. An element that is too large for a float is an error, an infinite one is not. */
static void doubles(void **state) {
    enum { N = 5000 };
    static double in[N];
    static float out[N];
    char header[128];
    size_t size, bytes = sizeof in;
    mt_safetensors *s;
    (void)state;
    for (int i = 0; i < N; i++) in[i] = (i - 2500) / 3.0;
    in[1] = (double)INFINITY;
    in[2] = (double)-INFINITY;
    in[3] = (double)NAN;
    in[4] = 3.4028235e38;
    in[5] = 1e-60;
    snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"F64\",\"shape\":[%d],\"data_offsets\":[0,%zu]}}", N, bytes);
    unsigned char *file = make_file(header, strlen(header), bytes, &size);
    memcpy(file + size - bytes, in, bytes);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, write_file(file, size), &s));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, mt_safetensors_at(s, 0), out));
    for (int i = 0; i < N; i++)
        if (!(out[i] == (float)in[i] || (i == 3 && isnan(out[i])))) fail_msg("%d: %g", i, (double)out[i]);
    mt_safetensors_close(s);
    memcpy(file + size - 8, &(double){-1e39}, 8);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, write_file(file, size), &s));
    REFUSED(ctx, MT_ERR_DATA, "/file: element 4999 of 'x' is -1e+39, too large for a float",
            mt_safetensors_read(ctx, mt_safetensors_at(s, 0), out));
    mt_safetensors_close(s);
    free(file);
}

/* The bytes of a file that the writer has written. The caller frees them. */
static unsigned char *written_file(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    unsigned char *bytes = (unsigned char *)malloc(1 << 20);
    assert_true(f && bytes);
    *size = fread(bytes, 1, 1 << 20, f);
    fclose(f);
    return bytes;
}

static mt_safetensors_writer *new_writer(void) {
    static const mt_setting about[] = {{"format", "pt"}, {"k\"\n", "v\xc3\xa9"}};
    mt_safetensors_writer *w;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_create(ctx, in_scratch("written"), about, 2, &w));
    return w;
}

/* A file has exactly the expected bytes, and the reader returns what was written. Before finish there is no file. */
static void writer(void **state) {
    static const char header[] =
        "{\"__metadata__\":{\"checksum\":\"................\",\"format\":\"pt\",\"k\\\"\\u000a\":\"v\xc3\xa9\"},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
        "\"a\xf0\x9f\x98\x80\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[24,32]},"
        "\"none\":{\"dtype\":\"BOOL\",\"shape\":[0],\"data_offsets\":[32,32]}}";
    const int64_t shape[] = {2, 3}, none[] = {0}, one = -5;
    const float x[6] = {1, -2, 3.5f, 4, 5, 6};
    float got[6];
    size_t size, text = sizeof header - 1;
    mt_safetensors_writer *w = new_writer();
    mt_safetensors *s;
    int has;
    (void)state;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, "b", "F32", 2, shape));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, "a\xf0\x9f\x98\x80", "I64", 0, NULL));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, "none", "BOOL", 1, none));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, x, 10)); /* in the middle of an element */
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, (const char *)x + 10, 14));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, &one, sizeof one));
    shell("test ! -e '%s' && test -e '%s'", in_scratch("written"), in_scratch("written.tmp"));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, w));
    REFUSED(ctx, MT_ERR_ARGUMENT, "written was finished before", mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    shell("test ! -e '%s'", in_scratch("written.tmp"));
    unsigned char *file = written_file(in_scratch("written"), &size);
    assert_int_equal(size, 8 + (text + 7) / 8 * 8 + 32);
    memset(file + MTI_CHECKSUM_AT, '.', MTI_CHECKSUM_DIGITS);
    assert_memory_equal(file + 8, header, text);
    assert_memory_equal(file + size - 32, x, sizeof x);
    free(file);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, in_scratch("written"), &s));
    ASSERT_STATUS(ctx, MT_SUCCESS, mti_safetensors_verify(ctx, s, &has));
    assert_true(has && mt_safetensors_count(s) == 3 && strcmp(mt_safetensors_metadata(s, "k\"\n"), "v\xc3\xa9") == 0);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, mt_safetensors_find(s, "b"), got));
    assert_memory_equal(got, x, sizeof x);
    mt_safetensors_close(s);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_create(ctx, in_scratch("written"), NULL, 0, &w));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, w)); /* no tensors; replaces the file */
    mt_safetensors_destroy(w);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, in_scratch("written"), &s));
    assert_int_equal(mt_safetensors_count(s), 0);
    mt_safetensors_close(s);
    remove(in_scratch("written"));
}

/* After each refusal, the writer works or says again what is wrong, and no file appears. */
static void writer_refuses(void **state) {
    const int64_t shape[] = {2, -1}, huge[] = {INT64_MAX / 8, 1}, odd[] = {3}, four[] = {4};
    const char data[16] = {0};
    mt_safetensors_writer *w = NULL;
    mt_setting no_value = {"k", NULL};
    char path[MT_PATH_MAX];
    (void)state;
    memset(path, 'a', sizeof path - 1);
    path[sizeof path - 1] = 0;
    REFUSED(ctx, MT_ERR_ARGUMENT, "a path of 1023 characters", mt_safetensors_create(ctx, path, NULL, 0, &w));
    REFUSED(ctx, MT_ERR_ARGUMENT, "path is NULL", mt_safetensors_create(ctx, NULL, NULL, 0, &w));
    REFUSED(ctx, MT_ERR_ARGUMENT, "metadata[0] has no value", mt_safetensors_create(ctx, "x", &no_value, 1, &w));
    assert_null(w);
    w = new_writer();
    REFUSED(ctx, MT_ERR_ARGUMENT, "'a' has dtype 'f32'", mt_safetensors_add(ctx, w, "a", "f32", 1, four));
    REFUSED(ctx, MT_ERR_ARGUMENT, "'a' has size -1 in dimension 1", mt_safetensors_add(ctx, w, "a", "F32", 2, shape));
    REFUSED(ctx, MT_ERR_ARGUMENT, "'a' has 9 dimensions", mt_safetensors_add(ctx, w, "a", "F32", 9, shape));
    REFUSED(ctx, MT_ERR_ARGUMENT, "shape of 'a' overflows", mt_safetensors_add(ctx, w, "a", "F32", 2, huge));
    REFUSED(ctx, MT_ERR_ARGUMENT, "'a' has 12 bits", mt_safetensors_add(ctx, w, "a", "F4", 1, odd));
    REFUSED(ctx, MT_ERR_ARGUMENT, "shape is NULL", mt_safetensors_add(ctx, w, "a", "F32", 1, NULL));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, "a", "F32", 1, four));
    REFUSED(ctx, MT_ERR_ARGUMENT, "17 bytes, but the tensors of|have 16 more", mt_safetensors_write(ctx, w, data, 17));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, data, 15));
    REFUSED(ctx, MT_ERR_ARGUMENT, "'b' comes after data", mt_safetensors_add(ctx, w, "b", "F32", 1, four));
    REFUSED(ctx, MT_ERR_ARGUMENT, "16 bytes, but 15 were written", mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    for (int i = 0; i < 3; i++) {
        w = new_writer();
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, i == 2 ? "\xff" : "a", "F32", 1, four));
        if (i < 2) ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, i ? "__metadata__" : "a", "F32", 1, four));
        REFUSED(ctx, MT_ERR_DATA, i < 2 ? "/written|given twice" : "/written: header|UTF-8",
                mt_safetensors_write(ctx, w, data, 16));
        ASSERT_STATUS(ctx, MT_ERR_DATA, mt_safetensors_write(ctx, w, data, 16));
        mt_safetensors_destroy(w);
    }
    ctx->error[0] = 0;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_create(ctx, "/nonexistent/x", NULL, 0, &w));
    REFUSED(ctx, MT_ERR_IO, "/nonexistent/x.tmp: cannot create it", mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    mt_safetensors_destroy(NULL);
    shell("test ! -e '%s' && test ! -e '%s'", in_scratch("written"), in_scratch("written.tmp"));
}

/* Writes half of the only tensor. */
static mt_safetensors_writer *half_written(const char *data) {
    const int64_t four = 4;
    mt_safetensors_writer *w = new_writer();
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, "a", "F32", 1, &four));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, data, 8));
    return w;
}

/* The file has the values that the finished writer has written. */
static void written_is(const char *data) {
    mt_safetensors *s;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, in_scratch("written"), &s));
    assert_memory_equal(mt_safetensors_find(s, "a")->data, data, 16);
    mt_safetensors_close(s);
}

/* Tells another process something, and waits for it. */
static void pass(int fd, char what) { assert_int_equal(write(fd, &what, 1), 1); }
static char await(int fd) {
    char what = 0;
    assert_int_equal(read(fd, &what, 1), 1);
    return what;
}

/* A second writer of a path, in this process or in another one, is refused until the first is done. What a killed
   writer has left is replaced, and so is a link. */
static void two_writers(void **state) {
    static const char mine[17] = "0123456789abcdef", other[17] = "ABCDEFGHIJKLMNOP";
    const int64_t four = 4;
    int ready[2], go[2];
    (void)state;
    mt_safetensors_writer *first = half_written(mine), *second = new_writer();
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, second, "a", "F32", 1, &four));
    REFUSED(ctx, MT_ERR_IO, "written.tmp: another writer writes it", mt_safetensors_write(ctx, second, other, 8));
    REFUSED(ctx, MT_ERR_ARGUMENT, "16 bytes, but 0 were written", mt_safetensors_finish(ctx, second));
    mt_safetensors_destroy(second);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, first, mine + 8, 8));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, first));
    written_is(mine);
    second = half_written(other); /* the first one is done, but not destroyed */
    mt_safetensors_destroy(first);
    shell("test -e '%s'", in_scratch("written.tmp"));
    assert_true(pipe(ready) == 0 && pipe(go) == 0);
    pid_t child = fork();
    if (child == 0) {
        mt_safetensors_writer *third = new_writer();
        close(second->file.fd); /* the parent's, which has the lock */
        mt_safetensors_add(ctx, third, "a", "F32", 1, &four);
        pass(ready[1], mt_safetensors_write(ctx, third, mine, 8) == MT_ERR_IO ? 'r' : 'w');
        mt_safetensors_destroy(third);
        await(go[0]);
        half_written(mine);
        pass(ready[1], 'h');
        await(go[0]); /* until it is killed */
        _exit(0);
    }
    assert_int_equal(await(ready[0]), 'r');
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, second, other + 8, 8));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, second));
    mt_safetensors_destroy(second);
    written_is(other);
    pass(go[1], 'g');
    assert_int_equal(await(ready[0]), 'h');
    written_is(other);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    shell("test -e '%s'", in_scratch("written.tmp"));
    written_is(other);
    first = half_written(mine);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, first, mine + 8, 8));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, first));
    mt_safetensors_destroy(first);
    written_is(mine);
    shell("echo precious > '%s' && ln -s '%s' '%s'", in_scratch("target"), in_scratch("target"),
          in_scratch("written.tmp"));
    mt_safetensors_destroy(half_written(other));
    shell("grep -q precious '%s' && ln '%s' '%s'", in_scratch("target"), in_scratch("target"),
          in_scratch("written.tmp"));
    mt_safetensors_destroy(half_written(other)); /* in place of another name of the file */
    shell("grep -q precious '%s' && test ! -e '%s'", in_scratch("target"), in_scratch("written.tmp"));
    forget("target");
    forget("written");
    for (int i = 0; i < 2; i++) close(ready[i]), close(go[i]);
}

/* A file never takes the place of what is no file, or of a link to it. A link to a file is replaced. */
static void places_that_are_no_files(void **state) {
    static const char *const places[] = {"mkfifo written", "mkdir written", "ln -s /dev/null written",
                                         "ln -s /dev/stdout written", "mkfifo pipe && ln -s pipe written"};
    static const char data[17] = "0123456789abcdef";
    const int64_t four = 4;
    (void)state;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        mt_safetensors_writer *w = new_writer();
        shell("cd '%s' && %s", scratch, places[i]);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, "a", "F32", 1, &four));
        REFUSED(ctx, MT_ERR_IO, "/written: is not a regular file", mt_safetensors_write(ctx, w, data, 16));
        mt_safetensors_destroy(w);
        shell("cd '%s' && test ! -e written.tmp && rm -r written && rm -f pipe", scratch);
    }
    shell("cd '%s' && echo precious >target && ln -s target written", scratch);
    mt_safetensors_writer *w = half_written(data);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, data + 8, 8));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    shell("cd '%s' && grep -q precious target && test ! -L written && rm target written", scratch);
}

/* Without locks, as on some file systems, a writer whose file another one has replaced does not publish it. */
static void replaced_while_written(void **state) {
    static const char data[17] = "0123456789abcdef";
    mt_safetensors_writer *w = half_written(data);
    (void)state;
    shell("echo unfinished > '%s' && mv '%s' '%s'", in_scratch("b"), in_scratch("b"), in_scratch("written.tmp"));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, data + 8, 8));
    REFUSED(ctx, MT_ERR_IO, "written.tmp: another writer has replaced", mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    shell("test ! -e '%s' && grep -q unfinished '%s'", in_scratch("written"), in_scratch("written.tmp"));
    forget("written.tmp");
}

#define T(name, dtype, shape, offsets)                                                                                 \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

/* Headers with one wrong number, name or bracket. */
static void bad_headers(void **state) {
    (void)state;
    expect("", 0, "'{'");
    expect(" {}", 0, "'{'");
    expect("[]", 0, "'{'");
    expect("{", 0, "string is missing");
    expect("{}}", 0, "follows the end");
    expect("{} x", 0, "follows the end");
    expect("{\"a\"}", 0, "colon");
    expect("{\"a\":1}", 0, "not an object");
    expect("{" T("a", "F32", "[1]", "[0,4]") ",}", 4, "string is missing");
    expect("{" T("a", "F32", "[1]", "[0,4]") " " T("b", "F32", "[1]", "[4,8]") "}", 8, "comma");
    expect("{" T("a", "F32", "[1,]", "[0,4]") "}", 4, "whole number is missing");
    expect("{" T("a", "F32", "[-1]", "[0,4]") "}", 4, "whole number is missing");
    expect("{" T("a", "F32", "[1.0]", "[0,4]") "}", 4, "not whole");
    expect("{" T("a", "F32", "[1e0]", "[0,4]") "}", 4, "not whole");
    expect("{" T("a", "F32", "[01]", "[0,4]") "}", 4, "not whole");
    expect("{" T("a", "F32", "[9223372036854775808]", "[0,4]") "}", 4, "too large");
    expect("{" T("a", "F32", "[18446744073709551617]", "[0,4]") "}", 4, "too large");
    expect("{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "8 dimensions");
    expect("{" T("a", "F32", "1", "[0,4]") "}", 4, "not an array");
    expect("{" T("a", "F32", "[1]", "[0]") "}", 4, "not two numbers");
    expect("{" T("a", "F32", "[1]", "[0,4,4]") "}", 4, "not two numbers");
    expect("{" T("a", "F32", "[1]", "null") "}", 4, "not an array");
    expect("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "no dtype, shape or data_offsets");
    expect("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
           "dtype is given twice");
    expect("{" T("a", "F32", "[1]", "[0,4]") "," T("\\u0061", "F32", "[1]", "[0,4]") "}", 4, "'a' is given twice");
    expect("{" T("a", "F31", "[1]", "[0,4]") "}", 4, "F31");
    expect("{" T("a", "f32", "[1]", "[0,4]") "}", 4, "f32");
    expect("{\"a\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "string is missing");
    expect("{\"__metadata__\":{\"a\":1}}", 0, "string is missing");
    expect("{\"__metadata__\":[]}", 0, "not an object");
    expect("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice");
    expect("{\"__metadata__\":{\"a\":\"\",\"b\":\"\",\"a\":\"\"}}", 0, "'a' is given twice");
}

static void bad_strings(void **state) {
    (void)state;
    expect("{\"\\u0000\":1}", 0, "NUL");
    expect("{\"\\x\":1}", 0, "no such escape");
    expect("{\"\\u12g4\":1}", 0, "hexadecimal");
    expect("{\"\\ud800\":1}", 0, "surrogate");
    expect("{\"\\udc00\":1}", 0, "surrogate");
    expect("{\"\\ud800\\u0041\":1}", 0, "surrogate");
    expect("{\"a\nb\":1}", 0, "control");
    expect("{\"abc", 0, "does not end");
    expect("{\"abc\\", 0, "escape");
    expect("{\"abc\\u12", 0, "hexadecimal");
    expect("{\"\x80\":1}", 0, "UTF-8");
    expect("{\"\xc0\xaf\":1}", 0, "UTF-8");
    expect("{\"\xe0\x80\xaf\":1}", 0, "UTF-8");
    expect("{\"\xed\xa0\x80\":1}", 0, "UTF-8");
    expect("{\"\xf4\x90\x80\x80\":1}", 0, "UTF-8");
    expect("{\"\xf8\x88\x80\x80\x80\":1}", 0, "UTF-8");
    expect("{\"\xe2\x82", 0, "UTF-8");
    expect("{\"\xe2\x28\xa1\":1}", 0, "UTF-8");
}

/* Shapes, offsets and the size of the data that contradict each other. */
static void bad_data(void **state) {
    char deep[512];
    (void)state;
    expect("{" T("a", "F32", "[2]", "[0,4]") "}", 4, "64 bits");
    expect("{" T("a", "F32", "[1]", "[0,8]") "}", 8, "32 bits");
    expect("{" T("a", "F32", "[1]", "[4,0]") "}", 4, "[4, 0]");
    expect("{" T("a", "F32", "[1]", "[0,4]") "}", 3, "truncated");
    expect("{" T("a", "F32", "[1]", "[0,4]") "}", 5, "4 bytes, its data 5");
    expect("{}", 1, "0 bytes, its data 1");
    expect("{" T("a", "F32", "[1]", "[4,8]") "}", 8, "begins at byte 4");
    expect("{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[8,12]") "}", 12, "'b' begins at byte 8");
    expect("{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[2,6]") "}", 6, "'b' begins at byte 2");
    expect("{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[0,4]") "}", 4, "begins at byte 0");
    expect("{" T("a", "F32", "[1]", "[0,4]") "," T("a", "F32", "[1]", "[4,8]") "}", 8, "'a' is given twice");
    expect("{" T("a", "F4", "[3]", "[0,1]") "}", 1, "12 bits");
    expect("{" T("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", 0, "overflows");
    expect("{" T("a", "F32", "[4611686018427387904,4]", "[0,0]") "}", 0, "overflows");
    expect("{" T("a", "U8", "[9223372036854775807,2,0]", "[0,0]") "}", 0, "overflows");
    expect("{" T("a", "F32", "[1]", "[9223372036854775804,9223372036854775807]") "}", 4, "data_offsets");
    for (int depth = 61; depth <= 63; depth++) { /* two more brackets surround them */
        snprintf(deep, sizeof deep, "{\"a\":{\"x\":%.*s%.*s,\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                 depth, "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", depth,
                 "]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]");
        expect(deep, 0, depth <= 62 ? NULL : "nested too deeply");
    }
}

/* Files of another format, and wrong lengths of the header. */
static void bad_files(void **state) {
    unsigned char lies[16] = {0};
    uint64_t lengths[] = {9, 100000001, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    mt_safetensors *s;
    (void)state;
    for (size_t n = 0; n < 8; n++) {
        const char *file = write_file(lies, n);
        REFUSED(ctx, MT_ERR_DATA, "/file|not a safetensors file", mt_safetensors_open(ctx, file, &s));
        assert_null(s);
    }
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memcpy(lies, &lengths[i], 8);
        const char *file = write_file(lies, sizeof lies);
        REFUSED(ctx, MT_ERR_DATA, "/file|header of", mt_safetensors_open(ctx, file, &s));
    }
    REFUSED(ctx, MT_ERR_IO, "/absent|No such file", mt_safetensors_open(ctx, in_scratch("absent"), &s));
    REFUSED(ctx, MT_ERR_IO, "not a regular file", mt_safetensors_open(ctx, scratch, &s));
    REFUSED(ctx, MT_ERR_ARGUMENT, "path is NULL", mt_safetensors_open(ctx, NULL, &s));
    REFUSED(ctx, MT_ERR_ARGUMENT, "out is NULL", mt_safetensors_open(ctx, scratch, NULL));
    char too_long[MT_PATH_MAX + 2];
    memset(too_long, 'a', sizeof too_long);
    too_long[sizeof too_long - 1] = 0;
    REFUSED(ctx, MT_ERR_ARGUMENT, "characters", mt_safetensors_open(ctx, too_long, &s));
}

/* Numbers of config.json are read independently of the locale, and exact to the last bit of a float. */
static void numbers(void **state) {
    static const char *const good[] = {"0",
                                       "-0",
                                       "1",
                                       "-1.5",
                                       "1e-05",
                                       "1E+2",
                                       "0.1",
                                       "1e-50",
                                       "123456789012345678901234567890",
                                       "3.4028235e38",
                                       "0.000012345678",
                                       "1e400",
                                       "9007199254740993",
                                       "16777217.0"};
    static const char *const bad[] = {"",   "-",   "+1",   ".5",   "1.",  "1e",      "1e+",
                                      "01", "-01", "0x10", "1.e3", "nan", "Infinity"};
    uint64_t seed = 9;
    char text[64];
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        mti_json j = mti_json_begin(good[i], strlen(good[i]));
        float got = (float)mti_json_number(&j), want = strtof(good[i], NULL);
        mti_json_end(&j);
        if (j.error || got != want) fail_msg("%s: %.9g, must be %.9g", good[i], (double)got, (double)want);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        mti_json j = mti_json_begin(bad[i], strlen(bad[i]));
        mti_json_number(&j);
        mti_json_end(&j);
        if (!j.error) fail_msg("'%s' was taken for a number", bad[i]);
    }
    for (int i = 0; i < 100000; i++) { /* reading returns what was written */
        uint32_t bits = (uint32_t)test_random(&seed);
        float want = mt_f32_from_bits(bits), got;
        if (!isfinite(want) || fabsf(want) < 1e-37f) continue;
        mti_number_text((double)want, 8, text);
        mti_json j = mti_json_begin(text, strlen(text));
        got = (float)mti_json_number(&j);
        if (got != want) fail_msg("%s: %.9g, must be %.9g", text, (double)got, (double)want);
    }
}

/* Writes x as text, and reads it as a field of metadata and of JSON. */
static void double_reads_back(double x) {
    char text[MT_FIELD_TEXT_MAX], json[64];
    double y = 77, z = 77;
    mt_field f = {.name = "a", .kind = MT_FIELD_F64, .value = &x};
    mt_field_text(&f, text);
    if (!mti_field_parse(&f, text, &y) || memcmp(&x, &y, sizeof x) != 0) fail_msg("%s is read as %.17g", text, y);
    snprintf(json, sizeof json, "{\"a\": %s}", text);
    f.value = &z;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_parse(ctx, "json", json, &f, 1));
    if (memcmp(&x, &z, sizeof x) != 0) fail_msg("%s is read from JSON as %.17g", text, z);
}

static void float_reads_back(float x) {
    char text[MT_FIELD_TEXT_MAX];
    float y = 77;
    mt_field f = {.name = "a", .kind = MT_FIELD_F32, .value = &x};
    mt_field_text(&f, text);
    if (!mti_field_parse(&f, text, &y) || memcmp(&x, &y, sizeof x) != 0)
        fail_msg("%s is read as %.9g", text, (double)y);
}

/* Every finite double and float reads back with the same bits, also subnormal ones and -0, in every locale. */
static void doubles_and_floats_read_back(void **state) {
    static const double edges[] = {0.0,
                                   -0.0,
                                   5e-324,
                                   -5e-324,
                                   2.2250738585072009e-308,
                                   DBL_MIN,
                                   1.5e-293,
                                   1e-292,
                                   1e-300,
                                   -1e-305,
                                   DBL_MAX,
                                   -DBL_MAX,
                                   0.1,
                                   1e23,
                                   9007199254740993.0,
                                   3.0000000000000004,
                                   DBL_EPSILON};
    uint64_t seed = 3;
    (void)state;
    for (int comma = 0; comma < 2; comma++) {
        if (comma && !test_comma_locale()) break;
        for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) double_reads_back(edges[i]);
        for (int i = 0; i < 60000; i++) {
            uint64_t bits = test_random(&seed) << 32 ^ test_random(&seed);
            double x;
            if (i % 3 == 0) bits &= ~((uint64_t)0x7ff << 52); /* subnormal */
            memcpy(&x, &bits, sizeof x);
            if (isfinite(x)) double_reads_back(x);
            if (isfinite(mt_f32_from_bits((uint32_t)bits))) float_reads_back(mt_f32_from_bits((uint32_t)bits));
        }
        setlocale(LC_NUMERIC, "C");
    }
}

/* Numbers with more digits than a double, and the smallest that are not 0, are read as strtod reads them. */
static void long_numbers(void **state) {
    char text[2000], zeros[900];
    (void)state;
    memset(zeros, '0', sizeof zeros);
    for (int i = 0; i < 6; i++) {
        static const char *const forms[] = {
            "1%.*s1", "1.%.*s1", "0.%.*s1", "0.%.*s1e850", "9007199254740993%.*s1e-850", "9007199254740993.%.*s1"};
        print_to(text, sizeof text, forms[i], i == 4 ? 849 : 250 + 100 * i, zeros);
        mti_json j = mti_json_begin(text, strlen(text));
        double x = mti_json_number(&j);
        assert_null(j.error);
        if (x != strtod(text, NULL)) fail_msg("%s: %.17g", text, x);
    }
}

/* Whole numbers at the ends of their ranges read back; one beyond the end is refused. */
static void whole_numbers_read_back(void **state) {
    static const struct {
        mt_field_kind kind;
        const char *text;
        int metadata, json; /* 1: is read; 0: is refused */
    } cases[] = {{MT_FIELD_I64, "-9223372036854775808", 1, 0},
                 {MT_FIELD_I64, "9223372036854775807", 1, 1},
                 {MT_FIELD_I64, "9223372036854775808", 0, 0},
                 {MT_FIELD_I64, "-9223372036854775809", 0, 0},
                 {MT_FIELD_I64, "9007199254740993", 1, 1},
                 {MT_FIELD_U64, "18446744073709551615", 1, 1},
                 {MT_FIELD_U64, "18446744073709551616", 0, 0},
                 {MT_FIELD_U64, "-1", 0, 0},
                 {MT_FIELD_INT, "-2147483648", 1, 0},
                 {MT_FIELD_INT, "2147483647", 1, 1},
                 {MT_FIELD_INT, "2147483648", 0, 0},
                 {MT_FIELD_INT, "-2147483649", 0, 0},
                 {MT_FIELD_BOOL, "1", 1, 0},
                 {MT_FIELD_I64, "1e3", 0, 0},
                 {MT_FIELD_F64, "nan", 0, 0},
                 {MT_FIELD_F64, "inf", 0, 0},
                 {MT_FIELD_F64, "1e400", 0, 0},
                 {MT_FIELD_F32, "3.5e38", 0, 0}};
    char json[64], again[MT_FIELD_TEXT_MAX];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t value = 0;
        mt_field f = {.name = "a", .kind = cases[i].kind, .value = &value};
        if (mti_field_parse(&f, cases[i].text, &value) != cases[i].metadata) fail_msg("%s", cases[i].text);
        if (cases[i].metadata) mt_field_text(&f, again), assert_string_equal(again, cases[i].text);
        snprintf(json, sizeof json, "{\"a\": %s}", cases[i].text);
        if ((mt_json_parse(ctx, "json", json, &f, 1) == MT_SUCCESS) != cases[i].json) fail_msg("%s", json);
        if (cases[i].json) mt_field_text(&f, again), assert_string_equal(again, cases[i].text);
    }
}

/* A file that is truncated after it was opened: reads before its new end succeed, others are errors. */
static void truncated_while_open(void **state) {
    enum { BYTES = 1 << 16 };
    static const char header[] = "{\"half\":{\"dtype\":\"BF16\",\"shape\":[32768],\"data_offsets\":[0,65536]},"
                                 "\"none\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[131072,131072]},"
                                 "\"whole\":{\"dtype\":\"F32\",\"shape\":[16384],\"data_offsets\":[65536,131072]}}";
    static float out[BYTES / 2];
    size_t size;
    char words[128];
    int has;
    mt_safetensors *s;
    unsigned char *file = make_file(header, sizeof header - 1, 2 * BYTES, &size);
    (void)state;
    for (size_t left = size; left<2 * size; left = left> 8192 ? left - 8192 : left > 0 ? 0 : 2 * size) {
        const char *path = write_file(file, size);
        size_t half = size - 2 * BYTES, whole = size - BYTES;
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_open(ctx, path, &s));
        assert_int_equal(truncate(path, (off_t)left), 0);
        snprintf(words, sizeof words, "/file|wanted 65536 bytes at byte %zu|got %zu:|truncated", whole,
                 left > whole ? left - whole : 0);
        mt_status status = mt_safetensors_read(ctx, mt_safetensors_find(s, "whole"), out);
        if (left == size) ASSERT_STATUS(ctx, MT_SUCCESS, status);
        else REFUSED(ctx, MT_ERR_IO, words, status);
        snprintf(words, sizeof words, "wanted 65536 bytes at byte %zu|got %zu:", half, left > half ? left - half : 0);
        status = mt_safetensors_read(ctx, mt_safetensors_find(s, "half"), out);
        if (left >= whole) ASSERT_STATUS(ctx, MT_SUCCESS, status);
        else REFUSED(ctx, MT_ERR_IO, words, status);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, mt_safetensors_find(s, "none"), out));
        mt_safetensors_close(s);
    }
    memcpy(file + 8, MTI_CHECKSUM_BEFORE, sizeof MTI_CHECKSUM_BEFORE - 1); /* the checksum of the original file */
    const char *path = write_file(file, size);
    mt_safetensors sealed = {.map = {.fd = open(path, O_RDONLY), .bytes = size}, .path = "sealed"};
    assert_int_equal(truncate(path, (off_t)size / 2), 0);
    REFUSED(ctx, MT_ERR_IO, "wanted 16384 bytes at byte|truncated", mti_safetensors_verify(ctx, &sealed, &has));
    close(sealed.map.fd);
    free(file);
}

/* The same with a locale in which printf writes a decimal comma. */
static void numbers_with_a_decimal_comma(void **state) {
    char text[64];
    mti_json j;
    (void)state;
    if (!test_comma_locale()) skip();
    snprintf(text, sizeof text, "%g", 5.525);
    mt_decimal_point(text);
    assert_string_equal(text, "5.525");
    assert_string_equal(mt_f32_digits(-0.0625f, text), "-0.0625");
    assert_string_equal(mt_f32_digits(7.0f, text), "7");
    assert_string_equal(mt_f32_digits(INFINITY, text), "inf");
    mti_number_text((double)-5.525f, 8, text);
    j = mti_json_begin(text, strlen(text));
    assert_true((float)mti_json_number(&j) == -5.525f);
    mti_json_end(&j);
    assert_null(j.error);
    setlocale(LC_NUMERIC, "C");
    assert_string_equal(text, "-5.52500010e+00");
}

/* Accepts the checksum of another program (Python wrote tests/fuzz/seeds/run.safetensors), and detects one and two
   flipped bits. */
static void checksums(void **state) {
    unsigned char bytes[2048];
    mt_safetensors s;
    int has;
    FILE *f = fopen("tests/fuzz/seeds/run.safetensors", "rb");
    (void)state;
    assert_non_null(f);
    memset(&s, 0, sizeof s);
    strcpy(s.path, "run.safetensors");
    s.map.fd = -1;
    s.map.data = bytes;
    s.map.bytes = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    ASSERT_STATUS(ctx, MT_SUCCESS, mti_safetensors_verify(ctx, &s, &has));
    assert_true(has);
    for (size_t a = 64 * 8; a < 8 * (s.map.bytes - 7); a += 61)
        for (size_t b = a; b <= a + 640 && b < 8 * s.map.bytes; b += 64) { /* b == a: one bit */
            bytes[a / 8] ^= (unsigned char)(1u << a % 8);
            if (b != a) bytes[b / 8] ^= (unsigned char)(1u << b % 8);
            mt_status status = mti_safetensors_verify(ctx, &s, &has);
            if (status != MT_ERR_DATA) fail_msg("bits %zu and %zu: %s", a, b, mt_status_name(status));
            bytes[a / 8] ^= (unsigned char)(1u << a % 8);
            if (b != a) bytes[b / 8] ^= (unsigned char)(1u << b % 8);
        }
    for (size_t a = 64 + 7; a + 8 < s.map.bytes; a += 8) { /* bit 63 of neighbouring words */
        bytes[a] ^= 128;
        bytes[a + 8] ^= 128;
        assert_int_equal(mti_safetensors_verify(ctx, &s, &has), MT_ERR_DATA);
        bytes[a] ^= 128;
        bytes[a + 8] ^= 128;
    }
}

/* ---- fuzzing ----------------------------------------------------------------------------------------------------- */

static const char *const seeds[] = {"empty.safetensors", "one.safetensors",  "types.safetensors", "escapes.safetensors",
                                    "deep.safetensors",  "ours.safetensors", "config.json",       "index.json",
                                    "long_name.json",    "run.safetensors",  "modules.json",      "pooling.json"};
#define SEEDS (sizeof seeds / sizeof *seeds)

static size_t read_seed(const char *name, unsigned char *bytes, size_t room) {
    char path[96];
    snprintf(path, sizeof path, "tests/fuzz/seeds/%s", name);
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s is missing; run from the checkout's root", path);
    size_t n = fread(bytes, 1, room, f);
    assert_true(n < room);
    fclose(f);
    return n;
}

/* One mutation: a bit, a byte, a piece removed, doubled or copied from elsewhere, or a number at a limit. */
static size_t mutate(unsigned char *b, size_t n, size_t room, uint64_t *seed) {
    static const char *const words[] = {"9223372036854775807",
                                        "18446744073709551615",
                                        "0",
                                        "-1",
                                        "[",
                                        "]",
                                        "{",
                                        "}",
                                        "\"",
                                        ",",
                                        ":",
                                        "\\u",
                                        "\\ud800",
                                        "null",
                                        "\xff",
                                        "1e999",
                                        "\"dtype\":\"F64\""};
    size_t at = test_below(seed, n + 1), length;
    const char *word;
    switch (test_below(seed, 6)) {
    case 0:
        if (at < n) b[at] ^= (unsigned char)(1u << test_below(seed, 8));
        return n;
    case 1:
        if (at < n) b[at] = (unsigned char)test_random(seed);
        return n;
    case 2:
        length = test_below(seed, 16) < n - at ? test_below(seed, 16) % (n - at + 1) : n - at;
        memmove(b + at, b + at + length, n - at - length);
        return n - length;
    case 3: /* a piece is doubled */
        length = test_below(seed, 64) % (n - at + 1);
        if (n + length > room) return n;
        memmove(b + at + length, b + at, n - at);
        return n + length;
    case 4: /* adapt the length of the header, so that the rest is read */
        if (n >= 8) memcpy(b, &(uint64_t){n - 8 - test_below(seed, 17) % (n - 7)}, 8);
        return n;
    default:
        word = words[test_below(seed, sizeof words / sizeof *words)];
        length = strlen(word);
        if (n + length > room) return n;
        memmove(b + at + length, b + at, n - at);
        memcpy(b + at, word, length);
        return n + length;
    }
}

static void seeds_are_read(void **state) {
    static const int takes[SEEDS] = {1, 1, 1, 1, 1, 1, 2, 0, 0, 9, 0, 0};
    unsigned char bytes[4096];
    (void)state;
    for (size_t i = 0; i < SEEDS; i++) {
        size_t n = read_seed(seeds[i], bytes, sizeof bytes);
        int took = readers_all(ctx, bytes, n);
        if (took != takes[i]) fail_msg("%s: taken by %d, must be by %d", seeds[i], took, takes[i]);
    }
}

static void mutated_seeds(void **state) {
    mt_context_desc small = {.arena_bytes = 64, .logger = {test_quiet, NULL}}; /* its messages have names at random */
    mt_context *quiet;
    int accepted = 0, cases = SANITIZED ? 20000 : 200000;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, &small, &quiet));
    for (int i = 0; i < cases; i++) {
        uint64_t seed = (uint64_t)i;
        unsigned char bytes[4096];
        size_t n = read_seed(seeds[i % (int)SEEDS], bytes, sizeof bytes), changes = 1 + test_below(&seed, 4);
        while (changes-- > 0) n = mutate(bytes, n, sizeof bytes, &seed);
        /* at an odd address; a sanitizer detects reads beyond the end */
        unsigned char *file = (unsigned char *)malloc(n + 1);
        assert_non_null(file);
        memcpy(file + 1, bytes, n);
        accepted += readers_all(quiet, file + 1, n) != 0;
        free(file);
    }
    mt_context_destroy(quiet);
    if (accepted < cases / 50 || accepted > cases / 2)
        fail_msg("%d of %d were taken: these mutations test little", accepted, cases);
}

static int open_all(void **state) {
    mt_context_desc small = {.arena_bytes = 64};
    (void)state;
    return scratch_open("test_safetensors") || mt_context_create(NULL, &small, &ctx) != MT_SUCCESS;
}

static int close_all(void **state) {
    (void)state;
    forget("file");
    mt_context_destroy(ctx);
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_of_the_size_of_its_room),
        cmocka_unit_test(good_files),
        cmocka_unit_test(long_tensors),
        cmocka_unit_test(doubles),
        cmocka_unit_test(writer),
        cmocka_unit_test(writer_refuses),
        cmocka_unit_test(two_writers),
        cmocka_unit_test(places_that_are_no_files),
        cmocka_unit_test(replaced_while_written),
        cmocka_unit_test(bad_headers),
        cmocka_unit_test(bad_strings),
        cmocka_unit_test(bad_data),
        cmocka_unit_test(bad_files),
        cmocka_unit_test(numbers),
        cmocka_unit_test(doubles_and_floats_read_back),
        cmocka_unit_test(long_numbers),
        cmocka_unit_test(whole_numbers_read_back),
        cmocka_unit_test(checksums),
        cmocka_unit_test(truncated_while_open),
        cmocka_unit_test(numbers_with_a_decimal_comma),
        cmocka_unit_test(seeds_are_read),
        cmocka_unit_test(mutated_seeds),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
