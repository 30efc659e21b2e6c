/* ---- check mode, for authors of operators and layers ------------------------------------------------------------- */

#pragma once
#include "placements.h"

/* The rule of an operator for check mode: which placements of its operands fit together. operands has the names of its
   operands with spaces between them. cases has words with spaces between them: one word for each combination that the
   operator allows, with one letter for each operand. R is MT_REPLICATED, r MT_SPLIT_ROWS, c MT_SPLIT_COLS,
   P MT_PARTIAL, * anything, and - an operand that the call leaves out. Four more letters mean MT_REPLICATED for what
   the call reads, with a condition on its rows or columns:
     o  the operand has this rank's share of the columns of what all ranks have. What a call writes there is a term of
        the whole, or MT_SPLIT_COLS when the rank has no other columns
     w  the operand has all columns
     k  the operand has the first rows, until those of this rank's share of the first operand; not over "data"
     a  any rows; not over "data"
   "dx(x)" in operands is the operand dx, to which the call writes the gradient of operand x. "x(x)" is an x that the
   call replaces by its gradient. With mt_context_desc.check == 2, a call that computes the gradient of x is refused if
   the gradient has replaced x already.
   data_cases has further cases for the group "data", where the rows of different ranks are other sequences; NULL: none.
   For example,
       static const mt_rule rule = {"y bias", "RR rR cc", NULL};       // y += bias; P would add it on every rank
   mt_rule_check applies a rule to the operands of a call, in any order; one that the call leaves out has data NULL. In
   each group at least one case must fit what is known about the operands. The operands that the call writes then get
   the placements of these cases. Call it after the other checks, before the operator writes. It does nothing when check
   mode is off. `where` and the rule are kept for messages: they must live as long as the context. Errors:
   MT_ERR_ARGUMENT (no case fits, a case has not one letter for each operand, an operand has a name that the rule does
   not have, a pointer other than data_cases is NULL, count is negative), MT_ERR_MEMORY. */
typedef struct mt_rule {
    const char *operands, *cases, *data_cases;
} mt_rule;

/* What a call does with an operand, and what the operand is, for mt_operand.use and mt_arg.use. MT_ARG_IN: the call
   reads it, MT_ARG_OUT: it writes it. Add the others with |.
   MT_ARG_OPTIONAL  of mt_arg: it may be mt_none()
   MT_ARG_GRADIENT  it is a gradient, such as dy and dx: terms of it are summed by other calls than those of an output
   MT_ARG_GATHERED  it has what all ranks have computed, one below the other, as mt_all_gather gives it
   MT_ARG_SUM       the call adds a sum over rows to it, as mt_bias_backward does to dbias
   MT_ARG_PRODUCT   it is the result of a product, such as c of mt_gemm; a gradient, if the call reads one. With
                    MT_ARG_SUM, it is a product that sums over the rows of its operands, such as dweight of
                    mt_linear_gradients
   MT_ARG_MOVED     the call writes elements of it, or sums or multiples of them, as mt_add does; if it is a gradient,
                    the results are gradients
   Invariant mode looks at the last three, see mt_set_sum_check. */
enum {
    MT_ARG_IN = 1,
    MT_ARG_OUT = 2,
    MT_ARG_IN_OUT = 3,
    MT_ARG_OPTIONAL = 4,
    MT_ARG_SUM = 16,
    MT_ARG_PRODUCT = 32,
    MT_ARG_GRADIENT = 64,
    MT_ARG_MOVED = 128,
    MT_ARG_GATHERED = 512
};

typedef struct mt_operand {
    const char *name;
    mt_tensor t;
    int use; /* MT_ARG_IN, for instance */
} mt_operand;

MT_API mt_status mt_rule_check(mt_context *ctx, const char *where, const mt_rule *rule, const mt_operand *operands,
                               int count);

/* The place of a rank's elements in the whole tensor, by which a call takes its random words, or its part of a
   vocabulary. */
typedef struct mt_place {
    int64_t rows, cols;                        /* of this rank */
    int64_t first_row, first_col, global_cols; /* see mt_random. INT64_MAX: the call does not number rows or columns */
    int padded;                                /* 1: ranks may have fewer columns than those before them */
    const char *what;                          /* what depends on the place, as in "random words" */
    uint64_t seed, subsequence;                /* see mt_random; 0: the call takes no random words */
    int64_t vocab;                             /* columns of all ranks that are no padding; 0: not known */
    int sequences;                             /* 1: rows are sequences, of which ranks of "context" have parts */
} mt_place;

/* Checks that a place fits the placements of t, operand `name` of a call. Where ranks have rows or columns of their
   own, their places must differ: rank n of a group has at least n times its rows or columns before it. Where no group
   splits the columns of t, they are those of the whole tensor, unless t is a view of some columns of a tensor, or was
   computed from such a view. When mt_context_desc.check is 2, all ranks must have the same seed and subsequence, and
   those that have the same t the same place, which the next mt_check_replicas compares. `field` names the place, as in
   "dropout.at"; it may be "". Does nothing when check mode is off. Errors: MT_ERR_ARGUMENT, MT_ERR_MEMORY. */
MT_API mt_status mt_place_check(mt_context *ctx, const char *where, const char *field, const char *name, mt_tensor t,
                                const mt_place *place);

/* scattered 1: in the next calls, the rows that ranks have of their own are not in the order of the ranks, such as
   those of tensor ranks that divide the tokens of a context rank. mt_place_check then does not compare first_row with
   the number of the rank. 0: they are. Rows that are split over "context", too, are never compared. */
MT_API void mt_check_scattered(mt_context *ctx, int scattered);

/* Checks that a tensor whose columns a call takes as `parts` equal parts, such as gate and up, has these parts on each
   rank. If a group splits the columns of t, operand `name` of the call, and t is a parameter of a registry or was
   computed with one, the `parts` of the parameter must be a multiple.
   mt_parts_agree checks that a weight and `other` have equal `parts`. `other` is the bias of the weight (or both are
   gradients), if both are whole parameters. Or it is the x that a weight split by columns multiplies, if the features
   of x are those of a parameter, also after elementwise calls. Both functions do nothing when check mode is off.
   Errors: MT_ERR_ARGUMENT (also: parts is less than 1). */
MT_API mt_status mt_parts_agree(mt_context *ctx, const char *where, mt_tensor weight, mt_tensor other);
MT_API mt_status mt_parts_check(mt_context *ctx, const char *where, const char *name, mt_tensor t, int64_t parts);

/* A listener is told of each call that check mode has accepted, in the order of the calls: operators, rules of the
   caller's own, region functions, and collectives of tensors that are known. operands[count] are the views of the call,
   which may be of any shape; data is NULL for one that the call leaves out. mt_placement_of returns what the views are
   after the call. `with` is the name of a parameter among them, or NULL. It lives as long as the parameter, the other
   strings as long as the context, and the operands until the listener returns. What a call writes is not computed yet.
   The listener may print or keep what it is told; it must not write tensors with the library.
   mt_check_listen sets the listener of a context. NULL: none. It does nothing when check mode is off. */
typedef void (*mt_check_listener)(mt_context *ctx, void *user, const char *where, const char *with,
                                  const mt_operand *operands, int count);

MT_API void mt_check_listen(mt_context *ctx, mt_check_listener listener, void *user);

/* mt_check_mode returns mt_context_desc.check (on MT_DEVICE_META at least 1, and at most 1 with a meta communicator),
   and 0 in a pause. Between mt_check_pause and mt_check_resume, no rule is applied, and no placement is noted: a layer
   whose sums no rule describes declares its results. Pairs may be nested. mt_check_resume returns `status`, as in
       mt_check_pause(ctx);
       return mt_check_resume(ctx, work(ctx));
   mt_check_view says what a view is in the calls until mt_check_view_end: this rank's columns of a replicated tensor,
   for instance, are a tensor that is split. The memory keeps its placement, and MT_UNDECLARED leaves the view as it is.
   Pairs may be nested; the last mt_check_view of a view and a group counts. mt_check_view_end returns `status`.
   MT_PARTIAL says that a tensor that all ranks have is this rank's term of a sum, such as a bias that one rank adds.
   If mt_context_desc.check is 2, two ranks that add it are refused.
   mt_check_group makes check mode know a group for whose ranks nothing is declared, such as the pipeline group:
   collectives then give their results a placement over it. mt_check_unknown does not count it.
   mt_declare_complete says that t is replicated or split by rows over comm.
   mt_declare_meant says that the program means t as it is, if mt_context_desc.check is 2. Where t is split, ranks may
   have the same, such as the tokens of data ranks. Numbers of calls that read t may be off by the number of ranks, such
   as the scale of attention with the queries t, also when t is a view in the qkv that the call reads. Ranks may write
   the same view of t, see docs/checking.md. That holds until a call writes a part of t or declares it; for the value of
   a parameter, it holds from then on. It says nothing about what t does not cover.
   mt_declare_zero says that t is zero, which fits every placement; it works in a pause, too. mt_declare_parameter notes
   a parameter and its gradient, which may be mt_none(), under a name. parts: see mt_param_desc. partial: 1 if its
   gradient may be partial over `tensor`. Over `data` the value is replicated, and the gradient may be partial.
   After mt_check_track, check mode also notes what calls write to undeclared memory of the caller, if it knows one of
   their operands. Call mt_declare_forget before such memory is freed or used for something else.
   mt_declare_forget drops what is known about [data, data + bytes). Call it before memory of the caller that was
   declared is freed. It also drops what invariant mode knows about the memory, whether check mode is on or off.
   mt_check_slots says that micro-batches keep tensors in `count` slots of `bytes` bytes each, one after the other from
   `first` on. There may be two such areas, 0 and 1. Until the next mt_check_slots for the area, rules and region
   functions refuse an operand in another slot than number `own`. count 0: the area has no slots. mt_pipeline_run calls
   it for the inputs and for what forward keeps. */
MT_API int mt_check_mode(const mt_context *ctx);
MT_API void mt_check_pause(mt_context *ctx);
MT_API mt_status mt_check_resume(mt_context *ctx, mt_status status);
MT_API mt_status mt_check_view(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement);
MT_API mt_status mt_check_view_end(mt_context *ctx, mt_status status);
MT_API void mt_check_group(mt_context *ctx, const mt_comm *comm);
MT_API mt_status mt_declare_complete(mt_context *ctx, const mt_comm *comm, mt_tensor t);
MT_API mt_status mt_declare_meant(mt_context *ctx, mt_tensor t);
MT_API mt_status mt_declare_zero(mt_context *ctx, mt_tensor t);
MT_API mt_status mt_declare_parameter(mt_context *ctx, const char *name, const mt_comm *tensor, const mt_comm *data,
                                      mt_tensor value, mt_tensor grad, mt_placement placement, int64_t parts,
                                      int partial);
MT_API void mt_declare_forget(mt_context *ctx, const void *data, size_t bytes);
MT_API void mt_check_track(mt_context *ctx);
MT_API void mt_check_slots(mt_context *ctx, int area, const void *first, size_t bytes, int count, int own);

/* With mt_context_desc.check == 2, the context also compares values. Each call hashes, bit for bit, each operand that
   it reads and that is replicated over a group. mt_check_replicas is collective over comm, and the ledger does not
   count it. The ranks compare their hashes (16 bytes of each rank), and then what they must not have alike (16 bytes,
   and 8 bytes for each entry). When hashes differ, ranks send the list of what they have read. If values differ, every
   rank gets MT_ERR_MISMATCH, and the message names the first call that has read other values than on the lowest rank,
   beginning with `where`. So it finds what rules cannot see: other seeds, inputs or learning rates, and memory that was
   written behind the library's back.
   mt_params_zero_grad hashes the parameters. mt_sync_gradients adds the gradients, and compares. mt_optimizer_step and
   mt_step_begin add the learning rate, and the step compares it. The next step compares the new parameters, so those of
   the last step are not compared. A loop without these calls calls mt_check_replicas itself. In any case a comparison
   comes with every 256th collective of a group.
   mt_check_replica hashes t, which must be the same on the ranks of comm, for the next comparison. The message calls it
   "the `what` of '`name`'", or only `what` when name is NULL; name is kept until then. t has elements of 2 or 4 bytes.
   Both do nothing when check is not 2, in a group of one, in a pause, between mt_overlap_begin and mt_overlap_end, and
   while a graph is recorded. Errors: MT_ERR_MISMATCH, MT_ERR_ARGUMENT (ctx, what or where is NULL, or t has
   another type), MT_ERR_MEMORY, and those of a collective. */
MT_API mt_status mt_check_replica(mt_context *ctx, const mt_comm *comm, const char *what, const char *name,
                                  mt_tensor t);
MT_API mt_status mt_check_replicas(mt_context *ctx, mt_comm *comm, const char *where);
/* As mt_check_replica, for a number of the host. mt_optimizer_step and mt_step_begin call it with the learning rate. */
MT_API mt_status mt_check_number(mt_context *ctx, const mt_comm *comm, const char *what, float number);

/* For authors of operators, with mt_context_desc.check == 2; they do nothing otherwise.
   mt_check_numbers notes `count` numbers of a call, such as those of its desc, which must be the same on all ranks of a
   group. The message calls them "`what` of `where`". Ranks with rows of t of their own may have others, such as the
   mask of their queries; t is mt_none() if they may not. data 1: those of "data" may not in any case. data 2: ranks
   with a term of the sum t may have others, and ranks of "data" and "context" with rows of their own, and no others.
   mt_check_side notes an operand that is no matrix of a rule: an element for each row (along MT_SPLIT_ROWS) or column
   (MT_SPLIT_COLS) of t, such as targets or lengths. If a group splits t in this way, each rank must have its own
   elements, otherwise all ranks must have the same ones. alike 1: ranks may have the same elements in any case.
   mt_check_share notes that each rank of comm must have a part of its own of what the name says. It is compared on a
   CPU with data, unless all elements of t are equal.
   mt_check_content says what an operator has written to t without data: a hash of the numbers from which it is made, or
   MT_CONTENT_ANY if ranks may have the same where t is split.
   mt_check_content_of returns the hash of `count` numbers, for mt_check_content. Both do so with any `check`.
   mt_check_sequences notes that a call needs whole sequences of `seq` rows of t; seq 0: of several lengths. Ids that
   are split by rows are compared over groups that split the columns of t. They are not compared when each rank has
   whole sequences, because these may have the same positions.
   mt_check_factor refuses a number of a call, `factor` times what it usually is, when a group of `factor` ranks, or of
   1 / factor ranks, splits t, operand `name`, along its rows or columns: the number was computed with the sizes of a
   rank. It accepts all numbers after mt_declare_meant of t or of a view in t.
   mt_check_mean notes that the gradients of the rows of t are multiplied by `scale`; NAN: by other numbers, so that
   nothing is said about this step. mt_check_mean_end, which mt_optimizer_step calls, multiplies `scale` by grad_scale
   and by the rows of all ranks. For a mean, the product is 1. It refuses n or 1 / n, where n is the number of ranks of
   a group or of all groups, and forgets the scale. mt_check_replicas tells the ranks of its group when one of them says
   nothing, such as one where tokens have no loss: then none refuses. If the loss is meant so, call
   mt_check_mean(ctx, logits, NAN) before. `where` and `name` are kept for messages. Errors: MT_ERR_MEMORY;
   MT_ERR_ARGUMENT for what is refused. */
#define MT_CONTENT_ANY ((uint64_t)1)
MT_API mt_status mt_check_numbers(mt_context *ctx, const char *where, const char *what, mt_tensor t, int data,
                                  const double *numbers, int count);
MT_API mt_status mt_check_side(mt_context *ctx, const char *where, const char *name, mt_tensor side, mt_tensor t,
                               mt_placement along, int alike);
MT_API mt_status mt_check_share(mt_context *ctx, const mt_comm *comm, const char *what, const char *name, mt_tensor t);
MT_API void mt_check_sequences(mt_context *ctx, mt_tensor t, int64_t seq);
MT_API void mt_check_content(mt_context *ctx, mt_tensor t, uint64_t content);
MT_API uint64_t mt_check_content_of(const double *numbers, int count);
MT_API mt_status mt_check_factor(mt_context *ctx, const char *where, const char *number, const char *name, mt_tensor t,
                                 mt_placement along, double factor);
MT_API void mt_check_mean(mt_context *ctx, mt_tensor t, double scale);
MT_API mt_status mt_check_mean_end(mt_context *ctx, const char *where, double grad_scale);

/* Returns how many operands that calls have read were not known in a group, since the context was created or since the
   last call of this function. 0 means that check mode has seen all of a step. text, which may be NULL, becomes the
   first of them, as in  mt_gemm "mlp.linear_fc1": a over "tensor"  or "". */
MT_API int64_t mt_check_unknown(mt_context *ctx, char *text, size_t bytes);
