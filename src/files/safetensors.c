/* ---- safetensors files ------------------------------------------------------------------------------------------- */

#pragma once
#include "safetensors.h"
#include "json.c"
#include "files.c"

#define MTI_HEADER_MAX 100000000 /* bytes; the limit of the format */

typedef struct mti_metadata {
    const char *key, *value;
} mti_metadata;

struct mt_safetensors {
    mt_safetensors_tensor *tensors; /* sorted by offset while the file is read, then by name */
    mti_metadata *metadata;
    int count, capacity, metadata_count, metadata_capacity;
    char *text; /* decoded strings, one after the other */
    size_t text_bytes, text_used;
    const unsigned char *data; /* the bytes after the header, mapped */
    int64_t data_bytes;
    mti_mapped map;
    char path[MT_PATH_MAX];
};

#define MTI_F64 100 /* beside the values of mt_dtype */

/* The types of the format. dtype is the mt_dtype or MTI_F64, or -1 when the library cannot convert the type. */
static const struct {
    const char *name;
    int bits;
    int dtype;
} mti_safetensors_dtypes[] = {{"F32", 32, MT_F32}, {"BF16", 16, MT_BF16},  {"F16", 16, MT_F16},    {"F64", 64, MTI_F64},
                              {"I64", 64, -1},     {"I32", 32, -1},        {"I16", 16, -1},        {"I8", 8, -1},
                              {"U64", 64, -1},     {"U32", 32, -1},        {"U16", 16, -1},        {"U8", 8, -1},
                              {"BOOL", 8, -1},     {"C64", 64, -1},        {"F8_E4M3", 8, -1},     {"F8_E5M2", 8, -1},
                              {"F8_E8M0", 8, -1},  {"F8_E4M3FNUZ", 8, -1}, {"F8_E5M2FNUZ", 8, -1}, {"F6_E2M3", 6, -1},
                              {"F6_E3M2", 6, -1},  {"F4", 4, -1}};

/* Returns the index of a type in mti_safetensors_dtypes, or -1. */
static int mti_safetensors_dtype(const char *name) {
    int i = (int)(sizeof mti_safetensors_dtypes / sizeof *mti_safetensors_dtypes);
    while (i-- > 0)
        if (strcmp(name, mti_safetensors_dtypes[i].name) == 0) return i;
    return -1;
}

/* Makes space for one more item in a list. */
static mt_status mti_reserve(mt_context *ctx, void **list, int count, int *capacity, size_t bytes) {
    int more = *capacity ? 2 * *capacity : 64;
    void *memory;
    if (count < *capacity) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)more * bytes, &memory));
    if (*list) memcpy(memory, *list, (size_t)count * bytes);
    mt_host_free(*list);
    *list = memory;
    *capacity = more;
    return MT_SUCCESS;
}

/* A key of an object of JSON. */
typedef struct mti_key {
    size_t object, at; /* where the object and the quoted key begin in the text */
    uint64_t hash;     /* of the decoded key */
} mti_key;

/* The keys of all objects of a text. */
typedef struct mti_keys {
    mt_context *ctx; /* NULL: without messages */
    mt_status status;
    mti_key *list;
    int count, capacity;
    char *room; /* for the longest key */
    size_t room_bytes;
} mti_keys;

/* Reads a key of the object that begins at byte `object`, and lists it when the reader lists keys. */
static void mti_keys_read(mti_json *j, size_t object) {
    mti_keys *k = j->keys;
    void *list;
    mti_key *key;
    mti_json_peek(j);
    if (!k || k->status != MT_SUCCESS) {
        mti_json_string(j, NULL, 0);
        return;
    }
    list = k->list;
    k->status = mti_reserve(k->ctx, &list, k->count, &k->capacity, sizeof *k->list);
    if (k->status != MT_SUCCESS) return;
    k->list = (mti_key *)list;
    key = &k->list[k->count++];
    key->object = object;
    key->at = (size_t)(j->at - j->start);
    key->hash =
        mti_checksum(MTI_CHECKSUM_BASIS, (const unsigned char *)k->room, mti_json_string(j, k->room, k->room_bytes));
}

static int mti_key_order(const void *a, const void *b) {
    const mti_key *x = (const mti_key *)a, *y = (const mti_key *)b;
    if (x->object != y->object) return x->object < y->object ? -1 : 1;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Refuses a text in which an object has a key twice: readers differ in which of the two values they take. The text is
   well-formed, or its error is found later. */
static mt_status mti_keys_once(mt_context *ctx, const char *path, const void *text, size_t bytes) {
    mti_json j = mti_json_begin(text, bytes);
    mti_keys k;
    void *room;
    int i = 1;
    memset(&k, 0, sizeof k);
    MT_TRY(mti_host_new(ctx, bytes + 1, &room));
    k.ctx = ctx;
    k.room = (char *)room;
    k.room_bytes = bytes + 1;
    j.keys = &k;
    mti_json_skip(&j, 0);
    if (k.count > 0) qsort(k.list, (size_t)k.count, sizeof *k.list, mti_key_order);
    while (i < k.count && (k.list[i].object != k.list[i - 1].object || k.list[i].hash != k.list[i - 1].hash)) i++;
    if (k.status == MT_SUCCESS && !j.error && i < k.count) {
        j.at = j.start + k.list[i].at;
        mti_json_string(&j, k.room, k.room_bytes);
        k.status = mt_fail(ctx, MT_ERR_DATA, "%s: JSON, byte %lld: the key '%.100s' is given twice in one object", path,
                           (long long)k.list[i].at, k.room);
    }
    mt_host_free(k.list);
    mt_host_free(k.room);
    return k.status;
}

/* Reads the next string and keeps it in s->text, which is large enough for all strings of the header
   (mti_json_string). */
static const char *mti_safetensors_string(mt_safetensors *s, mti_json *j) {
    char *text = s->text + s->text_used;
    size_t bytes = mti_json_string(j, text, s->text_bytes - s->text_used) + 1;
    if (!j->error) s->text_used += bytes;
    return text;
}

/* Reads __metadata__. */
static mt_status mti_safetensors_metadata(mt_context *ctx, mt_safetensors *s, mti_json *j) {
    int count = 0;
    void *list;
    mti_json_take(j, '{', "__metadata__ is not an object");
    while (mti_json_next(j, &count, '}')) {
        list = s->metadata;
        MT_TRY(mti_reserve(ctx, &list, s->metadata_count, &s->metadata_capacity, sizeof *s->metadata));
        s->metadata = (mti_metadata *)list;
        s->metadata[s->metadata_count].key = mti_safetensors_string(s, j);
        mti_json_take(j, ':', "a colon is missing");
        s->metadata[s->metadata_count++].value = mti_safetensors_string(s, j);
    }
    return MT_SUCCESS;
}

static void mti_safetensors_shape(mti_json *j, mt_safetensors_tensor *t) {
    int count = 0;
    mti_json_take(j, '[', "a shape is not an array");
    while (mti_json_next(j, &count, ']')) {
        int64_t size = mti_json_whole(j);
        if (t->dims == MT_SAFETENSORS_DIMS) mti_json_fail(j, "a shape has more than 8 dimensions");
        else t->shape[t->dims++] = size;
    }
}

static void mti_safetensors_offsets(mti_json *j, int64_t *begin, int64_t *end) {
    mti_json_take(j, '[', "data_offsets is not an array");
    *begin = mti_json_whole(j);
    mti_json_take(j, ',', "data_offsets are not two numbers");
    *end = mti_json_whole(j);
    mti_json_take(j, ']', "data_offsets are not two numbers");
}

/* Reads the members of one tensor. Skips unknown members, as the format's reference library does. */
static void mti_safetensors_members(mt_safetensors *s, mti_json *j, mt_safetensors_tensor *t, int64_t *begin,
                                    int64_t *end) {
    static const char *const names[] = {"dtype", "shape", "data_offsets"}, *const twice[] = {
                                                                               "dtype is given twice",
                                                                               "shape is given twice",
                                                                               "data_offsets is given twice"};
    int count = 0, seen = 0, i;
    mti_json_take(j, '{', "a tensor is not an object");
    while (mti_json_next(j, &count, '}')) {
        const char *member = mti_safetensors_string(s, j);
        mti_json_take(j, ':', "a colon is missing");
        if (j->error) return;
        for (i = 0; i < 3 && strcmp(member, names[i]) != 0; i++) continue;
        if (i < 3 && (seen & 1 << i)) mti_json_fail(j, twice[i]);
        seen |= 1 << i;
        if (i == 0) t->dtype = mti_safetensors_string(s, j);
        else if (i == 1) mti_safetensors_shape(j, t);
        else if (i == 2) mti_safetensors_offsets(j, begin, end);
        else mti_json_skip(j, 2);
    }
    if ((seen & 7) != 7) mti_json_fail(j, "a tensor has no dtype, shape or data_offsets");
}

/* Returns the bits of a tensor, or -1 when they are too many. `type` is an index in mti_safetensors_dtypes. */
static int64_t mti_shape_bits(int type, int dims, const int64_t *shape) {
    int64_t bits = mti_safetensors_dtypes[type].bits;
    int i;
    for (i = 0; i < dims; i++) {
        if (shape[i] > 0 && bits > INT64_MAX / shape[i]) return -1;
        bits *= shape[i];
    }
    return bits;
}

/* Checks that shape, type and offsets of a tensor fit together, and sets its data, bytes and file. */
static mt_status mti_safetensors_check(mt_context *ctx, const mt_safetensors *s, mt_safetensors_tensor *t,
                                       int64_t begin, int64_t end) {
    int type = mti_safetensors_dtype(t->dtype);
    int64_t bits;
    if (type < 0) return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' has dtype '%.20s'", s->path, t->name, t->dtype);
    if (begin > end || end > s->data_bytes)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s: data_offsets [%lld, %lld] of '%.100s' in a file with %lld bytes of data%s", s->path,
                       (long long)begin, (long long)end, t->name, (long long)s->data_bytes,
                       begin > end ? "" : "; it may be truncated");
    bits = mti_shape_bits(type, t->dims, t->shape);
    if (bits < 0) return mt_fail(ctx, MT_ERR_DATA, "%s: the shape of '%.100s' overflows", s->path, t->name);
    if (bits % 8 != 0 || bits / 8 != end - begin)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s: '%.100s' has %lld bits by shape and dtype %s, and %lld bytes by data_offsets", s->path,
                       t->name, (long long)bits, t->dtype, (long long)(end - begin));
    t->data = s->data + begin;
    t->bytes = end - begin;
    t->file = s;
    return MT_SUCCESS;
}

static mt_status mti_safetensors_tensor(mt_context *ctx, mt_safetensors *s, mti_json *j, const char *name) {
    int64_t begin = 0, end = 0;
    void *list = s->tensors;
    mt_safetensors_tensor *t;
    MT_TRY(mti_reserve(ctx, &list, s->count, &s->capacity, sizeof *t));
    s->tensors = (mt_safetensors_tensor *)list;
    t = &s->tensors[s->count++];
    t->name = name;
    mti_safetensors_members(s, j, t, &begin, &end);
    return j->error ? MT_SUCCESS : mti_safetensors_check(ctx, s, t, begin, end);
}

/* Reads the header: __metadata__ and the tensors. */
static mt_status mti_safetensors_header(mt_context *ctx, mt_safetensors *s, mti_json *j) {
    int count = 0, metadata = 0;
    if (j->at == j->end || *j->at != '{') mti_json_fail(j, "it does not begin with '{'");
    else j->at++;
    while (mti_json_next(j, &count, '}')) {
        const char *name = mti_safetensors_string(s, j);
        mti_json_take(j, ':', "a colon is missing");
        if (j->error) break;
        if (strcmp(name, "__metadata__") != 0) MT_TRY(mti_safetensors_tensor(ctx, s, j, name));
        else if (metadata++) mti_json_fail(j, "__metadata__ is given twice");
        else MT_TRY(mti_safetensors_metadata(ctx, s, j));
    }
    mti_json_end(j);
    return mti_json_status(ctx, j, s->path, "header");
}

static int mti_tensor_by_data(const void *a, const void *b) {
    const mt_safetensors_tensor *x = (const mt_safetensors_tensor *)a, *y = (const mt_safetensors_tensor *)b;
    const char *p = (const char *)x->data, *q = (const char *)y->data;
    return p != q ? (p > q) - (p < q) : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int mti_tensor_by_name(const void *a, const void *b) {
    return strcmp(((const mt_safetensors_tensor *)a)->name, ((const mt_safetensors_tensor *)b)->name);
}

static int mti_metadata_by_key(const void *a, const void *b) {
    return strcmp(((const mti_metadata *)a)->key, ((const mti_metadata *)b)->key);
}

/* Sorts the tensors by name, and checks that no name occurs twice. */
static mt_status mti_safetensors_names(mt_context *ctx, mt_safetensors *s) {
    int i;
    if (s->count > 0) qsort(s->tensors, (size_t)s->count, sizeof *s->tensors, mti_tensor_by_name);
    for (i = 1; i < s->count; i++)
        if (strcmp(s->tensors[i - 1].name, s->tensors[i].name) == 0)
            return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is given twice", s->path, s->tensors[i].name);
    return MT_SUCCESS;
}

/* Checks that every byte of the data belongs to exactly one tensor and that no name occurs twice. Sorts tensors and
   metadata by name. */
static mt_status mti_safetensors_sort(mt_context *ctx, mt_safetensors *s) {
    const unsigned char *end = s->data;
    int i;
    MT_TRY(mti_safetensors_names(ctx, s)); /* first, because two tensors of one name also overlap or leave a gap */
    if (s->count > 0) qsort(s->tensors, (size_t)s->count, sizeof *s->tensors, mti_tensor_by_data);
    for (i = 0; i < s->count; end += s->tensors[i++].bytes)
        if (s->tensors[i].data != end)
            return mt_fail(
                ctx, MT_ERR_DATA, "%s: '%.100s' begins at byte %lld of the data, but the tensor before it ends at %lld",
                s->path, s->tensors[i].name, (long long)((const unsigned char *)s->tensors[i].data - s->data),
                (long long)(end - s->data));
    if (end != s->data + s->data_bytes)
        return mt_fail(ctx, MT_ERR_DATA, "%s: its tensors have %lld bytes, its data %lld", s->path,
                       (long long)(end - s->data), (long long)s->data_bytes);
    MT_TRY(mti_safetensors_names(ctx, s));
    if (s->metadata_count > 0) qsort(s->metadata, (size_t)s->metadata_count, sizeof *s->metadata, mti_metadata_by_key);
    for (i = 1; i < s->metadata_count; i++)
        if (strcmp(s->metadata[i - 1].key, s->metadata[i].key) == 0)
            return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is given twice in __metadata__", s->path,
                           s->metadata[i].key);
    return MT_SUCCESS;
}

/* Reads and checks the header of s->map. */
static mt_status mti_safetensors_parse(mt_context *ctx, mt_safetensors *s) {
    uint64_t header;
    size_t size = s->map.bytes;
    void *memory;
    mti_json j;
    mt_status status;
    if (size < 8) return mt_fail(ctx, MT_ERR_DATA, "%s: %zu bytes are not a safetensors file", s->path, size);
    MT_TRY(mti_mapped_read(ctx, s->path, &s->map, 0, sizeof header, &header));
    if (header > MTI_HEADER_MAX || header > size - 8)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s: a header of %llu bytes (at most %d) in a file of %zu; it may be truncated", s->path,
                       (unsigned long long)header, MTI_HEADER_MAX, size);
    s->data = (const unsigned char *)s->map.data + 8 + header;
    s->data_bytes = (int64_t)(size - 8 - header);
    s->text_bytes = (size_t)header + 1;
    MT_TRY(mti_host_new(ctx, s->text_bytes, &memory));
    s->text = (char *)memory;
    MT_TRY(mti_host_new(ctx, header > 0 ? (size_t)header : 1, &memory));
    j = mti_json_begin(memory, (size_t)header);
    status = mti_mapped_read(ctx, s->path, &s->map, 8, (size_t)header, memory);
    if (status == MT_SUCCESS) status = mti_safetensors_header(ctx, s, &j);
    mt_host_free(memory);
    return status == MT_SUCCESS ? mti_safetensors_sort(ctx, s) : status;
}

/* Opens a file of a folder or, when directory is NULL, the file that the program has named `path`. */
static mt_status mti_safetensors_open(mt_context *ctx, const char *directory, const char *name, const char *path,
                                      mt_safetensors *s) {
    if (strlen(path) >= sizeof s->path)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_open: a path of %zu characters", strlen(path));
    snprintf(s->path, sizeof s->path, "%s", path);
    if (directory) MT_TRY(mti_folder_open(ctx, directory, name, path, 1, &s->map));
    else MT_TRY(mti_mapped_open(ctx, path, 1, &s->map));
    return mti_safetensors_parse(ctx, s);
}

static mt_status mti_safetensors_new(mt_context *ctx, const char *directory, const char *name, const char *path,
                                     mt_safetensors **out) {
    void *memory;
    mt_status status;
    *out = NULL;
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    ((mt_safetensors *)memory)->map.fd = -1;
    status = mti_safetensors_open(ctx, directory, name, path, (mt_safetensors *)memory);
    if (status == MT_SUCCESS) *out = (mt_safetensors *)memory;
    else mt_safetensors_close((mt_safetensors *)memory);
    return status;
}

MT_API mt_status mt_safetensors_open(mt_context *ctx, const char *path, mt_safetensors **out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!path || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_open: %s is NULL", path ? "out" : "path");
    return mti_safetensors_new(ctx, NULL, NULL, path, out);
}

MT_API void mt_safetensors_close(mt_safetensors *file) {
    if (!file) return;
    mti_mapped_close(&file->map);
    mt_host_free(file->tensors);
    mt_host_free(file->metadata);
    mt_host_free(file->text);
    mt_host_free(file);
}

MT_API int mt_safetensors_count(const mt_safetensors *file) { return file ? file->count : 0; }

MT_API const mt_safetensors_tensor *mt_safetensors_at(const mt_safetensors *file, int index) {
    return index >= 0 && index < mt_safetensors_count(file) ? &file->tensors[index] : NULL;
}

MT_API const mt_safetensors_tensor *mt_safetensors_find(const mt_safetensors *file, const char *name) {
    mt_safetensors_tensor key;
    if (!name || mt_safetensors_count(file) == 0) return NULL;
    key.name = name;
    return (const mt_safetensors_tensor *)bsearch(&key, file->tensors, (size_t)file->count, sizeof key,
                                                  mti_tensor_by_name);
}

MT_API const char *mt_safetensors_metadata(const mt_safetensors *file, const char *key) {
    mti_metadata wanted;
    const mti_metadata *found;
    if (!file || !key || file->metadata_count == 0) return NULL;
    wanted.key = key;
    found = (const mti_metadata *)bsearch(&wanted, file->metadata, (size_t)file->metadata_count, sizeof wanted,
                                          mti_metadata_by_key);
    return found ? found->value : NULL;
}

/* Reads bytes of a tensor. */
static mt_status mti_tensor_bytes(mt_context *ctx, const mt_safetensors_tensor *t, int64_t at, int64_t bytes,
                                  void *out) {
    const mti_mapped *map = &t->file->map;
    size_t first = (size_t)((const unsigned char *)t->data - (const unsigned char *)map->data);
    return mti_mapped_read(ctx, t->file->path, map, first + (size_t)at, (size_t)bytes, out);
}

/* Reads F64 elements, rounded to floats. */
static mt_status mti_f64_read(mt_context *ctx, const mt_safetensors_tensor *t, int64_t first, int64_t count,
                              float *out) {
    double block[1 << 11];
    int64_t i, k, n;
    for (i = 0; i < count; i += n) {
        n = mt_min(count - i, (int64_t)(sizeof block / sizeof *block));
        MT_TRY(mti_tensor_bytes(ctx, t, 8 * (first + i), 8 * n, block));
        for (k = 0; k < n; k++) {
            out[i + k] = (float)block[k];
            if (isinf(out[i + k]) && !isinf(block[k]))
                return mt_fail(ctx, MT_ERR_DATA, "%s: element %lld of '%.100s' is %g, too large for a float",
                               t->file->path, (long long)(first + i + k), t->name, block[k]);
        }
    }
    return MT_SUCCESS;
}

/* Returns the type of a tensor: an mt_dtype or MTI_F64, or -1 when the library cannot convert it. */
static int mti_tensor_type(const mt_safetensors_tensor *t) {
    return mti_safetensors_dtypes[mti_safetensors_dtype(t->dtype)].dtype;
}

/* Reads elements of a tensor as floats. */
static mt_status mti_elements_read(mt_context *ctx, const mt_safetensors_tensor *t, int64_t first, int64_t count,
                                   float *out) {
    unsigned char *from = (unsigned char *)out;
    int type = mti_tensor_type(t), bytes = type == MT_F32 ? 4 : 2;
    uint16_t bits[256];
    int64_t i, n;
    if (type == MTI_F64) return mti_f64_read(ctx, t, first, count, out);
    /* 16-bit values are read into the second half of out. Widening them from the front overwrites none that is still
       needed */
    if (type != MT_F32) from += bytes * count;
    MT_TRY(mti_tensor_bytes(ctx, t, bytes * first, bytes * count, from));
    for (i = 0; type != MT_F32 && i < count; i += n) {
        n = mt_min(count - i, (int64_t)(sizeof bits / sizeof *bits));
        memcpy(bits, from + 2 * i, (size_t)n * sizeof *bits);
        mt_f32_from_16bit((mt_dtype)type, bits, out + i, n);
    }
    return MT_SUCCESS;
}

static int64_t mti_tensor_elements(const mt_safetensors_tensor *t) {
    int64_t n = 1;
    int i;
    for (i = 0; i < t->dims; i++) n *= t->shape[i];
    return n;
}

MT_API mt_status mt_safetensors_read(mt_context *ctx, const mt_safetensors_tensor *tensor, float *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tensor || !out || !tensor->file)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_read: %s is NULL",
                       !tensor ? "tensor"
                       : !out  ? "out"
                               : "tensor.file");
    if (mti_tensor_type(tensor) < 0)
        return mt_fail(ctx, MT_ERR_DTYPE, "mt_safetensors_read: '%.100s' is %s, must be F32, F64, BF16 or F16",
                       tensor->name, tensor->dtype);
    return mti_elements_read(ctx, tensor, 0, mti_tensor_elements(tensor), out);
}

MT_API mt_status mt_safetensors_read_bytes(mt_context *ctx, const mt_safetensors_tensor *tensor, int64_t at,
                                           int64_t bytes, void *out) {
    static const char *const function = "mt_safetensors_read_bytes";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tensor || !out || !tensor->file)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, out ? "tensor" : "out");
    if (at < 0 || bytes < 0 || at > tensor->bytes || bytes > tensor->bytes - at)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %lld bytes from byte %lld of '%.100s', which has %lld bytes",
                       function, (long long)bytes, (long long)at, tensor->name, (long long)tensor->bytes);
    return mti_tensor_bytes(ctx, tensor, at, bytes, out);
}

enum { MTI_BLOCK_ELEMENTS = 1024 };

/* Returns MT_ERR_DATA when two tensors of the same shape differ in an element. Both have types that can be read. */
static mt_status mti_tensors_equal(mt_context *ctx, const mt_safetensors_tensor *copy, const mt_safetensors_tensor *t) {
    float x[MTI_BLOCK_ELEMENTS], y[MTI_BLOCK_ELEMENTS];
    int64_t elements = mti_tensor_elements(t), i, k, n;
    for (i = 0; i < elements; i += n) {
        n = mt_min(elements - i, (int64_t)MTI_BLOCK_ELEMENTS);
        MT_TRY(mti_elements_read(ctx, copy, i, n, x));
        MT_TRY(mti_elements_read(ctx, t, i, n, y));
        for (k = 0; k < n; k++)
            if (x[k] != y[k] && (x[k] == x[k] || y[k] == y[k]))
                return mt_fail(ctx, MT_ERR_DATA,
                               "%s: element %lld of '%.100s' is %g, but of '%.100s' %g; this model has one parameter "
                               "for both",
                               copy->file->path, (long long)(i + k), copy->name, (double)x[k], t->name, (double)y[k]);
    }
    return MT_SUCCESS;
}

/* Checks the bytes of a file against its checksum. *has is 1 when the file has a checksum; a file without one
   passes. */
static mt_status mti_safetensors_verify(mt_context *ctx, const mt_safetensors *s, int *has) {
    unsigned char block[1 << 14]; /* a multiple of 8, and at least MTI_CHECKSUM_FIRST */
    char wanted[MTI_CHECKSUM_DIGITS + 1] = "", digits[MTI_CHECKSUM_DIGITS + 1];
    uint64_t h = MTI_CHECKSUM_BASIS;
    size_t at, n;
    *has = s->map.bytes >= MTI_CHECKSUM_FIRST;
    for (at = 0; *has && at < s->map.bytes; at += n) {
        n = s->map.bytes - at < sizeof block ? s->map.bytes - at : sizeof block;
        MT_TRY(mti_mapped_read(ctx, s->path, &s->map, at, n, block));
        if (at == 0) {
            *has = memcmp(block + 8, MTI_CHECKSUM_BEFORE, sizeof MTI_CHECKSUM_BEFORE - 1) == 0;
            memcpy(wanted, block + MTI_CHECKSUM_AT, MTI_CHECKSUM_DIGITS);
            memset(block + MTI_CHECKSUM_AT, '0', MTI_CHECKSUM_DIGITS);
        }
        h = mti_checksum(h, block, n);
    }
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)h);
    if (!*has || memcmp(digits, wanted, MTI_CHECKSUM_DIGITS) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: its bytes are not those that were written: checksum %s, expected %s", s->path,
                   digits, wanted);
}

/* -- writing -- */

struct mt_safetensors_writer {
    mti_file file;
    char *header; /* the length of the text in 8 bytes, then the text; NULL when the file has it */
    size_t header_bytes, header_room;
    mt_status status;            /* of the header: no memory, or its check failed; of the creation of the file */
    int64_t data_bytes, written; /* of all tensors; of the file */
    int is_begun;                /* 1: the file has the header */
    pid_t process;               /* that has begun; a process forked from it may not touch the file */
    char path[MT_PATH_MAX];
};

/* Appends to the header. When there is no memory for it, mti_header_end returns the error. */
static void mti_header_put(mt_context *ctx, mt_safetensors_writer *w, const void *bytes, size_t count) {
    size_t room = w->header_room > 0 ? w->header_room : 4096;
    void *memory;
    while (room < w->header_bytes + count) room *= 2;
    if (room > w->header_room && w->status == MT_SUCCESS) {
        w->status = mti_host_new(ctx, room, &memory);
        if (w->status != MT_SUCCESS) return;
        if (w->header) memcpy(memory, w->header, w->header_bytes);
        mt_host_free(w->header);
        w->header = (char *)memory;
        w->header_room = room;
    }
    if (w->status != MT_SUCCESS) return;
    memcpy(w->header + w->header_bytes, bytes, count);
    w->header_bytes += count;
}

static void mti_header_text(mt_context *ctx, mt_safetensors_writer *w, const char *text) {
    mti_header_put(ctx, w, text, strlen(text));
}

static void mti_header_whole(mt_context *ctx, mt_safetensors_writer *w, int64_t x) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)x);
    mti_header_text(ctx, w, text);
}

static void mti_header_string(mt_context *ctx, mt_safetensors_writer *w, const char *text) {
    char escaped[8];
    mti_header_text(ctx, w, "\"");
    for (; *text; text++) mti_header_text(ctx, w, mti_json_escaped(*text, escaped));
    mti_header_text(ctx, w, "\"");
}

/* Begins a header with its metadata. mti_header_text(ctx, w, "}") ends the metadata. */
static void mti_header_begin(mt_context *ctx, mt_safetensors_writer *w) {
    static const char no_length[8] = {0};
    w->header_bytes = 0;
    w->status = MT_SUCCESS;
    w->data_bytes = w->written = 0;
    mti_header_put(ctx, w, no_length, sizeof no_length);
    mti_header_text(ctx, w, MTI_CHECKSUM_BEFORE "0000000000000000\"");
}

static void mti_header_member(mt_context *ctx, mt_safetensors_writer *w, const char *key, const char *value) {
    mti_header_text(ctx, w, ",");
    mti_header_string(ctx, w, key);
    mti_header_text(ctx, w, ":");
    mti_header_string(ctx, w, value);
}

/* Adds a tensor of so many bytes. */
static void mti_header_tensor(mt_context *ctx, mt_safetensors_writer *w, const char *name, const char *dtype, int dims,
                              const int64_t *shape, int64_t bytes) {
    int i;
    mti_header_text(ctx, w, ",");
    mti_header_string(ctx, w, name);
    mti_header_text(ctx, w, ":{\"dtype\":");
    mti_header_string(ctx, w, dtype);
    mti_header_text(ctx, w, ",\"shape\":[");
    for (i = 0; i < dims; i++) {
        if (i > 0) mti_header_text(ctx, w, ",");
        mti_header_whole(ctx, w, shape[i]);
    }
    mti_header_text(ctx, w, "],\"data_offsets\":[");
    mti_header_whole(ctx, w, w->data_bytes);
    w->data_bytes += bytes;
    mti_header_text(ctx, w, ",");
    mti_header_whole(ctx, w, w->data_bytes);
    mti_header_text(ctx, w, "]}");
}

static mt_status mti_header_end(mt_context *ctx, mt_safetensors_writer *w, const char *path) {
    uint64_t length;
    mti_header_text(ctx, w, "}");
    while (w->status == MT_SUCCESS && w->header_bytes % 8 != 0) mti_header_text(ctx, w, " "); /* aligns the data */
    MT_TRY(w->status);
    length = (uint64_t)w->header_bytes - 8;
    if (length > MTI_HEADER_MAX)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: a header of %llu bytes; at most %d are allowed", path,
                       (unsigned long long)length, MTI_HEADER_MAX);
    memcpy(w->header, &length, sizeof length);
    return MT_SUCCESS;
}

static void mti_header_free(mt_safetensors_writer *w) {
    mt_host_free(w->header);
    w->header = NULL;
    w->header_bytes = w->header_room = 0;
}

/* Writes the header to the file and frees it. */
static void mti_header_write(mt_safetensors_writer *w) {
    mti_file_put(&w->file, w->header, w->header_bytes);
    mti_header_free(w);
}

/* Reads the header as mt_safetensors_open does, which finds names that are given twice or are not UTF-8. */
static mt_status mti_header_check(mt_context *ctx, const mt_safetensors_writer *w) {
    void *memory;
    mt_safetensors *s;
    mt_status status;
    MT_TRY(mti_host_new(ctx, sizeof *s, &memory));
    s = (mt_safetensors *)memory;
    s->map.fd = -1;
    s->map.data = w->header;
    s->map.bytes = w->header_bytes + (size_t)w->data_bytes;
    memcpy(s->path, w->path, sizeof s->path);
    status = mti_safetensors_parse(ctx, s);
    mt_safetensors_close(s);
    return status;
}

/* Opens and locks what an earlier writer has left at path: *held is its descriptor, or -1 when there is none. Returns 0
   when another writer is still there. */
static int mti_leftover_lock(const char *path, int *held) {
    int busy = 0, at = 0;
    while (!busy && !at) {
        *held = mti_open(path, O_RDWR | O_NONBLOCK | MTI_NOFOLLOW);
        if (*held < 0) return 1;
        busy = mti_lock_wait(*held) == EWOULDBLOCK;
        at = mti_is_at(*held, path);
        if (!busy && !at) close(*held); /* its writer has just renamed or removed it */
    }
    if (busy) close(*held);
    return !busy;
}

/* Creates the file PATH.tmp in place of one that a killed run has left, and locks it until it is closed. Two writers
   would otherwise rename each other's files. */
static mt_status mti_writer_create(mt_context *ctx, mti_file *f) {
    int held, error = 0, alone = mti_leftover_lock(f->path, &held);
    if (alone) {
        unlink(f->path);
        f->fd = mti_open(f->path, O_WRONLY | O_CREAT | O_EXCL | MTI_NOFOLLOW);
        error = f->fd < 0 ? errno : mti_lock_wait(f->fd);
        if (held >= 0) close(held);
        alone = f->fd < 0 ? error != EEXIST : error != EWOULDBLOCK && mti_is_at(f->fd, f->path);
    }
    if (alone) return f->fd < 0 ? mti_io_error(ctx, f->path, "create it", error) : MT_SUCCESS;
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
    return mt_fail(ctx, MT_ERR_IO, "%s: another writer writes it", f->path);
}

/* A file is renamed to the path at last. That would remove a device, a pipe, or a link to one, such as /dev/stdout. */
static mt_status mti_writer_place(mt_context *ctx, const char *path) {
    struct stat info;
    if (stat(path, &info) != 0 || S_ISREG(info.st_mode)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_IO, "%s: is not a regular file, so no file can take its place", path);
}

/* Ends the header and creates the file with it. */
static mt_status mti_writer_open(mt_context *ctx, mt_safetensors_writer *w) {
    MT_TRY(mti_writer_place(ctx, w->path));
    MT_TRY(mti_header_end(ctx, w, w->path));
    MT_TRY(mti_header_check(ctx, w));
    mti_file_reset(&w->file);
    snprintf(w->file.path, sizeof w->file.path, "%.*s.tmp", MT_PATH_MAX - 5, w->path);
    MT_TRY(mti_writer_create(ctx, &w->file));
    w->is_begun = 1;
    w->process = getpid();
    mti_header_write(w);
    return MT_SUCCESS;
}

/* Opens the file at the first call. */
static mt_status mti_writer_begin(mt_context *ctx, mt_safetensors_writer *w) {
    if (w->is_begun && w->process != getpid())
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: process %ld writes it, from which this process %ld was forked",
                       w->path, (long)w->process, (long)getpid());
    if (!w->is_begun && w->status == MT_SUCCESS) w->status = mti_writer_open(ctx, w);
    return w->status;
}

MT_API mt_status mt_safetensors_create(mt_context *ctx, const char *path, const mt_setting *metadata, int count,
                                       mt_safetensors_writer **out) {
    static const char *const function = "mt_safetensors_create";
    void *memory;
    mt_safetensors_writer *w;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!path || !out || (count > 0 && !metadata))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, !path ? "path" : out ? "metadata" : "out");
    *out = NULL;
    if (strlen(path) > MT_PATH_MAX - 5)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: a path of %zu characters", function, strlen(path));
    for (i = 0; i < count; i++)
        if (!metadata[i].name || !metadata[i].value)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: metadata[%d] has no %s", function, i,
                           metadata[i].name ? "value" : "name");
    MT_TRY(mti_host_new(ctx, sizeof *w, &memory));
    w = (mt_safetensors_writer *)memory;
    w->file.fd = -1;
    snprintf(w->path, sizeof w->path, "%s", path);
    mti_header_begin(ctx, w);
    for (i = 0; i < count; i++) mti_header_member(ctx, w, metadata[i].name, metadata[i].value);
    mti_header_text(ctx, w, "}");
    *out = w;
    return MT_SUCCESS;
}

MT_API mt_status mt_safetensors_add(mt_context *ctx, mt_safetensors_writer *writer, const char *name, const char *dtype,
                                    int dims, const int64_t *shape) {
    static const char *const function = "mt_safetensors_add";
    int64_t bits;
    int type, i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!writer || !name || !dtype || (dims > 0 && !shape))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                       !writer ? "writer"
                       : !name ? "name"
                       : dtype ? "shape"
                               : "dtype");
    if (writer->is_begun)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' comes after data; add all tensors first", function, name);
    type = mti_safetensors_dtype(dtype);
    if (type < 0) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' has dtype '%.20s'", function, name, dtype);
    if (dims < 0 || dims > MT_SAFETENSORS_DIMS)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' has %d dimensions, must have 0 to %d", function, name, dims,
                       MT_SAFETENSORS_DIMS);
    for (i = 0; i < dims; i++)
        if (shape[i] < 0)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' has size %lld in dimension %d", function, name,
                           (long long)shape[i], i);
    bits = mti_shape_bits(type, dims, shape);
    if (bits < 0 || bits / 8 > INT64_MAX / 2 - writer->data_bytes)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the shape of '%.100s' overflows", function, name);
    if (bits % 8 != 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' has %lld bits, must have whole bytes", function, name,
                       (long long)bits);
    mti_header_tensor(ctx, writer, name, dtype, dims, shape, bits / 8);
    return writer->status;
}

MT_API mt_status mt_safetensors_write(mt_context *ctx, mt_safetensors_writer *writer, const void *data, size_t bytes) {
    static const char *const function = "mt_safetensors_write";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!writer || (bytes > 0 && !data))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, writer ? "data" : "writer");
    if ((uint64_t)bytes > (uint64_t)(writer->data_bytes - writer->written))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %zu bytes, but the tensors of %s have %lld more", function, bytes,
                       writer->path, (long long)(writer->data_bytes - writer->written));
    MT_TRY(mti_writer_begin(ctx, writer));
    mti_file_put(&writer->file, data, bytes);
    writer->written += (int64_t)bytes;
    return writer->file.error ? mti_io_error(ctx, writer->file.path, "write it", writer->file.error) : MT_SUCCESS;
}

MT_API mt_status mt_safetensors_finish(mt_context *ctx, mt_safetensors_writer *writer) {
    static const char *const function = "mt_safetensors_finish";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!writer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: writer is NULL", function);
    if (writer->written < writer->data_bytes)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the tensors of %s have %lld bytes, but %lld were written", function,
                       writer->path, (long long)writer->data_bytes, (long long)writer->written);
    MT_TRY(mti_writer_begin(ctx, writer));
    if (writer->file.fd < 0) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s was finished before", function, writer->path);
    mti_file_sync(&writer->file, 1);
    if (writer->file.error) return mti_io_error(ctx, writer->file.path, "write it", writer->file.error);
    if (!mti_is_at(writer->file.fd, writer->file.path)) /* on a file system without locks */
        return mt_fail(ctx, MT_ERR_IO, "%s: another writer has replaced or removed it", writer->file.path);
    if (rename(writer->file.path, writer->path) != 0)
        return mti_io_error(ctx, writer->path, "rename a file to it", errno);
    close(writer->file.fd); /* now, because its lock has kept others away from the name */
    writer->file.fd = -1;
    return mti_parent_sync(ctx, writer->path);
}

MT_API void mt_safetensors_destroy(mt_safetensors_writer *writer) {
    if (!writer) return;
    if (writer->file.fd >= 0) {
        if (writer->process == getpid() && mti_is_at(writer->file.fd, writer->file.path)) unlink(writer->file.path);
        close(writer->file.fd);
    }
    mti_header_free(writer);
    mt_host_free(writer);
}

/* -- several files of one model -- */

/* metadata key of the version of the library that wrote a file */
#define MTI_VERSION_KEY "megatron"

struct mt_safetensors_set {
    mt_safetensors **files;
    int count, capacity;
    int64_t tensors;        /* in all files */
    char path[MT_PATH_MAX]; /* of the file, or of the index */
};

static void mti_set_close(mt_safetensors_set *b) {
    while (b->count > 0) mt_safetensors_close(b->files[--b->count]);
    mt_host_free(b->files);
    memset(b, 0, sizeof *b);
}

MT_API const mt_safetensors_tensor *mt_safetensors_set_find(const mt_safetensors_set *set, const char *name) {
    const mt_safetensors_tensor *found = NULL;
    int i;
    for (i = 0; set && i < set->count && !found; i++) found = mt_safetensors_find(set->files[i], name);
    return found;
}

MT_API const mt_safetensors *mt_safetensors_set_file(const mt_safetensors_set *set, int index) {
    return set && index >= 0 && index < set->count ? set->files[index] : NULL;
}

/* Returns a number that grows with the version "1.2.3", or -1 when text is not a version. */
static int64_t mti_version_number(const char *text) {
    int64_t number = 0, part;
    int i, digits;
    for (i = 0; i < 3; i++) {
        part = 0;
        for (digits = 0; *text >= '0' && *text <= '9' && digits < 6; digits++) part = 10 * part + (*text++ - '0');
        if (digits == 0 || *text++ != (i < 2 ? '.' : 0)) return -1;
        number = 1000000 * number + part;
    }
    return number;
}

/* Returns an error when a newer version of the library wrote the file. needed = 1: also when the file has no
   version. */
static mt_status mti_version_check(mt_context *ctx, const mt_safetensors *s, int needed) {
    const char *theirs = mt_safetensors_metadata(s, MTI_VERSION_KEY);
    int64_t number = theirs ? mti_version_number(theirs) : 0;
    if (!theirs && !needed) return MT_SUCCESS;
    if (!theirs) return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has no " MTI_VERSION_KEY, s->path);
    if (number < 0)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s: its metadata has " MTI_VERSION_KEY " '%.40s', must be a version such as " MT_VERSION,
                       s->path, theirs);
    if (number <= mti_version_number(MT_VERSION)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA,
                   "%s: was written by megatron.h %.40s, this is " MT_VERSION ": it reads files of "
                   "its own version and of older ones",
                   s->path, theirs);
}

/* Opens a file and adds it to the set. A tensor that is also in another file is an error. */
static mt_status mti_set_add(mt_context *ctx, mt_safetensors_set *b, const char *directory, const char *name) {
    char path[MT_PATH_MAX];
    void *list = b->files;
    mt_safetensors *added;
    mt_status status;
    int i;
    MT_TRY(mti_path(ctx, directory, name, path, sizeof path));
    MT_TRY(mti_reserve(ctx, &list, b->count, &b->capacity, sizeof *b->files));
    b->files = (mt_safetensors **)list;
    MT_TRY(mti_safetensors_new(ctx, directory, name, path, &b->files[b->count]));
    added = b->files[b->count];
    status = mti_version_check(ctx, added, 0);
    if (status != MT_SUCCESS) {
        mt_safetensors_close(added);
        return status;
    }
    for (i = 0; b->count > 0 && i < mt_safetensors_count(added); i++)
        if (mt_safetensors_set_find(b, mt_safetensors_at(added, i)->name)) {
            status = mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is in another file, too", path,
                             mt_safetensors_at(added, i)->name);
            mt_safetensors_close(added);
            return status;
        }
    b->tensors += mt_safetensors_count(added);
    b->count++;
    return MT_SUCCESS;
}

static const char *mti_file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Handles one entry of an index: opens the file if it is not open yet, and checks that it has the tensor. */
static mt_status mti_set_entry(mt_context *ctx, mt_safetensors_set *b, const char *directory, const char *tensor,
                               const char *file) {
    int i;
    for (i = 0; i < b->count && strcmp(mti_file_name(b->files[i]->path), file) != 0; i++) continue;
    if (i == b->count) {
        if (!file[0] || strchr(file, '/') || file[0] == '.')
            return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is not the name of a file beside it", b->path, file);
        MT_TRY(mti_set_add(ctx, b, directory, file));
    }
    if (mt_safetensors_find(b->files[i], tensor)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is not in %.100s", b->path, tensor, file);
}

/* Reads the weight_map of an index. text is a buffer of `capacity` bytes, enough for any string of the index. */
static mt_status mti_set_entries(mt_context *ctx, mt_safetensors_set *b, const char *directory, mti_json *j, char *text,
                                 size_t capacity, int64_t *entries) {
    char file[256];
    int count = 0;
    mti_json_take(j, '{', "weight_map is not an object");
    while (mti_json_next(j, &count, '}')) {
        mti_json_string(j, text, capacity);
        mti_json_take(j, ':', "a colon is missing");
        if (mti_json_string(j, file, sizeof file) >= sizeof file) mti_json_fail(j, "the name of a file is too long");
        if (j->error) break;
        MT_TRY(mti_set_entry(ctx, b, directory, text, file));
        ++*entries;
    }
    return MT_SUCCESS;
}

/* Reads an index and opens its files. text and capacity are those of mti_set_entries. */
static mt_status mti_set_index(mt_context *ctx, mt_safetensors_set *b, const char *directory, mti_json *j, char *text,
                               size_t capacity) {
    int count = 0;
    int64_t entries = 0;
    mti_json_take(j, '{', "it does not begin with '{'");
    while (mti_json_next(j, &count, '}')) {
        mti_json_string(j, text, capacity);
        mti_json_take(j, ':', "a colon is missing");
        if (!j->error && strcmp(text, "weight_map") == 0)
            MT_TRY(mti_set_entries(ctx, b, directory, j, text, capacity, &entries));
        else mti_json_skip(j, 1);
    }
    mti_json_end(j);
    MT_TRY(mti_json_status(ctx, j, b->path, "JSON"));
    if (entries == b->tensors && entries > 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: names %lld tensors, its files have %lld", b->path, (long long)entries,
                   (long long)b->tensors);
}

/* Opens the files of the index DIRECTORY/NAME, whose path is b->path. */
static mt_status mti_set_open_index(mt_context *ctx, mt_safetensors_set *b, const char *directory, const char *name) {
    void *json, *text = NULL;
    size_t bytes;
    mti_json j;
    mt_status status = mti_text_read(ctx, directory, name, b->path, MTI_TEXT_MAX, &json, &bytes);
    if (status == MT_SUCCESS) status = mti_host_new(ctx, bytes + 1, &text);
    if (status == MT_SUCCESS) status = mti_keys_once(ctx, b->path, json, bytes);
    if (status == MT_SUCCESS) {
        j = mti_json_begin(json, bytes);
        status = mti_set_index(ctx, b, directory, &j, (char *)text, bytes + 1);
    }
    mt_host_free(json);
    mt_host_free(text);
    return status;
}

/* Opens the single file or the files of the index. The caller closes b, also after an error. */
static mt_status mti_set_open(mt_context *ctx, const char *directory, const char *stem, mt_safetensors_set *b) {
    char name[64];
    memset(b, 0, sizeof *b);
    if (strlen(stem) > 40)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s/%.40s...: a stem has at most 40 characters", directory, stem);
    snprintf(name, sizeof name, "%s.safetensors", stem);
    MT_TRY(mti_path(ctx, directory, name, b->path, sizeof b->path));
    if (mti_folder_has(b->path)) return mti_set_add(ctx, b, directory, name);
    snprintf(name, sizeof name, "%s.safetensors.index.json", stem);
    MT_TRY(mti_path(ctx, directory, name, b->path, sizeof b->path));
    if (mti_folder_has(b->path)) return mti_set_open_index(ctx, b, directory, name);
    return mt_fail(ctx, MT_ERR_IO, "%s: has neither %s.safetensors nor its index", directory, stem);
}

MT_API mt_status mt_safetensors_set_open(mt_context *ctx, const char *directory, const char *stem,
                                         mt_safetensors_set **out) {
    void *memory;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !stem || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_set_open: %s is NULL",
                       !directory ? "directory"
                       : !stem    ? "stem"
                                  : "out");
    *out = NULL;
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    status = mti_set_open(ctx, directory, stem, (mt_safetensors_set *)memory);
    if (status == MT_SUCCESS) *out = (mt_safetensors_set *)memory;
    else mt_safetensors_set_close((mt_safetensors_set *)memory);
    return status;
}

MT_API void mt_safetensors_set_close(mt_safetensors_set *set) {
    if (set) mti_set_close(set);
    mt_host_free(set);
}
