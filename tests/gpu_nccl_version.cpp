// Prints which NCCL a program loads. Exits with 77 when ranks cannot share a GPU with it, and with 1 when it is not the
// version of the argument.
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>

int main(int argc, char **argv) {
    const int wanted = argc > 1 ? atoi(argv[1]) : 0;
    int version = 0;
    Dl_info from;
    if (ncclGetVersion(&version) != ncclSuccess) return 1;
    const bool found = dladdr((void *)ncclGetVersion, &from) != 0 && from.dli_fname;
    printf("NCCL %d.%d.%d from %s\n", version / 10000, version / 100 % 100, version % 100,
           found ? from.dli_fname : "?");
    if (wanted && version != wanted) return printf("not the version that was brought along, %d\n", wanted), 1;
    if (version < 23000) return printf("ranks share a GPU from NCCL 2.30 on\n"), 77;
    return 0;
}
