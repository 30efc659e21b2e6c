/* transformers_peer - what tests/transformers_peer.py has done by megatron.h:

     transformers_peer SOURCE TO TENSOR STAGES KIND

   creates the model that SOURCE/config.json describes, on TENSOR x STAGES ranks. KIND is `import` (its weights are
   those of SOURCE) or `new` (its weights are new). Saves it to TO/step-00000005, and writes its logits for the tokens
   in SOURCE/expected.safetensors to TO/logits.f32 and, of a BERT, those of the sentence order to TO/order.f32. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 2, SEQ = 12, TOKENS = SEQUENCES * SEQ, VOCAB = 61 };

typedef struct job {
    const char *source, *to;
    int tp, pp, import;
} job;

/* One rank. */
typedef struct worker {
    const job *j;
    mt_context *ctx;
    mt_grid grid;
    mt_params *params;
    mt_checkpoint *checkpoint;
    mt_gpt gpt;
    mt_bert bert;
    int is_bert;
} worker;

/* Reads whole numbers, which lie there as floats. */
static mt_status read_numbers(const worker *w, const char *name, int count, int32_t *out) {
    char path[MT_PATH_MAX];
    float x[TOKENS];
    mt_safetensors *s;
    mt_status status;
    snprintf(path, sizeof path, "%s/expected.safetensors", w->j->source);
    MT_TRY(mt_safetensors_open(w->ctx, path, &s));
    status = mt_safetensors_read(w->ctx, mt_safetensors_find(s, name), x);
    mt_safetensors_close(s);
    for (int i = 0; status == MT_SUCCESS && i < count; i++) out[i] = (int32_t)x[i];
    return status;
}

static mt_status write_floats(const worker *w, const char *name, const float *x, size_t count) {
    char path[MT_PATH_MAX];
    FILE *f;
    size_t written;
    if (mt_comm_rank(w->grid.world) != 0) return MT_SUCCESS;
    snprintf(path, sizeof path, "%s/%s", w->j->to, name);
    f = fopen(path, "wb");
    if (!f) return MT_ERR_IO;
    written = fwrite(x, sizeof *x, count, f);
    return fclose(f) == 0 && written == count ? MT_SUCCESS : MT_ERR_IO;
}

static mt_status compute(worker *w) {
    static const size_t bytes = TOKENS * VOCAB * sizeof(float);
    mt_batch batch = {.sequences = SEQUENCES, .seq = SEQ};
    int32_t ids[TOKENS], types[TOKENS], lengths[SEQUENCES];
    float order[SEQUENCES * 2], *x = (float *)malloc(bytes);
    mt_tensor logits = mt_tensor_f32(x, TOKENS, VOCAB);
    mt_status status = x ? read_numbers(w, "ids", TOKENS, ids) : MT_ERR_MEMORY;
    if (status == MT_SUCCESS && w->is_bert) {
        status = read_numbers(w, "types", TOKENS, types);
        if (status == MT_SUCCESS) status = read_numbers(w, "lengths", SEQUENCES, lengths);
        batch.token_types = types;
        batch.lengths = lengths;
        if (status == MT_SUCCESS)
            status = mt_bert_logits(w->ctx, &w->bert, &batch, ids, logits, mt_tensor_f32(order, SEQUENCES, 2));
        if (status == MT_SUCCESS) status = write_floats(w, "order.f32", order, SEQUENCES * 2);
    } else if (status == MT_SUCCESS) status = mt_gpt_logits(w->ctx, &w->gpt, &batch, ids, logits);
    if (status == MT_SUCCESS) status = write_floats(w, "logits.f32", x, TOKENS * VOCAB);
    free(x);
    return status;
}

static mt_status create_model(worker *w) {
    mt_checkpoint_desc files = {.directory = w->j->to};
    mt_gpt_desc gpt;
    mt_bert_desc bert;
    if (w->is_bert) {
        MT_TRY(mt_bert_desc_read(w->ctx, w->j->source, &bert));
        MT_TRY(mt_bert_create(w->ctx, w->params, &bert, &w->bert));
        return mt_bert_checkpoint_create(w->ctx, w->params, &w->bert, &files, &w->checkpoint);
    }
    MT_TRY(mt_gpt_desc_read(w->ctx, w->j->source, &gpt));
    MT_TRY(mt_gpt_create(w->ctx, w->params, &gpt, &w->gpt));
    return mt_gpt_checkpoint_create(w->ctx, w->params, &w->gpt, &files, &w->checkpoint);
}

static mt_status rank_main(mt_comm *world, void *user) {
    worker w = {.j = (const job *)user};
    mt_grid_desc shape = {.tp = w.j->tp, .pp = w.j->pp};
    mt_training_state state = {.step = 5};
    w.is_bert = strstr(w.j->source, "bert") != NULL;
    MT_TRY(mt_context_create(world, NULL, &w.ctx));
    MT_TRY(mt_grid_create(world, &shape, &w.grid));
    MT_TRY(mt_params_create(w.ctx, &w.grid, &w.params));
    MT_TRY(create_model(&w));
    if (w.j->import) MT_TRY(mt_checkpoint_import(w.ctx, w.checkpoint, w.j->source));
    else MT_TRY(mt_params_init(w.ctx, w.params, 3));
    MT_TRY(mt_checkpoint_save(w.ctx, w.checkpoint, &state));
    MT_TRY(compute(&w));
    mt_checkpoint_destroy(w.ctx, w.checkpoint);
    mt_params_destroy(w.params);
    mt_grid_destroy(&w.grid);
    mt_context_destroy(w.ctx);
    return MT_SUCCESS;
}

int main(int argc, char **argv) {
    mt_launch_desc launch = {.no_pinning = 1};
    job j;
    if (argc != 6) return 1;
    j.source = argv[1];
    j.to = argv[2];
    j.tp = atoi(argv[3]);
    j.pp = atoi(argv[4]);
    j.import = strcmp(argv[5], "import") == 0;
    launch.ranks = j.tp * j.pp;
    return mt_launch(&launch, rank_main, &j) != MT_SUCCESS;
}
