/* ---- names of statuses and types --------------------------------------------------------------------------------- */

#pragma once
#include "status.h"
#include "types.h"

/* clang-format off */
#define MTI_STATUS_NAME(name, value, text) case name: return #name;
#define MTI_STATUS_TEXT(name, value, text) case name: return text;
/* clang-format on */

MT_API const char *mt_status_name(mt_status status) {
    switch (status) { MT_STATUS_LIST(MTI_STATUS_NAME) }
    return "MT_ERR_?";
}

MT_API const char *mt_status_string(mt_status status) {
    switch (status) { MT_STATUS_LIST(MTI_STATUS_TEXT) }
    return "no such status";
}

#undef MTI_STATUS_NAME
#undef MTI_STATUS_TEXT

MT_API size_t mt_dtype_size(mt_dtype dtype) {
    switch (dtype) {
    case MT_F32: return 4;
    case MT_BF16: return 2;
    case MT_F16: return 2;
    case MT_I32: return 4;
    case MT_U8: return 1;
    }
    return 0;
}

MT_API const char *mt_dtype_name(mt_dtype dtype) {
    switch (dtype) {
    case MT_F32: return "f32";
    case MT_BF16: return "bf16";
    case MT_F16: return "f16";
    case MT_I32: return "i32";
    case MT_U8: return "u8";
    }
    return "no such dtype";
}

/* A message is one line, also when a name in it, such as one from a file, has a newline. */
static void mti_one_line(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || *text == 127) *text = '?';
}
