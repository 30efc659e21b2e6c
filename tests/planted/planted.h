/* planted.h - selects one of the bugs that plant.pl has put into a copy of the headers: the one with number
   MT_PLANTED. */
#ifndef MT_TEST_PLANTED_H
#define MT_TEST_PLANTED_H

#include <stdlib.h>

/* Kernels under the engine's checker call mti_planted, too. The checker must not report mti_planted_number as host
   memory. */
#if defined(__SANITIZE_THREAD__)
#define MTI_PLANTED_UNSEEN __attribute__((no_sanitize_thread, noinline))
#else
#define MTI_PLANTED_UNSEEN
#endif

static int mti_planted_number;

__attribute__((constructor)) static void mti_planted_read(void) {
    const char *number = getenv("MT_PLANTED");
    mti_planted_number = number ? atoi(number) : 0;
}

__attribute__((unused)) MTI_PLANTED_UNSEEN static int mti_planted(int number) { return number == mti_planted_number; }

#endif
