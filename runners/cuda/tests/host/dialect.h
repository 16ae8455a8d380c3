// What the kernels take for granted of a device's dialect, on the host. The threads of a block take turns at its barriers, the last one first, so
// that a barrier that is missing shows.
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __shared__ static thread_local
#define __forceinline__ inline

struct Index {
    int x, y, z;
};
static thread_local Index threadIdx, blockIdx;

struct Kernel {
    void (*run)(void **arguments);
    bool indexed;
};

// A block under way.
struct Block {
    ucontext_t turns, threads[HOST_THREADS];
    bool ended[HOST_THREADS];
    const Kernel *kernel;
    void **arguments;
};
static thread_local Block block;
static thread_local char stacks[HOST_THREADS][1 << 17];

static void run_thread() {
    block.kernel->run(block.arguments);
    block.ended[threadIdx.x] = true;
}
static void __syncthreads() {
    if (HOST_THREADS > 1) swapcontext(&block.threads[threadIdx.x], &block.turns);
}
static void run_block() {
    for (int t = 0; t < HOST_THREADS; t++) {
        getcontext(&block.threads[t]);
        block.threads[t].uc_stack.ss_sp = stacks[t];
        block.threads[t].uc_stack.ss_size = sizeof stacks[t];
        block.threads[t].uc_link = &block.turns;
        makecontext(&block.threads[t], run_thread, 0);
        block.ended[t] = false;
    }
    for (bool left = true; left;) {
        left = false;
        for (int t = HOST_THREADS - 1; t >= 0; t--) {
            if (block.ended[t]) continue;
            threadIdx.x = t;
            swapcontext(&block.turns, &block.threads[t]);
            left |= !block.ended[t];
        }
    }
}

// A launch is of blocks of 128 threads. A kernel with one thread an element gets more of the smaller blocks.
extern "C" void launch_kernel(const Kernel *kernel, int x, int y, int z, void **arguments) {
    const long blocks = kernel->indexed ? (x * 128L + HOST_THREADS - 1) / HOST_THREADS : x;
    block.kernel = kernel;
    block.arguments = arguments;
    for (int c = 0; c < z; c++)
        for (int b = 0; b < y; b++)
            for (long a = 0; a < blocks; a++) {
                blockIdx = Index{(int)a, b, c};
                threadIdx = Index{0, 0, 0};
                if (HOST_THREADS > 1 && !kernel->indexed) run_block();
                else
                    for (int t = 0; t < HOST_THREADS; t++) {
                        threadIdx.x = t;
                        kernel->run(arguments);
                    }
            }
}

static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline int atomicMax(int *at, int value) {
    const int before = *at;
    *at = before < value ? value : before;
    return before;
}

template <class... A, size_t... I> static void call_with(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(A *)arguments[I]...);
}
template <class... A> static void call(void (*kernel)(A...), void **arguments) {
    call_with(kernel, arguments, std::index_sequence_for<A...>{});
}
