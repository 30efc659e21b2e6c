/* test_cuda_checkpoint.cu - tests checkpoints of a GPT on GPUs: resumed training against training without a break,
   and files that a GPU writes against those of a CPU; each reads the other's.
     On GPUs:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_checkpoint.cu -lcublasLt
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT_STEPS 4
#include "mt_test_gpt.h"
#include "mt_test_resume.h"
#include "mt_test_scratch.h"

static gpt_run run_of(mt_device device, int dtype, int tp, int data, int llama) {
    gpt_run r;
    memset(&r, 0, sizeof r);
    r.device = device;
    r.dtype = (mt_dtype)dtype;
    r.tp = tp;
    r.data = data;
    r.llama = llama;
    r.loss_scale = dtype == MT_F16 ? 1024.0f : 0.0f;
    return r;
}

static void goes_on(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++) {
        gpt_run r = run_of(MT_DEVICE_CUDA, dtype, 2, 1 + dtype % 2, dtype == MT_BF16);
        gpt_run other = run_of(MT_DEVICE_CUDA, dtype, 1, 2, 0);
        resume_same_bits(r, r, in_scratch("a"));
        forget("a");
        r.llama = 0;
        r.invariant = other.invariant = 4;
        resume_same_bits(r, other, in_scratch("a"));
        forget("a");
    }
}

/* Loads the checkpoint in "a" and saves it in "b". */
typedef struct copier {
    gpt_run run;
    const char *from, *to;
} copier;

static mt_status copy_steps(gpt_worker *w, const copier *c) {
    const char *directories[2];
    mt_training_state s;
    directories[0] = c->from;
    directories[1] = c->to;
    for (int i = 0; i < 2; i++) {
        mt_checkpoint_desc d;
        mt_checkpoint *checkpoint;
        memset(&d, 0, sizeof d);
        d.directory = directories[i];
        d.optimizer = &w->optimizer;
        MT_TRY(mt_gpt_checkpoint_create(w->ctx, w->params, &w->gpt, &d, &checkpoint));
        MT_TRY(i == 0 ? mt_checkpoint_load(w->ctx, checkpoint, RESUME_AT, &s)
                      : mt_checkpoint_save(w->ctx, checkpoint, &s));
        mt_checkpoint_destroy(w->ctx, checkpoint);
    }
    return MT_SUCCESS;
}

static mt_status copy_rank(mt_comm *world, void *user) {
    const copier *c = (const copier *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, &c->run, &w);
    if (status == MT_SUCCESS) status = copy_steps(&w, c);
    gpt_close(&w);
    return status;
}

static void copies(const gpt_run *run, const char *from, const char *to) {
    copier c;
    c.run = *run;
    c.from = from;
    c.to = to;
    gpt_launch(run, copy_rank, &c);
    shell("diff -r '%s' '%s'", from, to);
}

/* A checkpoint of a GPU is loaded and saved by a CPU, and then by two GPUs. All files have the same bytes. */
static void same_files(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++) {
        gpt_run first = run_of(MT_DEVICE_CUDA, dtype, 2, 1, dtype == MT_F16);
        gpt_run cpu = run_of(MT_DEVICE_CPU, dtype, 1, 2, dtype == MT_F16);
        gpt_run gpus = run_of(MT_DEVICE_CUDA, dtype, 4, 1, dtype == MT_F16);
        resume_same_bits(first, first, in_scratch("a"));
        copies(&cpu, in_scratch("a"), in_scratch("b"));
        copies(&gpus, in_scratch("b"), in_scratch("c"));
        forget("a");
        forget("b");
        forget("c");
    }
}

static int open_all(void **state) {
    (void)state;
    return scratch_open("test_cuda_checkpoint");
}

static int close_all(void **state) {
    (void)state;
    return scratch_close();
}

int main() {
    const struct CMUnitTest tests[] = {cmocka_unit_test(goes_on), cmocka_unit_test(same_files)};
    return cmocka_run_group_tests(tests, open_all, close_all);
}
