/* ---- named values in files --------------------------------------------------------------------------------------- */

#pragma once
#include "fields.h"
#include "safetensors.c"

/* Writes a number in scientific notation with `digits` digits after the decimal point, which is a point in every
   locale. */
static void mti_number_text(double x, int digits, char *text) {
    snprintf(text, MT_FIELD_TEXT_MAX, "%.*e", digits, x);
    if (strchr(text, 'e')) mt_decimal_point(text); /* no e: x is not finite */
}

MT_API void mt_field_text(const mt_field *field, char text[MT_FIELD_TEXT_MAX]) {
    int64_t i = 0;
    double d = 0;
    float x = 0;
    int n = 0;
    if (!text) return;
    text[0] = 0;
    if (!field || !field->value) return;
    switch (field->kind) {
    case MT_FIELD_F32:
        memcpy(&x, field->value, sizeof x);
        mti_number_text((double)x, 8, text);
        return;
    case MT_FIELD_F64:
        memcpy(&d, field->value, sizeof d);
        mti_number_text(d, 16, text);
        return;
    case MT_FIELD_INT:
    case MT_FIELD_BOOL:
        memcpy(&n, field->value, sizeof n);
        snprintf(text, MT_FIELD_TEXT_MAX, "%d", n);
        return;
    case MT_FIELD_I64:
    case MT_FIELD_U64:
        memcpy(&i, field->value, sizeof i);
        if (field->kind == MT_FIELD_U64) snprintf(text, MT_FIELD_TEXT_MAX, "%llu", (unsigned long long)i);
        else snprintf(text, MT_FIELD_TEXT_MAX, "%lld", (long long)i);
        return;
    case MT_FIELD_TEXT: return; /* may be longer than text; callers use the value itself */
    }
}

#define MTI_FIELD_WORDS "MT_FIELD_I64 MT_FIELD_U64 MT_FIELD_INT MT_FIELD_F32 MT_FIELD_F64 MT_FIELD_BOOL MT_FIELD_TEXT"

/* Checks that every field has a name, a value and a kind, and a text a size. */
static mt_status mti_fields_check(mt_context *ctx, const char *function, const mt_field *fields, int count) {
    int i;
    for (i = 0; i < count; i++) {
        const mt_field *f = &fields[i];
        if (!f->name || !f->name[0]) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: fields[%d] has no name", function, i);
        if (!f->value) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s': value is NULL", function, f->name);
        MT_TRY(mt_check_enum(ctx, function, f->name, "kind", (int)f->kind, MTI_FIELD_WORDS));
        if (f->kind == MT_FIELD_TEXT && f->bytes == 0)
            return mt_check_integer(ctx, function, f->name, "bytes", 0, 1, INT64_MAX);
    }
    return MT_SUCCESS;
}

/* Writes a number to `value`, as a float or a double. Returns 0, and writes 0, when it is not in the range of the
   field's kind. */
static int mti_field_store_number(const mt_field *f, double number, void *value) {
    double limit = f->kind == MT_FIELD_F32 ? (double)FLT_MAX : DBL_MAX;
    int fits = number >= -limit && number <= limit;
    float x = f->kind == MT_FIELD_F32 && fits ? (float)number : 0.0f;
    if (!fits) number = 0;
    if (f->kind == MT_FIELD_F32) memcpy(value, &x, sizeof x);
    else memcpy(value, &number, sizeof number);
    return fits;
}

/* Writes a whole number, given as 64 bits, to `value`. Returns 0 when an int cannot hold it. */
static int mti_field_store_whole(const mt_field *f, uint64_t whole, void *value) {
    int n = (int)(int64_t)whole;
    if (f->kind == MT_FIELD_INT || f->kind == MT_FIELD_BOOL) memcpy(value, &n, sizeof n);
    else memcpy(value, &whole, sizeof whole);
    return (f->kind != MT_FIELD_INT && f->kind != MT_FIELD_BOOL) || n == (int64_t)whole;
}

/* Parses the text of a value and writes it to `value`. Returns 0 when it is not a value of the field's kind; `value`
   may then have changed. */
static int mti_field_parse(const mt_field *f, const char *text, void *value) {
    int negative = f->kind != MT_FIELD_U64 && *text == '-';
    uint64_t whole, most;
    if (f->kind == MT_FIELD_TEXT) {
        if (strlen(text) >= f->bytes) return 0;
        memcpy(value, text, strlen(text) + 1);
        return 1;
    }
    if (f->kind == MT_FIELD_F32 || f->kind == MT_FIELD_F64) {
        mti_json j = mti_json_begin(text, strlen(text));
        int fits = mti_field_store_number(f, mti_json_number(&j), value);
        mti_json_end(&j);
        return !j.error && fits;
    }
    most = f->kind == MT_FIELD_U64 ? UINT64_MAX : (uint64_t)INT64_MAX + (uint64_t)negative; /* -2^63, but not 2^63 */
    if (!mt_parse_whole(text + negative, most, &whole)) return 0;
    return mti_field_store_whole(f, negative ? 0 - whole : whole, value);
}

static int mti_field_in_range(const mt_field *f, const void *value) {
    int64_t x = 0, high = f->kind == MT_FIELD_BOOL ? 1 : f->high;
    int n;
    if (f->kind == MT_FIELD_I64) memcpy(&x, value, sizeof x);
    else if (f->kind == MT_FIELD_INT || f->kind == MT_FIELD_BOOL) {
        memcpy(&n, value, sizeof n);
        x = n;
    } else return 1;
    return (f->low == 0 && high == 0) || (x >= f->low && x <= high);
}

/* Returns 1 when the value of a field can be read again after it is written. */
static int mti_field_is_valid(const mt_field *f) {
    double d = 0;
    float x = 0;
    if (f->kind == MT_FIELD_TEXT) return memchr(f->value, 0, f->bytes) != NULL;
    if (f->kind == MT_FIELD_F32) memcpy(&x, f->value, sizeof x);
    if (f->kind == MT_FIELD_F64) memcpy(&d, f->value, sizeof d);
    return x >= -FLT_MAX && x <= FLT_MAX && d >= -DBL_MAX && d <= DBL_MAX && mti_field_in_range(f, f->value);
}

#define MTI_WANTED_MAX 80

/* Writes what the value of a field must be, for an error message. */
static void mti_field_wanted(const mt_field *f, char wanted[MTI_WANTED_MAX]) {
    int64_t low = f->low, high = f->high;
    if (low == 0 && high == 0) {
        low = f->kind == MT_FIELD_INT ? INT32_MIN : INT64_MIN;
        high = f->kind == MT_FIELD_INT ? INT32_MAX : INT64_MAX;
    }
    snprintf(wanted, MTI_WANTED_MAX, "a finite number");
    if (f->kind == MT_FIELD_U64)
        snprintf(wanted, MTI_WANTED_MAX, "a whole number from 0 to %llu", (unsigned long long)UINT64_MAX);
    else if (f->kind == MT_FIELD_TEXT) snprintf(wanted, MTI_WANTED_MAX, "a text of at most %zu bytes", f->bytes - 1);
    else if (f->kind == MT_FIELD_BOOL) snprintf(wanted, MTI_WANTED_MAX, "0 or 1");
    else if (f->kind == MT_FIELD_I64 || f->kind == MT_FIELD_INT)
        snprintf(wanted, MTI_WANTED_MAX, "a whole number from %lld to %lld", (long long)low, (long long)high);
}

MT_API mt_status mt_safetensors_refuse(mt_context *ctx, const mt_safetensors *file, const char *name,
                                       const char *wanted) {
    const char *value;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!file || !name || !wanted)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_refuse: %s is NULL",
                       !file   ? "file"
                       : !name ? "name"
                               : "wanted");
    value = mt_safetensors_metadata(file, name);
    if (!value) return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has no %s", file->path, name);
    return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has %s '%.40s', must be %s", file->path, name, value, wanted);
}

/* Returns the error for a value that is not of the field's kind or range. */
static mt_status mti_field_refuse(mt_context *ctx, const mt_safetensors *file, const mt_field *f) {
    char wanted[MTI_WANTED_MAX];
    mti_field_wanted(f, wanted);
    return mt_safetensors_refuse(ctx, file, f->name, wanted);
}

MT_API mt_status mt_safetensors_fields(mt_context *ctx, const mt_safetensors *file, const mt_field *fields, int count) {
    const char *text;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!file || (!fields && count > 0))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_fields: %s is NULL", file ? "fields" : "file");
    MT_TRY(mti_fields_check(ctx, "mt_safetensors_fields", fields, count));
    for (i = 0; i < count; i++) {
        text = mt_safetensors_metadata(file, fields[i].name);
        if (!text || !mti_field_parse(&fields[i], text, fields[i].value) ||
            !mti_field_in_range(&fields[i], fields[i].value))
            return mti_field_refuse(ctx, file, &fields[i]);
    }
    return MT_SUCCESS;
}

/* Reads a JSON value into a field. */
static void mti_json_value(mti_json *j, const mt_field *f) {
    int fits = 1, on = 0;
    if (f->nullable && mti_json_word(j, "null")) return;
    if (f->kind == MT_FIELD_TEXT) mti_json_string(j, (char *)f->value, f->bytes);
    else if (f->kind == MT_FIELD_F32 || f->kind == MT_FIELD_F64)
        fits = mti_field_store_number(f, mti_json_number(j), f->value);
    else if (f->kind != MT_FIELD_BOOL)
        fits = mti_field_store_whole(f, mti_json_up_to(j, f->kind == MT_FIELD_U64 ? UINT64_MAX : (uint64_t)INT64_MAX),
                                     f->value);
    else if (mti_json_word(j, "true")) on = 1;
    else if (!mti_json_word(j, "false")) mti_json_fail(j, "true or false is missing");
    if (f->kind == MT_FIELD_BOOL) memcpy(f->value, &on, sizeof on);
    if (!fits) mti_json_fail(j, "a number is too large");
}

/* Returns 1 when there is a field for an element of the list whose elements are named `path`0, `path`1, ... */
static int mti_json_is_list(const char *path, const mt_field *fields, int fields_count) {
    size_t n = strlen(path);
    int i;
    for (i = 0; i < fields_count; i++)
        if (strncmp(fields[i].name, path, n) == 0 && fields[i].name[n] >= '0' && fields[i].name[n] <= '9') return 1;
    return 0;
}

static const mt_field *mti_json_members(mti_json *j, const char *path, const mt_field *fields, int fields_count);

/* Reads the elements of a list. The name of an element in messages and fields is `path` and its number. */
static const mt_field *mti_json_elements(mti_json *j, const char *path, const mt_field *fields, int fields_count) {
    char name[192];
    int count = 0, i;
    mti_json_take(j, '[', "it does not begin with '['");
    while (mti_json_next(j, &count, ']')) {
        snprintf(name, sizeof name, "%s%d", path, count - 1);
        for (i = 0; i < fields_count && strcmp(name, fields[i].name) != 0; i++) continue;
        if (i < fields_count) {
            mti_json_value(j, &fields[i]);
            if (j->error) return &fields[i];
        } else if (mti_json_peek(j) == '{' && !path[0]) {
            const mt_field *inner;
            snprintf(name, sizeof name, "%d.", count - 1);
            inner = mti_json_members(j, name, fields, fields_count);
            if (inner) return inner;
        } else mti_json_skip(j, 1);
    }
    return NULL;
}

/* Reads the members of an object whose name in messages and fields begins with `path`, as "a." */
static const mt_field *mti_json_members(mti_json *j, const char *path, const mt_field *fields, int fields_count) {
    char name[160];
    size_t begin = strlen(path);
    int count = 0, i;
    memcpy(name, path, begin);
    mti_json_take(j, '{', "it does not begin with '{'");
    while (mti_json_next(j, &count, '}')) {
        size_t length = begin + mti_json_string(j, name + begin, sizeof name - begin - 2);
        const mt_field *inner = NULL;
        mti_json_take(j, ':', "a colon is missing");
        if (mti_json_peek(j) == '[' && length < sizeof name - 3) {
            memcpy(name + length, ".", 2);
            i = mti_json_is_list(name, fields, fields_count);
            inner = i ? mti_json_elements(j, name, fields, fields_count) : NULL;
            if (inner) return inner;
            if (i) continue;
            name[length] = 0;
        }
        for (i = 0; i < fields_count; i++)
            if (length < sizeof name - 3 && strcmp(name, fields[i].name) == 0) break;
        if (i < fields_count) {
            mti_json_value(j, &fields[i]);
            if (j->error) return &fields[i];
            continue;
        }
        if (length < sizeof name - 3) {
            memcpy(name + length, ".", 2);
            for (i = 0; i < fields_count && strncmp(fields[i].name, name, length + 1) != 0; i++) continue;
        }
        if (i == fields_count) mti_json_skip(j, 1);
        else if (mti_json_peek(j) == '{') inner = mti_json_members(j, name, fields, fields_count);
        else if (!mti_json_word(j, "null")) {
            inner = &fields[i];
            j->named = length;
            i = mti_json_is_list(name, fields, fields_count);
            mti_json_fail(j, i ? "a list is missing" : "an object is missing");
        }
        if (inner) return inner;
    }
    return NULL;
}

/* Reads the fields of a JSON object or list. text is the whole file. */
static mt_status mti_json_object(mt_context *ctx, const char *path, const void *text, size_t bytes,
                                 const mt_field *fields, int fields_count) {
    mti_json j = mti_json_begin(text, bytes);
    int is_list = mti_json_peek(&j) == '[' && mti_json_is_list("", fields, fields_count);
    const mt_field *wrong;
    char value[MT_FIELD_TEXT_MAX];
    int i;
    MT_TRY(mti_keys_once(ctx, path, text, bytes));
    wrong = is_list ? mti_json_elements(&j, "", fields, fields_count) : mti_json_members(&j, "", fields, fields_count);
    mti_json_end(&j);
    if (wrong)
        return mt_fail(ctx, MT_ERR_DATA, "%s: JSON, byte %lld: %.*s: %s", path, (long long)(j.at - j.start),
                       (int)(j.named ? j.named : strlen(wrong->name)), wrong->name, j.error);
    MT_TRY(mti_json_status(ctx, &j, path, "JSON"));
    for (i = 0; i < fields_count; i++)
        if (!mti_field_in_range(&fields[i], fields[i].value)) {
            mt_field_text(&fields[i], value);
            return mt_fail(ctx, MT_ERR_DATA, "%s: %s is %s, must be from %lld to %lld", path, fields[i].name, value,
                           (long long)fields[i].low, (long long)fields[i].high);
        }
    return MT_SUCCESS;
}

/* Reads the bracket or the comma, and the member or element after it. Returns 0 at the end and after an error. */
static int mti_json_step(mti_json *j, char *name, size_t bytes, mt_json_part *value) {
    int c = mti_json_peek(j);
    if (c != '{' && c != '[' && c != ',') return 0;
    j->at++;
    c = mti_json_peek(j);
    value->text = (const char *)j->at;
    if (c == '"') mti_json_string(j, name, bytes);
    if (c == '"' && mti_json_peek(j) == ':') {
        j->at++;
        mti_json_peek(j);
        value->text = (const char *)j->at;
        mti_json_skip(j, 1);
    } else if (c != '"') mti_json_skip(j, 1);
    value->bytes = (size_t)((const char *)j->at - value->text);
    return !j->error;
}

MT_API int mt_json_next(mt_json_part *rest, char *name, size_t bytes, mt_json_part *value) {
    mti_json j;
    if (!rest || !rest->text || !name || bytes == 0 || !value) return 0;
    j = mti_json_begin(rest->text, rest->bytes);
    name[0] = 0;
    if (!mti_json_step(&j, name, bytes, value)) return 0;
    rest->bytes -= (size_t)((const char *)j.at - rest->text);
    rest->text = (const char *)j.at;
    return 1;
}

MT_API mt_status mt_json_parse(mt_context *ctx, const char *where, const char *text, const mt_field *fields,
                               int count) {
    if (!where || !text || (!fields && count > 0))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_json_parse: %s is NULL", !where ? "where" : !text ? "text" : "fields");
    MT_TRY(mti_fields_check(ctx, "mt_json_parse", fields, count));
    return mti_json_object(ctx, where, text, strlen(text), fields, count);
}

MT_API int mt_json_find(const char *text, const char *name, size_t *from, size_t *to) {
    mti_json j;
    char key[128];
    int count = 0, found = 0;
    if (!text || !name || !from || !to) return 0;
    j = mti_json_begin(text, strlen(text));
    mti_json_take(&j, '{', "it does not begin with '{'");
    while (mti_json_next(&j, &count, '}')) {
        size_t length = mti_json_string(&j, key, sizeof key), begin;
        mti_json_take(&j, ':', "a colon is missing");
        mti_json_peek(&j);
        begin = (size_t)(j.at - j.start);
        mti_json_skip(&j, 1);
        if (length >= sizeof key || strcmp(key, name) != 0) continue;
        found = 1;
        *from = begin;
        *to = (size_t)(j.at - j.start);
    }
    mti_json_end(&j);
    return found && !j.error;
}

/* Reads the text and the fields of a file. The caller frees *text, also after an error. */
static mt_status mti_json_file(mt_context *ctx, const char *directory, const char *name, size_t most,
                               const mt_field *fields, int count, void **text, int *exists) {
    char path[MT_PATH_MAX];
    size_t bytes;
    *text = NULL;
    MT_TRY(mti_path(ctx, directory, name, path, sizeof path));
    if (exists) *exists = mti_folder_has(path);
    if (exists && !*exists) return MT_SUCCESS;
    MT_TRY(mti_text_read(ctx, directory, name, path, most, text, &bytes));
    return mti_json_object(ctx, path, *text, bytes, fields, count);
}

MT_API mt_status mt_json_read(mt_context *ctx, const char *directory, const char *name, const mt_field *fields,
                              int count, int *exists) {
    void *text;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !name || (!fields && count > 0))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_json_read: %s is NULL",
                       !directory ? "directory"
                       : !name    ? "name"
                                  : "fields");
    MT_TRY(mti_fields_check(ctx, "mt_json_read", fields, count));
    status = mti_json_file(ctx, directory, name, MTI_TEXT_MAX, fields, count, &text, exists);
    mt_host_free(text);
    return status;
}

MT_API mt_status mt_json_text(mt_context *ctx, const char *directory, const char *name, size_t most, char **text,
                              int *exists) {
    void *memory;
    mt_status status;
    if (text) *text = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !name || !text)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_json_text: %s is NULL",
                       !directory ? "directory"
                       : !name    ? "name"
                                  : "text");
    status = mti_json_file(ctx, directory, name, most < MTI_TEXT_MAX ? most : MTI_TEXT_MAX, NULL, 0, &memory, exists);
    if (status == MT_SUCCESS) *text = (char *)memory;
    else mt_host_free(memory);
    return status;
}
