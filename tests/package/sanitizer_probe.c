/* A program with an overflow and a race when BAD is 1: tests/CMakeLists.txt tries whether a sanitizer finds them. */
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
    volatile char *memory = allocated; /* or the optimizer removes the fault */
    (void)argv;
    pthread_create(&thread, NULL, work, NULL);
    work(NULL);
    pthread_join(thread, NULL);
    if (BAD) memory[argc] = 1;
    memory[0] = 1;
    free(allocated);
    return shared < 0;
}
