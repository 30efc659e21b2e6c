/* check_all.h - turns check mode on in every context of a test program: compile it with -include tests/check_all.h. */

#ifndef MT_TEST_CHECK_ALL_H
#define MT_TEST_CHECK_ALL_H

#include "mt_comm.h"

static inline mt_status test_checked_create(mt_comm *world, const mt_context_desc *desc, mt_context **out) {
    mt_context_desc checked = {.check = 1};
    if (desc) checked = *desc;
    checked.check = 1;
    return mt_context_create(world, &checked, out);
}

#define mt_context_create(world, desc, out) test_checked_create(world, desc, out)

#endif /* MT_TEST_CHECK_ALL_H */
