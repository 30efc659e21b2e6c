/* checkpoints_peer - what tests/checkpoints_peer.py has done by megatron.h: see there. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The numbers that the script expects, of which the registry has each shard. */
static mt_status fill(mt_context *ctx, mt_params *params) {
    for (int i = 0; i < mt_params_count(params); i++) {
        const mt_param *p = mt_params_at(params, i);
        int64_t n = p->desc.rows * p->desc.cols;
        float *x = (float *)malloc((size_t)n * sizeof *x);
        if (!x) return MT_ERR_MEMORY;
        for (int64_t k = 0; k < n; k++) x[k] = (float)((k * 37 + i * 101) % 997) / 512.0f - 1.0f;
        mt_status status = mt_param_scatter(ctx, p, x, p->value);
        free(x);
        MT_TRY(status);
    }
    return MT_SUCCESS;
}

static mt_status save_rank(mt_comm *world, void *user) {
    mt_grid_desc shape = {.tp = 2};
    mt_gpt_desc d = {.vocab = 11, .layers = 2, .max_seq = 6, .layer = {.hidden = 8, .heads = 2, .ffn = 12}};
    mt_training_state state = {.step = 5, .note = "a \"note\"\n\xc3\xa9"};
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    mt_gpt gpt;
    mt_optimizer optimizer;
    mt_checkpoint_desc files = {.directory = (const char *)user, .optimizer = &optimizer};
    mt_checkpoint *checkpoint;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    MT_TRY(mt_grid_create(world, &shape, &grid));
    MT_TRY(mt_params_create(ctx, &grid, &params));
    MT_TRY(mt_gpt_create(ctx, params, &d, &gpt));
    MT_TRY(mt_params_init(ctx, params, 1));
    MT_TRY(fill(ctx, params));
    MT_TRY(mt_optimizer_create(ctx, params, NULL, &optimizer));
    MT_TRY(mt_gpt_checkpoint_create(ctx, params, &gpt, &files, &checkpoint));
    MT_TRY(mt_checkpoint_save(ctx, checkpoint, &state));
    mt_checkpoint_destroy(ctx, checkpoint);
    mt_optimizer_destroy(ctx, &optimizer);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void print_string(const char *s) {
    putchar('"');
    for (; *s; s++) {
        if ((unsigned char)*s < 0x20 || *s == '"' || *s == '\\') printf("\\u%04x", (unsigned)*s);
        else putchar(*s);
    }
    putchar('"');
}

/* Names, shapes and floats, as JSON. */
static mt_status list(mt_context *ctx, const char *path) {
    mt_safetensors *s;
    MT_TRY(mt_safetensors_open(ctx, path, &s));
    printf("{");
    for (int i = 0; i < mt_safetensors_count(s); i++) {
        const mt_safetensors_tensor *t = mt_safetensors_at(s, i);
        float *x = (float *)calloc((size_t)t->bytes + 1, sizeof *x);
        int floats = x && mt_safetensors_read(ctx, t, x) == MT_SUCCESS;
        if (i > 0) putchar(',');
        print_string(t->name);
        printf(":{\"shape\":[");
        for (int k = 0; k < t->dims; k++) printf("%s%lld", k > 0 ? "," : "", (long long)t->shape[k]);
        printf("],\"values\":[");
        for (int64_t k = 0; floats && k < t->bytes / (t->dtype[1] == '1' || t->dtype[0] == 'B' ? 2
                                                      : t->dtype[1] == '3'                     ? 4
                                                                                               : 8);
             k++)
            printf("%s%.9g", k > 0 ? "," : "", (double)x[k]);
        printf("]}");
        free(x);
    }
    printf("}\n");
    mt_safetensors_close(s);
    return MT_SUCCESS;
}

/* Writes tensors of several types with the writer. The script has the same. */
static mt_status write_file(mt_context *ctx, const char *path) {
    static const mt_setting about[] = {{"key", "v\xc3\xa4lue"}, {"k2", ""}};
    const int64_t shape[] = {3, 5}, four[] = {4};
    const double d[4] = {1.0 / 3, -2, 1e300, 0};
    float f[15];
    mt_safetensors_writer *w;
    for (int i = 0; i < 15; i++) f[i] = (float)i / 4;
    MT_TRY(mt_safetensors_create(ctx, path, about, 2, &w));
    MT_TRY(mt_safetensors_add(ctx, w, "na\xc3\xafve \"name\"\\\n", "F32", 2, shape));
    MT_TRY(mt_safetensors_add(ctx, w, "d", "F64", 1, four));
    MT_TRY(mt_safetensors_write(ctx, w, f, sizeof f));
    MT_TRY(mt_safetensors_write(ctx, w, d, sizeof d));
    MT_TRY(mt_safetensors_finish(ctx, w));
    mt_safetensors_destroy(w);
    return MT_SUCCESS;
}

/* Of each file named on stdin, whether it is one. */
static mt_status judge(mt_context *ctx) {
    char path[1024];
    while (scanf("%1023s", path) == 1) {
        mt_safetensors *s = NULL;
        printf("%s\n", mt_safetensors_open(ctx, path, &s) == MT_SUCCESS ? "good" : "bad");
        mt_safetensors_close(s);
    }
    return MT_SUCCESS;
}

int main(int argc, char **argv) {
    mt_launch_desc two = {.ranks = 2, .no_pinning = 1};
    mt_context *ctx = NULL;
    mt_status status = mt_context_create(NULL, NULL, &ctx);
    if (argc == 3 && strcmp(argv[1], "save") == 0) status = mt_launch(&two, save_rank, argv[2]);
    else if (argc == 3 && strcmp(argv[1], "list") == 0) status = list(ctx, argv[2]);
    else if (argc == 3 && strcmp(argv[1], "write") == 0) status = write_file(ctx, argv[2]);
    else if (argc == 2 && strcmp(argv[1], "judge") == 0) status = judge(ctx);
    else status = MT_ERR_ARGUMENT;
    if (status != MT_SUCCESS) fprintf(stderr, "checkpoints_peer: %s: %s\n", mt_status_name(status), mt_last_error(ctx));
    mt_context_destroy(ctx);
    return status != MT_SUCCESS;
}
