/* ---- for authors of operators and blocks ------------------------------------------------------------------------- */

#pragma once
#include "attention.h"
#include "sample.h"
#include "adamw.h"
#include "loss_scaler.h"
#include "../check/authors.h"

/* The types that a view may have: any type, one of the float types (MT_F32, MT_BF16, MT_F16), or MT_F32 only. */
enum { MT_ARG_ANY = 0, MT_ARG_FLOAT = 1, MT_ARG_F32 = 2 };

/* Describes what an operator requires of one view. MT_ARG_IN and so on are above mt_operand, in mt_comm.h. An array of
   mt_arg describes all views of the operator:
       mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_IN_OUT},
                        {"bias", &bias, 1, y.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL}};
       MT_TRY(mt_args_check(ctx, "my_bias_forward", args, 2)); */
typedef struct mt_arg {
    const char *name; /* for error messages */
    mt_tensor *view;
    int64_t rows, cols; /* the required shape */
    int type, use;      /* MT_ARG_FLOAT and MT_ARG_IN, for instance */
} mt_arg;

/* mt_args_check checks `count` views, in the order of the array. A view must have a valid shape and type, the
   required type and shape, and data that is not NULL and is aligned to its elements, unless rows or cols is 0. An
   optional view that is mt_none() is not checked. Overlaps are not checked: call mt_check_apart. `where` is the name of
   your function for the message, as in "my_bias_forward: bias is [1, 3], must be [1, 4]". mt_tensor_check checks one
   view, which is not optional, in the same way. Errors: MT_ERR_SHAPE, MT_ERR_DTYPE, MT_ERR_ARGUMENT. */
MT_API mt_status mt_args_check(mt_context *ctx, const char *where, const mt_arg *args, int count);
MT_API mt_status mt_tensor_check(mt_context *ctx, const char *where, const char *name, mt_tensor t, int type,
                                 int64_t rows, int64_t cols);

/* Sets the function that mt_args_check calls with the views of each operator, after it has checked them and before the
   operator runs. The function looks for MT_ARG_SUM, MT_ARG_PRODUCT and MT_ARG_MOVED. A status other than MT_SUCCESS
   refuses the call. check NULL: none. In invariant mode mt_params_init and mt_declare_shards set a check that refuses
   sums whose order depends on the split. */
typedef mt_status (*mt_sum_check)(mt_context *ctx, const char *where, const mt_arg *args, int count);
MT_API mt_status mt_set_sum_check(mt_context *ctx, mt_sum_check check);

/* What a float may be, for mt_check_float. Infinities and NaN are never allowed. */
typedef enum mt_float_range {
    MT_FLOAT_FINITE = 0,     /* any finite number */
    MT_FLOAT_AT_LEAST_0 = 1, /* at least 0 */
    MT_FLOAT_ABOVE_0 = 2,    /* above 0 */
    MT_FLOAT_PROBABILITY = 3 /* at least 0 and below 1 */
} mt_float_range;

/* Each of these functions checks one field of a desc. The message names this field, its value and what it must be:
   "mt_mlp_create: 'decoder.mlp': hidden is 0, must be from 1 to 2147483647". `function` is the name of your function,
   and `name` that of the block. When name is NULL, the message has no name. When ctx is NULL, there is no message.
     mt_check_integer  value must be in [low, high]. With high INT64_MAX, the message has no upper limit
     mt_check_size     the same, but the error is MT_ERR_SHAPE
     mt_check_enum     value must have a word. `words` has one word for each value of the enum, from 0 on, with
                       spaces between them: MT_MASK_WORDS, or "MY_ADD MY_MULTIPLY"
     mt_check_float    value must be in the range
   Errors: MT_ERR_ARGUMENT; mt_check_size: MT_ERR_SHAPE. In mt_check_float, an unknown range is also MT_ERR_ARGUMENT. */
MT_API mt_status mt_check_integer(mt_context *ctx, const char *function, const char *name, const char *field,
                                  int64_t value, int64_t low, int64_t high);
MT_API mt_status mt_check_size(mt_context *ctx, const char *function, const char *name, const char *field,
                               int64_t value, int64_t low, int64_t high);
MT_API mt_status mt_check_enum(mt_context *ctx, const char *function, const char *name, const char *field, int value,
                               const char *words);
MT_API mt_status mt_check_float(mt_context *ctx, const char *function, const char *name, const char *field, float value,
                                mt_float_range range);

#define MT_WORD_MAX 32 /* characters of a word, with the NUL */

/* Writes the word of the value to text, for a message: the word of 1 in "MY_ADD MY_MULTIPLY" is MY_MULTIPLY. A value
   without a word is written as a number. A word is cut after MT_WORD_MAX - 1 characters. */
MT_API void mt_enum_word(const char *words, int value, char text[MT_WORD_MAX]);

/* Returns MT_ERR_ARGUMENT when the valid views a and b overlap. Views of different columns of one matrix do not
   overlap, and mt_none() overlaps nothing. On MT_DEVICE_META, only views in the arena or from mt_context_alloc are
   compared: other addresses have no meaning there.
   `where` is the name of your function for the message. */
MT_API mt_status mt_check_apart(mt_context *ctx, const char *where, const char *a_name, mt_tensor a, const char *b_name,
                                mt_tensor b);

/* Returns the rule of an operator of this header, for mt_rule_check of an operator of your own that computes the same,
   or NULL. The operands of the rule are those of the table in docs/checking.md; a call may leave some out. `use` of a
   result to which the operator adds is 3. `name` is as in "mt_norm_forward"; "mt_gemm" has no transposes. */
MT_API const mt_rule *mt_rule_of(const char *name);

/* Checks *hyper as mt_adamw_step does: step >= 1, beta1 and beta2 in [0, 1), eps >= 0, all numbers finite. Error:
   MT_ERR_ARGUMENT. */
MT_API mt_status mt_adamw_check(mt_context *ctx, const mt_adamw *hyper);

/* Checks *desc as mt_sample_ids does. `function` is the name of your function, for the error message. MT_ERR_ARGUMENT:
   desc is NULL, or a field is out of range. */
MT_API mt_status mt_sample_check(mt_context *ctx, const char *function, const mt_sample_desc *desc);

/* As mt_linear_gradients, with dweight = dy^T x + beta dweight. With beta == 0, dweight is not read. */
MT_API mt_status mt_linear_gradients_beta(mt_context *ctx, mt_tensor dy, mt_tensor x, float beta, mt_tensor dweight,
                                          mt_tensor dbias);

/* Returns the target of tokens without a loss, from the field mt_cross_entropy_shard_desc.ignore_index: its value,
   but 0 for MT_ZERO, and -100 for 0. */
MT_API int32_t mt_ignore_index(int32_t ignore_index);

/* Adds a hash of x to *hash, to compare tensors. x, of a float type, is a part of a tensor that has global_cols
   columns. x begins at row first_row and column first_col of that tensor. To hash the tensor, set *hash to 0 and call
   mt_hash for each part: the total does not depend on how the tensor is split. The hash of x is the sum modulo 2^64 of
   mt_hash_element(e, bits) over the elements (i, j) of x, with e = (first_row + i) * global_cols + first_col + j and
   bits = the 32 or 16 bits of the element. On MT_DEVICE_META *hash does not change. */
MT_API mt_status mt_hash(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                         uint64_t *hash);

/* Returns the hash of one element, from its global number and its bits. mt_hash adds up these hashes. */
MT_API uint64_t mt_hash_element(uint64_t element, uint32_t bits);

/* Checks desc, the shapes of its bias and dbias, and on a CPU the numbers of lengths, cu_seqlens and alibi_slopes. Call
   it before the block communicates. Pass a desc of all heads of the model, so that all ranks return the same error.
   groups must be at least 1. `where` is the name of the calling function, for the error message. Errors: those of
   mt_dot_product_attention_backward for desc. */
MT_API mt_status mt_attention_check(mt_context *ctx, const char *where, const mt_attention_desc *desc);

/* Merges the attention of the same queries to some keys with that to others, for attention in parts (mt_attention_part;
   arXiv 2205.14135, section 3.1). out [rows, heads * D] and lse [heads, rows] have the results for the keys so far, and
   become those for the keys of the part, too:
     lse' = log(e^lse + e^part_lse)      out' = e^(lse - lse') out + e^(part_lse - lse') part_out
   Begin with the results of mt_dot_product_attention_forward for the first keys. Use MT_F32 for out: a 16-bit out is
   rounded after each part. A query that has seen no key has out 0 and lse -INFINITY; what is in the memory of such a
   result does not count. Dropout is in out and not in lse, so it needs nothing more.
   For backward, pass the merged out and lse, and the gradient of the merged out, to mt_dot_product_attention_backward
   of each part. It computes the part's share of the gradients: dq is the sum of those of all parts, and dk and dv are
   those of the keys of the part.
   Errors: MT_ERR_SHAPE (heads does not divide the columns), MT_ERR_ARGUMENT (out or lse overlaps another tensor). */
MT_API mt_status mt_attention_merge(mt_context *ctx, mt_tensor out, mt_tensor lse, mt_tensor part_out,
                                    mt_tensor part_lse);

/* Checks the fields of *scores, as every operator of attention does: the enums must have a word, the numbers must be
   finite and in range. `function` is the name of your function, and `name` that of the block, for the message; name may
   be NULL. MT_ERR_ARGUMENT: a field is out of range, or scores is NULL. */
MT_API mt_status mt_scores_check(mt_context *ctx, const char *function, const char *name, const mt_scores_desc *scores);

/* For checkpoints: returns the name of the first field that is out of range, such as "loss_scaler.min_scale", or NULL.
   desc NULL: NULL. */
MT_API const char *mt_loss_scaler_fault(const mt_loss_scaler_desc *desc);

/* For checkpoints: takes a name that mt_loss_scaler_fault has returned, and returns what this field must be, such as
   "at least 1"; NULL for another name. */
MT_API const char *mt_loss_scaler_wanted(const char *field);
