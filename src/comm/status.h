/* ---- status ------------------------------------------------------------------------------------------------------ */

#pragma once
#include "api.h"

#define MT_STATUS_LIST(X)                                                                                              \
    X(MT_SUCCESS, 0, "success")                                                                                        \
    X(MT_ERR_ARGUMENT, -1, "invalid argument")                                                                         \
    X(MT_ERR_SHAPE, -2, "shapes do not fit together")                                                                  \
    X(MT_ERR_DTYPE, -3, "data type not accepted here")                                                                 \
    X(MT_ERR_UNSUPPORTED, -4, "not built or not supported")                                                            \
    X(MT_ERR_MEMORY, -5, "out of memory")                                                                              \
    X(MT_ERR_DATA, -6, "data out of range")                                                                            \
    X(MT_ERR_MISMATCH, -7, "ranks made different calls, or have different settings")                                   \
    X(MT_ERR_TIMEOUT, -8, "a rank did not arrive in time")                                                             \
    X(MT_ERR_PEER, -9, "a peer rank is gone or failed")                                                                \
    X(MT_ERR_IO, -10, "input/output error")                                                                            \
    X(MT_ERR_SYSTEM, -11, "an operating system call failed")

#define MTI_STATUS_ENUM(name, value, text) name = value,
typedef enum mt_status { MT_STATUS_LIST(MTI_STATUS_ENUM) } mt_status;
#undef MTI_STATUS_ENUM

/* Name ("MT_ERR_SHAPE") and meaning ("shapes do not fit together") of a status. Static strings, never NULL. */
MT_API const char *mt_status_name(mt_status status);
MT_API const char *mt_status_string(mt_status status);

/* MT_TRY makes the enclosing function return the status of `call`, unless this status is MT_SUCCESS. MT_KEEP is for
   clean-up, where every call must run: it stores the status of `call` in the variable `first` if `first` is still
   MT_SUCCESS. Set `first` to MT_SUCCESS before the first MT_KEEP. */
#define MT_TRY(call)                                                                                                   \
    do {                                                                                                               \
        mt_status mt_try_status_ = (call);                                                                             \
        if (mt_try_status_ != MT_SUCCESS) return mt_try_status_;                                                       \
    } while (0)
#define MT_KEEP(first, call)                                                                                           \
    do {                                                                                                               \
        mt_status mt_keep_status_ = (call);                                                                            \
        if ((first) == MT_SUCCESS) (first) = mt_keep_status_;                                                          \
    } while (0)
