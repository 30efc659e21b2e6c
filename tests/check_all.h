/* check_all.h - turns check mode on in every context of a test program: compile it with -include tests/check_all.h.
   With MT_TEST_CHECK=2 in the environment, contexts compare values, too; 1, or no variable: they do not. The program
   ends when the variable has another value. */

#ifndef MT_TEST_CHECK_ALL_H
#define MT_TEST_CHECK_ALL_H

#include "mt_comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline int test_check_of_environment(void) {
    const char *value = getenv("MT_TEST_CHECK");
    if (!value || strcmp(value, "1") == 0) return 1;
    if (strcmp(value, "2") == 0) return 2;
    fprintf(stderr, "MT_TEST_CHECK is '%s', must be 1 or 2\n", value);
    exit(1);
}

static inline mt_status test_checked_create(mt_comm *world, const mt_context_desc *desc, mt_context **out) {
    const int check = test_check_of_environment();
    mt_context_desc checked = {.check = check};
    if (desc) checked = *desc;
    /* a meta context is in check mode anyway */
    if (checked.device != MT_DEVICE_META && !checked.check) checked.check = check;
    return mt_context_create(world, &checked, out);
}

#define mt_context_create(world, desc, out) test_checked_create(world, desc, out)

#endif /* MT_TEST_CHECK_ALL_H */
