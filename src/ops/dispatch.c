/* ---- the begin and the end of an operator ------------------------------------------------------------------------ */

#pragma once
#include "move.h"
#include "check.c"
#include "16bit.c"
#include "rules.c"

/* How an operator runs. It has a table of its arguments, which mt_args_check checks. Between mti_begin and mti_end,
   MTI_RUN launches a kernel on CUDA or calls a loop on a CPU. On a meta context nothing is computed. A meta context
   that plans for CUDA calls the function that launches, which only takes its scratch memory and returns MT_PLANNED. If
   the first view of the table is empty, the operator does nothing.

   Kernels read and write every type. Loops compute in f32. Most of them take views in their own type (MTI_AS_IS), and
   widen and round blocks of them (mti_f32_read). Without MTI_AS_IS, mti_begin replaces a 16-bit view of type
   MT_ARG_FLOAT by an f32 copy in the arena on a CPU. It fills the copy if the view is read (MT_ARG_IN). mti_end rounds
   the copy back if the view is written (MT_ARG_OUT).

   mti_end adds op->work to the trace of a meta context. mti_begin fills it in for an operator that reads and writes its
   views once. Other operators change it between the two calls. */
#define MTI_COUNT(args) ((int)(sizeof(args) / sizeof *(args)))
#define MTI_AS_IS 8 /* with the values of mt_arg.use */

typedef struct mti_operator {
    mt_context *ctx;
    const mt_arg *args;
    int count;
    int on_cuda, on_cpu;       /* where the operator runs; both are 0 if there is nothing to do */
    size_t mark;               /* the arena mark before the copies */
    mt_tensor given[MTI_ARGS]; /* the 16-bit views that have copies; data is NULL for the others */
    mt_trace_entry work;       /* name is NULL if there is nothing to do */
} mti_operator;

/* Rounds the results back to 16 bits and releases all arena memory, including what the operator itself took. */
static mt_status mti_end(mti_operator *op, mt_status status) {
    int i;
    if (status == MT_PLANNED) status = MT_SUCCESS;
    for (i = 0; status == MT_SUCCESS && op->on_cpu && i < op->count; i++)
        if (op->given[i].data && (op->args[i].use & MT_ARG_OUT))
            mti_cpu_convert(op->ctx, *op->args[i].view, op->given[i]);
    if (status == MT_SUCCESS && op->work.name) mt_trace_add(op->ctx, &op->work);
    mt_arena_release(op->ctx, op->mark);
    return status;
}

/* The bytes of all elements of a view, read or written once. */
static double mti_view_bytes(mt_tensor t) {
    return t.data ? (double)t.rows * (double)t.cols * (double)mt_dtype_size(t.dtype) : 0.0;
}

/* The bytes of the views that an operator reads and writes, without those of f32 copies. */
static double mti_work_bytes(const mt_arg *args, int count) {
    double bytes = 0.0;
    int i;
    for (i = 0; i < count; i++)
        bytes += (((args[i].use & MT_ARG_IN) != 0) + ((args[i].use & MT_ARG_OUT) != 0)) * mti_view_bytes(*args[i].view);
    return bytes;
}

/* Replaces *arg->view by an f32 copy if the loop needs one. *given is then the 16-bit view, otherwise mt_none(). */
static mt_status mti_widen(mti_operator *op, const mt_arg *arg, mt_tensor *given) {
    mt_tensor t = *arg->view;
    *given = mt_none();
    if (!t.data || t.dtype == MT_F32 || arg->type != MT_ARG_FLOAT || (arg->use & MTI_AS_IS)) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(op->ctx, MT_F32, t.rows, t.cols, arg->view));
    if ((arg->use & MT_ARG_IN) && op->on_cpu) mti_cpu_convert(op->ctx, t, *arg->view);
    *given = t;
    return MT_SUCCESS;
}

/* As mti_begin, for an operator that applies its rule itself. */
static mt_status mti_begin_ruled(mti_operator *op, mt_context *ctx, const char *name, const mt_arg *args, int count) {
    int i, runs = count == 0 || !mti_is_empty(*args[0].view);
    mt_status status = MT_SUCCESS;
    op->ctx = ctx;
    op->args = args;
    op->on_cuda = runs && mt_context_planned(ctx) == MT_DEVICE_CUDA;
    op->on_cpu = runs && mt_context_device(ctx) == MT_DEVICE_CPU;
    op->count = runs && !op->on_cuda ? count : 0;
    op->mark = mt_arena_mark(ctx);
    memset(&op->work, 0, sizeof op->work);
    if (runs && !mt_context_has_data(ctx)) {
        op->work.name = name;
        op->work.dtype = count ? args[0].view->dtype : MT_F32;
        op->work.bytes = mti_work_bytes(args, count);
    }
    for (i = 0; i < op->count; i++)
        if (args[i].use & MT_ARG_OUT) mti_packed_drop(ctx, *args[i].view);
    for (i = 0; status == MT_SUCCESS && i < op->count; i++) status = mti_widen(op, &args[i], &op->given[i]);
    return status == MT_SUCCESS ? status : mti_end(op, status);
}

/* Applies the operator's rule, fills op and makes the f32 copies. If mti_begin fails, the caller must not call mti_end.
   An operator without arguments (count 0) always runs. `name` is that of the public function. */
static mt_status mti_begin(mti_operator *op, mt_context *ctx, const char *name, const mt_arg *args, int count) {
    int runs = count == 0 || !mti_is_empty(*args[0].view);
    if (runs) MT_TRY(mti_apply_rule_of(ctx, name, args, count));
    return mti_begin_ruled(op, ctx, name, args, count);
}

/* The same with another rule than that of mti_rules, unless it is NULL. */
static mt_status mti_begin_with(mti_operator *op, mt_context *ctx, const char *name, const mt_rule *rule,
                                const mt_arg *args, int count) {
    if (!rule) return mti_begin(op, ctx, name, args, count);
    if (mt_check_mode(ctx) && !mti_is_empty(*args[0].view)) MT_TRY(mti_apply_rule(ctx, name, rule, args, count));
    return mti_begin_ruled(op, ctx, name, args, count);
}

/* rooms [threads * rows, cols] = scratch memory for a loop, `rows` rows for each thread, or mt_none() if rows is 0. A
   meta context allocates it, too. */
static mt_status mti_rooms(mti_operator *op, int64_t rows, int64_t cols, mt_tensor *rooms) {
    *rooms = mt_none();
    if (op->count == 0 || rows == 0) return MT_SUCCESS;
    return mt_arena_tensor(op->ctx, MT_F32, mt_context_threads(op->ctx) * rows, cols, rooms);
}

/* `launch` and `loop` are expressions. In MTI_CHOOSE both have the type mt_status, and a meta context that does not
   plan for CUDA evaluates `loop`. In MTI_RUN `loop` is void, and no meta context evaluates it. */
#if MT_HAS_CUDA
#define MTI_CHOOSE(op, launch, loop) ((op)->on_cuda ? (launch) : (loop))
#else
#define MTI_CHOOSE(op, launch, loop) (loop) /* no context is on MT_DEVICE_CUDA */
#endif
#define MTI_RUN(op, launch, loop) MTI_CHOOSE(op, launch, (op)->on_cpu ? ((loop), MT_SUCCESS) : MT_SUCCESS)
