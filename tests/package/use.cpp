#include "use.c" /* the same program, compiled as C++ */
