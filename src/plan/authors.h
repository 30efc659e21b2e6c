/* ---- machines, for authors of planners --------------------------------------------------------------------------- */

#pragma once
#include "plan.h"

/* mt_machine_create reads a machine from a text in memory, of at most 1 MiB; the caller destroys *out
   (mt_machine_destroy). The others return what its text has: its name, the peak FLOP/s of a type, and the bytes of
   memory of a rank. Errors: MT_ERR_ARGUMENT, MT_ERR_DATA (the message names the line), MT_ERR_MEMORY. */
MT_API mt_status mt_machine_create(mt_context *ctx, const char *text, mt_machine **out);
MT_API const char *mt_machine_name(const mt_machine *machine);            /* "" if the text has none */
MT_API double mt_machine_peak(const mt_machine *machine, mt_dtype dtype); /* FLOP/s; 0 if the text has none */
MT_API double mt_machine_capacity(const mt_machine *machine);             /* bytes; 0 if the text has none */

/* Predicts the seconds of one entry by itself; 0 for the entries of overlaps. Errors: MT_ERR_ARGUMENT (also: a field of
   *entry is not valid), MT_ERR_DATA (the machine has no rate for the entry). */
MT_API mt_status mt_machine_seconds(mt_context *ctx, const mt_machine *machine, const mt_trace_entry *entry,
                                    double *seconds);
