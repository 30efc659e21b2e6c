/* ---- numbers of a call, for check mode --------------------------------------------------------------------------- */

#pragma once
#include "system.h"
#include "../check/authors.h"

#define MTI_NUMBERS 16

/* Takes `count` doubles of a list. Returns how many there are room for. */
static int mti_numbers_take(va_list list, int count, double *numbers) {
    int i;
    for (i = 0; i < count && i < MTI_NUMBERS; i++) numbers[i] = va_arg(list, double);
    return i;
}

/* Notes numbers of a call, which must be the same on all ranks. t and data: see mt_check_numbers. */
static mt_status mti_numbers_agree(mt_context *ctx, const char *where, const char *what, mt_tensor t, int data,
                                   int count, ...) {
    double numbers[MTI_NUMBERS];
    va_list list;
    if (mt_check_mode(ctx) != 2) return MT_SUCCESS;
    va_start(list, count);
    count = mti_numbers_take(list, count, numbers);
    va_end(list);
    return mt_check_numbers(ctx, where, what, t, data, numbers, count);
}

/* Notes from which numbers a tensor is made. */
static void mti_made(mt_context *ctx, mt_tensor t, int count, ...) {
    double numbers[MTI_NUMBERS];
    va_list list;
    if (!mt_check_mode(ctx)) return;
    va_start(list, count);
    count = mti_numbers_take(list, count, numbers);
    va_end(list);
    mt_check_content(ctx, t, mt_check_content_of(numbers, count));
}
