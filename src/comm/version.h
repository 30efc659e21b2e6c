/* ---- version ----------------------------------------------------------------------------------------------------- */

#pragma once
#include "api.h"

/* The version of the four headers. */
#define MT_VERSION_MAJOR 0
#define MT_VERSION_MINOR 5
#define MT_VERSION_PATCH 0
#define MT_VERSION "0.5.0"
#define MT_VERSION_NUMBER (MT_VERSION_MAJOR * 1000000 + MT_VERSION_MINOR * 1000 + MT_VERSION_PATCH)

/* Returns the MT_VERSION_NUMBER of the linked implementation. When a caller was compiled with headers of another
   version, mt_context_create returns MT_ERR_UNSUPPORTED. */
MT_API int mt_version(void);
