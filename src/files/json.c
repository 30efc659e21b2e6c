/* ---- JSON -------------------------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.c"
#include "../ops/system.h"
#include "../parallel/system.h"

#define MTI_JSON_DEPTH 64
#define MTI_TEXT_MAX ((size_t)100000000) /* bytes, as for the header of a safetensors file */

/* Reads a JSON text (RFC 8259) from front to back. After the first error every call fails, and the position stays. */
typedef struct mti_json {
    const unsigned char *start, *at, *end;
    const char *error;     /* what is wrong at `at`; NULL: no error so far */
    size_t named;          /* bytes of the field's name that name the value which is wrong; 0: all */
    struct mti_keys *keys; /* NULL, or where mti_json_skip lists the keys of all objects */
} mti_json;

static mti_json mti_json_begin(const void *text, size_t bytes) {
    mti_json j;
    j.start = j.at = (const unsigned char *)text;
    j.end = j.start + bytes;
    j.error = NULL;
    j.named = 0;
    j.keys = NULL;
    return j;
}

static int mti_json_fail(mti_json *j, const char *what) {
    if (!j->error) j->error = what;
    return 0;
}

/* Skips white space and returns the next character, or -1 at the end and after an error. */
static int mti_json_peek(mti_json *j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r')) j->at++;
    return j->error || j->at == j->end ? -1 : *j->at;
}

/* Skips white space and the character c. When another character comes, the error is `what`. */
static int mti_json_take(mti_json *j, char c, const char *what) {
    if (mti_json_peek(j) != c) return mti_json_fail(j, what);
    j->at++;
    return 1;
}

/* Returns 1 when an object or array has another value after *count values. Its opening bracket has already been read.
   Reads the comma or the closing bracket. */
static int mti_json_next(mti_json *j, int *count, char close) {
    if (mti_json_peek(j) == close) {
        j->at++;
        return 0;
    }
    if (*count > 0 && !mti_json_take(j, ',', "a comma or a closing bracket is missing")) return 0;
    ++*count;
    return !j->error;
}

/* Returns the number of bytes of the character at p, or 0 when it is not well-formed (Unicode, table 3-7). */
static int mti_utf8_bytes(const unsigned char *p, const unsigned char *end) {
    int n = p[0] < 0x80 ? 1 : p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf5 ? 4 : 0, i;
    int low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80, high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    if (end - p < n) return 0;
    if (n > 1 && (p[1] < low || p[1] > high)) return 0;
    for (i = 2; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return n;
}

/* Writes a character as UTF-8 to out and returns the number of bytes. */
static int mti_utf8_encode(uint32_t c, char *out) {
    static const unsigned char first[] = {0, 0, 0xc0, 0xe0, 0xf0};
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4, i;
    for (i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)(first[n] | c);
    return n;
}

/* Reads four hexadecimal digits. */
static uint32_t mti_json_hex(mti_json *j) {
    uint32_t x = 0;
    int i;
    for (i = 0; i < 4; i++, j->at++) {
        int c = j->at < j->end ? *j->at : 0, digit = c >= '0' && c <= '9'                 ? c - '0'
                                                     : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                                                          : -1;
        if (digit < 0) return (uint32_t)mti_json_fail(j, "\\u is not followed by four hexadecimal digits");
        x = x << 4 | (uint32_t)digit;
    }
    return x;
}

/* Reads what follows a backslash and returns the character. */
static uint32_t mti_json_escape(mti_json *j) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    int c = j->at < j->end ? *j->at++ : 0;
    const char *found = c ? strchr(from, c) : NULL;
    uint32_t high, low;
    if (found) return (uint32_t)(unsigned char)to[found - from];
    if (c != 'u') return (uint32_t)mti_json_fail(j, "no such escape");
    high = mti_json_hex(j);
    if (high == 0 && !j->error) mti_json_fail(j, "a NUL character in a string");
    if (high < 0xd800 || high > 0xdfff) return high;
    if (high < 0xdc00 && j->end - j->at >= 2 && j->at[0] == '\\' && j->at[1] == 'u') {
        j->at += 2;
        low = mti_json_hex(j);
        if (low >= 0xdc00 && low <= 0xdfff) return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
    }
    return (uint32_t)mti_json_fail(j, "half a surrogate pair");
}

/* Reads the next string and decodes it into out, as far as it fits into `capacity` bytes with a NUL. Returns the number
   of bytes of the whole decoded string, without the NUL. The quoted string in the text has at least two bytes more. */
static size_t mti_json_string(mti_json *j, char *out, size_t capacity) {
    size_t length = 0;
    char c[4];
    int n;
    if (capacity > 0) out[0] = 0;
    if (!mti_json_take(j, '"', "a string is missing")) return 0;
    while (!j->error && j->at < j->end && *j->at != '"') {
        if (*j->at == '\\') {
            j->at++;
            n = mti_utf8_encode(mti_json_escape(j), c);
        } else {
            n = mti_utf8_bytes(j->at, j->end);
            if (n == 0) mti_json_fail(j, "this is not UTF-8");
            else if (*j->at < 0x20) mti_json_fail(j, "a control character in a string");
            memcpy(c, j->at, (size_t)n);
            j->at += n;
        }
        if (j->error) break;
        if (length + (size_t)n < capacity) {
            memcpy(out + length, c, (size_t)n);
            out[length + (size_t)n] = 0;
        }
        length += (size_t)n;
    }
    if (!j->error && j->at == j->end) mti_json_fail(j, "a string does not end");
    if (j->error) return 0;
    j->at++;
    return length;
}

static int mti_json_digit(const mti_json *j) { return j->at < j->end && *j->at >= '0' && *j->at <= '9'; }

/* Reads a whole number from 0 to `most`, without sign, fraction or exponent. */
static uint64_t mti_json_up_to(mti_json *j, uint64_t most) {
    uint64_t x = 0;
    int first = mti_json_peek(j);
    if (first < '0' || first > '9') return (uint64_t)mti_json_fail(j, "a whole number is missing");
    if (first == '0') j->at++; /* no digit may follow a leading 0 */
    for (; first != '0' && mti_json_digit(j); j->at++) {
        uint64_t digit = (uint64_t)(*j->at - '0');
        if (x > (most - digit) / 10) return (uint64_t)mti_json_fail(j, "a number is too large");
        x = 10 * x + digit;
    }
    if (mti_json_digit(j) || (j->at < j->end && (*j->at == '.' || (*j->at | 32) == 'e')))
        return (uint64_t)mti_json_fail(j, "a number is not whole");
    return x;
}

static int64_t mti_json_whole(mti_json *j) { return (int64_t)mti_json_up_to(j, (uint64_t)INT64_MAX); }

/* The digits of a number without a point, for strtod. Every double lies exactly between two others at a number of at
   most 767 digits, so further digits only matter when one of them is not 0. */
#define MTI_DIGITS_MAX 768
typedef struct mti_digits {
    char text[MTI_DIGITS_MAX + 32]; /* has space for an exponent */
    int count, scale;               /* the number is text * 10^scale */
    int more;                       /* 1: a digit that was dropped is not 0 */
} mti_digits;

/* Appends the digits that follow. Zeros before the first other digit are left out. */
static void mti_json_digits(mti_json *j, int fraction, mti_digits *d) {
    if (!mti_json_digit(j)) mti_json_fail(j, "a digit is missing");
    for (; mti_json_digit(j); j->at++) {
        int begins = d->count > 0 || *j->at != '0', fits = d->count < MTI_DIGITS_MAX;
        if (begins && fits) d->text[d->count++] = (char)*j->at;
        else if (begins && *j->at != '0') d->more = 1;
        d->scale += fraction ? -(fits || !begins) : begins && !fits;
    }
}

/* Reads an exponent, if one comes next. */
static int mti_json_exponent(mti_json *j) {
    int exponent = 0, sign = 1;
    if (j->error || j->at == j->end || (*j->at | 32) != 'e') return 0;
    j->at++;
    if (j->at < j->end && (*j->at == '+' || *j->at == '-')) sign = *j->at++ == '-' ? -1 : 1;
    if (!mti_json_digit(j)) mti_json_fail(j, "a digit is missing");
    for (; mti_json_digit(j); j->at++)
        if (exponent < (int)MTI_TEXT_MAX) exponent = 10 * exponent + (*j->at - '0');
    return sign * exponent;
}

/* Reads a number, as the nearest double. strtod gets no point, which in its text would depend on the locale. */
static double mti_json_number(mti_json *j) {
    int negative = mti_json_peek(j) == '-', exponent, error = errno;
    mti_digits d;
    double x;
    d.count = d.scale = d.more = 0;
    if (negative) j->at++;
    if (j->at + 1 < j->end && j->at[0] == '0' && j->at[1] >= '0' && j->at[1] <= '9')
        mti_json_fail(j, "a number begins with 0");
    mti_json_digits(j, 0, &d);
    if (!j->error && j->at < j->end && *j->at == '.') {
        j->at++;
        mti_json_digits(j, 1, &d);
    }
    exponent = mti_json_exponent(j);
    if (j->error) return 0;
    if (d.more) d.scale--;
    snprintf(d.text + d.count, sizeof d.text - (size_t)d.count, "%se%d", d.more ? "1" : "", d.scale + exponent);
    x = d.count > 0 ? strtod(d.text, NULL) : 0;
    errno = error; /* strtod sets it for results that are subnormal or infinite */
    return negative ? -x : x;
}

/* Reads `word` if it comes next; returns 0 if not. */
static int mti_json_word(mti_json *j, const char *word) {
    size_t n = strlen(word);
    if (mti_json_peek(j) != word[0] || (size_t)(j->end - j->at) < n || memcmp(j->at, word, n) != 0) return 0;
    j->at += n;
    return 1;
}

static void mti_keys_read(mti_json *j, size_t object);

/* Skips a value of any kind. */
static void mti_json_skip(mti_json *j, int depth) {
    int c = mti_json_peek(j), count = 0, object = c == '{';
    size_t begin = (size_t)(j->at - j->start);
    if (c == '"') {
        mti_json_string(j, NULL, 0);
    } else if (object || c == '[') {
        if (depth >= MTI_JSON_DEPTH) mti_json_fail(j, "brackets are nested too deeply");
        else j->at++;
        while (mti_json_next(j, &count, object ? '}' : ']')) {
            if (object) mti_keys_read(j, begin);
            if (object) mti_json_take(j, ':', "a colon is missing");
            mti_json_skip(j, depth + 1);
        }
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        mti_json_number(j);
    } else if (!mti_json_word(j, "true") && !mti_json_word(j, "false") && !mti_json_word(j, "null")) {
        mti_json_fail(j, "a value is missing");
    }
}

/* Checks that only white space is left. */
static void mti_json_end(mti_json *j) {
    if (mti_json_peek(j) >= 0) mti_json_fail(j, "something follows the end");
}

static mt_status mti_json_status(mt_context *ctx, const mti_json *j, const char *path, const char *what) {
    if (!j->error) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: %s, byte %lld: %s", path, what, (long long)(j->at - j->start), j->error);
}
