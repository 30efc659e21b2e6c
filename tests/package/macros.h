/* Macros that a program may have defined before it includes megatron.h: those of system headers, windows.h, X11 and
   termios, and its own. The test includes tgmath.h and complex.h themselves. Other headers are not on every machine, so
   this file defines their macros. */
#ifndef TESTS_PACKAGE_MACROS_H
#define TESTS_PACKAGE_MACROS_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* macros with arguments, named like functions and members */
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define abs(x) ((x) < 0 ? -(x) : (x))
#define alloc(n) (malloc)(n)
#define free(p) (free)(p)
#define error(n) (perror)(n)
#define check(x) ((void)(x))
#define assert(x) ((void)0)
#define major(device) ((device) >> 8)
#define minor(device) ((device)&255)
#define timeout(delay) ((void)(delay))
#define index(s, c) strchr(s, c)
#define swap(a, b) ((void)0)
#define bit(n) (1u << (n))
#define TRY(x) ((void)(x))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* macros without arguments */
#ifndef I
#define I 1
#endif
#define B0 0
#define D 64
#define E 2.718281828
#define K 16
#define L 12
#define M 128
#define N 1024
#define PI 3.14159265
#define S 2
#define T 32
#define X 0
#define OK 0
#define ERR (-1)
#define ERROR 0
#define TRUE 1
#define FALSE 0
#define DEBUG 1
#define IN
#define OUT
#define None 0L
#define Success 0
#define Bool int
#define Status int
#define far
#define near
#define small char
#define interface struct
#define huge
#ifndef unix
#define unix 1
#endif
#ifndef linux
#define linux 1
#endif

#endif
