/* mt_kernels.cuh - the operators of a transformer, forward and backward, on the device of an mt_context.

   Do this:
       #define MEGATRON_IMPLEMENTATION      // in exactly one file of your program
       #include "mt_kernels.cuh"            // includes mt_comm.h; plain C99/C++11 unless nvcc compiles it
   and, for a fast GEMM, add  -DMT_USE_ONEDNN ... -ldnnl   or   -DMT_USE_CBLAS ... -lopenblas  to your compiler line.

   The comment above an operator states its formula, its shapes and where it differs from these rules:
     - Matrices are passed as mt_tensor, a row-major view (see mt_comm.h). Its leading dimension ld may exceed cols.
       Token ids, targets and lengths are int32_t arrays. These arrays and the data of views are in the memory of the
       context's device. Structs, the `host` of mt_upload and mt_download and the `hash` of mt_hash are in host memory.
     - Activations and their gradients, weights, tables, gains, biases and the matrices of a GEMM are MT_F32, MT_BF16 or
       MT_F16. The views of one call may have different types.
     - These are always MT_F32: statistics (stats, gathered, lse, loss, dloss, the out of mt_sum), gradients of
       parameters (dweight, dbias, dgain, dtable, drow), and the master, grad, m and v of AdamW.
     - Scratch memory comes from the context's arena and is given back before the call returns.
     - 16-bit inputs are widened to fp32 when they are read. A 16-bit result is the fp32 result rounded once, to nearest
       even. NaN stays NaN; a value that is too large becomes infinity. For 16-bit results of activations, sigmoid, SiLU
       and the gate, a GPU computes the fp32 result with approximate functions. Its error is at most 4e-5 times the
       value, for slopes plus 2e-6. Rounding to f16 adds up to 4.9e-4 times the value. On a CPU, operators widen
       16-bit views block by block, in scratch memory that does not grow with the number of rows. Only these views have
       a whole f32 copy in it: the gain and bias of a norm, the bias of dropout, the table of rotary embeddings, the qkv
       of mt_kv_cache_append, the logits of mt_sample_candidates, and operands of mt_gemm where its comment says so.
       For each thread, attention has packed copies of the keys and values of one group of one sequence, also of f32
       views: in bf16 where it multiplies in bf16, otherwise in f32. In backward it also has their gradients, and those
       of the queries of one head, in f32, for 16-bit views.
     - Backward adds to the gradients of parameters (+=) and overwrites the gradients of activations (=).
     - To leave out an optional view, pass mt_none() (data == NULL). A view with rows == 0 or cols == 0 is allowed, and
       its data may be NULL.
     - An output must not overlap an input or another output. Most operators refuse it (MT_ERR_ARGUMENT); the others
       then compute undefined results. Where a comment says "y may be x", both may be the same view: the same memory,
       shape, ld and type.
     - Gradients of parameters are sums over tokens. A block of your own that supports invariant mode must compute
       them in the function that it passes to mt_sum_over_tokens (see docs/blocks.md).
     - Reductions run in a fixed order, so the same inputs give the same bits. Sums accumulate in fp32 or in double.
     - On MT_DEVICE_CUDA a call returns when its work is in the context's stream. mt_download, mt_hash and an mt_upload
       of more than MT_UPLOAD_BYTES (256 KiB) return when the work is done. The first GEMM of a shape may wait for the
       stream, too: see mt_gemm_choice.
     - Any operator can return MT_ERR_ARGUMENT (a NULL pointer, a value out of range), MT_ERR_SHAPE, MT_ERR_DTYPE,
       MT_ERR_MEMORY (the arena is too small), MT_ERR_UNSUPPORTED (too large for a GPU) and MT_ERR_SYSTEM (CUDA failed).
       A call that waits for the stream can also return the errors of mt_context_synchronize. The comment above an
       operator lists its other errors. mt_last_error(ctx) has the message.
     - An operator checks its arguments before it writes. mt_linear_* run several operators one after the other: when a
       later one fails, the results of the earlier ones are already written.

   Operators do not communicate between ranks. On a CPU they run on the threads of the context (mt_parallel_for), with
   the same bits for any number of threads; mt_gemm has an exception.
   Operators allocate no memory and keep no state between calls, with two exceptions. A GEMM library may allocate
   memory. A context keeps the GEMM options and, on a GPU, cuBLASLt's handle, its workspace and the algorithms chosen so
   far. On a CPU with oneDNN it also keeps oneDNN's primitives for the last 64 shapes of 16-bit products.

   Macros for your compiler line: MT_USE_ONEDNN or MT_USE_CBLAS chooses the GEMM library for a CPU. With neither, a
   built-in loop computes GEMMs. oneDNN may have version 2 or 3 (tested: 2.6 and 3.2).
   MT_CBLAS_HEADER names the header that declares cblas_sgemm, for instance '<mkl_cblas.h>' (default: <cblas.h>).

   To add an operator, follow docs/adding-an-operator.md. For a short example, search this file for >>bias. You change
   four places in this header (the declaration, the operator's section, its rule in >>rules, the list of sections below)
   and three tests:
   tests/test_kernels.c (double precision, finite differences, refused arguments), tests/test_kernels_16bit.c and
   tests/test_cuda.cu (a GPU against a CPU).

   This is the list of the sections of the implementation. Each section begins at a comment with its name.
   These sections are shared by operators: >>options >>check >>math >>views >>vector-loads >>16bit >>rows >>map
   >>columns >>random-words >>panels >>amx >>ptx >>tile >>rules >>dispatch.
   Each of these sections holds one operator or a few related ones (checks, CPU loop, kernels, launch, public
   functions): >>fill >>copy >>add >>hash >>sum >>gemm >>bias >>activation >>linear >>norm >>random-normal >>dropout
   >>attention-desc >>attention-cpu >>attention-plain >>attention-flash >>attention-choice >>attention >>rotary
   >>kv-cache >>kv-lengths >>ids >>embedding >>cross-entropy >>sample >>adamw >>multi-tensor >>step >>pointwise */

#include "mt_comm.h" /* outside the guard: a second #include may come with MEGATRON_IMPLEMENTATION */

#ifndef MT_KERNELS_CUH
#define MT_KERNELS_CUH

#ifdef __cplusplus
extern "C" {
#endif

/* ---- moving and filling ------------------------------------------------------------------------------------------ */

/* Returns the view with data == NULL, to pass for an optional argument that you leave out. */
MT_API mt_tensor mt_none(void);

/* Sets every element of y, which has a float type, to value. */
MT_API mt_status mt_fill(mt_context *ctx, mt_tensor y, float value);

/* y = x, of the same shape. In mt_copy, x and y have the same type, which may be any type. In mt_convert they have
   float types, which may differ. In both, y may be x. */
MT_API mt_status mt_copy(mt_context *ctx, mt_tensor x, mt_tensor y);
MT_API mt_status mt_convert(mt_context *ctx, mt_tensor x, mt_tensor y);

/* y = a + b, all of the same shape. y may be a or b. */
MT_API mt_status mt_add(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y);

/* mt_upload copies from host to y, mt_download from x to host. The view may have any type. host is a contiguous array
   of rows * cols elements of that type. When mt_upload returns, the caller may change host; the copy is in the
   context's stream, before the work of later calls. When mt_download returns, the copy is complete. On MT_DEVICE_META
   mt_upload does nothing and mt_download writes zeros. In check mode mt_download refuses floats that are a term of a
   sum over ranks: the program would take them for the sum. */
MT_API mt_status mt_upload(mt_context *ctx, const void *host, mt_tensor y);
MT_API mt_status mt_download(mt_context *ctx, mt_tensor x, void *host);

/* mt_sum: out [1, 1] += the sum of the elements of x. mt_sum_of_squares: out [1, 1] += the sum of their squares.
   A CPU accumulates in double, and makes no f32 copy of x. A GPU adds groups of 8 consecutive elements of a row in
   fp32, then these sums in double. */
MT_API mt_status mt_sum(mt_context *ctx, mt_tensor x, mt_tensor out);
MT_API mt_status mt_sum_of_squares(mt_context *ctx, mt_tensor x, mt_tensor out);

/* Adds the rows of x [rows, cols], MT_F32, in place. Row 0 becomes the sum of all rows; the other rows are undefined
   afterwards. It adds rows in the binary tree in which mt_all_reduce adds ranks, ((0+1)+(2+3))+.... Use it for your own
   sums over micro-batches, such as the mean loss. In invariant mode, the bits of these sums then do not depend on the
   number of ranks (see docs/invariance.md). */
MT_API mt_status mt_tree_sum(mt_context *ctx, mt_tensor x);

/* Adds a hash of x to *hash, to compare tensors. x, of a float type, is a part of a tensor that has global_cols
   columns. x begins at row first_row and column first_col of that tensor. To hash the tensor, set *hash to 0 and call
   mt_hash for each part: the total does not depend on how the tensor is split. The hash of x is the sum modulo 2^64 of
   mt_hash_element(e, bits) over the elements (i, j) of x, with e = (first_row + i) * global_cols + first_col + j and
   bits = the 32 or 16 bits of the element. On MT_DEVICE_META *hash does not change. */
MT_API mt_status mt_hash(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                         uint64_t *hash);

/* ---- GEMM -------------------------------------------------------------------------------------------------------- */

typedef enum mt_transpose { MT_NO_TRANS = 0, MT_TRANS = 1 } mt_transpose;

/* C [m, n] = alpha op(A) op(B) + beta C, with op(A) [m, k] and op(B) [k, n]. op(A) is A, or A^T with MT_TRANS. With
   beta == 0, C is not read. On a CPU in f32, with random inputs, the tests measure that an element differs from the
   exact one by at most (2 + sqrt(k)) * 6e-8 times the sum of the absolute values of its k products.
   On a CPU, oneDNN reads a and b in 16 bits, without f32 copies, if all of these hold: they have the same type, C has
   this type or MT_F32, alpha is 1, and the processor has instructions for the type (AVX512-BF16 or AMX for bf16; f16
   needs oneDNN 3, and AVX512-FP16 or AMX-FP16). The sums are in f32, and the scratch memory is what oneDNN asks for.
   These instructions read denormal bf16 numbers as 0. All other 16-bit products have the same bits as products of f32
   copies. With oneDNN and CBLAS the scratch memory has these copies. The built-in loop copies only a 16-bit C.
   A product A B^T with few rows m, as in decoding, reads B once, in its own type. With one row, memory is the limit. It
   copies only a 16-bit A and C. "Few" is up to 8 rows, or 4 where oneDNN would read a and b in 16 bits. This needs gcc
   or clang, and k of at least 32.
   The threads of the context share a product (mt_context_desc.threads). A GEMM library computes each part on one
   thread. With the built-in loop, the bits of a row of C depend neither on m nor on the number of threads. With oneDNN
   and CBLAS they depend on neither for these few m, but a larger m may round differently, also in invariant mode, and
   so may another number of threads. With oneDNN the bits of 16-bit products also depend on the leading dimensions: for
   invariant mode see mt_invariant_input in mt_parallel.h.
   Error: MT_ERR_UNSUPPORTED (m, n, k or an ld is above 2^31 - 1). */
MT_API mt_status mt_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, float alpha, mt_tensor a,
                         mt_tensor b, float beta, mt_tensor c);

/* Says how a context on a GPU chooses the cuBLASLt algorithm of a product. cuBLASLt's heuristic proposes algorithms for
   each shape (sizes, leading dimensions, types, transposes). The context chooses one in the first product of a shape
   and keeps it. MEASURED and HEURISTIC give the same bits.
   MEASURED:  the fastest of the proposals whose result has the same bits as that of the first one. The measurement
              uses free memory of the arena and waits for the stream. When it cannot run (see docs/gpus.md), the
              context takes the first proposal.
   HEURISTIC: the first proposal, without a measurement. */
typedef enum mt_gemm_choice { MT_GEMM_MEASURED = 0, MT_GEMM_HEURISTIC = 1 } mt_gemm_choice;

/* Says how a context on a GPU runs mt_linear_*. In 16 bits, SEPARATE and FUSED round differently.
   SEPARATE: a product, and separate kernels for bias, activation and bias gradient. Invariant mode always uses this.
   FUSED:    one product with a cuBLASLt epilogue. Products without such an epilogue use SEPARATE (see docs/gpus.md).
   MEASURED: for each shape, the faster of the two, measured in the first product of the shape. Two runs may therefore
             differ in the last bit. When the measurement cannot run (see docs/gpus.md), the shape uses SEPARATE. */
typedef enum mt_epilogue { MT_EPILOGUE_SEPARATE = 0, MT_EPILOGUE_FUSED = 1, MT_EPILOGUE_MEASURED = 2 } mt_epilogue;

/* Options for the products of a context. Zero-initialise for the defaults. */
typedef struct mt_gemm_options {
    mt_gemm_choice choice;
    mt_epilogue epilogue;
} mt_gemm_options;

/* mt_gemm_set_options sets the options; NULL restores the defaults. Call it before the first product: a shape that has
   already run keeps its algorithm. mt_gemm_get_options returns the options; in invariant mode, epilogue is always
   MT_EPILOGUE_SEPARATE. Errors: MT_ERR_ARGUMENT (an option is out of range), MT_ERR_MEMORY. */
MT_API mt_status mt_gemm_set_options(mt_context *ctx, const mt_gemm_options *options);
MT_API mt_gemm_options mt_gemm_get_options(const mt_context *ctx);

/* Creates cuBLASLt's handle and a workspace of 32 MiB on a GPU. Without this call, the first product creates them.
   mt_params_create (mt_parallel.h) calls it for you. On other devices it does nothing. */
MT_API mt_status mt_gemm_prepare(mt_context *ctx);

/* mt_gemm_pack makes a packed copy of weight [out, in], for products x weight^T of inference. A GEMM library on a CPU
   copies parts of a weight into a layout of its own in every product; with few tokens this takes a large part of the
   time. Later calls of mt_gemm with this context read the packed copy instead of weight when all of these hold:
     - a is not transposed, b is transposed, alpha is 1 and beta is 0, as in mt_linear_forward;
     - b is weight, with the same data, type, rows, cols and ld; a view of some of its rows is another matrix;
     - with oneDNN, a has the type of weight, c this type or MT_F32, and an f32 product has at most 256 rows, because
       more rows are as fast without packing. oneDNN 2 also needs an a without padding: its ld is its cols.
   Products with the few rows of decoding read weight itself, as they do without packing. mt_params_pack (mt_parallel.h)
   packs the weights of a model. It is the usual way to call this function.
   Size of the copy: for the built-in loop, 4 in bytes for each of the out features, rounded up to a multiple of at most
   32 features. For oneDNN, as many bytes as weight, with out and in rounded up to the blocks of oneDNN (in version 2.6
   with AVX-512 to multiples of 64 and 16). It is allocated with mt_context_alloc, so a dry run (MT_DEVICE_META) counts
   it. The context owns the copy, until mt_gemm_unpack or until it is destroyed. weight itself is still needed.
   A copy must not be older than its weight. Each operator of this header that writes to memory of weight drops the
   copy, if it runs with this context; products then read weight again. After anything else has written to weight, such
   as your own code, another context or a collective, call mt_gemm_pack again. Call mt_gemm_unpack before you free
   weight.
   Results: those of mt_gemm without packing. With the built-in loop they have the same bits, with oneDNN they may round
   differently.
   The call does nothing where packing has no use: on a GPU, with CBLAS, in invariant mode, and where oneDNN has no
   layout of its own for this type and processor.
   Errors: MT_ERR_MEMORY, and MT_ERR_UNSUPPORTED (a size is above 2^31 - 1). weight then has no packed copy. */
MT_API mt_status mt_gemm_pack(mt_context *ctx, mt_tensor weight);

/* Drops the packed copies of all matrices that share memory with weight, if there are any. ctx may be NULL. */
MT_API void mt_gemm_unpack(mt_context *ctx, mt_tensor weight);

/* Returns the name of the GEMM library for MT_DEVICE_CPU: "oneDNN 2.6.3" (with its version), "CBLAS" or "built-in". The
   string is static. */
MT_API const char *mt_gemm_library(void);

/* ---- bias and activations ---------------------------------------------------------------------------------------- */

/* forward:  y [tokens, n] += bias [1, n]
   backward: dbias [1, n] += column sums of dy [tokens, n] */
MT_API mt_status mt_bias_forward(mt_context *ctx, mt_tensor y, mt_tensor bias);
MT_API mt_status mt_bias_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias);

typedef enum mt_activation {
    MT_GELU_TANH = 0,    /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GPT-2 */
    MT_GELU_ERF = 1,     /* 0.5 x (1 + erf(x / sqrt(2))): BERT, arXiv 1606.08415 */
    MT_SWIGLU = 2,       /* silu(gate) * up, for h = [gate | up]: arXiv 2002.05202 */
    MT_SQUARED_RELU = 3, /* max(x, 0)^2, whose slope is 2 max(x, 0): Primer, arXiv 2109.08668; Nemotron */
    MT_RELU = 4,         /* max(x, 0), whose slope is 1 for x > 0, otherwise 0: the Transformer, arXiv 1706.03762 */
    MT_TANH = 5          /* tanh(x): the pooler of BERT, arXiv 1810.04805 */
} mt_activation;

/* The number of activations: they are the values from 0 to MT_ACTIVATION_COUNT - 1. */
#define MT_ACTIVATION_COUNT 6
#define MT_ACTIVATION_WORDS "MT_GELU_TANH MT_GELU_ERF MT_SWIGLU MT_SQUARED_RELU MT_RELU MT_TANH" /* see mt_check_enum */

/* forward:  h [tokens, w] += bias [1, w] (optional), then y [tokens, f] = act(h)
   backward: dh [tokens, w] = dy [tokens, f] * act'(h), dbias [1, w] += column sums of dh (optional). h is as forward
             left it, with the bias added. dh may be h.
   w is f, or 2 f for MT_SWIGLU. */
MT_API mt_status mt_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor bias, mt_tensor y);
MT_API mt_status mt_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor dy, mt_tensor dh,
                                        mt_tensor dbias);

/* ---- element by element ------------------------------------------------------------------------------------------ */

/* These operators compute products, sigmoid, SiLU and a gate. All views are [rows, cols], except row and its gradient
   drow [1, cols] (one factor per feature), and col and its gradient dcol [rows, 1] (one factor per token).
   multiply:     y = a * b
   multiply_row: y = x * row. backward: dx = dy * row, drow += sum over the rows of dy * x
   multiply_col: y = x * col. backward: dx = dy * col, dcol = sum over the columns of dy * x
   sigmoid:      y = 1 / (1 + exp(-x)). backward: dx = dy * sigmoid'(x)
   silu:         y = x * sigmoid(x). backward: dx = dy * silu'(x)
   sigmoid_gate: y = sigmoid(gate) * x, as in GLU (arXiv 1612.08083) and in the output gate of attention (arXiv
                 2505.06708). backward: dx = dy * sigmoid(gate), dgate = dy * x * sigmoid'(gate)
   dx, drow and dcol are optional in mt_multiply_*_backward. y, dx and dgate may be any input of the same shape. drow
   and dcol must not overlap another argument (MT_ERR_ARGUMENT).

   dcol sums over the columns of the views that you pass, and drow over their rows. When x is split by columns between
   tensor ranks (the output of a column-parallel layer), dcol is a partial sum: sum it over the tensor group with
   mt_all_reduce before you use it. When x is split by rows (sequence parallelism), dcol is complete and drow is a
   partial sum: mt_sync_gradients sums it over the tensor group when the parameter of row has sequence_partial. */
MT_API mt_status mt_multiply(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y);
MT_API mt_status mt_multiply_row_forward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor y);
MT_API mt_status mt_multiply_row_backward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor dy, mt_tensor dx,
                                          mt_tensor drow);
MT_API mt_status mt_multiply_col_forward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor y);
MT_API mt_status mt_multiply_col_backward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor dy, mt_tensor dx,
                                          mt_tensor dcol);
MT_API mt_status mt_sigmoid_forward(mt_context *ctx, mt_tensor x, mt_tensor y);
MT_API mt_status mt_sigmoid_backward(mt_context *ctx, mt_tensor x, mt_tensor dy, mt_tensor dx);
MT_API mt_status mt_silu_forward(mt_context *ctx, mt_tensor x, mt_tensor y);
MT_API mt_status mt_silu_backward(mt_context *ctx, mt_tensor x, mt_tensor dy, mt_tensor dx);
MT_API mt_status mt_sigmoid_gate_forward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor y);
MT_API mt_status mt_sigmoid_gate_backward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor dy, mt_tensor dgate,
                                          mt_tensor dx);

/* ---- linear layers ----------------------------------------------------------------------------------------------- */

/* The products of linear layers, with the bias, the activation or the bias gradient that belongs to each.
   forward:             y [tokens, out] = x [tokens, in] weight^T + bias [1, out] (optional). weight is [out, in].
   gradients:           dweight [out, in] += dy^T x and dbias [1, out] += column sums of dy [tokens, out] (optional).
   activation_forward:  h [tokens, w] = x [tokens, in] weight^T + bias [1, w] (optional), then y [tokens, f] = act(h).
                        weight is [w, in]. w is f, or 2 f for MT_SWIGLU.
   activation_backward: dh [tokens, w] = (dy weight) * act'(h) and dbias [1, w] += column sums of dh (optional). dy
                        [tokens, out] is the gradient of the output of the layer after the activation, and weight
                        [out, f] is that layer's weight. dh must not be h.

   By default each function calls two operators, so its results have the same bits as theirs, and it returns their
   errors. forward, activation_forward and activation_backward call mt_gemm, then mt_bias_forward, mt_activation_forward
   and mt_activation_backward respectively. gradients calls mt_bias_backward, then mt_gemm. In 16 bits the result of
   mt_gemm is rounded before the other operator reads it. On a GPU, mt_gemm_options.epilogue can replace the two
   operators by one call of cuBLASLt. */
MT_API mt_status mt_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y);
MT_API mt_status mt_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                              mt_tensor bias, mt_tensor h, mt_tensor y);
MT_API mt_status mt_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy, mt_tensor weight,
                                               mt_tensor h, mt_tensor dh, mt_tensor dbias);
MT_API mt_status mt_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, mt_tensor dweight, mt_tensor dbias);

/* ---- normalisation ----------------------------------------------------------------------------------------------- */

typedef enum mt_norm_kind {
    /* (x - mean(x)) * rstd * gain + bias, with rstd = 1 / sqrt(var(x) + eps): arXiv 1607.06450 */
    MT_LAYER_NORM = 0,
    /* x * rstd * gain, with rstd = 1 / sqrt(mean(x^2) + eps): arXiv 1910.07467. bias and dbias must be mt_none() */
    MT_RMS_NORM = 1
} mt_norm_kind;
#define MT_NORM_WORDS "MT_LAYER_NORM MT_RMS_NORM" /* see mt_check_enum */

/* Normalises each row. x, y, dy, dresidual and dx are [tokens, h]. gain, bias, dgain and dbias are [1, h].
   forward:  y = norm(x). stats [tokens, 2] = mean and rstd of each row, for backward. RMSNorm writes 0 as the mean.
             bias and stats are optional. y may be x.
   backward: dx = dresidual + the gradient of x through the norm. dgain and dbias += their gradients. x is the input of
             forward. dresidual is the gradient of x through the residual connection around the norm. dresidual and
             dbias are optional. dx may be dy or dresidual. */
MT_API mt_status mt_norm_forward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor bias,
                                 float eps, mt_tensor y, mt_tensor stats);
MT_API mt_status mt_norm_backward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor stats,
                                  mt_tensor dy, mt_tensor dresidual, mt_tensor dx, mt_tensor dgain, mt_tensor dbias);

/* ---- random numbers by global element ---------------------------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., SC 2011), on the host: out = the four random 32-bit words of a counter and a key. */
MT_API void mt_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Says which random words a view uses. The view is a part of a global tensor that has global_cols columns, and begins
   at row first_row and column first_col of that tensor. Element (i, j) of the view is the global element
   e = (first_row + i) * global_cols + first_col + j. Its random word is out[e & 3] of mt_philox4x32 with the counter
   {e >> 2, subsequence} and the key {seed}, all 64-bit numbers with the low word first. So random numbers do not depend
   on how a tensor is split over ranks. */
typedef struct mt_random {
    uint64_t seed, subsequence; /* subsequence: any number; a different one for each parameter, dropout and step */
    int64_t first_row, first_col, global_cols;
    /* Optional: a number in memory of the context's device. An operator adds it to subsequence when it runs, so a
       recorded step (a CUDA graph) draws new random words in each launch. NULL counts as 0. */
    const uint64_t *offset;
} mt_random;

/* y = std * N(0, 1), with the random words of `at`. Box-Muller makes two values from the words of elements 2 k and
   2 k + 1: the cosine for the even element, the sine for the odd one. It computes in double and rounds once, so that
   the CPU and the GPU agree. */
MT_API mt_status mt_random_normal(mt_context *ctx, mt_tensor y, float std, mt_random at);

/* Dropout sets an element to 0 when its random word (see mt_random) is less than p * 2^32. It multiplies the other
   elements by 1 / (1 - p). The backward pass computes the same mask from the same mt_dropout. */
typedef struct mt_dropout {
    mt_random at;
    float p; /* 0 <= p < 1; 0: no dropout, and `at` is not read */
} mt_dropout;

/* All views are [tokens, n], except bias and dbias [1, n].
   forward:  y = residual + dropout(x + bias). bias and residual are optional. y may be x or residual.
   backward: dx = dropout(dy) with the mask of forward, dbias += column sums of dx (optional). dx may be dy. The
             gradient of residual is dy itself. */
MT_API mt_status mt_bias_dropout_add_forward(mt_context *ctx, mt_tensor x, mt_tensor bias, mt_tensor residual,
                                             mt_dropout dropout, mt_tensor y);
MT_API mt_status mt_bias_dropout_add_backward(mt_context *ctx, mt_tensor dy, mt_dropout dropout, mt_tensor dx,
                                              mt_tensor dbias);

/* ---- attention --------------------------------------------------------------------------------------------------- */

typedef enum mt_mask { MT_MASK_CAUSAL = 0, MT_MASK_BIDIRECTIONAL = 1 } mt_mask;
#define MT_MASK_WORDS "MT_MASK_CAUSAL MT_MASK_BIDIRECTIONAL" /* see mt_check_enum */

/* The order of queries, keys and values in the columns of qkv, and in the rows of the weights that compute it. A model
   has G query groups of n query heads, so A = G * n query heads, with D features each (n = heads_per_group, D =
   head_dim). The table gives the column (row of the weight) of feature d of query head a, and of the key and value of
   group g:
     layout               query                               key                     value
     MT_QKV_PER_GROUP     (a / n * (n + 2) + a % n) * D + d   (g * (n + 2) + n) * D + d   (g * (n + 2) + n + 1) * D + d
     MT_QKV_CONCATENATED  a * D + d                           (A + g) * D + d             (A + G + g) * D + d
     MT_QKV_SEPARATE      a * D + d                           g * D + d                   g * D + d
   MT_QKV_PER_GROUP     one weight, [q...q k v] for each group, as in Megatron-LM
   MT_QKV_CONCATENATED  one weight, [all queries; all keys; all values], as in GPT-2 and C programs that follow it
   MT_QKV_SEPARATE      three weights, as in Llama: the numbers are rows of the weight of queries, keys or values.
                        The outputs lie side by side in one tensor qkv, so for the operators below this layout is the
                        same as MT_QKV_CONCATENATED
   On a tensor rank G and A are the numbers of this rank's groups and heads. mt_self_attention_desc in megatron.h says
   how a weight of each layout is split. */
typedef enum mt_qkv_layout { MT_QKV_PER_GROUP = 0, MT_QKV_CONCATENATED = 1, MT_QKV_SEPARATE = 2 } mt_qkv_layout;
#define MT_QKV_LAYOUT_WORDS "MT_QKV_PER_GROUP MT_QKV_CONCATENATED MT_QKV_SEPARATE" /* see mt_check_enum */

/* The two features that rotary position embedding turns together, for i = 0 ... R / 2 - 1, where R is the number of
   features that it turns.
   MT_ROTARY_HALVES  i and i + R / 2: GPT-NeoX, Megatron-LM, and Llama in the files of Hugging Face
   MT_ROTARY_PAIRS   2 i and 2 i + 1: GPT-J, Megatron-LM with --rotary-interleaved, and Llama in the files of Meta
   mt_rotary_pairs_from_halves in megatron.h converts weights. */
typedef enum mt_rotary_form { MT_ROTARY_HALVES = 0, MT_ROTARY_PAIRS = 1 } mt_rotary_form;
#define MT_ROTARY_FORM_WORDS "MT_ROTARY_HALVES MT_ROTARY_PAIRS" /* see mt_check_enum */

/* The sizes and options of scaled dot-product attention. Query heads form `groups` query groups. A group has
   heads_per_group query heads that share one key/value head. heads_per_group is 1 for MHA and more for GQA (arXiv
   2305.13245); groups is 1 for MQA.
   qkv is [batch * seq, groups * (heads_per_group + 2) * head_dim]. The token at position i of sequence b is row
   b * seq + i. The order of the columns is qkv_layout. Query head a is head a % heads_per_group of group a /
   heads_per_group. out and lse hold the query heads in this order. */
typedef struct mt_attention_desc {
    int64_t batch, seq, groups, heads_per_group, head_dim;
    mt_mask mask;
    float scale; /* factor of the scores; MT_ZERO: 0; 0: 1 / sqrt(head_dim) */
    /* Key padding: `batch` lengths on the context's device, 0 <= lengths[b] <= seq. In sequence b the keys at positions
       >= lengths[b] are masked. For length 0, out and dqkv are 0. A CPU checks the range (MT_ERR_DATA), a GPU does
       not. NULL: no padding */
    const int32_t *lengths;
    /* Dropout of the probabilities. at.first_row is the global index of the first sequence, at.first_col the global
       index of the first query head, at.global_cols the number of query heads on all ranks together. The probability of
       sequence b, head a, query i and key j has the global element number
       (((first_row + b) * global_cols + first_col + a) * seq + i) * seq + j */
    mt_dropout dropout;
    mt_qkv_layout qkv_layout;   /* of qkv and dqkv; 0: MT_QKV_PER_GROUP */
    mt_rotary_form rotary_form; /* 0: MT_ROTARY_HALVES */
    int64_t rotary_dim;         /* the first rotary_dim features of a head are turned; 0: head_dim */
    /* advanced */
    /* Keys of a sequence; 0: seq. Other numbers are for mt_dot_product_attention_forward. lengths is then limited by
       kv_seq, and query i has the position i + kv_seq - seq among the keys: the last query and the last key have the
       same position. mask, window and alibi_slopes use this position, and element numbers of dropout count kv_seq keys
       for each query. */
    int64_t kv_seq;
    /* Sliding window: a query at position p sees a key at position j only if |p - j| < window. With MT_MASK_CAUSAL
       these are the last `window` keys, as in Mistral (arXiv 2310.06825). 0: no window */
    int64_t window;
    /* Soft cap c of the scores: a score x becomes c * tanh(x / c), as in Gemma 2 (arXiv 2408.00118). It comes before
       alibi_slopes and bias. 0: none */
    float softcap;
    /* ALiBi (arXiv 2108.12409): adds -alibi_slopes[a] * |p - j| to the score of head a for a query at position p and a
       key at position j. One slope for each query head of this call, on the context's device, at least 0. NULL: none */
    const float *alibi_slopes;
    /* Packed sequences: the batch * seq tokens are `documents` documents, one after the other, and a query sees only
       keys of its own document. Document d has the tokens [cu_seqlens[d], cu_seqlens[d + 1]), so the array has
       documents + 1 ascending numbers, from 0 to batch * seq, on the context's device. A document also ends at the end
       of a sequence. A CPU checks the numbers (MT_ERR_DATA), a GPU does not. kv_seq must be 0 or seq. NULL: none.
       mt_rotary_forward and mt_rotary_backward read it, too */
    const int32_t *cu_seqlens;
    int64_t documents;
    /* A bias that is added to the scores: [bias_batch * bias_heads * seq, kv_seq], of a float type. In MT_U8 it is a
       boolean mask instead: a query does not see the keys with 0. -INFINITY masks a key. mt_none(), or a view of zeros
       as in a zero-initialised desc: no bias.
       bias_batch is 1 (all sequences share the bias) or batch. bias_heads is the number of heads in the bias. With 1,
       all heads share it. Otherwise head a of this call reads head bias_first_head + a, so the bias may hold the heads
       of all tensor ranks. 0 means 1. The value for sequence b, head a and query i is in row
       (b * bias_heads + bias_first_head + a) * seq + i. An index that is shared counts as 0 there. Error: MT_ERR_SHAPE
       (bias_heads is too small, or bias_first_head is negative) */
    mt_tensor bias;
    mt_tensor dbias; /* optional, MT_F32, of the shape of bias: backward adds the gradient of the bias to it */
    int64_t bias_batch, bias_heads, bias_first_head;
} mt_attention_desc;

/* forward:  out [batch * seq, heads * head_dim] = dropout(softmax(scale * q k^T, masked)) v, with heads =
             groups * heads_per_group. lse [heads, batch * seq] = the log of the sum of exponentials of the scaled
             scores. It is optional: only backward needs it.
   backward: dqkv = the gradient of qkv, of the same shape, and desc->dbias (optional) += the gradient of the bias. It
             takes the out and lse of forward and computes the probabilities again. dout must not overlap out.
   Scratch memory grows linearly with seq. On GPUs from sm_80 on, bf16 and f16 with head_dim 64, 96 or 128 use tensor
   cores, if nvcc compiled the program for such a GPU (-arch=native). They skip tiles of keys that no query of a block
   sees, so a window or short documents make them faster. Other calls use a slower kernel without tensor cores, also
   those with a kv_seq other than seq, or with alibi_slopes or bias: see docs/gpus.md.
   On a CPU the threads of the context share the work (mt_context_desc.threads), each with scratch memory of its own.
   The bits do not depend on their number. In forward a thread gets some blocks of 96 queries of a head, in backward
   some groups of a sequence. One thread computes the groups that add to the same elements of dbias.
   If q, k and v are bf16, in backward also dout, and the program is compiled for AVX512-BF16 (gcc or clang), then the
   products on a CPU have bf16 operands and sums in f32, as on tensor cores. A program that is compiled for AMX as well
   (-march=native on such a processor) multiplies in the tiles of AMX, if Linux permits it; then sums have another
   order. Probabilities and gradients of scores are rounded to bf16 before they are multiplied. The softmax and lse are
   computed in f32, and denormal bf16 numbers count as 0. A NaN or infinity in a row can reach the results of 31
   neighbouring rows that do not see it. Other calls on a CPU compute in f32. mt_kv_cache_attention does the same for
   more than MT_KV_DECODE_QUERIES queries, and in invariant mode.
   Forward does not read desc->dbias. Backward changes only the rows of this call's heads in it. Errors: MT_ERR_ARGUMENT
   (in backward: dbias overlaps another tensor of the call, or the bias is missing or is a boolean mask),
   MT_ERR_UNSUPPORTED (on a GPU: head_dim above 256, more than 65535 heads or sequences). */
MT_API mt_status mt_attention_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor out,
                                      mt_tensor lse);
MT_API mt_status mt_attention_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor out,
                                       mt_tensor lse, mt_tensor dout, mt_tensor dqkv);

/* Attention with queries, keys and values in separate tensors: for cross-attention, and for keys of earlier steps. With
   desc->kv_seq = 0 it computes what mt_attention_forward computes. desc->qkv_layout is not read.
     q, dq         [batch * seq, heads * head_dim]. The query at position i of sequence b is row b * seq + i
     k, v, dk, dv  [batch * kv_seq, groups * head_dim], in the same way
     out, lse      as in mt_attention_forward: [batch * seq, heads * head_dim] and [heads, batch * seq]
   A query that sees no key has out = 0 and lse = -INFINITY, and adds nothing to the gradients. backward overwrites dq,
   dk and dv, and adds to desc->dbias. MT_ERR_ARGUMENT: out of forward, or dq, dk or dv, overlaps another tensor of the
   call. Other errors are those of mt_attention_forward and mt_attention_backward. */
MT_API mt_status mt_dot_product_attention_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor q,
                                                  mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse);
MT_API mt_status mt_dot_product_attention_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor q,
                                                   mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse,
                                                   mt_tensor dout, mt_tensor dq, mt_tensor dk, mt_tensor dv);

/* slopes [1, n], MT_F32, becomes the slopes of the heads first_head to first_head + n - 1 of a model with `heads`
   heads, for mt_attention_desc.alibi_slopes. When `heads` is a power of 2, head h has the slope 2^(-8 (h + 1) / heads)
   (arXiv 2108.12409). Otherwise let m be the largest power of 2 below `heads`. The first m heads have the slopes of a
   model with m heads. Head m + k has the slope of head 2 k of a model with 2 m heads, as in the code of that paper.
   MT_ERR_ARGUMENT: heads is not in [1, 2^31), or the n heads are not in [0, heads). */
MT_API mt_status mt_alibi_slopes(mt_context *ctx, int64_t heads, int64_t first_head, mt_tensor slopes);

/* For authors of blocks: checks desc, the shapes of its bias and dbias, and on a CPU the numbers of lengths, cu_seqlens
   and alibi_slopes. Call it before the block communicates. Pass a desc of all heads of the model, so that all ranks
   return the same error. groups must be at least 1. `where` is the name of the calling function, for the error message.
   Errors: those of mt_dot_product_attention_backward for desc. */
MT_API mt_status mt_attention_check(mt_context *ctx, const char *where, const mt_attention_desc *desc);

/* Rotary position embedding (arXiv 2104.09864) of the first R features of each head. R is desc->rotary_dim, or head_dim
   if this is 0. R must be even. desc->rotary_form selects the features that are rotated together: with
   MT_ROTARY_HALVES, feature i and feature i + R / 2 by the angle number i. The features from R on stay as they are.
   table:    table [seq, R]: row p holds the R / 2 cosines, then the R / 2 sines, of the angles p * base^(-2 i / R),
             i = 0 ... R / 2 - 1. It is the same for both forms.
   forward:  rotates the queries and keys of qkv in place. A token at position p uses row p of table.
   backward: rotates the gradients of the queries and keys in dqkv back, in place.
   The position of a token is its index in its sequence. With desc->cu_seqlens, it is the number of tokens before it in
   its document and its sequence: a document is rotated as if it were a sequence of its own, and one that goes on in the
   next sequence begins again at 0 there.
   forward and backward read the five sizes of desc, qkv_layout, rotary_form, rotary_dim, cu_seqlens and documents. They
   do not read mask, scale, lengths or dropout. Errors: MT_ERR_SHAPE (R is odd or is not in [0, head_dim], or cu_seqlens
   is set and kv_seq is neither 0 nor seq), MT_ERR_ARGUMENT, MT_ERR_DATA (cu_seqlens, on a CPU). */
MT_API mt_status mt_rotary_table(mt_context *ctx, float base, mt_tensor table);
MT_API mt_status mt_rotary_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv);
MT_API mt_status mt_rotary_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor dqkv);

/* ---- key/value cache --------------------------------------------------------------------------------------------- */

/* The keys and values of earlier tokens in one attention layer, for inference. The cache has room for max_seq positions
   of each of `batch` sequences. The key at position p of sequence b and group g is row (b * groups + g) * max_seq + p
   of keys, and its value is the same row of values. The caller owns the memory of keys, values and lengths. */
typedef struct mt_kv_cache {
    mt_tensor keys, values; /* [batch * groups * max_seq, head_dim], contiguous, both of the type of qkv */
    int64_t max_seq;        /* at least 1 */
    /* [batch], in memory of the context's device: how many tokens of each sequence the cache holds before a call, 0 to
       max_seq. append and attention do not change it. After the last layer the caller adds the new tokens to it, with
       mt_kv_cache_advance */
    const int32_t *lengths;
} mt_kv_cache;

/* append:    turns the queries and keys of qkv in place, as mt_rotary_forward does, and copies the keys and values to
              the cache. Token i of sequence b has the position lengths[b] + i, where lengths is that of the cache.
              table is [max_seq, R], with the max_seq of the cache and R as in mt_rotary_forward, or mt_none() for a
              model without rotary position embedding.
   attention: out [batch * seq, heads * head_dim] = the attention of the queries in qkv to the keys and values in the
              cache. Call append first, which adds the keys and values of qkv. Query i of sequence b sees the keys
              0 ... lengths[b] + i, or with a window the last desc->window of them.
   desc->seq is the number of new tokens of each sequence: 1 for a step that adds one token, the length of the longest
   prompt for prompts. desc->lengths has the number of new tokens of each sequence, 0 to seq (NULL: all have seq). The
   rows of qkv after these are not read. Their rows of out become 0. A sequence with 0 new tokens keeps its cache.
   Both read the five sizes of desc, qkv_layout, lengths, rotary_form and rotary_dim; attention also reads scale,
   window, softcap and alibi_slopes. mask must be MT_MASK_CAUSAL. kv_seq, dropout, cu_seqlens and bias must not be set.
   Attention reads the keys and values in their own type. On a CPU, calls with at most MT_KV_DECODE_QUERIES queries for
   each key/value head (seq * heads_per_group) read each key and value once, without a copy. Longer calls, and all calls
   in invariant mode, compute blocks of scores as mt_attention_forward does. A row of out then has the same bits as in
   mt_attention_forward of the whole sequence. For a GPU, docs/gpus.md says which kernel runs.
   Errors: MT_ERR_UNSUPPORTED (a field is set that must not be; attention on a GPU: as in mt_attention_forward, or
   max_seq is 2^30 or more), MT_ERR_SHAPE (max_seq is below 1, or keys or values are not contiguous), MT_ERR_DTYPE (keys
   and values do not have the type of qkv), MT_ERR_DATA (on a CPU: a length is out of range, or a sequence would have
   more than max_seq tokens). A GPU does not check lengths. With wrong lengths its results are undefined, but it
   accesses no memory outside the tensors. */
#define MT_KV_DECODE_QUERIES 16
MT_API mt_status mt_kv_cache_append(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv,
                                    const mt_kv_cache *cache);
MT_API mt_status mt_kv_cache_attention(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv,
                                       const mt_kv_cache *cache, mt_tensor out);

/* For authors of blocks that use a cache. ids [batch * seq], added [batch] and lengths [batch] are in memory of the
   context's device.
   check:     checks desc and max_seq and, on a CPU, desc->lengths and cache->lengths. It does not read keys and values.
              Call it before the block communicates, with a desc of all groups of the model, so that all ranks return
              the same error. `where` is the name of the calling function, for the error message.
   positions: ids[b * seq + i] = min(lengths[b] + i, max_seq - 1), the position of token i of sequence b, as
              mt_embedding_forward needs it for a table of positions.
   advance:   lengths[b] = min(lengths[b] + added[b], max_seq), with seq instead of added[b] when added is NULL. lengths
              is the array that the caches of all layers share. Call it once, after the last layer. added is the
              desc->lengths of the step: a number below 0 counts as 0, and one above seq as seq. */
MT_API mt_status mt_kv_cache_check(mt_context *ctx, const char *where, const mt_attention_desc *desc,
                                   const mt_kv_cache *cache);
MT_API mt_status mt_kv_cache_positions(mt_context *ctx, const mt_kv_cache *cache, int64_t batch, int64_t seq,
                                       int32_t *ids);
MT_API mt_status mt_kv_cache_advance(mt_context *ctx, int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added,
                                     int32_t *lengths);

/* ---- embedding --------------------------------------------------------------------------------------------------- */

/* Checks that each of the `count` ids is in [0, limit) or equal to ignore. For token ids pass ignore = 0, which is in
   that range anyway; for targets pass mt_ignore_index(desc.ignore_index). `what` is the word for an id in the error
   message ("token id", "target"; NULL: "id"; at most 23 characters). On MT_DEVICE_META no id is checked. Error:
   MT_ERR_DATA, with the first wrong id and its index in the message.
   On MT_DEVICE_CUDA the check is in the stream, and this call does not wait for it. The next call of the program that
   waits for the stream returns the error of the first failed check: mt_context_synchronize, mt_download, mt_hash,
   mt_grad_norm, or another function whose comment says that it waits. The calls in between compute with the wrong ids.
   Their results are of no use, but they access no memory outside of the tensors. */
MT_API mt_status mt_ids_check(mt_context *ctx, const char *what, const int32_t *ids, int64_t count, int64_t limit,
                              int32_t ignore);

/* ids[i] = (first_token + i) % seq for i < count: the positions of consecutive tokens in sequences of length seq.
   With cu_seqlens, the tokens are `documents` documents, one after the other, and a position is the number of tokens
   before the token in its document and its sequence, as in mt_rotary_forward. cu_seqlens and first_token count from the
   same token: the first one of document 0. Document d has the tokens [cu_seqlens[d], cu_seqlens[d + 1]). The array has
   documents + 1 ascending numbers, from 0 to at least first_token + count, on the context's device. A CPU checks the
   numbers (MT_ERR_DATA), a GPU does not. NULL and 0: no documents. */
MT_API mt_status mt_position_ids(mt_context *ctx, int64_t first_token, int64_t seq, const int32_t *cu_seqlens,
                                 int64_t documents, int32_t *ids, int64_t count);

/* Looks up the rows of `ids`, one id per token, in a shard of a table. table and dtable [rows, h] hold the rows
   [first_row, first_row + rows) of the whole table; first_row is 0 for a whole table.
   forward:  y [tokens, h] = beta * y + table[ids - first_row]. An id outside of the shard adds 0. With beta == 0, y is
             not read.
   backward: dtable[ids - first_row] += dy [tokens, h]. An id outside of the shard adds nothing. A CPU adds the
             tokens of a row in their order. A GPU adds them in groups, each in the order of its tokens, and then
             adds the sums of the groups. A group has 32 tokens, or more if the row has more than 4096. With at most
             32 tokens of a row, the bits are those of a CPU. The order depends only on how many tokens the row has.
             Error: MT_ERR_UNSUPPORTED (on a GPU: about 2^31 tokens or more). */
MT_API mt_status mt_embedding_forward(mt_context *ctx, mt_tensor table, int64_t first_row, const int32_t *ids,
                                      float beta, mt_tensor y);
MT_API mt_status mt_embedding_backward(mt_context *ctx, mt_tensor dy, int64_t first_row, const int32_t *ids,
                                       mt_tensor dtable);

/* ---- cross-entropy over a vocabulary shard ----------------------------------------------------------------------- */

/* For the logits x of a token, loss = lse(x) - x[target], where lse(x) = log(sum of exp(x)). With label smoothing a, as
   PyTorch defines it, loss = (1 - a) (lse(x) - x[target]) + a (lse(x) - mean(x)). A token whose target is ignore_index
   has loss 0 and gradient 0. */
typedef struct mt_cross_entropy_shard_desc {
    int64_t vocab;         /* size of the whole vocabulary, without padding */
    int64_t first_col;     /* index in the vocabulary of the shard's first column */
    float label_smoothing; /* a, 0 <= a < 1 */
    int32_t ignore_index;  /* target of tokens without a loss; MT_ZERO: 0; 0: -100, as in PyTorch */
} mt_cross_entropy_shard_desc;

/* Call stats on each shard, gather all stats with mt_all_gather, then call combine and backward on each shard. logits
   is [tokens, columns of the shard]. targets holds, for each token, an index in the whole vocabulary or ignore_index;
   check it with mt_ids_check. For a target that is out of range, its logit counts as 0, and the gradient has no one-hot
   term. Columns whose index in the vocabulary is `vocab` or more are padding: they do not count, and their gradient
   is 0.
   stats:    stats [tokens, 4] = for each token the maximum of the shard's x (-inf if all columns are padding), the sum
             of exp(x - maximum), the logit of the target (0 if another shard has it) and the sum of x.
   combine:  loss [1, tokens] and lse [2, tokens] from gathered [shards * tokens, 4], the stats of shard 0, 1, ... in
             this order, for 1 to 1024 shards. It adds the shards in the order of mt_all_reduce. Row 0 of lse is the
             maximum m, row 1 is log(sum of exp(x - m)). lse(x) is the sum of the two rows; two numbers are more precise
             than their rounded sum.
   backward: logits[i] = scale * dloss[i] * (softmax - smoothed one-hot) for token i, in place. dloss [1, tokens] is
             optional: mt_none() means 1 for every token. With dloss [1, 1], its element counts for every token.
   For 16-bit logits, a GPU computes e^d with an approximate function. Its relative error is at most 2^-22 (1 + |d|),
   where d is the difference of a logit to the maximum, or to lse(x) in backward. */
MT_API mt_status mt_cross_entropy_stats(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor logits,
                                        const int32_t *targets, mt_tensor stats);
MT_API mt_status mt_cross_entropy_combine(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor gathered,
                                          int shards, const int32_t *targets, mt_tensor loss, mt_tensor lse);
MT_API mt_status mt_cross_entropy_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor logits,
                                           const int32_t *targets, mt_tensor lse, mt_tensor dloss, float scale);

/* Does stats, combine and backward in one call, for a single shard that holds the whole vocabulary (first_col is 0). It
   writes loss [1, tokens] and replaces logits by their gradient as backward does. dloss is optional. */
MT_API mt_status mt_cross_entropy_forward_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *desc,
                                                   mt_tensor logits, const int32_t *targets, mt_tensor dloss,
                                                   float scale, mt_tensor loss);

/* ---- sampling of the next token from a vocabulary shard ---------------------------------------------------------- */

/* How the token of a row of logits x is drawn. As in Hugging Face's transformers, the logits are divided by the
   temperature, then top_k is applied, then top_p, with probabilities over the tokens that top_k has kept. Tokens are
   ordered by logit, the largest first. Among equal logits the lowest id is first.
     top_k  keeps the first top_k tokens
     top_p  keeps a token when the tokens before it together have less than the probability top_p. The first token is
            always kept. Probabilities are rounded down to multiples of 2^-32 of the largest one
   The token is drawn by the Gumbel-max trick (arXiv 1611.00712, section 2): it is the kept token with the largest
   x / temperature - log(-log(1 - v)), computed in double, which has the probability softmax(x / temperature). Here
   v = (word + 1/2) / 2^32, and `word` is the random word (see mt_random) of the element at row `position` and column
   `id` of a tensor with vocab columns, with the subsequence `sequence`. So a token depends on its own logits, the seed,
   the sequence and the position. It does not depend on the split, or on the other sequences of a batch. */
typedef struct mt_sample_desc {
    float temperature; /* at least 0. 0: the first token in the order above, without random numbers */
    int64_t top_k;     /* 0: all tokens */
    float top_p;       /* 0 to 1. MT_ZERO: 0, only the first token; 0 or 1: all tokens */
    uint64_t seed;
    uint64_t first_sequence;   /* with sequences == NULL, row i has the sequence first_sequence + i */
    const uint64_t *sequences; /* [rows], in memory of the context's device: row i has the sequence sequences[i] */
    int64_t position;          /* row i has the position `position` + positions[i]. 0 to 2^31 - 1 */
    const int32_t *positions;  /* [rows], in memory of the context's device; NULL: all 0 */
} mt_sample_desc;

/* Returns the number of candidates of a shard with `cols` columns: 1 at temperature 0, with a top_p of MT_ZERO or
   without top_k and top_p; the smaller of top_k and cols with top_k; cols with top_p alone. */
MT_API int64_t mt_sample_count(const mt_sample_desc *desc, int64_t cols);

/* Call mt_sample_candidates on each shard, gather all candidates with mt_all_gather, then call mt_sample_ids. logits
   [rows, cols] has the columns of the vocabulary from first_col on. Columns whose index in the vocabulary is `vocab`
   or more are padding, and are never drawn.
   candidates: candidates [rows, 2 k] is MT_F32, with k = mt_sample_count(desc, cols). The first k columns are logits,
               and the others have the bits of their ids, which are int32_t: gather them as MT_I32. With k = 1 the
               candidate is the token that is drawn from this shard alone. With k > 1 the candidates are the first k
               tokens in the order above, by increasing id. When the shard has fewer than k tokens, they are followed by
               logits of -infinity with the id -1.
   ids:        ids[i] = the token that is drawn for row i, from gathered [shards * rows, 2 k], the candidates of shard
               0, 1, ... in this order. All shards have the same number of columns. ids [rows] is in memory of the
               context's device.
   MT_ERR_DATA: a logit is NaN. mt_sample_ids returns it, so all ranks do, and ids[i] is -1. A GPU only writes the -1:
   call mt_ids_check. A logit may be infinite. A token with -infinity is drawn only if all tokens of the row have it.
   MT_ERR_ARGUMENT: a field of desc is out of range. */
MT_API mt_status mt_sample_candidates(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, int64_t first_col,
                                      mt_tensor logits, mt_tensor candidates);
MT_API mt_status mt_sample_ids(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, mt_tensor gathered,
                               int shards, int32_t *ids);

/* ---- optimizer --------------------------------------------------------------------------------------------------- */

/* AdamW with decoupled weight decay (arXiv 1711.05101, algorithm 2, as torch.optim.AdamW). With g = grad_scale * grad:
       m = beta1 * m + (1 - beta1) * g            mhat = m / (1 - beta1^step)
       v = beta2 * v + (1 - beta2) * g^2          vhat = v / (1 - beta2^step)
       param = (1 - lr * weight_decay) * param - lr * mhat / (sqrt(vhat) + eps) */
typedef struct mt_adamw {
    float lr, beta1, beta2, eps, weight_decay, grad_scale;
    int64_t step;                         /* number of this step, from 1 */
    const mt_random *stochastic_rounding; /* the random words for rounding a 16-bit param; NULL: to nearest even */
} mt_adamw;

/* Does one step: updates param, m and v, and master if it is given. All views have the same shape. m and v are zero
   before step 1. An MT_F32 param has no master: pass mt_none(). A 16-bit param can be updated in three ways:
   - With a master (MT_F32), the step updates master. param becomes a copy of it, rounded to nearest even.
   - Without a master, the step updates param and rounds it to nearest even. Updates below half a unit in the last place
     are lost.
   - Without a master and with stochastic_rounding, the step updates param and rounds it up or down at random. The mean
     over many roundings is exact, so small updates are kept on average. See docs/gpus.md.
   Errors: MT_ERR_DTYPE (an f32 param with a master), MT_ERR_ARGUMENT (stochastic_rounding with a master or an f32
   param; see also mt_adamw_check). */
MT_API mt_status mt_adamw_step(mt_context *ctx, const mt_adamw *hyper, mt_tensor param, mt_tensor master,
                               mt_tensor grad, mt_tensor m, mt_tensor v);

/* Operators over a list of tensors, with a few launches for the whole list (the multi_tensor_apply of NVIDIA's Apex).
   A list is made once and used in every step. It keeps the addresses, not the data, of its tensors, which must stay
   where they are until mt_multi_tensor_destroy.
   mt_multi_tensor_create_adamw makes a list for mt_multi_tensor_adamw, with `count` tensors. With stochastic_rounding 1
   each of them has a `random`.
   mt_multi_tensor_create_squares makes a list for mt_multi_tensor_sum_of_squares.
   Both copy the array `tensors`. On a GPU they also allocate with mt_context_alloc, copy a table to the GPU, and wait
   for the stream. count may be 0. The caller owns the list, and destroys it before the context. Errors:
   MT_ERR_ARGUMENT, MT_ERR_SHAPE, MT_ERR_DTYPE, MT_ERR_MEMORY, MT_ERR_SYSTEM; *out is then unchanged. */
typedef struct mt_multi_tensor mt_multi_tensor;
typedef struct mt_adamw_tensor {
    mt_tensor param, master, grad, m, v; /* as in mt_adamw_step */
    int weight_decay;                    /* 1: mt_adamw.weight_decay applies; 0: no weight decay */
    mt_random random;                    /* step n takes the random words of subsequence random.subsequence + n */
} mt_adamw_tensor;
typedef struct mt_square_tensor {
    mt_tensor x; /* MT_F32 */
    int64_t out; /* the column of `out` to which the squares of x are added */
} mt_square_tensor;
MT_API mt_status mt_multi_tensor_create_adamw(mt_context *ctx, const mt_adamw_tensor *tensors, int count,
                                              int stochastic_rounding, mt_multi_tensor **out);
MT_API mt_status mt_multi_tensor_create_squares(mt_context *ctx, const mt_square_tensor *tensors, int count,
                                                mt_multi_tensor **out);
MT_API void mt_multi_tensor_destroy(mt_context *ctx, mt_multi_tensor *list); /* NULL is allowed */

/* Does the step of mt_adamw_step for every tensor of the list, with the same bits. hyper->stochastic_rounding must be
   NULL, because the list says how to round. `values` may be NULL. Otherwise it is in memory of the context's device.
   When the step runs on the device, it takes lr, grad_scale and step from there, and does nothing if skip is not 0.
   Those of hyper are then not used, but still checked. What is in memory of the device is not checked.
   MT_ERR_ARGUMENT: stochastic_rounding is not NULL, the list is of another kind, or mt_adamw_check refuses hyper. */
typedef struct mt_adamw_values {
    float lr, grad_scale;
    int64_t step;
    int32_t skip; /* not 0: the step changes nothing */
} mt_adamw_values;
MT_API mt_status mt_multi_tensor_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                       const mt_adamw_values *values);

/* Does mt_sum_of_squares for every tensor of the list, in its order and with the same bits: out [1, n] in MT_F32 gets
   out[0][tensor.out] += sum of squares. MT_ERR_ARGUMENT: a list of another kind, or a tensor.out that is not in [0, n).
   Scratch memory comes from the arena. */
MT_API mt_status mt_multi_tensor_sum_of_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out);

/* ---- loss scaling ------------------------------------------------------------------------------------------------ */

/* Gradients of MT_F16 activations vanish below 6e-8 and overflow above 65504. So the loss is multiplied by a large
   scale (arXiv 1710.03740, section 3.2). The scale grows after growth_interval good steps in a row. It shrinks when
   gradients are not finite (an overflow), as in Megatron's DynamicGradScaler. A step looks like this:
       MT_TRY(mt_gpt_backward(ctx, &gpt, scaler.scale / tokens, &saved));
       MT_TRY(mt_sync_gradients(ctx, params));
       MT_TRY(mt_grad_norm(ctx, params, &norm));
       float unscale = mt_loss_scaler_update(&scaler, &norm);
       if (unscale > 0) MT_TRY(mt_optimizer_step(ctx, &optimizer, lr, unscale * mt_clip_coefficient(norm, 1.0f)));
   Every rank has the same norm and so the same scale: either all ranks take the step or none does. A skipped step
   changes no parameter. MT_BF16 and MT_F32 need no scale. With initial_scale 1 and growth 1 a scaler only skips and
   counts the steps that are not finite. */
typedef struct mt_loss_scaler_desc {
    float initial_scale;   /* 0: 2^32 */
    float min_scale;       /* 0: 1 */
    float growth, backoff; /* factors by which the scale grows and shrinks; 0: 2 and 1/2 */
    int growth_interval;   /* good steps in a row before the scale grows; 0: 1000 */
    int hysteresis;        /* n: the scale shrinks at the n-th overflow since it grew, and at each later one; 0: 2 */
} mt_loss_scaler_desc;

/* The whole state of a scaler. A checkpoint saves this struct (mt_training_state.scaler). */
typedef struct mt_loss_scaler {
    mt_loss_scaler_desc desc;
    float scale;     /* multiply the loss by it */
    int good_steps;  /* in a row */
    int overflows;   /* since the scale last grew */
    int64_t skipped; /* skipped steps in total */
} mt_loss_scaler;

/* Creates a scaler; it needs no destroy. desc NULL: the defaults. Scales that are powers of two, such as the defaults,
   do not change the digits of a gradient. MT_ERR_ARGUMENT: a value is out of range. */
MT_API mt_status mt_loss_scaler_create(mt_context *ctx, const mt_loss_scaler_desc *desc, mt_loss_scaler *out);

/* Updates the scale. Call it after mt_grad_norm and before mt_optimizer_step. Divides *norm by the scale of this step
   and sets the scale of the next step. Returns 1 / the scale of this step; multiply the grad_scale of mt_optimizer_step
   by it. Returns 0 when the norm is not finite: skip the step. When scaler or norm is NULL, returns 0 and changes
   nothing. */
MT_API float mt_loss_scaler_update(mt_loss_scaler *scaler, float *norm);

/* Returns the factor that clips a gradient of this norm to max_norm: min(1, max_norm / (norm + 1e-6)), or 1 when
   max_norm <= 0. Check first that the norm is finite: clipping does not remove infinities or NaN. */
MT_API float mt_clip_coefficient(float norm, float max_norm);

/* For authors of checkpoints: returns the name of the first field that is out of range, such as
   "loss_scaler.min_scale", or NULL. desc NULL: NULL. */
MT_API const char *mt_loss_scaler_fault(const mt_loss_scaler_desc *desc);

/* For authors of checkpoints: takes a name that mt_loss_scaler_fault has returned, and returns what this field must be,
   such as "at least 1"; NULL for another name. */
MT_API const char *mt_loss_scaler_wanted(const char *field);

/* ---- a training step that does not wait -------------------------------------------------------------------------- */

/* The numbers of a training step that change from step to step. On a GPU they are in its memory, so the host need not
   wait for the norm before it starts the step, and a step that is recorded once (a CUDA graph) can run many times. */
typedef struct mt_step_values {
    uint64_t random_offset; /* for mt_random.offset */
    float lr;               /* of this step */
    float max_norm;         /* as in mt_clip_coefficient */
    mt_loss_scaler scaler;  /* scale is that of this step, and after mt_step_decide that of the next one */
    float loss;             /* after mt_step_decide: its argument */
    float norm;             /* after mt_step_decide: of the gradients, divided by the scale; or not finite */
    /* after mt_step_decide: of this step, but grad_scale only if skip is 0; step is the number of steps that were not
       skipped */
    mt_adamw_values adamw;
} mt_step_values;

/* Decides what a step does: computes the norm from `sums`, updates the loss scale as mt_loss_scaler_update does, clips
   as mt_clip_coefficient does, and writes values->loss, norm and adamw, all with the same bits as these functions.
   sums [1, 2], MT_F32: element 0 is the sum of squares of the gradients that count towards the norm. Element 1 is that
   of the other copies of gradients; it does not change the norm, but the step is skipped when it is not finite.
   loss [1, 1], MT_F32, is optional: without it, the loss counts as 0. When the norm or the loss is not finite,
   adamw.skip is 1, adamw.step does not change, and the scaler counts an overflow. `values` is in memory of the
   context's device. MT_ERR_ARGUMENT: values is NULL. */
MT_API mt_status mt_step_decide(mt_context *ctx, mt_tensor sums, mt_tensor loss, mt_step_values *values);

/* The norm that mt_step_decide computes from its two sums, before it divides by the scale. A NaN has the bits of NAN
   (math.h). sums NULL: 0. */
MT_API float mt_norm_of_sums(const float sums[2]);

/* ---- for authors of operators and blocks ------------------------------------------------------------------------- */

/* The types that a view may have: any type, one of the float types (MT_F32, MT_BF16, MT_F16), or MT_F32 only. */
enum { MT_ARG_ANY = 0, MT_ARG_FLOAT = 1, MT_ARG_F32 = 2 };

/* What an operator does with a view: it reads it, writes it, or both. Add MT_ARG_OPTIONAL with | if the view may be
   mt_none(). */
enum {
    MT_ARG_IN = 1,
    MT_ARG_OUT = 2,
    MT_ARG_IN_OUT = 3,
    MT_ARG_GRADIENT = 67, /* both: it replaces the view by its gradient, as mt_cross_entropy_backward does to logits */
    MT_ARG_OPTIONAL = 4,
    /* Add these with |, see mt_set_sum_check. MT_ARG_SUM: the operator adds a sum over rows to the view, as
       mt_bias_backward does to dbias. MT_ARG_PRODUCT: the view is the result of a product, such as c of mt_gemm. With
       both, it is a product that sums over the rows of its operands, such as dweight of mt_linear_gradients.
       MT_ARG_MOVED: the operator writes elements of the view, or sums or multiples of them, as mt_add does. */
    MT_ARG_SUM = 16,
    MT_ARG_PRODUCT = 32,
    MT_ARG_MOVED = 128
};

/* Describes what an operator requires of one view. An array of mt_arg describes all views of the operator:
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

/* Returns the target of tokens without a loss, from the field mt_cross_entropy_shard_desc.ignore_index: its value,
   but 0 for MT_ZERO, and -100 for 0. */
MT_API int32_t mt_ignore_index(int32_t ignore_index);

/* Returns the hash of one element, from its global number and its bits. mt_hash adds up these hashes. */
MT_API uint64_t mt_hash_element(uint64_t element, uint32_t bits);

#ifdef __cplusplus
}
#endif

#endif /* MT_KERNELS_CUH */

/* ================================================== the API ends here ============================================= */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MT_KERNELS_IMPLEMENTED)
#define MT_KERNELS_IMPLEMENTED

#include <float.h>
#include <limits.h>
#include <math.h>

#if defined(__F16C__) && defined(__GNUC__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

#if defined(MT_USE_ONEDNN) && defined(MT_USE_CBLAS)
#error "mt_kernels.cuh: define MT_USE_ONEDNN or MT_USE_CBLAS, not both"
#endif
#if defined(MT_USE_ONEDNN)
#include <dnnl.h>
#elif defined(MT_USE_CBLAS)
#if !defined(MT_CBLAS_HEADER)
#define MT_CBLAS_HEADER <cblas.h>
#endif
#include MT_CBLAS_HEADER
#endif

#if MT_HAS_CUDA
#include <cublasLt.h>
#endif

/* Compilers vectorise the loops below without -ffast-math (see MT_INDEPENDENT in mt_comm.h). */
#if defined(__clang__)
#define MTI_UNROLL _Pragma("clang loop unroll(full)")
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed" /* -O0 and -O1 leave the loops scalar */
#elif defined(__GNUC__) && !defined(__CUDACC__)
#define MTI_UNROLL _Pragma("GCC unroll 16")
#else
#define MTI_UNROLL
#endif
#if MT_PREFER_512
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif

/* Brings the line of the cache at an address into L1, or into L2. */
#if defined(__GNUC__)
#define MTI_PREFETCH(address) __builtin_prefetch(address)
#define MTI_PREFETCH_L2(address) __builtin_prefetch(address, 0, 2)
#else
#define MTI_PREFETCH(address) ((void)(address))
#define MTI_PREFETCH_L2(address) ((void)(address))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>options --------------------------------------------------------------------------------------------------- */

/* A packed copy of a weight, see mt_gemm_pack. */
typedef struct mti_packed {
    mt_tensor weight;
    void *data; /* of mt_context_alloc */
    size_t bytes;
    void *layout; /* oneDNN: the primitive descriptor that has chosen the layout */
    struct mti_packed *next;
} mti_packed;

/* The state that this header keeps in a context. */
typedef struct mti_kernels {
    mt_gemm_options options;
    /* The mti_lt of a GPU, or the mti_dnnl of a CPU; gemm_destroy frees it. NULL before the first product that needs it
       and with another GEMM library. */
    void *gemm;
    void (*gemm_destroy)(mt_context *ctx, void *gemm);
    mti_packed *packed;               /* the packed copies of weights */
    uintptr_t packed_from, packed_to; /* all their weights are between these addresses */
    int built_for;                    /* see mti_built_for; 0 before its first call */
    int tiles;                        /* see mti_tiles_open; 0 before its first call, otherwise 1 or -1 */
    mt_sum_check sum_check;           /* see mt_set_sum_check; NULL: none */
} mti_kernels;

static void mti_packed_free(mt_context *ctx, mti_packed *p); /* >>gemm */

static void mti_kernels_destroy(mt_context *ctx, void *memory) {
    mti_kernels *k = (mti_kernels *)memory;
    while (k->packed) {
        mti_packed *next = k->packed->next;
        mti_packed_free(ctx, k->packed);
        k->packed = next;
    }
    if (k->gemm) (k->gemm_destroy)(ctx, k->gemm);
}

/* Returns the mti_kernels of the context. Creates it on the first call. */
static mt_status mti_kernels_open(mt_context *ctx, mti_kernels **out) {
    void *memory = mt_context_slot(ctx, MT_SLOT_KERNELS);
    if (!memory) MT_TRY(mt_context_slot_create(ctx, MT_SLOT_KERNELS, sizeof **out, mti_kernels_destroy, &memory));
    *out = (mti_kernels *)memory;
    return MT_SUCCESS;
}

/* The bytes from the first element of a view to behind the last one. The view has elements. */
static size_t mti_view_span(mt_tensor t) {
    int64_t elements = mt_size_mul(t.rows - 1, mt_tensor_ld(t)) + t.cols;
    return (size_t)elements * mt_dtype_size(t.dtype);
}

/* The address behind the last element of a view. */
static uintptr_t mti_view_end(mt_tensor t) { return (uintptr_t)t.data + mti_view_span(t); }

/* Drops the packed copies of the weights that share memory with t, which is written or freed. */
static void mti_packed_drop(mt_context *ctx, mt_tensor t) {
    mti_kernels *k = (mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    uintptr_t from = (uintptr_t)t.data, to;
    mti_packed **link;
    if (!k || !k->packed || !t.data || t.rows < 1 || t.cols < 1) return;
    to = mti_view_end(t);
    if (from >= k->packed_to || to <= k->packed_from) return;
    for (link = &k->packed; *link;) {
        mti_packed *p = *link;
        if (from >= mti_view_end(p->weight) || to <= (uintptr_t)p->weight.data) {
            link = &p->next;
            continue;
        }
        *link = p->next;
        mti_packed_free(ctx, p);
    }
}

#define MTI_GEMM_CHOICE_WORDS "MT_GEMM_MEASURED MT_GEMM_HEURISTIC"
#define MTI_EPILOGUE_WORDS "MT_EPILOGUE_SEPARATE MT_EPILOGUE_FUSED MT_EPILOGUE_MEASURED"

MT_API mt_status mt_gemm_set_options(mt_context *ctx, const mt_gemm_options *options) {
    static const char *const function = "mt_gemm_set_options";
    mt_gemm_options o;
    mti_kernels *k;
    if (!ctx) return MT_ERR_ARGUMENT;
    memset(&o, 0, sizeof o);
    if (options) o = *options;
    MT_TRY(mt_check_enum(ctx, function, NULL, "choice", (int)o.choice, MTI_GEMM_CHOICE_WORDS));
    MT_TRY(mt_check_enum(ctx, function, NULL, "epilogue", (int)o.epilogue, MTI_EPILOGUE_WORDS));
    MT_TRY(mti_kernels_open(ctx, &k));
    k->options = o;
    if (mt_context_invariant(ctx)) k->options.epilogue = MT_EPILOGUE_SEPARATE;
    return MT_SUCCESS;
}

MT_API mt_gemm_options mt_gemm_get_options(const mt_context *ctx) {
    const mti_kernels *k = (const mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    mt_gemm_options defaults;
    memset(&defaults, 0, sizeof defaults);
    return k ? k->options : defaults;
}

/* ---- >>check: checks of arguments -------------------------------------------------------------------------------- */

static mt_status mti_expect_dtype(mt_context *ctx, const char *where, const char *name, mt_dtype dtype) {
    if (mt_dtype_size(dtype) == 0)
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: %s.dtype is %d, must be MT_F32, MT_BF16, MT_F16, MT_I32 or MT_U8", where,
                       name, (int)dtype);
    return MT_SUCCESS;
}

/* Whether a view has no element. An operator does nothing on such a view. */
static int mti_is_empty(mt_tensor t) { return t.rows == 0 || t.cols == 0; }

/* Accepts every valid shape and type. data may be NULL if the view has no element. */
static mt_status mti_expect_view(mt_context *ctx, const char *where, const char *name, mt_tensor t) {
    int64_t ld = mt_tensor_ld(t);
    if (t.rows < 0 || t.cols < 0 || ld < t.cols || mt_size_mul(mt_size_mul(t.rows, ld), 8) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s is [%lld, %lld] with ld %lld, which is not a valid shape", where,
                       name, (long long)t.rows, (long long)t.cols, (long long)t.ld);
    MT_TRY(mti_expect_dtype(ctx, where, name, t.dtype));
    if (mti_is_empty(t)) return MT_SUCCESS;
    if (!t.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is [%lld, %lld] but its data is NULL", where, name,
                       (long long)t.rows, (long long)t.cols);
    if (mt_context_has_address(ctx, t.data) && (uintptr_t)t.data % mt_dtype_size(t.dtype))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the data of %s, %p, is not aligned to its %zu-byte elements", where,
                       name, t.data, mt_dtype_size(t.dtype));
    return MT_SUCCESS;
}

static mt_status mti_expect_type(mt_context *ctx, const char *where, const mt_arg *arg) {
    mt_dtype dtype = arg->view->dtype;
    if (arg->type == MT_ARG_F32 && dtype != MT_F32)
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: %s is %s, must be f32", where, arg->name, mt_dtype_name(dtype));
    if (arg->type == MT_ARG_FLOAT && !mt_dtype_is_float(dtype))
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: %s is %s, must be f32, bf16 or f16", where, arg->name,
                       mt_dtype_name(dtype));
    return MT_SUCCESS;
}

MT_API mt_status mt_set_sum_check(mt_context *ctx, mt_sum_check check) {
    mti_kernels *k;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_kernels_open(ctx, &k));
    k->sum_check = check;
    return MT_SUCCESS;
}

static mt_status mti_expect_sums(mt_context *ctx, const char *where, const mt_arg *args, int count) {
    const mti_kernels *k = (const mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    return k && k->sum_check ? (k->sum_check)(ctx, where, args, count) : MT_SUCCESS;
}

MT_API mt_status mt_args_check(mt_context *ctx, const char *where, const mt_arg *args, int count) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!where || count < 0 || (count > 0 && !args))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_args_check: where or args is NULL, or count is negative");
    for (i = 0; i < count; i++) {
        mt_tensor t;
        if (!args[i].view || !args[i].name)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the view or the name of args[%d] is NULL", where, i);
        t = *args[i].view;
        if ((args[i].use & MT_ARG_OPTIONAL) && !t.data) continue;
        MT_TRY(mti_expect_view(ctx, where, args[i].name, t));
        MT_TRY(mti_expect_type(ctx, where, &args[i]));
        if (t.rows != args[i].rows || t.cols != args[i].cols)
            return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s is [%lld, %lld], must be [%lld, %lld]", where, args[i].name,
                           (long long)t.rows, (long long)t.cols, (long long)args[i].rows, (long long)args[i].cols);
    }
    return mti_expect_sums(ctx, where, args, count);
}

MT_API mt_status mt_tensor_check(mt_context *ctx, const char *where, const char *name, mt_tensor t, int type,
                                 int64_t rows, int64_t cols) {
    mt_arg arg;
    arg.name = name, arg.view = &t;
    arg.rows = rows, arg.cols = cols;
    arg.type = type, arg.use = MT_ARG_IN;
    return mt_args_check(ctx, where, &arg, 1);
}

static mt_status mti_expect_pointer(mt_context *ctx, const char *where, const char *name, const void *ptr,
                                    int64_t count) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (count < 0) return mt_fail(ctx, MT_ERR_SHAPE, "%s: the count of %s is %lld", where, name, (long long)count);
    if (!ptr && count > 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL, must hold %lld elements", where, name, (long long)count);
    return MT_SUCCESS;
}

/* Whether b, whose memory begins in that of a, uses other columns of the rows of a. */
static int mti_other_columns(mt_tensor a, mt_tensor b) {
    int64_t size_a = (int64_t)mt_dtype_size(a.dtype), size_b = (int64_t)mt_dtype_size(b.dtype);
    int64_t pitch = mt_size_mul(mt_tensor_ld(a), size_a), from;
    if (pitch < 1 || size_b < 1 || a.cols > mt_tensor_ld(a)) return 0;
    if (b.rows > 1 && mt_size_mul(mt_tensor_ld(b), size_b) != pitch) return 0;
    from = (int64_t)(((uintptr_t)b.data - (uintptr_t)a.data) % (uintptr_t)pitch);
    return from >= a.cols * size_a && b.cols <= (pitch - from) / size_b;
}

MT_API mt_status mt_check_apart(mt_context *ctx, const char *where, const char *a_name, mt_tensor a, const char *b_name,
                                mt_tensor b) {
    mt_tensor first = (uintptr_t)a.data <= (uintptr_t)b.data ? a : b;
    mt_tensor second = (uintptr_t)a.data <= (uintptr_t)b.data ? b : a;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!a.data || !b.data || a.rows < 1 || b.rows < 1 || a.cols < 1 || b.cols < 1) return MT_SUCCESS;
    if (!mt_context_has_address(ctx, a.data) || !mt_context_has_address(ctx, b.data)) return MT_SUCCESS;
    if ((uintptr_t)second.data - (uintptr_t)first.data >= mti_view_span(first) || mti_other_columns(first, second))
        return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s [%lld, %lld] and %s [%lld, %lld] overlap", where, a_name,
                   (long long)a.rows, (long long)a.cols, b_name, (long long)b.rows, (long long)b.cols);
}

/* For operators whose y may be x: refuses a y that overlaps x without being the same view. */
static mt_status mti_expect_same_or_apart(mt_context *ctx, const char *where, mt_tensor x, mt_tensor y) {
    if (x.data == y.data && x.dtype == y.dtype && (x.rows <= 1 || mt_tensor_ld(x) == mt_tensor_ld(y)))
        return MT_SUCCESS;
    return mt_check_apart(ctx, where, "y", y, "x", x);
}

static mt_status mti_expect_finite(mt_context *ctx, const char *where, const char *name, float value) {
    return mt_check_float(ctx, where, NULL, name, value, MT_FLOAT_FINITE);
}

/* Refuses a field. `is` is its value. */
static mt_status mti_field_fail(mt_context *ctx, mt_status status, const char *function, const char *name,
                                const char *field, const char *is, const char *wanted) {
    if (!function) function = "";
    if (!field) field = "a field";
    if (!name) return mt_fail(ctx, status, "%s: %s is %s, must be %s", function, field, is, wanted);
    return mt_fail(ctx, status, "%s: '%s': %s is %s, must be %s", function, name, field, is, wanted);
}

static mt_status mti_integer_check(mt_context *ctx, mt_status status, const char *function, const char *name,
                                   const char *field, int64_t value, int64_t low, int64_t high) {
    char is[32], wanted[64];
    if (value >= low && value <= high) return MT_SUCCESS;
    snprintf(is, sizeof is, "%lld", (long long)value);
    if (high == INT64_MAX) snprintf(wanted, sizeof wanted, "at least %lld", (long long)low);
    else if (low < high && low == high - 1)
        snprintf(wanted, sizeof wanted, "%lld or %lld", (long long)low, (long long)high);
    else snprintf(wanted, sizeof wanted, "from %lld to %lld", (long long)low, (long long)high);
    return mti_field_fail(ctx, status, function, name, field, is, wanted);
}

MT_API mt_status mt_check_integer(mt_context *ctx, const char *function, const char *name, const char *field,
                                  int64_t value, int64_t low, int64_t high) {
    return mti_integer_check(ctx, MT_ERR_ARGUMENT, function, name, field, value, low, high);
}

MT_API mt_status mt_check_size(mt_context *ctx, const char *function, const char *name, const char *field,
                               int64_t value, int64_t low, int64_t high) {
    return mti_integer_check(ctx, MT_ERR_SHAPE, function, name, field, value, low, high);
}

/* Returns the number of words, which have spaces between them. */
static int mti_word_count(const char *words) {
    int count = 1;
    for (; *words; words++) count += *words == ' ';
    return count;
}

MT_API mt_status mt_check_enum(mt_context *ctx, const char *function, const char *name, const char *field, int value,
                               const char *words) {
    char is[16], wanted[512];
    int count;
    size_t n = 0;
    if (!words) return mti_field_fail(ctx, MT_ERR_ARGUMENT, function, name, "words", "NULL", "the words of an enum");
    count = mti_word_count(words);
    if (value >= 0 && value < count) return MT_SUCCESS;
    for (; *words && n + 5 < sizeof wanted; words++) {
        const char *between = " or ";
        if (*words != ' ') {
            wanted[n++] = *words;
            continue;
        }
        if (--count > 1) between = ", ";
        memcpy(wanted + n, between, strlen(between));
        n += strlen(between);
    }
    wanted[n] = 0;
    snprintf(is, sizeof is, "%d", value);
    return mti_field_fail(ctx, MT_ERR_ARGUMENT, function, name, field, is, wanted);
}

MT_API void mt_enum_word(const char *words, int value, char text[MT_WORD_MAX]) {
    int i;
    if (!text) return;
    snprintf(text, MT_WORD_MAX, "%d", value);
    if (!words || value < 0 || value >= mti_word_count(words)) return;
    for (i = 0; i < value; i++) words = strchr(words, ' ') + 1;
    snprintf(text, MT_WORD_MAX, "%.*s", (int)strcspn(words, " "), words);
}

MT_API mt_status mt_check_float(mt_context *ctx, const char *function, const char *name, const char *field, float value,
                                mt_float_range range) {
    static const char *const wanted[] = {"finite", "at least 0 and finite", "above 0 and finite",
                                         "at least 0 and below 1"};
    char is[32];
    int finite = value >= -FLT_MAX && value <= FLT_MAX; /* a NaN is not */
    MT_TRY(mt_check_integer(ctx, function, name, "mt_float_range", (int)range, 0, MT_FLOAT_PROBABILITY));
    if (finite && (range != MT_FLOAT_ABOVE_0 || value > 0.0f) && (range != MT_FLOAT_PROBABILITY || value < 1.0f) &&
        (range == MT_FLOAT_FINITE || value >= 0.0f))
        return MT_SUCCESS;
    snprintf(is, sizeof is, "%g", (double)value);
    return mti_field_fail(ctx, MT_ERR_ARGUMENT, function, name, field, is, wanted[range]);
}

/* ---- >>math ------------------------------------------------------------------------------------------------------ */

#define MTI_PARTIALS 32 /* partial sums of a reduction; fixed, so that every processor adds in the same order */
#define MTI_BLOCK 1024  /* columns that several small loops process one after the other while they are in L1 */

/* a if `first` is 1, b if it is 0, by a bit mask. gcc does not move arithmetic that may trap out of a branch, so it
   would vectorise ?: between computed floats on AVX-512 only. */
MT_INLINE float mti_select(int first, float a, float b) {
    uint32_t mask = 0u - (uint32_t)first;
    return mt_f32_from_bits((mt_f32_bits(a) & mask) | (mt_f32_bits(b) & ~mask));
}

MT_INLINE float mti_abs(float x) { return mt_f32_from_bits(mt_f32_bits(x) & 0x7fffffffu); }

/* e^r - 1 = r + r^2 q(r) for |r| <= 0.348. The coefficients of q are fitted by weighted least squares (Lawson) for the
   smallest relative error of e^r, 3.2e-9. */
MT_INLINE MT_HOST_DEVICE float mti_exp_part(float r) {
    float q = 1.38140109e-3f * r + 8.36900063e-3f;
    q = q * r + 4.16684151e-2f;
    q = q * r + 1.66665182e-1f;
    q = q * r + 4.9999994e-1f;
    return q * (r * r) + r;
}

/* e^x. A multiple of ln 2 is subtracted from x, so that |r| <= 0.348. ln 2 is split into two parts for this (Cody and
   Waite). Adding 1.5 * 2^23 to x / ln 2 rounds it to an integer, which is in the low bits of t.
   Results below FLT_MIN become 0, exp(-inf) = 0, exp(inf) = inf, and NaN stays NaN. Bit masks select the results at
   both ends of the range, see mti_select. */
MT_INLINE MT_HOST_DEVICE float mti_exp(float x) {
    const float round = 12582912.0f;
    float t = x * 1.44269504f + round;
    float n = t - round;
    float y = mti_exp_part((x - n * 0.693359375f) + n * 2.12194440e-4f) + 1.0f;
    uint32_t bits, fits;
    bits = (mt_f32_bits(y) + (mt_f32_bits(t) << 23)) & ((uint32_t)(x < -87.33654f) - 1u);
    fits = 0u - (uint32_t)(x <= 88.72283f);
    return mt_f32_from_bits((bits & fits) | (mt_f32_bits(x + (float)INFINITY) & ~fits));
}

/* Returns x, which the compiler then does not know. Where ?: limits the argument of a formula to a constant, gcc
   computes the formula for the constant, too, and branches between the results, so that the loop does not vectorise. */
static float mti_unknown(float x) {
    volatile float y = x;
    return y;
}

/* e^x for x <= 88, in fewer instructions than mti_exp and with the same error. Results below FLT_MIN are denormal or 0.
   `least` is mti_unknown(-88.0f), which a caller gets before its loop. The number that rounds is 1.5 * 2^23 + 127, so
   that the low bits of t are the exponent with its bias. They are 0 for x = -88. */
MT_INLINE float mti_exp_to_88(float x, float least) {
    const float round = 12583039.0f;
    float from = x < least ? least : x, t = from * 1.44269504f + round, n = t - round;
    float power = mt_f32_from_bits(mt_f32_bits(t) << 23);
    return mti_exp_part((from - n * 0.693359375f) + n * 2.12194440e-4f) * power + power;
}

/* 2^x for -127 <= x <= 127, with a relative error of at most 1.8e-7. It is 2^n 2^r with an integer n and |r| <= 0.5.
   2^r = 1 + r q(r), where q is fitted like that of mti_exp_part, with a relative error of 9.4e-8. 2^-127 is 0, 2^0 is
   1, and NaN stays NaN. `round` is that of mti_exp_to_88. */
MT_INLINE float mti_exp2(float x) {
    const float round = 12583039.0f;
    float t = x + round, r = x - (t - round), q = 1.32694072e-3f * r + 9.67129413e-3f;
    q = q * r + 5.55071123e-2f;
    q = q * r + 2.40222469e-1f;
    q = q * r + 6.93147004e-1f;
    return (q * r + 1.0f) * mt_f32_from_bits(mt_f32_bits(t) << 23);
}

/* e^x for x that is at most 0, up to rounding, in fewer instructions than mti_exp_to_88. Roundings of x / ln 2 add an
   absolute error of at most 1e-7 |x| e^x to that of mti_exp2. e^-inf is 0. `least` is mti_unknown(-127.0f). */
MT_INLINE float mti_exp_below(float x, float least) {
    float e = x * 1.44269504f;
    return mti_exp2(e < least ? least : e);
}

/* Phi(x) = 0.5 (1 + erf(x / sqrt(2))). e is e^(-x^2 / 2), which the callers have computed already.
   |x| < 1:  0.5 + x P(x^2). The relative error of P is 7e-10.
   |x| >= 1: the tail 0.5 erfc(|x| / sqrt(2)) = e S(u) with u = 1 / (1 + 0.33 |x|). The relative error of S is 1e-8
   where e is not 0. Nothing cancels in the left tail.
   P and S are fitted like q in mti_exp. The error of erf is at most 1.5e-7. */
MT_INLINE float mti_normal_cdf(float x, float e) {
    float size = mti_abs(x), z = x * x, u = 1.0f / (1.0f + 0.33f * size);
    float p = -7.65420828e-6f * z + 1.13486371e-4f, s = 4.34392653e-2f * u - 1.37640953e-1f, tail;
    p = p * z - 1.18632999e-3f;
    s = s * u + 1.07992314e-1f;
    p = p * z + 9.97332297e-3f;
    s = s * u + 6.87360205e-3f;
    p = p * z - 6.64903596e-2f;
    s = s * u + 1.00570522e-1f;
    p = p * z + 3.98942292e-1f;
    s = s * u + 1.15344465e-1f;
    s = s * u + 1.31830275e-1f;
    s = s * u + 1.31644055e-1f;
    tail = e * (s * u);
    tail = mti_select(x < 0.0f, tail, 1.0f - tail);
    p = 0.5f + x * p;
    return mti_select(size < 1.0f, p, tail);
}

/* tanh(x), with the sign of x, where u = |x| and e = e^-2u:
   u < 0.625:  u + u^3 P(u^2). P is fitted like q in mti_exp, with a relative error of 4.4e-9.
   u >= 0.625: 1 - 2 e / (1 + e), which is 1 for large u and infinity.
   The relative error of tanh is at most 1.6e-7. NaN stays NaN, and -0 stays -0. `least` is that of mti_exp_to_88. */
MT_INLINE float mti_tanh(float x, float least) {
    float u = mti_abs(x), z = u * u, e = mti_exp_to_88(-2.0f * u, least);
    float large = 1.0f - 2.0f * e / (1.0f + e), p = -5.70498451e-3f * z + 2.06390849e-2f;
    p = p * z - 5.37397143e-2f;
    p = p * z + 1.33314422e-1f;
    p = p * z - 3.33332819e-1f;
    p = u + u * (z * p);
    return mt_f32_from_bits(mt_f32_bits(mti_select(u < 0.625f, p, large)) | (mt_f32_bits(x) & 0x80000000u));
}

#if MT_HAS_CUDA
extern "C++" {

/* Kernels whose result is rounded to 16 bits pass fast = true. Then GPUs compute e^x and a / b approximately, with a
   relative error of at most 2^-23 (2 + 1.2 |x|) for e^x and 2^-22 for a / b. Results below FLT_MIN may become 0. In f32
   results fast is false. */
static __device__ __forceinline__ float mti_cuda_exp(int fast, float x) { return fast ? __expf(x) : expf(x); }

static __device__ __forceinline__ float mti_cuda_quotient(int fast, float a, float b) {
    return fast ? __fdividef(a, b) : a / b;
}

/* Phi(x) = 0.5 (1 + erf(x / sqrt(2))), as e S(u) with u = 1 / (1 + 0.3 |x|) in the left tail. S is fitted like that of
   mti_normal_cdf, for |x| <= 14. Its relative error is 8.3e-6. e is e^(-x^2 / 2). */
static __device__ __forceinline__ float mti_cuda_normal_cdf(float x, float e) {
    float u = __fdividef(1.0f, 1.0f + 0.3f * fabsf(x)), s = -0.0770946381f * u + 0.216028721f;
    s = s * u - 0.0169386918f;
    s = s * u + 0.144191494f;
    s = s * u + 0.113743084f;
    s = s * u + 0.120074132f;
    s = e * (s * u);
    return x < 0.0f ? s : 1.0f - s;
}

} /* extern "C++" */
#endif

/* sqrt(x) for x >= 0. The sqrt of libm sets errno, which keeps loops from vectorising. This function estimates 1 /
   sqrt(x) from the bits of x, then takes two Newton steps and one Heron step. It scales small x up first, so that no
   intermediate result is denormal. */
MT_INLINE float mti_sqrt(float x) {
    int tiny = x < 1e-20f;
    float up = mti_select(tiny, 18446744073709551616.0f, 1.0f);   /* 2^64 */
    float down = mti_select(tiny, 2.3283064365386963e-10f, 1.0f); /* 2^-32 */
    float v = x * up;
    float y = mt_f32_from_bits(0x5f3759dfu - (mt_f32_bits(v) >> 1));
    float s;
    y = y * (1.5f - (0.5f * v * y) * y);
    y = y * (1.5f - (0.5f * v * y) * y);
    s = v * y;
    s = 0.5f * (s + v / s) * down;
    return mti_select((x > 0.0f) & (x <= FLT_MAX), s, x);
}

/* ---- >>views: rows of a tensor for loops, elements of a tensor for kernels --------------------------------------- */

static float *mti_row(mt_tensor t, int64_t row) { return t.data ? (float *)t.data + row * mt_tensor_ld(t) : NULL; }

static uint16_t *mti_row16(mt_tensor t, int64_t row) {
    return t.data ? (uint16_t *)t.data + row * mt_tensor_ld(t) : NULL;
}

/* The loop of an operator is a function that computes a range of rows or of columns, and a struct with its arguments.
   mti_cpu_rows and mti_cpu_columns run it on the threads of the context. A loop over rows computes rows of results. A
   loop over columns adds up columns: each thread adds all rows in order, so the bits do not depend on the number of
   threads. A range has at least MTI_GRAIN elements, because waking a thread takes as long as computing a few thousand.
   Ranges of columns begin at multiples of MTI_COLUMN_GRAIN, so that seldom two threads write to one cache line. */
#define MTI_GRAIN 16384
#define MTI_COLUMN_GRAIN 64

static void mti_cpu_rows(mt_context *ctx, int64_t rows, int64_t cols, mt_range_function work, void *data) {
    mt_parallel_for(ctx, rows, MTI_GRAIN / mt_max(cols, 1) + 1, work, data);
}

static void mti_cpu_columns(mt_context *ctx, int64_t rows, int64_t cols, mt_range_function work, void *data) {
    int64_t grain = mt_round_up(MTI_GRAIN / mt_max(rows, 1) + 1, MTI_COLUMN_GRAIN);
    mt_parallel_for(ctx, cols, grain, work, data);
}

/* The items of a loop over single elements are stripes, parts of rows, because a tensor may be one long row. */
#define MTI_STRIPE_COLS 4096
typedef struct mti_stripe {
    int64_t row, col, cols;
} mti_stripe;

/* The number of stripes of a row of n columns. */
static int64_t mti_stripes(int64_t n) { return (n + MTI_STRIPE_COLS - 1) / MTI_STRIPE_COLS; }

/* Item i of mti_cpu_stripes for a tensor with `cols` columns. */
static mti_stripe mti_stripe_of(int64_t cols, int64_t i) {
    int64_t stripes = mti_stripes(cols);
    mti_stripe p;
    p.row = i / stripes;
    p.col = i % stripes * MTI_STRIPE_COLS;
    p.cols = mt_min(MTI_STRIPE_COLS, cols - p.col);
    return p;
}

/* All stripes of [first, last) that are in the row of the first one, as one stripe. *count becomes their number. */
static mti_stripe mti_stripes_of_row(int64_t cols, int64_t first, int64_t last, int64_t *count) {
    int64_t stripes = mti_stripes(cols);
    mti_stripe p = mti_stripe_of(cols, first), end;
    *count = mt_min(stripes - first % stripes, last - first);
    end = mti_stripe_of(cols, first + *count - 1);
    p.cols = end.col + end.cols - p.col;
    return p;
}

static void mti_cpu_stripes(mt_context *ctx, int64_t rows, int64_t cols, mt_range_function work, void *data) {
    mti_cpu_rows(ctx, rows * mti_stripes(cols), mt_min(MTI_STRIPE_COLS, cols), work, data);
}

#if MT_HAS_CUDA
extern "C++" {

/* A view as kernels see it. */
struct mti_view {
    char *data; /* NULL: an optional view that the caller left out */
    int64_t ld;
    int dtype;
};

static mti_view mti_view_of(mt_tensor t) {
    mti_view v;
    v.data = (char *)t.data;
    v.ld = mt_tensor_ld(t);
    v.dtype = (int)t.dtype;
    return v;
}

/* A thread works on a vector: MTI_VECTOR neighbours of a row. A vector has 16 bytes in a 16-bit type, and 32 bytes in
   f32. For views without 16-byte alignment and at the ends of rows, the same kernel works element by element. */
#define MTI_VECTOR 8

/* The number of elements of the vector that begins at col < cols. */
static __device__ __forceinline__ int mti_vector_size(int64_t cols, int64_t col) {
    return (int)(cols - col < MTI_VECTOR ? cols - col : MTI_VECTOR);
}

/* The template argument TYPE of the functions below is the mt_dtype of a view. With MTI_ANY_TYPE they read view.dtype.
   All threads take the same branch on it, but a load behind such a branch waits for the conversion of the load before
   it. So a kernel that is bound by memory passes the type. */
#define MTI_ANY_TYPE (-1)

template <int TYPE> static __device__ __forceinline__ int mti_type_of(const mti_view &v) {
    return TYPE == MTI_ANY_TYPE ? v.dtype : TYPE;
}

/* mti_get loads one element and widens it to f32. mti_put rounds x to the type of the view and stores it. */
template <int TYPE = MTI_ANY_TYPE>
static __device__ __forceinline__ float mti_get(const mti_view &v, int64_t row, int64_t col) {
    int64_t i = row * v.ld + col;
    if (mti_type_of<TYPE>(v) == MT_F32) return ((const float *)v.data)[i];
    if (mti_type_of<TYPE>(v) == MT_BF16) return __bfloat162float(((const __nv_bfloat16 *)v.data)[i]);
    return __half2float(((const __half *)v.data)[i]);
}

template <int TYPE = MTI_ANY_TYPE>
static __device__ __forceinline__ void mti_put(const mti_view &v, int64_t row, int64_t col, float x) {
    int64_t i = row * v.ld + col;
    if (mti_type_of<TYPE>(v) == MT_F32) ((float *)v.data)[i] = x;
    else if (mti_type_of<TYPE>(v) == MT_BF16) ((__nv_bfloat16 *)v.data)[i] = __float2bfloat16_rn(x);
    else ((__half *)v.data)[i] = __float2half_rn(x);
}

} /* extern "C++" */
#endif

/* ---- >>vector-loads: kernels load and store eight elements of any float type at once ----------------------------- */

#if MT_HAS_CUDA
extern "C++" {

struct __align__(16) mti_words {
    uint32_t w[4];
};

/* These two functions load and store 16 bytes with one instruction. nvcc may otherwise load and store the four words of
   an mti_words one by one. */
static __device__ __forceinline__ mti_words mti_load_words(const void *from) {
    uint4 u = *(const uint4 *)from;
    mti_words p;
    p.w[0] = u.x, p.w[1] = u.y, p.w[2] = u.z, p.w[3] = u.w;
    return p;
}

static __device__ __forceinline__ void mti_store_words(void *to, const mti_words &p) {
    *(uint4 *)to = make_uint4(p.w[0], p.w[1], p.w[2], p.w[3]);
}

/* mti_unpack converts eight 16-bit values to f32, mti_pack converts back. The first value is in the low half of
   w[0]. */
static __device__ __forceinline__ void mti_unpack(int dtype, const mti_words &p, float *x) {
    MT_DEVICE_UNROLL
    for (int j = 0; j < 4; j++) {
        if (dtype == MT_BF16) {
            x[2 * j] = __uint_as_float(p.w[j] << 16);
            x[2 * j + 1] = __uint_as_float(p.w[j] & 0xffff0000u);
        } else {
            x[2 * j] = __half2float(__ushort_as_half((unsigned short)(p.w[j] & 0xffffu)));
            x[2 * j + 1] = __half2float(__ushort_as_half((unsigned short)(p.w[j] >> 16)));
        }
    }
}

static __device__ __forceinline__ mti_words mti_pack(int dtype, const float *x) {
    mti_words p;
    MT_DEVICE_UNROLL
    for (int j = 0; j < 4; j++) {
        unsigned low, high;
        if (dtype == MT_BF16) {
            __nv_bfloat162 both = __floats2bfloat162_rn(x[2 * j], x[2 * j + 1]); /* one instruction since sm_80 */
            low = __bfloat16_as_ushort(both.x), high = __bfloat16_as_ushort(both.y);
        } else {
            __half2 both = __floats2half2_rn(x[2 * j], x[2 * j + 1]);
            low = __half_as_ushort(both.x), high = __half_as_ushort(both.y);
        }
        p.w[j] = low | high << 16;
    }
    return p;
}

/* mti_load loads n <= MTI_VECTOR elements, starting at (row, col), and sets the rest of x to 0. mti_store stores n
   elements. With WIDE, whole vectors are aligned to 16 bytes. */
template <bool WIDE, int TYPE = MTI_ANY_TYPE>
static __device__ __forceinline__ void mti_load(const mti_view &v, int64_t row, int64_t col, int n, float *x) {
    if (WIDE && n == MTI_VECTOR) {
        int64_t i = row * v.ld + col;
        if (mti_type_of<TYPE>(v) == MT_F32) {
            float4 a = *(const float4 *)((const float *)v.data + i),
                   b = *(const float4 *)((const float *)v.data + i + 4);
            x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        } else {
            mti_unpack(mti_type_of<TYPE>(v), mti_load_words((const uint16_t *)v.data + i), x);
        }
        return;
    }
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) x[j] = j < n ? mti_get<TYPE>(v, row, col + j) : 0.0f;
}

template <bool WIDE, int TYPE = MTI_ANY_TYPE>
static __device__ __forceinline__ void mti_store(const mti_view &v, int64_t row, int64_t col, int n, const float *x) {
    if (WIDE && n == MTI_VECTOR) {
        int64_t i = row * v.ld + col;
        /* Behind a loop nvcc splits a store of 16 bytes into four, but not that of __stwb. With types that are known at
           run time, __stwb needs registers that some kernels do not have. */
        if (mti_type_of<TYPE>(v) == MT_F32) {
            float4 *to = (float4 *)((float *)v.data + i);
            float4 low = make_float4(x[0], x[1], x[2], x[3]), high = make_float4(x[4], x[5], x[6], x[7]);
            if (TYPE == MTI_ANY_TYPE) to[0] = low, to[1] = high;
            else __stwb(to, low), __stwb(to + 1, high);
        } else {
            mti_words p = mti_pack(mti_type_of<TYPE>(v), x);
            uint16_t *to = (uint16_t *)v.data + i;
            if (TYPE == MTI_ANY_TYPE) mti_store_words(to, p);
            else __stwb((uint4 *)to, make_uint4(p.w[0], p.w[1], p.w[2], p.w[3]));
        }
        return;
    }
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++)
        if (j < n) mti_put<TYPE>(v, row, col + j, x[j]);
}

/* A vector as it lies in memory, or as f32 for MTI_ANY_TYPE. mti_fetch only loads it, so a thread can have the loads of
   several vectors under way before mti_values converts the first one. A vector in 16 bits takes 4 registers, and 8 when
   it is converted. n and WIDE are those of mti_load. */
template <int TYPE> struct mti_fetched {
    static const int size = TYPE == MT_BF16 || TYPE == MT_F16 ? 2 : 4; /* of an element, in bytes */
    mti_words words[size / 2];
};

template <bool WIDE, int TYPE>
static __device__ __forceinline__ void mti_fetch(const mti_view &v, int64_t row, int64_t col, int n,
                                                 mti_fetched<TYPE> &out) {
    const int size = mti_fetched<TYPE>::size;
    const uint16_t *from = (const uint16_t *)v.data + (row * v.ld + col); /* with size 2 */
    if (size == 4) {
        float x[MTI_VECTOR];
        mti_load<WIDE, TYPE>(v, row, col, n, x);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) out.words[j * size / 16].w[j % 4] = __float_as_uint(x[j]);
    } else if (WIDE && n == MTI_VECTOR) {
        out.words[0] = mti_load_words(from);
    } else {
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR / 2; j++)
            out.words[0].w[j] = (2 * j < n ? from[2 * j] : 0u) | (2 * j + 1 < n ? (uint32_t)from[2 * j + 1] << 16 : 0u);
    }
}

template <int TYPE> static __device__ __forceinline__ void mti_values(const mti_fetched<TYPE> &in, float *x) {
    const int size = mti_fetched<TYPE>::size;
    if (size == 2) mti_unpack(TYPE, in.words[0], x);
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR && size == 4; j++) x[j] = __uint_as_float(in.words[j * size / 16].w[j % 4]);
}

/* x += the values of a vector. */
template <int TYPE> static __device__ __forceinline__ void mti_add_values(const mti_fetched<TYPE> &in, float *x) {
    float z[MTI_VECTOR];
    mti_values(in, z);
    for (int j = 0; j < MTI_VECTOR; j++) x[j] += z[j];
}

/* Whether kernels may load and store the vectors of a view 16 bytes at a time. True for a view that the caller left
   out. */
static int mti_is_wide(mt_tensor t) {
    size_t size = mt_dtype_size(t.dtype);
    if (!t.data) return 1;
    return (uintptr_t)t.data % 16 == 0 && (t.rows <= 1 || (size_t)mt_tensor_ld(t) * size % 16 == 0);
}

/* How a kernel accesses its views. `type` is their type if all have the same type and are wide, otherwise
   MTI_ANY_TYPE. */
struct mti_access {
    int type, wide;
};

template <typename... Views> static mti_access mti_access_of(mt_tensor first, Views... more) {
    const mt_tensor views[] = {first, more...};
    mti_access how = {(int)first.dtype, 1};
    for (const mt_tensor &v : views) {
        if (v.data && (int)v.dtype != how.type) how.type = MTI_ANY_TYPE;
        how.wide = how.wide && mti_is_wide(v);
    }
    if (!how.wide) how.type = MTI_ANY_TYPE;
    return how;
}

/* mti_by_type calls f(mti_constant<type>()), so that f can launch the kernel with this template argument. The kernel
   with MTI_ANY_TYPE serves mixed types and views that are not wide. */
template <int VALUE> struct mti_constant { static const int value = VALUE; };

template <typename Launch> static mt_status mti_by_type(int type, const Launch &f) {
    switch (type) {
    case MT_F32: return f(mti_constant<MT_F32>());
    case MT_BF16: return f(mti_constant<MT_BF16>());
    case MT_F16: return f(mti_constant<MT_F16>());
    default: return f(mti_constant<MTI_ANY_TYPE>());
    }
}

/* Calls f(mti_constant<kind>()), with 0 <= kind < COUNT. */
template <int COUNT, int FIRST = 0, typename Launch> static mt_status mti_by_kind(int kind, const Launch &f) {
    if (kind == FIRST || FIRST + 1 == COUNT) return f(mti_constant<FIRST>());
    return mti_by_kind<COUNT, (FIRST + 1 < COUNT ? FIRST + 1 : FIRST)>(kind, f);
}

/* The number of vectors that a thread fetches before it computes the first one. Two of 16 bits have the bytes of one of
   f32. */
template <int TYPE> struct mti_ahead { static const int value = TYPE == MT_BF16 || TYPE == MT_F16 ? 2 : 1; };

} /* extern "C++" */
#endif

/* ---- >>16bit: 16-bit types on a CPU ------------------------------------------------------------------------------ */

/* One of the two neighbours of x in a 16-bit type, as a float. `word` chooses which one: see stochastic rounding in
   docs/gpus.md. Infinity and NaN do not change. For a number that is denormal in f16, 2^-14 is added before rounding
   and subtracted afterwards, so that the bits to drop are at the same place as in a normal number. A caller passes 1
   for is_finite when it does not need the result for infinity and NaN. */
MT_INLINE MT_HOST_DEVICE float mti_round_by(int dtype, float x, uint32_t word, int is_finite) {
    int drop = dtype == MT_BF16 ? 16 : 13;
    uint32_t u = mt_f32_bits(x), size = u & 0x7fffffffu;
    float shift = dtype == MT_F16 && size < 0x38800000u ? 6.103515625e-5f : 0.0f;
    if (!is_finite && size >= 0x7f800000u) return x;
    size = mt_f32_bits(mt_f32_from_bits(size) + shift) + (word >> (32 - drop));
    return mt_f32_from_bits(mt_f32_bits(mt_f32_from_bits(size >> drop << drop) - shift) | (u & 0x80000000u));
}

MT_INLINE MT_HOST_DEVICE float mti_round_stochastic(int dtype, float x, uint32_t word) {
    return mti_round_by(dtype, x, word, 0);
}

/* mti_round_stochastic of n elements. A mask selects what is not finite, because a branch would not vectorise. */
static void mti_round_row(int dtype, float *x, const uint32_t *words, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        int finite = (mt_f32_bits(x[j]) & 0x7fffffffu) < 0x7f800000u;
        x[j] = mti_select(finite, mti_round_by(dtype, x[j], words[j], 1), x[j]);
    }
}

/* y = x: the arguments of the loops that convert and copy. */
typedef struct mti_conversion {
    mt_tensor x, y;
} mti_conversion;

/* y = x for n numbers of two different float types. A conversion between bf16 and f16 goes through f32, which is
   exact. */
static void mti_convert_row(mt_dtype from, const void *x, mt_dtype to, void *y, int64_t n) {
    float room[MTI_BLOCK];
    int64_t j, count;
    if (from == MT_F32) mt_f32_to_16bit(to, (const float *)x, (uint16_t *)y, n);
    else if (to == MT_F32) mt_f32_from_16bit(from, (const uint16_t *)x, (float *)y, n);
    else
        for (j = 0; j < n; j += count) {
            count = mt_min(MTI_BLOCK, n - j);
            mt_f32_from_16bit(from, (const uint16_t *)x + j, room, count);
            mt_f32_to_16bit(to, room, (uint16_t *)y + j, count);
        }
}

/* The address of an element of any type. */
static void *mti_bytes_at(mt_tensor t, int64_t row, int64_t col) {
    return (char *)t.data + (size_t)(row * mt_tensor_ld(t) + col) * mt_dtype_size(t.dtype);
}

static void mti_convert_stripes(void *data, int thread, int64_t first, int64_t last) {
    const mti_conversion *c = (const mti_conversion *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_stripe p = mti_stripe_of(c->x.cols, i);
        mti_convert_row(c->x.dtype, mti_bytes_at(c->x, p.row, p.col), c->y.dtype, mti_bytes_at(c->y, p.row, p.col),
                        p.cols);
    }
}

static void mti_cpu_convert(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mti_conversion c = {x, y};
    mti_cpu_stripes(ctx, x.rows, x.cols, mti_convert_stripes, &c);
}

/* Loops compute in f32. They read and write a view block by block: `rows` rows from `row` on, `cols` columns from `col`
   on. A block of an f32 view is a part of the view. A block of a 16-bit view is a copy in `room`, which has place for
   rows * cols floats. mti_f32_place returns a block without reading it, and an empty view for an empty view. */
MT_INLINE mt_tensor mti_f32_place(mt_tensor t, int64_t row, int64_t rows, int64_t col, int64_t cols, float *room) {
    if (!t.data) return t;
    t.ld = t.dtype == MT_F32 ? mt_tensor_ld(t) : cols;
    t.data = t.dtype == MT_F32 ? mti_row(t, row) + col : room;
    t.dtype = MT_F32;
    t.rows = rows;
    t.cols = cols;
    return t;
}

MT_INLINE mt_tensor mti_f32_read(mt_tensor t, int64_t row, int64_t rows, int64_t col, int64_t cols, float *room) {
    mt_tensor block = mti_f32_place(t, row, rows, col, cols, room);
    int64_t i;
    if (t.data && t.dtype != MT_F32)
        for (i = 0; i < rows; i++) mt_f32_from_16bit(t.dtype, mti_row16(t, row + i) + col, mti_row(block, i), cols);
    return block;
}

/* Rounds a block to the 16-bit view that it was placed for. Blocks of f32 views are already written. */
MT_INLINE void mti_f32_write(mt_tensor block, mt_tensor t, int64_t row, int64_t col) {
    int64_t i;
    if (!t.data || t.dtype == MT_F32) return;
    for (i = 0; i < block.rows; i++)
        mt_f32_to_16bit(t.dtype, mti_row(block, i), mti_row16(t, row + i) + col, block.cols);
}

/* out = n numbers of t in f32, from `col` of `row` on. */
static void mti_cpu_load(mt_tensor t, int64_t row, int64_t col, int64_t n, float *out) {
    if (t.dtype == MT_F32) memcpy(out, mti_row(t, row) + col, (size_t)n * sizeof *out);
    else mt_f32_from_16bit(t.dtype, mti_row16(t, row) + col, out, n);
}

/* ---- >>rows: loops over one row, and reductions over a row in a block of threads --------------------------------- */

/* Unrolled, because gcc would call memset or `rep stos`, which takes longer than the sum of a short row. */
MT_INLINE void mti_lanes_clear(float *lanes) {
    int l;
    MTI_UNROLL
    for (l = 0; l < MTI_PARTIALS / 2; l++) lanes[l] = lanes[l + MTI_PARTIALS / 2] = 0.0f;
}

/* Returns the sum of the MTI_PARTIALS partial sums in lanes, added as a binary tree. Overwrites lanes. The loops have
   constant lengths, so that each of them becomes a few vector instructions. */
static float mti_lanes_sum(float *lanes) {
    int l;
    for (l = 0; l < MTI_PARTIALS / 2; l++) lanes[l] += lanes[l + MTI_PARTIALS / 2];
    for (l = 0; l < MTI_PARTIALS / 4; l++) lanes[l] += lanes[l + MTI_PARTIALS / 4];
    for (l = 0; l < MTI_PARTIALS / 8; l++) lanes[l] += lanes[l + MTI_PARTIALS / 8];
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

static float mti_row_sum(const float *x, int64_t n) {
    float lanes[MTI_PARTIALS];
    int64_t j;
    int l;
    mti_lanes_clear(lanes);
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] += x[j + l];
    for (l = 0; j + l < n; l++) lanes[l] += x[j + l];
    return mti_lanes_sum(lanes);
}

/* Adds the products of a part of two rows to lanes. All parts but the last one have a multiple of MTI_PARTIALS columns,
   so the sums do not depend on the parts. */
MT_INLINE void mti_lanes_dot(float *lanes, const float *x, const float *y, int64_t n) {
    int64_t j;
    int l;
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] += x[j + l] * y[j + l];
    for (l = 0; j + l < n; l++) lanes[l] += x[j + l] * y[j + l];
}

static float mti_row_dot(const float *x, const float *y, int64_t n) {
    float lanes[MTI_PARTIALS];
    mti_lanes_clear(lanes);
    mti_lanes_dot(lanes, x, y, n);
    return mti_lanes_sum(lanes);
}

static float mti_row_max(const float *x, int64_t n) {
    float lanes[MTI_PARTIALS];
    int64_t j;
    int l;
    for (l = 0; l < MTI_PARTIALS; l++) lanes[l] = -(float)INFINITY;
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] = lanes[l] > x[j + l] ? lanes[l] : x[j + l];
    for (l = 0; j + l < n; l++) lanes[l] = lanes[l] > x[j + l] ? lanes[l] : x[j + l];
    for (l = 0; l < MTI_PARTIALS / 2; l++)
        lanes[l] = lanes[l] > lanes[l + MTI_PARTIALS / 2] ? lanes[l] : lanes[l + MTI_PARTIALS / 2];
    for (l = 0; l < MTI_PARTIALS / 4; l++)
        lanes[l] = lanes[l] > lanes[l + MTI_PARTIALS / 4] ? lanes[l] : lanes[l + MTI_PARTIALS / 4];
    for (l = 1; l < MTI_PARTIALS / 4; l++) lanes[0] = lanes[0] > lanes[l] ? lanes[0] : lanes[l];
    return lanes[0];
}

/* x = e^(x - shift) for whole vectors: n is a multiple of MTI_PARTIALS. No x is above shift. Returns the sum. */
static float mti_row_exp(float *x, float shift, int64_t n) {
    float lanes[MTI_PARTIALS], least = mti_unknown(-127.0f);
    int64_t j;
    int l;
    mti_lanes_clear(lanes);
    for (j = 0; j < n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) {
            x[j + l] = mti_exp_below(x[j + l] - shift, least);
            lanes[l] += x[j + l];
        }
    return mti_lanes_sum(lanes);
}

/* Begins to load MTI_PARTIALS columns of `rows` rows, from column j on, into L1. */
MT_INLINE void mti_prefetch_columns(mt_tensor t, int rows, int64_t j) {
    int64_t half = MTI_PARTIALS / 2 * (int64_t)mt_dtype_size(t.dtype);
    int r;
    for (r = 0; r < rows; r++) {
        const char *x = (const char *)mti_bytes_at(t, r, j);
        MTI_PREFETCH(x);
        MTI_PREFETCH(x + half);
    }
}

static void mti_row_fill(float *y, float value, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j++) y[j] = value;
}

static void mti_row_add(const float *a, const float *b, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = a[j] + b[j];
}

static void mti_row_scale(float *y, float factor, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j++) y[j] *= factor;
}

#if MT_HAS_CUDA
extern "C++" {

#define MTI_ROW_THREADS 256 /* maximum threads per block; narrow rows take fewer */

static unsigned mti_row_threads(int64_t cols) {
    return (unsigned)mt_min(MTI_ROW_THREADS, mt_round_up((cols + MTI_VECTOR - 1) / MTI_VECTOR, 32));
}

static __device__ __forceinline__ float mti_warp_sum(float x) {
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

static __device__ __forceinline__ float mti_warp_max(float x) {
    for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

/* Returns to every thread the sum of x over the threads with its threadIdx.y. If blockDim.x is 32, these are one warp,
   and `shared` is not used. Otherwise blockDim.y is 1. Each warp sums by shuffles and writes its result to shared [32].
   Then every warp sums these results. The barrier separates the writes from the reads. Before shared is used again,
   the threads must have passed another barrier. */
static __device__ __forceinline__ float mti_row_total(float x, float *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    x = mti_warp_sum(x);
    if (warps == 1) return x;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return mti_warp_sum(lane < warps ? shared[lane] : 0.0f);
}

/* The same for the sums of a and of b over all threads of a block, with shared [64]. blockDim.y is 1. */
static __device__ __forceinline__ float2 mti_block_sums_once(float a, float b, float *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    a = mti_warp_sum(a);
    b = mti_warp_sum(b);
    if (lane == 0) {
        shared[warp] = a;
        shared[32 + warp] = b;
    }
    __syncthreads();
    a = lane < warps ? shared[lane] : 0.0f;
    b = lane < warps ? shared[32 + lane] : 0.0f;
    return make_float2(mti_warp_sum(a), mti_warp_sum(b));
}

/* mti_block_sums_once, and a barrier after which shared may be used again. */
static __device__ __forceinline__ float2 mti_block_sums(float a, float b, float *shared) {
    float2 sums = mti_block_sums_once(a, b, shared);
    __syncthreads();
    return sums;
}

/* The type of the rows of views with `cols` columns, as a template argument. MTI_ANY_TYPE also for rows that end within
   a vector, so that rows with a type have whole vectors only. */
template <typename... Views> static int mti_row_type(int64_t cols, Views... views) {
    return cols % MTI_VECTOR ? MTI_ANY_TYPE : mti_access_of(views...).type;
}

/* Functions for vector i of a row of this type. The comments of the kernels that use them count SASS instructions
   beside a budget: 6.8 for each byte moved. This is what an H200 has time for while it copies at 85 % of its best
   rate. */
template <int TYPE> static __device__ __forceinline__ int mti_row_vector_size(int64_t cols, int64_t i) {
    return TYPE == MTI_ANY_TYPE ? mti_vector_size(cols, i * MTI_VECTOR) : MTI_VECTOR;
}

template <int TYPE>
static __device__ __forceinline__ void mti_row_fetch(const mti_view &v, int64_t row, int64_t i, int64_t cols,
                                                     mti_fetched<TYPE> &out) {
    mti_fetch<TYPE != MTI_ANY_TYPE>(v, row, i * MTI_VECTOR, mti_row_vector_size<TYPE>(cols, i), out);
}

template <int TYPE>
static __device__ __forceinline__ void mti_row_store(const mti_view &v, int64_t row, int64_t i, int64_t cols,
                                                     const float *x) {
    mti_store<TYPE != MTI_ANY_TYPE, TYPE>(v, row, i * MTI_VECTOR, mti_row_vector_size<TYPE>(cols, i), x);
}

/* Sizes of the dynamic shared memory of a block. Every GPU from sm_75 on grants MTI_SHARED_LEAST bytes. mti_shared_most
   returns what this GPU grants. Both leave 2 KiB for the variables that kernels declare themselves. The size of the
   arena depends on MTI_SHARED_LEAST only, so that it can be planned without a GPU. */
#define MTI_SHARED_LEAST ((size_t)62 << 10)

static mt_status mti_shared_most(mt_context *ctx, size_t *bytes) {
    int most = 0;
    MT_CUDA_TRY(ctx, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, mt_context_ordinal(ctx)));
    *bytes = (size_t)most - 2048;
    return MT_SUCCESS;
}

/* CUDA requires this call before a launch with more than 48 KiB of shared memory, with the variables that the kernel
   declares. It allows as much as the GPU grants, because all contexts of a GPU share the limit: another thread must not
   lower it before the launch. */
template <typename Kernel> static mt_status mti_shared_allow(mt_context *ctx, Kernel kernel, size_t bytes) {
    size_t most = 0;
    if (bytes <= ((size_t)48 << 10) - 2048) return MT_SUCCESS;
    MT_TRY(mti_shared_most(ctx, &most));
    MT_CUDA_TRY(ctx,
                cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most));
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif

/* ---- >>map: elementwise kernels ---------------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* Calls op.run<WIDE>(row, col, n) for each vector of n <= MTI_VECTOR neighbours of a matrix. A thread owns every (grid
   size)-th vector in the order of memory, so that neighbouring threads access neighbouring memory. The kernel uses no
   shared memory and no barrier. */
template <bool WIDE, typename Op>
static __global__ void __launch_bounds__(256) mti_map_kernel(Op op, int64_t rows, int64_t cols) {
    int64_t per_row = (cols + MTI_VECTOR - 1) / MTI_VECTOR, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * per_row; i += step) {
        int64_t row = mt_divide(i, per_row), col = (i - row * per_row) * MTI_VECTOR;
        op.template run<WIDE>(row, col, mti_vector_size(cols, col));
    }
}

/* The largest grid. The items that it does not cover are those of a loop: in the kernel, or in MTI_LAUNCH_BLOCKS. */
#ifndef MTI_GRID_MAX
#define MTI_GRID_MAX 65535
#endif

/* The number of blocks for `items` items, with per_block items each. At least 1, at most MTI_GRID_MAX. */
static unsigned mti_grid(int64_t items, int64_t per_block) {
    int64_t blocks = (items + per_block - 1) / per_block;
    return (unsigned)(blocks < 1 ? 1 : blocks > MTI_GRID_MAX ? MTI_GRID_MAX : blocks);
}

/* Launches a kernel whose blocks own one item each. One launch has at most MTI_GRID_MAX blocks; for more items the
   kernel is launched again. The kernel's first parameter is the number of the item that block 0 owns. A loop over the
   items in the kernel would need more registers than norms and the cross-entropy have. */
#define MTI_LAUNCH_BLOCKS(kernel, items, block, shared_bytes, stream, ...)                                             \
    for (int64_t mti_first = 0; mti_first < (items); mti_first += MTI_GRID_MAX)                                        \
    MT_LAUNCH_KERNEL(kernel, mti_grid((items)-mti_first, 1), block, shared_bytes, stream, mti_first, __VA_ARGS__)

/* Launches mti_map_kernel. `wide` says that mti_is_wide holds for all views of op. */
template <typename Op>
static mt_status mti_map(mt_context *ctx, const char *name, const Op &op, int wide, int64_t rows, int64_t cols) {
    int64_t items = rows * ((cols + MTI_VECTOR - 1) / MTI_VECTOR);
    unsigned block = (unsigned)mt_min(256, mt_round_up(items, 32)), grid = mti_grid(items, 256);
    if (items == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    if (wide) MT_LAUNCH_KERNEL((mti_map_kernel<true, Op>), grid, block, 0, mt_context_stream(ctx), op, rows, cols);
    else MT_LAUNCH_KERNEL((mti_map_kernel<false, Op>), grid, block, 0, mt_context_stream(ctx), op, rows, cols);
    return mt_cuda_launched(ctx, name);
}

/* Divides numbers in [0, items) by `by`, with a multiplication and a shift where `items` is below 2^31. With 2^s the
   smallest power of two that is at least `by`, factor is 2^(31 + s) / by, rounded up. i * factor / 2^(31 + s) is then
   less than 1 / by above i / by, so its integer part is that of i / by (Granlund and Montgomery, PLDI 1994). */
struct mti_divider {
    int64_t by;
    uint32_t factor; /* 0: divide in 64 bits */
    int shift;
};

static mti_divider mti_divider_of(int64_t by, int64_t items) {
    mti_divider d = {by, 0, 31};
    if (items >= (int64_t)1 << 31 || by >= (int64_t)1 << 31) return d;
    while ((int64_t)1 << (d.shift - 31) < by) d.shift++;
    d.factor = (uint32_t)((((uint64_t)1 << d.shift) + (uint64_t)by - 1) / (uint64_t)by);
    return d;
}

static __device__ __forceinline__ int64_t mti_divide_by(int64_t i, const mti_divider &d) {
    return d.factor ? (int64_t)((uint64_t)(uint32_t)i * d.factor >> d.shift) : i / d.by;
}

template <bool WIDE, typename Op>
static __device__ __forceinline__ void mti_map_vector(const Op &op, int64_t row, int64_t col, int n) {
    typename Op::input in;
    op.template fetch<WIDE>(row, col, n, in);
    op.template finish<WIDE>(row, col, n, in);
}

/* mti_map_kernel for operators that are bound by memory. The op has its type as a template argument, and two halves:
   op.fetch<WIDE>(row, col, n, in) only loads, and op.finish<WIDE>(row, col, n, in) computes and stores. A thread
   fetches AHEAD vectors before it finishes the first one. They are a block apart, so that each load of a warp is
   contiguous. A group with the end of a row or of the matrix is computed one vector at a time, and so is
   MTI_ANY_TYPE.

   An H200 issues 6.8 instructions in the time in which it moves a byte at 85 % of its copy rate. The first number
   counts the instructions of a thread that computes one group, per element, in bf16 on sm_90. The second number is 6.8
   times the bytes that an element moves. Measured: kernels in this table within their budget reach 0.87 to 1.03 of a
   copy, with dropout 0.73. GELU by erf without a bias, with 33 of 27, reaches 0.75. Filling f32 (0.45) and converting
   to f32 (0.75) stay below: each store instruction of a thread writes 16 bytes, half a sector, and the next one the
   other half.
     y = a + b           12 of 41    bias                   10 of 27    conversion to f32           8 of 41
     bias and GELU       24 of 41    bias and erf GELU      35 of 41    bias and SwiGLU            27 of 68
     bias and ReLU       14 of 41    bias, squared ReLU     15 of 41    bias and tanh              27 of 41
     fill                 7 of 14    rotary embeddings      20 of 27
     y = a * b           12 of 41    times a row            11 of 27    times a column             11 of 27
     sigmoid             18 of 27    SiLU                   18 of 27    sigmoid gate               21 of 41
     sigmoid, backward   24 of 41    SiLU, backward         25 of 41    sigmoid gate, backward     29 of 68
     bias, dropout and add     39 of 41    (51 in rows that do not begin at a multiple of four elements)
   The addition needs 40 registers, so an SM has 6 blocks with 96 KiB of loads in flight. */
template <int TYPE, bool WIDE, int AHEAD, typename Op>
static __global__ void __launch_bounds__(256)
    mti_map_ahead_kernel(Op op, int64_t rows, int64_t cols, mti_divider per_row) {
    int64_t items = rows * per_row.by, step = (int64_t)gridDim.x * blockDim.x * AHEAD;
    int64_t first = (int64_t)blockIdx.x * blockDim.x * AHEAD + threadIdx.x;
    for (; first < items; first += step) {
        int64_t row[AHEAD], col[AHEAD];
        int whole = TYPE != MTI_ANY_TYPE && first + (int64_t)(AHEAD - 1) * blockDim.x < items;
        MT_DEVICE_UNROLL
        for (int a = 0; a < AHEAD; a++) {
            int64_t i = first + (int64_t)a * blockDim.x;
            row[a] = mti_divide_by(i, per_row);
            col[a] = (i - row[a] * per_row.by) * MTI_VECTOR;
            whole = whole && col[a] + MTI_VECTOR <= cols;
        }
        if (whole) {
            typename Op::input in[AHEAD];
            MT_DEVICE_UNROLL
            for (int a = 0; a < AHEAD; a++) op.template fetch<true>(row[a], col[a], MTI_VECTOR, in[a]);
            MT_DEVICE_UNROLL
            for (int a = 0; a < AHEAD; a++) op.template finish<true>(row[a], col[a], MTI_VECTOR, in[a]);
            continue;
        }
        MT_DEVICE_UNROLL
        for (int a = 0; a < AHEAD; a++) {
            int n = mti_vector_size(cols, col[a]);
            if (first + (int64_t)a * blockDim.x >= items) break;
            mti_map_vector<WIDE>(op, row[a], col[a], n);
        }
    }
}

/* Launches mti_map_ahead_kernel. `wide` says that mti_is_wide holds for all views of op. With a TYPE other than
   MTI_ANY_TYPE it always does. */
template <int TYPE, int AHEAD = mti_ahead<TYPE>::value, typename Op>
static mt_status mti_map_ahead(mt_context *ctx, const char *name, const Op &op, int wide, int64_t rows, int64_t cols) {
    int64_t per_row = (cols + MTI_VECTOR - 1) / MTI_VECTOR, items = rows * per_row;
    unsigned block = (unsigned)mt_min(256, mt_round_up(items, 32)), grid = mti_grid(items, 256 * AHEAD);
    if (items == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    if (wide)
        MT_LAUNCH_KERNEL((mti_map_ahead_kernel<TYPE, true, AHEAD, Op>), grid, block, 0, mt_context_stream(ctx), op,
                         rows, cols, mti_divider_of(per_row, items + (int64_t)256 * AHEAD));
    else
        MT_LAUNCH_KERNEL((mti_map_ahead_kernel<TYPE, TYPE != MTI_ANY_TYPE, AHEAD, Op>), grid, block, 0,
                         mt_context_stream(ctx), op, rows, cols, mti_divider_of(per_row, items + (int64_t)256 * AHEAD));
    return mt_cuda_launched(ctx, name);
}

} /* extern "C++" */
#endif

/* ---- >>columns: elementwise kernels that also sum over the rows -------------------------------------------------- */

/* out [1, n] += the sum of the four rows of x [4, n]. Adding four rows at a time reads and writes `out` less often. */
static void mti_add_rows4(const float *x, int64_t ld, float *out, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) out[j] += (x[j] + x[ld + j]) + (x[2 * ld + j] + x[3 * ld + j]);
}

/* out [1, n] += the sums of the columns of x [rows, n]. */
static void mti_cpu_column_sums(mt_tensor x, mt_tensor out) {
    float room[4 * MTI_BLOCK];
    int64_t i, j, n, rows;
    for (j = 0; j < x.cols; j += n) {
        float *sums = mti_row(out, 0) + j;
        n = x.dtype == MT_F32 ? x.cols : mt_min(MTI_BLOCK, x.cols - j);
        for (i = 0; i < x.rows; i += rows) {
            mt_tensor block;
            rows = i + 4 <= x.rows ? 4 : 1;
            block = mti_f32_read(x, i, rows, j, n, room);
            if (rows == 4) mti_add_rows4(mti_row(block, 0), mt_tensor_ld(block), sums, n);
            else mti_row_add(sums, mti_row(block, 0), sums, n);
        }
    }
}

#if MT_HAS_CUDA
extern "C++" {

/* A block has MTI_LANES x MTI_DEEP threads. It works on MTI_LANES * MTI_VECTOR columns and a strip of MTI_STRIP rows.
   Threads of one lane have the same columns and share the rows of the strip. The strips depend only on the number of
   rows, and their sums are added in order, so every GPU computes the same bits. */
#define MTI_LANES 32
#define MTI_DEEP 8
#define MTI_STRIP 64

/* Computes what one row adds to the sums of its columns. */
template <bool WIDE, int SUMS, typename Op>
static __device__ __forceinline__ void mti_columns_row(const Op &op, int64_t row, int64_t col, int n,
                                                       float (*sums)[MTI_VECTOR]) {
    typename Op::input in;
    op.template fetch<WIDE>(row, col, n, in);
    op.template finish<WIDE>(row, col, n, in, sums);
}

/* Computes SUMS column sums over the rows of each strip. op is in two halves, as for mti_map_ahead_kernel:
   op.finish<WIDE>(row, col, n, in, sums) adds to sums[s] what the row adds to sum s of its columns. The result is
   partial [strips, SUMS, cols].

   1. Each thread owns MTI_VECTOR columns and every MTI_DEEP-th row of the strip. It adds these rows in registers, in
      order. It fetches AHEAD rows before it finishes the first one.
   2. For each sum in turn, all threads write their values to shared [deep, lane, MTI_VECTOR]. Each thread then adds one
      column in the order of deep. The first barrier separates the writes from the reads. After the second barrier, the
      next sum may overwrite shared.
   Two blocks in the launch bounds let nvcc use more than 80 registers, instead of spilling some.

   Instructions per element in bf16 on sm_90 in the loop over groups, and the budget as at mti_map_ahead_kernel: column
   sums 3 of 14, GELU 25 of 41, erf GELU 31 of 41, SwiGLU 25 of 68, dropout 27 of 27, or 39 in rows that do not begin at
   a multiple of four elements. The column sums need 48 registers, so an SM has 5 blocks with 80 KiB of loads in flight.
   GELU needs 80 registers: 3 blocks with 48 KiB. The backward of squared ReLU has 10 of 41 instructions, that of ReLU
   12, that of tanh 18, and that of a product with a row 9. */
template <int TYPE, bool WIDE, int AHEAD, int SUMS, typename Op>
static __global__ void __launch_bounds__(MTI_LANES *MTI_DEEP, 2)
    mti_columns_kernel(Op op, int64_t rows, int64_t cols, float *partial) {
    MT_SHARED(float4, shared, MTI_DEEP * MTI_LANES * MTI_VECTOR / 4);
    int lane = (int)threadIdx.x % MTI_LANES, deep = (int)threadIdx.x / MTI_LANES;
    int64_t start = (int64_t)blockIdx.x * MTI_LANES * MTI_VECTOR, col = start + lane * MTI_VECTOR;
    int64_t first = (int64_t)blockIdx.y * MTI_STRIP;
    int n = col < cols ? mti_vector_size(cols, col) : 0, r = deep;
    int last = n == 0 ? 0 : rows - first < MTI_STRIP ? (int)(rows - first) : MTI_STRIP;
    float sums[SUMS][MTI_VECTOR] = {};
    for (; TYPE != MTI_ANY_TYPE && n == MTI_VECTOR && r + (AHEAD - 1) * MTI_DEEP < last; r += AHEAD * MTI_DEEP) {
        typename Op::input in[AHEAD];
        MT_DEVICE_UNROLL
        for (int a = 0; a < AHEAD; a++) op.template fetch<true>(first + r + a * MTI_DEEP, col, MTI_VECTOR, in[a]);
        MT_DEVICE_UNROLL
        for (int a = 0; a < AHEAD; a++)
            op.template finish<true>(first + r + a * MTI_DEEP, col, MTI_VECTOR, in[a], sums);
    }
    for (; r < last; r += MTI_DEEP) mti_columns_row<WIDE, SUMS>(op, first + r, col, n, sums);
    for (int s = 0; s < SUMS; s++) {
        float4 *to = shared + threadIdx.x * (MTI_VECTOR / 4);
        to[0] = make_float4(sums[s][0], sums[s][1], sums[s][2], sums[s][3]);
        to[1] = make_float4(sums[s][4], sums[s][5], sums[s][6], sums[s][7]);
        __syncthreads();
        float sum = 0.0f;
        for (int d = 0; d < MTI_DEEP; d++)
            sum += ((const float *)shared)[d * MTI_LANES * MTI_VECTOR + (int)threadIdx.x];
        if (start + threadIdx.x < cols) partial[((int64_t)blockIdx.y * SUMS + s) * cols + start + threadIdx.x] = sum;
        __syncthreads();
    }
}

/* first [1, cols] += the first sum over the strips, and second [1, cols] += the second one. blockIdx.y is the number of
   the sum. A block owns MTI_LANES columns. Each thread owns one column and every MTI_DEEP-th strip, and has eight loads
   in flight. The threads write their sums to shared [deep, lane]. The barrier separates these writes from the reads.
   The threads with deep 0 then add the sums in the order of deep. On sm_90: 10 instructions for a sum of 4 bytes
   (budget: 27). With many strips, latency limits the kernel instead: each thread waits for 8 loads at a time. */
static __global__ void __launch_bounds__(MTI_LANES *MTI_DEEP)
    mti_strips_kernel(const float *partial, int64_t strips, int64_t cols, mti_view first, mti_view second) {
    MT_SHARED(float, shared, MTI_DEEP *MTI_LANES);
    int lane = (int)threadIdx.x % MTI_LANES, deep = (int)threadIdx.x / MTI_LANES;
    int64_t col = (int64_t)blockIdx.x * MTI_LANES + lane, sums = gridDim.y, s = blockIdx.y;
    mti_view out = s == 0 ? first : second;
    float sum = 0.0f, next[8];
    for (int64_t i = deep; i < strips && col < cols; i += 8 * MTI_DEEP) {
        MT_DEVICE_UNROLL
        for (int j = 0; j < 8; j++) {
            int64_t strip = i + j * MTI_DEEP;
            next[j] = strip < strips ? partial[(strip * sums + s) * cols + col] : 0.0f;
        }
        MT_DEVICE_UNROLL
        for (int j = 0; j < 8; j++) sum += next[j];
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (deep != 0 || col >= cols || !out.data) return;
    for (int d = 1; d < MTI_DEEP; d++) sum += shared[d * MTI_LANES + lane];
    mti_put(out, 0, col, mti_get(out, 0, col) + sum);
}

/* Adds sum s of partial [strips, sums, cols] to outs[s] [1, cols]. `sums` is 1 or 2. An outs[s] may be mt_none(). */
static mt_status mti_strips(mt_context *ctx, const char *name, const void *partial, int64_t strips, int sums,
                            int64_t cols, const mt_tensor *outs) {
    MT_LAUNCH_KERNEL(mti_strips_kernel, dim3((unsigned)((cols + MTI_LANES - 1) / MTI_LANES), (unsigned)sums),
                     MTI_LANES * MTI_DEEP, 0, mt_context_stream(ctx), (const float *)partial, strips, cols,
                     mti_view_of(outs[0]), mti_view_of(outs[sums - 1]));
    return mt_cuda_launched(ctx, name);
}

/* Launches mti_columns_kernel and adds sum s to outs[s], which may be mt_none(). Needs [strips, SUMS, cols] floats of
   scratch memory in the arena. */
template <int TYPE, int AHEAD, int SUMS, typename Op>
static mt_status mti_columns(mt_context *ctx, const char *name, const Op &op, int wide, int64_t rows, int64_t cols,
                             const mt_tensor *outs) {
    int64_t strips = (rows + MTI_STRIP - 1) / MTI_STRIP;
    dim3 grid((unsigned)((cols + MTI_LANES * MTI_VECTOR - 1) / (MTI_LANES * MTI_VECTOR)), (unsigned)strips);
    size_t mark = mt_arena_mark(ctx);
    void *memory = NULL;
    if (rows == 0 || cols == 0) return MT_SUCCESS;
    if (strips > 65535)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: %lld rows are more than %d on a GPU", name, (long long)rows,
                       65535 * MTI_STRIP);
    MT_TRY(mt_arena_alloc(ctx, (size_t)(strips * SUMS * cols) * sizeof(float), &memory));
    MT_TRY(mt_cuda_enter(ctx));
    if (wide)
        MT_LAUNCH_KERNEL((mti_columns_kernel<TYPE, true, AHEAD, SUMS, Op>), grid, MTI_LANES * MTI_DEEP, 0,
                         mt_context_stream(ctx), op, rows, cols, (float *)memory);
    else
        MT_LAUNCH_KERNEL((mti_columns_kernel<TYPE, TYPE != MTI_ANY_TYPE, AHEAD, SUMS, Op>), grid, MTI_LANES * MTI_DEEP,
                         0, mt_context_stream(ctx), op, rows, cols, (float *)memory);
    MT_TRY(mt_cuda_launched(ctx, name));
    MT_TRY(mti_strips(ctx, name, memory, strips, SUMS, cols, outs));
    mt_arena_release(ctx, mark); /* only later kernels of the same stream reuse this memory */
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif

/* ---- >>random-words: Philox, one word for each global element ---------------------------------------------------- */

/* Refuses a view that is not inside its global tensor, or whose global element numbers do not fit in 64 bits. */
static mt_status mti_expect_random(mt_context *ctx, const char *where, mt_random at, int64_t rows, int64_t cols) {
    if (at.first_row < 0 || at.first_col < 0 || at.global_cols < cols || at.first_col > at.global_cols - cols)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: a view [%lld, %lld] at row %lld, column %lld is not inside a tensor of "
                       "%lld columns",
                       where, (long long)rows, (long long)cols, (long long)at.first_row, (long long)at.first_col,
                       (long long)at.global_cols);
    if (at.first_row > INT64_MAX - rows || mt_size_mul(at.first_row + rows, at.global_cols) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: row %lld + %lld of %lld columns has no 64-bit element number", where,
                       (long long)at.first_row, (long long)rows, (long long)at.global_cols);
    return MT_SUCCESS;
}

/* MTI_COUNTERS is the largest number of Philox blocks (of four words) that are computed together. MTI_WORDS is the
   largest number of random words that a caller takes at a time. It is one block less, because the first word may be any
   lane of its block. */
#define MTI_COUNTERS 64
#define MTI_WORDS_ROOM (4 * MTI_COUNTERS)
#define MTI_WORDS (MTI_WORDS_ROOM - 4)

#if defined(__AVX2__) && defined(__GNUC__) && !defined(__CUDACC__)
#if defined(__AVX512F__)
#define MTI_WIDE 8 /* 64-bit lanes of a vector */
#define MTI_WIDE_LANES 0, 1, 2, 3, 4, 5, 6, 7
#define MTI_WIDE_FIRST 0, 8, 1, 9, 2, 10, 3, 11 /* the first half of the pairs of lanes of two vectors */
#define MTI_WIDE_LAST 4, 12, 5, 13, 6, 14, 7, 15
#else
#define MTI_WIDE 4
#define MTI_WIDE_LANES 0, 1, 2, 3
#define MTI_WIDE_FIRST 0, 4, 1, 5
#define MTI_WIDE_LAST 2, 6, 3, 7
#endif
typedef uint64_t mti_u64_wide __attribute__((vector_size(8 * MTI_WIDE)));
typedef long long mti_i64_wide __attribute__((vector_size(8 * MTI_WIDE)));
typedef int mti_i32_wide __attribute__((vector_size(8 * MTI_WIDE)));
#if defined(__clang__)
#define MTI_LOW_PRODUCT(a, b) (((a)&low) * (b))
#define MTI_MERGE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#if defined(__AVX512F__) /* every lane has a 1 in the mask, so the zeros are not used */
#define MTI_LOW_PRODUCT(a, b)                                                                                          \
    ((mti_u64_wide)__builtin_ia32_pmuludq512_mask((mti_i32_wide)(a), (mti_i32_wide)(b), (mti_i64_wide)zero, 0xff))
#else
#define MTI_LOW_PRODUCT(a, b) ((mti_u64_wide)__builtin_ia32_pmuludq256((mti_i32_wide)(a), (mti_i32_wide)(b)))
#endif
#define MTI_MERGE(a, b, ...) __builtin_shuffle(a, b, __extension__(mti_u64_wide){__VA_ARGS__})
#endif
#define MTI_PHILOX_GROUP (4 * MTI_WIDE) /* blocks that are computed together: enough to hide latencies */

/* The words of MTI_PHILOX_GROUP blocks. A word is the low half of a 64-bit lane. MTI_LOW_PRODUCT multiplies the low
   halves of a and b, in one instruction, and ignores the high halves: so these may have any bits until the end. gcc
   does not find this instruction itself; the plain loop below takes three times as long. */
static void mti_philox_group(uint64_t first, uint64_t stream, uint64_t seed, uint32_t *out) {
    const mti_u64_wide zero = {0}, low = zero + 0xffffffffu, at = {MTI_WIDE_LANES};
    const mti_u64_wide factor0 = zero + 0xD2511F53u, factor2 = zero + 0xCD9E8D57u;
    mti_u64_wide c0[4], c1[4], c2[4], c3[4];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    int round, i;
    MTI_UNROLL
    for (i = 0; i < 4; i++) {
        c0[i] = at + (first + (uint64_t)(MTI_WIDE * i));
        c1[i] = c0[i] >> 32;
        c2[i] = zero + stream;
        c3[i] = zero + (stream >> 32);
    }
    MTI_UNROLL
    for (round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        MTI_UNROLL
        for (i = 0; i < 4; i++) {
            mti_u64_wide a = MTI_LOW_PRODUCT(c0[i], factor0), b = MTI_LOW_PRODUCT(c2[i], factor2);
            c0[i] = (b >> 32) ^ c1[i] ^ (zero + k0);
            c1[i] = b;
            c2[i] = (a >> 32) ^ c3[i] ^ (zero + k1);
            c3[i] = a;
        }
    }
    MTI_UNROLL
    for (i = 0; i < 4; i++, out += 4 * MTI_WIDE) {
        mti_u64_wide words01 = (c0[i] & low) | c1[i] << 32, words23 = (c2[i] & low) | c3[i] << 32;
        mti_u64_wide merged_first = MTI_MERGE(words01, words23, MTI_WIDE_FIRST);
        mti_u64_wide merged_last = MTI_MERGE(words01, words23, MTI_WIDE_LAST);
        memcpy(out, &merged_first, sizeof merged_first);
        memcpy(out + 2 * MTI_WIDE, &merged_last, sizeof merged_last);
    }
}
#else
#define MTI_PHILOX_GROUP 16
#endif

/* Computes `count` <= MTI_COUNTERS Philox blocks. Word `lane` of block first + l goes to out[4 * l + lane]. The inner
   loops run over blocks, so that they vectorise. */
static void mti_philox_loop(uint64_t first, uint64_t stream, uint64_t seed, int count, uint32_t *out) {
    uint32_t c0[MTI_COUNTERS], c1[MTI_COUNTERS], c2[MTI_COUNTERS], c3[MTI_COUNTERS];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    int round, l;
    for (l = 0; l < count; l++) {
        c0[l] = (uint32_t)(first + (uint64_t)l);
        c1[l] = (uint32_t)((first + (uint64_t)l) >> 32);
        c2[l] = (uint32_t)stream;
        c3[l] = (uint32_t)(stream >> 32);
    }
    for (round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (l = 0; l < count; l++) {
            uint64_t a = (uint64_t)c0[l] * 0xD2511F53u, b = (uint64_t)c2[l] * 0xCD9E8D57u;
            uint32_t n0 = (uint32_t)(b >> 32) ^ c1[l] ^ k0, n2 = (uint32_t)(a >> 32) ^ c3[l] ^ k1;
            c0[l] = n0;
            c1[l] = (uint32_t)b;
            c2[l] = n2;
            c3[l] = (uint32_t)a;
        }
    for (l = 0; l < count; l++) {
        out[4 * l] = c0[l];
        out[4 * l + 1] = c1[l];
        out[4 * l + 2] = c2[l];
        out[4 * l + 3] = c3[l];
    }
}

static void mti_philox_blocks(uint64_t first, uint64_t stream, uint64_t seed, int count, uint32_t *out) {
    int done = 0;
#if defined(MTI_WIDE)
    for (; done + MTI_PHILOX_GROUP <= count; done += MTI_PHILOX_GROUP)
        mti_philox_group(first + (uint64_t)done, stream, seed, out + 4 * done);
#endif
    if (done < count) mti_philox_loop(first + (uint64_t)done, stream, seed, count - done, out + 4 * done);
}

MT_API void mt_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    if (!counter || !key || !out) return;
    mti_philox_blocks(counter[0] | (uint64_t)counter[1] << 32, counter[2] | (uint64_t)counter[3] << 32,
                      key[0] | (uint64_t)key[1] << 32, 1, out);
}

static MT_HOST_DEVICE uint64_t mti_subsequence(const mt_random *at) {
    return at->offset ? at->subsequence + *at->offset : at->subsequence;
}

/* Returns the random words of the global elements [e, e + n), with n <= mti_words_fit(e, n). They are stored in
   room [MTI_WORDS_ROOM]. */
static const uint32_t *mti_random_words(mt_random at, int64_t e, int64_t n, uint32_t *room) {
    int64_t lane = e & 3, blocks = (lane + n + 3) / 4;
    mti_philox_blocks((uint64_t)e >> 2, mti_subsequence(&at), at.seed,
                      (int)mt_min(mt_round_up(blocks, MTI_PHILOX_GROUP), MTI_COUNTERS), room);
    return room + lane;
}

/* How many of the n elements from e on a caller of mti_random_words should take. The elements behind them begin a
   Philox block, so that no block is computed twice. */
static int64_t mti_words_fit(int64_t e, int64_t n) { return mt_min(MTI_WORDS_ROOM - (e & 3), n); }

/* The global element number of element (row, col) of a view. */
static int64_t mti_random_element(mt_random at, int64_t row, int64_t col) {
    return (at.first_row + row) * at.global_cols + at.first_col + col;
}

#if MT_HAS_CUDA
extern "C++" {

/* out = the four random words of one Philox block. */
static __device__ __forceinline__ void mti_philox(uint64_t block, uint64_t stream, uint64_t seed, uint32_t *out) {
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    MT_DEVICE_UNROLL
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* out = the random words of the global elements [e, e + MTI_VECTOR). They lie in two Philox blocks, or in three if e is
   not the first element of a block. Comparisons shift the words by e % 4 instead of a variable index, so that the words
   stay in registers. The third block is computed last, to need fewer of them. */
static __device__ __forceinline__ void mti_words_of(mt_random at, uint64_t e, uint32_t *out) {
    uint64_t subsequence = mti_subsequence(&at);
    uint32_t last[4], skip = (uint32_t)e & 3;
    mti_philox(e >> 2, subsequence, at.seed, out);
    mti_philox((e >> 2) + 1, subsequence, at.seed, out + 4);
    if (!skip) return;
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR - 1; j++) out[j] = skip & 1 ? out[j + 1] : out[j];
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR - 2; j++) out[j] = skip & 2 ? out[j + 2] : out[j];
    mti_philox((e >> 2) + 2, subsequence, at.seed, last);
    out[5] = skip == 3 ? last[0] : out[5];
    out[6] = skip == 3 ? last[1] : skip == 2 ? last[0] : out[6];
    out[7] = skip == 3 ? last[2] : skip == 2 ? last[1] : last[0];
}

static __device__ __forceinline__ uint64_t mti_element_of(mt_random at, int64_t row, int64_t col) {
    return (uint64_t)((at.first_row + row) * at.global_cols + at.first_col + col);
}

} /* extern "C++" */
#endif

/* ---- >>panels: products of packed panels on a CPU ---------------------------------------------------------------- */

/* The micro-kernel holds MTI_MR x MTI_NR sums in registers: 8 x 32 sums take 16 of the 32 registers of AVX-512, 8 x 8
   sums take 16 of the 32 registers of NEON, and 6 x 16 sums take 12 of the 16 registers of AVX2. A register holds
   MTI_SIMD floats. The sum for an element of c adds the products over k in the same order, whatever its place in a
   tile. */
#if defined(__AVX512F__)
#define MTI_SIMD 16
#define MTI_MR 8
#elif defined(__AVX__)
#define MTI_SIMD 8
#define MTI_MR 6
#elif defined(__aarch64__)
#define MTI_SIMD 4
#define MTI_MR 8
#else
#define MTI_SIMD 4
#define MTI_MR 4
#endif
#define MTI_NR (2 * MTI_SIMD)

/* A product sums at most MTI_KC products over k at once, and adds these sums in the order of k. A panel of b, MTI_KC x
   MTI_NR, stays in L1. */
#define MTI_KC (MTI_SIMD == 16 ? 256 : 384)

#if defined(__GNUC__) && !defined(__CUDACC__)
typedef float mti_float4 __attribute__((vector_size(16)));
typedef int32_t mti_int4 __attribute__((vector_size(16)));
#ifdef __clang__
#define MTI_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define MTI_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, __extension__(mti_int4){i, j, k, l})
#endif

/* Writes the transpose of x [4, 4], whose rows are `row` apart, to out, whose rows are `width` apart. */
MT_INLINE void mti_transpose4(const float *x, int64_t row, float *out, int width) {
    mti_float4 a, b, c, d, ab, cd;
    memcpy(&a, x, sizeof a);
    memcpy(&b, x + row, sizeof b);
    memcpy(&c, x + 2 * row, sizeof c);
    memcpy(&d, x + 3 * row, sizeof d);
    ab = MTI_SHUFFLE(a, b, 0, 4, 1, 5);
    cd = MTI_SHUFFLE(c, d, 0, 4, 1, 5);
    a = MTI_SHUFFLE(a, b, 2, 6, 3, 7);
    c = MTI_SHUFFLE(c, d, 2, 6, 3, 7);
    b = MTI_SHUFFLE(ab, cd, 0, 1, 4, 5);
    ab = MTI_SHUFFLE(ab, cd, 2, 3, 6, 7);
    memcpy(out, &b, sizeof b);
    memcpy(out + width, &ab, sizeof ab);
    b = MTI_SHUFFLE(a, c, 0, 1, 4, 5);
    ab = MTI_SHUFFLE(a, c, 2, 3, 6, 7);
    memcpy(out + 2 * width, &b, sizeof b);
    memcpy(out + 3 * width, &ab, sizeof ab);
}

/* Packs `width` rows of contiguous elements, four at a time. The last four may repeat rows. Returns the number of
   columns that it has packed. */
MT_INLINE int64_t mti_pack_rows4(const float *x, int64_t row, int64_t k, int width, float *out) {
    int64_t p;
    int i;
    for (p = 0; p + 4 <= k; p += 4)
        for (i = 0; i < width; i += 4) {
            int first = i + 4 <= width ? i : width - 4;
            mti_transpose4(x + first * row + p, row, out + p * width + first, width);
        }
    return p;
}
#else
MT_INLINE int64_t mti_pack_rows4(const float *x, int64_t row, int64_t k, int width, float *out) {
    (void)x, (void)row, (void)k, (void)width, (void)out;
    return 0;
}
#endif

/* Packs a panel of `rows` <= `width` rows of a matrix whose element (i, p) is x[i * row + p * col]. Element (i, p) goes
   to out[p * width + i]. Rows from `rows` to `width` become 0. */
MT_INLINE void mti_pack_panel(const float *x, int64_t row, int64_t col, int64_t rows, int64_t k, int width,
                              float *out) {
    int64_t i, p, done = 0;
    if (row == 1 && rows == width) {
        for (p = 0; p < k; p++, x += col, out += width) memcpy(out, x, (size_t)width * sizeof(float));
        return;
    }
    if (col == 1 && rows == width) done = mti_pack_rows4(x, row, k, width, out);
    for (i = 0; i < rows; i++)
        for (p = done; p < k; p++) out[p * width + i] = x[i * row + p * col];
    for (; i < width; i++)
        for (p = 0; p < k; p++) out[p * width + i] = 0.0f;
}

/* Packs all rows, in panels of `width` rows. */
static void mti_pack(const float *x, int64_t row, int64_t col, int64_t rows, int64_t k, int width, float *out) {
    int64_t i;
    for (i = 0; i < rows; i += width)
        mti_pack_panel(x + i * row, row, col, mt_min(width, rows - i), k, width, out + i * k);
}

#if defined(__GNUC__) && !defined(__CUDACC__)
typedef float mti_simd __attribute__((vector_size(4 * MTI_SIMD)));
typedef int32_t mti_simd_ints __attribute__((vector_size(4 * MTI_SIMD)));

/* MTI_EXCHANGE takes the blocks of d elements that have the even numbers (h = 0) or the odd ones (h = 1) from a and
   from b, in turns. */
#define MTI_FROM(j, d, h) ((j) & (d) ? MTI_SIMD + (j) - ((h) ? 0 : (d)) : (j) + ((h) ? (d) : 0))
#define MTI_FROM4(j, d, h) MTI_FROM(j, d, h), MTI_FROM(j + 1, d, h), MTI_FROM(j + 2, d, h), MTI_FROM(j + 3, d, h)
#if MTI_SIMD == 16
#define MTI_FROMS(d, h) MTI_FROM4(0, d, h), MTI_FROM4(4, d, h), MTI_FROM4(8, d, h), MTI_FROM4(12, d, h)
#elif MTI_SIMD == 8
#define MTI_FROMS(d, h) MTI_FROM4(0, d, h), MTI_FROM4(4, d, h)
#else
#define MTI_FROMS(d, h) MTI_FROM4(0, d, h)
#endif
#ifdef __clang__
#define MTI_EXCHANGE(a, b, d, h) __builtin_shufflevector(a, b, MTI_FROMS(d, h))
#else
#define MTI_EXCHANGE(a, b, d, h) __builtin_shuffle(a, b, __extension__(mti_simd_ints){MTI_FROMS(d, h)})
#endif

/* One of the steps of mti_transpose_simd: exchanges blocks of d elements between rows whose numbers differ by d. */
#define MTI_TRANSPOSE_STEP(t, d)                                                                                       \
    MTI_UNROLL                                                                                                         \
    for (i = 0; i < MTI_SIMD; i++)                                                                                     \
        if (!(i & (d))) {                                                                                              \
            mti_simd low = t[i], high = t[i + (d)];                                                                    \
            t[i] = MTI_EXCHANGE(low, high, d, 0);                                                                      \
            t[i + (d)] = MTI_EXCHANGE(low, high, d, 1);                                                                \
        }

/* Transposes t [MTI_SIMD, MTI_SIMD] in registers. */
MT_INLINE void mti_transpose_simd(mti_simd *t) {
    int i;
#if MTI_SIMD == 16
    MTI_TRANSPOSE_STEP(t, 8)
#endif
#if MTI_SIMD >= 8
    MTI_TRANSPOSE_STEP(t, 4)
#endif
    MTI_TRANSPOSE_STEP(t, 2)
    MTI_TRANSPOSE_STEP(t, 1)
}

/* Widens the low (which = 0) or the high half of each element, 16 bits of the type, as mt_f32_from_16bit does. */
MT_INLINE mti_simd mti_simd_widen(mt_dtype type, mti_simd t, int which) {
    mti_simd_ints u = (mti_simd_ints)t, high = __extension__(mti_simd_ints){0} + (int32_t)0xffff0000, size, less, more;
    u = which ? u & high : u << 16;
    if (type == MT_BF16) return (mti_simd)u;
    size = (u & 0x7fffffff) >> 3;
    less = size < 0x00800000;
    more = size >= 0x0f800000;
    size += 0x38000000 + (more & 0x38000000) + (less & 0x00800000);
    t = (mti_simd)size - (mti_simd)(less & 0x38800000);
    return (mti_simd)((mti_simd_ints)t | (u & (int32_t)0x80000000));
}

/* Returns s + a b. In pairs, a and each place of b hold two bf16 numbers, neighbours in k, the first one in the low
   half. The instruction adds both products in f32. It reads denormal numbers as 0. */
MT_INLINE mti_simd mti_gemm_step(int pairs, float a, mti_simd b, mti_simd s) {
#if MT_HAS_AVX512_BF16
    if (pairs) return (mti_simd)_mm512_dpbf16_ps((__m512)s, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
#endif
    (void)pairs;
    return s + a * b;
}

/* c [MTI_MR, MTI_NR] = alpha a b + beta c, a sum over k. Row i of a is a[i][p * step]; b is a packed panel. In pairs, k
   counts pairs. */
MT_INLINE void mti_gemm_sums(int pairs, int64_t k, const float *const *a, int64_t step, const float *b, float alpha,
                             float beta, float *c, int64_t ldc) {
    mti_simd s[MTI_MR][2], b0, b1, zero = {0};
    int64_t p;
    int i, j;
    MTI_UNROLL
    for (i = 0; i < MTI_MR; i++) s[i][0] = s[i][1] = zero;
    for (p = 0; p < k; p++, b += MTI_NR) {
        memcpy(&b0, b, sizeof b0);
        memcpy(&b1, b + MTI_SIMD, sizeof b1);
        MTI_UNROLL
        for (i = 0; i < MTI_MR; i++) {
            s[i][0] = mti_gemm_step(pairs, a[i][p * step], b0, s[i][0]);
            s[i][1] = mti_gemm_step(pairs, a[i][p * step], b1, s[i][1]);
        }
    }
    MTI_UNROLL
    for (i = 0; i < MTI_MR; i++)
        for (j = 0; j < 2; j++, c += MTI_SIMD) {
            s[i][j] *= alpha;
            if (beta != 0.0f) {
                memcpy(&b0, c, sizeof b0);
                s[i][j] += beta * b0;
            }
            memcpy(c, &s[i][j], sizeof b0);
            if (j == 1) c += ldc - MTI_NR;
        }
}
#else
MT_INLINE void mti_gemm_sums(int pairs, int64_t k, const float *const *a, int64_t step, const float *b, float alpha,
                             float beta, float *c, int64_t ldc) {
    float sums[MTI_MR * MTI_NR];
    int64_t p;
    int i, j;
    (void)pairs;
    for (i = 0; i < MTI_MR * MTI_NR; i++) sums[i] = 0.0f;
    for (p = 0; p < k; p++, b += MTI_NR)
        for (i = 0; i < MTI_MR; i++)
            for (j = 0; j < MTI_NR; j++) sums[i * MTI_NR + j] += a[i][p * step] * b[j];
    for (i = 0; i < MTI_MR; i++, c += ldc)
        for (j = 0; j < MTI_NR; j++) c[j] = alpha * sums[i * MTI_NR + j] + (beta != 0.0f ? beta * c[j] : 0.0f);
}
#endif

/* A product with few rows: c [m, n] = alpha a [m, k] b^T [n, k] + beta c. a and c are f32. */
typedef struct mti_few_product {
    const float *a;
    const unsigned char *b;
    float *c;
    int64_t lda, ldb, ldc, m, n, k;
    float alpha, beta;
} mti_few_product;

#define MTI_FEW 4                    /* rows of a that are multiplied at once */
#define MTI_FEW_LEAST (2 * MTI_SIMD) /* the shortest rows of b: a register of 16-bit elements */
#define MTI_FEW_AHEAD (1 << 19)      /* bytes of the next rows of b that L2 can hold together with the present ones */

#if defined(__GNUC__) && !defined(__CUDACC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define MTI_HAS_FEW 1

/* How a register gets elements of b. In pairs: it holds two 16-bit elements in each place, which become floats after
   the transposition. Otherwise: it holds one float in each place; an instruction of F16C widens f16. */
#if defined(__F16C__) && MTI_SIMD >= 8
#define MTI_FEW_PAIRS(type) ((type) == MT_BF16)
#else
#define MTI_FEW_PAIRS(type) ((type) != MT_F32)
#endif
#define MTI_FEW_STEP(type) (MTI_FEW_PAIRS(type) ? 2 * MTI_SIMD : MTI_SIMD) /* elements of b in a register */

MT_INLINE mti_simd mti_few_load(mt_dtype type, const unsigned char *b) {
    mti_simd t;
#if defined(__F16C__) && MTI_SIMD >= 8
    if (type == MT_F16) {
#if MTI_SIMD == 16
        /* the form with a mask: gcc 12 warns of the other one */
        return (mti_simd)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)(const void *)b));
#else
        return (mti_simd)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)b));
#endif
    }
#endif
    (void)type;
    memcpy(&t, b, sizeof t);
    return t;
}

/* Adds to s [m, MTI_SIMD] the products of MTI_FEW_STEP elements of k, without those before `first`. These are elements
   p and following of m rows x, and are `at` bytes after the addresses b of MTI_SIMD rows. The order of the sums is that
   of mti_gemm_sums. The lines of the cache `ahead` of b are brought into L2. */
MT_INLINE void mti_few_step(int m, mt_dtype type, const unsigned char *const *b, int64_t at, int64_t ahead,
                            const float *const *x, int64_t p, int first, mti_simd *s) {
    mti_simd t[MTI_SIMD];
    int i, r;
    MTI_UNROLL
    for (i = 0; i < MTI_SIMD; i++) {
        t[i] = mti_few_load(type, b[i] + at);
        MTI_PREFETCH_L2(b[i] + at + ahead);
    }
    mti_transpose_simd(t);
    MTI_UNROLL
    for (i = 0; i < MTI_SIMD; i++) {
        if (!MTI_FEW_PAIRS(type)) {
            if (i < first) continue;
            for (r = 0; r < m; r++) s[r] += x[r][p + i] * t[i];
        } else {
            mti_simd even = mti_simd_widen(type, t[i], 0), odd = mti_simd_widen(type, t[i], 1);
            if (2 * i + 1 < first) continue;
            if (2 * i >= first)
                for (r = 0; r < m; r++) s[r] += x[r][p + 2 * i] * even;
            for (r = 0; r < m; r++) s[r] += x[r][p + 2 * i + 1] * odd;
        }
    }
}

/* Computes c for m rows of a from row i on, and MTI_SIMD rows of b from row j on. Rows that do not exist repeat the
   last one. k is at least MTI_FEW_LEAST. */
MT_INLINE void mti_few_tile(const mti_few_product *g, int m, mt_dtype type, int64_t i, int64_t j) {
    const unsigned char *b[MTI_SIMD];
    const float *x[MTI_FEW];
    float *c = g->c + i * g->ldc + j;
    mti_simd s[MTI_FEW], sums[MTI_FEW], zero = {0};
    int64_t size = (int64_t)mt_dtype_size(type), step = MTI_FEW_STEP(type), p, q, end;
    int64_t ahead = j + 2 * MTI_SIMD <= g->n && MTI_SIMD * g->k * size <= MTI_FEW_AHEAD ? MTI_SIMD * g->ldb * size : 0;
    size_t width = (size_t)mt_min(MTI_SIMD, g->n - j) * sizeof *c;
    int r;
    for (r = 0; r < MTI_SIMD; r++) b[r] = g->b + mt_min(j + r, g->n - 1) * g->ldb * size;
    for (r = 0; r < m; r++) {
        x[r] = g->a + mt_min(i + r, g->m - 1) * g->lda;
        sums[r] = zero;
        if (g->beta != 0.0f && i + r < g->m) memcpy(&sums[r], c + r * g->ldc, width);
    }
    for (p = 0; p < g->k; p = end) {
        float beta = p == 0 ? g->beta : 1.0f;
        end = mt_min(p + MTI_KC, g->k);
        for (r = 0; r < m; r++) s[r] = zero;
        for (q = p; q + step <= end; q += step) mti_few_step(m, type, b, q * size, ahead, x, q, 0, s);
        if (q < end) mti_few_step(m, type, b, (end - step) * size, 0, x, end - step, (int)(step - (end - q)), s);
        for (r = 0; r < m; r++) {
            s[r] *= g->alpha;
            if (beta != 0.0f) s[r] += beta * sums[r];
            sums[r] = s[r];
        }
    }
    for (r = 0; r < m; r++)
        if (i + r < g->m) memcpy(c + r * g->ldc, &sums[r], width);
}

static void mti_few_tile1(const mti_few_product *g, mt_dtype type, int64_t i, int64_t j) {
    if (type == MT_F32) mti_few_tile(g, 1, MT_F32, i, j);
    else if (type == MT_BF16) mti_few_tile(g, 1, MT_BF16, i, j);
    else mti_few_tile(g, 1, MT_F16, i, j);
}

static void mti_few_tile4(const mti_few_product *g, mt_dtype type, int64_t i, int64_t j) {
    if (type == MT_F32) mti_few_tile(g, MTI_FEW, MT_F32, i, j);
    else if (type == MT_BF16) mti_few_tile(g, MTI_FEW, MT_BF16, i, j);
    else mti_few_tile(g, MTI_FEW, MT_F16, i, j);
}

/* The product g. Reads b, whose elements have the type, once from memory. The bits of a row of c do not depend on m. */
static void mti_few_rows(const mti_few_product *g, mt_dtype type) {
    int64_t i, j;
    for (j = 0; j < g->n; j += MTI_SIMD)
        for (i = 0; i < g->m; i += MTI_FEW) {
            if (g->m - i == 1) mti_few_tile1(g, type, i, j);
            else mti_few_tile4(g, type, i, j);
        }
}
#else
#define MTI_HAS_FEW 0
static void mti_few_rows(const mti_few_product *g, mt_dtype type) { (void)g, (void)type; }
#endif

typedef struct mti_gemm_piece { /* one block of a product: c [m, n] = alpha a [m, k] b [k, n] + beta c */
    const float *a;
    const float *packed_a; /* NULL: a is read in place, with its strides */
    const float *packed_b;
    float *c;
    int64_t a_row, a_col, ldc, m, n, k;
    float alpha, beta;
    int pairs; /* 1: a and packed_b hold pairs of bf16 numbers, and k counts them; see mti_gemm_step */
    int tiles; /* 1: in pairs, and mti_tiles_product computes it */
} mti_gemm_piece;

/* mti_gemm_sums for the tile from row i on, over [first, end) of the inner dimension. b is the panel. Rows that a does
   not have repeat its last one. */
static void mti_gemm_panel(const mti_gemm_piece *x, int64_t i, int64_t first, int64_t end, const float *b, float *c,
                           int64_t ldc) {
    const float *rows[MTI_MR], *a;
    int64_t last = x->m - i - 1, k = end - first;
    int r;
    b += first * MTI_NR;
    if (x->packed_a) {
        MTI_UNROLL
        for (r = 0; r < MTI_MR; r++) rows[r] = x->packed_a + i * x->k + first * MTI_MR + r;
        mti_gemm_sums(0, k, rows, MTI_MR, b, x->alpha, x->beta, c, ldc);
        return;
    }
    a = x->a + i * x->a_row + first * x->a_col;
    MTI_UNROLL
    for (r = 0; r < MTI_MR; r++) rows[r] = a + mt_min(r, last) * x->a_row;
    if (MT_HAS_AVX512_BF16 && x->pairs) {
        if (x->a_col == 1) mti_gemm_sums(1, k, rows, 1, b, x->alpha, x->beta, c, ldc);
        else mti_gemm_sums(1, k, rows, x->a_col, b, x->alpha, x->beta, c, ldc);
    } else if (x->a_col == 1) mti_gemm_sums(0, k, rows, 1, b, x->alpha, x->beta, c, ldc);
    else mti_gemm_sums(0, k, rows, x->a_col, b, x->alpha, x->beta, c, ldc);
}

/* Copies m rows of n elements. */
static void mti_gemm_copy(const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m, int64_t n) {
    int64_t i, j;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) y[i * ldy + j] = x[i * ldx + j];
}

/* Computes the tile of a block from row i and column j on. It sums over [first, end) of the inner dimension. A part of
   a tile goes through a whole one, so that an element has the same bits in any place of a tile. */
static void mti_gemm_tile(const mti_gemm_piece *x, int64_t i, int64_t j, int64_t first, int64_t end) {
    float room[MTI_MR * MTI_NR], *c = x->c + i * x->ldc + j;
    const float *b = x->packed_b + j * x->k;
    int64_t m = mt_min(MTI_MR, x->m - i), n = mt_min(MTI_NR, x->n - j), r;
    if (m == MTI_MR && n == MTI_NR) {
        for (r = 0; r < m; r++) MTI_PREFETCH(c + r * x->ldc);
        mti_gemm_panel(x, i, first, end, b, c, x->ldc);
        return;
    }
    memset(room, 0, sizeof room);
    if (x->beta != 0.0f) mti_gemm_copy(c, x->ldc, room, MTI_NR, m, n);
    mti_gemm_panel(x, i, first, end, b, room, MTI_NR);
    mti_gemm_copy(room, MTI_NR, c, x->ldc, m, n);
}

/* ---- >>amx: products of pairs in the tiles of AMX ---------------------------------------------------------------- */

/* A tile is a register of 16 rows of 64 bytes: 16 x 16 floats or pairs of bf16 numbers. An instruction adds the product
   of two tiles of pairs, a and b, to a tile of floats. A packed panel of pairs has the layout of b. Sums over k go in
   steps of MTI_TILE_SIDE pairs, which begin at multiples of it. So an element of c has the same bits in any place, and
   also if a step is left out whose products are all 0. */
#define MTI_TILE_SIDE 16
#define MTI_TILES (2 * MTI_TILE_SIDE) /* rows and columns of c that are computed at once, in four tiles */

#if MT_HAS_AMX_BF16
/* Asks Linux to let this process use tiles. Returns 0 if it does not, or if the processor has none. */
static int mti_tiles_permitted(void) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* A thread calls mti_tiles_begin before its products, and mti_tiles_end after them. */
static void mti_tiles_begin(void) {
    /* The palette, and for each tile the bytes of a row (16 bits, from byte 16 on) and the rows (from byte 48 on). The
       memory is constant, because gcc 12 does not know that the instruction reads all of it. */
    static const unsigned char config[64] = {1, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  0,  0,  0,  0,  0,  64, 0, 64,
                                             0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  64, 0,  0,  0,  0,  0,  0, 0,
                                             0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  16, 16, 16, 16, 16, 16, 16, 16};
    _tile_loadconfig(config);
}

static void mti_tiles_end(void) { _tile_release(); }

/* c [MTI_TILES, MTI_TILES] = a b, a sum over k pairs. k is a multiple of MTI_TILE_SIDE. b is a packed panel. */
static void mti_tiles_sums(int64_t k, const float *a, int64_t lda, const float *b, float *c, int64_t ldc) {
    size_t a_bytes = (size_t)lda * sizeof *a, b_bytes = MTI_NR * sizeof *b, c_bytes = (size_t)ldc * sizeof *c;
    float *c1 = c + MTI_TILE_SIDE * ldc;
    int64_t p;
    __asm__ volatile("" ::: "memory"); /* gcc does not know that a load reads memory */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (p = 0; p < k; p += MTI_TILE_SIDE, a += MTI_TILE_SIDE, b += MTI_TILE_SIDE * MTI_NR) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(5, a + MTI_TILE_SIDE * lda, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(7, b + MTI_TILE_SIDE, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + MTI_TILE_SIDE, c_bytes);
    _tile_stored(2, c1, c_bytes);
    _tile_stored(3, c1 + MTI_TILE_SIDE, c_bytes);
}

/* Writes the transpose of x [k, MTI_TILES], whose rows are ldx apart, to out, whose rows are k apart. k is a multiple
   of MTI_TILE_SIDE. */
static void mti_tiles_transpose(const float *x, int64_t ldx, int64_t k, float *out) {
    mti_simd t[MTI_TILE_SIDE];
    int64_t i, p;
    int r;
    for (i = 0; i < MTI_TILES; i += MTI_TILE_SIDE)
        for (p = 0; p < k; p += MTI_TILE_SIDE) {
            for (r = 0; r < MTI_TILE_SIDE; r++) memcpy(&t[r], x + (p + r) * ldx + i, sizeof t[r]);
            mti_transpose_simd(t);
            for (r = 0; r < MTI_TILE_SIDE; r++) memcpy(out + (i + r) * k + p, &t[r], sizeof t[r]);
        }
}

/* Writes alpha s [m, n] to c, or adds it. The rows of s are MTI_TILES apart. */
static void mti_tiles_write(const float *s, float alpha, int add, float *c, int64_t ldc, int64_t m, int64_t n) {
    int64_t i, j;
    for (i = 0; i < m; i++, s += MTI_TILES, c += ldc) {
        if (add)
            for (j = 0; j < n; j++) c[j] += alpha * s[j];
        else
            for (j = 0; j < n; j++) c[j] = alpha * s[j];
    }
}

/* Computes the part of a product in MTI_TILES rows from row i on and MTI_TILES columns from column j on, where beta is
   0 or 1. `a` has the pairs [first, end) of these rows, which are lda apart. All MTI_TILES rows of `a` are read, also
   those that x does not have. */
static void mti_tiles_product(const mti_gemm_piece *x, int64_t i, int64_t j, int64_t first, int64_t end, const float *a,
                              int64_t lda) {
    float room[MTI_TILES * MTI_TILES], *c = x->c + i * x->ldc + j;
    mti_tiles_sums(end - first, a, lda, x->packed_b + j * x->k + first * MTI_NR, room, MTI_TILES);
    mti_tiles_write(room, x->alpha, x->beta != 0.0f, c, x->ldc, mt_min(MTI_TILES, x->m - i),
                    mt_min(MTI_TILES, x->n - j));
}
#else
static int mti_tiles_permitted(void) { return 0; }
static void mti_tiles_begin(void) {}
static void mti_tiles_end(void) {}
static void mti_tiles_transpose(const float *x, int64_t ldx, int64_t k, float *out) {
    (void)x, (void)ldx, (void)k, (void)out;
}
static void mti_tiles_product(const mti_gemm_piece *x, int64_t i, int64_t j, int64_t first, int64_t end, const float *a,
                              int64_t lda) {
    (void)x, (void)i, (void)j, (void)first, (void)end, (void)a, (void)lda;
}
#endif

/* *tiles = 1 if products of pairs go to tiles, otherwise 0. A context asks once, so that its answer does not change. */
static mt_status mti_tiles_open(mt_context *ctx, int *tiles) {
    mti_kernels *k;
    MT_TRY(mti_kernels_open(ctx, &k));
    if (!k->tiles) k->tiles = mti_tiles_permitted() ? 1 : -1;
    *tiles = k->tiles > 0;
    return MT_SUCCESS;
}

/* ---- >>ptx: wrappers of PTX instructions ------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

#if !defined(MT_CUDA_ENGINE) /* tests/engine/ defines these functions itself */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define MTI_PTX_SM80(...) asm volatile(__VA_ARGS__)
#else
#define MTI_PTX_SM80(...) __trap() /* not reached: see mti_built_for */
#endif
/* Code that is built for less than sm_80 has no asynchronous copies. It runs the statement `now` instead, because
   norms use these wrappers there, too. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define MTI_PTX_COPY(now, ...) asm volatile(__VA_ARGS__)
#else
#define MTI_PTX_COPY(now, ...) now
#endif

static __device__ __forceinline__ uint32_t mti_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Starts copying 16 bytes from global to shared memory. Only `bytes` bytes are read, and the rest of the 16 becomes 0.
   Code built for less than sm_80 copies before it goes on, and `bytes` must be 0 or 16. */
static __device__ __forceinline__ void mti_cp_async16(void *to, const void *from, int bytes) {
    MTI_PTX_COPY(*(uint4 *)to = bytes ? *(const uint4 *)from : make_uint4(0, 0, 0, 0),
                 "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(mti_shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void mti_cp_async_commit() {
    MTI_PTX_COPY((void)0, "cp.async.commit_group;" ::: "memory");
}
/* Waits until at most `Pending` committed groups of this thread are still in flight. */
template <int Pending> static __device__ __forceinline__ void mti_cp_async_wait() {
    MTI_PTX_COPY((void)0, "cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/* Loads four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8. */
static __device__ __forceinline__ void mti_ldmatrix_x4(uint32_t *r, const void *row) {
    MTI_PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(mti_shared_address(row))
                 : "memory");
}
static __device__ __forceinline__ void mti_ldmatrix_x4_trans(uint32_t *r, const void *row) {
    MTI_PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(mti_shared_address(row))
                 : "memory");
}

/* d [16, 8] += a [16, 16] b [16, 8] */
static __device__ __forceinline__ void mti_mma_16816_bf16(float *d, const uint32_t *a, const uint32_t *b) {
    MTI_PTX_SM80("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ void mti_mma_16816_f16(float *d, const uint32_t *a, const uint32_t *b) {
    MTI_PTX_SM80("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* 2^x, within 2 units in the last place. Subnormal results become 0. */
static __device__ __forceinline__ float mti_ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x, within 1 unit in the last place. Subnormal arguments count as 0, and subnormal results become 0. */
static __device__ __forceinline__ float mti_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#undef MTI_PTX_SM80
#undef MTI_PTX_COPY
#endif

} /* extern "C++" */
#endif

/* ---- >>tile: 16-bit tiles in shared memory, and their products on tensor cores ----------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* Returns the offset in elements of a vector in a tile. A tile is [rows, HeadDim], row-major, in vectors of 16 bytes.
   Vector c of row r is stored at the place of vector c ^ swizzle(r), so that the eight rows that ldmatrix reads at a
   time lie in eight different groups of four banks. Rows of 64 or 128 elements all begin in the same bank, so the
   swizzle is the row modulo 8. Rows of 96 elements begin alternately in two banks, so the swizzle is the number of the
   pair of rows, modulo 4. */
template <int HeadDim> static __device__ __forceinline__ int mti_tile_at(int row, int vector) {
    return row * HeadDim + (vector ^ (HeadDim % 64 == 0 ? row & 7 : row >> 1 & 3)) * 8;
}

/* Returns the offset of the vector that is `vector` vectors after the one at `at`. `vector` is even, and at =
   mti_tile_at(row, 0 or 1). Most of this is computed at compile time. */
template <int HeadDim> static __device__ __forceinline__ int mti_tile_on(int at, int vector) {
    return HeadDim % 64 == 0 ? at ^ (vector * 8) : (at ^ (vector % 4 * 8)) + vector / 4 * 32;
}

/* The number of neighbouring threads that move a row together, one vector each. When a row is divided into groups of
   this many vectors, the swizzle permutes vectors only within a group. */
template <int HeadDim> static __device__ __forceinline__ constexpr int mti_tile_across() {
    return HeadDim % 64 == 0 ? 8 : 4;
}

/* The THREADS threads of a block together start copying rows [first, first + ROWS) of a matrix to a tile. Rows from
   `end` on become 0. The caller commits, waits and synchronises. */
template <int ROWS, int HeadDim, int THREADS>
static __device__ __forceinline__ void mti_tile_fetch(uint16_t *tile, const uint16_t *from, int64_t ld, int first,
                                                      int end) {
    constexpr int across = mti_tile_across<HeadDim>(), down = THREADS / across;
    static_assert(ROWS % down == 0 && down % 8 == 0, "every thread copies as much, at the same swizzle");
    int row = (int)threadIdx.x / across, vector = (int)threadIdx.x % across;
    tile += mti_tile_at<HeadDim>(row, vector);
    row += first;
    from += row * ld + vector * 8;
    MT_DEVICE_UNROLL
    for (int r = 0; r < ROWS; r += down) {
        MT_DEVICE_UNROLL
        for (int c = 0; c < HeadDim / 8; c += across)
            mti_cp_async16(tile + r * HeadDim + c * 8, from + r * ld + c * 8, row + r < end ? 16 : 0);
    }
}

template <bool BF16> static __device__ __forceinline__ void mti_mma(float *d, const uint32_t *a, const uint32_t *b) {
    if (BF16) mti_mma_16816_bf16(d, a, b);
    else mti_mma_16816_f16(d, a, b);
}

/* Returns two f32 values, each rounded to 16 bits, in one word. */
template <bool BF16> static __device__ __forceinline__ uint32_t mti_round_pair(float low, float high) {
    uint32_t pair;
    if (BF16) {
        __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
        memcpy(&pair, &v, sizeof pair);
    } else {
        __half2 v = __floats2half2_rn(low, high);
        memcpy(&pair, &v, sizeof pair);
    }
    return pair;
}

/* The accumulator of a warp is a matrix [RowTiles * 16, N8 * 8], distributed over the lanes as float
   acc[RowTiles][N8][4]. In lane l, elements 0 and 1 of acc[m][n] belong to row m * 16 + l / 4, and elements 2 and 3 to
   the row 8 below it. Their columns are n * 8 + l % 4 * 2 and the next one. */
template <int RowTiles, int N8> static __device__ __forceinline__ void mti_tile_zero(float (&acc)[RowTiles][N8][4]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) acc[i / 4 / N8][i / 4 % N8][i % 4] = 0.0f;
}

template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_tile_scale(float (&acc)[RowTiles][N8][4], float factor) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) acc[i / 4 / N8][i / 4 % N8][i % 4] *= factor;
}

/* The first operand of a product, [RowTiles * 16, K16 * 16], is in registers in fragments uint32_t x[K16][RowTiles][4].
   mti_tile_load loads fragment k of a tile [RowTiles * 16, HeadDim], mti_tile_hold loads the first Held ones, and
   mti_tile_round rounds an accumulator to 16 bits, which is then the first operand of the next product. */
template <int HeadDim, int RowTiles>
static __device__ __forceinline__ void mti_tile_load(uint32_t (&x)[RowTiles][4], const uint16_t *a, int k) {
    int lane = (int)threadIdx.x & 31, at = mti_tile_at<HeadDim>(lane & 15, lane >> 4);
    MT_DEVICE_UNROLL
    for (int m = 0; m < RowTiles; m++) mti_ldmatrix_x4(x[m], a + m * 16 * HeadDim + mti_tile_on<HeadDim>(at, k * 2));
}

template <int HeadDim, int Held, int RowTiles>
static __device__ __forceinline__ void mti_tile_hold(uint32_t (&x)[HeadDim / 16][RowTiles][4], const uint16_t *a) {
    MT_DEVICE_UNROLL
    for (int k = 0; k < Held; k++) mti_tile_load<HeadDim>(x[k], a, k);
}

template <bool BF16, int RowTiles, int N8>
static __device__ __forceinline__ void mti_tile_round(uint32_t (&x)[N8 / 2][RowTiles][4],
                                                      const float (&acc)[RowTiles][N8][4]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < N8 / 2 * RowTiles * 4; i++) {
        int k = i / 4 / RowTiles, m = i / 4 % RowTiles, e = i % 4;
        const float *pair = acc[m][k * 2 + e / 2] + e % 2 * 2;
        x[k][m][e] = mti_round_pair<BF16>(pair[0], pair[1]);
    }
}

/* acc = a b^T. The tile a [RowTiles * 16, HeadDim] belongs to this warp, all warps share the tile b [N8 * 8, HeadDim].
   The caller holds the first Held fragments of a in x, and this function loads the others. Each fragment of a or b is
   loaded while the tensor cores work on the one before it. */
template <int HeadDim, bool BF16, int Held, int RowTiles, int N8>
static __device__ __forceinline__ void mti_tile_scores(float (&acc)[RowTiles][N8][4],
                                                       const uint32_t (&x)[HeadDim / 16][RowTiles][4],
                                                       const uint16_t *a, const uint16_t *b) {
    constexpr int K16 = HeadDim / 16, across = N8 / 2, steps = K16 * across;
    int lane = (int)threadIdx.x & 31, at = mti_tile_at<HeadDim>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    uint32_t y[2][4], z[2][RowTiles][4];
    mti_tile_zero(acc);
    if (Held == 0) mti_tile_load<HeadDim>(z[0], a, 0);
    mti_ldmatrix_x4(y[0], b + at);
    MT_DEVICE_UNROLL
    for (int i = 0; i < steps; i++) {
        int k = i / across, n = i % across * 2, next = i + 1;
        if (next < steps)
            mti_ldmatrix_x4(y[next % 2],
                            b + next % across * 16 * HeadDim + mti_tile_on<HeadDim>(at, next / across * 2));
        if (n == 0 && k + 1 >= Held && k + 1 < K16) mti_tile_load<HeadDim>(z[(k + 1) % 2], a, k + 1);
        MT_DEVICE_UNROLL
        for (int m = 0; m < RowTiles; m++) {
            const uint32_t *first = k < Held ? x[k][m] : z[k % 2][m];
            mti_mma<BF16>(acc[m][n], first, y[i % 2]);
            mti_mma<BF16>(acc[m][n + 1], first, y[i % 2] + 2);
        }
    }
}

/* acc += x b. x are fragments, and all warps share the tile b [K16 * 16, HeadDim]. A fragment of b is loaded while the
   tensor cores work on the one before it. */
template <int HeadDim, bool BF16, int RowTiles, int K16>
static __device__ __forceinline__ void mti_tile_add_product(float (&acc)[RowTiles][HeadDim / 8][4],
                                                            const uint32_t (&x)[K16][RowTiles][4], const uint16_t *b) {
    constexpr int across = HeadDim / 16, steps = K16 * across;
    int lane = (int)threadIdx.x & 31, at = mti_tile_at<HeadDim>(lane & 15, lane >> 4);
    uint32_t y[2][4];
    mti_ldmatrix_x4_trans(y[0], b + at);
    MT_DEVICE_UNROLL
    for (int i = 0; i < steps; i++) {
        int k = i / across, n = i % across * 2, next = i + 1;
        if (next < steps)
            mti_ldmatrix_x4_trans(y[next % 2],
                                  b + next / across * 16 * HeadDim + mti_tile_on<HeadDim>(at, next % across * 2));
        MT_DEVICE_UNROLL
        for (int m = 0; m < RowTiles; m++) {
            mti_mma<BF16>(acc[m][n], x[k][m], y[i % 2]);
            mti_mma<BF16>(acc[m][n + 1], x[k][m], y[i % 2] + 2);
        }
    }
}

/* Stores the first `rows` rows of acc in global memory, 16 bytes at a time. The values go through a tile [RowTiles *
   16, HeadDim] that only this warp uses. The barrier of the warp separates writing the tile from reading it. */
template <int HeadDim, bool BF16, int RowTiles>
static __device__ __forceinline__ void mti_tile_store(const float (&acc)[RowTiles][HeadDim / 8][4], uint16_t *tile,
                                                      uint16_t *to, int64_t ld, int rows) {
    int lane = (int)threadIdx.x & 31, across = mti_tile_across<HeadDim>();
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * HeadDim / 4; i++) { /* half 2 m is rows m * 16 + lane / 4, half 2 m + 1 is 8 below */
        int n = i % (HeadDim / 8), half = i / (HeadDim / 8);
        const float *pair = acc[half / 2][n] + half % 2 * 2;
        *(uint32_t *)(tile + mti_tile_at<HeadDim>(half * 8 + lane / 4, n) + lane % 4 * 2) =
            mti_round_pair<BF16>(pair[0], pair[1]);
    }
    __syncwarp();
    for (int row = lane / across; row < RowTiles * 16 && row < rows; row += 32 / across)
        for (int c = lane % across; c < HeadDim / 8; c += across)
            *(mti_words *)(to + row * ld + c * 8) = *(const mti_words *)(tile + mti_tile_at<HeadDim>(row, c));
}

} /* extern "C++" */
#endif

#define MTI_ARGS 12 /* maximum number of views of an operator */

/* ---- >>rules: placements, for check mode ------------------------------------------------------------------------- */

#define MTI_NUMBERS 16

typedef struct mti_named_rule {
    const char *name;
    mt_rule rule;
} mti_named_rule;

/* clang-format off */
static const mti_named_rule mti_rules[] = {
    {"mt_copy", {"x y", "RR rr cc PP", NULL}},
    {"mt_convert", {"x y", "RR rr cc PP", NULL}},
    {"mt_add", {"a b y", "RRR rrr ccc PPP", NULL}},
    {"mt_sum", {"x out", "RR rP cP PP", NULL}},
    {"mt_tree_sum", {"x sum", "RR rP cc PP", NULL}},
    {"mt_sum_of_squares", {"x out", "RR rP cP", NULL}},
    {"mt_bias_forward", {"y bias", "RR rR cc PP", NULL}},
    {"mt_bias_backward", {"dy dbias", "RR rP cc PP", NULL}},
    {"mt_linear_forward", {"weight x bias y", "RRRR RrRr rRcc cc-P RP-P PR-P ccPP RPPP PRPP", "rrRr"}},
    {"mt_linear_activation_forward", {"weight x bias h y", "RRRRR RrRrr rRccc", "rrRrr"}},
    {"mt_linear_activation_backward",
        {"weight dy h dh dbias", "RRRRR RrrrP cRccc rcRPP RPRPP PRRPP", "rrrrP"}},
    {"mt_linear_gradients", {"dweight dy x dbias", "RRRR rcRc cRcR PrrP PPRP PRPR", "rrrP"}},
    {"mt_activation_forward", {"h bias y", "RRR rRr ccc", NULL}},
    {"mt_activation_backward", {"dy h dh dbias", "RRRR rrrP cccc PRPP", NULL}},
    {"mt_norm_forward", {"x gain bias y stats", "RRRRR rRRrr", NULL}},
    {"mt_norm_backward", {"x gain stats dy dresidual dx dgain dbias", "RRRRRRRR rRrrrrPP RRRPPPPP", NULL}},
    {"mt_bias_dropout_add_forward", {"x bias residual y", "RRRR rRrr cccc P-PP PPPP", NULL}},
    {"mt_bias_dropout_add_backward", {"dy dx dbias", "RRR rrP ccc PPP", NULL}},
    {"mt_attention_forward", {"qkv out lse bias", "RRRR ccrR ccrr", "rrcR rrcr"}},
    {"mt_attention_backward",
        {"qkv lse out dout dqkv bias dbias", "RRRRRRR crcccRP crcccrr RRRPPRP", "rcrrrRP rcrrrrr"}},
    {"mt_rotary_table", {"table", "R", NULL}},
    {"mt_rotary_forward", {"qkv table", "RR cR", "rR"}},
    {"mt_rotary_backward", {"dqkv table", "RR cR PR", "rR"}},
    {"mt_kv_cache_append", {"qkv table keys values", "RR** cR**", "rR**"}},
    {"mt_kv_cache_attention", {"qkv keys values out", "R**R c**c", "r**r"}},
    {"mt_cross_entropy_stats", {"logits stats", "RR rr cc", NULL}},
    {"mt_cross_entropy_combine", {"gathered loss lse", "RRR rcc", NULL}},
    {"mt_cross_entropy_backward", {"logits lse dloss", "RRR cRR rcR rcc", NULL}},
    {"mt_cross_entropy_forward_backward", {"logits loss dloss", "RRR rcR rcc", NULL}},
    {"mt_sample_candidates", {"logits candidates", "RR rr cc", NULL}},
    {"mt_sample_ids", {"gathered ids", "RR rr", NULL}},
    {"mt_adamw_step", {"param master grad m v", "RRRRR rrrrr ccccc", NULL}},
    {"mt_step_decide", {"sums loss", "RR", NULL}},
    {"mt_multiply", {"a b y", "RRR rrr ccc PRP RPP", NULL}},
    {"mt_multiply_row_forward", {"x row y", "RRR rRr ccc PRP", NULL}},
    {"mt_multiply_row_backward", {"dy x row dx drow", "RRRRR rrRrP ccccc PRRPP RPRRP", NULL}},
    {"mt_multiply_col_forward", {"x col y", "RRR rrr cRc PRP", NULL}},
    {"mt_multiply_col_backward", {"dy x col dx dcol", "RRRRR rrrrr ccRcP PRRPP RPRRP", NULL}},
    {"mt_sigmoid_forward", {"x y", "RR rr cc", NULL}},
    {"mt_sigmoid_backward", {"x dy dx", "RRR rrr ccc RPP", NULL}},
    {"mt_silu_forward", {"x y", "RR rr cc", NULL}},
    {"mt_silu_backward", {"x dy dx", "RRR rrr ccc RPP", NULL}},
    {"mt_sigmoid_gate_forward", {"gate x y", "RRR rrr ccc RPP", NULL}},
    {"mt_sigmoid_gate_backward", {"dy gate x dgate dx", "RRRRR rrrrr ccccc PRRPP RRPPR", NULL}},
};
/* clang-format on */

/* C = op(A) op(B), by transpose of A and B. */
static const mt_rule mti_gemm_rules[2][2] = {
    {{"a b c", "RRR rRr Rcc crP PRP RPP", "rrr"}, {"a b c", "RRR rRr Rrc ccP PRP RPP", "rrr"}},
    {{"a b c", "RRR cRr Rcc rrP PRP RPP", "rrr"}, {"a b c", "RRR cRr Rrc rcP PRP RPP", "rrr"}}};

/* Each rank may rotate its own tokens of one sequence, with its own rows of the table. */
static const mt_rule mti_rotary_rules[2] = {{"qkv table", "RR cR rr", "rR"}, {"dqkv table", "RR cR PR rr", "rR"}};

/* Attention of queries to keys and values of their own. All ranks may have the keys and values: each rank uses those of
   its heads (o). With one group all ranks may use it, with a share of the queries each (w; multi-query attention, arXiv
   1911.02150). With more groups the queries of a rank would not meet their own group. Or each rank has the queries of
   its own tokens: when no position counts, they see all keys (a). Otherwise the last key must be that of the rank's
   last query (k). Dropout cannot number the rows of such queries.
   [one group][the ranks' own queries: none, of all keys, of the first keys][backward] */
#define MTI_HEADS_FORWARD "RRRRRR ccccrR ccccrr coocrR coocrr"
#define MTI_HEADS_BACKWARD "RRRRRRRRRRR cccrcccccRP cccrcccccrr RRRRRPPPPRP coorcccooRP coorcccoorr"
#define MTI_HEADS_OF_ALL_FORWARD MTI_HEADS_FORWARD " cwwcrR cwwcrr"
#define MTI_HEADS_OF_ALL_BACKWARD MTI_HEADS_BACKWARD " cwwrcccPPRP cwwrcccPPrr"
#define MTI_DOT_PRODUCT_RULES(forward, backward)                                                                       \
    {                                                                                                                  \
        {"q k v out lse bias", forward, "rrrrcR rrrrcr"}, {                                                            \
            "q k v lse out dout dq dk dv bias dbias", backward, "rrrcrrrrrRP rrrcrrrrrrr"                              \
        }                                                                                                              \
    }
static const mt_rule mti_dot_product_rules[2][3][2] = {
    {MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD, MTI_HEADS_BACKWARD),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD " raarcr", MTI_HEADS_BACKWARD " raacrrrPPrr"),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD " rkkrcr", MTI_HEADS_BACKWARD " rkkcrrrPPrr")},
    {MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD, MTI_HEADS_OF_ALL_BACKWARD),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD " raarcr", MTI_HEADS_OF_ALL_BACKWARD " raacrrrPPrr"),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD " rkkrcr", MTI_HEADS_OF_ALL_BACKWARD " rkkcrrrPPrr")}};

static const mt_rule *mti_dot_product_rule(const mt_attention_desc *s, int backward) {
    int by_position = s->mask == MT_MASK_CAUSAL || s->window || s->alibi_slopes;
    int own = s->dropout.p > 0.0f || s->cu_seqlens ? 0 : !by_position ? 1 : s->batch == 1 ? 2 : 0;
    return &mti_dot_product_rules[s->groups == 1][own][backward];
}

static mt_status mti_apply_rule(mt_context *ctx, const char *name, const mt_rule *rule, const mt_arg *args, int count) {
    mt_operand operands[MTI_ARGS + 1];
    int i;
    for (i = 0; i < count; i++) {
        operands[i].name = args[i].name;
        operands[i].t = *args[i].view;
        operands[i].use = args[i].use & MT_ARG_IN_OUT;
        if ((args[i].use & MT_ARG_GRADIENT) == MT_ARG_GRADIENT) operands[i].use = 7;
    }
    return mt_rule_check(ctx, name, rule, operands, count);
}

static const mt_rule *mti_rule_of(const char *name) {
    size_t i;
    for (i = 0; i < sizeof mti_rules / sizeof *mti_rules; i++)
        if (strcmp(mti_rules[i].name, name) == 0) return &mti_rules[i].rule;
    return NULL;
}

MT_API const mt_rule *mt_rule_of(const char *name) {
    if (!name) return NULL;
    return strcmp(name, "mt_gemm") == 0 ? &mti_gemm_rules[0][0] : mti_rule_of(name);
}

/* Applies the rule of an operator. What an operator without a rule writes is not known. */
static mt_status mti_apply_rule_of(mt_context *ctx, const char *name, const mt_arg *args, int count) {
    const mt_rule *rule;
    int i;
    if (count == 0 || !mt_check_mode(ctx)) return MT_SUCCESS;
    rule = mti_rule_of(name);
    if (rule) return mti_apply_rule(ctx, name, rule, args, count);
    for (i = 0; i < count; i++)
        if (args[i].use & MT_ARG_OUT) MT_TRY(mt_declare(ctx, NULL, *args[i].view, MT_UNDECLARED));
    return MT_SUCCESS;
}

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

/* ---- >>dispatch -------------------------------------------------------------------------------------------------- */

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

/* ---- >>fill ------------------------------------------------------------------------------------------------------ */

MT_API mt_tensor mt_none(void) { return mt_tensor_make(NULL, MT_F32, 0, 0); }

typedef struct mti_fill {
    mt_tensor y;
    float value;
} mti_fill;

/* memset, because it writes a long run of zeros to memory without reading the memory first. */
static void mti_cpu_fill(void *data, int thread, int64_t first, int64_t last) {
    const mti_fill *f = (const mti_fill *)data;
    int64_t i, j, count;
    uint16_t value16 = 0;
    (void)thread;
    if (f->y.dtype != MT_F32) mt_f32_to_16bit(f->y.dtype, &f->value, &value16, 1);
    for (i = first; i < last; i += count) {
        mti_stripe p = mti_stripes_of_row(f->y.cols, i, last, &count);
        void *y = mti_bytes_at(f->y, p.row, p.col);
        if (mt_f32_bits(f->value) == 0) memset(y, 0, (size_t)p.cols * mt_dtype_size(f->y.dtype));
        else if (f->y.dtype == MT_F32) mti_row_fill((float *)y, f->value, p.cols);
        else
            for (j = 0; j < p.cols; j++) ((uint16_t *)y)[j] = value16;
    }
}

#if MT_HAS_CUDA
extern "C++" {

template <int TYPE> struct mti_fill_op {
    struct input {};
    mti_view y;
    float value;
    template <bool WIDE> __device__ void fetch(int64_t, int64_t, int, input &) const {}
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &) const {
        float x[MTI_VECTOR];
        for (int j = 0; j < MTI_VECTOR; j++) x[j] = value;
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_fill(mt_context *ctx, mt_tensor y, float value) {
    mti_access how = mti_access_of(y);
    if (y.rows * y.cols == 0) return MT_SUCCESS;
    if (mt_f32_bits(value) == 0 && (y.rows == 1 || mt_tensor_ld(y) == y.cols))
        return mt_cuda_zero(ctx, y.data, (size_t)(y.rows * y.cols) * mt_dtype_size(y.dtype));
    return mti_by_type(how.type, [&](auto type) {
        mti_fill_op<type.value> op = {mti_view_of(y), value};
        return mti_map_ahead<type.value>(ctx, "mt_fill", op, how.wide, y.rows, y.cols);
    });
}

} /* extern "C++" */
#endif

MT_API mt_status mt_fill(mt_context *ctx, mt_tensor y, float value) {
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_fill", args, MTI_COUNT(args)));
    MT_TRY(mti_begin_ruled(&op, ctx, "mt_fill", args, MTI_COUNT(args)));
    if (mt_check_mode(ctx)) MT_TRY(mt_declare_zero(ctx, y));
    if (mt_check_mode(ctx) && value != 0.0f) MT_TRY(mt_declare(ctx, NULL, y, MT_UNDECLARED));
    mti_fill f = {y, value};
    return mti_end(&op,
                   MTI_RUN(&op, mti_cuda_fill(ctx, y, value), mti_cpu_stripes(ctx, y.rows, y.cols, mti_cpu_fill, &f)));
}

/* ---- >>copy: on the device, and from and to the host ------------------------------------------------------------- */

/* y = x, in any type. Uses memmove because y may be x. */
static void mti_copy_stripes(void *data, int thread, int64_t first, int64_t last) {
    const mti_conversion *c = (const mti_conversion *)data;
    int64_t i, count;
    (void)thread;
    for (i = first; i < last; i += count) {
        mti_stripe p = mti_stripes_of_row(c->x.cols, i, last, &count);
        memmove(mti_bytes_at(c->y, p.row, p.col), mti_bytes_at(c->x, p.row, p.col),
                (size_t)p.cols * mt_dtype_size(c->x.dtype));
    }
}

static void mti_cpu_copy(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mti_conversion c = {x, y};
    mti_cpu_stripes(ctx, x.rows, x.cols, mti_copy_stripes, &c);
}

#if MT_HAS_CUDA
extern "C++" {

static mt_status mti_cuda_copy_view(mt_context *ctx, mt_tensor x, mt_tensor y) {
    if (x.data == y.data) return MT_SUCCESS; /* the same view: see mti_expect_same_or_apart */
    size_t size = mt_dtype_size(x.dtype);
    return mt_cuda_copy_rows(ctx, y.data, (size_t)mt_tensor_ld(y) * size, x.data, (size_t)mt_tensor_ld(x) * size,
                             (size_t)x.cols * size, x.rows);
}

static mt_status mti_cuda_upload(mt_context *ctx, const void *host, mt_tensor y) {
    size_t size = mt_dtype_size(y.dtype);
    return mt_cuda_upload(ctx, y.data, (size_t)mt_tensor_ld(y) * size, host, (size_t)y.cols * size, y.rows);
}

/* Waits for peers first, because a copy to pageable memory would wait for them without a timeout. */
static mt_status mti_cuda_download(mt_context *ctx, mt_tensor x, void *host) {
    size_t size = mt_dtype_size(x.dtype), row = (size_t)x.cols * size;
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mt_cuda_wait_peers(ctx));
    MT_TRY(mt_cuda_copy_rows(ctx, host, row, x.data, (size_t)mt_tensor_ld(x) * size, row, x.rows));
    return mt_context_synchronize(ctx);
}

} /* extern "C++" */
#endif

MT_API mt_status mt_copy(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_ANY, MT_ARG_IN | MT_ARG_MOVED},
                     {"y", &y, y.rows, y.cols, MT_ARG_ANY, MT_ARG_OUT}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_copy", args, MTI_COUNT(args)));
    if (x.dtype != y.dtype)
        return mt_fail(ctx, MT_ERR_DTYPE, "mt_copy: x is %s and y is %s, must be the same", mt_dtype_name(x.dtype),
                       mt_dtype_name(y.dtype));
    if (x.rows != y.rows || x.cols != y.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_copy: x is [%lld, %lld], y is [%lld, %lld], must be the same",
                       (long long)x.rows, (long long)x.cols, (long long)y.rows, (long long)y.cols);
    MT_TRY(mti_expect_same_or_apart(ctx, "mt_copy", x, y));
    MT_TRY(mti_begin(&op, ctx, "mt_copy", args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_copy_view(ctx, x, y), mti_cpu_copy(ctx, x, y)));
}

MT_API mt_status mt_upload(mt_context *ctx, const void *host, mt_tensor y) {
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_ANY, MT_ARG_OUT}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_upload", args, MTI_COUNT(args)));
    MT_TRY(mti_expect_pointer(ctx, "mt_upload", "host", host, y.rows * y.cols));
    MT_TRY(mti_begin(&op, ctx, "mt_upload", args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_upload(ctx, host, y),
                                mti_cpu_copy(ctx, mt_tensor_make(host, y.dtype, y.rows, y.cols), y)));
}

MT_API mt_status mt_download(mt_context *ctx, mt_tensor x, void *host) {
    static const char *const where = "mt_download";
    static const mt_rule rule = {"x", "R r c", NULL}; /* for floats: ids and bytes have no placement to check */
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_ANY, MT_ARG_IN}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_pointer(ctx, where, "host", host, x.rows * x.cols));
    if (mt_dtype_is_float(x.dtype)) MT_TRY(mti_apply_rule(ctx, where, &rule, args, MTI_COUNT(args)));
    if (mt_context_device(ctx) == MT_DEVICE_META && !mti_is_empty(x))
        memset(host, 0, (size_t)(x.rows * x.cols) * mt_dtype_size(x.dtype));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_download(ctx, x, host),
                                mti_cpu_copy(ctx, x, mt_tensor_make(host, x.dtype, x.rows, x.cols))));
}

/* ---- >>add: sums and type conversions ---------------------------------------------------------------------------- */

typedef struct mti_add {
    mt_tensor a, b, y;
} mti_add;

static void mti_cpu_add(void *data, int thread, int64_t first, int64_t last) {
    const mti_add *s = (const mti_add *)data;
    float room[2][MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_stripe p = mti_stripe_of(s->y.cols, i);
        for (j = p.col; j < p.col + p.cols; j += n) {
            mt_tensor a, b, y;
            n = mt_min(MTI_BLOCK, p.col + p.cols - j);
            a = mti_f32_read(s->a, p.row, 1, j, n, room[0]);
            b = mti_f32_read(s->b, p.row, 1, j, n, room[1]);
            y = mti_f32_place(s->y, p.row, 1, j, n, room[0]);
            mti_row_add(mti_row(a, 0), mti_row(b, 0), mti_row(y, 0), n);
            mti_f32_write(y, s->y, p.row, j);
        }
    }
}

#if MT_HAS_CUDA
extern "C++" {

template <int TYPE> struct mti_add_op { /* y = a + b */
    struct input {
        mti_fetched<TYPE> a, b;
    };
    mti_view a, b, y;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(a, row, col, n, in.a);
        mti_fetch<WIDE>(b, row, col, n, in.b);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float x[MTI_VECTOR];
        mti_values(in.a, x);
        mti_add_values(in.b, x);
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_add(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y) {
    mti_access how = mti_access_of(a, b, y);
    return mti_by_type(how.type, [&](auto type) {
        mti_add_op<type.value> op = {mti_view_of(a), mti_view_of(b), mti_view_of(y)};
        return mti_map_ahead<type.value>(ctx, "mt_add", op, how.wide, y.rows, y.cols);
    });
}

template <int FROM, int TO> struct mti_convert_op { /* y = x. Both types are MTI_ANY_TYPE, or none. */
    struct input {
        mti_fetched<FROM> x;
    };
    mti_view x, y;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(x, row, col, n, in.x);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float v[MTI_VECTOR];
        mti_values(in.x, v);
        mti_store<WIDE, TO>(y, row, col, n, v);
    }
};

static mt_status mti_cuda_convert(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mti_access from = mti_access_of(x), to = mti_access_of(y);
    int wide = from.wide && to.wide;
    return mti_by_type(from.type, [&](auto a) {
        return mti_by_type(to.type, [&](auto b) {
            const bool any = a.value == MTI_ANY_TYPE || b.value == MTI_ANY_TYPE;
            mti_convert_op<any ? MTI_ANY_TYPE : a.value, any ? MTI_ANY_TYPE : b.value> op = {mti_view_of(x),
                                                                                             mti_view_of(y)};
            return mti_map_ahead < any ? MTI_ANY_TYPE : a.value, 2 > (ctx, "mt_convert", op, wide, y.rows, y.cols);
        });
    });
}

} /* extern "C++" */
#endif

MT_API mt_status mt_convert(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS},
                     {"y", &y, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_convert", args, MTI_COUNT(args)));
    MT_TRY(mti_expect_same_or_apart(ctx, "mt_convert", x, y));
    MT_TRY(mti_begin(&op, ctx, "mt_convert", args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_convert(ctx, x, y),
                                x.dtype == y.dtype ? mti_cpu_copy(ctx, x, y) : mti_cpu_convert(ctx, x, y)));
}

MT_API mt_status mt_add(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y) {
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"a", &a, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS},
                     {"b", &b, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_add", args, MTI_COUNT(args)));
    MT_TRY(mti_begin(&op, ctx, "mt_add", args, MTI_COUNT(args)));
    mti_add s = {a, b, y};
    return mti_end(&op,
                   MTI_RUN(&op, mti_cuda_add(ctx, a, b, y), mti_cpu_stripes(ctx, y.rows, y.cols, mti_cpu_add, &s)));
}

/* ---- >>hash ------------------------------------------------------------------------------------------------------ */

MT_API uint64_t mt_hash_element(uint64_t element, uint32_t bits) { return mt_hash_word(element, bits); }

#if MT_HAS_CUDA
static mt_status mti_cuda_hash(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                               uint64_t *hash) {
    size_t mark = mt_arena_mark(ctx);
    void *memory = NULL;
    uint64_t sum = 0;
    if (x.rows == 0 || x.cols == 0) return MT_SUCCESS;
    MT_TRY(mt_arena_alloc(ctx, sizeof sum, &memory));
    MT_TRY(mt_cuda_zero(ctx, memory, sizeof sum));
    MT_TRY(mt_hash_add(ctx, x, first_row, first_col, global_cols, (uint64_t *)memory));
    MT_TRY(mt_cuda_fetch(ctx, &sum, memory, sizeof sum));
    mt_arena_release(ctx, mark);
    *hash += sum;
    return MT_SUCCESS;
}
#endif

MT_API mt_status mt_hash(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                         uint64_t *hash) {
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_hash", args, MTI_COUNT(args)));
    MT_TRY(mt_check_integer(ctx, "mt_hash", NULL, "first_row", first_row, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, "mt_hash", NULL, "first_col", first_col, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, "mt_hash", NULL, "global_cols", global_cols, 0, INT64_MAX));
    if (!hash) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash: hash is NULL");
    MT_TRY(mti_begin(&op, ctx, "mt_hash", args, MTI_COUNT(args)));
    return mti_end(&op,
                   MTI_CHOOSE(&op, mti_cuda_hash(ctx, x, first_row, first_col, global_cols, hash),
                              op.on_cpu ? mt_hash_add(ctx, x, first_row, first_col, global_cols, hash) : MT_SUCCESS));
}

/* ---- >>sum ------------------------------------------------------------------------------------------------------- */

static double mti_lanes_sum_double(double *lanes) {
    int half, l;
    for (half = MTI_PARTIALS / 2; half > 0; half /= 2)
        for (l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

static void mti_lanes_add(double *lanes, const float *x, int64_t n) {
    int64_t j;
    int l;
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] += (double)x[j + l];
    for (l = 0; j + l < n; l++) lanes[l] += (double)x[j + l];
}

static void mti_lanes_add_squares(double *lanes, const float *x, int64_t n) {
    int64_t j;
    int l;
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] += (double)x[j + l] * (double)x[j + l];
    for (l = 0; j + l < n; l++) lanes[l] += (double)x[j + l] * (double)x[j + l];
}

/* A sum is that of at most MTI_SUM_PARTS parts, added in order. A part is a number of stripes with about MTI_GRAIN
   elements or more. The parts depend on the shape only, so the bits do not depend on the number of threads. */
#define MTI_SUM_PARTS 64
typedef struct mti_sum_parts {
    mt_tensor x;
    int squares;
    int64_t stripes, each; /* of x, and of a part */
    double sums[MTI_SUM_PARTS];
} mti_sum_parts;

/* Adds n numbers of a row, or their squares, from `col` on. */
static void mti_lanes_add_row(double *lanes, const mti_sum_parts *s, int64_t row, int64_t col, int64_t n) {
    float room[MTI_BLOCK];
    int64_t j, count;
    for (j = 0; j < n; j += count) {
        const float *x = room;
        count = s->x.dtype == MT_F32 ? n : mt_min(MTI_BLOCK, n - j);
        if (s->x.dtype == MT_F32) x = mti_row(s->x, row) + col;
        else mti_cpu_load(s->x, row, col + j, count, room);
        if (s->squares) mti_lanes_add_squares(lanes, x, count);
        else mti_lanes_add(lanes, x, count);
    }
}

static double mti_sum_of_part(const mti_sum_parts *s, int64_t part) {
    double lanes[MTI_PARTIALS] = {0};
    int64_t i = part * s->each, last = mt_min(i + s->each, s->stripes), count;
    for (; i < last; i += count) {
        mti_stripe p = mti_stripes_of_row(s->x.cols, i, last, &count);
        mti_lanes_add_row(lanes, s, p.row, p.col, p.cols);
    }
    return mti_lanes_sum_double(lanes);
}

static void mti_cpu_sum_parts(void *data, int thread, int64_t first, int64_t last) {
    mti_sum_parts *s = (mti_sum_parts *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) s->sums[i] = mti_sum_of_part(s, i);
}

static void mti_cpu_sum(mt_context *ctx, mt_tensor x, int squares, mt_tensor out) {
    mti_sum_parts s;
    double sum = 0.0;
    int64_t i, parts, least = MTI_GRAIN / mt_max(mt_min(MTI_STRIPE_COLS, x.cols), 1) + 1;
    s.x = x;
    s.squares = squares;
    s.stripes = x.rows * mti_stripes(x.cols);
    s.each = mt_max(least, (s.stripes + MTI_SUM_PARTS - 1) / MTI_SUM_PARTS);
    parts = (s.stripes + s.each - 1) / s.each;
    mt_parallel_for(ctx, parts, 1, mti_cpu_sum_parts, &s);
    for (i = 0; i < parts; i++) sum += s.sums[i];
    *(float *)out.data = (float)((double)*(float *)out.data + sum);
}

#if MT_HAS_CUDA
extern "C++" {

#define MTI_SUM_BLOCKS 1024 /* maximum */

/* Returns to thread 0 the sum of x over the block, added as a binary tree. shared has one double for each thread. Each
   barrier separates writing a level of the tree from reading it. */
static __device__ __forceinline__ double mti_block_sum_double(double x, double *shared) {
    shared[threadIdx.x] = x;
    __syncthreads();
    for (int half = (int)blockDim.x / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    return shared[0];
}

/* The number of blocks for a sum. Depends on the shape only, so that every GPU computes the same bits. */
static int64_t mti_sum_blocks(int64_t rows, int64_t cols) {
    int64_t vectors = rows * ((cols + MTI_VECTOR - 1) / MTI_VECTOR);
    return mt_min(MTI_SUM_BLOCKS, (vectors + 255) / 256);
}

/* Returns the sum of this thread's vectors, when `blocks` blocks of 256 threads sum x. A thread owns every (grid
   size)-th vector. It adds the eight elements of a vector pairwise in f32, then adds the sums of vectors in double: a
   double addition for each element would take longer than loading the element. The bits depend on the shape only,
   because the owner of a vector depends on the shape only. __fmul_rn keeps the compiler from contracting the square and
   an addition into one FMA. On sm_90: 11 instructions for an f32 element, which moves 4 bytes (budget: 27); 32
   registers. */
template <bool WIDE>
static __device__ __forceinline__ double mti_thread_sum(const mti_view &x, int64_t rows, int64_t cols, int squares,
                                                        int64_t block, int64_t blocks) {
    int64_t per_row = (cols + MTI_VECTOR - 1) / MTI_VECTOR;
    double sum = 0.0;
    for (int64_t i = block * 256 + threadIdx.x; i < rows * per_row; i += blocks * 256) {
        int64_t row = mt_divide(i, per_row), col = (i - row * per_row) * MTI_VECTOR;
        float c[MTI_VECTOR];
        mti_load<WIDE>(x, row, col, mti_vector_size(cols, col), c);
        for (int j = 0; j < MTI_VECTOR; j++) c[j] = squares ? __fmul_rn(c[j], c[j]) : c[j];
        sum += (double)(((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7])));
    }
    return sum;
}

/* partial[block] = the sum of the vectors of the block. shared holds the sums of the threads. mti_block_sum_double has
   the barriers. */
template <bool WIDE>
static __global__ void __launch_bounds__(256)
    mti_sum_kernel(mti_view x, int64_t rows, int64_t cols, int squares, double *partial) {
    MT_SHARED(double, shared, 256);
    double sum = mti_thread_sum<WIDE>(x, rows, cols, squares, blockIdx.x, gridDim.x);
    sum = mti_block_sum_double(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/* out [1, 1] += the sum of the partial sums. There is one block, and each thread owns every 256th partial sum. shared
   holds the sums of the threads. mti_block_sum_double has the barriers. */
static __global__ void __launch_bounds__(256) mti_sum_end_kernel(const double *partial, int blocks, mti_view out) {
    MT_SHARED(double, shared, 256);
    double sum = 0.0;
    for (int i = (int)threadIdx.x; i < blocks; i += 256) sum += partial[i];
    sum = mti_block_sum_double(sum, shared);
    if (threadIdx.x == 0) mti_put(out, 0, 0, (float)((double)mti_get(out, 0, 0) + sum));
}

static mt_status mti_cuda_sum(mt_context *ctx, mt_tensor x, int squares, mt_tensor out) {
    size_t mark = mt_arena_mark(ctx);
    unsigned blocks = (unsigned)mti_sum_blocks(x.rows, x.cols);
    void *partial = NULL;
    if (blocks == 0) return MT_SUCCESS;
    MT_TRY(mt_arena_alloc(ctx, MTI_SUM_BLOCKS * sizeof(double), &partial));
    MT_TRY(mt_cuda_enter(ctx));
    if (mti_is_wide(x))
        MT_LAUNCH_KERNEL(mti_sum_kernel<true>, blocks, 256, 0, mt_context_stream(ctx), mti_view_of(x), x.rows, x.cols,
                         squares, (double *)partial);
    else
        MT_LAUNCH_KERNEL(mti_sum_kernel<false>, blocks, 256, 0, mt_context_stream(ctx), mti_view_of(x), x.rows, x.cols,
                         squares, (double *)partial);
    MT_TRY(mt_cuda_launched(ctx, "mt_sum"));
    MT_LAUNCH_KERNEL(mti_sum_end_kernel, 1, 256, 0, mt_context_stream(ctx), (const double *)partial, (int)blocks,
                     mti_view_of(out));
    mt_arena_release(ctx, mark);
    return mt_cuda_launched(ctx, "mt_sum");
}

} /* extern "C++" */
#endif

static mt_status mti_sum(mt_context *ctx, const char *where, mt_tensor x, int squares, mt_tensor out) {
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"out", &out, 1, 1, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_sum(ctx, x, squares, out), mti_cpu_sum(ctx, x, squares, out)));
}

MT_API mt_status mt_sum(mt_context *ctx, mt_tensor x, mt_tensor out) { return mti_sum(ctx, "mt_sum", x, 0, out); }

MT_API mt_status mt_sum_of_squares(mt_context *ctx, mt_tensor x, mt_tensor out) {
    return mti_sum(ctx, "mt_sum_of_squares", x, 1, out);
}

/* On the meta device, where x may have any number of rows, the additions are one entry. */
static void mti_trace_tree_sum(mt_context *ctx, mt_tensor x) {
    mt_trace_entry e;
    memset(&e, 0, sizeof e);
    e.name = "mt_tree_sum";
    e.bytes = 12.0 * (double)(x.rows - 1) * (double)x.cols; /* each addition reads two rows and writes one */
    mt_trace_add(ctx, &e);
}

/* Row 0 is the sum of all rows. The others are no longer what they were. */
static mt_status mti_tree_sum_rule(mt_context *ctx, mt_tensor x) {
    mt_tensor sum = mt_tensor_rows(x, 0, 1);
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_F32, MT_ARG_IN},
                     {"sum", &sum, 1, x.cols, MT_ARG_F32, MT_ARG_OUT}};
    if (x.rows == 1) return MT_SUCCESS;
    MT_TRY(mti_apply_rule_of(ctx, "mt_tree_sum", args, MTI_COUNT(args)));
    return mt_declare(ctx, NULL, mt_tensor_rows(x, 1, x.rows - 1), MT_UNDECLARED);
}

MT_API mt_status mt_tree_sum(mt_context *ctx, mt_tensor x) {
    int64_t step, i;
    MT_TRY(mt_tensor_check(ctx, "mt_tree_sum", "x", x, MT_ARG_F32, x.rows, x.cols));
    if (mti_is_empty(x)) return MT_SUCCESS;
    if (!mt_context_has_data(ctx)) {
        mti_trace_tree_sum(ctx, x);
        return mti_tree_sum_rule(ctx, x);
    }
    for (step = 1; step < x.rows; step *= 2)
        for (i = 0; i + step < x.rows; i += 2 * step)
            MT_TRY(mt_add(ctx, mt_tensor_rows(x, i, 1), mt_tensor_rows(x, i + step, 1), mt_tensor_rows(x, i, 1)));
    return mti_tree_sum_rule(ctx, x);
}

/* ---- >>gemm ------------------------------------------------------------------------------------------------------ */

/* c [m, n] = alpha op(a) op(b) + beta c. All three matrices are row-major with leading dimensions. */
typedef struct mti_matmul {
    int trans_a, trans_b;
    mt_dtype a_type, b_type, c_type;
    int64_t m, n, k;
    float alpha, beta;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    int few; /* see mti_gemm_is_few */
    /* The threads of a context share a product: each computes `each` rows of c, or columns with by_cols. The last one
       may have fewer. See mti_gemm_split. */
    int by_cols;
    int64_t each;
    void *plan, *last_plan; /* of a part with `each` rows or columns, and of a smaller last part; see mti_native_plan */
    const mti_packed *packed; /* of b; NULL: b is read */
    int64_t first_col;        /* of a part: its first column in the packed copy */
    size_t packed_step;       /* oneDNN: the bytes from a column of the copy to that which is `each` columns on */
} mti_matmul;

#define MTI_TRANSPOSE_WORDS "MT_NO_TRANS MT_TRANS"

#define MTI_FEW_MOST 8        /* up to here mti_few_rows is faster than CBLAS, the built-in loop and dnnl_sgemm */
#define MTI_FEW_MOST_NATIVE 4 /* up to here it is faster than oneDNN with 16-bit operands as they are */

/* Whether mti_few_rows computes a product. The answer depends on sizes and options, but not on types, so that widened
   operands give the same bits. */
static int mti_gemm_is_few(const mti_matmul *g, int64_t most) {
    return MTI_HAS_FEW && !g->trans_a && g->trans_b && g->m > 0 && g->m <= most && g->n > 0 && g->k >= MTI_FEW_LEAST &&
           g->alpha != 0.0f;
}

#define MTI_GEMM_COLS 64    /* threads that share columns get multiples of so many */
#define MTI_PACKED_ROWS 128 /* oneDNN chooses the layout of a packed copy for products with so many rows */
#define MTI_PACKED_MOST 256 /* up to here an f32 product with a packed copy is faster than dnnl_sgemm */

/* Checks what the argument table of mt_gemm cannot express. */
static mt_status mti_expect_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, mt_tensor a, mt_tensor b,
                                 mt_tensor c, const mti_matmul *g) {
    int64_t inner_b = trans_b ? b.cols : b.rows;
    MT_TRY(mt_check_enum(ctx, "mt_gemm", NULL, "trans_a", (int)trans_a, MTI_TRANSPOSE_WORDS));
    MT_TRY(mt_check_enum(ctx, "mt_gemm", NULL, "trans_b", (int)trans_b, MTI_TRANSPOSE_WORDS));
    if (g->k != inner_b)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "mt_gemm: a is [%lld, %lld]%s, b is [%lld, %lld]%s: inner sizes %lld and %lld "
                       "differ",
                       (long long)a.rows, (long long)a.cols, trans_a ? " transposed" : "", (long long)b.rows,
                       (long long)b.cols, trans_b ? " transposed" : "", (long long)g->k, (long long)inner_b);
    return mt_tensor_check(ctx, "mt_gemm", "c", c, MT_ARG_FLOAT, g->m, g->n);
}

/* CBLAS takes sizes as int. The same limit holds for every library, so that a program works with each of them. */
static mt_status mti_expect_gemm_sizes(mt_context *ctx, const mti_matmul *g, mt_tensor a, mt_tensor b, mt_tensor c) {
    int64_t size = mt_max(mt_max(g->m, g->n), g->k),
            ld = mt_max(mt_max(mt_tensor_ld(a), mt_tensor_ld(b)), mt_tensor_ld(c));
    if (mt_max(size, ld) > INT_MAX)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                       "mt_gemm: m %lld, n %lld, k %lld, largest ld %lld: more than %d is not "
                       "supported",
                       (long long)g->m, (long long)g->n, (long long)g->k, (long long)ld, INT_MAX);
    return MT_SUCCESS;
}

/* The address of an element of x. A matrix without elements may have no address. */
static const void *mti_element(const void *x, int64_t element, mt_dtype type) {
    return x ? (const unsigned char *)x + (size_t)element * mt_dtype_size(type) : NULL;
}

/* The size that threads share: rows of c, or columns with by_cols. */
static int64_t mti_gemm_shared_size(const mti_matmul *g) { return g->by_cols ? g->n : g->m; }

/* Rows [first, last) of c as a product of their own, or columns with by_cols. */
static mti_matmul mti_gemm_part(const mti_matmul *g, int64_t first, int64_t last) {
    mti_matmul p = *g;
    int64_t a = g->by_cols ? 0 : first * (g->trans_a ? 1 : g->lda);
    int64_t b = g->by_cols ? first * (g->trans_b ? g->ldb : 1) : 0, c = first * (g->by_cols ? 1 : g->ldc);
    *(g->by_cols ? &p.n : &p.m) = last - first;
    p.a = mti_element(g->a, a, g->a_type);
    p.b = mti_element(g->b, b, g->b_type);
    p.c = (void *)(uintptr_t)mti_element(g->c, c, g->c_type);
    p.first_col = g->by_cols ? first : 0;
    if (last - first != g->each) p.plan = g->last_plan;
    return p;
}

#if !defined(MT_USE_CBLAS)
/* Returns the packed copy that a product can use, or NULL. */
static const mti_packed *mti_packed_find(mt_context *ctx, const mti_matmul *g) {
    const mti_kernels *k = (const mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    const mti_packed *p = k ? k->packed : NULL;
    if (g->trans_a || !g->trans_b || g->alpha != 1.0f || g->beta != 0.0f) return NULL;
    while (p && (p->weight.data != g->b || p->weight.dtype != g->b_type || p->weight.rows != g->n ||
                 p->weight.cols != g->k || mt_tensor_ld(p->weight) != g->ldb))
        p = p->next;
    return p;
}
#endif

/* c = beta c, in f32. This is the result if k or alpha is 0. */
static void mti_gemm_scale(const mti_matmul *g) {
    float *c = (float *)g->c;
    int64_t i;
    for (i = 0; i < g->m; i++, c += g->ldc) {
        if (g->beta == 0.0f) mti_row_fill(c, 0.0f, g->n);
        else mti_row_scale(c, g->beta, g->n);
    }
}

#if defined(MT_USE_ONEDNN) || defined(MT_USE_CBLAS)
/* The threads of a context share a product, so the library computes each part on one thread. A library that runs on
   OpenMP has one thread count per calling thread. mti_omp_begin sets it to 1 and returns the thread count to restore,
   or 0. The references to OpenMP are weak and have private names, so that this code compiles and links without it. */
#if defined(__GNUC__)
static void mti_omp_set_num_threads(int) __attribute__((weakref("omp_set_num_threads")));
static int mti_omp_get_max_threads(void) __attribute__((weakref("omp_get_max_threads")));

static int mti_omp_begin(void) {
    int before;
    if (!mti_omp_set_num_threads || !mti_omp_get_max_threads) return 0;
    before = mti_omp_get_max_threads();
    if (before == 1) return 0;
    mti_omp_set_num_threads(1);
    return before;
}
static void mti_omp_end(int before) {
    if (before > 0) mti_omp_set_num_threads(before);
}
#else
static int mti_omp_begin(void) { return 0; }
static void mti_omp_end(int before) { (void)before; }
#endif
#endif

#if defined(MT_USE_ONEDNN)
#define MTI_TEXT(x) #x
#define MTI_VERSION(major, minor, patch) "oneDNN " MTI_TEXT(major) "." MTI_TEXT(minor) "." MTI_TEXT(patch)

MT_API const char *mt_gemm_library(void) {
    return MTI_VERSION(DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH);
}

static mt_status mti_dnnl_check(mt_context *ctx, const mti_matmul *g, const char *call, dnnl_status_t status) {
    if (status == dnnl_success) return MT_SUCCESS;
    return mt_fail(ctx, status == dnnl_out_of_memory ? MT_ERR_MEMORY : MT_ERR_SYSTEM,
                   "mt_gemm: %s of m %lld, n %lld, k %lld failed with status %d", call, (long long)g->m,
                   (long long)g->n, (long long)g->k, (int)status);
}

/* The key of a plan: what distinguishes products for oneDNN. */
typedef struct mti_dnnl_key {
    int64_t m, n, k, lda, ldb, ldc;
    int64_t packed; /* the columns of the whole packed copy, of which the product reads n; 0: b is read */
    int trans_a, trans_b, type, c_type;
    float beta;
} mti_dnnl_key;

/* A product of 16-bit operands or with a packed copy in oneDNN. */
typedef struct mti_dnnl_plan {
    mti_dnnl_key key;
    uint64_t used;              /* the value of mti_dnnl.clock at the last use */
    dnnl_primitive_desc_t desc; /* NULL: oneDNN is not fast in this type, so the operands are widened */
    dnnl_primitive_t primitive; /* NULL on a meta context, which does not need it */
    size_t bytes;               /* of scratch memory */
} mti_dnnl_plan;

#define MTI_DNNL_PLANS 64 /* maximum number of plans of a context */

/* The oneDNN state of a context, created by its first product with a plan. */
typedef struct mti_dnnl {
    dnnl_engine_t engine;
    uint64_t clock; /* counts the uses of plans */
    int count;
    mti_dnnl_plan plans[MTI_DNNL_PLANS];
} mti_dnnl;

static void mti_dnnl_forget(mti_dnnl_plan *p) {
    if (p->primitive) dnnl_primitive_destroy(p->primitive);
    if (p->desc) dnnl_primitive_desc_destroy(p->desc);
    memset(p, 0, sizeof *p);
}

static void mti_dnnl_destroy(mt_context *ctx, void *gemm) {
    mti_dnnl *d = (mti_dnnl *)gemm;
    int i;
    (void)ctx;
    for (i = 0; i < d->count; i++) mti_dnnl_forget(&d->plans[i]);
    if (d->engine) dnnl_engine_destroy(d->engine);
    mt_host_free(d);
}

/* Returns the oneDNN state of the context. Creates it on the first call. */
static mt_status mti_dnnl_open(mt_context *ctx, const mti_matmul *g, mti_dnnl **out) {
    mti_kernels *k;
    mti_dnnl *d;
    MT_TRY(mti_kernels_open(ctx, &k));
    if (!k->gemm) {
        k->gemm = mt_host_alloc(sizeof *d);
        if (!k->gemm) return mt_fail(ctx, MT_ERR_MEMORY, "mt_gemm: no memory for %zu bytes", sizeof *d);
        k->gemm_destroy = mti_dnnl_destroy;
    }
    *out = d = (mti_dnnl *)k->gemm;
    if (d->engine) return MT_SUCCESS;
    return mti_dnnl_check(ctx, g, "dnnl_engine_create", dnnl_engine_create(&d->engine, dnnl_cpu, 0));
}

static dnnl_data_type_t mti_dnnl_type(int dtype) {
    return dtype == MT_F32 ? dnnl_f32 : dtype == MT_BF16 ? dnnl_bf16 : dnnl_f16;
}

#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t mti_dnnl_memory; /* the layout of a matrix */
#else
typedef const dnnl_memory_desc_t *mti_dnnl_memory;
#endif

/* A matrix of a product. */
typedef struct mti_dnnl_view {
    dnnl_dims_t dims, strides;
    dnnl_data_type_t type;
    int any;               /* 1: oneDNN chooses the layout; strides is not used */
    mti_dnnl_memory whole; /* NULL, or the matrix is some columns of another one, which has this layout */
    dnnl_dims_t at;        /* with `whole`: the first element */
} mti_dnnl_view;

/* op(x) [rows, cols] in the memory of a row-major x */
static mti_dnnl_view mti_dnnl_view_of(int dtype, int64_t rows, int64_t cols, int trans, int64_t ld) {
    mti_dnnl_view v;
    memset(&v, 0, sizeof v);
    v.dims[0] = rows, v.dims[1] = cols;
    v.strides[0] = trans ? 1 : ld, v.strides[1] = trans ? ld : 1;
    v.type = mti_dnnl_type(dtype);
    return v;
}

/* The C API of oneDNN changed in version 3.
   mti_dnnl_open_memory:  *out = the layout of a view. The address of its first element is not in it.
   mti_dnnl_is_blocked:   whether a layout consists of blocks, other than that of a row-major or column-major matrix
   mti_dnnl_offset:       the elements from the beginning of a layout to the view v of it; -1: it has no such view
   mti_dnnl_describe:     *out = the primitive descriptor of the product of three views: a, b and c
   mti_dnnl_describe_reorder: *out = that of a copy of a view into a layout */
#if DNNL_VERSION_MAJOR >= 3
static dnnl_status_t mti_dnnl_add_sum(dnnl_post_ops_t ops, float beta) {
    return dnnl_post_ops_append_sum(ops, beta, 0, dnnl_data_type_undef);
}

static int mti_dnnl_is_blocked(mti_dnnl_memory m) {
    int blocks = 0;
    return dnnl_memory_desc_query(m, dnnl_query_inner_nblks_s32, &blocks) == dnnl_success && blocks > 0;
}

static int64_t mti_dnnl_offset(const mti_dnnl_view *v) {
    dnnl_memory_desc_t m = NULL;
    int64_t at = -1;
    if (dnnl_memory_desc_create_submemory(&m, v->whole, v->dims, v->at) != dnnl_success) return -1;
    if (dnnl_memory_desc_query(m, dnnl_query_submemory_offset_s64, &at) != dnnl_success) at = -1;
    dnnl_memory_desc_destroy(m);
    return at;
}

static dnnl_status_t mti_dnnl_open_memory(const mti_dnnl_view *v, dnnl_memory_desc_t *out) {
    if (v->any) return dnnl_memory_desc_create_with_tag(out, 2, v->dims, v->type, dnnl_format_tag_any);
    if (!v->whole) return dnnl_memory_desc_create_with_strides(out, 2, v->dims, v->type, v->strides);
    if (mti_dnnl_offset(v) != 0) return dnnl_unimplemented; /* the layout would have the address in it */
    return dnnl_memory_desc_create_submemory(out, v->whole, v->dims, v->at);
}

static dnnl_status_t mti_dnnl_describe(mti_dnnl *d, const mti_dnnl_view *v, dnnl_primitive_attr_t attr,
                                       dnnl_primitive_desc_t *out) {
    dnnl_memory_desc_t memory[3] = {NULL, NULL, NULL};
    dnnl_status_t status = dnnl_success;
    int i;
    for (i = 0; i < 3 && status == dnnl_success; i++) status = mti_dnnl_open_memory(&v[i], &memory[i]);
    if (status == dnnl_success)
        status = dnnl_matmul_primitive_desc_create(out, d->engine, memory[0], memory[1], NULL, memory[2], attr);
    for (i = 0; i < 3; i++)
        if (memory[i]) dnnl_memory_desc_destroy(memory[i]);
    return status;
}

static dnnl_status_t mti_dnnl_describe_reorder(mti_dnnl *d, const mti_dnnl_view *from, mti_dnnl_memory to,
                                               dnnl_primitive_desc_t *out) {
    dnnl_memory_desc_t memory = NULL;
    dnnl_status_t status = mti_dnnl_open_memory(from, &memory);
    if (status == dnnl_success)
        status = dnnl_reorder_primitive_desc_create(out, memory, d->engine, to, d->engine, NULL);
    if (memory) dnnl_memory_desc_destroy(memory);
    return status;
}
#else
static dnnl_status_t mti_dnnl_add_sum(dnnl_post_ops_t ops, float beta) { return dnnl_post_ops_append_sum(ops, beta); }

static int mti_dnnl_is_blocked(mti_dnnl_memory m) { return m->format_desc.blocking.inner_nblks > 0; }

static int64_t mti_dnnl_offset(const mti_dnnl_view *v) {
    dnnl_memory_desc_t m;
    return dnnl_memory_desc_init_submemory(&m, v->whole, v->dims, v->at) == dnnl_success ? m.offset0 : -1;
}

static dnnl_status_t mti_dnnl_open_memory(const mti_dnnl_view *v, dnnl_memory_desc_t *out) {
    dnnl_status_t status;
    if (v->any) return dnnl_memory_desc_init_by_tag(out, 2, v->dims, v->type, dnnl_format_tag_any);
    if (!v->whole) return dnnl_memory_desc_init_by_strides(out, 2, v->dims, v->type, v->strides);
    status = dnnl_memory_desc_init_submemory(out, v->whole, v->dims, v->at);
    if (status == dnnl_success) out->offset0 = 0;
    return status;
}

static dnnl_status_t mti_dnnl_describe(mti_dnnl *d, const mti_dnnl_view *v, dnnl_primitive_attr_t attr,
                                       dnnl_primitive_desc_t *out) {
    dnnl_memory_desc_t memory[3];
    dnnl_matmul_desc_t matmul;
    dnnl_status_t status = dnnl_success;
    int i;
    for (i = 0; i < 3 && status == dnnl_success; i++) status = mti_dnnl_open_memory(&v[i], &memory[i]);
    if (status == dnnl_success) status = dnnl_matmul_desc_init(&matmul, &memory[0], &memory[1], NULL, &memory[2]);
    return status == dnnl_success ? dnnl_primitive_desc_create(out, &matmul, attr, d->engine, NULL) : status;
}

static dnnl_status_t mti_dnnl_describe_reorder(mti_dnnl *d, const mti_dnnl_view *from, mti_dnnl_memory to,
                                               dnnl_primitive_desc_t *out) {
    dnnl_memory_desc_t memory;
    dnnl_status_t status = mti_dnnl_open_memory(from, &memory);
    if (status != dnnl_success) return status;
    return dnnl_reorder_primitive_desc_create(out, &memory, d->engine, to, d->engine, NULL);
}
#endif

/* The attributes of a plan: the caller provides the scratch memory, and c = a b + beta c. */
static dnnl_status_t mti_dnnl_attributes(float beta, dnnl_primitive_attr_t *out) {
    dnnl_post_ops_t ops = NULL;
    dnnl_status_t status = dnnl_primitive_attr_create(out);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_scratchpad_mode(*out, dnnl_scratchpad_mode_user);
    if (beta == 0.0f || status != dnnl_success) return status;
    status = dnnl_post_ops_create(&ops);
    if (status == dnnl_success) status = mti_dnnl_add_sum(ops, beta);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_post_ops(*out, ops);
    if (ops) dnnl_post_ops_destroy(ops);
    return status;
}

/* The n columns of a packed copy that a part of a product reads. The layout of a part whose columns are whole blocks
   does not depend on where it begins. The last part may end within a block. */
static mti_dnnl_view mti_dnnl_packed_view(const mti_packed *p, int64_t n) {
    mti_dnnl_view v = mti_dnnl_view_of((int)p->weight.dtype, p->weight.cols, n, 0, 0);
    v.whole = dnnl_primitive_desc_query_md((dnnl_primitive_desc_t)p->layout, dnnl_query_weights_md, 0);
    v.at[1] = n % MTI_GEMM_COLS == 0 ? 0 : p->weight.rows - n;
    return v;
}

/* Whether a descriptor multiplies 16-bit operands with instructions for their type. Where the processor has none,
   oneDNN has reference loops ("ref") and a GEMM that emulates them ("gemm:jit"), which are slower than f32. With the
   instructions, that GEMM is fast: oneDNN 2 chooses it for a leading dimension that exceeds the number of columns. */
static int mti_dnnl_is_fast(dnnl_primitive_desc_t desc) {
    int bf16 = (int)dnnl_cpu_isa_avx512_core_bf16, has = (int)dnnl_get_effective_cpu_isa();
    const char *name = NULL;
    return dnnl_primitive_desc_query(desc, dnnl_query_impl_info_str, 0, (void *)&name) == dnnl_success && name &&
           !strstr(name, "ref") && ((has & bf16) == bf16 || !strstr(name, "gemm:jit"));
}

/* Fills the plan, whose key is set. */
static mt_status mti_dnnl_plan_make(mt_context *ctx, mti_dnnl *d, const mti_matmul *g, mti_dnnl_plan *p) {
    const mti_dnnl_key *q = &p->key;
    dnnl_primitive_attr_t attr = NULL;
    mti_dnnl_view v[3];
    dnnl_status_t status = mti_dnnl_attributes(q->beta, &attr);
    v[0] = mti_dnnl_view_of(q->type, q->m, q->k, q->trans_a, q->lda);
    v[1] =
        g->packed ? mti_dnnl_packed_view(g->packed, q->n) : mti_dnnl_view_of(q->type, q->k, q->n, q->trans_b, q->ldb);
    v[2] = mti_dnnl_view_of(q->c_type, q->m, q->n, 0, q->ldc);
    if (status == dnnl_success) status = mti_dnnl_describe(d, v, attr, &p->desc);
    if (attr) dnnl_primitive_attr_destroy(attr);
    if (status == dnnl_out_of_memory) return mti_dnnl_check(ctx, g, "dnnl_primitive_desc_create", status);
    if (status != dnnl_success || !mti_dnnl_is_fast(p->desc)) {
        if (p->desc) dnnl_primitive_desc_destroy(p->desc);
        p->desc = NULL;
        return MT_SUCCESS;
    }
    p->bytes = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(p->desc, dnnl_query_scratchpad_md, 0));
    if (!mt_context_has_data(ctx)) return MT_SUCCESS;
    return mti_dnnl_check(ctx, g, "dnnl_primitive_create", dnnl_primitive_create(&p->primitive, p->desc));
}

/* Returns a place for one more plan. If all places are taken, evicts the least recently used plan. */
static mti_dnnl_plan *mti_dnnl_place(mti_dnnl *d) {
    mti_dnnl_plan *oldest = &d->plans[0];
    int i;
    if (d->count < MTI_DNNL_PLANS) return &d->plans[d->count++];
    for (i = 1; i < MTI_DNNL_PLANS; i++)
        if (d->plans[i].used < oldest->used) oldest = &d->plans[i];
    mti_dnnl_forget(oldest);
    return oldest;
}

static void mti_dnnl_key_of(const mti_matmul *g, mti_dnnl_key *key) {
    memset(key, 0, sizeof *key);
    key->m = g->m, key->n = g->n, key->k = g->k;
    key->lda = g->lda, key->ldb = g->ldb, key->ldc = g->ldc;
    key->trans_a = g->trans_a, key->trans_b = g->trans_b;
    key->type = (int)g->a_type, key->c_type = (int)g->c_type;
    key->beta = g->beta;
    if (!g->packed) return;
    key->packed = g->packed->weight.rows;
    key->ldc = g->n; /* mti_dnnl_run_packed */
}

/* *out = the plan of a product, which is created if it does not exist yet. */
static mt_status mti_dnnl_plan_of(mt_context *ctx, mti_dnnl *d, const mti_matmul *g, mti_dnnl_plan **out) {
    mti_dnnl_plan fresh;
    mt_status status;
    int i;
    memset(&fresh, 0, sizeof fresh);
    mti_dnnl_key_of(g, &fresh.key);
    fresh.used = ++d->clock;
    for (i = 0; i < d->count; i++)
        if (memcmp(&d->plans[i].key, &fresh.key, sizeof fresh.key) == 0) {
            *out = &d->plans[i];
            (*out)->used = fresh.used;
            return MT_SUCCESS;
        }
    status = mti_dnnl_plan_make(ctx, d, g, &fresh);
    if (status != MT_SUCCESS) {
        mti_dnnl_forget(&fresh);
        return status;
    }
    *out = mti_dnnl_place(d);
    **out = fresh;
    return MT_SUCCESS;
}

/* *out = the plan of the part of g with rows or columns [0, last), or NULL if there is none. */
static mt_status mti_native_part(mt_context *ctx, mti_dnnl *d, const mti_matmul *g, int64_t last, void **out) {
    mti_matmul part = mti_gemm_part(g, 0, last);
    mti_dnnl_plan *p = NULL;
    MT_TRY(mti_dnnl_plan_of(ctx, d, &part, &p));
    *out = p->desc ? p : NULL;
    return MT_SUCCESS;
}

/* Sets the plans of oneDNN for the parts of a product. They are NULL if one of the parts has none. */
static mt_status mti_native_parts(mt_context *ctx, mti_matmul *g) {
    int64_t rest = mti_gemm_shared_size(g) % g->each;
    mti_dnnl *d = NULL;
    mt_status status;
    int before;
    MT_TRY(mti_dnnl_open(ctx, g, &d));
    before = mti_omp_begin();
    status = mti_native_part(ctx, d, g, g->each, &g->plan);
    g->last_plan = g->plan;
    if (status == MT_SUCCESS && rest) status = mti_native_part(ctx, d, g, rest, &g->last_plan);
    mti_omp_end(before);
    if (!g->plan || !g->last_plan) g->plan = g->last_plan = NULL;
    return status;
}

/* Sets the plans for a product with a packed copy, if there is one. Threads that share the columns read columns of the
   whole copy. */
static mt_status mti_packed_plan(mt_context *ctx, mti_matmul *g) {
    int64_t step = 0;
    if (g->b_type == MT_F32 && (g->m > MTI_PACKED_MOST || mti_gemm_is_few(g, MTI_FEW_MOST))) return MT_SUCCESS;
    g->packed = mti_packed_find(ctx, g);
    if (!g->packed) return MT_SUCCESS;
    if (g->by_cols && g->each < g->n) {
        mti_dnnl_view v = mti_dnnl_packed_view(g->packed, g->n - g->each);
        v.at[1] = g->each;
        step = mti_dnnl_offset(&v);
        g->packed_step = (size_t)mt_max(step, 0) * mt_dtype_size(g->b_type);
    }
    if (step >= 0) MT_TRY(mti_native_parts(ctx, g));
    if (!g->plan) g->packed = NULL;
    return MT_SUCCESS;
}

/* Sets the plans of oneDNN for a product with a packed copy, or of 16-bit operands as they are. Without plans, the
   operands are widened. */
static mt_status mti_native_plan(mt_context *ctx, mti_matmul *g) {
    if (g->a_type != g->b_type || (g->c_type != g->a_type && g->c_type != MT_F32) || g->alpha != 1.0f || g->m == 0 ||
        g->n == 0 || g->k == 0)
        return MT_SUCCESS;
    MT_TRY(mti_packed_plan(ctx, g));
    return g->plan || g->a_type == MT_F32 ? MT_SUCCESS : mti_native_parts(ctx, g);
}

/* Copies the elements of a weight into its layout. */
static dnnl_status_t mti_dnnl_reorder(mti_dnnl *d, const mti_dnnl_view *from, const mti_packed *p) {
    mti_dnnl_memory layout = dnnl_primitive_desc_query_md((dnnl_primitive_desc_t)p->layout, dnnl_query_weights_md, 0);
    dnnl_primitive_desc_t desc = NULL;
    dnnl_primitive_t reorder = NULL;
    dnnl_stream_t stream = NULL;
    dnnl_exec_arg_t args[2];
    dnnl_status_t status;
    int i;
    args[0].arg = DNNL_ARG_FROM, args[1].arg = DNNL_ARG_TO;
    args[0].memory = args[1].memory = NULL;
    status = mti_dnnl_describe_reorder(d, from, layout, &desc);
    if (status == dnnl_success) status = dnnl_primitive_create(&reorder, desc);
    if (status == dnnl_success) status = dnnl_stream_create(&stream, d->engine, dnnl_stream_default_flags);
    if (status == dnnl_success)
        status = dnnl_memory_create(&args[0].memory, dnnl_primitive_desc_query_md(desc, dnnl_query_src_md, 0),
                                    d->engine, p->weight.data);
    if (status == dnnl_success) status = dnnl_memory_create(&args[1].memory, layout, d->engine, p->data);
    if (status == dnnl_success) status = dnnl_primitive_execute(reorder, stream, 2, args);
    if (status == dnnl_success) status = dnnl_stream_wait(stream);
    for (i = 0; i < 2; i++)
        if (args[i].memory) dnnl_memory_destroy(args[i].memory);
    if (stream) dnnl_stream_destroy(stream);
    if (reorder) dnnl_primitive_destroy(reorder);
    if (desc) dnnl_primitive_desc_destroy(desc);
    return status;
}

/* Sets the layout of a packed copy, and its size: 0 if oneDNN has no fast product with a layout of its own. */
static mt_status mti_packed_layout(mt_context *ctx, mti_dnnl *d, const mti_matmul *g, mti_packed *p) {
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t desc = NULL;
    mti_dnnl_view v[3];
    mti_dnnl_memory layout;
    dnnl_status_t status = mti_dnnl_attributes(0.0f, &attr);
    v[0] = mti_dnnl_view_of((int)g->b_type, g->m, g->k, 0, g->k);
    v[1] = mti_dnnl_view_of((int)g->b_type, g->k, g->n, 0, g->n);
    v[2] = mti_dnnl_view_of((int)g->b_type, g->m, g->n, 0, g->n);
    v[1].any = 1;
    if (status == dnnl_success) status = mti_dnnl_describe(d, v, attr, &desc);
    if (attr) dnnl_primitive_attr_destroy(attr);
    p->layout = desc;
    if (status == dnnl_out_of_memory) return mti_dnnl_check(ctx, g, "dnnl_primitive_desc_create", status);
    if (status != dnnl_success || !mti_dnnl_is_fast(desc)) return MT_SUCCESS;
    layout = dnnl_primitive_desc_query_md(desc, dnnl_query_weights_md, 0);
    p->bytes = mti_dnnl_is_blocked(layout) ? dnnl_memory_desc_get_size(layout) : 0;
    return MT_SUCCESS;
}

/* Makes the packed copy of p->weight. p->bytes is 0 afterwards if it needs none. The layout is that for a product with
   MTI_PACKED_ROWS rows; products with another number of rows use it, too. */
static mt_status mti_packed_make(mt_context *ctx, mti_packed *p) {
    mt_tensor w = p->weight;
    mti_dnnl_view from = mti_dnnl_view_of((int)w.dtype, w.cols, w.rows, 1, mt_tensor_ld(w));
    mti_dnnl *d = NULL;
    mti_matmul g;
    mt_status status;
    int before;
    memset(&g, 0, sizeof g);
    g.m = MTI_PACKED_ROWS, g.n = w.rows, g.k = w.cols;
    g.b_type = w.dtype;
    MT_TRY(mti_dnnl_open(ctx, &g, &d));
    before = mti_omp_begin();
    status = mti_packed_layout(ctx, d, &g, p);
    if (status == MT_SUCCESS && p->bytes > 0) status = mt_context_alloc(ctx, p->bytes, &p->data);
    if (status == MT_SUCCESS && p->bytes > 0 && mt_context_has_data(ctx))
        status = mti_dnnl_check(ctx, &g, "dnnl_reorder", mti_dnnl_reorder(d, &from, p));
    mti_omp_end(before);
    return status;
}

static void mti_packed_close(mti_packed *p) {
    if (p->layout) dnnl_primitive_desc_destroy((dnnl_primitive_desc_t)p->layout);
}

/* Runs a plan. Several threads may run the same one, so the objects with the addresses are their own. */
static dnnl_status_t mti_dnnl_run(const mti_dnnl_plan *p, const mti_matmul *g, void *scratch) {
    static const int names[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};
    static const dnnl_query_t views[] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md,
                                         dnnl_query_scratchpad_md};
    dnnl_exec_arg_t args[4];
    dnnl_engine_t engine = NULL;
    dnnl_stream_t stream = NULL;
    dnnl_status_t status = dnnl_primitive_desc_query(p->desc, dnnl_query_engine, 0, (void *)&engine);
    void *data[4];
    int i;
    data[0] = (void *)(uintptr_t)g->a, data[1] = (void *)(uintptr_t)g->b, data[2] = g->c, data[3] = scratch;
    if (g->packed) data[1] = (char *)g->packed->data + (size_t)(g->first_col / g->each) * g->packed_step;
    if (status == dnnl_success) status = dnnl_stream_create(&stream, engine, dnnl_stream_default_flags);
    for (i = 0; i < 4; i++) {
        args[i].arg = names[i];
        args[i].memory = NULL;
        if (status == dnnl_success)
            status = dnnl_memory_create(&args[i].memory, dnnl_primitive_desc_query_md(p->desc, views[i], 0), engine,
                                        data[i]);
    }
    if (status == dnnl_success) status = dnnl_primitive_execute(p->primitive, stream, 4, args);
    if (status == dnnl_success) status = dnnl_stream_wait(stream);
    for (i = 0; i < 4; i++)
        if (args[i].memory) dnnl_memory_destroy(args[i].memory);
    if (stream) dnnl_stream_destroy(stream);
    return status;
}

/* The bytes of c without gaps between its rows, if it has gaps and a packed copy is used. */
static size_t mti_packed_room(const mti_matmul *part) {
    int gaps = part->packed && part->ldc != part->n;
    return gaps ? mt_align_up((size_t)(part->m * part->n) * mt_dtype_size(part->c_type)) : 0;
}

/* Runs a plan. oneDNN 2 reads a packed copy only if the rows of c have no gaps. Threads that share columns have gaps:
   they compute c in scratch memory. */
static dnnl_status_t mti_dnnl_run_packed(const mti_dnnl_plan *p, const mti_matmul *g, char *scratch) {
    size_t room = mti_packed_room(g), size = mt_dtype_size(g->c_type), row = (size_t)g->n * size;
    mti_matmul dense = *g;
    dnnl_status_t status;
    int64_t i;
    if (room > 0) dense.c = scratch, dense.ldc = g->n;
    status = mti_dnnl_run(p, &dense, scratch + room);
    for (i = 0; status == dnnl_success && room > 0 && i < g->m; i++)
        memcpy((char *)g->c + (size_t)(i * g->ldc) * size, scratch + (size_t)i * row, row);
    return status;
}

/* oneDNN allocates the scratch memory of dnnl_sgemm itself. */
static size_t mti_library_bytes(const mti_matmul *part) {
    return part->plan ? ((mti_dnnl_plan *)part->plan)->bytes + mti_packed_room(part) : 0;
}

static int mti_library_gemm(const mti_matmul *g, void *scratch) {
    int before = mti_omp_begin();
    dnnl_status_t status;
    if (g->plan) status = mti_dnnl_run_packed((const mti_dnnl_plan *)g->plan, g, (char *)scratch);
    else
        status = dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->m, g->n, g->k, g->alpha,
                            (const float *)g->a, g->lda, (const float *)g->b, g->ldb, g->beta, (float *)g->c, g->ldc);
    mti_omp_end(before);
    return (int)status;
}

static mt_status mti_library_check(mt_context *ctx, const mti_matmul *g, int status) {
    return mti_dnnl_check(ctx, g, g->plan ? "dnnl_primitive_execute" : "dnnl_sgemm", (dnnl_status_t)status);
}

static void mti_library_begin(void) {}

#elif defined(MT_USE_CBLAS)
MT_API const char *mt_gemm_library(void) { return "CBLAS"; }

#if defined(__GNUC__)
static void mti_openblas_set_num_threads(int) __attribute__((weakref("openblas_set_num_threads")));
static int mti_openblas_get_num_threads(void) __attribute__((weakref("openblas_get_num_threads")));

/* OpenBLAS has one thread count per process. */
static void mti_library_begin(void) {
    if (!mti_openblas_set_num_threads || !mti_openblas_get_num_threads) return;
    if (mti_openblas_get_num_threads() != 1) mti_openblas_set_num_threads(1);
}
#else
static void mti_library_begin(void) {}
#endif

static int mti_library_gemm(const mti_matmul *g, void *scratch) {
    int before = mti_omp_begin();
    (void)scratch;
    cblas_sgemm(CblasRowMajor, g->trans_a ? CblasTrans : CblasNoTrans, g->trans_b ? CblasTrans : CblasNoTrans,
                (int)g->m, (int)g->n, (int)g->k, g->alpha, (const float *)g->a, (int)g->lda, (const float *)g->b,
                (int)g->ldb, g->beta, (float *)g->c, (int)g->ldc);
    mti_omp_end(before);
    return 0;
}

/* CBLAS has no products with packed matrices. */
static mt_status mti_packed_make(mt_context *ctx, mti_packed *p) { return (void)ctx, (void)p, MT_SUCCESS; }
static mt_status mti_native_plan(mt_context *ctx, mti_matmul *g) { return (void)ctx, (void)g, MT_SUCCESS; }

/* A CBLAS library allocates its scratch memory itself. */
static size_t mti_library_bytes(const mti_matmul *part) { return (void)part, (size_t)0; }

#else
#define MTI_GEMM_WIDENS 1 /* the built-in GEMM widens 16-bit operands when it packs them */
MT_API const char *mt_gemm_library(void) { return "built-in"; }

/* A block of a, MTI_MC x MTI_KC, stays in L2; MTI_MC is a multiple of every MTI_MR. A block of b, MTI_KC x MTI_NC,
   stays in L3. */
#define MTI_MC 192
#define MTI_NC 2048

/* The bytes of scratch memory that the built-in GEMM needs for packing. They never decrease when m, n or k grows. */
static size_t mti_builtin_gemm_bytes(int64_t m, int64_t n, int64_t k) {
    int64_t kc = mt_min(k, MTI_KC);
    int64_t a = mt_round_up(mt_min(m, MTI_MC), MTI_MR) * kc, b = mt_round_up(mt_min(n, MTI_NC), MTI_NR) * kc;
    return mt_align_up((size_t)a * sizeof(float)) + mt_align_up((size_t)b * sizeof(float));
}

/* Computes one block of a product, tile by tile. The inner loop goes over the rows of a, so that a panel of b stays in
   L1. */
static void mti_gemm_block(const mti_gemm_piece *x) {
    int64_t i, j;
    for (j = 0; j < x->n; j += MTI_NR)
        for (i = 0; i < x->m; i += MTI_MR) mti_gemm_tile(x, i, j, 0, x->k);
}

#define MTI_PACK_COLS 64 /* columns of 16-bit rows that are widened at once */

/* mti_pack_panel for elements of a 16-bit type, which it widens. row or col is 1. */
static void mti_pack_panel16(mt_dtype type, const uint16_t *x, int64_t row, int64_t col, int64_t rows, int64_t k,
                             int width, float *out) {
    float room[MTI_NR * MTI_PACK_COLS];
    int64_t i, p, n;
    if (row == 1 && rows == width) {
        for (p = 0; p < k; p++) mt_f32_from_16bit(type, x + p * col, out + p * width, width);
        return;
    }
    for (p = 0; p < k; p += n) {
        n = mt_min(MTI_PACK_COLS, k - p);
        if (col == 1) {
            for (i = 0; i < rows; i++) mt_f32_from_16bit(type, x + i * row + p, room + i * MTI_PACK_COLS, n);
            mti_pack_panel(room, MTI_PACK_COLS, 1, rows, n, width, out + p * width);
        } else {
            for (i = 0; i < n; i++) mt_f32_from_16bit(type, x + (p + i) * col, room + i * width, rows);
            mti_pack_panel(room, 1, width, rows, n, width, out + p * width);
        }
    }
}

/* mti_pack for a matrix of any float type that begins at element `at` of x. row or col is 1. */
static void mti_pack_typed(mt_dtype type, const void *x, int64_t at, int64_t row, int64_t col, int64_t rows, int64_t k,
                           int width, float *out) {
    const uint16_t *from = (const uint16_t *)x + at;
    int64_t i;
    if (type == MT_F32) {
        mti_pack((const float *)x + at, row, col, rows, k, width, out);
        return;
    }
    for (i = 0; i < rows; i += width)
        mti_pack_panel16(type, from + i * row, row, col, mt_min(width, rows - i), k, width, out + i * k);
}

/* Returns the panels of a packed copy from column j on, for k rows from row p on. The copy has all panels of the first
   MTI_KC rows, then those of the next ones. j is a multiple of MTI_NR. */
static float *mti_packed_panels(const mti_packed *packed, int64_t j, int64_t p, int64_t k) {
    return (float *)packed->data + p * mt_round_up(packed->weight.rows, MTI_NR) + j * k;
}

/* Makes the packed copy of p->weight: the panels that mti_builtin_gemm otherwise packs in each product. */
static mt_status mti_packed_make(mt_context *ctx, mti_packed *p) {
    mt_tensor w = p->weight;
    int64_t i, n;
    p->bytes = (size_t)(mt_round_up(w.rows, MTI_NR) * w.cols) * sizeof(float);
    MT_TRY(mt_context_alloc(ctx, p->bytes, &p->data));
    for (i = 0; mt_context_has_data(ctx) && i < w.cols; i += n) {
        n = mt_min(MTI_KC, w.cols - i);
        mti_pack_typed(w.dtype, w.data, i, mt_tensor_ld(w), 1, w.rows, n, MTI_NR, mti_packed_panels(p, 0, i, n));
    }
    return MT_SUCCESS;
}

static mt_status mti_native_plan(mt_context *ctx, mti_matmul *g) {
    g->packed = mti_packed_find(ctx, g);
    return MT_SUCCESS;
}

/* The blocking is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008). a is
   packed only if more than four panels of b read it, because otherwise packing costs more than it saves, or if it must
   be widened. */
static void mti_builtin_gemm(const mti_matmul *g, void *scratch) {
    int64_t a_row = g->trans_a ? 1 : g->lda, a_col = g->trans_a ? g->lda : 1;
    int64_t b_row = g->trans_b ? 1 : g->ldb, b_col = g->trans_b ? g->ldb : 1;
    int64_t kc = mt_min(g->k, MTI_KC), i, j, p;
    int pack_a = g->n > 4 * MTI_NR || g->a_type != MT_F32;
    float *room_b = (float *)scratch;
    float *room_a = room_b + mt_round_up(mt_round_up(mt_min(g->n, MTI_NC), MTI_NR) * kc, 16);
    mti_gemm_piece x;
    x.ldc = g->ldc;
    x.alpha = g->alpha;
    x.a_row = a_row;
    x.a_col = a_col;
    x.packed_a = pack_a ? room_a : NULL;
    x.pairs = x.tiles = 0;
    for (j = 0; j < g->n; j += MTI_NC)
        for (p = 0; p < g->k; p += MTI_KC) {
            x.n = mt_min(MTI_NC, g->n - j);
            x.k = mt_min(MTI_KC, g->k - p);
            x.beta = p == 0 ? g->beta : 1.0f;
            x.packed_b = g->packed ? mti_packed_panels(g->packed, g->first_col + j, p, x.k) : room_b;
            if (!g->packed)
                mti_pack_typed(g->b_type, g->b, j * b_col + p * b_row, b_col, b_row, x.n, x.k, MTI_NR, room_b);
            for (i = 0; i < g->m; i += MTI_MC) {
                x.m = mt_min(MTI_MC, g->m - i);
                x.a = pack_a ? NULL : (const float *)g->a + i * a_row + p * a_col;
                x.c = (float *)g->c + i * g->ldc + j;
                if (pack_a)
                    mti_pack_typed(g->a_type, g->a, i * a_row + p * a_col, a_row, a_col, x.m, x.k, MTI_MR, room_a);
                mti_gemm_block(&x);
            }
        }
}

static size_t mti_library_bytes(const mti_matmul *part) { return mti_builtin_gemm_bytes(part->m, part->n, part->k); }

static void mti_library_begin(void) {}

static int mti_library_gemm(const mti_matmul *g, void *scratch) {
    mti_builtin_gemm(g, scratch);
    return 0;
}
#endif

#if !defined(MTI_GEMM_WIDENS)
#define MTI_GEMM_WIDENS 0
#endif
#if !defined(MT_USE_ONEDNN)
static void mti_packed_close(mti_packed *p) { (void)p; }
static mt_status mti_library_check(mt_context *ctx, const mti_matmul *g, int status) {
    return (void)ctx, (void)g, (void)status, MT_SUCCESS;
}
#endif

#define MTI_GEMM_GRAIN 131072 /* each thread gets at least so many multiplications */

/* Divides a product among the threads of the context, along the larger of m and n. Columns begin at multiples of a
   panel of the built-in GEMM and of a cache line. */
static void mti_gemm_split(mt_context *ctx, mti_matmul *g) {
    double work = (double)g->m * (double)g->n * (double)g->k;
    int64_t size = mt_max(g->m, g->n), unit = g->n > g->m ? MTI_GEMM_COLS : 16, threads = mt_context_threads(ctx);
    if (work < MTI_GEMM_GRAIN * (double)threads) threads = mt_max(1, (int64_t)(work / MTI_GEMM_GRAIN));
    g->by_cols = g->n > g->m;
    g->each = mt_max(1, mt_min(size, mt_round_up((size + threads - 1) / threads, unit)));
}

/* Chooses how a product runs: with few rows, with a plan, or by the library in f32. */
static mt_status mti_gemm_choose(mt_context *ctx, mti_matmul *g) {
    if (mt_context_planned(ctx) == MT_DEVICE_CUDA) return MT_SUCCESS;
    mti_gemm_split(ctx, g);
    g->few = mti_gemm_is_few(g, MTI_FEW_MOST_NATIVE);
    if (!g->few) MT_TRY(mti_native_plan(ctx, g));
    if (!g->plan) g->few = mti_gemm_is_few(g, MTI_FEW_MOST);
    return MT_SUCCESS;
}

/* Computes a product with few rows. a and c are f32. */
static void mti_gemm_few(const mti_matmul *g) {
    mti_few_product f;
    f.a = (const float *)g->a, f.b = (const unsigned char *)g->b, f.c = (float *)g->c;
    f.lda = g->lda, f.ldb = g->ldb, f.ldc = g->ldc;
    f.m = g->m, f.n = g->n, f.k = g->k;
    f.alpha = g->alpha, f.beta = g->beta;
    mti_few_rows(&f, g->b_type);
}

static int64_t mti_gemm_parts(const mti_matmul *g) { return (mti_gemm_shared_size(g) + g->each - 1) / g->each; }

/* The bytes of scratch memory of one part. */
static size_t mti_gemm_bytes(const mti_matmul *g) {
    int64_t rest = mti_gemm_shared_size(g) % g->each;
    mti_matmul part = mti_gemm_part(g, 0, g->each), last = mti_gemm_part(g, 0, rest ? rest : g->each);
    size_t bytes = mti_library_bytes(&part), last_bytes = mti_library_bytes(&last);
    return g->few ? 0 : mt_align_up(bytes > last_bytes ? bytes : last_bytes);
}

/* A product that the threads of a context compute. */
typedef struct mti_gemm_run {
    const mti_matmul *g;
    unsigned char *scratch;
    size_t bytes; /* of scratch memory of a part */
    int status;   /* atomic: the library's status of a part that failed, or 0 */
} mti_gemm_run;

static void mti_gemm_run_parts(void *data, int thread, int64_t first, int64_t last) {
    mti_gemm_run *run = (mti_gemm_run *)data;
    const mti_matmul *g = run->g;
    int64_t i, size = mti_gemm_shared_size(g);
    (void)thread;
    for (i = first; i < last; i++) {
        mti_matmul part = mti_gemm_part(g, i * g->each, mt_min((i + 1) * g->each, size));
        int status = 0;
        if (g->few) mti_gemm_few(&part);
        else if (g->k == 0 || g->alpha == 0.0f) mti_gemm_scale(&part);
        else status = mti_library_gemm(&part, run->scratch + (size_t)i * run->bytes);
        if (status) __atomic_store_n(&run->status, status, __ATOMIC_RELAXED);
    }
}

/* Computes the product g on a CPU. scratch has at least mti_gemm_bytes(g) bytes for each part. */
static mt_status mti_cpu_gemm(mt_context *ctx, const mti_matmul *g, void *scratch) {
    mti_gemm_run run;
    if (g->m == 0 || g->n == 0) return MT_SUCCESS;
    run.g = g;
    run.scratch = (unsigned char *)scratch;
    run.bytes = mti_gemm_bytes(g);
    run.status = 0;
    mti_library_begin();
    mt_parallel_for(ctx, mti_gemm_parts(g), 1, mti_gemm_run_parts, &run);
    return run.status ? mti_library_check(ctx, g, run.status) : MT_SUCCESS;
}

#if MT_HAS_CUDA
extern "C++" {

/* The key of a plan: what distinguishes products for cuBLASLt. cuBLASLt is column-major: C [m, n] is its n x m matrix,
   b is its first operand, and the leading dimensions are the same. */
typedef struct mti_lt_key {
    int64_t m, n, k, lda, ldb, ldc, ld_aux;
    int trans_a, trans_b, a_type, b_type, c_type, epilogue;
} mti_lt_key;

/* A cuBLASLt product with a chosen algorithm, in the hash table of mti_lt. */
typedef struct mti_lt_plan {
    mti_lt_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;         /* bytes that the algorithm needs */
    int undecided;            /* 1: whether the fused product is used has not been decided yet */
    int fused;                /* for a key with an epilogue: 1 if the fused product is used */
    int stays;                /* 1: never evicted, because a second measurement could choose other bits */
    uint64_t used;            /* the value of mti_lt.clock at the last use */
    struct mti_lt_plan *next; /* the next plan in the same bucket */
} mti_lt_plan;

#define MTI_LT_PLANS 512 /* maximum number of plans of a context; at most half of them have `stays` */
#define MTI_LT_BUCKETS 1024
#define MTI_LT_WORKSPACE ((size_t)32 << 20)
#define MTI_LT_CANDIDATES 8 /* maximum number of algorithms that are measured */
#define MTI_LT_RUNS 5       /* runs of one measurement */
#define MTI_LT_LEAST 65536  /* elements of C that it takes to see reliably whether two algorithms round alike */

/* The cuBLASLt state of a context, created by its first product. */
typedef struct mti_lt {
    cublasLtHandle_t handle;
    void *workspace;
    cudaEvent_t begin, end;
    uint64_t clock; /* counts the uses of plans */
    int count, stay;
    mti_lt_plan plans[MTI_LT_PLANS], *buckets[MTI_LT_BUCKETS];
} mti_lt;

/* One product. bias and aux are operands of its epilogue, or NULL. */
typedef struct mti_lt_call {
    mti_lt_key key;
    float alpha, beta;
    mt_tensor a, b, c;
    void *bias, *aux;
} mti_lt_call;

static mt_status mti_lt_check(mt_context *ctx, cublasStatus_t status, const char *call) {
    if (status == CUBLAS_STATUS_SUCCESS) return MT_SUCCESS;
    return mt_fail(ctx, status == CUBLAS_STATUS_ALLOC_FAILED ? MT_ERR_MEMORY : MT_ERR_SYSTEM,
                   "%.200s: cuBLASLt status %d (%s)", call, (int)status, cublasLtGetStatusString(status));
}
#define MTI_LT_TRY(ctx, call) MT_TRY(mti_lt_check(ctx, (call), #call))

static void mti_lt_forget(mti_lt_plan *p) {
    cublasLtMatrixLayoutDestroy(p->c);
    cublasLtMatrixLayoutDestroy(p->b);
    cublasLtMatrixLayoutDestroy(p->a);
    cublasLtMatmulDescDestroy(p->desc);
}

static void mti_lt_destroy(mt_context *ctx, void *gemm) {
    mti_lt *lt = (mti_lt *)gemm;
    for (int i = 0; i < lt->count; i++) mti_lt_forget(&lt->plans[i]);
    if (lt->begin) cudaEventDestroy(lt->begin);
    if (lt->end) cudaEventDestroy(lt->end);
    if (lt->handle) cublasLtDestroy(lt->handle);
    if (lt->workspace) mt_context_free(ctx, lt->workspace, MTI_LT_WORKSPACE);
    mt_host_free(lt);
}

static mt_status mti_lt_fill(mt_context *ctx, mti_lt *lt) {
    MT_TRY(mt_context_alloc(ctx, MTI_LT_WORKSPACE, &lt->workspace));
    MTI_LT_TRY(ctx, cublasLtCreate(&lt->handle));
    MT_CUDA_TRY(ctx, cudaEventCreate(&lt->begin));
    MT_CUDA_TRY(ctx, cudaEventCreate(&lt->end));
    return MT_SUCCESS;
}

/* Returns the cuBLASLt state of the context. Creates it on the first call, completely or not at all. */
static mt_status mti_lt_open(mt_context *ctx, mti_lt **out) {
    mti_kernels *k;
    mti_lt *lt;
    mt_status status;
    MT_TRY(mti_kernels_open(ctx, &k));
    *out = (mti_lt *)k->gemm;
    if (*out) return MT_SUCCESS;
    lt = (mti_lt *)mt_host_alloc(sizeof *lt);
    if (!lt) return mt_fail(ctx, MT_ERR_MEMORY, "mt_gemm: no memory for %zu bytes", sizeof *lt);
    status = mti_lt_fill(ctx, lt);
    if (status != MT_SUCCESS) {
        mti_lt_destroy(ctx, lt);
        return status;
    }
    k->gemm = *out = lt;
    k->gemm_destroy = mti_lt_destroy;
    return MT_SUCCESS;
}

static cudaDataType_t mti_lt_type(int dtype) {
    return dtype == MT_F32 ? CUDA_R_32F : dtype == MT_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

static mt_status mti_lt_layout(mt_context *ctx, cublasLtMatrixLayout_t *out, int dtype, int64_t rows, int64_t cols,
                               int64_t ld) {
    MTI_LT_TRY(ctx, cublasLtMatrixLayoutCreate(out, mti_lt_type(dtype), (uint64_t)rows, (uint64_t)cols, ld));
    return MT_SUCCESS;
}

/* Whether a status means that cuBLASLt does not have a product. For some epilogues it is INVALID_VALUE. */
static int mti_lt_lacks(const mti_lt_key *key, cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED ||
           (status == CUBLAS_STATUS_INVALID_VALUE && key->epilogue != CUBLASLT_EPILOGUE_DEFAULT);
}

/* results = the algorithms that the heuristic proposes for a plan, the best first. *found = their number. It is 0 if
   cuBLASLt does not support the product. */
static mt_status mti_lt_propose(mt_context *ctx, mti_lt *lt, const mti_lt_plan *p,
                                cublasLtMatmulHeuristicResult_t *results, int *found) {
    cublasLtMatmulPreference_t preference;
    size_t workspace = MTI_LT_WORKSPACE;
    uint32_t alignment = 16;                                      /* mti_lt_operand ensures this alignment */
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* a split k adds in f32, not in 16 bits */
    cublasStatus_t status;
    int proposed = 0;
    *found = 0;
    MTI_LT_TRY(ctx, cublasLtMatmulPreferenceCreate(&preference));
    status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                  sizeof workspace);
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < 4; i++) {
        static const cublasLtMatmulPreferenceAttributes_t which[] = {
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
        status = cublasLtMatmulPreferenceSetAttribute(preference, which[i], &alignment, sizeof alignment);
    }
    if (status == CUBLAS_STATUS_SUCCESS && p->key.c_type != MT_F32)
        status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                      &reductions, sizeof reductions);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulAlgoGetHeuristic(lt->handle, p->desc, p->a, p->b, p->c, p->c, preference,
                                                MTI_LT_CANDIDATES, results, &proposed);
    for (int i = 0; i < proposed; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS) results[(*found)++] = results[i];
    cublasLtMatmulPreferenceDestroy(preference);
    return mti_lt_lacks(&p->key, status) ? MT_SUCCESS : mti_lt_check(ctx, status, "cublasLtMatmulAlgoGetHeuristic");
}

static cublasStatus_t mti_lt_enqueue(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g) {
    return cublasLtMatmul(lt->handle, p->desc, &g->alpha, g->b.data, p->a, g->a.data, p->b, &g->beta, g->c.data, p->c,
                          g->c.data, p->c, &p->algo, lt->workspace, p->workspace, mt_context_stream(ctx));
}

/* Tells cuBLASLt where the operands of the epilogue are. */
static mt_status mti_lt_point(mt_context *ctx, mti_lt_plan *p, const mti_lt_call *g) {
    if (g->bias)
        MTI_LT_TRY(
            ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias));
    if (g->aux)
        MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->aux,
                                                       sizeof g->aux));
    return MT_SUCCESS;
}

static mt_status mti_lt_matmul(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g) {
    return mti_lt_check(ctx, mti_lt_enqueue(ctx, lt, p, g), "cublasLtMatmul");
}

/* *ms = the milliseconds that run() takes on the GPU: the median of MTI_LT_RUNS runs, after one warm-up run. */
template <typename Run> static mt_status mti_lt_time(mt_context *ctx, mti_lt *lt, const Run &run, float *ms) {
    float all[MTI_LT_RUNS];
    MT_TRY(run());
    for (int i = 0; i < MTI_LT_RUNS; i++) {
        float x = 0.0f;
        int at = i;
        MT_CUDA_TRY(ctx, cudaEventRecord(lt->begin, mt_context_stream(ctx)));
        MT_TRY(run());
        MT_CUDA_TRY(ctx, cudaEventRecord(lt->end, mt_context_stream(ctx)));
        MT_TRY(mt_context_synchronize(ctx)); /* waits for peers first, with their timeout */
        MT_CUDA_TRY(ctx, cudaEventElapsedTime(&x, lt->begin, lt->end));
        for (; at > 0 && all[at - 1] > x; at--) all[at] = all[at - 1];
        all[at] = x;
    }
    *ms = all[MTI_LT_RUNS / 2];
    return MT_SUCCESS;
}

/* *yes = whether the host may wait for the stream, which a measurement does. It may not during stream capture. */
static mt_status mti_lt_may_wait(mt_context *ctx, int *yes) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    MT_CUDA_TRY(ctx, cudaStreamIsCapturing(mt_context_stream(ctx), &capture));
    *yes = capture == cudaStreamCaptureStatusNone;
    return MT_SUCCESS;
}

struct mti_noise_op { /* values in (-1, 1) whose exponents differ widely, so that the bits of a sum show its order */
    mti_view y;
    uint64_t seed;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        float x[MTI_VECTOR];
        for (int j = 0; j < MTI_VECTOR; j++) {
            float v = (float)(mt_hash_word(seed + (uint64_t)row, (uint32_t)(col + j)) >> 40) * 1.1920929e-7f - 1.0f;
            x[j] = v * v * v;
        }
        mti_store<WIDE>(y, row, col, n, x);
    }
};

/* Replaces *t by a view of the same layout in the arena, filled with noise. */
static mt_status mti_lt_noise(mt_context *ctx, uint64_t seed, mt_tensor *t) {
    mt_tensor whole;
    MT_TRY(mt_arena_tensor(ctx, t->dtype, t->rows, mt_tensor_ld(*t), &whole));
    mti_noise_op op = {mti_view_of(whole), seed};
    *t = mt_tensor_cols(whole, 0, t->cols);
    return mti_map(ctx, "mt_gemm", op, mti_is_wide(whole), whole.rows, whole.cols);
}

static size_t mti_lt_bytes(mt_tensor t) {
    return mt_align_up((size_t)(t.rows * mt_tensor_ld(t)) * mt_dtype_size(t.dtype));
}

/* Runs g with the algorithm of the plan. *runs = whether cuBLASLt accepts the call. *bits = the hash of the result. */
static mt_status mti_lt_try(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g, int *runs,
                            uint64_t *bits) {
    mti_noise_op op = {mti_view_of(g->c), 3};
    *bits = 0;
    MT_TRY(mti_map(ctx, "mt_gemm", op, 0, g->c.rows, g->c.cols));
    *runs = mti_lt_enqueue(ctx, lt, p, g) == CUBLAS_STATUS_SUCCESS;
    return *runs ? mti_cuda_hash(ctx, g->c, 0, 0, g->c.cols, bits) : MT_SUCCESS;
}

/* Sets the algorithm of the plan to the fastest candidate that gives the same bits as the first candidate that runs.
   All candidates multiply the same noise, because data such as zeros would not show how they round. If no candidate
   runs, the plan gets the first one, and the product then reports its error. */
static mt_status mti_lt_fastest(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, mti_lt_call g,
                                const cublasLtMatmulHeuristicResult_t *results, int found) {
    uint64_t first = 0, bits = 0;
    float best = 0.0f, ms = 0.0f;
    int chosen = -1, runs = 0;
    MT_TRY(mti_lt_noise(ctx, 1, &g.a));
    MT_TRY(mti_lt_noise(ctx, 2, &g.b));
    MT_TRY(mti_lt_noise(ctx, 3, &g.c));
    g.alpha = g.beta = 1.0f;
    for (int i = 0; i < found; i++) {
        p->algo = results[i].algo;
        p->workspace = results[i].workspaceSize;
        MT_TRY(mti_lt_try(ctx, lt, p, &g, &runs, &bits));
        if (chosen < 0) first = bits;
        if (!runs || bits != first) continue;
        MT_TRY(mti_lt_time(
            ctx, lt, [&]() { return mti_lt_matmul(ctx, lt, p, &g); }, &ms));
        if (chosen >= 0 && ms >= best) continue;
        best = ms;
        chosen = i;
    }
    p->algo = results[chosen < 0 ? 0 : chosen].algo;
    p->workspace = results[chosen < 0 ? 0 : chosen].workspaceSize;
    return MT_SUCCESS;
}

/* Sets the algorithm of the plan: the first one of the heuristic, which depends on the key only, or the fastest one
   with the same bits. Either way the same product always has the same bits. The measurement uses free arena memory and
   restores the peak of the arena. */
static mt_status mti_lt_choose(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g,
                               const cublasLtMatmulHeuristicResult_t *results, int found) {
    size_t mark = mt_arena_mark(ctx), peak = mt_arena_peak(ctx);
    size_t bytes =
        mti_lt_bytes(g->a) + mti_lt_bytes(g->b) + mti_lt_bytes(g->c) + MT_ALIGNMENT; /* MT_ALIGNMENT for the hash */
    int may_wait = 0;
    mt_status status;
    p->algo = results[0].algo;
    p->workspace = results[0].workspaceSize;
    if (mt_gemm_get_options(ctx).choice != MT_GEMM_MEASURED || mt_context_invariant(ctx) || found < 2 ||
        p->key.epilogue != CUBLASLT_EPILOGUE_DEFAULT || p->key.m * p->key.n < MTI_LT_LEAST ||
        bytes > mt_arena_available(ctx))
        return MT_SUCCESS;
    MT_TRY(mti_lt_may_wait(ctx, &may_wait));
    if (!may_wait) return MT_SUCCESS;
    status = mti_lt_fastest(ctx, lt, p, *g, results, found);
    mt_arena_release(ctx, mark);
    mt_arena_set_peak(ctx, peak);
    return status;
}

/* Sets the epilogue of a plan and its operands in the cuBLASLt descriptor. */
static mt_status mti_lt_epilogue(mt_context *ctx, mti_lt_plan *p, const mti_lt_call *g) {
    const mti_lt_key *q = &p->key;
    uint32_t epilogue = (uint32_t)q->epilogue;
    if (epilogue == CUBLASLT_EPILOGUE_DEFAULT) return MT_SUCCESS;
    MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (g->aux)
        MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &q->ld_aux,
                                                       sizeof q->ld_aux));
    if (g->aux)
        MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->aux,
                                                       sizeof g->aux));
    if (g->bias) /* the heuristic considers the alignment of bias */
        MTI_LT_TRY(
            ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias));
    return MT_SUCCESS;
}

/* Fills the plan, whose key is set. *found = the number of algorithms. It is 0 if cuBLASLt does not support the
   product. */
static mt_status mti_lt_plan_make(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g, int *found) {
    const mti_lt_key *q = &p->key;
    cublasOperation_t first = q->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = q->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulHeuristicResult_t results[MTI_LT_CANDIDATES];
    MTI_LT_TRY(ctx, cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    MTI_LT_TRY(ctx, cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    MT_TRY(mti_lt_epilogue(ctx, p, g));
    MT_TRY(mti_lt_layout(ctx, &p->a, q->b_type, q->trans_b ? q->k : q->n, q->trans_b ? q->n : q->k, q->ldb));
    MT_TRY(mti_lt_layout(ctx, &p->b, q->a_type, q->trans_a ? q->m : q->k, q->trans_a ? q->k : q->m, q->lda));
    MT_TRY(mti_lt_layout(ctx, &p->c, q->c_type, q->n, q->m, q->ldc));
    MT_TRY(mti_lt_propose(ctx, lt, p, results, found));
    return *found ? mti_lt_choose(ctx, lt, p, g, results, *found) : MT_SUCCESS;
}

static mti_lt_plan **mti_lt_bucket(mti_lt *lt, const mti_lt_key *key) {
    uint32_t words[sizeof *key / sizeof(uint32_t)];
    uint64_t hash = 0;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = mt_hash_word(hash, words[i]);
    return &lt->buckets[hash % MTI_LT_BUCKETS];
}

/* Returns a place for one more plan. If all places are taken, evicts the least recently used plan without `stays`. */
static mti_lt_plan *mti_lt_place(mti_lt *lt) {
    mti_lt_plan *oldest = NULL, **link;
    if (lt->count < MTI_LT_PLANS) return &lt->plans[lt->count++];
    for (int i = 0; i < MTI_LT_PLANS; i++)
        if (!lt->plans[i].stays && (!oldest || lt->plans[i].used < oldest->used)) oldest = &lt->plans[i];
    for (link = mti_lt_bucket(lt, &oldest->key); *link != oldest; link = &(*link)->next) continue;
    *link = oldest->next;
    mti_lt_forget(oldest);
    return oldest;
}

/* *out = the plan of a product, which is created if it does not exist yet. A product with an epilogue may have no
   algorithm; without one its plan is not fused. */
static mt_status mti_lt_plan_of(mt_context *ctx, mti_lt *lt, const mti_lt_call *g, mti_lt_plan **out) {
    mti_lt_plan fresh, **bucket = mti_lt_bucket(lt, &g->key);
    int plain = g->key.epilogue == CUBLASLT_EPILOGUE_DEFAULT, found = 0;
    for (*out = *bucket; *out; *out = (*out)->next)
        if (memcmp(&(*out)->key, &g->key, sizeof g->key) == 0) {
            (*out)->used = ++lt->clock;
            return MT_SUCCESS;
        }
    memset(&fresh, 0, sizeof fresh);
    fresh.key = g->key;
    mt_status status = mti_lt_plan_make(ctx, lt, &fresh, g, &found);
    if (status != MT_SUCCESS || (found == 0 && plain)) {
        mti_lt_forget(&fresh);
        if (status != MT_SUCCESS) return status;
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "mt_gemm: cuBLASLt has no algorithm to multiply %lld x %lld x %lld",
                       (long long)g->key.m, (long long)g->key.n, (long long)g->key.k);
    }
    *out = mti_lt_place(lt);
    fresh.undecided = found > 0 && !plain;
    fresh.used = ++lt->clock;
    fresh.next = *bucket;
    **out = fresh;
    *bucket = *out;
    return MT_SUCCESS;
}

/* Runs a product without an epilogue. */
static mt_status mti_lt_run(mt_context *ctx, const mti_lt_call *g) {
    mti_lt *lt;
    mti_lt_plan *p = NULL;
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mti_lt_open(ctx, &lt));
    MT_TRY(mti_lt_plan_of(ctx, lt, g, &p));
    return mti_lt_matmul(ctx, lt, p, g);
}

/* Fills a call and its key. The caller sets bias, aux and ld_aux. */
static void mti_lt_call_make(const mti_matmul *m, mt_tensor a, mt_tensor b, mt_tensor c, int epilogue, mti_lt_call *g) {
    mti_lt_key *key = &g->key;
    memset(g, 0, sizeof *g);
    key->m = m->m, key->n = m->n, key->k = m->k;
    key->trans_a = m->trans_a, key->trans_b = m->trans_b;
    key->lda = mt_tensor_ld(a), key->ldb = mt_tensor_ld(b), key->ldc = mt_tensor_ld(c);
    key->a_type = (int)a.dtype, key->b_type = (int)b.dtype, key->c_type = (int)c.dtype;
    key->epilogue = epilogue;
    g->alpha = m->alpha, g->beta = m->beta;
    g->a = a, g->b = b, g->c = c;
}

/* *out = t if t has this type and is aligned. Otherwise *out = a new view in the arena, which mti_lt_fill fills. */
static mt_status mti_lt_operand(mt_context *ctx, mt_tensor t, mt_dtype dtype, mt_tensor *out) {
    *out = t;
    if (t.dtype == dtype && mti_is_wide(t)) return MT_SUCCESS;
    int64_t pitch = mt_round_up(t.cols, 8);
    MT_TRY(mt_arena_tensor(ctx, dtype, t.rows, pitch, out));
    *out = mt_tensor_cols(*out, 0, t.cols);
    return MT_SUCCESS;
}

/* to = from, converted to the type of `to`. Does nothing if they are the same memory. */
static mt_status mti_lt_fill(mt_context *ctx, mt_tensor from, mt_tensor to) {
    return from.data == to.data ? MT_SUCCESS : mti_cuda_convert(ctx, from, to);
}

/* y *= factor. With factor 0, y is not read. On sm_90: 18 instructions for an f32 element, which moves 8 bytes (budget:
   54). */
struct mti_scale_op {
    mti_view y;
    float factor;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        float x[MTI_VECTOR] = {};
        if (factor != 0.0f) mti_load<WIDE>(y, row, col, n, x);
        for (int j = 0; j < MTI_VECTOR; j++) x[j] *= factor;
        mti_store<WIDE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_scale(mt_context *ctx, mt_tensor y, float factor) {
    mti_scale_op op = {mti_view_of(y), factor};
    return mti_map(ctx, "mt_gemm", op, mti_is_wide(y), y.rows, y.cols);
}

/* A product by one call of cuBLASLt, which takes operands of one type, and is fast with 16-byte alignment. Other
   operands are converted in the arena. */
static mt_status mti_cuda_gemm_whole(mt_context *ctx, const mti_matmul *g, mt_tensor a, mt_tensor b, mt_tensor c) {
    size_t mark = mt_arena_mark(ctx);
    mt_dtype type = a.dtype == b.dtype ? a.dtype : MT_F32;
    mt_dtype c_type = c.dtype == MT_F32 || c.dtype == type ? c.dtype : MT_F32;
    mti_lt_call call;
    mt_tensor own_a, own_b, own_c;
    if (g->m == 0 || g->n == 0) return MT_SUCCESS;
    if (g->k == 0 || g->alpha == 0.0f) return g->beta == 1.0f ? MT_SUCCESS : mti_cuda_scale(ctx, c, g->beta);
    MT_TRY(mti_lt_operand(ctx, a, type, &own_a));
    MT_TRY(mti_lt_operand(ctx, b, type, &own_b));
    MT_TRY(mti_lt_operand(ctx, c, c_type, &own_c));
    MT_TRY(mti_lt_fill(ctx, a, own_a));
    MT_TRY(mti_lt_fill(ctx, b, own_b));
    if (g->beta != 0.0f) MT_TRY(mti_lt_fill(ctx, c, own_c));
    mti_lt_call_make(g, own_a, own_b, own_c, CUBLASLT_EPILOGUE_DEFAULT, &call);
    MT_TRY(mti_lt_run(ctx, &call));
    MT_TRY(mti_lt_fill(ctx, own_c, c));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

#define MTI_LT_SPLIT 1024 /* a dimension is divided only above this size, */
#define MTI_LT_THIN 64    /* and only where all dimensions have at least this size */

/* Which dimension of a 16-bit product is divided: 'm', 'n', 'k' or 0 for none. In 16 bits, the fast kernels of cuBLASLt
   need rows of A, B and C whose number of elements is a multiple of 8, not only a leading dimension that is one. */
static int mti_lt_divided(mt_context *ctx, const mti_matmul *g, mt_tensor a, mt_tensor b) {
    if (a.dtype == MT_F32 || a.dtype != b.dtype || mt_context_invariant(ctx)) return 0;
    if (mt_min(g->m, mt_min(g->n, g->k)) < MTI_LT_THIN) return 0;
    if ((!g->trans_a || g->trans_b) && g->k % 8 && g->k > MTI_LT_SPLIT) return 'k';
    if (g->n % 8 && g->n > MTI_LT_SPLIT) return 'n';
    return g->trans_a && g->m % 8 && g->m > MTI_LT_SPLIT ? 'm' : 0;
}

static mt_tensor mti_lt_part(mt_tensor t, int rows, int64_t first, int64_t count) {
    return rows ? mt_tensor_rows(t, first, count) : mt_tensor_cols(t, first, count);
}

/* The product on a GPU. A product with 50257 columns becomes one with 50240 and one with 17. Of a divided k the rest
   comes first, because a C of 16 bits is rounded after it. */
static mt_status mti_cuda_gemm(mt_context *ctx, const mti_matmul *g, mt_tensor a, mt_tensor b, mt_tensor c) {
    int which = mti_lt_divided(ctx, g, a, b);
    int64_t size = which == 'm' ? g->m : which == 'n' ? g->n : g->k, most = size / 64 * 64;
    if (!which) return mti_cuda_gemm_whole(ctx, g, a, b, c);
    for (int rest = 1; rest >= 0; rest--) {
        int64_t first = rest ? most : 0, count = rest ? size - most : most;
        mti_matmul part = *g;
        mt_tensor own_a = a, own_b = b, own_c = c;
        (which == 'm' ? part.m : which == 'n' ? part.n : part.k) = count;
        if (which == 'k' && !rest) part.beta = 1.0f;
        if (which != 'n') own_a = mti_lt_part(a, (which == 'm') != g->trans_a, first, count);
        if (which != 'm') own_b = mti_lt_part(b, (which == 'k') != g->trans_b, first, count);
        if (which != 'k') own_c = mti_lt_part(c, which == 'm', first, count);
        MT_TRY(mti_cuda_gemm(ctx, &part, own_a, own_b, own_c));
    }
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif

MT_API mt_status mt_gemm_prepare(mt_context *ctx) {
    if (!ctx) return MT_ERR_ARGUMENT;
#if MT_HAS_CUDA
    if (mt_context_device(ctx) == MT_DEVICE_CUDA) {
        mti_lt *lt;
        MT_TRY(mt_cuda_enter(ctx));
        return mti_lt_open(ctx, &lt);
    }
#endif
    return MT_SUCCESS;
}

static void mti_packed_free(mt_context *ctx, mti_packed *p) {
    mti_packed_close(p);
    mt_context_free(ctx, p->data, p->bytes);
    mt_host_free(p);
}

MT_API mt_status mt_gemm_pack(mt_context *ctx, mt_tensor weight) {
    mti_kernels *k;
    mti_packed *p;
    mt_status status;
    MT_TRY(mt_tensor_check(ctx, "mt_gemm_pack", "weight", weight, MT_ARG_FLOAT, weight.rows, weight.cols));
    if (mt_max(weight.rows, mt_tensor_ld(weight)) > INT_MAX)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                       "mt_gemm_pack: weight is [%lld, %lld] with ld %lld: more than %d is not supported",
                       (long long)weight.rows, (long long)weight.cols, (long long)mt_tensor_ld(weight), INT_MAX);
    mt_gemm_unpack(ctx, weight);
    if (mti_is_empty(weight) || mt_context_planned(ctx) != MT_DEVICE_CPU || mt_context_invariant(ctx))
        return MT_SUCCESS;
    MT_TRY(mti_kernels_open(ctx, &k));
    p = (mti_packed *)mt_host_alloc(sizeof *p);
    if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "mt_gemm_pack: no memory for %zu bytes", sizeof *p);
    p->weight = weight;
    status = mti_packed_make(ctx, p);
    if (status != MT_SUCCESS || p->bytes == 0) {
        mti_packed_free(ctx, p);
        return status;
    }
    if (!k->packed) k->packed_from = UINTPTR_MAX, k->packed_to = 0;
    if (k->packed_from > (uintptr_t)weight.data) k->packed_from = (uintptr_t)weight.data;
    if (k->packed_to < mti_view_end(weight)) k->packed_to = mti_view_end(weight);
    p->next = k->packed;
    k->packed = p;
    return MT_SUCCESS;
}

MT_API void mt_gemm_unpack(mt_context *ctx, mt_tensor weight) {
    if (ctx) mti_packed_drop(ctx, weight);
}

/* Sets the operands of a product: the given views, or their f32 copies. */
static void mti_gemm_operands(mti_matmul *g, mt_tensor a, mt_tensor b, mt_tensor c) {
    g->a = a.data, g->b = b.data, g->c = c.data;
    g->a_type = a.dtype, g->b_type = b.dtype, g->c_type = c.dtype;
    g->lda = mt_max(1, mt_tensor_ld(a));
    g->ldb = mt_max(1, mt_tensor_ld(b));
    g->ldc = mt_max(1, mt_tensor_ld(c));
}

static mti_matmul mti_gemm_sizes(mt_transpose trans_a, mt_transpose trans_b, mt_tensor a, mt_tensor b) {
    mti_matmul g;
    memset(&g, 0, sizeof g);
    g.trans_a = trans_a == MT_TRANS;
    g.trans_b = trans_b == MT_TRANS;
    g.m = trans_a ? a.cols : a.rows;
    g.n = trans_b ? b.rows : b.cols;
    g.k = trans_a ? a.rows : a.cols;
    return g;
}

/* The product on a CPU. A meta context allocates the scratch memory as well. */
static mt_status mti_gemm_loop(mti_operator *op, const mti_matmul *g) {
    void *scratch = NULL;
    MT_TRY(mt_arena_alloc(op->ctx, mti_gemm_bytes(g) * (size_t)mti_gemm_parts(g), &scratch));
    return op->on_cpu ? mti_cpu_gemm(op->ctx, g, scratch) : MT_SUCCESS;
}

MT_API mt_status mt_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, float alpha, mt_tensor a,
                         mt_tensor b, float beta, mt_tensor c) {
    mti_matmul g = mti_gemm_sizes(trans_a, trans_b, a, b);
    const int of_rows = trans_a == MT_TRANS && trans_b == MT_NO_TRANS;
    const int use = MT_ARG_OUT | MT_ARG_PRODUCT | (of_rows ? MT_ARG_SUM : 0) | (beta != 0.0f ? MT_ARG_IN : 0);
    mt_arg args[] = {{"c", &c, c.rows, c.cols, MT_ARG_FLOAT, use},
                     {"a", &a, a.rows, a.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"b", &b, b.rows, b.cols, MT_ARG_FLOAT, MT_ARG_IN}};
    mt_dtype dtype = a.dtype;
    mti_operator op;
    int i;
    MT_TRY(mt_args_check(ctx, "mt_gemm", args, MTI_COUNT(args)));
    MT_TRY(mti_expect_gemm(ctx, trans_a, trans_b, a, b, c, &g));
    MT_TRY(mti_expect_gemm_sizes(ctx, &g, a, b, c));
    MT_TRY(mt_check_apart(ctx, "mt_gemm", "c", c, "a", a));
    MT_TRY(mt_check_apart(ctx, "mt_gemm", "c", c, "b", b));
    mti_packed_drop(ctx, c); /* before the copy of b is chosen: c may be other columns of its memory */
    g.alpha = alpha;
    g.beta = beta;
    mti_gemm_operands(&g, a, b, c);
    MT_TRY(mti_gemm_choose(ctx, &g));
    for (i = 0; i < MTI_COUNT(args); i++)
        if (g.plan || (args[i].view == &b && (g.few || MTI_GEMM_WIDENS)) ||
            (args[i].view == &a && !g.few && MTI_GEMM_WIDENS))
            args[i].use |= MTI_AS_IS;
    if (trans_a == MT_NO_TRANS && trans_b == MT_TRANS) MT_TRY(mt_parts_agree(ctx, "mt_gemm", b, a));
    if (mt_check_mode(ctx))
        MT_TRY(mti_apply_rule(ctx, "mt_gemm", &mti_gemm_rules[trans_a == MT_TRANS][trans_b == MT_TRANS], args,
                              MTI_COUNT(args)));
    MT_TRY(mti_begin_ruled(&op, ctx, "mt_gemm", args, MTI_COUNT(args)));
    mti_gemm_operands(&g, a, b, c);
    op.work.work = MT_WORK_GEMM;
    op.work.dtype = dtype;
    op.work.flops = 2.0 * (double)g.m * (double)g.n * (double)g.k;
    op.work.m = g.m, op.work.n = g.n, op.work.k = g.k;
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_gemm(ctx, &g, a, b, c), mti_gemm_loop(&op, &g)));
}

/* ---- >>bias ------------------------------------------------------------------------------------------------------ */

/* y and bias, or dy and dbias */
typedef struct mti_bias {
    mt_tensor y, bias;
} mti_bias;

static void mti_cpu_bias_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_bias *b = (const mti_bias *)data;
    float room[2][MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (j = 0; j < b->y.cols; j += n) {
        mt_tensor bias, y;
        n = mt_min(MTI_BLOCK, b->y.cols - j);
        bias = mti_f32_read(b->bias, 0, 1, j, n, room[0]);
        for (i = first; i < last; i++) {
            y = mti_f32_read(b->y, i, 1, j, n, room[1]);
            mti_row_add(mti_row(y, 0), mti_row(bias, 0), mti_row(y, 0), n);
            mti_f32_write(y, b->y, i, j);
        }
    }
}

static void mti_cpu_bias_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_bias *b = (const mti_bias *)data;
    (void)thread;
    mti_cpu_column_sums(mt_tensor_cols(b->y, first, last - first), mt_tensor_cols(b->bias, first, last - first));
}

#if MT_HAS_CUDA
extern "C++" {

template <int TYPE> struct mti_bias_op { /* y += bias */
    struct input {
        mti_fetched<TYPE> y, bias;
    };
    mti_view y, bias;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(y, row, col, n, in.y);
        mti_fetch<WIDE>(bias, 0, col, n, in.bias);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float x[MTI_VECTOR];
        mti_values(in.y, x);
        mti_add_values(in.bias, x);
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_bias_forward(mt_context *ctx, mt_tensor y, mt_tensor bias) {
    mti_access how = mti_access_of(y, bias);
    return mti_by_type(how.type, [&](auto type) {
        mti_bias_op<type.value> op = {mti_view_of(y), mti_view_of(bias)};
        return mti_map_ahead<type.value>(ctx, "mt_bias_forward", op, how.wide, y.rows, y.cols);
    });
}

template <int TYPE> struct mti_value_op { /* column sums of dy */
    struct input {
        mti_fetched<TYPE> dy;
    };
    mti_view dy;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
    }
    template <bool WIDE>
    __device__ void finish(int64_t, int64_t, int, const input &in, float (*sums)[MTI_VECTOR]) const {
        mti_add_values(in.dy, sums[0]);
    }
};

static mt_status mti_cuda_bias_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias) {
    mti_access how = mti_access_of(dy);
    return mti_by_type(how.type, [&](auto type) {
        mti_value_op<type.value> op = {mti_view_of(dy)};
        return mti_columns<type.value, 2 * mti_ahead<type.value>::value, 1>(ctx, "mt_bias_backward", op, how.wide,
                                                                            dy.rows, dy.cols, &dbias);
    });
}

} /* extern "C++" */
#endif

MT_API mt_status mt_bias_forward(mt_context *ctx, mt_tensor y, mt_tensor bias) {
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_IN_OUT | MTI_AS_IS},
                     {"bias", &bias, 1, y.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_bias_forward", args, MTI_COUNT(args)));
    MT_TRY(mti_begin(&op, ctx, "mt_bias_forward", args, MTI_COUNT(args)));
    mti_bias b = {y, bias};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_bias_forward(ctx, y, bias),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_bias_forward, &b)));
}

MT_API mt_status mt_bias_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias) {
    mt_arg args[] = {{"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dbias", &dbias, 1, dy.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_bias_backward", args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, "mt_bias_backward", "dbias", dbias, "dy", dy));
    MT_TRY(mti_begin(&op, ctx, "mt_bias_backward", args, MTI_COUNT(args)));
    mti_bias b = {dy, dbias};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_bias_backward(ctx, dy, dbias),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_bias_backward, &b)));
}

/* ---- >>activation ------------------------------------------------------------------------------------------------ */

/* Gate and up are the columns of h, and of its bias or of the gradient of that. */
static mt_status mti_expect_gates(mt_context *ctx, const char *where, mt_activation kind, mt_tensor h,
                                  const char *bias_name, mt_tensor bias) {
    if (kind != MT_SWIGLU) return MT_SUCCESS;
    MT_TRY(mt_parts_check(ctx, where, "h", h, 2));
    return mt_parts_check(ctx, where, bias_name, bias, 2);
}

static mt_status mti_expect_activation(mt_context *ctx, const char *where, mt_activation kind) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_enum(ctx, where, NULL, "kind", (int)kind, MT_ACTIVATION_WORDS));
    return mti_numbers_agree(ctx, where, "kind", mt_none(), 1, 1, (double)kind);
}

/* The number of columns of h if y has `cols` columns. */
static int64_t mti_activation_width(mt_activation kind, int64_t cols) {
    return kind == MT_SWIGLU ? mt_size_mul(2, cols) : cols;
}

/* The formulas below give no NaN for finite x, and keep the precision of 1 - sigmoid where sigmoid is close to 1.
   `least` is that of mti_exp_to_88. low and high are numbers of mti_unknown, too. */

/* e^-2u as a power of two, where 0.5 x (1 + tanh u) = x / (1 + e^-2u). Its exponent is below 126 for |x| <= 10. */
MT_INLINE float mti_gelu_tanh_exponent(float x) { return x * (-2.30220819f - 0.102943242f * (x * x)); }

/* low is -10 and least -127. Below low, the result is that of low, -1.2e-37. */
MT_INLINE float mti_gelu_tanh(float x, float low, float least) {
    float t = x < low ? low : x, z = mti_gelu_tanh_exponent(t);
    return t / (1.0f + mti_exp2(z < least ? least : z));
}

/* Outside of [low, high] = [-10, 10], the slope is 0 or 1. */
MT_INLINE float mti_gelu_tanh_slope(float x, float low, float high) {
    float above = x < low ? low : x, t = above > high ? high : above;
    float e = mti_exp2(mti_gelu_tanh_exponent(t)), s = 1.0f / (1.0f + e);
    return s * (1.0f + t * (1.59576917f + 0.214064449f * (t * t)) * (e * s));
}

MT_INLINE float mti_gelu_erf(float x, float least) {
    return x * mti_normal_cdf(x, mti_exp_to_88(-0.5f * x * x, least));
}

MT_INLINE float mti_gelu_erf_slope(float x, float least) {
    float e = mti_exp_to_88(-0.5f * x * x, least);
    return mti_normal_cdf(x, e) + x * (0.398942280f * e);
}

/* Below least, the result is that of least, -5e-37. */
MT_INLINE float mti_silu(float x, float least) {
    float t = x < least ? least : x;
    return t / (1.0f + mti_exp_to_88(-t, least));
}

static MT_HOST_DEVICE float mti_relu(float x) { return x < 0.0f ? 0.0f : x; } /* NaN stays NaN */

/* The same, for loops on a CPU that compute with the result. */
MT_INLINE float mti_relu_masked(float x) { return mti_select(x < 0.0f, 0.0f, x); }

/* 1 or 0, and NaN for NaN. Bit masks select the result, as in mti_exp. 0x3f800000 are the bits of 1. */
MT_INLINE MT_HOST_DEVICE float mti_relu_slope(float x) {
    uint32_t positive = 0u - (uint32_t)(x > 0.0f), number = 0u - (uint32_t)(x == x);
    return mt_f32_from_bits((0x3f800000u & positive) | (mt_f32_bits(x) & ~number));
}

/* 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = e^-2|x|. Nothing cancels, and the relative error is at most 3.2e-7 where the
   slope is above 1e-37. */
MT_INLINE float mti_tanh_slope(float x, float least) {
    float e = mti_exp_to_88(-2.0f * mti_abs(x), least), s = 1.0f / (1.0f + e);
    return 4.0f * e * (s * s);
}

static void mti_gelu_tanh_row(const float *h, float *y, int64_t n) {
    float low = mti_unknown(-10.0f), least = mti_unknown(-127.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_gelu_tanh(h[j], low, least);
}

static void mti_gelu_erf_row(const float *h, float *y, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_gelu_erf(h[j], least);
}

static void mti_squared_relu_row(const float *h, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float x = mti_relu_masked(h[j]);
        y[j] = x * x;
    }
}

static void mti_relu_row(const float *h, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_relu(h[j]);
}

static void mti_tanh_row(const float *h, float *y, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_tanh(h[j], least);
}

static void mti_swiglu_row(const float *gate, const float *up, float *y, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_silu(gate[j], least) * up[j];
}

static void mti_gelu_tanh_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    float low = mti_unknown(-10.0f), high = mti_unknown(10.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * mti_gelu_tanh_slope(h[j], low, high);
}

static void mti_gelu_erf_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * mti_gelu_erf_slope(h[j], least);
}

static void mti_squared_relu_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * (2.0f * mti_relu_masked(h[j]));
}

static void mti_relu_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * mti_relu_slope(h[j]);
}

static void mti_tanh_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * mti_tanh_slope(h[j], least);
}

/* gate is limited to at least -80, so that e^-gate does not overflow. */
static void mti_swiglu_backward_row(const float *gate, const float *up, const float *dy, float *dgate, float *dup,
                                    int64_t n) {
    float least = mti_unknown(-88.0f), low = mti_unknown(-80.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float g = gate[j] < low ? low : gate[j], u = up[j], d = dy[j];
        float e = mti_exp_to_88(-g, least);
        float s = 1.0f / (1.0f + e);
        dgate[j] = d * u * s * (1.0f + g * (e * s));
        dup[j] = d * g * s;
    }
}

typedef struct mti_activate {
    mt_activation kind;
    mt_tensor h, bias, y;
} mti_activate;

/* The columns of a block where several streams are read, and how many blocks ahead memory is fetched. */
#define MTI_ACTIVATION_BLOCK 256
#define MTI_ACTIVATION_AHEAD 4

/* Moves a place ahead, in the columns [first, last) of `rows` rows. Returns 0 if there is no whole block. */
static int mti_activation_ahead(int64_t *i, int64_t *j, int64_t rows, int64_t first, int64_t last) {
    *j += MTI_ACTIVATION_AHEAD * MTI_ACTIVATION_BLOCK;
    if (*j >= last) *j -= last - first, ++*i;
    return *i < rows && *j >= first && *j + MTI_ACTIVATION_BLOCK <= last;
}

/* Begins to load a block into the cache. The processor itself is late with several streams, between exponentials. */
static void mti_activation_fetch(mt_tensor t, int64_t i, int64_t j) {
    const char *x = (const char *)mti_bytes_at(t, i, j);
    int64_t at, bytes = MTI_ACTIVATION_BLOCK * (int64_t)mt_dtype_size(t.dtype);
    for (at = 0; at < bytes; at += 64) MTI_PREFETCH(x + at);
}

/* Processes n <= MTI_BLOCK columns of row i, from j on, so that the bias, the activation and the column sums
   read the cache instead of memory. For MT_SWIGLU, h[0] is gate and h[1] is up. y is computed from the sum of h and
   bias before it is rounded. */
static void mti_activation_block(const mti_activate *f, int64_t i, int64_t j, int64_t n) {
    float room[4][MTI_BLOCK], *h[2] = {NULL, NULL}, *y;
    mt_tensor out = mti_f32_place(f->y, i, 1, j, n, room[0]);
    int part;
    for (part = 0; part < (f->kind == MT_SWIGLU ? 2 : 1); part++) {
        int64_t col = j + part * f->y.cols;
        mt_tensor in = mti_f32_read(f->h, i, 1, col, n, room[1 + part]);
        h[part] = mti_row(in, 0);
        if (!f->bias.data) continue;
        mti_row_add(h[part], mti_row(mti_f32_read(f->bias, 0, 1, col, n, room[3]), 0), h[part], n);
        mti_f32_write(in, f->h, i, col);
    }
    y = mti_row(out, 0);
    if (f->kind == MT_GELU_TANH) mti_gelu_tanh_row(h[0], y, n);
    else if (f->kind == MT_GELU_ERF) mti_gelu_erf_row(h[0], y, n);
    else if (f->kind == MT_SQUARED_RELU) mti_squared_relu_row(h[0], y, n);
    else if (f->kind == MT_RELU) mti_relu_row(h[0], y, n);
    else if (f->kind == MT_TANH) mti_tanh_row(h[0], y, n);
    else mti_swiglu_row(h[0], h[1], y, n);
    mti_f32_write(out, f->y, i, j);
}

static void mti_cpu_activation_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_activate *f = (const mti_activate *)data;
    int64_t i, j, n = f->y.cols, block = f->kind == MT_SWIGLU ? MTI_ACTIVATION_BLOCK : MTI_BLOCK;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < n; j += block) {
            int64_t row = i, col = j;
            if (f->kind == MT_SWIGLU && mti_activation_ahead(&row, &col, last, 0, n)) {
                mti_activation_fetch(f->h, row, col);
                mti_activation_fetch(f->h, row, col + n);
            }
            mti_activation_block(f, i, j, mt_min(block, n - j));
        }
}

typedef struct mti_activation_slopes {
    mt_activation kind;
    mt_tensor h, dy, dh, dbias;
} mti_activation_slopes;

/* The same for n <= MTI_ACTIVATION_BLOCK columns of backward. All of h is read before dh is written: dh may be h. */
static void mti_activation_backward_block(const mti_activation_slopes *b, int64_t i, int64_t j, int64_t n) {
    float room[5][MTI_ACTIVATION_BLOCK], *h[2] = {NULL, NULL}, *dh[2] = {NULL, NULL};
    float *dy = mti_row(mti_f32_read(b->dy, i, 1, j, n, room[0]), 0);
    mt_tensor out[2];
    int part, parts = b->kind == MT_SWIGLU ? 2 : 1;
    for (part = 0; part < parts; part++) {
        h[part] = mti_row(mti_f32_read(b->h, i, 1, j + part * b->dy.cols, n, room[1 + part]), 0);
        out[part] = mti_f32_place(b->dh, i, 1, j + part * b->dy.cols, n, room[3 + part]);
        dh[part] = mti_row(out[part], 0);
    }
    if (b->kind == MT_GELU_TANH) mti_gelu_tanh_backward_row(h[0], dy, dh[0], n);
    else if (b->kind == MT_GELU_ERF) mti_gelu_erf_backward_row(h[0], dy, dh[0], n);
    else if (b->kind == MT_SQUARED_RELU) mti_squared_relu_backward_row(h[0], dy, dh[0], n);
    else if (b->kind == MT_RELU) mti_relu_backward_row(h[0], dy, dh[0], n);
    else if (b->kind == MT_TANH) mti_tanh_backward_row(h[0], dy, dh[0], n);
    else mti_swiglu_backward_row(h[0], h[1], dy, dh[0], dh[1], n);
    for (part = 0; part < parts; part++) {
        int64_t col = j + part * b->dy.cols;
        float *dbias = b->dbias.data ? mti_row(b->dbias, 0) + col : NULL;
        if (dbias) mti_row_add(dbias, dh[part], dbias, n);
        mti_f32_write(out[part], b->dh, i, col);
    }
}

/* A range of columns of dh and dbias. */
static void mti_cpu_activation_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_activation_slopes *b = (const mti_activation_slopes *)data;
    int64_t i, j;
    (void)thread;
    for (i = 0; i < b->dy.rows; i++)
        for (j = first; j < last; j += MTI_ACTIVATION_BLOCK) {
            int64_t row = i, col = j;
            if (mti_activation_ahead(&row, &col, b->dy.rows, first, last)) {
                mti_activation_fetch(b->h, row, col);
                mti_activation_fetch(b->dy, row, col);
                if (b->kind == MT_SWIGLU) mti_activation_fetch(b->h, row, col + b->dy.cols);
            }
            mti_activation_backward_block(b, i, j, mt_min(MTI_ACTIVATION_BLOCK, last - j));
        }
}

#if MT_HAS_CUDA
extern "C++" {

/* For MT_SWIGLU, mti_activation_of is SiLU. `fast` is explained at mti_cuda_exp. */
static __device__ __forceinline__ float mti_activation_of(int kind, int fast, float x) {
    if (kind == MT_GELU_ERF && fast) return x * mti_cuda_normal_cdf(x, __expf(-0.5f * x * x));
    if (kind == MT_GELU_ERF) return 0.5f * x * erfcf(x * -0.70710678f); /* nothing cancels in the left tail */
    if (kind == MT_SQUARED_RELU) return mti_relu(x) * mti_relu(x);
    if (kind == MT_RELU) return mti_relu(x);
    if (kind == MT_TANH) return tanhf(x);
    float u = kind == MT_GELU_TANH ? -1.5957691216f * (x + 0.044715f * x * x * x) : -x;
    return mti_cuda_quotient(fast, x, 1.0f + mti_cuda_exp(fast, u));
}

static __device__ __forceinline__ float mti_activation_slope(int kind, int fast, float x) {
    if (kind == MT_GELU_ERF) {
        float e = mti_cuda_exp(fast, -0.5f * x * x);
        return (fast ? mti_cuda_normal_cdf(x, e) : 0.5f * erfcf(x * -0.70710678f)) + x * 0.3989422804f * e;
    }
    if (kind == MT_SQUARED_RELU) return 2.0f * mti_relu(x);
    if (kind == MT_RELU) return mti_relu_slope(x);
    if (kind == MT_TANH) {
        float e = mti_cuda_exp(fast, -2.0f * fabsf(x)), s = mti_cuda_quotient(fast, 1.0f, 1.0f + e);
        return 4.0f * e * (s * s);
    }
    if (kind == MT_GELU_TANH) {
        float u = -1.5957691216f * (x + 0.044715f * x * x * x);
        float s = mti_cuda_quotient(fast, 1.0f, 1.0f + mti_cuda_exp(fast, u));
        return s + x * s * (1.0f - s) * 1.5957691216f * (1.0f + 0.134145f * x * x);
    }
    float s = mti_cuda_quotient(fast, 1.0f, 1.0f + mti_cuda_exp(fast, -x));
    return s * (1.0f + x * (1.0f - s));
}

/* The kind is a template argument, so that no element branches on it, or MTI_ANY_TYPE: then op.kind is read. */
template <int TYPE, int KIND>
struct mti_activation_op { /* h += bias, then y = act(h). up is `width` columns after gate */
    struct input {
        mti_fetched<TYPE> h, bias, up, up_bias;
    };
    mti_view h, bias, y;
    int kind;
    int64_t width;
    __device__ int kind_of() const { return KIND == MTI_ANY_TYPE ? kind : KIND; }
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(h, row, col, n, in.h);
        if (kind_of() == MT_SWIGLU) mti_fetch<WIDE>(h, row, col + width, n, in.up);
        if (!bias.data) return;
        mti_fetch<WIDE>(bias, 0, col, n, in.bias);
        if (kind_of() == MT_SWIGLU) mti_fetch<WIDE>(bias, 0, col + width, n, in.up_bias);
    }
    template <bool WIDE>
    __device__ void biased(int64_t row, int64_t col, int n, const mti_fetched<TYPE> &in, const mti_fetched<TYPE> &b,
                           float *x) const {
        mti_values(in, x);
        if (!bias.data) return;
        mti_add_values(b, x);
        mti_store<WIDE, TYPE>(h, row, col, n, x);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float x[MTI_VECTOR], up[MTI_VECTOR];
        int fast = mti_type_of<TYPE>(y) != MT_F32;
        biased<WIDE>(row, col, n, in.h, in.bias, x);
        if (kind_of() == MT_SWIGLU) biased<WIDE>(row, col + width, n, in.up, in.up_bias, up);
        for (int j = 0; j < MTI_VECTOR; j++) {
            x[j] = mti_activation_of(kind_of(), fast, x[j]);
            if (kind_of() == MT_SWIGLU) x[j] *= up[j];
        }
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

/* The access of views of which MT_SWIGLU has two halves. */
static mti_access mti_activation_access(mt_activation kind, mti_access how, int64_t cols) {
    if (kind == MT_SWIGLU && cols % MTI_VECTOR != 0) how.type = MTI_ANY_TYPE, how.wide = 0;
    return how;
}

static mt_status mti_cuda_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor bias,
                                             mt_tensor y) {
    mti_access how = mti_activation_access(kind, mti_access_of(h, bias, y), y.cols);
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<MT_ACTIVATION_COUNT>((int)kind, [&](auto k) {
            const int TYPE = decltype(type)::value, KIND = TYPE == MTI_ANY_TYPE ? MTI_ANY_TYPE : decltype(k)::value;
            mti_activation_op<TYPE, KIND> op = {mti_view_of(h), mti_view_of(bias), mti_view_of(y), (int)kind, y.cols};
            return mti_map_ahead<TYPE>(ctx, "mt_activation_forward", op, how.wide, y.rows, y.cols);
        });
    });
}

/* Writes dh and adds it to the sums. For MT_SWIGLU, sums[0] is the sum of the gradients of gate and sums[1] that of the
   gradients of up. */
template <int TYPE, int KIND> struct mti_activation_backward_op {
    struct input {
        mti_fetched<TYPE> dy, h, up;
    };
    mti_view h, dy, dh;
    int kind;
    int64_t width;
    __device__ int kind_of() const { return KIND == MTI_ANY_TYPE ? kind : KIND; }
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
        mti_fetch<WIDE>(h, row, col, n, in.h);
        if (kind_of() == MT_SWIGLU) mti_fetch<WIDE>(h, row, col + width, n, in.up);
    }
    template <bool WIDE>
    __device__ void finish(int64_t row, int64_t col, int n, const input &in, float (*sums)[MTI_VECTOR]) const {
        float g[MTI_VECTOR], x[MTI_VECTOR], up[MTI_VECTOR];
        int fast = mti_type_of<TYPE>(dh) != MT_F32;
        mti_values(in.dy, g);
        mti_values(in.h, x);
        if (kind_of() == MT_SWIGLU) {
            mti_values(in.up, up);
            for (int j = 0; j < MTI_VECTOR; j++) {
                float gate = x[j];
                x[j] = g[j] * up[j] * mti_activation_slope(kind_of(), fast, gate);
                up[j] = g[j] * mti_activation_of(kind_of(), fast, gate);
                sums[1][j] += up[j];
            }
            mti_store<WIDE, TYPE>(dh, row, col + width, n, up);
        } else {
            for (int j = 0; j < MTI_VECTOR; j++) x[j] = g[j] * mti_activation_slope(kind_of(), fast, x[j]);
        }
        for (int j = 0; j < MTI_VECTOR; j++) sums[0][j] += x[j];
        mti_store<WIDE, TYPE>(dh, row, col, n, x);
    }
};

static mt_status mti_cuda_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor dy,
                                              mt_tensor dh, mt_tensor dbias) {
    const char *name = "mt_activation_backward";
    mti_access how = mti_activation_access(kind, mti_access_of(h, dy, dh), dy.cols);
    mt_tensor outs[2];
    outs[0] = dbias.data ? mt_tensor_cols(dbias, 0, dy.cols) : dbias;
    if (kind == MT_SWIGLU) outs[1] = dbias.data ? mt_tensor_cols(dbias, dy.cols, dy.cols) : dbias;
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<MT_ACTIVATION_COUNT>((int)kind, [&](auto k) {
            const int TYPE = decltype(type)::value, SUMS = decltype(k)::value == MT_SWIGLU ? 2 : 1;
            const int KIND = TYPE == MTI_ANY_TYPE && SUMS == 1 ? MTI_ANY_TYPE : decltype(k)::value;
            mti_activation_backward_op<TYPE, KIND> op = {mti_view_of(h), mti_view_of(dy), mti_view_of(dh), (int)kind,
                                                         dy.cols};
            return mti_columns<TYPE, mti_ahead<TYPE>::value, SUMS>(ctx, name, op, how.wide, dy.rows, dy.cols, outs);
        });
    });
}

} /* extern "C++" */
#endif

MT_API mt_status mt_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor bias, mt_tensor y) {
    static const char *const where = "mt_activation_forward";
    int64_t width = mti_activation_width(kind, y.cols);
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"h", &h, y.rows, width, MT_ARG_FLOAT, MT_ARG_IN | (bias.data ? MT_ARG_OUT : 0) | MTI_AS_IS},
                     {"bias", &bias, 1, width, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mti_expect_activation(ctx, where, kind));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "h", h));
    MT_TRY(mti_expect_gates(ctx, where, kind, h, "bias", bias));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    mti_activate f = {kind, h, bias, y};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_activation_forward(ctx, kind, h, bias, y),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_activation_forward, &f)));
}

MT_API mt_status mt_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor dy, mt_tensor dh,
                                        mt_tensor dbias) {
    static const char *const where = "mt_activation_backward";
    int64_t width = mti_activation_width(kind, dy.cols);
    mt_arg args[] = {{"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"h", &h, dy.rows, width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dh", &dh, dy.rows, width, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"dbias", &dbias, 1, width, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM | MT_ARG_OPTIONAL}};
    mti_operator op;
    MT_TRY(mti_expect_activation(ctx, where, kind));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "dh", dh, "dy", dy));
    MT_TRY(mti_expect_gates(ctx, where, kind, h, "dbias", dbias));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    mti_activation_slopes b = {kind, h, dy, dh, dbias};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_activation_backward(ctx, kind, h, dy, dh, dbias),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_activation_backward, &b)));
}

/* ---- >>linear: a product with bias and activation, as separate operators or with an epilogue of cuBLASLt --------- */

static mt_status mti_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y) {
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, x, weight, 0.0f, y));
    return bias.data ? mt_bias_forward(ctx, y, bias) : MT_SUCCESS;
}

static mt_status mti_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                               mt_tensor bias, mt_tensor h, mt_tensor y) {
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, x, weight, 0.0f, h));
    return mt_activation_forward(ctx, kind, h, bias, y);
}

/* dact = dy weight, then dh = dact * act'(h). */
static mt_status mti_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy, mt_tensor weight,
                                                mt_tensor h, mt_tensor dh, mt_tensor dbias) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor dact;
    mt_status status;
    MT_TRY(mt_arena_tensor(ctx, dh.dtype, dy.rows, weight.cols, &dact));
    status = mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, dy, weight, 0.0f, dact);
    if (status == MT_SUCCESS) status = mt_activation_backward(ctx, kind, h, dact, dh, dbias);
    mt_arena_release(ctx, mark);
    return status;
}

static mt_status mti_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, mt_tensor dweight, mt_tensor dbias) {
    if (dbias.data) MT_TRY(mt_bias_backward(ctx, dy, dbias));
    return mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, dy, x, 1.0f, dweight);
}

#if MT_HAS_CUDA
extern "C++" {

/* Whether cuBLASLt can take these views without converting them. */
static int mti_lt_is_direct(mt_tensor a, mt_tensor b, mt_tensor c) {
    return a.dtype == b.dtype && (c.dtype == MT_F32 || c.dtype == a.dtype) && mti_is_wide(a) && mti_is_wide(b) &&
           mti_is_wide(c) && a.rows > 0 && a.cols > 0 && b.rows > 0 && b.cols > 0;
}

/* Returns the leading dimension of the auxiliary matrix of an epilogue, or 0 if cuBLASLt cannot take this view. */
static int64_t mti_lt_ld_aux(mt_tensor aux, mt_tensor c) {
    int64_t ld = aux.rows <= 1 ? mt_round_up(aux.cols, 8) : mt_tensor_ld(aux);
    return aux.dtype == c.dtype && mti_is_wide(aux) && ld % 8 == 0 ? ld : 0;
}

/* Runs the product with its epilogue. For an f32 C, the epilogue writes the bias gradient to g->bias, and a kernel adds
   that to dbias. For a 16-bit C, a kernel sums the bias gradient in f32 instead. p->fused = whether cuBLASLt has the
   product. If it does not, separate(c, dbias) runs, because the heuristic may propose what cuBLASLt then refuses. */
template <typename Separate>
static mt_status mti_lt_fused(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g, mt_tensor dbias,
                              const Separate &separate) {
    MT_TRY(mti_lt_point(ctx, p, g));
    cublasStatus_t status = mti_lt_enqueue(ctx, lt, p, g);
    p->fused = !mti_lt_lacks(&p->key, status);
    if (!p->fused) return separate(g->c, dbias);
    MT_TRY(mti_lt_check(ctx, status, "cublasLtMatmul"));
    if (!dbias.data) return MT_SUCCESS;
    if (!g->bias) return mti_cuda_bias_backward(ctx, g->c, dbias);
    return mti_cuda_add(ctx, dbias, mt_tensor_f32((const float *)g->bias, 1, dbias.cols), dbias);
}

/* Replaces *t by a view of the same layout in the arena, filled with zeros. */
static mt_status mti_lt_zeros(mt_context *ctx, mt_tensor *t) {
    mt_tensor whole;
    MT_TRY(mt_arena_tensor(ctx, t->dtype, t->rows, mt_tensor_ld(*t), &whole));
    *t = mt_tensor_cols(whole, 0, t->cols);
    return mti_cuda_fill(ctx, whole, 0.0f);
}

/* *yes = whether the fused product is faster, or 0 during stream capture. The measured runs add to zeros in the arena,
   not to the gradients of the caller. */
template <typename Separate>
static mt_status mti_lt_measure(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, mti_lt_call g, mt_tensor dbias,
                                const Separate &separate, int *yes) {
    float fused = 0.0f, apart = 0.0f;
    int may_wait = 0;
    *yes = 0;
    MT_TRY(mti_lt_may_wait(ctx, &may_wait));
    if (!may_wait) return MT_SUCCESS;
    if (g.beta != 0.0f) MT_TRY(mti_lt_zeros(ctx, &g.c));
    if (dbias.data) MT_TRY(mti_lt_zeros(ctx, &dbias));
    MT_TRY(mti_lt_time(
        ctx, lt, [&]() { return mti_lt_fused(ctx, lt, p, &g, dbias, separate); }, &fused));
    MT_TRY(mti_lt_time(
        ctx, lt, [&]() { return separate(g.c, dbias); }, &apart));
    *yes = fused < apart;
    return MT_SUCCESS;
}

/* Decides whether a plan is fused. With MT_EPILOGUE_FUSED it always is. With MT_EPILOGUE_MEASURED it is if that is
   faster, but not if the arena is too small for the measurement, during stream capture, or if half of the plans have
   `stays`. A decision by measurement is kept, because the two ways give different bits. After an error nothing is
   decided, and the next call measures again. */
template <typename Separate>
static mt_status mti_lt_decide(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call &g, mt_tensor dbias,
                               const Separate &separate) {
    size_t mark = mt_arena_mark(ctx), peak = mt_arena_peak(ctx);
    size_t bytes = (g.beta != 0.0f ? mti_lt_bytes(g.c) : 0) + (dbias.data ? mti_lt_bytes(dbias) : 0);
    int fused = mt_gemm_get_options(ctx).epilogue == MT_EPILOGUE_FUSED, stays = !fused && lt->stay < MTI_LT_PLANS / 2;
    if (stays && bytes <= mt_arena_available(ctx)) {
        mt_status status = mti_lt_measure(ctx, lt, p, g, dbias, separate, &fused);
        mt_arena_release(ctx, mark);
        mt_arena_set_peak(ctx, peak);
        MT_TRY(status);
    }
    p->fused = fused;
    p->stays = stays;
    lt->stay += stays;
    p->undecided = 0;
    return MT_SUCCESS;
}

/* Runs the fused product or separate(c, dbias), as the plan says. Both write or add to g->c and dbias. */
template <typename Separate>
static mt_status mti_lt_either(mt_context *ctx, mti_lt_call *g, mt_tensor dbias, const Separate &separate) {
    mti_lt *lt;
    mti_lt_plan *p = NULL;
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mti_lt_open(ctx, &lt));
    if (dbias.data && g->c.dtype == MT_F32) MT_TRY(mt_arena_alloc(ctx, (size_t)dbias.cols * sizeof(float), &g->bias));
    MT_TRY(mti_lt_plan_of(ctx, lt, g, &p));
    if (p->undecided) MT_TRY(mti_lt_decide(ctx, lt, p, *g, dbias, separate));
    return p->fused ? mti_lt_fused(ctx, lt, p, g, dbias, separate) : separate(g->c, dbias);
}

/* mti_lt_either, after which the arena memory is released. */
template <typename Separate>
static mt_status mti_lt_linear(mt_context *ctx, mti_lt_call *g, mt_tensor dbias, const Separate &separate) {
    size_t mark = mt_arena_mark(ctx);
    mt_status status = mti_lt_either(ctx, g, dbias, separate);
    mt_arena_release(ctx, mark);
    return status;
}

static mti_matmul mti_lt_sizes(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float beta) {
    mti_matmul s;
    memset(&s, 0, sizeof s);
    s.trans_a = trans_a, s.trans_b = trans_b;
    s.m = m, s.n = n, s.k = k;
    s.alpha = 1.0f, s.beta = beta;
    return s;
}

/* mti_cuda_linear_forward and the three functions after it call mti_lt_linear if cuBLASLt has the epilogue and can take
   all views as they are. Otherwise they call the separate operators. */
static mt_status mti_cuda_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y) {
    mti_matmul s = mti_lt_sizes(0, 1, x.rows, weight.rows, x.cols, 0.0f);
    auto separate = [&](mt_tensor c, mt_tensor) { return mti_linear_forward(ctx, x, weight, bias, c); };
    mti_lt_call g;
    if (!bias.data || bias.dtype != y.dtype || !mti_is_wide(bias) || !mti_lt_is_direct(x, weight, y))
        return separate(y, mt_none());
    mti_lt_call_make(&s, x, weight, y, CUBLASLT_EPILOGUE_BIAS, &g);
    g.bias = bias.data;
    return mti_lt_linear(ctx, &g, mt_none(), separate);
}

/* cuBLASLt has an epilogue that also writes h for MT_GELU_TANH only. That of ReLU writes one bit of each element. */
static mt_status mti_cuda_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                                    mt_tensor bias, mt_tensor h, mt_tensor y) {
    mti_matmul s = mti_lt_sizes(0, 1, x.rows, weight.rows, x.cols, 0.0f);
    auto separate = [&](mt_tensor c, mt_tensor) {
        return mti_linear_activation_forward(ctx, kind, x, weight, bias, h, c);
    };
    int64_t ld_aux = mti_lt_ld_aux(h, y);
    mti_lt_call g;
    if (kind != MT_GELU_TANH || ld_aux == 0 || !mti_lt_is_direct(x, weight, y) ||
        (bias.data && (bias.dtype != y.dtype || !mti_is_wide(bias))))
        return separate(y, mt_none());
    mti_lt_call_make(&s, x, weight, y, bias.data ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX, &g);
    g.key.ld_aux = ld_aux;
    g.bias = bias.data;
    g.aux = h.data;
    return mti_lt_linear(ctx, &g, mt_none(), separate);
}

static mt_status mti_cuda_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy,
                                                     mt_tensor weight, mt_tensor h, mt_tensor dh, mt_tensor dbias) {
    mti_matmul s = mti_lt_sizes(0, 0, dy.rows, weight.cols, dy.cols, 0.0f);
    auto separate = [&](mt_tensor c, mt_tensor db) {
        return mti_linear_activation_backward(ctx, kind, dy, weight, h, c, db);
    };
    int64_t ld_aux = mti_lt_ld_aux(h, dh);
    int sums = dbias.data && dh.dtype == MT_F32;
    mti_lt_call g;
    if (kind != MT_GELU_TANH || ld_aux == 0 || !mti_lt_is_direct(dy, weight, dh)) return separate(dh, dbias);
    mti_lt_call_make(&s, dy, weight, dh, sums ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU, &g);
    g.key.ld_aux = ld_aux;
    g.aux = h.data;
    return mti_lt_linear(ctx, &g, dbias, separate);
}

static mt_status mti_cuda_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, mt_tensor dweight,
                                           mt_tensor dbias) {
    mti_matmul s = mti_lt_sizes(1, 0, dy.cols, x.cols, dy.rows, 1.0f);
    auto separate = [&](mt_tensor c, mt_tensor db) { return mti_linear_gradients(ctx, dy, x, c, db); };
    mti_lt_call g;
    if (!dbias.data || dweight.dtype != MT_F32 || !mti_lt_is_direct(dy, x, dweight)) return separate(dweight, dbias);
    /* B, because our first operand is the second one of cuBLASLt */
    mti_lt_call_make(&s, dy, x, dweight, CUBLASLT_EPILOGUE_BGRADB, &g);
    return mti_lt_linear(ctx, &g, dbias, separate);
}

} /* extern "C++" */
#endif

/* Evaluates `fused` if the options of the context ask for products with an epilogue, otherwise `separate`. The rule of
   the whole was applied before, so those of the separate operators are not. */
#if MT_HAS_CUDA
#define MTI_FUSED(ctx, fused, separate)                                                                                \
    (mt_check_pause(ctx), mt_check_resume(ctx, mt_context_device(ctx) == MT_DEVICE_CUDA &&                             \
                                                       mt_gemm_get_options(ctx).epilogue != MT_EPILOGUE_SEPARATE       \
                                                   ? (fused)                                                           \
                                                   : (separate)))
#else
#define MTI_FUSED(ctx, fused, separate) (mt_check_pause(ctx), mt_check_resume(ctx, separate))
#endif

MT_API mt_status mt_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y) {
    static const char *const where = "mt_linear_forward";
    mt_arg args[] = {{"weight", &weight, weight.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"x", &x, x.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"y", &y, x.rows, weight.rows, MT_ARG_FLOAT, MT_ARG_OUT},
                     {"bias", &bias, 1, weight.rows, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL}};
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "x", x));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "weight", weight));
    MT_TRY(mt_parts_agree(ctx, where, weight, bias));
    MT_TRY(mt_parts_agree(ctx, where, weight, x));
    MT_TRY(mti_apply_rule_of(ctx, where, args, MTI_COUNT(args)));
    return MTI_FUSED(ctx, mti_cuda_linear_forward(ctx, x, weight, bias, y),
                     mti_linear_forward(ctx, x, weight, bias, y));
}

/* The rule of mt_linear_activation_forward. When x and weight are split by columns, each rank has a term of h, and the
   activation of a term is none of their sum: the message then names the calls that compute it. */
static mt_status mti_linear_activation_rule(mt_context *ctx, const char *where, const mt_arg *args, int count) {
    static const mt_rule products = {"weight x y h bias", "RR*** rR*** Rr*** cc***", "rr***"};
    mt_status status = mti_apply_rule_of(ctx, where, args, count);
    char message[MT_ERROR_BYTES];
    if (status != MT_ERR_ARGUMENT || !strstr(mt_last_error(ctx), "split by columns")) return status;
    snprintf(message, sizeof message, "%s", mt_last_error(ctx));
    if (mti_apply_rule(ctx, where, &products, args, 2)) return mt_fail(ctx, status, "%s", message);
    return mt_fail(ctx, status,
                   "%.*s: x and weight are split by columns, so each rank has a term of their product: call "
                   "mt_linear_forward, mt_reduce_from_tensor_region_forward and mt_activation_forward instead",
                   (int)strcspn(message, ":"), message);
}

MT_API mt_status mt_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                              mt_tensor bias, mt_tensor h, mt_tensor y) {
    static const char *const where = "mt_linear_activation_forward";
    int64_t width = mti_activation_width(kind, y.cols);
    mt_arg args[] = {{"weight", &weight, weight.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"x", &x, x.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_OUT},
                     {"h", &h, x.rows, weight.rows, MT_ARG_FLOAT, MT_ARG_OUT},
                     {"bias", &bias, 1, width, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL},
                     {"h", &h, y.rows, width, MT_ARG_FLOAT, MT_ARG_OUT}}; /* the size that y needs */
    MT_TRY(mti_expect_activation(ctx, where, kind));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "h", h, "x", x));
    MT_TRY(mt_check_apart(ctx, where, "h", h, "weight", weight));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "h", h));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "x", x));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "weight", weight));
    MT_TRY(mt_parts_agree(ctx, where, weight, bias));
    MT_TRY(mti_linear_activation_rule(ctx, where, args, MTI_COUNT(args) - 1));
    MT_TRY(mti_expect_gates(ctx, where, kind, h, "bias", bias));
    return MTI_FUSED(ctx, mti_cuda_linear_activation_forward(ctx, kind, x, weight, bias, h, y),
                     mti_linear_activation_forward(ctx, kind, x, weight, bias, h, y));
}

MT_API mt_status mt_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy, mt_tensor weight,
                                               mt_tensor h, mt_tensor dh, mt_tensor dbias) {
    static const char *const where = "mt_linear_activation_backward";
    int64_t width = mti_activation_width(kind, weight.cols);
    mt_arg args[] = {{"weight", &weight, weight.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"dy", &dy, dy.rows, weight.rows, MT_ARG_FLOAT, MT_ARG_IN},
                     {"h", &h, dy.rows, width, MT_ARG_FLOAT, MT_ARG_IN},
                     {"dh", &dh, dy.rows, width, MT_ARG_FLOAT, MT_ARG_OUT},
                     {"dbias", &dbias, 1, width, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM | MT_ARG_OPTIONAL}};
    MT_TRY(mti_expect_activation(ctx, where, kind));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "dh", dh, "dy", dy));
    MT_TRY(mt_check_apart(ctx, where, "dh", dh, "h", h));
    MT_TRY(mt_check_apart(ctx, where, "dh", dh, "weight", weight));
    MT_TRY(mti_expect_gates(ctx, where, kind, h, "dbias", dbias));
    MT_TRY(mti_apply_rule_of(ctx, where, args, MTI_COUNT(args)));
    return MTI_FUSED(ctx, mti_cuda_linear_activation_backward(ctx, kind, dy, weight, h, dh, dbias),
                     mti_linear_activation_backward(ctx, kind, dy, weight, h, dh, dbias));
}

MT_API mt_status mt_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, mt_tensor dweight, mt_tensor dbias) {
    static const char *const where = "mt_linear_gradients";
    mt_arg args[] = {{"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"x", &x, dy.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"dweight", &dweight, dy.cols, x.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_PRODUCT | MT_ARG_SUM},
                     {"dbias", &dbias, 1, dy.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM | MT_ARG_OPTIONAL}};
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "dweight", dweight, "dy", dy));
    MT_TRY(mt_check_apart(ctx, where, "dweight", dweight, "x", x));
    MT_TRY(mt_check_apart(ctx, where, "dbias", dbias, "dy", dy));
    MT_TRY(mt_parts_agree(ctx, where, dweight, dbias));
    MT_TRY(mti_apply_rule_of(ctx, where, args, MTI_COUNT(args)));
    return MTI_FUSED(ctx, mti_cuda_linear_gradients(ctx, dy, x, dweight, dbias),
                     mti_linear_gradients(ctx, dy, x, dweight, dbias));
}

/* ---- >>norm ------------------------------------------------------------------------------------------------------ */

static mt_status mti_expect_norm(mt_context *ctx, const char *where, mt_norm_kind kind, mt_tensor x,
                                 const char *bias_name, mt_tensor bias) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_enum(ctx, where, NULL, "kind", (int)kind, MT_NORM_WORDS));
    if (x.cols == 0) return mt_fail(ctx, MT_ERR_SHAPE, "%s: x is [%lld, 0], needs columns", where, (long long)x.rows);
    if (kind == MT_RMS_NORM && bias.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is [%lld, %lld], but RMSNorm has no bias: pass mt_none()", where,
                       bias_name, (long long)bias.rows, (long long)bias.cols);
    return MT_SUCCESS;
}

typedef struct mti_norm {
    mt_norm_kind kind;
    mt_tensor x, gain, bias, y, stats;
    float eps;
    mt_tensor rooms; /* a block for each thread, if x or y has a 16-bit type */
} mti_norm;

#define MTI_NORM_BLOCK 4 /* rows that a loop works on at once: their sums are independent, and gain is read once */

/* sums[r] = the sum of row r of x or, if `squares`, a constant, that of (x - shift[r])^2. `rows` is a constant up to
   MTI_NORM_BLOCK. With squares, it also loads the rows of `next` into L1: processors do not do so for short rows. */
MT_INLINE void mti_norm_row_sums(mt_tensor x, int rows, int squares, const float *shift, mt_tensor next, float *sums) {
    float lanes[MTI_NORM_BLOCK][MTI_PARTIALS];
    int64_t ld = mt_tensor_ld(x), n = x.cols, j;
    const float *p = mti_row(x, 0);
    int r, l;
    for (r = 0; r < rows; r++) mti_lanes_clear(lanes[r]);
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS) {
        if (squares) mti_prefetch_columns(next, rows, j);
        for (r = 0; r < rows; r++)
            for (l = 0; l < MTI_PARTIALS; l++) {
                float d = p[r * ld + j + l] - (squares ? shift[r] : 0.0f);
                lanes[r][l] += squares ? d * d : d;
            }
    }
    for (r = 0; r < rows; r++) {
        for (l = 0; j + l < n; l++) {
            float d = p[r * ld + j + l] - (squares ? shift[r] : 0.0f);
            lanes[r][l] += squares ? d * d : d;
        }
        sums[r] = mti_lanes_sum(lanes[r]);
    }
}

/* y = (x - mean) * rstd * gain + bias, for `rows` rows, a constant. For RMSNorm, mean is 0. */
MT_INLINE void mti_norm_apply(mt_tensor x, int rows, const float *mean, const float *rstd, const float *gain,
                              const float *bias, mt_tensor y) {
    int64_t ld_x = mt_tensor_ld(x), ld_y = mt_tensor_ld(y), j;
    const float *p = mti_row(x, 0);
    float *out = mti_row(y, 0);
    int r;
    if (bias) {
        MT_INDEPENDENT
        for (j = 0; j < x.cols; j++) {
            MTI_UNROLL
            for (r = 0; r < rows; r++) out[r * ld_y + j] = (p[r * ld_x + j] - mean[r]) * rstd[r] * gain[j] + bias[j];
        }
    } else {
        MT_INDEPENDENT
        for (j = 0; j < x.cols; j++) {
            MTI_UNROLL
            for (r = 0; r < rows; r++) out[r * ld_y + j] = (p[r * ld_x + j] - mean[r]) * rstd[r] * gain[j];
        }
    }
}

/* Computes rows [i, i + rows). `rows` is a constant. The first loop reads the rows from memory, the others from L1. */
MT_INLINE void mti_norm_block(const mti_norm *f, int64_t i, int rows, float *room) {
    float mean[MTI_NORM_BLOCK] = {0}, rstd[MTI_NORM_BLOCK];
    int64_t n = f->x.cols;
    mt_tensor x = mti_f32_read(f->x, i, rows, 0, n, room), y = mti_f32_place(f->y, i, rows, 0, n, room);
    mt_tensor next = mt_tensor_rows(f->x, n <= MTI_BLOCK && i + 2 * rows <= f->x.rows ? i + rows : i, rows);
    int r;
    if (f->kind == MT_LAYER_NORM) mti_norm_row_sums(x, rows, 0, NULL, next, mean);
    for (r = 0; r < rows; r++) mean[r] /= (float)n;
    mti_norm_row_sums(x, rows, 1, mean, next, rstd);
    for (r = 0; r < rows; r++) rstd[r] = 1.0f / sqrtf(rstd[r] / (float)n + f->eps);
    mti_norm_apply(x, rows, mean, rstd, mti_row(f->gain, 0), mti_row(f->bias, 0), y);
    for (r = 0; r < rows && f->stats.data; r++) {
        mti_row(f->stats, i + r)[0] = mean[r];
        mti_row(f->stats, i + r)[1] = rstd[r];
    }
    mti_f32_write(y, f->y, i, 0);
}

/* The most rows of a block, so that they fit in L1. */
static int64_t mti_norm_rows(int64_t cols) { return cols <= MTI_BLOCK ? MTI_NORM_BLOCK : 1; }

static void mti_cpu_norm_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_norm *f = (const mti_norm *)data;
    int64_t i = first, most = mti_norm_rows(f->x.cols);
    float *room = mti_row(f->rooms, thread * most);
    for (; most > 1 && i + MTI_NORM_BLOCK <= last; i += MTI_NORM_BLOCK) mti_norm_block(f, i, MTI_NORM_BLOCK, room);
    for (; i < last; i++) mti_norm_block(f, i, 1, room);
}

static mt_status mti_norm_forward(mti_operator *op, mti_norm *f) {
    int narrow = f->x.dtype != MT_F32 || f->y.dtype != MT_F32;
    MT_TRY(mti_rooms(op, narrow ? mti_norm_rows(f->x.cols) : 0, f->x.cols, &f->rooms));
    if (op->on_cpu) mti_cpu_rows(op->ctx, f->x.rows, f->x.cols, mti_cpu_norm_forward, f);
    return MT_SUCCESS;
}

/* With g = dy * gain and xhat = (x - mean) * rstd: sums = (sum of g, sum of g * xhat). If `adds`, which is constant,
   dgain += dy * xhat. */
MT_INLINE void mti_norm_backward_sums(const float *x, float mean, float rstd, const float *gain, const float *dy,
                                      int adds, float *dgain, int64_t n, float sums[2]) {
    float g_lanes[MTI_PARTIALS], gx_lanes[MTI_PARTIALS];
    int64_t j;
    int l;
    mti_lanes_clear(g_lanes);
    mti_lanes_clear(gx_lanes);
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS) {
        MT_INDEPENDENT
        for (l = 0; l < MTI_PARTIALS; l++) {
            float xhat = (x[j + l] - mean) * rstd, g = dy[j + l] * gain[j + l];
            g_lanes[l] += g;
            gx_lanes[l] += g * xhat;
            if (adds) dgain[j + l] += dy[j + l] * xhat;
        }
    }
    for (l = 0; j + l < n; l++) {
        float xhat = (x[j + l] - mean) * rstd, g = dy[j + l] * gain[j + l];
        g_lanes[l] += g;
        gx_lanes[l] += g * xhat;
        if (adds) dgain[j + l] += dy[j + l] * xhat;
    }
    sums[0] = mti_lanes_sum(g_lanes);
    sums[1] = mti_lanes_sum(gx_lanes);
}

/* dx = rstd (g - mean(g) - xhat mean(g xhat)), plus dresidual if it is given. For RMSNorm, mean_g is 0. */
static void mti_norm_backward_apply(const float *x, float mean, float rstd, const float *gain, const float *dy,
                                    float mean_g, float mean_gx, const float *dresidual, float *dx, int64_t n) {
    int64_t j;
    if (dresidual) {
        MT_INDEPENDENT
        for (j = 0; j < n; j++)
            dx[j] = dresidual[j] + rstd * (dy[j] * gain[j] - mean_g - (x[j] - mean) * rstd * mean_gx);
    } else {
        MT_INDEPENDENT
        for (j = 0; j < n; j++) dx[j] = rstd * (dy[j] * gain[j] - mean_g - (x[j] - mean) * rstd * mean_gx);
    }
}

typedef struct mti_norm_slopes {
    mt_norm_kind kind;
    mt_tensor x, gain, stats, dy, dresidual, dx, dgain, dbias;
    int one_pass;    /* whoever computes a row of dx adds that row to dgain and dbias */
    mt_tensor rooms; /* three rows for each thread, if a view has a 16-bit type */
} mti_norm_slopes;

static float mti_norm_mean(const mti_norm_slopes *b, int64_t row) {
    return b->kind == MT_LAYER_NORM ? mti_row(b->stats, row)[0] : 0.0f;
}

#define MTI_NORM_COLS 512 /* columns of dgain and dbias that a thread sums at once: four rows of x and dy fit in L1 */

/* Adds n columns of rows [i, i + rows), from `first` on, to dgain and dbias, row after row. `rows` is a constant, up
   to 4. */
MT_INLINE void mti_norm_parameters_rows(const mti_norm_slopes *b, int64_t i, int rows, int64_t first, int64_t n) {
    float room[2][4 * MTI_NORM_COLS], mean[4], rstd[4];
    mt_tensor x_rows = mti_f32_read(b->x, i, rows, first, n, room[0]);
    mt_tensor dy_rows = mti_f32_read(b->dy, i, rows, first, n, room[1]);
    const float *x = mti_row(x_rows, 0), *dy = mti_row(dy_rows, 0);
    float *dgain = mti_row(b->dgain, 0) + first, *dbias = b->dbias.data ? mti_row(b->dbias, 0) + first : NULL;
    int64_t ld_x = mt_tensor_ld(x_rows), ld_dy = mt_tensor_ld(dy_rows), j;
    int r;
    for (r = 0; r < rows; r++) {
        mean[r] = mti_norm_mean(b, i + r);
        rstd[r] = mti_row(b->stats, i + r)[1];
    }
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float sum = dgain[j];
        MTI_UNROLL
        for (r = 0; r < rows; r++) sum += dy[r * ld_dy + j] * ((x[r * ld_x + j] - mean[r]) * rstd[r]);
        dgain[j] = sum;
    }
    if (!dbias) return;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float sum = dbias[j];
        MTI_UNROLL
        for (r = 0; r < rows; r++) sum += dy[r * ld_dy + j];
        dbias[j] = sum;
    }
}

/* A range of columns of dgain and dbias. */
static void mti_cpu_norm_parameters(void *data, int thread, int64_t first, int64_t last) {
    const mti_norm_slopes *b = (const mti_norm_slopes *)data;
    int64_t i, n, most = b->x.dtype == MT_F32 && b->dy.dtype == MT_F32 ? last - first : MTI_NORM_COLS;
    (void)thread;
    for (; first < last; first += n) {
        n = mt_min(most, last - first);
        for (i = 0; i + 4 <= b->x.rows; i += 4) mti_norm_parameters_rows(b, i, 4, first, n);
        for (; i < b->x.rows; i++) mti_norm_parameters_rows(b, i, 1, first, n);
    }
}

/* A range of rows of dx. */
static void mti_cpu_norm_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_norm_slopes *b = (const mti_norm_slopes *)data;
    const float *gain = mti_row(b->gain, 0);
    float *dgain = mti_row(b->dgain, 0), *dbias = mti_row(b->dbias, 0);
    int64_t i, n = b->x.cols;
    for (i = first; i < last; i++) {
        mt_tensor x_row = mti_f32_read(b->x, i, 1, 0, n, mti_row(b->rooms, 3 * thread));
        mt_tensor dy_row = mti_f32_read(b->dy, i, 1, 0, n, mti_row(b->rooms, 3 * thread + 1));
        mt_tensor residual = mti_f32_read(b->dresidual, i, 1, 0, n, mti_row(b->rooms, 3 * thread + 2));
        mt_tensor dx = mti_f32_place(b->dx, i, 1, 0, n, mti_row(b->rooms, 3 * thread));
        const float *x = mti_row(x_row, 0), *dy = mti_row(dy_row, 0);
        float mean = mti_norm_mean(b, i), rstd = mti_row(b->stats, i)[1], sums[2];
        if (b->one_pass) mti_norm_backward_sums(x, mean, rstd, gain, dy, 1, dgain, n, sums);
        else mti_norm_backward_sums(x, mean, rstd, gain, dy, 0, NULL, n, sums);
        if (b->one_pass && dbias) mti_row_add(dbias, dy, dbias, n);
        mti_norm_backward_apply(x, mean, rstd, gain, dy, b->kind == MT_LAYER_NORM ? sums[0] / (float)n : 0.0f,
                                sums[1] / (float)n, mti_row(residual, 0), mti_row(dx, 0), n);
        mti_f32_write(dx, b->dx, i, 0);
    }
}

/* With several threads, the parameters are first, because dx may be dy. */
static mt_status mti_norm_backward(mti_operator *op, mti_norm_slopes *b) {
    mt_tensor residual = b->dresidual;
    int narrow = b->x.dtype != MT_F32 || b->dy.dtype != MT_F32 || b->dx.dtype != MT_F32 ||
                 (residual.data && residual.dtype != MT_F32);
    MT_TRY(mti_rooms(op, narrow ? 3 : 0, b->x.cols, &b->rooms));
    if (!op->on_cpu) return MT_SUCCESS;
    b->one_pass = mt_context_threads(op->ctx) == 1;
    if (!b->one_pass) mti_cpu_columns(op->ctx, b->x.rows, b->x.cols, mti_cpu_norm_parameters, b);
    mti_cpu_rows(op->ctx, b->x.rows, b->x.cols, mti_cpu_norm_backward, b);
    return MT_SUCCESS;
}

#if MT_HAS_CUDA
extern "C++" {

struct mti_norm_op {
    mti_view x, gain, bias, y, stats;
    float eps;
    int centered; /* 1 for LayerNorm: subtract the mean */
};

#define MTI_NORM_THREADS 512 /* maximum threads per block */
#define MTI_NORM_ROWS 4      /* rows of a block whose warps have a row each */

/* x becomes x - mean, and the sum of its squares is returned. The last elements, from n on, do not count. */
static __device__ __forceinline__ float mti_norm_center(float *x, float mean, int n) {
    float sum = 0.0f;
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) {
        x[j] -= mean;
        if (j < n) sum += x[j] * x[j];
    }
    return sum;
}

/* y of one vector, from x - mean. y may be x. */
template <int TYPE>
static __device__ __forceinline__ void mti_norm_vector(const float *x, float rstd, const mti_fetched<TYPE> &gain,
                                                       const mti_fetched<TYPE> &bias, float *y) {
    float g[MTI_VECTOR], b[MTI_VECTOR];
    mti_values(gain, g);
    mti_values(bias, b);
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) y[j] = x[j] * rstd * g[j] + b[j];
}

/* The vectors of a row that its threads do not keep, KEPT * blockDim.x and on. */
template <int TYPE, int KEPT> struct mti_norm_rest {
    const mti_norm_op &op;
    int64_t row, cols;
    int vectors;
    float x[MTI_VECTOR];
    __device__ __forceinline__ int load(int i) {
        mti_fetched<TYPE> held;
        mti_row_fetch(op.x, row, i, cols, held);
        mti_values(held, x);
        return mti_row_vector_size<TYPE>(cols, i);
    }
    __device__ __forceinline__ int first() const { return (int)(threadIdx.x + KEPT * blockDim.x); }
    __device__ __forceinline__ float sum() {
        float sum = 0.0f;
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            load(i);
            for (int j = 0; j < MTI_VECTOR; j++) sum += x[j];
        }
        return sum;
    }
    __device__ __forceinline__ float squares(float mean) {
        float sum = 0.0f;
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            int n = load(i);
            sum += mti_norm_center(x, mean, n);
        }
        return sum;
    }
    __device__ __forceinline__ void write(float mean, float rstd) {
        mti_fetched<TYPE> gain, bias = {};
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            int n = load(i);
            mti_row_fetch(op.gain, 0, i, cols, gain);
            if (op.bias.data) mti_row_fetch(op.bias, 0, i, cols, bias);
            mti_norm_center(x, mean, n);
            mti_norm_vector(x, rstd, gain, bias, x);
            mti_row_store<TYPE>(op.y, row, i, cols, x);
        }
    }
};

/* One row of mti_norm_kernel. Thread threadIdx.x owns every blockDim.x-th vector of it. It keeps its first KEPT vectors
   in registers, and reads the others (`rest`) again in each step. A kept vector behind the end of the row is 0.

   1. The loads of x begin.
   2. LayerNorm only: the sum of x, and from it the mean.
   3. The sum of (x - mean)^2, and from it rstd.
   4. y, vector by vector. Gain and bias come from a cache: loaded before, they would take registers from other blocks.

   `shared` [64] holds the sums of the warps, each sum in its own half; the barriers are in mti_row_total. A thread
   reads a vector of x before it writes the same vector of y, so y may be x. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_row(const mti_norm_op &op, int64_t row, int64_t cols, float *shared) {
    int vectors = (int)((cols + MTI_VECTOR - 1) / MTI_VECTOR), at[KEPT];
    mti_norm_rest<TYPE, KEPT> rest = {op, row, cols, vectors, {}};
    mti_fetched<TYPE> held[KEPT] = {}, gain = {}, bias = {};
    float x[KEPT][MTI_VECTOR], sum = 0.0f, squares = 0.0f, mean = 0.0f;
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        at[q] = (int)(threadIdx.x + q * blockDim.x);
        if (at[q] < vectors) mti_row_fetch(op.x, row, at[q], cols, held[q]);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        float own = 0.0f;
        mti_values(held[q], x[q]);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) own += x[q][j];
        sum += own;
    }
    if (op.centered) mean = mti_row_total(sum + rest.sum(), shared) / (float)cols;
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        float own = mti_norm_center(x[q], mean, mti_row_vector_size<TYPE>(cols, at[q]));
        squares += at[q] < vectors ? own : 0.0f;
    }
    squares += rest.squares(mean);
    float rstd = 1.0f / sqrtf(mti_row_total(squares, shared + 32) / (float)cols + op.eps);
    if (threadIdx.x == 0 && op.stats.data) {
        mti_put<MT_F32>(op.stats, row, 0, mean);
        mti_put<MT_F32>(op.stats, row, 1, rstd);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        if (at[q] < vectors) mti_row_fetch(op.gain, 0, at[q], cols, gain);
        if (at[q] < vectors && op.bias.data) mti_row_fetch(op.bias, 0, at[q], cols, bias);
        mti_norm_vector(x[q], rstd, gain, bias, x[q]);
        if (at[q] < vectors) mti_row_store<TYPE>(op.y, row, at[q], cols, x[q]);
    }
    rest.write(mean, rstd);
}

/* A block owns blockDim.y rows, from row (first + blockIdx.x) * blockDim.y on. If it has several rows, each of them
   belongs to one warp. All loads of a row are in flight at once, and other blocks hide the time until they arrive.
   LayerNorm in bf16 with KEPT 4 on sm_90: 21 instructions for an element, which moves 4 bytes (budget: 27); 71
   registers; with 4096 columns, 7 blocks of 128 threads on a multiprocessor, whose loads are 56 KiB. */
template <int TYPE, int KEPT>
static __global__ void __launch_bounds__(MTI_NORM_THREADS, 1)
    mti_norm_kernel(int64_t first, mti_norm_op op, int64_t rows, int64_t cols) {
    MT_SHARED(float, shared, 64);
    int64_t row = (first + blockIdx.x) * blockDim.y + threadIdx.y;
    if (row < rows) mti_norm_row<TYPE, KEPT>(op, row, cols, shared);
}

/* Launches mti_norm_kernel. Rows of at most 32 * KEPT vectors belong to a warp, wider ones to a block. */
template <int TYPE>
static mt_status mti_norm_launch(mt_context *ctx, const mti_norm_op &op, int64_t rows, int64_t cols) {
    static const int kept = TYPE == MT_BF16 || TYPE == MT_F16 ? 4 : 2;
    int64_t vectors = (cols + MTI_VECTOR - 1) / MTI_VECTOR;
    unsigned threads = (unsigned)mt_min(MTI_NORM_THREADS, mt_round_up((vectors + kept - 1) / kept, 32));
    dim3 block(threads, threads == 32 ? MTI_NORM_ROWS : 1);
    int64_t blocks = (rows + block.y - 1) / block.y;
    if (vectors <= 32)
        MTI_LAUNCH_BLOCKS((mti_norm_kernel<TYPE, 1>), blocks, block, 0, mt_context_stream(ctx), op, rows, cols);
    else MTI_LAUNCH_BLOCKS((mti_norm_kernel<TYPE, kept>), blocks, block, 0, mt_context_stream(ctx), op, rows, cols);
    return mt_cuda_launched(ctx, "mt_norm_forward");
}

static mt_status mti_cuda_norm_forward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor bias,
                                       float eps, mt_tensor y, mt_tensor stats) {
    mti_norm_op op = {mti_view_of(x),       mti_view_of(gain),  mti_view_of(bias),
                      mti_view_of(y),       mti_view_of(stats), eps,
                      kind == MT_LAYER_NORM};
    if (x.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    return mti_by_type(mti_row_type(x.cols, x, gain, bias, y),
                       [&](auto type) { return mti_norm_launch<decltype(type)::value>(ctx, op, x.rows, x.cols); });
}

struct mti_norm_backward_op {
    mti_view x, gain, stats, dy, dresidual, dx;
    int centered;
};

/* The sums of a block for dgain and dbias, as float4 data[4][vectors]. Part 0 has elements 0 to 3 of the vectors of
   dgain, and part 1 has elements 4 to 7. Parts 2 and 3 are the same for dbias. In this layout, neighbouring threads
   access neighbouring memory. Each vector belongs to one thread. */
struct mti_norm_sums {
    float4 *data;
    int vectors;
    __device__ __forceinline__ void load(int i, float *dgain, float *dbias) const {
        MT_DEVICE_UNROLL
        for (int part = 0; part < 4; part++) {
            float *x = (part < 2 ? dgain : dbias) + part % 2 * 4;
            float4 v = data[part * vectors + i];
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        }
    }
    __device__ __forceinline__ void store(int i, const float *dgain, const float *dbias) const {
        MT_DEVICE_UNROLL
        for (int part = 0; part < 4; part++) {
            const float *x = (part < 2 ? dgain : dbias) + part % 2 * 4;
            data[part * vectors + i] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
};

/* What the gradient of a row needs: dx = dy * gain * rstd + (x - mean) * slope + shift. With g = dy * gain and
   xhat = (x - mean) * rstd, slope is -rstd^2 mean(g xhat) and shift is -rstd mean(g), or 0 for RMSNorm. */
struct mti_norm_means {
    float mean, rstd, slope, shift;
};

/* Copies mean and rstd of `count` rows to stats [count, 2] in shared memory, with mean 0 for RMSNorm. */
static __device__ __forceinline__ void mti_norm_stats(const mti_norm_backward_op &op, int64_t row, int count,
                                                      float *stats) {
    for (int i = (int)threadIdx.x; i < 2 * count; i += (int)blockDim.x)
        stats[i] = i % 2 || op.centered ? mti_get<MT_F32>(op.stats, row + i / 2, i % 2) : 0.0f;
    __syncthreads();
}

/* Computes slope and shift from the sums of g and of g * (x - mean) over a row. Each thread passes its part of the
   sums; shared [64]. share is 1 / cols. */
static __device__ __forceinline__ void mti_norm_total(const mti_norm_backward_op &op, float sum_g, float sum_gx,
                                                      float share, float *shared, mti_norm_means &m) {
    float2 total = mti_block_sums_once(sum_g, sum_gx, shared);
    m.slope = -(total.y * share * m.rstd) * m.rstd * m.rstd;
    m.shift = op.centered ? -(total.x * share) * m.rstd : 0.0f;
}

/* The first KEPT vectors of a row that a thread has loaded. Vectors behind the end of the row stay 0. */
template <int TYPE, int KEPT> struct mti_norm_input {
    mti_fetched<TYPE> x[KEPT], dy[KEPT], residual[KEPT];
    __device__ __forceinline__ void load(const mti_norm_backward_op &op, int64_t row, int64_t cols, int q) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i >= (int)((cols + MTI_VECTOR - 1) / MTI_VECTOR)) return;
        mti_row_fetch(op.x, row, i, cols, x[q]);
        mti_row_fetch(op.dy, row, i, cols, dy[q]);
        if (op.dresidual.data) mti_row_fetch(op.dresidual, row, i, cols, residual[q]);
    }
};

/* Adds g and g * (x - mean) of one vector to the two sums. Elements past the end of the row are 0. */
template <int TYPE>
static __device__ __forceinline__ void mti_norm_mean(const mti_norm_means &m, const mti_fetched<TYPE> &x,
                                                     const mti_fetched<TYPE> &dy, const mti_fetched<TYPE> &gain,
                                                     float *sum_g, float *sum_gx) {
    float v[MTI_VECTOR], d[MTI_VECTOR], g[MTI_VECTOR];
    mti_values(x, v);
    mti_values(dy, d);
    mti_values(gain, g);
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) {
        *sum_g += d[j] * g[j];
        *sum_gx += d[j] * g[j] * (v[j] - m.mean);
    }
}

/* v = dx of one vector, without dresidual. Adds dy * xhat to dgain, and dy to dbias. */
template <int TYPE>
static __device__ __forceinline__ void mti_norm_gradient(const mti_norm_means &m, const mti_fetched<TYPE> &x,
                                                         const mti_fetched<TYPE> &dy, const mti_fetched<TYPE> &gain,
                                                         float *v, float *dgain, float *dbias) {
    float d[MTI_VECTOR], g[MTI_VECTOR];
    mti_values(x, v);
    mti_values(dy, d);
    mti_values(gain, g);
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) {
        float centered = v[j] - m.mean, scaled = d[j] * m.rstd;
        dgain[j] += scaled * centered;
        dbias[j] += d[j];
        v[j] = scaled * g[j] + (centered * m.slope + m.shift);
    }
}

#define MTI_NORM_SUM_THREADS 256  /* maximum threads per block if the sums are in registers */
#define MTI_NORM_ROOM_THREADS 384 /* the same if they do not fit into registers */

#define MTI_NORM_STRIP 16  /* rows of a short strip */
#define MTI_NORM_TALLEST 4 /* a tall strip has at most this many times the rows of a short one */
/* A tall strip has MTI_NORM_STRIP rows for each MTI_NORM_TALL elements of the matrix. */
#ifndef MTI_NORM_TALL
#define MTI_NORM_TALL (32 << 20)
#endif

/* The strips of rows whose sums a block adds. The first `tall` strips have `height` rows each, the others
   MTI_NORM_STRIP. Each strip costs 16 bytes of traffic for a column, so large matrices have tall strips: with 4096
   columns and 32768 rows, 384 of 64 rows and then 512 of 16. The short ones, a quarter of the rows, come last and fill
   the GPU while other blocks end. The strips depend on the shape only, so every GPU computes the same bits. */
struct mti_norm_strips {
    int64_t count, tall, height;
    __device__ __forceinline__ int64_t row(int64_t strip) const {
        return strip < tall ? strip * height : tall * height + (strip - tall) * MTI_NORM_STRIP;
    }
};

static mti_norm_strips mti_norm_strips_of(int64_t rows, int64_t cols) {
    mti_norm_strips s;
    s.height = MTI_NORM_STRIP * mt_max(1, mt_min(MTI_NORM_TALLEST, rows * cols / MTI_NORM_TALL));
    s.tall = s.height == MTI_NORM_STRIP ? 0 : (rows - rows / 4) / s.height;
    s.count = s.tall + (rows - s.tall * s.height + MTI_NORM_STRIP - 1) / MTI_NORM_STRIP;
    return s;
}

/* The vectors of a row that its threads do not keep, KEPT * blockDim.x and on. They are loaded twice. */
template <int TYPE, int KEPT> struct mti_norm_backward_rest {
    const mti_norm_backward_op &op;
    int64_t row, cols;
    int vectors;
    mti_fetched<TYPE> x, dy, gain;
    __device__ __forceinline__ void load(int i) {
        mti_row_fetch(op.x, row, i, cols, x);
        mti_row_fetch(op.dy, row, i, cols, dy);
        mti_row_fetch(op.gain, 0, i, cols, gain);
    }
    __device__ __forceinline__ int first() const { return (int)(threadIdx.x + KEPT * blockDim.x); }
    __device__ __forceinline__ void means(const mti_norm_means &m, float *sum_g, float *sum_gx) {
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            load(i);
            mti_norm_mean(m, x, dy, gain, sum_g, sum_gx);
        }
    }
    __device__ __forceinline__ void write(const mti_norm_means &m, const mti_norm_sums &sums) {
        mti_fetched<TYPE> residual = {};
        float v[MTI_VECTOR], dg[MTI_VECTOR], d[MTI_VECTOR];
        for (int i = first(); i < vectors; i += (int)blockDim.x) {
            load(i);
            if (op.dresidual.data) mti_row_fetch(op.dresidual, row, i, cols, residual);
            sums.load(i, dg, d);
            mti_norm_gradient(m, x, dy, gain, v, dg, d);
            if (op.dresidual.data) mti_add_values(residual, v);
            mti_row_store<TYPE>(op.dx, row, i, cols, v);
            sums.store(i, dg, d);
        }
    }
};

/* One row of mti_norm_backward_kernel with ROOM. `in` has this row when the function is called, and the next row
   afterwards, unless this is the last row of the strip. m has the statistics of this row. The thread reads a vector
   of dy and dresidual before it writes the same vector of dx. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_backward_wide_row(const mti_norm_backward_op &op, int64_t row,
                                                                  int64_t end, int64_t cols,
                                                                  mti_norm_input<TYPE, KEPT> &in,
                                                                  const mti_norm_sums &sums, mti_norm_means m,
                                                                  float share, float *shared) {
    mti_norm_backward_rest<TYPE, KEPT> rest = {op, row, cols, sums.vectors, {}, {}, {}};
    mti_fetched<TYPE> gain[KEPT] = {};
    float v[MTI_VECTOR], dg[MTI_VECTOR] = {}, d[MTI_VECTOR] = {}, sum_g = 0.0f, sum_gx = 0.0f;

    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i < sums.vectors) mti_row_fetch(op.gain, 0, i, cols, gain[q]);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) mti_norm_mean(m, in.x[q], in.dy[q], gain[q], &sum_g, &sum_gx);
    rest.means(m, &sum_g, &sum_gx);
    mti_norm_total(op, sum_g, sum_gx, share, shared, m);
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i < sums.vectors) mti_row_fetch(op.gain, 0, i, cols, gain[q]); /* again: registers are scarce */
        if (i < sums.vectors) sums.load(i, dg, d);
        mti_norm_gradient(m, in.x[q], in.dy[q], gain[q], v, dg, d);
        if (op.dresidual.data) mti_add_values(in.residual[q], v);
        if (i < sums.vectors) mti_row_store<TYPE>(op.dx, row, i, cols, v);
        if (row + 1 < end) in.load(op, row + 1, cols, q);
        if (i < sums.vectors) sums.store(i, dg, d);
    }
    rest.write(m, sums);
}

/* Moves the beginning of a view down by some rows. */
template <int TYPE> static __device__ __forceinline__ void mti_norm_move(mti_view &v, int64_t rows = 1) {
    v.data += rows * v.ld * mti_fetched<TYPE>::size;
}

/* The vectors of rows that a thread copies ahead into shared memory, and reads itself: x, dy and dresidual, KEPT
   vectors of each. A vector behind the end of the row is 0. `own` [rows, views, KEPT, words, blockDim.x] begins at
   this thread. So the 16-bit vectors of a warp are contiguous in shared memory. This makes the kernel 1.4 times as
   fast on an H200: when they were not, L2 was 87 % busy, as it probably delivered each sector of 32 bytes once for
   each half. In f32 it still does. */
template <int TYPE, int KEPT> struct mti_norm_ahead {
    static const int words = mti_fetched<TYPE>::size / 2; /* of a vector, as mti_words */
    mti_norm_backward_op next;                            /* its views begin at the row that is copied next */
    mti_words *own;
    int rows;          /* rows copied ahead: 1 or 2 */
    int size, at;      /* of this thread: mti_words of a row, and the place of the row that is read next */
    int left, vectors; /* rows that are not copied yet; vectors of a row */
    __device__ __forceinline__ mti_words *place(int view, int q, int w) const {
        return own + (uint32_t)(at + (view * KEPT + q) * words + w) * blockDim.x;
    }
    __device__ __forceinline__ void copy_view(const mti_view &v, int view, int q, int i, int bytes) const {
        MT_DEVICE_UNROLL
        for (int w = 0; w < words; w++)
            mti_cp_async16(place(view, q, w), v.data + (uint32_t)(i * words + w) * sizeof(mti_words), bytes);
    }
    /* Starts copying vector q of the next row to the place of the row that is read next. */
    __device__ __forceinline__ void copy(int q) const {
        int i = (int)(threadIdx.x + q * blockDim.x), bytes = i < vectors && left > 0 ? 16 : 0;
        copy_view(next.x, 0, q, i, bytes);
        copy_view(next.dy, 1, q, i, bytes);
        if (next.dresidual.data) copy_view(next.dresidual, 2, q, i, bytes);
    }
    /* Ends the copies of a row. Another row is read next. The views stay at the last row: copies of 0 bytes need
       addresses that are multiples of 16, too, and the `ld` of a matrix of one row may be any number. */
    __device__ __forceinline__ void advance() {
        mti_cp_async_commit();
        if (left > 1) {
            mti_norm_move<TYPE>(next.x);
            mti_norm_move<TYPE>(next.dy);
            if (next.dresidual.data) mti_norm_move<TYPE>(next.dresidual);
        }
        left--;
        at = (rows - 1) * size - at;
    }
    __device__ __forceinline__ void wait() const {
        if (rows == 2) mti_cp_async_wait<1>();
        else mti_cp_async_wait<0>();
    }
    __device__ __forceinline__ void fetch(int view, int q, mti_fetched<TYPE> &out) const {
        MT_DEVICE_UNROLL
        for (int w = 0; w < words; w++) out.words[w] = mti_load_words(place(view, q, w));
    }
};

/* One row of mti_norm_backward_kernel without ROOM. m has its statistics. `dx` begins at this row. The thread adds its
   gradients of gain and bias to `own`. The copies of vector q of a later row begin after the thread has read vector q
   of this row, whose place they take. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_backward_row(const mti_norm_backward_op &op, const mti_view &dx,
                                                             int64_t cols, mti_norm_ahead<TYPE, KEPT> &ahead,
                                                             float (&own)[KEPT][2][MTI_VECTOR], mti_norm_means m,
                                                             float share, float *shared) {
    mti_fetched<TYPE> x, dy, residual, gain[KEPT] = {};
    float v[MTI_VECTOR], sum_g = 0.0f, sum_gx = 0.0f;
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i < ahead.vectors) mti_row_fetch(op.gain, 0, i, cols, gain[q]);
    }
    ahead.wait();
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        ahead.fetch(0, q, x);
        ahead.fetch(1, q, dy);
        mti_norm_mean(m, x, dy, gain[q], &sum_g, &sum_gx);
    }
    mti_norm_total(op, sum_g, sum_gx, share, shared, m);
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        if (i < ahead.vectors) mti_row_fetch(op.gain, 0, i, cols, gain[q]); /* again: registers are scarce */
        ahead.fetch(0, q, x);
        ahead.fetch(1, q, dy);
        mti_norm_gradient(m, x, dy, gain[q], v, own[q][0], own[q][1]);
        if (op.dresidual.data) {
            ahead.fetch(2, q, residual);
            mti_add_values(residual, v);
        }
        if (i < ahead.vectors) mti_row_store<TYPE>(dx, 0, i, cols, v);
        ahead.copy(q);
    }
    ahead.advance();
}

/* Computes the rows of a strip whose sums do not fit into registers, and writes the sums to `to` [2, cols]. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_backward_wide_strip(const mti_norm_backward_op &op, int64_t row,
                                                                    int64_t end, int64_t cols,
                                                                    const mti_norm_sums &sums, float *shared,
                                                                    float *to) {
    mti_norm_input<TYPE, KEPT> in = {};
    int count = (int)(end - row);
    for (int i = (int)threadIdx.x; i < sums.vectors; i += (int)blockDim.x)
        for (int part = 0; part < 4; part++) sums.data[part * sums.vectors + i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) in.load(op, row, cols, q);
    mti_norm_stats(op, row, count, shared + 128);
    for (int r = 0; r < count; r++) {
        mti_norm_means m = {shared[128 + 2 * r], shared[129 + 2 * r], 0.0f, 0.0f};
        mti_norm_backward_wide_row<TYPE, KEPT>(op, row + r, end, cols, in, sums, m, 1.0f / (float)cols,
                                               shared + r % 2 * 64);
    }
    for (int i = (int)threadIdx.x; i < sums.vectors; i += (int)blockDim.x)
        for (int part = 0; part < 4; part++) {
            float4 v = sums.data[part * sums.vectors + i];
            float x[4] = {v.x, v.y, v.z, v.w};
            int64_t col = (int64_t)i * MTI_VECTOR + part % 2 * 4;
            MT_DEVICE_UNROLL
            for (int j = 0; j < 4; j++)
                if (col + j < cols) to[part / 2 * cols + col + j] = x[j];
        }
}

/* As mti_norm_backward_wide_strip, with the sums in registers. `rows`, 1 or 2, is the number of rows that are copied
   ahead to `room`. */
template <int TYPE, int KEPT>
static __device__ __forceinline__ void mti_norm_backward_narrow_strip(const mti_norm_backward_op &op, int64_t row,
                                                                      int64_t end, int64_t cols, int rows, float4 *room,
                                                                      float *shared, float *to) {
    int vectors = (int)(cols / MTI_VECTOR), count = (int)(end - row), size = mti_norm_ahead<TYPE, KEPT>::words * KEPT;
    float own[KEPT][2][MTI_VECTOR] = {}, share = 1.0f / (float)cols;
    mti_norm_backward_op at = op;
    mti_norm_move<TYPE>(at.x, row);
    mti_norm_move<TYPE>(at.dy, row);
    if (op.dresidual.data) mti_norm_move<TYPE>(at.dresidual, row);
    mti_norm_move<TYPE>(at.dx, row);
    size *= op.dresidual.data ? 3 : 2;
    mti_norm_ahead<TYPE, KEPT> ahead = {at, (mti_words *)room + threadIdx.x, rows, size, 0, count, vectors};
    for (int r = 0; r < rows; r++) {
        MT_DEVICE_UNROLL
        for (int q = 0; q < KEPT; q++) ahead.copy(q);
        ahead.advance();
    }
    mti_norm_stats(op, row, count, shared + 128);
    for (int r = 0; r < count; r++) {
        mti_norm_means m = {shared[128 + 2 * r], shared[129 + 2 * r], 0.0f, 0.0f};
        mti_norm_backward_row(op, at.dx, cols, ahead, own, m, share, shared + r % 2 * 64);
        mti_norm_move<TYPE>(at.dx);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < KEPT; q++) {
        int i = (int)(threadIdx.x + q * blockDim.x);
        MT_DEVICE_UNROLL
        for (int part = 0; part < 4 && i < vectors; part++) {
            const float *x = own[q][part / 2] + part % 2 * 4;
            *(float4 *)(to + part / 2 * cols + i * MTI_VECTOR + part % 2 * 4) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

/* The least number of blocks per multiprocessor, for __launch_bounds__. In f16, 3 blocks would spill registers on
   sm_75. */
template <int TYPE, int KEPT, bool ROOM> constexpr int mti_norm_backward_blocks() {
    return ROOM ? 1 : KEPT == mti_ahead<TYPE>::value && TYPE != MT_F16 ? 3 : 2;
}

/* A block owns strip first_strip + blockIdx.x. Each thread owns every blockDim-th vector of its rows. The block sums
   dgain and dbias over the rows. Without ROOM, the sums are in registers, and `ahead` rows are copied into shared
   memory before they are needed. With ROOM, the sums are in shared memory, or in `spare`, in global memory, if the rows
   are too wide for that, and registers hold the next row. The result is partial [strips, 2, cols].

   1. Each thread clears the sums of its vectors, and begins to load its vectors of the first row, or of the first two.
      All threads copy the statistics of the strip to `shared`. The barrier in mti_norm_stats separates these writes
      from the reads.
   2. For each row: the sums over the block, through one half of the first 128 floats of `shared`; then dx, dgain and
      dbias of each vector, after which the loads of the same vector of a later row begin.
   3. Each thread writes the sums of its vectors to partial. mti_strips adds the strips.

   Without ROOM on sm_90: an element takes 29 instructions in bf16, where it moves 6 bytes (budget: 41), and 29 in f32,
   where it moves 12 (budget: 82). Up to 4096 columns in bf16, 80 registers: a multiprocessor has 3 blocks of 256
   threads, and with 4096 columns 48 to 96 KiB of loads under way. Up to 8192 columns, 26 instructions and 128
   registers: 2 blocks, and with 8192 columns 64 to 128 KiB. With ROOM: one block of 384 threads.

   The barriers for the sums are in mti_block_sums_once. Two successive rows use different halves: when a thread writes
   to a half again, all threads have passed the barrier of the row between, and so have read what was there. The sums of
   gradients and the rows copied ahead need no barrier, because a vector belongs to one thread. */
template <int TYPE, int KEPT, bool ROOM>
static __global__ void __launch_bounds__(ROOM ? MTI_NORM_ROOM_THREADS : MTI_NORM_SUM_THREADS,
                                         mti_norm_backward_blocks<TYPE, KEPT, ROOM>())
    mti_norm_backward_kernel(int64_t first_strip, mti_norm_backward_op op, int64_t rows, int64_t cols,
                             mti_norm_strips strips, int ahead, float *partial, float4 *spare) {
    MT_SHARED(float, shared, 128 + 2 * MTI_NORM_STRIP * MTI_NORM_TALLEST);
    MT_DYN_SHARED(float4, room);
    int vectors = (int)((cols + MTI_VECTOR - 1) / MTI_VECTOR);
    int64_t strip = first_strip + blockIdx.x, row = strips.row(strip), end = strips.row(strip + 1);
    float *to = partial + strip * 2 * cols;
    if (end > rows) end = rows;
    if (ROOM) {
        mti_norm_sums sums = {spare ? spare + (int64_t)blockIdx.x * 4 * vectors : room, vectors};
        mti_norm_backward_wide_strip<TYPE, KEPT>(op, row, end, cols, sums, shared, to);
    } else {
        mti_norm_backward_narrow_strip<TYPE, KEPT>(op, row, end, cols, ahead, room, shared, to);
    }
}

/* Launches mti_norm_backward_kernel for rows of at most KEPT * MTI_NORM_SUM_THREADS vectors. A GPU with little shared
   memory copies one row ahead instead of two, which computes the same bits. */
template <int TYPE, int KEPT>
static mt_status mti_norm_backward_narrow(mt_context *ctx, const mti_norm_backward_op &op, int64_t rows, int64_t cols,
                                          const mti_norm_strips &strips, void *partial) {
    unsigned threads = (unsigned)mt_round_up((cols / MTI_VECTOR + KEPT - 1) / KEPT, 32);
    size_t most = 0, row = (op.dresidual.data ? 3 : 2) * KEPT * (mti_fetched<TYPE>::size / 2), bytes;
    int ahead = 2;
    MT_TRY(mti_shared_most(ctx, &most));
    if (threads * ahead * row * sizeof(mti_words) > most) ahead = 1;
    bytes = threads * ahead * row * sizeof(mti_words);
    MT_TRY(mti_shared_allow(ctx, mti_norm_backward_kernel<TYPE, KEPT, false>, bytes));
    MTI_LAUNCH_BLOCKS((mti_norm_backward_kernel<TYPE, KEPT, false>), strips.count, threads, bytes,
                      mt_context_stream(ctx), op, rows, cols, strips, ahead, (float *)partial, (float4 *)NULL);
    return mt_cuda_launched(ctx, "mt_norm_backward");
}

/* The same for wider rows, and for rows of any type. `bytes` is the size of a block's sums. */
template <int TYPE, int KEPT>
static mt_status mti_norm_backward_wide(mt_context *ctx, const mti_norm_backward_op &op, int64_t rows, int64_t cols,
                                        const mti_norm_strips &strips, size_t bytes, void *partial, void *spare) {
    int64_t vectors = (cols + MTI_VECTOR - 1) / MTI_VECTOR;
    unsigned threads = (unsigned)mt_min(MTI_NORM_ROOM_THREADS, mt_round_up((vectors + KEPT - 1) / KEPT, 32));
    size_t most = 0;
    MT_TRY(mti_shared_most(ctx, &most));
    if (bytes <= most) spare = NULL;
    if (spare) bytes = 0;
    MT_TRY(mti_shared_allow(ctx, mti_norm_backward_kernel<TYPE, KEPT, true>, bytes));
    MTI_LAUNCH_BLOCKS((mti_norm_backward_kernel<TYPE, KEPT, true>), strips.count, threads, bytes,
                      mt_context_stream(ctx), op, rows, cols, strips, 0, (float *)partial, (float4 *)spare);
    return mt_cuda_launched(ctx, "mt_norm_backward");
}

template <int TYPE>
static mt_status mti_norm_backward_launch(mt_context *ctx, const mti_norm_backward_op &op, int64_t rows, int64_t cols,
                                          const mti_norm_strips &strips, size_t bytes, void *partial, void *spare) {
    static const bool any = TYPE == MTI_ANY_TYPE; /* these keep their sums in shared memory */
    static const int few = mti_ahead<TYPE>::value, type = any ? MT_F32 : TYPE;
    if (!any && cols <= few * MTI_NORM_SUM_THREADS * MTI_VECTOR)
        return mti_norm_backward_narrow<type, few>(ctx, op, rows, cols, strips, partial);
    if (!any && cols <= 2 * few * MTI_NORM_SUM_THREADS * MTI_VECTOR)
        return mti_norm_backward_narrow<type, 2 * few>(ctx, op, rows, cols, strips, partial);
    return mti_norm_backward_wide < TYPE, any ? 1 : 2 * few > (ctx, op, rows, cols, strips, bytes, partial, spare);
}

static mt_status mti_cuda_norm_backward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain,
                                        mt_tensor stats, mt_tensor dy, mt_tensor dresidual, mt_tensor dx,
                                        mt_tensor dgain, mt_tensor dbias) {
    size_t mark = mt_arena_mark(ctx), bytes = (size_t)mt_round_up(x.cols, MTI_VECTOR) * 2 * sizeof(float);
    mti_norm_strips strips = mti_norm_strips_of(x.rows, x.cols);
    mti_norm_backward_op op = {mti_view_of(x),         mti_view_of(gain), mti_view_of(stats),   mti_view_of(dy),
                               mti_view_of(dresidual), mti_view_of(dx),   kind == MT_LAYER_NORM};
    mt_tensor outs[2];
    void *partial = NULL, *spare = NULL;
    outs[0] = dgain, outs[1] = dbias;
    if (x.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_arena_alloc(ctx, (size_t)(strips.count * 2 * x.cols) * sizeof(float), &partial));
    if (bytes > MTI_SHARED_LEAST)
        MT_TRY(mt_arena_alloc(ctx, mti_grid(strips.count, 1) * bytes, &spare)); /* for a launch */
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mti_by_type(mti_row_type(x.cols, x, gain, dy, dresidual, dx), [&](auto type) {
        return mti_norm_backward_launch<decltype(type)::value>(ctx, op, x.rows, x.cols, strips, bytes, partial, spare);
    }));
    MT_TRY(mti_strips(ctx, "mt_norm_backward", partial, strips.count, 2, x.cols, outs));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif

MT_API mt_status mt_norm_forward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor bias,
                                 float eps, mt_tensor y, mt_tensor stats) {
    static const char *const where = "mt_norm_forward";
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"gain", &gain, 1, x.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"bias", &bias, 1, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL},
                     {"y", &y, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"stats", &stats, x.rows, 2, MT_ARG_F32, MT_ARG_OUT | MT_ARG_OPTIONAL}};
    mti_operator op;
    MT_TRY(mti_expect_norm(ctx, where, kind, x, "bias", bias));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_float(ctx, where, NULL, "eps", eps, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_numbers_agree(ctx, where, "kind or eps", mt_none(), 1, 2, (double)kind, (double)eps));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    mti_norm f = {kind, x, gain, bias, y, stats, eps, mt_none()};
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_norm_forward(ctx, kind, x, gain, bias, eps, y, stats),
                                   mti_norm_forward(&op, &f)));
}

/* Refuses dgain or dbias that overlaps x, dy or dx. */
static mt_status mti_expect_norm_sum(mt_context *ctx, const char *where, const char *name, mt_tensor sum, mt_tensor x,
                                     mt_tensor dy, mt_tensor dx) {
    MT_TRY(mt_check_apart(ctx, where, name, sum, "x", x));
    MT_TRY(mt_check_apart(ctx, where, name, sum, "dy", dy));
    return mt_check_apart(ctx, where, name, sum, "dx", dx);
}

MT_API mt_status mt_norm_backward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor stats,
                                  mt_tensor dy, mt_tensor dresidual, mt_tensor dx, mt_tensor dgain, mt_tensor dbias) {
    static const char *const where = "mt_norm_backward";
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"gain", &gain, 1, x.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"dbias", &dbias, 1, x.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM | MT_ARG_OPTIONAL},
                     {"stats", &stats, x.rows, 2, MT_ARG_F32, MT_ARG_IN},
                     {"dy", &dy, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dresidual", &dresidual, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS},
                     {"dx", &dx, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"dgain", &dgain, 1, x.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM}};
    mti_operator op;
    MT_TRY(mti_expect_norm(ctx, where, kind, x, "dbias", dbias));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "dx", dx, "x", x));
    MT_TRY(mti_expect_norm_sum(ctx, where, "dgain", dgain, x, dy, dx));
    MT_TRY(mti_expect_norm_sum(ctx, where, "dbias", dbias, x, dy, dx));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    mti_norm_slopes b = {kind, x, gain, stats, dy, dresidual, dx, dgain, dbias, 0, mt_none()};
    return mti_end(&op,
                   MTI_CHOOSE(&op, mti_cuda_norm_backward(ctx, kind, x, gain, stats, dy, dresidual, dx, dgain, dbias),
                              mti_norm_backward(&op, &b)));
}

/* ---- >>random-normal --------------------------------------------------------------------------------------------- */

/* A word w becomes the uniform number (w + 1/2) / 2^32 in (0, 1). The first word of a pair gives the radius and the
   second one the angle of the Box-Muller transform. All of it is computed in double. The functions of libm would take
   ten times as long, because loops with them do not vectorise. The polynomials are fitted like q in mti_exp. */
#define MTI_NORMALS (4 * MTI_PHILOX_GROUP) /* numbers that are computed together */
#define MTI_UNIT 2.3283064365386963e-10    /* 2^-32 */

MT_INLINE uint64_t mti_f64_bits(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

MT_INLINE double mti_f64_from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* u as a double, for u < 2^52: the low bits of 2^52 + u are u. Compilers vectorise this for every processor. */
MT_INLINE double mti_f64_from_small(uint64_t u) {
    return mti_f64_from_bits(0x4330000000000000u | u) - 4503599627370496.0;
}

/* log(x) for a positive normal x. x = 2^k (1 + f) with sqrt(1/2) < 1 + f < sqrt(2), and s = f / (2 + f). Then
   log(1 + f) = 2 atanh(s) = f - (f^2/2 - s (f^2/2 + R(s^2))). ln 2 is split into two parts. The first one has zeros
   in its last bits, so that its product with k is exact. The error of the polynomial R is 1.2e-18 of the logarithm. The
   relative error of the function is at most 1.5e-16. */
MT_INLINE double mti_log(double x) {
    uint64_t t = mti_f64_bits(x) + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu); /* 1 over sqrt(1/2) */
    double k = mti_f64_from_small(t >> 52) - 1023.0;
    double f = mti_f64_from_bits((t & 0x000fffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1.0;
    double s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
    double r = 0.14795589293255956 * z + 0.15314086467533619;
    r = r * z + 0.18183562936423375;
    r = r * z + 0.22222198599339862;
    r = r * z + 0.28571428742143673;
    r = r * z + 0.39999999999415681;
    r = r * z + 0.6666666666666734;
    return k * 0.69314670562744141 - ((half - (s * (half + r * z) + k * 4.7493250390316726e-07)) - f);
}

/* sqrt(x) for a positive normal x, as in mti_sqrt: an estimate from the bits of x, three Newton steps for 1 / sqrt(x),
   and a Heron step. The relative error is at most 1.7e-16. */
MT_INLINE double mti_sqrt64(double x) {
    double y = mti_f64_from_bits(0x5fe6eb50c7b537a9u - (mti_f64_bits(x) >> 1)), half = 0.5 * x, s;
    y = y * (1.5 - half * y * y);
    y = y * (1.5 - half * y * y);
    y = y * (1.5 - half * y * y);
    s = x * y;
    return s + 0.5 * y * (x - s * s);
}

/* The cosine and the sine of the angle 2 pi (w + 1/2) / 2^32. It subtracts a multiple of pi / 2, so that |r| <= pi / 4.
   pi / 2 is split into two parts like ln 2 in mti_log. The relative errors of the polynomials are 5.6e-20 and 3.6e-18,
   and those of the results at most 2.2e-16. `turn` is the quadrant of the angle, 0 to 4. It says which result is which,
   and which one is negative. */
MT_INLINE void mti_cos_sin(uint32_t w, double *cosine, double *sine) {
    uint64_t turn = (((uint64_t)w >> 29) + 1) >> 1, swap = 0u - (turn & 1), c_bits, s_bits;
    double n = mti_f64_from_small(turn), angle = 6.283185307179586 * (mti_f64_from_small(w) + 0.5) * MTI_UNIT;
    double r = (angle - n * 1.5707963267948912) - n * 5.390302858158119e-15, z = r * r;
    double c = -1.1358519527043562e-11 * z + 2.0875700508847285e-09, s = 1.5896199135672115e-10 * z;
    s = (s - 2.5050747206257849e-08) * z + 2.7557313617632498e-06;
    c = c * z - 2.755731417679271e-07;
    s = s * z - 0.00019841269829577851;
    c = c * z + 2.4801587288842763e-05;
    s = s * z + 0.0083333333333221026;
    c = c * z - 0.0013888888888873041;
    s = s * z - 0.1666666666666663;
    c = c * z + 0.041666666666666595;
    s_bits = mti_f64_bits(r + r * (z * s));
    c_bits = mti_f64_bits(1.0 - (0.5 * z - z * z * c));
    *cosine = mti_f64_from_bits(((c_bits & ~swap) | (s_bits & swap)) ^ (((turn + 1) & 2) << 62));
    *sine = mti_f64_from_bits(((s_bits & ~swap) | (c_bits & swap)) ^ ((turn & 2) << 62));
}

/* y = MTI_NORMALS normal numbers from as many words. */
static void mti_normal_group(const uint32_t *words, double std, float *y) {
    int i;
    MT_INDEPENDENT
    for (i = 0; i < MTI_NORMALS / 2; i++) {
        double radius = std * mti_sqrt64(-2.0 * mti_log((mti_f64_from_small(words[2 * i]) + 0.5) * MTI_UNIT));
        double cosine, sine;
        mti_cos_sin(words[2 * i + 1], &cosine, &sine);
        y[2 * i] = (float)(radius * cosine);
        y[2 * i + 1] = (float)(radius * sine);
    }
}

/* y = the normal numbers of the global elements [e, e + n). A group begins at the Philox block of its first element. */
static void mti_normal_row(mt_random at, int64_t e, double std, float *y, int64_t n) {
    uint32_t words[MTI_NORMALS];
    float room[MTI_NORMALS];
    int64_t done, count;
    for (done = 0; done < n; done += count) {
        int64_t skip = (e + done) & 3;
        count = mt_min(MTI_NORMALS - skip, n - done);
        mti_philox_blocks((uint64_t)(e + done) >> 2, mti_subsequence(&at), at.seed, MTI_PHILOX_GROUP, words);
        mti_normal_group(words, std, room);
        memcpy(y + done, room + skip, (size_t)count * sizeof *y);
    }
}

typedef struct mti_normal {
    mt_tensor y;
    float std;
    mt_random at;
} mti_normal;

static void mti_cpu_random_normal(void *data, int thread, int64_t first, int64_t last) {
    const mti_normal *r = (const mti_normal *)data;
    float room[MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < r->y.cols; j += n) {
            int64_t e = mti_random_element(r->at, i, j);
            mt_tensor y;
            n = mt_min(MTI_BLOCK - (e & 3), r->y.cols - j); /* the next block begins where a Philox block does */
            y = mti_f32_place(r->y, i, 1, j, n, room);
            mti_normal_row(r->at, e, (double)r->std, mti_row(y, 0), n);
            mti_f32_write(y, r->y, i, j);
        }
}

#if MT_HAS_CUDA
extern "C++" {

/* The same as mti_normal_row, one element at a time. The formula is the same, in double, so that a CPU and a GPU
   agree. */
struct mti_normal_op {
    mti_view y;
    mt_random at;
    double std;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        uint64_t first = mti_element_of(at, row, col);
        float x[MTI_VECTOR];
        for (int j = 0; j < n; j++) {
            uint64_t e = first + (uint64_t)j;
            uint32_t words[4];
            mti_philox(e >> 2, mti_subsequence(&at), at.seed, words);
            uint32_t even = e & 2 ? words[2] : words[0], odd = e & 2 ? words[3] : words[1];
            const double unit = 2.3283064365386963e-10, two_pi = 6.283185307179586;
            double radius = std * sqrt(-2.0 * log(((double)even + 0.5) * unit)),
                   angle = two_pi * ((double)odd + 0.5) * unit;
            x[j] = (float)(radius * (e & 1 ? sin(angle) : cos(angle)));
        }
        mti_store<WIDE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_random_normal(mt_context *ctx, mt_tensor y, float std, mt_random at) {
    mti_normal_op op = {mti_view_of(y), at, (double)std};
    return mti_map(ctx, "mt_random_normal", op, mti_is_wide(y), y.rows, y.cols);
}

} /* extern "C++" */
#endif

/* Checks the place of the random words of a parameter, which ranks must not share. */
static mt_status mti_expect_words(mt_context *ctx, const char *where, mt_tensor y, float std, const mt_random *at) {
    mt_place place = {y.rows, y.cols,         at->first_row, at->first_col,   at->global_cols,
                      1,      "random words", at->seed,      at->subsequence, 0};
    return std == 0.0f ? MT_SUCCESS : mt_place_check(ctx, where, "at", "y", y, &place);
}

MT_API mt_status mt_random_normal(mt_context *ctx, mt_tensor y, float std, mt_random at) {
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_random_normal", args, MTI_COUNT(args)));
    MT_TRY(mti_expect_finite(ctx, "mt_random_normal", "std", std));
    MT_TRY(mti_expect_random(ctx, "mt_random_normal", at, y.rows, y.cols));
    MT_TRY(mti_expect_words(ctx, "mt_random_normal", y, std, &at));
    MT_TRY(mti_begin(&op, ctx, "mt_random_normal", args, MTI_COUNT(args)));
    mti_made(ctx, y, 6, (double)at.seed, (double)at.subsequence, (double)at.first_row, (double)at.first_col,
             (double)at.global_cols, (double)std);
    mti_normal r = {y, std, at};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_random_normal(ctx, y, std, at),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_random_normal, &r)));
}

/* ---- >>dropout --------------------------------------------------------------------------------------------------- */

static mt_status mti_expect_probability(mt_context *ctx, const char *where, float p) {
    return mt_check_float(ctx, where, NULL, "dropout.p", p, MT_FLOAT_PROBABILITY);
}

static mt_status mti_expect_dropout(mt_context *ctx, const char *where, mt_dropout dropout, int64_t rows,
                                    int64_t cols) {
    MT_TRY(mti_expect_probability(ctx, where, dropout.p));
    return dropout.p > 0.0f ? mti_expect_random(ctx, where, dropout.at, rows, cols) : MT_SUCCESS;
}

/* Checks the place by which dropout takes random words for y, operand `name`, once mti_begin has noted what y is. rows,
   cols and padded: see mt_place. If it fails, the caller must not call mti_end. */
static mt_status mti_expect_mask(mti_operator *op, const char *where, const char *name, mt_tensor y,
                                 const mt_dropout *dropout, int64_t rows, int64_t cols, int padded) {
    const int is_on = dropout->p > 0.0f; /* a data rank may evaluate */
    mt_status status = mti_numbers_agree(op->ctx, where, "p of dropout", y, is_on, 1, (double)dropout->p);
    mt_place place;
    if (status != MT_SUCCESS) return mti_end(op, status);
    if (dropout->p <= 0.0f) return MT_SUCCESS;
    place.rows = rows;
    place.cols = cols;
    place.first_row = dropout->at.first_row;
    place.first_col = dropout->at.first_col;
    place.global_cols = dropout->at.global_cols;
    place.padded = padded;
    place.seed = dropout->at.seed;
    place.subsequence = dropout->at.subsequence;
    place.what = "mask";
    place.vocab = 0;
    status = mt_place_check(op->ctx, where, "dropout.at", name, y, &place);
    return status == MT_SUCCESS ? status : mti_end(op, status);
}

/* Returns the smallest random word whose element is kept. It is exact, because p has 24 bits and the product is
   computed in double. */
static uint32_t mti_dropout_threshold(float p) { return (uint32_t)ceil((double)p * 4294967296.0); }
static float mti_dropout_scale(float p) { return (float)(1.0 / (1.0 - (double)p)); }

static void mti_dropout_block(const float *x, const float *bias, const float *residual, const uint32_t *words,
                              uint32_t threshold, float scale, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float kept = (x[j] + bias[j]) * scale;
        y[j] = residual[j] + mti_select(words[j] >= threshold, kept, 0.0f);
    }
}

static void mti_bias_add_row(const float *x, const float *bias, const float *residual, float *y, int64_t n) {
    int64_t j;
    if (bias && residual) {
        MT_INDEPENDENT
        for (j = 0; j < n; j++) y[j] = residual[j] + (x[j] + bias[j]);
    } else if (bias || residual) {
        mti_row_add(x, bias ? bias : residual, y, n);
    } else if (x != y) {
        memcpy(y, x, (size_t)n * sizeof *y);
    }
}

typedef struct mti_bias_dropout_add {
    mt_tensor x, bias, residual; /* bias is in f32 */
    mt_dropout dropout;
    mt_tensor y;
} mti_bias_dropout_add;

/* The blocks of a row begin where Philox blocks do, see mti_words_fit. */
static void mti_cpu_dropout_row(const mti_bias_dropout_add *f, int64_t row) {
    const float *bias = mti_row(f->bias, 0);
    uint32_t words[MTI_WORDS_ROOM], threshold = mti_dropout_threshold(f->dropout.p);
    float zeros[MTI_WORDS_ROOM] = {0}, room[2][MTI_WORDS_ROOM],
          scale = mti_dropout_scale(f->dropout.p); /* zeros replace an optional view that is left out */
    int64_t j, n;
    for (j = 0; j < f->x.cols; j += n) {
        int64_t e = mti_random_element(f->dropout.at, row, j);
        mt_tensor x, residual, y;
        n = mti_words_fit(e, f->x.cols - j);
        x = mti_f32_read(f->x, row, 1, j, n, room[0]);
        residual = mti_f32_read(f->residual, row, 1, j, n, room[1]);
        y = mti_f32_place(f->y, row, 1, j, n, room[0]);
        mti_dropout_block(mti_row(x, 0), bias ? bias + j : zeros, residual.data ? mti_row(residual, 0) : zeros,
                          mti_random_words(f->dropout.at, e, n, words), threshold, scale, mti_row(y, 0), n);
        mti_f32_write(y, f->y, row, j);
    }
}

static void mti_cpu_bias_add_row(const mti_bias_dropout_add *f, int64_t row) {
    const float *bias = mti_row(f->bias, 0);
    float room[2][MTI_BLOCK];
    int64_t j, n;
    for (j = 0; j < f->x.cols; j += n) {
        mt_tensor x, residual, y;
        n = mt_min(MTI_BLOCK, f->x.cols - j);
        x = mti_f32_read(f->x, row, 1, j, n, room[0]);
        residual = mti_f32_read(f->residual, row, 1, j, n, room[1]);
        y = mti_f32_place(f->y, row, 1, j, n, room[0]);
        mti_bias_add_row(mti_row(x, 0), bias ? bias + j : NULL, mti_row(residual, 0), mti_row(y, 0), n);
        mti_f32_write(y, f->y, row, j);
    }
}

static void mti_cpu_bias_dropout_add_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_bias_dropout_add *f = (const mti_bias_dropout_add *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++)
        if (f->dropout.p > 0.0f) mti_cpu_dropout_row(f, i);
        else mti_cpu_bias_add_row(f, i);
}

typedef struct mti_dropout_slopes {
    mt_tensor dy;
    mt_dropout dropout;
    mt_tensor dx, dbias;
} mti_dropout_slopes;

/* A range of columns of dx and dbias. Four rows at a time: mti_cpu_column_sums reads them while they are in the
   cache. */
static void mti_cpu_bias_dropout_add_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_dropout_slopes *b = (const mti_dropout_slopes *)data;
    float room[4 * MTI_BLOCK];
    int64_t i, rows, n, most = b->dx.dtype == MT_F32 ? last - first : MTI_BLOCK;
    for (; first < last; first += n) {
        n = mt_min(most, last - first);
        for (i = 0; i < b->dy.rows; i += rows) {
            mti_bias_dropout_add four = {b->dy, mt_none(), mt_none(), b->dropout, b->dx};
            rows = mt_min(4, b->dy.rows - i);
            four.x = mt_tensor_cols(mt_tensor_rows(b->dy, i, rows), first, n);
            four.y = mti_f32_place(b->dx, i, rows, first, n, room);
            if (b->dropout.p > 0.0f) { /* without dropout, `at` may have any numbers */
                four.dropout.at.first_row += i;
                four.dropout.at.first_col += first;
            }
            mti_cpu_bias_dropout_add_forward(&four, thread, 0, rows);
            if (b->dbias.data) mti_cpu_column_sums(four.y, mt_tensor_cols(b->dbias, first, n));
            mti_f32_write(four.y, b->dx, i, first);
        }
    }
}

#if MT_HAS_CUDA
extern "C++" {

/* Dropout as kernels see it. An element is dropped if its random word is less than threshold, otherwise multiplied by
   scale. */
struct mti_drop {
    mt_random at;
    uint32_t threshold;
    float scale;
    int on;
    __device__ void draw(int64_t row, int64_t col, uint32_t *words) const {
        if (on) mti_words_of(at, mti_element_of(at, row, col), words);
    }
    __device__ void apply(const uint32_t *words, float *x) const {
        if (!on) return;
        for (int j = 0; j < MTI_VECTOR; j++) x[j] = words[j] < threshold ? 0.0f : x[j] * scale;
    }
};

static mti_drop mti_drop_of(mt_dropout dropout) {
    mti_drop d = {dropout.at, mti_dropout_threshold(dropout.p), mti_dropout_scale(dropout.p), dropout.p > 0.0f};
    return d;
}

template <int TYPE> struct mti_dropout_op { /* y = residual + dropout(x + bias) */
    struct input {
        mti_fetched<TYPE> x, bias, residual;
    };
    mti_view x, bias, residual, y;
    mti_drop drop;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(x, row, col, n, in.x);
        if (residual.data) mti_fetch<WIDE>(residual, row, col, n, in.residual);
        if (bias.data) mti_fetch<WIDE>(bias, 0, col, n, in.bias);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        uint32_t words[MTI_VECTOR];
        float v[MTI_VECTOR];
        drop.draw(row, col, words); /* while the loads are under way */
        mti_values(in.x, v);
        if (bias.data) mti_add_values(in.bias, v);
        drop.apply(words, v);
        if (residual.data) mti_add_values(in.residual, v);
        mti_store<WIDE, TYPE>(y, row, col, n, v);
    }
};

static mt_status mti_cuda_bias_dropout_add_forward(mt_context *ctx, mt_tensor x, mt_tensor bias, mt_tensor residual,
                                                   mt_dropout dropout, mt_tensor y) {
    const char *name = "mt_bias_dropout_add_forward";
    mti_access how = mti_access_of(x, bias, residual, y);
    return mti_by_type(how.type, [&](auto type) {
        mti_dropout_op<type.value> op = {mti_view_of(x), mti_view_of(bias), mti_view_of(residual), mti_view_of(y),
                                         mti_drop_of(dropout)};
        return mti_map_ahead<type.value>(ctx, name, op, how.wide, x.rows, x.cols);
    });
}

/* dx = dropout(dy), and the column sums of dx */
template <int TYPE> struct mti_dropout_backward_op {
    struct input {
        mti_fetched<TYPE> dy;
    };
    mti_view dy, dx;
    mti_drop drop;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
    }
    template <bool WIDE>
    __device__ void finish(int64_t row, int64_t col, int n, const input &in, float (*sums)[MTI_VECTOR]) const {
        uint32_t words[MTI_VECTOR];
        float v[MTI_VECTOR];
        drop.draw(row, col, words);
        mti_values(in.dy, v);
        drop.apply(words, v);
        for (int j = 0; j < MTI_VECTOR; j++) sums[0][j] += v[j];
        mti_store<WIDE, TYPE>(dx, row, col, n, v);
    }
};

static mt_status mti_cuda_bias_dropout_add_backward(mt_context *ctx, mt_tensor dy, mt_dropout dropout, mt_tensor dx,
                                                    mt_tensor dbias) {
    const char *name = "mt_bias_dropout_add_backward";
    mti_access how = mti_access_of(dy, dx);
    return mti_by_type(how.type, [&](auto type) {
        mti_dropout_backward_op<type.value> op = {mti_view_of(dy), mti_view_of(dx), mti_drop_of(dropout)};
        return mti_columns<type.value, 2 * mti_ahead<type.value>::value, 1>(ctx, name, op, how.wide, dy.rows, dy.cols,
                                                                            &dbias);
    });
}

} /* extern "C++" */
#endif

MT_API mt_status mt_bias_dropout_add_forward(mt_context *ctx, mt_tensor x, mt_tensor bias, mt_tensor residual,
                                             mt_dropout dropout, mt_tensor y) {
    static const char *const where = "mt_bias_dropout_add_forward";
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"bias", &bias, 1, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL},
                     {"residual", &residual, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS},
                     {"y", &y, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_dropout(ctx, where, dropout, x.rows, x.cols));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_mask(&op, where, "y", y, &dropout, y.rows, y.cols, 0));
    mti_bias_dropout_add f = {x, bias, residual, dropout, y};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_bias_dropout_add_forward(ctx, x, bias, residual, dropout, y),
                                mti_cpu_rows(ctx, x.rows, x.cols, mti_cpu_bias_dropout_add_forward, &f)));
}

MT_API mt_status mt_bias_dropout_add_backward(mt_context *ctx, mt_tensor dy, mt_dropout dropout, mt_tensor dx,
                                              mt_tensor dbias) {
    static const char *const where = "mt_bias_dropout_add_backward";
    mt_arg args[] = {{"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dx", &dx, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"dbias", &dbias, 1, dy.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM | MT_ARG_OPTIONAL}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_dropout(ctx, where, dropout, dy.rows, dy.cols));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_mask(&op, where, "dx", dx, &dropout, dx.rows, dx.cols, 0));
    mti_dropout_slopes b = {dy, dropout, dx, dbias};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_bias_dropout_add_backward(ctx, dy, dropout, dx, dbias),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_bias_dropout_add_backward, &b)));
}

/* ---- >>attention-desc: arguments and scratch memory of attention ------------------------------------------------- */

/* Checks the sizes in desc, and that the shapes of the argument tables below do not overflow. */
static mt_status mti_expect_heads(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!s) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", where);
    MT_TRY(mt_check_size(ctx, where, NULL, "batch", s->batch, 0, INT64_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "seq", s->seq, 1, INT_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "groups", s->groups, 1, INT64_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "heads_per_group", s->heads_per_group, 1, INT64_MAX - 2));
    MT_TRY(mt_check_size(ctx, where, NULL, "head_dim", s->head_dim, 1, INT64_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "kv_seq", s->kv_seq, 0, INT_MAX));
    if (mt_size_mul(s->batch, mt_max(s->seq, s->kv_seq)) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: a batch of %lld sequences of %lld tokens has too many tokens", where,
                       (long long)s->batch, (long long)mt_max(s->seq, s->kv_seq));
    if (mt_size_mul(mt_size_mul(s->groups, s->heads_per_group + 2), s->head_dim) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld groups of %lld heads of %lld features have too many columns", where,
                       (long long)s->groups, (long long)s->heads_per_group, (long long)s->head_dim);
    return mt_check_enum(ctx, where, NULL, "qkv_layout", (int)s->qkv_layout, MT_QKV_LAYOUT_WORDS);
}

/* In this layout, the columns of qkv are those of all queries, then of all keys, then of all values. */
static mt_status mti_expect_qkv_parts(mt_context *ctx, const char *where, const mt_attention_desc *s, const char *name,
                                      mt_tensor qkv) {
    if (s->qkv_layout != MT_QKV_CONCATENATED || s->heads_per_group > 1) return MT_SUCCESS;
    return mt_parts_check(ctx, where, name, qkv, 3);
}

static int64_t mti_attention_heads(const mt_attention_desc *s) { return s->groups * s->heads_per_group; }

/* Where the heads are in the columns of qkv: head j of group g at g * q_step + j * head_dim, the key of group g at
   key + g * kv_step, and its value `value` columns after the key. */
typedef struct mti_qkv_cols {
    int64_t q_step, kv_step, key, value;
} mti_qkv_cols;

static mti_qkv_cols mti_qkv_cols_of(const mt_attention_desc *s) {
    mti_qkv_cols c;
    int per_group = s->qkv_layout == MT_QKV_PER_GROUP;
    c.q_step = (per_group ? s->heads_per_group + 2 : s->heads_per_group) * s->head_dim;
    c.kv_step = per_group ? c.q_step : s->head_dim;
    c.key = (per_group ? s->heads_per_group : mti_attention_heads(s)) * s->head_dim;
    c.value = per_group ? s->head_dim : s->groups * s->head_dim;
    return c;
}

/* The number of columns of qkv. */
static int64_t mti_attention_width(const mt_attention_desc *s) {
    return s->groups * (s->heads_per_group + 2) * s->head_dim;
}

/* Sets the fields whose 0 means another number. */
static mt_attention_desc mti_attention_defaults(const mt_attention_desc *desc) {
    mt_attention_desc s = *desc;
    if (s.kv_seq == 0) s.kv_seq = s.seq;
    s.window = mt_min(s.window, s.seq + s.kv_seq); /* hides nothing; a larger one could overflow below */
    if (s.bias_batch == 0) s.bias_batch = 1;
    if (s.bias_heads == 0) s.bias_heads = 1;
    s.scale = mt_or_default(s.scale, (float)(1.0 / sqrt((double)s.head_dim)));
    return s;
}

static mt_status mti_expect_lengths(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t b;
    if (!s->lengths || mt_context_device(ctx) != MT_DEVICE_CPU) return MT_SUCCESS;
    for (b = 0; b < s->batch; b++)
        if (s->lengths[b] < 0 || s->lengths[b] > s->kv_seq)
            return mt_fail(ctx, MT_ERR_DATA, "%s: lengths[%lld] is %ld, must be in [0, %lld]", where, (long long)b,
                           (long)s->lengths[b], (long long)s->kv_seq);
    return MT_SUCCESS;
}

/* Checks the documents of tokens. cu_seqlens ends with a number in [least, most]. */
static mt_status mti_expect_cu_seqlens(mt_context *ctx, const char *where, const int32_t *cu_seqlens, int64_t documents,
                                       int64_t least, int64_t most) {
    int64_t d;
    if (!cu_seqlens && documents == 0) return MT_SUCCESS;
    if (!cu_seqlens || documents < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: documents is %lld, but cu_seqlens is %s", where, (long long)documents,
                       cu_seqlens ? "set" : "NULL");
    if (mt_context_device(ctx) != MT_DEVICE_CPU) return MT_SUCCESS;
    for (d = 0; d <= documents; d++)
        if (cu_seqlens[d] < (d > 0 ? cu_seqlens[d - 1] : 0) || (d == 0 && cu_seqlens[0] > 0) || cu_seqlens[d] > most ||
            (d == documents && cu_seqlens[d] < least))
            return mt_fail(ctx, MT_ERR_DATA,
                           "%s: cu_seqlens[%lld] is %ld; the numbers must ascend from 0 to %s%lld, the tokens", where,
                           (long long)d, (long)cu_seqlens[d], least < most ? "at least " : "", (long long)least);
    return MT_SUCCESS;
}

/* s has no defaults left. */
static mt_status mti_expect_documents(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t tokens = s->batch * s->seq;
    if (s->cu_seqlens && s->kv_seq != s->seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: with cu_seqlens, kv_seq %lld must be seq %lld", where,
                       (long long)s->kv_seq, (long long)s->seq);
    return mti_expect_cu_seqlens(ctx, where, s->cu_seqlens, s->documents, tokens, tokens);
}

/* Checks the fields of the bias, except the shapes of its views. */
static mt_status mti_expect_bias(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t heads = mti_attention_heads(s);
    if (s->bias_batch != 1 && s->bias_batch != s->batch)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: bias_batch is %lld, must be 1 or %lld", where, (long long)s->bias_batch,
                       (long long)s->batch);
    MT_TRY(mt_check_size(ctx, where, NULL, "bias_first_head", s->bias_first_head, 0, INT64_MAX));
    if (s->bias_heads != 1 && (s->bias_heads < heads || s->bias_first_head > s->bias_heads - heads))
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: bias_heads is %lld, must be 1 or at least bias_first_head %lld + %lld heads", where,
                       (long long)s->bias_heads, (long long)s->bias_first_head, (long long)heads);
    if (mt_size_mul(mt_size_mul(mt_size_mul(s->bias_batch, s->bias_heads), s->seq), s->kv_seq) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: bias_batch %lld, bias_heads %lld, seq %lld: a bias has too many rows",
                       where, (long long)s->bias_batch, (long long)s->bias_heads, (long long)s->seq);
    if (s->bias.data && s->bias.dtype != MT_U8 && !mt_dtype_is_float(s->bias.dtype))
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: bias is %s, must be f32, bf16 or f16, or u8 for a mask", where,
                       mt_dtype_name(s->bias.dtype));
    return MT_SUCCESS;
}

/* Checks the fields that change scores. */
static mt_status mti_expect_scores(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t heads = mti_attention_heads(s), h;
    MT_TRY(mti_expect_finite(ctx, where, "scale", s->scale));
    MT_TRY(mt_check_integer(ctx, where, NULL, "window", s->window, 0, INT64_MAX));
    MT_TRY(mt_check_float(ctx, where, NULL, "softcap", s->softcap, MT_FLOAT_AT_LEAST_0));
    for (h = 0; s->alibi_slopes && mt_context_device(ctx) == MT_DEVICE_CPU && h < heads; h++)
        if (!(s->alibi_slopes[h] >= 0.0f && s->alibi_slopes[h] <= FLT_MAX))
            return mt_fail(ctx, MT_ERR_DATA, "%s: alibi_slopes[%lld] is %g, must be at least 0", where, (long long)h,
                           (double)s->alibi_slopes[h]);
    MT_TRY(mti_expect_bias(ctx, where, s));
    return mti_expect_documents(ctx, where, s);
}

/* s has no defaults left. */
static mt_status mti_expect_attention(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t heads = mti_attention_heads(s);
    MT_TRY(mt_check_enum(ctx, where, NULL, "mask", (int)s->mask, MT_MASK_WORDS));
    MT_TRY(mti_expect_scores(ctx, where, s));
    MT_TRY(mti_expect_dropout(ctx, where, s->dropout, s->batch, heads));
    if (s->dropout.p > 0.0f &&
        mt_size_mul(mt_size_mul(mt_size_mul(s->dropout.at.first_row + s->batch, s->dropout.at.global_cols), s->seq),
                    s->kv_seq) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: sequence %lld + %lld of %lld heads, seq %lld, kv_seq %lld: a probability has no 64-bit "
                       "element number",
                       where, (long long)s->dropout.at.first_row, (long long)s->batch,
                       (long long)s->dropout.at.global_cols, (long long)s->seq, (long long)s->kv_seq);
    return mti_expect_lengths(ctx, where, s);
}

/* The numbers [first, end) of the keys that a query sees, or of the queries that see a key. None if end <= first. */
typedef struct mti_span {
    int64_t first, end;
} mti_span;

/* The span of both. */
MT_INLINE MT_HOST_DEVICE mti_span mti_span_of_both(mti_span a, int64_t first, int64_t end) {
    if (first > a.first) a.first = first;
    if (end < a.end) a.end = end;
    return a;
}

/* Narrows `all` to the tokens that are in one document with token i of sequence b. A binary search finds the last
   document that begins at or before the token. */
MT_INLINE MT_HOST_DEVICE mti_span mti_document_of(const mt_attention_desc *s, int64_t b, int64_t i, mti_span all) {
    int64_t low = 0, high = s->documents, token = b * s->seq + i;
    if (!s->cu_seqlens) return all;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (s->cu_seqlens[middle] <= token) low = middle;
        else high = middle;
    }
    return mti_span_of_both(all, s->cu_seqlens[low] - b * s->seq, s->cu_seqlens[low + 1] - b * s->seq);
}

/* The position of token i of sequence b in its document, or in its sequence if the document began before it. It is in
   [0, i], whatever cu_seqlens holds. */
MT_INLINE MT_HOST_DEVICE int64_t mti_document_position(const mt_attention_desc *s, int64_t b, int64_t i) {
    mti_span all = {0, i};
    all = mti_document_of(s, b, i, all);
    return all.first < i ? i - all.first : 0;
}

/* The keys that query i of sequence b sees. `length` keys are no padding. */
MT_INLINE MT_HOST_DEVICE mti_span mti_keys_of(const mt_attention_desc *s, int64_t length, int64_t b, int64_t i) {
    int64_t position = i + s->kv_seq - s->seq;
    mti_span all = {0, length};
    all = mti_document_of(s, b, i, all);
    if (s->mask == MT_MASK_CAUSAL) all = mti_span_of_both(all, 0, position + 1);
    return s->window > 0 ? mti_span_of_both(all, position - s->window + 1, position + s->window) : all;
}

/* The queries that see key j of sequence b. */
MT_INLINE MT_HOST_DEVICE mti_span mti_queries_of(const mt_attention_desc *s, int64_t length, int64_t b, int64_t j) {
    int64_t i = j - (s->kv_seq - s->seq); /* the query at the key's position */
    mti_span all = {0, j < length ? s->seq : 0};
    all = mti_document_of(s, b, j, all);
    if (s->mask == MT_MASK_CAUSAL) all = mti_span_of_both(all, i, s->seq);
    return s->window > 0 ? mti_span_of_both(all, i - s->window + 1, i + s->window) : all;
}

/* The row of desc.bias and desc.dbias for query i of a head of sequence b. */
MT_INLINE MT_HOST_DEVICE int64_t mti_bias_row(const mt_attention_desc *s, int64_t b, int64_t head, int64_t i) {
    int64_t sequence = s->bias_batch > 1 ? b : 0, of_head = s->bias_heads > 1 ? s->bias_first_head + head : 0;
    return (sequence * s->bias_heads + of_head) * s->seq + i;
}

/* A CPU computes the scores of MTI_QUERIES queries and MTI_KEYS keys at a time, a block that stays in L2. Both are
   multiples of every MTI_MR and of MTI_TILES, and MTI_KEYS of every MTI_NR and of MTI_PARTIALS. */
#define MTI_QUERIES 96
#define MTI_KEYS 384

/* One call of attention: its arguments, and below them what all heads share in the loops of a CPU. */
typedef struct mti_attention {
    mt_context *ctx;
    mt_attention_desc desc; /* without defaults */
    /* q has head j of group g at column g * q_step + j * head_dim; k and v have group g at g * kv_step */
    mt_tensor q, k, v, out, lse, dout, dq, dk, dv;
    int64_t q_step, kv_step;
    /* the threads that compute, and the floats from the scratch memory of one to that of the next; below, that of the
       first one */
    int64_t threads, thread_floats;
    int pairs;             /* 1: products have bf16 operands, in pairs; see mti_attention_in_pairs */
    int tiles;             /* 1: in pairs, and the products go to tiles; see >>amx */
    float *scores, *grads; /* [queries, mti_scores_width], a block; grads for backward only */
    float *grad_pairs;     /* [queries, mti_scores_width / 2]: in backward in pairs, the rows of grads */
    /* packed k and v of a group, as the right operand of products that sum over features or over keys; packed q and
       dout of MTI_QUERIES queries, for sums over queries. NULL: not needed */
    float *k_features, *k_keys, *v_features, *v_keys, *q_queries, *dout_queries;
    /* rooms for blocks of 16-bit views, see mti_attention_read and mti_f32_place: rows of k or v while they are packed,
       the queries of a block, their out and dout, dq of a head, and dk and dv of a group. NULL: not needed */
    float *kv_room, *q_room, *out_room, *dout_room, *dq_room, *dk_room, *dv_room;
} mti_attention;

typedef struct mti_head {       /* one query head of one sequence */
    int64_t batch, group, head; /* head: its index among all query heads of this shard */
    int64_t length;             /* keys that are no padding */
    int64_t query, key;         /* first rows of the sequence */
    int64_t q_col, kv_col, out_col;
} mti_head;

static mti_attention mti_attention_resolve(mt_context *ctx, const mt_attention_desc *desc, mt_tensor out,
                                           mt_tensor lse) {
    mti_attention a;
    memset(&a, 0, sizeof a);
    a.ctx = ctx;
    a.desc = *desc;
    a.out = out;
    a.lse = lse;
    a.q_step = desc->heads_per_group * desc->head_dim;
    a.kv_step = desc->head_dim;
    a.threads = 1;
    return a;
}

/* Returns the columns of t from `col` on. */
static mt_tensor mti_cols_from(mt_tensor t, int64_t col) { return mt_tensor_cols(t, col, t.cols - col); }

/* Sets the views of queries, keys and values, and of their gradients, in fused tensors. dqkv is optional. */
static void mti_attention_fused(mti_attention *a, mt_tensor qkv, mt_tensor dqkv) {
    mti_qkv_cols c = mti_qkv_cols_of(&a->desc);
    a->q = qkv;
    a->k = mti_cols_from(qkv, c.key);
    a->v = mti_cols_from(a->k, c.value);
    a->q_step = c.q_step;
    a->kv_step = c.kv_step;
    if (!dqkv.data) return;
    a->dq = dqkv;
    a->dk = mti_cols_from(dqkv, c.key);
    a->dv = mti_cols_from(a->dk, c.value);
}

/* Returns 1 if the products of a call have bf16 operands. Then two numbers that a product sums over lie in the place of
   one float, see mti_gemm_step: queries, keys, values and dout as they are, and rounded probabilities and gradients of
   scores. The sums and the softmax are in f32. */
static int mti_attention_in_pairs(const mti_attention *a, int backward) {
    return MT_HAS_AVX512_BF16 && a->q.dtype == MT_BF16 && a->k.dtype == MT_BF16 && a->v.dtype == MT_BF16 &&
           (!backward || a->dout.dtype == MT_BF16);
}

/* The places of n numbers that a product sums over. Those that have no number count as 0. */
static int64_t mti_places(const mti_attention *a, int64_t n) {
    if (a->tiles) return mt_round_up(n, MTI_TILES) / 2;
    return a->pairs ? (n + 1) / 2 : n;
}

/* The queries of a block that scratch memory has room for: whole tiles. */
static int64_t mti_query_room(const mti_attention *a) {
    int64_t queries = mt_min(MTI_QUERIES, a->desc.seq);
    return a->tiles ? mt_round_up(queries, MTI_TILES) : queries;
}

/* The floats of a row of scores: whole vectors of MTI_PARTIALS. */
static int64_t mti_scores_width(const mt_attention_desc *s) {
    return mt_min(MTI_KEYS, mt_round_up(s->kv_seq, MTI_PARTIALS));
}

static mt_status mti_attention_floats(mti_attention *a, int64_t count, float **out) {
    void *memory = NULL;
    MT_TRY(mt_arena_alloc(a->ctx, (size_t)count * sizeof(float), &memory));
    *out = (float *)memory;
    return MT_SUCCESS;
}

/* The same if t needs a room of `rows` rows of a head, as floats or as pairs of features. */
static mt_status mti_attention_head_room(mti_attention *a, mt_tensor t, int64_t rows, float **out) {
    int64_t width = mt_max(a->desc.head_dim, mti_places(a, a->desc.head_dim));
    return !t.data || t.dtype == MT_F32 ? MT_SUCCESS : mti_attention_floats(a, rows * width, out);
}

static mt_status mti_attention_rooms(mti_attention *a) {
    const mt_attention_desc *s = &a->desc;
    int64_t queries = mti_query_room(a);
    MT_TRY(mti_attention_head_room(a, a->k.dtype == MT_F32 ? a->v : a->k, mt_min(MTI_KEYS, s->kv_seq), &a->kv_room));
    MT_TRY(mti_attention_head_room(a, a->q, queries, &a->q_room));
    MT_TRY(mti_attention_head_room(a, a->out, queries, &a->out_room));
    MT_TRY(mti_attention_head_room(a, a->dout, queries, &a->dout_room));
    MT_TRY(mti_attention_head_room(a, a->dq, s->seq, &a->dq_room));
    MT_TRY(mti_attention_head_room(a, a->dk, s->kv_seq, &a->dk_room));
    return mti_attention_head_room(a, a->dv, s->kv_seq, &a->dv_room);
}

/* Allocates the scratch memory of a thread. */
static mt_status mti_attention_thread_scratch(mti_attention *a, int backward) {
    const mt_attention_desc *s = &a->desc;
    int64_t head = mt_round_up(s->head_dim, MTI_NR), queries, features, keys;
    a->pairs = mti_attention_in_pairs(a, backward);
    if (a->pairs) MT_TRY(mti_tiles_open(a->ctx, &a->tiles));
    queries = mti_query_room(a);
    features = mt_round_up(s->kv_seq, MTI_NR) * mti_places(a, s->head_dim);
    keys = mti_places(a, s->kv_seq) * head;
    MT_TRY(mti_attention_rooms(a));
    MT_TRY(mti_attention_floats(a, queries * mti_scores_width(s), &a->scores));
    MT_TRY(mti_attention_floats(a, features, &a->k_features));
    if (!backward) return mti_attention_floats(a, keys, &a->v_keys);
    MT_TRY(mti_attention_floats(a, queries * mti_scores_width(s), &a->grads));
    if (a->pairs) MT_TRY(mti_attention_floats(a, queries * mti_scores_width(s) / 2, &a->grad_pairs));
    MT_TRY(mti_attention_floats(a, keys, &a->k_keys));
    MT_TRY(mti_attention_floats(a, features, &a->v_features));
    MT_TRY(mti_attention_floats(a, mti_places(a, queries) * head, &a->q_queries));
    return mti_attention_floats(a, mti_places(a, queries) * head, &a->dout_queries);
}

/* Allocates the scratch memory of a->threads threads. */
static mt_status mti_attention_scratch(mti_attention *a, int backward) {
    size_t bytes = mt_arena_mark(a->ctx);
    void *room;
    int64_t i;
    MT_TRY(mti_attention_thread_scratch(a, backward));
    bytes = mt_arena_mark(a->ctx) - bytes;
    a->thread_floats = (int64_t)(bytes / sizeof(float));
    for (i = 1; i < a->threads; i++) MT_TRY(mt_arena_alloc(a->ctx, bytes, &room));
    return MT_SUCCESS;
}

/* Returns a call with the scratch memory of a thread. */
static mti_attention mti_attention_of_thread(const mti_attention *a, int thread) {
    mti_attention t = *a;
    float **const parts[] = {&t.scores,    &t.grads,     &t.grad_pairs,   &t.k_features, &t.k_keys, &t.v_features,
                             &t.v_keys,    &t.q_queries, &t.dout_queries, &t.kv_room,    &t.q_room, &t.out_room,
                             &t.dout_room, &t.dq_room,   &t.dk_room,      &t.dv_room};
    size_t i;
    for (i = 0; i < sizeof parts / sizeof *parts; i++)
        if (*parts[i]) *parts[i] += thread * a->thread_floats;
    return t;
}

/* Locates query head `member` of a group: its columns and its rows. */
static mti_head mti_attention_head(const mti_attention *a, int64_t batch, int64_t group, int64_t member) {
    const mt_attention_desc *s = &a->desc;
    mti_head h;
    h.batch = batch;
    h.group = group;
    h.head = group * s->heads_per_group + member;
    h.length = s->lengths ? s->lengths[batch] : s->kv_seq;
    h.query = batch * s->seq;
    h.key = batch * s->kv_seq;
    h.q_col = group * a->q_step + member * s->head_dim;
    h.kv_col = group * a->kv_step;
    h.out_col = h.head * s->head_dim;
    return h;
}

static float *mti_at(mt_tensor t, int64_t row, int64_t col) { return (float *)t.data + row * mt_tensor_ld(t) + col; }

/* Reads `rows` rows of a bf16 view of a head, with pairs of neighbouring features in places of floats. */
static mt_tensor mti_feature_pairs(const mti_attention *a, mt_tensor t, int64_t row, int64_t rows, int64_t col,
                                   float *room) {
    int64_t d = a->desc.head_dim, i;
    mt_tensor x = mt_tensor_make(room, MT_F32, rows, mti_places(a, d));
    for (i = 0; i < rows; i++) {
        float *y = mti_row(x, i);
        mti_row_fill(y + d / 2, 0.0f, x.cols - d / 2);
        memcpy(y, mti_row16(t, row + i) + col, (size_t)d * sizeof(uint16_t));
    }
    return x;
}

/* Reads `rows` rows of a head for products that sum over features. room: see mti_attention. */
static mt_tensor mti_attention_read(const mti_attention *a, mt_tensor t, int64_t row, int64_t rows, int64_t col,
                                    float *room) {
    if (a->pairs) return mti_feature_pairs(a, t, row, rows, col, room);
    return mti_f32_read(t, row, rows, col, a->desc.head_dim, room);
}

/* Packs n rows of t, from column `col` on, for products that sum over features. */
static void mti_pack_features(const mti_attention *a, mt_tensor t, int64_t row, int64_t col, int64_t n, float *out) {
    int64_t places = mti_places(a, a->desc.head_dim), i;
    for (i = 0; i < n; i += MTI_KEYS) {
        mt_tensor x = mti_attention_read(a, t, row + i, mt_min(MTI_KEYS, n - i), col, a->kv_room);
        mti_pack(mti_row(x, 0), mt_tensor_ld(x), 1, x.rows, places, MTI_NR, out + i * places);
    }
}

/* Packs n rows of a bf16 view of a head, with pairs of neighbouring rows in places of floats. Rows from `length` on
   count as 0. */
static void mti_pack_row_pairs(const mti_attention *a, mt_tensor t, int64_t row, int64_t col, int64_t n, int64_t length,
                               float *out) {
    int64_t places = mti_places(a, n), head_dim = a->desc.head_dim, p, i, j, count;
    length = mt_min(length, n);
    for (p = 0; p < places; p++) {
        const uint16_t *x = mti_row16(t, row + mt_min(2 * p, n - 1)) + col;
        const uint16_t *y = mti_row16(t, row + mt_min(2 * p + 1, n - 1)) + col;
        uint32_t present = 2 * p + 1 < length ? 0xffffffffu : 2 * p < length ? 0x0000ffffu : 0;
        for (i = 0; i < head_dim; i += MTI_NR) {
            float *to = out + i * places + p * MTI_NR;
            count = mt_min(MTI_NR, head_dim - i);
            MT_INDEPENDENT
            for (j = 0; j < count; j++) to[j] = mt_f32_from_bits((x[i + j] | (uint32_t)y[i + j] << 16) & present);
            mti_row_fill(to + count, 0.0f, MTI_NR - count);
        }
    }
}

/* Packs n rows of t, from column `col` on, for products that sum over rows: at most MTI_KEYS rows at a time. Products
   sum over the first `length` rows. */
static void mti_pack_rows(const mti_attention *a, mt_tensor t, int64_t row, int64_t col, int64_t n, int64_t length,
                          float *out) {
    int64_t d = a->desc.head_dim, i;
    for (i = 0; i < n; i += MTI_KEYS) {
        int64_t rows = mt_min(MTI_KEYS, n - i);
        float *to = out + mti_places(a, i) * mt_round_up(d, MTI_NR);
        if (a->pairs) mti_pack_row_pairs(a, t, row + i, col, rows, length - i, to);
        else {
            mt_tensor x = mti_f32_read(t, row + i, rows, col, d, a->kv_room);
            mti_pack(mti_row(x, 0), 1, mt_tensor_ld(x), d, rows, MTI_NR, to);
        }
    }
}

/* Packs the keys and values of a group. */
static void mti_attention_pack(const mti_attention *a, int64_t batch, int64_t group) {
    const mt_attention_desc *s = &a->desc;
    int64_t n = s->kv_seq, row = batch * n, col = group * a->kv_step, length = s->lengths ? s->lengths[batch] : n;
    mti_pack_features(a, a->k, row, col, n, a->k_features);
    if (a->k_keys) mti_pack_rows(a, a->k, row, col, n, length, a->k_keys);
    if (a->v_features) mti_pack_features(a, a->v, row, col, n, a->v_features);
    if (a->v_keys) mti_pack_rows(a, a->v, row, col, n, length, a->v_keys);
}

/* ---- >>attention-cpu: attention on a CPU ------------------------------------------------------------------------- */

/* A block of scores: queries [query, query + rows) of a head and keys [key, key + keys) of its group. */
typedef struct mti_score_block {
    int64_t query, rows, key, keys;
    mti_span seen[MTI_QUERIES];                /* of each query: the keys that it sees, as columns of the block */
    mti_span by_queries[MTI_QUERIES / MTI_MR]; /* the columns that the queries of a tile see together */
    mti_span by_keys[MTI_KEYS / MTI_MR];       /* the queries that see a key of a tile, as rows of the block */
} mti_score_block;

/* Extends `all` so that it also has the numbers [first, end), if these are any. */
static void mti_span_extend(mti_span *all, int64_t first, int64_t end) {
    if (end <= first) return;
    if (all->end <= all->first) all->first = first, all->end = end;
    all->first = mt_min(all->first, first);
    all->end = mt_max(all->end, end);
}

/* Notes that the queries [first, end) of a block see its columns `seen`. */
static void mti_scores_note(mti_score_block *b, int64_t first, int64_t end, mti_span seen) {
    int64_t t;
    for (t = first / MTI_MR; t * MTI_MR < end; t++) mti_span_extend(&b->by_queries[t], seen.first, seen.end);
    for (t = seen.first / MTI_MR; t * MTI_MR < seen.end; t++) mti_span_extend(&b->by_keys[t], first, end);
}

/* What query r of a block sees, as columns of the block: none if end <= first. Neither number decreases with r. */
static mti_span mti_scores_span(const mti_attention *a, const mti_head *h, const mti_score_block *b, int64_t r) {
    mti_span seen = mti_keys_of(&a->desc, h->length, h->batch, b->query + r);
    seen = mti_span_of_both(seen, b->key, b->key + b->keys);
    seen.first -= b->key;
    seen.end -= b->key;
    return seen;
}

/* Sets what the queries of a block see. Returns 0 if they see no key of it. */
static int mti_scores_see(const mti_attention *a, const mti_head *h, mti_score_block *b) {
    int64_t r, first = 0; /* the first of the queries that see the same */
    int any = 0, same;
    mti_span low = mti_scores_span(a, h, b, 0), high = mti_scores_span(a, h, b, b->rows - 1);
    if (high.end <= 0 || low.first >= b->keys) return 0;
    same = low.first == high.first && low.end == high.end;
    memset(b->by_queries, 0, sizeof b->by_queries);
    memset(b->by_keys, 0, sizeof b->by_keys);
    for (r = 0; r < b->rows; r++) {
        mti_span *seen = &b->seen[r];
        *seen = same ? low : mti_scores_span(a, h, b, r);
        if (seen->end <= seen->first) seen->first = seen->end = 0;
        any |= seen->end > 0;
        if (seen->first == b->seen[first].first && seen->end == b->seen[first].end) continue;
        mti_scores_note(b, first, r, b->seen[first]);
        first = r;
    }
    mti_scores_note(b, first, b->rows, b->seen[first]);
    return any;
}

/* The union of the spans of rows [i, end), of which MTI_MR share one. */
static mti_span mti_spans_of_rows(const mti_span *seen, int64_t i, int64_t end) {
    mti_span all = {0, 0};
    for (; i < end; i += MTI_MR) mti_span_extend(&all, seen[i / MTI_MR].first, seen[i / MTI_MR].end);
    return all;
}

/* c [m, n] = alpha a b + beta c, without the tiles whose columns no query of the tile sees. */
static void mti_score_tiles(const mti_gemm_piece *x, const mti_span *seen) {
    int64_t rows = x->tiles ? MTI_TILES : MTI_MR, i, j;
    for (j = 0; j < x->n; j += MTI_NR)
        for (i = 0; i < x->m; i += rows) {
            mti_span t = mti_spans_of_rows(seen, i, mt_min(i + rows, x->m));
            if (j >= t.end || j + MTI_NR <= t.first) continue;
            if (x->tiles) mti_tiles_product(x, i, j, 0, x->k, x->a + i * x->a_row, x->a_row);
            else mti_gemm_tile(x, i, j, 0, x->k);
        }
}

/* mti_score_sums in tiles: they sum over all steps that have a part of a span. */
static void mti_score_sums_in_tiles(const mti_gemm_piece *x, const mti_span *seen) {
    float room[MTI_TILES * MTI_QUERIES / 2];
    int64_t i, j;
    for (i = 0; i < x->m; i += MTI_TILES) {
        mti_span t = mti_spans_of_rows(seen, i, mt_min(i + MTI_TILES, x->m));
        const float *a = x->a + i * x->a_row;
        int64_t first = t.first / MTI_TILES * MTI_TILE_SIDE, end = mt_round_up(t.end, MTI_TILES) / 2, lda = x->a_row;
        a += first * x->a_col;
        if (x->a_col != 1 && end > first) {
            lda = end - first;
            mti_tiles_transpose(a, x->a_col, lda, room);
            a = room;
        }
        for (j = 0; j < x->n && end > first; j += MTI_TILES) mti_tiles_product(x, i, j, first, end, a, lda);
    }
}

/* c [m, n] += alpha a b, where the rows of a tile sum over their span, in pairs over all pairs that have a part of
   it. */
static void mti_score_sums(const mti_gemm_piece *x, const mti_span *seen) {
    int64_t i, j;
    if (x->tiles) {
        mti_score_sums_in_tiles(x, seen);
        return;
    }
    for (j = 0; j < x->n; j += MTI_NR)
        for (i = 0; i < x->m; i += MTI_MR) {
            mti_span t = seen[i / MTI_MR];
            if (t.end <= t.first) continue;
            if (x->pairs) t.first /= 2, t.end = (t.end + 1) / 2;
            mti_gemm_tile(x, i, j, t.first, t.end);
        }
}

/* out [rows, keys] = alpha x y^T, for x [rows, head_dim] of mti_attention_read and packed features y. */
static void mti_scores_of(const mti_attention *a, const mti_score_block *b, float alpha, mt_tensor x, const float *y,
                          float *out) {
    mti_gemm_piece g;
    g.a = mti_row(x, 0);
    g.packed_a = NULL;
    g.packed_b = y + b->key * x.cols;
    g.c = out;
    g.a_row = mt_tensor_ld(x);
    g.a_col = 1;
    g.ldc = mti_scores_width(&a->desc);
    g.m = b->rows;
    g.n = b->keys;
    g.k = x.cols;
    g.alpha = alpha;
    g.beta = 0.0f;
    g.pairs = a->pairs;
    g.tiles = a->tiles;
    mti_score_tiles(&g, b->by_queries);
}

/* out [rows, head_dim] += alpha x y, for x [rows, keys], whose rows are ldx apart, and packed rows y. In pairs, x has
   pairs of keys. */
static void mti_scores_to_queries(const mti_attention *a, const mti_score_block *b, float alpha, const float *x,
                                  int64_t ldx, const float *y, mt_tensor out) {
    mti_gemm_piece g;
    g.a = x;
    g.packed_a = NULL;
    g.packed_b = y + mti_places(a, b->key) * mt_round_up(a->desc.head_dim, MTI_NR);
    g.c = mti_row(out, 0);
    g.a_row = ldx;
    g.a_col = 1;
    g.ldc = mt_tensor_ld(out);
    g.m = b->rows;
    g.n = a->desc.head_dim;
    g.k = mti_places(a, b->keys);
    g.alpha = alpha;
    g.beta = 1.0f;
    g.pairs = a->pairs;
    g.tiles = a->tiles;
    mti_score_sums(&g, b->by_queries);
}

/* out [keys, head_dim] += alpha x^T y, for x [rows, keys] and y with packed queries. In pairs, every second row of x
   has pairs of queries. */
static void mti_scores_to_keys(const mti_attention *a, const mti_score_block *b, float alpha, const float *x,
                               const float *y, mt_tensor out) {
    mti_gemm_piece g;
    g.a = x;
    g.packed_a = NULL;
    g.packed_b = y;
    g.c = mti_row(out, 0);
    g.a_row = 1;
    g.a_col = (a->pairs ? 2 : 1) * mti_scores_width(&a->desc);
    g.ldc = mt_tensor_ld(out);
    g.m = b->keys;
    g.n = a->desc.head_dim;
    g.k = mti_places(a, b->rows);
    g.alpha = alpha;
    g.beta = 1.0f;
    g.pairs = a->pairs;
    g.tiles = a->tiles;
    mti_score_sums(&g, b->by_keys);
}

/* Caps n scores x. slopes, if it is not NULL, becomes the derivative of the soft cap. */
static void mti_attention_cap_row(float cap, float *x, float *slopes, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j++) {
        float t = tanhf(x[j] / cap);
        x[j] = cap * t;
        if (slopes) slopes[j] = 1.0f - t * t;
    }
}

/* Adds what a distance of keys costs: x[j] belongs to key first + j. */
static void mti_attention_alibi_row(float slope, int64_t position, int64_t first, float *x, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float distance = (float)(position - first - j);
        x[j] -= slope * (distance < 0.0f ? -distance : distance);
    }
}

/* Changes the scores x of query i for n keys from `first` on as desc.softcap, alibi_slopes and bias say. */
static void mti_attention_change_row(const mti_attention *a, const mti_head *h, int64_t i, int64_t first, float *x,
                                     int64_t n, float *slopes) {
    const mt_attention_desc *s = &a->desc;
    int64_t row = mti_bias_row(s, h->batch, h->head, i), j;
    float room[MTI_KEYS];
    if (s->softcap > 0.0f) mti_attention_cap_row(s->softcap, x, slopes, n);
    if (s->alibi_slopes) mti_attention_alibi_row(s->alibi_slopes[h->head], i + s->kv_seq - s->seq, first, x, n);
    if (!s->bias.data) return;
    if (s->bias.dtype == MT_U8) {
        const uint8_t *seen = (const uint8_t *)s->bias.data + row * mt_tensor_ld(s->bias) + first;
        for (j = 0; j < n; j++)
            if (!seen[j]) x[j] = -(float)INFINITY;
    } else mti_row_add(x, mti_row(mti_f32_read(s->bias, row, 1, first, n, room), 0), x, n);
}

/* The global element number of the probability of query i and key 0. */
static int64_t mti_probability_element(const mti_attention *a, const mti_head *h, int64_t i) {
    const mt_attention_desc *s = &a->desc;
    return (mti_random_element(s->dropout.at, h->batch, h->head) * s->seq + i) * s->kv_seq;
}

static void mti_words_to_factors(const uint32_t *words, uint32_t threshold, float scale, float *factors, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) factors[j] = mti_select(words[j] >= threshold, scale, 0.0f);
}

/* The factors by which dropout multiplies the n elements from number e on: 0 drops one. */
static void mti_dropout_factors(const mt_dropout *dropout, int64_t e, float *factors, int64_t n) {
    uint32_t room[MTI_WORDS_ROOM], threshold = mti_dropout_threshold(dropout->p);
    int64_t j, count;
    for (j = 0; j < n; j += count) {
        count = mt_min(MTI_WORDS, n - j);
        mti_words_to_factors(mti_random_words(dropout->at, e + j, count, room), threshold,
                             mti_dropout_scale(dropout->p), factors + j, count);
    }
}

/* A dropped element becomes 0, even if it is not finite. */
static void mti_attention_drop_row(const float *factors, float *p, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) p[j] = mti_select(factors[j] > 0.0f, p[j] * factors[j], 0.0f);
}

#if MT_HAS_AVX512_BF16
/* Rounds n numbers, whole vectors of MTI_PARTIALS, to pairs of neighbours. out may be x. */
static void mti_key_pairs(const float *x, float *out, int64_t n) {
    mti_simd a, b;
    int64_t j;
    for (j = 0; j < n; j += 2 * MTI_SIMD, out += MTI_SIMD) {
        memcpy(&a, x + j, sizeof a);
        memcpy(&b, x + j + MTI_SIMD, sizeof b);
        a = (mti_simd)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        memcpy(out, &a, sizeof a);
    }
}

/* Rounds two rows of n numbers, whole vectors, to pairs of one number of x and one of y. out may be x or y. */
static void mti_query_pairs(const float *x, const float *y, float *out, int64_t n) {
    const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i turns = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
    mti_simd a, b;
    int64_t j;
    for (j = 0; j < n; j += MTI_SIMD) {
        memcpy(&a, x + j, sizeof a);
        memcpy(&b, y + j, sizeof b);
        a = (mti_simd)_mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
        memcpy(out + j, &a, sizeof a);
    }
}
#else
static void mti_key_pairs(const float *x, float *out, int64_t n) { (void)x, (void)out, (void)n; }
static void mti_query_pairs(const float *x, const float *y, float *out, int64_t n) {
    (void)x, (void)y, (void)out, (void)n;
}
#endif

/* Fills the elements of x [n] outside of [first, end) with zeros. */
static void mti_attention_zero_outside(float *x, int64_t first, int64_t end, int64_t n) {
    mti_row_fill(x, 0.0f, first);
    mti_row_fill(x + end, 0.0f, n - end);
}

/* Extends a span of a row of scores to whole vectors of MTI_PARTIALS. */
static mti_span mti_span_whole(mti_span seen) {
    seen.first -= seen.first % MTI_PARTIALS;
    seen.end = mt_round_up(seen.end, MTI_PARTIALS);
    return seen;
}

/* Fills a row of scores around a span, up to whole vectors. */
static void mti_span_pad(float *x, mti_span seen, float value) {
    mti_span whole = mti_span_whole(seen);
    mti_row_fill(x + whole.first, value, seen.first - whole.first);
    mti_row_fill(x + seen.end, value, whole.end - seen.end);
}

/* The softmax of the queries of a head so far: the largest score, and the sum of e^(score - top). */
typedef struct mti_softmax {
    float top[MTI_QUERIES], sum[MTI_QUERIES];
} mti_softmax;

/* Adds the scores that query i sees to the softmax of row r. The scores x are a row of a block, the first of which is
   that of key `key`. They become e^(score - top), with dropout, and 0 around those seen, up to whole vectors. Returns 0
   if all of them are masked, and the row of the output `out` must not get them. */
static int mti_softmax_add(const mti_attention *a, const mti_head *h, mti_softmax *m, int64_t r, int64_t i, int64_t key,
                           float *x, mti_span seen, float *out) {
    const mt_dropout *dropout = &a->desc.dropout;
    mti_span whole = mti_span_whole(seen);
    float *p = x + seen.first, top, old = m->top[r], factors[MTI_KEYS];
    int64_t first = key + seen.first, n = whole.end - whole.first;
    mti_attention_change_row(a, h, i, first, p, seen.end - seen.first, NULL);
    mti_span_pad(x, seen, -(float)INFINITY);
    x += whole.first;
    top = mti_row_max(x, n);
    if (top == -(float)INFINITY && mti_row_sum(x, n) == top) return 0; /* all are masked, none is NaN */
    if (top < old) top = old;
    if (top > old && m->sum[r] != 0.0f) {
        float factor = mti_exp(old - top);
        m->sum[r] *= factor;
        mti_row_scale(out, factor, a->desc.head_dim);
    }
    m->top[r] = top;
    m->sum[r] += mti_row_exp(x, top, n);
    if (dropout->p > 0.0f) {
        mti_dropout_factors(dropout, mti_probability_element(a, h, i) + first, factors, seen.end - seen.first);
        mti_attention_drop_row(factors, p, seen.end - seen.first);
    }
    return 1;
}

/* scores = e^(scores - the largest of the row so far), with dropout. The output so far is scaled to the same number
   (arXiv 2205.14135, algorithm 1). Rows of scores that are not seen become 0. In pairs, a row then has pairs of
   keys. */
static void mti_scores_softmax(const mti_attention *a, const mti_head *h, const mti_score_block *b, mti_softmax *m,
                               mt_tensor out) {
    int64_t width = mt_round_up(b->keys, MTI_PARTIALS), r;
    for (r = 0; r < b->rows; r++) {
        float *p = a->scores + r * mti_scores_width(&a->desc);
        mti_span seen = b->seen[r];
        if (seen.end > seen.first && mti_softmax_add(a, h, m, r, b->query + r, b->key, p, seen, mti_row(out, r)))
            seen = mti_span_whole(seen);
        else seen.end = seen.first;
        mti_attention_zero_outside(p, seen.first, seen.end, width);
        if (a->pairs) mti_key_pairs(p, p, width);
    }
}

/* Divides the output by the sums, and writes lse. A query that sees no key has the output 0. */
static void mti_softmax_end(const mti_attention *a, const mti_head *h, const mti_softmax *m, int64_t row,
                            mt_tensor out) {
    int64_t r;
    for (r = 0; r < out.rows; r++) {
        float sum = m->sum[r];
        mti_row_scale(mti_row(out, r), sum == 0.0f ? 0.0f : 1.0f / sum, out.cols);
        if (a->lse.data) *mti_at(a->lse, h->head, row + r) = sum == 0.0f ? m->top[r] : m->top[r] + logf(sum);
    }
    mti_f32_write(out, a->out, row, h->out_col);
}

/* Fills a view of any type with zeros. */
static void mti_attention_clear(mt_tensor t) {
    int64_t i;
    for (i = 0; i < t.rows; i++) memset(mti_bytes_at(t, i, 0), 0, (size_t)t.cols * mt_dtype_size(t.dtype));
}

/* Computes the output of up to MTI_QUERIES queries of a head, from `query` on, block by block. */
static void mti_attention_forward_queries(const mti_attention *a, const mti_head *h, int64_t query) {
    const mt_attention_desc *s = &a->desc;
    int64_t row = h->query + query;
    mt_tensor q, out;
    mti_softmax m;
    mti_score_block b;
    b.query = query;
    b.rows = mt_min(MTI_QUERIES, s->seq - query);
    q = mti_attention_read(a, a->q, row, b.rows, h->q_col, a->q_room);
    out = mti_f32_place(a->out, row, b.rows, h->out_col, s->head_dim, a->out_room);
    mti_row_fill(m.top, -(float)INFINITY, b.rows);
    mti_row_fill(m.sum, 0.0f, b.rows);
    mti_attention_clear(out);
    for (b.key = 0; b.key < s->kv_seq; b.key += MTI_KEYS) {
        b.keys = mt_min(MTI_KEYS, s->kv_seq - b.key);
        if (!mti_scores_see(a, h, &b)) continue;
        mti_scores_of(a, &b, s->scale, q, a->k_features, a->scores);
        mti_scores_softmax(a, h, &b, &m, out);
        mti_scores_to_queries(a, &b, 1.0f, a->scores, mti_scores_width(s), a->v_keys, out);
    }
    mti_softmax_end(a, h, &m, row, out);
}

/* Computes the output of a query head. */
static void mti_attention_forward_head(const mti_attention *a, const mti_head *h) {
    int64_t query;
    for (query = 0; query < a->desc.seq; query += MTI_QUERIES) mti_attention_forward_queries(a, h, query);
}

/* The number of blocks of queries. */
static int64_t mti_attention_blocks(const mt_attention_desc *s) { return (s->seq + MTI_QUERIES - 1) / MTI_QUERIES; }

/* An item is a block of queries of a head. Its number counts sequences, groups, heads and blocks, in this order. The
   last block follows the first one, and so on: with a causal mask two neighbours have as much work as any other two. */
static void mti_cpu_attention_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_attention a = mti_attention_of_thread((const mti_attention *)data, thread);
    const mt_attention_desc *s = &a.desc;
    int64_t blocks = mti_attention_blocks(s), of_group = s->heads_per_group * blocks, i;
    if (a.tiles) mti_tiles_begin();
    for (i = first; i < last; i++) {
        int64_t pair = i / of_group, block = i % blocks;
        mti_head h = mti_attention_head(&a, pair / s->groups, pair % s->groups, i % of_group / blocks);
        if (i == first || i % of_group == 0) mti_attention_pack(&a, h.batch, h.group);
        block = block % 2 ? blocks - 1 - block / 2 : block / 2;
        mti_attention_forward_queries(&a, &h, block * MTI_QUERIES);
    }
    if (a.tiles) mti_tiles_end();
}

/* scores = p = e^(scores - lse), and grads = p (grads - delta). On entry grads is the gradient of p, on return the
   gradient of the scores. */
static void mti_attention_backward_row(float *scores, float *grads, float lse, float delta, int64_t n) {
    float least = mti_unknown(-127.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float p = mti_exp_below(scores[j] - lse, least);
        scores[j] = p;
        grads[j] = p * (grads[j] - delta);
    }
}

/* The row of query i in backward: scores become p, and grads, the gradients of p, those of the scores. Around those
   seen, both become 0, up to whole vectors. With dropout D, scores become D p, which dv needs, and D is applied to the
   incoming gradient first. delta = rowsum(dout * out) holds with and without D, because out contains D. The gradient of
   the bias is that of the changed scores, before the soft cap's derivative. */
static void mti_scores_backward_row(const mti_attention *a, const mti_head *h, int64_t i, int64_t key, float *p,
                                    float *d, mti_span seen, float delta) {
    const mt_attention_desc *s = &a->desc;
    mti_span whole = mti_span_whole(seen);
    int64_t first = key + seen.first, n = seen.end - seen.first, j;
    float slopes[MTI_KEYS], factors[MTI_KEYS], lse = *mti_at(a->lse, h->head, h->query + i), *dbias;
    float *x = p + seen.first, *dx = d + seen.first;
    mti_attention_change_row(a, h, i, first, x, n, slopes);
    if (s->dropout.p > 0.0f) {
        mti_dropout_factors(&s->dropout, mti_probability_element(a, h, i) + first, factors, n);
        mti_attention_drop_row(factors, dx, n);
    }
    mti_attention_backward_row(p + whole.first, d + whole.first, lse, delta, whole.end - whole.first);
    mti_span_pad(p, seen, 0.0f);
    mti_span_pad(d, seen, 0.0f);
    if (s->dropout.p > 0.0f) mti_attention_drop_row(factors, x, n);
    if (s->dbias.data) {
        dbias = mti_at(s->dbias, mti_bias_row(s, h->batch, h->head, i), first);
        mti_row_add(dbias, dx, dbias, n);
    }
    for (j = 0; s->softcap > 0.0f && j < n; j++) dx[j] *= slopes[j];
}

/* Rounds the rows of probabilities and gradients that end with row r, the second one of a pair or the last one. */
static void mti_scores_round(const mti_attention *a, int64_t r, int64_t width) {
    static const float zeros[MTI_KEYS] = {0};
    int64_t ld = mti_scores_width(&a->desc), first = r - r % 2;
    float *p = a->scores + first * ld, *d = a->grads + first * ld, *pairs = a->grad_pairs + first * ld / 2;
    mti_key_pairs(d, pairs, width);
    if (r > first) mti_key_pairs(d + ld, pairs + ld / 2, width);
    mti_query_pairs(p, r > first ? p + ld : zeros, p, width);
    mti_query_pairs(d, r > first ? d + ld : zeros, d, width);
}

/* Computes the probabilities of a block and the gradients of its scores. What is not seen becomes 0. In pairs, every
   second row gets pairs of queries, and grad_pairs gets pairs of keys. In tiles, queries that do not exist count as
   0. */
static void mti_scores_backward_rows(const mti_attention *a, const mti_head *h, const mti_score_block *b,
                                     const float *deltas) {
    int64_t width = mt_round_up(b->keys, MTI_PARTIALS), r;
    for (r = 0; r < b->rows; r++) {
        float *p = a->scores + r * mti_scores_width(&a->desc), *d = a->grads + r * mti_scores_width(&a->desc);
        mti_span seen = b->seen[r];
        if (*mti_at(a->lse, h->head, h->query + b->query + r) == -(float)INFINITY) seen.end = seen.first;
        if (seen.end > seen.first) {
            mti_scores_backward_row(a, h, b->query + r, b->key, p, d, seen, deltas[r]);
            seen = mti_span_whole(seen);
        }
        mti_attention_zero_outside(p, seen.first, seen.end, width);
        mti_attention_zero_outside(d, seen.first, seen.end, width);
        if (a->pairs && (r % 2 == 1 || r + 1 == b->rows)) mti_scores_round(a, r, width);
    }
    for (r = mt_round_up(r, 2); a->tiles && r < mt_round_up(b->rows, MTI_TILES); r += 2) {
        mti_row_fill(a->scores + r * mti_scores_width(&a->desc), 0.0f, width);
        mti_row_fill(a->grads + r * mti_scores_width(&a->desc), 0.0f, width);
    }
}

/* The queries of a block in backward: what is read for them, see mti_attention_read, and the gradient in f32. */
typedef struct mti_query_rows {
    mt_tensor q, dout, dq;
    float deltas[MTI_QUERIES]; /* rowsum(dout * out) */
} mti_query_rows;

/* Computes what a block adds to the gradients: dv += p^T dout, dq += scale ds k, dk += scale ds^T q. dk and dv are
   those of the group. */
static void mti_scores_backward(const mti_attention *a, const mti_head *h, const mti_score_block *b,
                                const mti_query_rows *x, mt_tensor dk, mt_tensor dv) {
    const float *ds = a->pairs ? a->grad_pairs : a->grads;
    int64_t width = mti_scores_width(&a->desc);
    float scale = a->desc.scale;
    mti_scores_of(a, b, scale, x->q, a->k_features, a->scores);
    mti_scores_of(a, b, 1.0f, x->dout, a->v_features, a->grads);
    mti_scores_backward_rows(a, h, b, x->deltas);
    mti_scores_to_keys(a, b, 1.0f, a->scores, a->dout_queries, mt_tensor_rows(dv, b->key, b->keys));
    mti_scores_to_queries(a, b, scale, ds, mti_places(a, width), a->k_keys, x->dq);
    mti_scores_to_keys(a, b, scale, a->grads, a->q_queries, mt_tensor_rows(dk, b->key, b->keys));
}

/* Reads and packs the queries of a block. dq is that of the head. */
static void mti_query_rows_read(const mti_attention *a, const mti_head *h, const mti_score_block *b, mt_tensor dq,
                                mti_query_rows *x) {
    int64_t d = a->desc.head_dim, row = h->query + b->query, rows = b->rows, r;
    mt_tensor out = mti_f32_read(a->out, row, rows, h->out_col, d, a->out_room);
    x->dout = mti_f32_read(a->dout, row, rows, h->out_col, d, a->dout_room);
    for (r = 0; r < rows; r++) x->deltas[r] = mti_row_dot(mti_row(x->dout, r), mti_row(out, r), d);
    x->q = mti_attention_read(a, a->q, row, rows, h->q_col, a->q_room);
    x->dq = mt_tensor_rows(dq, b->query, rows);
    if (a->pairs) {
        x->dout = mti_feature_pairs(a, a->dout, row, rows, h->out_col, a->dout_room);
        mti_pack_rows(a, a->q, row, h->q_col, rows, rows, a->q_queries);
        mti_pack_rows(a, a->dout, row, h->out_col, rows, rows, a->dout_queries);
    } else {
        mti_pack_rows(a, x->q, 0, 0, rows, rows, a->q_queries);
        mti_pack_rows(a, x->dout, 0, 0, rows, rows, a->dout_queries);
    }
}

/* Computes the gradients of a query head, block by block. The keys of a block, and their gradients, stay in L2 while
   all queries use them. */
static void mti_attention_backward_head(const mti_attention *a, const mti_head *h, mt_tensor dk, mt_tensor dv) {
    const mt_attention_desc *s = &a->desc;
    mt_tensor dq = mti_f32_place(a->dq, h->query, s->seq, h->q_col, s->head_dim, a->dq_room);
    mti_query_rows x;
    mti_score_block b;
    mti_attention_clear(dq);
    for (b.key = 0; b.key < s->kv_seq; b.key += MTI_KEYS)
        for (b.query = 0; b.query < s->seq; b.query += MTI_QUERIES) {
            b.keys = mt_min(MTI_KEYS, s->kv_seq - b.key);
            b.rows = mt_min(MTI_QUERIES, s->seq - b.query);
            if (!mti_scores_see(a, h, &b)) continue;
            mti_query_rows_read(a, h, &b, dq, &x);
            mti_scores_backward(a, h, &b, &x, dk, dv);
        }
    mti_f32_write(dq, a->dq, h->query, h->q_col);
}

/* Computes the gradients of a group of a sequence. Its heads add to the same dk and dv, which are zero before the first
   of them. */
static void mti_attention_backward_group(const mti_attention *a, int64_t batch, int64_t group) {
    const mt_attention_desc *s = &a->desc;
    int64_t row = batch * s->kv_seq, col = group * a->kv_step, j;
    mt_tensor dk = mti_f32_place(a->dk, row, s->kv_seq, col, s->head_dim, a->dk_room);
    mt_tensor dv = mti_f32_place(a->dv, row, s->kv_seq, col, s->head_dim, a->dv_room);
    mti_attention_pack(a, batch, group);
    mti_attention_clear(dk);
    mti_attention_clear(dv);
    for (j = 0; j < s->heads_per_group; j++) {
        mti_head h = mti_attention_head(a, batch, group, j);
        mti_attention_backward_head(a, &h, dk, dv);
    }
    mti_f32_write(dk, a->dk, row, col);
    mti_f32_write(dv, a->dv, row, col);
}

/* The number of neighbouring items of backward that add to the same elements of dbias. One thread computes them. */
static int64_t mti_dbias_items(const mt_attention_desc *s) {
    if (!s->dbias.data) return 1;
    if (s->bias_heads > 1) return s->bias_batch > 1 ? 1 : s->batch;
    return s->bias_batch > 1 ? s->groups : s->batch * s->groups;
}

/* An item is a group of a sequence. Those that share a row of dbias have neighbouring numbers. */
static void mti_cpu_attention_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_attention a = mti_attention_of_thread((const mti_attention *)data, thread);
    const mt_attention_desc *s = &a.desc;
    int64_t i;
    if (a.tiles) mti_tiles_begin();
    for (i = first; i < last; i++) {
        if (s->bias_heads > 1) mti_attention_backward_group(&a, i % s->batch, i / s->batch);
        else mti_attention_backward_group(&a, i / s->groups, i % s->groups);
    }
    if (a.tiles) mti_tiles_end();
}

/* ---- >>attention-plain: kernels of attention without tensor cores ------------------------------------------------ */

#if MT_HAS_CUDA
extern "C++" {

/* Bit k of the result of mti_kept is 1 if the probability of element e + k is kept, for k = 0 ... 3. The four elements
   need one block of random words if e % 4 is 0, otherwise two. */
static __device__ __forceinline__ uint32_t mti_kept_block(const mti_drop &drop, uint64_t block) {
    uint32_t words[4], bits = 0;
    mti_philox(block, mti_subsequence(&drop.at), drop.at.seed, words);
    MT_DEVICE_UNROLL
    for (int k = 0; k < 4; k++) bits |= (uint32_t)(words[k] >= drop.threshold) << k;
    return bits;
}
static __device__ __forceinline__ uint32_t mti_kept(const mti_drop &drop, uint64_t e) {
    uint32_t bits = mti_kept_block(drop, e >> 2), skip = (uint32_t)e & 3;
    if (skip) bits = (bits | mti_kept_block(drop, (e >> 2) + 1) << 4) >> skip;
    return bits & 15;
}

/* The plain path on a GPU, for any type and for head_dim up to MTI_PLAIN_DIM. Its products are multiplications and
   additions in f32, on tiles in shared memory. Its three large kernels have the same form. A block owns a few rows and
   goes over the columns, a tile at a time:

     kernel    rows      columns                 work
     forward   queries   keys                    s = q k^T, online softmax, out += D p v
     dq        queries   keys                    dp = dout v^T, s = q k^T, ds = p (D dp - delta), dq += ds k
     dkv       keys      queries of all heads    s = k q^T, dp = v dout^T, dv += D p dout, dk += ds q
                         of the group

   D is the factor of dropout. The first column of a tile is a multiple of the size of a tile, and sums are added in the
   order of the tiles. A block skips the tiles before and behind those that any of its rows sees. A warp skips the tiles
   that none of its rows sees.

   The 32 lanes of a warp are 4 x 8. In a tile, lane (r, c) owns the scores of rows r * LaneRows + m and columns c *
   LaneCols + n. Of the results it owns elements 32 * w + 4 * c + k of its rows, for k = 0 ... 3. Scores become weights
   of the products that add to the results, and go through shared memory. A load of shared memory has 16 bytes for each
   lane. (LaneRows + LaneCols) loads serve 4 * LaneRows * LaneCols multiplications for scores, and (1 + Slices) loads
   serve 4 * LaneRows * Slices multiplications for results. */
#define MTI_PLAIN_DIM 256 /* at most, of head_dim */
#define MTI_PLAIN_WARPS 4 /* of a block of the kernels without tiles */

struct mti_plain {
    mt_attention_desc s; /* without defaults */
    mti_view q, k, v, out, lse, dout, dq, dk, dv, bias, dbias;
    int64_t q_step, kv_step;
    int64_t value, dvalue; /* v begins this number of elements after k, and dv after dk; see mti_flash_fits */
    float scale;
    mti_drop drop;
    /* The plain path only. wide: q, k, v and dout can be loaded 16 bytes at a time. delta: backward only, rowsum(dout *
       out), in the order of lse. */
    int wide;
    mti_view delta;

    __device__ int64_t q_col(int64_t head) const {
        return head / s.heads_per_group * q_step + head % s.heads_per_group * s.head_dim;
    }
    __device__ int64_t k_col(int64_t head) const { return head / s.heads_per_group * kv_step; }
    __device__ int64_t length(int64_t b) const { /* at most kv_seq; a GPU does not check lengths */
        return s.lengths ? min((int64_t)s.lengths[b], s.kv_seq) : s.kv_seq;
    }
    /* the keys that query i sees; a GPU does not check cu_seqlens either */
    __device__ mti_span keys(int64_t b, int64_t i) const {
        return mti_span_of_both(mti_keys_of(&s, length(b), b, i), 0, s.kv_seq);
    }
    __device__ mti_span queries(int64_t b, int64_t j) const {
        return mti_span_of_both(mti_queries_of(&s, length(b), b, j), 0, s.seq);
    }
    /* the element number of a probability */
    __device__ uint64_t element(int64_t b, int64_t head, int64_t i, int64_t j) const {
        return (mti_element_of(drop.at, b, head) * (uint64_t)s.seq + (uint64_t)i) * (uint64_t)s.kv_seq + (uint64_t)j;
    }
    __device__ float dot(const mti_view &a, int64_t a_row, int64_t a_col, const mti_view &b, int64_t b_row,
                         int64_t b_col) const {
        float sum = 0.0f;
        for (int64_t d = 0; d < s.head_dim; d++) sum += mti_get(a, a_row, a_col + d) * mti_get(b, b_row, b_col + d);
        return sum;
    }
};

/* The sizes of a kernel. Slices: a head has up to 32 * Slices elements. LaneRows and LaneCols: of a tile for a lane.
   Blocks: of a multiprocessor, for which the registers must be enough. */
template <int SLICES, int WARPS, int LANE_ROWS, int LANE_COLS, int BLOCKS> struct mti_plain_shape {
    static constexpr int Slices = SLICES, LaneRows = LANE_ROWS, LaneCols = LANE_COLS;
    static constexpr int Threads = 32 * WARPS, Blocks = BLOCKS;
    static constexpr int WarpRows = 4 * LANE_ROWS, Rows = WARPS * WarpRows; /* of a block */
    static constexpr int Cols = 8 * LANE_COLS;                              /* of a tile */
    /* The floats of a row in shared memory. Eight neighbours begin in different groups of four banks. */
    static constexpr int Pitch = 32 * SLICES + 4;
    /* The shared memory of a block with the rows of so many tensors, and tiles of as many. */
    static constexpr size_t bytes(int of_rows, int of_tiles) {
        return sizeof(float) * (size_t)(Pitch * (of_rows * Rows + of_tiles * Cols) + Rows * Cols) +
               sizeof(mti_span) * (size_t)Rows;
    }
};

static __device__ __forceinline__ int mti_plain_r() { return (int)threadIdx.x % 32 / 8; }
static __device__ __forceinline__ int mti_plain_c() { return (int)threadIdx.x % 8; }

/* Copies the rows [first, first + Count) of a head to shared memory, as f32, and zeros instead of the rows outside of
   `all`. base is the row of the view for row 0. Row x of each Lanes * Each rows becomes row x % Each * Lanes + x /
   Each: the rows that Lanes lanes load at the same time are then neighbours. */
template <typename T, int Count, int Lanes, int Each, bool WIDE, int TYPE>
static __device__ __forceinline__ void mti_plain_copy(const mti_plain &p, const mti_view &v, int64_t base, int64_t col,
                                                      int64_t first, mti_span all, float *to) {
    constexpr int Vectors = 32 * T::Slices / MTI_VECTOR, Group = Lanes * Each;
    int dim = (int)p.s.head_dim;
    MT_DEVICE_UNROLL_2
    for (int e = (int)threadIdx.x; e < Count * Vectors; e += T::Threads) {
        int x = e / Vectors, d = e % Vectors * MTI_VECTOR;
        int64_t row = first + x;
        float y[MTI_VECTOR] = {};
        if (row >= all.first && row < all.end && d < dim)
            mti_load<WIDE, TYPE>(v, base + row, col + d, WIDE ? MTI_VECTOR : min(dim - d, MTI_VECTOR), y);
        float4 *at = (float4 *)(to + (x / Group * Group + x % Each * Lanes + x % Group / Each) * T::Pitch + d);
        at[0] = make_float4(y[0], y[1], y[2], y[3]);
        at[1] = make_float4(y[4], y[5], y[6], y[7]);
    }
}

template <typename T, int Count, int Lanes, int Each>
static __device__ __forceinline__ void mti_plain_load(const mti_plain &p, const mti_view &v, int64_t base, int64_t col,
                                                      int64_t first, mti_span all, float *to) {
    if (!p.wide) mti_plain_copy<T, Count, Lanes, Each, false, MTI_ANY_TYPE>(p, v, base, col, first, all, to);
    else if (v.dtype == MT_F32) mti_plain_copy<T, Count, Lanes, Each, true, MT_F32>(p, v, base, col, first, all, to);
    else if (v.dtype == MT_BF16) mti_plain_copy<T, Count, Lanes, Each, true, MT_BF16>(p, v, base, col, first, all, to);
    else mti_plain_copy<T, Count, Lanes, Each, true, MT_F16>(p, v, base, col, first, all, to);
}

/* The same for the rows of a block, of which there are `rows`, and for a tile. */
template <typename T>
static __device__ __forceinline__ void mti_plain_load_rows(const mti_plain &p, const mti_view &v, int64_t rows,
                                                           int64_t col, int64_t first, float *to) {
    mti_span all = {0, rows};
    mti_plain_load<T, T::Rows, 4, T::LaneRows>(p, v, blockIdx.z * rows, col, first, all, to);
}
template <typename T>
static __device__ __forceinline__ void mti_plain_load_tile(const mti_plain &p, const mti_view &v, int64_t cols,
                                                           int64_t col, int64_t first, mti_span all, float *to) {
    mti_plain_load<T, T::Cols, 8, T::LaneCols>(p, v, blockIdx.z * cols, col, first, all, to);
}

/* Computes the span of each row of a block: the keys that a query sees or, with KEYS, the queries that see a key.
   Returns the smallest span that has them all. The barrier separates the writes of the spans from the reads. */
template <typename T, bool KEYS>
static __device__ __forceinline__ mti_span mti_plain_spans(const mti_plain &p, int64_t first, mti_span *spans) {
    int64_t b = blockIdx.z, rows = KEYS ? p.s.kv_seq : p.s.seq;
    mti_span all = {INT64_MAX, 0};
    for (int x = (int)threadIdx.x; x < T::Rows; x += T::Threads) {
        mti_span span = {0, 0};
        if (first + x < rows) span = KEYS ? p.queries(b, first + x) : p.keys(b, first + x);
        spans[x] = span;
    }
    __syncthreads();
    for (int x = (int)threadIdx.x % 32; x < T::Rows; x += 32)
        if (spans[x].first < spans[x].end) {
            all.first = min(all.first, spans[x].first);
            all.end = max(all.end, spans[x].end);
        }
    for (int o = 16; o > 0; o >>= 1) {
        all.first = min(all.first, __shfl_xor_sync(0xffffffffu, all.first, o));
        all.end = max(all.end, __shfl_xor_sync(0xffffffffu, all.end, o));
    }
    all.first = min(all.first, all.end); /* {0, 0} if no row sees anything */
    return all;
}

/* Returns what the rows of a lane see of its columns, from column `col` on. Bit m * LaneCols + n stands for a pair. */
template <typename T> static __device__ __forceinline__ uint32_t mti_plain_seen(const mti_span *spans, int64_t col) {
    const int64_t most = T::LaneCols;
    uint32_t seen = 0;
    MT_DEVICE_UNROLL
    for (int m = 0; m < T::LaneRows; m++) {
        mti_span span = spans[mti_plain_r() * T::LaneRows + m];
        int first = (int)min(max(span.first - col, (int64_t)0), most);
        int end = (int)min(max(span.end - col, (int64_t)0), most);
        seen |= (((1u << end) - 1) & ~((1u << first) - 1)) << (m * T::LaneCols);
    }
    return seen;
}

/* s = the products of the rows of a warp and the columns of a tile. A step of the loop has at least 32 multiplications.
   Behind the head, rows are 0. */
template <typename T>
static __device__ __forceinline__ void mti_plain_product(const mti_plain &p, float (&s)[T::LaneRows][T::LaneCols],
                                                         const float *rows, const float *cols) {
    constexpr int M = T::LaneRows, N = T::LaneCols, Step = M * N >= 16 ? 4 : M * N >= 8 ? 8 : 16;
    const float *end = rows + p.s.head_dim;
    int r = mti_plain_r() * T::Pitch;
    cols += mti_plain_c() * T::Pitch;
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++) s[e / N][e % N] = 0.0f;
    MT_DEVICE_NO_UNROLL
    for (; rows < end; rows += Step, cols += Step) {
        MT_DEVICE_UNROLL
        for (int d = 0; d < Step; d += 4) {
            float4 x[M], y[N];
            MT_DEVICE_UNROLL
            for (int m = 0; m < M; m++) x[m] = *(const float4 *)(rows + r + m * 4 * T::Pitch + d);
            MT_DEVICE_UNROLL
            for (int n = 0; n < N; n++) y[n] = *(const float4 *)(cols + n * 8 * T::Pitch + d);
            MT_DEVICE_UNROLL
            for (int e = 0; e < M * N; e++) s[e / N][e % N] += x[e / N].x * y[e % N].x;
            MT_DEVICE_UNROLL
            for (int e = 0; e < M * N; e++) s[e / N][e % N] += x[e / N].y * y[e % N].y;
            MT_DEVICE_UNROLL
            for (int e = 0; e < M * N; e++) s[e / N][e % N] += x[e / N].z * y[e % N].z;
            MT_DEVICE_UNROLL
            for (int e = 0; e < M * N; e++) s[e / N][e % N] += x[e / N].w * y[e % N].w;
        }
    }
}

/* Writes the weights of a warp to shared memory, [Cols, WarpRows], for mti_plain_add. */
template <typename T>
static __device__ __forceinline__ void mti_plain_weigh(const float (&s)[T::LaneRows][T::LaneCols], float *weights) {
    constexpr int M = T::LaneRows;
    static_assert(M == 4 || M == 2, "one store");
    weights += mti_plain_c() * T::WarpRows + mti_plain_r() * M;
    __syncwarp(); /* all lanes have read the weights before */
    MT_DEVICE_UNROLL
    for (int n = 0; n < T::LaneCols; n++) {
        float *to = weights + n * 8 * T::WarpRows;
        if (M == 4) *(float4 *)to = make_float4(s[0][n], s[1][n], s[M - 2][n], s[M - 1][n]);
        else *(float2 *)to = make_float2(s[0][n], s[1][n]);
    }
    __syncwarp();
}

/* acc += the products of the weights of a warp and the columns of a tile. */
template <typename T>
static __device__ __forceinline__ void mti_plain_add(float (&acc)[T::LaneRows][T::Slices][4], const float *weights,
                                                     const float *cols) {
    constexpr int M = T::LaneRows;
    weights += mti_plain_r() * M;
    cols += mti_plain_c() * 4;
    MT_DEVICE_UNROLL_2
    for (int x = 0; x < T::Cols; x++) {
        float a[M];
        float2 low = *(const float2 *)(weights + x * T::WarpRows);
        a[0] = low.x, a[1] = low.y;
        if (M == 4) {
            float4 all = *(const float4 *)(weights + x * T::WarpRows);
            a[0] = all.x, a[1] = all.y, a[M - 2] = all.z, a[M - 1] = all.w;
        }
        MT_DEVICE_UNROLL
        for (int w = 0; w < T::Slices; w++) {
            float4 y = *(const float4 *)(cols + x * T::Pitch + w * 32);
            MT_DEVICE_UNROLL
            for (int m = 0; m < M; m++) {
                acc[m][w][0] += a[m] * y.x, acc[m][w][1] += a[m] * y.y;
                acc[m][w][2] += a[m] * y.z, acc[m][w][3] += a[m] * y.w;
            }
        }
    }
}

template <typename T> static __device__ __forceinline__ void mti_plain_zero(float (&acc)[T::LaneRows][T::Slices][4]) {
    MT_DEVICE_UNROLL
    for (int e = 0; e < T::LaneRows * T::Slices * 4; e++) acc[e / 4 / T::Slices][e / 4 % T::Slices][e % 4] = 0.0f;
}

/* Writes scale * acc to the rows of a head, from row `first` of the warp on. `own` are the rows of the warp in shared
   memory. */
template <typename T>
static __device__ __forceinline__ void mti_plain_store(const mti_plain &p, float scale,
                                                       const float (&acc)[T::LaneRows][T::Slices][4], const mti_view &v,
                                                       int64_t rows, int64_t col, int64_t first, float *own) {
    constexpr int M = T::LaneRows;
    __syncwarp(); /* all lanes have read the rows */
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * T::Slices; e++) {
        const float *x = acc[e / T::Slices][e % T::Slices];
        *(float4 *)(own + (e / T::Slices * 4 + mti_plain_r()) * T::Pitch + e % T::Slices * 32 + mti_plain_c() * 4) =
            make_float4(scale * x[0], scale * x[1], scale * x[2], scale * x[3]);
    }
    __syncwarp();
    for (int x = 0; x < T::WarpRows && first + x < rows; x++)
        for (int64_t d = threadIdx.x % 32; d < p.s.head_dim; d += 32)
            mti_put(v, blockIdx.z * rows + first + x, col + d, own[(x % M * 4 + x / M) * T::Pitch + d]);
}

/* Turns the products s of the rows from `row` on and the columns from `col` on into scores. A score is -infinity where
   the row does not see the column. The rows are queries or, with KEYS, keys. With CHAIN, g is multiplied by the
   derivative of a score by the scaled product. */
template <bool KEYS, bool CHAIN, int M, int N>
static __device__ __forceinline__ void mti_plain_scores(const mti_plain &p, float (&s)[M][N], float (&g)[M][N],
                                                        uint32_t seen, int64_t b, int64_t head, int64_t row,
                                                        int64_t col) {
    int64_t query = KEYS ? col : row, key = KEYS ? row : col;
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++) s[e / N][e % N] *= p.scale;
    if (p.s.softcap > 0.0f) {
        MT_DEVICE_UNROLL
        for (int e = 0; e < M * N; e++) {
            float t = tanhf(s[e / N][e % N] / p.s.softcap);
            s[e / N][e % N] = p.s.softcap * t;
            if (CHAIN) g[e / N][e % N] *= 1.0f - t * t;
        }
    }
    if (p.s.alibi_slopes) {
        float slope = p.s.alibi_slopes[head], between = (float)(query + p.s.kv_seq - p.s.seq - key);
        MT_DEVICE_UNROLL
        for (int e = 0; e < M * N; e++)
            s[e / N][e % N] -= slope * fabsf(between + (float)(KEYS ? e % N - e / N : e / N - e % N));
    }
    if (p.bias.data) {
        MT_DEVICE_UNROLL
        for (int e = 0; e < M * N; e++) {
            int64_t at = mti_bias_row(&p.s, b, head, query + (KEYS ? e % N : e / N)), j = key + (KEYS ? e / N : e % N);
            if (!(seen >> e & 1)) continue;
            if (p.bias.dtype != MT_U8) s[e / N][e % N] += mti_get(p.bias, at, j);
            else if (!((const uint8_t *)p.bias.data)[at * p.bias.ld + j]) s[e / N][e % N] = -INFINITY;
        }
    }
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++)
        if (!(seen >> e & 1)) s[e / N][e % N] = -INFINITY;
}

/* Returns which probabilities dropout keeps, in the same bits as mti_plain_seen. A call of mti_kept serves all keys of
   a query. */
template <bool KEYS, int M, int N>
static __device__ __forceinline__ uint32_t mti_plain_kept(const mti_plain &p, int64_t b, int64_t head, int64_t row,
                                                          int64_t col) {
    uint32_t kept = 0;
    if (!p.drop.on) return ~0u;
    uint64_t e = p.element(b, head, KEYS ? col : row, KEYS ? row : col);
    MT_DEVICE_NO_UNROLL
    for (int x = 0; x < (KEYS ? N : M); x++) {
        uint32_t bits = mti_kept(p.drop, e + (uint64_t)x * (uint64_t)p.s.kv_seq);
        MT_DEVICE_UNROLL
        for (int y = 0; y < (KEYS ? M : N); y++) kept |= (bits >> y & 1) << (KEYS ? y * N + x : x * N + y);
    }
    return kept;
}

/* Online softmax: s = e^(score - top) and, of a dropped key, 0. top is the largest score of a row so far. sum has only
   the columns of this lane. */
template <typename T>
static __device__ __forceinline__ void mti_plain_softmax(const mti_plain &p, float (&s)[T::LaneRows][T::LaneCols],
                                                         uint32_t kept, float (&acc)[T::LaneRows][T::Slices][4],
                                                         float (&top)[T::LaneRows], float (&sum)[T::LaneRows]) {
    constexpr int N = T::LaneCols;
    MT_DEVICE_UNROLL
    for (int m = 0; m < T::LaneRows; m++) {
        float now = s[m][0], before;
        MT_DEVICE_UNROLL
        for (int n = 1; n < N; n++) now = fmaxf(now, s[m][n]);
        MT_DEVICE_UNROLL
        for (int o = 4; o > 0; o >>= 1) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, o));
        now = fmaxf(top[m], now);
        before = now == top[m] ? 1.0f : expf(top[m] - now);
        top[m] = now;
        sum[m] *= before;
        MT_DEVICE_UNROLL
        for (int n = 0; n < N; n++) {
            float e = s[m][n] == -INFINITY ? 0.0f : expf(s[m][n] - now);
            sum[m] += e;
            s[m][n] = kept >> (m * N + n) & 1 ? e * p.drop.scale : 0.0f;
        }
        MT_DEVICE_UNROLL
        for (int d = 0; d < T::Slices * 4; d++) acc[m][d / 4][d % 4] *= before;
    }
}

/* Writes out = acc / sum, and lse = the log of the sum of exponentials. For a row without keys, out = 0 and lse =
   -infinity. */
template <typename T>
static __device__ __forceinline__ void mti_plain_finish(const mti_plain &p, float (&acc)[T::LaneRows][T::Slices][4],
                                                        const float (&top)[T::LaneRows],
                                                        const float (&sum)[T::LaneRows], int64_t first, float *own) {
    int64_t head = blockIdx.y, row = first + mti_plain_r() * T::LaneRows;
    MT_DEVICE_UNROLL
    for (int m = 0; m < T::LaneRows; m++) {
        float total = sum[m], factor;
        MT_DEVICE_UNROLL
        for (int o = 4; o > 0; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
        factor = total == 0.0f ? 0.0f : 1.0f / total;
        MT_DEVICE_UNROLL
        for (int d = 0; d < T::Slices * 4; d++) acc[m][d / 4][d % 4] *= factor;
        if (p.lse.data && mti_plain_c() == 0 && row + m < p.s.seq)
            mti_put(p.lse, head, blockIdx.z * p.s.seq + row + m, total == 0.0f ? -INFINITY : top[m] + logf(total));
    }
    mti_plain_store<T>(p, 1.0f, acc, p.out, p.s.seq, head * p.s.head_dim, first, own);
}

/* A block owns queries of a head, and a warp WarpRows of them. Shared memory has q [Rows, Pitch], a tile [Cols, Pitch]
   that is used for k and v in turn, the weights [Cols, WarpRows] of each warp, and the spans of the queries. The first
   two barriers of a step follow the copy of k and the last read of it, the other two do so for v. The last blocks of
   a causal mask have the most keys, so they come first. */
template <typename T>
static __global__ void __launch_bounds__(T::Threads, T::Blocks) mti_plain_forward_kernel(mti_plain p) {
    constexpr int M = T::LaneRows, N = T::LaneCols;
    MT_DYN_SHARED(float, shared);
    int warp = (int)threadIdx.x / 32;
    float *own = shared + warp * T::WarpRows * T::Pitch, *tile = shared + T::Rows * T::Pitch;
    float *weights = tile + T::Cols * T::Pitch + warp * T::WarpRows * T::Cols;
    mti_span *spans = (mti_span *)(tile + T::Cols * T::Pitch + T::Rows * T::Cols);
    int64_t b = blockIdx.z, head = blockIdx.y, first = ((int64_t)gridDim.x - 1 - blockIdx.x) * T::Rows, k_col;
    float s[M][N] = {}, unused[M][N] = {}, acc[M][T::Slices][4], top[M], sum[M];
    k_col = p.k_col(head);
    mti_plain_zero<T>(acc);
    MT_DEVICE_UNROLL
    for (int m = 0; m < M; m++) top[m] = -INFINITY, sum[m] = 0.0f;
    mti_plain_load_rows<T>(p, p.q, p.s.seq, p.q_col(head), first, shared);
    mti_span all = mti_plain_spans<T, false>(p, first, spans);
    first += warp * T::WarpRows;
    for (int64_t at = all.first / T::Cols * T::Cols; at < all.end; at += T::Cols) {
        int64_t row = first + mti_plain_r() * M, col = at + mti_plain_c() * N;
        uint32_t seen = mti_plain_seen<T>(spans + warp * T::WarpRows, col);
        int any = __any_sync(0xffffffffu, seen != 0);
        mti_plain_load_tile<T>(p, p.k, p.s.kv_seq, k_col, at, all, tile);
        __syncthreads();
        if (any) mti_plain_product<T>(p, s, own, tile);
        __syncthreads();
        mti_plain_load_tile<T>(p, p.v, p.s.kv_seq, k_col, at, all, tile);
        if (any) {
            mti_plain_scores<false, false, M, N>(p, s, unused, seen, b, head, row, col);
            mti_plain_softmax<T>(p, s, mti_plain_kept<false, M, N>(p, b, head, row, col), acc, top, sum);
            mti_plain_weigh<T>(s, weights);
        }
        __syncthreads();
        if (any) mti_plain_add<T>(acc, weights, tile);
        __syncthreads();
    }
    mti_plain_finish<T>(p, acc, top, sum, first, own);
}

/* Finds the sequence, head and row of a warp in a kernel without tiles. Returns 0 if the warp has no row. The grid is
   rows x heads x sequences. */
static __device__ __forceinline__ int mti_plain_row(int64_t rows, int64_t *b, int64_t *head, int64_t *i) {
    *b = blockIdx.z;
    *head = blockIdx.y;
    *i = (int64_t)blockIdx.x * MTI_PLAIN_WARPS + (threadIdx.x >> 5);
    return *i < rows;
}

/* Computes p.delta, for backward. A warp owns a query of a head, and a lane every 32nd element of it. */
static __global__ void __launch_bounds__(32 * MTI_PLAIN_WARPS) mti_plain_stats_kernel(mti_plain p) {
    int64_t b, head, i, row, lane = threadIdx.x & 31;
    float sum = 0.0f;
    if (!mti_plain_row(p.s.seq, &b, &head, &i)) return;
    row = b * p.s.seq + i;
    for (int64_t d = lane; d < p.s.head_dim; d += 32)
        sum += mti_get(p.dout, row, head * p.s.head_dim + d) * mti_get(p.out, row, head * p.s.head_dim + d);
    sum = mti_warp_sum(sum);
    if (lane == 0) mti_put<MT_F32>(p.delta, head, row, sum);
}

/* Loads lse or delta of the queries [i, i + COUNT), and zeros instead of queries that do not exist. */
template <int COUNT>
static __device__ __forceinline__ void mti_plain_stats(const mti_plain &p, const mti_view &v, int64_t b, int64_t head,
                                                       int64_t i, float (&x)[COUNT]) {
    MT_DEVICE_UNROLL
    for (int e = 0; e < COUNT; e++) x[e] = i + e < p.s.seq ? mti_get<MT_F32>(v, head, b * p.s.seq + i + e) : 0.0f;
}

/* From the products s of queries and keys, and g of dout and v: with p = e^(score - lse) and the factor D of dropout,
   s = D p, and g = p (D g - delta). The other arguments are those of mti_plain_scores. lse and delta are loaded where
   they are used: held for longer, they would be spilled. */
template <bool KEYS, bool CHAIN, int M, int N>
static __device__ __forceinline__ void mti_plain_pairs(const mti_plain &p, float (&s)[M][N], float (&g)[M][N],
                                                       uint32_t seen, int64_t b, int64_t head, int64_t row,
                                                       int64_t col) {
    uint32_t kept = mti_plain_kept<KEYS, M, N>(p, b, head, row, col);
    float lse[KEYS ? N : M], delta[KEYS ? N : M];
    mti_plain_stats(p, p.delta, b, head, KEYS ? col : row, delta);
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++)
        g[e / N][e % N] = (kept >> e & 1 ? p.drop.scale * g[e / N][e % N] : 0.0f) - delta[KEYS ? e % N : e / N];
    mti_plain_scores<KEYS, CHAIN, M, N>(p, s, g, seen, b, head, row, col);
    mti_plain_stats(p, p.lse, b, head, KEYS ? col : row, lse);
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++) {
        float score = s[e / N][e % N], prob = score == -INFINITY ? 0.0f : expf(score - lse[KEYS ? e % N : e / N]);
        g[e / N][e % N] *= prob;
        s[e / N][e % N] = kept >> e & 1 ? p.drop.scale * prob : 0.0f;
    }
}

/* As the forward kernel, with the rows q and dout [Rows, Pitch] of a block, and a tile for v and k in turn. */
template <typename T> static __global__ void __launch_bounds__(T::Threads, T::Blocks) mti_plain_dq_kernel(mti_plain p) {
    constexpr int M = T::LaneRows, N = T::LaneCols;
    MT_DYN_SHARED(float, shared);
    int warp = (int)threadIdx.x / 32;
    float *own = shared + warp * T::WarpRows * T::Pitch, *tile = shared + 2 * T::Rows * T::Pitch;
    float *weights = tile + T::Cols * T::Pitch + warp * T::WarpRows * T::Cols;
    mti_span *spans = (mti_span *)(tile + T::Cols * T::Pitch + T::Rows * T::Cols);
    int64_t b = blockIdx.z, head = blockIdx.y, first = ((int64_t)gridDim.x - 1 - blockIdx.x) * T::Rows, k_col, row;
    float s[M][N] = {}, g[M][N] = {}, acc[M][T::Slices][4];
    k_col = p.k_col(head);
    mti_plain_zero<T>(acc);
    mti_plain_load_rows<T>(p, p.q, p.s.seq, p.q_col(head), first, shared);
    mti_plain_load_rows<T>(p, p.dout, p.s.seq, head * p.s.head_dim, first, shared + T::Rows * T::Pitch);
    mti_span all = mti_plain_spans<T, false>(p, first, spans);
    first += warp * T::WarpRows;
    row = first + mti_plain_r() * M;
    for (int64_t at = all.first / T::Cols * T::Cols; at < all.end; at += T::Cols) {
        int64_t col = at + mti_plain_c() * N;
        uint32_t seen = mti_plain_seen<T>(spans + warp * T::WarpRows, col);
        int any = __any_sync(0xffffffffu, seen != 0);
        mti_plain_load_tile<T>(p, p.v, p.s.kv_seq, k_col, at, all, tile);
        __syncthreads();
        if (any) mti_plain_product<T>(p, g, own + T::Rows * T::Pitch, tile);
        __syncthreads();
        mti_plain_load_tile<T>(p, p.k, p.s.kv_seq, k_col, at, all, tile);
        __syncthreads();
        if (any) {
            mti_plain_product<T>(p, s, own, tile);
            mti_plain_pairs<false, true, M, N>(p, s, g, seen, b, head, row, col);
            mti_plain_weigh<T>(g, weights);
            mti_plain_add<T>(acc, weights, tile);
        }
        __syncthreads();
    }
    mti_plain_store<T>(p, p.scale, acc, p.dq, p.s.seq, p.q_col(head), first, own);
}

/* A block owns keys of a group, and a warp WarpRows of them. Shared memory has k and v [Rows, Pitch], a tile of q and a
   tile of dout, the weights [Cols, WarpRows] of each warp, first for dv and then for dk, and the spans of the keys. The
   block goes over the queries of all heads of the group in order. It counts heads and tiles in 32 bits. With 64,
   registers would be spilled. */
template <typename T>
static __global__ void __launch_bounds__(T::Threads, T::Blocks) mti_plain_dkv_kernel(mti_plain p) {
    constexpr int M = T::LaneRows, N = T::LaneCols;
    MT_DYN_SHARED(float, shared);
    int warp = (int)threadIdx.x / 32;
    float *k = shared + warp * T::WarpRows * T::Pitch, *v = k + T::Rows * T::Pitch;
    float *q = shared + 2 * T::Rows * T::Pitch, *dout = q + T::Cols * T::Pitch;
    float *weights = dout + T::Cols * T::Pitch + warp * T::WarpRows * T::Cols;
    mti_span *spans = (mti_span *)(dout + T::Cols * T::Pitch + T::Rows * T::Cols);
    int64_t b = blockIdx.z, first = (int64_t)blockIdx.x * T::Rows, k_col = blockIdx.y * p.kv_step;
    float s[M][N], g[M][N], dk[M][T::Slices][4], dv[M][T::Slices][4];
    mti_plain_zero<T>(dk);
    mti_plain_zero<T>(dv);
    mti_plain_load_rows<T>(p, p.k, p.s.kv_seq, k_col, first, shared);
    mti_plain_load_rows<T>(p, p.v, p.s.kv_seq, k_col, first, shared + T::Rows * T::Pitch);
    mti_span all = mti_plain_spans<T, true>(p, first, spans);
    first += warp * T::WarpRows;
    for (int head = (int)(blockIdx.y * p.s.heads_per_group), end = head + (int)p.s.heads_per_group; head < end; head++)
        for (int tile = (int)(all.first / T::Cols); (int64_t)tile * T::Cols < all.end; tile++) {
            int64_t at = (int64_t)tile * T::Cols, row = first + mti_plain_r() * M, col = at + mti_plain_c() * N;
            uint32_t seen = mti_plain_seen<T>(spans + warp * T::WarpRows, col);
            mti_plain_load_tile<T>(p, p.q, p.s.seq, p.q_col(head), at, all, q);
            mti_plain_load_tile<T>(p, p.dout, p.s.seq, head * p.s.head_dim, at, all, dout);
            __syncthreads();
            if (__any_sync(0xffffffffu, seen != 0)) {
                mti_plain_product<T>(p, s, k, q);
                mti_plain_product<T>(p, g, v, dout);
                mti_plain_pairs<true, true, M, N>(p, s, g, seen, b, head, row, col);
                mti_plain_weigh<T>(s, weights);
                mti_plain_add<T>(dv, weights, dout);
                mti_plain_weigh<T>(g, weights);
                mti_plain_add<T>(dk, weights, q);
            }
            __syncthreads();
        }
    mti_plain_store<T>(p, p.scale, dk, p.dk, p.s.kv_seq, k_col, first, k);
    mti_plain_store<T>(p, 1.0f, dv, p.dv, p.s.kv_seq, k_col, first, v);
}

/* A warp owns a row of the bias, without shared memory or a barrier, and a lane every 32nd element of it. The lane adds
   the gradients of the scores of all sequences and heads that share the element, in their order. The grid is queries x
   heads of this call x bias_batch. If heads share the bias, it has one of them, which stands for all. */
static __global__ void __launch_bounds__(32 * MTI_PLAIN_WARPS, 4) mti_plain_dbias_kernel(mti_plain p) {
    int64_t first_b, first_head, i, lane = threadIdx.x & 31, heads = p.s.groups * p.s.heads_per_group;
    float s[1][1], g[1][1];
    if (!mti_plain_row(p.s.seq, &first_b, &first_head, &i)) return;
    int64_t row = mti_bias_row(&p.s, first_b, first_head, i);
    int64_t end_b = p.s.bias_batch > 1 ? first_b + 1 : p.s.batch,
            end_head = p.s.bias_heads > 1 ? first_head + 1 : heads;
    for (int64_t j = lane; j < p.s.kv_seq; j += 32) {
        float sum = 0.0f;
        for (int64_t b = first_b; b < end_b; b++) {
            mti_span keys = p.keys(b, i);
            for (int64_t head = first_head; j >= keys.first && j < keys.end && head < end_head; head++) {
                int64_t query = b * p.s.seq + i, key = b * p.s.kv_seq + j, k = p.k_col(head);
                s[0][0] = p.dot(p.q, query, p.q_col(head), p.k, key, k);
                g[0][0] = p.dot(p.dout, query, head * p.s.head_dim, p.v, key, k);
                mti_plain_pairs<false, false, 1, 1>(p, s, g, 1, b, head, i, j);
                sum += g[0][0];
            }
        }
        mti_put(p.dbias, row, j, mti_get(p.dbias, row, j) + sum);
    }
}

/* Returns the number of elements from a to b, two views of one tensor or of two. */
static int64_t mti_elements_between(mt_tensor a, mt_tensor b) {
    return ((intptr_t)b.data - (intptr_t)a.data) / (intptr_t)mt_dtype_size(a.dtype);
}

/* Whether each head of a view begins at a whole vector, for all views that the tiles are loaded from. */
static int mti_plain_is_wide(const mti_attention *a) {
    return mti_is_wide(a->q) && mti_is_wide(a->k) && mti_is_wide(a->v) && mti_is_wide(a->dout) &&
           a->desc.head_dim % MTI_VECTOR == 0 && a->q_step % MTI_VECTOR == 0 && a->kv_step % MTI_VECTOR == 0;
}

static mti_plain mti_plain_of(const mti_attention *a) {
    mti_plain p;
    memset(&p, 0, sizeof p);
    p.s = a->desc;
    p.q = mti_view_of(a->q);
    p.k = mti_view_of(a->k);
    p.v = mti_view_of(a->v);
    p.out = mti_view_of(a->out);
    p.lse = mti_view_of(a->lse);
    p.dout = mti_view_of(a->dout);
    p.dq = mti_view_of(a->dq);
    p.dk = mti_view_of(a->dk);
    p.dv = mti_view_of(a->dv);
    p.bias = mti_view_of(a->desc.bias);
    p.dbias = mti_view_of(a->desc.dbias);
    p.q_step = a->q_step;
    p.kv_step = a->kv_step;
    p.value = mti_elements_between(a->k, a->v);
    p.dvalue = mti_elements_between(a->dk, a->dv);
    p.scale = a->desc.scale;
    p.drop = mti_drop_of(a->desc.dropout);
    p.wide = mti_plain_is_wide(a);
    return p;
}

static dim3 mti_plain_grid(int64_t rows, int64_t heads, int64_t batch) {
    return dim3((unsigned)((rows + MTI_PLAIN_WARPS - 1) / MTI_PLAIN_WARPS), (unsigned)heads, (unsigned)batch);
}

} /* extern "C++" */
#endif

/* ---- >>attention-flash: kernels of attention on tensor cores ----------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* The tokens of a key/value cache, see mt_kv_cache_attention. A GPU does not check lengths: these functions limit them,
   so that every position that they return is in the cache. A token that finds no room counts as padding. */
struct mti_cached {
    const int32_t *lengths, *added; /* of the cache and of the desc; added is optional */
    int64_t seq, max_seq, window;

    __device__ int64_t held(int64_t b) const { return min(max((int64_t)lengths[b], (int64_t)0), max_seq); }
    __device__ int64_t tokens(int64_t b) const { /* new ones */
        return min(added ? min(max((int64_t)added[b], (int64_t)0), seq) : seq, max_seq - held(b));
    }
    /* token i sees the keys [first, end): none if it is padding */
    __device__ int end(int64_t b, int64_t i) const { return i < tokens(b) ? (int)(held(b) + i + 1) : 0; }
    __device__ int first(int end) const { return window > 0 ? max(end - (int)window, 0) : 0; }
};

/* The tensor-core path on a GPU: FlashAttention-2 (arXiv 2307.08691) for bf16 and f16 on sm_80 and later. Its three
   kernels have the same form. A block keeps a tile of its own rows in shared memory. It goes over the tiles of the
   other operand. cp.async loads the next tiles while the tensor cores work on the current ones. A warp owns 16 or 32
   rows, and accumulates their results in registers. ldmatrix loads the next fragment while the tensor cores work on the
   current one. Warps exchange no data, and sums are added in the order of the tiles.

     kernel    rows      goes over
     forward   queries   keys                    s = q k^T, online softmax, out += p v
     dq        queries   keys                    s = q k^T, dp = dout v^T, ds = p (dp - delta), dq += ds k
     dkv       keys      queries of all heads    s^T = k q^T, dp^T = v dout^T, dv += p^T dout, dk += ds^T q
                         of the group

   Exponentials are powers of 2, so the factor `scale` of the scores includes 1 / ln 2. A block skips the tiles that the
   mask hides from all of its rows. A warp skips those that the mask hides from all rows of the warp. Only tiles on an
   edge of the mask are masked element by element.

   The kernels with SPANS = true also have a window, packed documents and a soft cap. Their blocks begin by computing
   the span [first, end) of each of their rows, the keys that a query sees or the queries that see a key, and keep the
   spans in shared memory. A block goes over the tiles from the first one that any of its rows sees to the last one. In
   each step a warp votes whether any of its rows sees any column of the tile, otherwise it skips the tile, and whether
   all of its rows see all columns, otherwise it masks the tile. So the work is proportional to the window, or to the
   sizes of the documents. The kernels with SPANS = false have only a causal mask and lengths, which need no memory. */
#define MTI_FLASH_ROWS 128 /* rows of a block */
#define MTI_LOG2E 1.4426950408889634f

struct mti_flash {
    mti_plain p;
    float scale; /* p.scale / ln 2 */
    /* Backward only, both [batch, heads, pitch]. lse: lse / ln 2, which is infinite for a row without keys. delta:
       rowsum(dout * out). */
    float *lse, *delta;
    int64_t pitch; /* seq, rounded up to whole blocks */
    float cap;     /* with a soft cap c: p.scale / c, and scale is c / ln 2; see mti_flash_cap. 0: none */
    /* The forward kernel with CACHED only, where p.k and p.v are those of mt_kv_cache. */
    mti_cached cached;

    __device__ int causal() const { return p.s.mask == MT_MASK_CAUSAL; }
    /* Whether a query sees a key. A tile is hidden if its last query does not see its first key. Nothing in a tile is
       masked if its first query sees its last key. */
    __device__ bool sees(int query, int key, int length) const { return key < length && (!causal() || key <= query); }
    /* the keys that the queries [first, first + MTI_FLASH_ROWS) see together */
    __device__ int keys(int64_t b, int first) const {
        int length = (int)p.length(b);
        return causal() ? min(length, first + MTI_FLASH_ROWS) : length;
    }
    __device__ const uint16_t *in(const mti_view &v, int64_t b, int64_t col) const {
        return (const uint16_t *)v.data + b * p.s.seq * v.ld + col;
    }
    __device__ uint16_t *out(const mti_view &v, int64_t b, int64_t row, int64_t col) const {
        return (uint16_t *)v.data + (b * p.s.seq + row) * v.ld + col;
    }
    __device__ const uint16_t *cached_keys(int64_t b, int64_t head) const {
        return (const uint16_t *)p.k.data +
               (b * p.s.groups + head / p.s.heads_per_group) * cached.max_seq * p.s.head_dim;
    }
    __device__ mti_span cached_span(int64_t b, int64_t i) const {
        mti_span all = {0, cached.end(b, i)};
        all.first = cached.first((int)all.end);
        return all;
    }
    __device__ int64_t stat(int64_t b, int64_t head) const {
        return (b * p.s.groups * p.s.heads_per_group + head) * pitch;
    }
    /* the element number of a probability */
    __device__ uint64_t element(int64_t b, int64_t head, int query, int key) const {
        return (mti_element_of(p.drop.at, b, head) * (uint64_t)p.s.seq + (uint64_t)query) * (uint64_t)p.s.seq +
               (uint64_t)key;
    }
};

/* These two functions set masked scores to -infinity: mask_rows in scores [RowTiles * 16 queries, N8 * 8 keys],
   mask_columns in scores [16 keys, N8 * 8 queries]. query and key are the first ones of the warp. The limits are
   relative to them, because the compiler would otherwise keep the limits of all rows in registers. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_mask_rows(const mti_flash &f, float (&s)[RowTiles][N8][4], int length,
                                                           int query, int key) {
    int lane = (int)threadIdx.x & 31, left = length - key - lane % 4 * 2,
        diagonal = query - key + lane / 4 - lane % 4 * 2;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int r = i % (RowTiles * 2), j = i / (RowTiles * 2), k = j / 2 * 8 + j % 2;
        if (k >= left || (f.causal() && k > diagonal + r * 8)) s[r / 2][j / 2][r % 2 * 2 + j % 2] = -INFINITY;
    }
}

template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_mask_columns(const mti_flash &f, float (&s)[RowTiles][N8][4],
                                                              int length, int key, int query) {
    int lane = (int)threadIdx.x & 31, left = length - key - lane / 4, diagonal = key - query + lane / 4 - lane % 4 * 2;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int r = i % (RowTiles * 2), j = i / (RowTiles * 2), q = j / 2 * 8 + j % 2;
        if (r * 8 >= left || (f.causal() && q < diagonal + r * 8)) s[r / 2][j / 2][r % 2 * 2 + j % 2] = -INFINITY;
    }
}

/* The numbers [first, end) of the keys that a query sees, or of the queries that see a key. An empty span is [INT_MAX,
   0), which changes neither the smallest first number nor the largest end of several spans. */
struct alignas(8) mti_flash_span {
    int first, end;
};

/* Writes the spans of the rows of a block: KEYS for queries, otherwise for keys. Rows behind the end of the sequence
   get the span of its last row, so that they do not make every tile one that must be masked. They are not stored. */
template <bool KEYS, bool CACHED>
static __device__ __forceinline__ void mti_flash_find_spans(const mti_flash &f, mti_flash_span *spans, int first) {
    int64_t row = min((int64_t)first + threadIdx.x, f.p.s.seq - 1), b = blockIdx.z;
    if (threadIdx.x >= MTI_FLASH_ROWS) return;
    mti_span all = CACHED ? f.cached_span(b, row) : KEYS ? f.p.keys(b, row) : f.p.queries(b, row);
    bool none = all.end <= all.first;
    spans[threadIdx.x].first = none ? INT_MAX : (int)all.first;
    spans[threadIdx.x].end = none ? 0 : (int)all.end;
}

/* Returns the columns that the rows of a block see together, from the beginning of a tile of Step columns on. */
template <int Step> static __device__ __forceinline__ mti_flash_span mti_flash_block_span(const mti_flash_span *spans) {
    mti_flash_span all = {INT_MAX, 0};
    for (int r = (int)threadIdx.x & 31; r < MTI_FLASH_ROWS; r += 32)
        all.first = min(all.first, spans[r].first), all.end = max(all.end, spans[r].end);
    MT_DEVICE_UNROLL
    for (int o = 16; o > 0; o >>= 1) {
        all.first = min(all.first, __shfl_xor_sync(0xffffffffu, all.first, o));
        all.end = max(all.end, __shfl_xor_sync(0xffffffffu, all.end, o));
    }
    all.first = all.end > 0 ? all.first / Step * Step : 0;
    return all;
}

/* Finds the spans of the rows of a block, and the columns of all of them as in mti_flash_block_span. The barrier
   separates writing the spans from reading them. */
template <bool KEYS, int Step, bool CACHED = false>
static __device__ __forceinline__ void mti_flash_begin_spans(const mti_flash &f, mti_flash_span *spans, int first,
                                                             int *begin, int *end) {
    mti_flash_find_spans<KEYS, CACHED>(f, spans, first);
    __syncthreads();
    mti_flash_span all = mti_flash_block_span<Step>(spans);
    *begin = all.first;
    *end = all.end;
}

/* Returns x, a number that all lanes of the warp have in common. The compiler does not know that a shuffle returns the
   same number, so it computes what follows from it again, and keeps no registers for that. Kernels that would spill use
   it behind their loop, or in a branch of the loop. */
static __device__ __forceinline__ int mti_flash_again(int x) { return __shfl_sync(0xffffffffu, x, 0); }

/* Whether any of the Rows rows of the warp sees any of the columns [at, at + count), and whether each row sees them
   all. spans are those of the warp. Each lane looks at one row. */
template <int Rows>
static __device__ __forceinline__ bool mti_flash_meets(const mti_flash_span *spans, int at, int count) {
    mti_flash_span of = spans[threadIdx.x & (Rows - 1)];
    return __any_sync(0xffffffffu, of.first < at + count && of.end > at);
}
template <int Rows>
static __device__ __forceinline__ bool mti_flash_covers(const mti_flash_span *spans, int at, int count) {
    mti_flash_span of = spans[threadIdx.x & (Rows - 1)];
    return __all_sync(0xffffffffu, of.first <= at && of.end >= at + count);
}

/* s = tanh(cap s). A capped score is c tanh(x / c), where x is p.scale s: with cap = p.scale / c it is c tanh(cap s).
   The factor c is a part of f.scale, which the online softmax applies. It may take the maximum of a row before that,
   because c is positive and tanh rises. With x = cap s:
   |x| < 0.5:  x + x^3 P(x^2). P is fitted like q in mti_exp, with a relative error of 1.5e-8.
   |x| >= 0.5: 1 - 2 / (1 + e^2x), which is -1 or 1 for large |x|.
   The relative error is at most 6e-7, also for small x, so a cap that is far above all scores hardly changes them. An
   element takes 14 instructions. The single instruction tanh.approx is not exact enough, because its relative error is
   2^-11: near a cap of 50 this changes an exponential by 2 %, while bf16 rounds it by at most 0.4 %. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_cap(float cap, float (&s)[RowTiles][N8][4]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        float *element = &s[i / 4 / N8][i / 4 % N8][i % 4], x = *element * cap, z = x * x;
        float large = 1.0f - 2.0f * mti_reciprocal(1.0f + mti_ex2(x * (2 * MTI_LOG2E)));
        float p = 1.72569938e-2f * z - 5.30529507e-2f;
        p = p * z + 1.33259878e-1f;
        p = p * z - 3.33331496e-1f;
        *element = fabsf(x) < 0.5f ? x + x * (z * p) : large;
    }
}

/* The derivative of the soft cap, 1 - t^2 with t = tanh(cap s). For a masked score, t is -infinity and the result 0. */
static __device__ __forceinline__ float mti_flash_cap_slope(float t) { return fmaxf(1.0f - t * t, 0.0f); }

/* Caps and masks the scores of the rows of a warp, which begin at column `at`. A lane has RowTiles * 2 rows. The limits
   are relative to its first column, as above. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_cap_and_mask(const mti_flash &f, float (&s)[RowTiles][N8][4],
                                                              const mti_flash_span *spans, int at) {
    int lane = (int)threadIdx.x & 31;
    if (f.cap != 0.0f) mti_flash_cap(f.cap, s);
    if (mti_flash_covers<RowTiles * 16>(spans, at, N8 * 8)) return;
    MT_DEVICE_UNROLL
    for (int r = 0; r < RowTiles * 2; r++) {
        mti_flash_span of = spans[r * 8 + lane / 4];
        int first = of.first - at - lane % 4 * 2, end = of.end - at - lane % 4 * 2;
        MT_DEVICE_UNROLL
        for (int j = 0; j < N8 * 2; j++) {
            int k = j / 2 * 8 + j % 2;
            if (k < first || k >= end) s[r / 2][j / 2][r % 2 * 2 + j % 2] = -INFINITY;
        }
    }
}

/* The dropout mask of a tile [RowTiles * 16 queries, N8 * 8 keys] has one word for every 16 queries. With h = N8 / 2,
   bit n % h * 8 + n / h * 4 + e of word m is 1 if element e of acc[m][n] is kept. The four lanes of a row also share
   the row 8 below it. Each of these lanes computes the mask of one half of one of the two rows, and shuffles distribute
   the masks. */
template <int N8, int RowTiles>
static __device__ __forceinline__ void mti_flash_kept_rows(const mti_flash &f, int64_t head, int row, int key,
                                                           uint32_t (&kept)[RowTiles]) {
    int lane = (int)threadIdx.x & 31;
    MT_DEVICE_UNROLL
    for (int m = 0; m < RowTiles; m++) {
        uint64_t e = f.element(blockIdx.z, head, row + m * 16 + lane / 4 + lane % 2 * 8, key + lane / 2 % 2 * N8 * 4);
        uint32_t half = 0;
        MT_DEVICE_NO_UNROLL
        for (int k = 0; k < N8 * 4; k += 4) half |= mti_kept(f.p.drop, e + (uint64_t)k) << k;
        kept[m] = 0;
        MT_DEVICE_UNROLL
        for (int i = 0; i < 4; i++) { /* row i % 2, half i / 2 */
            uint32_t bits = __shfl_sync(0xffffffffu, half, (lane & ~3) + i) >> (lane % 4 * 2);
            kept[m] |= (bits & 0x03030303u) << (i / 2 * 4 + i % 2 * 2);
        }
    }
}

/* Sets the dropped elements of such a tile to 0, before or after it is rounded. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_drop(float (&p)[RowTiles][N8][4], const uint32_t (&kept)[RowTiles]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int m = i / 4 / N8, n = i / 4 % N8, e = i % 4;
        if (!(kept[m] >> (n % (N8 / 2) * 8 + n / (N8 / 2) * 4 + e) & 1)) p[m][n][e] = 0.0f;
    }
}

template <int RowTiles, int K16>
static __device__ __forceinline__ void mti_flash_drop(uint32_t (&p)[K16][RowTiles][4],
                                                      const uint32_t (&kept)[RowTiles]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < K16 * RowTiles * 4; i++) {
        int m = i / 4 % RowTiles, e = i % 4, n = i / 4 / RowTiles * 2 + e / 2;
        uint32_t pair = kept[m] >> (n % K16 * 8 + n / K16 * 4 + e % 2 * 2);
        p[n / 2][m][e] &= ((pair & 1) ? 0xffffu : 0) | ((pair & 2) ? 0xffff0000u : 0);
    }
}

/* Returns the dropout mask of a tile [RowTiles * 16 keys, N8 * 8 queries]. Bit (m * N8 + n) * 4 + e is 1 if element e
   of acc[m][n] is kept. A lane computes the bits of four keys for every eighth query, and shuffles distribute them. */
template <int RowTiles, int N8>
static __device__ __forceinline__ uint32_t mti_flash_kept_columns(const mti_flash &f, int64_t head, int key,
                                                                  int query) {
    static_assert(RowTiles * N8 <= 8, "one word");
    int lane = (int)threadIdx.x & 31;
    uint32_t kept = 0;
    MT_DEVICE_UNROLL
    for (int m = 0; m < RowTiles; m++) {
        uint64_t e = f.element(blockIdx.z, head, query + lane % 8, key + m * 16 + lane / 8 * 4);
        uint32_t mine = 0;
        MT_DEVICE_NO_UNROLL
        for (int n = 0; n < N8; n++) mine |= mti_kept(f.p.drop, e + (uint64_t)(n * 8 * f.p.s.seq)) << (n * 4);
        MT_DEVICE_UNROLL
        for (int i = 0; i < 4; i++) {
            int from = (lane / 16 + i / 2 * 2) * 8 + lane % 4 * 2 + i % 2;
            uint32_t bits = __shfl_sync(0xffffffffu, mine, from) >> (lane / 4 % 4) & 0x11111111u;
            kept |= bits << (m * N8 * 4 + i);
        }
    }
    return kept;
}

/* mti_quad_sum and mti_quad_max return the sum and the maximum over the four lanes of a row. */
static __device__ __forceinline__ float mti_quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

static __device__ __forceinline__ float mti_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* Raises top, the reference of a row, to the largest score of the row so far, if that is larger by more than a factor
   of 2^8 of the exponentials. So a probability before the division by the sum is at most 2^8, which f16 can hold, and
   most tiles raise no row. acc and sum are rescaled to the new reference. A row that is not raised has the factor 1,
   which changes no bit: whether the warp skips the rescaling depends on other rows, but the result of a row does not.
   The new top is finite, because in the first tile every row has a visible key. With SPANS that may be a later tile:
   top stays -infinity until then, and the row is not raised. */
template <bool SPANS, int RowTiles, int N8, int D8>
static __device__ __forceinline__ void mti_flash_raise(float scale, const float (&s)[RowTiles][N8][4],
                                                       float (&acc)[RowTiles][D8][4], float (&top)[RowTiles][2],
                                                       float (&sum)[RowTiles][2]) {
    float factor[RowTiles][2];
    int raised = 0;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * 2; i++) {
        int m = i / 2, h = i % 2 * 2;
        float now = s[m][0][h];
        MT_DEVICE_UNROLL
        for (int n = 0; n < N8; n++) now = fmaxf(now, fmaxf(s[m][n][h], s[m][n][h + 1]));
        now = mti_quad_max(now);
        if (!((now - top[m][i % 2]) * scale > 8.0f)) now = top[m][i % 2];
        factor[m][i % 2] = SPANS && now == top[m][i % 2] ? 1.0f : mti_ex2((top[m][i % 2] - now) * scale);
        raised |= now != top[m][i % 2];
        top[m][i % 2] = now;
    }
    if (!__any_sync(0xffffffffu, raised)) return;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * 2; i++) {
        int m = i / 2, h = i % 2 * 2;
        MT_DEVICE_UNROLL
        for (int d = 0; d < D8; d++) acc[m][d][h] *= factor[m][i % 2], acc[m][d][h + 1] *= factor[m][i % 2];
        sum[m][i % 2] *= factor[m][i % 2];
    }
}

/* Online softmax: s = exp(scale * (s - top)). sum has only the elements of this lane, and mti_flash_finish adds the
   four lanes of a row. With SPANS a row may have seen no key yet: all its s are -infinity and become 0. */
template <bool SPANS, int RowTiles, int N8, int D8>
static __device__ __forceinline__ void mti_flash_softmax(float scale, float (&s)[RowTiles][N8][4],
                                                         float (&acc)[RowTiles][D8][4], float (&top)[RowTiles][2],
                                                         float (&sum)[RowTiles][2]) {
    mti_flash_raise<SPANS>(scale, s, acc, top, sum);
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * 2; i++) {
        int m = i / 2, h = i % 2 * 2;
        float base = SPANS && top[m][i % 2] == -INFINITY ? 0.0f : top[m][i % 2] * scale, total = 0.0f;
        MT_DEVICE_UNROLL
        for (int n = 0; n < N8; n++) {
            s[m][n][h] = mti_ex2(s[m][n][h] * scale - base);
            s[m][n][h + 1] = mti_ex2(s[m][n][h + 1] * scale - base);
            total += s[m][n][h] + s[m][n][h + 1];
        }
        sum[m][i % 2] += total;
    }
}

/* Writes out = acc / sum and lse = the log of the sum of exponentials, for the 32 rows of the warp from `row` on. For a
   row without keys, out = 0 and lse = -infinity. */
template <int HeadDim, bool BF16>
static __device__ __forceinline__ void mti_flash_finish(const mti_flash &f, float (&acc)[2][HeadDim / 8][4],
                                                        const float (&top)[2][2], const float (&sum)[2][2], int row,
                                                        uint16_t *tile) {
    int64_t b = blockIdx.z, head = blockIdx.y;
    int lane = (int)threadIdx.x & 31;
    MT_DEVICE_UNROLL
    for (int i = 0; i < 4; i++) {
        int m = i / 2, h = i % 2 * 2, r = row + m * 16 + i % 2 * 8 + lane / 4;
        float total = mti_quad_sum(sum[m][i % 2]), factor = total == 0.0f ? 0.0f : f.p.drop.scale / total;
        MT_DEVICE_UNROLL
        for (int d = 0; d < HeadDim / 8; d++) acc[m][d][h] *= factor, acc[m][d][h + 1] *= factor;
        if (f.p.lse.data && lane % 4 == 0 && r < f.p.s.seq)
            mti_put(f.p.lse, head, b * f.p.s.seq + r,
                    total == 0.0f ? -INFINITY : (top[m][i % 2] * f.scale + log2f(total)) / MTI_LOG2E);
    }
    mti_tile_store<HeadDim, BF16>(acc, tile, f.out(f.p.out, b, row, head * HeadDim), f.p.out.ld, (int)f.p.s.seq - row);
}

/* mti_flash_held, mti_flash_dq_held and mti_flash_dkv_held are the numbers of fragments of its own rows that a warp
   holds in registers: as many as fit beside the scores and the results without spilling, on every architecture. */
#define MTI_FLASH_KEYS 64 /* keys of a tile of the forward kernel */
template <int HeadDim, bool DROP, bool SPANS> static MT_HOST_DEVICE constexpr int mti_flash_held() {
    return HeadDim == 64 ? 4 : HeadDim == 96 ? (DROP && SPANS ? 1 : 3) : 0;
}

/* A block owns 128 queries of a head, and each of its four warps owns 32 of them. Shared memory has q [128, HeadDim]
   and three tiles [Step, HeadDim]. The tiles are used in turn for k0 v0 k1 v1 ...: one is in use while the next two are
   in flight.

   1. First barrier of a step: k has arrived (and q in the first step), and all warps have read the previous v. The tile
      of the previous v then gets the next k.
   2. Each warp computes its scores and their online softmax.
   3. Second barrier: v has arrived, and all warps have read k. The tile of k then gets the next v.
   4. Each warp adds the product with v to its output.

   After the barrier that follows the loop, all copies have arrived, and each warp may overwrite its rows of q with its
   output.

   With CACHED (and SPANS), k and v are those of a key/value cache, and the spans those of its new tokens.

   head size                      64    96   128
   mma per ldmatrix in the loop   4.0   3.6  3.2   (96 with dropout and SPANS: fewer)
   registers (sm_90)              226   255  255   (with SPANS: 245, 254, 255)
   blocks of an SM, sm_80, sm_90  2     2    2     and with the 100 KiB of sm_86, sm_89, sm_120: 2, 1, 1 */
template <int HeadDim, bool BF16, bool DROP, bool SPANS, bool CACHED = false>
static __global__ void __launch_bounds__(128, 2) mti_flash_forward_kernel(mti_flash f) {
    constexpr int Step = MTI_FLASH_KEYS, Tile = Step * HeadDim, Held = mti_flash_held<HeadDim, DROP, SPANS>();
    MT_DYN_SHARED(uint16_t, q);
    int64_t b = blockIdx.z, head = blockIdx.y, ld = CACHED ? HeadDim : f.p.k.ld;
    int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * MTI_FLASH_ROWS; /* blocks with the most keys start first */
    int warp = (int)threadIdx.x / 32 * 32, row = first + warp;
    int begin = 0, keys = SPANS ? 0 : f.keys(b, first);
    const uint16_t *k = CACHED ? f.cached_keys(b, head) : f.in(f.p.k, b, f.p.k_col(head));
    uint16_t *own = q + warp * HeadDim, *tiles = q + MTI_FLASH_ROWS * HeadDim;
    mti_flash_span *spans = (mti_flash_span *)(tiles + 3 * Tile), *own_spans = spans + warp;
    int now = 0; /* k is at tiles + now, v in the next of the three tiles */
    float s[2][Step / 8][4], acc[2][HeadDim / 8][4], top[2][2], sum[2][2] = {};
    uint32_t x[HeadDim / 16][2][4], p[Step / 16][2][4] = {}, kept[2];
    for (int i = 0; i < 4; i++) top[i / 2][i % 2] = -INFINITY;
    mti_tile_zero(acc);
    mti_tile_fetch<MTI_FLASH_ROWS, HeadDim, 128>(q, f.in(f.p.q, b, f.p.q_col(head)), CACHED ? f.p.q.ld : f.p.k.ld,
                                                 first, (int)f.p.s.seq);
    if (SPANS) mti_flash_begin_spans<true, Step, CACHED>(f, spans, first, &begin, &keys);
    mti_tile_fetch<Step, HeadDim, 128>(tiles, k, ld, begin, keys);
    mti_cp_async_commit();
    mti_tile_fetch<Step, HeadDim, 128>(tiles + Tile, k + f.p.value, ld, begin, keys);
    mti_cp_async_commit();
    mti_cp_async_wait<1>();
    __syncthreads(); /* q has arrived */
    mti_tile_hold<HeadDim, Held>(x, own);
    for (int key = begin; key < keys; key += Step) {
        bool seen = SPANS ? mti_flash_meets<32>(own_spans, key, Step) : f.sees(row + 31, key, keys);
        uint16_t *k_tile = tiles + now, *v_tile = tiles + (now < 2 * Tile ? now + Tile : 0);
        int free_tile = now < Tile ? now + 2 * Tile : now - Tile;
        mti_cp_async_wait<1>();
        __syncthreads(); /* k has arrived, and all warps have read the previous v */
        if (key + Step < keys) mti_tile_fetch<Step, HeadDim, 128>(tiles + free_tile, k, ld, key + Step, keys);
        mti_cp_async_commit();
        if (seen) {
            mti_tile_scores<HeadDim, BF16, Held>(s, x, own, k_tile);
            if (SPANS) mti_flash_cap_and_mask(f, s, own_spans, key);
            else if (!f.sees(row, key + Step - 1, keys)) mti_flash_mask_rows(f, s, keys, row, key);
            mti_flash_softmax<SPANS>(f.scale, s, acc, top, sum);
            mti_tile_round<BF16>(p, s);
            if (DROP) {
                mti_flash_kept_rows<Step / 8>(f, head, SPANS ? first + mti_flash_again(warp) : row, key, kept);
                mti_flash_drop(p, kept);
            }
        }
        mti_cp_async_wait<1>();
        __syncthreads(); /* v has arrived, and all warps have read k */
        if (key + Step < keys) mti_tile_fetch<Step, HeadDim, 128>(k_tile, k + f.p.value, ld, key + Step, keys);
        mti_cp_async_commit();
        if (seen) mti_tile_add_product<HeadDim, BF16>(acc, p, v_tile);
        now = free_tile;
    }
    mti_cp_async_wait<0>();
    __syncthreads();
    if (SPANS) row = first + mti_flash_again(warp);
    mti_flash_finish<HeadDim, BF16>(f, acc, top, sum, row, own);
}

/* Computes f.lse and f.delta of each query, for backward. A block owns 64 queries of a head. Four lanes own a query.
   Each of them sums every fourth vector, and shuffles add the four sums. The kernel uses no shared memory and no
   barrier. In bf16 on sm_90, with heads of 128 features: 12 instructions for an element of out and dout, which moves 4
   bytes (budget: 27). */
static __global__ void __launch_bounds__(256) mti_flash_stats_kernel(mti_flash f) {
    int64_t b = blockIdx.z, head = blockIdx.y, i = (int64_t)blockIdx.x * 64 + threadIdx.x / 4, row = b * f.p.s.seq + i;
    int64_t d = f.p.s.head_dim, lane = threadIdx.x % 4;
    float x[MTI_VECTOR], y[MTI_VECTOR], sum = 0.0f, lse = -INFINITY;
    for (int64_t c = lane * MTI_VECTOR; i < f.p.s.seq && c < d; c += 4 * MTI_VECTOR) {
        mti_load<true>(f.p.out, row, head * d + c, MTI_VECTOR, x);
        mti_load<true>(f.p.dout, row, head * d + c, MTI_VECTOR, y);
        for (int j = 0; j < MTI_VECTOR; j++) sum += x[j] * y[j];
    }
    sum = mti_quad_sum(sum);
    if (lane > 0) return;
    if (i < f.p.s.seq) lse = mti_get(f.p.lse, head, row);
    f.lse[f.stat(b, head) + i] = lse == -INFINITY ? INFINITY : lse * MTI_LOG2E;
    f.delta[f.stat(b, head) + i] = sum;
}

#define MTI_FLASH_DQ_KEYS 32 /* keys of a tile of the dq kernel */
template <int HeadDim, bool DROP, bool SPANS> static MT_HOST_DEVICE constexpr int mti_flash_dq_held() {
    return HeadDim == 64 ? 3 : HeadDim == 96 && !DROP && !SPANS ? 1 : 0;
}

/* Starts copying a pair of tiles, k and v, and commits the copies as one group. */
template <int HeadDim, int Step>
static __device__ __forceinline__ void mti_flash_fetch_keys(uint16_t *pair, const uint16_t *k, const uint16_t *v,
                                                            int64_t ld, int key, int length) {
    mti_tile_fetch<Step, HeadDim, 128>(pair, k, ld, key, length);
    mti_tile_fetch<Step, HeadDim, 128>(pair + Step * HeadDim, v, ld, key, length);
    mti_cp_async_commit();
}

/* s = the gradient of the scores, p (D dp - delta), times the derivative of a soft cap. For a dropped element dp is 0
   already. The factor of the dropout D for the other elements, drop.scale, is applied here. lse and delta belong to the
   rows of the warp. They are read from shared memory in each step, because registers for them would be spilled. */
template <bool CAPPED, int N8>
static __device__ __forceinline__ void mti_flash_score_grads(const mti_flash &f, float (&s)[2][N8][4],
                                                             const float (&dp)[2][N8][4], const float *lse,
                                                             const float *delta) {
    int lane = (int)threadIdx.x & 31;
    MT_DEVICE_UNROLL
    for (int i = 0; i < 2 * N8 * 4; i++) {
        int m = i / 4 / N8, n = i / 4 % N8, e = i % 4, r = m * 16 + e / 2 * 8 + lane / 4;
        float slope = CAPPED ? mti_flash_cap_slope(s[m][n][e]) : 1.0f;
        s[m][n][e] = mti_ex2(s[m][n][e] * f.scale - lse[r]) * (dp[m][n][e] * f.p.drop.scale - delta[r]);
        if (CAPPED) s[m][n][e] *= slope;
    }
}

/* A block owns 128 queries of a head, and each of its four warps owns 32 of them. Shared memory has q and dout [128,
   HeadDim], two pairs of tiles (k, v) [Step, HeadDim], and lse and delta of the queries. One pair is in use while the
   other is in flight. After the barrier of a step, the pair has arrived, and all warps have read the other pair, which
   the next copy overwrites. After the barrier that follows the loop, the warps may overwrite their rows of q with dq.

   head size                      64    96    128
   mma per ldmatrix in the loop   3.4   2.6   2.4   (96 with dropout or SPANS: 2.4)
   registers (sm_90)              248   246   253   (with SPANS: 242, 244, 254)
   blocks of an SM, sm_90         2     2     2     sm_80: 2, 2, 1; sm_86, sm_89, sm_120: 2, 1, 1, with SPANS 1, 1, 1
 */
template <int HeadDim, bool BF16, bool DROP, bool SPANS>
static __global__ void __launch_bounds__(128, 2) mti_flash_dq_kernel(mti_flash f) {
    constexpr int Step = MTI_FLASH_DQ_KEYS, Held = mti_flash_dq_held<HeadDim, DROP, SPANS>();
    MT_DYN_SHARED(uint16_t, q);
    int64_t b = blockIdx.z, head = blockIdx.y, ld = f.p.k.ld, seq = f.p.s.seq;
    int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * MTI_FLASH_ROWS;
    int warp = (int)threadIdx.x / 32 * 32, row = first + warp, i = (int)threadIdx.x;
    int begin = 0, keys = SPANS ? 0 : f.keys(b, first);
    const uint16_t *k = f.in(f.p.k, b, f.p.k_col(head));
    uint16_t *dout = q + MTI_FLASH_ROWS * HeadDim, *pairs = dout + MTI_FLASH_ROWS * HeadDim;
    float *lse = (float *)(pairs + 4 * Step * HeadDim), *delta = lse + MTI_FLASH_ROWS;
    mti_flash_span *spans = (mti_flash_span *)(delta + MTI_FLASH_ROWS);
    int now = 0; /* the pair in use is at pairs + now, the other one at pairs + 2 * Step * HeadDim - now */
    float s[2][Step / 8][4], dp[2][Step / 8][4], dq[2][HeadDim / 8][4];
    uint32_t x[HeadDim / 16][2][4], y[HeadDim / 16][2][4], ds[Step / 16][2][4], kept[2];
    mti_tile_zero(dq);
    mti_tile_fetch<MTI_FLASH_ROWS, HeadDim, 128>(q, f.in(f.p.q, b, f.p.q_col(head)), f.p.k.ld, first, (int)seq);
    mti_tile_fetch<MTI_FLASH_ROWS, HeadDim, 128>(dout, f.in(f.p.dout, b, head * HeadDim), f.p.dout.ld, first, (int)seq);
    if (i < MTI_FLASH_ROWS / 2) /* 16 bytes of lse or delta */
        mti_cp_async16(lse + i * 4, (i < 32 ? f.lse : f.delta) + f.stat(b, head) + first + i % 32 * 4, 16);
    if (SPANS) mti_flash_begin_spans<true, Step>(f, spans, first, &begin, &keys);
    mti_flash_fetch_keys<HeadDim, Step>(pairs, k, k + f.p.value, ld, begin, keys);
    mti_cp_async_wait<0>();
    __syncthreads(); /* q and dout have arrived */
    mti_tile_hold<HeadDim, Held>(x, q + warp * HeadDim);
    mti_tile_hold<HeadDim, Held>(y, dout + warp * HeadDim);
    for (int key = begin; key < keys; key += Step) {
        mti_cp_async_wait<0>();
        __syncthreads(); /* the pair has arrived, and all warps have read the other one */
        if (key + Step < keys)
            mti_flash_fetch_keys<HeadDim, Step>(pairs + 2 * Step * HeadDim - now, k, k + f.p.value, ld, key + Step,
                                                keys);
        if (SPANS ? mti_flash_meets<32>(spans + (DROP ? warp : mti_flash_again(warp)), key, Step)
                  : f.sees(row + 31, key, keys)) {
            mti_tile_scores<HeadDim, BF16, Held>(dp, y, dout + warp * HeadDim, pairs + now + Step * HeadDim);
            if (DROP) {
                mti_flash_kept_rows<Step / 8>(f, head, SPANS ? first + mti_flash_again(warp) : row, key, kept);
                mti_flash_drop(dp, kept);
            }
            mti_tile_scores<HeadDim, BF16, Held>(s, x, q + warp * HeadDim, pairs + now);
            if (SPANS) mti_flash_cap_and_mask(f, s, spans + (DROP ? warp : mti_flash_again(warp)), key);
            else if (!f.sees(row, key + Step - 1, keys)) mti_flash_mask_rows(f, s, keys, row, key);
            if (SPANS && f.cap != 0.0f) mti_flash_score_grads<true>(f, s, dp, lse + warp, delta + warp);
            else mti_flash_score_grads<false>(f, s, dp, lse + warp, delta + warp);
            mti_tile_round<BF16>(ds, s);
            mti_tile_add_product<HeadDim, BF16>(dq, ds, pairs + now);
        }
        now = 2 * Step * HeadDim - now;
    }
    mti_cp_async_wait<0>();
    __syncthreads();
    if (SPANS) row = first + mti_flash_again(warp), head = mti_flash_again((int)head);
    mti_tile_scale(dq, f.p.scale);
    mti_tile_store<HeadDim, BF16>(dq, q + warp * HeadDim, f.out(f.p.dq, b, row, f.p.q_col(head)), f.p.dq.ld,
                                  (int)seq - row);
}

/* Sizes of the dkv kernel. queries: of a tile; part: the queries whose scores a warp computes at a time; rows: a warp
   owns rows * 16 keys. */
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dkv_queries() { return HeadDim == 96 ? 64 : 32; }
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dkv_part() { return HeadDim == 64 ? 16 : 32; }
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dkv_rows() { return HeadDim == 64 ? 2 : 1; }
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dkv_threads() {
    return MTI_FLASH_ROWS / mti_flash_dkv_rows<HeadDim>() * 2;
}
template <int HeadDim, bool DROP> static MT_HOST_DEVICE constexpr int mti_flash_dkv_held() {
    return HeadDim == 64 ? (DROP ? 1 : 2) : HeadDim == 96 ? 6 : 3;
}

/* The size of a set: the tiles of q and dout, and lse and delta of their rows. */
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_set() { /* in 16-bit elements */
    return mti_flash_dkv_queries<HeadDim>() * (2 * HeadDim + 4);
}

/* Starts copying a set, and commits the copies as one group. */
template <int HeadDim>
static __device__ __forceinline__ void mti_flash_fetch_queries(const mti_flash &f, uint16_t *set, int64_t head,
                                                               int query) {
    constexpr int Step = mti_flash_dkv_queries<HeadDim>(), Threads = mti_flash_dkv_threads<HeadDim>();
    int64_t b = blockIdx.z;
    int seq = (int)f.p.s.seq, i = (int)threadIdx.x;
    mti_tile_fetch<Step, HeadDim, Threads>(set, f.in(f.p.q, b, f.p.q_col(head)), f.p.k.ld, query, seq);
    mti_tile_fetch<Step, HeadDim, Threads>(set + Step * HeadDim, f.in(f.p.dout, b, head * HeadDim), f.p.dout.ld, query,
                                           seq);
    if (i < Step / 2) {
        const float *stats = (i < Step / 4 ? f.lse : f.delta) + f.stat(b, head) + query;
        mti_cp_async16((float *)(set + 2 * Step * HeadDim) + i * 4, stats + i % (Step / 4) * 4, 16);
    }
    mti_cp_async_commit();
}

/* s = D p for dv, and dp = the gradient of the scores for dk, both transposed, with the derivative of a soft cap. lse
   and delta point to the columns of this lane. drop.scale is applied to dv later. */
template <bool DROP, bool CAPPED, int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_pairs(const mti_flash &f, float (&s)[RowTiles][N8][4],
                                                       float (&dp)[RowTiles][N8][4], const float *lse,
                                                       const float *delta, uint32_t kept) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int m = i / 4 % RowTiles, n = i / 4 / RowTiles, e = i % 4;
        float p = mti_ex2(s[m][n][e] * f.scale - lse[n * 8 + e % 2]);
        float slope = CAPPED ? mti_flash_cap_slope(s[m][n][e]) : 1.0f;
        int stays = !DROP || kept >> ((m * N8 + n) * 4 + e) & 1;
        dp[m][n][e] = p * ((stays ? dp[m][n][e] * f.p.drop.scale : 0.0f) - delta[n * 8 + e % 2]);
        if (CAPPED) dp[m][n][e] *= slope;
        s[m][n][e] = stays ? p : 0.0f;
    }
}

/* The keys and values of a warp in the dkv kernel: their rows and spans in shared memory, the fragments of them that
   the warp holds, and the results. */
template <int HeadDim> struct mti_flash_own {
    static constexpr int RowTiles = mti_flash_dkv_rows<HeadDim>();
    const uint16_t *k, *v;
    const mti_flash_span *spans;
    uint32_t held_k[HeadDim / 16][RowTiles][4], held_v[HeadDim / 16][RowTiles][4];
    float dk[RowTiles][HeadDim / 8][4], dv[RowTiles][HeadDim / 8][4];
};

/* Adds what part of a set gives to dk and dv of the keys of a warp. q, dout, lse and delta belong to the part, whose
   first query is `query`. The first key is `row`. */
template <int HeadDim, bool BF16, bool DROP, bool SPANS>
static __device__ __forceinline__ void mti_flash_dkv_add(const mti_flash &f, mti_flash_own<HeadDim> &own,
                                                         const uint16_t *q, const uint16_t *dout, const float *lse,
                                                         const float *delta, int head, int row, int query, int length) {
    constexpr int Part = mti_flash_dkv_part<HeadDim>(), RowTiles = mti_flash_own<HeadDim>::RowTiles,
                  Held = mti_flash_dkv_held<HeadDim, DROP>();
    float s[RowTiles][Part / 8][4], dp[RowTiles][Part / 8][4];
    uint32_t p[Part / 16][RowTiles][4], ds[Part / 16][RowTiles][4];
    uint32_t kept = DROP ? mti_flash_kept_columns<RowTiles, Part / 8>(f, head, row, query) : 0;
    mti_tile_scores<HeadDim, BF16, Held>(s, own.held_k, own.k, q);
    mti_tile_scores<HeadDim, BF16, Held>(dp, own.held_v, own.v, dout);
    if (SPANS) mti_flash_cap_and_mask(f, s, own.spans, query);
    else if (!f.sees(query, row + RowTiles * 16 - 1, length)) mti_flash_mask_columns(f, s, length, row, query);
    if (SPANS && f.cap != 0.0f) mti_flash_pairs<DROP, true>(f, s, dp, lse, delta, kept);
    else mti_flash_pairs<DROP, false>(f, s, dp, lse, delta, kept);
    mti_tile_round<BF16>(p, s);
    mti_tile_add_product<HeadDim, BF16>(own.dv, p, dout);
    mti_tile_round<BF16>(ds, dp);
    mti_tile_add_product<HeadDim, BF16>(own.dk, ds, q);
}

/* A block owns 128 keys of a group, and each of its warps owns 16 or 32 of them. Shared memory has k and v [128,
   HeadDim], and two sets of mti_flash_fetch_queries: one set is in use while the other is in flight. The block goes
   over the queries of all heads of the group. After the barrier of a step, the set has arrived, and all warps have read
   the other set, which the next copy overwrites. After the barrier that follows the loop, the warps may overwrite their
   rows of k and v with dk and dv.

   One kernel for dq, dk and dv would need five products instead of seven: dq and dkv both compute s and dp. But dq is a
   sum over blocks of keys. To have the same bits in each run, blocks would have to wait for each other and add in a
   fixed order to an f32 copy of dq in memory: 64 KiB read and written for 64 queries and 128 keys of head size 128.

   head size                      64    96    128
   mma per ldmatrix in the loop   2.7   2.0   1.7   (64 with dropout: 2.3)
   registers (sm_90)              255   239   255   (with SPANS: 253, 244, 255)
   blocks of an SM                2     1     1     with 128, 256, 256 threads; 64 with SPANS on sm_86, sm_89, sm_120: 1
 */
template <int HeadDim, bool BF16, bool DROP, bool SPANS>
static __global__ void __launch_bounds__(mti_flash_dkv_threads<HeadDim>(), mti_flash_dkv_rows<HeadDim>())
    mti_flash_dkv_kernel(mti_flash f) {
    constexpr int Step = mti_flash_dkv_queries<HeadDim>(), Part = mti_flash_dkv_part<HeadDim>(),
                  Threads = mti_flash_dkv_threads<HeadDim>(), Held = mti_flash_dkv_held<HeadDim, DROP>();
    MT_DYN_SHARED(uint16_t, k);
    int64_t b = blockIdx.z, ld = f.p.k.ld, seq = f.p.s.seq, k_col = blockIdx.y * f.p.kv_step;
    int head = (int)(blockIdx.y * f.p.s.heads_per_group),
        heads = head + (int)f.p.s.heads_per_group; /* one past the last head */
    int first = (int)blockIdx.x * MTI_FLASH_ROWS, length = (int)f.p.length(b), lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x / 32 * mti_flash_dkv_rows<HeadDim>() * 16, row = first + warp;
    int begin = !SPANS && f.causal() ? first : 0, end = SPANS ? 0 : (int)seq, query;
    uint16_t *v = k + MTI_FLASH_ROWS * HeadDim, *sets = v + MTI_FLASH_ROWS * HeadDim;
    mti_flash_span *spans = (mti_flash_span *)(sets + 2 * mti_flash_set<HeadDim>());
    int now = 0; /* the set in use is at sets + now, the other one at sets + mti_flash_set<HeadDim>() - now */
    mti_flash_own<HeadDim> own;
    own.k = k + warp * HeadDim, own.v = v + warp * HeadDim, own.spans = spans + warp;
    mti_tile_zero(own.dk);
    mti_tile_zero(own.dv);
    mti_tile_fetch<MTI_FLASH_ROWS, HeadDim, Threads>(k, f.in(f.p.k, b, k_col), ld, first, length);
    mti_tile_fetch<MTI_FLASH_ROWS, HeadDim, Threads>(v, f.in(f.p.k, b, k_col + f.p.value), ld, first, length);
    mti_cp_async_commit();
    if (SPANS) mti_flash_begin_spans<false, Step>(f, spans, first, &begin, &end);
    query = begin;
    mti_flash_fetch_queries<HeadDim>(f, sets, head, begin);
    mti_cp_async_wait<1>();
    __syncthreads(); /* k and v have arrived */
    mti_tile_hold<HeadDim, Held>(own.held_k, own.k);
    mti_tile_hold<HeadDim, Held>(own.held_v, own.v);
    while ((SPANS ? begin < end : first < length) && head < heads) {
        int next = query + Step < (SPANS ? end : seq) ? query + Step : begin,
            next_head = next > query ? head : head + 1;
        mti_cp_async_wait<0>();
        __syncthreads(); /* the set has arrived, and all warps have read the other one */
        if (next_head < heads)
            mti_flash_fetch_queries<HeadDim>(f, sets + mti_flash_set<HeadDim>() - now, next_head, next);
        MT_DEVICE_NO_UNROLL
        for (int i = 0; i < Step; i += Part) {
            const uint16_t *q = sets + now + i * HeadDim;
            const float *lse = (const float *)(sets + now + 2 * Step * HeadDim) + i + lane % 4 * 2;
            if (SPANS ? mti_flash_meets<mti_flash_own<HeadDim>::RowTiles * 16>(own.spans, query + i, Part)
                      : f.sees(query + i + Part - 1, row, length))
                mti_flash_dkv_add<HeadDim, BF16, DROP, SPANS>(f, own, q, q + Step * HeadDim, lse, lse + Step, head, row,
                                                              query + i, length);
        }
        now = mti_flash_set<HeadDim>() - now;
        query = next, head = next_head;
    }
    mti_cp_async_wait<0>();
    __syncthreads();
    mti_tile_scale(own.dk, f.p.scale);
    mti_tile_scale(own.dv, f.p.drop.scale);
    mti_tile_store<HeadDim, BF16>(own.dk, k + warp * HeadDim, f.out(f.p.dk, b, row, k_col), f.p.dk.ld, (int)seq - row);
    mti_tile_store<HeadDim, BF16>(own.dv, v + warp * HeadDim, f.out(f.p.dk, b, row, k_col + f.p.dvalue), f.p.dk.ld,
                                  (int)seq - row);
}

/* The shared memory of a block. */
template <bool SPANS> static constexpr int mti_flash_span_bytes() {
    return SPANS ? MTI_FLASH_ROWS * (int)sizeof(mti_flash_span) : 0;
}
template <int HeadDim, bool SPANS> static constexpr int mti_flash_forward_bytes() {
    return 2 * HeadDim * (MTI_FLASH_ROWS + 3 * MTI_FLASH_KEYS) + mti_flash_span_bytes<SPANS>();
}
template <int HeadDim, bool SPANS> static constexpr int mti_flash_dq_bytes() {
    return 2 * HeadDim * (2 * MTI_FLASH_ROWS + 4 * MTI_FLASH_DQ_KEYS) + 2 * MTI_FLASH_ROWS * (int)sizeof(float) +
           mti_flash_span_bytes<SPANS>();
}
template <int HeadDim, bool SPANS> static constexpr int mti_flash_dkv_bytes() {
    return 2 * (2 * HeadDim * MTI_FLASH_ROWS + 2 * mti_flash_set<HeadDim>()) + mti_flash_span_bytes<SPANS>();
}

/* Whether the three kernels fit in 99 KiB of shared memory, the limit of a block on sm_86, sm_89 and sm_120. */
template <int HeadDim> static constexpr bool mti_flash_is_small() {
    return mti_flash_forward_bytes<HeadDim, true>() <= 99 << 10 && mti_flash_dq_bytes<HeadDim, true>() <= 99 << 10 &&
           mti_flash_dkv_bytes<HeadDim, true>() <= 99 << 10;
}
static_assert(mti_flash_is_small<64>() && mti_flash_is_small<96>() && mti_flash_is_small<128>(), "shared memory");

static mt_status mti_flash_launch(const mti_attention *a, const char *name, void (*kernel)(mti_flash), int64_t heads,
                                  unsigned threads, int bytes, const mti_flash &f) {
    dim3 grid((unsigned)(f.pitch / MTI_FLASH_ROWS), (unsigned)heads, (unsigned)a->desc.batch);
    MT_CUDA_TRY(a->ctx, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    MT_LAUNCH_KERNEL(kernel, grid, threads, (size_t)bytes, mt_context_stream(a->ctx), f);
    return mt_cuda_launched(a->ctx, name);
}

static mti_flash mti_flash_of(const mti_attention *a) {
    float softcap = a->desc.softcap, factor = softcap > 0.0f ? softcap : a->desc.scale;
    mti_flash f = {mti_plain_of(a), factor * MTI_LOG2E, NULL, NULL, mt_round_up(a->desc.seq, MTI_FLASH_ROWS), 0.0f, {}};
    if (softcap > 0.0f) f.cap = a->desc.scale / softcap;
    return f;
}

template <int HeadDim, bool SPANS> static mt_status mti_flash_run_forward(const mti_attention *a) {
    mti_flash f = mti_flash_of(a);
    void (*kernels[2][2])(mti_flash) = {
        {mti_flash_forward_kernel<HeadDim, false, false, SPANS>, mti_flash_forward_kernel<HeadDim, false, true, SPANS>},
        {mti_flash_forward_kernel<HeadDim, true, false, SPANS>, mti_flash_forward_kernel<HeadDim, true, true, SPANS>}};
    MT_TRY(mt_cuda_enter(a->ctx));
    return mti_flash_launch(a, "mt_attention_forward", kernels[a->q.dtype == MT_BF16][f.p.drop.on != 0],
                            mti_attention_heads(&a->desc), 128, mti_flash_forward_bytes<HeadDim, SPANS>(), f);
}

/* mt_attention_backward releases the memory of lse and delta when it ends. */
template <int HeadDim, bool SPANS> static mt_status mti_flash_run_backward(const mti_attention *a) {
    const mt_attention_desc *s = &a->desc;
    static const char *const name = "mt_attention_backward";
    mti_flash f = mti_flash_of(a);
    int64_t heads = mti_attention_heads(s), stats = s->batch * heads * f.pitch;
    int bf16 = a->q.dtype == MT_BF16, drop = f.p.drop.on != 0;
    void (*dq[2][2])(mti_flash) = {
        {mti_flash_dq_kernel<HeadDim, false, false, SPANS>, mti_flash_dq_kernel<HeadDim, false, true, SPANS>},
        {mti_flash_dq_kernel<HeadDim, true, false, SPANS>, mti_flash_dq_kernel<HeadDim, true, true, SPANS>}};
    void (*dkv[2][2])(mti_flash) = {
        {mti_flash_dkv_kernel<HeadDim, false, false, SPANS>, mti_flash_dkv_kernel<HeadDim, false, true, SPANS>},
        {mti_flash_dkv_kernel<HeadDim, true, false, SPANS>, mti_flash_dkv_kernel<HeadDim, true, true, SPANS>}};
    void *memory = NULL;
    MT_TRY(mt_arena_alloc(a->ctx, (size_t)(2 * stats) * sizeof(float), &memory));
    f.lse = (float *)memory;
    f.delta = f.lse + stats;
    MT_TRY(mt_cuda_enter(a->ctx));
    MT_LAUNCH_KERNEL(mti_flash_stats_kernel, dim3((unsigned)(f.pitch / 64), (unsigned)heads, (unsigned)s->batch), 256,
                     0, mt_context_stream(a->ctx), f);
    MT_TRY(mt_cuda_launched(a->ctx, name));
    MT_TRY(mti_flash_launch(a, name, dq[bf16][drop], heads, 128, mti_flash_dq_bytes<HeadDim, SPANS>(), f));
    return mti_flash_launch(a, name, dkv[bf16][drop], s->groups, mti_flash_dkv_threads<HeadDim>(),
                            mti_flash_dkv_bytes<HeadDim, SPANS>(), f);
}

} /* extern "C++" */
#endif

/* ---- >>attention-choice: which kernels compute an attention ------------------------------------------------------ */

#if MT_HAS_CUDA
extern "C++" {

/* Whether the tensor-core kernels can read or write a view. mt_none() is not read. */
static int mti_flash_fits_view(const mti_attention *a, mt_tensor t) {
    return !t.data || (t.dtype == a->q.dtype && mti_is_wide(t));
}

/* The same for q, k and v, whose rows must be the same distance apart: a second distance spills registers of the dkv
   kernel. The kernels find a value by its distance from the key. */
static int mti_flash_fits_inputs(const mti_attention *a) {
    int64_t ld = mt_tensor_ld(a->k);
    return mti_flash_fits_view(a, a->q) && mti_flash_fits_view(a, a->k) && mti_flash_fits_view(a, a->v) &&
           mt_tensor_ld(a->q) == ld && mt_tensor_ld(a->v) == ld;
}

/* The same for the gradients. dq may have another distance. */
static int mti_flash_fits_gradients(const mti_attention *a) {
    return mti_flash_fits_view(a, a->dq) && mti_flash_fits_view(a, a->dk) && mti_flash_fits_view(a, a->dv) &&
           mt_tensor_ld(a->dk) == mt_tensor_ld(a->dv);
}

/* Whether a call needs the kernels with SPANS. A window of at least seq hides nothing. */
static int mti_flash_needs_spans(const mt_attention_desc *s) {
    return (s->window > 0 && s->window < s->seq) || s->softcap > 0.0f || s->cu_seqlens;
}

/* Whether the kernels know everything that changes a score. With a soft cap they multiply by scale / softcap, and by
   softcap / ln 2, which must be finite. */
static int mti_flash_fits_scores(const mt_attention_desc *s) {
    return s->kv_seq == s->seq && !s->alibi_slopes && !s->bias.data &&
           (s->softcap == 0.0f || (s->softcap < 1e30f && s->scale / s->softcap < 1e30f));
}

/* Sets *arch to the architecture that nvcc compiled this GPU's kernels for: 80 for compute_80. It can be older than the
   GPU, because the driver translates PTX for newer GPUs: without -arch, nvcc 13 compiles for compute_75. The context
   asks the driver once. MT_DEVICE_META plans for the GPU that it stands for. */
static mt_status mti_built_for(mt_context *ctx, int *arch) {
    cudaFuncAttributes attributes;
    mti_kernels *k;
    *arch = mt_context_compute_capability(ctx);
    if (mt_context_device(ctx) == MT_DEVICE_META) return MT_SUCCESS;
    MT_TRY(mti_kernels_open(ctx, &k));
    if (!k->built_for) {
        MT_TRY(mt_cuda_enter(ctx));
        MT_CUDA_TRY(ctx, cudaFuncGetAttributes(&attributes, (const void *)mti_flash_stats_kernel));
        k->built_for = attributes.ptxVersion;
    }
    *arch = k->built_for;
    return MT_SUCCESS;
}

/* Whether the tensor-core kernels of a head size can run a call. The maximum of the scores is taken before scale, so
   scale must be positive. Positions are int, so seq is limited. */
template <int HeadDim, bool SPANS> static int mti_flash_fits(const mti_attention *a, int capability, int built_for) {
    const mt_attention_desc *s = &a->desc;
    (void)capability; /* at least built_for */
    return s->head_dim == HeadDim && built_for >= 80 && s->scale > 0.0f && s->seq <= INT_MAX / 2 &&
           mti_flash_needs_spans(s) == SPANS && mti_flash_fits_scores(s) && a->q.dtype != MT_F32 &&
           mti_flash_fits_inputs(a) && mti_flash_fits_view(a, a->out) && mti_flash_fits_view(a, a->dout) &&
           mti_flash_fits_gradients(a);
}

static int mti_plain_fits(const mti_attention *a, int capability, int built_for) {
    (void)a, (void)capability, (void)built_for;
    return 1; /* mti_cuda_attention_check refuses what it cannot run */
}

/* The shapes of the plain kernels for heads of up to 32 * SLICES elements. Every GPU grants their shared memory. */
template <int SLICES> struct mti_plain_shapes {
    typedef mti_plain_shape<SLICES, SLICES == 8 ? 2 : 4, 4, SLICES == 8 ? 2 : 4, SLICES == 8 ? 4 : 3> forward;
    typedef mti_plain_shape<SLICES, SLICES == 2 ? 4 : 2, SLICES == 8 ? 2 : 4, SLICES == 8 ? 2 : 4, SLICES == 2 ? 3 : 4>
        dq;
    typedef mti_plain_shape<SLICES, SLICES == 2 ? 4 : 2, SLICES == 8 ? 2 : 4, 8 / SLICES, SLICES == 2 ? 3 : 4> dkv;
    static constexpr size_t forward_bytes = forward::bytes(1, 1), dq_bytes = dq::bytes(2, 1),
                            dkv_bytes = dkv::bytes(2, 2);
    static_assert(forward_bytes <= MTI_SHARED_LEAST && dq_bytes <= MTI_SHARED_LEAST && dkv_bytes <= MTI_SHARED_LEAST,
                  "shared memory");
};

/* Launches a kernel with tiles. `rows` x heads x sequences are its rows. */
template <typename T>
static mt_status mti_plain_launch_tiles(const mti_attention *a, const char *name, void (*kernel)(mti_plain),
                                        int64_t rows, int64_t heads, size_t bytes, const mti_plain &p) {
    dim3 grid((unsigned)((rows + T::Rows - 1) / T::Rows), (unsigned)heads, (unsigned)a->desc.batch);
    MT_TRY(mti_shared_allow(a->ctx, kernel, bytes));
    MT_LAUNCH_KERNEL(kernel, grid, T::Threads, bytes, mt_context_stream(a->ctx), p);
    return mt_cuda_launched(a->ctx, name);
}

/* `rows` x heads x batch are the warps of a kernel without tiles. */
static mt_status mti_plain_launch(const mti_attention *a, const char *name, void (*kernel)(mti_plain), int64_t rows,
                                  int64_t heads, int64_t batch, const mti_plain &p) {
    MT_LAUNCH_KERNEL(kernel, mti_plain_grid(rows, heads, batch), 32 * MTI_PLAIN_WARPS, 0, mt_context_stream(a->ctx), p);
    return mt_cuda_launched(a->ctx, name);
}

template <int SLICES> static mt_status mti_plain_forward(const mti_attention *a, const mti_plain &p) {
    typedef mti_plain_shapes<SLICES> S;
    return mti_plain_launch_tiles<typename S::forward>(a, "mt_attention_forward",
                                                       mti_plain_forward_kernel<typename S::forward>, p.s.seq,
                                                       mti_attention_heads(&p.s), S::forward_bytes, p);
}

template <int SLICES>
static mt_status mti_plain_backward(const mti_attention *a, const char *name, const mti_plain &p) {
    typedef mti_plain_shapes<SLICES> S;
    MT_TRY(mti_plain_launch_tiles<typename S::dq>(a, name, mti_plain_dq_kernel<typename S::dq>, p.s.seq,
                                                  mti_attention_heads(&p.s), S::dq_bytes, p));
    return mti_plain_launch_tiles<typename S::dkv>(a, name, mti_plain_dkv_kernel<typename S::dkv>, p.s.kv_seq,
                                                   p.s.groups, S::dkv_bytes, p);
}

static mt_status mti_plain_run_forward(const mti_attention *a) {
    mti_plain p = mti_plain_of(a);
    MT_TRY(mt_cuda_enter(a->ctx));
    if (p.s.head_dim <= 64) return mti_plain_forward<2>(a, p);
    return p.s.head_dim <= 128 ? mti_plain_forward<4>(a, p) : mti_plain_forward<8>(a, p);
}

/* mt_attention_backward releases the memory of delta when it ends. */
static mt_status mti_plain_run_backward(const mti_attention *a) {
    const mt_attention_desc *s = &a->desc;
    static const char *const name = "mt_attention_backward";
    mti_plain p = mti_plain_of(a);
    int64_t heads = mti_attention_heads(s);
    mt_tensor delta;
    MT_TRY(mt_arena_tensor(a->ctx, MT_F32, heads, s->batch * s->seq, &delta));
    p.delta = mti_view_of(delta);
    MT_TRY(mt_cuda_enter(a->ctx));
    MT_TRY(mti_plain_launch(a, name, mti_plain_stats_kernel, s->seq, heads, s->batch, p));
    MT_TRY(s->head_dim <= 64    ? mti_plain_backward<2>(a, name, p)
           : s->head_dim <= 128 ? mti_plain_backward<4>(a, name, p)
                                : mti_plain_backward<8>(a, name, p));
    if (!s->dbias.data) return MT_SUCCESS;
    return mti_plain_launch(a, name, mti_plain_dbias_kernel, s->seq, s->bias_heads > 1 ? heads : 1, s->bias_batch, p);
}

/* The kernels of attention on a GPU. The first row that fits a call runs it, forward and backward. To add a kernel, add
   a row. `capability` is the compute capability of the GPU, 90 for 9.0. `built_for` is the architecture that nvcc has
   compiled this library's kernels for. A row for kernels of another library need not ask it. */
struct mti_attention_kernels {
    const char *name;
    int (*fits)(const mti_attention *a, int capability, int built_for);
    mt_status (*forward)(const mti_attention *a);
    mt_status (*backward)(const mti_attention *a);
};

#define MTI_FLASH_KERNELS(dim, spans)                                                                                  \
    mti_flash_fits<dim, spans>, mti_flash_run_forward<dim, spans>, mti_flash_run_backward<dim, spans>
static const mti_attention_kernels mti_attention_table[] = {
    {"flash_64", MTI_FLASH_KERNELS(64, false)},
    {"flash_96", MTI_FLASH_KERNELS(96, false)},
    {"flash_128", MTI_FLASH_KERNELS(128, false)},
    {"flash_64_spans", MTI_FLASH_KERNELS(64, true)},
    {"flash_96_spans", MTI_FLASH_KERNELS(96, true)},
    {"flash_128_spans", MTI_FLASH_KERNELS(128, true)},
    {"plain", mti_plain_fits, mti_plain_run_forward, mti_plain_run_backward}};
#undef MTI_FLASH_KERNELS

static const mti_attention_kernels *mti_attention_choose(const mti_attention *a, int capability, int built_for) {
    const mti_attention_kernels *k = mti_attention_table;
    while (!k->fits(a, capability, built_for)) k++;
    return k;
}

static mt_status mti_cuda_attention_limit(mt_context *ctx, const char *field, int64_t value, int most) {
    if (value <= most) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "attention on a GPU: %s is %lld, must be at most %d", field,
                   (long long)value, most);
}

static mt_status mti_cuda_attention_check(mt_context *ctx, const mt_attention_desc *s) {
    MT_TRY(mti_cuda_attention_limit(ctx, "head_dim", s->head_dim, MTI_PLAIN_DIM));
    MT_TRY(mti_cuda_attention_limit(ctx, "groups * heads_per_group", s->groups * s->heads_per_group, 65535));
    return mti_cuda_attention_limit(ctx, "batch", s->batch, 65535);
}

static mt_status mti_cuda_attention(const mti_attention *a, int backward) {
    const mti_attention_kernels *kernels;
    int built_for = 0;
    MT_TRY(mti_cuda_attention_check(a->ctx, &a->desc));
    if (a->desc.batch * a->desc.seq * a->desc.groups == 0) return MT_SUCCESS;
    MT_TRY(mti_built_for(a->ctx, &built_for));
    kernels = mti_attention_choose(a, mt_context_compute_capability(a->ctx), built_for);
    return backward ? kernels->backward(a) : kernels->forward(a);
}

} /* extern "C++" */
#endif

/* ---- >>attention ------------------------------------------------------------------------------------------------- */

/* The least number of items for a thread. */
static int64_t mti_attention_grain(const mt_attention_desc *s, int backward) {
    double rows = backward ? (double)s->seq * (double)s->heads_per_group : (double)mt_min(MTI_QUERIES, s->seq);
    double items = ceil(MTI_GEMM_GRAIN / (rows * (double)s->kv_seq * (double)s->head_dim));
    return backward ? mt_round_up((int64_t)items, mti_dbias_items(s)) : (int64_t)items;
}

/* Attention on a CPU. A meta context allocates the scratch memory as well. */
static mt_status mti_attention_loop(mti_operator *op, mti_attention *a, int backward) {
    const mt_attention_desc *s = &a->desc;
    int64_t items = s->batch * s->groups, grain;
    if (mti_is_empty(a->q)) return MT_SUCCESS;
    grain = mti_attention_grain(s, backward);
    if (!backward) items *= s->heads_per_group * mti_attention_blocks(s);
    a->threads = mt_min(mt_context_threads(a->ctx), (items - 1) / grain + 1);
    MT_TRY(mti_attention_scratch(a, backward));
    if (op->on_cpu)
        mt_parallel_for(a->ctx, items, grain, backward ? mti_cpu_attention_backward : mti_cpu_attention_forward, a);
    return MT_SUCCESS;
}

/* What an operator of attention requires of desc.bias; `use` adds to MT_ARG_IN. */
static mt_arg mti_bias_arg(mt_attention_desc *s) {
    mt_arg arg;
    arg.name = "bias";
    arg.view = &s->bias;
    arg.rows = s->bias_batch * s->bias_heads * s->seq;
    arg.cols = s->kv_seq;
    arg.type = s->bias.dtype == MT_U8 ? MT_ARG_ANY : MT_ARG_FLOAT;
    arg.use = MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS;
    return arg;
}

/* What backward requires of desc.dbias. */
static mt_arg mti_dbias_arg(mt_attention_desc *s) {
    mt_arg arg = mti_bias_arg(s);
    arg.name = "dbias";
    arg.view = &s->dbias;
    arg.type = MT_ARG_F32;
    arg.use = MT_ARG_IN_OUT | MT_ARG_OPTIONAL;
    if (s->bias_heads == 1) arg.use |= MT_ARG_SUM; /* over the heads of this call */
    return arg;
}

/* Refuses a desc.dbias without a bias that has a gradient. */
static mt_status mti_expect_dbias(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    if (!s->dbias.data || (s->bias.data && s->bias.dtype != MT_U8)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc.dbias is given, but desc.bias is %s", where,
                   s->bias.data ? "a boolean mask" : "mt_none()");
}

/* Checks that no output overlaps another tensor. args has `count` tensors, the last `outputs` of which are outputs. */
static mt_status mti_expect_outputs_apart(mt_context *ctx, const char *where, const mt_arg *args, int count,
                                          int outputs) {
    int i, j;
    for (i = count - outputs; i < count; i++)
        for (j = 0; j < i; j++)
            MT_TRY(mt_check_apart(ctx, where, args[i].name, *args[i].view, args[j].name, *args[j].view));
    return MT_SUCCESS;
}

/* Checks desc and writes it to *s without defaults. A fused tensor has as many keys as queries. */
static mt_status mti_attention_desc_check(mt_context *ctx, const char *where, const mt_attention_desc *desc, int fused,
                                          mt_attention_desc *s) {
    MT_TRY(mti_expect_heads(ctx, where, desc));
    *s = mti_attention_defaults(desc);
    if (fused && s->kv_seq != s->seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: kv_seq is %lld, must be 0 or seq %lld in a fused qkv", where,
                       (long long)s->kv_seq, (long long)s->seq);
    return mti_expect_attention(ctx, where, s);
}

/* The sum of `count` numbers from `first` on, each cut to [0, top]. */
static double mti_cut_sum(double first, double count, double top) {
    double below = first < 0 ? (-first < count ? -first : count) : 0, end = first + count - 1 - top;
    double above = end > 0 ? (end < count - below ? end : count - below) : 0, between = count - below - above;
    return between * (first + below) + between * (between - 1) / 2 + above * top;
}

/* The number of scores of a head and a sequence: for the query at position p, the keys from p - window + 1 to p or, in
   both directions, to p + window - 1. */
static double mti_scores(const mt_attention_desc *s) {
    double queries = (double)s->seq, keys = (double)s->kv_seq, first = keys - queries, window = (double)s->window;
    double all = queries * keys;
    if (s->mask == MT_MASK_CAUSAL) all = mti_cut_sum(first + 1, queries, keys);
    else if (s->window > 0) all = mti_cut_sum(first + window, queries, keys);
    return s->window > 0 ? all - mti_cut_sum(first - window + 1, queries, keys) : all;
}

/* Notes the floating-point operations of `products` products for each score. Documents and key padding are in memory
   that a meta context does not have: all keys count. */
static void mti_attention_work(mti_operator *op, const mt_attention_desc *s, int products) {
    if (!op->work.name) return;
    op->work.work = MT_WORK_ATTENTION;
    op->work.flops =
        2.0 * products * mti_scores(s) * (double)s->batch * (double)mti_attention_heads(s) * (double)s->head_dim;
}

/* Notes the numbers of a desc, and its arrays: lengths and documents go with the sequences, slopes with the heads. The
   program may have said of q, the queries, that their scale is meant. */
static mt_status mti_attention_agree(mt_context *ctx, const char *where, const mt_arg *q, mt_tensor t,
                                     const mt_attention_desc *s) {
    const int64_t heads = mti_attention_heads(s), documents = s->cu_seqlens ? s->documents + 1 : 0;
    MT_TRY(mt_check_factor(ctx, where, "the square of desc.scale", q->name, *q->view, MT_SPLIT_COLS,
                           (double)s->scale * (double)s->scale * (double)s->head_dim));
    if (mt_check_mode(ctx) != 2) return MT_SUCCESS;
    mt_check_sequences(ctx, t, s->cu_seqlens ? 0 : s->seq);
    MT_TRY(mti_numbers_agree(ctx, where, "mask", t, 1, 1, (double)s->mask));
    MT_TRY(mti_numbers_agree(ctx, where, "window", t, 1, 1, (double)s->window));
    MT_TRY(mti_numbers_agree(ctx, where, "scale", mt_none(), 1, 1, (double)s->scale));
    MT_TRY(mti_numbers_agree(ctx, where, "lengths", t, 0, 2, (double)(s->lengths != NULL),
                             (double)(s->cu_seqlens != NULL)));
    MT_TRY(mti_numbers_agree(ctx, where, "seq or kv_seq", t, 0, 2, (double)s->seq, (double)s->kv_seq));
    MT_TRY(mti_numbers_agree(ctx, where, "a number of desc", mt_none(), 1, 5, (double)s->softcap, (double)s->head_dim,
                             (double)s->qkv_layout, (double)s->rotary_form, (double)(s->alibi_slopes != NULL)));
    MT_TRY(mt_check_side(ctx, where, "lengths", mt_tensor_make(s->lengths, MT_I32, s->batch, 1), t, MT_SPLIT_ROWS, 1));
    MT_TRY(mt_check_side(ctx, where, "cu_seqlens", mt_tensor_make(s->cu_seqlens, MT_I32, documents, 1), t,
                         MT_SPLIT_ROWS, 1));
    return mt_check_side(ctx, where, "alibi_slopes", mt_tensor_make(s->alibi_slopes, MT_F32, 1, heads), t,
                         MT_SPLIT_COLS, 0);
}

/* As mti_expect_mask, for the dropout of probabilities: sequences are rows and heads are columns. */
static mt_status mti_expect_head_masks(mti_operator *op, const char *where, const mt_arg *q, const char *name,
                                       mt_tensor t, const mt_attention_desc *s) {
    mt_status status = mti_attention_agree(op->ctx, where, q, t, s);
    if (status != MT_SUCCESS) return mti_end(op, status);
    return mti_expect_mask(op, where, name, t, &s->dropout, s->batch, mti_attention_heads(s), 1);
}

MT_API mt_status mt_attention_check(mt_context *ctx, const char *where, const mt_attention_desc *desc) {
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, where, desc, 0, &s));
    mt_arg args[] = {mti_bias_arg(&s), mti_dbias_arg(&s)};
    MT_TRY(mti_expect_dbias(ctx, where, &s));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    return mt_check_apart(ctx, where, "dbias", s.dbias, "bias", s.bias);
}

MT_API mt_status mt_attention_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor out,
                                      mt_tensor lse) {
    static const char *const where = "mt_attention_forward";
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, where, desc, 1, &s));
    const int64_t tokens = s.batch * s.seq, heads = mti_attention_heads(&s);
    mt_arg args[] = {{"qkv", &qkv, tokens, mti_attention_width(&s), MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"out", &out, tokens, heads * s.head_dim, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"lse", &lse, heads, tokens, MT_ARG_F32, MT_ARG_OUT | MT_ARG_OPTIONAL},
                     mti_bias_arg(&s)};
    mti_attention a;
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "out", out, "qkv", qkv));
    MT_TRY(mti_expect_qkv_parts(ctx, where, &s, "qkv", qkv));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_head_masks(&op, where, args, "out", out, &s));
    a = mti_attention_resolve(ctx, &s, out, lse);
    mti_attention_fused(&a, qkv, mt_none());
    mti_attention_work(&op, &s, 2);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_attention(&a, 0), mti_attention_loop(&op, &a, 0)));
}

MT_API mt_status mt_attention_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor out,
                                       mt_tensor lse, mt_tensor dout, mt_tensor dqkv) {
    static const char *const where = "mt_attention_backward";
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, where, desc, 1, &s));
    const int64_t tokens = s.batch * s.seq, heads = mti_attention_heads(&s);
    const int64_t width = mti_attention_width(&s), out_width = heads * s.head_dim;
    mt_arg args[] = {{"qkv", &qkv, tokens, width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     mti_bias_arg(&s),
                     {"lse", &lse, heads, tokens, MT_ARG_F32, MT_ARG_IN},
                     {"out", &out, tokens, out_width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dout", &dout, tokens, out_width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dqkv", &dqkv, tokens, width, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     mti_dbias_arg(&s)};
    mti_attention a;
    mti_operator op;
    MT_TRY(mti_expect_dbias(ctx, where, &s));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "dout", dout, "out", out));
    MT_TRY(mti_expect_outputs_apart(ctx, where, args, MTI_COUNT(args), 2));
    MT_TRY(mti_expect_qkv_parts(ctx, where, &s, "qkv", qkv));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_head_masks(&op, where, args, "dqkv", dqkv, &s));
    a = mti_attention_resolve(ctx, &s, out, lse);
    a.dout = dout;
    mti_attention_fused(&a, qkv, dqkv);
    mti_attention_work(&op, &s, 4);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_attention(&a, 1), mti_attention_loop(&op, &a, 1)));
}

MT_API mt_status mt_dot_product_attention_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor q,
                                                  mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse) {
    static const char *const where = "mt_dot_product_attention_forward";
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, where, desc, 0, &s));
    const int64_t heads = mti_attention_heads(&s), tokens = s.batch * s.seq, width = heads * s.head_dim;
    const int64_t keys = s.batch * s.kv_seq, kv_width = s.groups * s.head_dim;
    mt_arg args[] = {{"q", &q, tokens, width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"k", &k, keys, kv_width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"v", &v, keys, kv_width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"out", &out, tokens, width, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"lse", &lse, heads, tokens, MT_ARG_F32, MT_ARG_OUT | MT_ARG_OPTIONAL},
                     mti_bias_arg(&s)};
    mti_attention a;
    mti_operator op;
    int i;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    for (i = 0; i < 3; i++) MT_TRY(mt_check_apart(ctx, where, "out", out, args[i].name, *args[i].view));
    MT_TRY(mti_begin_with(&op, ctx, where, mti_dot_product_rule(&s, 0), args, MTI_COUNT(args)));
    MT_TRY(mti_expect_head_masks(&op, where, args, "out", out, &s));
    a = mti_attention_resolve(ctx, &s, out, lse);
    a.q = q, a.k = k, a.v = v;
    mti_attention_work(&op, &s, 2);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_attention(&a, 0), mti_attention_loop(&op, &a, 0)));
}

MT_API mt_status mt_dot_product_attention_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor q,
                                                   mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse,
                                                   mt_tensor dout, mt_tensor dq, mt_tensor dk, mt_tensor dv) {
    static const char *const where = "mt_dot_product_attention_backward";
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, where, desc, 0, &s));
    const int64_t heads = mti_attention_heads(&s), tokens = s.batch * s.seq, width = heads * s.head_dim;
    const int64_t keys = s.batch * s.kv_seq, kv_width = s.groups * s.head_dim;
    mt_arg args[] = {{"q", &q, tokens, width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"k", &k, keys, kv_width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"v", &v, keys, kv_width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     mti_bias_arg(&s),
                     {"lse", &lse, heads, tokens, MT_ARG_F32, MT_ARG_IN},
                     {"out", &out, tokens, width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dout", &dout, tokens, width, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dq", &dq, tokens, width, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"dk", &dk, keys, kv_width, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"dv", &dv, keys, kv_width, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     mti_dbias_arg(&s)};
    mti_attention a;
    mti_operator op;
    MT_TRY(mti_expect_dbias(ctx, where, &s));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_outputs_apart(ctx, where, args, MTI_COUNT(args), 4));
    MT_TRY(mti_begin_with(&op, ctx, where, mti_dot_product_rule(&s, 1), args, MTI_COUNT(args)));
    MT_TRY(mti_expect_head_masks(&op, where, args, "dq", dq, &s));
    a = mti_attention_resolve(ctx, &s, out, lse);
    a.q = q, a.k = k, a.v = v;
    a.dout = dout;
    a.dq = dq, a.dk = dk, a.dv = dv;
    mti_attention_work(&op, &s, 4);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_attention(&a, 1), mti_attention_loop(&op, &a, 1)));
}

/* The slope of head h, see mt_alibi_slopes. */
static float mti_alibi_slope(int64_t heads, int64_t h) {
    int64_t power = 1;
    while (2 * power <= heads) power *= 2;
    if (h < power) return (float)pow(2.0, -8.0 * (double)(h + 1) / (double)power);
    return (float)pow(2.0, -8.0 * (double)(2 * (h - power) + 1) / (double)(2 * power));
}

MT_API mt_status mt_alibi_slopes(mt_context *ctx, int64_t heads, int64_t first_head, mt_tensor slopes) {
    float host[64];
    int64_t n = slopes.cols, i, j;
    MT_TRY(mt_tensor_check(ctx, "mt_alibi_slopes", "slopes", slopes, MT_ARG_F32, 1, n));
    MT_TRY(mt_check_integer(ctx, "mt_alibi_slopes", NULL, "heads", heads, 1, INT_MAX));
    MT_TRY(mt_check_integer(ctx, "mt_alibi_slopes", NULL, "first_head", first_head, 0, INT64_MAX));
    if (n > heads || first_head > heads - n)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_alibi_slopes: there are %lld heads, not %lld from head %lld on",
                       (long long)heads, (long long)n, (long long)first_head);
    for (i = 0; i < n; i += 64) {
        int64_t count = mt_min(64, n - i);
        for (j = 0; j < count; j++) host[j] = mti_alibi_slope(heads, first_head + i + j);
        MT_TRY(mt_upload(ctx, host, mt_tensor_cols(slopes, i, count)));
    }
    mti_made(ctx, slopes, 2, (double)heads, (double)first_head);
    return MT_SUCCESS;
}

/* ---- >>rotary ---------------------------------------------------------------------------------------------------- */

/* The number of features of a head that are rotated. */
static int64_t mti_rotary_dim(const mt_attention_desc *s) { return s->rotary_dim ? s->rotary_dim : s->head_dim; }

static mt_status mti_expect_even(mt_context *ctx, const char *where, const char *name, int64_t features) {
    if (features % 2 == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s is %lld, must be even", where, name, (long long)features);
}

static mt_status mti_expect_rotary(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    MT_TRY(mt_check_enum(ctx, where, NULL, "rotary_form", (int)s->rotary_form, MT_ROTARY_FORM_WORDS));
    MT_TRY(mt_check_size(ctx, where, NULL, "rotary_dim", s->rotary_dim, 0, s->head_dim));
    return mti_expect_even(ctx, where, s->rotary_dim ? "rotary_dim" : "head_dim", mti_rotary_dim(s));
}

typedef struct mti_rotary_angles {
    float base;
    mt_tensor table;
} mti_rotary_angles;

static void mti_cpu_rotary_table(void *data, int thread, int64_t first, int64_t last) {
    const mti_rotary_angles *a = (const mti_rotary_angles *)data;
    int64_t i, j, half = a->table.cols / 2;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < half; j++) {
            double angle = (double)i * pow((double)a->base, -2.0 * (double)j / (double)a->table.cols);
            mti_row(a->table, i)[j] = (float)cos(angle);
            mti_row(a->table, i)[half + j] = (float)sin(angle);
        }
}

/* Rotates the features j * step and j * step + apart of a head by angle j of table, for j < half. With sign -1, it
   rotates them back. */
MT_INLINE void mti_rotary_head(float *x, const float *table, float sign, int64_t half, int64_t step, int64_t apart) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < half; j++) {
        float low = x[j * step], high = x[j * step + apart], c = table[j], s = sign * table[half + j];
        x[j * step] = low * c - high * s;
        x[j * step + apart] = high * c + low * s;
    }
}

typedef struct mti_turns {
    const mt_attention_desc *desc;
    mt_tensor table;
    float sign;
    mt_tensor qkv;
    mt_tensor rooms; /* the queries and the key of a group for each thread, if qkv has a 16-bit type */
} mti_turns;

/* The columns of the queries and the key of a group. */
static int64_t mti_turned(const mt_attention_desc *s) { return (s->heads_per_group + 1) * s->head_dim; }

static void mti_cpu_rotary(void *data, int thread, int64_t first, int64_t last) {
    const mti_turns *r = (const mti_turns *)data;
    const mt_attention_desc *desc = r->desc;
    int64_t i, g, j, half = r->table.cols / 2, turned = mti_turned(desc);
    for (i = first; i < last; i++) {
        const float *angles = mti_row(r->table, mti_document_position(desc, i / desc->seq, i % desc->seq));
        for (g = 0; g < desc->groups; g++) {
            int64_t col = g * (turned + desc->head_dim);
            mt_tensor heads = mti_f32_read(r->qkv, i, 1, col, turned, mti_row(r->rooms, thread));
            for (j = 0; j < turned; j += desc->head_dim) {
                float *x = mti_row(heads, 0) + j;
                /* constant steps let a compiler make a fast loop of each form */
                if (desc->rotary_form == MT_ROTARY_PAIRS) mti_rotary_head(x, angles, r->sign, half, 2, 1);
                else mti_rotary_head(x, angles, r->sign, half, 1, half);
            }
            mti_f32_write(heads, r->qkv, i, col);
        }
    }
}

static mt_status mti_rotary_loop(mti_operator *op, mti_turns *r) {
    MT_TRY(mti_rooms(op, r->qkv.dtype != MT_F32, mti_turned(r->desc), &r->rooms));
    if (op->on_cpu) mti_cpu_rows(op->ctx, r->qkv.rows, r->qkv.cols, mti_cpu_rotary, r);
    return MT_SUCCESS;
}

#if MT_HAS_CUDA
extern "C++" {

/* Rotates the two vectors of mti_rotary_op, `low` and then `high`, by MTI_VECTOR angles. */
template <bool PAIRS>
static __device__ __forceinline__ void mti_rotary_turn(float *both, const float *cosine, const float *sine,
                                                       float sign) {
    MT_DEVICE_UNROLL
    for (int e = 0; e < MTI_VECTOR; e++) {
        int a = PAIRS ? 2 * e : e, b = PAIRS ? 2 * e + 1 : MTI_VECTOR + e;
        float x = both[a], y = both[b], t = sign * sine[e];
        both[a] = x * cosine[e] - y * t;
        both[b] = y * cosine[e] + x * t;
    }
}

/* Rotates two vectors, `low` and `high`, of a query or key. With PAIRS they are neighbours, which hold whole pairs.
   Otherwise they are a vector of the first half and the same vector of the second half. `row` is the token, and col /
   MTI_VECTOR the number of the vector of angles among those of all queries and keys. TYPE is the type of qkv. The
   table is then f32, and all vectors are whole. */
template <int TYPE, bool PAIRS> struct mti_rotary_op {
    struct input {
        mti_fetched<TYPE == MTI_ANY_TYPE ? MTI_ANY_TYPE : MT_F32> cosine, sine;
        mti_fetched<TYPE> low, high;
    };
    /* The first angle, the columns of the two vectors, and the numbers of angles and of elements of the vectors. */
    struct place {
        int64_t angle, low, high;
        int angles, in_low, in_high;
    };
    mti_view qkv, table;
    int64_t head_dim, half;
    mti_divider vectors, turned, seq; /* vectors of a half, queries and keys of a group, tokens of a sequence */
    float sign;
    __device__ place at(int64_t col) const {
        int64_t i = col / MTI_VECTOR, head = mti_divide_by(i, vectors), group = mti_divide_by(head, turned);
        place p;
        p.angle = (i - head * vectors.by) * MTI_VECTOR;
        /* Typed vectors are whole. In f32, ptxas for sm_120 spills a register if it knows that. */
        p.angles = mti_fetched<TYPE>::size == 2 ? MTI_VECTOR : mti_vector_size(half, p.angle);
        /* adding `group` skips the values of earlier groups */
        p.low = (head + group) * head_dim + (PAIRS ? 2 * p.angle : p.angle);
        p.high = p.low + (PAIRS ? MTI_VECTOR : half);
        p.in_low = PAIRS ? mti_vector_size(2 * p.angles, 0) : p.angles;
        p.in_high = PAIRS ? 2 * p.angles - p.in_low : p.angles;
        return p;
    }
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int, input &in) const {
        fetch_at<WIDE>(row, row - mti_divide_by(row, seq) * seq.by, col, in);
    }
    template <bool WIDE> __device__ void fetch_at(int64_t row, int64_t position, int64_t col, input &in) const {
        place p = at(col);
        mti_fetch<WIDE>(qkv, row, p.low, p.in_low, in.low);
        mti_fetch<WIDE>(qkv, row, p.high, p.in_high, in.high);
        mti_fetch<WIDE>(table, position, p.angle, p.angles, in.cosine);
        mti_fetch<WIDE>(table, position, half + p.angle, p.angles, in.sine);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int, const input &in) const {
        float both[2 * MTI_VECTOR], cosine[MTI_VECTOR], sine[MTI_VECTOR];
        place p = at(col);
        mti_values(in.low, both);
        mti_values(in.high, both + MTI_VECTOR);
        mti_values(in.cosine, cosine);
        mti_values(in.sine, sine);
        mti_rotary_turn<PAIRS>(both, cosine, sine, sign);
        mti_store<WIDE, TYPE>(qkv, row, p.low, p.in_low, both);
        mti_store<WIDE, TYPE>(qkv, row, p.high, p.in_high, both + MTI_VECTOR);
    }
};

/* mti_rotary_op for packed documents. A kernel of its own keeps the search out of the kernel for sequences. */
template <int TYPE, bool PAIRS> struct mti_rotary_documents_op {
    typedef typename mti_rotary_op<TYPE, PAIRS>::input input;
    mti_rotary_op<TYPE, PAIRS> op;
    mt_attention_desc s;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int, input &in) const {
        int64_t b = mti_divide_by(row, op.seq);
        op.template fetch_at<WIDE>(row, mti_document_position(&s, b, row - b * op.seq.by), col, in);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        op.template finish<WIDE>(row, col, n, in);
    }
};

/* table = cosines and sines. A thread owns every (grid size)-th pair of a cosine and a sine, and computes it in double.
   The kernel uses no shared memory and no barrier. */
static __global__ void __launch_bounds__(256)
    mti_rotary_table_kernel(mti_view table, int64_t rows, int64_t half, double base) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < rows * half; i += step) {
        int64_t row = i / half, j = i % half;
        double angle = (double)row * pow(base, -2.0 * (double)j / (double)(2 * half));
        mti_put(table, row, j, (float)cos(angle));
        mti_put(table, row, half + j, (float)sin(angle));
    }
}

static mt_status mti_cuda_rotary_table(mt_context *ctx, float base, mt_tensor table) {
    int64_t items = table.rows * (table.cols / 2);
    if (items == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_rotary_table_kernel, mti_grid(items, 256), 256, 0, mt_context_stream(ctx), mti_view_of(table),
                     table.rows, table.cols / 2, (double)base);
    return mt_cuda_launched(ctx, "mt_rotary_table");
}

static mt_status mti_cuda_rotary(mt_context *ctx, const mt_attention_desc *s, mt_tensor table, float sign,
                                 mt_tensor qkv) {
    int64_t half = table.cols / 2, vectors = (half + MTI_VECTOR - 1) / MTI_VECTOR, turned = s->heads_per_group + 1;
    int64_t items = s->groups * turned * vectors;
    mti_access how = mti_access_of(qkv);
    if (half % MTI_VECTOR != 0 || s->head_dim % MTI_VECTOR != 0 || !mti_is_wide(table)) how.wide = 0;
    if (!how.wide || table.dtype != MT_F32) how.type = MTI_ANY_TYPE;
    if (qkv.rows * items == 0) return MT_SUCCESS;
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<2>(s->rotary_form == MT_ROTARY_PAIRS, [&](auto pairs) {
            mti_rotary_op<type.value, pairs.value != 0> op = {mti_view_of(qkv),
                                                              mti_view_of(table),
                                                              s->head_dim,
                                                              half,
                                                              mti_divider_of(vectors, items),
                                                              mti_divider_of(turned, items),
                                                              mti_divider_of(s->seq, qkv.rows),
                                                              sign};
            if (!s->cu_seqlens)
                return mti_map_ahead<type.value, 1>(ctx, "mt_rotary", op, how.wide, qkv.rows, items * MTI_VECTOR);
            mti_rotary_documents_op<type.value, pairs.value != 0> of_documents = {op, *s};
            return mti_map_ahead<type.value, 1>(ctx, "mt_rotary", of_documents, how.wide, qkv.rows, items * MTI_VECTOR);
        });
    });
}

} /* extern "C++" */
#endif

MT_API mt_status mt_rotary_table(mt_context *ctx, float base, mt_tensor table) {
    mt_arg args[] = {{"table", &table, table.rows, table.cols, MT_ARG_FLOAT, MT_ARG_OUT}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_rotary_table", args, MTI_COUNT(args)));
    MT_TRY(mti_expect_even(ctx, "mt_rotary_table", "the number of columns", table.cols));
    MT_TRY(mt_check_float(ctx, "mt_rotary_table", NULL, "base", base, MT_FLOAT_ABOVE_0));
    MT_TRY(mti_begin(&op, ctx, "mt_rotary_table", args, MTI_COUNT(args)));
    mti_made(ctx, table, 1, (double)base);
    mti_rotary_angles a = {base, table};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_rotary_table(ctx, base, table),
                                mti_cpu_rows(ctx, table.rows, table.cols, mti_cpu_rotary_table, &a)));
}

static mt_status mti_rotary(mt_context *ctx, const char *where, const mt_attention_desc *desc, mt_tensor table,
                            float sign, const char *name, mt_tensor qkv) {
    MT_TRY(mti_expect_heads(ctx, where, desc));
    MT_TRY(mti_expect_rotary(ctx, where, desc));
    mt_arg args[] = {
        {name, &qkv, desc->batch * desc->seq, mti_attention_width(desc), MT_ARG_FLOAT, MT_ARG_IN_OUT | MTI_AS_IS},
        {"table", &table, desc->seq, mti_rotary_dim(desc), MT_ARG_FLOAT, MT_ARG_IN}};
    mt_attention_desc s = mti_attention_defaults(desc);
    /* turns the first features of queries and keys */
    const double turned = (double)mti_rotary_dim(desc) * (double)(s.groups * (s.heads_per_group + 1));
    const double bytes = 2.0 * (double)qkv.rows * turned * (double)mt_dtype_size(qkv.dtype) + mti_view_bytes(table);
    mti_operator op;
    MT_TRY(mti_expect_documents(ctx, where, &s));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_qkv_parts(ctx, where, desc, name, qkv));
    MT_TRY(mti_begin_with(&op, ctx, where, desc->batch == 1 ? &mti_rotary_rules[sign < 0.0f] : NULL, args,
                          MTI_COUNT(args)));
    op.work.bytes = bytes;
    if (s.qkv_layout != MT_QKV_PER_GROUP) { /* one group, in which all queries and keys but the last are "queries" */
        s.heads_per_group = s.groups * (s.heads_per_group + 1) - 1;
        s.groups = 1;
    }
    mti_turns r = {&s, table, sign, qkv, mt_none()};
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_rotary(ctx, &s, table, sign, qkv), mti_rotary_loop(&op, &r)));
}

MT_API mt_status mt_rotary_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv) {
    return mti_rotary(ctx, "mt_rotary_forward", desc, table, 1.0f, "qkv", qkv);
}

MT_API mt_status mt_rotary_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor dqkv) {
    return mti_rotary(ctx, "mt_rotary_backward", desc, table, -1.0f, "dqkv", dqkv);
}

/* ---- >>kv-cache: the keys and values of earlier tokens ----------------------------------------------------------- */

/* One call of an operator of this section. */
typedef struct mti_kv {
    mt_context *ctx;
    mt_attention_desc desc; /* without defaults */
    mt_kv_cache cache;
    mt_tensor qkv, table, out; /* table: of append, optional. out: of attention */
    mti_qkv_cols cols;         /* of qkv */
} mti_kv;

/* The number of new tokens of sequence b. */
MT_INLINE MT_HOST_DEVICE int64_t mti_kv_new(const mt_attention_desc *s, int64_t b) {
    return s->lengths ? s->lengths[b] : s->seq;
}

/* The row of keys and values for position 0. */
MT_INLINE MT_HOST_DEVICE int64_t mti_kv_row(const mti_kv *k, int64_t b, int64_t g) {
    return (b * k->desc.groups + g) * k->cache.max_seq;
}

/* Refuses the options of attention that have no meaning for a cache. */
static mt_status mti_kv_expect_options(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    const char *field = NULL;
    MT_TRY(mt_check_enum(ctx, where, NULL, "mask", (int)s->mask, MT_MASK_WORDS));
    if (s->mask != MT_MASK_CAUSAL) field = "a mask other than MT_MASK_CAUSAL";
    if (s->dropout.p != 0.0f) field = "dropout";
    if (s->kv_seq != 0) field = "kv_seq";
    if (s->cu_seqlens || s->documents != 0) field = "cu_seqlens";
    if (s->bias.data || s->dbias.data) field = "a bias";
    if (!field) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: %s cannot be used with a key/value cache", where, field);
}

/* Checks the fields of the cache that all operators of this section read. */
static mt_status mti_kv_expect_cache(mt_context *ctx, const char *where, const mt_kv_cache *cache, int64_t batch) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!cache) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: cache is NULL", where);
    MT_TRY(mt_check_size(ctx, where, "cache", "max_seq", cache->max_seq, 1, INT_MAX));
    return mti_expect_pointer(ctx, where, "cache.lengths", cache->lengths, batch);
}

/* Checks the keys and values, except their shapes. */
static mt_status mti_kv_expect_views(mt_context *ctx, const char *where, const mt_attention_desc *s,
                                     const mt_kv_cache *cache, mt_dtype dtype) {
    if (mt_size_mul(mt_size_mul(mt_size_mul(s->batch, s->groups), cache->max_seq), s->head_dim) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: a cache of %lld sequences, %lld groups and %lld positions is too large",
                       where, (long long)s->batch, (long long)s->groups, (long long)cache->max_seq);
    if (cache->keys.dtype != dtype || cache->values.dtype != dtype)
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: keys are %s and values %s, both must be %s, as qkv is", where,
                       mt_dtype_name(cache->keys.dtype), mt_dtype_name(cache->values.dtype), mt_dtype_name(dtype));
    if (mt_tensor_ld(cache->keys) == s->head_dim && mt_tensor_ld(cache->values) == s->head_dim) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: the ld of keys is %lld and that of values %lld, both must be head_dim %lld",
                   where, (long long)mt_tensor_ld(cache->keys), (long long)mt_tensor_ld(cache->values),
                   (long long)s->head_dim);
}

/* Checks the numbers of tokens. */
static mt_status mti_kv_expect_lengths(const mti_kv *k, const char *where) {
    int64_t b, most = k->cache.max_seq;
    if (mt_context_device(k->ctx) != MT_DEVICE_CPU) return MT_SUCCESS;
    MT_TRY(mti_expect_lengths(k->ctx, where, &k->desc));
    for (b = 0; b < k->desc.batch; b++) {
        int64_t held = k->cache.lengths[b], added = mti_kv_new(&k->desc, b);
        if (held < 0 || held > most)
            return mt_fail(k->ctx, MT_ERR_DATA, "%s: cache.lengths[%lld] is %lld, must be in [0, %lld]", where,
                           (long long)b, (long long)held, (long long)most);
        if (held + added > most)
            return mt_fail(k->ctx, MT_ERR_DATA,
                           "%s: sequence %lld has %lld tokens and gets %lld more; the cache has room for %lld", where,
                           (long long)b, (long long)held, (long long)added, (long long)most);
    }
    return MT_SUCCESS;
}

/* Checks desc and the fields of the cache, and fills k with them. */
static mt_status mti_kv_fill(mt_context *ctx, const char *where, const mt_attention_desc *desc,
                             const mt_kv_cache *cache, mti_kv *k) {
    MT_TRY(mti_expect_heads(ctx, where, desc));
    MT_TRY(mti_kv_expect_options(ctx, where, desc));
    MT_TRY(mti_kv_expect_cache(ctx, where, cache, desc->batch));
    memset(k, 0, sizeof *k);
    k->ctx = ctx;
    k->desc = mti_attention_defaults(desc);
    k->desc.window = mt_min(desc->window, cache->max_seq); /* a larger one hides nothing, and could overflow */
    k->cache = *cache;
    k->cols = mti_qkv_cols_of(desc);
    return mti_expect_scores(ctx, where, &k->desc);
}

/* The same for an operator, which checks the views with its table of arguments. */
static mt_status mti_kv_check(mt_context *ctx, const char *where, const mt_attention_desc *desc, mt_tensor qkv,
                              const mt_kv_cache *cache, mti_kv *k) {
    MT_TRY(mti_kv_fill(ctx, where, desc, cache, k));
    k->qkv = qkv;
    return mti_kv_expect_views(ctx, where, desc, cache, qkv.dtype);
}

MT_API mt_status mt_kv_cache_check(mt_context *ctx, const char *where, const mt_attention_desc *desc,
                                   const mt_kv_cache *cache) {
    mti_kv k;
    MT_TRY(mti_kv_fill(ctx, where, desc, cache, &k));
    return mti_kv_expect_lengths(&k, where);
}

/* Turns a head of a token in place. */
static void mti_kv_turn(const mti_kv *k, const float *angles, float *x) {
    int64_t half = k->table.cols / 2;
    if (!k->table.data) return;
    if (k->desc.rotary_form == MT_ROTARY_PAIRS) mti_rotary_head(x, angles, 1.0f, half, 2, 1);
    else mti_rotary_head(x, angles, 1.0f, half, 1, half);
}

/* Rounds a row of head_dim numbers to the type of t, and stores it in row `row` of t. */
static void mti_kv_store(mt_tensor t, int64_t row, const float *x) {
    if (t.dtype == MT_F32) memcpy(mti_row(t, row), x, (size_t)t.cols * sizeof *x);
    else mt_f32_to_16bit(t.dtype, x, mti_row16(t, row), t.cols);
}

/* Adds token i of sequence b. */
static void mti_kv_append_token(const mti_kv *k, int64_t b, int64_t i) {
    const mt_attention_desc *s = &k->desc;
    int64_t position = k->cache.lengths[b] + i, g, j;
    const float *angles = mti_row(k->table, position);
    float *x = mti_row(k->qkv, b * s->seq + i);
    for (g = 0; g < s->groups; g++) {
        float *key = x + k->cols.key + g * k->cols.kv_step;
        int64_t row = mti_kv_row(k, b, g) + position;
        for (j = 0; j < s->heads_per_group; j++) mti_kv_turn(k, angles, x + g * k->cols.q_step + j * s->head_dim);
        mti_kv_turn(k, angles, key);
        mti_kv_store(k->cache.keys, row, key);
        mti_kv_store(k->cache.values, row, key + k->cols.value);
    }
}

/* Adds tokens [first, last) of all sequences, of which each has desc.seq. */
static void mti_cpu_kv_cache_append(void *data, int thread, int64_t first, int64_t last) {
    const mti_kv *k = (const mti_kv *)data;
    int64_t t, seq = k->desc.seq;
    (void)thread;
    for (t = first; t < last; t++)
        if (t % seq < mti_kv_new(&k->desc, t / seq)) mti_kv_append_token(k, t / seq, t % seq);
}

/* A call of attention whose keys and values are not views: each sequence has its own number of them. */
static mti_attention mti_kv_resolve(const mti_kv *k) {
    mti_attention a = mti_attention_resolve(k->ctx, &k->desc, k->out, mt_none());
    a.q = k->qkv;
    a.k = k->cache.keys;
    a.v = k->cache.values;
    a.q_step = k->cols.q_step;
    a.desc.kv_seq = k->cache.max_seq;
    a.desc.lengths = NULL;
    return a;
}

/* Packs the keys and values of a group of sequence b, as mti_attention_pack does. */
static void mti_kv_pack(const mti_kv *k, const mti_attention *a, int64_t b, int64_t g) {
    int64_t n = a->desc.kv_seq, row = mti_kv_row(k, b, g);
    mti_pack_features(a, a->k, row, 0, n, a->k_features);
    mti_pack_rows(a, a->v, row, 0, n, n, a->v_keys);
}

/* The attention of the queries of a group, in blocks of scores. */
static void mti_kv_blocks_group(const mti_kv *k, const mti_attention *a, int64_t b, int64_t g) {
    int64_t j;
    mti_kv_pack(k, a, b, g);
    for (j = 0; j < a->desc.heads_per_group; j++) {
        mti_head h = mti_attention_head(a, b, g, j);
        h.query = b * k->desc.seq;
        mti_attention_forward_head(a, &h);
    }
}

/* Attention with few queries reads MTI_KV_KEYS keys at a time, then their values. All queries of a group use them while
   they are in L1. */
#define MTI_KV_KEYS 256

/* The scratch memory of attention with few queries, of a thread or of all threads, one after the other. The rows of q,
   out and block have `width` floats: head_dim, rounded up to whole vectors, with zeros after head_dim. */
typedef struct mti_kv_few {
    int64_t width;
    float *q, *out; /* [MT_KV_DECODE_QUERIES, width]: token by token, each with its heads of the group */
    float *scores;  /* [MT_KV_DECODE_QUERIES, MTI_KV_KEYS] */
    float *block;   /* [MTI_KV_KEYS, width]: keys or values that cannot be read in place */
    mti_softmax softmax;
} mti_kv_few;

/* Memory that is read next, `rows` rows of `bytes` bytes: while the loops compute a row, they prefetch one of these.
   Without it, a processor waits at each change between keys and values. */
typedef struct mti_kv_ahead {
    const char *next;
    int64_t rows, bytes;
} mti_kv_ahead;

/* Prefetches rows [first, first + count), or those of them that there are. */
MT_INLINE void mti_kv_prefetch(mti_kv_ahead ahead, int64_t first, int64_t count) {
    int64_t at = first * ahead.bytes, end = mt_min(first + count, ahead.rows) * ahead.bytes;
    for (; at < end; at += 64) MTI_PREFETCH(ahead.next + at);
}

static mti_kv_ahead mti_kv_ahead_of(mt_tensor t, int64_t row, int64_t rows) {
    mti_kv_ahead ahead;
    ahead.rows = rows;
    ahead.bytes = t.cols * (int64_t)mt_dtype_size(t.dtype);
    ahead.next = (const char *)t.data + row * ahead.bytes;
    return ahead;
}

/* Keys or values as the loops below read them: rows of mti_kv_few.width numbers, one after the other, in f32 or
   bf16. */
typedef struct mti_kv_block {
    const char *data;
    int is_bf16;
} mti_kv_block;

#if (defined(__clang__) || defined(__GNUC__)) && !defined(__CUDACC__)
#if defined(__clang__) || __GNUC__ >= 9
#define MTI_KV_BF16 1
typedef uint16_t mti_simd_half __attribute__((vector_size(2 * MTI_SIMD)));
typedef uint32_t mti_simd_word __attribute__((vector_size(4 * MTI_SIMD)));
#endif

/* Loads MTI_SIMD numbers from number `at` on. */
MT_INLINE mti_simd mti_kv_vector(int is_bf16, const char *data, int64_t at) {
    mti_simd x;
#ifdef MTI_KV_BF16
    if (is_bf16) {
        mti_simd_half half;
        mti_simd_word word;
        memcpy(&half, data + 2 * at, sizeof half);
        word = __builtin_convertvector(half, mti_simd_word) << 16;
        memcpy(&x, &word, sizeof x);
        return x;
    }
#endif
    (void)is_bf16;
    memcpy(&x, data + 4 * at, sizeof x);
    return x;
}

/* The sum of x in four parts: lane l of the result has the lanes l, l + 4, l + 8, ... of x. */
MT_INLINE mti_float4 mti_kv_fold(mti_simd x) {
    mti_float4 part[MTI_SIMD / 4];
    memcpy(part, &x, sizeof x);
#if MTI_SIMD == 16
    return (part[0] + part[2]) + (part[1] + part[3]);
#elif MTI_SIMD == 8
    return part[0] + part[1];
#else
    return part[0];
#endif
}

/* out[i] = scale * q k for four keys k, which begin at the numbers at[i] of the block. */
MT_INLINE void mti_kv_dot4(int is_bf16, const float *q, const char *keys, const int64_t at[4], int64_t width,
                           float scale, float *out) {
    mti_simd s[4], x, zero = {0};
    mti_float4 f[4], ab, cd;
    int64_t d;
    int i;
    MTI_UNROLL
    for (i = 0; i < 4; i++) s[i] = zero;
    for (d = 0; d < width; d += MTI_SIMD) {
        memcpy(&x, q + d, sizeof x);
        MTI_UNROLL
        for (i = 0; i < 4; i++) s[i] += x * mti_kv_vector(is_bf16, keys, at[i] + d);
    }
    MTI_UNROLL
    for (i = 0; i < 4; i++) f[i] = mti_kv_fold(s[i]);
    ab = MTI_SHUFFLE(f[0], f[1], 0, 4, 1, 5) + MTI_SHUFFLE(f[0], f[1], 2, 6, 3, 7);
    cd = MTI_SHUFFLE(f[2], f[3], 0, 4, 1, 5) + MTI_SHUFFLE(f[2], f[3], 2, 6, 3, 7);
    ab = (MTI_SHUFFLE(ab, cd, 0, 1, 4, 5) + MTI_SHUFFLE(ab, cd, 2, 3, 6, 7)) * scale;
    memcpy(out, &ab, sizeof ab);
}

/* out[r] += the sum of p[r][j] values[j] over n values, for `rows` rows of out and p, and MTI_NR features from d on. */
MT_INLINE void mti_kv_sum_tile(int rows, int is_bf16, const float *p, const char *values, int64_t width, int64_t d,
                               int64_t n, mti_kv_ahead ahead, float *out) {
    mti_simd s[4][2], x, y;
    int64_t j;
    int r;
    MTI_UNROLL
    for (r = 0; r < rows; r++) memcpy(s[r], out + r * width + d, sizeof s[r]);
    for (j = 0; j < n; j++) {
        mti_kv_prefetch(ahead, j, 1);
        x = mti_kv_vector(is_bf16, values, j * width + d);
        y = mti_kv_vector(is_bf16, values, j * width + d + MTI_SIMD);
        MTI_UNROLL
        for (r = 0; r < rows; r++) {
            s[r][0] += p[r * MTI_KV_KEYS + j] * x;
            s[r][1] += p[r * MTI_KV_KEYS + j] * y;
        }
    }
    MTI_UNROLL
    for (r = 0; r < rows; r++) memcpy(out + r * width + d, s[r], sizeof s[r]);
}
#else
MT_INLINE void mti_kv_dot4(int is_bf16, const float *q, const char *keys, const int64_t at[4], int64_t width,
                           float scale, float *out) {
    int i;
    (void)is_bf16;
    for (i = 0; i < 4; i++) out[i] = scale * mti_row_dot(q, (const float *)(const void *)keys + at[i], width);
}

MT_INLINE void mti_kv_sum_tile(int rows, int is_bf16, const float *p, const char *values, int64_t width, int64_t d,
                               int64_t n, mti_kv_ahead ahead, float *out) {
    const float *v = (const float *)(const void *)values + d;
    int64_t r, j, i;
    (void)is_bf16, (void)ahead;
    for (r = 0; r < rows; r++)
        for (j = 0; j < n; j++)
            for (i = 0; i < MTI_NR; i++) out[r * width + d + i] += p[r * MTI_KV_KEYS + j] * v[j * width + i];
}
#endif

/* out[j] = scale * q keys[j] for n keys. Writes up to three more numbers. */
MT_INLINE void mti_kv_scores_of(int is_bf16, const float *q, const char *keys, int64_t width, int64_t n, float scale,
                                mti_kv_ahead ahead, float *out) {
    int64_t j, i, at[4];
    for (j = 0; j < n; j += 4) {
        mti_kv_prefetch(ahead, j, 4);
        for (i = 0; i < 4; i++) at[i] = mt_min(j + i, n - 1) * width;
        mti_kv_dot4(is_bf16, q, keys, at, width, scale, out + j);
    }
}

static void mti_kv_scores(const float *q, mti_kv_block keys, int64_t width, int64_t n, float scale, mti_kv_ahead ahead,
                          float *out) {
    if (keys.is_bf16) mti_kv_scores_of(1, q, keys.data, width, n, scale, ahead, out);
    else mti_kv_scores_of(0, q, keys.data, width, n, scale, ahead, out);
}

/* out += p values, for `rows` <= 4 rows of p and n values. */
MT_INLINE void mti_kv_sums_of(int64_t rows, int is_bf16, const float *p, const char *values, int64_t width, int64_t n,
                              mti_kv_ahead ahead, float *out) {
    int64_t d;
    for (d = 0; d < width; d += MTI_NR, ahead.rows = 0) {
        if (rows == 1) mti_kv_sum_tile(1, is_bf16, p, values, width, d, n, ahead, out);
        else if (rows == 2) mti_kv_sum_tile(2, is_bf16, p, values, width, d, n, ahead, out);
        else if (rows == 3) mti_kv_sum_tile(3, is_bf16, p, values, width, d, n, ahead, out);
        else mti_kv_sum_tile(4, is_bf16, p, values, width, d, n, ahead, out);
    }
}

/* out += p values, for `rows` rows of p and n values. */
static void mti_kv_sums(int64_t rows, const float *p, mti_kv_block values, int64_t width, int64_t n, mti_kv_ahead ahead,
                        float *out) {
    int64_t r;
    for (r = 0; r < rows; r += 4, ahead.rows = 0) {
        const float *of = p + r * MTI_KV_KEYS;
        float *to = out + r * width;
        if (values.is_bf16) mti_kv_sums_of(mt_min(4, rows - r), 1, of, values.data, width, n, ahead, to);
        else mti_kv_sums_of(mt_min(4, rows - r), 0, of, values.data, width, n, ahead, to);
    }
}

static mt_status mti_kv_few_scratch(mti_attention *a, int64_t threads, mti_kv_few *f) {
    f->width = mt_round_up(a->desc.head_dim, MTI_NR);
    MT_TRY(mti_attention_floats(a, threads * MT_KV_DECODE_QUERIES * f->width, &f->q));
    MT_TRY(mti_attention_floats(a, threads * MT_KV_DECODE_QUERIES * f->width, &f->out));
    MT_TRY(mti_attention_floats(a, threads * MT_KV_DECODE_QUERIES * MTI_KV_KEYS, &f->scores));
    return mti_attention_floats(a, threads * MTI_KV_KEYS * f->width, &f->block);
}

/* Returns the part of a thread. */
static mti_kv_few mti_kv_few_of(const mti_kv_few *all, int thread) {
    mti_kv_few f = *all;
    f.q += thread * MT_KV_DECODE_QUERIES * f.width;
    f.out += thread * MT_KV_DECODE_QUERIES * f.width;
    f.scores += thread * MT_KV_DECODE_QUERIES * MTI_KV_KEYS;
    f.block += thread * MTI_KV_KEYS * f.width;
    return f;
}

/* Returns whether the loops can read a cache where it is. For more than two queries, converting bf16 once is faster. */
static int mti_kv_in_place(const mti_kv_few *f, mt_tensor t, int64_t queries) {
    if (t.cols != f->width) return 0;
#ifdef MTI_KV_BF16
    if (t.dtype == MT_BF16) return queries <= 2;
#endif
    (void)queries;
    return t.dtype == MT_F32;
}

/* Returns n rows of a cache, from `row` on: in place, or as f32 in f->block. */
static mti_kv_block mti_kv_rows(mti_kv_few *f, mt_tensor t, int64_t row, int64_t n, int64_t queries) {
    mti_kv_block out;
    int64_t j;
    out.is_bf16 = 0;
    out.data = (const char *)f->block;
    if (mti_kv_in_place(f, t, queries)) {
        out.is_bf16 = t.dtype == MT_BF16;
        out.data = (const char *)t.data + row * t.cols * (int64_t)mt_dtype_size(t.dtype);
        return out;
    }
    if (t.cols == f->width) mti_cpu_load(t, row, 0, n * t.cols, f->block);
    for (j = 0; t.cols < f->width && j < n; j++) {
        mti_cpu_load(t, row + j, 0, t.cols, f->block + j * f->width);
        mti_row_fill(f->block + j * f->width + t.cols, 0.0f, f->width - t.cols);
    }
    return out;
}

/* The keys of the block [key, key + n) that query i sees, as numbers in the block. */
static mti_span mti_kv_seen(const mti_attention *a, int64_t i, int64_t key, int64_t n) {
    mti_span seen = mti_span_of_both(mti_keys_of(&a->desc, a->desc.kv_seq, 0, i), key, key + n);
    seen.first = mt_min(seen.first - key, n);
    seen.end = mt_max(seen.end - key, seen.first);
    return seen;
}

/* Adds the block of keys [key, key + n) of a group to the softmax and the outputs of its queries. */
static void mti_kv_few_block(const mti_kv *k, const mti_attention *a, mti_kv_few *f, int64_t b, int64_t g, int64_t key,
                             int64_t n) {
    const mt_attention_desc *s = &a->desc;
    int64_t row = mti_kv_row(k, b, g) + key, queries = s->seq * s->heads_per_group, r;
    mti_kv_block keys = mti_kv_rows(f, k->cache.keys, row, n, queries);
    mti_kv_ahead values = mti_kv_ahead_of(k->cache.values, row, n);
    mti_kv_ahead next = mti_kv_ahead_of(k->cache.keys, row + n, mt_min(n, s->kv_seq - key - n));
    for (r = 0; r < queries; r++) {
        mti_head h = mti_attention_head(a, b, g, r % s->heads_per_group);
        int64_t i = r / s->heads_per_group;
        mti_span seen = mti_kv_seen(a, i, key, n);
        float *p = f->scores + r * MTI_KV_KEYS, *out = f->out + r * f->width;
        if (seen.end > seen.first) {
            mti_kv_scores(f->q + r * f->width, keys, f->width, n, s->scale, values, p);
            values.rows = 0;
        }
        if (seen.end > seen.first && mti_softmax_add(a, &h, &f->softmax, r, i, key, p, seen, out))
            seen = mti_span_whole(seen);
        else seen.end = seen.first;
        mti_attention_zero_outside(p, seen.first, seen.end, n);
    }
    mti_kv_sums(queries, f->scores, mti_kv_rows(f, k->cache.values, row, n, queries), f->width, n, next, f->out);
}

/* The attention of the queries of a group. */
static void mti_kv_few_group(const mti_kv *k, const mti_attention *a, mti_kv_few *f, int64_t b, int64_t g) {
    const mt_attention_desc *s = &a->desc;
    int64_t queries = s->seq * s->heads_per_group, key = mti_keys_of(s, s->kv_seq, 0, 0).first, r, n;
    mti_row_fill(f->softmax.top, -(float)INFINITY, queries);
    mti_row_fill(f->softmax.sum, 0.0f, queries);
    mti_row_fill(f->out, 0.0f, queries * f->width);
    for (r = 0; r < queries; r++) {
        mti_head h = mti_attention_head(a, b, g, r % s->heads_per_group);
        float *q = f->q + r * f->width;
        mti_cpu_load(a->q, b * k->desc.seq + r / s->heads_per_group, h.q_col, s->head_dim, q);
        mti_row_fill(q + s->head_dim, 0.0f, f->width - s->head_dim);
    }
    for (; key < s->kv_seq; key += n) {
        n = mt_min(MTI_KV_KEYS, s->kv_seq - key);
        mti_kv_few_block(k, a, f, b, g, key, n);
    }
    for (r = 0; r < queries; r++) {
        mti_head h = mti_attention_head(a, b, g, r % s->heads_per_group);
        float *out = f->out + r * f->width, sum = f->softmax.sum[r];
        mti_row_scale(out, sum == 0.0f ? 0.0f : 1.0f / sum, s->head_dim);
        mti_kv_store(mt_tensor_cols(a->out, h.out_col, s->head_dim), b * k->desc.seq + r / s->heads_per_group, out);
    }
}

/* Returns 1 if a call has few queries. In invariant mode all calls compute blocks, so that a query has the same bits in
   every call. */
static int mti_kv_is_few(const mti_kv *k) {
    return !mt_context_invariant(k->ctx) && k->desc.heads_per_group <= MT_KV_DECODE_QUERIES / k->desc.seq;
}

/* The arguments and the scratch memory of the loop. */
typedef struct mti_kv_loop {
    const mti_kv *k;
    mti_attention a;
    int is_few;
    mti_kv_few few;
} mti_kv_loop;

/* Computes the attention of a group of sequence b. desc gets its numbers of queries and keys. Tokens behind the new
   ones get zeros. */
static void mti_kv_attention_group(mti_kv_loop *l, int64_t b, int64_t g) {
    const mti_kv *k = l->k;
    int64_t n = mti_kv_new(&k->desc, b);
    l->a.desc.seq = n;
    l->a.desc.kv_seq = k->cache.lengths[b] + n;
    if (n > 0 && l->is_few) mti_kv_few_group(k, &l->a, &l->few, b, g);
    if (n > 0 && !l->is_few) mti_kv_blocks_group(k, &l->a, b, g);
    if (g == 0) mti_attention_clear(mt_tensor_rows(k->out, b * k->desc.seq + n, k->desc.seq - n));
}

/* Item b * groups + g is group g of sequence b. */
static void mti_kv_attention_groups(void *data, int thread, int64_t first, int64_t last) {
    mti_kv_loop l = *(const mti_kv_loop *)data;
    int64_t i, groups = l.k->desc.groups;
    if (l.is_few) l.few = mti_kv_few_of(&l.few, thread);
    else l.a = mti_attention_of_thread(&l.a, thread);
    if (l.a.tiles) mti_tiles_begin();
    for (i = first; i < last; i++) mti_kv_attention_group(&l, i / groups, i % groups);
    if (l.a.tiles) mti_tiles_end();
}

/* The number of elements of keys and values that each query of a group reads, on average over the sequences. */
static int64_t mti_kv_elements(const mti_kv *k) {
    int64_t keys = 0, b;
    for (b = 0; b < k->desc.batch; b++) keys += k->cache.lengths[b] + mti_kv_new(&k->desc, b);
    return 2 * k->desc.heads_per_group * k->desc.head_dim * (keys / k->desc.batch + 1);
}

/* Attention on a CPU. A meta context allocates the scratch memory as well. Each thread computes some of the groups. */
static mt_status mti_kv_attention_loop(mti_operator *op, mti_kv *k) {
    int64_t items = k->desc.batch * k->desc.groups;
    mti_kv_loop l;
    if (mti_is_empty(k->qkv)) return MT_SUCCESS;
    memset(&l, 0, sizeof l);
    l.k = k;
    l.a = mti_kv_resolve(k);
    l.is_few = mti_kv_is_few(k);
    l.a.threads = mt_min(items, mt_context_threads(k->ctx));
    if (l.is_few) MT_TRY(mti_kv_few_scratch(&l.a, l.a.threads, &l.few));
    else MT_TRY(mti_attention_scratch(&l.a, 0));
    if (op->on_cpu) mti_cpu_rows(k->ctx, items, mti_kv_elements(k), mti_kv_attention_groups, &l);
    return MT_SUCCESS;
}

/* Notes the work of attention. The lengths are in memory that a meta context does not have: all positions count. */
static void mti_kv_work(mti_operator *op, const mti_kv *k) {
    const mt_attention_desc *s = &k->desc;
    double queries = (double)(s->batch * s->seq) * (double)mti_attention_heads(s);
    if (!op->work.name) return;
    op->work.work = MT_WORK_ATTENTION;
    op->work.flops = 4.0 * queries * (double)k->cache.max_seq * (double)s->head_dim;
}

#if MT_HAS_CUDA
extern "C++" {

/* A call as kernels see it. */
struct mti_kv_gpu {
    mt_attention_desc s; /* without defaults */
    mti_qkv_cols cols;
    mti_view qkv, table, keys, values, out;
    mti_cached tokens;
    int64_t half, vectors; /* append: half of the features that it turns, and the vectors of a head that threads move */
    /* Attention with several splits. For each query head of a token and each split: the largest score and the sum of
       exponentials, and the sum of values, [pitch]. */
    int splits, pitch;
    float2 *stats;
    float *sums;

    __device__ int64_t row(int64_t b, int64_t group) const { return (b * s.groups + group) * tokens.max_seq; }
    __device__ int64_t query_col(int64_t head) const {
        int64_t group = mt_divide(head, s.heads_per_group);
        return group * cols.q_step + (head - group * s.heads_per_group) * s.head_dim;
    }
    __device__ int64_t split_of(int64_t b, int64_t i, int64_t head, int64_t split) const {
        return ((b * s.seq + i) * s.groups * s.heads_per_group + head) * splits + split;
    }
};

static mti_cached mti_cached_of(const mti_kv *kv) {
    mti_cached c = {kv->cache.lengths, kv->desc.lengths, kv->desc.seq, kv->cache.max_seq, kv->desc.window};
    return c;
}

static mti_kv_gpu mti_kv_gpu_of(const mti_kv *kv) {
    mti_kv_gpu k;
    memset(&k, 0, sizeof k);
    k.s = kv->desc;
    k.cols = kv->cols;
    k.qkv = mti_view_of(kv->qkv);
    k.table = mti_view_of(kv->table);
    k.keys = mti_view_of(kv->cache.keys);
    k.values = mti_view_of(kv->cache.values);
    k.out = mti_view_of(kv->out);
    k.tokens = mti_cached_of(kv);
    return k;
}

/* Moves vector `vector` of a query (head < heads_per_group), a key (heads_per_group) or a value of a token. Queries and
   keys first have mti_rotary_op's pairs of vectors, which are turned, then the vectors behind them, which are not. */
template <int TYPE, bool PAIRS>
static __device__ __forceinline__ void mti_kv_move_vector(const mti_kv_gpu &k, int64_t row, int64_t group, int64_t head,
                                                          int64_t vector, int64_t position, int64_t to) {
    const bool WIDE = TYPE != MTI_ANY_TYPE;
    int64_t d = k.s.head_dim, turned = (k.half + MTI_VECTOR - 1) / MTI_VECTOR, angle = vector * MTI_VECTOR;
    bool query = head < k.s.heads_per_group, key = head == k.s.heads_per_group;
    int64_t col =
        query ? group * k.cols.q_step + head * d : k.cols.key + group * k.cols.kv_step + (key ? 0 : k.cols.value);
    float both[2 * MTI_VECTOR], cosine[MTI_VECTOR], sine[MTI_VECTOR];
    if ((query || key) && vector < turned) {
        int angles = mti_vector_size(k.half, angle), in_low = PAIRS ? mti_vector_size(2 * angles, 0) : angles;
        int in_high = PAIRS ? 2 * angles - in_low : angles;
        int64_t low = PAIRS ? 2 * angle : angle, high = low + (PAIRS ? MTI_VECTOR : k.half);
        mti_load<WIDE, TYPE>(k.qkv, row, col + low, in_low, both);
        mti_load<WIDE, TYPE>(k.qkv, row, col + high, in_high, both + MTI_VECTOR);
        mti_load<WIDE>(k.table, position, angle, angles, cosine);
        mti_load<WIDE>(k.table, position, k.half + angle, angles, sine);
        mti_rotary_turn<PAIRS>(both, cosine, sine, 1.0f);
        mti_store<WIDE, TYPE>(k.qkv, row, col + low, in_low, both);
        mti_store<WIDE, TYPE>(k.qkv, row, col + high, in_high, both + MTI_VECTOR);
        if (query) return;
        mti_store<WIDE, TYPE>(k.keys, to, low, in_low, both);
        mti_store<WIDE, TYPE>(k.keys, to, high, in_high, both + MTI_VECTOR);
    } else if (!query) {
        int64_t at = key ? 2 * k.half + (vector - turned) * MTI_VECTOR : angle;
        int n = at < d ? mti_vector_size(d, at) : 0;
        if (n == 0) return;
        mti_load<WIDE, TYPE>(k.qkv, row, col + at, n, both);
        if (key) mti_store<WIDE, TYPE>(k.keys, to, at, n, both);
        else mti_store<WIDE, TYPE>(k.values, to, at, n, both);
    }
}

/* A thread owns every (grid size)-th vector of the queries, keys and values of all tokens: it turns a query in qkv, and
   a key in qkv and in the cache, and copies a value to the cache. The kernel uses no shared memory and no barrier. */
template <int TYPE, bool PAIRS> static __global__ void __launch_bounds__(256) mti_kv_append_kernel(mti_kv_gpu k) {
    int64_t heads = k.s.heads_per_group + 2, of_token = k.s.groups * heads * k.vectors;
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, items = k.s.batch * k.s.seq * of_token;
    for (; i < items; i += (int64_t)gridDim.x * 256) {
        int64_t row = mt_divide(i, of_token), b = mt_divide(row, k.s.seq),
                position = k.tokens.held(b) + row - b * k.s.seq;
        int64_t in_token = i - row * of_token, slot = mt_divide(in_token, k.vectors), group = mt_divide(slot, heads);
        if (row - b * k.s.seq >= k.tokens.tokens(b)) continue;
        mti_kv_move_vector<TYPE, PAIRS>(k, row, group, slot - group * heads, in_token - slot * k.vectors, position,
                                        k.row(b, group) + position);
    }
}

static mt_status mti_cuda_kv_cache_append(const mti_kv *kv) {
    const mt_attention_desc *s = &kv->desc;
    mti_kv_gpu k = mti_kv_gpu_of(kv);
    mti_access how = mti_access_of(kv->qkv, kv->cache.keys, kv->cache.values);
    k.half = kv->table.cols / 2; /* 0 without a table */
    k.vectors =
        mt_max((k.half + MTI_VECTOR - 1) / MTI_VECTOR + (s->head_dim - 2 * k.half + MTI_VECTOR - 1) / MTI_VECTOR,
               (s->head_dim + MTI_VECTOR - 1) / MTI_VECTOR);
    if (k.half % MTI_VECTOR != 0 || s->head_dim % MTI_VECTOR != 0 || !mti_is_wide(kv->table)) how.type = MTI_ANY_TYPE;
    MT_TRY(mt_cuda_enter(kv->ctx));
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<2>(s->rotary_form == MT_ROTARY_PAIRS, [&](auto pairs) {
            unsigned grid = mti_grid(kv->qkv.rows * s->groups * (s->heads_per_group + 2) * k.vectors, 256);
            MT_LAUNCH_KERNEL((mti_kv_append_kernel<type.value, pairs.value != 0>), grid, 256, 0,
                             mt_context_stream(kv->ctx), k);
            return mt_cuda_launched(kv->ctx, "mt_kv_cache_append");
        });
    });
}

/* Attention to a cache, for any float type and for head_dim up to 256. The queries of all heads of a group at all new
   tokens of a sequence are rows: row i * heads_per_group + j is head j at token i. A block owns a tile of ROWS rows of
   a group, and one split of the keys. It reads each key and value once for the tile, 16 bytes at a time.

   LANES neighbouring lanes of a warp share a key, and each of them has 8 features of it. So a warp works on
   32 / LANES * MTI_KV_AHEAD keys in a step:
   1. It fetches the values of the step, while the keys that the step before has fetched arrive.
   2. Each lane multiplies its features of the queries and keys. Shuffles add the products of LANES lanes, so that all
      of them have the scores.
   3. It fetches the keys of the next step.
   4. Online softmax: each group of LANES lanes has its own maximum and sum of exponentials for each row.
   5. Each lane adds the values to its features of the result.
   At the end, shuffles merge the results of a warp, and those of the warps meet in shared memory.

   With at most MTI_KV_FEW new tokens, there are few tiles. Then the keys are divided into splits of MTI_KV_SPLIT, as in
   Flash-Decoding: the results of the splits go to scratch memory, and a second kernel merges them. The number of splits
   depends on max_seq only, because the lengths are in memory of the GPU. Blocks of splits without keys end at once.

   Steps and splits begin at multiples of their sizes, and rows of a tile do not change each other. So the bits of a row
   depend neither on the number of sequences, groups and heads, nor on max_seq. */
#define MTI_KV_SPLIT 256
#define MTI_KV_FEW 8
#define MTI_KV_WARPS 4
#define MTI_KV_AHEAD 2

/* The state of a lane: its features of the queries and of the results. The other numbers are the same in all lanes that
   share a key. */
template <int ROWS> struct mti_split_rows {
    float q[ROWS][MTI_VECTOR], acc[ROWS][MTI_VECTOR]; /* q: multiplied by scale */
    float top[ROWS], sum[ROWS];                       /* the largest score so far, and the sum of exponentials */
    int end[ROWS];                                    /* as mti_kv_gpu.end */
    float slope[ROWS];                                /* of alibi_slopes, or 0 */
};

/* The keys of a block: [begin, end), and its tile and split. */
struct mti_split_block {
    int64_t b, group, row; /* row: the first one of the tile */
    int begin, end, split;
};

template <int ROWS> static __device__ __forceinline__ mti_split_block mti_split_find_block(const mti_kv_gpu &k) {
    int64_t rows = k.s.seq * k.s.heads_per_group, tiles = (rows + ROWS - 1) / ROWS;
    mti_split_block m;
    m.b = blockIdx.z, m.group = blockIdx.y;
    m.split = (int)(blockIdx.x / tiles);
    m.row = (tiles - 1 - blockIdx.x % tiles) * ROWS; /* tiles with the most keys start first */
    int64_t last = mt_divide(min(m.row + ROWS, rows) - 1, k.s.heads_per_group);
    m.end = k.tokens.end(m.b, mt_divide(m.row, k.s.heads_per_group)); /* of the first row; 0 if no row has keys */
    m.begin = k.tokens.first(m.end);
    if (m.end > 0) m.end = k.tokens.end(m.b, min(last, k.tokens.tokens(m.b) - 1));
    if (k.splits > 1) {
        m.begin = max(m.begin, m.split * MTI_KV_SPLIT);
        m.end = min(m.end, (m.split + 1) * MTI_KV_SPLIT);
    }
    return m;
}

/* Loads the features [col, col + n) of the queries. */
template <int TYPE, int ROWS>
static __device__ __forceinline__ void mti_split_begin(const mti_kv_gpu &k, const mti_split_block &m, int col, int n,
                                                       mti_split_rows<ROWS> &x) {
    int64_t h = k.s.heads_per_group;
    MT_DEVICE_UNROLL
    for (int r = 0; r < ROWS; r++) {
        int64_t i = mt_divide(m.row + r, h), head = m.group * h + m.row + r - i * h;
        x.end[r] = i < k.s.seq ? k.tokens.end(m.b, i) : 0;
        x.slope[r] = k.s.alibi_slopes && i < k.s.seq ? k.s.alibi_slopes[head] : 0.0f;
        bool is = x.end[r] > 0 && n > 0;
        mti_load<TYPE != MTI_ANY_TYPE, TYPE>(k.qkv, is ? m.b * k.s.seq + i : 0, is ? k.query_col(head) + col : 0,
                                             is ? n : 0, x.q[r]);
        MT_DEVICE_UNROLL
        for (int e = 0; e < MTI_VECTOR; e++) x.q[r][e] *= k.s.scale, x.acc[r][e] = 0.0f;
        x.top[r] = -INFINITY, x.sum[r] = 0.0f;
    }
}

/* Fetches the features [col, col + n) of the lane's keys or values: those at key, key + step, .... A key from `end` on
   is 0. */
template <int TYPE>
static __device__ __forceinline__ void mti_split_fetch(const mti_view &v, int64_t row, int key, int step, int end,
                                                       int col, int n, mti_fetched<TYPE> (&out)[MTI_KV_AHEAD]) {
    MT_DEVICE_UNROLL
    for (int u = 0; u < MTI_KV_AHEAD; u++) {
        memset(&out[u], 0, sizeof out[u]);
        if (n > 0 && key + u * step < end) mti_fetch<TYPE != MTI_ANY_TYPE>(v, row + key + u * step, col, n, out[u]);
    }
}

/* s = the scores of the rows and the lane's keys. Keys that a row does not see get -infinity. */
template <int TYPE, int LANES, int ROWS>
static __device__ __forceinline__ void mti_split_scores(const mti_kv_gpu &k, const mti_split_rows<ROWS> &x,
                                                        const mti_fetched<TYPE> (&keys)[MTI_KV_AHEAD], int key,
                                                        float (&s)[ROWS][MTI_KV_AHEAD]) {
    MT_DEVICE_UNROLL
    for (int u = 0; u < MTI_KV_AHEAD; u++) {
        float y[MTI_VECTOR];
        mti_values(keys[u], y);
        MT_DEVICE_UNROLL
        for (int r = 0; r < ROWS; r++) {
            s[r][u] = 0.0f;
            MT_DEVICE_UNROLL
            for (int e = 0; e < MTI_VECTOR; e++) s[r][u] += x.q[r][e] * y[e];
        }
    }
    MT_DEVICE_UNROLL
    for (int i = 0; i < ROWS * MTI_KV_AHEAD; i++) {
        int r = i / MTI_KV_AHEAD, u = i % MTI_KV_AHEAD, j = key + u * (32 / LANES);
        float score = s[r][u];
        MT_DEVICE_UNROLL
        for (int o = LANES / 2; o > 0; o >>= 1) score += __shfl_xor_sync(0xffffffffu, score, o);
        if (k.s.softcap > 0.0f) score = k.s.softcap * tanhf(score / k.s.softcap);
        score -= x.slope[r] * (float)(x.end[r] - 1 - j);
        s[r][u] = j < x.end[r] && j >= k.tokens.first(x.end[r]) ? score : -INFINITY;
    }
}

/* The factor of what belongs to the maximum `top` when it becomes `now`. Both may be -infinity. */
static __device__ __forceinline__ float mti_split_factor(int fast, float top, float now) {
    return top == now ? 1.0f : mti_cuda_exp(fast, top - now);
}

/* Raises the maxima to those of the scores, and turns the scores into exponentials. */
template <int ROWS>
static __device__ __forceinline__ void mti_split_softmax(int fast, mti_split_rows<ROWS> &x,
                                                         float (&s)[ROWS][MTI_KV_AHEAD]) {
    MT_DEVICE_UNROLL
    for (int r = 0; r < ROWS; r++) {
        float now = x.top[r];
        MT_DEVICE_UNROLL
        for (int u = 0; u < MTI_KV_AHEAD; u++) now = fmaxf(now, s[r][u]);
        if (__any_sync(0xffffffffu, now != x.top[r])) {
            float factor = mti_split_factor(fast, x.top[r], now);
            MT_DEVICE_UNROLL
            for (int e = 0; e < MTI_VECTOR; e++) x.acc[r][e] *= factor;
            x.sum[r] *= factor;
            x.top[r] = now;
        }
        MT_DEVICE_UNROLL
        for (int u = 0; u < MTI_KV_AHEAD; u++) {
            s[r][u] = s[r][u] == -INFINITY ? 0.0f : mti_cuda_exp(fast, s[r][u] - now);
            x.sum[r] += s[r][u];
        }
    }
}

/* Merges the results of the lanes of a warp that have the same features, into its first LANES lanes. */
template <int LANES, int ROWS>
static __device__ __forceinline__ void mti_split_merge_lanes(int fast, mti_split_rows<ROWS> &x) {
    MT_DEVICE_UNROLL
    for (int o = 8; o <= 16; o += 8) {
        if (o < LANES) continue;
        MT_DEVICE_UNROLL
        for (int r = 0; r < ROWS; r++) {
            float top = __shfl_xor_sync(0xffffffffu, x.top[r], o), sum = __shfl_xor_sync(0xffffffffu, x.sum[r], o);
            float now = fmaxf(top, x.top[r]);
            float own = mti_split_factor(fast, x.top[r], now), other = mti_split_factor(fast, top, now);
            x.top[r] = now;
            x.sum[r] = x.sum[r] * own + sum * other;
            MT_DEVICE_UNROLL
            for (int e = 0; e < MTI_VECTOR; e++)
                x.acc[r][e] = x.acc[r][e] * own + __shfl_xor_sync(0xffffffffu, x.acc[r][e], o) * other;
        }
    }
}

/* What a warp leaves in shared memory for the other warps: the results of ROWS rows of at most WIDTH features. It is
   written 16 bytes at a time. */
template <int ROWS, int WIDTH> struct mti_split_part {
    alignas(16) float acc[ROWS][WIDTH];
    float2 stats[ROWS];
};

/* Merges the features [col, col + 8) of a row, in the order of the warps. Returns the maximum and the sum. */
template <int ROWS, int WIDTH>
static __device__ __forceinline__ float2 mti_split_merge_warps(int fast, const mti_split_part<ROWS, WIDTH> *parts,
                                                               int row, int col, float *acc) {
    float2 all = make_float2(-INFINITY, 0.0f);
    for (int w = 0; w < MTI_KV_WARPS; w++) all.x = fmaxf(all.x, parts[w].stats[row].x);
    MT_DEVICE_UNROLL
    for (int e = 0; e < MTI_VECTOR; e++) acc[e] = 0.0f;
    for (int w = 0; w < MTI_KV_WARPS; w++) {
        float factor = mti_split_factor(fast, parts[w].stats[row].x, all.x);
        all.y += parts[w].stats[row].y * factor;
        MT_DEVICE_UNROLL
        for (int e = 0; e < MTI_VECTOR; e++) acc[e] += parts[w].acc[row][col + e] * factor;
    }
    return all;
}

/* Stores features of out. A query without keys has the sum 0. */
template <int TYPE>
static __device__ __forceinline__ void mti_split_store_out(const mti_kv_gpu &k, int64_t token, int64_t head, int col,
                                                           float sum, float *acc) {
    float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    MT_DEVICE_UNROLL
    for (int e = 0; e < MTI_VECTOR; e++) acc[e] *= factor;
    mti_store<TYPE != MTI_ANY_TYPE, TYPE>(k.out, token, head * k.s.head_dim + col, mti_vector_size(k.s.head_dim, col),
                                          acc);
}

/* Each thread stores 8 features of a row of the tile: in out, or in the scratch memory if there are more splits. */
template <int TYPE, int LANES, int ROWS>
static __device__ __forceinline__ void mti_split_finish(const mti_kv_gpu &k, const mti_split_block &m, int fast,
                                                        const mti_split_part<ROWS, LANES * MTI_VECTOR> *parts) {
    int64_t h = k.s.heads_per_group;
    for (int item = (int)threadIdx.x; item < ROWS * LANES; item += 32 * MTI_KV_WARPS) {
        int r = item / LANES, col = item % LANES * MTI_VECTOR;
        int64_t i = mt_divide(m.row + r, h), head = m.group * h + m.row + r - i * h;
        float acc[MTI_VECTOR];
        if (i >= k.s.seq || col >= k.s.head_dim) continue;
        float2 stats = mti_split_merge_warps(fast, parts, r, col, acc);
        if (k.splits > 1) {
            int64_t at = k.split_of(m.b, i, head, m.split);
            float4 *to = (float4 *)(k.sums + at * k.pitch + col);
            to[0] = make_float4(acc[0], acc[1], acc[2], acc[3]), to[1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
            if (col == 0) k.stats[at] = stats;
        } else mti_split_store_out<TYPE>(k, m.b * k.s.seq + i, head, col, stats.y, acc);
    }
}

/* The grid is (splits x tiles) x groups x sequences. The barrier separates writing the results of the warps from
   reading them. */
template <int TYPE, int LANES, int ROWS>
static __global__ void __launch_bounds__(32 * MTI_KV_WARPS, ROWS == 8 ? 2 : 3) mti_kv_attention_kernel(mti_kv_gpu k) {
    typedef mti_split_part<ROWS, LANES * MTI_VECTOR> part;
    constexpr int Across = 32 / LANES, Step = Across * MTI_KV_AHEAD;
    MT_SHARED(part, parts, MTI_KV_WARPS);
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x / 32, col = lane % LANES * MTI_VECTOR;
    int n = min(max((int)k.s.head_dim - col, 0), MTI_VECTOR), fast = mti_type_of<TYPE>(k.out) != MT_F32;
    mti_split_block m = mti_split_find_block<ROWS>(k);
    mti_fetched<TYPE> keys[MTI_KV_AHEAD], values[MTI_KV_AHEAD];
    mti_split_rows<ROWS> x;
    float s[ROWS][MTI_KV_AHEAD];
    if (k.splits > 1 && m.begin >= m.end) return;
    mti_split_begin<TYPE>(k, m, col, n, x);
    int64_t row = k.row(m.b, m.group);
    int step = m.begin / (MTI_KV_WARPS * Step) * (MTI_KV_WARPS * Step) + warp * Step; /* the first key of a step */
    int key = step + lane / LANES;
    mti_split_fetch(k.keys, row, key, Across, m.end, col, n, keys);
    for (; step < m.end; step += MTI_KV_WARPS * Step, key += MTI_KV_WARPS * Step) {
        mti_split_fetch(k.values, row, key, Across, m.end, col, n, values);
        mti_split_scores<TYPE, LANES>(k, x, keys, key, s);
        mti_split_fetch(k.keys, row, key + MTI_KV_WARPS * Step, Across, m.end, col, n, keys);
        mti_split_softmax(fast, x, s);
        MT_DEVICE_UNROLL
        for (int u = 0; u < MTI_KV_AHEAD; u++) {
            float y[MTI_VECTOR];
            mti_values(values[u], y);
            MT_DEVICE_UNROLL
            for (int i = 0; i < ROWS * MTI_VECTOR; i++)
                x.acc[i / MTI_VECTOR][i % MTI_VECTOR] += s[i / MTI_VECTOR][u] * y[i % MTI_VECTOR];
        }
    }
    mti_split_merge_lanes<LANES>(fast, x);
    MT_DEVICE_UNROLL
    for (int r = 0; r < ROWS && lane < LANES; r++) {
        float4 *to = (float4 *)(parts[warp].acc[r] + col);
        to[0] = make_float4(x.acc[r][0], x.acc[r][1], x.acc[r][2], x.acc[r][3]);
        to[1] = make_float4(x.acc[r][4], x.acc[r][5], x.acc[r][6], x.acc[r][7]);
        if (lane == 0) parts[warp].stats[r] = make_float2(x.top[r], x.sum[r]);
    }
    __syncthreads();
    mti_split_finish<TYPE, LANES, ROWS>(k, m, fast, parts);
}

/* Merges the splits of a query. A block owns a query of a head, and each of its warps owns every fourth split that the
   query sees. A lane has 8 features. The barrier is that of mti_kv_attention_kernel. The grid is heads x tokens x
   sequences. */
template <int TYPE> static __global__ void __launch_bounds__(32 * MTI_KV_WARPS) mti_kv_merge_kernel(mti_kv_gpu k) {
    typedef mti_split_part<1, 32 * MTI_VECTOR> part;
    MT_SHARED(part, parts, MTI_KV_WARPS);
    int64_t head = blockIdx.x, i = blockIdx.y, b = blockIdx.z;
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x / 32, col = lane * MTI_VECTOR;
    int end = k.tokens.end(b, i), fast = mti_type_of<TYPE>(k.out) != MT_F32;
    float acc[MTI_VECTOR] = {}, top = -INFINITY, sum = 0.0f;
    MT_DEVICE_UNROLL_2
    for (int split = k.tokens.first(end) / MTI_KV_SPLIT + warp; split * MTI_KV_SPLIT < end; split += MTI_KV_WARPS) {
        int64_t at = k.split_of(b, i, head, split);
        float2 stats = k.stats[at];
        float now = fmaxf(top, stats.x), own = mti_split_factor(fast, top, now),
              other = mti_split_factor(fast, stats.x, now);
        MT_DEVICE_UNROLL
        for (int e = 0; e < MTI_VECTOR && col < k.pitch; e++)
            acc[e] = acc[e] * own + k.sums[at * k.pitch + col + e] * other;
        sum = sum * own + stats.y * other;
        top = now;
    }
    MT_DEVICE_UNROLL
    for (int e = 0; e < MTI_VECTOR; e++) parts[warp].acc[0][col + e] = acc[e];
    if (lane == 0) parts[warp].stats[0] = make_float2(top, sum);
    __syncthreads();
    if (warp > 0 || col >= k.s.head_dim) return;
    float2 stats = mti_split_merge_warps(fast, parts, 0, col, acc);
    mti_split_store_out<TYPE>(k, b * k.s.seq + i, head, col, stats.y, acc);
}

/* Takes the scratch memory: (4 round_up(head_dim, 8) + 8) bytes for each query head of a token and each split. */
static mt_status mti_split_room(const mti_kv *kv, mti_kv_gpu *k) {
    const mt_attention_desc *s = &kv->desc;
    int64_t n = s->batch * s->seq * mti_attention_heads(s);
    void *memory = NULL;
    k->splits = 1; /* max_seq is below 2^30, so it and the splits are numbers of 32 bits */
    if (s->seq > MTI_KV_FEW || k->tokens.max_seq <= MTI_KV_SPLIT) return MT_SUCCESS;
    k->splits = (int)((k->tokens.max_seq + MTI_KV_SPLIT - 1) / MTI_KV_SPLIT);
    k->pitch = (int)mt_round_up(s->head_dim, MTI_VECTOR);
    n = mt_size_mul(n, k->splits);
    if (mt_size_mul(mt_size_mul(n, k->pitch), sizeof(float)) < 0)
        return mt_fail(kv->ctx, MT_ERR_MEMORY, "mt_kv_cache_attention: %d splits of the keys need too much memory",
                       k->splits);
    MT_TRY(mt_arena_alloc(kv->ctx, (size_t)(n * k->pitch) * sizeof(float), &memory));
    k->sums = (float *)memory;
    MT_TRY(mt_arena_alloc(kv->ctx, (size_t)n * sizeof(float2), &memory));
    k->stats = (float2 *)memory;
    return MT_SUCCESS;
}

/* Launches the kernel with tiles of 1, 4 or 8 rows, and with 8, 16 or 32 lanes for a key. With 8 rows, keys and values
   in f32 would need too many registers. */
template <int TYPE> static mt_status mti_split_attention(const mti_kv *kv, const mti_kv_gpu &k) {
    int64_t d = k.s.head_dim, rows = k.s.seq * k.s.heads_per_group;
    if (mt_size_mul(rows, k.splits) < 0 || rows * k.splits > INT_MAX)
        return mt_fail(kv->ctx, MT_ERR_UNSUPPORTED, "mt_kv_cache_attention: %lld queries of a group, and %d splits",
                       (long long)rows, k.splits);
    constexpr int Tiles = mti_fetched<TYPE>::size == 2 ? 3 : 2;
    return mti_by_kind<3>(TYPE == MTI_ANY_TYPE || d > 128 ? 2 : d > 64, [&](auto lanes) {
        return mti_by_kind<Tiles>(rows > 4 ? 2 : rows > 1, [&](auto tile) {
            constexpr int Lanes = TYPE == MTI_ANY_TYPE ? 32 : 8 << decltype(lanes)::value;
            constexpr int Rows = decltype(tile)::value == 0 ? 1 : 2 << decltype(tile)::value;
            dim3 grid((unsigned)((rows + Rows - 1) / Rows * k.splits), (unsigned)k.s.groups, (unsigned)k.s.batch);
            MT_LAUNCH_KERNEL((mti_kv_attention_kernel<TYPE, Lanes, Rows>), grid, 32 * MTI_KV_WARPS, 0,
                             mt_context_stream(kv->ctx), k);
            return mt_cuda_launched(kv->ctx, "mt_kv_cache_attention");
        });
    });
}

/* Whether the forward kernel on tensor cores can run a call whose views have the type `type`, see mti_flash_fits. Calls
   with few tokens have too few rows for its tiles. */
static int mti_kv_flash_fits(const mti_kv *kv, int type, int built_for) {
    const mt_attention_desc *s = &kv->desc;
    return (s->head_dim == 64 || s->head_dim == 96 || s->head_dim == 128) && (type == MT_BF16 || type == MT_F16) &&
           built_for >= 80 && s->seq > MTI_KV_FEW && s->scale > 0.0f && mti_flash_fits_scores(s);
}

template <int HeadDim> static mt_status mti_kv_flash(const mti_attention *a, const mti_flash &f) {
    void (*kernel)(mti_flash) = a->q.dtype == MT_BF16 ? mti_flash_forward_kernel<HeadDim, true, false, true, true>
                                                      : mti_flash_forward_kernel<HeadDim, false, false, true, true>;
    return mti_flash_launch(a, "mt_kv_cache_attention", kernel, mti_attention_heads(&a->desc), 128,
                            mti_flash_forward_bytes<HeadDim, true>(), f);
}

static mt_status mti_kv_run_flash(const mti_kv *kv) {
    mti_attention a = mti_attention_resolve(kv->ctx, &kv->desc, kv->out, mt_none());
    mti_flash f;
    a.q = kv->qkv, a.k = kv->cache.keys, a.v = kv->cache.values;
    a.q_step = kv->cols.q_step;
    f = mti_flash_of(&a);
    f.cached = mti_cached_of(kv);
    MT_TRY(mt_cuda_enter(kv->ctx));
    if (kv->desc.head_dim == 64) return mti_kv_flash<64>(&a, f);
    return kv->desc.head_dim == 96 ? mti_kv_flash<96>(&a, f) : mti_kv_flash<128>(&a, f);
}

static mt_status mti_cuda_kv_cache_attention(const mti_kv *kv) {
    mti_kv_gpu k = mti_kv_gpu_of(kv);
    int built_for = 0;
    int type = mti_row_type(kv->desc.head_dim, kv->qkv, kv->cache.keys, kv->cache.values, kv->out);
    MT_TRY(mti_cuda_attention_check(kv->ctx, &kv->desc));
    MT_TRY(mti_cuda_attention_limit(kv->ctx, "max_seq", kv->cache.max_seq, INT_MAX / 2));
    if (mti_is_empty(kv->out)) return MT_SUCCESS;
    MT_TRY(mti_built_for(kv->ctx, &built_for));
    if (mti_kv_flash_fits(kv, type, built_for)) return mti_kv_run_flash(kv);
    MT_TRY(mti_split_room(kv, &k));
    MT_TRY(mt_cuda_enter(kv->ctx));
    return mti_by_type(type, [&](auto t) {
        dim3 grid((unsigned)mti_attention_heads(&k.s), (unsigned)k.s.seq, (unsigned)k.s.batch);
        MT_TRY(mti_split_attention<t.value>(kv, k));
        if (k.splits == 1) return MT_SUCCESS;
        MT_LAUNCH_KERNEL(mti_kv_merge_kernel<t.value>, grid, 32 * MTI_KV_WARPS, 0, mt_context_stream(kv->ctx), k);
        return mt_cuda_launched(kv->ctx, "mt_kv_cache_attention");
    });
}

} /* extern "C++" */
#endif

MT_API mt_status mt_kv_cache_append(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv,
                                    const mt_kv_cache *cache) {
    static const char *const where = "mt_kv_cache_append";
    mti_kv k;
    mti_operator op;
    MT_TRY(mti_kv_check(ctx, where, desc, qkv, cache, &k));
    if (table.data) MT_TRY(mti_expect_rotary(ctx, where, desc));
    const int64_t rows = desc->batch * desc->groups * cache->max_seq, tokens = desc->batch * desc->seq;
    mt_arg args[] = {{"qkv", &k.qkv, tokens, mti_attention_width(desc), MT_ARG_FLOAT, MT_ARG_IN_OUT},
                     {"table", &table, cache->max_seq, mti_rotary_dim(desc), MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL},
                     {"keys", &k.cache.keys, rows, desc->head_dim, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"values", &k.cache.values, rows, desc->head_dim, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS}};
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_outputs_apart(ctx, where, args, MTI_COUNT(args), 2));
    MT_TRY(mti_kv_expect_lengths(&k, where));
    MT_TRY(mti_expect_qkv_parts(ctx, where, desc, "qkv", qkv));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    k.table = table;
    /* reads the whole qkv and the row of the table for each token, writes the turned part back, and the cache */
    op.work.bytes = (double)tokens * (double)mt_dtype_size(qkv.dtype) * (double)desc->head_dim * (double)desc->groups *
                    (double)((table.data ? 2 : 1) * (desc->heads_per_group + 1) + 3);
    return mti_end(&op, MTI_RUN(&op, mti_cuda_kv_cache_append(&k),
                                mti_cpu_rows(ctx, tokens, k.qkv.cols, mti_cpu_kv_cache_append, &k)));
}

MT_API mt_status mt_kv_cache_attention(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv,
                                       const mt_kv_cache *cache, mt_tensor out) {
    static const char *const where = "mt_kv_cache_attention";
    mti_kv k;
    mti_operator op;
    MT_TRY(mti_kv_check(ctx, where, desc, qkv, cache, &k));
    const int64_t rows = desc->batch * desc->groups * cache->max_seq, tokens = desc->batch * desc->seq;
    mt_arg args[] = {
        {"qkv", &k.qkv, tokens, mti_attention_width(desc), MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
        {"keys", &k.cache.keys, rows, desc->head_dim, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
        {"values", &k.cache.values, rows, desc->head_dim, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
        {"out", &k.out, tokens, mti_attention_heads(desc) * desc->head_dim, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS}};
    k.out = out;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_outputs_apart(ctx, where, args, MTI_COUNT(args), 1));
    MT_TRY(mti_kv_expect_lengths(&k, where));
    MT_TRY(mti_expect_qkv_parts(ctx, where, desc, "qkv", qkv));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    mti_kv_work(&op, &k);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_kv_cache_attention(&k), mti_kv_attention_loop(&op, &k)));
}

/* ---- >>kv-lengths: positions and lengths of a key/value cache ---------------------------------------------------- */

/* The position of token i of sequence b, at most max_seq - 1. */
MT_INLINE MT_HOST_DEVICE int32_t mti_kv_position(int64_t max_seq, const int32_t *lengths, int64_t b, int64_t i) {
    int64_t position = lengths[b] + i;
    return (int32_t)(position < max_seq ? position : max_seq - 1);
}

/* The length of sequence b after a call that adds added[b] or seq tokens. */
MT_INLINE MT_HOST_DEVICE int32_t mti_kv_advanced(int64_t max_seq, int64_t seq, const int32_t *added,
                                                 const int32_t *lengths, int64_t b) {
    int64_t some = added ? added[b] : seq, length = lengths[b] < 0 ? 0 : lengths[b];
    length += some < 0 ? 0 : some < seq ? some : seq;
    return (int32_t)(length < max_seq ? length : max_seq);
}

static void mti_cpu_kv_positions(const mt_kv_cache *cache, int64_t batch, int64_t seq, int32_t *ids) {
    int64_t b, i;
    for (b = 0; b < batch; b++)
        for (i = 0; i < seq; i++) ids[b * seq + i] = mti_kv_position(cache->max_seq, cache->lengths, b, i);
}

static void mti_cpu_kv_advance(int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added, int32_t *lengths) {
    int64_t b;
    for (b = 0; b < batch; b++) lengths[b] = mti_kv_advanced(max_seq, seq, added, lengths, b);
}

#if MT_HAS_CUDA
extern "C++" {

/* Each thread owns every (grid size)-th id. The kernel uses no shared memory and no barrier. */
static __global__ void __launch_bounds__(256)
    mti_kv_position_kernel(int64_t max_seq, const int32_t *lengths, int64_t batch, int64_t seq, int32_t *ids) {
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; t < batch * seq; t += step) {
        int64_t b = mt_divide(t, seq);
        ids[t] = mti_kv_position(max_seq, lengths, b, t - b * seq);
    }
}

/* The same for the lengths of the sequences. */
static __global__ void __launch_bounds__(256)
    mti_kv_advance_kernel(int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added, int32_t *lengths) {
    int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; b < batch; b += step) lengths[b] = mti_kv_advanced(max_seq, seq, added, lengths, b);
}

static mt_status mti_cuda_kv_positions(mt_context *ctx, const mt_kv_cache *cache, int64_t batch, int64_t seq,
                                       int32_t *ids) {
    if (batch == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_kv_position_kernel, mti_grid(batch * seq, 256), 256, 0, mt_context_stream(ctx), cache->max_seq,
                     cache->lengths, batch, seq, ids);
    return mt_cuda_launched(ctx, "mt_kv_cache_positions");
}

static mt_status mti_cuda_kv_advance(mt_context *ctx, int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added,
                                     int32_t *lengths) {
    if (batch == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_kv_advance_kernel, mti_grid(batch, 256), 256, 0, mt_context_stream(ctx), max_seq, batch, seq,
                     added, lengths);
    return mt_cuda_launched(ctx, "mt_kv_cache_advance");
}

} /* extern "C++" */
#endif

/* Checks the numbers of sequences and of tokens. */
static mt_status mti_kv_expect_tokens(mt_context *ctx, const char *where, int64_t batch, int64_t seq) {
    MT_TRY(mt_check_size(ctx, where, NULL, "batch", batch, 0, INT_MAX));
    return mt_check_size(ctx, where, NULL, "seq", seq, 1, INT_MAX);
}

MT_API mt_status mt_kv_cache_positions(mt_context *ctx, const mt_kv_cache *cache, int64_t batch, int64_t seq,
                                       int32_t *ids) {
    static const char *const where = "mt_kv_cache_positions";
    mti_operator op;
    MT_TRY(mti_kv_expect_tokens(ctx, where, batch, seq));
    MT_TRY(mti_kv_expect_cache(ctx, where, cache, batch));
    MT_TRY(mti_expect_pointer(ctx, where, "ids", ids, batch * seq));
    MT_TRY(mti_begin(&op, ctx, where, NULL, 0));
    op.work.bytes = (double)(batch * (seq + 1)) * sizeof *ids;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_kv_positions(ctx, cache, batch, seq, ids),
                                mti_cpu_kv_positions(cache, batch, seq, ids)));
}

MT_API mt_status mt_kv_cache_advance(mt_context *ctx, int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added,
                                     int32_t *lengths) {
    static const char *const where = "mt_kv_cache_advance";
    mti_operator op;
    MT_TRY(mti_kv_expect_tokens(ctx, where, batch, seq));
    MT_TRY(mt_check_size(ctx, where, NULL, "max_seq", max_seq, 1, INT_MAX));
    MT_TRY(mti_expect_pointer(ctx, where, "lengths", lengths, batch));
    MT_TRY(mti_begin(&op, ctx, where, NULL, 0));
    op.work.bytes = (double)(batch * (added ? 3 : 2)) * sizeof *lengths;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_kv_advance(ctx, max_seq, batch, seq, added, lengths),
                                mti_cpu_kv_advance(max_seq, batch, seq, added, lengths)));
}

/* ---- >>ids: the position ids of tokens, and the check of token ids ----------------------------------------------- */

/* The arguments of the loop. The desc has the length of a sequence and the documents. */
#define MTI_POSITION_COST 32 /* as elements of another operator */
typedef struct mti_positions {
    const mt_attention_desc *desc;
    int64_t first_token;
    int32_t *ids;
} mti_positions;

static void mti_cpu_position_ids(void *data, int thread, int64_t first, int64_t last) {
    const mti_positions *p = (const mti_positions *)data;
    int64_t i, seq = p->desc->seq;
    (void)thread;
    for (i = first; i < last; i++) {
        int64_t token = p->first_token + i;
        p->ids[i] = (int32_t)mti_document_position(p->desc, token / seq, token % seq);
    }
}

/* Stores the first id that is neither in [0, error->limit) nor `ignore` in *error. */
static void mti_cpu_ids_check(const int32_t *ids, int64_t count, int32_t ignore, mt_range_error *error) {
    int64_t i;
    for (i = 0; i < count && ((ids[i] >= 0 && ids[i] < error->limit) || ids[i] == ignore);) i++;
    if (i == count) return;
    error->found = 1;
    error->value = ids[i];
    error->index = i;
}

#if MT_HAS_CUDA
extern "C++" {

/* ids[i] = the position of token first + i in its sequence. A thread owns every (grid size)-th id. The kernel uses no
   shared memory and no barrier. */
static __global__ void __launch_bounds__(256)
    mti_position_kernel(int64_t first, int64_t seq, int32_t *ids, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < count; i += step) ids[i] = (int32_t)((first + i) % seq);
}

/* The same for packed documents, in a kernel of its own: the search takes longer than the division. */
static __global__ void __launch_bounds__(256)
    mti_document_position_kernel(mt_attention_desc s, int64_t first, int32_t *ids, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < count; i += step) {
        int64_t b = (first + i) / s.seq;
        ids[i] = (int32_t)mti_document_position(&s, b, first + i - b * s.seq);
    }
}

static mt_status mti_cuda_position_ids(mt_context *ctx, const mt_attention_desc *s, int64_t first_token, int32_t *ids,
                                       int64_t count) {
    if (count == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    if (s->cu_seqlens)
        MT_LAUNCH_KERNEL(mti_document_position_kernel, mti_grid(count, 256), 256, 0, mt_context_stream(ctx), *s,
                         first_token, ids, count);
    else
        MT_LAUNCH_KERNEL(mti_position_kernel, mti_grid(count, 256), 256, 0, mt_context_stream(ctx), first_token, s->seq,
                         ids, count);
    return mt_cuda_launched(ctx, "mt_position_ids");
}

#define MTI_IDS_THREADS 1024

/* Stores the first wrong id in *to, unless there is an error already. One block owns all ids, so that no other kernel
   has to find the first of several errors; each thread owns every blockDim-th id. The first barrier separates
   initialising `first` from its atomicMin, which gives the same index in any order. The second one separates this from
   reading it. */
static __global__ void __launch_bounds__(MTI_IDS_THREADS)
    mti_ids_kernel(const int32_t *ids, int64_t count, int32_t ignore, mt_range_error error, mt_range_error *to) {
    MT_SHARED(unsigned long long, first, 1);
    int64_t mine = count;
    if (threadIdx.x == 0) *first = (unsigned long long)count;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += 4 * (int64_t)blockDim.x) {
        int32_t id[4];
        MT_DEVICE_UNROLL
        for (int k = 0; k < 4; k++) id[k] = i + k * (int64_t)blockDim.x < count ? ids[i + k * (int64_t)blockDim.x] : 0;
        MT_DEVICE_UNROLL
        for (int k = 3; k >= 0; k--)
            if ((id[k] < 0 || id[k] >= error.limit) && id[k] != ignore && i + k * (int64_t)blockDim.x < mine)
                mine = i + k * (int64_t)blockDim.x;
    }
    if (mine < count) atomicMin(first, (unsigned long long)mine);
    __syncthreads();
    if (threadIdx.x != 0 || *first == (unsigned long long)count || to->found) return;
    error.found = 1;
    error.index = (int64_t)*first;
    error.value = ids[error.index];
    *to = error;
}

static mt_status mti_cuda_ids_check(mt_context *ctx, const int32_t *ids, int64_t count, int32_t ignore,
                                    const mt_range_error *error) {
    if (count == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_ids_kernel, 1, MTI_IDS_THREADS, 0, mt_context_stream(ctx), ids, count, ignore, *error,
                     mt_cuda_range_error(ctx));
    return mt_cuda_launched(ctx, "mt_ids_check");
}

} /* extern "C++" */
#endif

MT_API mt_status mt_ids_check(mt_context *ctx, const char *what, const int32_t *ids, int64_t count, int64_t limit,
                              int32_t ignore) {
    mt_range_error error;
    mti_operator op;
    MT_TRY(mti_expect_pointer(ctx, "mt_ids_check", "ids", ids, count));
    memset(&error, 0, sizeof error);
    error.limit = limit;
    snprintf(error.function, sizeof error.function, "mt_ids_check");
    snprintf(error.name, sizeof error.name, "%s", what ? what : "id");
    MT_TRY(mti_begin(&op, ctx, "mt_ids_check", NULL, 0));
    op.work.bytes = (double)count * sizeof *ids;
    MT_TRY(mti_end(&op, MTI_RUN(&op, mti_cuda_ids_check(ctx, ids, count, ignore, &error),
                                mti_cpu_ids_check(ids, count, ignore, &error))));
    return error.found ? mt_range_fail(ctx, &error) : MT_SUCCESS;
}

/* Notes which positions ids has. Ranks with whole sequences may have the same ones. */
static mt_status mti_positions_note(mti_operator *op, int64_t first_token, const mt_attention_desc *s, mt_tensor ids) {
    mt_status status = mt_declare(op->ctx, NULL, ids, MT_UNDECLARED);
    if (status != MT_SUCCESS) return mti_end(op, status);
    if (s->cu_seqlens || ids.rows % s->seq == 0) mt_check_content(op->ctx, ids, MT_CONTENT_ANY);
    else mti_made(op->ctx, ids, 2, (double)(first_token % s->seq), (double)s->seq);
    return MT_SUCCESS;
}

MT_API mt_status mt_position_ids(mt_context *ctx, int64_t first_token, int64_t seq, const int32_t *cu_seqlens,
                                 int64_t documents, int32_t *ids, int64_t count) {
    mt_attention_desc s;
    mti_operator op;
    MT_TRY(mti_expect_pointer(ctx, "mt_position_ids", "ids", ids, count));
    MT_TRY(mt_check_integer(ctx, "mt_position_ids", NULL, "first_token", first_token, 0, INT64_MAX - count));
    MT_TRY(mt_check_integer(ctx, "mt_position_ids", NULL, "seq", seq, 1, INT32_MAX));
    MT_TRY(mti_expect_cu_seqlens(ctx, "mt_position_ids", cu_seqlens, documents, first_token + count, INT64_MAX));
    memset(&s, 0, sizeof s);
    s.seq = seq;
    s.cu_seqlens = cu_seqlens;
    s.documents = documents;
    MT_TRY(mti_begin(&op, ctx, "mt_position_ids", NULL, 0));
    op.work.bytes = (double)count * sizeof *ids;
    MT_TRY(mti_positions_note(&op, first_token, &s, mt_tensor_make(ids, MT_I32, count, 1)));
    mti_positions p = {&s, first_token, ids};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_position_ids(ctx, &s, first_token, ids, count),
                                mti_cpu_rows(ctx, count, MTI_POSITION_COST, mti_cpu_position_ids, &p)));
}

/* ---- >>embedding ------------------------------------------------------------------------------------------------- */

static mt_status mti_expect_embedding(mt_context *ctx, const char *where, const char *table_name, mt_tensor table,
                                      int64_t first_row, const int32_t *ids, const char *y_name, mt_tensor y) {
    if (table.cols != y.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s is [%lld, %lld], %s is [%lld, %lld]: widths differ", where,
                       table_name, (long long)table.rows, (long long)table.cols, y_name, (long long)y.rows,
                       (long long)y.cols);
    MT_TRY(mt_check_integer(ctx, where, NULL, "first_row", first_row, 0, INT64_MAX));
    return mti_expect_pointer(ctx, where, "ids", ids, y.rows);
}

/* y = columns of row `row` of the table, from `col` on, + beta y. A row that is not in the table counts as zeros. With
   beta = 0, y is not read. */
static void mti_embedding_block(mt_tensor table, int64_t row, int64_t col, float beta, float *y, int64_t n) {
    int found = row >= 0 && row < table.rows;
    float room[MTI_BLOCK];
    if (beta != 0.0f) {
        if (beta != 1.0f) mti_row_scale(y, beta, n);
        if (found) mti_row_add(mti_row(mti_f32_read(table, row, 1, col, n, room), 0), y, y, n);
    } else if (found) mti_cpu_load(table, row, col, n, y);
    else mti_row_fill(y, 0.0f, n);
}

typedef struct mti_embedding {
    mt_tensor table, y; /* or their gradients */
    int64_t first_row;
    const int32_t *ids;
    float beta;
} mti_embedding;

static void mti_cpu_embedding_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_embedding *e = (const mti_embedding *)data;
    float room[MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < e->y.cols; j += n) {
            mt_tensor y;
            n = mt_min(MTI_BLOCK, e->y.cols - j);
            y = e->beta == 0.0f ? mti_f32_place(e->y, i, 1, j, n, room) : mti_f32_read(e->y, i, 1, j, n, room);
            mti_embedding_block(e->table, e->ids[i] - e->first_row, j, e->beta, mti_row(y, 0), n);
            mti_f32_write(y, e->y, i, j);
        }
}

/* Adds columns of the gradient of y to that of the table. */
static void mti_cpu_embedding_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_embedding *e = (const mti_embedding *)data;
    float room[MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = 0; i < e->y.rows; i++) {
        int64_t row = e->ids[i] - e->first_row;
        if (row < 0 || row >= e->table.rows) continue;
        for (j = first; j < last; j += n) {
            float *to = mti_row(e->table, row) + j;
            n = mt_min(MTI_BLOCK, last - j);
            mti_row_add(to, mti_row(mti_f32_read(e->y, i, 1, j, n, room), 0), to, n);
        }
    }
}

#if MT_HAS_CUDA
extern "C++" {

/* y = the table rows of the ids + beta y. Ids that are not in this shard give zeros. On sm_90: 22 instructions for an
   f32 element, which moves 12 bytes, or 8 with beta 0 (budget: 82 or 54). */
struct mti_embedding_op {
    mti_view table, y;
    const int32_t *ids;
    int64_t first_row, table_rows;
    float beta;
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        float x[MTI_VECTOR] = {}, old[MTI_VECTOR];
        int64_t at = ids[row] - first_row;
        if (at >= 0 && at < table_rows) mti_load<WIDE>(table, at, col, n, x);
        if (beta != 0.0f) {
            mti_load<WIDE>(y, row, col, n, old);
            for (int j = 0; j < MTI_VECTOR; j++) x[j] += beta * old[j];
        }
        mti_store<WIDE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_embedding_forward(mt_context *ctx, mt_tensor table, int64_t first_row, const int32_t *ids,
                                            float beta, mt_tensor y) {
    mti_embedding_op op = {mti_view_of(table), mti_view_of(y), ids, first_row, table.rows, beta};
    return mti_map(ctx, "mt_embedding_forward", op, mti_is_wide(table) && mti_is_wide(y), y.rows, y.cols);
}

/* The backward is a stable counting sort of the tokens by their row of the table, and then a sum of each run, which
   is all tokens of a row. The rows are divided into 2^bits parts: row k is row k / 2^bits of part k % 2^bits.
   Frequent tokens often have neighbouring ids, which are then in different parts. One block sorts the tokens of a
   part in shared memory. Each block reads all ids, so that there is only one launch. */
#define MTI_GROUP_THREADS 512 /* one thread for each row of a part */
#define MTI_GROUP_WARPS (MTI_GROUP_THREADS / 32)
#define MTI_GROUP_ROUNDS 16                             /* ids that a thread loads before it looks at the first one */
#define MTI_GROUP_STEP (32 * MTI_GROUP_ROUNDS)          /* ids that a warp reads in a step */
#define MTI_GROUP_PARTS 128                             /* for many tokens: about one for each multiprocessor */
#define MTI_GROUP_MOST (INT32_MAX - 2 * MTI_GROUP_STEP) /* tokens, so that 32 bits number them */
#define MTI_RUN_CHUNK 32                                /* a run with more tokens is cut into chunks */

struct __align__(16) mti_run {
    uint32_t row;     /* of the table */
    int first, count; /* range of grouped tokens: the whole run */
    int chunk;        /* the number of one chunk of it */
};

/* Chunk k > 0 of a run writes its sum to row p / MTI_RUN_CHUNK of `partials`, where p is the place of its first
   token. A long run counts its added chunks in added[first / MTI_RUN_CHUNK]. No two chunks and no two long runs have
   the same number, because their first places are at least MTI_RUN_CHUNK apart. */
struct mti_runs {
    const int32_t *ids;
    int64_t first_row;
    uint32_t rows;
    int count, bits;   /* the number of tokens; there are 2^bits parts */
    int range;         /* how many ids a warp of mti_group_kernel reads */
    int32_t *tokens;   /* [count]: the grouped tokens */
    mti_run *items;    /* [count]: from the front on all chunks of long runs, from the back on the other runs */
    int *sizes;        /* [3]: grouped tokens, chunks of long runs, other runs */
    int *added;        /* [slots]: how many chunks of a long run are added */
    mti_view partials; /* [slots, cols]: the sums of chunks */
    mti_view dtable, dy;
    int64_t cols;
};

/* Returns the length of the chunks of a run: 32 up to 4096 tokens, then 64, 128, and so on, the first that is at
   least sqrt(count) / 2. So longer runs have at most 2 sqrt(count) chunks. One block adds each chunk, and one block
   then adds the sums of the chunks. */
static __device__ __forceinline__ int mti_run_chunk(int count) {
    int size = MTI_RUN_CHUNK;
    while (4 * (int64_t)size * size < count) size *= 2;
    return size;
}

/* The rows of one part. A key is the distance of a row of the table from the first one of the part. */
struct mti_group_part {
    uint32_t first, rows, mask; /* the first row; how many rows the table has from there on; 2^bits - 1 */
    __device__ int has(uint32_t key) const { return (key & mask) == 0 && key < rows; }
};

/* Loads the ids i, i + 32, ... and computes their keys. An id at `end` or behind it counts as -1; with WHOLE there is
   none. The key of a negative id is in no part. */
template <bool WHOLE>
static __device__ __forceinline__ void mti_group_load(const mti_runs &r, const mti_group_part &p, int i, int end,
                                                      uint32_t *key) {
    int32_t id[MTI_GROUP_ROUNDS];
    MT_DEVICE_UNROLL
    for (int k = 0; k < MTI_GROUP_ROUNDS; k++) id[k] = WHOLE || i + k * 32 < end ? r.ids[i + k * 32] : -1;
    MT_DEVICE_UNROLL
    for (int k = 0; k < MTI_GROUP_ROUNDS; k++) key[k] = (uint32_t)id[k] - ((uint32_t)r.first_row + p.first);
}

/* Calls f(i, key) for all ids of [begin, end), in steps of a warp. The last step also calls f for places behind the
   end, whose keys are in no part. */
template <typename F>
static __device__ __forceinline__ void mti_group_each(const mti_runs &r, const mti_group_part &p, int begin, int end,
                                                      const F &f) {
    int lane = (int)threadIdx.x & 31;
    uint32_t key[MTI_GROUP_ROUNDS];
    for (; begin < end; begin += MTI_GROUP_STEP) {
        if (begin + MTI_GROUP_STEP <= end) mti_group_load<true>(r, p, begin + lane, end, key);
        else mti_group_load<false>(r, p, begin + lane, end, key);
        MT_DEVICE_UNROLL
        for (int k = 0; k < MTI_GROUP_ROUNDS; k++) f(begin + k * 32 + lane, key[k]);
    }
}

/* Exclusive prefix sums: x[j] of a thread becomes the sum of x[j] of the threads before it, plus sizes[j]. sizes[j]
   then grows by the sum of the whole block. The barriers separate writing the sums of warps to shared memory from
   reading them, and writing the old sizes from reading them. */
static __device__ __forceinline__ void mti_group_scan(int *x, int *sizes) {
    MT_SHARED(int, sums, 3 * MTI_GROUP_WARPS);
    MT_SHARED(int, base, 3);
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    for (int j = 0; j < 3; j++) {
        int own = x[j];
        for (int o = 1; o < 32; o *= 2) {
            int left = __shfl_up_sync(0xffffffffu, x[j], (unsigned)o);
            x[j] += lane >= o ? left : 0;
        }
        if (lane == 31) sums[j * MTI_GROUP_WARPS + warp] = x[j];
        x[j] -= own;
    }
    __syncthreads();
    if (threadIdx.x < 3) {
        int all = 0;
        for (int w = 0; w < MTI_GROUP_WARPS; w++) all += sums[(int)threadIdx.x * MTI_GROUP_WARPS + w];
        base[threadIdx.x] = atomicAdd(&sizes[threadIdx.x], all);
    }
    for (int j = 0; j < 3; j++)
        for (int w = 0; w < warp; w++) x[j] += sums[j * MTI_GROUP_WARPS + w];
    __syncthreads();
    for (int j = 0; j < 3; j++) x[j] += base[j];
}

/* Lists the run of row threadIdx.x of the part, which has n tokens, and returns its first place. */
static __device__ __forceinline__ int mti_group_list(const mti_runs &r, uint32_t part, int n) {
    int size = mti_run_chunk(n), chunks = n > MTI_RUN_CHUNK ? (n - 1) / size + 1 : 0;
    int x[3] = {n, chunks, n > 0 && n <= MTI_RUN_CHUNK};
    mti_run run = {threadIdx.x << r.bits | part, 0, n, 0};
    mti_group_scan(x, r.sizes);
    run.first = x[0];
    if (n > 0 && n <= MTI_RUN_CHUNK) r.items[r.count - 1 - x[2]] = run;
    if (n > MTI_RUN_CHUNK) r.added[run.first / MTI_RUN_CHUNK] = 0;
    for (; run.chunk < chunks; run.chunk++) r.items[x[1] + run.chunk] = run;
    return run.first;
}

/* Puts a token of each lane to its place, if the part has its key. at[row of the part] is the next place for this warp.
   A step of the loop serves all lanes that have the key of the last lane left. The first __syncwarp separates reading a
   place from increasing it, the second one separates the steps. */
static __device__ __forceinline__ void mti_group_place(const mti_runs &r, const mti_group_part &p, int token,
                                                       uint32_t key, int *at) {
    int lane = (int)threadIdx.x & 31;
    unsigned left = __ballot_sync(0xffffffffu, p.has(key));
    while (left) {
        int last = 31 - __clz((int)left);
        uint32_t which = __shfl_sync(0xffffffffu, key, last);
        unsigned same = __ballot_sync(0xffffffffu, key == which);
        int place = at[which >> r.bits] + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (key == which) r.tokens[place] = token;
        if (lane == last) at[which >> r.bits] = place + 1;
        __syncwarp();
        left &= ~same;
    }
}

/* Groups the tokens of part first + blockIdx.x. A warp owns a range of the ids.

   1. After a barrier, behind which all counters are 0, each warp counts the tokens of each row.
   2. After a barrier, thread t lists the run of row t of the part (mti_group_scan has barriers), and turns the counts
      of the warps into places.
   3. After a barrier, each warp reads its ids again and puts the tokens to their places.

   On sm_90 the first step takes 7 instructions for 32 ids, and 5 more if the part has one of them. The third step
   takes 9, and 25 more for each row of the part that is among them. An H200 was predicted to take 5 us for 16384
   different ids and 9 us for 49152. If one row has 6 % of them, as in a text, its part takes 8 us and 15 us. */
static __global__ void __launch_bounds__(MTI_GROUP_THREADS) mti_group_kernel(int64_t first, mti_runs r) {
    MT_SHARED(int, at, MTI_GROUP_WARPS *MTI_GROUP_THREADS);
    int warp = (int)threadIdx.x >> 5, *mine = at + warp * MTI_GROUP_THREADS, n = 0;
    uint32_t number = (uint32_t)(first + blockIdx.x);
    mti_group_part part = {number, number < r.rows ? r.rows - number : 0, (1u << r.bits) - 1};
    int64_t next = (int64_t)(warp + 1) * r.range;
    int begin = next - r.range < r.count ? (int)(next - r.range) : r.count, end = next < r.count ? (int)next : r.count;
    for (int w = 0; w < MTI_GROUP_WARPS; w++) at[w * MTI_GROUP_THREADS + (int)threadIdx.x] = 0;
    __syncthreads();
    mti_group_each(r, part, begin, end, [&](int, uint32_t key) {
        if (part.has(key)) atomicAdd(&mine[key >> r.bits], 1);
    });
    __syncthreads();
    for (int w = 0; w < MTI_GROUP_WARPS; w++) n += at[w * MTI_GROUP_THREADS + (int)threadIdx.x];
    int place = mti_group_list(r, number, n);
    for (int w = 0; w < MTI_GROUP_WARPS; w++) {
        int *to = &at[w * MTI_GROUP_THREADS + (int)threadIdx.x], found = *to;
        *to = place;
        place += found;
    }
    __syncthreads();
    mti_group_each(r, part, begin, end, [&](int i, uint32_t key) { mti_group_place(r, part, i, key, mine); });
}

/* Adds `count` rows of v to sum, one after the other: rows tokens[0], tokens[1], ..., or rows 0, step, 2 step, ... of v
   if tokens is NULL. Of whole vectors it loads AHEAD rows before it adds them. */
template <bool WIDE, int TYPE, int AHEAD>
static __device__ __forceinline__ void mti_add_rows(const mti_view &v, const int32_t *tokens, int step, int count,
                                                    int64_t col, int n, float *sum) {
    mti_fetched<TYPE> x[AHEAD];
    MT_DEVICE_NO_UNROLL
    for (int i = 0; n < MTI_VECTOR && i < count; i++) {
        mti_fetch<false>(v, tokens ? tokens[i] : (int64_t)i * step, col, n, x[0]);
        mti_add_values(x[0], sum);
    }
    MT_DEVICE_NO_UNROLL
    for (int i = 0; n == MTI_VECTOR && i < count; i += AHEAD) {
        int row[AHEAD];
        MT_DEVICE_UNROLL
        for (int k = 0; k < AHEAD; k++) row[k] = i + k >= count ? -1 : tokens ? tokens[i + k] : (i + k) * step;
        MT_DEVICE_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (row[k] >= 0) mti_fetch<WIDE>(v, row[k], col, MTI_VECTOR, x[k]);
        MT_DEVICE_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (row[k] >= 0) mti_add_values(x[k], sum);
    }
}

/* The row that gets the sum of a chunk: the first chunk of a run is added to the table, the others to `partials`. */
static __device__ __forceinline__ mti_view mti_run_target(const mti_runs &r, const mti_run &run, int begin) {
    mti_view to = run.chunk == 0 ? r.dtable : r.partials;
    to.data += (run.chunk == 0 ? (int64_t)run.row : begin / MTI_RUN_CHUNK) * to.ld * (int64_t)sizeof(float);
    return to;
}

/* The last block that comes here with a chunk of a run adds the sums of all chunks but the first to the table. The
   first barrier is behind the block's sum, which the fence before the atomic makes visible to the last block. The
   second one separates writing `last` from reading it. */
template <bool WIDE> static __device__ __forceinline__ void mti_run_finish(const mti_runs &r, mti_run run) {
    MT_SHARED(int, last, 1);
    int size = mti_run_chunk(run.count), others = (run.count - 1) / size;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *last = atomicAdd(&r.added[run.first / MTI_RUN_CHUNK], 1) == others;
        __threadfence();
    }
    __syncthreads();
    if (!*last) return;
    run.chunk = 0;
    mti_view to = mti_run_target(r, run, run.first), sums = r.partials;
    sums.data += (run.first + size) / MTI_RUN_CHUNK * sums.ld * (int64_t)sizeof(float);
    for (int64_t col = (int64_t)threadIdx.x * MTI_VECTOR; col < r.cols; col += (int64_t)blockDim.x * MTI_VECTOR) {
        int n = mti_vector_size(r.cols, col);
        float sum[MTI_VECTOR];
        mti_load<WIDE, MT_F32>(to, 0, col, n, sum);
        mti_add_rows<WIDE, MT_F32, 2>(sums, NULL, size / MTI_RUN_CHUNK, others, col, n, sum);
        mti_store<WIDE, MT_F32>(to, 0, col, n, sum);
    }
}

/* Adds the runs. A block owns every (grid size)-th item, and a thread every blockDim-th vector of the columns.
   mti_run_finish has barriers. The order of additions depends on the length of the run only.

   In bf16 on sm_90, four tokens take 150 instructions for eight columns, 2.3 for each byte that is read (budget: 6.8).
   64 registers, so an SM has 4 blocks with 64 KiB of loads in flight. */
template <bool WIDE, int TYPE>
static __global__ void __launch_bounds__(MTI_ROW_THREADS, 4) mti_runs_kernel(mti_runs r) {
    unsigned chunks = (unsigned)r.sizes[1], items = chunks + (unsigned)r.sizes[2];
    for (unsigned c = blockIdx.x; c < items; c += gridDim.x) {
        const mti_run *item = &r.items[c < chunks ? c : (unsigned)r.count - 1 - (c - chunks)];
        mti_run run = *item;
        int size = mti_run_chunk(run.count), begin = run.first + run.chunk * size;
        int left = run.first + run.count - begin, count = left < size ? left : size;
        mti_view to = mti_run_target(r, run, begin);
        for (int64_t col = (int64_t)threadIdx.x * MTI_VECTOR; col < r.cols; col += (int64_t)blockDim.x * MTI_VECTOR) {
            int n = mti_vector_size(r.cols, col);
            float sum[MTI_VECTOR] = {};
            if (run.chunk == 0) mti_load<WIDE, MT_F32>(to, 0, col, n, sum);
            mti_add_rows<WIDE, TYPE, 2 * mti_ahead<TYPE>::value>(r.dy, r.tokens + begin, 0, count, col, n, sum);
            mti_store<WIDE, MT_F32>(to, 0, col, n, sum);
        }
        if (c < chunks) mti_run_finish<WIDE>(r, *item);
    }
}

/* Takes the scratch memory of the backward. An mti_run has the size of four int32_t. */
static mt_status mti_embedding_scratch(mt_context *ctx, mti_runs *r) {
    mt_tensor tokens, items, added, partials;
    int64_t slots = r->count / MTI_RUN_CHUNK + 1;
    void *sizes = NULL;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, r->count, &tokens));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, r->count, 4, &items));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, slots, &added));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, slots, mt_round_up(r->cols, MTI_VECTOR), &partials));
    MT_TRY(mt_arena_alloc(ctx, 3 * sizeof *r->sizes, &sizes));
    r->tokens = (int32_t *)tokens.data;
    r->items = (mti_run *)items.data;
    r->added = (int *)added.data;
    r->partials = mti_view_of(partials);
    r->sizes = (int *)sizes;
    return MT_SUCCESS;
}

/* The most blocks of mti_runs_kernel. Only the GPU knows the number of items: blocks without one end at once. */
#ifndef MTI_RUN_BLOCKS
#define MTI_RUN_BLOCKS 8192
#endif

/* 2^bits parts: a part has at most MTI_GROUP_THREADS rows, and for few tokens there are few parts. */
static int mti_group_bits(int64_t rows, int64_t count) {
    int64_t parts = mt_max((rows + MTI_GROUP_THREADS - 1) / MTI_GROUP_THREADS, mt_min(count / 128, MTI_GROUP_PARTS));
    int bits = 0;
    while ((int64_t)1 << bits < parts) bits++;
    return bits;
}

template <int TYPE> static mt_status mti_cuda_add_runs(mt_context *ctx, const mti_runs &r) {
    unsigned blocks = (unsigned)mt_min(r.count, MTI_RUN_BLOCKS), threads = mti_row_threads(r.cols);
    MT_LAUNCH_KERNEL((mti_runs_kernel<TYPE != MTI_ANY_TYPE, TYPE>), blocks, threads, 0, mt_context_stream(ctx), r);
    return mt_cuda_launched(ctx, "mt_embedding_backward");
}

static mt_status mti_cuda_embedding_backward(mt_context *ctx, mt_tensor dy, int64_t first_row, const int32_t *ids,
                                             mt_tensor dtable) {
    mti_runs r;
    int wide = mti_is_wide(dy) && mti_is_wide(dtable);
    if (dy.rows > MTI_GROUP_MOST)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "mt_embedding_backward: %lld tokens are more than %d on a GPU",
                       (long long)dy.rows, MTI_GROUP_MOST);
    if (dtable.rows == 0 || first_row > INT32_MAX) return MT_SUCCESS;
    memset(&r, 0, sizeof r);
    r.ids = ids;
    r.first_row = first_row;
    r.rows = (uint32_t)mt_min(dtable.rows, ((int64_t)1 << 31) - first_row); /* ids have 31 bits */
    r.count = (int)dy.rows;
    r.bits = mti_group_bits(r.rows, r.count);
    r.range = (int)mt_round_up((dy.rows + MTI_GROUP_WARPS - 1) / MTI_GROUP_WARPS, 32);
    r.cols = dy.cols;
    r.dy = mti_view_of(dy);
    r.dtable = mti_view_of(dtable);
    MT_TRY(mti_embedding_scratch(ctx, &r));
    MT_TRY(mt_cuda_zero(ctx, r.sizes, 3 * sizeof *r.sizes));
    MTI_LAUNCH_BLOCKS(mti_group_kernel, (int64_t)1 << r.bits, MTI_GROUP_THREADS, 0, mt_context_stream(ctx), r);
    return mti_by_type(wide ? (int)dy.dtype : MTI_ANY_TYPE,
                       [&](auto type) { return mti_cuda_add_runs<type.value>(ctx, r); });
}

} /* extern "C++" */
#endif

/* Applies the rule of an embedding. The ids are an operand, too. */
static mt_status mti_embedding_rule(mt_context *ctx, const char *where, const mt_rule *rule, const int32_t *ids,
                                    int64_t first_row, const mt_arg *args) {
    mt_tensor rows = mt_tensor_make(ids, MT_I32, args[0].view->rows, 1), table = *args[1].view;
    mt_place place = {table.rows, table.cols, first_row, INT64_MAX, table.cols, 1, "rows of the table", 0, 0, 0};
    mt_arg all[3];
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    MT_TRY(mt_place_check(ctx, where, "", args[1].name, table, &place));
    memset(all, 0, sizeof all);
    all[0] = args[0];
    all[1] = args[1];
    all[2].name = "ids";
    all[2].view = &rows;
    all[2].use = MT_ARG_IN;
    return mti_apply_rule(ctx, where, rule, all, 3);
}

MT_API mt_status mt_embedding_forward(mt_context *ctx, mt_tensor table, int64_t first_row, const int32_t *ids,
                                      float beta, mt_tensor y) {
    static const char *const where = "mt_embedding_forward";
    static const mt_rule rule = {"ids table y", "RRR rRr RrP Rcc", NULL};
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MTI_AS_IS | MT_ARG_OUT | (beta != 0.0f ? MT_ARG_IN : 0)},
                     {"table", &table, table.rows, table.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS}};
    /* reads one row of the table for each token */
    const double bytes = (beta != 0.0f ? 3.0 : 2.0) * mti_view_bytes(y);
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_embedding(ctx, where, "table", table, first_row, ids, "y", y));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "table", table));
    MT_TRY(mti_numbers_agree(ctx, where, "beta", y, 2, 1, (double)beta)); /* of the y that the call adds to */
    MT_TRY(mti_embedding_rule(ctx, where, &rule, ids, first_row, args));
    MT_TRY(mti_begin_ruled(&op, ctx, where, args, MTI_COUNT(args)));
    op.work.bytes = bytes;
    mti_embedding e = {table, y, first_row, ids, beta};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_embedding_forward(ctx, table, first_row, ids, beta, y),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_embedding_forward, &e)));
}

MT_API mt_status mt_embedding_backward(mt_context *ctx, mt_tensor dy, int64_t first_row, const int32_t *ids,
                                       mt_tensor dtable) {
    static const char *const where = "mt_embedding_backward";
    static const mt_rule rule = {"ids dy dtable", "RRR RRr rrP Rcc RPP", NULL};
    mt_arg args[] = {{"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dtable", &dtable, dtable.rows, dtable.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM}};
    /* adds to one row of the table for each token */
    const double bytes = mti_view_bytes(dy) + 8.0 * (double)dy.rows * (double)dy.cols;
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_embedding(ctx, where, "dtable", dtable, first_row, ids, "dy", dy));
    MT_TRY(mt_check_apart(ctx, where, "dtable", dtable, "dy", dy));
    MT_TRY(mti_embedding_rule(ctx, where, &rule, ids, first_row, args));
    MT_TRY(mti_begin_ruled(&op, ctx, where, args, MTI_COUNT(args)));
    op.work.bytes = bytes;
    mti_embedding e = {dtable, dy, first_row, ids, 0.0f};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_embedding_backward(ctx, dy, first_row, ids, dtable),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_embedding_backward, &e)));
}

/* ---- >>cross-entropy --------------------------------------------------------------------------------------------- */

static mt_status mti_expect_cross_entropy(mt_context *ctx, const char *where, const mt_cross_entropy_shard_desc *s) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!s) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", where);
    MT_TRY(mt_check_size(ctx, where, NULL, "vocab", s->vocab, 1, INT64_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "first_col", s->first_col, 0, INT64_MAX));
    return mt_check_float(ctx, where, NULL, "label_smoothing", s->label_smoothing, MT_FLOAT_PROBABILITY);
}

/* The number of columns of a shard that are not padding. */
static int64_t mti_real_columns(const mt_cross_entropy_shard_desc *s, int64_t cols) {
    return mt_max(0, mt_min(cols, s->vocab - s->first_col));
}

static int32_t mti_ignore_index(int32_t ignore_index) {
    if (ignore_index == MT_ZERO) return 0;
    return ignore_index ? ignore_index : -100;
}

MT_API int32_t mt_ignore_index(int32_t ignore_index) { return mti_ignore_index(ignore_index); }

/* Returns the column of the target in this shard, or -1 if the target is ignored or in another shard. */
static int64_t mti_target_column(const mt_cross_entropy_shard_desc *s, int32_t target, int64_t real) {
    int64_t col = (int64_t)target - s->first_col;
    return target != mti_ignore_index(s->ignore_index) && col >= 0 && col < real ? col : -1;
}

#define MTI_CE_STEP 128 /* columns between two prefetches */

/* y = e^(x - shift) for n columns, x - shift <= 0. Returns the sum of y. Meanwhile `bytes` bytes from `next` on come
   into the cache, `step` for each MTI_CE_STEP columns. The processor would not fetch them itself, because exponentials
   of a block in L1 take longer than its prefetcher waits. */
static float mti_row_exp_ahead(const float *x, float shift, float *y, int64_t n, const char *next, int64_t bytes,
                               int64_t step) {
    float least = mti_unknown(-88.0f);
    int64_t j, k, at = 0;
    for (j = 0; j < n; j += MTI_CE_STEP) {
        int64_t end = mt_min(n, j + MTI_CE_STEP);
        for (k = 0; k < step && at < bytes; k += 64, at += 64) MTI_PREFETCH(next + at);
        MT_INDEPENDENT
        for (k = j; k < end; k++) y[k] = mti_exp_to_88(x[k] - shift, least);
    }
    return mti_row_sum(y, n);
}

/* out[0] = max of n columns of row i of t, out[1] = sum of e^(x - max), out[3] = sum of x. It reads memory once: it
   processes a block of columns at a time, and rescales the sum in double if the maximum grows (Milakov and Gimelshein,
   arXiv 1805.02867). A NaN may hide the maximum, but the sums are then NaN. */
static void mti_row_softmax_stats(mt_tensor t, int64_t i, int64_t n, float *out) {
    float room[MTI_BLOCK], exponentials[MTI_BLOCK], top = -(float)INFINITY;
    int64_t j, size = (int64_t)mt_dtype_size(t.dtype);
    double exps = 0.0, sum = 0.0;
    for (j = 0; j < n; j += MTI_BLOCK) {
        int64_t count = mt_min(MTI_BLOCK, n - j), after = mt_min(n, j + 2 * MTI_BLOCK);
        const float *x = mti_row(mti_f32_read(t, i, 1, j, count, room), 0);
        const char *next = (const char *)mti_bytes_at(t, i, after);
        float block_top = mti_row_max(x, count);
        if (!(block_top <= top)) {
            exps = exps > 0.0 ? exps * exp((double)top - (double)block_top) : exps;
            top = block_top;
        }
        exps += (double)mti_row_exp_ahead(x, top == -(float)INFINITY ? 0.0f : top, exponentials, count, next,
                                          mt_min(MTI_BLOCK, n - after) * size, MTI_CE_STEP * size);
        sum += (double)mti_row_sum(x, count);
    }
    out[0] = top;
    out[1] = (float)exps;
    out[3] = (float)sum;
}

/* The arguments of a loop. It uses those that its function has. */
typedef struct mti_cross_entropy {
    const mt_cross_entropy_shard_desc *desc;
    const int32_t *targets;
    mt_tensor logits, stats; /* stats: those of `shards` shards, one after the other */
    int64_t shards, real;    /* real: the columns of this shard that are not padding */
    mt_tensor dloss, loss, lse;
    float scale;
} mti_cross_entropy;

static mti_cross_entropy mti_cross_entropy_of(const mt_cross_entropy_shard_desc *s, mt_tensor logits,
                                              const int32_t *targets) {
    mti_cross_entropy c;
    memset(&c, 0, sizeof c);
    c.desc = s;
    c.targets = targets;
    c.logits = logits;
    c.shards = 1;
    c.real = mti_real_columns(s, logits.cols);
    return c;
}

static void mti_cross_entropy_stats_row(const mti_cross_entropy *c, int64_t i, float out[4]) {
    int64_t target = mti_target_column(c->desc, c->targets[i], c->real);
    mti_row_softmax_stats(c->logits, i, c->real, out);
    out[2] = 0.0f;
    if (target >= 0) mti_cpu_load(c->logits, i, target, 1, &out[2]);
}

static void mti_cpu_cross_entropy_stats(void *data, int thread, int64_t first, int64_t last) {
    const mti_cross_entropy *c = (const mti_cross_entropy *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_cross_entropy_stats_row(c, i, mti_row(c->stats, i));
}

/* Adds the statistics of b to those of a. The sums of exponentials are rescaled to the larger maximum. The maximum is
   -infinity if both shards have padding only. */
static void mti_stats_join(float a[4], const float b[4]) {
    float top = a[0] > b[0] ? a[0] : b[0];
    a[1] = top == -(float)INFINITY ? a[1] + b[1] : a[1] * expf(a[0] - top) + b[1] * expf(b[0] - top);
    a[0] = top;
    a[2] += b[2];
    a[3] += b[3];
}

/* out = the joined statistics of shards [first, first + span) of a token. The order is that in which mt_all_reduce adds
   ranks: ((0+1)+(2+3))+... span is a power of two. */
static void mti_stats_tree(mt_tensor gathered, int64_t tokens, int64_t token, int64_t first, int64_t span,
                           int64_t shards, float out[4]) {
    float right[4];
    if (span == 1) {
        memcpy(out, mti_row(gathered, first * tokens + token), 4 * sizeof *out);
        return;
    }
    mti_stats_tree(gathered, tokens, token, first, span / 2, shards, out);
    if (first + span / 2 >= shards) return;
    mti_stats_tree(gathered, tokens, token, first + span / 2, span / 2, shards, right);
    mti_stats_join(out, right);
}

#define MTI_CE_SHARDS 1024 /* the most that mt_cross_entropy_combine joins */

/* Returns the loss of token i, from its joined statistics. With the maximum m and the sum s, the loss is log(s) + (m -
   target), not lse - target, so that the large part of the logits cancels before log(s) is added. */
static float mti_cross_entropy_loss(const mti_cross_entropy *c, int64_t i, const float all[4], float log_sum) {
    float a = c->desc->label_smoothing, value = log_sum + (1.0f - a) * (all[0] - all[2]);
    if (a > 0.0f) value += a * (all[0] - all[3] / (float)c->desc->vocab);
    return c->targets[i] == mti_ignore_index(c->desc->ignore_index) ? 0.0f : value;
}

static void mti_cpu_cross_entropy_combine(void *data, int thread, int64_t first, int64_t last) {
    const mti_cross_entropy *c = (const mti_cross_entropy *)data;
    float all[4];
    int64_t i, span = 1;
    (void)thread;
    while (span < c->shards) span *= 2;
    for (i = first; i < last; i++) {
        mti_stats_tree(c->stats, c->loss.cols, i, 0, span, c->shards, all);
        mti_row(c->lse, 0)[i] = all[0];
        mti_row(c->lse, 1)[i] = logf(all[1]);
        mti_row(c->loss, 0)[i] = mti_cross_entropy_loss(c, i, all, mti_row(c->lse, 1)[i]);
    }
}

static void mti_cross_entropy_backward_row(float *x, float top, float log_sum, float even, float factor, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j++) x[j] = factor * (mti_exp((x[j] - top) - log_sum) - even);
}

/* Overwrites the logits of row i with their gradient. Padding columns and rows with an ignored target become 0. */
static void mti_cross_entropy_gradient(const mti_cross_entropy *c, int64_t i, float top, float log_sum) {
    const mt_cross_entropy_shard_desc *s = c->desc;
    float room[MTI_BLOCK], even = s->label_smoothing / (float)s->vocab;
    float factor = c->dloss.data ? c->scale * mti_row(c->dloss, 0)[c->dloss.cols == 1 ? 0 : i] : c->scale;
    int64_t j, n, target = mti_target_column(s, c->targets[i], c->real);
    int64_t used = c->targets[i] == mti_ignore_index(s->ignore_index) ? 0 : c->real;
    for (j = 0; j < c->logits.cols; j += n) {
        int64_t count = mt_max(0, mt_min(MTI_BLOCK, used - j));
        mt_tensor block;
        float *x;
        n = mt_min(MTI_BLOCK, c->logits.cols - j);
        block = mti_f32_read(c->logits, i, 1, j, n, room);
        x = mti_row(block, 0);
        mti_cross_entropy_backward_row(x, top, log_sum, even, factor, count);
        mti_row_fill(x + count, 0.0f, n - count);
        if (target >= j && target < j + n) x[target - j] -= factor * (1.0f - s->label_smoothing);
        mti_f32_write(block, c->logits, i, j);
    }
}

static void mti_cpu_cross_entropy_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_cross_entropy *c = (const mti_cross_entropy *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_cross_entropy_gradient(c, i, mti_row(c->lse, 0)[i], mti_row(c->lse, 1)[i]);
}

/* Does all three steps for one row at a time, while the row is in the cache. */
static void mti_cpu_cross_entropy(void *data, int thread, int64_t first, int64_t last) {
    const mti_cross_entropy *c = (const mti_cross_entropy *)data;
    float stats[4], log_sum;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_cross_entropy_stats_row(c, i, stats);
        log_sum = logf(stats[1]);
        mti_row(c->loss, 0)[i] = mti_cross_entropy_loss(c, i, stats, log_sum);
        mti_cross_entropy_gradient(c, i, stats[0], log_sum);
    }
}

#if MT_HAS_CUDA
extern "C++" {

/* The arguments of the cross-entropy kernels, and the formulas that they share. */
struct mti_ce {
    mti_view logits, stats, lse, dloss;
    const int32_t *targets;
    mt_cross_entropy_shard_desc desc;
    int64_t real; /* columns that are not padding */
    int64_t bulk; /* the number of chunks of a row, and of its vectors: see mti_ce_head */
    float scale;
    int32_t ignore;

    __device__ int64_t target_of(int64_t row) const { /* the column of the target in this shard, or -1 */
        int64_t col = (int64_t)targets[row] - desc.first_col;
        return targets[row] != ignore && col >= 0 && col < real ? col : -1;
    }
    __device__ float loss_of(int64_t row, float top, float log_sum, float target, float plain) const {
        float value = log_sum + (1.0f - desc.label_smoothing) * (top - target);
        if (desc.label_smoothing > 0.0f) value += desc.label_smoothing * (top - plain / (float)desc.vocab);
        return targets[row] == ignore ? 0.0f : value;
    }
};

/* e^(x - below), as 2^((x - below) log2 e) for 16-bit logits: one instruction after two roundings, whose relative error
   of 1.2e-7 |x - below| is far below the distance of two 16-bit gradients. */
template <int TYPE> static __device__ __forceinline__ float mti_ce_exp(float x, float below) {
    if (TYPE == MT_BF16 || TYPE == MT_F16) return mti_ex2((x - below) * 1.44269504f);
    return expf(x - below);
}

/* What a thread knows of the elements of a row that it has seen: their maximum `top`, the sum of their exponentials
   relative to `top`, and their plain sum. */
template <int TYPE> struct mti_ce_sums {
    float top, sum, plain;

    static __device__ __forceinline__ float finite(float top) { return top == -INFINITY ? 0.0f : top; }
    /* Raises the maximum. The sum is then relative to the new one. */
    __device__ __forceinline__ void rescale(float to) {
        sum *= mti_ce_exp<TYPE>(top, finite(to)); /* e^-infinity at first, when sum is 0 */
        top = to;
    }
    __device__ __forceinline__ void add(float x) {
        sum += mti_ce_exp<TYPE>(x, finite(top));
        plain += x;
    }
};

#define MTI_CE_THREADS 512 /* maximum per block; two such blocks fit into the registers of a multiprocessor */

/* At least 32, because each thread has at most one of the up to 23 elements that are in no vector. */
static unsigned mti_ce_threads(int64_t cols) {
    return (unsigned)mt_max(32,
                            mt_min(MTI_CE_THREADS, mt_round_up((cols + 4 * MTI_VECTOR - 1) / (4 * MTI_VECTOR), 32)));
}

/* Returns `head`, the last column from 1 to MTI_VECTOR whose address is a multiple of 16 bytes. A row may begin at
   any element: with 50257 columns, most rows are not aligned. So its elements are divided in two ways. Vector i
   begins at column 8 * i + 8, chunk i at column 8 * i + head. Both have 8 = MTI_VECTOR elements, and i is less than
   c.bulk. Threads load and store chunks. They add vectors, so the bits of a sum do not depend on the alignment. The
   other elements, up to 23 and the padding, are accessed one by one. So no thread accesses memory outside of its
   row. */
template <int TYPE> static __device__ __forceinline__ int mti_ce_head(const mti_ce &c, int64_t row) {
    const int size = mti_fetched<TYPE>::size;
    return MTI_VECTOR - (int)((uintptr_t)(c.logits.data + row * c.logits.ld * size) % 16) / size;
}

/* Turns a chunk into the vector that begins `skip` bytes after the beginning of the chunk, 0 < skip < 16. The last
   `skip` bytes of the vector are the first ones of `next`. skip is the same for the whole row. */
template <int TYPE>
static __device__ __forceinline__ void mti_ce_shift(mti_fetched<TYPE> &chunk, const mti_words &next, int skip) {
    const int count = sizeof chunk / 4;
    uint32_t w[count + 4];
    MT_DEVICE_UNROLL
    for (int j = 0; j < count + 4; j++) w[j] = j < count ? chunk.words[j / 4].w[j % 4] : next.w[j - count];
    MT_DEVICE_UNROLL
    for (int j = 0; j < count + 2; j++) w[j] = skip & 8 ? w[j + 2] : w[j];
    MT_DEVICE_UNROLL
    for (int j = 0; j < count + 1; j++) w[j] = skip & 4 ? w[j + 1] : w[j];
    MT_DEVICE_UNROLL
    for (int j = 0; j < count; j++)
        chunk.words[j / 4].w[j % 4] =
            TYPE == MT_F32 ? w[j] : (uint32_t)(((uint64_t)w[j + 1] << 32 | w[j]) >> 8 * (skip & 2));
}

/* Adds COUNT vectors of a thread to own: that of the chunk at element `at` of the logits, and those of every
   blockDim-th chunk behind it. Copies the chunks to `room`, if this is given. Moves `at` and `room` to the thread's
   next chunk. The last bytes of a vector are in the chunk of another thread, which loads it at the same time, so they
   are expected in the L1 cache. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ void mti_ce_add_group(const mti_ce &c, int64_t &at, mti_words *&room, int skip,
                                                        mti_ce_sums<TYPE> &own) {
    static const int words = sizeof(mti_fetched<TYPE>) / sizeof(mti_words);
    mti_fetched<TYPE> held[COUNT];
    int64_t step = blockDim.x;
    float top = own.top, x[MTI_VECTOR];
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) mti_fetch<true>(c.logits, 0, at + q * step * MTI_VECTOR, MTI_VECTOR, held[q]);
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT && room; q++)
        for (int k = 0; k < words; k++) room[k * c.bulk + q * step] = held[q].words[k];
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT && skip; q++)
        mti_ce_shift(held[q],
                     mti_load_words(c.logits.data + (at + (q * step + 1) * MTI_VECTOR) * mti_fetched<TYPE>::size),
                     skip);
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        mti_values(held[q], x);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) top = fmaxf(top, x[j]);
    }
    own.rescale(top);
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        mti_values(held[q], x);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) own.add(x[j]);
    }
    at += COUNT * step * MTI_VECTOR;
    if (room) room += COUNT * step;
}

/* What a thread knows of its part of a row, in one pass over it. The thread owns every blockDim-th vector, and one of
   the elements that are in no vector. With `room`, it also copies its chunks to shared memory. */
template <int TYPE>
static __device__ __forceinline__ mti_ce_sums<TYPE> mti_ce_part(const mti_ce &c, int64_t row, mti_words *room) {
    int head = mti_ce_head<TYPE>(c, row), skip = (MTI_VECTOR - head) * mti_fetched<TYPE>::size;
    int64_t at = row * c.logits.ld + head, end = at + c.bulk * MTI_VECTOR, step = blockDim.x * MTI_VECTOR;
    int64_t edge = threadIdx.x;
    mti_ce_sums<TYPE> own = {-INFINITY, 0.0f, 0.0f};
    at += threadIdx.x * MTI_VECTOR;
    if (room) room += threadIdx.x;
    while (TYPE != MT_F32 && at + 3 * step < end) mti_ce_add_group<TYPE, 4>(c, at, room, skip, own);
    while (at + step < end) mti_ce_add_group<TYPE, 2>(c, at, room, skip, own);
    if (at < end) mti_ce_add_group<TYPE, 1>(c, at, room, skip, own);
    if (edge >= MTI_VECTOR) edge += c.bulk * MTI_VECTOR;
    if (edge < c.real) {
        float x = mti_get<TYPE>(c.logits, row, edge);
        own.rescale(fmaxf(own.top, x));
        own.add(x);
    }
    return own;
}

/* Returns the four statistics of a row to every thread of its block, in one pass over the row, which mti_ce_part also
   copies to `room`, if this is given.

   1. Each thread computes the maximum of its part of the row, and the sum of exponentials relative to this maximum.
   2. Shuffles give the maximum of each warp. `tops` holds the maxima of all warps, and `hit` holds the logit of the
      target. The barrier separates writing `tops` and `hit` from reading them. It also ensures that the row and
      the logit of the target are read before the caller overwrites logits with gradients.
   3. Each thread rescales its sum to the maximum of the row, and mti_block_sums_once adds the sums through `shared`. */
template <int TYPE> static __device__ __forceinline__ float4 mti_ce_row(const mti_ce &c, int64_t row, mti_words *room) {
    MT_SHARED(float, shared, 64);
    MT_SHARED(float, tops, 32);
    MT_SHARED(float, hit, 1);
    int target = (int)c.target_of(row); /* a target is an int32_t */
    mti_ce_sums<TYPE> own = mti_ce_part<TYPE>(c, row, room);
    float all = mti_warp_max(own.top);
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = all;
    if (threadIdx.x == 0)
        *hit = target >= 0 ? mti_get<TYPE>(c.logits, row, target) : 0.0f; /* before gradients are written */
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++) all = fmaxf(all, tops[w]);
    own.rescale(all);
    float2 sums = mti_block_sums_once(own.sum, own.plain, shared);
    return make_float4(all, sums.x, *hit, sums.y);
}

/* Writes stats. A block owns row first + blockIdx.x; shared memory and barriers are those of mti_ce_row. In bf16 on
   sm_90: 8 instructions for an element, which moves 2 bytes (budget: 13), and 10 in a row that is not aligned; 63
   registers, 2 blocks on a multiprocessor. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_CE_THREADS, 2) mti_ce_stats_kernel(int64_t first, mti_ce c) {
    int64_t row = first + blockIdx.x;
    float4 s = mti_ce_row<TYPE>(c, row, NULL);
    if (threadIdx.x != 0) return;
    mti_put(c.stats, row, 0, s.x);
    mti_put(c.stats, row, 1, s.y);
    mti_put(c.stats, row, 2, s.z);
    mti_put(c.stats, row, 3, s.w);
}

/* The numbers of a row from which its gradients are computed: factor * softmax - even, and at the target
   factor * softmax - hot. fma, so that each place that computes one rounds alike. */
struct mti_ce_scales {
    float top, log_sum, factor, even, hot;
    template <int TYPE> __device__ __forceinline__ float gradient(float x, float minus) const {
        return __fmaf_rn(factor, mti_ce_exp<TYPE>(x - top, log_sum), -minus);
    }
};

/* Replaces COUNT chunks by their gradients: i, i + blockDim.x, and so on. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ void mti_ce_gradient_group(const mti_ce &c, const mti_view &chunks, int64_t i,
                                                             const mti_ce_scales &s, const mti_words *room) {
    static const int words = sizeof(mti_fetched<TYPE>) / sizeof(mti_words);
    mti_fetched<TYPE> held[COUNT];
    int64_t step = blockDim.x;
    float x[MTI_VECTOR];
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        for (int k = 0; k < words && room; k++) held[q].words[k] = mti_load_words(room + k * c.bulk + i + q * step);
        if (!room) mti_row_fetch(chunks, 0, i + q * step, c.real, held[q]);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        mti_values(held[q], x);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) x[j] = s.gradient<TYPE>(x[j], s.even);
        mti_row_store<TYPE>(chunks, 0, i + q * step, c.real, x);
    }
}

/* Replaces a row of logits by its gradient. A thread owns every blockDim-th chunk, and every blockDim-th element that
   is in no chunk, to the end of the padding. With `room`, it reads its chunks from shared memory. The owner of the
   target's chunk reads the logit of the target before it writes gradients, and afterwards writes the gradient of the
   target, so that no other chunk is compared with the target. The gradient of an ignored row is 0 whatever its logits
   are. */
template <int TYPE>
static __device__ __forceinline__ void mti_ce_gradient_row(const mti_ce &c, int64_t row, int64_t cols, float top,
                                                           float log_sum, const mti_words *room) {
    int head = mti_ce_head<TYPE>(c, row), ignored = c.targets[row] == c.ignore;
    int64_t step = blockDim.x, i = threadIdx.x, target = c.target_of(row), at = (target - head) / MTI_VECTOR;
    int owner = target >= head && at < c.bulk;
    float factor = c.dloss.data ? c.scale * mti_get(c.dloss, row, 0) : c.scale;
    float even = factor * (c.desc.label_smoothing / (float)c.desc.vocab), zeros[MTI_VECTOR] = {}, hit = 0.0f;
    mti_ce_scales s = {top, log_sum, factor, even, factor * (1.0f - c.desc.label_smoothing) + even};
    mti_view chunks = c.logits;
    chunks.data += (row * c.logits.ld + head) * mti_fetched<TYPE>::size;
    if (owner) owner = at - mt_divide(at, step) * step == i;
    if (owner) hit = mti_get<TYPE>(c.logits, row, target);
    for (; ignored && i < c.bulk; i += step) mti_row_store<TYPE>(chunks, 0, i, c.real, zeros);
    for (; TYPE != MT_F32 && i + 3 * step < c.bulk; i += 4 * step)
        mti_ce_gradient_group<TYPE, 4>(c, chunks, i, s, room);
    for (; i + step < c.bulk; i += 2 * step) mti_ce_gradient_group<TYPE, 2>(c, chunks, i, s, room);
    if (i < c.bulk) mti_ce_gradient_group<TYPE, 1>(c, chunks, i, s, room);
    if (owner) mti_put<TYPE>(c.logits, row, target, s.gradient<TYPE>(hit, s.hot));
    for (int64_t edge = threadIdx.x; edge < cols - c.bulk * MTI_VECTOR; edge += step) {
        int64_t col = edge < head ? edge : edge + c.bulk * MTI_VECTOR;
        float g = 0.0f;
        if (!ignored && col < c.real)
            g = s.gradient<TYPE>(mti_get<TYPE>(c.logits, row, col), col == target ? s.hot : s.even);
        mti_put<TYPE>(c.logits, row, col, g);
    }
}

/* The gradient from lse. A block owns row first + blockIdx.x. There is no shared memory and no barrier. In bf16 on
   sm_90: 7 instructions for an element, which moves 4 bytes (budget: 27); 63 registers, 2 blocks on a
   multiprocessor. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_CE_THREADS, 2)
    mti_ce_backward_kernel(int64_t first, mti_ce c, int64_t cols) {
    int64_t row = first + blockIdx.x;
    mti_ce_gradient_row<TYPE>(c, row, cols, mti_get(c.lse, 0, row), mti_get(c.lse, 1, row), NULL);
}

/* Computes the loss and the gradient for a whole vocabulary. A block owns row first + blockIdx.x. With keep, `room` in
   shared memory holds the chunks of the row. Otherwise the row is read again, from the L2 cache. The barriers are in
   mti_ce_row: after them, all threads have read the vectors of the row, and thread 0 the logit of the target, so
   gradients may overwrite logits. All other logits that a thread reads, in `room` as well, are its own. In bf16 on
   sm_90: 17 instructions for an element, which moves 4 bytes (budget: 27), and 19 in a row that is not aligned; 64
   registers; with 50304 columns, 2 blocks on a multiprocessor. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_CE_THREADS, 2)
    mti_ce_kernel(int64_t first, mti_ce c, int64_t cols, mti_view loss, int keep) {
    MT_DYN_SHARED(mti_words, room);
    int64_t row = first + blockIdx.x;
    float4 s = mti_ce_row<TYPE>(c, row, keep ? room : NULL);
    float log_sum = logf(s.y);
    if (threadIdx.x == 0) mti_put(loss, 0, row, c.loss_of(row, s.x, log_sum, s.z, s.w));
    mti_ce_gradient_row<TYPE>(c, row, cols, s.x, log_sum, keep ? room : NULL);
}

/* dloss as a column, whose element is the same for all tokens if there is one. */
static mti_view mti_ce_dloss(mt_tensor dloss) {
    mti_view v = mti_view_of(dloss);
    v.ld = dloss.cols == 1 ? 0 : 1;
    return v;
}

static mti_ce mti_ce_of(const mt_cross_entropy_shard_desc *s, mt_tensor logits, const int32_t *targets) {
    mti_ce c;
    memset(&c, 0, sizeof c);
    c.logits = mti_view_of(logits);
    c.targets = targets;
    c.desc = *s;
    c.real = mti_real_columns(s, logits.cols);
    c.bulk = mt_max(0, c.real / MTI_VECTOR - 2);
    c.ignore = mti_ignore_index(s->ignore_index);
    return c;
}

/* mti_by_kind, for the type of the logits. */
template <typename Launch> static mt_status mti_ce_by_type(mt_tensor logits, const Launch &f) {
    static_assert(MT_F32 == 0 && MT_BF16 == 1 && MT_F16 == 2, "the float types are the first three");
    return mti_by_kind<3>((int)logits.dtype, f);
}

template <int TYPE> static mt_status mti_ce_stats_launch(mt_context *ctx, const mti_ce &c, mt_tensor logits) {
    MTI_LAUNCH_BLOCKS(mti_ce_stats_kernel<TYPE>, logits.rows, mti_ce_threads(logits.cols), 0, mt_context_stream(ctx),
                      c);
    return mt_cuda_launched(ctx, "mt_cross_entropy_stats");
}

static mt_status mti_cuda_cross_entropy_stats(mt_context *ctx, const mt_cross_entropy_shard_desc *s, mt_tensor logits,
                                              const int32_t *targets, mt_tensor stats) {
    mti_ce c = mti_ce_of(s, logits, targets);
    c.stats = mti_view_of(stats);
    if (logits.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(logits,
                          [&](auto type) { return mti_ce_stats_launch<decltype(type)::value>(ctx, c, logits); });
}

template <int TYPE> static mt_status mti_ce_backward_launch(mt_context *ctx, const mti_ce &c, mt_tensor logits) {
    MTI_LAUNCH_BLOCKS(mti_ce_backward_kernel<TYPE>, logits.rows, mti_ce_threads(logits.cols), 0, mt_context_stream(ctx),
                      c, logits.cols);
    return mt_cuda_launched(ctx, "mt_cross_entropy_backward");
}

template <int TYPE> static mt_status mti_ce_launch(mt_context *ctx, const mti_ce &c, mt_tensor logits, mt_tensor loss) {
    size_t bytes = (size_t)c.bulk * sizeof(mti_fetched<TYPE>), most = 0;
    MT_TRY(mti_shared_most(ctx, &most));
    int keep = bytes <= most;
    if (!keep) bytes = 0;
    MT_TRY(mti_shared_allow(ctx, mti_ce_kernel<TYPE>, bytes));
    MTI_LAUNCH_BLOCKS(mti_ce_kernel<TYPE>, logits.rows, mti_ce_threads(logits.cols), bytes, mt_context_stream(ctx), c,
                      logits.cols, mti_view_of(loss), keep);
    return mt_cuda_launched(ctx, "mt_cross_entropy_forward_backward");
}

static mt_status mti_cuda_cross_entropy(mt_context *ctx, const mt_cross_entropy_shard_desc *s, mt_tensor logits,
                                        const int32_t *targets, mt_tensor dloss, float scale, mt_tensor loss) {
    mti_ce c = mti_ce_of(s, logits, targets);
    c.dloss = mti_ce_dloss(dloss);
    c.scale = scale;
    if (logits.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(logits,
                          [&](auto type) { return mti_ce_launch<decltype(type)::value>(ctx, c, logits, loss); });
}

#define MTI_CE_DEPTH 11 /* levels of the tree over MTI_CE_SHARDS shards */

/* Joins the statistics of all shards for token i in the order of mti_stats_tree, and writes loss and lse. The stack
   holds finished subtrees, like the bits of a binary counter: two subtrees of the same size are joined immediately, and
   the remaining ones at the end, from the right. */
static __device__ void mti_ce_combine(const mti_ce &c, int64_t shards, int64_t tokens, int64_t i,
                                      const mti_view &loss) {
    float stack[MTI_CE_DEPTH][4], x[4];
    int depth = 0;
    for (int64_t s = 0; s <= shards; s++) {
        int64_t joins = s;
        if (s < shards)
            for (int q = 0; q < 4; q++) x[q] = mti_get(c.stats, s * tokens + i, q);
        else if (depth > 0)
            for (int q = 0; q < 4; q++) x[q] = stack[depth - 1][q];
        if (s == shards) depth--; /* at the end, join the remaining subtrees */
        while (depth > 0 && (s == shards || (joins & 1))) {
            float *l = stack[--depth], top = fmaxf(l[0], x[0]);
            x[1] = top == -INFINITY ? l[1] + x[1] : l[1] * expf(l[0] - top) + x[1] * expf(x[0] - top);
            x[0] = top;
            x[2] = l[2] + x[2];
            x[3] = l[3] + x[3];
            joins >>= 1;
        }
        for (int q = 0; q < 4 && s < shards; q++) stack[depth][q] = x[q];
        if (s < shards) depth++;
    }
    float log_sum = logf(x[1]);
    mti_put(loss, 0, i, c.loss_of(i, x[0], log_sum, x[2], x[3]));
    mti_put(c.lse, 0, i, x[0]);
    mti_put(c.lse, 1, i, log_sum);
}

/* Calls mti_ce_combine for all tokens. A thread owns every (grid size)-th token. The kernel uses no shared memory and
   no barrier. Latency limits it: a thread reads 16 bytes of one shard after the other, in few warps. */
static __global__ void __launch_bounds__(128)
    mti_ce_combine_kernel(mti_ce c, int64_t shards, int64_t tokens, mti_view loss) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < tokens; i += step) mti_ce_combine(c, shards, tokens, i, loss);
}

static mt_status mti_cuda_cross_entropy_combine(mt_context *ctx, const mt_cross_entropy_shard_desc *s,
                                                mt_tensor gathered, int64_t shards, const int32_t *targets,
                                                mt_tensor loss, mt_tensor lse) {
    mti_ce c = mti_ce_of(s, gathered, targets);
    c.stats = mti_view_of(gathered);
    c.lse = mti_view_of(lse);
    if (loss.cols == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_ce_combine_kernel, mti_grid(loss.cols, 128), 128, 0, mt_context_stream(ctx), c, shards,
                     loss.cols, mti_view_of(loss));
    return mt_cuda_launched(ctx, "mt_cross_entropy_combine");
}

static mt_status mti_cuda_cross_entropy_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *s,
                                                 mt_tensor logits, const int32_t *targets, mt_tensor lse,
                                                 mt_tensor dloss, float scale) {
    mti_ce c = mti_ce_of(s, logits, targets);
    c.lse = mti_view_of(lse);
    c.dloss = mti_ce_dloss(dloss);
    c.scale = scale;
    if (logits.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(logits,
                          [&](auto type) { return mti_ce_backward_launch<decltype(type)::value>(ctx, c, logits); });
}

} /* extern "C++" */
#endif

/* Notes by what the gradient of a loss is multiplied. */
static mt_status mti_loss_scale_note(mt_context *ctx, const char *where, mt_tensor logits, mt_tensor dloss,
                                     float scale) {
    mt_check_mean(ctx, logits, dloss.data ? (double)NAN : (double)scale);
    return mti_numbers_agree(ctx, where, "scale", mt_none(), 1, 1, (double)scale);
}

/* Notes the numbers of a loss, and the targets, which go with the rows of the logits. */
static mt_status mti_cross_entropy_agree(mt_context *ctx, const char *where, const mt_cross_entropy_shard_desc *desc,
                                         mt_tensor logits, const int32_t *targets) {
    MT_TRY(mti_numbers_agree(ctx, where, "a number of desc", logits, 0, 3, (double)desc->vocab,
                             (double)desc->label_smoothing, (double)desc->ignore_index));
    return mt_check_side(ctx, where, "targets", mt_tensor_make(targets, MT_I32, logits.rows, 1), logits, MT_SPLIT_ROWS,
                         0);
}

/* Checks that ranks with columns of their own take other parts of the vocabulary. */
static mt_status mti_expect_vocabulary(mt_context *ctx, const char *where, const mt_cross_entropy_shard_desc *desc,
                                       mt_tensor logits, const int32_t *targets) {
    mt_place place = {logits.rows, logits.cols, INT64_MAX,  desc->first_col, logits.cols, 1, "part of the vocabulary",
                      0,           0,           desc->vocab};
    MT_TRY(mt_place_check(ctx, where, "desc", "logits", logits, &place));
    return mti_cross_entropy_agree(ctx, where, desc, logits, targets);
}

MT_API mt_status mt_cross_entropy_stats(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor logits,
                                        const int32_t *targets, mt_tensor stats) {
    static const char *const where = "mt_cross_entropy_stats";
    mt_arg args[] = {{"stats", &stats, logits.rows, 4, MT_ARG_F32, MT_ARG_OUT},
                     {"logits", &logits, logits.rows, logits.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS}};
    mti_cross_entropy c;
    mti_operator op;
    MT_TRY(mti_expect_cross_entropy(ctx, where, desc));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_pointer(ctx, where, "targets", targets, logits.rows));
    MT_TRY(mt_check_apart(ctx, where, "stats", stats, "logits", logits));
    MT_TRY(mti_expect_vocabulary(ctx, where, desc, logits, targets));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    c = mti_cross_entropy_of(desc, logits, targets);
    c.stats = stats;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_cross_entropy_stats(ctx, desc, logits, targets, stats),
                                mti_cpu_rows(ctx, logits.rows, logits.cols, mti_cpu_cross_entropy_stats, &c)));
}

MT_API mt_status mt_cross_entropy_combine(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor gathered,
                                          int shards, const int32_t *targets, mt_tensor loss, mt_tensor lse) {
    static const char *const where = "mt_cross_entropy_combine";
    mt_arg args[] = {{"loss", &loss, 1, loss.cols, MT_ARG_F32, MT_ARG_OUT},
                     {"lse", &lse, 2, loss.cols, MT_ARG_F32, MT_ARG_OUT},
                     {"gathered", &gathered, mt_size_mul(shards, loss.cols), 4, MT_ARG_F32, MT_ARG_IN}};
    mti_cross_entropy c;
    mti_operator op;
    MT_TRY(mti_expect_cross_entropy(ctx, where, desc));
    if (shards < 1 || shards > MTI_CE_SHARDS)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: shards is %d, must be 1 to %d", where, shards, MTI_CE_SHARDS);
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_pointer(ctx, where, "targets", targets, loss.cols));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    c = mti_cross_entropy_of(desc, mt_none(), targets);
    c.stats = gathered;
    c.shards = shards;
    c.loss = loss;
    c.lse = lse;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_cross_entropy_combine(ctx, desc, gathered, shards, targets, loss, lse),
                                mti_cpu_rows(ctx, loss.cols, 4 * shards, mti_cpu_cross_entropy_combine, &c)));
}

MT_API mt_status mt_cross_entropy_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor logits,
                                           const int32_t *targets, mt_tensor lse, mt_tensor dloss, float scale) {
    static const char *const where = "mt_cross_entropy_backward";
    mt_arg args[] = {{"logits", &logits, logits.rows, logits.cols, MT_ARG_FLOAT, MT_ARG_GRADIENT | MTI_AS_IS},
                     {"lse", &lse, 2, logits.rows, MT_ARG_F32, MT_ARG_IN},
                     {"dloss", &dloss, 1, dloss.cols == 1 ? 1 : logits.rows, MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL}};
    mti_cross_entropy c;
    mti_operator op;
    MT_TRY(mti_expect_cross_entropy(ctx, where, desc));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_pointer(ctx, where, "targets", targets, logits.rows));
    MT_TRY(mti_expect_vocabulary(ctx, where, desc, logits, targets));
    MT_TRY(mti_loss_scale_note(ctx, where, logits, dloss, scale));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    c = mti_cross_entropy_of(desc, logits, targets);
    c.lse = lse;
    c.dloss = dloss;
    c.scale = scale;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_cross_entropy_backward(ctx, desc, logits, targets, lse, dloss, scale),
                                mti_cpu_rows(ctx, logits.rows, logits.cols, mti_cpu_cross_entropy_backward, &c)));
}

MT_API mt_status mt_cross_entropy_forward_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *desc,
                                                   mt_tensor logits, const int32_t *targets, mt_tensor dloss,
                                                   float scale, mt_tensor loss) {
    static const char *const where = "mt_cross_entropy_forward_backward";
    mt_arg args[] = {{"logits", &logits, logits.rows, logits.cols, MT_ARG_FLOAT, MT_ARG_GRADIENT | MTI_AS_IS},
                     {"loss", &loss, 1, logits.rows, MT_ARG_F32, MT_ARG_OUT},
                     {"dloss", &dloss, 1, dloss.cols == 1 ? 1 : logits.rows, MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL}};
    mti_cross_entropy c;
    mti_operator op;
    MT_TRY(mti_expect_cross_entropy(ctx, where, desc));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    if (desc->first_col != 0 || logits.cols < desc->vocab)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld columns from %lld on are only a part of a vocabulary of %lld",
                       where, (long long)logits.cols, (long long)desc->first_col, (long long)desc->vocab);
    MT_TRY(mti_expect_pointer(ctx, where, "targets", targets, logits.rows));
    MT_TRY(mti_cross_entropy_agree(ctx, where, desc, logits, targets));
    MT_TRY(mti_loss_scale_note(ctx, where, logits, dloss, scale));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    c = mti_cross_entropy_of(desc, logits, targets);
    c.loss = loss;
    c.dloss = dloss;
    c.scale = scale;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_cross_entropy(ctx, desc, logits, targets, dloss, scale, loss),
                                mti_cpu_rows(ctx, logits.rows, logits.cols, mti_cpu_cross_entropy, &c)));
}

/* ---- >>sample: the next token ------------------------------------------------------------------------------------ */

/* The order of tokens: the largest logit first, then the lowest id. The token with the larger number is before the
   other. NaN is before all logits, and -0 equals 0. */
MT_INLINE MT_HOST_DEVICE uint64_t mti_sample_order(float x, int32_t id) {
    uint32_t bits = mt_f32_bits(x + 0.0f);
    bits = x != x ? 0xffffffffu : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)id);
}

/* The logit of a token, from its order. */
static MT_HOST_DEVICE float mti_sample_logit(uint64_t order) {
    uint32_t bits = (uint32_t)(order >> 32);
    return mt_f32_from_bits(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu));
}

/* The probability of a token relative to that of the first one, in units of 2^-32. Sums of these integers do not depend
   on the order of additions. sharp is 1 / temperature. */
static MT_HOST_DEVICE uint64_t mti_sample_mass(float x, float top, double sharp) {
    double d = x == top ? 0.0 : ((double)x - (double)top) * sharp;
    return d > -100.0 ? (uint64_t)((double)mti_exp((float)d) * 4294967296.0) : 0;
}

/* A number of the Gumbel distribution, from a random word. It is below MTI_GUMBEL_MOST. */
#define MTI_GUMBEL_MOST 23.0
static MT_HOST_DEVICE double mti_gumbel(uint32_t word) {
    return -log(-log1p(-((double)word + 0.5) * 2.3283064365386963e-10));
}

/* Returns the largest word with which a logit may reach the score `best`: gap is logit / temperature - best. This is a
   bound: -log(-log(1 - v)) < -log(v). */
static MT_HOST_DEVICE uint32_t mti_sample_most(double gap) {
    double most = 0.0;
    if (!(gap < 0.0)) return 0xffffffffu;
    if (gap > -MTI_GUMBEL_MOST) most = (double)mti_exp((float)gap) * (4294967296.0 * 1.00001) + 1.0;
    return most < 4294967295.0 ? (uint32_t)most : 0xffffffffu;
}

/* A radix search through the orders of tokens takes MTI_SAMPLE_DIGITS passes, with digits of 11, 11 and 10 bits of the
   logit, then of the id. */
#define MTI_SAMPLE_DIGITS 6
#define MTI_SAMPLE_BINS 2048
static MT_HOST_DEVICE int mti_sample_shift(int digit) {
    int low = digit % 3 == 2 ? 0 : 21 - digit % 3 * 11;
    return digit < 3 ? low + 32 : low;
}
static MT_HOST_DEVICE uint64_t mti_sample_mask(int digit) { return digit % 3 == 2 ? 1023 : 2047; }

/* Whether the first token is taken, without random numbers. */
static int mti_sample_greedy(const mt_sample_desc *s) {
    return s->temperature == 0.0f || s->top_k == 1 || s->top_p == (float)MT_ZERO;
}

MT_API int64_t mt_sample_count(const mt_sample_desc *desc, int64_t cols) {
    int all_p;
    if (!desc || cols < 1) return 0;
    all_p = desc->top_p == 0.0f || desc->top_p == 1.0f;
    if (mti_sample_greedy(desc) || (desc->top_k == 0 && all_p)) return 1;
    return desc->top_k > 0 ? mt_min(desc->top_k, cols) : cols;
}

MT_API mt_status mt_sample_check(mt_context *ctx, const char *function, const mt_sample_desc *desc) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", function);
    MT_TRY(mt_check_float(ctx, function, NULL, "temperature", desc->temperature, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_integer(ctx, function, NULL, "top_k", desc->top_k, 0, INT64_MAX));
    if (!(desc->top_p >= 0.0f && desc->top_p <= 1.0f) && desc->top_p != (float)MT_ZERO)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: top_p is %g, must be from 0 to 1", function, (double)desc->top_p);
    return mt_check_integer(ctx, function, NULL, "position", desc->position, 0, INT32_MAX);
}

static mt_status mti_expect_sample(mt_context *ctx, const char *where, const mt_sample_desc *s, int64_t vocab) {
    MT_TRY(mt_sample_check(ctx, where, s));
    return mt_check_size(ctx, where, NULL, "vocab", vocab, 1, INT32_MAX);
}

static double mti_sample_sharp(const mt_sample_desc *s) {
    return s->temperature > 0.0f ? 1.0 / (double)s->temperature : 1.0;
}

/* The number of columns of a shard that are not padding. */
static int64_t mti_sample_columns(int64_t vocab, int64_t first_col, int64_t cols) {
    return mt_max(0, mt_min(cols, vocab - first_col));
}

/* The random words of a row: its element `id` is token `id`. */
static MT_HOST_DEVICE mt_random mti_sample_random(const mt_sample_desc *s, int64_t vocab, int64_t row) {
    mt_random at = {0, 0, 0, 0, 0, NULL};
    at.seed = s->seed;
    at.subsequence = s->sequences ? s->sequences[row] : s->first_sequence + (uint64_t)row;
    at.first_row = s->position + (s->positions ? s->positions[row] : 0);
    at.global_cols = vocab;
    return at;
}

/* The tokens of a row on a CPU: columns of a shard, or gathered candidates. These are in several parts, one of each
   shard. */
typedef struct mti_sample_row {
    mt_tensor x;
    int64_t row, step;   /* part s is row `row + s * step` of x */
    int64_t parts, cols; /* tokens of a part */
    int64_t first;       /* the id of the first column, or -1: the ids are behind the logits */
} mti_sample_row;

static int32_t mti_sample_id(const mti_sample_row *r, const float *x, int64_t j) {
    int32_t id;
    if (r->first >= 0) return (int32_t)(r->first + j);
    memcpy(&id, x + r->cols + j, sizeof id);
    return id;
}

/* What is known of the tokens that a row keeps. */
typedef struct mti_sample_kept {
    uint64_t from; /* a token is kept if its order is not below this */
    int64_t count;
    uint64_t first; /* the largest order */
} mti_sample_kept;

/* Counts the tokens that are kept, and finds the first one. */
static void mti_sample_look(const mti_sample_row *r, mti_sample_kept *kept) {
    int64_t s, j;
    kept->count = 0;
    kept->first = 0;
    for (s = 0; s < r->parts; s++) {
        const float *x = mti_row(r->x, r->row + s * r->step);
        for (j = 0; j < r->cols; j++) {
            int32_t id = mti_sample_id(r, x, j);
            uint64_t order = mti_sample_order(x[j], id);
            if (id < 0 || order < kept->from) continue;
            kept->count++;
            if (order > kept->first) kept->first = order;
        }
    }
}

/* Adds the weights of the tokens whose order begins with the digits in `known`, in bins by their next digit. The weight
   is the mass of the token, or 1 if sharp is 0. Bits of `known` that are set in `mask` count. */
static void mti_sample_weigh(const mti_sample_row *r, const mti_sample_kept *kept, double sharp, uint64_t known,
                             uint64_t mask, int digit, uint64_t *bins) {
    int shift = mti_sample_shift(digit);
    uint64_t low = mti_sample_mask(digit);
    float top = mti_sample_logit(kept->first);
    int64_t s, j;
    for (s = 0; s < r->parts; s++) {
        const float *x = mti_row(r->x, r->row + s * r->step);
        for (j = 0; j < r->cols; j++) {
            int32_t id = mti_sample_id(r, x, j);
            uint64_t order = mti_sample_order(x[j], id);
            if (id < 0 || order < kept->from || ((order ^ known) & mask)) continue;
            bins[order >> shift & low] += sharp > 0.0 ? mti_sample_mass(x[j], top, sharp) : 1;
        }
    }
}

/* Returns the mass that top_p keeps of `mass`: the tokens before the last kept one have less. */
static MT_HOST_DEVICE uint64_t mti_sample_target(float top_p, uint64_t mass) {
    uint64_t target = (uint64_t)ceil((double)top_p * (double)mass);
    return target > 0 ? target : 1;
}

static uint64_t mti_sample_sum(const uint64_t *bins) {
    uint64_t sum = 0;
    int bin;
    for (bin = 0; bin < MTI_SAMPLE_BINS; bin++) sum += bins[bin];
    return sum;
}

/* Keeps the first top_k tokens or, if sharp is not 0, the first ones that have top_p of the mass. Each pass finds the
   next digit of the last of them. */
static void mti_sample_limit(const mti_sample_row *r, mti_sample_kept *kept, double sharp, int64_t top_k, float top_p) {
    uint64_t bins[MTI_SAMPLE_BINS], known = 0, mask = 0, above = 0, target = (uint64_t)top_k;
    int digit, bin;
    for (digit = 0; digit < MTI_SAMPLE_DIGITS; digit++) {
        memset(bins, 0, sizeof bins);
        mti_sample_weigh(r, kept, sharp, known, mask, digit, bins);
        if (digit == 0 && sharp > 0.0) target = mti_sample_target(top_p, mti_sample_sum(bins));
        for (bin = (int)mti_sample_mask(digit); bin > 0 && above + bins[bin] < target; bin--) above += bins[bin];
        known |= (uint64_t)bin << mti_sample_shift(digit);
        mask |= mti_sample_mask(digit) << mti_sample_shift(digit);
        if (sharp == 0.0 && above + bins[bin] == target) break; /* all tokens of the bin */
    }
    kept->from = known;
}

/* Finds the tokens of gathered candidates that top_k and top_p keep. */
static void mti_sample_keep(const mt_sample_desc *s, const mti_sample_row *r, mti_sample_kept *kept) {
    mti_sample_look(r, kept);
    if (mti_sample_greedy(s) || kept->count < 2 || kept->first >> 32 == 0xffffffffu) return;
    if (s->top_k > 0 && s->top_k < kept->count) mti_sample_limit(r, kept, 0.0, s->top_k, 0.0f);
    if (s->top_p > 0.0f && s->top_p < 1.0f) mti_sample_limit(r, kept, mti_sample_sharp(s), 0, s->top_p);
}

/* A draw from the tokens of a row, one run of consecutive ids after the other. */
typedef struct mti_draw {
    mt_random at;
    double sharp, best; /* 1 / temperature, and the largest score so far */
    int noisy;          /* 0: no random numbers */
    int32_t id;         /* the token of this score, or -1 */
    float logit;        /* NaN: the row has one */
} mti_draw;

static mti_draw mti_draw_begin(const mt_sample_desc *s, int64_t vocab, int64_t row) {
    mti_draw d;
    d.at = mti_sample_random(s, vocab, row);
    d.sharp = mti_sample_sharp(s);
    d.noisy = !mti_sample_greedy(s);
    d.best = -(double)INFINITY;
    d.id = -1;
    d.logit = -(float)INFINITY;
    return d;
}

/* Returns the number of the first NaN, or n. */
static int64_t mti_row_nan(const float *x, int64_t n) {
    int64_t j;
    int any = 0;
    for (j = 0; j < n; j++) any |= x[j] != x[j];
    for (j = any ? 0 : n; j < n && x[j] == x[j];) j++;
    return j;
}

/* Draws from at most MTI_WORDS tokens. Most of them cannot reach the best score, which their random word shows. */
static void mti_draw_block(mti_draw *d, const float *x, int64_t n, int32_t id) {
    uint32_t room[MTI_WORDS_ROOM], most = 0xffffffffu;
    const uint32_t *words = NULL;
    double top = (double)mti_row_max(x, n) * d->sharp;
    int64_t j;
    if (d->id >= 0 && top + (d->noisy ? MTI_GUMBEL_MOST : 0.0) < d->best) return;
    if (d->noisy) {
        words = mti_random_words(d->at, mti_random_element(d->at, 0, id), n, room);
        most = mti_sample_most(top - d->best);
    }
    for (j = 0; j < n; j++) {
        double score;
        if (words && words[j] > most) continue;
        score = (double)x[j] * d->sharp + (words ? mti_gumbel(words[j]) : 0.0);
        if (d->id >= 0 && (score < d->best || (score == d->best && id + (int32_t)j > d->id))) continue;
        d->best = score;
        d->id = id + (int32_t)j;
        d->logit = x[j];
    }
}

static void mti_draw_run(mti_draw *d, const float *x, int64_t n, int32_t id) {
    int64_t j, wrong;
    for (j = 0; j < n && d->logit == d->logit; j += MTI_WORDS) {
        int64_t count = mt_min(MTI_WORDS, n - j);
        wrong = mti_row_nan(x + j, count);
        if (wrong == count) {
            mti_draw_block(d, x + j, count, id + (int32_t)j);
            continue;
        }
        d->id = id + (int32_t)(j + wrong);
        d->logit = x[j + wrong];
    }
}

/* Draws from the tokens that are kept, in runs of consecutive ids. */
static void mti_draw_kept(mti_draw *d, const mti_sample_row *r, uint64_t from) {
    int64_t s, j, n;
    for (s = 0; s < r->parts; s++) {
        const float *x = mti_row(r->x, r->row + s * r->step);
        for (j = 0; j < r->cols; j += mt_max(n, 1)) {
            int32_t id = mti_sample_id(r, x, j);
            for (n = 0; id >= 0 && j + n < r->cols; n++)
                if (mti_sample_id(r, x, j + n) != id + n || mti_sample_order(x[j + n], id + (int32_t)n) < from) break;
            mti_draw_run(d, x + j, n, id);
        }
    }
}

/* Writes the tokens of a shard that are kept, in k places. */
static void mti_sample_write(const mti_sample_row *r, uint64_t from, int64_t k, float *out) {
    const float *x = mti_row(r->x, r->row);
    int32_t none = -1;
    int64_t j, n = 0;
    for (j = 0; j < r->cols && n < k; j++) {
        int32_t id = mti_sample_id(r, x, j);
        if (mti_sample_order(x[j], id) < from) continue;
        memcpy(out + k + n, &id, sizeof id);
        out[n++] = x[j];
    }
    for (; n < k; n++) {
        out[n] = -(float)INFINITY;
        memcpy(out + k + n, &none, sizeof none);
    }
}

/* The arguments of the loops. tokens.row is not used: each row sets it in a copy. */
typedef struct mti_sample_loop {
    const mt_sample_desc *desc;
    int64_t vocab;
    mti_sample_row tokens;
    mt_tensor candidates; /* of mt_sample_candidates */
    int32_t *ids;         /* of mt_sample_ids; -1 for a row with a NaN */
} mti_sample_loop;

static void mti_sample_candidates_row(const mti_sample_loop *l, int64_t i) {
    mti_draw d = mti_draw_begin(l->desc, l->vocab, i);
    mti_sample_kept kept = {0, 0, 0};
    mti_sample_row r = l->tokens;
    float *out = mti_row(l->candidates, i);
    int64_t k = l->candidates.cols / 2;
    r.row = i;
    if (k > 1 && k < r.cols) mti_sample_limit(&r, &kept, 0.0, k, 0.0f);
    if (k > 1 || r.cols < 1) {
        mti_sample_write(&r, kept.from, k, out);
        return;
    }
    mti_draw_run(&d, mti_row(r.x, i), r.cols, (int32_t)r.first);
    out[0] = d.logit;
    memcpy(out + 1, &d.id, sizeof d.id);
}

static void mti_cpu_sample_candidates(void *data, int thread, int64_t first, int64_t last) {
    const mti_sample_loop *l = (const mti_sample_loop *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_sample_candidates_row(l, i);
}

static void mti_cpu_sample_ids(void *data, int thread, int64_t first, int64_t last) {
    const mti_sample_loop *l = (const mti_sample_loop *)data;
    mti_sample_row r = l->tokens;
    (void)thread;
    for (r.row = first; r.row < last; r.row++) {
        mti_draw d = mti_draw_begin(l->desc, l->vocab, r.row);
        mti_sample_kept kept = {0, 0, 0};
        mti_sample_keep(l->desc, &r, &kept);
        mti_draw_kept(&d, &r, kept.from);
        l->ids[r.row] = d.logit == d.logit ? d.id : -1;
    }
}

/* Returns the number of the first row with a NaN, or rows. */
static int64_t mti_sample_wrong(const int32_t *ids, int64_t rows) {
    int64_t i;
    for (i = 0; i < rows && ids[i] >= 0;) i++;
    return i;
}

#if MT_HAS_CUDA
extern "C++" {

/* The tokens of a row for a kernel, as in mti_sample_row. `cols` are those of a part, `count` those of all parts. */
struct mti_sample_source {
    mti_view x;
    int64_t row, step, cols, count, first;

    /* Returns logit c and stores its id, which is -1 where there is no candidate. */
    template <int TYPE> __device__ __forceinline__ float get(int64_t c, int32_t *id) const {
        if (first >= 0) {
            *id = (int32_t)(first + c);
            return mti_get<TYPE>(x, row, c);
        }
        int64_t part = mt_divide(c, cols);
        const float *p = (const float *)x.data + (row + part * step) * x.ld + c - part * cols;
        *id = __float_as_int(p[cols]);
        return *p;
    }
};

/* The arguments of the kernels. */
struct mti_sampling {
    mt_sample_desc desc;
    int64_t vocab;
    double sharp;
    int greedy;
};

#define MTI_SAMPLE_THREADS 512

/* Returns the maximum, or the sum, of v over the block to all threads. shared has an element for each warp. The
   barriers separate its use from that before and after. */
template <int SUM>
static __device__ __forceinline__ unsigned long long mti_sample_total(unsigned long long v,
                                                                      unsigned long long *shared) {
    for (int o = 16; o > 0; o >>= 1) {
        unsigned long long other = __shfl_xor_sync(0xffffffffu, v, o);
        v = SUM ? v + other : v > other ? v : other;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
    __syncthreads();
    v = shared[0];
    for (int w = 1; w < (int)blockDim.x / 32; w++) v = SUM ? v + shared[w] : v > shared[w] ? v : shared[w];
    return v;
}

/* Finds the bin in which the weights of the bins, from the last one on, reach `target`: found[0] = its number, found[1]
   = the weight of those behind it, found[2] = its own. One warp owns all bins, a lane a 32nd of them. Without such a
   bin it is bin 0. */
template <typename Bin>
static __device__ void mti_sample_find(const Bin *bins, unsigned long long target, unsigned long long *found) {
    int lane = (int)threadIdx.x, last = MTI_SAMPLE_BINS - 1 - lane * (MTI_SAMPLE_BINS / 32), bin = last;
    unsigned long long sum = 0, before, up;
    for (int b = 0; b < MTI_SAMPLE_BINS / 32; b++) sum += bins[last - b];
    before = sum;
    for (int o = 1; o < 32; o *= 2) {
        up = __shfl_up_sync(0xffffffffu, before, o);
        if (lane >= o) before += up;
    }
    unsigned reached = __ballot_sync(0xffffffffu, before >= target);
    before -= sum;
    if (lane != (reached ? __ffs((int)reached) - 1 : 31)) return;
    for (; bin > last - MTI_SAMPLE_BINS / 32 + 1 && before + bins[bin] < target; bin--) before += bins[bin];
    found[0] = (unsigned long long)bin;
    found[1] = before;
    found[2] = bins[bin];
}

/* As mti_sample_limit: returns the order of the last token that is kept, of those from `from` on. Bin is unsigned for
   counts (sharp is 0), and unsigned long long for masses relative to the logit `top`. Barriers separate clearing the
   bins, adding to them, finding the digit in them, and reading this digit. Additions of integers give the same bins in
   any order. */
template <int TYPE, typename Bin>
static __device__ uint64_t mti_sample_search(const mti_sample_source &src, uint64_t from, float top, double sharp,
                                             unsigned long long target, Bin *bins, unsigned long long *found) {
    uint64_t known = 0, mask = 0;
    for (int digit = 0; digit < MTI_SAMPLE_DIGITS; digit++) {
        int shift = mti_sample_shift(digit);
        uint64_t low = mti_sample_mask(digit);
        __syncthreads();
        for (int b = (int)threadIdx.x; b < MTI_SAMPLE_BINS; b += (int)blockDim.x) bins[b] = 0;
        __syncthreads();
        for (int64_t c = threadIdx.x; c < src.count; c += blockDim.x) {
            int32_t id;
            float x = src.get<TYPE>(c, &id);
            uint64_t order = mti_sample_order(x, id);
            if (id < 0 || order < from || ((order ^ known) & mask)) continue;
            atomicAdd(&bins[order >> shift & low], (Bin)(sharp > 0.0 ? mti_sample_mass(x, top, sharp) : 1));
        }
        __syncthreads();
        if (threadIdx.x < 32) mti_sample_find(bins, target, found);
        __syncthreads();
        known |= (uint64_t)found[0] << shift;
        mask |= low << shift;
        target -= found[1];
        if (sharp == 0.0 && found[2] == target) break; /* all tokens of the bin */
    }
    return known;
}

/* The best token that a thread knows. `rank` orders scores; that of NaN is the largest. */
struct mti_sample_best {
    double score;
    unsigned long long rank;
    int32_t id;
    float logit;

    __device__ __forceinline__ void take(float x, int32_t token, double with) {
        unsigned long long bits = (unsigned long long)__double_as_longlong(with + 0.0);
        bits = x != x ? ~0ull : bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
        if (id >= 0 && (bits < rank || (bits == rank && token > id))) return;
        score = x != x ? (double)INFINITY : with;
        rank = bits;
        id = token;
        logit = x;
    }
};

/* Draws from the tokens whose order is at least `from`, and returns what the thread knows of them. A lane owns four
   tokens with the same Philox block, or one candidate. Most tokens cannot reach the best score of the warp, which their
   random word shows, so the logarithms in double are rare. */
template <int TYPE>
static __device__ mti_sample_best mti_sample_part(const mti_sampling &s, const mti_sample_source &src, mt_random at,
                                                  uint64_t from) {
    mti_sample_best own = {-(double)INFINITY, 0, -1, -INFINITY};
    int gathered = src.first < 0;
    uint64_t e = (uint64_t)(at.first_row * at.global_cols) + (gathered ? 0 : (uint64_t)src.first);
    int64_t skip = gathered ? 0 : (int64_t)(e & 3), units = gathered ? src.count : (skip + src.count + 3) / 4;
    double best = own.score;
    for (int64_t base = threadIdx.x & ~31u; base < units; base += blockDim.x) {
        int64_t unit = base + (threadIdx.x & 31);
        uint32_t words[4] = {0, 0, 0, 0}, most = 0xffffffffu;
        float x[4], top = -INFINITY;
        int32_t id[4];
        int any = 0;
        MT_DEVICE_UNROLL
        for (int j = 0; j < 4; j++) {
            int64_t c = gathered ? unit : 4 * unit - skip + j;
            id[j] = -1, x[j] = -INFINITY;
            if (unit < units && c >= 0 && c < src.count && !(gathered && j > 0)) x[j] = src.get<TYPE>(c, &id[j]);
            if (id[j] >= 0 && mti_sample_order(x[j], id[j]) < from) id[j] = -1;
            if (id[j] < 0) continue;
            any = 1;
            top = x[j] != x[j] ? INFINITY : fmaxf(top, x[j]);
        }
        double gap = (double)top * s.sharp - best;
        any = any && !(gap < (s.greedy ? 0.0 : -MTI_GUMBEL_MOST));
        if (!__any_sync(0xffffffffu, any)) continue;
        if (any && !s.greedy) {
            uint64_t block = gathered ? (e + (uint64_t)id[0]) >> 2 : (e >> 2) + (uint64_t)unit;
            mti_philox(block, mti_subsequence(&at), at.seed, words);
            if (gathered) words[0] = words[(e + (uint64_t)id[0]) & 3];
            most = mti_sample_most(gap);
        }
        MT_DEVICE_UNROLL
        for (int j = 0; j < 4; j++)
            if (any && id[j] >= 0 && (words[j] <= most || x[j] != x[j]))
                own.take(x[j], id[j], (double)x[j] * s.sharp + (s.greedy ? 0.0 : mti_gumbel(words[j])));
        best = own.score;
        for (int o = 16; o > 0; o >>= 1) best = fmax(best, __shfl_xor_sync(0xffffffffu, best, o));
    }
    return own;
}

/* Returns the token that the block draws to every thread: its id, or -1, and its logit. */
template <int TYPE>
static __device__ mti_sample_best mti_sample_draw(const mti_sampling &s, const mti_sample_source &src, mt_random at,
                                                  uint64_t from, unsigned long long *shared) {
    mti_sample_best own = mti_sample_part<TYPE>(s, src, at, from);
    unsigned long long mine = own.id < 0 ? 0 : own.rank, most = mti_sample_total<0>(mine, shared);
    unsigned long long low = own.id >= 0 && own.rank == most ? 0xffffffffull - (unsigned)own.id : 0;
    unsigned long long lowest = mti_sample_total<0>(low, shared);
    unsigned long long bits = low == lowest && low ? mt_f32_bits(own.logit) : 0;
    bits = mti_sample_total<0>(bits, shared);
    own.id = lowest ? (int32_t)(0xffffffffull - lowest) : -1;
    own.logit = mt_f32_from_bits((uint32_t)bits);
    return own;
}

/* Writes the tokens whose order is at least `from` in k places, by increasing column. A warp owns a part of the
   columns. It counts its tokens, then the warps' counts in `shared` say where it writes. */
template <int TYPE>
static __device__ void mti_sample_store(const mti_sample_source &src, uint64_t from, int64_t k, float *out,
                                        unsigned long long *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x / 32;
    int64_t span = (src.count + 32 * warps - 1) / (32 * warps) * 32, begin = warp * span, n = 0, total = 0;
    int64_t end = begin + span < src.count ? begin + span : src.count;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t base = begin; base < end; base += 32) {
            int32_t id = -1;
            float x = base + lane < end ? src.get<TYPE>(base + lane, &id) : 0.0f;
            unsigned kept = __ballot_sync(0xffffffffu, id >= 0 && mti_sample_order(x, id) >= from);
            int64_t at = n + __popc(kept & ((1u << lane) - 1));
            if (pass == 1 && (kept >> lane & 1) && at < k) {
                out[at] = x;
                out[k + at] = __int_as_float(id);
            }
            n += __popc(kept);
        }
        if (pass == 1) break;
        __syncthreads();
        if (lane == 0) shared[warp] = (unsigned long long)n;
        __syncthreads();
        n = 0;
        for (int w = 0; w < warps; w++) {
            if (w < warp) n += (int64_t)shared[w];
            total += (int64_t)shared[w];
        }
    }
    for (int64_t at = total + threadIdx.x; at < k; at += blockDim.x) {
        out[at] = -INFINITY;
        out[k + at] = __int_as_float(-1);
    }
}

/* A block owns row first + blockIdx.x. Without top_k and top_p it draws a token. Otherwise it finds the order of the
   last of k tokens, and writes them. The barriers are those of the functions that it calls. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_SAMPLE_THREADS)
    mti_sample_candidates_kernel(int64_t first, mti_sampling s, mti_sample_source src, mti_view candidates, int64_t k) {
    MT_SHARED(unsigned, bins, MTI_SAMPLE_BINS);
    MT_SHARED(unsigned long long, shared, 32);
    uint64_t from = 0;
    src.row = first + blockIdx.x;
    float *out = (float *)candidates.data + src.row * candidates.ld;
    if (k == 1) {
        mti_sample_best best = mti_sample_draw<TYPE>(s, src, mti_sample_random(&s.desc, s.vocab, src.row), 0, shared);
        if (threadIdx.x > 0) return;
        out[0] = best.id < 0 ? -INFINITY : best.logit;
        out[1] = __int_as_float(best.id);
        return;
    }
    if (k < src.count) from = mti_sample_search<TYPE>(src, 0, 0.0f, 0.0, (unsigned long long)k, bins, shared);
    mti_sample_store<TYPE>(src, from, k, out, shared);
}

/* Draws the token of row first + blockIdx.x, which the block owns, from its candidates. A NaN is the first of all
   orders. The barriers are those of the functions that it calls. */
static __global__ void __launch_bounds__(MTI_SAMPLE_THREADS)
    mti_sample_ids_kernel(int64_t first, mti_sampling s, mti_sample_source src, int32_t *ids) {
    MT_SHARED(unsigned long long, bins, MTI_SAMPLE_BINS);
    MT_SHARED(unsigned long long, shared, 32);
    uint64_t from = 0, top = 0;
    unsigned long long count = 0, mass = 0;
    src.row = first + blockIdx.x;
    for (int64_t c = threadIdx.x; c < src.count; c += blockDim.x) {
        int32_t id;
        float x = src.get<MT_F32>(c, &id);
        uint64_t order = mti_sample_order(x, id);
        if (id < 0) continue;
        count++;
        top = order > top ? order : top;
    }
    top = mti_sample_total<0>(top, shared);
    count = mti_sample_total<1>(count, shared);
    int wrong = count == 0 || top >> 32 == 0xffffffffu;
    float most = mti_sample_logit(top);
    if (!wrong && !s.greedy && s.desc.top_k > 0 && (unsigned long long)s.desc.top_k < count)
        from = mti_sample_search<MT_F32>(src, 0, most, 0.0, (unsigned long long)s.desc.top_k, bins, shared);
    if (!wrong && !s.greedy && s.desc.top_p > 0.0f && s.desc.top_p < 1.0f) {
        for (int64_t c = threadIdx.x; c < src.count; c += blockDim.x) {
            int32_t id;
            float x = src.get<MT_F32>(c, &id);
            if (id >= 0 && mti_sample_order(x, id) >= from) mass += mti_sample_mass(x, most, s.sharp);
        }
        mass = mti_sample_total<1>(mass, shared);
        from = mti_sample_search<MT_F32>(src, from, most, s.sharp, mti_sample_target(s.desc.top_p, mass), bins, shared);
    }
    mti_sample_best best = mti_sample_draw<MT_F32>(s, src, mti_sample_random(&s.desc, s.vocab, src.row), from, shared);
    if (threadIdx.x == 0) ids[src.row] = wrong ? -1 : best.id;
}

static mti_sampling mti_sampling_of(const mt_sample_desc *desc, int64_t vocab) {
    mti_sampling s;
    s.desc = *desc;
    s.vocab = vocab;
    s.sharp = mti_sample_sharp(desc);
    s.greedy = mti_sample_greedy(desc);
    return s;
}

static mti_sample_source mti_sample_source_of(mt_tensor x, int64_t step, int64_t cols, int64_t parts, int64_t first) {
    mti_sample_source src;
    src.x = mti_view_of(x);
    src.row = 0;
    src.step = step;
    src.cols = cols;
    src.count = parts * cols;
    src.first = first;
    return src;
}

static unsigned mti_sample_threads(int64_t count) {
    return (unsigned)mt_max(32, mt_min(MTI_SAMPLE_THREADS, mt_round_up((count + 3) / 4, 32)));
}

static mt_status mti_cuda_sample_candidates(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab,
                                            int64_t first_col, mt_tensor logits, mt_tensor candidates) {
    int64_t cols = mti_sample_columns(vocab, first_col, logits.cols), k = candidates.cols / 2;
    mti_sample_source src = mti_sample_source_of(logits, 0, cols, 1, first_col);
    mti_sampling s = mti_sampling_of(desc, vocab);
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(logits, [&](auto type) {
        MTI_LAUNCH_BLOCKS(mti_sample_candidates_kernel<decltype(type)::value>, logits.rows, mti_sample_threads(cols), 0,
                          mt_context_stream(ctx), s, src, mti_view_of(candidates), k);
        return mt_cuda_launched(ctx, "mt_sample_candidates");
    });
}

static mt_status mti_cuda_sample_ids(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, mt_tensor gathered,
                                     int64_t shards, int32_t *ids) {
    int64_t rows = gathered.rows / shards;
    mti_sample_source src = mti_sample_source_of(gathered, rows, gathered.cols / 2, shards, -1);
    mti_sampling s = mti_sampling_of(desc, vocab);
    MT_TRY(mt_cuda_enter(ctx));
    MTI_LAUNCH_BLOCKS(mti_sample_ids_kernel, rows, mti_sample_threads(4 * src.count), 0, mt_context_stream(ctx), s, src,
                      ids);
    return mt_cuda_launched(ctx, "mt_sample_ids");
}

} /* extern "C++" */
#endif

MT_API mt_status mt_sample_candidates(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, int64_t first_col,
                                      mt_tensor logits, mt_tensor candidates) {
    static const char *const where = "mt_sample_candidates";
    mt_arg args[] = {{"candidates", &candidates, logits.rows, mt_size_mul(2, mt_sample_count(desc, logits.cols)),
                      MT_ARG_F32, MT_ARG_OUT},
                     {"logits", &logits, logits.rows, logits.cols, MT_ARG_FLOAT, MT_ARG_IN}};
    mti_operator op;
    MT_TRY(mti_expect_sample(ctx, where, desc, vocab));
    MT_TRY(mt_check_size(ctx, where, NULL, "first_col", first_col, 0, INT64_MAX));
    MT_TRY(mt_args_check(ctx, where, &args[1], 1));
    MT_TRY(mt_args_check(ctx, where, args, 1));
    MT_TRY(mt_check_apart(ctx, where, "candidates", candidates, "logits", logits));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    const int64_t cols = mti_sample_columns(vocab, first_col, logits.cols);
    mti_sample_loop l = {desc, vocab, {logits, 0, 0, 1, cols, first_col}, candidates, NULL};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_sample_candidates(ctx, desc, vocab, first_col, logits, candidates),
                                mti_cpu_rows(ctx, logits.rows, logits.cols, mti_cpu_sample_candidates, &l)));
}

/* Applies the rule of mt_sample_ids. The ids are an operand, too. */
static mt_status mti_sample_rule(mt_context *ctx, const char *where, const mt_arg *gathered, mt_tensor ids) {
    mt_arg all[2];
    memset(all, 0, sizeof all);
    all[0] = *gathered;
    all[1].name = "ids";
    all[1].view = &ids;
    all[1].use = MT_ARG_OUT;
    return mti_apply_rule_of(ctx, where, all, 2);
}

MT_API mt_status mt_sample_ids(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, mt_tensor gathered,
                               int shards, int32_t *ids) {
    static const char *const where = "mt_sample_ids";
    mt_arg args[] = {{"gathered", &gathered, gathered.rows, gathered.cols, MT_ARG_F32, MT_ARG_IN}};
    mti_operator op;
    MT_TRY(mti_expect_sample(ctx, where, desc, vocab));
    MT_TRY(mt_check_integer(ctx, where, NULL, "shards", shards, 1, INT32_MAX));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    if (gathered.rows % shards != 0 || gathered.cols % 2 != 0 || gathered.cols < 2)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: gathered is [%lld, %lld], must be [%d * rows, 2 * candidates]", where,
                       (long long)gathered.rows, (long long)gathered.cols, shards);
    const int64_t rows = gathered.rows / shards;
    MT_TRY(mti_expect_pointer(ctx, where, "ids", ids, rows));
    MT_TRY(mti_sample_rule(ctx, where, args, mt_tensor_make(ids, MT_I32, rows, 1)));
    MT_TRY(mti_begin_ruled(&op, ctx, where, args, MTI_COUNT(args)));
    op.work.bytes += (double)rows * sizeof *ids;
    mti_sample_loop l = {desc, vocab, {gathered, 0, rows, shards, gathered.cols / 2, -1}, mt_none(), ids};
    MT_TRY(mti_end(&op, MTI_RUN(&op, mti_cuda_sample_ids(ctx, desc, vocab, gathered, shards, ids),
                                mti_cpu_rows(ctx, rows, shards * gathered.cols, mti_cpu_sample_ids, &l))));
    const int64_t wrong = op.on_cpu ? mti_sample_wrong(ids, rows) : rows;
    if (wrong == rows) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: the logits of row %lld have a NaN", where, (long long)wrong);
}

/* ---- >>adamw ----------------------------------------------------------------------------------------------------- */

/* The factors of one step. As in torch.optim.AdamW, the bias corrections are in the step size and in the factor of the
   square root. */
typedef struct mti_adamw {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps, grad_scale, keep, step_size, inverse_root2;
} mti_adamw;

MT_API mt_status mt_adamw_check(mt_context *ctx, const mt_adamw *h) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!h) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_adamw_step: hyper is NULL");
    if (h->step < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_adamw_step: step is %lld, counts from 1", (long long)h->step);
    MT_TRY(mt_check_float(ctx, "mt_adamw_step", NULL, "beta1", h->beta1, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, "mt_adamw_step", NULL, "beta2", h->beta2, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, "mt_adamw_step", NULL, "eps", h->eps, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_expect_finite(ctx, "mt_adamw_step", "lr", h->lr));
    MT_TRY(mti_expect_finite(ctx, "mt_adamw_step", "weight_decay", h->weight_decay));
    return mti_expect_finite(ctx, "mt_adamw_step", "grad_scale", h->grad_scale);
}

/* Refuses a master for an f32 param, and stochastic rounding for an f32 param or with a master. */
static mt_status mti_expect_rounding(mt_context *ctx, const mt_random *round, mt_tensor param, mt_tensor master) {
    if (master.data && param.dtype == MT_F32)
        return mt_fail(ctx, MT_ERR_DTYPE, "mt_adamw_step: param is f32 and has a master, which is for bf16 and f16");
    if (!round) return MT_SUCCESS;
    if (master.data || param.dtype == MT_F32)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_adamw_step: stochastic rounding is for bf16 and f16 without a master; param "
                       "is %s and has %s",
                       mt_dtype_name(param.dtype), master.data ? "a master" : "none");
    return mti_expect_random(ctx, "mt_adamw_step", *round, param.rows, param.cols);
}

/* x^n by squaring, with the same bits on every device. */
static MT_HOST_DEVICE double mti_power(double x, int64_t n) {
    double y = 1.0;
    for (; n > 0; n >>= 1, x *= x)
        if (n & 1) y *= x;
    return y;
}

/* Computes the factors of a step in double and rounds each of them once. */
static MT_HOST_DEVICE mti_adamw mti_adamw_resolve(const mt_adamw *h) {
    double correction1 = 1.0 - mti_power((double)h->beta1, h->step);
    double correction2 = 1.0 - mti_power((double)h->beta2, h->step);
    mti_adamw a;
    a.beta1 = h->beta1;
    a.beta2 = h->beta2;
    a.one_minus_beta1 = (float)(1.0 - (double)h->beta1);
    a.one_minus_beta2 = (float)(1.0 - (double)h->beta2);
    a.eps = h->eps;
    a.grad_scale = h->grad_scale;
    a.keep = (float)(1.0 - (double)h->lr * (double)h->weight_decay);
    a.step_size = (float)((double)h->lr / correction1);
    a.inverse_root2 = (float)(1.0 / sqrt(correction2));
    return a;
}

/* hyper with the values in memory of the device, if there are any. */
static MT_HOST_DEVICE mt_adamw mti_adamw_with(mt_adamw hyper, const mt_adamw_values *values) {
    if (!values) return hyper;
    hyper.lr = values->lr;
    hyper.grad_scale = values->grad_scale;
    hyper.step = values->step;
    return hyper;
}

static void mti_adamw_row(const mti_adamw a, float *param, const float *grad, float *m, float *v, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float g = a.grad_scale * grad[j];
        float first = a.beta1 * m[j] + a.one_minus_beta1 * g, second = a.beta2 * v[j] + a.one_minus_beta2 * (g * g);
        m[j] = first;
        v[j] = second;
        param[j] = a.keep * param[j] - a.step_size * first / (mti_sqrt(second) * a.inverse_root2 + a.eps);
    }
}

/* Updates a row of 16-bit parameters, up to MTI_WORDS_ROOM at a time. master is NULL if there is none. round is NULL
   for rounding to nearest. Otherwise it gives the random words, and e is the global element number of the first one. */
static void mti_adamw_16bit_row(const mti_adamw a, const mt_random *round, int64_t e, mt_dtype dtype, uint16_t *param,
                                float *master, const float *grad, float *m, float *v, int64_t n) {
    float room[MTI_WORDS_ROOM];
    uint32_t words[MTI_WORDS_ROOM];
    int64_t j, count;
    for (j = 0; j < n; j += count) {
        float *p = master ? master + j : room;
        count = mti_words_fit(e + j, n - j);
        if (!master) mt_f32_from_16bit(dtype, param + j, room, count);
        mti_adamw_row(a, p, grad + j, m + j, v + j, count);
        if (round) mti_round_row((int)dtype, room, mti_random_words(*round, e + j, count, words), count);
        mt_f32_to_16bit(dtype, p, param + j, count);
    }
}

typedef struct mti_adamw_loop {
    mti_adamw a;
    const mt_random *round;
    mt_tensor param, master, grad, m, v;
} mti_adamw_loop;

static void mti_adamw_stripe(const mti_adamw_loop *l, mti_stripe p) {
    const mt_random *round = l->round;
    const float *grad = mti_row(l->grad, p.row) + p.col;
    float *m = mti_row(l->m, p.row) + p.col, *v = mti_row(l->v, p.row) + p.col;
    if (l->param.dtype == MT_F32) mti_adamw_row(l->a, mti_row(l->param, p.row) + p.col, grad, m, v, p.cols);
    else
        mti_adamw_16bit_row(l->a, round, round ? mti_random_element(*round, p.row, p.col) : 0, l->param.dtype,
                            mti_row16(l->param, p.row) + p.col,
                            l->master.data ? mti_row(l->master, p.row) + p.col : NULL, grad, m, v, p.cols);
}

static void mti_adamw_stripes(void *data, int thread, int64_t first, int64_t last) {
    const mti_adamw_loop *l = (const mti_adamw_loop *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_adamw_stripe(l, mti_stripe_of(l->param.cols, i));
}

static void mti_cpu_adamw(mt_context *ctx, const mt_adamw *hyper, mt_tensor param, mt_tensor master, mt_tensor grad,
                          mt_tensor m, mt_tensor v) {
    mti_adamw_loop l = {mti_adamw_resolve(hyper), hyper->stochastic_rounding, param, master, grad, m, v};
    mti_cpu_stripes(ctx, param.rows, param.cols, mti_adamw_stripes, &l);
}

#if MT_HAS_CUDA
extern "C++" {

/* Each operation rounds on its own, as in mti_adamw_row when the compiler contracts nothing. nvcc could contract the
   two values of WIDE differently, and the bits would then depend on how a parameter is split. On sm_90: 59 instructions
   for an f32 element, which moves 28 bytes (budget: 190); with STOCHASTIC in bf16 at most 110 for 24 bytes (163). */
template <bool STOCHASTIC> struct mti_adamw_op {
    mti_view param, master, weights, grad, m, v; /* weights: master, or param without one, as with STOCHASTIC */
    mti_adamw a;
    mt_random at;
    __device__ void moments(float g, float *first, float *second) const {
        float scaled = __fmul_rn(a.grad_scale, g), square = __fmul_rn(scaled, scaled);
        *first = __fadd_rn(__fmul_rn(a.beta1, *first), __fmul_rn(a.one_minus_beta1, scaled));
        *second = __fadd_rn(__fmul_rn(a.beta2, *second), __fmul_rn(a.one_minus_beta2, square));
    }
    __device__ float updated(float p, float first, float second) const {
        float divisor = __fadd_rn(__fmul_rn(__fsqrt_rn(second), a.inverse_root2), a.eps);
        return __fsub_rn(__fmul_rn(a.keep, p), __fdiv_rn(__fmul_rn(a.step_size, first), divisor));
    }
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        float p[MTI_VECTOR], g[MTI_VECTOR], first[MTI_VECTOR], second[MTI_VECTOR];
        const bool early = WIDE || STOCHASTIC; /* loads p first; otherwise later, because a register would be spilled */
        if (early) mti_load<WIDE>(STOCHASTIC ? param : weights, row, col, n, p);
        mti_load<WIDE, MT_F32>(grad, row, col, n, g);
        mti_load<WIDE, MT_F32>(m, row, col, n, first);
        mti_load<WIDE, MT_F32>(v, row, col, n, second);
        for (int j = 0; j < MTI_VECTOR; j++) {
            moments(g[j], &first[j], &second[j]);
            if (early) p[j] = updated(p[j], first[j], second[j]);
        }
        if (!early) {
            mti_load<WIDE>(weights, row, col, n, p);
            for (int j = 0; j < MTI_VECTOR; j++) p[j] = updated(p[j], first[j], second[j]);
        }
        if (!STOCHASTIC && master.data) mti_store<WIDE, MT_F32>(master, row, col, n, p);
        mti_store<WIDE, MT_F32>(m, row, col, n, first);
        mti_store<WIDE, MT_F32>(v, row, col, n, second);
        if (STOCHASTIC) {
            uint32_t words[MTI_VECTOR];
            mti_words_of(at, mti_element_of(at, row, col), words);
            for (int j = 0; j < MTI_VECTOR; j++) p[j] = mti_round_stochastic(param.dtype, p[j], words[j]);
        }
        if (param.dtype == MT_F32) mti_store<WIDE, MT_F32>(param, row, col, n, p);
        else if (param.dtype == MT_BF16) mti_store<WIDE, MT_BF16>(param, row, col, n, p);
        else mti_store<WIDE, MT_F16>(param, row, col, n, p);
    }
};

template <bool STOCHASTIC>
static mt_status mti_cuda_adamw(mt_context *ctx, const mt_adamw *hyper, mt_tensor param, mt_tensor master,
                                mt_tensor grad, mt_tensor m, mt_tensor v) {
    int wide = mti_is_wide(param) && mti_is_wide(master) && mti_is_wide(grad) && mti_is_wide(m) && mti_is_wide(v);
    mti_adamw_op<STOCHASTIC> op;
    op.param = mti_view_of(param);
    op.master = mti_view_of(master);
    op.weights = mti_view_of(master.data ? master : param);
    op.grad = mti_view_of(grad);
    op.m = mti_view_of(m);
    op.v = mti_view_of(v);
    op.a = mti_adamw_resolve(hyper);
    if (STOCHASTIC) op.at = *hyper->stochastic_rounding;
    return mti_map(ctx, "mt_adamw_step", op, wide, param.rows, param.cols);
}

} /* extern "C++" */
#endif

MT_API mt_status mt_adamw_step(mt_context *ctx, const mt_adamw *hyper, mt_tensor param, mt_tensor master,
                               mt_tensor grad, mt_tensor m, mt_tensor v) {
    static const char *const where = "mt_adamw_step";
    mt_arg args[] = {{"param", &param, param.rows, param.cols, MT_ARG_FLOAT, MT_ARG_IN_OUT | MTI_AS_IS},
                     {"master", &master, param.rows, param.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_OPTIONAL},
                     {"grad", &grad, param.rows, param.cols, MT_ARG_F32, MT_ARG_IN},
                     {"m", &m, param.rows, param.cols, MT_ARG_F32, MT_ARG_IN_OUT},
                     {"v", &v, param.rows, param.cols, MT_ARG_F32, MT_ARG_IN_OUT}};
    mti_operator op;
    MT_TRY(mt_adamw_check(ctx, hyper));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_rounding(ctx, hyper->stochastic_rounding, param, master));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    op.work.work = MT_WORK_OPTIMIZER;
    if (master.data) op.work.bytes -= mti_view_bytes(param); /* is only written */
    return mti_end(&op,
                   MTI_RUN(&op,
                           hyper->stochastic_rounding ? mti_cuda_adamw<true>(ctx, hyper, param, master, grad, m, v)
                                                      : mti_cuda_adamw<false>(ctx, hyper, param, master, grad, m, v),
                           mti_cpu_adamw(ctx, hyper, param, master, grad, m, v)));
}

/* ---- >>multi-tensor: AdamW and sums of squares of many tensors --------------------------------------------------- */

struct mt_multi_tensor {
    int is_adamw; /* 0: a list for sums of squares */
    int count, stochastic_rounding;
    mt_adamw_tensor *adamw;    /* [count] */
    mt_square_tensor *squares; /* [count] */
    int64_t outs;              /* sums of squares: the largest column + 1 */
    void *table;               /* the same list as kernels see it: mti_segment [count], on the GPU */
    int64_t blocks;            /* of the launch */
};

#if MT_HAS_CUDA
extern "C++" {

/* A tensor of a list. The blocks of the launch with numbers from first_block on work on it. */
struct mti_segment {
    mti_view view[6]; /* AdamW: as in mti_adamw_op; sums of squares: x */
    int64_t rows, cols, first_block, blocks, out;
    int is_wide, weight_decay;
    mt_random random;
};

#define MTI_SEGMENT_THREADS 128 /* AdamW: threads of a block; three such blocks fit into a multiprocessor's registers */
#define MTI_SEGMENT_VECTORS 512 /* AdamW: vectors of a block, four for each thread */

static __host__ __device__ int64_t mti_segment_vectors(const mti_segment &s) {
    return s.rows * ((s.cols + MTI_VECTOR - 1) / MTI_VECTOR);
}

/* Returns the tensor that a block works on: the last one whose first block is not behind it. `count` is at least 1.
   Each step of the search divides the range by 32, because the lanes of a warp look at 32 tensors at once. The search
   of 10,000 tensors takes three steps. All lanes must call it. */
static __device__ __forceinline__ int mti_segment_of(const mti_segment *list, int count, int64_t block) {
    int first = 0, lane = (int)threadIdx.x & 31;
    while (count > 1) {
        int step = (count + 31) / 32, at = lane * step;
        int64_t begin = list[first + (at < count ? at : 0)].first_block;
        unsigned before = __ballot_sync(0xffffffffu, at < count && begin <= block);
        int skipped = (31 - __clz((int)before)) * step;
        first += skipped;
        count = count - skipped < step ? count - skipped : step;
    }
    return first;
}

/* What all tensors of a step have in common. */
struct mti_multi_step {
    mti_adamw a;
    int skip;
    int64_t number;
};

/* Computes the step from values in memory, for the kernel behind it. One thread. */
static __global__ void __launch_bounds__(32)
    mti_multi_step_kernel(mt_adamw hyper, const mt_adamw_values *values, mti_multi_step *out) {
    if (threadIdx.x != 0) return;
    hyper = mti_adamw_with(hyper, values);
    out->skip = values->skip;
    out->a = mti_adamw_resolve(&hyper);
    out->number = hyper.step;
}

/* The step is an argument, or `later`, which an earlier kernel has computed. Blocks share no data, and there is no
   barrier. On sm_90: at most 65 instructions for an element, which moves 28 bytes in f32 and 30 in bf16 with an f32
   master (budget: 190 or 204); with STOCHASTIC in bf16 at most 107 for 24 bytes (163). */
template <bool STOCHASTIC>
static __global__ void __launch_bounds__(MTI_SEGMENT_THREADS, 3)
    mti_multi_adamw_kernel(const mti_segment *list, int count, int64_t blocks, mti_multi_step step,
                           const mti_multi_step *later) {
    if (later) step = *later;
    for (int64_t block = blockIdx.x; block < blocks && !step.skip; block += gridDim.x) {
        const mti_segment &s = list[mti_segment_of(list, count, block)];
        int64_t per_row = (s.cols + MTI_VECTOR - 1) / MTI_VECTOR;
        int64_t i = (block - s.first_block) * MTI_SEGMENT_VECTORS, end = mti_segment_vectors(s);
        mti_adamw_op<STOCHASTIC> op;
        op.param = s.view[0], op.master = s.view[1], op.weights = s.view[2];
        op.grad = s.view[3], op.m = s.view[4], op.v = s.view[5];
        op.a = step.a;
        if (!s.weight_decay) op.a.keep = 1.0f;
        if (STOCHASTIC) op.at = s.random;
        if (STOCHASTIC) op.at.subsequence += (uint64_t)step.number;
        if (end > i + MTI_SEGMENT_VECTORS) end = i + MTI_SEGMENT_VECTORS;
        for (i += threadIdx.x; i < end; i += MTI_SEGMENT_THREADS) {
            int64_t row = s.rows == 1 ? 0 : mt_divide(i, per_row), col = (i - row * per_row) * MTI_VECTOR;
            if (s.is_wide) op.template run<true>(row, col, mti_vector_size(s.cols, col));
            else op.template run<false>(row, col, mti_vector_size(s.cols, col));
        }
    }
}

/* partial[block] = the sum of the squares of the vectors of the block, as in mti_sum_kernel. shared holds the sums of
   the threads. mti_block_sum_double has the barriers. The next block needs none before it, because after the last
   barrier only thread 0 uses shared: it reads and later writes shared[0]. On sm_90: 7 instructions for an f32 element,
   which moves 4 bytes (budget: 27). */
static __global__ void __launch_bounds__(256, 4)
    mti_multi_squares_kernel(const mti_segment *list, int count, int64_t blocks, double *partial) {
    MT_SHARED(double, shared, 256);
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
        const mti_segment &s = list[mti_segment_of(list, count, block)];
        int64_t own = block - s.first_block;
        double sum;
        if (s.is_wide) sum = mti_thread_sum<true>(s.view[0], s.rows, s.cols, 1, own, s.blocks);
        else sum = mti_thread_sum<false>(s.view[0], s.rows, s.cols, 1, own, s.blocks);
        sum = mti_block_sum_double(sum, shared);
        if (threadIdx.x == 0) partial[block] = sum;
    }
}

/* sums[tensor] = the sum of the partial sums of its blocks, as in mti_sum_end_kernel. A block of threads for each
   tensor. shared and barriers are as in mti_sum_end_kernel. */
static __global__ void __launch_bounds__(256)
    mti_multi_squares_join_kernel(int64_t first, const mti_segment *list, const double *partial, double *sums) {
    MT_SHARED(double, shared, 256);
    int64_t tensor = first + blockIdx.x;
    const mti_segment &s = list[tensor];
    double sum = 0.0;
    for (int i = (int)threadIdx.x; i < (int)s.blocks; i += 256) sum += partial[s.first_block + i];
    sum = mti_block_sum_double(sum, shared);
    if (threadIdx.x == 0) sums[tensor] = sum;
}

/* Adds the sums of the tensors to their columns of out, in the order of the list, 256 tensors at a time. A thread owns
   every 256th column. It finds the sums and the columns of the tensors in shared memory. The first barrier separates
   writing them from reading them, and the second one reading them from writing those of the next tensors. */
static __global__ void __launch_bounds__(256)
    mti_multi_squares_end_kernel(const mti_segment *list, int count, const double *sums, mti_view out, int64_t outs) {
    MT_SHARED(double, values, 256);
    MT_SHARED(int64_t, columns, 256);
    for (int first = 0; first < count; first += 256) {
        int tensors = count - first < 256 ? count - first : 256, own = (int)threadIdx.x;
        if (own < tensors) values[own] = sums[first + own], columns[own] = list[first + own].out;
        __syncthreads();
        for (int64_t column = threadIdx.x; column < outs; column += 256) {
            float sum = mti_get(out, 0, column);
            for (int i = 0; i < tensors; i++)
                if (columns[i] == column) sum = (float)((double)sum + values[i]);
            mti_put(out, 0, column, sum);
        }
        __syncthreads();
    }
}

static int mti_is_dense(mt_tensor t) { return !t.data || t.rows <= 1 || mt_tensor_ld(t) == t.cols; }

/* Fills s with the views of one tensor. Rows that follow each other without a gap become one row if one_row is set. */
static void mti_segment_fill(mti_segment *s, const mt_tensor *views, int count, int one_row) {
    int i, dense = one_row;
    memset(s, 0, sizeof *s);
    s->is_wide = 1;
    for (i = 0; i < count; i++) {
        s->view[i] = mti_view_of(views[i]);
        s->is_wide = s->is_wide && mti_is_wide(views[i]);
        dense = dense && mti_is_dense(views[i]);
    }
    s->rows = dense ? 1 : views[0].rows;
    s->cols = dense ? views[0].rows * views[0].cols : views[0].cols;
    if (dense) /* mti_is_wide has looked at the leading dimension of several rows */
        for (i = 0, s->is_wide = 1; i < count; i++) s->is_wide = s->is_wide && (uintptr_t)views[i].data % 16 == 0;
}

/* Fills the table of a list and counts its blocks. */
static void mti_segments_fill(mt_multi_tensor *list, mti_segment *table) {
    int i;
    for (i = 0; i < list->count; i++) {
        mti_segment *s = table + i;
        if (list->is_adamw) {
            const mt_adamw_tensor *t = list->adamw + i;
            mt_tensor weights = t->master.data ? t->master : t->param;
            mt_tensor views[6] = {t->param, t->master, weights, t->grad, t->m, t->v};
            mti_segment_fill(s, views, 6, !list->stochastic_rounding);
            s->blocks = (mti_segment_vectors(*s) + MTI_SEGMENT_VECTORS - 1) / MTI_SEGMENT_VECTORS;
            s->weight_decay = t->weight_decay;
            s->random = t->random;
        } else {
            mti_segment_fill(s, &list->squares[i].x, 1, 0);
            s->blocks = mti_sum_blocks(s->rows, s->cols);
            s->out = list->squares[i].out;
        }
        s->first_block = list->blocks;
        list->blocks += s->blocks;
    }
}

/* The table, and behind it the step that mti_multi_step_kernel computes. */
static size_t mti_multi_table_bytes(const mt_multi_tensor *list) {
    return (size_t)list->count * sizeof(mti_segment) + sizeof(mti_multi_step);
}

/* Makes the table on the GPU. A context that plans for CUDA only counts its bytes. */
static mt_status mti_cuda_multi_table(mt_context *ctx, mt_multi_tensor *list) {
    size_t bytes = mti_multi_table_bytes(list);
    mti_segment *table = (mti_segment *)mt_host_alloc(bytes);
    mt_status status;
    if (!table) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for %zu bytes", bytes);
    mti_segments_fill(list, table);
    status = mt_context_alloc(ctx, bytes, &list->table);
    if (status == MT_SUCCESS)
        status = mt_upload(ctx, table, mt_tensor_make(list->table, MT_I32, 1, (int64_t)(bytes / sizeof(int32_t))));
    mt_host_free(table);
    return status;
}

static mt_status mti_cuda_multi_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                      const mt_adamw_values *values) {
    const mti_segment *table = (const mti_segment *)list->table;
    mti_multi_step now = {mti_adamw_resolve(hyper), 0, hyper->step}, *later = NULL;
    MT_TRY(mt_cuda_enter(ctx));
    if (values) {
        later = (mti_multi_step *)((mti_segment *)list->table + list->count);
        MT_LAUNCH_KERNEL(mti_multi_step_kernel, 1, 32, 0, mt_context_stream(ctx), *hyper, values, later);
        MT_TRY(mt_cuda_launched(ctx, "mt_multi_tensor_adamw"));
    }
    if (list->stochastic_rounding)
        MT_LAUNCH_KERNEL(mti_multi_adamw_kernel<true>, mti_grid(list->blocks, 1), MTI_SEGMENT_THREADS, 0,
                         mt_context_stream(ctx), table, list->count, list->blocks, now, later);
    else
        MT_LAUNCH_KERNEL(mti_multi_adamw_kernel<false>, mti_grid(list->blocks, 1), MTI_SEGMENT_THREADS, 0,
                         mt_context_stream(ctx), table, list->count, list->blocks, now, later);
    return mt_cuda_launched(ctx, "mt_multi_tensor_adamw");
}

static mt_status mti_cuda_multi_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out) {
    static const char *const where = "mt_multi_tensor_sum_of_squares";
    const mti_segment *table = (const mti_segment *)list->table;
    cudaStream_t stream = mt_context_stream(ctx);
    void *partial, *sums;
    MT_TRY(mt_arena_alloc(ctx, (size_t)list->blocks * sizeof(double), &partial));
    MT_TRY(mt_arena_alloc(ctx, (size_t)list->count * sizeof(double), &sums));
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_multi_squares_kernel, mti_grid(list->blocks, 1), 256, 0, stream, table, list->count,
                     list->blocks, (double *)partial);
    MT_TRY(mt_cuda_launched(ctx, where));
    MTI_LAUNCH_BLOCKS(mti_multi_squares_join_kernel, list->count, 256, 0, stream, table, (const double *)partial,
                      (double *)sums);
    MT_TRY(mt_cuda_launched(ctx, where));
    MT_LAUNCH_KERNEL(mti_multi_squares_end_kernel, 1, 256, 0, stream, table, list->count, (const double *)sums,
                     mti_view_of(out), list->outs);
    return mt_cuda_launched(ctx, where);
}

} /* extern "C++" */
#endif

#define MTI_ADAMW_ARGS 5

/* Describes a tensor of a list as the arguments of mt_adamw_step. */
static void mti_adamw_args(mt_adamw_tensor *t, mt_arg *args) {
    int64_t rows = t->param.rows, cols = t->param.cols;
    const mt_arg all[MTI_ADAMW_ARGS] = {{"param", &t->param, rows, cols, MT_ARG_FLOAT, MT_ARG_IN_OUT},
                                        {"master", &t->master, rows, cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_OPTIONAL},
                                        {"grad", &t->grad, rows, cols, MT_ARG_F32, MT_ARG_IN},
                                        {"m", &t->m, rows, cols, MT_ARG_F32, MT_ARG_IN_OUT},
                                        {"v", &t->v, rows, cols, MT_ARG_F32, MT_ARG_IN_OUT}};
    memcpy(args, all, sizeof all);
}

static mt_status mti_expect_adamw_tensor(mt_context *ctx, const mt_adamw_tensor *t, int stochastic_rounding) {
    mt_adamw_tensor c = *t;
    mt_arg args[MTI_ADAMW_ARGS];
    mti_adamw_args(&c, args);
    MT_TRY(mt_args_check(ctx, "mt_multi_tensor_create_adamw", args, MTI_ADAMW_ARGS));
    return mti_expect_rounding(ctx, stochastic_rounding ? &c.random : NULL, c.param, c.master);
}

static mt_status mti_expect_square_tensor(mt_context *ctx, const mt_square_tensor *t) {
    static const char *const where = "mt_multi_tensor_create_squares";
    MT_TRY(mt_tensor_check(ctx, where, "x", t->x, MT_ARG_F32, t->x.rows, t->x.cols));
    return mt_check_integer(ctx, where, NULL, "out", t->out, 0, INT64_MAX);
}

/* Copies the tensors that are not empty into a new list. One of adamw and squares may be not NULL. */
static mt_status mti_multi_copy(mt_context *ctx, const mt_adamw_tensor *adamw, const mt_square_tensor *squares,
                                int count, mt_multi_tensor *list) {
    int i;
    list->adamw = adamw ? (mt_adamw_tensor *)mt_host_alloc((size_t)count * sizeof *adamw) : NULL;
    list->squares = squares ? (mt_square_tensor *)mt_host_alloc((size_t)count * sizeof *squares) : NULL;
    if (count > 0 && !list->adamw && !list->squares)
        return mt_fail(ctx, MT_ERR_MEMORY, "no memory for a list of %d tensors", count);
    for (i = 0; i < count; i++) {
        if (mti_is_empty(adamw ? adamw[i].param : squares[i].x)) continue;
        if (adamw) list->adamw[list->count] = adamw[i];
        else list->squares[list->count] = squares[i];
        if (!adamw && list->outs <= squares[i].out) list->outs = squares[i].out + 1;
        list->count++;
    }
#if MT_HAS_CUDA
    if (mt_context_planned(ctx) == MT_DEVICE_CUDA && list->count > 0) return mti_cuda_multi_table(ctx, list);
#endif
    return MT_SUCCESS;
}

static mt_status mti_multi_create(mt_context *ctx, int is_adamw, int stochastic_rounding, const void *tensors,
                                  int count, mt_multi_tensor **out) {
    const mt_adamw_tensor *adamw = is_adamw ? (const mt_adamw_tensor *)tensors : NULL;
    const mt_square_tensor *squares = is_adamw ? NULL : (const mt_square_tensor *)tensors;
    mt_multi_tensor *list = (mt_multi_tensor *)mt_host_alloc(sizeof *list);
    mt_status status;
    if (!list) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for a list of tensors");
    list->is_adamw = is_adamw;
    list->stochastic_rounding = stochastic_rounding;
    status = mti_multi_copy(ctx, adamw, squares, count, list);
    if (status == MT_SUCCESS) *out = list;
    else mt_multi_tensor_destroy(ctx, list);
    return status;
}

static mt_status mti_multi_check(mt_context *ctx, const char *where, const void *tensors, int count, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_integer(ctx, where, NULL, "count", count, 0, INT64_MAX));
    if (out && (tensors || count == 0)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", where, out ? "tensors" : "out");
}

MT_API mt_status mt_multi_tensor_create_adamw(mt_context *ctx, const mt_adamw_tensor *tensors, int count,
                                              int stochastic_rounding, mt_multi_tensor **out) {
    int i;
    MT_TRY(mti_multi_check(ctx, "mt_multi_tensor_create_adamw", tensors, count, out));
    for (i = 0; i < count; i++) MT_TRY(mti_expect_adamw_tensor(ctx, tensors + i, stochastic_rounding));
    return mti_multi_create(ctx, 1, stochastic_rounding != 0, tensors, count, out);
}

MT_API mt_status mt_multi_tensor_create_squares(mt_context *ctx, const mt_square_tensor *tensors, int count,
                                                mt_multi_tensor **out) {
    int i;
    MT_TRY(mti_multi_check(ctx, "mt_multi_tensor_create_squares", tensors, count, out));
    for (i = 0; i < count; i++) MT_TRY(mti_expect_square_tensor(ctx, tensors + i));
    return mti_multi_create(ctx, 0, 0, tensors, count, out);
}

MT_API void mt_multi_tensor_destroy(mt_context *ctx, mt_multi_tensor *list) {
    if (!ctx || !list) return;
#if MT_HAS_CUDA
    mt_context_free(ctx, list->table, mti_multi_table_bytes(list));
#endif
    mt_host_free(list->adamw);
    mt_host_free(list->squares);
    mt_host_free(list);
}

static void mti_cpu_multi_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                const mt_adamw_values *values) {
    int i;
    mt_adamw step = mti_adamw_with(*hyper, values);
    for (i = 0; i < list->count && !(values && values->skip); i++) {
        const mt_adamw_tensor *t = list->adamw + i;
        mt_random random = t->random;
        mt_adamw h = step;
        random.subsequence += (uint64_t)h.step;
        if (list->stochastic_rounding) h.stochastic_rounding = &random;
        if (!t->weight_decay) h.weight_decay = 0.0f;
        mti_cpu_adamw(ctx, &h, t->param, t->master, t->grad, t->m, t->v);
    }
}

/* Applies the rule of mt_adamw_step to each tensor of a list. */
static mt_status mti_multi_adamw_rule(mt_context *ctx, const char *where, const mt_multi_tensor *list) {
    mt_arg args[MTI_ADAMW_ARGS];
    int i;
    for (i = 0; mt_check_mode(ctx) && i < list->count; i++) {
        mti_adamw_args(&list->adamw[i], args);
        MT_TRY(mti_apply_rule(ctx, where, mti_rule_of("mt_adamw_step"), args, MTI_ADAMW_ARGS));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_multi_tensor_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                       const mt_adamw_values *values) {
    static const char *const where = "mt_multi_tensor_adamw";
    mti_operator op;
    int i;
    MT_TRY(mt_adamw_check(ctx, hyper));
    if (!list || !list->is_adamw || hyper->stochastic_rounding)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", where,
                       !list            ? "list is NULL"
                       : list->is_adamw ? "stochastic_rounding must be NULL, because the list says how to round"
                                        : "the list is for sums of squares");
    if (list->count == 0) return MT_SUCCESS;
    MT_TRY(mti_multi_adamw_rule(ctx, where, list));
    MT_TRY(mti_begin(&op, ctx, where, NULL, 0));
    op.work.work = MT_WORK_OPTIMIZER;
    for (i = 0; i < list->count; i++) mti_packed_drop(ctx, list->adamw[i].param);
    for (i = 0; op.work.name && i < list->count; i++) {
        const mt_adamw_tensor *t = &list->adamw[i];
        op.work.bytes += (t->master.data ? 1.0 : 2.0) * mti_view_bytes(t->param) + mti_view_bytes(t->grad) +
                         2.0 * (mti_view_bytes(t->master) + mti_view_bytes(t->m) + mti_view_bytes(t->v));
    }
    return mti_end(&op, MTI_RUN(&op, mti_cuda_multi_adamw(ctx, list, hyper, values),
                                mti_cpu_multi_adamw(ctx, list, hyper, values)));
}

static void mti_cpu_multi_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out) {
    int i;
    for (i = 0; i < list->count; i++)
        mti_cpu_sum(ctx, list->squares[i].x, 1, mt_tensor_cols(out, list->squares[i].out, 1));
}

/* Applies the rule of mt_sum_of_squares to each tensor of a list. */
static mt_status mti_multi_squares_rule(mt_context *ctx, const char *where, const mt_multi_tensor *list,
                                        mt_tensor out) {
    int i;
    for (i = 0; mt_check_mode(ctx) && i < list->count; i++) {
        mt_tensor x = list->squares[i].x, sum = mt_tensor_cols(out, list->squares[i].out, 1);
        mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_F32, MT_ARG_IN},
                         {"out", &sum, 1, 1, MT_ARG_F32, MT_ARG_IN_OUT}};
        MT_TRY(mti_apply_rule(ctx, where, mti_rule_of("mt_sum_of_squares"), args, MTI_COUNT(args)));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_multi_tensor_sum_of_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out) {
    static const char *const where = "mt_multi_tensor_sum_of_squares";
    mti_operator op;
    int i;
    MT_TRY(mt_tensor_check(ctx, where, "out", out, MT_ARG_F32, 1, out.cols));
    if (!list || list->is_adamw)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", where, list ? "the list is for AdamW" : "list is NULL");
    if (list->outs > out.cols)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: a tensor has column %lld of out, which has %lld columns", where,
                       (long long)(list->outs - 1), (long long)out.cols);
    if (list->count == 0) return MT_SUCCESS;
    MT_TRY(mti_multi_squares_rule(ctx, where, list, out));
    MT_TRY(mti_begin(&op, ctx, where, NULL, 0));
    op.work.work = MT_WORK_OPTIMIZER;
    for (i = 0; op.work.name && i < list->count; i++) op.work.bytes += mti_view_bytes(list->squares[i].x);
    return mti_end(&op, MTI_RUN(&op, mti_cuda_multi_squares(ctx, list, out), mti_cpu_multi_squares(ctx, list, out)));
}

/* ---- >>step: loss scale, norm, clipping and the decision of a step ----------------------------------------------- */

MT_API const char *mt_loss_scaler_fault(const mt_loss_scaler_desc *d) {
    if (!d) return NULL;
    if (!(d->min_scale > 0.0f && 1.0f / d->min_scale <= FLT_MAX)) return "loss_scaler.min_scale";
    if (!(d->initial_scale >= d->min_scale && d->initial_scale <= FLT_MAX)) return "loss_scaler.initial_scale";
    if (!(d->growth >= 1.0f && d->growth <= FLT_MAX)) return "loss_scaler.growth";
    if (!(d->backoff > 0.0f && d->backoff <= 1.0f)) return "loss_scaler.backoff";
    if (d->growth_interval <= 0) return "loss_scaler.growth_interval";
    return d->hysteresis <= 0 ? "loss_scaler.hysteresis" : NULL;
}

#define MTI_SCALER_AT(member) offsetof(mt_loss_scaler_desc, member)
static const struct {
    const char *name, *wanted;
    size_t at; /* the place in mt_loss_scaler_desc */
    int whole; /* 1: an int; 0: a float */
} mti_scaler_fields[] = {
    {"loss_scaler.initial_scale", "at least min_scale and finite", MTI_SCALER_AT(initial_scale), 0},
    {"loss_scaler.min_scale", "above 0, and so large that 1 / min_scale is finite", MTI_SCALER_AT(min_scale), 0},
    {"loss_scaler.growth", "at least 1 and finite", MTI_SCALER_AT(growth), 0},
    {"loss_scaler.backoff", "above 0 and at most 1", MTI_SCALER_AT(backoff), 0},
    {"loss_scaler.growth_interval", "at least 1", MTI_SCALER_AT(growth_interval), 1},
    {"loss_scaler.hysteresis", "at least 1", MTI_SCALER_AT(hysteresis), 1}};
#undef MTI_SCALER_AT

/* Returns the place of the field in mti_scaler_fields, or -1. */
static int mti_scaler_field(const char *name) {
    int i = MTI_COUNT(mti_scaler_fields) - 1;
    while (i >= 0 && strcmp(mti_scaler_fields[i].name, name) != 0) i--;
    return i;
}

MT_API const char *mt_loss_scaler_wanted(const char *field) {
    int i = field ? mti_scaler_field(field) : -1;
    return i < 0 ? NULL : mti_scaler_fields[i].wanted;
}

static mt_status mti_loss_scaler_check(mt_context *ctx, const mt_loss_scaler_desc *d) {
    const char *fault = mt_loss_scaler_fault(d);
    char is[32];
    float x;
    int i, n;
    if (!fault) return MT_SUCCESS;
    i = mti_scaler_field(fault);
    memcpy(&x, (const char *)d + mti_scaler_fields[i].at, sizeof x);
    memcpy(&n, (const char *)d + mti_scaler_fields[i].at, sizeof n);
    if (mti_scaler_fields[i].whole) snprintf(is, sizeof is, "%d", n);
    else mt_f32_digits(x, is);
    return mti_field_fail(ctx, MT_ERR_ARGUMENT, "mt_loss_scaler_create", NULL, fault + strlen("loss_scaler."), is,
                          mti_scaler_fields[i].wanted);
}

MT_API mt_status mt_loss_scaler_create(mt_context *ctx, const mt_loss_scaler_desc *desc, mt_loss_scaler *out) {
    mt_loss_scaler_desc d;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_loss_scaler_create: out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.initial_scale == 0.0f) d.initial_scale = 4294967296.0f;
    if (d.min_scale == 0.0f) d.min_scale = 1.0f;
    if (d.growth == 0.0f) d.growth = 2.0f;
    if (d.backoff == 0.0f) d.backoff = 0.5f;
    if (!d.growth_interval) d.growth_interval = 1000;
    if (!d.hysteresis) d.hysteresis = 2;
    MT_TRY(mti_loss_scaler_check(ctx, &d));
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->scale = d.initial_scale;
    return MT_SUCCESS;
}

/* Steps and scales are computed in double where nvcc could contract or approximate f32: a product, a quotient or a root
   of floats in double, rounded to float, has the bits of the f32 operation. */
static MT_HOST_DEVICE void mti_loss_scaler_shrink(mt_loss_scaler *s) {
    s->skipped++;
    s->good_steps = 0;
    if (++s->overflows < s->desc.hysteresis) return;
    s->scale *= s->desc.backoff;
    if (s->scale < s->desc.min_scale) s->scale = s->desc.min_scale;
}

static MT_HOST_DEVICE void mti_loss_scaler_grow(mt_loss_scaler *s) {
    if (++s->good_steps < s->desc.growth_interval) return;
    s->good_steps = s->overflows = 0;
    if (s->scale * s->desc.growth <= FLT_MAX) s->scale *= s->desc.growth;
}

static MT_HOST_DEVICE float mti_unscale(float scale) { return (float)(1.0 / (double)scale); }

static MT_HOST_DEVICE float mti_loss_scaler_update(mt_loss_scaler *scaler, float *norm) {
    float unscale = mti_unscale(scaler->scale);
    *norm = (float)((double)*norm * (double)unscale);
    if (!(*norm <= FLT_MAX)) {
        mti_loss_scaler_shrink(scaler);
        return 0.0f;
    }
    mti_loss_scaler_grow(scaler);
    return unscale;
}

MT_API float mt_loss_scaler_update(mt_loss_scaler *scaler, float *norm) {
    return scaler && norm ? mti_loss_scaler_update(scaler, norm) : 0.0f;
}

static MT_HOST_DEVICE float mti_clip_coefficient(float norm, float max_norm) {
    float sum = (float)((double)norm + (double)1e-6f), c = (float)((double)max_norm / (double)sum);
    return max_norm > 0.0f && c < 1.0f ? c : 1.0f;
}

MT_API float mt_clip_coefficient(float norm, float max_norm) { return mti_clip_coefficient(norm, max_norm); }

/* Copies that do not count must still be finite, or this copy of a parameter would differ from the others after the
   step. When they alone are not, the norm is NaN. Otherwise they do not change the norm, because a split without copies
   must give the same, also when it is infinite. The sign of a NaN depends on the order of operands, and so on the
   split, so every NaN becomes NAN. */
static MT_HOST_DEVICE float mti_norm_of_sums(float counted, float others) {
    const float largest = FLT_MAX;
    float norm = (float)sqrt((double)counted);
    if (norm != norm || (counted <= largest && !(others <= largest))) return NAN;
    return norm;
}

MT_API float mt_norm_of_sums(const float sums[2]) { return sums ? mti_norm_of_sums(sums[0], sums[1]) : 0.0f; }

/* The gradient of an infinite loss may be finite. */
static MT_HOST_DEVICE void mti_step_decide(float counted, float others, float loss, mt_step_values *v) {
    const float largest = FLT_MAX;
    float norm = mti_norm_of_sums(counted, others), worst = loss >= -largest && loss <= largest ? norm : NAN, unscale;
    v->loss = loss;
    v->norm = (float)((double)norm * (double)mti_unscale(v->scaler.scale));
    unscale = mti_loss_scaler_update(&v->scaler, &worst);
    v->adamw.lr = v->lr;
    v->adamw.skip = !(unscale > 0.0f);
    if (v->adamw.skip) return;
    v->adamw.grad_scale = (float)((double)unscale * (double)mti_clip_coefficient(v->norm, v->max_norm));
    v->adamw.step++;
}

#if MT_HAS_CUDA
extern "C++" {

/* One thread decides. */
static __global__ void __launch_bounds__(32)
    mti_step_kernel(const float *sums, const float *loss, mt_step_values *values) {
    if (threadIdx.x == 0) mti_step_decide(sums[0], sums[1], loss ? *loss : 0.0f, values);
}

static mt_status mti_cuda_step_decide(mt_context *ctx, mt_tensor sums, mt_tensor loss, mt_step_values *values) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_step_kernel, 1, 32, 0, mt_context_stream(ctx), (const float *)sums.data,
                     (const float *)loss.data, values);
    return mt_cuda_launched(ctx, "mt_step_decide");
}

} /* extern "C++" */
#endif

static void mti_cpu_step_decide(mt_tensor sums, mt_tensor loss, mt_step_values *values) {
    const float *x = (const float *)sums.data;
    mti_step_decide(x[0], x[1], loss.data ? *(const float *)loss.data : 0.0f, values);
}

MT_API mt_status mt_step_decide(mt_context *ctx, mt_tensor sums, mt_tensor loss, mt_step_values *values) {
    static const char *const where = "mt_step_decide";
    mt_arg args[] = {{"sums", &sums, 1, 2, MT_ARG_F32, MT_ARG_IN},
                     {"loss", &loss, 1, 1, MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    if (!values) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: values is NULL", where);
    MT_TRY(mti_apply_rule_of(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_begin_ruled(&op, ctx, where, NULL, 0));
    op.work.work = MT_WORK_OPTIMIZER;
    return mti_end(
        &op, MTI_RUN(&op, mti_cuda_step_decide(ctx, sums, loss, values), mti_cpu_step_decide(sums, loss, values)));
}

/* ---- >>pointwise: elementwise products and gates ----------------------------------------------------------------- */

/* What an operator computes from its inputs a and b. */
typedef enum mti_pointwise {
    MTI_MULTIPLY,      /* a * b */
    MTI_MULTIPLY_ROW,  /* a * b, b is one row */
    MTI_MULTIPLY_COL,  /* a * b, b is one column */
    MTI_SIGMOID,       /* sigmoid(a) */
    MTI_SIGMOID_SLOPE, /* sigmoid'(a) * b */
    MTI_SILU,          /* silu(a) */
    MTI_SILU_SLOPE,    /* silu'(a) * b */
    MTI_SIGMOID_GATE   /* sigmoid(a) * b */
} mti_pointwise;

/* Refuses a `sum` argument (drow or dcol) that overlaps another argument, because it may be written before the last
   element of the other argument is read or written. */
static mt_status mti_expect_sum_apart(mt_context *ctx, const char *where, const mt_arg *args, int count, int sum) {
    int i;
    for (i = 0; i < count; i++)
        if (i != sum) MT_TRY(mt_check_apart(ctx, where, args[sum].name, *args[sum].view, args[i].name, *args[i].view));
    return MT_SUCCESS;
}

MT_INLINE MT_HOST_DEVICE float mti_sigmoid(float x) { return 1.0f / (1.0f + mti_exp(-x)); }

/* y = a * b. In this function and in the other functions of one row below, a result may be an input. */
MT_INLINE MT_HOST_DEVICE void mti_multiply_row(const float *a, const float *b, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = a[j] * b[j];
}

MT_INLINE MT_HOST_DEVICE void mti_scale_row(const float *x, float factor, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = x[j] * factor;
}

MT_INLINE MT_HOST_DEVICE void mti_sigmoid_row(const float *x, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_sigmoid(x[j]);
}

/* The slope of sigmoid is sigmoid(x) * (1 - sigmoid(x)). The second factor is computed as sigmoid(-x), because the
   subtraction would lose digits. */
MT_INLINE MT_HOST_DEVICE void mti_sigmoid_backward_row(const float *x, const float *dy, float *dx, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dx[j] = dy[j] * (mti_sigmoid(x[j]) * mti_sigmoid(-x[j]));
}

MT_INLINE MT_HOST_DEVICE void mti_silu_backward_row(const float *x, const float *dy, float *dx, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dx[j] = dy[j] * (mti_sigmoid(x[j]) * (1.0f + x[j] * mti_sigmoid(-x[j])));
}

MT_INLINE MT_HOST_DEVICE void mti_sigmoid_gate_row(const float *gate, const float *x, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = x[j] * mti_sigmoid(gate[j]);
}

/* Computes dgate and dx. It reads element j of all inputs before it writes element j of a result, because a result may
   be an input. */
MT_INLINE MT_HOST_DEVICE void mti_gate_backward_row(const float *gate, const float *x, const float *dy, float *dgate,
                                                    float *dx, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float opened = mti_sigmoid(gate[j]), up = dy[j];
        float slope = up * x[j] * (opened * mti_sigmoid(-gate[j]));
        dgate[j] = slope;
        dx[j] = up * opened;
    }
}

/* y = kind(a, b) for n elements: a whole row on a CPU, a vector on a GPU. For MTI_MULTIPLY_COL, b[0] is the factor of
   all n elements. */
MT_INLINE MT_HOST_DEVICE void mti_pointwise_row(mti_pointwise kind, const float *a, const float *b, float *y,
                                                int64_t n) {
    switch (kind) {
    case MTI_MULTIPLY_COL: mti_scale_row(a, b[0], y, n); break;
    case MTI_SIGMOID: mti_sigmoid_row(a, y, n); break;
    case MTI_SIGMOID_SLOPE: mti_sigmoid_backward_row(a, b, y, n); break;
    case MTI_SILU: mti_sigmoid_gate_row(a, a, y, n); break; /* SiLU(a) = a * sigmoid(a) */
    case MTI_SILU_SLOPE: mti_silu_backward_row(a, b, y, n); break;
    case MTI_SIGMOID_GATE: mti_sigmoid_gate_row(a, b, y, n); break;
    default: mti_multiply_row(a, b, y, n); break;
    }
}

typedef struct mti_pointwise_of {
    mti_pointwise kind;
    mt_tensor a, b, y;
} mti_pointwise_of;

static void mti_cpu_pointwise(void *data, int thread, int64_t first, int64_t last) {
    const mti_pointwise_of *p = (const mti_pointwise_of *)data;
    float room[3][MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < p->y.cols; j += n) {
            mt_tensor a, b, y;
            n = mt_min(MTI_BLOCK, p->y.cols - j);
            a = mti_f32_read(p->a, i, 1, j, n, room[0]);
            if (p->kind == MTI_MULTIPLY_COL) b = mti_f32_read(p->b, i, 1, 0, 1, room[1]);
            else b = mti_f32_read(p->b, p->kind == MTI_MULTIPLY_ROW ? 0 : i, 1, j, n, room[1]);
            y = mti_f32_place(p->y, i, 1, j, n, room[2]);
            mti_pointwise_row(p->kind, mti_row(a, 0), mti_row(b, 0), mti_row(y, 0), n);
            mti_f32_write(y, p->y, i, j);
        }
}

/* The backward of a product or of a gate. `factor` is row, col or gate, and dfactor its gradient. */
typedef struct mti_product_slopes {
    mt_tensor x, factor, dy, dx, dfactor;
} mti_product_slopes;

static void mti_cpu_multiply_col_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_product_slopes *b = (const mti_product_slopes *)data;
    float room[3][MTI_BLOCK], lanes[MTI_PARTIALS], factor, sum;
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++) {
        mt_tensor dfactor = mti_f32_place(b->dfactor, i, 1, 0, 1, &sum);
        mti_cpu_load(b->factor, i, 0, 1, &factor);
        mti_lanes_clear(lanes);
        for (j = 0; j < b->dy.cols; j += n) {
            mt_tensor dx;
            float *dy, *x;
            n = mt_min(MTI_BLOCK, b->dy.cols - j);
            dy = mti_row(mti_f32_read(b->dy, i, 1, j, n, room[0]), 0);
            x = mti_row(mti_f32_read(b->x, i, 1, j, n, room[1]), 0);
            mti_lanes_dot(lanes, dy, x, n);
            if (!b->dx.data) continue;
            dx = mti_f32_place(b->dx, i, 1, j, n, room[2]);
            mti_scale_row(dy, factor, mti_row(dx, 0), n);
            mti_f32_write(dx, b->dx, i, j);
        }
        mti_row(dfactor, 0)[0] = mti_lanes_sum(lanes);
        mti_f32_write(dfactor, b->dfactor, i, 0);
    }
}

static void mti_cpu_gate_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_product_slopes *b = (const mti_product_slopes *)data;
    float room[5][MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < b->dy.cols; j += n) {
            mt_tensor gate, x, dy, dgate, dx;
            n = mt_min(MTI_BLOCK, b->dy.cols - j);
            gate = mti_f32_read(b->factor, i, 1, j, n, room[0]);
            x = mti_f32_read(b->x, i, 1, j, n, room[1]);
            dy = mti_f32_read(b->dy, i, 1, j, n, room[2]);
            dgate = mti_f32_place(b->dfactor, i, 1, j, n, room[3]);
            dx = mti_f32_place(b->dx, i, 1, j, n, room[4]);
            mti_gate_backward_row(mti_row(gate, 0), mti_row(x, 0), mti_row(dy, 0), mti_row(dgate, 0), mti_row(dx, 0),
                                  n);
            mti_f32_write(dgate, b->dfactor, i, j);
            mti_f32_write(dx, b->dx, i, j);
        }
}

/* Computes dx and drow for rows [i, i + 4), or as many as there are, and columns [j, j + n), with n <= MTI_BLOCK. The
   products dy * x stay in L1 until they are added to drow. dx of a row is written when the row has been read, because
   it may be x, row or dy. It may be row only where there is one row. */
static void mti_multiply_row_backward_block(const mti_product_slopes *b, int64_t i, int64_t j, int64_t n) {
    float products[4 * MTI_BLOCK], room[4][MTI_BLOCK], *sums = mti_row(b->dfactor, 0) + j;
    float *row = mti_row(mti_f32_read(b->factor, 0, 1, j, n, room[0]), 0);
    int64_t r, rows = mt_min(4, b->dy.rows - i);
    for (r = 0; r < rows; r++) {
        float *dy = mti_row(mti_f32_read(b->dy, i + r, 1, j, n, room[1]), 0);
        mt_tensor dx = mti_f32_place(b->dx, i + r, 1, j, n, room[3]);
        mti_multiply_row(dy, mti_row(mti_f32_read(b->x, i + r, 1, j, n, room[2]), 0), products + r * MTI_BLOCK, n);
        if (!dx.data) continue;
        mti_multiply_row(dy, row, mti_row(dx, 0), n);
        mti_f32_write(dx, b->dx, i + r, j);
    }
    if (rows == 4) mti_add_rows4(products, MTI_BLOCK, sums, n);
    for (r = 0; r < rows && rows < 4; r++) mti_row_add(sums, products + r * MTI_BLOCK, sums, n);
}

/* A range of columns of dx and drow. */
static void mti_cpu_multiply_row_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_product_slopes *b = (const mti_product_slopes *)data;
    int64_t i, j;
    (void)thread;
    for (i = 0; i < b->dy.rows; i += 4)
        for (j = first; j < last; j += MTI_BLOCK) mti_multiply_row_backward_block(b, i, j, mt_min(MTI_BLOCK, last - j));
}

#if MT_HAS_CUDA
extern "C++" {

/* sigmoid(x) and sigmoid(-x), for 16-bit results. e is at most 1, so nothing overflows. */
static __device__ __forceinline__ float mti_cuda_sigmoid(float x, float *opposite) {
    float e = __expf(-fabsf(x)), high = __fdividef(1.0f, 1.0f + e), low = e * high;
    *opposite = x < 0.0f ? high : low;
    return x < 0.0f ? low : high;
}

/* mti_pointwise_row for a vector of 16-bit results. a becomes y. */
static __device__ __forceinline__ void mti_pointwise_fast(mti_pointwise kind, float *a, const float *b) {
    float closed;
    switch (kind) {
    case MTI_SIGMOID:
        for (int j = 0; j < MTI_VECTOR; j++) a[j] = mti_cuda_sigmoid(a[j], &closed);
        break;
    case MTI_SIGMOID_SLOPE:
        for (int j = 0; j < MTI_VECTOR; j++) {
            float open = mti_cuda_sigmoid(a[j], &closed);
            a[j] = b[j] * (open * closed);
        }
        break;
    case MTI_SILU:
        for (int j = 0; j < MTI_VECTOR; j++) a[j] *= mti_cuda_sigmoid(a[j], &closed);
        break;
    case MTI_SILU_SLOPE:
        for (int j = 0; j < MTI_VECTOR; j++) {
            float open = mti_cuda_sigmoid(a[j], &closed);
            a[j] = b[j] * (open * (1.0f + a[j] * closed));
        }
        break;
    case MTI_SIGMOID_GATE:
        for (int j = 0; j < MTI_VECTOR; j++) a[j] = b[j] * mti_cuda_sigmoid(a[j], &closed);
        break;
    default: mti_pointwise_row(kind, a, b, a, MTI_VECTOR);
    }
}

/* KIND is a mti_pointwise, or MTI_ANY_TYPE: then op.kind is read. */
template <int TYPE, int KIND> struct mti_pointwise_op {
    struct input {
        mti_fetched<TYPE> a, b;
        float factor; /* of the row, for MTI_MULTIPLY_COL */
    };
    mti_view a, b, y;
    mti_pointwise kind;
    __device__ mti_pointwise kind_of() const { return KIND == MTI_ANY_TYPE ? kind : (mti_pointwise)KIND; }
    __device__ int has_b() const { return kind_of() != MTI_SIGMOID && kind_of() != MTI_SILU; }
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(a, row, col, n, in.a);
        if (kind_of() == MTI_MULTIPLY_COL) in.factor = mti_get<TYPE>(b, row, 0);
        else if (has_b()) mti_fetch<WIDE>(b, kind_of() == MTI_MULTIPLY_ROW ? 0 : row, col, n, in.b);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float x[MTI_VECTOR], z[MTI_VECTOR] = {};
        mti_values(in.a, x);
        if (kind_of() == MTI_MULTIPLY_COL) z[0] = in.factor;
        else if (has_b()) mti_values(in.b, z);
        if (mti_type_of<TYPE>(y) != MT_F32) mti_pointwise_fast(kind_of(), x, z);
        else mti_pointwise_row(kind_of(), x, z, x, MTI_VECTOR);
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_pointwise(mt_context *ctx, const char *name, mti_pointwise kind, mt_tensor a, mt_tensor b,
                                    mt_tensor y) {
    mti_access how = mti_access_of(a, kind == MTI_MULTIPLY_COL ? mt_none() : b, y);
    if (kind == MTI_MULTIPLY_COL && b.dtype != y.dtype) how.type = MTI_ANY_TYPE;
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<MTI_SIGMOID_GATE + 1>((int)kind, [&](auto k) {
            const int TYPE = decltype(type)::value, KIND = TYPE == MTI_ANY_TYPE ? MTI_ANY_TYPE : decltype(k)::value;
            mti_pointwise_op<TYPE, KIND> op = {mti_view_of(a), mti_view_of(b), mti_view_of(y), kind};
            return mti_map_ahead<TYPE>(ctx, name, op, how.wide, y.rows, y.cols);
        });
    });
}

/* A thread reads a vector of all inputs before it writes the same vector of dgate and dx, which may be inputs. */
template <int TYPE> struct mti_gate_backward_op {
    struct input {
        mti_fetched<TYPE> gate, x, dy;
    };
    mti_view gate, x, dy, dgate, dx;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(gate, row, col, n, in.gate);
        mti_fetch<WIDE>(x, row, col, n, in.x);
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float g[MTI_VECTOR], a[MTI_VECTOR], up[MTI_VECTOR];
        int fast = mti_type_of<TYPE>(dgate) != MT_F32 && mti_type_of<TYPE>(dx) != MT_F32;
        mti_values(in.gate, g);
        mti_values(in.x, a);
        mti_values(in.dy, up);
        if (!fast) mti_gate_backward_row(g, a, up, a, up, MTI_VECTOR);
        for (int j = 0; j < MTI_VECTOR && fast; j++) {
            float closed, open = mti_cuda_sigmoid(g[j], &closed);
            a[j] = up[j] * a[j] * (open * closed);
            up[j] *= open;
        }
        mti_store<WIDE, TYPE>(dgate, row, col, n, a);
        mti_store<WIDE, TYPE>(dx, row, col, n, up);
    }
};

static mt_status mti_cuda_gate_backward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor dy, mt_tensor dgate,
                                        mt_tensor dx) {
    mti_access how = mti_access_of(gate, x, dy, dgate, dx);
    return mti_by_type(how.type, [&](auto type) {
        mti_gate_backward_op<type.value> op = {mti_view_of(gate), mti_view_of(x), mti_view_of(dy), mti_view_of(dgate),
                                               mti_view_of(dx)};
        return mti_map_ahead<type.value>(ctx, "mt_sigmoid_gate_backward", op, how.wide, dy.rows, dy.cols);
    });
}

/* finish writes dx, if it is given, and adds dy * x, the products that one row adds to drow. */
template <int TYPE> struct mti_multiply_row_backward_op {
    struct input {
        mti_fetched<TYPE> dy, x;
    };
    mti_view x, factors, dy, dx;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
        mti_fetch<WIDE>(x, row, col, n, in.x);
    }
    template <bool WIDE>
    __device__ void finish(int64_t row, int64_t col, int n, const input &in, float (*sums)[MTI_VECTOR]) const {
        float d[MTI_VECTOR], f[MTI_VECTOR];
        mti_values(in.dy, d);
        mti_values(in.x, f);
        for (int j = 0; j < MTI_VECTOR; j++) sums[0][j] += d[j] * f[j];
        if (!dx.data) return;
        mti_load<WIDE, TYPE>(factors, 0, col, n, f); /* L1 has this row, and nvcc has no registers for it earlier */
        mti_multiply_row(d, f, d, MTI_VECTOR);
        mti_store<WIDE, TYPE>(dx, row, col, n, d);
    }
};

static mt_status mti_cuda_multiply_row_backward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor dy, mt_tensor dx,
                                                mt_tensor drow) {
    mti_access how = mti_access_of(x, row, dy, dx);
    return mti_by_type(how.type, [&](auto type) {
        mti_multiply_row_backward_op<type.value> op = {mti_view_of(x), mti_view_of(row), mti_view_of(dy),
                                                       mti_view_of(dx)};
        return mti_columns<type.value, mti_ahead<type.value>::value, 1>(ctx, "mt_multiply_row_backward", op, how.wide,
                                                                        dy.rows, dy.cols, &drow);
    });
}

struct mti_multiply_col_backward_op {
    mti_view x, factors, dy, dx, dcol;
};

/* A block computes every gridDim-th row. Thread t has vectors t, t + blockDim.x, ... of the row. It adds their products
   dy * x and writes their dx, if dx is given. Then mti_block_sums adds the sums of all threads. It has the barriers,
   and `shared` is its memory for the sums of the warps. dx may be x, dy or col, so a thread reads these before it
   writes dx. In bf16 on sm_90: 12 instructions for an element, which moves 6 bytes (budget: 41); 31 registers. */
template <int TYPE, bool WIDE>
static __global__ void __launch_bounds__(MTI_ROW_THREADS)
    mti_multiply_col_backward_kernel(mti_multiply_col_backward_op op, int64_t rows, int64_t cols) {
    MT_SHARED(float, shared, 64);
    int64_t vectors = (cols + MTI_VECTOR - 1) / MTI_VECTOR;
    float d[MTI_VECTOR], x[MTI_VECTOR];
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        float sum = 0.0f;
        for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
            mti_fetched<TYPE> in_dy, in_x;
            int n = mti_vector_size(cols, i * MTI_VECTOR);
            mti_fetch<WIDE>(op.dy, row, i * MTI_VECTOR, n, in_dy);
            mti_fetch<WIDE>(op.x, row, i * MTI_VECTOR, n, in_x);
            mti_values(in_dy, d);
            mti_values(in_x, x);
            for (int j = 0; j < MTI_VECTOR; j++) sum += d[j] * x[j];
            if (!op.dx.data) continue;
            mti_scale_row(d, mti_get(op.factors, row, 0), d, MTI_VECTOR);
            mti_store<WIDE, TYPE>(op.dx, row, i * MTI_VECTOR, n, d);
        }
        sum = mti_block_sums(sum, 0.0f, shared).x;
        if (threadIdx.x == 0) mti_put(op.dcol, row, 0, sum);
    }
}

static mt_status mti_cuda_multiply_col_backward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor dy, mt_tensor dx,
                                                mt_tensor dcol) {
    mti_multiply_col_backward_op op = {mti_view_of(x), mti_view_of(col), mti_view_of(dy), mti_view_of(dx),
                                       mti_view_of(dcol)};
    unsigned blocks = mti_grid(dy.rows, 1), threads = mti_row_threads(mt_max(1, dy.cols));
    mti_access how = mti_access_of(x, dy, dx);
    MT_TRY(mt_cuda_enter(ctx));
    return mti_by_type(how.type, [&](auto type) {
        const int TYPE = decltype(type)::value;
        if (how.wide)
            MT_LAUNCH_KERNEL((mti_multiply_col_backward_kernel<TYPE, true>), blocks, threads, 0, mt_context_stream(ctx),
                             op, dy.rows, dy.cols);
        else
            MT_LAUNCH_KERNEL((mti_multiply_col_backward_kernel<TYPE, TYPE != MTI_ANY_TYPE>), blocks, threads, 0,
                             mt_context_stream(ctx), op, dy.rows, dy.cols);
        return mt_cuda_launched(ctx, "mt_multiply_col_backward");
    });
}

} /* extern "C++" */
#endif

/* y = kind(a, b); b is mt_none() if the kind has no b. `name` is the public function, and the other names are its
   arguments, for error messages. */
static mt_status mti_run_pointwise(mt_context *ctx, const char *name, mti_pointwise kind, const char *a_name,
                                   mt_tensor a, const char *b_name, mt_tensor b, const char *y_name, mt_tensor y) {
    mt_arg args[] = {{y_name, &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {a_name, &a, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {b_name, &b, kind == MTI_MULTIPLY_ROW ? 1 : y.rows, kind == MTI_MULTIPLY_COL ? 1 : y.cols,
                      MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS}};
    int count = kind == MTI_SIGMOID || kind == MTI_SILU ? 2 : 3;
    mti_operator op;
    if (kind == MTI_MULTIPLY || kind == MTI_MULTIPLY_ROW || kind == MTI_MULTIPLY_COL) args[1].use |= MT_ARG_MOVED;
    if (kind == MTI_MULTIPLY) args[2].use |= MT_ARG_MOVED;
    MT_TRY(mt_args_check(ctx, name, args, count));
    MT_TRY(mti_begin(&op, ctx, name, args, count));
    mti_pointwise_of p = {kind, a, b, y};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_pointwise(ctx, name, kind, a, b, y),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_pointwise, &p)));
}

MT_API mt_status mt_multiply(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y) {
    return mti_run_pointwise(ctx, "mt_multiply", MTI_MULTIPLY, "a", a, "b", b, "y", y);
}

MT_API mt_status mt_multiply_row_forward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor y) {
    return mti_run_pointwise(ctx, "mt_multiply_row_forward", MTI_MULTIPLY_ROW, "x", x, "row", row, "y", y);
}

MT_API mt_status mt_multiply_row_backward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor dy, mt_tensor dx,
                                          mt_tensor drow) {
    static const char *const name = "mt_multiply_row_backward";
    mt_arg args[] = {{"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"x", &x, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"row", &row, 1, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dx", &dx, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_OPTIONAL | MTI_AS_IS},
                     {"drow", &drow, 1, dy.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM | MT_ARG_OPTIONAL}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, name, args, MTI_COUNT(args)));
    if (!drow.data && !dx.data) return MT_SUCCESS;
    if (!drow.data) return mti_run_pointwise(ctx, name, MTI_MULTIPLY_ROW, "dy", dy, "row", row, "dx", dx);
    MT_TRY(mti_expect_sum_apart(ctx, name, args, MTI_COUNT(args), 4));
    MT_TRY(mti_begin(&op, ctx, name, args, MTI_COUNT(args)));
    mti_product_slopes b = {x, row, dy, dx, drow};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_multiply_row_backward(ctx, x, row, dy, dx, drow),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_multiply_row_backward, &b)));
}

MT_API mt_status mt_multiply_col_forward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor y) {
    return mti_run_pointwise(ctx, "mt_multiply_col_forward", MTI_MULTIPLY_COL, "x", x, "col", col, "y", y);
}

MT_API mt_status mt_multiply_col_backward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor dy, mt_tensor dx,
                                          mt_tensor dcol) {
    static const char *const name = "mt_multiply_col_backward";
    mt_arg args[] = {/* dcol is first, because it is also written if x has no columns */
                     {"dcol", &dcol, dy.rows, 1, MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_OPTIONAL | MTI_AS_IS},
                     {"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"x", &x, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"col", &col, dy.rows, 1, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dx", &dx, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_OPTIONAL | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, name, args, MTI_COUNT(args)));
    if (!dcol.data && !dx.data) return MT_SUCCESS;
    if (!dcol.data) return mti_run_pointwise(ctx, name, MTI_MULTIPLY_COL, "dy", dy, "col", col, "dx", dx);
    MT_TRY(mti_expect_sum_apart(ctx, name, args, MTI_COUNT(args), 0));
    MT_TRY(mti_begin(&op, ctx, name, args, MTI_COUNT(args)));
    mti_product_slopes b = {x, col, dy, dx, dcol};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_multiply_col_backward(ctx, x, col, dy, dx, dcol),
                                mti_cpu_rows(ctx, dy.rows, dy.cols, mti_cpu_multiply_col_backward, &b)));
}

MT_API mt_status mt_sigmoid_forward(mt_context *ctx, mt_tensor x, mt_tensor y) {
    return mti_run_pointwise(ctx, "mt_sigmoid_forward", MTI_SIGMOID, "x", x, "", mt_none(), "y", y);
}

MT_API mt_status mt_sigmoid_backward(mt_context *ctx, mt_tensor x, mt_tensor dy, mt_tensor dx) {
    return mti_run_pointwise(ctx, "mt_sigmoid_backward", MTI_SIGMOID_SLOPE, "x", x, "dy", dy, "dx", dx);
}

MT_API mt_status mt_silu_forward(mt_context *ctx, mt_tensor x, mt_tensor y) {
    return mti_run_pointwise(ctx, "mt_silu_forward", MTI_SILU, "x", x, "", mt_none(), "y", y);
}

MT_API mt_status mt_silu_backward(mt_context *ctx, mt_tensor x, mt_tensor dy, mt_tensor dx) {
    return mti_run_pointwise(ctx, "mt_silu_backward", MTI_SILU_SLOPE, "x", x, "dy", dy, "dx", dx);
}

MT_API mt_status mt_sigmoid_gate_forward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor y) {
    return mti_run_pointwise(ctx, "mt_sigmoid_gate_forward", MTI_SIGMOID_GATE, "gate", gate, "x", x, "y", y);
}

MT_API mt_status mt_sigmoid_gate_backward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor dy, mt_tensor dgate,
                                          mt_tensor dx) {
    static const char *const name = "mt_sigmoid_gate_backward";
    mt_arg args[] = {{"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"gate", &gate, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"x", &x, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS},
                     {"dgate", &dgate, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"dx", &dx, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, name, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, name, "dgate", dgate, "dx", dx));
    MT_TRY(mti_begin(&op, ctx, name, args, MTI_COUNT(args)));
    mti_product_slopes b = {x, gate, dy, dx, dgate};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_gate_backward(ctx, gate, x, dy, dgate, dx),
                                mti_cpu_rows(ctx, dy.rows, dy.cols, mti_cpu_gate_backward, &b)));
}

#ifdef __cplusplus
}
#endif

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
#if MT_PREFER_512
#pragma GCC pop_options
#endif

#endif /* MEGATRON_IMPLEMENTATION */
