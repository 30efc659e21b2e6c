/* mt_test_resume.h - what test_checkpoint.c and test_cuda_checkpoint.cu share: a run that trains the GPT of
   mt_test_gpt.h and saves a checkpoint in the middle, and a run that loads this checkpoint and trains the rest. C and
   C++. Include it after mt_test_gpt.h. */

#ifndef MT_TEST_RESUME_H
#define MT_TEST_RESUME_H

#define RESUME_AT (GPT_STEPS / 2)

/* resumes = 0: all steps, with a checkpoint in the middle; 1: loads this checkpoint and runs the rest of the steps. */
typedef struct half_run {
    gpt_run run;
    const char *directory;
    int resumes;
} half_run;

static inline mt_status half_steps(gpt_worker *w, const half_run *h) {
    mt_checkpoint_desc c;
    mt_training_state s;
    mt_checkpoint *checkpoint;
    memset(&c, 0, sizeof c);
    memset(&s, 0, sizeof s);
    c.directory = h->directory;
    c.optimizer = &w->optimizer;
    MT_TRY(mt_gpt_checkpoint_create(w->ctx, w->params, &w->gpt, &c, &checkpoint));
    for (int step = 0; !h->resumes && step < RESUME_AT; step++) MT_TRY(gpt_step(w, step));
    s.step = RESUME_AT;
    s.scaler = w->scaler;
    MT_TRY(h->resumes ? mt_checkpoint_load(w->ctx, checkpoint, RESUME_AT, &s)
                      : mt_checkpoint_save(w->ctx, checkpoint, &s));
    mt_checkpoint_destroy(w->ctx, checkpoint);
    w->scaler = s.scaler;
    for (int step = RESUME_AT; step < GPT_STEPS; step++) MT_TRY(gpt_step(w, step));
    return gpt_keep_weights(w);
}

static inline mt_status half_rank(mt_comm *world, void *user) {
    const half_run *h = (const half_run *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, &h->run, &w);
    if (status == MT_SUCCESS) status = half_steps(&w, h);
    gpt_close(&w);
    return status;
}

/* Main thread: checks that `after`, which loads the checkpoint of `before`, ends with the same bits as `before`. */
static inline void resume_same_bits(gpt_run before, gpt_run after, const char *directory) {
    static gpt_result whole, rest;
    half_run h;
    memset(&h, 0, sizeof h);
    memset(&whole, 0, sizeof whole);
    memset(&rest, 0, sizeof rest);
    h.directory = directory;
    h.run = before;
    h.run.out = &whole;
    gpt_launch(&h.run, half_rank, &h);
    h.run = after;
    h.run.out = &rest;
    h.resumes = 1;
    gpt_launch(&h.run, half_rank, &h);
    memcpy(rest.loss, whole.loss, RESUME_AT * sizeof *rest.loss);
    memcpy(rest.norm, whole.norm, RESUME_AT * sizeof *rest.norm);
    for (int i = 0; i < GPT_STEPS; i++)
        if (memcmp(&whole.loss[i], &rest.loss[i], sizeof(float)) != 0)
            fail_msg("%s: step %d: loss %.9g, must be %.9g", gpt_name(&after), i, (double)rest.loss[i],
                     (double)whole.loss[i]);
    if (memcmp(&whole, &rest, GPT_SAME_BYTES) != 0) fail_msg("%s: other weights or loss scaler", gpt_name(&after));
}

#endif /* MT_TEST_RESUME_H */
