/* ---- MLP --------------------------------------------------------------------------------------------------------- */

#pragma once
#include "../ops/bias.h"
#include "../parallel/linear.h"

/* The standard deviations of the initial weights of a block. A layer has the same for attention and MLP. */
typedef struct mt_init_desc {
    float std;        /* of fc1; of qkv, or query, key and value; MT_ZERO: 0; 0: 0.02 */
    float output_std; /* of fc2; of proj; GPT-2 has 0.02 / sqrt(2 * layers); MT_ZERO: 0; 0: 0.02 */
} mt_init_desc;

/* Y = act(X A) B, with a bias after each product. A (fc1) is column-parallel and B (fc2) is row-parallel, so act needs
   no communication (arXiv 1909.08053, eq. 3 and figure 3a). */
typedef struct mt_mlp_desc {
    int64_t hidden;
    int64_t ffn;              /* inner width; with MT_SWIGLU gate and up are each this wide; 0: 4 * hidden */
    mt_activation activation; /* 0: MT_GELU_TANH */
    int no_bias;              /* 1: fc1 and fc2 have no bias */
    /* advanced */
    /* 1: forward does not add fc2.bias, and backward does not add to the gradient of fc2.bias. The caller does both,
       for instance fused with a dropout. MT_ERR_ARGUMENT with no_bias */
    int skip_bias_add;
    int sequence_parallel; /* 1: x and y are [tokens / t, hidden] */
    mt_init_desc init;     /* of fc1 and fc2 */
    int add_to_dx;         /* 1: backward adds to dx, see mt_linear_desc */
} mt_mlp_desc;

/* The comment of each layer below gives the names of its parameters. NAME is the `name` that you pass to the block's
   create function; NULL: layer.0, layer.1, ... (see "Names" in the head of mt_parallel.h). */
typedef struct mt_mlp {
    mt_mlp_desc desc;
    mt_column_parallel_linear fc1; /* NAME.linear_fc1.weight, .bias; with MT_SWIGLU the rows are [gate; up] */
    mt_row_parallel_linear fc2;    /* NAME.linear_fc2.weight, .bias */
} mt_mlp;

typedef struct mt_mlp_saved {
    mt_linear_saved fc1, fc2;
    mt_tensor h; /* [tokens, fc1.local_features], the input of the activation */
} mt_mlp_saved;

/* Forward computes y from x. Backward computes dx from dy, and adds to the gradients of the parameters. x, y, dx, dy
   are [tokens, hidden], or [tokens / t, hidden] with sequence_parallel. y must not overlap x, and dx must overlap
   neither dy nor x (MT_ERR_ARGUMENT). When t > 1, y and dx must be contiguous; with sequence_parallel x and dy, too
   (MT_ERR_SHAPE). x must not change until backward has returned. The tensors of saved are in the arena until the
   caller's mt_arena_release. When saved is NULL, forward is inference. When dx is mt_none(), backward neither computes
   nor reduces dx.
   Communication over the tensor group: forward does 1 all-reduce, and backward does 1. With sequence_parallel forward
   does 1 all-gather and 1 reduce-scatter, and backward does 2 all-gathers and 1 reduce-scatter.
   Errors of create: MT_ERR_ARGUMENT (hidden, ffn or activation is out of range; the limit of hidden and ffn is
   2^31 - 1), and those of the two linear layers. */
MT_API mt_status mt_mlp_create(mt_context *ctx, mt_params *params, const char *name, const mt_mlp_desc *desc,
                               mt_mlp *out);
MT_API mt_status mt_mlp_forward(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor y, mt_mlp_saved *saved);
MT_API mt_status mt_mlp_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dx,
                                 const mt_mlp_saved *saved);

/* The tensors of an MLP in your own memory, see mt_linear_tensors: fc1 is split by rows, with MT_SWIGLU in 2 parts, and
   fc2 by columns. A product without a bias has b mt_none(). */
typedef struct mt_mlp_tensors {
    mt_linear_tensors fc1, fc2;
} mt_mlp_tensors;

/* Creates an MLP of tensors in your own memory, without a registry. mt_mlp_forward and mt_mlp_backward take it, and
   compute the same bits as for an MLP of a registry. It fills params, an array of 4. The MLP points into params, and
   uses tp and the memory of the tensors: all must outlive it, and params must not move. The struct may be copied.
   *tensors and name are copied. The MLP needs no destroy. tp is the tensor group. name, for messages and the hash log,
   may be NULL: then nothing is logged. No communication.
   desc means the same as for mt_mlp_create, with two differences. A layer has a bias if its b is set; desc->no_bias 1
   with such a b is MT_ERR_ARGUMENT. desc->init must be zero (MT_ERR_ARGUMENT), because you fill the weights.
   The caller sums dw and db over the data group. With sequence_parallel, fc2.db is the sum over this rank's rows; the
   caller sums it over the tensor group.
   Errors: those of mt_mlp_create and mt_column_parallel_linear_from_tensors. MT_ERR_DTYPE: fc1 and fc2
   have different types. A backward without dw, or without db where there is a bias, is MT_ERR_ARGUMENT; with
   skip_bias_add fc2 needs no db. After an error *out is zero, and calls with it are refused. */
MT_API mt_status mt_mlp_from_tensors(mt_context *ctx, mt_comm *tp, const char *name, const mt_mlp_desc *desc,
                                     const mt_mlp_tensors *tensors, mt_param *params, mt_mlp *out);
