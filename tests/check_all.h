/* check_all.h - turns check mode on in every context of a test program: compile it with -include tests/check_all.h.
   With MT_TEST_CHECK=2 in the environment, contexts compare values, too. */

#ifndef MT_TEST_CHECK_ALL_H
#define MT_TEST_CHECK_ALL_H

#include "mt_comm.h"

#include <stdlib.h>

static inline mt_status test_checked_create(mt_comm *world, const mt_context_desc *desc, mt_context **out) {
    const char *value = getenv("MT_TEST_CHECK");
    const int check = value ? atoi(value) : 1;
    mt_context_desc checked = {.check = check};
    if (desc) checked = *desc;
    /* a meta context is in check mode anyway */
    if (checked.device != MT_DEVICE_META && !checked.check) checked.check = check;
    return mt_context_create(world, &checked, out);
}

#define mt_context_create(world, desc, out) test_checked_create(world, desc, out)

#endif /* MT_TEST_CHECK_ALL_H */
