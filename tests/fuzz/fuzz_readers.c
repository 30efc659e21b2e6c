/* fuzz_readers.c - libFuzzer passes arbitrary bytes to the readers of safetensors files, of their index and of
   config.json.
       clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_readers.c -o fuzz_readers -lm -lpthread
       ./fuzz_readers -max_total_time=60 corpus tests/fuzz/seeds       writes new inputs to the directory corpus
   tests/checkpoints.sh runs it. tests/test_safetensors.c tests a few fixed mutations in the same way. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "readers.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mt_context_desc small = {.arena_bytes = 64};
    mt_context *ctx;
    READERS_HOLD(mt_context_create(NULL, &small, &ctx) == MT_SUCCESS);
    readers_all(ctx, data, size);
    mt_context_destroy(ctx);
    return 0;
}
