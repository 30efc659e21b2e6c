/* test_names.c - tests the tables of names: models of Hugging Face on every split against the logits of PyTorch, what
   is saved against the files of transformers, tables of a program's own, and what a config.json may not say. Run it
   from the root of the checkout. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"
#include "mt_test_scratch.h"

enum { SEQUENCES = 2, SEQ = 12, TOKENS = SEQUENCES * SEQ, VOCAB = 61 };

/* A model of transformers, and how this library makes it. */
typedef struct source {
    const char *directory;
    int tp, pp;
    mt_qkv_layout qkv_layout;
    mt_rotary_form rotary_form;
    mt_dtype dtype;
    const char *to;               /* the checkpoint is saved to this directory; NULL: it is not saved */
    const mt_tensor_table *table; /* of the program's own, of own_table_rank */
    int64_t padded_vocab;
    const char *golden; /* the directory of the golden logits; NULL: that of the model, if it is in tests/ */
    int no_logits;      /* 1: the logits are not compared */
} source;

typedef struct replica {
    test_rank r;
    mt_gpt gpt;
    mt_checkpoint *checkpoint;
} replica;

static mt_status read_expected(mt_context *ctx, const char *model, const char *name, float *out) {
    char path[MT_PATH_MAX];
    mt_safetensors *s;
    print_to(path, sizeof path, "%s/expected.safetensors", model);
    MT_TRY(mt_safetensors_open(ctx, path, &s));
    mt_status status = mt_safetensors_read(ctx, mt_safetensors_find(s, name), out);
    mt_safetensors_close(s);
    return status;
}

/* Compares the logits with those in the directory `golden`, to 1e-5 of the largest. */
static mt_status same_logits(replica *m, const char *golden) {
    mt_batch batch = {.sequences = SEQUENCES, .seq = SEQ};
    float *logits = test_floats(&m->r, TOKENS * VOCAB, 0), *want = test_floats(&m->r, TOKENS * VOCAB, 0), x[TOKENS];
    int32_t ids[TOKENS];
    double most = 0;
    MT_TRY(read_expected(m->r.ctx, golden, "ids", x));
    MT_TRY(read_expected(m->r.ctx, golden, "logits", want));
    for (int i = 0; i < TOKENS; i++) ids[i] = (int32_t)x[i];
    for (int i = 0; i < TOKENS * VOCAB; i++) most = fmax(most, fabs((double)want[i]));
    MT_TRY(mt_gpt_logits(m->r.ctx, &m->gpt, &batch, ids, mt_tensor_f32(logits, TOKENS, VOCAB)));
    return test_near_f32("logits", logits, want, TOKENS * VOCAB, 1e-5 * most);
}

static mt_status replica_open(mt_comm *world, const source *s, replica *m) {
    mt_grid_desc shape = {.tp = s->tp, .pp = s->pp ? s->pp : 1};
    mt_checkpoint_desc c = {.directory = s->to ? in_scratch(s->to) : NULL};
    mt_gpt_desc d;
    memset(m, 0, sizeof *m);
    MT_TRY(test_rank_open(world, shape, NULL, &m->r));
    MT_TRY(mt_params_set_dtype(m->r.ctx, m->r.params, s->dtype));
    MT_TRY(mt_gpt_desc_read(m->r.ctx, s->directory, &d));
    d.padded_vocab = s->padded_vocab;
    d.layer.qkv_layout = s->qkv_layout;
    if (d.layer.kv_heads < d.layer.heads && s->qkv_layout == MT_QKV_CONCATENATED) d.layer.qkv_layout = MT_QKV_SEPARATE;
    if (d.layer.scores.rotary_base > 0) d.layer.scores.rotary_form = s->rotary_form;
    MT_TRY(mt_gpt_create(m->r.ctx, m->r.params, &d, &m->gpt));
    return mt_gpt_checkpoint_create(m->r.ctx, m->r.params, &m->gpt, &c, &m->checkpoint);
}

static void replica_close(replica *m) {
    mt_checkpoint_destroy(m->r.ctx, m->checkpoint);
    test_rank_close(&m->r);
}

/* Saves what is loaded. The values stay: a load of what was saved gives the same logits. */
static mt_status save(replica *m, const source *s) {
    mt_training_state state = {.step = 5};
    if (!s->to) return MT_SUCCESS;
    MT_TRY(mt_checkpoint_save(m->r.ctx, m->checkpoint, &state));
    for (int i = 0; i < mt_params_count(m->r.params); i++) {
        mt_tensor value = mt_params_at(m->r.params, i)->value;
        memset(value.data, 0, (size_t)(value.rows * value.cols) * mt_dtype_size(value.dtype));
    }
    return mt_checkpoint_load(m->r.ctx, m->checkpoint, 5, &state);
}

static const char *golden_of(const source *s) {
    if (s->golden) return s->golden;
    return strncmp(s->directory, "tests/", 6) == 0 ? s->directory : NULL;
}

static mt_status import_rank(mt_comm *world, void *user) {
    const source *s = (const source *)user;
    replica m;
    MT_TRY(replica_open(world, s, &m));
    MT_TRY(mt_checkpoint_import(m.r.ctx, m.checkpoint, s->directory));
    MT_TRY(save(&m, s));
    if (!s->no_logits && golden_of(s)) MT_TRY(same_logits(&m, golden_of(s)));
    replica_close(&m);
    return MT_SUCCESS;
}

static void import(source s) { test_launch(s.tp * (s.pp ? s.pp : 1), import_rank, &s); }

static const char gpt2_model[] = "tests/golden/gpt2_hf_tied", untied_gpt2_model[] = "tests/golden/gpt2_hf_untied",
                  llama_model[] = "tests/golden/llama_hf";

static const struct {
    const char *directory;
    mt_dtype dtype; /* of its files */
} models[] = {{gpt2_model, MT_F32},
              {llama_model, MT_F32},
              {untied_gpt2_model, MT_F32},
              {"tests/golden/llama_hf_tied", MT_BF16},
              {"tests/golden/gpt2_hf_f16", MT_F16},
              {"tests/golden/llama_hf_f16", MT_F16}};
enum { MODELS = sizeof models / sizeof *models };

static void logits(void **state) {
    (void)state;
    for (int i = 0; i < MODELS; i++)
        for (int tp = 1; tp <= 8; tp *= 2)
            for (int layout = 0; layout < 3; layout++)
                import((source){.directory = models[i].directory,
                                .tp = tp,
                                .qkv_layout = (mt_qkv_layout)layout,
                                .rotary_form = tp == 2 ? MT_ROTARY_PAIRS : MT_ROTARY_HALVES});
}

/* ---- what is saved ----------------------------------------------------------------------------------------------- */

/* All tensors of `ours` are in `theirs`, with the same shape, type and bits, and there are as many. */
static void same_tensors(const char *ours, const char *theirs) {
    mt_context *ctx;
    mt_safetensors_set *a, *b;
    int tensors[2] = {0, 0};
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_set_open(ctx, ours, "model", &a));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_set_open(ctx, theirs, "model", &b));
    for (int f = 0; mt_safetensors_set_file(b, f); f++)
        tensors[1] += mt_safetensors_count(mt_safetensors_set_file(b, f));
    for (int f = 0; mt_safetensors_set_file(a, f); f++)
        for (int i = 0; i < mt_safetensors_count(mt_safetensors_set_file(a, f)); i++, tensors[0]++) {
            const mt_safetensors_tensor *x = mt_safetensors_at(mt_safetensors_set_file(a, f), i);
            const mt_safetensors_tensor *y = mt_safetensors_set_find(b, x->name);
            if (!y) fail_msg("%s has no '%s'", theirs, x->name);
            assert_string_equal(x->dtype, y->dtype);
            assert_int_equal(x->dims, y->dims);
            assert_memory_equal(x->shape, y->shape, sizeof x->shape);
            assert_memory_equal(x->data, y->data, (size_t)x->bytes);
        }
    assert_int_equal(tensors[0], tensors[1]);
    mt_safetensors_set_close(a);
    mt_safetensors_set_close(b);
    mt_context_destroy(ctx);
}

/* What an import saves has the tensors and the config of transformers, on every split, and is imported again. */
static void saved_as_transformers_saves(void **state) {
    static const int splits[][2] = {{1, 1}, {2, 1}, {8, 1}, {1, 2}, {4, 2}};
    (void)state;
    for (int i = 0; i < MODELS; i++)
        for (size_t k = 0; k < sizeof splits / sizeof *splits; k++) {
            const char *directory = models[i].directory;
            source s = {.directory = directory, .tp = splits[k][0], .pp = splits[k][1], .to = "a"}, again = s;
            const char *saved = in_scratch("a/step-00000005");
            s.qkv_layout = (mt_qkv_layout)(k % 3);
            s.rotary_form = k == 1 ? MT_ROTARY_PAIRS : MT_ROTARY_HALVES;
            s.dtype = models[i].dtype;
            s.no_logits = s.dtype != MT_F32;
            import(s);
            same_tensors(saved, directory);
            shell("cmp '%s/config.json' %s/config.json", saved, directory);
            shell("cmp '%s/generation_config.json' %s/generation_config.json", saved, directory);
            again.directory = saved, again.tp = 2, again.pp = 1, again.to = "b", again.dtype = s.dtype;
            again.qkv_layout = s.qkv_layout, again.rotary_form = s.rotary_form;
            import(again);
            same_tensors(in_scratch("b/step-00000005"), directory);
            shell("cmp '%s/config.json' %s/config.json", in_scratch("b/step-00000005"), directory);
            forget("a");
            forget("b");
        }
}

/* Numbers of ranks that divide neither the heads nor the vocabulary of a Llama: some have padding. */
static void logits_on_odd_splits(void **state) {
    static const int ranks[] = {3, 7};
    (void)state;
    for (int i = 0; i < 2; i++) {
        import((source){.directory = llama_model, .tp = ranks[i], .to = "a"});
        same_tensors(in_scratch("a/step-00000005"), llama_model);
        forget("a");
    }
}

/* The type in config.json is that of the tensors, and a class without a head becomes one with a head. */
static void members_that_change(void **state) {
    source s = {.directory = in_scratch("c"), .tp = 2, .to = "a"};
    (void)state;
    shell("cp -r tests/golden/llama_hf_tied '%s'", in_scratch("c"));
    shell("sed -i 's/LlamaForCausalLM/LlamaModel/' '%s'", in_scratch("c/config.json"));
    import(s);
    shell("sed -e 's/LlamaModel/LlamaForCausalLM/' -e 's/bfloat16/float32/' '%s' | tr -d ' \\n' > '%s'",
          in_scratch("c/config.json"), in_scratch("wanted"));
    shell("tr -d ' \\n' < '%s' | cmp - '%s'", in_scratch("a/step-00000005/config.json"), in_scratch("wanted"));
    forget("a");
    forget("c");
    forget("wanted");
}

/* A model that was not imported gets a config.json of its own, which describes it. */
static mt_status fresh_rank(mt_comm *world, void *user) {
    const source *s = (const source *)user;
    mt_training_state state = {.step = 5};
    replica m;
    MT_TRY(replica_open(world, s, &m));
    MT_TRY(mt_params_init(m.r.ctx, m.r.params, 3));
    MT_TRY(mt_checkpoint_save(m.r.ctx, m.checkpoint, &state));
    replica_close(&m);
    return MT_SUCCESS;
}

static void configs_of_new_models(void **state) {
    mt_context *ctx;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (int i = 0; i < MODELS; i++) {
        source s = {.directory = models[i].directory, .tp = 1, .to = "a"};
        mti_described a, b;
        int exists;
        memset(&a, 0, sizeof a);
        memset(&b, 0, sizeof b);
        test_launch(1, fresh_rank, &s);
        ASSERT_STATUS(ctx, MT_SUCCESS, mti_config_open(ctx, models[i].directory, &exists, &a));
        ASSERT_STATUS(ctx, MT_SUCCESS, mti_config_open(ctx, in_scratch("a/step-00000005"), &exists, &b));
        assert_int_equal(exists, 1);
        assert_int_equal(mti_described_differ(&a, &b), -1);
        assert_int_equal(a.d.max_seq, b.d.max_seq);
        shell("! test -e '%s'", in_scratch("a/step-00000005/generation_config.json"));
        forget("a");
    }
    mt_context_destroy(ctx);
}

/* ---- other names ------------------------------------------------------------------------------------------------- */

/* Saves an imported model with the names of the registry, as older versions saved a Llama and an untied GPT-2, and
   loads it. */
static mt_status registry_names_rank(mt_comm *world, void *user) {
    const source *s = (const source *)user;
    mt_training_state state = {.step = 5};
    mt_checkpoint_desc c = {.directory = in_scratch("old")};
    mt_checkpoint *old;
    replica m;
    MT_TRY(replica_open(world, s, &m));
    c.format = mti_gpt_formats;
    c.model = &m.gpt;
    MT_TRY(mt_checkpoint_create(m.r.ctx, m.r.params, &c, &old));
    MT_TRY(mt_checkpoint_import(m.r.ctx, m.checkpoint, s->directory));
    MT_TRY(mt_checkpoint_save(m.r.ctx, old, &state));
    MT_TRY(mt_params_init(m.r.ctx, m.r.params, 7));
    MT_TRY(mt_checkpoint_import(m.r.ctx, m.checkpoint, in_scratch("old/step-00000005")));
    MT_TRY(same_logits(&m, s->directory));
    mt_checkpoint_destroy(m.r.ctx, old);
    replica_close(&m);
    return MT_SUCCESS;
}

static void names_of_the_registry(void **state) {
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        source s = {.directory = models[i].directory, .tp = 2};
        test_launch(2, registry_names_rank, &s);
        shell("grep -q embedding.word_embeddings.weight '%s'", in_scratch("old/step-00000005/model.safetensors"));
        forget("old");
    }
}

/* What a copy of a model changes. */
typedef struct changes {
    const char *prefix;     /* is left out of names; NULL: none */
    const char *without[2]; /* tensors whose names begin with one of these are left out; NULL: none */
    int older;              /* 1: older names of norms */
    int f64;                /* 1: every tensor has type F64 */
    const char *added;      /* one more tensor; NULL: none */
} changes;

/* Writes the name of a copied tensor to out. Returns 0 for a tensor that is left out. */
static int changed_name(const changes *c, const char *name, char out[200]) {
    size_t n = c->prefix && strncmp(name, c->prefix, strlen(c->prefix)) == 0 ? strlen(c->prefix) : 0;
    char *norm;
    for (int i = 0; i < 2; i++)
        if (c->without[i] && strncmp(name, c->without[i], strlen(c->without[i])) == 0) return 0;
    print_to(out, 200, "%s", name + n);
    if (c->older && (norm = strstr(out, "LayerNorm.")) != NULL)
        strcpy(norm + 10, strcmp(norm + 10, "weight") == 0 ? "gamma" : "beta");
    return 1;
}

static void write_f64(mt_context *ctx, mt_safetensors_writer *w, const mt_safetensors_tensor *t) {
    size_t n = 1;
    float *x;
    for (int i = 0; i < t->dims; i++) n *= (size_t)t->shape[i];
    x = (float *)malloc(n * sizeof *x);
    assert_non_null(x);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, t, x));
    for (size_t i = 0; i < n; i++) {
        double wide = (double)x[i];
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, &wide, sizeof wide));
    }
    free(x);
}

/* Writes the model of the directory `from` to the directory `to`, which exists. config.json is not copied. */
static void copy_model(const char *from, const char *to, changes c) {
    static const int64_t two = 2;
    static const float zeros[2] = {0, 0};
    mt_context *ctx;
    mt_safetensors_set *set;
    mt_safetensors_writer *w;
    char path[MT_PATH_MAX], name[200];
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_set_open(ctx, from, "model", &set));
    print_to(path, sizeof path, "%s/model.safetensors", to);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_create(ctx, path, NULL, 0, &w));
    for (int pass = 0; pass < 2; pass++) {
        for (int f = 0; mt_safetensors_set_file(set, f); f++)
            for (int i = 0; i < mt_safetensors_count(mt_safetensors_set_file(set, f)); i++) {
                const mt_safetensors_tensor *t = mt_safetensors_at(mt_safetensors_set_file(set, f), i);
                const char *dtype = c.f64 ? "F64" : t->dtype;
                if (!changed_name(&c, t->name, name)) continue;
                if (pass == 0)
                    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, name, dtype, t->dims, t->shape));
                else if (c.f64) write_f64(ctx, w, t);
                else ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, t->data, (size_t)t->bytes));
            }
        if (c.added && pass == 0) ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, c.added, "F32", 1, &two));
        if (c.added && pass == 1) ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, zeros, sizeof zeros));
    }
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    mt_safetensors_set_close(set);
    mt_context_destroy(ctx);
}

/* Names without "model.", and a tensor that is no parameter. */
static void bare_names(void **state) {
    source s = {.directory = in_scratch("c"), .tp = 2, .to = "a", .dtype = MT_BF16};
    (void)state;
    shell("mkdir '%s' && cp tests/golden/llama_hf_tied/config.json '%s'", in_scratch("c"), in_scratch("c"));
    copy_model("tests/golden/llama_hf_tied", in_scratch("c"),
               (changes){.prefix = "model.", .added = "layers.1.self_attn.rotary_emb.inv_freq"});
    import(s);
    same_tensors(in_scratch("a/step-00000005"), "tests/golden/llama_hf_tied");
    forget("a");
    forget("c");
}

/* ---- f64 --------------------------------------------------------------------------------------------------------- */

static void saved_equals(const char *directory) {
    same_tensors(in_scratch("a/step-00000005"), directory);
    shell("cmp '%s' %s/config.json", in_scratch("a/step-00000005/config.json"), directory);
    forget("a");
}

/* Imports files in f64. Saved as f32 and f16 they are those in the directories f32 (NULL: not compared) and f16. */
static void import_f64(const char *directory, const char *golden, const char *f32, const char *f16) {
    for (int i = 0; i < 4; i++) {
        source s = {.directory = directory,
                    .golden = golden,
                    .tp = 1 << i,
                    .qkv_layout = (mt_qkv_layout)(i % 3),
                    .rotary_form = i == 1 ? MT_ROTARY_PAIRS : MT_ROTARY_HALVES};
        import(s);
        s.to = "a";
        if (f32) import(s), saved_equals(f32);
        s.dtype = MT_F16;
        s.no_logits = 1;
        import(s);
        saved_equals(f16);
    }
}

/* transformers has rounded the GPT-2 in f64 to f32 and to f16. The Llama in f64 has the numbers of that in f16. */
static void files_in_f64(void **state) {
    static const char llama[] = "tests/golden/llama_hf_f16";
    char c[SCRATCH_PATH];
    (void)state;
    print_to(c, sizeof c, "%s", in_scratch("c"));
    import_f64("tests/golden/gpt2_hf_f64", NULL, gpt2_model, "tests/golden/gpt2_hf_f16");
    shell("mkdir '%s' && cp %s/*.json '%s'", c, llama, c);
    shell("sed -i 's/float16/float64/' '%s/config.json'", c);
    copy_model(llama, c, (changes){.f64 = 1});
    import_f64(c, llama, NULL, llama);
    forget("c");
}

/* ---- a table of the program's own -------------------------------------------------------------------------------- */

/* The names of Meta's Llama, whose rotary positions are in pairs. One tensor has gate and up, the wrong way round. */
#define LAYER "decoder.layers.#."
static const mt_tensor_name meta_names[] = {
    {"tok_embeddings.weight", "embedding.word_embeddings.weight", 0, 0},
    {"norm.weight", "decoder.final_layernorm.weight", 0, 0},
    {"output.weight", "output_layer.weight", 0, 0},
    {"layers.#.attention_norm.weight", LAYER "input_layernorm.weight", 0, 0},
    {"layers.#.attention.wq.weight", LAYER "self_attention.linear_qkv.weight", MT_PART_QUERY_PAIRS, 0},
    {"layers.#.attention.wk.weight", LAYER "self_attention.linear_qkv.weight", MT_PART_KEY_PAIRS, 0},
    {"layers.#.attention.wv.weight", LAYER "self_attention.linear_qkv.weight", MT_PART_VALUE, MT_TENSOR_TRANSPOSED},
    {"layers.#.attention.wo.weight", LAYER "self_attention.linear_proj.weight", 0, MT_TENSOR_TRANSPOSED},
    {"layers.#.ffn_norm.weight", LAYER "pre_mlp_layernorm.weight", 0, 0},
    {"layers.#.feed_forward.w31.weight", LAYER "mlp.linear_fc1.weight", MT_PART_UP, 0},
    {"layers.#.feed_forward.w31.weight", LAYER "mlp.linear_fc1.weight", MT_PART_GATE, 0},
    {"layers.#.feed_forward.w2.weight", LAYER "mlp.linear_fc2.weight", 0, 0},
    {"rope.freqs", NULL, 0, 0}};
static const mt_tensor_table meta = {meta_names, sizeof meta_names / sizeof *meta_names, NULL, NULL, 0};

/* Loads with the table of transformers and saves with the other one, then the other way round. */
static mt_status own_table_rank(mt_comm *world, void *user) {
    source s = *(const source *)user;
    mt_training_state state = {.step = 5};
    mt_checkpoint_desc c = {.directory = in_scratch("own"), .table = s.table};
    mt_checkpoint *other;
    char path[MT_PATH_MAX];
    replica m;
    MT_TRY(replica_open(world, &s, &m));
    MT_TRY(mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &other));
    MT_TRY(mt_checkpoint_import(m.r.ctx, m.checkpoint, s.directory));
    MT_TRY(mt_checkpoint_save(m.r.ctx, other, &state));
    MT_TRY(mt_params_init(m.r.ctx, m.r.params, 7));
    MT_TRY(mt_checkpoint_path(m.r.ctx, c.directory, 5, path, sizeof path));
    MT_TRY(mt_checkpoint_import(m.r.ctx, other, path));
    for (int i = 0; i < mt_params_count(m.r.params); i++) MT_TRY(check_padding(mt_params_at(m.r.params, i)));
    MT_TRY(same_logits(&m, s.directory));
    MT_TRY(mt_checkpoint_save(m.r.ctx, m.checkpoint, &state));
    mt_checkpoint_destroy(m.r.ctx, other);
    replica_close(&m);
    return MT_SUCCESS;
}

static void own_table(void **state) {
    float pairs[48 * 48], halves[48 * 48], back[48 * 48];
    mt_context *ctx;
    mt_safetensors_set *theirs;
    mt_safetensors *ours;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (int i = 0; i < 4; i++) {
        source s = {
            .directory = llama_model, .tp = 1 << i, .to = "a", .table = &meta, .rotary_form = (mt_rotary_form)(i / 2)};
        test_launch(s.tp, own_table_rank, &s);
        same_tensors(in_scratch("a/step-00000005"), llama_model);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_set_open(ctx, llama_model, "model", &theirs));
        ASSERT_STATUS(ctx, MT_SUCCESS,
                      mt_safetensors_open(ctx, in_scratch("own/step-00000005/model.safetensors"), &ours));
        assert_int_equal(mt_safetensors_count(ours), 3 + 2 * 8);
        ASSERT_STATUS(ctx, MT_SUCCESS,
                      mt_safetensors_read(ctx, mt_safetensors_find(ours, "layers.1.attention.wq.weight"), pairs));
        ASSERT_STATUS(ctx, MT_SUCCESS,
                      mt_safetensors_read(
                          ctx, mt_safetensors_set_find(theirs, "model.layers.1.self_attn.q_proj.weight"), halves));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_rotary_pairs_from_halves(8, 6, 0, 48, halves, back));
        assert_memory_equal(pairs, back, sizeof pairs);
        mt_safetensors_close(ours);
        mt_safetensors_set_close(theirs);
        forget("a");
        forget("own");
    }
    mt_context_destroy(ctx);
}

/* A table for the tied GPT-2: the vocabulary is in columns, keys and values are in one tensor without queries. */
static const mt_tensor_name columns_names[] = {
    {"words", "embedding.word_embeddings.weight", 0, MT_TENSOR_TRANSPOSED},
    {"places", "embedding.position_embeddings.weight", 0, 0},
    {"h.#.q.weight", LAYER "self_attention.linear_qkv.weight", MT_PART_QUERY, 0},
    {"h.#.kv.weight", LAYER "self_attention.linear_qkv.weight", MT_PART_KEY, 0},
    {"h.#.kv.weight", LAYER "self_attention.linear_qkv.weight", MT_PART_VALUE, 0},
    {"h.#.q.bias", LAYER "self_attention.linear_qkv.bias", MT_PART_QUERY, 0},
    {"h.#.kv.bias", LAYER "self_attention.linear_qkv.bias", MT_PART_KEY, 0},
    {"h.#.kv.bias", LAYER "self_attention.linear_qkv.bias", MT_PART_VALUE, 0},
    {"h.#.up.weight", LAYER "mlp.linear_fc1.weight", 0, MT_TENSOR_TRANSPOSED}};
static const mt_tensor_table columns = {columns_names, sizeof columns_names / sizeof *columns_names, NULL, NULL, 0};

/* The file of this table has the vocabulary without padding, and no head. */
static void columns_of_the_vocabulary(void) {
    enum { HIDDEN = 16 };
    float rows[VOCAB * HIDDEN], words[HIDDEN * VOCAB];
    mt_context *ctx;
    mt_safetensors_set *theirs, *ours;
    const mt_safetensors_tensor *t;
    int tensors = 0;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_set_open(ctx, gpt2_model, "model", &theirs));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_set_open(ctx, in_scratch("own/step-00000005"), "model", &ours));
    for (int f = 0; mt_safetensors_set_file(ours, f); f++)
        tensors += mt_safetensors_count(mt_safetensors_set_file(ours, f));
    assert_int_equal(tensors, 4 + 2 * 14);
    t = mt_safetensors_set_find(ours, "words");
    assert_true(t && t->dims == 2 && t->shape[0] == HIDDEN && t->shape[1] == VOCAB);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_read(ctx, t, words));
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_safetensors_read(ctx, mt_safetensors_set_find(theirs, "transformer.wte.weight"), rows));
    for (int i = 0; i < VOCAB * HIDDEN; i++) assert_true(words[i % HIDDEN * VOCAB + i / HIDDEN] == rows[i]);
    mt_safetensors_set_close(ours);
    mt_safetensors_set_close(theirs);
    mt_context_destroy(ctx);
}

/* The vocabulary of 61 is padded to 64 rows, or to 96: then the last quarter of the ranks has only padding. */
static void padded_own_table(void **state) {
    static const int splits[][2] = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {2, 2}, {4, 2}};
    (void)state;
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++)
        for (int64_t padded = 64; padded <= 96; padded += 32) {
            source s = {.directory = gpt2_model,
                        .tp = splits[i][0],
                        .pp = splits[i][1],
                        .to = "a",
                        .table = &columns,
                        .padded_vocab = padded,
                        .qkv_layout = i % 2 ? MT_QKV_CONCATENATED : MT_QKV_PER_GROUP};
            test_launch(s.tp * s.pp, own_table_rank, &s);
            same_tensors(in_scratch("a/step-00000005"), gpt2_model);
            columns_of_the_vocabulary();
            forget("a");
            forget("own");
        }
}

/* ---- BERT -------------------------------------------------------------------------------------------------------- */

static const char bert_model[] = "tests/golden/bert_hf";

/* How a BERT is imported, from which directory. */
typedef struct bert_run {
    const char *directory;
    int tp, pp;
    mt_qkv_layout qkv_layout;
    const char *to;  /* saves to this directory; NULL: does not save */
    int encoder;     /* 1: the files have no heads, which are then loaded from the golden model */
    int no_binary;   /* 1: no_binary_head, whatever the files have */
    int want_binary; /* 1: the files have no sentence order, but the model has it */
} bert_run;

static mt_status bert_logits(test_rank *r, const mt_bert *bert, int binary) {
    mt_batch batch = {.sequences = SEQUENCES, .seq = SEQ};
    float x[TOKENS], *got = test_floats(r, TOKENS * VOCAB, 0), *want = test_floats(r, TOKENS * VOCAB, 0), sop[4];
    int32_t ids[TOKENS], types[TOKENS], lengths[SEQUENCES];
    double most = 0;
    MT_TRY(read_expected(r->ctx, bert_model, "ids", x));
    for (int i = 0; i < TOKENS; i++) ids[i] = (int32_t)x[i];
    MT_TRY(read_expected(r->ctx, bert_model, "types", x));
    for (int i = 0; i < TOKENS; i++) types[i] = (int32_t)x[i];
    MT_TRY(read_expected(r->ctx, bert_model, "lengths", x));
    for (int i = 0; i < SEQUENCES; i++) lengths[i] = (int32_t)x[i];
    batch.token_types = types;
    batch.lengths = lengths;
    MT_TRY(read_expected(r->ctx, bert_model, "logits", want));
    for (int i = 0; i < TOKENS * VOCAB; i++) most = fmax(most, fabs((double)want[i]));
    MT_TRY(mt_bert_logits(r->ctx, bert, &batch, ids, mt_tensor_f32(got, TOKENS, VOCAB),
                          binary ? mt_tensor_f32(sop, SEQUENCES, 2) : mt_none()));
    MT_TRY(test_near_f32("logits", got, want, TOKENS * VOCAB, 1e-5 * most));
    MT_TRY(read_expected(r->ctx, bert_model, "binary_logits", want));
    return binary ? test_near_f32("sentence order", sop, want, 4, 1e-5) : MT_SUCCESS;
}

static mt_status bert_rank(mt_comm *world, void *user) {
    const bert_run *b = (const bert_run *)user;
    mt_grid_desc shape = {.tp = b->tp, .pp = b->pp ? b->pp : 1};
    mt_checkpoint_desc c = {.directory = b->to ? in_scratch(b->to) : NULL};
    mt_training_state state = {.step = 5};
    mt_checkpoint *checkpoint;
    mt_bert_desc d;
    mt_bert bert;
    test_rank r;
    MT_TRY(test_rank_open(world, shape, NULL, &r));
    MT_TRY(mt_bert_desc_read(r.ctx, b->directory, &d));
    d.layer.qkv_layout = b->qkv_layout;
    CHECK(d.layer.norm.eps == 1e-12f && d.layer.activation == MT_GELU_ERF && d.token_types == 2);
    CHECK(d.no_binary_head == (b->encoder || b->want_binary));
    if (b->no_binary) d.no_binary_head = 1;
    if (b->encoder || b->want_binary) d.no_binary_head = 0;
    MT_TRY(mt_bert_create(r.ctx, r.params, &d, &bert));
    MT_TRY(mt_bert_checkpoint_create(r.ctx, r.params, &bert, &c, &checkpoint));
    if (b->encoder || b->want_binary) { /* the heads keep their values */
        CHECK(mt_checkpoint_import(r.ctx, checkpoint, b->directory) == MT_ERR_ARGUMENT);
        CHECK(strstr(mt_last_error(r.ctx), "call mt_params_init first, as the parameter keeps its value"));
        MT_TRY(mt_params_init(r.ctx, r.params, 3));
        MT_TRY(mt_checkpoint_import(r.ctx, checkpoint, bert_model));
        for (int i = 0; i < mt_params_count(r.params); i++) {
            const mt_param *p = mt_params_at(r.params, i);
            int kept = strncmp(p->name, "binary", 6) == 0 || (b->encoder && strstr(p->name, "head"));
            if (!kept && !strstr(p->name, "pooler") && !strstr(p->name, "output_layer"))
                memset(p->value.data, 0, (size_t)(p->value.rows * p->value.cols) * sizeof(float));
        }
    }
    MT_TRY(mt_checkpoint_import(r.ctx, checkpoint, b->directory));
    if (b->to) MT_TRY(mt_checkpoint_save(r.ctx, checkpoint, &state));
    if (b->to) MT_TRY(mt_checkpoint_load(r.ctx, checkpoint, 5, &state));
    MT_TRY(bert_logits(&r, &bert, !d.no_binary_head));
    mt_checkpoint_destroy(r.ctx, checkpoint);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void run_bert(bert_run b) { test_launch(b.tp * (b.pp ? b.pp : 1), bert_rank, &b); }

static void bert(void **state) {
    (void)state;
    for (int tp = 1; tp <= 8; tp *= 2)
        for (int layout = 0; layout < 3; layout++)
            run_bert((bert_run){.directory = bert_model, .tp = tp, .qkv_layout = (mt_qkv_layout)layout});
}

static void bert_saved(void **state) {
    static const int splits[][2] = {{1, 1}, {8, 1}, {2, 2}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        run_bert((bert_run){.directory = bert_model,
                            .tp = splits[i][0],
                            .pp = splits[i][1],
                            .to = "a",
                            .qkv_layout = (mt_qkv_layout)i});
        same_tensors(in_scratch("a/step-00000005"), bert_model);
        shell("cmp '%s' tests/golden/bert_hf/config.json", in_scratch("a/step-00000005/config.json"));
        forget("a");
    }
}

/* Writes the golden BERT as another class of transformers. */
static void other_class(const char *to, changes c) {
    shell("mkdir -p '%s' && cp tests/golden/bert_hf/config.json '%s'", in_scratch(to), in_scratch(to));
    copy_model(bert_model, in_scratch(to), c);
}

/* Files of BertForMaskedLM and of BertModel, with older names, and a model without a binary head. */
static void bert_classes(void **state) {
    (void)state;
    other_class("masked", (changes){.without = {"bert.pooler", "cls.seq"}});
    other_class("encoder", (changes){.without = {"cls."}, .prefix = "bert."});
    other_class("older", (changes){.older = 1});
    for (int tp = 1; tp <= 8; tp *= 2) {
        run_bert((bert_run){.directory = in_scratch("encoder"), .tp = tp, .encoder = 1});
        run_bert((bert_run){.directory = in_scratch("masked"), .tp = tp, .want_binary = 1});
        run_bert((bert_run){.directory = in_scratch("older"), .tp = tp});
    }
    run_bert((bert_run){.directory = bert_model, .tp = 2, .no_binary = 1, .to = "a"});
    same_tensors(in_scratch("a/step-00000005"), in_scratch("masked"));
    shell("grep -q BertForMaskedLM '%s'", in_scratch("a/step-00000005/config.json"));
    forget("a");
    forget("masked");
    forget("encoder");
    forget("older");
}

/* A BERT that is not the original one has the names of the registry; its desc is in the metadata. */
static mt_status own_bert_rank(mt_comm *world, void *user) {
    mt_checkpoint_desc c = {.directory = in_scratch("a")};
    mt_training_state state = {.step = 5};
    mt_checkpoint *checkpoint;
    mt_bert_desc d;
    mt_bert b;
    test_rank r;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, NULL, &r));
    MT_TRY(mt_bert_desc_read(r.ctx, bert_model, &d));
    d.layer.norm.placement = MT_PRE_LN;
    d.token_types = 3;
    d.no_binary_head = 1;
    MT_TRY(mt_bert_create(r.ctx, r.params, &d, &b));
    MT_TRY(mt_params_init(r.ctx, r.params, 3));
    MT_TRY(mt_bert_checkpoint_create(r.ctx, r.params, &b, &c, &checkpoint));
    MT_TRY(mt_checkpoint_save(r.ctx, checkpoint, &state));
    MT_TRY(mt_checkpoint_load(r.ctx, checkpoint, 5, &state));
    CHECK(mt_checkpoint_import(r.ctx, checkpoint, bert_model) == MT_ERR_DATA);
    CHECK(strstr(mt_last_error(r.ctx), "its model has placement MT_POST_LN, this one MT_PRE_LN"));
    mt_checkpoint_destroy(r.ctx, checkpoint);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void own_bert(void **state) {
    mt_context *ctx;
    mt_bert_desc d;
    mt_gpt_desc gpt;
    (void)state;
    test_launch(2, own_bert_rank, NULL);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bert_desc_read(ctx, in_scratch("a/step-00000005"), &d));
    assert_true(d.vocab == VOCAB && d.max_seq == SEQ && d.layer.norm.placement == MT_PRE_LN && d.token_types == 3);
    assert_true(d.no_binary_head == 1 && d.layer.heads == 8 && d.layer.ffn == 40 && d.layer.norm.eps == 1e-12f);
    shell("! test -e '%s'", in_scratch("a/step-00000005/config.json"));
    REFUSED(ctx, MT_ERR_DATA, "describes a GPT", mt_gpt_desc_read(ctx, in_scratch("a/step-00000005"), &gpt));
    forget("a");
    mt_context_destroy(ctx);
}

/* ---- tensors that the model does not have ------------------------------------------------------------------------ */

/* A tensor that is added to a copy of a model, with the bytes of another tensor or with given ones. */
typedef struct added {
    const char *name, *like; /* like: has the type, shape and bytes of this tensor; NULL: those below */
    int change;              /* 1: the last element of `like` is changed; 2: only its half is there */
    const char *dtype;
    int dims;
    int64_t shape[4];
    const void *data;
    const char *without; /* this tensor is left out; NULL: none */
} added;

static int64_t bytes_of_dtype(const char *dtype) {
    if (strcmp(dtype, "U8") == 0 || strcmp(dtype, "BOOL") == 0) return 1;
    if (strcmp(dtype, "I64") == 0) return 8;
    return strcmp(dtype, "F32") == 0 ? 4 : 2;
}

/* Pass 0 adds the tensor to the header, pass 1 writes it. */
static void write_added(mt_context *ctx, mt_safetensors_writer *w, const added *a, const mt_safetensors_tensor *like,
                        int pass) {
    int dims = like ? like->dims : a->dims;
    const char *dtype = like ? like->dtype : a->dtype;
    int64_t shape[4], bytes = bytes_of_dtype(dtype);
    unsigned char *data;
    for (int d = 0; d < dims; d++) {
        shape[d] = like ? like->shape[d] : a->shape[d];
        if (d == 0 && a->change == 2) shape[d] /= 2;
        bytes *= shape[d];
    }
    if (pass == 0) ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, a->name, dtype, dims, shape));
    if (pass == 0) return;
    data = (unsigned char *)malloc((size_t)bytes);
    assert_non_null(data);
    memcpy(data, like ? like->data : a->data, (size_t)bytes);
    if (a->change == 1) data[bytes - 1] ^= 0x40;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, data, (size_t)bytes));
    free(data);
}

/* Writes the tensors of a model and one more. */
static void copy_with(const char *from, const char *to, const added *a) {
    mt_context *ctx;
    mt_safetensors_set *set;
    mt_safetensors_writer *w;
    const mt_safetensors *file;
    char path[MT_PATH_MAX];
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_set_open(ctx, from, "model", &set));
    shell("rm -rf '%s' && mkdir '%s' && cp %s/config.json '%s'", to, to, from, to);
    print_to(path, sizeof path, "%s/model.safetensors", to);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_create(ctx, path, NULL, 0, &w));
    for (int pass = 0; pass < 2; pass++) {
        for (int f = 0; (file = mt_safetensors_set_file(set, f)) != NULL; f++)
            for (int i = 0; i < mt_safetensors_count(file); i++) {
                const mt_safetensors_tensor *t = mt_safetensors_at(file, i);
                if (a->without && strcmp(a->without, t->name) == 0) continue;
                if (pass == 0)
                    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_add(ctx, w, t->name, t->dtype, t->dims, t->shape));
                else ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_write(ctx, w, t->data, (size_t)t->bytes));
            }
        write_added(ctx, w, a, a->like ? mt_safetensors_set_find(set, a->like) : NULL, pass);
    }
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    mt_safetensors_set_close(set);
    mt_context_destroy(ctx);
}

/* Imports on 2 ranks. words NULL: succeeds, else every rank gets this error. */
typedef struct unused_run {
    source s;
    int is_bert;
    const char *words;
    char warnings[4096]; /* of all ranks */
} unused_run;

static pthread_mutex_t warnings_mutex = PTHREAD_MUTEX_INITIALIZER;

static void keep_warning(void *user, mt_log_level level, const char *message) {
    unused_run *u = (unused_run *)user;
    if (level != MT_LOG_WARNING) return;
    pthread_mutex_lock(&warnings_mutex);
    size_t n = strlen(u->warnings);
    snprintf(u->warnings + n, sizeof u->warnings - n, "%s\n", message);
    pthread_mutex_unlock(&warnings_mutex);
}

static mt_status unused_rank(mt_comm *world, void *user) {
    unused_run *u = (unused_run *)user;
    const mt_context_desc where = {.arena_bytes = 1 << 20, .logger = {keep_warning, u}};
    const mt_checkpoint_desc c = {.directory = NULL};
    mt_checkpoint *checkpoint;
    mt_gpt_desc d;
    mt_bert_desc b;
    mt_bert bert;
    replica m;
    memset(&m, 0, sizeof m);
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, &where, &m.r));
    if (u->is_bert) {
        MT_TRY(mt_bert_desc_read(m.r.ctx, u->s.directory, &b));
        MT_TRY(mt_bert_create(m.r.ctx, m.r.params, &b, &bert));
        MT_TRY(mt_params_init(m.r.ctx, m.r.params, 3));
        MT_TRY(mt_bert_checkpoint_create(m.r.ctx, m.r.params, &bert, &c, &checkpoint));
    } else {
        MT_TRY(mt_gpt_desc_read(m.r.ctx, u->s.directory, &d));
        MT_TRY(mt_gpt_create(m.r.ctx, m.r.params, &d, &m.gpt));
        MT_TRY(mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &checkpoint));
    }
    if (u->words) REFUSED(m.r.ctx, MT_ERR_DATA, u->words, mt_checkpoint_import(m.r.ctx, checkpoint, u->s.directory));
    else MT_TRY(mt_checkpoint_import(m.r.ctx, checkpoint, u->s.directory));
    if (!u->words && u->is_bert && !b.no_binary_head) MT_TRY(bert_logits(&m.r, &bert, 1));
    if (!u->words && !u->is_bert && u->s.golden) MT_TRY(same_logits(&m, u->s.golden));
    mt_checkpoint_destroy(m.r.ctx, checkpoint);
    test_rank_close(&m.r);
    return MT_SUCCESS;
}

/* Imports the copy of a model with one more tensor. warning: is logged once; NULL: nothing is logged. */
static void import_with(const char *from, added a, const char *words, const char *warning) {
    unused_run u = {.s = {.directory = in_scratch("c"), .golden = from}, .words = words};
    char directory[SCRATCH_PATH];
    print_to(directory, sizeof directory, "%s", in_scratch("c"));
    u.s.directory = directory;
    u.is_bert = strstr(from, "bert") != NULL;
    copy_with(from, directory, &a);
    test_launch(2, unused_rank, &u);
    if (!words && !warning && u.warnings[0]) fail_msg("%s: logged %s", a.name, u.warnings);
    if (warning && (!test_has_words(u.warnings, warning) || strchr(u.warnings, '\n')[1]))
        fail_msg("%s: logged '%s', must be once '%s'", a.name, u.warnings, warning);
    forget("c");
}

/* What a tied head has twice must be equal, and may be there only under its other name. */
static void copies_in_files(void **state) {
    static const char wte[] = "transformer.wte.weight", embed[] = "model.embed_tokens.weight",
                      words[] = "bert.embeddings.word_embeddings.weight", bias[] = "cls.predictions.bias",
                      decoder[] = "cls.predictions.decoder.weight", decoder_bias[] = "cls.predictions.decoder.bias";
    const char *tied_llama = "tests/golden/llama_hf_tied";
    (void)state;
    for (int alone = 0; alone < 2; alone++) { /* on pipelines, where two stages have the weight */
        copy_with(gpt2_model, in_scratch("c"),
                  &(added){.name = "lm_head.weight", .like = wte, .without = alone ? wte : NULL});
        import((source){.directory = in_scratch("c"), .golden = gpt2_model, .tp = 2, .pp = 2, .to = "a"});
        same_tensors(in_scratch("a/step-00000005"), gpt2_model);
        forget("a");
    }
    import_with(gpt2_model, (added){.name = "lm_head.weight", .like = wte}, NULL, NULL);
    import_with(gpt2_model, (added){.name = "lm_head.weight", .like = wte, .without = wte}, NULL, NULL);
    import_with(
        gpt2_model, (added){.name = "lm_head.weight", .like = wte, .change = 1},
        "element 975 of 'lm_head.weight' is |but of 'transformer.wte.weight'|this model has one parameter for both",
        NULL);
    import_with(gpt2_model, (added){.name = "lm_head.weight", .like = wte, .change = 2},
                "'lm_head.weight' has shape [30, 16], but 'transformer.wte.weight' [61, 16]", NULL);
    import_with(gpt2_model, (added){.name = "wte.weight", .like = wte}, "'wte.weight' is not a parameter of this model",
                NULL);
    import_with(tied_llama, (added){.name = "lm_head.weight", .like = embed}, NULL, NULL);
    import_with(tied_llama, (added){.name = "lm_head.weight", .like = embed, .without = embed}, NULL, NULL);
    import_with(tied_llama, (added){.name = "lm_head.weight", .like = embed, .change = 1},
                "of 'lm_head.weight' is |but of 'model.embed_tokens.weight'", NULL);
    import_with(bert_model, (added){.name = decoder, .like = words}, NULL, NULL);
    import_with(bert_model, (added){.name = decoder, .like = words, .without = words}, NULL, NULL);
    import_with(bert_model, (added){.name = decoder, .like = words, .change = 1},
                "of 'cls.predictions.decoder.weight' is |but of 'bert.embeddings.word_embeddings.weight'", NULL);
    import_with(bert_model, (added){.name = decoder_bias, .like = bias}, NULL, NULL);
    import_with(bert_model, (added){.name = decoder_bias, .like = bias, .without = bias}, NULL, NULL);
    import_with(bert_model, (added){.name = decoder_bias, .like = bias, .change = 1},
                "element 60 of 'cls.predictions.decoder.bias' is |but of 'cls.predictions.bias'", NULL);
    import_with(bert_model,
                (added){.name = "bert.embeddings.LayerNorm.gamma", .like = "bert.embeddings.LayerNorm.weight"},
                "'bert.embeddings.LayerNorm.gamma' is not a parameter of this model", NULL);
}

/* Constants that transformers computes anew: with other values, one rank warns. */
static void constants_in_files(void **state) {
    static const unsigned char mask[] = {1, 0, 0, 1, 1, 0, 1, 1, 1}, window[] = {1, 0, 0, 1, 1, 0, 0, 1, 1};
    static const float ones[] = {1, 0, 1, 1}, full[] = {1, 1, 1, 1}, low = -1e4f, high = -1;
    static const int64_t ids[] = {0, 1, 2}, shifted[] = {2, 3, 4};
    static const char name[] = "transformer.h.1.attn.bias", value[] = "transformer.h.0.attn.masked_bias",
                      inverse[] = "model.layers.0.self_attn.rotary_emb.inv_freq", at[] = "bert.embeddings.position_ids";
    float right[3], wrong[3];
    uint16_t rounded[3];
    (void)state;
    for (int i = 0; i < 3; i++) right[i] = powf(500.0f, -(float)i / 3), wrong[i] = powf(10000.0f, -(float)i / 3);
    mt_f32_to_16bit(MT_BF16, right, rounded, 3);
    import_with(gpt2_model, (added){name, .dtype = "BOOL", .dims = 4, .shape = {1, 1, 3, 3}, .data = mask}, NULL, NULL);
    import_with(gpt2_model, (added){name, .dtype = "F32", .dims = 2, .shape = {2, 2}, .data = ones}, NULL, NULL);
    import_with(gpt2_model, (added){value, .dtype = "F32", .dims = 0, .data = &low}, NULL, NULL);
    import_with(gpt2_model, (added){name, .dtype = "U8", .dims = 4, .shape = {1, 1, 3, 3}, .data = window}, NULL,
                "c: 'transformer.h.1.attn.bias' is not the causal mask; it is not used");
    import_with(gpt2_model, (added){name, .dtype = "F32", .dims = 2, .shape = {2, 2}, .data = full}, NULL,
                "'transformer.h.1.attn.bias' is not the causal mask");
    import_with(gpt2_model, (added){value, .dtype = "F32", .dims = 0, .data = &high}, NULL,
                "'transformer.h.0.attn.masked_bias' is not -10000 or less");
    import_with(llama_model, (added){inverse, .dtype = "F32", .dims = 1, .shape = {3}, .data = right}, NULL, NULL);
    import_with(llama_model, (added){inverse, .dtype = "BF16", .dims = 1, .shape = {3}, .data = rounded}, NULL, NULL);
    import_with(llama_model, (added){inverse, .dtype = "F32", .dims = 1, .shape = {3}, .data = wrong}, NULL,
                "rotary_emb.inv_freq' is not the frequencies of rope_theta");
    import_with(bert_model, (added){at, .dtype = "I64", .dims = 2, .shape = {1, 3}, .data = ids}, NULL, NULL);
    import_with(bert_model, (added){at, .dtype = "I64", .dims = 2, .shape = {1, 3}, .data = shifted}, NULL,
                "'bert.embeddings.position_ids' is not 0, 1, 2, ...");
    import_with(
        bert_model,
        (added){at, .dtype = "I64", .dims = 2, .shape = {1, 3}, .data = ids, .without = "cls.seq_relationship.weight"},
        NULL, "'bert.pooler.dense.bias' is not used, because the model has no_binary_head");
}

/* A BERT whose config.json does not tie the head: an encoder has none, and a head may have the same weight. */
static void berts_that_are_not_tied(void **state) {
    static const char words[] = "bert.embeddings.word_embeddings.weight", decoder[] = "cls.predictions.decoder.weight";
    mt_context *ctx;
    mt_bert_desc d;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (int i = 0; i < 4; i++) {
        unused_run u = {.s = {.directory = in_scratch("b")}, .is_bert = 1};
        shell("mkdir '%s' && sed 's/\"tie_word_embeddings\": true/\"tie_word_embeddings\": false/' "
              "tests/golden/bert_hf/config.json > '%s'",
              in_scratch("b"), in_scratch("b/config.json"));
        if (i == 0) copy_model(bert_model, in_scratch("b"), (changes){.without = {"cls."}});
        if (i == 1) copy_model(bert_model, in_scratch("b"), (changes){.without = {NULL}});
        if (i == 1)
            REFUSED(ctx, MT_ERR_DATA, "config.json: tie_word_embeddings is false, must be true: the files have no cls.",
                    mt_bert_desc_read(ctx, in_scratch("b"), &d));
        if (i >= 2) copy_with(bert_model, in_scratch("t"), &(added){decoder, words, .change = i - 2});
        if (i >= 2) shell("mv '%s' '%s'", in_scratch("t/model.safetensors"), in_scratch("b"));
        if (i == 3) u.words = "of 'cls.predictions.decoder.weight' is |but of";
        if (i != 1) test_launch(2, unused_rank, &u);
        forget("b");
        forget("t");
    }
    mt_context_destroy(ctx);
}

/* A BERT whose config.json has no model_type: its class counts, and without one it is a BERT. */
static void berts_without_model_type(void **state) {
    static const char *const edits[][2] = {{"/model_type/d", NULL},
                                           {"/model_type/d;s/BertForPreTraining/BertModel/", NULL},
                                           {"/model_type/d;s/\"architectures\"/\"x\"/", NULL},
                                           {"/model_type/d;s/BertForPreTraining/RobertaModel/",
                                            "architectures is 'RobertaModel', must be a class of BERT"},
                                           {"/model_type/d;s/BertForPreTraining/BertGenerationEncoder/",
                                            "architectures is 'BertGenerationEncoder', must be a class of BERT"}};
    mt_context *ctx;
    mt_bert_desc d;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    shell("cp -r %s '%s'", bert_model, in_scratch("c"));
    for (int i = 0; i < 5; i++) {
        shell("sed '%s' %s/config.json > '%s'", edits[i][0], bert_model, in_scratch("c/config.json"));
        if (edits[i][1]) REFUSED(ctx, MT_ERR_DATA, edits[i][1], mt_bert_desc_read(ctx, in_scratch("c"), &d));
        else run_bert((bert_run){.directory = in_scratch("c"), .tp = 2});
    }
    forget("c");
    mt_context_destroy(ctx);
}

/* ---- a table of few rows ----------------------------------------------------------------------------------------- */

/* On two pipeline stages, the second one has none of these parameters. */
static const mt_tensor_name few_names[] = {{"tok.weight", "embedding.word_embeddings.weight", 0, 0},
                                           {"mask.#", NULL, 0, 0}};
static const mt_tensor_table few = {few_names, 2, NULL, NULL, 0};

static mt_status few_rank(mt_comm *world, void *user) {
    const source *s = (const source *)user;
    mt_checkpoint_desc c = {.directory = NULL, .table = &few};
    mt_checkpoint *other;
    replica m;
    MT_TRY(replica_open(world, s, &m));
    MT_TRY(mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &other));
    MT_TRY(mt_checkpoint_import(m.r.ctx, other, in_scratch("few")));
    MT_TRY(same_logits(&m, s->directory));
    mt_checkpoint_destroy(m.r.ctx, other);
    replica_close(&m);
    return MT_SUCCESS;
}

static mt_status few_save_rank(mt_comm *world, void *user) {
    const source *s = (const source *)user;
    mt_training_state state = {.step = 5};
    mt_checkpoint_desc c = {.directory = in_scratch("a"), .table = &few};
    mt_checkpoint *other;
    replica m;
    MT_TRY(replica_open(world, s, &m));
    MT_TRY(mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &other));
    MT_TRY(mt_checkpoint_import(m.r.ctx, m.checkpoint, s->directory));
    MT_TRY(mt_checkpoint_save(m.r.ctx, other, &state));
    mt_checkpoint_destroy(m.r.ctx, other);
    replica_close(&m);
    return MT_SUCCESS;
}

static void table_of_few_rows(void **state) {
    source s = {.directory = llama_model, .tp = 1};
    (void)state;
    test_launch(1, few_save_rank, &s);
    shell("mkdir '%s'", in_scratch("few"));
    copy_model(in_scratch("a/step-00000005"), in_scratch("few"), (changes){.added = "mask.3"});
    shell("mkdir '%s'", in_scratch("few/generation_config.json")); /* nothing reads it, because nothing is saved */
    for (s.tp = 1; s.tp <= 2; s.tp++)
        for (s.pp = 1; s.pp <= 2; s.pp++) test_launch(s.tp * s.pp, few_rank, &s);
    forget("a");
    forget("few");
}

/* A model that was not created, and one of another registry, on the stage that has no embedding, too. */
static mt_status strange_rank(mt_comm *world, void *user) {
    source s = {.directory = llama_model, .tp = 1, .pp = 2};
    mt_checkpoint_desc c = {.directory = NULL};
    mt_checkpoint *out;
    replica m, other;
    mt_gpt none;
    mt_bert bert;
    (void)user;
    memset(&none, 0, sizeof none);
    memset(&bert, 0, sizeof bert);
    MT_TRY(replica_open(world, &s, &m));
    MT_TRY(replica_open(world, &s, &other));
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT, "the model was not created",
            mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &none, &c, &out));
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT, "the model was not created",
            mt_bert_checkpoint_create(m.r.ctx, m.r.params, &bert, &c, &out));
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT, "the model is not of this registry",
            mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &other.gpt, &c, &out));
    replica_close(&other);
    replica_close(&m);
    return MT_SUCCESS;
}

static void strange_models(void **state) {
    (void)state;
    test_launch(2, strange_rank, NULL);
}

/* A part that no model has, in a row whose parameter is only on the first stage, and in a row that ignores a tensor. */
static mt_status parts_rank(mt_comm *world, void *user) {
    source s = {.directory = llama_model, .tp = 1, .pp = 2};
    mt_tensor_name names[] = {{"mask.#", NULL, 99, 0}, {"emb", "embedding.word_embeddings.weight", 0, 0}};
    mt_tensor_table table = {names, 2, NULL, NULL, 0};
    mt_checkpoint_desc c = {.directory = NULL, .table = &table};
    mt_checkpoint *out;
    replica m;
    (void)user;
    MT_TRY(replica_open(world, &s, &m));
    MT_TRY(mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &out));
    mt_checkpoint_destroy(m.r.ctx, out);
    names[1].part = MT_PART_UP + 1;
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT,
            "'embedding.word_embeddings.weight': table.names[1].part is 8, must be 0, MT_PART_QUERY, MT_PART_KEY, "
            "MT_PART_VALUE, MT_PART_QUERY_PAIRS, MT_PART_KEY_PAIRS, MT_PART_GATE or MT_PART_UP",
            mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &out));
    names[1].part = -1;
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT, "'embedding.word_embeddings.weight': table.names[1].part is -1",
            mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &out));
    replica_close(&m);
    return MT_SUCCESS;
}

static void unknown_parts(void **state) {
    (void)state;
    test_launch(2, parts_rank, NULL);
}

/* ---- what a config.json may not say ------------------------------------------------------------------------------ */

static void refused_configs(void **state) {
    static const struct {
        const char *from, *to, *words;
    } wrong[] = {
        {"\"llama\"", "\"mistral\"", "model_type is 'mistral', must be gpt2 or llama"},
        {"\"silu\"", "\"gelu\"", "hidden_act is 'gelu', must be silu"},
        {"\"default\"", "\"llama3\"", "rope_parameters.rope_type is 'llama3', must be 'default' or missing"},
        {"\"pretraining_tp\": 1", "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.0}",
         "rope_scaling.rope_type is 'linear', must be 'default' or missing"},
        {"\"pretraining_tp\": 1", "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2.0}",
         "rope_scaling.type is 'dynamic', must be 'default' or missing"},
        {"\"pretraining_tp\": 1", "\"rope_scaling\": {\"factor\": 2.0}",
         "rope_scaling.factor is 2, must be 1 or missing"},
        {"500.0", "0.0", "rope_theta is 0, must be above 0"},
        {"500.0", "1e60", "rope_theta is 1e+60, must be above 0, and a float"},
        {"\"attention_bias\": false", "\"attention_bias\": true", "mlp_bias is false, must be true, as attention_bias"},
        {"\"mlp_bias\": false", "\"mlp_bias\": true", "mlp_bias is true, must be false, as attention_bias is"},
        {"\"head_dim\": 6", "\"head_dim\": 8", "head_dim is 8, must be hidden_size / num_attention_heads, 6"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3",
         "num_key_value_heads is 3, must be a divisor of num_attention_heads 8"},
        {"\"num_attention_heads\": 8", "\"num_attention_heads\": 5",
         "hidden_size is 48, must be a multiple of num_attention_heads 5"},
        {"0.0001", "0.0", "rms_norm_eps is 0, must be above 0"},
        {"\"hidden_size\": 48", "\"hidden_size\": 0", "hidden_size is 0, must be from 1 to 2147483647"},
        {"\"vocab_size\": 61", "\"vocab_size\": \"many\"", "vocab_size: a whole number is missing"},
        {"\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 0",
         "tie_word_embeddings: true or false is missing"},
        {"\"rope_type\": \"default\"", "\"type\": \"linear\"", "rope_parameters.type is 'linear', must be 'default'"},
        {"\"rope_type\": \"default\"", "\"factor\": 2.0", "rope_parameters.factor is 2, must be 1 or missing"},
        {"\"pretraining_tp\": 1", "\"rope_scaling\": {\"rope_theta\": 7.0}",
         "rope_scaling.rope_theta is 7, but rope_parameters.rope_theta is 500"},
        {"\"pretraining_tp\": 1", "\"partial_rotary_factor\": 0.5",
         "partial_rotary_factor is 0.5, must be 1 or missing"},
        {"\"rope_type\": \"default\"", "\"partial_rotary_factor\": 0.25",
         "rope_parameters.partial_rotary_factor is 0.25, must be 1"},
        {"\"pretraining_tp\": 1", "\"sliding_window\": 11", "sliding_window is 11, must be null, missing or at least"},
        {"\"pretraining_tp\": 1", "\"quantization_config\": {\"quant_method\": \"fp8\"}",
         "quantization_config.quant_method is 'fp8', must be missing"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 0", "num_key_value_heads is 0, must be from 1 to"},
        {"\"head_dim\": 6", "\"head_dim\": 0", "head_dim is 0, must be from 1 to 2147483647"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": null", "num_hidden_layers: a whole number is missing"},
        {"\"pretraining_tp\": 1", "\"vocab_size\": 61", "config.json: JSON, byte |the key 'vocab_size' is given twice"},
        {"\"pretraining_tp\": 1", "\"x\": {\"y\": 1, \"z\": [{\"\\\\u0079\": 1, \"y\": 2}]}",
         "the key 'y' is given twice"}};
    mt_context *ctx;
    mt_gpt_desc d;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    shell("cp -r tests/golden/llama_hf '%s'", in_scratch("c"));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_desc_read(ctx, in_scratch("c"), &d));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        mt_status status;
        shell("sed 's#%s#%s#' tests/golden/llama_hf/config.json > '%s'", wrong[i].from, wrong[i].to,
              in_scratch("c/config.json"));
        status = mt_gpt_desc_read(ctx, in_scratch("c"), &d);
        REFUSED(ctx, MT_ERR_DATA, wrong[i].words, status);
    }
    forget("c");
    mt_context_destroy(ctx);
}

static void refused_berts(void **state) {
    static const struct {
        const char *from, *to, *words;
    } wrong[] = {
        {"\"bert\"", "\"roberta\"", "model_type is 'roberta', must be bert"},
        {"\"gelu\"", "\"silu\"", "hidden_act is 'silu', must be gelu_new"},
        {"\"is_decoder\": false", "\"is_decoder\": true", "is_decoder is true, must be false"},
        {"\"add_cross_attention\": false", "\"add_cross_attention\": true", "add_cross_attention is true, must be"},
        {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false",
         "tie_word_embeddings is false, must be true"},
        {"\"use_cache\": true", "\"position_embedding_type\": \"relative_key\"",
         "position_embedding_type is 'relative_key', must be absolute"},
        {"1e-12", "0.0", "layer_norm_eps is 0, must be above 0"},
        {"\"num_attention_heads\": 8", "\"num_attention_heads\": 5", "hidden_size is 32, must be a multiple of"}};
    mt_context *ctx;
    mt_bert_desc d;
    mt_gpt_desc gpt;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    shell("cp -r tests/golden/bert_hf '%s'", in_scratch("c"));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        mt_status status;
        shell("sed 's#%s#%s#' tests/golden/bert_hf/config.json > '%s'", wrong[i].from, wrong[i].to,
              in_scratch("c/config.json"));
        status = mt_bert_desc_read(ctx, in_scratch("c"), &d);
        REFUSED(ctx, MT_ERR_DATA, wrong[i].words, status);
    }
    REFUSED(ctx, MT_ERR_DATA, "model_type is 'bert', must be gpt2 or llama", mt_gpt_desc_read(ctx, bert_model, &gpt));
    REFUSED(ctx, MT_ERR_ARGUMENT, "out is NULL", mt_bert_desc_read(ctx, bert_model, NULL));
    forget("c");
    mt_context_destroy(ctx);
}

/* Forms of a config.json that mean the same: of transformers 4, and with members that are null. */
static void equal_configs(void **state) {
    static const char *const edits[] = {
        "s#\"rope_parameters\": {#\"rope_theta\": 500.0, \"other\": {#;s#\"rope_theta\": 500.0,$#\"x\": 1,#",
        "s#\"head_dim\": 6#\"head_dim\": null#",
        "s#\"pretraining_tp\": 1#\"rope_scaling\": null#",
        "s#\"silu\"#\"swish\"#",
        "s#\"pretraining_tp\": 1#\"sliding_window\": null#",
        "s#\"pretraining_tp\": 1#\"sliding_window\": 12, \"partial_rotary_factor\": 1.0#",
        "s#\"rope_type\": \"default\"#\"type\": \"default\", \"partial_rotary_factor\": null#",
        "s#\"pretraining_tp\": 1#\"rope_scaling\": {\"type\": \"default\", \"rope_theta\": 500.0}#",
        "s#\"model_type\": \"llama\"#\"x\": {\"vocab_size\": 7, \"y\": {\"vocab_size\": 8}}#",
        "s#\"model_type\": \"llama\"#\"model_type\": null#;s#LlamaForCausalLM#LlamaModel#"};
    mt_context *ctx;
    mt_gpt_desc want, d;
    mti_described wanted, described;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_desc_read(ctx, "tests/golden/llama_hf", &want));
    wanted = mti_describe_gpt(&want);
    assert_true(want.layer.scores.rotary_base == 500.0f && want.layer.kv_heads == 2 && want.layer.norm.eps == 1e-4f);
    assert_true(want.layer.ffn == 24 && want.max_seq == SEQ && want.untied_head && want.layer.no_bias);
    shell("cp -r tests/golden/llama_hf '%s'", in_scratch("c"));
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        shell("sed '%s' tests/golden/llama_hf/config.json > '%s'", edits[i], in_scratch("c/config.json"));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_desc_read(ctx, in_scratch("c"), &d));
        described = mti_describe_gpt(&d);
        assert_int_equal(mti_described_differ(&described, &wanted), -1);
    }
    forget("c");
    mt_context_destroy(ctx);
}

/* The config.json of a GPT-2 with other names of its numbers, and with members that change what it computes. words
   NULL: it describes the same model. */
static void gpt2_configs(void **state) {
    static const struct {
        const char *edit, *words;
    } cases[] = {
        {"s#\"n_head\"#\"num_attention_heads\"#", NULL},
        {"s#\"n_embd\"#\"hidden_size\"#;s#\"n_layer\"#\"num_hidden_layers\"#", NULL},
        {"s#\"n_positions\"#\"max_position_embeddings\"#", NULL},
        {"s#\"n_head\"#\"num_attention_heads\": 8, \"n_head\"#", NULL},
        {"s#\"n_positions\"#\"n_ctx\": 12, \"n_positions\"#", NULL},
        {"s#\"model_type\": \"gpt2\"#\"x\": 1#", NULL},
        {"s#\"reorder_and_upcast_attn\": false#\"reorder_and_upcast_attn\": true#", NULL},
        {"s#\"n_head\"#\"num_attention_heads\": 4, \"n_head\"#",
         "n_head is 8, but num_attention_heads, another name of it, is 4"},
        {"s#\"n_embd\"#\"hidden_size\": 32, \"n_embd\"#", "n_embd is 16, but hidden_size, another name of it, is 32"},
        {"s#\"n_layer\"#\"num_hidden_layers\": 3, \"n_layer\"#", "n_layer is 2, but num_hidden_layers"},
        {"s#\"n_positions\"#\"max_position_embeddings\": 24, \"n_positions\"#",
         "n_positions is 12, but max_position_embeddings"},
        {"s#\"n_head\": 8#\"num_attention_heads\": 0#", "num_attention_heads is 0, must be from 1 to 2147483647"},
        {"s#\"n_head\": 8#\"num_attention_heads\": null#", "num_attention_heads: a whole number is missing"},
        {"s#\"n_positions\"#\"n_ctx\": 24, \"n_positions\"#", "n_ctx is 24, but n_positions is 12"},
        {"s#\"n_inner\": 40#\"n_inner\": 0#", "n_inner is 0, must be from 1 to 2147483647"},
        {"s#\"scale_attn_weights\": true#\"scale_attn_weights\": false#", "scale_attn_weights is false, must be true"},
        {"s#\"scale_attn_by_inverse_layer_idx\": false#\"scale_attn_by_inverse_layer_idx\": true#",
         "scale_attn_by_inverse_layer_idx is true, must be false"},
        {"s#\"add_cross_attention\": false#\"add_cross_attention\": true#",
         "add_cross_attention is true, must be false"},
        {"s#\"gelu_new\"#\"silu\"#", "activation_function is 'silu', must be gelu_new"},
        {"s#\"layer_norm_epsilon\": 0.0001#\"layer_norm_epsilon\": 1e-50#",
         "layer_norm_epsilon is 1e-50, must be above 0"},
        {"s#^{#{\"n_head\": 8,#", "config.json: JSON, byte |the key 'n_head' is given twice"},
        {"s#\"model_type\": \"gpt2\"#\"x\": 1#;s#GPT2LMHeadModel#GPTNeoModel#",
         "architectures is 'GPTNeoModel', must be a class of GPT2 or Llama"},
        {"s#\"model_type\": \"gpt2\"#\"x\": 1#;s#GPT2LMHeadModel#BertModel#", "architectures is 'BertModel', must be"},
        {"s#\"model_type\": \"gpt2\"#\"x\": 1#;s#\"architectures\"#\"y\"#",
         "has no model_type, must have gpt2 or llama, or a class of GPT2 or Llama in architectures"},
        {"s#\"model_type\": \"gpt2\"#\"x\": 1#;s#\"GPT2LMHeadModel\"#5#", "architectures.0: a string is missing"},
        {"s#\"architectures\"#\"architectures\": \"GPT2LMHeadModel\", \"y\"#",
         "config.json: JSON, byte 90: architectures: a list is missing"}};
    mt_context *ctx;
    mt_gpt_desc want, d;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gpt_desc_read(ctx, gpt2_model, &want));
    shell("cp -r %s '%s'", gpt2_model, in_scratch("c"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_status status;
        shell("sed '%s' %s/config.json > '%s'", cases[i].edit, gpt2_model, in_scratch("c/config.json"));
        shell("! cmp -s %s/config.json '%s'", gpt2_model, in_scratch("c/config.json"));
        status = mt_gpt_desc_read(ctx, in_scratch("c"), &d);
        if (cases[i].words) {
            REFUSED(ctx, MT_ERR_DATA, cases[i].words, status);
            continue;
        }
        mti_described wanted = mti_describe_gpt(&want), described = mti_describe_gpt(&d);
        ASSERT_STATUS(ctx, MT_SUCCESS, status);
        assert_int_equal(mti_described_differ(&described, &wanted), -1);
        import((source){.directory = in_scratch("c"), .golden = gpt2_model, .tp = 2});
    }
    forget("c");
    mt_context_destroy(ctx);
}

/* Reads the config.json of a model after an edit. words NULL: it describes the same model as before. */
typedef struct edited {
    const char *edit, *words;
} edited;

static mt_status read_described(mt_context *ctx, const char *directory, int is_bert, mti_described *out) {
    mt_bert_desc bert;
    mt_gpt_desc gpt;
    if (is_bert) MT_TRY(mt_bert_desc_read(ctx, directory, &bert));
    else MT_TRY(mt_gpt_desc_read(ctx, directory, &gpt));
    *out = is_bert ? mti_describe_bert(&bert) : mti_describe_gpt(&gpt);
    return MT_SUCCESS;
}

static void read_edited(const char *model, const edited *cases, size_t count) {
    int is_bert = model == bert_model;
    mti_described want, got;
    mt_context *ctx;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, read_described(ctx, model, is_bert, &want));
    shell("cp -r %s '%s'", model, in_scratch("c"));
    for (size_t i = 0; i < count; i++) {
        mt_status status;
        shell("sed '%s' %s/config.json > '%s'", cases[i].edit, model, in_scratch("c/config.json"));
        shell("! cmp -s %s/config.json '%s'", model, in_scratch("c/config.json"));
        status = read_described(ctx, in_scratch("c"), is_bert, &got);
        if (cases[i].words) REFUSED(ctx, MT_ERR_DATA, cases[i].words, status);
        else ASSERT_STATUS(ctx, MT_SUCCESS, status);
        if (!cases[i].words) assert_int_equal(mti_described_differ(&got, &want), -1);
    }
    forget("c");
    mt_context_destroy(ctx);
}

/* The lines of the golden file that say something of rotary positions, and one that does not matter. */
#define ROPE "/\"rope_parameters\"/,/}/d;s#\"pretraining_tp\": 1#"
#define FULL "\"layer_types\": [\"full_attention\", \"full_attention\"], "
#define SIXTEEN                                                                                                        \
    "s#\"pretraining_tp\": 1#\"layer_types\": [0, \"1\", \"2\", \"3\", \"4\", \"5\", \"6\", \"7\", \"8\", \"9\", "     \
    "\"a\", \"b\", \"c\", \"d\", \"e\", \"f\""
#define MIXED "\"layer_types\": [\"sliding_attention\", \"full_attention\"], \"sliding_window\": 12, "

/* Rotary positions by type of layer, and in two places: all layers that the model has must get the same. */
static void rotary_positions_twice(void **state) {
    static const edited cases[] = {
        {ROPE "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500}}#", NULL},
        {ROPE "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500, \"rope_type\": \"default\"}, "
              "\"sliding_attention\": {\"rope_theta\": 500.0}}#",
         NULL},
        {ROPE MIXED "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500}, "
                    "\"sliding_attention\": {\"rope_theta\": 500}}#",
         NULL},
        {ROPE FULL "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500}, "
                   "\"sliding_attention\": {\"rope_theta\": 7, \"rope_type\": \"linear\", \"factor\": 2.0}}#",
         NULL},
        {ROPE "\"rope_theta\": 500, \"rope_scaling\": {\"full_attention\": {\"rope_type\": \"default\"}}#", NULL},
        {ROPE "\"rope_theta\": 500, \"rope_parameters\": {\"full_attention\": {}, \"x\": null}#", NULL},
        {ROPE "\"rope_theta\": 500, \"rope_parameters\": null#", NULL},
        {ROPE "\"rope_theta\": 500, \"global_rope_theta\": 500, \"local_rope_theta\": 500#", NULL},
        {ROPE FULL "\"rope_theta\": 500, \"rope_local_base_freq\": 7#", NULL},
        {ROPE "\"text_config\": {\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500}}}#", NULL},
        {"s#\"pretraining_tp\": 1#\"rope_theta\": 500, \"rope_scaling\": {\"rope_theta\": 500}#", NULL},
        {"s#\"pretraining_tp\": 1#\"rope_theta\": 7.0#", "rope_theta is 7, but rope_parameters.rope_theta is 500"},
        {"s#^{#{\"rope_theta\": 7.0,#", "rope_theta is 7, but rope_parameters.rope_theta is 500"},
        {ROPE "\"rope_theta\": 500, \"rope_scaling\": {\"rope_theta\": 7}#",
         "rope_scaling.rope_theta is 7, but rope_theta is 500"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"rope_theta\": 7.0}#",
         "text_config.rope_theta is 7, but rope_parameters.rope_theta is 500"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"rope_scaling\": {\"type\": \"linear\"}}#",
         "text_config.rope_scaling.type is 'linear"},
        {ROPE "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500}, "
              "\"sliding_attention\": {\"rope_theta\": 7}}#",
         "rope_parameters.sliding_attention.rope_theta is 7, but rope_parameters.full_attention.rope_theta is 500"},
        {ROPE MIXED "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500}, "
                    "\"sliding_attention\": {\"rope_theta\": 7}}#",
         "rope_parameters.sliding_attention.rope_theta is 7, but rope_parameters.full_attention.rope_theta is 500"},
        {ROPE MIXED "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500}}#",
         "rope_parameters.sliding_attention is missing, and layer_types has"},
        {ROPE "\"rope_theta\": 500, \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 7}}#",
         "rope_theta is 500, but rope_parameters.full_attention.rope_theta is 7"},
        {ROPE "\"rope_parameters\": {\"rope_theta\": 500, \"full_attention\": {\"rope_theta\": 7}}#",
         "rope_parameters.full_attention.rope_theta is 7, but rope_parameters.rope_theta is 500"},
        {ROPE "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"yarn\"}}#",
         "rope_parameters.full_attention.rope_type is 'yarn', must be 'default"},
        {ROPE "\"rope_scaling\": {\"full_attention\": {\"factor\": 8}}#",
         "rope_scaling.full_attention.factor is 8, must be 1 or missing"},
        {ROPE "\"rope_parameters\": {\"a\": {\"partial_rotary_factor\": 0.5}}#",
         "rope_parameters.a.partial_rotary_factor is 0.5, must be 1 or missing"},
        {ROPE "\"text_config\": {\"partial_rotary_factor\": 0.5}#",
         "text_config.partial_rotary_factor is 0.5, must be"},
        {ROPE "\"rope_theta\": 500, \"rope_local_base_freq\": 7#", "rope_local_base_freq is 7, but rope_theta is 500"},
        {ROPE "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 0}}#",
         "rope_parameters.full_attention.rope_theta is 0, must be above 0"},
        {ROPE "\"rope_theta\": -1#", "rope_theta is -1, must be above 0"},
        {SIXTEEN "]#", "layer_types.0 is '', must be full_attention"},
        {SIXTEEN ", \"f\"]#", "layer_types.0 is '', must be full_attention"},
        {SIXTEEN ", \"g\"]#", "layer_types has more than 16 types of layers"},
        {ROPE MIXED "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500}, \"sliding_attention\": null}#",
         "rope_parameters.sliding_attention is missing, and layer_types has 'sliding_attention"},
        {ROPE "\"rope_parameters\": [500]#", "rope_parameters: an object is missing"},
        {ROPE "\"rope_scaling\": 2.0#", "rope_scaling: an object is missing"},
        {ROPE "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": \"x\"}}#",
         "rope_parameters.full_attention.rope_theta: a digit is missing"}};
    (void)state;
    read_edited(llama_model, cases, sizeof cases / sizeof *cases);
}

/* Writes a config.json of almost 1 MiB: so many members and layers that nobody can wait for all pairs of both. */
static void write_long_lists(int members, int layers, const char *type, int nested) {
    FILE *f = fopen(in_scratch("c/config.json"), "w");
    assert_non_null(f);
    fprintf(f, "{\"model_type\": \"llama\", \"num_hidden_layers\": %d, ", layers);
    if (nested) fprintf(f, "\"text_config\": {");
    fprintf(f, "\"layer_types\": [\"%s\"", type);
    for (int i = 1; i < layers; i++) fprintf(f, ",\"%s\"", type);
    fprintf(f, "], \"rope_parameters\": {");
    for (int i = 0; i < members; i++) fprintf(f, "\"%x\":0,", (unsigned)i);
    fprintf(f, "\"%s\": {\"rope_theta\": 500}}%s}", type, nested ? "}" : "");
    assert_in_range(ftell(f), 900000, 1 << 20);
    assert_true(fclose(f) == 0);
}

/* The time to read the types of layers grows with the bytes of the file, not with their square. */
static void long_lists_of_layers(void **state) {
    static const struct {
        int members, layers;
        const char *type, *words; /* words NULL: the file is read */
    } cases[] = {{62000, 110000, "x", "layer_types.0 is 'x', must be full_attention"},
                 {52000, 32000, "full_attention", NULL}};
    mt_context *ctx;
    mti_described got;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    shell("cp -r %s '%s'", llama_model, in_scratch("c"));
    for (int i = 0; i < 4; i++) {
        mt_status status;
        write_long_lists(cases[i / 2].members, cases[i / 2].layers, cases[i / 2].type, i % 2);
        status = read_described(ctx, in_scratch("c"), 0, &got);
        if (cases[i / 2].words) {
            REFUSED(ctx, MT_ERR_DATA, cases[i / 2].words, status);
            continue;
        }
        ASSERT_STATUS(ctx, MT_SUCCESS, status);
        assert_int_equal(got.d.layers, cases[i / 2].layers);
        assert_float_equal(got.d.layer.scores.rotary_base, 500.0f, 0.0f);
    }
    forget("c");
    mt_context_destroy(ctx);
}

/* Values of a Llama that a file has under two names or in two places. */
static void llamas_with_two_names(void **state) {
    static const edited cases[] = {
        {"s#\"pretraining_tp\": 1#\"n_head\": 8, \"n_layer\": 2, \"n_embd\": 48, \"n_positions\": 12, "
         "\"n_ctx\": 12, \"n_inner\": 24, \"layer_norm_eps\": 1e-4, \"layer_norm_epsilon\": 0.0001#",
         NULL},
        {"s#\"pretraining_tp\": 1#\"activation_function\": \"swish\", \"hidden_activation\": \"silu\"#", NULL},
        {"s#\"pretraining_tp\": 1#\"torch_dtype\": \"torch.float32\"#", NULL},
        {"s#\"pretraining_tp\": 1#\"torch_dtype\": null, \"text_config\": null, \"layer_types\": null#", NULL},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"model_type\": \"llama\", \"hidden_size\": 48, \"head_dim\": 6, "
         "\"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-4, \"tie_word_embeddings\": false, "
         "\"hidden_act\": \"silu\", \"dtype\": \"float32\", \"mlp_bias\": false}#",
         NULL},
        {"s#\"pretraining_tp\": 1#" FULL "\"sliding_window\": 4#", NULL},
        {"s#\"pretraining_tp\": 1#" MIXED "\"x\": 1#", NULL},
        {"s#\"head_dim\": 6#\"head_dim\": null#", NULL},
        {"s#\"eos_token_id\": 2#\"eos_token_id\": [2, 5]#", NULL}, /* only a save reads it, and keeps it */
        {"s#\"pretraining_tp\": 1#\"n_head\": 4#", "n_head is 4, but num_attention_heads is 8"},
        {"s#\"intermediate_size\": 24#\"n_inner\": 24#", "n_inner is 24, but intermediate_size (by default"},
        {"s#\"pretraining_tp\": 1#\"n_embd\": 24#", "n_embd is 24, but hidden_size is 48"},
        {"s#\"pretraining_tp\": 1#\"n_layer\": 3#", "n_layer is 3, but num_hidden_layers is 2"},
        {"s#\"pretraining_tp\": 1#\"n_positions\": 24#", "n_positions is 24, but max_position_embeddings is 12"},
        {"s#\"pretraining_tp\": 1#\"n_inner\": 96#", "n_inner is 96, but intermediate_size is 24"},
        {"s#\"pretraining_tp\": 1#\"layer_norm_eps\": 1e-5#", "layer_norm_eps is 1e-05, but rms_norm_eps is 0.0001"},
        {"s#\"rms_norm_eps\": 0.0001#\"layer_norm_epsilon\": 0.0001#", "layer_norm_epsilon is 0.0001, but rms"},
        {"s#\"pretraining_tp\": 1#\"hidden_activation\": \"gelu\"#",
         "hidden_activation is 'gelu', but hidden_act is silu"},
        {"s#\"pretraining_tp\": 1#\"torch_dtype\": \"float16\"#", "torch_dtype is 'float16', but dtype is 'float32"},
        {"s#\"llama\"#\"gpt2\"#", "architectures is 'LlamaForCausalLM', but model_type is 'gpt2"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"model_type\": \"gemma3_text\"}#",
         "text_config.model_type is 'gemma3_text', but model_type is 'llama"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"hidden_size\": 24}#",
         "text_config.hidden_size is 24, but hidden_size is 48"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"head_dim\": 8}#", "text_config.head_dim is 8, but head_dim is 6"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"num_key_value_heads\": 8}#",
         "text_config.num_key_value_heads is 8, but num_key_value_heads is 2"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"vocab_size\": 62}#", "text_config.vocab_size is 62, but vocab"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"tie_word_embeddings\": true}#",
         "text_config.tie_word_embeddings is true, but tie_word_embeddings is false"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"attention_bias\": true}#", "text_config.attention_bias is true"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"hidden_act\": \"gelu\"}#",
         "text_config.hidden_act is 'gelu', but"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"dtype\": \"bfloat16\"}#", "text_config.dtype is 'bfloat16', but"},
        {"s#\"pretraining_tp\": 1#\"text_config\": {\"sliding_window\": 4}#",
         "text_config.sliding_window is 4, must be"},
        {"s#\"pretraining_tp\": 1#\"text_config\": [1]#", "text_config: an object is missing"},
        {"s#\"pretraining_tp\": 1#\"quantization_config\": {\"load_in_8bit\": true}#",
         "has quantization_config, must not have it"},
        {"s#\"pretraining_tp\": 1#\"sliding_window\": 0#", "sliding_window is 0, must be null, missing or at least"},
        {"s#\"pretraining_tp\": 1#\"layer_types\": [\"full_attention\", \"sliding_attention\"], \"sliding_window\": 4#",
         "layer_types.1 is 'sliding_attention', must be full_attention, or sliding_window at least the number of "
         "positions "
         "12"},
        {"s#\"pretraining_tp\": 1#\"layer_types\": [\"sliding_attention\", \"full_attention\"]#", "layer_types.0 is"},
        {"s#\"pretraining_tp\": 1#\"layer_types\": [\"full_attention\", \"linear_attention\"]#",
         "layer_types.1 is 'linear_attention', must be full_attention"},
        {"s#\"pretraining_tp\": 1#\"layer_types\": [\"full_attention\"]#", "layer_types has 1 layers, the model has 2"},
        {"s#\"pretraining_tp\": 1#\"layer_types\": \"full_attention\"#", "layer_types is no list"}};
    (void)state;
    read_edited(llama_model, cases, sizeof cases / sizeof *cases);
}

/* The same for a GPT-2 and a BERT, beside the names that transformers reads for a GPT-2 (gpt2_configs). */
static void others_with_two_names(void **state) {
    static const edited gpt2[] = {
        {"s#\"n_inner\"#\"intermediate_size\": 40, \"layer_norm_eps\": 1e-4, \"head_dim\": 2, "
         "\"num_key_value_heads\": 8, \"hidden_act\": \"gelu_pytorch_tanh\", \"n_inner\"#",
         NULL},
        {"s#\"n_inner\": 40#\"intermediate_size\": 40#", "intermediate_size is 40, but n_inner (by default"},
        {"s#\"n_inner\"#\"intermediate_size\": 64, \"n_inner\"#", "intermediate_size is 64, but n_inner is 40"},
        {"s#\"n_inner\"#\"layer_norm_eps\": 1e-5, \"n_inner\"#", "layer_norm_eps is 1e-05, but layer_norm_epsilon"},
        {"s#\"n_inner\"#\"rms_norm_eps\": 1e-5, \"n_inner\"#", "rms_norm_eps is 1e-05, but layer_norm_epsilon"},
        {"s#\"n_inner\"#\"head_dim\": 4, \"n_inner\"#", "head_dim is 4, but head_dim"},
        {"s#\"n_inner\"#\"hidden_act\": \"gelu\", \"n_inner\"#",
         "hidden_act is 'gelu', but activation_function is gelu_new"},
        {"s#\"n_head\"#\"text_config\": {\"n_head\": 4}, \"num_attention_heads\"#",
         "text_config.n_head is 4, but n_head (by default or another name) is 8"},
        {"s#\"n_inner\"#\"torch_dtype\": \"bfloat16\", \"n_inner\"#",
         "torch_dtype is 'bfloat16', but dtype is 'float32"}};
    static const edited bert[] = {
        {"s#\"use_cache\"#\"n_head\": 8, \"n_inner\": 40, \"layer_norm_epsilon\": 1e-12, \"head_dim\": 4, "
         "\"activation_function\": \"gelu\", \"use_cache\"#",
         NULL},
        {"s#\"use_cache\"#\"text_config\": {\"type_vocab_size\": 2}, \"use_cache\"#", NULL},
        {"s#\"use_cache\"#\"n_head\": 4, \"use_cache\"#", "n_head is 4, but num_attention_heads is 8"},
        {"s#\"use_cache\"#\"n_inner\": 32, \"use_cache\"#", "n_inner is 32, but intermediate_size is 40"},
        {"s#\"use_cache\"#\"num_key_value_heads\": 2, \"use_cache\"#",
         "num_key_value_heads is 2, but num_key_value_heads"},
        {"s#\"use_cache\"#\"layer_norm_epsilon\": 1e-5, \"use_cache\"#", "layer_norm_epsilon is 1e-05, but layer_"},
        {"s#\"use_cache\"#\"activation_function\": \"gelu_new\", \"use_cache\"#",
         "activation_function is 'gelu_new', but hidden_act is gelu"},
        {"s#\"use_cache\"#\"text_config\": {\"type_vocab_size\": 3}, \"use_cache\"#",
         "text_config.type_vocab_size is 3, but type_vocab_size is 2"},
        {"s#\"use_cache\"#\"layer_types\": [\"sliding_attention\", \"full_attention\"], \"use_cache\"#",
         "layer_types.0 is 'sliding_attention', must be full_attention"}};
    (void)state;
    read_edited(gpt2_model, gpt2, sizeof gpt2 / sizeof *gpt2);
    read_edited(bert_model, bert, sizeof bert / sizeof *bert);
}

/* A config.json that has a value in several places stays true when a save changes it. */
static void kept_in_all_places(void **state) {
    static const char *const edits[] = {
        "s#\"pretraining_tp\": 1#\"n_positions\": 12, \"n_ctx\": 12, \"torch_dtype\": \"float32\", \"text_config\": "
        "{\"max_position_embeddings\": 12, \"dtype\": \"float32\", \"torch_dtype\": null}#",
        "s#\"pretraining_tp\": 1#\"sliding_window\": 12#"}; /* too short for the new positions */
    char again[8192];
    mt_context *ctx;
    mti_described want, got;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, read_described(ctx, llama_model, 0, &want));
    want.d.max_seq = 96;
    for (int i = 0; i < 2; i++) {
        char *given, *kept;
        FILE *f;
        shell("cp -r %s '%s'", llama_model, in_scratch("c"));
        shell("sed '%s' %s/config.json > '%s'", edits[i], llama_model, in_scratch("c/config.json"));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_text(ctx, in_scratch("c"), "config.json", 4096, &given, NULL));
        assert_in_range(mti_described_config(&want, MT_BF16, given, again, sizeof again), 1, sizeof again - 1);
        f = fopen(in_scratch("c/config.json"), "w");
        assert_true(f && fputs(again, f) >= 0 && fclose(f) == 0);
        ASSERT_STATUS(ctx, MT_SUCCESS, read_described(ctx, in_scratch("c"), 0, &got));
        assert_int_equal(got.d.max_seq, 96);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_json_text(ctx, in_scratch("c"), "config.json", 8192, &kept, NULL));
        assert_true(!strstr(kept, "float32") && (strstr(kept, "a_member_of_another_program") != NULL) == !i);
        mt_host_free(given);
        mt_host_free(kept);
        forget("c");
    }
    mt_context_destroy(ctx);
}

/* An index that names a tensor twice, once with an escape, or has weight_map twice. */
static void keys_given_twice(void **state) {
    static const char *const edits[][2] = {
        {"s#\"weight_map\": {#\"weight_map\": {\"lm_head.\\\\u0077eight\": \"x\",#",
         "the key 'lm_head.weight' is given twice"},
        {"s#\"weight_map\": {#\"weight_map\": {}, \"weight_map\": {#", "the key 'weight_map' is given twice"},
        {"s#\"metadata\": {#\"metadata\": {\"a\": 1, \"a\": 1,#", "the key 'a' is given twice in one object"}};
    const char *index = "c/model.safetensors.index.json";
    mt_context *ctx;
    mt_safetensors_set *set;
    char words[200];
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (int i = 0; i < 3; i++) {
        shell("cp -r %s '%s'", llama_model, in_scratch("c"));
        shell("sed -i '%s' '%s'", edits[i][0], in_scratch(index));
        print_to(words, sizeof words, "c/model.safetensors.index.json: JSON, byte |%s", edits[i][1]);
        REFUSED(ctx, MT_ERR_DATA, words, mt_safetensors_set_open(ctx, in_scratch("c"), "model", &set));
        forget("c");
    }
    mt_context_destroy(ctx);
}

/* A config.json without model_type is saved with it. */
static void saved_with_a_model_type(void **state) {
    source s = {.directory = in_scratch("c"), .golden = gpt2_model, .tp = 2, .to = "a"};
    (void)state;
    shell("cp -r %s '%s'", gpt2_model, in_scratch("c"));
    shell("sed -i '/model_type/d' '%s'", in_scratch("c/config.json"));
    import(s);
    shell("grep -q '\"model_type\": \"gpt2\"' '%s'", in_scratch("a/step-00000005/config.json"));
    shell("grep -q a_member_of_another_program '%s'", in_scratch("a/step-00000005/config.json"));
    s.directory = in_scratch("a/step-00000005"), s.to = NULL;
    import(s);
    forget("a");
    forget("c");
}

/* A model that differs in one thing is refused with the name of the field and its values in words. */
static mt_status other_rank(mt_comm *world, void *user) {
    static const struct {
        int field;
        const char *words;
    } cases[] = {{0, "its model has activation MT_GELU_TANH, this one MT_GELU_ERF"},
                 {1, "its model has norm MT_LAYER_NORM, this one MT_RMS_NORM"},
                 {2, "its model has placement MT_PRE_LN, this one MT_POST_LN"},
                 {3, "its model has mask MT_MASK_CAUSAL, this one MT_MASK_BIDIRECTIONAL"},
                 {4, "its model has untied_head 1, this one 0"}};
    (void)user;
    for (int i = 0; i < 5; i++) {
        source s = {.directory = untied_gpt2_model, .tp = 2};
        mt_checkpoint_desc c = {.directory = NULL};
        mt_gpt_desc d;
        replica m;
        memset(&m, 0, sizeof m);
        MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, NULL, &m.r));
        MT_TRY(mt_gpt_desc_read(m.r.ctx, s.directory, &d));
        if (i == 0) d.layer.activation = MT_GELU_ERF;
        if (i == 1) d.layer.norm.kind = MT_RMS_NORM;
        if (i == 2) d.layer.norm.placement = MT_POST_LN;
        if (i == 3) d.layer.scores.mask = MT_MASK_BIDIRECTIONAL;
        if (i == 4) d.untied_head = 0;
        MT_TRY(mt_gpt_create(m.r.ctx, m.r.params, &d, &m.gpt));
        MT_TRY(mt_gpt_checkpoint_create(m.r.ctx, m.r.params, &m.gpt, &c, &m.checkpoint));
        CHECK(mt_checkpoint_import(m.r.ctx, m.checkpoint, s.directory) == MT_ERR_DATA);
        if (!strstr(mt_last_error(m.r.ctx), cases[i].words)) fprintf(stderr, "%s\n", mt_last_error(m.r.ctx));
        CHECK(strstr(mt_last_error(m.r.ctx), cases[i].words));
        replica_close(&m);
    }
    return MT_SUCCESS;
}

static void other_models(void **state) {
    (void)state;
    test_launch(2, other_rank, NULL);
}

static int open_all(void **state) {
    (void)state;
    return scratch_open("test_names");
}

static int close_all(void **state) {
    (void)state;
    return scratch_close();
}

static const struct {
    const char *list, *word;
    int value;
} words[] = {
#define IS(list, value)                                                                                                \
    { list, #value, (int)value }
    IS(MT_ACTIVATION_WORDS, MT_GELU_TANH),
    IS(MT_ACTIVATION_WORDS, MT_GELU_ERF),
    IS(MT_ACTIVATION_WORDS, MT_SWIGLU),
    IS(MT_ACTIVATION_WORDS, MT_SQUARED_RELU),
    IS(MT_ACTIVATION_WORDS, MT_RELU),
    IS(MT_ACTIVATION_WORDS, MT_TANH),
    IS(MT_NORM_WORDS, MT_LAYER_NORM),
    IS(MT_NORM_WORDS, MT_RMS_NORM),
    IS(MT_MASK_WORDS, MT_MASK_CAUSAL),
    IS(MT_MASK_WORDS, MT_MASK_BIDIRECTIONAL),
    IS(MT_QKV_LAYOUT_WORDS, MT_QKV_PER_GROUP),
    IS(MT_QKV_LAYOUT_WORDS, MT_QKV_CONCATENATED),
    IS(MT_QKV_LAYOUT_WORDS, MT_QKV_SEPARATE),
    IS(MT_ROTARY_FORM_WORDS, MT_ROTARY_HALVES),
    IS(MT_ROTARY_FORM_WORDS, MT_ROTARY_PAIRS),
    IS(MT_DTYPE_WORDS, MT_F32),
    IS(MT_DTYPE_WORDS, MT_BF16),
    IS(MT_DTYPE_WORDS, MT_F16),
    IS(MT_DTYPE_WORDS, MT_I32),
    IS(MT_DTYPE_WORDS, MT_U8),
    IS(MTI_TRANSPOSE_WORDS, MT_NO_TRANS),
    IS(MTI_TRANSPOSE_WORDS, MT_TRANS),
    IS(MTI_GEMM_CHOICE_WORDS, MT_GEMM_MEASURED),
    IS(MTI_GEMM_CHOICE_WORDS, MT_GEMM_HEURISTIC),
    IS(MTI_EPILOGUE_WORDS, MT_EPILOGUE_SEPARATE),
    IS(MTI_EPILOGUE_WORDS, MT_EPILOGUE_FUSED),
    IS(MTI_EPILOGUE_WORDS, MT_EPILOGUE_MEASURED),
    IS(MT_PLACEMENT_WORDS, MT_REPLICATED),
    IS(MT_PLACEMENT_WORDS, MT_SPLIT_ROWS),
    IS(MT_PLACEMENT_WORDS, MT_SPLIT_COLS),
    IS(MTI_STATE_WORDS, MT_EXP_AVG),
    IS(MTI_STATE_WORDS, MT_EXP_AVG_SQ),
    IS(MTI_STATE_WORDS, MT_MASTER),
    IS(MTI_ACTION_WORDS, MT_FORWARD),
    IS(MTI_ACTION_WORDS, MT_BACKWARD),
    IS(MTI_ACTION_WORDS, MT_SEND_FORWARD),
    IS(MTI_ACTION_WORDS, MT_RECV_FORWARD),
    IS(MTI_ACTION_WORDS, MT_SEND_BACKWARD),
    IS(MTI_ACTION_WORDS, MT_RECV_BACKWARD),
    IS(MTI_ACTION_WORDS, MT_SEND_FORWARD_RECV_BACKWARD),
    IS(MTI_ACTION_WORDS, MT_SEND_BACKWARD_RECV_FORWARD),
    IS(MTI_FIELD_WORDS, MT_FIELD_I64),
    IS(MTI_FIELD_WORDS, MT_FIELD_U64),
    IS(MTI_FIELD_WORDS, MT_FIELD_INT),
    IS(MTI_FIELD_WORDS, MT_FIELD_F32),
    IS(MTI_FIELD_WORDS, MT_FIELD_F64),
    IS(MTI_FIELD_WORDS, MT_FIELD_BOOL),
    IS(MTI_FIELD_WORDS, MT_FIELD_TEXT),
    IS(MTI_PART_WORDS, MT_PART_QUERY),
    IS(MTI_PART_WORDS, MT_PART_KEY),
    IS(MTI_PART_WORDS, MT_PART_VALUE),
    IS(MTI_PART_WORDS, MT_PART_QUERY_PAIRS),
    IS(MTI_PART_WORDS, MT_PART_KEY_PAIRS),
    IS(MTI_PART_WORDS, MT_PART_GATE),
    IS(MTI_PART_WORDS, MT_PART_UP),
    IS(MT_LN_PLACEMENT_WORDS, MT_PRE_LN),
    IS(MT_LN_PLACEMENT_WORDS, MT_POST_LN),
    IS(MT_LN_PLACEMENT_WORDS, MT_RESIDUAL_POST_LN),
    IS(MT_RECOMPUTE_WORDS, MT_RECOMPUTE_NONE),
    IS(MT_RECOMPUTE_WORDS, MT_RECOMPUTE_SELECTIVE),
    IS(MT_RECOMPUTE_WORDS, MT_RECOMPUTE_FULL)};
#undef IS

/* The words of each enum are the names of its values. */
static void words_of_enums(void **state) {
    char text[MT_WORD_MAX];
    (void)state;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        mt_enum_word(words[i].list, words[i].value, text);
        assert_string_equal(text, words[i].word);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits),
        cmocka_unit_test(saved_as_transformers_saves),
        cmocka_unit_test(logits_on_odd_splits),
        cmocka_unit_test(members_that_change),
        cmocka_unit_test(configs_of_new_models),
        cmocka_unit_test(names_of_the_registry),
        cmocka_unit_test(bare_names),
        cmocka_unit_test(files_in_f64),
        cmocka_unit_test(own_table),
        cmocka_unit_test(padded_own_table),
        cmocka_unit_test(bert),
        cmocka_unit_test(bert_saved),
        cmocka_unit_test(bert_classes),
        cmocka_unit_test(own_bert),
        cmocka_unit_test(refused_berts),
        cmocka_unit_test(table_of_few_rows),
        cmocka_unit_test(strange_models),
        cmocka_unit_test(unknown_parts),
        cmocka_unit_test(refused_configs),
        cmocka_unit_test(equal_configs),
        cmocka_unit_test(gpt2_configs),
        cmocka_unit_test(rotary_positions_twice),
        cmocka_unit_test(long_lists_of_layers),
        cmocka_unit_test(llamas_with_two_names),
        cmocka_unit_test(others_with_two_names),
        cmocka_unit_test(kept_in_all_places),
        cmocka_unit_test(keys_given_twice),
        cmocka_unit_test(copies_in_files),
        cmocka_unit_test(constants_in_files),
        cmocka_unit_test(berts_that_are_not_tied),
        cmocka_unit_test(berts_without_model_type),
        cmocka_unit_test(saved_with_a_model_type),
        cmocka_unit_test(other_models),
        cmocka_unit_test(words_of_enums),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
