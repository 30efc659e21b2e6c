/* ---- comparing settings between ranks ---------------------------------------------------------------------------- */

#pragma once
#include "context.h"

/* A setting that should have the same value on all ranks, for instance a command-line flag, or a file name with a hash
   of the file's content as value. The strings belong to the caller and are needed only during mt_comm_compare. */
typedef struct mt_setting {
    const char *name, *value;
} mt_setting;

/* Compares settings between ranks, so that processes started with different flags or data do not train together.
   mt_params_init and mt_optimizer_create compare their own arguments this way. A program compares its flags:
       char lr[32]; snprintf(lr, sizeof lr, "%.9g", flags.lr);
       mt_setting told[] = {{"--lr", lr}, {"--data", hash_of_data}};
       MT_TRY(mt_comm_compare(ctx, world, "my_program", 0, told, 2));
   All ranks with the same number `group` must pass the same settings, in the same order. Pass 0 on every rank when all
   ranks must agree. When settings differ, every rank of comm gets MT_ERR_MISMATCH, also the ranks of other groups. The
   message starts with `what` and names the first setting that differs, two of its values and their ranks. comm stays
   usable. Collective over comm: an all_gather of 16 bytes per rank, which the ledger counts. The settings themselves
   are sent only when their hashes differ. In a group of one and on a meta communicator nothing is sent.
   Errors: MT_ERR_ARGUMENT (NULL, negative count), MT_ERR_MEMORY, and those of a collective. */
MT_API mt_status mt_comm_compare(mt_context *ctx, mt_comm *comm, const char *what, int group,
                                 const mt_setting *settings, int count);
