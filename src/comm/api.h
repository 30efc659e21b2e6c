/* ---- linkage ----------------------------------------------------------------------------------------------------- */

#pragma once

#include <stddef.h>
#include <stdint.h>

#ifndef MT_API
#define MT_API extern
#endif
