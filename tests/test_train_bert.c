/* test_train_bert.c - tests examples/train_bert.c, which it runs in this process: sentences, words, masks, the losses
   on every split, resumed runs, the sizes of the paper, token files, and the refusal of wrong flags. Run it from the
   root of the checkout. */

#define main program_main
#include "../examples/train_bert.c"
#undef main

#include "mt_test_program.h"

#define STEPS 12 /* with two validations */
#define SEQUENCES 600

/* ---- sequences --------------------------------------------------------------------------------------------------- */

/* Reads flags and data as main does. */
static void open_job(const char *words, job *j) {
    static char text[WORDS];
    char *argv[MAX_ARGS] = {(char *)(uintptr_t)PROGRAM};
    int argc = 1;
    memset(j, 0, sizeof *j);
    j->o = defaults();
    print_to(text, sizeof text, "%s", words);
    for (char *w = strtok(text, " "); w && argc < MAX_ARGS - 1; w = strtok(NULL, " ")) argv[argc++] = w;
    optind = 0; /* resets getopt */
    assert_true(parse_options(argc, argv, &j->o) && prepare(j));
}

static void close_job(job *j) {
    free(j->data.tokens);
    free(j->data.marks);
    free(j->setup.starts);
}

enum { SEQ = 128 };

typedef struct made {
    sequence q;
    int32_t ids[SEQ], targets[SEQ], types[SEQ], original[SEQ];
    int hidden, second; /* second: where segment B begins */
} made;

static void make(const job *j, int training, uint64_t number, made *m) {
    sequence q = {training, number, m->ids, m->targets, m->types, 0, 0};
    m->hidden = make_sequence(j, &q);
    m->q = q;
    for (int i = 0; i < SEQ; i++) m->original[i] = m->targets[i] == IGNORED ? m->ids[i] : m->targets[i];
    for (m->second = 1; m->second < SEQ && m->types[m->second] == 0; m->second++) continue;
}

/* The tokens of segment `which` of the sequence begin at this token of the data. */
static int64_t place_of(const job *j, const made *m, int which) {
    int begin = which ? m->second : 1, end = which ? m->q.length - 1 : m->second - 1;
    for (int64_t s = 0; s < j->setup.count; s++) {
        int64_t at = j->setup.starts[s];
        if (at + end - begin <= j->data.count &&
            memcmp(j->data.tokens + at, m->original + begin, (size_t)(end - begin) * sizeof *m->original) == 0)
            return at;
    }
    fail_msg("sequence %d: segment %d is not in the data", (int)m->q.number, which);
    return -1;
}

/* [CLS] A [SEP] B [SEP] [PAD]..., with at least one token in A and B. */
static void check_layout(const made *m) {
    int end = m->q.length;
    assert_true(end >= 5 && end <= SEQ && m->second >= 3 && m->second <= end - 2);
    for (int i = 0; i < SEQ; i++) {
        int special = i == 0 || i == m->second - 1 || i == end - 1;
        int32_t want = i == 0 ? 257 : i >= end ? 256 : 258;
        if (special || i >= end) assert_int_equal(m->original[i], want);
        else assert_true(m->original[i] < 256);
        if (special || i >= end) assert_int_equal(m->targets[i], IGNORED);
        assert_int_equal(m->types[i], i >= m->second && i < end);
    }
}

/* Writes 400 different sentences of 20 to 99 bytes. */
static void write_sentences(void) {
    static char text[400 * 100];
    size_t used = 0;
    for (int i = 0; i < 400; i++) {
        int bytes = snprintf(text + used, sizeof text - used, "S%d %d", i, i * i);
        memset(text + used + bytes, 'a' + i % 26, (size_t)(15 + i * 37 % 80));
        used += (size_t)(bytes + 15 + i * 37 % 80);
        used += (size_t)snprintf(text + used, sizeof text - used, i % 3 ? ". " : "\n");
    }
    write_bytes("text", text, used);
}

/* The two segments come from consecutive sentences; `order` says which of them is the first one in the data. */
static void test_segments_are_consecutive_sentences(void **state) {
    static job j;
    made m;
    char words[WORDS];
    int swapped = 0, shorter = 0, shorter_cuts = 0;
    (void)state;
    write_sentences();
    print_to(words, sizeof words, "--data %s", in_scratch("text"));
    open_job(words, &j);
    assert_int_equal(j.setup.count, 400);
    assert_true(j.setup.train > 340 && j.setup.train < 370);
    for (uint64_t n = 0; n < SEQUENCES; n++) {
        int64_t a, b, first;
        int training = n % 4 != 0, cut = 0;
        make(&j, training, n, &m);
        check_layout(&m);
        a = place_of(&j, &m, 0);
        b = place_of(&j, &m, 1);
        /* from the start of the first segment to the end of the second one there are only whole sentences */
        first = a < b ? m.second - 2 : m.q.length - 1 - m.second;
        cut = (a < b ? a : b) + first != (a < b ? b : a);
        shorter_cuts += cut && m.q.length < SEQ;
        assert_int_equal(m.q.order, a > b);
        assert_int_equal(training, (a < b ? a : b) < j.setup.starts[j.setup.train]);
        swapped += m.q.order;
        shorter += m.q.length < SEQ / 2;
    }
    assert_true(swapped > SEQUENCES * 2 / 5 && swapped < SEQUENCES * 3 / 5);
    assert_true(shorter > 0 && shorter < SEQUENCES / 2);
    assert_true(shorter_cuts < SEQUENCES / 10); /* one in ten is to be short, and some of these are cut */
    close_job(&j);
}

/* A text whose sentences and words are known. */
static void test_sentences_and_words(void **state) {
    static const char text[] = "One two. Three 4x4!\n\n  Five\xc3\xa4 six.seven\n";
    static job j;
    (void)state;
    write_bytes("text", text, sizeof text - 1);
    j.o = defaults();
    j.o.data = in_scratch("text");
    assert_true(load_data(&j.o, &j.data) && mark_text(&j.data));
    for (int64_t i = 0; i < j.data.count; i++) {
        int starts = strchr("OTF", text[i]) != NULL,
            inside = i > 0 && is_letter((unsigned char)text[i]) && is_letter((unsigned char)text[i - 1]);
        assert_int_equal(j.data.marks[i], (starts ? SENTENCE_START : 0) | (inside ? 0 : WORD_START));
    }
    close_job(&j);
}

/* What is hidden, over many sequences. */
typedef struct counts {
    int tokens, hidden, masks, same, other, runs, words;
} counts;

/* Counts the hidden tokens of a sequence, and checks that a word is hidden as a whole or not at all. */
static void count_hidden(const made *m, counts *c) {
    int before = 0;
    for (int i = 0; i < m->q.length; i++) {
        int hidden = m->targets[i] != IGNORED;
        int inside = i > 1 && i != m->second && is_letter(m->original[i]) && is_letter(m->original[i - 1]) &&
                     m->original[i] < 256 && m->original[i - 1] < 256;
        if (inside && hidden != before) fail_msg("sequence %d: half a word is hidden", (int)m->q.number);
        c->runs += hidden && !before;
        c->words += hidden && !inside;
        c->hidden += hidden;
        c->masks += hidden && m->ids[i] == 259;
        c->same += hidden && m->ids[i] == m->original[i];
        c->other += hidden && m->ids[i] != m->original[i] && m->ids[i] < 256;
        before = hidden;
    }
    c->tokens += m->q.length;
}

static void assert_share(int part, int whole, double want, double tolerance) {
    double got = (double)part / whole;
    if (!(fabs(got - want) <= tolerance)) fail_msg("%d of %d are %.4f, expected %.4f", part, whole, got, want);
}

static void test_masks(void **state) {
    static job j;
    counts c = {0};
    made m;
    int ngrams[4] = {0};
    (void)state;
    open_job("--data mt_comm.h", &j);
    for (uint64_t n = 0; n < 4 * SEQUENCES; n++) {
        int before = c.hidden;
        make(&j, 1, n, &m);
        count_hidden(&m, &c);
        assert_int_equal(c.hidden - before, m.hidden);
        assert_true(m.hidden <= (int)fmax(1, 0.15 * m.q.length + 0.5));
    }
    assert_share(c.hidden, c.tokens, 0.15, 0.003);
    assert_share(c.masks, c.hidden, 0.8, 0.01);
    assert_share(c.other, c.hidden, 0.1 * 255 / 256, 0.006);
    assert_share(c.same, c.hidden, 0.1 + 0.1 / 256, 0.006);
    assert_int_equal(c.masks + c.other + c.same, c.hidden);
    /* n-grams: single words would make runs of about 1 / (1 - 0.15) words */
    assert_true(c.words > 1.4 * c.runs);
    for (uint32_t r = 0; r < 11; r++) ngrams[draw_ngram(r)]++;
    assert_true(ngrams[1] == 6 && ngrams[2] == 3 && ngrams[3] == 2); /* 1 : 1/2 : 1/3 */
    close_job(&j);
}

/* A sequence depends on the seed and its number, and on nothing of the split. */
static void test_sequences_of_every_split(void **state) {
    static const char *const splits[] = {"--tp 1", "--tp 4 --dp 2 --sequence-parallel", "--dp 8 --pp 2 --micro-batch 1",
                                         "--invariant 4"};
    static made all[4][64];
    static job j;
    made other;
    char words[WORDS];
    (void)state;
    for (int i = 0; i < 4; i++) {
        print_to(words, sizeof words, "--data LICENSE %s", splits[i]);
        open_job(words, &j);
        for (int n = 63; n >= 0; n--) make(&j, 1, (uint64_t)(i % 2 ? 63 - n : n), &all[i][i % 2 ? 63 - n : n]);
        for (int n = 0; n < 64; n++) {
            assert_memory_equal(all[i][n].ids, all[0][n].ids, sizeof other.ids);
            assert_memory_equal(all[i][n].targets, all[0][n].targets, sizeof other.targets);
            assert_memory_equal(all[i][n].types, all[0][n].types, sizeof other.types);
            assert_int_equal(all[i][n].q.order, all[0][n].q.order);
        }
        close_job(&j);
    }
    open_job("--data LICENSE --seed 5", &j);
    make(&j, 1, 0, &other);
    assert_memory_not_equal(other.ids, all[0][0].ids, sizeof other.ids);
    assert_memory_not_equal(all[0][1].ids, all[0][0].ids, sizeof other.ids);
    close_job(&j);
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

enum { COLUMNS = 8 }; /* of the log, without the step; tokens_per_s becomes 0 */

/* Reads the rows of a log, from step `first` on. A value that is not there is -1. Returns their number. */
static int read_log(const char *name, int first, double rows[][COLUMNS]) {
    char line[512];
    int n = 0;
    FILE *f = fopen(in_scratch(name), "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    assert_string_equal(line, "step,lm_loss,sop_loss,grad_norm,tokens_per_s,lr,val_lm_loss,val_sop_loss,"
                              "val_sop_accuracy\n");
    while (fgets(line, sizeof line, f)) {
        char *at = line;
        assert_int_equal(strtol(at, &at, 10), first + n);
        for (int i = 0; i < COLUMNS; i++) {
            assert_int_equal(*at++, ',');
            rows[n][i] = *at == ',' || *at == '\n' ? -1 : strtod(at, &at);
        }
        rows[n++][3] = 0;
        assert_int_equal(*at, '\n');
    }
    fclose(f);
    return n;
}

#define SMALL                                                                                                          \
    "--data %s --layers 2 --hidden 32 --heads 8 --seq 32 --batch 8 --dropout 0.1 --warmup 3 --lr 5e-3 --no-pinning "

static void train_rows(const char *flags, double rows[STEPS][COLUMNS]) {
    char words[WORDS], text[1024];
    print_to(words, sizeof words, SMALL "--steps %d --eval-interval %d --log %s %s", in_scratch("text"), STEPS,
             STEPS / 2, in_scratch("log.csv"), flags);
    if (run_program(words) != 0) {
        read_text("err", text, sizeof text);
        fail_msg("%s: %s", words, text);
    }
    assert_int_equal(read_log("log.csv", 1, rows), STEPS);
    for (int i = 0; i < STEPS; i++) assert_int_equal(rows[i][5] >= 0, (i + 1) % (STEPS / 2) == 0);
}

/* 1e-4 relative: rounding gives about 1e-6. */
static void compare_splits(const char *model, const char *const *splits, int count) {
    static double one[STEPS][COLUMNS], many[STEPS][COLUMNS];
    char flags[WORDS];
    print_to(flags, sizeof flags, "%s --tp 1", model);
    train_rows(flags, one);
    for (int i = 0; i < count; i++) {
        print_to(flags, sizeof flags, "%s %s", model, splits[i]);
        train_rows(flags, many);
        for (int step = 0; step < STEPS; step++)
            for (int c = 0; c < COLUMNS; c++)
                if (!(fabs(many[step][c] - one[step][c]) <= 1e-4 * fabs(one[step][c])))
                    fail_msg("%s: step %d, column %d: %.9g, expected %.9g", flags, step + 1, c, many[step][c],
                             one[step][c]);
    }
}

static void test_any_split(void **state) {
    static const char *const pre[] = {"--tp 2",
                                      "--tp 4 --dp 2 --sequence-parallel",
                                      "--tp 1 --dp 2 --use-distributed-optimizer",
                                      "--tp 2 --pp 2 --micro-batch 1",
                                      "--tp 2 --cp 2 --sequence-parallel --cp-comm-type a2a",
                                      "--tp 1 --cp 2 --pp 2 --micro-batch 1",
                                      "--tp 1 --cp 4",
                                      "--tp 1 --micro-batch 2",
                                      "--tp 2 --recompute full",
                                      "--tp 2 --sequence-parallel"};
    static const char *const post[] = {"--tp 2 --pp 2 --dp 2 --micro-batch 2 --schedule gpipe --sequence-parallel",
                                       "--tp 4", "--tp 1 --dp 4", "--tp 2 --sequence-parallel --dp 2"};
    (void)state;
    write_text();
    compare_splits("", pre, test_all() ? 10 : 6);
    compare_splits("--placement post-ln", post, test_all() ? 4 : 1);
}

static void test_invariant_any_split(void **state) {
    static const char *const splits[] = {"--tp 4 --sequence-parallel", "--tp 2 --pp 2 --dp 2",
                                         "--tp 2 --dp 4 --sequence-parallel --placement post-ln",
                                         "--tp 2 --cp 4 --dp 2 --sequence-parallel --invariant-context 4"};
    static double one[STEPS][COLUMNS], many[STEPS][COLUMNS];
    char flags[WORDS];
    (void)state;
    write_text();
    for (int i = 0; i < 4; i++) {
        const char *post = strstr(splits[i], "post")      ? "--placement post-ln"
                           : strstr(splits[i], "context") ? "--invariant-context 4"
                                                          : "";
        print_to(flags, sizeof flags, "--invariant 4 --tp 1 %s --hash-log %s", post, in_scratch("one.hash"));
        train_rows(flags, one);
        print_to(flags, sizeof flags, "--invariant 4 %s --hash-log %s", splits[i], in_scratch("many.hash"));
        train_rows(flags, many);
        assert_memory_equal(one, many, sizeof one);
        shell("cmp '%s' '%s'", in_scratch("one.hash"), in_scratch("many.hash"));
        shell("grep -q ' sop_loss.output ' '%s' && grep -q ' binary_head.weight.grad ' '%s'", in_scratch("one.hash"),
              in_scratch("one.hash"));
    }
}

/* A run that is stopped in the middle goes on with the same losses, on another split. */
static void resume(const char *placement) {
    static double whole[STEPS][COLUMNS], rest[STEPS][COLUMNS];
    char flags[WORDS], words[WORDS];
    print_to(flags, sizeof flags, "--placement %s --tp 2 --checkpoint %s --save-interval %d", placement,
             in_scratch("c"), STEPS / 2);
    train_rows(flags, whole);
    shell("rm -r '%s'/c/step-000000%d", scratch, STEPS);
    print_to(words, sizeof words,
             SMALL "--placement %s --steps %d --eval-interval %d --log %s --dp 2 --checkpoint %s --resume",
             in_scratch("text"), placement, STEPS, STEPS / 2, in_scratch("rest.csv"), in_scratch("c"));
    assert_int_equal(run_program(words), 0);
    assert_int_equal(read_log("rest.csv", STEPS / 2 + 1, rest), STEPS / 2);
    for (int i = 0; i < STEPS / 2; i++)
        for (int c = 0; c < COLUMNS; c++)
            if (!(fabs(rest[i][c] - whole[STEPS / 2 + i][c]) <= 1e-4 * fabs(rest[i][c])))
                fail_msg("%s: step %d, column %d: %.9g, expected %.9g", placement, STEPS / 2 + i + 1, c, rest[i][c],
                         whole[STEPS / 2 + i][c]);
    remove(in_scratch("rest.csv"));
}

/* With post-LN, the checkpoint is a BertForPreTraining of Hugging Face. */
static void test_resume(void **state) {
    char words[WORDS];
    (void)state;
    write_text();
    resume("post-ln");
    shell("grep -q BertForPreTraining '%s'/c/step-000000%d/config.json", scratch, STEPS);
    forget("c");
    resume("pre-ln");
    print_to(words, sizeof words, SMALL "--placement post-ln --checkpoint %s --resume", in_scratch("text"),
             in_scratch("c"));
    expect_error(words, "has pre-ln");
    print_to(words, sizeof words, SMALL "--heads 4 --checkpoint %s --resume", in_scratch("text"), in_scratch("c"));
    expect_error(words, "--heads is 4, the model in ");
    forget("c");
}

/* On real text, the loss falls in a few steps, in f32 and in bf16. */
static void test_learns(void **state) {
    static const char *const dtypes[] = {"f32", "bf16"};
    static double rows[64][COLUMNS];
    char words[WORDS];
    (void)state;
    for (int i = 0; i < (test_all() ? 2 : 1); i++) {
        print_to(words, sizeof words,
                 "--data README.md --tp 1 --layers 2 --hidden 32 --heads 4 --seq 64 --batch 8 --lr 1e-2 --warmup 5 "
                 "--steps 60 --eval-interval 60 --dtype %s --log %s",
                 dtypes[i], in_scratch("log.csv"));
        assert_int_equal(run_program(words), 0);
        assert_int_equal(read_log("log.csv", 1, rows), 60);
        assert_true(rows[0][0] > 5.4 && rows[0][0] < 5.8); /* ln 260 = 5.56 */
        assert_true(fabs(rows[0][1] - 0.69) < 0.05);       /* ln 2 */
        assert_true(rows[59][0] < 4 && rows[59][5] < 4);
        assert_true(rows[59][4] < 1e-3 && rows[4][4] > 9.9e-3); /* warm-up, then a line */
    }
}

/* ---- the sizes of the paper -------------------------------------------------------------------------------------- */

static void test_configurations(void **state) {
    static const struct {
        const char *name;
        long long h, layers, tp, rows;
        double millions; /* as the table of the paper has them, cut */
    } paper[] = {{"bert-336m", 1024, 24, 1, 30592, 335},
                 {"bert-1.3b", 2048, 24, 1, 30592, 1276},
                 {"bert-3.9b", 2560, 48, 4, 30720, 3862}};
    char words[WORDS], text[4096], line[256];
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        long long h = paper[i].h, t = paper[i].tp, l = paper[i].layers;
        long long body = l * (12 * h * h + 13 * h) + (512 + 2) * h + 2 * h, pooler = h * h + h;
        long long heads = h * h + h + 2 * h + 2 * h + 2;
        print_to(words, sizeof words, "--config %s --dp 64 --dtype f16 --dry-run", paper[i].name);
        assert_int_equal(run_program(words), 0);
        read_text("out", text, sizeof text);
        print_to(line, sizeof line, "vocabulary of %lld, without heads except the pooler: %lld\n", paper[i].rows,
                 body + pooler + paper[i].rows * h);
        if (!strstr(text, line)) fail_msg("no '%s' in: %s", line, text);
        assert_true(floor((double)(body + pooler + paper[i].rows * h) / 1e6) == paper[i].millions);
        print_to(line, sizeof line,
                 "BERT, pre-LN: %lld layers, hidden %lld, heads %lld, vocabulary 30522, %lld "
                 "parameters in f16; %lld x tensor, 64 x data",
                 l, h, h / 64, body + pooler + heads + 30522 * (h + 1), t);
        if (!strstr(text, line)) fail_msg("no '%s' in: %s", line, text);
        assert_non_null(strstr(text, "1024 sequences of 512 per step"));
    }
    assert_int_equal(run_program("--config bert-336m --tp 2 --placement post-ln --dry-run"), 0);
    read_text("out", text, sizeof text);
    assert_non_null(strstr(text, "BERT, post-LN: 24 layers"));
    assert_non_null(strstr(text, "vocabulary of 30720"));
}

/* ---- token files and flags --------------------------------------------------------------------------------------- */

enum { BIN_TOKENS = 4000 };

/* Writes a token file with sentences of 10 tokens and words of 1 to 3. */
static void write_bin(const char *name, int32_t marks, int32_t largest) {
    static unsigned char file[LLMC_HEADER_BYTES + 3 * BIN_TOKENS];
    int32_t header[10] = {LLMC_MAGIC, 1, BIN_TOKENS, 0, 0, marks, 1, 2, 3, 4};
    memset(file, 0, sizeof file);
    memcpy(file, header, sizeof header);
    for (int i = 0; i < BIN_TOKENS; i++) {
        int32_t token = i == 77 ? largest : 5 + i * i % 40;
        file[LLMC_HEADER_BYTES + 2 * i] = (unsigned char)(token & 255);
        file[LLMC_HEADER_BYTES + 2 * i + 1] = (unsigned char)(token >> 8);
        file[LLMC_HEADER_BYTES + 2 * BIN_TOKENS + i] =
            (unsigned char)((i % 10 == 0 ? SENTENCE_START : 0) | (i % 10 == 0 || i % 3 == 0 ? WORD_START : 0));
    }
    write_bytes(name, file, LLMC_HEADER_BYTES + (size_t)(marks == 1 ? 3 : 2) * BIN_TOKENS);
}

static void test_token_file(void **state) {
    static job j;
    made m;
    char words[WORDS];
    (void)state;
    write_bin("good.bin", 1, 50);
    print_to(words, sizeof words, "--vocab 60 --data %s", in_scratch("good.bin"));
    open_job(words, &j);
    assert_int_equal(j.setup.count, BIN_TOKENS / 10);
    for (uint64_t n = 0; n < 50; n++) {
        make(&j, 1, n, &m);
        assert_int_equal(m.original[0], 2);
        assert_int_equal(m.original[m.second - 1], 3);
        assert_int_equal(m.original[m.q.length - 1], 3);
        for (int i = 0; i < m.q.length; i++) assert_true(m.ids[i] >= 0 && m.ids[i] < 60);
        if (m.q.length < SEQ) assert_int_equal(m.ids[m.q.length], 1);
    }
    close_job(&j);
    print_to(words, sizeof words, "--data %s --layers 1 --hidden 16 --heads 2 --steps 2 --vocab 60",
             in_scratch("good.bin"));
    assert_int_equal(run_program(words), 0);
    write_bin("plain.bin", 0, 50);
    print_to(words, sizeof words, "--data %s", in_scratch("plain.bin"));
    expect_error(words, "plain.bin has no marks of sentences and words");
    print_to(words, sizeof words, "--data %s --vocab 50", in_scratch("good.bin"));
    expect_error(words, "good.bin: token 78 is 50, and the vocabulary of the model is 50");
}

/* ---- --init-from ------------------------------------------------------------------------------------------------- */

/* Runs two steps from a model. The first step is the same whether the flags repeat the shape of the model or not, and
   on any split. */
static double first_loss(const char *from, const char *data, const char *flags) {
    static double rows[2][COLUMNS];
    char words[WORDS], text[1024];
    print_to(words, sizeof words,
             "--init-from %s --data %s --batch 4 --steps 2 --warmup 0 --eval-interval 0 --no-pinning --log %s %s", from,
             data, in_scratch("init.csv"), flags);
    if (run_program(words) != 0) {
        read_text("err", text, sizeof text);
        fail_msg("%s: %s", words, text);
    }
    assert_int_equal(read_log("init.csv", 1, rows), 2);
    remove(in_scratch("init.csv"));
    return rows[0][0];
}

static void test_init_from(void **state) {
    static const struct {
        const char *flags, *sentence;
    } bad[] = {{"--layers 3", "--layers is 3, the model in %s has 2 layers"},
               {"--hidden 64", "--hidden is 64, the model in %s has 32 hidden features"},
               {"--heads 4", "--heads is 4, the model in %s has 8 heads"},
               {"--ffn 64", "--ffn is 64, the model in %s has 128 features in its MLP"},
               {"--vocab 300", "--vocab is 300, the model in %s has 260 tokens in its vocabulary"},
               {"--vocab 100", "--vocab is 100, the model in %s has 260 tokens in its vocabulary"},
               {"--seq 64", "--seq is 64, the model in %s has 32 positions"},
               {"--placement pre-ln", "--placement is pre-ln, the model in %s has post-ln"},
               {"--config bert-336m --dry-run", "--config bert-336m has 24 layers, the model in %s has 2 layers"},
               {"--config bert-336m --layers 2 --hidden 32 --heads 8",
                "--config bert-336m has 30522 tokens in its vocabulary, the model in %s has 260 tokens in its "
                "vocabulary"},
               {"--config bert-336m --layers 3", "--layers is 3, the model in %s has 2 layers"},
               {"--placement pre-ln --heads 4 --batch 5 --dp 2", "--heads is 4, the model in %s has 8 heads"}};
    static double rows[STEPS][COLUMNS];
    char words[WORDS], from[WORDS];
    double loss, fresh;
    (void)state;
    write_text();
    print_to(words, sizeof words, "--placement post-ln --checkpoint %s", in_scratch("c"));
    train_rows(words, rows);
    print_to(from, sizeof from, "%s/step-000000%d", in_scratch("c"), STEPS);
    loss = first_loss(from, in_scratch("text"), "");
    fresh = rows[0][0];
    if (!(loss < 0.9 * fresh)) fail_msg("the loss begins with %g, without the model with %g", loss, fresh);
    assert_true(fabs(first_loss(from, in_scratch("text"), "--layers 2 --placement post-ln --tp 1") - loss) < 1e-4);
    assert_true(fabs(first_loss(from, in_scratch("text"), "--pp 2 --tp 2 --sequence-parallel") - loss) < 1e-4);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *want = bad[i].sentence, *at = strstr(want, "%s");
        char text[1024], sentence[WORDS];
        print_to(sentence, sizeof sentence, "train_bert: %.*s%s%s\n", (int)(at - want), want, from, at + 2);
        print_to(words, sizeof words, "--init-from %s --data %s %s", from, in_scratch("text"), bad[i].flags);
        expect_error(words, "train_bert: --");
        read_text("err", text, sizeof text);
        if (strcmp(text, sentence) != 0) fail_msg("%s: %s", words, text);
    }
    forget("c");
    print_to(words, sizeof words, "--init-from tests/golden/gpt2_hf --data %s", in_scratch("text"));
    expect_error(words, "model_type is 'gpt2', must be bert");
}

/* A BERT of Hugging Face. What the program saves keeps the members of its config.json. */
static void test_hugging_face(void **state) {
    char words[WORDS];
    (void)state;
    write_bin("hf.bin", 1, 50);
    print_to(words, sizeof words, "--checkpoint %s", in_scratch("h"));
    assert_true(first_loss("tests/golden/bert_hf", in_scratch("hf.bin"), words) > 0);
    shell("grep -q a_member_of_another_program '%s/h/step-00000002/config.json'", scratch);
    print_to(words, sizeof words,
             "--resume --checkpoint %s --data %s --batch 4 --steps 3 --eval-interval 0 --no-pinning "
             "--warmup 0",
             in_scratch("h"), in_scratch("hf.bin"));
    assert_int_equal(run_program(words), 0);
    forget("h");
}

static void test_absurd_flags(void **state) {
    static const struct {
        const char *words, *sentence;
    } bad[] = {
        {"--placement middle", "--placement middle: expected pre-ln (norms"},
        {"--config bert-large", "--config bert-large: expected bert-336m, bert-1.3b or bert-3.9b"},
        {"--vocab 100", "--vocab 100: [PAD] of the data is token 256"},
        {"--seq 7", "--seq 7: expected a whole number from 8"},
        {"--seq 9 --tp 2 --sequence-parallel", "--seq 9 is not a multiple of --tp 2"},
        {"--batch 5 --dp 2", "--batch 5 is not a multiple of --dp 2"},
        {"--cp 0", "--cp 0: expected a whole number from 1 to 1024"},
        {"--cp 3", "--seq 128 is not a multiple of 6: each of --cp 3 ranks has 2 parts"},
        {"--cp 8 --tp 16 --pp 16 --layers 16", "--tp 16 x --cp 8 x --dp 1 x --pp 16 are more than 1024 ranks"},
        {"--heads 5 --tp 1", "hidden is 128, must be a multiple of heads 5"},
        {"--resume", "train_bert: --resume needs --checkpoint DIR"},
        {"--cuda-graph", "cuda-graph"},
        {"--rotary", "rotary"},
        {"--data /nonexistent", "cannot read /nonexistent"},
        {"stray", "unexpected argument 'stray'"},
        {"--lr 1000 --clip 0 --warmup 0 --steps 200 --layers 1 --hidden 16 --seq 8 --batch 2", "not finite"},
    };
    char words[WORDS];
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        print_to(words, sizeof words, "--data LICENSE %s", bad[i].words);
        expect_error(words, bad[i].sentence);
    }
    write_bytes("short", "One sentence only", 17);
    print_to(words, sizeof words, "--data %s", in_scratch("short"));
    expect_error(words, "both need at least 2");
}

/* A run that has diverged, before the tenth step in a row that is not finite. */
static void test_end_that_is_not_finite(void **state) {
    static const char flags[] = "--lr 1000 --min-lr 1000 --clip 0 --warmup 0 --layers 1 --hidden 16 "
                                "--heads 2 --seq 16 --batch 4 --eval-interval 0";
    char words[WORDS], text[4096], sentence[64];
    int last;
    (void)state;
    write_text();
    print_to(words, sizeof words, "--data %s %s --steps 400", in_scratch("text"), flags);
    expect_error(words, "stopping after 10 such steps in a row");
    read_text("err", text, sizeof text);
    last = (int)strtol(strstr(text, "step ") + 5, NULL, 10) - 1;
    print_to(words, sizeof words, "--data %s %s --steps %d", in_scratch("text"), flags, last);
    print_to(sentence, sizeof sentence, "train_bert: step %d: ", last);
    expect_error(words, sentence);
    expect_error(words, "the run ends without a result\n");
}

static int open_scratch(void **state) {
    (void)state;
    return scratch_open("test_train_bert");
}

static int remove_scratch(void **state) {
    static const char *const names[] = {"out",      "err",       "text",     "log.csv", "one.hash", "many.hash",
                                        "rest.csv", "plain.bin", "good.bin", "short",   "hf.bin"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) remove(in_scratch(names[i]));
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sentences_and_words),
        cmocka_unit_test(test_segments_are_consecutive_sentences),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_sequences_of_every_split),
        cmocka_unit_test(test_any_split),
        cmocka_unit_test(test_invariant_any_split),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_learns),
        cmocka_unit_test(test_configurations),
        cmocka_unit_test(test_token_file),
        cmocka_unit_test(test_init_from),
        cmocka_unit_test(test_hugging_face),
        cmocka_unit_test(test_end_that_is_not_finite),
        cmocka_unit_test(test_absurd_flags),
        cmocka_unit_test(test_help),
    };
    return cmocka_run_group_tests(tests, open_scratch, remove_scratch);
}
