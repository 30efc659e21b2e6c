/* When BAD is 1, this program has a heap overflow and a data race. With it tests/CMakeLists.txt checks that a sanitizer
   works on this machine. */
#include <pthread.h>
#include <stdlib.h>

static int shared;

static void *work(void *x) {
    int i;
    for (i = 0; BAD && i < 1000; i++) shared++;
    return x;
}

int main(int argc, char **argv) {
    pthread_t thread;
    char *allocated = (char *)malloc((size_t)argc);
    volatile char *memory = allocated; /* without volatile, the optimizer removes the overflow */
    (void)argv;
    pthread_create(&thread, NULL, work, NULL);
    work(NULL);
    pthread_join(thread, NULL);
    if (BAD) memory[argc] = 1;
    memory[0] = 1;
    free(allocated);
    return shared < 0;
}
