/* ---- >>tile: 16-bit tiles in shared memory, and their products on tensor cores ----------------------------------- */

#pragma once
#include "vector_loads.cuh"
#include "ptx.cuh"

#include "tile.cuh"

#define MTI_ARGS 12 /* maximum number of views of an operator */
