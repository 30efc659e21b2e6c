/* megatron.h - Megatron-style parallel transformer building blocks for your own training loop, in C. Header-only.

   Do this:
       #define MEGATRON_IMPLEMENTATION      // in exactly one file of your program: a .c, .cpp or .cu
       #include "megatron.h"                // the other files need only this line
       cc -O3 -march=native -I. yours.c -lm -lpthread          (add -DMT_USE_ONEDNN -ldnnl for a fast GEMM)
       nvcc -O3 -arch=native -I. -DMT_USE_NCCL yours.cu -lcublasLt -lnccl   (on GPUs, see docs/gpus.md)

   This program trains a small GPT on 2 ranks. examples/01_mlp.c also shows how to destroy every object.

    #define MEGATRON_IMPLEMENTATION                           // in exactly one file of the program
    #include "megatron.h"
    #include <stdio.h>
    static mt_status train(mt_comm *world, void *tokens) {    // every rank runs this: here, a thread
        mt_context *ctx; mt_grid grid; mt_params *params; mt_gpt gpt; mt_gpt_saved saved; mt_optimizer adam;
        mt_grid_desc shape = {.tp = 2};                   // 2-way tensor parallel; data parallel over the rest
        mt_gpt_desc model = {.vocab = 10, .layers = 2, .max_seq = 4, .layer = {.hidden = 64, .heads = 4}};
        mt_batch batch = {.sequences = 1, .seq = 4}; int32_t *ids = tokens; float loss[4];
        MT_TRY(mt_context_create(world, NULL, &ctx));         // NULL: on the CPU, with the defaults
        MT_TRY(mt_grid_create(world, &shape, &grid)); MT_TRY(mt_params_create(ctx, &grid, &params));
        MT_TRY(mt_gpt_create(ctx, params, &model, &gpt));     // this rank's shard of the weights
        MT_TRY(mt_params_init(ctx, params, 1234));            // the same model on any number of ranks
        MT_TRY(mt_gpt_saved_create(ctx, &gpt, &saved)); MT_TRY(mt_optimizer_create(ctx, params, NULL, &adam));
        for (size_t step = 0, mark = mt_arena_mark(ctx); step < 50; step++, mt_arena_release(ctx, mark)) {
            MT_TRY(mt_params_zero_grad(ctx, params));
            MT_TRY(mt_gpt_forward(ctx, &gpt, &batch, ids, ids + 1, mt_tensor_f32(loss, 1, 4), &saved));
            MT_TRY(mt_gpt_backward(ctx, &gpt, 1.0f / 4, &saved));        // 1 / tokens of all data parallel ranks
            MT_TRY(mt_sync_gradients(ctx, params));                      // summed over the data parallel ranks
            MT_TRY(mt_optimizer_step(ctx, &adam, 3e-3f, 1.0f));          // AdamW: learning rate 0.003, gradients * 1
            if (mt_comm_rank(world) == 0) printf("%2zu: %.4f\n", step, (loss[0] + loss[1] + loss[2] + loss[3]) / 4.0);
        }
        return MT_SUCCESS;
    }
    int main(void) { int32_t pi[] = {3, 1, 4, 1, 5}; mt_launch_desc d = {.ranks = 2}; return mt_launch(&d, train, pi); }

   The library has four headers. Each includes those below it in this list and works without those above it:
       megatron.h       self- and cross-attention, MLP, transformer layer, GPT, BERT, checkpoints (this header)
       mt_parallel.h    process grid, parameters, column- and row-parallel linear, vocabulary-parallel embedding and
                        loss, AdamW, pipelines, checkpoints
       mt_kernels.cuh   the operators, forward and backward
       mt_comm.h        contexts, communicators, collectives, Megatron's conjugates f and g, mt_launch

   A transformer layer communicates as in Megatron-LM (arXiv 1909.08053): forward does 2 all-reduces of [tokens,
   hidden], and backward does 2. With sequence parallelism (arXiv 2205.05198) a layer does all-gathers and
   reduce-scatters instead. Every communicator counts its collectives and their bytes (mt_comm_ledger).

   The library does not own your loop, your tensors or your process. It has no globals, and it never exits or aborts.
   It opens only checkpoints, and the safetensors and JSON files that you name. It allocates no memory after setup (the
   create functions and mt_params_init), except while the files of a checkpoint are open, and for a hash log (see
   mt_hash_log), which is for debugging.

   Shapes:  Activations are [tokens, features]. When each sequence has seq tokens, the token at position p of sequence
            s is row s * seq + p. Weights are [out, in], as in PyTorch. t is the number of tensor parallel ranks. With
            sequence parallelism a block's input and output are [tokens / t, features] on each tensor rank: rank r has
            the tokens / t rows that begin at row r * tokens / t. t must then divide tokens; otherwise a call returns
            MT_ERR_SHAPE.
   Descs:   Structs named mt_..._desc may be zero-initialised. "0: x" in the comment of a field means that 0 selects x.
            Where the comment names MT_ZERO, this constant sets the field to zero (mt_comm.h, "defaults").
   Memory:  The registry (mt_params) owns the parameters and their gradients. A block is a struct in your memory and
            needs no destroy. Forward keeps what backward needs in a `saved` struct: tensors in the context's arena, and
            views of your tensors. Do not release, free or change any of them before backward has returned.
   Types:   A model is f32, or bf16 or f16 after mt_params_set_dtype (mt_parallel.h). Parameter gradients, master
            weights and the loss are always f32.
   Errors:  Every call that can fail returns an mt_status. MT_TRY(call) makes the calling function return the status if
            it is an error. mt_last_error(ctx) returns a message with the offending values. Blocks return the errors of
            the layers and operators in them, which the heads of mt_parallel.h and mt_kernels.cuh list. The comment of
            a function says only what is special to it. After an error of a create function, the registry is as before.
   Threads: A rank is one thread, with a context, communicators and a registry of its own.
   Macros:  mt_comm.h lists those that configure the implementation.

   Sections of the implementation: >>mlp >>attention >>cross >>layer >>model >>gpt >>bert >>flops >>checkpoint >>names
   >>config >>layer-types >>config-values >>metadata */

#include "mt_parallel.h" /* outside the guard: a second #include may add the implementation */

#ifndef MEGATRON_H
#define MEGATRON_H

#ifdef __cplusplus
extern "C" {
#endif

/* ---- batch and dropout ------------------------------------------------------------------------------------------- */

/* The tokens of one call: `sequences` sequences of `seq` tokens each. All tensor ranks pass the same batch. A dropout
   mask depends on seed, step, layer, and the element's index in the global batch (all sequences of a step). When each
   call sets first_sequence, the masks do not depend on the numbers of tensor ranks, data ranks and micro-batches. */
typedef struct mt_batch {
    int64_t sequences, seq;
    int64_t first_sequence; /* index of this call's first sequence in the global batch */
    /* [sequences], in memory of the context's device. The first lengths[i] tokens of sequence i are valid; attention
       masks the keys of the others. On a CPU a length that is not in [0, seq] is MT_ERR_DATA; a GPU does not check.
       NULL: all tokens are valid */
    const int32_t *lengths;
    uint64_t seed, step; /* of dropout; use a new step for each optimizer step */
    /* advanced */
    /* [sequences * seq], in memory of the context's device, for models with token types (BERT's segments): the type of
       each token. It must not change until backward. MT_ERR_ARGUMENT for a model without token types. NULL: all 0 */
    const int32_t *token_types;
    /* A number in memory of the device that is added to the subsequence of dropout when the masks are drawn (see
       mt_random and mt_step_random_offset); the same number until backward has returned. With step << 20 in it, leave
       `step` 0. NULL: 0 */
    const uint64_t *random_offset;
    /* Packed documents, one after the other. cu_seqlens has documents + 1 ascending numbers, from 0 to sequences * seq,
       in memory of the context's device. Document d has the tokens cu_seqlens[d] to cu_seqlens[d + 1] - 1. The end of a
       sequence also ends a document: the rest is a document of its own. A token attends only to its document, and
       positions begin at 0 in each. Without dropout, a document has the outputs that it has alone. A CPU checks the
       numbers (MT_ERR_DATA), a GPU does not. They must not change until backward. NULL: a sequence is one document */
    const int32_t *cu_seqlens;
    int64_t documents; /* must be 0 without cu_seqlens (MT_ERR_ARGUMENT) */
    /* A bias that is added to the attention scores in every layer, in memory of the context's device:
       [bias_batch * bias_heads * seq, seq], of a float type, with rows in the order sequence, head, query. In MT_U8 it
       is a boolean mask instead: a token does not attend to the tokens with 0. bias_batch is 1 or `sequences`, and
       bias_heads is 1 or the number of query heads of the whole model (MT_ERR_SHAPE); 0 means 1. All tensor ranks pass
       the whole bias. It must not change until backward. mt_none(): no bias */
    mt_tensor attention_bias;
    int64_t bias_batch, bias_heads;
    /* MT_F32, of the shape of attention_bias, which must be of a float type (MT_ERR_ARGUMENT). Backward adds to it the
       gradient of the bias. A rank adds the part of its layers, heads and sequences: sum it over the tensor and the
       pipeline group, and over the data group if data ranks share the bias. It must overlap no other tensor of the call
       (MT_ERR_ARGUMENT). In invariant mode bias_heads must be the number of heads (MT_ERR_ARGUMENT), and the bits are
       the same on every tensor split, but not with other numbers of data ranks or stages. mt_none(): no gradient */
    mt_tensor attention_dbias;
    /* [1, 1], MT_F32, in memory of the device: the gradients of all losses are multiplied by it (see
       mt_step_loss_scale). Backward reads it and, if backward_scale is set, forward, too. mt_none(): 1 */
    mt_tensor loss_scale;
    /* The scale of mt_gpt_backward, or the lm_scale of mt_bert_backward, if it is known before forward. Forward then
       also computes the gradient of the tokens' loss: with one tensor rank, outside invariant mode, the logits are read
       once instead of twice. On a CPU and in invariant mode, losses and gradients have the same bits as without it.
       On a GPU outside invariant mode they may differ by rounding. It must be finite (MT_ERR_ARGUMENT). Without effect
       when saved is NULL. 0: backward computes the gradient */
    float backward_scale;
} mt_batch;

/* Returns the mt_dropout of probability p for a block of your own. When batch is NULL, it drops nothing. Set three
   fields of the result: at.first_row and at.first_col to the place in the global tensor where this rank's tensor
   begins, and at.global_cols to the number of columns of the global tensor (see mt_random). The global tensor has the
   tokens of the whole global batch: at.first_row is batch->first_sequence * batch->seq, plus tp_rank times the rows of
   this rank's tensor under sequence parallelism. Each (seed, step, layer,
   site) has random numbers of its own, for step < 2^44, layer < 2^18 and site < 4.
   The transformer layer with layer_number n uses (layer, site) = (n, 0) for attention probabilities, (n, 1) for the
   output of attention and (n, 2) for the output of the MLP. Cross-attention uses (n, 3) for its probabilities. A GPT,
   BERT or language model with L layers has the layer numbers 0 to L - 1, and uses (L, 3) for the embedding. Blocks of
   your own beside it therefore need numbers greater than L. Two models in one program draw the same masks, unless their
   batches have different seeds. */
MT_API mt_dropout mt_batch_dropout(const mt_batch *batch, float p, int64_t layer, int site);

/* ---- MLP --------------------------------------------------------------------------------------------------------- */

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
    int sequence_parallel;           /* 1: x and y are [tokens / t, hidden] */
    float init_std, output_init_std; /* deviation of the initial weights of fc1 and of fc2; MT_ZERO: 0; 0: 0.02 */
    int add_to_dx;                   /* 1: backward adds to dx, see mt_linear_desc */
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

/* The MLP without a registry: mt_mlp_forward and mt_mlp_backward on tensors in your own memory. They run the same code
   and give the same bits. tp is the tensor group. desc has the meaning that it has for mt_mlp_create, and is read in
   each call. b mt_none() means no bias. desc.no_bias may be 0, but 1 with a bias is MT_ERR_ARGUMENT. Nothing is logged.
   Shapes and communication are those of mt_mlp_forward and mt_mlp_backward. The caller sums dw and db over the data
   group. With sequence_parallel, fc2.db is the sum over this rank's rows; the caller sums it over the tensor group.
   Errors: those of mt_mlp_create, mt_mlp_forward and mt_column_parallel_linear_from_tensors. MT_ERR_ARGUMENT
   (backward): dw is mt_none(), or db where there is a bias. */
MT_API mt_status mt_parallel_mlp_forward(mt_context *ctx, mt_comm *tp, mt_tensor x, const mt_mlp_tensors *tensors,
                                         mt_tensor y, const mt_mlp_desc *desc, mt_mlp_saved *saved);
MT_API mt_status mt_parallel_mlp_backward(mt_context *ctx, mt_comm *tp, mt_tensor dy, const mt_mlp_tensors *tensors,
                                          mt_tensor dx, const mt_mlp_desc *desc, const mt_mlp_saved *saved);

/* ---- self-attention ---------------------------------------------------------------------------------------------- */

/* A query group is one key/value head with its heads / kv_heads query heads. The groups are split over the tensor ranks
   (arXiv 1909.08053, figure 3b): QKV is column-parallel, core attention runs on this rank's groups, and the projection
   is row-parallel.
   hidden must be a multiple of heads, and heads a multiple of kv_heads. heads must be at least t, and in invariant
   mode (see mt_parallel.h) at least V = mt_context_desc.invariant. With rotary, rotary_dim must be even and at most
   hidden / heads, and max_seq must be set. Otherwise create returns MT_ERR_SHAPE. When kv_heads is not a multiple of t
   (in invariant mode, of V), the last ranks also have empty groups: padding, whose weights are zero.
   When kv_heads is less than t (in invariant mode, than V), each group is divided into pieces, which are split over the
   ranks instead of groups. A piece has some of the group's query heads and a copy of its key and value (copies and
   copied of mt_param_desc). mt_sync_gradients then does 1 more all-reduce for each weight and bias with copies, of all
   keys and values, and the all-reduces of these gradients over the data group do not overlap with backward.
   qkv_layout (mt_kernels.cuh) is the order of the rows of the QKV weight [(heads + 2 * kv_heads) * head size, hidden].
     MT_QKV_PER_GROUP     A rank has the rows of its groups, which are neighbours (unit = a query group).
     MT_QKV_CONCATENATED  A rank, and in invariant mode each virtual shard, has [its queries; its keys; its values]
                          (parts = 3, unit = head size). mt_param_scatter takes the whole weight [3 * hidden, hidden] of
                          a program with this layout as it is. kv_heads must be heads: MT_ERR_SHAPE.
     MT_QKV_SEPARATE      There are three layers, which share f, so the communication is the same. A rank has the rows
                          of its heads in each weight (unit = the query heads of a group, or the head size).
   With the last two, kv_heads must be a multiple of t (in invariant mode, of V). If kv_heads is less than t (V), heads
   must be a multiple instead. Otherwise create returns MT_ERR_SHAPE.
   The first values of a weight depend on its name and on the positions of its elements, so models of different layouts
   begin with different values. After the same weights are copied into each layout, the models compute the same outputs,
   up to rounding. */
typedef struct mt_self_attention_desc {
    int64_t hidden, heads;
    int64_t kv_heads; /* number of query groups: heads for MHA, fewer for GQA; 0: heads */
    mt_mask mask;     /* 0: MT_MASK_CAUSAL */
    /* Base of rotary position embedding, usually 10000; 0: no rotary. By default each head is turned as a whole and in
       halves, as in GPT-NeoX and Hugging Face's Llama. See rotary_form and rotary_dim */
    float rotary_base;
    int64_t max_seq;      /* tokens of the longest sequence; must be 0 without rotary (MT_ERR_ARGUMENT) */
    float dropout;        /* of attention probabilities */
    int64_t layer_number; /* selects the dropout masks; give each layer a number of its own */
    int no_bias;          /* 1: qkv and proj have no bias */
    /* advanced */
    mt_qkv_layout qkv_layout;   /* 0: MT_QKV_PER_GROUP */
    mt_rotary_form rotary_form; /* see mt_kernels.cuh; 0: MT_ROTARY_HALVES */
    /* only the first rotary_dim features of a head are turned: the head size times Megatron's --rotary-percent; 0: all.
       rotary_form and rotary_dim must be 0 without rotary (MT_ERR_ARGUMENT) */
    int64_t rotary_dim;
    int64_t window;        /* sliding window: position p attends to position j only if |p - j| < window; 0: none */
    float softcap;         /* soft cap of the scores, see mt_attention_desc; 0: none */
    int alibi;             /* 1: ALiBi (arXiv 2108.12409) with the slopes of mt_alibi_slopes */
    int skip_bias_add;     /* as in mt_mlp_desc, for proj.bias */
    int sequence_parallel; /* 1: x and y are [tokens / t, hidden] */
    int recompute_core;    /* 1: backward runs core attention again, and saved does not keep out and lse */
    float init_std, output_init_std; /* deviation of the initial weights of qkv and of proj; MT_ZERO: 0; 0: 0.02 */
    int add_to_dx;                   /* 1: backward adds to dx, see mt_linear_desc */
} mt_self_attention_desc;

typedef struct mt_self_attention {
    mt_self_attention_desc desc;
    /* NAME.linear_qkv.*; the order of its rows is desc.qkv_layout; zero with MT_QKV_SEPARATE */
    mt_column_parallel_linear qkv;
    /* MT_QKV_SEPARATE: NAME.query.*, NAME.key.*, NAME.value.*; otherwise zero */
    mt_column_parallel_linear separate[3];
    mt_row_parallel_linear proj; /* NAME.linear_proj.* */
    mt_tensor rotary;            /* the table of mt_rotary_table, owned by the registry; mt_none(): no rotary */
    /* The slopes of this rank's n query heads (those in non-empty groups), [1, n], MT_F32, owned by the registry. You
       may write others there (see mt_upload). They must be at least 0: with another one, only its rank fails, on a CPU
       with MT_ERR_DATA. Checkpoints do not store slopes. mt_none(): no ALiBi, or no heads on this rank */
    mt_tensor alibi_slopes;
    int64_t pieces;           /* of each query group; 1 when there are enough groups */
    int64_t head_dim, groups; /* groups: number of groups (or pieces) of this rank, empty ones included */
    int64_t first_group;      /* global index of this rank's first group (or piece) */
} mt_self_attention;

typedef struct mt_self_attention_saved {
    mt_batch batch; /* the batch of forward; the arrays that it points to must not change until backward */
    mt_linear_saved qkv_in, proj_in;
    /* qkv [tokens, local features of QKV], out [tokens, proj.local_features], lse [n, tokens], where n is the number of
       query heads in this rank's non-empty groups. With recompute_core, out and lse are not valid after forward. */
    mt_tensor qkv, out, lse;
} mt_self_attention_saved;

/* x, y, dx, dy, saved and the communication are as for mt_mlp_forward and mt_mlp_backward, with tokens =
   batch->sequences * batch->seq. Inference (saved NULL) has no dropout. Backward uses the batch of forward.
   MT_ERR_SHAPE: with rotary, batch->seq is greater than max_seq.
   Errors of create: MT_ERR_ARGUMENT (a field of desc is out of range; the limit of hidden and max_seq is 2^31 - 1),
   MT_ERR_SHAPE (see mt_self_attention_desc), and those of the linear layers. */
MT_API mt_status mt_self_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                          const mt_self_attention_desc *desc, mt_self_attention *out);
MT_API mt_status mt_self_attention_forward(mt_context *ctx, const mt_self_attention *attention, const mt_batch *batch,
                                           mt_tensor x, mt_tensor y, mt_self_attention_saved *saved);
MT_API mt_status mt_self_attention_backward(mt_context *ctx, const mt_self_attention *attention, mt_tensor dy,
                                            mt_tensor dx, const mt_self_attention_saved *saved);

/* Inference with a key/value cache (see mt_kv_cache in mt_kernels.cuh): adds the keys and values of x to the cache, and
   computes y from x and the cache, without dropout.
     batch   seq is the number of new tokens of each sequence: 1 for a step of generation, the length of the longest
             prompt for prompts. lengths has the number of valid new tokens of each sequence (NULL: all are valid).
             cu_seqlens, documents, attention_bias and attention_dbias must not be set (MT_ERR_UNSUPPORTED). Other
             fields have no effect
     cache   keys and values are [sequences * n * max_seq, head size], contiguous, in the model's type, where n =
             mt_self_attention_cache_groups; mt_none() when n is 0. In invariant mode the rows of a virtual shard follow
             those of the one before. After its last layer the caller adds the new tokens to lengths
             (mt_kv_cache_advance)
     x, y    [sequences * seq, hidden] on every tensor rank, also with sequence_parallel, because the tokens of a step
             need not be a multiple of t. y must not overlap x. In y, rows of tokens that are not valid have no meaning
   Communication: 1 all-reduce over the tensor group.
   Errors: MT_ERR_UNSUPPORTED (the mask is not causal), MT_ERR_SHAPE (with rotary, the max_seq of the cache is greater
   than that of the layer), and those of mt_kv_cache_append. After an error, only keys and values at positions from
   lengths on may have changed.
   mt_self_attention_cache_groups returns n, the number of key/value heads of this rank. */
MT_API mt_status mt_self_attention_cached_forward(mt_context *ctx, const mt_self_attention *attention,
                                                  const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                  mt_tensor y);
MT_API int64_t mt_self_attention_cache_groups(const mt_self_attention *attention);

/* The tensors of attention in your own memory, see mt_linear_tensors. A group has n = heads / kv_heads query heads of D
   features. qkv and separate are split by rows, and proj by columns in units of n * D:
     MT_QKV_PER_GROUP     qkv, in units of (n + 2) * D
     MT_QKV_CONCATENATED  qkv, in 3 parts and units of D
     MT_QKV_SEPARATE      separate, the layers of queries (units of n * D), keys and values (units of D)
   qkv is ignored with MT_QKV_SEPARATE, and separate with the other layouts. kv_heads must be at least t, and in
   invariant mode at least V (MT_ERR_SHAPE), because here nothing sums the gradients of copies. */
typedef struct mt_self_attention_tensors {
    mt_linear_tensors qkv, separate[3], proj;
    /* the table [max_seq, R] of mt_rotary_table, MT_F32, where R is desc.rotary_dim, or D if this is 0; mt_none() when
       desc.rotary_base is 0 */
    mt_tensor rotary;
    /* [1, n], MT_F32: the slopes of this rank's n query heads, as mt_alibi_slopes computes them or others; mt_none()
       when desc.alibi is 0. With alibi every rank passes memory, also one without heads (n is 0) */
    mt_tensor alibi_slopes;
} mt_self_attention_tensors;

/* Attention without a registry: mt_self_attention_forward and mt_self_attention_backward on tensors in your own memory.
   They run the same code and give the same bits. tp is the tensor group. desc has the meaning that it has for
   mt_self_attention_create, and is read in each call. b mt_none() means no bias. desc.no_bias may be 0, but 1 with a
   bias is MT_ERR_ARGUMENT. Nothing is logged. Shapes and communication are those of mt_self_attention_forward and
   mt_self_attention_backward. The caller sums dw and db over the data group. With sequence_parallel, proj.db is the sum
   over this rank's rows; the caller sums it over the tensor group.
   Errors: those of mt_self_attention_create, mt_self_attention_forward and mt_column_parallel_linear_from_tensors.
   MT_ERR_ARGUMENT: rotary does not go with rotary_base, or alibi_slopes with alibi, or, in backward, dw is mt_none(),
   or db where there is a bias. */
MT_API mt_status mt_parallel_attention_forward(mt_context *ctx, mt_comm *tp, const mt_batch *batch, mt_tensor x,
                                               const mt_self_attention_tensors *tensors, mt_tensor y,
                                               const mt_self_attention_desc *desc, mt_self_attention_saved *saved);
MT_API mt_status mt_parallel_attention_backward(mt_context *ctx, mt_comm *tp, mt_tensor dy,
                                                const mt_self_attention_tensors *tensors, mt_tensor dx,
                                                const mt_self_attention_desc *desc,
                                                const mt_self_attention_saved *saved);

/* QK-norm (arXiv 2302.05442; q_layernorm and k_layernorm of Megatron-LM) normalises each query head and each key head.
   All query heads have one gain, and all key heads have another. create uses desc for both norm layers: desc->features
   is the head size. `layer` is the layer that computes qkv in the layout MT_QKV_PER_GROUP. Its desc.unit must be the
   size of a query group, (heads_per_group + 2) * head size; from it create computes the number of query groups.
   qkv and dqkv have the layout of qkv in mt_core_attention_forward and are contiguous. No communication.
     forward   replaces the queries and keys in qkv by their normalised values. saved keeps copies of the original ones
               in the arena. When saved is NULL, forward is inference.
     backward  replaces the gradients of the normalised queries and keys in dqkv by those of the original ones, and adds
               to the gradients of the parameters.
   MT_ERR_ARGUMENT: desc->groups is not 0, or layer was not created. MT_ERR_SHAPE: layer->desc.unit is not a multiple of
   the head size or is less than 3 * head size, the layer has several parts, or qkv or dqkv has another layout or is not
   contiguous. */
typedef struct mt_qk_norm {
    mt_norm_layer q, k; /* NAME.q_layernorm.*, NAME.k_layernorm.* */
    int64_t unit;       /* columns of a query group */
} mt_qk_norm;

typedef struct mt_qk_norm_saved {
    mt_norm_saved q, k;
} mt_qk_norm_saved;

MT_API mt_status mt_qk_norm_create(mt_context *ctx, mt_params *params, const char *name, const mt_norm_layer_desc *desc,
                                   const mt_column_parallel_linear *layer, mt_qk_norm *out);
MT_API mt_status mt_qk_norm_forward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor qkv, mt_qk_norm_saved *saved);
MT_API mt_status mt_qk_norm_backward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor dqkv,
                                     const mt_qk_norm_saved *saved);

/* Returns the desc that mt_core_attention_forward and mt_core_attention_backward need for the output of the layer `qkv`
   on this rank. The layer's parts and unit say which layout it computes: MT_QKV_PER_GROUP with 1 part and the unit
   (heads_per_group + 2) * head_dim, MT_QKV_CONCATENATED, with one query head per group, with 3 parts and the unit
   head_dim. The field `groups` counts only this rank's non-empty groups. The mask is causal. lengths, cu_seqlens and
   the bias are those of batch. dropout.at has this rank's first_row, first_col and global_cols, and dropout.p is 0. To
   use dropout, copy p, at.seed, at.subsequence and at.offset from the result of mt_batch_dropout into dropout.
   When a pointer is NULL, the layer has copies, or the parts and the unit are others, all fields of the result are 0,
   and every call with it fails. For three layers (MT_QKV_SEPARATE) fill the desc yourself. */
MT_API mt_attention_desc mt_core_attention_desc(const mt_column_parallel_linear *qkv, int64_t head_dim,
                                                const mt_batch *batch);

/* Run mt_attention_forward and mt_attention_backward on the groups of this rank, without rotary, for your own blocks.
   For shards pass weight->shards of the column-parallel layer that computed qkv. Outside invariant mode this number is
   1. In invariant mode it is the number of virtual shards on this rank, and core attention runs once for each of them.
   desc->groups counts only this rank's non-empty groups. all_groups below counts the empty ones, too.
     qkv, dqkv  [tokens, all_groups * (heads_per_group + 2) * head_dim]: virtual shard by virtual shard, each with the
                columns of its groups in the order of desc->qkv_layout. With MT_QKV_SEPARATE: the output of the layer
                of queries, then of keys, then of values
     out, dout  [tokens, all_groups * heads_per_group * head_dim]
     lse        [desc->groups * heads_per_group, tokens]; may be mt_none() in forward
   The columns of empty groups come last. forward sets these columns of out to zero, and backward those of dqkv.
   MT_ERR_SHAPE: the columns are not a whole number of groups, shards does not divide all_groups, or a group is empty
   and qkv_layout is not MT_QKV_PER_GROUP. */
MT_API mt_status mt_core_attention_forward(mt_context *ctx, const mt_attention_desc *desc, int shards, mt_tensor qkv,
                                           mt_tensor out, mt_tensor lse);
MT_API mt_status mt_core_attention_backward(mt_context *ctx, const mt_attention_desc *desc, int shards, mt_tensor qkv,
                                            mt_tensor out, mt_tensor lse, mt_tensor dout, mt_tensor dqkv);

/* Copies between a QKV weight [(heads + 2 * kv_heads) * head_dim, cols] of the layout MT_QKV_PER_GROUP and separate
   weights q [heads * head_dim, cols], k and v [kv_heads * head_dim, cols]. For a bias cols is 1. All are unsharded and
   contiguous, in host memory, and must not overlap. Errors: MT_ERR_SHAPE (a size is not positive or too large, or heads
   is not a multiple of kv_heads), MT_ERR_ARGUMENT (a pointer is NULL). */
MT_API mt_status mt_qkv_from_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *q,
                                      const float *k, const float *v, float *qkv);
MT_API mt_status mt_qkv_to_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *qkv,
                                    float *q, float *k, float *v);

/* Copy a weight [heads * head_dim, cols] of queries or of keys between models with MT_ROTARY_PAIRS and
   MT_ROTARY_HALVES. In each head, rows 2 i and 2 i + 1 of `pairs` are rows i and i + R / 2 of `halves`, for i < R / 2,
   with R = rotary_dim, or head_dim if this is 0. The other rows are equal. When the queries and keys of a model are
   converted, and its values are left as they are, it computes the same with the other form, up to rounding. For a bias
   cols is 1. `pairs` and `halves` are unsharded and contiguous, in host memory, and must not overlap. Convert the
   separate weights of mt_qkv_to_separate. Errors: MT_ERR_SHAPE (a size is not positive or too large, or R is odd or
   greater than head_dim), MT_ERR_ARGUMENT (a pointer is NULL). */
MT_API mt_status mt_rotary_halves_from_pairs(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *pairs, float *halves);
MT_API mt_status mt_rotary_pairs_from_halves(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *halves, float *pairs);

/* ---- cross-attention --------------------------------------------------------------------------------------------- */

/* Attention with queries from x, and keys and values from another sequence, `memory`: in the decoder of arXiv
   1706.03762 the output of the encoder (CrossAttention of Megatron-LM). A query sees all valid keys of its sequence.
   There is no causal mask and no rotary. A mask or a bias can be given, see mt_cross_attention_forward.
   The heads are split over the tensor ranks: the layers of queries, keys and values are column-parallel, core attention
   runs on this rank's query groups, and the projection is row-parallel.
   hidden must be a multiple of heads, and heads a multiple of kv_heads. heads must be at least t, and in invariant mode
   at least V. Otherwise create returns MT_ERR_SHAPE. kv_heads need not be a multiple of t (V): the last ranks then have
   empty groups. When it is less than t (V), each group is divided into pieces. Both are as in mt_self_attention with
   MT_QKV_PER_GROUP.
   Communication over the tensor group: forward does 1 all-reduce, of y. Backward does 2: one of dx, and one of dmemory
   for keys and values together. With sequence_parallel forward does 2 all-gathers (x, memory) and 1 reduce-scatter (y),
   and backward does 3 all-gathers (dy, x, memory) and 2 reduce-scatters (dx, dmemory). A gradient that is mt_none() is
   not reduced. */
typedef struct mt_cross_attention_desc {
    int64_t hidden, heads;
    int64_t kv_heads;     /* number of query groups; 0: heads */
    int64_t kv_hidden;    /* features of memory; 0: hidden */
    float dropout;        /* of attention probabilities */
    int64_t layer_number; /* selects the dropout masks. It may be that of a self-attention in the same layer */
    int no_bias;          /* 1: query, key, value and proj have no bias */
    /* advanced */
    float softcap;                   /* soft cap of the scores, see mt_attention_desc; 0: none */
    int skip_bias_add;               /* as in mt_mlp_desc, for proj.bias */
    int sequence_parallel;           /* 1: x and y are [queries / t, hidden], and memory is [keys / t, kv_hidden] */
    int recompute_core;              /* 1: backward runs core attention again, and saved does not keep out and lse */
    float init_std, output_init_std; /* as in mt_self_attention_desc: of query, key and value, and of proj */
    int add_to_dx;                   /* 1: backward adds to dx, see mt_linear_desc */
    int add_to_dmemory;              /* the same for dmemory, to sum it over the layers that read one memory */
} mt_cross_attention_desc;

typedef struct mt_cross_attention {
    mt_cross_attention_desc desc;
    mt_column_parallel_linear query;               /* NAME.query.*, from x */
    mt_column_parallel_linear key_value[2];        /* NAME.key.* and NAME.value.*, from memory */
    mt_row_parallel_linear proj;                   /* NAME.linear_proj.* */
    int64_t pieces, head_dim, groups, first_group; /* as in mt_self_attention */
} mt_cross_attention;

typedef struct mt_cross_attention_saved {
    mt_batch batch, memory_batch; /* of forward; its arrays must not change until backward */
    mt_linear_saved query_in, memory_in, proj_in;
    /* q, out [queries, proj.local_features], k, v [keys, key_value[i].local_features], lse [n, queries], where n is the
       number of query heads in this rank's non-empty groups. With recompute_core, out and lse are not valid after
       forward. */
    mt_tensor q, k, v, out, lse;
} mt_cross_attention_saved;

/* Forward computes y from x and memory. Backward computes dx and dmemory from dy, and adds to the gradients of the
   parameters.
     x, y, dx, dy     [queries, hidden], with queries = batch->sequences * batch->seq
     memory, dmemory  [keys, kv_hidden], with keys = memory_batch->sequences * memory_batch->seq
   With sequence_parallel each rank has 1 / t of these rows, and t must divide queries and keys. batch is that of the
   tokens of x, and memory_batch that of memory, such as the encoder's. Sequence i of one belongs to sequence i of the
   other. Of their fields:
     sequences, first_sequence  must be the same in both
     seq                        of batch is the number of queries of a sequence, of memory_batch that of its keys
     lengths                    of memory_batch: the first lengths[i] keys of sequence i are valid. With length 0, core
                                attention returns zeros. lengths of batch has no effect: padded queries also get a row
                                of y
     attention_bias             of memory_batch, with its bias_batch, bias_heads and attention_dbias: the bias or mask
                                of these scores, [bias_batch * bias_heads * seq of batch, seq of memory_batch]. That
                                of batch has no effect
     seed, step, random_offset  of batch select the dropout masks; those of memory_batch have no effect
     cu_seqlens                 must be NULL in both (MT_ERR_ARGUMENT)
   The other fields have no effect. A probability is dropped by its index in [sequence, head, query, key], see
   mt_attention_desc. Inference (saved NULL) has no dropout. Backward uses the batches of forward.
   y must overlap neither x nor memory. dx and dmemory must not overlap each other, dy, x or memory (MT_ERR_ARGUMENT).
   x and memory may be the same tensor. When t > 1, y, dx and dmemory must be contiguous; with sequence_parallel x,
   memory and dy, too (MT_ERR_SHAPE). x and memory must not change until backward has returned. The tensors of saved are
   in the arena until the caller's mt_arena_release. When dx or dmemory is mt_none(), backward does not compute it.
   MT_ERR_SHAPE: the batches have different numbers of sequences. MT_ERR_ARGUMENT: their first_sequence differs.
   Errors of create: MT_ERR_ARGUMENT (a field of desc is out of range; the limit of hidden and kv_hidden is 2^31 - 1),
   MT_ERR_SHAPE (see mt_cross_attention_desc), and those of the linear layers. */
MT_API mt_status mt_cross_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                           const mt_cross_attention_desc *desc, mt_cross_attention *out);
MT_API mt_status mt_cross_attention_forward(mt_context *ctx, const mt_cross_attention *attention, const mt_batch *batch,
                                            mt_tensor x, const mt_batch *memory_batch, mt_tensor memory, mt_tensor y,
                                            mt_cross_attention_saved *saved);
MT_API mt_status mt_cross_attention_backward(mt_context *ctx, const mt_cross_attention *attention, mt_tensor dy,
                                             mt_tensor dx, mt_tensor dmemory, const mt_cross_attention_saved *saved);

/* ---- transformer layer ------------------------------------------------------------------------------------------- */

/* Selects the places of the two norms of a layer. LN is the norm (mt_norm_kind) and D is dropout.
   MT_PRE_LN            x1 = x + D(attn(LN(x))), y = x1 + D(mlp(LN(x1))): GPT-2, Llama, and what arXiv 1909.08053
                        recommends for BERT (figure 7b)
   MT_POST_LN           x1 = LN(x + D(attn(x))), y = LN(x1 + D(mlp(x1))): the original BERT (figure 7a)
   MT_RESIDUAL_POST_LN  n = LN(x), x1 = n + D(attn(n)), m = LN(x1), y = m + D(mlp(m)): Megatron's
                        --apply-residual-connection-post-layernorm */
typedef enum mt_ln_placement { MT_PRE_LN = 0, MT_POST_LN = 1, MT_RESIDUAL_POST_LN = 2 } mt_ln_placement;
#define MT_LN_PLACEMENT_WORDS "MT_PRE_LN MT_POST_LN MT_RESIDUAL_POST_LN" /* see mt_check_enum */

/* Selects the activations that forward does not keep and backward computes again (arXiv 2205.05198; Megatron's
   --recompute-granularity). The results have the same bits in each mode, because dropout draws the same masks again.
   docs/performance.md lists the memory that each mode takes.
   MT_RECOMPUTE_NONE       none
   MT_RECOMPUTE_SELECTIVE  those of core attention. Backward computes them from qkv, without communication
   MT_RECOMPUTE_FULL       all. Backward runs forward again from the input of the layer, but without the last product,
                           fc2, and its reduction. Forward and backward of a layer together then do 5 all-reduces
                           instead of 4; with sequence_parallel, 8 all-gathers and 5 reduce-scatters instead of 6 and 4.
                           With MT_POST_LN backward also repeats fc2: 6 all-reduces, or 8 all-gathers and 6
                           reduce-scatters */
typedef enum mt_recompute { MT_RECOMPUTE_NONE = 0, MT_RECOMPUTE_SELECTIVE = 1, MT_RECOMPUTE_FULL = 2 } mt_recompute;
#define MT_RECOMPUTE_WORDS "MT_RECOMPUTE_NONE MT_RECOMPUTE_SELECTIVE MT_RECOMPUTE_FULL" /* see mt_check_enum */

typedef struct mt_transformer_layer_desc {
    int64_t hidden, heads;
    int64_t kv_heads, ffn;     /* query groups (0: heads); inner width of the MLP (0: 4 * hidden) */
    mt_ln_placement placement; /* 0: MT_PRE_LN */
    mt_norm_kind norm;         /* 0: MT_LAYER_NORM */
    float norm_eps;            /* 0: 1e-5 */
    mt_activation activation;  /* 0: MT_GELU_TANH */
    mt_mask mask;              /* 0: MT_MASK_CAUSAL */
    float rotary_base;         /* base of rotary position embedding, usually 10000; 0: no rotary; see rotary_form */
    int64_t max_seq;           /* tokens of the longest sequence; must be 0 without rotary (MT_ERR_ARGUMENT) */
    float attention_dropout, hidden_dropout; /* of attention probabilities; of the outputs of attention and MLP */
    int64_t layer_number;                    /* selects the dropout masks; give each layer a number of its own */
    int no_bias;                             /* 1: qkv, proj, fc1 and fc2 have no bias; a LayerNorm still has one */
    /* advanced */
    mt_qkv_layout qkv_layout; /* see mt_self_attention_desc; 0: MT_QKV_PER_GROUP */
    /* As in mt_self_attention_desc: the features that rotary turns together (0: MT_ROTARY_HALVES), and the number of
       features of a head that it turns (0: all) */
    mt_rotary_form rotary_form;
    int64_t rotary_dim;
    /* As in mt_self_attention_desc: sliding window, soft cap of the scores and ALiBi (0: none) */
    int64_t window;
    float softcap;
    int alibi;
    int sequence_parallel;  /* 1: x and y are [tokens / t, hidden] */
    mt_recompute recompute; /* 0: MT_RECOMPUTE_NONE */
    float init_std;         /* standard deviation of the initial weights of qkv and fc1; MT_ZERO: 0; 0: 0.02 */
    float output_init_std;  /* of proj and fc2; GPT-2 has 0.02 / sqrt(2 * layers); MT_ZERO: 0; 0: 0.02 */
} mt_transformer_layer_desc;

typedef struct mt_transformer_layer {
    mt_transformer_layer_desc desc;
    /* The first and the second LN of mt_ln_placement: NAME.input_layernorm.* and NAME.pre_mlp_layernorm.*, the names of
       Megatron-LM. With MT_PRE_LN and MT_RESIDUAL_POST_LN, input_norm normalises the input of attention, and mlp_norm
       that of the MLP. With MT_POST_LN each follows its block: input_norm normalises x + D(attn(x)), and mlp_norm
       normalises x1 + D(mlp(x1)), so its output is y */
    mt_norm_layer input_norm, mlp_norm;
    mt_self_attention attention; /* NAME.self_attention.* */
    mt_mlp mlp;                  /* NAME.mlp.* */
    mt_comm *tp;                 /* the tensor group */
} mt_transformer_layer;

/* With MT_RECOMPUTE_FULL, only x and attention.batch are valid after forward. */
typedef struct mt_transformer_layer_saved {
    mt_tensor x; /* the layer's input, in the caller's memory */
    mt_norm_saved input_norm, mlp_norm;
    mt_self_attention_saved attention;
    mt_mlp_saved mlp;
} mt_transformer_layer_saved;

/* Forward computes y from x. Backward computes dx from dy, and adds to the gradients of the parameters. x, y, dx, dy
   are [tokens, hidden], or [tokens / t, hidden] with sequence_parallel. y must not overlap x, and dx must overlap
   neither dy nor x (MT_ERR_ARGUMENT). None of them may be mt_none(). When t > 1, y and dx must be contiguous; with
   sequence_parallel x and dy, too (MT_ERR_SHAPE). x must not change until backward has returned. The tensors of saved
   are in the arena until the caller's mt_arena_release. When saved is NULL, forward is inference, without dropout.
   Backward uses the batch of forward.
   Communication over the tensor group: forward does 2 all-reduces of [tokens, hidden], and backward does 2. With
   sequence_parallel forward does 2 all-gathers and 2 reduce-scatters, and backward does 4 all-gathers and 2
   reduce-scatters. With MT_RECOMPUTE_FULL backward does more, see mt_recompute.
   Errors of create: MT_ERR_ARGUMENT (a field of desc is out of range), and those of the create functions of its
   parts. */
MT_API mt_status mt_transformer_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                             const mt_transformer_layer_desc *desc, mt_transformer_layer *out);
MT_API mt_status mt_transformer_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                                              mt_tensor x, mt_tensor y, mt_transformer_layer_saved *saved);
MT_API mt_status mt_transformer_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy,
                                               mt_tensor dx, const mt_transformer_layer_saved *saved);

/* Inference with a key/value cache: mt_self_attention_cached_forward with the norms, residuals and MLP of the layer.
   batch, cache, x, y and the errors are as there. Communication: 2 all-reduces over the tensor group. */
MT_API mt_status mt_transformer_layer_cached_forward(mt_context *ctx, const mt_transformer_layer *layer,
                                                     const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                     mt_tensor y);

/* ---- language model: embedding and layers ------------------------------------------------------------------------ */

/* The part that GPT and BERT have in common: an embedding (tokens, learned positions, token types, norm, dropout),
   layers, and a final norm. Its output is hidden states, [tokens, hidden]. mt_gpt and mt_bert below add heads and
   losses to it. Use it alone for an encoder, or for a model with heads of your own. */
typedef struct mt_language_model_desc {
    int64_t vocab, layers, max_seq; /* max_seq: tokens of the longest sequence */
    /* Describes every layer. Leave layer.layer_number and layer.max_seq 0 (otherwise MT_ERR_ARGUMENT): create sets them
       in each layer. When output_init_std is 0, it becomes init_std / sqrt(2 * layers). init_std is also that of the
       embeddings. With rotary or ALiBi there are no learned positions */
    mt_transformer_layer_desc layer;
    /* advanced */
    /* 1: the names of the layers and of the final norm begin with "encoder", as in Megatron-LM's BERT; 0: with
       "decoder" */
    int is_encoder;
    int64_t token_types; /* number of token types, see mt_batch.token_types; 0: the model has no token types */
    int embedding_norm;  /* 1: the sum of the embeddings is normalised, before the dropout */
    /* 1: an output head uses the weight of the token embedding, which is therefore also on the last pipeline stage */
    int tied_head;
    /* layer.recompute applies to the first recompute_layers layers of each stage; must be 0 with MT_RECOMPUTE_NONE
       (MT_ERR_ARGUMENT). 0: to all layers */
    int64_t recompute_layers;
    float embedding_dropout; /* of the sum of the embeddings */
    /* rows of the token embedding with padding of your own, such as 50304 for a vocab of 50257; see mt_embedding_desc.
       0: none */
    int64_t padded_vocab;
} mt_language_model_desc;

/* This rank's shard of the model or, on a grid with several pipeline stages, of its stage. Every stage has the same
   number of layers. The first stage has the embeddings. The last stage has the final norm and, with tied_head, a second
   copy of the token embedding; mt_sync_gradients adds up the gradients of the two copies. Members that a stage does not
   have are zero. STACK below is "encoder" with is_encoder, and otherwise "decoder". */
typedef struct mt_language_model {
    mt_language_model_desc desc;
    mt_vocab_parallel_embedding tokens; /* embedding.word_embeddings.weight */
    mt_param *positions;                /* embedding.position_embeddings.weight [max_seq, hidden]; may be NULL */
    mt_param *token_types;              /* embedding.tokentype_embeddings.weight [token_types, hidden]; may be NULL */
    mt_norm_layer embedding_norm;       /* embedding.layernorm.*; weight is NULL without embedding_norm */
    mt_transformer_layer *layers;       /* layers[i]: STACK.layers.<first_layer + i>.*; the registry owns the array */
    int64_t first_layer, local_layers;  /* global number of layers[0]; number of layers of this stage */
    mt_norm_layer final_norm;           /* STACK.final_layernorm.*; weight is NULL with MT_POST_LN */
    const mt_grid *grid;
} mt_language_model;

/* What one forward keeps for its backward: tensors in the arena, until the caller's mt_arena_release, and the pointers
   of the call. It can be used again after its backward. Several forwards may be in flight, each with a `saved` of its
   own. */
typedef struct mt_language_model_saved {
    mt_transformer_layer_saved *layers; /* [local_layers], from mt_language_model_saved_create */
    mt_batch batch;
    const int32_t *ids; /* the ids of the forward that waits for its backward; NULL: none waits */
    mt_norm_saved embedding_norm, final_norm;
} mt_language_model_saved;

/* create adds the parameters of this rank's stage to the registry, which owns them; out needs no destroy. saved_create
   allocates host memory, which saved_destroy frees. Errors: MT_ERR_SHAPE (`layers` is not a multiple of the number of
   stages, or hidden, heads and kv_heads break a rule of mt_self_attention_desc), MT_ERR_ARGUMENT (a value is out of
   range, or there are several stages and mt_context_desc.arena_symmetric is set), MT_ERR_MEMORY. */
MT_API mt_status mt_language_model_create(mt_context *ctx, mt_params *params, const mt_language_model_desc *desc,
                                          mt_language_model *out);
MT_API mt_status mt_language_model_saved_create(mt_context *ctx, const mt_language_model *model,
                                                mt_language_model_saved *out);
/* saved may be NULL or zero-initialised. */
MT_API void mt_language_model_saved_destroy(mt_language_model_saved *saved);

/* Let tokens be batch->sequences * batch->seq. forward computes output [tokens, hidden] from ids [tokens]. backward
   reads doutput, the gradient of output, and adds to the gradients of the parameters; it does not change doutput. With
   sequence_parallel output and doutput are [tokens / t, hidden], this rank's rows. They have the model's type. ids are
   in memory of the context's device, the same on every tensor rank, and must not change until backward. On a grid with
   one stage, input and dinput are mt_none(). When saved is NULL, forward is evaluation, without dropout. Call backward
   once for each forward with saved.
   With several pipeline stages, call both functions in those of your mt_pipeline_stage (see mt_gpt_stage_forward). On
   every stage but the first, input is the output of the stage before, and dinput becomes its gradient; input must not
   change until backward. output and doutput are given on every stage, also on the last one.
   When t > 1, output and dinput must be contiguous; with sequence_parallel input and doutput, too (MT_ERR_SHAPE).
   output must not overlap input, nor dinput doutput (MT_ERR_ARGUMENT).
   Communication over the tensor group: forward does 1 all-reduce for the embedding and 2 for each layer of the stage,
   and backward does 2 for each layer. With sequence_parallel forward does 1 reduce-scatter for the embedding, and 2
   all-gathers and 2 reduce-scatters for each layer; backward does 4 all-gathers and 2 reduce-scatters for each layer,
   and 1 all-gather for the embedding. For recomputation see mt_recompute. After mt_sync_gradients_begin, backward also
   sums gradients over the data group, as mt_gpt_backward does.
   MT_ERR_SHAPE: batch->seq is greater than max_seq. MT_ERR_DATA: an id or a token type is out of range; on a GPU a
   later call returns it, see mt_ids_check. MT_ERR_ARGUMENT: saved holds no forward. */
MT_API mt_status mt_language_model_forward(mt_context *ctx, const mt_language_model *model, const mt_batch *batch,
                                           const int32_t *ids, mt_tensor input, mt_tensor output,
                                           mt_language_model_saved *saved);
MT_API mt_status mt_language_model_backward(mt_context *ctx, const mt_language_model *model, mt_tensor doutput,
                                            mt_tensor dinput, mt_language_model_saved *saved);

/* ---- GPT --------------------------------------------------------------------------------------------------------- */

/* A GPT is a token embedding, learned positions (not with rotary or ALiBi), layers, a final norm (not with MT_POST_LN),
   an output head and cross-entropy. The output head has the weight of the token embedding unless untied_head is set. */
typedef struct mt_gpt_desc {
    int64_t vocab, layers, max_seq; /* max_seq: tokens of the longest sequence */
    /* Describes every layer. Leave layer_number and max_seq 0: mt_gpt_create sets them. When output_init_std is 0, it
       becomes init_std / sqrt(2 * layers). */
    mt_transformer_layer_desc layer;
    /* advanced */
    int64_t recompute_layers; /* as in mt_language_model_desc */
    int untied_head;          /* 1: the output head has a weight of its own */
    float embedding_dropout;  /* of the sum of token and position embedding */
    float label_smoothing;    /* see mt_cross_entropy_desc */
    /* targets of this value have loss 0 and gradient 0. Set MT_ZERO to ignore targets of 0. 0: -100, as in
       PyTorch */
    int32_t ignore_index;
    /* rows of the embedding and of the output head with padding of your own, such as 50304 for a vocab of 50257; see
       mt_embedding_desc. The logits of mt_gpt_logits and the tensors of checkpoints are without padding. 0: none */
    int64_t padded_vocab;
} mt_gpt_desc;

/* This rank's shard of the model or of its pipeline stage. The last stage has the head. A tied embedding is on the
   first and on the last stage; mt_sync_gradients adds up its two gradients. */
typedef struct mt_gpt {
    mt_gpt_desc desc;
    mt_language_model model;
    mt_column_parallel_linear head; /* its weight is model.tokens.weight, or output_layer.weight with untied_head */
    mt_cross_entropy_desc loss;
} mt_gpt;

/* What one forward keeps for its backward, as mt_language_model_saved. */
typedef struct mt_gpt_saved {
    mt_language_model_saved model;
    mt_linear_saved head;
    mt_cross_entropy_saved loss;
} mt_gpt_saved;

/* mt_gpt_create adds the parameters of this rank's stage to the registry, which owns them; out needs no destroy.
   mt_gpt_saved_create allocates host memory, which mt_gpt_saved_destroy frees. Errors: MT_ERR_SHAPE (`layers` is not a
   multiple of the number of stages, or hidden, heads and kv_heads break a rule of mt_self_attention_desc),
   MT_ERR_ARGUMENT (a value is out of range, or there are several stages and mt_context_desc.arena_symmetric is set),
   MT_ERR_MEMORY. */
MT_API mt_status mt_gpt_create(mt_context *ctx, mt_params *params, const mt_gpt_desc *desc, mt_gpt *out);
MT_API mt_status mt_gpt_saved_create(mt_context *ctx, const mt_gpt *gpt, mt_gpt_saved *out);
MT_API void mt_gpt_saved_destroy(mt_gpt_saved *saved); /* NULL and a zero-initialised struct are allowed */

/* Computes the loss of every token, on a grid with one pipeline stage. With more stages use mt_gpt_stage_forward.
   ids, targets [sequences * seq] are in memory of the context's device. They are the same on every tensor rank, and
   must not change until backward. loss is [1, sequences * seq], MT_F32. Give padding tokens the target -100, or your
   ignore_index: their loss is then 0. When saved is NULL, forward is evaluation, without dropout.
   Communication over the tensor group: 1 all-reduce for the embedding, and 2 for each layer. With sequence_parallel: 1
   reduce-scatter for the embedding, 2 all-gathers and 2 reduce-scatters for each layer, and 1 all-gather for the head.
   In both cases also 1 all-gather of 4 floats per token for the loss.
   MT_ERR_SHAPE: batch->seq is greater than max_seq. MT_ERR_ARGUMENT: batch->backward_scale is not finite. MT_ERR_DATA:
   an id or a target is out of range. After these errors, loss and saved are unchanged. A GPU does not wait for the
   check of ids: forward then returns MT_SUCCESS with useless results, and a later call returns MT_ERR_DATA (see
   mt_ids_check). */
MT_API mt_status mt_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                const int32_t *targets, mt_tensor loss, mt_gpt_saved *saved);

/* Adds the gradient of scale * sum(loss) to the gradient of every parameter. scale is usually 1 / (tokens of the whole
   global batch). Call mt_gpt_backward once for each forward: it overwrites the saved logits, and afterwards saved
   holds no forward.
   Communication over the tensor group, without recomputation: 1 all-reduce for the head and 2 for each layer. With
   sequence_parallel: 1 all-gather and 1 reduce-scatter for the head, 4 all-gathers and 2 reduce-scatters for each
   layer, and 1 all-gather for the embedding. After mt_sync_gradients_begin, mt_gpt_backward also sums gradients over
   the data group, each bucket as soon as its gradients are final.
   MT_ERR_ARGUMENT: saved holds no forward, or its batch has a backward_scale, and scale is another number. After the
   second of these, saved still holds the forward. */
MT_API mt_status mt_gpt_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_gpt_saved *saved);

/* mt_gpt_forward and mt_gpt_backward for one stage of a pipeline. The functions `forward` and `backward` of your
   mt_pipeline_stage call them with the tensors that they get from mt_pipeline_run: input, output, doutput and dinput
   are [tokens, hidden], or [tokens / t, hidden] with sequence_parallel, in the model's type. On the first stage input
   and dinput are mt_none(), and on the last stage output and doutput are mt_none(). input must not change until
   backward. All stages pass the same batch, ids, targets and scale. The last stage writes loss; on the others loss may
   be mt_none().
   An example with one mt_gpt_saved for each slot (see mt_pipeline_slots). The whole program is in docs/many-ranks.md,
   "Pipelines":
       mt_status forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
           ... batch, ids, targets and loss of micro-batch a->micro_batch; ids and targets live until its backward ...
           return mt_gpt_stage_forward(ctx, &gpt, &batch, ids, targets, input, output, loss, &saved[a->slot]);
       }
       mt_status backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
           MT_TRY(mt_gpt_stage_backward(ctx, &gpt, 1.0f / tokens, doutput, dinput, &saved[a->slot]));
           return mt_accumulate_gradients(ctx, params);   // does nothing outside invariant mode
       } */
MT_API mt_status mt_gpt_stage_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                      mt_gpt_saved *saved);
MT_API mt_status mt_gpt_stage_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_tensor doutput,
                                       mt_tensor dinput, mt_gpt_saved *saved);

/* Computes logits, without dropout. The shape of logits says for which tokens: [sequences * seq, vocab] for all tokens,
   or [sequences, vocab] for the last token of each sequence. When the batch has lengths, this is the last valid token;
   for a sequence of length 0 it is the first one. logits may have any float type; in MT_F32 the logits of a 16-bit
   model are not rounded to 16 bits.
   Collective over the tensor and the pipeline group: all their ranks call it with the same batch and ids, and every
   rank gets the whole logits. On a GPU the call waits when it looks up the last tokens of a batch that has lengths.
   MT_ERR_SHAPE: batch->seq is greater than max_seq. MT_ERR_DATA: an id is out of range; on a GPU a later call returns
   it: see mt_ids_check. */
MT_API mt_status mt_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               mt_tensor logits);

/* The key/value cache of a GPT, for text generation: the keys and values of up to max_seq tokens of each of `sequences`
   sequences, in all layers of this rank's stage. A sequence is a slot for one text. It can begin a new text while the
   others go on. See docs/inference.md. */
typedef struct mt_gpt_cache {
    int64_t sequences, max_seq;
    int64_t local_layers; /* of this stage */
    mt_kv_cache *layers;  /* [local_layers], on the host. All of them have the same lengths */
    int32_t *lengths;     /* [sequences], on the context's device: how many tokens of each sequence are in the cache */
    void *memory;         /* of keys and values */
    size_t bytes;         /* of memory, see mt_gpt_cache_bytes */
} mt_gpt_cache;

/* mt_gpt_cache_create allocates the cache with mt_context_alloc, outside the arena. Call it after mt_params_init. All
   sequences are empty. max_seq is at most that of the model; 0: that of the model. On MT_DEVICE_META the bytes are only
   counted. mt_gpt_cache_destroy frees the cache, before its context is destroyed. *cache may be all zeros.
   mt_gpt_cache_bytes returns the bytes of keys and values on this rank:
       2 * layers of this stage * key/value heads of this rank * sequences * max_seq * head size * bytes of an element
   where each of the 2 * layers parts is rounded up to a multiple of 64 bytes. max_seq 0: that of the model. It returns
   -1 if an argument is out of range or the number is too large. `lengths` is not in this number: it takes 4 * sequences
   bytes, also rounded up.
   Errors: MT_ERR_ARGUMENT (sequences or max_seq is out of range), MT_ERR_UNSUPPORTED (the mask of the layers is not
   causal), MT_ERR_MEMORY. */
MT_API mt_status mt_gpt_cache_create(mt_context *ctx, const mt_gpt *gpt, int64_t sequences, int64_t max_seq,
                                     mt_gpt_cache *out);
MT_API void mt_gpt_cache_destroy(mt_context *ctx, mt_gpt_cache *cache);
MT_API int64_t mt_gpt_cache_bytes(const mt_gpt *gpt, int64_t sequences, int64_t max_seq);

/* Sets the number of tokens of one sequence, 0 to max_seq. 0 begins a new text in its slot. A smaller number than
   before removes the last tokens. A larger number adds positions with the keys and values that are in memory there:
   those of tokens that were removed earlier, or zeros. Every rank calls it, with the same arguments. It does not
   communicate. The other sequences do not change.
   Error: MT_ERR_ARGUMENT (the sequence or the length is out of range). */
MT_API mt_status mt_gpt_cache_set_length(mt_context *ctx, const mt_gpt_cache *cache, int64_t sequence, int64_t length);

/* Adds the tokens of the batch to the cache, and computes their logits, without dropout. A loop of generation calls it
   once with the prompts (prefill), and then with batch->seq = 1 for each step.
     batch     sequences is that of the cache. seq is the number of new tokens of each sequence. lengths has the number
               of valid new tokens of each sequence, 0 to seq (NULL: all are valid). So prompts may have different
               lengths, and a sequence with 0 stays as it is. cu_seqlens, documents, attention_bias and attention_dbias
               must not be set (MT_ERR_UNSUPPORTED). The other fields have no effect
     ids       [sequences * seq], as in mt_gpt_logits. Ids after the valid ones must be in [0, vocab). They have no
               effect
     logits    [sequences * seq, vocab] for all new tokens, or [sequences, vocab] for the last valid new token of each
               sequence, as in mt_gpt_logits. Rows of tokens that are not valid, and of sequences with 0 new tokens,
               have finite numbers without a meaning. mt_none(): no logits are computed
   The logits are those of mt_gpt_logits for the whole text, up to rounding. In invariant mode on a CPU with the
   built-in GEMM they have the bits of mt_gpt_logits, on every split and however the text is divided into calls.
   Collective over the tensor and the pipeline group, as mt_gpt_logits: all ranks pass the same batch and ids, and have
   caches of the same sizes. Communication over the tensor group: 1 all-reduce for the embedding and 2 for each layer of
   [sequences * seq, hidden], also with sequence_parallel, and 1 all-gather for the logits. On a pipeline, each stage
   sends [sequences * seq, hidden] to the next, and the last stage broadcasts the logits. On a GPU the call waits only
   to look up the last tokens of a batch that has lengths and more than one token for each sequence.
   Errors: MT_ERR_ARGUMENT (the batch has another number of sequences than the cache, or the cache is of another model),
   MT_ERR_SHAPE (seq is greater than the model's max_seq), MT_ERR_DATA (an id is out of range, on a GPU as in
   mt_gpt_logits; on a CPU: a sequence would have more than max_seq tokens). After an error the lengths of the cache are
   as before. A GPU does not check the number of tokens: a sequence that gets too many has max_seq tokens afterwards,
   and its logits are undefined. */
MT_API mt_status mt_gpt_cached_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const mt_gpt_cache *cache, mt_tensor logits);

/* Adds the tokens of the batch to the cache, as mt_gpt_cached_logits does, and draws the next token of each sequence
   from the logits of its last valid new token. The logits are in f32, and are gathered only where
   mt_vocab_parallel_sample says so. desc says how to draw (see mt_sample_desc). The drawn token's position is
   desc->position plus desc->positions[i] or, when positions is NULL, plus the number of tokens of the sequence in the
   cache, with the new ones. When the cache no longer has the first tokens of a text, add their number: in
   desc->position if it is the same for all sequences, otherwise pass positions.
   next_ids [sequences] is in memory of the context's device. Every rank gets all of it. It may be the ids of the next
   call, with batch->seq 1, and also the ids of this call. The next_ids of sequences with 0 new tokens have no meaning,
   but are in [0, vocab).
   The tokens do not depend on the other sequences of the batch. They depend on the split only where rounding decides
   between two tokens. When the logits have the same bits on every split, as in invariant mode, the tokens are the same
   on every split.
   Collective over the tensor and the pipeline group. Communication over the tensor group: that of mt_gpt_cached_logits,
   with the all-gather of mt_vocab_parallel_sample instead of that of the logits. The last stage of a pipeline
   broadcasts the ids to the others. On a GPU the call waits only where mt_gpt_cached_logits does.
   Errors: those of mt_gpt_cached_logits; MT_ERR_ARGUMENT (a field of desc is out of range); MT_ERR_DATA on every rank
   (a logit is NaN, on a GPU as in mt_vocab_parallel_sample). After an error the lengths of the cache are as before. */
MT_API mt_status mt_gpt_sample(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               const mt_gpt_cache *cache, const mt_sample_desc *desc, int32_t *next_ids);

/* ---- BERT -------------------------------------------------------------------------------------------------------- */

/* A BERT (arXiv 1810.04805) as in Megatron-LM: embeddings of tokens, positions (not with rotary or ALiBi) and token
   types, layers without a causal mask, and two heads with a loss each.
   - masked LM: y = norm(act(x W + b)) for each token, then logits with the weight of the token embedding and a bias of
     their own. act is layer.activation, and norm is layer.norm.
   - sentence order: logits of 2 classes for each sequence, pooled W2 + b2 with pooled = tanh(x W1 + b1), the pooler,
     where x is the output for the first token of the sequence. The original BERT trains this head for the prediction
     of the next sentence, and ALBERT (arXiv 1909.11942) and Megatron-LM for the order of sentences.
   The heads have biases also with layer.no_bias.
   layer.placement selects the norms (arXiv 1909.08053, figure 7). With MT_POST_LN, as in the original BERT, the sum of
   the embeddings has a norm and there is no final norm. With the others there is a final norm, and the sum of the
   embeddings has none. */
typedef struct mt_bert_desc {
    int64_t vocab, layers, max_seq; /* max_seq: tokens of the longest sequence */
    /* Describes every layer, as in mt_gpt_desc. layer.mask is not read: tokens see all valid tokens of their sequence.
       The original BERT has MT_POST_LN, MT_GELU_ERF and norm_eps 1e-12. MT_SWIGLU is MT_ERR_ARGUMENT */
    mt_transformer_layer_desc layer;
    int no_binary_head; /* 1: without pooler and sentence order, as Megatron-LM's --bert-no-binary-head */
    /* advanced */
    int64_t token_types;      /* see mt_batch.token_types; 0: 2 */
    int64_t recompute_layers; /* as in mt_language_model_desc */
    float embedding_dropout;  /* of the sum of the embeddings */
    int32_t ignore_index;     /* as in mt_gpt_desc, for targets; an order of sentences is ignored when it is -100 */
    int64_t padded_vocab;     /* as in mt_gpt_desc; also for the bias of the logits */
} mt_bert_desc;

/* This rank's shard of the model or of its pipeline stage. The last stage has the heads; on the others their members
   are zero. lm_dense and pooler are column-parallel with gather_output: a rank computes hidden / t columns, and every
   rank gets all of them. */
typedef struct mt_bert {
    mt_bert_desc desc;
    mt_language_model model;               /* its names begin with "encoder" */
    mt_column_parallel_linear lm_dense;    /* lm_head.dense.* [hidden, hidden] */
    mt_norm_layer lm_norm;                 /* lm_head.layer_norm.* */
    mt_column_parallel_linear head;        /* its weight is model.tokens.weight; output_layer.bias [1, vocab] */
    mt_column_parallel_linear pooler;      /* pooler.dense.* [hidden, hidden]; weight is NULL with no_binary_head */
    mt_column_parallel_linear binary_head; /* binary_head.* [2, hidden]; weight is NULL with no_binary_head */
    mt_cross_entropy_desc loss, sop_loss;
} mt_bert;

/* What one forward keeps for its backward, as mt_language_model_saved. */
typedef struct mt_bert_saved {
    mt_language_model_saved model;
    mt_linear_saved lm_dense, head, pooler, binary_head;
    mt_norm_saved lm_norm;
    mt_tensor lm_h, pooled_h; /* the outputs of lm_dense and pooler, before their activations */
    mt_cross_entropy_saved loss, sop_loss;
} mt_bert_saved;

/* mt_bert_create adds the parameters of this rank's stage to the registry, which owns them; out needs no destroy.
   mt_bert_saved_create allocates host memory, which mt_bert_saved_destroy frees. Errors: those of
   mt_language_model_create; MT_ERR_ARGUMENT for MT_SWIGLU. */
MT_API mt_status mt_bert_create(mt_context *ctx, mt_params *params, const mt_bert_desc *desc, mt_bert *out);
MT_API mt_status mt_bert_saved_create(mt_context *ctx, const mt_bert *bert, mt_bert_saved *out);
MT_API void mt_bert_saved_destroy(mt_bert_saved *saved); /* NULL and a zero-initialised struct are allowed */

/* Computes both losses, on a grid with one pipeline stage. With more stages use mt_bert_stage_forward.
   ids, targets [sequences * seq] and sentence_order [sequences] are in memory of the context's device. They are the
   same on every tensor rank, and must not change until backward. ids is the text with its masks. targets has the
   original token where a token is to be predicted, and -100 (or your ignore_index) elsewhere. sentence_order has the
   class of each sequence, 0 or 1, or -100. lm_loss is [1, sequences * seq] and sop_loss [1, sequences], both MT_F32.
   With no_binary_head, sentence_order must be NULL and sop_loss mt_none() (MT_ERR_ARGUMENT). batch->lengths masks
   padding, and batch->token_types has the segment of each token. When saved is NULL, forward is evaluation, without
   dropout.
   Communication over the tensor group: that of mt_gpt_forward, and 1 all-gather of [tokens, hidden], the output of
   lm_dense. The sentence order adds 1 all-gather of [sequences, hidden] and 1 of 4 floats per sequence; with
   sequence_parallel also 1 all-reduce of [sequences, hidden], which gives every rank the first token of each sequence.
   Errors: those of mt_gpt_forward. */
MT_API mt_status mt_bert_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                 const int32_t *targets, const int32_t *sentence_order, mt_tensor lm_loss,
                                 mt_tensor sop_loss, mt_bert_saved *saved);

/* Adds the gradient of lm_scale * sum(lm_loss) + sop_scale * sum(sop_loss) to the gradient of every parameter. lm_scale
   is usually 1 / (targets of the whole global batch that are not ignored), and sop_scale 1 / (its sequences). With
   no_binary_head, sop_scale is not used. batch->loss_scale multiplies both, and batch->backward_scale is the lm_scale.
   Call mt_bert_backward once for each forward: it overwrites tensors of saved, which afterwards holds no forward.
   Communication over the tensor group: that of mt_gpt_backward, and 1 all-reduce of [tokens, hidden] for the logits.
   The sentence order adds 2 all-reduces of [sequences, hidden].
   MT_ERR_ARGUMENT: saved holds no forward, or its batch has a backward_scale, and lm_scale is another number. After the
   second of these, saved still holds the forward. */
MT_API mt_status mt_bert_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                  mt_bert_saved *saved);

/* mt_bert_forward and mt_bert_backward for one stage of a pipeline. input, output, doutput and dinput have the rules of
   mt_gpt_stage_forward. All stages pass the same batch, ids, targets, sentence_order and scales. The last stage writes
   the losses; on the others lm_loss and sop_loss may be mt_none(). */
MT_API mt_status mt_bert_stage_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                       const int32_t *targets, const int32_t *sentence_order, mt_tensor input,
                                       mt_tensor output, mt_tensor lm_loss, mt_tensor sop_loss, mt_bert_saved *saved);
MT_API mt_status mt_bert_stage_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                        mt_tensor doutput, mt_tensor dinput, mt_bert_saved *saved);

/* Computes logits, without dropout: lm_logits [sequences * seq, vocab] and sop_logits [sequences, 2], of any float
   type. One of them may be mt_none(), on every rank alike. Collective over the tensor and the pipeline group, as
   mt_gpt_logits: every rank gets the whole logits. Errors: those of mt_gpt_logits; MT_ERR_ARGUMENT (sop_logits with
   no_binary_head). */
MT_API mt_status mt_bert_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                mt_tensor lm_logits, mt_tensor sop_logits);

/* ---- FLOPs of a model -------------------------------------------------------------------------------------------- */

/* Returns the floating-point operations of the model in one training step of `sequences` sequences with seq tokens:
   forward and backward of its products and of attention, counted as in a trace (mt_trace_entry.flops). They are those
   of the model alone. Padding of heads, ffn and vocabulary, copies of key/value heads and recomputation do not count,
   so the number depends neither on the split nor on padded_vocab and recompute. Divided by the seconds of a step, the
   number of ranks and the peak FLOP/s of a rank, it is the model FLOPs utilization (MFU) of arXiv 2204.02311, appendix
   B. The formula there also counts scores that mask and window exclude, so it gives more. Returns 0 when desc is NULL,
   or when heads, sequences or seq is below 1. */
MT_API double mt_gpt_flops(const mt_gpt_desc *desc, int64_t sequences, int64_t seq);
MT_API double mt_bert_flops(const mt_bert_desc *desc, int64_t sequences, int64_t seq);

/* ---- checkpoints of a GPT and of a BERT -------------------------------------------------------------------------- */

/* Creates an mt_checkpoint of a GPT. Call it instead of mt_checkpoint_create (mt_parallel.h); save, load, import and
   destroy are the functions of mt_parallel.h. gpt must outlive the checkpoint. desc->format and desc->model must
   be NULL (MT_ERR_ARGUMENT), because a GPT has a format of its own. The files describe the GPT in their metadata. Load
   and import return MT_ERR_DATA for files that describe a different GPT, even when all shapes agree (for example
   another number of heads, another activation, another window or another qkv_layout). Metadata without a qkv_layout,
   rotary_form, rotary_dim, window, softcap or alibi mean 0.

   Hugging Face: A GPT of one of the two kinds below, without window, softcap and alibi, is stored with the names and
   layouts of Hugging Face's transformers and a config.json, so that from_pretrained opens the directory of the
   checkpoint. Its head may be tied or not.
     GPT2LMHeadModel   MT_PRE_LN, MT_LAYER_NORM, any activation except MT_SWIGLU, biases, learned positions, kv_heads
                       equal to heads, a causal mask
     LlamaForCausalLM  MT_PRE_LN, MT_RMS_NORM, MT_SWIGLU, rotary positions of all features of a head, a causal mask, any
                       kv_heads, biases everywhere or nowhere
   mt_checkpoint_import reads files that transformers wrote, with or without the first word of the names
   ("transformer.", "model."), and converts them to the qkv_layout and the rotary_form of the model. Import ignores
   causal masks and frequencies in the files, and warns of those that are not what transformers computes. When the head
   is tied, files may have lm_head.weight instead of the embedding. If they have both, these must be equal
   (MT_ERR_DATA). When load or import has read a config.json of this model, saves keep its members (token ids,
   dropout, ...), and generation_config.json.
   Any other GPT is stored with the names, shapes and layouts of the registry. Files never have the padding of
   mt_gpt_desc.padded_vocab, so they load with any padded_vocab.

   A table of your own (mt_checkpoint_desc.table) takes the place of these names. `part` of its rows is 0 or an
   mt_layer_part (otherwise MT_ERR_ARGUMENT). Import then does not check config.json, and saves copy the one that was
   read last. */
MT_API mt_status mt_gpt_checkpoint_create(mt_context *ctx, mt_params *params, const mt_gpt *gpt,
                                          const mt_checkpoint_desc *desc, mt_checkpoint **out);

/* The same for a BERT. With MT_POST_LN, MT_LAYER_NORM, biases and learned positions, without window, softcap and
   alibi (the original BERT), the files have the names and layouts of transformers and a config.json:
   BertForPreTraining opens them or, with no_binary_head, BertForMaskedLM. Any other BERT is stored with the names,
   shapes and layouts of the registry.
   mt_checkpoint_import reads files of BertForPreTraining, BertForMaskedLM and BertModel, also with the older names of
   norms (LayerNorm.gamma, LayerNorm.beta). Parameters of heads that the files do not have keep their values, which
   needs mt_params_init before. A model with no_binary_head ignores pooler and sentence order in the files, and warns.
   Files may have cls.predictions.decoder.weight and .bias instead of the embedding and cls.predictions.bias. If they
   have both, these must be equal (MT_ERR_DATA). */
MT_API mt_status mt_bert_checkpoint_create(mt_context *ctx, mt_params *params, const mt_bert *bert,
                                           const mt_checkpoint_desc *desc, mt_checkpoint **out);

/* Values of mt_tensor_name.part in the table of a model of transformer layers. This row is for files that have the
   queries of each layer in a tensor of their own:
       {"layers.#.wq.weight", "decoder.layers.#.self_attention.linear_qkv.weight", MT_PART_QUERY, 0}
   QUERY, KEY, VALUE  of self_attention.linear_qkv.*; with MT_QKV_SEPARATE, of self_attention.query.*, key.* and value.*
                      In the file the heads follow one another. With rotary positions, queries and keys are in halves
                      in the file (MT_ROTARY_HALVES)
   QUERY_PAIRS, KEY_PAIRS  the same for files in pairs (MT_ROTARY_PAIRS), such as Meta's Llama
   GATE, UP           of mlp.linear_fc1.* with MT_SWIGLU */
typedef enum mt_layer_part {
    MT_PART_QUERY = 1,
    MT_PART_KEY = 2,
    MT_PART_VALUE = 3,
    MT_PART_QUERY_PAIRS = 4,
    MT_PART_KEY_PAIRS = 5,
    MT_PART_GATE = 6,
    MT_PART_UP = 7
} mt_layer_part;

/* Reads the desc of a stored GPT, for mt_gpt_create. directory is that of one checkpoint (see mt_checkpoint_path) or of
   a GPT-2 or a Llama of Hugging Face. The desc of a checkpoint is in its metadata; that of Hugging Face is in
   config.json. Fields that do not change the output of a model (dropout, init_std, sequence_parallel, padded_vocab,
   ...) become 0. Not collective. MT_ERR_IO: the files cannot be read. MT_ERR_DATA: they describe no GPT that this
   library can build; the message names the member of config.json, its value and what is accepted. After an error *out
   is unchanged. */
MT_API mt_status mt_gpt_desc_read(mt_context *ctx, const char *directory, mt_gpt_desc *out);

/* The same for a BERT of a checkpoint or of Hugging Face. For the latter no_binary_head becomes 1 when the files have
   no tensors of sentence order (cls.seq_relationship). Set it to 0 to keep the pooler of a BertModel, and call
   mt_params_init before the import. */
MT_API mt_status mt_bert_desc_read(mt_context *ctx, const char *directory, mt_bert_desc *out);

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_H */

/* ================================================== the API ends here ============================================= */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MEGATRON_IMPLEMENTED)
#define MEGATRON_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>mlp ------------------------------------------------------------------------------------------------------- */

#define MTI_ORIGIN_COLUMNS 3
#define MTI_ORIGIN_PARAMS (2 * MTI_ORIGIN_COLUMNS + 2) /* a weight and a bias for each layer */

/* Where a block has its linear layers from, up to three column-parallel ones and a row-parallel one: a registry, or
   tensors of the caller. */
typedef struct mti_origin {
    mt_params *params; /* NULL: from tensors */
    mt_comm *tp;
    const mt_linear_tensors *columns, *row;
    int count;     /* of columns */
    mt_param *own; /* MTI_ORIGIN_PARAMS, for the layers of tensors */
} mti_origin;

static mti_origin mti_from_registry(mt_params *params) {
    mti_origin s;
    memset(&s, 0, sizeof s);
    s.params = params;
    return s;
}

/* Returns what messages call a layer of tensors: its suffix without "linear_". */
static const char *mti_origin_name(const char *suffix) {
    return strncmp(suffix, "linear_", 7) == 0 ? suffix + 7 : suffix;
}

/* Makes a column-parallel layer of a block: NAME.SUFFIX in a registry, or columns[index]. A layer of tensors has no
   name, so that nothing is logged, and leaves a bias to the activation only if it has one. */
static mt_status mti_origin_column(mt_context *ctx, const mti_origin *s, int index, const char *name,
                                   const char *suffix, const mt_linear_desc *desc, mt_column_parallel_linear *out) {
    mt_linear_desc d = *desc;
    char full[MT_NAME_MAX];
    if (s->params) {
        MT_TRY(mt_param_name(ctx, full, name, suffix));
        return mt_column_parallel_linear_create(ctx, s->params, full, desc, out);
    }
    MT_TRY(mt_column_parallel_linear_from_tensors(ctx, s->tp, mti_origin_name(suffix), &d, &s->columns[index],
                                                  s->own + 2 * index, out));
    out->name[0] = 0;
    return MT_SUCCESS;
}

/* The same for the row-parallel layer of a block. */
static mt_status mti_origin_row(mt_context *ctx, const mti_origin *s, const char *name, const char *suffix,
                                const mt_linear_desc *desc, mt_row_parallel_linear *out) {
    char full[MT_NAME_MAX];
    if (s->params) {
        MT_TRY(mt_param_name(ctx, full, name, suffix));
        return mt_row_parallel_linear_create(ctx, s->params, full, desc, out);
    }
    MT_TRY(mt_row_parallel_linear_from_tensors(ctx, s->tp, mti_origin_name(suffix), desc, s->row,
                                               s->own + 2 * MTI_ORIGIN_COLUMNS, out));
    out->name[0] = 0;
    return MT_SUCCESS;
}

static mt_status mti_origin_gradient(mt_context *ctx, const char *function, const mt_linear_tensors *t,
                                     const char *which) {
    if (t->dw.data && (!t->b.data || t->db.data)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the gradient %s of the %s-parallel layer is NULL", function,
                   t->dw.data ? "db" : "dw", which);
}

/* Checks, before the backward of a block of tensors, that all layers have gradients. */
static mt_status mti_origin_gradients(mt_context *ctx, const char *function, const mti_origin *s) {
    int i;
    for (i = 0; i < s->count; i++) MT_TRY(mti_origin_gradient(ctx, function, &s->columns[i], "column"));
    return mti_origin_gradient(ctx, function, s->row, "row");
}

/* Makes the two linear layers. d->ffn is set. */
static mt_status mti_mlp_create(mt_context *ctx, const mti_origin *from, const char *name, const mt_mlp_desc *d,
                                mt_mlp *out) {
    mt_linear_desc fc1, fc2;
    int64_t parts = d->activation == MT_SWIGLU ? 2 : 1;
    memset(&fc1, 0, sizeof fc1);
    fc1.in_features = d->hidden;
    fc1.out_features = parts * d->ffn;
    fc1.parts = parts;
    fc1.parts_by_shard = parts > 1;
    fc1.no_bias = d->no_bias;
    fc1.skip_bias_add = !d->no_bias; /* the bias is added with the activation */
    fc1.sequence_parallel = d->sequence_parallel;
    fc1.init_std = d->init_std;
    fc1.add_to_dx = d->add_to_dx;
    memset(&fc2, 0, sizeof fc2);
    fc2.in_features = d->ffn;
    fc2.out_features = d->hidden;
    fc2.input_is_parallel = 1;
    fc2.no_bias = d->no_bias;
    fc2.skip_bias_add = d->skip_bias_add;
    fc2.sequence_parallel = d->sequence_parallel;
    fc2.init_std = d->output_init_std;
    MT_TRY(mti_origin_column(ctx, from, 0, name, "linear_fc1", &fc1, &out->fc1));
    return mti_origin_row(ctx, from, name, "linear_fc2", &fc2, &out->fc2);
}

static mt_status mti_init_std_check(mt_context *ctx, const char *function, const char *name, float init_std,
                                    float output_init_std) {
    MT_TRY(mt_check_float(ctx, function, name, "init_std", mt_or_default(init_std, 1), MT_FLOAT_AT_LEAST_0));
    output_init_std = mt_or_default(output_init_std, 1);
    return mt_check_float(ctx, function, name, "output_init_std", output_init_std, MT_FLOAT_AT_LEAST_0);
}

static mt_status mti_mlp_desc_check(mt_context *ctx, const char *function, const char *name, const mt_mlp_desc *d) {
    MT_TRY(mt_check_integer(ctx, function, name, "hidden", d->hidden, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "ffn", d->ffn, 0, INT32_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "activation", (int)d->activation, MT_ACTIVATION_WORDS));
    return mti_init_std_check(ctx, function, name, d->init_std, d->output_init_std);
}

MT_API mt_status mt_mlp_create(mt_context *ctx, mt_params *params, const char *name, const mt_mlp_desc *desc,
                               mt_mlp *out) {
    mti_origin from = mti_from_registry(params);
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, "mt_mlp_create", params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    MT_TRY(mti_mlp_desc_check(ctx, "mt_mlp_create", name, desc));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    if (!desc->ffn) out->desc.ffn = 4 * desc->hidden;
    return mt_create_end(params, mark, out, sizeof *out, mti_mlp_create(ctx, &from, name, &out->desc, out));
}

/* Returns rows [first, first + count) of t. Returns t when it is mt_none(). */
static mt_tensor mti_some_rows(mt_tensor t, int64_t first, int64_t count) {
    return t.data ? mt_tensor_rows(t, first, count) : t;
}

static mt_tensor mti_bias_value(const mt_param *bias) { return bias ? bias->value : mt_none(); }

/* When y is mt_none(), computes only the tensors of *saved, without the product of fc2. When training is 0, *saved is
   scratch memory. */
static mt_status mti_mlp_forward(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor y, mt_mlp_saved *saved,
                                 int training) {
    int64_t tokens = mt_sequence_tokens(mlp->fc1.tp, mlp->desc.sequence_parallel, x.rows);
    mt_tensor act;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, mlp->fc1.local_features, &saved->h));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, mlp->fc2.local_features, &act));
    MT_TRY(mt_column_parallel_linear_activation_forward(ctx, &mlp->fc1, mlp->desc.activation, x, saved->h, act,
                                                        training ? &saved->fc1 : NULL));
    if (training)
        MT_TRY(mt_hash_log_activation(ctx, mlp->fc1.name, 1, "activation_func.output", act, 0, mlp->fc2.weight));
    saved->fc2.x = act;
    if (!y.data) return MT_SUCCESS;
    return mt_row_parallel_linear_forward(ctx, &mlp->fc2, act, y, training ? &saved->fc2 : NULL);
}

/* Checks what forward and backward have in common. in and out are x and y, or dy and dx. */
static mt_status mti_mlp_check(mt_context *ctx, const char *function, const mt_mlp *mlp, const char *in_name,
                               mt_tensor in, const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mlp) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: mlp is NULL", function);
    MT_TRY(mt_check_param(ctx, function, mlp->fc1.weight));
    MT_TRY(mt_check_activation(ctx, function, mlp->fc1.weight, in_name, in, in.rows, mlp->desc.hidden));
    return mt_check_activation(ctx, function, mlp->fc1.weight, out_name, out, in.rows, mlp->desc.hidden);
}

static mt_status mti_mlp_call_forward(mt_context *ctx, const char *function, const mt_mlp *mlp, mt_tensor x,
                                      mt_tensor y, mt_mlp_saved *saved) {
    mt_mlp_saved local;
    size_t mark;
    mt_status status;
    MT_TRY(mti_mlp_check(ctx, function, mlp, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, mlp->fc1.tp, mlp->desc.sequence_parallel, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("mlp forward", mti_mlp_forward(ctx, mlp, x, y, saved ? saved : &local, saved != NULL));
    if (status != MT_SUCCESS || !saved) mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_mlp_forward(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor y, mt_mlp_saved *saved) {
    return mti_mlp_call_forward(ctx, "mt_mlp_forward", mlp, x, y, saved);
}

static mt_status mti_mlp_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dx,
                                  const mt_mlp_saved *saved) {
    mt_tensor dh;
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->h.rows, mlp->fc1.local_features, &dh));
    MT_TRY(mt_row_parallel_linear_activation_backward(ctx, &mlp->fc2, &mlp->fc1, mlp->desc.activation, dy, saved->h, dh,
                                                      &saved->fc2));
    MT_TRY(mt_hash_log_activation(ctx, mlp->fc1.name, 1, "activation_func.input_grad", dh, 0, mlp->fc1.weight));
    return mt_column_parallel_linear_backward(ctx, &mlp->fc1, dh, dx, &saved->fc1);
}

static mt_status mti_mlp_call_backward(mt_context *ctx, const char *function, const mt_mlp *mlp, mt_tensor dy,
                                       mt_tensor dx, const mt_mlp_saved *saved) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_mlp_check(ctx, function, mlp, "dy", dy, dx.data ? "dx" : "dy", dx.data ? dx : dy));
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mt_check_activation(ctx, function, mlp->fc1.weight, "saved.fc1.x", saved->fc1.x, dy.rows, mlp->desc.hidden));
    MT_TRY(mt_check_sent(ctx, function, mlp->fc1.tp, mlp->desc.sequence_parallel, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "saved.fc1.x", saved->fc1.x, "dx", dx));
    MT_TRY(mt_check_gradient(ctx, function, mlp->fc1.weight));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("mlp backward", mti_mlp_backward(ctx, mlp, dy, dx, saved));
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_mlp_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dx,
                                 const mt_mlp_saved *saved) {
    return mti_mlp_call_backward(ctx, "mt_mlp_backward", mlp, dy, dx, saved);
}

/* Makes an MLP of tensors. own has MTI_ORIGIN_PARAMS parameters. */
static mt_status mti_own_mlp(mt_context *ctx, const char *function, mt_comm *tp, const mt_mlp_tensors *tensors,
                             const mt_mlp_desc *desc, mti_origin *from, mt_param *own, mt_mlp *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tensors || !desc)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, tensors ? "desc" : "tensors");
    MT_TRY(mti_mlp_desc_check(ctx, function, "mlp", desc));
    memset(from, 0, sizeof *from);
    from->tp = tp;
    from->columns = &tensors->fc1;
    from->count = 1;
    from->row = &tensors->fc2;
    from->own = own;
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    if (!desc->ffn) out->desc.ffn = 4 * desc->hidden;
    return mti_mlp_create(ctx, from, "", &out->desc, out);
}

MT_API mt_status mt_parallel_mlp_forward(mt_context *ctx, mt_comm *tp, mt_tensor x, const mt_mlp_tensors *tensors,
                                         mt_tensor y, const mt_mlp_desc *desc, mt_mlp_saved *saved) {
    static const char *const function = "mt_parallel_mlp_forward";
    mti_origin from;
    mt_param own[MTI_ORIGIN_PARAMS];
    mt_mlp mlp;
    MT_TRY(mti_own_mlp(ctx, function, tp, tensors, desc, &from, own, &mlp));
    return mti_mlp_call_forward(ctx, function, &mlp, x, y, saved);
}

MT_API mt_status mt_parallel_mlp_backward(mt_context *ctx, mt_comm *tp, mt_tensor dy, const mt_mlp_tensors *tensors,
                                          mt_tensor dx, const mt_mlp_desc *desc, const mt_mlp_saved *saved) {
    static const char *const function = "mt_parallel_mlp_backward";
    mti_origin from;
    mt_param own[MTI_ORIGIN_PARAMS];
    mt_mlp mlp;
    MT_TRY(mti_own_mlp(ctx, function, tp, tensors, desc, &from, own, &mlp));
    MT_TRY(mti_origin_gradients(ctx, function, &from));
    return mti_mlp_call_backward(ctx, function, &mlp, dy, dx, saved);
}

/* ---- >>attention ------------------------------------------------------------------------------------------------- */

MT_API mt_dropout mt_batch_dropout(const mt_batch *batch, float p, int64_t layer, int site) {
    mt_dropout d;
    memset(&d, 0, sizeof d);
    if (!batch) return d;
    d.at.seed = batch->seed;
    d.at.subsequence = (batch->step << 20) + ((uint64_t)layer << 2) + (uint64_t)site; /* bits: 44, 18 and 2 */
    d.at.offset = batch->random_offset;
    d.p = p;
    return d;
}

/* As mt_check_integer, for a field of the batch `name`. */
static mt_status mti_batch_field_check(mt_context *ctx, const char *function, const char *name, const char *field,
                                       int64_t value, int64_t low, int64_t high) {
    char full[64];
    snprintf(full, sizeof full, "%s.%s", name, field);
    return mt_check_integer(ctx, function, NULL, full, value, low, high);
}

/* max_seq 0: there is no limit. mti_scores_check checks the fields that change scores. */
static mt_status mti_batch_check(mt_context *ctx, const char *function, const char *name, const mt_batch *batch,
                                 int64_t max_seq) {
    if (!batch) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, name);
    MT_TRY(mti_batch_field_check(ctx, function, name, "sequences", batch->sequences, 1, INT64_MAX));
    MT_TRY(mti_batch_field_check(ctx, function, name, "seq", batch->seq, 1, INT64_MAX));
    if (batch->sequences > INT32_MAX / batch->seq)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s has %lld sequences of %lld tokens, must have at most %d tokens",
                       function, name, (long long)batch->sequences, (long long)batch->seq, INT32_MAX);
    MT_TRY(mti_batch_field_check(ctx, function, name, "first_sequence", batch->first_sequence, 0,
                                 INT64_MAX / batch->seq - batch->sequences));
    if (max_seq > 0 && batch->seq > max_seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s.seq is %lld, must be at most max_seq %lld", function, name,
                       (long long)batch->seq, (long long)max_seq);
    return MT_SUCCESS;
}

static const char *mti_shards_name(const mt_context *ctx) {
    return mt_context_invariant(ctx) ? "virtual shards (mt_context_desc.invariant)" : "tensor ranks";
}

/* Returns into how many pieces each query group is divided, so that each of `shards` shards has a piece. A piece has a
   copy of the key and the value. The number is 1 when there are enough groups. Otherwise it is one with which the shard
   with the most query heads has as few as possible, and of these the smallest one. */
static int64_t mti_group_pieces(int64_t heads, int64_t kv_heads, int shards) {
    int64_t n = heads / kv_heads, best = 1, most = INT64_MAX, i, k;
    if (kv_heads >= shards) return 1;
    for (i = 1; i <= n / i; i++) /* i and n / i are divisors of n */
        for (k = 0; k < 2 && n % i == 0; k++) {
            int64_t pieces = k == 0 ? i : n / i, all = kv_heads * pieces;
            int64_t share = mt_round_up(all, shards) / shards * (n / pieces);
            if (all < shards || share > most || (share == most && pieces > best)) continue;
            best = pieces;
            most = share;
        }
    return best;
}

/* Checks what a layout other than MT_QKV_PER_GROUP needs. */
static mt_status mti_qkv_layout_check(mt_context *ctx, const char *function, const char *name,
                                      const mt_self_attention_desc *d, int shards) {
    int divided = d->kv_heads < shards; /* query groups are divided into pieces */
    int64_t split = divided ? d->heads : d->kv_heads;
    if (d->qkv_layout == MT_QKV_PER_GROUP) return MT_SUCCESS;
    if (d->qkv_layout == MT_QKV_CONCATENATED && d->heads != d->kv_heads)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: '%s' has %lld heads and %lld kv_heads, which must be equal with MT_QKV_CONCATENATED; use "
                       "MT_QKV_PER_GROUP or MT_QKV_SEPARATE",
                       function, name, (long long)d->heads, (long long)d->kv_heads);
    if (split % shards != 0)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: '%s': %lld %s are not a multiple of %d %s, which %s needs; use MT_QKV_PER_GROUP", function,
                       name, (long long)split, divided ? "heads" : "kv_heads", shards, mti_shards_name(ctx),
                       d->qkv_layout == MT_QKV_SEPARATE ? "MT_QKV_SEPARATE" : "MT_QKV_CONCATENATED");
    return MT_SUCCESS;
}

/* The number of features of a head that rotary turns. */
static int64_t mti_attention_rotary_dim(const mt_self_attention_desc *d) {
    return d->rotary_dim ? d->rotary_dim : d->hidden / d->heads;
}

/* Checks max_seq, rotary_form and rotary_dim together with rotary_base. */
static mt_status mti_attention_rotary_check(mt_context *ctx, const char *function, const char *name,
                                            const mt_self_attention_desc *d) {
    int64_t head_dim = d->hidden / d->heads;
    if (d->rotary_base == 0.0f) {
        if (d->max_seq == 0 && d->rotary_form != MT_ROTARY_HALVES)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: '%s': rotary_form is MT_ROTARY_PAIRS, must be MT_ROTARY_HALVES without rotary_base",
                           function, name);
        if (d->max_seq == 0 && d->rotary_dim == 0) return MT_SUCCESS;
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': %s is %lld, must be 0 without rotary_base", function, name,
                       d->max_seq ? "max_seq" : "rotary_dim", (long long)(d->max_seq ? d->max_seq : d->rotary_dim));
    }
    MT_TRY(mt_check_size(ctx, function, name, "max_seq", d->max_seq, 1, INT32_MAX));
    MT_TRY(mt_check_size(ctx, function, name, "rotary_dim", d->rotary_dim, 0, head_dim));
    if (mti_attention_rotary_dim(d) % 2 == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': %s is %lld, must be even for rotary", function, name,
                   d->rotary_dim ? "rotary_dim" : "the head size", (long long)mti_attention_rotary_dim(d));
}

/* shards is the number of parts into which the query groups are split: V in invariant mode, and t otherwise. kv_heads
   must not be 0: the caller has set its default. */
static mt_status mti_heads_check(mt_context *ctx, const char *function, const char *name, int64_t hidden, int64_t heads,
                                 int64_t kv_heads, int shards) {
    if (hidden % heads != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': hidden is %lld, must be a multiple of heads %lld", function, name,
                       (long long)hidden, (long long)heads);
    if (heads % kv_heads != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': kv_heads is %lld, must divide heads %lld", function, name,
                       (long long)kv_heads, (long long)heads);
    if (heads < shards)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': %lld heads cannot be split over %d %s", function, name,
                       (long long)heads, shards, mti_shards_name(ctx));
    return MT_SUCCESS;
}

static mt_status mti_attention_check(mt_context *ctx, const char *function, const char *name,
                                     const mt_self_attention_desc *d, int shards) {
    MT_TRY(mt_check_integer(ctx, function, name, "hidden", d->hidden, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "heads", d->heads, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "kv_heads", d->kv_heads, 0, INT64_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "mask", (int)d->mask, MT_MASK_WORDS));
    MT_TRY(mt_check_float(ctx, function, name, "rotary_base", d->rotary_base, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_integer(ctx, function, name, "max_seq", d->max_seq, 0, INT32_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "dropout", d->dropout, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_integer(ctx, function, name, "layer_number", d->layer_number, 0, INT64_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "qkv_layout", (int)d->qkv_layout, MT_QKV_LAYOUT_WORDS));
    MT_TRY(mt_check_enum(ctx, function, name, "rotary_form", (int)d->rotary_form, MT_ROTARY_FORM_WORDS));
    MT_TRY(mt_check_integer(ctx, function, name, "window", d->window, 0, INT64_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "softcap", d->softcap, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_integer(ctx, function, name, "alibi", d->alibi, 0, 1));
    MT_TRY(mti_init_std_check(ctx, function, name, d->init_std, d->output_init_std));
    MT_TRY(mti_heads_check(ctx, function, name, d->hidden, d->heads, d->kv_heads, shards));
    MT_TRY(mti_attention_rotary_check(ctx, function, name, d));
    return mti_qkv_layout_check(ctx, function, name, d, shards);
}

/* Sets *out to a table [rows, cols], MT_F32, of the registry. */
static mt_status mti_attention_buffer(mt_context *ctx, mt_params *params, int64_t rows, int64_t cols, mt_tensor *out) {
    void *table;
    MT_TRY(mt_params_buffer(ctx, params, (size_t)(rows * cols) * sizeof(float), 0, &table));
    *out = mt_tensor_f32((const float *)table, rows, cols);
    return MT_SUCCESS;
}

/* The number of groups that are not empty on a rank with places for `groups` groups, which begin with number `first`.
   all is the number of groups of the model. */
static int64_t mti_used_groups(int64_t groups, int64_t first, int64_t all) {
    return mt_max(0, mt_min(groups, all - first));
}

/* The number of query heads in the non-empty groups of this rank. */
static int64_t mti_attention_heads_here(const mt_self_attention *a) {
    int64_t all = a->desc.kv_heads * a->pieces;
    return mti_used_groups(a->groups, a->first_group, all) * (a->desc.heads / all);
}

/* Makes the tables of rotary and of ALiBi. Without a registry (params NULL), the caller sets them. */
static mt_status mti_attention_tables(mt_context *ctx, mt_params *params, mt_self_attention *out) {
    const mt_self_attention_desc *d = &out->desc;
    int64_t heads = mti_attention_heads_here(out), first = out->first_group * (d->heads / (d->kv_heads * out->pieces));
    if (!params) return MT_SUCCESS;
    if (d->rotary_base > 0.0f) {
        MT_TRY(mti_attention_buffer(ctx, params, d->max_seq, mti_attention_rotary_dim(d), &out->rotary));
        MT_TRY(mt_rotary_table(ctx, d->rotary_base, out->rotary));
    }
    if (!d->alibi || heads == 0) return MT_SUCCESS;
    MT_TRY(mti_attention_buffer(ctx, params, 1, heads, &out->alibi_slopes));
    return mt_alibi_slopes(ctx, d->heads, first, out->alibi_slopes);
}

/* What the layers of an attention block are made from, besides a desc of each kind of layer. */
typedef struct mti_heads {
    int64_t heads, kv_heads, head_dim, pieces; /* pieces: of each query group */
} mti_heads;

/* Returns the fields of a column-parallel layer of an attention block that do not depend on what it computes. */
static mt_linear_desc mti_attention_linear(int64_t in_features, int no_bias, int sequence_parallel, float init_std,
                                           int add_to_dx) {
    mt_linear_desc l;
    memset(&l, 0, sizeof l);
    l.in_features = in_features;
    l.no_bias = no_bias;
    l.sequence_parallel = sequence_parallel;
    l.init_std = init_std;
    l.add_to_dx = add_to_dx;
    return l;
}

/* Makes the layer of queries, keys or values, or of all three. l is from mti_attention_linear. The last `copied`
   features of a unit are keys and values, of which each piece of a query group has a copy. A unit is only divided when
   there are pieces. */
static mt_status mti_attention_input(mt_context *ctx, const mti_origin *from, int index, const char *name,
                                     const char *suffix, mt_linear_desc l, int64_t pieces, int64_t out_features,
                                     int64_t parts, int64_t unit, int64_t copied, mt_column_parallel_linear *out) {
    l.out_features = out_features;
    l.parts = parts;
    l.unit = unit;
    if (copied > 0 && pieces > 1) {
        l.copies = pieces;
        l.copied = copied;
    }
    l.parts_by_shard = parts > 1;
    return mti_origin_column(ctx, from, index, name, suffix, &l, out);
}

/* Makes the layers NAME.query, NAME.key and NAME.value. key_value has two layers. */
static mt_status mti_attention_separate(mt_context *ctx, const mti_origin *from, const char *name, const mti_heads *h,
                                        const mt_linear_desc *of_query, const mt_linear_desc *of_key_value,
                                        mt_column_parallel_linear *query, mt_column_parallel_linear *key_value) {
    static const char *const names[] = {"key", "value"};
    int64_t groups = h->kv_heads, head = h->head_dim, queries = h->heads / groups * head;
    int i;
    MT_TRY(mti_attention_input(ctx, from, 0, name, "query", *of_query, h->pieces, groups * queries, 1,
                               queries / h->pieces, 0, query));
    for (i = 0; i < 2; i++)
        MT_TRY(mti_attention_input(ctx, from, 1 + i, name, names[i], *of_key_value, h->pieces, groups * head, 1, head,
                                   head, &key_value[i]));
    return MT_SUCCESS;
}

/* Makes the layers that compute queries, keys and values. width is the number of columns of a query group. */
static mt_status mti_attention_inputs(mt_context *ctx, const mti_origin *from, const char *name, const mti_heads *h,
                                      mt_self_attention *out) {
    const mt_self_attention_desc *d = &out->desc;
    int64_t groups = h->kv_heads, head = h->head_dim, width = (h->heads / groups + 2) * head;
    mt_linear_desc l = mti_attention_linear(d->hidden, d->no_bias, d->sequence_parallel, d->init_std, d->add_to_dx);
    if (d->qkv_layout == MT_QKV_SEPARATE)
        return mti_attention_separate(ctx, from, name, h, &l, &l, &out->separate[0], &out->separate[1]);
    if (d->qkv_layout == MT_QKV_CONCATENATED)
        return mti_attention_input(ctx, from, 0, name, "linear_qkv", l, h->pieces, groups * width, 3, head, 0,
                                   &out->qkv);
    return mti_attention_input(ctx, from, 0, name, "linear_qkv", l, h->pieces, groups * width, 1, width, 2 * head,
                               &out->qkv);
}

/* Makes the row-parallel layer. The caller sets the other fields of l. */
static mt_status mti_attention_proj(mt_context *ctx, const mti_origin *from, const char *name, const mti_heads *h,
                                    mt_linear_desc l, mt_row_parallel_linear *out) {
    l.in_features = h->heads * h->head_dim;
    l.out_features = l.in_features;
    l.unit = h->heads / h->kv_heads / h->pieces * h->head_dim;
    l.input_is_parallel = 1;
    return mti_origin_row(ctx, from, name, "linear_proj", &l, out);
}

/* Makes the layers. out->desc, out->head_dim and out->pieces are set. */
static mt_status mti_attention_create(mt_context *ctx, const mti_origin *from, const char *name,
                                      mt_self_attention *out) {
    const mt_self_attention_desc *d = &out->desc;
    mt_linear_desc proj = mti_attention_linear(0, d->no_bias, d->sequence_parallel, d->output_init_std, 0);
    mti_heads h;
    h.heads = d->heads;
    h.kv_heads = d->kv_heads;
    h.head_dim = out->head_dim;
    h.pieces = out->pieces;
    proj.skip_bias_add = d->skip_bias_add;
    MT_TRY(mti_attention_inputs(ctx, from, name, &h, out));
    MT_TRY(mti_attention_proj(ctx, from, name, &h, proj, &out->proj));
    out->groups = out->proj.local_features / out->proj.desc.unit;
    out->first_group = out->proj.weight->tp_rank * out->groups;
    return mti_attention_tables(ctx, from->params, out);
}

MT_API mt_status mt_self_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                          const mt_self_attention_desc *desc, mt_self_attention *out) {
    mti_origin from = mti_from_registry(params);
    mt_self_attention_desc d;
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, "mt_self_attention_create", params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    d = *desc;
    if (!d.kv_heads) d.kv_heads = d.heads;
    MT_TRY(mti_attention_check(ctx, "mt_self_attention_create", name, &d, mt_params_shards(params)));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->head_dim = d.hidden / d.heads;
    out->pieces = mti_group_pieces(d.heads, d.kv_heads, mt_params_shards(params));
    return mt_create_end(params, mark, out, sizeof *out, mti_attention_create(ctx, &from, name, out));
}

/* Returns 1 when the unit of the layer can be a query group: a whole number of heads, at least three (a query, a key
   and a value), which is not divided. */
static int mti_is_per_group(const mt_column_parallel_linear *layer, int64_t head_dim) {
    int64_t unit = layer->desc.unit;
    return layer->desc.parts <= 1 && layer->desc.copies <= 1 && head_dim > 0 && unit / head_dim >= 3 &&
           unit % head_dim == 0;
}

/* Returns 1 when the parts of the layer can be the queries, keys and values of heads. */
static int mti_is_concatenated(const mt_column_parallel_linear *layer, int64_t head_dim) {
    return layer->desc.parts == 3 && head_dim > 0 && layer->desc.unit == head_dim;
}

/* Sets what the batch says of the scores. first_head is the first query head of the call. */
static void mti_batch_scores(const mt_batch *batch, int64_t first_head, mt_attention_desc *s) {
    s->lengths = batch->lengths;
    s->cu_seqlens = batch->cu_seqlens;
    s->documents = batch->documents;
    s->bias = batch->attention_bias;
    s->dbias = batch->attention_dbias;
    s->bias_batch = batch->bias_batch;
    s->bias_heads = batch->bias_heads;
    s->bias_first_head = first_head;
}

/* Returns the desc of a rank that has places for `groups` query groups. all is the number of groups of the model. */
static mt_attention_desc mti_rank_attention(int64_t groups, int tp_rank, int64_t all, int64_t heads_per_group,
                                            int64_t head_dim, mt_qkv_layout qkv_layout, const mt_batch *batch) {
    int64_t first = tp_rank * groups;
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = batch->sequences;
    s.seq = batch->seq;
    s.groups = mti_used_groups(groups, first, all);
    s.heads_per_group = heads_per_group;
    s.head_dim = head_dim;
    s.qkv_layout = qkv_layout;
    mti_batch_scores(batch, first * heads_per_group, &s);
    s.dropout.at.first_row = batch->first_sequence;
    s.dropout.at.first_col = first * heads_per_group;
    s.dropout.at.global_cols = all * heads_per_group;
    return s;
}

MT_API mt_attention_desc mt_core_attention_desc(const mt_column_parallel_linear *qkv, int64_t head_dim,
                                                const mt_batch *batch) {
    int64_t width;
    int parts;
    mt_attention_desc none;
    memset(&none, 0, sizeof none);
    if (!batch || !qkv || !qkv->weight) return none;
    parts = mti_is_concatenated(qkv, head_dim);
    if (!parts && !mti_is_per_group(qkv, head_dim)) return none;
    width = parts ? 3 * head_dim : qkv->desc.unit; /* of a query group */
    return mti_rank_attention(qkv->local_features / width, qkv->weight->tp_rank, qkv->desc.out_features / width,
                              width / head_dim - 2, head_dim, parts ? MT_QKV_CONCATENATED : MT_QKV_PER_GROUP, batch);
}

/* Sets the dropout of a desc from mti_rank_attention, which has the place of the probabilities. */
static void mti_attention_dropout(mt_attention_desc *s, mt_dropout random) {
    s->dropout.p = random.p;
    s->dropout.at.seed = random.at.seed;
    s->dropout.at.subsequence = random.at.subsequence;
    s->dropout.at.offset = random.at.offset;
}

static mt_attention_desc mti_attention_desc(const mt_self_attention *a, const mt_batch *batch, int training) {
    int64_t groups = a->desc.kv_heads * a->pieces;
    mt_attention_desc s = mti_rank_attention(a->groups, a->proj.weight->tp_rank, groups, a->desc.heads / groups,
                                             a->head_dim, a->desc.qkv_layout, batch);
    mti_attention_dropout(&s, mt_batch_dropout(batch, training ? a->desc.dropout : 0.0f, a->desc.layer_number, 0));
    s.mask = a->desc.mask;
    s.rotary_form = a->desc.rotary_form;
    s.rotary_dim = a->desc.rotary_dim;
    s.window = a->desc.window;
    s.softcap = a->desc.softcap;
    s.alibi_slopes = (const float *)a->alibi_slopes.data;
    return s;
}

static mt_status mti_query_groups_check(mt_context *ctx, const char *function, const char *name, int64_t features,
                                        const mt_column_parallel_linear *layer) {
    const mt_linear_desc *d = &layer->desc;
    if (mti_is_per_group(layer, features)) return MT_SUCCESS;
    if (d->parts > 1 || d->copies > 1)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': '%s' has no query groups: its %s is %lld", function, name,
                       layer->name, d->parts > 1 ? "parts" : "copies",
                       (long long)(d->parts > 1 ? d->parts : d->copies));
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: '%s': features is %lld, must divide the unit %lld of '%s' into three heads or more", function,
                   name, (long long)features, (long long)d->unit, layer->name);
}

MT_API mt_status mt_qk_norm_create(mt_context *ctx, mt_params *params, const char *name, const mt_norm_layer_desc *desc,
                                   const mt_column_parallel_linear *layer, mt_qk_norm *out) {
    static const char *const function = "mt_qk_norm_create";
    char full[MT_NAME_MAX], q[MT_NAME_MAX], k[MT_NAME_MAX];
    mt_norm_layer_desc per_head;
    size_t mark;
    mt_status status;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    if (!layer || !layer->weight) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the layer was not created", function);
    if (desc->groups != 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': groups is %lld, must be 0: they are those of '%s'", function,
                       name, (long long)desc->groups, layer->name);
    MT_TRY(mti_query_groups_check(ctx, function, name, desc->features, layer));
    per_head = *desc;
    per_head.groups = layer->desc.out_features / layer->desc.unit;
    MT_TRY(mt_param_name(ctx, q, name, "q_layernorm"));
    MT_TRY(mt_param_name(ctx, k, name, "k_layernorm"));
    out->unit = layer->desc.unit;
    mark = mt_params_mark(params);
    status = mt_norm_layer_create(ctx, params, q, &per_head, &out->q);
    if (status == MT_SUCCESS) status = mt_norm_layer_create(ctx, params, k, &per_head, &out->k);
    return mt_create_end(params, mark, out, sizeof *out, status);
}

/* Checks qkv [tokens, groups * unit], and makes the views of its queries and keys for the norm layers: *q [tokens *
   groups, unit - 2 * head_dim] and *k [tokens * groups, head_dim]. */
static mt_status mti_qk_norm_views(mt_context *ctx, const char *function, const mt_qk_norm *norm, const char *qkv_name,
                                   mt_tensor qkv, mt_tensor *q, mt_tensor *k) {
    int64_t groups, head_dim;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_param(ctx, function, norm ? norm->q.weight : NULL));
    groups = norm->q.local_groups;
    head_dim = norm->q.desc.features;
    MT_TRY(mt_check_activation(ctx, function, norm->q.weight, qkv_name, qkv, qkv.rows, groups * norm->unit));
    if (qkv.rows > 1 && mt_tensor_ld(qkv) != qkv.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s [%lld, %lld] with ld %lld must be contiguous", function, qkv_name,
                       (long long)qkv.rows, (long long)qkv.cols, (long long)mt_tensor_ld(qkv));
    qkv = mt_tensor_reshape(qkv, qkv.rows * groups, norm->unit);
    *q = mt_tensor_cols(qkv, 0, norm->unit - 2 * head_dim);
    *k = mt_tensor_cols(qkv, norm->unit - 2 * head_dim, head_dim);
    return MT_SUCCESS;
}

/* Applies the rule of the heads of a rank as a whole: none describes rows and columns that are seen in another width.
   use: of the parameters, 1 the values, 2 the gradients */
static mt_status mti_qk_norm_rule(mt_context *ctx, const char *function, const mt_qk_norm *norm, mt_tensor qkv,
                                  int use) {
    static const mt_rule rules[2] = {{"qkv q k q.bias k.bias", "RRRRR cRRRR rRRRR", NULL},
                                     {"dqkv q k q.bias k.bias", "RRRRR cPPPP rPPPP PPPPP", NULL}};
    static const char *const names[] = {"q", "k", "q.bias", "k.bias"};
    const mt_param *params[4];
    mt_operand operands[5] = {{"qkv", mt_none(), 3}};
    int i, count = 1;
    params[0] = norm->q.weight, params[1] = norm->k.weight, params[2] = norm->q.bias, params[3] = norm->k.bias;
    if (use == 2) operands[0].name = "dqkv";
    operands[0].t = qkv;
    for (i = 0; i < 4; i++) {
        if (!params[i]) continue;
        operands[count].name = names[i];
        operands[count].t = use == 1 ? params[i]->value : params[i]->grad;
        operands[count++].use = use == 1 ? 1 : 3;
    }
    return mt_rule_check(ctx, function, &rules[use - 1], operands, count);
}

/* With saved, the norms read copies of the queries and keys. Backward needs the copies, because forward overwrites the
   originals in qkv. */
static mt_status mti_qk_norm_forward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor q, mt_tensor k,
                                     mt_qk_norm_saved *saved) {
    mt_tensor q_in = q, k_in = k;
    if (saved) {
        MT_TRY(mt_arena_tensor(ctx, q.dtype, q.rows, q.cols, &q_in));
        MT_TRY(mt_arena_tensor(ctx, k.dtype, k.rows, k.cols, &k_in));
        MT_TRY(mt_copy(ctx, q, q_in));
        MT_TRY(mt_copy(ctx, k, k_in));
    }
    MT_TRY(mt_norm_layer_forward(ctx, &norm->q, q_in, q, saved ? &saved->q : NULL));
    return mt_norm_layer_forward(ctx, &norm->k, k_in, k, saved ? &saved->k : NULL);
}

MT_API mt_status mt_qk_norm_forward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor qkv, mt_qk_norm_saved *saved) {
    static const char *const function = "mt_qk_norm_forward";
    mt_tensor q, k;
    MT_TRY(mti_qk_norm_views(ctx, function, norm, "qkv", qkv, &q, &k));
    MT_TRY(mti_qk_norm_rule(ctx, function, norm, qkv, 1));
    mt_check_pause(ctx);
    return mt_check_resume(ctx, mti_qk_norm_forward(ctx, norm, q, k, saved));
}

static mt_status mti_qk_norm_backward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor q, mt_tensor k,
                                      const mt_qk_norm_saved *saved) {
    MT_TRY(mt_norm_layer_backward(ctx, &norm->q, q, mt_none(), q, &saved->q));
    return mt_norm_layer_backward(ctx, &norm->k, k, mt_none(), k, &saved->k);
}

MT_API mt_status mt_qk_norm_backward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor dqkv,
                                     const mt_qk_norm_saved *saved) {
    static const char *const function = "mt_qk_norm_backward";
    mt_tensor q, k;
    MT_TRY(mti_qk_norm_views(ctx, function, norm, "dqkv", dqkv, &q, &k));
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_qk_norm_rule(ctx, function, norm, dqkv, 2));
    mt_check_pause(ctx);
    return mt_check_resume(ctx, mti_qk_norm_backward(ctx, norm, q, k, saved));
}

/* Returns the desc of virtual shard number `shard` of this rank. groups is the number of this rank's groups, empty ones
   included. *first is the first group of the shard, counted on this rank. */
static mt_attention_desc mti_attention_shard(const mt_attention_desc *whole, int64_t groups, int shard, int shards,
                                             int64_t *first) {
    int64_t each = groups / shards;
    mt_attention_desc s = *whole;
    *first = mt_min(whole->groups, shard * each);
    s.groups = mt_min(each, whole->groups - *first);
    s.dropout.at.first_col += *first * s.heads_per_group;
    s.bias_first_head += *first * s.heads_per_group;
    if (s.alibi_slopes) s.alibi_slopes += *first * s.heads_per_group;
    return s;
}

/* The number of columns of a query group in qkv and in out. */
static int64_t mti_qkv_width(const mt_attention_desc *s) { return (s->heads_per_group + 2) * s->head_dim; }
static int64_t mti_out_width(const mt_attention_desc *s) { return s->heads_per_group * s->head_dim; }

/* Returns the columns of t for desc->groups groups of `width` columns. first is the number of the first group. */
static mt_tensor mti_attention_cols(const mt_attention_desc *desc, mt_tensor t, int64_t first, int64_t width) {
    return mt_tensor_cols(t, first * width, desc->groups * width);
}

/* Writes zeros to the columns of the empty groups. In t they follow those of desc->groups groups of `width` columns. */
static mt_status mti_attention_zero_rest(mt_context *ctx, const mt_attention_desc *desc, mt_tensor t, int64_t width) {
    int64_t used = desc->groups * width;
    return used == t.cols ? MT_SUCCESS : mt_fill(ctx, mt_tensor_cols(t, used, t.cols - used), 0.0f);
}

static mt_tensor mti_attention_lse(const mt_attention_desc *desc, mt_tensor lse, int64_t first) {
    return mti_some_rows(lse, first * desc->heads_per_group, desc->groups * desc->heads_per_group);
}

/* Returns 1 when the columns of desc->groups groups are not one piece of qkv, but three. */
static int mti_qkv_in_pieces(const mt_attention_desc *desc, mt_tensor qkv) {
    return desc->qkv_layout == MT_QKV_SEPARATE && qkv.cols != desc->groups * mti_qkv_width(desc);
}

/* Sets *shard to the columns of desc->groups groups of qkv, or to scratch memory for mti_qkv_copy when they are in
   pieces. first is the number of the first group. */
static mt_status mti_qkv_shard(mt_context *ctx, const mt_attention_desc *desc, int64_t first, mt_tensor qkv,
                               mt_tensor *shard) {
    int64_t width = mti_qkv_width(desc);
    if (mti_qkv_in_pieces(desc, qkv)) return mt_arena_tensor(ctx, qkv.dtype, qkv.rows, desc->groups * width, shard);
    *shard = mti_attention_cols(desc, qkv, first, width);
    return MT_SUCCESS;
}

/* Returns part 0, 1 or 2 (queries, keys, values) of desc->groups groups in the columns of t, [q; k; v]. */
static mt_tensor mti_qkv_part(const mt_attention_desc *desc, mt_tensor t, int64_t first, int part) {
    int64_t groups = t.cols / mti_qkv_width(desc), queries = mti_out_width(desc), d = desc->head_dim;
    if (part == 0) return mti_attention_cols(desc, t, first, queries);
    return mt_tensor_cols(t, groups * queries + ((part - 1) * groups + first) * d, desc->groups * d);
}

/* Copies the pieces of a shard from qkv to *shard or, with `back`, from *shard to qkv. */
static mt_status mti_qkv_copy(mt_context *ctx, const mt_attention_desc *desc, int64_t first, mt_tensor qkv,
                              mt_tensor shard, int back) {
    int part;
    for (part = 0; part < 3 && mti_qkv_in_pieces(desc, qkv); part++) {
        mt_tensor all = mti_qkv_part(desc, qkv, first, part), own = mti_qkv_part(desc, shard, 0, part);
        MT_TRY(mt_copy(ctx, back ? own : all, back ? all : own));
    }
    return MT_SUCCESS;
}

/* Sets *out to the columns of a shard, as input for the operator. */
static mt_status mti_qkv_input(mt_context *ctx, const mt_attention_desc *desc, int64_t first, mt_tensor qkv,
                               mt_tensor *out) {
    mt_tensor shard;
    MT_TRY(mti_qkv_shard(ctx, desc, first, qkv, &shard));
    MT_TRY(mti_qkv_copy(ctx, desc, first, qkv, shard, 0));
    return mt_invariant_input(ctx, shard, out);
}

/* Runs core attention on one virtual shard. desc and first are from mti_attention_shard; the tensors are those of the
   whole rank. */
static mt_status mti_attention_shard_forward(mt_context *ctx, const mt_attention_desc *desc, int64_t first,
                                             mt_tensor qkv, mt_tensor out, mt_tensor lse) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor to;
    if (desc->groups == 0) return MT_SUCCESS;
    out = mti_attention_cols(desc, out, first, mti_out_width(desc));
    MT_TRY(mti_qkv_input(ctx, desc, first, qkv, &qkv));
    MT_TRY(mt_invariant_output(ctx, out, &to));
    MT_TRY(mt_attention_forward(ctx, desc, qkv, to, mti_attention_lse(desc, lse, first)));
    MT_TRY(mt_invariant_store(ctx, to, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Checks desc, shards and two tensors: qkv and out, or dqkv and dout. They also have the columns of empty groups. */
static mt_status mti_core_check(mt_context *ctx, const char *function, const mt_attention_desc *desc, int shards,
                                const char *qkv_name, mt_tensor qkv, const char *out_name, mt_tensor out) {
    int64_t groups, tokens;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", function);
    MT_TRY(mt_check_integer(ctx, function, NULL, "shards", shards, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "groups", desc->groups, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "head_dim", desc->head_dim, 1, INT32_MAX / 3));
    MT_TRY(mt_check_integer(ctx, function, NULL, "heads_per_group", desc->heads_per_group, 1,
                            INT32_MAX / desc->head_dim - 2));
    tokens = mt_size_mul(desc->batch, desc->seq);
    groups = qkv.cols / mti_qkv_width(desc);
    if (groups < desc->groups || groups % shards != 0 || qkv.cols != groups * mti_qkv_width(desc))
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s has %lld columns, for %lld groups of %lld heads of %lld", function,
                       qkv_name, (long long)qkv.cols, (long long)desc->groups, (long long)desc->heads_per_group,
                       (long long)desc->head_dim);
    if (desc->qkv_layout != MT_QKV_PER_GROUP && groups != desc->groups)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld of %lld groups are empty, which needs MT_QKV_PER_GROUP", function,
                       (long long)(groups - desc->groups), (long long)groups);
    MT_TRY(mt_tensor_check(ctx, function, qkv_name, qkv, MT_ARG_FLOAT, tokens, qkv.cols));
    return mt_tensor_check(ctx, function, out_name, out, MT_ARG_FLOAT, tokens, groups * mti_out_width(desc));
}

/* Checks lse, which has rows for the non-empty groups only. */
static mt_status mti_core_check_lse(mt_context *ctx, const char *function, const mt_attention_desc *desc,
                                    mt_tensor lse) {
    return mt_tensor_check(ctx, function, "lse", lse, MT_ARG_F32, desc->groups * desc->heads_per_group,
                           desc->batch * desc->seq);
}

MT_API mt_status mt_core_attention_forward(mt_context *ctx, const mt_attention_desc *desc, int shards, mt_tensor qkv,
                                           mt_tensor out, mt_tensor lse) {
    static const char *const function = "mt_core_attention_forward";
    int64_t groups, first;
    int s;
    MT_TRY(mti_core_check(ctx, function, desc, shards, "qkv", qkv, "out", out));
    if (lse.data) MT_TRY(mti_core_check_lse(ctx, function, desc, lse));
    groups = qkv.cols / mti_qkv_width(desc);
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, groups, s, shards, &first);
        MT_TRY(mti_attention_shard_forward(ctx, &part, first, qkv, out, lse));
    }
    return mti_attention_zero_rest(ctx, desc, out, mti_out_width(desc));
}

static mt_status mti_attention_shard_backward(mt_context *ctx, const mt_attention_desc *desc, int64_t first,
                                              mt_tensor qkv, mt_tensor out, mt_tensor lse, mt_tensor dout,
                                              mt_tensor dqkv) {
    int64_t out_width = mti_out_width(desc);
    size_t mark = mt_arena_mark(ctx);
    mt_tensor to, shard;
    if (desc->groups == 0) return MT_SUCCESS;
    MT_TRY(mti_qkv_input(ctx, desc, first, qkv, &qkv));
    MT_TRY(mt_invariant_input(ctx, mti_attention_cols(desc, out, first, out_width), &out));
    MT_TRY(mt_invariant_input(ctx, mti_attention_cols(desc, dout, first, out_width), &dout));
    MT_TRY(mti_qkv_shard(ctx, desc, first, dqkv, &shard));
    MT_TRY(mt_invariant_output(ctx, shard, &to));
    MT_TRY(mt_attention_backward(ctx, desc, qkv, out, mti_attention_lse(desc, lse, first), dout, to));
    MT_TRY(mt_invariant_store(ctx, to, shard));
    MT_TRY(mti_qkv_copy(ctx, desc, first, dqkv, shard, 1));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

MT_API mt_status mt_core_attention_backward(mt_context *ctx, const mt_attention_desc *desc, int shards, mt_tensor qkv,
                                            mt_tensor out, mt_tensor lse, mt_tensor dout, mt_tensor dqkv) {
    static const char *const function = "mt_core_attention_backward";
    int64_t groups, first;
    int s;
    MT_TRY(mti_core_check(ctx, function, desc, shards, "qkv", qkv, "out", out));
    MT_TRY(mti_core_check(ctx, function, desc, shards, "dqkv", dqkv, "dout", dout));
    if (dqkv.cols != qkv.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: dqkv has %lld columns, qkv %lld", function, (long long)dqkv.cols,
                       (long long)qkv.cols);
    if (desc->groups > 0) MT_TRY(mti_core_check_lse(ctx, function, desc, lse));
    groups = qkv.cols / mti_qkv_width(desc);
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, groups, s, shards, &first);
        MT_TRY(mti_attention_shard_backward(ctx, &part, first, qkv, out, lse, dout, dqkv));
    }
    return mti_attention_zero_rest(ctx, desc, dqkv, mti_qkv_width(desc));
}

/* Calls mt_rotary_forward or mt_rotary_backward on this rank's groups in qkv. Concatenated columns lie shard by
   shard. */
static mt_status mti_attention_rotate(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                      mt_status (*rotate)(mt_context *ctx, const mt_attention_desc *desc,
                                                          mt_tensor table, mt_tensor qkv),
                                      mt_tensor qkv) {
    int s, shards = desc->qkv_layout == MT_QKV_CONCATENATED ? a->proj.weight->shards : 1;
    int64_t first;
    for (s = 0; s < shards && a->rotary.data && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        MT_TRY(rotate(ctx, &part, mt_tensor_rows(a->rotary, 0, desc->seq),
                      mti_attention_cols(&part, qkv, first, mti_qkv_width(desc))));
    }
    return MT_SUCCESS;
}

static mt_status mti_attention_core_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                            const mt_self_attention_saved *saved) {
    return mt_core_attention_forward(ctx, desc, a->proj.weight->shards, saved->qkv, saved->out, saved->lse);
}

static mt_status mti_attention_core_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                             const mt_self_attention_saved *saved, mt_tensor dout, mt_tensor dqkv) {
    MT_TRY(
        mt_core_attention_backward(ctx, desc, a->proj.weight->shards, saved->qkv, saved->out, saved->lse, dout, dqkv));
    return mti_attention_rotate(ctx, a, desc, mt_rotary_backward, dqkv);
}

/* Allocates the outputs of core attention, saved->out and saved->lse. For inference, saved->lse is mt_none(). */
static mt_status mti_attention_room(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                    mt_self_attention_saved *saved, int training) {
    int64_t tokens = saved->qkv.rows;
    saved->lse = mt_none();
    MT_TRY(mt_arena_tensor(ctx, saved->qkv.dtype, tokens, a->proj.local_features, &saved->out));
    if (!training) return MT_SUCCESS;
    return mt_arena_tensor(ctx, MT_F32, desc->groups * desc->heads_per_group, tokens, &saved->lse);
}

/* Returns the number of layers that compute queries, keys and values, and sets *layers to the first one and cols[i] to
   the columns of qkv (or dqkv) of each. */
static int mti_attention_layers(const mt_self_attention *a, mt_tensor qkv, const mt_column_parallel_linear **layers,
                                mt_tensor cols[3]) {
    int i, count = a->desc.qkv_layout == MT_QKV_SEPARATE ? 3 : 1;
    int64_t first = 0;
    *layers = count == 3 ? a->separate : &a->qkv;
    for (i = 0; i < count; i++) {
        cols[i] = mt_tensor_cols(qkv, first, (*layers)[i].local_features);
        first += (*layers)[i].local_features;
    }
    return count;
}

/* Logs the gradients of queries, keys and values. */
static mt_status mti_attention_log(mt_context *ctx, const mt_column_parallel_linear *layers, int count,
                                   const mt_tensor *dqkv) {
    int i;
    if (count == 1)
        return mt_hash_log_activation(ctx, layers->name, 1, "core_attention.input_grad", *dqkv, 0, layers->weight);
    for (i = 0; i < count; i++)
        MT_TRY(mt_hash_log_activation(ctx, layers[i].name, 0, "output_grad", dqkv[i], 0, layers[i].weight));
    return MT_SUCCESS;
}

/* The part of a cache that belongs to the groups of desc, from mti_attention_shard. */
static mt_kv_cache mti_cache_shard(const mt_attention_desc *desc, int64_t first, const mt_kv_cache *cache) {
    int64_t rows = desc->batch * cache->max_seq; /* of a group */
    mt_kv_cache part = *cache;
    part.keys = mt_tensor_rows(cache->keys, first * rows, desc->groups * rows);
    part.values = mt_tensor_rows(cache->values, first * rows, desc->groups * rows);
    return part;
}

/* Adds the keys and values of one virtual shard to the cache, and runs core attention on it. */
static mt_status mti_attention_shard_cached(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                            int64_t first, const mt_kv_cache *cache, mt_tensor qkv, mt_tensor out) {
    size_t mark = mt_arena_mark(ctx);
    mt_kv_cache part = mti_cache_shard(desc, first, cache);
    mt_tensor table = a->rotary.data ? mt_tensor_rows(a->rotary, 0, cache->max_seq) : mt_none(), to;
    if (desc->groups == 0) return MT_SUCCESS;
    out = mti_attention_cols(desc, out, first, mti_out_width(desc));
    MT_TRY(mti_qkv_input(ctx, desc, first, qkv, &qkv));
    MT_TRY(mt_invariant_output(ctx, out, &to));
    MT_TRY(mt_kv_cache_append(ctx, desc, table, qkv, &part));
    MT_TRY(mt_kv_cache_attention(ctx, desc, qkv, &part, to));
    MT_TRY(mt_invariant_store(ctx, to, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Core attention with a cache, which turns the queries and keys of qkv itself. */
static mt_status mti_attention_core_cached(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                           const mt_kv_cache *cache, mt_tensor qkv, mt_tensor out) {
    int s, shards = a->proj.weight->shards;
    int64_t first;
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        MT_TRY(mti_attention_shard_cached(ctx, a, &part, first, cache, qkv, out));
    }
    return mti_attention_zero_rest(ctx, desc, out, mti_out_width(desc));
}

/* Computes y from x with a cache. */
static mt_status mti_attention_cached(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                      const mt_kv_cache *cache, mt_tensor x, mt_tensor y) {
    const mt_column_parallel_linear *layers;
    mt_tensor qkv, out, cols[3];
    int count;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, a->groups * mti_qkv_width(desc), &qkv));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, a->proj.local_features, &out));
    count = mti_attention_layers(a, qkv, &layers, cols);
    MT_TRY(mt_column_parallel_linear_forward_shared(ctx, layers, count, x, cols, NULL));
    MT_TRY(mti_attention_core_cached(ctx, a, desc, cache, qkv, out));
    return mt_row_parallel_linear_forward(ctx, &a->proj, out, y, NULL);
}

/* With recompute_core, only saved->qkv stays in the arena. */
static mt_status mti_attention_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                       mt_tensor x, mt_tensor y, mt_self_attention_saved *saved, int training) {
    const mt_column_parallel_linear *layers;
    mt_tensor cols[3];
    size_t mark;
    int count;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, desc->batch * desc->seq, a->groups * mti_qkv_width(desc), &saved->qkv));
    count = mti_attention_layers(a, saved->qkv, &layers, cols);
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_attention_room(ctx, a, desc, saved, training));
    MT_TRY(mt_column_parallel_linear_forward_shared(ctx, layers, count, x, cols, training ? &saved->qkv_in : NULL));
    MT_TRY(mti_attention_rotate(ctx, a, desc, mt_rotary_forward, saved->qkv));
    MT_TRY(mti_attention_core_forward(ctx, a, desc, saved));
    if (training)
        MT_TRY(mt_hash_log_activation(ctx, a->proj.name, 1, "core_attention.output", saved->out, 0, a->proj.weight));
    MT_TRY(mt_row_parallel_linear_forward(ctx, &a->proj, saved->out, y, training ? &saved->proj_in : NULL));
    if (a->desc.recompute_core) mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Checks what a batch says of the scores. s is a desc for all heads of the model on every rank, so all ranks return the
   same error. */
static mt_status mti_scores_check(mt_context *ctx, const char *function, const mt_attention_desc *s) {
    int64_t heads = s->groups * s->heads_per_group;
    if (s->bias_heads > 1 && s->bias_heads != heads)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: bias_heads is %lld, must be 1 or the %lld heads of the model", function,
                       (long long)s->bias_heads, (long long)heads);
    if (mt_context_invariant(ctx) && s->dbias.data && heads > 1 && s->bias_heads != heads)
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "%s: attention_dbias in invariant mode needs bias_heads %lld, the heads of the model; it is %lld", function,
            (long long)heads, (long long)s->bias_heads);
    return mt_attention_check(ctx, function, s);
}

static mt_status mti_batch_scores_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                        const mt_batch *batch) {
    int64_t groups = a->desc.kv_heads * a->pieces;
    mt_attention_desc s =
        mti_rank_attention(groups, 0, groups, a->desc.heads / groups, a->head_dim, a->desc.qkv_layout, batch);
    return mti_scores_check(ctx, function, &s);
}

/* Checks an activation that has the tokens of the batch, or with sequence parallelism this rank's share of them. */
static mt_status mti_tokens_check(mt_context *ctx, const char *function, const mt_row_parallel_linear *proj,
                                  const mt_batch *batch, const char *name, mt_tensor t, int64_t cols) {
    int64_t tokens = batch->sequences * batch->seq, rows = 0;
    MT_TRY(mt_sequence_rows(ctx, function, proj->tp, proj->desc.sequence_parallel, tokens, &rows));
    return mt_check_activation(ctx, function, proj->weight, name, t, rows, cols);
}

/* Checks the parameters, the batch and two activations: x and y, or dy and dx. For attention and the whole layer. */
static mt_status mti_block_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                 const mt_batch *batch, const char *in_name, mt_tensor in, const char *out_name,
                                 mt_tensor out) {
    MT_TRY(mt_check_param(ctx, function, a->proj.weight));
    MT_TRY(mti_batch_check(ctx, function, "batch", batch, a->rotary.data ? a->desc.max_seq : 0));
    MT_TRY(mti_batch_scores_check(ctx, function, a, batch));
    MT_TRY(mt_check_apart(ctx, function, "attention_dbias", batch->attention_dbias, in_name, in));
    MT_TRY(mt_check_apart(ctx, function, "attention_dbias", batch->attention_dbias, out_name, out));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, batch, in_name, in, a->desc.hidden));
    return mti_tokens_check(ctx, function, &a->proj, batch, out_name, out, a->desc.hidden);
}

static mt_status mti_attention_call_forward(mt_context *ctx, const char *function, const mt_self_attention *attention,
                                            const mt_batch *batch, mt_tensor x, mt_tensor y,
                                            mt_self_attention_saved *saved) {
    mt_attention_desc desc;
    mt_self_attention_saved local;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    MT_TRY(mti_block_check(ctx, function, attention, batch, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, attention->proj.tp, attention->desc.sequence_parallel, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    desc = mti_attention_desc(attention, batch, saved != NULL);
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("attention forward",
                      mti_attention_forward(ctx, attention, &desc, x, y, saved ? saved : &local, saved != NULL));
    if (status == MT_SUCCESS && saved) saved->batch = *batch;
    else mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_self_attention_forward(mt_context *ctx, const mt_self_attention *attention, const mt_batch *batch,
                                           mt_tensor x, mt_tensor y, mt_self_attention_saved *saved) {
    return mti_attention_call_forward(ctx, "mt_self_attention_forward", attention, batch, x, y, saved);
}

/* Checks desc and the numbers of a cache, with a desc of all groups of the model, and the shapes of the cache on this
   rank. */
static mt_status mti_cache_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                 const mt_batch *batch, const mt_kv_cache *cache) {
    int64_t groups = a->desc.kv_heads * a->pieces, rows;
    mt_attention_desc s =
        mti_rank_attention(groups, 0, groups, a->desc.heads / groups, a->head_dim, a->desc.qkv_layout, batch);
    s.mask = a->desc.mask;
    MT_TRY(mt_kv_cache_check(ctx, function, &s, cache));
    if (a->rotary.data && cache->max_seq > a->desc.max_seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: the cache has max_seq %lld, must be at most that of the layer, %lld",
                       function, (long long)cache->max_seq, (long long)a->desc.max_seq);
    rows = mt_size_mul(mt_size_mul(batch->sequences, mt_self_attention_cache_groups(a)), cache->max_seq);
    if (rows == 0) return MT_SUCCESS;
    MT_TRY(mt_check_activation(ctx, function, a->proj.weight, "keys", cache->keys, rows, a->head_dim));
    return mt_check_activation(ctx, function, a->proj.weight, "values", cache->values, rows, a->head_dim);
}

/* Inference with a cache runs without sequence parallelism. Clears it in a copy of the struct of a layer. */
static void mti_attention_whole_tokens(mt_self_attention *a) {
    int i;
    a->desc.sequence_parallel = a->qkv.desc.sequence_parallel = a->proj.desc.sequence_parallel = 0;
    for (i = 0; i < 3; i++) a->separate[i].desc.sequence_parallel = 0;
}

MT_API int64_t mt_self_attention_cache_groups(const mt_self_attention *attention) {
    if (!attention || attention->pieces < 1) return 0;
    return mti_used_groups(attention->groups, attention->first_group, attention->desc.kv_heads * attention->pieces);
}

MT_API mt_status mt_self_attention_cached_forward(mt_context *ctx, const mt_self_attention *attention,
                                                  const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                  mt_tensor y) {
    static const char *const function = "mt_self_attention_cached_forward";
    mt_self_attention a;
    mt_attention_desc desc;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    a = *attention;
    mti_attention_whole_tokens(&a);
    MT_TRY(mti_block_check(ctx, function, &a, batch, "x", x, "y", y));
    MT_TRY(mti_cache_check(ctx, function, &a, batch, cache));
    MT_TRY(mt_check_sent(ctx, function, a.proj.tp, 0, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    desc = mti_attention_desc(&a, batch, 0);
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("attention forward", mti_attention_cached(ctx, &a, &desc, cache, x, y));
    mt_arena_release(ctx, mark);
    return status;
}

/* With recompute_core: computes out and lse of *saved again. */
static mt_status mti_attention_core_again(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                          mt_self_attention_saved *saved) {
    mt_status status;
    MT_TRY(mti_attention_room(ctx, a, desc, saved, 1));
    mt_trace_recompute(ctx, 1);
    status = mti_attention_core_forward(ctx, a, desc, saved);
    mt_trace_recompute(ctx, 0);
    saved->proj_in.x = saved->out;
    return status;
}

static mt_status mti_attention_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                        mt_tensor dy, mt_tensor dx, const mt_self_attention_saved *saved) {
    mt_self_attention_saved again = *saved;
    const mt_column_parallel_linear *layers;
    mt_tensor dout, dqkv, cols[3];
    int count;
    if (a->desc.recompute_core) {
        MT_TRY(mti_attention_core_again(ctx, a, desc, &again));
        saved = &again;
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->out.rows, saved->out.cols, &dout));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->qkv.rows, saved->qkv.cols, &dqkv));
    MT_TRY(mt_row_parallel_linear_backward(ctx, &a->proj, dy, dout, &saved->proj_in));
    MT_TRY(mti_attention_core_backward(ctx, a, desc, saved, dout, dqkv));
    count = mti_attention_layers(a, dqkv, &layers, cols);
    MT_TRY(mti_attention_log(ctx, layers, count, cols));
    return mt_column_parallel_linear_backward_shared(ctx, layers, count, cols, dx, &saved->qkv_in);
}

/* Checks, before anything is added to a gradient, that saved is of a forward with the same sizes. */
static mt_status mti_attention_saved_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                           const mt_self_attention_saved *saved) {
    int64_t tokens = saved->batch.sequences * saved->batch.seq,
            width = a->proj.local_features + 2 * a->groups * a->head_dim;
    MT_TRY(mt_check_activation(ctx, function, a->proj.weight, "saved.qkv", saved->qkv, tokens, width));
    if (a->desc.recompute_core) return MT_SUCCESS;
    return mt_check_activation(ctx, function, a->proj.weight, "saved.out", saved->out, tokens, a->proj.local_features);
}

static mt_status mti_attention_call_backward(mt_context *ctx, const char *function, const mt_self_attention *attention,
                                             mt_tensor dy, mt_tensor dx, const mt_self_attention_saved *saved) {
    mt_attention_desc desc;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention || !saved)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, attention ? "saved" : "attention");
    MT_TRY(
        mti_block_check(ctx, function, attention, &saved->batch, "dy", dy, dx.data ? "dx" : "dy", dx.data ? dx : dy));
    MT_TRY(mt_check_sent(ctx, function, attention->proj.tp, attention->desc.sequence_parallel, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "saved.qkv_in.x", saved->qkv_in.x, "dx", dx));
    MT_TRY(mti_attention_saved_check(ctx, function, attention, saved));
    MT_TRY(mt_check_gradient(ctx, function, attention->proj.weight));
    desc = mti_attention_desc(attention, &saved->batch, 1);
    mt_hash_log_tokens(ctx, saved->batch.first_sequence * saved->batch.seq);
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("attention backward", mti_attention_backward(ctx, attention, &desc, dy, dx, saved));
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_self_attention_backward(mt_context *ctx, const mt_self_attention *attention, mt_tensor dy,
                                            mt_tensor dx, const mt_self_attention_saved *saved) {
    return mti_attention_call_backward(ctx, "mt_self_attention_backward", attention, dy, dx, saved);
}

/* Takes the slopes of ALiBi from the caller's tensors. */
static mt_status mti_own_slopes(mt_context *ctx, const char *function, const mt_self_attention_tensors *tensors,
                                mt_self_attention *out) {
    int64_t heads = mti_attention_heads_here(out);
    out->alibi_slopes = tensors->alibi_slopes;
    if (out->desc.alibi && !tensors->alibi_slopes.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: alibi is 1, but alibi_slopes is mt_none()", function);
    if (out->desc.alibi)
        return mt_tensor_check(ctx, function, "alibi_slopes", tensors->alibi_slopes, MT_ARG_F32, 1, heads);
    if (!tensors->alibi_slopes.data) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: there are alibi_slopes, but alibi is 0", function);
}

/* Makes attention of tensors. own has MTI_ORIGIN_PARAMS parameters. */
static mt_status mti_own_attention(mt_context *ctx, const char *function, mt_comm *tp,
                                   const mt_self_attention_tensors *tensors, const mt_self_attention_desc *desc,
                                   mti_origin *from, mt_param *own, mt_self_attention *out) {
    mt_self_attention_desc d;
    int i, shards;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tp || !tensors || !desc)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, !tp ? "tp" : !tensors ? "tensors" : "desc");
    d = *desc;
    if (!d.kv_heads) d.kv_heads = d.heads;
    shards = mt_context_invariant(ctx) ? mt_context_invariant(ctx) : mt_comm_size(tp);
    MT_TRY(mti_attention_check(ctx, function, "attention", &d, shards));
    if (d.kv_heads < shards)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld kv_heads cannot be split over %d %s; use mt_self_attention_create",
                       function, (long long)d.kv_heads, shards, mti_shards_name(ctx));
    memset(from, 0, sizeof *from);
    from->tp = tp;
    from->columns = d.qkv_layout == MT_QKV_SEPARATE ? tensors->separate : &tensors->qkv;
    from->count = d.qkv_layout == MT_QKV_SEPARATE ? 3 : 1;
    from->row = &tensors->proj;
    from->own = own;
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->head_dim = d.hidden / d.heads;
    out->pieces = 1;
    if (d.rotary_base > 0.0f)
        MT_TRY(mt_tensor_check(ctx, function, "rotary", tensors->rotary, MT_ARG_F32, d.max_seq,
                               mti_attention_rotary_dim(&d)));
    else if (tensors->rotary.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: there is a rotary table, but rotary_base is 0", function);
    MT_TRY(mti_attention_create(ctx, from, "", out));
    for (i = 0; i < from->count; i++)
        if (from->columns[i].w.dtype != from->row->w.dtype)
            return mt_fail(ctx, MT_ERR_DTYPE, "%s: the weight of column-parallel layer %d is %s, proj.w is %s",
                           function, i, mt_dtype_name(from->columns[i].w.dtype), mt_dtype_name(from->row->w.dtype));
    out->rotary = tensors->rotary;
    return mti_own_slopes(ctx, function, tensors, out);
}

MT_API mt_status mt_parallel_attention_forward(mt_context *ctx, mt_comm *tp, const mt_batch *batch, mt_tensor x,
                                               const mt_self_attention_tensors *tensors, mt_tensor y,
                                               const mt_self_attention_desc *desc, mt_self_attention_saved *saved) {
    static const char *const function = "mt_parallel_attention_forward";
    mt_self_attention attention;
    mti_origin from;
    mt_param own[MTI_ORIGIN_PARAMS];
    MT_TRY(mti_own_attention(ctx, function, tp, tensors, desc, &from, own, &attention));
    return mti_attention_call_forward(ctx, function, &attention, batch, x, y, saved);
}

MT_API mt_status mt_parallel_attention_backward(mt_context *ctx, mt_comm *tp, mt_tensor dy,
                                                const mt_self_attention_tensors *tensors, mt_tensor dx,
                                                const mt_self_attention_desc *desc,
                                                const mt_self_attention_saved *saved) {
    static const char *const function = "mt_parallel_attention_backward";
    mt_self_attention attention;
    mti_origin from;
    mt_param own[MTI_ORIGIN_PARAMS];
    MT_TRY(mti_own_attention(ctx, function, tp, tensors, desc, &from, own, &attention));
    MT_TRY(mti_origin_gradients(ctx, function, &from));
    return mti_attention_call_backward(ctx, function, &attention, dy, dx, saved);
}

static int mti_qkv_sizes_ok(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols) {
    return heads > 0 && kv_heads > 0 && head_dim > 0 && cols > 0 && heads % kv_heads == 0 && heads <= INT32_MAX &&
           head_dim <= INT32_MAX / heads && cols <= INT32_MAX;
}

MT_API mt_status mt_qkv_from_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *q,
                                      const float *k, const float *v, float *qkv) {
    size_t row, queries;
    int64_t g;
    if (!mti_qkv_sizes_ok(heads, kv_heads, head_dim, cols)) return MT_ERR_SHAPE;
    if (!q || !k || !v || !qkv) return MT_ERR_ARGUMENT;
    row = (size_t)(head_dim * cols);
    queries = row * (size_t)(heads / kv_heads);
    for (g = 0; g < kv_heads; g++, q += queries, k += row, v += row, qkv += queries + 2 * row) {
        memcpy(qkv, q, queries * sizeof *qkv);
        memcpy(qkv + queries, k, row * sizeof *qkv);
        memcpy(qkv + queries + row, v, row * sizeof *qkv);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_qkv_to_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *qkv,
                                    float *q, float *k, float *v) {
    size_t row, queries;
    int64_t g;
    if (!mti_qkv_sizes_ok(heads, kv_heads, head_dim, cols)) return MT_ERR_SHAPE;
    if (!q || !k || !v || !qkv) return MT_ERR_ARGUMENT;
    row = (size_t)(head_dim * cols);
    queries = row * (size_t)(heads / kv_heads);
    for (g = 0; g < kv_heads; g++, q += queries, k += row, v += row, qkv += queries + 2 * row) {
        memcpy(q, qkv, queries * sizeof *qkv);
        memcpy(k, qkv + queries, row * sizeof *qkv);
        memcpy(v, qkv + queries + row, row * sizeof *qkv);
    }
    return MT_SUCCESS;
}

/* Copies `pairs` to `halves`, or back. Both are [heads * head_dim, cols]. */
static mt_status mti_rotary_convert(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                    const float *pairs, const float *halves, float *to) {
    int64_t turned = rotary_dim ? rotary_dim : head_dim, h, i;
    size_t row;
    if (!mti_qkv_sizes_ok(heads, heads, head_dim, cols) || turned < 0 || turned > head_dim || turned % 2 != 0)
        return MT_ERR_SHAPE;
    if ((!pairs && !halves) || !to) return MT_ERR_ARGUMENT;
    row = (size_t)cols;
    for (h = 0; h < heads; h++)
        for (i = 0; i < head_dim; i++) {
            int64_t half = i >= turned ? i : i / 2 + i % 2 * (turned / 2); /* row i of pairs is this row of halves */
            size_t in_pairs = (size_t)(h * head_dim + i) * row, in_halves = (size_t)(h * head_dim + half) * row;
            if (pairs) memcpy(to + in_halves, pairs + in_pairs, row * sizeof *to);
            else memcpy(to + in_pairs, halves + in_halves, row * sizeof *to);
        }
    return MT_SUCCESS;
}

MT_API mt_status mt_rotary_halves_from_pairs(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *pairs, float *halves) {
    return mti_rotary_convert(heads, head_dim, rotary_dim, cols, pairs, NULL, halves);
}

MT_API mt_status mt_rotary_pairs_from_halves(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *halves, float *pairs) {
    return mti_rotary_convert(heads, head_dim, rotary_dim, cols, NULL, halves, pairs);
}

/* ---- >>cross ----------------------------------------------------------------------------------------------------- */

/* shards is that of mti_heads_check. */
static mt_status mti_cross_desc_check(mt_context *ctx, const char *function, const char *name,
                                      const mt_cross_attention_desc *d, int shards) {
    MT_TRY(mt_check_integer(ctx, function, name, "hidden", d->hidden, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "heads", d->heads, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "kv_heads", d->kv_heads, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "kv_hidden", d->kv_hidden, 0, INT32_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "dropout", d->dropout, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_integer(ctx, function, name, "layer_number", d->layer_number, 0, INT64_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "softcap", d->softcap, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_init_std_check(ctx, function, name, d->init_std, d->output_init_std));
    return mti_heads_check(ctx, function, name, d->hidden, d->heads, d->kv_heads, shards);
}

/* Makes the layers. out->desc, out->head_dim and out->pieces are set. */
static mt_status mti_cross_create(mt_context *ctx, mt_params *params, const char *name, mt_cross_attention *out) {
    const mt_cross_attention_desc *d = &out->desc;
    mti_origin from = mti_from_registry(params);
    mt_linear_desc query, key_value, proj;
    mti_heads h;
    h.heads = d->heads;
    h.kv_heads = d->kv_heads;
    h.head_dim = out->head_dim;
    h.pieces = out->pieces;
    query = mti_attention_linear(d->hidden, d->no_bias, d->sequence_parallel, d->init_std, d->add_to_dx);
    key_value = mti_attention_linear(d->kv_hidden, d->no_bias, d->sequence_parallel, d->init_std, d->add_to_dmemory);
    proj = mti_attention_linear(0, d->no_bias, d->sequence_parallel, d->output_init_std, 0);
    proj.skip_bias_add = d->skip_bias_add;
    MT_TRY(mti_attention_separate(ctx, &from, name, &h, &query, &key_value, &out->query, out->key_value));
    MT_TRY(mti_attention_proj(ctx, &from, name, &h, proj, &out->proj));
    out->groups = out->proj.local_features / out->proj.desc.unit;
    out->first_group = out->proj.weight->tp_rank * out->groups;
    return MT_SUCCESS;
}

MT_API mt_status mt_cross_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                           const mt_cross_attention_desc *desc, mt_cross_attention *out) {
    static const char *const function = "mt_cross_attention_create";
    mt_cross_attention_desc d;
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    d = *desc;
    if (!d.kv_heads) d.kv_heads = d.heads;
    if (!d.kv_hidden) d.kv_hidden = d.hidden;
    MT_TRY(mti_cross_desc_check(ctx, function, name, &d, mt_params_shards(params)));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->head_dim = d.hidden / d.heads;
    out->pieces = mti_group_pieces(d.heads, d.kv_heads, mt_params_shards(params));
    return mt_create_end(params, mark, out, sizeof *out, mti_cross_create(ctx, params, name, out));
}

/* `groups` is the number of groups of a rank. */
static mt_attention_desc mti_cross_rank(const mt_cross_attention *a, int64_t groups, int tp_rank, const mt_batch *batch,
                                        const mt_batch *memory_batch) {
    int64_t all = a->desc.kv_heads * a->pieces;
    mt_attention_desc s =
        mti_rank_attention(groups, tp_rank, all, a->desc.heads / all, a->head_dim, MT_QKV_SEPARATE, batch);
    s.kv_seq = memory_batch->seq;
    mti_batch_scores(memory_batch, s.dropout.at.first_col, &s);
    return s;
}

static mt_attention_desc mti_cross_desc(const mt_cross_attention *a, const mt_batch *batch,
                                        const mt_batch *memory_batch, int training) {
    mt_attention_desc s = mti_cross_rank(a, a->groups, a->proj.weight->tp_rank, batch, memory_batch);
    mti_attention_dropout(&s, mt_batch_dropout(batch, training ? a->desc.dropout : 0.0f, a->desc.layer_number, 3));
    s.mask = MT_MASK_BIDIRECTIONAL;
    s.softcap = a->desc.softcap;
    return s;
}

/* The tensors of core attention, or their gradients, are an array of four: queries, keys, values and outputs. */
#define MTI_CROSS_OUT 3

/* Returns the number of columns that a query group has in tensor number i. */
static int64_t mti_cross_width(const mt_attention_desc *desc, int i) {
    return i == 0 || i == MTI_CROSS_OUT ? mti_out_width(desc) : desc->head_dim;
}

/* Returns the columns of desc->groups groups of tensor number i. first is the number of the first group. */
static mt_tensor mti_cross_cols(const mt_attention_desc *desc, const mt_tensor *t, int i, int64_t first) {
    return mti_attention_cols(desc, t[i], first, mti_cross_width(desc, i));
}

/* Runs core attention on one virtual shard. desc and first are from mti_attention_shard; the tensors are those of the
   whole rank. */
static mt_status mti_cross_shard_forward(mt_context *ctx, const mt_attention_desc *desc, int64_t first,
                                         const mt_tensor *t, mt_tensor lse) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor in[MTI_CROSS_OUT], out, to;
    int i;
    if (desc->groups == 0) return MT_SUCCESS;
    for (i = 0; i < MTI_CROSS_OUT; i++) MT_TRY(mt_invariant_input(ctx, mti_cross_cols(desc, t, i, first), &in[i]));
    out = mti_cross_cols(desc, t, MTI_CROSS_OUT, first);
    MT_TRY(mt_invariant_output(ctx, out, &to));
    MT_TRY(mt_dot_product_attention_forward(ctx, desc, in[0], in[1], in[2], to, mti_attention_lse(desc, lse, first)));
    MT_TRY(mt_invariant_store(ctx, to, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_cross_core_forward(mt_context *ctx, const mt_cross_attention *a, const mt_attention_desc *desc,
                                        const mt_cross_attention_saved *saved) {
    mt_tensor t[MTI_CROSS_OUT + 1] = {saved->q, saved->k, saved->v, saved->out};
    int s, shards = a->proj.weight->shards;
    int64_t first;
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        MT_TRY(mti_cross_shard_forward(ctx, &part, first, t, saved->lse));
    }
    return mti_attention_zero_rest(ctx, desc, saved->out, mti_out_width(desc));
}

/* d has the gradients of the tensors t. */
static mt_status mti_cross_shard_backward(mt_context *ctx, const mt_attention_desc *desc, int64_t first,
                                          const mt_tensor *t, mt_tensor lse, const mt_tensor *d) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor in[MTI_CROSS_OUT + 1], to[MTI_CROSS_OUT], dout;
    int i;
    if (desc->groups == 0) return MT_SUCCESS;
    for (i = 0; i <= MTI_CROSS_OUT; i++) MT_TRY(mt_invariant_input(ctx, mti_cross_cols(desc, t, i, first), &in[i]));
    MT_TRY(mt_invariant_input(ctx, mti_cross_cols(desc, d, MTI_CROSS_OUT, first), &dout));
    for (i = 0; i < MTI_CROSS_OUT; i++) MT_TRY(mt_invariant_output(ctx, mti_cross_cols(desc, d, i, first), &to[i]));
    MT_TRY(mt_dot_product_attention_backward(ctx, desc, in[0], in[1], in[2], in[MTI_CROSS_OUT],
                                             mti_attention_lse(desc, lse, first), dout, to[0], to[1], to[2]));
    for (i = 0; i < MTI_CROSS_OUT; i++) MT_TRY(mt_invariant_store(ctx, to[i], mti_cross_cols(desc, d, i, first)));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_cross_core_backward(mt_context *ctx, const mt_cross_attention *a, const mt_attention_desc *desc,
                                         const mt_cross_attention_saved *saved, const mt_tensor *d) {
    mt_tensor t[MTI_CROSS_OUT + 1] = {saved->q, saved->k, saved->v, saved->out};
    int i, s, shards = a->proj.weight->shards;
    int64_t first;
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        MT_TRY(mti_cross_shard_backward(ctx, &part, first, t, saved->lse, d));
    }
    for (i = 0; i < MTI_CROSS_OUT; i++) MT_TRY(mti_attention_zero_rest(ctx, desc, d[i], mti_cross_width(desc, i)));
    return MT_SUCCESS;
}

/* Allocates the outputs of core attention, saved->out and saved->lse. For inference, saved->lse is mt_none(). */
static mt_status mti_cross_room(mt_context *ctx, const mt_attention_desc *desc, mt_cross_attention_saved *saved,
                                int training) {
    saved->lse = mt_none();
    MT_TRY(mt_arena_tensor(ctx, saved->q.dtype, saved->q.rows, saved->q.cols, &saved->out));
    if (!training) return MT_SUCCESS;
    return mt_arena_tensor(ctx, MT_F32, desc->groups * desc->heads_per_group, saved->q.rows, &saved->lse);
}

static void mti_cross_log_tokens(mt_context *ctx, const mt_batch *batch) {
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
}

/* Computes queries, keys and values. The tokens of x come last, because what follows logs them. */
static mt_status mti_cross_inputs(mt_context *ctx, const mt_cross_attention *a, const mt_batch *batch, mt_tensor x,
                                  const mt_batch *memory_batch, mt_tensor memory, mt_cross_attention_saved *saved,
                                  int training) {
    mt_tensor kv[2] = {saved->k, saved->v};
    mti_cross_log_tokens(ctx, memory_batch);
    MT_TRY(mt_column_parallel_linear_forward_shared(ctx, a->key_value, 2, memory, kv,
                                                    training ? &saved->memory_in : NULL));
    mti_cross_log_tokens(ctx, batch);
    return mt_column_parallel_linear_forward(ctx, &a->query, x, saved->q, training ? &saved->query_in : NULL);
}

/* With recompute_core, only saved->q, k and v stay in the arena. */
static mt_status mti_cross_forward(mt_context *ctx, const mt_cross_attention *a, const mt_batch *batch, mt_tensor x,
                                   const mt_batch *memory_batch, mt_tensor memory, mt_tensor y,
                                   mt_cross_attention_saved *saved, int training) {
    mt_attention_desc desc = mti_cross_desc(a, batch, memory_batch, training);
    int64_t queries = desc.batch * desc.seq, keys = desc.batch * desc.kv_seq;
    size_t mark;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, queries, a->query.local_features, &saved->q));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, keys, a->key_value[0].local_features, &saved->k));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, keys, a->key_value[1].local_features, &saved->v));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_cross_room(ctx, &desc, saved, training));
    MT_TRY(mti_cross_inputs(ctx, a, batch, x, memory_batch, memory, saved, training));
    MT_TRY(mti_cross_core_forward(ctx, a, &desc, saved));
    if (training)
        MT_TRY(mt_hash_log_activation(ctx, a->proj.name, 1, "core_attention.output", saved->out, 0, a->proj.weight));
    MT_TRY(mt_row_parallel_linear_forward(ctx, &a->proj, saved->out, y, training ? &saved->proj_in : NULL));
    if (a->desc.recompute_core) mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Checks the parameters and the two batches. */
static mt_status mti_cross_batches_check(mt_context *ctx, const char *function, const mt_cross_attention *a,
                                         const mt_batch *batch, const mt_batch *memory_batch) {
    char memory[64];
    mt_attention_desc s;
    MT_TRY(mt_check_param(ctx, function, a->proj.weight));
    MT_TRY(mti_batch_check(ctx, function, "batch", batch, 0));
    snprintf(memory, sizeof memory, "%s: memory_batch", function); /* begins the message */
    MT_TRY(mti_batch_check(ctx, function, "memory_batch", memory_batch, 0));
    if (batch->sequences != memory_batch->sequences)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: batch has %lld sequences, memory_batch %lld", function,
                       (long long)batch->sequences, (long long)memory_batch->sequences);
    if (batch->first_sequence != memory_batch->first_sequence)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: first_sequence of batch is %lld, that of memory_batch %lld", function,
                       (long long)batch->first_sequence, (long long)memory_batch->first_sequence);
    if (batch->cu_seqlens || memory_batch->cu_seqlens)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s has cu_seqlens; cross-attention has no packed documents", function,
                       batch->cu_seqlens ? "batch" : "memory_batch");
    s = mti_cross_rank(a, a->desc.kv_heads * a->pieces, 0, batch, memory_batch);
    return mti_scores_check(ctx, memory, &s);
}

static mt_status mti_cross_forward_check(mt_context *ctx, const char *function, const mt_cross_attention *a,
                                         const mt_batch *batch, mt_tensor x, const mt_batch *memory_batch,
                                         mt_tensor memory, mt_tensor y) {
    int sp = a->desc.sequence_parallel;
    MT_TRY(mti_cross_batches_check(ctx, function, a, batch, memory_batch));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, batch, "x", x, a->desc.hidden));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, memory_batch, "memory", memory, a->desc.kv_hidden));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, batch, "y", y, a->desc.hidden));
    MT_TRY(mt_check_sent(ctx, function, a->proj.tp, sp, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, a->proj.tp, sp, "memory", memory, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    return mt_check_apart(ctx, function, "memory", memory, "y", y);
}

MT_API mt_status mt_cross_attention_forward(mt_context *ctx, const mt_cross_attention *attention, const mt_batch *batch,
                                            mt_tensor x, const mt_batch *memory_batch, mt_tensor memory, mt_tensor y,
                                            mt_cross_attention_saved *saved) {
    static const char *const function = "mt_cross_attention_forward";
    mt_cross_attention_saved local;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    MT_TRY(mti_cross_forward_check(ctx, function, attention, batch, x, memory_batch, memory, y));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("cross-attention forward", mti_cross_forward(ctx, attention, batch, x, memory_batch, memory, y,
                                                                   saved ? saved : &local, saved != NULL));
    if (status == MT_SUCCESS && saved) {
        saved->batch = *batch;
        saved->memory_batch = *memory_batch;
    } else mt_arena_release(ctx, mark);
    return status;
}

/* Adds to the gradients of query, key and value, and computes dmemory and dx. d has the gradients of queries, keys and
   values. */
static mt_status mti_cross_inputs_backward(mt_context *ctx, const mt_cross_attention *a, const mt_tensor *d,
                                           mt_tensor dx, mt_tensor dmemory, const mt_cross_attention_saved *saved) {
    int i;
    mti_cross_log_tokens(ctx, &saved->memory_batch);
    for (i = 0; i < 2; i++)
        MT_TRY(
            mt_hash_log_activation(ctx, a->key_value[i].name, 0, "output_grad", d[1 + i], 0, a->key_value[i].weight));
    MT_TRY(mt_column_parallel_linear_backward_shared(ctx, a->key_value, 2, d + 1, dmemory, &saved->memory_in));
    mti_cross_log_tokens(ctx, &saved->batch);
    MT_TRY(mt_hash_log_activation(ctx, a->query.name, 0, "output_grad", d[0], 0, a->query.weight));
    return mt_column_parallel_linear_backward(ctx, &a->query, d[0], dx, &saved->query_in);
}

/* With recompute_core: computes out and lse of *saved again. */
static mt_status mti_cross_core_again(mt_context *ctx, const mt_cross_attention *a, const mt_attention_desc *desc,
                                      mt_cross_attention_saved *saved) {
    mt_status status;
    MT_TRY(mti_cross_room(ctx, desc, saved, 1));
    mt_trace_recompute(ctx, 1);
    status = mti_cross_core_forward(ctx, a, desc, saved);
    mt_trace_recompute(ctx, 0);
    saved->proj_in.x = saved->out;
    return status;
}

static mt_status mti_cross_backward(mt_context *ctx, const mt_cross_attention *a, mt_tensor dy, mt_tensor dx,
                                    mt_tensor dmemory, const mt_cross_attention_saved *saved) {
    mt_attention_desc desc = mti_cross_desc(a, &saved->batch, &saved->memory_batch, 1);
    mt_cross_attention_saved again = *saved;
    mt_tensor d[MTI_CROSS_OUT + 1];
    mti_cross_log_tokens(ctx, &saved->batch);
    if (a->desc.recompute_core) {
        MT_TRY(mti_cross_core_again(ctx, a, &desc, &again));
        saved = &again;
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->q.rows, saved->q.cols, &d[0]));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->k.rows, saved->k.cols, &d[1]));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->v.rows, saved->v.cols, &d[2]));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->out.rows, saved->out.cols, &d[MTI_CROSS_OUT]));
    MT_TRY(mt_row_parallel_linear_backward(ctx, &a->proj, dy, d[MTI_CROSS_OUT], &saved->proj_in));
    MT_TRY(mti_cross_core_backward(ctx, a, &desc, saved, d));
    return mti_cross_inputs_backward(ctx, a, d, dx, dmemory, saved);
}

/* Checks, before anything is added to a gradient, that saved is of a forward with the same sizes. */
static mt_status mti_cross_saved_check(mt_context *ctx, const char *function, const mt_cross_attention *a,
                                       const mt_cross_attention_saved *s) {
    int64_t queries = s->batch.sequences * s->batch.seq, keys = s->memory_batch.sequences * s->memory_batch.seq;
    const mt_param *w = a->proj.weight;
    MT_TRY(mt_check_activation(ctx, function, w, "saved.q", s->q, queries, a->query.local_features));
    MT_TRY(mt_check_activation(ctx, function, w, "saved.k", s->k, keys, a->key_value[0].local_features));
    MT_TRY(mt_check_activation(ctx, function, w, "saved.v", s->v, keys, a->key_value[1].local_features));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, &s->batch, "saved.query_in.x", s->query_in.x, a->desc.hidden));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, &s->memory_batch, "saved.memory_in.x", s->memory_in.x,
                            a->desc.kv_hidden));
    if (a->desc.recompute_core) return MT_SUCCESS;
    return mt_check_activation(ctx, function, w, "saved.out", s->out, queries, a->proj.local_features);
}

/* Checks that dx or dmemory overlaps neither what backward reads nor attention_dbias. */
static mt_status mti_cross_apart(mt_context *ctx, const char *function, const mt_cross_attention_saved *saved,
                                 mt_tensor dy, const char *name, mt_tensor d) {
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, name, d));
    MT_TRY(mt_check_apart(ctx, function, "attention_dbias", saved->memory_batch.attention_dbias, name, d));
    MT_TRY(mt_check_apart(ctx, function, "saved.query_in.x", saved->query_in.x, name, d));
    return mt_check_apart(ctx, function, "saved.memory_in.x", saved->memory_in.x, name, d);
}

static mt_status mti_cross_backward_check(mt_context *ctx, const char *function, const mt_cross_attention *a,
                                          mt_tensor dy, mt_tensor dx, mt_tensor dmemory,
                                          const mt_cross_attention_saved *saved) {
    int sp = a->desc.sequence_parallel;
    const mt_batch *keys = &saved->memory_batch;
    MT_TRY(mti_cross_batches_check(ctx, function, a, &saved->batch, keys));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, &saved->batch, "dy", dy, a->desc.hidden));
    if (dx.data) MT_TRY(mti_tokens_check(ctx, function, &a->proj, &saved->batch, "dx", dx, a->desc.hidden));
    if (dmemory.data) MT_TRY(mti_tokens_check(ctx, function, &a->proj, keys, "dmemory", dmemory, a->desc.kv_hidden));
    MT_TRY(mt_check_sent(ctx, function, a->proj.tp, sp, "dy", dy, "dx", dx));
    MT_TRY(mt_check_sent(ctx, function, a->proj.tp, sp, "dy", dy, "dmemory", dmemory));
    MT_TRY(mt_check_apart(ctx, function, "attention_dbias", keys->attention_dbias, "dy", dy));
    MT_TRY(mti_cross_apart(ctx, function, saved, dy, "dx", dx));
    MT_TRY(mti_cross_apart(ctx, function, saved, dy, "dmemory", dmemory));
    MT_TRY(mt_check_apart(ctx, function, "dx", dx, "dmemory", dmemory));
    return mti_cross_saved_check(ctx, function, a, saved);
}

MT_API mt_status mt_cross_attention_backward(mt_context *ctx, const mt_cross_attention *attention, mt_tensor dy,
                                             mt_tensor dx, mt_tensor dmemory, const mt_cross_attention_saved *saved) {
    static const char *const function = "mt_cross_attention_backward";
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention || !saved)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, attention ? "saved" : "attention");
    MT_TRY(mti_cross_backward_check(ctx, function, attention, dy, dx, dmemory, saved));
    MT_TRY(mt_check_gradient(ctx, function, attention->proj.weight));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("cross-attention backward", mti_cross_backward(ctx, attention, dy, dx, dmemory, saved));
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>layer ----------------------------------------------------------------------------------------------------- */

/* Creates the norm NAME.SUFFIX with the features, kind and eps of the layer. */
static mt_status mti_layer_norm(mt_context *ctx, mt_params *params, const char *name, const char *suffix,
                                const mt_transformer_layer_desc *d, mt_norm_layer *out) {
    char full[MT_NAME_MAX];
    mt_norm_layer_desc n;
    memset(&n, 0, sizeof n);
    n.features = d->hidden;
    n.kind = d->norm;
    n.eps = d->norm_eps;
    n.sequence_parallel = d->sequence_parallel;
    MT_TRY(mt_param_name(ctx, full, name, suffix));
    return mt_norm_layer_create(ctx, params, full, &n, out);
}

/* Creates the norms and blocks in the order of forward. mti_model_backward relies on this order in the registry. */
static mt_status mti_layer_blocks(mt_context *ctx, mt_params *params, const char *name,
                                  const mt_transformer_layer_desc *d, mt_transformer_layer *out) {
    char full[MT_NAME_MAX];
    mt_self_attention_desc a;
    mt_mlp_desc m;
    memset(&a, 0, sizeof a);
    memset(&m, 0, sizeof m);
    a.hidden = d->hidden;
    a.heads = d->heads;
    a.kv_heads = d->kv_heads;
    a.mask = d->mask;
    a.rotary_base = d->rotary_base;
    a.rotary_form = d->rotary_form;
    a.rotary_dim = d->rotary_dim;
    a.window = d->window;
    a.softcap = d->softcap;
    a.alibi = d->alibi;
    a.max_seq = d->max_seq;
    a.dropout = d->attention_dropout;
    a.layer_number = d->layer_number;
    m.hidden = d->hidden;
    m.ffn = d->ffn;
    m.activation = d->activation;
    a.no_bias = m.no_bias = d->no_bias;
    a.skip_bias_add = m.skip_bias_add = !d->no_bias; /* the bias is added with dropout and residual */
    a.sequence_parallel = m.sequence_parallel = d->sequence_parallel;
    a.qkv_layout = d->qkv_layout;
    a.recompute_core = d->recompute == MT_RECOMPUTE_SELECTIVE;
    a.init_std = m.init_std = d->init_std;
    a.output_init_std = m.output_init_std = d->output_init_std;
    MT_TRY(mti_layer_norm(ctx, params, name, "input_layernorm", d, &out->input_norm));
    MT_TRY(mt_param_name(ctx, full, name, "self_attention"));
    MT_TRY(mt_self_attention_create(ctx, params, full, &a, &out->attention));
    MT_TRY(mti_layer_norm(ctx, params, name, "pre_mlp_layernorm", d, &out->mlp_norm));
    MT_TRY(mt_param_name(ctx, full, name, "mlp"));
    return mt_mlp_create(ctx, params, full, &m, &out->mlp);
}

/* Checks the fields that the layer uses itself, or passes to its blocks under another name. The blocks check the
   others. */
static mt_status mti_layer_desc_check(mt_context *ctx, const char *function, const char *name,
                                      const mt_transformer_layer_desc *d) {
    MT_TRY(mt_check_integer(ctx, function, name, "hidden", d->hidden, 1, INT32_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "placement", (int)d->placement, MT_LN_PLACEMENT_WORDS));
    MT_TRY(mt_check_enum(ctx, function, name, "norm", (int)d->norm, MT_NORM_WORDS));
    MT_TRY(mt_check_float(ctx, function, name, "norm_eps", d->norm_eps, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_float(ctx, function, name, "attention_dropout", d->attention_dropout, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, function, name, "hidden_dropout", d->hidden_dropout, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_enum(ctx, function, name, "recompute", (int)d->recompute, MT_RECOMPUTE_WORDS));
    return mti_init_std_check(ctx, function, name, d->init_std, d->output_init_std);
}

MT_API mt_status mt_transformer_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                             const mt_transformer_layer_desc *desc, mt_transformer_layer *out) {
    static const char *const function = "mt_transformer_layer_create";
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    MT_TRY(mti_layer_desc_check(ctx, function, name, desc));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    out->tp = mt_params_grid(params)->tp;
    return mt_create_end(params, mark, out, sizeof *out, mti_layer_blocks(ctx, params, name, desc, out));
}

/* Returns the dropout for a tensor [rows, hidden] whose rows are the tokens of the batch or, with sequence_parallel,
   those of this tensor rank. */
static mt_dropout mti_row_dropout(const mt_batch *batch, float p, int64_t layer, int site, int sequence_parallel,
                                  mt_comm *tp, int64_t rows, int64_t hidden) {
    mt_dropout d = mt_batch_dropout(batch, p, layer, site);
    d.at.first_row = batch->first_sequence * batch->seq + (sequence_parallel ? mt_comm_rank(tp) * rows : 0);
    d.at.global_cols = hidden;
    return d;
}

/* A sublayer of a transformer layer: a norm, a block, and bias, dropout and residual. */
typedef struct mti_sublayer {
    const mt_transformer_layer *layer;
    const mt_batch *batch;
    const mt_norm_layer *norm;
    const mt_param *bias; /* of the block's row-parallel layer, which has skip_bias_add; NULL: no bias */
    mt_dropout dropout;
    const mt_kv_cache *cache; /* NULL: attention has none */
    int index;                /* 0: attention; 1: MLP */
} mti_sublayer;

static mti_sublayer mti_sublayer_of(const mt_transformer_layer *layer, const mt_batch *batch, int index, int64_t rows,
                                    int training) {
    mti_sublayer h;
    h.layer = layer;
    h.batch = batch;
    h.cache = NULL;
    h.index = index;
    h.norm = index == 0 ? &layer->input_norm : &layer->mlp_norm;
    h.bias = index == 0 ? layer->attention.proj.bias : layer->mlp.fc2.bias;
    h.dropout = mti_row_dropout(batch, training ? layer->desc.hidden_dropout : 0.0f, layer->desc.layer_number,
                                1 + index, layer->desc.sequence_parallel, layer->tp, rows, layer->desc.hidden);
    return h;
}

static mt_status mti_sublayer_block_forward(mt_context *ctx, const mti_sublayer *h, mt_tensor x, mt_tensor y,
                                            mt_transformer_layer_saved *saved) {
    if (h->index == 0 && h->cache)
        return mt_self_attention_cached_forward(ctx, &h->layer->attention, h->batch, h->cache, x, y);
    if (h->index == 0)
        return mt_self_attention_forward(ctx, &h->layer->attention, h->batch, x, y, saved ? &saved->attention : NULL);
    return mt_mlp_forward(ctx, &h->layer->mlp, x, y, saved ? &saved->mlp : NULL);
}

static mt_status mti_sublayer_block_backward(mt_context *ctx, const mti_sublayer *h, mt_tensor dy, mt_tensor dx,
                                             const mt_transformer_layer_saved *saved) {
    if (h->index == 0) return mt_self_attention_backward(ctx, &h->layer->attention, dy, dx, &saved->attention);
    return mt_mlp_backward(ctx, &h->layer->mlp, dy, dx, &saved->mlp);
}

/* y = residual + dropout(block(x) + bias). The block writes its output to y, so no other buffer is needed. When y is
   mt_none(), which is so only for the MLP, computes only the tensors that the MLP saves. */
static mt_status mti_sublayer_add(mt_context *ctx, const mti_sublayer *h, mt_tensor x, mt_tensor residual, mt_tensor y,
                                  mt_transformer_layer_saved *saved) {
    if (!y.data) return mti_mlp_forward(ctx, &h->layer->mlp, x, y, &saved->mlp, 1);
    MT_TRY(mti_sublayer_block_forward(ctx, h, x, y, saved));
    MT_TRY(mt_bias_dropout_add_forward(ctx, y, mti_bias_value(h->bias), residual, h->dropout, y));
    if (!saved) return MT_SUCCESS;
    return mt_hash_log_activation(ctx, h->layer->mlp.fc1.name, 2,
                                  h->index == 0 ? "self_attn_bda.output" : "mlp_bda.output", y,
                                  h->layer->desc.sequence_parallel, NULL);
}

/* Runs the norm, the block and the residual in the order of the placement (see mt_ln_placement). */
static mt_status mti_sublayer_forward(mt_context *ctx, const mti_sublayer *h, mt_tensor x, mt_tensor y,
                                      mt_transformer_layer_saved *saved) {
    mt_norm_saved *norm = !saved ? NULL : h->index == 0 ? &saved->input_norm : &saved->mlp_norm;
    mt_tensor inner;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &inner));
    if (h->layer->desc.placement == MT_POST_LN) {
        MT_TRY(mti_sublayer_add(ctx, h, x, x, inner, saved));
        return mt_norm_layer_forward(ctx, h->norm, inner, y, norm);
    }
    MT_TRY(mt_norm_layer_forward(ctx, h->norm, x, inner, norm));
    return mti_sublayer_add(ctx, h, inner, h->layer->desc.placement == MT_PRE_LN ? x : inner, y, saved);
}

/* The argument of mti_drop_rows. */
typedef struct mti_drop_call {
    mt_dropout dropout;
    mt_tensor dy, dblock;
} mti_drop_call;

/* An operator for mt_sum_over_tokens: backward of dropout(block + bias) for some rows. Adds to dbias and, when p is not
   0, writes dblock. */
static mt_status mti_drop_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dbias,
                               mt_tensor none) {
    const mti_drop_call *c = (const mti_drop_call *)arg;
    mt_dropout dropout = c->dropout;
    (void)none;
    if (dropout.p <= 0.0f) return mt_bias_backward(ctx, mt_tensor_rows(c->dy, first, count), dbias);
    dropout.at.first_row += first;
    return mt_bias_dropout_add_backward(ctx, mt_tensor_rows(c->dy, first, count), dropout,
                                        mt_tensor_rows(c->dblock, first, count), dbias);
}

/* Backward of dropout(block + bias): *dblock becomes the gradient of the block's output, which is dy itself without
   dropout. Adds to the gradient of the bias. */
static mt_status mti_sublayer_drop_backward(mt_context *ctx, const mti_sublayer *h, mt_tensor dy, mt_tensor *dblock) {
    mti_drop_call call;
    call.dropout = h->dropout;
    call.dy = call.dblock = dy;
    if (h->dropout.p > 0.0f) MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &call.dblock));
    *dblock = call.dblock;
    if (h->bias)
        return mt_sum_over_tokens(ctx, h->layer->tp, h->layer->desc.sequence_parallel, mti_drop_rows, &call, dy.rows,
                                  h->bias->grad, mt_none());
    return h->dropout.p > 0.0f ? mt_bias_dropout_add_backward(ctx, dy, h->dropout, call.dblock, mt_none()) : MT_SUCCESS;
}

static mt_status mti_sublayer_backward(mt_context *ctx, const mti_sublayer *h, mt_tensor dy, mt_tensor dx,
                                       const mt_transformer_layer_saved *saved) {
    const mt_norm_saved *norm = h->index == 0 ? &saved->input_norm : &saved->mlp_norm;
    mt_tensor dinner, dblock;
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &dinner));
    if (h->layer->desc.placement == MT_POST_LN) {
        MT_TRY(mt_norm_layer_backward(ctx, h->norm, dy, mt_none(), dinner, norm));
        MT_TRY(mti_sublayer_drop_backward(ctx, h, dinner, &dblock));
        MT_TRY(mti_sublayer_block_backward(ctx, h, dblock, dx, saved));
        return mt_add(ctx, dx, dinner, dx);
    }
    MT_TRY(mti_sublayer_drop_backward(ctx, h, dy, &dblock));
    MT_TRY(mti_sublayer_block_backward(ctx, h, dblock, dinner, saved));
    if (h->layer->desc.placement == MT_PRE_LN) return mt_norm_layer_backward(ctx, h->norm, dinner, dy, dx, norm);
    MT_TRY(mt_add(ctx, dinner, dy, dinner));
    return mt_norm_layer_backward(ctx, h->norm, dinner, mt_none(), dx, norm);
}

static mt_status mti_layer_check(mt_context *ctx, const char *function, const mt_transformer_layer *layer,
                                 const mt_batch *batch, const char *in_name, mt_tensor in, const char *out_name,
                                 mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: layer is NULL", function);
    MT_TRY(mti_block_check(ctx, function, &layer->attention, batch, in_name, in, out_name, out));
    return mt_check_sent(ctx, function, layer->tp, layer->desc.sequence_parallel, in_name, in, out_name, out);
}

/* When y is mt_none(), computes only the tensors of *saved. With MT_POST_LN y must not be mt_none(). cache may be
   NULL. */
static mt_status mti_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                                   const mt_kv_cache *cache, mt_tensor x, mt_tensor y,
                                   mt_transformer_layer_saved *saved) {
    mti_sublayer first = mti_sublayer_of(layer, batch, 0, x.rows, saved != NULL);
    mti_sublayer second = mti_sublayer_of(layer, batch, 1, x.rows, saved != NULL);
    mt_tensor middle;
    first.cache = cache;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &middle));
    MT_TRY(mti_sublayer_forward(ctx, &first, x, middle, saved));
    return mti_sublayer_forward(ctx, &second, middle, y, saved);
}

MT_API mt_status mt_transformer_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                                              mt_tensor x, mt_tensor y, mt_transformer_layer_saved *saved) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_layer_check(ctx, "mt_transformer_layer_forward", layer, batch, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, "mt_transformer_layer_forward", "x", x, "y", y));
    if (saved) MT_TRY(mt_check_tokens(ctx, "mt_transformer_layer_forward", batch->sequences * batch->seq));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("layer forward", mti_layer_forward(ctx, layer, batch, NULL, x, y, saved));
    if (saved) saved->x = x;
    if (status != MT_SUCCESS || !saved || layer->desc.recompute == MT_RECOMPUTE_FULL) mt_arena_release(ctx, mark);
    return status;
}

/* As mti_attention_whole_tokens, for a layer. */
static void mti_layer_whole_tokens(mt_transformer_layer *layer) {
    mti_attention_whole_tokens(&layer->attention);
    layer->desc.sequence_parallel = layer->mlp.desc.sequence_parallel = 0;
    layer->mlp.fc1.desc.sequence_parallel = layer->mlp.fc2.desc.sequence_parallel = 0;
}

MT_API mt_status mt_transformer_layer_cached_forward(mt_context *ctx, const mt_transformer_layer *layer,
                                                     const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                     mt_tensor y) {
    static const char *const function = "mt_transformer_layer_cached_forward";
    mt_transformer_layer l;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: layer is NULL", function);
    l = *layer;
    mti_layer_whole_tokens(&l);
    MT_TRY(mti_layer_check(ctx, function, &l, batch, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    MT_TRY(mti_cache_check(ctx, function, &l.attention, batch, cache));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("layer forward", mti_layer_forward(ctx, &l, batch, cache, x, y, NULL));
    mt_arena_release(ctx, mark);
    return status;
}

/* Runs forward again, and so computes all tensors of *saved from saved->x and saved->attention.batch. The hash log is
   paused, because it has these tensors from the first forward. */
static mt_status mti_layer_again(mt_context *ctx, const mt_transformer_layer *layer,
                                 mt_transformer_layer_saved *saved) {
    mt_batch batch = saved->attention.batch;
    mt_tensor x = saved->x, y = mt_none();
    mt_status status;
    if (layer->desc.placement == MT_POST_LN) MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &y));
    mt_hash_log_pause(ctx, 1);
    mt_trace_recompute(ctx, 1);
    status = mti_layer_forward(ctx, layer, &batch, NULL, x, y, saved);
    mt_trace_recompute(ctx, 0);
    mt_hash_log_pause(ctx, 0);
    return status;
}

static mt_status mti_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy, mt_tensor dx,
                                    const mt_transformer_layer_saved *saved) {
    mt_transformer_layer_saved again = *saved;
    mti_sublayer first = mti_sublayer_of(layer, &saved->attention.batch, 0, dy.rows, 1);
    mti_sublayer second = mti_sublayer_of(layer, &saved->attention.batch, 1, dy.rows, 1);
    mt_tensor dmiddle;
    size_t mark;
    if (layer->desc.recompute == MT_RECOMPUTE_FULL) {
        MT_TRY(MT_RANGE("layer forward again", mti_layer_again(ctx, layer, &again)));
        saved = &again;
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &dmiddle));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_sublayer_backward(ctx, &second, dy, dmiddle, saved));
    mt_arena_release(ctx, mark);
    return mti_sublayer_backward(ctx, &first, dmiddle, dx, saved);
}

MT_API mt_status mt_transformer_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy,
                                               mt_tensor dx, const mt_transformer_layer_saved *saved) {
    static const char *const function = "mt_transformer_layer_backward";
    const mt_param *weight;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_layer_check(ctx, function, layer, &saved->attention.batch, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, "dx", dx));
    weight = layer->attention.proj.weight;
    MT_TRY(mt_check_activation(ctx, function, weight, "saved.x", saved->x, dy.rows, dy.cols));
    MT_TRY(mt_check_apart(ctx, function, "saved.x", saved->x, "dx", dx));
    MT_TRY(mt_check_gradient(ctx, function, weight));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("layer backward", mti_layer_backward(ctx, layer, dy, dx, saved));
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>model ----------------------------------------------------------------------------------------------------- */

#define MTI_LAYERS_MAX (1 << 17)

static mt_status mti_model_sizes_check(mt_context *ctx, const char *function, const mt_language_model_desc *d) {
    MT_TRY(mt_check_integer(ctx, function, NULL, "vocab", d->vocab, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "layers", d->layers, 1, MTI_LAYERS_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "max_seq", d->max_seq, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "token_types", d->token_types, 0, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "recompute_layers", d->recompute_layers, 0, d->layers));
    MT_TRY(mt_check_float(ctx, function, NULL, "embedding_dropout", d->embedding_dropout, MT_FLOAT_PROBABILITY));
    if (!d->padded_vocab) return MT_SUCCESS;
    return mt_check_integer(ctx, function, NULL, "padded_vocab", d->padded_vocab, d->vocab, INT32_MAX);
}

static mt_status mti_model_check(mt_context *ctx, const char *function, const mt_grid *grid,
                                 const mt_language_model_desc *d) {
    MT_TRY(mti_model_sizes_check(ctx, function, d));
    if (d->layer.max_seq && d->layer.max_seq != d->max_seq)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: layer.max_seq is %lld, must be 0 or max_seq %lld", function,
                       (long long)d->layer.max_seq, (long long)d->max_seq);
    if (d->layer.layer_number)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: layer.layer_number is %lld, must be 0: the model numbers its layers",
                       function, (long long)d->layer.layer_number);
    if (d->recompute_layers && d->layer.recompute == MT_RECOMPUTE_NONE)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: recompute_layers is %lld, must be 0 with MT_RECOMPUTE_NONE", function,
                       (long long)d->recompute_layers);
    if (d->layers % grid->pp_size != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld layers cannot be divided over %d pipeline stages", function,
                       (long long)d->layers, grid->pp_size);
    if (grid->pp_size > 1 && mt_context_arena_symmetric(ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %d pipeline stages do not use their arenas alike, as "
                       "mt_context_desc.arena_symmetric promises",
                       function, grid->pp_size);
    return MT_SUCCESS;
}

static int mti_model_is_first(const mt_language_model *m) { return m->grid->pp_rank == 0; }
static int mti_model_is_last(const mt_language_model *m) { return m->grid->pp_rank + 1 == m->grid->pp_size; }

/* Adds a table that every tensor rank has whole: of positions, or of token types. */
static mt_status mti_model_table(mt_context *ctx, mt_params *params, const mt_language_model *m, const char *name,
                                 int64_t rows, mt_param **out) {
    const mt_transformer_layer_desc *l = &m->desc.layer;
    mt_param_desc p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.rows = rows;
    p.cols = l->hidden;
    p.init_std = mt_or_default(l->init_std, 0.02f);
    p.weight_decay = 1;
    p.sequence_partial = l->sequence_parallel;
    return mt_params_add(ctx, params, &p, out);
}

/* Creates the token embedding, which is on the first stage and, for a tied head, also on the last one, and what is
   added to it on the first stage. */
static mt_status mti_model_embedding(mt_context *ctx, mt_params *params, mt_language_model *m) {
    const mt_language_model_desc *d = &m->desc;
    mt_embedding_desc e;
    if (!mti_model_is_first(m) && (!mti_model_is_last(m) || !d->tied_head)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.vocab = d->vocab;
    e.padded_vocab = d->padded_vocab;
    e.features = d->layer.hidden;
    e.init_std = d->layer.init_std;
    e.sequence_parallel = d->layer.sequence_parallel;
    e.shared = d->tied_head;
    MT_TRY(mt_vocab_parallel_embedding_create(ctx, params, "embedding.word_embeddings", &e, &m->tokens));
    if (!mti_model_is_first(m)) return MT_SUCCESS;
    if (d->layer.rotary_base <= 0.0f && !d->layer.alibi)
        MT_TRY(mti_model_table(ctx, params, m, "embedding.position_embeddings.weight", d->max_seq, &m->positions));
    if (d->token_types)
        MT_TRY(
            mti_model_table(ctx, params, m, "embedding.tokentype_embeddings.weight", d->token_types, &m->token_types));
    if (!d->embedding_norm) return MT_SUCCESS;
    return mti_layer_norm(ctx, params, "embedding", "layernorm", &d->layer, &m->embedding_norm);
}

/* Creates the layers of this stage. While it does, m->desc.layer is the desc of the current layer. */
static mt_status mti_model_layers(mt_context *ctx, mt_params *params, mt_language_model *m) {
    int64_t recomputed = m->desc.recompute_layers ? m->desc.recompute_layers : m->local_layers, i;
    mt_recompute recompute = m->desc.layer.recompute;
    char name[MT_NAME_MAX];
    void *memory;
    MT_TRY(mt_params_buffer(ctx, params, (size_t)m->local_layers * sizeof *m->layers, 1, &memory));
    m->layers = (mt_transformer_layer *)memory;
    for (i = 0; i < m->local_layers; i++) {
        m->desc.layer.layer_number = m->first_layer + i;
        m->desc.layer.recompute = i < recomputed ? recompute : MT_RECOMPUTE_NONE;
        snprintf(name, sizeof name, "%s.layers.%lld", m->desc.is_encoder ? "encoder" : "decoder",
                 (long long)(m->first_layer + i));
        MT_TRY(mt_transformer_layer_create(ctx, params, name, &m->desc.layer, &m->layers[i]));
    }
    m->desc.layer.recompute = recompute;
    m->desc.layer.layer_number = 0;
    return MT_SUCCESS;
}

/* Creates the parts of a model whose desc mti_model_check has accepted. */
static mt_status mti_model_create(mt_context *ctx, mt_params *params, const mt_language_model_desc *desc,
                                  mt_language_model *m) {
    mt_transformer_layer_desc *l = &m->desc.layer;
    m->desc = *desc;
    m->grid = mt_params_grid(params);
    m->local_layers = desc->layers / m->grid->pp_size;
    m->first_layer = m->grid->pp_rank * m->local_layers;
    l->max_seq = l->rotary_base > 0.0f ? desc->max_seq : 0;
    if (l->output_init_std == 0.0f)
        l->output_init_std = mt_or_default(l->init_std, 0.02f) / sqrtf(2.0f * (float)desc->layers);
    if (l->init_std == (float)MT_ZERO && l->output_init_std == 0.0f) l->output_init_std = (float)MT_ZERO;
    MT_TRY(mti_model_embedding(ctx, params, m));
    MT_TRY(mti_model_layers(ctx, params, m));
    if (!mti_model_is_last(m) || l->placement == MT_POST_LN) return MT_SUCCESS;
    return mti_layer_norm(ctx, params, desc->is_encoder ? "encoder" : "decoder", "final_layernorm", l, &m->final_norm);
}

MT_API mt_status mt_language_model_create(mt_context *ctx, mt_params *params, const mt_language_model_desc *desc,
                                          mt_language_model *out) {
    static const char *const function = "mt_language_model_create";
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mti_model_check(ctx, function, mt_params_grid(params), desc));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    return mt_create_end(params, mark, out, sizeof *out, mti_model_create(ctx, params, desc, out));
}

static mt_status mti_model_saved_create(mt_context *ctx, const char *function, const mt_language_model *model,
                                        mt_language_model_saved *out) {
    void *memory;
    if (out) memset(out, 0, sizeof *out);
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!model || !model->layers || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, out ? "the model was not created" : "out is NULL");
    memory = mt_host_alloc((size_t)model->local_layers * sizeof *out->layers);
    if (!memory) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for %lld layers", (long long)model->local_layers);
    out->layers = (mt_transformer_layer_saved *)memory;
    return MT_SUCCESS;
}

MT_API mt_status mt_language_model_saved_create(mt_context *ctx, const mt_language_model *model,
                                                mt_language_model_saved *out) {
    return mti_model_saved_create(ctx, "mt_language_model_saved_create", model, out);
}

MT_API void mt_language_model_saved_destroy(mt_language_model_saved *saved) {
    if (!saved) return;
    mt_host_free(saved->layers);
    memset(saved, 0, sizeof *saved);
}

static mt_dropout mti_model_dropout(const mt_language_model *m, const mt_batch *batch, int64_t rows, int training) {
    return mti_row_dropout(batch, training ? m->desc.embedding_dropout : 0.0f, m->desc.layers, 3,
                           m->desc.layer.sequence_parallel, m->grid->tp, rows, m->desc.layer.hidden);
}

/* *out becomes an array with the row of the table for each of this rank's rows: the position of the token in its
   sequence, or its type. The array is in the arena, or a part of batch->token_types. */
static mt_status mti_model_table_ids(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                     const mt_param *table, int64_t rows, const int32_t **out) {
    int64_t first = m->desc.layer.sequence_parallel ? m->grid->tp_rank * rows : 0;
    int types = table == m->token_types;
    mt_tensor ids = mt_none();
    if (types && batch->token_types) {
        *out = batch->token_types + first;
        return MT_SUCCESS;
    }
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, rows, &ids));
    *out = (const int32_t *)ids.data;
    /* sequences of 1 token: all types are 0 */
    if (types) return mt_position_ids(ctx, 0, 1, NULL, 0, (int32_t *)ids.data, rows);
    return mt_position_ids(ctx, first, batch->seq, batch->cu_seqlens, batch->documents, (int32_t *)ids.data, rows);
}

/* Tells check mode what the ids of calls are, until mti_ids_end, where it does not know: the same on the tensor ranks
   or, with is_split 1, those of this rank's rows, and others on the data ranks. */
static mt_status mti_ids_begin(mt_context *ctx, const mt_grid *grid, const int32_t *ids, int64_t rows, int is_split) {
    mt_tensor t = mt_tensor_make(ids, MT_I32, rows, 1);
    mt_placement tp = mt_placement_of(ctx, grid->tp, t), dp = mt_placement_of(ctx, grid->dp, t);
    if (tp == MT_UNDECLARED || tp == MT_REPLICATED) tp = is_split ? MT_SPLIT_ROWS : MT_REPLICATED;
    if (dp == MT_UNDECLARED) dp = MT_SPLIT_ROWS;
    MT_TRY(mt_check_view(ctx, grid->tp, t, tp));
    return mt_check_view(ctx, grid->dp, t, dp);
}

static mt_status mti_ids_end(mt_context *ctx, mt_status status) {
    return mt_check_view_end(ctx, mt_check_view_end(ctx, status));
}

/* Adds the rows of a table to x. Does nothing when the model does not have the table. */
static mt_status mti_model_add_table(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                     const mt_param *table, mt_tensor x) {
    size_t mark = mt_arena_mark(ctx);
    const int32_t *ids;
    if (!table) return MT_SUCCESS;
    MT_TRY(mti_model_table_ids(ctx, m, batch, table, x.rows, &ids));
    MT_TRY(mti_ids_begin(ctx, m->grid, ids, x.rows, m->desc.layer.sequence_parallel));
    MT_TRY(mti_ids_end(ctx, mt_embedding_forward(ctx, table->value, 0, ids, 1.0f, x)));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_model_embed_tokens(mt_context *ctx, const mt_language_model *m, const int32_t *ids, int64_t tokens,
                                        mt_tensor x) {
    MT_TRY(mti_ids_begin(ctx, m->grid, ids, tokens, 0));
    return mti_ids_end(ctx, mt_vocab_parallel_embedding_forward(ctx, &m->tokens, ids, tokens, x));
}

/* Computes the sum of the embeddings of tokens, positions and token types. */
static mt_status mti_model_embed_sum(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                     const int32_t *ids, mt_tensor x) {
    MT_TRY(mti_model_embed_tokens(ctx, m, ids, batch->sequences * batch->seq, x));
    MT_TRY(mti_model_add_table(ctx, m, batch, m->positions, x));
    return mti_model_add_table(ctx, m, batch, m->token_types, x);
}

/* Computes x, the sum of the embeddings with norm and dropout. */
static mt_status mti_model_embed(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, const int32_t *ids,
                                 mt_tensor x, mt_language_model_saved *saved) {
    mt_dropout dropout = mti_model_dropout(m, batch, x.rows, saved != NULL);
    if (m->embedding_norm.weight) {
        size_t mark = mt_arena_mark(ctx);
        mt_tensor sum;
        MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &sum));
        MT_TRY(mti_model_embed_sum(ctx, m, batch, ids, sum));
        MT_TRY(mt_norm_layer_forward(ctx, &m->embedding_norm, sum, x, saved ? &saved->embedding_norm : NULL));
        if (!saved) mt_arena_release(ctx, mark);
    } else {
        MT_TRY(mti_model_embed_sum(ctx, m, batch, ids, x));
    }
    if (dropout.p > 0.0f) MT_TRY(mt_bias_dropout_add_forward(ctx, x, mt_none(), mt_none(), dropout, x));
    return saved ? mt_hash_log_activation(ctx, "embedding", 0, "output", x, m->desc.layer.sequence_parallel, NULL)
                 : MT_SUCCESS;
}

/* *out becomes memory for the next activation or gradient [rows, hidden]: `spare`, a tensor that is no longer needed,
   or new memory in the arena when spare is mt_none(). */
static mt_status mti_model_room(mt_context *ctx, const mt_language_model *m, mt_tensor spare, int64_t rows,
                                mt_tensor *out) {
    *out = spare;
    if (spare.data) return MT_SUCCESS;
    return mt_arena_tensor(ctx, m->layers[0].attention.proj.weight->value.dtype, rows, m->desc.layer.hidden, out);
}

/* Computes x, the sum of the embeddings of tokens and of positions that follow those in the cache. */
static mt_status mti_model_embed_cached(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                        const int32_t *ids, const mt_gpt_cache *cache, mt_tensor x) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor positions;
    MT_TRY(mti_model_embed_tokens(ctx, m, ids, x.rows, x));
    if (!m->positions) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, x.rows, &positions));
    MT_TRY(mt_kv_cache_positions(ctx, &cache->layers[0], batch->sequences, batch->seq, (int32_t *)positions.data));
    MT_TRY(mti_ids_begin(ctx, m->grid, (const int32_t *)positions.data, x.rows, 0));
    MT_TRY(
        mti_ids_end(ctx, mt_embedding_forward(ctx, m->positions->value, 0, (const int32_t *)positions.data, 1.0f, x)));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Returns the number of this rank's rows of a batch that mti_model_call_check has accepted. */
static int64_t mti_model_rows(const mt_language_model *m, const mt_batch *batch) {
    return batch->sequences * batch->seq / (m->desc.layer.sequence_parallel ? m->grid->tp_size : 1);
}

/* Returns what the activations of a model are over the tensor group. */
static mt_placement mti_model_placement(const mt_language_model *m) {
    return m->desc.layer.sequence_parallel ? MT_SPLIT_ROWS : MT_REPLICATED;
}

/* Runs this stage: the embedding (on the first stage; the others begin with `input`), the layers and the final norm. *y
   [rows, hidden] is the result: `output` or, when output is mt_none(), a tensor in the arena. Inference alternates
   between two tensors for the activations; training keeps all of them. cache is for inference with a GPT, or NULL. */
static mt_status mti_model_forward(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                   const int32_t *ids, const mt_gpt_cache *cache, mt_tensor input, mt_tensor output,
                                   mt_language_model_saved *saved, mt_tensor *y) {
    int64_t rows = mti_model_rows(m, batch), i;
    mt_tensor x = input, next, spare = mt_none(), last = m->final_norm.weight ? mt_none() : output;
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
    if (input.data) MT_TRY(mt_declare_received(ctx, m->grid, input, mti_model_placement(m), MT_SPLIT_ROWS));
    else {
        MT_TRY(mti_model_room(ctx, m, spare, rows, &x));
        MT_TRY(MT_RANGE("embedding forward", cache ? mti_model_embed_cached(ctx, m, batch, ids, cache, x)
                                                   : mti_model_embed(ctx, m, batch, ids, x, saved)));
    }
    for (i = 0; i < m->local_layers; i++) {
        MT_TRY(mti_model_room(ctx, m, i + 1 == m->local_layers && last.data ? last : spare, rows, &next));
        if (cache) MT_TRY(mt_transformer_layer_cached_forward(ctx, &m->layers[i], batch, &cache->layers[i], x, next));
        else MT_TRY(mt_transformer_layer_forward(ctx, &m->layers[i], batch, x, next, saved ? &saved->layers[i] : NULL));
        if (!saved && x.data != input.data) spare = x;
        x = next;
    }
    *y = x;
    if (!m->final_norm.weight) return MT_SUCCESS;
    MT_TRY(mti_model_room(ctx, m, output.data ? output : spare, rows, y));
    return mt_norm_layer_forward(ctx, &m->final_norm, x, *y, saved ? &saved->final_norm : NULL);
}

/* Checks the model and the batch. */
static mt_status mti_model_call_check(mt_context *ctx, const char *function, const mt_language_model *m,
                                      const mt_batch *batch) {
    int64_t rows;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!m || !m->layers) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the model was not created", function);
    MT_TRY(mt_check_param(ctx, function, m->layers[0].attention.proj.weight));
    if (m->positions) MT_TRY(mt_check_param(ctx, function, m->positions));
    if (m->token_types) MT_TRY(mt_check_param(ctx, function, m->token_types));
    MT_TRY(mti_batch_check(ctx, function, "batch", batch, m->desc.max_seq));
    MT_TRY(mti_batch_scores_check(ctx, function, &m->layers[0].attention, batch));
    if (batch->token_types && !m->desc.token_types)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the batch has token_types, and the model has none", function);
    return mt_sequence_rows(ctx, function, m->grid->tp, m->desc.layer.sequence_parallel, batch->sequences * batch->seq,
                            &rows);
}

/* Checks the tensor t at the start (input, dinput) or at the end (output, doutput) of this stage. t must be mt_none()
   when `none` is 1, and otherwise [rows, hidden]. */
static mt_status mti_model_boundary(mt_context *ctx, const char *function, const mt_language_model *m,
                                    const mt_batch *batch, int none, const char *name, mt_tensor t) {
    if (none != !t.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: stage %d of %d %s %s; functions with \"stage\" in their names are for pipelines", function,
                       m->grid->pp_rank, m->grid->pp_size, none ? "takes no" : "needs", name);
    if (none) return MT_SUCCESS;
    return mt_check_activation(ctx, function, m->layers[0].attention.proj.weight, name, t, mti_model_rows(m, batch),
                               m->desc.layer.hidden);
}

/* Checks what the forward of a model reads. output_none says whether output must be mt_none(). */
static mt_status mti_model_forward_check(mt_context *ctx, const char *function, const mt_language_model *m,
                                         const mt_batch *batch, const int32_t *ids, mt_tensor input, mt_tensor output,
                                         int output_none, const mt_language_model_saved *saved) {
    int64_t tokens;
    MT_TRY(mti_model_call_check(ctx, function, m, batch));
    MT_TRY(mt_check_float(ctx, function, NULL, "backward_scale", batch->backward_scale, MT_FLOAT_FINITE));
    tokens = batch->sequences * batch->seq;
    if (saved) MT_TRY(mt_check_tokens(ctx, function, tokens));
    MT_TRY(mti_model_boundary(ctx, function, m, batch, mti_model_is_first(m), "input", input));
    MT_TRY(mti_model_boundary(ctx, function, m, batch, output_none, "output", output));
    if (batch->token_types) MT_TRY(mt_ids_check(ctx, "token type", batch->token_types, tokens, m->desc.token_types, 0));
    return mt_ids_check(ctx, "token id", ids, tokens, m->desc.vocab, 0);
}

/* Checks that saved, which may be NULL, comes from the function `creator`. */
static mt_status mti_model_saved_check(mt_context *ctx, const char *function, const char *creator,
                                       const mt_language_model_saved *saved) {
    if (!saved || saved->layers) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved was not created with %s", function, creator);
}

/* Begins a forward whose arguments were checked, ids included. */
static mt_status mti_model_begin_forward(mt_context *ctx, mt_language_model_saved *saved, size_t *mark) {
    *mark = mt_arena_mark(ctx);
    if (saved) saved->ids = NULL;
    return mt_layers_trust_ids(ctx, 1);
}

/* Ends a forward. Releases the arena after an error and in inference; otherwise notes what backward needs. */
static mt_status mti_model_end_forward(mt_context *ctx, size_t mark, mt_status status, const mt_batch *batch,
                                       const int32_t *ids, mt_language_model_saved *saved) {
    mt_layers_trust_ids(ctx, 0);
    if (status != MT_SUCCESS || !saved) {
        mt_arena_release(ctx, mark);
        return status;
    }
    saved->batch = *batch;
    saved->ids = ids;
    return MT_SUCCESS;
}

MT_API mt_status mt_language_model_forward(mt_context *ctx, const mt_language_model *model, const mt_batch *batch,
                                           const int32_t *ids, mt_tensor input, mt_tensor output,
                                           mt_language_model_saved *saved) {
    static const char *const function = "mt_language_model_forward";
    mt_tensor y;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_forward_check(ctx, function, model, batch, ids, input, output, 0, saved));
    MT_TRY(mti_model_saved_check(ctx, function, "mt_language_model_saved_create", saved));
    MT_TRY(mt_check_sent(ctx, function, model->grid->tp, model->desc.layer.sequence_parallel, "input", input, "output",
                         output));
    MT_TRY(mt_check_apart(ctx, function, "input", input, "output", output));
    MT_TRY(mti_model_begin_forward(ctx, saved, &mark));
    status = mti_model_forward(ctx, model, batch, ids, NULL, input, output, saved, &y);
    return mti_model_end_forward(ctx, mark, status, batch, ids, saved);
}

/* The argument of mti_table_rows. */
typedef struct mti_table_call {
    mt_tensor dx;
    const int32_t *ids; /* of the rows of dx */
} mti_table_call;

/* An operator for mt_sum_over_tokens: adds the gradient of a table for some rows of dx. */
static mt_status mti_table_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dtable,
                                mt_tensor none) {
    const mti_table_call *c = (const mti_table_call *)arg;
    (void)none;
    return mt_embedding_backward(ctx, mt_tensor_rows(c->dx, first, count), 0, c->ids + first, dtable);
}

/* Adds to the gradient of the first `used` rows of a table; the others are not in the batch. Does nothing when the
   model does not have the table. */
static mt_status mti_model_table_backward(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                          const mt_param *table, int64_t used, mt_tensor dx) {
    mti_table_call call;
    if (!table) return MT_SUCCESS;
    MT_TRY(mti_model_table_ids(ctx, m, batch, table, dx.rows, &call.ids));
    call.dx = dx;
    MT_TRY(mti_ids_begin(ctx, m->grid, call.ids, dx.rows, m->desc.layer.sequence_parallel));
    return mti_ids_end(ctx, mt_sum_over_tokens(ctx, m->grid->tp, m->desc.layer.sequence_parallel, mti_table_rows, &call,
                                               dx.rows, mt_tensor_rows(table->grad, 0, used), mt_none()));
}

/* dx is the gradient of the embedding's output. The call overwrites it. */
static mt_status mti_model_embed_backward(mt_context *ctx, const mt_language_model *m,
                                          const mt_language_model_saved *saved, mt_tensor dx) {
    const mt_batch *batch = &saved->batch;
    const int64_t tokens = batch->sequences * batch->seq;
    mt_dropout dropout = mti_model_dropout(m, batch, dx.rows, 1);
    if (dropout.p > 0.0f) MT_TRY(mt_bias_dropout_add_backward(ctx, dx, dropout, dx, mt_none()));
    if (m->embedding_norm.weight)
        MT_TRY(mt_norm_layer_backward(ctx, &m->embedding_norm, dx, mt_none(), dx, &saved->embedding_norm));
    MT_TRY(mti_model_table_backward(ctx, m, batch, m->positions, batch->seq, dx));
    MT_TRY(mti_model_table_backward(ctx, m, batch, m->token_types, m->desc.token_types, dx));
    MT_TRY(mti_ids_begin(ctx, m->grid, saved->ids, tokens, 0));
    return mti_ids_end(ctx, mt_vocab_parallel_embedding_backward(ctx, &m->tokens, saved->ids, tokens, dx));
}

/* Returns the last parameter of a layer that may have no bias. */
static const mt_param *mti_last_of(const mt_param *weight, const mt_param *bias) { return bias ? bias : weight; }

/* Computes *dy, the gradient of the last layer's output. The final norm may overwrite doutput when `scratch` is 1. */
static mt_status mti_model_norm_backward(mt_context *ctx, const mt_language_model *m, mt_tensor doutput, int scratch,
                                         const mt_language_model_saved *saved, mt_tensor *dy) {
    const mt_norm_layer *norm = &m->final_norm;
    *dy = doutput;
    if (!norm->weight) return MT_SUCCESS;
    if (!scratch) MT_TRY(mti_model_room(ctx, m, mt_none(), doutput.rows, dy));
    MT_TRY(mt_norm_layer_backward(ctx, norm, doutput, mt_none(), *dy, &saved->final_norm));
    return mt_gradients_final(ctx, norm->weight, mti_last_of(norm->weight, norm->bias));
}

/* Runs the backward of this stage. The gradients of a layer are final after its backward. Those of the embeddings are
   never declared final here: mt_sync_gradients sums them. When scratch is 1, doutput is overwritten. */
static mt_status mti_model_backward(mt_context *ctx, const mt_language_model *m, mt_tensor doutput, int scratch,
                                    mt_tensor dinput, const mt_language_model_saved *saved) {
    mt_tensor dy, next, spare = mt_none();
    int64_t i;
    mt_hash_log_tokens(ctx, saved->batch.first_sequence * saved->batch.seq);
    if (!mti_model_is_last(m))
        MT_TRY(mt_declare_received(ctx, m->grid, doutput, mti_model_placement(m), MT_SPLIT_ROWS));
    MT_TRY(mti_model_norm_backward(ctx, m, doutput, scratch, saved, &dy));
    for (i = m->local_layers; i-- > 0;) {
        const mt_transformer_layer *layer = &m->layers[i];
        MT_TRY(mti_model_room(ctx, m, i == 0 && dinput.data ? dinput : spare, dy.rows, &next));
        MT_TRY(mt_transformer_layer_backward(ctx, layer, dy, next, &saved->layers[i]));
        MT_TRY(
            mt_gradients_final(ctx, layer->input_norm.weight, mti_last_of(layer->mlp.fc2.weight, layer->mlp.fc2.bias)));
        if (scratch || dy.data != doutput.data) spare = dy;
        dy = next;
    }
    if (!mti_model_is_first(m)) return MT_SUCCESS;
    return MT_RANGE("embedding backward", mti_model_embed_backward(ctx, m, saved, dy));
}

/* Checks what the backward of a model reads. doutput_none says whether doutput must be mt_none(). */
static mt_status mti_model_backward_check(mt_context *ctx, const char *function, const mt_language_model *m,
                                          mt_tensor doutput, int doutput_none, mt_tensor dinput,
                                          const mt_language_model_saved *saved) {
    MT_TRY(mti_model_call_check(ctx, function, m, &saved->batch));
    MT_TRY(mti_model_boundary(ctx, function, m, &saved->batch, doutput_none, "doutput", doutput));
    MT_TRY(mti_model_boundary(ctx, function, m, &saved->batch, mti_model_is_first(m), "dinput", dinput));
    return mt_check_gradient(ctx, function, m->layers[0].attention.proj.weight);
}

MT_API mt_status mt_language_model_backward(mt_context *ctx, const mt_language_model *model, mt_tensor doutput,
                                            mt_tensor dinput, mt_language_model_saved *saved) {
    static const char *const function = "mt_language_model_backward";
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved || !saved->ids) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved holds no forward", function);
    MT_TRY(mti_model_backward_check(ctx, function, model, doutput, 0, dinput, saved));
    MT_TRY(mt_check_sent(ctx, function, model->grid->tp, model->desc.layer.sequence_parallel, "doutput", doutput,
                         "dinput", dinput));
    MT_TRY(mt_check_apart(ctx, function, "doutput", doutput, "dinput", dinput));
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_layers_trust_ids(ctx, 1));
    status = mti_model_backward(ctx, model, doutput, 0, dinput, saved);
    mt_layers_trust_ids(ctx, 0);
    mt_arena_release(ctx, mark);
    saved->ids = NULL;
    return status;
}

/* Runs the stages one after the other in inference. On the last stage *x becomes the output of the model. cache is
   for a GPT, or NULL. */
static mt_status mti_model_infer(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, const int32_t *ids,
                                 const mt_gpt_cache *cache, mt_tensor *x) {
    int stage = m->grid->pp_rank;
    mt_tensor input = mt_none(), output = mt_none();
    size_t n = (size_t)(mti_model_rows(m, batch) * m->desc.layer.hidden);
    if (!mti_model_is_first(m)) {
        MT_TRY(mti_model_room(ctx, m, input, mti_model_rows(m, batch), &input));
        MT_TRY(mt_recv(ctx, m->grid->pp, input.data, n, input.dtype, stage - 1));
    }
    if (!mti_model_is_last(m)) MT_TRY(mti_model_room(ctx, m, output, mti_model_rows(m, batch), &output));
    MT_TRY(mti_model_forward(ctx, m, batch, ids, cache, input, output, NULL, x));
    return mti_model_is_last(m) ? MT_SUCCESS : mt_send(ctx, m->grid->pp, x->data, n, x->dtype, stage + 1);
}

/* *room becomes the tensor in which the last stage computes logits: `logits` or, with several stages, a contiguous
   tensor in the arena, which mti_model_share sends. */
static mt_status mti_model_share_room(mt_context *ctx, const mt_language_model *m, mt_tensor logits, mt_tensor *room) {
    *room = logits;
    if (m->grid->pp_size == 1 || !logits.data) return MT_SUCCESS;
    return mt_arena_tensor(ctx, logits.dtype, logits.rows, logits.cols, room);
}

/* Copies the room of the last stage to the logits of every stage. */
static mt_status mti_model_share(mt_context *ctx, const mt_language_model *m, mt_tensor room, mt_tensor logits) {
    size_t n = (size_t)(room.rows * room.cols);
    if (m->grid->pp_size == 1 || !logits.data) return MT_SUCCESS;
    MT_TRY(mt_broadcast(ctx, m->grid->pp, room.data, room.data, n, room.dtype, m->grid->pp_size - 1));
    return mt_copy(ctx, room, logits);
}

/* An output head with its loss, and what its forward keeps: those of GPT, and the two of BERT. */
typedef struct mti_output {
    const mt_column_parallel_linear *head;
    const mt_cross_entropy_desc *loss;
    mt_linear_saved *head_saved; /* NULL: inference */
    mt_cross_entropy_saved *loss_saved;
    mt_tensor loss_scale;
    float forward_scale; /* not 0: forward also computes the gradient of the loss, with this scale */
} mti_output;

static mti_output mti_output_of(const mt_column_parallel_linear *head, const mt_cross_entropy_desc *loss,
                                mt_linear_saved *head_saved, mt_cross_entropy_saved *loss_saved, const mt_batch *batch,
                                float forward_scale) {
    mti_output o;
    o.head = head;
    o.loss = loss;
    o.head_saved = head_saved;
    o.loss_saved = loss_saved;
    o.loss_scale = batch->loss_scale;
    o.forward_scale = forward_scale;
    return o;
}

static mt_tensor mti_as_column(mt_tensor row) { return mt_tensor_make(row.data, row.dtype, row.cols, 1); }

/* *logits = this rank's columns of the logits, in the arena. Their rows are a multiple of 64 elements apart, whatever
   the vocabulary: cuBLASLt then reads and writes them without copies, and kernels load whole vectors. Nothing reads or
   writes the columns between the rows. */
static mt_status mti_output_room(mt_context *ctx, const mti_output *o, mt_dtype dtype, int64_t rows,
                                 mt_tensor *logits) {
    MT_TRY(mt_arena_tensor(ctx, dtype, rows, mt_round_up(o->head->local_features, 64), logits));
    *logits = mt_tensor_cols(*logits, 0, o->head->local_features);
    return MT_SUCCESS;
}

/* Returns 1 if forward also computes the gradient of the loss. */
static int mti_output_in_one_pass(const mti_output *o) { return o->head_saved && o->forward_scale != 0.0f; }

/* Computes the loss. When backward follows, o->loss_saved->logits becomes the logits, or their gradient. */
static mt_status mti_output_loss(mt_context *ctx, const mti_output *o, mt_tensor logits, const int32_t *targets,
                                 mt_tensor loss) {
    if (!mti_output_in_one_pass(o))
        return MT_RANGE("loss forward", mt_vocab_parallel_cross_entropy_forward(ctx, o->head->tp, o->loss, logits,
                                                                                targets, loss, o->loss_saved));
    memset(o->loss_saved, 0, sizeof *o->loss_saved);
    o->loss_saved->logits = logits;
    return MT_RANGE("loss forward and backward",
                    mt_vocab_parallel_cross_entropy_forward_backward(ctx, o->head->tp, o->loss, logits, targets,
                                                                     o->loss_scale, o->forward_scale, loss));
}

/* Computes the logits of x, and their loss. */
static mt_status mti_output_forward(mt_context *ctx, const mti_output *o, mt_tensor x, const int32_t *targets,
                                    mt_tensor loss) {
    mt_tensor logits;
    MT_TRY(mti_output_room(ctx, o, x.dtype, loss.cols, &logits));
    MT_TRY(MT_RANGE("head forward", mt_column_parallel_linear_forward(ctx, o->head, x, logits, o->head_saved)));
    return mti_output_loss(ctx, o, logits, targets, loss);
}

/* Computes dx, the gradient of scale * sum(loss). */
static mt_status mti_output_backward(mt_context *ctx, const mti_output *o, float scale, mt_tensor dx) {
    if (!mti_output_in_one_pass(o))
        MT_TRY(MT_RANGE("loss backward", mt_vocab_parallel_cross_entropy_backward(
                                             ctx, o->head->tp, o->loss, o->loss_scale, scale, o->loss_saved)));
    MT_TRY(mt_hash_log_activation(ctx, o->head->name, 0, "output_grad", o->loss_saved->logits, 0, o->head->weight));
    return MT_RANGE("head backward",
                    mt_column_parallel_linear_backward(ctx, o->head, o->loss_saved->logits, dx, o->head_saved));
}

/* Creates the output head of a vocabulary. With m->desc.tied_head it has the weight of the token embedding. */
static mt_status mti_output_create(mt_context *ctx, mt_params *params, const mt_language_model *m, int no_bias,
                                   int sequence_parallel, mt_column_parallel_linear *out) {
    const mt_transformer_layer_desc *l = &m->desc.layer;
    mt_linear_desc d;
    memset(&d, 0, sizeof d);
    d.in_features = l->hidden;
    d.out_features = m->desc.vocab;
    d.padded_out_features = m->desc.padded_vocab;
    d.no_bias = no_bias;
    if (m->desc.tied_head) d.weight = m->tokens.weight;
    else d.init_std = l->init_std;
    d.sequence_parallel = sequence_parallel;
    return mt_column_parallel_linear_create(ctx, params, "output_layer", &d, out);
}

/* ---- >>gpt ------------------------------------------------------------------------------------------------------- */

static mt_language_model_desc mti_gpt_model(const mt_gpt_desc *d) {
    mt_language_model_desc m;
    memset(&m, 0, sizeof m);
    m.vocab = d->vocab;
    m.layers = d->layers;
    m.max_seq = d->max_seq;
    m.layer = d->layer;
    m.tied_head = !d->untied_head;
    m.recompute_layers = d->recompute_layers;
    m.embedding_dropout = d->embedding_dropout;
    m.padded_vocab = d->padded_vocab;
    return m;
}

MT_API mt_status mt_gpt_create(mt_context *ctx, mt_params *params, const mt_gpt_desc *desc, mt_gpt *out) {
    static const char *const function = "mt_gpt_create";
    mt_language_model_desc m;
    size_t mark;
    mt_status status;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    m = mti_gpt_model(desc);
    MT_TRY(mti_model_check(ctx, function, mt_params_grid(params), &m));
    MT_TRY(mt_check_float(ctx, function, NULL, "label_smoothing", desc->label_smoothing, MT_FLOAT_PROBABILITY));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    status = mti_model_create(ctx, params, &m, &out->model);
    if (status == MT_SUCCESS && mti_model_is_last(&out->model))
        status = mti_output_create(ctx, params, &out->model, 1, desc->layer.sequence_parallel, &out->head);
    out->desc = *desc;
    out->desc.layer = out->model.desc.layer;
    out->loss.vocab = desc->vocab;
    out->loss.padded_vocab = desc->padded_vocab;
    out->loss.label_smoothing = desc->label_smoothing;
    out->loss.ignore_index = desc->ignore_index;
    return mt_create_end(params, mark, out, sizeof *out, status);
}

MT_API mt_status mt_gpt_saved_create(mt_context *ctx, const mt_gpt *gpt, mt_gpt_saved *out) {
    if (out) memset(out, 0, sizeof *out);
    return mti_model_saved_create(ctx, "mt_gpt_saved_create", gpt ? &gpt->model : NULL, out ? &out->model : NULL);
}

MT_API void mt_gpt_saved_destroy(mt_gpt_saved *saved) {
    if (!saved) return;
    mt_language_model_saved_destroy(&saved->model);
    memset(saved, 0, sizeof *saved);
}

static mti_output mti_gpt_output(const mt_gpt *gpt, const mt_batch *batch, mt_gpt_saved *saved) {
    return mti_output_of(&gpt->head, &gpt->loss, saved ? &saved->head : NULL, saved ? &saved->loss : NULL, batch,
                         batch->backward_scale);
}

/* Runs this stage and, on the last stage, the head and the loss. */
static mt_status mti_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                 const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                 mt_gpt_saved *saved) {
    mti_output out = mti_gpt_output(gpt, batch, saved);
    mt_tensor x;
    MT_TRY(mti_model_forward(ctx, &gpt->model, batch, ids, NULL, input, output, saved ? &saved->model : NULL, &x));
    if (!mti_model_is_last(&gpt->model)) return MT_SUCCESS;
    MT_TRY(mti_output_forward(ctx, &out, x, targets, loss));
    return saved ? mt_hash_log_activation(ctx, "loss", 0, "output", mti_as_column(loss), 0, NULL) : MT_SUCCESS;
}

static mt_status mti_gpt_run_forward(mt_context *ctx, const char *function, const mt_gpt *gpt, const mt_batch *batch,
                                     const int32_t *ids, const int32_t *targets, mt_tensor input, mt_tensor output,
                                     mt_tensor loss, mt_gpt_saved *saved) {
    const mt_language_model *m = gpt ? &gpt->model : NULL;
    mt_language_model_saved *kept = saved ? &saved->model : NULL;
    int64_t tokens;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_forward_check(ctx, function, m, batch, ids, input, output, m && m->grid && mti_model_is_last(m),
                                   kept));
    MT_TRY(mti_model_saved_check(ctx, function, "mt_gpt_saved_create", kept));
    tokens = batch->sequences * batch->seq;
    if (mti_model_is_last(m)) MT_TRY(mt_tensor_check(ctx, function, "loss", loss, MT_ARG_F32, 1, tokens));
    MT_TRY(mt_ids_check(ctx, "target", targets, tokens, gpt->desc.vocab, mt_ignore_index(gpt->loss.ignore_index)));
    MT_TRY(mti_model_begin_forward(ctx, kept, &mark));
    status = mti_gpt_forward(ctx, gpt, batch, ids, targets, input, output, loss, saved);
    return mti_model_end_forward(ctx, mark, status, batch, ids, kept);
}

MT_API mt_status mt_gpt_stage_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                      mt_gpt_saved *saved) {
    return mti_gpt_run_forward(ctx, "mt_gpt_stage_forward", gpt, batch, ids, targets, input, output, loss, saved);
}

MT_API mt_status mt_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                const int32_t *targets, mt_tensor loss, mt_gpt_saved *saved) {
    return mti_gpt_run_forward(ctx, "mt_gpt_forward", gpt, batch, ids, targets, mt_none(), mt_none(), loss, saved);
}

/* Runs the backward of the head, on the last stage, and of this stage. */
static mt_status mti_gpt_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_tensor doutput, mt_tensor dinput,
                                  mt_gpt_saved *saved) {
    mti_output out = mti_gpt_output(gpt, &saved->model.batch, saved);
    int last = mti_model_is_last(&gpt->model);
    mt_tensor dy = doutput;
    mt_hash_log_tokens(ctx, saved->model.batch.first_sequence * saved->model.batch.seq);
    if (last) {
        MT_TRY(mti_model_room(ctx, &gpt->model, mt_none(), saved->head.x.rows, &dy));
        MT_TRY(mti_output_backward(ctx, &out, scale, dy));
        if (gpt->desc.untied_head) MT_TRY(mt_gradients_final(ctx, gpt->head.weight, gpt->head.weight));
    }
    return mti_model_backward(ctx, &gpt->model, dy, last, dinput, &saved->model);
}

/* Checks, before a backward, that saved holds a forward, and that its gradient of the loss has this scale. */
static mt_status mti_saved_check(mt_context *ctx, const char *function, const char *name, float scale,
                                 const mt_language_model_saved *saved) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved || !saved->ids) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved holds no forward", function);
    if (saved->batch.backward_scale != 0.0f && scale != saved->batch.backward_scale)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is %.9g, must be %.9g, the backward_scale of the batch", function,
                       name, (double)scale, (double)saved->batch.backward_scale);
    return MT_SUCCESS;
}

static mt_status mti_gpt_run_backward(mt_context *ctx, const char *function, const mt_gpt *gpt, float scale,
                                      mt_tensor doutput, mt_tensor dinput, mt_gpt_saved *saved) {
    const mt_language_model *m = gpt ? &gpt->model : NULL;
    size_t mark;
    mt_status status;
    MT_TRY(mti_saved_check(ctx, function, "scale", scale, saved ? &saved->model : NULL));
    MT_TRY(mti_model_backward_check(ctx, function, m, doutput, m && m->grid && mti_model_is_last(m), dinput,
                                    &saved->model));
    MT_TRY(mt_check_micro_batch(ctx, function, m->layers[0].attention.proj.weight, saved->model.batch.first_sequence));
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_layers_trust_ids(ctx, 1));
    status = mti_gpt_backward(ctx, gpt, scale, doutput, dinput, saved);
    mt_layers_trust_ids(ctx, 0);
    mt_arena_release(ctx, mark);
    saved->model.ids = NULL;
    return status;
}

MT_API mt_status mt_gpt_stage_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_tensor doutput,
                                       mt_tensor dinput, mt_gpt_saved *saved) {
    return mti_gpt_run_backward(ctx, "mt_gpt_stage_backward", gpt, scale, doutput, dinput, saved);
}

MT_API mt_status mt_gpt_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_gpt_saved *saved) {
    return mti_gpt_run_backward(ctx, "mt_gpt_backward", gpt, scale, mt_none(), mt_none(), saved);
}

/* *row becomes the row of the sequence's last valid token, or of its first token when its length is 0. */
static mt_status mti_last_row(mt_context *ctx, const mt_batch *batch, int64_t sequence, int64_t *row) {
    int32_t length = (int32_t)batch->seq;
    if (batch->lengths) MT_TRY(mt_download(ctx, mt_tensor_make(batch->lengths + sequence, MT_I32, 1, 1), &length));
    *row = sequence * batch->seq + mt_max(0, mt_min(length, batch->seq) - 1);
    return MT_SUCCESS;
}

/* *out becomes x when n is x.rows, and otherwise a copy of the rows of the n sequences' last valid tokens. */
static mt_status mti_gpt_pick_rows(mt_context *ctx, const mt_batch *batch, mt_tensor x, int64_t n, mt_tensor *out) {
    int64_t i, row = 0;
    *out = x;
    if (n == x.rows) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, x.cols, out));
    for (i = 0; i < n; i++) {
        MT_TRY(mti_last_row(ctx, batch, i, &row));
        MT_TRY(mt_copy(ctx, mt_tensor_rows(x, row, 1), mt_tensor_rows(*out, i, 1)));
    }
    return MT_SUCCESS;
}

/* Computes the logits from x, the output of the model m on the last stage. */
static mt_status mti_gpt_head_logits(mt_context *ctx, const mt_gpt *gpt, const mt_language_model *m,
                                     const mt_batch *batch, mt_tensor x, mt_tensor logits) {
    MT_TRY(mt_gather_tokens(ctx, gpt->head.tp, m->desc.layer.sequence_parallel, x, &x));
    MT_TRY(mti_gpt_pick_rows(ctx, batch, x, logits.rows, &x));
    return mt_column_parallel_linear_product(ctx, &gpt->head, x, 1, logits);
}

/* The last stage computes the logits and broadcasts them to the others. m is the model, or with a cache that of
   mti_model_whole_tokens. Without a cache, `cache` is NULL. logits may be mt_none(). */
static mt_status mti_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_language_model *m, const mt_batch *batch,
                                const int32_t *ids, const mt_gpt_cache *cache, mt_tensor logits) {
    mt_tensor x, room;
    MT_TRY(mti_model_infer(ctx, m, batch, ids, cache, &x));
    MT_TRY(mti_model_share_room(ctx, m, logits, &room));
    if (mti_model_is_last(m) && logits.data) MT_TRY(mti_gpt_head_logits(ctx, gpt, m, batch, x, room));
    return mti_model_share(ctx, m, room, logits);
}

MT_API mt_status mt_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               mt_tensor logits) {
    static const char *const function = "mt_gpt_logits";
    int64_t tokens;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_call_check(ctx, function, gpt ? &gpt->model : NULL, batch));
    tokens = batch->sequences * batch->seq;
    MT_TRY(mt_tensor_check(ctx, function, "logits", logits, MT_ARG_FLOAT,
                           logits.rows == batch->sequences ? batch->sequences : tokens, gpt->desc.vocab));
    MT_TRY(mt_ids_check(ctx, "token id", ids, tokens, gpt->desc.vocab, 0));
    mark = mt_arena_mark(ctx);
    status = mti_gpt_logits(ctx, gpt, &gpt->model, batch, ids, NULL, logits);
    mt_arena_release(ctx, mark);
    return status;
}

/* The bytes of the keys, or of the values, of a layer. -1: too many. */
static int64_t mti_gpt_cache_layer_bytes(const mt_gpt *gpt, int64_t sequences, int64_t max_seq) {
    const mt_self_attention *a = &gpt->model.layers[0].attention;
    int64_t rows = mt_size_mul(mt_size_mul(sequences, mt_self_attention_cache_groups(a)), max_seq);
    int64_t bytes = mt_size_mul(mt_size_mul(rows, a->head_dim), (int64_t)mt_dtype_size(a->proj.weight->value.dtype));
    return bytes < 0 || bytes > INT64_MAX / 2 ? -1 : (int64_t)mt_align_up((size_t)bytes);
}

MT_API int64_t mt_gpt_cache_bytes(const mt_gpt *gpt, int64_t sequences, int64_t max_seq) {
    if (!gpt || !gpt->model.layers || sequences < 0 || max_seq < 0) return -1;
    if (max_seq == 0) max_seq = gpt->desc.max_seq;
    return mt_size_mul(mti_gpt_cache_layer_bytes(gpt, sequences, max_seq), 2 * gpt->model.local_layers);
}

/* Allocates the memory of a cache, and makes the views of its layers. */
static mt_status mti_gpt_cache_fill(mt_context *ctx, const mt_gpt *gpt, mt_gpt_cache *c) {
    const mt_self_attention *a = &gpt->model.layers[0].attention;
    mt_dtype dtype = a->proj.weight->value.dtype;
    int64_t rows = c->sequences * mt_self_attention_cache_groups(a) * c->max_seq, i;
    size_t part = c->bytes / (size_t)(2 * c->local_layers);
    void *memory;
    c->layers = (mt_kv_cache *)mt_host_alloc((size_t)c->local_layers * sizeof *c->layers);
    if (!c->layers) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for %lld layers", (long long)c->local_layers);
    MT_TRY(mt_context_alloc(ctx, (size_t)c->sequences * sizeof *c->lengths, &memory));
    c->lengths = (int32_t *)memory;
    MT_TRY(mt_context_alloc(ctx, c->bytes, &c->memory));
    for (i = 0; i < c->local_layers; i++) {
        const char *keys = (const char *)c->memory + 2 * (size_t)i * part;
        c->layers[i].keys = mt_tensor_make(keys, dtype, rows, a->head_dim);
        c->layers[i].values = mt_tensor_make(keys + part, dtype, rows, a->head_dim);
        c->layers[i].max_seq = c->max_seq;
        c->layers[i].lengths = c->lengths;
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_gpt_cache_create(mt_context *ctx, const mt_gpt *gpt, int64_t sequences, int64_t max_seq,
                                     mt_gpt_cache *out) {
    static const char *const function = "mt_gpt_cache_create";
    int64_t bytes;
    mt_status status;
    if (out) memset(out, 0, sizeof *out);
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!gpt || !gpt->model.layers || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, out ? "the model was not created" : "out is NULL");
    MT_TRY(mt_check_param(ctx, function, gpt->model.layers[0].attention.proj.weight));
    MT_TRY(mt_check_integer(ctx, function, NULL, "sequences", sequences, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "max_seq", max_seq, 0, mt_min(gpt->desc.max_seq, INT32_MAX)));
    if (gpt->desc.layer.mask != MT_MASK_CAUSAL)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: the layers have a mask other than MT_MASK_CAUSAL", function);
    bytes = mt_gpt_cache_bytes(gpt, sequences, max_seq);
    if (bytes < 0 || (uint64_t)bytes > SIZE_MAX / 2)
        return mt_fail(ctx, MT_ERR_MEMORY, "%s: %lld sequences of %lld tokens need too many bytes", function,
                       (long long)sequences, (long long)(max_seq ? max_seq : gpt->desc.max_seq));
    out->sequences = sequences;
    out->max_seq = max_seq ? max_seq : gpt->desc.max_seq;
    out->local_layers = gpt->model.local_layers;
    out->bytes = (size_t)bytes;
    status = mti_gpt_cache_fill(ctx, gpt, out);
    if (status != MT_SUCCESS) mt_gpt_cache_destroy(ctx, out);
    return status;
}

MT_API void mt_gpt_cache_destroy(mt_context *ctx, mt_gpt_cache *cache) {
    if (!cache) return;
    mt_host_free(cache->layers);
    mt_context_free(ctx, cache->memory, cache->bytes);
    mt_context_free(ctx, cache->lengths, (size_t)cache->sequences * sizeof *cache->lengths);
    memset(cache, 0, sizeof *cache);
}

static mt_status mti_gpt_cache_created(mt_context *ctx, const char *function, const mt_gpt_cache *cache) {
    if (cache && cache->layers) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the cache was not created with mt_gpt_cache_create", function);
}

MT_API mt_status mt_gpt_cache_set_length(mt_context *ctx, const mt_gpt_cache *cache, int64_t sequence, int64_t length) {
    static const char *const function = "mt_gpt_cache_set_length";
    int32_t value = (int32_t)length;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_gpt_cache_created(ctx, function, cache));
    MT_TRY(mt_check_integer(ctx, function, NULL, "sequence", sequence, 0, cache->sequences - 1));
    MT_TRY(mt_check_integer(ctx, function, NULL, "length", length, 0, cache->max_seq));
    return mt_upload(ctx, &value, mt_tensor_make(cache->lengths + sequence, MT_I32, 1, 1));
}

/* A copy of the model that runs without sequence parallelism. The layers clear it themselves. */
static mt_language_model mti_model_whole_tokens(const mt_language_model *model) {
    mt_language_model m = *model;
    m.desc.layer.sequence_parallel = m.tokens.desc.sequence_parallel = 0;
    return m;
}

/* Checks what a call with a cache reads. m is from mti_model_whole_tokens. */
static mt_status mti_gpt_cached_check(mt_context *ctx, const char *function, const mt_language_model *m,
                                      const mt_batch *batch, const int32_t *ids, const mt_gpt_cache *cache) {
    const mt_self_attention *a;
    MT_TRY(mti_model_call_check(ctx, function, m, batch));
    MT_TRY(mti_gpt_cache_created(ctx, function, cache));
    a = &m->layers[0].attention;
    if (batch->sequences != cache->sequences || m->local_layers != cache->local_layers)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: the batch has %lld sequences and this stage %lld layers, the cache has %lld and %lld",
                       function, (long long)batch->sequences, (long long)m->local_layers, (long long)cache->sequences,
                       (long long)cache->local_layers);
    MT_TRY(mti_cache_check(ctx, function, a, batch, &cache->layers[0]));
    return mt_ids_check(ctx, "token id", ids, batch->sequences * batch->seq, m->desc.vocab, 0);
}

/* Adds the new tokens of each sequence to `lengths`, which are those of the cache or a copy of them. A call that has
   succeeded on this rank ends with this: the cache has the tokens. */
static mt_status mti_gpt_cache_advance(mt_context *ctx, const mt_batch *batch, const mt_gpt_cache *cache,
                                       int32_t *lengths) {
    return mt_kv_cache_advance(ctx, cache->max_seq, batch->sequences, batch->seq, batch->lengths, lengths);
}

MT_API mt_status mt_gpt_cached_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const mt_gpt_cache *cache, mt_tensor logits) {
    static const char *const function = "mt_gpt_cached_logits";
    mt_language_model m;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!gpt) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: gpt is NULL", function);
    m = mti_model_whole_tokens(&gpt->model);
    MT_TRY(mti_gpt_cached_check(ctx, function, &m, batch, ids, cache));
    if (logits.data)
        MT_TRY(mt_tensor_check(ctx, function, "logits", logits, MT_ARG_FLOAT,
                               logits.rows == batch->sequences ? logits.rows : batch->sequences * batch->seq,
                               gpt->desc.vocab));
    mark = mt_arena_mark(ctx);
    status = mti_gpt_logits(ctx, gpt, &m, batch, ids, cache, logits);
    if (status == MT_SUCCESS) status = mti_gpt_cache_advance(ctx, batch, cache, cache->lengths);
    mt_arena_release(ctx, mark);
    return status;
}

/* Draws from the logits in f32 of x, the outputs of the model on the last stage. */
static mt_status mti_gpt_draw(mt_context *ctx, const mt_gpt *gpt, const mt_sample_desc *desc, mt_tensor x,
                              int32_t *ids) {
    mt_tensor logits;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, x.rows, gpt->head.local_features, &logits));
    MT_TRY(mt_column_parallel_linear_product(ctx, &gpt->head, x, 0, logits));
    return mt_vocab_parallel_sample(ctx, gpt->head.tp, gpt->desc.vocab, gpt->desc.padded_vocab, desc, logits, ids);
}

/* *out becomes the number of tokens that each sequence has in the cache after the call. */
static mt_status mti_gpt_next_positions(mt_context *ctx, const mt_batch *batch, const mt_gpt_cache *cache,
                                        const int32_t **out) {
    mt_tensor held = mt_tensor_make(cache->lengths, MT_I32, 1, cache->sequences), next;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, cache->sequences, &next));
    MT_TRY(mt_copy(ctx, held, next));
    *out = (const int32_t *)next.data;
    return mti_gpt_cache_advance(ctx, batch, cache, (int32_t *)next.data);
}

/* When a logit is NaN, the last stage still shares the ids: that of the row is -1, from which the others have the same
   error. */
static mt_status mti_gpt_sample(mt_context *ctx, const mt_gpt *gpt, const mt_language_model *m, const mt_batch *batch,
                                const int32_t *ids, const mt_gpt_cache *cache, const mt_sample_desc *desc,
                                mt_tensor next) {
    mt_sample_desc s = *desc;
    mt_status status = MT_SUCCESS;
    mt_tensor x, room;
    if (!s.positions) MT_TRY(mti_gpt_next_positions(ctx, batch, cache, &s.positions));
    MT_TRY(mti_model_infer(ctx, m, batch, ids, cache, &x));
    if (mti_model_is_last(m)) MT_TRY(mti_gpt_pick_rows(ctx, batch, x, batch->sequences, &x));
    MT_TRY(mti_model_share_room(ctx, m, next, &room));
    if (mti_model_is_last(m)) status = mti_gpt_draw(ctx, gpt, &s, x, (int32_t *)room.data);
    if (status != MT_SUCCESS && status != MT_ERR_DATA) return status;
    MT_TRY(mti_model_share(ctx, m, room, next));
    if (!mti_model_is_last(m))
        status = mt_ids_check(ctx, "sampled id", (const int32_t *)next.data, next.cols, gpt->desc.vocab, 0);
    return status == MT_SUCCESS ? mti_gpt_cache_advance(ctx, batch, cache, cache->lengths) : status;
}

MT_API mt_status mt_gpt_sample(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               const mt_gpt_cache *cache, const mt_sample_desc *desc, int32_t *next_ids) {
    static const char *const function = "mt_gpt_sample";
    mt_language_model m;
    mt_tensor next;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!gpt) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: gpt is NULL", function);
    m = mti_model_whole_tokens(&gpt->model);
    MT_TRY(mt_sample_check(ctx, function, desc));
    MT_TRY(mti_gpt_cached_check(ctx, function, &m, batch, ids, cache));
    next = mt_tensor_make(next_ids, MT_I32, 1, batch->sequences);
    MT_TRY(mt_tensor_check(ctx, function, "next_ids", next, MT_ARG_ANY, 1, batch->sequences));
    mark = mt_arena_mark(ctx);
    status = mti_gpt_sample(ctx, gpt, &m, batch, ids, cache, desc, next);
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>bert ------------------------------------------------------------------------------------------------------ */

static mt_language_model_desc mti_bert_model(const mt_bert_desc *d) {
    mt_language_model_desc m;
    memset(&m, 0, sizeof m);
    m.vocab = d->vocab;
    m.layers = d->layers;
    m.max_seq = d->max_seq;
    m.layer = d->layer;
    m.layer.mask = MT_MASK_BIDIRECTIONAL;
    m.is_encoder = 1;
    m.token_types = d->token_types ? d->token_types : 2;
    m.embedding_norm = d->layer.placement == MT_POST_LN;
    m.tied_head = 1;
    m.recompute_layers = d->recompute_layers;
    m.embedding_dropout = d->embedding_dropout;
    m.padded_vocab = d->padded_vocab;
    return m;
}

/* Creates a column-parallel layer of a head, whose output every rank gets whole. */
static mt_status mti_bert_dense(mt_context *ctx, mt_params *params, const mt_bert *bert, const char *name,
                                int sequence_parallel, mt_column_parallel_linear *out) {
    const mt_transformer_layer_desc *l = &bert->desc.layer;
    mt_linear_desc d;
    memset(&d, 0, sizeof d);
    d.in_features = d.out_features = l->hidden;
    d.gather_output = 1;
    d.sequence_parallel = sequence_parallel;
    d.init_std = l->init_std;
    return mt_column_parallel_linear_create(ctx, params, name, &d, out);
}

/* Creates the pooler and the sentence-order head. */
static mt_status mti_bert_binary(mt_context *ctx, mt_params *params, mt_bert *bert) {
    mt_linear_desc d;
    memset(&d, 0, sizeof d);
    d.in_features = bert->desc.layer.hidden;
    d.out_features = 2;
    d.init_std = bert->desc.layer.init_std;
    MT_TRY(mti_bert_dense(ctx, params, bert, "pooler.dense", 0, &bert->pooler));
    return mt_column_parallel_linear_create(ctx, params, "binary_head", &d, &bert->binary_head);
}

/* Creates the heads, which begin with all tokens: lm_dense gathers them under sequence parallelism. */
static mt_status mti_bert_heads(mt_context *ctx, mt_params *params, mt_bert *bert) {
    mt_transformer_layer_desc l = bert->desc.layer;
    MT_TRY(mti_bert_dense(ctx, params, bert, "lm_head.dense", l.sequence_parallel, &bert->lm_dense));
    l.sequence_parallel = 0;
    MT_TRY(mti_layer_norm(ctx, params, "lm_head", "layer_norm", &l, &bert->lm_norm));
    MT_TRY(mti_output_create(ctx, params, &bert->model, 0, 0, &bert->head));
    return bert->desc.no_binary_head ? MT_SUCCESS : mti_bert_binary(ctx, params, bert);
}

MT_API mt_status mt_bert_create(mt_context *ctx, mt_params *params, const mt_bert_desc *desc, mt_bert *out) {
    static const char *const function = "mt_bert_create";
    mt_language_model_desc m;
    size_t mark;
    mt_status status;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    m = mti_bert_model(desc);
    MT_TRY(mti_model_check(ctx, function, mt_params_grid(params), &m));
    if (desc->layer.activation == MT_SWIGLU)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: layer.activation is MT_SWIGLU, which the masked-LM head cannot use; use "
                       "mt_language_model_create and a head of your own",
                       function);
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    status = mti_model_create(ctx, params, &m, &out->model);
    out->desc = *desc;
    out->desc.layer = out->model.desc.layer;
    out->desc.token_types = m.token_types;
    out->loss.vocab = desc->vocab;
    out->loss.padded_vocab = desc->padded_vocab;
    out->sop_loss.vocab = 2;
    out->loss.ignore_index = desc->ignore_index; /* sop_loss has -100: 0 is a class */
    if (status == MT_SUCCESS && mti_model_is_last(&out->model)) status = mti_bert_heads(ctx, params, out);
    return mt_create_end(params, mark, out, sizeof *out, status);
}

MT_API mt_status mt_bert_saved_create(mt_context *ctx, const mt_bert *bert, mt_bert_saved *out) {
    if (out) memset(out, 0, sizeof *out);
    return mti_model_saved_create(ctx, "mt_bert_saved_create", bert ? &bert->model : NULL, out ? &out->model : NULL);
}

MT_API void mt_bert_saved_destroy(mt_bert_saved *saved) {
    if (!saved) return;
    mt_language_model_saved_destroy(&saved->model);
    memset(saved, 0, sizeof *saved);
}

/* Computes *y [tokens, hidden], the input of the masked-LM logits, from x, the output of the model. */
static mt_status mti_bert_lm_hidden(mt_context *ctx, const mt_bert *bert, mt_tensor x, int64_t tokens,
                                    mt_bert_saved *saved, mt_tensor *y) {
    int64_t hidden = bert->desc.layer.hidden;
    mt_tensor h, act;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, hidden, &h));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, hidden, &act));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, hidden, y));
    MT_TRY(mt_column_parallel_linear_activation_forward(ctx, &bert->lm_dense, bert->desc.layer.activation, x, h, act,
                                                        saved ? &saved->lm_dense : NULL));
    if (saved) saved->lm_h = h;
    return mt_norm_layer_forward(ctx, &bert->lm_norm, act, *y, saved ? &saved->lm_norm : NULL);
}

/* Returns a view of the first tokens of sequences in x, which has all tokens or, with sequence_parallel, those of this
   tensor rank. *first becomes the number of the first of these sequences. */
static mt_tensor mti_first_tokens(const mt_language_model *m, const mt_batch *batch, mt_tensor x, int64_t *first) {
    int64_t begin = m->desc.layer.sequence_parallel ? m->grid->tp_rank * x.rows : 0;
    int64_t end = (begin + x.rows + batch->seq - 1) / batch->seq;
    mt_tensor view;
    *first = (begin + batch->seq - 1) / batch->seq;
    if (end == *first) return mt_none();
    view = mt_tensor_rows(x, *first * batch->seq - begin, 1);
    view.rows = end - *first;
    view.ld = (x.ld ? x.ld : x.cols) * batch->seq;
    return view;
}

/* Adds the first tokens in x to the rows of their sequences in y [sequences, hidden], or back when to_x is 1. */
static mt_status mti_add_first_tokens(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, mt_tensor x,
                                      mt_tensor y, int to_x) {
    int64_t first;
    mt_tensor tokens = mti_first_tokens(m, batch, x, &first), rows;
    if (!tokens.data) return MT_SUCCESS;
    rows = mt_tensor_rows(y, first, tokens.rows);
    MT_TRY(mt_check_view(ctx, m->grid->tp, rows, m->desc.layer.sequence_parallel ? MT_SPLIT_ROWS : MT_UNDECLARED));
    return mt_check_view_end(ctx, mt_add(ctx, tokens, rows, to_x ? tokens : rows));
}

/* Computes *pooled [sequences, hidden] from x, the output of the model. Under sequence parallelism each rank has the
   first tokens of some sequences, and the sum over the ranks has all of them. */
static mt_status mti_bert_pool(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, mt_tensor x,
                               mt_bert_saved *saved, mt_tensor *pooled) {
    int64_t n = batch->sequences, hidden = bert->desc.layer.hidden;
    mt_tensor tokens, h;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, hidden, &tokens));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, hidden, &h));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, hidden, pooled));
    MT_TRY(mt_fill(ctx, tokens, 0.0f));
    MT_TRY(mti_add_first_tokens(ctx, &bert->model, batch, x, tokens, 0));
    if (bert->desc.layer.sequence_parallel) {
        MT_TRY(mt_declare(ctx, bert->model.grid->tp, tokens, MT_PARTIAL));
        MT_TRY(mt_declare(ctx, bert->model.grid->dp, tokens, mt_placement_of(ctx, bert->model.grid->dp, x)));
        MT_TRY(mt_reduce_from_tensor_region_forward(ctx, bert->model.grid->tp, tokens));
    }
    MT_TRY(mt_column_parallel_linear_activation_forward(ctx, &bert->pooler, MT_TANH, tokens, h, *pooled,
                                                        saved ? &saved->pooler : NULL));
    if (saved) saved->pooled_h = h;
    return MT_SUCCESS;
}

static mti_output mti_bert_lm_output(const mt_bert *bert, const mt_batch *batch, mt_bert_saved *saved) {
    return mti_output_of(&bert->head, &bert->loss, saved ? &saved->head : NULL, saved ? &saved->loss : NULL, batch,
                         batch->backward_scale);
}

static mti_output mti_bert_sop_output(const mt_bert *bert, const mt_batch *batch, mt_bert_saved *saved) {
    return mti_output_of(&bert->binary_head, &bert->sop_loss, saved ? &saved->binary_head : NULL,
                         saved ? &saved->sop_loss : NULL, batch, 0.0f);
}

/* Computes the loss of the sentence order. The rows of its tensors are sequences, also in the hash log. */
static mt_status mti_bert_sop_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, mt_tensor x,
                                      const int32_t *order, mt_tensor loss, mt_bert_saved *saved) {
    mti_output out = mti_bert_sop_output(bert, batch, saved);
    mt_tensor pooled;
    mt_hash_log_tokens(ctx, batch->first_sequence);
    MT_TRY(mti_bert_pool(ctx, bert, batch, x, saved, &pooled));
    MT_TRY(mti_output_forward(ctx, &out, pooled, order, loss));
    return saved ? mt_hash_log_activation(ctx, "sop_loss", 0, "output", mti_as_column(loss), 0, NULL) : MT_SUCCESS;
}

/* Runs this stage and, on the last stage, the heads and the losses. */
static mt_status mti_bert_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                  const int32_t *targets, const int32_t *order, mt_tensor input, mt_tensor output,
                                  mt_tensor lm_loss, mt_tensor sop_loss, mt_bert_saved *saved) {
    mti_output out = mti_bert_lm_output(bert, batch, saved);
    mt_tensor x, y;
    MT_TRY(mti_model_forward(ctx, &bert->model, batch, ids, NULL, input, output, saved ? &saved->model : NULL, &x));
    if (!mti_model_is_last(&bert->model)) return MT_SUCCESS;
    MT_TRY(mti_bert_lm_hidden(ctx, bert, x, batch->sequences * batch->seq, saved, &y));
    MT_TRY(mti_output_forward(ctx, &out, y, targets, lm_loss));
    if (saved) MT_TRY(mt_hash_log_activation(ctx, "lm_loss", 0, "output", mti_as_column(lm_loss), 0, NULL));
    return bert->desc.no_binary_head ? MT_SUCCESS : mti_bert_sop_forward(ctx, bert, batch, x, order, sop_loss, saved);
}

/* Checks targets and losses. Without a binary head there must be none of the sentence order. */
static mt_status mti_bert_loss_check(mt_context *ctx, const char *function, const mt_bert *bert, const mt_batch *batch,
                                     const int32_t *targets, const int32_t *order, mt_tensor lm_loss,
                                     mt_tensor sop_loss) {
    int64_t tokens = batch->sequences * batch->seq;
    int last = mti_model_is_last(&bert->model);
    if (last) MT_TRY(mt_tensor_check(ctx, function, "lm_loss", lm_loss, MT_ARG_F32, 1, tokens));
    MT_TRY(mt_ids_check(ctx, "target", targets, tokens, bert->desc.vocab, mt_ignore_index(bert->loss.ignore_index)));
    if (bert->desc.no_binary_head) {
        if (!order && !sop_loss.data) return MT_SUCCESS;
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: there is a %s, and the model has no_binary_head", function,
                       order ? "sentence_order" : "sop_loss");
    }
    if (last) MT_TRY(mt_tensor_check(ctx, function, "sop_loss", sop_loss, MT_ARG_F32, 1, batch->sequences));
    return mt_ids_check(ctx, "sentence order", order, batch->sequences, 2,
                        mt_ignore_index(bert->sop_loss.ignore_index));
}

static mt_status mti_bert_run_forward(mt_context *ctx, const char *function, const mt_bert *bert, const mt_batch *batch,
                                      const int32_t *ids, const int32_t *targets, const int32_t *order, mt_tensor input,
                                      mt_tensor output, mt_tensor lm_loss, mt_tensor sop_loss, mt_bert_saved *saved) {
    const mt_language_model *m = bert ? &bert->model : NULL;
    mt_language_model_saved *kept = saved ? &saved->model : NULL;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_forward_check(ctx, function, m, batch, ids, input, output, m && m->grid && mti_model_is_last(m),
                                   kept));
    MT_TRY(mti_model_saved_check(ctx, function, "mt_bert_saved_create", kept));
    MT_TRY(mti_bert_loss_check(ctx, function, bert, batch, targets, order, lm_loss, sop_loss));
    MT_TRY(mti_model_begin_forward(ctx, kept, &mark));
    status = mti_bert_forward(ctx, bert, batch, ids, targets, order, input, output, lm_loss, sop_loss, saved);
    return mti_model_end_forward(ctx, mark, status, batch, ids, kept);
}

MT_API mt_status mt_bert_stage_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                       const int32_t *targets, const int32_t *sentence_order, mt_tensor input,
                                       mt_tensor output, mt_tensor lm_loss, mt_tensor sop_loss, mt_bert_saved *saved) {
    return mti_bert_run_forward(ctx, "mt_bert_stage_forward", bert, batch, ids, targets, sentence_order, input, output,
                                lm_loss, sop_loss, saved);
}

MT_API mt_status mt_bert_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                 const int32_t *targets, const int32_t *sentence_order, mt_tensor lm_loss,
                                 mt_tensor sop_loss, mt_bert_saved *saved) {
    return mti_bert_run_forward(ctx, "mt_bert_forward", bert, batch, ids, targets, sentence_order, mt_none(), mt_none(),
                                lm_loss, sop_loss, saved);
}

/* Computes dx [rows, hidden], the gradient of the model's output through the masked-LM head. */
static mt_status mti_bert_lm_backward(mt_context *ctx, const mt_bert *bert, float scale, mt_tensor dx,
                                      mt_bert_saved *saved) {
    mti_output out = mti_bert_lm_output(bert, &saved->model.batch, saved);
    mt_tensor dy, dh = saved->lm_h;
    MT_TRY(mt_arena_tensor(ctx, dx.dtype, dh.rows, dh.cols, &dy));
    MT_TRY(mti_output_backward(ctx, &out, scale, dy));
    MT_TRY(mt_norm_layer_backward(ctx, &bert->lm_norm, dy, mt_none(), dy, &saved->lm_norm));
    MT_TRY(
        mt_column_parallel_activation_backward(ctx, &bert->lm_dense, bert->desc.layer.activation, saved->lm_h, dy, dh));
    return mt_column_parallel_linear_backward(ctx, &bert->lm_dense, dh, dx, &saved->lm_dense);
}

/* Adds the gradient of the model's output through the pooler to dx. */
static mt_status mti_bert_sop_backward(mt_context *ctx, const mt_bert *bert, float scale, mt_tensor dx,
                                       mt_bert_saved *saved) {
    const mt_batch *batch = &saved->model.batch;
    mti_output out = mti_bert_sop_output(bert, batch, saved);
    mt_tensor dy, dh = saved->pooled_h;
    mt_hash_log_tokens(ctx, batch->first_sequence);
    MT_TRY(mt_arena_tensor(ctx, dx.dtype, dh.rows, dh.cols, &dy));
    MT_TRY(mti_output_backward(ctx, &out, scale, dy));
    MT_TRY(mt_column_parallel_activation_backward(ctx, &bert->pooler, MT_TANH, saved->pooled_h, dy, dh));
    MT_TRY(mt_column_parallel_linear_backward(ctx, &bert->pooler, dh, dy, &saved->pooler));
    return mti_add_first_tokens(ctx, &bert->model, batch, dx, dy, 1);
}

/* Runs the backward of the heads, on the last stage, and of this stage. */
static mt_status mti_bert_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                   mt_tensor doutput, mt_tensor dinput, mt_bert_saved *saved) {
    const mt_batch *batch = &saved->model.batch;
    int last = mti_model_is_last(&bert->model);
    mt_tensor dy = doutput;
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
    if (last) {
        MT_TRY(mti_model_room(ctx, &bert->model, mt_none(), mti_model_rows(&bert->model, batch), &dy));
        MT_TRY(mti_bert_lm_backward(ctx, bert, lm_scale, dy, saved));
        if (!bert->desc.no_binary_head) MT_TRY(mti_bert_sop_backward(ctx, bert, sop_scale, dy, saved));
        MT_TRY(mt_gradients_final(ctx, bert->lm_dense.weight,
                                  bert->desc.no_binary_head ? bert->head.bias : bert->binary_head.bias));
    }
    return mti_model_backward(ctx, &bert->model, dy, last, dinput, &saved->model);
}

static mt_status mti_bert_run_backward(mt_context *ctx, const char *function, const mt_bert *bert, float lm_scale,
                                       float sop_scale, mt_tensor doutput, mt_tensor dinput, mt_bert_saved *saved) {
    const mt_language_model *m = bert ? &bert->model : NULL;
    size_t mark;
    mt_status status;
    MT_TRY(mti_saved_check(ctx, function, "lm_scale", lm_scale, saved ? &saved->model : NULL));
    MT_TRY(mti_model_backward_check(ctx, function, m, doutput, m && m->grid && mti_model_is_last(m), dinput,
                                    &saved->model));
    MT_TRY(mt_check_micro_batch(ctx, function, m->layers[0].attention.proj.weight, saved->model.batch.first_sequence));
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_layers_trust_ids(ctx, 1));
    status = mti_bert_backward(ctx, bert, lm_scale, sop_scale, doutput, dinput, saved);
    mt_layers_trust_ids(ctx, 0);
    mt_arena_release(ctx, mark);
    saved->model.ids = NULL;
    return status;
}

MT_API mt_status mt_bert_stage_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                        mt_tensor doutput, mt_tensor dinput, mt_bert_saved *saved) {
    return mti_bert_run_backward(ctx, "mt_bert_stage_backward", bert, lm_scale, sop_scale, doutput, dinput, saved);
}

MT_API mt_status mt_bert_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                  mt_bert_saved *saved) {
    return mti_bert_run_backward(ctx, "mt_bert_backward", bert, lm_scale, sop_scale, mt_none(), mt_none(), saved);
}

/* Computes the logits from x, the output of the model on the last stage. */
static mt_status mti_bert_head_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, mt_tensor x,
                                      mt_tensor lm_logits, mt_tensor sop_logits) {
    mt_tensor y;
    if (lm_logits.data) {
        MT_TRY(mti_bert_lm_hidden(ctx, bert, x, batch->sequences * batch->seq, NULL, &y));
        MT_TRY(mt_column_parallel_linear_product(ctx, &bert->head, y, 1, lm_logits));
    }
    if (!sop_logits.data) return MT_SUCCESS;
    MT_TRY(mti_bert_pool(ctx, bert, batch, x, NULL, &y));
    return mt_column_parallel_linear_product(ctx, &bert->binary_head, y, 1, sop_logits);
}

/* The last stage computes the logits and broadcasts them to the others. */
static mt_status mti_bert_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                 mt_tensor lm_logits, mt_tensor sop_logits) {
    const mt_language_model *m = &bert->model;
    mt_tensor x, lm_room, sop_room;
    MT_TRY(mti_model_infer(ctx, m, batch, ids, NULL, &x));
    MT_TRY(mti_model_share_room(ctx, m, lm_logits, &lm_room));
    MT_TRY(mti_model_share_room(ctx, m, sop_logits, &sop_room));
    if (mti_model_is_last(m)) MT_TRY(mti_bert_head_logits(ctx, bert, batch, x, lm_room, sop_room));
    MT_TRY(mti_model_share(ctx, m, lm_room, lm_logits));
    return mti_model_share(ctx, m, sop_room, sop_logits);
}

MT_API mt_status mt_bert_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                mt_tensor lm_logits, mt_tensor sop_logits) {
    static const char *const function = "mt_bert_logits";
    int64_t tokens;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_call_check(ctx, function, bert ? &bert->model : NULL, batch));
    tokens = batch->sequences * batch->seq;
    if (lm_logits.data)
        MT_TRY(mt_tensor_check(ctx, function, "lm_logits", lm_logits, MT_ARG_FLOAT, tokens, bert->desc.vocab));
    if (sop_logits.data && bert->desc.no_binary_head)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: there are sop_logits, and the model has no_binary_head", function);
    if (sop_logits.data)
        MT_TRY(mt_tensor_check(ctx, function, "sop_logits", sop_logits, MT_ARG_FLOAT, batch->sequences, 2));
    if (batch->token_types)
        MT_TRY(mt_ids_check(ctx, "token type", batch->token_types, tokens, bert->desc.token_types, 0));
    MT_TRY(mt_ids_check(ctx, "token id", ids, tokens, bert->desc.vocab, 0));
    mark = mt_arena_mark(ctx);
    status = mti_bert_logits(ctx, bert, batch, ids, lm_logits, sop_logits);
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>flops ----------------------------------------------------------------------------------------------------- */

/* The scores of a head that mask and window allow, in a sequence. */
static double mti_visible_scores(const mt_transformer_layer_desc *l, int64_t seq) {
    double n = (double)seq, w = l->window > 0 ? (double)mt_min(l->window, seq) : n;
    double causal = w * (w + 1) / 2 + (n - w) * w; /* of each query the keys at its position and before */
    return l->mask == MT_MASK_CAUSAL ? causal : 2 * causal - n;
}

/* The forward of a layer: QKV, projection and MLP, and two products for each score. */
static double mti_layer_flops(const mt_transformer_layer_desc *l, double sequences, int64_t seq) {
    double h = (double)l->hidden, ffn = l->ffn ? (double)l->ffn : 4 * h;
    double kv = h / (double)l->heads * (double)(l->kv_heads ? l->kv_heads : l->heads);
    double weights = h * (h + 2 * kv) + h * h + h * ffn * (l->activation == MT_SWIGLU ? 3 : 2);
    return 2 * sequences * ((double)seq * weights + 2 * mti_visible_scores(l, seq) * h);
}

MT_API double mt_gpt_flops(const mt_gpt_desc *desc, int64_t sequences, int64_t seq) {
    double n = (double)sequences, head;
    if (!desc || sequences < 1 || seq < 1 || desc->layer.heads < 1) return 0;
    head = 2 * n * (double)seq * (double)desc->layer.hidden * (double)desc->vocab;
    /* the gradients of both factors of a product cost as much as two forwards */
    return 3 * ((double)desc->layers * mti_layer_flops(&desc->layer, n, seq) + head);
}

MT_API double mt_bert_flops(const mt_bert_desc *desc, int64_t sequences, int64_t seq) {
    mt_transformer_layer_desc l;
    double n = (double)sequences, h, heads;
    if (!desc || sequences < 1 || seq < 1 || desc->layer.heads < 1) return 0;
    l = desc->layer;
    l.mask = MT_MASK_BIDIRECTIONAL;
    h = (double)l.hidden;
    heads = 2 * n * (double)seq * h * (h + (double)desc->vocab);
    if (!desc->no_binary_head) heads += 2 * n * h * (h + 2); /* the pooler and the two classes, of a sequence */
    return 3 * ((double)desc->layers * mti_layer_flops(&l, n, seq) + heads);
}

/* ---- >>checkpoint ------------------------------------------------------------------------------------------------ */

#define MTI_LENGTH(list) (int)(sizeof(list) / sizeof *(list))

/* A GPT or a BERT, as the files of a checkpoint describe it. */
typedef struct mti_described {
    int is_bert;
    mt_gpt_desc d;       /* of a BERT: what mt_bert_desc has in common with it */
    int64_t token_types; /* of a BERT */
    int no_binary_head;  /* of a BERT; does not change what the encoder computes, and is not compared */
} mti_described;

/* The fields in the metadata of a file, in the order of the file: what determines the logits of a GPT and what a BERT's
   encoder computes, max_seq and no_binary_head. The limits are those of mt_gpt_create. */
#define MTI_BOTH(name) "gpt." name, "bert." name
#define MTI_AT(member) offsetof(mti_described, member)
static const struct {
    const char *gpt, *bert; /* the name in the metadata of a GPT and of a BERT; NULL: it does not have the field */
    mt_field_kind kind;
    size_t at;         /* the place in mti_described */
    int64_t low, high; /* as in mt_field; a float must be at least 0 (low 0) or above 0 (low 1) */
    int optional;      /* 1: a file has the field only when it is not 0 */
    const char *words; /* as in mt_check_enum, for messages; NULL: numbers */
} mti_fields[] = {
    {MTI_BOTH("vocab"), MT_FIELD_I64, MTI_AT(d.vocab), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("layers"), MT_FIELD_I64, MTI_AT(d.layers), 1, MTI_LAYERS_MAX, 0, NULL},
    {MTI_BOTH("max_seq"), MT_FIELD_I64, MTI_AT(d.max_seq), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("hidden"), MT_FIELD_I64, MTI_AT(d.layer.hidden), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("heads"), MT_FIELD_I64, MTI_AT(d.layer.heads), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("kv_heads"), MT_FIELD_I64, MTI_AT(d.layer.kv_heads), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("ffn"), MT_FIELD_I64, MTI_AT(d.layer.ffn), 1, INT32_MAX, 0, NULL},
    {MTI_BOTH("placement"), MT_FIELD_INT, MTI_AT(d.layer.placement), 0, MT_RESIDUAL_POST_LN, 0, MT_LN_PLACEMENT_WORDS},
    {MTI_BOTH("norm"), MT_FIELD_INT, MTI_AT(d.layer.norm), 0, MT_RMS_NORM, 0, MT_NORM_WORDS},
    {MTI_BOTH("norm_eps"), MT_FIELD_F32, MTI_AT(d.layer.norm_eps), 1, 0, 0, NULL},
    {MTI_BOTH("activation"), MT_FIELD_INT, MTI_AT(d.layer.activation), 0, MT_ACTIVATION_COUNT - 1, 0,
     MT_ACTIVATION_WORDS},
    {"gpt.mask", NULL, MT_FIELD_INT, MTI_AT(d.layer.mask), 0, MT_MASK_BIDIRECTIONAL, 0, MT_MASK_WORDS},
    {MTI_BOTH("rotary_base"), MT_FIELD_F32, MTI_AT(d.layer.rotary_base), 0, 0, 0, NULL},
    {MTI_BOTH("no_bias"), MT_FIELD_INT, MTI_AT(d.layer.no_bias), 0, 1, 0, NULL},
    {"gpt.untied_head", NULL, MT_FIELD_INT, MTI_AT(d.untied_head), 0, 1, 0, NULL},
    {NULL, "bert.token_types", MT_FIELD_I64, MTI_AT(token_types), 1, INT32_MAX, 0, NULL},
    {NULL, "bert.no_binary_head", MT_FIELD_INT, MTI_AT(no_binary_head), 0, 1, 0, NULL},
    {MTI_BOTH("qkv_layout"), MT_FIELD_INT, MTI_AT(d.layer.qkv_layout), 0, MT_QKV_SEPARATE, 1, MT_QKV_LAYOUT_WORDS},
    {MTI_BOTH("rotary_form"), MT_FIELD_INT, MTI_AT(d.layer.rotary_form), 0, MT_ROTARY_PAIRS, 1, MT_ROTARY_FORM_WORDS},
    {MTI_BOTH("rotary_dim"), MT_FIELD_I64, MTI_AT(d.layer.rotary_dim), 0, INT32_MAX, 1, NULL},
    {MTI_BOTH("window"), MT_FIELD_I64, MTI_AT(d.layer.window), 0, INT64_MAX, 1, NULL},
    {MTI_BOTH("softcap"), MT_FIELD_F32, MTI_AT(d.layer.softcap), 0, 0, 1, NULL},
    {MTI_BOTH("alibi"), MT_FIELD_INT, MTI_AT(d.layer.alibi), 0, 1, 1, NULL}};

/* Makes *out field i of the model. Returns 0 when the model does not have the field. */
static int mti_described_field(mti_described *m, int i, mt_field *out) {
    memset(out, 0, sizeof *out);
    out->name = m->is_bert ? mti_fields[i].bert : mti_fields[i].gpt;
    out->kind = mti_fields[i].kind;
    out->value = (char *)m + mti_fields[i].at;
    out->low = mti_fields[i].low;
    out->high = mti_fields[i].high;
    return out->name != NULL;
}

/* Fills in the defaults, so that equal models have equal fields. */
static void mti_described_plain(mti_described *m) {
    mt_transformer_layer_desc *l = &m->d.layer;
    if (!l->kv_heads) l->kv_heads = l->heads;
    if (!l->ffn) l->ffn = 4 * l->hidden;
    if (l->norm_eps == 0.0f) l->norm_eps = 1e-5f;
    if (l->heads > 0 && l->rotary_dim == l->hidden / l->heads) l->rotary_dim = 0;
    l->no_bias = l->no_bias != 0;
    m->d.untied_head = m->d.untied_head != 0;
    if (m->is_bert && !m->token_types) m->token_types = 2;
    m->no_binary_head = m->no_binary_head != 0;
}

static mti_described mti_describe_gpt(const mt_gpt_desc *desc) {
    mti_described m;
    memset(&m, 0, sizeof m);
    m.d = *desc;
    mti_described_plain(&m);
    return m;
}

static mti_described mti_describe_bert(const mt_bert_desc *desc) {
    mti_described m;
    memset(&m, 0, sizeof m);
    m.is_bert = 1;
    m.d.vocab = desc->vocab;
    m.d.layers = desc->layers;
    m.d.max_seq = desc->max_seq;
    m.d.layer = desc->layer;
    m.token_types = desc->token_types;
    m.no_binary_head = desc->no_binary_head;
    mti_described_plain(&m);
    return m;
}

/* Returns the index of the first field in which two models of a kind differ, or -1. With rotary or ALiBi max_seq may
   differ, as no weight depends on it. */
static int mti_described_differ(mti_described *theirs, mti_described *ours) {
    char their_text[MT_FIELD_TEXT_MAX], our_text[MT_FIELD_TEXT_MAX];
    int any_seq = ours->d.layer.rotary_base > 0.0f || ours->d.layer.alibi, i;
    mt_field x, y;
    for (i = 0; i < MTI_LENGTH(mti_fields); i++) {
        if (!mti_described_field(theirs, i, &x) || !mti_described_field(ours, i, &y)) continue;
        if (y.value == &ours->no_binary_head || (any_seq && y.value == &ours->d.max_seq)) continue;
        mt_field_text(&x, their_text);
        mt_field_text(&y, our_text);
        if (strcmp(their_text, our_text) != 0) return i;
    }
    return -1;
}

/* ---- >>names: the names of tensors in files ---------------------------------------------------------------------- */

/* The rows of queries (which 0), keys (1) or values (2). The other form of rotary positions than the model's is
   converted. */
static void mti_part_qkv(const mt_transformer_layer_desc *l, const mt_param *p, int which, int pairs,
                         mt_tensor_part *out) {
    int64_t heads = l->heads, groups = l->kv_heads ? l->kv_heads : heads, head = l->hidden / heads;
    int64_t queries = (l->qkv_layout == MT_QKV_PER_GROUP ? heads / groups : heads) * head;
    int64_t others = (l->qkv_layout == MT_QKV_PER_GROUP ? 1 : groups) * head;
    out->rows = which == 0 ? queries : others;
    out->first = which == 0 ? 0 : queries + (which - 1) * others;
    out->unit = queries + 2 * others;
    if (l->qkv_layout == MT_QKV_SEPARATE) {
        out->first = 0;
        out->unit = out->rows = p->desc.rows == 1 ? p->desc.cols : p->desc.rows;
    }
    out->zip_unit = head;
    if (which == 2 || l->rotary_base == 0.0f || pairs == (l->rotary_form == MT_ROTARY_PAIRS)) return;
    out->zip = l->rotary_dim ? l->rotary_dim : head;
    if (!pairs) out->zip = -out->zip;
}

/* Explains an mt_layer_part. */
static void mti_layer_part(const mt_transformer_layer_desc *l, const mt_param *p, int part, mt_tensor_part *out) {
    int64_t rows = p->desc.rows == 1 ? p->desc.cols : p->desc.rows;
    if (part == MT_PART_GATE || part == MT_PART_UP) {
        out->unit = rows;
        out->rows = rows / 2;
        out->first = part == MT_PART_GATE ? 0 : rows / 2;
    } else if (part == MT_PART_QUERY_PAIRS || part == MT_PART_KEY_PAIRS) {
        mti_part_qkv(l, p, part - MT_PART_QUERY_PAIRS, 1, out);
    } else if (part >= MT_PART_QUERY && part <= MT_PART_VALUE) {
        mti_part_qkv(l, p, part - MT_PART_QUERY, 0, out);
    }
}

static void mti_bert_part(const void *model, const mt_param *p, int part, mt_tensor_part *out) {
    mti_layer_part(&((const mt_bert *)model)->desc.layer, p, part, out);
}

static void mti_gpt_part(const void *model, const mt_param *p, int part, mt_tensor_part *out) {
    mti_layer_part(&((const mt_gpt *)model)->desc.layer, p, part, out);
}

/* The last row of each table is only for a tied head. */
#define MTI_LAYER "decoder.layers.#."
static const mt_tensor_name mti_gpt2_names[] = {
    {"transformer.wte.weight", "embedding.word_embeddings.weight", 0, 0},
    {"transformer.wpe.weight", "embedding.position_embeddings.weight", 0, 0},
    {"transformer.ln_f.weight", "decoder.final_layernorm.weight", 0, 0},
    {"transformer.ln_f.bias", "decoder.final_layernorm.bias", 0, 0},
    {"transformer.h.#.ln_1.weight", MTI_LAYER "input_layernorm.weight", 0, 0},
    {"transformer.h.#.ln_1.bias", MTI_LAYER "input_layernorm.bias", 0, 0},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_QUERY,
     MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_KEY,
     MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_VALUE,
     MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_QUERY, 0},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_KEY, 0},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_VALUE, 0},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.query.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.key.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.weight", MTI_LAYER "self_attention.value.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.query.bias", 0, 0},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.key.bias", 0, 0},
    {"transformer.h.#.attn.c_attn.bias", MTI_LAYER "self_attention.value.bias", 0, 0},
    {"transformer.h.#.attn.c_proj.weight", MTI_LAYER "self_attention.linear_proj.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.attn.c_proj.bias", MTI_LAYER "self_attention.linear_proj.bias", 0, 0},
    {"transformer.h.#.ln_2.weight", MTI_LAYER "pre_mlp_layernorm.weight", 0, 0},
    {"transformer.h.#.ln_2.bias", MTI_LAYER "pre_mlp_layernorm.bias", 0, 0},
    {"transformer.h.#.mlp.c_fc.weight", MTI_LAYER "mlp.linear_fc1.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.mlp.c_fc.bias", MTI_LAYER "mlp.linear_fc1.bias", 0, 0},
    {"transformer.h.#.mlp.c_proj.weight", MTI_LAYER "mlp.linear_fc2.weight", 0, MT_TENSOR_TRANSPOSED},
    {"transformer.h.#.mlp.c_proj.bias", MTI_LAYER "mlp.linear_fc2.bias", 0, 0},
    {"transformer.h.#.attn.bias", NULL, 0, 0}, /* the causal mask, in files of older versions */
    {"transformer.h.#.attn.masked_bias", NULL, 0, 0},
    {"lm_head.weight", "output_layer.weight", 0, 0},
    {"lm_head.weight", "embedding.word_embeddings.weight", 0, MT_TENSOR_COPY}};

static const mt_tensor_name mti_llama_names[] = {
    {"model.embed_tokens.weight", "embedding.word_embeddings.weight", 0, 0},
    {"model.norm.weight", "decoder.final_layernorm.weight", 0, 0},
    {"model.layers.#.input_layernorm.weight", MTI_LAYER "input_layernorm.weight", 0, 0},
    {"model.layers.#.self_attn.q_proj.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_QUERY, 0},
    {"model.layers.#.self_attn.k_proj.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_KEY, 0},
    {"model.layers.#.self_attn.v_proj.weight", MTI_LAYER "self_attention.linear_qkv.weight", MT_PART_VALUE, 0},
    {"model.layers.#.self_attn.q_proj.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_QUERY, 0},
    {"model.layers.#.self_attn.k_proj.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_KEY, 0},
    {"model.layers.#.self_attn.v_proj.bias", MTI_LAYER "self_attention.linear_qkv.bias", MT_PART_VALUE, 0},
    {"model.layers.#.self_attn.q_proj.weight", MTI_LAYER "self_attention.query.weight", MT_PART_QUERY, 0},
    {"model.layers.#.self_attn.k_proj.weight", MTI_LAYER "self_attention.key.weight", MT_PART_KEY, 0},
    {"model.layers.#.self_attn.v_proj.weight", MTI_LAYER "self_attention.value.weight", MT_PART_VALUE, 0},
    {"model.layers.#.self_attn.q_proj.bias", MTI_LAYER "self_attention.query.bias", MT_PART_QUERY, 0},
    {"model.layers.#.self_attn.k_proj.bias", MTI_LAYER "self_attention.key.bias", MT_PART_KEY, 0},
    {"model.layers.#.self_attn.v_proj.bias", MTI_LAYER "self_attention.value.bias", MT_PART_VALUE, 0},
    {"model.layers.#.self_attn.o_proj.weight", MTI_LAYER "self_attention.linear_proj.weight", 0, 0},
    {"model.layers.#.self_attn.o_proj.bias", MTI_LAYER "self_attention.linear_proj.bias", 0, 0},
    {"model.layers.#.post_attention_layernorm.weight", MTI_LAYER "pre_mlp_layernorm.weight", 0, 0},
    {"model.layers.#.mlp.gate_proj.weight", MTI_LAYER "mlp.linear_fc1.weight", MT_PART_GATE, 0},
    {"model.layers.#.mlp.up_proj.weight", MTI_LAYER "mlp.linear_fc1.weight", MT_PART_UP, 0},
    {"model.layers.#.mlp.gate_proj.bias", MTI_LAYER "mlp.linear_fc1.bias", MT_PART_GATE, 0},
    {"model.layers.#.mlp.up_proj.bias", MTI_LAYER "mlp.linear_fc1.bias", MT_PART_UP, 0},
    {"model.layers.#.mlp.down_proj.weight", MTI_LAYER "mlp.linear_fc2.weight", 0, 0},
    {"model.layers.#.mlp.down_proj.bias", MTI_LAYER "mlp.linear_fc2.bias", 0, 0},
    {"model.layers.#.self_attn.rotary_emb.inv_freq", NULL, 0, 0}, /* in files of older versions */
    {"lm_head.weight", "output_layer.weight", 0, 0},
    {"lm_head.weight", "embedding.word_embeddings.weight", 0, MT_TENSOR_COPY}};

#define MTI_BERT "bert.encoder.layer.#."
#define MTI_ENCODER "encoder.layers.#."
#define MTI_ATTENTION MTI_ENCODER "self_attention."

/* The last four rows are only for a BERT without a binary head. With MT_POST_LN the norms follow their blocks. */
static const mt_tensor_name mti_bert_names[] = {
    {"bert.embeddings.word_embeddings.weight", "embedding.word_embeddings.weight", 0, 0},
    {"bert.embeddings.position_embeddings.weight", "embedding.position_embeddings.weight", 0, 0},
    {"bert.embeddings.token_type_embeddings.weight", "embedding.tokentype_embeddings.weight", 0, 0},
    {"bert.embeddings.LayerNorm.weight", "embedding.layernorm.weight", 0, 0},
    {"bert.embeddings.LayerNorm.bias", "embedding.layernorm.bias", 0, 0},
    {MTI_BERT "attention.self.query.weight", MTI_ATTENTION "linear_qkv.weight", MT_PART_QUERY, 0},
    {MTI_BERT "attention.self.key.weight", MTI_ATTENTION "linear_qkv.weight", MT_PART_KEY, 0},
    {MTI_BERT "attention.self.value.weight", MTI_ATTENTION "linear_qkv.weight", MT_PART_VALUE, 0},
    {MTI_BERT "attention.self.query.bias", MTI_ATTENTION "linear_qkv.bias", MT_PART_QUERY, 0},
    {MTI_BERT "attention.self.key.bias", MTI_ATTENTION "linear_qkv.bias", MT_PART_KEY, 0},
    {MTI_BERT "attention.self.value.bias", MTI_ATTENTION "linear_qkv.bias", MT_PART_VALUE, 0},
    {MTI_BERT "attention.self.query.weight", MTI_ATTENTION "query.weight", 0, 0},
    {MTI_BERT "attention.self.key.weight", MTI_ATTENTION "key.weight", 0, 0},
    {MTI_BERT "attention.self.value.weight", MTI_ATTENTION "value.weight", 0, 0},
    {MTI_BERT "attention.self.query.bias", MTI_ATTENTION "query.bias", 0, 0},
    {MTI_BERT "attention.self.key.bias", MTI_ATTENTION "key.bias", 0, 0},
    {MTI_BERT "attention.self.value.bias", MTI_ATTENTION "value.bias", 0, 0},
    {MTI_BERT "attention.output.dense.weight", MTI_ATTENTION "linear_proj.weight", 0, 0},
    {MTI_BERT "attention.output.dense.bias", MTI_ATTENTION "linear_proj.bias", 0, 0},
    {MTI_BERT "attention.output.LayerNorm.weight", MTI_ENCODER "input_layernorm.weight", 0, 0},
    {MTI_BERT "attention.output.LayerNorm.bias", MTI_ENCODER "input_layernorm.bias", 0, 0},
    {MTI_BERT "intermediate.dense.weight", MTI_ENCODER "mlp.linear_fc1.weight", 0, 0},
    {MTI_BERT "intermediate.dense.bias", MTI_ENCODER "mlp.linear_fc1.bias", 0, 0},
    {MTI_BERT "output.dense.weight", MTI_ENCODER "mlp.linear_fc2.weight", 0, 0},
    {MTI_BERT "output.dense.bias", MTI_ENCODER "mlp.linear_fc2.bias", 0, 0},
    {MTI_BERT "output.LayerNorm.weight", MTI_ENCODER "pre_mlp_layernorm.weight", 0, 0},
    {MTI_BERT "output.LayerNorm.bias", MTI_ENCODER "pre_mlp_layernorm.bias", 0, 0},
    {"cls.predictions.transform.dense.weight", "lm_head.dense.weight", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.transform.dense.bias", "lm_head.dense.bias", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.transform.LayerNorm.weight", "lm_head.layer_norm.weight", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.transform.LayerNorm.bias", "lm_head.layer_norm.bias", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.bias", "output_layer.bias", 0, MT_TENSOR_OPTIONAL},
    {"cls.predictions.decoder.weight", "embedding.word_embeddings.weight", 0, MT_TENSOR_COPY},
    {"cls.predictions.decoder.bias", "output_layer.bias", 0, MT_TENSOR_COPY},
    {"bert.embeddings.position_ids", NULL, 0, 0}, /* in files of older versions */
    {"bert.pooler.dense.weight", "pooler.dense.weight", 0, MT_TENSOR_OPTIONAL},
    {"bert.pooler.dense.bias", "pooler.dense.bias", 0, MT_TENSOR_OPTIONAL},
    {"cls.seq_relationship.weight", "binary_head.weight", 0, MT_TENSOR_OPTIONAL},
    {"cls.seq_relationship.bias", "binary_head.bias", 0, MT_TENSOR_OPTIONAL},
    {"bert.pooler.dense.weight", NULL, 0, 0},
    {"bert.pooler.dense.bias", NULL, 0, 0},
    {"cls.seq_relationship.weight", NULL, 0, 0},
    {"cls.seq_relationship.bias", NULL, 0, 0}};

/* The tables with an untied head, and with a tied one. */
static const mt_tensor_table mti_gpt2_tables[] = {
    {mti_gpt2_names, MTI_LENGTH(mti_gpt2_names) - 1, "transformer.", NULL, 0},
    {mti_gpt2_names, MTI_LENGTH(mti_gpt2_names), "transformer.", NULL, 0}};
static const mt_tensor_table mti_llama_tables[] = {
    {mti_llama_names, MTI_LENGTH(mti_llama_names) - 1, "model.", NULL, 0},
    {mti_llama_names, MTI_LENGTH(mti_llama_names), "model.", NULL, 0}};

/* The tables with the binary head, and without it. */
static const mt_tensor_alias mti_bert_aliases[] = {{"LayerNorm.gamma", "LayerNorm.weight"},
                                                   {"LayerNorm.beta", "LayerNorm.bias"}};
static const mt_tensor_table mti_bert_tables[] = {
    {mti_bert_names, MTI_LENGTH(mti_bert_names) - 4, "bert.", mti_bert_aliases, 2},
    {mti_bert_names, MTI_LENGTH(mti_bert_names), "bert.", mti_bert_aliases, 2}};

/* Return 1 when the model is one of these, as the comments of mt_gpt_checkpoint_create and mt_bert_checkpoint_create
   define them. */
static int mti_is_gpt2(const mti_described *m) {
    const mt_transformer_layer_desc *l = &m->d.layer;
    return !m->is_bert && l->placement == MT_PRE_LN && l->norm == MT_LAYER_NORM && l->activation != MT_SWIGLU &&
           l->mask == MT_MASK_CAUSAL && l->rotary_base == 0.0f && l->kv_heads == l->heads && !l->no_bias;
}

static int mti_is_llama(const mti_described *m) {
    const mt_transformer_layer_desc *l = &m->d.layer;
    return !m->is_bert && l->placement == MT_PRE_LN && l->norm == MT_RMS_NORM && l->activation == MT_SWIGLU &&
           l->mask == MT_MASK_CAUSAL && l->rotary_base > 0.0f && l->rotary_dim == 0;
}

static int mti_is_bert(const mti_described *m) {
    const mt_transformer_layer_desc *l = &m->d.layer;
    return m->is_bert && l->placement == MT_POST_LN && l->norm == MT_LAYER_NORM && l->rotary_base == 0.0f &&
           l->kv_heads == l->heads && !l->no_bias;
}

/* Returns the table of a model of Hugging Face, or NULL for any other model. */
static const mt_tensor_table *mti_described_table(const mti_described *m) {
    if (m->d.layer.window > 0 || m->d.layer.softcap > 0.0f || m->d.layer.alibi) return NULL;
    if (mti_is_gpt2(m)) return &mti_gpt2_tables[!m->d.untied_head];
    if (mti_is_llama(m)) return &mti_llama_tables[!m->d.untied_head];
    return mti_is_bert(m) ? &mti_bert_tables[m->no_binary_head] : NULL;
}

/* ---- >>config: config.json --------------------------------------------------------------------------------------- */

#define MTI_CONFIG_BYTES ((size_t)1 << 20) /* as many as a checkpoint copies */

/* A config.json. */
typedef struct mti_config {
    mt_context *ctx;        /* NULL: without messages */
    const char *text;       /* a JSON object */
    char path[MT_PATH_MAX]; /* for messages */
} mti_config;

/* A whole number above 0 in config.json, which may also be there under another name. */
typedef struct mti_number {
    const char *name, *alias; /* alias NULL: there is no other name */
    int64_t most, missing;    /* missing: the number without this member; 0: the member may also be null */
    int64_t *out;
    int64_t given, also; /* what the file has under the two names; -1: nothing */
} mti_number;

static mt_status mti_config_fields(const mti_config *c, const mt_field *fields, int count) {
    return mt_json_parse(c->ctx, c->path, c->text, fields, count);
}

/* Finds a member of an object. */
static int mti_config_member(mt_json_part object, const char *name, mt_json_part *out) {
    char key[128];
    while (mt_json_next(&object, key, sizeof key, out))
        if (strcmp(key, name) == 0) return 1;
    return 0;
}

/* The places of a config.json: transformers nests the values of a language model that is a part of a larger one. */
static const char *const mti_config_places[] = {"", "text_config."};
enum { MTI_PLACES = MTI_LENGTH(mti_config_places) };

/* Finds a member of a place, which may be null. */
static int mti_config_find(const char *text, int place, const char *name, mt_json_part *out) {
    mt_json_part object;
    object.text = text;
    object.bytes = strlen(text);
    if (place == 1 && !mti_config_member(object, "text_config", &object)) return 0;
    return mti_config_member(object, name, out);
}

/* The same for a member that is not null. */
static int mti_config_at(const mti_config *c, int place, const char *name, mt_json_part *out) {
    return mti_config_find(c->text, place, name, out) && out->text[0] != 'n';
}

static mt_status mti_config_refuse(const mti_config *c, const char *name, const char *value, const char *wanted) {
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %s, must be %s", c->path, name, value, wanted);
}

static mt_status mti_config_refuse_text(const mti_config *c, const char *name, const char *value, const char *wanted) {
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is '%s', must be %s", c->path, name, value, wanted);
}

/* Takes the number that the file has. Of two different numbers transformers takes that of the alias; here they are
   refused. */
static mt_status mti_number_take(const mti_config *c, const mti_number *n) {
    int64_t x = n->given >= 0 ? n->given : n->also >= 0 ? n->also : n->missing;
    if (n->given >= 0 && n->also >= 0 && n->given != n->also)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %lld, but %s, another name of it, is %lld", c->path, n->name,
                       (long long)n->given, n->alias, (long long)n->also);
    *n->out = x;
    if (x <= n->most && (x > 0 || (n->given < 0 && n->also < 0))) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %lld, must be from 1 to %lld", c->path,
                   n->given >= 0 ? n->name : n->alias, (long long)x, (long long)n->most);
}

enum { MTI_CONFIG_FIELDS = 40 };

/* Reads numbers and fields, together at most MTI_CONFIG_FIELDS with the aliases. */
static mt_status mti_config_numbers(const mti_config *c, mti_number *numbers, int number_count, const mt_field *fields,
                                    int count) {
    mt_field all[MTI_CONFIG_FIELDS];
    int i, n = 0;
    memset(all, 0, sizeof all);
    for (i = 0; i < 2 * number_count; i++) {
        mti_number *number = &numbers[i / 2];
        if (i % 2 && !number->alias) continue;
        all[n].name = i % 2 ? number->alias : number->name;
        all[n].value = i % 2 ? &number->also : &number->given;
        all[n++].nullable = number->missing == 0;
    }
    for (i = 0; i < number_count; i++) numbers[i].given = numbers[i].also = -1;
    memcpy(all + n, fields, (size_t)count * sizeof *fields);
    MT_TRY(mti_config_fields(c, all, n + count));
    for (i = 0; i < number_count; i++) MT_TRY(mti_number_take(c, &numbers[i]));
    return MT_SUCCESS;
}

/* Refuses quantised weights: their files need other code than rounding. */
static mt_status mti_config_plain(const mti_config *c) {
    char method[2][64] = {"", ""};
    const mt_field fields[] = {
        {"quantization_config.quant_method", MT_FIELD_TEXT, method[0], 0, 0, 64, 0, 1},
        {"text_config.quantization_config.quant_method", MT_FIELD_TEXT, method[1], 0, 0, 64, 0, 1}};
    mt_json_part value;
    int i;
    MT_TRY(mti_config_fields(c, fields, MTI_PLACES));
    for (i = 0; i < MTI_PLACES; i++) {
        if (method[i][0])
            return mti_config_refuse_text(c, fields[i].name, method[i], "missing: weights are not quantised");
        if (mti_config_at(c, i, "quantization_config", &value))
            return mt_fail(c->ctx, MT_ERR_DATA,
                           "%s: has %squantization_config, must not have it: weights are not "
                           "quantised",
                           c->path, mti_config_places[i]);
    }
    return MT_SUCCESS;
}

/* A member of config.json that must have one value, because another one changes what the model computes. */
typedef struct mti_fixed {
    const char *name;
    int value, must_be;
} mti_fixed;

static mt_status mti_config_fixed(const mti_config *c, const mti_fixed *list, int count) {
    int i;
    for (i = 0; i < count; i++)
        if (list[i].value != list[i].must_be)
            return mti_config_refuse(c, list[i].name, list[i].value ? "true" : "false",
                                     list[i].must_be ? "true" : "false");
    return MT_SUCCESS;
}

/* Checks the epsilon of the norms. */
static mt_status mti_config_eps(const mti_config *c, const char *name, double eps) {
    if ((float)eps > 0 && eps < 1) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %g, must be above 0 and below 1", c->path, name, eps);
}

/* The names of activations in config.json. The first of each activation is written. */
static const struct {
    const char *name;
    mt_activation activation;
} mti_activations[] = {{"gelu_new", MT_GELU_TANH}, {"gelu_fast", MT_GELU_TANH}, {"gelu_pytorch_tanh", MT_GELU_TANH},
                       {"gelu", MT_GELU_ERF},      {"relu2", MT_SQUARED_RELU},  {"relu", MT_RELU},
                       {"tanh", MT_TANH},          {"silu", MT_SWIGLU},         {"swish", MT_SWIGLU}};

/* Returns the activation of this name, or -1. */
static int mti_activation_named(const char *name) {
    int i;
    for (i = 0; i < MTI_LENGTH(mti_activations); i++)
        if (strcmp(name, mti_activations[i].name) == 0) return (int)mti_activations[i].activation;
    return -1;
}

/* Finds the activation of a GPT-2 or a BERT, which have no gates. */
static mt_status mti_config_activation(const mti_config *c, const char *name, const char *value, mt_activation *out) {
    int found = mti_activation_named(value);
    if (found < 0 || found == MT_SWIGLU)
        return mti_config_refuse_text(c, name, value,
                                      "gelu_new, gelu_fast, gelu_pytorch_tanh, gelu, relu, relu2 or tanh");
    *out = (mt_activation)found;
    return MT_SUCCESS;
}

static const char *mti_activation_text(mt_activation activation) {
    int i = 0;
    while (mti_activations[i].activation != activation) i++;
    return mti_activations[i].name;
}

/* Reads the config.json of a GPT-2. Defaults and second names are those of transformers' GPT2Config.
   reorder_and_upcast_attn only changes how f16 is rounded. *out is zero. */
static mt_status mti_gpt2_read(const mti_config *c, mt_gpt_desc *out) {
    mt_transformer_layer_desc *l = &out->layer;
    double eps = 1e-5;
    char activation[64] = "gelu_new"; /* truncated when longer; every accepted value fits */
    int tied = 1;
    mti_fixed fixed[] = {
        {"scale_attn_weights", 1, 1}, {"scale_attn_by_inverse_layer_idx", 0, 0}, {"add_cross_attention", 0, 0}};
    mti_number numbers[] = {{"vocab_size", NULL, INT32_MAX, 50257, &out->vocab, 0, 0},
                            {"n_positions", "max_position_embeddings", INT32_MAX, 1024, &out->max_seq, 0, 0},
                            {"n_embd", "hidden_size", INT32_MAX, 768, &l->hidden, 0, 0},
                            {"n_layer", "num_hidden_layers", MTI_LAYERS_MAX, 12, &out->layers, 0, 0},
                            {"n_head", "num_attention_heads", INT32_MAX, 12, &l->heads, 0, 0},
                            {"n_inner", NULL, INT32_MAX, 0, &l->ffn, 0, 0}};
    const mt_field fields[] = {{"layer_norm_epsilon", MT_FIELD_F64, &eps, 0, 0, 0, 0, 0},
                               {"activation_function", MT_FIELD_TEXT, activation, 0, 0, sizeof activation, 0, 0},
                               {"tie_word_embeddings", MT_FIELD_BOOL, &tied, 0, 0, 0, 0, 0},
                               {fixed[0].name, MT_FIELD_BOOL, &fixed[0].value, 0, 0, 0, 0, 0},
                               {fixed[1].name, MT_FIELD_BOOL, &fixed[1].value, 0, 0, 0, 0, 0},
                               {fixed[2].name, MT_FIELD_BOOL, &fixed[2].value, 0, 0, 0, 0, 0}};
    MT_TRY(mti_config_numbers(c, numbers, MTI_LENGTH(numbers), fields, MTI_LENGTH(fields)));
    MT_TRY(mti_config_activation(c, "activation_function", activation, &l->activation));
    MT_TRY(mti_config_fixed(c, fixed, MTI_LENGTH(fixed)));
    MT_TRY(mti_config_eps(c, "layer_norm_epsilon", eps));
    if (!l->ffn && l->hidden > INT32_MAX / 4)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: n_embd is %lld, must be from 1 to %d without n_inner", c->path,
                       (long long)l->hidden, INT32_MAX / 4);
    if (l->hidden % l->heads != 0)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: n_embd is %lld, must be a multiple of n_head %lld", c->path,
                       (long long)l->hidden, (long long)l->heads);
    l->norm_eps = (float)eps;
    out->untied_head = !tied;
    return MT_SUCCESS;
}

/* ---- >>layer-types: the types of layers, and their rotary positions ---------------------------------------------- */

enum { MTI_TYPE_MAX = 64, MTI_TYPES_MAX = 16 }; /* bytes of the name of a type of layers; types in one object or list */

/* The types in layer_types of a place, each once. Layers and members may be many: a loop over both would take hours. */
typedef struct mti_types {
    char names[MTI_TYPES_MAX][MTI_TYPE_MAX]; /* truncated when longer; every accepted name fits */
    int count;
} mti_types;

/* Returns the list layer_types of a place, or nothing. */
static mt_json_part mti_layer_types(const mti_config *c, int place) {
    mt_json_part list;
    if (!mti_config_at(c, place, "layer_types", &list) || list.text[0] != '[') memset(&list, 0, sizeof list);
    return list;
}

static int mti_types_have(const mti_types *t, const char *type) {
    int i = 0;
    while (i < t->count && strcmp(t->names[i], type) != 0) i++;
    return i < t->count;
}

/* Lists the types of a place. */
static mt_status mti_types_read(const mti_config *c, int place, mti_types *out) {
    char name[MTI_TYPE_MAX];
    mt_json_part list = mti_layer_types(c, place), value;
    out->count = 0;
    while (mt_json_next(&list, name, sizeof name, &value)) {
        if (mti_types_have(out, name)) continue;
        if (out->count == MTI_TYPES_MAX)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %slayer_types has more than %d types of layers", c->path,
                           mti_config_places[place], MTI_TYPES_MAX);
        snprintf(out->names[out->count++], sizeof name, "%s", name);
    }
    return MT_SUCCESS;
}

/* Refuses layers of a type that the library does not have, and a window that is shorter than a text and that layers
   use: without layer_types all do. */
static mt_status mti_config_types(const mti_config *c, int place, const mti_described *m) {
    const char *at = mti_config_places[place];
    char name[MTI_TYPE_MAX], windowed[MTI_TYPE_MAX];
    mt_json_part list = mti_layer_types(c, place), value;
    int64_t window = -1, n = 0;
    mt_field field;
    memset(&field, 0, sizeof field);
    snprintf(windowed, sizeof windowed, "%ssliding_window", at);
    field.name = windowed;
    field.value = &window;
    field.nullable = 1;
    MT_TRY(mti_config_fields(c, &field, 1));
    if (!list.text && mti_config_at(c, place, "layer_types", &value))
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %slayer_types is no list", c->path, at);
    for (; mt_json_next(&list, name, sizeof name, &value); n++) {
        if (strcmp(name, "full_attention") == 0) continue;
        if (strcmp(name, "sliding_attention") != 0)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %slayer_types.%lld is '%s', must be full_attention", c->path, at,
                           (long long)n, name);
        if (window < m->d.max_seq)
            return mt_fail(c->ctx, MT_ERR_DATA,
                           "%s: %slayer_types.%lld is 'sliding_attention', must be full_attention, or %s at least the "
                           "number of positions %lld",
                           c->path, at, (long long)n, windowed, (long long)m->d.max_seq);
    }
    if (n > 0 && n != m->d.layers)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %slayer_types has %lld layers, the model has %lld", c->path, at,
                       (long long)n, (long long)m->d.layers);
    if (n > 0 || window < 0 || window >= m->d.max_seq) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA,
                   "%s: %s is %lld, must be null, missing or at least the number of positions %lld", c->path, windowed,
                   (long long)window, (long long)m->d.max_seq);
}

/* The base of the rotary positions, and the member of config.json that has it. "": none so far. */
typedef struct mti_rope {
    double theta;
    char name[192];
    mti_types types[MTI_PLACES]; /* of the layers */
} mti_rope;

/* Returns 1 when a layer may be of this type: no place has layer_types, or one of them has the type. */
static int mti_rope_has_type(const mti_rope *r, const char *type) {
    int i, any = 0;
    for (i = 0; i < MTI_PLACES; i++) {
        if (mti_types_have(&r->types[i], type)) return 1;
        if (r->types[i].count > 0) any = 1;
    }
    return !any;
}

/* The names of the base, and the type of layers that each is for. NULL: all. Gemma 3 and ModernBERT have the others. */
static const char *const mti_theta_names[][2] = {{"rope_theta", NULL},
                                                 {"global_rope_theta", "full_attention"},
                                                 {"local_rope_theta", "sliding_attention"},
                                                 {"rope_local_base_freq", "sliding_attention"}};
enum { MTI_THETAS = MTI_LENGTH(mti_theta_names), MTI_ROPE_FIELDS = MTI_THETAS + 4 };

/* Takes a base. All bases that layers of the model use must be equal. */
static mt_status mti_rope_theta(const mti_config *c, const char *name, double theta, mti_rope *r) {
    if (!((float)theta > 0 && theta <= FLT_MAX))
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %g, must be above 0, and a float", c->path, name, theta);
    if (r->name[0] && r->theta != theta)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %g, but %s is %g", c->path, name, theta, r->name, r->theta);
    r->theta = theta;
    snprintf(r->name, sizeof r->name, "%.191s", name);
    return MT_SUCCESS;
}

/* Reads the rotary positions that one object of the file has. `object` is its name and a dot, or "" for the file. A
   file or text_config itself (is_rope 0) has no type of positions. */
static mt_status mti_rope_read(const mti_config *c, const char *object, int is_rope, mti_rope *r) {
    static const char *const others[] = {"partial_rotary_factor", "factor", "rope_type", "type"};
    char names[MTI_ROPE_FIELDS][192], type[2][64] = {"default", "default"};
    double number[MTI_THETAS + 2];
    mt_field fields[MTI_ROPE_FIELDS];
    int i, count = is_rope ? MTI_ROPE_FIELDS : MTI_THETAS + 1;
    memset(fields, 0, sizeof fields);
    for (i = 0; i < MTI_ROPE_FIELDS; i++) {
        int is_text = i >= MTI_THETAS + 2;
        snprintf(names[i], sizeof names[i], "%s%s", object,
                 i < MTI_THETAS ? mti_theta_names[i][0] : others[i - MTI_THETAS]);
        fields[i].name = names[i];
        fields[i].kind = is_text ? MT_FIELD_TEXT : MT_FIELD_F64;
        fields[i].value = is_text ? (void *)type[i - MTI_THETAS - 2] : (void *)&number[i];
        fields[i].bytes = is_text ? sizeof type[0] : 0;
        fields[i].nullable = !is_text;
        if (!is_text) number[i] = i < MTI_THETAS ? -HUGE_VAL : 1; /* no number of JSON is infinite */
    }
    MT_TRY(mti_config_fields(c, fields, count));
    for (i = 0; i < 2; i++)
        if (strcmp(type[i], "default") != 0)
            return mti_config_refuse_text(c, names[MTI_THETAS + 2 + i], type[i],
                                          "'default' or missing: positions are not scaled");
    for (i = MTI_THETAS; i < MTI_THETAS + 2; i++)
        if (number[i] != 1)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %g, must be 1 or missing", c->path, names[i], number[i]);
    for (i = 0; i < MTI_THETAS; i++)
        if (number[i] != -HUGE_VAL && (!mti_theta_names[i][1] || mti_rope_has_type(r, mti_theta_names[i][1])))
            MT_TRY(mti_rope_theta(c, names[i], number[i], r));
    return MT_SUCCESS;
}

/* Reads rope_parameters or rope_scaling of a place. They may have an object for each type of layers; that of a type
   which no layer has does not count. */
static mt_status mti_rope_object(const mti_config *c, int place, const char *name, mti_rope *r) {
    char object[64], inner[160], type[MTI_TYPE_MAX];
    mt_json_part rope, rest, value;
    int types = 0, i;
    if (!mti_config_at(c, place, name, &rope)) return MT_SUCCESS;
    snprintf(object, sizeof object, "%s%s.", mti_config_places[place], name);
    MT_TRY(mti_rope_read(c, object, 1, r));
    for (rest = rope; mt_json_next(&rest, type, sizeof type, &value);) {
        if (value.text[0] != '{') continue;
        if (strlen(type) == sizeof type - 1 || ++types > MTI_TYPES_MAX)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s%s: at most %d types of layers with names of %d bytes are read",
                           c->path, object, type, MTI_TYPES_MAX, MTI_TYPE_MAX - 2);
        snprintf(inner, sizeof inner, "%s%s.", object, type);
        if (mti_rope_has_type(r, type)) MT_TRY(mti_rope_read(c, inner, 1, r));
    }
    for (i = 0; types > 0 && i < r->types[place].count; i++) {
        const char *used = r->types[place].names[i];
        if (!mti_config_member(rope, used, &value) || value.text[0] == 'n')
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s%s is missing, and layer_types has '%s'", c->path, object, used,
                           used);
    }
    return MT_SUCCESS;
}

/* Writes the base, which transformers 4 writes as rope_theta, and transformers 5 in rope_parameters. Refuses what this
   library's rotary positions cannot be: they are the same in all layers. */
static mt_status mti_llama_rope(const mti_config *c, float *base) {
    mti_rope r;
    int i;
    r.theta = 10000;
    r.name[0] = 0;
    for (i = 0; i < MTI_PLACES; i++) MT_TRY(mti_types_read(c, i, &r.types[i]));
    for (i = 0; i < MTI_PLACES; i++) {
        MT_TRY(mti_rope_object(c, i, "rope_parameters", &r));
        MT_TRY(mti_rope_read(c, mti_config_places[i], 0, &r));
        MT_TRY(mti_rope_object(c, i, "rope_scaling", &r));
    }
    *base = (float)r.theta;
    return MT_SUCCESS;
}

/* Checks how the numbers of a Llama fit together. */
static mt_status mti_llama_shape(const mti_config *c, const mt_gpt_desc *d, int64_t head_dim) {
    const mt_transformer_layer_desc *l = &d->layer;
    if (l->hidden % l->heads != 0)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: hidden_size is %lld, must be a multiple of num_attention_heads %lld",
                       c->path, (long long)l->hidden, (long long)l->heads);
    if (head_dim && head_dim != l->hidden / l->heads)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: head_dim is %lld, must be hidden_size / num_attention_heads, %lld",
                       c->path, (long long)head_dim, (long long)(l->hidden / l->heads));
    if (l->kv_heads && l->heads % l->kv_heads != 0)
        return mt_fail(c->ctx, MT_ERR_DATA,
                       "%s: num_key_value_heads is %lld, must be a divisor of num_attention_heads %lld", c->path,
                       (long long)l->kv_heads, (long long)l->heads);
    return MT_SUCCESS;
}

/* Reads the config.json of a Llama. Defaults are those of transformers' LlamaConfig. *out is zero. */
static mt_status mti_llama_read(const mti_config *c, mt_gpt_desc *out) {
    mt_transformer_layer_desc *l = &out->layer;
    double eps = 1e-6;
    int64_t head_dim = 0;
    int tied = 0, attention_bias = 0, mlp_bias = 0;
    char activation[64] = "silu"; /* truncated when longer; every accepted value fits */
    mti_number numbers[] = {{"vocab_size", NULL, INT32_MAX, 32000, &out->vocab, 0, 0},
                            {"max_position_embeddings", NULL, INT32_MAX, 2048, &out->max_seq, 0, 0},
                            {"hidden_size", NULL, INT32_MAX, 4096, &l->hidden, 0, 0},
                            {"num_hidden_layers", NULL, MTI_LAYERS_MAX, 32, &out->layers, 0, 0},
                            {"num_attention_heads", NULL, INT32_MAX, 32, &l->heads, 0, 0},
                            {"num_key_value_heads", NULL, INT32_MAX, 0, &l->kv_heads, 0, 0},
                            {"intermediate_size", NULL, INT32_MAX, 11008, &l->ffn, 0, 0},
                            {"head_dim", NULL, INT32_MAX, 0, &head_dim, 0, 0}};
    const mt_field fields[] = {{"rms_norm_eps", MT_FIELD_F64, &eps, 0, 0, 0, 0, 0},
                               {"hidden_act", MT_FIELD_TEXT, activation, 0, 0, sizeof activation, 0, 0},
                               {"tie_word_embeddings", MT_FIELD_BOOL, &tied, 0, 0, 0, 0, 0},
                               {"attention_bias", MT_FIELD_BOOL, &attention_bias, 0, 0, 0, 0, 0},
                               {"mlp_bias", MT_FIELD_BOOL, &mlp_bias, 0, 0, 0, 0, 0}};
    MT_TRY(mti_config_numbers(c, numbers, MTI_LENGTH(numbers), fields, MTI_LENGTH(fields)));
    if (mti_activation_named(activation) != MT_SWIGLU)
        return mti_config_refuse_text(c, "hidden_act", activation, "silu");
    MT_TRY(mti_llama_rope(c, &l->rotary_base));
    MT_TRY(mti_config_eps(c, "rms_norm_eps", eps));
    if (mlp_bias != attention_bias)
        return mti_config_refuse(c, "mlp_bias", mlp_bias ? "true" : "false",
                                 attention_bias ? "true, as attention_bias is" : "false, as attention_bias is");
    MT_TRY(mti_llama_shape(c, out, head_dim));
    l->norm = MT_RMS_NORM;
    l->activation = MT_SWIGLU;
    l->norm_eps = (float)eps;
    l->no_bias = !mlp_bias;
    out->untied_head = !tied;
    return MT_SUCCESS;
}

/* Reads the config.json of a BERT. Defaults are those of transformers' BertConfig. *out is zero. d.untied_head becomes
   1 for a head that is not tied, see mti_bert_tied. */
static mt_status mti_bert_read(const mti_config *c, mti_described *out) {
    mt_transformer_layer_desc *l = &out->d.layer;
    double eps = 1e-12;
    char activation[64] = "gelu", positions[64] = "absolute"; /* truncated when longer; accepted values fit */
    int tied = 1;
    mti_fixed fixed[] = {{"is_decoder", 0, 0}, {"add_cross_attention", 0, 0}};
    mti_number numbers[] = {{"vocab_size", NULL, INT32_MAX, 30522, &out->d.vocab, 0, 0},
                            {"max_position_embeddings", NULL, INT32_MAX, 512, &out->d.max_seq, 0, 0},
                            {"type_vocab_size", NULL, INT32_MAX, 2, &out->token_types, 0, 0},
                            {"hidden_size", NULL, INT32_MAX, 768, &l->hidden, 0, 0},
                            {"num_hidden_layers", NULL, MTI_LAYERS_MAX, 12, &out->d.layers, 0, 0},
                            {"num_attention_heads", NULL, INT32_MAX, 12, &l->heads, 0, 0},
                            {"intermediate_size", NULL, INT32_MAX, 3072, &l->ffn, 0, 0}};
    const mt_field fields[] = {{"layer_norm_eps", MT_FIELD_F64, &eps, 0, 0, 0, 0, 0},
                               {"hidden_act", MT_FIELD_TEXT, activation, 0, 0, sizeof activation, 0, 0},
                               {"position_embedding_type", MT_FIELD_TEXT, positions, 0, 0, sizeof positions, 0, 0},
                               {"tie_word_embeddings", MT_FIELD_BOOL, &tied, 0, 0, 0, 0, 0},
                               {fixed[0].name, MT_FIELD_BOOL, &fixed[0].value, 0, 0, 0, 0, 0},
                               {fixed[1].name, MT_FIELD_BOOL, &fixed[1].value, 0, 0, 0, 0, 0}};
    MT_TRY(mti_config_numbers(c, numbers, MTI_LENGTH(numbers), fields, MTI_LENGTH(fields)));
    if (strcmp(positions, "absolute") != 0)
        return mti_config_refuse_text(c, "position_embedding_type", positions, "absolute");
    MT_TRY(mti_config_activation(c, "hidden_act", activation, &l->activation));
    MT_TRY(mti_config_fixed(c, fixed, MTI_LENGTH(fixed)));
    MT_TRY(mti_config_eps(c, "layer_norm_eps", eps));
    if (l->hidden % l->heads != 0)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: hidden_size is %lld, must be a multiple of num_attention_heads %lld",
                       c->path, (long long)l->hidden, (long long)l->heads);
    l->placement = MT_POST_LN;
    l->norm_eps = (float)eps;
    out->d.untied_head = !tied;
    return MT_SUCCESS;
}

/* The beginnings of the names of classes of transformers, and their model_type. */
static const char *const mti_families[][2] = {{"GPT2", "gpt2"}, {"Llama", "llama"}, {"Bert", "bert"}};

/* Returns the model_type of a class such as BertForMaskedLM, or NULL for a class of another family. */
static const char *mti_family_of(const char *architecture) {
    static const char *const endings[] = {"Model", "LMHeadModel", "DoubleHeadsModel", "For"};
    int i, k;
    for (i = 0; i < MTI_LENGTH(mti_families); i++) {
        size_t n = strlen(mti_families[i][0]);
        for (k = 0; strncmp(architecture, mti_families[i][0], n) == 0 && k < MTI_LENGTH(endings); k++)
            if (strncmp(architecture + n, endings[k], strlen(endings[k])) == 0) return mti_families[i][1];
    }
    return NULL;
}

/* Writes the family of the model. Without a model_type it is that of the class in architectures. Without both, a BERT
   is a BERT, as for transformers' BertModel.from_pretrained, and a GPT may be of two families. */
static mt_status mti_config_family(const mti_config *c, int is_bert, char type[64]) {
    char architecture[64] = "";
    const char *family;
    const char *wanted = is_bert ? "a class of BERT" : "a class of GPT2 or Llama";
    const mt_field fields[] = {{"model_type", MT_FIELD_TEXT, type, 0, 0, 64, 0, 1},
                               {"architectures.0", MT_FIELD_TEXT, architecture, 0, 0, sizeof architecture, 0, 1}};
    type[0] = 0;
    MT_TRY(mti_config_fields(c, fields, 2));
    if (type[0]) return MT_SUCCESS;
    family = architecture[0] ? mti_family_of(architecture) : is_bert ? "bert" : NULL;
    if (family && is_bert == (strcmp(family, "bert") == 0)) {
        snprintf(type, 64, "%s", family);
        return MT_SUCCESS;
    }
    if (architecture[0]) return mti_config_refuse_text(c, "architectures", architecture, wanted);
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: has no model_type, must have gpt2 or llama, or %s in architectures",
                   c->path, wanted);
}

/* ---- >>config-values: values under several names or in several places -------------------------------------------- */

/* A value of the model. names[0] is its name in files of the family; the others are of other families, or NULL. */
typedef struct mti_same {
    const char *names[4];
    mt_field_kind kind; /* MT_FIELD_I64, MT_FIELD_F32 or MT_FIELD_BOOL */
    const void *value;
} mti_same;

/* Writes the value of a field for a message. */
static void mti_same_text(mt_field *f, void *value, char text[MT_FIELD_TEXT_MAX]) {
    float x = 0;
    f->value = value;
    mt_field_text(f, text);
    if (f->kind == MT_FIELD_BOOL) snprintf(text, MT_FIELD_TEXT_MAX, text[0] == '0' ? "false" : "true");
    if (f->kind != MT_FIELD_F32) return;
    memcpy(&x, value, sizeof x);
    snprintf(text, MT_FIELD_TEXT_MAX, "%.7g", (double)x);
}

/* Refuses another value under the name number k of `same` at a place. */
static mt_status mti_config_same(const mti_config *c, const mti_same *same, int k, int place) {
    char name[64], theirs[MT_FIELD_TEXT_MAX], ours[MT_FIELD_TEXT_MAX];
    int64_t value = 0, own = 0;
    mt_json_part part;
    mt_field field;
    if (!mti_config_at(c, place, same->names[k], &part)) return MT_SUCCESS;
    snprintf(name, sizeof name, "%s%s", mti_config_places[place], same->names[k]);
    memset(&field, 0, sizeof field);
    field.name = name;
    field.kind = same->kind;
    field.value = &value;
    MT_TRY(mti_config_fields(c, &field, 1));
    memcpy(&own, same->value, same->kind == MT_FIELD_I64 ? sizeof(int64_t) : sizeof(int));
    mti_same_text(&field, &value, theirs);
    mti_same_text(&field, &own, ours);
    if (strcmp(theirs, ours) == 0) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is %s, but %s%s is %s", c->path, name, theirs, same->names[0],
                   mti_config_at(c, 0, same->names[0], &part) ? "" : " (by default or another name)", ours);
}

/* Refuses other values of the model under any name that one of the families has, at every place. transformers reads
   only the names of its family, without a word about others. */
static mt_status mti_config_agree(const mti_config *c, const char *type, const mti_described *m) {
    const mt_transformer_layer_desc *l = &m->d.layer;
    int gpt2 = strcmp(type, "gpt2") == 0, tied = !m->d.untied_head, biases = !l->no_bias, i, k;
    int64_t head_dim = l->hidden / l->heads;
    const char *eps = gpt2 ? "layer_norm_epsilon" : m->is_bert ? "layer_norm_eps" : "rms_norm_eps";
    const mti_same list[] = {
        {{"vocab_size", NULL, NULL, NULL}, MT_FIELD_I64, &m->d.vocab},
        {{gpt2 ? "n_positions" : "max_position_embeddings", gpt2 ? "max_position_embeddings" : "n_positions", "n_ctx",
          NULL},
         MT_FIELD_I64,
         &m->d.max_seq},
        {{gpt2 ? "n_embd" : "hidden_size", gpt2 ? "hidden_size" : "n_embd", NULL, NULL}, MT_FIELD_I64, &l->hidden},
        {{gpt2 ? "n_layer" : "num_hidden_layers", gpt2 ? "num_hidden_layers" : "n_layer", NULL, NULL},
         MT_FIELD_I64,
         &m->d.layers},
        {{gpt2 ? "n_head" : "num_attention_heads", gpt2 ? "num_attention_heads" : "n_head", NULL, NULL},
         MT_FIELD_I64,
         &l->heads},
        {{gpt2 ? "n_inner" : "intermediate_size", gpt2 ? "intermediate_size" : "n_inner", NULL, NULL},
         MT_FIELD_I64,
         &l->ffn},
        {{"num_key_value_heads", NULL, NULL, NULL}, MT_FIELD_I64, &l->kv_heads},
        {{"head_dim", NULL, NULL, NULL}, MT_FIELD_I64, &head_dim},
        {{eps, "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"}, MT_FIELD_F32, &l->norm_eps},
        {{"tie_word_embeddings", NULL, NULL, NULL}, MT_FIELD_BOOL, &tied},
        {{"attention_bias", "mlp_bias", NULL, NULL}, MT_FIELD_BOOL, &biases},
        {{"type_vocab_size", NULL, NULL, NULL}, MT_FIELD_I64, &m->token_types}};
    int count = MTI_LENGTH(list) - !m->is_bert; /* a GPT has no token types */
    for (i = 0; i < count * 4; i++)
        for (k = 0; list[i / 4].names[i % 4] && k < MTI_PLACES; k++) MT_TRY(mti_config_same(c, &list[i / 4], i % 4, k));
    return MT_SUCCESS;
}

/* Reads a text of a place into text; "": the file does not have it. */
static mt_status mti_config_text(const mti_config *c, int place, const char *name, char path[64], char text[64]) {
    mt_field field;
    memset(&field, 0, sizeof field);
    snprintf(path, 64, "%s%s", mti_config_places[place], name);
    text[0] = 0;
    field.name = path;
    field.kind = MT_FIELD_TEXT;
    field.value = text;
    field.bytes = 64;
    field.nullable = 1;
    return mti_config_fields(c, &field, 1);
}

/* Refuses another activation than the model's under one of its names. */
static mt_status mti_config_activations(const mti_config *c, const char *type, const mti_described *m) {
    static const char *const names[] = {"activation_function", "hidden_act", "hidden_activation"};
    char path[64], text[64];
    int i;
    for (i = 0; i < MTI_LENGTH(names) * MTI_PLACES; i++) {
        MT_TRY(mti_config_text(c, i % MTI_PLACES, names[i / MTI_PLACES], path, text));
        if (text[0] && mti_activation_named(text) != (int)m->d.layer.activation)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is '%s', but %s is %s", c->path, path, text,
                           names[strcmp(type, "gpt2") != 0], mti_activation_text(m->d.layer.activation));
    }
    return MT_SUCCESS;
}

/* Refuses a class of another family than model_type. A class of no family says nothing: programs have their own. */
static mt_status mti_config_families(const mti_config *c, const char *type) {
    char name[64] = "", path[64];
    const mt_field field = {"architectures.0", MT_FIELD_TEXT, name, 0, 0, sizeof name, 0, 1};
    const char *family;
    MT_TRY(mti_config_fields(c, &field, 1));
    family = mti_family_of(name);
    if (family && strcmp(family, type) != 0)
        return mt_fail(c->ctx, MT_ERR_DATA, "%s: architectures is '%s', but model_type is '%s'", c->path, name, type);
    MT_TRY(mti_config_text(c, 1, "model_type", path, name));
    if (!name[0] || strcmp(name, type) == 0) return MT_SUCCESS;
    return mt_fail(c->ctx, MT_ERR_DATA, "%s: text_config.model_type is '%s', but model_type is '%s'", c->path, name,
                   type);
}

/* Refuses two types of weights. The library reads the type of each tensor from the files. */
static mt_status mti_config_dtypes(const mti_config *c) {
    static const char *const names[] = {"dtype", "torch_dtype"};
    char first[64] = "", first_path[64] = "", path[64], text[64];
    int i;
    for (i = 0; i < MTI_LENGTH(names) * MTI_PLACES; i++) {
        const char *type = text;
        MT_TRY(mti_config_text(c, i / 2, names[i % 2], path, text));
        if (strncmp(text, "torch.", 6) == 0) type += 6;
        if (first[0] && type[0] && strcmp(first, type) != 0)
            return mt_fail(c->ctx, MT_ERR_DATA, "%s: %s is '%s', but %s is '%s'", c->path, path, type, first_path,
                           first);
        if (first[0] || !type[0]) continue;
        snprintf(first, sizeof first, "%s", type);
        snprintf(first_path, sizeof first_path, "%s", path);
    }
    return MT_SUCCESS;
}

/* Reads the config.json of a GPT or, when out->is_bert is 1, of a BERT. */
static mt_status mti_config_read(const mti_config *c, mti_described *out) {
    char type[64];
    mti_described m;
    int place;
    memset(&m, 0, sizeof m);
    m.is_bert = out->is_bert;
    MT_TRY(mti_config_family(c, m.is_bert, type));
    if (m.is_bert && strcmp(type, "bert") == 0) MT_TRY(mti_bert_read(c, &m));
    else if (!m.is_bert && strcmp(type, "gpt2") == 0) MT_TRY(mti_gpt2_read(c, &m.d));
    else if (!m.is_bert && strcmp(type, "llama") == 0) MT_TRY(mti_llama_read(c, &m.d));
    else return mti_config_refuse_text(c, "model_type", type, m.is_bert ? "bert" : "gpt2 or llama");
    MT_TRY(mti_config_plain(c));
    mti_described_plain(&m);
    MT_TRY(mti_config_families(c, type));
    MT_TRY(mti_config_agree(c, type, &m));
    MT_TRY(mti_config_activations(c, type, &m));
    MT_TRY(mti_config_dtypes(c));
    for (place = 0; place < MTI_PLACES; place++) MT_TRY(mti_config_types(c, place, &m));
    *out = m;
    return MT_SUCCESS;
}

/* Reads DIRECTORY/config.json. *exists is 0, and *out unchanged, when there is no such file. */
static mt_status mti_config_open(mt_context *ctx, const char *directory, int *exists, mti_described *out) {
    mti_config c;
    char *text;
    mt_status status;
    memset(&c, 0, sizeof c);
    c.ctx = ctx;
    snprintf(c.path, sizeof c.path, "%.*s/config.json", MT_PATH_MAX - 16, directory);
    MT_TRY(mt_json_text(ctx, directory, "config.json", MTI_CONFIG_BYTES, &text, exists));
    c.text = text;
    status = text ? mti_config_read(&c, out) : MT_SUCCESS;
    mt_host_free(text);
    return status;
}

static const char *mti_float_text(float x, char *text) {
    mt_field f;
    memset(&f, 0, sizeof f);
    f.kind = MT_FIELD_F32;
    f.value = &x;
    mt_field_text(&f, text);
    return text;
}

/* Writes a config.json of a GPT-2. bos_token_id and eos_token_id are 50256 with GPT-2's vocabulary of 50257 tokens, and
   null with any other. */
static int mti_gpt2_write(const mt_gpt_desc *d, char *text, size_t bytes) {
    char eps[MT_FIELD_TEXT_MAX], embedding[MT_FIELD_TEXT_MAX], attention[MT_FIELD_TEXT_MAX], hidden[MT_FIELD_TEXT_MAX];
    int has_end = d->vocab == 50257;
    return snprintf(
        text, bytes,
        "{\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n"
        "  \"activation_function\": \"%s\",\n  \"vocab_size\": %lld,\n  \"n_positions\": %lld,\n"
        "  \"n_embd\": %lld,\n  \"n_layer\": %lld,\n  \"n_head\": %lld,\n  \"n_inner\": %lld,\n"
        "  \"layer_norm_epsilon\": %s,\n  \"embd_pdrop\": %s,\n  \"attn_pdrop\": %s,\n"
        "  \"resid_pdrop\": %s,\n  \"bos_token_id\": %s,\n  \"eos_token_id\": %s,\n"
        "  \"tie_word_embeddings\": %s\n}\n",
        mti_activation_text(d->layer.activation), (long long)d->vocab, (long long)d->max_seq,
        (long long)d->layer.hidden, (long long)d->layers, (long long)d->layer.heads, (long long)d->layer.ffn,
        mti_float_text(d->layer.norm_eps, eps), mti_float_text(d->embedding_dropout, embedding),
        mti_float_text(d->layer.attention_dropout, attention), mti_float_text(d->layer.hidden_dropout, hidden),
        has_end ? "50256" : "null", has_end ? "50256" : "null", d->untied_head ? "false" : "true");
}

/* Writes a config.json of a Llama. The token ids are null, because the library does not know them. */
static int mti_llama_write(const mt_gpt_desc *d, char *text, size_t bytes) {
    char eps[MT_FIELD_TEXT_MAX], theta[MT_FIELD_TEXT_MAX], attention[MT_FIELD_TEXT_MAX];
    const char *biases = d->layer.no_bias ? "false" : "true";
    mti_float_text(d->layer.rotary_base, theta);
    return snprintf(text, bytes,
                    "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\",\n"
                    "  \"hidden_act\": \"silu\",\n  \"vocab_size\": %lld,\n  \"max_position_embeddings\": %lld,\n"
                    "  \"hidden_size\": %lld,\n  \"num_hidden_layers\": %lld,\n  \"num_attention_heads\": %lld,\n"
                    "  \"num_key_value_heads\": %lld,\n  \"head_dim\": %lld,\n  \"intermediate_size\": %lld,\n"
                    "  \"rms_norm_eps\": %s,\n  \"rope_theta\": %s,\n"
                    "  \"rope_parameters\": {\"rope_theta\": %s, \"rope_type\": \"default\"},\n"
                    "  \"attention_bias\": %s,\n  \"mlp_bias\": %s,\n  \"attention_dropout\": %s,\n"
                    "  \"bos_token_id\": null,\n  \"eos_token_id\": null,\n  \"tie_word_embeddings\": %s\n}\n",
                    (long long)d->vocab, (long long)d->max_seq, (long long)d->layer.hidden, (long long)d->layers,
                    (long long)d->layer.heads, (long long)d->layer.kv_heads,
                    (long long)(d->layer.hidden / d->layer.heads), (long long)d->layer.ffn,
                    mti_float_text(d->layer.norm_eps, eps), theta, theta, biases, biases,
                    mti_float_text(d->layer.attention_dropout, attention), d->untied_head ? "false" : "true");
}

/* Writes a config.json of a BERT of the class `head`. */
static int mti_bert_write(const mti_described *m, const char *head, char *text, size_t bytes) {
    char eps[MT_FIELD_TEXT_MAX], attention[MT_FIELD_TEXT_MAX], hidden[MT_FIELD_TEXT_MAX];
    return snprintf(text, bytes,
                    "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"bert\",\n  \"hidden_act\": \"%s\",\n"
                    "  \"vocab_size\": %lld,\n  \"max_position_embeddings\": %lld,\n  \"type_vocab_size\": %lld,\n"
                    "  \"hidden_size\": %lld,\n  \"num_hidden_layers\": %lld,\n  \"num_attention_heads\": %lld,\n"
                    "  \"intermediate_size\": %lld,\n  \"layer_norm_eps\": %s,\n"
                    "  \"attention_probs_dropout_prob\": %s,\n  \"hidden_dropout_prob\": %s,\n"
                    "  \"pad_token_id\": null,\n  \"tie_word_embeddings\": true\n}\n",
                    head, mti_activation_text(m->d.layer.activation), (long long)m->d.vocab, (long long)m->d.max_seq,
                    (long long)m->token_types, (long long)m->d.layer.hidden, (long long)m->d.layers,
                    (long long)m->d.layer.heads, (long long)m->d.layer.ffn, mti_float_text(m->d.layer.norm_eps, eps),
                    mti_float_text(m->d.layer.attention_dropout, attention),
                    mti_float_text(m->d.layer.hidden_dropout, hidden));
}

/* Replaces the value of a member at each place that has it. The text has room for it. */
static void mti_config_set(char *text, const char *name, const char *value) {
    size_t n = strlen(value);
    mt_json_part part;
    int i;
    for (i = 0; i < MTI_PLACES; i++) {
        char *from;
        if (!mti_config_find(text, i, name, &part)) continue;
        from = text + (part.text - text);
        memmove(from + n, from + part.bytes, strlen(from + part.bytes) + 1);
        memcpy(from, value, n);
    }
}

/* Returns 1 when the member of the object in text contains a word. */
static int mti_config_has(const char *text, const char *name, const char *word) {
    mt_json_part part;
    const char *at = mti_config_find(text, 0, name, &part) ? strstr(part.text, word) : NULL;
    return at && at < part.text + part.bytes;
}

/* Adds a member to the object in text, as the first one, if it does not have the member. The text has room for it. */
static void mti_config_add(char *text, const char *name, const char *value) {
    char member[64], *begin = strchr(text, '{');
    mt_json_part part;
    size_t n;
    if (!begin || mti_config_find(text, 0, name, &part)) return;
    begin++;
    snprintf(member, sizeof member, "\n  \"%s\": \"%s\"%s", name, value,
             begin[strspn(begin, " \t\r\n")] == '}' ? "" : ",");
    n = strlen(member);
    memmove(begin + n, begin, strlen(begin) + 1);
    memcpy(begin, member, n);
}

/* Copies a config.json that describes the same model, with the type that the files have and the head that they have
   names for. max_seq is the number of positions; 0: as it is. Returns the length of the text. */
static int mti_config_keep(const char *given, int64_t max_seq, mt_dtype dtype, const char *head, char *text,
                           size_t bytes) {
    const char *type = dtype == MT_BF16 ? "\"bfloat16\"" : dtype == MT_F16 ? "\"float16\"" : "\"float32\"";
    static const char *const positions[] = {"max_position_embeddings", "n_positions", "n_ctx"};
    char value[64];
    int i;
    if (strlen(given) + 512 > bytes) return (int)strlen(given) + 512;
    memcpy(text, given, strlen(given) + 1);
    mti_config_set(text, "dtype", type);
    mti_config_set(text, "torch_dtype", type);
    snprintf(value, sizeof value, "[\"%s\"]", head);
    if (!mti_config_has(text, "architectures", head)) mti_config_set(text, "architectures", value);
    snprintf(value, sizeof value, "%lld", (long long)max_seq);
    for (i = 0; max_seq > 0 && i < MTI_LENGTH(positions); i++) mti_config_set(text, positions[i], value);
    mti_config_add(text, "model_type", mti_family_of(head));
    if (strncmp(head, "Bert", 4) == 0) mti_config_set(text, "tie_word_embeddings", "true");
    return (int)strlen(text);
}

/* The layout of QKV and the form of rotary positions in a file of Hugging Face are converted to those of the model. */
static void mti_described_adopt(mti_described *theirs, const mti_described *ours) {
    if (!mti_described_table(ours)) return;
    theirs->d.layer.qkv_layout = ours->d.layer.qkv_layout;
    theirs->d.layer.rotary_form = ours->d.layer.rotary_form;
}

/* Returns 1 when the text of a config.json describes the model. *theirs becomes what it describes. */
static int mti_config_is_of(const char *text, const mti_described *m, mti_described *theirs) {
    mti_described ours = *m;
    mti_config c;
    if (!text) return 0;
    *theirs = *m;
    memset(&c, 0, sizeof c);
    c.text = text;
    if (mti_config_read(&c, theirs) != MT_SUCCESS) return 0;
    mti_described_adopt(theirs, m);
    return mti_described_differ(theirs, &ours) < 0;
}

/* Writes the text of config.json. dtype is the type of the parameters. A kept text that no longer says one thing, for
   example because of a window that is shorter than the new number of positions, is written anew. */
static int mti_described_config(mti_described *m, mt_dtype dtype, const char *given, char *text, size_t bytes) {
    const char *head = mti_is_llama(m) ? "LlamaForCausalLM" : "GPT2LMHeadModel";
    mti_described theirs = *m;
    if (!mti_described_table(m)) return 0;
    if (m->is_bert) head = m->no_binary_head ? "BertForMaskedLM" : "BertForPreTraining";
    if (mti_config_is_of(given, m, &theirs)) {
        int length =
            mti_config_keep(given, theirs.d.max_seq == m->d.max_seq ? 0 : m->d.max_seq, dtype, head, text, bytes);
        if (length >= (int)bytes || mti_config_is_of(text, m, &theirs)) return length;
    }
    if (m->is_bert) return mti_bert_write(m, head, text, bytes);
    return mti_is_llama(m) ? mti_llama_write(&m->d, text, bytes) : mti_gpt2_write(&m->d, text, bytes);
}

static int mti_gpt_config(const void *model, const char *given, char *text, size_t bytes) {
    const mt_gpt *gpt = (const mt_gpt *)model;
    mti_described m = mti_describe_gpt(&gpt->desc);
    return mti_described_config(&m, gpt->model.tokens.weight->value.dtype, given, text, bytes);
}

static int mti_bert_config(const void *model, const char *given, char *text, size_t bytes) {
    const mt_bert *bert = (const mt_bert *)model;
    mti_described m = mti_describe_bert(&bert->desc);
    return mti_described_config(&m, bert->model.tokens.weight->value.dtype, given, text, bytes);
}

/* Copies the config.json of a model with a table of the program. */
static int mti_given_config(const void *model, const char *given, char *text, size_t bytes) {
    (void)model;
    return given ? snprintf(text, bytes, "%s", given) : 0;
}

/* ---- >>metadata -------------------------------------------------------------------------------------------------- */

/* Returns 1 for the text of the integer 0 or of the float 0. */
static int mti_is_zero_text(const char *text) {
    text += strspn(text, "0.");
    return *text == 0 || *text == 'e';
}

static const char *mti_described_metadata(mti_described *m, int index, char *value) {
    mt_field f;
    int i, n = 0;
    for (i = 0; i < MTI_LENGTH(mti_fields); i++) {
        if (!mti_described_field(m, i, &f)) continue;
        mt_field_text(&f, value);
        if (mti_fields[i].optional && mti_is_zero_text(value)) continue;
        if (n++ == index) return f.name;
    }
    return NULL;
}

static const char *mti_gpt_metadata(const void *model, int index, char *value) {
    mti_described m = mti_describe_gpt(&((const mt_gpt *)model)->desc);
    return mti_described_metadata(&m, index, value);
}

static const char *mti_bert_metadata(const void *model, int index, char *value) {
    mti_described m = mti_describe_bert(&((const mt_bert *)model)->desc);
    return mti_described_metadata(&m, index, value);
}

/* Returns 1 when the metadata describe a model. */
static int mti_described_has(const mt_safetensors_set *files, int is_bert) {
    return mt_safetensors_metadata(mt_safetensors_set_file(files, 0), is_bert ? "bert.vocab" : "gpt.vocab") != NULL;
}

/* Reads the fields from the metadata of a file. Only is_bert of *out is set. */
static mt_status mti_described_read(mt_context *ctx, const mt_safetensors *file, mti_described *out) {
    mt_field f;
    float x;
    int i;
    for (i = 0; i < MTI_LENGTH(mti_fields); i++) {
        if (!mti_described_field(out, i, &f)) continue;
        if (mti_fields[i].optional && !mt_safetensors_metadata(file, f.name)) continue;
        MT_TRY(mt_safetensors_fields(ctx, file, &f, 1));
    }
    for (i = 0; i < MTI_LENGTH(mti_fields); i++) {
        if (!mti_described_field(out, i, &f) || f.kind != MT_FIELD_F32) continue;
        memcpy(&x, f.value, sizeof x);
        if (!(x >= 0.0f) || (f.low && x == 0.0f))
            return mt_safetensors_refuse(ctx, file, f.name, f.low ? "above 0" : "at least 0");
    }
    return MT_SUCCESS;
}

/* The head of a BERT is tied. An encoder has no head, so it does not matter what its config.json says; and a head that
   is not tied may have the same weight, which import compares. */
static mt_status mti_bert_tied(mt_context *ctx, const char *directory, const mt_safetensors_set *files,
                               mti_described *m) {
    int has_head = mt_safetensors_set_find(files, "cls.predictions.transform.dense.weight") != NULL;
    int has_weight = mt_safetensors_set_find(files, "cls.predictions.decoder.weight") != NULL;
    if (m->d.untied_head && has_head && !has_weight)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s/config.json: tie_word_embeddings is false, must be true: the files have no "
                       "cls.predictions.decoder.weight",
                       directory);
    m->d.untied_head = 0;
    return MT_SUCCESS;
}

/* Reads the model from the metadata of the first file or, when the metadata has none, from config.json. *known is 0
   when neither has one. What the config.json of a BERT does not tell is in the tensors. */
static mt_status mti_described_source(mt_context *ctx, const char *directory, const mt_safetensors_set *files,
                                      int is_bert, int *known, mti_described *out) {
    memset(out, 0, sizeof *out);
    out->is_bert = is_bert;
    *known = 1;
    if (mti_described_has(files, is_bert)) return mti_described_read(ctx, mt_safetensors_set_file(files, 0), out);
    MT_TRY(mti_config_open(ctx, directory, known, out));
    if (!is_bert) return MT_SUCCESS;
    out->no_binary_head = !mt_safetensors_set_find(files, "cls.seq_relationship.weight");
    return mti_bert_tied(ctx, directory, files, out);
}

/* Writes the value of a field, in words if it has some. */
static const char *mti_described_value(mti_described *m, int i, char text[MT_FIELD_TEXT_MAX]) {
    mt_field f;
    int value = 0;
    mti_described_field(m, i, &f);
    mt_field_text(&f, text);
    if (!mti_fields[i].words) return text;
    memcpy(&value, f.value, sizeof value);
    mt_enum_word(mti_fields[i].words, value, text);
    return text;
}

/* -- tensors that are no parameters: transformers computes their values anew, and does not read them -- */

/* A constant that files of transformers may have: the end of its name, and what it is. */
typedef enum mti_known_constant {
    MTI_MASK,
    MTI_MASK_VALUE,
    MTI_FREQUENCIES,
    MTI_POSITIONS,
    MTI_CONSTANTS
} mti_known_constant;
static const char *const mti_constants[][2] = {{".attn.bias", "the causal mask"},
                                               {".attn.masked_bias", "-10000 or less"},
                                               {".rotary_emb.inv_freq", "the frequencies of rope_theta"},
                                               {"embeddings.position_ids", "0, 1, 2, ..."}};

static int mti_ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* Returns element i of the bytes of a tensor, or NAN for a type that no constant has. */
static double mti_constant_element(const char *dtype, const unsigned char *bytes, int64_t i) {
    int64_t whole;
    double wide;
    uint16_t bits;
    float x;
    if (strcmp(dtype, "BOOL") == 0 || strcmp(dtype, "U8") == 0) return bytes[i];
    memcpy(&wide, bytes + 8 * i, sizeof wide);
    memcpy(&whole, bytes + 8 * i, sizeof whole);
    if (strcmp(dtype, "I64") == 0) return (double)whole;
    if (strcmp(dtype, "F64") == 0) return wide;
    memcpy(&x, bytes + 4 * i, sizeof x);
    if (strcmp(dtype, "F32") == 0) return (double)x;
    memcpy(&bits, bytes + 2 * i, sizeof bits);
    if (strcmp(dtype, "BF16") != 0 && strcmp(dtype, "F16") != 0) return NAN;
    mt_f32_from_16bit(strcmp(dtype, "BF16") == 0 ? MT_BF16 : MT_F16, &bits, &x, 1);
    return (double)x;
}

/* Returns 1 when x is the constant's element i in a tensor whose last size is n. Frequencies may have been rounded to
   16 bits. */
static int mti_constant_is(const mti_described *m, mti_known_constant which, int64_t i, int64_t n, double x) {
    double frequency = which == MTI_FREQUENCIES ? pow((double)m->d.layer.rotary_base, -(double)i / (double)n) : 0;
    if (which == MTI_MASK) return x == (i % n <= i / n % n);
    if (which == MTI_MASK_VALUE) return x <= -9900; /* -10000 in bf16 is -9984 */
    if (which == MTI_FREQUENCIES) return fabs(x - frequency) <= 0.01 * frequency + 1e-7;
    return x == (double)(i % n);
}

/* Checks the shape of a constant. */
static int mti_constant_fits(const mti_described *m, mti_known_constant which, const mt_safetensors_tensor *t) {
    int64_t n = t->dims > 0 ? t->shape[t->dims - 1] : 1;
    if (which == MTI_MASK) return t->dims >= 2 && t->shape[t->dims - 2] == n;
    return which != MTI_FREQUENCIES || (t->dims == 1 && 2 * n == m->d.layer.hidden / m->d.layer.heads);
}

/* Writes whether a tensor has the values of a constant to *is. */
static mt_status mti_constant_read(mt_context *ctx, const mti_described *m, mti_known_constant which,
                                   const mt_safetensors_tensor *t, int *is) {
    enum { MTI_BLOCK_BYTES = 8192 };
    unsigned char block[MTI_BLOCK_BYTES + 8]; /* mti_constant_element reads 8 bytes of each element */
    int64_t elements = 1, size, per, i, k, last = t->dims > 0 ? t->shape[t->dims - 1] : 1;
    int d;
    for (d = 0; d < t->dims; d++) elements *= t->shape[d];
    *is = mti_constant_fits(m, which, t);
    if (!*is || elements == 0) return MT_SUCCESS;
    size = t->bytes / elements;
    per = size > 0 ? MTI_BLOCK_BYTES / 8 : 0;
    memset(block, 0, sizeof block);
    for (i = 0; i < elements && *is; i += per) {
        int64_t n = mt_min(per, elements - i);
        MT_TRY(mt_safetensors_read_bytes(ctx, t, i * size, n * size, block));
        for (k = 0; k < n && *is; k++)
            *is = mti_constant_is(m, which, i + k, last, mti_constant_element(t->dtype, block, k));
    }
    return MT_SUCCESS;
}

/* Warns of a constant with other values than transformers computes, because they are not used. */
static mt_status mti_constant_check(mt_context *ctx, const mti_described *m, const char *directory,
                                    const mt_safetensors_tensor *t) {
    char text[MT_PATH_MAX + 512];
    int which = 0, is = 1;
    while (which < MTI_CONSTANTS && !mti_ends_with(t->name, mti_constants[which][0])) which++;
    if (which < MTI_CONSTANTS) MT_TRY(mti_constant_read(ctx, m, (mti_known_constant)which, t, &is));
    if (is) return MT_SUCCESS;
    snprintf(text, sizeof text, "%s: '%.200s' is not %s; it is not used", directory, t->name, mti_constants[which][1]);
    mt_log(ctx, MT_LOG_WARNING, text);
    return MT_SUCCESS;
}

/* Returns 1 for a tensor of the pooler or of sentence order. */
static int mti_is_binary(const char *name) {
    return mti_ends_with(name, "pooler.dense.weight") || mti_ends_with(name, "pooler.dense.bias") ||
           strncmp(name, "cls.seq_relationship.", 21) == 0;
}

/* Looks at the tensors of files of transformers that are no parameters of the model. */
static mt_status mti_unused_check(mt_context *ctx, const mti_described *m, const char *directory,
                                  const mt_safetensors_set *files) {
    char text[MT_PATH_MAX + 512];
    const mt_safetensors *file;
    int f, i, unused = 0;
    text[0] = 0;
    for (f = 0; (file = mt_safetensors_set_file(files, f)) != NULL; f++)
        for (i = 0; i < mt_safetensors_count(file); i++) {
            const mt_safetensors_tensor *t = mt_safetensors_at(file, i);
            MT_TRY(mti_constant_check(ctx, m, directory, t));
            if (!m->is_bert || !m->no_binary_head || !mti_is_binary(t->name)) continue;
            if (unused++ == 0)
                snprintf(text, sizeof text,
                         "%s: '%.200s' is not used, because the model has no_binary_head; nor are the other tensors of "
                         "the pooler and of sentence order",
                         directory, t->name);
        }
    if (unused) mt_log(ctx, MT_LOG_WARNING, text);
    return MT_SUCCESS;
}

/* Returns MT_ERR_DATA when the files describe another model. */
static mt_status mti_described_check(mt_context *ctx, mti_described *ours, const mt_grid *grid, const char *directory,
                                     const mt_safetensors_set *files) {
    char their_text[MT_FIELD_TEXT_MAX], our_text[MT_FIELD_TEXT_MAX];
    mti_described theirs;
    mt_field f;
    int known, i;
    MT_TRY(mti_described_source(ctx, directory, files, ours->is_bert, &known, &theirs));
    if (!mti_described_has(files, ours->is_bert)) mti_described_adopt(&theirs, ours);
    i = known ? mti_described_differ(&theirs, ours) : -1;
    if (i < 0) return mt_comm_rank(grid->world) == 0 ? mti_unused_check(ctx, ours, directory, files) : MT_SUCCESS;
    mti_described_field(ours, i, &f);
    return mt_fail(ctx, MT_ERR_DATA, "%s: its model has %s %s, this one %s", directory, strchr(f.name, '.') + 1,
                   mti_described_value(&theirs, i, their_text), mti_described_value(ours, i, our_text));
}

static mt_status mti_gpt_check(mt_context *ctx, const void *model, const char *directory,
                               const mt_safetensors_set *files) {
    const mt_gpt *gpt = (const mt_gpt *)model;
    mti_described ours = mti_describe_gpt(&gpt->desc);
    return mti_described_check(ctx, &ours, gpt->model.grid, directory, files);
}

static mt_status mti_bert_check(mt_context *ctx, const void *model, const char *directory,
                                const mt_safetensors_set *files) {
    const mt_bert *bert = (const mt_bert *)model;
    mti_described ours = mti_describe_bert(&bert->desc);
    return mti_described_check(ctx, &ours, bert->model.grid, directory, files);
}

/* The same with a table of the program: only metadata describe the model. */
static mt_status mti_gpt_other_check(mt_context *ctx, const void *model, const char *directory,
                                     const mt_safetensors_set *files) {
    return mti_described_has(files, 0) ? mti_gpt_check(ctx, model, directory, files) : MT_SUCCESS;
}

static mt_status mti_bert_other_check(mt_context *ctx, const void *model, const char *directory,
                                      const mt_safetensors_set *files) {
    return mti_described_has(files, 1) ? mti_bert_check(ctx, model, directory, files) : MT_SUCCESS;
}

/* Without a table of the program, and with one. */
static const mt_checkpoint_format mti_gpt_formats[] = {
    {mti_gpt_metadata, mti_gpt_config, mti_gpt_check, mti_gpt_part},
    {mti_gpt_metadata, mti_given_config, mti_gpt_other_check, mti_gpt_part}};
static const mt_checkpoint_format mti_bert_formats[] = {
    {mti_bert_metadata, mti_bert_config, mti_bert_check, mti_bert_part},
    {mti_bert_metadata, mti_given_config, mti_bert_other_check, mti_bert_part}};

/* Part 0 is all of a parameter. */
#define MTI_PART_WORDS                                                                                                 \
    "0 MT_PART_QUERY MT_PART_KEY MT_PART_VALUE MT_PART_QUERY_PAIRS MT_PART_KEY_PAIRS MT_PART_GATE MT_PART_UP"

/* Checks the parts of a table of the program. mt_checkpoint_create checks the rest of it. */
static mt_status mti_model_parts_check(mt_context *ctx, const char *function, const mt_tensor_table *table) {
    char field[48];
    int i;
    for (i = 0; table->names && i < table->count; i++) {
        if (!table->names[i].param) continue;
        snprintf(field, sizeof field, "table.names[%d].part", i);
        MT_TRY(mt_check_enum(ctx, function, table->names[i].param, field, table->names[i].part, MTI_PART_WORDS));
    }
    return MT_SUCCESS;
}

/* Checks the arguments. */
static mt_status mti_model_checkpoint_check(mt_context *ctx, const char *function, const mt_params *params,
                                            const mt_language_model *model, const mt_checkpoint_desc *desc) {
    const mt_param *weight = model->layers ? model->layers[0].attention.proj.weight : NULL; /* every stage has it */
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", function);
    if (!weight) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the model was not created", function);
    if (mt_params_find(params, weight->name) != weight)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the model is not of this registry", function);
    if (desc->format || desc->model)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc.%s is set, the model has its own", function,
                       desc->format ? "format" : "model");
    return desc->table ? mti_model_parts_check(ctx, function, desc->table) : MT_SUCCESS;
}

MT_API mt_status mt_gpt_checkpoint_create(mt_context *ctx, mt_params *params, const mt_gpt *gpt,
                                          const mt_checkpoint_desc *desc, mt_checkpoint **out) {
    static const char *const function = "mt_gpt_checkpoint_create";
    mt_checkpoint_desc d;
    mti_described m;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!gpt) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: gpt is NULL", function);
    MT_TRY(mti_model_checkpoint_check(ctx, function, params, &gpt->model, desc));
    m = mti_describe_gpt(&gpt->desc);
    d = *desc;
    d.format = &mti_gpt_formats[desc->table != NULL];
    if (!desc->table) d.table = mti_described_table(&m);
    d.model = gpt;
    return mt_checkpoint_create(ctx, params, &d, out);
}

MT_API mt_status mt_bert_checkpoint_create(mt_context *ctx, mt_params *params, const mt_bert *bert,
                                           const mt_checkpoint_desc *desc, mt_checkpoint **out) {
    static const char *const function = "mt_bert_checkpoint_create";
    mt_checkpoint_desc d;
    mti_described m;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!bert) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: bert is NULL", function);
    MT_TRY(mti_model_checkpoint_check(ctx, function, params, &bert->model, desc));
    m = mti_describe_bert(&bert->desc);
    d = *desc;
    d.format = &mti_bert_formats[desc->table != NULL];
    if (!desc->table) d.table = mti_described_table(&m);
    d.model = bert;
    return mt_checkpoint_create(ctx, params, &d, out);
}

static mt_status mti_desc_read(mt_context *ctx, const char *function, const char *directory, const void *out,
                               int is_bert, mti_described *theirs) {
    mt_safetensors_set *files;
    mt_status status;
    int known;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, directory ? "out" : "directory");
    MT_TRY(mt_safetensors_set_open(ctx, directory, "model", &files));
    status = mti_described_source(ctx, directory, files, is_bert, &known, theirs);
    mt_safetensors_set_close(files);
    if (status != MT_SUCCESS || known) return status;
    return mt_fail(ctx, MT_ERR_DATA, "%s: neither the metadata of its model nor a config.json describes a %s",
                   directory, is_bert ? "BERT" : "GPT");
}

MT_API mt_status mt_gpt_desc_read(mt_context *ctx, const char *directory, mt_gpt_desc *out) {
    mti_described m;
    MT_TRY(mti_desc_read(ctx, "mt_gpt_desc_read", directory, out, 0, &m));
    *out = m.d;
    return MT_SUCCESS;
}

MT_API mt_status mt_bert_desc_read(mt_context *ctx, const char *directory, mt_bert_desc *out) {
    mti_described m;
    MT_TRY(mti_desc_read(ctx, "mt_bert_desc_read", directory, out, 1, &m));
    memset(out, 0, sizeof *out);
    out->vocab = m.d.vocab;
    out->layers = m.d.layers;
    out->max_seq = m.d.max_seq;
    out->layer = m.d.layer;
    out->no_binary_head = m.no_binary_head;
    out->token_types = m.token_types;
    return MT_SUCCESS;
}

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_IMPLEMENTATION */
