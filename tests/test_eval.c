/* test_eval.c - tests examples/eval_gpt.c, which it runs in this process: perplexity and cloze test on every split
   against a forward for each target and against PyTorch (golden/eval), windows, ties, padded vocabularies, and the
   refusal of each wrong flag and file. Run it from the root of the checkout. */

#define PROGRAM "eval_gpt"
#define main program_main
#include "../examples/eval_gpt.c"
#undef main

#include "mt_test_program.h"

#define MAX_TOKENS 512 /* of the files */
#define CONTEXT 12     /* positions of golden/gpt2_hf */
#define MODEL "--init-from tests/golden/gpt2_hf --no-pinning "

/* Reads the file "out" of a run, and returns the number after `word`. */
static double printed_after(const char *word) {
    char text[4096];
    const char *at;
    read_text("out", text, sizeof text);
    at = strstr(text, word);
    if (!at) fail_msg("no '%s' in: %s", word, text);
    return strtod(at + strlen(word), NULL);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static void write_numbers(FILE *f, const int32_t *numbers, size_t count) {
    assert_int_equal(fwrite(numbers, 4, count, f), count);
}

/* Writes a token file. table: two numbers for each passage. */
static void write_bin(const char *name, const int32_t *tokens, int count, int words, const int32_t *table,
                      int passages) {
    const int32_t header[256] = {LLMC_MAGIC, 1, count, words, passages};
    FILE *f = fopen(in_scratch(name), "wb");
    assert_non_null(f);
    write_numbers(f, header, 256);
    for (int i = 0; i < count; i++) {
        const unsigned char pair[2] = {(unsigned char)(tokens[i] & 255), (unsigned char)(tokens[i] >> 8)};
        assert_int_equal(fwrite(pair, 1, 2, f), 2);
    }
    if (passages > 0) write_numbers(f, table, 2 * (size_t)passages);
    fclose(f);
}

/* Reads a file of golden/eval with the reader of eval_gpt, which the comparison with PyTorch tests. */
static dataset golden_data(const char *path) {
    dataset d;
    memset(&d, 0, sizeof d);
    assert_true(load_data(path, &d) && d.count <= MAX_TOKENS);
    return d;
}

static void forget_data(dataset *d) {
    free(d->tokens);
    free(d->passages);
}

#define TEXT_BIN "tests/golden/eval/text.bin"
#define CLOZE_BIN "tests/golden/eval/cloze.bin"

/* Column `column` of the log of a run. Returns the number of lines. */
static int read_log(int column, double *out) {
    char line[256];
    FILE *f = fopen(in_scratch("log.csv"), "r");
    int n = 0;
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    while (fgets(line, sizeof line, f) && n < MAX_TOKENS) {
        char *at = line;
        for (int i = 0; i < column; i++) at = strchr(at, ',') + 1;
        assert_int_equal(strtol(line, NULL, 10), n + 1);
        out[n++] = strtod(at, NULL);
    }
    fclose(f);
    return n;
}

/* ---- the oracle: a forward for each target ----------------------------------------------------------------------- */

/* loss[t][c] is the loss of token t after the c tokens before it, and best[t][c] the most probable token there. */
typedef struct oracle {
    const dataset *data;
    double loss[MAX_TOKENS][CONTEXT + 1];
    int64_t best[MAX_TOKENS][CONTEXT + 1];
} oracle;

static mt_status ask(mt_context *ctx, const mt_gpt *gpt, oracle *o, int64_t t, int64_t c) {
    size_t mark = mt_arena_mark(ctx);
    mt_batch batch = {.sequences = 1, .seq = c};
    float z[64];
    double sum = 0;
    mt_tensor logits;
    CHECK(gpt->desc.vocab <= 64);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, gpt->desc.vocab, &logits));
    MT_TRY(mt_gpt_logits(ctx, gpt, &batch, o->data->tokens + t - c, logits));
    MT_TRY(mt_download(ctx, logits, z));
    mt_arena_release(ctx, mark);
    o->best[t][c] = 0;
    for (int64_t v = 0; v < gpt->desc.vocab; v++) {
        sum += exp((double)z[v]);
        if (z[v] > z[o->best[t][c]]) o->best[t][c] = v;
    }
    o->loss[t][c] = log(sum) - (double)z[o->data->tokens[t]];
    return MT_SUCCESS;
}

static mt_status ask_all(mt_comm *world, void *user) {
    oracle *o = (oracle *)user;
    const char *path = "tests/golden/gpt2_hf";
    mt_checkpoint_desc files = {.directory = path};
    mt_grid_desc shape = {.tp = 1};
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    mt_checkpoint *checkpoint;
    mt_gpt_desc desc;
    mt_gpt gpt;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    MT_TRY(mt_gpt_desc_read(ctx, path, &desc));
    MT_TRY(mt_grid_create(world, &shape, &grid));
    MT_TRY(mt_params_create(ctx, &grid, &params));
    MT_TRY(mt_gpt_create(ctx, params, &desc, &gpt));
    MT_TRY(mt_params_init(ctx, params, 0));
    MT_TRY(mt_gpt_checkpoint_create(ctx, params, &gpt, &files, &checkpoint));
    MT_TRY(mt_checkpoint_import(ctx, checkpoint, path));
    for (int64_t t = 1; t < o->data->count; t++)
        for (int64_t c = 1; c <= CONTEXT && c <= t; c++) MT_TRY(ask(ctx, &gpt, o, t, c));
    mt_checkpoint_destroy(ctx, checkpoint);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static oracle *oracle_of(const dataset *d) {
    oracle *o = (oracle *)calloc(1, sizeof *o);
    mt_launch_desc one = {.ranks = 1, .no_pinning = 1};
    assert_non_null(o);
    o->data = d;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_launch(&one, ask_all, o));
    return o;
}

/* The number of tokens that target t sees: those from the first multiple of the stride on that is not too far away. */
static int64_t context_of(int64_t t, int64_t seq, int64_t stride) {
    int64_t first = 0;
    while (t - first > seq) first += stride;
    return t - first;
}

/* ---- the perplexity of a text ------------------------------------------------------------------------------------ */

static void check_text(const oracle *o, int count, int seq, int stride) {
    char words[WORDS];
    double losses[MAX_TOKENS], sum = 0, expected = 0;
    write_bin("text.bin", o->data->tokens, count, 17, NULL, 0);
    print_to(words, sizeof words, MODEL "--data %s --log %s --seq %d --stride %d", in_scratch("text.bin"),
             in_scratch("log.csv"), seq, stride);
    expect_success(words);
    assert_int_equal(read_log(2, losses), count - 1);
    for (int t = 1; t < count; t++) {
        double one = o->loss[t][context_of(t, seq, stride)];
        if (!(fabs(losses[t - 1] - one) < 1e-5))
            fail_msg("%d tokens, --seq %d --stride %d: target %d has loss %.9g, not %.9g", count, seq, stride, t,
                     losses[t - 1], one);
        sum += losses[t - 1];
        expected += one;
    }
    if (!(fabs(sum - expected) < 1e-6 * expected)) fail_msg("sum %.9g, not %.9g", sum, expected);
    assert_true(fabs(printed_after("perplexity ") / exp(expected / 17) - 1) < 1e-4);
    assert_true(fabs(printed_after("per word, 17 words, ") / exp(expected / (count - 1)) - 1) < 1e-4);
    assert_true(fabs(printed_after("sum of losses ") - expected) < 1e-6 * expected);
}

/* Texts that are shorter than a window, exactly one, one target more, and with a last window that is not full. */
static void test_text_against_a_forward_for_each_target(void **state) {
    static const int sizes[] = {2, 8, 12, 13, 14, 25, 45}, pairs[][2] = {{12, 12}, {12, 5}, {12, 1}, {7, 3}, {1, 1}};
    dataset d = golden_data(TEXT_BIN);
    oracle *o = oracle_of(&d);
    (void)state;
    for (size_t i = 0; i < COUNT(sizes); i++)
        for (size_t k = 0; k < COUNT(pairs); k++) check_text(o, sizes[i], pairs[k][0], pairs[k][1]);
    free(o);
    forget_data(&d);
}

/* Of any text each target counts once, in its place, and sees at least seq - stride tokens, or all there are. */
static void test_windows_count_each_target_once(void **state) {
    (void)state;
    for (int64_t tokens = 2; tokens < 40; tokens++)
        for (int64_t seq = 1; seq < 14; seq++)
            for (int64_t stride = 1; stride <= seq; stride++) {
                job j = {.o = {.seq = (double)seq, .stride = (double)stride}, .data = {.count = tokens}};
                int64_t next = 0;
                assert_true(make_text_windows(&j));
                assert_int_equal(j.results, tokens - 1);
                for (int64_t i = 0; i < j.window_count; i++) {
                    window w = j.windows[i];
                    assert_true(w.length <= seq && w.counted >= 1 && w.counted <= (i > 0 ? stride : seq));
                    assert_int_equal(w.result, next);
                    assert_int_equal(w.first + w.length - w.counted, next);
                    assert_true(i == 0 || w.length - w.counted >= seq - stride);
                    next += w.counted;
                }
                assert_int_equal(next, tokens - 1);
                free(j.windows);
            }
}

static const char *const splits[] = {
    "--tp 2",        "--tp 4 --dp 2",          "--tp 2 --sequence-parallel",  "--cp 2",
    "--tp 2 --pp 2", "--dp 3 --micro-batch 1", "--tp 2 --cp 2 --dp 2 --pp 2", "--tp 4 --pp 2 --sequence-parallel"};

/* Runs the text, or the passages in the file `cloze`, of a line of golden/eval on each split: PyTorch's sum, or the
   passages that are right. */
static void check_golden_line(const char *model, const char *cloze, const char *line, int number) {
    char kind[8], value[64], words[WORDS];
    int seq, stride = 0, is_text = strncmp(line, "text", 4) == 0;
    assert_int_equal(is_text ? sscanf(line, "%7s %d %d %63s", kind, &seq, &stride, value)
                             : sscanf(line, "%7s %d %63s", kind, &seq, value),
                     is_text ? 4 : 3);
    for (size_t i = 0; i <= COUNT(splits); i++) {
        double right[MAX_TOKENS];
        if (i > 0 && (seq % 4 || !test_takes(i + (size_t)number, 2))) continue;
        print_to(words, sizeof words,
                 "--init-from tests/golden/%s --no-pinning --data %s --log %s --seq %d --stride %d %s", model,
                 is_text ? TEXT_BIN : cloze, in_scratch("log.csv"), seq, stride, i > 0 ? splits[i - 1] : "");
        expect_success(words);
        if (is_text && !(fabs(printed_after("sum of losses ") / strtod(value, NULL) - 1) < 1e-6))
            fail_msg("%s: not %s", words, value);
        if (is_text) continue;
        assert_int_equal(read_log(3, right), strlen(value));
        for (size_t p = 0; p < strlen(value); p++)
            if ((right[p] > 0) != (value[p] == '1')) fail_msg("%s: passage %d", words, (int)p + 1);
    }
}

/* The files have the results of PyTorch with a GPT-2, with a Llama of two key/value heads, and with one in bf16 that
   has biases and a tied head. */
static void test_golden_values_on_every_split(void **state) {
    static const struct {
        const char *model, *file, *cloze;
        int lines;
    } golden[] = {{"gpt2_hf", "expected", CLOZE_BIN, 6},
                  {"llama_hf", "llama_hf", "tests/golden/eval/llama_hf_cloze.bin", 6},
                  {"llama_hf_tied", "llama_hf_tied", NULL, 4}};
    (void)state;
    for (size_t i = 0; i < COUNT(golden); i++) {
        char line[256], path[64];
        int lines = 0;
        print_to(path, sizeof path, "tests/golden/eval/%s.txt", golden[i].file);
        FILE *f = fopen(path, "r");
        assert_non_null(f);
        while (fgets(line, sizeof line, f)) check_golden_line(golden[i].model, golden[i].cloze, line, lines++);
        fclose(f);
        assert_int_equal(lines, golden[i].lines);
    }
}

/* The losses of data ranks and pipeline stages have the bits of one rank, also when some ranks have no window. */
static void test_same_bits_of_data_ranks_and_stages(void **state) {
    static const char *const same[] = {"--dp 2", "--dp 3", "--pp 2", "--dp 16 --micro-batch 4", "--dp 2 --pp 2"};
    char words[WORDS];
    (void)state;
    for (size_t i = 0; i <= COUNT(same); i++) {
        print_to(words, sizeof words, MODEL "--data " TEXT_BIN " --stride 5 --log %s %s",
                 in_scratch(i > 0 ? "log.csv" : "one.csv"), i > 0 ? same[i - 1] : "");
        expect_success(words);
        if (i > 0) shell("cmp '%s' '%s'", in_scratch("one.csv"), in_scratch("log.csv"));
    }
}

static void test_16_bits(void **state) {
    static const char *const types[] = {"bf16 --tp 2", "f16 --pp 2"};
    char words[WORDS];
    (void)state;
    for (size_t i = 0; i < COUNT(types); i++) {
        print_to(words, sizeof words, MODEL "--data " TEXT_BIN " --stride 12 --dtype %s", types[i]);
        expect_success(words);
        assert_true(fabs(printed_after("sum of losses ") / 241.646057017 - 1) < 1e-2);
    }
}

/* The words of a text are its parts between single spaces; --words replaces their number. */
static void test_words(void **state) {
    static const struct {
        const char *text;
        int64_t words;
    } cases[] = {{"", 0},         {" \n\t ", 0}, {"one", 1}, {"a b", 2}, {"a  b", 3}, {" \n = A b = \n \n c \n", 7},
                 {"a\nb c\n", 2}, {"a\tb", 1}};
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        int64_t words = count_words((const unsigned char *)cases[i].text, (int64_t)strlen(cases[i].text));
        if (words != cases[i].words) fail_msg("'%s' has %d words", cases[i].text, (int)words);
    }
    expect_success(MODEL "--data " TEXT_BIN " --stride 12 --words 100");
    assert_true(fabs(printed_after("perplexity ") / exp(2.41646057017) - 1) < 1e-5);
    write_bin("text.bin", (const int32_t[]){1, 2, 3}, 3, 0, NULL, 0);
    expect_success("--no-pinning --init-from tests/golden/gpt2_hf_bare --data " TEXT_BIN);
    char words[WORDS];
    print_to(words, sizeof words, MODEL "--data %s", in_scratch("text.bin"));
    expect_success(words);
    assert_true(printed_after("words unknown, see --words, ") > 1);
}

/* ---- the cloze test ---------------------------------------------------------------------------------------------- */

static void test_cloze_against_a_forward_for_each_token(void **state) {
    dataset d = golden_data(CLOZE_BIN);
    oracle *o = oracle_of(&d);
    double right[MAX_TOKENS];
    char words[WORDS];
    int both = 0;
    (void)state;
    for (int seq = 3; seq <= CONTEXT; seq += 3) {
        print_to(words, sizeof words, MODEL "--data " CLOZE_BIN " --log %s --seq %d --micro-batch 5",
                 in_scratch("log.csv"), seq);
        expect_success(words);
        assert_int_equal(read_log(3, right), d.passage_count);
        for (int64_t i = 0; i < d.passage_count; i++) {
            passage p = d.passages[i];
            int all = 1;
            for (int64_t n = p.count - p.answer; n < p.count; n++) {
                int64_t first = p.count - 1 - seq > 0 ? p.count - 1 - seq : 0; /* of the passage's last tokens */
                all &= o->best[p.first + n][n - first] == d.tokens[p.first + n];
            }
            if (all != (right[i] > 0)) fail_msg("--seq %d: passage %d", seq, (int)i + 1);
            both |= 1 << all;
        }
    }
    assert_int_equal(both, 3);
    free(o);
    forget_data(&d);
}

static void test_largest(void **state) {
    const float x[] = {-7, -3, -1, -7, -1, -2}, ties[] = {-5, -5, -5};
    const float odd[][3] = {{NAN, NAN, NAN}, {NAN, 1, 2}, {1, 2, NAN}, {1, INFINITY, 2}, {-INFINITY, 1, 2}};
    (void)state;
    for (int i = 0; i < 6; i++) assert_true(is_largest(x, 6, i) == (i == 2));
    for (int i = 0; i < 3; i++) assert_true(is_largest(ties, 3, i) == (i == 0));
    for (size_t i = 0; i < COUNT(odd); i++)
        for (int k = 0; k < 3; k++) assert_true(isnan(is_largest(odd[i], 3, k)));
}

enum { BEST = 7, ALSO_BEST = 44, VOCAB = 61 };

/* The logit of token v of the model of save_level_model. */
static double level_of(int v) { return -16 * (1 + (v == BEST || v == ALSO_BEST ? 0 : 0.125 * (v % 5 + 1))); }

/* Saves a model whose logits are always level_of times *user: the final norm is *user for each feature. All logits are
   negative, so that the zeros of a padded vocabulary would be the largest. */
static mt_status save_level_model(mt_comm *world, void *user) {
    mt_grid_desc shape = {.tp = 1};
    mt_gpt_desc desc = {.vocab = VOCAB, .layers = 2, .max_seq = CONTEXT, .layer = {.hidden = 16, .heads = 4}};
    mt_checkpoint_desc files = {.directory = in_scratch("level")};
    mt_training_state step = {.step = 3};
    float rows[VOCAB][16];
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    mt_checkpoint *checkpoint;
    mt_gpt gpt;
    for (int v = 0; v < VOCAB; v++)
        for (int i = 0; i < 16; i++) rows[v][i] = (float)(level_of(v) / 16);
    MT_TRY(mt_context_create(world, NULL, &ctx));
    MT_TRY(mt_grid_create(world, &shape, &grid));
    MT_TRY(mt_params_create(ctx, &grid, &params));
    MT_TRY(mt_gpt_create(ctx, params, &desc, &gpt));
    MT_TRY(mt_params_init(ctx, params, 5));
    MT_TRY(mt_upload(ctx, rows, mt_params_find(params, "embedding.word_embeddings.weight")->value));
    MT_TRY(mt_fill(ctx, mt_params_find(params, "decoder.final_layernorm.weight")->value, 0));
    MT_TRY(mt_fill(ctx, mt_params_find(params, "decoder.final_layernorm.bias")->value, *(const float *)user));
    MT_TRY(mt_gpt_checkpoint_create(ctx, params, &gpt, &files, &checkpoint));
    MT_TRY(mt_checkpoint_save(ctx, checkpoint, &step));
    mt_checkpoint_destroy(ctx, checkpoint);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void make_level_model(float times) {
    mt_launch_desc one = {.ranks = 1, .no_pinning = 1};
    assert_int_equal(mkdir(in_scratch("level"), 0700), 0);
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_launch(&one, save_level_model, &times));
}

/* The token with the lower number wins a tie, wherever the other one is, and the padding of the vocabulary, which the
   tensor ranks have unequal parts of, is neither the most probable token nor in the sum of the loss. */
static void test_ties_and_padded_vocabulary(void **state) {
    static const char *const types[] = {"f32", "bf16"};
    const int32_t table[] = {3, 1, 3, 1, 4, 2, 4, 2}, /* right: the first and the third */
        tokens[] = {1, 2, BEST, 1, 2, ALSO_BEST, 60, 9, BEST, BEST, 60, 9, ALSO_BEST, BEST};
    char words[WORDS], model[WORDS];
    double sum = 0, total = 0, right[MAX_TOKENS];
    (void)state;
    make_level_model(1);
    write_bin("cloze.bin", tokens, (int)COUNT(tokens), 0, table, 4);
    write_bin("text.bin", tokens, (int)COUNT(tokens), 5, NULL, 0);
    for (int v = 0; v < VOCAB; v++) sum += exp(level_of(v));
    for (size_t t = 1; t < COUNT(tokens); t++) total += log(sum) - level_of(tokens[t]);
    for (size_t i = 0; i < 2 * (COUNT(splits) + 1); i++) {
        print_to(model, sizeof model, "--no-pinning --init-from %s --dtype %s --log %s %s --data ", in_scratch("level"),
                 types[i % 2], in_scratch("log.csv"), i / 2 > 0 ? splits[i / 2 - 1] : "");
        print_to(words, sizeof words, "%s%s", model, in_scratch("cloze.bin"));
        expect_success(words);
        assert_int_equal(read_log(3, right), 4);
        if (!(right[0] > 0) || right[1] > 0 || !(right[2] > 0) || right[3] > 0) fail_msg("%s", words);
        print_to(words, sizeof words, "%s%s", model, in_scratch("text.bin"));
        expect_success(words);
        if (!(fabs(printed_after("sum of losses ") / total - 1) < (i % 2 ? 1e-2 : 1e-6))) fail_msg("%s", words);
    }
    forget("level");
}

/* ---- results that are not finite --------------------------------------------------------------------------------- */

/* Expects this sentence, and neither a result nor a log. */
static void expect_no_result(const char *file, const char *flags, const char *sentence) {
    char words[WORDS], text[4096];
    print_to(words, sizeof words, "--no-pinning --init-from %s --data %s --log %s %s", in_scratch("level"),
             in_scratch(file), in_scratch("one.csv"), flags);
    remove(in_scratch("one.csv"));
    expect_error(words, sentence);
    read_text("err", text, sizeof text);
    if (!strchr(text, '\n') || strchr(text, '\n')[1]) fail_msg("more than a sentence: %s", text);
    read_text("out", text, sizeof text);
    assert_null(strstr(text, "perplexity"));
    assert_null(strstr(text, "accuracy"));
    assert_int_not_equal(access(in_scratch("one.csv"), F_OK), 0);
}

/* Weights are finite, but logits, losses or the perplexity are not. 1e38: all logits are -infinity and all losses NaN.
   2e37: all are -infinity except for the two best tokens. 1e3: only the perplexity is infinite. */
static void test_results_that_are_not_finite(void **state) {
    static const struct {
        float times;
        const char *text, *cloze;
    } cases[] = {{1e38f, "text.bin: the loss of token 2, which is 7, is nan: no perplexity",
                  "cloze.bin: passage 1: the logits for token 1 of its last word are not all finite: no accuracy"},
                 {2e37f, "text.bin: the loss of token 3, which is 60, is infinite: no perplexity",
                  "cloze.bin: passage 1: the logits for token 1 of its last word are not all finite: no accuracy"},
                 {1e3f, "is too large for a perplexity", NULL}};
    const int32_t tokens[] = {1, BEST, 60, BEST, 60}, table[] = {3, 2, 2, 1};
    (void)state;
    write_bin("text.bin", tokens, (int)COUNT(tokens), 5, NULL, 0);
    write_bin("cloze.bin", tokens, (int)COUNT(tokens), 0, table, 2);
    for (size_t i = 0; i < COUNT(cases); i++) {
        make_level_model(cases[i].times);
        for (size_t k = 0; k < COUNT(splits); k++) {
            expect_no_result("text.bin", splits[k], cases[i].text);
            if (cases[i].cloze) expect_no_result("cloze.bin", splits[k], cases[i].cloze);
        }
        forget("level");
    }
}

/* A weight that is not finite is refused by its name. */
static void test_weights_that_are_not_finite(void **state) {
    (void)state;
    make_level_model(70000);
    write_bin("text.bin", (const int32_t[]){1, 2, 3}, 3, 5, NULL, 0);
    expect_no_result("text.bin", "--tp 2 --dtype f16",
                     "element 0 of 'transformer.ln_f.bias' is 70000, too large for f16");
    forget("level");
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

/* Expects this sentence for the flags and a file of these tokens. */
/* Saves a model whose largest weight has more bytes in f32 than an evaluation of short windows needs. */
static mt_status save_wide_model(mt_comm *world, void *user) {
    mt_grid_desc shape = {.tp = 1};
    mt_gpt_desc desc = {.vocab = VOCAB,
                        .layers = 2,
                        .max_seq = CONTEXT,
                        .layer = {.hidden = 64, .heads = 8, .ffn = 1024, .activation = MT_SWIGLU}};
    mt_checkpoint_desc files = {.directory = in_scratch("wide")};
    mt_training_state step = {.step = 3};
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    mt_checkpoint *checkpoint;
    mt_gpt gpt;
    (void)user;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    MT_TRY(mt_grid_create(world, &shape, &grid));
    MT_TRY(mt_params_create(ctx, &grid, &params));
    MT_TRY(mt_gpt_create(ctx, params, &desc, &gpt));
    MT_TRY(mt_params_init(ctx, params, 5));
    MT_TRY(mt_gpt_checkpoint_create(ctx, params, &gpt, &files, &checkpoint));
    MT_TRY(mt_checkpoint_save(ctx, checkpoint, &step));
    mt_checkpoint_destroy(ctx, checkpoint);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_loading_fits_into_the_plan(void **state) {
    static const char *const flags[] = {"--dtype f32", "--dtype bf16", "--dtype f16 --tp 2", "--dtype bf16 --pp 2"};
    static const char *const data[] = {"text.bin --seq 2", "cloze.bin"};
    char words[WORDS];
    mt_launch_desc one = {.ranks = 1};
    (void)state;
    assert_int_equal(mt_launch(&one, save_wide_model, NULL), MT_SUCCESS);
    for (size_t i = 0; i < COUNT(flags) * COUNT(data); i++) {
        print_to(words, sizeof words, "--init-from %s --no-pinning --micro-batch 1 %s --data tests/golden/eval/%s",
                 in_scratch("wide"), flags[i / 2], data[i % 2]);
        expect_success(words);
    }
    forget("wide");
}

static void refuse_file(const char *sentence, const int32_t *tokens, int count, const int32_t *table, int passages) {
    char words[WORDS];
    write_bin("bad.bin", tokens, count, 0, table, passages);
    print_to(words, sizeof words, MODEL "--data %s", in_scratch("bad.bin"));
    expect_error(words, sentence);
}

static void test_bad_files(void **state) {
    const int32_t tokens[] = {1, 2, 61, 4}, whole[] = {4, 4}, none[] = {4, 0}, beyond[] = {5, 1}, part[] = {3, 1},
                  negative[] = {-4, -5};
    char words[WORDS];
    (void)state;
    refuse_file("token 3 is 61, and the vocabulary of the model is 61", tokens, 4, NULL, 0);
    refuse_file("has 1 tokens, at least 2 are needed", tokens, 1, NULL, 0);
    refuse_file("has 0 tokens, at least 2 are needed", tokens, 0, NULL, 0);
    refuse_file("passage 1 has 4 tokens, and 4 of them as its last word", tokens, 4, whole, 1);
    refuse_file("passage 1 has 4 tokens, and 0 of them as its last word", tokens, 4, none, 1);
    refuse_file("passage 1 has 5 tokens", tokens, 4, beyond, 1);
    refuse_file("passage 1 has -4 tokens", tokens, 4, negative, 1);
    refuse_file("the passages have 3 tokens, the file has 4", tokens, 4, part, 1);
    print_to(words, sizeof words, MODEL "--data %s", in_scratch("bad.bin"));
    shell("head -c 1030 '%s' >'%s' && mv '%s' '%s'", in_scratch("bad.bin"), in_scratch("short"), in_scratch("short"),
          in_scratch("bad.bin"));
    expect_error(words, "announces 4 tokens, 0 words and 1 passages, and has 6 bytes after this");
    shell("cp LICENSE '%s'", in_scratch("bad.bin"));
    expect_error(words, "is not a token file: magic");
    expect_error(MODEL "--data LICENSE", "the vocabulary of 61 is not bytes: make a .bin of it");
    expect_error(MODEL "--data nonexistent.bin", "cannot read nonexistent.bin: No such file");
    expect_whole_files(MODEL);
    expect_error("--init-from nonexistent --data LICENSE", "nonexistent: has neither model.safetensors nor its index");
}

/* The shape is that of the model: a flag of train_gpt for it is refused with one sentence. */
static void test_flags_of_the_shape(void **state) {
    static const char *const bad[] = {"config gpt2-1.2b", "layers 2",        "layers=2", "hidden 16",
                                      "heads 4",          "kv-heads 4",      "ffn 40",   "max-seq 12",
                                      "vocab 61",         "rotary",          "alibi",    "window 0",
                                      "softcap 20",       "activation gelu", "rmsnorm",  "untied"};
    char words[WORDS], text[1024], sentence[256];
    (void)state;
    expect_error(MODEL "--data " TEXT_BIN " --seq 13", "--seq 13 is more than the 12 positions of the model");
    for (size_t i = 0; i < COUNT(bad); i++) {
        print_to(words, sizeof words, MODEL "--data " TEXT_BIN " --%s", bad[i]);
        print_to(sentence, sizeof sentence,
                 "eval_gpt: --%.*s: the model in --init-from DIR has its own shape, see --help\n",
                 (int)strcspn(bad[i], " ="), bad[i]);
        if (run_program(words) == 0) fail_msg("not refused: %s", words);
        read_text("err", text, sizeof text);
        if (strcmp(text, sentence) != 0) fail_msg("%s: %s", bad[i], text);
    }
}

static void test_bad_flags(void **state) {
    char words[WORDS];
    (void)state;
    expect_error("", "--init-from DIR is missing, see --help");
    expect_error(MODEL "--data " TEXT_BIN " --seq 4 --stride 5", "--stride 5 is more than --seq 4");
    expect_error(MODEL "--data " TEXT_BIN " --seq 11 --tp 2 --sequence-parallel", "--seq 11 is not a multiple of --tp");
    expect_error(MODEL "--data " TEXT_BIN " --seq 12 --cp 4",
                 "--seq 12 is not a multiple of 8: each of --cp 4 ranks has 2 parts");
    expect_error(MODEL "--data " TEXT_BIN " --cp 0", "--cp 0: expected a whole number from 1 to 1024");
    expect_error(MODEL "--data " TEXT_BIN " --seq 10 --cp 3",
                 "--seq 10 is not a multiple of 6: each of --cp 3 ranks has 2 parts");
    expect_error(MODEL "--data " TEXT_BIN " --cp 2 --tp 64 --pp 16", "are more than 1024 ranks");
    expect_error(MODEL "--data " TEXT_BIN " --tp 64 --dp 64", "are more than 1024 ranks");
    expect_error(MODEL "--data " TEXT_BIN " --tp 5", "cannot be split over 5 tensor ranks");
    expect_error(MODEL "--data " TEXT_BIN " --pp 3", "3");
    expect_error(MODEL "--data " TEXT_BIN " --device cuda", "MT_ERR_UNSUPPORTED");
    expect_error(MODEL "--data " TEXT_BIN " --dtype f64", "--dtype f64: expected f32, bf16 or f16");
    expect_error(MODEL "--data " TEXT_BIN " --seq 1.5", "--seq 1.5: expected a whole number from 0");
    expect_error(MODEL "--data " TEXT_BIN " more", "unexpected argument 'more'");
    expect_error(MODEL "--data " TEXT_BIN " --log nonexistent/log", "cannot write nonexistent/log: No such file");
    expect_error(MODEL "--data " CLOZE_BIN " --words 3", "--words is for a text");
    expect_error(MODEL "--data " CLOZE_BIN " --seq 2", "passage 3 has 3 tokens, too many for --seq 2");
    write_bin("bad.bin", (const int32_t[]){1, 2, 3}, 3, 0, NULL, 0);
    print_to(words, sizeof words, MODEL "--data %s --log %s", in_scratch("bad.bin"), in_scratch("bad.bin"));
    expect_error(words, "is the same file as --data");
    expect_success(MODEL);
    assert_true(printed_after("vocabulary ") > 60);
}

/* A log may be a pipe with a reader. What nobody reads is not waited for, and no file of the run is a log. */
static void test_logs_that_are_something_else(void **state) {
    static const char head[] = "target,token,loss\n";
    char words[WORDS], text[64];
    int ends[2];
    (void)state;
    assert_int_equal(mkfifo(in_scratch("fifo"), 0600), 0);
    print_to(words, sizeof words, MODEL "--data " TEXT_BIN " --log %s", in_scratch("fifo"));
    expect_error(words, "fifo: it is a socket, or a pipe that nobody reads");
    expect_error(MODEL "--data " TEXT_BIN " --log tests", "cannot write tests: Is a directory");
    expect_error(MODEL "--data " TEXT_BIN " --log /dev/full", "cannot write /dev/full: No space left");
    expect_error(MODEL "--data " TEXT_BIN " --log /dev/stdout", "--log /dev/stdout is the same file as /dev/stdout");
    shell("cp -r tests/golden/gpt2_hf '%s'", in_scratch("model"));
    print_to(words, sizeof words, "--no-pinning --init-from %s --data " TEXT_BIN " --log %s/model.safetensors",
             in_scratch("model"), in_scratch("model"));
    expect_error(words, "model.safetensors is the same file as --init-from ");
    assert_int_equal(pipe(ends), 0);
    print_to(words, sizeof words, MODEL "--data " TEXT_BIN " --log /dev/fd/%d", ends[1]);
    expect_success(words);
    assert_int_equal(read(ends[0], text, sizeof head - 1), sizeof head - 1);
    assert_memory_equal(text, head, sizeof head - 1);
    assert_true(close(ends[0]) == 0 && close(ends[1]) == 0);
    forget("model");
    forget("fifo");
}

static int open_scratch(void **state) {
    (void)state;
    return scratch_open("test_eval");
}

static int remove_scratch(void **state) {
    static const char *const names[] = {"out", "err", "log.csv", "one.csv", "text.bin", "cloze.bin", "bad.bin"};
    (void)state;
    for (size_t i = 0; i < COUNT(names); i++) remove(in_scratch(names[i]));
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_windows_count_each_target_once),
        cmocka_unit_test(test_text_against_a_forward_for_each_target),
        cmocka_unit_test(test_golden_values_on_every_split),
        cmocka_unit_test(test_same_bits_of_data_ranks_and_stages),
        cmocka_unit_test(test_16_bits),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_cloze_against_a_forward_for_each_token),
        cmocka_unit_test(test_largest),
        cmocka_unit_test(test_ties_and_padded_vocabulary),
        cmocka_unit_test(test_results_that_are_not_finite),
        cmocka_unit_test(test_weights_that_are_not_finite),
        cmocka_unit_test(test_loading_fits_into_the_plan),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_flags_of_the_shape),
        cmocka_unit_test(test_bad_flags),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_logs_that_are_something_else),
    };
    return cmocka_run_group_tests(tests, open_scratch, remove_scratch);
}
