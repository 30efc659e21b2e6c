/* test_context.c - context ranks, each of which has a part of every sequence: embedding, positions, MLP and loss on
   every split of the ranks are those of one rank. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

#ifndef INVARIANT_MODE_ONLY
#define INVARIANT_MODE_ONLY 0
#endif

enum {
    VOCAB = 23,
    HIDDEN = 16,
    SEQ = 16,
    SEQUENCES = 4,
    STEPS = 3,
    TOKENS = SEQ * SEQUENCES,
    MEMORY = 8,
    WEIGHTS = 1 << 13
};

/* ---- a model without attention ----------------------------------------------------------------------------------- */

typedef struct found {
    float loss[STEPS], norm[STEPS], weights[WEIGHTS], grads[WEIGHTS]; /* grads: of the first step */
    float bias[4 * SEQ * SEQ];                                        /* its gradient in the first step */
    float last[2][SEQUENCES * VOCAB]; /* logits: of the last tokens, without and with a cache; of BERT those of the
                                         first tokens, and two of each sequence */
    int64_t count;
} found;

/* Layers without attention or with some before the MLP, where cross-attention has its memory in parts or whole; a GPT
   like GPT-2 or like Llama; a BERT; a GPT of packed documents whose scores have all that scores can have. */
enum model_kind { LAYERS, SELF_ATTENTION, MEMORY_IN_PARTS, WHOLE_MEMORY, GPT2, LLAMA, BERT, OF_DOCUMENTS };

typedef struct split {
    int tp, cp, dp;
    int sequence_parallel, zigzag, sharded, check;
    int as_data;                  /* 1: the context ranks are data ranks to the grid, with the same tokens */
    int few;                      /* 1: few tokens have a loss */
    int invariant, micro_batches; /* virtual context ranks, and micro-batches of all data ranks; 0: not in this mode */
    enum model_kind model;
    mt_cp_comm_type comm_type;
    found *out;
} split;

typedef struct model {
    test_rank r;
    const split *s;
    mt_vocab_parallel_embedding words, memory_words; /* two tables: in invariant mode each has one sum */
    mt_param *positions;
    mt_gpt gpt;
    mt_gpt_saved gpt_saved;
    mt_bert bert;
    mt_bert_saved bert_saved;
    mt_norm_layer attention_norm, norm;
    mt_self_attention attention;
    mt_cross_attention cross;
    mt_mlp mlp;
    mt_column_parallel_linear head;
    mt_optimizer adam;
    int64_t tokens, memory_tokens; /* of this rank's sequences */
    int micro;                     /* number of the micro-batch of this rank */
    int32_t ids[TOKENS], targets[TOKENS], places[TOKENS], types[TOKENS], memory_ids[TOKENS]; /* of this rank */
} model;

static int is_gpt(const split *s) { return s->model == GPT2 || s->model == LLAMA || s->model == OF_DOCUMENTS; }
static int has_memory(const split *s) { return s->model == MEMORY_IN_PARTS || s->model == WHOLE_MEMORY; }

static mt_context_parallel_desc context_of(const split *s) {
    return (mt_context_parallel_desc){.comm_type = s->comm_type,
                                      .contiguous = !s->zigzag,
                                      .whole_keys = s->model == WHOLE_MEMORY,
                                      .invariant = s->invariant};
}

/* Token `at` of a sequence. */
static int32_t token(int sequence, int at) { return (5 * sequence + at * at + at / 3) % VOCAB; }

/* The tokens that count: ranks have other numbers of them. With `few`, of 4 context ranks two have none, or three of
   contiguous ones. */
static int counts(const split *s, int sequence, int at) {
    if (s->few) return at < SEQ / 4 - 1;
    return sequence % 2 ? at % 5 != 0 : at < SEQ / 4;
}

/* The numbers of the sequences of a micro-batch. */
static int sequences_of(const split *s) { return SEQUENCES / (s->micro_batches ? s->micro_batches : s->dp); }
static int first_sequence_of(const model *m) {
    const split *s = m->s;
    const int d = mt_comm_rank(m->r.grid.dp_cp) / s->cp;
    return sequences_of(s) * (s->micro_batches ? s->micro_batches / s->dp * d + m->micro : d);
}

/* The same for the memory, by the library's own rule. */
static void fill_memory(model *m, int c) {
    const split *s = m->s;
    const mt_context_parallel_desc context = context_of(s);
    const int whole = s->model == WHOLE_MEMORY, sequences = sequences_of(s);
    m->memory_tokens = sequences * MEMORY / (whole ? 1 : s->cp);
    for (int64_t i = 0; i < m->memory_tokens; i++) {
        const int64_t of = mt_context_parallel_token(&context, whole ? 0 : c, whole ? 1 : s->cp, sequences, MEMORY, i);
        m->memory_ids[i] = token(first_sequence_of(m) + (int)(of / MEMORY), 3 + (int)(of % MEMORY));
    }
}

/* The rows of a micro-batch, by the library's own rule. */
static void fill_invariant_rows(model *m) {
    const split *s = m->s;
    const mt_context_parallel_desc context = context_of(s);
    const int sequences = sequences_of(s), first = first_sequence_of(m);
    m->tokens = sequences * SEQ / s->cp;
    for (int64_t i = 0; i < m->tokens; i++) {
        const int64_t of = mt_context_parallel_token(&context, m->r.grid.cp_rank, s->cp, sequences, SEQ, i);
        const int sequence = first + (int)(of / SEQ), at = (int)(of % SEQ);
        m->ids[i] = token(sequence, at);
        m->targets[i] = counts(s, sequence, at) ? token(sequence, at + 1) : -100;
        m->places[i] = at;
        m->types[i] = at > SEQ / 3;
    }
    fill_memory(m, m->r.grid.cp_rank);
}

/* Fills in the rows of this rank: its part of each of its sequences, or chunk c of each, and then chunk 2 cp - 1 - c of
   each. The next token is the target, also where another rank has it. */
static void fill_rows(model *m) {
    const split *s = m->s;
    if (s->invariant) fill_invariant_rows(m);
    if (s->invariant) return;
    const int rank = mt_comm_rank(m->r.grid.dp_cp), c = rank % s->cp, d = rank / s->cp;
    const int chunks = s->zigzag ? 2 : 1, length = SEQ / s->cp / chunks;
    m->tokens = 0;
    for (int chunk = 0; chunk < chunks; chunk++)
        for (int sequence = d * SEQUENCES / s->dp; sequence < (d + 1) * SEQUENCES / s->dp; sequence++)
            for (int i = 0; i < length; i++, m->tokens++) {
                int at = (chunk ? 2 * s->cp - 1 - c : c) * length + i;
                m->ids[m->tokens] = token(sequence, at);
                m->targets[m->tokens] = counts(s, sequence, at) ? token(sequence, at + 1) : -100;
                m->places[m->tokens] = at;
                m->types[m->tokens] = at > SEQ / 3;
            }
    fill_memory(m, c);
}

static mt_status gpt_create(model *m) {
    mt_gpt_desc d = {.vocab = VOCAB, .layers = 2, .max_seq = SEQ, .embedding_dropout = 0.1f};
    d.layer.hidden = HIDDEN, d.layer.heads = 4, d.layer.ffn = 24;
    d.layer.sequence_parallel = m->s->sequence_parallel;
    d.layer.dropout.attention = d.layer.dropout.hidden = 0.1f;
    d.layer.recompute = m->s->zigzag ? MT_RECOMPUTE_SELECTIVE : m->s->cp == 2 ? MT_RECOMPUTE_FULL : MT_RECOMPUTE_NONE;
    if (m->s->model == LLAMA) {
        d.layer.kv_heads = 2, d.layer.scores.rotary_base = 100.0f, d.layer.no_bias = d.untied_head = 1;
        d.layer.norm.kind = MT_RMS_NORM, d.layer.activation = MT_SWIGLU, d.layer.qkv_layout = MT_QKV_SEPARATE;
    }
    if (m->s->model == OF_DOCUMENTS) d.layer.scores.alibi = 1, d.layer.scores.window = 7, d.layer.scores.softcap = 2.0f;
    MT_TRY(mt_gpt_create(m->r.ctx, m->r.params, &d, &m->gpt));
    return mt_gpt_saved_create(m->r.ctx, &m->gpt, &m->gpt_saved);
}

static mt_status bert_create(model *m) {
    mt_bert_desc d = {.vocab = VOCAB, .layers = 1, .max_seq = SEQ, .embedding_dropout = 0.1f};
    d.layer.hidden = HIDDEN, d.layer.heads = 4, d.layer.ffn = 24, d.layer.norm.placement = MT_POST_LN;
    d.layer.sequence_parallel = m->s->sequence_parallel;
    d.layer.dropout.attention = d.layer.dropout.hidden = 0.1f;
    MT_TRY(mt_bert_create(m->r.ctx, m->r.params, &d, &m->bert));
    return mt_bert_saved_create(m->r.ctx, &m->bert, &m->bert_saved);
}

/* Adds a block that reads a memory, after the self-attention. */
static mt_status cross_create(model *m) {
    mt_cross_attention_desc d = {.hidden = HIDDEN, .heads = 4, .kv_heads = 2, .dropout = 0.1f};
    d.sequence_parallel = m->s->sequence_parallel;
    d.recompute_core = m->s->zigzag;
    MT_TRY(mt_vocab_parallel_embedding_create(
        m->r.ctx, m->r.params, "memory_words",
        &(mt_embedding_desc){.vocab = VOCAB, .features = HIDDEN, .sequence_parallel = d.sequence_parallel},
        &m->memory_words));
    return mt_cross_attention_create(m->r.ctx, m->r.params, "cross", &d, &m->cross);
}

static mt_status layers_create(model *m) {
    const int sp = m->s->sequence_parallel;
    mt_context *ctx = m->r.ctx;
    mt_params *params = m->r.params;
    MT_TRY(mt_vocab_parallel_embedding_create(
        ctx, params, "words", &(mt_embedding_desc){.vocab = VOCAB, .features = HIDDEN, .sequence_parallel = sp},
        &m->words));
    MT_TRY(mt_params_add(
        ctx, params,
        &(mt_param_desc){.name = "positions", .rows = SEQ, .cols = HIDDEN, .init_std = 0.1f, .sequence_partial = sp},
        &m->positions));
    if (m->s->model >= SELF_ATTENTION) {
        mt_self_attention_desc d = {.hidden = HIDDEN,
                                    .heads = 4,
                                    .kv_heads = 2,
                                    .dropout = 0.1f,
                                    .max_seq = SEQ,
                                    .scores.rotary_base = 100.0f,
                                    .sequence_parallel = sp};
        d.recompute_core = m->s->zigzag;
        MT_TRY(mt_norm_layer_create(ctx, params, "attention_norm",
                                    &(mt_norm_layer_desc){.features = HIDDEN, .sequence_parallel = sp},
                                    &m->attention_norm));
        MT_TRY(mt_self_attention_create(ctx, params, "attention", &d, &m->attention));
    }
    if (has_memory(m->s)) MT_TRY(cross_create(m));
    MT_TRY(mt_norm_layer_create(ctx, params, "norm", &(mt_norm_layer_desc){.features = HIDDEN, .sequence_parallel = sp},
                                &m->norm));
    MT_TRY(mt_mlp_create(ctx, params, "mlp", &(mt_mlp_desc){.hidden = HIDDEN, .sequence_parallel = sp}, &m->mlp));
    return mt_column_parallel_linear_create(
        ctx, params, "head",
        &(mt_linear_desc){.in_features = HIDDEN, .out_features = VOCAB, .no_bias = 1, .sequence_parallel = sp},
        &m->head);
}

static mt_status model_create(model *m) {
    const mt_data_parallel_desc share = {.sharded_optimizer = m->s->sharded, .bucket_bytes = 2048};
    MT_TRY(mt_parallel_set_options(m->r.ctx, &(mt_parallel_options){.context = context_of(m->s)}));
    MT_TRY(mt_params_set_data_parallel(m->r.ctx, m->r.params, &share));
    MT_TRY(m->s->model == BERT ? bert_create(m) : is_gpt(m->s) ? gpt_create(m) : layers_create(m));
    MT_TRY(mt_params_init(m->r.ctx, m->r.params, 1234));
    MT_TRY(disturb_params(&m->r, 0.1f));
    return mt_optimizer_create(m->r.ctx, m->r.params, NULL, &m->adam);
}

/* Returns the tokens that count, on all data ranks. */
static mt_status counted(model *m, float *total) {
    *total = 0;
    for (int i = 0; i < TOKENS; i++) *total += (float)counts(m->s, i / SEQ, i % SEQ);
    if (m->s->invariant) return MT_SUCCESS; /* those of all micro-batches */
    *total = 0;
    for (int64_t i = 0; i < m->tokens; i++) *total += m->targets[i] >= 0;
    return mt_all_reduce(m->r.ctx, m->r.grid.dp_cp, total, total, 1, MT_F32, MT_SUM);
}

static mt_batch batch_of(const model *m) {
    return (mt_batch){.sequences = sequences_of(m->s), .seq = SEQ, .first_sequence = first_sequence_of(m), .seed = 5};
}

/* *loss becomes the sum of the losses of all tokens, divided by those that count. */
static mt_status mean_loss(model *m, mt_tensor losses, float total, float *loss) {
    const int parts = m->s->invariant ? m->s->invariant / m->s->cp : 1;
    mt_tensor sums, sum;
    MT_TRY(mt_arena_tensor(m->r.ctx, MT_F32, parts, 1, &sums));
    MT_TRY(mt_fill(m->r.ctx, sums, 0));
    for (int i = 0; i < parts; i++) { /* of the virtual context ranks */
        const int64_t n = losses.cols / parts;
        MT_TRY(mt_sum(m->r.ctx, mt_tensor_cols(losses, i * n, n), mt_tensor_rows(sums, i, 1)));
    }
    MT_TRY(mt_tree_sum(m->r.ctx, sums));
    sum = mt_tensor_rows(sums, 0, 1);
    MT_TRY(mt_all_reduce(m->r.ctx, m->s->invariant ? m->r.grid.cp : m->r.grid.dp_cp, sum.data, sum.data, 1, MT_F32,
                         MT_SUM));
    if (m->s->invariant) MT_TRY(mt_declare(m->r.ctx, NULL, sum, MT_UNDECLARED)); /* of one of the data ranks */
    MT_TRY(mt_download(m->r.ctx, sum, loss));
    *loss /= total;
    return MT_SUCCESS;
}

/* Packed documents, and a bias of each head. */
static mt_status pack(model *m, mt_batch *batch) {
    static const int32_t all[] = {0, 5, 17, 30, 40, TOKENS}, first[] = {0, 5, 17, 30, TOKENS / 2},
                         second[] = {0, 8, TOKENS / 2};
    const int n = sizeof m->s->out->bias / sizeof(float);
    float *bias = test_floats(&m->r, n, 0), *grad = test_floats(&m->r, n, 0);
    for (int i = 0; i < n; i++) bias[i] = (float)(i * 7 % 11) / 5 - 1;
    batch->cu_seqlens = m->s->dp == 1 ? all : batch->first_sequence == 0 ? first : second;
    batch->documents = m->s->dp == 1 ? 5 : batch->first_sequence == 0 ? 4 : 2;
    batch->bias.value = mt_tensor_f32(bias, 4 * SEQ, SEQ);
    batch->bias.grad = mt_tensor_f32(grad, 4 * SEQ, SEQ);
    batch->bias.heads = 4;
    return MT_SUCCESS;
}

/* The gradient of the bias is the sum of what all ranks have. */
static mt_status keep_bias(model *m, mt_tensor grad) {
    const size_t n = (size_t)(grad.rows * grad.cols);
    MT_TRY(mt_all_reduce(m->r.ctx, m->r.grid.tp, grad.data, grad.data, n, MT_F32, MT_SUM));
    MT_TRY(mt_all_reduce(m->r.ctx, m->r.grid.dp_cp, grad.data, grad.data, n, MT_F32, MT_SUM));
    if (mt_comm_rank(m->r.world) == 0 && m->s->out->norm[0] == 0 /* the first step */)
        memcpy(m->s->out->bias, grad.data, sizeof m->s->out->bias);
    return MT_SUCCESS;
}

static mt_status gpt_forward_backward(model *m, float *loss) {
    static const int32_t documents[] = {0, 5, 17, 30, 2 * SEQ}; /* of a micro-batch */
    mt_batch batch = batch_of(m);
    mt_tensor losses;
    float total;
    if (m->s->invariant) batch.cu_seqlens = documents, batch.documents = 4;
    else if (m->s->model == OF_DOCUMENTS) MT_TRY(pack(m, &batch));
    MT_TRY(mt_arena_tensor(m->r.ctx, MT_F32, 1, m->tokens, &losses));
    MT_TRY(counted(m, &total));
    MT_TRY(mt_gpt_forward(m->r.ctx, &m->gpt, &batch, m->ids, m->targets, losses, &m->gpt_saved));
    MT_TRY(mean_loss(m, losses, total, loss));
    MT_TRY(mt_gpt_backward(m->r.ctx, &m->gpt, 1.0f / total, &m->gpt_saved));
    return batch.bias.grad.data ? keep_bias(m, batch.bias.grad) : MT_SUCCESS;
}

/* The losses of the tokens that count, and of the sequences. */
static mt_status bert_forward_backward(model *m, float *loss) {
    static const int32_t lengths[SEQUENCES] = {SEQ, SEQ - 7, 5, SEQ}, all[SEQUENCES] = {1, 0, 0, 1};
    static const int32_t some_orders[SEQUENCES] = {1, 0, -100, 1};
    const int32_t *orders = m->s->invariant ? all : some_orders; /* the order of a sum of three is that of a tree */
    mt_batch batch = batch_of(m);
    const int64_t first = batch.first_sequence;
    mt_tensor lm, sop;
    float total, of_orders;
    batch.lengths = lengths + first;
    batch.token_types = m->types;
    MT_TRY(mt_arena_tensor(m->r.ctx, MT_F32, 1, m->tokens, &lm));
    MT_TRY(mt_arena_tensor(m->r.ctx, MT_F32, 1, batch.sequences, &sop));
    MT_TRY(counted(m, &total));
    MT_TRY(mt_bert_forward(m->r.ctx, &m->bert, &batch, m->ids, m->targets, orders + first, lm, sop, &m->bert_saved));
    MT_TRY(mean_loss(m, lm, total, loss));
    MT_TRY(mean_loss(m, sop, 3, &of_orders));
    *loss += of_orders;
    return mt_bert_backward(m->r.ctx, &m->bert, 1.0f / total, 1.0f / 3, &m->bert_saved);
}

/* The memory of the sequences, of which the last ones are shorter. */
static mt_batch memory_batch_of(const model *m) {
    static const int32_t lengths[SEQUENCES] = {MEMORY, MEMORY, MEMORY - 3, 1};
    mt_batch b = batch_of(m);
    b.seq = MEMORY;
    b.lengths = lengths + b.first_sequence;
    return b;
}

/* y = x + what the block reads in the memory. */
static mt_status read_memory(model *m, mt_tensor x, mt_tensor memory, mt_tensor y, mt_cross_attention_saved *saved) {
    const mt_batch batch = batch_of(m), of_memory = memory_batch_of(m);
    MT_TRY(mt_vocab_parallel_embedding_forward(m->r.ctx, &m->memory_words, m->memory_ids, m->memory_tokens, memory));
    MT_TRY(mt_cross_attention_forward(m->r.ctx, &m->cross, &batch, x, &of_memory, memory, y, saved));
    return mt_add(m->r.ctx, x, y, y);
}

/* dy += dx; the gradient of the memory goes to the embedding. */
static mt_status read_memory_backward(model *m, mt_tensor dy, mt_tensor dx, mt_tensor dmemory,
                                      const mt_cross_attention_saved *saved) {
    MT_TRY(mt_cross_attention_backward(m->r.ctx, &m->cross, dy, dx, dmemory, saved));
    MT_TRY(mt_vocab_parallel_embedding_backward(m->r.ctx, &m->memory_words, m->memory_ids, m->memory_tokens, dmemory));
    return mt_add(m->r.ctx, dy, dx, dy);
}

typedef struct looked_up {
    mt_tensor dx;
    const int32_t *places;
} looked_up;

/* Adds to the gradient of the table of positions. */
static mt_status places_backward(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dtable,
                                 mt_tensor none) {
    const looked_up *l = (const looked_up *)arg;
    (void)none;
    return mt_embedding_backward(ctx, mt_tensor_rows(l->dx, first, count), 0, l->places + first, dtable);
}

/* loss: the mean over the tokens that count. */
static mt_status forward_backward(model *m, float *loss) {
    mt_context *ctx = m->r.ctx;
    const mt_grid *g = &m->r.grid;
    const int64_t rows = m->s->sequence_parallel ? m->tokens / g->tp_size : m->tokens;
    const int32_t *places = m->places + (m->s->sequence_parallel ? g->tp_rank * rows : 0);
    const mt_tensor of_places = mt_tensor_make(places, MT_I32, rows, 1);
    const mt_batch batch = batch_of(m);
    const int64_t kept = m->s->sequence_parallel ? m->memory_tokens / g->tp_size : m->memory_tokens;
    mt_tensor x, n, y, logits, losses, dy, dn, of_attention, read, of_memory, memory, dmemory;
    mt_norm_saved attention_norm;
    mt_self_attention_saved attention;
    mt_cross_attention_saved cross;
    mt_norm_saved norm;
    mt_mlp_saved mlp;
    mt_linear_saved head;
    float total;
    mt_arena_request rooms[] = {{&x, MT_F32, rows, HIDDEN},      {&n, MT_F32, rows, HIDDEN},
                                {&y, MT_F32, rows, HIDDEN},      {&dy, MT_F32, rows, HIDDEN},
                                {&dn, MT_F32, rows, HIDDEN},     {&logits, MT_F32, m->tokens, m->head.local_features},

                                {&losses, MT_F32, 1, m->tokens}, {&of_attention, MT_F32, rows, HIDDEN},
                                {&read, MT_F32, rows, HIDDEN},   {&of_memory, MT_F32, rows, HIDDEN},
                                {&memory, MT_F32, kept, HIDDEN}, {&dmemory, MT_F32, kept, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, rooms, has_memory(m->s) ? 12 : 9));
    MT_TRY(counted(m, &total));
    MT_TRY(mt_vocab_parallel_embedding_forward(ctx, &m->words, m->ids, m->tokens, x));
    if (m->s->as_data == 0) MT_TRY(mt_declare(ctx, g->cp, of_places, MT_SPLIT_ROWS));
    MT_TRY(mt_embedding_forward(ctx, m->positions->value, 0, places, 1.0f, x));
    if (m->s->model >= SELF_ATTENTION) {
        MT_TRY(mt_norm_layer_forward(ctx, &m->attention_norm, x, read, &attention_norm));
        MT_TRY(mt_self_attention_forward(ctx, &m->attention, &batch, read, of_attention, &attention));
        MT_TRY(mt_add(ctx, x, of_attention, of_attention));
    } else of_attention = x;
    if (has_memory(m->s)) {
        MT_TRY(read_memory(m, of_attention, memory, of_memory, &cross));
        of_attention = of_memory;
    }
    MT_TRY(mt_norm_layer_forward(ctx, &m->norm, of_attention, n, &norm));
    MT_TRY(mt_mlp_forward(ctx, &m->mlp, n, y, &mlp));
    MT_TRY(mt_add(ctx, of_attention, y, y));
    MT_TRY(mt_parallel_linear_forward(ctx, &m->head, y, logits, &head));
    MT_TRY(mt_vocab_parallel_cross_entropy_forward_backward(ctx, g->tp, &(mt_cross_entropy_desc){.vocab = VOCAB},
                                                            logits, m->targets, mt_none(), 1.0f / total, losses));
    MT_TRY(mean_loss(m, losses, total, loss));
    MT_TRY(mt_parallel_linear_backward(ctx, &m->head, logits, dy, &head));
    MT_TRY(mt_mlp_backward(ctx, &m->mlp, dy, dn, &mlp));
    MT_TRY(mt_norm_layer_backward(ctx, &m->norm, dn, dy, dn, &norm));
    if (has_memory(m->s)) MT_TRY(read_memory_backward(m, dn, dy, dmemory, &cross));
    if (m->s->model >= SELF_ATTENTION) {
        MT_TRY(mt_self_attention_backward(ctx, &m->attention, dn, dy, &attention));
        MT_TRY(mt_norm_layer_backward(ctx, &m->attention_norm, dy, dn, dn, &attention_norm));
    }
    MT_TRY(mt_sum_over_tokens(ctx, g->tp, m->s->sequence_parallel, places_backward, &(looked_up){dn, places}, rows,
                              m->positions->grad, mt_none()));
    return mt_vocab_parallel_embedding_backward(ctx, &m->words, m->ids, m->tokens, dn);
}

static mt_status whole_batch(model *m, float *loss) {
    fill_rows(m);
    if (m->s->model == BERT) return bert_forward_backward(m, loss);
    return is_gpt(m->s) ? gpt_forward_backward(m, loss) : forward_backward(m, loss);
}

/* In invariant mode: the loss is the sum of a tree, too. */
static mt_status micro_batches(model *m, float *loss) {
    const int count = m->s->micro_batches / m->s->dp;
    mt_tensor losses;
    MT_TRY(mt_arena_tensor(m->r.ctx, MT_F32, count, 1, &losses));
    for (m->micro = 0; m->micro < count; m->micro++) {
        size_t mark = mt_arena_mark(m->r.ctx);
        MT_TRY(whole_batch(m, (float *)losses.data + m->micro));
        MT_TRY(mt_accumulate_gradients(m->r.ctx, m->r.params));
        mt_arena_release(m->r.ctx, mark);
    }
    m->micro = 0;
    MT_TRY(mt_declare(m->r.ctx, NULL, losses, MT_UNDECLARED));
    MT_TRY(mt_tree_sum(m->r.ctx, losses));
    MT_TRY(mt_all_reduce(m->r.ctx, m->r.grid.dp, losses.data, losses.data, 1, MT_F32, MT_SUM));
    return mt_download(m->r.ctx, mt_tensor_rows(losses, 0, 1), loss);
}

static mt_status model_step(model *m, int step) {
    mt_context *ctx = m->r.ctx;
    const int rank = mt_comm_rank(m->r.world);
    size_t mark = mt_arena_mark(ctx);
    float loss, norm, *grads = test_floats(&m->r, WEIGHTS, 0);
    int64_t count;
    MT_TRY(mt_params_zero_grad(ctx, m->r.params));
    MT_TRY(mt_sync_gradients_begin(ctx, m->r.params));
    MT_TRY(m->s->invariant ? micro_batches(m, &loss) : whole_batch(m, &loss));
    mt_arena_release(ctx, mark);
    MT_TRY(mt_sync_gradients(ctx, m->r.params));
    MT_TRY(mt_grad_norm(ctx, m->r.params, &norm));
    if (rank == 0) m->s->out->loss[step] = loss, m->s->out->norm[step] = norm;
    if (step == 0) MT_TRY(mt_gather_gradients(ctx, m->r.params));
    if (step == 0) MT_TRY(gather_grads(&m->r, grads, WEIGHTS, &count));
    if (step == 0 && rank == 0) memcpy(m->s->out->grads, grads, sizeof m->s->out->grads);
    return mt_optimizer_step(ctx, &m->adam, 0.01f, mt_clip_coefficient(norm, 0.5f));
}

/* Keeps the logits of the last tokens of this rank's sequences: from its part of the tokens, and with a cache from all
   of them. Every context rank gets them. */
static mt_status keep_logits(model *m) {
    static const int32_t lengths[SEQUENCES] = {SEQ, 3, SEQ / 2, SEQ - 1};
    mt_context *ctx = m->r.ctx;
    mt_batch batch = batch_of(m);
    int32_t all[TOKENS];
    float *out = test_floats(&m->r, 2 * batch.sequences * VOCAB, 0);
    mt_gpt_cache cache;
    mt_status status;
    batch.lengths = lengths + batch.first_sequence;
    for (int64_t i = 0; i < batch.sequences * SEQ; i++)
        all[i] = token((int)(batch.first_sequence + i / SEQ), (int)(i % SEQ));
    MT_TRY(mt_gpt_logits(ctx, &m->gpt, &batch, m->ids, mt_tensor_f32(out, batch.sequences, VOCAB)));
    MT_TRY(mt_gpt_cache_create(ctx, &m->gpt, batch.sequences, SEQ, &cache));
    status = mt_gpt_cached_logits(ctx, &m->gpt, &batch, all, &cache,
                                  mt_tensor_f32(out + batch.sequences * VOCAB, batch.sequences, VOCAB));
    mt_gpt_cache_destroy(ctx, &cache);
    if (m->r.grid.cp_rank + 1 == m->r.grid.cp_size && m->r.grid.tp_rank == 0)
        for (int i = 0; i < 2; i++)
            memcpy(m->s->out->last[i] + batch.first_sequence * VOCAB, out + i * batch.sequences * VOCAB,
                   (size_t)(batch.sequences * VOCAB) * sizeof *out);
    return status;
}

/* Keeps the logits of the order of this rank's sequences, and those of the tokens of the first context rank. */
static mt_status keep_bert_logits(model *m) {
    mt_batch batch = batch_of(m);
    float *tokens = test_floats(&m->r, m->tokens * VOCAB, 0), *orders = test_floats(&m->r, batch.sequences * 2, 0);
    batch.token_types = m->types;
    MT_TRY(mt_bert_logits(m->r.ctx, &m->bert, &batch, m->ids, mt_tensor_f32(tokens, m->tokens, VOCAB),
                          mt_tensor_f32(orders, batch.sequences, 2)));
    if (m->r.grid.tp_rank > 0) return MT_SUCCESS;
    for (int i = 0; i < batch.sequences; i++) {
        const int ranks = m->s->invariant ? m->s->invariant : m->s->cp;
        const int64_t chunk = SEQ / ranks / (m->s->zigzag && ranks > 1 ? 2 : 1);
        float *last = m->s->out->last[0] + (batch.first_sequence + i) * VOCAB;
        if (m->r.grid.cp_rank == 0) memcpy(last, tokens + i * chunk * VOCAB, VOCAB * sizeof *last);
        if (m->r.grid.cp_rank + 1 < m->r.grid.cp_size) continue;
        memcpy(m->s->out->last[1] + (batch.first_sequence + i) * VOCAB, orders + 2 * i, 2 * sizeof *last);
    }
    return MT_SUCCESS;
}

static mt_status keep_weights(model *m) {
    found *out = m->s->out;
    int64_t n = 0;
    for (int i = 0; i < mt_params_count(m->r.params); i++) {
        const mt_param *p = mt_params_at(m->r.params, i);
        float *all = test_floats(&m->r, p->desc.rows * p->desc.cols, 0);
        MT_TRY(mt_param_gather(m->r.ctx, m->r.params, p, p->value, all));
        CHECK(n + p->desc.rows * p->desc.cols <= WEIGHTS);
        if (mt_comm_rank(m->r.world) == 0) memcpy(out->weights + n, all, (size_t)(p->desc.rows * p->desc.cols) * 4);
        n += p->desc.rows * p->desc.cols;
    }
    if (mt_comm_rank(m->r.world) == 0) out->count = n;
    return MT_SUCCESS;
}

static mt_status split_rank(mt_comm *world, void *user) {
    const split *s = (const split *)user;
    const mt_grid_desc shape = {.tp = s->tp, .cp = s->as_data ? 1 : s->cp, .dp = s->as_data ? s->cp * s->dp : s->dp};
    const mt_context_desc where = {.arena_bytes = 1 << 21,
                                   .check = s->check,
                                   .invariant = s->invariant ? 4 : 0,
                                   .invariant_data = s->micro_batches};
    model *m = (model *)calloc(1, sizeof *m);
    mt_status status;
    if (!m) return MT_ERR_MEMORY;
    m->s = s;
    status = test_rank_open(world, shape, &where, &m->r);
    if (status == MT_SUCCESS) status = model_create(m);
    for (int step = 0; step < STEPS && status == MT_SUCCESS; step++) status = model_step(m, step);
    if (status == MT_SUCCESS) status = keep_weights(m);
    for (m->micro = 0; status == MT_SUCCESS && m->micro < (s->invariant ? s->micro_batches / s->dp : 1); m->micro++) {
        fill_rows(m);
        if (is_gpt(s)) status = keep_logits(m);
        if (status == MT_SUCCESS && s->model == BERT) status = keep_bert_logits(m);
    }
    mt_gpt_saved_destroy(&m->gpt_saved);
    mt_bert_saved_destroy(&m->bert_saved);
    mt_optimizer_destroy(m->r.ctx, &m->adam);
    test_rank_close(&m->r);
    free(m);
    return status;
}

static void run(split s, found *out) {
    memset(out, 0, sizeof *out);
    s.out = out;
    test_launch(s.tp * s.cp * s.dp, split_rank, &s);
}

static const char *split_name(const split *s) {
    static char text[120];
    snprintf(text, sizeof text, "tp %d x cp %d x dp %d, sequence parallel %d, zigzag %d, sharded %d", s->tp, s->cp,
             s->dp, s->sequence_parallel, s->zigzag, s->sharded);
    return text;
}

static void assert_near(const split *s, const char *what, const float *got, const float *want, int64_t n,
                        double allowed) {
    double largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)want[i]));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= allowed * largest))
            fail_msg("%s: %s %lld is %.9g, must be %.9g", split_name(s), what, (long long)i, (double)got[i],
                     (double)want[i]);
}

/* Against one rank, within the roundings of f32; against as many data ranks with the same tokens, the same bits. */
static void check_split(split s, const found *serial) {
    static found got, data;
    run(s, &got);
    assert_near(&s, "loss", got.loss, serial->loss, STEPS, 1e-6);
    assert_near(&s, "norm", got.norm, serial->norm, STEPS, 5e-6);
    assert_near(&s, "gradient", got.grads, serial->grads, serial->count, 5e-6);
    assert_near(&s, "gradient of the bias", got.bias, serial->bias, 4 * SEQ * SEQ, 5e-6);
    for (int i = 0; i < 2 && s.model >= GPT2;
         i++) /* after 3 steps of Adam, which divides small gradients by small ones */
        assert_near(&s, "logit", got.last[i], serial->last[s.model == BERT ? i : 0], SEQUENCES * VOCAB, 1e-4);
    assert_int_equal(got.count, serial->count);
    if (s.model != LAYERS) return;
    s.as_data = 1;
    s.check = 0;
    run(s, &data);
    if (memcmp(&got, &data, sizeof got) != 0) fail_msg("%s: other bits than as data ranks", split_name(&s));
}

static void every_split(enum model_kind kind) {
    static found serial;
    int turn = 0;
    run((split){.tp = 1, .cp = 1, .dp = 1, .model = kind}, &serial);
    assert_true(serial.loss[STEPS - 1] < serial.loss[0]);
    for (int cp = 1; cp <= 4; cp *= 2)
        for (int tp = 1; tp <= 2; tp++)
            for (int dp = 1; dp <= 2 && tp * cp * dp <= 8; dp++)
                for (int zigzag = 0; zigzag <= (cp > 1); zigzag++)
                    for (int sp = 0; sp < tp; sp++, turn++)
                        check_split((split){.tp = tp,
                                            .cp = cp,
                                            .dp = dp,
                                            .sequence_parallel = sp,
                                            .zigzag = zigzag,
                                            .sharded = turn % 2,
                                            .check = turn % 3,
                                            .model = kind,
                                            .comm_type = tp * cp > 4 ? MT_CP_P2P : (mt_cp_comm_type)(turn % 4)},
                                    &serial);
}

static void test_ranks_without_a_loss(void **state) {
    static found serial;
    (void)state;
    for (int kind = LAYERS; kind <= BERT; kind++) {
        run((split){.tp = 1, .cp = 1, .dp = 1, .few = 1, .model = (enum model_kind)kind}, &serial);
        for (int way = 0; way < 4; way++)
            check_split((split){.tp = 1 + way / 2,
                                .cp = 4,
                                .dp = 1,
                                .few = 1,
                                .zigzag = way % 2,
                                .sequence_parallel = way / 2,
                                .model = (enum model_kind)kind,
                                .comm_type = (mt_cp_comm_type)(way % 3)},
                        &serial);
    }
}

static void test_every_split_is_one_rank(void **state) {
    (void)state;
    every_split(LAYERS);
}

static void test_attention_layers_on_every_split(void **state) {
    (void)state;
    every_split(SELF_ATTENTION);
}

static void test_gpt_on_every_split(void **state) {
    (void)state;
    every_split(GPT2);
    every_split(LLAMA);
}

static void test_packed_documents_on_every_split(void **state) {
    (void)state;
    every_split(OF_DOCUMENTS);
}

static void test_bert_on_every_split(void **state) {
    (void)state;
    every_split(BERT);
}

static void test_cross_attention_on_every_split(void **state) {
    (void)state;
    every_split(MEMORY_IN_PARTS);
    every_split(WHOLE_MEMORY);
}

static void assert_same_bits(const split *s, const char *what, const float *got, const float *want, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], sizeof got[i]) != 0)
            fail_msg("model %d, %s: %s: number %lld is %.9g, on one rank %.9g", s->model, split_name(s), what,
                     (long long)i, (double)got[i], (double)want[i]);
}

/* In invariant mode every split has the bits of one rank. */
static void same_bits(enum model_kind kind, int zigzag, int micro_batches) {
    static found one, got;
    int turn = 0;
    split s = {
        .tp = 1, .cp = 1, .dp = 1, .zigzag = zigzag, .invariant = 4, .micro_batches = micro_batches, .model = kind};
    run(s, &one);
    assert_true(one.loss[STEPS - 1] < one.loss[0]);
    for (s.cp = 1; s.cp <= 4; s.cp *= 2)
        for (s.tp = 1; s.tp <= 4 && s.tp * s.cp <= 8; s.tp *= 2)
            for (s.dp = 1; s.dp <= micro_batches; s.dp *= 2)
                for (s.sequence_parallel = 0; s.sequence_parallel < (s.tp > 1 ? 2 : 1); s.sequence_parallel++, turn++) {
                    s.sharded = turn % 2;
                    s.check = turn % 3;
                    run(s, &got);
                    assert_same_bits(&s, "losses", got.loss, one.loss, STEPS);
                    assert_same_bits(&s, "gradients", got.grads, one.grads, WEIGHTS);
                    assert_same_bits(&s, "norms", got.norm, one.norm, STEPS);
                    assert_same_bits(&s, "weights", got.weights, one.weights, WEIGHTS);
                    assert_same_bits(&s, "logits", got.last[0], one.last[0], 2 * SEQUENCES * VOCAB);
                }
}

static void test_same_bits_on_every_split(void **state) {
    (void)state;
    same_bits(GPT2, 0, 2);
    same_bits(LLAMA, 1, 2);
    same_bits(BERT, 1, 1);
    same_bits(MEMORY_IN_PARTS, 1, 1);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

enum { BATCH = 2, LONG = 24, GROUPS = 2, MEMBERS = 2, DIM = 6, HEADS = GROUPS * MEMBERS };

/* What changes the scores. */
typedef struct scores {
    const char *name;
    mt_mask mask;
    int64_t window, kv_seq;
    float softcap, dropout, scale;
    int alibi, documents, lengths, bias; /* bias: 1 a bias with a gradient, 2 a boolean mask */
} scores;

static const scores all_scores[] = {{"causal", .mask = MT_MASK_CAUSAL},
                                    {"full", .mask = MT_MASK_BIDIRECTIONAL},
                                    {"window", .window = 5},
                                    {"window in both directions", .mask = MT_MASK_BIDIRECTIONAL, .window = 7},
                                    {"soft cap and ALiBi", .softcap = 2.0f, .alibi = 1},
                                    {"documents", .documents = 1},
                                    {"lengths", .lengths = 1, .mask = MT_MASK_BIDIRECTIONAL},
                                    {"far apart", .scale = 60.0f},
                                    {"a bias", .bias = 1},
                                    {"a mask", .bias = 2, .mask = MT_MASK_BIDIRECTIONAL},
                                    {"dropout", .dropout = 0.3f},
                                    {"a memory", .mask = MT_MASK_BIDIRECTIONAL, .kv_seq = 48},
                                    {"more keys than queries", .kv_seq = 48, .window = 20},
                                    {"all of them", .window = 11, .softcap = 3.0f, .alibi = 1, .documents = 1,
                                     .lengths = 1, .bias = 1, .dropout = 0.2f}};

/* The tensors of a call: of whole sequences, or of a rank. */
typedef struct attended {
    mt_tensor q, k, v, out, lse, dout, dq, dk, dv, dbias;
} attended;

typedef struct attention_run {
    const scores *of;
    int cp, check;
    mt_context_parallel_desc how;
    mt_dtype dtype;
    attended whole; /* of one rank, in MT_F32 */
} attention_run;

static mt_attention_desc whole_desc(const scores *of, mt_tensor dbias) {
    static const int32_t documents[] = {0, 5, 17, 30, 41, 48}, lengths[] = {21, 13};
    static const float slopes[] = {0.5f, 0.25f, 0.125f, 1.0f};
    static float bias[HEADS * LONG * 48];
    static uint8_t seen[HEADS * LONG * 48];
    const int64_t keys = of->kv_seq ? of->kv_seq : LONG;
    mt_attention_desc s = {.batch = BATCH, .seq = LONG, .groups = GROUPS, .heads_per_group = MEMBERS, .head_dim = DIM};
    s.kv_seq = of->kv_seq;
    s.scores = (mt_scores_desc){.mask = of->mask, .window = of->window, .softcap = of->softcap, .alibi = of->alibi};
    s.scores.scale = of->scale;
    s.scores.alibi_slopes = of->alibi ? slopes : NULL;
    s.cu_seqlens = of->documents ? documents : NULL;
    s.documents = of->documents ? 5 : 0;
    s.lengths = of->lengths ? lengths : NULL;
    s.dropout = (mt_dropout){.p = of->dropout, .at = {.seed = 3, .first_row = 2, .global_cols = HEADS}};
    if (!of->bias) return s;
    for (int i = 0; i < HEADS * LONG * 48; i++) bias[i] = (float)(i * 7 % 13) * 0.1f, seen[i] = i * 5 % 7 != 0;
    s.bias.heads = HEADS;
    s.bias.value =
        of->bias == 1 ? mt_tensor_f32(bias, HEADS * LONG, keys) : mt_tensor_make(seen, MT_U8, HEADS * LONG, keys);
    s.bias.grad = dbias;
    return s;
}

static mt_tensor some(int64_t rows, int64_t cols, uint64_t seed) {
    float *x = (float *)malloc((size_t)(rows * cols) * sizeof *x);
    if (!x) abort();
    for (int64_t i = 0; i < rows * cols; i++) x[i] = seed ? 1.5f * test_float(&seed) : 0;
    return mt_tensor_f32(x, rows, cols);
}

static attended whole_tensors(const scores *of) {
    const int64_t rows = BATCH * LONG, keys = BATCH * (of->kv_seq ? of->kv_seq : LONG), width = HEADS * DIM;
    return (attended){.q = some(rows, width, 1),
                      .k = some(keys, GROUPS * DIM, 2),
                      .v = some(keys, GROUPS * DIM, 3),
                      .out = some(rows, width, 0),
                      .lse = some(HEADS, rows, 0),
                      .dout = some(rows, width, 4),
                      .dq = some(rows, width, 0),
                      .dk = some(keys, GROUPS * DIM, 0),
                      .dv = some(keys, GROUPS * DIM, 0),
                      .dbias = of->bias == 1 ? some(HEADS * LONG, keys / BATCH, 0) : mt_none()};
}

static void free_tensors(attended *x) {
    void *const all[] = {x->q.data,    x->k.data,  x->v.data,  x->out.data, x->lse.data,
                         x->dout.data, x->dq.data, x->dk.data, x->dv.data,  x->dbias.data};
    for (int i = 0; i < 10; i++) free(all[i]);
}

/* The row of whole sequences of `seq` tokens that is row i of a rank. */
static int64_t row_of(const attention_run *a, int rank, int64_t seq, int64_t i) {
    return mt_context_parallel_token(&a->how, rank, a->cp, BATCH, seq, i);
}

/* Returns the rows of a rank, in the type of the run. */
static mt_status rows_of(test_rank *r, const attention_run *a, mt_tensor whole, mt_tensor *out) {
    const int64_t rows = whole.rows / a->cp;
    float *x = test_floats(r, rows * whole.cols, 0);
    for (int64_t i = 0; i < rows; i++)
        memcpy(x + i * whole.cols, (float *)whole.data + row_of(a, r->grid.cp_rank, whole.rows / BATCH, i) * whole.cols,
               (size_t)whole.cols * sizeof *x);
    MT_TRY(mt_arena_tensor(r->ctx, a->dtype, rows, whole.cols, out));
    MT_TRY(mt_convert(r->ctx, mt_tensor_f32(x, rows, whole.cols), *out));
    return mt_declare(r->ctx, r->grid.cp, *out, MT_SPLIT_ROWS);
}

static mt_status rows_are(test_rank *r, const attention_run *a, const char *what, mt_tensor got, mt_tensor whole) {
    float *x = test_floats(r, got.rows * got.cols, 0);
    double size = 0, allowed = a->dtype == MT_F32 ? 5e-6 : 2e-2;
    for (int64_t i = 0; i < whole.rows * whole.cols; i++) size = fmax(size, fabs((double)((float *)whole.data)[i]));
    MT_TRY(mt_convert(r->ctx, got, mt_tensor_f32(x, got.rows, got.cols)));
    for (int64_t i = 0; i < got.rows; i++) {
        const float *want = (float *)whole.data + row_of(a, r->grid.cp_rank, whole.rows / BATCH, i) * whole.cols;
        MT_TRY(test_near_f32(what, x + i * got.cols, want, got.cols, allowed * size));
    }
    return MT_SUCCESS;
}

static mt_status attention_rank(mt_comm *world, void *user) {
    attention_run *a = (attention_run *)user;
    const mt_context_desc where = {.arena_bytes = 1 << 22, .check = a->check};
    const attended *w = &a->whole;
    attended x;
    mt_attention_desc s;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.cp = a->cp}, &where, &r));
    MT_TRY(rows_of(&r, a, w->q, &x.q));
    MT_TRY(rows_of(&r, a, w->k, &x.k));
    MT_TRY(rows_of(&r, a, w->v, &x.v));
    MT_TRY(rows_of(&r, a, w->dout, &x.dout));
    mt_arena_request memory[] = {{&x.out, a->dtype, x.q.rows, x.q.cols},
                                 {&x.dq, a->dtype, x.q.rows, x.q.cols},
                                 {&x.dk, a->dtype, x.k.rows, x.k.cols},
                                 {&x.dv, a->dtype, x.k.rows, x.k.cols},
                                 {&x.lse, MT_F32, HEADS, x.q.rows}};
    MT_TRY(mt_arena_tensors(r.ctx, memory, 5));
    x.dbias = mt_none();
    if (w->dbias.data)
        x.dbias = mt_tensor_f32(test_floats(&r, w->dbias.rows * w->dbias.cols, 0), w->dbias.rows, w->dbias.cols);
    s = whole_desc(a->of, x.dbias);
    MT_TRY(mt_context_parallel_attention_forward(r.ctx, r.grid.cp, &a->how, &s, x.q, x.k, x.v, x.out, x.lse));
    MT_TRY(mt_context_parallel_attention_backward(r.ctx, r.grid.cp, &a->how, &s, x.q, x.k, x.v, x.out, x.lse, x.dout,
                                                  x.dq, x.dk, x.dv));
    MT_TRY(rows_are(&r, a, "out", x.out, w->out));
    MT_TRY(rows_are(&r, a, "dq", x.dq, w->dq));
    MT_TRY(rows_are(&r, a, "dk", x.dk, w->dk));
    MT_TRY(rows_are(&r, a, "dv", x.dv, w->dv));
    if (x.dbias.data) {
        MT_TRY(mt_declare(r.ctx, NULL, x.dbias, MT_UNDECLARED));
        MT_TRY(mt_all_reduce(r.ctx, r.grid.cp, x.dbias.data, x.dbias.data, (size_t)(x.dbias.rows * x.dbias.cols),
                             MT_F32, MT_SUM));
        MT_TRY(test_near_f32("dbias", (float *)x.dbias.data, (float *)w->dbias.data, x.dbias.rows * x.dbias.cols,
                             a->dtype == MT_F32 ? 2e-5 : 2e-2));
    }
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_attention_on_every_split(void **state) {
    static const int splits[] = {1, 2, 3, 4};
    (void)state;
    for (size_t i = 0; i < sizeof all_scores / sizeof *all_scores; i++) {
        attention_run a = {.of = &all_scores[i], .whole = whole_tensors(&all_scores[i])};
        mt_attention_desc s = whole_desc(a.of, a.whole.dbias);
        test_rank r;
        test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
        ASSERT_STATUS(
            r.ctx, MT_SUCCESS,
            mt_dot_product_attention_forward(r.ctx, &s, a.whole.q, a.whole.k, a.whole.v, a.whole.out, a.whole.lse));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_dot_product_attention_backward(r.ctx, &s, a.whole.q, a.whole.k, a.whole.v, a.whole.out,
                                                        a.whole.lse, a.whole.dout, a.whole.dq, a.whole.dk, a.whole.dv));
        test_paper_rank_close(&r);
        for (int way = 0; way < 4 * 2 * 2 * 3; way++) {
            a.cp = splits[way % 4];
            a.how.contiguous = way / 4 % 2;
            a.how.comm_type = (mt_cp_comm_type)(MT_CP_P2P + way / 16);
            a.dtype = way / 8 % 2 ? MT_BF16 : MT_F32;
            if (a.how.comm_type == MT_CP_A2A && a.cp == 3) continue; /* 3 ranks cannot share 4 heads */
            if (a.of->scale > 0 && a.dtype != MT_F32) continue;      /* the scores would be others */
            a.check = way % 3;
            test_launch(a.cp, attention_rank, &a);
        }
        free_tensors(&a.whole);
    }
}

/* A norm of the keys: its gradient needs that of the keys by the queries of all ranks. */
typedef struct norm_run {
    mt_context_parallel_desc how;
    int cp;
    float *dweight; /* [GROUPS * DIM] */
} norm_run;

static mt_status norm_of_keys_rank(mt_comm *world, void *user) {
    const norm_run *n = (const norm_run *)user;
    const mt_norm_layer_desc of_keys = {.features = GROUPS * DIM, .kind = MT_RMS_NORM};
    const mt_context_desc where = {.arena_bytes = 1 << 20, .check = 2};
    attention_run a = {.cp = n->cp, .how = n->how, .dtype = MT_F32};
    const mt_attention_desc s = whole_desc(&all_scores[0], mt_none());
    mt_tensor k, out, lse, dq, dk, dv, q[4], whole[4];
    mt_norm_layer norm;
    mt_norm_saved saved;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.cp = n->cp}, &where, &r));
    MT_TRY(mt_norm_layer_create(r.ctx, r.params, "k_norm", &of_keys, &norm));
    MT_TRY(mt_params_init(r.ctx, r.params, 1));
    MT_TRY(mt_params_zero_grad(r.ctx, r.params));
    for (int i = 0; i < 4; i++) { /* q, k, v, dout */
        whole[i] = some(BATCH * LONG, (i % 3 ? GROUPS : HEADS) * DIM, 11 + (uint64_t)i);
        MT_TRY(rows_of(&r, &a, whole[i], &q[i]));
        free(whole[i].data);
    }
    mt_arena_request rooms[] = {{&k, MT_F32, q[1].rows, q[1].cols},  {&dk, MT_F32, q[1].rows, q[1].cols},
                                {&dv, MT_F32, q[1].rows, q[1].cols}, {&out, MT_F32, q[0].rows, q[0].cols},
                                {&dq, MT_F32, q[0].rows, q[0].cols}, {&lse, MT_F32, HEADS, q[0].rows}};
    MT_TRY(mt_arena_tensors(r.ctx, rooms, 6));
    MT_TRY(mt_norm_layer_forward(r.ctx, &norm, q[1], k, &saved));
    MT_TRY(mt_context_parallel_attention_forward(r.ctx, r.grid.cp, &n->how, &s, q[0], k, q[2], out, lse));
    MT_TRY(mt_context_parallel_attention_backward(r.ctx, r.grid.cp, &n->how, &s, q[0], k, q[2], out, lse, q[3], dq, dk,
                                                  dv));
    MT_TRY(mt_norm_layer_backward(r.ctx, &norm, dk, mt_none(), dk, &saved));
    MT_TRY(mt_sync_gradients(r.ctx, r.params));
    if (mt_comm_rank(world) == 0) memcpy(n->dweight, norm.weight->grad.data, GROUPS * DIM * sizeof(float));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_norm_of_keys(void **state) {
    float serial[GROUPS * DIM], split[GROUPS * DIM];
    (void)state;
    for (int way = 0; way < 6; way++) {
        norm_run n = {.how = {.comm_type = (mt_cp_comm_type)(MT_CP_P2P + way / 2), .contiguous = way % 2}};
        n.cp = 1, n.dweight = serial;
        test_launch(1, norm_of_keys_rank, &n);
        for (n.cp = 2, n.dweight = split; n.cp <= 4; n.cp += 2) {
            test_launch(n.cp, norm_of_keys_rank, &n);
            for (int i = 0; i < GROUPS * DIM; i++)
                if (!(fabsf(split[i] - serial[i]) <= 5e-6f * (1 + fabsf(serial[i]))))
                    fail_msg("way %d, %d ranks: %.9g, must be %.9g", way, n.cp, (double)split[i], (double)serial[i]);
        }
    }
}

/* A norm of each head in invariant mode: the sum over the heads of all tensor ranks, for each virtual context rank. */
typedef struct heads_run {
    int tp, cp;
    float dgain[DIM], dbias[DIM];
} heads_run;

static mt_status norm_of_heads_rank(mt_comm *world, void *user) {
    heads_run *n = (heads_run *)user;
    const mt_context_parallel_desc how = {.invariant = 4};
    const mt_context_desc where = {.arena_bytes = 1 << 20, .check = 2, .invariant = 4, .invariant_data = 1};
    const int64_t tokens = 2 * SEQ / n->cp, heads = 4 / n->tp;
    mt_norm_layer norm;
    mt_norm_saved saved;
    mt_tensor x, dy, y;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = n->tp, .cp = n->cp}, &where, &r));
    MT_TRY(mt_parallel_set_options(r.ctx, &(mt_parallel_options){.context = how}));
    MT_TRY(mt_norm_layer_create(r.ctx, r.params, "norm", &(mt_norm_layer_desc){.features = DIM, .groups = 4}, &norm));
    MT_TRY(mt_params_init(r.ctx, r.params, 1));
    MT_TRY(mt_params_zero_grad(r.ctx, r.params));
    x = mt_tensor_f32(test_floats(&r, tokens * heads * DIM, 0), tokens * heads, DIM);
    y = mt_tensor_f32(test_floats(&r, tokens * heads * DIM, 0), tokens * heads, DIM);
    dy = mt_tensor_f32(test_floats(&r, tokens * heads * DIM, 0), tokens * heads, DIM);
    for (int64_t i = 0; i < tokens * heads; i++) {
        const int64_t token = mt_context_parallel_token(&how, r.grid.cp_rank, n->cp, 2, SEQ, i / heads);
        uint64_t seed = 1 + (uint64_t)(token * 4 + r.grid.tp_rank * heads + i % heads);
        for (int64_t j = 0; j < DIM; j++)
            ((float *)x.data)[i * DIM + j] = test_float(&seed), ((float *)dy.data)[i * DIM + j] = test_float(&seed);
    }
    MT_TRY(mt_norm_layer_forward(r.ctx, &norm, x, y, &saved));
    MT_TRY(mt_norm_layer_backward(r.ctx, &norm, dy, mt_none(), y, &saved));
    MT_TRY(mt_sync_gradients(r.ctx, r.params));
    if (mt_comm_rank(world) == n->tp * n->cp - 1) {
        memcpy(n->dgain, norm.weight->grad.data, sizeof n->dgain);
        memcpy(n->dbias, norm.bias->grad.data, sizeof n->dbias);
    }
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_same_bits_of_norms_of_heads(void **state) {
    heads_run one = {.tp = 1, .cp = 1};
    (void)state;
    test_launch(1, norm_of_heads_rank, &one);
    for (int tp = 1; tp <= 4; tp *= 2)
        for (int cp = 1; cp <= 4; cp *= 2) {
            heads_run n = {.tp = tp, .cp = cp};
            test_launch(tp * cp, norm_of_heads_rank, &n);
            if (memcmp(n.dgain, one.dgain, sizeof n.dgain) != 0 || memcmp(n.dbias, one.dbias, sizeof n.dbias) != 0)
                fail_msg("tp %d x cp %d: gain %.9g, bias %.9g, on one rank %.9g, %.9g", tp, cp, (double)n.dgain[0],
                         (double)n.dbias[0], (double)one.dgain[0], (double)one.dbias[0]);
        }
}

/* Documents of any lengths: what one holds does not change a bit of the losses of the others. */
enum { PACKED = 48, DOCUMENTS = 5 };
static const int32_t packed[DOCUMENTS + 1] = {0, 5, 18, 29, 43, PACKED};

typedef struct packed_run {
    mt_context_parallel_desc how;
    int cp;
    float losses[2][PACKED]; /* of both texts */
} packed_run;

static mt_status packed_rank(mt_comm *world, void *user) {
    packed_run *p = (packed_run *)user;
    const mt_context_desc where = {.arena_bytes = 1 << 20};
    mt_gpt_desc d = {.vocab = VOCAB, .layers = 2, .max_seq = PACKED, .layer = {.hidden = HIDDEN, .heads = 4}};
    mt_batch batch = {.sequences = 1, .seq = PACKED, .cu_seqlens = packed, .documents = DOCUMENTS};
    int32_t ids[PACKED], targets[PACKED];
    const int64_t rows = PACKED / p->cp;
    mt_tensor loss;
    mt_gpt gpt;
    test_rank r;
    d.layer.scores.rotary_base = 100.0f;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.cp = p->cp}, &where, &r));
    MT_TRY(mt_parallel_set_options(r.ctx, &(mt_parallel_options){.context = p->how}));
    MT_TRY(mt_gpt_create(r.ctx, r.params, &d, &gpt));
    MT_TRY(mt_params_init(r.ctx, r.params, 5));
    MT_TRY(mt_arena_tensor(r.ctx, MT_F32, 1, rows, &loss));
    for (int text = 0; text < 2; text++) {
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = mt_context_parallel_token(&p->how, r.grid.cp_rank, p->cp, 1, PACKED, i);
            ids[i] = token(1, (int)at) ^ (text && at >= packed[1] && at < packed[2]); /* the second document differs */
            targets[i] = token(1, (int)at + 1);
        }
        MT_TRY(mt_gpt_forward(r.ctx, &gpt, &batch, ids, targets, loss, NULL));
        for (int64_t i = 0; i < rows; i++)
            p->losses[text][mt_context_parallel_token(&p->how, r.grid.cp_rank, p->cp, 1, PACKED, i)] =
                ((float *)loss.data)[i];
    }
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_documents_are_alone(void **state) {
    static const int splits[] = {1, 2, 4};
    static packed_run one, p;
    (void)state;
    for (int way = 0; way < 6; way++)
        for (int i = 0; i < 3; i++) {
            memset(&p, 0, sizeof p);
            p.how.comm_type = (mt_cp_comm_type)(MT_CP_P2P + way / 2);
            p.how.contiguous = way % 2;
            p.cp = splits[i];
            test_launch(p.cp, packed_rank, &p);
            if (i == 0) one = p;
            for (int at = 0; at < PACKED; at++) {
                const int inside = at >= packed[1] && at < packed[2];
                assert_int_equal(p.losses[0][at] != p.losses[1][at], inside);
                assert_true(fabsf(p.losses[0][at] - one.losses[0][at]) <= 1e-5f);
            }
        }
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

/* The layout of the rows of a rank. */
static void test_tokens_of_a_rank(void **state) {
    static const mt_context_parallel_desc contiguous = {.contiguous = 1};
    static const int64_t zigzag[2][8] = {{0, 1, 8, 9, 6, 7, 14, 15}, {2, 3, 10, 11, 4, 5, 12, 13}};
    static const int64_t parts[2][8] = {{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}};
    (void)state;
    for (int rank = 0; rank < 2; rank++)
        for (int row = 0; row < 8; row++) {
            assert_int_equal(mt_context_parallel_token(NULL, rank, 2, 2, 8, row), zigzag[rank][row]);
            assert_int_equal(mt_context_parallel_token(&contiguous, rank, 2, 2, 8, row), parts[rank][row]);
        }
    for (int row = 0; row < 21; row++) assert_int_equal(mt_context_parallel_token(NULL, 0, 1, 3, 7, row), row);
    assert_int_equal(mt_context_parallel_token(NULL, 0, 2, 2, 8, 8), -1);
    assert_int_equal(mt_context_parallel_token(NULL, 0, 2, 2, 8, -1), -1);
    assert_int_equal(mt_context_parallel_token(NULL, 2, 2, 2, 8, 0), -1);
    assert_int_equal(mt_context_parallel_token(NULL, -1, 2, 2, 8, 0), -1);
    assert_int_equal(mt_context_parallel_token(NULL, 0, 0, 2, 8, 0), -1);
    assert_int_equal(mt_context_parallel_token(NULL, 0, 2, 2, 6, 0), -1);
    assert_int_equal(mt_context_parallel_token(&contiguous, 1, 2, 2, 6, 0), 3);
    assert_int_equal(mt_context_parallel_token(&contiguous, 0, 2, 2, 7, 0), -1);
    assert_int_equal(mt_context_parallel_token(NULL, 0, 2, INT64_MAX / 2, 8, 0), -1);
    assert_int_equal(mt_context_parallel_token(NULL, 0, INT32_MAX, 1, INT64_MAX, 0), -1);
}

/* Context rank 2 leaves, after a call of the others, or after the first step of its ring. */
typedef struct leaver {
    mt_cp_comm_type type;
    int in_ring;
} leaver;

static mt_status leaving_rank(mt_comm *world, void *user) {
    const leaver *l = (const leaver *)user;
    const mt_context_parallel_desc how = {.comm_type = l->type};
    const mt_context_desc where = {.arena_bytes = 1 << 20};
    const mt_attention_desc s = {.batch = 1, .seq = 16, .groups = 4, .heads_per_group = 1, .head_dim = 4};
    mt_tensor q, k, v, out, kv;
    mt_arena_request rooms[] = {
        {&q, MT_F32, 4, 16}, {&k, MT_F32, 4, 16}, {&v, MT_F32, 4, 16}, {&out, MT_F32, 4, 16}, {&kv, MT_F32, 16, 16}};
    mt_status status;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.cp = 4}, &where, &r));
    MT_TRY(mt_arena_tensors(r.ctx, rooms, 5));
    MT_TRY(mt_fill(r.ctx, q, 0.5f));
    MT_TRY(mt_fill(r.ctx, k, 0.5f));
    MT_TRY(mt_fill(r.ctx, v, 0.5f));
    MT_TRY(mt_context_parallel_attention_forward(r.ctx, r.grid.cp, &how, &s, q, k, v, out, mt_none()));
    MT_TRY(mt_barrier(r.ctx, r.grid.cp)); /* no rank is in the first call any more when one leaves */
    if (r.grid.cp_rank != 2) {
        status = mt_context_parallel_attention_forward(r.ctx, r.grid.cp, &how, &s, q, k, v, out, mt_none());
        CHECK(status == MT_ERR_PEER);
        CHECK(strstr(mt_last_error(r.ctx), "on \"context\" (4 ranks): rank "));
        CHECK(!l->in_ring || r.grid.cp_rank != 3 || strstr(mt_last_error(r.ctx), "rank 2 has left"));
    } else if (l->in_ring) { /* the keys and values of its 4 tokens */
        MT_TRY(mt_fill(r.ctx, kv, 0.5f));
        MT_TRY(mt_send_recv(r.ctx, r.grid.cp, kv.data, 128, 3, (float *)kv.data + 128, 128, 1, MT_F32));
    }
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_a_rank_leaves(void **state) {
    (void)state;
    for (int type = MT_CP_P2P; type <= MT_CP_A2A; type++) {
        leaver l = {(mt_cp_comm_type)type, 0};
        test_launch(4, leaving_rank, &l);
    }
    test_launch(4, leaving_rank, &(leaver){MT_CP_P2P, 1});
}

/* A call of attention that one of `ranks` context ranks refuses. */
static void refused_attention(const mt_context_desc *where, int ranks, const mt_context_parallel_desc *how,
                              mt_attention_desc s, mt_status status, const char *words) {
    test_rank r;
    mt_tensor q;
    test_paper_rank(4, 0, (mt_grid_desc){.cp = ranks}, where, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 8, 12, &q));
    s.batch = s.heads_per_group = 1, s.head_dim = 4;
    REFUSED(r.ctx, status, words,
            mt_context_parallel_attention_forward(r.ctx, r.grid.cp, how, &s, q, q, q, q, mt_none()));
    test_paper_rank_close(&r);
}

static void test_refusals(void **state) {
    const mt_context_desc meta = {.device = MT_DEVICE_META};
    const mt_context_desc same = {.device = MT_DEVICE_META, .invariant = 2};
    const mt_attention_desc seq = {.seq = 6, .groups = 3}, few = {.seq = 2, .groups = 3},
                            fits = {.seq = 16, .groups = 3};
    const mt_attention_desc part = {.seq = 16, .groups = 3, .part.seq = 32};
    mt_parallel_options options = {.context = {.comm_type = (mt_cp_comm_type)4}};
    test_rank r;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.cp = 2}, &meta, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_parallel_set_options: context.comm_type is 4",
            mt_parallel_set_options(r.ctx, &options));
    test_paper_rank_close(&r);
    refused_attention(&meta, 2, NULL, seq, MT_ERR_SHAPE,
                      "seq is 6, must be a multiple of 4, 2 chunks for each of 2 context ranks");
    refused_attention(&meta, 4, &(mt_context_parallel_desc){.contiguous = 1}, few, MT_ERR_SHAPE,
                      "seq is 2, must be a multiple of 4, one chunk for each of 4 context ranks");
    refused_attention(&meta, 2, &(mt_context_parallel_desc){.comm_type = MT_CP_A2A}, fits, MT_ERR_SHAPE,
                      "MT_CP_A2A cannot divide 3 groups of 1 query heads among 2 context ranks");
    refused_attention(&meta, 2, NULL, part, MT_ERR_ARGUMENT, "desc->part.seq is 32, must be 0");
    refused_attention(&meta, 4, NULL, fits, MT_ERR_SHAPE, "q is [8, 12], must be [4, 12]");
    refused_attention(&meta, 2, NULL, fits, MT_ERR_ARGUMENT,
                      "mt_context_parallel_attention_forward: out [8, 12] and q [8, 12] overlap");
    refused_attention(&meta, 2, &(mt_context_parallel_desc){.invariant = 4}, fits, MT_ERR_ARGUMENT,
                      "context.invariant is 4, must be 0 without mt_context_desc.invariant");
    refused_attention(&same, 2, &(mt_context_parallel_desc){.invariant = 6}, fits, MT_ERR_ARGUMENT,
                      "context.invariant is 6, must be 0 or a power of two up to 1024");
    refused_attention(&same, 4, &(mt_context_parallel_desc){.invariant = 2}, fits, MT_ERR_SHAPE,
                      "2 virtual context ranks (context.invariant) cannot be split over 4");
    refused_attention(&same, 2, &(mt_context_parallel_desc){.invariant = 2, .whole_keys = 1}, fits, MT_ERR_ARGUMENT,
                      "context.whole_keys must be 0 with context.invariant 2");
    refused_attention(&same, 2, &(mt_context_parallel_desc){.invariant = 4}, seq, MT_ERR_SHAPE,
                      "seq is 6, must be a multiple of 8, 2 chunks for each of 4 context ranks");
}

/* What invariant mode refuses because context ranks add up parts. */
static void test_refusals_of_invariant_mode(void **state) {
    const mt_context_desc where = {.invariant = 1, .arena_bytes = 1 << 20};
    mt_param *weight, *other;
    test_rank r;
    mt_tensor x;
    (void)state;
    for (int ranks = 0; ranks <= 2; ranks += 2) {
        test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &where, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_parallel_set_options(r.ctx, &(mt_parallel_options){.context.invariant = ranks}));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_params_add(r.ctx, r.params,
                                    &(mt_param_desc){.name = "w", .rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS},
                                    &weight));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_params_add(r.ctx, r.params, &(mt_param_desc){.name = "b", .rows = 1, .cols = 4}, &other));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
        x = mt_tensor_f32(test_floats(&r, 16, 1), 4, 4);
        if (ranks == 0) {
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_gradients(r.ctx, x, x, weight->grad, mt_none()));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, x, other->grad));
        } else {
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "in the gradient of 'w', which context ranks have parts of",
                    mt_linear_gradients(r.ctx, x, x, weight->grad, mt_none()));
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "in the gradient of 'b', which context ranks have parts of",
                    mt_bias_backward(r.ctx, x, other->grad));
        }
        test_paper_rank_close(&r);
    }
}

/* Rows that virtual context ranks cannot divide have no gradient, unless they are said to be sequences. */
static void test_rows_of_virtual_ranks(void **state) {
    const mt_context_desc where = {.invariant = 1, .arena_bytes = 1 << 20};
    const mt_linear_desc d = {.in_features = 4, .out_features = 4};
    const mt_norm_layer_desc per_head = {.features = 4, .groups = 1};
    mt_parallel_options options = {.context.invariant = 3};
    mt_column_parallel_linear linear;
    mt_linear_saved saved;
    mt_norm_layer norm;
    mt_norm_saved norm_saved;
    mt_tensor x, y;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &where, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "context.invariant is 3, must be 0 or a power of two up to 1024",
            mt_parallel_set_options(r.ctx, &options));
    options.context.invariant = 4;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_set_options(r.ctx, &options));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "fc", &d, &linear));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_norm_layer_create(r.ctx, r.params, "norm", &per_head, &norm));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    x = mt_tensor_f32(test_floats(&r, 24, 1), 6, 4), y = mt_tensor_f32(test_floats(&r, 24, 1), 6, 4);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_forward(r.ctx, &linear, x, y, &saved));
    REFUSED(r.ctx, MT_ERR_SHAPE, "6 rows cannot be summed for 4 virtual context ranks each|call mt_rows_are_sequences",
            mt_parallel_linear_backward(r.ctx, &linear, y, mt_none(), &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_norm_layer_forward(r.ctx, &norm, x, y, &norm_saved));
    REFUSED(r.ctx, MT_ERR_SHAPE, "6 rows cannot be summed for 4 virtual context ranks each",
            mt_norm_layer_backward(r.ctx, &norm, y, mt_none(), y, &norm_saved));
    assert_int_equal(mt_rows_are_sequences(r.ctx, 1), 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_backward(r.ctx, &linear, y, mt_none(), &saved));
    assert_int_equal(mt_rows_are_sequences(r.ctx, 0), 1);
    options.context.invariant = 2;
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "context.invariant is 2, but parameters of this context have 4 virtual context ranks",
            mt_parallel_set_options(r.ctx, &options));
    test_paper_rank_close(&r);
}

/* Ranks that divide sequences in other ways find it before they exchange tokens. */
static mt_status other_layout_rank(mt_comm *world, void *user) {
    const int invariant = *(const int *)user, rank = mt_comm_rank(world);
    const mt_context_desc where = {.arena_bytes = 1 << 20, .invariant = invariant};
    mt_parallel_options options = {.context.contiguous = !invariant && rank == 1};
    mt_param *w;
    test_rank r;
    if (invariant) options.context.invariant = 2 + 2 * rank;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.cp = 2}, &where, &r));
    MT_TRY(mt_parallel_set_options(r.ctx, &options));
    MT_TRY(mt_params_add(r.ctx, r.params, &(mt_param_desc){.name = "w", .rows = 4, .cols = 4}, &w));
    CHECK(mt_params_init(r.ctx, r.params, 1) == MT_ERR_MISMATCH);
    CHECK(test_has_words(mt_last_error(r.ctx), invariant ? "mt_parallel_options.context.invariant|2|4"
                                                         : "mt_parallel_options.context.contiguous|0|1"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_ranks_with_another_layout(void **state) {
    (void)state;
    for (int invariant = 0; invariant < 2; invariant++) test_launch(2, other_layout_rank, &invariant);
}

/* ---- bytes that are sent, and memory ----------------------------------------------------------------------------- */

enum { LONGER = 1024, WIDE = 128 };

/* What a rank sends to others in forward, by the table of docs/context.md: K are the bytes of the keys and values of
   all tokens, Q those of the queries. */
static void test_bytes_that_are_sent(void **state) {
    (void)state;
    for (int n = 2; n <= 8; n *= 2)
        for (int way = MT_CP_P2P; way <= MT_CP_A2A; way++) {
            const mt_context_desc where = {.device = MT_DEVICE_META};
            const mt_context_parallel_desc how = {.comm_type = (mt_cp_comm_type)way};
            const mt_attention_desc d = {.batch = 2, .seq = 64, .groups = 8, .heads_per_group = 2, .head_dim = 4};
            const double tokens = 2 * 64, k = tokens * 2 * 8 * 4 * 4, q = tokens * 16 * 4 * 4, others = (n - 1.0) / n;
            const int64_t rows = 2 * 64 / n;
            double sent, formula = way == MT_CP_A2A ? others * (k + 2 * q) / n : others * k;
            mt_tensor views[4];
            mt_arena_request rooms[] = {{&views[0], MT_F32, rows, 64},
                                        {&views[1], MT_F32, rows, 32},
                                        {&views[2], MT_F32, rows, 32},
                                        {&views[3], MT_F32, rows, 64}};
            mt_ledger ledger;
            test_rank r;
            test_paper_rank(n, 0, (mt_grid_desc){.cp = n}, &where, &r);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, rooms, 4));
            ASSERT_STATUS(r.ctx, MT_SUCCESS,
                          mt_context_parallel_attention_forward(r.ctx, r.grid.cp, &how, &d, views[0], views[1],
                                                                views[2], views[3], mt_none()));
            ledger = mt_comm_ledger(r.grid.cp);
            /* all_gather and all_to_all count the part that stays, too */
            sent = (double)ledger.bytes[MT_SEND] +
                   others * (double)(ledger.bytes[MT_ALL_GATHER] + ledger.bytes[MT_ALL_TO_ALL]);
            if (sent != formula) fail_msg("%d ranks, way %d: sends %.0f bytes, not %.0f", n, way, sent, formula);
            test_paper_rank_close(&r);
        }
}

/* The bytes of the arena that a layer keeps for backward, with its input. */
static double kept_by_a_layer(mt_grid_desc shape, mt_cp_comm_type way) {
    const mt_context_desc where = {.device = MT_DEVICE_META};
    const mt_transformer_layer_desc d = {.hidden = WIDE, .heads = 8, .sequence_parallel = shape.tp > 1};
    const mt_batch batch = {.sequences = 2, .seq = LONGER};
    const int64_t rows = 2 * LONGER / (shape.cp * shape.tp);
    mt_transformer_layer layer;
    mt_transformer_layer_saved saved;
    mt_tensor x, y;
    test_rank r;
    size_t mark;
    test_paper_rank(shape.tp * shape.cp, 0, shape, &where, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_set_options(r.ctx, &(mt_parallel_options){.context.comm_type = way}));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_transformer_layer_create(r.ctx, r.params, "layer", &d, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, rows, WIDE, &y));
    mark = mt_arena_mark(r.ctx);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, rows, WIDE, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_transformer_layer_forward(r.ctx, &layer, &batch, x, y, &saved));
    mark = mt_arena_mark(r.ctx) - mark;
    test_paper_rank_close(&r);
    return (double)mark;
}

/* On n context ranks and t tensor ranks with sequence parallelism, a layer keeps 64 / (t n) bytes for each token and
   feature, as bench.c has it, and for each token 4 for each head, and 16 of the norms. */
static void test_memory_is_divided(void **state) {
    const double formula = 2.0 * LONGER * (WIDE * 64 + 8 * 4 + 16);
    (void)state;
    for (int tp = 1; tp <= 2; tp++)
        for (int cp = 1; cp <= 8; cp *= 2)
            for (int way = MT_CP_P2P; way <= MT_CP_A2A && (way < MT_CP_A2A || tp * cp <= 8); way++) {
                double kept = kept_by_a_layer((mt_grid_desc){.tp = tp, .cp = cp}, (mt_cp_comm_type)way);
                if (fabs(kept / (formula / (tp * cp)) - 1) > 1e-3)
                    fail_msg("tp %d x cp %d, way %d: keeps %.0f bytes, the formula has %.0f", tp, cp, way, kept,
                             formula / (tp * cp));
            }
}

int main(void) {
    const struct CMUnitTest in_invariant_mode[] = {
        cmocka_unit_test(test_same_bits_on_every_split),
        cmocka_unit_test(test_same_bits_of_norms_of_heads),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_split_is_one_rank),
        cmocka_unit_test(test_ranks_without_a_loss),
        cmocka_unit_test(test_attention_layers_on_every_split),
        cmocka_unit_test(test_gpt_on_every_split),
        cmocka_unit_test(test_attention_on_every_split),
        cmocka_unit_test(test_packed_documents_on_every_split),
        cmocka_unit_test(test_bert_on_every_split),
        cmocka_unit_test(test_cross_attention_on_every_split),
        cmocka_unit_test(test_same_bits_on_every_split),
        cmocka_unit_test(test_norm_of_keys),
        cmocka_unit_test(test_same_bits_of_norms_of_heads),
        cmocka_unit_test(test_documents_are_alone),
        cmocka_unit_test(test_tokens_of_a_rank),
        cmocka_unit_test(test_rows_of_virtual_ranks),
        cmocka_unit_test(test_ranks_with_another_layout),
        cmocka_unit_test(test_bytes_that_are_sent),
        cmocka_unit_test(test_memory_is_divided),
        cmocka_unit_test(test_a_rank_leaves),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_refusals_of_invariant_mode),
    };
    if (INVARIANT_MODE_ONLY) return cmocka_run_group_tests(in_invariant_mode, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
