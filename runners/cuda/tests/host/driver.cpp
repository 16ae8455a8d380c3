// Stands in for libcuda.so.1: one device whose memory is the host's and whose kernels are functions of a shared object. Calls are those that
// a session on one device makes; everything is done when a call returns.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

typedef int Result;
typedef unsigned long long Pointer;
enum { SUCCESS = 0, NOT_FOUND = 500, LAUNCH_FAILED = 719, INVALID_IMAGE = 200 };
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76 };

struct Module {
    void *(*find)(const char *name);
    void (*launch)(void *kernel, int x, int y, int z, void **arguments);
};
struct Function {
    Module *module;
    void *kernel;
};

static void *const SOMETHING = (void *)1;
static const size_t MEMORY = (size_t)1 << 32;

extern "C" {
Result cuInit(unsigned) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
Result cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
Result cuDeviceGetName(char *name, int size, int) { return snprintf(name, size, "host memory"), SUCCESS; }
Result cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = MEMORY, SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int) {
    // an Ampere with little shared memory: no kernel of the matrix unit is asked for
    *value = attribute == MAJOR ? 8 : attribute == MINOR ? 0 : attribute == MULTIPROCESSORS ? 4 : 100000;
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void **context, int) { return *context = SOMETHING, SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
Result cuCtxSetCurrent(void *) { return SUCCESS; }
Result cuDeviceGetDefaultMemPool(void **pool, int) { return *pool = SOMETHING, SUCCESS; }
Result cuMemPoolSetAttribute(void *, int, void *) { return SUCCESS; }
Result cuMemPoolGetAttribute(void *, int, void *value) { return *(Pointer *)value = 0, SUCCESS; }
Result cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = MEMORY, SUCCESS; }
Result cuStreamCreate(void **stream, unsigned) { return *stream = SOMETHING, SUCCESS; }
Result cuStreamDestroy_v2(void *) { return SUCCESS; }
Result cuStreamSynchronize(void *) { return SUCCESS; }
Result cuMemAllocAsync(Pointer *memory, size_t bytes, void *) { return *memory = (Pointer)malloc(bytes), SUCCESS; }
Result cuMemFreeAsync(Pointer memory, void *) { return free((void *)memory), SUCCESS; }
Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t bytes, void *) { return memcpy((void *)to, from, bytes), SUCCESS; }
Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, void *) { return memcpy(to, (void *)from, bytes), SUCCESS; }
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void *) { return memmove((void *)to, (void *)from, bytes), SUCCESS; }
Result cuMemsetD8Async(Pointer to, unsigned char byte, size_t bytes, void *) { return memset((void *)to, byte, bytes), SUCCESS; }
Result cuGetErrorName(Result, const char **name) { return *name = "an error of the host", SUCCESS; }
Result cuGetErrorString(Result code, const char **text) {
    return *text = code == LAUNCH_FAILED ? "this kernel is not played on the host" : "see standard error", SUCCESS;
}

// The image is the name of a shared object.
Result cuModuleLoadData(void **module, const void *image) {
    void *object = dlopen((const char *)image, RTLD_NOW | RTLD_LOCAL);
    if (!object) return fprintf(stderr, "%s\n", dlerror()), INVALID_IMAGE;
    Module *made = new Module;
    made->find = (void *(*)(const char *))dlsym(object, "find_kernel");
    made->launch = (void (*)(void *, int, int, int, void **))dlsym(object, "launch_kernel");
    return *module = made, SUCCESS;
}
Result cuModuleUnload(void *) { return SUCCESS; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
    Module *of = (Module *)module;
    return *function = new Function{of, of->find(name)}, SUCCESS;
}
Result cuFuncSetAttribute(void *, int, int) { return SUCCESS; }
Result cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned, unsigned, unsigned, unsigned, void *,
                      void **arguments, void **) {
    Function *of = (Function *)function;
    if (!of->kernel) return LAUNCH_FAILED;
    return of->module->launch(of->kernel, (int)x, (int)y, (int)z, arguments), SUCCESS;
}
}
