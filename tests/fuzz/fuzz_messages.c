/* fuzz_messages.c - libFuzzer passes arbitrary bytes to the connections over which ranks compare their calls.
       clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_messages.c -o fuzz_messages -lm -lpthread
       ./fuzz_messages -max_total_time=60
   tests/checkpoints.sh runs it. tests/test_messages.c passes inputs of a fixed seed in the same way. */

#include "messages.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    messages_all(data, size);
    return 0;
}
