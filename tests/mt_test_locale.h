/* mt_test_locale.h - a locale with a comma as decimal point, for tests of code that prints and reads numbers. */

#ifndef MT_TEST_LOCALE_H
#define MT_TEST_LOCALE_H

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mt_test_scratch.h"

static inline int test_find_comma_locale(void) {
    static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "fr_FR.utf8", "de_DE", "fr_FR"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (setlocale(LC_NUMERIC, names[i]) && strcmp(localeconv()->decimal_point, ",") == 0) return 1;
    return 0;
}

/* Sets such a locale: an installed one, or one that it creates in the program's scratch folder. Returns 0 when neither
   is possible (Debian's package locales is missing). setlocale(LC_NUMERIC, "C") sets the default again. */
static inline int test_comma_locale(void) {
    char folder[SCRATCH_PATH], command[4 * SCRATCH_PATH];
    int found = test_find_comma_locale();
    if (found) return 1;
    print_to(folder, sizeof folder, "%s", in_scratch("locale"));
    print_to(command, sizeof command, "mkdir '%s' && localedef -i de_DE -f UTF-8 '%s/de_DE.UTF-8' >'%s/log' 2>&1",
             folder, folder, folder);
    if (system(command) == 0 && setenv("LOCPATH", folder, 1) == 0) found = test_find_comma_locale();
    unsetenv("LOCPATH");
    forget("locale");
    return found;
}

#endif /* MT_TEST_LOCALE_H */
