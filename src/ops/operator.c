/* ---- an operator: its table, its begin and its end --------------------------------------------------------------- */

#pragma once
#include "move.h"
#include "check.c"
#include "16bit.c"

/* A public function calls mti_accept (or mti_operands and mti_check), mti_begin, MTI_RUN and mti_end, in this order. */

#define MTI_ARGS 12 /* maximum number of operands of an operator */
/* Further bits of mt_arg.use. MTI_AS_IS: the loop reads and writes the operand in its own type. MTI_UNSEEN: only the
   rule sees the operand, such as ids that the call has as a pointer. */
#define MTI_AS_IS 8
#define MTI_UNSEEN 256

/* An operand of an operator. */
typedef struct mti_operand {
    const char *name;
    /* Rows and columns, a character each. A digit is a number. A small letter is a size: the first operand with it that
       is not optional sets it, and the others must have it, too. A capital letter is a size that the call gives: A is
       the first. tests/test_operators.c checks that each letter is known. */
    char shape[3];
    int type, use; /* as in mt_arg */
    /* The operands with which it must not share memory, with spaces between them. "=x": it may be x itself. "*": all
       operands above it. NULL: it may share memory with any. */
    const char *apart;
} mti_operand;

/* An operator. Its checks, its messages, its rule for check mode, its row in docs/checking.md (tools/rules.sh) and
   its entry in a trace come from this table. If the first operand is empty, the operator does nothing: the operand that
   says whether there is work, such as y before x, comes first. */
typedef struct mti_table {
    const char *name; /* of the public function */
    mt_rule rule;     /* operands NULL: there is none, and what the operator writes is not known */
    mti_operand operands[MTI_ARGS];
} mti_table;

/* A call of an operator. On a GPU it launches kernels, which read and write every type. On a CPU it calls a loop, which
   computes in f32. Most loops take views in their own type (MTI_AS_IS), and widen and round blocks of them
   (mti_f32_read). Without MTI_AS_IS, mti_begin replaces a 16-bit view of type MT_ARG_FLOAT by an f32 copy in the arena.
   It fills the copy if the view is read (MT_ARG_IN), and mti_end rounds all of it back if the view is written
   (MT_ARG_OUT): a loop that only writes must write every element. No view is in the list twice.
   On a meta context nothing is computed. A meta context that plans for CUDA calls the function that launches, which
   only takes its scratch memory and returns MT_PLANNED. */
typedef struct mti_operator {
    mt_context *ctx;
    const char *name;
    const mt_rule *rule; /* NULL: none */
    mt_arg args[MTI_ARGS];
    const char *apart[MTI_ARGS];
    int count, views;    /* all operands; those that are not MTI_UNSEEN, which come first */
    int copies;          /* how many of the views may have copies: all where a CPU computes or is planned for, or 0 */
    int on_cuda, on_cpu; /* on_cuda: launches, or plans to; on_cpu: computes; both 0: neither */
    size_t mark;         /* the arena mark before the copies */
    mt_tensor given[MTI_ARGS]; /* the 16-bit views that have copies; data is NULL for the others */
    /* The entry of a trace; name is NULL if there is nothing to do. mti_begin fills it in for an operator that reads
       and writes its views once. Others change it before mti_end. */
    mt_trace_entry work;
} mti_operator;

static int64_t mti_size_of(const mti_table *table, char letter, mt_tensor *const *views, const int64_t *sizes) {
    const mti_operand *o = table->operands;
    if (letter <= '9') return letter - '0';
    if (letter <= 'Z') return sizes[letter - 'A'];
    while ((o->use & MT_ARG_OPTIONAL) || (o->shape[0] != letter && o->shape[1] != letter)) o++;
    return o->shape[0] == letter ? views[o - table->operands]->rows : views[o - table->operands]->cols;
}

/* Fills *op for a call with these operands, in the order of the table, and the sizes that the table wants; NULL: none.
   The caller may then change op->rule and op->args. */
static void mti_operands(mti_operator *op, mt_context *ctx, const mti_table *table, mt_tensor *const *views,
                         const int64_t *sizes) {
    op->ctx = ctx;
    op->name = table->name;
    op->rule = table->rule.operands ? &table->rule : NULL;
    op->views = 0;
    for (op->count = 0; op->count < MTI_ARGS && table->operands[op->count].name; op->count++) {
        const mti_operand *o = &table->operands[op->count];
        mt_arg *arg = &op->args[op->count];
        arg->name = o->name;
        arg->view = views[op->count];
        arg->rows = mti_size_of(table, o->shape[0], views, sizes);
        arg->cols = mti_size_of(table, o->shape[1], views, sizes);
        arg->type = o->type;
        arg->use = o->use;
        op->apart[op->count] = o->apart;
        op->views += !(o->use & MTI_UNSEEN);
    }
}

/* Whether operand i must not share memory with operand j: 0: it may, 1: no, 2: unless it is the same view. */
static int mti_must_be_apart(const mti_operator *op, int i, int j) {
    const char *at = op->apart[i], *name = op->args[j].name;
    size_t length = strlen(name);
    if (!at || i == j) return 0;
    if (*at == '*') return j < i;
    for (; *at; at += strcspn(at, " "), at += *at == ' ') {
        const char *word = at + (*at == '=');
        if (strncmp(word, name, length) == 0 && strchr(" ", word[length])) return word > at ? 2 : 1;
    }
    return 0;
}

static mt_status mti_expect_apart(const mti_operator *op, int i, int j) {
    mt_tensor a = *op->args[i].view, b = *op->args[j].view;
    int must, same;
    if (i == j || !mti_views_overlap(op->ctx, a, b)) return MT_SUCCESS; /* before the names are compared */
    must = mti_must_be_apart(op, i, j);
    same = a.data == b.data && a.dtype == b.dtype && (a.rows <= 1 || mt_tensor_ld(a) == mt_tensor_ld(b));
    if (must == 0 || (must == 2 && same)) return MT_SUCCESS;
    return mt_check_apart(op->ctx, op->name, op->args[i].name, a, op->args[j].name, b);
}

static mt_status mti_expect_all_apart(const mti_operator *op) {
    int i, j;
    for (i = 0; i < op->views; i++)
        for (j = 0; op->apart[i] && j < op->views; j++) MT_TRY(mti_expect_apart(op, i, j));
    return MT_SUCCESS;
}

/* Checks the operands of *op. */
static mt_status mti_check(const mti_operator *op) {
    MT_TRY(mt_args_check(op->ctx, op->name, op->args, op->views));
    return mti_expect_all_apart(op);
}

/* Fills *op and checks the operands. */
static mt_status mti_accept(mti_operator *op, mt_context *ctx, const mti_table *table, mt_tensor *const *views,
                            const int64_t *sizes) {
    mti_operands(op, ctx, table, views, sizes);
    return mti_check(op);
}

/* Applies a rule to the operands of *op. */
static mt_status mti_apply(const mti_operator *op, const mt_rule *rule, int count) {
    mt_operand operands[MTI_ARGS];
    int i;
    for (i = 0; i < count; i++) {
        operands[i].name = op->args[i].name;
        operands[i].t = *op->args[i].view;
        operands[i].use = op->args[i].use & ~(MTI_AS_IS | MTI_UNSEEN);
    }
    return mt_rule_check(op->ctx, op->name, rule, operands, count);
}

/* Applies the operator's rule. What an operator without a rule writes is not known. */
static mt_status mti_apply_rule(const mti_operator *op) {
    int i;
    if (op->count == 0 || !mt_check_mode(op->ctx)) return MT_SUCCESS;
    if (op->rule) return mti_apply(op, op->rule, op->count);
    for (i = 0; i < op->count; i++)
        if (op->args[i].use & MT_ARG_OUT) MT_TRY(mt_declare(op->ctx, NULL, *op->args[i].view, MT_UNDECLARED));
    return MT_SUCCESS;
}

/* Rounds the results back to 16 bits, adds the entry to the trace, and releases the arena to where it was before
   mti_begin. Takes the status of MTI_RUN or MTI_CHOOSE, and returns it; MT_PLANNED becomes MT_SUCCESS. */
static mt_status mti_end(mti_operator *op, mt_status status) {
    int i;
    if (status == MT_PLANNED) status = MT_SUCCESS;
    for (i = 0; status == MT_SUCCESS && op->on_cpu && i < op->copies; i++)
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

static int mti_has_work(const mti_operator *op) { return op->views == 0 || !mti_is_empty(*op->args[0].view); }

/* As mti_begin, for an operator that applies its rule itself. */
static mt_status mti_start(mti_operator *op) {
    int i, runs = mti_has_work(op);
    mt_status status = MT_SUCCESS;
    op->on_cuda = runs && mt_context_planned(op->ctx) == MT_DEVICE_CUDA;
    op->on_cpu = runs && mt_context_device(op->ctx) == MT_DEVICE_CPU;
    op->mark = mt_arena_mark(op->ctx);
    memset(&op->work, 0, sizeof op->work);
    if (runs && !mt_context_has_data(op->ctx)) {
        op->work.name = op->name;
        op->work.dtype = op->views ? op->args[0].view->dtype : MT_F32;
        op->work.bytes = mti_work_bytes(op->args, op->views);
    }
    op->copies = runs && !op->on_cuda ? op->views : 0;
    for (i = 0; i < op->copies; i++)
        if (op->args[i].use & MT_ARG_OUT) mti_packed_drop(op->ctx, *op->args[i].view);
    for (i = 0; status == MT_SUCCESS && i < op->copies; i++) status = mti_widen(op, &op->args[i], &op->given[i]);
    return status == MT_SUCCESS ? status : mti_end(op, status);
}

/* Applies the operator's rule and makes the f32 copies. If it fails, the caller must not call mti_end. */
static mt_status mti_begin(mti_operator *op) {
    if (mti_has_work(op)) MT_TRY(mti_apply_rule(op));
    return mti_start(op);
}

/* Begins an operator without views, which always runs. */
static mt_status mti_begin_bare(mti_operator *op, mt_context *ctx, const char *name) {
    op->ctx = ctx;
    op->name = name;
    op->count = op->views = 0;
    return mti_start(op);
}

/* rooms [threads * rows, cols] = scratch memory for a loop, `rows` rows for each thread, or mt_none() if rows is 0. A
   meta context allocates it, too. */
static mt_status mti_rooms(mti_operator *op, int64_t rows, int64_t cols, mt_tensor *rooms) {
    *rooms = mt_none();
    if (op->copies == 0 || rows == 0) return MT_SUCCESS;
    return mt_arena_tensor(op->ctx, MT_F32, mt_context_threads(op->ctx) * rows, cols, rooms);
}

/* `launch` and `loop` are expressions. In MTI_CHOOSE both have the type mt_status. Where nothing is launched, also on a
   meta context and without work, it evaluates `loop`, which must look at on_cpu. In MTI_RUN `loop` is void, and is
   evaluated on a CPU only. */
#if MT_HAS_CUDA
#define MTI_CHOOSE(op, launch, loop) ((op)->on_cuda ? (launch) : (loop))
#else
#define MTI_CHOOSE(op, launch, loop) (loop) /* no context is on MT_DEVICE_CUDA */
#endif
#define MTI_RUN(op, launch, loop) MTI_CHOOSE(op, launch, (op)->on_cpu ? ((loop), MT_SUCCESS) : MT_SUCCESS)
