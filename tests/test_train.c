/* test_train - examples/train_gpt.c, run in this process: the loss over 50 steps does not depend on the split, files are read
   and refused, absurd flags are refused one by one. Run it from the checkout's root. */

#define main train_gpt_main
#include "../examples/train_gpt.c"
#undef main

#include "mt_test.h"

#include <sys/stat.h>

#define MAX_ARGS 64
#define STEPS 50

static char scratch[64]; /* a folder of this run's own */

static const char *in_scratch(const char *name) {
    static char path[4][128];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", scratch, name);
    return p;
}

/* Runs train_gpt with these words as its arguments; what it prints goes to the files "out" and "err". */
static int run_train_gpt(const char *words) {
    static char text[2048];
    char *argv[MAX_ARGS] = {(char *)(uintptr_t)"train_gpt"};
    int argc = 1, out = dup(1), err = dup(2), rc;
    snprintf(text, sizeof text, "%s", words);
    for (char *w = strtok(text, " "); w && argc < MAX_ARGS - 1; w = strtok(NULL, " ")) argv[argc++] = w;
    fflush(NULL);
    assert_non_null(freopen(in_scratch("out"), "w", stdout));
    assert_non_null(freopen(in_scratch("err"), "w", stderr));
    optind = 0; /* getopt starts afresh */
    rc = train_gpt_main(argc, argv);
    fflush(NULL);
    dup2(out, 1);
    dup2(err, 2);
    close(out);
    close(err);
    return rc;
}

static void read_text(const char *name, char *text, size_t bytes) {
    FILE *f = fopen(in_scratch(name), "r");
    assert_non_null(f);
    text[fread(text, 1, bytes - 1, f)] = 0;
    fclose(f);
}

static void write_bytes(const char *name, const void *bytes, size_t size) {
    FILE *f = fopen(in_scratch(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, size, f), size);
    fclose(f);
}

static void expect_error(const char *words, const char *sentence) {
    char text[4096];
    int rc = run_train_gpt(words);
    read_text("err", text, sizeof text);
    if (rc == 0 || !strstr(text, sentence)) fail_msg("train_gpt %s: exit %d, stderr: %s", words, rc, text);
}

/* A text that does not change when the project does: sentences of a few words, which a small model learns quickly. */
static void write_text(void) {
    static const char *const words[] = {"the ", "a ", "rank ", "sums ", "splits ", "rows ", "columns ", "of ",
                                        "and ", "every ", "layer ", "tensor ", "token ", "has ", "sees ", "again.\n"};
    static char text[40000];
    uint64_t seed = 3, word = 0;
    size_t used = 0;
    while (used + 16 < sizeof text) {
        word = (3 * word + 1 + test_random(&seed) % 3) % 16;
        used += (size_t)snprintf(text + used, sizeof text - used, "%s", words[word]);
    }
    write_bytes("text", text, used);
}

/* The losses and gradient norms of a run, from its CSV. */
typedef struct curve {
    double loss[STEPS], norm[STEPS], validation[2]; /* the last: after half of the steps, and at the end */
} curve;

static curve train_curve(const char *model, const char *split) {
    char words[1024], line[256];
    curve c;
    FILE *f;
    write_text();
    snprintf(words, sizeof words, "--data %s --steps %d --log %s --sample 0 --eval-interval 25 %s %s", in_scratch("text"), STEPS,
             in_scratch("log.csv"), model, split);
    if (run_train_gpt(words) != 0) {
        read_text("err", line, sizeof line);
        fail_msg("train_gpt %s: %s", words, line);
    }
    f = fopen(in_scratch("log.csv"), "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    assert_string_equal(line, "step,loss,grad_norm,tokens_per_s,lr,val_loss\n");
    for (int i = 0; i < STEPS; i++) {
        int step, evaluated = i % 25 == 24;
        assert_non_null(fgets(line, sizeof line, f));
        assert_int_equal(sscanf(line, "%d,%lf,%lf,%*f,%*f,%lf", &step, &c.loss[i], &c.norm[i], &c.validation[i / 25]),
                         3 + evaluated);
        assert_int_equal(step, i + 1);
    }
    assert_null(fgets(line, sizeof line, f));
    fclose(f);
    return c;
}

/* 1e-4 relative, at every one of the steps; rounding makes about 1e-6, a gradient that is counted twice percents. */
static void assert_same_curve(const curve *a, const curve *b, const char *split) {
    for (int i = 0; i < STEPS; i++) {
        if (!(fabs(a->loss[i] - b->loss[i]) <= 1e-4 * a->loss[i]))
            fail_msg("%s: step %d: loss %.9g, expected %.9g", split, i, b->loss[i], a->loss[i]);
        if (!(fabs(a->norm[i] - b->norm[i]) <= 1e-4 * a->norm[i]))
            fail_msg("%s: step %d: gradient norm %.9g, expected %.9g", split, i, b->norm[i], a->norm[i]);
    }
    for (int i = 0; i < 2; i++)
        if (!(fabs(a->validation[i] - b->validation[i]) <= 1e-4 * a->validation[i]))
            fail_msg("%s: validation loss %.9g, expected %.9g", split, b->validation[i], a->validation[i]);
}

static void compare_splits(const char *model, const char *const *splits, size_t count) {
    curve serial = train_curve(model, "--tp 1");
    assert_true(serial.loss[STEPS - 1] < serial.loss[0] - 1.0); /* it learns: the comparison is of something */
    for (size_t i = 0; i < (SANITIZED && count > 8 ? 8 : count); i++) {
        curve c = train_curve(model, splits[i]);
        assert_same_curve(&serial, &c, splits[i]);
    }
}

#define COUNT(a) (sizeof(a) / sizeof *(a))

static void test_gpt2_any_split(void **state) {
    static const char *const splits[] = {
        "--tp 2", "--tp 4", "--tp 8", "--tp 1 --dp 2", "--tp 2 --dp 2", "--tp 4 --dp 2", "--tp 8 --dp 2",
        "--tp 2 --sequence-parallel", "--tp 4 --sequence-parallel", "--tp 8 --sequence-parallel",
        "--tp 2 --dp 2 --sequence-parallel", "--tp 4 --dp 2 --sequence-parallel", "--tp 8 --dp 2 --sequence-parallel",
        "--tp 2 --dp 2 --micro-batch 1 --sequence-parallel", "--tp 1 --micro-batch 2", "--tp 1 --threads 2",
        "--tp 2 --threads 2", "--tp 2 --no-pinning",
        "--tp 1 --dp 8"};
    (void)state;
    compare_splits("--layers 2 --hidden 32 --heads 8 --seq 16 --batch 8 --dropout 0.1 --warmup 10 --lr 5e-3", splits,
                   COUNT(splits));
}

static void test_llama_any_split(void **state) {
    static const char *const splits[] = {"--tp 2", "--tp 4", "--tp 4 --dp 2 --sequence-parallel --micro-batch 2",
                                         "--tp 2 --sequence-parallel"};
    (void)state;
    compare_splits("--layers 2 --hidden 32 --heads 8 --kv-heads 4 --ffn 44 --swiglu --rmsnorm --rotary --untied --seq 16 "
                   "--batch 8 --dropout 0.1 --label-smoothing 0.1 --warmup 10 --lr 5e-3", splits, COUNT(splits));
}

/* Two files, byte for byte; says in which line they differ. */
static void assert_same_file(const char *name, const char *other, const char *split) {
    FILE *a = fopen(in_scratch(name), "r"), *b = fopen(in_scratch(other), "r");
    char x[256], y[256], *more = x;
    assert_true(a && b);
    for (int line = 1; more; line++) {
        more = fgets(x, sizeof x, a);
        if (!fgets(y, sizeof y, b) != !more || (more && strcmp(x, y) != 0)) fail_msg("%s: line %d: %s", split, line, x);
    }
    fclose(a);
    fclose(b);
}

/* Losses, norms and validation losses of the CSV, and a hash of every tensor of every step. */
static void compare_bits(const char *model, const char *const *splits, size_t count) {
    curve serial, c;
    char words[512];
    snprintf(words, sizeof words, "%s --invariant 8 --hash-log %s", model, in_scratch("one.hash"));
    serial = train_curve(words, "--tp 1");
    assert_true(serial.loss[STEPS - 1] < serial.loss[0] - 1.0);
    for (size_t i = 0; i < (SANITIZED ? 1 : count); i++) {
        snprintf(words, sizeof words, "%s --invariant 8 --hash-log %s", model, in_scratch("split.hash"));
        c = train_curve(words, splits[i]);
        if (memcmp(&serial, &c, sizeof c) != 0) fail_msg("%s: losses differ", splits[i]);
        assert_same_file("one.hash", "split.hash", splits[i]);
    }
}

static void test_invariant_any_split(void **state) {
    static const char *const splits[] = {"--tp 2", "--tp 8", "--tp 4 --sequence-parallel", "--tp 2 --dp 4 --sequence-parallel",
                                         "--dp 8", "--tp 8 --dp 2", "--tp 2 --no-pinning"};
    static const char *const few[] = {"--tp 8 --sequence-parallel", "--tp 4 --dp 2"};
    (void)state;
    compare_bits("--layers 2 --hidden 32 --heads 8 --seq 16 --batch 16 --dropout 0.1 --warmup 10 --lr 5e-3", splits,
                 COUNT(splits));
    compare_bits("--layers 2 --hidden 64 --heads 16 --kv-heads 8 --ffn 44 --swiglu --rmsnorm --rotary --untied --seq 16 "
                 "--batch 12 --dropout 0.1 --label-smoothing 0.1 --warmup 10 --lr 5e-3", few, COUNT(few));
}

static void test_invariant_in_bf16(void **state) {
    static const char *const splits[] = {"--tp 4 --dp 2 --sequence-parallel"};
    char text[1 << 16];
    (void)state;
    compare_bits("--dtype bf16 --layers 2 --hidden 32 --heads 8 --seq 16 --batch 16 --dropout 0.1 --warmup 10 --lr 5e-3",
                 splits, COUNT(splits));
    read_text("one.hash", text, sizeof text);
    assert_non_null(strstr(text, "1 decoder.layers.0.mlp.linear_fc1.weight.master "));
}

/* The loss scale comes down to where f16 trains, and what was skipped is counted; a model that is lost stops at scale 1. */
static void test_f16_scales_the_loss(void **state) {
    char text[8192];
    (void)state;
    assert_int_equal(run_train_gpt("--data megatron.h --sample 0 --layers 1 --hidden 16 --seq 8 --batch 2 --dtype f16 --tp 2 "
                                   "--steps 30"), 0);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "parameters in f16;"));
    assert_non_null(strstr(text, "loss scale 4.29497e+09, 1 skipped"));
    assert_null(strstr(strstr(text, "step    30/30"), ", 1 skipped"));
    assert_null(strstr(strstr(text, "step    30/30"), "nan"));
    expect_error("--data megatron.h --sample 0 --layers 1 --hidden 16 --seq 8 --batch 2 --dtype f16 --lr 1000 --clip 0 "
                 "--warmup 0 --steps 200", "not finite: stopping");
}

/* This program is a C compiler's: it has no GPU, and says how to get one. */
static void test_device_that_is_not_built(void **state) {
    (void)state;
    expect_error("--data megatron.h --sample 0 --device cuda", "compile the implementation with nvcc");
}

/* The log of a step that is not finite is written before the run stops: it is the one that is looked for. */
static void test_hash_log_of_the_last_step(void **state) {
    char words[512], text[64] = "";
    int last = 0;
    FILE *f;
    (void)state;
    snprintf(words, sizeof words, "--data megatron.h --sample 0 --lr 1000 --clip 0 --warmup 0 --steps 200 --layers 1 "
             "--hidden 16 --seq 8 --batch 2 --hash-log %s", in_scratch("one.hash"));
    expect_error(words, "not finite");
    f = fopen(in_scratch("one.hash"), "r");
    assert_non_null(f);
    while (fscanf(f, "%d %63s %*[^\n]", &last, text) == 2) continue;
    fclose(f);
    read_text("err", words, sizeof words);
    snprintf(text, sizeof text, "step %d: ", last);
    if (!strstr(words, text)) fail_msg("the log ends with %sthe run with: %s", text, words);
}

/* Seeds, and the masks they draw, make a difference; otherwise equal runs would prove nothing. */
static void test_seed_and_dropout_matter(void **state) {
    static const char *const model = "--layers 1 --hidden 16 --heads 2 --seq 8 --batch 2";
    curve a = train_curve(model, "--dropout 0.1"), b = train_curve(model, "--dropout 0.1"), c = train_curve(model, "");
    curve d = train_curve(model, "--dropout 0.1 --seed 5");
    (void)state;
    assert_memory_equal(&a, &b, sizeof a); /* same inputs, same split: same bits */
    assert_true(fabs(a.loss[5] - c.loss[5]) > 1e-4);
    assert_true(fabs(a.loss[5] - d.loss[5]) > 1e-4);
}

static void test_dry_run_and_ledger(void **state) {
    static const char *const model = "--tp 4 --dp 2 --layers 3 --hidden 32 --heads 8 --seq 16 --batch 8 --data megatron.h";
    char words[512], dry[4096], wet[4096], *at;
    (void)state;
    snprintf(words, sizeof words, "%s --dry-run", model);
    assert_int_equal(run_train_gpt(words), 0);
    read_text("out", dry, sizeof dry);
    assert_null(strstr(dry, "step "));
    assert_non_null(strstr(dry, "per rank: "));
    /* 4 per layer, 1 for the embedding, 1 for the head's input; of 4 sequences x 16 tokens x 32 floats */
    assert_non_null(strstr(dry, "tensor   (4 ranks)  all_reduce         14 calls        114688 bytes"));
    assert_non_null(strstr(dry, "tensor   (4 ranks)  all_gather          1 calls          4096 bytes"));
    snprintf(words, sizeof words, "%s --steps 1 --sample 0", model);
    assert_int_equal(run_train_gpt(words), 0);
    read_text("out", wet, sizeof wet);
    at = strstr(dry, "communication of one step");
    assert_non_null(at);
    assert_non_null(strstr(wet, at)); /* what was planned is what happened */
}

static void test_sampling(void **state) {
    char one[4096], four[4096];
    static const char *const words = "--data megatron.h --layers 1 --hidden 16 --heads 4 --seq 16 --batch 4 --steps 3 "
                                     "--sample 40 --prompt static --lr 0 --min-lr 0";
    char with[512];
    (void)state;
    assert_int_equal(run_train_gpt(words), 0);
    read_text("out", one, sizeof one);
    assert_non_null(strstr(one, "continuation of static\n---\n"));
    snprintf(with, sizeof with, "%s --tp 4 --dp 2 --sequence-parallel", words);
    assert_int_equal(run_train_gpt(with), 0);
    read_text("out", four, sizeof four);
    assert_string_equal(strstr(one, "continuation"), strstr(four, "continuation"));
}

/* ---- token files ---------------------------------------------------------------------------------------------------- */

enum { BIN_TOKENS = 4000 };

static void write_bin(const char *name, int32_t magic, int32_t version, int32_t announced, int tokens, uint16_t largest) {
    static unsigned char file[LLMC_HEADER_BYTES + 2 * BIN_TOKENS];
    int32_t header[3] = {magic, version, announced};
    memset(file, 0, sizeof file);
    memcpy(file, header, sizeof header);
    for (int i = 0; i < tokens; i++) {
        uint16_t token = i == tokens / 2 ? largest : (uint16_t)(i * i % 50);
        file[LLMC_HEADER_BYTES + 2 * i] = (unsigned char)(token & 255);
        file[LLMC_HEADER_BYTES + 2 * i + 1] = (unsigned char)(token >> 8);
    }
    write_bytes(name, file, LLMC_HEADER_BYTES + 2 * (size_t)tokens);
}

#define SMALL "--layers 1 --hidden 8 --heads 2 --seq 8 --batch 2 --steps 2 --sample 0 "

static void test_token_file(void **state) {
    char words[512], text[4096];
    (void)state;
    write_bin("good.bin", LLMC_MAGIC, 1, BIN_TOKENS, BIN_TOKENS, 50256);
    snprintf(words, sizeof words, SMALL "--data %s", in_scratch("good.bin"));
    assert_int_equal(run_train_gpt(words), 0);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "vocabulary 50257"));
    assert_non_null(strstr(text, "data: 4000 tokens"));
    assert_non_null(strstr(text, "loss 10.8")); /* ln 50257 = 10.82 */
}

static void test_bad_files(void **state) {
    char words[512];
    static const struct {
        const char *name;
        int32_t magic, version, announced;
        int tokens;
        const char *sentence;
    } bad[] = {{"magic.bin", 7, 1, 100, 100, "magic 7"},
               {"version.bin", LLMC_MAGIC, 7, 100, 100, "version 7"},
               {"short.bin", LLMC_MAGIC, 1, 200, 100, "announces 200 tokens"},
               {"negative.bin", LLMC_MAGIC, 1, -1, 100, "announces -1 tokens"},
               {"empty.bin", LLMC_MAGIC, 1, 0, 0, "0 tokens"}};
    (void)state;
    for (size_t i = 0; i < COUNT(bad); i++) {
        write_bin(bad[i].name, bad[i].magic, bad[i].version, bad[i].announced, bad[i].tokens, 0);
        snprintf(words, sizeof words, SMALL "--data %s", in_scratch(bad[i].name));
        expect_error(words, bad[i].sentence);
    }
    write_bytes("header.bin", "abc", 3);
    snprintf(words, sizeof words, SMALL "--data %s", in_scratch("header.bin"));
    expect_error(words, "no llm.c token file");
    write_bytes("empty.txt", "", 0);
    snprintf(words, sizeof words, SMALL "--data %s", in_scratch("empty.txt"));
    expect_error(words, "the data has 0 tokens, too few for --seq 8");
    write_bytes("short.txt", "0123456789012345678901234567890123456789", 39);
    snprintf(words, sizeof words, SMALL "--data %s", in_scratch("short.txt"));
    expect_error(words, "the data has 39 tokens, too few for --seq 8 (needs 40)");
    expect_error("--data /nonexistent/text", "cannot read /nonexistent/text: No such file");
    snprintf(words, sizeof words, SMALL "--data %s", scratch);
    expect_error(words, "cannot read"); /* a folder */
    write_bin("vocab.bin", LLMC_MAGIC, 1, BIN_TOKENS, BIN_TOKENS, 60000);
    snprintf(words, sizeof words, SMALL "--data %s --seq 900 --batch 4", in_scratch("vocab.bin"));
    expect_error(words, "60000");
}

/* The smallest file that is accepted, validated and sampled from its last sequence. */
static void test_smallest_file(void **state) {
    char words[512], bytes[4 * 8 + 8];
    (void)state;
    memset(bytes, 'a', sizeof bytes);
    write_bytes("short.txt", bytes, sizeof bytes);
    snprintf(words, sizeof words, "--layers 1 --hidden 8 --heads 2 --seq 8 --batch 2 --steps 2 --eval-interval 1 --sample 9 "
             "--data %s", in_scratch("short.txt"));
    assert_int_equal(run_train_gpt(words), 0);
}

/* A refused run leaves the log of the run before as it is. */
static void test_refusal_keeps_the_log(void **state) {
    char words[512], text[64];
    (void)state;
    write_bytes("log.csv", "precious", 8);
    snprintf(words, sizeof words, "--data megatron.h --heads 5 --log %s", in_scratch("log.csv"));
    expect_error(words, "heads 5");
    snprintf(words, sizeof words, "--data megatron.h --dry-run --log %s", in_scratch("log.csv"));
    assert_int_equal(run_train_gpt(words), 0);
    read_text("log.csv", text, sizeof text);
    assert_string_equal(text, "precious");
}

static void test_absurd_flags(void **state) {
    static const struct {
        const char *words, *sentence;
    } bad[] = {
        {"--tp 0", "--tp 0: expected a whole number from 1 to 1024"},
        {"--tp 1.5", "--tp 1.5: expected a whole number"},
        {"--tp two", "--tp two: expected"},
        {"--dp -1", "--dp -1: expected"},
        {"--tp 1024 --dp 16 --batch 16", "more than 1024 ranks"},
        {"--batch 5 --dp 2", "--batch 5 is not a multiple of --dp 2"},
        {"--batch 8 --dp 2 --micro-batch 3", "the 4 sequences of a rank (--batch / --dp) are not a multiple of --micro-batch 3"},
        {"--dtype f64", "--dtype f64: expected f32, bf16 or f16"},
        {"--device tpu", "--device tpu: expected cpu or cuda"},
        {"--invariant 6", "invariant is 6, invariant_data 6: must be 0 or a power of two up to 1024"},
        {"--invariant 8 --micro-batch 2", "--invariant chooses the micro-batch"},
        {"--invariant 8", "4 kv_heads cannot be split over 8 virtual shards"},
        {"--invariant 4 --heads 8 --tp 8", "4 virtual shards (mt_context_desc.invariant) cannot be split over 8 tensor ranks"},
        {"--invariant 4 --batch 12 --dp 3", "--invariant-data 4 makes 4 micro-batches of --batch 12, which --dp 3 cannot share"},
        {"--invariant 4 --seq 10 --batch 4", "10 tokens cannot be split into 4 virtual shards"},
        {"--hash-log /nonexistent/hashes --steps 1", "cannot write /nonexistent/hashes"},
        {"--heads 5 --tp 1", "hidden 128 must be a multiple of heads 5"},
        {"--heads 4 --kv-heads 3 --tp 1", "heads 4, heads of kv_heads 3"},
        {"--heads 4 --kv-heads 2 --tp 4", "2 kv_heads cannot be split over 4 tensor ranks"},
        {"--seq 9 --tp 2 --sequence-parallel", "--seq 9 is not a multiple of --tp 2"},
        {"--seq 1000000", "too few for --seq 1e+06"},
        {"--dropout 1", "--dropout 1: expected a number from 0 to 0.999"},
        {"--dropout nan", "--dropout nan: expected"},
        {"--lr -1", "--lr -1: expected"},
        {"--steps 0", "--steps 0: expected"},
        {"--steps 1e400", "--steps 1e400: expected"},
        {"--layers 9999999", "--layers 9999999: expected"},
        {"--hidden 65536 --layers 1024 --tp 1", "no memory"},
        {"--rotary --hidden 12 --heads 4 --tp 1", "even head size (is 3)"},
        {"--vocab 50 --tp 1", "is not in [0, 50)"},
        {"--no-such-flag", "no-such-flag"},
        {"--tp", "requires an argument"},
        {"--batch 1048576 --seq 1 --layers 1 --hidden 16 --heads 2 --lr nan", "--lr nan"},
        {"stray", "what is 'stray'?"},
        {"--log /nonexistent/log.csv --steps 1", "cannot write /nonexistent/log.csv"},
        {"--lr 1000 --clip 0 --warmup 0 --steps 200 --layers 1 --hidden 16 --seq 8 --batch 2", "not finite"},
    };
    char words[512];
    (void)state;
    for (size_t i = 0; i < COUNT(bad); i++) {
        snprintf(words, sizeof words, "--data megatron.h --sample 0 %s", bad[i].words);
        expect_error(words, bad[i].sentence);
    }
}

static void test_help(void **state) {
    char text[8192];
    (void)state;
    assert_int_equal(run_train_gpt("--help"), 0);
    read_text("out", text, sizeof text);
    for (int i = 0; i < FLAGS; i++) assert_non_null(strstr(text, flags[i].name));
}

static int remove_scratch(void **state) {
    static const char *const names[] = {"out", "err", "text", "log.csv", "one.hash", "split.hash", "good.bin", "magic.bin",
                                        "version.bin", "short.bin", "negative.bin", "empty.bin", "header.bin", "empty.txt", "short.txt", "vocab.bin"};
    (void)state;
    for (size_t i = 0; i < COUNT(names); i++) remove(in_scratch(names[i]));
    return remove(scratch);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2_any_split),  cmocka_unit_test(test_llama_any_split),
        cmocka_unit_test(test_invariant_any_split), cmocka_unit_test(test_hash_log_of_the_last_step),
        cmocka_unit_test(test_invariant_in_bf16), cmocka_unit_test(test_f16_scales_the_loss),
        cmocka_unit_test(test_device_that_is_not_built),
        cmocka_unit_test(test_seed_and_dropout_matter), cmocka_unit_test(test_dry_run_and_ledger),
        cmocka_unit_test(test_sampling),        cmocka_unit_test(test_token_file),
        cmocka_unit_test(test_bad_files),       cmocka_unit_test(test_absurd_flags),
        cmocka_unit_test(test_help),            cmocka_unit_test(test_smallest_file),
        cmocka_unit_test(test_refusal_keeps_the_log),
    };
    const char *tmp = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%.40s/mt_train.%ld", tmp ? tmp : "/tmp", (long)getpid());
    if (mkdir(scratch, 0700) != 0) return 1;
    return cmocka_run_group_tests(tests, NULL, remove_scratch);
}
