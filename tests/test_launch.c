/* test_launch.c - tests mt_world_from_env without a launcher: it sets the environment variables that each launcher
   sets, and checks ranks and sizes against the expected ones, the refusal of each wrong environment, and the address at
   which the ranks would meet. */

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"
#include "mt_test.h"

/* ---- an environment ---------------------------------------------------------------------------------------------- */

/* Unsets all variables that are read, so that the environment of the test itself has no effect. */
static void clear_environment(void) {
    static const char *const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALRANKID",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_JOB_NODELIST",
                                        "NCCL_COMM_ID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

/* Sets the environment to `text`, such as "RANK=1 WORLD_SIZE=4". A value of "''" is empty. */
static void set_environment(const char *text) {
    char copy[512], *word, *rest = NULL;
    clear_environment();
    snprintf(copy, sizeof copy, "%s", text);
    for (word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *equals = strchr(word, '=');
        assert_non_null(equals);
        *equals = '\0';
        assert_int_equal(setenv(word, strcmp(equals + 1, "''") ? equals + 1 : "", 1), 0);
    }
}

/* ---- what came of it --------------------------------------------------------------------------------------------- */

typedef struct result {
    int wanted;        /* the rank that records what it sees */
    mt_status returns; /* the status that this rank returns */
    int calls, rank, size, local_rank;
    int lines;
    char line[1200];
} result;

static void keep_line(void *user, mt_log_level level, const char *message) {
    result *r = (result *)user;
    (void)level;
    r->lines++;
    snprintf(r->line, sizeof r->line, "%s", message);
}

static mt_status look_around(mt_comm *world, void *user) {
    result *r = (result *)user;
    if (mt_comm_rank(world) == r->wanted) {
        r->rank = mt_comm_rank(world);
        r->size = mt_comm_size(world);
        r->local_rank = mt_comm_local_rank(world);
    }
    __atomic_add_fetch(&r->calls, 1, __ATOMIC_RELAXED);
    CHECK(strcmp(mt_comm_name(world), "world") == 0);
    return r->returns;
}

static mt_status start(result *r, const char *environment, int ranks) {
    mt_launch_desc d = {.ranks = ranks, .no_pinning = 1, .timeout_s = TEST_NEVER_OVER, .logger = {keep_line, r}};
    r->calls = r->size = r->lines = 0;
    r->rank = r->local_rank = -1;
    set_environment(environment);
    return mt_world_from_env(&d, look_around, r);
}

/* ---- environments that are right --------------------------------------------------------------------------------- */

typedef struct place {
    const char *environment;
    int ranks; /* number of ranks that the program asks for */
    int calls, rank, size, local_rank;
} place;

static const place places[] = {
    /* no variables: threads */
    {"", 0, 1, 0, 1, 0},
    {"", 3, 3, 0, 3, 0},
    /* Variables without ranks: those of a shell started by salloc or sbatch, and names that other programs use. */
    {"SLURM_JOB_ID=17 SLURM_NTASKS=4 SLURM_JOB_NODELIST=n[1-2]", 2, 2, 0, 2, 0},
    {"SLURM_JOB_ID=17 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=n1", 3, 3, 0, 3, 0},
    {"MASTER_ADDR=here MASTER_PORT=nonsense", 2, 2, 0, 2, 0},
    /* each launcher */
    {"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=n1 MASTER_PORT=29500", 8, 1, 5, 8, 1},
    {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", 0, 1, 0, 2, 0},
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1", 4, 1, 3, 4, 1},
    {"PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=0", 3, 1, 2, 3, 0},
    {"SLURM_STEP_ID=0 SLURM_JOB_ID=9 SLURM_PROCID=6 SLURM_NTASKS=7 SLURM_LOCALID=2", 7, 1, 6, 7, 2},
    /* a job step with fewer tasks than its job */
    {"SLURM_STEP_ID=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=16 SLURM_LOCALID=1", 2, 1, 1, 2, 1},
    /* srun --mpi=pmi2, which sets the variables of Hydra, too */
    {"SLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=16 SLURM_NTASKS=16 PMI_RANK=9 PMI_SIZE=16",
     16, 1, 9, 16, 1},
    /* without a local rank, it is the rank */
    {"RANK=2 WORLD_SIZE=4", 0, 1, 2, 4, 2},
    {"PMI_RANK=1 PMI_SIZE=2", 0, 1, 1, 2, 1},
    /* more ranks than mt_launch allows threads */
    {"RANK=4999 WORLD_SIZE=5000 LOCAL_RANK=7", 5000, 1, 4999, 5000, 7},
    /* several launchers: the innermost counts */
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 RANK=3 WORLD_SIZE=4 LOCAL_RANK=1", 4, 1, 3, 4, 1},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4", 4, 1, 2, 4, 2},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 PMI_RANK=0 PMI_SIZE=4 MPI_LOCALRANKID=0", 4, 1, 0, 4, 0},
    {"PMI_RANK=0 PMI_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 RANK=2 WORLD_SIZE=3", 3, 1, 2, 3, 2},
    /* one rank */
    {"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", 1, 1, 0, 1, 0},
    {"SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0", 0, 1, 0, 1, 0},
};

static void test_places(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const place *p = &places[i];
        result r = {.wanted = p->rank};
        mt_status status = start(&r, p->environment, p->ranks);
        if (status != MT_SUCCESS) fail_msg("\"%s\": %s: %s", p->environment, mt_status_name(status), r.line);
        if (r.calls != p->calls || r.rank != p->rank || r.size != p->size || r.local_rank != p->local_rank)
            fail_msg("\"%s\": %d calls, rank %d of %d, local rank %d", p->environment, r.calls, r.rank, r.size,
                     r.local_rank);
        assert_int_equal(r.lines, 0);
    }
}

static mt_status threads_and_groups(mt_comm *world, void *user) {
    mt_comm *half = NULL;
    int rank = mt_comm_rank(world);
    (void)user;
    CHECK(mt_comm_local_rank(world) == rank);
    MT_TRY(mt_comm_split(world, rank / 2, 0, &half));
    CHECK(mt_comm_rank(half) == rank % 2 && mt_comm_local_rank(half) == rank);
    mt_comm_destroy(half);
    return MT_SUCCESS;
}

static void test_local_rank_of_threads(void **state) {
    mt_launch_desc d = {.ranks = 4, .no_pinning = 1};
    mt_comm *meta = NULL;
    (void)state;
    set_environment("");
    assert_int_equal(mt_world_from_env(&d, threads_and_groups, NULL), MT_SUCCESS);
    assert_int_equal(mt_comm_create_meta(8, 5, &meta), MT_SUCCESS);
    assert_int_equal(mt_comm_local_rank(meta), 5);
    mt_comm_destroy(meta);
    assert_int_equal(mt_comm_local_rank(NULL), 0);
}

/* ---- environments that are wrong --------------------------------------------------------------------------------- */

typedef struct wrong {
    const char *environment;
    int ranks;
    const char *words; /* words of the error message, separated by | */
} wrong;

static const wrong wrongs[] = {
    /* incomplete */
    {"RANK=3", 4, "WORLD_SIZE is not set|RANK=3|torchrun"},
    {"WORLD_SIZE=4 LOCAL_RANK=1", 4, "RANK is not set|WORLD_SIZE=4 LOCAL_RANK=1"},
    {"LOCAL_RANK=0", 0, "WORLD_SIZE is not set|LOCAL_RANK=0"},
    {"OMPI_COMM_WORLD_RANK=0", 0, "OMPI_COMM_WORLD_SIZE is not set|OMPI_COMM_WORLD_RANK=0|Open MPI"},
    {"PMI_SIZE=2", 0, "PMI_RANK is not set|PMI_SIZE=2|MPICH"},
    {"SLURM_STEP_ID=4 SLURM_NTASKS=2", 0, "SLURM_PROCID is not set|SLURM_STEP_ID=4 SLURM_NTASKS=2|Slurm"},
    {"SLURM_STEP_ID=4 SLURM_PROCID=0", 0, "SLURM_STEP_NUM_TASKS is not set|SLURM_PROCID=0"},
    {"RANK=1 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1", 0, "WORLD_SIZE is not set|RANK=1"},
    /* not a number */
    {"RANK=one WORLD_SIZE=4", 4, "RANK is \"one\"|from 0 to 3|WORLD_SIZE=4"},
    {"RANK=1 WORLD_SIZE=4x", 4, "WORLD_SIZE is \"4x\"|from 1 to|RANK=1"},
    {"RANK=-1 WORLD_SIZE=4", 4, "RANK is \"-1\""},
    {"RANK=+1 WORLD_SIZE=4", 4, "RANK is \"+1\""},
    {"RANK=1.0 WORLD_SIZE=4", 4, "RANK is \"1.0\""},
    {"RANK='' WORLD_SIZE=4", 4, "RANK is \"\""},
    {"RANK=0 WORLD_SIZE=''", 4, "WORLD_SIZE is \"\""},
    {"RANK=1 WORLD_SIZE=99999999999999999999999", 4, "WORLD_SIZE is \"99999999999999999999999\""},
    {"RANK=1 WORLD_SIZE=2147483648", 4, "WORLD_SIZE is \"2147483648\"|to 2147483647"},
    {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=x", 4, "LOCAL_RANK is \"x\""},
    /* out of range */
    {"RANK=4 WORLD_SIZE=4", 4, "RANK is \"4\"|from 0 to 3"},
    {"RANK=0 WORLD_SIZE=0", 0, "WORLD_SIZE is \"0\"|from 1"},
    {"RANK=1 WORLD_SIZE=4 LOCAL_RANK=4", 4, "LOCAL_RANK is \"4\"|from 0 to 3"},
    {"OMPI_COMM_WORLD_RANK=7 OMPI_COMM_WORLD_SIZE=2", 0, "OMPI_COMM_WORLD_RANK is \"7\"|from 0 to 1"},
    /* not the number of ranks that the program asks for */
    {"RANK=1 WORLD_SIZE=4", 2, "wants 2 ranks|torchrun has started 4|RANK=1 WORLD_SIZE=4"},
    {"RANK=0 WORLD_SIZE=1", 4, "wants 4 ranks|has started 1"},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2", 8, "wants 8 ranks|Slurm has started 2|SLURM_PROCID=1"},
    {"RANK=1 WORLD_SIZE=4", -4, "wants -4 ranks"},
    /* a wrong address to meet at */
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=http", 4, "MASTER_PORT is \"http\"|from 1 to 65534"},
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=65535", 4, "MASTER_PORT is \"65535\""},
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=0", 4, "MASTER_PORT is \"0\""},
    {"RANK=1 WORLD_SIZE=4 MASTER_ADDR='' MASTER_PORT=1", 4, "MASTER_ADDR is \"\"|no host"},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=7 SLURM_STEP_NODELIST=n[", 2,
     "SLURM_STEP_NODELIST is \"n[\""},
    {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=x SLURM_JOB_NODELIST=n1", 2, "SLURM_JOB_ID is \"x\""},
};

static void assert_words(const char *line, const char *words) {
    if (!test_has_words(line, words)) fail_msg("'%s' is not all in '%s'", words, line);
}

static void test_wrong_environments(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof wrongs / sizeof *wrongs; i++) {
        result r = {.wanted = 0};
        mt_status status = start(&r, wrongs[i].environment, wrongs[i].ranks);
        if (status != MT_ERR_ARGUMENT || r.calls != 0 || r.lines != 1)
            fail_msg("\"%s\": %s, %d calls, %d sentences", wrongs[i].environment, mt_status_name(status), r.calls,
                     r.lines);
        assert_words(r.line, "mt_world_from_env: ");
        assert_words(r.line, wrongs[i].words);
    }
}

static void test_arguments(void **state) {
    mt_launch_desc d = {.timeout_s = -1};
    result r = {.wanted = 0};
    (void)state;
    set_environment("RANK=0 WORLD_SIZE=2");
    d.logger.log = keep_line;
    d.logger.user = &r;
    assert_int_equal(mt_world_from_env(&d, look_around, &r), MT_ERR_ARGUMENT);
    assert_words(r.line, "timeout_s is -1");
    d.timeout_s = 0;
    assert_int_equal(mt_world_from_env(&d, NULL, &r), MT_ERR_ARGUMENT);
    assert_words(r.line, "rank_main is NULL");
    set_environment("");
    assert_int_equal(mt_world_from_env(NULL, look_around, &r), MT_SUCCESS);
    assert_int_equal(r.calls, 1);
}

/* ---- a rank that fails, and the status of the process ------------------------------------------------------------ */

static void test_failure(void **state) {
    result r = {.returns = MT_ERR_SHAPE};
    (void)state;
    assert_int_equal(start(&r, "RANK=2 WORLD_SIZE=4", 4), MT_ERR_SHAPE);
    assert_int_equal(r.lines, 1);
    assert_string_equal(r.line, "rank 2 of 4: MT_ERR_SHAPE: shapes do not fit together");
    r.returns = MT_ERR_PEER; /* the only rank of this process: no other rank has reported the cause */
    assert_int_equal(start(&r, "RANK=2 WORLD_SIZE=4", 4), MT_ERR_PEER);
    assert_words(r.line, "rank 2 of 4: MT_ERR_PEER");
}

/* ---- a world that nothing connects ------------------------------------------------------------------------------- */

/* This program is built without MPI and NCCL. */
static mt_status try_everything(mt_comm *world, void *user) {
    mt_context_desc where = {.arena_bytes = 4096};
    mt_context *ctx = NULL, *meta = NULL;
    mt_comm *out = world;
    float x[8] = {1}, y[8] = {2};
    const char *said;
    (void)user;
    MT_TRY(mt_context_create(world, &where, &ctx));
    where.device = MT_DEVICE_META;
    MT_TRY(mt_context_create(world, &where, &meta));
    said = mt_last_error(ctx);
    CHECK(mt_all_reduce(ctx, world, x, y, 2, MT_F32, MT_SUM) == MT_ERR_UNSUPPORTED && strstr(said, "mt_all_reduce"));
    CHECK(strstr(said, "4 ranks of \"world\"") && strstr(said, "torchrun") && strstr(said, "-DMT_USE_MPI"));
    CHECK(strcmp(mt_comm_last_error(world), said) == 0);
    CHECK(mt_all_gather(ctx, world, x, y, 2, MT_F32) == MT_ERR_UNSUPPORTED && strstr(said, "mt_all_gather"));
    CHECK(mt_reduce_scatter(ctx, world, x, y, 2, MT_F32, MT_SUM) == MT_ERR_UNSUPPORTED);
    CHECK(mt_broadcast(ctx, world, x, x, 2, MT_F32, 0) == MT_ERR_UNSUPPORTED && strstr(said, "mt_broadcast"));
    CHECK(mt_send(ctx, world, x, 2, MT_F32, 0) == MT_ERR_UNSUPPORTED && strstr(said, "mt_send"));
    CHECK(mt_recv(ctx, world, x, 2, MT_F32, 0) == MT_ERR_UNSUPPORTED && strstr(said, "mt_recv"));
    CHECK(mt_send_recv(ctx, world, x, 2, 0, y, 2, 0, MT_F32) == MT_ERR_UNSUPPORTED);
    CHECK(mt_barrier(ctx, world) == MT_ERR_UNSUPPORTED && strstr(said, "mt_barrier"));
    CHECK(mt_comm_split(world, 0, 0, &out) == MT_ERR_UNSUPPORTED && !out);
    CHECK(strstr(mt_comm_last_error(world), "mt_comm_split"));
    out = world;
    CHECK(mt_comm_create_for(ctx, world, &out) == MT_ERR_UNSUPPORTED && !out);
    CHECK(strstr(said, "mt_comm_create_for") && strstr(said, "mpirun or srun"));
    CHECK(mt_comm_create_for(meta, world, &out) == MT_ERR_UNSUPPORTED && !out);
    CHECK(x[0] == 1 && y[0] == 2 && mt_comm_ledger(world).calls[MT_ALL_REDUCE] == 0);
    mt_context_destroy(ctx);
    mt_context_destroy(meta);
    return MT_SUCCESS;
}

static void test_unconnected(void **state) {
    (void)state;
    set_environment("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500");
    assert_int_equal(mt_world_from_env(NULL, try_everything, NULL), MT_SUCCESS);
    assert_null(getenv("NCCL_COMM_ID")); /* NCCL is not built in */
}

static mt_status one_alone(mt_comm *world, void *user) {
    mt_context *ctx = NULL;
    mt_comm *out = NULL, *half = NULL;
    float x[2] = {1, 2}, y[2] = {0, 0};
    (void)user;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    MT_TRY(mt_comm_create_for(ctx, world, &out));
    MT_TRY(mt_comm_split(out, 0, 0, &half));
    MT_TRY(mt_all_reduce(ctx, half, x, y, 2, MT_F32, MT_SUM));
    CHECK(y[1] == 2 && mt_comm_size(half) == 1);
    mt_context_destroy(ctx); /* the groups are left to the launcher */
    return MT_SUCCESS;
}

static void test_world_of_one(void **state) {
    (void)state;
    set_environment("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500");
    assert_int_equal(mt_world_from_env(NULL, one_alone, NULL), MT_SUCCESS);
}

/* ---- where ranks meet -------------------------------------------------------------------------------------------- */

static void test_first_host(void **state) {
    static const char *const lists[][2] = {
        {"node01", "node01"},
        {"node01,node02", "node01"},
        {"node[01-04,7]", "node01"},
        {"node[7,01-04],login", "node7"},
        {"node[001-128]", "node001"},
        {"gpu-a[3-4]-ib,x", "gpu-a3-ib"},
        {"rack[2-3]node[10-12],y", "rack2node10"},
        {"[1-2]", "1"},
        {"10.0.0.[5-9]", "10.0.0.5"},
        {"a,b[1-2", "a"}, /* only the first host is parsed */
        {"", NULL},
        {",a", NULL},
        {"n[1-2", NULL},
        {"n[", NULL},
        {"n]", NULL},
        {"n[]", NULL},
        {"n[-2]", NULL},
        {"n[,2]", NULL},
        {"n[[1]]", NULL},
        {"n1]", NULL},
    };
    char host[16];
    (void)state;
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        int ok = mti_first_host(lists[i][0], host, sizeof host);
        if (ok != (lists[i][1] != NULL) || (ok && strcmp(host, lists[i][1]) != 0))
            fail_msg("\"%s\": %d, \"%s\"", lists[i][0], ok, ok ? host : "");
    }
    assert_int_equal(mti_first_host("a23456789012345", host, sizeof host), 1); /* fits exactly */
    assert_int_equal(mti_first_host("a234567890123456", host, sizeof host), 0);
}

static void test_rendezvous(void **state) {
    static const char *const cases[][2] = {
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500", "10.0.0.1:29501"},
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=fe80::1 MASTER_PORT=1", "[fe80::1]:2"},
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=65534", "n1:65535"},
        {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=n1", ""},
        {"RANK=1 WORLD_SIZE=2 MASTER_PORT=5", ""},
        {"RANK=1 WORLD_SIZE=2 SLURM_JOB_NODELIST=n1 MASTER_PORT=5", ""}, /* rank 0 may be on another host */
        {"RANK=1 WORLD_SIZE=2 SLURM_JOB_ID=3 MASTER_ADDR=n1", ""},       /* a Slurm job may contain several such jobs */
        {"RANK=1 WORLD_SIZE=2 NCCL_COMM_ID=x:1 MASTER_ADDR=n1 MASTER_PORT=5", ""}, /* the variable is already set */
        {"PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=5", "n1:6"},
        {"SLURM_STEP_ID=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=4097 SLURM_JOB_NODELIST=n[08-11]", "n08:61443"},
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=8191 SLURM_JOB_NODELIST=n1 "
         "SLURM_STEP_NODELIST=n[5-6]",
         "n5:65535"},
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n1 MASTER_ADDR=m", "m:61441"},
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n[1-2] MASTER_PORT=9",
         "n1:10"},
        {"SLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=16 SLURM_JOB_ID=7 "
         "SLURM_STEP_NODELIST=n[1-2] "
         "PMI_RANK=9 PMI_SIZE=16",
         "n1:61447"}, /* --mpi=pmi2 */
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=1", ""},
        {"SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=n1", ""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_launch_desc d = mti_launch_defaults(NULL);
        mti_process p;
        set_environment(cases[i][0]);
        assert_int_equal(mti_find_process(&d, &p), MT_SUCCESS);
        if (strcmp(p.rendezvous, cases[i][1]) != 0) fail_msg("\"%s\": \"%s\"", cases[i][0], p.rendezvous);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_local_rank_of_threads),
        cmocka_unit_test(test_wrong_environments),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_failure),
        cmocka_unit_test(test_unconnected),
        cmocka_unit_test(test_world_of_one),
        cmocka_unit_test(test_first_host),
        cmocka_unit_test(test_rendezvous),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
