/* mt_test_message.h - what a message of the library must look like: one sentence, made of parts.

       [PLACE: ]what is wrong[: what is right, or what to do]

   PLACE is a function ("mt_gemm", "mt_add after \"fc1\""), a collective call ("barrier on \"world\" (4 ranks)") or a
   file. It stands once, in front. What another rank or an earlier call has said is a quotation: it stands in brackets,
   behind what happened ("rank 2 failed with MT_ERR_DATA (loss is 17)"). Names of users stand between ' or ". */

#ifndef MT_TEST_MESSAGE_H
#define MT_TEST_MESSAGE_H

#include <ctype.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define TEST_MESSAGE_BYTES 2048

/* Returns the end of the quotation that begins at `at`, or NULL when none begins there, as with the one of "rank's". */
static inline const char *test_message_quote(const char *text, const char *at) {
    if (*at != '"' && *at != '\'') return NULL;
    if (*at == '\'' && at > text && isalnum((unsigned char)at[-1])) return NULL;
    return strchr(at + 1, *at);
}

/* Copies the text without what is between quotation marks or brackets; the marks stay. A bracket that is not closed, or
   not open, is *depth != 0. "[4, 10)" are brackets, too. */
static inline void test_message_plain(const char *text, char *plain, int *depth) {
    size_t n = 0;
    *depth = 0;
    for (const char *at = text; *at && n < TEST_MESSAGE_BYTES - 3; at++) {
        const char *end = test_message_quote(text, at);
        int opens = strchr("([", *at) != NULL, closes = strchr(")]", *at) != NULL;
        if (end) {
            if (*depth == 0) plain[n++] = *at, plain[n++] = *at;
            at = end;
            continue;
        }
        *depth -= closes;
        if (*depth == 0) plain[n++] = *at;
        if (*depth < 0) break;
        *depth += opens;
    }
    plain[n] = '\0';
}

static inline int test_message_has_blank_end(const char *text) {
    const char last = text[0] ? text[strlen(text) - 1] : ' ';
    return strchr(" ,;:", text[0]) || strchr(" ,;:.!?", last);
}

/* Two marks with nothing between them, or a blank before a mark or after another blank. */
static inline int test_message_has_gap(const char *plain) {
    for (const char *at = plain; at[0]; at++) {
        const char next = at[0] == ' ' ? at[1] : at[1] == ' ' && strchr(",;:", at[0]) ? at[2] : at[1];
        if (strchr(" ,;:", at[0]) && next && strchr(" ,;:", next) && !(strchr(",;:", at[0]) && next == ' ')) return 1;
    }
    return 0;
}

/* A full stop, or a similar mark, with text behind it. */
static inline int test_message_has_stop(const char *plain) {
    for (const char *at = plain; at[0] && at[1]; at++)
        if (strchr(".!?", at[0]) && at[1] == ' ') return 1;
    return 0;
}

/* The same word twice in a row. */
static inline int test_message_has_echo(const char *plain) {
    const char *last = NULL;
    size_t length = 0;
    for (const char *at = plain; *at;) {
        size_t n = 0;
        while (isalpha((unsigned char)at[n])) n++;
        if (n && last && n == length && strncmp(last, at, n) == 0 && !isalnum((unsigned char)at[n]) && at[n] != '_')
            return 1;
        last = n && at[n] == ' ' && (at == plain || at[-1] == ' ') ? at : NULL;
        length = n;
        at += n ? n + (at[n] == ' ') : 1;
    }
    return 0;
}

/* "mt_x: " behind the beginning: the place of another message. */
static inline int test_message_has_function(const char *plain) {
    for (const char *at = plain + 1; plain[0] && (at = strstr(at, "mt_")) != NULL; at++) {
        size_t n = 0;
        if (isalnum((unsigned char)at[-1]) || at[-1] == '_') continue;
        while (isalnum((unsigned char)at[n]) || at[n] == '_') n++;
        if (at[n] == ':' && at[n + 1] == ' ') return 1;
    }
    return 0;
}

static inline int test_message_count(const char *text, const char *part) {
    int n = 0;
    for (; (text = strstr(text, part)) != NULL; text++) n++;
    return n;
}

/* "MT_ERR_X: " anywhere. */
static inline int test_message_has_status(const char *text) {
    for (const char *at = text; (at = strstr(at, "MT_ERR_")) != NULL; at++)
        if (at[strspn(at, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_")] == ':') return 1;
    return 0;
}

/* Returns what is wrong with a message, or NULL. */
static inline const char *test_message_fault(const char *text) {
    char plain[TEST_MESSAGE_BYTES];
    int depth;
    test_message_plain(text, plain, &depth);
    if (!*text) return "it is empty";
    if (strlen(text) >= TEST_MESSAGE_BYTES / 2 - 1) return "it is cut";
    if (strpbrk(text, "\n\r\t")) return "it has more than one line";
    if (strstr(text, "(null)")) return "it prints NULL";
    if (test_message_has_blank_end(text)) return "it begins or ends with a blank or a mark";
    if (depth != 0) return "a bracket is missing";
    if (test_message_has_gap(plain)) return "nothing is between two marks or blanks";
    if (test_message_has_stop(plain)) return "it is more than one sentence";
    if (test_message_has_echo(plain)) return "a word is in it twice in a row";
    if (test_message_has_status(text)) return "a status and its message are in it";
    if (test_message_has_function(plain) || test_message_count(plain, "on \"\" (): ") > 1)
        return "the place of another message is in it";
    if (test_message_count(plain, ": call ") > 1) return "it says twice what to do";
    return NULL;
}

#endif /* MT_TEST_MESSAGE_H */
