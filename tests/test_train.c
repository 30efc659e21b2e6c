/* test_train.c - tests examples/train_gpt.c, which it runs in this process: the loss over 50 steps against one rank on
   every split, input and log files, and the refusal of each wrong flag. Run it from the root of the checkout. */

#define main program_main
#include "../examples/train_gpt.c"
#undef main

#include "mt_test_locale.h"
#include "mt_test_program.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define STEPS (SANITIZED ? 20 : 50)     /* with two evaluations */
#define LEARNED (SANITIZED ? 0.5 : 1.0) /* by which the loss falls at least */

/* A pipe that is open for a reader who reads nothing, and full. Returns the end of the reader. */
static int open_full_pipe(const char *name) {
    static const char bytes[4096];
    int fd;
    assert_int_equal(mkfifo(in_scratch(name), 0600), 0);
    fd = open(in_scratch(name), O_RDWR | O_NONBLOCK);
    assert_true(fd >= 0);
    while (write(fd, bytes, sizeof bytes) > 0) continue;
    assert_int_equal(errno, EAGAIN);
    return fd;
}

/* Rank 0, a thread, writes to a pipe that no process reads, and blocks for ever. */
static void test_stuck_rank_ends_the_process(void **state) {
    char words[WORDS], text[4096];
    double start = cm_seconds_();
    int status = 0, reader = open_full_pipe("pipe");
    pid_t child;
    (void)state;
    print_to(words, sizeof words, "--data LICENSE --layers 1 --hidden 16 --seq 8 --timeout 0.5 --log %s",
             in_scratch("pipe"));
    child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(run_program(words) + 40);
    while (waitpid(child, &status, WNOHANG) == 0) {
        struct timespec nap = {0, 20000000};
        nanosleep(&nap, NULL);
        if (cm_seconds_() - start > 600) kill(child, SIGKILL); /* it hangs */
    }
    read_text("err", text, sizeof text);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1) fail_msg("status %x: %s", (unsigned)status, text);
    assert_non_null(strstr(text, "rank 1 of 2: MT_ERR_TIMEOUT: "));
    assert_non_null(strstr(text, "rank 0 of 2: has not returned from its function"));
    assert_true(cm_seconds_() - start > 5.0); /* the watch gives a stuck rank that long to return */
    close(reader);
}

/* The losses and gradient norms of a run, from its CSV. */
typedef struct curve {
    double loss[STEPS], norm[STEPS], validation[2]; /* validation: after half of the steps, and at the end */
} curve;

static curve train_curve(const char *model, const char *split) {
    char words[WORDS], line[256];
    curve c;
    FILE *f;
    write_text();
    print_to(words, sizeof words, "--data %s --steps %d --log %s --sample 0 --eval-interval %d %s %s",
             in_scratch("text"), STEPS, in_scratch("log.csv"), STEPS / 2, model, split);
    if (run_program(words) != 0) {
        read_text("err", line, sizeof line);
        fail_msg("train_gpt %s: %s", words, line);
    }
    f = fopen(in_scratch("log.csv"), "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    assert_string_equal(line, "step,loss,grad_norm,tokens_per_s,lr,val_loss\n");
    for (int i = 0; i < STEPS; i++) {
        int step, evaluated = (i + 1) % (STEPS / 2) == 0;
        assert_non_null(fgets(line, sizeof line, f));
        assert_int_equal(
            sscanf(line, "%d,%lf,%lf,%*f,%*f,%lf", &step, &c.loss[i], &c.norm[i], &c.validation[i / (STEPS / 2)]),
            3 + evaluated);
        assert_int_equal(step, i + 1);
    }
    assert_null(fgets(line, sizeof line, f));
    fclose(f);
    return c;
}

/* The tolerance is 1e-4 relative at every step, and 3e-4 for norms. Rounding gives about 1e-6, and 1e-4 for the norm at
   the end of a run with a large learning rate. A gradient that is counted twice gives per cents. */
static void assert_same_curve(const curve *a, const curve *b, const char *split) {
    for (int i = 0; i < STEPS; i++) {
        if (!(fabs(a->loss[i] - b->loss[i]) <= 1e-4 * a->loss[i]))
            fail_msg("%s: step %d: loss %.9g, expected %.9g", split, i, b->loss[i], a->loss[i]);
        if (!(fabs(a->norm[i] - b->norm[i]) <= 3e-4 * a->norm[i]))
            fail_msg("%s: step %d: gradient norm %.9g, expected %.9g", split, i, b->norm[i], a->norm[i]);
    }
    for (int i = 0; i < 2; i++)
        if (!(fabs(a->validation[i] - b->validation[i]) <= 1e-4 * a->validation[i]))
            fail_msg("%s: validation loss %.9g, expected %.9g", split, b->validation[i], a->validation[i]);
}

static void compare_splits(const char *model, const char *const *splits, size_t count) {
    curve serial = train_curve(model, "--tp 1");
    /* the model learns, so the comparison means something */
    assert_true(serial.loss[STEPS - 1] < serial.loss[0] - LEARNED);
    for (size_t i = 0; i < count; i++) {
        if (!test_takes(count - 1 - i, 5)) continue; /* the last split has pipeline stages */
        curve c = train_curve(model, splits[i]);
        assert_same_curve(&serial, &c, splits[i]);
    }
}

static void test_gpt2_any_split(void **state) {
    static const char *const splits[] = {
        "--tp 2",
        "--tp 4",
        "--tp 8",
        "--tp 1 --dp 2",
        "--tp 1 --dp 4 --bucket-mb 0.01",
        "--tp 1 --dp 2 --micro-batch 1 --use-distributed-optimizer",
        "--tp 2 --dp 2 --sequence-parallel --use-distributed-optimizer --bucket-mb 0.02",
        "--tp 1 --dp 4 --use-distributed-optimizer",
        "--tp 2 --dp 2",
        "--tp 4 --dp 2",
        "--tp 8 --dp 2",
        "--tp 2 --sequence-parallel",
        "--tp 2 --interleave --recompute full",
        "--tp 4 --sequence-parallel",
        "--tp 8 --sequence-parallel",
        "--tp 2 --dp 2 --sequence-parallel",
        "--tp 4 --dp 2 --sequence-parallel --check",
        "--tp 8 --dp 2 --sequence-parallel",
        "--tp 2 --dp 2 --micro-batch 1 --sequence-parallel",
        "--tp 1 --micro-batch 2",
        "--tp 1 --threads 2",
        "--tp 2 --threads 2",
        "--tp 2 --no-pinning",
        "--tp 1 --dp 8",
        "--tp 1 --cp 2",
        "--tp 1 --cp 8 --micro-batch 2 --cp-comm-type allgather",
        "--tp 1 --cp 4 --cp-comm-type a2a --recompute selective",
        "--tp 2 --cp 4 --sequence-parallel --recompute full",
        "--tp 1 --cp 2 --dp 2 --use-distributed-optimizer --bucket-mb 0.02",
        "--tp 1 --cp 2 --dp 2 --pp 2 --micro-batch 1 --check 2",
        "--tp 2 --pp 2 --dp 2 --micro-batch 1 --check"};
    /* tensor ranks do not have the tokens in their order */
    static const char *const scattered[] = {"--tp 8 --cp 2 --sequence-parallel --check"};
    (void)state;
    compare_splits("--layers 2 --hidden 32 --heads 8 --seq 16 --batch 8 --dropout 0.1 --warmup 10 --lr 5e-3", splits,
                   COUNT(splits));
    compare_splits("--layers 1 --hidden 32 --heads 8 --seq 32 --batch 8 --dropout 0.1 --warmup 10 --lr 5e-3", scattered,
                   COUNT(scattered));
}

static void test_llama_any_split(void **state) {
    static const char *const splits[] = {"--tp 2",
                                         "--tp 4",
                                         "--tp 4 --dp 2 --sequence-parallel --micro-batch 2",
                                         "--tp 2 --sequence-parallel",
                                         "--tp 2 --cp 2 --dp 2 --sequence-parallel --micro-batch 2 --check",
                                         "--tp 1 --cp 8 --cp-comm-type a2a",
                                         "--tp 2 --pp 2 --micro-batch 2 --sequence-parallel --schedule gpipe"};
    (void)state;
    compare_splits("--layers 2 --hidden 32 --heads 8 --kv-heads 4 --ffn 44 --activation swiglu --rmsnorm --rotary "
                   "--untied --seq 16 "
                   "--batch 8 --dropout 0.1 --label-smoothing 0.1 --warmup 10 --lr 5e-3",
                   splits, COUNT(splits));
}

/* The largest difference between the losses of two runs, as a part of the loss. */
static double curve_distance(const curve *a, const curve *b) {
    double most = 0;
    for (int i = 0; i < STEPS; i++) most = test_larger(most, fabs(a->loss[i] - b->loss[i]) / a->loss[i]);
    return most;
}

/* Each activation learns, and two ranks have the losses of one. Every activation but the default differs from the
   default at least ten times as much as two ranks differ from one.
   A wrong word is refused with the words that there are. */
static void test_activations(void **state) {
    static const char *const names[] = {"gelu", "gelu-erf", "swiglu", "relu", "squared-relu", "tanh"};
    static const char *const model =
        "--layers 1 --hidden 96 --ffn 192 --heads 4 --seq 16 --batch 8 --warmup 10 --lr 3e-3 --no-pinning";
    char words[WORDS];
    curve usual = train_curve(model, "--tp 1");
    (void)state;
    for (size_t i = 0; i < COUNT(names); i++) {
        print_to(words, sizeof words, "%s --activation %s", model, names[i]);
        curve one = train_curve(words, "--tp 1"), two = train_curve(words, "--tp 2");
        double far = curve_distance(&usual, &one), near = curve_distance(&one, &two);
        assert_true(one.loss[STEPS - 1] < one.loss[0] - LEARNED);
        assert_same_curve(&one, &two, words);
        if (i == 0) assert_memory_equal(&one, &usual, sizeof one);
        else if (!(far > 10 * near)) fail_msg("%s: %g from gelu, two ranks are %g from one", names[i], far, near);
    }
    expect_error("--activation swish", "train_gpt: --activation swish: expected gelu (with tanh, as in GPT-2), "
                                       "gelu-erf, swiglu, squared-relu, relu or tanh\n");
    expect_error("--activation squared", "squared: expected gelu");
}

/* Compares two files byte by byte. The error message names the line of the first difference. */
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

/* Compares losses, norms and validation losses of the CSV, and a hash of every tensor of every step. */
static void compare_bits(const char *model, const char *const *splits, size_t count) {
    curve serial, c;
    char words[WORDS];
    print_to(words, sizeof words, "%s --invariant 8 --hash-log %s", model, in_scratch("one.hash"));
    serial = train_curve(words, "--tp 1");
    assert_true(serial.loss[STEPS - 1] < serial.loss[0] - LEARNED);
    for (size_t i = 0; i < (SANITIZED ? 1 : count); i++) {
        if (!test_takes(i, 4)) continue;
        print_to(words, sizeof words, "%s --invariant 8 --hash-log %s", model, in_scratch("split.hash"));
        c = train_curve(words, splits[i]);
        if (memcmp(&serial, &c, sizeof c) != 0) fail_msg("%s: losses differ", splits[i]);
        assert_same_file("one.hash", "split.hash", splits[i]);
    }
}

static void test_invariant_any_split(void **state) {
    static const char *const splits[] = {"--tp 2",
                                         "--tp 8",
                                         "--tp 4 --sequence-parallel",
                                         "--tp 2 --dp 4 --sequence-parallel",
                                         "--dp 8",
                                         "--tp 8 --dp 2",
                                         "--tp 2 --no-pinning",
                                         "--tp 2 --pp 2 --dp 2",
                                         "--tp 1 --pp 2 --dp 4 --schedule gpipe --recompute full"};
    static const char *const few[] = {"--tp 8 --sequence-parallel", "--tp 4 --dp 2",
                                      "--tp 2 --pp 2 --sequence-parallel",
                                      "--tp 2 --dp 4 --use-distributed-optimizer --bucket-mb 0.05"};
    (void)state;
    compare_bits("--layers 2 --hidden 32 --heads 8 --seq 16 --batch 16 --dropout 0.1 --warmup 10 --lr 5e-3", splits,
                 COUNT(splits));
    compare_bits("--layers 2 --hidden 64 --heads 16 --kv-heads 8 --ffn 44 --activation swiglu --rmsnorm --rotary "
                 "--untied --seq 16 "
                 "--batch 12 --dropout 0.1 --label-smoothing 0.1 --warmup 10 --lr 5e-3",
                 few, COUNT(few));
}

static void test_invariant_over_context_ranks(void **state) {
    static const char *const splits[] = {"--tp 2 --cp 2 --pp 2 --sequence-parallel --dp 2",
                                         "--tp 1 --cp 4 --dp 4 --use-distributed-optimizer --recompute full",
                                         "--tp 2 --cp 4 --sequence-parallel --check 2", "--tp 8 --cp 2"};
    static const char *const few[] = {"--tp 4 --cp 2 --sequence-parallel", "--tp 2 --cp 4 --recompute selective"};
    (void)state;
    compare_bits("--invariant-context 4 --layers 2 --hidden 32 --heads 8 --seq 16 --batch 16 --dropout 0.1 --warmup 10 "
                 "--lr 5e-3",
                 splits, COUNT(splits));
    compare_bits("--invariant-context 4 --dtype bf16 --layers 2 --hidden 64 --heads 16 --kv-heads 4 --ffn 44 "
                 "--activation swiglu --rmsnorm --rotary --untied --seq 32 --batch 8 --dropout 0.1 --warmup 10 "
                 "--lr 5e-3",
                 few, COUNT(few));
}

static void test_invariant_in_bf16(void **state) {
    static const char *const splits[] = {"--tp 4 --dp 2 --sequence-parallel --use-distributed-optimizer",
                                         "--tp 4 --dp 2 --sequence-parallel"};
    char text[1 << 16];
    (void)state;
    compare_bits(
        "--dtype bf16 --layers 2 --hidden 32 --heads 8 --seq 16 --batch 16 --dropout 0.1 --warmup 10 --lr 5e-3", splits,
        COUNT(splits));
    read_text("one.hash", text, sizeof text);
    assert_non_null(strstr(text, "1 decoder.layers.0.mlp.linear_fc1.weight.master "));
}

/* The messages between the stages of a small model fit into the planned arena. */
static void test_hash_log_of_stages(void **state) {
    char words[WORDS];
    (void)state;
    print_to(words, sizeof words,
             "--data LICENSE --sample 0 --steps 2 --hidden 16 --seq 8 --batch 8 --dtype bf16 --invariant 4 "
             "--tp 1 --hash-log %s",
             in_scratch("one.hash"));
    assert_int_equal(run_program(words), 0);
    print_to(words, sizeof words,
             "--data LICENSE --sample 0 --steps 2 --hidden 16 --seq 8 --batch 8 --dtype bf16 --invariant 4 "
             "--pp 4 --hash-log %s",
             in_scratch("split.hash"));
    assert_int_equal(run_program(words), 0);
    assert_same_file("one.hash", "split.hash", "--pp 4");
}

/* The loss scale decreases until f16 can train, and the skipped steps are counted. A model that has diverged stops at
   scale 1. */
/* The line of step 1 with this name. */
static void hash_line(const char *file, const char *name, char line[128]) {
    char wanted[64];
    FILE *f = fopen(in_scratch(file), "r");
    int found = 0;
    assert_non_null(f);
    print_to(wanted, sizeof wanted, "1 %s ", name);
    while (!found && fgets(line, 128, f)) found = strncmp(line, wanted, strlen(wanted)) == 0;
    fclose(f);
    if (!found) fail_msg("%s has no line '%s'", file, wanted);
}

/* What is computed for each token alone has the bits of one rank, whichever rank has the token. */
static void test_hash_log_of_context_ranks(void **state) {
    static const char *const splits[] = {"--cp 2", "--cp 4 --dp 2", "--cp 2 --tp 2 --sequence-parallel",
                                         "--cp 2 --cp-comm-type a2a --pp 2"};
    char words[WORDS], one[128], split[128], text[1 << 16];
    (void)state;
    for (size_t i = 0; i <= COUNT(splits); i++) {
        print_to(words, sizeof words,
                 "--data LICENSE --sample 0 --steps 1 --layers 2 --hidden 16 --seq 16 --batch 4 --tp 1 %s "
                 "--eval-interval 0 --hash-log %s",
                 i > 0 ? splits[i - 1] : "", in_scratch(i > 0 ? "split.hash" : "one.hash"));
        expect_success(words);
        if (i == 0) continue;
        hash_line("one.hash", "embedding.output", one);
        hash_line("split.hash", "embedding.output", split);
        assert_string_equal(split, one);
        read_text("split.hash", text, sizeof text);
        if (strstr(text, "differ")) fail_msg("%s: ranks differ", splits[i - 1]);
    }
}

static void test_f16_scales_the_loss(void **state) {
    char text[8192];
    (void)state;
    assert_int_equal(
        run_program("--data LICENSE --sample 0 --layers 1 --hidden 16 --seq 8 --batch 2 --dtype f16 --tp 2 "
                    "--steps 30"),
        0);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "parameters in f16;"));
    assert_non_null(strstr(text, "loss scale 4294967296, 1 skipped"));
    assert_null(strstr(strstr(text, "step    30/30"), ", 1 skipped"));
    assert_null(strstr(strstr(text, "step    30/30"), "nan"));
    expect_error("--data LICENSE --sample 0 --layers 1 --hidden 16 --seq 8 --batch 2 --dtype f16 --lr 1000 --clip 0 "
                 "--warmup 0 --steps 200",
                 "not finite: stopping");
}

/* A C compiler has built this program: it has no GPU support, and its message says how to build it. */
static void test_device_that_is_not_built(void **state) {
    (void)state;
    expect_error("--data megatron.h --sample 0 --device cuda", "compile the implementation with nvcc");
}

/* The log of a step that is not finite is written before the run stops, because this step is of interest. */
static void test_hash_log_of_the_last_step(void **state) {
    char words[WORDS], text[64] = "";
    int last = 0;
    FILE *f;
    (void)state;
    print_to(words, sizeof words,
             "--data megatron.h --sample 0 --lr 1000 --clip 0 --warmup 0 --steps 200 --layers 1 "
             "--hidden 16 --seq 8 --batch 2 --hash-log %s",
             in_scratch("one.hash"));
    expect_error(words, "not finite");
    f = fopen(in_scratch("one.hash"), "r");
    assert_non_null(f);
    while (fscanf(f, "%d %63s %*[^\n]", &last, text) == 2) continue;
    fclose(f);
    read_text("err", words, sizeof words);
    snprintf(text, sizeof text, "step %d: ", last);
    if (!strstr(words, text)) fail_msg("the log ends with %sthe run with: %s", text, words);
}

static void test_recomputation(void **state) {
    static const char *const model = "--layers 2 --hidden 16 --heads 4 --seq 8 --batch 2 --dropout 0.1";
    curve kept = train_curve(model, "--tp 2"), selective = train_curve(model, "--tp 2 --recompute selective");
    curve full = train_curve(model, "--tp 2 --recompute full");
    (void)state;
    assert_memory_equal(&kept, &selective, sizeof kept);
    assert_memory_equal(&kept, &full, sizeof kept);
    expect_error("--recompute some", "expected none, selective");
}

/* A model that has diverged: each step is reported and skipped, and the tenth in a row ends the run. */
static void test_steps_that_are_not_finite(void **state) {
    static const char *const splits[] = {"--tp 1", "--tp 2 --dp 2 --use-distributed-optimizer", "--dp 4 --dtype bf16",
                                         "--tp 1 --pp 2 --dp 2 --dtype f16 --use-distributed-optimizer"};
    char words[WORDS], text[16384], *first;
    (void)state;
    for (size_t i = 0; i < COUNT(splits); i++) {
        print_to(words, sizeof words,
                 "--data LICENSE --sample 0 --lr 1000 --clip 0 --warmup 0 --steps 200 --layers 2 "
                 "--hidden 16 --seq 8 --batch 4 %s",
                 splits[i]);
        expect_error(words, "is not finite: stopping after 10 such steps in a row");
        read_text("out", text, sizeof text);
        first = strstr(text, ", step skipped (1 so far)\n"); /* finite steps may come between */
        assert_non_null(first);
        assert_non_null(strstr(first, ", step skipped (10 so far)\n"));
    }
}

/* A run that ends with a step that is not finite, before the tenth in a row, fails. The learning rate is constant, so
   that both runs have the same steps. */
static void test_ends_that_are_not_finite(void **state) {
    static const char *const splits[] = {"--tp 1", "--tp 2 --dp 2 --use-distributed-optimizer", "--tp 1 --pp 2"};
    static const char flags[] = "--data LICENSE --sample 0 --lr 1000 --min-lr 1000 --clip 0 --warmup 0 --layers 2 "
                                "--hidden 16 --seq 8 --batch 4 --eval-interval 0";
    char words[WORDS], text[4096], sentence[64];
    (void)state;
    for (size_t i = 0; i < COUNT(splits); i++) {
        int last;
        print_to(words, sizeof words, "%s %s --steps 200", flags, splits[i]);
        expect_error(words, "stopping after 10 such steps in a row");
        read_text("err", text, sizeof text);
        last = (int)strtol(strstr(text, "step ") + 5, NULL, 10);
        for (int k = last - 9; k < last; k += 4) {
            print_to(words, sizeof words, "%s %s --steps %d", flags, splits[i], k);
            print_to(sentence, sizeof sentence, "train_gpt: step %d: ", k);
            assert_int_equal(run_program(words), 1);
            read_text("err", text, sizeof text);
            if (strncmp(text, sentence, strlen(sentence)) != 0 || strchr(text, '\n')[1] ||
                !strstr(text, ": the run ends without a result\n"))
                fail_msg("%s: %s", words, text);
        }
    }
}

/* f16 whose loss scale has not yet become small enough at the end of the run: no step has changed a weight. */
static void test_all_steps_skipped(void **state) {
    static const char flags[] = "--data LICENSE --sample 0 --layers 1 --hidden 16 --seq 8 --batch 2 --dtype f16";
    char words[WORDS], text[4096];
    (void)state;
    for (int dp = 1; dp <= 2; dp++) {
        print_to(words, sizeof words, "%s --dp %d --steps 3 --checkpoint %s", flags, dp, in_scratch("run"));
        assert_int_equal(run_program(words), 0);
        read_text("err", text, sizeof text);
        assert_string_equal(text,
                            "train_gpt: warning: step 3: all 3 steps were skipped, because the gradients were not "
                            "finite with a loss scale that is still shrinking: the weights are those of the "
                            "beginning\n");
        print_to(words, sizeof words, "%s --dp %d --steps 30 --checkpoint %s --resume", flags, dp, in_scratch("run"));
        expect_success(words); /* it goes on with the smaller scale */
        expect_success(words); /* no step is left */
        forget("run");
    }
}

/* What check_end says of the last step of a run. */
static void test_what_the_end_says(void **state) {
    static const float nan = (float)NAN, inf = (float)INFINITY;
    static const struct {
        float loss, norm, validation;
        int skipped; /* in a row, at the smallest scale */
        int64_t all; /* skipped steps of the run, which has 4 */
        mt_status status;
    } cases[] = {{1, 1, 1, 0, 0, MT_SUCCESS},          {1, inf, 1, 0, 3, MT_SUCCESS},
                 {nan, nan, 1, 1, 1, MT_ERR_ARGUMENT}, {inf, 1, 1, 0, 1, MT_ERR_ARGUMENT},
                 {1, inf, 1, 1, 1, MT_ERR_ARGUMENT},   {1, 1, nan, 0, 0, MT_ERR_ARGUMENT},
                 {1, 1, -inf, 0, 0, MT_ERR_ARGUMENT},  {1, inf, 1, 0, 4, MT_SUCCESS}};
    static job j;
    (void)state;
    j.o.steps = 10;
    for (size_t i = 0; i < COUNT(cases); i++) {
        trainer t = {.job = &j, .first_step = 6, .skipped = cases[i].skipped, .scaler = {.skipped = 5 + cases[i].all}};
        mt_status status = check_end(&t, 5, &cases[i].loss, cases[i].norm, &cases[i].validation);
        if (status != cases[i].status) fail_msg("case %d: %s", (int)i, mt_status_name(status));
        t.first_step = 10; /* nothing was left to do */
        assert_int_equal(check_end(&t, 5, &cases[i].loss, cases[i].norm, NULL), MT_SUCCESS);
    }
}

static double bytes_per_parameter(const char *flags) {
    char words[WORDS], text[4096], *at;
    long long parameters;
    size_t model, state;
    print_to(words, sizeof words, "--data megatron.h --hidden 256 --tp 2 --dp 4 --dry-run %s", flags);
    assert_int_equal(run_program(words), 0);
    read_text("out", text, sizeof text);
    at = strstr(text, "per rank: ");
    assert_non_null(at);
    assert_int_equal(sscanf(at, "per rank: %lld parameters parameters, gradients %zu bytes optimizer state %zu bytes",
                            &parameters, &model, &state),
                     3);
    return (double)(model + state) / (double)parameters;
}

/* Bytes per parameter for parameters, gradients and optimizer state. The tolerance of 0.03 is for the tokens of a batch
   and for alignment. */
static void test_dry_run_of_the_distributed_optimizer(void **state) {
    static const double want[] = {16, 8 + 8 / 4.0, 18, 6 + 12 / 4.0};
    static const char *const flags[] = {"", "--use-distributed-optimizer", "--dtype bf16",
                                        "--dtype bf16 --use-distributed-optimizer"};
    char text[4096];
    (void)state;
    for (size_t i = 0; i < COUNT(flags); i++) {
        double got = bytes_per_parameter(flags[i]);
        if (!(got >= want[i] && got < want[i] + 0.03))
            fail_msg("'%s': %g bytes per parameter, not %g", flags[i], got, want[i]);
    }
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "data     (4 ranks)  reduce_scatter      1 calls"));
    assert_non_null(strstr(text, "data     (4 ranks)  all_gather          1 calls"));
}

/* The seed and dropout change the results; otherwise the comparison of equal runs would prove nothing. */
static void test_seed_and_dropout_matter(void **state) {
    static const char *const model = "--layers 1 --hidden 16 --heads 2 --seq 8 --batch 2";
    curve a = train_curve(model, "--dropout 0.1"), b = train_curve(model, "--dropout 0.1"), c = train_curve(model, "");
    curve d = train_curve(model, "--dropout 0.1 --seed 5");
    (void)state;
    assert_memory_equal(&a, &b, sizeof a); /* same inputs and split, so the same bits */
    assert_true(fabs(a.loss[5] - c.loss[5]) > 1e-4);
    assert_true(fabs(a.loss[5] - d.loss[5]) > 1e-4);
}

/* A step sends what a dry run says that it sends. */
static void assert_done_as_planned(const char *model, const char *dry) {
    char words[WORDS], wet[4096];
    const char *at = strstr(dry, "communication of one step");
    print_to(words, sizeof words, "%s --steps 1 --sample 0", model);
    assert_int_equal(run_program(words), 0);
    read_text("out", wet, sizeof wet);
    assert_non_null(at);
    assert_non_null(strstr(wet, at));
}

static void test_dry_run_and_ledger(void **state) {
    static const char *const model =
        "--tp 4 --dp 2 --layers 3 --hidden 32 --heads 8 --seq 16 --batch 8 --data megatron.h";
    char words[WORDS], dry[4096];
    (void)state;
    print_to(words, sizeof words, "%s --dry-run", model);
    assert_int_equal(run_program(words), 0);
    read_text("out", dry, sizeof dry);
    assert_null(strstr(dry, "step "));
    assert_non_null(strstr(dry, "per rank: "));
    /* 4 per layer, 1 for the embedding, 1 for the head's input; each of 4 sequences x 16 tokens x 32 floats. */
    assert_non_null(strstr(dry, "tensor   (4 ranks)  all_reduce         14 calls        114688 bytes"));
    assert_non_null(strstr(dry, "tensor   (4 ranks)  all_gather          1 calls          4096 bytes"));
    assert_done_as_planned(model, dry);
}

/* The paper's four models, one rank of up to 8 x 64: the dry run agrees with the formulas, including biases, norms and
   positions. The vocabulary of 50257 is padded to a multiple of the number of tensor ranks. */
static void test_configurations(void **state) {
    static const struct {
        const char *name;
        long long h, layers, tp;
        double billions;
    } paper[] = {{"gpt2-1.2b", 1536, 40, 1, 1.2},
                 {"gpt2-2.5b", 1920, 54, 2, 2.5},
                 {"gpt2-4.2b", 2304, 64, 4, 4.2},
                 {"gpt2-8.3b", 3072, 72, 8, 8.3}};
    char words[WORDS], text[4096], line[256];
    (void)state;
    for (size_t i = 0; i < 4; i++) {
        long long h = paper[i].h, l = paper[i].layers, t = paper[i].tp, rows = (50257 + t - 1) / t;
        long long whole = l * (12 * h * h + 13 * h) + (50257 + 1024) * h + 2 * h;
        long long rank = l * (12 * h * h / t + 7 * h / t + 6 * h) + (rows + 1024) * h + 2 * h;
        double all;
        print_to(words, sizeof words, "--config %s --dp 64 --batch 512 --dtype f16 --dry-run --sample 0",
                 paper[i].name);
        assert_int_equal(run_program(words), 0);
        read_text("out", text, sizeof text);
        assert_true(fabs((double)whole / 1e9 - paper[i].billions) < 0.05);
        snprintf(line, sizeof line, " %lld parameters in f16; %lld x tensor, 64 x data", whole, t);
        assert_non_null(strstr(text, line));
        snprintf(line, sizeof line, "per rank: %lld parameters", rank);
        assert_non_null(strstr(text, line));
        snprintf(line, sizeof line, "(%lld ranks)  all_reduce     %6lld calls  %12lld bytes", t, 5 * l + 2,
                 (5 * l + 2) * 8 * 1024 * h * 2); /* 4 per layer, and 1 for its recomputation */
        assert_true((strstr(text, line) != NULL) == (t > 1));
        assert_int_equal(sscanf(strstr(text, "  optimizer state") + 20, "%lf", &all), 1);
        assert_true(all >= 12.0 * (double)rank && all < 12.001 * (double)rank);
        assert_int_equal(sscanf(strstr(text, "gradients ") + 10, "%lf", &all), 1);
        assert_true(all >= 6.0 * (double)rank && all < 6.001 * (double)rank);
        assert_int_equal(sscanf(strstr(text, "  all ") + 5, "%lf", &all), 1);
        assert_true(all < 32e9); /* the memory of the paper's GPUs */
    }
    assert_int_equal(run_program("--config gpt2-8.3b --layers 2 --tp 4 --dry-run --sample 0"), 0);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "GPT: 2 layers, hidden 3072, heads 32, vocabulary 50257,"));
    assert_non_null(strstr(text, "4 x tensor"));
}

/* Runs a plan on a machine that only computes products and attention, both with their peak. Returns the MFU. */
static double planned_mfu(const char *flags) {
    static const char rates[] = "name fast\ngemm * * * * 1e9\nattention * * 1e9\nmemory * * 1e30\nlink 1e30 0\n"
                                "network 1e30 0\npeak f32 1e9\n";
    char words[WORDS], text[16384];
    write_bytes("machine", rates, strlen(rates));
    print_to(words, sizeof words,
             "--data LICENSE --dry-run --sample 0 --layers 3 --hidden 48 --seq 16 --batch 8 --machine %s %s",
             in_scratch("machine"), flags);
    expect_success(words);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, ", MFU "));
    return strtod(strstr(text, ", MFU ") + 6, NULL);
}

/* Padding of heads and vocabulary, copies of key/value heads and recomputation take time, and do not count as FLOPs of
   the model. The numbers of weights of a layer and of the head are of all ranks together. */
static void test_utilization_of_a_plan(void **state) {
    static const struct {
        const char *flags;
        double heads, kv, ffn, vocab;           /* of the model */
        double all_heads, all_kv, all_ffn, all; /* with padding and copies */
        int again;                              /* 1: full recomputation, but for the last products of MLPs */
    } plans[] = {{"--heads 6 --tp 1", 6, 6, 192, 256, 6, 6, 192, 256, 0},
                 {"--heads 6 --tp 2 --dp 2", 6, 6, 192, 256, 6, 6, 192, 256, 0},
                 {"--heads 6 --tp 4", 6, 6, 192, 256, 8, 8, 192, 256, 0},
                 {"--heads 6 --tp 4 --sequence-parallel --dp 2", 6, 6, 192, 256, 8, 8, 192, 256, 0},
                 {"--heads 8 --kv-heads 1 --tp 8", 8, 1, 192, 256, 8, 8, 192, 256, 0},
                 {"--heads 8 --kv-heads 2 --tp 8", 8, 2, 192, 256, 8, 8, 192, 256, 0},
                 {"--heads 6 --tp 4 --ffn 190", 6, 6, 190, 256, 8, 8, 192, 256, 0},
                 {"--heads 8 --tp 8 --vocab 257", 8, 8, 192, 257, 8, 8, 192, 264, 0},
                 {"--heads 6 --tp 1 --recompute full", 6, 6, 192, 256, 6, 6, 192, 256, 1},
                 {"--heads 6 --tp 4 --recompute full", 6, 6, 192, 256, 8, 8, 192, 256, 1}};
    (void)state;
    for (size_t i = 0; i < COUNT(plans); i++) {
        double h = 48, head = h / plans[i].heads, seen = 17.0 / 2, got = planned_mfu(plans[i].flags), want;
        double layer = h * head * (2 * plans[i].heads + 2 * plans[i].kv) + 2 * h * plans[i].ffn + 2 * seen * h;
        double rank_layer = h * head * (2 * plans[i].all_heads + 2 * plans[i].all_kv) + 2 * h * plans[i].all_ffn +
                            2 * seen * head * plans[i].all_heads;
        double again = plans[i].again ? rank_layer - h * plans[i].all_ffn : 0;
        want = 100 * 3 * (3 * layer + h * plans[i].vocab) / (3 * (3 * rank_layer + h * plans[i].all) + 3 * again);
        if (!(fabs(got - want) <= 0.051)) fail_msg("%s: MFU %.1f %%, must be %.3f %%", plans[i].flags, got, want);
        if (i > 1) assert_true(got < 100);
    }
    forget("machine");
}

/* Rates that no machine has give no numbers, which are not printed. */
static void test_dry_run_on_no_machine(void **state) {
    static const char *const rates[] = {
        "name none\nlink 1e30 0\nnode 8\ngemm * * * * 1e30\nattention * * 1e30\nmemory * * 1e30\noperator 1e308\n",
        "name none\nlink 1e30 0\nnode 8\ngemm * * * * 1e-308\nattention * * 1e-308\nmemory * * 1e-308\noperator "
        "1\npeak f32 1e308\n",
        "name none\nlink 1e30 0\nnode 8\ngemm * * * * 1e30\nattention * * 1e30\nmemory * * 1e30\noperator 1\npeak f32 "
        "1e-305\n"};
    char words[WORDS], text[16384];
    (void)state;
    for (size_t i = 0; i < COUNT(rates); i++) {
        write_bytes("machine", rates[i], strlen(rates[i]));
        print_to(words, sizeof words,
                 "--layers 2 --hidden 32 --heads 8 --seq 16 --batch 8 --data megatron.h --dry-run "
                 "--machine %s",
                 in_scratch("machine"));
        assert_int_equal(run_program(words), 1);
        read_text("err", text, sizeof text);
        assert_non_null(strstr(text, "train_gpt: the rates of none predict a step of "));
        read_text("out", text, sizeof text);
        assert_null(strstr(text, "inf"));
        assert_null(strstr(text, "nan"));
    }
    forget("machine");
}

/* On a machine whose operators each take a second, and whose messages and collectives take none. */
static void test_dry_run_on_a_machine(void **state) {
    static const char *const model = "--layers 2 --hidden 32 --heads 8 --seq 16 --batch 8 --data megatron.h --dry-run";
    static const char *const parts = "products %lf %%, attention %lf %%, other operators %lf %%, optimizer %lf %%, "
                                     "communication %lf %%, bubble %lf %%";
    char words[WORDS], text[16384];
    double part[6], seconds, tokens, all = 0;
    const char *at;
    (void)state;
    static const char rates[] = "name slow\ngemm * * * * 1e30\nattention * * 1e30\nmemory * * 1e30\noperator 1\n"
                                "link 1e30 0\nnode 8\ncapacity 1000\npeak f32 1e6\n";
    write_bytes("machine", rates, strlen(rates));
    for (int pp = 1; pp <= 2; pp++) {
        print_to(words, sizeof words, "%s --tp 2 --pp %d --machine %s", model, pp, in_scratch("machine"));
        assert_int_equal(run_program(words), 0);
        read_text("out", text, sizeof text);
        at = strstr(text, "time of a step on slow: ");
        assert_non_null(at);
        assert_int_equal(sscanf(at + 24, "%lf s, %lf tokens/s", &seconds, &tokens), 2);
        assert_true(seconds > 50 && fabs(tokens - 8 * 16 / seconds) <= 0.5);
        assert_non_null(strstr(at, ", MFU "));
        at = strstr(at, "products ");
        assert_non_null(at);
        assert_int_equal(sscanf(at, parts, &part[0], &part[1], &part[2], &part[3], &part[4], &part[5]), 6);
        all = part[0] + part[1] + part[2] + part[3] + part[4] + part[5];
        assert_true(all > 99.6 && all < 100.4);
        assert_non_null(strstr(at, "\n  hidden behind the above: "));
        assert_true((part[5] > 1) == (pp == 2) && part[4] < 0.1 && part[0] > 5 && part[1] > 1 && part[3] > 0.1);
        assert_non_null(strstr(at, "stage 0 does not fit: it needs 0.0 of 0.0 GB"));
        assert_true((strstr(at, "stage 1 does not fit") != NULL) == (pp == 2));
        assert_non_null(strstr(at, "\n  mt_gemm "));
        assert_non_null(strstr(at, "\n  all_reduce, 2 ranks, 0 to 1 "));
    }
    print_to(words, sizeof words,
             "--data LICENSE --layers 2 --hidden 32 --heads 4 --seq 32 --batch 2 --tp 1 --cp 2 --dry-run --machine %s",
             in_scratch("machine"));
    expect_success(words);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "\n--cp-comm-type: p2p "));
    assert_non_null(strstr(text, " s (the fastest)"));
    print_to(words, sizeof words,
             "--data LICENSE --layers 2 --hidden 32 --heads 2 --seq 32 --batch 2 --tp 1 --cp 4 --dry-run --machine %s",
             in_scratch("machine"));
    expect_success(words);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, ", a2a is not possible\n"));
    write_bytes("machine", "gemm f32 1 2 3\n", 15);
    expect_error(words, "machine, line 1: 'gemm' has 4 values, must have 5");
    print_to(words, sizeof words, "--data megatron.h --machine %s", in_scratch("machine"));
    expect_error(words, "train_gpt: --machine needs --dry-run");
    forget("machine");
}

/* The dry run of 4 context ranks, with slow products or with slow links. Reads the times of the ring, of all-gather and
   of all-to-all. Returns the number of the fastest, as the program says. */
static int fastest_way(const char *flops, const char *link, double seconds[3]) {
    static const char *const names[] = {"p2p ", "allgather ", "a2a "};
    char words[WORDS], text[8192], machine[512];
    const char *line, *at;
    int fastest = -1;
    print_to(machine, sizeof machine,
             "name made up\ngemm f32 * * * %s\nattention * f32 %s\nmemory * * 1e12\noperator 1e-6\nnode 8\n"
             "link %s 1e-6\nnetwork %s 1e-6\noverlap 1\ncapacity 1e12\n",
             flops, flops, link, link);
    write_bytes("machine", machine, strlen(machine));
    print_to(
        words, sizeof words,
        "--data megatron.h --layers 2 --hidden 64 --heads 8 --seq 512 --batch 1 --tp 1 --cp 4 --dry-run --machine %s",
        in_scratch("machine"));
    expect_success(words);
    read_text("out", text, sizeof text);
    line = strstr(text, "\n--cp-comm-type: ");
    assert_non_null(line);
    for (int i = 0; i < 3; i++) {
        char said[64];
        at = strstr(line, names[i]);
        assert_non_null(at);
        assert_int_equal(sscanf(at + strlen(names[i]), "%lf s", &seconds[i]), 1);
        print_to(said, sizeof said, "%.*s", (int)strcspn(at, ",\n"), at);
        if (strstr(said, "(the fastest)")) fastest = i;
    }
    forget("machine");
    return fastest;
}

/* A ring is hidden behind long products. Over slow links the way that sends least is the fastest. */
static void test_fastest_way_of_context_ranks(void **state) {
    double seconds[3];
    (void)state;
    assert_int_equal(fastest_way("1e9", "1e9", seconds), 0);
    assert_true(seconds[0] < seconds[1] && seconds[0] < seconds[2]);
    assert_int_equal(fastest_way("1e13", "1e7", seconds), 2);
    assert_true(seconds[2] < seconds[0] && seconds[2] < seconds[1] && seconds[0] != seconds[1]);
}

/* The dry run lists each stage. The embedding and its copy count as one parameter of the model. */
static void test_dry_run_of_a_pipeline(void **state) {
    static const char *const model =
        "--pp 3 --tp 1 --dp 2 --layers 3 --hidden 32 --heads 8 --seq 16 --batch 8 --micro-batch 1 "
        "--data megatron.h";
    char words[WORDS], dry[4096];
    (void)state;
    print_to(words, sizeof words, "%s --dry-run", model);
    assert_int_equal(run_program(words), 0);
    read_text("out", dry, sizeof dry);
    assert_non_null(
        strstr(dry, "46880 parameters in f32")); /* 256 x 32, 16 x 32, 3 x (12 x 32 x 32 + 13 x 32), 2 x 32 */
    assert_non_null(strstr(dry, "3 pipeline stages, 1f1b"));
    assert_non_null(strstr(dry, "per rank of stage 0: 21408 parameters"));
    assert_non_null(strstr(dry, "per rank of stage 1: 12704 parameters"));
    assert_non_null(strstr(dry, "per rank of stage 2: 20960 parameters"));
    /* 4 micro-batches of 16 tokens x 32 floats, in each direction */
    assert_non_null(strstr(dry, "pipeline (3 ranks)  send                4 calls          8192 bytes"));
    assert_non_null(strstr(dry, "pipeline (3 ranks)  recv                4 calls          8192 bytes"));
    assert_non_null(strstr(dry, "embedding (2 ranks)  all_reduce          1 calls         32768 bytes"));
    assert_done_as_planned(model, dry);
    expect_error("--pp 3 --layers 4 --data megatron.h --tp 1", "4 layers cannot be divided over 3 pipeline stages");
    expect_error("--pp 32 --tp 8 --dp 8 --data megatron.h",
                 "--tp 8 x --cp 1 x --dp 8 x --pp 32 are more than 1024 ranks");
    expect_error("--schedule zb", "expected 1f1b or gpipe");
}

static void test_sampling(void **state) {
    char one[4096], four[4096];
    static const char *const words = "--data megatron.h --layers 1 --hidden 16 --heads 4 --seq 16 --batch 4 --steps 3 "
                                     "--sample 40 --prompt static --lr 0 --min-lr 0";
    char with[512];
    (void)state;
    assert_int_equal(run_program(words), 0);
    read_text("out", one, sizeof one);
    assert_non_null(strstr(one, "continuation of static\n---\n"));
    snprintf(with, sizeof with, "%s --tp 4 --dp 2 --sequence-parallel", words);
    assert_int_equal(run_program(with), 0);
    read_text("out", four, sizeof four);
    assert_string_equal(strstr(one, "continuation"), strstr(four, "continuation"));
    snprintf(with, sizeof with, "%s --layers 2", words);
    assert_int_equal(run_program(with), 0);
    read_text("out", one, sizeof one);
    snprintf(with, sizeof with, "%s --layers 2 --tp 2 --pp 2 --dp 2", words);
    assert_int_equal(run_program(with), 0);
    read_text("out", four, sizeof four);
    assert_string_equal(strstr(one, "continuation"), strstr(four, "continuation"));
}

/* ---- token files ------------------------------------------------------------------------------------------------- */

enum { BIN_TOKENS = 4000 };

static void write_bin(const char *name, int32_t magic, int32_t version, int32_t announced, int tokens,
                      uint16_t largest) {
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
    char words[WORDS], text[4096];
    (void)state;
    write_bin("good.bin", LLMC_MAGIC, 1, BIN_TOKENS, BIN_TOKENS, 50256);
    print_to(words, sizeof words, SMALL "--data %s", in_scratch("good.bin"));
    assert_int_equal(run_program(words), 0);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "vocabulary 50257"));
    assert_non_null(strstr(text, "data: 4000 tokens"));
    assert_non_null(strstr(text, "loss 10.8")); /* ln 50257 = 10.82 */
}

/* A token file for train_bert has a byte for each token behind the tokens. */
static void test_token_file_with_marks(void **state) {
    static unsigned char file[LLMC_HEADER_BYTES + 3 * 1000];
    int32_t header[6] = {LLMC_MAGIC, 1, 1000, 0, 0, 1};
    char words[WORDS];
    (void)state;
    memcpy(file, header, sizeof header);
    memset(file + LLMC_HEADER_BYTES + 2000, 3, 1000);
    write_bytes("good.bin", file, sizeof file);
    print_to(words, sizeof words, SMALL "--data %s --vocab 1", in_scratch("good.bin"));
    assert_int_equal(run_program(words), 0);
    write_bytes("good.bin", file, sizeof file - 1);
    expect_error(words, "announces 1000 tokens");
}

static void test_bad_files(void **state) {
    char words[WORDS];
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
        print_to(words, sizeof words, SMALL "--data %s", in_scratch(bad[i].name));
        expect_error(words, bad[i].sentence);
    }
    write_bytes("header.bin", "abc", 3);
    print_to(words, sizeof words, SMALL "--data %s", in_scratch("header.bin"));
    expect_error(words, "not a token file of llm.c");
    write_bytes("empty.txt", "", 0);
    print_to(words, sizeof words, SMALL "--data %s", in_scratch("empty.txt"));
    expect_error(words, "the data has 0 tokens, too few for --seq 8");
    write_bytes("short.txt", "0123456789012345678901234567890123456789", 39);
    print_to(words, sizeof words, SMALL "--data %s", in_scratch("short.txt"));
    expect_error(words, "the data has 39 tokens, too few for --seq 8 (needs 40)");
    expect_error("--data /nonexistent/text", "cannot read /nonexistent/text: No such file");
    expect_whole_files(SMALL);
    write_bin("vocab.bin", LLMC_MAGIC, 1, BIN_TOKENS, BIN_TOKENS, 60000);
    print_to(words, sizeof words, SMALL "--data %s --seq 900 --batch 4", in_scratch("vocab.bin"));
    expect_error(words, "vocab.bin: token 2001 is 60000, and the vocabulary of the model is 50257");
}

/* A token that the vocabulary lacks is found before the first step, wherever it is, in the data for training and in
   those for validation. The message has its file and its place. */
static void test_token_beyond_the_vocabulary(void **state) {
    static unsigned char text[1000];
    static const int places[] = {0, 1, 500, 899, 900, 998, 999};
    char words[WORDS], wanted[128], out[4096];
    (void)state;
    for (size_t i = 0; i < COUNT(places); i++) {
        memset(text, 'a', sizeof text);
        text[places[i]] = 200;
        write_bytes("text", text, sizeof text);
        print_to(words, sizeof words, SMALL "--data %s --vocab 200", in_scratch("text"));
        print_to(wanted, sizeof wanted, "text: byte %d is 200, and the vocabulary of the model is 200", places[i] + 1);
        expect_error(words, wanted);
        read_text("out", out, sizeof out);
        assert_null(strstr(out, "step "));
        print_to(words, sizeof words, SMALL "--data %s --vocab 201", in_scratch("text"));
        expect_success(words);
    }
    print_to(words, sizeof words, SMALL "--data %s --vocab 201 --dry-run --batch 4", in_scratch("text"));
    expect_success(words);
    print_to(words, sizeof words, "--init-from tests/golden/gpt2_hf --steps 1 --sample 0 --data %s",
             in_scratch("text"));
    expect_error(words, "text: byte 1 is 97, and the vocabulary of the model is 61");
    print_to(words, sizeof words, SMALL "--data %s --vocab 201 --sample 2 --prompt abz\xc8\xc9", in_scratch("text"));
    expect_error(words, "--prompt: byte 5 is 201, and the vocabulary of the model is 201");
}

/* Without --data, a place is that in one of the project's files. */
static void test_token_beyond_in_own_data(void **state) {
    char home[MT_PATH_MAX];
    (void)state;
    assert_non_null(getcwd(home, sizeof home));
    for (size_t i = 0; i < OWN_DATA; i++) write_bytes(own_data[i], "abcdefghijklmnop", 16);
    write_bytes("mt_kernels.cuh", "ab\xc8", 3);
    write_bytes("mt_parallel.h", "", 0);
    assert_int_equal(chdir(scratch), 0);
    expect_error(SMALL "--vocab 113 --seq 4", "mt_kernels.cuh: byte 3 is 200, and the vocabulary of the model is 113");
    assert_int_equal(chdir(home), 0);
    for (size_t i = 0; i < OWN_DATA; i++) forget(own_data[i]);
}

/* The smallest file that is accepted: it can be used for validation, and sampling starts from its last sequence. */
static void test_smallest_file(void **state) {
    char words[WORDS], bytes[4 * 8 + 8];
    (void)state;
    memset(bytes, 'a', sizeof bytes);
    write_bytes("short.txt", bytes, sizeof bytes);
    print_to(words, sizeof words,
             "--layers 1 --hidden 8 --heads 2 --seq 8 --batch 2 --steps 2 --eval-interval 1 --sample 9 "
             "--data %s",
             in_scratch("short.txt"));
    assert_int_equal(run_program(words), 0);
}

/* The calls of sampling need memory that depends on the number of tokens of a call, and a longer call may need less
   than a shorter one. The arena of a small model has room for all of them: for the prompt, for what begins a new cache,
   and for single tokens. */
static void test_sampling_fits_into_the_plan(void **state) {
    static const char *const models[] = {"--heads 4 --kv-heads 1 --hidden 8",  "--heads 6 --kv-heads 1 --hidden 12",
                                         "--heads 6 --kv-heads 2 --hidden 12", "--heads 8 --kv-heads 2 --hidden 8",
                                         "--heads 2 --kv-heads 2 --hidden 16", "--heads 16 --kv-heads 1 --hidden 16"};
    static const char *const splits[] = {"--dtype f32 --tp 1", "--dtype bf16 --tp 1", "--dtype f16 --tp 2",
                                         "--dtype bf16 --tp 1 --pp 2"};
    char words[WORDS], text[256];
    (void)state;
    memset(text, 'a', sizeof text);
    write_bytes("text", text, sizeof text);
    for (int seq = 2; seq <= 32; seq += seq < 10 ? 1 : 11)
        for (size_t i = 0; i < COUNT(models) * COUNT(splits); i++) {
            print_to(words, sizeof words,
                     "--data %s --layers 2 %s --seq %d --batch 1 --steps 1 --vocab 257 --eval-interval 0 --sample %d "
                     "--no-pinning %s",
                     in_scratch("text"), models[i % COUNT(models)], seq, 1 + seq % 3, splits[i / COUNT(models)]);
            expect_success(words);
        }
}

/* A load needs memory for a shard of a parameter in f32, which may be more than a step of short sequences needs. */
static void test_loading_fits_into_the_plan(void **state) {
    static const char *const splits[] = {"--dtype f32 --tp 1",
                                         "--dtype bf16 --tp 1",
                                         "--dtype f16 --tp 2",
                                         "--dtype bf16 --tp 1 --pp 2",
                                         "--dtype f32 --tp 1 --dp 2 --batch 2 --use-distributed-optimizer",
                                         "--dtype f16 --tp 1 --dp 2 --batch 2 --use-distributed-optimizer"};
    static const char *const run = "--data LICENSE --eval-interval 0 --sample 0 --no-pinning --batch 1 ";
    char words[WORDS];
    (void)state;
    print_to(words, sizeof words,
             "%s --steps 1 --tp 1 --layers 2 --hidden 64 --heads 8 --seq 8 --ffn 1024 --activation swiglu "
             "--checkpoint %s",
             run, in_scratch("model"));
    expect_success(words);
    for (size_t i = 0; i < COUNT(splits); i++) {
        print_to(words, sizeof words, "%s --steps 1 --seq 2 --init-from %s %s --checkpoint %s", run,
                 in_scratch("model"), splits[i], in_scratch("runs"));
        expect_success(words);
        print_to(words, sizeof words, "%s --steps 2 --seq 2 %s --checkpoint %s --resume", run, splits[i],
                 in_scratch("runs"));
        expect_success(words);
        forget("runs");
    }
    forget("model");
}

/* A run that is refused leaves the log of the previous run unchanged. */
static void test_refusal_keeps_the_log(void **state) {
    char words[WORDS], text[64];
    (void)state;
    write_bytes("log.csv", "precious", 8);
    print_to(words, sizeof words, "--data megatron.h --heads 5 --log %s", in_scratch("log.csv"));
    expect_error(words, "heads 5");
    print_to(words, sizeof words, "--data megatron.h --dry-run --log %s", in_scratch("log.csv"));
    assert_int_equal(run_program(words), 0);
    read_text("log.csv", text, sizeof text);
    assert_string_equal(text, "precious");
}

/* A log that another run has locked is not touched; when that run has ended, it is written. */
static void test_log_of_another_run(void **state) {
    static const char *const flags[] = {"--log", "--hash-log"};
    char words[WORDS], text[4096];
    (void)state;
    for (int i = 0; i < 2; i++) {
        write_bytes("log.csv", "precious", 8);
        FILE *other = fopen(in_scratch("log.csv"), "a");
        assert_true(other && flock(fileno(other), LOCK_EX | LOCK_NB) == 0);
        print_to(words, sizeof words,
                 "--data megatron.h --layers 1 --hidden 16 --heads 2 --seq 8 --batch 2 --steps 1 --warmup 0 --sample 0 "
                 "--eval-interval 0 %s %s",
                 flags[i], in_scratch("log.csv"));
        expect_error(words, "log.csv: another run writes to it");
        read_text("log.csv", text, sizeof text);
        assert_string_equal(text, "precious");
        fclose(other);
        expect_success(words);
        read_text("log.csv", text, sizeof text);
        assert_true(!strstr(text, "precious") && strlen(text) > 20);
    }
    forget("log.csv");
}

#define SIX_STEPS                                                                                                      \
    "--data %s --layers 2 --hidden 32 --heads 4 --seq 16 --batch 4 --steps 6 --sample 0 --eval-interval 0 --warmup 0 "

/* Reads the loss of each step in a log, from line `first` on. Returns their number. */
static int read_losses(const char *log, int first, double *loss) {
    char text[2048];
    int n = 0, step;
    read_text(log, text, sizeof text);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (sscanf(line, "%d,%lf", &step, &loss[n]) != 2) continue;
        assert_int_equal(step, first + n);
        n++;
    }
    return n;
}

static void run_six_steps(const char *words) {
    char all[WORDS], text[1024];
    print_to(all, sizeof all, SIX_STEPS "%s", in_scratch("text"), words);
    if (run_program(all) == 0) return;
    read_text("err", text, sizeof text);
    fail_msg("train_gpt %s: %s", all, text);
}

static void refuse_six_steps(const char *flags, const char *sentence) {
    char all[WORDS];
    print_to(all, sizeof all, SIX_STEPS "%s", in_scratch("text"), flags);
    expect_error(all, sentence);
}

/* Checks that the message appears once, whatever the number of ranks, and that no step was run. */
static void expect_one_sentence(const char *sentence) {
    char text[4096];
    read_text("err", text, sizeof text);
    if (!strstr(text, sentence) || strchr(text, '\n') != text + strlen(text) - 1)
        fail_msg("not one sentence: %s", text);
    read_text("out", text, sizeof text);
    assert_null(strstr(text, "step     1/6"));
}

/* The log has the last three of six steps. */
static void expect_rest(const char *log, const double *whole) {
    double rest[8];
    assert_int_equal(read_losses(log, 4, rest), 3);
    for (int i = 0; i < 3; i++)
        if (!(fabs(rest[i] - whole[3 + i]) <= 1e-5 * whole[3 + i]))
            fail_msg("step %d: loss %.9g, must be %.9g", 4 + i, rest[i], whole[3 + i]);
}

/* A run that is stopped after three of six steps continues with the other three, on another split. */
static void test_checkpoints(void **state) {
    double whole[8], rest[8], again[8];
    char words[WORDS];
    char c[SCRATCH_PATH];
    (void)state;
    write_text();
    print_to(c, sizeof c, "%s", in_scratch("checkpoints"));
    print_to(words, sizeof words, "--checkpoint %s --save-interval 3 --log %s", c, in_scratch("whole.csv"));
    run_six_steps(words);
    assert_int_equal(read_losses("whole.csv", 1, whole), 6);
    forget("checkpoints/step-00000006");
    print_to(words, sizeof words, "--init-from %s/step-00000003 --steps 1 --log %s", c, in_scratch("init.csv"));
    run_six_steps(words);
    assert_int_equal(read_losses("init.csv", 1, again), 1);
    assert_true(again[0] < whole[1]); /* the model has learned */
    print_to(words, sizeof words, "--init-from %s --steps 1 --log %s", c, in_scratch("init.csv"));
    run_six_steps(words);
    assert_int_equal(read_losses("init.csv", 1, rest), 1);
    assert_true(rest[0] == again[0]); /* the newest checkpoint of a directory is that of step 3 */
    print_to(words, sizeof words, "--checkpoint %s", c);
    refuse_six_steps(words, "has a checkpoint of step 3: go on with --resume");
    print_to(words, sizeof words, "--checkpoint %s --resume --batch 8", c);
    refuse_six_steps(words, "is of '--batch 4', this run is of '--batch 8'");
    print_to(words, sizeof words, "--checkpoint %s --resume --seed 1", c);
    refuse_six_steps(words, "is of '--seed 1234', this run is of '--seed 1'");
    print_to(words, sizeof words, "--checkpoint %s --resume --heads 8", c);
    refuse_six_steps(words, "train_gpt: --heads is 8, the model in ");
    refuse_six_steps(words, "step-00000003 has 4 heads\n");
    expect_one_sentence("--heads is 8");
    print_to(words, sizeof words, "--checkpoint %s --resume", in_scratch("whole.csv"));
    refuse_six_steps(words, "whole.csv/.lock: cannot open it: Not a directory");
    print_to(words, sizeof words, "--checkpoint %s --resume --tp 1 --dp 4 --log %s", c, in_scratch("rest.csv"));
    run_six_steps(words);
    expect_rest("rest.csv", whole);
    run_six_steps(words); /* no step is left, and nothing is saved again */
    assert_int_equal(read_losses("rest.csv", 4, rest), 3);
    forget("checkpoints");
}

/* A checkpoint of context ranks goes on with another number of them, and without any. */
static void test_checkpoints_of_context_ranks(void **state) {
    static const char *const splits[] = {"--tp 1 --cp 4", "--tp 2 --sequence-parallel", "--tp 1 --cp 2 --pp 2"};
    double whole[8], one[2], many[2];
    char words[WORDS], c[SCRATCH_PATH];
    (void)state;
    write_text();
    print_to(c, sizeof c, "%s", in_scratch("checkpoints"));
    print_to(words, sizeof words,
             "--tp 1 --cp 2 --dp 2 --use-distributed-optimizer --checkpoint %s --save-interval 3 --log %s", c,
             in_scratch("whole.csv"));
    run_six_steps(words);
    assert_int_equal(read_losses("whole.csv", 1, whole), 6);
    for (size_t i = 0; i < COUNT(splits); i++) {
        forget("checkpoints/step-00000006");
        print_to(words, sizeof words, "%s --checkpoint %s --resume --log %s", splits[i], c, in_scratch("rest.csv"));
        run_six_steps(words);
        expect_rest("rest.csv", whole);
        remove(in_scratch("rest.csv"));
    }
    print_to(words, sizeof words, "--tp 1 --init-from %s --steps 1 --log %s", c, in_scratch("one.csv"));
    run_six_steps(words);
    print_to(words, sizeof words, "--tp 1 --cp 2 --init-from %s --steps 1 --log %s", c, in_scratch("many.csv"));
    run_six_steps(words);
    assert_int_equal(read_losses("one.csv", 1, one), 1);
    assert_int_equal(read_losses("many.csv", 1, many), 1);
    assert_true(one[0] < whole[2] && fabs(many[0] - one[0]) <= 1e-5 * one[0]);
    remove(in_scratch("one.csv"));
    remove(in_scratch("many.csv"));
    forget("checkpoints");
}

/* What --resume refuses, what it only reports, and what is checked before the first step. */
static void test_resuming_something_else(void **state) {
    char words[WORDS], text[40000], c[SCRATCH_PATH];
    size_t size;
    FILE *f;
    (void)state;
    write_text();
    print_to(c, sizeof c, "%s", in_scratch("checkpoints"));
    print_to(words, sizeof words, "--checkpoint %s --steps 3", c);
    run_six_steps(words);
    refuse_six_steps(words, "go on with --resume");
    expect_one_sentence("has a checkpoint of step 3");
    print_to(words, sizeof words, "--checkpoint %s --resume --tp 4 --seq 8", c);
    refuse_six_steps(words, "is of '--seq 16', this run is of '--seq 8'");
    expect_one_sentence("--seq");
    print_to(words, sizeof words, "--checkpoint %s --resume --lr 1e-4 --dropout 0.1", c);
    run_six_steps(words);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "going on with --steps 6, which was --steps 3\n"));
    assert_non_null(strstr(text, "going on with --lr 0.0001"));
    assert_non_null(strstr(text, "going on with --dropout 0.1"));
    assert_null(strstr(text, "going on with --clip"));
    f = fopen(in_scratch("text"), "rb"); /* another text of the same length */
    assert_non_null(f);
    size = fread(text, 1, sizeof text, f);
    fclose(f);
    text[size / 2] ^= 1;
    write_bytes("text", text, size);
    print_to(words, sizeof words, "--checkpoint %s --resume --steps 9", c);
    refuse_six_steps(words, "--resume: the checkpoint in");
    expect_one_sentence("is of 'data of");
    print_to(words, sizeof words, "--checkpoint %s/nope/deeper", c);
    refuse_six_steps(words, "nope/deeper: cannot create the directory: No such file");
    read_text("out", text, sizeof text);
    assert_null(strstr(text, "step     1/6"));
    forget("checkpoints");
}

/* A run is killed after its last checkpoint, in the middle of writing a line. When it is resumed, the logs contain
   every step once. */
static void test_logs_go_on(void **state) {
    char words[WORDS], c[SCRATCH_PATH], csv[SCRATCH_PATH], hashes[SCRATCH_PATH];
    double whole[8], rest[8], whole_norm[8], rest_norm[8];
    static char text[4][1 << 16];
    (void)state;
    write_text();
    print_to(c, sizeof c, "%s", in_scratch("checkpoints"));
    print_to(csv, sizeof csv, "%s", in_scratch("whole.csv"));
    print_to(hashes, sizeof hashes, "%s", in_scratch("one.hash"));
    print_to(words, sizeof words, "--checkpoint %s --save-interval 2 --log %s --hash-log %s", c, csv, hashes);
    run_six_steps(words);
    read_text("whole.csv", text[0], sizeof text[0]);
    read_text("one.hash", text[1], sizeof text[1]);
    shell("rm -r %s/step-00000006 && printf 7,1.2 >>%s && printf '7 a' >>%s", c, csv, hashes);
    print_to(words, sizeof words, "--checkpoint %s --resume --log %s --hash-log %s", c, csv, hashes);
    run_six_steps(words);
    read_text("whole.csv", text[2], sizeof text[2]);
    read_text("one.hash", text[3], sizeof text[3]);
    assert_string_equal(text[1], text[3]);
    for (int i = 0; i < 2; i++) {
        double *loss = i ? rest : whole, *norm = i ? rest_norm : whole_norm;
        char *line = strtok(text[2 * i], "\n");
        assert_string_equal(line, "step,loss,grad_norm,tokens_per_s,lr,val_loss");
        for (int step = 1, got; step <= 6; step++) {
            line = strtok(NULL, "\n");
            assert_non_null(line);
            assert_int_equal(sscanf(line, "%d,%lf,%lf,", &got, &loss[step], &norm[step]), 3);
            assert_int_equal(got, step);
        }
        assert_null(strtok(NULL, "\n"));
    }
    assert_memory_equal(whole + 1, rest + 1, 6 * sizeof *whole);
    assert_memory_equal(whole_norm + 1, rest_norm + 1, 6 * sizeof *whole_norm);
    forget("checkpoints"); /* without a checkpoint, the logs start again, too */
    print_to(words, sizeof words, "--checkpoint %s --resume --steps 1 --warmup 0 --log %s --hash-log %s", c, csv,
             hashes);
    run_six_steps(words);
    assert_int_equal(read_losses("whole.csv", 1, rest), 1);
    forget("checkpoints");
}

#define HEAD "step,loss,grad_norm,tokens_per_s,lr,val_loss\n"
#define STEP_1 "1,5.5,1.5,4000,0.0003,\n"
#define HASHES "1 decoder.w 0123456789abcdef\n1 decoder.w.grad 0123456789abcdef ranks differ\n"

/* Writes both logs, where the other one is right and has a step that --resume removes, and checks that a run is refused
   with one sentence and changes neither. */
static void refuse_logs(const char *flag, const char *content, size_t bytes, const char *flags, const char *sentence) {
    static const char later[] = HEAD "7,5.5,1.5,4000,0.0003,1.5\n", later_hashes[] = HASHES "7 w 0123456789abcdef\n";
    char words[WORDS], log[SCRATCH_PATH], hashes[SCRATCH_PATH];
    int is_log = strcmp(flag, "--log") == 0;
    print_to(log, sizeof log, "%s", in_scratch("log.csv"));
    print_to(hashes, sizeof hashes, "%s", in_scratch("one.hash"));
    write_bytes("log.csv", is_log ? content : later, is_log ? bytes : sizeof later - 1);
    write_bytes("one.hash", is_log ? later_hashes : content, is_log ? sizeof later_hashes - 1 : bytes);
    shell("cat '%s' '%s' >'%s'", log, hashes, in_scratch("before"));
    print_to(words, sizeof words, "--log %s --hash-log %s --checkpoint %s %s", log, hashes, in_scratch("c"), flags);
    refuse_six_steps(words, sentence);
    expect_one_sentence(sentence);
    shell("cat '%s' '%s' | cmp - '%s'", log, hashes, in_scratch("before"));
}

/* --resume does not shorten a file that is none of its logs, and a refused run does not empty one. */
static void test_resume_keeps_what_is_no_log(void **state) {
#define CONTENT(text) text, sizeof text - 1
    static char longer[1100] = HEAD STEP_1 "2,5.5,1.5,4000,0.0003,";
    static const struct {
        const char *flag, *content;
        size_t bytes;
        int line;
    } none[] = {{"--log", CONTENT("precious"), 1},
                {"--log", CONTENT("precious\n"), 1},
                {"--log", CONTENT("\n"), 1},
                {"--log", CONTENT("1,5.5,1.5,4000,0.0003,\n"), 1},
                {"--log", CONTENT("step,lm_loss,sop_loss,grad_norm,tokens_per_s,lr,val_lm_loss\n"), 1},
                {"--log", CONTENT("step,loss,grad_norm,tokens_per_s,lr,val_loss, and more"), 1},
                {"--log", CONTENT("\0secret\n"), 1},
                {"--log", CONTENT(HASHES), 1},
                {"--log", CONTENT(HEAD "precious"), 2},
                {"--log", CONTENT(HEAD "2 apples"), 2},
                {"--log", CONTENT(HEAD "1,5.5,1.5,4000,0.0003\n"), 2},
                {"--log", CONTENT(HEAD "1,5.5,1.5,4000,0.0003,,1\n"), 2},
                {"--log", CONTENT(HEAD "1,5.5,1.5,4000,0.0003,bad\n"), 2},
                {"--log", CONTENT(HEAD "-1,5.5,1.5,4000,0.0003,\n"), 2},
                {"--log", CONTENT(HEAD STEP_1 "\n"), 3},
                {"--log", CONTENT(HEAD STEP_1 HEAD STEP_1), 3},
                {"--log", CONTENT(HEAD "7,5.5,1.5,4000,0.0003,\n" STEP_1), 3},
                {"--log", CONTENT(HEAD "7,5.5,1.5,4000,0.0003,\n8,5.5\n"), 3},
                {"--log", CONTENT(HEAD STEP_1 "2,5.5\0,1.5,4000,0.0003,\n"), 3},
                {"--log", longer, sizeof longer, 3},
                {"--hash-log", CONTENT("precious"), 1},
                {"--hash-log", CONTENT("2 apples"), 1},
                {"--hash-log", CONTENT("2 apples\n"), 1},
                {"--hash-log", CONTENT(HEAD STEP_1), 1},
                {"--hash-log", CONTENT(HASHES "2 apples and pears\n"), 3},
                {"--hash-log", CONTENT(HASHES "2 w 0123456789abcde\n"), 3},
                {"--hash-log", CONTENT(HASHES "2 w 0123456789abcdef ranks differ, too\n"), 3},
                {"--hash-log", CONTENT("7 w 0123456789abcdef\n" HASHES), 2}};
    char words[WORDS], sentence[128];
    (void)state;
    write_text();
    memset(longer + strlen(longer), '1', sizeof longer - strlen(longer));
    for (size_t i = 0; i < COUNT(none); i++) {
        print_to(sentence, sizeof sentence, "line %d is none of such a log of train_gpt", none[i].line);
        refuse_logs(none[i].flag, none[i].content, none[i].bytes, "--resume", sentence);
    }
    write_bytes("log.csv", "", 0); /* 3 GB of one line are not read */
    assert_int_equal(truncate(in_scratch("log.csv"), (off_t)3 << 30), 0);
    print_to(words, sizeof words, "--log %s --checkpoint %s --resume", in_scratch("log.csv"), in_scratch("c"));
    refuse_six_steps(words, "line 1 is none of such a log");
    shell("test $(wc -c <'%s') -eq 3221225472", in_scratch("log.csv"));
    print_to(words, sizeof words, "--checkpoint %s --steps 1", in_scratch("c"));
    run_six_steps(words);
    refuse_logs("--log", CONTENT(HEAD STEP_1), "", "has a checkpoint of step 1: go on with --resume");
    shell("cd '%s' && rm -r c before log.csv one.hash", scratch);
}

/* What a killed run can leave behind: no line, the beginning of the first one, or a last line that does not end. */
static void test_logs_that_do_not_end(void **state) {
    static const char *const logs[] = {"",
                                       "st",
                                       "step,loss,grad_norm,tokens_per_s,lr,val_loss",
                                       HEAD,
                                       HEAD "1",
                                       HEAD "1,",
                                       HEAD "1,nan,inf,4e+03,-1",
                                       HEAD STEP_1,
                                       HEAD STEP_1 "2,5.5"};
    static const char *const hashes[] = {"", HASHES, HASHES "1", HASHES "12 ", HASHES "2 w 01"};
    char words[WORDS];
    double loss[8];
    (void)state;
    write_text();
    for (size_t i = 0; i < COUNT(logs); i++) {
        const char *hash = hashes[i % COUNT(hashes)];
        write_bytes("log.csv", logs[i], strlen(logs[i]));
        write_bytes("one.hash", hash, strlen(hash));
        print_to(words, sizeof words, "--steps 2 --checkpoint %s --resume --log %s --hash-log %s", in_scratch("c"),
                 in_scratch("log.csv"), in_scratch("one.hash"));
        run_six_steps(words);
        assert_int_equal(read_losses("log.csv", 1, loss), 2);
        shell("cd '%s' && head -1 log.csv | grep -q ^step,loss, && test $(wc -l <log.csv) -eq 3 && "
              "! grep -v '^[12] .* [0-9a-f]\\{16\\}$' one.hash",
              scratch);
        forget("c");
    }
}

/* Checks the two lines of a log that a run has written to a pipe. */
static void expect_log_in(int fd) {
    char text[512];
    ssize_t n = read(fd, text, sizeof text - 1);
    assert_true(n > 0);
    text[n] = 0;
    assert_int_equal(strncmp(text, HEAD "1,", strlen(HEAD "1,")), 0);
    assert_string_equal(strchr(text + strlen(HEAD), '\n'), "\n");
}

/* A log may be a pipe with a reader, which --resume cannot shorten. What nobody reads is refused. */
static void test_logs_that_are_no_files(void **state) {
    static const char *const flags[] = {"--log", "--hash-log"}, *const resumes[] = {"", "--resume"};
    char words[WORDS];
    int ends[2], fd;
    (void)state;
    write_text();
    assert_int_equal(mkfifo(in_scratch("fifo"), 0600), 0);
    assert_int_equal(mkdir(in_scratch("folder"), 0700), 0);
    for (int i = 0; i < 4; i++) {
        static const char *const wrong[][2] = {{"fifo", "fifo: it is a socket, or a pipe that nobody reads"},
                                               {"folder", "folder: Is a directory"}};
        for (size_t k = 0; k < COUNT(wrong); k++) {
            print_to(words, sizeof words, "--checkpoint %s %s %s %s", in_scratch("c"), resumes[i / 2], flags[i % 2],
                     in_scratch(wrong[k][0]));
            refuse_six_steps(words, wrong[k][1]);
            expect_one_sentence("cannot write ");
        }
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pipe(ends), 0);
        print_to(words, sizeof words, "--steps 1 --checkpoint %s %s --log /dev/fd/%d --hash-log /dev/null",
                 in_scratch("c"), resumes[i], ends[1]);
        run_six_steps(words);
        expect_log_in(ends[0]);
        assert_true(close(ends[0]) == 0 && close(ends[1]) == 0);
        fd = open(in_scratch("fifo"), O_RDWR);
        print_to(words, sizeof words, "--steps 1 %s --log %s", i ? "--hash-log /dev/null" : "", in_scratch("fifo"));
        run_six_steps(words);
        expect_log_in(fd);
        close(fd);
        forget("c");
    }
    fd = open(in_scratch("log.csv"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(write(fd, "old", 3), 3);
    print_to(words, sizeof words, "--steps 1 --log /dev/fd/%d", fd);
    run_six_steps(words);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    expect_log_in(fd);
    assert_true(close(fd) == 0);
    shell("cd '%s' && rm -r fifo folder log.csv", scratch);
}

/* A model with more positions than --seq, from --max-seq or from the weights that it starts with. */
static void test_positions(void **state) {
    char words[WORDS], c[SCRATCH_PATH];
    double loss[8], again[8];
    (void)state;
    write_text();
    print_to(c, sizeof c, "%s", in_scratch("checkpoints"));
    refuse_six_steps("--max-seq 8", "--max-seq 8 is less than --seq 16");
    print_to(words, sizeof words, "--checkpoint %s --steps 3 --max-seq 40", c);
    run_six_steps(words);
    print_to(words, sizeof words, "--checkpoint %s --resume --max-seq 20", c);
    refuse_six_steps(words, "step-00000003 has 40 positions");
    print_to(words, sizeof words, "--init-from %s/step-00000003 --steps 1 --seq 32 --log %s", c,
             in_scratch("init.csv"));
    run_six_steps(words);
    assert_int_equal(read_losses("init.csv", 1, loss), 1);
    print_to(words, sizeof words, "--init-from %s/step-00000003 --steps 1 --seq 32 --max-seq 40 --tp 1 --log %s", c,
             in_scratch("init.csv"));
    run_six_steps(words);
    assert_int_equal(read_losses("init.csv", 1, again), 1);
    assert_true(fabs(loss[0] - again[0]) <= 1e-5 * loss[0]);
    print_to(words, sizeof words, "--init-from %s/step-00000003 --steps 1 --seq 48", c);
    refuse_six_steps(words, "train_gpt: --seq is 48, the model in ");
    print_to(words, sizeof words, "--checkpoint %s --resume", c);
    run_six_steps(words);
    forget("checkpoints");
}

/* A run begins with the model of a checkpoint. Flags of its shape may be left out. Those that are given must agree. */
static void test_shape_of_a_model(void **state) {
    static const char *const run = "--data %s --batch 4 --seq 16 --steps %d --warmup 0 --sample 0 --eval-interval 0 ";
    static const char *const shape = "--layers 2 --hidden 32 --heads 8 --kv-heads 4 --ffn 44 --activation swiglu "
                                     "--rmsnorm --rotary --untied --vocab 300 --window 6 --softcap 20.1 ";
    static const char *const bad[][2] = {
        {"--layers 4", "--layers is 4, the model in |has 2 layers"},
        {"--hidden 64", "--hidden is 64, the model in |has 32 hidden features"},
        {"--heads 4", "--heads is 4, the model in |has 8 heads"},
        {"--kv-heads 8", "--kv-heads is 8, the model in |has 4 key/value heads"},
        {"--ffn 64", "--ffn is 64, the model in |has 44 features in its MLP"},
        {"--vocab 256", "--vocab is 256, the model in |has 300 tokens in its"},
        {"--activation gelu", "--activation is gelu, the model in |has swiglu"},
        {"--activation relu", "--activation is relu, the model in |has swiglu"},
        {"--activation tanh", "--activation is tanh, the model in |has swiglu"},
        {"--window 0", "--window is 0, the model in |has 6"},
        {"--softcap 0", "--softcap is 0, the model in |has 20.1"},
        {"--softcap 20", "--softcap is 20, the model in |has 20.1"},
        {"--alibi", "--alibi is given, the model in |has rotary positions"},
        {"--config gpt2-1.2b --tp 2", "--config gpt2-1.2b has 40 layers, the model in |has 2 layers"}};
    char words[WORDS], start[WORDS], c[SCRATCH_PATH], text[4096];
    double whole[8], again[8];
    (void)state;
    write_text();
    print_to(c, sizeof c, "%s", in_scratch("checkpoints"));
    print_to(start, sizeof start, run, in_scratch("text"), 2);
    print_to(words, sizeof words, "%s %s --checkpoint %s", start, shape, c);
    assert_int_equal(run_program(words), 0);
    for (int i = 0; i < 2; i++) {
        print_to(words, sizeof words, "%s %s --init-from %s/step-00000002 --log %s", start, i ? shape : "", c,
                 in_scratch("init.csv"));
        if (run_program(words) != 0) expect_error(words, "nothing");
        assert_int_equal(read_losses("init.csv", 1, i ? again : whole), 2);
    }
    assert_memory_equal(whole, again, 2 * sizeof *whole);
    print_to(words, sizeof words, "%s --steps 3 --checkpoint %s --resume --tp 4", start, c);
    assert_int_equal(run_program(words), 0);
    for (size_t i = 0; i < COUNT(bad); i++) {
        print_to(words, sizeof words, "%s --init-from %s/step-00000002 %s", start, c, bad[i][0]);
        expect_error(words, "train_gpt: --");
        read_text("err", text, sizeof text);
        if (!test_has_words(text, bad[i][1])) fail_msg("%s: %s", bad[i][0], text);
        expect_one_sentence("the model in");
    }
    print_to(words, sizeof words, "%s --init-from tests/golden/gpt2_hf --rotary --dry-run", start);
    expect_error(words, "train_gpt: --rotary is given, the model in tests/golden/gpt2_hf has learned positions\n");
    expect_one_sentence("--rotary");
    shell("printf x >>%s/step-00000003/optimizer.safetensors", c);
    print_to(words, sizeof words, "%s --checkpoint %s --resume --tp 4", start, c);
    expect_error(words, "optimizer.safetensors");
    expect_one_sentence("optimizer.safetensors"); /* of all four ranks */
    forget("checkpoints");
}

/* Any flag of the shape that contradicts a GPT-2 is refused with one sentence, which names one flag that was given. */
static void test_flags_that_contradict_a_gpt2(void **state) {
    static const char *const bad[][2] = {
        {"--layers 4", "--layers is 4, the model in %s has 2 layers"},
        {"--hidden 64", "--hidden is 64, the model in %s has 16 hidden features"},
        {"--heads 2", "--heads is 2, the model in %s has 4 heads"},
        {"--kv-heads 2", "--kv-heads is 2, the model in %s has 4 key/value heads"},
        {"--ffn 64", "--ffn is 64, the model in %s has 40 features in its MLP"},
        {"--vocab 62", "--vocab is 62, the model in %s has 61 tokens in its vocabulary"},
        {"--seq 13", "--seq is 13, the model in %s has 12 positions"},
        {"--max-seq 20", "--max-seq is 20, the model in %s has 12 positions"},
        {"--max-seq 8", "--max-seq is 8, the model in %s has 12 positions"},
        {"--max-seq 8 --seq 9", "--max-seq is 8, the model in %s has 12 positions"},
        {"--rotary", "--rotary is given, the model in %s has learned positions"},
        {"--alibi", "--alibi is given, the model in %s has learned positions"},
        {"--window 6", "--window is 6, the model in %s has none"},
        {"--softcap 20.5", "--softcap is 20.5, the model in %s has none"},
        {"--activation relu", "--activation is relu, the model in %s has gelu"},
        {"--rmsnorm", "--rmsnorm is given, the model in %s has layer normalisation"},
        {"--untied", "--untied is given, the model in %s has an output head that is its embedding"},
        {"--config gpt2-1.2b", "--config gpt2-1.2b has 40 layers, the model in %s has 2 layers"},
        {"--layers 2 --config gpt2-1.2b", "--config gpt2-1.2b has 40 layers, the model in %s has 2 layers"},
        {"--config gpt2-1.2b --layers 4", "--layers is 4, the model in %s has 2 layers"},
        {"--config gpt2-1.2b --layers 2", "--config gpt2-1.2b has 1536 hidden features, the model in %s has 16 hidden "
                                          "features"},
        {"--config gpt2-1.2b --layers 2 --hidden 16 --heads 4 --vocab 61",
         "--config gpt2-1.2b has 1024 positions, the model in %s has 12 positions"},
        {"--activation relu --layers 4 --batch 5 --dp 2", "--layers is 4, the model in %s has 2 layers"}};
    static const char *const from = "tests/golden/gpt2_hf";
    char words[WORDS], sentence[512], text[1024];
    (void)state;
    write_bin("good.bin", LLMC_MAGIC, 1, BIN_TOKENS, BIN_TOKENS, 60);
    for (size_t i = 0; i < 2 * COUNT(bad); i++) {
        const char *flags = bad[i / 2][0], *want = bad[i / 2][1], *at = strstr(want, "%s");
        print_to(sentence, sizeof sentence, "train_gpt: %.*s%s%s\n", (int)(at - want), want, from, at + 2);
        print_to(words, sizeof words, "--init-from %s --data %s --batch 4 --sample 0 --steps 1 %s %s", from,
                 in_scratch("good.bin"), flags, i % 2 ? "--dry-run" : "");
        if (run_program(words) == 0) fail_msg("not refused: %s", words);
        read_text("err", text, sizeof text);
        if (strcmp(text, sentence) != 0) fail_msg("%s: %s", words, text);
    }
    print_to(words, sizeof words,
             "--init-from %s --data %s --batch 4 --sample 0 --steps 1 --warmup 0 --layers 2 --hidden 16 --heads 4 "
             "--kv-heads 4 --ffn 40 --vocab 61 --seq 12 --max-seq 12 --window 0 --softcap 0 --activation gelu",
             from, in_scratch("good.bin"));
    expect_success(words);
}

/* The positions that a model has are named, when a flag asks for others. */
static void test_flags_that_contradict_alibi(void **state) {
    char words[WORDS], c[SCRATCH_PATH];
    (void)state;
    write_text();
    print_to(c, sizeof c, "%s", in_scratch("checkpoints"));
    print_to(words, sizeof words, "--checkpoint %s --steps 1 --alibi", c);
    run_six_steps(words);
    print_to(words, sizeof words, "--init-from %s/step-00000001 --rotary", c);
    refuse_six_steps(words, "train_gpt: --rotary is given, the model in ");
    expect_one_sentence("step-00000001 has ALiBi\n");
    forget("checkpoints");
}

/* PyTorch's loss for a file that repeats one token: the loss of this token behind a single one. */
static double golden_loss(int32_t *token) {
    enum { TOKENS = 48, VOCABULARY = 61 };
    static float logits[TOKENS * VOCABULARY], ids[TOKENS];
    mt_safetensors *s;
    mt_context *ctx;
    double sum = 0;
    assert_int_equal(mt_context_create(NULL, NULL, &ctx), MT_SUCCESS);
    assert_int_equal(mt_safetensors_open(ctx, "tests/golden/gpt2_hf/expected.safetensors", &s), MT_SUCCESS);
    assert_int_equal(mt_safetensors_read(ctx, mt_safetensors_find(s, "logits"), logits), MT_SUCCESS);
    assert_int_equal(mt_safetensors_read(ctx, mt_safetensors_find(s, "ids"), ids), MT_SUCCESS);
    mt_safetensors_close(s);
    mt_context_destroy(ctx);
    *token = (int32_t)ids[0];
    for (int i = 0; i < VOCABULARY; i++) sum += exp((double)logits[i]);
    return log(sum) - (double)logits[*token];
}

static void test_gpt2_of_hugging_face(void **state) {
    static unsigned char file[LLMC_HEADER_BYTES + 2 * 400];
    static const char *const splits[] = {"--tp 1", "--tp 4", "--tp 2 --dp 2"};
    char words[WORDS];
    double loss[8], want;
    int32_t token, header[3] = {LLMC_MAGIC, 1, 400};
    (void)state;
    want = golden_loss(&token);
    memcpy(file, header, sizeof header);
    for (int i = 0; i < 400; i++) file[LLMC_HEADER_BYTES + 2 * i] = (unsigned char)token;
    write_bytes("good.bin", file, sizeof file);
    for (size_t i = 0; i < COUNT(splits); i++) {
        print_to(words, sizeof words,
                 "--data %s --init-from tests/golden/gpt2_hf --seq 1 --batch 4 --steps 6 --warmup 0 --sample 0 "
                 "--eval-interval 0 --log %s %s",
                 in_scratch("good.bin"), in_scratch("init.csv"), splits[i]);
        assert_int_equal(run_program(words), 0);
        assert_int_equal(read_losses("init.csv", 1, loss), 6);
        if (!(fabs(loss[0] - want) <= 1e-5 * want)) fail_msg("%s: loss %.9g, PyTorch %.9g", splits[i], loss[0], want);
        assert_true(loss[5] < loss[0] - 0.2);
    }
}

/* A weight that is not finite, or not in --dtype, is refused by its name before the first step. The last four bytes of
   a file are its last element. */
static void test_weights_that_are_not_finite(void **state) {
    static const struct {
        const char *bytes, *flags, *sentence;
    } odd[] = {{"\\0\\0\\300\\177", "", "is nan, must be a finite number"},
               {"\\0\\0\\200\\377", "--dtype bf16", "is -inf, must be a finite number"},
               {"\\0\\120\\303\\107", "--dtype f16", "is 100000, too large for f16"}};
    static unsigned char file[LLMC_HEADER_BYTES + 2 * 400];
    const int32_t header[3] = {LLMC_MAGIC, 1, 400};
    char words[WORDS], text[4096];
    (void)state;
    memcpy(file, header, sizeof header);
    write_bytes("good.bin", file, sizeof file);
    for (size_t i = 0; i < COUNT(odd); i++) {
        shell("cp -r tests/golden/gpt2_hf '%s'", in_scratch("odd"));
        shell("f='%s' && printf '%s' | dd of=\"$f\" bs=1 seek=$(($(wc -c <\"$f\") - 4)) conv=notrunc status=none",
              in_scratch("odd/model.safetensors"), odd[i].bytes);
        for (int tp = 1; tp <= 2; tp++) {
            print_to(words, sizeof words, "--data %s --init-from %s --seq 1 --batch 4 --steps 2 --sample 0 --tp %d %s",
                     in_scratch("good.bin"), in_scratch("odd"), tp, odd[i].flags);
            expect_error(words, odd[i].sentence);
            read_text("err", text, sizeof text);
            if (!strstr(text, "model.safetensors: element ") || strchr(text, '\n')[1]) fail_msg("%s", text);
        }
        forget("odd");
    }
}

/* A Llama of Hugging Face gives shape and weights; files that are not what config.json says are refused once. */
#define HASH "0123456789abcdef0123456789abcdef01234567"

/* Makes a model m, another one in `other`, and files that a model must not publish, and runs a command in the folder of
   the model. Then train_gpt begins with the model `from`, and saves a checkpoint in `runs`. */
static void begin_with_folder(const char *command, const char *from, char words[WORDS]) {
    shell("cd '%s' && rm -rf m other runs secret* && echo not for others >secret && echo '{\"not\": \"for others\"}' "
          ">secret.json",
          scratch);
    shell("cp -r tests/golden/gpt2_hf '%s' && cp -r tests/golden/gpt2_hf '%s'", in_scratch("m"), in_scratch("other"));
    shell("cd '%s' && echo '{\"x\": [{}]}' >generation_config.json && { %s; }", in_scratch("m"), command);
    print_to(words, WORDS,
             "--init-from %s --data %s --batch 2 --seq 8 --steps 1 --sample 0 --eval-interval 0 --tp 1 --checkpoint %s",
             in_scratch(from), in_scratch("data.bin"), in_scratch("runs"));
}

/* A model may come from elsewhere, with links: none of them makes a run read, or a checkpoint publish, a file outside
   of its folder. What is copied is a JSON object of at most 1 MiB. Nothing waits for a pipe. */
static void test_links_out_of_a_model(void **state) {
    static const struct {
        const char *command, *sentence;
    } bad[] = {
        {"ln -sf ../secret generation_config.json", "m/generation_config.json: is a link that leads out of its folder"},
        {"ln -sf ../secret.json generation_config.json", "is a link that leads out of its folder"},
        {"ln -sf \"$(cd .. && pwd)/secret.json\" generation_config.json", "is a link that leads out of its folder"},
        {"ln -sf ../none generation_config.json", "is a link that leads out of its folder"},
        {"ln -sf b generation_config.json && ln -s ../secret.json b", "is a link that leads out of its folder"},
        {"ln -s .. up && ln -sf up/secret.json generation_config.json", "is a link that leads out of its folder"},
        {"ln -sf .. generation_config.json", "m/generation_config.json: "},
        {"ln -sf ../../blobs/secret.json generation_config.json", "is a link that leads out of its folder"},
        {"ln -sf ../../blobs/" HASH "x generation_config.json", "is a link that leads out of its folder"},
        {"ln -sf ../../blobs/" HASH "/../secret generation_config.json", "is a link that leads out of its folder"},
        {"ln -sf ../other/config.json config.json", "m/config.json: is a link that leads out of its folder"},
        {"ln -sf ../other/model.safetensors model.safetensors", "m/model.safetensors: is a link that leads out"},
        {"ln -sf ../secret model.safetensors", "m/model.safetensors: is a link that leads out of its folder"},
        {"mv model.safetensors a && ln -s ../secret.json model.safetensors.index.json",
         "m/model.safetensors.index.json: is a link that leads out of its folder"},
        {"ln -s ../other/model.safetensors a && rm model.safetensors && echo '{\"weight_map\": {\"x\": \"a\"}}' "
         ">model.safetensors.index.json",
         "m/a: is a link that leads out of its folder"},
        {"rm model.safetensors && echo '{\"weight_map\": {\"x\": \"../secret\"}}' >model.safetensors.index.json",
         "'../secret' is not the name of a file beside it"},
        {"rm model.safetensors && echo '{\"weight_map\": {\"x\": \"/etc/passwd\"}}' >model.safetensors.index.json",
         "'/etc/passwd' is not the name of a file beside it"},
        {"echo not for others >generation_config.json", "m/generation_config.json: JSON, byte 0: it does not begin"},
        {"echo '{} x' >generation_config.json", "m/generation_config.json: JSON, byte 3: something follows the end"},
        {"echo '[]' >generation_config.json", "m/generation_config.json: JSON, byte 0: it does not begin with '{'"},
        {": >generation_config.json", "m/generation_config.json: JSON, byte 0: it does not begin with '{'"},
        {"{ echo {; head -c 1048576 /dev/zero | tr '\\0' ' '; echo }; } >generation_config.json",
         "m/generation_config.json: has 1048580 bytes, must be at most 1048576"},
        {"rm generation_config.json && mkfifo generation_config.json", "is not a regular file"},
        {"rm config.json && mkfifo config.json", "m/config.json: is not a regular file"},
        {"rm model.safetensors && mkfifo model.safetensors", "m/model.safetensors: is not a regular file"},
        {"rm generation_config.json && mkdir generation_config.json", "is not a regular file"},
        {"ln -sf /dev/zero generation_config.json", "is a link that leads out of its folder"}};
    char words[WORDS];
    (void)state;
    write_bin("data.bin", LLMC_MAGIC, 1, BIN_TOKENS, BIN_TOKENS, 60);
    for (size_t i = 0; i < COUNT(bad); i++) {
        begin_with_folder(bad[i].command, "m", words);
        expect_error(words, bad[i].sentence);
        shell("! test -e '%s'", in_scratch("runs/step-00000001"));
    }
    shell("cd '%s' && rm -rf m other runs secret* data.bin", scratch);
}

/* Links to a file beside the link are followed, and those of Hugging Face's cache, and the folder itself may be one. */
static void test_links_in_a_model(void **state) {
    static const char *const commands[] = {
        ":", "mv generation_config.json a && ln -s a generation_config.json",
        "cd .. && mkdir cache cache/blobs && mv m cache/blobs/m && mkdir -p cache/snapshots/r && cd cache/snapshots/r "
        "&& "
        "for f in ../../blobs/m/*; do n=$(printf %s \"$f\" | cksum | cut -c 1-3)" HASH "; mv $f ../../blobs/$n && "
        "ln -s ../../blobs/$n ${f##*/}; done; cd ../../.. && ln -s cache/snapshots/r m"};
    char words[WORDS];
    (void)state;
    write_bin("data.bin", LLMC_MAGIC, 1, BIN_TOKENS, BIN_TOKENS, 60);
    for (size_t i = 0; i < COUNT(commands); i++) {
        begin_with_folder(commands[i], "m", words);
        expect_success(words);
        shell("echo '{\"x\": [{}]}' | cmp - '%s'", in_scratch("runs/step-00000001/generation_config.json"));
    }
    shell("cd '%s/cache' && rm snapshots/r/g* && mv blobs moved && ln -s moved blobs", scratch);
    shell("rm -r '%s'", in_scratch("runs"));
    expect_error(words, "m/model.safetensors: cannot open it"); /* the folder of a cache is not a link */
    shell("cd '%s' && rm -rf m other runs secret* data.bin cache", scratch);
}

/* A checkpoint that is a link in a directory of checkpoints is loaded, but its texts are not copied, by whatever path
   the run finds it. Those of a folder in the same place are. */
static void test_links_to_a_checkpoint(void **state) {
    static const struct {
        const char *command, *from;
        int copies;
    } folders[] = {{"cp -r m d/step-00000001", "d", 1},
                   {"cp -r m d/step-00000001", "d/step-00000001/", 1},
                   {"ln -s ../m d/step-00000001", "d", 0},
                   {"ln -s \"$PWD/m\" d/step-00000001", "d/", 0},
                   {"ln -s ../m d/step-00000001", "d/step-00000001", 0},
                   {"ln -s ../m d/step-00000001", "d/step-00000001//", 0},
                   {"ln -s ../m d/step-00000001", "d/./step-00000001/.", 0},
                   {"ln -s ../m d/a && ln -s a d/step-00000001", "d", 0},
                   {"cp -r m d/step-00000001 && ln -s step-00000001 d/step-00000002", "d", 0},
                   {"mkdir other/m && cp m/* other/m && ln -s ../other d/step-00000001", "d/step-00000001/m", 0},
                   {"cp -r m d/step-00000001 && ln -s d e", "e", 1}};
    char words[WORDS];
    (void)state;
    write_bin("data.bin", LLMC_MAGIC, 1, BIN_TOKENS, BIN_TOKENS, 60);
    for (size_t i = 0; i < COUNT(folders); i++) {
        begin_with_folder("sed -i 's/{/{\"private\": 1,/' config.json", folders[i].from, words);
        shell("cd '%s' && rm -rf d e && mkdir d && { %s; }", scratch, folders[i].command);
        expect_success(words);
        if (folders[i].copies)
            shell("cd '%s' && grep -q private config.json && test -e generation_config.json",
                  in_scratch("runs/step-00000001"));
        else
            shell("cd '%s' && ! grep -q private config.json && test -e config.json && ! test -e generation_config.json",
                  in_scratch("runs/step-00000001"));
    }
    shell("cd '%s' && rm -rf m other runs secret* data.bin d e", scratch);
}

/* The same for a run that goes on. */
static void test_resumes_behind_a_link(void **state) {
    static const char *const moved[] = {":", "mv c/step-00000001 far && ln -s ../far c/step-00000001"};
    char first[WORDS], flags[WORDS];
    (void)state;
    write_text();
    for (int link = 0; link < 2; link++) {
        print_to(first, sizeof first, "--steps 1 --checkpoint %s", in_scratch("c"));
        run_six_steps(first);
        shell("cd '%s' && echo '{}' >c/step-00000001/generation_config.json && { %s; }", scratch, moved[link]);
        print_to(flags, sizeof flags, "--steps 2 --resume --checkpoint %s", in_scratch("c"));
        run_six_steps(flags);
        shell("%s test -e '%s'", link ? "!" : "", in_scratch("c/step-00000002/generation_config.json"));
        flags[strlen("--steps ")] = '3'; /* what it has saved can be loaded */
        run_six_steps(flags);
        shell("cd '%s' && rm -rf c far", scratch);
    }
}

static void test_begins_with_a_llama(void **state) {
    static unsigned char file[LLMC_HEADER_BYTES + 2 * 400];
    int32_t header[3] = {LLMC_MAGIC, 1, 400};
    char words[WORDS];
    (void)state;
    memcpy(file, header, sizeof header);
    for (int i = 0; i < 400; i++) file[LLMC_HEADER_BYTES + 2 * i] = (unsigned char)(i % 61);
    write_bytes("good.bin", file, sizeof file);
    shell("cp -r tests/golden/llama_hf '%s'", in_scratch("llama"));
    for (int i = 0; i < 2; i++) {
        print_to(words, sizeof words,
                 "--data %s --init-from %s --seq 12 --batch 4 --steps 2 --warmup 0 --sample 0 --eval-interval 0 "
                 "--tp %d --checkpoint %s",
                 in_scratch("good.bin"), in_scratch("llama"), 2 << i, in_scratch("run"));
        assert_int_equal(run_program(words), i);
        if (i == 0)
            shell("cmp '%s' '%s'", in_scratch("run/step-00000002/config.json"), in_scratch("llama/config.json"));
        shell("sed -i 's/\"num_hidden_layers\": 2/\"num_hidden_layers\": 3/' '%s'", in_scratch("llama/config.json"));
        forget("run");
    }
    expect_one_sentence("has no tensor 'model.layers.2.input_layernorm.weight'");
    forget("llama");
}

/* The sign of a NaN is not printed. */
static void test_nan_has_no_sign(void **state) {
    char words[WORDS], text[16384];
    (void)state;
    assert_false(signbit(shown(-(float)NAN)) || signbit(shown((float)NAN)));
    assert_true(shown(-1.5f) == -1.5 && isinf(shown(-INFINITY)));
    print_to(words, sizeof words,
             "--data LICENSE --sample 0 --activation swiglu --lr 1000 --clip 0 --warmup 0 --steps 200 --layers 1 "
             "--hidden 16 --seq 8 --batch 4 --tp 1 --log %s",
             in_scratch("log.csv"));
    expect_error(words, "is not finite");
    for (int i = 0; i < 3; i++) {
        read_text(i == 0 ? "out" : i == 1 ? "err" : "log.csv", text, sizeof text);
        assert_null(strstr(text, "-nan"));
        assert_true(i == 1 || strstr(text, "nan"));
    }
}

static const struct {
    const char *words, *sentence;
} absurd_flags[] = {
    {"--tp 0", "--tp 0: expected a whole number from 1 to 1024"},
    {"--tp 1.5", "--tp 1.5: expected a whole number"},
    {"--tp two", "--tp two: expected"},
    {"--dp -1", "--dp -1: expected"},
    {"--tp 1024 --dp 16 --batch 16", "more than 1024 ranks"},
    {"--cp 0", "--cp 0: expected a whole number from 1 to 1024"},
    {"--cp 3", "--seq 128 is not a multiple of 6: each of --cp 3 ranks has 2 parts\n"},
    {"--cp 2 --tp 3 --heads 3 --hidden 96 --sequence-parallel",
     "--seq 128 is not a multiple of 12: each of --cp 2 ranks has 2 parts, which --sequence-parallel divides over "
     "--tp"},
    {"--cp 128 --seq 128", "--seq 128 is not a multiple of 256"},
    {"--cp 8 --tp 16 --pp 16 --layers 16", "--tp 16 x --cp 8 x --dp 1 x --pp 16 are more than 1024 ranks"},
    {"--cp 2 --cp-comm-type ring", "--cp-comm-type ring: expected auto, p2p, allgather or a2a"},
    {"--cp 8 --tp 2 --cp-comm-type a2a", "MT_CP_A2A cannot divide 2 groups of 1 query heads among 8 context ranks"},
    {"--cp 2 --invariant 2", "--invariant-context 1 cannot be split over --cp 2"},
    {"--cp 2 --invariant-context 2", "--invariant-context 2 needs --invariant"},
    {"--invariant 2 --invariant-context 6 --seq 120 --cp 2", "context.invariant is 6, must be 0 or a power of two"},
    {"--invariant 2 --invariant-context 8 --seq 40",
     "--seq 40 is not a multiple of 16: each of --invariant-context 8 ranks has 2 parts"},
    {"--batch 5 --dp 2", "--batch 5 is not a multiple of --dp 2"},
    {"--batch 8 --dp 2 --micro-batch 3",
     "the 4 sequences of a rank (--batch / --dp) are not a multiple of --micro-batch 3"},
    {"--resume", "--resume needs --checkpoint DIR"},
    {"--save-interval 5", "--save-interval needs --checkpoint DIR"},
    {"--init-from /nonexistent --steps 1", "/nonexistent: has neither model.safetensors nor its index"},
    {"--dtype f64", "--dtype f64: expected f32, bf16 or f16"},
    {"--device tpu", "--device tpu: expected cpu or cuda"},
    {"--invariant 6", "invariant is 6, must be 0 or a power of two up to 1024"},
    {"--invariant 8 --micro-batch 2", "--invariant chooses the micro-batch"},
    {"--invariant 8", "4 heads cannot be split over 8 virtual shards"},
    {"--invariant 4 --heads 8 --tp 8",
     "4 virtual shards (mt_context_desc.invariant) cannot be split over 8 tensor ranks"},
    {"--invariant 4 --batch 12 --dp 3",
     "--invariant-data 4 makes 4 micro-batches of --batch 12, which --dp 3 cannot share"},
    {"--invariant 4 --seq 10 --batch 4", "10 tokens cannot be split into 4 virtual shards"},
    {"--hash-log /nonexistent/hashes --steps 1", "cannot write /nonexistent/hashes"},
    {"--heads 5 --tp 1", "hidden is 128, must be a multiple of heads 5"},
    {"--heads 4 --kv-heads 3 --tp 1", "kv_heads is 3, must divide heads 4"},
    {"--heads 2 --kv-heads 1 --tp 4", "2 heads cannot be split over 4 tensor ranks"},
    {"--seq 9 --tp 2 --sequence-parallel", "--seq 9 is not a multiple of --tp 2"},
    {"--interleave --tp 1", "--interleave has no effect with --tp 1"},
    {"--interleave --tp 2 --sequence-parallel", "--interleave has no effect with --sequence-parallel"},
    {"--interleave --tp 2 --invariant 2", "--interleave has no effect with --invariant"},
    {"--interleave --tp 2 --batch 4 --micro-batch 1", "--interleave has no effect with --micro-batch 1"},
    {"--seq 1000000", "too few for --seq 1000000"},
    {"--dropout 1", "--dropout 1: expected a number from 0 to 0.999"},
    {"--dropout nan", "--dropout nan: expected"},
    {"--lr -1", "--lr -1: expected"},
    {"--steps 0", "--steps 0: expected"},
    {"--steps 1e400", "--steps 1e400: expected"},
    {"--layers 9999999", "--layers 9999999: expected"},
    {"--hidden 65536 --layers 1024 --tp 1", "no memory"},
    {"--rotary --hidden 12 --heads 4 --tp 1", "the head size is 3, must be even for rotary"},
    {"--vocab 50 --tp 1", "megatron.h: byte 4 is 71, and the vocabulary of the model is 50"},
    {"--no-such-flag", "no-such-flag"},
    {"--tp", "requires an argument"},
    {"--batch 1048576 --seq 1 --layers 1 --hidden 16 --heads 2 --lr nan", "--lr nan"},
    {"--check 3", "--check 3: expected a whole number from 0 to 2"},
    {"--check=x", "--check x: expected a whole number"},
    {"--check 1 stray", "unexpected argument 'stray'"},
    {"stray", "unexpected argument 'stray'"},
    {"--log /nonexistent/log.csv --steps 1", "cannot write /nonexistent/log.csv"},
    {"--lr 1000 --clip 0 --warmup 0 --steps 200 --layers 1 --hidden 16 --seq 8 --batch 2", "not finite"},
};

static void test_absurd_flags(void **state) {
    char words[WORDS];
    (void)state;
    for (size_t i = 0; i < COUNT(absurd_flags); i++) {
        print_to(words, sizeof words, "--data megatron.h --sample 0 %s", absurd_flags[i].words);
        expect_error(words, absurd_flags[i].sentence);
    }
}

/* A log path that is another kind of file, the path of another log, or a link is refused before anything is written. */
static void test_logs_that_are_something_else(void **state) {
    static const struct {
        const char *flags, *sentence;
    } bad[] = {
        {"--log text", "--log text is the same file as --data "},
        {"--log c/../text", "--log c/../text is the same file as --data "},
        {"--log soft", "--log soft is the same file as --data "},
        {"--hash-log hard", "--hash-log hard is the same file as --data "},
        {"--log none --hash-log ./none", "--log none is the same file as --hash-log ./none"},
        {"--log c/../none --hash-log none", "--log c/../none is the same file as --hash-log none"},
        {"--log nowhere --hash-log none", "--log nowhere is the same file as --hash-log none"},
        {"--log round --hash-log none", "cannot write round"},
        {"--log /dev/stdout", "--log /dev/stdout is the same file as /dev/stdout"},
        {"--hash-log err", "--hash-log err is the same file as /dev/stderr"},
        {"--log weights --checkpoint c --resume", "the same file as --checkpoint c/step-00000001/model.safetensors"},
        {"--log c/.lock --checkpoint c --resume", "--log c/.lock is the same file as --checkpoint c/.lock"},
        {"--log new/.lock --checkpoint new", "--log new/.lock is the same file as --checkpoint new/.lock"},
        {"--hash-log weights --init-from c/step-00000001", "as --init-from c/step-00000001/model.safetensors"},
    };
    char home[MT_PATH_MAX];
    (void)state;
    write_text();
    assert_non_null(getcwd(home, sizeof home));
    assert_int_equal(chdir(scratch), 0);
    run_six_steps("--steps 1 --checkpoint c");
    assert_int_equal(system("mkdir new; ln -s text soft; ln text hard; ln -s none nowhere; ln -s round round; "
                            "ln -s c/step-00000001/model.safetensors weights; cat text c/*/* >before"),
                     0);
    for (size_t i = 0; i < COUNT(bad); i++) {
        refuse_six_steps(bad[i].flags, bad[i].sentence);
        if (system("cat text c/*/* | cmp - before && test ! -e none") != 0) fail_msg("%s: was written", bad[i].flags);
    }
    run_six_steps("--log /dev/null --hash-log /dev/null");
    assert_int_equal(system("rm -r c new soft hard nowhere round weights before"), 0);
    assert_int_equal(chdir(home), 0);
}

/* In a program with a locale that has a decimal comma, logs and checkpoints are the same as without. */
static void test_decimal_comma(void **state) {
    static const char *const flags = "--tp 1 --steps 3 --lr 0.0025 --dropout 0.125 --checkpoint %s --log %s";
    char words[WORDS], text[2048], losses[2][8][64];
    (void)state;
    write_text();
    for (int comma = 0; comma < 2; comma++) {
        char *line;
        if (comma && !test_comma_locale()) {
            printf("      no locale with a decimal comma here, and none could be made (Debian: locales)\n");
            forget("point");
            skip();
        }
        print_to(words, sizeof words, flags, in_scratch(comma ? "comma" : "point"), in_scratch("log.csv"));
        run_six_steps(words);
        setlocale(LC_NUMERIC, "C");
        read_text("log.csv", text, sizeof text);
        line = strtok(text, "\n");
        for (int step = 0; step < 3; step++) {
            float loss, norm, rate, lr;
            line = strtok(NULL, "\n");
            assert_non_null(line);
            if (sscanf(line, "%*d,%f,%f,%f,%f,", &loss, &norm, &rate, &lr) != 4 || lr > 0.0025f)
                fail_msg("'%s' is not step,loss,grad_norm,tokens_per_s,lr,", line);
            snprintf(losses[comma][step], sizeof losses[0][0], "%.9g %.9g %.9g", (double)loss, (double)norm,
                     (double)lr);
        }
    }
    for (int step = 0; step < 3; step++) assert_string_equal(losses[0][step], losses[1][step]);
    shell("cd '%s' && diff -r point comma && rm -r point comma", scratch);
}

static int open_scratch(void **state) {
    (void)state;
    return scratch_open("test_train");
}

static int remove_scratch(void **state) {
    static const char *const names[] = {"out",          "err",       "text",       "log.csv",     "one.hash",
                                        "split.hash",   "good.bin",  "magic.bin",  "version.bin", "short.bin",
                                        "negative.bin", "empty.bin", "header.bin", "empty.txt",   "short.txt",
                                        "vocab.bin",    "whole.csv", "rest.csv",   "init.csv",    "pipe"};
    (void)state;
    for (size_t i = 0; i < COUNT(names); i++) remove(in_scratch(names[i]));
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2_any_split),
        cmocka_unit_test(test_llama_any_split),
        cmocka_unit_test(test_activations),
        cmocka_unit_test(test_invariant_any_split),
        cmocka_unit_test(test_hash_log_of_the_last_step),
        cmocka_unit_test(test_invariant_over_context_ranks),
        cmocka_unit_test(test_invariant_in_bf16),
        cmocka_unit_test(test_hash_log_of_stages),
        cmocka_unit_test(test_hash_log_of_context_ranks),
        cmocka_unit_test(test_f16_scales_the_loss),
        cmocka_unit_test(test_device_that_is_not_built),
        cmocka_unit_test(test_recomputation),
        cmocka_unit_test(test_seed_and_dropout_matter),
        cmocka_unit_test(test_dry_run_and_ledger),
        cmocka_unit_test(test_configurations),
        cmocka_unit_test(test_utilization_of_a_plan),
        cmocka_unit_test(test_dry_run_on_a_machine),
        cmocka_unit_test(test_dry_run_on_no_machine),
        cmocka_unit_test(test_fastest_way_of_context_ranks),
        cmocka_unit_test(test_dry_run_of_a_pipeline),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_token_file),
        cmocka_unit_test(test_token_file_with_marks),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_absurd_flags),
        cmocka_unit_test(test_steps_that_are_not_finite),
        cmocka_unit_test(test_ends_that_are_not_finite),
        cmocka_unit_test(test_all_steps_skipped),
        cmocka_unit_test(test_what_the_end_says),
        cmocka_unit_test(test_dry_run_of_the_distributed_optimizer),
        cmocka_unit_test(test_logs_that_are_something_else),
        cmocka_unit_test(test_decimal_comma),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_smallest_file),
        cmocka_unit_test(test_token_beyond_the_vocabulary),
        cmocka_unit_test(test_token_beyond_in_own_data),
        cmocka_unit_test(test_sampling_fits_into_the_plan),
        cmocka_unit_test(test_loading_fits_into_the_plan),
        cmocka_unit_test(test_refusal_keeps_the_log),
        cmocka_unit_test(test_log_of_another_run),
        cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_checkpoints_of_context_ranks),
        cmocka_unit_test(test_stuck_rank_ends_the_process),
        cmocka_unit_test(test_resuming_something_else),
        cmocka_unit_test(test_logs_go_on),
        cmocka_unit_test(test_resume_keeps_what_is_no_log),
        cmocka_unit_test(test_logs_that_do_not_end),
        cmocka_unit_test(test_logs_that_are_no_files),
        cmocka_unit_test(test_positions),
        cmocka_unit_test(test_shape_of_a_model),
        cmocka_unit_test(test_flags_that_contradict_a_gpt2),
        cmocka_unit_test(test_flags_that_contradict_alibi),
        cmocka_unit_test(test_gpt2_of_hugging_face),
        cmocka_unit_test(test_weights_that_are_not_finite),
        cmocka_unit_test(test_begins_with_a_llama),
        cmocka_unit_test(test_links_out_of_a_model),
        cmocka_unit_test(test_links_in_a_model),
        cmocka_unit_test(test_links_to_a_checkpoint),
        cmocka_unit_test(test_resumes_behind_a_link),
        cmocka_unit_test(test_nan_has_no_sign),
    };
    return cmocka_run_group_tests(tests, open_scratch, remove_scratch);
}
