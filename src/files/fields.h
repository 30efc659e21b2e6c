/* ---- named values in files, for authors of importers and file formats -------------------------------------------- */

#pragma once
#include "checkpoint.h"
#include "safetensors.h"

/* These functions take the fields of the chapter "checkpoints" (mt_field). */

#define MT_FIELD_TEXT_MAX 32

/* Writes the value of a numeric field as text, as it is in the metadata of a file. The text has enough digits to read
   back the same value, and a decimal point in every locale. For MT_FIELD_TEXT, and when field or its value is NULL, the
   text is empty. */
MT_API void mt_field_text(const mt_field *field, char text[MT_FIELD_TEXT_MAX]);

/* Reads each field from the entry of the same name in a file's metadata. Ignores must_match.
   MT_ERR_DATA: there is no such entry, it is not a value of the field's kind and range, or it is a text that is longer
   than the field's array. The message names the file, the field, its value and what the value must be. After an error
   some fields may already have been written. MT_ERR_ARGUMENT: a field has no name, no value or an unknown kind,
   or is a text of 0 bytes. */
MT_API mt_status mt_safetensors_fields(mt_context *ctx, const mt_safetensors *file, const mt_field *fields, int count);

/* Returns MT_ERR_DATA with the message "FILE: its metadata has NAME 'VALUE', must be WANTED". VALUE is what the
   metadata has under `name`; without such an entry the message is "FILE: its metadata has no NAME". Use it to refuse a
   value that mt_safetensors_fields accepts. */
MT_API mt_status mt_safetensors_refuse(mt_context *ctx, const mt_safetensors *file, const char *name,
                                       const char *wanted);

/* Reads fields from the file DIRECTORY/NAME, a JSON object or list. A field that the object does not have stays as
   it is. Other members of the object are ignored. The field "a.b" is member b of the object that is member a, "a.b.c"
   member c of that, and "a.0" is the first element of the list that is member a. The file may be a list if a field is
   named "0" or "0.a", which is member a of its first element. A text that is longer than its array is truncated. Whole
   numbers must not be negative. NAME may have directories, such as "a/b.json". Links out of DIRECTORY are not followed,
   see mt_safetensors_set_open.
   When there is no such file, *exists becomes 0 and nothing is read; when exists is NULL, a missing file is MT_ERR_IO.
   MT_ERR_IO: the file cannot be read. MT_ERR_DATA: it is not JSON, an object has a key twice, a value is not of its
   field's kind or range, or member a is neither an object nor null although a field is named "a.b" (with a field "a.0"
   it may also be a list). After an error some fields may already have been written. MT_ERR_ARGUMENT: a field has no
   name, no value or an unknown kind, or is a text of 0 bytes. */
MT_API mt_status mt_json_read(mt_context *ctx, const char *directory, const char *name, const mt_field *fields,
                              int count, int *exists);

/* The same for a text in memory. `where` is what messages call it. With ctx NULL there is no message. */
MT_API mt_status mt_json_parse(mt_context *ctx, const char *where, const char *text, const mt_field *fields, int count);

/* Finds a member of the JSON object `text`: its value is text[*from] to text[*to - 1]. Returns 0 when the object has no
   such member or is not well-formed. Only the outermost members are found. */
MT_API int mt_json_find(const char *text, const char *name, size_t *from, size_t *to);

/* Reads the file DIRECTORY/NAME, a JSON object or list of at most `most` bytes. *text ends with a NUL; free it with
   mt_host_free. exists and the errors are those of mt_json_read; without a file, and after an error, *text is NULL. */
MT_API mt_status mt_json_text(mt_context *ctx, const char *directory, const char *name, size_t most, char **text,
                              int *exists);

/* A value in a text of JSON, or what is left of one: text[0] to text[bytes - 1]. */
typedef struct mt_json_part {
    const char *text;
    size_t bytes;
} mt_json_part;

/* Goes through the members of an object or the elements of a list, one in each call. *rest is the object or list before
   the first call, and what follows the member after each. *value becomes the value. name becomes the name of a member,
   or the text of an element that is a string, truncated to bytes - 1 bytes; for other elements it is empty. Returns 0
   at the end, for other values, and where the text is not well-formed. */
MT_API int mt_json_next(mt_json_part *rest, char *name, size_t bytes, mt_json_part *value);
