/* planted.h - which of the bugs that plant.pl put into a copy of the headers is there: the one that MT_PLANTED says. */
#ifndef MT_TEST_PLANTED_H
#define MT_TEST_PLANTED_H

#include <stdlib.h>

/* A kernel that the engine's checker watches may ask, too: this is no memory of the program's. */
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
