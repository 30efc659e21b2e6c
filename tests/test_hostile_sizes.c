/* test_hostile_sizes.c - tests impossible sizes: every size that a public function takes is sometimes one of
   {INT64_MIN, -1, 0, 1, 7, 2^31, 2^62, INT64_MAX}. A call must return at once, and an error must have a message.
   Built mainly for the sanitizers, which detect overflows and invalid addresses.
    cc -std=gnu17 -g -fsanitize=address,undefined -fno-sanitize-recover=all -I. tests/test_hostile_sizes.c -lpthread -lm
  */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

#include <signal.h>
#include <unistd.h>

/* Tensors with memory have up to SIDE rows of up to SIDE columns. */
enum { SIDE = 64, VIEWS = 12, CALLS = SANITIZED ? 1000 : 4000, SECONDS = 600 };

typedef struct hostile {
    test_rank rank;
    mt_context *ctx;
    int meta;
    uint64_t random;
    int views;
    int32_t ids[SIDE];
    float memory[VIEWS][SIDE * SIDE];
} hostile;

static const char *now_testing = "";

static void takes_too_long(int signal) {
    (void)signal;
    (void)!write(2, now_testing, strlen(now_testing));
    (void)!write(2, ": does not return\n", 18);
    _exit(1);
}

static const int64_t sizes[] = {INT64_MIN, -1, 0, 1, 7, (int64_t)1 << 31, (int64_t)1 << 62, INT64_MAX};

/* Returns mostly `usual`, and sometimes a hostile size. */
static int64_t size_of(hostile *h, int64_t usual) {
    return test_below(&h->random, 4) ? usual : sizes[test_below(&h->random, 8)];
}

static int int_of(hostile *h, int usual) {
    static const int ints[] = {INT32_MIN, -1, 0, 1, 7, 1 << 16, INT32_MAX - 1, INT32_MAX};
    return test_below(&h->random, 4) ? usual : ints[test_below(&h->random, 8)];
}

/* Returns a small, valid size. */
static int64_t small(hostile *h) { return (int64_t)test_below(&h->random, 5) * 2; }

/* Returns a * b, or INT64_MAX on overflow. */
static int64_t times(int64_t a, int64_t b) {
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* A tensor [rows, cols] of this type, with memory if it fits or if the memory is never accessed; sometimes of another
   shape. */
static mt_tensor view_as(hostile *h, mt_dtype dtype, int64_t rows, int64_t cols) {
    float *memory = h->memory[h->views++ % VIEWS];
    mt_tensor t = mt_tensor_make(memory, dtype, rows, cols);
    int64_t ld;
    if (!test_below(&h->random, 16)) t.rows = size_of(h, rows);
    if (!test_below(&h->random, 16)) t.cols = size_of(h, cols);
    t.ld = test_below(&h->random, 16) ? t.cols : size_of(h, 0);
    ld = t.ld ? t.ld : t.cols;
    if (!h->meta && t.rows != 0 && t.cols != 0 && !(t.rows > 0 && t.rows <= SIDE && ld > 0 && ld <= SIDE))
        t.data = NULL;
    return t;
}

static mt_tensor view(hostile *h, int64_t rows, int64_t cols) {
    static const mt_dtype types[] = {MT_F32, MT_F32, MT_F32, MT_F32, MT_BF16, MT_F16};
    return view_as(h, types[test_below(&h->random, 6)], rows, cols);
}

static mt_tensor view32(hostile *h, int64_t rows, int64_t cols) { return view_as(h, MT_F32, rows, cols); }

static mt_tensor maybe(hostile *h, mt_tensor t) { return test_below(&h->random, 2) ? t : mt_none(); }

static const int32_t *ids(hostile *h, int64_t count) { return h->meta || count <= SIDE ? h->ids : NULL; }

static mt_random random_at(hostile *h, int64_t cols) {
    mt_random at = {1, 2, size_of(h, 3), size_of(h, 0), size_of(h, cols), NULL};
    return at;
}

static mt_dropout dropout(hostile *h, int64_t cols) {
    mt_dropout d = {random_at(h, cols), test_below(&h->random, 2) ? 0.5f : 0.0f};
    return d;
}

/* Checks that an error has a message. Success is fine, too. */
static void said(hostile *h, mt_status status) {
    if (status != MT_SUCCESS && !mt_last_error(h->ctx)[0])
        fail_msg("%s: %s without a sentence", now_testing, mt_status_name(status));
    mt_arena_release(h->ctx, 0);
}

/* ---- operators -----------------------------------------------------------------------------------------------------
 */

static void call_memory(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_tensor t = view(h, a, b);
    uint64_t hash = 0;
    void *bytes;
    said(h, mt_fill(h->ctx, view(h, a, b), 1.0f));
    said(h, mt_copy(h->ctx, view(h, a, b), view(h, a, b)));
    said(h, mt_convert(h->ctx, view(h, a, b), view(h, a, b)));
    said(h, mt_add(h->ctx, view(h, a, b), view(h, a, b), view(h, a, b)));
    said(h, mt_upload(h->ctx, t.data && t.rows < SIDE && t.cols < SIDE ? h->memory[0] : NULL, t));
    said(h, mt_download(h->ctx, t, t.rows < SIDE && t.cols < SIDE ? h->memory[1] : NULL));
    said(h, mt_hash(h->ctx, view(h, a, b), size_of(h, 0), size_of(h, 0), size_of(h, c), &hash));
    said(h, mt_sum(h->ctx, view(h, a, b), view32(h, 1, 1)));
    said(h, mt_sum_of_squares(h->ctx, view(h, a, b), view32(h, 1, 1)));
    said(h, mt_tree_sum(h->ctx, view32(h, a, b)));
    said(h, mt_arena_tensor(h->ctx, MT_F32, a, b, &t));
    said(h, mt_arena_alloc(h->ctx, (size_t)c, &bytes));
    if (mt_context_alloc(h->ctx, h->meta ? (size_t)c : (size_t)c % 1000, &bytes) == MT_SUCCESS)
        mt_context_free(h->ctx, bytes, h->meta ? (size_t)c : (size_t)c % 1000);
}

static void call_views(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_tensor t = view(h, a, b);
    (void)mt_tensor_rows(t, size_of(h, 1), c);
    (void)mt_tensor_cols(t, size_of(h, 1), c);
    said(h, mt_fill(h->ctx, h->meta ? mt_tensor_rows(t, size_of(h, 1), size_of(h, 1)) : t, 0.0f));
    said(h, mt_fill(h->ctx, h->meta ? mt_tensor_cols(t, size_of(h, 1), size_of(h, 1)) : t, 0.0f));
    said(h, mt_fill(h->ctx, mt_shard_cols(t, int_of(h, 1), int_of(h, 2)), 0.0f));
    (void)mt_invariant_micro_batch(int_of(h, 4), a);
    (void)mt_cosine_schedule(a, b, c, 1.0f, 0.1f);
    (void)mt_linear_schedule(a, b, c, 1.0f, 0.1f);
    mt_hash_log_tokens(h->ctx, a);
    (void)mt_params_at(h->rank.params, int_of(h, 0));
}

static void call_products(hostile *h, int64_t a, int64_t b, int64_t c) {
    said(h, mt_gemm(h->ctx, MT_NO_TRANS, MT_TRANS, 1.0f, view(h, a, c), view(h, b, c), 0.5f, view(h, a, b)));
    said(h, mt_gemm(h->ctx, MT_TRANS, MT_NO_TRANS, 1.0f, view(h, c, a), view(h, c, b), 0.0f, view(h, a, b)));
    said(h, mt_bias_forward(h->ctx, view(h, a, b), view(h, 1, b)));
    said(h, mt_bias_backward(h->ctx, view(h, a, b), view32(h, 1, b)));
    said(h, mt_linear_forward(h->ctx, view(h, a, b), view(h, c, b), maybe(h, view(h, 1, c)), view(h, a, c)));
    said(h, mt_linear_activation_forward(h->ctx, MT_GELU_TANH, view(h, a, b), view(h, c, b), maybe(h, view(h, 1, c)),
                                         view(h, a, c), view(h, a, c)));
    said(h, mt_linear_activation_backward(h->ctx, MT_SWIGLU, view(h, a, b), view(h, b, c), view(h, a, times(2, c)),
                                          view(h, a, times(2, c)), maybe(h, view32(h, 1, times(2, c)))));
    said(h, mt_linear_gradients(h->ctx, view(h, a, b), view(h, a, c), view32(h, b, c), maybe(h, view32(h, 1, b))));
}

static const int32_t documents[] = {0, 3, 9};

static void call_elements(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_random at = random_at(h, b);
    mt_adamw hyper = {0.1f, 0.9f, 0.99f, 1e-8f, 0.1f, 1.0f, size_of(h, 3), test_below(&h->random, 2) ? &at : NULL};
    int64_t width = times(2, b);
    said(h, mt_activation_forward(h->ctx, MT_SWIGLU, view(h, a, width), maybe(h, view(h, 1, width)), view(h, a, b)));
    said(h, mt_activation_forward(h->ctx, MT_GELU_ERF, view(h, a, b), maybe(h, view(h, 1, b)), view(h, a, b)));
    said(h, mt_activation_backward(h->ctx, MT_SWIGLU, view(h, a, width), view(h, a, b), view(h, a, width),
                                   maybe(h, view32(h, 1, width))));
    said(h, mt_norm_forward(h->ctx, MT_LAYER_NORM, view(h, a, b), view(h, 1, b), maybe(h, view(h, 1, b)), 1e-5f,
                            view(h, a, b), maybe(h, view32(h, a, 2))));
    said(h, mt_norm_backward(h->ctx, MT_RMS_NORM, view(h, a, b), view(h, 1, b), view32(h, a, 2), view(h, a, b),
                             maybe(h, view(h, a, b)), view(h, a, b), view32(h, 1, b), mt_none()));
    said(h, mt_random_normal(h->ctx, view(h, a, b), 1.0f, random_at(h, b)));
    said(h, mt_bias_dropout_add_forward(h->ctx, view(h, a, b), maybe(h, view(h, 1, b)), maybe(h, view(h, a, b)),
                                        dropout(h, b), view(h, a, b)));
    said(h,
         mt_bias_dropout_add_backward(h->ctx, view(h, a, b), dropout(h, b), view(h, a, b), maybe(h, view32(h, 1, b))));
    said(h, mt_adamw_step(h->ctx, &hyper, view(h, a, b), maybe(h, view32(h, a, b)), view32(h, a, b), view32(h, a, b),
                          view32(h, a, b)));
    said(h, mt_embedding_forward(h->ctx, view(h, c, b), size_of(h, 0), ids(h, a), 1.0f, view(h, a, b)));
    said(h, mt_embedding_backward(h->ctx, view(h, a, b), size_of(h, 0), ids(h, a), view32(h, c, b)));
    said(h, mt_ids_check(h->ctx, "id", ids(h, a), a, b, 0));
    said(h, mt_position_ids(h->ctx, b, c, NULL, 0, h->meta || a <= SIDE ? h->ids : NULL, a));
    said(h, mt_position_ids(h->ctx, b, c, documents, 2, h->meta || a <= SIDE ? h->ids : NULL, a));
}

static void call_attention(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_attention_desc s = {
        .batch = a, .seq = b, .groups = size_of(h, 1), .heads_per_group = size_of(h, 2), .head_dim = c};
    int64_t tokens = times(a, b), heads = times(s.groups, s.heads_per_group), both = s.heads_per_group;
    if (__builtin_add_overflow(both, 2, &both)) both = INT64_MAX;
    int64_t width = times(times(s.groups, both), c), out = times(heads, c);
    s.dropout = dropout(h, heads);
    said(h, mt_attention_forward(h->ctx, &s, view(h, tokens, width), view(h, tokens, out),
                                 maybe(h, view32(h, heads, tokens))));
    said(h, mt_attention_backward(h->ctx, &s, view(h, tokens, width), view(h, tokens, out), view32(h, heads, tokens),
                                  view(h, tokens, out), view(h, tokens, width)));
    said(h, mt_rotary_table(h->ctx, 10000.0f, view(h, b, c)));
    s.kv_seq = size_of(h, b);
    s.scores.window = size_of(h, 3);
    s.bias.value = maybe(h, view(h, times(times(a, heads), b), s.kv_seq));
    s.bias.grad = maybe(h, view32(h, times(times(a, heads), b), s.kv_seq));
    s.bias.batch = a, s.bias.heads = heads, s.bias.first_head = size_of(h, 0);
    int64_t keys = times(a, s.kv_seq), kv_width = times(s.groups, c);
    said(h, mt_dot_product_attention_forward(h->ctx, &s, view(h, tokens, out), view(h, keys, kv_width),
                                             view(h, keys, kv_width), view(h, tokens, out), mt_none()));
    said(h, mt_dot_product_attention_backward(h->ctx, &s, view(h, tokens, out), view(h, keys, kv_width),
                                              view(h, keys, kv_width), view(h, tokens, out), view32(h, heads, tokens),
                                              view(h, tokens, out), view(h, tokens, out), view(h, keys, kv_width),
                                              view(h, keys, kv_width)));
    s.scores.rotary_form = (mt_rotary_form)test_below(&h->random, 3);
    said(h, mt_rotary_forward(h->ctx, &s, view(h, b, c), view(h, tokens, width)));
    s.scores.rotary_dim = size_of(h, 0);
    said(h, mt_rotary_forward(h->ctx, &s, view(h, b, s.scores.rotary_dim), view(h, tokens, width)));
    said(h, mt_rotary_backward(h->ctx, &s, view(h, b, c), view(h, tokens, width)));
    s.cu_seqlens = documents, s.documents = 2, s.kv_seq = size_of(h, 0);
    said(h, mt_rotary_backward(h->ctx, &s, view(h, b, c), view(h, tokens, width)));
}

/* A cache of `batch` sequences with `groups` groups, and lengths of 0. */
static mt_kv_cache cache_of(hostile *h, int64_t batch, int64_t groups, int64_t head_dim) {
    mt_kv_cache k = {.max_seq = size_of(h, 8), .lengths = ids(h, batch)};
    int64_t rows = times(times(batch, groups), k.max_seq);
    k.keys = view(h, rows, head_dim);
    k.values = view_as(h, k.keys.dtype, rows, head_dim);
    return k;
}

static void call_kv_cache(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_attention_desc s = {
        .batch = a, .seq = b, .groups = size_of(h, 1), .heads_per_group = size_of(h, 2), .head_dim = c};
    int64_t tokens = times(a, b), heads = times(s.groups, s.heads_per_group), both = s.heads_per_group;
    if (__builtin_add_overflow(both, 2, &both)) both = INT64_MAX;
    int64_t width = times(times(s.groups, both), c);
    mt_kv_cache k = cache_of(h, a, s.groups, c);
    s.scores.window = size_of(h, 3);
    s.scores.rotary_form = (mt_rotary_form)test_below(&h->random, 3);
    s.scores.rotary_dim = test_below(&h->random, 2) ? 0 : size_of(h, 2);
    if (test_below(&h->random, 2)) s.lengths = ids(h, a);
    said(h, mt_kv_cache_append(h->ctx, &s, maybe(h, view(h, k.max_seq, s.scores.rotary_dim ? s.scores.rotary_dim : c)),
                               view_as(h, k.keys.dtype, tokens, width), &k));
    said(h, mt_kv_cache_attention(h->ctx, &s, view_as(h, k.keys.dtype, tokens, width), &k,
                                  view(h, tokens, times(heads, c))));
    said(h, mt_kv_cache_check(h->ctx, "the test", &s, &k));
    if (h->meta || (a >= 0 && b >= 0 && tokens <= SIDE))
        said(h, mt_kv_cache_positions(h->ctx, &k, a, b, (int32_t *)h->memory[0]));
    if (h->meta || a <= SIDE) said(h, mt_kv_cache_advance(h->ctx, k.max_seq, a, b, NULL, (int32_t *)h->memory[0]));
    memset(h->memory[0], 0, SIDE * sizeof(int32_t));
}

static void call_cross_entropy(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_cross_entropy_shard_desc s = {.vocab = size_of(h, b), .first_col = size_of(h, 0), .label_smoothing = 0.1f};
    mt_cross_entropy_desc d = {.vocab = size_of(h, b), .label_smoothing = 0.1f};
    mt_cross_entropy_saved saved;
    int shards = int_of(h, 2);
    mt_comm *tp = h->rank.grid.tp;
    (void)c;
    said(h, mt_cross_entropy_stats(h->ctx, &s, view(h, a, b), ids(h, a), view32(h, a, 4)));
    said(h, mt_cross_entropy_combine(h->ctx, &s, view32(h, times(shards, a), 4), shards, ids(h, a), view32(h, 1, a),
                                     view32(h, 2, a)));
    said(h, mt_cross_entropy_backward(h->ctx, &s, view(h, a, b), ids(h, a), view32(h, 2, a), maybe(h, view32(h, 1, a)),
                                      1.0f));
    said(h, mt_cross_entropy_forward_backward(h->ctx, &s, view(h, a, b), ids(h, a), maybe(h, view32(h, 1, a)), 1.0f,
                                              view32(h, 1, a)));
    said(h, mt_vocab_parallel_cross_entropy_forward(h->ctx, tp, &d, view(h, a, b), ids(h, a), view32(h, 1, a), &saved));
    said(h, mt_vocab_parallel_cross_entropy_forward_backward(h->ctx, tp, &d, view(h, a, b), ids(h, a),
                                                             maybe(h, view32(h, 1, a)), 1.0f, view32(h, 1, a)));
    saved.logits = view(h, a, b), saved.lse = view32(h, 2, a), saved.targets = ids(h, a);
    said(h, mt_vocab_parallel_cross_entropy_backward(h->ctx, tp, &d, maybe(h, view32(h, 1, a)), 1.0f, &saved));
}

static void call_softmax(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_softmax_shard_desc s = {
        .vocab = size_of(h, b), .first_col = size_of(h, 0), .log = (int)test_below(&h->random, 2)};
    int64_t vocab = size_of(h, b), padded = test_below(&h->random, 2) ? 0 : size_of(h, b);
    int shards = int_of(h, 2);
    mt_comm *tp = h->rank.grid.tp;
    (void)c;
    said(h, mt_softmax_forward(h->ctx, view(h, a, b), view(h, a, b)));
    said(h, mt_log_softmax_backward(h->ctx, view(h, a, b), view(h, a, b), view(h, a, b)));
    said(h, mt_softmax_shard_stats(h->ctx, &s, view(h, a, b), view32(h, a, 2)));
    said(h, mt_softmax_shard_forward(h->ctx, &s, view(h, a, b), view32(h, times(shards, a), 2), shards, view(h, a, b)));
    h->views = 0;
    said(h, mt_softmax_shard_sums(h->ctx, &s, maybe(h, view(h, a, b)), view(h, a, b), view32(h, a, 1)));
    said(h, mt_softmax_shard_backward(h->ctx, &s, view(h, a, b), view(h, a, b), view32(h, a, 1), view(h, a, b)));
    said(h, mt_vocab_parallel_softmax_forward(h->ctx, tp, vocab, padded, view(h, a, b), view(h, a, b)));
    h->views = 0;
    said(h, mt_vocab_parallel_log_softmax_backward(h->ctx, tp, vocab, padded, view(h, a, b), view(h, a, b),
                                                   view(h, a, b)));
}

static void call_sampling(hostile *h, int64_t a, int64_t b, int64_t c) {
    int64_t rows = a, k, padded = test_below(&h->random, 2) ? 0 : size_of(h, b);
    mt_sample_desc s = {.temperature = test_below(&h->random, 4) ? 1.0f : 0.0f,
                        .top_k = size_of(h, c),
                        .top_p = test_below(&h->random, 2) ? 0.5f : 0.0f,
                        .position = size_of(h, 3)};
    int shards = int_of(h, 2);
    int32_t *next = rows <= SIDE ? h->ids : NULL;
    k = times(2, mt_sample_count(&s, b));
    said(h, mt_sample_candidates(h->ctx, &s, size_of(h, b), size_of(h, 0), view(h, rows, b), view32(h, rows, k)));
    said(h, mt_sample_ids(h->ctx, &s, size_of(h, b), view32(h, times(shards, rows), k), shards, next));
    said(h, mt_vocab_parallel_sample(h->ctx, h->rank.grid.tp, size_of(h, b), padded, &s, view(h, rows, b), next));
    memset(h->ids, 0, sizeof h->ids);
}

/* ---- collectives and pipelines
 * --------------------------------------------------------------------------------------- */

static void call_collectives(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_comm *comm = h->rank.grid.tp;
    int ranks = mt_comm_size(comm);
    int64_t all = times(a, ranks), wide = times(b, ranks);
    size_t count = h->meta || (c >= 0 && c <= SIDE) ? (size_t)c : 0;
    static size_t counts[1024];
    for (int r = 0; r < ranks && r < 1024; r++) counts[r] = count;
    said(h, mt_all_reduce(h->ctx, comm, h->memory[0], h->memory[0], count, MT_F32, MT_SUM));
    said(h, mt_all_gather(h->ctx, comm, h->memory[0], h->memory[1], count, MT_F32));
    said(h, mt_reduce_scatter(h->ctx, comm, h->memory[0], h->memory[1], count, MT_F32, MT_SUM));
    said(h, mt_all_to_all(h->ctx, comm, h->memory[0], h->memory[1], count, MT_F32));
    if (ranks <= 1024) said(h, mt_all_to_all_v(h->ctx, comm, h->memory[0], counts, h->memory[1], counts, MT_F32));
    said(h, mt_broadcast(h->ctx, comm, h->memory[0], h->memory[0], count, MT_F32, int_of(h, 0)));
    if (h->meta) said(h, mt_send(h->ctx, comm, h->memory[0], count, MT_F32, int_of(h, 0)));
    if (h->meta) said(h, mt_recv(h->ctx, comm, h->memory[0], count, MT_F32, int_of(h, 0)));
    if (h->meta)
        said(h,
             mt_send_recv(h->ctx, comm, h->memory[0], count, int_of(h, 0), h->memory[1], count, int_of(h, 0), MT_F32));
    said(h, mt_copy_to_tensor_region_forward(h->ctx, comm, view(h, a, b)));
    said(h, mt_copy_to_tensor_region_backward(h->ctx, comm, view(h, a, b)));
    said(h, mt_reduce_from_tensor_region_forward(h->ctx, comm, view(h, a, b)));
    said(h, mt_scatter_to_tensor_region(h->ctx, comm, view32(h, a, wide), view32(h, a, b)));
    said(h, mt_gather_from_tensor_region(h->ctx, comm, view32(h, a, b), view32(h, a, wide)));
    said(h, mt_scatter_to_sequence_region(h->ctx, comm, view32(h, all, b), view32(h, a, b)));
    said(h, mt_gather_from_sequence_region(h->ctx, comm, view32(h, a, b), view32(h, all, b)));
    said(h, mt_reduce_scatter_to_sequence_region(h->ctx, comm, view32(h, all, b), view32(h, a, b)));
    said(h, mt_gather_ranks_from_sequence_region(h->ctx, comm, view32(h, a, b), view32(h, all, b), int_of(h, 0),
                                                 int_of(h, 1)));
    said(h, mt_reduce_scatter_ranks_to_sequence_region(h->ctx, comm, view32(h, all, b), view32(h, a, b), int_of(h, 0),
                                                       int_of(h, 1)));
    said(h, mt_reduce_rows_from_tensor_region(h->ctx, comm, view32(h, a, b), size_of(h, 0), size_of(h, 1)));
}

static mt_status does_nothing(mt_context *ctx, void *user, const mt_action *action, mt_tensor in, mt_tensor out) {
    return (void)ctx, (void)user, (void)action, (void)in, (void)out, MT_SUCCESS;
}

static void call_pipeline(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_pipeline_stage stage = {
        .rows = a, .cols = b, .dtype = MT_F32, .forward = does_nothing, .backward = does_nothing};
    mt_grid_desc shape = {int_of(h, 2), int_of(h, 0), int_of(h, 1), int_of(h, 1)};
    mt_action actions[64],
        hand = {.slot = int_of(h, 0), .recv_slot = int_of(h, 0), .kind = (mt_action_kind)int_of(h, 0)};
    mt_grid grid = h->rank.grid;
    mt_comm *pipeline = NULL;
    int count = 0, ranks[SIDE], micro_batches = int_of(h, 4);
    (void)c;
    if (micro_batches > 1 << 17) micro_batches = INT32_MAX; /* a long schedule is no error: avoid writing it */
    (void)mt_grid_ranks(&shape, int_of(h, 8) % SIDE, (mt_group)int_of(h, 1), int_of(h, 1), ranks, &count);
    (void)mt_pipeline_schedule((mt_schedule)int_of(h, 0), int_of(h, 2), int_of(h, 0), micro_batches, NULL, 0, &count);
    if (mt_pipeline_schedule(MT_SCHEDULE_1F1B, 3, 1, (int)test_below(&h->random, 5), actions, 64, &count) != MT_SUCCESS)
        fail_msg("a schedule of 64 actions");
    if (h->meta && mt_comm_create_meta(3, 1, &pipeline) == MT_SUCCESS) {
        grid.pp = pipeline;
        grid.pp_size = 3;
        grid.pp_rank = 1;
        said(h, mt_pipeline_run(h->ctx, &grid, &stage, actions, count));
        mt_comm_destroy(pipeline);
    }
    if (hand.kind == MT_FORWARD || hand.kind > MT_SEND_BACKWARD_RECV_FORWARD)
        said(h, mt_pipeline_run(h->ctx, &h->rank.grid, &stage, &hand, 1));
}

/* ---- layers and blocks
 * ----------------------------------------------------------------------------------------------- */

/* An allocator for small parameters only. */
static void *little(void *user, size_t bytes, size_t alignment) {
    void *memory = NULL;
    (void)user;
    return bytes <= (size_t)1 << 20 && posix_memalign(&memory, alignment, bytes) == 0 ? memory : NULL;
}

static void little_free(void *user, void *memory, size_t bytes) {
    (void)user, (void)bytes;
    free(memory);
}

static mt_status params(hostile *h) {
    mt_data_parallel_desc d = {.bucket_bytes = (size_t)size_of(h, 0),
                               .sharded_optimizer = test_below(&h->random, 2) == 0};
    mt_optimizer optimizer;
    mt_status status;
    said(h, mt_params_set_data_parallel(h->ctx, h->rank.params, &d));
    status = mt_params_init(h->ctx, h->rank.params, 1);
    said(h, status);
    if (status != MT_SUCCESS) return status;
    if (mt_optimizer_create(h->ctx, h->rank.params, NULL, &optimizer) == MT_SUCCESS)
        mt_optimizer_destroy(h->ctx, &optimizer);
    mt_arena_release(h->ctx, 0);
    return status;
}

static void call_params(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_param_desc d = {.name = "w",
                       .rows = a,
                       .cols = b,
                       .placement = (mt_placement)test_below(&h->random, 3),
                       .parts = c,
                       .unit = size_of(h, 1),
                       .init_std = 1.0f};
    if (test_below(&h->random, 2)) d.parts = 1, d.copies = size_of(h, 2), d.copied = size_of(h, 1);
    mt_param *p;
    mt_status status = mt_params_add(h->ctx, h->rank.params, &d, &p);
    said(h, status);
    if (status != MT_SUCCESS) return;
    d.name = "v";
    d.rows = size_of(h, 4);
    said(h, mt_params_add(h->ctx, h->rank.params, &d, &p));
    (void)params(h);
}

static void call_linear(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_linear_desc d = {.in_features = a,
                        .out_features = b,
                        .parts = size_of(h, 0),
                        .unit = size_of(h, 0),
                        .sequence_parallel = test_below(&h->random, 2) == 0};
    if (test_below(&h->random, 2)) d.parts = 1, d.split.copies = size_of(h, 2), d.split.copied = size_of(h, 1);
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_linear_saved saved;
    int ranks = d.sequence_parallel ? mt_comm_size(h->rank.grid.tp) : 1;
    mt_status first = mt_column_parallel_linear_create(h->ctx, h->rank.params, "column", &d, &column), second;
    said(h, first);
    d.input_is_parallel = 1;
    d.split.copies = d.split.copied = 0;
    second = mt_row_parallel_linear_create(h->ctx, h->rank.params, "row", &d, &row);
    said(h, second);
    if (params(h) != MT_SUCCESS) return;
    if (first == MT_SUCCESS) {
        int64_t rows = times(c, ranks);
        said(h, mt_parallel_linear_forward(h->ctx, &column, view32(h, c, a), view32(h, rows, column.local_features),
                                           &saved));
        saved.x = view32(h, c, a);
        said(h, mt_parallel_linear_backward(h->ctx, &column, view32(h, rows, column.local_features),
                                            maybe(h, view32(h, c, a)), &saved));
    }
    if (second == MT_SUCCESS) {
        int64_t rows = times(c, ranks);
        said(h, mt_parallel_linear_forward(h->ctx, &row, view32(h, rows, row.local_features), view32(h, c, b), &saved));
        saved.x = view32(h, rows, row.local_features);
        said(h, mt_parallel_linear_backward(h->ctx, &row, view32(h, c, b),
                                            maybe(h, view32(h, rows, row.local_features)), &saved));
    }
}

static void call_embedding(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_embedding_desc d = {.vocab = a, .features = b, .sequence_parallel = test_below(&h->random, 2) == 0};
    mt_vocab_parallel_embedding e;
    int ranks = d.sequence_parallel ? mt_comm_size(h->rank.grid.tp) : 1;
    mt_status status = mt_vocab_parallel_embedding_create(h->ctx, h->rank.params, "e", &d, &e);
    said(h, status);
    if (status != MT_SUCCESS || params(h) != MT_SUCCESS) return;
    said(h, mt_vocab_parallel_embedding_forward(h->ctx, &e, ids(h, c), c, view32(h, c / ranks, b)));
    said(h, mt_vocab_parallel_embedding_backward(h->ctx, &e, ids(h, c), c, view32(h, c / ranks, b)));
}

static mt_batch batch_of(hostile *h, int64_t sequences, int64_t seq) {
    mt_batch batch = {.sequences = sequences,
                      .seq = seq,
                      .first_sequence = size_of(h, 1),
                      .seed = 1,
                      .step = (uint64_t)size_of(h, 1)};
    return batch;
}

static void call_mlp(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_mlp_desc d = {.hidden = a,
                     .ffn = b,
                     .activation = test_below(&h->random, 2) ? MT_SWIGLU : MT_GELU_TANH,
                     .sequence_parallel = test_below(&h->random, 2) == 0};
    mt_mlp_saved saved;
    mt_mlp mlp;
    mt_status status = mt_mlp_create(h->ctx, h->rank.params, "mlp", &d, &mlp);
    said(h, status);
    if (status != MT_SUCCESS || params(h) != MT_SUCCESS) return;
    said(h, mt_mlp_forward(h->ctx, &mlp, view32(h, c, a), view32(h, c, a), NULL));
    if (mt_mlp_forward(h->ctx, &mlp, view32(h, c, a), view32(h, c, a), &saved) == MT_SUCCESS)
        said(h, mt_mlp_backward(h->ctx, &mlp, view32(h, c, a), maybe(h, view32(h, c, a)), &saved));
}

static void call_cross_attention(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_cross_attention_desc d = {.hidden = size_of(h, 8),
                                 .heads = size_of(h, 2),
                                 .kv_heads = size_of(h, 0),
                                 .kv_hidden = size_of(h, 6),
                                 .dropout = 0.1f,
                                 .layer_number = size_of(h, 0),
                                 .sequence_parallel = test_below(&h->random, 2) == 0};
    mt_cross_attention_saved saved;
    mt_cross_attention layer;
    mt_batch batch = batch_of(h, a, b), memory_batch = batch;
    int ranks = d.sequence_parallel ? mt_comm_size(h->rank.grid.tp) : 1;
    int64_t rows = times(a, b) / ranks, keys;
    mt_status status = mt_cross_attention_create(h->ctx, h->rank.params, "cross", &d, &layer);
    memory_batch.seq = size_of(h, c);
    memory_batch.sequences = size_of(h, batch.sequences);
    keys = times(a, c) / ranks;
    said(h, status);
    if (status != MT_SUCCESS || params(h) != MT_SUCCESS) return;
    status = mt_cross_attention_forward(h->ctx, &layer, &batch, view32(h, rows, d.hidden), &memory_batch,
                                        view32(h, keys, d.kv_hidden), view32(h, rows, d.hidden), &saved);
    if (status == MT_SUCCESS)
        status = mt_cross_attention_backward(h->ctx, &layer, view32(h, rows, d.hidden), view32(h, rows, d.hidden),
                                             maybe(h, view32(h, keys, d.kv_hidden)), &saved);
    said(h, status);
}

static void call_layer(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_transformer_layer_desc d = {.hidden = size_of(h, 8),
                                   .heads = size_of(h, 2),
                                   .kv_heads = size_of(h, 0),
                                   .ffn = size_of(h, 0),
                                   .scores.rotary_base = test_below(&h->random, 2) ? 10000.0f : 0.0f,
                                   .max_seq = size_of(h, 8),
                                   .dropout.attention = 0.1f,
                                   .dropout.hidden = 0.1f,
                                   .dropout.layer_number = size_of(h, 0),
                                   .scores.rotary_form = (mt_rotary_form)test_below(&h->random, 2),
                                   .scores.rotary_dim = test_below(&h->random, 2) ? size_of(h, 2) : 0,
                                   .sequence_parallel = test_below(&h->random, 2) == 0};
    mt_transformer_layer_saved saved;
    mt_transformer_layer layer;
    mt_batch batch = batch_of(h, a, b);
    int ranks = d.sequence_parallel ? mt_comm_size(h->rank.grid.tp) : 1;
    int64_t rows = times(a, b) / ranks;
    mt_kv_cache cache;
    mt_status status = mt_transformer_layer_create(h->ctx, h->rank.params, "layer", &d, &layer);
    (void)c;
    said(h, status);
    if (status != MT_SUCCESS || params(h) != MT_SUCCESS) return;
    said(h, mt_transformer_layer_forward(h->ctx, &layer, &batch, view32(h, rows, d.hidden), view32(h, rows, d.hidden),
                                         NULL));
    cache = cache_of(h, a, mt_self_attention_cache_groups(&layer.attention), layer.attention.head_dim);
    said(h, mt_transformer_layer_cached_forward(h->ctx, &layer, &batch, &cache, view32(h, times(a, b), d.hidden),
                                                view32(h, times(a, b), d.hidden)));
    said(h, mt_self_attention_cached_forward(h->ctx, &layer.attention, &batch, &cache, view32(h, times(a, b), d.hidden),
                                             view32(h, times(a, b), d.hidden)));
    if (mt_transformer_layer_forward(h->ctx, &layer, &batch, view32(h, rows, d.hidden), view32(h, rows, d.hidden),
                                     &saved) == MT_SUCCESS)
        said(h, mt_transformer_layer_backward(h->ctx, &layer, view32(h, rows, d.hidden), view32(h, rows, d.hidden),
                                              &saved));
}

/* A cache of a model, with a random length. */
static void call_gpt_cache(hostile *h, const mt_gpt *gpt, const mt_batch *batch, int64_t a, int64_t b, int64_t c) {
    int64_t tokens = times(a, b), bytes = mt_gpt_cache_bytes(gpt, a, c);
    mt_gpt_cache cache;
    assert_true(bytes >= -1);
    if (mt_gpt_cache_create(h->ctx, gpt, test_below(&h->random, 4) ? a : size_of(h, 1), c, &cache) != MT_SUCCESS)
        return;
    said(h, mt_gpt_cache_set_length(h->ctx, &cache, size_of(h, 0), size_of(h, 0)));
    said(h, mt_gpt_cached_logits(h->ctx, gpt, batch, ids(h, tokens), &cache,
                                 maybe(h, view32(h, test_below(&h->random, 2) ? a : tokens, gpt->desc.vocab))));
    mt_gpt_cache_destroy(h->ctx, &cache);
}

static void call_gpt(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_gpt_desc d = {.vocab = size_of(h, 16),
                     .layers = size_of(h, 1),
                     .max_seq = size_of(h, 8),
                     .layer = {.hidden = size_of(h, 8), .heads = size_of(h, 2)},
                     .recompute_layers = size_of(h, 0),
                     .embedding_dropout = 0.1f};
    mt_gpt_saved saved;
    mt_gpt gpt;
    mt_batch batch = batch_of(h, a, b);
    int64_t tokens = times(a, b);
    mt_status status = mt_gpt_create(h->ctx, h->rank.params, &d, &gpt);
    said(h, status);
    if (status != MT_SUCCESS || params(h) != MT_SUCCESS || mt_gpt_saved_create(h->ctx, &gpt, &saved) != MT_SUCCESS)
        return;
    if (mt_gpt_forward(h->ctx, &gpt, &batch, ids(h, tokens), ids(h, tokens), view32(h, 1, tokens), &saved) ==
        MT_SUCCESS)
        said(h, mt_gpt_backward(h->ctx, &gpt, 1.0f, &saved));
    mt_arena_release(h->ctx, 0);
    said(h, mt_gpt_logits(h->ctx, &gpt, &batch, ids(h, tokens), view32(h, test_below(&h->random, 2) ? a : c, d.vocab)));
    mt_gpt_saved_destroy(&saved);
    call_gpt_cache(h, &gpt, &batch, a, b, c);
}

static void call_bert(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_bert_desc d = {.vocab = size_of(h, 16),
                      .layers = size_of(h, 1),
                      .max_seq = size_of(h, 8),
                      .layer = {.hidden = size_of(h, 8), .heads = size_of(h, 2)},
                      .no_binary_head = test_below(&h->random, 4) == 0,
                      .token_types = test_below(&h->random, 2) ? size_of(h, 2) : 0,
                      .recompute_layers = size_of(h, 0)};
    mt_bert_saved saved;
    mt_bert bert;
    mt_batch batch = batch_of(h, a, b);
    int64_t tokens = times(a, b);
    const int32_t *order = d.no_binary_head ? NULL : ids(h, a);
    mt_tensor sop = d.no_binary_head ? mt_none() : view32(h, 1, a);
    mt_status status = mt_bert_create(h->ctx, h->rank.params, &d, &bert);
    if (test_below(&h->random, 2)) batch.token_types = ids(h, tokens);
    said(h, status);
    if (status != MT_SUCCESS || params(h) != MT_SUCCESS || mt_bert_saved_create(h->ctx, &bert, &saved) != MT_SUCCESS)
        return;
    if (mt_bert_forward(h->ctx, &bert, &batch, ids(h, tokens), ids(h, tokens), order, view32(h, 1, tokens), sop,
                        &saved) == MT_SUCCESS)
        said(h, mt_bert_backward(h->ctx, &bert, 1.0f, 1.0f, &saved));
    mt_arena_release(h->ctx, 0);
    said(h, mt_bert_logits(h->ctx, &bert, &batch, ids(h, tokens), maybe(h, view32(h, c, d.vocab)),
                           maybe(h, view32(h, a, 2))));
    mt_bert_saved_destroy(&saved);
}

static void call_language_model(hostile *h, int64_t a, int64_t b, int64_t c) {
    mt_language_model_desc d = {.vocab = size_of(h, 16),
                                .layers = size_of(h, 1),
                                .max_seq = size_of(h, 8),
                                .layer = {.hidden = size_of(h, 8), .heads = size_of(h, 2)},
                                .token_types = size_of(h, 2),
                                .embedding_norm = test_below(&h->random, 2) == 0,
                                .padded_vocab = test_below(&h->random, 2) ? size_of(h, 16) : 0};
    mt_language_model_saved saved;
    mt_language_model model;
    mt_batch batch = batch_of(h, a, b);
    int64_t tokens = times(a, b), rows = test_below(&h->random, 2) ? tokens : c;
    mt_tensor none = mt_none();
    mt_status status = mt_language_model_create(h->ctx, h->rank.params, &d, &model);
    if (test_below(&h->random, 2)) batch.token_types = ids(h, tokens);
    said(h, status);
    if (status != MT_SUCCESS || params(h) != MT_SUCCESS) return;
    if (mt_language_model_saved_create(h->ctx, &model, &saved) != MT_SUCCESS) return;
    if (mt_language_model_forward(h->ctx, &model, &batch, ids(h, tokens), none, view32(h, rows, d.layer.hidden),
                                  &saved) == MT_SUCCESS)
        said(h, mt_language_model_backward(h->ctx, &model, view32(h, rows, d.layer.hidden), none, &saved));
    mt_language_model_saved_destroy(&saved);
}

static void call_host(hostile *h, int64_t a, int64_t b, int64_t c) {
    static float qkv[8 * 8 * 8 * 4], q[8 * 8 * 8 * 4], k[8 * 8 * 8 * 4], v[8 * 8 * 8 * 4];
    int fits = a <= 8 && b <= 8 && c <= 8;
    int64_t kv = size_of(h, a);
    char path[256];
    mt_loss_scaler scaler;
    float norm = 1.0f;
    if (kv > 8) fits = 0;
    (void)mt_qkv_from_separate(a, kv, b, c, fits ? q : NULL, k, v, qkv);
    (void)mt_qkv_to_separate(a, kv, b, c, fits ? qkv : NULL, q, k, v);
    (void)mt_rotary_halves_from_pairs(a, b, kv, c, fits ? q : NULL, qkv);
    (void)mt_rotary_pairs_from_halves(a, b, kv, c, fits ? q : NULL, qkv);
    said(h, mt_checkpoint_path(h->ctx, "directory", a, path, sizeof path));
    assert_true(mt_loss_scaler_create(h->ctx, NULL, &scaler) == MT_SUCCESS);
    assert_true(mt_loss_scaler_update(NULL, &norm) == 0.0f && mt_loss_scaler_update(&scaler, NULL) == 0.0f);
    assert_true(norm == 1.0f && scaler.good_steps == 0 && scaler.skipped == 0);
}

/* ---- all of them
 * ----------------------------------------------------------------------------------------------------- */

typedef void (*calls)(hostile *h, int64_t a, int64_t b, int64_t c);

static const struct {
    const char *name;
    calls call;
    int creates; /* the calls create parameters, so the registry is replaced */
} all_calls[] = {{"memory", call_memory, 0},
                 {"views", call_views, 0},
                 {"products", call_products, 0},
                 {"elements", call_elements, 0},
                 {"attention", call_attention, 0},
                 {"key/value cache", call_kv_cache, 0},
                 {"cross-entropy", call_cross_entropy, 0},
                 {"softmax", call_softmax, 0},
                 {"sampling", call_sampling, 0},
                 {"collectives", call_collectives, 0},
                 {"pipeline", call_pipeline, 0},
                 {"host", call_host, 0},
                 {"params", call_params, 1},
                 {"linear", call_linear, 1},
                 {"embedding", call_embedding, 1},
                 {"mlp", call_mlp, 1},
                 {"cross-attention", call_cross_attention, 1},
                 {"layer", call_layer, 1},
                 {"gpt", call_gpt, 1},
                 {"bert", call_bert, 1},
                 {"language model", call_language_model, 1}};

static void call_all(const mt_context_desc *where, int ranks) {
    static hostile h;
    int calls = ranks > 1000 ? CALLS / 4 : CALLS; /* check mode looks at the rows of each rank */
    memset(&h, 0, sizeof h);
    h.random = 7;
    h.meta = where->device == MT_DEVICE_META;
    test_paper_rank(ranks, ranks / 2, (mt_grid_desc){.tp = ranks}, where, &h.rank);
    h.ctx = h.rank.ctx;
    for (size_t f = 0; f < sizeof all_calls / sizeof *all_calls; f++) {
        now_testing = all_calls[f].name;
        alarm(SECONDS);
        for (int i = 0; i < (all_calls[f].creates ? calls / 4 : calls); i++) {
            int64_t a = size_of(&h, small(&h)), b = size_of(&h, small(&h)), c = size_of(&h, small(&h));
            h.views = 0;
            all_calls[f].call(&h, a, b, c);
            if (all_calls[f].creates) ASSERT_STATUS(h.ctx, MT_SUCCESS, test_rank_renew(&h.rank));
        }
        alarm(0);
    }
    test_paper_rank_close(&h.rank);
}

static void test_on_a_cpu(void **state) {
    mt_context_desc where = {.arena_bytes = (size_t)1 << 20, .allocator = {little, little_free, NULL}};
    (void)state;
    call_all(&where, 1);
    where.invariant = 2;
    call_all(&where, 1);
}

static void test_on_paper(void **state) {
    static const int ranks[] = {1, 2, 8, 100000};
    (void)state;
    for (int i = 0; i < 4; i++) call_all(&(mt_context_desc){.device = MT_DEVICE_META}, ranks[i]);
    call_all(&(mt_context_desc){.device = MT_DEVICE_META, .invariant = 8}, 2);
}

/* Data that is not aligned to its elements is refused, wherever it is: also in a view that a call only reads, in the
   arena of the meta device, and in a group of one. */
static void test_misaligned(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        mt_context_desc where = {.device = i % 2 ? MT_DEVICE_META : MT_DEVICE_CPU};
        const char *words = "is not aligned to its 4-byte elements";
        mt_tensor x, y, z;
        test_rank r;
        test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &where, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 5, 4, &x));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &y));
        x = mt_tensor_rows(x, 0, 4);
        z = x;
        x.data = (char *)x.data + (i < 2 ? 1 : 2);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_fill(r.ctx, x, 0.0f));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_copy(r.ctx, x, y));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_add(r.ctx, y, x, y));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_gemm(r.ctx, MT_NO_TRANS, MT_TRANS, 1.0f, y, x, 0.0f, z));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_bias_backward(r.ctx, y, mt_tensor_rows(x, 0, 1)));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_silu_forward(r.ctx, y, x));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_copy_to_tensor_region_backward(r.ctx, r.grid.tp, x));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_gather_from_sequence_region(r.ctx, r.grid.tp, x, y));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "is not aligned",
                mt_all_reduce(r.ctx, r.grid.tp, x.data, x.data, 4, MT_F32, MT_SUM));
        test_paper_rank_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_on_a_cpu), cmocka_unit_test(test_on_paper),
                                       cmocka_unit_test(test_misaligned)};
    signal(SIGALRM, takes_too_long);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
