/* driver.c - stand-in for libcuda.so.1, with which cuDNN makes plans on a machine without a GPU. Test-only.

   cuDNN compiles kernels for the GPU that a description names, and loads them. Loading succeeds here, and nothing runs:
   the other functions that cuDNN's libraries look up are there, and do nothing. A table of the driver's own functions
   (cuGetExportTable) is not. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#define NOT_FOUND 500 /* CUDA_ERROR_NOT_FOUND */

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuGetErrorString(int error, const char **text) { return (void)error, *text = "stand-in", 0; }
int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }

int cuLibraryLoadData(void **library, const void *code) {
    static char loaded;
    return *library = &loaded, code ? 0 : NOT_FOUND;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return (void)name, *kernel = library, 0; }
int cuKernelGetAttribute(int *value) { return *value = 0, 0; }
int cuGetExportTable(const void **table, const void *id) { return (void)id, *table = NULL, NOT_FOUND; }

#define NOTHING(name)                                                                                                  \
    int name(void) { return 0; }
NOTHING(cuLibraryUnload)
NOTHING(cuLibraryLoadFromFile)
NOTHING(cuKernelSetAttribute)
NOTHING(cuKernelGetFunction)
NOTHING(cuModuleLoadData)
NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload)
NOTHING(cuModuleGetFunction)
NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute)
NOTHING(cuLinkCreate)
NOTHING(cuLinkAddData)
NOTHING(cuLinkComplete)
NOTHING(cuLinkDestroy)
NOTHING(cuLaunchKernel)
NOTHING(cuLaunchKernelEx)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuOccupancyMaxPotentialClusterSize)
NOTHING(cuCtxGetCurrent)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxPopCurrent)
NOTHING(cuCtxPushCurrent)
NOTHING(cuStreamGetCtx)

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *function = self ? dlsym(self, name) : NULL;
    if (self) dlclose(self);
    if (status) *status = *function ? 0 : 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return (void)version, (void)flags, *function ? 0 : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
